"""The drawings that notebooks, figures and the report share. Each takes a tidy table and returns a matplotlib figure.

Colours are Okabe and Ito's, told apart by the colour-blind; arms keep their colour across drawings.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


class Drawing(Figure):
    """A figure outside pyplot's global list that notebooks show as a picture and reports embed."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def _figure(width: float, height: float) -> Drawing:
    return Drawing(figsize=(width, height), layout="constrained", dpi=150)


def _plain(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def attention_curves(steps: pd.DataFrame, fits: pd.DataFrame | None = None, name: str = "prefix") -> Drawing:
    """Attention against step with 95 % bands, and the fitted C/(t+D) dotted.

    Args:
        steps: From `trace.step_table`.
        fits: From `trace.fit_table`; None draws no fits.
        name: Which sum.
    """
    figure = _figure(6.8, 4.0)
    axes = figure.subplots()
    for colour, (arm, curve) in zip(COLOURS, steps[steps["name"] == name].groupby("arm", sort=False), strict=False):
        t = curve["step"].to_numpy()
        axes.plot(t, curve["mean"], color=colour, lw=1.4, label=arm)
        axes.fill_between(t, curve["low"], curve["high"], color=colour, alpha=0.15, lw=0)
        if fits is None:
            continue
        c, d, r2 = fits.loc[fits["arm"] == arm, ["C", "D", "R2"]].iloc[0]
        if np.isnan(c):
            axes.plot([], [], color=colour, lw=1.2, ls=":", label="no C/(t+D) fits")
        else:
            axes.plot(t, c / (t + d), color=colour, lw=1.2, ls=":", label=f"{c:.2f}/(t+{d:.1f}), R² {r2:.2f}")
    _plain(axes, "generation step t", f"attention on {name.replace('_', ' ')}\n(mean over layers and heads)")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper center", frameon=False, fontsize=7, ncols=4)
    return figure


def head_maps(heads: pd.DataFrame, name: str = "prefix") -> Drawing:
    """Layer x head maps of one sum: the first arm as it is, the others as differences from it.

    Args:
        heads: From `trace.head_table`.
        name: Which sum.
    """
    maps = {
        str(arm): part.pivot(index="layer", columns="head", values=name).to_numpy()
        for arm, part in heads.groupby("arm", sort=False)
    }
    first = next(iter(maps))
    figure = _figure(1.0 + 2.1 * len(maps), 5.2)
    panels = np.atleast_1d(figure.subplots(1, len(maps), sharey=True))
    for panel, (arm, found) in zip(panels, maps.items(), strict=True):
        if arm == first:
            drawn = panel.imshow(found, aspect="auto", origin="lower", cmap="viridis", vmin=0)
            panel.set_title(arm, fontsize=8)
        else:
            difference = found - maps[first]
            reach = float(np.abs(difference).max()) or 1.0
            drawn = panel.imshow(difference, aspect="auto", origin="lower", cmap="RdBu_r", vmin=-reach, vmax=reach)
            panel.set_title(f"{arm}\nminus {first}", fontsize=8)
        bar = figure.colorbar(drawn, ax=panel, location="bottom", shrink=0.9)
        bar.ax.tick_params(labelsize=7)
        panel.set(xlabel="head")
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0].yaxis.get_major_locator().set_params(integer=True)
    panels[0].set(ylabel="layer")
    figure.suptitle(f"attention on {name} (each map has its own scale)", fontsize=9)
    return figure


def prefix_token_bars(tokens: pd.DataFrame) -> Drawing:
    """Attention on BOS and on every prefix token, by arm, with 95 % intervals.

    Args:
        tokens: From `trace.prefix_token_table`; a column `label` names the keys if there is one.
    """
    figure = _figure(6.4, 3.2)
    sink, axes = figure.subplots(1, 2, width_ratios=(1, 3))
    keys = list(dict.fromkeys(tokens["key"]))
    arms = list(dict.fromkeys(tokens["arm"]))
    names = dict(zip(tokens["key"], tokens.get("label", tokens["key"]), strict=True))
    for i, (arm, colour) in enumerate(zip(arms, COLOURS, strict=False)):
        part = tokens[tokens["arm"] == arm].set_index("key").loc[keys]
        error = np.abs(part[["low", "high"]].to_numpy().T - part["mean"].to_numpy())
        x = np.arange(len(keys)) + (i - (len(arms) - 1) / 2) * 0.8 / len(arms)
        for axis, chosen in ((sink, slice(0, 1)), (axes, slice(1, None))):
            axis.bar(
                x[chosen],
                part["mean"].iloc[chosen],
                0.8 / len(arms),
                yerr=error[:, chosen],
                color=colour,
                label=arm,
                error_kw={"lw": 0.8},
            )
    sink.set_xticks([0], [names[keys[0]]])
    axes.set_xticks(np.arange(1, len(keys)), [names[key] for key in keys[1:]])
    _plain(sink, "", "mean attention")
    _plain(axes, "prefix token", "")
    axes.legend(frameon=False, fontsize=7)
    return figure


def mass_against_control(table: pd.DataFrame) -> Drawing:
    """Accuracy and perplexity of every arm against its prefix mass, with 95 % intervals; arms of one span are joined, and numbers
    are alphas.

    Args:
        table: Columns arm (span and alpha, "prefix 0.5"), metric ("mass: prefix", "accuracy", "perplexity"), mean, low, high.
    """
    wide = {name: part.set_index("arm") for name, part in table.groupby("metric")}
    figure = _figure(8.4, 4.0)
    panels = figure.subplots(1, 2)
    mass = wide["mass: prefix"]
    spans = {arm: arm.rsplit(" ", 1)[0] for arm in mass.index}
    names = [span for span in dict.fromkeys(spans.values()) if span != "baseline"]
    styles = dict(zip(names, [(c, m) for m in "os" for c in COLOURS[1:]], strict=False))
    for panel, metric in zip(panels, ("accuracy", "perplexity"), strict=True):
        found = wide[metric]
        for span in names:
            arms = ["baseline"] if span == "prefix" else []
            arms += [arm for arm, own in spans.items() if own == span]
            colour, marker = styles[span]
            x, y = mass.loc[arms], found.loc[arms]
            panel.errorbar(
                x["mean"], y["mean"],
                xerr=np.abs(x[["low", "high"]].to_numpy().T - x["mean"].to_numpy()),
                yerr=np.abs(y[["low", "high"]].to_numpy().T - y["mean"].to_numpy()),
                color=colour, marker=marker, ms=4, lw=1.0, elinewidth=0.6, label=span,
            )  # fmt: skip
            for arm, at, value in zip(arms, x["mean"], y["mean"], strict=True):
                if arm != "baseline":
                    near = {"xytext": (4, 3), "textcoords": "offset points", "fontsize": 6, "color": colour}
                    panel.annotate(arm.rsplit(" ", 1)[1], (at, value), **near)
        panel.plot(mass.loc["baseline", "mean"], found.loc["baseline", "mean"], "k*", ms=10, label="baseline")
        _plain(panel, "attention on the prefix (mean over steps and heads)", metric)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", frameon=False, fontsize=7, ncols=5)
    return figure


# --- the paper's figures

METHOD_STYLES = {
    "prefix": (COLOURS[1], "o"),
    "con-prefix": (COLOURS[3], "s"),
    "air-decoding": (COLOURS[2], "^"),
    "negprompt": (COLOURS[4], "D"),
    "preadd": (COLOURS[5], "v"),
    "palette": (COLOURS[6], "P"),
    "freectrl": (COLOURS[0], "X"),
    "datg": (COLOURS[0], "X"),
}
"""A method keeps its colour and marker in every figure."""
METRIC_LABELS = {"acc": "attribute accuracy (%)", "tox": "toxicity (%)", "ppl": "perplexity"}
COLUMN = 3.4
"""Width of a paper's column, inches."""


def _paper_name(method: str) -> str:
    from lapa2_interp.methods import registry

    return registry()[method].paper_name if method in registry() else method


def _style(method: str) -> tuple[str, str]:
    return METHOD_STYLES.get(method, ("#777777", "."))


def _band(axes: Axes, table: pd.DataFrame, x: str, colour: str, **line: Any) -> None:
    axes.plot(table[x], table["mean"], color=colour, **line)
    if table["low"].notna().any():
        axes.fill_between(table[x].astype(float), table["low"], table["high"], color=colour, alpha=0.15, lw=0)


Panels = list[tuple[str, Axes, pd.DataFrame]]
"""Task, axes and rows of each panel."""


def _tasks(table: pd.DataFrame, width: float = COLUMN, height: float = 2.4) -> tuple[Drawing, Panels]:
    """One panel per task (and model, where there are several), side by side."""
    several = table["model"].nunique() > 1
    groups = [
        (f"{task}, {str(model).rpartition('/')[2]}" if several else str(task), part)
        for (model, task), part in table.groupby(["model", "task"], sort=False)
    ]
    figure = _figure(width * max(1, len(groups)), height)
    panels = np.atleast_1d(figure.subplots(1, max(1, len(groups))))
    return figure, [(title, panel, part) for panel, (title, part) in zip(panels, groups, strict=False)]


def _legend_below(figure: Drawing, panels: Panels, columns: int = 3) -> None:
    named: dict[str, Any] = {}
    for _, panel, _ in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(
        list(named.values()), list(named), loc="outside lower center", frameon=False, fontsize=7, ncols=columns
    )


def control_against_length(table: pd.DataFrame) -> Drawing:
    """Figure decay: accuracy against length, one line per method and one panel per task, 95 % bands.

    Args:
        table: tables/decay.csv: columns task, method, length, metric, attribute, mean, low, high.
    """
    from lapa2_interp.paper.tables import overall

    shown = overall(table[table["mean"].notna()])
    figure, panels = _tasks(shown)
    for task, panel, part in panels:
        for method, line in part.groupby("method", sort=False):
            colour, marker = _style(str(method))
            _band(panel, line, "length", colour, marker=marker, ms=4, lw=1.3, label=_paper_name(str(method)))
        panel.set_xticks(sorted(part["length"].unique()))
        panel.set_title(task, fontsize=9)
        _plain(panel, "tokens", METRIC_LABELS[part["metric"].iloc[0]])
    _legend_below(figure, panels)
    return figure


def dilution_curves(table: pd.DataFrame, fits: pd.DataFrame) -> Drawing:
    """Figure dilution: prefix attention against step, C/(t + D) dotted, one panel per task.

    Args:
        table: tables/dilution.csv: columns task, method, name, step, mean, low, high.
        fits: tables/dilution.fits.csv: columns task, method, C, D, R2.
    """
    figure, panels = _tasks(table[table["name"] == "prefix"])
    for task, panel, part in panels:
        for i, (method, line) in enumerate(part.groupby("method", sort=False)):
            colour, _ = _style(str(method))
            _band(panel, line, "step", colour, lw=1.3, label=_paper_name(str(method)))
            own = (fits["task"] == line["task"].iloc[0]) & (fits["model"] == line["model"].iloc[0])
            c, d, r2 = fits.loc[own & (fits["method"] == method), ["C", "D", "R2"]].iloc[0]
            if not np.isnan(c):
                panel.plot(line["step"], c / (line["step"] + d), color=colour, ls=":", lw=1.6)
                place: dict[str, Any] = {"ha": "right", "va": "top", "transform": panel.transAxes}
                panel.text(0.98, 0.98 - 0.09 * i, f"R² {r2:.2f}", color=colour, fontsize=7, **place)
        panel.set_ylim(bottom=0)
        panel.set_title(task, fontsize=9)
        _plain(panel, "generation step t", "attention on the prefix")
    _legend_below(figure, panels)
    return figure


def attention_with_and_without(table: pd.DataFrame) -> Drawing:
    """Figures augmentation and augmentation_large: prefix attention against step, solid without and dashed with LaPA2.

    Args:
        table: Columns task, method, arm, step, mean, low, high.
    """
    figure, panels = _tasks(table)
    for task, panel, part in panels:
        for (method, arm), line in part.groupby(["method", "arm"], sort=False):
            colour, marker = _style(str(method))
            plain = arm == "baseline"
            look: dict[str, Any] = {
                "marker": marker,
                "ms": 4,
                "markevery": max(1, len(line) // 6),
                "mfc": colour if plain else "white",
            }
            name = _paper_name(str(method)) + ("" if plain else f", {arm}")
            _band(panel, line, "step", colour, ls="-" if plain else "--", lw=1.2, label=name, **look)
        panel.set_ylim(bottom=0)
        panel.set_title(task, fontsize=9)
        _plain(panel, "generation step t", "attention on the prefix")
    _legend_below(figure, panels, 2)
    return figure


def control_against_alpha(table: pd.DataFrame) -> Drawing:
    """Figure alpha: control (left axis, colour) and perplexity (right axis, grey) against alpha, one panel per method.

    Args:
        table: tables/alpha.csv: columns task, method, alpha, metric, attribute, mean, low, high.
    """
    from lapa2_interp.paper.tables import overall

    shown = overall(table[table["mean"].notna()])
    kinds = list(shown[["model", "task", "method"]].drop_duplicates().itertuples(index=False, name=None))
    figure = _figure(2.6 * max(1, len(kinds)), 2.5)
    panels = np.atleast_1d(figure.subplots(1, max(1, len(kinds))))
    for panel, (model, task, method) in zip(panels, kinds, strict=False):
        part = shown[(shown["model"] == model) & (shown["task"] == task) & (shown["method"] == method)].sort_values(
            "alpha"
        )
        colour, marker = _style(method)
        metric = "tox" if task == "detox" else "acc"
        control, fluency = part[part["metric"] == metric], part[part["metric"] == "ppl"]
        _band(panel, control, "alpha", colour, marker=marker, ms=4, lw=1.3)
        panel.set_title(f"{_paper_name(method)}, {task}", fontsize=9)
        _plain(panel, "alpha", METRIC_LABELS[metric])
        panel.yaxis.label.set_color(colour)
        other = panel.twinx()
        error = np.abs(fluency[["low", "high"]].to_numpy().T - fluency["mean"].to_numpy())
        look: dict[str, Any] = {"color": "#777777", "ls": "--", "lw": 1.0, "marker": ".", "ms": 4, "elinewidth": 0.7}
        other.errorbar(fluency["alpha"], fluency["mean"], yerr=error, **look)
        other.set_ylabel("perplexity", color="#777777", fontsize=8)
        other.set_yscale("log")
        other.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        other.yaxis.set_major_formatter(ScalarFormatter())
        other.yaxis.set_minor_locator(NullLocator())
        other.set_ylim(fluency["mean"].min() / 1.6, fluency["mean"].max() * 1.6)
        other.tick_params(which="both", labelsize=7, colors="#777777")
        other.spines["top"].set_visible(False)
    return figure


def local_shares(table: pd.DataFrame) -> Drawing:
    """Figure local_attn: share of the nearest k keys outside the prefix against step, solid without and dashed with LaPA2.

    Args:
        table: tables/local_attn.csv: columns task, method, arm, k, without_bos, step, mean, low, high.
    """
    shown = table[~table["without_bos"].astype(bool)]
    figure, panels = _tasks(shown, 2.9, 2.7)
    for task, panel, part in panels:
        for number, (k, line_of_k) in enumerate(part.groupby("k", sort=False), 1):
            for arm, line in line_of_k.groupby("arm", sort=False):
                colour = COLOURS[number]
                plain = arm == "baseline"
                name = f"k = {k}{'' if plain else ', with LaPA2'}"
                _band(panel, line, "step", colour, ls="-" if plain else "--", lw=1.1, label=name)
        panel.set_title(f"{task}, {_paper_name(part['method'].iloc[0])}", fontsize=9)
        panel.set_ylim(0, 1.05)
        _plain(panel, "generation step t", "share of the nearest k")
    _legend_below(figure, panels, 4)
    return figure


def ratings(table: pd.DataFrame) -> Drawing:
    """Figure eval: mean ratings (1 to 5) by base method and criterion, without and with LaPA2; "no judge" where there are none.

    Args:
        table: tables/eval.csv: columns rater, task, method, arm, criterion, mean, low, high.
    """
    raters = list(dict.fromkeys(table["rater"])) if len(table) else []
    figure = _figure(COLUMN * max(1, len(raters)), 2.5)
    panels = np.atleast_1d(figure.subplots(1, max(1, len(raters))))
    if not raters:
        panels[0].text(0.5, 0.5, "no judge", ha="center", va="center", fontsize=14, color="#777777")
        panels[0].set_axis_off()
        return figure
    for panel, rater in zip(panels, raters, strict=True):
        part = table[table["rater"] == rater]
        bars = list(part[["task", "method", "criterion"]].drop_duplicates().itertuples(index=False, name=None))
        arms = list(dict.fromkeys(part["arm"]))
        for i, arm in enumerate(arms):
            own = part[part["arm"] == arm].set_index(["task", "method", "criterion"]).reindex(bars)
            error = np.abs(own[["low", "high"]].to_numpy().T - own["mean"].to_numpy())
            x = np.arange(len(bars)) + (i - (len(arms) - 1) / 2) * 0.8 / len(arms)
            panel.bar(
                x, own["mean"], 0.36, yerr=error, color=COLOURS[i % len(COLOURS)], label=arm, error_kw={"lw": 0.8}
            )
        panel.set_xticks(
            range(len(bars)), [f"{method}\n{task}\n{criterion}" for task, method, criterion in bars], fontsize=6
        )
        panel.set_ylim(1, 5)
        panel.set_title(rater, fontsize=9)
        panel.legend(frameon=False, fontsize=7)
        _plain(panel, "", "mean rating")
    return figure
