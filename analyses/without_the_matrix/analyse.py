# %% [markdown]
# # What does a bias cost without the matrix of scores?
#
# Time and memory of one pass over a text, on one thread of a CPU: transformers' own attention
# without a bias, then the bias and its trace with the matrix of scores and without. And errors in
# half precision. See docs/without-the-matrix.md.
#
#     python analyses/without_the_matrix/analyse.py --parts whole --tokens 2048 --layers 2
#     python analyses/without_the_matrix/analyse.py --out figures/without_the_matrix  # all, an hour
#
# - whole: SmolLM2 with its bias and the trace of all its heads; the full matrix once.
# - plain: a bias inside `augmented`, on a transformers model that was loaded by its owner.
# - long: random weights in the shape of SmolLM2, and how memory grows.
# - errors: of outputs and log-odds in bfloat16 and float16.

# %%
import argparse
import ctypes
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import process_time

import pandas as pd
import torch
from transformers import AutoModelForCausalLM

from lapa2_interp import Augmentation, Layout, augmented, teacher_forced
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.errors import ModelError
from lapa2_interp.models import TransformersModel
from lapa2_interp.models.load import load_transformers
from lapa2_interp.models.machine import processor_kind
from lapa2_interp.models.span_attention import SpanScores

PARTS = ("whole", "plain", "long", "errors")
parser = argparse.ArgumentParser(description="The cost of a bias without the matrix of scores")
parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--tokens", type=int, default=8192, help="of the part whole")
parser.add_argument("--plain-tokens", type=int, default=6114, help="of the part plain")
parser.add_argument("--long-tokens", type=int, nargs="+", default=[8192, 16384, 32768])
parser.add_argument(
    "--layers", type=int, help="the model's first layers that are read; default all"
)
parser.add_argument("--rounds", type=int, default=2, help="the least of as many times is shown")
parser.add_argument("--without", nargs="*", default=[], help="passes that are left out")
parser.add_argument("--out", type=Path, help="a folder for a table of each part")
options = parser.parse_args()
torch.set_num_threads(1)
SDPA = "SDPA, no bias"
rule = Augmentation(alpha=0.5)


# %% Seconds of the processor, so that other programs do not count, and most memory.
def memory(field: str) -> int:
    """Bytes of this process: now (VmRSS), or the most since `measure` began (VmHWM)."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def measure(compute: Callable[[], None]) -> dict[str, float]:
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free is not the process's
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the most is what it has now
    before, began = memory("VmRSS"), process_time()
    compute()
    seconds = process_time() - began
    most = memory("VmHWM")
    return {"seconds": seconds, "MiB": (most - before) / 2**20, "process MiB": most / 2**20}


def compare(passes: dict[str, Callable[[], None]], once: tuple[str, ...] = ()) -> pd.DataFrame:
    """Least time and last memory of passes, in rounds, so that all see the same machine."""
    rows = []
    for round_ in range(options.rounds):
        for name, compute in passes.items():
            if name not in options.without and not (round_ and name in once):
                rows.append({"pass": name, **measure(compute)})
                print(rows[-1], flush=True)
    best = pd.DataFrame(rows).groupby("pass", sort=False)
    # The first round also fills caches of the libraries.
    table = best.agg({"seconds": "min", "MiB": "last", "process MiB": "last"}).reset_index()
    if SDPA in passes:
        table["times"] = table["seconds"] / table["seconds"][table["pass"] == SDPA].iloc[0]
    return table


def write(part: str, table: pd.DataFrame) -> None:
    print(f"\n{part}, {options.model}\n{table.to_string(index=False)}\n", flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        machine = f"{processor_kind('cpu')}; one thread; torch {version('torch')}"
        table.assign(machine=machine).to_csv(
            options.out / f"{part}.csv", index=False, float_format="%.6g"
        )


# %% A model's first layers, a text of random tokens behind a prefix, and the passes over it.
def first_layers(network: torch.nn.Module) -> torch.nn.Module:
    network.model.layers = network.model.layers[: options.layers]
    network.config.num_hidden_layers = len(network.model.layers)
    network(torch.arange(64)[None])  # reads the weights
    return network


def random_text(layout: Layout, tokens: int) -> list[int]:
    torch.manual_seed(0)
    return torch.randint(100, 40000, (tokens - len(layout) + 1,)).tolist()


def read(model: TransformersModel, layout: Layout, text: list[int]) -> None:
    recorder = Recorder(model.cfg.n_layers, model.cfg.n_heads)
    recorder.begin([layout])
    with augmented(model, rule, layout, recorder):
        ids = torch.tensor([[*layout.ids, *text[:-1]]])
        model(ids, logits_to_keep=1, use_cache=False)


def whole() -> None:
    network, tokenizer, _ = load_transformers(options.model)
    model = TransformersModel(first_layers(network), tokenizer, options.model)
    layout = Layout.of(model, "Very positive:", " The lake")
    text = random_text(layout, options.tokens)
    ids = torch.tensor([[*layout.ids, *text[:-1]]])

    def plain() -> None:
        network.set_attn_implementation("sdpa")
        network(ids, logits_to_keep=1, use_cache=False)

    def biased(attn: str) -> None:
        model.attn = attn
        read(model, layout, text)

    def forced(attn: str) -> None:
        model.attn = attn
        teacher_forced(model, layout, [text], rule)

    passes: dict[str, Callable[[], None]] = {
        SDPA: plain,
        "bias and trace": lambda: biased("fused"),
        "teacher_forced": lambda: forced("fused"),
        "teacher_forced, matrix": lambda: forced("matrix"),
        "bias and trace, matrix": lambda: biased("matrix"),
    }
    table = compare(passes, once=("bias and trace, matrix",))
    write("whole", table.assign(tokens=options.tokens, layers=model.cfg.n_layers))


def plain() -> None:
    network, tokenizer, _ = load_transformers(options.model)
    first_layers(network).set_attn_implementation("sdpa")
    layout = Layout.of(tokenizer, "Very positive:", " The lake")
    text = random_text(layout, options.plain_tokens)
    ids = torch.tensor([[*layout.ids, *text[:-1]]])

    def biased() -> None:
        with augmented(network, rule, layout) as paths:
            network(ids, logits_to_keep=1, use_cache=False)
        print(f"path of all layers: {', '.join({*paths.values()})}")

    table = compare({SDPA: lambda: network(ids, logits_to_keep=1, use_cache=False), "bias": biased})
    write("plain", table.assign(tokens=options.plain_tokens, layers=len(network.model.layers)))


def long() -> None:
    network, tokenizer, _ = load_transformers(options.model)
    config = first_layers(network).config
    config.max_position_embeddings = max(options.long_tokens)
    network = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    network(torch.arange(64)[None])
    model = TransformersModel(network, tokenizer, "random")
    layout = Layout.of(model, "Very positive:", " The lake")
    rows = []
    for tokens in options.long_tokens:
        text = random_text(layout, tokens)
        model.attn = "fused"
        rows.append({"tokens": tokens, **measure(lambda text=text: read(model, layout, text))})
        print(rows[-1], flush=True)
    model.attn, began = "matrix", process_time()
    try:
        read(model, layout, text)
    except ModelError as error:
        print(f"{error}\nsaid before the pass, after {process_time() - began:.2f} s")
    write("long", pd.DataFrame(rows).assign(layers=model.cfg.n_layers))


# %% Errors in half precision: of outputs, and of the log-odds of attention on a span.
def largest_errors(dtype: torch.dtype, b: float) -> tuple[float, ...]:
    worst = torch.zeros(4, dtype=torch.float64)
    for seed in range(8):
        torch.manual_seed(seed)
        query, key, value = (torch.randn(1, 4, 256, 64).to(dtype) for _ in range(3))
        span = (torch.arange(256) < 8)[None]
        wide = [x.double() for x in (query, key, value)]
        later = torch.ones(256, 256, dtype=torch.bool).triu(1)
        all_odds, all_outputs = [], []
        for q, k, v in (wide, (query, key, value)):
            scores = (q @ k.mT / 8).masked_fill(later, -torch.inf)
            scores = scores.to(torch.promote_types(q.dtype, torch.float32)) + b * span
            pattern = scores.softmax(3)
            all_outputs.append((pattern.to(q.dtype) @ v).double())
            inside, outside = (pattern[..., s].sum(3).double() for s in (span[0], ~span[0]))
            all_odds.append((inside / outside).log()[:, :, 8:])
        fused = SpanScores(query, key, value, 1 / 8)
        fused.add(span, torch.full((1, 1, 256), b))
        all_outputs.append(fused.outputs().double())
        odds = fused.log_sum(span) - fused.log_sum(span, outside=True)
        all_odds.append(odds.double()[:, :, 8:])
        pairs = [values[i] - values[0] for values in (all_outputs, all_odds) for i in (1, 2)]
        worst = torch.maximum(worst, torch.stack([pair.abs().max() for pair in pairs]))
    return tuple(worst.tolist())


def errors() -> None:
    rows = [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "b": b,
            "of": quantity,
            "way": way,
            "error": error,
        }
        for dtype in (torch.bfloat16, torch.float16)
        for b in (-4.0, 2.0, 8.0)
        for (quantity, way), error in zip(
            [(of, way) for of in ("outputs", "log-odds") for way in ("matrix", "fused")],
            largest_errors(dtype, b),
            strict=True,
        )
    ]
    write("errors", pd.DataFrame(rows))


# %%
with torch.no_grad():
    for part in options.parts:
        {"whole": whole, "plain": plain, "long": long, "errors": errors}[part]()
