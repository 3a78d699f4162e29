# %% [markdown]
# # Why does control fade: is it the attention?
#
# As a text grows, softmax spreads attention over more keys, and a fixed prefix gets less. The
# paper takes this for the reason why control fades. Here it is tested. The same tokens are scored
# near the prompt and after more text. Then every head gets the attention on the prefix that it had
# near (`hold`). If mass mediates the fade, holding it must bring the control back (`restored`), and
# taking the far mass near must take the control away (`removed`).

# %%
import os

from lapa2_interp import load_model
from lapa2_interp.circuits import ContrastSet, measure_fading, select
from lapa2_interp.methods import load_task
from lapa2_interp.models.planted import answer_key

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder

# %% [markdown]
# ## Two models whose answer is known
#
# In `planted` a carrier reads the prefix, and its attention dilutes: mass mediates most of the
# fade. In `planted-gain` a reader of the prompt fades instead: mass does not.

# %%
known = {}
for name in ("planted", "planted-gain"):
    key = answer_key(name)
    heads = {"decoy": (key.heads["decoy"],)}
    if "carrier" in key.heads:
        heads = {"carrier": (key.heads["carrier"],), **heads}
    known[name] = measure_fading(
        load_model(name), "sentiment", filler=(64, 200), tokens=8, heads=heads
    )
    print(f"{name}: {known[name].verdict}")
known["planted"].plot()

# %% [markdown]
# A head that gives the prefix much attention and writes nothing (the decoy) restores nothing,
# whatever its mass. That is the sham.

# %%
known["planted"].frame()

# %% [markdown]
# ## The model
#
# The prompts are the task's and one more. Half of them choose heads by their slope: what a bias on
# a head's scores gains per unit. The other half answers the question.

# %%
model = load_model(MODEL)
prompts = (*load_task("sentiment").prompts.texts, "The road to the lake")
choosing, judging = prompts[:8], prompts[8:]
chosen = select(
    model, ContrastSet.of(model, "sentiment", prompts=choosing, tokens=16), score="slope", heads=8
)
print("heads:", " ".join(f"{layer}.{head}" for layer, head in chosen.heads))
fading = measure_fading(
    model,
    ContrastSet.of(model, "sentiment", prompts=judging, tokens=128 + 16),
    filler=(32, 128),
    tokens=16,
    heads={"selected": chosen.heads},
    random=1,
)
fading.fades()

# %%
fading.plot()

# %%
fading.frame()

# %%
print(f"{MODEL}: {fading.verdict}")

# %% [markdown]
# ## A long text
#
# The same for two prompts behind 8,000 tokens: all that the model has written above, in a row.
# `TransformersModel` reads such a filler without the matrix of attention scores, in a minute or
# two each (docs/without-the-matrix.md). Two prompts decide nothing.

# %%
plain = load_model(MODEL, model_class="TransformersModel")
written = ContrastSet.of(model, "sentiment", prompts=prompts, tokens=160, samples=4)
filler, scored = min(8000, plain.cfg.n_ctx - 192), 16
tokens = [token for example in written.examples for token in example.text]
texts = {
    prompt: [tokens[i * scored : i * scored + filler + scored]]
    for i, prompt in enumerate(judging[:2])
}
far = measure_fading(
    plain,
    ContrastSet.of(plain, "sentiment", prompts=judging[:2], texts=texts),
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
