"""Synthetic attention logits that fulfil the paper's assumptions, or violate them one at a time.

A family is a distribution of the logits of one query over l keys: the first l_pre are the prefix.
Only two numbers matter at each length, the sums of exponentiated logits of the prefix and of the
other keys. Every augmentation follows from those (`theory`: the exact law), so that all alphas
share their draws.

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
"correlated" are identically distributed, and E[A] is 7 % above l_pre / l at l = 64, because keys at
the end have fewer neighbours to share peaks with.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from lapa2_interp._util.errors import TraceError
from lapa2_interp._util.progress import progress_bar

if TYPE_CHECKING:
    import xarray as xr

Rng = np.random.Generator
SINK = 8.0
RECENCY = 0.5
LAG = 0.99
PREFIXES = 256
"""Prefixes drawn for every text, so that averages are more precise than the number of texts
allows."""


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


def geometric_lengths(
    longest: int, l_pre: int, shortest: int = 64, n: int = 24
) -> Int[np.ndarray, " length"]:
    """Distinct lengths in equal ratios.

    Raises:
        TraceError: Fewer than 3 remain.
    """
    first = max(shortest, 2 * l_pre)
    lengths = np.unique(np.geomspace(first, max(longest, 1), n).round().astype(np.int64))
    if longest < first or len(lengths) < 3:
        raise TraceError(
            f"lengths from {first} to {longest} are too few to fit a slope (3 are needed); give a"
            " larger longest length"
        )
    return lengths


def log_sums(
    family: LogitFamily, rng: Rng, lengths: Int[np.ndarray, " length"], l_pre: int
) -> tuple[Float[np.ndarray, "prefix length"], Float[np.ndarray, " length"]]:
    """log of the summed exponentiated logits of the keys of `PREFIXES` prefixes, and of all other
    keys, for one text."""
    # Draw the logits of the prefixes and of the other keys.
    n_others = int(lengths[-1]) - l_pre
    if family.draw is _autoregressive:
        logits = family.draw(rng, n_others)
        # The process read backwards is the same process, so prefixes grow back from the first key
        # beside them.
        before = np.empty((PREFIXES, l_pre))
        last = np.full(PREFIXES, logits[0])
        for i in range(l_pre):
            last = LAG * last + np.sqrt(1 - LAG**2) * rng.standard_normal(PREFIXES)
            before[:, l_pre - 1 - i] = last
    else:
        logits = family.draw(rng, n_others)
        before = family.draw(rng, PREFIXES * l_pre).reshape(PREFIXES, l_pre)
    if family.sink is not None:
        logits[0] = family.sink
    # Sum them up to each length.
    weights = np.exp(logits)
    prefix = np.exp(before)
    if family.recency:
        recede = np.arange(1.0, lengths[-1] + 1) ** -family.recency
        others = np.array([weights[: l - l_pre] @ recede[: l - l_pre][::-1] for l in lengths])
        far = (
            recede[lengths[:, None] - 1 - np.arange(l_pre)]
            if not family.anchored
            else np.ones((len(lengths), l_pre))
        )
        log_prefix = np.log(prefix @ far.T)
    else:
        others = np.cumsum(weights)[lengths - l_pre - 1]
        log_prefix = np.repeat(np.log(prefix.sum(1))[:, None], len(lengths), axis=1)
    return log_prefix + family.growth * np.log(lengths), np.log(others)


def draw_log_odds(
    lengths: Int[np.ndarray, " length"],
    l_pre: int,
    families: Mapping[str, LogitFamily] = LOGIT_FAMILIES,
    texts: int = 20,
    seed: int = 0,
) -> dict[str, Float[np.ndarray, "text prefix length"]]:
    """log(A / (1 - A)) without augmentation, by family; everything else is computed from these.

    Raises:
        TraceError: No text, or a prefix of length zero or as long as the shortest length.
    """
    if texts < 1:
        raise TraceError(f"synthetic logits need at least one text, found {texts}")
    if not 1 <= l_pre < lengths[0]:
        raise TraceError(
            f"the prefix must have 1 to {int(lengths[0]) - 1} keys (one fewer than the shortest"
            f" length), found {l_pre}"
        )
    odds = {}
    with progress_bar(len(families) * texts, "synthetic logits", "text") as bar:
        for number, (name, family) in enumerate(families.items()):
            drawn = []
            for text in range(texts):
                prefix, others = log_sums(
                    family, np.random.default_rng([seed, number, text]), lengths, l_pre
                )
                drawn.append(prefix - others)
                bar.update()
            odds[name] = np.stack(drawn)
    return odds


def log_odds_dataset(
    drawn: Mapping[str, Float[np.ndarray, "text prefix length"]],
    lengths: Int[np.ndarray, " length"],
) -> xr.Dataset:
    """The drawn log_odds by family, text, prefix and l, as a dataset to store."""
    import xarray as xr

    logits = np.stack(list(drawn.values())).astype(np.float32)
    return xr.Dataset(
        {"log_odds": (("family", "text", "prefix", "l"), logits)},
        {"family": list(drawn), "l": lengths},
    )
