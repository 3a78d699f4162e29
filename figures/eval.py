"""Figure eval: mean ratings (1 to 5) by base method and criterion, without and with LaPA2; "no
judge" where there are none."""

import numpy as np
import pandas as pd
from house import COLUMN, render

from lapa2_interp.scoring.equal_perplexity import distinguishing_columns
from lapa2_interp.plots import COLOURS, Drawing, error_bars, new_figure, plain_axes


def draw(table: pd.DataFrame) -> Drawing:
    """Figure eval: mean ratings (1 to 5) by base method and criterion, without and with LaPA2; "no
    judge" where there are none.

    Args:
        table: tables/eval.csv: columns rater, model, task, method, variant, length, arm, criterion,
            mean, low, high.
    """
    raters = list(dict.fromkeys(table["rater"])) if len(table) else []
    figure = new_figure(COLUMN * max(1, len(raters)), 2.5)
    panels = np.atleast_1d(figure.subplots(1, max(1, len(raters))))
    if not raters:
        panels[0].text(0.5, 0.5, "no judge", ha="center", va="center", fontsize=14, color="#777777")
        panels[0].set_axis_off()
        return figure
    for panel, rater in zip(panels, raters, strict=True):
        part = table[table["rater"] == rater]
        part = part.assign(variant=part["variant"].astype(object).fillna(""))
        keys = [
            *distinguishing_columns(part, ["method", "task", "variant", "length", "model"]),
            "criterion",
        ]
        kinds = pd.MultiIndex.from_frame(part[keys].drop_duplicates())
        arms = list(dict.fromkeys(part["arm"]))
        for i, arm in enumerate(arms):
            own = part[part["arm"] == arm].set_index(keys).reindex(kinds)
            width = 0.8 / len(arms)
            x = np.arange(len(kinds)) + (i - (len(arms) - 1) / 2) * width
            look = {"color": COLOURS[i % len(COLOURS)], "error_kw": {"lw": 0.8}}
            panel.bar(x, own["mean"], width, yerr=error_bars(own), label=arm, **look)
        names = ["\n".join(str(word) for word in kind if word) for kind in kinds]
        panel.set_xticks(range(len(kinds)), names, fontsize=6)
        panel.set_ylim(1, 5)
        panel.set_title(rater, fontsize=9)
        panel.legend(frameon=False, fontsize=7)
        plain_axes(panel, "", "mean rating")
    return figure


if __name__ == "__main__":
    render("eval", draw)
