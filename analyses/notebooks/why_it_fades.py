# %% [markdown]
# # Why does control fade: is it the attention?
#
# [![open in Colab](https://colab.research.google.com/assets/colab-badge.svg)][colab]
#
# [colab]: https://colab.research.google.com/github/-owner-/lapa2-interp/blob/main/docs/notebooks/why_it_fades.ipynb
#
# As a text grows, softmax spreads attention over more keys, and a fixed prefix gets less. The paper
# takes this for the reason why control fades. Here we test it.
#
# We measure control, which is how far the predictions after opposite prefixes are apart, on the
# same tokens twice: near the prompt, and after more text in between (the *filler*). Then we give
# every head the attention on the prefix that it had near the prompt (`hold`). If lost attention is
# the cause, control must come back. We also take the attention away near the prompt (`removed`).
# Then control must go.
#
# **Running time:** about ten minutes on two CPU cores, with SmolLM2-135M. Most of it is the long
# text at the end.

# %%
# Where the package is not installed, as on Colab, first take the # off the next line.
# # !pip install -q git+https://github.com/-owner-/lapa2-interp && lapa2 fetch
import os

from lapa2_interp import circuits, load_model, methods, models

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder

# %% [markdown]
# ## One prompt
#
# One text shows what is measured. `near` and `far` are control before and after the filler.

# %%
model = load_model(MODEL)
one = circuits.ContrastSet.of(model, "sentiment", prompts=["The lake"], tokens=128 + 16)
circuits.measure_fading(model, one, filler=(32, 128), tokens=16, random=0).fades()

# %% [markdown]
# ## More prompts, and chosen heads
#
# Half of the prompts choose heads by their *slope*: the control that is gained for each unit of
# bias on the head's scores. The other half answers the question, with attention held in all heads,
# in the chosen heads, and in as many random heads.

# %%
prompts = (*methods.load_task("sentiment").prompts.texts, "The road to the lake")
choosing, judging = prompts[:8], prompts[8:]
texts = circuits.ContrastSet.of(model, "sentiment", prompts=choosing, tokens=16)
chosen = circuits.select(model, texts, score="slope", heads=8)
print("heads:", " ".join(f"{layer}.{head}" for layer, head in chosen.heads))
fading = circuits.measure_fading(
    model,
    circuits.ContrastSet.of(model, "sentiment", prompts=judging, tokens=128 + 16),
    filler=(32, 128),
    tokens=16,
    heads={"selected": chosen.heads},
    random=1,
)
fading.fades()

# %%
fading.plot()

# %% [markdown]
# `share` is the part of the fade that a change of attention explains, with its 95 % interval over
# prompts.

# %%
fading.frame()

# %%
print(f"{MODEL}: {fading.verdict}")

# %% [markdown]
# ## Two models whose answer is known
#
# The weights of these models were set by hand. In `planted` one head, the carrier, reads the
# prefix, and its attention falls as the text grows. So lost attention explains most of the fade. In
# `planted-gain` a head that reads the prompt fades instead. So attention on the prefix explains
# nothing. Both have a decoy: a head with much attention on the prefix that writes nothing. Holding
# its attention must restore nothing.

# %%
known = {}
for name in ("planted", "planted-gain"):
    key = models.answer_key(name)
    heads = {role: (key.heads[role],) for role in ("carrier", "decoy") if role in key.heads}
    known[name] = circuits.measure_fading(
        load_model(name), "sentiment", filler=(64, 200), tokens=8, heads=heads
    )
    print(f"{name}: {known[name].verdict}")
known["planted"].plot()

# %%
known["planted"].frame()

# %% [markdown]
# ## A long text
#
# We do the same for two prompts behind 8,000 tokens. The filler is text that the model has written,
# one text after another. A `TransformersModel` reads it without the matrix of attention scores.
# Two prompts decide nothing.

# %%
plain = load_model(MODEL, model_class="TransformersModel")
written = circuits.ContrastSet.of(model, "sentiment", prompts=prompts, tokens=160, samples=4)
filler, scored = min(8000, plain.cfg.n_ctx - 192), 16
tokens = [token for example in written.examples for token in example.text]
texts = {
    prompt: [tokens[i * scored : i * scored + filler + scored]]
    for i, prompt in enumerate(judging[:2])
}
far = circuits.measure_fading(
    plain,
    circuits.ContrastSet.of(plain, "sentiment", prompts=judging[:2], texts=texts),
    filler=(64, filler),
    tokens=scored,
    heads={"selected": chosen.heads},
)
far.fades()

# %%
far.frame()

# %% [markdown]
# ## Checks

# %%
assert known["planted"].verdict == "mass mediates"
assert known["planted-gain"].verdict == "mass does not"
sham = known["planted"].frame().query("heads == 'decoy'")["share"]
assert sham.abs().max() < 1e-4
assert not set(choosing) & set(judging)
assert list(far.far) == [64, filler]
assert all(label in ("positive", "negative") for label in chosen.task)
print("all checks hold")
