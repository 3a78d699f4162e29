"""System messages, and programs that say how far an answer follows one: from 0 (not at all) to 1.

A judge reads the answer alone, never the instruction. It counts different words, and not how often
a word occurs, so that a text that repeats itself gains nothing. Words of the instruction are not
counted, so that an echo of it gains nothing. Other forms of these words count ("star" for "stars"),
unless the judge is `strict`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

LETTERS = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
FUNCTION_WORDS = {
    "English": "the of and to in is you that it he was for on are as with his they at be this"
    " have from or had by but not what all were we when your can said there use an each which she"
    " do how their if will up other about out many then them these so some her would make like him"
    " into has i my me am it's i'm because more been who",
    "French": "le la les un une des du de et est que qui dans pour pas sur avec il elle nous vous"
    " je tu ils elles ce cette ces son sa ses mon ma mes au aux par plus mais ou où ont sont été"
    " être avoir comme tout très c'est j'ai d'une d'un l'on qu'il n'est leur faire même aussi bien"
    " votre notre était peut",
    "Spanish": "el la los las un una unos unas de del y es que en para por no con su sus se lo como"
    " más pero mi mis tu tus yo él ella nosotros ellos este esta estos eso ser está son fue muy"
    " también hay cuando porque sobre entre todo todos puede hacer tiene me te le al si sin ya",
    "German": "der die das den dem des ein eine einen einem einer und ist nicht zu in von mit sich"
    " auf für es ich du er sie wir ihr sind war auch als an nach bei aus wie oder aber wenn nur"
    " noch kann haben hat wird werden mein meine sein seine dass im am zum zur über sehr man was",
    "Italian": "il lo la i gli le un uno una di del della dei delle e è che non in per con su si da"
    " come più ma mio mia tuo io tu lui lei noi voi loro questo questa sono era anche ho hai ha"
    " essere molto quando perché nel nella al alla ci ogni tutti può fare mi ti cosa",
    "Portuguese": "o a os as um uma uns umas de do da dos das e é que em no na nos nas para por"
    " não com seu sua se mais mas meu minha eu você ele ela nós eles este esta isso ser está são"
    " foi muito também há quando porque sobre ao pela pelo todos pode fazer tem me já como",
}


@cache
def own_words(language: str) -> frozenset[str]:
    """Frequent words that only this one of the languages has."""
    others = [words.split() for name, words in FUNCTION_WORDS.items() if name != language]
    return frozenset(FUNCTION_WORDS[language].split()).difference(*others)


def words_of(answer: str) -> list[str]:
    """The words of an answer in small letters."""
    return [
        word.lower()
        for word in LETTERS.findall(answer.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
    ]


def in_language(answer: str, language: str) -> float:
    """Share of a language's own words among those of all languages, if there are several kinds of
    them and they are as dense as in a text: one word in eight."""
    words = words_of(answer)
    if not words:
        return 0.0
    own = [word for word in words if word in own_words(language)]
    others = sum(
        word in own_words(name) for word in words for name in FUNCTION_WORDS if name != language
    )
    kinds = min(1.0, (len(set(own)) - 1) / 3)
    dense = min(1.0, 8 * len(own) / len(words))
    return max(0.0, kinds) * dense * len(own) / (len(own) + others) if own else 0.0


def says(answer: str, words: str) -> float:
    """Kinds of these words in the answer, of three. A star stands for any ending."""
    text = " ".join(words_of(answer))
    kinds = sum(
        bool(re.search(rf"\b{re.escape(word).replace(chr(92) + '*', '[^ ]*')}(?![^ ])", text))
        for word in words.split()
    )
    return min(1.0, kinds / 3)


def in_capitals(answer: str, share: float = 1.0) -> float:
    """Share of capital letters: 0 up to the half."""
    letters = [letter for letter in answer if letter.isalpha()]
    if len(letters) < 10:
        return 0.0
    return max(0.0, 2 * sum(map(str.isupper, letters)) / len(letters) - 1)


def as_list(answer: str, items: int = 3) -> float:
    """Different lines that begin as items of a list do."""
    lines = {line.strip() for line in answer.splitlines()}
    return min(1.0, sum(bool(re.match(r"(?:[-*•]|\d+[.)])\s*\w", line)) for line in lines) / items)


def as_poem(answer: str, lines: int = 4) -> float:
    """Share of short lines that are all different, if there are four."""
    written = [line.strip() for line in answer.splitlines() if line.strip()]
    short = {line for line in written if 2 <= len(line.split()) <= 10 and not line[0].isdigit()}
    return len(short) / len(written) if len(short) >= lines else 0.0


def one_sentence(answer: str, words: int = 4) -> float:
    """1 if the answer is one sentence of some words that ends."""
    ends = re.findall(r"[.!?](?=\s|$)", answer.strip())
    ended = answer.strip().endswith((".", "!", "?"))
    return float(ended and len(ends) == 1 and len(words_of(answer)) >= words)


def ends_with(answer: str, last: str) -> float:
    """1 if these are the last words, and there is an answer before them."""
    wanted, words = last.lower().split(), words_of(answer)
    return float(words[-len(wanted) :] == wanted and len(words) >= len(wanted) + 4)


def without(answer: str, word: str) -> float:
    """1 if an answer of ten words lacks this one."""
    words = words_of(answer)
    return float(len(words) >= 10 and word.lower() not in words)


def exclaims(answer: str, sentences: int = 2) -> float:
    """Share of sentences that end with an exclamation mark, if there are two different ones."""
    ended = {part.strip() for part in re.findall(r"[^.!?]*[.!?]", answer) if words_of(part)}
    loud = [part for part in ended if part.endswith("!")]
    return len(loud) / len(ended) if len(loud) >= sentences else 0.0


def with_emoji(answer: str, kinds: int = 2) -> float:
    """Kinds of pictures among the letters, where one alone is none."""
    pictures = set(re.findall("[\U0001f300-\U0001faff\u2600-\u27bf]", answer))
    return min(1.0, max(0, len(pictures) - 1) / (kinds - 1))


JUDGES: Mapping[str, Callable[..., float]] = {
    "language": in_language,
    "says": says,
    "capitals": in_capitals,
    "list": as_list,
    "poem": as_poem,
    "one sentence": one_sentence,
    "last words": ends_with,
    "without": without,
    "exclaims": exclaims,
    "emoji": with_emoji,
}
"""By name in more/instructions.toml; a judge takes the answer and its argument."""


def rotated(questions: Sequence[str], first: int, turns: int) -> list[str]:
    """The questions of a chat, from the one with the number `first` on; the last is followed by the
    first."""
    return [questions[(first + turn) % len(questions)] for turn in range(turns)]


def benchmark() -> dict[str, Any]:
    """more/instructions.toml: the neutral message, the questions, and the messages, each with its
    set ("tune", "test" or "out") and its judge."""
    text = resources.files(__package__).joinpath("more", "instructions.toml").read_text("utf-8")
    return tomllib.loads(text)


def strict(judge: Mapping[str, object], instruction: str) -> dict[str, object]:
    """The judge without words that are akin to one of the instruction: one begins as the other
    does, or both have the same first four letters. Nor does a word count that another one with a
    star covers."""
    said = [word for word in words_of(instruction) if len(word) >= 3]

    def is_akin(word: str) -> bool:
        begins = (word.startswith(one) or one.startswith(word) for one in said)
        return any(begins) or word[:4] in {one[:4] for one in said}

    if "says" not in judge:
        return dict(judge)
    words = str(judge["says"]).split()
    stems = [word[:-1] for word in words if word.endswith("*")]
    return {
        "says": " ".join(
            word
            for word in words
            if not is_akin(stem := word.rstrip("*"))
            and not any(stem != short and stem.startswith(short) for short in stems)
        )
    }


def judged(answer: str, judge: Mapping[str, object]) -> float:
    """How far an answer follows the instruction of this judge ({name: argument})."""
    ((name, argument),) = judge.items()
    return JUDGES[name](answer, argument)
