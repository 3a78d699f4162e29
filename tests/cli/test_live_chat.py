"""A chat whose lines come from a script: its answers, and how its span fades."""

import io
import json

import numpy as np
import pytest
import torch
from conftest import load

from lapa2_interp import Augmentation, Layout, augmented, generate
from lapa2_interp.cli.app import main
from lapa2_interp.cli.live_chat import FADE, SYSTEM
from lapa2_interp.errors import MethodError, TraceError
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.report import chat_fade

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LATER = ("And snow?", "And hail?")


@pytest.fixture
def chatting(monkeypatch):
    """A tiny model with a chat template; its tokens are bytes."""
    model = load("tiny-llama", "float64")
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr("lapa2_interp.models.load.load_model", lambda *_, **__: model)
    return model


@pytest.fixture
def chat(chatting, monkeypatch, capsys):
    """Runs `lapa2 chat` with lines of input: its exit code, what it printed, and its errors."""

    def run(*lines, options=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", "--length", "3", *options])
        printed, beside = capsys.readouterr()  # beside errors there is progress, after a while
        errors = [line for line in beside.splitlines() if line.startswith("lapa2: ")]
        return code, printed, "\n".join(errors)

    return run


def answers(printed):
    return [json.loads(line) for line in printed.splitlines()]


def messages(system=SYSTEM):
    return [{"role": "system", "content": system}, {"role": "user", "content": "Why?"}]


def test_a_live_chat_says_what_a_chat_of_later_messages_says(chat, chatting):
    code, printed, _ = chat("Why?", "", *LATER, options=["--json"])
    run = generate(
        chatting, method="chat", task=chat_task(messages(), later=LATER), alpha=0, length=3, eos="stop"
    )  # fmt: skip
    texts, fade = run.texts(), chat_fade(chatting, run)
    made = answers(printed)
    assert code == 0
    assert [answer["text"] for answer in made] == texts["continuation"].tolist()
    assert [answer["turn"] for answer in made] == fade["turn"].tolist() == [1, 2, 3]
    assert [answer["keys"] for answer in made] == [*map(len, texts["context"])]
    for name in FADE:
        np.testing.assert_allclose([answer[name] for answer in made], fade[name], atol=1e-6)


def test_a_command_changes_the_bias_of_later_answers(chat):
    _, printed, errors = chat("Why?", "/alpha 0.5", "And snow?", "/alpha 0", "And hail?", "/quit", "No",
                              options=["--json"])  # fmt: skip
    assert not errors
    made = answers(printed)
    assert [[rule["alpha"] for rule in answer["augmentation"]] for answer in made] == [
        [],
        [0.5],
        [],
    ]
    _, printed, _ = chat("Why?", "And snow?", "And hail?", options=["--json", "--alpha", "0.5"])
    steered = answers(printed)
    assert all(answer["augmentation"][0]["alpha"] == 0.5 for answer in steered)
    assert steered[0]["attention"] > made[0]["attention"]


def test_the_line_after_an_answer_tells_the_fade(chat, chatting):
    code, printed, _ = chat("Why?", "/alpha 0.5", "And snow?", options=["--system", "Be brief."])
    assert code == 0
    lines = [line for line in printed.splitlines() if line.startswith("-- turn")]
    assert lines[0].startswith("-- turn 1, no bias, ")
    assert lines[1].startswith("-- turn 2, alpha 0.5 paper, ")
    assert "system: Be brief." in printed
    assert "alpha 0.5 paper from the next answer on" in printed
    _, of_json, _ = chat("Why?", "/alpha 0.5", "And snow?", options=["--system", "Be brief.", "--json"])  # fmt: skip
    for line, answer in zip(lines, answers(of_json), strict=True):
        assert f", {answer['keys']} keys: attention on the system message {answer['attention']:.4f}," in line  # fmt: skip
        assert f"effect of removing it {1000 * answer['effect']:.3f}/1000 nats; before the" in line
        assert line.endswith(f"entropy {answer['entropy_before']:.2f} nats")


def test_the_fade_of_a_chat_is_that_of_whole_passes(chatting):
    """Attention and effect of each answer, by hooks on one pass over the chat up to it."""
    rule = Augmentation(alpha=0.7)
    task = chat_task(messages("Be brief."), later=LATER)
    run = generate(chatting, method="chat", task=task, augmentation=rule, length=4, samples=2)
    texts, fade = run.texts(), chat_fade(chatting, run)
    cut = Augmentation(alpha=1, law="cut", phase="after_span")
    for i, row in texts.iterrows():
        layout = Layout.of_chat(chatting, messages("Be brief."))
        ids = torch.tensor([[*row["context"], *row["tokens"][:-1]]])
        first = len(row["context"]) - len(layout)
        late = rule.model_copy(update={"steps": (first, first + len(row["tokens"]))})
        predicted, patterns = [], []
        for rules in ((late,), (late, cut)):
            with torch.no_grad(), augmented(chatting, [rules], layout):
                logits, cache = chatting.run_with_cache(ids)
            predicted.append(logits[0, len(row["context"]) - 1 :].softmax(-1).numpy())
            patterns.append(
                np.mean([
                    cache[f"blocks.{layer}.attn.hook_pattern"][0, :, len(row["context"]) - 1 :, slice(*layout.prefix)].sum(-1).numpy()
                    for layer in range(chatting.cfg.n_layers)
                ])
            )  # fmt: skip
        middle = np.mean(predicted, axis=0)
        js = np.mean([(p * np.log(p / middle)).sum(-1) for p in predicted], axis=0)
        assert fade["effect"][i] == pytest.approx(js.mean(), abs=1e-12)
        assert fade["attention"][i] == pytest.approx(patterns[0], abs=1e-6)
        assert fade["effect_before"][i] == pytest.approx(js[0], abs=1e-12)
        entropy = -(predicted[0][0] * np.log(predicted[0][0])).sum()
        assert fade["entropy_before"][i] == pytest.approx(entropy, abs=1e-9)
        assert patterns[1] == 0
        assert fade["keys"][i] == len(row["context"])
    assert fade["turn"].tolist() == texts["turn"].tolist()


def test_the_fade_is_read_from_chats_of_this_model_alone(chatting):
    task = chat_task(messages(), later=LATER)
    with pytest.raises(MethodError, match="found method 'prefix'"):
        chat_fade(chatting, generate(chatting, "The lake", prefix="Very formal:", length=12))
    run = generate(chatting, method="chat", task=task, parameters={"keep_turns": True}, length=2)
    with pytest.raises(MethodError, match="found keep_turns"):
        chat_fade(chatting, run)
    run = generate(chatting, method="chat", task=task, length=2, trace="none")
    assert chat_fade(chatting, run)["attention_before"].between(0, 1).all(), "without a trace, too"
    with pytest.raises(TraceError, match="the run was made with weights"):
        chat_fade(load("random:tiny-llama", "float64"), run)


@pytest.mark.parametrize(
    ("lines", "options", "problem"),
    [
        (
            ["/alpa 1"],
            [],
            "unknown command '/alpa'; allowed: /alpha, /quit; did you mean '/alpha'?",
        ),
        (["/alpha"], [], "/alpha takes one number, found 0 words"),
        (["/alpha much"], [], "alpha: "),
        (["/alpha -1"], [], "alpha"),
        (["/alpha 1"], ["--augmentation", "none"], "--augmentation none has no alpha"),
        (["Why? " * 300], [], "exceed the context"),
        (["Say {prompt}"], [], "{prompt}"),
    ],
)
def test_a_line_that_is_wrong_is_told_and_the_chat_goes_on(chat, lines, options, problem):
    code, printed, errors = chat(*lines, "Why?", options=["--json", *options])
    assert code == 0
    (line,) = errors.splitlines()
    assert line.startswith("lapa2: ")
    assert problem in line
    (answer,) = answers(printed)
    assert answer["turn"] == 1
    assert answer["augmentation"] == []


def test_options_of_files_and_of_live_chats_are_apart(chat, tmp_path):
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(messages()), "utf-8")
    for options, problem in (
        ([str(file), "--system", "Be brief."], "--system is for a chat without a file"),
        (["--later", "Why?"], "are for the chat of a file"),
        (["--keep-turns"], "are for the chat of a file"),
        (["--samples", "2"], "are for the chat of a file"),
    ):
        code, _, errors = chat("Why?", options=options)
        assert code == 2
        assert problem in errors


def test_a_message_that_is_no_text_ends_the_chat(chat, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    assert main(["chat", "--length", "3"]) == 2
    assert "a message is not utf-8" in capsys.readouterr().err


MARKED = "Be (brief:5), (sail:0.25)or."
"""Marks on the letters 3 to 7 and 10 to 13 of "Be brief, sailor."."""
MARK_RULES = tuple(
    Augmentation(law="scale", alpha=np.log(factor), span=("prefix", at), phase="after_span")
    for factor, at in ((5, (3, 4, 5, 6, 7)), (0.25, (10, 11, 12, 13)))
)
SPANS = [["prefix", [3, 4, 5, 6, 7]], ["prefix", [10, 11, 12, 13]]]


def test_marks_of_the_system_message_are_the_bias_of_every_answer(chat, chatting):
    """As rules on these letters, which are tokens, for the message without marks."""
    code, printed, errors = chat(
        "Be (kind:5)?", "And snow?", options=["--json", "--marks", "--system", MARKED]
    )
    asked = [messages("Be brief, sailor.")[0], {"role": "user", "content": "Be (kind:5)?"}]
    run = generate(
        chatting, method="chat", task=chat_task(asked, later=["And snow?"]),
        augmentation=MARK_RULES, length=3, eos="stop",
    )  # fmt: skip
    made = answers(printed)
    assert (code, errors) == (0, "")
    assert [answer["text"] for answer in made] == run.texts()["continuation"].tolist()
    fade = chat_fade(chatting, run)
    for name in ("keys", "attention", "effect"):
        np.testing.assert_allclose([answer[name] for answer in made], fade[name], atol=1e-6)
    for answer in made:
        assert [rule["span"] for rule in answer["augmentation"]] == SPANS
    plain = generate(chatting, method="chat", task=chat_task(asked), length=3, eos="stop", alpha=0)
    assert abs(chat_fade(chatting, plain)["attention"][0] - made[0]["attention"]) > 1e-3


def test_marks_are_brackets_without_the_option(chat):
    _, printed, _ = chat("Why?", options=["--json", "--system", MARKED])
    _, of_marks, _ = chat("Why?", options=["--json", "--marks", "--system", MARKED])
    brackets = len(MARKED) - len("Be brief, sailor.")
    assert answers(printed)[0]["keys"] == answers(of_marks)[0]["keys"] + brackets
    assert answers(printed)[0]["augmentation"] == []


def test_a_message_without_marks_takes_another_bias(chat):
    """So does one whose marks are written as brackets."""
    _, printed, errors = chat("Why?", options=["--json", "--marks", "--alpha", "0.5"])
    assert not errors
    _, without, _ = chat("Why?", options=["--json", "--alpha", "0.5"])
    assert printed == without
    code, printed, _ = chat(
        "Why?", options=["--json", "--marks", "--alpha", "0.5", "--system", r"Be \(brief:5\)."]
    )
    assert code == 0
    assert answers(printed)[0]["augmentation"][0]["alpha"] == 0.5


def test_a_chat_says_how_many_marks_it_has(chat):
    code, printed, errors = chat(
        "Why?", "/alpha 0.5", "And snow?", options=["--marks", "--system", MARKED]
    )
    assert code == 0
    assert "system: Be brief, sailor." in printed
    assert "the system message has 2 marks, /quit ends" in printed
    assert "-- turn 1, 2 marks, " in printed
    assert "-- turn 2, 2 marks, " in printed
    assert "leave out /alpha, or --marks" in errors


def test_marks_of_a_file_are_read(chat, chatting, monkeypatch, tmp_path):
    monkeypatch.setattr("lapa2_interp.models.load.load_tokenizer", lambda *_: chatting.tokenizer)
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(messages(MARKED)), "utf-8")
    code, printed, _ = chat(options=[str(file), "--marks", "--json"])
    made = json.loads(printed)
    assert code == 0
    assert "".join(made["span"]["tokens"]) == "Be brief, sailor."
    assert [rule["span"] for rule in made["augmentation"]] == SPANS
    run = generate(
        chatting, method="chat", task=chat_task(messages("Be brief, sailor.")),
        augmentation=MARK_RULES, length=3, eos="stop",
    )  # fmt: skip
    assert made["texts"] == run.texts()["continuation"].tolist()


@pytest.mark.parametrize(
    ("system", "options", "problem"),
    [
        ("Be (brief:0).", [], "the factor 0 is not a number from 1e-06 to 1,000,000: 'Be (brief:0)' in letter 12"),
        ("Be (very (brief:2):3).", [], "a mark stands inside a mark"),
        (MARKED, ["--alpha", "0.5"], "leave out --alpha, or --marks"),
        (MARKED, ["--augmentation", "instaboost"], "leave out --augmentation, or --marks"),
        (MARKED, ["--card", "card.json"], "leave out --card, or --marks"),
        (MARKED, ["--span", "phrase:brief"], "leave out --span, or --marks"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("of_file", [False, True])
def test_wrong_marks_and_another_bias_beside_marks_are_refused(
    chat, tmp_path, monkeypatch, system, options, problem, of_file
):
    """Before a model is loaded."""
    monkeypatch.setattr("lapa2_interp.models.load.load_model", None)
    chat_of = ["--system", system]
    if of_file:
        file = tmp_path / "messages.json"
        file.write_text(json.dumps(messages(system)), "utf-8")
        chat_of = [str(file)]
    code, _, errors = chat("Why?", options=[*chat_of, "--marks", *options])
    assert code == 2
    assert problem in errors


def test_a_mark_beyond_the_words_of_the_message_is_told(chat):
    """White space at the ends of a message is no part of its span."""
    _, printed, errors = chat("Why?", options=["--json", "--marks", "--system", "( Be:2) brief."])
    assert not printed
    assert "reaches beyond the words of the system message; mark no white space" in errors


def test_a_phrase_stays_that_of_the_first_messages(chat):
    """The user says it again, and the chat goes on."""
    code, printed, errors = chat(
        "Why?", "Who says Why?", options=["--json", "--span", "phrase:Why", "--alpha", "0.5"]
    )
    assert (code, errors) == (0, "")
    assert [one["turn"] for one in answers(printed)] == [1, 2]
