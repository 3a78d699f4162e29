"""What every instrument is asked: cases, the words of their attributes, and how much is read at
once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from lapa2_interp._util.errors import CircuitError, DataError, unknown_choice
from lapa2_interp.bias.augmentation import AugmentationLike
from lapa2_interp.circuits.cases import (
    RAW,
    ContrastExample,
    attribute_words,
    batches,
    make_examples,
)
from lapa2_interp.circuits.edits import Edit, edited_logits
from lapa2_interp.circuits.metrics import Metric, Predictions
from lapa2_interp.models.card import (
    Model,
    attention_layers,
    check_rotary_side,
    kv_shapes,
    model_card,
    model_short_context,
    network_of,
    plain_network,
    prepacked_model,
)
from lapa2_interp.models.load import resolve_model
from lapa2_interp.prefixes.soft_prefix import SoftPrefix
from lapa2_interp.tasks.task import Task

LOGITS = 2**28
"""Bytes of logits that are held at once."""
SHOWN = 60
"""Letters of a fact that is told as it is."""
SETTINGS = ("attribute", "prompts", "texts", "source", "tokens", "samples", "seed")
"""What can be asked of a task's cases, as `make_examples` takes it."""


@dataclass(frozen=True)
class ContrastSet:
    """Texts behind opposite prefixes, and the words that tell the attributes apart.

    Attributes:
        cases: One for every text.
        words: Token ids by attribute, in the cases' order; empty where there are none (then there
            is no metric lex).
    """

    cases: tuple[ContrastExample, ...]
    words: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.cases:
            raise CircuitError("a question needs at least one text")
        if len({case.names for case in self.cases}) > 1:
            raise CircuitError(
                "the cases of a question must have the same attributes, in one order"
            )

    @classmethod
    def of(cls, model: Model, about: ContrastLike, **settings: Any) -> ContrastSet:
        """A question from what a user gives.

        Args:
            about: A question, a case or several, or a task by name or value.
            settings: For a task, as `make_examples`. For cases, words={name: token ids} says which
                words tell the attributes apart.

        Raises:
            CircuitError: Unknown settings, or those of a task beside cases; a text that exceeds the
                context; a model some of whose layers have no attention, or whose hooks have no
                heads; as `make_examples`.
            LayoutError: A text crosses a switch of the model's rotary factors.
        """
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
                    " differ in size; load it as TransformersModel, for what needs no hooks"
                )
        question = cls._of(model, about, **settings)
        for case in question.cases:
            if (n := case.layouts[0].n_live + case.n - 1) > model.cfg.n_ctx:
                raise CircuitError(
                    f"prefix, prompt and text behind {case.prompt!r} have {n} tokens, more than the"
                    f" model's context of {model.cfg.n_ctx}; give shorter texts"
                )
            # The prefix is read by itself, so a longer text would mix rotary factors.
            check_rotary_side(model_short_context(model), 0, n, f"the text behind {case.prompt!r}")
        return question

    @classmethod
    def _of(cls, model: Model, about: ContrastLike, **settings: Any) -> ContrastSet:
        given = {name: value for name, value in settings.items() if value is not None}
        if unknown := [name for name in given if name not in (*SETTINGS, "words")]:
            raise CircuitError(unknown_choice("setting", unknown[0], (*SETTINGS, "words")))
        words_by_name: Mapping[str, Sequence[int]] = given.pop("words", {})
        if isinstance(about, str | Task):
            cases = make_examples(model, about, **given)
            name = about if isinstance(about, str) else about.name
            words: Mapping[str, Sequence[int]] = words_by_name
            if not words:
                with suppress(DataError, CircuitError):
                    words = attribute_words(model.tokenizer, name, cases[0].names)
            return cls(tuple(cases), in_order(words, cases[0].names))
        if given:
            raise CircuitError(
                f"{next(iter(given))} belongs to a task; cases have their texts already"
            )
        if isinstance(about, ContrastSet):
            if not words_by_name:
                return about
            return cls(about.cases, in_order(words_by_name, about.cases[0].names))
        found = (about,) if isinstance(about, ContrastExample) else tuple(about)
        return cls(found, in_order(words_by_name, found[0].names) if found else ())

    @property
    def l_pre(self) -> int:
        """Tokens of the prefix, the same in every case.

        Raises:
            CircuitError: Prefixes of several lengths, where their positions are compared.
        """
        found = sorted({case.layouts[0].l_pre for case in self.cases})
        if len(found) > 1:
            raise CircuitError(
                f"prefixes of {', '.join(map(str, found))} tokens have no common positions; ask for"
                " cases of one length at a time"
            )
        return found[0]

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt of each case: what is resampled."""
        return tuple(case.prompt for case in self.cases)

    @property
    def n_prompts(self) -> int:
        return len(set(self.prompts))

    def by_prompt(
        self, values: Float[np.ndarray, "case *rest"]
    ) -> Float[np.ndarray, "prompt *rest"]:
        """Means over the cases of each prompt, in the order of the prompts."""
        codes, names = pd.factorize(np.asarray(self.prompts))
        sums = np.zeros((len(names), *values.shape[1:]))
        np.add.at(sums, codes, values)
        return sums / np.bincount(codes).reshape(-1, *[1] * (values.ndim - 1))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that can be computed."""
        raw = all(case.raw is not None for case in self.cases)
        return "js", *(("lex",) if self.words else ()), "llr", "kl", *(("from_raw",) if raw else ())

    def key(self, model: Model, **more: Any) -> str:
        """A hash of what identifies this question to this model."""
        cases = [
            [
                [case.names, case.source, case.text],
                [[each.soft, each.n_bos, each.l_pre, each.ids] for each in case.layouts],
                None if case.raw is None else case.raw.ids,
            ]
            for case in self.cases
        ]
        soft = {id(each): each for case in self.cases for each in case.prefixes if each is not None}
        if soft:
            more |= {"soft prefixes": [_bits(each) for each in soft.values()]}
        card = model_card(model)
        facts = [card.name, card.weights, card.dtype, card.model_class, cases, self.words, more]
        return _hash(json.dumps(facts, default=str))

    def facts(self, model: Model, **more: Any) -> dict[str, str]:
        """What tells this question to this model from others, by name, for messages; what is long
        as a hash."""
        card = model_card(model)
        found = {
            "model": card.name,
            "weights": card.weights,
            "dtype": card.dtype,
            "model class": card.model_class,
            "attributes": self.cases[0].names,
            "prompts": self.prompts,
            "layouts": [[each.ids for each in case.layouts] for case in self.cases],
            "texts": [case.text for case in self.cases],
            "words": self.words,
            **more,
        }
        shown = {name: json.dumps(value, default=str) for name, value in found.items()}
        return {name: text if len(text) <= SHOWN else _hash(text) for name, text in shown.items()}


ContrastLike = ContrastSet | ContrastExample | Sequence[ContrastExample] | str | Task
"""What a circuit is asked about."""


def in_order(
    words: Mapping[str, Sequence[int]], names: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """The attributes' words in the order of the cases' names."""
    if words and set(words) != set(names):
        raise CircuitError(
            f"words are given for {', '.join(words)}; the attributes are {', '.join(names)}"
        )
    return tuple(tuple(map(int, words[name])) for name in names) if words else ()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _bits(prefix: SoftPrefix) -> str:
    """A hash of a soft prefix."""
    digest = hashlib.sha256()
    for part in (prefix.keys, prefix.values):
        digest.update(part.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def rows_at_once(model: Model, cases: Sequence[ContrastExample], asked: int | None = None) -> int:
    """The number asked for; else items whose logits fit `LOGITS`, where each is as large as the
    largest of these cases.

    Raises:
        CircuitError: Fewer than 1 is asked for.
    """
    if asked is not None:
        if asked < 1:
            raise CircuitError(f"at_once must be at least 1, or None for what fits; found {asked}")
        return asked
    largest = max(len(case.names) * case.n for case in cases)
    return max(1, LOGITS // (4 * largest * model.cfg.d_vocab))


def evaluate_edits(
    model: Model,
    question: ContrastSet,
    edits: Sequence[Edit | None],
    metrics: dict[str, Metric],
    augmentation: AugmentationLike = None,
    progress: tqdm | None = None,
    at_once: int | None = None,
) -> Iterator[tuple[int, list[int], dict[str, Float[Tensor, "item step"]]]]:
    """Metrics of every case under every edit.

    Args:
        at_once: Items (a case under an edit) that are read together; changes nothing but memory and
            time.

    Yields:
        The edit's number, the cases' numbers, and the metrics of those cases by name. Some edits
        are read together, and all cases of these come before the next edits.
    """
    with_raw = "from_raw" in metrics
    most = rows_at_once(model, question.cases, at_once)
    groups = list(batches(question.cases, most))
    size = max(1, most // max(map(len, groups)))  # edits that are read together
    with torch.no_grad(), prepacked_model(model):
        for first in range(0, len(edits), size):
            block = range(first, min(first + size, len(edits)))
            for group in groups:
                items = [(question.cases[i], edits[number]) for number in block for i in group]
                logits, raw = edited_logits(model, items, augmentation, with_raw)
                text = torch.tensor([case.text for case, _ in items], device=logits.device)
                found = Predictions(logits, text, raw, question.words)
                values = {name: _value(name, metric, found) for name, metric in metrics.items()}
                for at, number in enumerate(block):
                    part = slice(at * len(group), (at + 1) * len(group))
                    yield number, group, {name: each[part] for name, each in values.items()}
                if progress is not None:
                    progress.update(sum(case.n * len(case.names) for case, _ in items))


def _value(name: str, metric: Metric, found: Predictions) -> Float[Tensor, "item step"]:
    """A metric's values; one of another shape is refused. A metric of some steps has fewer."""
    value, (n, steps) = metric(found), found.text.shape
    good = isinstance(value, Tensor) and value.ndim == 2 and len(value) == n
    if not good or not 1 <= value.shape[1] <= steps:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CircuitError(
            f"metric {name!r} must give a number for each text and step, a tensor of shape"
            f" {(n, steps)} here; found {got}"
        )
    return value


__all__ = ["RAW", "ContrastLike", "ContrastSet", "evaluate_edits", "rows_at_once"]
