"""Knock-outs, patches and direct effects beside TransformerLens' own tools, where both do the same.

`test_patching.py` compares the nodes of the residual stream, and parts of the text.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import load
from test_circuits import contrast_set
from transformer_lens import patching as lens

from lapa2_interp.circuits.knockout import knock_out
from lapa2_interp.circuits.logit_attribution import head_logit_attribution

MODEL = "tiny-gpt2"  # a KV head for every query head


def run(model, example, branch):
    """Ids of a branch with its text, and TransformerLens' cache of them."""
    ids = torch.tensor([[*example.layouts[branch].ids, *example.text[:-1]]])
    with torch.no_grad():
        return ids, model.run_with_cache(ids)[1]


def favour(asked, example):
    """The preference for the target's words, its mean over steps, as a metric of TransformerLens."""
    plus, minus = (list(words) for words in asked.words)

    def metric(logits):
        steps = logits[0, -example.n_steps :]
        return (steps[:, plus].logsumexp(1) - steps[:, minus].logsumexp(1)).mean()

    return metric


def every_head(model):
    return lens.make_df_from_ranges([model.cfg.n_layers, model.cfg.n_heads], ["layer", "head"])


def test_a_knock_out_is_a_patch_of_scores():
    """The prefix hidden from a head by TransformerLens, in one branch after the other."""
    model = load(MODEL, "float64")
    asked = contrast_set(model)
    table = knock_out(model, asked, metric="lex", other_metrics=())
    for i, example in enumerate(asked.examples):
        span = example.layouts[0].prefix

        def without_prefix(scores, index, clean, span=span):
            scores = scores.clone()
            scores[:, index[1], span.stop :, span.start : span.stop] = -torch.inf
            return scores

        total, left = 0.0, 0.0
        for branch, sign in ((0, 1), (1, -1)):
            ids, cache = run(model, example, branch)
            measured = favour(asked, example)
            with torch.no_grad():
                total += sign * measured(model(ids))
                left += sign * lens.generic_activation_patch(
                    model, ids, cache, measured, without_prefix, "attn_scores",
                    index_df=every_head(model),
                )  # fmt: skip
        assert table.total[i] == pytest.approx(float(total), abs=1e-6)
        assert np.abs(table.values[i] - (total - left).numpy()).max() < 1e-6
    assert np.abs(table.values).max() > 1e-3


def test_direct_effects_are_logit_attributions():
    """Along one word of each attribute; the final norm of this model has weights of 1."""
    model = load(MODEL, "float64")
    assert (model.ln_final.original_component.weight == 1).all()
    asked = replace(contrast_set(model), words=((70,), (90,)))
    attribution = head_logit_attribution(model, asked)
    for i, example in enumerate(asked.examples):
        for branch in (0, 1):
            _, cache = run(model, example, branch)
            with torch.no_grad():
                heads = cache.stack_head_results()
                expected = cache.logit_attrs(heads, tokens=70, incorrect_tokens=90)[:, 0]
            direct = attribution.direct[i, branch].sum(-1)  # step layer head
            steps = expected[:, -example.n_steps :].T.numpy()
            assert np.abs(direct.reshape(len(direct), -1) - steps).max() < 1e-5
    assert np.abs(attribution.direct).max() > 1e-3
