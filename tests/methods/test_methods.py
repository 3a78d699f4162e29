"""Laws of every method: reductions, extremes, samples apart; each with and without LaPA2."""

import math

import numpy as np
import pytest
import torch
from conftest import decode_plan, generate, load, real_once, soft_set
from formulas import distributions, run

from lapa2_interp import Augmentation
from lapa2_interp.generation import loop
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.generation.sampling import draw
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.models.card import identify
from lapa2_interp.runs.method_context import ModelContext


def test_direct_methods_pass_their_branch_on():
    for name, branch in (("none", "base"), ("prefix", "prefix"), ("negprompt", "prefix")):
        method = methods.get(name)
        log_probs = torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64).log()
        assert torch.equal(method.combine({branch: log_probs}, None), log_probs)
        assert method.advance(None, {branch: log_probs}, torch.tensor([1])) is None


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
