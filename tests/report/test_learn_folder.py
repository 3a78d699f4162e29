"""`lapa2 learn`: pairs of a task or of a table, the card, the page, and going on after a stop."""

import shlex

import numpy as np
import pandas as pd
import pytest
from conftest import load

from lapa2_interp import Selection, load_run
from lapa2_interp.bias.augmentation import active_augmentations
from lapa2_interp.cli.app import main
from lapa2_interp.errors import CircuitError, DataError, RunError
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.planted import NEGATIVE, POSITIVE, PROMPTS, answer_key
from lapa2_interp.report.learning import COLUMNS, learn_in_folder, read_pairs, written_pairs
from lapa2_interp.scoring.scorer import CLASSIFIERS

KIND = "TransformersModel"
SHORT = {"neutral": "Very:", "steps": 10, "check": 5, "rate": 0.2}


def table_of_pairs(**columns):
    rows = [
        {"prompt": prompt, "wanted": f" is{good}", "unwanted": f" is{bad}"}
        for i, prompt in enumerate(PROMPTS)
        for good, bad in [(POSITIVE[i % 6], NEGATIVE[i % 6])]
    ]
    return pd.DataFrame(rows).assign(**columns)


def test_pairs_of_a_table(tmp_path):
    table_of_pairs(text=" is it").to_csv(tmp_path / "pairs.csv", index=False)
    learned = learn_in_folder(
        load("planted", model_class=KIND), tmp_path / "out", pairs=tmp_path / "pairs.csv",
        prefix="Very positive:", **SHORT,
    )  # fmt: skip
    key = answer_key("planted").heads
    assert learned.strengths[key["carrier"]] > 0 > learned.strengths[key["suppressor"]]
    card = Selection.load(tmp_path / "out" / "card.json")
    assert card.augmentation() == learned.augmentation()
    assert card.task == {"Very positive:": "Very positive:"}
    used = pd.read_csv(tmp_path / "out" / "pairs.csv")
    assert list(used) == list(COLUMNS)
    assert set(used["text"]) == {" is it"}
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "Strengths of heads in planted" in page
    assert "nats a token" in page
    layer, head = key["carrier"]
    row = (f"<td>{layer}</td>", f"<td>{head}</td>", f"{learned.strengths[key['carrier']]:.3f}</td>")
    assert all(cell in page for cell in row)


def test_pairs_of_a_task_are_of_opposite_attributes():
    task = load_task("sentiment")
    table = written_pairs(load("planted", model_class=KIND), task, PROMPTS[:12], 8, 3, CLASSIFIERS)
    assert set(table["prefix"]) == {"Very positive:", "Very negative:"}
    for _, both in table.groupby("prompt"):
        one, second = both.to_dict("records")
        assert (one["wanted"], one["unwanted"]) == (second["unwanted"], second["wanted"])
        assert one["prefix"] != second["prefix"]


@pytest.mark.long
def test_the_command_goes_on_and_its_card_steers(tmp_path, capsys):
    file, out = tmp_path / "pairs.csv", tmp_path / "out"
    table_of_pairs(prefix="Very positive:").to_csv(file, index=False)
    line = f"learn planted --pairs {file} --out {out} --neutral Very: --rate 0.2 --tokens 4"
    assert main([*line.split(), "--steps", "10"]) == 0
    first = pd.read_csv(out / "history.csv")
    assert main([*line.split(), "--steps", "20"]) == 0
    both = pd.read_csv(out / "history.csv")
    pd.testing.assert_frame_equal(both.head(len(first)), first)
    assert both["step"].max() == 20
    printed = capsys.readouterr().out
    assert "heads with a strength, from 12 pairs; on 3 held-out pairs" in printed
    steer = shlex.split(printed.splitlines()[-1].partition("to steer: lapa2 ")[2])
    assert main([*steer, "--length", "12"]) == 0
    (cell,) = load_run(out / "steered").by_key.values()
    (rule,) = active_augmentations(cell.augmentation)
    assert rule == Selection.load(out / "card.json").augmentation()


def test_a_folder_of_other_pairs_is_refused(tmp_path):
    model, file = load("planted", model_class=KIND), tmp_path / "pairs.csv"
    table = table_of_pairs(prefix="Very positive:", text=" is it")
    table.to_csv(file, index=False)
    learn_in_folder(model, tmp_path / "out", pairs=file, **SHORT)
    before = (tmp_path / "out" / "card.json").read_bytes()
    table.assign(text=" is on").to_csv(file, index=False)
    with pytest.raises(RunError, match="has results of another pairs"):
        learn_in_folder(model, tmp_path / "out", pairs=file, **SHORT)
    with pytest.raises(RunError, match="has results of another"):
        learn_in_folder(model, tmp_path / "out", prompts=list(PROMPTS), task="topic", **SHORT)
    assert (tmp_path / "out" / "card.json").read_bytes() == before


def test_a_result_without_heads_is_a_page_and_no_card(tmp_path):
    model, file = load("planted", model_class=KIND), tmp_path / "pairs.csv"
    table_of_pairs(prefix="Very positive:", text=" is it").to_csv(file, index=False)
    with pytest.raises(CircuitError, match="no head has a strength: .* a smaller cost or sparsity"):
        learn_in_folder(model, tmp_path / "out", pairs=file, **SHORT, sparsity=3)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "history.csv", "learn.pt", "pairs.csv", "pairs.json", "report.html",
    }  # fmt: skip


def test_an_attribute_that_is_never_written_is_told(monkeypatch):
    monkeypatch.setattr(
        "lapa2_interp.report.learning.score_texts",
        lambda texts, asked, *rest: pd.DataFrame(
            {"value": np.tile(texts["attribute"] == "positive", len(asked))}
        ),
    )
    with pytest.raises(DataError, match="a text of each attribute for 0 prompts of 9"):
        written_pairs(
            load("planted", model_class=KIND),
            load_task("sentiment"),
            PROMPTS[:9],
            4,
            1,
            CLASSIFIERS,
        )


def test_what_is_wrong_is_told_before_texts_are_written(tmp_path, monkeypatch):
    def writes(*args, **settings):
        pytest.fail("texts are written")

    monkeypatch.setattr("lapa2_interp.report.learning.write_texts", writes)
    half = load("planted", "bfloat16", KIND)
    with pytest.raises(CircuitError, match="gradients in bfloat16 are mostly rounding"):
        learn_in_folder(half, tmp_path, prompts=list(PROMPTS))
    model = load("planted", model_class=KIND)
    for settings, option in (
        ({"prompts": list(PROMPTS), "prefix": "Very positive:"}, "prefix"),
        ({"pairs": "pairs.csv", "task": "topic"}, "task"),
        ({"pairs": "pairs.csv", "texts": 3}, "texts"),
    ):
        with pytest.raises(RunError, match=f"{option} says nothing of .*; leave it out"):
            learn_in_folder(model, tmp_path, **settings)


def test_refusals(tmp_path):
    model = load("planted", model_class=KIND)
    for both in ({}, {"prompts": ["The lake"], "pairs": "pairs.csv"}):
        with pytest.raises(RunError, match="takes prompts or pairs, and one of the two"):
            learn_in_folder(model, tmp_path, **both)
    file = tmp_path / "pairs.csv"
    table_of_pairs().to_csv(file, index=False)
    with pytest.raises(DataError, match="has no column prefix; .*One prefix for all is prefix"):
        read_pairs(file)
    table_of_pairs(prefix="Very positive:").to_csv(file, index=False)
    with pytest.raises(DataError, match="has a column prefix; leave out prefix"):
        read_pairs(file, "Very negative:")
    table = table_of_pairs(prefix="Very positive:", text=" is it")
    table.head(0).to_csv(file, index=False)
    with pytest.raises(DataError, match="has no rows; give a pair for each of at least 8 prompts"):
        read_pairs(file)
    table.assign(wanted=[*table["wanted"][:3], " ", *table["wanted"][4:]]).to_csv(file, index=False)
    with pytest.raises(DataError, match="has no wanted in row 4 below the names of its columns"):
        read_pairs(file)
    pd.concat([table, table.head(1).assign(text=" is on")]).to_csv(file, index=False)
    with pytest.raises(DataError, match="several texts of the prompt 'Once upon a time'"):
        read_pairs(file)
    with pytest.raises(DataError, match=r"cannot read .*none.csv"):
        read_pairs(tmp_path / "none.csv")
    with pytest.raises(DataError, match="a text of each attribute for 2 prompts of 2"):
        written_pairs(model, load_task("sentiment"), PROMPTS[:2], 1, 1, CLASSIFIERS)
