"""Figure local_attn: share of the nearest k keys outside the prefix against step, solid without and
dashed with LaPA2."""

import pandas as pd
from house import by_task, display_name, legend_below, render

from lapa2_interp.plots import COLOURS, Drawing, band, plain_axes


def draw(table: pd.DataFrame) -> Drawing:
    """Figure local_attn: share of the nearest k keys outside the prefix against step, solid without
    and dashed with LaPA2.

    Args:
        table: tables/local_attn.csv: columns task, method, arm, k, without_bos, step, mean, low,
            high.
    """
    shown = table[~table["without_bos"].astype(bool)]
    figure, panels = by_task(shown, 2.9, 2.7)
    for task, panel, part in panels:
        for number, (k, line_of_k) in enumerate(part.groupby("k", sort=False), 1):
            for arm, line in line_of_k.groupby("arm", sort=False):
                colour = COLOURS[number]
                plain = arm == "baseline"
                name = f"k = {k}{'' if plain else ', with LaPA2'}"
                band(panel, line, "step", colour, ls="-" if plain else "--", lw=1.1, label=name)
        panel.set_title(f"{task}, {display_name(part['method'].iloc[0])}", fontsize=9)
        panel.set_ylim(0, 1.05)
        plain_axes(panel, "generation step t", "share of the nearest k")
    legend_below(figure, panels, 4)
    return figure


if __name__ == "__main__":
    render("local_attn", draw)
