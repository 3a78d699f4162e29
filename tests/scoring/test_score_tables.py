"""Tables of scores as readers see them: headers, their legend, and the methods of intervals."""

import re

import numpy as np
import pandas as pd
import pytest

from lapa2_interp.runs.score import Scored, score_notes
from lapa2_interp.scoring.scorer import Scorer
from lapa2_interp.scoring.tables import (
    cell_table,
    column_names,
    difference_table,
    distinct_cells,
    format_scores,
    interval_note,
    score_table,
)
from lapa2_interp.stats import FEW, describe_intervals
from lapa2_interp.table_formats import as_latex

ADAPTER, LINEAR = "accuracy (adapter sentiment 2010ae0d88fa)", "accuracy (linear sentiment 77aa)"
TOPIC, AGAIN = "accuracy (adapter topic 99ffaa)", "accuracy (adapter sentiment 0123456789ab)"


def scores(prompts, scorers=(ADAPTER,), alike=False):
    rng = np.random.default_rng(0)
    rows = [
        {"arm": arm, "prompt": f"p{p}", "sample": s, "metric": "accuracy", "scorer": scorer,
         "value": 1.0 if alike else float(rng.random() < 0.5 + 0.2 * (arm != "baseline")),
         "reason": "", "text": f"word{p} and {s}"}
        for arm in ("baseline", "alpha 1") for p in range(prompts) for s in range(6)
        for scorer in scorers
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("scorers", "names"),
    [
        ((ADAPTER,), ["accuracy"]),
        ((ADAPTER, LINEAR), ["accuracy (adapter)", "accuracy (linear)"]),
        ((ADAPTER, TOPIC), ["accuracy (adapter sentiment)", "accuracy (adapter topic)"]),
        ((ADAPTER, AGAIN), ["accuracy (adapter 1)", "accuracy (adapter 2)"]),
        (("accuracy (org/one)", "accuracy (org/two)"), ["accuracy (org/one)", "accuracy (org/two)"]),
    ],
)  # fmt: skip
def test_headers_are_short_and_a_legend_has_the_versions(scorers, names):
    texts = scores(9, scorers)
    table, differences = cell_table(texts), difference_table(texts)
    assert list(column_names(table).values()) == names
    shown = format_scores(table, differences)
    assert list(shown) == [
        "arm",
        *(f"{name}{change}" for name in names for change in ("", " change")),
    ]
    legend, *_ = score_notes(table, differences)
    for name, scorer in zip(names, scorers, strict=True):
        assert f"{name}: {scorer}" in legend
    latex = as_latex("Scores", shown, score_notes(table, differences), "scores")
    (head,) = re.findall(r"\\toprule\n(.*)", latex)
    assert not re.search(r"[0-9a-f]{6}", head)


@pytest.mark.parametrize(
    ("prompts", "words", "untold"),
    [
        (3, "Student's t", "resampled"),
        (FEW - 1, "Student's t", "resampled"),
        (FEW, "prompts resampled", "Student"),
        (1, "none where there is one prompt", "resampled"),
    ],
)
def test_a_note_names_the_method_that_made_the_interval(prompts, words, untold, capsys):
    texts = scores(prompts)
    table, differences = cell_table(texts), difference_table(texts)
    print(Scored(pd.DataFrame(), table, differences).summary())
    for text in (score_notes(table, differences)[1], capsys.readouterr().out):
        assert words in text
        assert untold not in text


@pytest.mark.parametrize(
    ("n", "words"),
    [(FEW, "texts resampled"), (3, "Student's t on texts' means, where there are fewer than 8 t")],
)
def test_texts_without_prompts_are_what_is_resampled(n, words):
    texts = scores(n).assign(prompt="").groupby("arm").head(n)
    for table in (cell_table(texts), distinct_cells(texts)):
        differences = difference_table(texts)
        assert "prompt" not in interval_note(table, differences)
    assert words in interval_note(cell_table(texts), differences)


def test_other_methods_are_named_where_they_are():
    alike = scores(9, alike=True)
    none = pd.DataFrame()
    assert "all texts score alike" in interval_note(cell_table(alike), none)
    both = pd.concat([cell_table(scores(9)), distinct_cells(alike)], ignore_index=True)
    assert interval_note(both, none) == (
        "in brackets: 95 % interval (prompts resampled; of distinct-n Student's t from the"
        " jackknife over prompts)"
    )
    assert describe_intervals([9, 3, 1]).count(";") == 2


def test_printed_differences_stand_under_their_scorer(capsys):
    texts = scores(9, (ADAPTER, LINEAR))
    print(Scored(texts, cell_table(texts), difference_table(texts)).summary())
    after = capsys.readouterr().out.partition("against the baseline")[2]
    for scorer in (ADAPTER, LINEAR):
        lines = after[after.index(scorer) :].splitlines()
        assert "difference" in lines[1]
        assert "alpha 1" in lines[2]


class Asked(Scorer):
    """Its number of a text is how many letters the prompt has."""

    name, version, columns, item_fields = "asked", "1", ("asked",), ("prompt",)

    def score(self, items):
        return [(float(len(item.prompt)),) for item in items]


def test_a_scorer_is_given_the_message_that_a_later_turn_answers():
    texts = pd.DataFrame({"text": ["a", "b", "c"], "attribute": "x", "prompt": ["Why?\nAnd?"] * 2 + ["So"],
                          "turn": [1, 2, np.nan], "message": ["Why?", "And", np.nan]})  # fmt: skip
    table = score_table(texts, Asked())
    assert table["value"].tolist() == [len("Why?"), len("And"), len("So")]
    assert table["prompt"].tolist() == texts["prompt"].tolist(), "the chat, which is resampled"
    own = texts.drop(columns="turn")  # a file's own column
    assert score_table(own, Asked())["value"].tolist() == [9, 9, 2]
