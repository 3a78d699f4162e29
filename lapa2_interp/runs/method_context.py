"""Questions that `Method.prepare` may ask of a model.

The questions are about tokens, embeddings, drafts, scores, the neurons that promote a token, and
the residual stream.

Drafts and neurons take a model minutes, so they are kept in the user's cache (`LAPA2_CACHE`, or the
platform's), under a name that says what they depend on: a sample of the weights, the vocabulary,
precision, the kind of processor, and what was asked; for drafts, also prepacking and threads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from pydantic import TypeAdapter
from torch import Tensor

from lapa2_interp._util.parsing import read_text
from lapa2_interp.attention.neurons import is_gated, promoting_neurons
from lapa2_interp.attention.residual import mean_residual
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.tokens import decode_continuation, decode_tokens
from lapa2_interp.errors import LayoutError, ScoringError, parameter
from lapa2_interp.files import cache_folder, one_process_at_a_time, write_text, writing_cache
from lapa2_interp.generation.loop import decode_batch
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.base import Method
from lapa2_interp.models.card import ModelCard, identify, weights_id
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.machine import processor_kind
from lapa2_interp.models.readable_weights import check_weights_readable
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer
from lapa2_interp.scoring.scorer import TextItem, run_scorer
from lapa2_interp.tasks.task import CUSTOM, Attribute, Prompts, Task

T = TypeVar("T")
DRAFT_SEEDS = 2**40
"""Added to the seeds of drafts, so that no text is drawn with the random numbers of the drafts that
steer it."""


@dataclass(eq=False)
class ModelContext:
    """A `methods.MethodContext` for a model from `load_model`.

    Attributes:
        model: The model whose texts are to be controlled.
    """

    model: Model
    _made: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def card(self) -> ModelCard:
        """The model's, which says which weights it has: most methods never ask."""
        return identify(self.model)

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.card.end_ids

    @property
    def n_layers(self) -> int:
        return self.model.cfg.n_layers

    @property
    def gated(self) -> bool:
        return is_gated(self.model)

    def cached(self, name: Hashable, make: Callable[[], T]) -> T:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def ids(self, text: str) -> list[int]:
        return list(self.model.tokenizer(text, add_special_tokens=False).input_ids)

    def text(self, ids: Sequence[int]) -> str:
        return decode_tokens(self.model.tokenizer, ids)

    def embedding(self) -> Float[Tensor, "vocab d_model"]:
        network: Any = facts_of(self.model).network
        embed = (
            network.get_input_embeddings()
            if facts_of(self.model).backend != "hooked"
            else network.embed
        )
        check_weights_readable(self.model, "the embedding is read from", embed)
        return self.model.W_E.detach().float()

    def drafts(self, method: Method, prompt: str, n: int, new_tokens: int, seed: int) -> list[str]:
        asked = [method.name, method.equation, prompt, n, new_tokens, seed]
        file = self._file("drafts", ".json", self.card.prepacking, torch.get_num_threads(), *asked)
        with one_process_at_a_time(file):
            with suppress(OSError, ValueError):  # a damaged file is made again
                return TypeAdapter(list[str]).validate_json(read_text(file))
            texts = self._draft(method, prompt, n, new_tokens, seed)
            with writing_cache(file):
                write_text(file, json.dumps(texts))
            return texts

    def _draft(self, method: Method, prompt: str, n: int, new_tokens: int, seed: int) -> list[str]:
        bare = Task(
            name="drafts",
            length_counts_prompt=False,
            attributes={CUSTOM: Attribute(prefix=CUSTOM)},
            prompts=Prompts(texts=(prompt,)),
        )
        cell = cell_of(
            self.model,
            method=method,
            task=bare,
            attribute=CUSTOM,
            alpha=0.0,
            length=new_tokens,
            samples=n,
            seed=DRAFT_SEEDS + seed,
            eos="stop",
            trace="none",
        )
        try:  # a draft is an ordinary generation, whose own plan has nothing to prepare
            todo = plan_batches(self.model, cell)
        except LayoutError as error:
            raise LayoutError(
                f"drafts of {new_tokens} tokens: {error}; or draft fewer"
                f" ({parameter('draft_tokens', '...', 'set')})"
            ) from None
        ends = set(self.end_ids)
        return [
            decode_continuation(self.model.tokenizer, prompt, [i for i in tokens if i not in ends])
            for pairs in todo.batches
            for tokens in decode_batch(self.model, todo, pairs).texts["tokens"]
        ]

    def attribute_probabilities(
        self, scorer: str, task: Task, attribute: str, prompt: str, texts: Sequence[str]
    ) -> list[float | None]:
        name, _, model = scorer.partition("=")
        options = ScorerOptions(task=task, device=self.card.device)
        key = ("scorer", scorer, task.model_dump_json())
        reader = self.cached(key, lambda: make_scorer(name, model, options))
        table = run_scorer(reader, [TextItem(text, prompt, attribute) for text in texts])
        if attribute in table:
            column = table[attribute]
        elif "toxicity" in table and attribute in ("toxic", "nontoxic"):
            column = table["toxicity"] if attribute == "toxic" else 1 - table["toxicity"]
        else:
            columns = ", ".join(str(name) for name in table if name != "reason")
            raise ScoringError(
                f"the scorer {scorer} tells {columns}, not {attribute!r}; give another"
                f" ({parameter('scorer', '...', 'set')})"
            )
        return [
            None if reason else float(value)
            for value, reason in zip(column, table["reason"], strict=True)
        ]

    def promoting_neurons(
        self, tokens: Sequence[int], k: int, upper: bool = False
    ) -> Int[Tensor, "token k two"]:
        reading, first = self.ids(" "), self.model.cfg.n_layers // 2 if upper else 0
        file = self._file("neurons", ".npz", reading, list(tokens), k, first)

        def make() -> Int[Tensor, "token k two"]:
            with one_process_at_a_time(file):  # of all workers of a sweep, one computes the table
                return promoting_neurons(self.model, reading, tokens, k, first, file)[1]

        return self.cached(file, make)

    def mean_residual(self, prefix: str, texts: Sequence[str]) -> Float[Tensor, "layer d_model"]:
        layouts = [Layout.of(self.model.tokenizer, prefix, text) for text in texts]
        return self.cached(
            ("mean residual", prefix, tuple(texts)), lambda: mean_residual(self.model, layouts)
        )

    def _file(self, kind: str, suffix: str, *asked: Any) -> Path:
        """The file in the cache for what was asked of this model."""
        facts = [
            weights_id(self.model),
            self.card.model_class,
            self.card.dtype,
            processor_kind(self.card.device),
            *asked,
        ]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
        return cache_folder() / kind / f"{key}{suffix}"
