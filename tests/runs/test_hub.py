"""A run as a data set and a card of heads: what is written, and what a hub is asked for. Nothing
leaves the machine."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from conftest import load
from huggingface_hub import DatasetCard, HfApi, metadata_load

from lapa2_interp import Selection, circuits, generate
from lapa2_interp.cli.app import main
from lapa2_interp.errors import RunError
from lapa2_interp.runs.score import score

FILES = {"README.md", "texts.parquet", "manifests.json"}


class Hub:
    """A hub that keeps what is uploaded in a folder."""

    def __init__(self, folder):
        self.folder, self.asked = Path(folder), []

    def create_repo(self, repo_id, **settings):
        self.asked.append((repo_id, settings))
        return f"https://hub.example/datasets/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, repo_type, commit_message):
        self.asked.append((repo_id, {"repo_type": repo_type, "message": commit_message}))
        for file in Path(folder_path).iterdir():
            (self.folder / file.name).write_bytes(file.read_bytes())


@pytest.fixture(scope="module")
def run():
    return generate(load("tiny-gpt2"), ["The lake", "The | book"], prefix="Very calm:", alpha=[0, 0.5], length=14)  # fmt: skip


def test_a_run_in_memory_is_a_data_set(run, tmp_path):
    folder = run.data_set().save(tmp_path / "data")
    assert {file.name for file in folder.iterdir()} == FILES
    texts, expected = pd.read_parquet(folder / "texts.parquet"), run.texts()
    for name in ("text", "prompt", "arm", "cell"):
        assert texts[name].tolist() == expected[name].tolist()
    assert [list(ids) for ids in texts["tokens"]] == [list(ids) for ids in expected["tokens"]]
    manifests = json.loads((folder / "manifests.json").read_text())
    for key in run.finished:
        assert manifests[key] == run.manifest(key).model_dump(mode="json")
    facts = metadata_load(folder / "README.md")
    assert facts["configs"] == [{"config_name": "texts", "data_files": "texts.parquet"}]
    assert facts["pretty_name"] == "Texts of tiny-gpt2"
    card = DatasetCard.load(folder / "README.md").text
    assert "| tiny-gpt2 | " in card
    assert card.count("| 2 |") == 2
    assert "- No scores." in card


def test_the_card_keeps_every_letter_of_a_model_name(run):
    name = 'ü 🙂 [x]: #1 a"b\\c\nd\t\x7f\x85\u2028\ufeff\uffff\u2066'
    data = run.data_set()
    card = replace(data, texts=data.texts.assign(model=name))._card()
    assert yaml.safe_load(card.split("---\n")[1])["pretty_name"] == f"Texts of {name}"


def test_scores_of_a_folder_go_with_it(run, tmp_path):
    saved = run.save(tmp_path / "run")
    scored = score(tmp_path / "run", scorers=["repetition"], out=tmp_path / "run" / "scores")
    folder = saved.data_set().save(tmp_path / "data")
    stored = pd.read_parquet(folder / "scores.parquet")
    assert len(stored) == len(scored.scores)
    configs = metadata_load(folder / "README.md")["configs"]
    assert {config["data_files"] for config in configs} == {"texts.parquet", "scores.parquet"}
    again = run.data_set(scored.scores).save(tmp_path / "again")
    pd.testing.assert_frame_equal(pd.read_parquet(again / "scores.parquet"), stored)


def test_a_push_is_one_private_data_set(run, tmp_path):
    hub = Hub(tmp_path)
    address = run.push_to_hub("me/lake", api=hub)
    assert address == "https://hub.example/datasets/me/lake"
    assert hub.asked == [
        ("me/lake", {"repo_type": "dataset", "private": True, "exist_ok": True}),
        ("me/lake", {"repo_type": "dataset", "message": "2 cells of lapa2_interp"}),
    ]
    assert {file.name for file in tmp_path.iterdir()} == FILES
    run.push_to_hub("me/lake", api=hub, private=False)
    assert hub.asked[2][1]["private"] is False


def test_a_card_of_heads_is_one_private_model_with_its_licence(tmp_path, monkeypatch):
    model = load("planted")
    chosen = circuits.select(model, "sentiment", heads=2)
    hub = Hub(tmp_path)
    chosen.push_to_hub("me/heads", license="CC0-1.0", api=hub)
    assert hub.asked == [
        ("me/heads", {"repo_type": "model", "private": True, "exist_ok": True}),
        ("me/heads", {"repo_type": "model", "message": "Heads of lapa2_interp"}),
    ]
    assert {file.name for file in tmp_path.iterdir()} == {"README.md", "card.json"}
    back = Selection.load(tmp_path / "card.json")
    assert back == chosen.model_copy(update={"license": "cc0-1.0"})
    assert back.augmentation() == chosen.augmentation()
    assert metadata_load(tmp_path / "README.md")["license"] == "cc0-1.0"
    page = (tmp_path / "README.md").read_text("utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith("lapa2 generate"))
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(line)[1:], "--length", "12"]) == 0
    with pytest.raises(RunError, match="the card of heads 'a/b/c' was not uploaded"):
        chosen.push_to_hub("a/b/c", license="cc0-1.0")


def test_a_hub_that_is_not_reached_is_one_sentence(run):
    """HF_HUB_OFFLINE is set in tests."""
    with pytest.raises(RunError, match="the data set 'me/lake' was not uploaded"):
        run.push_to_hub("me/lake", api=HfApi(endpoint="http://127.0.0.1:1"))
    with pytest.raises(RunError, match="'a/b/c' was not uploaded"):
        run.push_to_hub("a/b/c")


def test_a_run_without_texts_is_refused(run, tmp_path):
    from lapa2_interp.runs.run import Run

    empty = Run(None, run.listing, run.by_key)
    with pytest.raises(RunError, match="no finished cell to publish"):
        empty.data_set()
    run.data_set().save(tmp_path / "data")
    with pytest.raises(RunError):
        run.data_set().save(tmp_path / "data")
