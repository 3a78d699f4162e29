"""Sheets hide the arm, answers come back as they were given, and the tables are the formulas."""

import csv
import io
import itertools
import re

import numpy as np
import pandas as pd
import pytest

from lapa2_interp.errors import Lapa2Error, RunError, ScoringError
from lapa2_interp.scoring.human import (
    COLUMNS,
    METRICS,
    RUBRIC,
    _read_csv,
    annotator_agreement,
    human_table,
    krippendorff_alpha,
    make_sheets,
    rating_pairs,
    read_answers,
)
from lapa2_interp.stats import mean_interval

ARMS = ("zq-plain", "zq-lapa2")
NASTY = (
    "=HYPERLINK(\"http://x\",'a')",
    "+1, -1",
    "-2\n@3",
    "@SUM(A1)",
    " \t=1+1",
    "'=1",
    "''-x",
    "'tis fine",
    "</script><script>document.title = 'run'</script>",
    "<img src=x onerror=\"document.title = 'run'\"> &amp; &lt;b&gt;",
    'a "quoted", text;\r\nwith\nlines \u2028 and naïve 試験 🙂',
    "{{ 7 * 7 }} {% raw %}",
)


def made(prompts=6, samples=4, arms=ARMS, attributes=("positive", "negative")):
    """Samples of a run: every arm has every (prompt, attribute, sample)."""
    rows = [
        {
            "prompt": f"Prompt {p}",
            "attribute": attribute,
            "sample": s,
            "arm": arm,
            "text": f"Prompt {p} goes on as text {s}{i} of {attribute}",
            "tokens": np.arange(3),
            "zq-column": f"zq-{i}-{p}",
        }
        for i, arm in enumerate(arms)
        for attribute in attributes
        for p in range(prompts)
        for s in range(samples)
    ]
    return pd.DataFrame(rows)


@pytest.fixture
def sheets(tmp_path):
    return tmp_path / "sheets"


def read_csv(path):
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline="")))


def fill(folder, name, ratings, file=None, delimiter=",", rows=slice(None)):
    """A filled sheet; `ratings(i, id, metric)` is what a cell says."""
    path = folder / (file or f"{name}.csv")
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS, delimiter=delimiter)
        writer.writeheader()
        for i, row in enumerate(read_csv(folder / "sheet.csv")[rows]):
            cells = {metric: ratings(i, row["id"], metric) for metric in METRICS}
            writer.writerow({**row, **cells, "annotator": name})
    return path


def answered(ratings, arm="run", prompts=None):
    """Answers to every metric, from [text, annotator]."""
    rows = [
        (
            f"id{t}",
            arm,
            f"Prompt {t if prompts is None else prompts[t]}",
            "positive",
            f"name{a}",
            metric,
            rating,
        )
        for (t, a), rating in np.ndenumerate(np.asarray(ratings, dtype=float))
        for metric in METRICS
    ]
    return pd.DataFrame(
        rows, columns=["id", "arm", "prompt", "attribute", "annotator", "metric", "rating"]
    )


def test_the_rubric_is_the_papers():
    assert METRICS == ("relevance", "fluency", "topicality")
    task, *questions = RUBRIC.split("\n\n")
    assert task.endswith("on a scale from 1 (very poor) to 5 (very good).")
    for metric, text, best in zip(
        METRICS,
        questions,
        (
            "Perfectly aligned with the desired attribute.",
            "Grammatically correct, fluent, and easy to understand.",
            "Strongly correlated with the input prompt throughout.",
        ),
        strict=False,
    ):
        title, *levels = text.splitlines()
        assert title.endswith(f"(column {metric})")
        assert [line[:5] for line in levels] == [f"  {level}  " for level in (5, 4, 3, 2, 1)]
        assert levels[0] == f"  5  {best}"
    assert "  1  Numerous grammar errors; difficult to understand.\n" in RUBRIC


def test_sheets_do_not_depend_on_what_they_hide(tmp_path):
    texts = made()
    make_sheets(texts, tmp_path / "a", n_texts=40)
    renamed = texts.assign(
        arm=texts["arm"].map({ARMS[0]: "y", ARMS[1]: "b"}), **{"zq-column": "other"}
    )
    make_sheets(renamed.drop(columns="tokens"), tmp_path / "b", n_texts=40)
    for name in ("sheet.csv", "rubric.txt"):
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes()
        assert b"zq-" not in content
    assert b"zq-" in (tmp_path / "a" / "key.csv").read_bytes()


def test_neither_order_nor_ids_follow_the_arms(sheets):
    key = make_sheets(made(prompts=20), sheets)
    assert key["id"].is_unique
    for order in (key, key.sort_values("id")):
        changes = (order["arm"].to_numpy()[1:] != order["arm"].to_numpy()[:-1]).sum()
        assert 30 < changes < 69  # expected 49.5, standard deviation 5


def test_arms_share_prompts_and_samples(sheets):
    key = make_sheets(made(), sheets, n_texts=40)
    assert key["arm"].value_counts().to_dict() == dict.fromkeys(ARMS, 20)
    units = [
        set(map(tuple, key[key["arm"] == arm][["prompt", "attribute", "sample"]].to_numpy()))
        for arm in ARMS
    ]
    assert units[0] == units[1]
    assert len(units[0]) == 20


def test_without_a_sample_column_texts_pair_in_order(sheets):
    key = make_sheets(made().drop(columns="sample"), sheets, n_texts=40)
    numbers = key["text"].str.extract(r"text (\d)\d of")[0]
    units = set(zip(key["prompt"], key["attribute"], numbers, key["arm"], strict=True))
    assert len(units) == 40
    assert {unit[:3] for unit in units if unit[3] == ARMS[0]} == {
        unit[:3] for unit in units if unit[3] == ARMS[1]
    }


def test_what_does_not_divide_is_left_out(sheets):
    key = make_sheets(made(arms=("a", "b", "c")), sheets, n_texts=20)
    assert key["arm"].value_counts().to_dict() == dict.fromkeys("abc", 6)
    assert set(key.groupby(["prompt", "attribute", "sample"])["arm"].nunique()) == {3}


def test_texts_are_of_what_all_arms_have_continued(sheets):
    texts = made(prompts=5, samples=2)
    # The second arm lacks 12 of 20 units; 8 can be paired.
    texts = texts[(texts["arm"] == ARMS[0]) | texts["prompt"].isin(["Prompt 0", "Prompt 3"])]
    key = make_sheets(texts, sheets, n_texts=16)
    assert set(key["prompt"]) == {"Prompt 0", "Prompt 3"}


def test_the_same_seed_draws_the_same_files(tmp_path):
    names = ("sheet.csv", "key.csv")
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_sheets(made(), tmp_path / folder, n_texts=40, seed=seed)
    for name in names:
        first, again, reseeded = ((tmp_path / folder / name).read_bytes() for folder in "abc")
        assert first == again != reseeded


def test_every_text_has_the_same_chance(tmp_path):
    drawn = pd.concat(
        [make_sheets(made(), tmp_path / str(seed), n_texts=32, seed=seed) for seed in range(60)]
    )
    times = drawn["text"].value_counts()
    assert len(times) == 96
    assert times.between(7, 34).all()  # binomial(60, 1/3): 20, standard deviation 3.7


def test_ids_of_another_task_are_other_ids(tmp_path):
    first = make_sheets(made(), tmp_path / "a", n_texts=40)
    second = make_sheets(made(attributes=("sports", "science")), tmp_path / "b", n_texts=40)
    assert not set(first["id"]) & set(second["id"])


def test_one_system_is_rated_alone(sheets):
    make_sheets(made(arms=ARMS[:1]), sheets, n_texts=10)
    answers = read_answers(sheets / "key.csv", [fill(sheets, "Ann", lambda *_: 3)])
    assert human_table(answers)["n"].tolist() == [10, 10, 10]


def test_columns_of_the_sheets_own_get_another_name_in_the_key(sheets):
    key = make_sheets(made().assign(id=range(96), fluency=1), sheets, n_texts=10)
    assert {"id of the text", "fluency of the text"} < set(key)
    assert key["id"].str.fullmatch("[b-z]{5}").all()


def nasty_samples():
    return pd.DataFrame(
        {"prompt": NASTY, "attribute": "=good", "text": NASTY, "arm": "-arm", "=1+1": None}
    )


def test_formulas_are_harmless_and_come_back(sheets):
    key = make_sheets(nasty_samples(), sheets, n_texts=len(NASTY))
    assert "'=1+1" in read_csv(sheets / "key.csv")[0], "names of columns are cells, too"
    assert "=1+1" in _read_csv(sheets / "key.csv", ())
    for name in ("sheet.csv", "key.csv"):
        cells = [cell for row in read_csv(sheets / name) for cell in row.values()]
        assert not [cell for cell in cells if re.match(r"\s*[=+\-@]|[\t\r\n]", cell)]
    assert {row["text"] for row in read_csv(sheets / "sheet.csv")} > {
        "'tis fine",
        "'+1, -1",
        "''=1",
    }
    answers = read_answers(sheets / "key.csv", [fill(sheets, "Ann", lambda *_: 3)])
    assert set(answers["arm"]) == {"-arm"}
    assert set(answers["attribute"]) == {"=good"}
    restored = answers.drop_duplicates("id").set_index("id")["prompt"].to_dict()
    assert restored == dict(zip(key["id"], key["prompt"], strict=True))
    assert set(restored.values()) == set(NASTY)


def test_the_rubric_is_beside_the_sheet(sheets):
    make_sheets(made(), sheets, n_texts=8)
    assert (sheets / "rubric.txt").read_text("utf-8") == RUBRIC


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda s: s.iloc[:0], {}, "20 texts are 0 of each of 0 arms"),
        (lambda s: s.assign(arm="one"), {}, "two texts of arm 'one' continue prompt 'Prompt 0' for 'positive' as"),
        (lambda s: s, {"seed": -1}, "seed: input should be greater than or equal to 0, found -1"),
        (lambda s: s, {"n_texts": 1}, "1 texts are 0 of each of 2 arms"),
        (lambda s: s, {"n_texts": 98}, "98 texts are 49 of each of 2 arms, which have 48 of the same prompt, attribute and sample; give 2 to 96"),
        (lambda s: s[10:], {"n_texts": 90}, "90 texts are 45 of each of 2 arms, which have 38"),
    ],
)  # fmt: skip
def test_samples_that_make_no_sheet(sheets, change, settings, message):
    with pytest.raises(Lapa2Error, match=re.escape(message)):
        make_sheets(change(made()), sheets, **{"n_texts": 20, **settings})
    assert not sheets.exists()


def test_sheets_in_use_are_not_replaced(sheets):
    make_sheets(made(), sheets, n_texts=40)
    before = {path.name: path.read_bytes() for path in sheets.iterdir()}
    with pytest.raises(RunError, match="exists"):
        make_sheets(made(), sheets, n_texts=40, seed=2)
    assert {path.name: path.read_bytes() for path in sheets.iterdir()} == before


def test_filled_sheets_come_back(sheets):
    key = make_sheets(made(), sheets, n_texts=40)

    def rating(i, _, metric):
        return 1 + (i + METRICS.index(metric)) % 5

    files = [
        fill(sheets, "Ann", rating),
        fill(sheets, "Bo; B", lambda *a: f" {rating(*a)}.0", "b.csv", delimiter=";"),
        fill(
            sheets,
            "Cy",
            lambda i, *a: "" if i == 3 else rating(i, *a),
            "c.csv",
            delimiter="\t",
            rows=slice(38),
        ),
    ]
    answers = read_answers(sheets / "key.csv", files)
    assert list(answers) == ["id", "arm", "prompt", "attribute", "annotator", "metric", "rating"]
    assert len(answers) == 3 * 40 * 3
    assert set(answers["annotator"]) == {"Ann", "Bo; B", "Cy"}
    row_of, arm = (
        dict(zip(key["id"], key.index, strict=True)),
        dict(zip(key["id"], key["arm"], strict=True)),
    )
    assert (answers["arm"] == answers["id"].map(arm)).all()
    missing = answers["rating"].isna()
    assert (
        missing == ((answers["annotator"] == "Cy") & answers["id"].map(row_of).isin([3, 38, 39]))
    ).all()
    expected = [rating(row_of[row.id], row.id, row.metric) for row in answers.itertuples()]
    assert (answers["rating"][~missing] == pd.Series(expected)[~missing]).all()
    table = human_table(answers)
    assert table.groupby("metric")["n"].sum().to_dict() == dict.fromkeys(METRICS, 117)
    assert table.groupby("metric")["unanswered"].sum().to_dict() == dict.fromkeys(METRICS, 3)


def test_a_second_file_may_complete_the_first(sheets):
    make_sheets(made(), sheets, n_texts=10)
    half = fill(sheets, "Ann", lambda i, *_: 4 if i < 5 else "", "half.csv")
    rest = fill(sheets, "Ann", lambda i, *_: 2 if i >= 5 else "", "rest.csv")
    answers = read_answers(sheets / "key.csv", [half, rest])
    assert answers["rating"].value_counts().to_dict() == {4.0: 15, 2.0: 15}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: "bbbbb" + line[5:], "relevance of id bbbbb is '3'; KEY has no such id; give"),
        (lambda line: line.replace(",3,4,5,", ",3,6,5,"), "fluency of id ID is '6'; allowed: 1, 2, 3, 4, 5"),
        (lambda line: line.replace(",3,4,5,", ",0,4,5,"), "relevance of id ID is '0'"),
        (lambda line: line.replace(",3,4,5,", ",3,4,4.5,"), "topicality of id ID is '4.5'"),
        (lambda line: line.replace(",3,4,5,", ",3,good,5,"), "fluency of id ID is 'good'"),
        (lambda line: line.replace(",Ann", ", "), "relevance of id ID is '3'; its annotator is ''"),
        (lambda line: f"{line}\r\n{line}", "relevance of id ID is '3'; its annotator has answered it before"),
        (lambda line: line.replace("positive", "a,b,positive", 1), "Expected 8 fields in line 3, saw 10"),
        (lambda line: f'"{line}', "Error tokenizing data"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_read(sheets, change, message):
    make_sheets(made(attributes=("positive",)), sheets, n_texts=10)
    file = fill(
        sheets,
        "Ann",
        lambda i, id, metric: {"relevance": 3, "fluency": 4, "topicality": 5}[metric],
    )
    lines = file.read_bytes().decode().split("\r\n")
    named = lines[2][:5]
    lines[2] = change(lines[2])
    file.write_bytes("\r\n".join(lines).encode())
    key = sheets / "key.csv"
    message = message.replace("ID", named).replace("KEY", str(key))
    with pytest.raises(ScoringError, match=f"{file}: .*{re.escape(message)}"):
        read_answers(key, [file])


def test_one_person_twice(sheets):
    make_sheets(made(), sheets, n_texts=10)
    first = fill(sheets, "Ann", lambda *_: 3, "first.csv")
    second = fill(sheets, "Ann", lambda *_: 4, "second.csv")
    with pytest.raises(
        ScoringError,
        match=r"second\.csv: .* is '4'; its annotator has answered it before",
    ):
        read_answers(sheets / "key.csv", [first, second])


def test_files_that_are_no_answers(sheets):
    make_sheets(made(), sheets, n_texts=10)
    key, sheet = sheets / "key.csv", sheets / "sheet.csv"
    with pytest.raises(ScoringError, match=r"sheet\.csv has no rating"):
        read_answers(key, [sheet])
    with pytest.raises(ScoringError, match="give the raters' files"):
        read_answers(key, [])
    with pytest.raises(ScoringError, match=r"cannot read .*none\.csv: .*No such file"):
        read_answers(key, [sheets / "none.csv"])
    with pytest.raises(ScoringError, match=r"sheet\.csv has no column 'arm'; found id, attribute"):
        read_answers(sheet, [sheet])
    (sheets / "latin.csv").write_bytes(
        "id,relevance,fluency,topicality,annotator\r\na,1,1,1,Åse".encode("latin-1")
    )
    with pytest.raises(ScoringError, match=r"latin\.csv: line 2: .* are not UTF-8"):
        read_answers(key, [sheets / "latin.csv"])
    (sheets / "empty.csv").write_bytes(b"")
    with pytest.raises(ScoringError, match=r"cannot read .*empty\.csv: No columns"):
        read_answers(key, [sheets / "empty.csv"])


def test_blank_lines_are_no_answers(sheets):
    make_sheets(made(), sheets, n_texts=10)
    file = fill(sheets, "Ann", lambda *_: 3)
    file.write_text(file.read_text(encoding="utf-8") + ",,,,,,,\n\n", encoding="utf-8")
    assert len(read_answers(sheets / "key.csv", [file])) == 30


def test_means_are_over_all_ratings():
    answers = pd.concat(
        [
            answered([[1, 2, 3], [3, np.nan, 5]], arm="plain", prompts=[0, 1]),
            answered([[4, 4, 4], [5, 5, 2]], arm="boosted", prompts=[0, 1]).assign(
                id=lambda a: "b" + a["id"]
            ),
        ]
    )
    table = human_table(answers)
    assert list(zip(table["arm"], table["metric"], strict=True)) == list(
        itertools.product(("boosted", "plain"), METRICS)
    )
    fluency = table.set_index(["arm", "metric"]).loc[("plain", "fluency")]
    assert fluency["mean"] == pytest.approx(14 / 5)
    assert fluency[["n", "prompts", "unanswered"]].tolist() == [5, 2, 1]
    # Two prompts, 2.4 off their share of the mean: error sqrt(2 * 2 * 2.4^2) / 5 = 0.96, times t(1
    # degree, 97.5 %) = 12.706: more than the scale of 1 to 5 has.
    assert (fluency["low"], fluency["high"]) == (1, 5)
    fives = human_table(answered([[5, 5, 5]] * 4, prompts=[0, 1, 2, 3])).iloc[0]
    assert fives["low"] == pytest.approx(5 - 4 * (1 - 0.05**0.25)), "4 prompts do not show them all"
    assert fives["high"] == 5


def test_intervals_resample_prompts():
    rng = np.random.default_rng(3)
    prompts = np.repeat(np.arange(20), 5)
    level = np.clip(3 + rng.normal(0, 1, 20), 1, 5)[prompts]
    ratings = np.clip(np.round(level[:, None] + rng.normal(0, 0.5, (100, 3))), 1, 5)
    row = human_table(answered(ratings, prompts=prompts)).iloc[0]
    expected = mean_interval(ratings.ravel(), np.repeat(prompts, 3))
    assert row["mean"] == pytest.approx(ratings.mean())
    assert (row["low"], row["high"]) == pytest.approx((expected.low, expected.high))
    assert 1 <= row["low"] < row["mean"] < row["high"] <= 5
    naive = mean_interval(ratings.ravel(), np.arange(300))
    assert row["high"] - row["low"] > 2 * (naive.high - naive.low)


def test_an_arm_without_ratings_has_no_mean():
    table = human_table(answered([[np.nan], [np.nan]]))
    assert table[["mean", "low", "high"]].isna().all(axis=None)
    assert table[["n", "unanswered"]].to_numpy().tolist() == [[0, 2]] * 3


def test_one_prompt_tells_no_spread():
    row = human_table(answered([[1, 2], [3, 4]], prompts=[0, 0])).iloc[0]
    assert row["mean"] == 2.5
    assert np.isnan([row["low"], row["high"]]).all()


def test_texts_without_a_prompt_are_no_one_prompt():
    ratings = [[1, 2], [3, 4], [5, 5]]
    apart = human_table(answered(ratings)).drop(columns="arm")
    nameless = human_table(answered(ratings).assign(prompt="")).drop(columns="arm")
    assert nameless.equals(apart)
    assert set(nameless["prompts"]) == {3}


def alpha_of(ratings):
    return krippendorff_alpha(rating_pairs(ratings).sum(axis=0))


def brute_force(ratings):
    """Alpha as 1 - observed / expected disagreement, pair by pair; distances count the ratings in
    between."""
    texts = [[int(r) for r in row if not np.isnan(r)] for row in ratings]
    texts = [row for row in texts if len(row) > 1]
    everything = [rating for row in texts for rating in row]

    def distance(a, b):
        low, high = min(a, b), max(a, b)
        between = sum(low <= rating <= high for rating in everything)
        return (between - (everything.count(a) + everything.count(b)) / 2) ** 2 if a != b else 0

    observed = sum(
        sum(distance(a, b) for a, b in itertools.permutations(row, 2)) / (len(row) - 1)
        for row in texts
    )
    expected = sum(distance(a, b) for a, b in itertools.permutations(everything, 2)) / (
        len(everything) - 1
    )
    return 1 - observed / expected


KRIPPENDORFF = np.array(
    [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, np.nan, np.nan, np.nan],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, np.nan, 3],
        [np.nan, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, np.nan],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, np.nan],
    ]
).T


def test_alpha_of_the_published_example():
    assert alpha_of(KRIPPENDORFF) == pytest.approx(0.815, abs=5e-4)
    assert alpha_of(KRIPPENDORFF) == pytest.approx(brute_force(KRIPPENDORFF), rel=1e-12)


def test_alpha_by_hand():
    assert alpha_of(np.array([[1.0, 1, 1], [4, 4, 4], [5, 5, 5]])) == 1
    # Two who always say the opposite: o_12 = o_21 = 2, n_1 = n_2 = 2, n = 4, so 1 - 3 * 4 delta / 8
    # delta.
    assert alpha_of(np.array([[1.0, 2], [2, 1]])) == pytest.approx(-0.5)
    assert np.isnan(alpha_of(np.full((4, 2), 3.0)))
    assert np.isnan(alpha_of(np.array([[1.0, np.nan], [np.nan, 2]])))


def test_alpha_is_the_brute_force_one():
    rng = np.random.default_rng(0)
    for _ in range(30):
        ratings = rng.integers(1, 6, (12, 4)).astype(float)
        ratings[rng.random(ratings.shape) < 0.3] = np.nan
        assert alpha_of(ratings) == pytest.approx(brute_force(ratings), rel=1e-12)


def test_agreement_per_metric():
    answers = answered(KRIPPENDORFF)
    by_metric = annotator_agreement(answers).set_index("metric")
    assert list(by_metric.index) == list(METRICS)
    row = by_metric.loc["fluency"]
    assert row["alpha"] == pytest.approx(0.815, abs=5e-4)
    assert row["low"] < row["alpha"] < row["high"] <= 1
    assert row[["n", "texts", "annotators"]].tolist() == [
        40,
        11,
        4,
    ]  # the twelfth text has one rating
    # Eight texts agree throughout (28 ratings), two in three of six pairs (4 ratings each), one
    # never (4 ratings).
    assert row["exact"] == pytest.approx((28 + 2 * 4 / 2) / 40)
    assert by_metric["alpha"].nunique() == 1
    changed = answers["rating"].where(
        (answers["metric"] != "fluency") | (answers["annotator"] != "name0"), 5
    )
    disagreeing = annotator_agreement(answers.assign(rating=changed)).set_index("metric")
    assert disagreeing.loc["fluency", "alpha"] < 0.5
    assert disagreeing.loc["relevance"].equals(by_metric.loc["relevance"])


def test_perfect_agreement_and_none():
    perfect = annotator_agreement(answered(np.tile([[1.0], [2], [3], [4]] * 2, 3))).iloc[0]
    assert perfect[["alpha", "low", "high", "exact"]].tolist() == [1, 1, 1, 1]
    few = annotator_agreement(answered(np.tile([[1.0], [2], [3], [4]], 3))).iloc[0]
    assert few[["alpha", "exact"]].tolist() == [1, 1]
    assert few[["low", "high"]].isna().all(), "fewer than 8 texts cannot be resampled"
    rng = np.random.default_rng(5)
    chance = annotator_agreement(answered(rng.integers(1, 6, (200, 3)))).iloc[0]
    assert chance["low"] < 0 < chance["high"]
    assert chance["high"] - chance["low"] < 0.3
    assert chance["exact"] == pytest.approx(
        0.2, abs=0.06
    )  # 600 dependent pairs: three standard errors


def test_fewer_texts_tell_less():
    rng = np.random.default_rng(6)
    level = rng.integers(1, 6, 200)
    ratings = np.clip(level[:, None] + rng.integers(-1, 2, (200, 3)), 1, 5)
    few, many = (annotator_agreement(answered(ratings[:n])).iloc[0] for n in (20, 200))
    assert few["high"] - few["low"] > 2 * (many["high"] - many["low"])


def test_one_annotator_has_nothing_to_agree_with():
    row = annotator_agreement(answered([[1], [2], [3]])).iloc[0]
    assert np.isnan(row[["alpha", "low", "high", "exact"]].to_numpy(dtype=float)).all()
    assert row[["n", "texts", "annotators"]].tolist() == [0, 0, 0]
