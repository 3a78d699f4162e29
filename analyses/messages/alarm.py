"""Can one see beforehand that an answer will break its message? Statistics of the alarm.

Pooled over messages and turns, a measure that only knows which messages are hard, or how late it
is, predicts breaks well. So answers are compared *within message and turn*: two answers to one
message at one turn, to users who both ask against it or both do not, of which one follows and the
other breaks. `within_auroc` is the share of such
pairs in which the broken answer has the larger measure. 1/2 is chance.

`increment` asks what a measure adds to the length of the chat and to whether its last answer broke.
Both predictions are logistic, and each message is predicted by a fit on the others. Features are
taken minus their mean within message and turn, so that what differs only between messages and turns
(the turn, how often the message was broken before) adds nothing.

Intervals resample messages. Only messages with at least `FEWEST` breaks and `FEWEST` keeps count.
With fewer than `MESSAGES` such messages nothing is decided.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float

FEWEST, MESSAGES = 5, 15
WITHIN = ["message", "turn", "against"]
"""Answers that are alike in these are compared."""
KNOWN = ("length", "last broke")
"""What is known without a measure."""
RIDGE = 1.0
"""Penalty of the squared weights, whose features have variance 1."""
RESAMPLES = 4000


def with_last(answers: pd.DataFrame) -> pd.DataFrame:
    """The answers with `last broke`: if the answer before it in its chat broke; 0 at the first.

    Args:
        answers: A row an answer: message, chat, turn (from 1), against, broke (0 or 1).
    """
    rows = answers.sort_values(["message", "chat", "turn"])
    last = rows.groupby(["message", "chat"])["broke"].shift(fill_value=0)
    return answers.assign(**{"last broke": last})


def counted_messages(answers: pd.DataFrame) -> list[str]:
    """The messages with enough breaks and keeps."""
    sums = answers.groupby("message", sort=False)["broke"].agg(["sum", "size"])
    enough = (sums["sum"] >= FEWEST) & (sums["size"] - sums["sum"] >= FEWEST)
    return list(sums.index[enough])


def pairs_won(
    answers: pd.DataFrame, measures: Sequence[str]
) -> dict[str, Float[np.ndarray, "measure+1"]]:
    """By message, for each measure the pairs in which the broken answer has the larger one (ties
    count half), and last the number of pairs."""
    won = {}
    for message, of_message in answers.groupby("message", sort=False):
        sums = np.zeros(len(measures) + 1)
        for _, own in of_message.groupby(WITHIN[1:]):
            broke = own["broke"].to_numpy(bool)
            values = own[[*measures]].to_numpy(float)
            apart = values[broke][:, None] - values[~broke][None]
            sums[:-1] += ((apart > 0) + 0.5 * (apart == 0)).sum(axis=(0, 1))
            sums[-1] += apart.shape[0] * apart.shape[1]
        won[str(message)] = sums
    return won


def within_auroc(
    answers: pd.DataFrame, measures: Sequence[str], percent: float = 95, seed: int = 1
) -> pd.DataFrame:
    """A row a measure: AUROC within message and turn with its interval, and the number of messages;
    NaN where too few messages count."""
    counted = counted_messages(answers)
    drawn = _resampled(answers[answers["message"].isin(counted)], measures, seed)
    low, high = bounds_of(drawn, percent)
    decided = len(counted) >= MESSAGES
    return pd.DataFrame(
        {
            "measure": list(measures),
            "auroc": np.where(decided, drawn[0], np.nan),
            "low": np.where(decided, low, np.nan),
            "high": np.where(decided, high, np.nan),
            "messages": len(counted),
        }
    )


def increment(answers: pd.DataFrame, measure: str, seed: int = 1) -> dict[str, float]:
    """AUROC within message and turn of the prediction with a measure minus that of the prediction
    without it, with its interval."""
    rows = with_last(answers)
    features = [*KNOWN, measure]
    own_means = rows.groupby(WITHIN)[features].transform("mean")
    rows[features] = rows[features] - own_means
    rows["without"] = predicted(rows, KNOWN)
    rows["with"] = predicted(rows, (*KNOWN, measure))
    counted = counted_messages(rows)
    drawn = _resampled(rows[rows["message"].isin(counted)], ("with", "without"), seed)
    change = drawn[:, 0] - drawn[:, 1]
    low, high = bounds_of(change[:, None])
    decided = len(counted) >= MESSAGES
    values = {"auroc": drawn[0, 0], "increment": change[0], "low": low[0], "high": high[0]}
    return {name: float(value) if decided else np.nan for name, value in values.items()}


def _resampled(
    answers: pd.DataFrame, measures: Sequence[str], seed: int
) -> Float[np.ndarray, "resample measure"]:
    """AUROC of the messages themselves, then of resampled ones."""
    won = np.array(list(pairs_won(answers, measures).values())).reshape(-1, len(measures) + 1)
    n = len(won)
    if not n:
        return np.full((1, len(measures)), np.nan)
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    weights = np.concatenate([np.ones((1, n)), drawn])
    sums = weights @ won
    with np.errstate(invalid="ignore"):
        return sums[:, :-1] / sums[:, -1:]


def bounds_of(
    drawn: Float[np.ndarray, "resample measure"], percent: float = 95
) -> tuple[Float[np.ndarray, " measure"], Float[np.ndarray, " measure"]]:
    """The interval of resampled values, of which the first row is no resample."""
    if len(drawn) < 2:
        return np.full(drawn.shape[1], np.nan), np.full(drawn.shape[1], np.nan)
    low, high = np.nanpercentile(drawn[1:], [50 - percent / 2, 50 + percent / 2], axis=0)
    return low, high


def predicted(answers: pd.DataFrame, features: Sequence[str]) -> Float[np.ndarray, " answer"]:
    """Log-odds of a break, of each message by a fit on the other messages."""
    values = answers[[*features]].to_numpy(float)
    spread = values.std(axis=0)
    values = (values - values.mean(axis=0)) / np.where(spread > 1e-9, spread, np.inf)
    values = np.concatenate([np.ones((len(values), 1)), values], axis=1)
    broke, messages = answers["broke"].to_numpy(float), answers["message"].to_numpy()
    odds = np.zeros(len(values))
    for message in dict.fromkeys(messages):
        own = messages == message
        odds[own] = values[own] @ logistic(values[~own], broke[~own])
    return odds.round(9)  # rounding is no difference between two answers


def logistic(
    features: Float[np.ndarray, "row feature"], labels: Float[np.ndarray, " row"]
) -> Float[np.ndarray, " feature"]:
    """Weights of a logistic regression with a ridge on all but the first, by Newton's steps."""
    penalty = RIDGE * np.eye(features.shape[1])
    penalty[0, 0] = 1e-6
    weights = np.zeros(features.shape[1])
    for _ in range(50):
        shares = 1 / (1 + np.exp(-features @ weights))
        slope = features.T @ (shares - labels) + penalty @ weights
        curve = (features * (shares * (1 - shares))[:, None]).T @ features + penalty
        step = np.linalg.solve(curve, slope)
        weights -= step
        if np.abs(step).max() < 1e-9:
            break
    return weights


def at_a_rate(answers: pd.DataFrame, measure: str, rate: float) -> dict[str, float]:
    """An alarm that rings at the largest `rate` of the measure: the share of its alarms at which
    the answer breaks (precision), the share of breaks that it rings at (recall), and the base rate.
    """
    broke = answers["broke"].to_numpy(bool)
    n = max(1, round(rate * len(answers)))
    rings = np.zeros(len(answers), bool)
    rings[np.argsort(-answers[measure].to_numpy(float), kind="stable")[:n]] = True
    return {
        "base rate": float(broke.mean()),
        "precision": float(broke[rings].mean()),
        "recall": float(rings[broke].mean()) if broke.any() else np.nan,
    }
