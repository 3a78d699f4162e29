"""Models with attention steered to a part of the chat, for Inspect.

    inspect eval TASK --model lapa2/smollm2-135m -M alpha=.5 -M span=system

Inspect finds this module by its entry point, where the extra `inspect` is installed. It runs many
samples at once, and a block belongs to one thread, so one worker answers them in turn.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Annotated, Any

import torch
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    StopReason,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo
from pydantic import Field
from torch import Tensor

from lapa2_interp._util.values import Count, Natural, NotNegative, check_value
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.errors import AugmentationError, GridError, LayoutError
from lapa2_interp.models.card import identify
from lapa2_interp.models.load import load_model

SETTINGS: dict[str, Any] = {
    "max_tokens": Count,
    "temperature": NotNegative,
    "top_p": Annotated[float, Field(gt=0, le=1)],
    "top_k": Natural,
    "seed": int,
    "stop_seqs": tuple[Annotated[str, Field(min_length=1)], ...],
}
"""What of Inspect's configuration decides an answer here, and its values."""
BESIDE = frozenset((
    # Connections and the log.
    "max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections",
    "adaptive_connections", "extra_headers", "batch", "fallback_models", "fail_on_refusal",
    # What Inspect does itself, or what needs tools.
    "system_message", "reasoning_history", "cache", "cache_prompt", "max_tool_output",
    "parallel_tool_calls", "internal_tools",
))  # fmt: skip
"""What decides no answer; all else is refused."""
NOTHING = {
    "num_choices": 1, "best_of": 1, "reasoning_effort": "none", "reasoning_summary": "none",
    "reasoning_mode": "standard",
}  # fmt: skip
"""Values of the rest that ask for nothing, beside zero and what is empty."""
DEFAULT_LENGTH = 256
"""Tokens of an answer where the configuration names none."""


@modelapi(name="lapa2")
def lapa2() -> type[ModelAPI]:
    """The provider of models named lapa2/NAME."""
    return SteeredChatAPI


class SteeredChatAPI(ModelAPI):
    """A chat model whose answers are steered to a part of the chat.

    Args:
        model_name: As of `load_model`, with a chat template.
        base_url, api_key: Not used.
        config: Inspect's settings of generation. Temperature 0 is greedy, and at any other a token
            is drawn; what is not given is as the model's own generation configuration has it.
        alpha: The strength of LaPA2; 0 is the model without it.
        augmentation: A recipe in its place, such as "instaboost:M=5".
        span: The part of the chat: "system", "turn:2" or "phrase:TEXT" (`Layout.of_chat`).
        dtype, device: As of `load_model`.

    Raises:
        AugmentationError: Both alpha and augmentation are given, or one is out of range.
        ModelError: The model cannot be loaded.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008
        *,
        alpha: float | None = None,
        augmentation: str | None = None,
        span: str = "system",
        dtype: str = "auto",
        device: str | None = None,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if alpha is not None and augmentation is not None:
            raise AugmentationError(
                f"found alpha {alpha:g} beside augmentation {augmentation!r}; give one of the two"
            )
        rule: Any = augmentation
        if augmentation is None:
            rule = Augmentation(alpha=0.5 if alpha is None else alpha)
        self.rule, self.span = resolve_recipes(rule), span
        self.model = load_model(model_name, dtype, device, "TransformersModel")
        self.ends = identify(self.model).end_ids
        self.worker = ThreadPoolExecutor(1, "lapa2")

    def max_tokens(self) -> int | None:
        return DEFAULT_LENGTH

    def max_connections(self) -> int:
        return 1

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """The answer to a chat.

        Raises:
            GridError: Tools, or a setting that has no meaning here or is out of range.
            LayoutError: As `Layout.of_chat`; a message has anything but text; or the chat fills the
                context.
        """
        if tools or tool_choice not in ("auto", "none"):
            raise GridError("lapa2 models call no tools; leave the task's tools out")
        for name in type(config).model_fields:
            value = getattr(config, name)
            if name in SETTINGS:
                check_value(name, value, SETTINGS[name] | None, GridError)
            elif name not in BESIDE and value and value != NOTHING.get(name):
                raise GridError(
                    f"lapa2 models take {', '.join(SETTINGS)}; found {name}={value!r}; leave it out"
                )
        messages = [
            {"role": message.role, "content": _text_of(message, i)}
            for i, message in enumerate(input, 1)
        ]
        answer = partial(self._answer, messages, config)
        return await asyncio.get_running_loop().run_in_executor(self.worker, answer)

    def close(self) -> None:
        self.worker.shutdown()

    @torch.no_grad()
    def _answer(self, messages: Sequence[dict[str, Any]], config: GenerateConfig) -> ModelOutput:
        began, model = perf_counter(), self.model
        # What is read, and how much can follow.
        layout = Layout.of_chat(model, messages, span=self.span)
        left = model.cfg.n_ctx - len(layout)
        if left < 1:
            raise LayoutError(
                f"the chat has {len(layout)} tokens, and the context of {self.model_name}"
                f" {model.cfg.n_ctx}; give a shorter chat"
            )
        longest = config.max_tokens or DEFAULT_LENGTH
        ids = layout.tensor.to(model.cfg.device)
        settings: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "top_k")
            if (value := getattr(config, name)) is not None
        }
        if settings.get("temperature") == 0:
            settings = {}
        if stops := config.stop_seqs or []:

            def has_stop(read: Tensor, scores: Any, **_: Any) -> Tensor:
                made = read[0, len(layout) :].tolist()
                return torch.tensor([self._before_stop(made, stops) is not None]).to(read.device)

            settings["stopping_criteria"] = [has_stop]
        # The answer.
        if config.seed is not None:
            torch.manual_seed(config.seed)
        with augmented(model, self.rule, layout):
            made = model.original_model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(longest, left),
                do_sample=config.temperature != 0,
                eos_token_id=list(self.ends) or None,
                pad_token_id=next(iter(self.ends), 0),  # one row needs none
                **settings,
            )
        tokens = made[0, ids.shape[1] :].tolist()
        text = self._before_stop(tokens, stops)
        reason: StopReason = "stop"
        if text is None:
            text = model.tokenizer.decode(tokens, skip_special_tokens=True)
            if tokens[-1] not in self.ends:
                reason = "max_tokens" if longest <= left else "model_length"
        usage = ModelUsage(
            input_tokens=len(layout),
            output_tokens=len(tokens),
            total_tokens=len(layout) + len(tokens),
        )
        message = ChatMessageAssistant(content=text, model=self.model_name, source="generate")
        return ModelOutput(
            model=self.model_name,
            choices=[ChatCompletionChoice(message=message, stop_reason=reason)],
            usage=usage,
            time=perf_counter() - began,
        )

    def _before_stop(self, tokens: Sequence[int], stops: Sequence[str]) -> str | None:
        """The answer up to the first of the stops in it, or None. A stop that names a special token
        is looked for in the text with such tokens, any other in the text without."""
        tokenizer = self.model.tokenizer
        added = tokenizer.added_tokens_decoder.values()
        marks = [token.content for token in added if token.special]
        plain = tokenizer.decode(tokens, skip_special_tokens=True)
        with_marks, before = tokenizer.decode(tokens), []
        for stop in stops:
            searched = with_marks if any(mark in stop for mark in marks) else plain
            text, separator, _ = searched.partition(stop)
            if separator:
                before.append(re.sub("|".join(map(re.escape, marks)), "", text))
        return min(before, key=len, default=None)


def _text_of(message: ChatMessage, number: int) -> str:
    """The text of a message of text.

    Raises:
        LayoutError: It has tool calls, is a tool's, or has a part that is no text.
    """
    part_types = [] if isinstance(message.content, str) else [part.type for part in message.content]
    if isinstance(message, ChatMessageTool) or getattr(message, "tool_calls", None):
        problem, next_step = "belongs to a call of a tool", "leave the task's tools out"
    elif kinds := [kind for kind in dict.fromkeys(part_types) if kind != "text"]:
        problem, next_step = f"has parts that are no text: {', '.join(kinds)}", "leave them out"
        if kinds == ["reasoning"]:
            next_step += " by reasoning_history='none'"
    else:
        return message.text
    raise LayoutError(
        f"message {number} ({message.role}) {problem}; lapa2 models read text alone, so {next_step}"
    )
