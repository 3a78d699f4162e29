"""Control at equal perplexity: steering methods compared where their texts are equally fluent.

A *family* is a steering method at several strengths; strength 0 is the baseline, which all families
share. Its curve goes from the baseline through its strengths, the weakest first, with

    perplexity of an arm = exp(mean over its texts of NLL),  NLL = a text's mean -ln p per token

Its control at perplexity p lies on the first segment of the curve that reaches ln p, by linear
interpolation in ln perplexity. A curve that does not reach p has no value there: nothing is
extrapolated. Prompts are resampled, the same ones for all arms. With each resample everything is
computed again, including the baseline's perplexity and so p = ratio x baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from lapa2_interp.errors import ScoringError, unknown_choice
from lapa2_interp.stats import FEW, LEVEL, holm, resampled, resampled_p, tails
from lapa2_interp.table_formats import format_interval

SETTING_COLUMNS = ("task", "words", "model", "method", "variant")
"""Columns of a setting; only arms of one setting are compared."""
BASELINE = "baseline"
"""The family with which every curve begins."""
RATIOS = (1.1, 1.25)
"""Perplexities at which families are compared, as multiples of the baseline's."""
MIN_REACHED = 0.95
"""The least share of resamples whose curve must reach a perplexity for a comparison there."""
Unit = float | Float[np.ndarray, " resample"] | None
RESAMPLES = 40_000
"""Many, because Holm's correction needs small p-values."""


def interpolate_at_perplexity(
    log_perplexity: Float[np.ndarray, "*resample arm"],
    values: Float[np.ndarray, "*resample arm metric"],
    target: Float[np.ndarray, "*resample"],
) -> Float[np.ndarray, "*resample metric"]:
    """The values of a curve where it first reaches a perplexity; NaN if it does
    not.

    Args:
        log_perplexity: ln perplexity of the curve's arms, 2 or more: the baseline, then
            those of rising strength.
        values: Mean metrics of these arms.
        target: ln of the perplexity.
    """
    below, above = log_perplexity[..., :-1], log_perplexity[..., 1:]
    within = (below - target[..., None]) * (above - target[..., None]) <= 0
    first = within.argmax(axis=-1)[..., None]
    x, y = (np.take_along_axis(ends, first, axis=-1) for ends in (below, above))
    flat = x == y
    share = np.where(flat, 0.0, (target[..., None] - x) / np.where(flat, 1.0, y - x))
    before, after = (
        np.take_along_axis(values, first[..., None] + i, axis=-2)[..., 0, :] for i in (0, 1)
    )
    reached = within.any(axis=-1, keepdims=True)
    return np.where(reached, before + share * (after - before), np.nan)


def resampled_interval(
    values: Float[np.ndarray, "resample *rest"], prompts: int
) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"]]:
    """Estimates with their 95 % intervals from resampled prompts.

    Args:
        values: The estimates on the data, then those on each resample; NaN where there is none.

    Returns:
        The estimates, low and high. The ends are NaN if the data or more than 5 % of the resamples
        have no estimate, or below `stats.FEW` prompts.
    """
    known = (~np.isnan(values[1:])).mean(axis=0) >= MIN_REACHED
    known &= ~np.isnan(values[0]) & (prompts >= FEW)
    low, high = np.full((2, *values.shape[1:]), np.nan)
    if known.any():
        low[known], high[known] = np.nanpercentile(values[1:, known], tails(prompts), axis=0)
    return values[0], low, high


class SteeringCurves:
    """The curves of all families in one setting (model, task, method, variant), for every resample.

    Each text counts once, as in `tables.cell_table`, so attributes have equal weight if they have
    equally many scored texts.

    Args:
        texts: One row per text: family, strength (0 for `BASELINE`, else above 0), prompt, nll
            (mean -ln p per token; NaN if not measured), and metrics (NaN if not scored).
        metrics: Names of metric columns.
        resamples: Number of resamples of the prompts.
        seed: Seed of the resamples.

    Raises:
        ScoringError: No text of the baseline, or no other.
    """

    def __init__(
        self,
        texts: pd.DataFrame,
        metrics: Sequence[str],
        resamples: int = RESAMPLES,
        seed: int = 0,
    ) -> None:
        # Arms and prompts are sorted: the order of rows must not decide a resample's prompts.
        arms = texts[["family", "strength"]].drop_duplicates().sort_values(["family", "strength"])
        self.arms = pd.MultiIndex.from_frame(arms)
        if BASELINE not in arms["family"].tolist() or len(arms) < 2:
            raise ScoringError(
                "a comparison at equal perplexity needs texts of the baseline and of one other arm;"
                f" found {', '.join(dict.fromkeys(arms['family'])) or 'none'}"
            )
        self.metrics = tuple(metrics)
        # Sums and counts by prompt and arm, from which a resample's weights give its means.
        prompts = np.sort(texts["prompt"].unique())
        self.prompts = len(prompts)
        arm = self.arms.get_indexer(pd.MultiIndex.from_frame(texts[["family", "strength"]]))
        prompt = np.searchsorted(prompts, texts["prompt"].to_numpy())
        numbers = texts[["nll", *self.metrics]].to_numpy(np.float64)  # text quantity
        sums, counts = np.zeros((2, self.prompts, len(arms), numbers.shape[1]))
        np.add.at(sums, (prompt, arm), np.nan_to_num(numbers))
        np.add.at(counts, (prompt, arm), ~np.isnan(numbers))
        drawn = [np.ones((1, self.prompts)), *resampled(self.prompts, resamples, seed)]
        with np.errstate(invalid="ignore"):
            parts = [np.tensordot(w, sums, 1) / np.tensordot(w, counts, 1) for w in drawn]
        self.means = np.concatenate(parts)  # resample arm quantity; resample 0 is the data itself

    @property
    def families(self) -> list[str]:
        """The families besides the baseline, by name."""
        return [str(name) for name in self.arms.unique("family") if name != BASELINE]

    def curve(self, family: str) -> Float[np.ndarray, "resample arm quantity"]:
        """Means of the baseline and the family's arms, by strength; quantity 0 is ln perplexity."""
        names = self.arms.get_level_values("family")
        return self.means[:, [*np.flatnonzero(names == BASELINE), *np.flatnonzero(names == family)]]

    def values_at(
        self, family: str, ratio: float, unit: Unit = None
    ) -> tuple[Float[np.ndarray, "resample metric"], Bool[np.ndarray, " resample"]]:
        """A family's metrics at a multiple of the baseline's perplexity (or of exp(unit)), by
        resample, and a mask of the resamples whose curve reaches it."""
        curve = self.curve(family)
        with_one = np.concatenate([curve[..., 1:], np.ones_like(curve[..., :1])], axis=-1)
        one = curve[:, 0, 0] if unit is None else np.broadcast_to(unit, len(curve))
        values = interpolate_at_perplexity(curve[..., 0], with_one, one + np.log(ratio))
        return values[:, :-1], values[:, -1] == 1

    def points(self) -> pd.DataFrame:
        """The curves: one row per arm and metric.

        Returns:
            Columns family, strength, perplexity, perplexity_low, perplexity_high, metric, mean,
            low, high, prompts.
        """
        rows = []
        for number, (family, strength) in enumerate(self.arms):
            mean, low, high = resampled_interval(self.means[:, number], self.prompts)
            own = dict(zip(("", "_low", "_high"), np.exp([mean[0], low[0], high[0]]), strict=True))
            for i, metric in enumerate(self.metrics, 1):
                rows.append(
                    {"family": family, "strength": strength}
                    | {f"perplexity{end}": value for end, value in own.items()}
                    | {"metric": metric, "mean": mean[i], "low": low[i], "high": high[i]}
                    | {"prompts": self.prompts}
                )
        return pd.DataFrame(rows)

    def against_baseline(self) -> pd.DataFrame:
        """Every arm minus the baseline, whatever their perplexities, on the same prompts.

        Returns:
            Columns family, strength, ratio (of perplexities), metric, difference, low, high, p,
            prompts.
        """
        base = self.means[:, np.flatnonzero(self.arms.get_level_values("family") == BASELINE)]
        gaps = self.means - base
        rows = []
        for number, (family, strength) in enumerate(self.arms):
            if family == BASELINE:
                continue
            change, low, high = resampled_interval(gaps[:, number], self.prompts)
            p = resampled_p(gaps[1:, number], self.prompts)
            for i, metric in enumerate(self.metrics, 1):
                rows.append(
                    {"family": family, "strength": strength, "ratio": np.exp(change[0])}
                    | {"metric": metric, "difference": change[i], "low": low[i], "high": high[i]}
                    | {"p": p[i], "prompts": self.prompts}
                )
        return pd.DataFrame(rows)

    def compare(
        self, reference: str, ratios: Sequence[float] = RATIOS, unit: Unit = None
    ) -> pd.DataFrame:
        """Every family at equal perplexity, and its difference from a reference family.

        Args:
            reference: The family that others are compared with.
            ratios: Perplexities, as multiples of the baseline's.
            unit: ln of the perplexity of which ratios are multiples, instead of the baseline's: one
                number, or one for each resample, such as that of an arm (`curve`).

        Returns:
            One row per ratio, family and metric: ratio, perplexity, family, metric, value, low,
            high (NaN if the family is not comparable), reached (share of resamples), difference,
            difference_low, difference_high, p (NaN if the family or the reference is not
            comparable), prompts. The reference has no difference.

        Raises:
            ScoringError: There is no such family.
        """
        if reference not in self.families:
            raise ScoringError(unknown_choice("family", reference, self.families))
        rows = []
        for ratio in ratios:
            base, base_reached = self.values_at(reference, ratio, unit)
            first = self.curve(reference)[0, 0, 0] if unit is None else np.ravel(unit)[0]
            for family in (reference, *(name for name in self.families if name != reference)):
                here, reached = self.values_at(family, ratio, unit)
                share, both = reached[1:].mean(), reached & base_reached
                comparable = both[0] and both[1:].mean() >= MIN_REACHED
                comparable = comparable and self.prompts >= FEW and family != reference
                gap = here - base if comparable else np.full_like(here, np.nan)
                value, low, high = resampled_interval(here, self.prompts)
                change, least, most = resampled_interval(gap, self.prompts)
                p = resampled_p(gap[1:], self.prompts)
                for i, metric in enumerate(self.metrics):
                    rows.append(
                        {"ratio": ratio, "perplexity": np.exp(first) * ratio, "family": family}
                        | {"metric": metric, "value": value[i], "low": low[i], "high": high[i]}
                        | {"reached": share, "difference": change[i]}
                        | {"difference_low": least[i], "difference_high": most[i], "p": p[i]}
                        | {"prompts": self.prompts}
                    )
        return pd.DataFrame(rows)


def add_verdicts(table: pd.DataFrame, reference: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """Add Holm's p-value and a verdict to the rows of `SteeringCurves.compare`, of several tasks.

    One family of tests is all rows of one metric (and of equal columns `by`): all tasks, ratios and
    families except the reference. A row that is not comparable counts with p = 1.

    Returns:
        The table with p_holm and verdict: "more", "less", "not decided" or "not comparable"; "" for
        the reference.
    """
    judged = table.assign(p_holm=np.nan, verdict="")
    others = judged[judged["family"] != reference]
    for _, part in others.groupby(["metric", *by], sort=False, dropna=False):
        judged.loc[part.index, "p_holm"] = holm(part["p"].to_numpy())
    for row in others.index:
        p, change = judged.loc[row, ["p_holm", "difference"]]
        side = "more" if change > 0 else "less"
        verdict = "not comparable" if np.isnan(p) else side if p < LEVEL else "not decided"
        judged.loc[row, "verdict"] = verdict
    return judged


def add_caveats(table: pd.DataFrame, metric: str, second: str, masked: str) -> pd.DataFrame:
    """Add to the verdicts "more" and "less" by a metric what speaks against them:

    - "disputed": by the second scorer the difference has the other sign, or there is none;
    - "echo": with the prefix's words masked, its 95 % interval does not exclude 0.

    Args:
        metric, second, masked: Names of metrics; one that the table lacks raises no objection.
    """
    keys = [name for name in table if name in SETTING_COLUMNS or name in ("ratio", "family")]
    sides = table["verdict"].map({"more": 1.0, "less": -1.0})
    by = {name: table[table["metric"] == name].set_index(keys) for name in (second, masked)}
    marked = table.copy()
    for row in table.index[(table["metric"] == metric) & sides.notna()]:
        at, side, objections = tuple(table.loc[row, keys]), sides[row], []
        if at in by[second].index and not by[second].loc[at, "difference"] * side > 0:
            objections.append("disputed")
        if at in by[masked].index:
            least, most = by[masked].loc[at, ["difference_low", "difference_high"]]
            if not min(least * side, most * side) > 0:
                objections.append("echo")
        if objections:
            marked.loc[row, "verdict"] += f" ({', '.join(objections)})"
    return marked


def distinguishing_columns(table: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """The columns that distinguish a table's settings: without the last ones that follow from the
    others; at least one stays."""
    needed = list(names)
    for name in reversed(names):
        rest = [column for column in needed if column != name]
        if rest and (table.groupby(rest, dropna=False)[name].nunique(dropna=False) == 1).all():
            needed = rest
    return needed


def format_table(table: pd.DataFrame, setting: Sequence[str]) -> pd.DataFrame:
    """Format the rows of `add_verdicts`: a row per setting, ratio and family, a column per metric.

    Args:
        setting: Columns of the setting, for `distinguishing_columns`.
    """
    keys = [*distinguishing_columns(table, setting), "ratio", "perplexity", "family", "reached"]
    cells = []
    for row in table.to_dict("records"):
        text = "" if np.isnan(row["value"]) else f"{row['value']:.1f}"
        if not np.isnan(row["p_holm"]):
            low, high = row["difference_low"], row["difference_high"]
            change = format_interval(row["difference"], low, high, "+.1f")
            text += f"; {change}, p {row['p_holm']:.2g}"
        cells.append("; ".join(filter(None, (text, row["verdict"]))))
    wide = table.assign(cell=cells).pivot_table(
        index=keys, columns="metric", values="cell", aggfunc="first", sort=False
    )
    wide = wide[list(dict.fromkeys(table["metric"]))].rename_axis(columns=None).reset_index()
    return wide.assign(
        perplexity=wide["perplexity"].map("{:.1f}".format),
        reached=wide["reached"].map("{:.0%}".format),
    )
