# %% [markdown]
# # Control, step by step: how far do opposite prefixes pull the next token apart?
#
# [![open in Colab](https://colab.research.google.com/assets/colab-badge.svg)][colab]
#
# [colab]: https://colab.research.google.com/github/-owner-/lapa2-interp/blob/main/docs/notebooks/control.ipynb
#
# We read one text twice, after "Very positive:" and after "Very negative:". At each step the model
# predicts the next token both times. The further the two predictions are apart, the more the prefix
# controls. We call this distance *control*.
#
# **Running time:** about a minute on two CPU cores, with SmolLM2-135M.
#
# There are several measures of it, all in nats:
#
# - `js` is the Jensen-Shannon divergence of the two predictions. It is at most log 2, and says
#   nothing about the direction.
# - `lex` says how much more probable the words of an attribute become after its own prefix.
# - `llr` is the log-likelihood ratio of the token that the text really has.

# %%
# Where the package is not installed, as on Colab, first take the # off the next line.
# # !pip install -q git+https://github.com/-owner-/lapa2-interp && lapa2 fetch
import os

import numpy as np

from lapa2_interp import circuits, load_model, methods, models, stats

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder

# %% [markdown]
# ## One prompt
#
# `ContrastSet.of` lets the model write a text after the prompt, without any prefix. Then
# `control_score` reads the text after each prefix.

# %%
model = load_model(MODEL)
one = circuits.ContrastSet.of(model, "sentiment", prompts=["The lake"], tokens=24)
print(repr(model.tokenizer.decode(one.examples[0].text)))
circuits.control_score(model, one).plot(["js", "lex"])

# %% [markdown]
# ## Eight prompts
#
# One text proves nothing. With eight prompts there are intervals. They are 95 % intervals over
# prompts.

# %%
tokens = 24
chosen = methods.load_task("sentiment").prompts.texts[:8]
contrast_set = circuits.ContrastSet.of(model, "sentiment", prompts=chosen, tokens=tokens)
score = circuits.control_score(model, contrast_set)
score.plot()

# %%
score.interval("js", None)

# %% [markdown]
# ## Does control fade?
#
# We compare the first third of the steps with the last third, prompt by prompt.

# %%
third = tokens // 3
js = score.values["js"]
early, late = js[:, :third].mean(1), js[:, -third:].mean(1)
change = stats.paired_difference(early, contrast_set.prompts, late, contrast_set.prompts)
print(f"js early {early.mean():.4f}, late {late.mean():.4f}")
print(f"change {change.mean:.4f} [{change.low:.4f}, {change.high:.4f}]")

# %% [markdown]
# ## Who wrote the text matters
#
# The texts above were written without a prefix. A text that was written after "Very positive:"
# already has what this prefix asks for. So `llr` on it is large by construction. This is why we
# measure on texts without a prefix (`raw` below).

# %%
by_source = {
    source: circuits.control_score(
        model,
        circuits.ContrastSet.of(model, "sentiment", prompts=chosen, tokens=tokens, source=source),
    )
    for source in contrast_set.attributes
}
for source, scores in {"raw": score, **by_source}.items():
    for name in ("js", "llr"):
        row = scores.interval(name, None).iloc[0]
        print(f"{source:>10} {name:>4} {row['mean']:.4f} [{row['low']:.4f}, {row['high']:.4f}]")

# %% [markdown]
# ## A measure of your own
#
# Any function of the logits of both branches is a measure. This one says how often the two would
# write different tokens.


# %%
def another_token(predictions):
    return (predictions.logits[0].argmax(2) != predictions.logits[1].argmax(2)).double()


changed = circuits.control_score(model, contrast_set, metrics={"another token": another_token})
changed.interval("another token", None)

# %% [markdown]
# ## A model whose answer is known
#
# Does the instrument measure right? `planted` is a model whose weights were set by hand. So a
# formula gives its control at every length, and we can compare.

# %%
toy, key = load_model("planted"), models.answer_key("planted")
lake = circuits.ContrastSet.of(toy, "sentiment", prompts=["The lake"], tokens=48)
known = circuits.control_score(toy, lake)
layout = lake.examples[0].layouts[0]
steps = range(known.values["lex"].shape[1])
formula = [key.control(len(layout) + t, layout.l_pro, asking=t == 0) for t in steps]
print("largest difference from the formula:", np.abs(known.values["lex"][0] - formula).max())
known.plot(["lex", "js"])

# %% [markdown]
# ## Checks

# %%
assert np.abs(known.values["lex"][0] - formula).max() < 1e-4
assert score.values["js"].max() <= np.log(2) + 1e-6
assert (score.values["js"] > -1e-6).all()
assert by_source["positive"].values["llr"].mean() > by_source["negative"].values["llr"].mean()
swapped = circuits.ContrastSet(
    tuple(example.swapped() for example in contrast_set.examples), contrast_set.words
)
turned = circuits.control_score(model, swapped, metrics=("llr", "js"))
assert np.abs(turned.values["llr"] + score.values["llr"]).max() < 1e-3
assert np.abs(turned.values["js"] - score.values["js"]).max() < 1e-4
print("all checks hold")
