"""Every `combine` against its formula in plain Python, over three steps of a vocabulary of five;
limits; extremes."""

import math

import numpy as np
import pytest
import torch
from conftest import generate, load, real_once, soft_set

from lapa2_interp import Augmentation
from lapa2_interp.generation.sampling import draw
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.base import FLOOR
from lapa2_interp.models import identify

STEPS = 3
TOKENS = [3, 1, 4]


def distributions(*names, samples=2, scale=2.0, seed=7):
    """Random next-token probabilities: step, then branch, [sample][token]."""
    logits = np.random.default_rng(seed).normal(0, scale, (STEPS, len(names), samples, 5))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return [dict(zip(names, step, strict=True)) for step in p]


def as_logs(p, dtype=torch.float64):
    return {name: torch.tensor(rows, dtype=dtype).log() for name, rows in p.items()}


def normalised(log_weights):
    return log_weights.double().softmax(dim=1).numpy()


def run(method, steps):
    """Normalised weights of every step, the tokens TOKENS being sampled by all samples."""
    state, weights = None, []
    for p, token in zip(steps, TOKENS, strict=True):
        log_probs = as_logs(p)
        weights.append(normalised(method.combine(log_probs, state)))
        state = method.advance(
            state, log_probs, torch.full((len(p["base"]) if "base" in p else 2,), token)
        )
    return weights


def unit(weights):
    return np.array(weights) / np.sum(weights)


def test_direct_methods_pass_their_branch_on():
    for name, branch in (("none", "base"), ("prefix", "prefix"), ("negprompt", "prefix")):
        method = methods.get(name)
        log_probs = torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64).log()
        assert torch.equal(method.combine({branch: log_probs}, None), log_probs)
        assert method.advance(None, {branch: log_probs}, torch.tensor([1])) is None


@pytest.mark.parametrize("lam", [-1.0, 0.5, 2.0])
def test_preadd(lam):
    for p, combined in zip(
        steps := distributions("base", "prefix"),
        run(methods.get("preadd", lam=lam), steps),
        strict=True,
    ):
        for sample in range(2):
            expected = [
                pre**lam * base ** (1 - lam)
                for base, pre in zip(p["base"][sample], p["prefix"][sample], strict=True)
            ]
            assert combined[sample] == pytest.approx(unit(expected), abs=1e-12)


def test_preadd_by_hand():
    """Base (1/2, 1/4, 1/4), prefix (1/4, 1/2, 1/4), lam -1: weights base^2 / prefix = 1, 1/8, 1/4."""
    p = {"base": [[0.5, 0.25, 0.25]], "prefix": [[0.25, 0.5, 0.25]]}
    assert normalised(methods.get("preadd").combine(as_logs(p), None))[0] == pytest.approx(
        [8 / 11, 1 / 11, 2 / 11]
    )


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


def test_con_prefix():
    steps = distributions("target", "b", "c")
    for p, combined in zip(
        steps, run(methods.get("con-prefix", form="hard-contrast", lam=0.7), steps), strict=True
    ):
        for sample in range(2):
            expected = [
                p["target"][sample][x] ** 1.7 / (p["b"][sample][x] * p["c"][sample][x]) ** 0.35
                for x in range(5)
            ]
            assert combined[sample] == pytest.approx(unit(expected), abs=1e-12)


def test_reductions():
    steps = distributions("base", "prefix")
    classes = [{"base": p["base"], "target": p["prefix"], "other": p["prefix"]} for p in steps]
    base, prefix = ([p[name] for p in steps] for name in ("base", "prefix"))
    for combined, expected in [
        (run(methods.get("preadd", lam=0), steps), base),
        (run(methods.get("preadd", lam=1), steps), prefix),
        (run(methods.get("preadd", lam=-1), [{"base": p, "prefix": p} for p in base]), base),
        (run(methods.get("air-decoding", omega=0), distributions_with(base)), base),
        (run(methods.get("air-decoding", omega=140), classes), base),
        (run(methods.get("palette"), [{"base": p} for p in base]), base),
        (
            run(
                methods.get("con-prefix", form="hard-contrast", lam=0),
                [{"target": p, "other": q} for p, q in zip(prefix, base, strict=True)],
            ),
            prefix,
        ),
        (run(methods.get("con-prefix"), [{"target": p} for p in prefix]), prefix),
        (
            run(
                methods.get("con-prefix", form="hard-contrast"),
                [{"target": p, "other": p} for p in prefix],
            ),
            prefix,
        ),
    ]:
        assert np.abs(np.array(combined) - np.array(expected)).max() < 1e-9


def distributions_with(base):
    return [
        branches | {"base": p}
        for branches, p in zip(distributions("base", "target", "other", seed=8), base, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("preadd", {"lam": -1.0}),
        ("preadd", {"lam": 2.0}),
        ("air-decoding", {}),
        ("air-decoding", {"posterior": "plain"}),
        ("palette", {}),
        ("con-prefix", {"form": "hard-contrast"}),
        *((name, {}) for name in ("rose", "dexperts", "gedi", "rsa-control", "arithmetic", "spa")),
    ],
)
def test_extreme_log_probabilities_give_numbers_and_a_draw(name, parameters, dtype):
    """Certain, impossible and tied tokens in every combination of branches."""
    task = load_task("topic" if name == "con-prefix" else "detox")
    method = methods.get(name, **parameters)
    if name == "preadd":
        names = ["base", "prefix"]
    else:
        names = [branch.name for branch in method.branches(task, next(iter(task.attributes)))]
    every_extreme(method, names, dtype)


def every_extreme(method, names, dtype):
    """A step per combination of certain, impossible and tied tokens, the state carried on."""
    certain = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf])
    impossible = torch.tensor([-torch.inf, 0.0, -torch.inf, -torch.inf])
    tied = torch.full((4,), math.log(0.25))
    state = None
    for number in range(3 ** len(names)):
        rows = [(certain, impossible, tied)[number // 3**i % 3] for i in range(len(names))]
        log_probs = {branch: row[None].to(dtype) for branch, row in zip(names, rows, strict=True)}
        log_weights = method.combine(log_probs, state)
        assert not log_weights.isnan().any()
        token = draw(log_weights, torch.tensor([0.3], dtype=torch.float64), top_k=200)
        state = method.advance(state, log_probs, token)
        for tensor in numbers_in(state):
            assert torch.isfinite(tensor).all()


def numbers_in(state):
    """The tensors of a state, however it is kept."""
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else getattr(state, "__dict__", {}).values()
    return [tensor for value in values for tensor in numbers_in(value)]


@pytest.mark.parametrize(
    ("name", "branches"),
    [
        ("preadd", ("base", "prefix")),
        ("air-decoding", ("base", "target", "b")),
        ("palette", ("base", "main", "anti")),
        ("con-prefix", ("target", "b", "c")),
        ("rose", ("target", "b", "c")),
        ("dexperts", ("base", "target", "b", "c")),
        ("gedi", ("base", "target", "b", "c")),
        ("rsa-control", ("base", "target", "b", "c")),
        ("arithmetic", ("target", "b", "c")),
        ("spa", ("prefix", "masked")),
    ],
)
def test_stacked_samples_equal_single_ones(name, branches):
    steps = distributions(*branches, samples=2)
    method = methods.get(name, **({"form": "hard-contrast"} if name == "con-prefix" else {}))
    together = np.array(run(method, steps))
    for sample in range(2):
        alone = [{c: rows[[sample, sample]] for c, rows in p.items()} for p in steps]
        single = np.array(run(method, alone))[:, 0]
        assert np.allclose(single, together[:, sample], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["preadd", "air-decoding", "palette"])
def test_half_precision_input_is_widened(name):
    names = {
        "preadd": ("base", "prefix"),
        "air-decoding": ("base", "target", "b"),
        "palette": ("base", "main", "anti"),
    }[name]
    log_probs = {
        branch: (torch.eye(4)[:1] * 12 + i).log_softmax(1).half() for i, branch in enumerate(names)
    }
    widened = {branch: rows.float() for branch, rows in log_probs.items()}
    assert torch.equal(
        methods.get(name).combine(log_probs, None), methods.get(name).combine(widened, None)
    )


SENTIMENT_AND_TOPIC = [
    (name, *cell)
    for name in ("prefix", "con-prefix", "air-decoding")
    for cell in (("sentiment", "negative"), ("topic", "sports"))
]
DETOX = [(name, "detox", "nontoxic") for name in ("air-decoding", "negprompt", "preadd", "palette")]


@pytest.mark.parametrize(
    ("name", "task", "attribute", "model", "length"),
    real_once([*SENTIMENT_AND_TOPIC, *DETOX, ("palette", "sentiment", "positive")], 14),
)
def test_every_method_and_task_of_the_paper_generates_with_and_without_lapa2(
    name, task, attribute, model, length, tmp_path
):
    task, model = load_task(task), load(model)
    length = min(length, 24 if task.length_counts_prompt else 14)
    method = methods.get_for_task(name, task)
    if (
        identify(model).name == "tiny-llama" and getattr(method, "prefixes", "hard") != "hard"
    ):  # none ship for it
        method = methods.get_for_task(name, task, prefixes=soft_set(tmp_path, model, task))
    texts = {}
    for alpha in (0.0, method.alpha):
        settings = {"augmentation": Augmentation(alpha=alpha), "length": length, "trace": "pooled"}
        made = generate(model, method, task, attribute, task.prompts.texts[:2], **settings)
        texts[alpha] = made.texts["text"].tolist()
        assert made.texts["finish"].tolist() == ["length"] * 2
        assert identify(model).name == "tiny-llama" or all(
            len(text.split()) > 3 for text in texts[alpha]
        )
        assert made.trace["branch"].values.tolist() == [
            branch.name for branch in method.branches(task, attribute)
        ]
    assert texts[0.0] != texts[method.alpha]


def test_texts_that_run_out_of_tokens_are_kept():
    """In the released float32 numerics a huge omega empties distributions; the text up to there
    stays."""
    model, task = load("tiny-gpt2"), load_task("sentiment")
    method = methods.get("air-decoding", omega=1e6, numerics="released")
    made = generate(model, method, task, "positive", ["The lake", "The sea"], length=40)
    assert set(made.texts["finish"]) == {"empty"}
    for sample in made.texts.itertuples():
        assert len(sample.tokens) == sample.n_tokens < 40 - len(sample.prompt)
        assert sample.text.startswith(sample.prompt)
    enough = methods.get("air-decoding", omega=1e6)
    made = generate(model, enough, task, "positive", ["The lake"], length=40)
    assert "empty" not in set(made.texts["finish"])
