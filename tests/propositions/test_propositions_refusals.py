"""What the room refuses: a call, and what its one line says."""

from functools import cache

import numpy as np
import pytest
from test_propositions import made_trace

from lapa2_interp import Augmentation
from lapa2_interp.bias.synthetic import draw_means, geometric_lengths
from lapa2_interp.errors import TraceError
from lapa2_interp.propositions.traces import prediction_table, stack_alphas


def lengths():
    return geometric_lengths(200, 3)


@cache
def trace():
    return made_trace(0.0, steps=10)


def with_prefix(change, rows=slice(None)):
    """A trace of which some texts have prefixes of another length."""
    counts = trace()["l_pre"].copy()
    counts[rows] = change(counts[rows])
    return trace().assign_coords(l_pre=counts)


def ended_early():
    early = trace().copy(deep=True)
    early["prefix"][0, 0, 2:] = np.nan
    return early


OTHERS = "different samples, steps or prefixes"
SHORT = "at least 3 steps, found 2 that all texts have"
TRACES = {
    "no baseline": (lambda: {0.5: trace()}, "the baseline is alpha 0, found only 0.5"),
    "no prefix": (lambda: {0.0: with_prefix(lambda n: n * 0)}, "no prefix"),
    "some prefixes": (lambda: {0.0: with_prefix(lambda n: 0, (0, 0))}, "some texts have no prefix"),
    "two steps": (lambda: {0.0: trace().isel(step=slice(0, 2))}, SHORT),
    "a text of two steps": (lambda: {0.0: ended_early()}, SHORT),
    "other steps": (lambda: {0.0: trace(), 0.5: trace().isel(step=slice(0, 5))}, OTHERS),
    "other prefixes": (lambda: {0.0: trace(), 0.5: with_prefix(lambda n: n + 1)}, OTHERS),
    "pooled heads": (lambda: {0.0: trace().isel(head=0, layer=0)}, "pooled over heads"),
}  # fmt: skip


def predicted():
    traces = stack_alphas({0.0: trace(), 1.0: made_trace(0.0, alpha=1.0, steps=10)})
    prediction_table(traces, {1.0: Augmentation(alpha=1.0, span="bos")})


CALLS = {
    **{
        f"a study of {name}": (lambda make=make: stack_alphas(make()), message)
        for name, (make, message) in TRACES.items()
    },
    "a prediction for another span": (predicted, "not of span 'bos'"),
    "falling lengths": (lambda: geometric_lengths(10, 3), "lengths from 64 to 10 are too few to fit a slope"),
    "a prefix of no keys": (lambda: draw_means(lengths(), 0, (0.0,)), "the prefix must have 1 to 63 keys .* found 0"),
    "no synthetic rows": (lambda: draw_means(lengths(), 3, (0.0,), rows=0), "at least one row, found 0"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_what_the_room_refuses(call, message):
    with pytest.raises(TraceError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
