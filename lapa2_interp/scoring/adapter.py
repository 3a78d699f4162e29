"""Scorers with a small language model, SmolLM2's lower layers.

The layers have low-rank adapters, and a linear head.

1. A text's tokens pass BOS first, then the lower layers of SmolLM2. Every linear layer W of these
   has an adapter: it computes (W + scale B A) x, with B A of low rank.
2. The states after the last of these layers are scaled to root mean square 1. The head sees their
   mean over the text's tokens, and the last token's.
3. A text of more than 128 tokens is split into the fewest windows of nearly equal length, and their
   logits are averaged, weighted by their lengths.

The attention is causal, so texts of which one begins with the other need one forward pass: a text
cut at five lengths costs as much as the longest.

Only adapters and head are on disk. Loading adds B A to the weights, so a forward pass costs no more
than without adapters. `analyses/scorers/train_adapters.py` trains them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from scipy.special import softmax
from torch import Tensor, nn

from lapa2_interp.bias.text_start import named_start
from lapa2_interp.errors import ScoringError, parameter
from lapa2_interp.files import atomic_write
from lapa2_interp.models.configuration import short_context
from lapa2_interp.models.facts import check_not_quantised
from lapa2_interp.models.load import load_transformers, move_to_device
from lapa2_interp.models.prepacked import prepacked
from lapa2_interp.models.smollm2 import SMOLLM2
from lapa2_interp.scoring.task_scorer import (
    SHIPPED_WEIGHTS,
    ScorerCard,
    TaskScorer,
    load_card,
    save_card,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ADAPTER_ENDING = "-adapter.safetensors"
"""End of the name of an adapter's file, after the task."""
LONGEST_WINDOW = 128
"""Tokens of the longest window, BOS left out."""
TOKENS_AT_ONCE = 4096
"""Padded tokens of a forward pass."""


class AdapterRecipe(BaseModel):
    """The settings of a training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(20, ge=1)
    """Number of layers, counted from the first."""
    first: int = Field(4, ge=0)
    """The lowest layer with adapters; layers below it have no gradients."""
    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    """The scale of B A is alpha / rank."""
    passes: int = Field(3, ge=1)
    per_pass: int = Field(8000, ge=1)
    """Texts of each corpus in a pass, at most."""
    shortest: int = Field(8, ge=1)
    """Tokens of the shortest drawn window; the longest has `LONGEST_WINDOW`."""
    tokens_per_batch: int = Field(1024, ge=LONGEST_WINDOW)
    """Padded tokens of a batch, at most."""
    lr: float = Field(2e-4, gt=0)
    """Highest learning rate of the adapters."""
    head_lr: float = Field(1e-3, gt=0)
    """Highest learning rate of the head."""
    weight_decay: float = Field(0.01, ge=0)
    warmup: float = Field(0.05, ge=0, lt=1)
    """Share of the steps in which the learning rate rises; afterwards it falls."""
    clip: float = Field(1.0, gt=0)
    seed: int = Field(0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the products in training; scores are computed in float32."""

    @model_validator(mode="after")
    def _check(self) -> AdapterRecipe:
        if self.first >= self.layers:
            raise ValueError(
                f"first must be below layers, {self.layers}, so that a layer has adapters; found"
                f" {self.first}"
            )
        if self.shortest > LONGEST_WINDOW:
            raise ValueError(f"shortest must be at most {LONGEST_WINDOW}, found {self.shortest}")
        return self


class AdapterCard(ScorerCard):
    """The card of an adapter scorer."""

    base: str
    """The model whose layers are used."""
    base_weights: str
    """The source of its weights."""
    recipe: AdapterRecipe
    tokens: int
    """Tokens of the windows it was trained on, repeated ones counted again."""
    seconds: float
    """Time of the training."""


class AdapterNetwork(nn.Module):
    """The lower layers of a language model, and a head on [mean | last] of their states.

    Args:
        network: A transformers causal model with Llama's layout; the network is changed in place.
        layers: Layers to keep.
        labels: Logits per text.

    Raises:
        ScoringError: The network has fewer layers, another layout, or changes its rotary factors
            within a window.
    """

    def __init__(self, network: Any, layers: int, labels: int) -> None:
        super().__init__()
        base = network.base_model
        if not hasattr(base, "layers") or not hasattr(base, "norm"):
            raise ScoringError(
                f"adapters need a model of Llama's make, such as {SMOLLM2}; found"
                f" {type(network).__name__}"
            )
        if len(base.layers) < layers:
            raise ScoringError(
                f"{parameter('layers')} must be at most {len(base.layers)}, the model's; found"
                f" {layers}"
            )
        if (short := short_context(base.config) or LONGEST_WINDOW + 1) <= LONGEST_WINDOW:
            raise ScoringError(
                f"adapters read {LONGEST_WINDOW} tokens after BOS in one pass, and beyond {short}"
                f" this model has other rotary factors (longrope); give another, such as {SMOLLM2}"
            )
        network.set_attn_implementation("sdpa")
        base.layers = base.layers[:layers]
        base.norm = nn.Identity()
        self.base = base
        self.head = nn.Linear(2 * base.config.hidden_size, labels)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        ids: Int[Tensor, "row slot"],
        lengths: Int[Tensor, " text"],
        rows: Int[Tensor, " text"] | None = None,
    ) -> Float[Tensor, "text label"]:
        """Logits of texts.

        Args:
            ids: BOS, a text, and padding if any. The attention is causal, so that no token sees the
                padding after it.
            lengths: Tokens of each text, BOS left out; at least 1.
            rows: The row whose beginning each text is; by default row i is text i.
        """
        states = self.base(input_ids=ids, use_cache=False).last_hidden_state.float()
        states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6)
        if rows is None:
            rows = torch.arange(len(ids), device=ids.device)
        slots = torch.arange(ids.shape[1], device=ids.device)
        own = ((slots > 0) & (slots <= lengths[:, None])).to(states)
        mean = torch.bmm(own[:, None], states[rows])[:, 0] / lengths[:, None]
        return self.head(torch.cat([mean, states[rows, lengths]], dim=1))


def load_adapter_network(
    base: str, layers: int, labels: int, device: str | None = None
) -> tuple[AdapterNetwork, PreTrainedTokenizerBase, str]:
    """A network with an empty head, its tokenizer, and the source of the base's weights."""
    base_network, tokenizer, weights = load_transformers(base)
    check_not_quantised(base_network, "adapters are added to")
    network = AdapterNetwork(base_network, layers, labels).requires_grad_(False)
    move_to_device(network, device)
    return network.eval(), tokenizer, weights


def padded_rows(
    texts: Sequence[Sequence[int]], start: int, device: Any
) -> tuple[Int[Tensor, "text slot"], Int[Tensor, " text"]]:
    """BOS and token ids, right-padded with BOS, and their lengths, for an `AdapterNetwork`."""
    width = max(map(len, texts))
    rows = [[start, *text, *[start] * (width - len(text))] for text in texts]
    return torch.tensor(rows, device=device), torch.tensor([len(t) for t in texts], device=device)


def split_windows(ids: Sequence[int]) -> list[Sequence[int]]:
    """Token ids in the fewest windows of at most `LONGEST_WINDOW`, whose lengths differ by at most
    1."""
    count = -(-len(ids) // LONGEST_WINDOW)
    edges = [len(ids) * i // count for i in range(count + 1)]
    return [ids[first:stop] for first, stop in pairwise(edges)]


def group_by_beginning(windows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of windows in groups: each window of a group is the beginning of the next one."""
    groups: list[list[int]] = []
    for i in sorted(range(len(windows)), key=lambda i: tuple(windows[i])):
        before = windows[groups[-1][-1]] if groups else None
        if before is not None and windows[i][: len(before)] == before:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def batch_by_tokens(
    lengths: Sequence[int] | Int[np.ndarray, " text"], budget: int
) -> Iterator[list[int]]:
    """Indices of texts, in order, in batches of at most `budget` padded tokens (one text at
    least)."""
    batch: list[int] = []
    longest = 0
    for i, length in enumerate(lengths):
        if batch and max(longest, length) * (len(batch) + 1) > budget:
            yield batch
            batch, longest = [], 0
        batch.append(i)
        longest = max(longest, int(length))
    if batch:
        yield batch


@dataclass(frozen=True)
class AdapterClassifier:
    """A classifier from a network whose adapters are part of its weights."""

    network: AdapterNetwork
    tokenizer: PreTrainedTokenizerBase

    @torch.no_grad()
    def logits(self, texts: Sequence[str]) -> Float[np.ndarray, "text label"]:
        """Logits of texts, none blank; those of a long text are a mean over its windows."""
        # Split texts into windows.
        windows, owners = [], []
        for owner, ids in enumerate(
            self.tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
        ):
            for window in split_windows(ids):
                windows.append(window)
                owners.append(owner)
        # Logits of the windows, with one row for windows of the same beginning.
        start, device = named_start(self.tokenizer), self.network.head.weight.device
        sums = np.zeros((len(texts), self.network.head.out_features))
        tokens = np.zeros(len(texts))
        groups = sorted(group_by_beginning(windows), key=lambda group: len(windows[group[-1]]))
        with prepacked(self.network.base):
            for batch in batch_by_tokens(
                [len(windows[group[-1]]) for group in groups], TOKENS_AT_ONCE
            ):
                chosen = [groups[i] for i in batch]
                ids, _ = padded_rows([windows[group[-1]] for group in chosen], start, device)
                read = [(i, row) for row, group in enumerate(chosen) for i in group]
                lengths, rows = (
                    torch.tensor(column, device=device)
                    for column in zip(*((len(windows[i]), row) for i, row in read), strict=True)
                )
                logits = self.network(ids, lengths, rows).double().cpu().numpy()
                for (i, _), row in zip(read, logits, strict=True):
                    sums[owners[i]] += len(windows[i]) * row
                    tokens[owners[i]] += len(windows[i])
        return sums / tokens[:, None]

    def probabilities(self, texts: Sequence[str]) -> Float[np.ndarray, "text label"]:
        """P(label | text), rows summing to 1; at least one text, none blank."""
        return softmax(self.logits(texts), axis=1)


def save_adapter(
    tensors: Mapping[str, Tensor], folder: Path, task: str, **facts: Any
) -> AdapterCard:
    """Write `<task>-adapter.safetensors` and its card.

    Args:
        tensors: Per linear layer its A and B, such as "layers.4.mlp.up_proj.a" [rank, in] and
            "layers.4.mlp.up_proj.b" [out, rank], and "head.weight" and "head.bias". The matrices of
            the adapters are rounded to float16.
        facts: The card's other fields.
    """
    stored = {
        name: value.detach()
        .cpu()
        .to(torch.float32 if name.startswith("head.") else torch.float16)
        .contiguous()
        for name, value in tensors.items()
    }
    file = folder / f"{task}{ADAPTER_ENDING}"
    with atomic_write(file) as fresh:
        save_file(stored, fresh)
    return save_card(AdapterCard, file, task=task, **facts)


def adapter_card(task: str, folder: Path = SHIPPED_WEIGHTS) -> AdapterCard:
    """The card of a task's adapter.

    Raises:
        ScoringError: The task has no adapter, or its files are damaged.
    """
    return load_card(AdapterCard, "adapter", task, folder, ADAPTER_ENDING)


def load_adapter(
    task: str, folder: Path = SHIPPED_WEIGHTS, device: str | None = None
) -> tuple[AdapterClassifier, AdapterCard]:
    """A task's adapter, added to the weights of its base, and its card.

    Args:
        device: cpu, cuda, cuda:1; by default CUDA if there is one.

    Raises:
        ScoringError: The task has no adapter, its files are damaged, or the base has other weights
            than in training.
    """
    card = adapter_card(task, folder)
    file, recipe = folder / f"{task}{ADAPTER_ENDING}", card.recipe
    network, tokenizer, weights = load_adapter_network(
        card.base, recipe.layers, len(card.labels), device
    )
    if weights != card.base_weights:
        raise ScoringError(
            f"{file} belongs to {card.base} with {card.base_weights}; found {weights}: train it"
            " again: `lapa2 scorers train`"
        )
    own = dict(network.named_parameters())
    try:
        stored = load_file(file)
        network.head.load_state_dict(
            {name: stored.pop(f"head.{name}") for name in ("weight", "bias")}
        )
        with torch.no_grad():
            for name in [key.removesuffix(".a") for key in stored if key.endswith(".a")]:
                weight = own[f"base.{name}.weight"]
                a, b = (stored.pop(f"{name}.{part}").to(weight) for part in "ab")
                weight.add_(b @ a, alpha=recipe.alpha / recipe.rank)
    except (SafetensorError, KeyError, RuntimeError, OSError) as error:
        raise ScoringError(
            f"{file} does not fit {card.base} ({' '.join(str(error).split())[:120]}); train it"
            " again: `lapa2 scorers train`"
        ) from error
    if stored:
        raise ScoringError(
            f"{file} has a tensor {next(iter(stored))!r} that belongs to no layer; train it again:"
            " `lapa2 scorers train`"
        )
    return AdapterClassifier(network, tokenizer), card


@lru_cache(maxsize=1)
def _cached_adapter(task: str, folder: Path, _sha256: str, device: str | None) -> AdapterClassifier:
    """The adapter from a cache, since accuracy and masked use the same."""
    return load_adapter(task, folder, device)[0]


class AdapterScorer(TaskScorer):
    """The probabilities that an adapter gives to the labels of its task.

    Args:
        task: sentiment, topic or detox.
        folder: Folder of its weights.
        device: As `load_adapter` takes it.

    Raises:
        ScoringError: The task has no adapter, or its files are damaged; when the first text is
            scored, as `load_adapter`.
    """

    batch_size = 256
    by_length = False

    def __init__(
        self, task: str, folder: Path = SHIPPED_WEIGHTS, device: str | None = None
    ) -> None:
        card = adapter_card(task, folder)
        super().__init__(
            card, lambda: _cached_adapter(task, folder, card.sha256, device), "adapter"
        )
