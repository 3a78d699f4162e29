# %% [markdown]
# # Control, step by step: how far do opposite prefixes pull the next token apart?
#
# The same text is read after "Very positive:" and after "Very negative:". At every step the two
# branches predict the next token. The more their predictions differ, the more the prefix controls.
#
# `js` is the distance between the two distributions (Jensen-Shannon, in nats, at most log 2). It
# needs no words and has no sign. `lex` says how much more each branch favours the words of its own
# attribute. `llr` is how much more probable the text's own next token is.

# %%
import os

import numpy as np

from lapa2_interp import load_model
from lapa2_interp.circuits import RAW, ContrastSet, control_score
from lapa2_interp.methods import load_task
from lapa2_interp.models import identify
from lapa2_interp.models.planted import answer_key
from lapa2_interp.stats import paired_difference
from lapa2_interp.table_formats import format_interval

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder

# %% [markdown]
# ## A model whose answer is known
#
# `planted` has weights set by hand. Its control is known in closed form at every length, so the
# instrument can be checked before it is trusted.

# %%
toy, key = load_model("planted"), answer_key("planted")
known = control_score(toy, ContrastSet.of(toy, "sentiment", prompts=["The lake"], tokens=48))
layout = known.contrast_set.examples[0].layouts[0]
steps = range(known.values["lex"].shape[1])
closed = [key.control(len(layout) + t, layout.l_pro, asking=t == 0) for t in steps]
print("largest difference from the closed form:", np.abs(known.values["lex"][0] - closed).max())
known.plot(["lex", "js"])

# %% [markdown]
# ## The model
#
# The texts are written by the model without any prefix (`source="raw"`). A text written after
# "Very positive:" already says what the prefix wants, so the prefix would seem to act less, or
# more, than it does.

# %%
model = load_model(MODEL)
print(identify(model))
tokens = 24
chosen = load_task("sentiment").prompts.texts[:8]
contrast_set = ContrastSet.of(model, "sentiment", prompts=chosen, tokens=tokens)
print(repr(model.tokenizer.decode(contrast_set.examples[0].text)))
score = control_score(model, contrast_set)
score.plot()

# %%
score.interval("js", None)

# %% [markdown]
# ## By the source of the text
#
# `llr` on a text written after "Very positive:" is large by construction. `js` on raw texts is the
# clean measure.

# %%
by_source = {
    source: control_score(
        model, ContrastSet.of(model, "sentiment", prompts=chosen, tokens=tokens, source=source)
    )
    for source in contrast_set.attributes
}
for source, scores in {RAW: score, **by_source}.items():
    for name in ("js", "llr"):
        row = scores.interval(name, None).iloc[0]
        interval = f"[{row['low']:.4f}, {row['high']:.4f}]"
        print(f"{source:>10} {name:>4} {row['mean']:.4f} {interval}")

# %% [markdown]
# ## Does it fade?
#
# The first and the last third of the steps, paired by prompt.

# %%
third = tokens // 3
js = score.values["js"]
early, late = js[:, :third].mean(1), js[:, -third:].mean(1)
change = paired_difference(early, contrast_set.prompts, late, contrast_set.prompts)
print(f"js early {early.mean():.4f}, late {late.mean():.4f}")
print(f"change {format_interval(change.mean, change.low, change.high, '+.4f')}")

# %% [markdown]
# ## A custom metric
#
# Any function of the branches' logits. Here: how often the branches would write another token.


# %%
def another_token(predictions):
    return (predictions.logits[0].argmax(2) != predictions.logits[1].argmax(2)).double()


changed = control_score(model, contrast_set, metrics={"another token": another_token})
changed.interval("another token", None)

# %% [markdown]
# ## Checks

# %%
assert np.abs(known.values["lex"][0] - closed).max() < 1e-4
assert score.values["js"].max() <= np.log(2) + 1e-6
assert (score.values["js"] > -1e-6).all()
assert by_source["positive"].values["llr"].mean() > by_source["negative"].values["llr"].mean()
swapped = ContrastSet(
    tuple(example.swapped() for example in contrast_set.examples), contrast_set.words
)
turned = control_score(model, swapped, metrics=("llr", "js"))
assert np.abs(turned.values["llr"] + score.values["llr"]).max() < 1e-3
assert np.abs(turned.values["js"] - score.values["js"]).max() < 1e-4
print("all checks hold")
