"""Models with attention steered to a part of the chat, for Inspect.

    inspect eval TASK --model lapa2/smollm2-135m -M alpha=.5 -M span=system

Inspect finds this module by its entry point, where the extra `inspect` is installed. It runs many
samples at once, and a block belongs to one thread, so one worker answers them in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any

import torch
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo
from transformers import StopStringCriteria

from lapa2_interp._util.errors import AugmentationError, GridError, LayoutError
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.models.card import model_card
from lapa2_interp.models.load import load_model

SETTINGS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop_seqs")
"""What of Inspect's configuration decides an answer here."""
REFUSED = (
    "num_choices", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias",
    "frequency_penalty", "presence_penalty", "response_schema", "extra_body", "reasoning_effort",
    "reasoning_tokens", "modalities",
)  # fmt: skip
"""What would decide it elsewhere; all else is about connections."""
ONE = {"num_choices": 1, "best_of": 1}
"""Of those, what asks for nothing."""
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
        config: Inspect's settings of generation. Temperature 0 is greedy; what is not given is as
            the model's own generation configuration has it.
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
        self.ends = model_card(self.model).end_ids
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
            GridError: Tools, or a setting that has no meaning here.
            LayoutError: As `Layout.of_chat`; or the chat fills the context.
        """
        if tools:
            raise GridError("lapa2 models call no tools; leave the task's tools out")
        for name in REFUSED:
            if (value := getattr(config, name, None)) and value != ONE.get(name):
                raise GridError(f"lapa2 models take {', '.join(SETTINGS)}; found {name}={value!r}")
        messages = [{"role": message.role, "content": message.text} for message in input]
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
        ids = layout.tensor.to(model.cfg.device)
        settings: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "top_k")
            if (value := getattr(config, name)) is not None
        }
        if settings.get("temperature") == 0:
            settings = {}
        if stops := config.stop_seqs or []:
            settings["stopping_criteria"] = [StopStringCriteria(model.tokenizer, stops)]
        # The answer.
        if config.seed is not None:
            torch.manual_seed(config.seed)
        with augmented(model, self.rule, layout):
            made = model.original_model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(config.max_tokens or DEFAULT_LENGTH, left),
                do_sample=config.temperature != 0,
                eos_token_id=list(self.ends),
                pad_token_id=self.ends[0],
                **settings,
            )
        tokens = made[0, ids.shape[1] :].tolist()
        text = model.tokenizer.decode(tokens, skip_special_tokens=True)
        cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
        ended = cut is not None or tokens[-1] in self.ends
        usage = ModelUsage(
            input_tokens=len(layout),
            output_tokens=len(tokens),
            total_tokens=len(layout) + len(tokens),
        )
        message = ChatMessageAssistant(content=text[:cut], model=self.model_name, source="generate")
        choice = ChatCompletionChoice(
            message=message, stop_reason="stop" if ended else "max_tokens"
        )
        return ModelOutput(
            model=self.model_name, choices=[choice], usage=usage, time=perf_counter() - began
        )
