"""The commands that score texts: `lapa2 score` and `lapa2 scorers list | train | sheets | answers`."""

from __future__ import annotations

import math
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from lapa2_interp.errors import ScoringError, counted, one_of
from lapa2_interp.machine import Dtype, tell_if_slow
from lapa2_interp.scoring.named import NAMES, Options, make_scorer

if TYPE_CHECKING:
    import pandas as pd


app = App(
    name="scorers", help="List and train scorers; make and read sheets for human raters.", help_format="plaintext"
)


def score(
    source: Path,
    /,
    *,
    scorers: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ("accuracy", "perplexity", "distinct"),
    out: Path,
    column: str = "text",
    attribute: str | None = None,
    task: str | None = None,
    lengths: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (),
    parts: int = 1,
    labels: str = "",
    judge_url: str | None = None,
    judge_prices: tuple[float, float] | None = None,
    only: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    cache: Path | None = None,
    dtype: Dtype = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
) -> None:
    """Score the texts of a run, or of a file, and print means with 95 % intervals.

    Writes scores.parquet (one row per text and metric), table.csv, and differences.csv (each arm against the baseline). For
    example

        lapa2 score results/lake --scorers accuracy perplexity distinct --out results/lake-scores
        lapa2 score results/long --scorers accuracy --lengths 64 128 256 512 --out results/by-length
        lapa2 score texts.jsonl --scorers toxicity perplexity=gpt2-large --out results/texts
        lapa2 score results/quick --only task=sentiment method=prefix --scorers judge=MODEL --out results/quick/judge

    Args:
        source: A run folder (of `lapa2 generate` or `lapa2 sweep`), or a .jsonl, .csv or .parquet file with a column of texts
            (and prompt, attribute, arm, if known).
        scorers: accuracy, perplexity, distinct, toxicity, judge, each plain or as NAME=MODEL (`lapa2 scorers list`).
        out: The folder of tables.
        column: The file's column of texts.
        attribute: What the texts of a file without such a column were steered towards.
        task: Whose classifier the embedded accuracy is: sentiment, topic or detox; by default the run's.
        lengths: Score a run's texts as they were at these lengths.
        parts: Score texts in this many equal parts, one by one: 2 gives first and second half.
        labels: Names for a classifier's labels, as LABEL_0=negative,LABEL_1=positive.
        judge_url: Base URL of the judge's endpoint.
        judge_prices: US dollars per million input and output tokens, to count the judge's cost.
        only: Texts with these values alone, as COLUMN=VALUE.
        cache: Folder that keeps every score (default: in the user's cache), so that nothing is asked for twice.
        dtype: Precision of the perplexity model: by default float32, whatever wrote the texts.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        trust_remote_code: Run code that comes with a model.
        force: Replace an earlier folder of tables.
    """
    import os

    import pandas as pd
    from platformdirs import user_cache_dir

    from lapa2_interp.experiments.store import new_folder
    from lapa2_interp.scoring import Cache
    from lapa2_interp.scoring.tables import cell_table, difference_table, distinct_cells, score_table
    from lapa2_interp.scoring.texts import at_lengths, in_parts, read_texts

    if parts < 1:
        raise ScoringError(f"--parts must be at least 1, found {parts}")
    for each in scorers:
        if each.partition("=")[0] not in NAMES:
            raise ScoringError(one_of("scorer", each.partition("=")[0], NAMES))
    tell_if_slow(dtype, device)
    sets = []
    if gaps := _gaps(source):
        print(gaps, file=sys.stderr)
    for samples, manifest in read_texts(source, column):
        samples = _only(samples if attribute is None else samples.assign(attribute=attribute), only)
        if lengths:
            samples = at_lengths(samples, manifest, lengths)
        if parts > 1:
            samples = in_parts(samples, parts, _tokenizer(manifest.model.name) if manifest else None)
        options = Options(
            task=task or (manifest.task if manifest else None),
            labels=_labels(labels),
            judge_url=judge_url,
            judge_prices=judge_prices or (None, None),
            dtype=dtype,
            device=device,
            generator=manifest.model.weights if manifest else None,
            trust_remote_code=trust_remote_code,
        )
        if len(samples):
            sets.append((samples, options))
    if not sets:
        raise ScoringError(f"no text of {source} has {' and '.join(only)}")
    store = Cache(cache or Path(os.environ.get("LAPA2_CACHE") or user_cache_dir("lapa2_interp")) / "scores")
    scores, cells = [], []
    with store, new_folder(out, force, finished=lambda folder: (folder / "table.csv").is_file()) as folder:
        for each in scorers:
            name, _, model = each.partition("=")
            print(f"{each}: {sum(len(samples) for samples, _ in sets)} texts", file=sys.stderr)
            if name == "distinct":
                together = pd.concat([samples for samples, _ in sets], ignore_index=True)
                cells.append(distinct_cells(together, _tokenizer(model) if model else None))
                continue
            found = []
            for samples, options in sets:
                with closing(make_scorer(name, model, options)) as scorer:
                    if notice := getattr(scorer, "notice", ""):
                        print(notice, file=sys.stderr)
                    found.append(score_table(samples, scorer, store))
                    if usage := getattr(scorer, "usage", ""):
                        print(f"{name}: {usage}", file=sys.stderr)
            scores.append(pd.concat(found, ignore_index=True))
            cells.append(cell_table(scores[-1]))
        table = pd.concat(cells, ignore_index=True)
        differences = difference_table(pd.concat(scores, ignore_index=True)) if scores else pd.DataFrame()
        if scores:
            kept = pd.concat(scores, ignore_index=True)
            kept.drop(columns=["tokens"], errors="ignore").to_parquet(folder / "scores.parquet", index=False)
        table.to_csv(folder / "table.csv", index=False)
        differences.to_csv(folder / "differences.csv", index=False)
    _show(table, differences)
    print(f"\ntables in {out}")


@app.command(name="list")
def list_scorers() -> None:
    """List the scorers, and what the embedded ones reach on held-out text."""
    from lapa2_interp.scoring.embedded import WEIGHTS, load_linear

    for name, what in NAMES.items():
        print(f"{name:<11} {what}")
    print("\nembedded classifiers (linear, hashed n-grams), on text they were not trained on")
    for file in sorted(WEIGHTS.glob("*.json")):
        _, card = load_linear(file.stem)
        found = ", ".join(f"{measure} {value:.3f}" for measure, value in card.held_out.items())
        print(f"  {card.task:<10} {', '.join(card.labels):<35} {found}")


@app.command
def train(
    *,
    task: str,
    data: Annotated[tuple[str, ...], Parameter(show_default=False)],
    test: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    graded: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    c: float = 3.0,
    out: Path,
) -> None:
    """Train an embedded classifier for a task: a linear model on hashed n-grams, a few minutes on one core.

    For example

        lapa2 scorers train --task sentiment --data imdb --data sst2=3 --c 1 --test imdb --test sst2 --out results/scorers

    Args:
        task: A task of `lapa2 tasks`, or the path of a task file; its attributes are the labels.
        data: imdb, sst2 or agnews from the hub, or a file (.jsonl, .csv, .parquet, also compressed) with fields text and label;
            repeat the option for more. =WEIGHT after it says how much its texts count, such as sst2=3.
        test: The same, for the card's results; of corpora on the hub the test split is read.
        graded: A file of RealToxicityPrompts with Perspective scores (.jsonl, .jsonl.xz), for toxicity: four fifths of its rows
            are learned, the rest tests the correlation. =WEIGHT as above.
        c: Inverse strength of the L2 penalty.
        out: Folder of the weights and the card.
    """
    from lapa2_interp.corpora import read_corpus
    from lapa2_interp.scoring.training import read_graded, train_scorer
    from lapa2_interp.tasks import load_task

    chosen = load_task(task)
    if not 0 < c < math.inf:
        raise ScoringError(f"--c must be a positive number, found {c:g}")
    if out.exists() and not out.is_dir():
        raise ScoringError(f"--out {out} is a file; give a folder")
    labels = tuple(chosen.attributes)
    card = train_scorer(
        chosen.name,
        labels,
        [(read_corpus(source, labels), weight) for source, weight in map(_weighted, data)],
        [read_corpus(source, labels, "test") for source in test],
        out,
        graded=[(read_graded(Path(path), test=False), weight) for path, weight in map(_weighted, graded)],
        graded_tests=[read_graded(Path(path), test=True) for path, _ in map(_weighted, graded)],
        c=c,
    )
    for line in card.data:
        print(line)
    for name, value in card.held_out.items():
        print(f"{name}: {value:.4f}")
    print(f"{out / chosen.name}.npz, {(out / f'{chosen.name}.npz').stat().st_size / 1e6:.2f} MB")


def _weighted(source: str) -> tuple[str, float]:
    """ "sst2=3" as its name and 3; without a number, 1."""
    name, mark, weight = source.rpartition("=")
    try:
        found = float(weight)
    except ValueError:
        return source, 1.0
    if not mark or Path(source).exists():
        return source, 1.0
    if not (0 < found < math.inf):
        raise ScoringError(f"the weight in {source!r} must be a positive number")
    return name, found


@app.command
def sheets(
    source: Path,
    /,
    *,
    out: Path,
    n: int = 100,
    seed: int = 1,
    column: str = "text",
    only: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
) -> None:
    """Make blinded sheets for human raters, as CSV and as one HTML form that works offline, with the paper's rubric.

    Args:
        source: A run folder, or a file with columns text, prompt, attribute (and arm).
        out: Folder of sheet.csv and sheet.html, for the raters, and key.csv, which stays with you.
        n: Texts, over all arms together (the paper: 100 per task).
        seed: Of the draw and the order.
        column: The file's column of texts.
        only: Texts with these values alone, as COLUMN=VALUE: task=sentiment method=prefix attribute=positive.
    """
    import pandas as pd

    from lapa2_interp.scoring.human import make_sheets
    from lapa2_interp.scoring.texts import read_texts

    samples = _only(pd.concat([samples for samples, _ in read_texts(source, column)], ignore_index=True), only)
    if {"task", "method"} <= set(samples):  # of a sweep: what is compared is a method's arm
        samples["arm"] = samples["task"] + " " + samples["method"] + " " + samples["arm"]
    key = make_sheets(samples.drop(columns="tokens", errors="ignore"), out, n, seed)
    counts = ", ".join(f"{count} {arm}".strip() for arm, count in key["arm"].value_counts(sort=False).items())
    print(f"{len(key)} texts ({counts}) in {out}: give sheet.html or sheet.csv to the raters and keep key.csv")


@app.command
def answers(key: Path, /, *files: Path, out: Path | None = None) -> None:
    """Read raters' answers: means per arm with 95 % intervals, and how far the raters agree.

    Args:
        key: The key.csv of `lapa2 scorers sheets`.
        files: The raters' CSV files.
        out: Also write answers.csv, table.csv and agreement.csv into this new folder.
    """
    from lapa2_interp.experiments.store import new_folder
    from lapa2_interp.scoring.human import agreement, human_table, read_answers

    if not files:
        raise ScoringError("give the raters' files after the key: lapa2 scorers answers key.csv anna.csv ben.csv")
    found = read_answers(key, files)
    tables = {"answers": found, "table": human_table(found), "agreement": agreement(found)}
    for name in ("table", "agreement"):
        print(tables[name].to_string(index=False, float_format="%.3f") + "\n")
    if out is not None:
        with new_folder(out, finished=lambda folder: (folder / "answers.csv").is_file()) as folder:
            for name, table in tables.items():
                table.to_csv(folder / f"{name}.csv", index=False)
        print(f"tables in {out}")


def _show(table: pd.DataFrame, differences: pd.DataFrame) -> None:
    """The cells, one block per scorer, and what the arms changed."""
    from lapa2_interp.scoring.tables import KEYS

    usual = ("attribute", "arm")
    keys = [
        key
        for key in KEYS
        if key in table and (table[key].nunique() > 1 or (key in usual and (table[key] != "").any()))
    ]
    for scorer, part in table.groupby("scorer", sort=False):
        print(f"\n{scorer}")
        interval = [f"[{low:.4g}, {high:.4g}]" if low == low else "" for low, high in part[["low", "high"]].to_numpy()]
        shown = part.assign(mean=[f"{mean:.4g}" for mean in part["mean"]], interval=interval)
        columns = [
            *keys,
            "metric",
            "mean",
            "interval",
            "n",
            "prompts",
            *(["why"] if (part["skipped"] > 0).any() else []),
        ]
        print(shown[columns].rename(columns={"why": "skipped"}).to_string(index=False))
    if (table["prompts"] == 1).any():
        print("\nno interval where there is one prompt, which tells no spread")
    if len(differences):
        print("\nagainst the baseline, paired on prompts (p: sign-flip permutation; detectable: at 80 % power)")
        drop = [key for key in differences if key == "scorer" or (key in KEYS and key not in keys)]
        shown = differences.drop(columns=drop)
        shown = shown.assign(difference=shown["difference"].round(12) + 0.0)  # no -0 and no rounding error
        print(shown.to_string(index=False, float_format="%.4g"))


def _gaps(source: Path) -> str:
    """What of a sweep has no texts yet."""
    from lapa2_interp.experiments.sweep import load_run

    if not (source / "run.json").is_file():
        return ""
    run = load_run(source)
    left = len(run.plan) - len(run.finished)
    if not left:
        return ""
    return f"{left} of {counted(len(run.plan), 'cell')} not finished (`lapa2 runs {source}`): nothing of them is scored"


def _only(samples: pd.DataFrame, only: tuple[str, ...]) -> pd.DataFrame:
    """The rows that have all these values."""
    for each in only:
        column, mark, value = each.partition("=")
        if not mark:
            raise ScoringError(f"--only {each!r} is not of the form COLUMN=VALUE, such as task=sentiment")
        if column not in samples:
            raise ScoringError(one_of("column", column, samples.columns))
        samples = samples[samples[column].astype(str) == value]
    return samples


def _tokenizer(name: str) -> Any:
    from lapa2_interp.models import load_tokenizer

    return load_tokenizer(name)


def _labels(text: str) -> dict[str, str]:
    pairs = [part.split("=", 1) for part in text.split(",") if part]
    if any(len(pair) != 2 for pair in pairs):
        raise ScoringError(f"--labels {text!r} is not a list such as LABEL_0=negative,LABEL_1=positive")
    return dict(pairs)
