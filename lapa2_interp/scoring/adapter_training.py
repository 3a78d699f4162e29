"""Train adapter scorers (`adapter`) with peft.

1. A pass draws at most `per_pass` texts of each corpus, another part of it in each pass. Each text
   gives one window (`draw_window`), since generated texts are short and end anywhere.
2. The loss is the soft cross-entropy against each text's shares of the labels, times the text's
   weight. It does not depend on the batch of a text.
3. AdamW, linear warm-up and decay, clipped gradients. Batches hold texts of similar length.
4. Adapters and head are rounded and written, loaded as a scorer, and tested on corpora that were
   not trained on.

Every step follows from (seed, pass, step), so a run that was killed and resumed gives the same
result as one that was not.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import ValidationError
from torch import Tensor, nn
from tqdm import tqdm

from lapa2_interp._util.errors import ScoringError, validation_message
from lapa2_interp._util.files import read_checkpoint, temporary_folder, write_checkpoint
from lapa2_interp._util.progress import format_duration, progress_bar
from lapa2_interp._util.version import __version__
from lapa2_interp.bias.layout import text_markers
from lapa2_interp.models.smollm2 import SMOLLM2
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
    GradedTexts,
    check_labels,
    describe_data,
    label_shares,
    measure_held_out,
    read_data,
)
from lapa2_interp.tasks.corpora import Corpus

ADAPTED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear maps of a layer that have adapters."""
SAVE_EVERY = 180.0
"""Seconds between checkpoints."""
BLOCK = 16
"""Approximate number of batches whose texts are sorted by length together."""
CUT_SHORT, LEAST_LEFT = 1 / 3, 4
"""Share of the texts shorter than their window that are cut, and the least number of tokens
left."""


# --- texts and passes


@dataclass(frozen=True)
class WeightedTexts:
    """The tokenised texts of one corpus.

    Attributes:
        texts: Token ids, without BOS.
        shares: Share of each label in each text, rows summing to 1.
        weight: Weight of each of its texts.
    """

    texts: Sequence[Int[np.ndarray, " _"]]
    shares: Float[np.ndarray, "text label"]
    weight: float


@dataclass(frozen=True)
class TrainingPass:
    """The windows of one pass, and their order.

    Attributes:
        batches: Indices of windows.
    """

    windows: Sequence[Int[np.ndarray, " _"]]
    shares: Float[np.ndarray, "window label"]
    weights: Float[np.ndarray, " window"]
    batches: Sequence[Sequence[int]]

    @property
    def tokens(self) -> int:
        """Tokens of the windows, BOS left out."""
        return sum(map(len, self.windows))


def draw_window(
    ids: Int[np.ndarray, " token"], shortest: int, rng: np.random.Generator
) -> Int[np.ndarray, " part"]:
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
        cycle, place = divmod(at, n)
        if not chosen or place == 0:
            order = np.random.default_rng([*seed, cycle]).permutation(n)
        chosen.append(int(order[place]))
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


# --- the training


class AdapterTraining:
    """A training: a network with peft's adapters, its optimiser, and its progress.

    Attributes:
        step, tokens, seconds: Steps done, with their tokens and time.
        plan: Everything that decides the result; a checkpoint of another plan is refused.
    """

    def __init__(
        self,
        network: AdapterNetwork,
        start: int,
        sources: Sequence[WeightedTexts],
        recipe: AdapterRecipe,
        checkpoint: Path,
        plan: dict[str, Any],
    ) -> None:
        self.network, self.start, self.sources, self.recipe = network, start, sources, recipe
        self.checkpoint, self.plan = checkpoint, plan
        self.device = network.head.weight.device
        network.base.set_attn_implementation("eager")  # the fastest for such short windows
        add_adapters(network, recipe)
        if recipe.dtype == "bfloat16":
            for each in network.base.parameters():
                if not each.requires_grad:
                    each.data = each.data.bfloat16()
        self.parameters = {
            name: each for name, each in network.named_parameters() if each.requires_grad
        }
        head = list(network.head.parameters())
        low_rank = [each for name, each in self.parameters.items() if not name.startswith("head.")]
        self.optimizer = torch.optim.AdamW(
            [{"params": low_rank, "top": recipe.lr}, {"params": head, "top": recipe.head_lr}],
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
        )
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    @cached_property
    def sizes(self) -> list[tuple[int, int]]:
        """Steps and tokens of every pass."""
        passes = [make_pass(self.sources, self.recipe, i) for i in range(self.recipe.passes)]
        return [(len(each.batches), each.tokens) for each in passes]

    @property
    def total(self) -> int:
        """Steps of all passes."""
        return sum(steps for steps, _ in self.sizes)

    def run(self, bar: tqdm) -> None:
        """Train to the end; the bar counts tokens."""
        saved_at = perf_counter()
        first = 0
        for number, (steps, _) in enumerate(self.sizes):
            if self.step < first + steps:
                now = make_pass(self.sources, self.recipe, number)
                for batch in now.batches[self.step - first :]:
                    began = perf_counter()
                    loss, read = self._train_step(now, batch)
                    self.seconds += perf_counter() - began
                    bar.update(read)
                    bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                    if perf_counter() - saved_at > SAVE_EVERY or self.step == self.total:
                        self.save()
                        saved_at = perf_counter()
            first += steps

    def rate(self) -> float:
        """Tokens per second, from forward and backward passes of a batch that change nothing."""
        now = make_pass(self.sources, self.recipe, 0)
        batch = sorted(now.batches, key=lambda each: len(now.windows[each[0]]))[
            len(now.batches) // 2
        ]
        seconds = math.inf
        for _ in range(2):  # the first one also prepares
            began = perf_counter()
            self.loss(now, batch).backward()
            self.optimizer.zero_grad()
            seconds = perf_counter() - began
        return sum(len(now.windows[t]) for t in batch) / seconds

    def loss(self, now: TrainingPass, batch: Sequence[int]) -> Float[Tensor, ""]:
        """Weighted soft cross-entropy, over the texts of a mean batch."""
        ids, lengths = padded_rows(
            [now.windows[t].tolist() for t in batch], self.start, self.device
        )
        bf16 = self.recipe.dtype == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            logits = self.network(ids, lengths)
        shares, weights = (
            torch.tensor(each[list(batch)], dtype=torch.float32, device=self.device)
            for each in (now.shares, now.weights)
        )
        each = -(shares * logits.float().log_softmax(1)).sum(1)
        return (weights * each).sum() * len(now.batches) / float(now.weights.sum())

    def _train_step(self, now: TrainingPass, batch: Sequence[int]) -> tuple[float, int]:
        """Take a step; returns its loss, averaged by the weights of its texts, and its tokens."""
        warm = max(1, round(self.recipe.warmup * self.total))
        rate = min((self.step + 1) / warm, (self.total - self.step) / max(1, self.total - warm))
        for group in self.optimizer.param_groups:
            group["lr"] = group["top"] * rate
        loss = self.loss(now, batch)
        if not loss.isfinite():
            raise ScoringError(
                f"the loss is {loss.item()} at step {self.step}; train with another --seed, or with"
                " --dtype float32"
            )
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters.values(), self.recipe.clip)
        self.optimizer.step()
        read = sum(len(now.windows[t]) for t in batch)
        self.step += 1
        self.tokens += read
        share = float(now.weights[list(batch)].sum() / now.weights.sum()) * len(now.batches)
        return loss.item() / share, read

    def save(self) -> None:
        """Write the checkpoint."""
        state = {
            "plan": self.plan,
            "parameters": {name: each.detach() for name, each in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        write_checkpoint(self.checkpoint, state)

    def resume(self) -> None:
        """Resume from the checkpoint, if there is one.

        Raises:
            ScoringError: The checkpoint is damaged, or of another plan.
        """
        if not self.checkpoint.is_file():
            return
        try:
            state = read_checkpoint(self.checkpoint, self.device)
            plan = state["plan"]
        except (ValueError, KeyError) as error:
            raise ScoringError(
                f"{self.checkpoint} is damaged ({' '.join(str(error).split())[:80]}); delete it to"
                " begin again"
            ) from error
        if plan != self.plan:
            changed = [name for name in self.plan if plan.get(name) != self.plan[name]]
            raise ScoringError(
                f"{self.checkpoint} is an unfinished training with another {', '.join(changed)};"
                " repeat that command to resume it, delete the file, or choose another --out"
            )
        with torch.no_grad():
            for name, each in self.parameters.items():
                each.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

    def tensors(self) -> dict[str, Tensor]:
        """Adapters and head by their names on disk."""
        ends = {".lora_A.default.weight": ".a", ".lora_B.default.weight": ".b", "": ""}
        found = {}
        for name, each in self.parameters.items():
            end = next(end for end in ends if name.endswith(end))
            found[name.removeprefix("base.").removesuffix(end) + ends[end]] = each.detach()
        return found


def add_adapters(network: AdapterNetwork, recipe: AdapterRecipe) -> None:
    """Add peft's adapters to a network's linear maps. Only adapters and head have gradients.

    Raises:
        ScoringError: peft is missing.
    """
    peft = _import_peft()
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


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ScoringError(
            f"training adapters needs the peft package ({error}): pip install lapa2-interp[train]"
        ) from None
    return peft


# --- from corpora to a card


def train_adapter(
    task: str,
    labels: Sequence[str],
    corpora: Sequence[tuple[Corpus, float]],
    tests: Sequence[Corpus],
    folder: Path,
    recipe: AdapterRecipe,
    *,
    graded: Sequence[tuple[GradedTexts, float]] = (),
    graded_tests: Sequence[GradedTexts] = (),
    base: str = SMOLLM2,
    device: str | None = None,
) -> AdapterCard:
    """Train one adapter and write its weights and card; resume a killed run in the folder.

    Args:
        labels: Labels in the order of the probabilities; graded scores are those of `TOXIC_LABEL`.
        corpora: Corpora, each with the weight of its texts.
        tests: Corpora that are never trained on, for the card.
        graded, graded_tests: Texts with toxicity scores.
        base: The model whose layers are used.
        device: cpu, cuda, cuda:1; by default CUDA if there is one.

    Raises:
        ScoringError: There is no text, peft is missing, the folder holds a finished adapter or
            another training, or the loss is not a number.
    """
    file = folder / f"{task}{ADAPTER_ENDING}"
    checkpoint = folder / f"{task}-adapter.checkpoint"
    if file.with_suffix(".json").exists():
        checkpoint.unlink(missing_ok=True)  # of a training that was killed at its end
        raise ScoringError(f"{file} is finished; choose another --out, or remove it to train again")
    check_labels(labels, bool(graded))
    if not corpora and not graded:
        raise ScoringError("there is no text to train on; give --data")
    network, tokenizer, weights = load_adapter_network(base, recipe.layers, len(labels), device)

    def tokenised(texts: Sequence[str]) -> list[Int[np.ndarray, " _"]]:
        rows = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
        return [np.array(row, dtype=np.int32) for row in rows]

    # Texts of all corpora, with their shares of the labels.
    sources = []
    for corpus, weight in corpora:
        texts = [text for label in labels for text in corpus.texts[label]]
        shares = np.repeat(np.eye(len(labels)), [len(corpus.texts[k]) for k in labels], axis=0)
        sources.append(WeightedTexts(tokenised(texts), shares, weight))
    for each, weight in graded:
        sources.append(WeightedTexts(tokenised(each.texts), label_shares(each, labels), weight))
    plan = {
        "task": task,
        "labels": list(labels),
        "base": f"{base} {weights}",
        "recipe": recipe.model_dump(mode="json"),
        "data": [[corpus.sha256, weight] for corpus, weight in corpora]
        + [[each.sha256, weight] for each, weight in graded],
    }
    start = text_markers(tokenizer).start
    training = AdapterTraining(network, start, sources, recipe, checkpoint, plan)
    training.resume()
    _train_to_end(training, task)
    facts: dict[str, Any] = {
        "labels": tuple(labels),
        "data": describe_data(corpora, graded),
        "examples": sum(len(source.texts) for source in sources),
        "versions": {
            "lapa2_interp": __version__,
            **{
                name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")
            },
        },
        "base": base,
        "base_weights": weights,
        "recipe": recipe,
        "tokens": training.tokens,
        "seconds": round(training.seconds, 1),
    }
    # Write the adapter, test it as a scorer, and write it with the results in its card.
    tensors = training.tensors()
    with temporary_folder(folder) as beside:
        save_adapter(tensors, beside, task, held_out=(), **facts)
        scorer = AdapterScorer(task, beside, device)
        reached = measure_held_out(scorer, tests, graded_tests)
    card = save_adapter(tensors, folder, task, held_out=reached, **facts)
    checkpoint.unlink()
    return card


def _train_to_end(training: AdapterTraining, task: str) -> None:
    tokens = sum(tokens for _, tokens in training.sizes)
    if training.step < training.total:
        rate = training.rate()
        passes = "1 pass" if training.recipe.passes == 1 else f"{training.recipe.passes} passes"
        windows = sum(min(len(s.texts), training.recipe.per_pass) for s in training.sources)
        print(
            f"adapter {task}: {passes} of {windows} windows,"
            f" {training.total} steps, {tokens} tokens, {training.tokens} of them done; about"
            f" {format_duration((tokens - training.tokens) / rate)} at {rate:.0f} tokens/s; kill"
            " and repeat the command to go on later",
            file=sys.stderr,
        )
    with progress_bar(tokens, f"adapter {task}", initial=training.tokens) as bar:
        training.run(bar)


def make_adapter_files(
    task: str,
    labels: Sequence[str],
    data: Sequence[str],
    test: Sequence[str],
    graded: Sequence[str],
    out: Path,
    settings: Mapping[str, Any],
) -> AdapterCard:
    """Read corpora by name, and train an adapter with `train_adapter`.

    Args:
        labels: The task's attributes.
        data, test, graded: As for `training.read_data`.
        out: Folder of the weights and the card.
        settings: Fields of `AdapterRecipe` other than the defaults.

    Raises:
        ScoringError: A value is out of range; or as `train_adapter`.
        DataError: A corpus cannot be read.
    """
    try:
        recipe = AdapterRecipe.model_validate(dict(settings))
    except ValidationError as error:
        raise ScoringError(validation_message(error)) from error
    _import_peft()
    found = read_data(labels, data, test, graded, out)
    return train_adapter(
        task,
        labels,
        found.corpora,
        found.tests,
        out,
        recipe,
        graded=found.graded,
        graded_tests=found.graded_tests,
    )
