"""Speed of generation beside peers, in one run on one machine (`lapa2 bench`).

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

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
import torch
from transformers import AutoModelForCausalLM as AutoModel
from transformers import GPT2Config, LlamaConfig

from lapa2_interp._util.errors import ModelError, RunError, pluralize, unknown_choice
from lapa2_interp._util.plots import COLOURS, Drawing, new_figure, plain_axes
from lapa2_interp._util.progress import progress_bar
from lapa2_interp._util.version import __version__
from lapa2_interp.attention.trace import TraceKind
from lapa2_interp.generation.plan import BatchPlan, plan_batches
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.card import (
    Model,
    TransformersModel,
    attach_card,
    make_card,
)
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
from lapa2_interp.models.smollm2 import SMOLLM2
from lapa2_interp.runs.contenders import (
    ALPHA,
    PARTS,
    Clock,
    Products,
    Subject,
    Timing,
    copy_sharing_weights,
    time_parts,
    time_run,
    with_our_loop,
    with_transformer_lens,
    with_transformers,
)

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
TEXT, MORE = "The lake was calm and the sky was clear", " and the lake was calm"
"""Beginning of a prompt, and the text that is repeated after it."""
WARM = 3
"""Tokens of the text that is not timed."""


@dataclass(frozen=True)
class Setting:
    """Settings that the contenders of one comparison share.

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
    """Measured speeds.

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
                        parts += _part_rows(setting, time_parts(subject, todo))
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
    plain = copy_sharing_weights(network)  # before the bridge takes the network apart
    direct: Model = TransformersModel(copy_sharing_weights(network), tokenizer, name)
    attach_card(direct, make_card(direct, name, weights))
    return Subject(wrap_in_bridge(network, tokenizer, name, weights), plain, direct)


def _plan(model: Model, setting: Setting, length: int | None = None) -> BatchPlan:
    """All rows of a setting in one batch, behind one prompt."""
    task = load_task("sentiment")
    text = TEXT + MORE * setting.context
    ids = model.tokenizer(text, add_special_tokens=False).input_ids[: setting.context]
    cell = cell_of(
        model,
        method=setting.method,
        task=task.model_copy(update={"length_counts_prompt": False}),
        attribute=next(iter(task.attributes)),
        prompts=[model.tokenizer.decode(ids)],
        alpha=ALPHA,
        length=length or setting.length,
        samples=setting.samples,
        trace=setting.trace,
        max_rows=3 * setting.samples,
    )
    return plan_batches(model, cell)


def _compare(
    subject: Subject, setting: Setting, todo: BatchPlan, names: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """Time the contenders of one setting in turns; one row of the table each."""
    runs: dict[str, Callable[[BatchPlan, Clock], None]] = {
        EAGER: lambda it, clock: with_transformers(subject, it, "eager", clock),
        SDPA: lambda it, clock: with_transformers(subject, it, "sdpa", clock),
        "transformer-lens": lambda it, clock: with_transformer_lens(subject, it, clock),
        "unpacked": lambda it, clock: with_our_loop(subject.model, it, "none", clock),
        "packed": lambda it, clock: with_our_loop(subject.model, it, "all", clock),
        "packed-transformers": lambda it, clock: with_our_loop(subject.direct, it, "all", clock),
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
                    new = time_run(partial(runs[name], todo), device, steps)
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
