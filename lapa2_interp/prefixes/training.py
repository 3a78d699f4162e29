"""Train soft prefixes for a frozen model.

1. Texts of each attribute, in pieces of at most `max_tokens`, behind [slots] BOS; every token of
   the text is scored.
2. "mle" (Air-Decoding's PC-LMs): per attribute on its own, the mean token NLL of its texts.
   "contrastive" (Con-Prefix): the attributes together. With s_c the NLL of a text under prefix c,
   per token or summed,

       L = (1 - w) * mean_b -log softmax_c(-scale s_c[b])[y_b] + w * mean_b s_{y_b}[b] / tokens

3. AdamW, linear warm-up and decay, clipped gradients; the held-out loss decides when to stop and
   which step to keep.
4. The parameterisation is folded into plain keys and values, and saved with a card.

Everything a step does follows from (seed, step), so a run that was killed and resumed gives the
same result as one that was not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from lapa2_interp._util.errors import DataError, PrefixError
from lapa2_interp._util.files import (
    check_name,
    held,
    no_link,
    parse_json,
    read_checkpoint,
    read_text,
    remove_folder,
    write_checkpoint,
    write_text,
)
from lapa2_interp._util.progress import progress_bar
from lapa2_interp._util.version import __version__
from lapa2_interp.bias.layout import text_markers
from lapa2_interp.models.card import check_rotary_side, context_length, short_context
from lapa2_interp.models.load import load_transformers, move_to_device
from lapa2_interp.prefixes.likelihood import TextRows, text_nll
from lapa2_interp.prefixes.recipes import TrainingRecipe
from lapa2_interp.prefixes.soft_prefix import (
    PrefixCard,
    Shape,
    SoftPrefix,
    Training,
    kv_shape_of,
    load_prefix,
    prefix_files,
    save_prefix,
)
from lapa2_interp.tasks.corpora import Corpus, pieces
from lapa2_interp.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = Sequence[Sequence[int]]


# --- parameterisations: trainable numbers -> keys and values


class Parameters(nn.Module):
    """Trainable numbers of several prefixes; `forward` gives their keys and values, [prefix, layer,
    kv_head, slot, d_head]."""

    def __init__(self, n_prefixes: int, shape: Shape, recipe: TrainingRecipe) -> None:
        super().__init__()
        self.shape, self.recipe, self.n = shape, recipe, n_prefixes
        layers, slots, middle = shape.n_layers, shape.n_slots, recipe.middle
        width = shape.n_kv_heads * shape.d_head

        def table(*size: int) -> nn.Parameter:
            return nn.Parameter(
                torch.zeros(size) if recipe.start == "zero" else 0.02 * torch.randn(size)
            )

        match recipe.parameterisation:
            case "direct":
                self.both = table(n_prefixes, 2, layers, shape.n_kv_heads, slots, shape.d_head)
            case "air":  # per layer and prefix: tables E_K and E_V; W and b serve both
                self.tables = table(n_prefixes, 2, layers, slots, middle)
                self.weight = table(n_prefixes, layers, middle, width)
                self.bias = nn.Parameter(torch.zeros(n_prefixes, layers, width))
            case "mlp":
                self.tables = table(n_prefixes, slots, width)
                self.maps = nn.ModuleList(
                    nn.Sequential(
                        nn.Linear(width, middle), nn.Tanh(), nn.Linear(middle, 2 * layers * width)
                    )
                    for _ in range(n_prefixes)
                )
            case "linear":  # the map is shared by the prefixes
                self.tables = table(n_prefixes, slots, middle)
                self.map = nn.Linear(middle, 2 * layers * width)

    def forward(self) -> Float[Tensor, "two prefix layer kv_head slot d_head"]:
        shape = self.shape
        match self.recipe.parameterisation:
            case "direct":
                return self.both.transpose(0, 1)
            case "air":
                found = (
                    torch.einsum("cklsm,clmd->cklsd", self.tables, self.weight)
                    + self.bias[:, None, :, None]
                )
                found = found.unflatten(
                    -1, (shape.n_kv_heads, shape.d_head)
                )  # prefix two layer slot kv_head d_head
                return found.permute(1, 0, 2, 4, 3, 5)
            case "mlp":
                flat = torch.stack(
                    [each(table) for each, table in zip(self.maps, self.tables, strict=True)]
                )
            case "linear":
                flat = self.map(self.tables)
        found = flat.unflatten(-1, (shape.n_layers, 2, shape.n_kv_heads, shape.d_head))
        return found.permute(3, 0, 2, 4, 1, 5)  # from prefix slot layer two kv_head d_head


@torch.no_grad()
def read_start(
    network: Any, start: Sequence[int], ids: Sequence[int], slots: int, shifted: bool
) -> Float[Tensor, "two layer kv_head slot d_head"]:
    """Keys and values of a text as a prefix of that many slots; a shorter text is repeated.

    The text is read behind BOS, but the key of BOS is left out: it is an attention sink, and would
    make the prefix one. Unshifted prefixes read at positions before 0 where the model takes them
    (rotary), so that the slots lie in front of the text.
    """
    ids = (list(ids) * slots)[:slots]
    device = next(network.parameters()).device
    rotary = any(getattr(network.config, name, None) for name in ("rope_parameters", "rope_theta"))
    positions = torch.arange(-1, slots, device=device)
    positions = positions - (0 if shifted else slots) if rotary else positions.clamp(min=0)
    cache = network.base_model(
        input_ids=torch.tensor([[*start, *ids]], device=device),
        position_ids=positions[None],
        use_cache=True,
    ).past_key_values
    return torch.stack(
        [
            torch.stack([getattr(layer, name)[0, :, len(start) :] for layer in cache.layers])
            for name in ("keys", "values")
        ]
    )


# --- losses


def contrastive_loss(
    nll: Float[Tensor, "prefix text"],
    tokens: Int[Tensor, " text"],
    label: Int[Tensor, " text"],
    *,
    gen_weight: float,
    sum_loss: bool,
    logit_scale: float = 1.0,
    other: Int[Tensor, " text"] | None = None,
) -> Float[Tensor, ""]:
    """(1 - w) L_disc + w L_gen (methods section 3.3).

    Args:
        nll: Summed over each text's tokens, under every prefix.
        tokens: Tokens of each text.
        label: Which prefix is the text's own.
        gen_weight: w, in [0, 1].
        sum_loss: L_disc compares whole texts, not means per token; L_gen is always per token.
        logit_scale: Scale of the softmax's logits.
        other: The only competitor of each text; by default all prefixes compete.
    """
    mean = nll / tokens
    logits = -logit_scale * (nll if sum_loss else mean)
    if other is not None:
        logits = torch.stack([logits.gather(0, which[None])[0] for which in (label, other)])
        chosen = torch.zeros_like(label)
    else:
        chosen = label
    disc = -logits.log_softmax(dim=0).gather(0, chosen[None]).mean()
    return (1 - gen_weight) * disc + gen_weight * mean.gather(0, label[None]).mean()


@dataclass(frozen=True)
class Examples:
    """Tokenised texts of the attributes a job trains."""

    texts: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]

    @classmethod
    def of(cls, by_attribute: Sequence[Tokens]) -> Examples:
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
        found = [
            [int(t) for t in block[i : i + size]]
            for block in blocks
            for i in range(0, len(block), size)
        ]
        return [found[i] for i in rng.permutation(len(found))]


@dataclass
class Job:
    """One training: one prefix (mle), or all of a task together (contrastive). Axes: prefix =
    attributes of this job."""

    network: Any
    start: tuple[int, ...]
    shape: Shape
    recipe: TrainingRecipe
    attributes: tuple[str, ...]
    train: Examples
    held_out: Examples
    checkpoint: Path
    first: Float[Tensor, "two prefix layer kv_head slot d_head"] | None = None

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            self.parameters = Parameters(len(self.attributes), self.shape, self.recipe)
        self.device = next(self.network.parameters()).device
        self.parameters.to(self.device)
        decayed = [p for name, p in self.parameters.named_parameters() if not name.endswith("bias")]
        plain = [p for name, p in self.parameters.named_parameters() if name.endswith("bias")]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self.recipe.weight_decay},
                {"params": plain, "weight_decay": 0.0},
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
        """Set the first keys and values (parameterisation direct)."""
        with torch.no_grad():
            self.parameters.both.copy_(both.transpose(0, 1))
        self.best = self.folded()

    def folded(self) -> Float[Tensor, "two prefix layer kv_head slot d_head"]:
        with torch.no_grad():
            return self.parameters().detach().clone()

    def loss(
        self,
        both: Float[Tensor, "two prefix layer kv_head slot d_head"],
        examples: Examples,
        chosen: Sequence[int],
        step: int,
    ) -> tuple[Float[Tensor, ""], int]:
        """The objective on a batch, and the tokens that were read."""
        texts = [examples.texts[i] for i in chosen]
        label = torch.tensor([examples.labels[i] for i in chosen], device=self.device)
        contrastive = self.recipe.objective == "contrastive"
        other = None
        if contrastive and self.recipe.negatives == "one":
            draw = np.random.default_rng([self.recipe.seed, step, 1]).integers(
                1, len(self.attributes), len(chosen)
            )
            other = (label + torch.from_numpy(draw).to(self.device)) % len(self.attributes)
        behind = list(range(len(self.attributes))) if contrastive else [0]
        rows = TextRows.of(texts * len(behind), self.start, self.device)
        # Rows: prefix x text.
        spread = both.to(self.network.dtype)[:, behind].repeat_interleave(len(texts), dim=1)
        nll = text_nll(self.network, rows, spread[0], spread[1], self.recipe.shifted).sum(1)
        tokens = rows.targets.sum(1)[: len(texts)]
        n_read = int(tokens.sum()) * len(behind)
        if not contrastive:
            return nll.sum() / tokens.sum(), n_read
        loss = contrastive_loss(
            nll.view(len(behind), -1),
            tokens,
            label,
            gen_weight=self.recipe.gen_weight,
            sum_loss=self.recipe.sum_loss,
            logit_scale=self.recipe.logit_scale,
            other=other,
        )
        return loss, n_read

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The objective on the held-out texts, weighted by batch."""
        both, size = self.folded(), 2 * self.recipe.batch
        order = sorted(range(len(self.held_out.texts)), key=lambda t: len(self.held_out.texts[t]))
        parts = [order[i : i + size] for i in range(0, len(order), size)]
        found = [self.loss(both, self.held_out, part, step) for step, part in enumerate(parts)]
        weight = [
            n if self.recipe.objective == "mle" else len(part)
            for (_, n), part in zip(found, parts, strict=True)
        ]
        return float(np.average([float(loss) for loss, _ in found], weights=weight))

    def run(self, bar: tqdm) -> None:
        """Train to the end, resuming from the checkpoint where there is one."""
        self._resume()
        bar.update(self.step)
        if not self.losses:
            self._check()
        while self.step < self.total and not self._exhausted():
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
        rate = min((self.step + 1) / warm, (self.total - self.step) / max(1, self.total - warm))
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * rate
        with _dropout(self.network, self.recipe.dropout, self.recipe.seed + self.step):
            loss, n_read = self.loss(self.parameters(), self.train, self.order[within], self.step)
        if not loss.isfinite():
            raise PrefixError(
                f"the loss of {', '.join(self.attributes)} is {loss.item()} at step {self.step};"
                " lower lr (--set lr=...)"
            )
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.step += 1
        self.tokens += n_read

    def _exhausted(self) -> bool:
        if self.recipe.patience is None or not self.losses:
            return False
        best = min(self.losses, key=lambda step: self.losses[step])
        return sum(step > best for step in self.losses) >= self.recipe.patience

    @property
    def kept_step(self) -> int:
        """The latest step of the least held-out loss; the last step where nothing stops early."""
        if self.recipe.patience is None:
            return max(self.losses)
        return min(reversed(self.losses), key=lambda step: self.losses[step])

    def _check(self) -> None:
        self.losses[self.step] = self.held_out_loss()
        if self.kept_step == self.step:
            self.best = self.folded()
        self._save()

    def _save(self) -> None:
        state = {
            "parameters": self.parameters.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "losses": self.losses,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        write_checkpoint(self.checkpoint, state)

    def _resume(self) -> None:
        if not self.checkpoint.is_file():
            return
        try:
            state = read_checkpoint(self.checkpoint, self.device)
            self.parameters.load_state_dict(state["parameters"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.best, self.losses = state["best"], state["losses"]
            self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        except (ValueError, KeyError, RuntimeError, TypeError) as error:
            raise PrefixError(
                f"{self.checkpoint} is damaged ({' '.join(str(error).split())[:80]}); delete it to"
                " begin anew"
            ) from error


@contextmanager
def _dropout(network: Any, share: float, seed: int) -> Iterator[None]:
    """Dropout of this share in a frozen network, its randomness decided by the seed."""
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


# --- a set of prefixes


PLAN = ".plan"
"""In a finished set: what it was trained from."""
CHECK_ROWS = 192
"""Rows (texts x prefixes) behind each held-out loss."""


def train_set(
    model: str,
    task: Task,
    corpora: Sequence[Corpus],
    held_out: Sequence[Corpus],
    out: Path,
    recipe: TrainingRecipe,
    *,
    attributes: Sequence[str] | None = None,
    start_from: Path | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> list[SoftPrefix]:
    """Train a task's prefixes and write them to a folder, resuming a killed run that is there.

    Args:
        model: As `load_model` takes it.
        corpora: Their labels are the task's attributes.
        held_out: Texts that decide when to stop; never trained on.
        out: The set's folder.
        attributes: Train only these; all of the task by default. A contrastive objective needs two.
        start_from: The set that a recipe with start "set" begins with.

    Raises:
        DataError: An attribute has no text, or the objective needs a second attribute.
        PrefixError: The folder holds other prefixes, or the loss is not a number.
    """

    check_name(out)
    attributes = tuple(dict.fromkeys(attributes or task.attributes))
    for attribute in attributes:
        task.prefix(attribute)
    if recipe.objective == "contrastive" and len(attributes) < 2:
        raise DataError(
            "a contrastive objective needs texts of two attributes at least; found only"
            f" {attributes[0]!r}"
        )
    network, tokenizer, weights = load_transformers(model, recipe.dtype, trust_remote_code)
    network.requires_grad_(False)
    move_to_device(network, device)
    shape = kv_shape_of(network.config, recipe.slots)
    check_context(network, tokenizer, task, attributes, recipe.slots, recipe.max_tokens)
    start = (text_markers(tokenizer).start,)
    plan = {
        "model": model,
        "weights": weights,
        "task": task.name,
        "attributes": list(attributes),
        "recipe": recipe.model_dump(mode="json"),
        "data": [corpus.sha256 for corpus in (*corpora, *held_out)],
    }
    if recipe.start == "hard":
        plan["prefixes"] = {name: task.prefix(name) for name in attributes}
    before: dict[str, SoftPrefix] = {}
    if recipe.start == "set":
        if start_from is None:
            raise PrefixError("start 'set' needs the folder of a set to begin with (--from)")
        before = {name: load_prefix(start_from, name) for name in attributes}
        plan["start_from"] = [prefix.card.sha256 for prefix in before.values()]
        for prefix in before.values():
            if prefix.card.shape != shape or prefix.card.weights != weights:
                raise PrefixError(f"{prefix!r} in {start_from} does not fit {model} with {shape}")
    if _is_finished(out, attributes, plan):
        print(f"{out} is finished", file=sys.stderr)
        return [load_prefix(out, name) for name in attributes]
    with _opened(out, plan) as states:
        texts = {
            name: tokenise(tokenizer, corpora, name, recipe.max_tokens, recipe.limit)
            for name in attributes
        }
        behind = len(attributes) if recipe.objective == "contrastive" else 1
        per_name = max(1, CHECK_ROWS // (behind * behind))
        checks = {
            name: tokenise(tokenizer, held_out, name, recipe.max_tokens, per_name)
            for name in attributes
        }
        groups = (
            [attributes] if recipe.objective == "contrastive" else [(name,) for name in attributes]
        )
        firsts = _firsts(network, tokenizer, start, task, recipe, texts, before)
        jobs = [
            Job(
                network,
                start,
                shape,
                recipe,
                group,
                Examples.of([texts[name] for name in group]),
                Examples.of([checks[name] for name in group]),
                states / f"{'-'.join(group)}.pt",
                None if firsts is None else torch.stack([firsts[name] for name in group], dim=1),
            )
            for group in groups
        ]
        print(_announcement(jobs, recipe), file=sys.stderr)
        if recipe.shared:
            each = -(-recipe.shared // len(attributes))
            together = Job(
                network,
                start,
                shape,
                recipe.model_copy(update={"objective": "mle"}),
                ("shared",),
                Examples.of([[text for name in attributes for text in texts[name][:each]]]),
                Examples.of(
                    [
                        [
                            text
                            for name in attributes
                            for text in checks[name][: CHECK_ROWS // len(attributes)]
                        ]
                    ]
                ),
                states / ".shared.pt",
                None if firsts is None else firsts[attributes[0]][:, None],
            )
            _run(together, f"{task.name} shared start")
            for job in jobs:
                job.begin(together.best.expand(-1, len(job.attributes), -1, -1, -1, -1))
        made = []
        for job in jobs:
            if all(prefix_files(out, name)[1].is_file() for name in job.attributes):
                made += [load_prefix(out, name) for name in job.attributes]
                continue
            _run(job, f"{task.name} {recipe.objective} {' '.join(job.attributes)}")
            for i, name in enumerate(job.attributes):
                card = PrefixCard(
                    attribute=name,
                    task=task.name,
                    set=recipe.objective,
                    model=model,
                    weights=weights,
                    shape=shape,
                    shifted=recipe.shifted,
                    origin="trained",
                    training=Training(
                        recipe=recipe.model_dump(mode="json"),
                        started_from=before[name].card.sha256 if before else None,
                        data=tuple(corpus.summary for corpus in corpora),
                        data_sha256=tuple(corpus.sha256 for corpus in corpora),
                        texts=len(texts[name]),
                        tokens=job.tokens,
                        steps=job.step,
                        best_step=job.kept_step,
                        losses={step: round(loss, 5) for step, loss in job.losses.items()},
                        seconds=round(job.seconds, 1),
                        lapa2_interp=__version__,
                    ),
                )
                made.append(save_prefix(SoftPrefix(job.best[0, i], job.best[1, i], card), out))
        write_text(out / PLAN, json.dumps(plan, indent=1))
        remove_folder(states)
        return made


def check_context(
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    attributes: Sequence[str],
    slots: int,
    max_tokens: int,
) -> None:
    """Refuse texts that do not fit behind a soft prefix, or behind one of the task's hard ones,
    beside which they are measured.

    Raises:
        PrefixError: With BOS they exceed the model's context.
        LayoutError: The model's rotary factors change within them.
    """
    hard = [tokenizer(task.prefix(name), add_special_tokens=False).input_ids for name in attributes]
    longest, n_ctx = max(slots, *map(len, hard)), context_length(network.config)
    if longest + 1 + max_tokens > n_ctx:
        raise PrefixError(
            f"{longest} slots or tokens of a prefix, BOS and {max_tokens} tokens of a text exceed"
            f" the model's context of {n_ctx}; give at most {n_ctx - longest - 1} tokens"
            " (max_tokens)"
        )
    what = f"{slots} slots, BOS and {max_tokens} tokens of a text (max_tokens)"
    check_rotary_side(short_context(network.config), 0, slots + 1 + max_tokens, what)


def tokenise(
    tokenizer: PreTrainedTokenizerBase,
    corpora: Sequence[Corpus],
    attribute: str,
    max_tokens: int,
    limit: int | None,
) -> list[list[int]]:
    """Pieces of an attribute's texts, of the corpora in turn: the first of every text, then the
    second of those that have one, ..."""
    by_corpus = [corpus.texts.get(attribute, ()) for corpus in corpora]
    texts = [text for each in zip_longest(*by_corpus) for text in each if text is not None]
    waiting = [pieces(text, tokenizer, max_tokens) for text in texts]
    kept: list[list[int]] = []
    while waiting:
        going = []
        for each in waiting:
            if limit is not None and len(kept) == limit:
                return kept
            if (ids := next(each, None)) is not None:
                kept.append(ids)
                going.append(each)
        waiting = going
    if not kept:
        raise DataError(f"there is no text of {attribute!r}; give --data with that label")
    return kept


def _firsts(
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    start: Sequence[int],
    task: Task,
    recipe: TrainingRecipe,
    texts: Mapping[str, Tokens],
    before: Mapping[str, SoftPrefix],
) -> dict[str, Float[Tensor, "two layer kv_head slot d_head"]] | None:
    """First keys and values by attribute; None where the parameterisation draws its own."""
    if recipe.start == "set":
        return {
            name: torch.stack([prefix.keys, prefix.values]).float()
            for name, prefix in before.items()
        }
    if recipe.start not in ("text", "hard"):
        return None
    read = {
        name: tokenizer(task.prefix(name), add_special_tokens=False).input_ids for name in texts
    }
    if recipe.start == "text":
        read = {
            name: [token for text in found[: recipe.slots] for token in text]
            for name, found in texts.items()
        }
    return {
        name: read_start(network, start, ids, recipe.slots, recipe.shifted).float()
        for name, ids in read.items()
    }


def _run(job: Job, label: str) -> None:
    with progress_bar(job.total, label, "step") as bar:
        job.run(bar)


def _announcement(jobs: Sequence[Job], recipe: TrainingRecipe) -> str:
    """What is about to be trained and how long it takes, from one forward and backward pass that
    changes nothing."""
    job = jobs[0]
    behind = len(job.attributes) if recipe.objective == "contrastive" else 1
    texts = [text for each in jobs for text in each.train.texts]
    tokens = sum(map(len, texts)) * recipe.epochs
    shared = round(tokens * recipe.shared / len(texts))
    began = perf_counter()
    loss, n_read = job.loss(
        job.parameters(), job.train, range(min(recipe.batch, len(job.train.texts))), 0
    )
    loss.backward()
    job.optimizer.zero_grad()
    rate = n_read / (perf_counter() - began)
    total = behind * tokens + shared
    return (
        f"{sum(len(each.attributes) for each in jobs)} prefixes of {recipe.slots} slots"
        f" ({recipe.objective}, {recipe.parameterisation}): {len(texts)} pieces of text,"
        f" {sum(each.total for each in jobs)} steps, {total} tokens at most, about"
        f" {total / rate / 60:.0f} min at {rate:.0f} tokens/s; kill and repeat the command to go on"
        " later"
    )


def _is_finished(out: Path, attributes: Sequence[str], plan: Mapping[str, Any]) -> bool:
    """Whether the folder holds what this training would make."""
    files = [prefix_files(out, name)[1] for name in attributes]
    if (out / ".training").exists() or not all(file.is_file() for file in files):
        return False
    with suppress(OSError, ValueError):
        before = parse_json(read_text(out / PLAN))
        return bool(before == json.loads(json.dumps(plan)))
    return False


@contextmanager
def _opened(out: Path, plan: Mapping[str, Any]) -> Iterator[Path]:
    """The folder of a set's checkpoints, which other processes stay out of; the same plan resumes,
    another one is refused."""
    states = _open(out, plan)
    if states.is_symlink():
        raise PrefixError(f"{states} is a link, which is not followed; remove it")
    with open(states / "lock", "w", opener=no_link) as lock:
        if not held(lock):
            raise PrefixError(
                f"{out} is being trained by another process; wait for it, or choose another --out"
            )
        yield states


def _open(out: Path, plan: Mapping[str, Any]) -> Path:
    states = out / ".training"
    if not (states / "plan.json").exists():
        if out.exists() and any(each != states for each in out.iterdir()):
            raise PrefixError(
                f"{out} is not empty and holds no unfinished training; choose another --out"
            )
        write_text(states / "plan.json", json.dumps(plan, indent=1))
        return states
    try:
        before = parse_json(read_text(states / "plan.json"))
    except (OSError, ValueError):
        before = {}
    if before != plan:
        changed = [name for name in plan if before.get(name) != plan[name]]
        raise PrefixError(
            f"{out} holds an unfinished training with another {', '.join(changed)}; repeat that"
            " command to resume it, or choose another --out"
        )
    return states
