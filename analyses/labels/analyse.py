"""Labels of the texts of analyses/labels/run.sh, and what they say: figures/labels.

    python analyses/labels/analyse.py results/labels --train sst2 imdb agnews --out figures/labels

texts.parquet has a row for each text of the rounds that are complete, without the text: part (see
analyses/labels/README.md), task, method, arm, prompt (the first 12 digits of its sha256),
attribute, sample, and

- adapter, linear: 100 if that classifier finds the text right, else 0; in detoxification the
  toxicity in percent;
- naive Bayes: the same by a classifier of words on --train, of the continuation alone;
- nll: mean -ln p a token of the continuation, given its prompt; none where a chat tag is in it;
- attention, attention at the end: that on the prefix in percent, a mean over layers and heads, of
  all steps and of the last one; only of runs with a trace.

labels.csv has the mean of each arm, and its difference from "no bias" (the column against): paired
on prompts and attributes, p by flips of signs, uncorrected. For nll these are perplexity (exp of
the mean) and its ratio. `analyses/tools/recompute.py` computes them again from the parquet file
alone.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.lab.naive_bayes import CHAT_TAG, continuations, naive_bayes
from analyses.lab.scripts import ScriptOptions
from lapa2_interp.attention.tables import branch_name, pooled
from lapa2_interp.errors import DataError, RunError
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.generation.cell import Cell
from lapa2_interp.runs.run import Run, load_run
from lapa2_interp.scoring.registry import ScorerOptions, score_texts
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.stats import mean_interval, paired_difference
from lapa2_interp.table_formats import as_csv, as_text

NO_BIAS = "no bias"
GROUP = ["part", "task", "method"]
LABELS = ["adapter", "linear", "naive Bayes"]
ATTENTION = ["attention", "attention at the end"]


def main() -> None:
    """Score the texts, and write both tables."""
    parser = ScriptOptions("Labels of the texts of analyses/labels/run.sh")
    parser.add_argument("run", type=Path)
    parser.add_argument("--train", nargs="+", required=True, help="labelled texts: names or files")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    run = load_run(options.run, earlier=True)  # of all rounds
    arms = pd.DataFrame({key: arm_of(cell) for key, cell in run.by_key.items()}).T
    texts = run.texts(list(run.finished)).drop(columns=["task", "method", "arm", "attribute"])
    texts = with_attention(run, texts).join(arms, on="cell")
    texts = texts.drop_duplicates([*GROUP, "arm", "prompt", "attribute", "sample"], keep="last")
    texts = texts[complete(texts, arms)]
    if not len(texts):
        raise RunError(f"{run.name} has no complete round; repeat analyses/labels/run.sh")
    with ScoreCache(options.run / "scores") as cache:
        tables = [labelled(of_task, options.train, cache) for _, of_task in texts.groupby("task")]
    table = pd.concat(tables, ignore_index=True)
    table["prompt"] = [sha256(prompt.encode()).hexdigest()[:12] for prompt in table["prompt"]]
    measured = [name for name in ATTENTION if name in table]
    columns = ["cell", *GROUP, "arm", "prompt", "attribute", "sample", *LABELS, "nll", *measured]
    table = table[columns].sort_values([*GROUP, "arm", "attribute"], kind="stable")
    with atomic_write(options.out / "texts.parquet") as fresh:
        table.to_parquet(fresh, index=False, compression="zstd")
    shown = pd.DataFrame(headlines(table))
    write_text(options.out / "labels.csv", as_csv(shown, 6))
    print(as_text(shown, ".4g"))


def arm_of(cell: Cell) -> dict[str, str]:
    """The part of the plan, task, method, arm and attribute of a cell."""
    bias = next(iter(cell.active_augmentations), None)
    if bias is None:
        arm = NO_BIAS
    elif cell.task.name == "detox":
        arm = f"all heads {bias.alpha:g}"
    else:
        arm = f"{'all' if bias.heads == 'all' else len(bias.heads)} heads {bias.alpha:g}"
        arm += ", Pro-Aug" * bool(cell.parameters.get("pro_aug"))
    banned = cell.ban_words != "none"
    part = "detox" if cell.task.name == "detox" else "bases" if banned else "undecided"
    if part == "undecided" and cell.parameters.get("prefixes", "hard") != "hard":
        part = "soft"
    where = {"part": part, "task": cell.task.name, "method": cell.method}
    return where | {"arm": arm, "attribute": cell.attribute}


def with_attention(run: Run, texts: pd.DataFrame) -> pd.DataFrame:
    """The texts with the attention on the prefix that was recorded, if it was."""
    for key in run.finished:
        trace = run.trace(key)
        if trace is None:
            continue
        target = list(trace["branch"].to_numpy()).index(branch_name(trace))
        by_step = 100 * pooled(trace, "prefix")[target]
        last = (~np.isnan(by_step)).sum(1) - 1
        own = texts["cell"] == key
        texts.loc[own, ATTENTION[0]] = np.nanmean(by_step, axis=1)
        texts.loc[own, ATTENTION[1]] = by_step[range(len(last)), last]
    return texts


def complete(texts: pd.DataFrame, arms: pd.DataFrame) -> pd.Series:
    """True for texts whose prompt all arms of the method have, for all attributes."""
    keys = [*GROUP, "prompt"]
    planned = arms.groupby(GROUP)[["arm", "attribute"]].nunique().prod(axis=1)
    made = texts.groupby(keys)["cell"].nunique()
    needed = texts.set_index(GROUP).index.map(planned).to_numpy()
    return pd.Series(texts.set_index(keys).index.map(made).to_numpy() == needed, texts.index)


def labelled(texts: pd.DataFrame, train: list[str], cache: ScoreCache) -> pd.DataFrame:
    """The texts of a task with their labels."""
    texts = texts.reset_index(drop=True)
    task = str(texts["task"][0])
    options = ScorerOptions(task=task)
    name = "toxicity" if task == "detox" else "accuracy"
    for label in ("adapter", "linear"):
        scores = score_texts(texts, [f"{name}={label}"], options, cache)
        texts[label] = 100.0 * scores["value"].to_numpy(float)
    texts["naive Bayes"] = texts["nll"] = np.nan
    if task != "detox":
        attributes = sorted(texts["attribute"].unique())
        counts, model = naive_bayes(of_task(train, attributes), attributes)
        guess = model.predict(counts.transform(continuations(texts)))
        texts["naive Bayes"] = 100.0 * (guess == texts["attribute"].to_numpy())
    read = (texts["part"] == "bases") & ~texts["text"].str.contains(CHAT_TAG, regex=False)
    if read.any():
        scores = score_texts(texts[read], ["conditional-perplexity"], options, cache)
        texts.loc[read, "nll"] = np.log(pd.to_numeric(scores["value"]).to_numpy(float))
    return texts


def of_task(train: list[str], attributes: list[str]) -> list[str]:
    """The labelled texts that have these attributes."""
    from lapa2_interp.tasks.corpora import read_corpus

    there = []
    for source in train:
        try:
            read_corpus(source, attributes)
        except DataError:
            continue
        there.append(source)
    if not there:
        raise DataError(f"none of {', '.join(train)} has texts of {', '.join(attributes)}")
    return there


def headlines(table: pd.DataFrame) -> list[dict]:
    """Means and differences."""
    rows = []
    for group, texts in table.groupby(GROUP, sort=False):
        where = dict(zip(GROUP, group, strict=True))
        for metric in (*LABELS, "nll", *(name for name in ATTENTION if name in texts)):
            by_arm = dict(iter(texts[texts[metric].notna()].groupby("arm")))
            for arm in sorted(by_arm, key=lambda arm: (arm != NO_BIAS, arm)):
                here, part = {**where, "arm": arm, "metric": metric}, by_arm[arm]
                mean = mean_interval(part[metric], part["prompt"])
                rows.append(here | {"against": ""} | in_unit(metric, mean) | sizes(part))
                if arm != NO_BIAS:
                    before = by_arm[NO_BIAS]
                    change = paired_difference(
                        before[metric], before["prompt"], part[metric], part["prompt"],
                        kinds=(before["attribute"], part["attribute"]),
                    )  # fmt: skip
                    row = here | {"against": NO_BIAS} | in_unit(metric, change)
                    rows.append(row | sizes(part) | {"p": change.p})
    return rows


def in_unit(metric: str, interval) -> dict[str, float]:
    """The ends of an interval; of nll as perplexity."""
    ends = {name: getattr(interval, name) for name in ("mean", "low", "high")}
    if metric == "nll":
        ends = {name: float(np.exp(value)) for name, value in ends.items()}
    return ends


def sizes(part: pd.DataFrame) -> dict[str, int]:
    """Numbers of texts and of prompts."""
    return {"texts": len(part), "prompts": part["prompt"].nunique()}


if __name__ == "__main__":
    main()
