# %% [markdown]
# # The span question: which keys should be boosted?
#
# The paper boosts the prefix. Its released code counts slots from 0, so it boosts BOS, the
# attention sink, and misses the last prefix token. Here the bias alpha * log(l/n) goes to different
# keys and nothing else changes: the exact prefix, the released slots, BOS alone, prefix and BOS,
# each prefix token by itself, and a sham span (two prompt tokens). For every arm: where the mass
# goes, how well the texts carry their attribute, and how fluent they are; then control against
# mass, so that arms are compared where they put as much attention on the prefix.
#
# --samples 77 took three core-hours, the defaults take about half of that; an arm that is finished
# is never made again, so kill and repeat as you like.
#
# What it says of SmolLM2 (--samples 77: 2,310 texts an arm of 64 tokens, perplexity of 300;
# intervals over 15 prompts):
#
# - Mass is not control. The paper's span takes prefix attention from .028 to .042, .063 and .091
#   (alpha 1/4, 1/2, 3/4) and accuracy from .593 up by 2.8 [0.4, 5.2], 2.1 [-0.6, 4.8] and 2.8 [0.0,
#   5.9] points, most of it on "positive". The sham span gives 1.6 [-1.3, 4.6], on "positive" too,
#   with less prefix attention than the baseline: at alpha 1/2 the two do not differ significantly
#   (0.5 [-1.8, 3.1]).
# - " positive" or " negative" alone beats ":" alone by 3.2 points [0.8, 5.4] (p .015, one of
#   several comparisons) with less attention on the prefix (.049 against .063). A single token gets
#   alpha log(l), more than a token of the whole prefix.
# - The released span gains most, 5.2 [2.6, 8.0] at alpha 1 (sham: 3.5 less, [0.0, 7.6]), on both
#   attributes, and pays most: perplexity 42 instead of 24, where the paper's span has 28 at the
#   same prefix attention.
# - BOS alone takes attention to BOS and changes nothing: -0.3 points [-3.9, 2.6], perplexity +1.0
#   [-0.8, 2.7].
#
#     python analyses/span/analyse.py --out results/span_question --samples 40

# %%
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import torch

from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp import Augmentation, Layout, load_run
from lapa2_interp.attention.trace import join_traces
from lapa2_interp.commands import command
from lapa2_interp.errors import LayoutError, RunError
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods import load_task
from lapa2_interp.models import load_tokenizer
from lapa2_interp.models.machine import (
    Dtype,
    print_if_slow,
)
from lapa2_interp.plots import COLOURS, crosses, legend_above, new_figure, plain_axes
from lapa2_interp.runs.engines import InProcess
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.grid import Grid
from lapa2_interp.runs.run import finished_cell
from lapa2_interp.scoring.equal_perplexity import interpolate_at_perplexity, resampled_interval
from lapa2_interp.scoring.registry import ScorerOptions, score_texts
from lapa2_interp.scoring.scorer import ScoreCache, expand_scorers
from lapa2_interp.scoring.tables import (
    cell_table,
    difference_table,
    metric_name,
    paired_change,
    score_table,
)
from lapa2_interp.scoring.transformer import Perplexity
from lapa2_interp.stats import mean_interval
from lapa2_interp.table_formats import as_text, interval_cells

parser = ScriptOptions("Boost different keys and see what attention, control and fluency do.")
parser.add_argument(
    "--out", type=Path, default=Path("results/span_question"), help="folder of runs, one per arm"
)
parser.add_argument(
    "--model", default="smollm2-135m", help="a name of `lapa2 models`, a hub id or a folder"
)
parser.add_argument(
    "--samples",
    type=whole_number(),
    default=40,
    help="texts per prompt and attribute; 77 show 4 points of accuracy",
)
parser.add_argument(
    "--prompts", type=whole_number(2, 15), default=15, help="of the paper's 15 sentiment prompts"
)
parser.add_argument(
    "--length", type=whole_number(), default=64, help="tokens of a text, its prompt included"
)
parser.add_argument(
    "--dtype",
    default="auto",
    choices=("auto", *get_args(Dtype)),
    help=(
        "precision of weights and computation; auto is bfloat16 or float32, whichever this machine"
        " computes faster"
    ),
)
parser.add_argument(
    "--perplexity",
    type=whole_number(),
    default=10,
    help="texts per prompt and attribute whose perplexity is measured",
)
options = parser.parse_args()
print_if_slow(options.dtype)

# %% [markdown]
# ## The arms
#
# Live slots of "Very positive:" in SmolLM2: BOS 0, the prefix 1 to 3, the prompt from 4 on.
# Explicit slots take their own size as n, so that a single token gets alpha * log(l).

# %%
task = load_task("sentiment")
tokenizer = load_tokenizer(options.model)
for attribute in task.attributes.values():
    if (span := Layout.of(tokenizer, attribute.prefix, "The lake").prefix) != (1, 4):
        raise LayoutError(
            f"the arms count the tokens of {attribute.prefix!r} from slot 1 to 4, and for"
            f" {options.model} they are slots {span.start} to {span.stop}; use a model whose"
            " tokenizer splits it as Very| positive|:"
        )
TOKENS = {"Very": (1, 2), "positive": (2, 3), ":": (3, 4)}
ARMS = {
    "baseline": None,
    **{f"prefix {alpha:g}": Augmentation(alpha=alpha) for alpha in (0.25, 0.5, 0.75)},
    **{
        f"released {alpha:g}": Augmentation(alpha=alpha, profile="released")
        for alpha in (0.5, 1.0, 1.5)
    },
    "bos 0.5": Augmentation(alpha=0.5, span="bos"),
    "prefix+bos 0.5": Augmentation(alpha=0.5, span="prefix+bos"),
    **{f"{name} 0.5": Augmentation(alpha=0.5, span=(slots,)) for name, slots in TOKENS.items()},
    "sham 0.5": Augmentation(alpha=0.5, span=((4, 6),)),
}

# %%
folder = options.out / "runs"
dtype = options.dtype
if dtype == "auto" and (folder / "run.json").is_file():  # continues as it was begun
    dtype = next(iter(load_run(folder).by_key.values())).dtype
cells = {
    arm: [
        cell_of(
            options.model,
            method="prefix",
            task=task,
            attribute=attribute,
            prompts=task.prompts.texts[: options.prompts],
            augmentation=augmentation,
            alpha=0.0 if augmentation is None else None,
            length=options.length,
            samples=options.samples,
            trace="pooled",
            dtype=dtype,
        )
        for attribute in task.attributes
    ]
    for arm, augmentation in ARMS.items()
}
grids = [Grid(arm, "", tuple(own)) for arm, own in cells.items()]
done = fill_run(folder, grids, InProcess(threads=torch.get_num_threads()))
if done.failed:
    finished = command("runs", folder, traceback=True)
    raise RunError(f"{len(done.failed)} cells failed; `{finished}` says why")
run = load_run(folder)


def of_arm(arm):
    """The texts of an arm, and their trace."""
    made = [finished_cell(run, cell.key) for cell in cells[arm]]
    texts = pd.concat([batch.texts for batch in made], ignore_index=True).assign(arm=arm)
    return texts, join_traces([batch.trace for batch in made], texts)


arms = {arm: of_arm(arm) for arm in ARMS}

# %% [markdown]
# ## Mass, control, fluency

# %%
rows = []
for arm, (texts, trace) in arms.items():
    tokens = np.nanmean(trace["prefix_tokens"].to_numpy()[0], axis=1)  # sample, prefix token
    masses = {
        name: np.nanmean(trace[name].to_numpy()[0], axis=1)
        for name in ("prefix", "bos", "prompt", "generated")
    }
    masses |= {f"prefix token {i + 1}": tokens[:, i] for i in range(tokens.shape[1])}
    for name, values in masses.items():
        interval = mean_interval(values, texts["prompt"])
        rows.append({"arm": arm, "metric": f"mass: {name}", **interval.columns, "n": interval.n})
masses = pd.DataFrame(rows)

judged = pd.concat([texts for texts, _ in arms.values()], ignore_index=True)
with ScoreCache(options.out / "scores") as cache:
    asked = expand_scorers(["accuracy", "masked", "echo"], ())
    scores = [score_texts(judged, asked, ScorerOptions(task="sentiment"), cache)]
    few = judged[judged["sample"] < options.perplexity]
    weights = run.manifest(next(iter(run.by_key))).model.weights
    scores.append(score_table(few, Perplexity(options.model, generator=weights), cache))
scores = pd.concat(scores, ignore_index=True)
cells, differences = cell_table(scores), difference_table(scores)
everything = pd.concat([masses.assign(attribute="all"), cells], ignore_index=True)
table = everything[everything["attribute"] == "all"]
gains = differences[differences["metric"] != "echo"]
everything.to_csv(options.out / "span_question.csv", index=False)
gains.to_csv(options.out / "differences.csv", index=False)

text = table.assign(cell=interval_cells(table, ".3f"))
shown = text.pivot(index="arm", columns="metric", values="cell").loc[list(ARMS)]
shown = shown[["mass: prefix", "mass: bos", *dict.fromkeys(scores["metric"])]]
print(shown.to_string())
print("\nagainst the baseline, paired on prompts; detectable: what so many texts could have shown")
columns = ["arm", "attribute", "metric", "difference", "low", "high", "p", "detectable"]
print(as_text(gains[columns], ".3f"))

# %% [markdown]
# The baseline is not the only control: boosting two prompt tokens disturbs the text as much and
# says nothing of the attribute.

# %%
ACCURACY = [name for name in dict.fromkeys(scores["metric"]) if metric_name(name) == "accuracy"]
by_arm = dict(list(scores.dropna(subset="value").groupby(["metric", "arm"])))
pairs = [(arm, "sham 0.5") for arm in ARMS if arm not in ("baseline", "sham 0.5")] + [
    ("positive 0.5", ": 0.5")
]
rows = []
for metric in ACCURACY:
    for arm, reference in pairs:
        one, two = by_arm[metric, arm], by_arm[metric, reference]
        change = paired_change(two, one)
        rows.append(
            {"metric": metric, "arm": arm, "against": reference, "difference": change.mean}
            | {"low": change.low, "high": change.high, "p": change.p}
        )
direct = pd.DataFrame(rows)
direct.to_csv(options.out / "against_sham.csv", index=False)
print("\naccuracy, arm against arm, paired on prompts")
print(as_text(direct, ".3f"))
print("\nscorers: " + "; ".join(sorted(set(scores["scorer"]))))

# %% [markdown]
# ## Control and perplexity at equal mass
#
# The prefix arms at several alphas draw a curve of accuracy against prefix mass. An arm above it
# gets more control out of the same mass; its distance from the curve, interpolated at its own mass,
# has an interval from resampling prompts.


# %%
def by_prompt(metric: str) -> pd.DataFrame:
    """Means of a metric by prompt and arm."""
    if metric == "mass":
        frames = [
            texts.assign(value=np.nanmean(trace["prefix"].to_numpy()[0], axis=1))
            for texts, trace in arms.values()
        ]
        chosen_scores = pd.concat(frames)
    else:
        chosen_scores = scores[(scores["metric"] == metric) & scores["value"].notna()]
    return chosen_scores.pivot_table(index="prompt", columns="arm", values="value")


def mean_of(drawn):
    """Means over prompts [draw prompt arm]; NaN where no prompt of a draw has a number."""
    with np.errstate(invalid="ignore"):
        return np.nansum(drawn, axis=1) / (~np.isnan(drawn)).sum(axis=1)


def above_the_curve(metric: str, resamples: int = 2000) -> pd.DataFrame:
    """Every arm's distance from the curve through baseline and prefix arms at the arm's own prefix
    mass."""
    mass = by_prompt("mass")
    value = by_prompt(metric).reindex(
        index=mass.index, columns=mass.columns
    )  # a prompt may have no scored text
    curve = ["baseline", "prefix 0.25", "prefix 0.5", "prefix 0.75"]
    others = [arm for arm in ARMS if arm not in curve]
    rng = np.random.default_rng(0)
    picks = np.concatenate(
        [np.arange(len(mass))[None], rng.integers(0, len(mass), (resamples, len(mass)))]
    )
    x, y = (mean_of(values.to_numpy()[picks]) for values in (mass, value))  # draw arm
    on_curve, off = (mass.columns.get_indexer(names) for names in (curve, others))
    xs, ys = x[:, on_curve], y[:, on_curve, None]
    # Beyond the curve: NaN.
    at = [interpolate_at_perplexity(xs, ys, x[:, arm])[:, 0] for arm in off]
    gap, low, high = resampled_interval(y[:, off] - np.stack(at, axis=1), len(mass))
    return pd.DataFrame(
        {"arm": others, "metric": metric, "above the curve": gap, "low": low, "high": high}
    )


matched = pd.concat(map(above_the_curve, [*ACCURACY, "perplexity"]), ignore_index=True)
matched.to_csv(options.out / "matched.csv", index=False)
print(
    "\nat equal prefix mass: distance from the curve of the prefix arms (95 %, prompts resampled)"
)
print(as_text(matched, ".3f"))


# %%
def mass_against_control(table):
    """Accuracy and perplexity of every arm against its prefix mass, with 95 % intervals; arms of
    one span are joined, and numbers are alphas.

    Args:
        table: Columns arm (span and alpha, "prefix 0.5"), metric ("mass: prefix", "accuracy",
            "perplexity"), mean, low, high.
    """
    wide = {name: part.set_index("arm") for name, part in table.groupby("metric")}
    figure = new_figure(8.4, 4.0)
    panels = figure.subplots(1, 2)
    mass = wide["mass: prefix"]
    spans = {arm: arm.rsplit(" ", 1)[0] for arm in mass.index}
    names = [span for span in dict.fromkeys(spans.values()) if span != "baseline"]
    styles = dict(zip(names, [(c, m) for m in "os" for c in COLOURS[1:]], strict=False))
    for panel, metric in zip(panels, ("accuracy", "perplexity"), strict=True):
        metric_table = wide[metric]
        for span in names:
            arms = ["baseline"] if span == "prefix" else []
            arms += [arm for arm, own in spans.items() if own == span]
            colour, marker = styles[span]
            x, y = mass.loc[arms], metric_table.loc[arms]
            look = {"color": colour, "marker": marker, "ms": 4, "lw": 1.0, "elinewidth": 0.6}
            crosses(panel, x, y, label=span, **look)
            near = {"xytext": (4, 3), "textcoords": "offset points", "fontsize": 6}
            for arm, *point in zip(arms, x["mean"], y["mean"], strict=True):
                if arm != "baseline":
                    panel.annotate(arm.rsplit(" ", 1)[1], point, color=colour, **near)
        base = (column.loc["baseline", "mean"] for column in (mass, metric_table))
        panel.plot(*base, "k*", ms=10, label="baseline")
        plain_axes(panel, "attention on the prefix (mean over steps and heads)", metric)
    legend_above(figure, 5, panels[0])
    return figure


figure = mass_against_control(table)
figure.savefig(options.out / "span_question.png")
