"""analyses/bases/same_prompts.py on texts whose scores are known."""

import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lapa2_interp.scoring.registry import ScorerOptions, score_texts
from lapa2_interp.scoring.scorer import ScoreCache

SCRIPT = runpy.run_path(
    str(Path(__file__).resolve().parents[2] / "analyses" / "bases" / "same_prompts.py"),
    run_name="script",
)
ARMS = [(method, arm) for method in ("air-decoding", "dexperts") for arm in ("no bias", "24 heads")]


@pytest.fixture(scope="module")
def texts():
    """Sixteen prompts; the arms repeat one of their words one, two, three and four times."""
    rows = [
        {"cell": f"{method} {arm}", "method": method, "arm": arm, "sample": 0}
        | {"task": "sentiment", "attribute": "positive", "prompt": f"Lake {i}"}
        | {"text": f"Lake {i} and" + " one two three four five" * 7 + f" w{i}" * (n + i % 2)}
        for n, (method, arm) in enumerate(ARMS, 1)
        for i in range(16)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize("scorer", ["repetition", "conditional-perplexity=tiny-gpt2"])
def test_means_and_differences_are_those_of_the_scores(texts, tmp_path, scorer):
    perplexity = scorer != "repetition"
    with ScoreCache(tmp_path) as cache:
        compared = SCRIPT["compare"]("sentiment", scorer, texts, cache)
        scores = score_texts(texts, [scorer], ScorerOptions(task="sentiment"), cache)
    values = pd.to_numeric(scores["value"])
    values = np.log(values) if perplexity else values
    means = values.groupby([scores["method"], scores["arm"]]).mean()
    shown = np.exp if perplexity else lambda value: value
    assert len(compared) == 8
    assert (compared["low"] <= compared["mean"]).all()
    assert (compared["mean"] <= compared["high"]).all()
    for row in compared.itertuples():
        expected = means[row.method, row.arm]
        if row.minus:
            expected -= means[tuple(row.minus.split(", "))]
        assert row.mean == pytest.approx(shown(expected), rel=1e-9)


def test_perplexity_is_of_the_first_prompts(texts, tmp_path, monkeypatch):
    monkeypatch.setitem(SCRIPT["PERPLEXITY_PROMPTS"], "sentiment", 9)
    with ScoreCache(tmp_path) as cache:
        compared = SCRIPT["compare"]("sentiment", "conditional-perplexity=tiny-gpt2", texts, cache)
    assert set(compared["prompts"]) == {9}
