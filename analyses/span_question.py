# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The span question: which keys should be boosted?
#
# The paper boosts the prefix. Its released code counts slots from 0, so it boosts BOS, the attention sink, and misses the last
# prefix token. InProcess the bias alpha * log(l/n) goes to different keys and nothing else changes: the exact prefix, the released
# slots, BOS alone, prefix and BOS, each prefix token by itself, and a sham span (two prompt tokens). For every arm: where the
# mass goes, how well the texts carry their attribute, and how fluent they are; then control against mass, so that arms are
# compared where they put as much attention on the prefix.
#
# --samples 77 took three core-hours, the defaults take about half of that; an arm that is finished is never made again, so kill
# and repeat as you like.
#
# What it says of SmolLM2 (--samples 77: 2,310 texts an arm of 64 tokens, perplexity of 300; intervals over 15 prompts):
#
# - Mass is not control. The paper's span takes prefix attention from .028 to .042, .063 and .091 (alpha 1/4, 1/2, 3/4) and
#   accuracy from .593 up by 2.8 [0.4, 5.2], 2.1 [-0.6, 4.8] and 2.8 [0.0, 5.9] points, most of it on "positive". The sham span
#   gives 1.6 [-1.3, 4.6], on "positive" too, with less prefix attention than the baseline: at alpha 1/2 the two cannot be told
#   apart (0.5 [-1.8, 3.1]).
# - " positive" or " negative" alone beats ":" alone by 3.2 points [0.8, 5.4] (p .015, one of several comparisons) with less
#   attention on the prefix (.049 against .063). A single token gets alpha log(l), more than a token of the whole prefix.
# - The released span gains most, 5.2 [2.6, 8.0] at alpha 1 (sham: 3.5 less, [0.0, 7.6]), on both attributes, and pays most:
#   perplexity 42 instead of 24, where the paper's span has 28 at the same prefix attention.
# - BOS alone takes attention to BOS and changes nothing: -0.3 points [-3.9, 2.6], perplexity +1.0 [-0.8, 2.7].
#
#     python analyses/span_question.py --out results/span_question --samples 40

# %%
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd

from lapa2_interp import Augmentation, load_model, load_task, methods, plots
from lapa2_interp.machine import Dtype, tell_if_slow
from lapa2_interp.paper.scripts import ScriptOptions, count
from lapa2_interp.runs.generate import run_arms
from lapa2_interp.runs.manifest import new_folder, read_manifest, read_run, write_run
from lapa2_interp.scoring import Cache
from lapa2_interp.scoring.embedded import EmbeddedScorer
from lapa2_interp.scoring.tables import cell_table, difference_table, score_table
from lapa2_interp.scoring.transformer import Perplexity
from lapa2_interp.stats import mean_interval, paired_difference, tails

parser = ScriptOptions("Boost different keys and see what attention, control and fluency do.")
parser.add_argument("--out", type=Path, default=Path("results/span_question"), help="folder of runs, one per arm")
parser.add_argument("--model", default="smollm2-135m", help="a name of `lapa2 models`, a hub id or a folder")
parser.add_argument(
    "--samples", type=count(), default=40, help="texts per prompt and attribute; 77 show 4 points of accuracy"
)
parser.add_argument("--prompts", type=count(2, 15), default=15, help="of the paper's 15 sentiment prompts")
parser.add_argument("--length", type=count(), default=64, help="tokens of a text, its prompt included")
parser.add_argument(
    "--dtype", default="auto", choices=("auto", *get_args(Dtype)),
    help="precision of weights and computation; auto is bfloat16 or float32, whichever this machine computes faster",
)  # fmt: skip
parser.add_argument(
    "--perplexity", type=count(), default=10, help="texts per prompt and attribute whose perplexity is measured"
)
options = parser.read()
tell_if_slow(options.dtype)

# %% [markdown]
# ## The arms
#
# Live slots of "Very positive:" in SmolLM2: BOS 0, the prefix 1 to 3, the prompt from 4 on. Explicit slots take their own size
# as n, so that a single token gets alpha * log(l).

# %%
TOKENS = {"Very": (1, 2), "positive": (2, 3), ":": (3, 4)}
ARMS = {
    "baseline": None,
    **{f"prefix {alpha:g}": Augmentation(alpha=alpha) for alpha in (0.25, 0.5, 0.75)},
    **{f"released {alpha:g}": Augmentation(alpha=alpha, profile="released") for alpha in (0.5, 1.0, 1.5)},
    "bos 0.5": Augmentation(alpha=0.5, span="bos"),
    "prefix+bos 0.5": Augmentation(alpha=0.5, span="prefix+bos"),
    **{f"{name} 0.5": Augmentation(alpha=0.5, span=(slots,)) for name, slots in TOKENS.items()},
    "sham 0.5": Augmentation(alpha=0.5, span=((4, 6),)),
}

# %%
task = load_task("sentiment")
model = None
runs = {}
folders = {arm: options.out / arm.replace(" ", "_").replace(":", "colon") for arm in ARMS}
there = [read_manifest(folder).model.dtype for folder in folders.values() if folder.exists()]
dtype = there[0] if there and options.dtype == "auto" else options.dtype  # goes on as it was begun
for number, (arm, augmentation) in enumerate(ARMS.items(), 1):
    folder = folders[arm]
    if not folder.exists():
        model = model or load_model(options.model, dtype=dtype)
        print(f"arm {number} of {len(ARMS)}: {arm}", flush=True)
        with new_folder(folder) as fresh:
            made = run_arms(
                model, methods.get("prefix"), task, tuple(task.attributes), task.prompts.texts[: options.prompts],
                {arm: augmentation}, length=options.length, samples=options.samples, seed=1, trace="pooled",
            )  # fmt: skip
            write_run(fresh, made)
    runs[arm] = read_run(folder)
del model

# %% [markdown]
# ## Mass, control, fluency

# %%
rows = []
for arm, run in runs.items():
    tokens = np.nanmean(run.trace["prefix_tokens"].to_numpy()[0], axis=1)  # sample, prefix token
    masses = {
        name: np.nanmean(run.trace[name].to_numpy()[0], axis=1) for name in ("prefix", "bos", "prompt", "generated")
    }
    masses |= {f"prefix token {i + 1}": tokens[:, i] for i in range(tokens.shape[1])}
    for name, values in masses.items():
        found = mean_interval(values, run.samples["prompt"])
        rows.append(
            {
                "arm": arm,
                "metric": f"mass: {name}",
                "mean": found.mean,
                "low": found.low,
                "high": found.high,
                "n": found.n,
            }
        )
masses = pd.DataFrame(rows)

samples = pd.concat([run.samples for run in runs.values()], ignore_index=True)
with Cache(options.out / "scores") as cache:
    scores = [score_table(samples, EmbeddedScorer("sentiment"), cache)]
    few = samples[samples["sample"] < options.perplexity]
    weights = next(iter(runs.values())).manifest.model.weights
    scores.append(score_table(few, Perplexity(options.model, generator=weights), cache))
scores = pd.concat(scores, ignore_index=True)
cells, differences = cell_table(scores), difference_table(scores)
everything = pd.concat([masses.assign(attribute="all"), cells], ignore_index=True)
table = everything[everything["attribute"] == "all"]
gains = differences[differences["metric"].isin(["accuracy", "perplexity"])]
everything.to_csv(options.out / "span_question.csv", index=False)
gains.to_csv(options.out / "differences.csv", index=False)

text = table.assign(cell=[f"{m:.3f} [{a:.3f}, {b:.3f}]" for m, a, b in table[["mean", "low", "high"]].to_numpy()])
shown = text.pivot(index="arm", columns="metric", values="cell").loc[list(ARMS)]
print(shown[["mass: prefix", "mass: bos", "accuracy", "perplexity"]].to_string())
print("\nagainst the baseline, paired on prompts; detectable: what so many texts could have shown")
columns = ["arm", "attribute", "metric", "difference", "low", "high", "p", "detectable"]
print(gains[columns].to_string(index=False, float_format="%.3f"))

# %% [markdown]
# The baseline is not the only control: boosting two prompt tokens disturbs the text as much and says nothing of the attribute.

# %%
accuracy = {arm: part for arm, part in scores[scores["metric"] == "accuracy"].groupby("arm") if arm in ARMS}
pairs = [(arm, "sham 0.5") for arm in ARMS if arm not in ("baseline", "sham 0.5")] + [("positive 0.5", ": 0.5")]
rows = []
for arm, other in pairs:
    one, two = (accuracy[name].dropna(subset="value") for name in (arm, other))
    found = paired_difference(two["value"], two["prompt"], one["value"], one["prompt"])
    rows.append(
        {"arm": arm, "against": other, "difference": found.mean, "low": found.low, "high": found.high, "p": found.p}
    )
direct = pd.DataFrame(rows)
direct.to_csv(options.out / "against_sham.csv", index=False)
print("\naccuracy, arm against arm, paired on prompts")
print(direct.to_string(index=False, float_format="%.3f"))
print("\nscorers: " + "; ".join(sorted(set(scores["scorer"]))))

# %% [markdown]
# ## Control and perplexity at equal mass
#
# The prefix arms at several alphas draw a curve of accuracy against prefix mass. An arm above it gets more control out of the
# same mass; its distance from the curve, interpolated at its own mass, has an interval from resampling prompts.


# %%
def by_prompt(metric: str) -> pd.DataFrame:
    """Means of a metric by prompt and arm."""
    if metric == "mass":
        frames = [
            run.samples.assign(value=np.nanmean(run.trace["prefix"].to_numpy()[0], axis=1)) for run in runs.values()
        ]
        found = pd.concat(frames)
    else:
        found = scores[(scores["metric"] == metric) & scores["value"].notna()]
    return found.pivot_table(index="prompt", columns="arm", values="value")


def above_the_curve(metric: str, resamples: int = 2000) -> pd.DataFrame:
    """Every arm's distance from the curve through baseline and prefix arms at the arm's own prefix mass."""
    mass = by_prompt("mass")
    value = by_prompt(metric).reindex(index=mass.index, columns=mass.columns)  # a prompt may have no scored text
    curve = ["baseline", "prefix 0.25", "prefix 0.5", "prefix 0.75"]
    others = [arm for arm in ARMS if arm not in curve]
    rng = np.random.default_rng(0)
    picks = np.concatenate([np.arange(len(mass))[None], rng.integers(0, len(mass), (resamples, len(mass)))])
    gaps = []
    for pick in picks:
        x, y = mass.iloc[pick].mean(), value.iloc[pick].mean()
        order = x[curve].sort_values().index
        at = np.interp(x[others], x[order], y[order], left=np.nan, right=np.nan)  # beyond the curve nothing is compared
        gaps.append(y[others] - at)
    first, rest = gaps[0], np.array(gaps[1:])
    low, high = np.full((2, len(others)), np.nan)
    for i in np.flatnonzero(np.isfinite(rest).any(axis=0)):
        low[i], high[i] = np.nanpercentile(rest[:, i], tails(len(mass)))
    return pd.DataFrame({"arm": others, "metric": metric, "above the curve": first, "low": low, "high": high})


matched = pd.concat([above_the_curve("accuracy"), above_the_curve("perplexity")], ignore_index=True)
matched.to_csv(options.out / "matched.csv", index=False)
print("\nat equal prefix mass: distance from the curve of the prefix arms (95 %, prompts resampled)")
print(matched.to_string(index=False, float_format="%.3f"))

# %%
figure = plots.mass_against_control(table)
figure.savefig(options.out / "span_question.png")
