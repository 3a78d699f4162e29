# %% [markdown]
# # Figure decay: does control fade as the text grows?
#
# Attribute accuracy of the base methods against length. The paper: it declines for all three
# methods on both tasks.
#
#     python analyses/decay.py results/quick && python figures/decay.py results/quick

# %%
from analyses.lab.items import open_item
from analyses.lab.reported import paper_number

item = open_item("decay", "Accuracy of the base methods against length", "sent_topic")
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
