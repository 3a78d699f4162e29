"""Speed of generation on this machine, beside plain transformers and TransformerLens.

    python analyses/speed/bench.py --shape tiny-gpt2 --length 16  # a first look, in seconds
    python analyses/speed/bench.py --shape gpt2-small --samples 1 4 20 --threads 2 \\
        --out results/bench

All decode the same number of texts, of the same lengths, with the same weights, in turns:

- transformers-eager, transformers-sdpa: plain transformers, without bias and trace. A method of one
  branch is `generate` with sampling. Of several branches, each step reads one after another, each
  with its growing cache; the tokens are given, so that combining and drawing cost nothing.
- transformer-lens: a TransformerBridge with hooks that add a number to the prefix's scores, read in
  the same way.
- unpacked, packed: this package, branches in one batch, with bias, trace, combining and drawing;
  without and with prepacked weights. packed-transformers: without TransformerLens. static: that,
  with steps of a fixed size, which a GPU replays as CUDA graphs.
- roofline: the matrix products of one step alone, for all rows at once. Each shape takes the
  fastest of F.linear, oneDNN and prepacked weights.
- bandwidth: reading the weights and the live keys and values of all rows once, as fast as a copy
  in this memory.

The time of a step is that of a run of `--length` tokens less that of a run of two tokens, divided
by the steps between; of several runs, the quickest counts. `x eager` is the speed of the steps
against transformers-eager in the same precision, `of roofline` the share of a step that its
products would take, `of bandwidth` the share that reading would take. On a GPU, `GB` is the most
memory that was in use, weights included.
"""

from __future__ import annotations

import argparse
import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from math import inf, nan
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import Linear
from torch.utils.benchmark import Timer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from transformers.cache_utils import DynamicCache
from transformers.pytorch_utils import Conv1D

from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp.files import result_folder
from lapa2_interp.generation.batch import BatchPlan
from lapa2_interp.generation.loop import decode_batch
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.card import attach_card, make_card
from lapa2_interp.models.configuration import kv_shapes
from lapa2_interp.models.facts import TransformersModel
from lapa2_interp.models.hook_names import HOOK_SCORES
from lapa2_interp.models.load import (
    load_tokenizer,
    load_transformers,
    move_to_device,
    wrap_in_bridge,
)
from lapa2_interp.models.machine import (
    default_device,
    faster_dtype,
    peak_memory,
    processor_kind,
)
from lapa2_interp.models.prepacked import can_prepack, prepacked
from lapa2_interp.progress import progress_bar
from lapa2_interp.table_formats import as_markdown

CONFIGS: Mapping[str, tuple[type, dict[str, Any]]] = {
    "gpt2-small": (GPT2Config, {}),
    "gpt2-medium": (GPT2Config, {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "llama-7b": (LlamaConfig, {"max_position_embeddings": 4096}),
}
"""Shapes with random weights; the others are models, loaded by name."""
CONTENDERS = (
    "transformers-eager",
    "transformers-sdpa",
    "transformer-lens",
    "unpacked",
    "packed",
    "packed-transformers",
    "static",
    "roofline",
    "bandwidth",
)
ALPHA = 0.5
TEXT, MORE = "The lake was calm and the sky was clear", " and the lake was calm"
"""Beginning of a prompt, and the text that is repeated after it."""
COPIED = 1 << 28
"""Bytes of the copy that measures a memory's speed."""
SHORT = 2
"""Tokens of the run whose time is subtracted."""

Run = Callable[[int], object]
"""Makes all texts of that number of tokens."""


def main() -> None:
    """Time the contenders; print a table, and write it."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = (*CONFIGS, "smollm2-135m", "tiny-gpt2")
    parser.add_argument("--shape", nargs="+", choices=shapes, default=["gpt2-small"])
    parser.add_argument(
        "--method",
        choices=("prefix", "air-decoding", "preadd"),
        help="default: air-decoding (three branches); prefix (one) for smollm2-135m",
    )
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--samples", nargs="+", type=whole_number(), help="texts made together")
    parser.add_argument("--context", nargs="+", type=whole_number(), default=[64])
    parser.add_argument("--length", type=whole_number(SHORT + 1), default=64)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--trace", choices=("none", "pooled", "full"), default="pooled")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--threads", type=whole_number(), default=torch.get_num_threads())
    parser.add_argument("--repeats", type=whole_number(), default=3)
    parser.add_argument("--out", type=Path, help="a new folder for bench.csv and bench.md")
    options = parser.parse_args()
    libraries = ("torch", "transformers", "transformer-lens", "lapa2-interp")
    versions = ", ".join(f"{name} {version(name)}" for name in libraries)
    machine = f"{processor_kind(options.device)}; {options.threads} threads; {versions}"
    with ExitStack() as held:
        folder = held.enter_context(result_folder(options.out)) if options.out else None
        dtypes = options.dtype or ["float32", faster_dtype(options.device)]
        table = pd.concat(
            [
                bench(shape, dtype, options)
                for shape in dict.fromkeys(options.shape)
                for dtype in dict.fromkeys(dtypes)
            ],
            ignore_index=True,
        )
        page = as_markdown("Speed", shown(table), [machine])
        print(page)
        if folder is not None:
            table.assign(machine=machine).to_csv(folder / "bench.csv", index=False)
            (folder / "bench.md").write_text(page, encoding="utf-8")


@torch.no_grad()
def bench(shape: str, dtype: str, options: argparse.Namespace) -> pd.DataFrame:
    """Seconds of a step of every contender, for every prompt and number of texts."""
    method = options.method or ("prefix" if shape == "smollm2-135m" else "air-decoding")
    bridge, plain, direct = load(shape, dtype, options.device)
    rows = []
    for context in options.context:
        for samples in options.samples or ([3, 24] if method == "prefix" else [1, 4, 20]):
            setting = {"shape": shape, "dtype": dtype, "samples": samples, "context": context}
            plan = partial(planned, bridge, method, samples, context, trace=options.trace)
            runs: dict[str, Run] = {
                "transformers-eager": lambda n, p=plan: with_transformers(plain, p(n), "eager"),
                "transformers-sdpa": lambda n, p=plan: with_transformers(plain, p(n), "sdpa"),
                "transformer-lens": lambda n, p=plan: with_transformer_lens(bridge, p(n)),
                "unpacked": lambda n, p=plan: with_our_loop(bridge, p(n), "none"),
                "packed": lambda n, p=plan: with_our_loop(bridge, p(n), "all"),
                "packed-transformers": lambda n, p=plan: with_our_loop(direct, p(n), "all"),
                "static": lambda n, p=plan: with_our_loop(direct, p(n), "all", static=True),
            }
            longest = plan(options.length)
            steps, peaks = time_steps(
                {name: runs[name] for name in options.only if name in runs}, options
            )
            if "roofline" in options.only:
                steps["roofline"] = roofline(plain, longest.rows, options.threads)
            if "bandwidth" in options.only:
                steps["bandwidth"] = bandwidth(plain, longest)
            rows += [
                {
                    **setting,
                    "method": method,
                    "rows": longest.rows,
                    "contender": name,
                    "step": step,
                    "peak": peaks.get(name, nan),
                }
                for name, step in steps.items()
            ]
    return pd.DataFrame(rows)


def time_steps(
    runs: Mapping[str, Run], options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds of a step of each contender, the quickest of several runs, in turns; and on a GPU the
    most bytes in use."""
    least: dict[tuple[str, int], float] = defaultdict(lambda: inf)
    peaks: dict[str, int] = {}
    lengths = (SHORT, options.length)
    with progress_bar((1 + options.repeats) * len(runs), "timing", "run") as bar:
        for turn in range(1 + options.repeats):
            for name, run in runs.items():
                if options.device != "cpu":
                    torch.cuda.reset_peak_memory_stats()
                for length in lengths if turn else lengths[:1]:  # the first one warms up
                    timer = Timer(
                        "run(n)", globals={"run": run, "n": length}, num_threads=options.threads
                    )
                    seconds = timer.timeit(1).mean
                    if turn:
                        least[name, length] = min(seconds, least[name, length])
                if options.device != "cpu":
                    peaks[name] = peak_memory(options.device)
                bar.update()
    n_steps = options.length - SHORT
    steps = {name: (least[name, lengths[1]] - least[name, SHORT]) / n_steps for name in runs}
    return steps, peaks


def load(shape: str, dtype: str, device: str) -> tuple[Any, Any, Any]:
    """A shape's network as a bridge, plain, and as a `TransformersModel`, with one set of
    weights."""
    if shape in CONFIGS:
        config, fields = CONFIGS[shape]
        ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        torch.manual_seed(0)
        with torch.device(device):
            network = AutoModelForCausalLM.from_config(
                config(**fields, **ends),
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
            ).eval()
        tokenizer, weights = load_tokenizer("smollm2-135m"), "random, seed 0"
    else:
        network, tokenizer, weights = load_transformers(shape, dtype)
        move_to_device(network, device)
    plain = sharing_weights(network)  # before the bridge takes the network apart
    direct = TransformersModel(sharing_weights(network), tokenizer, shape)
    attach_card(direct, make_card(direct, shape, weights))
    return wrap_in_bridge(network, tokenizer, shape, weights), plain, direct


def sharing_weights(network: Any) -> Any:
    """A copy of a network's modules that shares its weights."""
    return copy.deepcopy(
        network, memo={id(parameter): parameter for parameter in network.parameters()}
    )


def planned(
    model: Any, method: str, samples: int, context: int, length: int, trace: str
) -> BatchPlan:
    """A plan with all rows in one batch, behind one prompt of that number of tokens."""
    task = load_task("sentiment").model_copy(update={"length_counts_prompt": False})
    ids = model.tokenizer(TEXT + MORE * context, add_special_tokens=False).input_ids[:context]
    cell = cell_of(
        model,
        method=method,
        task=task,
        attribute=next(iter(task.attributes)),
        prompts=[model.tokenizer.decode(ids)],
        alpha=ALPHA,
        length=length,
        samples=samples,
        trace=trace,
        max_rows=3 * samples,
    )
    return plan_batches(model, cell)


def prompt_tokens(plan: BatchPlan, device: torch.device) -> list[Tensor]:
    """By branch, the ids that every sample of the one prompt reads first."""
    samples = plan.cell.samples
    return [torch.tensor([row[0].ids] * samples, device=device) for row in plan.arrangement.layouts]


def one_after_another(
    read: Callable[[int, Tensor, DynamicCache], object], prompts: Sequence[Tensor], length: int
) -> None:
    """Read given tokens step by step, in every step one branch after another."""
    n_ids = int(max(ids.max() for ids in prompts)) + 1
    counting = torch.arange(len(prompts[0]) * length, device=prompts[0].device) % n_ids
    tokens = counting.view(-1, length)  # sample step
    caches = [DynamicCache() for _ in prompts]
    for i, (ids, cache) in enumerate(zip(prompts, caches, strict=True)):
        read(i, ids, cache)
    for step in range(length - 1):
        for i, cache in enumerate(caches):
            read(i, tokens[:, step : step + 1], cache)


def with_transformers(network: Any, plan: BatchPlan, implementation: str) -> None:
    """Plain transformers."""
    prompts, length = prompt_tokens(plan, network.device), plan.arrangement.steps[0]
    network.set_attn_implementation(implementation)
    if len(prompts) > 1:

        def read(_: int, ids: Tensor, cache: DynamicCache) -> Tensor:
            return network(ids, logits_to_keep=1, **{cache_name(network): cache}).logits

        one_after_another(read, prompts, length)
        return
    network.generate(
        prompts[0],
        attention_mask=torch.ones_like(prompts[0]),
        do_sample=True,
        top_k=plan.cell.top_k,
        max_new_tokens=length,
        min_new_tokens=length,
        pad_token_id=0,
    )


def with_transformer_lens(model: Any, plan: BatchPlan) -> None:
    """TransformerLens, with hooks that add a number to the scores of the prefix."""
    spans, branch = [row[0].prefix for row in plan.arrangement.layouts], 0
    name = cache_name(model.original_model)

    def boost(scores: Tensor, hook: Any) -> Tensor:
        scores[..., spans[branch].start : spans[branch].stop] += ALPHA
        return scores

    def read(i: int, ids: Tensor, cache: DynamicCache) -> Tensor:
        nonlocal branch
        branch = i
        return model(ids, logits_to_keep=1, **{name: cache})

    hooks = [(HOOK_SCORES.format(layer), boost) for layer in range(model.cfg.n_layers)]
    device = next(model.original_model.parameters()).device
    with model.hooks(fwd_hooks=hooks):
        one_after_another(read, prompt_tokens(plan, device), plan.arrangement.steps[0])


def with_our_loop(model: Any, plan: BatchPlan, packing: str, static: bool = False) -> None:
    """This package."""
    model.static = static
    plan = replace(plan, card=plan.card.model_copy(update={"prepacking": packing}))
    for pairs in plan.batches:
        decode_batch(model, plan, pairs)


def roofline(network: Any, rows: int, threads: int) -> float:
    """Seconds of the matrix products of one step; each shape takes the fastest way."""
    network = sharing_weights(network)
    layers: list[Any] = []  # in the order a pass uses them
    for layer in network.modules():
        if isinstance(layer, Linear | Conv1D):
            layer.register_forward_hook(lambda layer, *_: layers.append(layer))
    network(torch.zeros(1, 1, dtype=torch.long, device=network.device))
    by_shape: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for layer in list(layers):
        layer._forward_hooks.clear()
        by_shape[tuple(layer.weight.shape)].append(layer)

    def timed(product: Callable[[Any, Tensor], object], same: list[Any]) -> float:
        """All layers of a shape, one after another, so that no weight is in the cache."""
        weight = same[0].weight
        width = weight.shape[0 if isinstance(same[0], Conv1D) else 1]
        x = torch.randn(rows, width, dtype=weight.dtype, device=weight.device)
        names = {"product": product, "layers": same, "x": x}
        timer = Timer("for layer in layers: product(layer, x)", globals=names, num_threads=threads)
        return min(timer.timeit(1).mean for _ in range(5))

    least = {shape: timed(lambda layer, x: layer(x), same) for shape, same in by_shape.items()}
    if all(can_prepack(layer.weight) for layer in layers):
        for shape, same in by_shape.items():
            least[shape] = min(least[shape], timed(_onednn, same))
        with prepacked(network, "all"):
            for shape, same in by_shape.items():
                least[shape] = min(least[shape], timed(lambda layer, x: layer(x), same))
    return sum(least.values())


def bandwidth(network: Any, plan: BatchPlan) -> float:
    """Seconds of reading what a step must read, at the speed of a copy."""
    weight = network.get_input_embeddings().weight
    source = torch.ones(COPIED // weight.element_size(), dtype=weight.dtype, device=weight.device)
    names = {"target": torch.empty_like(source), "source": source}
    timer = Timer("target.copy_(source)", globals=names)
    second = min(timer.timeit(5).mean for _ in range(3))
    return read_bytes(network, plan) * second / (2 * COPIED)  # a copy reads and writes


def read_bytes(network: Any, plan: BatchPlan) -> int:
    """Bytes of the weights, and of the live keys and values of all rows at a middle step.

    Input embeddings count only if they are the output's too; a step reads few of them.
    """
    embeddings = network.get_input_embeddings().weight
    n = sum(weight.numel() for weight in network.parameters() if weight is not embeddings)
    n += embeddings.numel() * (network.get_output_embeddings().weight is embeddings)
    live = sum(row[0].n_live for row in plan.arrangement.layouts) * plan.cell.samples
    keys = live + plan.rows * (plan.arrangement.steps[0] // 2)
    config = network.config.get_text_config()
    shapes = kv_shapes(config)  # of each layer, or one for all
    layers = config.num_hidden_layers // len(shapes)
    n += keys * layers * sum(heads * (key + value) for heads, key, value in shapes)
    return n * embeddings.element_size()


def _onednn(layer: Any, x: Tensor) -> Tensor:
    """A linear layer by oneDNN, its weight as it lies."""
    weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
    return torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, "none", [], "")


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table with ratios of steps and speeds, rounded."""
    keys = ["shape", "dtype", "samples", "context"]
    steps = table.pivot_table("step", keys, "contender", sort=False)
    own = table.set_index(keys)["step"]
    made = table[[*keys, "rows", "contender"]].copy()
    for column, peer in (("x eager", CONTENDERS[0]), ("x sdpa", CONTENDERS[1])):
        if peer in steps:
            made[column] = (steps[peer].reindex(own.index) / own).map("{:.2f}".format).to_numpy()
    for limit in ("roofline", "bandwidth"):
        if limit in steps:
            share = 100 * steps[limit].reindex(own.index) / own
            made[f"of {limit}"] = share.map("{:.0f} %".format).to_numpy()
    made["tokens/s"] = (table["samples"] / table["step"]).map("{:.1f}".format)
    made["ms/step"] = (1000 * table["step"]).map("{:.2f}".format)
    if table["peak"].notna().any():
        made["GB"] = (table["peak"] / 1e9).map("{:.1f}".format).replace("nan", "")
    return made


if __name__ == "__main__":
    main()
