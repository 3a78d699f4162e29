"""Words that are banned from the draw: never said, whatever the tokens, and nothing else changes."""

import re

import numpy as np
import pytest
import torch
from conftest import cell_of, generate, load, soft_set

from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.generation import loop
from lapa2_interp.generation.banned_words import BannedWords, vocabulary_texts
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.sampling import draw, uniforms
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.models import load_tokenizer
from lapa2_interp.scoring.echo import Echo, prefix_words
from lapa2_interp.scoring.scorer import TextItem
from lapa2_interp.tasks.segmentation import words as words_of
from lapa2_interp.tasks.task import Attribute, ChatForm

SENTIMENT = load_task("sentiment")
WORDS = ("very", "positive")
LETTERS = SENTIMENT.model_copy(
    update={
        "attributes": {
            "a": Attribute(prefix="B c d: E f g h J k e"),
            "i": Attribute(prefix="L m n o p q r s:"),
        }
    }
)
"""Words that a model of bytes says often."""


def said(text, words):
    return set(words_of(text)) & set(words)


@pytest.mark.parametrize(
    ("task", "attribute", "words"),
    [
        ("sentiment", "positive", ("very", "positive")),
        ("topic", "science", ("science", "related")),
        ("detox", "toxic", ("very", "toxic")),
    ],
)
def test_barred_are_all_words_of_the_hard_prefix_and_the_name(task, attribute, words):
    assert load_task(task).words(attribute) == words
    method = methods.get("prefix", prefixes="hard")
    cell = cell_of("tiny-gpt2", method, task, attribute, ["The lake"], length=40)
    assert cell.banned_words == ()
    assert cell.model_copy(update={"ban_words": "own"}).banned_words == words
    every = cell.model_copy(update={"ban_words": "all"}).banned_words
    assert len(every) == len(set(every))
    assert set(every) == {word for name in cell.task.attributes for word in cell.task.words(name)}


def test_barred_in_a_chat_are_the_words_of_its_phrase_or_prefix():
    messages = [
        {"role": "system", "content": "Be brief, sailor."},
        {"role": "user", "content": "Go"},
    ]
    assert chat_task(messages, "phrase:Be brief").words("custom") == ("be", "brief", "custom")
    with_prefix = chat_task(messages).model_copy(
        update={
            "attributes": {"calm": Attribute(prefix="Be calm.")},
            "chat": ChatForm(messages=({"role": "system", "content": "{prefix} Go on."},)),
        }
    )
    assert with_prefix.words("calm") == ("be", "calm")


BEFORE = ["The lake", "It is posit", "It is POSITIV", "unposit", "ver", "Positiv", "a v", ""]


@pytest.mark.parametrize("name", ["smollm2-135m", "tiny-gpt2", "tiny-llama"])
def test_a_token_is_barred_where_the_text_would_say_a_word_with_it(name):
    """By reading every text again that a token of a real tokenizer could make."""
    tokenizer = load_tokenizer(name)
    texts = vocabulary_texts(tokenizer)
    log_weights = torch.zeros(len(BEFORE), len(texts) + 3)
    allowed = BannedWords(tokenizer, WORDS, BEFORE).mask(log_weights) == 0
    word = re.compile(r"\b(very|positive)\b", re.IGNORECASE)
    # One search in all texts, a text in a line.
    candidates = [before + text.replace("\n", " ") for before in BEFORE for text in texts]
    lines = "\n".join(candidates)
    starts = np.cumsum([0, *(len(candidate) + 1 for candidate in candidates)])
    saying = np.searchsorted(starts, [match.start() for match in word.finditer(lines)], "right") - 1
    expected = np.ones(len(candidates), dtype=bool)
    expected[saying] = False
    assert np.array_equal(allowed[:, : len(texts)].numpy(), expected.reshape(len(BEFORE), -1))
    assert not expected.all() or name != "smollm2-135m"
    assert allowed[:, len(texts) :].all(), "rows of the logits that are no token"
    assert (log_weights == 0).all(), "what the method keeps is not changed"


def test_a_word_of_several_tokens_is_barred_at_its_last():
    tokenizer = load_tokenizer("smollm2-135m")
    words = ("antidisestablishment", "positive")
    banned = BannedWords(tokenizer, words, ["The"] * 2)
    rows = [tokenizer(f" {word}", add_special_tokens=False).input_ids for word in words]
    assert [len(row) > 2 for row in rows] == [True, False]
    for step, token in enumerate(rows[0]):
        weights = banned.mask(torch.zeros(2, len(tokenizer)))
        assert torch.isneginf(weights[0, token]) == (step == len(rows[0]) - 1)
        assert torch.isneginf(weights[1, rows[1][0]])
        banned.advance([token, tokenizer(" lake", add_special_tokens=False).input_ids[0]])


def test_the_draw_is_that_of_the_other_tokens_with_the_same_numbers():
    rng = torch.Generator().manual_seed(0)
    tokenizer = load_tokenizer("tiny-gpt2")
    log_weights = torch.randn(2000, len(tokenizer), generator=rng)[:1].repeat(2000, 1)
    banned = BannedWords(tokenizer, ("e",), [" "] * 2000)
    ids = banned.tokens("")
    assert sorted(vocabulary_texts(tokenizer)[i] for i in ids.tolist()) == ["E", "e"]
    numbers = torch.from_numpy(uniforms(1, "x", 0, 2000))
    drawn = draw(banned.mask(log_weights), numbers, top_k=len(tokenizer))
    assert not torch.isin(drawn, ids).any()
    left = torch.ones(len(tokenizer), dtype=torch.bool)
    left[ids] = False
    others = left.nonzero()[:, 0]
    alone = draw(log_weights[:, others], numbers, top_k=len(tokenizer))
    assert torch.equal(others[alone], drawn)


def texts(method="prefix", attribute="a", bar=True, **settings):
    model = load("tiny-gpt2")
    banned = "own" if bar else "none"
    arguments = {"length": 28, "samples": 3, "trace": "none", "ban_words": banned} | settings
    return generate(model, method, LETTERS, attribute, ["The lake", "z"], **arguments).texts


@pytest.mark.parametrize(
    ("method", "attribute"), [("prefix", "a"), ("air-decoding", "i"), ("gedi", "a")]
)
def test_no_text_says_a_word_whatever_the_method(method, attribute):
    words = LETTERS.words(attribute)
    tables = {bar: texts(method, attribute, bar) for bar in (False, True)}
    said_by = {
        bar: sum(bool(said(text, words)) for text in table["text"]) for bar, table in tables.items()
    }
    assert said_by[True] == 0 < said_by[False]


def test_a_truncated_branch_is_not_filled_up_with_what_is_refused():
    """DATG's sentence has one branch, whose nucleus would be the refused token alone."""
    method = methods.get("datg", form="P")
    assert [branch.name for branch in method.branches(LETTERS, "a")] == ["target"]
    p = torch.tensor([[0.95, 0.02, 0.01, 0.01, 0.006, 0.004]]).log()
    refused = loop.mask_main_branch(
        {"target": p}, lambda log_weights: log_weights.index_fill(1, torch.tensor(0), -torch.inf)
    )
    weights = method.combine(refused, None).softmax(1)[0]
    assert weights[0] == 0
    assert weights[1] > weights[2] > 0


def test_soft_prefixes_bar_the_words_of_the_hard_one(tmp_path):
    model = load("tiny-gpt2")
    method = methods.get("prefix", prefixes=soft_set(tmp_path / "set", model, LETTERS))
    plain, banned = (texts(method, bar=bar, seed=3) for bar in (False, True))
    words = LETTERS.words("a")
    assert any(said(text, words) for text in plain["text"])
    assert not any(said(text, words) for text in banned["text"])


def test_end_tokens_do_what_they_did():
    """Kept they are tokens as others, a stop cuts the same text, and blocked there is none."""
    end = load("tiny-gpt2").tokenizer.eos_token_id
    settings = {"samples": 9, "length": 40, "top_k": 300, "seed": 3}
    with_ends, stopped, blocked = (texts(eos=eos, **settings) for eos in ("keep", "stop", "block"))
    assert any(end in tokens for tokens in with_ends["tokens"])
    assert not any(end in tokens for tokens in blocked["tokens"])
    for one, cut in zip(with_ends["tokens"], stopped["tokens"], strict=True):
        assert cut == (one[: one.index(end) + 1] if end in one else one)


def test_a_text_does_not_depend_on_its_batch():
    settings = {"augmentation": Augmentation(alpha=1), "length": 20, "samples": 2}
    together, alone = texts(**settings), texts(**settings, max_rows=1)
    assert together["tokens"].tolist() == alone["tokens"].tolist()


def test_banning_has_its_own_key_and_name():
    plain = cell_of("tiny-gpt2", "prefix", "sentiment", "positive", length=30)
    assert plain.ban_words == "none"
    banned = Cell.model_validate(plain.model_dump() | {"ban_words": "own"})
    assert banned.key != plain.key
    assert Cell.model_validate_json(banned.model_dump_json()) == banned
    assert (plain.variant, banned.variant) == ("", "own prefix words banned")
    assert plain.description != banned.description


def test_the_echo_scorer_finds_no_word_in_texts_of_smollm2(monkeypatch):
    """Draws from the unigrams of an echo: half of the weight is on pieces of the words."""
    tokenizer = load_tokenizer("smollm2-135m")
    pieces = [" positive", " Positive", " posit", "ive", "Pos", "itive", " the", " a", "."]
    ids = [tokenizer(piece, add_special_tokens=False).input_ids for piece in pieces]
    weights = torch.full((1, len(tokenizer)), -torch.inf)
    weights[0, [token for row in ids for token in row]] = 0.0
    echo = Echo(prefix_words(SENTIMENT))
    for words, expected in (((), True), (SENTIMENT.words("positive"), False)):
        banned = BannedWords(tokenizer, words, ["The lake"] * 9)
        numbers = np.stack([uniforms(1, "The lake", i, 40) for i in range(9)])
        drawn = []
        for step in range(12):
            uniform = torch.from_numpy(numbers[:, step])
            drawn.append(draw(banned.mask(weights.repeat(9, 1)), uniform, top_k=200))
            banned.advance(drawn[-1].tolist())
        made = tokenizer.batch_decode(torch.stack(drawn, 1))
        scores = echo.score([TextItem(f"The lake{text}", attribute="positive") for text in made])
        assert any(score[0] for score in scores) == expected


def test_nothing_is_read_where_nothing_is_barred(monkeypatch):
    monkeypatch.setattr(loop, "BannedWords", lambda *_: pytest.fail("words are banned"))
    assert len(texts(bar=False, samples=1)) == 2


def test_ids_that_pad_the_vocabulary_have_no_text():
    tokenizer = load("tiny-gpt2").tokenizer
    banned = BannedWords(tokenizer, ("positive",), ["The lake"])
    before = list(banned.ends)
    banned.advance([len(tokenizer) + 3])
    assert banned.ends == before
