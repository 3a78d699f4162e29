"""analyses/undecided/analyse.py: the claims of several runs, corrected together."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import script

QUICK = Path(__file__).resolve().parents[2] / "figures" / "paper" / "quick"


def test_claims_of_runs_are_joined_and_corrected_again(tmp_path):
    """Each claim once, without perplexity; Holm's correction by hand over the comparisons of an
    item."""
    for run, item in (("a", "scaling"), ("b", "scaling"), ("b", "layers")):
        (tmp_path / run / "tables").mkdir(parents=True, exist_ok=True)
        shutil.copy(QUICK / "tables" / f"{item}.claims.csv", tmp_path / run / "tables")
    script("undecided/analyse", tmp_path / "a", tmp_path / "b", "--before", QUICK,
        "--out", tmp_path / "out",
    )  # fmt: skip
    claims = pd.read_csv(tmp_path / "out" / "claims.csv", dtype={"compared": str})
    before = pd.read_csv(QUICK / "tables" / "verdicts.csv")
    wanted = before[before["item"].isin(["scaling", "layers"]) & (before["metric"] != "ppl")]
    assert sorted(claims["claim"]) == sorted(wanted["claim"])
    assert (claims["here_before"] == claims["here"]).all()
    for _, part in claims.groupby(["item", "whose"]):
        p = part.drop_duplicates("compared").sort_values("p")
        by_hand = np.minimum(1, np.maximum.accumulate(p["p"] * np.arange(len(p), 0, -1)))
        assert p["holm"].to_numpy() == pytest.approx(by_hand.to_numpy(), rel=1e-4)
    # A smaller family decides at least as much.
    was = claims.set_index("claim")["verdict_before"]
    decided = claims.set_index("claim")["verdict"] != "inconclusive"
    assert decided[was != "inconclusive"].all()
    page = (tmp_path / "out" / "verdicts.md").read_text("utf-8")
    assert page.count("prompts)") == len(claims.drop_duplicates("compared"))
