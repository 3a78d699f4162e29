"""The house: which rooms there are, and which may import which.

Every import counts, also those inside functions and those for types alone. `pytest
tests/test_rooms.py -s` prints the counts.
"""

import ast
import functools
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

import lapa2_interp

PACKAGE = Path(lapa2_interp.__file__).parent
ANALYSES = Path(__file__).resolve().parents[1] / "analyses"
SHARED = (
    "errors", "commands", "_util", "files", "plots", "progress", "table_formats", "page", "stats",
)  # fmt: skip
"""What any room may use."""
ROOMS = (
    *SHARED, "bias", "models", "tasks", "prefixes", "methods", "attention", "scoring", "generation", "circuits", "serving", "runs", "propositions", "report", "cli",
)  # fmt: skip
"""In the order of CONTRIBUTING.md: each imports only from those before it. A room is a folder of
the package, or a module."""
FOLDERS = [name for name in ROOMS if (PACKAGE / name).is_dir()]
FACE = "lapa2_interp"
"""The package itself, which imports from any room and which none imports."""
VERSION = "lapa2_interp._util.version"
"""What an `__init__` may import of the package when it is imported itself. Its names stand in the
stub beside it (`lazy_loader.attach_stub`)."""
MOST_ARROWS, MOST_LINES = 67, 600


def name_of(file):
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in PACKAGE.rglob("*.py")}
TREES = {name: ast.parse(file.read_text("utf-8")) for name, file in FILES.items()}


@functools.cache
def imports(module):
    """Modules of the package that a module imports anywhere, the package itself included."""
    modules = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name in FILES}
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                modules |= {full_name if full_name in FILES else node.module} & set(FILES)
    return modules - {module}


def room(module):
    return module.split(".")[1] if module not in (FACE, f"{FACE}.__main__") else FACE


@functools.cache
def arrows():
    """By room, the other rooms that it imports from."""
    targets = defaultdict(set)
    for module in FILES:
        targets[room(module)] |= {room(imported) for imported in imports(module)} - {room(module)}
    return targets


@functools.cache
def circles():
    """Circles of modules. The `__init__` of a room counts as a module of its own: it names others,
    and imports none of them before one is used."""
    done, path, chains = set(), [], []

    def visit(module):
        if module in path:
            chains.append(" -> ".join([*path[path.index(module) :], module]))
        if module in done or module in path:
            return
        path.append(module)
        for imported in sorted(imports(module)):
            visit(imported)
        path.pop()
        done.add(module)

    for module in FILES:
        visit(module)
    return chains


def test_the_house(capsys):
    inside = {name: others for name, others in arrows().items() if name != FACE}
    upward = [
        f"{one} -> {target}"
        for one, others in inside.items()
        for target in others
        if target == FACE or ROOMS.index(target) >= ROOMS.index(one)
    ]
    count = sum(len(others - {*SHARED}) for others in inside.values())
    lines = sum(len(file.read_text("utf-8").splitlines()) for file in FILES.values())
    with capsys.disabled():
        print(f"\n{len(inside)} rooms, {len(FILES)} modules, {lines} lines")
        print(
            f"{count} arrows between rooms besides those to what all share, {len(arrows()[FACE])} from the face"
        )
        print(f"{len(upward)} upward, {len(circles())} circles of modules")
        for one in ROOMS:
            print(f"  {one:<11} {' '.join(target for target in ROOMS if target in arrows()[one])}")
    assert set(inside) == set(ROOMS)
    assert count <= MOST_ARROWS
    assert not upward
    assert not circles()


def test_nothing_of_the_package_imports_the_analyses():
    imported = {
        (module, name)
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not [pair for pair in imported if pair[1].partition(".")[0] == "analyses"]


def test_no_script_imports_what_is_private():
    """What scripts need of the package is public."""
    private = [
        f"{file.relative_to(ANALYSES)}: {module}"
        for file in ANALYSES.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom | ast.Import)
        for module in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if "lapa2_interp._" in module or (module.startswith("_") and not module.endswith("__"))
    ]
    assert not private


def test_no_file_is_long():
    long = {
        name: len(file.read_text("utf-8").splitlines())
        for name, file in FILES.items()
        if len(file.read_text("utf-8").splitlines()) > MOST_LINES
    }
    assert not long


@pytest.mark.parametrize("module", [FACE, *(f"{FACE}.{name}" for name in FOLDERS)])
def test_an_init_is_empty_or_lazy(module):
    """So that importing one module of a room imports no other, and the help of the command line no
    torch."""
    for node in TREES[module].body:
        if isinstance(node, ast.ImportFrom):
            known = node.module in (VERSION, "__future__")
            assert known, f"{module} imports {node.module}"
        else:
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef), ast.unparse(node)


@pytest.mark.parametrize("module", ["", *FOLDERS])
def test_every_lazy_name_is_there(module):
    package = __import__("importlib").import_module(f"{FACE}.{module}".rstrip("."))
    names = getattr(package, "__all__", [])
    assert len(set(names)) == len(names)
    assert set(names) <= set(dir(package))
    for name in names:
        getattr(package, name)
    with pytest.raises(AttributeError, match="generat"):
        package.generat  # noqa: B018


def test_no_import_of_the_package_hides_in_a_function():
    """Only the command line imports where it is used, so that --help needs no torch."""
    hidden = []
    for module, tree in TREES.items():
        if room(module) == "cli":
            continue
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            for node in ast.walk(function):
                names = []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module]
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                hidden += [(module, name) for name in names if name.split(".")[0] == FACE]
    assert not hidden


def test_no_module_evaluates_or_reads_source():
    """Of the package itself: a formula of `methods.arithmetic` is a user's."""
    names = {"eval", "exec", "locals", "getsource", "getsourcelines"}
    found_in = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in names and (node.args or isinstance(node.func, ast.Name)))
        or (isinstance(node, ast.Import) and any(alias.name == "ast" for alias in node.names))
    }  # fmt: skip
    assert found_in == {f"{FACE}.methods.arithmetic"}


def test_the_tests_stand_in_the_same_rooms():
    folders = {
        folder.name for folder in Path(__file__).parent.iterdir() if any(folder.glob("test_*.py"))
    }
    assert folders - {"faults", "lab"} <= set(ROOMS)


def test_the_public_names_are_these():
    """What the first day needs; one more or less is a decision."""
    assert set(lapa2_interp.__all__) == {
        "load_model", "Layout", "PaddedRows", "Augmentation", "recipe", "augmented", "generate", "teacher_forced", "load_run", "steer", "Selection", "Cell",
        "Lapa2Error", "methods", "circuits", "scoring", "tasks", "recipes", "plots", "theory",
    }  # fmt: skip


@pytest.mark.parametrize("module", FOLDERS)
def test_no_lazy_name_is_that_of_a_module_beside_it(module):
    """The import of the module would put itself in the place of the name."""
    package = __import__("importlib").import_module(f"{FACE}.{module}")
    beside = {file.stem for file in (PACKAGE / module).glob("*.py")}
    for name in beside & set(getattr(package, "__all__", ())):
        assert getattr(package, name).__name__ == f"{FACE}.{module}.{name}"


NOTEBOOKS = sorted((ANALYSES / "notebooks").glob("*.py"))
MOST_NAMES = 10


def public(name):
    """What others may use of the package, or of a room: its names and, of the package, its rooms."""
    module = import_module(name)
    if name == FACE:
        return {*module.__all__, *(room for room in ROOMS if not room.startswith("_"))}
    listed = getattr(module, "__all__", None)
    return (
        {name for name in dir(module) if not name.startswith("_")}
        if listed is None
        else set(listed)
    )


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_imports_few_names_and_none_from_inside_a_room(file):
    """At most ten names in all. Those of the package are its own or a room's public ones, also where
    a room is imported and its name is read from it."""
    tree = ast.parse(file.read_text("utf-8"))
    names, rooms = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith(FACE)]
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names]
            if node.module.startswith(FACE):
                assert node.module.count(".") <= 1, f"{node.module} is inside a room"
                assert {alias.name for alias in node.names} <= public(node.module)
                rooms |= {
                    alias.asname or alias.name: f"{FACE}.{alias.name}"
                    for alias in node.names
                    if node.module == FACE and alias.name in ROOMS
                }
    assert len(names) <= MOST_NAMES, names
    used = {
        (rooms[node.value.id], node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in rooms
    }
    assert not [(room, name) for room, name in used if name not in public(room)]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_says_its_running_time_before_its_first_code(file):
    first, _, _ = file.read_text("utf-8").partition("# %%\n")
    assert "**Running time:** about " in first
