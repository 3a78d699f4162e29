"""The study of exact messages: its chats, its grid, and the shares of answers that follow."""

from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.instructions.analyse import chat
from analyses.messages import analyse, chats, draw, loop, measures, reader
from lapa2_interp import Layout, circuits, generate, load_model
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.circuits.hidden_span import forced_logits
from lapa2_interp.errors import DataError
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.serving.engine import Engine
from lapa2_interp.tasks.exact_messages import Message, exact_messages, messages_of

SIX = {"first words", "one sentence", "few words", "language", "no word", "list"}


@pytest.mark.parametrize("name", chats.STAGES)
def test_the_chats_of_a_message_have_different_questions(name):
    stage, messages = chats.STAGES[name], chats.messages_in(name, SIX)
    scripts = [text.splitlines() for text in chats.conversations(stage, messages, stage.turns)]
    assert all(len(script) == 1 + stage.turns for script in scripts)
    of_message = Counter(script[0] for script in scripts)
    assert of_message == {message.text: len(stage.chats) for message in messages}
    questions = exact_messages()["questions"]
    asked = [[next(q for q in questions if line.endswith(q)) for line in s[1:]] for s in scripts]
    assert all(len(set(own)) == stage.turns for own in asked), "no question comes twice in a chat"
    for first in range(0, len(scripts), len(stage.chats)):
        firsts = {own[0] for own in asked[first : first + len(stage.chats)]}
        assert len(firsts) == len(stage.chats)
    plain = [line for script in scripts for line in script[1:] if line in questions]
    assert len(plain) == len(scripts) * stage.turns or stage.against


def test_the_kinds_of_the_test_are_those_of_the_pilot():
    assert chats.kinds_of("qwen2.5-coder-1.5b-instruct", chats.OUT) == SIX
    assert len(chats.messages_in("test", SIX)) == 62
    assert not set(chats.FOR_HEADS) & {message.text for message in messages_of("test")}
    assert set(chats.FOR_HEADS) <= {message.text for message in messages_of("choose")}


def test_chance_is_that_of_messages_that_were_not_given():
    one = Message("one sentence", "Answer in one sentence.", "sentences", (1,))
    word = Message("no word", 'Never write the word "well".', "avoids", ("well",))
    answers = [
        "Water it well before you go.",
        "Water it all. Then go away.",
        "Water it all and go.",
    ]
    texts = pd.DataFrame({"continuation": answers * 2, "turn": [1] * 3 + [2] * 3})
    table = analyse.chance(texts, [one, word]).set_index(["kind", "turn"])
    assert table.loc[("one sentence", 1), "mean"] == pytest.approx(200 / 3)
    assert table.loc[("no word", 2), "mean"] == pytest.approx(200 / 3)
    assert table.loc[("all", 1), ["messages", "answers"]].tolist() == [2, 3]


def test_in_a_third_of_the_chats_users_ask_against_the_message():
    stage, messages = chats.STAGES["test"], chats.messages_in("test", SIX)
    forms = [form.format(question="") for form in exact_messages()["against"]]
    scripts = [text.splitlines() for text in chats.conversations(stage, messages, 16)]
    against = [
        [any(line.startswith(form) for form in forms) for line in script[1:]] for script in scripts
    ]
    assert 0.3 < sum(map(any, against)) / len(against) < 0.36
    odd = [turn % 2 == 1 and turn >= 3 for turn in range(1, 17)]
    assert all(own in (odd, [False] * 16) for own in against)
    short = chats.conversations(stage, messages, 8)
    assert [text.splitlines() for text in short] == [script[:9] for script in scripts]


def test_the_grids_ask_every_chat_in_every_arm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tables, folder = "smollm2-135m", Path("tables"), Path("made")
    for name in ("pilot", "test"):
        chats.write_chats(name, folder / name, SIX)
    heads = pd.DataFrame({"model": model, "layer": [3, 4], "head": [1, 0]})
    arms = list(chats.FIRST_STRENGTHS)
    tuned = pd.DataFrame({"model": model, "arm": arms, "strength": [1.5, 0.5, 2, 3], "tuned": True})
    tables.mkdir()
    heads.to_csv(tables / "heads.csv")
    tuned.to_csv(tables / "strengths.csv")
    (folder / "vectors.parquet").write_text("")
    header = chats.HEADER.format(stage="test", model=model, tokens=chats.TOKENS)
    grid, file = folder / "test" / "grid.toml", tables / "answers.test.parquet"
    cells = []
    # Each call makes the next arm, and judged answers of other arms stay.
    while blocks := chats.test_blocks(model, folder / "test", tables):
        grid.write_text("\n".join([header, *blocks]))
        cells += load_grid(grid, check=False, allow_code=True).cells
        arm = analyse.arm_of(cells[-1])
        for followed in (0.0, 100.0 * len(cells)):
            analyse.add_answers(file, pd.DataFrame({"arm": [arm], "followed": followed}))
    stored = pd.read_parquet(file)
    assert stored["followed"].tolist() == [100, 200, 300, 400, 500, 600]
    assert list(stored["arm"]) == [analyse.arm_of(cell) for cell in cells] == [
        "no bias", "chosen heads", "all heads", "message repeated", "chosen heads, constant",
        "activation addition",
    ]  # fmt: skip
    assert [analyse.strength_of(cell) for cell in cells] == [0, 1.5, 0.5, 0, 2, 3]
    assert [cell.n_turns for cell in cells] == [16, 16, 8, 16, 8, 8]
    assert all(len(cell.prompts) == 124 and cell.keeps_turns for cell in cells)
    later = cells[3].task.chat.later
    repeated = [turn for turn, text in enumerate(later, start=2) if "{prompt:1}" in text]
    assert repeated == [5, 9, 13]
    bias = cells[4].active_augmentations[0]
    assert bias.bias(300, 10) == bias.bias(1000, 10) == pytest.approx(2 * np.log(30))


def test_an_answer_is_judged_by_its_own_message():
    one = Message("one sentence", "Answer in one sentence.", "sentences", (1,))
    two = Message("two sentences", "Answer in two sentences.", "sentences", (2,))
    answer = "Water it well before you go. Then rest."
    texts = pd.DataFrame(
        {"prompt": [f"{m.text}\nWhy?" for m in (one, two)], "continuation": [answer] * 2}
    )
    table = analyse.judged(texts, [one, two])
    assert list(table["followed"]) == [0.0, 100.0]
    assert list(table["kind"]) == ["one sentence", "two sentences"]
    with pytest.raises(KeyError):
        analyse.judged(texts, [one])


def test_a_kind_is_followed_by_its_first_answers():
    rows = [("a", 1, 100), ("a", 1, 0), ("a", 2, 0), ("b", 1, 0), ("b", 2, 100)]
    answers = pd.DataFrame(rows, columns=["kind", "turn", "followed"]).assign(message="m")
    table = analyse.shares(answers).set_index(["kind", "turn"])
    assert table["mean"].to_dict() == {("a", 1): 50, ("a", 2): 0, ("b", 1): 0, ("b", 2): 100}
    assert table["kind is followed"].groupby("kind").all().to_dict() == {"a": True, "b": False}


def test_what_is_seen_before_an_answer_is_that_of_a_plain_reading():
    """The effect is that of `span_effect`, the attention that of a teacher-forced text."""
    model = load_model("smollm2-135m", dtype="float32", model_class="TransformersModel")
    message, *asked = "Answer in one sentence.", "How are you?", "Why?"
    task = chat_task(chat(message, asked[0]), later=asked[1:])
    settings = {"method": {"name": "chat", "keep_turns": True}, "length": 6, "trace": "none"}
    texts = generate(model, task=task, **settings).texts()
    answers = texts.assign(prompt="\n".join([message, *asked]))
    chosen = np.array([[3, 1], [20, 4]])
    seen = measures.before_answers(model, answers, chosen)
    layout = Layout.of_chat(model.tokenizer, chat(message, asked[0]))
    written = [*answers["context"].iloc[-1], *answers["tokens"].iloc[-1]][len(layout) :]
    steps = [len(context) - len(layout) for context in answers["context"]]
    effect = circuits.span_effect(model, layout, written)[steps]
    assert seen["effect"] == pytest.approx(effect, rel=1e-3, abs=1e-6)
    trace = teacher_forced(model, layout, [written], trace="full")
    masses = trace["prefix"].to_numpy()[0, 0][steps]  # step layer head
    assert seen["attention of all heads"] == pytest.approx(masses.mean(axis=(1, 2)), rel=1e-4)
    of_heads = (masses[:, 3, 1] + masses[:, 20, 4]) / 2
    assert seen["attention of chosen heads"] == pytest.approx(of_heads, rel=1e-4)
    logits = forced_logits(model, layout, written, [])[0, steps]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert seen["entropy"] == pytest.approx(entropy.numpy(), rel=1e-4)
    last = measures.before_answers(model, answers.iloc[1:], chosen)
    for name in measures.MEASURES:
        assert last[name] == pytest.approx(seen[name][1:], rel=1e-6)


def test_a_bias_acts_in_its_own_answers_alone():
    model = load_model("smollm2-135m", dtype="float32", model_class="TransformersModel")
    said = [chat("Answer in one sentence.", asked) for asked in ("Why?", "How?", "Who are you?")]
    engine = Engine(model, keep_bytes=0)
    engine.start()
    rules = parse_recipes("lapa2:alpha=3")
    plain, mixed, biased = (
        loop.answer(engine, model, said, acts, rules, turn=1)
        for acts in ([False] * 3, [False, True, False], [True] * 3)
    )
    engine.stop()
    assert [mixed[0], mixed[2]] == [plain[0], plain[2]]
    assert mixed[1] == biased[1] != plain[1]


def test_arms_of_the_loop_act_as_often():
    made = {"alarm": [pd.DataFrame({"acts": [True, False, True, False, False]})]}
    settings = [1, [[]] * 5, made, None, None, "effect", 0.0]
    assert sum(loop.which("random", *settings)) == 2
    assert loop.which("random", *settings) == loop.which("random", *settings)
    thirds = [loop.which("every third turn", turn, [[]] * 2, *settings[2:]) for turn in (1, 3, 6)]
    assert thirds == [[False] * 2, [True] * 2, [True] * 2]
    before = pd.DataFrame({"effect": np.arange(9.0), "entropy": np.arange(9.0)})
    assert (-before["effect"] >= loop.threshold(before, "effect")).sum() == 3
    assert (before["entropy"] >= loop.threshold(before, "entropy")).sum() == 3


def test_an_alarm_rings_where_attention_is_small():
    rng, rows = np.random.default_rng(1), []
    for message, number, turn in product(range(20), range(6), range(1, 9)):
        broke, noise = int(rng.random() < 0.5), rng.normal(size=4)
        seen = dict(zip(measures.MEASURES, noise, strict=True))
        seen["attention of all heads"] -= 2 * broke
        where = {"message": f"m{message}", "chat": number, "turn": turn, "against": False}
        rows.append(where | {"keys": 40 * turn, "broke": broke} | seen)
    table = measures.alarms(pd.DataFrame(rows)).set_index("measure")
    assert table["predicts"].to_dict() == dict.fromkeys(measures.MEASURES, False) | {
        "attention of all heads": True
    }
    assert (
        table.loc["attention of all heads", "precision"] > 0.8 > table.loc["entropy", "precision"]
    )


def test_slopes_tell_turns_from_tokens():
    """Whether answers follow depends on the tokens alone, which grow faster for some messages."""
    rng, rows = np.random.default_rng(1), []
    for message, number, turn in product(range(30), range(4), range(1, 17)):
        keys = turn * (20 if message % 2 else 100)
        followed = 100.0 * (rng.random() < 1 / (1 + np.exp((keys - 500) / 150)))
        rows.append((f"m{message}", number, turn, keys, followed))
    names = ["message", "chat", "turn", "keys", "followed"]
    slopes = analyse.turns_and_tokens(pd.DataFrame(rows, columns=names))
    low, high = np.percentile(slopes[1:], [2.5, 97.5], axis=0)
    assert low[0] < 0.3
    assert high[0] > -0.3
    assert high[1] < -0.5


def answers_to_read(rng):
    """40 answers to a message of each of six kinds, of which a share of its own follows."""
    rows = []
    for kind, follow in zip(sorted(SIX), (0.1, 0.5, 0.5, 0.5, 1, 0.9), strict=True):
        for i in range(40):
            row = {"arm": "no bias", "message": f"{kind}?", "kind": kind, "chat": 0, "turn": i}
            verdict = 100.0 * (i < 40 * follow)
            rows.append(row | {"followed": verdict, "continuation": f" {kind} {i}\n"})
    return pd.DataFrame(rows).iloc[rng.permutation(len(rows))].reset_index(drop=True)


def test_a_reader_sees_all_kinds_and_no_verdict(tmp_path):
    drawn = reader.drawn(answers_to_read(np.random.default_rng(0)))
    assert len(drawn) == reader.ANSWERS
    assert not drawn.duplicated(["kind", "turn"]).any()
    sizes = drawn.groupby("kind")["followed"].agg(["size", "sum"])
    assert set(sizes["size"]) == {16, 17}
    half = sizes.loc[["first words", "language", "list"], "sum"] / 100
    assert half.between(8, 9).all(), "both verdicts where there are enough"
    first, last = sorted(SIX)[0], sorted(SIX)[4]
    assert sizes.loc[first, "sum"] == 400
    assert sizes.loc[last, "sum"] == sizes.loc[last, "size"] * 100
    reader.write_sheet(drawn, tmp_path)
    sheet = (tmp_path / "sheet.md").read_text("utf-8")
    assert sheet.count("## ") == 100
    assert "100.0" not in sheet
    assert "no bias" not in sheet


def test_agreement_is_that_of_the_labels(tmp_path):
    drawn = reader.drawn(answers_to_read(np.random.default_rng(0)))
    reader.write_sheet(drawn, tmp_path)
    labels = drawn[["number"]].assign(follows=np.where(drawn["followed"] > 0, "yes", "no"))
    labels.loc[labels.index[:7], "follows"] = np.where(drawn["followed"][:7] > 0, "no", "Yes ")
    labels.sample(frac=1, random_state=1).to_csv(tmp_path / "labels.csv", index=False)
    table = reader.agreement(reader.compared(tmp_path)).set_index("kind")
    assert table.loc["all", "agree"] == pytest.approx(93)
    assert table.loc["all", "answers"] == 100
    labels.iloc[:-1].to_csv(tmp_path / "labels.csv", index=False)
    with pytest.raises(DataError, match="must say yes or no; it has 100: nan"):
        reader.compared(tmp_path)


def test_the_figure_names_every_arm_and_kind():
    turns = {name: 16 if name in chats.LONG_ARMS else 8 for name in draw.SHOWN}
    assert set(draw.SHOWN) == set(chats.ARMS)
    rows = [
        {"arm": arm, "kind": kind, "turn": turn, "metric": metric, "mean": 50 - turn,
         "low": 40 - turn, "high": 60 - turn}
        for arm, last in turns.items() for kind in ("all", *sorted(SIX))
        for turn in range(1, last + 1) for metric in ("followed", "attention")
    ]  # fmt: skip
    chance = pd.DataFrame(
        {"kind": kind, "turn": turn, "mean": 30} for kind in ("all", *SIX) for turn in range(1, 17)
    )
    figure = draw.draw(pd.DataFrame(rows), chance)
    written = {text.get_text() for axes in figure.axes for text in axes.texts}
    assert written == {*chats.ARMS, *SIX, "chance"}


def test_tables_of_one_arm_alone_are_written(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"arm": "no bias", "message": f"{i}?", "kind": "list", "chat": chat, "turn": turn,
         "against": False, "followed": 100.0 * rng.integers(2), "n_tokens": 9, "keys": 40 * turn,
         "attention": 9 / turn, "nll": 2.0, "relevant": 100.0}
        for i in range(8) for chat in range(2) for turn in range(1, 17)
    ]  # fmt: skip
    analyse.add_answers(tmp_path / "answers.test.parquet", pd.DataFrame(rows))
    analyse.compare("a-model", tmp_path)
    assert pd.read_csv(tmp_path / "differences.csv").empty
    assert pd.read_csv(tmp_path / "costs.csv")["cost"].tolist() == [1]
    fade = pd.read_csv(tmp_path / "fade.csv").set_index(["what", "kind"])
    assert fade.loc[("attention: first turn below turn 1", "list"), "mean"] == 2
