"""One suite of conformance: however a text is read, the numbers are the same.

A *case* is a line of `CASES`: a model, its class, its dtype, an augmentation, and texts. A *law* is
a function of a `Subject`, which is a case with its model loaded. It gives what one way computes,
what another way computes, and how far apart they may lie. The way that all are compared with is one
pass over a whole text, in a batch of its own.

A new family is a line of `families.FAMILIES`; a new law is a function with the decorator `law`.
"""

import functools
import io
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import HAS_HOOKED, generate, soft_prefix
from families import BRIDGE, FAMILIES, PLAIN, save_family
from oracle import _behind, oracle_logits
from replay import graphs_on_a_cpu
from transformers import DynamicCache, StaticCache

from lapa2_interp import Augmentation, Layout, augmented, load_model
from lapa2_interp.attention.cache import PROMPT_SCORES, check_packing, new_rows
from lapa2_interp.attention.continued_rows import continued_rows
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.attention.static_rows import WARM_UP
from lapa2_interp.attention.trace import sums_in
from lapa2_interp.bias.augmentation import LAWS_BY_STRENGTH, active_augmentations
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.bias.recipes import recipe
from lapa2_interp.errors import LayoutError
from lapa2_interp.generation.sampling import draw, uniforms
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.generation.turns import KeptRows, NextTurn
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.load import load_transformers
from lapa2_interp.models.prepacked import prepacked

HOOKED = "HookedTransformer"
RULES = {
    "none": None,
    "log": Augmentation(alpha=0.7),
    "released": Augmentation(alpha=1.5, profile="released"),
    "linear": Augmentation(alpha=0.5, law="linear", phase="decode"),
    "sqrt": Augmentation(alpha=0.5, law="sqrt", phase="after_span"),
    "constant": Augmentation(alpha=0.5, law="constant", l0=128, phase="decode"),
    "layers": Augmentation(alpha=0.7, layers="even", length_rule="kv"),
    "heads": Augmentation(alpha=1.2, heads=((0, 1), (2, 3), (2, 0)), phase="after_span"),
    "BOS": Augmentation(alpha=0.5, span="prefix+bos"),
    "slots": Augmentation(alpha=0.5, span=((0, 2), (3, 5))),
    "cut": Augmentation(alpha=1, law="cut"),
    "target": Augmentation(alpha=0.8, law="target", tau=0.3, phase="after_span"),
    "ratio": Augmentation(alpha=1, law="ratio", tau=0.9, pooled=True, phase="everywhere"),
    "two": (Augmentation(alpha=0.5), Augmentation(alpha=0.5, law="cut", span="bos")),
    "PASTA": recipe("pasta", alpha=0.1, heads=((0, 1),)),
    "multiply": Augmentation(alpha=0.5, law="multiply", span="all", phase="after_span"),
    "strengths": Augmentation(
        alpha=0.8, strengths=((0, 1, 1.5), (1, 0, -2.0), (2, 3, 0.25), (3, 0, 1.0))
    ),
}
UNKNOWN_TO_THE_ORACLE = ("cut", "target", "ratio", "two", "PASTA", "multiply")
POOLED = "ratio"
"""Its bias depends on all queries of a pass, so that one pass is no measure of decoding."""
PROMPTS = {
    "hard": ("The lake", "A book is on the m"),
    "soft": ("The lake", "A book is on the m"),
    "long": ("The lake" * 20, "A book is on the m" * 9),
}
"""The shortest, behind "Very good:", is longer than a window of 16 tokens. The second text begins a
chunk of 16 keys on its way. Long prompts lie behind the switch of Phi-3's rotary factors."""
TOKENS = torch.tensor([[40, 41, 42, 43, 44], [90, 81, 72, 63, 54]])
STEPS = TOKENS.shape[1]
TRACE = 1e-6
"""How far sums of attention may lie apart: traces are stored in float32."""
PACKED_SUMS = 1e-5
"""How far sums of attention in float32 may lie apart with prepacked weights and without."""
PIECES = {"Llama 4": 1e-6}
"""By model that rotates and routes in float32, how far logits of a text that is read in pieces may
lie apart: on some processors last bits depend on the number of tokens of a pass."""


class Case(NamedTuple):
    """What a law is checked on."""

    model: str
    kind: str
    rule: str = "log"
    dtype: str = "float64"
    texts: str = "hard"
    device: str = "cpu"

    def __str__(self) -> str:
        return " ".join(self[: -1 if self.device == "cpu" else None])


TINY = ("tiny-gpt2", "tiny-llama", "tiny-neox")
HALF = {"bfloat16": 0.06, "float16": 0.01}
"""By dtype, how far logits may lie apart, as a share of the largest: three significant digits of
bfloat16 over four layers."""
WITHOUT_HOOKED = [
    *(
        Case(name, kind)
        for name, family in FAMILIES.items()
        for kind in (BRIDGE, PLAIN)
        if kind not in family.refused
    ),
    *(Case("Phi-3", kind, texts="long") for kind in (BRIDGE, PLAIN)),
    *(Case(TINY[i % 3], kind, rule) for i, rule in enumerate(RULES) for kind in (BRIDGE, PLAIN)),
    *(Case(name, kind, texts="soft") for name in TINY for kind in (BRIDGE, PLAIN)),
    *(
        Case(name, BRIDGE, rule, dtype)
        for name, rule in zip(TINY, ("log", "released", "sqrt"), strict=True)
        for dtype in ("float32", *HALF)
    ),
    *(Case("tiny-llama", PLAIN, dtype=dtype) for dtype in HALF),
    *[
        Case(name, PLAIN, device="cuda")
        for name, family in FAMILIES.items()
        if PLAIN not in family.refused
    ]
    * torch.cuda.is_available(),
]
WITH_HOOKED = [
    *(Case(TINY[i % 3], HOOKED, rule) for i, rule in enumerate(RULES)),
    *(Case(name, HOOKED, texts="soft") for name in TINY),
    *(Case(name, HOOKED, dtype=dtype) for name in TINY for dtype in HALF),
]
CASES = list(dict.fromkeys(WITH_HOOKED if HAS_HOOKED else WITHOUT_HOOKED))
"""The table of families is that of the newest transformer-lens. Every rule is tried on one tiny
model, in every class."""


# --- a case with its model


@functools.cache
def folder_of(family: str) -> str:
    FOLDERS.append(tempfile.TemporaryDirectory())
    return str(save_family(family, Path(FOLDERS[-1].name)))


FOLDERS: list[tempfile.TemporaryDirectory] = []
"""Removed when the process ends."""


@functools.lru_cache(maxsize=8)
def load(model: str, kind: str, dtype: str, device: str):
    source = folder_of(model) if model in FAMILIES else model
    return load_model(source, dtype, device, kind)


@functools.lru_cache(maxsize=2)
def network(model: str, dtype: str):
    """The same as transformers loads it."""
    return load_transformers(folder_of(model) if model in FAMILIES else model, dtype)[0]


class Subject:
    """A case with its model loaded. What several laws need is computed once."""

    def __init__(self, case: Case) -> None:
        self.case, self.rule = case, RULES[case.rule]
        self.model = load(case.model, case.kind, case.dtype, case.device)
        soft = None
        if case.texts == "soft":  # a HookedTransformer counts positions on behind it
            soft = soft_prefix(self.model, shifted=case.kind == HOOKED)
        self.prefixes = [soft, None]
        prompts = PROMPTS[case.texts]
        own = [Layout.of(self.model.tokenizer, "Very good:", prompt) for prompt in prompts]
        if soft is not None:
            own[0] = Layout.of(self.model.tokenizer, None, prompts[0], soft=len(soft))
        self.layouts = own
        # HookedTransformer rotates and normalises in float32.
        of_class = 1e-5 if case.kind == HOOKED else 1e-9
        of_family = FAMILIES[case.model].atol if case.model in FAMILIES else 1e-9
        self.atol = max(of_class, of_family, 2e-5 * (case.dtype == "float32"))
        """How far logits may lie apart."""
        if case.dtype in HALF:
            self.atol = HALF[case.dtype] * float(self.alone.abs().max())
        self.trace_atol = HALF.get(case.dtype, max(TRACE, self.atol))

    def recorder(self) -> Recorder:
        size = self.model.cfg.n_layers, self.model.cfg.n_heads
        return Recorder(*size, layer_types=facts_of(self.model).layer_types)

    def ids(self, row: int) -> torch.Tensor:
        """A prompt and its text but for the last token, which is not read."""
        return torch.cat([self.layouts[row].tensor, TOKENS[row : row + 1, :-1]], dim=1)

    @torch.no_grad()
    def one_pass(self, row: int, rule: Any, recorder: Recorder | None = None) -> torch.Tensor:
        """The logits at each step, [step vocab], of a text that is read at once."""
        layout, prefix = self.layouts[row], self.prefixes[row]
        if recorder is not None:
            recorder.begin([layout])
        ids = self.ids(row)
        more = {} if prefix is None else _behind(self.model, prefix, ids.shape[1])
        with augmented(self.model, rule, layout, recorder):
            return self.model(ids, **more)[0, -STEPS:]

    @functools.cached_property
    def alone(self) -> torch.Tensor:
        """Those of one pass a text, [row step vocab]."""
        return torch.stack([self.one_pass(row, self.rule) for row in (0, 1)])

    @torch.no_grad()
    def decoded(
        self, rows: tuple[int, ...], rule: Any, tokens=TOKENS, recorder=None, static=False
    ) -> torch.Tensor:
        """The logits of cached decoding, one token at a time, [row step vocab]; the prompts of
        both layouts are read once, and each row continues one of them."""
        of_prompts = sorted(set(rows))
        padded = left_pad([self.layouts[row] for row in of_prompts])
        state, index = new_rows(self.model), torch.tensor([of_prompts.index(row) for row in rows])
        if recorder is not None:
            recorder.begin(padded, index)
        with augmented(self.model, rule, padded, recorder):
            prompts = state.prompt_pass(padded, [self.prefixes[row] for row in of_prompts])
        logits, layouts = [prompts[index, -1]], [padded[i] for i in index]
        if recorder is not None:
            recorder.begin(layouts)
        self.model.static = static
        try:
            capacity, rules = len(padded[0]) + STEPS - 1, [rule] * len(rows)
            block = continued_rows(self.model, state, index, capacity, rules, layouts, recorder)
            with block as more:
                tokens = tokens[list(rows), : STEPS - 1].to(self.model.cfg.device)
                for step in tokens.split(1, dim=1):
                    logits.append(more.read_tokens(step)[:, -1].clone())
        finally:
            self.model.static = False
        return torch.stack(logits, dim=1)

    @functools.cached_property
    def in_a_batch(self) -> torch.Tensor:
        """Logits of cached decoding of two samples of one prompt and one of another."""
        self.recorded = self.recorder()
        return self.decoded((1, 0, 1), self.rule, recorder=self.recorded)


subject = functools.lru_cache(maxsize=2)(Subject)
"""Cases are in the order of models."""


# --- laws


class Compared(NamedTuple):
    """Two arrays that a law says are equal, and how far apart they may lie."""

    computed: Any
    wanted: Any
    atol: float


class Law(NamedTuple):
    """A law, the cases of which it holds, and whether it is checked on a GPU too."""

    check: Callable[[Subject], Compared]
    holds: Callable[[Case], bool]
    on_gpu: bool


LAWS: dict[str, Law] = {}


def law(holds: Callable[[Case], bool] = lambda case: True, on_gpu: bool = False):
    """Add a law, of the cases for which a function is true."""

    def add(check: Callable[[Subject], Compared]):
        LAWS[check.__name__] = Law(check, holds, on_gpu)
        return check

    return add


def is_tiny(case: Case) -> bool:
    return case.model in TINY


def is_exact(case: Case) -> bool:
    return case.dtype == "float64"


def has_types(case: Case) -> bool:
    """True of families in which not all layers see all keys."""
    return case.model in FAMILIES and {*FAMILIES[case.model].sees} != {"full"}


def is_chosen(case: Case) -> bool:
    """True where a law is about the loop around the passes, so that in plain transformers a few
    augmentations are enough."""
    return case.kind != PLAIN or case.rule in ("log", "target", POOLED, "two")


def is_first_of_model(case: Case) -> bool:
    """True where a law has no augmentation, so that it need not be checked with each."""
    return case == next(
        sibling for sibling in CASES if sibling[:2] == case[:2] and sibling[3:] == case[3:]
    )


@law(lambda case: is_exact(case) and case.texts != "soft" and is_first_of_model(case))
@torch.no_grad()
def alpha_0_is_transformers(subject: Subject) -> Compared:
    """Cached decoding at alpha 0 has the logits of transformers' own `generate`, greedy."""
    if is_tiny(subject.case) or subject.case.model in FAMILIES:
        sees = ("full",) * 4 if is_tiny(subject.case) else FAMILIES[subject.case.model].sees
        assert tuple(map(str, facts_of(subject.model).layer_types)) == sees
    tokens, wanted = transformers_texts(subject.case.model, subject.case.texts)
    computed = subject.decoded((0, 1), Augmentation(alpha=0), tokens)
    if subject.case.kind == HOOKED:  # its logits are centred
        computed, wanted = computed.log_softmax(2), wanted.log_softmax(2)
    assert computed.argmax(2).tolist() == tokens.tolist()
    return Compared(computed, wanted, 1e-4)  # transformers chooses other kernels


@functools.lru_cache(maxsize=1)
def transformers_texts(model: str, texts: str):
    """Tokens and logits of transformers' own greedy texts."""
    net, tokens, logits = network(model, "float64"), [], []
    tokenizer = load(
        model, PLAIN if HAS_HOOKED else CLASS_OF.get(model, PLAIN), "float64", "cpu"
    ).tokenizer
    for prompt in PROMPTS[texts]:
        layout = Layout.of(tokenizer, "Very good:", prompt)
        generated = net.generate(
            layout.tensor, attention_mask=torch.ones_like(layout.tensor), max_new_tokens=STEPS,
            min_new_tokens=STEPS, do_sample=False, output_logits=True, return_dict_in_generate=True,
            eos_token_id=None, pad_token_id=1,
        )  # fmt: skip
        tokens.append(generated.sequences[0, len(layout) :])
        logits.append(torch.cat(generated.logits).double())
    return torch.stack(tokens), torch.stack(logits)


CLASS_OF = {case.model: case.kind for case in CASES}


def heads_of(subject: Subject) -> list[tuple[int, int]] | dict[tuple[int, int], float] | None:
    """The layers and heads that a rule reaches, or their strengths."""
    if subject.rule is None:
        return None
    if subject.rule.strengths is not None:
        return {(layer, head): strength for layer, head, strength in subject.rule.strengths}
    mask = subject.rule.head_mask(subject.model.cfg.n_layers, subject.model.cfg.n_heads)
    return [(int(layer), int(head)) for layer, head in np.argwhere(np.asarray(mask))]


@law(lambda case: is_exact(case) and is_tiny(case) and case.rule not in UNKNOWN_TO_THE_ORACLE)
def one_pass_is_the_oracle(subject: Subject) -> Compared:
    """The oracle adds the bias by hand, in plain loops, at the hooks of a bridge."""
    case, wanted = subject.case, []
    bridge = subject.model if case.kind != PLAIN else load(case.model, BRIDGE, case.dtype, "cpu")
    rule, heads = subject.rule, heads_of(subject)
    for row in (0, 1):
        text = TOKENS[row, :-1].tolist()
        parts = subject.layouts[row], text, rule, heads, subject.prefixes[row]
        wanted.append(oracle_logits(bridge, *parts)[0])
    if rule is not None:
        assert (subject.alone[0] - subject.one_pass(0, None)).abs().max() > 1e-3, "the bias acts"
    return Compared(subject.alone, torch.stack(wanted), 1e-9)


ESTIMATED_GRADIENT = ("PhiMoE",)
"""Families whose own backward pass is an estimate: SparseMixer, in its router."""


@law(
    lambda case: (
        is_exact(case)
        and case.texts == "hard"
        and case.rule in LAWS_BY_STRENGTH
        and case.model not in ESTIMATED_GRADIENT
    )
)
def gradients_of_strengths_are_finite_differences(subject: Subject) -> Compared:
    """Along a random direction, of a random sum of the last logits; by one pass with a gradient,
    and by two passes with strengths that are values."""
    model, layout, ids = subject.model, subject.layouts[0], subject.ids(0)
    rng, size = torch.Generator().manual_seed(2), (model.cfg.n_layers, model.cfg.n_heads)
    strengths, direction = torch.randn(2, *size, generator=rng, dtype=torch.float64)
    weights = torch.randn(model.cfg.d_vocab, generator=rng, dtype=torch.float64)
    attends = facts_of(model).attention_layers

    def value(rule: Augmentation, strengths: torch.Tensor | None = None) -> torch.Tensor:
        with augmented(model, rule, layout, strengths=strengths):
            return model(ids)[0, -1].double() @ weights

    leaf = strengths.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(subject.rule, leaf), leaf)
    # Norms compute in float32, so that only large steps tell; four points make up for their size.
    step, slope = 0.02, 0.0
    for times, share in ((-2, 1 / 12), (-1, -2 / 3), (1, 2 / 3), (2, -1 / 12)):
        moved = strengths + times * step * direction
        entries = [(i, j, float(moved[i, j])) for i in attends for j in range(size[1])]
        with torch.no_grad():
            at = value(subject.rule.model_copy(update={"strengths": tuple(entries)}))
        slope += share * float(at) / step
    assert abs(slope) > 1e-2, "the strengths act"
    return Compared((gradient * direction).sum(), slope, 5e-3 * max(1.0, abs(slope)))


def other_class(case: Case) -> str:
    return BRIDGE if case.kind == HOOKED else PLAIN


@law(
    lambda case: (
        (case.kind == HOOKED and case.texts != "soft" and is_exact(case))
        or (case.kind == BRIDGE and case._replace(kind=PLAIN) in CASES)
    )
)
def classes_agree(subject: Subject) -> Compared:
    """Through hooks and through transformers' attention interface."""
    twin = Subject(subject.case._replace(kind=other_class(subject.case)))
    if subject.case.kind == HOOKED:
        return Compared(subject.alone.log_softmax(2), twin.alone.log_softmax(2), 1e-5)
    # A bridge computes the norms and rotary factors of some families in float32.
    rounding = 5e-5 if subject.case.model in FAMILIES else 1e-9
    return Compared(subject.alone, twin.alone, max(rounding, subject.atol))


@law(lambda case: case.rule != POOLED and is_tiny(case))
def cached_is_one_pass(subject: Subject) -> Compared:
    """In decoding, one token at a time behind keys and values that are kept; of other families in a
    batch."""
    return Compared(subject.decoded((0,), subject.rule), subject.alone[:1], subject.atol)


@law()
def a_batch_is_its_rows_alone(subject: Subject) -> Compared:
    """Rows of unequal length, padded on the left, and several samples of a prompt."""
    wanted = subject.alone
    if subject.rule is not None and is_exact(subject.case):
        difference = wanted[0] - subject.one_pass(0, None)
        assert difference.abs().max() > 1e-3, "the bias acts"
    if subject.case.rule == POOLED:
        wanted = torch.cat([subject.decoded((row,), subject.rule) for row in (0, 1)])
    return Compared(subject.in_a_batch, wanted[[1, 0, 1]], subject.atol)


FOLLOWS = [[71, 72, 73, 74], [75, 76, 77, 78, 79, 71]]
"""What is read between two answers."""
ANSWERS = [[TOKENS[0], TOKENS[0, 2:]], [TOKENS[1, :3], TOKENS[1, 1:]]]
"""By row, two answers of unequal length."""
FORGETS_NOTHING = ("Qwen3-Next", "Qwen3.5", "Bamba", "Falcon-H1", "Granite 4", "LFM2")
"""Families with layers that cannot be cut."""


@torch.no_grad()
def kept_turns(subject: Subject, rows: tuple[int, ...]) -> torch.Tensor:
    """Logits of both answers of each row, whose turns stay in the cache, [row and step, vocab]."""
    model, rule = subject.model, subject.rule
    state, layouts = KeptRows(model, [rule]), [subject.layouts[r] for r in rows]
    parts = {row: [] for row in rows}
    for turn in (0, 1):
        answers = [ANSWERS[row][turn] for row in rows]
        steps = max(map(len, answers))
        if turn:
            follow = [
                [*ANSWERS[row][0].tolist(), *FOLLOWS[row]] for row in rows
            ]  # the last token that was drawn is not in the cache
            cached = [
                len(l.ids) + len(ANSWERS[r][0]) - 1 for r, l in zip(rows, layouts, strict=True)
            ]
            longer = [
                l.followed_by(model.tokenizer, ids) for l, ids in zip(layouts, follow, strict=True)
            ]
            layouts = state.go_on([*map(NextTurn, longer, cached)])
        padded = left_pad(layouts)
        with augmented(model, rule, padded):
            logits = [state.prompt_pass(padded)[:, -1]]
        # Rows that have ended run on with other tokens.
        even = [[*answer.tolist(), *[3] * (steps - len(answer))] for answer in answers]
        capacity, index = len(padded[0]) + steps - 1, torch.arange(len(rows))
        with continued_rows(
            model, state, index, capacity, [rule] * len(rows), padded, None
        ) as more:
            tokens = torch.tensor(even, device=model.cfg.device)[:, :-1]
            logits += [more.read_tokens(step)[:, -1] for step in tokens.split(1, dim=1)]
        for i, row in enumerate(rows):
            parts[row] += [step[i] for step in logits[: len(answers[i])]]
    return torch.cat([torch.stack(parts[row]) for row in rows])


@torch.no_grad()
def whole_chat(subject: Subject, row: int) -> torch.Tensor:
    """The same logits of one pass over all ids, in which the bias acts where a token of an answer
    is predicted, and under phases of all queries everywhere."""
    layout, (one, two) = subject.layouts[row], ANSWERS[row]
    second = len(one) + len(FOLLOWS[row])
    starts = (0, len(one)), (second, second + len(two))
    rules = [
        rule.model_copy(update={"steps": steps})
        for rule in active_augmentations(subject.rule)
        for steps in starts
        if rule.phase in ("last_query", "decode")
    ]
    if any(rule.phase == "decode" for rule in rules):  # not at the last token of a message
        rules = [
            rule.model_copy(update={"steps": (rule.steps[0] + 1, rule.steps[1])}) for rule in rules
        ]
    rules += [
        r for r in active_augmentations(subject.rule) if r.phase in ("after_span", "everywhere")
    ]
    ids = torch.tensor([[*layout.ids, *one.tolist(), *FOLLOWS[row], *two.tolist()[:-1]]])
    with augmented(subject.model, [tuple(rules)], layout):
        logits = subject.model(ids)[0, len(layout) - 1 :]
    return torch.cat([logits[slice(*steps)] for steps in starts])


@law(lambda case: case.texts == "hard" and case.rule != POOLED)
def kept_turns_are_one_pass(subject: Subject) -> Compared:
    """Of two chats of unequal length, packed again between their turns; and of tiny models of each
    chat alone."""
    if subject.case.model in FORGETS_NOTHING:
        with pytest.raises(LayoutError, match="cannot forget a token"):
            check_packing(subject.model)
        return Compared([0], [0], 0)
    check_packing(subject.model)
    together = kept_turns(subject, (1, 0))
    alone = [kept_turns(subject, (row,)) for row in (1, 0) if is_tiny(subject.case)]
    wanted = [whole_chat(subject, row) for row in (1, 0)]
    if subject.case.rule == "PASTA":  # its span is the chat up to each answer
        wanted = alone
    computed = torch.cat([together, *alone])
    atol = PIECES.get(subject.case.model, subject.atol)
    return Compared(computed, torch.cat(wanted * (1 + bool(alone))), atol)


@law(lambda case: case.texts != "soft" and case.rule in ("log", "ratio", "target", "cut"))
@torch.no_grad()
def a_users_padded_pass_is_its_rows_alone(subject: Subject) -> Compared:
    """One call of the model with a mask, and one behind a cache of transformers."""
    rows = PaddedRows.of(subject.layouts)
    ids = torch.cat([rows.ids, TOKENS[:, :-1]], dim=1)
    mask = torch.cat([rows.mask, torch.ones_like(TOKENS[:, :-1])], dim=1)
    with augmented(subject.model, subject.rule, rows.layouts):
        logits = subject.model(ids, attention_mask=mask)
    return Compared(logits[:, -STEPS:], subject.alone, subject.atol)


@law(
    lambda case: (
        is_exact(case)
        and is_tiny(case)
        and case.kind != HOOKED
        and case.texts == "hard"
        and case.rule in ("log", "target")
    )
)
@torch.no_grad()
def any_cache_will_do(subject: Subject) -> Compared:
    """Of transformers, in a user's own passes. A static cache has more slots than live keys and
    counts them in a tensor that it changes later."""
    computed, wanted, layout = [], [], subject.layouts[0]
    name = cache_name(facts_of(subject.model).network)
    for cuts in ([len(layout)], [len(layout), -2, -1], [4, 6, len(layout)]):
        for cache in (
            DynamicCache(),
            StaticCache(config=subject.model.original_model.config, max_cache_len=64),
        ):
            with augmented(subject.model, subject.rule, layout):
                parts = subject.ids(0).tensor_split(cuts, dim=1)
                logits = [subject.model(part, **{name: cache}) for part in parts]
            computed.append(torch.cat(logits, dim=1)[0, -STEPS:])
            wanted.append(subject.alone[0])
    return Compared(torch.stack(computed), torch.stack(wanted), subject.atol)


def sums_of(trace) -> np.ndarray:
    return np.stack([trace[name].to_numpy() for name in sums_in(trace)])


@law(lambda case: (is_tiny(case) and is_chosen(case)) or (case.kind == PLAIN and has_types(case)))
def teacher_forced_is_cached(subject: Subject) -> Compared:
    """The trace of a given text, read in chunks of three, is that of decoding it."""
    rows = [1, 0, 1]
    assert len(subject.in_a_batch) == len(rows)
    decoded = subject.recorded.dataset(
        [left_pad(subject.layouts)[row] for row in rows], ("target",), [STEPS] * len(rows)
    )
    forced = teacher_forced(
        subject.model, [subject.layouts[row] for row in rows], TOKENS[rows], subject.rule,
        prefixes=[subject.prefixes[row] for row in rows], chunk=3,
    )  # fmt: skip
    for name in {"l_kv", "in_sight", "type_of_layer", "caps"} & {*decoded.data_vars}:
        np.testing.assert_array_equal(forced[name], decoded[name], err_msg=name)
    return Compared(sums_of(forced), sums_of(decoded), subject.trace_atol)


class SizedRecorder(Recorder):
    """A recorder that knows the largest pattern of a pass."""

    largest = 0

    def observe(self, layer: int, pattern: torch.Tensor, first: int) -> None:
        self.largest = max(self.largest, pattern.numel())
        super().observe(layer, pattern, first)


@law(is_exact)
@torch.no_grad()
def a_prompt_in_pieces_is_the_whole(subject: Subject) -> Compared:
    """The last logits of padded prompts that are read in pieces of three queries, those of the step
    after it, and the trace."""
    model, padded = subject.model, left_pad(subject.layouts)
    size = model.cfg.n_layers, model.cfg.n_heads
    of_three = 3 * 2 * model.cfg.n_heads * len(padded[0])
    logits, traces, largest = [], [], []
    for scores in (PROMPT_SCORES, of_three):
        recorder = SizedRecorder(*size, layer_types=facts_of(model).layer_types)
        recorder.begin(padded)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lapa2_interp.attention.cache.PROMPT_SCORES", scores)
            state = new_rows(model, active_augmentations(subject.rule))
            with augmented(model, subject.rule, padded, recorder):
                prompts = state.prompt_pass(padded, subject.prefixes, keep=5)
                state.expand(torch.arange(2, device=prompts.device), capacity=len(padded[0]) + 1)
                step = state.read_tokens(TOKENS[:, :1].to(prompts.device))
        logits.append(torch.cat([prompts, step], dim=1))
        traces.append(sums_of(recorder.dataset(padded, ("target",), [2, 2])))
        largest.append(recorder.largest)
    np.testing.assert_allclose(traces[1], traces[0], atol=subject.trace_atol, rtol=0)
    if subject.case.rule == POOLED or subject.case.model == "Phi-3":
        assert largest[1] == largest[0], "read whole"
    else:
        assert largest[1] <= of_three < largest[0]
    exact = 1e-10 if subject.atol == 1e-9 else subject.atol
    return Compared(logits[1], logits[0], PIECES.get(subject.case.model, exact))


def sums_of_patterns(patterns: dict[int, torch.Tensor], layout: Layout) -> np.ndarray:
    """What patterns [head query key] give to the parts of a text, [part layer step head]."""
    parts = [layout.prefix, layout.prompt, (layout.prompt.stop, None)]
    parts = [layout.bos] * (layout.n_bos > 0) + parts
    return np.stack(
        [
            [pattern[:, -STEPS:, slice(*part)].sum(2).T.numpy() for pattern in patterns.values()]
            for part in parts
        ]
    )


def recorded_parts(trace, layers: list[int]) -> np.ndarray:
    names = [name for name in ("bos", "prefix", "prompt", "generated") if name in trace]
    sums = np.stack([trace[name].to_numpy()[0, 0] for name in names])  # part step layer head
    others = [layer for layer in range(sums.shape[2]) if layer not in layers]
    assert np.isnan(sums[:, :, others]).all(), "layers without attention have no sums"
    return sums[:, :, layers].swapaxes(1, 2)


@law(
    lambda case: (
        is_exact(case) and case.kind != HOOKED and case.texts != "soft" and is_first_of_model(case)
    )
)
@torch.no_grad()
def recorded_is_the_attention_of_transformers(subject: Subject) -> Compared:
    trace = teacher_forced(subject.model, subject.layouts[0], TOKENS[:1])
    net = network(subject.case.model, "float64")
    attentions = net(subject.ids(0), output_attentions=True, use_cache=False).attentions
    types = facts_of(subject.model).layer_types
    layers = [layer for layer, seen in enumerate(types) if str(seen) != "none"]
    patterns = dict(zip(layers, (pattern[0] for pattern in attentions), strict=True))
    wanted = sums_of_patterns(patterns, subject.layouts[0])
    return Compared(recorded_parts(trace, layers), wanted, 1e-5)


@law(
    lambda case: (
        is_exact(case)
        and is_tiny(case)
        and case.kind != PLAIN
        and case.rule not in UNKNOWN_TO_THE_ORACLE
    )
)
def recorded_is_the_pattern_of_the_oracle(subject: Subject) -> Compared:
    """Under an augmentation, behind a soft prefix too; all steps are in one pass."""
    recorder, layout = subject.recorder(), subject.layouts[0]
    subject.one_pass(0, subject.rule, recorder)
    trace = recorder.dataset([layout], ("target",), [STEPS])
    parts = layout, TOKENS[0, :-1].tolist(), subject.rule, heads_of(subject), subject.prefixes[0]
    patterns = dict(sorted(oracle_logits(subject.model, *parts)[1].items()))
    wanted = sums_of_patterns(patterns, layout)
    return Compared(recorded_parts(trace, [*patterns]), wanted, TRACE)


@law(
    lambda case: (
        is_exact(case)
        and is_tiny(case)
        and case.texts == "hard"
        and case.rule in ("none", "log", "target", "two")
    )
)
@torch.no_grad()
def written_is_drawn_from_one_pass(subject: Subject) -> Compared:
    """The loop's own texts are draws from the distributions of one pass over them; its trace is
    the teacher-forced one."""
    model, prompts, rule = subject.model, list(PROMPTS["hard"]), subject.rule
    asked = (methods.get("prefix"), load_task("sentiment"), "positive", prompts, rule)
    finished = generate(model, *asked, length=24, samples=2, seed=5)
    layouts = []
    for sample in finished.texts.itertuples():
        layouts.append(Layout.of(model.tokenizer, "Very positive:", sample.prompt))
        with augmented(model, rule, layouts[-1]):
            ids = torch.tensor([[*layouts[-1].ids, *sample.tokens[:-1]]])
            logits = model(ids)[0, len(layouts[-1]) - 1 :]
        streams = torch.from_numpy(uniforms(5, sample.prompt, sample.sample, sample.n_tokens))
        assert draw(logits.log_softmax(1), streams, top_k=200).tolist() == [*sample.tokens]
    forced = teacher_forced(model, layouts, finished.texts["tokens"].tolist(), rule, chunk=7)
    return Compared(sums_of(forced), sums_of(finished.trace), subject.trace_atol)


@law(
    lambda case: (
        is_exact(case) and case.kind == PLAIN and case.texts != "soft" and case.rule != POOLED
    )
)
@torch.no_grad()
def transformers_generate_is_one_pass(subject: Subject) -> Compared:
    """Inside `augmented`, greedy, with a cache of transformers that keeps all keys; of tiny models
    in padded rows, each with its own l."""
    rows = PaddedRows.of(subject.layouts[: 1 + is_tiny(subject.case)])
    net, types = facts_of(subject.model).network, facts_of(subject.model).layer_types
    drops_keys = any(seen.kind in ("sliding", "chunked") for seen in types)
    with augmented(net, subject.rule, rows.layouts):
        generated = net.generate(
            rows.ids, attention_mask=rows.mask, max_new_tokens=STEPS, do_sample=False,
            eos_token_id=None, pad_token_id=1, output_logits=True, return_dict_in_generate=True,
            **{cache_name(net): DynamicCache() if drops_keys else None},
        )  # fmt: skip
    wanted = []
    for layout, ids in zip(rows.layouts, generated.sequences, strict=True):
        with augmented(net, subject.rule, subject.layouts[len(wanted)]):
            wanted.append(net(ids[None, layout.pad : -1]).logits[0, -STEPS:])
    computed = torch.stack(generated.logits, dim=1).double()
    return Compared(computed, torch.stack(wanted), max(1e-5, subject.atol))


@law(
    lambda case: (
        case.kind == PLAIN
        and is_exact(case)
        and case.rule == "log"
        and case.texts == "hard"
        and {*FAMILIES.get(case.model, FAMILIES["Llama"]).sees} == {"full"}
    )
)
@torch.no_grad()
def the_bias_is_that_of_a_float_mask(subject: Subject) -> Compared:
    """A third way to add it, which neither hooks nor our attention function are part of."""
    layout, ids = subject.layouts[0], subject.ids(0)
    n = ids.shape[1]
    mask = torch.full((n, n), -1e30, dtype=torch.float64).triu(1)
    bias = torch.from_numpy(layout.bias(subject.rule, np.arange(n)))
    mask[:, slice(*layout.prefix)] += bias[:, None]
    net = network(subject.case.model, "float64")
    logits = net(ids, attention_mask=mask[None, None], position_ids=torch.arange(n)[None]).logits
    # Some of these models compute their own softmax in float32.
    return Compared(subject.alone[0], logits[0, -STEPS:], max(1e-5, subject.atol))


MATRIX_NOTES = {
    "Gemma 2": "its scores have a cap",
    "VaultGemma": "its scores have a cap",
    "multiply": "a law that multiplies scores",
}
"""By family or rule, why layers form the matrix in a pass that should go without."""


@contextmanager
def path(model: Any, attn: str):
    """The path of passes of several queries."""
    before, model.attn = model.attn, attn
    try:
        yield
    finally:
        model.attn = before


@law(lambda case: case.kind == PLAIN and is_exact(case), on_gpu=True)
@torch.no_grad()
def fused_is_the_matrix(subject: Subject) -> Compared:
    """One pass without the matrix of scores: logits, and the trace; of rows alone, and of padded
    rows, whose prompts are read before."""
    case, model, traces = subject.case, subject.model, {}
    for attn in ("matrix", "fused"):
        recorder = subject.recorder()
        with path(model, attn):
            subject.one_pass(0, subject.rule, recorder)
            traces[attn] = [recorder.dataset(subject.layouts[:1], ("target",), [STEPS])]
            if case.rule != POOLED:
                forced = teacher_forced(
                    model, subject.layouts, TOKENS, subject.rule, prefixes=subject.prefixes
                )
                traces[attn].append(forced)
    for fused, matrix in zip(traces["fused"], traces["matrix"], strict=True):
        np.testing.assert_allclose(sums_of(fused), sums_of(matrix), atol=subject.trace_atol, rtol=0)
    # Logits of each row alone, and in a batch.
    padded = left_pad(subject.layouts)
    with path(model, "fused"):
        with augmented(model, subject.rule, subject.layouts[0]) as paths:
            if case.texts != "soft":
                model(subject.ids(0))
                notes = (MATRIX_NOTES[key] for key in case[:3] if key in MATRIX_NOTES)
                note = next(notes, "fused")
                assert {*paths.values()} == {note}, "no layer forms the matrix without a word"
        computed = [subject.one_pass(row, subject.rule) for row in (0, 1)]
        if case.rule != POOLED:
            state = new_rows(model)
            with augmented(model, subject.rule, padded):
                prompts = state.prompt_pass(padded, subject.prefixes)[:, -1:]
                index = torch.arange(2, device=model.cfg.device)
                state.expand(index, capacity=len(padded[0]) + STEPS - 1)
                tokens = TOKENS[:, :-1].to(model.cfg.device)
                texts = state.read_tokens(tokens, keep=STEPS - 1)
            computed += [*torch.cat([prompts, texts], dim=1)]
    wanted = torch.cat([subject.alone] * (len(computed) // 2))
    exact = FAMILIES[case.model].atol if case.model in FAMILIES else 1e-9
    return Compared(torch.stack(computed), wanted, 1e-10 if exact == 1e-9 else exact)


STATIC_NOTES = {
    **dict.fromkeys(
        (
            "Qwen3-Next", "Qwen3.5", "Granite 4", "Gemma 4", "Gemma 4 with images", "Bamba",
            "Falcon-H1", "LFM2",
        ),
        "keeps keys and values",
    ),
    "Phi-3": "rotary factors depend on the length",
    # Routers choose experts in Python; these steps are static, and called.
    **dict.fromkeys(
        (
            "DeepSeek-V3", "gpt-oss", "Mixtral", "Qwen3-MoE", "DeepSeek-V2", "dots.llm1",
            "ERNIE 4.5 MoE", "FlexOlmo", "GLM-4.5", "GraniteMoE", "OLMoE", "PhiMoE", "Qwen2-MoE",
        ),
        "cannot be captured",
    ),
    # It makes a number into a tensor, which a graph of a GPU can hold.
    ("Gemma 3 with images", "cpu"): "cannot be captured",
    **dict.fromkeys(("target", "ratio", "multiply"), "a law reads the scores"),
}  # fmt: skip
"""By family, family and device, or rule, why steps are not static, or not captured."""


@law(lambda case: case.kind == PLAIN and is_exact(case) and case.texts == "hard", on_gpu=True)
def static_steps_are_the_usual(subject: Subject) -> Compared:
    """Rows of two lengths, windows and chunks of 16 keys, and a bucket of 32 keys crossed, unless
    the texts start with nothing."""
    case, device = subject.case, subject.case.device
    with graphs_on_a_cpu() as widths, redirect_stderr(io.StringIO()) as said:
        computed = subject.decoded((1, 0, 1), subject.rule, static=True)
    note = next(
        (STATIC_NOTES[key] for key in (case.model, (case.model, device), case.rule)
         if key in STATIC_NOTES), None,
    )  # fmt: skip
    assert said.getvalue().count("note: ") == (note is not None)
    assert (note or "") in said.getvalue()
    n_keys = max(map(len, subject.layouts)) + STEPS - 1
    buckets = [32, 64] if n_keys > 32 else [32]
    if note is None:
        passes = 1 if device == "cpu" else 1 + WARM_UP
        assert widths["captured"] == [width for width in buckets for _ in range(passes)]
    assert {*widths["run"]} == (set() if note and "captured" not in note else {*buckets})
    return Compared(computed, subject.in_a_batch, subject.atol)


@law(lambda case: case.dtype == "float32" and case.kind == BRIDGE)
def packed_weights_are_the_usual(subject: Subject) -> Compared:
    """Logits, and sums of attention to 1e-5. SmolLM2: `test_prepacked`."""
    logits, sums = [], []
    for packing in ("all", "none"):
        recorder = subject.recorder()
        with prepacked(facts_of(subject.model).network, packing):
            logits.append(subject.decoded((1, 0, 1), subject.rule, recorder=recorder))
        layouts = [left_pad(subject.layouts)[row] for row in (1, 0, 1)]
        sums.append(sums_of(recorder.dataset(layouts, ("target",), [STEPS] * 3)))
    np.testing.assert_allclose(*sums, atol=PACKED_SUMS, rtol=0)
    return Compared(*logits, 1e-5)


@law(lambda case: case.dtype in HALF)
def half_precision_is_near_float32(subject: Subject) -> Compared:
    assert str(subject.alone.dtype) == f"torch.{subject.case.dtype}"
    wide = Subject(subject.case._replace(dtype="float32")).alone
    return Compared(subject.alone.float(), wide, subject.atol)


# --- the table


ALIKE = (
    "Qwen2", "Qwen3", "Gemma", "Gemma 3", "Gemma 4 with images", "Mixtral", "Phi", "SmolLM3", "GLM-4",
    "OLMo 2", "OLMo 3", "Qwen3.5",
)  # fmt: skip
"""Families whose layers see keys as those of a family that `make test` has: `make test-long`."""


TURNS = {name: (BRIDGE, PLAIN)[number % 2] for number, name in enumerate(FAMILIES)}
"""The class in which `make test` has a family; both are in `make test-long`."""


def entries():
    for case in CASES:
        family = FAMILIES.get(case.model)
        is_long = family is not None and (
            case.model in ALIKE
            or family.long
            or (case.kind != TURNS[case.model] and TURNS[case.model] not in family.refused)
        )
        for name, entry in LAWS.items():
            if entry.holds(case) and (case.device == "cpu" or entry.on_gpu):
                marks = [pytest.mark.long] * is_long
                yield pytest.param(case, name, id=f"{case}-{name}", marks=marks)


@pytest.mark.parametrize(("case", "name"), [*entries()])
def test_law(case, name):
    compared = LAWS[name].check(subject(case))
    computed, wanted = (
        np.asarray(array.double() if isinstance(array, torch.Tensor) else array)
        for array in compared[:2]
    )
    np.testing.assert_allclose(computed, wanted, atol=compared.atol, rtol=0)
