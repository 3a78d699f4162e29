"""System messages that a program can check: an answer follows one, or it breaks it.

A judge reads the answer and says yes or no. It says no to an answer that hardly answers: one of
fewer than four words beside what the message asks for. Marks of emphasis and invisible characters
do not count. A sentence that repeats four words of the message's own form in a row is an *echo*: an
answer must follow its message also without its echoes, so that one who says "I will end every
answer with these words: So it is." has not followed. An answer that is cut off before its end does
not end as it should, so it breaks messages about the end.

IFEval (Zhou et al. 2023) and IFBench (Pyatkin et al. 2025) ask for such things in a single answer.
Here each message holds for all answers of a chat.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from itertools import product
from typing import Any, Literal, NamedTuple

from lapa2_interp.tasks.instructions import FUNCTION_WORDS, own_words

Set = Literal["pilot", "choose", "test"]
FEWEST = 4
"""Words of an answer, beside those that the message asks for."""
ECHO = 4
"""Words of the message in a row that make a sentence an echo."""
ABBREVIATIONS = re.compile(
    r"\b(e\.g|i\.e|a\.m|p\.m|etc|approx|vs|Dr|Mr|Mrs|Ms|St|No|Prof)\.(?=\s+[^\sA-Z]|\s+[A-Z]\w*\b)"
)
ENDS = re.compile(r"[.!?\u2026]+[\"'\u201d\u2019\u00bb)\]]*(?=\s|$)")
"""The end of a sentence, or dots within one."""
WORD = re.compile(r"[^\W_]+")
EMOJI = re.compile(
    "[\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff]|.\ufe0f|\u20e3"
    "|[\u231a\u231b\u23e9-\u23ec\u23f0\u23f3\u25fd\u25fe\u2614\u2615\u2648-\u2653\u267f\u2693"
    "\u26a1\u26aa\u26ab\u26bd\u26be\u26c4\u26c5\u26ce\u26d4\u26ea\u26f2\u26f3\u26f5\u26fa\u26fd"
    "\u2705\u270a\u270b\u2728\u274c\u274e\u2753-\u2755\u2757\u2795-\u2797\u27b0\u27bf\u2b1b\u2b1c"
    "\u2b50\u2b55]"
)
QUOTES = '"\u201c\u201d\u201e\u00ab\u00bb'
NEGATIONS = {"not", "no", "never", "t"}
"""Words of a sentence that does not say what it mentions; t is that of "isn't"."""
SAID = ("ends with", "begins with", "mentions")
"""Judges of messages whose value, of several words, is to be said, and so is no echo."""


def visible(text: str) -> str:
    """The text without invisible characters."""
    return "".join(letter for letter in text if unicodedata.category(letter) != "Cf")


def plain(answer: str) -> str:
    """The answer without emphasis, invisible characters and white space around it."""
    lines = (re.sub(r"^\s*#+\s*", "", line) for line in visible(answer).strip().splitlines())
    return re.sub(r"\*\*|__|(?<!\w)[*_](?=\w)|(?<=[\w.!?])[*_](?!\w)", "", "\n".join(lines)).strip()


def words_of(text: str) -> list[str]:
    """Words and numbers in small letters. An apostrophe parts words: "you're" has the word you."""
    return [word.lower() for word in WORD.findall(visible(text))]


def sentences_of(text: str) -> list[str]:
    """The sentences, of which a new line begins one. Dots of abbreviations, of numbers and before a
    small letter end none, and neither does the number of an item."""
    sentences = []
    for line in plain(text).splitlines():
        body = re.sub(r"^\s*(?:[-*\u2022\u2013]|\d+[.)])\s+", "", line)
        body = ABBREVIATIONS.sub(lambda match: match.group().replace(".", "\u00b7"), body)
        body = EMOJI.sub("", body).strip()
        first = 0
        for end in ENDS.finditer(body):
            following = body[end.end() :].lstrip()
            if not following or not following[0].islower():
                sentences.append(body[first : end.end()].strip())
                first = end.end()
        sentences.append(body[first:].strip())
    return [sentence for sentence in sentences if WORD.search(sentence)]


def is_answer(answer: str, more: int = 0, fewest: int = FEWEST) -> bool:
    """There are a few words with letters, beside so many that the message asks for, and hardly one
    of the few is another one again."""
    words = [word for word in words_of(answer) if not word.isdigit()]
    return len(words) >= fewest + more and len(set(words)) >= max(2, fewest - 1)


def ends_with(answer: str, last: str) -> bool:
    """The last words are these."""
    wanted, words = words_of(last), words_of(answer)
    return words[-len(wanted) :] == wanted and is_answer(answer, len(wanted))


def begins_with(answer: str, first: str) -> bool:
    """The first words are these."""
    wanted, words = words_of(first), words_of(answer)
    return words[: len(wanted)] == wanted and is_answer(answer, len(wanted))


def has_sentences(answer: str, number: int) -> bool:
    """There are so many sentences, and the last one ends."""
    sentences = sentences_of(answer)
    ended = bool(sentences) and any(
        end.end() == len(sentences[-1]) for end in ENDS.finditer(sentences[-1])
    )
    return len(sentences) == number and ended and is_answer(answer)


def has_at_most(answer: str, words: int) -> bool:
    """There are at most so many words, numbers counted too, and two at least."""
    apart = re.findall(r"[^\W_]+(?:['\u2019][^\W_]+)*", answer)
    return is_answer(answer, fewest=2) and len(apart) <= words


def is_in_language(answer: str, language: str) -> bool:
    """One word in seven is a frequent one of the language, of three kinds or more, no other
    language has as many, and hardly any word is English alone."""
    words = words_of(answer)
    of_language = {
        name: [word for word in words if word in frequent.split()]
        for name, frequent in FUNCTION_WORDS.items()
    }
    own = of_language.pop(language)
    most = max(map(len, of_language.values()))
    english = sum(word in own_words("English") for word in words)
    return (
        is_answer(answer)
        and len(set(own)) >= 3
        and 7 * len(own) >= len(words)
        and len(own) > most
        and 10 * english <= len(words)
    )


def avoids(answer: str, word: str) -> bool:
    """The word is not there."""
    return word.lower() not in words_of(answer) and is_answer(answer)


def in_capitals(answer: str) -> bool:
    """All letters are capitals; those that have no capitals are not meant."""
    return _are_all(answer.replace("\u00df", ""), str.isupper)


def in_small_letters(answer: str) -> bool:
    """All letters are small."""
    return _are_all(answer, str.islower)


def _are_all(answer: str, kind: Callable[[str], bool]) -> bool:
    return is_answer(answer) and all(map(kind, filter(str.isalpha, answer)))


def names(answer: str, name: str) -> bool:
    """The name is there as a word, with its capital letter."""
    written = WORD.findall(answer)
    return (name in written or name.upper() in written) and is_answer(answer, 1)


def mentions(answer: str, parts: str) -> bool:
    """One sentence has all parts in this order, and no negation. A star stands for any ending, and
    | for "or"."""
    kinds = [kind.split("|") for kind in parts.lower().split()]

    def is_said(sentence: str) -> bool:
        words = words_of(sentence.replace("\u20ac", " euro "))
        start = 0
        for kind in kinds:
            following = (
                i
                for i in range(start, len(words))
                if any(
                    words[i].startswith(form[:-1]) if form.endswith("*") else words[i] == form
                    for form in kind
                )
            )
            start = next(following, -1) + 1
            if not start:
                return False
        return not NEGATIONS & set(words)

    return any(map(is_said, sentences_of(answer))) and is_answer(answer, len(kinds))


def is_list(answer: str) -> bool:
    """All lines are different items that begin with "- ", two or more."""
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    items = {line for line in lines if re.match(r"-\s+\S", line) and WORD.search(line)}
    return len(items) == len(lines) >= 2


def is_quoted(answer: str) -> bool:
    """Two quotation marks stand around the whole, and there are no others."""
    text = plain(answer).rstrip(".!?")
    marks = [i for i, letter in enumerate(text) if letter in QUOTES]
    return marks == [0, len(text) - 1] and is_answer(answer)


def asks(answer: str) -> bool:
    """The last sentence is a question, and there is an answer before it."""
    sentences = sentences_of(answer)
    asked = bool(sentences) and sentences[-1].rstrip("\"'\u201d\u2019\u00bb)]").endswith("?")
    return asked and is_answer(" ".join(sentences[:-1]))


def has_emoji(answer: str) -> bool:
    """There is a picture among the words."""
    return bool(EMOJI.search(answer)) and is_answer(answer)


def has_title(answer: str) -> bool:
    """A line in bold that is no sentence comes first, and text follows."""
    line, _, rest = answer.strip().partition("\n")
    match = re.fullmatch(r"#*\s*\*\*([^*]+)\*\*:?", EMOJI.sub("", line).strip())
    title = match and match.group(1).strip(" :")
    return bool(
        title
        and WORD.search(title)
        and title.lower() not in ("title", "heading", "this")
        and not ENDS.search(title.rstrip("?!"))
        and is_answer(rest)
    )


JUDGES: Mapping[str, Callable[..., bool]] = {
    "ends with": ends_with,
    "begins with": begins_with,
    "sentences": has_sentences,
    "words": has_at_most,
    "language": is_in_language,
    "avoids": avoids,
    "capitals": in_capitals,
    "small letters": in_small_letters,
    "names": names,
    "mentions": mentions,
    "list": is_list,
    "quotes": is_quoted,
    "asks": asks,
    "emoji": has_emoji,
    "title": has_title,
}
"""By name in more/exact_messages.toml; a judge takes the answer and, if there is one, its value."""


class Message(NamedTuple):
    """A system message.

    Attributes:
        kind: Of what it asks for.
        text: The message.
        judge: The name of its judge.
        argument: What the judge takes beside the answer: none, or one value.
        form: The parts of the text whose words make an echo, a line each; none by default.
    """

    kind: str
    text: str
    judge: str
    argument: tuple[str | int, ...]
    form: str = ""

    def is_followed(self, answer: str) -> bool:
        """Whether an answer follows the message, with its echoes and without."""
        judge = JUDGES[self.judge]
        rest = self.without_echoes(answer)
        return judge(answer, *self.argument) and (rest == answer or judge(rest, *self.argument))

    def without_echoes(self, answer: str) -> str:
        """The answer without sentences that repeat the message; itself where there are none."""
        in_form = {run for line in self.form.splitlines() for run in _runs(line)}
        sentences = sentences_of(answer)
        own = [sentence for sentence in sentences if not in_form & set(_runs(sentence))]
        return answer if len(own) == len(sentences) else "\n".join(own)


def _runs(text: str) -> list[tuple[str, ...]]:
    """All runs of `ECHO` words."""
    words = words_of(text)
    return [tuple(words[i : i + ECHO]) for i in range(len(words) - ECHO + 1)]


@cache
def exact_messages() -> dict[str, Any]:
    """more/exact_messages.toml: kinds, questions, and what users ask against a message."""
    text = resources.files(__package__).joinpath("more", "exact_messages.toml").read_text("utf-8")
    return tomllib.loads(text)


def messages_of(name: Set) -> list[Message]:
    """The messages of a set, in the order of the file.

    Example:
        >>> from lapa2_interp.tasks.exact_messages import messages_of
        >>> messages = messages_of("test")
        >>> messages[0].text
        'End every answer with the words: So it is.'
        >>> messages[0].is_followed("Water it less often. So it is.")
        True
    """
    messages = []
    for kind, parts in exact_messages()["kind"].items():
        own, judge = parts[name], parts["judge"]
        for text, value in product(own["texts"], own.get("values", [None])):
            shown, argument = value, value
            if isinstance(value, dict):
                shown, argument = value["text"], value["argument"]
            arguments = () if argument is None else (argument,)
            form = text.format(value="\n" if judge in SAID else shown)
            messages.append(Message(kind, text.format(value=shown), judge, arguments, form))
    return messages
