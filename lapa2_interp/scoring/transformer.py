"""Scorers that run a transformers model: perplexity under a causal model, and any sequence
classifier."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lapa2_interp._util.errors import ModelError, ScoringError, unknown_choice
from lapa2_interp._util.files import sha256_of
from lapa2_interp.bias.layout import text_markers
from lapa2_interp.models.card import context_length, short_context
from lapa2_interp.models.load import (
    REMOTE_CODE,
    check_hub,
    first_sentence,
    load_transformers,
    move_to_device,
    needs_remote_code,
    provenance,
)
from lapa2_interp.models.prepacked import prepacked
from lapa2_interp.models.rotary import refuse_mixed_rotary
from lapa2_interp.models.smollm2 import SMOLLM2, quiet_transformers
from lapa2_interp.models.weights import check_weights, files_unchanged, load_network
from lapa2_interp.prefixes.likelihood import TextRows, text_nll
from lapa2_interp.scoring.adapter import TOKENS_AT_ONCE, batch_by_tokens, group_by_beginning
from lapa2_interp.scoring.scorer import (
    Score,
    Scorer,
    SkippedText,
    TextItem,
    score_readable,
    unreadable_reason,
)
from lapa2_interp.tasks.segmentation import COUNT_UNIT, has_unspaced_script, word_spans

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MIN_WORDS = 10
MAX_TOKENS = 1024
VERSIONED_ENDINGS = (".json", ".txt", ".model", ".py")
"""Endings of the files of a model, besides its weights, that are part of its version."""


class Perplexity(Scorer):
    """exp of a text's mean -ln p per token, the first token conditioned on BOS (section 5.1,
    Fluency; eval_perplexity.py).

    The number in the paper's table is the arithmetic mean over texts. As in the paper, texts under
    10 words (split at spaces) are skipped; so are texts that begin with BOS. In scripts without
    spaces a grapheme counts as a word. The model is causal, so texts of which one begins with the
    other need one forward pass.

    Args:
        model: A name of `lapa2 models`, a hub id or a folder. The paper: gpt2-large, and
            LLaMA-2-13B for the large models.
        generator: The weights that generated the texts, if known; if they are this model's, the
            version says "self".
        min_words: Texts with fewer words are skipped.
        max_tokens: A longer text is scored up to here; by default the model's context, 1,024 at
            most.
        doubled_bos: BOS twice, and P(BOS | BOS) in the mean, as in the released LLaMA script.
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
        n_ctx = context_length(self.network.config)
        self.max_tokens = min(n_ctx - 2, max_tokens or MAX_TOKENS)
        own = " self" if generator == weights else ""
        bos = ", BOS twice" if doubled_bos else ""
        self.version = (
            f"{model} {dtype}{own}, {weights}, at most {self.max_tokens} tokens, {min_words}+"
            f" {COUNT_UNIT}{bos}{_other_files_version(model)}"
        )

    def close(self) -> None:
        self.__dict__.pop("network", None)  # frees memory for the next scorer

    def score(self, items: Sequence[TextItem]) -> list[Score]:
        found = {
            place: score for piece in self.scores_in_pieces(items) for place, score in piece.items()
        }
        return [found[place] for place in range(len(items))]

    def scores_in_pieces(self, items: Sequence[TextItem]) -> Iterator[dict[int, Score]]:
        bos = text_markers(self.tokenizer).start
        # Tokenise; leave out texts that cannot be scored.
        left_out: dict[int, Score] = {}
        texts: dict[int, list[int]] = {}
        first: dict[int, int] = {}  # the first token that counts
        for place, item in enumerate(items):
            if why := unreadable_reason(item.text):
                left_out[place] = SkippedText(why)
                continue
            ids, first[place] = self._read(item)
            ids = ids[: self.max_tokens]
            if len(ids) <= first[place] > 0:
                left_out[place] = SkippedText("nothing after the prompt")
                continue
            if not ids or _n_words(item.text) < self.min_words:
                left_out[place] = SkippedText(f"under {self.min_words} words")
                continue
            if ids[0] == bos:  # a second one, whose P(BOS | BOS) would be part of the mean
                left_out[place] = SkippedText(
                    f"begins with {self.tokenizer.convert_ids_to_tokens(bos)}"
                )
                continue
            texts[place] = [bos, *ids] if self.doubled_bos else ids
        yield left_out
        # Score texts with the same beginning in one row.
        places = list(texts)
        groups = [[places[i] for i in group] for group in group_by_beginning(list(texts.values()))]
        groups.sort(key=lambda group: len(texts[group[-1]]))
        for batch in batch_by_tokens([len(texts[group[-1]]) for group in groups], TOKENS_AT_ONCE):
            chosen = [groups[i] for i in batch]
            rows = TextRows.of([texts[group[-1]] for group in chosen], (bos,), self.network.device)
            with torch.no_grad(), prepacked(self.network):
                nll = text_nll(self.network, rows).double().cpu()
            yield {
                place: _perplexity_score(
                    nll[row, first[place] : len(texts[place])].mean().exp().item()
                )
                for row, group in enumerate(chosen)
                for place in group
            }

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

    def _read(self, item: TextItem) -> tuple[list[int], int]:
        whole = item.text if item.text.startswith(item.prompt) else item.prompt + item.text
        ids, of_prompt = self._ids(whole), self._ids(item.prompt)
        pairs = enumerate(zip(ids, of_prompt, strict=False))
        return ids, next((i for i, (one, two) in pairs if one != two), len(of_prompt))


def _n_words(text: str) -> int:
    """Words split at single spaces, as in the released script, and graphemes of scripts without
    spaces."""
    return sum(
        len(word_spans(part)) if has_unspaced_script(part) else 1 for part in text.split(" ")
    )


def _perplexity_score(value: float) -> Score:
    if math.isnan(value):  # float16 overflows; another precision may not
        return SkippedText("no number", final=False)
    if math.isinf(value):
        return SkippedText("probability 0")
    return (value,)


class Classifier(Scorer):
    """Any sequence classifier of transformers; its numbers are the probabilities of its labels.

    Args:
        model: A hub id or a folder.
        labels: New names of its labels, such as {"LABEL_1": "positive"}; by default its own names
            in lower case. The probabilities of labels with the same name are added.
        column: Keep only this label's probability, as `name` (for toxicity).
        name: accuracy or toxicity.
    """

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
        own = [str(self.network.config.id2label[i]) for i in range(self.network.config.num_labels)]
        if wrong := [label for label in labels or {} if label not in own]:
            raise ScoringError(f"{model}: {unknown_choice('label', wrong[0], own)}")
        names = [(labels or {}).get(label, label.lower()) for label in own]
        self.labels = tuple(dict.fromkeys(names))
        if column is not None and column not in self.labels:
            raise ScoringError(f"{model}: {unknown_choice('label', column, self.labels)}")
        self.column = column
        self.columns = self.labels if column is None else (name,)
        self.classifies = column is None
        # Multi-label heads (of toxicity models) give the labels independent probabilities.
        self.multi_label = (
            self.network.config.problem_type == "multi_label_classification" or len(own) == 1
        )
        if self.multi_label and len(self.labels) < len(names):
            raise ScoringError(
                f"{model}: its labels do not exclude each other, so their probabilities cannot be"
                f" added; give each another name, found {', '.join(names)}"
            )
        self.parts = torch.tensor([[name == label for label in self.labels] for name in names])
        kept = "" if column is None else f", {column} alone"
        self.version = (
            f"{model}, {weights}, {'each of' if self.multi_label else 'one of'} the labels"
            f" {', '.join(f'{a}: {b}' for a, b in zip(own, names, strict=True))}{kept}"
            f"{_other_files_version(model)}"
        )

    def close(self) -> None:
        self.__dict__.pop("network", None)

    def score(self, items: Sequence[TextItem]) -> list[Score]:
        return score_readable(items, self._probabilities)

    @torch.no_grad()
    def _probabilities(self, texts: list[str]) -> list[list[float]]:
        """The numbers of each text."""
        config = self.network.config
        limit = min(512, context_length(config) - 2, short_context(config) or 512)
        batch = self.tokenizer(
            texts, truncation=True, max_length=limit, padding=True, return_tensors="pt"
        ).to(self.network.device)
        with prepacked(self.network):
            logits = self.network(**batch).logits.double()
        probabilities = logits.sigmoid() if self.multi_label else logits.softmax(1)
        probabilities = probabilities @ self.parts.to(probabilities)
        if self.column is not None:
            probabilities = probabilities[:, [self.labels.index(self.column)]]
        return probabilities.tolist()


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
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except ModelError as error:
        raise ScoringError(f"cannot load the classifier: {error}") from error
    except Exception as error:  # many libraries raise here
        if needs_remote_code(error):
            raise ScoringError(f"the classifier {model!r} {REMOTE_CODE}") from error
        raise ScoringError(
            f"cannot load the classifier {model!r}; give a hub id or a folder with safetensors"
            f" ({first_sentence(error)})"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        network.config.pad_token_id = tokenizer.pad_token_id
    refuse_mixed_rotary(network)
    return network.eval(), tokenizer, weights
