"""Learn one strength a head from pairs of texts.

A pair is a wanted and an unwanted continuation of a prompt behind a prefix. With S the strengths,
P_S the model whose bias on the prefix's keys is S times b in each head, and P_0 the model without:

    gain = mean of log(1 + exp(-(r_S - r_0))),  r = log P(wanted) - log P(unwanted)
    kl   = mean of KL(P_0 || P_S) a token, behind a neutral prefix, which the bias also reaches
    rise = mean of max(0, -log P_S(text) + log P_0(text)) a token, behind the pair's prefix
    loss = gain + cost (kl + rise)

A plain difference of log-likelihoods has no bound, so the gain is a logistic loss on how far it
changes. Without a span a bias does nothing, so the KL needs a prefix that says nothing. `text` is
fluent text that nobody steered. A rise below 0 counts as 0: reading such texts better than the
model without a bias is no aim.

Each step is Adam's, and then every strength comes `rate * sparsity` nearer to 0 (a proximal step:
an L1 penalty under Adam leaves no zeros). Pairs of held-out prompts decide which step is kept.

    learned = learn(model, pairs, neutral="A short text:", texts=fluent)
    learned.selection(...).save("card.json")     # lapa2 generate --card card.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus
from tqdm import tqdm

from lapa2_interp._util.settings import helped_by
from lapa2_interp._util.values import Count, Natural, NotNegative, Positive, numbers_checked
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.circuits.gradients import recorded_gradients
from lapa2_interp.circuits.selection import Selection
from lapa2_interp.circuits.settings import LearnSettings
from lapa2_interp.errors import CircuitError
from lapa2_interp.files import read_checkpoint, write_checkpoint
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import Model, check_not_quantised, facts_of
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.plots import COLOURS, Drawing, layer_map, new_figure, plain_axes
from lapa2_interp.progress import given_or_new_bar
from lapa2_interp.stats import FEW

PARTS = ("gain", "kl", "rise")
"""Parts of the loss, as in the module's formulas."""


class TextPair(NamedTuple):
    """Two continuations of a prompt, of which a prefix is to make the first more probable.

    Attributes:
        prefix, prompt: Texts. Some tokenizers need a space at the start of the prompt.
        wanted, unwanted: Texts that continue the prompt, most with a space in front.
    """

    prefix: str
    prompt: str
    wanted: str
    unwanted: str


@dataclass(frozen=True)
class Learned:
    """Strengths that were learned, and how.

    Attributes:
        model, weights: Name and identity of the model.
        rule: The bias that the strengths multiply, with alpha 1.
        strengths: By layer and head.
        history: A row for each step that was checked: step, part ("train" or "held-out"), the
            parts of the loss, the loss, change (of the log-likelihood ratio, in nats a text), and
            heads (those with a strength).
        best: The step that is kept.
        pairs, held_out: Numbers of pairs that trained, and that decided.
        prompts: Those of all pairs.
        inputs: Hash of pairs and settings.
        seed: Of the order of pairs.
    """

    model: str
    weights: str
    rule: Augmentation
    strengths: Float[np.ndarray, "layer head"]
    history: pd.DataFrame = field(compare=False)
    best: int
    pairs: int
    held_out: int
    prompts: tuple[str, ...]
    inputs: str
    seed: int

    @property
    def best_parts(self) -> dict[str, float]:
        """The parts of the loss, and the change, of held-out pairs at the step that is kept."""
        held_out = self.history[self.history["part"] == "held-out"].set_index("step")
        row = held_out.loc[self.best].to_dict()
        return {name: float(row[name]) for name in (*PARTS, "change")}

    def augmentation(self, alpha: float = 1.0) -> Augmentation:
        """The bias with these strengths.

        Args:
            alpha: A dial that multiplies all of them.

        Raises:
            CircuitError: No head has a strength.
        """
        if not self.strengths.any():
            raise CircuitError(
                "no head has a strength: on held-out prompts no step was better than no bias; give"
                " more pairs, or a smaller cost or sparsity"
            )
        entries = tuple(
            (int(layer), int(head), float(self.strengths[layer, head]))
            for layer, head in np.argwhere(self.strengths)
        )
        fields = self.rule.model_dump(exclude={"strengths", "alpha"}) | {"strengths": entries}
        return Augmentation(alpha=alpha, **fields)

    def selection(self, task: Mapping[str, str]) -> Selection:
        """A card of the strengths, which steers as those of `select` do.

        Args:
            task: The prefix of each attribute.

        Raises:
            CircuitError: As `augmentation`.
        """
        table, bias = self.frame(), self.augmentation()
        return Selection(
            model=self.model,
            weights=self.weights,
            task=dict(task),
            by="learned",
            metric=None,
            heads=tuple(zip(table["layer"].tolist(), table["head"].tolist(), strict=True)),
            suppressors=(),
            scores=(),
            positions=None,
            prompts=self.prompts,
            inputs=self.inputs,
            stability=None,
            seed=self.seed,
            created=datetime.now(UTC),
            alpha=1.0,
            strengths=tuple(table["strength"].tolist()),
            law=bias.law,
            l0=bias.l0,
            training={
                "pairs": self.pairs,
                "held out": self.held_out,
                "step": self.best,
                **self.best_parts,
            },
        )

    def frame(self) -> pd.DataFrame:
        """A row for every head with a strength, the largest first. Columns: layer, head,
        strength."""
        rows = [
            {"layer": int(layer), "head": int(head), "strength": self.strengths[layer, head]}
            for layer, head in np.argwhere(self.strengths)
        ]
        table = pd.DataFrame(rows, columns=["layer", "head", "strength"])
        return table.sort_values("strength", key=np.abs, ascending=False, ignore_index=True)

    def plot(self) -> Drawing:
        """The strengths by layer and head, and gain against cost over the steps."""
        figure = new_figure(8.6, 3.2)
        left, right = figure.subplots(1, 2)
        most = float(np.abs(self.strengths).max()) or 1.0
        drawn = layer_map(left, self.strengths, cmap="RdBu_r", vmin=-most, vmax=most)
        bar = figure.colorbar(drawn, ax=left)
        bar.set_label("strength", size=8)
        bar.ax.tick_params(labelsize=7)
        # Training steps have different pairs each, so that no line joins them.
        for part, look in (("train", "."), ("held-out", "-o")):
            own = self.history[self.history["part"] == part]
            colour = COLOURS[2] if part == "held-out" else "0.6"
            cost = own["kl"] + own["rise"]
            right.plot(cost, own["change"], look, ms=2.5, lw=0.9, color=colour, label=part)
        best = self.best_parts
        right.plot(
            best["kl"] + best["rise"],
            best["change"],
            "o",
            mfc="none",
            ms=9,
            color="0.2",
        )
        right.axhline(0, color="0.7", lw=0.6)
        plain_axes(right, "cost: KL and rise, nats a token", "change of the ratio, nats a text")
        right.legend(frameon=False, fontsize=7)
        return figure


@helped_by(LearnSettings)
@numbers_checked
@accepts_model_name
def learn(
    model: Model,
    pairs: Sequence[TextPair],
    *,
    texts: Mapping[str, str],
    neutral: str = "This is a text:",
    law: Literal["log", "constant"] = "log",
    cost: Positive = 1.0,
    sparsity: NotNegative = 0.02,
    tied: Literal["no", "layer", "all"] = "no",
    steps: Count = 60,
    batch: Count = 8,
    rate: Positive = 0.05,
    check: Count = 10,
    seed: Natural = 1,
    file: str | Path | None = None,
    progress: tqdm | None = None,
) -> Learned:
    """Learn one strength a head.

    The bias acts on the prefix's keys from the prompt's last token on, as in generation. Its length
    l stops at the longest text that was trained on (`l0`), so that no longer text gets a bias that
    was never tried.

    Args:
        model: Any loaded model in float32 or float64.
        pairs: Of 8 prompts or more. A fifth of the prompts is held out, and at least two.
        texts: By prompt, fluent text that continues it.
        progress: A bar that counts steps.

    Raises:
        CircuitError: Half precision or quantised weights, too few prompts, a prompt without text,
            or a checkpoint of other settings, or of more steps.
    """
    check_can_learn(model)
    _check_pairs(pairs, texts)
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    objective = PairObjective(model, pairs, texts, neutral, law, cost)
    held_out, train = held_out_pairs(pairs, seed)
    state = _Training(objective, tied, rate, sparsity)
    card = identify(model)
    plan = {
        "weights": card.weights,
        "pairs": [list(pair) for pair in pairs],
        "texts": [texts[prompt] for prompt in prompts],
        "settings": [neutral, law, cost, sparsity, tied, batch, rate, check, seed],
    }
    if file is not None and Path(file).exists():
        state.load(Path(file), plan)
    if state.step > steps:
        raise CircuitError(
            f"{file} has {state.step} steps, and {steps} were asked for; ask for as many or more,"
            " or give another file"
        )
    with (
        frozen_weights(facts_of(model).network),
        recorded_gradients(),
        given_or_new_bar(progress, steps - state.step, "learn", "step") as bar,
    ):
        if not state.history:
            state.note("held-out", objective.parts(state.steering(), held_out, batch), best=True)
        while state.step < steps:
            rng = np.random.default_rng([seed, state.step])
            chosen = rng.choice(train, min(batch, len(train)), replace=False).tolist()
            state.take_step(chosen)
            bar.update(1)
            if state.step % check == 0 or state.step == steps:
                state.note("held-out", objective.parts(state.steering(), held_out, batch), True)
            # A look at the end alone is not kept: who goes on has none there.
            if state.step % check == 0 and file is not None:
                state.save(Path(file), plan)
    return Learned(
        model=card.name,
        weights=card.weights,
        rule=objective.rule,
        strengths=state.best.numpy(),
        history=pd.DataFrame(state.history),
        best=state.best_step,
        pairs=len(train),
        held_out=len(held_out),
        prompts=tuple(prompts),
        inputs=sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16],
        seed=seed,
    )


def held_out_pairs(pairs: Sequence[TextPair], seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the pairs that are held out, all those of a fifth of the prompts, and of the
    others."""
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    order = np.random.default_rng(seed).permutation(len(prompts))
    out = {prompts[i] for i in order[: max(2, len(prompts) // 5)]}
    both: tuple[list[int], list[int]] = [], []
    for i, pair in enumerate(pairs):
        both[pair.prompt not in out].append(i)
    return both


@contextmanager
def frozen_weights(network: nn.Module) -> Iterator[None]:
    """Weights without gradients inside the block: a pass then keeps less, and no gradient of a
    weight is computed."""
    learning = [weight for weight in network.parameters() if weight.requires_grad]
    for weight in learning:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in learning:
            weight.requires_grad_(True)


def check_can_learn(model: Model) -> None:
    """Refuse a model through which no strengths are learned.

    Raises:
        CircuitError: Half precision or quantised weights.
    """
    check_not_quantised(model, "gradients go through")
    dtype = facts_of(model).dtype
    if dtype not in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        raise CircuitError(
            f"gradients in {name} are mostly rounding; allowed: float32, float64; load the model"
            ' with dtype="float32". The card steers a model in half precision, too'
        )


def _check_pairs(pairs: Sequence[TextPair], texts: Mapping[str, str]) -> None:
    """Refuse pairs from which no strengths are learned."""
    prompts = {pair.prompt for pair in pairs}
    if len(prompts) < FEW:
        raise CircuitError(
            f"{len(prompts)} prompts are too few to learn from; give pairs of at least {FEW},"
            " better 50"
        )
    if missing := sorted(prompts - texts.keys()):
        raise CircuitError(
            f"there is no fluent text for the prompt {missing[0]!r}; texts has one for each prompt"
        )


class _Read(NamedTuple):
    """A row of a pass: a layout, and the tokens behind it."""

    layout: Layout
    text: tuple[int, ...]


Steering = Callable[[PaddedRows, Sequence[int]], AbstractContextManager[Any]]
"""Steers the pass of padded rows inside its block. It gets the rows' prompts, and the pair of each
row."""


class PairObjective:
    """The parts of the loss, for some pairs at once, of any way to steer that has gradients.

    Attributes:
        rule: The bias that strengths multiply.
    """

    def __init__(
        self,
        model: Model,
        pairs: Sequence[TextPair],
        texts: Mapping[str, str],
        neutral: str,
        law: Literal["log", "constant"],
        cost: float,
    ) -> None:
        self.model, self.cost = model, cost
        tokenizer = model.tokenizer

        def read(prefix: str, prompt: str, text: str) -> _Read:
            layout = Layout.of(tokenizer, prefix, prompt)
            return _Read(layout, tuple(tokenizer(text, add_special_tokens=False).input_ids))

        # By pair: wanted, unwanted, fluent, fluent behind the neutral prefix.
        self.rows = [
            (
                read(pair.prefix, pair.prompt, pair.wanted),
                read(pair.prefix, pair.prompt, pair.unwanted),
                read(pair.prefix, pair.prompt, texts[pair.prompt]),
                read(neutral, pair.prompt, texts[pair.prompt]),
            )
            for pair in pairs
        ]
        for rows, pair in zip(self.rows, pairs, strict=True):
            if not all(row.text for row in rows):
                raise CircuitError(f"a text of the prompt {pair.prompt!r} has no token")
        longest = max(len(row.layout) + len(row.text) for rows in self.rows for row in rows)
        self.rule = Augmentation(alpha=1.0, law=law, l0=float(longest))
        self.at_zero: dict[int, tuple[float, float]] = {}  # by pair, r and -log P a token

    def by_strengths(self, strengths: Tensor) -> Steering:
        """The bias with these strengths, [layer head]."""
        return lambda rows, pairs: augmented(
            self.model, self.rule, rows.layouts, strengths=strengths
        )

    def unsteered(self, rows: PaddedRows, pairs: Sequence[int]) -> AbstractContextManager[Any]:
        """No bias, for padded rows."""
        return augmented(self.model, None, rows.layouts)

    @torch.no_grad()
    def _without(self, indices: Sequence[int]) -> Float[Tensor, "pair step vocab"]:
        """Predictions behind the neutral prefix without the bias, computed anew because those of
        all pairs would fill the memory; and `at_zero` of new pairs."""
        missing = [i for i in indices if i not in self.at_zero]
        if missing:
            ratio, nll, _ = self._read(missing, None)
            for i, *values in zip(missing, ratio.tolist(), nll.tolist(), strict=True):
                self.at_zero[i] = (values[0], values[1])
        return self._log_probs([self.rows[i][3] for i in indices], indices, None)

    def _log_probs(
        self, rows: Sequence[_Read], pairs: Sequence[int], steering: Steering | None
    ) -> Float[Tensor, "row step vocab"]:
        """Predictions of the texts' tokens, by one pass; steps behind a text mean nothing."""
        padded = PaddedRows.of([row.layout for row in rows], device=self.model.cfg.device)
        n = max(len(row.text) for row in rows)
        texts = [[*row.text, *[row.text[-1]] * (n - len(row.text))] for row in rows]
        ids = torch.tensor(texts, device=padded.ids.device)
        both = torch.cat([padded.ids, ids[:, :-1]], dim=1)
        mask = torch.cat([padded.mask, torch.ones_like(ids[:, :-1])], dim=1)
        with (steering or self.unsteered)(padded, pairs):
            logits = self.model(both, attention_mask=mask)[:, -n:]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(2)

    def _read(
        self, indices: Sequence[int], steering: Steering | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By pair: r, and the fluent text's -log P a token; and predictions behind neutral."""
        kinds = 3 if steering is None else 4
        rows = [self.rows[i][kind] for kind in range(kinds) for i in indices]
        log_probs = self._log_probs(rows, [*indices] * kinds, steering)
        n = log_probs.shape[1]
        steps = torch.arange(n, device=log_probs.device)
        texts = [[*row.text, *[0] * (n - len(row.text))] for row in rows]
        lengths = torch.tensor([len(row.text) for row in rows], device=log_probs.device)
        tokens = torch.tensor(texts, device=log_probs.device)
        own = log_probs.gather(2, tokens[..., None])[..., 0]  # row step
        sums = torch.where(steps < lengths[:, None], own, 0.0).sum(1).unflatten(0, (kinds, -1))
        nll = -sums[2] / lengths.unflatten(0, (kinds, -1))[2]
        return sums[0] - sums[1], nll, log_probs[-len(indices) :]

    def loss(self, steering: Steering, indices: Sequence[int]) -> tuple[Tensor, dict[str, float]]:
        """The loss, summed over some pairs; and its parts, summed in the same way."""
        base = self._without(indices)
        ratio, nll, neutral = self._read(indices, steering)
        before = torch.tensor([self.at_zero[i] for i in indices]).to(ratio)
        change, rise = ratio - before[:, 0], (nll - before[:, 1]).clamp(min=0)
        n = base.shape[1]
        lengths = torch.tensor([len(self.rows[i][3].text) for i in indices], device=base.device)
        live = torch.arange(n, device=base.device) < lengths[:, None]
        divergence = (base.exp() * (base - neutral[:, :n])).sum(2)
        kl = torch.where(live, divergence, 0.0).sum(1) / lengths
        gain = softplus(-change)
        total = (gain + self.cost * (kl + rise)).sum()
        sums = {"gain": gain, "kl": kl, "rise": rise, "change": change}
        return total, {name: float(values.detach().sum()) for name, values in sums.items()}

    @torch.no_grad()
    def parts(self, steering: Steering, indices: Sequence[int], at_once: int) -> dict[str, float]:
        """The parts of the loss as means over pairs."""
        sums: dict[str, float] = {}
        for first in range(0, len(indices), at_once):
            _, of_batch = self.loss(steering, indices[first : first + at_once])
            sums = {name: sums.get(name, 0.0) + value for name, value in of_batch.items()}
        return {name: value / len(indices) for name, value in sums.items()}


class _Training:
    """Strengths, their optimiser, and what was found on the way."""

    def __init__(self, objective: PairObjective, tied: str, rate: float, sparsity: float) -> None:
        facts = facts_of(objective.model)
        self.objective, self.rate, self.sparsity = objective, rate, sparsity
        self.size = facts.n_layers, facts.n_heads
        shape = {"no": self.size, "layer": (self.size[0], 1), "all": (1, 1)}[tied]
        self.free = torch.zeros(shape, requires_grad=True, device=objective.model.cfg.device)
        self.optimizer = torch.optim.Adam([self.free], lr=rate)
        self.step, self.best_step, self.best_loss = 0, 0, math.inf
        self.history: list[dict[str, Any]] = []
        self.best = torch.zeros(self.size)

    def strengths(self) -> Float[Tensor, "layer head"]:
        """The strength of every head."""
        return self.free.expand(self.size)

    def steering(self) -> Steering:
        """The bias with these strengths."""
        return self.objective.by_strengths(self.strengths())

    def take_step(self, indices: Sequence[int]) -> None:
        """One step on some pairs."""
        self.optimizer.zero_grad()
        total, sums = self.objective.loss(self.steering(), indices)
        (total / len(indices)).backward()
        self.optimizer.step()
        with torch.no_grad():
            nearer = self.rate * self.sparsity
            self.free.copy_(self.free.sign() * (self.free.abs() - nearer).clamp(min=0))
        self.step += 1
        self.note("train", {name: value / len(indices) for name, value in sums.items()})

    def note(self, part: str, means: Mapping[str, float], best: bool = False) -> None:
        """Note the parts of the loss; with `best` keep the strengths if none were better."""
        loss = means["gain"] + self.objective.cost * (means["kl"] + means["rise"])
        heads = int((self.strengths() != 0).sum())
        row = {"step": self.step, "part": part, **means, "loss": loss, "heads": heads}
        self.history.append(row)
        if best and loss < self.best_loss:
            self.best_step, self.best_loss = self.step, loss
            self.best = self.strengths().detach().cpu().clone()

    def save(self, file: Path, plan: Mapping[str, Any]) -> None:
        """Write a checkpoint."""
        names = ("step", "best_step", "best_loss", "history", "best")
        state = {name: getattr(self, name) for name in names}
        state |= {"free": self.free.detach(), "optimizer": self.optimizer.state_dict()}
        write_checkpoint(file, state | {"plan": dict(plan)})

    def load(self, file: Path, plan: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the same settings.

        Raises:
            CircuitError: It is damaged, or of others.
        """
        try:
            state = read_checkpoint(file, self.free.device)
        except ValueError as error:
            raise CircuitError(f"{file} is no checkpoint ({error}); remove it") from error
        if state.pop("plan", None) != plan:
            raise CircuitError(
                f"{file} is the checkpoint of other pairs, settings or weights; give another file"
            )
        with torch.no_grad():
            self.free.copy_(state.pop("free"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        for name, value in state.items():
            setattr(self, name, value)
