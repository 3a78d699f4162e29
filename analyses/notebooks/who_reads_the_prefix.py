# %% [markdown]
# # Who reads the prefix? Layer, KV head, head, token
#
# [![open in Colab](https://colab.research.google.com/assets/colab-badge.svg)][colab]
#
# [colab]: https://colab.research.google.com/github/-owner-/lapa2-interp/blob/main/docs/notebooks/who_reads_the_prefix.ipynb
#
# Attention says where a head looks. It does not say what would be lost if the head did not look.
# Here we hide the prefix from one part of the model at a time, and measure the control that is
# lost. *Control* is how far the predictions after opposite prefixes are apart. Hiding is called a
# *knock-out*.
#
# **Running time:** about four minutes on two CPU cores, with SmolLM2-135M.
#
# The measurements are small, with 8 prompts, 16 tokens, and the heads of the three best layers. The
# command `lapa2 circuits smollm2-135m --task sentiment --out results/circuits` tests all heads.

# %%
# Where the package is not installed, as on Colab, first take the # off the next line.
# # !pip install -q git+https://github.com/-owner-/lapa2-interp && lapa2 fetch
import os

import numpy as np
from IPython.display import HTML

from lapa2_interp import circuits, generate, load_model, methods, models, report

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder

# %% [markdown]
# ## One prompt: which layers read the prefix?
#
# The model reads one text after "Very positive:" and after "Very negative:". `effect` is the
# control that is lost when a layer cannot see the prefix, in nats for each step.

# %%
model = load_model(MODEL)
one = circuits.ContrastSet.of(model, "sentiment", prompts=["The lake"], tokens=16)
circuits.knock_out(model, one, over="layer").frame().head(3).round(4)

# %% [markdown]
# ## Eight prompts
#
# With eight prompts there are 95 % intervals over prompts.

# %%
prompts = methods.load_task("sentiment").prompts.texts[:8]
contrast_set = circuits.ContrastSet.of(model, "sentiment", prompts=prompts, tokens=16)
layers = circuits.knock_out(model, contrast_set, over="layer")
layers.frame().head(8).round(4)

# %% [markdown]
# ## KV heads and heads of the best three layers
#
# Several query heads share one KV head, which has their keys and values. `p_max` is corrected for
# the number of heads, but not for the choice of the layers on the same prompts.

# %%
best_layers = {int(layer) for layer in layers.frame()["layer"].head(3)}


def of_best_layers(over):
    units = circuits.make_units(model, contrast_set, over)
    return [unit for unit in units if unit.labels["layer"] in best_layers]


kv = circuits.knock_out(model, contrast_set, units=of_best_layers("kv"))
kv.frame().head(6).round(4)

# %%
heads = circuits.knock_out(model, contrast_set, units=of_best_layers("head"))
heads.frame().head(10).round(4)

# %% [markdown]
# ## Attention against effect
#
# Each point is a head of these layers. Many heads give the prefix attention, and few lose control
# without it.

# %%
mass = circuits.prefix_attention_by_head(model, contrast_set)
where = heads.frame()
where["attention"] = [mass[row.layer, row.head] for row in where.itertuples()]
where.plot.scatter(
    "attention", "effect", xlabel="attention on the prefix", ylabel="lost js, nats a step"
)

# %% [markdown]
# ## Which token of the prefix?

# %%
position = circuits.knock_out(model, contrast_set, over="position")
first = contrast_set.examples[0].layouts[0]
tokens = first.tokens[first.n_bos :]
rows = position.frame()
rows.insert(1, "token", [tokens[i] for i in rows["position"]])
rows.round(4)

# %% [markdown]
# ## Another replacement gives another number
#
# `cut` hides the keys, so that the attention goes elsewhere. `resample` puts the keys and values of
# the opposite prefix in their place. Some heads lose much under `cut` and nothing under
# `resample`. Such a head reads where the prefix is, and not what it says.

# %%
few = [unit for unit in heads.units if unit.heads[0] in set(heads.best(6))]
for replacement in ("cut", "zero", "resample", "mean"):
    again = circuits.knock_out(model, contrast_set, units=few, replacement=replacement)
    lost = zip(few, again.values.mean(0), strict=True)
    print(f"{replacement:>9}", {unit.name: round(float(effect), 5) for unit, effect in lost})

# %% [markdown]
# ## Together
#
# Effects of single heads do not add up. So we choose the best heads in one half of the prompts, and
# hide the prefix from all of them in the other half.

# %%
curve = circuits.joint_curve(model, heads, sizes=(1, 2, 4, 8), metric="js", seeds=2)
curve.plot()

# %% [markdown]
# ## A model whose answer is known
#
# The weights of `planted` were set by hand. Its carrier and its relay bring the prefix to the
# prediction. Its decoy attends to the prefix more than any other head, and writes nothing. The
# knock-outs must find the carrier and the relay. A ranking by attention finds the decoy.

# %%
toy, key = load_model("planted"), models.answer_key("planted")
known = circuits.knock_out(toy, circuits.ContrastSet.of(toy, "sentiment", tokens=16), metric="lex")
names = {head: role for role, head in key.heads.items()}
table = known.frame()
table["role"] = [names.get((row.layer, row.head), "idle") for row in table.itertuples()]
mass = circuits.prefix_attention_by_head(toy, known.contrast_set)
table["attention"] = [mass[row.layer, row.head] for row in table.itertuples()]
table[["layer", "head", "role", "effect", "low", "high", "p_max", "attention"]].round(4)

# %% [markdown]
# The viewer shows one text of this model. It opens at the decoy (1.3), which gives the prefix
# nearly all its attention. The carrier is 1.2. Choose it in the grid.

# %%
hard = {"prefixes": "hard"}
made = generate(toy, "The lake", attribute="positive", parameters=hard, alpha=[0, 0.5], length=12)
shown = report.view(made, model=toy)
shown.head = key.heads["decoy"]
HTML(shown.frame)

# %% [markdown]
# ## Checks

# %%
assert known.best(2) == (key.heads["carrier"], key.heads["relay"])
assert table.loc[table["attention"].idxmax(), "role"] == "decoy"
every_head = [list(pair) for unit in layers.units for pair in unit.heads]
everything = circuits.knock_out(model, contrast_set, over={"all heads": every_head})
assert np.abs(everything.values[:, 0] - everything.total).max() < 1e-5  # nothing is left
assert layers.frame()["effect"].max() > layers.noise
print("all checks hold")
