"""Gradients of the control score: against finite differences, exact knock-outs and the planted
closed form."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from conftest import hooks_left, load, soft_prefix
from test_circuits import WORDS, contrast_set, examples_of, planted_contrast_set

from lapa2_interp import Augmentation, Layout, load_model
from lapa2_interp.bias.layout import Span
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import control_score
from lapa2_interp.circuits.examples import ContrastExample
from lapa2_interp.circuits.gradients import (
    PrefilterRecall,
    attribution,
    cut_pattern,
    prefilter_recall,
)
from lapa2_interp.circuits.knockout import knock_out
from lapa2_interp.circuits.metrics import lex
from lapa2_interp.circuits.units import all_heads
from lapa2_interp.errors import CircuitError
from lapa2_interp.models.hook_names import HOOK_PATTERN, HOOK_SCORES
from lapa2_interp.models.planted import answer_key

TWO = ("lex", "js")
AT_THE_END = {"last": lambda predictions: lex(predictions)[:, -1:]}
"""lex of the last step alone."""


def biased(heads, b, span="prefix"):
    """A number added to the scores of a prefix, as a user would write it."""
    shared = {"heads": heads, "phase": "after_span", "span": span}
    if b > 0:
        return Augmentation(alpha=b, law="scale", **shared)
    return Augmentation(alpha=1 - math.exp(b), law="cut", **shared)


def difference(model, asked, rule, metrics=TWO):
    """dD/db by metric and example, from four points (a Llama rounds its norms to float32 in any dtype,
    so that they are not closer); rule(b) is the bias b."""
    points = {}
    for b in (-0.1, -0.05, 0.05, 0.1):
        score = control_score(model, asked, metrics=metrics, augmentation=rule(b)).values
        points[b] = {metric: score[metric].mean(1) for metric in metrics}
    return {
        metric: (
            8 * (points[0.05][metric] - points[-0.05][metric])
            - (points[0.1][metric] - points[-0.1][metric])
        )
        / 0.6
        for metric in metrics
    }


def assert_close(values, expected, relative=1e-3):
    """Relative to the largest of them: a head that does nothing has no relative error."""
    values, expected = np.array(values), np.array(expected)
    assert np.abs(expected).max() > 0
    assert np.abs(values - expected).max() < relative * np.abs(expected).max()


# --- against finite differences


def test_slopes_are_finite_differences_of_the_control(tiny):
    model = load(tiny, "float64")
    asked = contrast_set(model, n=4)
    estimates = {metric: attribution(model, asked, metric=metric) for metric in TWO}
    for at in ((0, 1), (1, 0), (2, 3), (3, 2)):
        expected = difference(model, asked, lambda b, at=at: biased((at,), b))
        for metric, estimate in estimates.items():
            assert_close(estimate.slopes[:, *at].sum(1), expected[metric])


def test_slopes_of_positions_are_finite_differences(tiny):
    model = load(tiny, "float64")
    asked = contrast_set(model, n=4)
    estimates = attribution(model, asked, metric="lex").slopes
    for position in (0, estimates.shape[3] - 1):
        every = all_heads(model)
        expected = difference(
            model, asked, lambda b, i=position, all=every: biased(all, b, ("prefix", (i,)))
        )
        assert_close(estimates[..., position].sum((1, 2)), expected["lex"])


def test_soft_prefixes_have_slopes_too(tiny):
    model = load(tiny, "float64")
    soft = [soft_prefix(model, seed=seed, shifted=seed == 1) for seed in (0, 1)]
    layouts = tuple(Layout.of(model.tokenizer, None, "efg", soft=5) for _ in soft)
    hard = examples_of(model, n=3)[0]
    example = ContrastExample("efg", hard.attributes, layouts, (70, 80, 90), prefixes=tuple(soft))
    asked = ContrastSet((example, hard), WORDS)  # soft and hard in one set
    estimates = attribution(model, asked, metric="lex", batch_size=2)
    heads = ((0, 1), (1, 0), (3, 3))
    for at in heads:
        expected = difference(model, asked, lambda b, at=at: biased((at,), b))["lex"]
        assert_close(np.nansum(estimates.slopes[:, *at], axis=1), expected)
    control = control_score(model, asked, metrics=("lex",)).values["lex"].mean(1)
    assert np.abs(estimates.control - control).max() < 1e-9


def test_an_augmentation_of_the_user_is_part_of_the_pass():
    """At a bias b0, the slope is that of the control at b0."""
    model, at = load("tiny-llama", "float64"), (1, 2)
    asked = contrast_set(model, n=4)
    estimates = attribution(model, asked, metric="lex", augmentation=biased((at,), 1.5))
    expected = difference(model, asked, lambda b: biased((at,), 1.5 + b))["lex"]
    assert_close(estimates.slopes[:, *at].sum(1), expected)
    plain = attribution(model, asked, metric="lex")
    assert np.abs(estimates.slopes - plain.slopes).max() > 0.01 * np.abs(plain.slopes).max()


# --- against the same things by another way


def by_hand(model, example):
    """D of one example by plain passes, and by layer and branch its scores, pattern and dD/dP."""
    states, logits = [], []
    for layout in example.layouts:
        state = {}

        def keep(tensor, hook, state=state):
            state[hook.name] = tensor
            return tensor

        points = [
            form.format(i)
            for i in range(model.cfg.n_layers)
            for form in (HOOK_SCORES, HOOK_PATTERN)
        ]
        with model.hooks(fwd_hooks=[(point, keep) for point in points]):
            ids = torch.tensor([[*layout.ids, *example.text[:-1]]])
            logits.append(model(ids)[0, len(layout) - 1 :].log_softmax(-1))
        states.append(state)
    plus, minus = WORDS
    d = sum(
        sign * (branch_logits[:, plus].logsumexp(1) - branch_logits[:, minus].logsumexp(1)).mean()
        for sign, branch_logits in zip((1, -1), logits, strict=True)
    )
    patterns = [
        state[HOOK_PATTERN.format(i)] for state in states for i in range(model.cfg.n_layers)
    ]
    gradients = iter(torch.autograd.grad(d, patterns))
    return [
        [
            (state[HOOK_SCORES.format(i)][0], state[HOOK_PATTERN.format(i)][0], next(gradients)[0])
            for i in range(model.cfg.n_layers)
        ]
        for state in states
    ]


def test_both_formulas_agree_with_gradients_of_the_pattern(tiny):
    """slope = sum over S of P_k (G_k - sum_j P_j G_j), with G = dD/dP. P' as the softmax of the
    scores that are left. And cut_hat is the slope of each query over 1 - A."""
    model = load(tiny, "float64")
    asked = contrast_set(model, n=4)
    estimates = attribution(model, asked, metric="lex")
    for i, example in enumerate(asked.examples):
        span = slice(*example.layouts[0].prefix)
        slopes, cut_hats, others = (np.zeros(estimates.cut_hats.shape[1:]) for _ in range(3))
        positions = np.zeros(estimates.slopes.shape[1:])
        for branch in by_hand(model, example):
            for layer, (scores, pattern, gradient) in enumerate(branch):
                later = slice(span.stop, None)
                p, g = pattern.detach()[:, later], gradient[:, later]
                by_key = (p * (g - (p * g).sum(-1, keepdim=True)))[..., span]  # head query key
                left = scores.detach()[:, later].clone()
                left[..., span] = -torch.inf
                positions[layer] += by_key.sum(1).numpy()
                slopes[layer] += by_key.sum((1, 2)).numpy()
                cut_hats[layer] -= ((left.softmax(-1) - p) * g).sum((1, 2)).numpy()
                share = p[..., span].sum(-1)
                others[layer] += (by_key.sum(-1) / (1 - share)).sum(1).numpy()
        assert_close(estimates.slopes[i], positions, 1e-9)
        assert_close(estimates.slopes[i].sum(-1), slopes, 1e-9)
        assert_close(estimates.cut_hats[i], cut_hats, 1e-9)
        assert_close(estimates.cut_hats[i], others, 1e-9)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-neox"])
def test_a_cut_of_heads_that_write_little_is_exact(name):
    """What comes after the pattern is linear then. The slope is not the cut, even there."""
    model = load_model(name, dtype="float64", device="cpu")
    with torch.no_grad():
        model.blocks[-1].attn.o.original_component.weight.mul_(1e-4)
    asked = contrast_set(model, n=4)
    last = model.cfg.n_layers - 1
    estimates = attribution(model, asked, metric="lex")
    heads = {str(head): [(last, head)] for head in range(model.cfg.n_heads)}
    exact = knock_out(model, asked, over=heads, metric="lex", other_metrics=())
    assert_close(estimates.cut_hats[:, last], exact.values, 1e-3)
    slopes = np.nansum(estimates.slopes[:, last], axis=2)
    assert np.abs(slopes - exact.values).max() > 0.1 * np.abs(exact.values).max()


def test_cases_of_any_order_and_batch_size(tiny):
    model = load(tiny)
    examples = examples_of(model, n=4, prompts=("efg hi", "jkl", "tuvwxy"))
    examples += examples_of(model, n=3, prompts=("ab",), prefixes={"plus": "ab:", "minus": "cd:"})
    asked = ContrastSet(tuple(examples), WORDS)
    turned = ContrastSet(tuple(examples[::-1]), WORDS)
    alone = attribution(model, asked, metric="lex")
    together = attribution(model, turned, metric="lex", batch_size=4)
    for name in ("slopes", "cut_hats", "control"):
        one, reversed_order = getattr(alone, name), getattr(together, name)[::-1]
        assert np.allclose(
            one, reversed_order, rtol=0, atol=1e-5 * np.nanmax(np.abs(one)), equal_nan=True
        )
    # The prefix of the last example is shorter.
    assert np.isnan(alone.slopes[-1, ..., 3:]).all()
    assert not np.isnan(alone.slopes[:-1]).any()
    assert np.isfinite(alone.table("slope").map()).all()


def test_the_whole_is_the_control_and_units_are_means_over_steps(tiny):
    model = load(tiny, "float64")
    asked = contrast_set(model, n=5)
    for metric in ("js", "lex", "llr", "kl", "from_raw"):
        estimates = attribution(model, asked, metric=metric)
        control = control_score(model, asked, metrics=(metric,)).values[metric].mean(1)
        assert np.abs(estimates.control - control).max() < 1e-9
        assert np.abs(estimates.cut_hats).max() > 0


def test_more_than_two_attributes():
    model = load("tiny-neox", "float64")
    examples = examples_of(model, n=3, prefixes={"a": "ab cd:", "b": "xy zw:", "c": "mn op:"})
    estimates = attribution(model, examples, metric="kl")
    asked = ContrastSet(tuple(examples))
    for at in ((0, 1), (2, 2)):
        expected = difference(model, asked, lambda b, at=at: biased((at,), b), metrics=("kl",))[
            "kl"
        ]
        assert_close(estimates.slopes[:, *at].sum(1), expected)


def test_equal_prefixes_have_no_gradient_of_js_and_no_nan(tiny):
    model = load(tiny)
    examples = examples_of(model, n=3, prefixes={"a": "ab cd:", "b": "ab cd:"})
    estimates = attribution(model, examples)
    assert np.abs(estimates.slopes).max() < 1e-6
    assert np.abs(estimates.cut_hats).max() < 1e-6


# --- the answer_key answer


def nudge(key, role, asked, b):
    """The closed form of D with a bias on a head's view of the prefix, by example: the mean over
    steps."""
    measured = []
    for example in asked.examples:
        layout, weights = example.layouts[0], {role: (math.exp(b),) * 3}
        steps = [
            key.control(len(layout) + t, layout.l_pro, asking=t == 0, weights=weights)
            for t in range(example.n_steps)
        ]
        measured.append(np.mean(steps))
    return np.array(measured)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("planted", 64),
        ("planted-gpt2:3", 64),
        ("planted-gain:2", 8),
        ("planted-spread:1", 8),
        ("planted-backup", 24),
    ],
)
def test_planted_slopes_and_integrals_are_the_closed_form(name, n):
    model, key = load(name), answer_key(name)
    asked = planted_contrast_set(model, name, n, prompts=("The lake", "Once upon a time"))
    estimates = attribution(model, asked, metric="lex")
    slopes = estimates.slopes.sum(3)
    for role, at in key.heads.items():
        expected = (nudge(key, role, asked, 1e-4) - nudge(key, role, asked, -1e-4)) / 2e-4
        assert np.abs(slopes[:, *at] - expected).max() < 2e-4 * max(1, np.abs(expected).max())
    rest = np.ones(slopes.shape[1:], bool)
    rest[tuple(np.array(list(key.heads.values())).T)] = False
    assert np.abs(slopes[:, rest]).max() < 1e-6
    assert np.abs(estimates.cut_hats[:, rest]).max() < 1e-6


def test_the_cut_hat_of_heads_that_write_on_u_is_the_closed_form():
    """What they write falls from gain * A to 0 along the tangent of D in x."""
    name, n = "planted", 64
    model, key = load(name), answer_key(name)
    asked = planted_contrast_set(model, name, n + 1, prompts=("The lake",))
    estimates = attribution(model, asked, metric=AT_THE_END).cut_hats[0]
    l = len(asked.examples[0].layouts[0]) + n
    x, opposite = key.written(l, 2)
    tangent = 4 * key.logit * (1 + opposite / 16) / (1 + (x**2 + opposite) / 16) ** 1.5
    for role in ("carrier", "suppressor"):
        share = key.odds[role] / (key.odds[role] + l - 1)
        assert estimates[key.heads[role]] == pytest.approx(
            tangent * key.gain[role] * share, rel=1e-4
        )


@pytest.mark.parametrize("name", ["planted:1", "planted-gpt2:3"])
def test_the_planted_order_is_found_and_the_relay_underestimated(name):
    """At the ninth step. Later the relay's cut_hat has the wrong sign: where the carrier writes
    less, all that the relay leaves is needed, and a little less of it would help. So the order is
    good for a prefilter and no more."""
    model, key = load(name), answer_key(name)
    asked = planted_contrast_set(model, name, 9)
    estimates = attribution(model, asked, metric=AT_THE_END)
    exact = knock_out(model, asked, metric=AT_THE_END, other_metrics=())
    best = estimates.table().best(8)
    assert best[:2] == (key.heads["carrier"], key.heads["relay"])
    assert best[-1] == key.heads["suppressor"]
    assert estimates.table("slope").best(1) == best[:1]
    assert abs(estimates.table().map()[key.heads["decoy"]]) < 1e-6
    hat, effect = (grid[key.heads["relay"]] for grid in (estimates.table().map(), exact.map()))
    assert 0 < hat < 0.5 * effect
    later = planted_contrast_set(model, name, 65)
    hat = attribution(model, later, metric=AT_THE_END).table().map()[key.heads["relay"]]
    assert (
        hat
        < 0
        < knock_out(
            model, later, over={"x": [key.heads["relay"]]}, metric=AT_THE_END, other_metrics=()
        ).values.mean()
    )


# --- what is made of it


def test_recall_is_its_definition():
    model = load("tiny-llama")
    asked = contrast_set(model, n=4)
    estimates = attribution(model, asked, metric="lex")
    exact = knock_out(model, asked, metric="lex")
    effects, hats = exact.map(), estimates.table().map()
    order, largest = (np.argsort(-np.abs(grid), axis=None) for grid in (hats, effects))
    agreement = prefilter_recall(estimates, exact, n=4)
    assert agreement.heads == effects.size
    assert agreement.recall == len(set(order[:4]) & set(largest[:4])) / 4
    missed = order[4:][np.argmax(np.abs(effects).ravel()[order[4:]])]
    assert agreement.missed == np.unravel_index(missed, effects.shape)
    assert agreement.largest_missed == pytest.approx(effects.ravel()[missed])
    from scipy.stats import spearmanr

    assert agreement.cut_hat == pytest.approx(spearmanr(hats, effects, axis=None).statistic)
    assert agreement.slope == pytest.approx(
        spearmanr(estimates.table("slope").map(), effects, axis=None).statistic
    )
    assert 0.5 < agreement.cut_hat < 1
    assert str(agreement).startswith(f"{effects.size} heads: Spearman 0.")
    assert "\n" not in str(agreement)
    everything = prefilter_recall(estimates, exact, n=1000)
    assert (everything.n, everything.recall, everything.missed) == (effects.size, 1, None)
    assert str(everything).endswith("none missed")
    worst = PrefilterRecall(8, 2, math.nan, 0.5, 0.0, (1, 2), -0.25)
    assert str(worst).endswith("recall@2 0.00; largest effect missed -0.25 (1.2)")


def test_a_prefilter_that_is_wrong_is_seen_by_recall():
    model, key = load("planted"), answer_key("planted")
    asked = planted_contrast_set(model, "planted", 64)
    estimates = attribution(model, asked, metric="lex")
    exact = knock_out(model, asked, metric="lex", other_metrics=())
    agreement = prefilter_recall(estimates, exact, n=2)
    # |cut_hat| of the relay is below the suppressor's, its effect above.
    assert (agreement.recall, agreement.missed) == (0.5, key.heads["relay"])
    assert agreement.largest_missed == pytest.approx(exact.map()[key.heads["relay"]])
    assert set(estimates.table().best(2, absolute=True)) == {
        key.heads["carrier"],
        key.heads["suppressor"],
    }


def test_a_table_a_map_a_drawing():
    model = load("planted")
    key = answer_key("planted")
    estimates = attribution(
        model,
        ContrastSet.of(model, "sentiment", prompts=["The lake", "The book", "The city"], tokens=4),
        metric="lex",
    )
    table = estimates.frame()
    assert len(table) == 8
    assert tuple(table[["layer", "head"]].iloc[0]) == key.heads["carrier"]
    ordered = -np.sort(-table["cut_hat"])
    assert table["cut_hat_rank"].tolist() == [1 + int((ordered > x).sum()) for x in ordered]
    assert (table["cut_hat_low"] <= table["cut_hat"]).all()
    assert (table["slope"] <= table["slope_high"]).all()
    assert table["slope_rank"].min() == 1
    for row in table.itertuples():
        assert row.cut_hat == estimates.table().map()[row.layer, row.head]
        assert row.slope == estimates.table("slope").map()[row.layer, row.head]
    assert estimates.table("cut_hat").map().shape == (2, 4)
    assert estimates.table("slope").best(2)[0] == key.heads["carrier"]
    assert estimates.plot()._repr_png_()[:4] == b"\x89PNG"
    one = attribution(
        model, ContrastSet.of(model, "sentiment", prompts=["The lake"], tokens=2), metric="lex"
    ).frame()
    assert one["cut_hat_low"].isna().all()
    with pytest.raises(CircuitError, match="unknown estimate 'cut'; allowed: cut_hat, slope"):
        estimates.table("cut").map()


def test_texts_of_a_prompt_count_as_one():
    model = load("planted")
    asked = planted_contrast_set(model, "planted", 4)
    twice = ContrastSet((*asked.examples, asked.examples[0]), asked.words)
    one, doubled = (attribution(model, texts, metric="lex") for texts in (asked, twice))
    assert np.abs(one.table().map() - doubled.table().map()).max() < 1e-6
    assert len(doubled.table("slope").by_prompt) == 3


# --- what is left behind, and what is refused


def test_nothing_is_left_behind():
    model = load("tiny-gpt2")
    asked = contrast_set(model, n=3)
    seen = []

    def breaks(tensor, hook):
        seen.append(hook.name)
        raise ZeroDivisionError

    def fails(predictions):
        raise ZeroDivisionError

    plain = attribution(model, asked)
    assert hooks_left(model) == ([], [])
    call = partial(attribution, model, asked, augmentation=Augmentation(alpha=1))
    call()
    with pytest.raises(ZeroDivisionError):
        call(metric={"fails": fails})
    assert hooks_left(model) == ([], [])
    with (
        pytest.raises(ZeroDivisionError),
        model.hooks(fwd_hooks=[("blocks.2.attn.hook_pattern", breaks)]),
    ):
        call()
    assert hooks_left(model) == ([], [])
    assert seen
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()
    # The caller's mode changes nothing, and stays.
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again = attribution(model, asked)
            assert not torch.is_grad_enabled()
        assert np.array_equal(again.slopes, plain.slopes)
        assert np.array_equal(again.cut_hats, plain.cut_hats)


def test_hooks_of_a_user_are_part_of_the_pass():
    model = load("tiny-llama", "float64")
    asked = contrast_set(model, n=3)

    def double(z, hook):
        return 2 * z

    plain = attribution(model, asked, metric="lex")
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", double)]):
        estimates = attribution(model, asked, metric="lex")
        expected = difference(model, asked, lambda b: biased(((1, 0),), b))["lex"]
    assert_close(estimates.slopes[:, 1, 0].sum(1), expected)
    assert np.abs(estimates.slopes - plain.slopes).max() > 0.1 * np.abs(plain.slopes).max()


def test_the_rest_of_a_pattern_is_its_softmax():
    scores = torch.randn(1, 2, 3, 6, generator=torch.Generator().manual_seed(0)).double()
    scores[0, 0, 0, 1:3] += 60  # all attention on the span, but for 1e-26
    span, left = Span(1, 3), scores.clone()
    left[..., 1:3] = -torch.inf
    assert torch.allclose(cut_pattern(scores.softmax(-1), span), left.softmax(-1), rtol=1e-12)
    # A learned sink is no key, and takes its part of what is left.
    sink = torch.full((1, 2, 3, 1), 0.5).double()
    pattern, rest = (torch.cat([keys, sink], -1).softmax(-1)[..., :-1] for keys in (scores, left))
    cut = cut_pattern(pattern, span)
    assert (cut - rest)[0, 1].abs().max() < 1e-12
    assert pattern.sum(-1).min() < 0.9 or pattern.sum(-1)[0, 1].min() < 0.9
