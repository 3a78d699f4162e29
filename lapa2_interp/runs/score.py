"""Scores of the texts of a run or a file: means with intervals, and what each arm changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from lapa2_interp._util.paths import is_path
from lapa2_interp._util.settings import takes
from lapa2_interp._util.values import NotNegative
from lapa2_interp.commands import command
from lapa2_interp.errors import ScoringError, parameter, pluralize
from lapa2_interp.files import cache_folder, holds_only, result_folder, write_text
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.models.machine import print_if_slow
from lapa2_interp.runs.run import load_run, shown_only
from lapa2_interp.runs.settings import USUAL, ScoreSettings, SheetSettings
from lapa2_interp.runs.store import ID_COLUMNS, write_parquet
from lapa2_interp.runs.texts import (
    as_words,
    at_lengths,
    in_parts,
    only_rows,
    read_texts,
)
from lapa2_interp.scoring.human import make_sheets
from lapa2_interp.scoring.registry import ScorerOptions, check_scorers, make_scorer, trained_ending
from lapa2_interp.scoring.scorer import CLASSIFIERS, ScoreCache, expand_scorers, parse_scorer
from lapa2_interp.scoring.tables import (
    CELL_COLUMNS,
    DIFFERENCE_COLUMNS,
    EXTRA_CELL_COLUMNS,
    cell_table,
    column_names,
    difference_table,
    distinct_cells,
    format_scores,
    interval_note,
    score_table,
)
from lapa2_interp.table_formats import (
    as_csv,
    as_latex,
    as_markdown,
    as_text,
    format_number,
    interval_text,
)
from lapa2_interp.tasks.task import ALL, Task, read_task


@dataclass(frozen=True)
class Scored:
    """Scores as tables.

    Attributes:
        scores: One row per text and metric; empty where only distinct-n was asked for.
        table: Means with intervals, one row per cell and metric.
        differences: Each arm against the baseline.
    """

    scores: pd.DataFrame
    table: pd.DataFrame
    differences: pd.DataFrame

    def summary(self) -> str:
        """The cells, one block per scorer, and what the arms changed."""
        usual = ("attribute", "arm")
        names = (*CELL_COLUMNS, *EXTRA_CELL_COLUMNS)
        keys = [
            key
            for key in names
            if key in self.table
            and (self.table[key].nunique() > 1 or (key in usual and (self.table[key] != "").any()))
        ]
        blocks = []
        for scorer, part in self.table.groupby("scorer", sort=False):
            interval = [
                interval_text(low, high, ".4g").strip()
                for low, high in part[["low", "high"]].to_numpy()
            ]
            means = [format_number(mean, ".4g") for mean in part["mean"]]
            why = ["why"] if (part["skipped"] > 0).any() else []
            columns = [*keys, "metric", "mean", "interval", "n", "prompts", *why]
            cells = part.assign(mean=means, interval=interval)[columns]
            text = cells.rename(columns={"why": "skipped"}).to_string(index=False)
            blocks.append(f"\n{scorer}\n{text}")
        blocks.append(f"\n{interval_note(self.table, self.differences)}")
        if len(self.differences):
            blocks.append(
                "\nagainst the baseline, paired on prompts (p: sign-flip permutation; detectable:"
                " at 80 % power)"
            )
            drop = [key for key in self.differences if key in names and key not in keys]
            for scorer, part in self.differences.groupby("scorer", sort=False):
                rows = part.drop(columns=["scorer", *drop])
                # Without rounding errors, which ".4g" would show.
                rows = rows.assign(difference=rows["difference"].round(12))
                blocks.append(f"\n{scorer}\n{as_text(rows, '.4g')}")
        return "\n".join(blocks)


@takes(ScoreSettings)
def score(settings: ScoreSettings) -> Scored:
    """`lapa2 score` in Python; `ScoreSettings` says what it does and takes.

    Raises:
        ScoringError: Unknown scorer, nothing to score, or a scorer cannot go on.
        RunError: The source is no run, or `out` cannot be written.
    """
    source = Path(settings.source)
    names = [settings.scorers] if isinstance(settings.scorers, str) else settings.scorers
    scorers = expand_scorers(names, USUAL)
    of_judge = {
        "judge-url": settings.judge_url is not None,
        "judge-prices": settings.judge_prices is not None,
        "judge-temperature": settings.judge_temperature != 0,
        "max-cost": settings.max_cost is not None,
    }
    judge_options = [name for name in of_judge if of_judge[name]]
    _check_options(source, scorers, settings.column, settings.labels, judge_options)
    if settings.max_cost is not None and settings.judge_prices is None:
        raise ScoringError(
            f"{parameter('max_cost')} is in US dollars and needs the judge's prices: give"
            f" {parameter('judge_prices', 'IN OUT')}"
            " too, per million tokens"
        )
    if settings.dtype != "float32":
        print_if_slow(settings.dtype, settings.device)
    if gaps := _gaps(source):
        settings.notify(gaps)
    sources = [
        (
            only_rows(_with_attribute(texts, source, settings.attribute), settings.only or {}),
            manifest,
        )
        for texts, manifest in read_texts(source, settings.column, settings.only)
    ]
    sources = [source_texts for source_texts in sources if len(source_texts[0])]
    if not sources:
        raise ScoringError(f"no text of {source} has {shown_only(settings.only)}")
    longest = [manifest.cell.length for _, manifest in sources if manifest]
    if short := _short(settings.lengths, longest):
        settings.notify(short)
    sets = []
    for texts, manifest in sources:
        if settings.lengths:
            reached = [
                length
                for length in settings.lengths
                if manifest is None or length <= manifest.cell.length
            ]
            if not reached:
                continue
            texts = at_lengths(texts, manifest, reached)
        if settings.parts > 1:
            texts = in_parts(
                texts, settings.parts, shared_tokenizer(manifest.model.name) if manifest else None
            )
        temperature = settings.judge_temperature
        options = ScorerOptions(
            task=_task(settings.task, manifest.cell.task if manifest else None),
            labels=settings.labels or {},
            judge_url=settings.judge_url,
            judge_prices=settings.judge_prices,
            judge_temperature=None if temperature == "server" else temperature,
            dtype=settings.dtype,
            device=settings.device,
            generator=manifest.model.weights if manifest else None,
            trust_remote_code=settings.trust_remote_code,
        )
        sets.append((texts, options))
    if settings.out is None:
        return _score(sets, scorers, settings.cache, settings.max_cost, settings.notify)
    ours = holds_only("table.csv", "differences.csv", "scores.parquet", "table.md", "table.tex")
    with result_folder(Path(settings.out), settings.force, ours) as folder:
        scored = _score(sets, scorers, settings.cache, settings.max_cost, settings.notify)
        write_text(folder / "table.csv", as_csv(scored.table))
        write_text(folder / "differences.csv", as_csv(scored.differences))
        shown = format_scores(scored.table, scored.differences)
        title, notes = f"Scores of {source.name}", score_notes(scored.table, scored.differences)
        write_text(folder / "table.md", as_markdown(title, shown, notes))
        write_text(folder / "table.tex", as_latex(title, shown, notes, "scores"))
        if len(scored.scores):
            rows = scored.scores.drop(columns=[*ID_COLUMNS], errors="ignore")
            write_parquet(rows, folder / "scores.parquet")
    return scored


def score_notes(table: pd.DataFrame, differences: pd.DataFrame) -> list[str]:
    """Lines under a table of scores."""
    names = column_names(table)
    notes = [f"{name}: {scorer}" for (_, scorer), name in names.items()]
    notes = [f"Scorers. {'; '.join(notes)}", interval_note(table, differences)]
    if len(differences):
        notes.append("change: against the baseline, paired by prompt")
    return notes


def _check_options(
    source: Path,
    scorers: Sequence[str],
    column: str,
    labels: Mapping[str, str] | None,
    of_judge: Sequence[str],
) -> None:
    """Refuse options that nothing would read."""
    named = [parse_scorer(scorer)[1:] for scorer in scorers]
    own = {model for name, model in named if name in ("accuracy", "masked", "toxicity")}
    if source.is_dir() and column != "text":
        raise ScoringError(
            f"{parameter('column')} {column} belongs to a file of texts; {source} is a run"
        )
    own = {model for model in own if not trained_ending(model)}
    if labels and not own - {"", *CLASSIFIERS}:
        raise ScoringError(
            f"{parameter('labels')} belongs to a classifier of your own: accuracy=MODEL"
        )
    if of_judge and "judge" not in dict(named):
        raise ScoringError(
            f"{parameter(of_judge[0])} belongs to a judge: {parameter('scorers')} judge=MODEL"
        )


def _task(asked: str | None, own: Task | None) -> Task | str | None:
    """The task that is asked for, by its name or the path of its file; by default a run's own,
    which is known by its name, too."""
    if own is not None and asked in (None, own.name):
        return own
    return read_task(asked) if asked is not None and is_path(asked) else asked


def _with_attribute(texts: pd.DataFrame, source: Path, attribute: str | None) -> pd.DataFrame:
    """The texts with an attribute that they do not name themselves."""
    if attribute == ALL or ALL in set(texts["attribute"]):
        raise ScoringError(
            f"{source}: texts are steered towards {ALL!r}, which names every attribute in tables of"
            " scores; give the attribute another name"
        )
    if attribute is None:
        return texts
    if others := [
        name for name in dict.fromkeys(texts["attribute"]) if name not in ("", attribute)
    ]:
        raise ScoringError(
            f"{parameter('attribute')} {attribute} is for texts without an attribute, and"
            f" {source} has texts for"
            f" {', '.join(others)}; use"
            f" {parameter('attribute', attribute, 'only')} for some of them"
        )
    return texts.assign(attribute=attribute)


def _short(lengths: Sequence[int], longest: Sequence[int]) -> str:
    """A note on lengths that some sets of texts do not reach.

    Args:
        longest: The length of each set.

    Raises:
        ScoringError: No set reaches a length.
    """
    lengths_text = ", ".join(map(str, sorted(set(longest))))
    for length in lengths:
        if longest and length > max(longest):
            raise ScoringError(f"the run's texts have {lengths_text} tokens; {length} is longer")
    some = [str(length) for length in lengths if longest and length > min(longest)]
    return (
        f"length {', '.join(some)}: only of the longer texts, of {lengths_text} tokens"
        if some
        else ""
    )


def _score(
    sets: Sequence[tuple[pd.DataFrame, ScorerOptions]],
    scorers: Sequence[str],
    cache: str | Path | None,
    max_cost: NotNegative | None,
    notify: Callable[[str], None],
) -> Scored:
    scores, cells = [], []
    done: set[tuple[int, str, str]] = set()  # place of a set, name, and version or tokenizer
    named = [parse_scorer(asked) for asked in scorers]
    check_scorers(
        (name, model, options)
        for task, name, model in named
        for _, options in sets
        if task in ("", _task_name(options))
    )
    with ScoreCache(Path(cache or cache_folder() / "scores")) as score_cache:
        for asked, (task, name, model) in zip(scorers, named, strict=True):
            places = [n for n, one in enumerate(sets) if task in ("", _task_name(one[1]))]
            if not places:
                raise ScoringError(f"{asked}: no text of task {task!r}")
            n_texts = sum(len(sets[n][0]) for n in places)
            notify(f"{asked}: {pluralize(n_texts, 'text')}")
            if name == "distinct":
                left = [n for n in places if (n, name, model) not in done]
                done |= {(n, name, model) for n in left}
                if not left:
                    continue
                together = pd.concat([sets[n][0] for n in left], ignore_index=True)
                cells.append(distinct_cells(together, shared_tokenizer(model) if model else None))
                continue
            tables = []
            for n in places:
                texts, options = sets[n]
                limited = replace(options, max_cost=max_cost)
                with closing(make_scorer(name, model, limited)) as scorer:
                    if (once := (n, scorer.name, scorer.version)) in done:
                        continue
                    done.add(once)
                    if notice := getattr(scorer, "notice", ""):
                        notify(notice)
                    try:
                        tables.append(score_table(texts, scorer, score_cache))
                    finally:
                        if usage := getattr(scorer, "usage", ""):
                            notify(f"{name}: {usage}")
                    if max_cost is not None:
                        max_cost = max(0.0, max_cost - getattr(scorer, "spent", 0.0))
            if not tables:
                continue
            scores.append(pd.concat(tables, ignore_index=True))
            cells.append(cell_table(scores[-1]))
    all_scores = pd.concat(scores, ignore_index=True) if scores else pd.DataFrame()
    differences = (
        difference_table(all_scores) if scores else pd.DataFrame(columns=DIFFERENCE_COLUMNS)
    )
    return Scored(all_scores, pd.concat(cells, ignore_index=True), differences)


def _task_name(options: ScorerOptions) -> str:
    return options.task if isinstance(options.task, str) else getattr(options.task, "name", "")


def _gaps(source: Path) -> str:
    """A note on the cells of a run that have no texts yet."""
    if not source.is_dir():
        return ""
    run = load_run(source)
    left = len(run.by_key) - len(run.finished)
    if not left or not run.finished:  # where nothing is, an error says so
        return ""
    return (
        f"{left} of {pluralize(len(run.by_key), 'cell')} not finished, or damaged"
        f" (`{command('runs', source)}`): nothing of them is scored"
    )


@takes(SheetSettings)
def rating_sheets(settings: SheetSettings) -> pd.DataFrame:
    """`lapa2 scorers sheets` in Python; `SheetSettings` says what it does and takes.

    Returns:
        The key, as from `scoring.human.make_sheets`.

    Raises:
        ScoringError: As `score`, or `make_sheets`.
        RunError: `out` exists, or cannot be written.
    """
    source = Path(settings.source)
    sets = [texts for texts, _ in read_texts(source, settings.column, settings.only)]
    if not sets:
        raise ScoringError(f"no text of {source} has {shown_only(settings.only)}")
    texts = only_rows(pd.concat(sets, ignore_index=True), settings.only or {})
    if {"task", "method"} <= set(texts):  # what is compared is a method's arm
        arm = as_words(texts["task"]) + " " + as_words(texts["method"]) + " " + texts["arm"]
        if "variant" in texts:
            variants = as_words(texts["variant"])
            arm += variants.map(lambda variant: f" | {variant}" if variant else "")
        if "model" in texts and texts["model"].nunique() > 1:
            arm += " @ " + as_words(texts["model"])
        texts = texts.assign(arm=arm)
    texts = texts.drop(columns=[*ID_COLUMNS], errors="ignore")
    return make_sheets(texts, Path(settings.out), settings.n_texts, settings.seed)
