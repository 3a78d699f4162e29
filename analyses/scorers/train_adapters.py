"""Train the adapter scorer of a task: low-rank adapters on the lower layers of SmolLM2.

    python analyses/scorers/train_adapters.py --task sentiment --data imdb --data sst2=2 \\
        --test sst2 --out results/scorers

1. A pass draws at most `--per-pass` texts of each corpus, other ones in each pass. Each text gives
   one window (`draw_window`), since generated texts are short and end anywhere.
2. The loss is the soft cross-entropy against each text's shares of the labels, times the text's
   weight. It does not depend on the batch of a text.
3. AdamW, linear warm-up and decay, clipped gradients. Batches hold texts of similar length.
4. Adapters and head are rounded and written, loaded as a scorer, and tested on corpora that were
   not trained on. `accuracy=results/scorers/sentiment-adapter.safetensors` scores with them.

It takes hours on a CPU. Every step follows from (seed, pass, step): the same command resumes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp import __version__
from lapa2_interp.bias.text_start import named_start
from lapa2_interp.errors import ScoringError
from lapa2_interp.files import read_checkpoint, temporary_folder, write_checkpoint
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.smollm2 import SMOLLM2
from lapa2_interp.progress import progress_bar
from lapa2_interp.scoring.adapter import (
    ADAPTER_ENDING,
    LONGEST_WINDOW,
    AdapterCard,
    AdapterNetwork,
    AdapterRecipe,
    AdapterScorer,
    batch_by_tokens,
    load_adapter_network,
    padded_rows,
    save_adapter,
)
from lapa2_interp.scoring.training import (
    ScorerData,
    describe_data,
    label_shares,
    measure_held_out,
    read_data,
)

ADAPTED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear maps of a layer that have adapters."""
SAVE_EVERY = 180.0
"""Seconds between checkpoints."""
BLOCK = 16
"""Approximate number of batches whose texts are sorted by length together."""
CUT_SHORT, LEAST_LEFT = 1 / 3, 4
"""Share of the texts shorter than their window that are cut, and the least number of tokens
left."""


@dataclass(frozen=True)
class WeightedTexts:
    """Token ids of one corpus, the share of each label in each text, and a text's weight."""

    texts: Sequence[np.ndarray]
    shares: np.ndarray
    weight: float


@dataclass(frozen=True)
class TrainingPass:
    """The windows of one pass with their shares and weights; batches are indices of windows."""

    windows: Sequence[np.ndarray]
    shares: np.ndarray
    weights: np.ndarray
    batches: Sequence[Sequence[int]]


def draw_window(ids: np.ndarray, shortest: int, rng: np.random.Generator) -> np.ndarray:
    """The part of a text that is used in a pass.

    A length is drawn, log-uniform from `shortest` to `LONGEST_WINDOW`. A longer text gives a window
    of this length, from its beginning (probability 1/2) or from anywhere. Another text is used
    whole, but one in three is cut after a token, at least 4 tokens from its beginning.
    """
    length = round(math.exp(rng.uniform(math.log(shortest), math.log(LONGEST_WINDOW))))
    if len(ids) > length:
        first = 0 if rng.random() < 0.5 else int(rng.integers(len(ids) - length + 1))
        return ids[first : first + length]
    if len(ids) > LEAST_LEFT and rng.random() < CUT_SHORT:
        return ids[: int(rng.integers(LEAST_LEFT, len(ids)))]
    return ids


def draw_texts(n: int, per_pass: int, number: int, seed: Sequence[int]) -> list[int]:
    """Indices of the texts of a pass: the next `per_pass` in an endless sequence of shuffles."""
    count = min(n, per_pass)
    chosen: list[int] = []
    for at in range(number * count, (number + 1) * count):
        cycle, position = divmod(at, n)
        if not chosen or position == 0:
            order = np.random.default_rng([*seed, cycle]).permutation(n)
        chosen.append(int(order[position]))
    return chosen


def make_pass(sources: Sequence[WeightedTexts], recipe: AdapterRecipe, number: int) -> TrainingPass:
    """The windows of a pass, in batches of similar length and random order."""
    windows, shares, weights = [], [], []
    rng = np.random.default_rng([recipe.seed, 1, number])
    for i, source in enumerate(sources):
        for text in draw_texts(len(source.texts), recipe.per_pass, number, (recipe.seed, 2, i)):
            windows.append(draw_window(source.texts[text], recipe.shortest, rng))
            shares.append(source.shares[text])
            weights.append(source.weight)
    order = rng.permutation(len(windows))
    mean = max(1.0, float(np.mean([len(window) for window in windows])))
    size = max(1, round(BLOCK * recipe.tokens_per_batch / mean))
    batches = []
    for first in range(0, len(order), size):
        block = sorted(order[first : first + size], key=lambda t: len(windows[t]))
        for batch in batch_by_tokens([len(windows[t]) for t in block], recipe.tokens_per_batch):
            batches.append([int(block[t]) for t in batch])
    mixed = [batches[t] for t in rng.permutation(len(batches))]
    return TrainingPass(windows, np.array(shares), np.array(weights), mixed)


def add_adapters(network: AdapterNetwork, recipe: AdapterRecipe) -> dict[str, Tensor]:
    """Add peft's adapters to a network's linear maps; the parameters that have gradients."""
    try:
        import peft
    except ImportError as error:
        raise ScoringError(
            f"training adapters needs the peft package ({error}): pip install lapa2-interp[train]"
        ) from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        peft.inject_adapter_in_model(
            peft.LoraConfig(
                r=recipe.rank,
                lora_alpha=recipe.alpha,
                target_modules=list(ADAPTED_LAYERS),
                layers_to_transform=list(range(recipe.first, recipe.layers)),
            ),
            network,
        )
    network.head.requires_grad_(True)
    return {
        name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad
    }


def loss_of(
    network: AdapterNetwork, now: TrainingPass, batch: Sequence[int], start: int, bf16: bool
) -> Tensor:
    """Weighted soft cross-entropy, over the texts of a mean batch."""
    device = network.head.weight.device
    ids, lengths = padded_rows([now.windows[t].tolist() for t in batch], start, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        logits = network(ids, lengths)
    shares, weights = (
        torch.tensor(tensor[list(batch)], dtype=torch.float32, device=device)
        for tensor in (now.shares, now.weights)
    )
    losses = -(shares * logits.float().log_softmax(1)).sum(1)
    return (weights * losses).sum() * len(now.batches) / float(now.weights.sum())


def train(
    network: AdapterNetwork,
    start: int,
    sources: Sequence[WeightedTexts],
    recipe: AdapterRecipe,
    checkpoint: Path,
    plan: Mapping[str, Any],
) -> tuple[dict[str, Tensor], int, float]:
    """Train to the end, from the checkpoint if there is one.

    Args:
        start: Id of the token that starts a text.
        plan: Everything that decides the result; a checkpoint of another plan is refused.

    Returns:
        Adapters and head by their names on disk, tokens read, and seconds.
    """
    network.base.set_attn_implementation("eager")  # the fastest for such short windows
    parameters = add_adapters(network, recipe)
    bf16 = recipe.dtype == "bfloat16"
    for parameter in network.base.parameters() if bf16 else ():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    low_rank = [parameter for name, parameter in parameters.items() if not name.startswith("head.")]
    groups = [
        {"params": low_rank, "top": recipe.lr},
        {"params": list(network.head.parameters()), "top": recipe.head_lr},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=recipe.weight_decay)
    done, tokens, seconds = 0, 0, 0.0
    # Go on from the checkpoint.
    if checkpoint.is_file():
        state = _read(checkpoint, plan, network.head.weight.device)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state["parameters"][name])
        optimizer.load_state_dict(state["optimizer"])
        done, tokens, seconds = state["step"], state["tokens"], state["seconds"]
    # Take the steps that are left, pass after pass.
    passes = [make_pass(sources, recipe, number) for number in range(recipe.passes)]
    steps = [(now, batch) for now in passes for batch in now.batches]
    warm, saved = max(1, round(recipe.warmup * len(steps))), perf_counter()
    with progress_bar(len(steps), f"adapter {plan['task']}", "step", initial=done) as bar:
        for step in range(done, len(steps)):
            began = perf_counter()
            now, batch = steps[step]
            rate = min((step + 1) / warm, (len(steps) - step) / max(1, len(steps) - warm))
            for group in optimizer.param_groups:
                group["lr"] = group["top"] * rate
            loss = loss_of(network, now, batch, start, bf16)
            if not loss.isfinite():
                raise ScoringError(
                    f"the loss is {loss.item()} at step {step}; train with another --seed, or with"
                    " --dtype float32"
                )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters.values(), recipe.clip)
            optimizer.step()
            tokens += sum(len(now.windows[t]) for t in batch)
            seconds += perf_counter() - began
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
            bar.update()
            if perf_counter() - saved > SAVE_EVERY or step + 1 == len(steps):
                state = {
                    "plan": dict(plan),
                    "parameters": {k: v.detach() for k, v in parameters.items()},
                }
                state |= {"optimizer": optimizer.state_dict(), "step": step + 1}
                write_checkpoint(checkpoint, state | {"tokens": tokens, "seconds": seconds})
                saved = perf_counter()
    return named_on_disk(parameters), tokens, seconds


def named_on_disk(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters and head by their names in the file."""
    ends = {".lora_A.default.weight": ".a", ".lora_B.default.weight": ".b", "": ""}
    tensors = {}
    for name, parameter in parameters.items():
        end = next(end for end in ends if name.endswith(end))
        tensors[name.removeprefix("base.").removesuffix(end) + ends[end]] = parameter.detach()
    return tensors


def _read(checkpoint: Path, plan: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The checkpoint of a training with this plan."""
    with suppress(ValueError, KeyError):
        state = read_checkpoint(checkpoint, device)
        if state["plan"] == plan:
            return state
    raise ScoringError(
        f"{checkpoint} is damaged, or an unfinished training with other settings; repeat its"
        " command, delete the file, or choose another --out"
    )


def train_adapter(
    task: str,
    labels: Sequence[str],
    data: ScorerData,
    folder: Path,
    recipe: AdapterRecipe,
    base: str = SMOLLM2,
    device: str | None = None,
) -> AdapterCard:
    """Train one adapter and write its weights and card."""
    file = folder / f"{task}{ADAPTER_ENDING}"
    if file.with_suffix(".json").exists():
        raise ScoringError(f"{file} is finished; choose another --out, or remove it to train again")
    if not data.corpora and not data.graded:
        raise ScoringError("there is no text to train on; give --data")
    network, tokenizer, weights = load_adapter_network(base, recipe.layers, len(labels), device)

    def tokenised(texts: Sequence[str]) -> list[np.ndarray]:
        rows = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
        return [np.array(row, dtype=np.int32) for row in rows]

    # Texts of all corpora, with their shares of the labels.
    sources = []
    for corpus, weight in data.corpora:
        texts = [text for label in labels for text in corpus.texts[label]]
        shares = np.repeat(np.eye(len(labels)), [len(corpus.texts[k]) for k in labels], axis=0)
        sources.append(WeightedTexts(tokenised(texts), shares, weight))
    for corpus, weight in data.graded:
        sources.append(WeightedTexts(tokenised(corpus.texts), label_shares(corpus, labels), weight))
    plan = {
        "task": task,
        "labels": list(labels),
        "base": f"{base} {weights}",
        "recipe": recipe.model_dump(mode="json"),
        "data": [[corpus.sha256, weight] for corpus, weight in (*data.corpora, *data.graded)],
    }
    checkpoint = folder / f"{task}-adapter.checkpoint"
    start = named_start(tokenizer)
    tensors, tokens, seconds = train(network, start, sources, recipe, checkpoint, plan)
    libraries = {
        package: importlib.metadata.version(package)
        for package in ("torch", "transformers", "peft")
    }
    facts: dict[str, Any] = {
        "labels": tuple(labels),
        "data": describe_data(data.corpora, data.graded),
        "examples": sum(len(source.texts) for source in sources),
        "versions": {"lapa2_interp": __version__, **libraries},
        "base": base,
        "base_weights": weights,
        "recipe": recipe,
        "tokens": tokens,
        "seconds": round(seconds, 1),
    }
    # Write the adapter, test it as a scorer, and write it with the results in its card.
    with temporary_folder(folder) as beside:
        save_adapter(tensors, beside, task, held_out=(), **facts)
        scorer = AdapterScorer(task, beside, device)
        reached = measure_held_out(scorer, data.tests, data.graded_tests)
    card = save_adapter(tensors, folder, task, held_out=reached, **facts)
    checkpoint.unlink()
    return card


def main() -> None:
    """Read the corpora, train, and print what the adapter reaches."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, help="a name of `lapa2 tasks`, or a task file")
    parser.add_argument("--data", action="append", default=[], help="as of `lapa2 scorers train`")
    parser.add_argument("--test", action="append", default=[], help="the same")
    parser.add_argument("--graded", action="append", default=[], help="the same")
    parser.add_argument("--passes", type=whole_number(), default=3, help="over the corpora")
    parser.add_argument("--per-pass", type=whole_number(), default=8000, help="texts of a corpus")
    parser.add_argument("--rank", type=whole_number(), default=8, help="of the adapters")
    parser.add_argument("--layers", type=whole_number(5), default=20, help="read, from below")
    parser.add_argument("--seed", type=whole_number(0), default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", help="cpu, cuda, cuda:1")
    parser.add_argument("--out", type=Path, required=True, help="folder of weights and card")
    options = parser.parse_args()
    task = load_task(options.task)
    labels = tuple(task.attributes)
    names = ("passes", "per_pass", "rank", "layers", "seed", "dtype")
    recipe = AdapterRecipe(**{name: getattr(options, name) for name in names})
    data = read_data(labels, options.data, options.test, options.graded, options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    card = train_adapter(task.name, labels, data, options.out, recipe, device=options.device)
    print(*card.data, options.out / f"{task.name}{ADAPTER_ENDING}", sep="\n")
    for row in card.held_out:
        print(f"    {row.value:.3f} {row.measure}, {row.data}, {row.length} words, {row.n}")


if __name__ == "__main__":
    # A batch system's SIGTERM ends it as Ctrl-C does, so that unfinished files are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
