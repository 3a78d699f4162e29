"""The settings of a cell are declared once: Python, a grid and the command line agree."""

import inspect

import pytest
import torch

from lapa2_interp import Augmentation, generate, load_model, steer
from lapa2_interp.cli.app import main
from lapa2_interp.errors import GridError, Lapa2Error
from lapa2_interp.generation.cell import RESERVED_LABELS, Cell
from lapa2_interp.generation.resolve import cell_of, cells_of
from lapa2_interp.generation.settings import HINTS, CellSettings
from lapa2_interp.methods import load_task
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.prefix_accuracy import prefix_accuracy

MINE = ("device", "trust_remote_code", "pack", "attn", "announce", "yes")
"""Arguments of `generate` that decide no text."""
ONE_VALUE = ("model", "prompts", "label", "patterns", "dtype", "model_class", "start")
ON_COMMAND_LINE = {"parameters": "set"}
WRONG = {
    "model": ("no-such-model", '"no-such-model"'),
    "prompts": ("none.txt", '"none.txt"'),
    "attribute": ("joyful", '"joyful"'),
    "method": ("prefixx", '"prefixx"'),
    "parameters": ({"omega": "7"}, '{omega = "7"}'),
    "task": ("sentimental", '"sentimental"'),
    "prefix": ("", '""'),
    "alpha": (-1, "-1"),
    "augmentation": ("instabost", '"instabost"'),
    "label": (" x", '" x"'),
    "length": ("long", '"long"'),
    "samples": (0, "0"),
    "seed": ("x", '"x"'),
    "top_k": (1.5, "1.5"),
    "temperature": (0, "0"),
    "eos": ("end", '"end"'),
    "ban_words": ("some", '"some"'),
    "trace": ("some", '"some"'),
    "patterns": ("3-1", '"3-1"'),
    "dtype": ("float33", '"float33"'),
    "model_class": ("Transformer", '"Transformer"'),
    "max_rows": ("many", '"many"'),
    "doubled_bos": (2, "2"),
    "start": ("<nothing>", '"<nothing>"'),
}
"""A wrong value of every setting, in Python and in TOML."""


def test_generate_has_every_setting_with_its_type_and_default():
    parameters = inspect.signature(generate).parameters
    assert [name for name in parameters if name not in MINE] == list(CellSettings.model_fields)
    for name, field in CellSettings.model_fields.items():
        mine, declared = parameters[name].annotation, CellSettings.__annotations__[name]
        if name in ONE_VALUE:
            assert mine == declared, name
        else:
            assert f"list[{declared}]" in mine, name
            others = mine.replace(f"list[{declared}]", "list").split(" | ")
            assert set(others) == {*declared.split(" | "), "list"}, name
        assert parameters[name].default == field.default, name


def problem(action):
    with pytest.raises(Lapa2Error) as raised:
        action()
    return str(raised.value)


def in_grid(folder, line):
    file = folder / "g.toml"
    file.write_text(line)
    try:
        load_grid(str(file))
    except GridError as error:
        return str(error).partition("block 1: ")[2]
    raise AssertionError("no error")


def on_command_line(folder, capsys, *words):
    assert main(["generate", "--out", str(folder / "run"), *words]) == 2
    return capsys.readouterr().err.strip().removeprefix("lapa2: ").removesuffix(" (see --help)")


def test_every_setting_has_a_wrong_value_here():
    assert list(WRONG) == list(CellSettings.model_fields)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_gives_one_sentence(name, tmp_path, capsys, without_types):
    value, toml = WRONG[name]
    beside = {} if name == "model" else {"model": "tiny-gpt2"}
    sentence = problem(lambda: generate(**beside, **{name: value}))
    if name == "model":  # a grid's models are looked for when it is swept
        assert on_command_line(tmp_path, capsys, f"--model={value}") == sentence
        return
    lines = "".join(f"{key} = '{setting}'\n" for key, setting in beside.items())
    assert in_grid(tmp_path, f"{lines}{name} = {toml}\n") == sentence
    text = "omega=7" if name == "parameters" else str(value)
    option = f"--{ON_COMMAND_LINE.get(name, name).replace('_', '-')}"
    words = [word for key, setting in beside.items() for word in (f"--{key}", setting)]
    message = on_command_line(tmp_path, capsys, *words, f"{option}={text}")
    assert message == sentence


@pytest.mark.parametrize("name", WRONG)
def test_a_misspelt_setting_gives_one_sentence(name, tmp_path, capsys):
    wrong = f"{name[:-1]}q{name[-1]}"
    sentence = problem(lambda: generate("tiny-gpt2", **{wrong: 1}))
    assert sentence.startswith(f"unknown setting '{wrong}'; allowed: model, prompts, ")
    assert f"did you mean '{name}'?" in sentence
    assert in_grid(tmp_path, f"{wrong} = 1\n") == sentence
    assert on_command_line(tmp_path, capsys, f"--{wrong.replace('_', '-')}", "1") == sentence


@pytest.mark.parametrize("name", HINTS)
def test_the_names_of_other_libraries_have_a_hint(name):
    assert problem(lambda: generate("tiny-gpt2", **{name: 1})).endswith(HINTS[name])


@pytest.mark.parametrize("label", RESERVED_LABELS)
def test_a_word_that_means_something_else_is_no_label(label, tmp_path, capsys):
    sentence = problem(lambda: cell_of("tiny-gpt2", attribute="positive", alpha=1.0, label=label))
    assert sentence.startswith(f"label {label!r}: no arm is called so, since it names ")
    assert in_grid(tmp_path, f'model = "tiny-gpt2"\nalpha = 1.0\nlabel = "{label}"\n') == sentence
    asked = ("--model=tiny-gpt2", "--alpha=1", f"--label={label}")
    assert on_command_line(tmp_path, capsys, *asked) == sentence


def test_a_prefix_needs_no_task():
    run = generate("tiny-gpt2", "The lake", prefix="Very formal:", alpha=[0, 0.5], length=16)
    assert list(run.texts()["arm"]) == ["baseline", "alpha 0.5 paper"]
    cell = next(iter(run.by_key.values()))
    assert cell.branches[0].prefix == "Very formal:"
    assert (cell.task.name, cell.attribute, cell.prompts) == ("custom", "custom", ("The lake",))


def test_a_prefix_may_be_that_of_one_attribute_or_of_all():
    mine = cell_of("tiny-gpt2", prefix="Quite nice:", attribute="positive")
    usual = load_task("sentiment")
    assert mine.task.prefix("positive") == "Quite nice:"
    assert mine.task.prefix("negative") == usual.prefix("negative")
    form = cell_of("tiny-gpt2", prefix="A {attribute} text:", attribute="negative")
    assert form.task.prefix("positive") == "A positive text:"


def test_lists_are_arms_and_their_product_is_one_run():
    rules = (Augmentation(alpha=1), Augmentation(alpha=1, span="bos"))
    run = generate(
        "tiny-gpt2",
        ["The lake", "My house"],
        attribute="positive",
        augmentation=["none", "instaboost:M=5", rules],
        seed=[1, 2],
        length=12,
        trace="pooled",
    )
    assert len(run.by_key) == 6
    assert len(run.texts()) == 12
    steps = run.steps()
    assert set(steps["arm"]) == set(run.cells["arm"])
    assert {"method", "attribute", "cell"} <= set(steps)
    one = run.select(arm="baseline", seed=2)
    assert len(one.by_key) == 1
    assert run.select(key=next(iter(one.by_key))).texts().equals(one.texts())


def test_a_list_in_a_dict_is_an_axis_and_a_tuple_is_one_value():
    fields = {"attribute": "positive", "prompts": ("The lake",), "alpha": [0.5, 1.0]}
    cells = cells_of(fields | {"augmentation": {"layers": ["all", (0, 1)], "steps": (0, 4)}})
    assert [cell.augmentation for cell in cells] == [
        Augmentation(alpha=alpha, layers=layers, steps=(0, 4))
        for alpha in (0.5, 1.0)
        for layers in ("all", (0, 1))
    ]


def test_all_attributes_are_cells_by_default():
    run = generate("tiny-gpt2", "The lake", length=12, trace="none")
    assert list(run.cells["attribute"]) == ["positive", "negative"]


def test_a_model_by_name_and_the_same_model_loaded_write_the_same_texts(monkeypatch, tmp_path):
    """Also where this machine computes faster in bfloat16."""
    monkeypatch.setattr("lapa2_interp.models.machine.slowdown", lambda dtype: 0.1)
    settings = {"attribute": "positive", "alpha": 0.5, "length": 24, "samples": 2}
    by_name = generate("tiny-llama", "The lake", **settings)
    loaded = generate(load_model("tiny-llama"), "The lake", **settings)
    assert list(by_name.by_key) == list(loaded.by_key)
    assert list(by_name.texts()["text"]) == list(loaded.texts()["text"])
    file = tmp_path / "g.toml"
    file.write_text('model = "tiny-llama"\n')
    assert {cell.dtype for cell in load_grid(str(file)).cells} == {"float32"}
    signatures = (load_model, generate, steer, prefix_accuracy, CellSettings)
    assert {inspect.signature(one).parameters["dtype"].default for one in signatures} == {"float32"}


def test_a_model_of_another_precision_is_refused_with_the_one_to_load():
    cell = cell_of(
        "tiny-gpt2", prompts="The lake", attribute="positive", dtype="bfloat16", length=12
    )
    sentence = problem(lambda: make_cells(load_model("tiny-gpt2"), [cell]))
    assert sentence == (
        "the cell's dtype is 'bfloat16', and the model's 'float32'; give load_model('tiny-gpt2',"
        " 'bfloat16', model_class='TransformerBridge', start='usual')"
    )


def test_a_dtype_of_torch_is_its_name():
    mine = cell_of("tiny-gpt2", attribute="positive", dtype=torch.bfloat16)
    assert mine.key == cell_of("tiny-gpt2", attribute="positive", dtype="bfloat16").key


KEYS = {
    ("prefix", "sentiment", "positive"): "e4bdc32efef95c95",
    ("none", "topic", "world"): "0e2490aac38586c4",
    ("air-decoding", "detox", "nontoxic"): "70860579ecb93a46",
    ("preadd", "sentiment", "negative"): "551c79b9aa54bd20",
    ("con-prefix", "sentiment", "positive"): "94790a9e5771984c",
    ("gedi", "sentiment", "positive"): "a5de32e60d303b4b",
    ("datg", "sentiment", "positive"): "d09892e5ca5e7446",
    ("freectrl", "topic", "sports"): "3a8dad77e0243474",
    ("palette", "sentiment", "positive"): "d807a69ee3dc5b43",
    ("rose", "sentiment", "positive"): "9cdc961902d35603",
    ("arithmetic", "sentiment", "positive"): "b840302ee44b2ad5",
    ("negprompt", "detox", "nontoxic"): "d8f6ad38a3de0abe",
}
"""Keys of cells of SmolLM2, under which their texts are stored."""


@pytest.mark.parametrize("named", KEYS)
def test_a_new_field_changes_no_stored_key(named):
    method, task, attribute = named
    alpha = 0.0 if method in ("none", "freectrl", "datg") else None
    settings = {"method": method, "task": task, "attribute": attribute, "alpha": alpha}
    cell = cell_of("smollm2-135m", dtype="float32", length=64, samples=2, **settings)
    assert cell.key == KEYS[named]


def test_the_messages_and_the_span_of_a_chat_are_part_of_its_key():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    longer = [messages[0], {"role": "user", "content": "Why not?"}]
    cells = [
        cell_of("smollm2-135m", method={"name": "chat", **parameters}, task=task, dtype="float32")
        for task, parameters in (
            (chat_task(messages), {}),
            (chat_task(messages, "turn:1"), {}),
            (chat_task(messages, template={"enable_thinking": False}), {}),
            (chat_task(longer), {}),
            (chat_task(messages, later=["And how?"]), {}),
            (chat_task(messages, later=["And how?"]), {"keep_turns": True}),
        )
    ]
    assert len({cell.key for cell in cells}) == 6
    assert cells[0].key == "8d4fe7d5001fca7a", "as before chats had later turns"
    for cell in cells:
        again = Cell.model_validate_json(cell.model_dump_json())
        assert (again, again.key) == (cell, cell.key)


@pytest.mark.parametrize("recipe", ["instaboost:M=5", {"recipe": "instaboost:M=5"}])
def test_a_label_replaces_the_name_of_a_recipe(recipe):
    cells = cells_of({"model": "tiny-gpt2", "augmentation": ["none", recipe], "label": "strong",
                      "attribute": "positive", "dtype": "float32"})  # fmt: skip
    assert [cell.arm for cell in cells] == ["baseline", "strong"]
