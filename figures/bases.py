"""Figure bases: accuracy against perplexity, without and with the bias in chosen heads."""

import pandas as pd
from house import METRIC_LABELS, legend_below, render, style_of

from analyses.lab.tables import rows_of_all_attributes
from lapa2_interp.plots import Drawing, crosses, new_figure, plain_axes

LOOKS = {"baseline": "o", "all heads": "s", "chosen heads": "^", "random heads": "D"}
NAMES = {"baseline": "no bias"}
SCORER = "acc (linear)"


def draw(table: pd.DataFrame) -> Drawing:
    """Figure bases: a panel for each part of the grid. A colour is a method, a marker a place of
    the bias. Solid lines join the strengths of the bias in chosen heads, dotted ones those of
    Air-Decoding's omega; 95 % intervals.

    Args:
        table: tables/bases.csv.
    """
    rows = rows_of_all_attributes(table[table["mean"].notna()])
    rows = rows[~rows["variant"].str.contains("eos block")]
    arms = rows.groupby(rows["variant"].str[:3])["arm"].nunique()
    parts = sorted(arms.index[arms > 1])  # a part of one arm has nothing to compare
    figure = new_figure(3.6 * max(1, len(parts)), 3.4)
    panels = figure.subplots(1, max(1, len(parts)), squeeze=False)[0]
    for part, panel in zip(parts, panels, strict=False):
        own = rows[rows["variant"].str.startswith(part)]
        y, x = (own[own["metric"] == metric] for metric in (SCORER, "ppl"))
        points = y.merge(x, on=["method", "variant", "arm"], suffixes=("", "_ppl"))
        points["place"] = points["arm"].str.replace(r" [\d.]+$", "", regex=True)
        points["strength"] = points["arm"].str.extract(r"([\d.]+)$", expand=False).astype(float)
        points["omega"] = (
            points["variant"].str.extract(r"omega ([\d.]+)", expand=False).astype(float)
        )
        for method, of_method in points.groupby("method", sort=False):
            colour, _ = style_of(str(method))
            usual = of_method.loc[of_method["place"] != "baseline", "variant"]
            here = of_method[of_method["variant"].isin(usual)].fillna({"strength": 0.0})
            curves = {
                "-": here[here["place"].isin(["baseline", "chosen heads"])].sort_values("strength"),
                ":": of_method[of_method["place"] == "baseline"].sort_values("omega"),
            }
            for style, curve in curves.items():
                panel.plot(curve["mean_ppl"], curve["mean"], color=colour, ls=style, lw=0.9)
            panel.plot([], [], color=colour, label=str(method))
            for label, of_place in of_method.groupby("place", sort=False):
                x = of_place[["mean_ppl", "low_ppl", "high_ppl"]]
                look = {"color": colour, "marker": LOOKS[str(label)], "ms": 5, "lw": 0.7, "ls": ""}
                crosses(panel, x.rename(columns=lambda name: name[:-4]), of_place, **look)
        panel.set_title(f"{part} {own['task'].iloc[0]}", fontsize=9)
        plain_axes(panel, METRIC_LABELS["ppl"], f"{METRIC_LABELS['acc']}, by linear")
    for label in points["place"].unique() if parts else ():
        look = {"marker": LOOKS[label], "ms": 5, "color": "0.4", "ls": ""}
        panels[-1].plot([], [], **look, label=NAMES.get(label, label))
    legend_below(figure, [("", panel, rows) for panel in panels], 5)
    return figure


if __name__ == "__main__":
    render("bases", draw)
