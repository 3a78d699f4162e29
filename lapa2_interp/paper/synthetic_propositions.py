"""The propositions on synthetic logits: shares of attention, slopes and verdicts by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from lapa2_interp.bias.synthetic import LOGIT_FAMILIES
from lapa2_interp.bias.theory import (
    augmented_share,
    fit_slopes,
    prefix_share,
    shifted_share,
)
from lapa2_interp.paper.proposition_claims import (
    ALPHAS,
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


def synthetic_shares(
    drawn: Mapping[str, Float[np.ndarray, "text prefix length"]],
    lengths: Int[np.ndarray, " length"],
    l_pre: int,
    alphas: Sequence[float] = ALPHAS,
) -> pd.DataFrame:
    """A' of every family, alpha and length: columns family, alpha, l, mean, low, high (95 %, texts
    resampled), texts, predicted (Eq. 11), ratio (mean e_P / e_R)."""
    r, rows = lengths / l_pre, []
    for name, odds in drawn.items():
        ratio = np.exp(odds + np.log(r - 1)).mean((0, 1))
        for alpha in alphas:
            shares = shifted_share(1 / (1 + np.exp(-odds)), alpha * np.log(r)).mean(1)
            predicted = augmented_share(lengths, l_pre, alpha)
            for i, l in enumerate(lengths):
                interval = mean_interval(shares[:, i], np.arange(len(shares)), resamples=500)
                rows.append(
                    {"family": name, "alpha": alpha, "l": int(l), **interval.columns}
                    | {"texts": interval.n, "predicted": predicted[i], "ratio": ratio[i]}
                )
    return pd.DataFrame(rows)


def synthetic_slopes(
    drawn: Mapping[str, Float[np.ndarray, "text prefix length"]],
    lengths: Int[np.ndarray, " length"],
    l_pre: int,
    alphas: Sequence[float] = ALPHAS,
) -> pd.DataFrame:
    """Slopes of every family and alpha: columns family, alpha, quantity ("log-odds", "log A'"),
    mean, low, high, texts, and
    `predicted`: alpha on log-odds, the closed form's own slope over these lengths on log A'."""
    r, rows = lengths / l_pre, []
    x = np.log(r)
    for name, odds in drawn.items():
        for alpha in alphas:
            biased = odds + alpha * x
            share = np.log(shifted_share(1 / (1 + np.exp(-odds)), alpha * x).mean(1))
            measured = {
                "log-odds": (fit_slopes(x, biased + np.log(r - 1)).mean(1), alpha),
                "log A'": (
                    fit_slopes(x, share),
                    float(fit_slopes(x, np.log(augmented_share(lengths, l_pre, alpha)))),
                ),
            }
            for quantity, (values, predicted) in measured.items():
                interval = mean_interval(values, np.arange(len(values)))
                rows.append(
                    {"family": name, "alpha": alpha, "quantity": quantity, **interval.columns}
                    | {"texts": interval.n, "predicted": predicted}
                )
    return pd.DataFrame(rows)


def synthetic_verdicts(
    drawn: Mapping[str, Float[np.ndarray, "text prefix length"]],
    lengths: Int[np.ndarray, " length"],
    l_pre: int,
    alphas: Sequence[float] = ALPHAS,
) -> pd.DataFrame:
    """Verdicts on the claims, on every family with the assumptions that it keeps or breaks.

    The law of the bias is not tested: synthetic A' is computed by it.
    (`tests/paper/test_propositions.py` puts the bias on whole rows of logits.)
    """
    x, rows = np.log(lengths), []
    for name, odds in drawn.items():
        texts, ratio = np.arange(len(odds)), odds + np.log(lengths / l_pre - 1)
        family = LOGIT_FAMILIES.get(name)
        where = f"{ON_SYNTHETIC}{name}" + (f" ({family.keeps})" if family else "")
        share = 1 / (1 + np.exp(-odds))
        start = share[..., 0].mean(1) / float(prefix_share(float(lengths[0]), l_pre))
        enough_draws = [_effective_draws(share[..., i]) >= MIN_DRAWS for i in range(len(lengths))]
        rows.append(
            _inconclusive_unless(
                enough_draws[0], verdict_row(EXPECTED_SHARE, where, mean_interval(start, texts), 1)
            )
        )
        rows.append(
            _inconclusive_unless(
                all(enough_draws),
                verdict_row(MEAN_DECAY, where, mean_curve_slope(x[None], share.mean(1), texts), -1),
            )
        )
        rows.append(rate_row(where, x[None], {"": ratio.mean(1)}, texts))
        rows.append(
            verdict_row(TYPICAL_RATIO, where, mean_interval(fit_slopes(x, ratio).mean(1), texts), 0)
        )
        for alpha in sorted({alpha for alpha in alphas if alpha > 0}):
            closed_form = augmented_share(lengths[-1:], l_pre, alpha)
            ratios = (
                shifted_share(share[..., -1], alpha * np.log(lengths[-1] / l_pre)) / closed_form
            ).mean(1)
            rows.append(
                verdict_row(CLOSED_FORM, where, mean_interval(ratios, texts), 1, alpha=alpha)
            )
    return pd.DataFrame(rows)


MIN_DRAWS = 100
"""Effective draws that a verdict on a mean needs."""


def _effective_draws(shares: Float[np.ndarray, "*draw"]) -> float:
    """The effective number of draws of a mean, (sum a)^2 / sum a^2: few if rare draws make up most
    of the mean."""
    return float(shares.sum() ** 2 / (shares**2).sum())


def _inconclusive_unless(enough_draws: bool, row: dict[str, object]) -> dict[str, object]:
    """The row, with the verdict inconclusive unless the mean has enough effective draws.

    An interval from draws says nothing about rarer ones.
    """
    return row if enough_draws else row | {"verdict": "inconclusive"}
