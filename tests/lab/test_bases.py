"""The item bases: its parts, its arms, its tests and its figure, on a small run."""

import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
from conftest import drawing_of, script

from lapa2_interp.cli.app import main
from lapa2_interp.errors import RunError
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.run import load_run
from lapa2_interp.runs.store import remove_batches
from lapa2_interp.scoring.echo import Echo, prefix_words
from lapa2_interp.scoring.linear import LinearScorer
from lapa2_interp.scoring.scorer import TextItem

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
AIR = 'method = { name = "air-decoding", omega = %d.0, pro_aug = false, prefixes = "hard" }'
CHOSEN, RANDOM = "head-selective:heads=0.1/1.0,alpha=0.8", "head-selective:heads=0.0/1.1,alpha=0.8"
PROMPTS = [
    f"A {word} of a b c d e f g" for word in ("lake", "road", "horse", "train", "king", "day")
]
OTHERS = [f"Number {n} of a b c d e f" for n in range(3)]
GRID = f"""
model = "tiny-gpt2"
dtype = "float32"
length = 40
samples = 1
trace = "none"
description = "small"
ban_words = "all"
task = "sentiment"
prompts = {PROMPTS}
[[block]]
{AIR % 140}
augmentation = ["none", "lapa2:alpha=0.5", "{CHOSEN}", "{CHOSEN[:-1]}4"]
[[block]]
{AIR % 280}
augmentation = ["none"]
[[block]]
prompts = {PROMPTS[:3]}
{AIR % 140}
augmentation = ["{RANDOM}"]
[[block]]
prompts = {OTHERS}
method = [{{ name = "prefix", prefixes = "hard" }}, {{ name = "gedi", prefixes = "hard" }}]
augmentation = ["none", "{CHOSEN}"]
"""


@pytest.fixture(scope="module")
def analysis(tmp_path_factory):
    """A run with its tables, and the names of the script that made them."""
    folder = tmp_path_factory.mktemp("bases")
    (folder / "bases.toml").write_text(GRID)
    out = folder / "run"
    assert main(["sweep", str(folder / "bases.toml"), "--out", str(out), "--workers", "1"]) == 0
    return out, script("bases/analyse", out)


@pytest.fixture
def run(analysis):
    return analysis[0]


def test_parts_arms_and_tests(run):
    table = pd.read_csv(run / "tables" / "bases.csv", keep_default_na=False)
    arms = set(table[["method", "variant", "arm"]].itertuples(index=False, name=None))
    air = "air-decoding"
    names = (
        "baseline",
        "all heads 0.5",
        "chosen heads 0.8",
        "chosen heads 0.4",
        "random heads 0.8",
    )
    assert arms == {
        *((air, "(a), omega 140", name) for name in names),
        (air, "(a), omega 280", "baseline"),
        *((method, "(b)", name) for method in ("prefix", "gedi") for name in (names[0], names[2])),
    }
    tests = pd.read_csv(run / "tables" / "bases.tests.csv")
    decided = tests[tests["p_holm"].notna()]
    assert decided[["part", "method", "against"]].to_numpy().tolist() == [
        ["(a)", air, names[0]], ["(a)", air, names[1]], ["(a)", air, names[4]],
        ["(b)", "prefix", names[0]], ["(b)", "gedi", names[0]],
    ]  # fmt: skip
    assert decided["prompts"].tolist() == [6, 6, 3, 3, 3]
    assert set(tests["attribute"]) == {"all", "positive", "negative"}


def test_a_difference_is_that_of_the_texts(run):
    """Random heads against chosen heads, on the three prompts that both have, from the texts."""
    opened, scorer = load_run(run), LinearScorer("sentiment")
    rows = []
    for key, cell in opened.by_key.items():
        for bias in cell.active_augmentations:
            if cell.method == "air-decoding" and bias.alpha == 0.8:
                texts = opened.texts([key])
                for attribute, prompt, text in texts[["attribute", "prompt", "text"]].to_numpy():
                    (probabilities,) = scorer.score([TextItem(text)])
                    label = scorer.columns[probabilities.index(max(probabilities))]
                    rows.append((bias.heads == ((0, 1), (1, 0)), prompt, label == attribute))
    table = pd.DataFrame(rows, columns=["chosen", "prompt", "right"])
    both = table[table["prompt"].isin(PROMPTS[:3])].groupby("chosen")["right"].agg(["mean", "size"])
    assert both["size"].tolist() == [6, 6]
    expected = 100 * (both["mean"][True] - both["mean"][False])
    tests = pd.read_csv(run / "tables" / "bases.tests.csv")
    row = tests[(tests["against"] == "random heads 0.8") & tests["p_holm"].notna()]
    assert row["difference"].tolist() == pytest.approx([expected], abs=1e-4)


def test_chosen_heads_are_compared_with_omega_at_equal_perplexity(analysis):
    run, made = analysis
    curves = made["curves"]
    first, last = curves.curve("omega 280")[0, :, 0]
    table = pd.read_csv(run / "tables" / "bases.equal.csv")
    assert set(table["family"]) == {"chosen heads"}
    assert table["ratio"].notna().all()
    assert table["ratio"].tolist() == pytest.approx([math.exp(0.75 * (last - first))] * len(table))
    names = ["baseline", "chosen heads", "chosen heads", "omega 280"]
    assert curves.arms.get_level_values("family").tolist() == names


def test_the_figure_has_a_panel_for_each_part(run):
    figure = drawing_of("bases/analyse")(pd.read_csv(run / "tables" / "bases.csv"))
    assert [panel.get_title() for panel in figure.axes] == ["(a) sentiment", "(b) sentiment"]
    assert (run / "figures" / "bases.png").is_file()


def test_the_tests_are_by_linear(run, tmp_path):
    """Beside another scorer or alone; without it there are none."""
    run = shutil.copytree(run, tmp_path / "run")
    before = pd.read_csv(run / "tables" / "bases.tests.csv").dropna(subset="p_holm")
    script("bases/analyse", run, "--scorers", "accuracy=linear", "echo", "perplexity")
    alone = pd.read_csv(run / "tables" / "bases.tests.csv").dropna(subset="p_holm")
    assert alone["difference"].tolist() == before["difference"].tolist()
    assert len(alone) == 5
    with pytest.raises(RunError, match="the tests are by linear; give --scorers accuracy=linear"):
        script("bases/analyse", run, "--scorers", "accuracy=vader", "echo", "perplexity")


def test_a_part_that_is_not_finished_has_no_tests(run, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    key = next(key for key, cell in load_run(copy).by_key.items()
              if cell.method == "gedi" and cell.active_augmentations)  # fmt: skip
    remove_batches(copy / "cells" / key)
    script("bases/analyse", copy)
    assert set(pd.read_csv(copy / "tables" / "bases.tests.csv")["part"]) == {"(a)"}
    said = capsys.readouterr().out
    assert "(b) has no tests: " in said
    assert "(a) has no tests" not in said


def test_the_texts_for_reading_are_forty_an_arm_without_a_word_of_a_prefix():
    """The committed texts of analyses/bases/texts.toml, which bans the words of both prefixes."""
    texts = pd.read_csv(ROOT / "figures" / "bases" / "texts.csv")
    assert set(texts.groupby(["method", "arm"]).size()) == {40}
    cells = load_grid(str(ROOT / "analyses" / "bases" / "texts.toml")).cells
    assert {(cell.method, cell.arm) for cell in cells} == set(
        zip(texts["method"], texts["arm"], strict=True)
    )
    assert set(texts["prompt"]) == set(cells[0].prompts)
    scorer = Echo(prefix_words(cells[0].task))
    items = [
        TextItem(text, attribute=name)
        for text in texts["text"]
        for name in cells[0].task.attributes
    ]
    assert scorer.score([TextItem("A very good day", attribute="positive")]) == [(0.0,)]
    assert set(scorer.score(items)) == {(0.0,)}
