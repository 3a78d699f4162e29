"""Placebos of maps, and TransformerLens' tools of analysis as judges."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import load
from test_circuits import contrast_set
from test_transformer_lens import favour
from transformer_lens.tools import analysis as lens

from lapa2_interp import load_model
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.gradients import attribution
from lapa2_interp.circuits.knockout import knock_out
from lapa2_interp.circuits.logit_attribution import head_logit_attribution
from lapa2_interp.circuits.placebo import check_placebo, shuffled_labels
from lapa2_interp.circuits.study import run_study
from lapa2_interp.cli.app import main
from lapa2_interp.errors import CircuitError
from lapa2_interp.models.facts import facts_of
from lapa2_interp.report.study_page import render_study

pytestmark = pytest.mark.usefixtures("without_ink")

PROMPTS = ("The lake", "The book", "The city", "The road", "The horse", "The movie", "The pizza", "The country")  # fmt: skip


def ids_of(example, branch):
    return torch.tensor([[*example.layouts[branch].ids, *example.text[:-1]]])


def test_a_cut_hat_is_an_attribution_patch():
    """Their clean run sees no prefix in one layer, where inputs are those of the other run; the
    heads' nodes are then the first-order effect of hiding the prefix from each head."""
    model = load("tiny-gpt2", "float64")
    asked = contrast_set(model)
    estimate = attribution(model, asked, metric="lex")
    for i, example in enumerate(asked.examples):
        span = example.layouts[0].prefix
        for layer in range(model.cfg.n_layers):
            cut_hats = np.zeros(model.cfg.n_heads)
            for branch, sign in ((0, 1), (1, -1)):
                runs = []

                def hide_once(scores, hook, runs=runs, span=span):
                    runs.append(hook.name)
                    if len(runs) > 1:
                        return scores
                    hidden = scores.clone()
                    hidden[:, :, span.stop :, slice(*span)] = -torch.inf
                    return hidden

                ids = ids_of(example, branch)
                hook = (f"blocks.{layer}.attn.hook_attn_scores", hide_once)
                with model.hooks(fwd_hooks=[hook]):
                    patched = lens.attribution_patch(model, ids, ids, favour(asked, example))
                assert len(runs) == 2
                for node, score in patched.node_scores.items():
                    if (node.kind, node.layer) == ("attn_head_out", layer):
                        cut_hats[node.head] -= sign * score
            assert np.abs(estimate.cut_hats[i, layer] - cut_hats).max() < 1e-6
    assert np.abs(estimate.cut_hats).max() > 1e-3


def test_slopes_are_gradients_of_the_lens():
    model = load("tiny-gpt2", "float64")
    asked = contrast_set(model)
    estimate = attribution(model, asked, metric="lex")
    from transformer_lens.tools.analysis.attribution_patching import cache_activation_and_gradient

    names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(model.cfg.n_layers)]
    for i, example in enumerate(asked.examples):
        span, slopes = example.layouts[0].prefix, 0.0
        for branch, sign in ((0, 1), (1, -1)):
            cache = cache_activation_and_gradient(
                model, ids_of(example, branch), favour(asked, example), names
            )
            by_layer = [cache.gradients[name][0, :, span.stop :, slice(*span)] for name in names]
            slopes += sign * torch.stack(by_layer).sum(2).numpy()
        assert np.abs(estimate.slopes[i] - slopes).max() < 1e-6


def test_direct_effects_are_those_of_the_lens():
    """On a model in TransformerLens' compatibility mode, whose final norm is folded away."""
    model = load_model("tiny-gpt2", "float64", pack="off")
    model.enable_compatibility_mode()
    asked = replace(contrast_set(model), words=((70,), (90,)))
    attributed = head_logit_attribution(model, asked)
    for i, example in enumerate(asked.examples):
        for branch in (0, 1):
            with torch.no_grad():
                expected = lens.direct_logit_attribution(
                    model, ids_of(example, branch), 70, 90, unit="head", pos=None
                )
            heads = model.cfg.n_layers * model.cfg.n_heads
            assert expected.labels[0] == "L0H0"
            steps = expected.attribution[:heads, 0, -example.n_steps :].T.numpy()
            direct = attributed.direct[i, branch].sum(-1)  # step layer head
            assert np.abs(direct.reshape(len(direct), -1) - steps).max() < 1e-5
            total = expected.attribution[:, 0, -example.n_steps :].sum(0).numpy()
            assert np.abs(attributed.total[i, branch] - total).max() < 1e-5


def test_an_untrained_model_has_the_weights_of_the_lens(tmp_path):
    model = load("tiny-llama")
    facts_of(model).network.config.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    expected = lens.random_init_bridge(str(tmp_path), seed=1, device="cpu")
    made = load_model("random:tiny-llama", pack="off")
    for name in ("W_E", "W_Q", "W_O", "W_U"):
        assert torch.equal(getattr(made, name), getattr(expected, name))
        assert not torch.equal(getattr(made, name), getattr(model, name))
    assert made.lapa2_card.weights == "random, seed 1"
    assert made.lapa2_card.name == "random:tiny-llama"
    state = torch.get_rng_state()
    again = load_model("random:tiny-llama", pack="off")
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(again.W_Q, made.W_Q)


def test_shuffled_labels_are_swapped_prefixes():
    """The same knock-outs of a set in which the branches of the drawn prompts change places."""
    model = load("planted", "float64")
    asked = ContrastSet.of(model, "sentiment", prompts=PROMPTS[:4], tokens=3)
    table = knock_out(model, asked, metric="lex", other_metrics=())
    shuffled = shuffled_labels(table)
    swapped = (np.sign(shuffled.total) != np.sign(table.total)).tolist()
    assert sum(swapped) == 2
    examples = tuple(
        replace(example, layouts=example.layouts[::-1]) if swap else example
        for example, swap in zip(asked.examples, swapped, strict=True)
    )
    again = knock_out(model, replace(asked, examples=examples), metric="lex", other_metrics=())
    np.testing.assert_allclose(shuffled.values, again.values, atol=1e-9)
    np.testing.assert_allclose(shuffled.total, again.total, atol=1e-9)
    assert np.abs(shuffled.means).max() < np.abs(table.means).max() / 4
    with pytest.raises(CircuitError, match="found 2 attributes and 1 prompts"):
        shuffled_labels(knock_out(model, replace(asked, examples=asked.examples[:1]), metric="lex"))


@pytest.fixture(scope="module")
def placebo_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("placebo") / "planted"
    options = ["--tokens", "4", "--best", "1", "--placebo", "--prompt", *PROMPTS]
    assert main(["circuits", "planted", "--out", str(folder), *options]) == 0
    return folder


@pytest.mark.long
def test_a_placebo_stands_beside_every_map(placebo_folder):
    table = pd.read_csv(placebo_folder / "placebo.csv").set_index(["map", "kind"])
    for over in ("layer", "kv", "head", "position"):
        for metric in ("js", "lex"):
            kinds = set(table.loc[f"{over}, {metric}"].index)
            expected = {"trained", "untrained"} | (
                {"labels shuffled"} if metric == "lex" else set()
            )
            assert kinds == expected
    heads = pd.read_csv(placebo_folder / "head.csv")
    trained, untrained = (table.loc[("head, js", kind)] for kind in ("trained", "untrained"))
    assert trained["largest"] == pytest.approx(heads["effect"].abs().max())
    assert untrained["largest"] < trained["largest"] / 10
    assert table.loc[("head, lex", "trained")]["named"] >= 2
    assert table.loc[("head, lex", "labels shuffled")]["named"] == 0
    assert table.loc[("head, direct", "labels shuffled")]["largest"] < table.loc[("head, direct", "trained")]["largest"] / 2  # fmt: skip
    page = (placebo_folder / "report.html").read_text("utf-8")
    assert page.count("Placebo, the largest value: untrained") == 4
    assert "In the untrained model the largest effect of a head is" in page
    assert "With shuffled labels it is" in page
    assert "random:planted" in page


def test_a_study_without_a_placebo_has_none(tmp_path):
    study = run_study(load("planted"), "sentiment", tmp_path, prompts=PROMPTS[:2], tokens=2, best=1, report=str)  # fmt: skip
    assert study.placebo is None
    assert "lacebo" not in render_study(study)
    assert not (tmp_path / "placebo.csv").exists()


def test_a_placebo_is_the_same_model_untrained():
    model = load("planted")
    asked = ContrastSet.of(model, "sentiment", prompts=PROMPTS[:2], tokens=2)
    for placebo in (load("tiny-gpt2"), model):
        with pytest.raises(CircuitError, match='is no untrained \'planted\'; give load_model\\("random:planted"\\)'):  # fmt: skip
            check_placebo(model, placebo, asked)
