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
from analyses.lab.style import legend_below, name_ends
from lapa2_interp.plots import COLOURS, new_figure, plain_axes

NAMES = {
    "baseline": "no bias",
    "lapa2": "LaPA², all heads",
    "head-selective": "LaPA², 24 chosen heads",
    "lapa2-constant": "constant bias, all heads",
    "split-softmax": "split-softmax",
    "instaboost": "InstABoost",
    "spotlight-per-head": "Spotlight",
    "guidance": "guidance",
    "message in every user turn": "message in every user turn",
    "message in the first user turn": "message in the first user turn",
}
EFFECTS = {"attention": "attention on the message", "js": "effect (js), 1/1000 nats"}
SHOWN = {
    "baseline": COLOURS[0],
    "lapa2": COLOURS[2],
    "head-selective": COLOURS[1],
    "lapa2-constant": COLOURS[6],
    "guidance": COLOURS[5],
    "message in every user turn": COLOURS[4],
}
"""Colours of the ways that the figure names; the others are grey."""
LIMIT = 1.15
"""Largest cost of the strengths in the left panel."""
TITLE = "The plain model loses a system message; a bias in 24 chosen heads keeps more of it"


def draw(table: pd.DataFrame) -> Figure:
    """Left: adherence above chance by turn, of every way's strongest setting that costs `LIMIT` at
    most, with 95 % intervals of no bias and of the chosen heads. Right: adherence at the last turn
    of all strengths against cost, with 95 % intervals."""
    figure = new_figure(7.6, 3.5)
    figure.suptitle(TITLE, fontsize=9, x=0.02, ha="left")
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    costs = table[table["measure"] == "ln cost"].groupby(["family", "strength"])["mean"].mean()
    above = table[table["measure"] == "above"].assign(turn=lambda rows: rows["turn"].astype(int))
    last = above["turn"].max()
    costs -= costs["baseline"].iloc[0]
    named = {}
    present = [name for name in NAMES if name in set(table["family"])]
    for family in sorted(present, key=lambda name: name in SHOWN):
        colour, is_shown = SHOWN.get(family, "0.78"), family in SHOWN
        own = np.exp(costs[family])
        allowed = own[own <= LIMIT]
        if len(allowed):
            shown = above[(above["family"] == family) & (above["strength"] == allowed.index.max())]
            left.plot(shown["turn"], shown["mean"], color=colour, lw=1.6 if is_shown else 0.8)
            if is_shown:
                named[NAMES[family]] = (*shown[["turn", "mean"]].iloc[-1], colour)
            if family in ("baseline", "head-selective"):
                left.fill_between(
                    shown["turn"], shown["low"], shown["high"], color=colour, alpha=0.12, lw=0
                )
        ends = above[(above["family"] == family) & (above["turn"] == last)]
        x, size = own[ends["strength"]].to_numpy(), 5 if is_shown else 3
        right.plot(x, ends["mean"], "o", color=colour, ms=size)
        right.vlines(x, ends["low"], ends["high"], color=colour, lw=1 if is_shown else 0.7)
    left.set_xticks(range(1, last + 1))
    left.set_xlim(1, 1.7 * last)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    plain_axes(left, "turn", "adherence above chance")
    plain_axes(right, "perplexity of answers, times that of no bias", f"at turn {last}")
    name_ends(left, named, 0.6, 0.06)
    return figure


def draw_why(effect: pd.DataFrame, cross: pd.DataFrame) -> Figure:
    """Left and middle: attention on the message and its effect by turn. Right: adherence at the
    last turn after each history, answered without and with the bias. Lines: 95 % intervals."""
    figure = new_figure(7.4, 2.8)
    panels = figure.subplots(1, 3)
    for axes, (measure, words) in zip(panels, EFFECTS.items(), strict=False):
        rows = effect[effect["measure"] == measure]
        for family, own in rows.groupby("family", sort=False):
            colour, name = SHOWN[family], NAMES[family]
            axes.plot(own["turn"], own["mean"], "o-", ms=3, lw=1.2, color=colour, label=name)
            axes.vlines(own["turn"], own["low"], own["high"], color=colour, lw=0.7)
        axes.set_yscale("log")
        plain_axes(axes, "turn", words)
    for i, (answer, own) in enumerate(cross.groupby("answer", sort=False)):
        at = np.arange(len(own)) + 0.3 * (i - 0.5)
        panels[2].bar(
            at,
            own["mean"],
            0.26,
            color=SHOWN[answer],
            alpha=0.6,
            label=f"answered: {NAMES[answer]}",
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
