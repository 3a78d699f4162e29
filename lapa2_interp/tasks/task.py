"""Control tasks: attributes with their prefixes, and prompts.

A task is a small TOML file, built in or custom.

`EXAMPLE` shows the form. Parameters and texts of single methods (by attribute, then branch) are
optional.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_serializer,
    model_validator,
)

from lapa2_interp._util.parsing import parse_toml, read_text, whole_number
from lapa2_interp._util.paths import in_one_line, is_path, looked_for, with_home
from lapa2_interp._util.values import Count
from lapa2_interp.errors import (
    TaskError,
    main_error,
    pluralize,
    unknown_choice,
    validation_message,
)
from lapa2_interp.tasks.segmentation import words

EXAMPLE = """length_counts_prompt = true        # "length" tokens include the prompt's, and the saved text begins with it

[attributes.calm]
prefix = "Very calm:"              # joined to the prompt as it stands, without a space

[attributes.angry]
prefix = "Very angry:"

[prompts]
texts = ["The lake", "The movie"]

[methods.air-decoding]             # optional: what one method uses here
parameters = { omega = 100.0 }

[methods.preadd.texts.calm]        # optional: its own texts, by attribute, then branch
prefix = "The following text is furious.\\n\\n"
"""  # noqa: E501
"""A complete task file."""


ALL = "all"
"""The word for every attribute, in settings and in tables."""
RAW = "raw"
"""The source of texts that were written without a prefix, and the branch without one."""
CUSTOM = "custom"
"""Task and attribute of a prefix that belongs to no task."""
RESERVED_ATTRIBUTES = {
    ALL: "every attribute",
    RAW: "texts without a prefix",
    "none": "no prefix",
    "base": "a branch of methods",
    "target": "a branch of methods",
}
"""Words that stand where an attribute's name does, and what they mean: no attribute has them."""
RESERVED_TASKS = {CUSTOM: "a prefix that belongs to no task"}
"""The same for tasks of a user's files, beside the names of the package's tasks."""


class Attribute(BaseModel):
    """One attribute: its hard prefix, exactly as it stands in front of the prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: Annotated[str, Field(min_length=1)]


class MethodSettings(BaseModel):
    """Parameters and texts of one method on this task, in place of its defaults and the attributes'
    prefixes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: dict[str, float | bool | str] = {}
    texts: dict[str, dict[str, Annotated[str, Field(min_length=1)]]] = {}


class Prompts(BaseModel):
    """Prompts as texts, such as those a task is evaluated on, and their source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    texts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    source: str = ""


class ChatForm(BaseModel):
    """A chat to continue, in which {prefix} stands for the attribute's prefix and {prompt} for each
    prompt; {prompt:2} is the prompt's second line, so that a prompt may hold all messages of a
    chat."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    messages: Annotated[tuple[dict[str, JsonValue], ...], Field(min_length=1)]
    """Messages as the model's chat template takes them."""
    span: str = "system"
    """The text that counts as prefix, as in `Layout.of_chat`."""
    template: dict[str, JsonValue] = {}
    """Arguments of the chat template."""
    later: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """The user's later messages, one after each answer; left out of JSON where there are none."""
    n_searched: Count | None = None
    """The number of first messages that have the span, as in `Layout.of_chat`; left out of JSON
    where it is all."""

    @model_serializer(mode="wrap")
    def _without_absent_fields(
        self, serialize: Callable[[ChatForm], dict[str, Any]]
    ) -> dict[str, Any]:
        fields = serialize(self)
        for name in ("later", "n_searched"):
            if not getattr(self, name):
                fields.pop(name, None)
        return fields

    @property
    def searched(self) -> tuple[dict[str, JsonValue], ...]:
        """The messages that have the span; later ones may repeat it."""
        return self.messages[: self.n_searched]

    @property
    def n_turns(self) -> int:
        """Number of answers."""
        return 1 + len(self.later)

    def messages_after(self, answers: Sequence[str]) -> list[dict[str, JsonValue]]:
        """The messages that the next answer follows, after these answers."""
        messages = list(self.messages)
        for answer, message in zip(answers, self.later, strict=False):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": message})
        return messages

    def has(self, slot: str) -> bool:
        """True if a message, or the span, has the slot "prefix" or "prompt"."""
        texts = [text for message in self.messages for text in message.values()]
        return any(
            _slot([slot]).search(text)
            for text in (self.span, *self.later, *texts)
            if isinstance(text, str)
        )

    def filled(self, **texts: str) -> ChatForm:
        """The chat with a text in place of each of these slots.

        Raises:
            TaskError: A slot is a line that the text does not have.
        """

        def text_of(match: re.Match[str]) -> str:
            text, number = texts[match["name"]], match["line"]
            lines = text.splitlines()
            if number is None:
                return text
            line = whole_number(number)
            if line is None or not 1 <= line <= len(lines):
                raise TaskError(
                    f"the chat asks for {match[0][:40]}, and {match['name']} {text[:40]!r} has"
                    f" {pluralize(len(lines), 'line')}; give it as many lines as the chat asks for"
                )
            return lines[line - 1]

        def fill(value: Any) -> Any:
            return _slot(texts).sub(text_of, value) if isinstance(value, str) else value

        messages = [
            {name: fill(value) for name, value in message.items()} for message in self.messages
        ]
        return self.model_copy(
            update={
                "messages": tuple(messages),
                "span": fill(self.span),
                "later": tuple(map(fill, self.later)),
            }
        )


def _slot(names: Iterable[str]) -> re.Pattern[str]:
    """What stands for a text with one of these names, or for a line of it."""
    return re.compile(rf"\{{(?P<name>{'|'.join(names)})(?::(?P<line>\d+))?\}}")


class Task(BaseModel):
    """A control task.

    Attributes:
        name: The file's name without its ending.
        length_counts_prompt: True: `length` counts prompt tokens too and the text begins with the
            prompt (the paper's sentiment and topic). False: `length` new tokens, and the text is
            the continuation alone (detox).
        lengths: Lengths of the texts it is evaluated on.
        attributes: Attributes by name.
        prompts: The default prompts.
        methods: Parameters and texts of single methods.
        chat: The chat that method `chat` continues; left out of JSON where there is none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str = ""
    length_counts_prompt: bool = True
    lengths: tuple[Count, ...] = (64, 128, 256, 384, 512)
    attributes: Annotated[dict[str, Attribute], Field(min_length=1)]
    prompts: Prompts
    methods: dict[str, MethodSettings] = {}
    chat: ChatForm | None = None

    @model_serializer(mode="wrap")
    def _without_absent_chat(self, serialize: Callable[[Task], dict[str, Any]]) -> dict[str, Any]:
        fields = serialize(self)
        if self.chat is None:
            fields.pop("chat", None)
        return fields

    @model_validator(mode="after")
    def _check_chat(self) -> Task:
        if self.chat is None:
            return self
        if self.length_counts_prompt:
            raise ValueError(
                "the length of a chat's text counts new tokens alone; give length_counts_prompt ="
                " false"
            )
        for slot, texts in (("prefix", self.attributes), ("prompt", self.prompts.texts)):
            if len(texts) > 1 and not self.chat.has(slot):
                raise ValueError(
                    f"no message of the chat has {{{slot}}}, so that it would be the same for"
                    f" {len(texts)}; write {{{slot}}} into one, or give one {slot}"
                )
        return self

    @model_validator(mode="after")
    def _check(self) -> Task:
        for name in self.attributes:
            if name in RESERVED_ATTRIBUTES or name.startswith("hard "):
                means = RESERVED_ATTRIBUTES.get(name, "a hard prefix")
                raise ValueError(
                    f"an attribute may not be called {name!r}, which names {means}; give another"
                    " name"
                )
        for kind, names in (("a task", [self.name]), ("an attribute", list(self.attributes))):
            for name in names:
                if not name.strip() or set(name) & set("\0/\\") or name.startswith("."):
                    raise ValueError(
                        f"{kind}'s name has letters and no NUL, slash or backslash, and no dot in"
                        f" front, since it names files; found {name!r}"
                    )
                if not name.isprintable() or name != name.strip() or len(name) > 200:
                    raise ValueError(
                        f"{kind}'s name is one line of at most 200 letters, found {name[:60]!r}"
                    )
        for method, settings in self.methods.items():
            for attribute in settings.texts:
                if attribute not in self.attributes:
                    raise ValueError(
                        f"methods.{method}.texts:"
                        f" {unknown_choice('attribute', attribute, self.attributes)}"
                    )
        return self

    def prefix(self, attribute: str) -> str:
        """The hard prefix of an attribute.

        Raises:
            TaskError: The task does not have it.
        """
        if attribute not in self.attributes:
            raise TaskError(
                f"task {self.name!r}: {unknown_choice('attribute', attribute, self.attributes)}"
            )
        return self.attributes[attribute].prefix

    def with_prefix(self, form: str) -> Task:
        """The task with other hard prefixes.

        Args:
            form: Words with {attribute} or {Attribute} in the place of the attribute's name.

        Raises:
            TaskError: The form has no place for the name, so all prefixes would be one.

        Example:
            >>> from lapa2_interp.methods import load_task
            >>> load_task("sentiment").with_prefix("A {attribute} text:").prefix("positive")
            'A positive text:'
        """
        if "{attribute}" not in form and "{Attribute}" not in form:
            raise TaskError(
                f"prefix {form!r} is the same for all attributes; write {{attribute}} in the place"
                " of their names"
            )
        attributes = {
            name: Attribute(
                prefix=form.replace("{attribute}", name).replace("{Attribute}", name.capitalize())
            )
            for name in self.attributes
        }
        return self.model_copy(update={"attributes": attributes})

    def words(self, attribute: str) -> tuple[str, ...]:
        """The words of an attribute's hard prefix, and its name, each once, in small letters. Where
        the prefix is the span of a chat, as of `methods.chat.chat_task`, they are those of its
        phrase.

        Raises:
            TaskError: The task does not have the attribute, or the prefix is the name of a span.
        """
        prefix = self.prefix(attribute)
        if self.chat is not None and prefix == self.chat.span:
            kind, _, phrase = prefix.partition(":")
            if kind != "phrase" or _slot(["prompt"]).search(phrase):
                raise TaskError(
                    f"the prefix {prefix[:40]!r} of task {self.name!r} names a span of its chat and"
                    " has no words of its own; give the text: as phrase:TEXT, or as an attribute's"
                    " prefix for which the chat has {prefix}"
                )
            prefix = phrase
        return tuple(dict.fromkeys(words(f"{prefix} {attribute}")))

    def others(self, attribute: str) -> list[str]:
        """The attributes that compete with this one.

        Raises:
            TaskError: There are none.
        """
        others = [name for name in self.attributes if name != attribute]
        if not others:
            raise TaskError(
                f"task {self.name!r} has one attribute, {attribute!r}; a method with classes needs"
                " a second"
            )
        return others

    def texts(self, method: str, attribute: str) -> dict[str, str]:
        """The texts that a method puts in front of the prompt for an attribute, by branch; empty if
        the task has none."""
        settings = self.methods.get(method)
        return settings.texts.get(attribute, {}) if settings else {}

    def parameters(self, method: str) -> dict[str, float | bool | str]:
        """A method's parameters on this task."""
        settings = self.methods.get(method)
        return settings.parameters if settings else {}


@cache
def built_in_tasks() -> tuple[str, ...]:
    """Names of the tasks that ship with the package."""
    files = resources.files(__package__).iterdir()
    return tuple(sorted(Path(file.name).stem for file in files if file.name.endswith(".toml")))


def read_task(name: str | Path) -> Task:
    """Read a built-in task by name, or a custom task from the path of its TOML file.

    Its settings of methods are not checked here, but by `methods.load_task`.

    Raises:
        TaskError: Unknown name, unreadable file, or a malformed one; the message names the line or
            field.
    """
    name, path = str(name), with_home(name)
    if name in built_in_tasks():
        text = (resources.files(__package__) / f"{name}.toml").read_text(encoding="utf-8")
        return _parse_task(name, path.stem, text)
    elif path.suffix.lower() == ".toml":
        try:
            text = read_text(path)
        except FileNotFoundError:
            raise TaskError(_no_task(name)) from None
        except (OSError, ValueError) as error:
            raise TaskError(f"cannot read the task file {in_one_line(name)}: {error}") from None
    else:
        raise TaskError(_no_task(name))
    name = in_one_line(name)
    task = _parse_task(name, path.stem, text)
    if task.name in RESERVED_TASKS:
        raise TaskError(
            f"task file {name}: a task may not be called {task.name!r}, which names"
            f" {RESERVED_TASKS[task.name]}; give another name"
        )
    if task.name in built_in_tasks():
        raise TaskError(
            f"task file {name}: {task.name!r} is a task of the package, and results would be told"
            " for its; give another name"
        )
    return task


def _no_task(name: str) -> str:
    if not is_path(name):
        return f"{unknown_choice('task', name, built_in_tasks())}, or the path of a .toml file"
    why = "it is no .toml file" if with_home(name).exists() else "there is no such file"
    return (
        f"no task file {in_one_line(name)}: {why}; allowed: {', '.join(built_in_tasks())}, or the"
        f" path of a .toml file{looked_for(name)}"
    )


TABLES: dict[str, type[BaseModel]] = {
    "attributes": Attribute,
    "prompts": Prompts,
    "methods": MethodSettings,
    "chat": ChatForm,
}
"""What the tables of a task file hold."""


@lru_cache(maxsize=64)
def _parse_task(name: str, stem: str, text: str) -> Task:
    """A task from its file's text; cached, since grids need the same task thousands of times."""
    try:
        return Task.model_validate({"name": stem} | parse_toml(text))
    except ValidationError as error:
        location = main_error(error)["loc"]
        table = TABLES.get(str(location[0]), Task) if len(location) > 1 else Task
        problem = validation_message(error, fields=table.model_fields)
        line = _line_of(text, location)
        raise TaskError(f"task file {name}{line and f', line {line}'}: {problem}") from None
    except ValueError as error:
        raise TaskError(f"task file {name}: {error}; `lapa2 tasks` ends with an example") from None


def _line_of(text: str, location: Sequence[str | int]) -> int | str:
    """The number of the line in a TOML file with a field, or with the nearest table around it; ""
    where there is none."""
    wanted = [str(part) for part in location]
    best, table = (0, 0), list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        key = re.match(r"""\s*[\w."' -]+=""", line)
        path = table + _names_of(f"{key[0]} 0") if key else _names_of(line)
        table = table if key else path or table
        n = min(len(path), len(wanted))
        if n > best[0] and path[:n] == wanted[:n]:
            best = n, number
    return best[1] or ""


def _names_of(line: str) -> list[str]:
    """The names that a line of TOML nests: [a.b] and a.b = 0 are a, b."""
    try:
        inner: object = parse_toml(line)
    except ValueError:
        return []
    names = []
    while isinstance(inner, dict) and inner:
        ((name, inner),) = inner.items()
        names.append(name)
    return names


def extra_prompts(task: str) -> tuple[str, ...]:
    """Prompts written for this package, for grids that need more than the task has; () for a custom
    task."""
    file = {"sentiment": "neutral", "topic": "neutral", "detox": "detox"}.get(task)
    if file is None:
        return ()
    text = resources.files(__package__).joinpath("more", f"{file}.txt").read_text("utf-8")
    return tuple(text.splitlines())
