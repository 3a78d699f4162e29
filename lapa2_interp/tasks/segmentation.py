"""Words of a text in any script, for counts and comparisons.

A word stands between spaces and signs; marks belong to their letters. Scripts that write no spaces
between words (Han, kana, and the South East Asian scripts Thai, Lao, Khmer, Burmese) are counted by
graphemes: characters as a reader sees them. A sign is one grapheme, too, such as an emoji that is
made of more than one character. Texts that look the same count as the same (`normalize_text`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import regex

COUNT_UNIT = "words or graphemes"
"""The unit of counts, for the versions of scorers."""
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
    """A text with letters and marks composed, and without invisible characters."""
    return unicodedata.normalize("NFC", _UNSEEN.sub("", text))


def text_key(text: str) -> str:
    """Equal for texts that are the same up to white space, small and capital letters, and invisible
    characters. What divides texts into parts divides these keys, so that no part has seen a text
    of another."""
    return " ".join(normalize_text(text).casefold().split())


def has_unspaced_script(text: str) -> bool:
    """True if a text has letters of a script that writes no spaces between words."""
    return _UNSPACED.search(text) is not None


def words(text: str) -> list[str]:
    """The words of a text in lower case. In scripts without spaces, the text between two signs is
    one word."""
    return _WORDS.findall(normalize_text(text).lower())


def words_and_signs(text: str) -> list[str]:
    """Words, graphemes of scripts without spaces, and signs, in order."""
    return _COUNTED.findall(normalize_text(text))


def letter_runs(text: str) -> list[str]:
    """Runs of three letters or more of scripts with spaces, in lower case."""
    return _LETTERS.findall(normalize_text(text).lower())


def word_spans(text: str) -> list[tuple[int, int]]:
    """Start and stop in a text of each word between spaces, and of each grapheme of scripts without
    spaces. Signs belong to the word they touch."""
    return [match.span() for match in _SPANS.finditer(text)]


def words_between(text: str, start: int, stop: int) -> str:
    """The words of a text with numbers in [start, stop), counted as by `word_spans`. White space
    between them becomes one space."""
    chosen = word_spans(text)[start:stop]
    return " ".join(text[chosen[0][0] : chosen[-1][1]].split()) if chosen else ""


def word_continuation(text: str) -> str:
    """The characters at the beginning of a text that continue a word before it."""
    return _BEGINNING.match(text)[0]


def last_word(text: str) -> str:
    """The word at the end of a text, perhaps unfinished; "" if there is none."""
    match = _END.search(text)
    return match[0] if match else ""


def words_pattern(wanted: Iterable[str]) -> regex.Pattern[str]:
    """A pattern that finds these words, as of `words`, in a text from `normalize_text`, in any
    letter
    case: whole words, or anywhere in a script without spaces."""
    spelled = []
    for word in wanted:
        large = normalize_text(word.upper())  # some letters become more than one
        spelled += [word, large] if large.lower() == word else [word]
    patterns = [
        regex.escape(word)
        if has_unspaced_script(word)
        else rf"(?<!{WORD}){regex.escape(word)}(?!{INSIDE})"
        for word in spelled
    ]
    return regex.compile(rf"(?V1i-f){'|'.join(patterns)}")
