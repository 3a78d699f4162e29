# %% [markdown]
# # Figure decay: does control fade as the text grows?
#
# Attribute accuracy of the base methods against length. The paper: it declines for all three
# methods on both tasks.
#
#     python analyses/paper/decay.py results/quick

# %%
import pandas as pd

from analyses.lab.items import open_item
from analyses.lab.reported import paper_number
from analyses.lab.style import METRIC_LABELS, by_task, display_name, legend_below, style_of
from analyses.lab.tables import rows_of_all_attributes
from lapa2_interp.plots import Drawing, band, plain_axes


def draw(table: pd.DataFrame) -> Drawing:
    """Figure decay: accuracy against length, one line per method and one panel per task, 95 %
    bands.

    Args:
        table: tables/decay.csv: columns task, method, length, metric, attribute, mean, low, high.
    """
    shown = rows_of_all_attributes(table[table["mean"].notna() & (table["metric"] == "acc")])
    figure, panels = by_task(shown)
    for task, panel, part in panels:
        for method, line in part.groupby("method", sort=False):
            colour, marker = style_of(str(method))
            band(
                panel,
                line,
                "length",
                colour,
                marker=marker,
                ms=4,
                lw=1.3,
                label=display_name(str(method)),
            )
        panel.set_xticks(sorted(part["length"].unique()))
        panel.set_title(task, fontsize=9)
        plain_axes(panel, "tokens", METRIC_LABELS[part["metric"].iloc[0]])
    legend_below(figure, panels)
    return figure


# %%
item = open_item("decay", "Accuracy of the base methods against length", "sent_topic", draw=draw)
cells = item.cells
cells = cells[(cells["alpha"] == 0) & (cells["method"] != "freectrl")]
cells = item.require_cells(cells, "a method without LaPA2, FreeCtrl aside,")
lengths = item.data.lengths(cells)
scores = item.data.scores(cells, lengths, metrics=("accuracy",))
table = item.table(scores, cells)
table = table[~table["metric"].str.startswith("dist")]

# %% [markdown]
# The same texts at two lengths, so the comparison is paired.

# %%
for where, words, group in item.data.groups(cells):
    longest = int(group["max_length"].max())
    first = min(*lengths, longest)
    sides = [where | {"length": length} for length in (first, longest)]
    at = {
        "table": "sent_topic",
        "task": where["task"],
        "method": where["method"],
        "lapa2": False,
        "metric": "acc",
    }
    known = [paper_number(**at, length=length) for length in (64, 512)]
    text = f"accuracy falls from {first} to {longest} tokens: {words} (paper: 64 to 512)"
    item.add_claim(text, scores, *sides, "acc", "less", known[1] - known[0])

# %%
item.write(table)
item.draw()
