"""The examples in the docstrings of the everyday names, run as a reader would run them."""

import doctest
import inspect

import pytest

import lapa2_interp

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", lapa2_interp.__all__)
def test_the_example_of_a_public_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    text = inspect.getdoc(getattr(lapa2_interp, name))
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert test.examples, f"{name} has no example"
    failed = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=failed.append)
    assert not failed, "".join(failed)
