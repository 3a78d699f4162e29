"""Does a change of lex or js order the changes of accuracy within an attribute?

    make steering-prompts DATA=FOLDER
    python analyses/lex_and_accuracy/analyse.py analyses/steering/steering.toml \\
        --texts figures/steering/sentiment.texts.parquet \\
        figures/steering/topic.texts.parquet --out figures/lex_and_accuracy

Takes the arms of grids without banned words (later runs: further grids, and the scores of their
texts). control.csv has js and lex of each prompt under each arm's bias, on given texts that the
model wrote without a prefix; what it has is not computed again. Accuracy is that of --texts.

1. points.csv: changes from the baseline, an arm and attribute a row.
2. order.csv: the rank correlation of the changes, over the arms of one attribute. "all" is the mean
   over attributes, its interval Student's over attributes.
3. left_out.csv: the changes of one attribute (or task), predicted from the others by a line through
   0. skill = 1 - squared error / that of the others' mean change, as a constant.

Intervals over prompts resample them, the same ones in accuracy and control. nll, the change of the
texts' mean NLL, is there for comparison: it knows an arm's strength, and nothing of its control.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from itertools import cycle
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp import load_model
from lapa2_interp.bias.recipes import name_families, strength
from lapa2_interp.circuits import ContrastSet, control_score
from lapa2_interp.circuits.metrics import METRICS, Metric, Predictions
from lapa2_interp.errors import RunError
from lapa2_interp.files import write_text
from lapa2_interp.generation.cell import Cell
from lapa2_interp.plots import COLOURS, Drawing, new_figure, plain_axes
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.scoring.equal_perplexity import BASELINE
from lapa2_interp.stats import bounds, resampled, tails
from lapa2_interp.table_formats import as_csv, as_text

ARM, GROUP = ["family", "strength"], ["task", "method", "attribute"]
PREDICTORS = ("lex", "js", "nll")
ALL_WORDS, RESAMPLES = "all words", 2000


def main() -> None:
    """Write the tables and the figure."""
    parser = ScriptOptions("Changes of lex and js beside changes of accuracy")
    parser.add_argument("grids", nargs="+", help="grids of the runs, names or files")
    parser.add_argument("--texts", nargs="+", type=Path, required=True, help="scores of texts")
    parser.add_argument("--n", type=whole_number(), default=48, help="prompts that are read")
    parser.add_argument("--tokens", type=whole_number(), default=16, help="tokens of a text")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cells = [cell for name in options.grids for cell in load_grid(name).cells]
    control = measured_control(cells, options.n, options.tokens, options.out / "control.csv")
    texts = pd.concat([pd.read_parquet(file) for file in options.texts], ignore_index=True)
    texts = texts[texts["words"] == ALL_WORDS]
    metrics = [name for name in texts if name.startswith("acc")]
    changes = Changes(texts, control, metrics)
    tables = {
        "points": changes.points(),
        "order": changes.order(),
        "left_out": changes.left_out(),
    }
    for name, table in tables.items():
        write_text(options.out / f"{name}.csv", as_csv(table, 6))
    for name in ("order", "left_out"):
        of_first = tables[name][tables[name]["accuracy"] == metrics[0]]
        print(as_text(of_first, ".2f"))
    draw(tables["points"], tables["order"]).savefig(options.out / "lex_and_accuracy.png")


# --- control on given texts


def measured_control(cells: Sequence[Cell], n: int, tokens: int, file: Path) -> pd.DataFrame:
    """js and lex of n prompts, evenly spaced among a task's, under the bias of each arm.

    Returns:
        A row per task, arm, attribute and prompt; js is the same for all attributes of a task.
    """
    control = pd.read_csv(file, dtype={"prompt": str}) if file.is_file() else pd.DataFrame()
    cells = [cell for cell in cells if cell.ban_words == "none"]
    for task in dict.fromkeys(cell.task.name for cell in cells):
        of_task = [cell for cell in cells if cell.task.name == task]
        arms = list(dict.fromkeys(cell.active_augmentations for cell in of_task))
        names = name_families(arms)
        if not len(control):
            missing = arms
        else:
            made = control[control["task"] == task]
            made = set(zip(made["family"], made["strength"], strict=True))
            missing = [arm for arm in arms if (names[arm], strength(arm)) not in made]
        if not missing:
            continue
        prompts = of_task[0].prompts
        prompts = [prompts[i * len(prompts) // n] for i in range(min(n, len(prompts)))]
        model = load_model(of_task[0].model, dtype="float32")
        contrast_set = ContrastSet.of(model, of_task[0].task, prompts=prompts, tokens=tokens)
        attributes = contrast_set.attributes
        metrics = {"js": METRICS["js"]}
        metrics |= {name: partial(lex_of, i) for i, name in enumerate(attributes)}
        for arm in missing:
            values = control_score(
                model, contrast_set, metrics=metrics, augmentation=arm or None
            ).values
            means = {name: steps.mean(1) for name, steps in values.items()}
            rows = [
                {"task": task, "family": names[arm], "strength": strength(arm)}
                | {"attribute": attribute, "prompt": prompt_id(prompt)}
                | {"js": means["js"][i], "lex": means[attribute][i]}
                for attribute in attributes
                for i, prompt in enumerate(contrast_set.prompts)
            ]
            control = pd.concat([control, pd.DataFrame(rows)], ignore_index=True)
            write_text(file, as_csv(control, 6))
    return pd.read_csv(file, dtype={"prompt": str})  # as it will be read again


def lex_of(target: int, predictions: Predictions) -> Metric:
    """lex with another attribute as the target."""
    order = [target, *(i for i in range(len(predictions.logits)) if i != target)]
    words = [predictions.words[i] for i in order]
    return METRICS["lex"](Predictions(predictions.logits[order], predictions.text, None, words))


def prompt_id(prompt: str) -> str:
    """A prompt's name in tables of scores."""
    return sha256(prompt.encode()).hexdigest()[:12]


# --- changes


class Changes:
    """Changes from the baseline by arm: `changes[name][i]` has, for attribute i, an array
    [resample, arm]; resample 0 is the data itself."""

    def __init__(self, texts: pd.DataFrame, control: pd.DataFrame, metrics: Sequence[str]) -> None:
        self.metrics = metrics
        prompts = np.unique(texts["prompt"])
        drawn = resampled(len(prompts), RESAMPLES, 0)
        weights = np.concatenate([np.ones((1, len(prompts))), *drawn])
        self.groups, self.arms = [], []
        self.changes: dict[str, list[np.ndarray]] = {name: [] for name in (*metrics, *PREDICTORS)}
        for group, of_group in texts.groupby(GROUP, sort=False):
            task, _, attribute = group
            read = control[(control["task"] == task) & (control["attribute"] == attribute)]
            both = set(map(tuple, of_group[ARM].to_numpy())) & set(map(tuple, read[ARM].to_numpy()))
            arms = sorted(both, key=lambda arm: (arm[0] != BASELINE, arm))
            if len(arms) < 3 or arms[0][0] != BASELINE:
                raise RunError(
                    f"{', '.join(group)}: a baseline and two arms or more are needed that are in a"
                    f" grid and in --texts; found {len(arms)} arms"
                )
            self.groups.append(group)
            self.arms.append(arms)
            for name in self.changes:
                rows = read if name in ("lex", "js") else of_group
                means = resampled_arms(rows.dropna(subset=name), name, prompts, arms, weights)
                self.changes[name].append(means[:, 1:] - means[:, :1])
        self.tails = tails(len(prompts))

    def interval(self, values: np.ndarray) -> dict[str, float]:
        """The value on the data, and its interval over prompts."""
        if np.isnan(values).all():
            return dict.fromkeys(("value", "low", "high"), np.nan)
        low, high = np.nanpercentile(values[1:], self.tails)
        return {"value": float(values[0]), "low": float(low), "high": float(high)}

    def points(self) -> pd.DataFrame:
        """The changes, a row per attribute, arm and quantity."""
        rows = []
        for i, (group, arms) in enumerate(zip(self.groups, self.arms, strict=True)):
            for j, (family, of_arm) in enumerate(arms[1:]):
                where = dict(zip(GROUP, group, strict=True))
                where |= {"family": family, "strength": of_arm}
                for name, of_groups in self.changes.items():
                    interval = self.interval(of_groups[i][:, j])
                    rows.append(where | {"change of": name} | interval)
        return pd.DataFrame(rows)

    def order(self) -> pd.DataFrame:
        """Spearman's rank correlation of the changes, of each attribute and in the mean."""
        rows = []
        for metric in self.metrics:
            for name in PREDICTORS:
                by_group = np.stack(
                    [
                        rank_correlation(before, after)
                        for before, after in zip(
                            self.changes[name], self.changes[metric], strict=True
                        )
                    ]
                )
                rows += self._with_mean({"accuracy": metric, "by": name}, by_group)
        table = pd.DataFrame(rows)
        ends = [name for name in table if name.startswith(("low", "high"))]
        return table.assign(**table[ends].clip(-1, 1))

    def left_out(self) -> pd.DataFrame:
        """How well the changes of one attribute, or of one task, follow from the others'."""
        rows = []
        for left_out, column in (("attribute", GROUP), ("task", GROUP[:1])):
            labels = [group[: len(column)] for group in self.groups]
            for metric in self.metrics:
                for name in PREDICTORS:
                    skills = np.stack(
                        [self._skill(metric, name, i, labels) for i in range(len(labels))]
                    )
                    where = {"left out": left_out, "accuracy": metric, "by": name}
                    rows += self._with_mean(where, skills)
        return pd.DataFrame(rows)

    def _skill(self, metric: str, name: str, i: int, labels: Sequence[tuple]) -> np.ndarray:
        """1 - squared error / that of a constant, by resample."""
        others = [j for j, label in enumerate(labels) if label != labels[i]]
        if not others:
            return np.full(RESAMPLES + 1, np.nan)
        x = np.concatenate([self.changes[name][j] for j in others], axis=1)
        y = np.concatenate([self.changes[metric][j] for j in others], axis=1)
        slope = (x * y).sum(1) / (x * x).sum(1)
        x_here, y_here = self.changes[name][i], self.changes[metric][i]
        error = ((slope[:, None] * x_here - y_here) ** 2).sum(1)
        return 1 - error / ((y.mean(1)[:, None] - y_here) ** 2).sum(1)

    def _with_mean(self, where: dict[str, str], by_group: np.ndarray) -> list[dict]:
        """A row for each attribute with its interval over prompts; the mean's is over attributes,
        and the one over prompts is beside it."""
        rows = [
            where | dict(zip(GROUP, group, strict=True)) | self.interval(values)
            for group, values in zip(self.groups, by_group, strict=True)
        ]
        low, high = bounds(by_group[:, 0])
        mean = self.interval(by_group.mean(0))
        of_prompts = {"low, prompts": mean["low"], "high, prompts": mean["high"]}
        everything = dict.fromkeys(GROUP, "all")
        value = {"value": mean["value"], "low": float(low), "high": float(high)}
        return [*rows, where | everything | value | of_prompts]


def resampled_arms(
    rows: pd.DataFrame,
    name: str,
    prompts: np.ndarray,
    arms: Sequence[tuple[str, float]],
    weights: np.ndarray,
) -> np.ndarray:
    """Means of a column by arm under each resample's weights of the prompts: [resample, arm]."""
    rows = rows[rows["prompt"].isin(prompts)]
    arm = pd.MultiIndex.from_tuples(arms).get_indexer(pd.MultiIndex.from_frame(rows[ARM]))
    prompt = np.searchsorted(prompts, rows["prompt"].to_numpy())
    sums, counts = np.zeros((2, len(prompts), len(arms)))
    known = arm >= 0
    np.add.at(sums, (prompt[known], arm[known]), rows[name].to_numpy()[known])
    np.add.at(counts, (prompt[known], arm[known]), 1)
    return (weights @ sums) / (weights @ counts)


def rank_correlation(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Spearman's correlation over the last axis."""
    ranks = [rankdata(values, axis=-1) for values in (one, two)]
    first, second = (values - values.mean(-1, keepdims=True) for values in ranks)
    return (first * second).sum(-1) / np.sqrt((first**2).sum(-1) * (second**2).sum(-1))


# --- figure


def draw(points: pd.DataFrame, order: pd.DataFrame) -> Drawing:
    """Changes of accuracy against those of lex and js, and their rank correlations."""
    figure = new_figure(7.4, 2.9)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
    metric = order["accuracy"].iloc[0]
    groups = [tuple(row) for row in points[GROUP].drop_duplicates().to_numpy()]
    several = points["method"].nunique() > 1
    for axes, name in ((left, "lex"), (middle, "js")):
        for group, colour in zip(groups, cycle(COLOURS), strict=False):
            rows = points[(points[GROUP] == list(group)).all(axis=1)]
            x, y = (rows[rows["change of"] == column]["value"] for column in (name, metric))
            label = f"{group[2]}, {group[1]}" if several else group[2]
            axes.plot(x, y, "o", ms=3, color=colour, label=label)
        axes.axhline(0, color="0.7", lw=0.6, zorder=0)
        axes.axvline(0, color="0.7", lw=0.6, zorder=0)
        plain_axes(axes, f"change of {name}, nats a step", "")
    left.set_ylabel("change of accuracy, points", fontsize=8)
    left.legend(fontsize=6, frameon=False)
    rows = order[order["accuracy"] == metric]
    names = [group[2] for group in groups] + ["all"]
    for shift, (name, colour) in zip((-0.2, 0.0, 0.2), zip(PREDICTORS, COLOURS[1:], strict=False),
                                     strict=True):  # fmt: skip
        of_name = rows[rows["by"] == name]
        heights = np.arange(len(of_name)) + shift
        right.hlines(heights, of_name["low"], of_name["high"], color=colour,
                     lw=1.1)  # fmt: skip
        right.plot(of_name["value"], heights, "o", ms=3, color=colour, label=name)
    right.set_yticks(range(len(names)), names)
    right.set_ylim(len(names) - 0.5, -0.5)
    right.axvline(0, color="0.7", lw=0.6, zorder=0)
    right.legend(fontsize=6, frameon=False, loc="lower left")
    plain_axes(right, "rank correlation", "")
    return figure


if __name__ == "__main__":
    main()
