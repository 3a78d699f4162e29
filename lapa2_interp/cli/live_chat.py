"""A chat on the command line: one line of input, one answer, and how far its span has faded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lapa2_interp._util.terminal import escape_line
from lapa2_interp._util.values import check_value, read_value
from lapa2_interp.cli.options import AugmentationOptions
from lapa2_interp.errors import (
    AugmentationError,
    Lapa2Error,
    LayoutError,
    pluralize,
    unknown_choice,
)

if TYPE_CHECKING:
    from lapa2_interp.bias.augmentation import Augmentation
    from lapa2_interp.bias.marked_text import MarkedText
    from lapa2_interp.models.facts import Model

SYSTEM = "You are a sailor. Speak of the sea in every sentence."
"""The system message of a chat that is given none."""
COMMANDS = ("/alpha", "/quit")
FADE = ("keys", "attention", "effect", "attention_before", "effect_before", "entropy_before")
"""Columns of `chat_fade` that are told."""


@dataclass
class LiveChat:
    """A chat that goes on from the user's lines.

    Attributes:
        model: What answers.
        messages: So far.
        span: As in `Layout.of_chat`.
        template: Arguments of the chat template.
        augmentation: The bias as it was asked for.
        sampling: Settings of a cell: length, seed, top_k and eos.
        as_json: Print a line of JSON for each answer.
        marks: Of the system message, in place of another bias.
    """

    model: Model
    messages: list[dict[str, Any]]
    span: str
    template: Mapping[str, Any]
    augmentation: AugmentationOptions
    sampling: Mapping[str, Any]
    as_json: bool = False
    marks: MarkedText | None = None
    rules: tuple[Augmentation, ...] = field(init=False)
    turn: int = 0

    def __post_init__(self) -> None:
        self.rules = self.augmentation.build(0.0)

    def run(self) -> None:
        """Answer every line of the input. What is wrong with one is told, and the chat goes on."""
        if not self.as_json:
            way = f"/alpha 0.5 sets the bias ({self.bias})"
            if self.marks is not None:
                way = f"the system message has {self.bias}"
            print(f"system: {self.messages[0]['content']}\nWrite a message; {way}, /quit ends.")
        for line in self._lines():
            try:
                if not line.startswith("/"):
                    self.answer(line)
                elif line == "/quit":
                    return
                else:
                    self.obey(*line.split())
            except Lapa2Error as error:
                print(f"lapa2: {escape_line(str(error))}", file=sys.stderr)

    @property
    def bias(self) -> str:
        """The bias in words."""
        if self.marks is not None:
            return pluralize(len(self.marks.marks), "mark")
        return " + ".join(rule.label for rule in self.rules) or "no bias"

    def _lines(self) -> Iterator[str]:
        """The lines of the input that are not empty."""
        while True:
            if not self.as_json:
                print("> ", end="", flush=True)
            try:
                line = sys.stdin.readline()
            except UnicodeDecodeError as error:
                raise LayoutError(f"a message is not {error.encoding}; write it in that") from None
            if not line:
                return
            if line.strip():
                yield line.strip()

    def obey(self, command: str, *words: str) -> None:
        """Do what a line with a command says: /alpha NUMBER.

        Raises:
            Lapa2Error: No such command, or no alpha that the bias may have, or marks.
        """
        if command != "/alpha":
            raise Lapa2Error(unknown_choice("command", command, COMMANDS))
        if len(words) != 1:
            raise AugmentationError(f"/alpha takes one number, found {len(words)} words")
        if self.marks is not None:
            from lapa2_interp.bias.marked_text import problem_of_other_bias

            raise AugmentationError(problem_of_other_bias([command], "--marks"))
        alpha = check_value("alpha", read_value(words[0]), float)
        options = replace(self.augmentation, alpha=alpha)
        rules = options.build(0.0)
        if alpha and not rules:
            raise AugmentationError(
                f"--augmentation {options.augmentation} has no alpha; begin the chat without it"
            )
        self.augmentation, self.rules = options, rules
        if not self.as_json:
            print(f"{self.bias} from the next answer on")

    def answer(self, text: str) -> None:
        """Answer a message, and print the answer and one line about the span.

        Raises:
            Lapa2Error: As `generate`. The chat is as before.
        """
        from lapa2_interp.bias.find_spans import rules_of_marks
        from lapa2_interp.bias.layout import Layout
        from lapa2_interp.generation.resolve import cell_of
        from lapa2_interp.methods.chat import chat_task
        from lapa2_interp.report.fading_chat import chat_fade
        from lapa2_interp.runs.generate import make_cells

        asked = [*self.messages, {"role": "user", "content": text}]
        rules = self.rules
        if self.marks is not None:
            tokenizer = self.model.tokenizer
            layout = Layout.of_chat(tokenizer, asked, template=self.template)
            rules = rules_of_marks(self.marks, layout, tokenizer)
        cell = cell_of(
            self.model,
            method="chat",
            # A phrase is that of the first messages, also where an answer repeats it.
            task=chat_task(asked, self.span, self.template, n_searched=2),
            augmentation=rules or "none",
            trace="pooled",
            **self.sampling,
        )
        run = make_cells(self.model, [cell])
        continuation = str(run.texts()["continuation"].iloc[0])
        fade = chat_fade(self.model, run).iloc[0]
        self.messages = [*asked, {"role": "assistant", "content": continuation}]
        self.turn += 1
        facts = {
            "turn": self.turn,
            "augmentation": [rule.model_dump(mode="json") for rule in rules],
            "text": continuation,
            **{name: fade[name].item() for name in FADE},
        }
        if self.as_json:
            print(json.dumps(facts, ensure_ascii=False), flush=True)
            return
        print(f"{continuation}\n-- turn {self.turn}, {self.bias}, {fade_line(self.span, facts)}")


def fade_line(span: str, facts: Mapping[str, Any]) -> str:
    """What a row of `chat_fade` says, in words."""
    name = "the system message" if span == "system" else "the span"
    return (
        f"{facts['keys']} keys: attention on {name} {facts['attention']:.4f}, effect of removing"
        f" it {1000 * facts['effect']:.3f}/1000 nats; before the answer attention"
        f" {facts['attention_before']:.4f}, effect {1000 * facts['effect_before']:.3f}/1000 nats,"
        f" entropy {facts['entropy_before']:.2f} nats"
    )
