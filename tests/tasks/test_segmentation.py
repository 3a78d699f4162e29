"""Words of every script, and what counts them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lapa2_interp.generation.banned_words import BannedWords
from lapa2_interp.models import load_tokenizer
from lapa2_interp.runs.texts import in_parts
from lapa2_interp.scoring.agreement import LENGTH_CLASSES
from lapa2_interp.scoring.distinct import Repetition, distinct, token_lists
from lapa2_interp.scoring.echo import MASK, Echo, Masked
from lapa2_interp.scoring.scorer import Scorer, SkippedText, TextItem, run_scorer
from lapa2_interp.scoring.training import END_WORDS, LONG, text_and_ends
from lapa2_interp.scoring.transformer import Perplexity, _n_words
from lapa2_interp.tasks.segmentation import word_spans, words, words_and_signs
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
    "decomposed": ("cafe\u0301s nai\u0308ve", ["caf\u00e9s", "na\u00efve"]),
    "decomposed Korean": ("\u1112\u1161\u11ab\u1100\u116e\u11a8", ["\ud55c\uad6d"]),
    "marks without a letter": ("a \u0301b", ["a", "\u0301", "b"]),
    "emoji": (
        "\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467ok\u2764\ufe0f",
        [
            "\U0001f44d\U0001f3fd",
            "\U0001f468\u200d\U0001f469\u200d\U0001f467",
            "ok",
            "\u2764\ufe0f",
        ],
    ),
    "flags": (
        "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7",
        ["\U0001f1e9\U0001f1ea", "\U0001f1eb\U0001f1f7"],
    ),
    "directions": ("\u202bשל\u200fום\u202c \u2066a\u2069", ["שלום", "a"]),
    "soft hyphens and byte-order marks": ("\ufeffve\u00adry very", ["very", "very"]),
    "mixed": ("iPhone手机 2024年!", ["iPhone", "手", "机", "2024", "年", "!"]),
    "Thai before Latin": ("ที่very", ["ที่", "very"]),
    "English": (
        "It's 3.5, isn't_it?",
        ["It", "'", "s", "3", ".", "5", ",", "isn", "'", "t_it", "?"],
    ),
}


@pytest.mark.parametrize(("text", "expected"), SPELLED.values(), ids=SPELLED)
def test_words_have_their_marks_and_scripts_without_spaces_count_graphemes(text, expected):
    assert words_and_signs(text) == expected


@given(st.text(st.characters(max_codepoint=0x2FF, exclude_characters="\xad")))
def test_words_of_latin_are_as_in_python(text):
    import re

    assert words_and_signs(text) == re.findall(r"\w+|[^\w\s]", text)
    assert [text[a:b] for a, b in word_spans(text)] == text.split()
    assert _n_words(text) == len(text.split(" "))


def test_distinct_and_repetition_of_chinese():
    lists, name = token_lists(["我们今天去公园玩", "我们明天去公园玩"])
    assert name == "words or graphemes"
    # 16 graphemes of 9 kinds; 7 pairs and 3 of the second's own; 6 triples and 3 of its own.
    assert [distinct(lists, n) for n in (1, 2, 3)] == [9 / 16, 9 / 16, 9 / 16]
    texts = ["我们走了", "走了走了走了", "我们"]
    assert Repetition().score([TextItem(text) for text in texts]) == [
        (0.0,), (pytest.approx(1 / 3),), SkippedText("under 4 words"),
    ]  # fmt: skip
    assert "graphemes" in Repetition.version


def test_a_chinese_text_has_a_perplexity():
    scorer = Perplexity("tiny-llama", min_words=8)
    numbers = run_scorer(
        scorer,
        [TextItem("我们今天去公园玩。"), TextItem("我们。"), TextItem("a b c d e f g")],
    )
    assert numbers["reason"].tolist() == ["", "under 8 words", "under 8 words"]
    assert "8+ words or graphemes" in scorer.version
    assert [
        _n_words(text) for text in ("「你好」 said he", "我们iPhone 15", "a  b", "很好 \n")
    ] == [4, 4, 3, 3]


def test_long_texts_without_spaces_are_cut():
    import pandas as pd

    text = "天地玄黄" * LONG
    assert text_and_ends(text) == [text, text[:END_WORDS], text[-END_WORDS:]]
    frame = pd.DataFrame({"text": ["我们今天，去公园。", "a b\n\nc  d"]})
    assert in_parts(frame, 2)["text"].tolist() == ["我们今天，", "a b", "去公园。", "c d"]
    assert LENGTH_CLASSES
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
        ("caf\u00e9", "a Cafe\u0301!", "a cafe", "a ...!"),
        ("i\u0307stanbul", "\u0130stanbul", "Istanbul", "..."),
        ("i\u0307stanbul", "I\u0307STANBUL", "Istanbul", "..."),
        ("ma\u00dfe", "Ma\u00dfe", "Masse", "..."),
        ("סרט", "\u202bס\u200fרט\u202c", "הסרט", "..."),
    ],
)
def test_a_word_is_found_in_its_script(word, says, says_not, hidden):
    assert words(word) == [word]
    echo = Echo({"x": (word,)})
    echoed = echo.score([TextItem(says, attribute="x"), TextItem(says_not, attribute="x")])
    assert echoed == [(1.0,), (0.0,)]
    masked = Masked(Seen(), {"x": (word,)})
    assert masked.masked(TextItem(says)).text == hidden
    assert MASK not in masked.masked(TextItem(says_not)).text


def test_a_word_is_barred_beside_texts_of_other_scripts():
    tokenizer = load_tokenizer("smollm2-135m")
    banned = BannedWords(tokenizer, ("very",), ["很", "e\u0301"])
    refused = banned.mask(torch.zeros(2, len(tokenizer))) < 0
    assert refused[:, tokenizer.convert_tokens_to_ids("very")].tolist() == [True, False]


def test_a_mark_in_a_token_of_its_own_is_barred():
    tokenizer = load_tokenizer("tiny-gpt2")
    spelled = [*map(chr, range(97, 123)), "\u0301", "\u00e9", " ", "\u200f", "e\u0301"]
    made = spelled + ["?"] * (len(tokenizer) - len(spelled))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lapa2_interp.generation.banned_words.vocabulary_texts", lambda *_: tuple(made)
        )
        patch.setattr(
            "lapa2_interp.generation.banned_words.REPLACEMENT_CHARACTER", "no check of bytes"
        )
        before = [
            "cafe",
            "caf",
            "cafe\u0301",
            "caf\u200f",
            "the caf\u00e9",
            "Re\u0301sume",
            "r\u00e9sum",
        ]
        banned = BannedWords(tokenizer, ("caf\u00e9", "r\u00e9sum\u00e9"), before)
        for _ in range(2):
            refused = banned.mask(torch.zeros(len(before), len(tokenizer))) < 0
            words = [{made[i] for i in row.nonzero()[:, 0].tolist()} for row in refused]
            letters = {"\u00e9", "e\u0301"}
            assert words == [{"\u0301"}, letters, set(), letters, set(), {"\u0301"}, letters]
            banned.advance([spelled.index("\u200f")] * len(before))


def test_word_lists_keep_marks_at_their_letters():
    texts = {"good": ["बहुत अच्छा"] * 30, "bad": ["बेकार फिल्म"] * 30}
    derived = derive_words(texts, 5, min_count=1, min_z=0)
    assert {word for word, _ in derived["good"]} == {"बहुत", "अच्छा"}
