"""Figures instructions: does a message hold over the turns of a chat, and why not?

adherence.csv is of analyses/instructions/analyse.py, effect.csv and cross.csv of
analyses/instructions/why.py.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from analyses.lab.style import legend_below
from lapa2_interp.plots import COLOURS, new_figure, plain_axes

NAMES = {
    "baseline": "no bias",
    "lapa2": "LaPA², all heads",
    "head-selective": "LaPA², 24 heads",
    "lapa2-constant": "constant bias",
    "split-softmax": "split-softmax",
    "instaboost": "InstABoost",
    "spotlight-per-head": "Spotlight",
    "guidance": "guidance",
    "message in every user turn": "message in every user turn",
    "message in the first user turn": "message in the first user turn",
}
EFFECTS = {"attention": "attention on the message", "js": "effect (js), 1/1000 nats"}
LIMIT = 1.25
"""Largest cost of the strengths in the left panel."""


def draw(table: pd.DataFrame) -> Figure:
    """Left: adherence above chance by turn, of every way's strongest setting that costs 1.25 times
    at most. Right: adherence at the last turn against cost, with 95 % intervals."""
    figure = new_figure(7.4, 3.6)
    left, right = figure.subplots(1, 2)
    costs = table[table["measure"] == "ln cost"].groupby(["family", "strength"])["mean"].mean()
    above = table[table["measure"] == "above"].assign(turn=lambda rows: rows["turn"].astype(int))
    last = above["turn"].max()
    families = [name for name in NAMES if name in set(table["family"])]
    costs -= costs["baseline"].iloc[0]
    (start,) = above.query("family == 'baseline' and turn == @last")["mean"]
    for i, family in enumerate(families):
        colour, dashed = COLOURS[i % len(COLOURS)], "--" if i >= len(COLOURS) else "-"
        own = np.exp(costs[family])
        allowed = own[own <= LIMIT]
        if len(allowed):
            shown = above[(above["family"] == family) & (above["strength"] == allowed.index.max())]
            left.plot(
                shown["turn"], shown["mean"], dashed, color=colour, marker="o", ms=3, lw=1.2,
                label=NAMES[family],
            )  # fmt: skip
        else:
            left.plot([], [], dashed, color=colour, marker="o", ms=3, label=NAMES[family])
        ends = above[(above["family"] == family) & (above["turn"] == last)].sort_values("strength")
        x = own[ends["strength"]].to_numpy()
        begun = family not in ("baseline", *[name for name in NAMES if "turn" in name])
        right.plot(
            [1, *x] if begun else x, [start, *ends["mean"]] if begun else ends["mean"],
            dashed, color=colour, marker="o", ms=3, lw=1.2,
        )  # fmt: skip
        right.vlines(x, ends["low"], ends["high"], color=colour, lw=0.7)
    for cost in (1.1, LIMIT):
        right.axvline(cost, color="grey", ls=":", lw=0.8)
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    plain_axes(left, "turn", "adherence above chance")
    plain_axes(right, "perplexity of answers, times that of no bias", f"at turn {last}")
    legend_below(figure, [("", left, table)], 3)
    return figure


def draw_why(effect: pd.DataFrame, cross: pd.DataFrame) -> Figure:
    """Left and middle: attention on the message and its effect by turn. Right: adherence at the
    last turn after each history, answered without and with the bias. Lines: 95 % intervals."""
    figure = new_figure(7.4, 2.8)
    panels = figure.subplots(1, 3)
    for axes, (measure, words) in zip(panels, EFFECTS.items(), strict=False):
        rows = effect[effect["measure"] == measure]
        for i, (family, own) in enumerate(rows.groupby("family", sort=False)):
            axes.plot(
                own["turn"], own["mean"], marker="o", ms=3, lw=1.2, color=COLOURS[i],
                label=NAMES[family],
            )  # fmt: skip
            axes.vlines(own["turn"], own["low"], own["high"], color=COLOURS[i], lw=0.7)
        axes.set_yscale("log")
        plain_axes(axes, "turn", words)
    for i, (answer, own) in enumerate(cross.groupby("answer", sort=False)):
        at = np.arange(len(own)) + 0.3 * (i - 0.5)
        panels[2].bar(
            at, own["mean"], 0.26, color=COLOURS[i], alpha=0.6, label=f"answered: {NAMES[answer]}"
        )
        panels[2].vlines(at, own["low"], own["high"], color="0.15", lw=1.2)
    panels[2].set_xticks(range(2), [NAMES[name] for name in cross["history"].unique()])
    plain_axes(panels[2], "earlier answers by", "adherence above chance")
    legend_below(figure, [("", panels[0], effect)], 3)
    return figure


if __name__ == "__main__":
    parser = ScriptOptions("Figure instructions")
    parser.add_argument("folder", type=Path, nargs="?", default=FIGURES / "instructions")
    folder = parser.parse_args().folder
    draw(pd.read_csv(folder / "adherence.csv")).savefig(folder / "instructions.png", dpi=200)
    if (folder / "cross.csv").exists():
        effect, cross = (pd.read_csv(folder / f"{name}.csv") for name in ("effect", "cross"))
        draw_why(effect, cross).savefig(folder / "why.png", dpi=200)
