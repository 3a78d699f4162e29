"""What a judge has said: the answer in a chat completion, and the ratings in an answer.

Servers answer one question in several forms. The content is a text, or a list of parts; thoughts
stand in fields of their own, or in the text before the answer; the JSON is bare, fenced, or behind
words. Thoughts are never read as an answer, and ratings are read only where there is one reading.
Thoughts have more marks than are known here, so an answer with an unknown tag is not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lapa2_interp._util.parsing import parse_json
from lapa2_interp.scoring.scorer import SkippedText

COLUMNS = ("relevance", "fluency", "topicality")
FORM = '{"relevance": int, "fluency": int, "topicality": int}'
"""The form that the prompt asks for; models repeat it before they answer."""
LONGEST = 100_000
"""Characters of an answer without its thoughts, at most: a longer one holds no rating."""
REFUSED = SkippedText("refused", final=False)
CUT_REASONS = ("length", "max_tokens", "max_output_tokens", "model_length")
"""Words of servers for an answer that ended at a limit of tokens, in small letters."""
REFUSAL_REASONS = ("content_filter", "safety", "refusal")
"""Words of servers for an answer that was withheld, in small letters."""
THOUGHTS = re.compile(r"[<\[◁](/?)(?:think|thinking|thought|reasoning)[>\]▷]", re.IGNORECASE)
"""Marks around thoughts; with a slash, their end."""
TAG = re.compile(r"<[^\s<>][^<>]*>")
"""Any tag in angle brackets: what it marks may be a draft."""
CLOSING = " \t\r\n`*.'\")]}"
"""Characters that may close an answer behind its rating: those of fences, brackets and quotes."""
FIELD = re.compile(rf"\"(?:{'|'.join(COLUMNS)})\"\s*:")


@dataclass(frozen=True)
class Answer:
    """The words of an answer.

    Attributes:
        text: "" if there are none.
        is_cut: It ended at a limit of tokens.
    """

    text: str
    is_cut: bool = False

    @property
    def ratings(self) -> tuple[float, float, float] | None:
        """As `parse_ratings`."""
        return parse_ratings(self.text)


def read_answer(response: Any) -> Answer | SkippedText:
    """The answer in a chat completion, or that it was refused.

    Args:
        response: The JSON that the server sent, whatever it is.
    """
    choices = response.get("choices") if isinstance(response, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return Answer("")
    message = choice.get("message")
    message = message if isinstance(message, dict) else {}
    reason = str(choice.get("finish_reason")).lower()
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    if message.get("refusal") or reason in REFUSAL_REASONS or any(map(_is_refusal, parts)):
        return REFUSED
    return Answer("".join(map(_part_text, parts)), reason in CUT_REASONS)


def found_error(response: Any) -> Any:
    """The error in a response, on its own or in the place of an answer, as gateways send it with
    status 200; None of an answer."""
    if not isinstance(response, dict):
        return None
    choices = response.get("choices")
    if not choices:
        return response.get("error")
    choice = choices[0] if isinstance(choices, list) else None
    if not isinstance(choice, dict):
        return None
    failed = str(choice.get("finish_reason")).lower() == "error"
    return choice.get("error") or ("the answer ended with an error" if failed else None)


def error_status(error: Any) -> int:
    """The status that an error with status 200 names, or else 500."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int and 400 <= code < 600 else 500


def code_and_message(error: Any, key: str) -> tuple[str, str]:
    """The code and the message of a server that refuses. Only a message in OpenAI's or vLLM's form
    is quoted, cut short, and without words that hold a piece of the key or may be the key in
    another form, since some servers repeat it."""
    error = error if isinstance(error, dict) else {"message": error}
    message = error.get("message")
    if not isinstance(message, str):
        return str(error.get("code") or ""), "its answer is no error in JSON"
    pieces = [key[at : at + 6].lower() for at in range(max(1, len(key) - 5))]
    words = [
        "[...]" if len(word) > 24 or any(piece in word.lower() for piece in pieces) else word
        for word in message.split()
    ]
    return str(error.get("code") or ""), " ".join(words)[:200]


def _is_refusal(part: Any) -> bool:
    return isinstance(part, dict) and (part.get("type") == "refusal" or bool(part.get("refusal")))


def _part_text(part: Any) -> str:
    """The words of a part of a content; "" of a thought, a picture, or what is no part."""
    if isinstance(part, dict) and part.get("type") in ("text", "output_text"):
        part = part.get("text")
    return part if isinstance(part, str) else ""


def parse_ratings(answer: str) -> tuple[float, float, float] | None:
    """Relevance, fluency and topicality of an answer; None unless there is one reading.

    An object is a rating if it has exactly these three fields with whole numbers from 1 to 5, which
    may be written 4, 4.0 or "4". Words may stand before it, and it may be repeated. Another object
    or an unfinished one with one of the fields is another reading. An answer with a tag in angle
    brackets, or with words behind its last object, has none: such words may take a draft back.

    Args:
        answer: The words of a model. Thoughts in front, up to the last </think>, are not read.
    """
    *_, last = [("", 0), *((mark[1], mark.end()) for mark in THOUGHTS.finditer(answer))]
    slash, start = last
    if start and not slash:  # thoughts that do not end
        return None
    text = answer[start:].replace(FORM, "")
    if len(text) > LONGEST or TAG.search(text):
        return None
    objects = list(_objects(text))
    if not objects or text[objects[-1].end :].strip(CLOSING):
        return None
    if len(FIELD.findall(text)) > sum(len(item.rated) for item in objects):
        return None
    readings = {_rating(item.fields) for item in objects if item.rated or item is objects[-1]}
    return readings.pop() if len(readings) == 1 else None


class _Object(NamedTuple):
    """A JSON object in a text: the rated fields that its words name, its fields (None if no parser
    of ours takes it), and the place where it ends."""

    rated: list[str]
    fields: Any
    end: int


def _objects(text: str) -> Iterator[_Object]:
    """The outermost JSON objects in a text."""
    decoder, start = json.JSONDecoder(), 0
    while (start := text.find("{", start)) >= 0:
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
            continue
        words = text[start:end]
        try:
            fields = parse_json(words)
        except ValueError:
            fields = None
        yield _Object(FIELD.findall(words), fields, end)
        start = end


def _rating(fields: Any) -> tuple[float, float, float] | None:
    """The three numbers of a rating; None of any other object."""
    if not isinstance(fields, dict) or sorted(fields) != sorted(COLUMNS):
        return None
    numbers = [_whole_number(fields[column]) for column in COLUMNS]
    relevance, fluency, topicality = numbers
    if relevance is None or fluency is None or topicality is None:
        return None
    return relevance, fluency, topicality


def _whole_number(value: Any) -> float | None:
    """A whole number from 1 to 5, also as a text; None of anything else."""
    if isinstance(value, str) and re.fullmatch(r"[1-5](?:\.0)?", value.strip()):
        value = float(value)
    if type(value) not in (int, float) or value not in (1, 2, 3, 4, 5):
        return None
    return float(value)
