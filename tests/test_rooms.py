"""The house: who may import whom. Every import counts, also those inside functions and those for
types alone."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import lapa2_interp

PACKAGE = Path(lapa2_interp.__file__).parent
CORE = (
    "errors", "stats", "progress", "files", "machine", "plots", "page", "augmentation", "recipes", "layout", "theory", "synthetic",
    "packed", "loaded", "tasks", "methods", "soft_prefix", "attention", "models", "trace", "cell", "decoding", "prefixes", "scoring",
    "kit", "circuits",
)  # fmt: skip
"""Rooms in the order of docs/architecture.md; a room is a module or a folder of the package."""
RUNS, PAPER, FRONT = ("runs",), ("paper",), ("report", "viewer", "cli")
ORDER = (*CORE, *RUNS, *PAPER, *FRONT)


def name_of(file):
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in PACKAGE.rglob("*.py")}


def imports(module):
    """Modules of the package that a module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name in FILES}
        if isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                found |= {whole if whole in FILES else node.module} & set(FILES)
    return found - {"lapa2_interp", module}


def room(module):
    return module.split(".")[1]


def edges():
    found = defaultdict(set)
    for module in FILES:
        for other in imports(module) if module != "lapa2_interp" else ():
            if room(other) != room(module):
                found[room(module)].add(room(other))
    return found


def test_every_room_has_its_place():
    assert {room(module) for module in FILES if module != "lapa2_interp"} == set(ORDER)
    assert len(ORDER) <= 31


def test_a_room_imports_only_what_stands_above_it():
    upward = [
        (one, other)
        for one, others in edges().items()
        for other in others
        if ORDER.index(other) > ORDER.index(one)
    ]
    assert not upward


def test_no_circle_of_modules():
    """Also within a room, where submodules may import from their package, and it from them, but not
    both."""
    done, path = set(), []

    def visit(module):
        if module in path:
            pytest.fail(" -> ".join([*path[path.index(module) :], module]))
        if module in done:
            return
        path.append(module)
        for other in sorted(imports(module)):
            visit(other)
        path.pop()
        done.add(module)

    for module in FILES:
        if module != "lapa2_interp":
            visit(module)


def test_no_import_of_the_package_hides_in_a_function():
    """Only the command line imports where it is used, so that --help needs no torch."""
    hidden = []
    for module, file in FILES.items():
        if room(f"{module}.") in ("cli",) or module == "lapa2_interp":
            continue
        tree = ast.parse(file.read_text("utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            for node in ast.walk(function):
                names = []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module]
                if isinstance(node, ast.Import):
                    names = [each.name for each in node.names]
                hidden += [(module, name) for name in names if name.split(".")[0] == "lapa2_interp"]
    assert not hidden


def test_the_public_names_are_these():
    """What a notebook needs without a deep import; one more or less is a decision."""
    assert set(lapa2_interp.__all__) == {
        "Augmentation", "Cell", "Lapa2Error", "Layout", "Run", "TransformersModel", "__version__", "augmented", "find_prefix", "generate",
        "head_table", "load_model", "load_run", "load_task", "load_tokenizer", "local_ratio", "method", "model_card", "pooled",
        "prefix_token_table", "probe", "soft_inputs", "step_table", "teacher_forced", "view",
    }  # fmt: skip
    for name in lapa2_interp.__all__:
        assert getattr(lapa2_interp, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        lapa2_interp.generat  # noqa: B018
