"""What families of models refuse, and what is particular to one: the table of `families.py`. What
all of them compute: `test_conformance`."""

import functools
from pathlib import Path

import pytest
from families import BRIDGE, FAMILIES, PLAIN, families_by_class, marked, save_family

from lapa2_interp import Augmentation, Layout, augmented, load_model
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.cli.app import main
from lapa2_interp.errors import (
    CircuitError,
    DeadHookError,
    LayoutError,
    ModelError,
    PrefixError,
    TraceError,
)
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.liveness import LIVE_FAMILIES
from lapa2_interp.prefixes.soft_prefix import kv_shape

CLASSES = (BRIDGE, PLAIN)
PROMPTS = ("The lake", "A book is on the")
RULE = Augmentation(alpha=0.7)
REFUSED = [
    marked(name, kind)
    for name, family in FAMILIES.items()
    for kind in CLASSES
    if kind in family.refused
]
REFUSED = [
    marked(name, kind)
    for name, family in FAMILIES.items()
    for kind in CLASSES
    if kind in family.refused
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return functools.cache(lambda name: save_family(name, tmp_path_factory.mktemp("family")))


@pytest.fixture(scope="module")
def load(folder):
    """A model of a family in float64; each is loaded once."""
    return functools.cache(
        lambda name, kind: load_model(folder(name), dtype="float64", device="cpu", model_class=kind)
    )


def layouts_of(model, rows=(0, 1)):
    return [Layout.of(model.tokenizer, "Very good:", PROMPTS[row]) for row in rows]


def test_the_list_in_the_error_and_the_documents_are_this_table():
    """Run `PYTHONPATH=. python tests/families.py` where the document differs."""
    for kind, names in LIVE_FAMILIES.items():
        often_used = [
            name
            for name, family in FAMILIES.items()
            if kind not in family.refused and not family.long and not family.inside
        ]
        assert sorted(names) == sorted(often_used)
    pages = Path(__file__).parents[2]
    assert families_by_class() in (pages / "docs" / "models.md").read_text("utf-8")
    working = sum(len(family.refused) < len(CLASSES) for family in FAMILIES.values())
    assert f"[{working} families of models work]" in (pages / "README.md").read_text("utf-8")


@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_what_does_not_work_is_refused_in_one_line(load, name, kind):
    with pytest.raises((DeadHookError, ModelError), match=FAMILIES[name].refused[kind]) as caught:
        load(name, kind)
    assert "\n" not in str(caught.value)


def test_a_model_that_reads_images_installs_nothing(folder, monkeypatch):
    """Transformer-lens would have pip install torchvision."""
    monkeypatch.setattr("subprocess.Popen", None)
    load_model(folder("Gemma 3 with images"), device="cpu", model_class=BRIDGE)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Falcon-H1", "Gemma 4", "DeepSeek-V3"])
def test_layers_of_several_shapes_take_no_soft_prefix(load, name):
    with pytest.raises(PrefixError, match="keys and values of one shape.*use a hard prefix"):
        kv_shape(load(name, PLAIN), 3)


def test_what_cannot_act_in_a_hybrid_is_told_why(load):
    """No way back for layers that are recurrent, convolutional, or recurrent beside attention; and
    no circuits beside the first two."""
    cases = (("Granite 4", BRIDGE), ("Granite 4", PLAIN), ("LFM2", PLAIN), ("Falcon-H1", PLAIN))
    rule = Augmentation(alpha=1.0, phase="predicting_only")
    for name, kind in cases:
        model = load(name, kind)
        with pytest.raises(
            LayoutError, match="convolutional layers of .* cannot forget.*last_query"
        ):
            teacher_forced(model, layouts_of(model)[0], [[40, 41]], rule)
    for name, kind in cases[:-1]:
        with pytest.raises(CircuitError, match="attention in every layer, and this one has it in"):
            ContrastSet.of(load(name, kind), "sentiment")


def test_heads_are_not_read_where_hooks_have_none(load):
    """TransformerLens cuts the heads' outputs of MLA by the size of rotary keys."""
    contrast_set = ContrastSet.of(load("DeepSeek-V3", PLAIN), "sentiment", prompts=["A"], tokens=2)
    with pytest.raises(CircuitError, match="hook_z .* is not by head.*TransformersModel"):
        ContrastSet.of(load("DeepSeek-V3", BRIDGE), contrast_set)


def test_a_sink_takes_its_share_and_laws_that_read_scores_refuse_it(load):
    for kind in CLASSES:
        model = load("gpt-oss", kind)
        layout = layouts_of(model)[0]
        trace = teacher_forced(model, layout, [[40, 41]])
        total = sum(trace[part] for part in ("bos", "prefix", "prompt", "generated"))
        assert 0.01 < float((1 - total).max()) < 1
        with pytest.raises(DeadHookError, match="learned sink"):
            teacher_forced(model, layout, [[40]], Augmentation(alpha=1.0, law="target", tau=0.5))


@pytest.mark.parametrize("name", ["Granite 4", "Gemma 2"])
def test_a_recorder_must_know_which_keys_layers_see(load, name):
    model = load(name, PLAIN)
    layout, size = layouts_of(model)[0], (model.cfg.n_layers, model.cfg.n_heads)
    with (
        pytest.raises(
            TraceError, match=r"layers full: 0-2, and .*layer_types=facts_of\(model\)\.layer_types"
        ),
        augmented(model, RULE, layout, Recorder(*size)),
    ):
        pass
    with augmented(
        model, RULE, layout, Recorder(*size, layer_types=list(facts_of(model).layer_types))
    ):
        pass


def test_probe_names_the_layers_with_attention(folder, capsys):
    assert main(["probe", str(folder("Granite 4")), "--model-class", PLAIN]) == 0
    assert "live in layers 1 (the others have no attention): editing" in capsys.readouterr().out
