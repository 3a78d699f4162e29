"""Contrast sets: what all methods of circuits take. Examples, and the words of their attributes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.circuits.examples import (
    RAW,
    ContrastExample,
    attribute_words,
    check_request,
    write_texts,
)
from lapa2_interp.circuits.guard import check_attention
from lapa2_interp.errors import CircuitError, DataError
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.blocks import check_no_open_block
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.fingerprint import weights_read_once
from lapa2_interp.models.load import resolve_model
from lapa2_interp.prefixes.soft_prefix import SoftPrefix, find_prefix
from lapa2_interp.stats import label_codes
from lapa2_interp.tasks.prompts import as_prompts
from lapa2_interp.tasks.segmentation import text_key
from lapa2_interp.tasks.task import Prompts, Task

LONGEST_FACT = 60
"""Letters of a fact in a message; a longer one is shown as a hash."""


@dataclass(frozen=True, repr=False)
class ContrastSet:
    """Texts after opposite prefixes, and the words that distinguish the attributes.

    Attributes:
        examples: One for every text.
        words: Token ids by attribute, in the examples' order; empty where there are none (then
            there is no metric lex).
        task: The task whose texts these are; None for other examples.

    Example:
        >>> from lapa2_interp import circuits, load_model
        >>> model = load_model("planted")
        >>> texts = circuits.ContrastSet.of(model, "sentiment", tokens=4)
        >>> circuits.knock_out(model, texts).best(1)
        ((1, 2),)
    """

    examples: tuple[ContrastExample, ...]
    words: tuple[tuple[int, ...], ...] = ()
    task: Task | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        names = " and ".join(map(repr, self.examples[0].attributes))
        return f"<ContrastSet: {len(self.examples)} texts behind the prefixes of {names}>"

    def __post_init__(self) -> None:
        if not self.examples:
            raise CircuitError("a contrast set needs at least one text")
        if len({example.attributes for example in self.examples}) > 1:
            raise CircuitError(
                "the examples of a contrast set must have the same attributes, in one order"
            )

    @classmethod
    @numbers_checked
    @weights_read_once()
    def of(
        cls,
        model: Model,
        task: str | Task,
        *,
        attribute: str | None = None,
        prefixes: str = "hard",
        prompts: str | Path | Sequence[str | Path] | Prompts | None = None,
        texts: Mapping[str, Sequence[Sequence[int]]] | None = None,
        source: str = RAW,
        tokens: Count = 32,
        samples: Count = 1,
        seed: int = 1,
        words: Mapping[str, Sequence[int]] | None = None,
    ) -> ContrastSet:
        """The contrast set of a task, with an example for every prompt and sample.

        Args:
            model: A model or its name.
            task: A name or a task with two attributes or more and prefixes of one length. In a task
                with a chat, its span is the prefix, and a text its first answer.
            attribute: The target; by default the task's first.
            prefixes: "hard", or soft ones: mle, contrastive, or a set's folder.
            prompts: As `tasks.as_prompts` takes them; by default the task's.
            texts: By prompt, token ids of texts to score; by default the model writes them.
            source: The attribute whose prefix steers the texts, or `RAW` for none. Raw texts are
                the clean measure: a steered text already says what the prefix wants.
            tokens: Length of a text that the model writes.
            samples: Texts of each prompt.
            seed: Seed of the texts.
            words: By attribute, token ids of the words that distinguish it; by default those of
                the task's word list, if it has one.

        Raises:
            TaskError: Unknown, or without opposite attributes.
            CircuitError: Prefixes of different lengths; a chat of several answers, or with soft
                prefixes; no prompts, tokens or samples are requested; or as `check`.
            PrefixError: As `find_prefix`.
            LayoutError: As `check`.
        """
        model = resolve_model(model)
        check_no_open_block(model)
        check_attention(model)
        chosen = load_task(task) if isinstance(task, str) else task
        if chosen.chat is not None and chosen.chat.later:
            raise CircuitError(
                f"circuits read the first answer of a chat, and that of task {chosen.name!r} has"
                f" {chosen.chat.n_turns}; leave out its later messages (`later`)"
            )
        if chosen.chat is not None and prefixes != "hard":
            raise CircuitError(f"a chat has hard prefixes; found {prefixes!r}")
        target = next(iter(chosen.attributes)) if attribute is None else attribute
        names = (target, *chosen.others(target))
        requested = as_prompts(chosen.prompts if prompts is None else prompts).texts
        check_request(requested, texts)
        hard = {name: chosen.prefix(name) for name in names}
        soft = {}
        if prefixes != "hard":
            soft = {name: find_prefix(model, chosen.name, prefixes, name) for name in names}

        def example(prompt: str, ids: Sequence[int]) -> ContrastExample:
            if soft:
                return ContrastExample.of_soft(model.tokenizer, soft, prompt, ids, source)
            if chosen.chat is None:
                return ContrastExample.of(model.tokenizer, hard, prompt, ids, source)
            return ContrastExample.of_chat(model.tokenizer, chosen.chat, hard, prompt, ids, source)

        for prompt in requested:  # a refusal comes before texts are written
            example(prompt, [0])
        if texts is None:
            texts = write_texts(
                model,
                chosen,
                source,
                requested,
                tokens=tokens,
                prefixes=prefixes,
                samples=samples,
                seed=seed,
            )
        if not words:
            with suppress(DataError, CircuitError):
                of_list = task if isinstance(task, str) else task.name
                words = attribute_words(model.tokenizer, of_list, names)
        examples = tuple(example(prompt, ids) for prompt in requested for ids in texts[prompt])
        contrast_set = cls(examples, words_in_order(words or {}, names), chosen)
        contrast_set.check(model)
        return contrast_set

    @classmethod
    def of_examples(
        cls,
        *examples: ContrastExample,
        words: Mapping[str, Sequence[int]] | None = None,
    ) -> ContrastSet:
        """The contrast set of custom examples.

        Args:
            words: By attribute, token ids of the words that distinguish it, which metric lex needs.

        Raises:
            CircuitError: No examples, or words of other attributes.
        """
        names = examples[0].attributes if examples else ()
        return cls(examples, words_in_order(words or {}, names))

    def check(self, model: Model) -> None:
        """Refuse a model in which these texts cannot be compared.

        Raises:
            CircuitError: A text that exceeds the context, or the length beyond which the model has
                other rotary factors; a model some of whose layers have no attention, or whose hooks
                have no heads.
        """
        check_attention(model)
        # The prefix has a forward pass of its own, so a longer text would mix rotary factors.
        most = facts_of(model).short_context or model.cfg.n_ctx
        for example in self.examples:
            if (n := example.layouts[0].n_live + example.n_steps - 1) > most:
                raise CircuitError(
                    f"prefix, prompt and text after {example.prompt!r} have {n} tokens, more than"
                    f" the model's context of {most}; give shorter texts"
                )

    @property
    def attributes(self) -> tuple[str, ...]:
        """The attributes, the target first, as in every example."""
        return self.examples[0].attributes

    @property
    def n_branch_steps(self) -> int:
        """Steps of all examples in all branches."""
        return sum(example.n_branch_steps for example in self.examples)

    @property
    def l_pre(self) -> int:
        """Tokens of the prefix, equal in all examples.

        Raises:
            CircuitError: Prefixes of different lengths, whose positions cannot be compared.
        """
        lengths = sorted({example.layouts[0].l_pre for example in self.examples})
        if len(lengths) > 1:
            raise CircuitError(
                f"prefixes of {', '.join(map(str, lengths))} tokens have no common positions; ask"
                " for examples of one length at a time"
            )
        return lengths[0]

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt of each example."""
        return tuple(example.prompt for example in self.examples)

    @property
    def clusters(self) -> tuple[str, ...]:
        """The unit of resampling of each example, and of halves: its prompt, whatever its white
        space and capitals are (`text_key`)."""
        return tuple(text_key(prompt) for prompt in self.prompts)

    @property
    def n_prompts(self) -> int:
        """Number of different prompts."""
        return len(set(self.clusters))

    def by_prompt(
        self, values: Float[np.ndarray, "example *rest"]
    ) -> Float[np.ndarray, "prompt *rest"]:
        """Means over the examples of each prompt, in the order of the prompts."""
        codes, names = label_codes(self.clusters)
        sums = np.zeros((len(names), *values.shape[1:]))
        np.add.at(sums, codes, values)
        return sums / np.bincount(codes).reshape(-1, *[1] * (values.ndim - 1))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that can be computed."""
        raw = all(example.raw is not None for example in self.examples)
        return "js", *(("lex",) if self.words else ()), "llr", "kl", *(("from_raw",) if raw else ())

    def key(self, model: Model, **more: Any) -> str:
        """A hash of the contrast set, the model and more facts."""
        examples = [
            [
                [example.attributes, example.source, example.text],
                [
                    [
                        layout.soft,
                        layout.n_bos,
                        *([layout.n_before] * (layout.n_before > 0)),
                        layout.l_pre,
                        layout.ids,
                    ]
                    for layout in example.layouts
                ],
                None if example.raw is None else example.raw.ids,
            ]
            for example in self.examples
        ]
        soft = {
            id(prefix): prefix
            for example in self.examples
            for prefix in example.prefixes
            if prefix is not None
        }
        if soft:
            more |= {"soft prefixes": [_hash_prefix(prefix) for prefix in soft.values()]}
        card = identify(model)
        facts = [card.name, card.weights, card.dtype, card.model_class, examples, self.words, more]
        return _hash(json.dumps(facts, default=str))

    def facts(self, model: Model, **more: Any) -> dict[str, str]:
        """The facts behind `key` by name, for messages; long ones as a hash."""
        card = identify(model)
        facts = {
            "model": card.name,
            "weights": card.weights,
            "dtype": card.dtype,
            "model class": card.model_class,
            "attributes": self.attributes,
            "prompts": self.prompts,
            "layouts": [[layout.ids for layout in example.layouts] for example in self.examples],
            "texts": [example.text for example in self.examples],
            "words": self.words,
            **more,
        }
        shown = {name: json.dumps(value, default=str) for name, value in facts.items()}
        return {
            name: text if len(text) <= LONGEST_FACT else _hash(text) for name, text in shown.items()
        }


ContrastLike = ContrastSet | ContrastExample | Sequence[ContrastExample] | str | Task
"""A contrast set; or what one is made of with the usual settings: a task by name or value, or one
or more examples."""


def as_contrast_set(model: Model, contrast: ContrastLike) -> ContrastSet:
    """A contrast set for a model.

    Raises:
        CircuitError, LayoutError, TaskError: As `ContrastSet.of` and `ContrastSet.check`.
    """
    if isinstance(contrast, str | Task):
        return ContrastSet.of(model, contrast)
    if not isinstance(contrast, ContrastSet):
        examples = (contrast,) if isinstance(contrast, ContrastExample) else tuple(contrast)
        contrast = ContrastSet.of_examples(*examples)
    contrast.check(model)
    return contrast


def words_in_order(
    words: Mapping[str, Sequence[int]], names: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """The attributes' words in the order of the examples' names."""
    if words and set(words) != set(names):
        raise CircuitError(
            f"words are given for {', '.join(words)}; the attributes are {', '.join(names)}"
        )
    return tuple(tuple(map(int, words[name])) for name in names) if words else ()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hash_prefix(prefix: SoftPrefix) -> str:
    """A hash of a soft prefix."""
    digest = hashlib.sha256()
    for part in (prefix.keys, prefix.values):
        digest.update(part.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()
