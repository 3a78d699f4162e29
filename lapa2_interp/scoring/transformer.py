"""Scorers that run a transformers model.

One is perplexity under a causal model, another any sequence classifier.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapa2_interp.bias.text_start import text_markers
from lapa2_interp.bias.tokens import without_dropout
from lapa2_interp.errors import (
    Lapa2Error,
    ModelError,
    ScoringError,
    first_sentence,
    parameter,
    pluralize,
    unknown_choice,
)
from lapa2_interp.files import sha256_of
from lapa2_interp.models.configuration import context_length, unknown_mask
from lapa2_interp.models.fingerprint import fingerprint
from lapa2_interp.models.load import (
    REMOTE_CODE,
    check_hub,
    load_transformers,
    move_to_device,
    needs_remote_code,
    provenance,
)
from lapa2_interp.models.lone_pass import lone_pass, without_chance
from lapa2_interp.models.positions import position_problem, tolerance
from lapa2_interp.models.prepacked import prepacked
from lapa2_interp.models.smollm2 import SMOLLM2
from lapa2_interp.models.weights import (
    check_weights,
    files_unchanged,
    load_network,
    quiet_transformers,
)
from lapa2_interp.prefixes.likelihood import TextRows, check_has_embeddings, text_nll
from lapa2_interp.scoring.adapter import TOKENS_AT_ONCE, batch_by_tokens, group_by_beginning
from lapa2_interp.scoring.scorer import (
    NO_NUMBER,
    Score,
    ScorerInPieces,
    SkippedText,
    TextItem,
    chunks,
    unreadable_reason,
)
from lapa2_interp.tasks.segmentation import COUNT_UNIT, has_unspaced_script, word_spans

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MIN_WORDS = 10
MAX_TOKENS = 1024
UNNAMED = re.compile(r"LABEL_\d+")
"""Names that transformers gives to outputs without a name."""
HEADS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "single_label_classification": partial(torch.softmax, dim=1),
    "multi_label_classification": torch.sigmoid,
}
"""Probabilities from the outputs of a head, [text label], by the `problem_type` of its
configuration: labels that exclude each other, and labels that do not."""
LONGEST_TEXT = 512
"""Tokens that a classifier reads of a text, at most."""
VERSIONED_ENDINGS = (".json", ".txt", ".model", ".py")
"""Endings of the files of a model, besides its weights, that are part of its version."""


class NetworkScorer(ScorerInPieces):
    """A scorer that reads texts with a network, whose weights its version names."""

    network: PreTrainedModel

    def _note_weights(self) -> None:
        self._weights = fingerprint(self.network)

    def _check_weights(self) -> None:
        """Refuse weights other than those that the version names.

        Raises:
            ScoringError: They have changed since they were loaded.
        """
        if fingerprint(self.network) != self._weights:
            raise ScoringError(
                f"the weights of the scorer {self.name} have changed since it was loaded, and its"
                f" scores would be kept as those of {self.version}; save the changed model, and"
                " load a scorer of that folder"
            )

    def close(self) -> None:
        self.__dict__.pop("network", None)  # frees memory for the next scorer


def _repeatable(scorer: NetworkScorer, compute: Callable[[], Tensor]) -> Tensor:
    """What the network of a scorer computes.

    Raises:
        ScoringError: It is another each time.
    """
    try:
        return without_chance(scorer.network, compute)
    except ModelError as error:
        raise ScoringError(f"{scorer.name}: {error}") from error


class Perplexity(NetworkScorer):
    """exp of a text's mean -ln p per token, the first token conditioned on BOS (section 5.1,
    Fluency; eval_perplexity.py).

    For a model whose texts start with nothing (`bias.text_start`) tokens count from the second one
    on, and the version says so: these numbers are not compared with those of a model that has a
    start token.

    The number in the paper's table is the arithmetic mean over texts. As in the paper, texts under
    10 words (split at spaces) are skipped; so are texts that begin with BOS. In scripts without
    spaces a grapheme counts as a word. The model is causal, so texts of which one begins with the
    other need one forward pass.

    Args:
        model: A name of `lapa2 models`, a hub id, a folder or a GGUF file. The paper:
            gpt2-large, and LLaMA-2-13B for the large models.
        generator: The weights that generated the texts, if known; if they are this model's, the
            version says "self".
        min_words: Texts with fewer words are skipped.
        max_tokens: A longer text is scored up to here; by default the model's context, 1,024 at
            most.
        doubled_bos: BOS twice, and P(BOS | BOS) in the mean, as in the released LLaMA script.

    Raises:
        ModelError: The model cannot be loaded.
        ScoringError: At the first text: the model's numbers are no P(token | tokens before it),
            since it also reads what follows.
    """

    name = "perplexity"
    columns = ("perplexity",)
    batch_size = 256
    by_length = False

    def __init__(
        self,
        model: str = "smollm2-135m",
        dtype: str = "float32",
        device: str | None = None,
        generator: str | None = None,
        min_words: int = MIN_WORDS,
        max_tokens: int | None = None,
        doubled_bos: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        self.network, self.tokenizer, weights = load_transformers(model, dtype, trust_remote_code)
        move_to_device(self.network, device)
        self.min_words, self.doubled_bos = min_words, doubled_bos
        self.bos = text_markers(self.tokenizer).start
        n_ctx = context_length(self.network.config.get_text_config())
        self.max_tokens = min(n_ctx - 2, max_tokens or MAX_TOKENS)
        self.title = f"{model} ({type(self.network).__name__})"
        self._checked = False
        if mask := unknown_mask(self.network.config, self.max_tokens + 2):
            raise ScoringError(
                f"{self.title} hides keys of long texts by {mask}, and"
                " whether a token's probability depends on what follows is not known here; give"
                " another causal model, such as gpt2"
            )
        own = " self" if generator == weights else ""
        if doubled_bos and self.bos is None:
            raise ScoringError(
                f"{parameter('doubled_bos')} needs a start token, and texts of {model} start with"
                " nothing; leave it out"
            )
        bos = ", BOS twice" if doubled_bos else ""
        bos += ", from the second token on" * (self.bos is None)
        self.version = (
            f"{model} {dtype}{own}, {weights}, at most {self.max_tokens} tokens, {min_words}+"
            f" {COUNT_UNIT}{bos}{_other_files_version(model)}"
        )
        self._note_weights()

    def scores_in_pieces(self, items: Sequence[TextItem]) -> Iterator[dict[int, Score]]:
        self._check_weights()
        bos = self.bos
        # Tokenise; leave out texts that cannot be scored.
        left_out: dict[int, Score] = {}
        texts: dict[int, list[int]] = {}
        first: dict[int, int] = {}  # the first token that counts
        for index, item in enumerate(items):
            if why := unreadable_reason(item.text):
                left_out[index] = SkippedText(why)
                continue
            ids, first[index] = self._read(item)
            ids = ids[: self.max_tokens]
            if len(ids) <= first[index] > 0:
                left_out[index] = SkippedText("nothing after the prompt")
                continue
            if not ids or _n_words(item.text) < self.min_words:
                left_out[index] = SkippedText(f"under {self.min_words} words")
                continue
            if bos is None:  # nothing predicts the first token
                first[index] = max(first[index], 1)
            if len(ids) <= first[index]:
                left_out[index] = SkippedText("one token, which nothing precedes")
                continue
            if ids[0] == bos:  # a second one, whose P(BOS | BOS) would be part of the mean
                left_out[index] = SkippedText(
                    f"begins with {self.tokenizer.convert_ids_to_tokens(bos)}"
                )
                continue
            texts[index] = [*self._front, *ids] if self.doubled_bos else ids
        yield left_out
        # The passes of this check cost as much as a few texts: scores of a cache need none.
        if texts and not self._checked:
            _check_causal(self.network, bos or 0, self.title)
            self._checked = True
        # Score texts with the same beginning in one row.
        places = list(texts)
        groups = [[places[i] for i in group] for group in group_by_beginning(list(texts.values()))]
        groups.sort(key=lambda group: len(texts[group[-1]]))
        for batch in batch_by_tokens([len(texts[group[-1]]) for group in groups], TOKENS_AT_ONCE):
            chosen = [groups[i] for i in batch]
            rows = TextRows.of(
                [texts[group[-1]] for group in chosen], self._front, self.network.device
            )
            with lone_pass(self.network), torch.no_grad(), prepacked(self.network):
                nll = _repeatable(self, partial(text_nll, self.network, rows)).double().cpu()
            skip = 1 - len(self._front)  # nll[i] is of the token behind slot i
            yield {
                index: _perplexity_score(
                    nll[row, first[index] - skip : len(texts[index]) - skip].mean().exp().item()
                )
                for row, group in enumerate(chosen)
                for index in group
            }

    @property
    def _front(self) -> tuple[int, ...]:
        """What stands in front of every text."""
        return () if self.bos is None else (self.bos,)

    def _read(self, item: TextItem) -> tuple[list[int], int]:
        """The tokens that the model reads, and the index of the first that counts."""
        return self._ids(item.text), 0

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


class ConditionalPerplexity(Perplexity):
    """The perplexity of a text's tokens after the prompt, given the prompt. A token that is partly
    prompt counts."""

    name = "conditional-perplexity"
    item_fields = ("prompt",)
    joins_prompt = True

    def _read(self, item: TextItem) -> tuple[list[int], int]:
        text = item.text if item.text.startswith(item.prompt) else item.prompt + item.text
        ids, of_prompt = self._ids(text), self._ids(item.prompt)
        pairs = enumerate(zip(ids, of_prompt, strict=False))
        return ids, next((i for i, (one, two) in pairs if one != two), len(of_prompt))


def _n_words(text: str) -> int:
    """Words split at single spaces, as in the released script, and graphemes of scripts without
    spaces."""
    return sum(
        len(word_spans(part)) if has_unspaced_script(part) else 1 for part in text.split(" ")
    )


def _perplexity_score(value: float) -> Score:
    if math.isnan(value):
        return NO_NUMBER
    if math.isinf(value):
        return SkippedText("probability 0")
    return (value,)


def _check_causal(network: Any, bos: int, title: str) -> None:
    """Refuse a network for which `text_nll` is not -ln P(token | tokens before it), in a batch of
    texts, as its logits after these tokens alone say it.

    Raises:
        ScoringError: They differ by more than rounding, or cannot be computed.
    """
    try:
        n_tokens = network.get_input_embeddings().num_embeddings
        ids = torch.linspace(0, n_tokens - 1, 6)[1:-1].long().tolist()
        texts, alone = [ids, ids[:2]], []
        with torch.no_grad():
            nll = text_nll(network, TextRows.of(texts, (bos,), network.device)).double().cpu()
            for slot, token in enumerate(ids):
                before = torch.tensor([[bos, *ids[:slot]]], device=network.device)
                logits = network(before, use_cache=False).logits[0, -1]
                alone.append(-logits.double().log_softmax(-1)[token].cpu())
    except Lapa2Error:
        raise
    except Exception as error:  # each class has its own
        raise ScoringError(
            f"cannot read the perplexity of a text under {title}: {type(error).__name__}:"
            f" {first_sentence(error)}; give another causal model, such as gpt2"
        ) from error
    away = [
        abs(row[i] - alone[i])
        for row, text in zip(nll, texts, strict=True)
        for i in range(len(text))
    ]
    allowed = tolerance(network)
    if (mean := float(torch.stack(away).mean())) > allowed:
        if (problem := position_problem(network)) is not None:
            raise ScoringError(
                f"cannot read the perplexity of a text under {title}: {problem}; give another"
                " causal model, such as gpt2"
            )
        raise ScoringError(
            f"{title} is no causal model: its log-probabilities of tokens change by {mean:.2g} with"
            f" the text that follows (allowed {allowed:g}), so a text has no perplexity; give a"
            " model that reads from left to right, such as gpt2"
        )


class Classifier(NetworkScorer):
    """Any sequence classifier of transformers; its numbers are the probabilities of its labels.

    The configuration says what the outputs are: of `problem_type` single_label_classification, or
    by default of several named labels, P by softmax, which exclude each other; of
    multi_label_classification P of each label by itself, by the logistic function.

    A text is read as it would be alone. Texts in one pass have equal numbers of tokens, so nothing
    is padded.

    Args:
        model: A hub id or a folder.
        labels: New names of its labels, such as {"LABEL_1": "positive"}; by default its own names
            in lower case. The probabilities of labels with the same name are added.
        column: Keep only this label's probability, as `name` (for toxicity).
        name: accuracy or toxicity.

    Raises:
        ScoringError: The model cannot be loaded, lacks a label, or is a regression; or what its
            outputs mean is not known.
    """

    batch_size = 256

    def __init__(
        self,
        model: str,
        labels: Mapping[str, str] | None = None,
        column: str | None = None,
        name: str = "accuracy",
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.name = name
        self.network, self.tokenizer, weights = _load_classifier(model, trust_remote_code)
        move_to_device(self.network, device)
        own = _output_names(self.network.config, model)
        if wrong := [label for label in labels or {} if label not in own]:
            raise ScoringError(f"{model}: {unknown_choice('label', wrong[0], own)}")
        names = [(labels or {}).get(label, label.lower()) for label in own]
        self.labels = tuple(dict.fromkeys(names))
        if column is not None and column not in self.labels:
            raise ScoringError(f"{model}: {unknown_choice('label', column, self.labels)}")
        self.column = column
        self.columns = self.labels if column is None else (name,)
        self.classifies = column is None
        named = own if column else [*(labels or {})]  # whoever asks for a label knows it
        unnamed = [label for label in own if UNNAMED.fullmatch(label) and label not in named]
        problem = _problem_type(self.network.config, model, unnamed)
        self.probabilities = HEADS[problem]
        several = problem == "multi_label_classification"
        if several and len(self.labels) < len(names):
            raise ScoringError(
                f"{model}: its labels do not exclude each other, so their probabilities cannot be"
                f" added; give each another name, found {', '.join(names)}"
            )
        self.parts = torch.tensor([[name == label for label in self.labels] for name in names])
        self.max_tokens = min(LONGEST_TEXT, _longest_input(self.network))
        self.inputs = inspect.signature(self.network.forward).parameters.keys()
        self.settings = {"use_cache": False} if "use_cache" in self.inputs else {}
        self.one_by_one = False
        one_column = "" if column is None else f", {column} alone"
        self.version = (
            f"{model}, {weights}, {'each of' if several else 'one of'} the labels"
            f" {', '.join(f'{a}: {b}' for a, b in zip(own, names, strict=True))}{one_column},"
            f" at most {self.max_tokens} tokens{_other_files_version(model)}"
        )
        self._note_weights()

    def scores_in_pieces(self, items: Sequence[TextItem]) -> Iterator[dict[int, Score]]:
        self._check_weights()
        left_out: dict[int, Score] = {}
        read: dict[int, dict[str, list[int]]] = {}
        for index, item in enumerate(items):
            if why := unreadable_reason(item.text):
                left_out[index] = SkippedText(why)
                continue
            fields = self.tokenizer(item.text, truncation=True, max_length=self.max_tokens)
            if not fields["input_ids"]:
                left_out[index] = SkippedText("no token")
                continue
            read[index] = {name: ids for name, ids in fields.items() if name in self.inputs}
        yield left_out
        order = sorted(read, key=lambda index: len(read[index]["input_ids"]))
        for length, same in groupby(order, key=lambda index: len(read[index]["input_ids"])):
            for places in chunks(list(same), max(1, TOKENS_AT_ONCE // length)):
                yield dict(zip(places, self._numbers([read[i] for i in places]), strict=True))

    @torch.no_grad()
    def _numbers(self, rows: Sequence[Mapping[str, list[int]]]) -> list[Score]:
        """The numbers of texts with equal numbers of tokens."""
        inputs = {
            name: torch.tensor([row[name] for row in rows], device=self.network.device)
            for name in rows[0]
        }
        check_has_embeddings(self.network, inputs["input_ids"])
        with lone_pass(self.network), prepacked(self.network):
            logits = _repeatable(self, partial(self._logits, inputs)).double()
        if logits.shape != (len(rows), len(self.parts)):
            raise ScoringError(
                f"{type(self.network).__name__} has outputs of shape {list(logits.shape)} for"
                f" {pluralize(len(rows), 'text')} and {len(self.parts)} labels; give a classifier"
                " of whole texts"
            )
        probabilities = self.probabilities(logits) @ self.parts.to(logits)
        if self.column is not None:
            probabilities = probabilities[:, [self.labels.index(self.column)]]
        return list(map(tuple, probabilities.tolist()))

    def _logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The outputs of the network, [text label].

        Some read one text at a time: decoders without a padding token, and those of BART's make
        where texts differ in their numbers of end tokens.
        """
        n = len(inputs["input_ids"])
        if n == 1 or not self.one_by_one:
            try:
                with lone_pass(self.network):
                    return self.network(**inputs, **self.settings).logits
            except Exception:  # each class has its own
                if n == 1:
                    raise
                self.one_by_one = True
        alone = ({name: ids[i : i + 1] for name, ids in inputs.items()} for i in range(n))
        return torch.cat([self._logits(row) for row in alone])


def _output_names(config: Any, model: str) -> list[str]:
    """The names of a head's outputs.

    Raises:
        ScoringError: The configuration does not name each.
    """
    names = config.id2label
    if sorted(names) != list(range(len(names))):
        raise ScoringError(
            f"{model}: id2label in config.json must number the labels from 0 to {len(names) - 1},"
            f" found {', '.join(map(str, names))}"
        )
    return [str(names[i]) for i in range(len(names))]


def _problem_type(config: Any, model: str, unnamed: Sequence[str]) -> str:
    """A name in `HEADS`: what the outputs of a head are.

    Args:
        unnamed: Outputs that nobody has named.

    Raises:
        ScoringError: They are no probabilities of labels, or what they are is not known.
    """
    problem, n = config.problem_type, len(config.id2label)
    step = "give a classifier with a label for each attribute"
    if problem is not None and problem not in HEADS:
        raise ScoringError(
            f"{model}: problem_type in config.json is {problem!r}, so its outputs are no"
            f" probabilities of labels (allowed: {', '.join(HEADS)}); {step}"
        )
    if problem is None and n == 1:
        raise ScoringError(
            f"{model} has one output and no problem_type in config.json, as regressions and reward"
            f" models have, so it is no probability; {step}, or, if it is the logit of one label,"
            ' set "problem_type" to "multi_label_classification" there'
        )
    if problem is None and unnamed:
        raise ScoringError(
            f"{model}: config.json has neither a problem_type nor names of the outputs"
            f" {', '.join(unnamed)}, so what they mean is not known; name them:"
            f" {parameter('labels')}"
            f" {unnamed[0]}=NAME"
        )
    return problem or "single_label_classification"


def _longest_input(network: Any) -> int:
    """Tokens that a network reads, at most. In tables of positions with a padding row (RoBERTa's)
    the positions of tokens begin behind this row."""
    tables = [
        len(module.weight) - module.padding_idx - 1
        for name, module in network.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    return min([context_length(network.config.get_text_config()), *tables])


def _other_files_version(model: str) -> str:
    """A part of a version: a hash of the files in a folder that decide scores besides the weights,
    such as the tokenizer; "" for a name or a hub id."""
    if model == SMOLLM2 or not Path(model).is_dir():
        return ""
    digest = hashlib.sha256()
    for file in sorted(Path(model).iterdir()):
        if file.is_file() and file.suffix in VERSIONED_ENDINGS:
            digest.update(f"{file.name} {sha256_of(file)}\n".encode())
    return f", other files {digest.hexdigest()[:12]}"


def _load_classifier(
    model: str, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    check_weights(model, "AutoModelForSequenceClassification")
    try:
        if not Path(model).is_dir():
            check_hub(model)
        with quiet_transformers(), files_unchanged(model):
            network = load_network(
                AutoModelForSequenceClassification,
                model,
                use_safetensors=True,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
            )
            weights = provenance(model, network.config)
            tokenizer = without_dropout(
                AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
            )
    except ModelError as error:
        raise ScoringError(f"cannot load the classifier: {error}") from error
    except Exception as error:  # many libraries raise here
        if needs_remote_code(error):
            raise ScoringError(f"the classifier {model!r} {REMOTE_CODE}") from error
        raise ScoringError(
            f"cannot load the classifier {model!r}; give a hub id or a folder with safetensors"
            f" ({first_sentence(error)})"
        ) from error
    return network.eval(), tokenizer, weights
