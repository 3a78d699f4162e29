"""Figure messages: do exact messages hold, and what holds them?

    python analyses/messages/draw.py qwen2.5-coder-1.5b-instruct

reads shares.csv and chance.csv of analyses/messages/analyse.py. Left: answers that follow by turn
in every arm, with 95 % intervals of no bias and of the chosen heads, and what a neutral message
gives by chance. Middle: attention on the message. Right: answers without a bias, by kind.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analyses.families.grids import ADDITION, MODELS, NO_BIAS
from analyses.lab.scripts import ScriptOptions
from analyses.lab.style import name_ends
from analyses.messages.chats import ALL, CHOSEN, CONSTANT, OUT, REPEATED
from lapa2_interp.plots import COLOURS, new_figure, plain_axes

SHOWN = {
    NO_BIAS: COLOURS[0],
    CHOSEN: COLOURS[1],
    ALL: COLOURS[2],
    REPEATED: COLOURS[3],
    CONSTANT: COLOURS[6],
    ADDITION: COLOURS[5],
}
"""Arms and their colours."""
BANDS = (NO_BIAS, CHOSEN)
"""Arms with an interval."""


def main() -> None:
    """Draw the figure."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    shares, chance = (
        pd.read_csv(options.out / f"{name}.csv").query("model == @options.model")
        for name in ("shares", "chance")
    )
    draw(shares, chance).savefig(options.out / "messages.png")


def draw(shares: pd.DataFrame, chance: pd.DataFrame) -> Figure:
    """Three panels over the turns of a chat."""
    figure = new_figure(10.2, 3.2)
    left, middle, right = panels = figure.subplots(1, 3)
    names: list[dict[str, tuple[float, float, str]]] = []
    every = shares[shares["kind"] == "all"]
    for axes, metric in ((left, "followed"), (middle, "attention")):
        named = {}
        for arm, colour in SHOWN.items():
            own = every[(every["arm"] == arm) & (every["metric"] == metric)].sort_values("turn")
            if own.empty:
                continue
            axes.plot(own["turn"], own["mean"], "o-", ms=2.5, lw=1.3, color=colour)
            if arm in BANDS:
                axes.fill_between(
                    own["turn"], own["low"], own["high"], color=colour, alpha=0.12, lw=0
                )
            named[arm] = (*own[["turn", "mean"]].iloc[-1], colour)
        if metric == "followed":
            own = chance[chance["kind"] == "all"].sort_values("turn")
            axes.plot(own["turn"], own["mean"], "--", lw=1, color="0.5")
            named["chance"] = (*own[["turn", "mean"]].iloc[-1], "0.5")
        names.append(named)
    plain = shares[(shares["arm"] == NO_BIAS) & (shares["metric"] == "followed")]
    kinds = [kind for kind in chance["kind"].unique() if kind != "all"]
    named = {}
    for kind, colour in zip(kinds, COLOURS[1:], strict=False):
        own = plain[plain["kind"] == kind].sort_values("turn")
        right.plot(own["turn"], own["mean"], "o-", ms=2.5, lw=1.3, color=colour)
        named[kind] = (*own[["turn", "mean"]].iloc[-1], colour)
    names.append(named)
    plain_axes(left, "turn", "answers that follow their message (%)")
    plain_axes(middle, "turn", "attention on the message (%)")
    plain_axes(right, "turn", "answers without a bias that follow (%)")
    last = int(every["turn"].max())
    for axes, named in zip(panels, names, strict=True):
        axes.set(xlim=(0.5, 1.6 * last), xticks=range(1, last + 1, 3), ylim=(0, None))
        name_ends(axes, named, 0.68, 0.06)
    return figure


if __name__ == "__main__":
    main()
