"""Texts, log-weights and attention of `generate` are those of the paper's decoding by hand
(`plain_forward`), which shares neither layouts nor hooks nor caches with the package."""

import ast
import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plain_forward
import pytest
import torch
from conftest import HAS_HOOKED, TINY, load, soft_set
from families import BRIDGE, PLAIN
from plain_forward import (
    Branch,
    Size,
    Soft,
    air_decoding,
    bias_of_branch,
    decode,
    direct,
    forward,
    palette,
    preadd,
)
from safetensors.torch import load_file
from transformers import DynamicCache

from lapa2_interp import Augmentation, generate, load_model
from lapa2_interp.attention.trace import SUMS, sums_in
from lapa2_interp.bias.layout import Layout, Span
from lapa2_interp.generation import loop
from lapa2_interp.models.load import load_transformers
from lapa2_interp.tasks.task import Task

HOOKED, FUSED = "HookedTransformer", "without the matrix"
KINDS = (BRIDGE, HOOKED) if HAS_HOOKED else (BRIDGE, PLAIN, FUSED)
ATOL = {HOOKED: (1e-3, 1e-5)}
"""How far log-weights and sums of attention may lie apart; by default 1e-9, and 1e-6, because
traces are stored in float32. A HookedTransformer rotates and normalises in float32."""
SIZES = {
    "tiny-gpt2": Size("gpt2", 4, 4, 4, 1e-5),
    "tiny-llama": Size("llama", 4, 4, 2, 1e-6, rotated=8),
    "tiny-neox": Size("neox", 4, 4, 4, 1e-5, rotated=2),
}
PROMPTS = ("The lake", "A")
"""Rows of a batch are padded: prompts and prefixes differ in length."""
STEPS = 5
PATTERNS = ((0, 1), (2, 3), (3, 0))
TASK = Task(
    name="mood",
    length_counts_prompt=False,
    attributes={name: {"prefix": f"{name}:"} for name in ("glad", "so sad", "calm")},
    prompts={"texts": PROMPTS},
    methods={
        "negprompt": {"texts": {"glad": {"long": "It is not sad.\n\n"}}},
        "preadd": {"texts": {"glad": {"prefix": "It is sad.\n\n"}}},
        "palette": {
            "texts": {
                "glad": {"main": "Write gladly.", "anti": "Be sad."},
                "calm": {"main": "Calm.", "good": "Be kind.", "fluent": "Go on and on."},
            }
        },
    },
)
PAIR = TASK.model_copy(
    update={"name": "pair", "attributes": dict(itertools.islice(TASK.attributes.items(), 2))}
)


class Method(NamedTuple):
    """A method as the package is asked for it, and by hand.

    Attributes:
        prefixes: By branch, the text in front of the prompt; an attribute where it is soft, and
            None on the raw model.
        combine: Of `plain_forward`.
        join: What stands between a prefix and the prompt, and counts as prompt.
        pro_aug: True if the raw model is augmented, too.
        soft: "shifted" or "unshifted".
    """

    name: str
    parameters: dict[str, Any]
    prefixes: dict[str, str | None]
    combine: plain_forward.Combine
    attribute: str = "glad"
    task: Task = TASK
    join: str = ""
    pro_aug: bool = False
    soft: str = ""


AIR = {"base": None, "target": "glad:", "so sad": "so sad:"}
SOFT_AIR = {"base": None, "target": "glad", "so sad": "so sad"}
CALM = {"main": "Calm.", "good": "Be kind.", "fluent": "Go on and on."}
METHODS = {
    "GPT-2+Prefix": Method("prefix", {}, {"prefix": "glad:"}, direct),
    "GPT-2+Prefix, soft": Method("prefix", {}, {"prefix": "glad"}, direct, soft="unshifted"),
    "GPT-2+Prefix, shifted": Method("prefix", {}, {"prefix": "glad"}, direct, soft="shifted"),
    "NegPrompt": Method("negprompt", {}, {"prefix": "so sad:"}, direct, "so sad"),
    "NegPrompt, long": Method(
        "negprompt", {"form": "long"}, {"prefix": "It is not sad.\n\n"}, direct, join=" "
    ),
    "PREADD": Method(
        "preadd", {"lam": 2.0}, {"base": None, "prefix": "It is sad.\n\n"}, preadd(2.0)
    ),
    "PREADD, away": Method(
        "preadd", {"lam": -1.0, "pro_aug": True},
        {"base": None, "prefix": "It is sad.\n\n"}, preadd(-1.0), pro_aug=True,
    ),
    "Palette": Method(
        "palette", {}, {"base": None, "main": "Write gladly.", "anti": "Be sad."},
        palette({"main": 1.0, "anti": -1.0}, 0.05), join=" ",
    ),
    "Palette, three": Method(
        "palette", {"t": 0.4, "s_aux": 0.7}, {"base": None, **CALM},
        palette({"main": 1.0, "good": 0.7, "fluent": 0.7}, 0.4), "calm", join=" ",
    ),
    "Air-Decoding": Method(
        "air-decoding", {}, AIR, air_decoding(140.0), task=PAIR, pro_aug=True
    ),
    "Air-Decoding, three": Method(
        "air-decoding", {"omega": 20.0}, {**AIR, "calm": "calm:"}, air_decoding(20.0), pro_aug=True
    ),
    "Air-Decoding, plain": Method(
        "air-decoding", {"omega": 3.0, "posterior": "plain", "pro_aug": False}, AIR,
        air_decoding(3.0, plain=True), task=PAIR,
    ),
    "Air-Decoding, soft": Method(
        "air-decoding", {"omega": 20.0}, SOFT_AIR, air_decoding(20.0), task=PAIR, pro_aug=True,
        soft="unshifted",
    ),
    "Air-Decoding, shifted": Method(
        "air-decoding", {"omega": 20.0}, SOFT_AIR, air_decoding(20.0), task=PAIR, pro_aug=True,
        soft="shifted",
    ),
}  # fmt: skip
SOME_HEADS = ((0, 1), (2, 3), (2, 0), (3, 3))
RULES = [
    # laws and strengths
    {"alpha": 0.0},
    {"alpha": 0.5},
    {"alpha": 1.0, "law": "linear"},
    {"alpha": 0.7, "law": "sqrt"},
    {"alpha": 1.0, "law": "constant", "l0": 128},
    {"alpha": 2.0},
    {"alpha": 2.0, "law": "sqrt", "length_rule": "kv"},
    {"alpha": 1.5, "law": "constant", "l0": 3, "phase": "everywhere"},
    {"alpha": 0.3, "law": "linear", "phase": "everywhere", "length_rule": "kv"},
    # spans
    {"alpha": 1.0, "span": "prefix+bos"},
    {"alpha": 1.5, "span": "bos", "law": "sqrt"},
    {"alpha": 1.0, "span": "input", "law": "linear"},
    {"alpha": 1.0, "span": "released"},
    {"alpha": 1.0, "span": ((0, 2), (3, 5))},
    {"alpha": 2.0, "span": ((1, 4),), "phase": "after_span"},
    {"alpha": 1.2, "span": ("prefix", (0, 2)), "phase": "after_span"},
    {"alpha": 1.0, "span": ("prefix", (1,)), "phase": "decode"},
    # phases and steps
    {"alpha": 1.0, "phase": "decode"},
    {"alpha": 1.0, "phase": "after_span", "law": "sqrt"},
    {"alpha": 1.5, "phase": "everywhere"},
    {"alpha": 1.0, "phase": "predicting_only"},
    {"alpha": 1.0, "steps": (1, 3)},
    {"alpha": 2.0, "steps": (0, 2), "phase": "predicting_only", "law": "sqrt"},
    {"alpha": 0.8, "phase": "after_span", "span": "bos", "law": "constant", "l0": 64},
    # layers and heads
    {"alpha": 1.0, "layers": "bottom"},
    {"alpha": 1.0, "layers": "top", "law": "linear"},
    {"alpha": 1.5, "layers": "even", "heads": SOME_HEADS},
    {"alpha": 1.0, "layers": "odd", "phase": "after_span"},
    {"alpha": 1.5, "layers": (0, 3), "phase": "everywhere"},
    {"alpha": 2.0, "heads": SOME_HEADS, "span": "prefix+bos"},
    # the released code
    {"alpha": 1.0, "profile": "released"},
    {"alpha": 2.0, "profile": "released", "law": "linear"},
    {"alpha": 0.5, "profile": "released", "law": "sqrt", "layers": "top"},
    {"alpha": 1.0, "profile": "released", "law": "constant", "l0": 128},
    {"alpha": 1.0, "profile": "released", "span": "prefix", "phase": "last_query"},
]  # fmt: skip
TOGETHER = (
    {"alpha": 0.5, "span": "prefix+bos"},
    {"alpha": 1.0, "law": "sqrt", "heads": SOME_HEADS},
)


# --- the same by hand


@functools.cache
def weights_of(name):
    return dict(load_transformers(name, "float64")[0].state_dict())


def ids_of(name, text):
    """Ids of a tiny tokenizer: its special tokens (two in tiny-llama, one in the others), then
    bytes in the order of GPT-2's vocabulary, one token each."""
    n_special = 2 if name == "tiny-llama" else 1
    bytes_in_order = {" ": 220, "\n": 198} | {chr(code): code - 33 for code in range(33, 127)}
    return [n_special + bytes_in_order[letter] for letter in text]


def branches_of(name, method, prompt, rules, folder, n_bos=1):
    """What each branch of a method reads, counted by hand."""
    branches = {}
    own_bos = name == "tiny-llama" and n_bos > 0  # its tokenizer counts a BOS with every text
    for branch, text in method.prefixes.items():
        soft = None
        if method.soft and text is not None:
            stored = load_file(folder / f"{text}.safetensors")
            soft = Soft(stored["keys"], stored["values"], method.soft == "shifted")
        prefix = ids_of(name, text) if text is not None and soft is None else []
        read = ids_of(name, prompt)
        counted = own_bos + len(prefix or read) if soft is None else soft.keys.shape[2]
        join = ids_of(name, method.join) if text is not None else []
        augmented = text is not None or method.pro_aug
        branches[branch] = Branch(
            [0] * n_bos, prefix, join + read, counted, soft, rules * augmented
        )
    return branches


def sums_of(attention, branch, n_new):
    """The sums of a trace, [layer head] by name, from whole rows [layer head key]."""
    parts = branch.keys(n_new)
    near = [key for name in ("bos", "prompt", "generated") for key in parts[name]]
    parts["released_slice"] = range(branch.n_released)
    for k in (2, 4, 6, 8):
        parts[f"nearest_{k}"] = near[-k:]
    return {name: attention[:, :, list(keys)].sum(2) for name, keys in parts.items()}


# --- the comparison


@functools.cache
def model_of(name, kind, start):
    if kind == FUSED:
        return load_model(name, "float64", "cpu", PLAIN, attn="fused", start=start)
    if start == "none":
        return load_model(name, "float64", "cpu", kind, start=start)
    return load(name, "float64", kind)


@pytest.fixture
def drawn(monkeypatch):
    """What the sampler is given at each step: log-weights and uniform numbers."""
    steps, real = [], loop.draw

    def observed(log_weights, uniform, *, top_k):
        steps.append((log_weights.clone(), uniform))
        return real(log_weights, uniform, top_k=top_k)

    monkeypatch.setattr(loop, "draw", observed)
    return steps


def compare(case, kind, rules, folder, drawn, top_k=1, samples=1, n_bos=1):
    """Assert that tokens, log-weights and attention of a run are those of decoding by hand."""
    start = "usual" if n_bos else "none"
    model, method = model_of(case.family, kind, start), METHODS[case.method]
    parameters, folder = dict(method.parameters), folder / f"{case.family} {method.soft}"
    if method.soft:
        parameters["prefixes"] = str(folder)
        if not folder.exists():
            soft_set(folder, model, method.task, slots=6, shifted=method.soft == "shifted")
    patterns = () if kind == FUSED else PATTERNS  # whole rows need the matrix
    drawn.clear()
    run = generate(
        model,
        PROMPTS,
        task=method.task,
        attribute=method.attribute,
        method=method.name,
        parameters=parameters,
        augmentation=tuple(Augmentation(**rule) for rule in rules),
        length=STEPS,
        samples=samples,
        top_k=top_k,
        patterns=patterns,
        doubled_bos=n_bos == 2,
    )
    if kind == FUSED:
        assert {*model.paths.values()} == {"fused"}
    texts, trace = run.texts(), run.trace()
    weights_atol, trace_atol = ATOL.get(kind, (1e-9, 1e-6))
    log_weights, uniforms = (torch.stack(values, dim=1) for values in zip(*drawn, strict=True))
    names = [*sums_in(trace), "prefix_tokens", *["pattern"] * bool(patterns)]
    assert ("bos" in names) == (n_bos > 0)
    wanted = {name: np.full(trace["prefix"].shape, np.nan) for name in SUMS}
    wanted |= {name: np.full(trace[name].shape, np.nan) for name in names}
    for i, text in texts.iterrows():
        branches = branches_of(case.family, method, text["prompt"], rules, folder, n_bos)
        size, weights = SIZES[case.family], weights_of(case.family)
        steps = decode(weights, size, branches, method.combine, uniforms[i].tolist(), top_k)
        assert text["tokens"] == [step.token for step in steps]
        by_hand = torch.stack([step.log_weights for step in steps]).log_softmax(1)
        near(log_weights[i].log_softmax(1), by_hand, weights_atol)
        for t, step in enumerate(steps):
            for b, (name, branch) in enumerate(branches.items()):
                attention, keys = step.attention[name], branch.keys(t)
                for part, sums in sums_of(attention, branch, t).items():
                    wanted[part][b, i, t] = sums
                mean = attention.mean((0, 1))[keys["prefix"]]
                wanted["prefix_tokens"][b, i, t, : len(mean)] = mean
                for p, (layer, head) in enumerate(patterns):
                    wanted["pattern"][b, i, t, p, : attention.shape[2]] = attention[layer, head]
    assert trace["branch"].values.tolist() == list(branches)
    for name in names:
        near(trace[name], wanted[name], trace_atol)


def near(computed, wanted, atol):
    np.testing.assert_allclose(computed, wanted, atol=atol, rtol=0)


class Case(NamedTuple):
    method: str
    family: str

    def __str__(self) -> str:
        return f"{self.method} {self.family}"


def can_run(method, kind):
    """False of prefixes behind which positions start at 0, which a HookedTransformer refuses."""
    return kind != HOOKED or METHODS[method].soft != "unshifted"


COMBINATIONS = [
    (Case(method, TINY[(i + j) % len(TINY)]), kind)
    for (i, method), (j, kind) in itertools.product(enumerate(METHODS), enumerate(KINDS))
    if can_run(method, kind)
]


@pytest.mark.parametrize(
    ("case", "kind", "rule"),
    [
        pytest.param(*combination, rule, id=" ".join(map(str, combination)))
        for combination, rule in zip(COMBINATIONS, itertools.cycle(RULES), strict=False)
    ],
)
def test_a_run_is_decoding_by_hand(case, kind, rule, tmp_path, drawn):
    """Each method in each class; families and rules take turns."""
    compare(case, kind, (rule,), tmp_path, drawn)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "kind"), [pair for pair in itertools.product(METHODS, KINDS) if can_run(*pair)]
)
def test_every_rule_of_every_method_is_decoding_by_hand(method, kind, tmp_path, drawn):
    """Classes divide the rules, and families take turns."""
    for i, rule in enumerate(RULES[KINDS.index(kind) :: len(KINDS)]):
        compare(Case(method, TINY[i % len(TINY)]), kind, (rule,), tmp_path, drawn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case", [Case("PREADD", "tiny-gpt2"), Case("Air-Decoding", "tiny-llama"), Case("Palette", "tiny-neox")], ids=str
)  # fmt: skip
def test_sampled_texts(case, kind, tmp_path, drawn):
    compare(case, kind, ({"alpha": 1.0},), tmp_path, drawn, top_k=30, samples=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["GPT-2+Prefix", "Air-Decoding"])
def test_two_bos_tokens_of_the_released_scripts(method, kind, tmp_path, drawn):
    for profile in ("released", "paper"):
        rules = ({"alpha": 1.0, "profile": profile},)
        compare(Case(method, "tiny-llama"), kind, rules, tmp_path, drawn, n_bos=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "family", "rule"),
    [
        ("GPT-2+Prefix", "tiny-gpt2", {"alpha": 1.0}),
        ("GPT-2+Prefix", "tiny-llama", {"alpha": 1.5, "phase": "everywhere", "law": "sqrt"}),
        ("GPT-2+Prefix", "tiny-neox", {"alpha": 2.0, "span": ("prefix", (1, 2))}),
        ("GPT-2+Prefix, shifted", "tiny-llama", {"alpha": 1.0, "phase": "after_span"}),
        ("NegPrompt", "tiny-gpt2", {"alpha": 1.0, "profile": "released"}),
        ("PREADD, away", "tiny-llama", {"alpha": 1.0, "law": "linear", "length_rule": "kv"}),
        ("Palette", "tiny-neox", {"alpha": 0.5}),
        ("Air-Decoding", "tiny-gpt2", {"alpha": 1.0}),
    ],
)
def test_texts_that_start_with_nothing(method, family, rule, kind, tmp_path, drawn):
    compare(Case(method, family), kind, (rule,), tmp_path, drawn, n_bos=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["GPT-2+Prefix", "PREADD, away"])
def test_two_rules_that_act_together(method, kind, tmp_path, drawn):
    compare(Case(method, "tiny-neox"), kind, TOGETHER, tmp_path, drawn)


# --- decoding by hand is independent, right without a bias, and sees an error


def test_decoding_by_hand_imports_torch_alone():
    tree = ast.parse(Path(plain_forward.__file__).read_text("utf-8"))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    assert modules == {
        "__future__", "collections.abc", "math", "torch", "torch.nn.functional", "typing",
    }  # fmt: skip


@torch.no_grad()
def test_without_a_bias_it_is_transformers():
    """Also behind keys and values that stand in the cache."""
    for name, size in SIZES.items():
        network, _, _ = load_transformers(name, "float64")
        ids = [0, *ids_of(name, "The lake\nis here")]
        keys, values = np.random.default_rng(0).normal(
            size=(2, size.n_layers, size.n_kv_heads, 6, 8)
        )
        soft = Soft(torch.from_numpy(keys), torch.from_numpy(values), shifted=True)
        cache = DynamicCache()
        for layer in range(size.n_layers):
            cache.update(soft.keys[layer][None], soft.values[layer][None], layer)
        for prefix, past in ((None, None), (soft, cache)):
            bias = bias_of_branch(Branch([0], [], ids[1:], 0, prefix), 0, size)
            logits, patterns = forward(weights_of(name), size, ids, bias, prefix)
            read = network(torch.tensor([ids]), past_key_values=past, output_attentions=True)
            # The softmax of transformers' rotary models is float32.
            near(logits, read.logits[0], 1e-4)
            near(patterns, torch.cat(read.attentions), 1e-5)


def off_by_one(real):
    return lambda *values, **more: real(*values, **more) + 1


def one_key_later(real):
    def spans(layout, rule):
        return tuple(Span(span.start + 1, span.stop + 1) for span in real(layout, rule))

    return spans


def not_the_first_step(real):
    def acts(layout, augmentation, queries, *more):
        return real(layout, augmentation, queries, *more) & (queries != layout.prompt.stop - 1)

    return acts


def stronger(real):
    return lambda *values: real(*values) * 1.001


def all_but_one_head(real):
    def head_strengths(*size):
        strengths = real(*size).copy()
        strengths[-1, -1] = 0
        return strengths

    return head_strengths


ERRORS = [
    (Layout, "lengths", off_by_one),
    (Layout, "n", off_by_one),
    (Layout, "spans", one_key_later),
    (Layout, "acts", not_the_first_step),
    (Augmentation, "bias", stronger),
    (Augmentation, "head_strengths", all_but_one_head),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_bias_is_seen(kind, tmp_path, drawn, monkeypatch):
    case, rules = Case("GPT-2+Prefix", "tiny-llama"), ({"alpha": 1.0},)
    compare(case, kind, rules, tmp_path, drawn)
    for owner, name, change in ERRORS:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, change(getattr(owner, name)))
            with pytest.raises(AssertionError, match=r"Not equal to tolerance|== \["):
                compare(case, kind, rules, tmp_path, drawn)
