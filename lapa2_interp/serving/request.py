"""Requests of OpenAI's protocol: what they ask for, and what is refused in the protocol's form."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lapa2_interp.attention.batch_bias import BatchBias
from lapa2_interp.bias.augmentation import Augmentation, active_augmentations
from lapa2_interp.bias.find_spans import SpanFinder, rules_of_marks
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.marked_text import MarkedText, problem_of_other_bias, without_marks
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.errors import AugmentationError, Lapa2Error, unknown_choice
from lapa2_interp.models.facts import facts_of

if TYPE_CHECKING:
    from lapa2_interp.circuits.selection import Selection
    from lapa2_interp.models.facts import Model

BESIDE = frozenset((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls", "prompt_cache_retention",
))  # fmt: skip
"""Fields that decide no answer, and are not read."""
NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "top_p": (1,), "logprobs": (False, 0), "top_logprobs": (0,),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "frequency_penalty": (0,), "presence_penalty": (0,),
    "logit_bias": ({},), "response_format": ({"type": "text"},), "echo": (False,),
    "suffix": ("",), "modalities": (["text"],), "reasoning_effort": ("none",),
}  # fmt: skip
"""Fields that this server does not follow, and their values that ask for nothing."""
MOST_STOPS = 16
LOWEST_TEMPERATURE = 1e-6
"""Log-probabilities that are divided by it stay numbers in float32."""


class ProtocolError(Exception):
    """What is wrong with a request, in the protocol's form.

    Attributes:
        status: Of HTTP.
        param: The field that is wrong, if it is one.
        code: A short name of the problem.
    """

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class Steering(BaseModel):
    """The field `lapa2` of a request; what it leaves out is as the server was started.

    Attributes:
        span: The part of the chat that is strengthened: "system", "turn:2", "phrase:TEXT".
        alpha: The strength of LaPA2; 0 is the model without it.
        augmentation: A recipe in place of alpha, such as "instaboost:M=5".
        heads: The name of a card that the server was given, or "all".
        top_k: How many of the likeliest tokens are kept; 0 keeps all.
        report: Give the attention on the span, and its effect, for every token of the answer.
        marks: Read marks such as "(Never name a medicine:1.5)" in the system message.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    span: str | None = None
    alpha: Annotated[float, Field(strict=False)] | None = None
    augmentation: str | None = None
    heads: str | None = None
    top_k: Annotated[int, Field(ge=0)] = 0
    report: bool = False
    marks: bool | None = None


class StreamOptions(BaseModel):
    """What a stream has beside its text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, strict=False)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    lapa2: Steering = Steering()


@dataclass(frozen=True)
class Defaults:
    """How the server was started.

    Attributes:
        model: The name under which it serves.
        span, rules: Where a request says nothing.
        cards: Heads by name.
        longest: Tokens of an answer, at most.
        marks: Read marks in system messages, where a request says nothing.
    """

    model: str
    span: str = "system"
    rules: tuple[Augmentation, ...] = ()
    cards: Mapping[str, Selection] = field(default_factory=dict)
    longest: int = 1024
    marks: bool = False


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    Attributes:
        layout: The text that is read, with the span as its prefix.
        rules: The bias.
        longest: Tokens of the answer, at most; fewer where the context ends before.
        temperature: 0 is greedy.
        top_k: Of the likeliest tokens; 0 keeps all.
        seed: Of the random numbers.
        stops: Texts that end the answer.
        report: Attention and effect of the span are asked for.
        marks: The text of the system message with its marks, if they were read.
        is_chat: Of /v1/chat/completions.
        stream, usage_in_stream: The answer comes in pieces, and its usage after them.
    """

    layout: Layout
    rules: tuple[Augmentation, ...]
    longest: int
    temperature: float
    top_k: int
    seed: int
    stops: tuple[str, ...]
    report: bool
    marks: MarkedText | None
    is_chat: bool
    stream: bool
    usage_in_stream: bool


def read_request(
    model: Model, defaults: Defaults, data: Any, kind: Literal["chat", "text"]
) -> Asked:
    """A request's body, checked.

    Raises:
        ProtocolError: A field is unknown, out of range, or asks for what this server does not do;
            or the text cannot be read or fills the context.
    """
    body = _body(data)
    if body.model != defaults.model:
        raise ProtocolError(
            f"the model {body.model!r} is not here; this server has {defaults.model!r}",
            404, "model", "model_not_found",
        )  # fmt: skip
    wanted = "messages" if kind == "chat" else "prompt"
    unwanted = "prompt" if kind == "chat" else "messages"
    if getattr(body, wanted) is None or getattr(body, unwanted) is not None:
        raise ProtocolError(f"this address takes {wanted} and no {unwanted}", 400, wanted)
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MOST_STOPS or not all(stops):
        raise ProtocolError(f"stop takes up to {MOST_STOPS} texts, none of them empty", 400, "stop")
    rules = _rules(defaults, body.lapa2)
    span, marks = body.lapa2.span or defaults.span, None
    try:
        if kind == "chat":
            messages = _messages(body.messages or [])
            if defaults.marks if body.lapa2.marks is None else body.lapa2.marks:
                messages, marks = without_marks(messages)
            if marks is not None:
                _check_no_other_bias(body.lapa2)
                layout = _chat(model, messages, "system")
                rules = rules_of_marks(marks, layout, model.tokenizer)
            else:
                # Without a bias and a report, any message will do as the span.
                if span == "system" != messages[0]["role"] and not rules and not body.lapa2.report:
                    span = "turn:1"
                layout = _chat(model, messages, span)
        else:
            # The server's own span is mostly one of chats.
            phrase = span if span.startswith("phrase:") else body.lapa2.span
            layout = _text(model, body.prompt or "", phrase, rules)
        # What is wrong with a bias is said here, to this client, and not to a whole batch.
        facts = facts_of(model)
        BatchBias([rules], [layout], (facts.n_layers, facts.n_heads), facts.layer_types)
    except Lapa2Error as error:
        raise ProtocolError(
            str(error), 400, "lapa2.span" if body.lapa2.span is not None else wanted
        ) from None
    temperature = 1.0 if body.temperature is None else body.temperature
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ProtocolError(
            f"the temperature {temperature:g} is too low to divide by; give 0, which is greedy, or"
            f" {LOWEST_TEMPERATURE:g} and above",
            400, "temperature",
        )  # fmt: skip
    asked = body.max_completion_tokens or body.max_tokens or min(256, defaults.longest)
    if asked > defaults.longest:
        raise ProtocolError(
            f"max_tokens is {asked}, and this server writes {defaults.longest} at most",
            400, "max_tokens",
        )  # fmt: skip
    room = model.cfg.n_ctx - len(layout)
    if room < 1:
        raise ProtocolError(
            f"the text has {len(layout)} tokens, and the context of {defaults.model}"
            f" {model.cfg.n_ctx}; give a shorter one",
            400, wanted, "context_length_exceeded",
        )  # fmt: skip
    options = body.stream_options or StreamOptions()
    return Asked(
        layout=layout,
        rules=rules,
        longest=min(asked, room),
        temperature=temperature,
        top_k=body.lapa2.top_k,
        seed=secrets.randbits(32) if body.seed is None else body.seed,
        stops=stops,
        report=body.lapa2.report,
        marks=marks,
        is_chat=kind == "chat",
        stream=body.stream,
        usage_in_stream=options.include_usage,
    )


def _body(data: Any) -> Body:
    if not isinstance(data, dict):
        raise ProtocolError("the body should be a JSON object")
    data = {name: value for name, value in data.items() if name not in BESIDE}
    for name, allowed in NOTHING.items():
        value = data.pop(name, None)
        if value is not None and not any(value == one for one in allowed):
            raise ProtocolError(
                f"{name}={value!r} is not followed by this server; leave it out", 400, name,
                "unsupported_parameter",
            )  # fmt: skip
    try:
        return Body(**data)
    except ValidationError as error:
        problem = error.errors()[0]
        *parents, last = map(str, problem["loc"])
        message = f"{'.'.join([*parents, last])}: {problem['msg']}"
        if problem["type"] == "extra_forbidden":
            fields: dict[str, type[BaseModel]]
            fields = {"lapa2": Steering, "stream_options": StreamOptions}
            part: type[BaseModel] = fields[parents[0]] if parents else Body
            message = unknown_choice(" ".join(["field", *parents]), last, part.model_fields)
        elif problem["type"] == "model_type":
            message = f"{last} should be an object"
        raise ProtocolError(message, 400, ".".join([*parents, last])) from None
    except TypeError:
        raise ProtocolError("the names of fields should be texts") from None


def _rules(defaults: Defaults, steering: Steering) -> tuple[Augmentation, ...]:
    """The bias of a request: at every query after the span unless its recipe names a phase, so
    that a chat that is kept equals the same chat read again."""
    if steering.alpha is not None and steering.augmentation is not None:
        raise ProtocolError("give alpha or augmentation, not both", 400, "lapa2.augmentation")
    rules = defaults.rules
    try:
        if steering.augmentation is not None:
            resolved = resolve_recipes(steering.augmentation)
            rules = active_augmentations(resolved)
        elif steering.alpha is not None:
            rules = active_augmentations(Augmentation(alpha=steering.alpha))
        if steering.heads == "all":
            rules = tuple(_in_heads(rule, None) for rule in rules)
        elif steering.heads is not None:
            if steering.heads not in defaults.cards:
                names = ", ".join(defaults.cards) or "none"
                raise ProtocolError(
                    f"no card is called {steering.heads!r}; this server has: {names}",
                    400, "lapa2.heads",
                )  # fmt: skip
            rules = tuple(_in_heads(rule, defaults.cards[steering.heads]) for rule in rules)
    except Lapa2Error as error:
        name = "alpha" if steering.augmentation is None else "augmentation"
        raise ProtocolError(str(error), 400, f"lapa2.{name}") from None
    return after_span(rules)


def after_span(rules: Sequence[Augmentation]) -> tuple[Augmentation, ...]:
    """The augmentations, at every query after the span unless they name a phase."""
    return tuple(
        rule
        if "phase" in rule.model_fields_set
        else rule.model_copy(update={"phase": "after_span"})
        for rule in rules
    )


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of text alone."""
    read = []
    for number, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        role = "system" if role == "developer" else role
        if role not in ("system", "user", "assistant"):
            raise ProtocolError(
                f"message {number} has the role {role!r}; allowed are system, user, assistant",
                400, "messages",
            )  # fmt: skip
        if message.get("tool_calls") or message.get("function_call"):
            raise ProtocolError(
                f"message {number} calls tools, which this server has not", 400, "messages"
            )
        if isinstance(content, list):
            kinds = {part.get("type") if isinstance(part, dict) else None for part in content}
            if kinds != {"text"}:
                raise ProtocolError(f"message {number} has parts that are no text", 400, "messages")
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str):
            raise ProtocolError(f"message {number} has no text", 400, "messages")
        read.append({"role": role, "content": content})
    if not read:
        raise ProtocolError("messages is empty", 400, "messages")
    return read


def _in_heads(rule: Augmentation, card: Selection | None) -> Augmentation:
    """A bias in the heads of a card, or in all heads.

    Raises:
        AugmentationError: The strengths of the card were learned under another law.
    """
    places: dict[str, Any] = {"heads": "all", "strengths": None}
    if rule.strengths is not None:  # where they were learned the law stopped, too
        places["l0"] = rule.l0 if rule.law == "constant" else None
    if card is not None:
        places |= card.fields()
    law = places.get("law", rule.law)
    if law != rule.law and rule.law != "log":
        raise AugmentationError(
            f"the strengths of the card were learned under law {law!r}, and the request has law"
            f" {rule.law!r}; leave the augmentation out, or name a card of heads"
        )
    return Augmentation(**rule.model_dump() | places)


def _check_no_other_bias(steering: Steering) -> None:
    named = [
        name
        for name in ("alpha", "augmentation", "heads", "span")
        if getattr(steering, name) is not None
    ]
    if named:
        raise ProtocolError(problem_of_other_bias(named, "marks"), 400, "lapa2.marks")


def _chat(model: Model, messages: list[dict[str, Any]], span: str) -> Layout:
    # A phrase is that of the first messages, also where an answer repeats it.
    searched = 2 if span.startswith("phrase:") else None
    return Layout.of_chat(model.tokenizer, messages, span=span, n_searched=searched)


def _text(model: Model, prompt: str, span: str | None, rules: Sequence[Augmentation]) -> Layout:
    """The layout of a plain text, in which a phrase may be the span."""
    plain = Layout.of(model.tokenizer, None, prompt)
    if span is None:
        if rules:
            raise ProtocolError(
                'a plain text has no system message; say what is strengthened, as in {"lapa2":'
                ' {"span": "phrase:TEXT"}}, or give {"lapa2": {"alpha": 0}}',
                400, "lapa2.span",
            )  # fmt: skip
        return plain
    kind, colon, phrase = span.partition(":")
    if kind != "phrase" or not colon:
        raise ProtocolError(
            f"the span of a plain text is phrase:TEXT, found {span!r}", 400, "lapa2.span"
        )
    layout, _ = SpanFinder(phrase, tokenizer=model.tokenizer).layout(plain.ids)
    return layout
