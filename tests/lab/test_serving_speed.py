"""The study of the server in its short form. Of speeds, nothing is asserted that a machine decides."""

import pandas as pd

from analyses.speed import serving


def test_the_study_writes_its_tables(tmp_path, capsys):
    words = "--model tiny-llama --turns 1 --rows 3 --at-once 4 --texts 3 --out"
    serving.main([*words.split(), str(tmp_path / "out")])
    tables = {name: pd.read_csv(tmp_path / "out" / f"{name}.csv") for name in ("overhead", "held")}
    assert tables["overhead"]["texts"].tolist() == [1, 3]
    assert (tables["overhead"]["ratio"] > 0).all()
    assert tables["held"].iloc[0][["sent", "answered"]].tolist() == [4, 4]
    assert pd.read_csv(tmp_path / "out" / "memory.csv")["answered"].tolist() == [1, 2, 3]
    assert "tiny-llama" in capsys.readouterr().out
