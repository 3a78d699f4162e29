# %% [markdown]
# # LaPA2 on decoders the paper does not run
#
# ROSE, RSA-Control, GeDi, DExperts and Model Arithmetic in prefix-conditioned form on sentiment,
# with and without LaPA2 at our alpha for them (`lapa2 methods`). Nobody has reported this, so
# nothing is judged.
#
#     lapa2 sweep analyses/bases/related.toml --out results/quick
#     python analyses/bases/related.py results/quick

# %%
from analyses.lab.items import open_item

item = open_item("related", "LaPA2 on decoders the paper does not run")
cells = item.cells
item.write(item.table(item.data.scores(cells), cells))
