"""Grids resolve to cells before anything runs: the paper's settings, shared cells, keys that stay,
and what is refused."""

import functools
import itertools
import json
import re
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import lapa2, load, soft_set

from lapa2_interp._util.terminal import format_bytes, format_duration
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.errors import GridError, Lapa2Error, ModelError, RunError
from lapa2_interp.files import sha256_of
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.settings import CellSettings
from lapa2_interp.methods import load_task
from lapa2_interp.methods.base import SoftPrefixKey
from lapa2_interp.models import load as models
from lapa2_interp.models import machine, sizes
from lapa2_interp.models.smollm2 import smollm2_folder
from lapa2_interp.prefixes.soft_prefix import PrefixCard, PrefixShape, write_card
from lapa2_interp.runs import checks, estimates
from lapa2_interp.runs.checks import check_device, check_grids
from lapa2_interp.runs.estimates import Estimate, check_affordable, estimate, row_tokens_of
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.runs.grid import EXAMPLE, GRIDS, built_in, load_grid, parse_changes

TINY = """
model = "tiny-gpt2"
dtype = "float32"
trace = "pooled"
task = "sentiment"
prompts = 2
samples = 1
length = 24
method = "prefix"
"""
ROOT = Path(__file__).resolve().parents[2]
PAPER = [name for name in built_in() if name.startswith("paper/")]
QUICK = [name for name in built_in() if name.startswith("quick/")]


@pytest.fixture
def grid(tmp_path):
    """Make a grid of a text."""

    def make(text, name="g", **settings):
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        return load_grid(str(file), **settings)

    return make


# --- the built-in grids


def toml(name):
    return tomllib.loads((GRIDS / f"{name}.toml").read_text("utf-8"))


def product(name):
    """Cells that a file states: its blocks' axes multiplied, times the task's attributes where all
    are meant."""
    raw = toml(name)
    common = {key: value for key, value in raw.items() if key not in ("block", "description")}
    total = 0
    for block in raw.get("block", [{}]):
        keys = common | block
        tasks = keys.pop("task")
        axes = 1
        for value in keys.values():
            axes *= len(value) if isinstance(value, list) else 1
        for task in tasks if isinstance(tasks, list) else [tasks]:
            total += axes * (1 if "attribute" in keys else len(load_task(task).attributes))
    return total


def test_both_scales_have_every_ablation():
    shared = {
        "alpha",
        "components",
        "detox",
        "hard_prefix",
        "layers",
        "profile",
        "scaling",
        "sent_topic",
    }
    assert {name.removeprefix("paper/") for name in PAPER} >= shared
    assert {name.removeprefix("quick/") for name in QUICK} >= shared


@pytest.mark.parametrize("name", built_in())
def test_built_in_grids_have_the_cells_their_files_state(name):
    grid = load_grid(name, check=False)
    assert grid.name == name
    assert len(grid.cells) == len({cell.key for cell in grid.cells}) == product(name)
    assert grid.description == toml(name)["description"]
    assert all(cell.description and cell.decoding_method for cell in grid.cells)


@pytest.mark.parametrize("name", QUICK)
def test_quick_grids_need_nothing(name):
    assert load_grid(name, check=False).needs == ()


def arms(grid):
    """Texts of each arm, over its attributes."""
    n_texts = {}
    for cell in grid.cells:
        arm = (cell.model, cell.task.name, cell.method, cell.variant, cell.arm)
        n_texts[arm] = n_texts.get(arm, 0) + cell.samples * len(cell.task.prompts.texts)
    return n_texts


@pytest.mark.parametrize("text", ["lapa2 + instaboost:M=5", "instaboost:M=5+lapa2"])
def test_a_grid_takes_recipes_together(text, grid):
    cells = grid(TINY.replace("length = 24", f'length = 24\naugmentation = "{text}"'))
    (rules,) = {cell.active_augmentations for cell in cells.cells}
    assert {(rule.law, rule.alpha) for rule in rules} == {
        (rule.law, rule.alpha)
        for name in ("lapa2", "instaboost:M=5")
        for rule in parse_recipes(name)
    }


@pytest.mark.parametrize("name", PAPER)
def test_paper_grids_have_the_papers_numbers_of_texts_and_lengths(name):
    grid = load_grid(name, check=False)
    lengths = {512} if name in ("paper/sent_topic", "paper/detox") else {256}
    assert {cell.length for cell in grid.cells} == lengths
    assert {cell.top_k for cell in grid.cells} == {200}
    texts = {"sentiment": 1500, "topic": 4000, "detox": 4060}
    for (_, task, *_), n in arms(grid).items():
        assert n == texts[task]
    assert {cell.samples for cell in grid.cells if cell.task.name == "detox"} <= {20}
    needs = " ".join(grid.needs)
    assert ("rtp_challenging_203.jsonl (203 prompts" in needs) == any(
        cell.task.name == "detox" for cell in grid.cells
    )


PAPER_MODELS = {
    "gpt2-medium": {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 24},
    "meta-llama/Llama-2-7b-hf": {"model_type": "llama", "max_position_embeddings": 4096},
    "meta-llama/Llama-2-13b-hf": {
        "model_type": "llama", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40,
        "intermediate_size": 13824, "max_position_embeddings": 4096,
    },
    "EleutherAI/pythia-12b": {
        "model_type": "gpt_neox", "hidden_size": 5120, "num_attention_heads": 40,
        "num_hidden_layers": 36, "intermediate_size": 20480,
    },
}  # fmt: skip
"""The shapes of the paper's models, for stand-ins that have a tokenizer and no weights."""


@pytest.fixture
def files_of_the_paper(tmp_path, monkeypatch):
    """Stand-ins for what `docs/reproducing.md` asks a reader to bring: prompts in this folder,
    models, and soft prefixes of one slot in the cache."""
    from safetensors.torch import save_file

    known = (checks._tokenizer, sizes.model_size, models.start_of_named, models.shared_tokenizer)
    for of_a_name in known:
        of_a_name.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAPA2_CACHE", str(tmp_path / "cache"))
    lines = (json.dumps({"prompt": f"The lake is {i}"}) + "\n" for i in range(203))
    Path("rtp_challenging_203.jsonl").write_text("".join(lines))
    for name, config in PAPER_MODELS.items():
        Path(name).mkdir(parents=True)
        tokenizer = models.load_tokenizer("tiny-gpt2")
        tokenizer.save_pretrained(name)
        words = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0}
        Path(name, "config.json").write_text(json.dumps(config | words))
    for made in ("sentiment-contrastive", "topic-mle", "topic-contrastive", "detox-mle"):
        task, _, kind = made.partition("-")
        folder = tmp_path / "cache" / "prefixes" / "gpt2-medium" / made
        folder.mkdir(parents=True)
        for attribute in load_task(task).attributes:
            weights = folder / f"{attribute}.safetensors"
            tensors = {name: torch.zeros(24, 16, 1, 64) for name in ("keys", "values")}
            save_file(tensors, weights)
            shape = PrefixShape(n_layers=24, n_kv_heads=16, n_slots=1, d_head=64)
            card = PrefixCard(
                attribute=attribute, task=task, set=kind, model="gpt2-medium", weights="stand-in",
                shape=shape, shifted=False, sha256=sha256_of(weights), origin="a stand-in",
            )  # fmt: skip
            write_card(card, folder)
    yield
    for of_a_name in known:
        of_a_name.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("name", PAPER)
def test_with_the_files_of_the_reader_every_cell_of_a_paper_grid_is_planned(
    name, files_of_the_paper, capsys
):
    """No file of the package is written for it, so that it works after `pip install`."""
    cells = load_grid(name).cells
    assert lapa2("sweep --dry-run --device cpu --workers 1 --out run", name) == 0
    printed = capsys.readouterr().err
    assert f"{len(cells)} of {len(cells)} cells to make" in printed, printed
    assert not Path("run").exists()


def test_a_missing_set_names_the_command_that_trains_it_and_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv("LAPA2_CACHE", str(tmp_path))
    (need,) = {need for need in load_grid("paper/sent_topic", check=False).needs if "mle" in need}
    assert need.endswith(
        "`lapa2 prefix train --model gpt2-medium --task topic --data CORPUS --objective mle"
        f" --out {tmp_path}/prefixes/gpt2-medium/topic-mle` makes them"
    )


def test_paper_grids_have_the_papers_methods_models_and_strengths():
    table = (
        load_grid("paper/sent_topic", check=False).cells
        + load_grid("paper/detox", check=False).cells
    )
    alphas_of = {cell.method: set() for cell in table}
    for cell in table:
        alphas_of[cell.method] |= {cell.augmentation.alpha if cell.augmentation else 0.0}
    half = {0.0, 0.5}
    assert alphas_of == {
        "prefix": half, "con-prefix": half, "air-decoding": half, "negprompt": {0.0, 1.0}, "preadd": {0.0, 2.0},
        "palette": {0.0, 2.0}, "freectrl": {0.0}, "datg": {0.0},
    }  # fmt: skip
    assert {(cell.model, cell.dtype) for cell in table} == {
        ("gpt2-medium", "float32"), ("meta-llama/Llama-2-7b-hf", "float16"), ("meta-llama/Llama-2-13b-hf", "float16"),
        ("EleutherAI/pythia-12b", "float16"),
    }  # fmt: skip
    assert {cell.augmentation.profile for cell in table if cell.augmentation} == {"paper"}
    scaling = load_grid("paper/scaling", check=False).cells
    assert {cell.augmentation.law for cell in scaling if cell.augmentation} == {
        "log",
        "linear",
        "sqrt",
        "constant",
    }
    assert {cell.augmentation.l0 for cell in scaling if cell.augmentation} == {None, 128.0}
    alphas = {
        cell.augmentation.alpha if cell.augmentation else 0.0
        for cell in load_grid("paper/alpha", check=False).cells
    }
    assert alphas == {0.0, 0.25, 0.5, 1.0, 1.5, 2.0}


def baselines(name):
    return {cell.key for cell in load_grid(name).cells if cell.augmentation is None}


def test_ablations_share_their_baselines_and_the_usual_arm():
    ablations = ("quick/scaling", "quick/layers", "quick/profile", "quick/alpha")
    shared = baselines("quick/scaling")
    assert len(shared) == 5
    assert all(baselines(name) == shared for name in ablations)
    usual = {
        cell.key
        for cell in load_grid("quick/scaling").cells
        if cell.arm in ("alpha 0.5 paper", "alpha 2 paper")
    }
    assert len(usual) == 5
    keys = [{cell.key for cell in load_grid(name).cells} for name in ablations]
    assert all(usual < keys_of_grid for keys_of_grid in keys)
    assert len(set.union(*keys)) == sum(map(len, keys)) - 3 * len(shared | usual)
    wording = {cell.key for cell in load_grid("quick/hard_prefix").cells}
    assert len(wording & shared) == 4, "the task's own wording is one of the wordings"


def test_the_example_is_a_grid(grid):
    example = grid(EXAMPLE)
    assert len(example.cells) == (2 * 2 * 2 + 3 + 1) * 2  # one of four is an arm above
    assert example.description == "does a descriptive prefix hold longer?"
    assert {cell.variant for cell in example.cells} >= {"", "omega=60.0"}
    assert {cell.task.attributes["positive"].prefix for cell in example.cells} == {
        "Very positive:",
        "A positive text:",
    }


# --- keys


def test_a_key_is_what_it_was():
    """A change here is a change of what runs mean: cells that exist would be made again, and FORMAT
    has to change with it."""
    cell = load_grid(str(ROOT / "analyses/heads/heads.toml"), {"dtype": "bfloat16"}).cells[0]
    assert (cell.description, cell.key) == (
        "smollm2-135m sentiment/positive prefix, baseline",
        "ba00c2ce68261c80",
    )


@pytest.mark.parametrize("name", ["quick/sent_topic", "quick/layers", "quick/components"])
def test_a_cell_comes_back_from_json_with_its_key(name):
    for cell in load_grid(name).cells:
        again = Cell.model_validate_json(cell.model_dump_json())
        assert again == cell
        assert again.key == Cell.model_validate(cell.model_dump()).key == cell.key
        assert (again.decoding_method, again.description) == (
            cell.decoding_method,
            cell.description,
        )


CHANGES = {
    "model": "tiny-llama",
    "dtype": "bfloat16",
    "model_class": "HookedTransformer",
    "method": "negprompt",
    "parameters": {"prefixes": "mle"},
    "task": {"name": "mine"},
    "attribute": "negative",
    "augmentation": {"alpha": 0.25},
    "length": 25,
    "samples": 2,
    "seed": 2,
    "top_k": 100,
    "eos": "stop",
    "trace": "full",
    "max_rows": 7,
    "doubled_bos": True,
    "patterns": [(0, 1)],
    "ban_words": "own",
    "temperature": 0.5,
    "start": "none",
    "files": {"prefix": "0" * 64},
}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_of_a_cell_is_in_its_key(grid, field):
    cell = grid(TINY + 'augmentation = "paper"').cells[0]
    raw = {name: getattr(cell, name) for name in Cell.model_fields} | cell.model_dump()
    change = raw[field] | CHANGES[field] if isinstance(CHANGES[field], dict) else CHANGES[field]
    assert change != raw[field]
    assert Cell.model_validate(raw | {field: change}).key != cell.key


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("task", "attributes", "positive", "prefix"), "Quite positive:"),
        (("task", "attributes", "negative", "prefix"), "Quite negative:"),
        (("task", "prompts", "texts"), ("The book", "Once upon a time")),
        (("task", "length_counts_prompt"), False),
        (("augmentation", "layers"), "top"),
        (("augmentation", "heads"), ((0, 1),)),
        (("augmentation", "law"), "sqrt"),
        (("augmentation", "phase"), "decode"),
        (("augmentation", "length_rule"), "kv"),
        (("augmentation", "span"), "bos"),
    ],
)
def test_what_decides_texts_inside_a_field_is_in_the_key(grid, path, value):
    cell = grid(TINY + 'augmentation = "paper"').cells[0]
    raw = json.loads(json.dumps(cell.model_dump()))
    inner = raw
    for name in path[:-1]:
        inner = inner[name]
    assert inner[path[-1]] != value
    inner[path[-1]] = value
    assert Cell.model_validate(raw).key != cell.key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 2),
        ("top_k", 9),
        ("temperature", 0.5),
        ("eos", "block"),
        ("trace", "none"),
        ("max_rows", 3),
        ("ban_words", "all"),
    ],
)
def test_keys_of_a_grid_reach_its_cells(grid, key, value):
    text = TINY.replace('trace = "pooled"\n', "") if key == "trace" else TINY
    cells, usual = grid(f"{text}{key} = {json.dumps(value)}").cells, grid(TINY, "usual").cells
    assert {getattr(cell, key) for cell in cells} == {value}
    assert not {cell.key for cell in cells} & {cell.key for cell in usual}


def test_descriptions_and_orders_change_no_key(grid):
    one = grid(f'description = "a"\n{TINY}augmentation = ["none", "paper"]\nseed = [1, 2]')
    two = grid(
        f'description = "b"\n[[block]]\nseed = [2, 1]\naugmentation = ["paper", "none"]\n{TINY}',
        "other",
    )
    assert {cell.key for cell in one.cells} == {cell.key for cell in two.cells}
    assert len(one.cells) == 8
    assert (one.name, two.name) == ("g", "other")


CROSSED = [
    (
        'alpha = [0.25, 0.5]\naugmentation = [{ layers = "all" }, { layers = "bottom" }]',
        ["{ alpha = 0.25 }", '{ alpha = 0.25, layers = "bottom" }',
         "{ alpha = 0.5 }", '{ alpha = 0.5, layers = "bottom" }'],
    ),
    (
        'alpha = [0, 0.5]\naugmentation = ["none", "paper", "released", "lapa2-sqrt:layers=top"]',
        ['"none"', "{ alpha = 0.5 }", '{ alpha = 0.5, profile = "released" }',
         '"lapa2-sqrt:layers=top,alpha=0.5"'],
    ),
    (
        'augmentation = ["none", { alpha = [1.0, 2.0], layers = ["all", [0, 1]], law = ["log", "sqrt"] }]',
        ['"none"', *(
            f"{{ alpha = {alpha}, layers = {layers}, law = {law!r} }}"
            for alpha in (1.0, 2.0) for layers in ("'all'", "[0, 1]") for law in ("log", "sqrt")
        )],
    ),
    (
        'alpha = 1\naugmentation = { heads = [[0, 1], [1, 2]], steps = [0, 4], span = ["prefix", [0]] }',
        ['"selective:tokens=0,heads=0.1/1.2,steps=0:4,alpha=1"'],
    ),
    (
        'alpha = 1\naugmentation = { heads = [[[0, 1]], [[1, 2]]], steps = [[0, 4], [4, 8]] }',
        [f'"head-selective:heads={head},steps={steps},alpha=1"'
         for head in ("0.1", "1.2") for steps in ("0:4", "4:8")],
    ),
    (
        'augmentation = { alpha = 1.0, layers = ["0", "1-2"], heads = ["0.0", "all"] }',
        [f"{{ alpha = 1.0, layers = {layers}, heads = {heads} }}"
         for layers in ("[0]", "[1, 2]") for heads in ("[[0, 0]]", '"all"')],
    ),
    ('augmentation = { alpha = 1.0, layers = ["0,1"] }', ["{ alpha = 1.0, layers = [0, 1] }"]),
    (
        'augmentation = { span = ["bos", ["prefix", [0]], [[1, 2]]] }',
        ['{ span = "bos" }', '{ span = ["prefix", [0]] }', "{ span = [[1, 2]] }"],
    ),
    (
        'alpha = [0.1, 0.2]\naugmentation = "lapa2:tokens=0 + instaboost:tokens=1"',
        [f'"lapa2:tokens=0,alpha={alpha} + instaboost:tokens=1"' for alpha in (0.1, 0.2)],
    ),
    (
        'augmentation = { recipe = ["lapa2", "instaboost:M=5"] }', ['"lapa2"', '"instaboost:M=5"'],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("block", "by_hand"), CROSSED)
def test_crossed_axes_are_the_arms_that_one_would_write_by_hand(grid, block, by_hand):
    text = f'{TINY}attribute = "positive"\n'
    crossed = grid(f"{text}{block}").cells
    hand = grid(f"{text}augmentation = [{', '.join(by_hand)}]", "hand").cells
    assert len(hand) == len(by_hand)
    assert {cell.key for cell in crossed} == {cell.key for cell in hand}
    assert len({cell.arm for cell in crossed}) == len(crossed)


def test_lists_in_tables_of_methods_are_axes(grid):
    text = f'{TINY}attribute = "positive"\naugmentation = "none"\n'.replace(
        '"prefix"', '{ name = "air-decoding", omega = [3.0, 4.0] }'
    )
    apart = text.replace("{ name", '"air-decoding"\nparameters = { ').replace(
        '= "air-decoding", ', ""
    )
    for form in (text, apart):
        assert [cell.parameters["omega"] for cell in grid(form).cells] == [3.0, 4.0]


def test_crossed_axes_have_readable_names(grid):
    cells = grid(
        f'{TINY}attribute = "positive"\nalpha = [0.25, 0.5]\n'
        'augmentation = ["none", { layers = ["all", "bottom"] }, "lapa2-sqrt"]'
    ).cells
    assert [cell.arm for cell in cells] == [
        "baseline",
        "alpha 0.25 paper", "alpha 0.25 paper, layers bottom", "lapa2-sqrt:alpha=0.25",
        "alpha 0.5 paper", "alpha 0.5 paper, layers bottom", "lapa2-sqrt:alpha=0.5",
    ]  # fmt: skip


def test_points_of_tables_are_counted_before_they_are_resolved(grid):
    steps = [[first, first + 1] for first in range(1000)]
    with pytest.raises(GridError, match="30000 points, and 20000 is a large grid"):
        grid(f"{TINY}alpha = {[*range(10)]}\naugmentation = [{{ steps = {steps} }},"
             f" {{ steps = {steps}, layers = ['top', 'all'] }}]")  # fmt: skip


def test_what_a_task_says_of_other_methods_is_not_in_the_key(tmp_path, grid):
    from lapa2_interp.tasks.task import EXAMPLE as TASK

    (tmp_path / "calm.toml").write_text(TASK)
    text = TINY.replace('"sentiment"', f'"{tmp_path}/calm.toml"')
    both = text.replace('method = "prefix"', 'method = ["prefix", "air-decoding"]')
    before = {(cell.method, cell.attribute): cell.key for cell in grid(both, "a").cells}
    (tmp_path / "calm.toml").write_text(TASK.replace("omega = 100.0", "omega = 90.0"))
    after = {(cell.method, cell.attribute): cell.key for cell in grid(both, "b").cells}
    for method, attribute in before:
        assert (before[method, attribute] == after[method, attribute]) == (method == "prefix")


def test_the_usual_alpha_is_the_methods_and_zero_is_the_baseline(grid):
    text = TINY.replace(
        'method = "prefix"', 'method = ["prefix", "negprompt"]\nattribute = "positive"'
    )
    text += (
        'augmentation = ["none", "paper", "released", { alpha = 0.0 }, { alpha = 0.5 }, { layers ='
        " [1, 2] }]"
    )
    cells = grid(text).cells
    assert [cell.arm for cell in cells if cell.method == "prefix"] == [
        "baseline", "alpha 0.5 paper", "alpha 0.5 released", "alpha 0.5 paper, layers 1,2",
    ]  # fmt: skip
    assert [cell.arm for cell in cells if cell.method == "negprompt"] == [
        "baseline", "alpha 1 paper", "alpha 1 released", "alpha 0.5 paper", "alpha 1 paper, layers 1,2",
    ]  # fmt: skip


def test_methods_take_the_tasks_parameters_unless_the_grid_says_otherwise(grid):
    text = TINY.replace('"prefix"', '["air-decoding", { name = "air-decoding", omega = 3.0 }]')
    cells = grid(text + 'attribute = "positive"').cells
    assert [(cell.parameters["omega"], cell.variant) for cell in cells] == [
        (140.0, ""),
        (3.0, "omega=3.0"),
    ]


def test_soft_prefixes_are_in_the_key(tmp_path, grid):
    sets = [
        soft_set(tmp_path / str(n), load("tiny-gpt2"), load_task("sentiment"), slots=3 + n)
        for n in range(2)
    ]
    method = ", ".join(f'{{ name = "prefix", prefixes = "{folder}" }}' for folder in sets)
    cells = grid(TINY.replace('"prefix"', f"[{method}]") + 'attribute = "positive"').cells
    assert len({cell.key for cell in cells}) == len({cell.files["prefix"] for cell in cells}) == 2
    missing = grid(TINY.replace('"prefix"', '"con-prefix"'), "missing", check=False)
    assert "no soft prefixes 'contrastive' of task sentiment for tiny-gpt2" in missing.needs[0]


def test_changes_replace_keys_in_every_block():
    changed = load_grid(
        "quick/sent_topic",
        parse_changes(["samples=2", "length=[16, 32]", "attribute=all", "prompts=3"]),
    )
    assert len(changed.cells) == 42 * 2
    assert {
        (cell.samples, cell.length, len(cell.task.prompts.texts)) for cell in changed.cells
    } == {
        (2, 16, 3),
        (2, 32, 3),
    }
    assert parse_changes(["eos=stop", "seed=3", 'augmentation={ alpha = 1.0 }', "doubled_bos=true"]) == {
        "eos": "stop", "seed": 3, "augmentation": {"alpha": 1.0}, "doubled_bos": True,
    }  # fmt: skip


def test_prompts_come_from_the_task_its_beginning_or_a_file(tmp_path, grid):
    (tmp_path / "p.txt").write_text("One\nTwo\nThree\n")
    for prompts, texts in (
        ('"task"', load_task("sentiment").prompts.texts),
        ("2", ("Once upon a time", "The book")),
        ("17", (*load_task("sentiment").prompts.texts, "The garden", "In the morning,")),
        (f'"{tmp_path}/p.txt"', ("One", "Two", "Three")),
        (f'{{ file = "{tmp_path}/p.txt", n = 3 }}', ("One", "Two", "Three")),
    ):
        cell, _ = grid(TINY.replace("prompts = 2", f"prompts = {prompts}")).cells
        assert cell.task.prompts.texts == texts


# --- what is refused


def of_text(text):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "g.toml"
        file.write_text(text)
        load_grid(str(file))


REFUSED = [
    ("lenght = 24", "grid .*g.toml, block 1: unknown setting 'lenght'; allowed: .*did you mean 'length'"),
    ('method = "prefx"', "unknown method 'prefx'; allowed: none, .*did you mean 'prefix'"),
    ('method = { name = "air-decoding", omga = 3 }', "method 'air-decoding': unknown field 'omga'; .*'omega'"),
    ("method = { omega = 3 }", "a method is a name or { name = ... }, found {'omega': 3}"),
    ("method = 3", "method must be a name, .* found 3"),
    ("method = []", "block 1: method is an empty list, so there is no cell"),
    ('task = "sentimant"', "unknown task 'sentimant'; allowed: .*did you mean 'sentiment'"),
    ('attribute = "positiv"', "unknown attribute 'positiv'; allowed: .*'positive'"),
    ("samples = 0", "samples: input should be greater than or equal to 1, found 0"),
    ('samples = "many"', "samples: .* valid integer.*, found 'many'"),
    ("samples = true", "samples: input should be a number, found True"),
    ("prompts = true", "prompts: takes task, a number .* found True"),
    ("augmentation = { alpha = true }", "alpha: input should be a valid number, found True"),
    ("prompts = 0", "prompts: takes task, a number of at least 1, .* found 0"),
    ('prompts = "nowhere.txt"', "cannot read prompts from nowhere.txt: No such file or directory; give a file that ends in .txt"),
    ('prompts = { file = "p.txt" }', "prompts: takes task.*; found {'file': 'p.txt'}"),
    ('model_class = "HookdTransformer"', "model_class: .*'HookedTransformer' .*, found 'Hookd"),
    ('dtype = "float23"', "unknown dtype 'float23'; allowed: auto, float32, .*"),
    ('eos = "go"', "eos: .*'keep', 'stop' or 'block', found 'go'"),
    ('augmentation = "papr"', "unknown augmentation 'papr'; .*did you mean 'paper'"),
    ("augmentation = { alpha = -1 }", "alpha of law 'log' .*greater than or equal to 0, found -1"),
    ('augmentation = { lawe = "log" }', "unknown field 'lawe'; .*did you mean 'law'"),
    ('augmentation = { law = "constant" }', "the constant law needs l0"),
    ('alpha = [0.5]\naugmentation = ["paper", { alpha = 1.0 }]', "alpha 0.5 is for an augmentation that leaves .*, and { alpha = 1.0 } has a strength of its own; leave one out"),
    ('alpha = [0.5]\naugmentation = "instaboost:M=5"', "'instaboost:M=5' has a strength of its own"),
    ('alpha = 0.5\naugmentation = "lapa2:alpha=1"', "'lapa2:alpha=1' has a strength of its own"),
    ('alpha = [0.5, 1]\naugmentation = ["none"]', r"alpha \[0.5, 1\] is for an augmentation, and augmentation is none; leave one out"),
    ('alpha = [0.5, 1]\naugmentation = { layers = "top", label = "up" }', "the label 'up' names two arms .alpha 0.5 paper, layers top; alpha 1 paper, layers top.; give each its own"),
    ("augmentation = { layers = [] }", "augmentation.layers is an empty list, so there is no cell"),
    ('augmentation = { layers = ["botom", "top"] }', "layers: takes 'all', 'bottom', .*; found 'botom'"),
    ("patterns = [[0, 0], [1, 1]]", r"patterns: takes pairs .*found \[0, 0\].*write all pairs as one text, or in a list more"),
    ('augmentation = { lawe = ["log", "sqrt"] }', "unknown field 'lawe'; .*did you mean 'law'"),
    ('augmentation = { law = ["linear", "constant"], l0 = 9.0 }', "l0 belongs to the laws log, constant and multiply, not to 'linear'"),
    ('augmentation = { label = ["a", "b"] }', "the label of an augmentation is a text, found .'a', 'b'."),
    ("augmentation = 3", "augmentation must be .*, recipes as one text .*; found 3"),
    ("label = 3", "label: input should be a valid string, found 3"),
    ('method = "none"\nprefix = "Quite {attribute}:"', "prefix 'Quite {attribute}:' changes nothing for none"),
    ('method = "datg"\naugmentation = { alpha = 1.0 }', "datg has no prefix for an augmentation to act on; generate without"),
    ("model = ", r"grid .*: Invalid value \(at line 2, .*`lapa2 grids` ends with an example"),
    ("block = 3", r"a block begins with \[\[block\]\], in double brackets"),
    ('[block]\nmethod = "prefix"', r"a block begins with \[\[block\]\], in double brackets"),
    ("block = []", "has no block, so no cell; `lapa2 grids` ends with an example"),
    ('augmentation = ["none", "past"]', "unknown augmentation 'past'.*did you mean 'pasta'.*or a table of fields"),
    ('augmentation = ["none", "selective:tokens=1"]', "needs tokens and heads|needs heads"),
    ('augmentation = ["none", "pasta:alpha=x"]', "recipe pasta: alpha: input should be a valid number, found .x."),
    ("[[block]]\nseed = 1\n[[block]]\naugmentation = []", "block 2: augmentation is an empty list"),
    # Of cells, by `check_grids`.
    ("augmentation = { layers = [9] }", "layer 9 does not exist; the model has layers 0-3"),
    ("augmentation = { heads = [[1, 4]] }", r"head \(1, 4\) does not exist; .* heads 0-3"),
    ("augmentation = { layers = [0], heads = [[1, 2]] }", "have nothing in common in a model of 4 layers"),
    ("augmentation = { span = [[3, 99]] }", r"span \[3, 99\) lies outside the sequence of"),
    ("length = 16", "length 16 leaves nothing to generate after the 16 tokens of 'Once upon a time'"),
    ("length = 250", "of BOS, prefix and prompt .* exceed the context of 256 of tiny-gpt2; shorten"),
    ("doubled_bos = true", "doubled_bos reproduces tokenizers that prepend BOS themselves"),
    ("[[block]]\nseed = 1\n[[block]]\n", "block 2: it has no keys; give one at least"),
    # Of calls.
    *((lambda text=text: of_text(text), "block 1: it has no keys; give one at least, such as length = 128")
      for text in ("", "# a grid\n", 'description = "a grid"\n', "[[block]]\n")),
    (lambda: load_grid("quick/scalling"), "unknown grid 'quick/scalling'; .*did you mean 'quick/scaling'.*or the path of a .toml"),
    (lambda: load_grid("nowhere.toml"), "there is no file nowhere.toml; `lapa2 grids` ends with an example"),
    (lambda: parse_changes(["samples"]), "set 'samples' is not of the form KEY=VALUE, such as samples=2"),
    (lambda: parse_changes(["sample=2"]), "set: unknown setting 'sample'; allowed: .*did you mean 'samples'"),
    (lambda: parse_changes(["samples=1", "samples=5"]), "set gives samples twice, 1 and 5; give it once"),
    (lambda: check_device("gpu7"), "cannot use device 'gpu7'"),
    # Of commands, where GRID is a grid and OUT is not there.
    ("lapa2 sweep --out OUT", "name a grid: `lapa2 sweep quick/sent_topic --out RUN`"),
    ("lapa2 sweep quick/alpha", "--out"),
    ("lapa2 sweep quick/alfa --out OUT", "did you mean 'quick/alpha'"),
    ("lapa2 sweep quick/alpha --set lenght=3 --out OUT", "did you mean 'length'"),
    ("lapa2 sweep GRID --out OUT --workers 0", "--workers: input should be greater than or equal to 1, found 0"),
    ("lapa2 sweep GRID --out OUT --threads 0", "--threads: input should be greater than or equal to 1, found 0"),
    ("lapa2 sweep GRID --out OUT --device cudaa", "cannot use device 'cudaa'"),
    ("lapa2 sweep GRID --out OUT --engine slurm", "slurm"),
    ("lapa2 sweep GRID --out /proc/nowhere/run --workers 1 --device cpu", "cannot write /proc/nowhere/run"),
    ("lapa2 grids nonsense", "unknown grid 'nonsense'"),
    ("lapa2 runs OUT", "there is no folder "),
    ("lapa2 runs .", ". is not a run: it has no run.json; `lapa2 generate` and `lapa2 sweep"),
    ("lapa2 runs OUT --state broken", "broken"),
    ("lapa2 sweep CANNOT --out OUT --workers 1 --device cpu", r"lapa2: grid g, cell \w{16} \(tiny-gpt2 sentiment/positive prefix, alpha 0.5 paper\): length 16 leaves nothing"),
]  # fmt: skip
"""What is asked for, which is lines of a grid that replace those of `TINY` or follow it, a call, or a
command; and what the one line of the error says."""


def with_lines(lines):
    text = TINY
    for line in lines.splitlines():
        stated = re.search(rf"(?m)^{re.escape(line.split(' ')[0])} = .*\n", text)
        start, stop = stated.span() if stated else (len(text), len(text))
        text = f"{text[:start]}{line}\n{text[stop:]}"
    return text


@pytest.mark.parametrize(("asked", "message"), REFUSED)
def test_what_is_refused_is_so_in_a_line_before_anything_runs(
    grid, tmp_path, monkeypatch, capsys, asked, message
):
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("nothing is loaded"))
    if isinstance(asked, str) and asked.startswith("lapa2 "):
        (tmp_path / "can.toml").write_text(TINY)
        (tmp_path / "g.toml").write_text(with_lines("length = 16"))
        names = {"GRID": "can.toml", "CANNOT": "g.toml", "OUT": "out"}
        line = asked.removeprefix("lapa2 ")
        for word, name in names.items():
            line = line.replace(word, str(tmp_path / name))
        assert lapa2(line) == 2
        printed = capsys.readouterr().err.splitlines()
        (error,) = [line for line in printed if line.startswith("lapa2: ")]
        assert re.search(message, error)
        assert not (tmp_path / "out").exists()
        return
    with pytest.raises(Lapa2Error, match=message) as caught:
        asked() if callable(asked) else check_grids([grid(with_lines(asked))])
    assert "\n" not in str(caught.value)


def test_a_prompt_that_is_given_twice_is_refused(tmp_path, grid, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "twice.txt").write_text("The lake\nThe sea\nThe lake\n")
    with pytest.raises(GridError, match="block 1: the prompt 'The lake' is given twice"):
        grid(TINY.replace("prompts = 2", 'prompts = "twice.txt"'))


def test_prompts_that_are_not_there_are_needed_and_refused_by_a_sweep(
    tmp_path, grid, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    text = TINY.replace("prompts = 2", 'prompts = { file = "rtp.txt", n = 3, what = "toxic ones" }')
    needing = grid(text, check=False)
    assert needing.needs == ("no file rtp.txt (3 prompts: toxic ones) in the folder you are in",)
    assert [len(cell.task.prompts.texts) for cell in needing.cells] == [3, 3], "for the estimate"
    assert lapa2("grids g.toml") == 0
    assert "g cannot run yet: no file rtp.txt (3 prompts: toxic ones)" in capsys.readouterr().out
    assert lapa2("sweep g.toml --out run") == 2
    assert (
        "lapa2: grid g.toml cannot run yet: no file rtp.txt (3 prompts: toxic ones)"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()
    (tmp_path / "rtp.txt").write_text("One\nTwo\n")
    with pytest.raises(GridError, match="rtp.txt has 2 prompts, and not 3"):
        grid(text)


def test_soft_prefixes_of_another_model_are_refused_before_anything_runs(tmp_path, grid):
    from conftest import soft_prefix

    from lapa2_interp.prefixes.soft_prefix import SoftPrefix, save_prefix

    prefix = soft_prefix(load("tiny-gpt2"))
    shape = prefix.card.shape.model_copy(update={"n_layers": 2})
    card = prefix.card.model_copy(update={"shape": shape, "model": "another"})
    save_prefix(SoftPrefix(prefix.keys[:2], prefix.values[:2], card), tmp_path / "set", "float32")
    text = (
        TINY.replace('"prefix"', f'{{ name = "prefix", prefixes = "{tmp_path}/set" }}')
        + 'attribute = "positive"'
    )
    with pytest.raises(
        GridError, match="'positive' was made for another .*; tiny-gpt2 has 4 layers"
    ):
        check_grids([grid(text)])


def test_models_that_are_unknown_or_not_reached_are_refused_by_name(grid, tmp_path, capsys):
    for model in ("tiny-gpt3", "nobody/has-this", str(tmp_path)):
        with pytest.raises(ModelError, match=model):
            check_grids([grid(TINY.replace("tiny-gpt2", model))])
    (tmp_path / "g.toml").write_text(TINY.replace("tiny-gpt2", "meta-llama/Llama-2-7b-hf"))
    assert lapa2("sweep", tmp_path / "g.toml", "--out", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "lapa2: cannot load model 'meta-llama/Llama-2-7b-hf'; allowed: smollm2-135m, "
    )
    assert not (tmp_path / "run").exists()


def test_a_class_that_the_installed_transformer_lens_lacks_is_refused(grid, monkeypatch):
    from types import ModuleType

    from lapa2_interp.runs import checks

    # by another name: `from transformer_lens import X` also looks for a loaded module
    # transformer_lens.X
    monkeypatch.setitem(sys.modules, "transformer_lens", ModuleType("transformer_lens_without"))
    monkeypatch.setattr(checks, "_check_class", checks._check_class.__wrapped__)
    with pytest.raises(
        ModelError,
        match="no HookedTransformer; install transformer-lens 3.9 or use TransformerBridge",
    ):
        check_grids([grid(TINY + 'model_class = "HookedTransformer"')])


def test_checks_load_a_tokenizer_once(grid, monkeypatch):
    from lapa2_interp.runs import checks

    checks._tokenizer.cache_clear()
    real, loaded = checks.load_tokenizer, []
    monkeypatch.setattr(checks, "load_tokenizer", lambda name: loaded.append(name) or real(name))
    check_grids(
        [grid(TINY + "seed = [1, 2]"), grid(TINY + "samples = 5".replace("samples", "top_k"), "h")]
    )
    assert loaded == ["tiny-gpt2"]


def test_a_grid_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "latin.toml").write_bytes("description = 'é'".encode("latin-1"))
    with pytest.raises(GridError, match=r"cannot read .*latin\.toml as text: "):
        load_grid(str(tmp_path / "latin.toml"))


def test_the_usual_devices_are_known():
    check_device(None)
    check_device("cpu")


def test_a_sweep_says_which_methods_have_which_prefixes(tmp_path, capsys):
    (tmp_path / "kinds.toml").write_text(
        'description = "x"\nmodel = "smollm2-135m"\ntask = "topic"\nprompts = 1\nlength = 12\n'
        'samples = 1\nmethod = ["prefix", "remind", "none"]\naugmentation = "none"\n'
    )
    run = ("sweep --workers 1 --device cpu --dry-run", tmp_path / "kinds.toml")
    assert lapa2(*run, "--out", tmp_path / "run") == 0
    assert "prefixes: mle (prefix); hard (remind); none (none)\n" in capsys.readouterr().err


def test_a_dry_run_says_the_work_and_makes_nothing(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(TINY)
    run = tmp_path / "run"
    command = ("sweep --workers 1 --device cpu", tmp_path / "mine.toml", "--out", run)
    assert lapa2(*command, "--dry-run") == 0
    printed = capsys.readouterr()
    expected = "2 of 2 cells to make: 4 texts, .* row-tokens, .* with 1 worker\nprefixes: hard\n"
    assert re.search(expected, printed.err)
    assert printed.out == f"0 cells there, and none made: {run}\n"
    assert not run.exists()
    assert lapa2(*command, "--only", "attribute=positive") == 0
    files = sorted(run.rglob("*"))
    capsys.readouterr()
    assert lapa2(*command, "--dry-run") == 0
    assert "1 of 2 cells to make: 2 texts" in capsys.readouterr().err
    assert sorted(run.rglob("*")) == files


# --- estimates


def tokens_read(cell):
    """Rows times columns of everything the model embeds while a cell is generated."""
    import torch

    model, read = load("tiny-gpt2"), []
    (embedding, *_) = (
        module for module in model.original_model.modules()
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == len(model.tokenizer)
    )  # fmt: skip
    hook = embedding.register_forward_hook(
        lambda _module, inputs, _outputs: read.append(inputs[0].numel())
    )
    make_cells(model, [cell])
    hook.remove()
    return sum(read)


@pytest.mark.parametrize("method", ["prefix", "air-decoding", "preadd"])
def test_the_cost_of_a_cell_is_what_the_model_reads(grid, method):
    text = (
        TINY.replace("length = 24", "length = 40")
        .replace("samples = 1", "samples = 3")
        .replace("prefix", method)
    )
    task = (
        '"detox"\nattribute = "nontoxic"'
        if method == "preadd"
        else '"sentiment"\nattribute = "positive"'
    )
    (cell,) = grid(text.replace('"sentiment"', task)).cells
    read = tokens_read(cell)
    assert row_tokens_of(cell) == pytest.approx(read, rel=0.15)
    assert read > 100


def test_the_cost_without_a_tokenizer_is_near_that_with_one():
    from lapa2_interp.models.load import shared_tokenizer

    guessed, counted = 0, 0
    layout = functools.cache(functools.partial(Layout.of, shared_tokenizer("smollm2-135m")))
    for name in QUICK:
        for cell in load_grid(name, {"prompts": 4}).cells:
            method = cell.decoding_method
            total = 0
            for branch, prompt in itertools.product(
                method.branches(cell.task, cell.attribute), cell.task.prompts.texts
            ):
                text = None if isinstance(branch.prefix, SoftPrefixKey) else branch.prefix
                row = layout(text, branch.join + prompt)
                new = cell.length - row.l_pro * cell.task.length_counts_prompt
                total += len(row.ids) + cell.samples * (new - 1)
            assert row_tokens_of(cell) == pytest.approx(total, rel=0.15), cell.description
            guessed, counted = guessed + row_tokens_of(cell), counted + total
    assert guessed == pytest.approx(counted, rel=0.05)


def test_the_estimate_of_the_disk_is_near_what_is_written(tmp_path, grid):
    large = grid(
        TINY.replace("samples = 1", "samples = 20").replace("24", "64") + 'attribute = "positive"'
    )
    make_cells(load("tiny-gpt2"), large.cells).save(tmp_path / "run")
    written = sum(
        file.stat().st_size for file in (tmp_path / "run" / "cells").rglob("*") if file.is_file()
    )
    assert 0.4 < estimate(large.cells, "cpu").disk / written < 2.5


@pytest.fixture
def cache_with_smollm2(monkeypatch, tmp_path):
    """A cache that holds the converted SmolLM2 and nothing else."""
    made = smollm2_folder()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / made.name).symlink_to(made)
    monkeypatch.setenv("LAPA2_CACHE", str(tmp_path / "cache"))


def test_memory_is_weights_keys_values_and_logits(grid):
    """Two plans of a cell differ by what a row more, and a key more, takes by hand: layers x 2 x
    keys x width x bytes."""
    raw = grid(TINY + "max_rows = 10").cells[0].model_dump()
    size = estimates.model_size("tiny-gpt2")
    assert (size.kv_width, size.vocab) == (32, load("tiny-gpt2").cfg.d_vocab)

    def of(device="cpu", **changes):
        return estimates.memory(Cell.model_validate(raw | {"samples": 60} | changes), device)

    before, new = estimates._lengths(Cell.model_validate(raw))
    a_key = 2 * size.n_layers * 32 * 4
    assert of(max_rows=20) - of() == 10 * (a_key * (before + new) + 6 * size.vocab * 4)
    assert of(length=raw["length"] + 7) - of() == 10 * 7 * a_key
    assert of(dtype="bfloat16") < of()
    assert of() - of("cuda") == estimates.LIBRARIES + int(1.5 * 4 * size.parameters), "packed"


def test_weights_that_would_not_fit_twice_are_not_packed(grid, monkeypatch):
    (cell, *_) = grid(TINY).cells
    monkeypatch.setattr(machine, "usable_memory", lambda: 1000)
    assert estimates.memory(cell) - estimates.memory(cell, "cuda") == estimates.LIBRARIES


def test_estimates_add_up(grid):
    cells = grid(TINY + "seed = [1, 2]\nmax_rows = 1").cells
    both = estimate(cells, "cpu")
    assert (len(cells), both.texts, both.row_tokens) == (4, 8, sum(map(row_tokens_of, cells)))
    parts = [estimate(part, "cpu") for part in (cells[:1], cells[1:])]
    assert sum(part.disk for part in parts) == both.disk
    assert both.memory == max(map(estimates.memory, cells))
    assert estimate([], "cpu") == Estimate(0, 0, 0, 0)
    assert {estimate(cells, device).row_tokens for device in ("auto", "cuda:3")} == {
        both.row_tokens
    }
    more = [cells[0].model_copy(update={"samples": n}) for n in (1, 2, 3)]
    costs = [row_tokens_of(cell) for cell in more]
    assert costs[2] - costs[1] == costs[1] - costs[0] > 0, "a prompt is read once"


def test_very_many_row_tokens_or_too_much_memory_are_begun_with_a_yes_alone(monkeypatch):
    many = estimates.MOST_ROW_TOKENS + 1
    with pytest.raises(RunError, match="5 texts would take 1e.11 row-tokens, .*give yes=True"):
        check_affordable(5, many, 0)
    monkeypatch.setattr(machine, "machine_memory", lambda: 2_000_000)
    with pytest.raises(RunError, match="5 texts would take 3.0 MB of memory, of 2.0 MB"):
        check_affordable(5, 1, 3_000_000)
    check_affordable(5, many, 3_000_000, yes=True)
    check_affordable(5, many - 1, 2_000_000)


def test_the_rows_of_an_estimate_are_those_of_the_plan(grid, monkeypatch):
    for changes, cache in (("", 1 << 31), ("max_rows = 3\n", 1 << 31), ("", 1 << 19)):
        for module in ("attention.cache", "runs.estimates"):
            monkeypatch.setattr(f"lapa2_interp.{module}.CACHE_BYTES", cache)
        text = TINY.replace("samples = 1", "samples = 5").replace("24", "200")
        cell = grid(text + changes).cells[0]
        todo = plan_batches(load("tiny-gpt2"), cell)
        planned = len(cell.branches) * max(map(len, todo.batches))
        assert estimates._batch(cell)[0] == pytest.approx(planned, abs=1)
    assert 1 < len(todo.batches) < 10, "fewer rows, as their cache would be too large"


def test_a_length_beyond_the_context_is_told_before_anything_is_asked_for(tmp_path, capsys):
    (tmp_path / "long.toml").write_text(TINY.replace("length = 24", "length = 5000"))
    assert lapa2("grids", tmp_path / "long.toml") == 0
    printed = capsys.readouterr().out
    most = estimates.model_size("tiny-gpt2").n_ctx
    assert (
        printed.count(f"long cannot run: length 5000 exceeds the context of {most} of tiny-gpt2")
        == 1
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (40.0, "40 s"),
        (89.4, "89 s"),
        (90.0, "2 min"),
        (720.0, "12 min"),
        (12_240.0, "3.4 h"),
        (432e3, "5.0 days"),
        (3.9e9, "123.7 years"),
    ],
)
def test_times_for_reading(seconds, text):
    assert format_duration(seconds) == text


def test_sizes_for_reading():
    assert [format_bytes(size) for size in (0, 140_000, 2_500_000, 3_100_000_000)] == [
        "0.0 MB",
        "0.1 MB",
        "2.5 MB",
        "3.1 GB",
    ]


def test_the_list_of_grids_tells_texts_and_disk_before_anything_runs(
    cache_with_smollm2, tmp_path, capsys
):
    assert lapa2("grids") == 0
    out = capsys.readouterr().out
    rows = {
        line.split()[0]: line.split()
        for line in out.splitlines()
        if line.startswith(("paper/", "quick/"))
    }
    assert list(dict.fromkeys(rows)) == built_in()
    for name, (_, cells, texts, *rest) in (
        (n, r) for n, r in rows.items() if "cannot" not in r[:2]
    ):
        grid = load_grid(name, check=False)
        assert (int(cells), int(texts)) == (len(grid.cells), sum(arms(grid).values()))
        assert rest[-1] in ("MB", "GB") or "machine" in rest
        assert f"    {grid.description}" in out
    assert (
        "paper/sent_topic cannot run yet: no soft prefixes 'contrastive' of task topic for"
        " gpt2-medium" in out
    )
    assert out.endswith(EXAMPLE)
    (tmp_path / "g.toml").write_text(TINY)
    assert lapa2("grids", tmp_path / "g.toml", "--set", "seed=[1,2]") == 0
    out = capsys.readouterr().out
    for cell in load_grid(str(tmp_path / "g.toml"), {"seed": [1, 2]}).cells:
        assert f"{cell.key}  {cell.description}, 1 x 24" in out


def test_grids_as_json_are_their_cells(capsys):
    assert lapa2("grids --json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == built_in()
    for entry in listed:
        for raw in entry["cells"]:
            key = raw.pop("key")
            assert Cell.model_validate(raw).key == key


def test_every_key_of_a_grid_is_one_of_a_cell_or_decides_one():
    """Whoever adds a key has to say what it does to a cell."""
    assert set(CellSettings.model_fields) - set(Cell.model_fields) == {"prompts", "prefix", "alpha"}
    assert set(CHANGES) == set(Cell.model_fields) - {"label", "heads_of"}  # which decide no text
