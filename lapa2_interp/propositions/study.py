"""`lapa2 propositions`: the paper's claims on synthetic logits and on a model, with their data.

Four sources, each stored:

1. synthetic logits;
2. texts that every alpha generates for itself, as in the paper's figures;
3. the baseline's texts, teacher-forced under every alpha, so that only alpha differs;
4. if a file is given, a long text, teacher-forced up to the context length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lapa2_interp import plots
from lapa2_interp._util.parsing import parse_json, read_text
from lapa2_interp._util.settings import takes
from lapa2_interp.attention.trace import TracedTexts, join_traces
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.synthetic import draw_means, geometric_lengths
from lapa2_interp.errors import DataError, DeadHookError, TraceError, parameter
from lapa2_interp.files import refuse_foreign_files, result_folder, write_json, write_netcdf
from lapa2_interp.generation.batch import BatchPlan
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.load import load_model
from lapa2_interp.models.machine import print_if_slow, resolve_dtype
from lapa2_interp.page import Section, page
from lapa2_interp.progress import progress_bar
from lapa2_interp.propositions import drawings as proposition_plots
from lapa2_interp.propositions.claims import ON_SYNTHETIC, count_by_source
from lapa2_interp.propositions.settings import PropositionSettings
from lapa2_interp.propositions.synthetic import (
    synthetic_shares,
    synthetic_slopes,
    synthetic_verdicts,
)
from lapa2_interp.propositions.traces import (
    decay_curve_table,
    exponent_table,
    head_decay_table,
    local_table,
    prediction_table,
    stack_alphas,
    thin,
    trace_verdicts,
)
from lapa2_interp.runs.generate import announcement, make_cells
from lapa2_interp.runs.manifest import library_versions, source_commit
from lapa2_interp.runs.run import Run, finished_cell, write_run
from lapa2_interp.runs.store import FinishedBatch, Listing
from lapa2_interp.table_formats import format_interval, format_number, interval_text, records

if TYPE_CHECKING:
    import xarray as xr

KIND, STUDY_FILE = "propositions", "study.json"
TERMINAL_ALPHAS = (0.5, 1.0)
"""Alphas whose verdicts are printed; tables/verdicts.csv has all."""
L_PRE = 3
"""Keys of the synthetic prefix; "Very positive:" has as many."""
SYNTHETIC_ROWS = 20
"""Rows of logits of each family, each twice as long as the longest text."""


@dataclass(frozen=True)
class PropositionResults:
    """Tables by name, their traces (thinned to steps in equal ratios), and the run of generated
    texts.

    Slopes and verdicts are computed on these steps; curves, heads and local ratios were computed on
    all steps.
    """

    folder: Path
    tables: dict[str, pd.DataFrame]
    traces: dict[str, xr.Dataset]
    free: Run

    def summary(self) -> str:
        """The verdicts as text."""
        verdicts = self.tables["verdicts"]
        return (
            f"{format_verdicts(verdicts)}\n\n"
            + "\n".join(count_by_source(verdicts))
            + f"\n\nLook at {self.folder}/report.html (tables/verdicts.csv has every number)."
        )


@takes(PropositionSettings)
def run_proposition_study(settings: PropositionSettings) -> PropositionResults:
    """`lapa2 propositions` in Python; `PropositionSettings` says what it does and takes.

    Raises:
        DataError: The text file cannot be read, or is too short.
        TraceError: Texts are too short to fit a slope; options of a text without a text.
        Lapa2Error: As `load_model` and `generate`; or a number is out of range.
    """
    long = {
        "long_length": settings.long_length,
        "long_texts": settings.long_texts,
        "long_alphas": settings.long_alphas,
        "long_dtype": settings.long_dtype,
    }
    if settings.text is None and (about_text := [name for name in long if long[name] is not None]):
        raise TraceError(
            f"{parameter(about_text[0])} is about a text; give it with {parameter('text', 'FILE')}"
        )
    dtype = resolve_dtype(settings.dtype, settings.device)
    long_dtype = resolve_dtype(settings.long_dtype or "float32", settings.device)
    alphas, free = _above_zero(settings.alphas), _above_zero(settings.free)
    long_alphas = _above_zero((0.5, 1.0) if settings.long_alphas is None else settings.long_alphas)
    if not long_alphas:
        raise TraceError(
            f"{parameter('long_alphas')} needs an alpha above 0; the baseline is there anyway"
        )
    for precision in dict.fromkeys((dtype, long_dtype)):
        print_if_slow(precision, settings.device)
    out = Path(settings.out)
    text = None if settings.text is None else Path(settings.text)
    with result_folder(out, settings.force, finished=_is_finished_study) as folder:
        loaded = load_model(settings.model, dtype=dtype, device=settings.device)
        name = identify(loaded).name
        tables: dict[str, pd.DataFrame] = {}
        traces: dict[str, xr.Dataset] = {}
        verdicts: list[pd.DataFrame] = []
        # Read the file and check lengths before anything slow.
        branch, long_ids = (
            _cut_long_texts(loaded, text, settings.long_length, settings.long_texts or 1)
            if text
            else (None, [])
        )
        # 1. Synthetic logits.
        if settings.synthetic_length:
            lengths = geometric_lengths(settings.synthetic_length, L_PRE)
            means = draw_means(
                lengths, L_PRE, (0.0, *alphas), rows=SYNTHETIC_ROWS, seed=settings.seed
            )
            tables["synthetic_shares"] = synthetic_shares(means)
            tables["synthetic_slopes"] = synthetic_slopes(means)
            verdicts.append(synthetic_verdicts(means))
            traces["synthetic"] = means
        # 2. Texts that every alpha generates for itself.
        run = _generate_texts(
            loaded, free, len(alphas), settings.length, settings.samples, settings.seed
        )
        own = stack_alphas({alpha: trace for alpha, (_, trace) in _texts_by_alpha(run).items()})
        where = f"{name}, each alpha its own texts"
        verdicts.append(trace_verdicts(own, where, same_texts=False, dtype=dtype))
        tables |= {"free_curves": decay_curve_table(own), "free_exponents": exponent_table(own)}
        traces["free"] = thin(own)
        # 3. The baseline's texts under every alpha.
        if alphas:
            rules = {alpha: Augmentation(alpha=alpha) for alpha in alphas}
            forced = _same_texts(loaded, run, rules)
            verdicts.append(trace_verdicts(forced, f"{name}, the same texts", dtype=dtype))
            tables |= _trace_tables(forced, rules)
            traces["forced"] = thin(forced)
        # 4. Long texts from the file.
        if text is not None and branch is not None:
            del loaded
            loaded = _load_long_reader(settings.model, long_dtype, settings.device)
            rules = {alpha: Augmentation(alpha=alpha) for alpha in long_alphas}
            read = _read_under(loaded, branch, long_ids, {0.0: None, **rules}, "reading long texts")
            stacked = stack_alphas(read)
            where = f"{name}, {len(long_ids)} x {len(long_ids[0])} tokens of {text.name}"
            verdicts.append(trace_verdicts(stacked, where, dtype=long_dtype))
            tables |= {
                f"long_{kind}": table for kind, table in _trace_tables(stacked, rules).items()
            }
            traces["long"] = thin(stacked)
        tables["verdicts"] = pd.concat(verdicts, ignore_index=True)
        results = PropositionResults(out, tables, traces, _without_traces(run))
        study = {
            "model": settings.model, "dtype": dtype, "device": settings.device, "alphas": alphas,
            "free": free, "length": settings.length, "samples": settings.samples,
            "seed": settings.seed, "synthetic_length": settings.synthetic_length,
            "text": text and text.name, **long,
        }  # fmt: skip
        _write_study(folder, results, _study_facts(study, results))
    return results


def _above_zero(alphas: Sequence[float]) -> tuple[float, ...]:
    """The alphas in order, each once, without the 0 that every part includes."""
    return tuple(sorted({float(alpha) for alpha in alphas if alpha > 0}))


def _write_study(folder: Path, results: PropositionResults, facts: dict[str, str]) -> None:
    """study.json, report.html, *.nc, free/ (a run without its trace), tables/*.csv,
    figures/*.png."""
    for name, trace in results.traces.items():
        write_netcdf(folder / f"{name}.nc", trace)
    write_run(folder / "free", results.free)
    figures = draw_figures(results.tables)
    for kind in ("tables", "figures"):
        (folder / kind).mkdir()
    for name, table in results.tables.items():
        table.to_csv(folder / "tables" / f"{name}.csv", index=False)
    for name, (_, drawing) in figures.items():
        drawing.savefig(folder / "figures" / f"{name}.png")
    write_json(folder / STUDY_FILE, {"kind": KIND, **facts})
    (folder / "report.html").write_text(
        _study_page(results.tables, figures, facts), encoding="utf-8"
    )


def _is_finished_study(folder: Path) -> bool:
    try:
        if parse_json(read_text(folder / STUDY_FILE)).get("kind") != KIND:
            return False
    except (OSError, ValueError):
        return False
    refuse_foreign_files(folder, (STUDY_FILE, "*.nc", "free", "tables", "figures", "report.html"))
    return True


def _trace_tables(
    traces: xr.Dataset, rules: Mapping[float, Augmentation]
) -> dict[str, pd.DataFrame]:
    return {
        "curves": decay_curve_table(traces),
        "exponents": exponent_table(traces),
        "heads": head_decay_table(traces),
        "predictions": prediction_table(traces, rules),
        "local": local_table(traces),
    }


def _generate_texts(
    model: Model, alphas: Sequence[float], n_read: int, length: int, samples: int, seed: int
) -> Run:
    """Texts of the baseline and of other alphas; n_read alphas read the baseline's later."""
    task = load_task("sentiment")
    cells = [
        cell_of(
            model,
            attribute=attribute,
            alpha=alpha,
            length=length,
            samples=samples,
            seed=seed,
        )
        for alpha in (0.0, *alphas)
        for attribute in task.attributes
    ]

    def announce(_: Model, plans: Sequence[BatchPlan]) -> None:
        print(announcement(model, plans), file=sys.stderr)
        print(f"then they are read under {n_read} alphas", file=sys.stderr)

    return make_cells(model, cells, name=KIND, announce=announce)


def _texts_by_alpha(run: Run) -> dict[float, tuple[pd.DataFrame, xr.Dataset]]:
    """The texts and the trace of each alpha of a run, attribute after attribute."""
    by_alpha: dict[float, list[TracedTexts]] = {}
    for key, cell in run.by_key.items():
        by_alpha.setdefault(cell.columns["alpha"], []).append(finished_cell(run, key))
    joined = {}
    for alpha, cells in by_alpha.items():
        texts = pd.concat([cell.texts for cell in cells], ignore_index=True)
        trace = join_traces([cell.trace for cell in cells if cell.trace is not None], texts)
        joined[alpha] = texts, trace.drop_vars(["arm", "sample"])
    return joined


def _same_texts(model: Model, run: Run, rules: Mapping[float, Augmentation]) -> xr.Dataset:
    """The baseline's texts of a run under every alpha, stacked; alpha 0 is the run's own trace."""
    table, base = _texts_by_alpha(run)[0.0]
    task = next(iter(run.by_key.values())).task
    pairs = zip(table["attribute"], table["prompt"], strict=True)
    layouts = [
        Layout.of(model.tokenizer, task.prefix(str(attribute)), prompt)
        for attribute, prompt in pairs
    ]
    texts = table["tokens"].tolist()
    read = _read_under(model, layouts, texts, rules, "reading the same texts")
    return stack_alphas({0.0: base, **read})


def _load_long_reader(name: str, dtype: str, device: str | None) -> Model:
    """A model that reads long texts without the matrix of scores; one with hooks where
    transformers' attention interface does not reach the attention."""
    try:
        return load_model(name, dtype, device, model_class="TransformersModel")
    except DeadHookError:
        return load_model(name, dtype, device)


def _read_under(
    model: Model,
    layouts: Layout | Sequence[Layout],
    texts: Sequence[Sequence[int]],
    rules: Mapping[float, Augmentation | None],
    what: str,
) -> dict[float, xr.Dataset]:
    """The trace of given texts under every alpha."""
    with progress_bar(len(rules) * sum(len(text) - 1 for text in texts), what) as bar:
        return {
            alpha: teacher_forced(model, layouts, texts, rule, progress=bar)
            for alpha, rule in rules.items()
        }


def _without_traces(run: Run) -> Run:
    """The run without its traces, which are stored thinned: readers of a run expect all steps."""
    cells, batches = {}, {}
    for key, cell in run.by_key.items():
        copy = Cell.model_validate(cell.model_dump() | {"trace": "none"})
        cells[copy.key] = copy
        batches[copy.key] = [
            FinishedBatch(batch.texts, None, batch.record.model_copy(update={"key": copy.key}))
            for batch in run.batches[key]
        ]
    return Run(None, Listing(grids={KIND: tuple(cells)}), cells, batches)


def _cut_long_texts(
    model: Model, file: Path, length: int | None, n: int
) -> tuple[Layout, list[list[int]]]:
    """The branch, and n texts cut from the file, as token ids.

    Raises:
        DataError: The file cannot be read, or is too short; or texts exceed the context.
    """
    try:
        content = read_text(file)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file} as text: {error}") from error
    branch = Layout.of(model.tokenizer, load_task("sentiment").attributes["positive"].prefix, "The")
    room = (facts_of(model).short_context or model.cfg.n_ctx) - len(branch) + 1
    length = length or room
    if length > room:
        raise DataError(
            f"texts of {length} tokens exceed the context after prefix and prompt; give at most"
            f" {room}"
        )
    ids = model.tokenizer(content, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < length * n:
        raise DataError(
            f"{file} has {len(ids)} tokens, fewer than {n} x {length}; give a"
            f" longer text, or fewer or shorter ones ({parameter('long_texts')},"
            f" {parameter('long_length')})"
        )
    return branch, [ids[i * length : (i + 1) * length] for i in range(n)]


# --- figures, text and page


SOURCES = {"free_": "each alpha its own texts", "": "the same texts", "long_": "long texts"}
"""Sources of the traces by the prefix of a table's name."""
TRACE_FIGURES: dict[str, tuple[str, Callable[[pd.DataFrame], plots.Drawing]]] = {
    "curves": (
        "Attention on the prefix, mean over layers and heads, {}. Dotted: C/(t+D).",
        proposition_plots.alpha_curves,
    ),
    "exponents": (
        (
            "Exponents against alpha, {}. Dotted: prediction; for log A' that of the closed form at"
            " these lengths."
        ),
        proposition_plots.slopes_against_alpha,
    ),
    "heads": (
        "Growth of e_P/e_R in every head of the baseline (0: the predicted 1/l), {}.",
        proposition_plots.growth_map,
    ),
    "predictions": (
        "A' predicted from the baseline by the exact law, and as measured, layer by layer, {}.",
        proposition_plots.predictions,
    ),
    "local": (
        (
            "Share of the nearest k keys in the attention outside the prefix, what LaPA2 changes of"
            " it, {}."
        ),
        proposition_plots.local_ratios,
    ),
}
"""Caption and figure of every table of a trace."""


def draw_figures(tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[str, plots.Drawing]]:
    """The figures of all tables: name -> (caption, figure). Each is drawn from its table only."""
    drawings: dict[str, tuple[str, plots.Drawing]] = {}
    if "synthetic_shares" in tables:
        shares = tables["synthetic_shares"]
        drawings["regimes"] = (
            (
                "Three regimes under equal logits, and what other logits make of them. Lines: means"
                " over texts; dotted: Eq. 11."
            ),
            proposition_plots.regimes(shares),
        )
        drawings["synthetic_slopes"] = (
            "Slope on log-odds against alpha: Proposition 2 is the diagonal.",
            proposition_plots.slopes_against_alpha(tables["synthetic_slopes"], "family"),
        )
    for source, what in SOURCES.items():
        for name, (caption, plot) in TRACE_FIGURES.items():
            if f"{source}{name}" in tables:
                drawings[f"{source}{name}"] = (
                    caption.format(what),
                    plot(tables[f"{source}{name}"]),
                )
    return drawings


def format_verdicts(verdicts: pd.DataFrame) -> str:
    """The verdicts as text: synthetic ones as a table of families and claims, the others one on
    each line."""
    synthetic = verdicts["where"].str.startswith(ON_SYNTHETIC)
    parts = []
    # Synthetic logits: families x claims.
    if synthetic.any():
        short = verdicts[synthetic].assign(
            family=verdicts["where"].str.removeprefix(ON_SYNTHETIC),
            claim=[_with_alpha(r) for r in records(verdicts[synthetic])],
        )
        chosen = short[short["alpha"].isna() | short["alpha"].isin(TERMINAL_ALPHAS)]
        marks = chosen["verdict"].map(
            {"as in the paper": "yes", "against the paper": "NO", "inconclusive": "?"}
        )
        table = chosen.assign(mark=marks).pivot(index="family", columns="claim", values="mark")
        table = table.loc[
            list(dict.fromkeys(chosen["family"])), list(dict.fromkeys(chosen["claim"]))
        ].fillna("")
        names = {name: f"({chr(97 + i)})" for i, name in enumerate(table.columns)}
        legend = "; ".join(f"{mark} {name}" for name, mark in names.items())
        lettered = table.rename(columns=names).rename_axis(index=None, columns=None)
        parts.append(
            "synthetic logits (yes: as in the paper, NO: against it, ?"
            f" inconclusive)\n{lettered.to_string()}\n{fill(legend, 110)}"
        )
    # Traces: a line for each claim.
    others = verdicts[~synthetic]
    if others["alpha"].isin(TERMINAL_ALPHAS).any():
        others = others[others["alpha"].isna() | others["alpha"].isin(TERMINAL_ALPHAS)]
    for where, rows in others.groupby("where", sort=False):
        lines = [
            f"  {r['verdict']:<17} {_with_alpha(r):<48}{format_number(r['mean'], '.3f'):>8}"
            f"{interval_text(r['low'], r['high'], '.3f'):<18} claimed {r['expected']}"
            for r in records(rows)
        ]
        texts = int(rows["texts"].iloc[0])
        count = (
            f"{texts} independent prompts or texts"
            if texts > 1
            else f"one text tells no interval; several do: {parameter('long_texts', '4')}"
        )
        parts.append(f"{where} ({count})\n" + "\n".join(lines))
    return "\n\n".join(parts)


def verdict_page_table(verdicts: pd.DataFrame) -> pd.DataFrame:
    """The verdicts as a table of the page, with a number and its interval in one cell."""
    return verdicts.assign(
        claim=[_with_alpha(row) for row in records(verdicts)],
        measured=[
            format_interval(row["mean"], row["low"], row["high"], ".3f")
            for row in records(verdicts)
        ],
    )[["verdict", "claim", "measured", "expected", "margin", "where", "quantity", "texts"]]


def _with_alpha(row: Mapping) -> str:
    return row["claim"] if np.isnan(row["alpha"]) else f"{row['claim']}, alpha {row['alpha']:g}"


def _study_page(
    tables: Mapping[str, pd.DataFrame],
    figures: Mapping[str, tuple[str, plots.Drawing]],
    facts: Mapping[str, str],
) -> str:
    lead = count_by_source(tables["verdicts"])
    sections = [
        Section(name.replace("_", " ").capitalize(), caption, drawing)
        for name, (caption, drawing) in figures.items()
    ]
    sections.append(
        Section(
            "Verdicts",
            "A verdict is the 95 % interval against the margin around the claim.",
            None,
            verdict_page_table(tables["verdicts"]),
        )
    )
    return page("Do the propositions hold?", lead, sections, facts)


def _study_facts(settings: Mapping[str, object], results: PropositionResults) -> dict[str, str]:
    facts = {name: str(value) for name, value in settings.items() if value is not None}
    return {
        **facts,
        "weights": results.free.manifest(next(iter(results.free.by_key))).model.weights,
        "profile": "paper (Algorithm 1): exact prefix span, l without BOS",
        "prefixes": "Very positive: / Very negative: on the paper's sentiment prompts",
        "intervals": (
            "95 %, over prompts (synthetic and long: over texts, and pieces of one file are taken"
            " as such)"
        ),
        "versions": ", ".join(f"{name} {v}" for name, v in library_versions().items()),
        "commit": source_commit() or "not a checkout",
    }
