"""Figure deep: attention on the prefix to 8,000 tokens, and what later layers leave of LaPA2."""

import numpy as np
import pandas as pd
from house import legend_below, render

from lapa2_interp.plots import COLOURS, Drawing, band, layer_map, new_figure, plain_axes


def draw(table: pd.DataFrame, heads: pd.DataFrame) -> Drawing:
    """Figure deep: left, attention on the prefix against l, with the power laws of the paper;
    middle, by layer, which part of the law is left in three windows of l; right, attention on the
    prefix of every head in the last window, without LaPA2.

    Args:
        table: tables/deep.csv: columns quantity, l, upto, alpha, layer, mean, low, high.
        heads: tables/deep.heads.csv: columns l, alpha, layer, head, share.
    """
    figure = new_figure(7.2, 2.8)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1, 0.9))
    shares = table[table["quantity"] == "share"]
    shares = shares.assign(middle=np.sqrt(shares["l_kv"] * shares["upto"]))
    for colour, (alpha, part) in zip(COLOURS, shares.groupby("alpha"), strict=False):
        band(left, part, "middle", colour, lw=1, marker="o", ms=3, label=f"alpha {alpha:g}")
        first = part.iloc[0]
        law = first["mean"] * (part["middle"] / first["middle"]) ** (alpha - 1)
        left.plot(part["middle"], law, color=colour, lw=0.8, ls=":")
    left.set_xscale("log")
    left.set_yscale("log")
    left_law = table[table["quantity"] == "part of the law that is left"]
    starts = sorted(set(left_law["l_kv"]))
    for number, l in enumerate(dict.fromkeys((starts[0], starts[len(starts) // 2], starts[-1]))):
        colour = COLOURS[(number + 2) % len(COLOURS)]
        band(middle, left_law[left_law["l_kv"] == l], "layer", colour, lw=1, label=f"l from {l}")
    middle.axhline(1, color="#999999", lw=0.8, zorder=0)
    last = heads[(heads["l_kv"] == heads["l_kv"].max()) & (heads["alpha"] == 0)]
    grid = last.pivot_table(index="layer", columns="head", values="share").to_numpy()
    image = layer_map(right, np.log10(np.maximum(grid, 1e-6)), cmap="viridis")
    bar = figure.colorbar(image, ax=right)
    bar.set_label("log10 of the attention", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    plain_axes(left, "l_kv", "attention on the prefix")
    left.set_title("dotted: the derived law", fontsize=7)
    plain_axes(middle, "layer", "part of the law that is left")
    legend_below(figure, [("", left, shares), ("", middle, left_law)], 5)
    return figure


if __name__ == "__main__":
    render("deep", draw, "heads")
