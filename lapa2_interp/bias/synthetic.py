"""Synthetic attention logits that fulfil the paper's assumptions, or violate them one at a time.

A family is a distribution of the logits of one query over l keys: the first l_pre are the prefix.
Only two numbers matter at each length, the sums of exponentiated logits of the prefix and of the
other keys. Every augmentation follows from those (`theory`: the exact law), so that all alphas
share their draws.

A family is drawn as a long row of logits, which contains many texts of every length: a text may
begin at any key of the row. Means over the texts of a row are kept, and nothing else. Texts of one
row share keys, so errors come from independent rows.

=================  ============  =============  ==================================================================
family             exchangeable  bounded ratio  logits
=================  ============  =============  ==================================================================
equal              yes           yes            all 0: the uniform logits of Proposition 2
normal             yes           yes            N(0, 1), independent
wide normal        yes           yes            N(0, 3^2): a few keys hold most of the attention
heavy tail         yes           yes            exponential: e^z is Pareto of index 1.5, its variance infinite
infinite mean      yes           yes            e^z is Pareto of index 0.8: its average grows with l
correlated         no            yes            N(0, 1), AR(1) along positions, lag-one correlation 0.99
sink               no            yes            normal, and one key beside the prefix has logit 8
recency            no            yes            normal - log(1 + d) / 2 at distance d from the query, prefix and all
anchored prefix    no            no             the same, but the prefix does not recede
growing prefix     no            no             normal, and the prefix's logits grow as log(l) / 2
=================  ============  =============  ==================================================================

Proposition 1 assumes identically distributed logits and needs exchangeable ones: the keys of
"correlated" are identically distributed, and E[A] is 6 % above l_pre / l at l = 64, because keys at
the end have fewer neighbours to share peaks with.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from lapa2_interp.errors import TraceError
from lapa2_interp.progress import progress_bar

if TYPE_CHECKING:
    import xarray as xr

Rng = np.random.Generator
SINK = 8.0
RECENCY = 0.5
LAG = 0.99
MIN_KEYS = 2**16
"""Keys of a row, at least: 1,024 texts of 64 keys without a common key."""
MIN_TEXTS = 2**13


@dataclass(frozen=True)
class LogitFamily:
    """A distribution of logits.

    Attributes:
        exchangeable: True if the keys are exchangeable, which E[A] = l_pre / l needs.
        bounded: True if e_P / e_R stays bounded as l grows, which its generalisation needs.
        draw: Logits of n keys, the first beside the prefix.
        sink: Logit of the first key beside the prefix, if not drawn.
        recency: c of -c * log(1 + d) for keys other than the prefix; of the prefix too unless
            `anchored`.
        growth: c of c * log(l) on the prefix.
    """

    exchangeable: bool
    bounded: bool
    draw: Callable[[Rng, int], Float[np.ndarray, " key"]]
    sink: float | None = None
    recency: float = 0.0
    anchored: bool = False
    growth: float = 0.0

    @property
    def keeps(self) -> str:
        """The assumptions that it fulfils, in words."""
        return ("exchangeable" if self.exchangeable else "not exchangeable") + (
            "" if self.bounded else ", ratio unbounded"
        )


def _normal(rng: Rng, n: int) -> Float[np.ndarray, " key"]:
    return rng.standard_normal(n)


def _autoregressive(rng: Rng, n: int) -> Float[np.ndarray, " key"]:
    from scipy.signal import lfilter

    shocks = rng.standard_normal(n) * np.sqrt(1 - LAG**2)
    shocks[0] /= np.sqrt(1 - LAG**2)
    return np.asarray(lfilter([1.0], [1.0, -LAG], shocks))


LOGIT_FAMILIES: Mapping[str, LogitFamily] = {
    "equal": LogitFamily(True, True, lambda rng, n: np.zeros(n)),
    "normal": LogitFamily(True, True, _normal),
    "wide normal": LogitFamily(True, True, lambda rng, n: 3 * rng.standard_normal(n)),
    "heavy tail": LogitFamily(True, True, lambda rng, n: rng.exponential(1 / 1.5, n)),
    "infinite mean": LogitFamily(True, True, lambda rng, n: rng.exponential(1 / 0.8, n)),
    "correlated": LogitFamily(False, True, _autoregressive),
    "sink": LogitFamily(False, True, _normal, sink=SINK),
    "recency": LogitFamily(False, True, _normal, recency=RECENCY),
    "anchored prefix": LogitFamily(False, False, _normal, recency=RECENCY, anchored=True),
    "growing prefix": LogitFamily(False, False, _normal, growth=0.5),
}


def geometric_lengths(longest: int, l_pre: int) -> Int[np.ndarray, " length"]:
    """At most 24 distinct lengths in equal ratios, from 64 on, or from twice the prefix.

    Raises:
        TraceError: Fewer than 3 remain.
    """
    first = max(64, 2 * l_pre)
    lengths = np.unique(np.geomspace(first, max(longest, 1), 24).round().astype(np.int64))
    if longest < first or len(lengths) < 3:
        raise TraceError(
            f"lengths from {first} to {longest} are too few to fit a slope (3 are needed); give a"
            " larger longest length"
        )
    return lengths


def text_sums(
    family: LogitFamily,
    weights: Float[np.ndarray, " key"],
    until: Float[np.ndarray, " key"],
    l: int,
    l_pre: int,
    step: int = 1,
) -> tuple[Float[np.ndarray, " text"], Float[np.ndarray, " text"]]:
    """Summed exponentiated logits of the prefix and of the other keys, for texts of l keys of which
    one begins at every `step`th key of a row.

    Where weights depend on the distance from the query, the prefix is that of the text, and the
    other keys are those of the next of the stretches of l keys that the row consists of. They are
    as independent of the prefix as the text's own, and there are fewer sums to compute.

    Args:
        weights: Exponentiated logits of a row of at least 2 * l keys, drawn from the family.
        until: Their cumulative sums.
    """

    def at(row: Float[np.ndarray, " key"], key: int) -> Float[np.ndarray, " text"]:
        """What stands in the row at a key of every text."""
        return row[key : key + len(weights) - l : step]

    if family.recency:
        recede = np.arange(l, 0.0, -1.0) ** -family.recency
        near = np.ones(l_pre) if family.anchored else recede[:l_pre]
        prefix = sum(near[i] * at(weights, i) for i in range(l_pre))
        n = len(weights) // l
        stretches = weights[: n * l].reshape(n, l)[:, l_pre:] @ recede[l_pre:]
        others = stretches[(np.arange(0, len(weights) - l, step) // l + 1) % n]
    else:
        prefix = sum(at(weights, i) for i in range(l_pre))
        others = at(until, l - 1) - at(until, l_pre - 1)
    if family.sink is not None:
        others += np.exp(family.sink) - at(weights, l_pre)
    return np.asarray(prefix * float(l) ** family.growth), others


def draw_means(
    lengths: Int[np.ndarray, " length"],
    l_pre: int,
    alphas: Sequence[float],
    families: Mapping[str, LogitFamily] = LOGIT_FAMILIES,
    rows: int = 20,
    seed: int = 0,
) -> xr.Dataset:
    """Means over the texts of each row of logits.

    Of every length, a row gives as many texts as a text has keys, and 2^13 at least. So draws are
    seen that are as rare as one key of a text.

    Returns:
        share: Attention on the prefix by family, row, alpha and l. log_ratio: log(e_P / e_R) by
        family, row and l. texts: Their number by l, in all rows of a family. The attribute l_pre.

    Raises:
        TraceError: No row, or a prefix of length zero or as long as the shortest length.
    """
    import xarray as xr

    if rows < 1:
        raise TraceError(f"synthetic logits need at least one row, found {rows}")
    if not 1 <= l_pre < lengths[0]:
        raise TraceError(
            f"the prefix must have 1 to {int(lengths[0]) - 1} keys (one fewer than the shortest"
            f" length), found {l_pre}"
        )
    keys = max(2 * int(lengths[-1]), MIN_KEYS)
    steps = [max(l_pre, (keys - l) // max(l, MIN_TEXTS)) for l in map(int, lengths)]
    share = np.empty((len(families), rows, len(alphas), len(lengths)))
    log_ratio = np.empty((len(families), rows, len(lengths)))
    texts = np.zeros(len(lengths), int)
    with progress_bar(len(families) * rows, "synthetic logits", "row") as bar:
        for number, family in enumerate(families.values()):
            for row in range(rows):
                rng = np.random.default_rng([seed, number, row])
                weights = np.exp(family.draw(rng, keys))
                until = np.cumsum(weights)
                for i, (l, step) in enumerate(zip(map(int, lengths), steps, strict=True)):
                    prefix, others = text_sums(family, weights, until, l, l_pre, step)
                    odds, r = prefix / others, l / l_pre
                    log_ratio[number, row, i] = np.log(odds).mean() + np.log(r - 1)
                    for j, alpha in enumerate(alphas):
                        biased = odds * r**alpha
                        share[number, row, j, i] = (biased / (1 + biased)).mean()
                    texts[i] = rows * len(odds)
                bar.update()
    return xr.Dataset(
        {
            "share": (("family", "row", "alpha", "l"), share),
            "log_ratio": (("family", "row", "l"), log_ratio),
            "texts": ("l", texts),
        },
        {"family": list(families), "alpha": list(alphas), "l": lengths},
        {"l_pre": l_pre},
    )
