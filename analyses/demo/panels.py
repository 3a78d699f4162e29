"""The panels of the demo's page, and the measurements on its run and stored texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from lapa2_interp import __version__, plots
from lapa2_interp.bias.synthetic import geometric_lengths
from lapa2_interp.commands import command
from lapa2_interp.files import atomic_write
from lapa2_interp.models.machine import n_cores, processor_kind
from lapa2_interp.runs.run import Run, load_run
from lapa2_interp.table_formats import interval_text

if TYPE_CHECKING:
    import xarray as xr

    from lapa2_interp.generation.cell import Cell
    from lapa2_interp.runs.grid import Grid

HERE = Path(__file__).resolve().parent
SCORER_DTYPE = "float32"
COLOURS = dict(zip(("0", "1/2", "1", "1 in 24 heads"), plots.COLOURS, strict=False))
"""An arm keeps its colour in every panel."""
L_PRE = 3
SYNTHETIC = {"longest": 100_000, "rows": 12}
"""Length of synthetic logits, and rows of each family: seconds of work, where `lapa2 propositions`
takes minutes."""
WIDTH, NARROW = 7.2, 3.9
"""Inches of a drawing, and of its form for a telephone."""
SHOWN_FIRST = 2
"""Prompts whose texts are open; the others are folded away."""


@dataclass(frozen=True)
class Measured:
    """Scores of the short texts, and the verdicts on synthetic logits.

    Attributes:
        cells: Means from `scoring.tables.cell_table`.
        differences: Differences from the arm without LaPA2 (`difference_table`).
        synthetic: Verdicts on synthetic logits.
    """

    cells: pd.DataFrame
    differences: pd.DataFrame
    synthetic: pd.DataFrame


def measure(out: Path, grid: Grid) -> Measured:
    """Score the run's texts and judge the claims on synthetic logits; what was measured before is
    read."""
    from lapa2_interp.bias.synthetic import draw_means
    from lapa2_interp.propositions.synthetic import synthetic_verdicts
    from lapa2_interp.scoring.tables import cell_table, difference_table, distinct_cells

    keys = [cell.key for cell in grid.cells]
    texts = load_run(out).texts(keys)
    stored = out / "scores" / f"{_hash(__version__, *keys)}.parquet"
    if not stored.is_file():
        _store(stored, _score(texts, grid, out))
    scores = pd.read_parquet(stored)
    tables = [cell_table(part) for _, part in scores.groupby("scorer", sort=False)]
    judged = out / "scores" / f"{_hash(__version__, *SYNTHETIC.values())}.parquet"
    if judged.is_file():
        verdicts = pd.read_parquet(judged)
    else:
        lengths = geometric_lengths(SYNTHETIC["longest"], L_PRE)
        means = draw_means(lengths, L_PRE, (0.0, 0.5, 1.0), rows=SYNTHETIC["rows"], seed=1)
        verdicts = synthetic_verdicts(means)
        _store(judged, verdicts)
    cells = pd.concat([*tables, distinct_cells(texts)], ignore_index=True)
    return Measured(cells, difference_table(scores), verdicts)


def _score(texts: pd.DataFrame, grid: Grid, out: Path) -> pd.DataFrame:
    from lapa2_interp.runs.run import load_run
    from lapa2_interp.scoring.registry import ScorerOptions, score_texts
    from lapa2_interp.scoring.scorer import ScoreCache, expand_scorers
    from lapa2_interp.scoring.tables import score_table
    from lapa2_interp.scoring.transformer import Perplexity

    cell = grid.cells[0]
    weights = load_run(out).manifest(cell.key).model.weights
    with ScoreCache(out / "scores") as cache:
        asked = expand_scorers(("accuracy", "echo"), ())
        scores = score_texts(texts, asked, ScorerOptions(task="sentiment"), cache)
        perplexity = Perplexity(cell.model, SCORER_DTYPE, generator=weights)
        return pd.concat([scores, score_table(texts, perplexity, cache)], ignore_index=True)


def _store(file: Path, table: pd.DataFrame) -> None:
    samples_only = table.drop(columns=["tokens"], errors="ignore")
    with atomic_write(file) as fresh:
        samples_only.to_parquet(fresh, index=False)


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


# --- the page


@dataclass(frozen=True)
class Panel:
    """One panel: how to read it, what it shows (found in this run), and the command that makes it
    for other texts."""

    title: str
    how: str
    command: str
    found: Sequence[str] = ()
    image: Sequence[Mapping[str, Any]] = ()
    alt: str = ""
    tables: Sequence[Mapping[str, Any]] = ()
    part: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def page(
    out: Path, grid: Grid, measured: Measured, read: Sequence[xr.Dataset], seconds: float
) -> str:
    """The page as one string that loads nothing.

    Args:
        read: One trace per stored text, axes alpha, sample, step, layer, head.
        seconds: Duration of this call.
    """
    from lapa2_interp.page import template

    run, traces = load_run(out), _stacked_traces(read)
    arms = {cell.key: arm_name(cell) for cell in grid.cells}
    panels = [
        decay(grid, traces),
        heads(grid, traces),
        texts(run, grid, arms),
        numbers(grid, measured, arms),
        verdicts(grid, measured, traces),
        methods(grid),
    ]
    cell = grid.cells[0]
    prefix = cell.task.attributes[cell.attribute].prefix
    lead = (
        f"A prefix such as “{prefix}” in front of a prompt steers what a language model writes, as"
        " far as the model attends to it. The longer the text, the less it does. LaPA2 adds alpha"
        " · log(l / l_pre) to the attention scores of the prefix's l_pre tokens, where l is the"
        " number of tokens so far, so that attention on the prefix falls more slowly. This page"
        f" shows that on {cell.model}: in panels 1, 2 and 5 on longer texts that come with the"
        " demo, read here; in panels 3 and 4 on short texts written here."
    )
    return template("page.html.j2", HERE).render(
        title="A first look at LaPA2",
        lead=lead,
        panels=panels,
        facts=_facts(out, run, grid, traces, seconds),
    )


def _stacked_traces(read: Sequence[xr.Dataset]) -> xr.Dataset:
    import xarray as xr

    numbered = [trace.assign_coords(sample=[i]) for i, trace in enumerate(read)]
    return xr.concat(
        numbered, dim="sample", join="inner", data_vars="all", coords="different", compat="equals"
    )


def arm_name(cell: Cell) -> str:
    """An arm as the page calls it."""
    rule = cell.augmentation
    if rule is None:
        return "0"
    return number(rule.alpha) + ("" if rule.heads == "all" else f" in {len(rule.heads)} heads")


def number(alpha: float) -> str:
    """1/2 for 0.5."""
    fraction = Fraction(alpha).limit_denominator(8)
    return str(fraction) if alpha == float(fraction) else f"{alpha:g}"


def arm_label(arm: str) -> str:
    """An arm in words."""
    return "without LaPA2" if arm == "0" else f"alpha {arm}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def interval(low: float, high: float, digits: int = 2) -> str:
    return interval_text(low, high, f".{digits}f").strip() or "no interval"


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", words: Sequence[int] = ()
) -> dict[str, Any]:
    return {
        "head": list(head),
        "rows": [list(row) for row in rows],
        "note": note,
        "words": set(words),
    }


def _axes(axes: Any, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel, fontsize=11)
    axes.set_ylabel(ylabel, fontsize=11)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _image(drawing: plots.Drawing) -> list[dict[str, Any]]:
    from lapa2_interp.page import picture

    return picture(drawing, 96, NARROW)


# --- 1: attention against length


def decay(grid: Grid, traces: xr.Dataset) -> Panel:
    """Prefix attention against l, with fitted exponents."""
    from lapa2_interp.propositions.traces import decay_curve_table, exponent_table

    # A row of exponents for each alpha, and a sentence on its curve.
    curve, exponents = decay_curve_table(traces), exponent_table(traces)
    n = int(curve["texts"].iloc[0])
    rows, drawn = [], []
    for alpha, line in curve.groupby("alpha"):
        alpha = float(alpha)
        fit = {
            row["quantity"]: row
            for row in exponents[exponents["alpha"] == alpha].to_dict("records")
        }
        share, odds = fit["log A'"], fit["log-odds"]
        rows.append(
            [
                arm_label(number(alpha)),
                f"{share['mean']:.2f} {interval(share['low'], share['high'])}",
                f"{share['predicted']:.2f}",
                f"{min(0.0, alpha - 1):.2f}",
                f"{odds['mean']:.2f} {interval(odds['low'], odds['high'])}",
                f"{alpha:.2f}",
            ]
        )
        first, last = line.iloc[0], line.iloc[-1]
        drawn.append(
            f"{arm_label(number(alpha))} from {percent(first['mean'])} to {percent(last['mean'])}"
        )
    l = curve["l_kv"]
    head = [
        "",
        "fitted exponent of l",
        "closed form, these lengths",
        "limit, alpha − 1",
        "slope of the log-odds",
        "claimed, alpha",
    ]
    note = (
        "Fitted: slope of log attention on log l, with its 95 % interval over texts. The limit is"
        " reached only at lengths far beyond these; the closed form's own slope over the same"
        " lengths, with the ratio of prefix and other scores as it is without LaPA2, is what to"
        " compare with. On log-odds, slope of log(A'/(1−A')) + log(l/l_pre − 1) on log(l/l_pre),"
        " the claim holds at every length if that ratio stays the same as the text grows."
    )
    return Panel(
        "Attention on the prefix against length, without LaPA2 and with it",
        f"{n} texts that SmolLM2 wrote before are read again under each alpha, so that alpha is all"
        " that differs. Each line is the share of attention that the prefix gets, mean over all"
        " layers, heads and texts; both axes are logarithmic, so a power of l is a straight line."
        " Bands are 95 % intervals over texts; dotted is the closed form (Eq. 11) with the scores"
        " as they are without LaPA2.",
        command(
            "propositions",
            model=grid.cells[0].model,
            text="my-text.txt",
            long_length=400,
            long_texts=6,
            out="results/my-curves",
        ),
        [
            f"From l = {l.min():.0f} to l = {l.max():.0f} the prefix's share goes:"
            f" {'; '.join(drawn)}."
        ],
        _image(_decay_figure(traces, curve)),
        "attention on the prefix against l",
        [_table(head, rows, note)],
    )


def _decay_figure(traces: xr.Dataset, curve: pd.DataFrame) -> plots.Drawing:
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    from lapa2_interp.propositions.traces import prefix_curves

    pooled = prefix_curves(traces, pooled=True)
    ratio = (pooled.odds[pooled.baseline] + pooled.log_rest).mean(1, keepdims=True)
    figure = plots.Drawing(figsize=(WIDTH, 4.3), layout="constrained", dpi=150)
    axes = figure.subplots()
    for alpha, line in curve.groupby("alpha"):
        name = number(float(alpha))
        colour = COLOURS.get(name, plots.COLOURS[3])
        shown = line.assign(low=line["low"].where(line["low"] > 0))
        plots.band(axes, shown, "l_kv", colour, lw=1.8, label=arm_label(name))
        odds = ratio - pooled.log_rest + float(alpha) * pooled.log_r
        expected = 1 / (1 + np.exp(-odds)).mean(0)
        axes.plot(line["l_kv"], expected, color=colour, lw=1.3, ls=":")
    axes.plot([], [], color="#555555", lw=1.3, ls=":", label="closed form")
    axes.set(xscale="log", yscale="log")
    low, high = curve["l_kv"].min(), curve["l_kv"].max()
    ticks = [l for l in (10, 20, 50, 100, 200, 400, 1000, 2000) if low <= l <= high * 1.01]
    axes.set_xticks(ticks, [str(l) for l in ticks])
    least = max(curve["mean"].min() / 1.6, 1e-6)
    axes.set_ylim(least, min(1.0, float(curve["high"].max()) * 1.2))
    marks = [
        m
        for m in (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
        if least <= m <= axes.get_ylim()[1]
    ]
    if len(marks) > 1:
        axes.set_yticks(marks)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    else:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.minorticks_off()
    axes.set_xlim(low / 1.04, high * 1.04)
    axes.grid(color="#e8e8e8", lw=0.7)
    _axes(axes, "l_kv: tokens so far, BOS included", "attention on the prefix")
    look = {"frameon": False, "fontsize": 11, "handlelength": 1.5, "columnspacing": 1.2}
    figure.legend(loc="outside upper center", ncols=2, **look)
    return figure


# --- 2: layers and heads


def heads(grid: Grid, traces: xr.Dataset) -> Panel:
    """Layer x head maps."""
    # The heads with half of the attention, and those that alpha raises.
    mass = traces["prefix"].mean(("sample", "step")).to_numpy().astype(float)
    alphas = [float(a) for a in traces["alpha"].to_numpy()]
    base = mass[alphas.index(0.0)]
    order = np.sort(base.ravel())[::-1]
    half = int(np.searchsorted(order.cumsum(), order.sum() / 2) + 1)
    top = np.dstack(np.unravel_index(np.argsort(-base, axis=None)[:3], base.shape))[0]
    best = ", ".join(f"{layer}.{head} ({percent(base[layer, head])})" for layer, head in top)
    sentences = [
        f"Without LaPA2, {half} of {base.size} heads carry half of all attention on the prefix;"
        f" those with most are {best} (layer.head)."
    ]
    for alpha, masses in zip(alphas, mass, strict=True):
        if alpha:
            more = int((masses > base).sum())
            sentences.append(
                f"Alpha {number(alpha)} raises it in {more} of {base.size} heads, from"
                f" {percent(base.mean())} to {percent(masses.mean())} on average"
                + (
                    f"; in {base.size - more} it falls, through queries and keys that earlier"
                    " layers changed."
                    if more < base.size
                    else "."
                )
            )
    model = grid.cells[0].model
    return Panel(
        "The layers and heads that attend to the prefix",
        "Each square is one head of one layer. Left: its attention on the prefix without LaPA2."
        " Right: what LaPA2 adds (red) or takes (blue). The same texts as above, mean over texts"
        " and steps. The changes have one scale.",
        command(
            "generate",
            model=model,
            attribute="positive",
            prompt="Your prompt",
            out="results/my-map",
        )
        + " && "
        + command("trace", "results/my-map", out="results/my-map-figures"),
        sentences,
        _image(_head_figure(alphas, mass)),
        "layer by head maps of attention on the prefix",
    )


def _head_figure(alphas: Sequence[float], mass: np.ndarray) -> plots.Drawing:
    base = mass[alphas.index(0.0)]
    others = [(alpha, masses - base) for alpha, masses in zip(alphas, mass, strict=True) if alpha]
    figure = plots.Drawing(figsize=(WIDTH, 5.6), layout="constrained", dpi=150)
    axes = figure.subplots(1, 1 + len(others), sharey=True)
    maps = [("without LaPA2", "attention, %", 100 * base, {"cmap": "Blues", "vmin": 0})]
    reach = 100 * max(float(np.abs(change).max()) for _, change in others) or 1.0
    for alpha, change in others:
        scale = {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach}
        maps.append((f"alpha {number(alpha)}", "change, points", 100 * change, scale))
    for panel, (title, label, values, scale) in zip(axes, maps, strict=True):
        panel.set_title(title, fontsize=11)
        bar = figure.colorbar(
            plots.layer_map(panel, values, interpolation="nearest", **scale),
            ax=panel,
            location="bottom",
            shrink=0.92,
            aspect=18,
        )
        bar.set_label(label, fontsize=10)
        bar.ax.tick_params(labelsize=10)
    for panel in axes:
        panel.tick_params(labelsize=10)
        for label in (panel.xaxis.label, panel.yaxis.label):
            label.set_fontsize(10)
        panel.label_outer()
    return figure


# --- 3: texts


def texts(run: Run, grid: Grid, arms: Mapping[str, str]) -> Panel:
    """Texts of one prompt side by side."""
    from lapa2_interp.models.load import load_tokenizer
    from lapa2_interp.report.run_texts import MASS_SCALE, colour_top, text_column

    # The texts and attention of every arm, on one scale of colour.
    cell = grid.cells[0]
    tokenizer, prompts = load_tokenizer(cell.model), cell.task.prompts.texts
    attributes = list(dict.fromkeys(cell.attribute for cell in grid.cells))
    columns = {
        (cell.attribute, arms[cell.key]): text_column(run, cell.key, prompts, tokenizer)
        for cell in grid.cells
    }
    names = list(dict.fromkeys(arm for _, arm in columns))
    masses = [
        text["p"] for column in columns.values() for text in column["texts"] if text and text["p"]
    ]
    top = colour_top(masses)
    # The arms' texts of each prompt and attribute, and the mean attention of each arm.
    groups = []
    for i, prompt in enumerate(prompts):
        for attribute in attributes:
            made = [
                _coloured_tokens(columns[attribute, arm]["texts"][i], top, MASS_SCALE)
                | {"arm": arm_label(arm)}
                for arm in names
            ]
            prefix = cell.task.attributes[attribute].prefix
            groups.append(
                {
                    "prompt": prompt,
                    "attribute": attribute,
                    "prefix": prefix,
                    "columns": made,
                    "open": i < SHOWN_FIRST,
                }
            )
    means = {
        arm: np.mean(
            [
                np.mean(text["p"])
                for (_, own), column in columns.items()
                if own == arm
                for text in column["texts"]
                if text
            ]
        )
        for arm in names
    }
    listed = ", ".join(
        f"{100 * mean * MASS_SCALE:.1f} % {'at ' * (arm != '0')}{arm_label(arm)}"
        for arm, mean in means.items()
    )
    model = cell.model
    return Panel(
        "The same prompt, side by side",
        "Each token is coloured by the prefix attention of the step that chose it: the stronger the"
        " blue, the more. All texts of a row start from the same prompt and the same random"
        " numbers. Point at a token for its number.",
        command(
            "sweep",
            "analyses/demo/demo.toml",
            set={"model": model, "prompts": "my-prompts.txt"},
            out="results/mine",
        )
        + " && "
        + command("report", "results/mine"),
        [f"Mean attention on the prefix over these texts: {listed}."],
        part="texts",
        data={
            "groups": [group for group in groups if group["open"]],
            "folded": [group for group in groups if not group["open"]],
            "ends": ["0 %", f"{100 * top * MASS_SCALE:.0f} % or more"],
        },
    )


LEVELS = 16


def _coloured_tokens(text: Mapping[str, Any] | None, top: int, unit: float) -> dict[str, Any]:
    if text is None:
        return {"tokens": [], "mean": ""}
    masses = text["p"] or [0] * len(text["t"])
    level = [round((LEVELS - 1) * min(1.0, mass / top) ** 0.5) for mass in masses]
    tokens = [
        {
            "text": token.replace("\n", "⏎\n"),
            "level": level_of_token,
            "mass": f"{100 * mass * unit:.1f} %",
        }
        for token, level_of_token, mass in zip(text["t"], level, masses, strict=True)
    ]
    return {
        "tokens": tokens,
        "mean": f"{100 * np.mean(masses) * unit:.1f} %" if len(masses) else "",
    }


# --- 4: scores

METRIC_FORMATS = {
    "accuracy": ("accuracy, %", 100, 0),
    "accuracy (linear)": ("linear, %", 100, 0),
    "echo": ("echo, %", 100, 0),
    "perplexity": ("perplexity", 1, 1),
    "distinct-1": ("distinct-1", 1, 2),
    "distinct-2": ("distinct-2", 1, 2),
    "distinct-3": ("distinct-3", 1, 2),
}
"""Name, factor and digits of each metric."""


def numbers(grid: Grid, measured: Measured, arms: Mapping[str, str]) -> Panel:
    """Accuracy, perplexity and distinct-n of every arm."""
    # A row of means for each arm.
    labels = {cell.arm: arms[cell.key] for cell in grid.cells}
    table = measured.cells[measured.cells["attribute"] == "all"].assign(
        arm=lambda t: t["arm"].map(labels)
    )
    gaps = measured.differences
    if len(gaps):
        gaps = gaps[gaps["attribute"] == "all"].assign(arm=lambda t: t["arm"].map(labels))
    names = list(dict.fromkeys(labels.values()))
    n = int(table["n"].max())
    rows = []
    for arm in names:
        own = table[table["arm"] == arm].set_index("metric")
        row = [arm_label(arm)]
        for metric, (_, factor, digits) in METRIC_FORMATS.items():
            if metric not in own.index or np.isnan(own.loc[metric, "mean"]):
                row.append("no number")
                continue
            mean, low, high = (
                factor * own.loc[metric, column] for column in ("mean", "low", "high")
            )
            row.append(f"{mean:.{digits}f} {interval(low, high, digits)}")
        rows.append([*row, str(int(own["n"].max()))])
    # The smallest difference from the arm without LaPA2 that would show.
    skipped = int(table.loc[table["metric"] == "perplexity", "skipped"].sum())
    scorers = list(dict.fromkeys(measured.cells["scorer"]))
    points = gaps[gaps["metric"] == "accuracy"] if len(gaps) else gaps
    least = points.loc[points["detectable"] > 0, "detectable"] if len(points) else pd.Series()
    size = " to ".join(
        dict.fromkeys(f"{100 * least_share:.0f}" for least_share in (least.min(), least.max()))
    )
    warning = (
        f"These numbers cannot tell whether LaPA2 helps. Each arm has {n} texts, and with so few"
        f" only a difference of {size} points of accuracy would show."
        if len(least)
        else f"These numbers cannot tell whether LaPA2 helps, because each arm has only {n} texts."
    )
    note = (
        "Scorers: "
        + "; ".join(scorers)
        + ". The perplexity model is the writer itself, which likes its own texts."
        * (" self" in " ".join(scorers))
        + (f" {skipped} texts of under 10 words have no perplexity." if skipped else "")
    )
    prompts = len(grid.cells[0].task.prompts.texts)
    return Panel(
        "Does it help? So few texts cannot tell",
        f"The table has a mean for each arm, with its 95 % interval over the {prompts} prompts."
        " Both attributes are taken together, and n is the number of texts. Accuracy is the share"
        " of texts in which a classifier finds the attribute that was asked for. There are two"
        " classifiers of different kinds: adapter is a small language model with adapters, and"
        " linear counts words. Echo is the share of texts that say the word of the prefix itself."
        " A low perplexity means that the text is fluent to the scoring model. Distinct-n is the"
        " share of n-grams that are different.",
        "lapa2 score results/mine --scorers accuracy perplexity distinct",
        [f"{warning} docs/results.md compares hundreds of texts in each arm."],
        _image(_score_figure(table, names)),
        "accuracy and perplexity of the arms with intervals",
        [_table(["", *(name for name, _, _ in METRIC_FORMATS.values()), "n"], rows, note)],
    )


def _score_figure(table: pd.DataFrame, names: Sequence[str]) -> plots.Drawing:
    figure = plots.Drawing(figsize=(WIDTH, 2.9), layout="constrained", dpi=150)
    for panel, metric in zip(
        figure.subplots(1, 2, sharey=True), ("accuracy", "perplexity"), strict=True
    ):
        label, factor, _ = METRIC_FORMATS[metric]
        own = table[table["metric"] == metric].set_index("arm")
        for i, arm in enumerate(names):
            if arm in own.index and not np.isnan(own.loc[arm, "mean"]):
                mean, low, high = (
                    factor * own.loc[arm, column] for column in ("mean", "low", "high")
                )
                panel.plot(
                    [low, high],
                    [i, i],
                    color=COLOURS.get(arm, "#777777"),
                    lw=2.4,
                    solid_capstyle="butt",
                )
                panel.plot(mean, i, "o", color=COLOURS.get(arm, "#777777"), ms=6)
        panel.set_yticks(range(len(names)), [arm_label(arm).replace(", ", ",\n") for arm in names])
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.grid(axis="x", color="#e8e8e8", lw=0.7)
        _axes(panel, label, "")
        if metric == "accuracy":
            panel.set_xlim(-2, 102)
    return figure


# --- 5: verdicts

SIGNS = {"as in the paper": "✓", "against the paper": "✗", "inconclusive": "○"}


def verdicts(grid: Grid, measured: Measured, traces: xr.Dataset) -> Panel:
    """The propositions on synthetic logits and on the stored texts."""
    from lapa2_interp.propositions.claims import ON_SYNTHETIC, count_by_source
    from lapa2_interp.propositions.study import verdict_page_table
    from lapa2_interp.propositions.traces import trace_verdicts

    # Synthetic logits: families x claims. Stored texts: a row for each claim.
    cell = grid.cells[0]
    real = trace_verdicts(traces, f"{cell.model}, the same texts", dtype=cell.dtype)
    drawn = verdict_page_table(measured.synthetic).assign(
        family=measured.synthetic["where"].str.removeprefix(ON_SYNTHETIC).to_numpy()
    )
    claims = list(dict.fromkeys(drawn["claim"]))
    marks = drawn.assign(mark=drawn["verdict"].map(SIGNS)).pivot(
        index="family", columns="claim", values="mark"
    )
    families = list(dict.fromkeys(drawn["family"]))
    synthetic = [
        [family, *(str(marks.loc[family, claim]) for claim in claims)] for family in families
    ]
    seen = verdict_page_table(real)
    rows = [
        [
            f"{SIGNS[row['verdict']]} {row['verdict']}",
            row["claim"],
            row["measured"],
            row["expected"],
            f"{row['margin']:g}",
            row["quantity"],
        ]
        for row in seen.to_dict("records")
    ]
    # Numbers of verdicts.
    counts = count_by_source(pd.concat([real, measured.synthetic]))
    texts = int(real["texts"].max())
    return Panel(
        "The paper's claims, with verdicts",
        "Each claim is measured and its 95 % interval compared with a margin around what the paper"
        " says. Synthetic logits keep or break the paper's assumptions, one family at a time (up"
        f" to l = {SYNTHETIC['longest']:,}); the real attention is that of panel 1, {texts} texts."
        " ✓ as in the paper, ✗ against the paper, ○ inconclusive.",
        command("propositions", model=cell.model, length=256, out="results/my-verdicts"),
        counts,
        tables=[
            _table(
                ["verdict", "claim", "measured", "expected", "margin", "quantity"],
                rows,
                f"{cell.model}, {texts} texts, the same under every alpha.",
                (1, 5),
            ),
            _table(
                ["synthetic logits", *claims],
                synthetic,
                "Exchangeable: no key is different from another. Ratio unbounded: the prefix's"
                " scores grow against the others', which Proposition 1 excludes.",
            ),
        ],
    )


# --- 6: methods


def methods(grid: Grid) -> Panel:
    """Every decoding method with an example text, as shipped."""
    from lapa2_interp.methods.registry import known_methods

    stored = json.loads((HERE / "examples.json").read_text("utf-8"))
    rows = []
    for name, method in known_methods().items():
        if name not in stored["methods"]:
            continue  # a chat, which needs a task of its own
        example = stored["methods"][name]
        with_it = example.get("with LaPA2")
        rows.append(
            [name, method.display_name, method.equation, example["base"],
             with_it["text"] + f" (alpha {number(with_it['alpha'])})" if with_it else "–"]
        )  # fmt: skip
    note = (
        f"Made by {stored['model']} ({stored['dtype']}) with `{stored['command']}` on"
        f" {stored['machine']}, at commit {stored['commit'][:12]}; they come with the demo. “–”: no"
        " prefix for LaPA2 to act on, or not combined with it in the paper."
    )
    return Panel(
        "Every decoding method",
        "A method combines the next-token distributions of the model with and without prefixes."
        f" Here is one text of each, steered towards “{stored['attribute']}”, from the prompt"
        f" “{stored['prompt']}”. One text shows what a method's output looks like, not how good"
        " it is.",
        command(
            "generate",
            model=grid.cells[0].model,
            method="air-decoding",
            attribute="positive",
            prompt="Your prompt",
            out="results/my-method",
        ),
        tables=[
            _table(
                ["method", "name", "log weight of the next token", "text", "text with LaPA2"],
                rows,
                note,
                (2, 3, 4),
            )
        ],
    )


# --- how it was made


def machine() -> str:
    """The processor, in words."""
    return f"{n_cores()} cores of {processor_kind('cpu')}"


def _facts(out: Path, run: Run, grid: Grid, traces: xr.Dataset, seconds: float) -> dict[str, str]:
    manifest = run.manifest(grid.cells[0].key)
    stored = json.loads((HERE / "texts.json").read_text("utf-8"))
    cell, card = grid.cells[0], manifest.model
    origin = f"written by {stored['model']} with `{stored['command']}` on {stored['machine']}"
    return {
        "Model": (
            f"{card.name}: {card.architecture}, {card.n_layers} layers x {card.n_heads} heads,"
            f" {card.dtype}, {card.device}"
        ),
        "Weights": card.weights,
        "Short texts": (
            f"{len(grid.cells)} cells in {out}: {len(cell.task.prompts.texts)} prompts,"
            f" {cell.length} tokens with the prompt, seed {cell.seed}; `lapa2 runs` and `lapa2"
            " report` read it"
        ),
        "Stored texts": (
            f"The model reads {traces.sizes['step']} tokens of each of"
            f" {traces.sizes['sample']} texts. They were {origin}, at commit"
            f" {stored['commit'][:12]}."
        ),
        "Profile": "paper (Algorithm 1): exactly the prefix's tokens, l without BOS",
        "Machine": f"{machine()}, {manifest.threads or 'GPU'} threads a process",
        "Versions": (
            f"lapa2_interp {__version__}, "
            + ", ".join(f"{name} {v}" for name, v in manifest.versions.items())
        ),
        "Commit": manifest.commit or "not a checkout",
        "Time": f"{seconds:.0f} s, this call",
    }
