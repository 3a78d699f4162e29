"""Commands that are functions of the package: each is declared once, by the class of its settings."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest

import lapa2_interp
from lapa2_interp._util.settings import Settings, fields_of
from lapa2_interp._util.values import Count
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.fading import measure_fading
from lapa2_interp.circuits.learning import learn
from lapa2_interp.circuits.selection import select
from lapa2_interp.circuits.settings import (
    FadingSettings,
    LearnSettings,
    SelectSettings,
    StudySettings,
)
from lapa2_interp.circuits.study import run_study
from lapa2_interp.cli import functions, options
from lapa2_interp.cli.app import COMMANDS, FAMILIES, app
from lapa2_interp.cli.functions import arguments_of, command_of, option_type, with_options_of
from lapa2_interp.errors import Lapa2Error
from lapa2_interp.generation.settings import CellSettings
from lapa2_interp.prefixes.importing import import_into_set
from lapa2_interp.prefixes.make import make_set, measure_sets
from lapa2_interp.prefixes.settings import (
    PrefixAccuracySettings,
    PrefixEvaluationSettings,
    PrefixImportSettings,
    PrefixTrainingSettings,
)
from lapa2_interp.propositions.settings import PropositionSettings
from lapa2_interp.propositions.study import run_proposition_study
from lapa2_interp.report.settings import SteerSettings, ViewSettings
from lapa2_interp.report.steer import steer
from lapa2_interp.report.viewer import view
from lapa2_interp.runs.prefix_accuracy import prefix_accuracy
from lapa2_interp.runs.score import rating_sheets, score
from lapa2_interp.runs.settings import ScoreSettings, SheetSettings, SweepSettings
from lapa2_interp.runs.sweep import sweep
from lapa2_interp.scoring.human import rating_tables
from lapa2_interp.scoring.settings import RatingSettings, TrainingSettings
from lapa2_interp.scoring.training import train_scorer
from lapa2_interp.tasks.settings import WordListSettings
from lapa2_interp.tasks.word_lists import make_word_list

PATHS = {
    path: sentence
    for commands in (*COMMANDS.values(), *FAMILIES.values())
    for path, sentence in commands.items()
    if path not in FAMILIES
}
FUNCTIONS = {
    "steer:steer": (steer, SteerSettings),
    "view:view": (view, ViewSettings),
    "sweep:sweep": (sweep, SweepSettings),
    "score:score": (score, ScoreSettings),
    "score:sheets": (rating_sheets, SheetSettings),
    "score:train": (train_scorer, TrainingSettings),
    "score:answers": (rating_tables, RatingSettings),
    "word_lists:word_lists": (make_word_list, WordListSettings),
    "propositions:propositions": (run_proposition_study, PropositionSettings),
    "prefix:train": (make_set, PrefixTrainingSettings),
    "prefix:evaluate": (measure_sets, PrefixEvaluationSettings),
    "prefix:score": (prefix_accuracy, PrefixAccuracySettings),
    "prefix:import_": (import_into_set, PrefixImportSettings),
}
"""Commands that are functions of the package, with the class of their settings."""
HANDED_ON = {
    "circuits": (run_study, StudySettings),
    "select": (select, SelectSettings),
    "learn": (learn, LearnSettings),
    "fading": (measure_fading, FadingSettings),
}
"""Commands that have options of a function which takes a model and texts first."""
NOT_GIVEN = {"notify", "report", "model of view"}
"""Settings that a command line cannot give: functions, and a loaded model."""
CLASSES = [settings for _, settings in (*FUNCTIONS.values(), *HANDED_ON.values())]


def command(path):
    module, _, name = path.partition(":")
    return getattr(import_module(f"lapa2_interp.cli.{module}"), name)


@pytest.mark.parametrize("path", PATHS)
def test_the_list_has_the_first_sentence_of_a_command(path):
    first = inspect.getdoc(command(path)).partition("\n\n")[0]
    assert PATHS[path] == first.replace("\n", " ")


def test_every_class_of_settings_is_that_of_a_command():
    assert {one.__name__ for one in Settings.__subclasses__()} == {one.__name__ for one in CLASSES}


@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_function_has_the_parameters_of_its_settings_in_python_and_at_the_command_line(path):
    """With the same defaults, where None stands for no values."""
    function, settings = FUNCTIONS[path]
    in_python, fields = inspect.signature(function).parameters, fields_of(settings)
    of_command = {
        one.name: one.default for one in inspect.signature(command(path)).parameters.values()
    }
    assert list(in_python) == list(fields)
    options_of_command = [
        name for name in fields
        if name not in NOT_GIVEN and f"{name} of {path.partition(':')[2]}" not in NOT_GIVEN
    ]  # fmt: skip
    assert set(of_command) == set(options_of_command)
    for name, field in fields.items():
        default = inspect.Parameter.empty if field.is_required() else field.default
        assert in_python[name].default == default
        assert (in_python[name].kind is inspect.Parameter.KEYWORD_ONLY) == bool(field.kw_only)
        if name in of_command:
            assert of_command[name] == (
                () if default is None and of_command[name] == () else default
            )


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_function_that_takes_a_model_has_the_types_and_defaults_of_its_settings(name):
    """And its command, whose texts and model are `ContrastOptions` and `ModelOptions`."""
    function, settings = HANDED_ON[name]
    signature = inspect.signature(function).parameters
    declared, fields = inspect.signature(settings).parameters, fields_of(settings)
    of_command = inspect.signature(command(f"circuits:{name}")).parameters
    for field, parameter in declared.items():
        assert signature[field].annotation == parameter.annotation
        assert signature[field].default == of_command[field].default == parameter.default
        assert get_args(of_command[field].annotation)[-1].help == fields[field].description
    of_texts = {field.name for field in options.fields_of(options.ContrastOptions)}
    others = {
        "pairs",
        "texts",
        "model",
        "contrast",
        "folder",
        "report",
        "placebo",
        "heads",
        "batch_size",
        "progress",
    }
    assert set(signature) <= {*declared, *of_texts, *others}


@pytest.mark.parametrize("settings", CLASSES)
def test_every_setting_has_help(settings):
    for field in fields_of(settings).values():
        assert field.description


@pytest.mark.parametrize(
    "function",
    [function for function, _ in (*FUNCTIONS.values(), *HANDED_ON.values())]
    + [lapa2_interp.generate],
)
def test_the_docstring_of_a_function_has_a_line_of_help_for_every_parameter(function):
    from docstring_parser import parse

    documented = [
        name
        for parameter in parse(function.__doc__).params
        for name in parameter.arg_name.split(", ")
    ]
    assert sorted(documented) == sorted(inspect.signature(function).parameters)


def test_settings_load_neither_torch_nor_transformers():
    modules = sorted({settings.__module__ for settings in (*CLASSES, CellSettings)})
    heavy = ("torch", "transformers", "transformer_lens", "pandas", "xarray")
    code = f"import sys, {', '.join(modules)}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_setting_that_does_not_exist_or_is_missing_is_refused_in_one_sentence():
    """As by `generate`; and a number out of bounds as everywhere."""
    with pytest.raises(
        Lapa2Error, match="unknown setting 'lenghts'; allowed: source, .*; did you mean 'lengths'"
    ) as e:
        score("run", lenghts=[64])
    assert "notify" in str(e.value)
    with pytest.raises(Lapa2Error, match="^source: field required$"):
        score()
    with pytest.raises(
        Lapa2Error, match="^parts: input should be greater than or equal to 1, found 0$"
    ):
        score("run", parts=0)


def test_numbers_stay_as_they_are_given():
    """A whole number where a float belongs is written as a whole number; arrays become tuples."""
    settings = PropositionSettings(out="o", alphas=np.array([1, 2]), free=[1])
    assert (settings.alphas, settings.free) == ((1, 2), (1,))
    assert all(type(alpha) is int for alpha in (*settings.alphas, *settings.free))


def test_texts_of_circuits_have_the_defaults_of_contrast_sets():
    declared = inspect.signature(ContrastSet.of).parameters
    for field in options.fields_of(options.ContrastOptions):
        if field.name not in ("task", "prompt"):
            assert declared[field.name].default == field.default


def test_what_is_given_of_handed_on_options_is_given_to_the_command():
    seen = {}

    @with_options_of(SelectSettings)
    def command(model: str, /, *, seed: int = 3, options: functions.Values) -> None:
        seen.update(options, model=model, seed=seed)

    assert "options" not in inspect.signature(command).parameters
    command("planted", heads=4, metric="js", positions="0,2-4", seed=3)
    assert seen == {"model": "planted", "heads": 4, "positions": "0,2-4", "seed": 3}


def test_every_setting_of_a_cell_is_an_option_of_generate():
    of_settings = {field.name for field in options.fields_of(options.SettingOptions)}
    of_bias = {field.name for field in options.fields_of(options.AugmentationOptions)}
    assert of_settings | of_bias == {*CellSettings.model_fields, "card"}
    assert not of_settings & of_bias


def test_no_other_command_hands_all_of_its_parameters_on_one_by_one():
    """A function that only repeats another's parameters is that function (`command_of`)."""
    for path in set(PATHS) - set(FUNCTIONS):
        node = ast.parse(inspect.getsource(command(path))).body[0]
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
        (Count, int),
        (Sequence[str], tuple[str, ...]),
        (str | Sequence[str], tuple[str, ...]),
        (str | Sequence[int], str),
        (str | Mapping[str, Any] | None, str | None),
        (Mapping[str, Any] | None, tuple[str, ...]),
        (Callable[[str], None], None),
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
    command = command_of(ScoreSettings, "runs.score:score")
    defaults = {one.name: one.default for one in arguments_of(ScoreSettings)[1:]}
    command("run", **defaults | {"parts": 2, "only": ("task=topic",), "labels": ("A=calm",)})
    assert seen == {
        "source": "run", "parts": 2, "only": {"task": ["topic"]}, "labels": {"A": "calm"}
    }  # fmt: skip
    assert capsys.readouterr() == ("two texts\n", "a note\n")


def test_all_commands_are_in_the_app():
    names = {name for name in app if not name.startswith("-")}
    assert {"steer", "score", "sweep", "view", "prefix", "scorers"} <= names
