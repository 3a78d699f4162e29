# %% [markdown]
# # What do heads write when they read the prefix?
#
# A head's output is a sum over keys, so it can be split by the part of the text that it comes from:
# the prefix, BOS, the prompt, or what is generated. Sent through the final norm and the
# unembedding, each part is a number of logits. All parts of all heads, with MLPs and the embedding,
# sum to the logit difference itself.
#
# This is the direct effect. A head that writes for other heads has none: compare with the
# knock-outs of `who_reads_the_prefix.py`.

# %%
import os

import numpy as np

from lapa2_interp import load_model
from lapa2_interp.circuits import ContrastSet, head_logit_attribution, knock_out
from lapa2_interp.methods import load_task
from lapa2_interp.models.planted import POSITIVE, answer_key
from lapa2_interp.table_formats import format_number

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder

# %% [markdown]
# ## A model whose answer is known
#
# The carrier writes from the prefix, the reader from the prompt (where the relay has left the
# sign), the relay nothing that is read out directly.

# %%
toy, key = load_model("planted"), answer_key("planted")
known = head_logit_attribution(toy, ContrastSet.of(toy, "sentiment", tokens=16))
names = {head: role for role, head in key.heads.items()}
table = known.frame()
table["role"] = [names.get((row.layer, row.head), "idle") for row in table.itertuples()]
table[["layer", "head", "role", "direct", "direct_all", "mass", "size"]].round(4)

# %%
print("the carrier promotes", known.words(*key.heads["carrier"], n=6)[0])

# %% [markdown]
# ## The model: the sum, part by part

# %%
model = load_model(MODEL)
prompts = load_task("sentiment").prompts.texts[:8]
contrast_set = ContrastSet.of(model, "sentiment", prompts=prompts, tokens=16)
attribution = head_logit_attribution(model, contrast_set)
attribution.parts().round(4)

# %% [markdown]
# ## The heads
#
# `mass` is attention on the prefix, `size` the length of what is written from it. BOS has large
# mass and small values in many models, so mass alone misleads.

# %%
attribution.frame().head(8).round(4)

# %%
attribution.plot()

# %%
for row in attribution.frame().head(4).itertuples():
    best, worst = attribution.words(row.layer, row.head, 8)
    print(f"{row.layer}.{row.head} promotes {best}\n     demotes  {worst}")

# %% [markdown]
# ## Direct effect and knock-out
#
# The heads with the largest direct effects, and what is lost without them, in the same metric.

# %%
top = [[row.layer, row.head] for row in attribution.frame().head(8).itertuples()]
exact = knock_out(
    model, contrast_set, over={f"{i}.{j}": [[i, j]] for i, j in top}, metric="lex", other_metrics=()
)
for (i, j), unit, effect in zip(top, exact.units, exact.values.mean(0), strict=True):
    direct = attribution.frame().set_index(["layer", "head"]).loc[(i, j), "direct"]
    print(
        f"{unit.name:>6}: direct {format_number(direct, '+.4f')}, lost without it"
        f" {format_number(effect, '+.4f')}"
    )

# %% [markdown]
# ## Checks

# %%
summed = attribution.direct.sum((-1, -2, -3)) + attribution.others.sum(-1)
assert np.abs(summed - attribution.total).max() < 1e-3 * max(1, np.abs(attribution.total).max())
assert np.abs(attribution.mass.sum(-1) - 1).max() < 1e-4
assert table.loc[0, "role"] == "carrier"
assert set(known.words(*key.heads["carrier"], n=6)[0]) == set(POSITIVE)
assert abs(table.set_index("role").loc["relay", "direct_all"]) < 1e-4
print("all checks hold")
