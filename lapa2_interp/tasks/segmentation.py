"""Words of a text in any script, for all that counts or compares them.

Words stand between spaces and signs, with marks kept at their letters. Scripts that write no spaces
between words (Han, kana, and those of South East Asia: Thai, Lao, Khmer, Burmese) count by
graphemes: what a reader takes for one character. A sign is one grapheme, too, such as an emoji of
several characters. What a reader cannot tell apart counts as the same (`normalize_text`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import regex

COUNT_UNIT = "words or graphemes"
"""For the versions of scorers that count so."""
SPACE = r"\s\x1c-\x1f"  # with these, as str.split
UNSPACED = r"[[\p{L}\p{Nl}]&&[\p{Han}\p{scx=Hiragana}\p{scx=Katakana}\p{Line_Break=SA}]]"
# Letters, digits and "_", as \w of re has them. Joiners and soft hyphens stand inside words.
BEGIN = rf"[[\p{{L}}\p{{N}}_]--{UNSPACED}]"
INSIDE = rf"[[\p{{L}}\p{{N}}\p{{M}}_\u00ad\u200c\u200d]--{UNSPACED}]"
WORD = rf"{BEGIN}{INSIDE}*"
GRAPHEME = rf"(?={UNSPACED})\X\p{{M}}*"
SIGN = rf"[^\p{{L}}\p{{N}}\p{{M}}_{SPACE}]"

UNSEEN = r"[\p{Bidi_Control}\u00ad\u2060\ufeff]"  # directions, soft hyphens, joiners of words

_UNSEEN = regex.compile(UNSEEN, regex.V1)
_UNSPACED = regex.compile(UNSPACED, regex.V1)
_WORDS = regex.compile(rf"{WORD}|(?:{GRAPHEME})+", regex.V1)
_COUNTED = regex.compile(rf"{GRAPHEME}|{WORD}|(?=[^{SPACE}\u200b])\X", regex.V1)
_SPANS = regex.compile(rf"{SIGN}*{GRAPHEME}{SIGN}*|(?:(?!{UNSPACED})[^{SPACE}])+", regex.V1)
_BEGINNING, _END = regex.compile(rf"{INSIDE}*", regex.V1), regex.compile(rf"{WORD}\Z", regex.V1)
_LETTERS = regex.compile(rf"(?=\P{{M}})[{INSIDE}--[\p{{Nd}}_]]{{3,}}", regex.V1)


def normalize_text(text: str) -> str:
    """A text as it is read: letters and marks composed, and no characters that are never seen."""
    return unicodedata.normalize("NFC", _UNSEEN.sub("", text))


def has_unspaced_script(text: str) -> bool:
    """Whether a text has letters of a script that writes no spaces between words."""
    return _UNSPACED.search(text) is not None


def words(text: str) -> list[str]:
    """The words of a text in small letters; of scripts without spaces, what stands between
    signs."""
    return _WORDS.findall(normalize_text(text).lower())


def words_and_signs(text: str) -> list[str]:
    """Words, graphemes of scripts without spaces, and signs, in order."""
    return _COUNTED.findall(normalize_text(text))


def letter_runs(text: str) -> list[str]:
    """Runs of three letters and more, in small letters and of scripts with spaces."""
    return _LETTERS.findall(normalize_text(text).lower())


def word_spans(text: str) -> list[tuple[int, int]]:
    """Where the words between spaces, and the graphemes of scripts without spaces, begin and end in
    a text; signs belong to the word they touch."""
    return [found.span() for found in _SPANS.finditer(text)]


def words_between(text: str, start: int, stop: int) -> str:
    """The words of a text whose numbers, as of `word_spans`, are in [start, stop), with one space
    for white space between them."""
    chosen = word_spans(text)[start:stop]
    return " ".join(text[chosen[0][0] : chosen[-1][1]].split()) if chosen else ""


def word_continuation(text: str) -> str:
    """What a text adds to a word that stands before it."""
    return _BEGINNING.match(text)[0]


def last_word(text: str) -> str:
    """The word that a text ends with, perhaps unfinished; "" if none."""
    found = _END.search(text)
    return found[0] if found else ""


def words_pattern(wanted: Iterable[str]) -> regex.Pattern[str]:
    """Finds words of `words` in a text from `normalize_text`, in any letter case: whole, or
    anywhere in a script without spaces."""
    spelled = []
    for word in wanted:
        large = normalize_text(word.upper())  # of some letters in another number of characters
        spelled += [word, large] if large.lower() == word else [word]
    found = [
        regex.escape(word)
        if has_unspaced_script(word)
        else rf"(?<!{WORD}){regex.escape(word)}(?!{INSIDE})"
        for word in spelled
    ]
    return regex.compile(rf"(?V1i-f){'|'.join(found)}")
