# %% [markdown]
# # Figure augmentation: what does LaPA2 do to the attention on the prefix?
#
# Prefix attention against step with and without LaPA2. The paper: it is higher throughout and falls
# more slowly, for all methods.
#
#     python analyses/paper/augmentation.py results/quick

# %%
from analyses.lab.items import open_item
from analyses.lab.style import draw_prefix_attention

item = open_item(
    "augmentation",
    "Attention on the prefix with and without LaPA2: sentiment and topic",
    "sent_topic",
    draw=draw_prefix_attention,
)
cells = item.cells
table, shown = item.attention_table(
    cells[cells["method"].isin(["prefix", "con-prefix", "air-decoding"])]
)

# %%
note = (
    "Mean over layers and heads of the exact prefix span; of methods with several prefixes, the"
    " target's."
)
item.write(table, [note], shown)
item.draw()
