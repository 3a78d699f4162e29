"""Figure where: accuracy by attribute without a bias, with the bias in all heads, and in 24 chosen
heads; for the prefix alone at equal perplexity, and for Air-Decoding.

    python analyses/heads/draw_where.py

It reads figures/steering and figures/bases, and writes into figures/heads.
"""

import pandas as pd

from analyses.lab import FIGURES
from analyses.lab.style import legend_below
from lapa2_interp.plots import COLOURS, Drawing, new_figure, plain_axes

SCORER = "acc (linear)"
CHANCE = {"positive": 50, "negative": 50, "world": 25, "sports": 25, "business": 25, "science": 25}
PLACES = {
    "no bias": ("#777777", "o"),
    "all heads": (COLOURS[1], "s"),
    "24 heads": (COLOURS[2], "^"),
}
OFFSETS = (-0.24, 0.0, 0.24)
"""Heights of the markers of `PLACES` within the row of an attribute, so that none hides another."""
RATIO, BANNED = 1.25, "prefix words banned"
AIR_ARMS = {"baseline": "no bias", "all heads 0.5": "all heads",
            "chosen heads 0.8": "24 heads", "chosen heads 1": "24 heads"}  # fmt: skip


def prefix_alone(curves: pd.DataFrame, equal: pd.DataFrame) -> pd.DataFrame:
    """Accuracy of each attribute and set of heads, at `RATIO` times the perplexity of no bias.

    Args:
        curves: figures/steering/steering.curves.csv, for no bias at its own perplexity.
        equal: figures/steering/steering.equal.csv.

    Returns:
        Columns: attribute, heads, mean, low, high, in percent.
    """
    base = curves[curves["family"] == "baseline"].assign(heads="no bias")
    families = {"lapa2": "all heads", "head-selective": "24 heads"}
    steered = equal[(equal["ratio"] == RATIO) & equal["family"].isin(list(families))]
    steered = steered.assign(
        heads=steered["family"].map(families), mean=steered["value"].astype(float)
    )
    rows = pd.concat([base, steered])
    rows = rows[(rows["words"] == BANNED) & (rows["metric"] == SCORER)]
    return rows[["attribute", "heads", "mean", "low", "high"]]


def air_decoding(bases: pd.DataFrame) -> pd.DataFrame:
    """The same of Air-Decoding; alpha is 0.8 (sentiment) or 1 (topic) in 24 heads, and 0.5 in all.

    Args:
        bases: figures/bases/bases.csv.
    """
    rows = bases[bases["variant"].isin(["(a), omega 140", "(c), omega 60"])]
    rows = rows[(rows["metric"] == SCORER) & rows["arm"].isin(list(AIR_ARMS))]
    return rows.assign(heads=rows["arm"].map(AIR_ARMS))[
        ["attribute", "heads", "mean", "low", "high"]
    ]


def draw(panels: dict[str, pd.DataFrame]) -> Drawing:
    """A panel for each table, a row for each attribute, a marker for each set of heads, one above
    the other; lines are 95 % intervals over prompts; a grey tick is chance."""
    figure = new_figure(7.0, 3.3)
    axes = figure.subplots(1, len(panels), sharey=True)
    for panel, (title, table) in zip(axes, panels.items(), strict=True):
        table = table.set_index(["attribute", "heads"])
        for height, (attribute, chance) in enumerate(CHANCE.items()):
            panel.plot([chance] * 2, [height - 0.38, height + 0.38], color="0.6", lw=1, zorder=1)
            for offset, (heads, (colour, marker)) in zip(OFFSETS, PLACES.items(), strict=True):
                row = table.loc[attribute, heads]
                away = [[row["mean"] - row["low"]], [row["high"] - row["mean"]]]
                panel.errorbar(row["mean"], height + offset, xerr=away, color=colour,
                               marker=marker, ms=4, lw=1.2, ls="",
                               label=heads if height == 0 else None)  # fmt: skip
        panel.set_yticks(range(len(CHANCE)), list(CHANCE))
        panel.set_xlim(0, 100)
        panel.set_title(title, fontsize=8)
        plain_axes(panel, "texts that have the attribute (%, by linear)", "")
    axes[0].invert_yaxis()
    axes[0].plot([], [], color="0.6", lw=1, label="chance")
    legend_below(figure, [("", axes[0], pd.DataFrame())], 4)
    return figure


if __name__ == "__main__":
    curves, equal, bases = (
        pd.read_csv(FIGURES / name)
        for name in (
            "steering/steering.curves.csv",
            "steering/steering.equal.csv",
            "bases/bases.csv",
        )
    )
    figure = draw(
        {
            "prefix alone: alpha for 1.25 times the perplexity": prefix_alone(curves, equal),
            "Air-Decoding: alpha 0.5 (all heads), 0.8 or 1 (24 heads)": air_decoding(bases),
        }
    )
    out = FIGURES / "heads"
    out.mkdir(exist_ok=True)
    figure.savefig(out / "where.png")
    print(out / "where.png")
