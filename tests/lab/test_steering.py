"""The item steering: its grid, its prompts, and its tables and figure of a small run."""

import json
import lzma
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import drawing_of, load, redraw, script

from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.recipes import (
    name_families,
    parse_recipes,
    recipe,
    strength,
)
from lapa2_interp.errors import RunError
from lapa2_interp.methods import load_task
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.run import load_run, write_run
from lapa2_interp.runs.store import remove_batches
from lapa2_interp.scoring.equal_perplexity import add_caveats, distinguishing_columns

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
MADE = runpy.run_path(str(ROOT / "analyses" / "tools/steering_prompts.py"))
BASES, bases_prompts, choose_prompts, read_neutral = (
    MADE[name] for name in ("BASES", "bases_prompts", "choose_prompts", "read_neutral")
)
FAMILIES = {"lapa2", "token-selective", "head-selective", "set-point"}
GRID = """
model = "tiny-gpt2"
dtype = "float32"
method = { name = "prefix", prefixes = "hard" }
length = 44
samples = 1
trace = "none"
prompts = "prompts.txt"
[[block]]
task = "topic"
attribute = "world"
augmentation = ["none", "lapa2:alpha=4", "set-point:tau=0.8"]
[[block]]
task = "sentiment"
augmentation = ["none", "lapa2:alpha=0.5", "lapa2:alpha=4", "set-point:tau=0.3", "set-point:tau=0.8"]
[[block]]
task = "sentiment"
ban_words = "own"
augmentation = ["none", "lapa2:alpha=4", "set-point:tau=0.8"]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a custom grid, on a tiny model."""
    folder = tmp_path_factory.mktemp("steering")
    # Ten words: shorter texts have no perplexity.
    prompts = [f"{i} a b c d e f g h i j" for i in range(9)]
    (folder / "prompts.txt").write_text("\n".join(prompts))
    (folder / "mine.toml").write_text(GRID.replace("prompts.txt", str(folder / "prompts.txt")))
    grid = load_grid(str(folder / "mine.toml"))
    made = make_cells(load("tiny-gpt2"), grid.cells, name="mine")
    write_run(folder / "run", made)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "excepthook", sys.excepthook)
        scorers = ["--scorers", "linear", "accuracy", "masked", "echo", "repetition"]
        tables = script(
            "steering/analyse",
            folder / "run",
            "--grids",
            "mine",
            *scorers,
            "perplexity=tiny-gpt2",
        )
    return folder / "run", tables


def table(run, name):
    return pd.read_csv(
        run / "tables" / f"steering{name}.csv", keep_default_na=False, na_values=[""]
    )


def test_the_grid_has_2300_texts_an_arm_and_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grid = load_grid(str(ROOT / "analyses/steering/steering.toml"), check=False)
    assert len(grid.needs) == 1
    texts = {}
    for cell in grid.cells:
        name = name_families([cell.active_augmentations])[cell.active_augmentations]
        key = (cell.task.name, cell.ban_words == "own", name, strength(cell.active_augmentations))
        texts[key] = texts.get(key, 0) + cell.n_texts
        assert (cell.length, cell.trace) == (64, "pooled")
    barred_sentiment = {n for key, n in texts.items() if key[:2] == ("sentiment", True)}
    assert barred_sentiment == {1150}
    assert {n for key, n in texts.items() if key[:2] != ("sentiment", True)} == {2300}
    for task in ("sentiment", "topic"):
        for banned, strengths in ((False, 3), (True, 2)):
            arms = [key for key in texts if key[:2] == (task, banned)]
            assert len(arms) == 1 + 4 * strengths
            assert {key[2] for key in arms} == FAMILIES | {"baseline"}
    small = load_grid(str(ROOT / "analyses/steering/steering.toml"), {"prompts": 4})
    assert {len(cell.prompts) for cell in small.cells} == {4}, "without the file"


def test_families_are_read_from_augmentations():
    texts = ["lapa2:alpha=0.25", "lapa2:alpha=3", "token-selective:tokens=1,alpha=2", "set-point:tau=0.4",
             "head-selective:heads=1.0,alpha=2", "head-selective:heads=2.0,alpha=1",
             "head-selective:heads=1.0", "instaboost:M=7", "pasta:alpha=0.2", "lapa2-released",
             "spotlight:tau=0.3"]  # fmt: skip
    arms = [parse_recipes(text) for text in texts]
    families = name_families([(), *arms])
    assert list(families.values()) == [
        "baseline", "lapa2", "lapa2", "token-selective", "set-point", "head-selective",
        "head-selective #2", "head-selective", "instaboost", "pasta", "lapa2-released", "spotlight",
    ]  # fmt: skip
    strengths = [strength(arm) for arm in arms[:5]]
    assert strengths == [0.25, 3, 2, 0.4, 2]
    assert strength(arms[7]) == pytest.approx(np.log(7))
    assert strength(()) == 0
    own = (Augmentation(alpha=0.3, law="sqrt", span="bos"),)
    assert name_families([own])[own] == Augmentation(alpha=1, law="sqrt", span="bos").label
    half = (Augmentation(alpha=0.5, law="target", tau=0.2, floor=True),)
    assert name_families([recipe("set-point"), half])[half] != "set-point"


def test_tables_are_those_of_the_texts(run):
    folder, made = run
    curves, equal = table(folder, ".curves"), table(folder, ".equal")
    texts = made["texts"]
    metrics = ["acc", "acc masked", "echo %", "rep %"]
    assert list(dict.fromkeys(curves["metric"])) == metrics
    for row in curves.itertuples():
        part = texts[(texts["task"] == row.task) & (texts["words"] == row.words)]
        part = part[(part["family"] == row.family) & np.isclose(part["strength"], row.strength)]
        assert len(part) == {"sentiment": 18, "topic": 9}[row.task]
        if row.attribute != "all":
            part = part[part["attribute"] == row.attribute]
        assert row.perplexity == pytest.approx(np.exp(part["nll"].mean()), rel=1e-5)
        assert row.mean == pytest.approx(part[row.metric].mean(), rel=1e-5)
        assert row.perplexity_low <= row.perplexity <= row.perplexity_high
    main = table(folder, "")
    arms = main[(main["attribute"] == "all") & (main["metric"] == "rep %")]
    assert arms["mean"].notna().all()
    assert set(main["metric"]) == {*metrics, "ppl", "dist1", "dist2", "dist3"}
    assert set(main["arm"]) == {
        "baseline",
        "lapa2 0.5",
        "lapa2 4",
        "set-point 0.3",
        "set-point 0.8",
    }
    assert set(equal["family"]) == {"lapa2", "set-point"}
    assert set(equal["attribute"]) == {"all", "positive", "negative", "world"}
    assert equal.loc[equal["attribute"] != "all", ["p_holm", "verdict"]].isna().all(axis=None)
    equal = equal[equal["attribute"] == "all"]
    assert len(equal) == (2 + 2 + 1) * 2 * len(metrics), "banned texts at one perplexity"
    assert set(equal["verdict"].dropna()) <= {"more", "less", "not decided", "not comparable"}
    assert (equal["verdict"].isna() == (equal["family"] == "lapa2")).all()
    text = (folder / "tables" / "steering.equal.md").read_text()
    assert "prefix words banned" in text
    assert "counts in it as p = 1" in text
    assert (
        "not comparable"
        in json.loads((folder / "tables/steering.equal.json").read_text())["notes"][1].lower()
    )


def test_a_grid_run_in_parts_is_compared_as_a_whole(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    folder, _ = run
    plan, tables = load_run(folder).by_key, []
    for task in ("topic", "sentiment"):
        part = tmp_path / task
        shutil.copytree(folder, part, ignore=shutil.ignore_patterns("tables", "figures"))
        for key, cell in plan.items():
            if cell.task.name != task:
                remove_batches(part / "cells" / key)
        asked = [part, "--grids", "mine", "--scorers", "linear", "accuracy", "masked", "echo",
                 "repetition", "perplexity=tiny-gpt2"]  # fmt: skip
        if task == "sentiment":  # the two tests of topic have no texts here, and count as p = 1
            made = script("steering/analyse", *asked)
            waiting = pd.DataFrame(made["waiting"])
            assert waiting[["task", "family"]].drop_duplicates().values.tolist() == [
                ["topic", "set-point"]
            ]
            assert len(waiting) == 2 * len(made["metrics"]), "at two perplexities"
            assert len(made["tests"]) == len(waiting) + len(made["verdicts"])
            assert table(part, ".equal")["perplexity"].notna().all()
        script("steering/analyse", *asked, *(["--beside", *tables] if tables else []))
        tables.append(part / "tables" / "steering.texts.parquet")
    assert "No verdicts" in (tmp_path / "topic" / "tables" / "steering.equal.md").read_text()
    keys = ["task", "words", "attribute", "ratio", "family", "metric", "perplexity"]
    at_once, parts = (table(tables, ".equal").sort_values(keys) for tables in (folder, part))
    pd.testing.assert_frame_equal(at_once.reset_index(drop=True), parts.reset_index(drop=True))
    stored = pd.read_parquet(tables[0])
    assert not stored["prompt"].str.contains(" ").any(), "no texts"
    with pytest.raises(RunError, match="cells that are there already; give each once"):
        script("steering/analyse", *asked, "--beside", tables[1])
    (tmp_path / "bad").write_text("no table")
    with pytest.raises(RunError, match=r"cannot read .*bad.*give a steering.texts.parquet"):
        script("steering/analyse", *asked, "--beside", tmp_path / "bad")


def test_texts_with_banned_words_are_told_apart(run):
    folder, made = run
    plan = load_run(folder).by_key
    for key, words in made["texts"][["cell", "words"]].drop_duplicates().itertuples(index=False):
        assert (words == "prefix words banned") == (plan[key].ban_words == "own")
    assert set(table(folder, ".equal")["words"]) == {"all words", "prefix words banned"}


def test_prompts_of_bases_are_in_no_other_file():
    neutral = [f"Prompt {i} of many" for i in range(4500)] + ['"quoted']
    steering, selection = choose_prompts(neutral)
    files = bases_prompts(neutral)
    assert {name: len(files[name]) for name in BASES} == BASES
    parts = [text for name in BASES for text in files[name]]
    assert len(set(parts)) == len(parts)
    assert not set(parts) & {*steering, *selection, '"quoted'}
    assert files["select-sentiment"][0] == neutral[-2], "from the end"
    for task in ("sentiment", "topic"):
        assert files[task] == [text for i in range(1, 6) for text in files[f"{task}-{i}"]]


def test_verdicts_say_what_speaks_against_them():
    """(verdict, difference by the second scorer, interval of the masked one) -> what is said."""
    cases = {
        ("more", 2.0, (0.5, 3.0)): "more",
        ("more", -0.1, (0.5, 3.0)): "more (disputed)",
        ("more", np.nan, (0.5, 3.0)): "more (disputed)",
        ("more", 2.0, (-0.5, 3.0)): "more (echo)",
        ("less", 2.0, (-0.5, 3.0)): "less (disputed, echo)",
        ("less", -2.0, (-3.0, -0.5)): "less",
        ("not decided", -2.0, (-0.5, 3.0)): "not decided",
    }
    rows = []
    for number, (verdict, second, masked) in enumerate(cases):
        at = {"task": f"task {number}", "ratio": 1.1, "family": "set-point"}
        for metric, said, gap, (low, high) in (
            ("acc", verdict, 2.0, (0.5, 3.0)),
            ("acc (linear)", "not decided", second, (-9.0, 9.0)),
            ("acc masked", "not decided", 2.0, masked),
        ):
            ends = {"difference": gap, "difference_low": low, "difference_high": high}
            rows.append(at | {"metric": metric, "verdict": said} | ends)
    names = ("acc", "acc (linear)", "acc masked")
    judged = add_caveats(pd.DataFrame(rows), *names)
    assert judged["verdict"][judged["metric"] == "acc"].tolist() == list(cases.values())
    assert set(judged["verdict"][judged["metric"] != "acc"]) == {"not decided"}
    alone = pd.DataFrame([row for row in rows if row["metric"] == "acc"])
    assert add_caveats(alone, *names)["verdict"].tolist() == alone["verdict"].tolist()


def test_without_all_cells_there_are_no_verdicts(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    copy = tmp_path / "run"
    shutil.copytree(run[0], copy, ignore=shutil.ignore_patterns("tables", "figures"))
    key = next(key for key, cell in load_run(copy).by_key.items() if cell.arm == "baseline")
    weaker = next(key for key, cell in load_run(copy).by_key.items() if "0.3" in cell.arm)
    assert key != weaker
    known, plan = run[1]["known"], load_run(copy).by_key
    set_points = known.index[known["family"] == "set-point"]
    (family,) = (key for key in set_points if plan[key].task.name == "topic")
    for key_of_cell in (weaker, family):
        remove_batches(copy / "cells" / key_of_cell)
    made = script(
        "steering/analyse",
        copy,
        "--grids",
        "mine",
        "--scorers",
        "linear",
        "accuracy",
        "perplexity=tiny-gpt2",
    )
    # The cell of the other attribute in the arm of `other` does not count alone.
    assert "No verdicts: 3 cells" in capsys.readouterr().out
    assert table(copy, ".equal")["verdict"].isna().all()
    waiting = pd.DataFrame(made["waiting"])
    assert set(zip(waiting["task"], waiting["family"], strict=True)) == {("topic", "set-point")}
    assert len(waiting) == 2 * len(made["metrics"]), "its tests count as p = 1"


def test_the_figure_shows_the_tables(run):
    folder, _ = run
    redraw("steering/analyse", folder)
    assert (folder / "figures" / "steering.png").read_bytes().startswith(b"\x89PNG")
    draw = drawing_of("steering/analyse")
    curves, equal = table(folder, ".curves"), table(folder, ".equal")
    drawing = draw(table(folder, ""), curves, equal)
    across = 1 + equal["ratio"].nunique()
    assert len(drawing.axes) == across * 3
    left = drawing.axes[across]
    rows = curves[(curves["task"] == "sentiment") & (curves["words"] == "all words")]
    rows = rows[(rows["metric"] == "acc") & (rows["attribute"] == "all")].set_index("family")
    first = next(line for line in left.lines if len(line.get_xdata()) == 3)
    assert first.get_xdata().tolist() == [
        rows.loc["baseline", "perplexity"],
        *rows.loc["lapa2", "perplexity"],
    ]
    assert first.get_ydata().tolist() == [rows.loc["baseline", "mean"], *rows.loc["lapa2", "mean"]]


def test_columns_that_the_others_decide_are_not_shown():
    rows = pd.DataFrame({"task": ["a", "b"], "words": ["x", "x"], "variant": ["", "hard"]})
    assert distinguishing_columns(rows, ["task", "words", "variant"]) == ["task"]
    two = pd.concat([rows, rows.assign(variant="mle")])
    assert distinguishing_columns(two, ["task", "words", "variant"]) == ["task", "variant"]


def test_a_run_without_lapa2_says_what_is_missing(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    (tmp_path / "g.toml").write_text(GRID.split("[[block]]")[0].replace(
        "prompts.txt", str(run[0].parent / "prompts.txt")) + 'augmentation = ["none", "set-point"]\n')  # fmt: skip
    grid = load_grid(str(tmp_path / "g.toml"), {"task": "sentiment", "length": 40})
    write_run(tmp_path / "run", make_cells(load("tiny-gpt2"), grid.cells, name="steering"))
    script(
        "steering/analyse",
        tmp_path / "run",
        "--scorers",
        "linear",
        "accuracy",
        "perplexity=tiny-gpt2",
    )
    printed = capsys.readouterr().out
    assert (
        "No comparison for sentiment, all words, tiny-gpt2, prefix: no finished lapa2." in printed
    )
    assert not (tmp_path / "run" / "tables" / "steering.equal.csv").exists()


def test_prompts_are_the_papers_and_the_first_neutral_ones(tmp_path):
    own = [text for name in ("sentiment", "topic") for text in load_task(name).prompts.texts]
    rows = [
        ("one", "neutral"), ("good", "positive"), ("two", "neutral"), ("one", "neutral"),
        ("word " * 21, "neutral"), ('"word', "neutral"), ("a\nb", "neutral"), (own[3], "neutral"),
        ("a\u2028b", "neutral"), ("three", "neutral"), ("(four", "neutral"), ("5th", "neutral"),
    ]  # fmt: skip
    file = tmp_path / "prompts.jsonl.xz"
    lines = [json.dumps({"prompt": text, "kind": kind, "num_positive": 12}) for text, kind in rows]
    with lzma.open(file, "wt") as stored:
        stored.write("\n".join(lines))
    neutral = read_neutral(file)
    assert len(neutral) == 11
    prompts, selection = choose_prompts(neutral, 3, 2)
    assert prompts == [*own, "one", "two", "5th"]
    assert selection == ["three", "(four"]
    assert len(own) == len(set(own)) == 35


def test_the_corpus_gives_both_files(data):
    prompts, selection = choose_prompts(
        read_neutral(data / "prompts" / "dexperts_owt_sentiment_10k.jsonl.xz")
    )
    assert (len(prompts), len(selection)) == (575, 64)
    assert len({*prompts, *selection}) == 639
    assert all(prompt[0].isalnum() for prompt in prompts)


def test_reproduce_leaves_out_a_grid_that_lacks_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr("lapa2_interp.cli.app.main", lambda words: asked.append(words) or 130)
    before = sys.argv
    sys.argv = ["reproduce.py", "--out", str(tmp_path / "run")]
    try:
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / "analyses" / "tools/reproduce.py"), run_name="__main__")
    finally:
        sys.argv = before
    assert "steering is left out: no file steering-prompts.txt" in capsys.readouterr().err
    assert str(ROOT / "analyses/heads/heads.toml") in asked[0]
    assert "quick/alpha" in asked[0]
    assert not [word for word in asked[0] if word.endswith("steering.toml")]
