"""Figures of the propositions, each drawn from one table."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb

from lapa2_interp.plots import (
    COLOURS,
    Drawing,
    band,
    error_bars,
    layer_map,
    legend_above,
    new_figure,
    plain_axes,
)

SHADES = ("#000000", "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7")
"""For alphas in rising order, the baseline black."""


def regimes(shares: pd.DataFrame, alphas: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5)) -> Drawing:
    """A' against l on synthetic logits, one panel per alpha and one line per family. Dotted: the
    closed form of Eq. 11.

    Args:
        shares: From `synthetic_propositions.synthetic_shares`.
        alphas: Panels, as far as the table has these alphas.
    """
    panel_alphas = [alpha for alpha in alphas if (shares["alpha"] == alpha).any()]
    figure = new_figure(2.6 * len(panel_alphas) + 0.6, 3.4)
    panels = np.atleast_1d(figure.subplots(1, len(panel_alphas)))
    styles = [(colour, dash) for dash in ("-", "--") for colour in COLOURS[1:]]
    for panel, alpha in zip(panels, panel_alphas, strict=True):
        part = shares[shares["alpha"] == alpha]
        for (family, curve), (colour, dash) in zip(
            part.groupby("family", sort=False), styles, strict=False
        ):
            band(panel, curve, "l", colour, ls=dash, lw=1.2, label=family)
        first = part[part["family"] == part["family"].iloc[0]]
        panel.plot(first["l"], first["predicted"], color="black", lw=1.6, ls=":", label="Eq. 11")
        panel.set_xscale("log")
        if alpha < 1:
            panel.set_yscale("log")
        else:
            panel.set_ylim(0, 1.02)
        panel.set_title(f"alpha = {alpha:g}", fontsize=9)
        plain_axes(panel, "l", "attention on the prefix" if panel is panels[0] else "")
    legend_above(figure, 6, panels[0])
    return figure


def slopes_against_alpha(table: pd.DataFrame, by: str | None = None) -> Drawing:
    """Slopes against alpha with 95 % intervals; the predictions are dotted.

    Args:
        table: From `synthetic_propositions.synthetic_slopes` or `exponent_table`.
        by: Column with a line for each value ("family"); None for a single line.
    """
    quantities = [
        name for name in ("log-odds", "rise", "log A'") if (table["quantity"] == name).any()
    ]
    quantities = [name for name in quantities if not (by and name == "rise")]
    figure = new_figure(3.3 * len(quantities), 3.4)
    panels = np.atleast_1d(figure.subplots(1, len(quantities)))
    titles = {
        "log-odds": "log-odds + log(r-1) on log r",
        "rise": "rise of the log-odds on log r",
        "log A'": "log A' on log l (not judged)",
    }
    for panel, quantity in zip(panels, quantities, strict=True):
        part = table[table["quantity"] == quantity]
        groups = part.groupby(by, sort=False) if by else [("measured", part)]
        styles = [(colour, dash) for dash in ("-", "--") for colour in COLOURS[1:]]
        for (name, line), (colour, dash) in zip(groups, styles, strict=False):
            look = {"color": colour, "ls": dash, "lw": 1.1, "marker": "o", "ms": 2.5}
            panel.errorbar(line["alpha"], line["mean"], yerr=error_bars(line), label=name, **look)
        one = part[part[by] == part[by].iloc[0]] if by else part
        panel.plot(one["alpha"], one["predicted"], color="black", ls=":", lw=1.6, label="predicted")
        panel.set_title(titles[quantity], fontsize=9)
        plain_axes(panel, "alpha", "slope" if panel is panels[0] else "")
    legend_above(figure, 6, panels[0])
    return figure


def alpha_curves(curves: pd.DataFrame) -> Drawing:
    """Pooled prefix attention against step for every alpha, on two log axes, with 95 % bands and
    C/(t+D) dotted.

    Args:
        curves: From `propositions.traces.decay_curve_table`.
    """
    figure = new_figure(6.8, 4.0)
    axes = figure.subplots()
    for (alpha, curve), colour in zip(curves.groupby("alpha"), cycle(SHADES), strict=False):
        c, d, r2 = curve[["C", "D", "R2"]].iloc[0]
        fit = "no C/(t+D) fits" if np.isnan(c) else f"{c:.2f}/(t+{d:.1f}), R² {r2:.2f}"
        # The interval of few texts may reach below 0, which a log axis cannot show.
        shown = curve.assign(low=curve["low"].where(curve["low"] > 0))
        band(axes, shown, "l_kv", colour, lw=1.4, label=f"alpha {alpha:g}: {fit}")
        if not np.isnan(c):
            axes.plot(curve["l_kv"], c / (curve["step"] + d), color=colour, ls=":", lw=1.2)
    axes.set(xscale="log", yscale="log", ylim=(curves["mean"].min() / 3, None))
    plain_axes(
        axes, "l_kv: keys, BOS included", "attention on the prefix\n(mean over layers and heads)"
    )
    legend_above(figure, 3)
    return figure


def growth_map(heads: pd.DataFrame) -> Drawing:
    """Layer x head maps of the growth of e_P/e_R in the baseline, and of the heads' kinds.

    Args:
        heads: From `propositions.traces.head_decay_table`.
    """
    base = heads[heads["alpha"] == 0]
    growth = base.pivot(index="layer", columns="head", values="growth").to_numpy()
    kinds = base.pivot(index="layer", columns="head", values="kind").to_numpy()
    figure = new_figure(6.4, 5.4)
    left, right = figure.subplots(1, 2, sharey=True)
    drawn = layer_map(left, growth, cmap="RdBu_r", vmin=-1, vmax=1)
    figure.colorbar(drawn, ax=left, location="bottom", shrink=0.9, extend="both")
    left.set_title("slope of log(e_P/e_R) on log l\nblue: faster than 1/l, red: slower", fontsize=8)
    names = ("mixed", "sink", "local", "prefix")
    tints = dict(zip(names, ("#DDDDDD", "#0072B2", "#009E73", "#D55E00"), strict=True))
    layer_map(right, [[to_rgb(tints[kind]) for kind in row] for row in kinds])
    for name in names:
        right.scatter(
            [], [], color=tints[name], marker="s", label=f"{name} ({(kinds == name).sum()})"
        )
    right.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize=7
    )
    right.set_title("at least half of the attention on", fontsize=8)
    right.label_outer()
    return figure


def predictions(table: pd.DataFrame) -> Drawing:
    """A' by layer: baseline, predicted by the exact law, measured; one panel per alpha.

    Args:
        table: From `propositions.traces.prediction_table`.
    """
    alphas = list(dict.fromkeys(table["alpha"]))
    figure = new_figure(2.2 * len(alphas) + 0.8, 3.2)
    panels = np.atleast_1d(figure.subplots(1, len(alphas), sharey=True))
    for panel, alpha in zip(panels, alphas, strict=True):
        part = table[table["alpha"] == alpha]
        panel.plot(part["layer"], part["baseline"], color=COLOURS[0], lw=1.2, label="baseline")
        panel.plot(
            part["layer"],
            part["predicted"],
            color=COLOURS[1],
            lw=1.2,
            ls="--",
            label="predicted from it",
        )
        panel.plot(part["layer"], part["measured"], color=COLOURS[2], lw=1.4, label="measured")
        panel.set_title(f"alpha = {alpha:g}", fontsize=9)
        plain_axes(panel, "layer", "attention on the prefix" if panel is panels[0] else "")
    legend_above(figure, 3, panels[0])
    return figure


def local_ratios(table: pd.DataFrame, outside: str = "prefix") -> Drawing:
    """Change of the local ratio by layer and k, pooled as the paper does and head by head; one
    column per alpha.

    Args:
        table: From `propositions.traces.local_table`.
        outside: The keys that the denominator leaves out, "prefix" or "prefix and BOS".
    """
    part = table[(table["outside"] == outside) & (table["layer"] != "all")]
    part = part.drop(columns="baseline").rename(columns={"difference": "mean"})
    part = part.astype({"layer": int})
    alphas = [alpha for alpha in dict.fromkeys(part["alpha"]) if alpha in (0.5, 1.0)] or list(
        dict.fromkeys(part["alpha"])
    )[:2]
    figure = new_figure(3.4 * len(alphas), 4.6)
    panels = np.atleast_2d(figure.subplots(2, len(alphas), sharex=True, sharey=True, squeeze=False))
    for column, alpha in enumerate(alphas):
        for row, pooling in enumerate(("pooled", "per head")):
            panel = panels[row, column]
            chosen = part[(part["alpha"] == alpha) & (part["pooling"] == pooling)]
            for (k, line), colour in zip(chosen.groupby("k"), COLOURS[1:], strict=False):
                band(panel, line, "layer", colour, lw=1.2, label=f"k = {k}")
            panel.axhline(0, color="black", lw=0.6)
            panel.set_title(f"alpha = {alpha:g}, {pooling}", fontsize=9)
            plain_axes(
                panel,
                "layer" if row else "",
                f"change of\nnearest_k/(1-{outside})" if not column else "",
            )
    legend_above(figure, 4, panels[0, 0])
    return figure
