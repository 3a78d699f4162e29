# %% [markdown]
# # Who reads the prefix? Layer, KV head, head, token
#
# Attention says where a head looks. It does not say what would be lost if it did not look. Here the
# prefix is hidden from one unit at a time, and the control that remains is measured. The unit is a
# layer, then a KV head, then a head, then a token of the prefix.
#
# Sweeps here are small: 8 prompts, 16 tokens, and the heads of the three best layers. The whole
# table of SmolLM2 comes with the repository (`figures/circuits/sentiment`), made by
# `lapa2 circuits smollm2-135m --task sentiment --out results/circuits`.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import HTML

import lapa2_interp
from lapa2_interp import generate, load_model
from lapa2_interp.circuits import (
    ContrastSet,
    joint_curve,
    knock_out,
    make_units,
    prefix_attention_by_head,
)
from lapa2_interp.methods import load_task
from lapa2_interp.models.planted import answer_key
from lapa2_interp.report import view

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder
figures = Path(lapa2_interp.__file__).parents[1] / "figures" / "circuits"

# %% [markdown]
# ## A model whose answer is known
#
# `planted` has a carrier, a relay, a reader, a suppressor, and a decoy that attends to the prefix
# more than any other head and writes nothing. The instrument must find the carrier and the relay.
# A ranking by attention finds the decoy.

# %%
toy, key = load_model("planted"), answer_key("planted")
known = knock_out(toy, ContrastSet.of(toy, "sentiment", tokens=16), metric="lex")
names = {head: role for role, head in key.heads.items()}
table = known.frame()
table["role"] = [names.get((row.layer, row.head), "idle") for row in table.itertuples()]
mass = prefix_attention_by_head(toy, known.contrast_set)
table["attention"] = [mass[row.layer, row.head] for row in table.itertuples()]
table[["layer", "head", "role", "effect", "low", "high", "p_max", "attention"]].round(4)

# %% [markdown]
# The viewer shows it on one text: the decoy (1.3) gives the prefix nearly all its attention, and
# the last lines say that nothing is lost without it. The carrier is 1.2; choose it in the grid.

# %%
made = generate(
    toy,
    "The lake",
    attribute="positive",
    parameters={"prefixes": "hard"},
    alpha=[0, 0.5],
    length=12,
)
shown = view(made, model=toy, circuits=figures / "planted")
shown.head = key.heads["decoy"]
HTML(shown.frame)

# %% [markdown]
# ## Layers of the model

# %%
model = load_model(MODEL)
prompts = load_task("sentiment").prompts.texts[:8]
contrast_set = ContrastSet.of(model, "sentiment", prompts=prompts, tokens=16)
layers = knock_out(model, contrast_set, over="layer")
layers.frame().head(8).round(4)

# %% [markdown]
# ## KV heads and heads of the best three layers
#
# A key or a value belongs to a KV head, which several query heads share. `effect` is what is lost
# without the unit; its interval is over prompts. `p_max` is corrected for the number of units, and
# not for the choice of the layers on the same prompts.

# %%
best_layers = {int(layer) for layer in layers.frame()["layer"].head(3)}


def of_best_layers(over):
    return [
        unit
        for unit in make_units(model, contrast_set, over)
        if unit.labels["layer"] in best_layers
    ]


kv = knock_out(model, contrast_set, units=of_best_layers("kv"))
kv.frame().head(6).round(4)

# %%
heads = knock_out(model, contrast_set, units=of_best_layers("head"))
heads.frame().head(10).round(4)

# %%
print(
    f"noise {heads.noise:.1e}; halves of the prompts agree with correlation {heads.split_half:.2f}"
)
heads.with_metric("lex").frame().head(5).round(4)

# %% [markdown]
# The whole table: every head, 15 prompts, 32 tokens. Its order of the heads above is compared with
# theirs.

# %%
shipped = figures / "sentiment" / "head.csv"
if MODEL == "smollm2-135m" and shipped.is_file():
    whole_table = pd.read_csv(shipped).set_index(["layer", "head"])
    small = heads.frame().set_index(["layer", "head"])["effect"]
    agreed = small.corr(whole_table["effect"].loc[small.index], method="spearman")
    print(f"rank correlation with the whole table: {agreed:.2f}")
    print(whole_table[["effect", "low", "high", "lex_share", "p_max"]].head(12).round(4))

# %% [markdown]
# ## Attention against effect

# %%
mass = prefix_attention_by_head(model, contrast_set)
where = heads.frame()
figure, axes = plt.subplots(figsize=(4.5, 3.2), layout="constrained")
axes.scatter([mass[row.layer, row.head] for row in where.itertuples()], where["effect"], s=14)
for row in where.head(4).itertuples():
    axes.annotate(f"{row.layer}.{row.head}", (mass[row.layer, row.head], row.effect))
axes.axhline(0, color="0.7", lw=0.6)
axes.set(xlabel="attention on the prefix", ylabel="lost js, nats a step")
plt.show()

# %% [markdown]
# ## Which token of the prefix?

# %%
position = knock_out(model, contrast_set, over="position")
tokens = contrast_set.examples[0].layouts[0].tokens[1 : 1 + len(position.units)]
rows = position.frame()
rows.insert(1, "token", [tokens[i] for i in rows["position"]])
rows.round(4)

# %% [markdown]
# ## Another replacement gives another number
#
# `cut` blocks the keys, and the attention goes elsewhere. `resample` puts the opposite prefix's
# keys and values in their place. A head that loses much under `cut` and nothing under `resample`
# reads where the prefix is and not what it says: without it, it reads something else, and that
# disturbs more than what is missing.

# %%
few = [unit for unit in heads.units if unit.heads[0] in set(heads.best(6))]
for replacement in ("cut", "zero", "resample", "mean"):
    again = knock_out(model, contrast_set, units=few, replacement=replacement)
    print(
        f"{replacement:>9}",
        {u.name: round(float(e), 5) for u, e in zip(few, again.values.mean(0), strict=True)},
    )

# %% [markdown]
# ## Together
#
# Of the heads of these layers, the best are chosen in one half of the prompts and judged in the
# other.

# %%
curve = joint_curve(model, heads, sizes=(1, 2, 4, 8), metric="js", seeds=2)
curve.plot()

# %% [markdown]
# ## Checks

# %%
assert known.best(2) == (key.heads["carrier"], key.heads["relay"])
assert table.loc[table["attention"].idxmax(), "role"] == "decoy"
every_head = [list(pair) for unit in layers.units for pair in unit.heads]
everything = knock_out(model, contrast_set, over={"all heads": every_head})
assert np.abs(everything.values[:, 0] - everything.total).max() < 1e-5  # nothing is left
assert layers.frame()["effect"].max() > layers.noise
print("all checks hold")
