"""Words that a text does not say: a token that would say one has weight 0 in the draw.

A word is a run of letters, marks, digits and "_" (`tasks.segmentation`), whole and in any letter
case, as the scorer `echo` counts. Tokens are read as text behind what is there, so " positive" is
banned, and "ive" where the text ends with " posit". A word is banned at the token that would finish
it. So a longer word that begins with a banned one ("positively") is left out too where its first
token is the banned word. A draw's random number stays the same, so a text changes only from the
first token on that a ban affects. `echo` counts only words that no other attribute has; here all
words of a prefix are banned.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp.bias.tokens import BEFORE, REPLACEMENT_CHARACTER
from lapa2_interp.errors import TaskError
from lapa2_interp.tasks.segmentation import (
    has_unspaced_script,
    last_word,
    normalize_text,
    word_continuation,
)
from lapa2_interp.tasks.segmentation import words as words_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@functools.lru_cache(maxsize=4)
def vocabulary_texts(
    tokenizer: PreTrainedTokenizerBase, without_marks: bool = False
) -> tuple[str, ...]:
    """Every token by id as it reads behind a text, its leading space included: some tokenizers drop
    the space of what they decode alone.

    Args:
        without_marks: Special tokens have no text, as in the answers of a chat.
    """
    front_ids = tokenizer(BEFORE, add_special_tokens=False).input_ids
    pairs = [[*front_ids, token] for token in range(len(tokenizer))]
    head, *pair_texts = tokenizer.batch_decode(
        [front_ids, *pairs], clean_up_tokenization_spaces=False
    )
    marks = set(tokenizer.all_special_ids) if without_marks else set()
    return tuple(
        "" if token in marks else text[len(head) :] for token, text in enumerate(pair_texts)
    )


class BannedWords:
    """Keeps the samples of a batch from saying words.

    Args:
        tokenizer: The model's.
        words: What is not said, in small letters.
        texts: What each sample's text goes on from; "" if it begins there, as an answer of a chat.
        without_marks: As of `vocabulary_texts`.

    Raises:
        TaskError: A word of a script without spaces, or of letters of several tokens each.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        words: Sequence[str],
        texts: Sequence[str],
        without_marks: bool = False,
    ) -> None:
        self.spelled = vocabulary_texts(tokenizer, without_marks)
        for word in words:
            spelling = tokenizer(f" {word} {word.upper()}", add_special_tokens=False).input_ids
            if has_unspaced_script(word) or any(
                REPLACEMENT_CHARACTER in self._text(token) for token in spelling
            ):
                raise TaskError(
                    f"the word {word!r} cannot be banned: it has no spaces around it in its script,"
                    " or letters that this tokenizer spells in several tokens; set"
                    ' ban_words = "none", and see the scorer echo'
                )
        # A letter may come before its mark, in a token of its own.
        self.words = tuple(dict.fromkeys(form for word in words for form in _forms(word)))
        self.ends = [last_word(normalize_text(text).lower()) for text in texts]
        self.inside, self.beginning = _tokens_with(self.spelled, self.words)
        self._known: dict[str, Int[Tensor, " token"]] = {}

    def tokens(self, before: str) -> Int[Tensor, " token"]:
        """Ids of the tokens that would say a word behind a text.

        Args:
            before: The unfinished word that the text ends with, in small letters; "" if none.
        """
        if before not in self._known:
            forms = [(word, form) for word in self.words for form in _forms(before)]
            rests = {word[len(form) :] for word, form in forms if word.startswith(form)}
            beginning_tokens = [token for rest in rests for token in self.beginning.get(rest, ())]
            self._known[before] = torch.tensor([*self.inside, *beginning_tokens], dtype=torch.long)
        return self._known[before]

    def mask(self, log_weights: Float[Tensor, "sample vocab"]) -> Float[Tensor, "sample vocab"]:
        """Tokens that would complete a banned word get the log-weight -inf."""
        tokens = [self.tokens(unfinished) for unfinished in self.ends]
        sample = torch.arange(len(tokens)).repeat_interleave(torch.tensor(list(map(len, tokens))))
        where = (sample.to(log_weights.device), torch.cat(tokens).to(log_weights.device))
        return log_weights.index_put(where, log_weights.new_tensor(-torch.inf))

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on behind the token that each sample has drawn."""
        self.ends = [
            last_word(normalize_text(unfinished + self._text(token)).lower())
            for unfinished, token in zip(self.ends, tokens, strict=True)
        ]

    def _text(self, token: int) -> str:
        """The text of a token; of an id that pads the vocabulary, none."""
        return self.spelled[token] if token < len(self.spelled) else ""


def _forms(word: str) -> tuple[str, str]:
    """A word with its marks in its letters, and behind them."""
    return unicodedata.normalize("NFC", word), unicodedata.normalize("NFD", word)


@functools.lru_cache(maxsize=16)
def _tokens_with(
    spelled: tuple[str, ...], words: tuple[str, ...]
) -> tuple[tuple[int, ...], Mapping[str, tuple[int, ...]]]:
    """Tokens that say a word behind any text, as " positive" does; and, by what they begin with,
    those that begin with a word or the end of one."""
    endings_of_words = {word[i:] for word in words for i in range(len(word))}
    inside: list[int] = []
    beginnings: dict[str, tuple[int, ...]] = {}
    for token, text in enumerate(spelled):
        read = normalize_text(text).lower()
        first = word_continuation(read)
        if set(words_of(read[len(first) :])) & set(words):
            inside.append(token)
        elif first in endings_of_words:
            beginnings[first] = (*beginnings.get(first, ()), token)
    return tuple(inside), beginnings
