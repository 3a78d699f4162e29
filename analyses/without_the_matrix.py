# %% [markdown]
# # What does a bias cost without the matrix of scores?
#
# Time and memory of one pass over a text, on one thread of a CPU: transformers' own attention
# without a bias, then the bias and its trace with the matrix of scores and without. And errors in
# half precision. See docs/without-the-matrix.md.
#
#     python analyses/without_the_matrix.py --tokens 4096 --layers 2

# %%
import argparse
import threading
from collections.abc import Callable
from pathlib import Path
from time import process_time, sleep

import torch

from lapa2_interp import Augmentation, Layout, augmented, load_model, teacher_forced
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.models.span_attention import SpanScores

parser = argparse.ArgumentParser(description="The cost of a bias without the matrix of scores")
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--tokens", type=int, default=4096)
parser.add_argument("--layers", type=int, default=2, help="the model's first layers that are read")
parser.add_argument("--rounds", type=int, default=2, help="the least of as many times is shown")
parser.add_argument("--without", nargs="*", default=[], help="rows that are left out")
options = parser.parse_args()
torch.set_num_threads(1)

# %% The model's first layers, and a text of random tokens.
model = load_model(options.model, model_class="TransformersModel")
network = model.original_model
network.model.layers = network.model.layers[: options.layers]
network.config.num_hidden_layers = model.cfg.n_layers = options.layers
layout, rule = Layout.of(model, "Very positive:", " The lake"), Augmentation(alpha=0.5)
torch.manual_seed(0)
text = torch.randint(100, model.cfg.d_vocab, (options.tokens - len(layout) + 1,)).tolist()
ids = torch.tensor([[*layout.ids, *text[:-1]]])


def plain() -> None:
    network.set_attn_implementation("sdpa")
    network(ids, logits_to_keep=1, use_cache=False)


def biased(attn: str, trace: bool) -> None:
    model.attn, recorder = attn, None
    if trace:
        recorder = Recorder(options.layers, model.cfg.n_heads)
        recorder.begin([layout])
    with augmented(model, rule, layout, recorder):
        model(ids, logits_to_keep=1, use_cache=False)


def forced(attn: str) -> None:
    model.attn = attn
    teacher_forced(model, layout, [text], rule)


rows: dict[str, Callable[[], None]] = {
    "SDPA, no bias": plain,
    "bias, fused": lambda: biased("fused", False),
    "bias and trace, fused": lambda: biased("fused", True),
    "bias, matrix": lambda: biased("matrix", False),
    "bias and trace, matrix": lambda: biased("matrix", True),
    "teacher_forced, fused": lambda: forced("fused"),
    "teacher_forced, matrix": lambda: forced("matrix"),
}


# %% Seconds of the processor, so that other programs do not count, and most memory.
def memory() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


def measure(compute: Callable[[], None]) -> tuple[float, int]:
    before, most, running = memory(), [0], threading.Event()

    def watch() -> None:
        while not running.is_set():
            most[0] = max(most[0], memory() - before)
            sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = process_time()
    compute()
    seconds = process_time() - began
    running.set()
    watcher.join()
    return seconds, most[0]


best: dict[str, tuple[float, int]] = {}
with torch.no_grad():
    for _ in range(options.rounds):
        for name, compute in rows.items():
            if name not in options.without:
                seconds, size = measure(compute)
                least, most_bytes = best.get(name, (seconds, size))
                best[name] = min(least, seconds), max(most_bytes, size)
print(f"{options.tokens} tokens, {options.layers} layers of {options.model}, float32, one thread")
for name, (seconds, size) in best.items():
    ratio = seconds / best["SDPA, no bias"][0]
    print(f"{name:24} {seconds:7.2f} s  {ratio:5.2f} times  {size / 2**20:7.0f} MiB")


# %% Errors in half precision: of outputs, and of the log-odds of attention on a span.
def errors(dtype: torch.dtype, b: float) -> tuple[float, ...]:
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


print("\ndtype, b          outputs: matrix, fused     log-odds: matrix, fused")
for dtype in (torch.bfloat16, torch.float16):
    for b in (-4.0, 2.0, 8.0):
        shown = "   ".join(f"{error:.1e}" for error in errors(dtype, b))
        print(f"{str(dtype).removeprefix('torch.'):9} {b:4.0f}          {shown}")
