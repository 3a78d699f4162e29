"""ROSE, DExperts, GeDi, RSA-Control and Model Arithmetic against their formulas in plain Python;
reductions; bad input."""

import math

import numpy as np
import pytest
import torch
from conftest import decode_plan, generate, load, real_once, soft_prefix
from test_methods import TOKENS, as_logs, distributions, normalised, run, unit

from lapa2_interp import Augmentation
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.errors import MethodError
from lapa2_interp.generation import loop
from lapa2_interp.generation.loop import prompt_log_likelihood
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.base import BatchStart, nucleus
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import facts_of
from lapa2_interp.runs.method_context import ModelContext

CLASSES = [("target", "b"), ("target", "b", "c", "d")]


def mean_log(p, classes, sample, x):
    others = [c for c in classes if c != "target"]
    return sum(math.log(p[c][sample][x]) for c in others) / len(others)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("strength", [0.5, 2.0, -1.0])
def test_rose(classes, strength):
    steps = distributions(*classes)
    for p, combined in zip(steps, run(methods.get("rose", strength=strength), steps), strict=True):
        for sample in range(2):
            z = [
                math.log(p["target"][sample][x]) - strength * mean_log(p, classes, sample, x)
                for x in range(5)
            ]
            assert combined[sample] == pytest.approx(unit(np.exp(z)), abs=1e-12)


@pytest.mark.parametrize("omega", [0.0, 1.0, 1.4, -0.5])
def test_spa(omega):
    steps = distributions("prefix", "masked")
    for p, combined in zip(steps, run(methods.get("spa", omega=omega), steps), strict=True):
        for sample in range(2):
            weights = [
                p["prefix"][sample][x] ** omega * p["masked"][sample][x] ** (1 - omega)
                for x in range(5)
            ]
            assert combined[sample] == pytest.approx(unit(weights), abs=1e-12)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_the_hidden_prefix_of_spa_is_masked_and_keeps_its_positions(name):
    """Against transformers' own attention mask: 0 on the prefix's keys, positions as they are."""
    model = load(name)
    settings = {"length": 20, "trace": "full", "top_k": 1}
    method = methods.get("spa", omega=0.0)  # the masked branch alone decides
    made = generate(model, method, "sentiment", "positive", ["The lake"], **settings)
    layout = Layout.of(model.tokenizer, "Very positive:", "The lake")
    new = [int(token) for token in made.texts["tokens"][0]]
    ids = torch.tensor([[*layout.ids, *new]])
    mask = torch.ones_like(ids)
    mask[0, slice(*layout.prefix)] = 0
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        logits = facts_of(model).network(ids, attention_mask=mask, position_ids=positions).logits
    assert new == logits[0, len(layout.ids) - 1 : -1].argmax(-1).tolist()
    assert np.abs(made.trace["prefix"].sel(branch="masked").to_numpy()).max() == 0
    assert made.trace["prefix"].sel(branch="prefix").to_numpy().min() > 0


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("top_p", [0.6, 0.9, 1.0])
def test_dexperts(classes, top_p):
    steps = distributions("base", *classes)
    for p, combined in zip(
        steps, run(methods.get("dexperts", strength=3.2, top_p=top_p), steps), strict=True
    ):
        for sample in range(2):
            held, nucleus_tokens = 0.0, []
            for x in sorted(range(5), key=lambda x: -p["base"][sample][x]):
                if held < top_p:
                    nucleus_tokens.append(x)
                held += p["base"][sample][x]
            weights = [0.0] * 5
            for x in nucleus_tokens:
                ratio = math.log(p["target"][sample][x]) - mean_log(p, classes, sample, x)
                weights[x] = p["base"][sample][x] * math.exp(3.2 * ratio)
            assert combined[sample] == pytest.approx(unit(weights), abs=1e-12)


def test_dexperts_by_hand():
    """Base (.5, .3, .2), top-p .7 keeps two; expert over anti-expert 2 and 1/2, strength 1: weights
    1, .15."""
    p = {"base": [[0.5, 0.3, 0.2]], "target": [[0.4, 0.2, 0.4]], "other": [[0.2, 0.4, 0.4]]}
    log_weights = methods.get("dexperts", strength=1, top_p=0.7).combine(as_logs(p), None)
    assert normalised(log_weights)[0] == pytest.approx([1 / 1.15, 0.15 / 1.15, 0])


@pytest.mark.parametrize("top_k", [None, 1, 20])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_nucleus_is_that_of_transformers(top_p, top_k):
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = (
        torch.randn(8, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    )
    expected = logits if top_k is None else TopKLogitsWarper(top_k)(None, logits)
    expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(nucleus(logits, top_p, top_k), expected)


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


def test_rose_keeps_impossible_tokens_impossible():
    logs = {
        "target": torch.tensor([[0.0, -torch.inf]]),
        "other": torch.tensor([[0.0, -torch.inf]]),
        "base": torch.zeros(1, 2),
    }
    assert methods.get("rose", strength=1.5).combine(logs, None)[0].tolist() == [0, -torch.inf]


def test_rsa_controls_prior_is_uniform_at_first():
    log_probs = as_logs({"base": [[0.5, 0.5]], "target": [[0.75, 0.25]], "other": [[0.25, 0.75]]})
    weights = methods.get("rsa-control", rationality=1, adjustment=0).combine(log_probs, None)
    assert normalised(weights)[0] == pytest.approx([0.75, 0.25])
    state = methods.get("rsa-control").advance(None, log_probs, torch.tensor([0]))
    assert state["target"].exp().tolist() == pytest.approx([0.75])


def arithmetic(formula, **branches):
    return normalised(methods.get("arithmetic", formula=formula).combine(as_logs(branches), None))[
        0
    ]


def test_arithmetic():
    base, target, opponent = [[0.5, 0.3, 0.2]], [[0.2, 0.2, 0.6]], [[0.1, 0.8, 0.1]]
    p, q, r = (np.array(rows[0]) for rows in (base, target, opponent))
    assert arithmetic("base", base=base) == pytest.approx(p)
    assert arithmetic("base + 1.5 * (target - base)", base=base, target=target) == pytest.approx(
        unit(q**1.5 / p**0.5)
    )
    assert arithmetic("(base + target) / 2", base=base, target=target) == pytest.approx(
        unit(np.sqrt(p * q))
    )
    assert arithmetic("2 * base + target", base=base, target=target) == pytest.approx(
        unit((p * p * q) ** (1 / 3))
    )
    assert arithmetic("base - negative", base=base, negative=opponent) == pytest.approx(
        unit(p / r)
    ), "weight 0: as it is"
    exact = arithmetic(
        "0.6 * target + 0.3 * base - 0.9 * negative", base=base, target=target, negative=opponent
    )
    assert exact == pytest.approx(unit(q**0.6 * p**0.3 / r**0.9)), (
        "weight 0 but for rounding: as it is"
    )
    # The larger of the two decides the token, and its weight divides it.
    union = arithmetic("union(target, 0.5 * negative)", target=target, negative=opponent)
    values = [
        math.log(a) if math.log(a) >= 0.5 * math.log(b) else math.log(b)
        for a, b in zip(q, r, strict=True)
    ]
    assert union == pytest.approx(unit(np.exp(values)))
    both = arithmetic(
        "base - 0.5 * union(target, negative, base)", base=base, target=target, negative=opponent
    )
    assert both == pytest.approx(unit((p / np.maximum(np.maximum(p, q), r) ** 0.5) ** 2))
    least = arithmetic("intersection(base, target)", base=base, target=target)
    assert least == pytest.approx(unit(np.minimum(p, q)))
    mean = arithmetic("target - 0.5 * opponents", target=target, a=base, b=opponent)
    assert mean == pytest.approx(unit((q / (p * r) ** 0.25) ** 2))


def test_arithmetics_default_against_the_definition():
    steps = distributions("target", "negative")
    for p, combined in zip(steps, run(methods.get("arithmetic"), steps), strict=True):
        for sample in range(2):
            z = [
                (math.log(a) - 0.96 * max(math.log(a), math.log(b))) / 0.04
                for a, b in zip(p["target"][sample], p["negative"][sample], strict=True)
            ]
            assert combined[sample] == pytest.approx(unit(np.exp(np.array(z) - max(z))), abs=1e-9)


def test_arithmetics_branches(tmp_path):
    topic = load_task("topic")
    names = [branch.name for branch in methods.get("arithmetic").branches(topic, "sports")]
    assert names == ["target", "world", "business", "science"]
    some = methods.get("arithmetic", formula="target + base - world - 0.1 * opponents").branches(
        topic, "sports"
    )
    assert [branch.name for branch in some] == ["target", "base", "world", "business", "science"]
    (tmp_path / "mood.toml").write_text(
        '[attributes.calm]\nprefix = "Very calm:"\n[prompts]\ntexts = ["The sea"]\n'
        '[methods.arithmetic.texts.calm]\nslow = "A slow text."\n'
    )
    mood = load_task(str(tmp_path / "mood.toml"))
    (base, slow) = methods.get("arithmetic", formula="base + slow").branches(mood, "calm")
    assert (base.prefix, slow.prefix, slow.join) == (None, "A slow text.", "\n")
    with pytest.raises(
        MethodError, match="'calm' has no opponents on task 'mood' that the formula"
    ):
        methods.get("arithmetic").branches(mood, "calm")
    with pytest.raises(
        MethodError,
        match="unknown name 'slw'; allowed: base, target, slow, opponents; did you mean 'slow'",
    ):
        methods.get("arithmetic", formula="base + slw").branches(mood, "calm")


def test_zero_strength_is_the_base():
    steps = distributions("base", "target", "other")
    base, target = ([p[name] for p in steps] for name in ("base", "target"))
    for name, parameters, expected in [
        ("rose", {"strength": 0}, target),
        ("dexperts", {"strength": 0, "top_p": 1}, base),
        ("gedi", {"omega": 0, "filter_p": 0, "repetition": 1}, base),
        ("rsa-control", {"rationality": 0, "adjustment": 0}, base),
        ("arithmetic", {"formula": "base"}, base),
    ]:
        needed = (
            steps if name != "rose" else [{c: p[c] for c in ("target", "other")} for p in steps]
        )
        weights = run(methods.get(name, **parameters), needed)
        assert np.abs(np.array(weights) - np.array(expected)).max() < 1e-9, name


@pytest.mark.parametrize("name", ["dexperts", "gedi", "rsa-control"])
def test_equal_classes_are_the_base(name):
    """Branches that agree say nothing about the attribute."""
    steps = [
        {"base": p["base"], "target": p["a"], "other": p["a"]} for p in distributions("base", "a")
    ]
    parameters = {
        "dexperts": {"top_p": 1},
        "gedi": {"filter_p": 0, "repetition": 1},
        "rsa-control": {},
    }[name]
    weights = run(methods.get(name, **parameters), steps)
    assert np.abs(np.array(weights) - np.array([p["base"] for p in steps])).max() < 1e-9


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


DECODERS = ["rose", "rsa-control", "gedi", "dexperts", "arithmetic", "spa"]
CELLS = [("sentiment", "negative"), ("topic", "sports"), ("detox", "nontoxic")]


@pytest.mark.parametrize(
    ("name", "task", "attribute", "model", "length"),
    [
        *real_once([(name, *CELLS[i % 3]) for i, name in enumerate(DECODERS)], 12),
        *(
            pytest.param(name, *CELLS[j], "tiny-llama", 30, marks=pytest.mark.slow)
            for i, name in enumerate(DECODERS)
            for j in range(3)
            if j != i % 3
        ),
    ],
)
def test_every_decoder_generates_with_and_without_lapa2(name, task, attribute, model, length):
    task = load_task(task)
    model, method = load(model), methods.get_for_task(name, task)
    length = min(length, 24 if task.length_counts_prompt else 12)
    texts = {}
    for alpha in (0.0, method.alpha):
        settings = {"augmentation": Augmentation(alpha=alpha), "length": length, "trace": "pooled"}
        made = generate(model, method, task, attribute, task.prompts.texts[:2], **settings)
        texts[alpha] = made.texts["text"].tolist()
        assert made.texts["finish"].tolist() == ["length"] * 2
        assert made.trace["branch"].values.tolist() == [
            branch.name for branch in method.branches(task, attribute)
        ]
    assert texts[0.0] != texts[method.alpha]


def test_formulas_do_not_depend_on_the_other_samples():
    """A union whose weight is 0 at a token of one sample: that one alone stays as it is."""
    method = methods.get("arithmetic", formula="base - union(target, 0.5*opponents)")
    rng = torch.Generator().manual_seed(0)
    log_probs = {
        name: torch.randn(6, 5, generator=rng).log_softmax(1)
        for name in ("base", "target", "other")
    }
    together = method.combine(log_probs, None)
    for i in range(6):
        alone = method.combine({name: rows[i : i + 1] for name, rows in log_probs.items()}, None)
        assert torch.equal(together[i : i + 1], alone)
    air = methods.get("air-decoding")
    wide = {name: torch.full((2, 5), 0.2).log() for name in ("base", "target", "other")}
    state = {"other": torch.tensor([0.5, 100.0])}
    for i in range(2):
        one = {name: rows[i : i + 1] for name, rows in wide.items()}
        assert torch.equal(
            air.combine(dict(wide), state)[i],
            air.combine(one, {"other": state["other"][i : i + 1]})[0],
        )


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gedi", {"filter_p": 0.8}), ("dexperts", {"top_p": 0.9}), ("datg", {"draft_tokens": 4})],
)
def test_a_refused_token_leaves_its_place_to_the_next_ones(name, settings, own_cache):
    """The end of the text is all that a method keeps; without it the draw is of the others, by
    their weights, and not of all tokens alike."""
    model = load("tiny-gpt2")
    cell = cell_of(model, method=name, parameters=settings, attribute="positive", prompts=["The lake"],
                   length=14, samples=3, eos="block", alpha=0)  # fmt: skip
    ends = identify(model).end_ids
    survivor = next(token for token in range(300) if token not in ends)
    real = loop.log_probs_by_branch

    def nearly_ended(logits, branches):
        made = torch.full_like(logits, -20.0)
        made[:, list(ends)] = 5.0
        made[:, survivor] = 2.0
        return real(made, branches)

    todo = plan_batches(model, cell, context=ModelContext(model))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "log_probs_by_branch", nearly_ended)
        made = decode_plan(model, todo)
    assert all(set(tokens) == {survivor} for tokens in made.texts["tokens"])
