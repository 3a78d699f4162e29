"""Knock-outs of several heads at once: which heads are needed, and which suffice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float
from tqdm import tqdm

from lapa2_interp._util.errors import CircuitError, pluralize
from lapa2_interp._util.plots import Drawing, new_figure, plain_axes
from lapa2_interp.bias.augmentation import Phase
from lapa2_interp.circuits.edits import Heads
from lapa2_interp.circuits.knockout import KnockOut, knock_out
from lapa2_interp.circuits.metrics import METRICS, Metric, metrics_by_name
from lapa2_interp.circuits.statistics import share_interval
from lapa2_interp.circuits.units import Unit, all_heads
from lapa2_interp.models.card import Model
from lapa2_interp.models.load import accepts_model_name


@dataclass(frozen=True)
class JointCurve:
    """The share of control that is left when several heads are knocked out together.

    Attributes:
        metric: The metric of control.
        table: A row for every kind and size: left (the share of the control that is left), its 95 %
            interval over prompts, heads, and prompts. Kinds: "without" the best n (are they
            needed?), "only" the best n (do they suffice?), without "random" n, and without "mass",
            the n with the largest attention on the prefix.
    """

    metric: str
    table: pd.DataFrame

    def frame(self) -> pd.DataFrame:
        """The table."""
        return self.table

    def plot(self) -> Drawing:
        """The share of control left against the number of heads."""
        figure = new_figure(3.3, 2.8)
        axes = figure.subplots()
        for colour, (kind, part) in zip(
            ("#D55E00", "#0072B2", "#777777", "#E69F00"),
            self.table.groupby("kind", sort=False),
            strict=False,
        ):
            axes.plot(part["heads"], part["left"], color=colour, marker="o", ms=3, label=kind)
            axes.fill_between(
                part["heads"], part["low"], part["high"], color=colour, alpha=0.12, lw=0
            )
        axes.axhline(1, color="0.7", lw=0.6)
        axes.axhline(0, color="0.7", lw=0.6)
        sizes = sorted(set(self.table["heads"]))
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)  # also where no share is defined
        axes.set_xticks(sizes, [str(size) for size in sizes])
        figure.legend(loc="outside upper left", fontsize=8, frameon=False, ncols=4, handlelength=1)
        plain_axes(axes, "heads", f"share of {self.metric} left")
        return figure


@accepts_model_name
def joint_curve(
    model: Model,
    table: KnockOut,
    *,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    replacement: str | None = None,
    phase: Phase | None = None,
    metric: str | Metric | Mapping[str, Metric] | None = None,
    prefix_attention: Float[np.ndarray, "layer head"] | None = None,
    seeds: int = 3,
    file: str | Path | None = None,
    progress: tqdm | None = None,
) -> JointCurve:
    """Measure control without the best n heads, with these alone, and without other n heads.

    Heads are chosen by their effects in one half of the prompts and judged in the other, then the
    halves change places: in the texts that chose them, effects of chosen heads are too large.

    Args:
        table: Knock-outs of single heads.
        sizes: Numbers of heads; those that the table or the model does not have are left out.
        replacement, phase, metric: As `knock_out`; by default the table's. If it has lex, that is
            the metric, because shares of lex add up.
        prefix_attention: By head (`prefix_attention_by_head`), for the kind "mass".
        seeds: Random sets of each size, drawn from all heads of the model.
        file: A file for finished sets, as in `knock_out`; each half has its own, whose name ends in
            -0 or -1.

    Raises:
        CircuitError: The table is not one of heads, or has fewer than 2 prompts; sizes or seeds
            below 1; or as `knock_out`.
    """
    if metric is None:
        metric = "lex" if "lex" in table.by_metric else table.metric
        if metric not in METRICS:
            raise CircuitError(
                f"the table's metric {metric!r} is a custom function; give it again as metric"
            )
    metric_name = next(iter(metrics_by_name(metric)))
    single = all(len(unit.heads) == 1 and unit.positions is None for unit in table.units)
    if (
        table.contrast_set.n_prompts < 2
        or not single
        or len({u.heads for u in table.units}) < len(table.units)
    ):
        raise CircuitError("a joint curve needs knock-outs of single heads, of 2 prompts or more")
    every = all_heads(model)
    if small := [n for n in sizes if n < 1]:
        raise CircuitError(f"sizes are numbers of heads, at least 1; found {small[0]}")
    if seeds < 1:
        raise CircuitError(
            f"random heads are drawn at least once for each size; found seeds={seeds}, give 1 or"
            " more"
        )
    requested = sizes
    sizes = [n for n in sizes if n <= len(table.units) and n < len(every)]
    if not sizes:
        raise CircuitError(
            f"a joint curve of {pluralize(len(every), 'head')} needs sizes below that; found"
            f" {', '.join(map(str, requested)) or 'none'}"
        )
    asked = table.contrast_set
    prompts = list(dict.fromkeys(asked.prompts))
    whole = np.zeros(len(asked.examples))
    left: dict[tuple[str, int], Float[np.ndarray, "draw example"]] = {}
    for fold in (0, 1):
        own_file = None
        if file is not None:
            own_file = Path(file).with_name(f"{Path(file).stem}-{fold}{Path(file).suffix}")
        # Heads in the order of their effects in one half of the prompts.
        held_out = set(prompts[fold::2])
        choosing = [i for i, prompt in enumerate(prompts) if prompt not in held_out]
        judged = [i for i, prompt in enumerate(asked.prompts) if prompt in held_out]
        order = np.argsort(-table.by_prompt[choosing].mean(0), kind="stable")
        best = [table.units[i].heads[0] for i in order]
        # Sets of heads that are knocked out, by kind, size and draw.
        rng = np.random.default_rng(fold)
        sets: dict[tuple[str, int, int], Heads] = {}
        for n in sizes:
            sets["without", n, 0] = tuple(best[:n])
            sets["only", n, 0] = tuple(pair for pair in every if pair not in set(best[:n]))
            for seed in range(seeds):
                sets["random", n, seed] = tuple(
                    every[i] for i in sorted(rng.choice(len(every), n, replace=False))
                )
            if prefix_attention is not None:
                largest = np.argsort(-prefix_attention.ravel(), kind="stable")[:n]
                sets["mass", n, 0] = tuple(every[i] for i in largest)
        found = knock_out(
            model,
            replace(asked, examples=tuple(asked.examples[i] for i in judged)),
            units=[Unit({"name": str(name)}, heads) for name, heads in sets.items()],
            replacement=replacement or table.replacement,
            phase=phase or table.phase,
            metric=metric,
            other_metrics=(),
            augmentation=table.augmentation,
            file=own_file,
            progress=progress,
        )
        # Control of the other half, and what is left of it.
        whole[judged] = found.whole
        for i, (kind, n, seed) in enumerate(sets):
            draws = left.setdefault(
                (kind, n), np.zeros((seeds if kind == "random" else 1, len(whole)))
            )
            draws[seed, judged] = found.whole - found.values[:, i]
    # Shares over the prompts of both halves; random draws are averaged.
    rows = []
    for (kind, n), draws in left.items():
        part = asked.by_prompt(draws.mean(0))[:, None]
        share, low, high = share_interval(part, asked.by_prompt(whole))
        row = {"kind": kind, "heads": n, "left": share[0], "low": low[0], "high": high[0]}
        rows.append(row | {"prompts": len(prompts)})
    frame = pd.DataFrame(rows).sort_values(["kind", "heads"], ignore_index=True)
    return JointCurve(metric_name, frame)
