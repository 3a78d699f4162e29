# %% [markdown]
# # What do heads write when they read the prefix?
#
# [![open in Colab](https://colab.research.google.com/assets/colab-badge.svg)][colab]
#
# [colab]: https://colab.research.google.com/github/-owner-/lapa2-interp/blob/main/docs/notebooks/what_heads_write.ipynb
#
# The output of a head is a sum over keys. So it can be divided by the part of the text that it
# comes from: the prefix, BOS, the prompt, or the generated text. We send each part through the
# final norm and the unembedding, and see which words it makes more likely. This is called direct
# logit attribution.
#
# **Running time:** about half a minute on two CPU cores, with SmolLM2-135M.
#
# It shows the direct effect only. A head that writes for other heads has none, so compare with the
# knock-outs of the notebook on who reads the prefix.

# %%
# Where the package is not installed, as on Colab, first take the # off the next line.
# # !pip install -q git+https://github.com/-owner-/lapa2-interp && lapa2 fetch
import os

import numpy as np

from lapa2_interp import circuits, load_model, methods, models

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder

# %% [markdown]
# ## One prompt, and its strongest head
#
# The model reads its own text after "Very positive:" and after "Very negative:". The table has what
# each head writes from the prefix towards the words of the attribute (`direct`), in logits. `mass`
# is the attention on the prefix, and `size` is the length of what is written from it.

# %%
model = load_model(MODEL)
one = circuits.ContrastSet.of(model, "sentiment", prompts=["The lake"], tokens=16)
attribution = circuits.head_logit_attribution(model, one)
attribution.frame().head(4).round(4)

# %%
best = attribution.frame().iloc[0]
promoted, demoted = attribution.words(int(best["layer"]), int(best["head"]), 8)
print(f"{best['layer']:.0f}.{best['head']:.0f} promotes {promoted}\n     demotes  {demoted}")

# %% [markdown]
# ## Eight prompts: the sum, part by part
#
# All parts of all heads, together with the MLPs and the embedding, sum to the logit difference
# itself. The last of the checks below tests this.

# %%
prompts = methods.load_task("sentiment").prompts.texts[:8]
contrast_set = circuits.ContrastSet.of(model, "sentiment", prompts=prompts, tokens=16)
attribution = circuits.head_logit_attribution(model, contrast_set)
attribution.parts().round(4)

# %% [markdown]
# ## The heads
#
# In many models BOS has a large mass and small values. So mass alone misleads.

# %%
attribution.frame().head(8).round(4)

# %%
attribution.plot()

# %% [markdown]
# ## Direct effect and knock-out
#
# A knock-out hides the prefix from a head, and measures what is lost. We do this for the heads with
# the largest direct effects, in the same measure.

# %%
heads = attribution.frame().head(8)
top = [(int(row.layer), int(row.head)) for row in heads.itertuples()]
exact = circuits.knock_out(
    model,
    contrast_set,
    over={f"{i}.{j}": [[i, j]] for i, j in top},
    metric="lex",
    other_metrics=(),
)
for unit, effect, direct in zip(exact.units, exact.values.mean(0), heads["direct"], strict=True):
    print(f"{unit.name:>6}: direct {direct:.4f}, lost without it {effect:.4f}")

# %% [markdown]
# ## A model whose answer is known
#
# The weights of `planted` were set by hand. Its carrier writes from the prefix. Its relay copies
# the sign of the prefix to the prompt, and writes nothing that is read out directly. Its reader
# writes from the prompt what the relay has left there.

# %%
toy, key = load_model("planted"), models.answer_key("planted")
texts = circuits.ContrastSet.of(toy, "sentiment", tokens=16)
known = circuits.head_logit_attribution(toy, texts)
names = {head: role for role, head in key.heads.items()}
table = known.frame()
table["role"] = [names.get((row.layer, row.head), "idle") for row in table.itertuples()]
table[["layer", "head", "role", "direct", "direct_all", "mass", "size"]].round(4)

# %%
carried = known.words(*key.heads["carrier"], n=6)[0]
print("the carrier promotes", carried)

# %% [markdown]
# ## Checks

# %%
assert table.loc[0, "role"] == "carrier"
positive = {toy.tokenizer.decode([i]) for i in texts.words[texts.attributes.index("positive")]}
assert set(carried) <= positive
assert abs(table.set_index("role").loc["relay", "direct_all"]) < 1e-4
assert np.abs(attribution.mass.sum(-1) - 1).max() < 1e-4
summed = attribution.direct.sum((-1, -2, -3)) + attribution.others.sum(-1)
assert np.abs(summed - attribution.total).max() < 1e-3 * max(1, np.abs(attribution.total).max())
print("all checks hold")
