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
# prefix token. Here the bias alpha * log(l/n) goes to different keys and nothing else changes: the exact prefix, the released
# slots, BOS alone, prefix and BOS, each prefix token by itself, and a sham span (two prompt tokens). For every arm: where the
# mass goes, how well the texts carry their attribute, and how fluent they are; then control against mass, so that arms are
# compared where they put as much attention on the prefix.
#
# An hour on one core with the defaults, two with --samples 77; an arm that is finished is never made again, so kill and repeat as
# you like.
#
# What it says of SmolLM2 (--samples 77: 2,310 texts an arm, 64 tokens; intervals over 15 prompts):
#
# - The paper's span takes prefix attention from .028 to .042, .063 and .091 (alpha 1/4, 1/2, 3/4) and accuracy up by 2.8
#   [0.7, 4.9], 2.1 [-0.3, 4.5] and 2.8 [0.3, 5.5] points: more attention buys no more control.
# - The released span at alpha 1 gains 5.2 points [2.8, 7.6] with less prefix attention (.050): 2.6 [0.2, 5.1] above the curve of
#   the prefix arms at equal mass (one of eight such comparisons). It pays in perplexity, 42 against 28 on the curve.
# - BOS alone moves attention to BOS and changes neither accuracy (-0.3 [-3.3, 2.4]) nor, clearly, perplexity.
# - Mass and control do part ways, token by token: " positive" alone is worth the whole prefix (4.0 [1.3, 6.5]), while ":" alone
#   takes more attention than it (.063 against .049) and gives nothing (0.8 [-1.3, 2.9]).
#
#     python analyses/span_question.py --out results/span_question --samples 40

# %%
import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from lapa2_interp import Augmentation, load_model, load_task, methods, plots
from lapa2_interp.experiments.runner import run_arms
from lapa2_interp.experiments.store import new_folder, read_run, write_run
from lapa2_interp.scoring import Cache
from lapa2_interp.scoring.embedded import EmbeddedScorer
from lapa2_interp.scoring.tables import cell_table, difference_table, score_table
from lapa2_interp.scoring.transformer import Perplexity
from lapa2_interp.stats import mean_interval

parser = argparse.ArgumentParser(description="Boost different keys and see what attention, control and fluency do.")
parser.add_argument("--out", type=Path, default=Path("results/span_question"), help="folder of runs, one per arm")
parser.add_argument("--model", default="smollm2-135m", help="a name of `lapa2 models`, a hub id or a folder")
parser.add_argument(
    "--samples", type=int, default=40, help="texts per prompt and attribute; 77 show 4 points of accuracy"
)
parser.add_argument("--prompts", type=int, default=15, help="of the paper's 15 sentiment prompts")
parser.add_argument("--length", type=int, default=64, help="tokens of a text, its prompt included")
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument(
    "--perplexity", type=int, default=10, help="texts per prompt and attribute whose perplexity is measured"
)
options, _ = parser.parse_known_args()

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
for number, (arm, augmentation) in enumerate(ARMS.items(), 1):
    folder = options.out / arm.replace(" ", "_").replace(":", "colon")
    if not folder.exists():
        model = model or load_model(options.model, dtype=options.dtype)
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
    scores.append(score_table(few, Perplexity(options.model, generator=weights, dtype=options.dtype), cache))
scores = pd.concat(scores, ignore_index=True)
cells, differences = cell_table(scores), difference_table(scores)
table = pd.concat([masses, cells[cells["attribute"] == "all"].drop(columns="attribute")], ignore_index=True)
gains = differences[(differences["attribute"] == "all") & differences["metric"].isin(["accuracy", "perplexity"])]
table.to_csv(options.out / "span_question.csv", index=False)
gains.to_csv(options.out / "differences.csv", index=False)

text = table.assign(cell=[f"{m:.3f} [{a:.3f}, {b:.3f}]" for m, a, b in table[["mean", "low", "high"]].to_numpy()])
shown = text.pivot(index="arm", columns="metric", values="cell").loc[list(ARMS)]
print(shown[["mass: prefix", "mass: bos", "accuracy", "perplexity"]].to_string())
print("\nagainst the baseline, paired on prompts; detectable: what so many texts could have shown")
print(
    gains[["arm", "metric", "difference", "low", "high", "p", "detectable"]].to_string(index=False, float_format="%.3f")
)
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
        low[i], high[i] = np.nanpercentile(rest[:, i], [2.5, 97.5])
    return pd.DataFrame({"arm": others, "metric": metric, "above the curve": first, "low": low, "high": high})


matched = pd.concat([above_the_curve("accuracy"), above_the_curve("perplexity")], ignore_index=True)
matched.to_csv(options.out / "matched.csv", index=False)
print("\nat equal prefix mass: distance from the curve of the prefix arms (95 %, prompts resampled)")
print(matched.to_string(index=False, float_format="%.3f"))

# %%
figure = plots.mass_against_control(table)
figure.savefig(options.out / "span_question.png")
