"""The study of the server in its short form. Of speeds, nothing is asserted that a machine decides."""

from urllib.error import HTTPError

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


def test_a_request_that_fails_is_not_answered(monkeypatch):
    def ask(address, prompt, n_tokens, seed):
        if seed == 2:
            raise HTTPError(address, 429, "the queue is full", {}, None)
        return n_tokens

    monkeypatch.setattr(serving, "ask", ask)
    assert serving.held("http://127.0.0.1", 5).iloc[0].tolist() == [5, 4]
