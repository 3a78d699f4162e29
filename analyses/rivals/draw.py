"""Figures rivals: accuracy against cost of every way to steer, from the arms.csv of a folder of
analyses/rivals/analyse.py; and, without a folder, what stands beside the cost (beside.png, with
time.csv of analyses/rivals/measure_time.py), the best ways in every setting (settings.png, and
settings.csv, which has these rows of every folder's equal.csv), and in bits.csv how far perplexity
per token by the judge and bits per character, by judge and writer, order the arms alike."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from analyses.lab.style import legend_below, name_ends
from lapa2_interp.circuits.statistics import spearman
from lapa2_interp.files import write_text
from lapa2_interp.plots import COLOURS, new_figure, plain_axes
from lapa2_interp.table_formats import as_csv

NAMES = {
    "lapa2": "LaPA², all heads",
    "head-selective": "chosen heads",
    "gate, head-selective": "gate around chosen heads",
    "retrying gate, head-selective": "retrying gate around chosen heads",
    "retrying gate, key-scale": "retrying gate, prefix's scores multiplied",
    "log-n": "all scores multiplied",
    "head-selective, opposing down": "chosen heads, opposing down",
    "key-scale": "prefix's scores multiplied",
    "caa, layer 20": "activation addition",
    "caa, layer 25": "activation addition, layer 25",
    "caa, layer 13": "activation addition",
    "reminder": "prefix read again",
    "omega": "larger omega",
    "strength": "larger strength",
    "temperature": "temperature 0.8",
    "temperature 0.8": "chosen heads, temperature 0.8",
}
"""Of families that the figure calls otherwise."""
SETTINGS = {
    "": "sentiment",
    "again": "sentiment, other prompts",
    "soft": "sentiment, soft prefixes",
    "topic": "topic",
    "topic-soft": "topic, soft prefixes",
    "air-decoding": "Air-Decoding",
    "dexperts": "DExperts",
    "gemma": "Gemma as the writer",
}
"""By folder. Sentiment, hard prefixes alone and SmolLM2 as the writer where the name says nothing
else."""
SHOWN = {
    "head-selective": (COLOURS[1], "o"),
    "head-selective, opposing down": (COLOURS[6], "s"),
    "caa, layer 20": (COLOURS[3], "^"),
    "caa, layer 25": (COLOURS[3], "v"),
    "caa, layer 13": (COLOURS[3], "^"),
    "lapa2": (COLOURS[2], "D"),
    "gate, head-selective": (COLOURS[4], "P"),
    "guidance": (COLOURS[5], "X"),
    "omega": (COLOURS[5], "X"),
    "strength": (COLOURS[5], "X"),
}
"""Colour and marker of the ways that are curves; a way is the same in every figure."""
LIMITS = (0.65, 1.85)
"""The least and the largest cost of the figure."""
TITLES = {
    "rivals": "Activation addition and a bias in chosen heads control most at equal cost",
    "gemma": "In Gemma activation addition leads, by one scorer alone",
}
"""By folder; the others have the name of their setting."""
BEST = {
    "chosen heads": ["head-selective"],
    "activation addition": ["caa, layer 20", "caa, layer 25", "caa, layer 13"],
    "chosen heads, opposing down": ["head-selective, opposing down"],
    "the method, stronger": ["omega", "strength"],
}
METRICS = {"acc hidden": "accuracy by adapter, words hidden, %", "acc (linear)": "by linear, %"}


def draw(arms: pd.DataFrame, title: str = "") -> Figure:
    """One panel a scorer: accuracy with 95 % intervals against cost. The ways of `SHOWN` are curves
    from no bias through their strengths; a strength that costs less than the one before is a hollow
    mark beside the curve. The other ways are grey marks. Costs are those from `LIMITS`; dotted are
    the two at which ways are compared.

    Args:
        arms: arms.csv of a folder.
        title: What the reader should see.
    """
    figure = new_figure(7.4, 3.7)
    figure.suptitle(title, fontsize=9, x=0.02, ha="left")
    panels = figure.subplots(1, len(METRICS), width_ratios=[1.45, 1])
    families = [name for name in dict.fromkeys(arms["family"]) if name != "baseline"]
    for axes, (metric, words) in zip(panels, METRICS.items(), strict=True):
        rows = arms[(arms["metric"] == metric) & (arms["attributes"] == "all")]
        base, ends = rows[rows["family"] == "baseline"], {}
        for family in sorted(families, key=lambda name: name in SHOWN):
            own = rows[rows["family"] == family].sort_values("strength")
            own = own[own["cost"].between(*LIMITS)]
            colour, marker = SHOWN.get(family, ("0.75", "o"))
            if family in SHOWN:
                curve = pd.concat([base, own])
                goes_back = curve["cost"] < curve["cost"].cummax()
                aside, curve = curve[goes_back], curve[~goes_back]
                look = {"color": colour, "marker": marker, "ms": 4, "lw": 1.4}
                axes.plot(aside["cost"], aside["mean"], **look, ls="", mfc="white")
                axes.plot(curve["cost"], curve["mean"], **look)
                ends[NAMES.get(family, family)] = (*curve[["cost", "mean"]].iloc[-1], colour)
            else:
                axes.plot(own["cost"], own["mean"], "o", color=colour, ms=3)
            axes.vlines(own["cost"], own["low"], own["high"], color=colour, lw=0.9)
        axes.plot(base["cost"], base["mean"], "ko", ms=5)
        for cost in (1.1, 1.25):
            axes.axvline(cost, color="0.6", ls=":", lw=0.8)
        is_first = metric == next(iter(METRICS))
        least = min(0.9, rows["cost"][rows["cost"].between(*LIMITS)].min() - 0.05)
        axes.set_xlim(least, LIMITS[1] + (0.9 if is_first else 0.05))
        axes.set_xticks([1, 1.25, 1.5, 1.75])
        axes.set_ylim(bottom=axes.get_ylim()[0] - 3)
        plain_axes(axes, "perplexity, times that of no bias", words)
        if is_first:
            axes.annotate(
                "no bias", (1, base["mean"].iloc[0]), (-12, -14), textcoords="offset points",
                fontsize=7,
            )  # fmt: skip
            name_ends(axes, ends, axes.transLimits.transform((LIMITS[1] + 0.06, 0))[0], 0.055)
    return figure


def draw_beside(arms: pd.DataFrame, times: pd.DataFrame) -> Figure:
    """Time (with the least and largest of its turns), bits, distinct pairs (no interval) and
    repetition of every arm; a darker mark is a stronger arm. Dotted: no bias."""
    rows = arms[arms["attributes"] == "all"]
    distinct = rows.drop_duplicates(["family", "strength"])
    distinct = distinct.assign(mean=distinct["distinct-2"], low=np.nan, high=np.nan)
    panels = {
        "time per token,\nmultiple of\nno bias": times.rename(columns={"time": "mean"}),
        "bits per\ncharacter,\nother model": rows[rows["metric"] == "bits"],
        "bits per\ncharacter,\nits writer": rows[rows["metric"] == "bits (writer)"],
        "distinct pairs\nof words\n(share)": distinct,
        "repeated\n4-grams\n(%)": rows[rows["metric"] == "rep"],
    }
    families = [name for name in dict.fromkeys(rows["family"]) if name != "baseline"]
    figure = new_figure(7.2, 0.8 + 0.34 * len(families))
    for axes, (words, table) in zip(
        figure.subplots(1, 5, sharey=True), panels.items(), strict=True
    ):
        axes.axvline(
            table.loc[table["family"] == "baseline", "mean"].iloc[0], color="grey", ls=":", lw=0.8
        )
        for i, family in enumerate(families):
            own = table[table["family"] == family].sort_values("strength")
            for n, row in enumerate(own.to_dict("records")):
                y, look = i + 0.2 * (n - (len(own) - 1) / 2), {"color": COLOURS[1]}
                look["alpha"] = (n + 1) / len(own)
                axes.plot(row["mean"], y, "o", ms=3, **look)
                axes.hlines(y, row["low"], row["high"], lw=1, **look)
        axes.set_yticks(range(len(families)), [NAMES.get(name, name) for name in families])
        plain_axes(axes, words, "")
    axes.set_ylim(len(families) - 0.5, -0.5)
    return figure


def gather(folder: Path) -> pd.DataFrame:
    """The best ways minus LaPA2 in all heads in every setting that has a folder, where both reach
    the cost; of activation addition the last layer, which a pilot on that task chose."""
    ways = {family: way for way, families in BEST.items() for family in families}
    tables = []
    for name, setting in SETTINGS.items():
        if (file := folder / name / "equal.csv").exists():
            rows = pd.read_csv(file)
            rows = rows[(rows["attributes"] == "all") & (rows["reference"] == "lapa2")]
            rows = rows[rows["family"].isin(ways)]
            rows = rows.drop(columns=["low", "high"])
            rows = rows.rename(columns={"difference_low": "low", "difference_high": "high"})
            tables.append(rows.assign(setting=setting))
    columns = ["setting", "way", "ratio", "metric", "difference", "low", "high"]
    table = pd.concat(tables)
    table["way"] = table["family"].map(ways)
    table = table.drop_duplicates(["setting", "way", "ratio", "metric"], keep="last")
    table = table.dropna(subset=["low"])
    return table[[*columns, "p_holm", "verdict", "prompts"]]


def order_by_bits(folder: Path) -> pd.DataFrame:
    """The rank correlation of perplexity with bits, by judge and by writer, over the arms of every
    setting that has a folder."""
    rows = []
    for name, setting in SETTINGS.items():
        if (file := folder / name / "arms.csv").exists():
            arms = pd.read_csv(file)
            arms = arms[arms["attributes"] == "all"]
            for by, metric in (("other model", "bits"), ("writer", "bits (writer)")):
                both = arms[arms["metric"] == metric][["perplexity", "mean"]].to_numpy(float)
                ranks = {"spearman": spearman(*both.T), "arms": len(both)}
                rows.append({"setting": setting, "by": by, **ranks})
    return pd.DataFrame(rows)


def draw_settings(table: pd.DataFrame) -> Figure:
    """One panel a cost: accuracy minus that of LaPA2 in all heads, with 95 % intervals. Ways that
    do not reach the cost have no mark."""
    rows = table[table["metric"] == "acc hidden"]
    ratios = sorted(rows["ratio"].unique())
    settings = list(dict.fromkeys(rows["setting"]))
    ways = [way for way in BEST if way in set(rows["way"])]
    figure = new_figure(7.2, 0.9 + 0.5 * len(settings))
    panels = figure.subplots(1, len(ratios), sharey=True, sharex=True)
    for axes, ratio in zip(panels, ratios, strict=True):
        for i, way in enumerate(ways):
            own = rows[(rows["way"] == way) & (rows["ratio"] == ratio)]
            y = np.array([settings.index(name) for name in own["setting"]]) + 0.17 * (i - 1.5)
            colour, marker = SHOWN[BEST[way][0]]
            axes.plot(own["difference"], y, marker, color=colour, ms=4, label=way)
            axes.hlines(y, own["low"], own["high"], color=colour, lw=1.2)
        axes.axvline(0, color="grey", lw=0.8)
        axes.set_yticks(range(len(settings)), settings)
        plain_axes(axes, f"points above all heads, perplexity times {ratio:g}", "")
    panels[0].set_ylim(len(settings) - 0.5, -0.5)
    legend_below(figure, [("", panels[0], rows)], 4)
    return figure


if __name__ == "__main__":
    parser = ScriptOptions("Figure rivals")
    parser.add_argument("folder", type=Path, nargs="?", default=FIGURES / "rivals")
    folder = parser.parse_args().folder
    title = TITLES.get(folder.name, SETTINGS.get(folder.name, ""))
    draw(pd.read_csv(folder / "arms.csv"), title).savefig(folder / "rivals.png", dpi=200)
    if folder == parser.get_default("folder"):
        beside = draw_beside(pd.read_csv(folder / "arms.csv"), pd.read_csv(folder / "time.csv"))
        beside.savefig(folder / "beside.png", dpi=200)
        settings = gather(folder)
        write_text(folder / "settings.csv", as_csv(settings, 6))
        draw_settings(settings).savefig(folder / "settings.png", dpi=200)
        write_text(folder / "bits.csv", as_csv(order_by_bits(folder), 6))
