"""analyses/circuits/head_paths.py: what one head does through another."""

import json

import pandas as pd
import pytest
from conftest import script

pytestmark = pytest.mark.long


def test_the_reader_reads_the_relay(tmp_path):
    """In the planted model head 1.1 reads what 0.1 leaves, and no other head reads a head."""
    (tmp_path / "heads.json").write_text(
        json.dumps([[1, 2], [0, 1], [1, 1], [0, 0], [1, 0], [0, 2]])
    )
    prompts = [f"The {word} of the" for word in ("lake", "book", "city")]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    script("circuits/head_paths", "planted", "--heads", tmp_path / "heads.json", "--prompts",
        tmp_path / "prompts.txt", "--tokens", "3", "--best", "5", "--out", tmp_path,
    )  # fmt: skip
    table = pd.read_csv(tmp_path / "head_paths.csv", dtype={"from": str, "to": str})
    assert len(table) == 2 * 3
    first = table.iloc[0]
    assert (first["from"], first["to"]) == ("0.1", "1.1")
    assert first["share"] == pytest.approx(first["from_alone"])
    assert first["share"] > 0.1
    assert (table["share"][1:].abs() < 1e-6).all()
    assert (tmp_path / "head_paths.png").is_file()
