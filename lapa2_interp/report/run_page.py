"""A run as one HTML file that loads nothing and escapes what models write.

It shows, of a run folder and the tables and figures made from it:

1. texts of the arms side by side, every token coloured by the attention of the query that predicted
   it;
2. the scores that lie in the run (`lapa2 score RUN`), and each arm against the baseline;
3. the paper's claims with intervals and verdicts, and ours apart from them;
4. every item: its figure, table and notes;
5. every cell with its state;
6. what was run: models, grids, weights, versions, seeds.

What is not there has no section.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from lapa2_interp._util.errors import RunError
from lapa2_interp._util.files import check_file, is_page, parse_json, read_text, write_text
from lapa2_interp._util.page import embedded, template
from lapa2_interp._util.plots import COLOURS
from lapa2_interp.attention.tables import branch_name, pooled
from lapa2_interp.bias.tokens import token_texts
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.paper.claims import (
    OUR_WORDS,
    counted_once,
    deciding_p_values,
    disagreement,
    disputed,
    read_claims,
    short_name,
)
from lapa2_interp.paper.results import read_gallery
from lapa2_interp.runs.manifest import Manifest
from lapa2_interp.runs.score import score_notes
from lapa2_interp.runs.store import STATES, FinishedCell, Run
from lapa2_interp.scoring.tables import APART, KEYS, shown_scores, told_keys

if TYPE_CHECKING:
    from markupsafe import Markup
    from transformers import PreTrainedTokenizerBase

    from lapa2_interp.generation.cell import Cell


# --- a run

ORDER = (
    "sent_topic",
    "half",
    "detox",
    "prefix_types",
    "scaling",
    "layers",
    "components",
    "prefix_preadd_components",
    "hard_prefix_robustness",
    "decay",
    "dilution",
    "alpha",
    "augmentation",
    "augmentation_large",
    "local_attn",
    "eval",
    "cases",
)
"""The items of the paper in the order of the page; others follow by name."""
MARKS = {
    "as in the paper": "✓",
    "against the paper": "✗",
    "as expected": "✓",
    "against what was expected": "✗",
    "no difference": "≈",
    "inconclusive": "○",
    "missing": "–",
}
VERDICTS = {
    "paper": [verdict for verdict in MARKS if verdict not in OUR_WORDS.values()],
    "ours": [verdict for verdict in MARKS if verdict not in OUR_WORDS],
}
"""The verdicts on the paper's claims, and on ours."""
SIZE = 3_800_000
"""Bytes a report should stay under; the number of prompts whose texts it shows follows from it."""
TOKEN_BYTES = 18
"""Bytes of the page that a token with its two masses takes, about."""
ROOM = 4
"""The scale of a metric's drawings reaches to this multiple of its median row; a value farther out
is a triangle at the end of the scale."""
PROMPTS = 8
"""Prompts whose texts are shown, at most."""
UNIT = 1e-4
"""Attention masses are rounded to multiples of this."""

PACKED = {"all": "every linear layer", "lm_head": "the output layer"}
"""What `ModelCard.packing` means, in words."""


def write_report(run: Run, tables: Path | None = None, out: Path | None = None) -> Path:
    """Write a run's page; the file.

    Args:
        tables: The folder of the items' tables, with figures/ beside it; by default RUN/tables.
        out: The file; by default RUN/report.html. One that is there is replaced. Pages of `lapa2
            view` beside it (view*.html) are linked.

    Raises:
        RunError: There are no tables in a folder that was named, or the file cannot be written.
    """
    folder = run.home / "tables" if tables is None else tables
    if tables is not None and not any(folder.glob("*.json")):
        raise RunError(
            f"--tables {folder} has no tables (ITEM.json); `python analyses/ITEM.py {run.home}`"
            " makes those of an item"
        )
    file = run.home / "report.html" if out is None else out
    if file.is_dir():
        raise RunError(f"--out {file} is a folder; give a file, such as {file / 'report.html'}")
    if not is_page(file):
        raise RunError(
            f"the name of a page ends in .html; found --out {file.name}, give"
            f" {file.with_suffix('.html').name}"
        )
    views = sorted(each.name for each in file.parent.glob("view*.html"))
    html = run_report(run, folder, folder.parent / "figures", views=views)
    try:
        write_text(file, html)
    except OSError as error:
        raise RunError(
            f"cannot write {file}: {error.strerror or error}; choose another --out"
        ) from error
    return file


def run_report(
    run: Run,
    tables: Path,
    figures: Path,
    title: str = "A LaPA2 run",
    views: Sequence[str] = (),
) -> str:
    """The page of a run as one string. The same folders give the same bytes.

    Args:
        run: Finished or not.
        tables, figures: Folders of ITEM.json, ITEM.csv and ITEM.claims.csv, and of ITEM.png; what
            is missing is left out.
        views: Names of pages of `lapa2 view` that lie beside this one, to be linked.

    Raises:
        RunError: A cell, a table or the results.json beside the tables is damaged.
        ModelError: The tokenizer of a cell's model is not there.
    """

    cells = run.cells
    names = {
        "task": list(dict.fromkeys(cells.get("task", ()))),
        "method": list(dict.fromkeys(cells.get("method", ()))),
    }
    items = _items(tables, figures, names)
    groups = _groups_of_claims(items)
    used = (
        sum(len(item["image"] or "") for item in items)
        + 3 * sum(len(str(item["rows"])) for item in items)
        + 100_000
    )
    n_prompts, texts = _texts(run, SIZE - used)
    manifests = [run.manifest(key) for key in run.finished]
    return template("run_report.html.j2", Path(__file__).parent).render(
        title=title,
        colours=COLOURS,
        verdicts={word: MARKS[word] for group in groups for word in group["verdicts"]},
        states=STATES,
        names=names,
        run=_overview(run, cells),
        facts=_facts(run, manifests),
        others=_other_runs(run, tables.parent),
        items=items,
        scores=[] if run.folder is None else _scores(run, run.folder),
        absent=[name for name in ORDER if name not in {item["name"] for item in items}],
        groups=groups,
        claims=[claim for group in groups for claim in group["claims"]],
        cells=_cell_rows(cells),
        n_prompts=n_prompts,
        max_prompts=PROMPTS,
        traced=any(text["p"] or text["b"] for text in _each_text(texts)),
        n_texts=sum(1 for _ in _each_text(texts)),
        texts=embedded(texts),
        views=[(name, f"./{quote(name)}") for name in views],
    )


# --- what was run


def _overview(run: Run, cells: pd.DataFrame) -> dict[str, Any]:
    """Counts of cells by state, in all and by grid, and of finished texts and tokens."""

    def counts(keys: Iterable[str]) -> dict[str, int]:
        states = (
            cells[cells["key"].isin(list(keys))]["state"] if len(cells) else pd.Series(dtype=str)
        )
        return {state: int((states == state).sum()) for state in STATES}

    finished = run.finished
    return {
        "states": counts(run.plan),
        "n_cells": len(run.plan),
        "texts": sum(cell.samples * len(cell.task.prompts.texts) for cell in finished.values()),
        "tokens": int(cells["tokens"].sum()) if "tokens" in cells else 0,
        "grids": [(name, counts(keys)) for name, keys in run.listing.grids.items()],
    }


def _facts(run: Run, manifests: Sequence[Manifest]) -> dict[str, list[str]]:
    """Settings and versions of the finished cells: every value that occurs, once."""
    cards = [each.model for each in manifests]
    plan = run.plan.values()
    found = {
        "Model": (
            f"{card.name}: {card.architecture}, {card.n_layers} layers x {card.n_heads} heads,"
            f" {card.dtype}, {card.model_class}"
            for card in cards
        ),
        "Weights": (f"{card.name}: {card.weights}" for card in cards),
        "Device": (card.device for card in cards),
        "CPU threads": (str(each.threads) for each in manifests if each.threads is not None),
        "Packed weights": (PACKED[card.packing] for card in cards if card.packing != "none"),
        "Package": (f"lapa2_interp {each.lapa2_interp}" for each in manifests),
        "Commit": (each.commit or "outside a git checkout" for each in manifests),
        "Libraries": (
            ", ".join(f"{name} {value}" for name, value in each.versions.items())
            for each in manifests
        ),
        "Seed": (str(cell.seed) for cell in plan),
        "Samples per prompt": (str(cell.samples) for cell in plan),
        "Longest text": (f"{cell.length} tokens" for cell in plan),
        "Sampling": (f"top-{cell.top_k}, EOS policy {cell.eos}" for cell in plan),
        "Trace": (cell.trace for cell in plan),
        "Problems": (problem for each in manifests for problem in each.problems),
    }
    return {name: there for name, values in found.items() if (there := list(dict.fromkeys(values)))}


def _other_runs(run: Run, folder: Path) -> list[dict[str, Any]]:
    """The runs of which a folder has tables too, as its results.json says."""
    return [
        {
            "grids": ", ".join(each.grids),
            "cells": sum(each.grids[name].get("finished", 0) for name in each.grids),
            "made": ", ".join((*each.weights, *each.dtypes, *each.devices)),
            "commits": ", ".join(
                commit if " " in commit else commit[:12] for commit in each.commits
            ),
            "analysed": f"{each.analysed_when:%Y-%m-%d}, {each.analysed_on}",
        }
        for each in read_gallery(folder).runs
        if not set(each.grids) <= set(run.listing.grids)
    ]


def _cell_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Every cell for reading, those that are not finished first."""
    rows = []
    for row in _records(cells):
        made = {"tokens": "", "seconds": ""}
        if row["state"] == "finished":
            made = {"tokens": f"{row['tokens']:.0f}", "seconds": f"{row['seconds']:.1f}"}
        rows.append(row | made | {"size": f"{row['samples']} x {row['max_length']}"})
    return sorted(rows, key=lambda row: row["state"] == "finished")


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


# --- scores


def _scores(run: Run, folder: Path) -> list[dict[str, Any]]:
    """The scores in the folders of a run: for reading, and each arm against the baseline, one
    figure a metric.

    Raises:
        RunError: A table is not one of `lapa2 score`.
    """
    return [
        _scores_in(run, file.parent)
        for file in sorted(folder.glob("*/table.csv"))
        if (file.parent / "differences.csv").is_file()
    ]


def _scores_in(run: Run, folder: Path) -> dict[str, Any]:
    words = dict.fromkeys((*KEYS, *APART, "metric", "scorer", "why"), str)
    try:
        table, differences = (
            pd.read_csv(
                folder / name,
                dtype=words,
                keep_default_na=False,
                na_values={key: [""] for key in ("mean", "low", "high", "difference", "p")},
            )
            for name in ("table.csv", "differences.csv")
        )
        shown, notes = shown_scores(table, differences), score_notes(table, differences)
        figures = [
            _differences(str(metric), str(scorer), part)
            for (metric, scorer), part in differences.groupby(["metric", "scorer"], sort=False)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{folder} has no tables of `lapa2 score` ({type(error).__name__}: {error}); score"
            f" again, or remove the folder"
        ) from error
    arms = {cell.arm for cell in run.finished.values()}
    if "arm" in table and (left := sorted(arms - set(table["arm"]))):
        notes.append(f"not among these scores: {', '.join(left)}")
    return {
        "name": folder.name,
        "head": list(shown),
        "rows": [
            {side: str(row.get(side, "")) for side in ("task", "method")}
            | {"cells": [_marked(str(cell)) for cell in row.values()]}
            for row in _records(shown)
        ],
        "notes": notes,
        "figures": figures,
    }


def _differences(metric: str, scorer: str, part: pd.DataFrame) -> dict[str, Any]:
    """A metric's differences against the baseline, drawn on one scale."""
    keys = told_keys(part)
    least, most = _scale(part[["low", "high", "difference"]].assign(zero=0.0))
    rows = []
    for row in _records(part):
        found = {name: row[name] for name in ("low", "high")}
        found |= {"here": row["difference"], "paper": math.nan}
        clear = "clear" if row["low"] > 0 or row["high"] < 0 else "unclear"
        words = _written(found | {"p": row["p"], "holm": math.nan, "detectable": math.nan})
        rows.append(
            {
                "arm": ", ".join(str(row[key]) for key in keys if row[key] != "") or metric,
                "drawing": _forest(found, least, most, clear),
                "prompts": row["prompts"],
                "task": row.get("task", ""),
                "method": row.get("method", ""),
            }
            | words
        )
    return {"metric": metric, "scorer": scorer, "rows": rows, "least": least, "most": most}


# --- items and claims


def _items(tables: Path, figures: Path, names: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Tables, claims and figures by item; an item may lack any of them."""
    found = {file.stem for file in tables.glob("*.json")} | {
        file.stem for file in figures.glob("*.png")
    }
    found |= {file.name.removesuffix(".claims.csv") for file in tables.glob("*.claims.csv")}
    ordered = [name for name in ORDER if name in found] + sorted(found - set(ORDER))
    return [_item(name, tables, figures, names) for name in ordered]


def _item(
    name: str, tables: Path, figures: Path, names: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    table, image = tables / f"{name}.json", figures / f"{name}.png"
    title, notes, head, data = name, [], [], []
    if table.is_file():
        try:
            facts = parse_json(read_text(table))
            title, notes = str(facts["title"]), [str(note) for note in facts["notes"]]
            head, data = [str(column) for column in facts["rows"]["columns"]], facts["rows"]["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{table} is not a table of an item ({type(error).__name__}: {error});"
                f" analyses/{name}.py makes it again"
            ) from error
    if name == "eval" and not data and not any("no judge" in note for note in notes):
        notes = ["no judge: this run has no stored ratings.", *notes]
    pairs = _pairs(tables / f"{name}.csv", names)
    file = tables / f"{name}.claims.csv"
    judged = read_claims(file) if file.is_file() else None
    return {
        "name": name, "title": title, "notes": notes, "head": head, "has_table": table.is_file(),
        "rows": [
            _sides({side: row[head.index(side)] for side in names if side in head}, pairs, names)
            | {"cells": [_marked(str(cell)) for cell in row]}
            for row in data
        ],
        "image": base64.b64encode(image.read_bytes()).decode("ascii") if image.is_file() else None,
        "judged": judged, "claims": [] if judged is None else _claims(judged, names, pairs),
    }  # fmt: skip


def _pairs(file: Path, names: Iterable[str]) -> list[dict[str, str]]:
    """The pairs of task and method in an item; its table for reading lacks a column that is the
    same everywhere."""
    try:
        check_file(file)
        table = pd.read_csv(
            file, keep_default_na=False, dtype=str, usecols=lambda column: column in names
        )
    except (OSError, ValueError):  # no such file, or an empty one
        return []
    return _records(table.drop_duplicates())


def _sides(
    said: Mapping[str, str], pairs: Sequence[Mapping[str, str]], names: Iterable[str]
) -> dict[str, str]:
    """Task and method of a row: as it states them, or as they follow from the pairs of its item; ""
    where several are possible."""
    left = [
        pair
        for pair in pairs
        if all(pair.get(side, value) == value for side, value in said.items())
    ]
    found = {side: {pair[side] for pair in left if pair.get(side)} for side in names}
    return {
        side: said.get(side) or (found[side].pop() if len(found[side]) == 1 else "")
        for side in names
    }


NUMBER = r"[+-]?\d[\d.,]*"


def _marked(cell: str) -> Markup:
    """A cell of a table as HTML: **bold** numbers, intervals pale, gaps marked. The text stays the
    same."""
    from markupsafe import Markup, escape

    if cell in (*STATES[1:], "no number"):
        return Markup('<span class="gap">{}</span>').format(cell)
    parts = re.fullmatch(rf"(\*\*)?({NUMBER})(?(1)\*\*)( \[.*)?", cell)
    if parts is None:
        return escape(cell)
    number = Markup("<b>{}</b>" if parts[1] else "{}").format(parts[2])
    return number + Markup('<span class="ci">{}</span>').format(parts[3]) if parts[3] else number


def _groups_of_claims(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The claims of all items, those of the paper apart from ours, which are left out where there
    are none: {"whose", "verdicts" that they may have, "claims", "disputed" in words}. A claim that
    is counted in another row gets the mark "again"."""
    tables = [item["judged"] for item in items if item["claims"]]
    if not tables:
        return [{"whose": "paper", "verdicts": VERDICTS["paper"], "claims": [], "disputed": ""}]
    judged = pd.concat(tables, ignore_index=True)
    once = set(counted_once(judged).index)
    claims = [claim for item in items for claim in item["claims"]]
    for number, claim in enumerate(claims):
        claim["again"] = number not in once
    return [
        {
            "whose": whose,
            "verdicts": verdicts,
            "claims": [claim for claim in claims if claim["whose"] == whose],
            "disputed": disputed(judged[judged["whose"] == whose]),
        }
        for whose, verdicts in VERDICTS.items()
        if whose == "paper" or (judged["whose"] == whose).any()
    ]


def _claims(
    table: pd.DataFrame, names: Mapping[str, Sequence[str]], pairs: Sequence[Mapping[str, str]]
) -> list[dict[str, Any]]:
    """Judged claims for reading, each with a drawing of its interval on the scale of its metric."""
    numbers = table[["paper", "here", "low", "high", "detectable"]].join(deciding_p_values(table))
    words = table[
        ["item", "claim", "metric", "expected", "verdict", "raw", "scorer", "whose"]
    ].astype(str)
    texts = (table["texts"] * table["prompts"]).map("{:.0f}".format).replace("nan", "")
    seconds = [disagreement(row) for row in _records(table)]
    ends = numbers[["low", "high", "here", "paper"]].assign(zero=0.0)
    scales = {metric: _scale(part) for metric, part in ends.groupby(words["metric"])}
    rows: list[dict[str, Any]] = []
    for said, found, n, of_arm, second in zip(
        _records(words), _records(numbers), table["prompts"], texts, seconds, strict=True
    ):
        facts = re.split(r": |, | \(|\)", said["claim"])
        named = {side: fact for side in names for fact in facts if fact in names[side]}
        rows.append(
            said
            | _sides(named, pairs, names)
            | _written(found)
            | {
                "prompts": int(n),
                "texts": of_arm,
                "second": second,
                "scorer": short_name(said["scorer"]),
                "raw": "" if said["raw"] == said["verdict"] else said["raw"],
                "drawing": _forest(found, *scales[said["metric"]], said["verdict"]),
            }
        )
    return rows


def _written(found: Mapping[str, float]) -> dict[str, str]:
    """Numbers of a claim to the digits its interval allows."""
    here, low, high = found["here"], found["low"], found["high"]
    width = high - low
    size = width if width > 0 else abs(here)
    digits = (
        min(6, max(1, 1 - math.floor(math.log10(size)))) if size > 0 and math.isfinite(size) else 2
    )

    def number(value: float, sign: str = "+") -> str:
        return "" if math.isnan(value) else f"{value:{sign}.{digits}f}"

    interval = "no interval" if math.isnan(low) else f"[{number(low)}, {number(high)}]"
    return {
        "paper": "" if math.isnan(found["paper"]) else f"{found['paper']:+.4g}",
        "here": number(here),
        "interval": interval if not math.isnan(here) else "",
        "p": "" if math.isnan(found["p"]) else f"{found['p']:.3g}",
        "holm": "" if math.isnan(found["holm"]) else f"{found['holm']:.3g}",
        "detectable": number(found["detectable"], ""),
    }


def _scale(ends: pd.DataFrame) -> tuple[float, float]:
    """The two ends of the scale that one metric's drawings share.

    It covers all rows, but not so far that one outlier would shrink most others to a point (ROOM).
    """
    reach = ends.abs().max(axis=1)
    if not (reach > 0).any():
        return 0.0, 0.0
    far = ROOM * float(reach[reach > 0].median())  # rows without a difference do not count
    return max(float(np.nanmin(ends)), -far), min(float(np.nanmax(ends)), far)


def _forest(found: Mapping[str, float], least: float, most: float, verdict: str) -> Markup | str:
    """Draw an interval as a line, our difference as a dot, the paper's as a diamond, and zero.

    A triangle stands for a value beyond the ends of the scale.
    """
    from markupsafe import Markup

    if math.isnan(found["here"]) or most <= least:
        return ""

    def x(value: float) -> float:
        return round(6 + 148 * (min(max(value, least), most) - least) / (most - least), 1)

    def mark(name: str, usual: str) -> str:
        value = found[name]
        if math.isnan(value):
            return ""
        beyond = (value > most) - (value < least)
        path = (
            f"M{x(value) + 5 * beyond} 9l{-9 * beyond} -5v10z" if beyond else usual.format(x(value))
        )
        return f'<path class="{name}" d="{path}"/>'

    zero = x(0.0)
    here, paper = (
        mark("here", "M{0} 9m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0"),
        mark("paper", "M{0} 3l5 6l-5 6l-5-6z"),
    )
    line = (
        ""
        if math.isnan(found["low"])
        else f'<path class="line" d="M{x(found["low"])} 9H{x(found["high"])}"/>'
    )
    return Markup(
        f'<svg class="forest {verdict.split()[0]}" width="160" height="18" viewBox="0 0 160 18"'
        f' aria-hidden="true"><path class="zero" d="M{zero} 0V18"/>{line}{here}{paper}</svg>'
    )


# --- texts


def _texts(run: Run, room: int) -> tuple[int, dict[str, Any]]:
    """The texts to show: of how many prompts, and what the page embeds.

    The first prompts and sample 0 of every arm.

    Args:
        room: Bytes.

    Returns:
        n_prompts; and {"unit", "top": {"p", "b"}, "groups": [...]}, a group {"setup", "task",
        "attribute", "method", "size", "prompts", "arms": [{"arm", "cell", "branch", "prefix",
        "texts"}]} and its "texts", by prompt, {"t": text of every token, "p" and "b": attention on
        prefix and BOS in units at the step that predicted it, or null, "end": why it ended}, or
        null.
    """

    groups = _groups(run)
    length = sum(cell.length for arms in groups.values() for cell in arms.values())
    n_prompts = max(1, min(PROMPTS, room // (TOKEN_BYTES * max(1, length))))
    shown: list[dict[str, Any]] = []
    for labels, arms in groups.items():
        prompts = list(
            dict.fromkeys(text for cell in arms.values() for text in cell.task.prompts.texts)
        )[:n_prompts]
        columns = []
        for arm, cell in arms.items():
            tokenizer = shared_tokenizer(cell.model)
            shown_texts = text_column(run.cell(cell.key), prompts, tokenizer)
            columns.append({"arm": arm, "cell": cell.key} | shown_texts)
        names = dict(zip(("setup", "task", "attribute", "method", "size"), labels, strict=True))
        shown.append(names | {"prompts": prompts, "arms": columns})
    data: dict[str, Any] = {"unit": UNIT, "groups": shown}
    data["top"] = {
        name: colour_top([text[name] for text in _each_text(data) if text[name]])
        for name in ("p", "b")
    }
    return max((len(group["prompts"]) for group in shown), default=0), data


def _groups(run: Run) -> dict[tuple[str, ...], dict[str, Cell]]:
    """Finished cells by setup, task, attribute, method and size, the longest texts first; then by
    arm, the paper's two first.

    Cells of another size have other batches, which may change a bfloat16 text by itself, so their
    texts are not compared.
    """

    fields = ("model", "dtype", "model_class", "seed", "top_k", "eos", "doubled_bos")
    values = {name: {getattr(cell, name) for cell in run.plan.values()} for name in fields}
    differ = [name for name in fields if name == "model" or len(values[name]) > 1]
    groups: dict[tuple[str, ...], dict[str, Cell]] = {}

    def rank(cell: Cell) -> int:
        return ("baseline", cell.usual_arm, cell.arm).index(cell.arm)

    finished = sorted(run.finished.values(), key=lambda cell: (-cell.length, -cell.samples))
    for cell in sorted(finished, key=rank):
        setup = ", ".join(
            ("" if name == "model" else f"{name} ") + str(getattr(cell, name)) for name in differ
        )
        method = f"{cell.method} ({cell.variant})" if cell.variant else cell.method
        labels = (
            setup,
            cell.task.name,
            cell.attribute,
            method,
            f"{cell.samples} x {cell.length} tokens",
        )
        groups.setdefault(labels, {}).setdefault(cell.arm, cell)
    return groups


def text_column(
    cell: FinishedCell, prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The branch whose attention colours the texts of a cell, its prefix, and the texts."""

    samples, trace = cell.samples.reset_index(drop=True), cell.trace
    texts: list[dict[str, Any] | None] = []
    branch, has_prefix = "", False
    masses: dict[str, np.ndarray] = {}
    if trace is not None:
        branch = branch_name(trace)
        part = trace.sel(branch=[branch])
        has_prefix = bool((part["l_pre"] > 0).any())
        names = {"p": "prefix", "b": "bos"} if has_prefix else {"b": "bos"}
        masses = {short: pooled(part, name)[0] for short, name in names.items()}
    for prompt in prompts:
        rows = samples.index[(samples["prompt"] == prompt) & (samples["sample"] == 0)]
        if not len(rows):
            texts.append(None)
            continue
        row = samples.loc[rows[0]]
        tokens = [int(token) for token in row["tokens"]]
        text: dict[str, Any] = {
            "t": token_texts(tokenizer, prompt, tokens),
            "end": str(row["finish"]),
        }
        for name in ("p", "b"):
            mass = masses[name][rows[0]][: len(tokens)] if name in masses else None
            text[name] = None if mass is None else [round(float(value) / UNIT) for value in mass]
        texts.append(text)
    return {
        "branch": branch,
        "prefix": _prefix(cell.manifest, branch) if has_prefix else "",
        "texts": texts,
    }


def _prefix(manifest: Manifest, branch: str) -> str:
    """The text of a branch's prefix, or the name of a soft one."""
    found = manifest.branches.get(manifest.attributes[0], {}).get(branch)
    return f"“{found}”" if isinstance(found, str) else str(found)


def _each_text(data: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    return (
        text
        for group in data["groups"]
        for arm in group["arms"]
        for text in arm["texts"]
        if text is not None
    )


def colour_top(masses: Sequence[Sequence[int]]) -> int:
    """The end of the colour scale: the mass that only one token in a hundred exceeds, rounded up to
    .05."""
    if not masses:
        return 0
    step = round(0.05 / UNIT)
    return max(1, math.ceil(float(np.percentile(np.concatenate(masses), 99)) / step)) * step
