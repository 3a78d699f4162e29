"""The study of exact messages: its chats, its grid, and the shares of answers that follow."""

import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from analyses.messages import chats
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.tasks.exact_messages import Message, exact_messages, messages_of


def test_the_chats_of_a_message_have_different_questions():
    messages = messages_of("pilot")
    scripts = [text.splitlines() for text in chats.conversations(messages, 2, 4)]
    assert Counter(script[0] for script in scripts) == {message.text: 4 for message in messages}
    questions = set(exact_messages()["questions"])
    for message in messages:
        asked = [script[1:] for script in scripts if script[0] == message.text]
        assert len({question for own in asked for question in own}) == 8
        assert set(asked[0]) <= questions
    firsts = Counter(script[1] for script in scripts)
    assert max(firsts.values()) - min(firsts.values()) <= 4, "questions are used alike"


def test_the_grid_asks_every_chat(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chats.write("pilot", "smollm2-135m", Path("made"))
    (cell,) = load_grid("made/grid.toml", check=False).cells
    assert list(cell.prompts) == json.loads(Path("made/conversations.json").read_text())
    assert cell.length == chats.TOKENS


def test_an_answer_is_judged_by_its_own_message():
    one = Message("one sentence", "Answer in one sentence.", "sentences", (1,))
    two = Message("two sentences", "Answer in two sentences.", "sentences", (2,))
    answer = "Water it well before you go. Then rest."
    texts = pd.DataFrame(
        {"prompt": [f"{m.text}\nWhy?" for m in (one, two)], "continuation": [answer] * 2}
    )
    table = chats.judged(texts, [one, two])
    assert list(table["followed"]) == [0.0, 100.0]
    assert list(table["kind"]) == ["one sentence", "two sentences"]
    with pytest.raises(KeyError):
        chats.judged(texts, [one])


def test_a_kind_is_followed_by_its_first_answers():
    rows = [("a", 1, 100), ("a", 1, 0), ("a", 2, 0), ("b", 1, 0), ("b", 2, 100)]
    answers = pd.DataFrame(rows, columns=["kind", "turn", "followed"]).assign(message="m")
    table = chats.shares(answers).set_index(["kind", "turn"])
    assert table["mean"].to_dict() == {("a", 1): 50, ("a", 2): 0, ("b", 1): 0, ("b", 2): 100}
    assert table["kind is followed"].groupby("kind").all().to_dict() == {"a": True, "b": False}
