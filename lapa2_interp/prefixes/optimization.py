"""Optimise soft prefixes of a frozen model: loss, steps, early stopping and checkpoints.

Every step follows from (seed, step), so a run that was killed and resumed gives the same result as
one that was not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from lapa2_interp.errors import PrefixError, parameter
from lapa2_interp.files import read_checkpoint, write_checkpoint
from lapa2_interp.prefixes.likelihood import TextRows, text_nll
from lapa2_interp.prefixes.parameters import PrefixParameters
from lapa2_interp.prefixes.recipes import TrainingRecipe
from lapa2_interp.prefixes.soft_prefix import PrefixShape

TokenLists = Sequence[Sequence[int]]
KEPT = ("best", "losses", "step", "tokens", "seconds")
"""Attributes of a training in its checkpoint, beside those of the parameters and the optimizer."""


def contrastive_loss(
    nll: Float[Tensor, "prefix text"],
    tokens: Int[Tensor, " text"],
    label: Int[Tensor, " text"],
    *,
    gen_weight: float,
    sum_loss: bool,
    logit_scale: float = 1.0,
    wrong: Int[Tensor, " text"] | None = None,
) -> Float[Tensor, ""]:
    """(1 - w) L_disc + w L_gen (methods section 3.3).

    Args:
        nll: Summed over each text's tokens, under every prefix.
        tokens: Tokens of each text.
        label: Number of each text's own prefix.
        gen_weight: w, in [0, 1].
        sum_loss: L_disc compares whole texts, not means per token; L_gen is always per token.
        logit_scale: Scale of the softmax's logits.
        wrong: The only competitor of each text; by default all prefixes compete.
    """
    mean = nll / tokens
    logits = -logit_scale * (nll if sum_loss else mean)
    if wrong is not None:
        logits = torch.stack([logits.gather(0, which[None])[0] for which in (label, wrong)])
        chosen = torch.zeros_like(label)
    else:
        chosen = label
    disc = -logits.log_softmax(dim=0).gather(0, chosen[None]).mean()
    return (1 - gen_weight) * disc + gen_weight * mean.gather(0, label[None]).mean()


@dataclass(frozen=True)
class TrainingTexts:
    """Tokenised texts, each with the number of its attribute."""

    texts: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]

    @classmethod
    def of(cls, by_attribute: Sequence[TokenLists]) -> TrainingTexts:
        return cls(
            tuple(tuple(text) for texts in by_attribute for text in texts),
            tuple(label for label, texts in enumerate(by_attribute) for _ in texts),
        )

    def batches(self, size: int, seed: Sequence[int]) -> list[list[int]]:
        """A shuffled pass over all texts, in batches of similar length."""
        rng = np.random.default_rng(list(seed))
        order = rng.permutation(len(self.texts))
        blocks = [
            sorted(order[i : i + 16 * size], key=lambda t: len(self.texts[t]))
            for i in range(0, len(order), 16 * size)
        ]
        batches = [
            [int(t) for t in block[i : i + size]]
            for block in blocks
            for i in range(0, len(block), size)
        ]
        return [batches[i] for i in rng.permutation(len(batches))]


@dataclass
class PrefixTraining:
    """The training of one prefix (mle) or of all prefixes of a task together (contrastive). The
    axis `prefix` has the attributes that are trained here.

    Attributes:
        start: Token ids before every text: BOS.
        checkpoint: A file that is written at every held-out loss, and resumed from.
        first: Keys and values to begin with; None draws them.
    """

    network: Any
    start: tuple[int, ...]
    shape: PrefixShape
    recipe: TrainingRecipe
    attributes: tuple[str, ...]
    train: TrainingTexts
    held_out: TrainingTexts
    checkpoint: Path
    first: Float[Tensor, "two prefix layer kv_head slot d_head"] | None = None

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            self.parameters = PrefixParameters(len(self.attributes), self.shape, self.recipe)
        self.device = next(self.network.parameters()).device
        self.parameters.to(self.device)
        decayed = [p for name, p in self.parameters.named_parameters() if not name.endswith("bias")]
        not_decayed = [p for name, p in self.parameters.named_parameters() if name.endswith("bias")]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self.recipe.weight_decay},
                {"params": not_decayed, "weight_decay": 0.0},
            ],
            lr=self.recipe.lr,
        )
        self.per_epoch = -(-len(self.train.texts) // self.recipe.batch)
        self.total = self.per_epoch * self.recipe.epochs
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.losses: dict[int, float] = {}
        self.best = self.folded()
        if self.first is not None:
            self.begin(self.first)

    def begin(self, both: Float[Tensor, "two prefix layer kv_head slot d_head"]) -> None:
        """Begin with these keys and values (parameterisation direct)."""
        with torch.no_grad():
            self.parameters.both.copy_(both.transpose(0, 1))
        self.best = self.folded()

    def folded(self) -> Float[Tensor, "two prefix layer kv_head slot d_head"]:
        """The present keys and values, without gradients."""
        with torch.no_grad():
            return self.parameters().detach().clone()

    def loss(
        self,
        both: Float[Tensor, "two prefix layer kv_head slot d_head"],
        examples: TrainingTexts,
        chosen: Sequence[int],
        step: int,
    ) -> tuple[Float[Tensor, ""], int]:
        """The objective on a batch, and the number of tokens in its forward pass."""
        texts = [examples.texts[i] for i in chosen]
        label = torch.tensor([examples.labels[i] for i in chosen], device=self.device)
        contrastive = self.recipe.objective == "contrastive"
        # The competitor of each text, where each has one.
        wrong = None
        if contrastive and self.recipe.negatives == "one":
            draw = np.random.default_rng([self.recipe.seed, step, 1]).integers(
                1, len(self.attributes), len(chosen)
            )
            wrong = (label + torch.from_numpy(draw).to(self.device)) % len(self.attributes)
        prefixes = list(range(len(self.attributes))) if contrastive else [0]
        # The NLL of every text after every prefix. Rows: prefix x text.
        rows = TextRows.of(texts * len(prefixes), self.start, self.device)
        spread = both.to(self.network.dtype)[:, prefixes].repeat_interleave(len(texts), dim=1)
        nll = text_nll(self.network, rows, spread[0], spread[1], self.recipe.shifted).sum(1)
        tokens = rows.targets.sum(1)[: len(texts)]
        n_read = int(tokens.sum()) * len(prefixes)
        if not contrastive:
            return nll.sum() / tokens.sum(), n_read
        loss = contrastive_loss(
            nll.view(len(prefixes), -1),
            tokens,
            label,
            gen_weight=self.recipe.gen_weight,
            sum_loss=self.recipe.sum_loss,
            logit_scale=self.recipe.logit_scale,
            wrong=wrong,
        )
        return loss, n_read

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The objective on the held-out texts: the mean over batches, weighted by their size."""
        both, size = self.folded(), 2 * self.recipe.batch
        order = sorted(range(len(self.held_out.texts)), key=lambda t: len(self.held_out.texts[t]))
        parts = [order[i : i + size] for i in range(0, len(order), size)]
        losses = [self.loss(both, self.held_out, part, step) for step, part in enumerate(parts)]
        weight = [
            n if self.recipe.objective == "mle" else len(part)
            for (_, n), part in zip(losses, parts, strict=True)
        ]
        return float(np.average([float(loss) for loss, _ in losses], weights=weight))

    def run(self, bar: tqdm) -> None:
        """Train to the end; resume from the checkpoint if there is one."""
        self._resume()
        bar.update(self.step)
        if not self.losses:
            self._check()
        while self.step < self.total and not self._is_out_of_patience():
            began = perf_counter()
            self._train_step()
            self.seconds += perf_counter() - began
            bar.update(1)
            if self.step % self.recipe.check_every == 0 or self.step == self.total:
                self._check()
                bar.set_postfix_str(
                    f"held-out {self.losses[self.step]:.4f}, best {min(self.losses.values()):.4f}"
                )

    def _train_step(self) -> None:
        epoch, within = divmod(self.step, self.per_epoch)
        if within == 0 or not hasattr(self, "order"):
            self.order = self.train.batches(self.recipe.batch, (self.recipe.seed, epoch))
        warm = max(1, round(self.recipe.warmup * self.total))
        factor = min((self.step + 1) / warm, (self.total - self.step) / max(1, self.total - warm))
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * factor
        with _dropout(self.network, self.recipe.dropout, self.recipe.seed + self.step):
            loss, n_read = self.loss(self.parameters(), self.train, self.order[within], self.step)
        if not loss.isfinite():
            raise PrefixError(
                f"the loss of {', '.join(self.attributes)} is {loss.item()} at step {self.step};"
                f" lower lr ({parameter('lr', '...', 'set')})"
            )
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.step += 1
        self.tokens += n_read

    def _is_out_of_patience(self) -> bool:
        if self.recipe.patience is None or not self.losses:
            return False
        best = min(self.losses, key=lambda step: self.losses[step])
        return sum(step > best for step in self.losses) >= self.recipe.patience

    @property
    def kept_step(self) -> int:
        """The latest step with the lowest held-out loss; without early stopping, the last step."""
        if self.recipe.patience is None:
            return max(self.losses)
        return min(reversed(self.losses), key=lambda step: self.losses[step])

    def _check(self) -> None:
        self.losses[self.step] = self.held_out_loss()
        if self.kept_step == self.step:
            self.best = self.folded()
        self._save()

    def _save(self) -> None:
        state = {name: getattr(self, name).state_dict() for name in ("parameters", "optimizer")}
        write_checkpoint(self.checkpoint, state | {name: getattr(self, name) for name in KEPT})

    def _resume(self) -> None:
        if not self.checkpoint.is_file():
            return
        try:
            state = read_checkpoint(self.checkpoint, self.device)
            for name in ("parameters", "optimizer"):
                getattr(self, name).load_state_dict(state[name])
            for name in KEPT:
                setattr(self, name, state[name])
        except (ValueError, KeyError, RuntimeError, TypeError) as error:
            raise PrefixError(
                f"{self.checkpoint} is damaged ({' '.join(str(error).split())[:80]}); delete it to"
                " begin again"
            ) from error


@contextmanager
def _dropout(network: Any, share: float, seed: int) -> Iterator[None]:
    """Dropout with this probability in a frozen network, drawn from the seed."""
    if not share:
        yield
        return
    with torch.random.fork_rng(devices=[] if network.device.type == "cpu" else [network.device]):
        torch.manual_seed(seed)
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = share
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = share
        network.train()
        try:
            yield
        finally:
            network.eval()
