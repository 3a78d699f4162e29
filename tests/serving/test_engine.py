"""The engine: answers are those of `generate`, alone and in a batch, read afresh and kept."""

import threading
import time

import numpy as np
import pytest
import torch
from families import save_family
from servers import CHAT, RULES, SYSTEM, TEMPLATE, Asker, asker, model  # noqa: F401

from lapa2_interp import Augmentation, Layout, generate, load_model, teacher_forced
from lapa2_interp.circuits.hidden_span import forced_logits, span_effect
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.serving import engine as engine_module
from lapa2_interp.serving.engine import Engine, QueueFullError
from lapa2_interp.serving.kept import KeptText
from lapa2_interp.serving.request import Defaults, ProtocolError, after_span

LONGER = [
    SYSTEM, {"role": "user", "content": "Where is it, and who says so?"},
    {"role": "assistant", "content": "Oh."}, {"role": "user", "content": "Why?"},
]  # fmt: skip


def test_an_answer_is_that_of_generate(asker, model):
    """Greedy, and drawn with the same seed; under the same bias."""
    ask = asker().ask
    vocabulary = model.cfg.d_vocab
    for body, settings in (
        ({"temperature": 0}, {"top_k": 1}),
        ({"seed": 7}, {"top_k": vocabulary, "seed": 7}),
        ({"seed": 7, "lapa2": {"top_k": 5}}, {"top_k": 5, "seed": 7}),
        ({"seed": 7, "temperature": 0.5}, {"top_k": vocabulary, "seed": 7, "temperature": 0.5}),
    ):
        answer, _ = ask(**body)
        run = generate(
            model, method="chat", task=chat_task(CHAT), augmentation=RULES, length=6, eos="stop",
            **{"seed": 1} | settings,
        )  # fmt: skip
        assert answer.tokens == list(run.texts()["tokens"].iloc[0]), body


def test_marks_of_the_system_message_are_read_where_they_are_asked_for(asker):
    """They are those of the phrase at the end of the message; a user's stay brackets."""
    ask = asker().ask
    marked_chat = [{"role": "system", "content": "Be (brief:5)"}, CHAT[1]]
    plain_chat = [{"role": "system", "content": "Be brief"}, CHAT[1]]
    settings = {"seed": 3, "max_tokens": 12}
    answer, piece = ask(messages=marked_chat, lapa2={"marks": True, "report": True}, **settings)
    assert piece.report["marks"] == [{"text": "brief", "factor": 5.0}]
    assert answer.asked.layout == ask(messages=plain_chat)[0].asked.layout
    rule = {"augmentation": f"lapa2:law=scale,alpha={np.log(5)}", "span": "phrase:brief"}
    assert answer.tokens == ask(messages=plain_chat, lapa2=rule, **settings)[0].tokens
    assert answer.tokens != ask(messages=plain_chat, lapa2={"alpha": 0}, **settings)[0].tokens
    by_user = [SYSTEM, {"role": "user", "content": "Be (brief:5)."}]
    text = ask(messages=by_user, lapa2={"marks": True})[0].asked.layout.tokens
    assert "(brief:5)" in "".join(text)
    with pytest.raises(ProtocolError, match="leave out alpha, or marks"):
        ask(messages=marked_chat, lapa2={"marks": True, "alpha": 1.0})
    with pytest.raises(ProtocolError, match="the factor 0 is not a number"):
        ask(messages=[{"role": "system", "content": "(a:0)"}, CHAT[1]], lapa2={"marks": True})


def test_marks_are_found_in_the_message_that_the_template_trims(asker, model, monkeypatch):
    """White space at its ends is no obstacle, and its words may stand in the template, too."""
    trimmed = TEMPLATE.replace("m['content']", "m['content'] | trim")
    monkeypatch.setattr(model.tokenizer, "chat_template", trimmed)
    ask = asker().ask
    for content, words in (("(Be brief:3).\n", "Be brief"), ("(system:2)", "system")):
        chat = [{"role": "system", "content": content}, CHAT[1]]
        (rule,) = ask(messages=chat, lapa2={"marks": True})[0].asked.rules
        layout = ask(messages=chat, lapa2={"marks": True})[0].asked.layout
        (span,) = layout.spans(rule.span)
        assert "".join(layout.tokens[slice(*span)]) == words
        assert "".join(layout.tokens[: span.start]) == "<s>[system]"


def test_no_bias_is_another_answer(asker):
    ask = asker().ask
    answers = [ask(lapa2={"alpha": alpha}, seed=3, max_tokens=12)[0].tokens for alpha in (0, 5.0)]
    assert answers[0] != answers[1]


def test_requests_of_a_batch_are_answered_as_alone(asker):
    """Of unequal lengths, biases, seeds and temperatures; they wait together, and share a batch."""
    bodies = [
        {"messages": CHAT, "seed": 1},
        {"messages": LONGER, "seed": 2, "max_tokens": 11},
        {"messages": LONGER[:2], "seed": 3, "lapa2": {"alpha": 3.0}},
        {"messages": CHAT, "seed": 4, "lapa2": {"alpha": 0}, "temperature": 0.3},
        {"messages": LONGER, "seed": 5, "lapa2": {"span": "turn:1", "alpha": 2.0}},
    ]
    alone = [asker(keep_bytes=0).ask(**body)[0].tokens for body in bodies]
    together = asker(keep_bytes=0)
    sizes = []
    answer_batch = together.engine._answer
    together.engine._answer = lambda batch: (sizes.append(len(batch)), answer_batch(batch))[1]
    with together.engine.changed:  # nothing is taken before all wait
        answers = [together.put(**body) for body in bodies]
    for answer, pieces in answers:
        while pieces.get(timeout=60).finish is None:
            pass
        assert answer.finish
    assert [answer.tokens for answer, _ in answers] == alone
    assert sizes == [len(bodies)]


def test_requests_that_are_sent_together_share_a_batch(asker, monkeypatch):
    """Also where nothing runs: the first one waits a moment for the next."""
    monkeypatch.setattr(engine_module, "SENT_TOGETHER", 5.0)
    one = asker(keep_bytes=0, most_rows=3)
    sizes = []
    answer_batch = one.engine._answer
    one.engine._answer = lambda batch: (sizes.append(len(batch)), answer_batch(batch))[1]
    answers = [one.put(seed=seed) for seed in range(3)]
    for _, pieces in answers:
        while pieces.get(timeout=60).finish is None:
            pass
    assert sizes == [3]


def test_a_long_text_does_not_drive_others_over_the_context(asker, model):
    """All rows of a batch go on to its last step, so such requests are answered one after another."""
    n_ctx = model.cfg.n_ctx
    one = asker(keep_bytes=0)
    long_chat = [SYSTEM, {"role": "user", "content": "a" * (n_ctx - 60)}]
    bodies = [{"messages": long_chat, "max_tokens": 4}, {"max_tokens": 120}]
    alone = [one.ask(**body)[0].tokens for body in bodies]
    with one.engine.changed:
        answers = [one.put(**body) for body in bodies]
    for _, queue in answers:
        while (piece := queue.get(timeout=120)).finish is None:
            assert piece.error is None, piece.error
    assert [answer.tokens for answer, _ in answers] == alone
    assert len(alone[1]) > 60


def chat_of(ask, alphas, words=("Why?", "And snow?", "Who says so?")):
    """The tokens of the answers of a chat whose strength is another at each turn."""
    messages, tokens = [SYSTEM], []
    for alpha, text in zip(alphas, words, strict=True):
        messages = [*messages, {"role": "user", "content": text}]
        answer, _ = ask(messages=messages, lapa2={"alpha": alpha}, seed=9)
        messages = [*messages, {"role": "assistant", "content": answer.text}]
        tokens.append(answer.tokens)
    return tokens


@pytest.mark.parametrize("alphas", [(0.7, 0.7, 0.7), (0.7, 3.0, 0.7), (0, 2.0, 0), (4.0, 0, 4.0)])
def test_a_chat_that_is_kept_equals_the_chat_read_afresh(asker, alphas):
    """Also one whose strength changes in the middle."""
    keeping, afresh = asker(), asker(keep_bytes=0)
    assert chat_of(keeping.ask, alphas) == chat_of(afresh.ask, alphas)
    assert keeping.engine.reused > afresh.engine.reused == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"span": "bos"}, {"span": "bos", "alpha": 4.0}),
        ({"span": "input"}, {"span": "input"}),
        ({"span": "input"}, {"span": "input", "alpha": 4.0}),
        ({"span": ((0, 3),), "phase": "everywhere"}, {"phase": "everywhere"}),
        ({"steps": (0, 2)}, {"steps": (0, 2)}),
        ({"steps": (0, 2)}, {"steps": (1, 9)}),
        ({"heads": ((0, 1),)}, {}),
        ({"law": "multiply", "span": "all", "phase": "everywhere"}, {"span": "bos"}),
        ({"profile": "released", "phase": "everywhere"}, {}),
        ({"law": "ratio", "tau": 0.5, "pooled": True, "alpha": 1.0},) * 2,
    ],
)
def test_another_bias_of_the_next_turn_equals_the_chat_read_afresh(asker, first, second):
    """Whatever it acts on, and at which queries."""
    turns = [after_span([Augmentation(**{"alpha": 2.0} | rule)]) for rule in (first, second)]
    chats = []
    for settings in ({}, {"keep_bytes": 0}):
        one = asker(**settings)
        messages, tokens = [SYSTEM], []
        for text, rules in zip(("Why?", "And snow?", "Oh?"), [*turns, turns[0]], strict=True):
            one.defaults = Defaults("tiny", rules=rules)
            messages = [*messages, {"role": "user", "content": text}]
            answer, _ = one.ask(messages=messages, seed=9, max_tokens=9)
            messages = [*messages, {"role": "assistant", "content": answer.text}]
            tokens.append(answer.tokens)
        chats.append(tokens)
    assert chats[0] == chats[1]
    assert one.engine.reused == 0


def test_keys_are_taken_up_to_the_first_other_bias(model):
    """As many as have an equal bias, and no more."""

    def layout(*words):
        chat = [SYSTEM, *({"role": "user", "content": word} for word in words)]
        return Layout.of_chat(model.tokenizer, chat)

    short, longer = layout("Why?"), layout("Why?", "And snow?")
    n_equal = next(
        i for i, ids in enumerate(zip(short.ids, longer.ids, strict=False)) if len({*ids}) > 1
    )
    weak, strong = (after_span([Augmentation(alpha=alpha)]) for alpha in (1.0, 2.0))
    keys = torch.zeros(1, 1, len(short.ids), 1)
    read = KeptText(short.ids, short, weak, keys, keys)
    assert read.n_valid(longer, weak) == n_equal
    assert read.n_valid(short, weak) == len(short.ids) - 1  # the last token is left to be read
    assert read.n_valid(longer, strong) == read.n_valid(longer, ()) == short.prefix.stop
    assert KeptText(short.ids, short, (), keys, keys).n_valid(longer, strong) == short.prefix.stop


@pytest.mark.parametrize("phase", ["last_query", "decode", "predicting_only", "everywhere"])
def test_other_phases_are_kept_up_to_the_first_biased_query(asker, model, phase):
    rules = (Augmentation(alpha=2.0, phase=phase),)
    texts = []
    for settings in ({}, {"keep_bytes": 0}):
        one = asker(defaults=Defaults("tiny", rules=rules), **settings)
        messages, tokens = [SYSTEM], []
        for text in ("Why?", "And snow?"):
            messages = [*messages, {"role": "user", "content": text}]
            answer, _ = one.ask(messages=messages, seed=9)
            messages = [*messages, {"role": "assistant", "content": answer.text}]
            tokens.append(answer.tokens)
        texts.append(tokens)
    assert texts[0] == texts[1]


def test_memory_of_kept_texts_is_bounded(asker):
    one = asker(keep_bytes=600_000)
    for number in range(8):
        one.ask(messages=[SYSTEM, {"role": "user", "content": f"{number} " * 10}])
        assert one.engine.kept.size <= 600_000
        assert one.engine.kept.size == sum(text.size for text in one.engine.kept.texts)
    assert one.engine.kept.texts


def test_a_stop_ends_an_answer_and_is_not_in_it(asker):
    ask = asker().ask
    longest, _ = ask(max_tokens=20, seed=5)
    for stop in (longest.text[3:6], longest.text[:1]):
        answer, piece = ask(max_tokens=20, seed=5, stop=[stop, "never there"])
        assert answer.text == longest.text[: longest.text.index(stop)]
        assert piece.finish == "stop"
        assert len(answer.tokens) < len(longest.tokens)


def test_pieces_join_to_the_text(asker):
    """Nothing is given away that a later token changes."""
    one = asker()
    answer, pieces = one.put(max_tokens=30, seed=11, stop="zz")
    text = ""
    while True:
        piece = pieces.get(timeout=60)
        text += piece.text
        if piece.finish:
            break
    assert text == answer.text


def test_a_report_is_attention_and_effect_by_token(asker, model):
    answer, piece = asker().ask(lapa2={"report": True}, max_tokens=5)
    report = piece.report
    layout = answer.asked.layout
    assert report["span"] == list(layout.prefix)
    assert len(report["tokens"]) == len(report["attention"]) == len(report["effect"]) == 5
    trace = teacher_forced(model, layout, [answer.tokens], RULES)
    attention = trace["prefix"].mean(["layer", "head"]).to_numpy()[0, 0]
    np.testing.assert_allclose(report["attention"], attention, atol=1e-6)
    effect = span_effect(model, layout, answer.tokens, RULES)
    np.testing.assert_allclose(report["effect"], effect, rtol=1e-3)
    logits = forced_logits(model, layout, answer.tokens, answer.asked.rules)[0]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    np.testing.assert_allclose(report["entropy"], entropy, rtol=1e-3)


def test_a_client_that_goes_away_frees_its_place(asker):
    one = asker(most_rows=1)
    begun = threading.Event()
    read_tokens = one.engine._draw

    def slow(*args):
        begun.set()
        time.sleep(0.02)
        return read_tokens(*args)

    one.engine._draw = slow
    gone, _ = one.put(max_tokens=900)
    begun.wait(60)
    _, pieces = one.put(max_tokens=2)
    left, _ = one.put(max_tokens=900)
    left.gone.set()
    gone.gone.set()
    while pieces.get(timeout=60).finish is None:
        pass
    assert len(gone.tokens) < 900
    assert not left.tokens


def test_the_queue_is_bounded_and_a_stop_finishes_what_waits(asker):
    one = asker(most_waiting=2, most_rows=1)
    with one.engine.changed:
        answers = [one.put(max_tokens=3) for _ in range(2)]
        with pytest.raises(QueueFullError):
            one.put()
    one.engine.stop()
    assert [answer.finish for answer, _ in answers] == ["length", "length"]
    with pytest.raises(QueueFullError):
        one.put()


def test_an_answer_ends_with_its_time(asker):
    answer, piece = asker(seconds=0.0).ask(max_tokens=500)
    assert piece.finish == "length"
    assert len(answer.tokens) == 1


def test_text_that_was_held_back_is_given_at_the_end_of_the_time(asker):
    """With the report that was asked for."""
    one = asker()
    words = one.ask(max_tokens=20, seed=5)[0].text
    late = asker(seconds=0.0)
    stop = words[0] + "never there"
    answer, pieces = late.put(max_tokens=20, seed=5, stop=stop, lapa2={"report": True})
    piece = pieces.get(timeout=60)
    assert piece.finish == "length"
    assert piece.text == answer.text
    assert words.startswith(answer.text)
    assert len(piece.report["effect"]) == len(answer.tokens) == 1


def test_a_long_text_beside_one_that_is_kept_stays_in_the_context(asker, model):
    """Together they would need more slots than the context has."""
    n_ctx = model.cfg.n_ctx
    chats = [[SYSTEM, {"role": "user", "content": letter * (n_ctx // 2)}] for letter in "ab"]
    afresh = asker(keep_bytes=0)
    expected = [afresh.ask(messages=chat)[0].tokens for chat in chats]
    one = asker()
    one.ask(messages=chats[0])
    with one.engine.changed:
        answers = [one.put(messages=chat) for chat in chats]
    for _, queue in answers:
        while (piece := queue.get(timeout=120)).finish is None:
            assert piece.error is None, piece.error
    assert [answer.tokens for answer, _ in answers] == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_ends_the_thread_leaves_nobody_waiting(model, monkeypatch):
    monkeypatch.setattr(engine_module, "decided_path", lambda *args: 1 / 0)
    one = Asker.__new__(Asker)
    one.model, one.defaults, one.engine = model, Defaults("tiny", rules=RULES), Engine(model)
    _, pieces = one.put()
    one.engine.start()
    assert pieces.get(timeout=60).error == "the server has stopped"
    with pytest.raises(QueueFullError):
        one.put()
    one.engine.thread.join(timeout=60)  # its error is reported in this test, not in the next


def test_an_error_of_one_batch_leaves_the_queue(asker, capsys):
    one = asker()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(engine_module, "uniforms", lambda *args: 1 / 0)
        _, pieces = one.put()
        assert pieces.get(timeout=60).error == "ZeroDivisionError in the server"
    assert one.ask()[0].tokens
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_model_with_windows_keeps_nothing(tmp_path, monkeypatch):
    """Its cache drops keys; answers are read afresh."""
    model = load_model(
        str(save_family("Gemma 3", tmp_path)), "float64", model_class="TransformersModel"
    )
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    one = Asker(model)
    one.ask()
    assert one.engine.kept.most == 0
    one.engine.stop()
