# %% [markdown]
# # Table half: is the second half of a text less on target than the first?
#
# Air-Decoding without LaPA2. The paper does not say how it cuts; here the tokens of the whole text,
# prompt included, are cut evenly. With LaPA2 beside it, which the paper does not show.
#
#     python analyses/paper/half.py results/quick

# %%
import pandas as pd

from analyses.lab.items import open_item
from analyses.lab.reported import paper_number

item = open_item(
    "half",
    "Attribute relevance of the first and the second half of Air-Decoding's texts",
    "sent_topic",
)
cells = item.cells
cells = item.require_cells(cells[cells["method"] == "air-decoding"], "air-decoding")
longest = int(cells["max_length"].max())
lengths = (longest // 2, longest)
halves = item.data.scores(cells, lengths, parts=2, metrics=("accuracy",))
full = item.data.scores(cells, lengths, metrics=("accuracy",))
scores = pd.concat([halves, full], ignore_index=True)
table = item.table(scores, cells, {"": "full"})
table = table[~table["metric"].str.startswith("dist")]

# %%
for where, words, group in item.data.groups(cells[cells["alpha"] == 0]):
    own = int(group["max_length"].max())
    for length in [*(shorter for shorter in lengths if shorter < own), own]:
        one, two = (where | {"arm": "baseline", "length": length, "part": part} for part in (1, 2))
        at = length if length in (256, 512) else 512
        known = [
            paper_number("half", task=where["task"], length=at, variant=part, metric="acc")
            for part in ("first", "second")
        ]
        text = f"the second half is less on target: {words}, {length} tokens (paper: {at})"
        item.add_claim(text, scores, one, two, "acc", "less", known[1] - known[0])

# %%
item.write(
    table, ["first and second: the halves of a text (in the CSV parts 1 and 2, and 0 the whole)."]
)
