"""analyses/tools/recompute.py: headlines are what their labels say, and a changed label is seen."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("fade", "causes", "labels", "order")


@pytest.fixture
def recompute(monkeypatch):
    """The script as a module of its own, with nothing read."""
    spec = importlib.util.spec_from_file_location(
        "recompute", ROOT / "analyses" / "tools/recompute.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "recompute", module)
    spec.loader.exec_module(module)
    module.GROUPS = tuple(getattr(module, name) for name in QUICK)
    return module


def test_headlines_are_those_of_their_labels(recompute, capsys):
    assert recompute.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 differ"
    assert all(line.startswith("equal ") for line in lines[:-1])
    assert sum("first run" in line for line in lines) > 20


@pytest.mark.slow
def test_headlines_at_equal_perplexity_are_those_of_their_labels(recompute, capsys):
    recompute.GROUPS = (recompute.steering,)
    assert recompute.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("change", ["a label", "two arms", "a row"])
def test_a_change_is_seen(recompute, tmp_path, capsys, change):
    """Of a label, of the names of two arms, or of a number of the table."""
    figures = tmp_path / "figures"
    shutil.copytree(recompute.FIGURES / "labels", figures / "labels")
    for folder in ("undecided", "bases"):
        (figures / folder).symlink_to(recompute.FIGURES / folder)
    recompute.FIGURES, recompute.GROUPS = figures, (recompute.labels,)
    texts, table = figures / "labels" / "texts.parquet", figures / "labels" / "labels.csv"
    labels, rows = pd.read_parquet(texts), pd.read_csv(table)
    if change == "a label":
        labels.loc[0, "adapter"] += 50.0
    elif change == "two arms":
        names = {"no bias": "all heads 0.5", "all heads 0.5": "no bias"}
        both = labels["part"] == "bases"
        labels.loc[both, "arm"] = labels.loc[both, "arm"].replace(names)
    else:
        rows.loc[0, "mean"] += 1.0
    labels.to_parquet(texts)
    rows.to_csv(table, index=False)
    assert recompute.main() == 1
    assert "DIFFERS" in capsys.readouterr().out
