"""A chat continued by the model alone, its span steered.

`Layout.of_chat` says which tokens of the rendered messages are the span, which counts as prefix.

P(x_t | x_<t, a) = P_theta(x_t | chat with a, x_<t)

With guidance g this is contrasted with the same chat whose span no later query sees:

    log w = g log P_chat + (1 - g) log P_hidden
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from jaxtyping import Float
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.errors import MethodError, TaskError, validation_message
from lapa2_interp.methods.base import FLOOR, Branch, LogProbs, Method, State, check_branches
from lapa2_interp.tasks.task import CUSTOM, Attribute, ChatForm, Prompts, Task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Chat(Method):
    """The next turn of the task's chat, or all of its turns (`ChatForm.later`).

    Args:
        keep_turns: Go on from the cached keys and values of earlier turns. Otherwise every turn
            reads the whole chat again, as text.
        guidance: 1 is the chat alone, 0 the chat with its span hidden; above 1 what the span
            changes is exaggerated. Any finite number.
    """

    name: ClassVar[str] = "chat"
    paper_name: ClassVar[str] = "chat"
    display_name: ClassVar[str] = "Chat"
    equation: ClassVar[str] = "log w = guidance log P_chat + (1 - guidance) log P_hidden"
    alpha: ClassVar[float] = 0.5
    in_paper: ClassVar[bool] = False
    when_empty: ClassVar[str] = "guidance is so large that the contrast overflows; 1.5 is usual"
    keep_turns: bool = False
    guidance: Annotated[float, Field(allow_inf_nan=False)] = 1.0

    @property
    def stored_parameters(self) -> dict[str, float | bool | str]:
        """Those that are not the usual ones, so that a plain chat has no parameter."""
        changed: dict[str, float | bool | str] = {}
        if self.keep_turns:
            changed["keep_turns"] = True
        if self.guidance != 1:
            changed["guidance"] = self.guidance
        return changed

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        prefix = task.prefix(attribute)
        if task.chat is None:
            raise MethodError(
                f"task {task.name!r} has no chat to continue; give its messages in a task file"
                " ([chat]), or make a task of them with methods.chat.chat_task"
            )
        if self.keep_turns and not task.chat.later:
            raise MethodError(
                "keep_turns keeps earlier turns in the cache, and the chat has one answer; list the"
                " user's later messages (later = [...] in [chat]), or leave keep_turns out"
            )
        form, span = task.chat, task.chat.span
        if form.has("prefix"):
            form, span = form.filled(prefix=prefix), prefix
        chat = Branch("chat", span, chat=form)
        if self.guidance == 1:
            return (chat,)
        return (chat, replace(chat, name="hidden", hidden=True))

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        if self.guidance == 1:
            return check_branches(log_probs, "chat")["chat"]
        log_probs = check_branches(log_probs, "chat", "hidden")
        chat, hidden = (log_probs[name].clamp(min=FLOOR) for name in ("chat", "hidden"))
        return hidden + self.guidance * (chat - hidden)


def chat_task(
    messages: Sequence[Mapping[str, Any]],
    span: str = "system",
    template: Mapping[str, Any] | None = None,
    prompts: Sequence[str] | None = None,
    later: Sequence[str] = (),
    n_searched: int | None = None,
) -> Task:
    """A task of one chat, for method `chat`.

    Args:
        messages: As the chat template takes them.
        span: The text that is steered to, as in `Layout.of_chat`.
        template: Arguments of the chat template.
        prompts: Texts that {prompt} stands for in the messages, each a chat of its own; by default
            there is one chat, whose name in tables is its last message. {prompt:2} is a prompt's
            second line.
        later: The user's later messages, one after each answer.
        n_searched: The number of first messages that have the span, as in `Layout.of_chat`.

    Raises:
        TaskError: Messages that are not JSON, or {prompt} or {prefix} without a text for it.
    """
    try:
        form = ChatForm(
            messages=tuple(map(dict, messages)),
            span=span,
            template=template or {},
            later=tuple(later),
            n_searched=n_searched,
        )
        if form.has("prefix") or (form.has("prompt") and prompts is None):
            raise TaskError(
                "a message has {prompt} or {prefix}, which stand for the texts of a task; give"
                " prompts, or a task file with [chat]"
            )
        last = str(form.messages[-1].get("content") or form.span)
        return Task(
            name=CUSTOM,
            length_counts_prompt=False,
            attributes={CUSTOM: Attribute(prefix=span)},
            prompts=Prompts(texts=(last,) if prompts is None else tuple(prompts)),
            chat=form,
        )
    except ValidationError as error:
        raise TaskError(f"a chat: {validation_message(error)}") from None
