"""How fast texts are made here, beside peers, in one run on one machine (`lapa2 bench`).

    found = bench(["gpt2-small"], samples=[1, 20])
    print(found.markdown)

Contenders decode the same number of texts, of the same lengths, with the same weights:

- transformers-eager, transformers-sdpa: plain transformers, without bias and trace. A method of one
  branch is `generate` with sampling. Of a method of several branches, each step reads the branches
  one after another, all samples in a batch, each branch with its growing DynamicCache; the tokens
  are given, so that combining and drawing cost these peers nothing.
- transformer-lens: a TransformerBridge with hooks that add a number to the prefix's scores, read in
  the same way, branch after branch, with given tokens.
- unpacked, packed: this package, branches in one batch, with bias, trace, combining and drawing;
  without and with packed weights (`lapa2_interp.models.prepacked`).
- packed-transformers: the same as packed on a `TransformersModel`, without TransformerLens.
- roofline: the matrix products of one step alone, for all rows at once, on the weights themselves.
  Of F.linear, oneDNN and packed products, each shape takes the fastest.

The clock is wall time. Each contender first makes a short text that is not timed. Then contenders
take turns, and each one's quickest run counts, so that a busy machine disturbs all alike. The
prompt pass ends when the first token's logits are there (here: when it is drawn). What follows, to
the finished table and trace, is divided by the steps. In their prompt pass, peers read the prompt
once per sample.

Other peers, such as nnsight or the paper's released code, are neither needed nor fetched. To
compare with one that you have, let it make the same texts on the same machine, by turns with
`lapa2 bench`: prompts of `--context` tokens, `--samples` texts of `--length` new tokens that no end
token cuts short, the same dtype and threads. Make one text first, note the time of the first token
and of the last, and take the least of three runs: samples x (length - 1) / (last - first) is
`tokens_per_s`.
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan, nan
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import Linear
from tqdm import tqdm
from transformers import AutoModelForCausalLM as AutoModel
from transformers import GPT2Config, LlamaConfig, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import DynamicCache
from transformers.pytorch_utils import Conv1D

from lapa2_interp._util.errors import ModelError, RunError, pluralize, unknown_choice
from lapa2_interp._util.plots import COLOURS, Drawing, new_figure, plain_axes
from lapa2_interp._util.progress import progress_bar
from lapa2_interp._util.version import __version__
from lapa2_interp.attention.batch_bias import BatchBias
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.attention.trace import TraceKind
from lapa2_interp.generation import loop
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.plan import Plan, plan
from lapa2_interp.methods.base import Method
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.card import (
    Model,
    TransformersModel,
    attach_card,
    make_card,
    model_card,
    network_of,
)
from lapa2_interp.models.liveness import HOOK_SCORES
from lapa2_interp.models.load import (
    load_tokenizer,
    load_transformers,
    move_to_device,
    wrap_in_bridge,
)
from lapa2_interp.models.machine import (
    default_device,
    faster_dtype,
    processor_kind,
    resolve_dtype,
    torch_threads,
)
from lapa2_interp.models.prepacked import can_prepack, prepacked
from lapa2_interp.models.smollm2 import SMOLLM2

Contender = Literal[
    "transformers-eager",
    "transformers-sdpa",
    "transformer-lens",
    "unpacked",
    "packed",
    "packed-transformers",
    "roofline",
]
Shape = Literal["gpt2-small", "gpt2-medium", "smollm2-135m", "llama-7b", "tiny-gpt2"]
MethodName = Literal["prefix", "air-decoding", "preadd"]
EAGER, SDPA, ROOFLINE = "transformers-eager", "transformers-sdpa", "roofline"
CONFIGS: Mapping[str, tuple[type, dict[str, Any]]] = {
    "gpt2-small": (GPT2Config, {}),
    "gpt2-medium": (GPT2Config, {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "llama-7b": (LlamaConfig, {"max_position_embeddings": 4096}),
}
"""Shapes with random weights, as transformers' configurations; the others are loaded by name."""
SAMPLES = {True: (3, 24), False: (1, 4, 20)}
"""Default numbers of samples of a method of one branch, and of several."""
ALPHA = 0.5
TEXT, MORE = "The lake was calm and the sky was clear", " and the lake was calm"
"""What a prompt begins with, and what is repeated behind it."""
WARM = 3
"""Tokens of the text that is not timed."""
PARTS = ("products", "attention", "bias", "trace", "combine", "draw", "rest")
"""Parts of a step in `--breakdown`."""


@dataclass(frozen=True)
class Setting:
    """What the contenders of one comparison share.

    Attributes:
        context: Tokens of the prompt; a branch's prefix and BOS come on top.
        length: New tokens of each text.
        rows: Branches x samples.
    """

    shape: str
    dtype: str
    method: str
    samples: int
    context: int
    length: int
    trace: str
    rows: int = 0


@dataclass(frozen=True)
class SpeedStudy:
    """What was measured.

    Attributes:
        machine: Processor, threads and versions, in one line.
        table: One row per setting and contender; `COLUMNS` says what stands in it.
        parts: One row per setting and part of a step of `prepacked`; None where it was not asked
            for.
    """

    machine: str
    table: pd.DataFrame
    parts: pd.DataFrame | None

    @property
    def markdown(self) -> str:
        """The tables, with the machine above them."""
        found = [self.machine, _markdown(_shown(self.table))]
        found += [
            f"roofline, {row['shape']} {row['dtype']}, {row['rows']} rows: {row['note']}"
            for row in self.table.to_dict("records")
            if row["note"]
        ]
        if self.parts is not None:
            found.append(
                "Parts of one step of `prepacked`, each without the parts inside it, from a run of"
                " its own with a clock around each part"
            )
            wide = self.parts.assign(share=(100 * self.parts["share"]).map("{:.0f} %".format))
            keys = ["shape", "dtype", "method", "samples", "context"]
            wide = wide.pivot(index=keys, columns="part", values="share")[list(PARTS)]
            found.append(_markdown(wide.reset_index()))
        return "\n\n".join(found) + "\n"

    def write(self, folder: Path) -> None:
        """Write bench.csv, bench.md and bench.png, and parts.csv if there are parts."""
        self.table.assign(machine=self.machine).to_csv(folder / "bench.csv", index=False)
        (folder / "bench.md").write_text(self.markdown, encoding="utf-8")
        draw_bench(self.table).savefig(folder / "bench.png")
        if self.parts is not None:
            self.parts.to_csv(folder / "parts.csv", index=False)


COLUMNS = {
    "ratio": "speed of the steps against transformers-eager in the same dtype",
    "to_sdpa": "against transformers-sdpa in the same dtype",
    "to_float32": "against transformers-eager in float32",
    "of_roofline": "share of a step that the roofline's products would take",
    "tokens_per_s": "tokens of text per second of the steps",
    "row_tokens_per_s": "the same, counted in every branch",
    "step_seconds": "of one step of all rows",
    "prompt_seconds": "until the first token",
    "steps": "reads after the prompt pass: new tokens less one",
    "seconds": "of the whole run",
    "note": "for the roofline, the products that were fastest, by shape (out x in)",
}
"""Columns beside a setting's fields and `contender`."""


# --- what is timed


@dataclass(frozen=True)
class Timing:
    """Seconds until the first token, and per step after it."""

    prompt: float
    step: float
    note: str = ""


@dataclass
class Subject:
    """A model in the forms that contenders need; all share one set of weights.

    Attributes:
        model: The bridge.
        plain: transformers alone.
        direct: The `TransformersModel`.
    """

    model: Model
    plain: Any
    direct: Model

    @property
    def device(self) -> torch.device:
        return self.plain.device


class Clock(tqdm):
    """A progress bar that shows nothing and notes when it is advanced first."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(disable=True)
        self.device, self.first = device, nan

    def now(self) -> float:
        """Seconds, when the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def update(self, n: int | float | None = 1) -> None:
        if isnan(self.first):
            self.first = self.now()


def _timed(run: Callable[[Clock], None], device: torch.device, steps: int) -> Timing:
    clock = Clock(device)
    began = clock.now()
    run(clock)
    ended = clock.now()
    return Timing(clock.first - began, (ended - clock.first) / steps)


def _prompts(todo: Plan, device: torch.device) -> list[Int[Tensor, "sample _"]]:
    """By branch, the ids that every sample of the one prompt reads first."""
    return [
        torch.tensor([layouts[0].ids] * todo.cell.samples, device=device)
        for layouts in todo.layouts
    ]


def _one_after_another(
    read: Callable[[int, Tensor, DynamicCache], Any],
    prompts: Sequence[Int[Tensor, "sample _"]],
    length: int,
    clock: Clock,
) -> None:
    """Read given tokens step by step, in every step one branch after another.

    Args:
        read: Given the branch's number, tokens [sample, query] and its cache, makes the last
            position's logits.
    """
    n_ids = int(max(ids.max() for ids in prompts)) + 1
    given = torch.arange(len(prompts[0]) * length, device=prompts[0].device) % n_ids
    tokens = given.view(-1, length)  # sample step
    caches = [DynamicCache() for _ in prompts]
    for i, (ids, cache) in enumerate(zip(prompts, caches, strict=True)):
        read(i, ids, cache)
    clock.update()
    for step in range(length - 1):
        for i, cache in enumerate(caches):
            read(i, tokens[:, step : step + 1], cache)


def _transformers(subject: Subject, todo: Plan, implementation: str, clock: Clock) -> None:
    network, prompts = subject.plain, _prompts(todo, subject.device)
    network.set_attn_implementation(implementation)
    if len(prompts) > 1:
        _one_after_another(
            lambda _, ids, cache: network(ids, past_key_values=cache, logits_to_keep=1).logits,
            prompts,
            todo.steps[0],
            clock,
        )
        return
    network.generate(
        prompts[0],
        attention_mask=torch.ones_like(prompts[0]),
        do_sample=True,
        top_k=todo.cell.top_k,
        max_new_tokens=todo.steps[0],
        min_new_tokens=todo.steps[0],
        pad_token_id=subject.model.tokenizer.pad_token_id,
        logits_processor=LogitsProcessorList([_Notice(clock)]),
    )


class _Notice(LogitsProcessor):
    """Advances a clock when logits are there."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.clock.update()
        return scores


def _transformer_lens(subject: Subject, todo: Plan, clock: Clock) -> None:
    model, spans = subject.model, [layouts[0].prefix for layouts in todo.layouts]
    branch = 0

    def boost(scores: Tensor, hook: Any) -> Tensor:
        scores[..., spans[branch].start : spans[branch].stop] += ALPHA
        return scores

    def read(i: int, ids: Tensor, cache: DynamicCache) -> Tensor:
        nonlocal branch
        branch = i
        return model(ids, past_key_values=cache, logits_to_keep=1)

    hooks = [(HOOK_SCORES.format(layer), boost) for layer in range(model.cfg.n_layers)]
    with model.hooks(fwd_hooks=hooks):
        _one_after_another(read, _prompts(todo, subject.device), todo.steps[0], clock)


def _ours(model: Model, todo: Plan, packing: str, clock: Clock) -> None:
    model.lapa2_card = model_card(model).model_copy(update={"packing": packing})
    loop.run_plan(model, todo, progress=clock)


class Products:
    """The matrix products of one step, and how fast they can be.

    Args:
        network: A transformers model; its weights are used as they are.
        rows: Rows of the step.
    """

    def __init__(self, network: Any, rows: int) -> None:
        self.network = _twin(network)
        self.layers: list[Any] = []  # in the order a pass uses them
        marks = [
            layer.register_forward_hook(lambda layer, *_: self.layers.append(layer))
            for layer in self.network.modules()
            if isinstance(layer, (Linear, Conv1D))
        ]
        device = network.device
        self.network(torch.zeros(1, 1, dtype=torch.long, device=device))
        for mark in marks:
            mark.remove()
        self.inputs = {
            n: torch.randn(rows, n, dtype=network.dtype, device=device)
            for n in {_size(layer)[1] for layer in self.layers}
        }  # by width: row in
        self.clock = Clock(device)
        self.least: dict[str, dict[str, float]] = {}

    def time(self) -> Timing:
        """Do the products of a step, in the order of a pass, in each way there is.

        Returns:
            The sum over shapes of the quickest way's least seconds so far.
        """
        self._pass("F.linear", lambda layer, x: layer(x))
        if all(can_prepack(layer.weight) for layer in self.layers):
            self._pass("oneDNN", _onednn)
            with prepacked(self.network, "all"):
                self._pass("packed", lambda layer, x: layer(x))
        won = {
            shape: min(self.least, key=lambda way: self.least[way][shape])
            for shape in next(iter(self.least.values()))
        }
        return Timing(
            nan,
            sum(self.least[way][shape] for shape, way in won.items()),
            ", ".join(f"{shape}: {way}" for shape, way in won.items()),
        )

    def _pass(self, way: str, product: Callable[[Any, Tensor], Tensor]) -> None:
        """Time one way: on a CPU each shape, elsewhere the pass as a whole."""
        on_cpu = self.network.device.type == "cpu"
        for layer in self.layers:  # the first pass packs and warms up
            product(layer, self.inputs[_size(layer)[1]])
        spent: dict[str, float] = defaultdict(float)
        began = self.clock.now()
        for layer in self.layers:
            out, n = _size(layer)
            product(layer, self.inputs[n])
            if on_cpu:
                ended = perf_counter()
                spent[f"{out}x{n}"] += ended - began
                began = ended
        if not on_cpu:
            spent["all shapes"] = self.clock.now() - began
        before = self.least.setdefault(way, {})
        self.least[way] = {k: min(v, before.get(k, v)) for k, v in spent.items()}


def _size(layer: Any) -> tuple[int, int]:
    """(out, in) of a linear layer."""
    out, n = layer.weight.shape[::-1] if isinstance(layer, Conv1D) else layer.weight.shape
    return int(out), int(n)


def _onednn(layer: Any, x: Tensor) -> Tensor:
    """A linear layer by oneDNN, its weight as it lies."""
    weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
    return torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, "none", [], "")


def _twin(network: Any) -> Any:
    """A copy of a network's modules that shares its weights."""
    return copy.deepcopy(network, memo={id(each): each for each in network.parameters()})


# --- parts of a step


@dataclass
class Ledger:
    """Seconds by part, each without the parts inside it."""

    clock: Clock
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    inside: list[str] = field(default_factory=list)
    since: float = 0.0

    def book(self) -> None:
        """Give the time since the last entry to the innermost part."""
        now = self.clock.now()
        self.spent[self.inside[-1] if self.inside else "rest"] += now - self.since
        self.since = now

    def enter(self, part: str) -> None:
        self.book()
        self.inside.append(part)

    def leave(self) -> None:
        self.book()
        self.inside.pop()


class _StartingClock(Clock):
    """Begins a ledger with the first token."""

    ledger: Ledger

    def update(self, n: int | float | None = 1) -> None:
        if isnan(self.first):
            super().update(n)
            self.ledger.spent.clear()
            self.ledger.since = self.first


def _parts(subject: Subject, todo: Plan) -> dict[str, float]:
    """Seconds of one step of `prepacked`, by part: clocks stand around linear layers, attention
    modules, `Bias.add`, `Recorder.observe`, the method and `draw`."""
    clock = _StartingClock(subject.device)
    ledger = clock.ledger = Ledger(clock)
    with _watched(subject.model, todo.method, ledger):
        _ours(subject.model, todo, "all", clock)
    ledger.book()
    steps = todo.steps[0] - 1
    return {part: ledger.spent[part] / steps for part in PARTS}


@contextmanager
def _watched(model: Model, method: Method, ledger: Ledger) -> Iterator[None]:
    watched = [
        *((each, "products") for each in network_of(model).modules() if _is_linear(each)),
        *((block.attn, "attention") for block in model.blocks),
    ]
    functions: tuple[tuple[Any, str, str], ...] = (
        (BatchBias, "add", "bias"),
        (Recorder, "observe", "trace"),
        (type(method), "combine", "combine"),
        (type(method), "advance", "combine"),
        (loop, "_of_branches", "combine"),
        (loop, "draw", "draw"),
    )
    with ExitStack() as undo:
        for module, part in watched:
            enter, leave = partial(ledger.enter, part), ledger.leave
            before = module.register_forward_pre_hook(lambda *_, enter=enter: enter())
            after = module.register_forward_hook(lambda *_, leave=leave: leave())
            undo.callback(before.remove)
            undo.callback(after.remove)
        for owner, name, part in functions:
            own, usual = vars(owner).get(name), getattr(owner, name)
            setattr(owner, name, _within(ledger, part, usual))
            undo.callback(*((setattr, owner, name, own) if own else (delattr, owner, name)))
        yield


def _within(ledger: Ledger, part: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        ledger.enter(part)
        try:
            return usual(*args, **kwargs)
        finally:
            ledger.leave()

    return watched


def _is_linear(module: Any) -> bool:
    return isinstance(module, (Linear, Conv1D))


# --- the bench


def bench(
    shapes: Sequence[str] = ("gpt2-small",),
    method: str | None = None,
    only: Sequence[str] = (),
    samples: Sequence[int] = (),
    contexts: Sequence[int] = (64,),
    length: int = 64,
    dtypes: Sequence[str] = (),
    trace: str = "pooled",
    device: str | None = None,
    threads: int | None = None,
    repeats: int = 3,
    breakdown: bool = False,
    announce: Callable[[str], None] = lambda line: None,
) -> SpeedStudy:
    """Time contenders beside each other.

    Args:
        shapes: Names of `Shape`.
        method: By default air-decoding, and prefix for smollm2-135m.
        only: Names of `Contender`; all by default.
        samples: Texts made together; by default `SAMPLES`.
        contexts: Tokens of the prompt.
        length: New tokens of each text, at least 2.
        dtypes: By default float32, and bfloat16 where this device computes faster in it.
        trace: What ours records: none, pooled or full.
        threads: Of PyTorch; by default as many as it takes.
        repeats: Runs of each contender, of which the quickest counts.
        breakdown: Also tell where a step of `prepacked` goes.
        announce: Given the line about the machine before anything is timed.

    Raises:
        ModelError: Unknown shape, dtype or device, or a shape that needs a GPU.
        RunError: Another argument is none of what is allowed.
        LayoutError: Prompt and new tokens exceed a shape's context.
    """
    device = device or default_device()
    names = _check(shapes, method, only, trace, device)
    for option, values, least in (
        ("samples", samples, 1),
        ("context", contexts, 1),
        ("length", (length,), 2),
        ("repeats", (repeats,), 1),
        ("threads", () if threads is None else (threads,), 1),
    ):
        for value in values:
            if value < least:
                raise RunError(f"{option} {value} is not allowed; give {least} or more")
    dtypes = [resolve_dtype(each, device) for each in dtypes] or ["float32", faster_dtype(device)]
    shapes, dtypes = (list(dict.fromkeys(each)) for each in (shapes, dtypes))
    samples, contexts = (list(dict.fromkeys(each)) for each in (samples, contexts))
    timed: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    with torch_threads(threads or torch.get_num_threads()), torch.no_grad():
        machine = _machine(device)
        announce(machine)
        for shape in shapes:
            chosen = method or ("prefix" if shape == SMOLLM2 else "air-decoding")
            for dtype in dtypes:
                subject = _load(shape, dtype, device)
                settings = [
                    Setting(shape, dtype, chosen, n, context, length, trace)
                    for context in contexts
                    for n in samples or SAMPLES[chosen == "prefix"]
                ]
                plans = [_plan(subject.model, each) for each in settings]
                for setting, todo in zip(settings, plans, strict=True):
                    setting = replace(setting, rows=todo.rows)
                    timed += _compare(subject, setting, todo, names, repeats)
                    if breakdown:
                        parts += _part_rows(setting, _parts(subject, todo))
                del subject  # before the next is loaded
    return SpeedStudy(
        machine, _with_ratios(pd.DataFrame(timed)), pd.DataFrame(parts) if parts else None
    )


def _check(
    shapes: Sequence[str], method: str | None, only: Sequence[str], trace: str, device: str
) -> list[str]:
    """The contenders, in their order; refuses names that are none."""
    for kind, given, allowed in (
        ("shape", shapes, Shape),
        ("method", [method] if method else [], MethodName),
        ("contender", only, Contender),
        ("trace", [trace], TraceKind),
    ):
        for each in given:
            if each not in get_args(allowed):
                error = ModelError if kind == "shape" else RunError
                raise error(unknown_choice(kind, each, get_args(allowed)))
    if "llama-7b" in shapes and not device.startswith("cuda"):
        rest = ", ".join(name for name in get_args(Shape) if name != "llama-7b")
        raise ModelError(
            f"shape 'llama-7b' needs a CUDA device, and the device is {device!r}; choose of {rest}"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"cannot use device {device!r}: {reason}; allowed: cpu, cuda, cuda:1, ..."
        ) from error
    return [name for name in get_args(Contender) if name in only or not only]


def _machine(device: str) -> str:
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "transformers", "transformer-lens")
    ]
    threads = torch.get_num_threads()
    return "; ".join(
        [
            processor_kind(device),
            f"{threads} thread{'s' * (threads != 1)}",
            f"{', '.join(versions)}, lapa2_interp {__version__}",
        ]
    )


def _load(shape: str, dtype: str, device: str) -> Subject:
    """A shape's network, plain and in a bridge."""
    if shape in CONFIGS:
        tokenizer, (config, fields) = load_tokenizer(SMOLLM2), CONFIGS[shape]
        ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        cards = [device] if device.startswith("cuda") else []
        with torch.random.fork_rng(devices=cards), torch.device(device):
            torch.manual_seed(0)
            network = AutoModel.from_config(
                config(**fields, **ends),
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
            ).eval()
        name, weights = f"random-{shape}", "random, seed 0"
    else:
        name = shape
        network, tokenizer, weights = load_transformers(shape, dtype)
        move_to_device(network, device)
    plain = _twin(network)  # before the bridge takes the network apart
    direct: Model = TransformersModel(_twin(network), tokenizer, name)
    attach_card(direct, make_card(direct, name, weights))
    return Subject(wrap_in_bridge(network, tokenizer, name, weights), plain, direct)


def _plan(model: Model, setting: Setting, length: int | None = None) -> Plan:
    """All rows of a setting in one batch, behind one prompt."""
    task = load_task("sentiment")
    text = TEXT + MORE * setting.context
    ids = model.tokenizer(text, add_special_tokens=False).input_ids[: setting.context]
    cell = Cell.of(
        model,
        method=setting.method,
        task=task.model_copy(update={"length_counts_prompt": False}),
        attribute=next(iter(task.attributes)),
        prompts=[model.tokenizer.decode(ids)],
        alpha=ALPHA,
        length=length or setting.length,
        samples=setting.samples,
        trace=setting.trace,  # type: ignore[arg-type]
        max_rows=3 * setting.samples,
    )
    return plan(model, cell)


def _compare(
    subject: Subject, setting: Setting, todo: Plan, names: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """Time the contenders of one setting in turns; one row of the table each."""
    runs: dict[str, Callable[[Plan, Clock], None]] = {
        EAGER: lambda it, clock: _transformers(subject, it, "eager", clock),
        SDPA: lambda it, clock: _transformers(subject, it, "sdpa", clock),
        "transformer-lens": lambda it, clock: _transformer_lens(subject, it, clock),
        "unpacked": lambda it, clock: _ours(subject.model, it, "none", clock),
        "packed": lambda it, clock: _ours(subject.model, it, "all", clock),
        "packed-transformers": lambda it, clock: _ours(subject.direct, it, "all", clock),
    }
    steps, device = setting.length - 1, subject.device
    products = Products(subject.plain, setting.rows) if ROOFLINE in names else None
    short = _plan(subject.model, setting, min(WARM, setting.length))
    label = f"{setting.shape} {setting.dtype}, {setting.rows} rows behind {setting.context}"
    best: dict[str, Timing] = {}
    with progress_bar((1 + repeats) * len(names), label, "run") as bar:
        for turn in range(1 + repeats):
            for name in names:
                bar.set_postfix_str(name, refresh=False)
                if products is not None and name == ROOFLINE:
                    best[name] = products.time()
                elif turn == 0:
                    runs[name](short, Clock(device))
                else:
                    new = _timed(partial(runs[name], todo), device, steps)
                    old = best.get(name, new)
                    best[name] = Timing(min(new.prompt, old.prompt), min(new.step, old.step))
                bar.update()
    return [
        {
            **vars(setting),
            "contender": name,
            "tokens_per_s": setting.samples / found.step,
            "row_tokens_per_s": setting.rows / found.step,
            "step_seconds": found.step,
            "prompt_seconds": found.prompt,
            "steps": steps,
            "seconds": found.prompt + steps * found.step,
            "note": found.note,
        }
        for name, found in ((name, best[name]) for name in names)
    ]


def _part_rows(setting: Setting, spent: Mapping[str, float]) -> list[dict[str, Any]]:
    whole = sum(spent.values())
    return [
        {**vars(setting), "part": part, "step_seconds": each, "share": each / whole}
        for part, each in spent.items()
    ]


def _with_ratios(table: pd.DataFrame) -> pd.DataFrame:
    """The table with ratios of steps, which stand before the speeds."""
    within = ["shape", "method", "samples", "context"]

    def steps_of(contender: str, **chosen: str) -> pd.Series:
        """By row of the table, the seconds per step of a contender in the same setting."""
        there = table[table["contender"] == contender]
        for column, value in chosen.items():
            there = there[there[column] == value]
        keys = [*within, *(["dtype"] if "dtype" not in chosen else [])]
        there = there[[*keys, "step_seconds"]]
        return table[keys].merge(there, on=keys, how="left")["step_seconds"]

    own = table["step_seconds"]
    ratios = {
        "ratio": steps_of(EAGER) / own,
        "to_sdpa": steps_of(SDPA) / own,
        "to_float32": steps_of(EAGER, dtype="float32") / own,
        "of_roofline": steps_of(ROOFLINE) / own,
    }
    first = [each for each in table.columns if each not in COLUMNS]
    return table.assign(**ratios)[[*first, *COLUMNS]]


# --- what is shown


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table as it is read: ratios first, then speeds, rounded."""

    def column(name: str, form: str, scale: float = 1.0) -> list[str]:
        return ["-" if isnan(each) else form.format(scale * each) for each in table[name]]

    names = ["shape", "dtype", "method", "samples", "rows", "context", "contender"]
    return pd.DataFrame(
        {
            **{name: table[name] for name in names},
            "x eager": column("ratio", "{:.2f}"),
            "x sdpa": column("to_sdpa", "{:.2f}"),
            "x float32 eager": column("to_float32", "{:.2f}"),
            "of roofline": column("of_roofline", "{:.0f} %", 100.0),
            "tokens/s": column("tokens_per_s", "{:.1f}"),
            "row-tokens/s": column("row_tokens_per_s", "{:.0f}"),
            "ms/step": column("step_seconds", "{:.2f}", 1000.0),
            "prompt s": column("prompt_seconds", "{:.3f}"),
        }
    )


def _markdown(table: pd.DataFrame) -> str:
    """A Markdown table that is also readable as text."""
    cells = [list(map(str, table.columns)), *([str(x) for x in row] for row in table.to_numpy())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells)


def draw_bench(table: pd.DataFrame) -> Drawing:
    """Speed against transformers-eager by setting and contender; tokens/s where it did not run."""
    value, label = ("ratio", "times the speed of transformers-eager")
    if table["ratio"].isna().all():
        value, label = ("tokens_per_s", "tokens/s")
    groups = list(table.groupby(["shape", "dtype", "samples", "context"], sort=False))
    names = list(dict.fromkeys(table["contender"]))
    figure = new_figure(6.8, 1.2 + 0.16 * len(names) * len(groups) + 0.1 * len(groups))
    axes, thick = figure.subplots(), 0.8 / len(names)
    for i, name in enumerate(names):
        bars = [part.loc[part["contender"] == name, value].sum() for _, part in groups]
        places = [at + (i - (len(names) - 1) / 2) * thick for at in range(len(groups))]
        axes.barh(places, bars, thick, color=COLOURS[i], label=name)
    axes.set_yticks(
        range(len(groups)),
        [
            f"{each['shape']} {each['dtype']}\n{pluralize(int(each['samples']), 'text')} behind"
            f" {each['context']} tokens"
            for each in (part.iloc[0] for _, part in groups)
        ],
    )
    axes.invert_yaxis()
    plain_axes(axes, label, "")
    figure.legend(loc="outside upper center", frameon=False, fontsize=7, ncols=3)
    return figure
