"""Words of every script, and what counts them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lapa2_interp import load_tokenizer
from lapa2_interp.decoding.barring import Barred
from lapa2_interp.errors import TaskError
from lapa2_interp.runs.texts import in_parts
from lapa2_interp.scoring import Item, Scorer, Skipped, run_scorer
from lapa2_interp.scoring.agreement import LENGTHS
from lapa2_interp.scoring.distinct import Repetition, distinct, token_lists
from lapa2_interp.scoring.echo import MASK, Echo, Masked
from lapa2_interp.scoring.training import LONG, WINDOW, pieces_of
from lapa2_interp.scoring.transformer import Perplexity, _n_words
from lapa2_interp.tasks.segmentation import counted, spans, words
from lapa2_interp.tasks.word_lists import derive_words

CHINESE = "我们今天去公园玩。"
SPELLED = {
    "Han": (CHINESE, list(CHINESE)),
    "kana": ("コーヒーを飲む", list("コーヒーを飲む")),
    "halfwidth kana": ("ｶﾞﾝ", ["ｶﾞ", "ﾝ"]),
    "Thai": ("น้ำดี", ["น้ำ", "ดี"]),
    "Lao": ("ນ້ຳ", ["ນ້ຳ"]),
    "Khmer": ("ព្រះ\u200bសី ២០២៤", ["ព្រះ", "សី", "២០២៤"]),
    "Burmese": ("ကျွန်တော်", ["ကျွ", "န်", "တော်"]),
    "Hindi": ("हिन्दी में", ["हिन्दी", "में"]),
    "Arabic": ("كِتَابٌ جَديد", ["كِتَابٌ", "جَديد"]),
    "Hebrew": ("שָׁלוֹם", ["שָׁלוֹם"]),
    "Persian": ("می\u200cخواهم", ["می\u200cخواهم"]),
    "Korean": ("안녕 하세요", ["안녕", "하세요"]),
    "decomposed": ("cafe\u0301s nai\u0308ve", ["cafe\u0301s", "nai\u0308ve"]),
    "mixed": ("iPhone手机 2024年!", ["iPhone", "手", "机", "2024", "年", "!"]),
    "Thai before Latin": ("ที่very", ["ที่", "very"]),
    "English": (
        "It's 3.5, isn't_it?",
        ["It", "'", "s", "3", ".", "5", ",", "isn", "'", "t_it", "?"],
    ),
}


@pytest.mark.parametrize(("text", "expected"), SPELLED.values(), ids=SPELLED)
def test_words_have_their_marks_and_scripts_without_spaces_count_graphemes(text, expected):
    assert counted(text) == expected


@given(st.text(st.characters(max_codepoint=0x2FF, exclude_characters="\xad")))
def test_words_of_latin_are_as_in_python(text):
    import re

    assert counted(text) == re.findall(r"\w+|[^\w\s]", text)
    assert [text[a:b] for a, b in spans(text)] == text.split()
    assert _n_words(text) == len(text.split(" "))


def test_distinct_and_repetition_of_chinese():
    lists, name = token_lists(["我们今天去公园玩", "我们明天去公园玩"])
    assert name == "words or graphemes"
    # 16 graphemes of 9 kinds; 7 pairs and 3 of the second's own; 6 triples and 3 of its own.
    assert [distinct(lists, n) for n in (1, 2, 3)] == [9 / 16, 9 / 16, 9 / 16]
    texts = ["我们走了", "走了走了走了", "我们"]
    assert Repetition().score([Item(text) for text in texts]) == [
        (0.0,), (pytest.approx(1 / 3),), Skipped("under 4 words"),
    ]  # fmt: skip
    assert "graphemes" in Repetition.version


def test_a_chinese_text_has_a_perplexity():
    scorer = Perplexity("tiny-llama", min_words=8)
    found = run_scorer(scorer, [Item("我们今天去公园玩。"), Item("我们。"), Item("a b c d e f g")])
    assert found["skipped"].tolist() == ["", "under 8 words", "under 8 words"]
    assert "8+ words or graphemes" in scorer.version
    assert [
        _n_words(text) for text in ("「你好」 said he", "我们iPhone 15", "a  b", "很好 \n")
    ] == [4, 4, 3, 3]


def test_long_texts_without_spaces_are_cut():
    import pandas as pd

    text = "天地玄黄" * LONG
    assert pieces_of(text) == [text, text[:WINDOW], text[-WINDOW:]]
    frame = pd.DataFrame({"text": ["我们今天，去公园。", "a b\n\nc  d"]})
    assert in_parts(frame, 2)["text"].tolist() == ["我们今天，", "a b", "去公园。", "c d"]
    assert LENGTHS
    tokenizer = load_tokenizer("tiny-gpt2")
    frame = pd.DataFrame({"text": ["去公园"]})
    assert "".join(in_parts(frame, 2, tokenizer)["text"]) == "去公园"


class Seen(Scorer):
    name, version, columns = "accuracy", "1", ("a",)

    def score(self, items):
        return [(1.0,) for _ in items]


@pytest.mark.parametrize(
    ("word", "says", "says_not", "hidden"),
    [
        ("积极", "他很积极地说", "他很消极", "他很...地说"),
        ("ดีมาก", "วันนี้ดีมากครับ", "วันนี้ไม่", "วันนี้...ครับ"),
        ("अच्छा", "यह अच्छा है", "यह अच्छाई", "यह ... है"),
        ("अच्छ", "अच्छ!", "अच्छा", "...!"),
        ("very", "很VERY好", "every", "很...好"),
        ("very", "ที่very", "very\u0301", "ที่..."),
    ],
)
def test_a_word_is_found_in_its_script(word, says, says_not, hidden):
    assert words(word) == [word]
    echo = Echo({"x": (word,)})
    found = echo.score([Item(says, attribute="x"), Item(says_not, attribute="x")])
    assert found == [(1.0,), (0.0,)]
    masked = Masked(Seen(), {"x": (word,)})
    assert masked.masked(Item(says)).text == hidden
    assert MASK not in masked.masked(Item(says_not)).text


def test_what_barring_cannot_read_is_refused():
    tokenizer = load_tokenizer("smollm2-135m")
    for word in ("积极", "अच्छा"):
        with pytest.raises(TaskError, match=f"'{word}' cannot be barred.*bar_prefix_words"):
            Barred(tokenizer, (word,), ["a"])
    barred = Barred(tokenizer, ("very",), ["很", "e\u0301"])
    refused = barred.refuse(torch.zeros(2, len(tokenizer))) < 0
    assert refused[:, tokenizer.convert_tokens_to_ids("very")].tolist() == [True, False]


def test_word_lists_keep_marks_at_their_letters():
    texts = {"good": ["बहुत अच्छा"] * 30, "bad": ["बेकार फिल्म"] * 30}
    found = derive_words(texts, 5, least=1, sure=0)
    assert {word for word, _ in found["good"]} == {"बहुत", "अच्छा"}
