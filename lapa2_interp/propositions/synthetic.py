"""The propositions on synthetic logits: shares of attention, slopes and verdicts by family.

All functions take the means of `bias.synthetic.draw_means`. Their intervals resample its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lapa2_interp.bias.synthetic import LOGIT_FAMILIES
from lapa2_interp.bias.theory import augmented_share, fit_slopes, prefix_share
from lapa2_interp.propositions.claims import (
    CLOSED_FORM,
    EXPECTED_SHARE,
    MEAN_DECAY,
    ON_SYNTHETIC,
    TYPICAL_RATIO,
    mean_curve_slope,
    rate_row,
    verdict_row,
)
from lapa2_interp.stats import mean_interval

if TYPE_CHECKING:
    import xarray as xr


def synthetic_shares(means: xr.Dataset) -> pd.DataFrame:
    """A' of every family, alpha and length: columns family, alpha, l, mean, low, high, texts,
    predicted (Eq. 11)."""
    lengths, rows, l_pre = means["l"].to_numpy(), means["row"].size, means.attrs["l_pre"]
    table = []
    for family, shares in zip(means["family"].to_numpy(), means["share"].to_numpy(), strict=True):
        for j, alpha in enumerate(means["alpha"].to_numpy()):
            predicted = augmented_share(lengths, l_pre, alpha)
            for i, l in enumerate(lengths):
                interval = mean_interval(shares[:, j, i], np.arange(rows), resamples=500)
                table.append(
                    {"family": family, "alpha": alpha, "l": l, **interval.columns}
                    | {"texts": int(means["texts"][i]), "predicted": predicted[i]}
                )
    return pd.DataFrame(table)


def synthetic_slopes(means: xr.Dataset) -> pd.DataFrame:
    """Slopes of every family and alpha: columns family, alpha, quantity ("log-odds", "log A'"),
    mean, low, high, texts, and
    `predicted`: alpha on log-odds, the closed form's own slope over these lengths on log A'."""
    lengths, rows, l_pre = means["l"].to_numpy(), means["row"].size, means.attrs["l_pre"]
    x, row, table = np.log(lengths), np.arange(rows), []
    for family, ratios, shares in zip(
        means["family"].to_numpy(),
        means["log_ratio"].to_numpy(),
        means["share"].to_numpy(),
        strict=True,
    ):
        for j, alpha in enumerate(means["alpha"].to_numpy()):
            closed_form = np.log(augmented_share(lengths, l_pre, alpha))
            measured = {
                "log-odds": (mean_interval(fit_slopes(x, ratios) + alpha, row), alpha),
                "log A'": (mean_curve_slope(x, shares[:, j], row), fit_slopes(x, closed_form)),
            }
            for quantity, (interval, predicted) in measured.items():
                table.append(
                    {"family": family, "alpha": alpha, "quantity": quantity, **interval.columns}
                    | {"texts": int(means["texts"].min()), "predicted": float(predicted)}
                )
    return pd.DataFrame(table)


def synthetic_verdicts(means: xr.Dataset) -> pd.DataFrame:
    """Verdicts on the claims, on every family with the assumptions that it keeps or breaks; texts
    are those of all rows.

    The law of the bias is not tested: synthetic A' is computed by it.
    (`tests/paper/test_propositions.py` puts the bias on whole rows of logits.)
    """
    lengths, l_pre = means["l"].to_numpy(), means.attrs["l_pre"]
    x, row, table = np.log(lengths), np.arange(means["row"].size), []
    for name in means["family"].to_numpy():
        of_family = means.sel(family=name)
        ratio, plain = of_family["log_ratio"].to_numpy(), of_family["share"].sel(alpha=0).to_numpy()
        family = LOGIT_FAMILIES.get(name)
        where = f"{ON_SYNTHETIC}{name}" + (f" ({family.keeps})" if family else "")
        start = mean_interval(plain[:, 0] / prefix_share(lengths[0], l_pre), row)
        typical = mean_interval(fit_slopes(x, ratio), row)
        table += [
            verdict_row(EXPECTED_SHARE, where, start, 1),
            verdict_row(MEAN_DECAY, where, mean_curve_slope(x, plain, row), -1),
            rate_row(where, x[None], {"": ratio}, row),
            verdict_row(TYPICAL_RATIO, where, typical, 0),
        ]
        for alpha in means["alpha"].to_numpy()[means["alpha"] > 0]:
            last = of_family["share"].sel(alpha=alpha).to_numpy()[:, -1]
            reached = mean_interval(last / augmented_share(lengths[-1], l_pre, alpha), row)
            table.append(verdict_row(CLOSED_FORM, where, reached, 1, alpha=alpha))
    return pd.DataFrame(table).assign(texts=int(means["texts"].min()))
