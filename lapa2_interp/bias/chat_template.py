"""Chats rendered by their template, and the place of a text in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lapa2_interp._util.memory import bounded_memory
from lapa2_interp._util.parsing import check_text_length, whole_number
from lapa2_interp.errors import LayoutError, parameter, unknown_choice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
TEMPLATE_MEMORY = 2**30
"""Bytes that a chat template may take."""
PLACEHOLDER = "\ue000"
"""A private-use character that replaces a message's text, to see where a chat template puts it."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that templates render as its reasoning; all have the same text."""
MEDIA_FIELDS = (
    "image", "images", "image_url", "audio", "audios", "video", "videos", "file", "files"
)  # fmt: skip
"""Fields of a message that hold what no token of a text stands for."""
GENERATION_TAG = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""A tag that transformers adds to the template language; it renders nothing."""
SPAN_OF_CHAT = re.compile(r"system|(turn|reasoning):\d+|phrase:.*", re.DOTALL)
RESERVED_ARGUMENTS = ("messages", "add_generation_prompt")


class MessageText(NamedTuple):
    """A text of a chat: the index of its message, and the fields that hold it."""

    message: int
    fields: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return (
            f"{'' if 'content' in self.fields else 'the reasoning of '}message {self.message + 1}"
        )


class RenderedChat(NamedTuple):
    """A chat rendered by its template.

    Attributes:
        text: The whole chat.
        ids: Its tokens.
        start, stop: Character offsets of the span's text in it.
        span: The span's text.
        whole: True if the span is all of a message's text, or of its reasoning.
    """

    text: str
    ids: tuple[int, ...]
    start: int
    stop: int
    span: str
    whole: bool


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    span: str,
    add_generation_prompt: bool,
    arguments: Mapping[str, Any],
    n_searched: int | None = None,
) -> RenderedChat:
    """Render a chat and find a span in it; see `Layout.of_chat`, also for the errors."""
    if not messages or not all(map(_is_message, messages)):
        wrong = next((message for message in messages if not _is_message(message)), None)
        raise LayoutError(
            'a chat is a list of messages {"role": ..., "content": ...}, both of them text (join'
            " the texts of parts; leave out images and other parts, which are not read); found"
            f" {str(wrong or messages)[:200]}"
        )
    for number, message in enumerate(messages, 1):
        if media := [name for name in MEDIA_FIELDS if message.get(name)]:
            raise LayoutError(
                f"message {number} of the chat has {media[0]!r}, and only texts are read; leave it"
                " out"
            )
    chat = [dict(message) for message in messages]
    part, phrase = _find_span(chat[:n_searched], span)

    def render(texts: Sequence[Message], tokenize: bool) -> Any:
        return _apply_template(tokenizer, texts, tokenize, add_generation_prompt, arguments)

    _check_arguments(tokenizer, arguments)
    text = render(chat, False)
    # Find the part: render the chat once more with a placeholder in its place.
    chat[part.message] |= dict.fromkeys(part.fields, PLACEHOLDER)
    around = render(chat, False).split(PLACEHOLDER)
    first = len(around[0]) + text[len(around[0]) :].find(part.text)
    if (
        len(around) != 2
        or not text.startswith(around[0])
        or not text.endswith(around[1])
        or text[len(around[0]) : len(text) - len(around[1])].strip() != part.text
    ):
        raise LayoutError(
            f"the chat template does not write {part} once and unchanged, so its tokens cannot be"
            " found"
        )
    start = first + part.text.index(phrase)
    ids = tuple(render([dict(message) for message in messages], True))
    return RenderedChat(text, ids, start, start + len(phrase), phrase, phrase == part.text)


def texts_around_answers(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Sequence[Message]],
    arguments: Mapping[str, Any],
) -> list[str]:
    """The text that a chat template writes before the first answer, and after each answer up to
    where the next one begins. White space that it writes in front of an answer is left to the
    model, which begins there.

    Args:
        turns: The messages before each answer, with `PLACEHOLDER` for the answers before it.

    Raises:
        LayoutError: The template refuses the messages, changes answers, or writes earlier turns
            otherwise once later ones follow.
    """
    chats = [_apply_template(tokenizer, turn, False, True, arguments) for turn in turns]
    pieces = chats[-1].split(PLACEHOLDER)
    if len(pieces) != len(turns) or any(
        chat.rstrip() != PLACEHOLDER.join(pieces[: i + 1]).rstrip() for i, chat in enumerate(chats)
    ):
        raise LayoutError(
            "the chat template writes earlier turns otherwise once later ones follow, so they"
            f" cannot stay in the cache; leave out {parameter('keep_turns', 'true', 'set')}"
        )
    return [chat.rpartition(PLACEHOLDER)[2] for chat in chats]


def check_text_of_answers(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    arguments: Mapping[str, Any],
    text: str,
) -> None:
    """Refuse a text of a chat that is not, but for white space, what its template writes.

    Raises:
        LayoutError: The template changes an answer that later messages follow, such as one with its
            reasoning.
    """
    written = _apply_template(tokenizer, messages, False, True, arguments)
    if "".join(written.split()) != "".join(text.split()):
        raise LayoutError(
            f"the chat template writes the answer {messages[-2].get('content')!r:.80} otherwise"
            " once a message follows it, so it cannot stay in the cache; leave out"
            f" {parameter('keep_turns', 'true', 'set')}"
        )


def _apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tokenize: bool,
    add_generation_prompt: bool,
    arguments: Mapping[str, Any],
) -> Any:
    """The text that a chat template makes of messages, or its tokens.

    Raises:
        LayoutError: The template refuses the messages, takes more than `TEMPLATE_MEMORY`, or writes
            a text that is too long for any model.
    """
    try:
        with bounded_memory(TEMPLATE_MEMORY):
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **arguments
            )
    except MemoryError:
        raise LayoutError(
            "the chat template takes more memory for these messages than the"
            f" {TEMPLATE_MEMORY / 2**30:g} GiB allowed; give the tokenizer another chat_template"
        ) from None
    except Exception as error:  # templates are foreign code, which may raise any error
        reason = " ".join(str(error).split())[:200]
        raise LayoutError(f"the chat template refuses these messages: {reason}") from None
    check_text_length("chat that the template writes,", text)
    return tokenizer(text, add_special_tokens=False)["input_ids"] if tokenize else text


def _is_message(message: Any) -> bool:
    """True if it has a role, and a text or something in place of it, such as tool calls."""
    if not isinstance(message, Mapping):
        return False
    content = message.get("content")
    has_other_fields = content is None and any(
        message[name] for name in {*message} - {"role", "content"}
    )
    return isinstance(message.get("role"), str) and (isinstance(content, str) or has_other_fields)


def _check_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the template does not read, such as misspelt ones: it ignores them."""
    if not arguments:
        return
    from jinja2 import Environment, TemplateError, meta

    try:
        template = tokenizer.get_chat_template(tools=arguments.get("tools"))
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        read = meta.find_undeclared_variables(environment.parse(GENERATION_TAG.sub("", template)))
    except (TemplateError, ValueError, RecursionError) as error:
        raise LayoutError(f"the chat template cannot be read: {error}") from None
    allowed = sorted(
        {*read} - {*RESERVED_ARGUMENTS, "raise_exception", "strftime_now", "namespace", "range"}
    )
    for name in arguments:
        if name not in allowed:
            raise LayoutError(
                unknown_choice(
                    "argument of the chat template", name, allowed or ["none, it reads no argument"]
                )
            )


def check_span_of_chat(span: str) -> None:
    """Check the form of a span of `Layout.of_chat`.

    Raises:
        LayoutError: It has another form.
    """
    if not SPAN_OF_CHAT.fullmatch(span):
        raise LayoutError(
            f"span {span!r} of a chat should be system, turn:NUMBER, reasoning:NUMBER or"
            " phrase:TEXT"
        )


def _find_span(chat: Sequence[Message], span: str) -> tuple[MessageText, str]:
    """The message text that contains a span of `Layout.of_chat`, and the span's own text."""
    # The texts of the chat: contents, reasonings, and the messages that are turns.
    roles = ", ".join(message["role"] for message in chat)
    contents = [
        MessageText(i, ("content",), (message.get("content") or "").strip())
        for i, message in enumerate(chat)
    ]
    reasonings = []
    for i, message in enumerate(chat):
        fields = tuple(name for name in REASONING_FIELDS if isinstance(message.get(name), str))
        reasonings.append(MessageText(i, fields, message[fields[0]].strip() if fields else ""))
    turns = [i for i, message in enumerate(chat) if message["role"] != "system"]
    # The text that the span names.
    check_span_of_chat(span)
    kind, _, rest = span.partition(":")
    if span == "system":
        if chat[0]["role"] != "system":
            raise LayoutError(
                f"the chat has no system message in front (its roles: {roles}); give it one, or"
                " another span: turn:NUMBER or phrase:TEXT"
            )
        marked, phrase = contents[0], contents[0].text
    elif kind in ("turn", "reasoning"):
        turn = whole_number(rest)
        if turn is None or not 1 <= turn <= len(turns):
            raise LayoutError(
                f"there is no turn {rest[:20]}; the chat has turns 1 to {len(turns)} beside its"
                f" system message (roles: {roles})"
            )
        marked = (contents if kind == "turn" else reasonings)[turns[turn - 1]]
        phrase = marked.text
        if kind == "reasoning" and not phrase:
            raise LayoutError(
                f"turn {rest} has no reasoning; give its message a text {REASONING_FIELDS[0]!r}"
            )
    else:
        places = [
            part
            for part in (*contents, *reasonings)
            for at in range(len(part.text))
            if part.text.startswith(rest, at)
        ]
        if not rest.strip() or len(places) != 1:
            raise LayoutError(
                f"the phrase {rest!r} occurs {len(places) if rest.strip() else 0} times in the"
                " chat's messages; name one that occurs once"
            )
        marked, phrase = places[0], rest
    if not phrase:
        raise LayoutError(
            f"message {marked.message + 1} of the chat is empty, so it cannot be the span"
        )
    return marked, phrase
