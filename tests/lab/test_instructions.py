"""Conversations as a Latin square, and the table of planted answers."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.instructions import analyse as script
from lapa2_interp import Layout, generate, load_model
from lapa2_interp.circuits import span_effect
from lapa2_interp.errors import DataError
from lapa2_interp.methods import load_task
from lapa2_interp.tasks.instructions import benchmark

PARTS = benchmark()
SEA = {"says": "ship* sea sail* captain*"}


def test_every_question_stands_once_at_every_turn():
    scripts = script.conversations([{"text": "Be a cat."}, {"text": "Be a dog."}], list("abcd"), 4)
    assert len(scripts) == 8
    for message in ("Be a cat.", "Be a dog."):
        turns = [chat.splitlines()[1:] for chat in scripts if chat.startswith(message)]
        for of_turn in zip(*turns, strict=True):
            assert sorted(of_turn) == list("abcd")
        assert all(sorted(chat) == list("abcd") for chat in turns)


def test_rounds_have_half_of_the_rotations_and_miss_none():
    messages = [{"text": name} for name in ("Be a cat.", "Be a dog.")]
    rounds = [script.conversations(messages, list("abcd"), 4, part) for part in (1, 2)]
    assert sorted([*rounds[0], *rounds[1]]) == sorted(
        script.conversations(messages, list("abcd"), 4)
    )
    for scripts in rounds:
        assert [chat.splitlines()[0] for chat in scripts] == ["Be a cat."] * 2 + ["Be a dog."] * 2
        firsts = [chat.splitlines()[1] for chat in scripts]
        assert sorted(firsts) == list("abcd")  # every question stands once at every turn


def test_tasks_say_where_the_message_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["instructions.py", "write", "--set", "test", "--turns", "3", "--out", str(tmp_path)]
    )  # fmt: skip
    script.main()
    (first, *_) = json.loads((tmp_path / "conversations.json").read_text("utf-8"))
    message, *users = first.splitlines()
    assert len(users) == 3
    chats = {}
    for name, _ in script.tasks(PARTS["neutral"], 3):
        form = load_task(tmp_path / name).chat.filled(prompt=first)
        says = [str(turn["content"]) for turn in form.messages_after(["A", "B"])]
        chats[name.removesuffix(".toml")] = form.span, says
    q = users
    neutral = PARTS["neutral"]
    assert chats == {
        "system": ("system", [message, q[0], "A", q[1], "B", q[2]]),
        "user": (
            f"phrase:{message}",
            [neutral, f"{message} {q[0]}", "A", q[1], "B", q[2]],
        ),
        "repeated": (
            "system",
            [message, f"{message} {q[0]}", "A", f"{message} {q[1]}", "B", f"{message} {q[2]}"],
        ),
    }
    plain = json.loads((tmp_path / "neutral.json").read_text("utf-8"))
    assert [chat.splitlines()[0] for chat in plain] == [neutral] * len(PARTS["questions"])


def test_adherence_is_above_the_same_judge_on_neutral_answers():
    """Two messages of known adherence: 1 and 1/3 at first, 1/3 and 0 later; chance 1/3, 0."""
    messages = [
        {"text": "Sea.", "kind": "topic", "judge": SEA},
        {"text": "Dogs.", "kind": "topic", "judge": {"says": "dog dogs puppy bark*"}},
    ]
    answers = {
        ("Sea.", 1): "The captain sails a ship.",
        ("Sea.", 2): "A ship.",
        ("Dogs.", 1): "My dog.",
        ("Dogs.", 2): "Nothing.",
        ("Plain.", 1): "A ship of mine.",
        ("Plain.", 2): "Nothing.",
    }
    rows = [
        {"prompt": f"{message}\nq{at}\nq{1 - at}", "turn": turn, "continuation": answer}
        for (message, turn), answer in answers.items()
        for at in range(2)
    ]
    texts = pd.DataFrame(rows).assign(family="baseline", top_k=10, cell="c")
    answers = script.judged_answers(texts, messages, "Plain.")
    assert answers["question"].tolist() == ["q0", "q1", "q1", "q0"] * 2
    nlls = dict(zip(answers["message"].unique(), (2.0, 3.0), strict=True))
    answers["nll"] = answers["message"].map(nlls) + 0.5 * (answers["turn"] == 2)
    answers["ln cost"] = script.costs(answers)
    answers["first"], answers["relevant"] = answers["questions"].str[1].astype(int), 1.0
    table = script.adherence(answers, ["family"])
    mean = table.set_index(["turn", "measure"])["mean"]
    assert mean["1", "adherence"] == pytest.approx(2 / 3)
    assert mean["1", "chance"] == pytest.approx(1 / 6)
    assert mean["2", "above"] == pytest.approx(1 / 6)
    assert mean["1 to 2", "fall"] == pytest.approx(1 / 6 - 1 / 2)
    assert mean["1", "ln cost"] == pytest.approx(0)  # both adhere at first: 2.5 in the mean
    assert mean["2", "ln cost"] == pytest.approx(0.5)


def test_the_cost_is_read_after_message_and_question_alone(monkeypatch):
    model = load_model("tiny-gpt2", dtype="float64")
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    answers = pd.DataFrame(
        {"message": "Be a cat.", "question": "Who are you?", "tokens": [[5, 6, 7], [], [9]]}
    )
    value, none, short = script.nll(model, answers)  # rows of two lengths in one pass
    assert script.nll(model, answers.iloc[2:]) == [pytest.approx(short)]
    assert script.nll(model, answers.assign(question="What?"))[0] != value
    ids = model.tokenizer("[system]Be a cat.[user]Who are you?[assistant]").input_ids
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, 5, 6]]))[0, -3:]
    assert value == pytest.approx(-float(logits.log_softmax(-1)[[0, 1, 2], [5, 6, 7]].mean()))
    assert np.isnan(none)


def test_ways_are_compared_at_equal_cost():
    """Planted curves: adherence at turn 8 rises with ln cost, twice as steeply for the rival; the
    message in every turn has one cost, and is compared there."""
    rng = np.random.default_rng(0)
    arms = {("baseline", 0.0): (0.0, 0.1), ("message in every user turn", 1.0): (0.15, 0.5)}
    for step in (1.0, 2.0, 3.0):
        arms["lapa2", step] = 0.1 * step, 0.1 + 0.1 * step
        arms["rival", step] = 0.1 * step, 0.1 + 0.2 * step
    rows = [
        {"family": family, "strength": step, "message": message, "first": first, "turn": turn}
        | {"top_k": 20, "sample": 0, "kind": "topic", "relevant": 1.0, "nll": 3 + cost}
        | {"above": (late if turn == 8 else 0.6) + noise[message], "strict": 0.0}
        for noise in [rng.normal(scale=0.05, size=16)]
        for (family, step), (cost, late) in arms.items()
        for message in range(16)
        for first in range(4)
        for turn in (1, 4, 8)
    ]
    answers = pd.DataFrame(rows)
    answers["ln cost"] = answers["nll"] - 3
    table, arms = script.compared(answers)
    row = table.set_index(["family", "metric", "ratio"]).sort_index()
    gain = row.loc["rival", "turn 8", 1.25]
    assert gain["difference"] == pytest.approx(np.log(1.25), abs=1e-6)
    assert gain["verdict"] == "more"
    assert row.loc["rival", "fall", 1.1]["difference"] == pytest.approx(np.log(1.1), abs=1e-6)
    (own,) = table.loc[table["family"] == "message in every user turn", "ratio"].unique()
    assert own == pytest.approx(np.exp(0.15))
    there = row.loc["message in every user turn", "turn 8"].iloc[0]
    assert there["difference"] == pytest.approx(0.5 - (0.1 + 0.15), abs=1e-6)
    plain = arms.set_index(["family", "strength", "metric"])
    late = plain.loc["rival", 2.0, "turn 8"]
    assert late[["difference", "low", "high"]].to_list() == pytest.approx([0.4] * 3)
    assert late["ratio"] == pytest.approx(np.exp(0.2))
    answers = answers.assign(adherence=answers["above"], chance=0.0)
    adhered = script.adherence(answers, ["family", "strength", "top_k"])
    one = script.one_table(adhered, arms.assign(messages="all"), table)
    one = one.set_index(["family", "strength"]).loc["rival", 2.0]
    above = adhered[(adhered["family"] == "rival") & (adhered["measure"] == "above")]
    (last,) = above[(above["strength"] == 2) & (above["turn"] == "8")].itertuples()
    assert one["turn 8"] == f"{last.mean:.2f} [{last.low:.2f}, {last.high:.2f}]"
    assert one["cost"] == pytest.approx(np.exp(0.2))
    assert one["way minus all heads"] == row.loc["rival", "turn 8", 1.1]["difference"]


def test_effects_are_those_of_each_answer_in_its_chat(tmp_path, monkeypatch):
    """The effect of the second answer, read again from the chat's whole beginning as one prompt."""
    why = import_module("analyses.instructions.why")
    message = "You are a sailor. Speak of the sea."
    scripts = [f"{message}\nWho are you?\nWhat do you like?"]
    for name, text in script.tasks(PARTS["neutral"], 2):
        (tmp_path / name).write_text(text, encoding="utf-8")
    model = load_model("smollm2-135m", dtype="float32", model_class="TransformersModel")
    run = generate(
        model, scripts, method="chat", parameters={"keep_turns": True}, length=6, top_k=20,
        task=load_task(tmp_path / "system.toml"), augmentation=["none", "lapa2:alpha=0.5"],
        trace="pooled", eos="stop", dtype="float32",
    )  # fmt: skip
    texts = script.finished_texts(run)
    monkeypatch.setattr(why, "ARMS", why.ARMS[:2])
    rows = why.effects(run, texts, pd.DataFrame(columns=why.CHAT))
    assert why.effects(run, texts, rows) is rows  # nothing is read again
    assert rows["family"].tolist() == ["baseline"] * 2 + ["lapa2"] * 2
    first, last = texts[texts["family"] == "baseline"].itertuples()
    chat = [
        {"role": "system", "content": message},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": first.continuation},
        {"role": "user", "content": "What do you like?"},
    ]
    layout = Layout.of_chat(model.tokenizer, chat, span="system")
    assert list(layout.ids) == list(last.context)
    alone = 1000 * span_effect(model, layout, last.tokens).mean()
    assert rows["js"][1] == pytest.approx(alone, rel=1e-4)
    assert rows["js"].min() > 1e-4
    traced = run.trace(texts["cell"][0])["prefix"][0, 1].mean()
    assert rows["attention"][1] == pytest.approx(float(traced))
    monkeypatch.setattr(why, "ARMS", (("caa", 1.0),))
    with pytest.raises(DataError, match="the run lacks caa 1"):
        why.effects(run, texts, rows)


def test_changes_of_the_effect_are_paired_on_chats():
    """Chats differ widely, and each arm adds the same to all of them: the intervals are points."""
    why = import_module("analyses.instructions.why")
    adds = {"baseline": 0.0, "lapa2": 0.5, "head-selective": 0.25}
    rows = pd.DataFrame(
        [
            {"family": family, "message": message, "prompt": f"{message} {question}", "turn": turn}
            | {"attention": message + question + turn * added, "js": -turn * added}
            for family, added in reversed(adds.items())
            for message in range(8)
            for question in range(2)
            for turn in (1, 8)
        ]
    )
    table = why.changes(rows).set_index(["family", "against", "measure", "turn"])
    pairs = [("lapa2", "baseline"), ("head-selective", "baseline"), ("head-selective", "lapa2")]
    assert len(table) == len(pairs) * 2 * 2
    for after, before in pairs:
        for turn in (1, 8):
            added = turn * (adds[after] - adds[before])
            for measure, sign in (("attention", 1), ("js", -1)):
                row = table.loc[after, before, measure, turn]
                assert row[["difference", "low", "high"]].to_list() == pytest.approx(
                    [sign * added] * 3
                )
                assert row[["answers", "messages"]].to_list() == [16, 8]


def test_histories_are_exchanged(monkeypatch):
    """Every history is answered without and with the bias, after the earlier answers."""
    why = import_module("analyses.instructions.why")
    message = next(m["text"] for m in PARTS["message"] if m["kind"] == "persona and topic")
    asked = "\nWho are you?\nWhat do you like?"
    texts = pd.DataFrame(
        [
            {"family": family, "strength": alpha, "prompt": start + asked, "sample": 0}
            | {"turn": turn, "continuation": f"{family} {turn}", "top_k": 20}
            for family, alpha, start in (
                ("baseline", 0.0, message), ("lapa2", 0.5, message), ("baseline", 0.0, PARTS["neutral"])
            )
            for turn in (1, 2)
        ]
    )  # fmt: skip
    read = []

    def generated(model, prompt, task, augmentation, **settings):
        read.append((prompt, [turn["content"] for turn in task.chat.messages]))
        made = pd.DataFrame({"arm": ["baseline", "lapa2"], "continuation": ["The sea.", "No."]})
        return SimpleNamespace(texts=lambda: made)

    monkeypatch.setattr(why, "generate", generated)
    monkeypatch.setattr(why, "load_model", lambda *_, **__: None)
    table = why.crossed(texts, PARTS, 0.5)
    said = ["{prefix}", "Who are you?"]
    assert read == [
        ("What do you like?", [*said, "baseline 1", "{prompt}"]),
        ("What do you like?", [*said, "lapa2 1", "{prompt}"]),
    ]
    assert table[["history", "answer"]].to_numpy().tolist() == [
        [history, arm] for history in ("baseline", "lapa2") for arm in ("baseline", "lapa2")
    ]
