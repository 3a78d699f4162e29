# %% [markdown]
# # Figure augmentation_large: what does LaPA2 do to the attention on the prefix?
#
# NegPrompt and PREADD on detoxification (the paper: LLaMA-2 7B). It decays without LaPA2 and stays
# higher with it.
#
#     python analyses/paper/augmentation_large.py results/quick

# %%
from analyses.lab.items import open_item
from analyses.lab.style import draw_prefix_attention

item = open_item(
    "augmentation_large",
    "Attention on the prefix with and without LaPA2: detoxification",
    "detox",
    draw=draw_prefix_attention,
)
cells = item.cells
table, shown = item.attention_table(cells[cells["method"].isin(["negprompt", "preadd"])])

# %%
note = (
    "Mean over layers and heads of the exact prefix span; of methods with several prefixes, the"
    " target's."
)
item.write(table, [note], shown)
item.draw()
