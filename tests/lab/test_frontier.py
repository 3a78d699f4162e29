"""analyses/frontier/analyse.py on a run of a small model: arms are named by their recipes."""

import pandas as pd
from conftest import lapa2, script

GRID = """model = "tiny-gpt2"
dtype = "float32"
description = "recipes"
trace = "pooled"
length = 20

[[block]]
task = "sentiment"
method = "prefix"
prompts = 2
samples = 1
augmentation = ["none", "lapa2", "pasta", "pasta:heads=0.1/1.0", "head-selective:heads=0.1"]
"""


def test_arms_are_named_by_their_recipes(tmp_path, capsys):
    grid, run = tmp_path / "frontier.toml", tmp_path / "run"
    grid.write_text(GRID)
    assert lapa2(f"sweep {grid} --out {run} --workers 1") == 0
    script("frontier/analyse", run, "--scorers", "accuracy=linear", "perplexity=tiny-gpt2")
    table = pd.read_csv(run / "tables" / "frontier.csv")
    arms = ["baseline", "lapa2", "pasta", "pasta, chosen heads", "head-selective"]
    assert list(dict.fromkeys(table["arm"])) == arms
    steps = pd.read_csv(run / "tables" / "frontier.steps.csv")
    assert set(steps["arm"]) == set(arms)
    assert (run / "figures" / "frontier.png").read_bytes().startswith(b"\x89PNG")
