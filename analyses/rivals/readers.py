"""Texts that readers labelled without knowing their arm, and how often scorers agree with them.

    python analyses/rivals/readers.py results/labels --out results/readers
    python analyses/rivals/readers.py results/readers --labels ONE.csv TWO.csv --out figures/rivals

The first takes the same number of texts of every method, arm and attribute of
analyses/labels/run.sh: sentiment 168, topic 120, toxicity 120. It writes sheet.csv for the readers
(id, task, text) and key.csv, which they do not get. A text is the continuation alone, without the
words of any prefix and their inflections ("..."). In each stratum half of the texts is for
development, half for the test.

The second reads the readers' files (id, label), which follow analyses/rivals/rubric.txt.
readers.csv has a row a text with both labels and what each scorer says of the same continuation,
readers.agreement.csv the numbers: shares of the texts on which both readers agree and are sure; of
toxicity Spearman's correlation with the mean of both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from analyses.lab.scripts import ScriptOptions
from analyses.labels.analyse import GROUP, arm_of
from lapa2_interp.errors import DataError
from lapa2_interp.files import write_text
from lapa2_interp.methods.registry import load_task
from lapa2_interp.runs.run import load_run
from lapa2_interp.scoring.echo import MASK, prefix_words
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer
from lapa2_interp.scoring.scorer import TextItem, run_scorer
from lapa2_interp.stats import mean_interval
from lapa2_interp.table_formats import as_csv, as_text

SIZES = {"sentiment": 168, "topic": 120, "detox": 120}
UNCLEAR = "unclear"
LABELS = {
    "sentiment": ("positive", "negative", UNCLEAR),
    "topic": ("world", "sports", "business", "science", UNCLEAR),
    "detox": ("0", "1", "2", "3"),
}
SCORERS = ("adapter", "linear")


def hidden_words(task: str) -> re.Pattern[str]:
    """The words of the prefixes, and what else begins as they do but for a last e or s."""
    words = {word for own in prefix_words(load_task(task)).values() for word in own}
    stems = sorted({re.sub("[es]+$", "", word) for word in words} | {"toxic"})
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, stems))})\w*", re.IGNORECASE)


def draw(source: Path, out: Path) -> None:
    """Draw the texts, and write the readers' sheet and the key."""
    run = load_run(source, earlier=True)
    arms = pd.DataFrame({key: arm_of(cell) for key, cell in run.by_key.items()}).T
    texts = run.texts(list(run.finished)).drop(columns=["task", "method", "arm", "attribute"])
    texts = texts.join(arms, on="cell").drop_duplicates([*GROUP, "arm", "attribute", "text"])
    rng, drawn = np.random.default_rng(1), []
    for task, of_task in texts.groupby("task", sort=True):
        strata = list(of_task.groupby(["method", "arm", "attribute"], sort=True))
        for _, stratum in strata:
            n = SIZES[str(task)] // len(strata)
            rows = stratum.sort_values(["prompt", "cell", "sample"]).iloc[
                rng.permutation(len(stratum))[:n]
            ]
            halves = np.where(np.arange(n) % 2, "test", "development")
            drawn.append(rows.assign(half=halves))
    key = pd.concat(drawn, ignore_index=True)
    patterns = {task: hidden_words(task) for task in SIZES}
    key["text"] = [
        patterns[task].sub(MASK, text).strip()
        for task, text in zip(key["task"], key["continuation"], strict=True)
    ]
    key["id"] = [
        sha256(f"{cell} {prompt} {sample}".encode()).hexdigest()[:8]
        for cell, prompt, sample in zip(key["cell"], key["prompt"], key["sample"], strict=True)
    ]
    key = key[["id", "half", *GROUP, "arm", "attribute", "text"]].sort_values(["task", "id"])
    write_text(out / "key.csv", as_csv(key, 6))
    write_text(out / "sheet.csv", as_csv(key[["id", "task", "text"]], 6))
    print(as_text(key.groupby(["task", "half"]).size().reset_index(name="texts")))


def join(folder: Path, labels: Sequence[Path], out: Path) -> None:
    """Join the readers' labels with the scorers', and say how far they agree."""
    table = pd.read_csv(folder / "key.csv", keep_default_na=False)
    for name, file in zip(("reader 1", "reader 2"), labels, strict=True):
        table[name] = table["id"].map(pd.read_csv(file, dtype=str).set_index("id")["label"])
        allowed = [
            label in LABELS[task] for label, task in zip(table[name], table["task"], strict=True)
        ]
        if not all(allowed):
            row = table[~np.array(allowed)].iloc[0]
            raise DataError(
                f"{file}: text {row['id']} of {row['task']} has the label {row[name]!r}; allowed:"
                f" {', '.join(LABELS[row['task']])}"
            )
    for scorer in SCORERS:
        table[scorer] = scored(table, scorer)
    save(table, out)


def save(table: pd.DataFrame, out: Path) -> None:
    """Write the texts with all labels, and what they say."""
    write_text(out / "readers.csv", as_csv(table, 6))
    numbers = pd.DataFrame(agreement(table))
    write_text(out / "readers.agreement.csv", as_csv(numbers, 6))
    print(as_text(numbers, ".3g"))


def scored(table: pd.DataFrame, scorer: str) -> pd.Series:
    """The label that a scorer gives to each text; of toxicity its probability."""
    columns = []
    for task, texts in table.groupby("task"):
        name = "toxicity" if task == "detox" else "accuracy"
        reader = make_scorer(name, scorer, ScorerOptions(task=str(task)))
        pairs = zip(texts["text"], texts["attribute"], strict=True)
        scores = run_scorer(reader, [TextItem(text, "", attribute) for text, attribute in pairs])
        if task == "detox":
            values = scores["toxicity"].to_numpy(float)
        else:
            labels = LABELS[str(task)][:-1]
            values = np.array(labels)[scores[list(labels)].to_numpy(float).argmax(1)]
        columns.append(pd.Series(values, texts.index, dtype=object))
    return pd.concat(columns).reindex(table.index)


def agreement(table: pd.DataFrame) -> list[dict]:
    """How far readers and scorers agree: shares of texts, for toxicity rank correlations."""
    rows = []
    for task in SIZES:
        for half in ("development", "test", "all"):
            texts = table[(table["task"] == task) & ((table["half"] == half) | (half == "all"))]
            one, two = (texts[name].astype(str) for name in ("reader 1", "reader 2"))
            where = {"task": task, "half": half}
            if task == "detox":
                mean = (one.astype(float) + two.astype(float)) / 2
                pairs = {"readers": (one.astype(float), two.astype(float))}
                pairs |= {name: (texts[name].astype(float), mean) for name in judges(table)}
                for who, (first, second) in pairs.items():
                    rows.append(where | {"who": who} | correlation(first, second))
                continue
            rows.append(where | {"who": "readers"} | share(one == two))
            sure = (one == two) & (one != UNCLEAR)
            rows.append(where | {"who": "both readers sure"} | share(sure))
            right = {name: texts[name][sure] == one[sure] for name in judges(table)}
            rows += [where | {"who": name} | share(own) for name, own in right.items()]
            if "gemma" in right:
                change = right["gemma"].astype(float) - right["adapter"].astype(float)
                rows.append(where | {"who": "gemma minus adapter"} | share(change))
            rows.append(
                where | {"who": "asked attribute"} | share(texts["attribute"][sure] == one[sure])
            )
    return rows


def judges(table: pd.DataFrame) -> list[str]:
    """Columns of scorers."""
    return list(table.columns[table.columns.get_loc("reader 2") + 1 :])


def share(agrees: pd.Series) -> dict[str, object]:
    """The share of texts, with an interval over texts."""
    estimate = mean_interval(100.0 * agrees.astype(float), np.arange(len(agrees)))
    ends = {name: getattr(estimate, name) for name in ("mean", "low", "high")}
    return {"measure": "percent", "texts": len(agrees)} | ends


def correlation(first: pd.Series, second: pd.Series) -> dict[str, object]:
    """Spearman's correlation, with an interval from resampled texts."""
    rng, n = np.random.default_rng(1), len(first)
    one, two = first.to_numpy(), second.to_numpy()
    drawn = [spearmanr(one[i], two[i]).statistic for i in rng.integers(n, size=(2000, n))]
    ends = dict(zip(("low", "high"), np.nanquantile(drawn, [0.025, 0.975]), strict=True))
    return {"measure": "Spearman", "texts": n, "mean": spearmanr(one, two).statistic} | ends


def main() -> None:
    """Draw texts for readers, or join their labels."""
    parser = ScriptOptions("Texts that readers labelled")
    parser.add_argument("source", type=Path, help="the run, or the folder with key.csv")
    parser.add_argument("--labels", type=Path, nargs=2, help="the files of both readers")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.labels:
        join(options.source, options.labels, options.out)
    else:
        draw(options.source, options.out)


if __name__ == "__main__":
    main()
