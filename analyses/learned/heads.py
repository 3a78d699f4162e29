"""What was learned, beside what other tables say of the same heads of SmolLM2.

    python analyses/learned/heads.py

reads figures/learned/strengths.csv and writes there

- heads.csv: rank correlations (Spearman) of the learned strengths of each seed with the slope of
  every head, with what its knock-out takes (both from figures/circuits/sentiment), and of seeds
  with one another; the mean strength of the heads that most cards of figures/families choose, of
  those they call opposing, and of all others; and the percentage of heads that were learned and are
  below 0. Intervals resample heads.
- strengths.png: the strengths by layer and head, as a mean over seeds, and against the slope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from analyses.families.grids import OUT as FAMILIES
from analyses.families.grids import SMOLLM2
from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from analyses.learned.train import OUT, SEEDS, STRENGTHS
from lapa2_interp.files import write_text
from lapa2_interp.plots import COLOURS, layer_map, new_figure, plain_axes
from lapa2_interp.table_formats import as_csv, as_text

CIRCUITS = FIGURES / "circuits" / "sentiment"
KEYS = ["layer", "head"]
RESAMPLES = 4000
MOST = 3
"""Cards of five that choose a head."""
CHOSEN, OPPOSING, OTHERS = "chosen", "opposing", "others"
KINDS = (CHOSEN, OPPOSING, OTHERS)


def main() -> None:
    """Write the table and the figure."""
    ScriptOptions(str(__doc__)).parse_args()
    heads = all_heads()
    table = pd.DataFrame(rows_of(heads))
    write_text(OUT / "heads.csv", as_csv(table, 6))
    print(as_text(table, ".3g"))
    draw(heads).savefig(OUT / "strengths.png", dpi=200)


def all_heads() -> pd.DataFrame:
    """A row a head: the strength that each seed learned, slope, knock-out, and kind."""
    heads = pd.read_csv(CIRCUITS / "gradient.csv")[[*KEYS, "slope"]]
    effects = pd.read_csv(CIRCUITS / "head.csv")[[*KEYS, "effect"]]
    heads = heads.merge(effects.rename(columns={"effect": "knock-out"}), on=KEYS)
    learned = pd.read_csv(OUT / "strengths.csv")
    learned = learned[(learned["model"] == SMOLLM2) & (learned["way"] == STRENGTHS)]
    for seed in SEEDS:
        own = learned[learned["seed"] == seed][[*KEYS, "strength"]]
        heads = heads.merge(own.rename(columns={"strength": seed}), on=KEYS, how="left")
    heads[[*SEEDS]] = heads[[*SEEDS]].fillna(0.0)  # heads without a strength are in no row
    cards = pd.read_csv(FAMILIES / "heads.csv")
    cards = cards[cards["model"] == SMOLLM2]
    heads["kind"] = OTHERS
    for kind in (CHOSEN, OPPOSING):
        times = cards[cards["kind"] == kind].groupby(KEYS).size()
        most = times[times >= MOST].index
        heads.loc[pd.MultiIndex.from_frame(heads[KEYS]).isin(most), "kind"] = kind
    return heads


def rows_of(heads: pd.DataFrame) -> Iterator[dict]:
    """The rows of heads.csv."""

    def rank(one: str | int, two: str | int) -> Callable[[pd.DataFrame], float]:
        return lambda rows: float(spearmanr(rows[one], rows[two]).statistic)

    for name in ("slope", "knock-out"):
        for seed in SEEDS:
            yield interval(heads, f"rank correlation with {name}", str(seed), rank(seed, name))
    for one, two in combinations(SEEDS, 2):
        seeds = f"{one} and {two}"
        yield interval(heads, "rank correlation of two seeds", seeds, rank(one, two))
    for kind in KINDS:
        own = heads[heads["kind"] == kind]
        means = own.assign(mean=own[[*SEEDS]].mean(axis=1))
        row = interval(means, f"mean strength, {kind}", "all", lambda rows: rows["mean"].mean())
        yield row | {"heads": len(own)}
    for seed in SEEDS:
        yield interval(heads, "strengths below 0, %", str(seed), below_zero(seed))


def below_zero(seed: int) -> Callable[[pd.DataFrame], float]:
    """The percentage of heads whose strength of a seed is below 0."""
    return lambda rows: 100 * float((rows[seed] < 0).mean())


def interval(
    rows: pd.DataFrame, what: str, seed: str, statistic: Callable[[pd.DataFrame], float]
) -> dict:
    """A statistic of heads with its 95 % interval."""
    rng, n = np.random.default_rng(0), len(rows)
    drawn = [statistic(rows.iloc[rng.integers(n, size=n)]) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, (2.5, 97.5))
    ends = {"value": statistic(rows), "low": low, "high": high, "heads": len(rows)}
    return {"what": what, "seed": seed} | ends


def draw(heads: pd.DataFrame) -> Figure:
    """Strengths by layer and head; and against the slope, by kind of head."""
    means = heads.assign(mean=heads[[*SEEDS]].mean(axis=1))
    figure = new_figure(8.6, 3.6)
    left, right = figure.subplots(1, 2)
    matrix = means.pivot(index="layer", columns="head", values="mean").to_numpy()
    most = float(np.abs(matrix).max())
    drawn = layer_map(left, matrix, cmap="RdBu_r", vmin=-most, vmax=most)
    bar = figure.colorbar(drawn, ax=left)
    bar.set_label("learned strength, mean of seeds", size=8)
    bar.ax.tick_params(labelsize=7)
    for colour, kind in zip(COLOURS[1:], KINDS, strict=False):
        own = means[means["kind"] == kind]
        right.plot(1000 * own["slope"], own["mean"], "o", ms=3, color=colour, label=kind)
    right.axhline(0, color="0.7", lw=0.6)
    right.axvline(0, color="0.7", lw=0.6)
    plain_axes(right, "slope of the head, 1/1000 nats for 1 of bias", "learned strength")
    right.legend(frameon=False, fontsize=7)
    return figure


if __name__ == "__main__":
    main()
