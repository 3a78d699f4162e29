# %% [markdown]
# # Steer the heads: what does control cost?
#
# LaPA2 gives the prefix more attention in every head. But some heads work against the prefix, and
# many do not matter. Here heads and tokens are chosen on half of the prompts. On the other half
# they are steered, beside LaPA2, a set-point and the published laws, each at two strengths.
#
# More strength gives more control and does more damage, so a way to steer is a curve and not a
# number. All ways read the same texts, which is cheap and paired. This is control on texts that are
# given: how texts that are written freely compare is the question of
# `analyses/steering/analyse.py`.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.patches import Rectangle

from lapa2_interp import Augmentation, load_model, plots, recipe, recipes, teacher_forced
from lapa2_interp.circuits import METRICS, ContrastSet, attribution, control_score, select
from lapa2_interp.methods import load_task
from lapa2_interp.models.planted import answer_key
from lapa2_interp.scoring.equal_perplexity import (
    BASELINE,
    SteeringCurves,
    add_verdicts,
    resampled_interval,
)
from lapa2_interp.stats import paired_difference
from lapa2_interp.table_formats import format_interval

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder

# %% [markdown]
# ## A model whose answer is known
#
# In `planted` a carrier and a relay bring the prefix to its attribute's words, and a suppressor
# takes some of that away. `select` must choose the first two, and the one token that they read. It
# must name the suppressor and not choose it.

# %%
toy, key = load_model("planted"), answer_key("planted")
role = {head: name for name, head in key.heads.items()}
prompts = load_task("sentiment").prompts.texts
known = select(
    toy,
    ContrastSet.of(toy, "sentiment", prompts=prompts[:8], tokens=8),
    score="cut",
    positions="auto",
    metric="lex",
)
print("chosen:  ", " ".join(role[head] for head in known.heads), "at", known.positions)
print("against: ", " ".join(role.get(head, "idle") for head in known.suppressors))

# %% [markdown]
# The same bias in all heads, in all but the suppressor, and in the chosen heads. The gap between
# the first two is what the suppressor takes when it is boosted, too. `key` knows the control in
# closed form.

# %%
alpha = 0.5
everywhere = tuple(np.ndindex(key.shape))
sets = {
    "no bias": (),
    "all heads": everywhere,
    "all but the suppressor": tuple(head for head in everywhere if head != key.heads["suppressor"]),
    "chosen heads": known.heads,
}
asked = ContrastSet.of(toy, "sentiment", prompts=["The lake"], tokens=48)
layout = asked.examples[0].layouts[0]


def closed_form(heads, step):
    """The control where LaPA2 acts in some heads: their weights are multiplied by (l / n)^alpha."""
    l, weights = len(layout) + step, {}
    for name in (role[head] for head in heads if head in role):
        at = len(layout) if name == "relay" else l  # the relay reads at the prompt's last token
        weights[name] = (((at - 1) / layout.l_pre) ** alpha,) * 3  # l without BOS
    return key.control(l, layout.l_pro, weights=weights, asking=step == 0)


boosted, closed = {}, {}
figure, axes = plt.subplots(figsize=(4.8, 2.8), layout="constrained")
for (name, heads), colour in zip(sets.items(), plots.COLOURS, strict=False):
    rule = Augmentation(alpha=alpha, heads=heads) if heads else None
    boosted[name] = control_score(toy, asked, metrics="lex", augmentation=rule).values["lex"][0]
    closed[name] = np.array([closed_form(heads, step) for step in range(len(boosted[name]))])
    axes.plot(boosted[name], color=colour, lw=1.4, label=name)
plots.plain_axes(axes, "step", "control (lex), nats")
figure.legend(loc="outside upper center", frameon=False, fontsize=7, ncols=2)
plt.show()

# %% [markdown]
# A set-point gives the prefix a certain share of a head's attention, however long the text.


# %%
def attention(model, contrast_set, arms, trace="pooled"):
    """Attention on the prefix by arm, text, branch and step; if full, also by layer and head."""
    rows = [
        (layout, example.text) for example in contrast_set.examples for layout in example.layouts
    ]
    layouts, texts = zip(*rows * len(arms), strict=True)
    rules = [rule for rule in arms for _ in rows]
    values = teacher_forced(model, layouts, texts, rules, trace=trace)["prefix"].to_numpy()[0]
    return values.reshape(len(arms), len(contrast_set.examples), -1, *values.shape[1:]).astype(
        float
    )


tau = 0.3
carrier, relay = key.heads["carrier"], key.heads["relay"]
fixed = attention(toy, asked, [recipe("set-point", tau=tau, floor=False)], trace="full")[0, 0]
print("carrier:", fixed[:, :, *carrier].min(), "to", fixed[:, :, *carrier].max())
print("relay at the prompt's last token:", fixed[:, 0, *relay].mean())
print("relay at later tokens, at most:", fixed[:, 1:, *relay].max())

# %% [markdown]
# After the prompt the relay rests on BOS and hardly sees the prefix. The bias of a set-point is at
# most 20, so such a head is not forced.
#
# ## Heads and tokens of the model
#
# The prompts are the task's and nine more. Half of them choose: heads by their slope (what a bias
# on a head's scores gains per unit), tokens by what is enough without the others. Boxes are chosen
# heads, crosses heads that work against the prefix.

# %%
model = load_model(MODEL)
TOKENS = 16
prompts += (
    "The road to the lake", "The painting of the horse", "The president of the city",
    "The last movie", "The last book", "The city by the lake", "The horse and the chicken",
    "The book on the road", "The movie at the lake",
)  # fmt: skip
choosing = ContrastSet.of(model, "sentiment", prompts=prompts[::2], tokens=TOKENS)
held_out = ContrastSet.of(model, "sentiment", prompts=prompts[1::2], tokens=TOKENS)
chosen = select(model, choosing, score="slope", heads=8, positions="auto")
drawn = select(model, choosing, score="random", heads=len(chosen.heads))
first = choosing.examples[0].layouts[0]
prefix = first.tokens[first.n_bos : first.n_bos + first.l_pre]
tokens = chosen.positions or tuple(range(len(prefix)))
print("tokens: ", [prefix[i] for i in tokens], "of", prefix)
print("heads:  ", " ".join(f"{layer}.{head}" for layer, head in chosen.heads))
print("against:", " ".join(f"{layer}.{head}" for layer, head in chosen.suppressors) or "none")

# %%
slopes = attribution(model, choosing, metric="js").table("slope").map()
figure, axes = plt.subplots(
    figsize=(1.8 + 0.25 * slopes.shape[1], 1.2 + 0.13 * slopes.shape[0]), layout="constrained"
)
reach = np.abs(slopes).max()
drawing = plots.layer_map(axes, slopes, cmap="RdBu_r", vmin=-reach, vmax=reach)
for layer, head in chosen.heads:
    axes.add_patch(Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, lw=1.2))
for layer, head in chosen.suppressors:
    axes.plot(head, layer, "x", color="black", ms=5)
bar = figure.colorbar(drawing, ax=axes)
bar.set_label("slope: js per unit of bias", fontsize=7)
bar.ax.tick_params(labelsize=7)
plt.show()

# %% [markdown]
# ## Ways to steer, on the other prompts
#
# *Control* is the difference between the branches with opposite prefixes. `js` counts every
# difference, `lex` only what favours the attribute's own words.
#
# *Cost* is the perplexity of the texts, which the model wrote without a prefix, under the mean of
# both branches' predictions. It is given as a multiple of the cost of the prefix alone. A prefix
# that moves probability to one side, while its opposite moves as much to the other, costs nothing:
# the mean stays. What both branches lose alike is damage. (The perplexity under each branch by
# itself would charge for control, too.)
#
# A prefix is read here before anything acts, so the laws that were published for every query begin
# after it (`phase="after_span"`). The released Spotlight computes one bias for a whole pass; a
# given text is one pass, and generation is many. The variant with a bias for each head and query
# is the same in both.

# %%
heads = chosen.heads
after_prefix = {"phase": "after_span"}
ways = {
    "lapa2": [recipe("lapa2", alpha=a) for a in (0.5, 1.0)],
    "chosen tokens": [recipe("token-selective", tokens=tokens, alpha=a) for a in (0.4, 0.8)],
    "chosen heads": [recipe("head-selective", heads=heads, alpha=a) for a in (1.0, 2.0)],
    "both": [recipe("selective", tokens=tokens, heads=heads, alpha=a) for a in (0.5, 1.5)],
    "random heads": [recipe("head-selective", heads=drawn.heads, alpha=a) for a in (1.0, 3.0)],
    "set-point": [recipe("set-point", tau=t) for t in (0.06, 0.12)],
    "set-point in heads": [recipe("set-point", heads=heads, tau=t) for t in (0.2, 0.5)],
    "instaboost": [recipe("instaboost", M=m, **after_prefix) for m in (1.5, 3.0)],
    "spotlight per head": [
        recipe("spotlight-per-head", tau=t, **after_prefix) for t in (0.06, 0.12)
    ],
    "split-softmax": [recipe("split-softmax", k=k, **after_prefix) for k in (0.8, 0.6)],
}


def nll(predictions):
    """-ln p of each token under the mean of the branches' distributions."""
    mean = predictions.log_probs.logsumexp(0) - np.log(len(predictions.log_probs))
    return -mean.gather(2, predictions.text[:, :, None])[:, :, 0]


def measured(arms):
    """A row for each text in each arm: control, attention, and what the cost is made of."""
    metrics = {"js": METRICS["js"], "lex": METRICS["lex"], "nll": nll}
    parts = []
    for rules, mass in zip(arms, attention(model, held_out, arms).mean((2, 3)), strict=True):
        by_metric = control_score(model, held_out, metrics=metrics, augmentation=rules).values
        means = {"mass": mass} | {name: values.mean(1) for name, values in by_metric.items()}
        parts.append(
            pd.DataFrame({"prompt": held_out.prompts, "strength": recipes.strength(rules)} | means)
        )
    return pd.concat(parts, ignore_index=True)


alone = measured([()]).assign(family=BASELINE)
texts = pd.concat([alone, *(measured(arms).assign(family=way) for way, arms in ways.items())])

# %% [markdown]
# ## Control against cost
#
# A curve for each way, from the star (the prefix alone) through its strengths. Control is what is
# gained beyond the prefix alone. Bars are 95 % intervals over prompts, paired. Higher is better,
# and further right is worse. The dotted line is where ways are compared below.

# %%
RATIO = 1.1
quantities = ["js", "lex", "mass"]
made = SteeringCurves(texts, quantities, resamples=20_000)  # enough for p-values after correction
base = made.arms.get_loc((BASELINE, 0.0))
gained = made.means - made.means[:, [base]]  # resample arm quantity; the first is ln perplexity
values = {"cost": np.exp(gained[..., 0])}
for i, name in enumerate(quantities, 1):
    values |= {name: made.means[..., i], f"{name} gained": gained[..., i]}
estimates = {
    name: pd.DataFrame(
        np.stack(resampled_interval(by_text, made.prompts), 1), made.arms, ["mean", "low", "high"]
    )
    for name, by_text in values.items()
}

figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.8), layout="constrained")
for axes, name in zip(panels, ("js", "lex"), strict=True):
    for i, way in enumerate(ways):
        x, y = (estimates[column].loc[[BASELINE, way]] for column in ("cost", f"{name} gained"))
        axes.errorbar(
            x["mean"], y["mean"],
            xerr=[x["mean"] - x["low"], x["high"] - x["mean"]],
            yerr=[y["mean"] - y["low"], y["high"] - y["mean"]],
            color=plots.COLOURS[i % len(plots.COLOURS)], ls="-" if i < len(plots.COLOURS) else "--",
            marker="os^Dv"[i % 5], ms=3.5, lw=1, elinewidth=0.4, label=way,
        )  # fmt: skip
    axes.plot(1, 0, "*", color="black", ms=9, label="prefix alone")
    axes.axvline(RATIO, color="#999999", lw=0.8, ls=":", zorder=0)
    plots.plain_axes(axes, "cost, times that of the prefix alone", f"control gained ({name}), nats")
legend = axes.get_legend_handles_labels()
figure.legend(*legend, loc="outside upper center", frameon=False, fontsize=7, ncols=4)
plt.show()

# %% [markdown]
# Every arm with its intervals; `mass` is the mean attention on the prefix over all heads.

# %%
table = pd.DataFrame(
    {
        name: [f"{row.mean:.3f} [{row.low:.3f}, {row.high:.3f}]" for row in estimate.itertuples()]
        for name, estimate in estimates.items()
        if not name.endswith("gained")
    },
    made.arms,
)
table.loc[[BASELINE, *ways], ["mass", "js", "lex", "cost"]]

# %% [markdown]
# ## At equal cost
#
# Every way on its own curve where it costs as much, and its difference from LaPA2 there. Nothing is
# extrapolated: a way whose curve does not reach this cost is *not comparable*. `p_holm` is
# corrected for the number of ways.

# %%
compared = made.compare("lapa2", [RATIO]).query("metric != 'mass'")
equal = add_verdicts(compared, "lapa2").drop(columns=["ratio", "perplexity", "prompts"])
equal.sort_values(["metric", "value"], ascending=[True, False]).round(4)

# %%
for metric, part in equal[equal["family"] != "lapa2"].groupby("metric"):
    for verdict, rows in part.groupby("verdict"):
        print(f"{metric}, beside lapa2 at {RATIO} times the cost, {verdict}: ", end="")
        print(", ".join(rows["family"]))

# %% [markdown]
# How to read this. A way beats LaPA2 where it is *more* at equal cost, in `lex` as in `js`: `js`
# also grows where predictions fall apart in no direction. *Not decided* does not mean equal, since
# a dozen prompts show large differences only. *Not comparable* asks for other strengths. Look at
# `mass`, too: where ways of unequal mass have equal control, it matters which heads attend, and not
# how much attention there is in all.
#
# And was it worth choosing? The chosen heads against as many random ones, with the same bias.

# %%
same = texts[texts["strength"] == 1].set_index("family")
mine, others = same.loc["chosen heads"], same.loc["random heads"]
for metric in ("js", "lex"):
    gap = paired_difference(others[metric], others["prompt"], mine[metric], mine["prompt"])
    print(f"{metric}: chosen - random {format_interval(gap.mean, gap.low, gap.high, '+.4f')}")

# %% [markdown]
# ## Checks

# %%
assert known.heads == (carrier, relay)
assert known.positions == (1,)
assert key.heads["suppressor"] in known.suppressors
for name in sets:
    assert np.abs(boosted[name] - closed[name]).max() < 1e-4, name
assert (boosted["all heads"] < boosted["all but the suppressor"]).all()
assert (boosted["all heads"] < boosted["chosen heads"]).all()
assert np.abs(fixed[:, :, *carrier] - tau).max() < 1e-5
assert np.abs(fixed[:, 0, *relay] - tau).max() < 1e-5

# The model: selection and evaluation have different prompts; the set-point is reached in its heads.
assert not set(choosing.prompts) & set(held_out.prompts)
assert not set(chosen.heads) & set(chosen.suppressors)
rule = recipe("set-point", tau=tau, floor=False, heads=chosen.heads)
best = attention(model, held_out, [rule], trace="full")[..., *chosen.heads[0]]
assert np.abs(best - tau).max() < 1e-3

# A bias and its opposite change nothing.
cancelled = measured([tuple(Augmentation(alpha=a, law="scale") for a in (1.0, -1.0))])
for name in ("mass", "js", "lex", "nll"):
    assert np.abs(cancelled[name] - alone[name]).max() < 1e-3, name

# At the cost of the prefix alone every curve is at the prefix alone.
for way in ways:
    assert np.allclose(made.values_at(way, 1.0)[0][0], made.means[0, base, 1:]), way
assert (estimates["js"]["high"] <= np.log(2) + 1e-6).all()
for estimate in estimates.values():
    assert (estimate["low"] <= estimate["mean"] + 1e-9).all()
    assert (estimate["mean"] <= estimate["high"] + 1e-9).all()
if MODEL == "planted":
    for way in ("lapa2", "instaboost", "split-softmax"):
        assert estimates["mass"].loc[[BASELINE, way], "mean"].is_monotonic_increasing, way
    assert chosen.heads[0] == carrier
    assert (estimates["lex gained"].loc["chosen heads", "low"] > 0).all()
    assert gap.low > 0
print("all checks hold")
