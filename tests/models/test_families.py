"""Families of models against plain transformers, in both classes: the table of `families.py`."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from families import BRIDGE, FAMILIES, PLAIN, marked, save_family, table
from transformers import DynamicCache

from lapa2_interp import Augmentation, Layout, augmented, load_model
from lapa2_interp._util.errors import (
    CircuitError,
    DeadHookError,
    LayoutError,
    ModelError,
    PrefixError,
    TraceError,
)
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.cli.app import main
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models.card import layer_types
from lapa2_interp.models.liveness import LIVE_FAMILIES
from lapa2_interp.models.load import load_transformers
from lapa2_interp.prefixes.soft_prefix import kv_shape

CLASSES = (BRIDGE, PLAIN)
PROMPTS = ("The lake", "A book is on the")
RULE = Augmentation(alpha=0.7)
STEPS = 7
"""Every prompt is longer than a window of 16 tokens; the second text begins a chunk of 16 on its way."""
WORKING, REFUSED = (
    [
        marked(name, kind)
        for name, family in FAMILIES.items()
        for kind in CLASSES
        if (kind in family.refused) == refused
    ]
    for refused in (False, True)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return functools.cache(lambda name: save_family(name, tmp_path_factory.mktemp("family")))


@pytest.fixture(scope="module")
def load(folder):
    """A model of a family in float64; each is loaded once."""
    return functools.cache(
        lambda name, kind: load_model(folder(name), dtype="float64", device="cpu", model_class=kind)
    )


@pytest.fixture(scope="module")
def network(folder):
    """The same as transformers loads it."""
    return functools.cache(lambda name: load_transformers(folder(name), "float64")[0])


def layouts_of(model, rows=(0, 1)):
    return [Layout.of(model.tokenizer, "Very good:", PROMPTS[row]) for row in rows]


@torch.no_grad()
def decoded(model, layouts, rule, steps=STEPS):
    """Tokens and logits of greedy decoding: [row step], [row step vocab]."""
    rows, padded, found = new_rows(model), left_pad(layouts), []
    with augmented(model, rule, padded):
        found.append(rows.prompt_pass(padded)[:, -1])
        rows.expand(torch.arange(len(padded)), capacity=len(padded[0]) + steps - 1)
        for _ in range(steps - 1):
            found.append(rows.read_tokens(found[-1].argmax(1)[:, None])[:, -1])
    logits = torch.stack(found, dim=1)
    return logits.argmax(2), logits


@pytest.fixture(scope="module")
def decode(load):
    """Tokens and logits of some of the prompts in a batch; each batch is decoded once."""

    @functools.cache
    def made(name, kind, rows, rule):
        model = load(name, kind)
        return decoded(model, layouts_of(model, rows), rule)

    return made


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
    assert table() in (pages / "docs" / "models.md").read_text("utf-8")
    working = sum(len(family.refused) < len(CLASSES) for family in FAMILIES.values())
    assert f"[{working} families of models work]" in (pages / "README.md").read_text("utf-8")


@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_what_does_not_work_is_refused_in_one_line(load, name, kind):
    with pytest.raises((DeadHookError, ModelError), match=FAMILIES[name].refused[kind]) as caught:
        load(name, kind)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "kind"), WORKING)
def test_alpha_0_is_transformers_generate(load, decode, network, name, kind):
    """Also which keys the queries of its layers see."""
    model = load(name, kind)
    assert tuple(map(str, layer_types(model))) == FAMILIES[name].sees
    for layout, tokens, logits in zip(
        layouts_of(model), *decode(name, kind, (0, 1), Augmentation(alpha=0)), strict=True
    ):
        made = network(name).generate(
            layout.tensor, attention_mask=torch.ones_like(layout.tensor), max_new_tokens=STEPS,
            min_new_tokens=STEPS, do_sample=False, output_logits=True, return_dict_in_generate=True,
            eos_token_id=None,
        )  # fmt: skip
        assert made.sequences[0, len(layout) :].tolist() == tokens.tolist()
        wanted = torch.cat(made.logits).double()
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "kind"), WORKING)
@torch.no_grad()
def test_cached_decoding_with_the_bias_is_one_pass(load, decode, name, kind):
    model = load(name, kind)
    layout, atol = layouts_of(model)[0], FAMILIES[name].atol
    tokens, logits = decode(name, kind, (0,), RULE)
    ids = torch.cat([layout.tensor, tokens[:, :-1]], dim=1)
    with augmented(model, RULE, layout):
        wanted = model(ids)[:, len(layout) - 1 :]
    torch.testing.assert_close(logits, wanted, atol=atol, rtol=0)
    plain = decode(name, kind, (0, 1), Augmentation(alpha=0))[1]
    assert (logits - plain)[0, 0].abs().max() > 1e-3, "the bias acts"


@pytest.mark.parametrize(("name", "kind"), WORKING)
def test_a_batch_is_its_rows_alone(decode, name, kind):
    together = decode(name, kind, (0, 1), RULE)[1]
    for row in (0, 1):
        alone = decode(name, kind, (row,), RULE)[1][0]
        torch.testing.assert_close(together[row], alone, atol=FAMILIES[name].atol, rtol=0)


@pytest.mark.parametrize(("name", "kind"), WORKING)
@torch.no_grad()
def test_the_trace_is_the_attentions_of_transformers(load, network, name, kind):
    model = load(name, kind)
    layout, text = layouts_of(model)[0], list(range(40, 40 + STEPS))
    trace = teacher_forced(model, layout, [text])
    ids = torch.tensor([[*layout.ids, *text[:-1]]])
    patterns = network(name)(ids, output_attentions=True, use_cache=False).attentions
    attending = [layer for layer, sees in enumerate(FAMILIES[name].sees) if sees != "none"]
    assert len(patterns) == len(attending)
    spans = {"bos": layout.bos, "prefix": layout.prefix, "prompt": layout.prompt}
    spans["generated"] = (layout.prompt.stop, ids.shape[1])
    for part, (start, stop) in spans.items():
        found = trace[part].to_numpy()[0, 0]  # step layer head
        assert found.shape[1] == len(FAMILIES[name].sees)
        for layer, pattern in zip(attending, patterns, strict=True):
            # head query key -> query head
            wanted = pattern[0, :, len(layout) - 1 :, start:stop].sum(2).T
            np.testing.assert_allclose(
                found[:, layer], wanted, atol=1e-5, err_msg=f"{part} {layer}"
            )
        left = [layer for layer in range(found.shape[1]) if layer not in attending]
        assert np.isnan(found[:, left]).all()


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
            TraceError, match=r"layers full: 0-2, and .*layer_types=layer_types\(model\)"
        ),
        augmented(model, RULE, layout, Recorder(*size)),
    ):
        pass
    with augmented(model, RULE, layout, Recorder(*size, layer_types=list(layer_types(model)))):
        pass


def test_probe_names_the_layers_with_attention(folder, capsys):
    assert main(["probe", str(folder("Granite 4")), "--model-class", PLAIN]) == 0
    assert "live in layers 1 (the others have no attention): editing" in capsys.readouterr().out


@torch.no_grad()
def test_generate_of_transformers_computes_every_query_of_shared_keys(load):
    """Transformers leaves queries out where layers share keys, so slots would be told wrong."""
    model = load("Gemma 4", PLAIN)
    layout = layouts_of(model)[0]
    with augmented(model.original_model, RULE, layout):
        made = model.original_model.generate(
            layout.tensor, attention_mask=torch.ones_like(layout.tensor), max_new_tokens=2,
            do_sample=False, eos_token_id=None, past_key_values=DynamicCache(),
        )  # fmt: skip
    assert made[0, len(layout) :].tolist() == decoded(model, [layout], RULE, 2)[0][0].tolist()
