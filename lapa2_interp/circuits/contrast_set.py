"""Contrast sets: what all methods of circuits take. Examples, and the words of their attributes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from lapa2_interp._util.errors import CircuitError, DataError, unknown_choice
from lapa2_interp.circuits.examples import ContrastExample, attribute_words, make_examples
from lapa2_interp.models.card import (
    Model,
    attention_layers,
    check_rotary_side,
    kv_shapes,
    model_card,
    model_short_context,
    network_of,
    plain_network,
)
from lapa2_interp.models.load import resolve_model
from lapa2_interp.prefixes.soft_prefix import SoftPrefix
from lapa2_interp.stats import label_codes
from lapa2_interp.tasks.segmentation import text_key
from lapa2_interp.tasks.task import Task

LONGEST_FACT = 60
"""Letters of a fact in a message; a longer one is shown as a hash."""
TASK_SETTINGS = ("attribute", "prompts", "texts", "source", "tokens", "samples", "seed")
"""Settings of a task's examples, as `make_examples` takes them."""


@dataclass(frozen=True, repr=False)
class ContrastSet:
    """Texts after opposite prefixes, and the words that distinguish the attributes.

    Attributes:
        examples: One for every text.
        words: Token ids by attribute, in the examples' order; empty where there are none (then
            there is no metric lex).
    """

    examples: tuple[ContrastExample, ...]
    words: tuple[tuple[int, ...], ...] = ()

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
    def of(cls, model: Model, contrast: ContrastLike, **settings: Any) -> ContrastSet:
        """A contrast set from what a user gives.

        Args:
            contrast: A contrast set, one or more examples, or a task by name or value.
            settings: For a task, as `make_examples`. For examples, words={name: token ids} says
                which words distinguish the attributes.

        Raises:
            CircuitError: Unknown settings, or those of a task beside examples; a text that exceeds
                the context; a model some of whose layers have no attention, or whose hooks have no
                heads; as `make_examples`.
            LayoutError: A text crosses a switch of the model's rotary factors.
        """
        # Attention in every layer, with a hook by head.
        model = resolve_model(model)
        if len(attending := attention_layers(model)) < model.cfg.n_layers:
            raise CircuitError(
                "circuits are read from models with attention in every layer, and this one has it"
                f" in layers {', '.join(map(str, attending))}; take texts and traces instead"
            )
        network: Any = network_of(model)
        if plain_network(model) is None and hasattr(network, "config"):
            config = network.config.get_text_config()
            if any(key != value for _, key, value in kv_shapes(config)):
                raise CircuitError(
                    f"hook_z of a {config.model_type} model is not by head, as its keys and values"
                    " differ in size; load it as TransformersModel, for methods without hooks"
                )
        # Texts within the context.
        contrast_set = cls._of(model, contrast, **settings)
        for example in contrast_set.examples:
            if (n := example.layouts[0].n_live + example.n_steps - 1) > model.cfg.n_ctx:
                raise CircuitError(
                    f"prefix, prompt and text after {example.prompt!r} have {n} tokens, more than"
                    f" the model's context of {model.cfg.n_ctx}; give shorter texts"
                )
            # The prefix has a forward pass of its own, so a longer text would mix rotary factors.
            check_rotary_side(
                model_short_context(model), 0, n, f"the text after {example.prompt!r}"
            )
        return contrast_set

    @classmethod
    def _of(cls, model: Model, contrast: ContrastLike, **settings: Any) -> ContrastSet:
        """A contrast set, without checks of the model."""
        given = {name: value for name, value in settings.items() if value is not None}
        if unknown := [name for name in given if name not in (*TASK_SETTINGS, "words")]:
            raise CircuitError(unknown_choice("setting", unknown[0], (*TASK_SETTINGS, "words")))
        words_by_name: Mapping[str, Sequence[int]] = given.pop("words", {})
        if isinstance(contrast, str | Task):
            examples = make_examples(model, contrast, **given)
            name = contrast if isinstance(contrast, str) else contrast.name
            words: Mapping[str, Sequence[int]] = words_by_name
            if not words:
                with suppress(DataError, CircuitError):
                    words = attribute_words(model.tokenizer, name, examples[0].attributes)
            return cls(tuple(examples), words_in_order(words, examples[0].attributes))
        if given:
            raise CircuitError(
                f"{next(iter(given))} belongs to a task; examples have their texts already"
            )
        if isinstance(contrast, ContrastSet):
            if not words_by_name:
                return contrast
            return cls(contrast.examples, words_in_order(words_by_name, contrast.attributes))
        found = (contrast,) if isinstance(contrast, ContrastExample) else tuple(contrast)
        return cls(found, words_in_order(words_by_name, found[0].attributes) if found else ())

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
        found = sorted({example.layouts[0].l_pre for example in self.examples})
        if len(found) > 1:
            raise CircuitError(
                f"prefixes of {', '.join(map(str, found))} tokens have no common positions; ask for"
                " examples of one length at a time"
            )
        return found[0]

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
                [[each.soft, each.n_bos, each.l_pre, each.ids] for each in example.layouts],
                None if example.raw is None else example.raw.ids,
            ]
            for example in self.examples
        ]
        soft = {
            id(each): each
            for example in self.examples
            for each in example.prefixes
            if each is not None
        }
        if soft:
            more |= {"soft prefixes": [_hash_prefix(each) for each in soft.values()]}
        card = model_card(model)
        facts = [card.name, card.weights, card.dtype, card.model_class, examples, self.words, more]
        return _hash(json.dumps(facts, default=str))

    def facts(self, model: Model, **more: Any) -> dict[str, str]:
        """The facts behind `key` by name, for messages; long ones as a hash."""
        card = model_card(model)
        found = {
            "model": card.name,
            "weights": card.weights,
            "dtype": card.dtype,
            "model class": card.model_class,
            "attributes": self.attributes,
            "prompts": self.prompts,
            "layouts": [[each.ids for each in example.layouts] for example in self.examples],
            "texts": [example.text for example in self.examples],
            "words": self.words,
            **more,
        }
        shown = {name: json.dumps(value, default=str) for name, value in found.items()}
        return {
            name: text if len(text) <= LONGEST_FACT else _hash(text) for name, text in shown.items()
        }


ContrastLike = ContrastSet | ContrastExample | Sequence[ContrastExample] | str | Task
"""A contrast set, one or more examples, or a task by name or value."""


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
