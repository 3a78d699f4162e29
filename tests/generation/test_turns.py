"""Chats of several turns: read again as text, or kept in the cache."""

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import load
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lapa2_interp import Augmentation, augmented, generate, load_run
from lapa2_interp.attention.trace import sums_in
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.tokens import decode_answer
from lapa2_interp.circuits.hidden_span import forced_logits
from lapa2_interp.cli.app import main
from lapa2_interp.errors import LayoutError, ScoringError
from lapa2_interp.generation import loop
from lapa2_interp.generation import turns as turns_module
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.chat import Chat, chat_task
from lapa2_interp.methods.registry import HIDDEN, load_task
from lapa2_interp.models.card import identify
from lapa2_interp.report.run_texts import texts_to_show
from lapa2_interp.report.viewer import view
from lapa2_interp.runs import worker
from lapa2_interp.runs.engines import InProcess
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.grid import Grid
from lapa2_interp.runs.score import score
from lapa2_interp.scoring.human import make_sheets

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SCRIPTS = ["Why?\nAnd snow?\nWho says so?", "Where is it?\nOh.\nIs that all?", "Who?\nI see.\nNo!"]
"""The user's three messages of each chat."""
FORM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{prompt:1}"}]
LATER = ["{prompt:2}", "{prompt:3}"]
KEPT = {"keep_turns": True}
LAST = Augmentation(alpha=0.7)


@pytest.fixture
def chatting(monkeypatch):
    """A tiny model with a chat template; its tokens are bytes."""
    model = load("tiny-llama", "float64")
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    return model


def script_task(scripts=SCRIPTS):
    return chat_task(FORM, prompts=scripts, later=LATER)


def answers(model, task=None, rule=None, **settings):
    """Samples and trace of chats."""
    settings = {"length": 4, "seed": 3, "augmentation": rule or "none"} | settings
    run = generate(model, method="chat", task=task or script_task(), **settings)
    return run.texts(), run.trace()


def sums_of(trace):
    return np.stack([trace[name].to_numpy() for name in sums_in(trace)])


def test_a_row_is_an_answer_with_its_turn_its_message_and_all_keys_before_it(chatting):
    for parameters in ({}, KEPT):
        texts, trace = answers(chatting, rule=LAST, parameters=parameters)
        assert texts["turn"].tolist() == [1, 2, 3] * 3
        assert texts["prompt"].tolist() == [script for script in SCRIPTS for _ in range(3)]
        assert texts["message"].tolist() == "\n".join(SCRIPTS).splitlines()
        assert trace["turn"].to_numpy().tolist() == texts["turn"].tolist()
        for i, row in texts.iterrows():
            # l with BOS counts the conversation, the query's own key included.
            assert trace["l_kv"][0, i, 0] == len(row["context"])
            text = chatting.tokenizer.decode(row["context"])
            assert text.endswith(f"[user]{row['message']}[assistant]")
        assert texts["variant"].str.contains("keep_turns=True").all() == bool(parameters)
        total = sum(trace[name] for name in ("prefix", "prompt", "generated"))
        assert np.abs(total - 1).max() < 1e-5


def test_a_turn_read_again_is_a_chat_of_its_own(chatting):
    """The chat whose messages are written out draws the same tokens, with the same attention."""
    texts, trace = answers(chatting, rule=LAST, samples=2)
    assert len(texts) == 18
    for turn in (2, 3):
        rows = texts[(texts["turn"] == turn) & (texts["sample"] == 0)]
        for i, row in rows.iterrows():
            lines, chat = row["prompt"].splitlines(), FORM[:1]
            before = texts[(texts["prompt"] == row["prompt"]) & (texts["sample"] == 0)]
            for line, answer in zip(lines, before["continuation"][: turn - 1], strict=False):
                chat = [*chat, {"role": "user", "content": line}]
                chat.append({"role": "assistant", "content": answer})
            task = chat_task([*chat, {"role": "user", "content": lines[turn - 1]}])
            alone, of_alone = answers(chatting, task, LAST)
            assert alone["tokens"][0] == row["tokens"]
            np.testing.assert_allclose(
                sums_of(of_alone)[:, 0, 0], sums_of(trace)[:, 0, i], atol=1e-6
            )


@pytest.mark.parametrize(
    ("rule", "is_equal"),
    [
        (None, True),
        (Augmentation(alpha=0.7, phase="after_span"), True),
        (LAST, False),
    ],
)
def test_kept_turns_are_those_read_again_where_ids_and_biases_are_equal(chatting, rule, is_equal):
    """Ids differ only where an answer's text has other tokens than were drawn: here, bytes that are
    no character. Biases differ where a phase steers the queries that write alone."""
    scripts = [f"{letter}?\nAnd snow?\nWho?" for letter in "abcdefghij"]
    task = script_task(scripts)
    settings = {"length": 2, "top_k": 60}
    (again, of_again), (cached, of_cached) = (
        answers(chatting, task, rule, parameters=parameters, **settings)
        for parameters in ({}, KEPT)
    )
    first = again["turn"] == 1
    assert again["tokens"][first].tolist() == cached["tokens"][first].tolist()
    second = again.index[again["turn"] == 2]
    same = [i for i in second if list(again["context"][i]) == list(cached["context"][i])]
    canonical = [
        i + 1
        for i, row in again[first].iterrows()
        if chatting.tokenizer(row["continuation"], add_special_tokens=False).input_ids
        == list(row["tokens"])
    ]
    assert same == canonical
    assert 0 < len(same) < len(scripts), "both kinds are tried"
    difference = np.abs(sums_of(of_again)[:, 0, same] - sums_of(of_cached)[:, 0, same]).max()
    assert (difference < 1e-6) == is_equal
    if is_equal:
        assert [again["tokens"][i] for i in same] == [cached["tokens"][i] for i in same]


def one_pass(model, row, rows, rule):
    """Logits at every step of an answer, of one pass over the whole conversation; `rows` are the
    answers of the chat so far. The bias acts where tokens of answers are predicted."""
    chat = [FORM[0], {"role": "user", "content": row["prompt"].splitlines()[0]}]
    layout = Layout.of_chat(model, chat)
    steps = [
        (len(one["context"]) - len(layout), len(one["context"]) - len(layout) + one["n_tokens"])
        for _, one in rows.iterrows()
    ]
    rules = tuple(rule.model_copy(update={"steps": step}) for step in steps)
    ids = torch.tensor([[*row["context"], *row["tokens"][:-1]]])
    with torch.no_grad(), augmented(model, [rules], layout):
        return model(ids)[0, len(row["context"]) - 1 :]


@pytest.mark.parametrize("eos", ["keep", "stop"])
def test_kept_answers_are_drawn_from_one_pass_over_the_chat(chatting, monkeypatch, eos):
    """Answers of unequal lengths, in a batch; each is its chat's alone."""
    card = identify(chatting)
    ends = tuple(range(100, 160))
    monkeypatch.setattr(chatting, "lapa2_card", card.model_copy(update={"end_ids": ends}))
    asked = {"parameters": KEPT, "length": 6, "eos": eos, "top_k": 1}
    texts, trace = answers(chatting, rule=LAST, **asked)
    lengths = texts["n_tokens"].tolist()
    assert (len(set(lengths)) > 2) == (eos == "stop"), lengths
    for i, row in texts.iterrows():
        chat = texts[(texts["prompt"] == row["prompt"]) & (texts["turn"] <= row["turn"])]
        logits = one_pass(chatting, row, chat, LAST)
        assert logits.argmax(1).tolist() == list(row["tokens"])
        if row["turn"] > 1:
            before = texts.loc[i - 1]
            n = before["n_tokens"] - (before["finish"] == "end")  # no end token is kept
            between = f"[user]{row['message']}[assistant]"
            ids = chatting.tokenizer(between, add_special_tokens=False).input_ids
            assert list(row["context"]) == [*before["context"], *before["tokens"][:n], *ids]
    for number, script in enumerate(SCRIPTS):
        alone, of_alone = answers(chatting, script_task([script]), LAST, **asked)
        rows = slice(3 * number, 3 * number + 3)
        assert alone["tokens"].tolist() == texts["tokens"][rows].tolist()
        n = of_alone.sizes["step"]
        np.testing.assert_allclose(
            sums_of(of_alone)[:, 0], sums_of(trace)[:, 0, rows, :n], atol=1e-6
        )


def test_a_turn_may_add_one_token(chatting, monkeypatch):
    """After an answer that ended at once; nothing is read before the prompt pass."""
    chatting.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    card = identify(chatting).model_copy(update={"end_ids": tuple(range(258))})
    monkeypatch.setattr(chatting, "lapa2_card", card)
    form = [FORM[0], {"role": "user", "content": "Why?"}]
    asked = {"parameters": KEPT, "eos": "stop", "rule": LAST, "top_k": 1}
    texts, _ = answers(chatting, chat_task(form, later=["?", "!"]), **asked)
    assert texts["finish"].tolist() == ["end"] * 3
    assert list(map(chatting.tokenizer.decode, texts["context"])) == [
        "Be brief.Why?", "Be brief.Why??", "Be brief.Why??!",
    ]  # fmt: skip
    for i, row in texts.iterrows():
        logits = one_pass(chatting, row, texts.loc[:i], LAST)
        assert logits.argmax(1).tolist() == list(row["tokens"])


def test_a_phrase_that_an_answer_repeats_is_that_of_the_first_messages(chatting):
    form = [{"role": "user", "content": "Say rain."}]
    task = chat_task(form, "phrase:rain", later=["Why rain?"])
    for parameters in ({}, KEPT):
        texts, trace = answers(chatting, task, LAST, parameters=parameters)
        assert trace["l_pre"].to_numpy().tolist() == [[4, 4]]
        assert texts["message"].tolist() == ["Say rain.", "Why rain?"]


def test_templates_that_write_earlier_turns_otherwise_can_only_be_read_again(chatting):
    marked = "{% if not loop.last %}~{% endif %}{{ m['content'] }}"
    chatting.tokenizer.chat_template = TEMPLATE.replace("{{ m['content'] }}", marked)
    assert len(answers(chatting)[0]) == 9
    with pytest.raises(LayoutError, match="writes earlier turns otherwise .* leave out keep_turns"):
        answers(chatting, parameters=KEPT)
    # White space in front of an answer is left to the model.
    spaced = TEMPLATE.replace("]{{ m", "] {{ m")
    chatting.tokenizer.chat_template = spaced
    texts, _ = answers(chatting, parameters=KEPT)
    assert chatting.tokenizer.decode(texts["context"][1]).endswith("[user] And snow?[assistant]")


def test_pages_and_sheets_take_a_chat_of_several_turns(chatting, tmp_path):
    run = generate(chatting, method="chat", task=script_task(), parameters=KEPT, length=4, seed=3,
                   alpha=[0, 0.7])  # fmt: skip
    shown = view(run, prompt=SCRIPTS[1], model=chatting)
    first = run.texts().query("prompt == @SCRIPTS[1] and turn == 1")
    assert [arm.tokens for arm in shown.text.arms] == [*map(tuple, first["tokens"])]
    # Keys before the span are keys of the page, too.
    parts, text = shown.data["parts"], "[system]Be brief.[user]Where is it?[assistant]"
    before, span = len("[system]"), len("Be brief.")
    assert parts == ["prompt"] * before + ["prefix"] * span + ["prompt"] * (
        len(text) - before - span
    )
    assert "".join(shown.data["arms"][0]["keys"][: len(parts)]) == text
    # Raters and readers see the message that was answered.
    key = make_sheets(run.texts(), tmp_path / "sheets", n_texts=6)
    assert len(key) == 6
    sheet = pd.read_csv(tmp_path / "sheets" / "sheet.csv", encoding="utf-8-sig")
    assert sheet["prompt"].tolist() == [
        script.splitlines()[turn - 1]
        for script, turn in zip(key["prompt"], key["turn"], strict=True)
    ]
    of_arms = texts_to_show(run, 10**6)[1]["groups"][0]["arms"]
    assert [text["asked"] for text in of_arms[0]["texts"]] == ["Why?\n", "Where is it?\n", "Who?\n"]
    table = run.steps()
    assert table.groupby(["arm", "turn"]).ngroups == 6
    assert run.attention(arm="baseline").n_untraced == 0


def test_kept_turns_take_the_usual_steps(monkeypatch, capsys):
    model = load("tiny-llama", "float64", "TransformersModel")
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    usual, _ = answers(model, rule=LAST, parameters=KEPT)
    monkeypatch.setattr(model, "static", True, raising=False)
    static, _ = answers(model, rule=LAST, parameters=KEPT)
    assert usual["tokens"].tolist() == static["tokens"].tolist()


TASK = """length_counts_prompt = false
[attributes.calm]
prefix = "Be calm."
[prompts]
texts = ["What is rain?\\nAnd snow?", "Who are you?\\nWhy is that so?", "Is it late?\\nAnd now?"]
[chat]
messages = [{role = "system", content = "{prefix}"}, {role = "user", content = "{prompt:1}"}]
later = ["{prompt:2}"]
"""


@pytest.mark.long
def test_a_sweep_that_is_killed_between_turns_gives_the_same_bytes(chatting, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "load_model", lambda *_, **__: chatting)
    (tmp_path / "calm.toml").write_text(TASK)
    task = load_task(tmp_path / "calm.toml")
    cells = tuple(
        cell_of(chatting, method={"name": "chat", **parameters}, task=task, alpha=0.5, length=4,
                max_rows=2, trace="pooled")
        for parameters in ({}, KEPT)
    )  # fmt: skip
    grid = Grid("calm", "", cells)

    def make(folder):
        with InProcess() as engine:
            return fill_run(folder, [grid], engine, notify=lambda text: None)

    make(tmp_path / "whole")

    def stop(*arguments):
        raise KeyboardInterrupt

    for name in ("_read_again", "_next_turns"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(turns_module, name, stop)
            make(tmp_path / "stopped")
        if name == "_read_again":
            assert load_run(tmp_path / "stopped").cells["state"].tolist() == ["missing"] * 2
    make(tmp_path / "stopped")
    undisturbed, stopped = (
        {
            str(file.relative_to(tmp_path / name)): file.read_bytes()
            for suffix in ("*.parquet", "*.nc")
            for file in (tmp_path / name).rglob(suffix)
        }
        for name in ("whole", "stopped")
    )
    assert len(undisturbed) == 8
    assert undisturbed == stopped
    run = load_run(tmp_path / "whole")
    assert [*run.cells["variant"].str.contains("keep_turns=True")] == [False, True]
    # Tables have the turn. A later answer cut short is not that of a shorter chat.
    scored = score(tmp_path / "whole", scorers=["repetition"], lengths=[4])
    assert sorted(scored.table["turn"].unique()) == [1, 2]
    with pytest.raises(
        ScoringError, match="cut to 2 it is not .* generate the chats with length=2"
    ):
        score(tmp_path / "whole", scorers=["repetition"], lengths=[2])
    assert sorted(run.steps()["turn"].unique()) == [1, 2]


@pytest.mark.parametrize("kept", [False, True])
def test_no_answer_of_any_turn_says_a_banned_word(chatting, tmp_path, monkeypatch, kept):
    """Each answer begins a word, whatever the user's last one is; and a special token, which the
    text leaves out, does not divide one."""
    task, mark = tmp_path / "calm.toml", chatting.tokenizer.bos_token_id
    task.write_text(TASK.replace("rain?", "rain").replace("snow?", "snow"))
    wanted = itertools.cycle(chatting.tokenizer("Be calmm.", add_special_tokens=False).input_ids)

    def combine(self, log_probs, state):
        """The letter that is wanted in this step; the mark where it is banned."""
        weights = torch.full_like(log_probs["chat"], -50.0)
        weights[:, [mark, next(wanted)]] = torch.tensor([0.0, 50.0], dtype=weights.dtype)
        return weights

    monkeypatch.setattr(Chat, "combine", combine)
    said = {
        ban: generate(
            chatting, method="chat", task=task, parameters={"keep_turns": kept}, alpha=0, length=9,
            prompts=1, top_k=1, eos="keep", trace="none", ban_words=ban,
        ).texts()["continuation"].tolist()
        for ban in ("none", "own")
    }  # fmt: skip
    word = re.compile(r"\b(be|calm)\b", re.IGNORECASE)
    assert said["none"] == ["Be calmm."] * 2
    assert word.search("Be calmm.")
    assert said["own"] == ["B cal."] * 2
    assert not word.search("B cal.")


def test_turns_on_the_command_line(chatting, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lapa2_interp.models.load.load_model", lambda *_, **__: chatting)
    monkeypatch.setattr("lapa2_interp.models.load.load_tokenizer", lambda *_: chatting.tokenizer)
    file = tmp_path / "messages.json"
    file.write_text('[{"role": "system", "content": "Hi."}, {"role": "user", "content": "Why?"}]')
    asked = ["chat", str(file), "--length", "2", "--later", "And snow?", "And hail?"]
    assert main([*asked, "--keep-turns"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("turn 3") == 2
    assert main([*asked, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["turns"] == [1, 2, 3]
    assert len(facts["attention"]) == len(facts["texts"]) == 3
    assert main([*asked, "--keep-turns", "--samples", "2"]) == 2
    assert "samples is 2" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [False, True])
def test_guidance_contrasts_every_turn_with_its_span_hidden(chatting, kept):
    """Each answer again, from one pass with the span and one in which no later query sees it."""
    parameters = {"guidance": 3.0, "keep_turns": kept}
    texts, trace = answers(chatting, parameters=parameters, top_k=1, length=5)
    assert list(trace["branch"].to_numpy()) == ["chat", "hidden"]
    assert float(trace["prefix"].sel(branch="hidden").sum()) == pytest.approx(0, abs=1e-12)
    plain, _ = answers(chatting, top_k=1, length=5)
    differing = 0
    for i, row in texts.iterrows():
        layout = Layout.of_chat(
            chatting.tokenizer,
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
            span="system",
        )
        context = replace(layout, ids=tuple(row["context"]))
        chat, hidden = (
            forced_logits(chatting, context, row["tokens"], rules)[0].log_softmax(-1)
            for rules in ((), (HIDDEN,))
        )
        assert (hidden + 3 * (chat - hidden)).argmax(-1).tolist() == list(row["tokens"])
        differing += list(row["tokens"]) != list(plain["tokens"][i])
    assert differing


def test_guidance_one_is_the_chat(chatting):
    plain, _ = answers(chatting)
    same, _ = answers(chatting, parameters={"guidance": 1.0})
    assert plain.equals(same)


PLAIN = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['role'] != 'assistant' %} {% endif %}"
    "{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A template in plain words: no mark stands between an answer and what follows it."""
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
UNSPACED = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1)])
KINDS = {
    "bytes": ("Ġ", "Ċ", None, BYTES, decoders.ByteLevel()),
    "prefix space": ("Ġ", "Ċ", None, pre_tokenizers.ByteLevel(), decoders.ByteLevel()),
    "metaspace": ("▁", "\n", None, pre_tokenizers.Metaspace(), decoders.Metaspace()),
    "prepended": ("▁", "\n", PREPEND, None, UNSPACED),
}
"""Tokenizers: how they write a space and a new line, and their normalizer, cutter and decoder."""


SHARED = ((".", "{n}"), ("?", "{n}"), (":", "{n}"))
"""Merges by which the last sign of an answer, or of its opening, and a new line are one token."""


def tokenizer_of(kind, *merges):
    """A tokenizer of letters with a few merges, in which {n} stands for a new line."""
    space, line, normalizer, cutter, decoder = KINDS[kind]
    merges = [("u", "s"), ("us", "er"), ("e", "r"), (space, "user"), (space, "It"), ("I", "t")] + [
        (one.replace("{n}", line), two.replace("{n}", line)) for one, two in merges
    ]
    merges.sort(key=lambda pair: len("".join(pair)))
    words = ["<s>", "</s>", *map(chr, range(33, 127)), space, line, *map("".join, merges)]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    if normalizer is not None:
        made.normalizer = normalizer
    if cutter is not None:
        made.pre_tokenizer = cutter
    made.decoder = decoder
    made.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=PLAIN
    )


def kept_chat(monkeypatch, tokenizer, answer, later, **settings):
    """Kept turns of a chat in which these tokens are drawn as every answer; and, by turn, the
    logits of its first token."""
    model = load("tiny-llama", "float64", "TransformersModel")
    monkeypatch.setattr(model, "tokenizer", tokenizer)
    drawn = itertools.cycle(answer)
    monkeypatch.setattr(loop, "draw", lambda *_, **__: torch.tensor([next(drawn)]))
    logits, read = [], turns_module.KeptRows.prompt_pass

    def prompt_pass(self, *arguments):
        logits.append(read(self, *arguments)[0, -1])
        return logits[-1][None, None]

    monkeypatch.setattr(turns_module.KeptRows, "prompt_pass", prompt_pass)
    task = chat_task(CHAT, later=later)
    settings = {"parameters": KEPT, "length": len(answer), "eos": "stop"} | settings
    texts, trace = answers(model, task, **settings)
    assert [list(tokens) for tokens in texts["tokens"]] == [answer] * len(texts)
    return model, texts, trace, logits


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def drawn_ids(tokenizer, text):
    """The tokens of an answer behind the opening of its turn."""
    opened = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids, of_chat = ids_of(tokenizer, opened), ids_of(tokenizer, opened + text)
    assert of_chat[: len(ids)] == ids
    return of_chat[len(ids) :]


@pytest.mark.parametrize(
    ("text", "ends", "merges"),
    [(" It rains.", False, ()), ("user?", True, SHARED), ("", True, SHARED)],
    ids=["cut", "ended", "empty"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_kept_turns_are_the_whole_chat_as_transformers_reads_it(
    kind, text, ends, merges, monkeypatch
):
    """Its ids, its number of keys, and the logits of one pass without a cache. Where the last sign
    of an answer and the new line behind it are one token, so it is in the cache."""
    tokenizer = tokenizer_of(kind, *merges)
    later = ["It snows?", "user user"]
    answer = drawn_ids(tokenizer, text) + [tokenizer.eos_token_id] * ends
    model, texts, trace, logits = kept_chat(monkeypatch, tokenizer, answer, later)
    messages = list(CHAT)
    for turn, message in enumerate([*later, ""]):
        of_chat = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert list(texts["context"][turn]) == of_chat
        assert trace["l_kv"][0, turn, 0] == len(of_chat)
        with torch.no_grad():
            expected = model.original_model(torch.tensor([of_chat]), use_cache=False).logits[0, -1]
        # The networks of transformers normalise in float32.
        torch.testing.assert_close(logits[turn], expected, atol=1e-4, rtol=0)
        assert texts["continuation"][turn] == text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": message}]


def test_tokens_that_were_drawn_stay_in_the_cache_though_a_tokenizer_cuts_their_text_otherwise(
    monkeypatch,
):
    tokenizer = tokenizer_of("metaspace")
    letters = tokenizer.convert_tokens_to_ids(list("users"))
    _, texts, _, _ = kept_chat(monkeypatch, tokenizer, letters, ["Snow?"])
    behind = ids_of(tokenizer, "a\nuser: Snow?\nassistant:")[2:]
    assert list(texts["context"][1]) == [*texts["context"][0], *letters, *behind]


def test_a_chat_whose_cache_is_not_the_chat_of_its_template_is_refused(monkeypatch):
    """The token "s." would have to be cut, since the whole chat has ".\\n"."""
    tokenizer = tokenizer_of("bytes", *SHARED, ("s", "."))
    drawn = tokenizer.convert_tokens_to_ids(["I", "t", "s."])
    with pytest.raises(
        LayoutError, match=r"'\.\\n' has the end of the answer 'Its.' .* keep_turns"
    ):
        kept_chat(monkeypatch, tokenizer, drawn, ["Snow?"])


@pytest.mark.parametrize(("change", "is_refused"), [(".split('>')[-1]", True), (" | trim", False)])
def test_a_template_may_trim_an_answer_but_change_no_word_of_it(change, is_refused, monkeypatch):
    tokenizer = tokenizer_of("bytes")
    tokenizer.chat_template = PLAIN.replace("m['content']", f"(m['content']{change})")
    answer = ids_of(tokenizer, " a>b ")
    if is_refused:
        with pytest.raises(LayoutError, match="writes the answer ' a>b ' otherwise .* keep_turns"):
            kept_chat(monkeypatch, tokenizer, answer, ["Snow?"])
        return
    _, texts, _, _ = kept_chat(monkeypatch, tokenizer, answer, ["Snow?"])
    assert tokenizer.decode(texts["context"][1]) == (
        "system: Be brief.\nuser: Rain?\nassistant: a>b \nuser: Snow?\nassistant:"
    )


def test_the_text_of_an_answer_has_its_leading_space_and_no_marks():
    for kind in KINDS:
        tokenizer = tokenizer_of(kind)
        ids = drawn_ids(tokenizer, " It rains.")
        marked = [ids[0], tokenizer.bos_token_id, *ids[1:], tokenizer.eos_token_id]
        assert decode_answer(tokenizer, marked) == " It rains."
