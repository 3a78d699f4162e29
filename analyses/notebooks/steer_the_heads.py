# %% [markdown]
# # Steer the heads: what does control cost?
#
# [![open in Colab](https://colab.research.google.com/assets/colab-badge.svg)][colab]
#
# [colab]: https://colab.research.google.com/github/-owner-/lapa2-interp/blob/main/docs/notebooks/steer_the_heads.ipynb
#
# LaPA2 gives the prefix more attention in every head. But some heads work against the prefix, and
# many do not matter. Here we choose heads on half of the prompts. On the other half we add the bias
# in the chosen heads, in all heads and in random heads, and compare control and cost.
#
# **Running time:** about a minute on two CPU cores, with SmolLM2-135M.
#
# *Control* is how far the predictions after opposite prefixes are apart. All ways to steer read the
# same texts. The study of steering compares texts that are written freely. The study of rivals has
# other ways to steer, such as activation addition.

# %%
# Where the package is not installed, as on Colab, first take the # off the next line.
# # !pip install -q git+https://github.com/-owner-/lapa2-interp && lapa2 fetch
import os

import numpy as np

from lapa2_interp import Augmentation, circuits, load_model, methods, models, stats

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder

# %% [markdown]
# ## One prompt: more attention in one head
#
# First we add the bias in one head alone, and see what it does for one text. We take the head whose
# *slope* is largest: the one that gains most control for each unit of bias.

# %%
model = load_model(MODEL)
one = circuits.ContrastSet.of(model, "sentiment", prompts=["The lake"], tokens=16)
slopes = circuits.attribution(model, one, metric="js").table("slope")
best = slopes.best(1)[0]
for name, rule in {"no bias": None, "one head": Augmentation(alpha=1, heads=(best,))}.items():
    js = circuits.control_score(model, one, metrics="js", augmentation=rule).values["js"].mean()
    print(f"{name:>8}: {js:.4f} nats a step")

# %% [markdown]
# ## Heads of the model
#
# Half of the prompts choose the heads. Some heads work against the prefix, and the selection names
# them, too.

# %%
TOKENS = 16
prompts = (
    *methods.load_task("sentiment").prompts.texts,
    "The road to the lake", "The painting of the horse", "The president of the city",
    "The last movie", "The last book", "The city by the lake", "The horse and the chicken",
    "The book on the road", "The movie at the lake",
)  # fmt: skip
choosing = circuits.ContrastSet.of(model, "sentiment", prompts=prompts[::2], tokens=TOKENS)
held_out = circuits.ContrastSet.of(model, "sentiment", prompts=prompts[1::2], tokens=TOKENS)
chosen = circuits.select(model, choosing, score="slope", heads=8)
drawn = circuits.select(model, choosing, score="random", heads=len(chosen.heads))
print("heads:  ", " ".join(f"{layer}.{head}" for layer, head in chosen.heads))
print("against:", " ".join(f"{layer}.{head}" for layer, head in chosen.suppressors) or "none")

# %% [markdown]
# ## Control and cost, on the other prompts
#
# `js` counts every difference of the two predictions. `lex` counts only what makes the words of the
# own attribute more probable. `cost` is the perplexity of the texts under the mean of both
# predictions. It is a multiple of its value without a bias. Both numbers grow with the bias, so
# compare the ways where their costs are alike. Intervals are 95 % intervals over prompts.

# %%
ways = {
    "no bias": [None],
    "all heads": [Augmentation(alpha=a) for a in (0.5, 1.0)],
    "chosen heads": [Augmentation(alpha=a, heads=chosen.heads) for a in (1.0, 2.0)],
    "random heads": [Augmentation(alpha=a, heads=drawn.heads) for a in (1.0, 2.0)],
}


def nll(predictions):
    """-ln p of each token under the mean of the branches' distributions."""
    mean = predictions.log_probs.logsumexp(0) - np.log(len(predictions.log_probs))
    return -mean.gather(2, predictions.text[:, :, None])[:, :, 0]


def measured(rules):
    """By measure, a mean for each text."""
    metrics = ("js", "lex", "cost")
    own = {"js": circuits.METRICS["js"], "lex": circuits.METRICS["lex"], "cost": nll}
    score = circuits.control_score(model, held_out, metrics=own, augmentation=rules)
    return {name: score.values[name].mean(1) for name in metrics}


base = measured(None)
results = {}
for way, rules in ways.items():
    for rule in rules:
        results[way, rule.alpha if rule else 0.0] = now = measured(rule)
        cost = np.exp((now["cost"] - base["cost"]).mean())
        gains = [
            stats.paired_difference(base[name], held_out.prompts, now[name], held_out.prompts)
            for name in ("js", "lex")
        ]
        intervals = (f"{gain.mean:.3f} [{gain.low:.3f}, {gain.high:.3f}]" for gain in gains)
        alpha = rule.alpha if rule else 0
        print(f"{way:>13}, alpha {alpha:.1f}: cost {cost:.2f}, gain of js and lex", *intervals)

# %% [markdown]
# ## Was it worth choosing?
#
# We compare the chosen heads with as many random ones, with the same bias. A dozen prompts can show
# only large differences.

# %%
mine, others = results["chosen heads", 1.0], results["random heads", 1.0]
for metric in ("js", "lex"):
    gap = stats.paired_difference(others[metric], held_out.prompts, mine[metric], held_out.prompts)
    print(f"{metric}: chosen - random {gap.mean:.4f} [{gap.low:.4f}, {gap.high:.4f}]")

# %% [markdown]
# ## A model whose answer is known
#
# The weights of `planted` were set by hand. A carrier and a relay bring the prefix to the words of
# its attribute, and a suppressor takes some of that away. `select` must choose the first two, and
# the one token of the prefix that they read. It must name the suppressor, and not choose it.

# %%
toy, key = load_model("planted"), models.answer_key("planted")
role = {head: name for name, head in key.heads.items()}
texts = circuits.ContrastSet.of(toy, "sentiment", prompts=prompts[:8], tokens=8)
known = circuits.select(toy, texts, score="cut", positions="auto", metric="lex")
print("chosen:  ", " ".join(role[head] for head in known.heads), "at", known.positions)
print("against: ", " ".join(role.get(head, "idle") for head in known.suppressors))

# %% [markdown]
# A formula gives the control of this model with a bias in any heads. We compare it with what is
# measured. The bias in all heads gives less than the bias in all heads but the suppressor.

# %%
alpha = 0.5
everywhere = tuple(np.ndindex(key.shape))
sets = {
    "no bias": (),
    "all heads": everywhere,
    "all but the suppressor": tuple(head for head in everywhere if head != key.heads["suppressor"]),
    "chosen heads": known.heads,
}
lake = circuits.ContrastSet.of(toy, "sentiment", prompts=["The lake"], tokens=48)
layout = lake.examples[0].layouts[0]


def formula(heads, step):
    """The control where LaPA2 acts in some heads: their weights are multiplied by (l / n)^alpha."""
    l, weights = len(layout) + step, {}
    for name in (role[head] for head in heads if head in role):
        at = len(layout) if name == "relay" else l  # the relay reads at the prompt's last token
        weights[name] = (((at - 1) / layout.l_pre) ** alpha,) * 3  # l without BOS
    return key.control(l, layout.l_pro, weights=weights, asking=step == 0)


boosted, expected = {}, {}
for name, heads in sets.items():
    rule = Augmentation(alpha=alpha, heads=heads) if heads else None
    score = circuits.control_score(toy, lake, metrics="lex", augmentation=rule)
    boosted[name] = score.values["lex"][0]
    expected[name] = np.array([formula(heads, step) for step in range(len(boosted[name]))])
    print(
        f"{name:>22}: {boosted[name].mean():.3f} nats, by the formula {expected[name].mean():.3f}"
    )

# %% [markdown]
# ## Checks

# %%
assert known.heads == (key.heads["carrier"], key.heads["relay"])
assert known.positions == (1,)
assert key.heads["suppressor"] in known.suppressors
for name in sets:
    assert np.abs(boosted[name] - expected[name]).max() < 1e-4, name
assert (boosted["all heads"] < boosted["all but the suppressor"]).all()
assert (boosted["all heads"] < boosted["chosen heads"]).all()
assert not set(choosing.prompts) & set(held_out.prompts)
assert not set(chosen.heads) & set(chosen.suppressors)
# A bias and its opposite change nothing.
cancelled = measured(tuple(Augmentation(alpha=a, law="scale") for a in (1.0, -1.0)))
for name in base:
    assert np.abs(cancelled[name] - base[name]).max() < 1e-3, name
if MODEL == "planted":
    assert chosen.heads[0] == key.heads["carrier"]
    assert gap.low > 0
print("all checks hold")
