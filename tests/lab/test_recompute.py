"""analyses/tools/recompute.py: tables are what their labels say, and a change of a label or of a
table is seen."""

import importlib.util
import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("heads", "detoxification", "fade", "causes", "labels", "order", "copies")
SLOW = ("steering", "rivals", "instructions", "repeated", "chats")


@pytest.fixture
def recompute(monkeypatch):
    """The script as a module of its own, with nothing read."""
    spec = importlib.util.spec_from_file_location(
        "recompute", ROOT / "analyses" / "tools/recompute.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "recompute", module)
    spec.loader.exec_module(module)
    return module


def copy_of(recompute, root, file):
    """Make a copy of a table, beside links to all others, the one that is read; its path."""
    there, here = recompute.FIGURES, root / "figures"
    for part in Path(file).parts:
        here.mkdir()
        for path in there.iterdir():
            if path.name != part:
                (here / path.name).symlink_to(path)
        there, here = there / part, here / part
    shutil.copy(there, here)
    recompute.FIGURES = root / "figures"
    return here


def change(path, column, to=None, by=0.0, **where):
    """Change a number of one row of a table."""
    table = pd.read_csv(path)
    fits = np.all([table[name.replace("_", " ")] == value for name, value in where.items()], axis=0)
    (row,) = np.flatnonzero(fits)
    before = table.loc[row, column]
    table.loc[row, column] = before + by if to is None else to
    table.to_csv(path, index=False)
    return before


def run_of(recompute, group, file, **where):
    """The exit code of what is computed of one table."""
    items = [
        item
        for item in recompute.GROUPS[group]()
        if item.file == file and all(item.where.get(name) == of for name, of in where.items())
    ]
    assert items
    recompute.GROUPS = {"one": lambda: items}
    return recompute.main("one")


def test_tables_are_those_of_their_labels(recompute, capsys):
    assert recompute.main(*QUICK) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 differ"
    assert all(line.startswith("equal ") for line in lines[:-1])
    assert sum("first run" in line for line in lines) > 20


@pytest.mark.slow
@pytest.mark.parametrize("group", SLOW)
def test_large_tables_are_those_of_their_labels(recompute, capsys, group):
    assert recompute.main(group) == 0, capsys.readouterr().out


def test_every_group_is_tested(recompute):
    assert set(recompute.GROUPS) == {*QUICK, *SLOW}


@pytest.mark.parametrize("what", ["a label", "two arms"])
def test_a_change_of_labels_is_seen(recompute, tmp_path, capsys, what):
    """Of one, or of the names of two arms."""
    path = copy_of(recompute, tmp_path, "labels/texts.parquet")
    labels = pd.read_parquet(path)
    if what == "a label":
        labels.loc[0, "adapter"] += 50.0
    else:
        names = {"no bias": "all heads 0.5", "all heads 0.5": "no bias"}
        both = labels["part"] == "bases"
        labels.loc[both, "arm"] = labels.loc[both, "arm"].replace(names)
    labels.to_parquet(path)
    assert recompute.main("labels") == 1
    assert "DIFFERS" in capsys.readouterr().out


# --- tables changed, as if a page were to say so


def test_two_points_more_of_chosen_heads_are_seen(recompute, tmp_path, capsys):
    """The difference of the chosen heads from all heads at equal perplexity."""
    file = "steering/steering.equal.csv"
    where = {"task": "sentiment", "words": "all words", "attribute": "all"}
    row = where | {"family": "head-selective", "metric": "acc", "ratio": 1.25}
    change(copy_of(recompute, tmp_path, file), "difference", by=2, **row)
    assert run_of(recompute, "steering", file, **where) == 1
    (line, last) = capsys.readouterr().out.splitlines()
    assert "1.25, head-selective, acc, difference: " in line
    assert last == "1 differ"


@pytest.mark.parametrize(
    ("file", "columns"),
    [
        ("undecided/detox.claims.csv", ["here"]),
        ("undecided/detox.csv", ["difference"]),
        ("both", ["here", "difference"]),
    ],
)
def test_two_points_less_of_negprompt_are_seen(recompute, tmp_path, capsys, file, columns):
    """No labels of it are committed: the claim and the difference of the arms are one number, and
    the difference is that of two means."""
    claims, arms = "undecided/detox.claims.csv", "undecided/detox.csv"
    path = copy_of(recompute, tmp_path, claims)
    (path.parent / "detox.csv").unlink()
    shutil.copy(ROOT / "figures" / arms, path.parent)
    if "here" in columns:
        assert change(path, "here", by=-2, method="negprompt", metric="tox") == 5.86671
    if "difference" in columns:
        row = {"method": "negprompt", "metric": "tox", "length": 128, "arm": "alpha 1 paper"}
        assert change(path.parent / "detox.csv", "difference", by=-2, **row) == 5.86671
    assert recompute.main("copies") == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = [line.split(":")[0] for line in lines if line.startswith("DIFFERS")]
    expected = {f"DIFFERS {claims}"} if file != "both" else set()
    assert set(wrong) == expected | ({f"DIFFERS {arms}, tox"} if "difference" in columns else set())


def test_four_points_more_of_chosen_heads_are_seen(recompute, tmp_path, capsys):
    file = "heads/differences.csv"
    row = {"metric": "acc hidden", "arm": "24 heads", "against": "all heads"}
    before = change(copy_of(recompute, tmp_path, file), "difference", to=24.333, **row)
    assert before == 20.333
    assert run_of(recompute, "heads", file) == 1
    assert "difference: 20.3333; the table has 24.333" in capsys.readouterr().out


def test_a_tenth_more_of_personas_is_seen(recompute, tmp_path, capsys):
    file = "instructions/arms.csv"
    path = copy_of(recompute, tmp_path, file)
    row = {"messages": "personas", "metric": "turn 8", "family": "head-selective", "strength": 1}
    assert change(path, "difference", to=0.36894, **row) == 0.26894
    assert run_of(recompute, "instructions", file) == 1
    (line, last) = capsys.readouterr().out.splitlines()
    assert line.endswith("difference: 0.268939; the table has 0.36894")
    assert last == "1 differ"


@pytest.mark.parametrize("folder", ["labels", "labels/attention", "labels/prefix", "labels/soft"])
def test_one_point_more_of_a_label_table_is_seen(recompute, tmp_path, capsys, folder):
    file = f"{folder}/labels.csv"
    path = copy_of(recompute, tmp_path, file)
    rows = pd.read_csv(path)
    rows["mean"] += np.arange(len(rows)) == len(rows) - 1
    rows.to_csv(path, index=False)
    assert run_of(recompute, "labels" if folder == "labels" else "repeated", file) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 differ"


@pytest.mark.parametrize(
    ("file", "group", "column"),
    [
        ("heads/soft/differences.csv", "heads", "p_holm"),
        ("rivals/again/equal.csv", "rivals", "p_holm"),
        ("rivals/soft/arms.csv", "rivals", "cost"),
        ("rivals/settings.csv", "rivals", "low"),
        ("fading/account/account.csv", "causes", "share"),
        ("labels/fading/control.csv", "fade", "control"),
        ("instructions/effect.csv", "instructions", "high"),
        ("instructions/effect.changes.csv", "instructions", "low"),
        ("instructions/held-out/equal.csv", "instructions", "value"),
        ("instructions/table.csv", "instructions", "cost"),
        ("paper/quick/tables/verdicts.csv", "copies", "here"),
    ],
)
def test_the_last_digits_count(recompute, tmp_path, capsys, file, group, column):
    """A change of a part in a thousand of any column."""
    path = copy_of(recompute, tmp_path, file)
    rows = pd.read_csv(path)
    known = rows.index[rows[column].notna() & (rows[column] != 0)]
    rows.loc[known[-1], column] *= 1.001
    rows.to_csv(path, index=False)
    assert run_of(recompute, group, file) == 1
    assert f", {column}: " in capsys.readouterr().out


def test_a_row_more_or_less_is_seen(recompute, tmp_path, capsys):
    file = "heads/soft/arms.csv"
    path = copy_of(recompute, tmp_path, file)
    rows = pd.read_csv(path)
    more = rows.iloc[[0]].assign(arm="others")
    pd.concat([rows.iloc[1:], more]).to_csv(path, index=False)
    assert run_of(recompute, "heads", file) == 1
    out = capsys.readouterr().out
    assert "is a row of the table alone" in out
    assert "is a row of the labels alone" in out


# --- by hand


def test_holm_by_hand(recompute):
    """Of four tests the smallest counts four times; the third is no less than the second; one that
    could not be made is one of them."""
    corrected = recompute.holm([0.01, np.nan, 0.02, 0.021])
    np.testing.assert_allclose(corrected, [0.04, np.nan, 0.06, 0.06])


def test_last_digits(recompute):
    """One unit of the last digit is allowed, more is not."""
    close = recompute.close
    there = np.array([20.333, 0.00024994, 0.0, np.nan])
    assert close(np.array([20.3339, 0.00024995, 0.0, np.nan]), there, 5).all()
    assert not close(np.array([20.3341, 0.00024996, 1e-6, 1.0]), there, 5).any()


# --- what is not computed


def test_what_cannot_be_computed_is_said(recompute, capsys):
    every = {
        path.relative_to(ROOT / "figures").as_posix() for path in (ROOT / "figures").rglob("*.csv")
    }
    for pattern in (*recompute.ARE_LABELS, *recompute.UNREAD):
        assert any(fnmatch(file, pattern) for file in every), pattern
    said = {
        re.split(r"[:\s]+", line.removeprefix("in part").removeprefix("not read").strip())[0]
        for line in recompute.not_computed()
        if not line.startswith("cannot")
    }
    cannot = {
        line.split()[1].rstrip(":")
        for line in recompute.not_computed()
        if line.startswith("cannot")
    }
    assert said | cannot <= every
    computed = {"heads/differences.csv", "rivals/equal.csv", "instructions/arms.csv",
                "steering/steering.equal.csv", "labels/labels.csv", "chat/chat.csv"}  # fmt: skip
    assert not computed & (said | cannot)
    assert {"bases/bases.csv", "undecided/detox.claims.csv", "speed/cpu.csv"} <= cannot
    assert "lex_and_accuracy/order.csv" in said
    labels = {file for file in every for pattern in recompute.ARE_LABELS if fnmatch(file, pattern)}
    assert not labels & (said | cannot)
    recompute.GROUPS = {"fade": recompute.fade}
    assert recompute.main() == 0
    *_, differ, last = capsys.readouterr().out.splitlines()
    assert differ == "0 differ"
    assert re.match(r"\d+ tables cannot be computed", last)


def test_an_unknown_group_is_refused(recompute, capsys):
    assert recompute.main("head") == 2
    assert "no group 'head'; the groups are steering, heads" in capsys.readouterr().err
