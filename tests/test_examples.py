"""The examples in the docstrings of the everyday names, run as a reader would run them."""

import doctest
import functools
import inspect

import pytest

import lapa2_interp
from lapa2_interp import circuits
from lapa2_interp.attention import Recorder
from lapa2_interp.circuits import Attribution, HeadLogitAttribution, Patching, UnitTable

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


# What many examples begin with.
LOAD, KNOCK_OUT = map(functools.cache, (lapa2_interp.load_model, circuits.knock_out))
NAMES = {name: getattr(lapa2_interp, name) for name in lapa2_interp.__all__}
NAMES |= {
    documented.__qualname__: documented
    for documented in (
        Recorder,
        UnitTable,
        UnitTable.frame,
        UnitTable.interval,
        UnitTable.best,
        UnitTable.map,
        UnitTable.plot,
        Patching.table,
        Attribution.table,
        HeadLogitAttribution.table,
    )
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name == "steer")) for name in NAMES],
)
def test_the_example_of_a_public_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setattr(lapa2_interp, "load_model", LOAD)
    monkeypatch.setattr(circuits, "knock_out", KNOCK_OUT)
    text = inspect.getdoc(NAMES[name])
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert test.examples, f"{name} has no example"
    failed = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=failed.append)
    assert not failed, "".join(failed)
