"""analyses/lex_and_accuracy/analyse.py: control on given texts, and its order beside that of accuracy."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import script

from lapa2_interp import Augmentation
from lapa2_interp.circuits import ContrastSet, control_score
from tests.conftest import load

PROMPTS = [
    f"The {word}" for word in ("lake", "road", "book", "city", "horse", "movie", "pizza", "king")
]
GRID = """
description = "small"
model = "planted"
dtype = "float32"
length = 8
samples = 1
trace = "none"
task = "sentiment"
prompts = "PROMPTS"
method = { name = "prefix", prefixes = "hard" }
[[block]]
augmentation = ["none", "lapa2:alpha=0.5", "lapa2:alpha=1.0", "head-selective:heads=1.2,alpha=1"]
"""
ARMS = [("baseline", 0.0), ("head-selective", 1.0), ("lapa2", 0.5), ("lapa2", 1.0)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of the tables, the script's names, and scores of texts: accuracy goes with the arm
    on one attribute, and against it on the other."""
    folder = tmp_path_factory.mktemp("lex")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "grid.toml").write_text(GRID.replace("PROMPTS", str(folder / "prompts.txt")))
    rng, rows = np.random.default_rng(0), []
    for attribute, sign in (("negative", -1), ("positive", 1)):
        for i, (family, strength) in enumerate(ARMS):
            for prompt in PROMPTS:
                row = {"task": "sentiment", "method": "prefix", "attribute": attribute}
                row |= {"family": family, "strength": strength, "words": "all words"}
                row |= {"prompt": sha256(prompt.encode()).hexdigest()[:12], "nll": rng.normal()}
                rows.append(row | {"acc": 50.0 + sign * 10 * i + rng.normal()})
    texts = pd.DataFrame(rows)
    texts.to_parquet(folder / "texts.parquet")
    script("lex_and_accuracy/analyse", folder / "grid.toml", "--texts", folder / "texts.parquet",
        "--n", 8, "--tokens", 4, "--out", folder,
    )  # fmt: skip
    return folder, texts


def test_control_is_that_of_the_package(made):
    """js and lex of an arm, one prompt after another; lex of two attributes has no side."""
    folder, _ = made
    control = pd.read_csv(folder / "control.csv")
    model = load("planted")
    contrast_set = ContrastSet.of(model, "sentiment", prompts=PROMPTS, tokens=4)
    score = control_score(
        model, contrast_set, metrics=["js", "lex"], augmentation=Augmentation(alpha=1.0)
    )
    of_arm = control[(control["family"] == "lapa2") & (control["strength"] == 1.0)]
    for _, rows in of_arm.groupby("attribute"):
        for name in ("js", "lex"):
            assert rows[name].to_numpy() == pytest.approx(score.values[name].mean(1), rel=1e-4)


def test_orders_and_predictions_are_those_of_pandas(made):
    folder, texts = made
    control = pd.read_csv(folder / "control.csv")
    changes = {}
    for attribute in ("negative", "positive"):
        arms = [
            table[table["attribute"] == attribute].groupby(["family", "strength"])[name].mean()
            for table, name in ((control, "lex"), (texts, "acc"))
        ]
        changes[attribute] = pd.DataFrame(
            {name: (arm - arm["baseline", 0.0]).drop("baseline")
             for name, arm in zip(("lex", "acc"), arms, strict=True)}
        )  # fmt: skip
    order = pd.read_csv(folder / "order.csv").query("by == 'lex'").set_index("attribute")["value"]
    left_out = pd.read_csv(folder / "left_out.csv").query("by == 'lex'")
    skill = left_out[left_out["left out"] == "attribute"].set_index("attribute")["value"]
    for attribute, rest in (("negative", "positive"), ("positive", "negative")):
        here, there = changes[attribute], changes[rest]
        correlation = here["lex"].corr(here["acc"], method="spearman")
        assert order[attribute] == pytest.approx(correlation, rel=1e-4)
        slope = (there["lex"] * there["acc"]).sum() / (there["lex"] ** 2).sum()
        error = ((slope * here["lex"] - here["acc"]) ** 2).sum()
        constant = ((there["acc"].mean() - here["acc"]) ** 2).sum()
        assert skill[attribute] == pytest.approx(1 - error / constant, rel=1e-3)
    assert order["all"] == pytest.approx((order["negative"] + order["positive"]) / 2, abs=1e-4)
    assert left_out[left_out["left out"] == "task"]["value"].isna().all(), "there is one task"


def test_what_was_read_is_not_read_again(made, monkeypatch):
    folder, _ = made
    before = {file: file.read_bytes() for file in folder.glob("*.csv")}
    monkeypatch.setattr("lapa2_interp.load_model", None)
    script("lex_and_accuracy/analyse", folder / "grid.toml", "--texts", folder / "texts.parquet",
        "--n", 8, "--tokens", 4, "--out", folder,
    )  # fmt: skip
    assert {file: file.read_bytes() for file in folder.glob("*.csv")} == before
    assert Path(folder / "lex_and_accuracy.png").stat().st_size > 10_000
