"""Bayes' rule: Air-Decoding, RSA-Control, GeDi and Palette against their formulas in plain Python."""

import math

import numpy as np
import pytest
import torch
from conftest import generate, load, soft_prefix
from formulas import CLASSES, STEPS, TOKENS, as_logs, distributions, normalised, run, unit

from lapa2_interp.attention.cache import new_rows
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.generation.loop import prompt_log_likelihood
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.base import FLOOR, BatchStart


@pytest.mark.parametrize("classes", [("target", "b"), ("target", "b", "c", "d")])
@pytest.mark.parametrize("posterior", ["reconstructed", "plain"])
@pytest.mark.parametrize("omega", [0.0, 2.0, 140.0])
def test_air_decoding_over_three_steps(classes, posterior, omega):
    """Running ratios start at 1 and take in the sampled token's n of each step; R_target is 1."""
    steps = distributions("base", *classes)
    by_step = run(methods.get("air-decoding", omega=omega, posterior=posterior), steps)
    for sample in range(2):
        ratio = dict.fromkeys(classes, 1.0)
        for p, token, weights in zip(steps, TOKENS, by_step, strict=True):
            n = {
                c: [-1 / math.log(x) if posterior == "reconstructed" else x for x in p[c][sample]]
                for c in classes
            }  # fmt: skip
            cond = [n["target"][x] / sum(ratio[c] * n[c][x] for c in classes) for x in range(5)]
            z = np.array(
                [math.log(p["base"][sample][x]) + omega * math.log(cond[x]) for x in range(5)]
            )
            assert weights[sample] == pytest.approx(unit(np.exp(z - z.max())), abs=1e-9)
            ratio = {c: ratio[c] * n[c][token] / n["target"][token] for c in classes}


def test_air_decoding_by_hand():
    """ln P = -1, -2 in the target and -2, -1 in the other: n = 1, 1/2 and 1/2, 1; cond = 2/3, 1/3;
    omega 2: 4 to 1."""
    log_probs = {
        "base": torch.tensor([[0.5, 0.5]], dtype=torch.float64).log(),
        "target": torch.tensor([[-1.0, -2.0]], dtype=torch.float64),
        "other": torch.tensor([[-2.0, -1.0]], dtype=torch.float64),
    }
    method = methods.get("air-decoding", omega=2)
    assert normalised(method.combine(log_probs, None))[0] == pytest.approx([0.8, 0.2])
    state = method.advance(None, log_probs, torch.tensor([0]))
    assert state["other"].exp().tolist() == pytest.approx(
        [0.5]
    )  # n_other / n_target at the sampled token
    # R = 1/2: cond = 1 / (1 + 1/4) and .5 / (.5 + .5), squared: .64 and .25
    assert normalised(method.combine(log_probs, state))[0] == pytest.approx(
        [0.64 / 0.89, 0.25 / 0.89]
    )


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_air_decoding_of_two_classes_is_the_general_form(steps):
    """Against the sum over classes in float64, with certain, impossible and far apart tokens."""
    rng = torch.Generator().manual_seed(steps)
    log_probs = {
        name: torch.randn(4, 500, generator=rng).mul(12).log_softmax(1)
        for name in ("base", "target", "other")
    }
    for name, row in (("target", 0), ("other", 1), ("target", 2), ("other", 2)):
        log_probs[name][row, 7], log_probs[name][row, 9] = 0.0, -torch.inf
    method = methods.get("air-decoding", omega=140)
    state = None
    for step in range(steps):
        state = method.advance(state, log_probs, torch.full((4,), 20 + step))
    wide = {name: rows.double() for name, rows in log_probs.items()}
    a, b = (
        wide[name].clamp(FLOOR, -torch.finfo(torch.float32).tiny) for name in ("target", "other")
    )
    ratio = 0.0 if state is None else state["other"].double()[:, None]
    log_n = {"target": -(-a).log(), "other": -(-b).log()}
    log_cond = log_n["target"] - torch.logaddexp(log_n["target"], log_n["other"] + ratio)
    exact = wide["base"] + 140 * log_cond
    for part in (slice(0, 4), slice(3, 4)):  # with extremes, and the closed form alone
        combined = method.combine(
            {name: rows[part] for name, rows in log_probs.items()},
            state and {name: ratios[part] for name, ratios in state.items()},
        )
        torch.testing.assert_close(combined.double(), exact[part], rtol=4e-6, atol=2e-4)
    twin = log_probs | {"third": log_probs["other"]}  # the general form, with R_j halved
    halved = {
        c: (0.0 if state is None else state["other"]) - math.log(2) for c in ("other", "third")
    }
    halved = {c: torch.as_tensor(ratio_of_class).expand(4) for c, ratio_of_class in halved.items()}
    torch.testing.assert_close(
        method.combine(twin, halved), method.combine(log_probs, state), rtol=2e-5, atol=2e-3
    )


def test_air_decoding_released_numerics_agree_where_float32_can_hold_them():
    for p_log, p_float in zip(
        *(
            run(methods.get("air-decoding", omega=8, numerics=n), distributions_fixed())
            for n in ("log", "released")
        ),
        strict=True,
    ):
        assert p_log == pytest.approx(p_float, abs=1e-5)


def distributions_fixed():
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(5), (STEPS, 3, 2))
    return [dict(zip(("base", "target", "other"), step, strict=True)) for step in p]


def test_air_decoding_released_numerics_underflow_where_logs_do_not():
    """cond .4 at omega 140 is 1e-56: zero in float32 whatever the base says, alive in log space."""
    log_probs = {
        "base": torch.tensor([[0.999, 0.001]]).log(),
        "target": torch.tensor([[-3.0, -1.0]]),
        "other": torch.tensor([[-2.0, -2.0]]),
    }
    logs, released = (
        methods.get("air-decoding", numerics=n).combine(log_probs, None)
        for n in ("log", "released")
    )
    assert torch.isfinite(logs).all()
    assert released[0, 0] == -torch.inf
    assert torch.isfinite(released[0, 1])


def test_air_decoding_certain_target_token():
    """A token the target is certain of: released weight 0 (inf / inf), clamped by default to the
    likeliest."""
    log_probs = {
        "base": torch.tensor([[0.5, 0.5]]).log(),
        "target": torch.tensor([[0.0, -20.0]]),
        "other": torch.tensor([[-1.0, -0.5]]),
    }
    logs, released = (
        methods.get("air-decoding", numerics=n).combine(log_probs, None)
        for n in ("log", "released")
    )
    assert logs.argmax() == 0
    assert released[0, 0] == -torch.inf


@pytest.mark.parametrize(
    ("names", "strengths"),
    [
        (("main", "positive", "fluency"), (1.0, 0.5, 0.5)),
        (("main", "anti"), (1.0, -1.0)),
        (("main",), (1.0,)),
    ],
)
def test_palette(names, strengths):
    steps = distributions("base", *names)
    for p, combined in zip(steps, run(methods.get("palette"), steps), strict=True):
        for sample in range(2):
            z = []
            for x in range(5):
                main, comp = math.log(p["base"][sample][x] + 1e-10), 0.0
                for name, s in zip(names, strengths, strict=True):
                    q, f = p[name][sample][x], math.copysign(1, s)
                    c, c2 = (1 + 1 / (1 / (1 + math.exp(-y)) + 1e-10) for y in (q, 1 - q))
                    main += f * abs(s) * c * math.log(q + 1e-10)
                    comp += f * 0.1 * c2 * math.log(1 - q + 1e-10)
                m1 = 1 + (2 + math.exp(-1)) * sum(abs(s) for s in strengths)
                m2 = (2 + math.exp(-1)) * 0.1 * len(names)
                z.append(main / m1 + 0.05 * comp / m2)
            assert combined[sample] == pytest.approx(unit(np.exp(z)), abs=1e-12)


def test_palettes_complementary_strength_cancels():
    steps = distributions("base", "main", "positive", "fluency")
    weak, strong = (run(methods.get("palette", s_comp=s), steps) for s in (0.1, 1.0))
    assert np.abs(np.array(weak) - strong).max() < 1e-12
    assert np.abs(np.array(weak) - run(methods.get("palette", t=0.5), steps)).max() > 1e-3


def test_palette_in_half_precision_drops_a_certain_token():
    certain = torch.tensor([[12.0, 0.0, -1.0, -2.0]])
    log_probs = {name: certain.log_softmax(1) for name in ("base", "main", "positive", "fluency")}
    full, half = (
        normalised(methods.get("palette", numerics=n).combine(log_probs, None))[0]
        for n in ("float32", "released")
    )
    assert full[0] > 0.99
    assert half[0] == 0
    assert half[1:] == pytest.approx([0.72, 0.21, 0.06], abs=0.03)


def gedi_by_loops(p, classes, history, n, written, *, omega, filter_p, target_p, repetition, scale):
    """Weights of one sample from the definitions, token by token."""
    g = {c: [scale * (history[c] + math.log(p[c][x])) / n for x in range(5)] for c in classes}
    d = [g["target"][x] - math.log(sum(math.exp(g[c][x]) for c in classes)) for x in range(5)]
    z = [math.log(p["base"][x]) + omega * d[x] for x in range(5)]
    total, added, dropped = sum(math.exp(score) for score in z), 0.0, set()
    for x in sorted(range(5), key=lambda x: d[x]):
        added += math.exp(z[x]) / total
        if added < filter_p and d[x] < math.log(target_p):
            dropped.add(x)
    z = [z[x] - 10000.0 * (x in dropped) for x in range(5)]
    z = [score - max(z) + 10 for score in z]
    for x in written:
        z[x] /= repetition
    return unit(np.exp(z)), dropped


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize(
    "parameters",
    [
        {"omega": 30.0, "filter_p": 0.8, "target_p": 0.8, "repetition": 1.2},
        {"omega": 2.0, "filter_p": 0.5, "target_p": 0.3, "repetition": 1.5},
        {"omega": 5.0, "filter_p": 0.0, "target_p": 1.0, "repetition": 1.0},
    ],
)
@pytest.mark.parametrize("with_prompt", [False, True])
def test_gedi_over_three_steps(classes, parameters, with_prompt):
    """The discriminator remembers prompt and text; what was generated, twice where twice, is
    divided down."""
    steps = distributions("base", *classes)
    method = methods.get("gedi", logit_scale=1.7, **parameters)
    before = {c: [-3.0 - i, -5.0 + i] for i, c in enumerate(classes)}
    start = {"base": torch.zeros(2)} | {
        c: torch.tensor(log_likelihood, dtype=torch.float64) for c, log_likelihood in before.items()
    }
    state = method.begin(BatchStart([], start if with_prompt else None, torch.tensor([4, 2])))
    tokens, dropped = [3, 3, 1], set()
    for t, p in enumerate(steps):
        log_probs = as_logs(p)
        combined = normalised(method.combine(log_probs, state))
        for sample in range(2):
            history = {
                c: (before[c][sample] if with_prompt else 0)
                + sum(math.log(steps[s][c][sample][tokens[s]]) for s in range(t))
                for c in classes
            }
            n = (4, 2)[sample] * with_prompt + t + 1
            one = {name: rows[sample] for name, rows in p.items()}
            expected, left_out = gedi_by_loops(
                one, classes, history, n, tokens[:t], scale=1.7, **parameters
            )
            assert combined[sample] == pytest.approx(expected, abs=1e-9)
            dropped |= left_out
        state = method.advance(state, log_probs, torch.full((2,), tokens[t]))
    assert bool(dropped) == (parameters["filter_p"] > 0), "the filter is exercised where it is on"


def test_gedi_by_hand():
    """One class twice as likely: d = ln 2/3 and ln 1/3; base even, omega 1: 2 to 1; the first token
    was written: 10 / 1.2."""
    log_probs = as_logs(
        {"base": [[0.5, 0.5]], "target": [[2 / 3, 1 / 3]], "other": [[1 / 3, 2 / 3]]}
    )
    method = methods.get("gedi", omega=1, filter_p=0)
    z = method.combine(log_probs, None)[0]
    assert z.tolist() == pytest.approx([10, 10 - math.log(2)])
    state = method.advance(None, log_probs, torch.tensor([0]))
    assert state.n.tolist() == [1]
    assert state.log_likelihood["target"].exp().tolist() == pytest.approx([2 / 3])
    # (2/3 * x)^(1/2) per class: odds of the target 2, then (2 * 1/2)^(1/2) = 1: d = ln 2/3, ln 1/2
    z = method.combine(log_probs, state)[0]
    assert z.tolist() == pytest.approx([10 / 1.2, 10 - math.log(2 / 3 / 0.5)])


def rsa_by_loops(p, classes, prior, rationality, adjustment, top):
    listener = {
        c: [p[c][x] * prior[c] / sum(p[j][x] * prior[j] for j in classes) for x in range(5)]
        for c in classes
    }
    mass = listener["target"]
    speaker = [p["base"][x] * mass[x] ** rationality for x in range(5)]
    by_speaker, by_base = (
        sorted(range(5), key=lambda x: -w[x])[:top] for w in (speaker, p["base"])
    )  # fmt: skip

    def gain(w):
        return (sum(w[x] for x in by_speaker) / top) / (sum(w[x] for x in by_base) / top)

    r = min(gain(p["base"]) / gain(mass), 1)
    return (
        unit([p["base"][x] * mass[x] ** (rationality + adjustment * r) for x in range(5)]),
        listener,
        r,
    )


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize(("rationality", "adjustment"), [(10.0, 10.0), (2.0, 5.0), (3.0, 0.0)])
def test_rsa_control_over_three_steps(classes, rationality, adjustment):
    steps = distributions("base", *classes)
    method = methods.get("rsa-control", rationality=rationality, adjustment=adjustment, top=2)
    likelihood = {
        c: torch.tensor([-1.0 - i, -4.0 + i], dtype=torch.float64) for i, c in enumerate(classes)
    }
    state = method.begin(
        BatchStart([], {"base": torch.zeros(2)} | likelihood, torch.tensor([4, 2]))
    )
    seen = []
    for sample in range(2):
        weights = {c: math.exp(log_likelihood[sample]) for c, log_likelihood in likelihood.items()}
        seen.append({c: weight / sum(weights.values()) for c, weight in weights.items()})
    ratios = []
    for t, p in enumerate(steps):
        log_probs = as_logs(p)
        combined = normalised(method.combine(log_probs, state))
        for sample in range(2):
            one = {name: rows[sample] for name, rows in p.items()}
            expected, listener, r = rsa_by_loops(
                one, classes, seen[sample], rationality, adjustment, 2
            )
            assert combined[sample] == pytest.approx(expected, abs=1e-9)
            seen[sample] = {c: listener[c][TOKENS[t]] for c in classes}
            ratios.append(r)
        state = method.advance(state, log_probs, torch.full((2,), TOKENS[t]))
    assert min(ratios) < 1


def test_gedi_always_keeps_the_most_desirable_token():
    """At filter_p = 1 the mass may end just below 1; without a survivor every token would weigh the
    same."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        logs = {
            name: torch.randn(1, 5000, generator=rng).log_softmax(1)
            for name in ("base", "target", "other")
        }
        z = methods.get("gedi", filter_p=1, target_p=0.99, omega=1).combine(logs, None)
        d = logs["target"] - logs["other"]
        assert (z == z.max()).sum() == 1
        assert z.argmax() in d.topk(5).indices, (
            "in float32 the best log P(target) round to the same"
        )


@pytest.mark.parametrize("omega", [30.0, 3000.0, 1e5])
def test_gedi_never_draws_what_it_dropped(omega):
    """However far the discriminator moves what is kept."""
    log_probs = as_logs(
        {
            "base": [[0.4, 0.3, 0.2, 0.1]],
            "target": [[0.1, 0.2, 0.3, 0.4]],
            "other": [[0.4, 0.3, 0.2, 0.1]],
        }
    )
    (weights,) = normalised(methods.get("gedi", omega=omega).combine(log_probs, None))
    assert weights[:2] == pytest.approx([0, 0])
    assert weights[3] > weights[2]


def test_rsa_controls_prior_is_uniform_at_first():
    log_probs = as_logs({"base": [[0.5, 0.5]], "target": [[0.75, 0.25]], "other": [[0.25, 0.75]]})
    weights = methods.get("rsa-control", rationality=1, adjustment=0).combine(log_probs, None)
    assert normalised(weights)[0] == pytest.approx([0.75, 0.25])
    state = methods.get("rsa-control").advance(None, log_probs, torch.tensor([0]))
    assert state["target"].exp().tolist() == pytest.approx([0.75])


def test_the_prompts_log_likelihood(tiny, model_class):
    """Left-padded rows of several branches against one plain pass each; a soft prefix too."""
    model = load(tiny, "float64", model_class)
    prefix = soft_prefix(model, slots=3, shifted=True)
    rows = [
        Layout.of(model.tokenizer, "ab:", "cd efg"),
        Layout.of(model.tokenizer, None, "cd efg"),
        Layout.of(model.tokenizer, "a longer one:", "x"),
        Layout.of(model.tokenizer, None, "hij", soft=3),
    ]
    prefixes = [None, None, None, prefix]
    with torch.no_grad():
        keep = 1 + max(layout.l_pro for layout in rows)
        log_likelihoods = prompt_log_likelihood(
            new_rows(model).prompt_pass(left_pad(rows), prefixes, keep), rows
        )
        for row, (layout, soft) in enumerate(zip(rows, prefixes, strict=True)):
            state = new_rows(model)
            first = len(layout.ids) - layout.l_pro
            shorter = layout_of(layout, first)
            logits = [state.prompt_pass([shorter], [soft])[:, -1]]
            state.expand(torch.tensor([0]), capacity=len(layout))
            logits += [
                state.read_tokens(torch.tensor([[token]]))[:, -1] for token in layout.ids[first:-1]
            ]
            expected = sum(
                float(z.log_softmax(1)[0, token])
                for z, token in zip(logits, layout.ids[first:], strict=True)
            )
            assert float(log_likelihoods[row]) == pytest.approx(expected, abs=1e-8)


def layout_of(layout, n):
    """The first n tokens of a layout as a layout; its spans do not matter here."""
    from dataclasses import replace

    return replace(layout, ids=layout.ids[:n], tokens=layout.tokens[:n], l_pro=1)


@pytest.mark.parametrize("name", ["gedi", "rsa-control"])
def test_methods_that_read_the_prompt_are_given_it(name, monkeypatch):
    """What `begin` sees at the start of a run, sample by sample, is the prompt's own
    log-likelihood."""
    model, task = load("tiny-llama", "float64"), load_task("sentiment")
    method, seen = methods.get(name), []
    monkeypatch.setattr(type(method), "begin", lambda self, start: seen.append(start))
    generate(
        model,
        method,
        task,
        "negative",
        ["The sea", "A horse of the lake"],
        length=30,
        samples=2,
        trace="none",
    )
    (start,) = seen
    assert list(start.log_likelihood) == ["base", "target", "positive"]
    assert start.n_prompt.tolist() == [7, 7, 19, 19]
    for branch, text in (
        ("base", None),
        ("target", "Very negative:"),
        ("positive", "Very positive:"),
    ):
        rows = [
            Layout.of(model.tokenizer, text, prompt)
            for prompt in ("The sea", "A horse of the lake")
        ]
        with torch.no_grad():
            alone = [
                prompt_log_likelihood(
                    new_rows(model).prompt_pass([row], None, row.l_pro + 1), [row]
                )[0]
                for row in rows
            ]
        expected = [alone[0], alone[0], alone[1], alone[1]]
        assert start.log_likelihood[branch].tolist() == pytest.approx(
            [float(score) for score in expected], abs=1e-9
        )
