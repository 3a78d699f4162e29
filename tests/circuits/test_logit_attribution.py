"""Direct logit attribution: everything sums, and the answer_key heads write what they should."""

import numpy as np
import pytest
import torch
from conftest import load, soft_prefix
from test_circuits import WORDS, contrast_set, planted_contrast_set

from lapa2_interp import Augmentation, Layout, load_model
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.examples import ContrastExample
from lapa2_interp.circuits.knockout import knock_out
from lapa2_interp.circuits.logit_attribution import PARTS, head_logit_attribution
from lapa2_interp.models.planted import (
    NEGATIVE,
    POSITIVE,
    answer_key,
)


def gap(direct):
    total = direct.direct.sum((-1, -2, -3)) + direct.others.sum(-1)
    return np.nanmax(np.abs(total - direct.total))


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-neox", "smollm2-135m"])
def test_all_parts_sum_to_the_logit_difference(name):
    model = load(name)
    real = {"prefixes": {"a": "Very positive:", "b": "Very negative:"}, "prompts": ("jkl",)}
    asked = contrast_set(model, **(real if name == "smollm2-135m" else {}))
    direct = head_logit_attribution(model, asked)
    assert gap(direct) < 1e-4 * max(1, np.abs(direct.total).max())
    for i, example in enumerate(asked.examples):
        for branch, layout in enumerate(example.layouts):
            with torch.no_grad():
                ids = torch.tensor([[*layout.ids, *example.text[:-1]]])
                logits = model(ids)[0, len(layout) - 1 :].double()
            plus, minus = WORDS
            expected = sum(
                sign * (logits[:, list(words)].softmax(1) * logits[:, list(words)]).sum(1)
                for sign, words in ((1, plus), (-1, minus))
            )
            assert np.abs(direct.total[i, branch] - expected.numpy()).max() < 1e-3


def test_a_head_is_its_output_through_the_frozen_norm(tiny):
    """Independently: the head's z times W_O, taken out of the final stream, sigma held."""
    model = load(tiny, "float64")
    asked = contrast_set(model)
    direct = head_logit_attribution(model, asked)
    example, activations = asked.examples[0], {}
    ids = torch.tensor([[*example.layouts[0].ids, *example.text[:-1]]])

    def keep(tensor, hook):
        activations[hook.name] = tensor.clone()

    names = ["blocks.2.attn.o.hook_in", "ln_final.hook_in", "ln_final.hook_scale"]
    with torch.no_grad(), model.hooks(fwd_hooks=[(name, keep) for name in names]):
        logits = model(ids)[0, -example.n_steps :]
    z, stream, scale = (activations[name][0, -example.n_steps :] for name in names)
    norm = model.ln_final.original_component

    def through(x):
        x = x - x.mean(1, keepdim=True) if isinstance(norm, torch.nn.LayerNorm) else x
        return x / scale * norm.weight @ model.W_U

    plus, minus = (list(words) for words in asked.words)
    for head in range(model.cfg.n_heads):
        lost = through(stream) - through(stream - z[:, head] @ model.W_O[2, head])
        expected = (logits[:, plus].softmax(1) * lost[:, plus]).sum(1)
        expected -= (logits[:, minus].softmax(1) * lost[:, minus]).sum(1)
        ours = direct.direct[0, 0, :, 2, head].sum(1)
        assert np.abs(ours - expected.detach().numpy()).max() < 1e-6


@pytest.mark.parametrize("name", ["planted", "planted-gpt2:2"])
def test_planted_heads_write_what_the_key_says(name):
    model, key = load(name), answer_key(name)
    asked = planted_contrast_set(model, name, 24)
    direct = head_logit_attribution(model, asked)
    assert gap(direct) < 1e-4
    for i, example in enumerate(asked.examples):
        layout = example.layouts[0]
        for t in range(1, example.n_steps):
            l = len(layout) + t
            x, opposite = key.written(l, layout.l_pro)
            for role in ("carrier", "suppressor"):
                part = key.gain[role] * key.odds[role] / (key.odds[role] + l - 1)
                expected = 2 * key.logit * part / np.sqrt(1 + (x**2 + opposite) / 16)
                layer, head = key.heads[role]
                assert direct.direct[i, 0, t, layer, head, 0] == pytest.approx(expected, abs=1e-4)
    frame = direct.frame().set_index(["layer", "head"])
    assert frame.index[0] == key.heads["carrier"]
    assert frame.index[-1] == key.heads["suppressor"]
    # The relay writes for the reader: nothing directly, and much is lost without it.
    assert abs(frame.loc[key.heads["relay"], "direct_all"]) < 1e-5
    lost = knock_out(
        model, asked, over={"relay": [key.heads["relay"]]}, metric="lex", other_metrics=()
    )
    assert lost.values.mean() > 0.5
    # The reader writes from the prompt, not from the prefix; the decoy's mass writes nothing.
    reader = frame.loc[key.heads["reader"]]
    assert abs(reader["direct"]) < 1e-5 < reader["direct_all"]
    decoy = frame.loc[key.heads["decoy"]]
    assert decoy["mass"] == frame["mass"].max()
    assert decoy["size"] == 0
    best, worst = direct.words(*key.heads["carrier"], n=6)
    assert set(best) == set(POSITIVE)
    assert set(worst) == set(NEGATIVE)


def test_a_head_without_an_output_writes_nothing():
    model = load_model("tiny-gpt2", device="cpu")
    with torch.no_grad():  # Conv1D: head x d_head, d_model
        model.blocks[1].attn.o.original_component.weight[8:16] = 0
    direct = head_logit_attribution(model, contrast_set(model))
    assert np.abs(direct.direct[..., 1, 1, :]).max() == 0
    assert np.abs(direct.direct[..., 1, 2, :]).max() > 0
    assert gap(direct) < 1e-4


def test_parts_are_places_and_masses_are_shares(tiny):
    model = load(tiny)
    direct = head_logit_attribution(model, contrast_set(model))
    assert np.abs(direct.mass.sum(-1) - 1).max() < 1e-5
    assert direct.mass[:, :, 0, :, :, PARTS.index("generated")].max() == 0
    assert (direct.size >= 0).all()
    table = direct.parts()
    assert table["direct"][:-1].sum() == pytest.approx(table["direct"].iloc[-1], abs=1e-4)
    assert direct.plot()._repr_png_()[:4] == b"\x89PNG"


def test_soft_prefixes_and_an_augmentation():
    model = load("tiny-llama")
    soft = [soft_prefix(model, seed=seed) for seed in (0, 1)]
    layouts = tuple(Layout.of(model.tokenizer, None, "efg", soft=5) for _ in soft)
    example = ContrastExample("efg", ("a", "b"), layouts, (70, 80, 90), prefixes=tuple(soft))
    asked = ContrastSet((example,), WORDS)
    plain, boosted = (
        head_logit_attribution(model, asked, augmentation=a) for a in (None, Augmentation(alpha=1))
    )
    for direct in (plain, boosted):
        assert gap(direct) < 1e-4
    assert boosted.mass[..., 0].mean() > plain.mass[..., 0].mean()
