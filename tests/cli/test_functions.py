"""Commands that are functions of the package: each is declared once, in Python."""

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.cli import functions, options
from lapa2_interp.cli.app import COMMANDS, FAMILIES, app, definition
from lapa2_interp.cli.functions import arguments_of, command_of, hands_on, option_type
from lapa2_interp.generation.settings import CellSettings

PATHS = [
    path
    for members in (*COMMANDS.values(), *(members for _, members in FAMILIES.values()))
    for path in members.split()
    if path not in FAMILIES
]
FUNCTIONS = {
    path: ast.literal_eval(node.value.args[0])
    for path in PATHS
    if isinstance(node := definition(f"cli.{path}"), ast.Assign)
}
"""Commands with the functions of the package that they are."""
NOT_GIVEN = {"notify", "report", "model of view"}
"""Parameters that a command line cannot give: functions, and a loaded model."""


def function_of(path):
    module, _, name = FUNCTIONS[path].partition(":")
    return getattr(import_module(f"lapa2_interp.{module}"), name)


def test_commands_that_are_functions():
    assert set(FUNCTIONS) >= {
        "steer:steer", "view:view", "sweep:sweep", "score:score", "paper:propositions",
        "score:train", "score:sheets", "score:answers", "word_lists:word_lists",
        "prefix:train", "prefix:evaluate", "prefix:score", "prefix:import_",
    }  # fmt: skip


@pytest.mark.parametrize("path", FUNCTIONS)
def test_every_option_is_a_parameter_and_every_parameter_an_option(path):
    """With the same default, where None stands for no values."""
    parameters = {
        name: parameter.default
        for name, parameter in inspect.signature(function_of(path)).parameters.items()
        if name not in NOT_GIVEN and f"{name} of {path.partition(':')[2]}" not in NOT_GIVEN
    }
    arguments = {one.name: one.default for one in arguments_of(FUNCTIONS[path])}
    assert set(arguments) == set(parameters)
    for name, default in parameters.items():
        assert arguments[name] == (() if default is None and arguments[name] == () else default)


@pytest.mark.parametrize("path", FUNCTIONS)
def test_every_parameter_has_a_line_of_help(path):
    from docstring_parser import parse

    documented = {parameter.arg_name for parameter in parse(function_of(path).__doc__).params}
    assert documented == set(inspect.signature(function_of(path)).parameters)


HANDED_ON = {
    "circuits": ("circuits.study:run_study", {"folder", "report", "placebo"}),
    "select": ("circuits.selection:select", {"contrast"}),
    "fading": ("circuits.fading:measure_fading", {"contrast", "heads", "batch_size", "progress"}),
}
"""Commands that have options of a function, and the parameters that are none; --placebo loads a
model for the parameter."""


@pytest.mark.parametrize("name", HANDED_ON)
def test_commands_have_the_options_of_a_function_with_their_help(name):
    """Beside their own; a model's texts are `ContrastOptions`."""
    path, without = HANDED_ON[name]
    module, _, function = path.partition(":")
    function = getattr(import_module(f"lapa2_interp.{module}"), function)
    command = getattr(import_module("lapa2_interp.cli.circuits"), name)
    arguments = inspect.signature(command).parameters
    of_texts = {field.name: field.default for field in options.fields_of(options.ContrastOptions)}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in without | {"model", *of_texts}:
            assert parameter.name in {"model", "placebo"} or parameter.name not in arguments
            continue
        assert arguments[parameter.name].default == parameter.default
        assert get_args(arguments[parameter.name].annotation)[-1].help


def test_texts_of_circuits_have_the_defaults_of_contrast_sets():
    declared = inspect.signature(ContrastSet.of).parameters
    for field in options.fields_of(options.ContrastOptions):
        if field.name not in ("task", "prompt"):
            assert declared[field.name].default == field.default


def test_what_is_given_of_handed_on_options_is_given_to_the_command():
    seen = {}

    @hands_on("circuits.selection:select", without=("pro_aug",))
    def command(model: str, /, *, seed: int = 3, options: functions.Values) -> None:
        seen.update(options, model=model, seed=seed)

    assert "pro_aug" not in inspect.signature(command).parameters
    command("planted", heads=4, metric="js", positions="0,2-4", seed=3)
    assert seen == {"model": "planted", "heads": 4, "positions": "0,2-4", "seed": 3}


def test_every_setting_of_a_cell_is_an_option_of_generate():
    of_settings = {field.name for field in options.fields_of(options.SettingOptions)}
    of_bias = {field.name for field in options.fields_of(options.AugmentationOptions)}
    assert of_settings | of_bias == {*CellSettings.model_fields, "selection"}
    assert not of_settings & of_bias


def test_no_other_command_hands_all_of_its_parameters_on_one_by_one():
    """A function that only repeats another's parameters is that function (`command_of`)."""
    for path in set(PATHS) - set(FUNCTIONS):
        node = definition(f"cli.{path}")
        names = {
            one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        }
        for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
            handed_on = {
                keyword.arg
                for keyword in call.keywords
                if isinstance(keyword.value, ast.Name) and keyword.value.id == keyword.arg
            }
            assert len(handed_on & names) < 10, path


@pytest.mark.parametrize(
    ("annotation", "option"),
    [
        (int, int),
        (float | None, float | None),
        (str | Path, Path),
        (str | Path | Any, str),
        (float | Literal["server"], float | Literal["server"]),
        (functions.TYPES["Count"], int),
        (functions.Sequence[str], tuple[str, ...]),
        (str | functions.Sequence[str], tuple[str, ...]),
        (str | functions.Sequence[int], str),
        (str | functions.Mapping[str, Any] | None, str | None),
        (functions.Mapping[str, Any] | None, tuple[str, ...]),
        (functions.Callable[[str], None], None),
        (Any | None, None),
    ],
)
def test_types_of_options(annotation, option):
    assert option_type(annotation) == option


def test_a_function_is_called_with_what_is_given_alone(monkeypatch, capsys):
    """Mappings are read, listeners print to stderr, and the result's summary is printed."""
    seen = {}

    class Result:
        def summary(self):
            return "two texts"

    def fake(source, **values):
        values.pop("notify")("a note")
        seen.update(values, source=source)
        return Result()

    monkeypatch.setattr("lapa2_interp.runs.score.score", fake)
    command = command_of("runs.score:score")
    defaults = {one.name: one.default for one in arguments_of("runs.score:score")[1:]}
    command("run", **defaults | {"parts": 2, "only": ("task=topic",), "labels": ("A=calm",)})
    assert seen == {
        "source": "run", "parts": 2, "only": {"task": ["topic"]}, "labels": {"A": "calm"}
    }  # fmt: skip
    assert capsys.readouterr() == ("two texts\n", "a note\n")


def test_all_commands_are_in_the_app():
    names = {name for name in app if not name.startswith("-")}
    assert {"steer", "score", "sweep", "view", "prefix", "scorers"} <= names
