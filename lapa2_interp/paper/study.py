"""`lapa2 propositions`: the paper's claims on synthetic logits and on a model, with the data they
were read from.

Four sources, each stored: synthetic logits; texts that every alpha generates for itself (as the
paper's figures); the baseline's texts read again under every alpha, so that alpha alone differs;
and, if a file is given, a long text read up to the context.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lapa2_interp._util import plots
from lapa2_interp._util.errors import DataError, TraceError
from lapa2_interp._util.files import check_own, new_folder, parse_json, read_text, write_netcdf
from lapa2_interp._util.page import Section, page
from lapa2_interp._util.progress import format_duration, progress_bar
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.synthetic import draw_log_odds, geometric_lengths, log_odds_dataset
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.loop import join_traces
from lapa2_interp.generation.plan import Plan
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.card import Model, model_card, model_short_context
from lapa2_interp.models.load import load_model
from lapa2_interp.models.machine import resolve_dtype
from lapa2_interp.paper import drawings
from lapa2_interp.paper.propositions import (
    by_alpha,
    exponent_table,
    head_table,
    local_table,
    pooled_table,
    prediction_table,
    synthetic_shares,
    synthetic_slopes,
    synthetic_verdicts,
    thin,
    trace_verdicts,
)
from lapa2_interp.runs.estimates import LONG
from lapa2_interp.runs.generate import announcement, make_cells, reading_seconds
from lapa2_interp.runs.manifest import MANIFEST, library_versions, source_commit
from lapa2_interp.runs.store import FinishedCell, Listing, Run, write_run

if TYPE_CHECKING:
    import xarray as xr

KIND = "propositions"
SHOWN = (0.5, 1.0)
"""Alphas whose verdicts a terminal shows; tables/verdicts.csv has all."""
L_PRE = 3
"""Keys of the synthetic prefix; "Very positive:" has as many."""


@dataclass(frozen=True)
class PropositionStudy:
    """What is verified, and on what.

    Attributes:
        alphas: The baseline's texts are read again under each; 0 is always there. `free`: those of
            them that also generate texts of their own.
        length: Tokens of a generated text, its prompt included. `samples`: texts per prompt and
            attribute.
        synthetic_length: Longest synthetic l; 0 leaves synthetic logits out. `synthetic_texts`:
            draws per family.
        text: A file whose beginning is read as one long text, or as several.
        long_length, long_texts: Tokens per text cut from the file (0: as many as the context has),
            and how many texts.
        long_alphas: The long texts are read under each, and under 0.
    """

    model: str = "smollm2-135m"
    dtype: str = "float32"
    device: str | None = None
    alphas: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
    free: tuple[float, ...] = (0.5, 1.0)
    length: int = 256
    samples: int = 1
    prompts: int = 15
    seed: int = 1
    synthetic_length: int = 1_000_000
    synthetic_texts: int = 20
    text: Path | None = None
    long_length: int = 0
    long_texts: int = 1
    long_alphas: tuple[float, ...] = (0.5, 1.0)
    long_dtype: str = "float32"

    def __post_init__(self) -> None:
        """Alphas in rising order, each once, without the 0 that every part has anyway.

        Raises:
            TraceError: A negative alpha, a count out of range, or an option of a text without one.
        """
        for name in ("dtype", "long_dtype"):
            object.__setattr__(self, name, resolve_dtype(getattr(self, name), self.device))
        for name in ("alphas", "free", "long_alphas"):
            given = getattr(self, name)
            option = "--" + name.replace("_", "-")
            if bad := [a for a in given if not (a >= 0 and math.isfinite(a))]:
                raise TraceError(f"{option} must be numbers of at least 0, found {bad[0]:g}")
            object.__setattr__(self, name, tuple(sorted({float(a) for a in given if a > 0})))
        least = {
            "samples": 1,
            "prompts": 1,
            "length": 1,
            "synthetic_length": 0,
            "synthetic_texts": 1,
            "long_length": 0,
            "long_texts": 1,
            "seed": 0,
        }
        for name, least_value in least.items():
            if getattr(self, name) < least_value:
                option = "--" + name.replace("_", "-")
                raise TraceError(
                    f"{option} must be at least {least_value}, found {getattr(self, name)}"
                )
        if self.text is None and (self.long_length or self.long_texts > 1):
            raise TraceError("--long-length and --long-texts cut a text: give it with --text FILE")
        if self.text is None and (self.long_alphas, self.long_dtype) != (
            PropositionStudy.long_alphas,
            PropositionStudy.long_dtype,
        ):
            raise TraceError("--long-alphas and --long-dtype read a text: give it with --text FILE")
        if self.text is not None and not self.long_alphas:
            raise TraceError("--long-alphas needs an alpha above 0; the baseline is there anyway")
        if self.prompts > (most := len(load_task("sentiment").prompts.texts)):
            raise TraceError(f"prompts must be at most {most}, found {self.prompts}")
        if 0 < self.long_length < 8:
            raise TraceError(
                "--long-length must leave steps to fit: at least 8 tokens, found"
                f" {self.long_length}"
            )


@dataclass(frozen=True)
class Verified:
    """Tables by name, the traces they were read from (thinned to steps in equal ratios), and the
    run of generated texts.

    Slopes and verdicts are read from these very steps; curves, heads and local ratios were read
    from all of them.
    """

    tables: dict[str, pd.DataFrame]
    traces: dict[str, xr.Dataset]
    free: Run


def verify(out: Path, study: PropositionStudy, force: bool = False) -> str:
    """Run a study and write its folder; returns what to print.

    The folder: manifest.json, synthetic.nc, forced.nc, free.nc, long.nc (thinned), free/ (a run
    without its trace), tables/*.csv, figures/*.png, report.html.

    Raises:
        Lapa2Error: As `load_model`, `generate`, `new_folder`; DataError for a text file that is too
            short; TraceError for texts too short to fit a slope.
    """
    with new_folder(out, force, finished=_finished) as folder:
        found = run_study(study)
        for name, trace in found.traces.items():
            write_netcdf(folder / f"{name}.nc", trace)
        write_run(folder / "free", found.free)
        figures = draw(found.tables)
        for kind in ("tables", "figures"):
            (folder / kind).mkdir()
        for name, table in found.tables.items():
            table.to_csv(folder / "tables" / f"{name}.csv", index=False)
        for name, (_, drawing) in figures.items():
            drawing.savefig(folder / "figures" / f"{name}.png")
        facts = _facts(study, found)
        (folder / MANIFEST).write_text(
            json.dumps({"kind": KIND, **facts}, indent=1) + "\n", encoding="utf-8"
        )
        (folder / "report.html").write_text(_report(found.tables, figures, facts), encoding="utf-8")
    return (
        f"{as_text(found.tables['verdicts'])}\n\nLook at {out}/report.html (tables/verdicts.csv has"
        " every number)."
    )


def _finished(folder: Path) -> bool:
    try:
        if parse_json(read_text(folder / MANIFEST)).get("kind") != KIND:
            return False
    except (OSError, ValueError):
        return False
    check_own(folder, (MANIFEST, "*.nc", "free", "tables", "figures", "report.html"))
    return True


def run_study(study: PropositionStudy) -> Verified:
    """All parts of a study, without writing anything."""
    tables: dict[str, pd.DataFrame] = {}
    traces: dict[str, xr.Dataset] = {}
    verdicts: list[pd.DataFrame] = []
    model = load_model(study.model, dtype=study.dtype, device=study.device)
    name = model_card(model).name
    # Files are read and lengths checked before anything long begins.
    long_ids = _long_texts(study, model) if study.text is not None else None
    if study.synthetic_length:
        lengths = geometric_lengths(study.synthetic_length, L_PRE)
        drawn = draw_log_odds(lengths, L_PRE, texts=study.synthetic_texts, seed=study.seed)
        alphas = (0.0, *study.alphas)
        tables["synthetic_shares"] = synthetic_shares(drawn, lengths, L_PRE, alphas)
        tables["synthetic_slopes"] = synthetic_slopes(drawn, lengths, L_PRE, alphas)
        verdicts.append(synthetic_verdicts(drawn, lengths, L_PRE, alphas))
        traces["synthetic"] = log_odds_dataset(drawn, lengths)
    free = _generate(model, study)
    own = by_alpha({alpha: trace for alpha, (_, trace) in _by_alpha(free).items()})
    verdicts.append(
        trace_verdicts(
            own, f"{name}, each alpha its own texts", same_texts=False, dtype=study.dtype
        )
    )
    tables |= {"free_curves": pooled_table(own), "free_exponents": exponent_table(own)}
    if study.alphas:
        rules = {alpha: Augmentation(alpha=alpha) for alpha in study.alphas}
        forced = read_again(model, free, rules)
        verdicts.append(trace_verdicts(forced, f"{name}, the same texts", dtype=study.dtype))
        tables |= _trace_tables(forced, rules)
        traces["forced"] = thin(forced)
    if long_ids is not None:
        if study.long_dtype != study.dtype:
            del model
            model = load_model(study.model, dtype=study.long_dtype, device=study.device)
        rules = {alpha: Augmentation(alpha=alpha) for alpha in study.long_alphas}
        branch, texts = long_ids
        found = _read_long(model, branch, texts, rules)
        where = (
            f"{name}, {len(texts)} x {len(texts[0])} tokens of"
            f" {study.text.name if study.text else ''}"
        )
        verdicts.append(trace_verdicts(found, where, dtype=study.long_dtype))
        tables |= {f"long_{kind}": table for kind, table in _trace_tables(found, rules).items()}
        traces["long"] = thin(found)
    tables["verdicts"] = pd.concat(verdicts, ignore_index=True)
    traces["free"] = thin(own)
    return Verified(tables, traces, _without_traces(free))


def _trace_tables(
    traces: xr.Dataset, rules: Mapping[float, Augmentation]
) -> dict[str, pd.DataFrame]:
    return {
        "curves": pooled_table(traces),
        "exponents": exponent_table(traces),
        "heads": head_table(traces),
        "predictions": prediction_table(traces, rules),
        "local": local_table(traces),
    }


def _generate(model: Model, study: PropositionStudy) -> Run:
    task = load_task("sentiment")
    cells = [
        Cell.of(
            model,
            attribute=attribute,
            prompts=task.prompts.texts[: study.prompts],
            alpha=alpha,
            length=study.length,
            samples=study.samples,
            seed=study.seed,
        )
        for alpha in (0.0, *study.free)
        for attribute in task.attributes
    ]
    return make_cells(
        model, cells, name=KIND, announce=lambda _, plans: _announce(model, study, plans)
    )


def _announce(model: Model, study: PropositionStudy, plans: Sequence[Plan]) -> None:
    print(announcement(model, plans), file=sys.stderr)
    baseline = sum(each.new_tokens for each in plans) // (1 + len(study.free))
    told = reading_seconds(model, len(study.alphas) * baseline)
    if told > LONG:
        print(
            f"then they are read under {len(study.alphas)} alphas: about {format_duration(told)}",
            file=sys.stderr,
        )


def _by_alpha(run: Run) -> dict[float, tuple[pd.DataFrame, xr.Dataset]]:
    """A run's texts and their traces by alpha, attribute after attribute."""
    found: dict[float, list[FinishedCell]] = {}
    for key, cell in run.plan.items():
        found.setdefault(cell.columns["alpha"], []).append(run.cell(key))
    joined = {}
    for alpha, cells in found.items():
        samples = pd.concat([each.samples for each in cells], ignore_index=True)
        trace = join_traces([each.trace for each in cells if each.trace is not None], samples)
        joined[alpha] = samples, trace.drop_vars(["arm", "sample"])
    return joined


def read_again(model: Model, run: Run, rules: Mapping[float, Augmentation]) -> xr.Dataset:
    """The texts of a run's baseline under every alpha, axes as in `propositions.by_alpha`; alpha 0
    is the run's own trace.

    Args:
        model: The one that made the run, which has hard prefixes and full traces.
        rules: Augmentations by alpha > 0.
    """
    samples, base = _by_alpha(run)[0.0]
    task = next(iter(run.plan.values())).task
    pairs = zip(samples["attribute"], samples["prompt"], strict=True)
    layouts = [
        Layout.of(model.tokenizer, task.prefix(str(attribute)), prompt)
        for attribute, prompt in pairs
    ]
    texts = samples["tokens"].tolist()
    found = {0.0: base}
    with progress_bar(
        len(rules) * sum(len(text) - 1 for text in texts), "reading the same texts"
    ) as bar:
        for alpha, rule in rules.items():
            found[alpha] = teacher_forced(
                model, layouts, texts, rule, branch="prefix", progress=bar
            )
    return by_alpha(found)


def _without_traces(run: Run) -> Run:
    """The run without its traces: they are stored thinned, and readers of a run would take them for
    whole."""
    plan, held = {}, {}
    for key, cell in run.plan.items():
        bare, made = cell.model_copy(update={"trace": "none"}), run.cell(key)
        # Cached properties of the cell it was copied from, its key among them, do not belong to it.
        bare = Cell.model_validate(bare.model_dump())
        manifest = made.manifest.model_copy(update={"trace": "none", "cell": bare.key})
        plan[bare.key], held[bare.key] = bare, FinishedCell(manifest, made.samples, None)
    return Run(None, Listing(grids={KIND: tuple(plan)}), plan, held)


def _read_long(
    model: Model,
    branch: Layout,
    texts: Sequence[Sequence[int]],
    rules: Mapping[float, Augmentation],
) -> xr.Dataset:
    found = {}
    with progress_bar(
        (1 + len(rules)) * sum(len(text) - 1 for text in texts), "reading long texts"
    ) as bar:
        for alpha, rule in ({0.0: None} | dict(rules)).items():
            found[alpha] = teacher_forced(model, branch, texts, rule, progress=bar)
    return by_alpha(found)


def _long_texts(study: PropositionStudy, model: Model) -> tuple[Layout, list[list[int]]]:
    """The branch and the texts cut from a file, each of the length asked for or as long as the
    context allows."""
    assert study.text is not None
    try:
        whole = read_text(study.text)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {study.text} as text: {error}") from error
    branch = Layout.of(model.tokenizer, load_task("sentiment").attributes["positive"].prefix, "The")
    room = (model_short_context(model) or model.cfg.n_ctx) - len(branch) + 1
    length = study.long_length or room
    if length > room:
        raise DataError(
            f"texts of {length} tokens exceed the context behind prefix and prompt; give at most"
            f" {room}"
        )
    ids = model.tokenizer(whole, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < length * study.long_texts:
        raise DataError(
            f"{study.text} has {len(ids)} tokens, fewer than {study.long_texts} x {length}; give a"
            " longer text, or fewer or shorter ones (--long-texts, --long-length)"
        )
    return branch, [ids[i * length : (i + 1) * length] for i in range(study.long_texts)]


# --- what is shown


SOURCES = {"free_": "each alpha its own texts", "": "the same texts", "long_": "long texts"}
"""What the prefix of a table's name says about the traces it was read from."""
OF_TRACES: dict[str, tuple[str, Callable[[pd.DataFrame], plots.Drawing]]] = {
    "curves": (
        "Attention on the prefix, mean over layers and heads, {}. Dotted: C/(t+D).",
        drawings.alpha_curves,
    ),
    "exponents": (
        (
            "Exponents against alpha, {}. Dotted: prediction; for log A' that of the closed form at"
            " these lengths."
        ),
        drawings.slopes_against_alpha,
    ),
    "heads": (
        "Growth of e_P/e_R in every head of the baseline (0: the predicted 1/l), {}.",
        drawings.growth_map,
    ),
    "predictions": (
        "A' predicted from the baseline by the exact law, and as measured, layer by layer, {}.",
        drawings.predictions,
    ),
    "local": (
        (
            "Share of the nearest k keys in the attention outside the prefix, what LaPA2 changes of"
            " it, {}."
        ),
        drawings.local_ratios,
    ),
}
"""Captions and drawings of the tables of a trace."""


def draw(tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[str, plots.Drawing]]:
    """Every figure whose table is there: name -> (caption, drawing). Each is drawn from its CSV
    only."""
    found: dict[str, tuple[str, plots.Drawing]] = {}
    if "synthetic_shares" in tables:
        shares = tables["synthetic_shares"]
        found["regimes"] = (
            (
                "Three regimes under equal logits, and what other logits make of them. Lines: means"
                " over texts; dotted: Eq. 8."
            ),
            drawings.regimes(shares),
        )
        found["synthetic_slopes"] = (
            "Slope on log-odds against alpha: Proposition 2 is the diagonal.",
            drawings.slopes_against_alpha(tables["synthetic_slopes"], "family"),
        )
    for source, what in SOURCES.items():
        for name, (caption, plot) in OF_TRACES.items():
            if f"{source}{name}" in tables:
                found[f"{source}{name}"] = (caption.format(what), plot(tables[f"{source}{name}"]))
    return found


def as_text(verdicts: pd.DataFrame) -> str:
    """The verdicts for a terminal: synthetic ones as a family x claim table, the others claim by
    claim."""
    made = verdicts["where"].str.startswith("synthetic: ")
    parts = []
    if made.any():
        short = verdicts[made].assign(
            family=verdicts["where"].str.removeprefix("synthetic: "),
            claim=[_with_alpha(r) for r in _records(verdicts[made])],
        )
        chosen = short[short["alpha"].isna() | short["alpha"].isin(SHOWN)]
        marks = chosen["verdict"].map(
            {"as in the paper": "yes", "against the paper": "NO", "inconclusive": "?"}
        )
        table = chosen.assign(mark=marks).pivot(index="family", columns="claim", values="mark")
        table = table.loc[
            list(dict.fromkeys(chosen["family"])), list(dict.fromkeys(chosen["claim"]))
        ].fillna("")
        names = {name: f"({chr(97 + i)})" for i, name in enumerate(table.columns)}
        legend = "; ".join(f"{mark} {name}" for name, mark in names.items())
        shown = table.rename(columns=names).rename_axis(index=None, columns=None)
        parts.append(
            "synthetic logits (yes: as in the paper, NO: against it, ?"
            f" inconclusive)\n{shown.to_string()}\n{fill(legend, 110)}"
        )
    real = verdicts[~made]
    if real["alpha"].isin(SHOWN).any():
        real = real[real["alpha"].isna() | real["alpha"].isin(SHOWN)]
    for where, rows in real.groupby("where", sort=False):
        lines = [
            f"  {r['verdict']:<17} {_with_alpha(r):<48}{r['mean']:>8.3f} {_interval(r):<17} claimed"
            f" {r['expected']}"
            for r in _records(rows)
        ]
        texts = int(rows["texts"].iloc[0])
        counted = (
            f"{texts} independent prompts or texts"
            if texts > 1
            else "one text tells no interval; several do: --long-texts 4"
        )
        parts.append(f"{where} ({counted})\n" + "\n".join(lines))
    return "\n\n".join(parts)


def shown_verdicts(verdicts: pd.DataFrame) -> pd.DataFrame:
    """The verdicts for a page: numbers with their intervals in one cell."""
    return verdicts.assign(
        claim=[_with_alpha(row) for row in _records(verdicts)],
        measured=[f"{r['mean']:.3f} {_interval(r)}".strip() for r in _records(verdicts)],
    )[["verdict", "claim", "measured", "expected", "margin", "where", "quantity", "texts"]]


def _records(table: pd.DataFrame) -> list[dict]:
    return table.to_dict("records")


def _interval(row: Mapping) -> str:
    return "" if np.isnan(row["low"]) else f"[{row['low']:.3f}, {row['high']:.3f}]"


def _with_alpha(row: Mapping) -> str:
    return row["claim"] if np.isnan(row["alpha"]) else f"{row['claim']}, alpha {row['alpha']:g}"


def _report(
    tables: Mapping[str, pd.DataFrame],
    figures: Mapping[str, tuple[str, plots.Drawing]],
    facts: Mapping[str, str],
) -> str:
    verdicts = tables["verdicts"]
    counts = verdicts["verdict"].value_counts()
    lead = (
        ", ".join(f"{count} {name}" for name, count in counts.items())
        + " of the claims put to the test."
    )
    shown = shown_verdicts(verdicts)
    sections = [
        Section(name.replace("_", " ").capitalize(), caption, drawing)
        for name, (caption, drawing) in figures.items()
    ]
    sections.append(
        Section(
            "Verdicts",
            "A verdict is the 95 % interval against the margin around the claim.",
            None,
            shown,
        )
    )
    return page("Do the propositions hold?", lead, sections, facts)


def _facts(study: PropositionStudy, found: Verified) -> dict[str, str]:
    facts = {name: str(value) for name, value in vars(study).items() if value is not None}
    if study.text is not None:
        facts["text"] = study.text.name
    return {
        **facts,
        "weights": next(iter(found.free.held.values())).manifest.model.weights,
        "profile": "paper (Algorithm 1): exact prefix span, l without BOS",
        "prefixes": "Very positive: / Very negative: on the paper's sentiment prompts",
        "intervals": (
            "95 %, over prompts (synthetic and long: over texts, and pieces of one file are taken"
            " as such)"
        ),
        "versions": ", ".join(f"{name} {v}" for name, v in library_versions().items()),
        "commit": source_commit() or "not a checkout",
    }
