"""The picture of README.md: how a system message loses its hold, without and with the bias.

    python analyses/instructions/draw_fade.py

effect.csv is of analyses/instructions/why.py. Left: attention on the system message by turn, mean
over layers, heads and the tokens of an answer. Right: how far the probabilities of the next token
change when the message is hidden (Jensen-Shannon divergence). Bands are 95 % intervals over
messages.
"""

import pandas as pd

from analyses.lab import FIGURES
from lapa2_interp.plots import COLOURS, Drawing, new_figure, plain_axes

ARMS = {
    "baseline": ("plain model", COLOURS[0]),
    "lapa2": ("LaPA², all heads", COLOURS[2]),
    "head-selective": ("LaPA², 24 chosen heads", COLOURS[1]),
}
PANELS = {
    "attention": (100, "attention on the\nsystem message (%)"),
    "js": (1, "effect of the\nsystem message (1/1000 nats)"),
}
"""Of each measure a factor, and what its axis is called."""


def draw(effect: pd.DataFrame) -> Drawing:
    """Two panels with a curve for each arm, which is named in the right one."""
    figure = new_figure(6.8, 2.5)
    for axes, (measure, (factor, label)) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for family, (name, colour) in ARMS.items():
            rows = effect[(effect["family"] == family) & (effect["measure"] == measure)]
            turn, mean = rows["turn"], factor * rows["mean"]
            axes.plot(turn, mean, "o-", ms=3, lw=1.4, color=colour)
            axes.fill_between(
                turn, factor * rows["low"], factor * rows["high"], color=colour, alpha=0.12, lw=0
            )
            if measure == "js":
                height = {"baseline": 0, "lapa2": 4}.get(family, 0)
                end = (8.3, mean.iloc[-1] + height)
                axes.annotate(
                    name, end, color=colour, fontsize=7, va="center", annotation_clip=False
                )
        plain_axes(axes, "turn of the chat", label)
        axes.set(ylim=(0, None), xlim=(0.7, 8.3), xticks=range(1, 9))
    return figure


if __name__ == "__main__":
    drawing = draw(pd.read_csv(FIGURES / "instructions" / "effect.csv"))
    drawing.savefig(FIGURES / "instructions" / "fade.png")
