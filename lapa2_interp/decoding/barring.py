"""Words that a text does not say: a token that would say one has weight 0 in the draw.

A word is a run of letters, digits and "_" (`tasks.WORD`), whole and in any letter case, as the
scorer `echo` counts. Tokens are read as text behind what is there, so " positive" is barred, and
"ive" where the text ends with " posit". A word is barred at the token that would finish it. So a
longer word that begins with it ("positively") is left out too where its first token is the word.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp.tasks import WORD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGINNING, END = re.compile(r"\w*"), re.compile(r"\w*\Z")
"""The part of a word that a text begins or ends with; empty where it does not."""


@functools.lru_cache(maxsize=4)
def token_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Every token by id as it reads behind a text, its leading space included: some tokenizers drop
    the space of what they decode alone."""
    before = tokenizer("a", add_special_tokens=False).input_ids
    pairs = [[*before, token] for token in range(len(tokenizer))]
    head, *whole = tokenizer.batch_decode([before, *pairs], clean_up_tokenization_spaces=False)
    return tuple(text[len(head) :] for text in whole)


class Barred:
    """Keeps the samples of a batch from saying words.

    Args:
        tokenizer: The model's.
        words: What is not said, in small letters.
        texts: What each sample has before its first token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, words: Sequence[str], texts: Sequence[str]
    ) -> None:
        self.words, self.spelled = tuple(words), token_texts(tokenizer)
        self.ends = [END.findall(text.lower())[0] for text in texts]
        self.inside, self.beginning = _tokens_with(self.spelled, self.words)
        self._known: dict[str, Int[Tensor, " token"]] = {}

    def tokens(self, end: str) -> Int[Tensor, " token"]:
        """Ids of the tokens that would say a word behind a text.

        Args:
            end: The unfinished word that the text ends with, in small letters; "" if none.
        """
        if end not in self._known:
            rests = [word[len(end) :] for word in self.words if word.startswith(end)]
            found = [token for rest in rests for token in self.beginning.get(rest, ())]
            self._known[end] = torch.tensor([*self.inside, *found], dtype=torch.long)
        return self._known[end]

    def refuse(self, log_weights: Float[Tensor, "sample vocab"]) -> Float[Tensor, "sample vocab"]:
        """The weights of the next token without those that would say a word: log-weight -inf."""
        tokens = [self.tokens(end) for end in self.ends]
        sample = torch.arange(len(tokens)).repeat_interleave(torch.tensor(list(map(len, tokens))))
        where = (sample.to(log_weights.device), torch.cat(tokens).to(log_weights.device))
        return log_weights.index_put(where, log_weights.new_tensor(-torch.inf))

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on behind the token that each sample has drawn."""
        self.ends = [
            END.findall(end + self._text(token).lower())[0]
            for end, token in zip(self.ends, tokens, strict=True)
        ]

    def _text(self, token: int) -> str:
        """The text of a token; of an id that pads the vocabulary, none."""
        return self.spelled[token] if token < len(self.spelled) else ""


@functools.lru_cache(maxsize=16)
def _tokens_with(
    spelled: tuple[str, ...], words: tuple[str, ...]
) -> tuple[tuple[int, ...], Mapping[str, tuple[int, ...]]]:
    """Tokens that say a word behind any text, as " positive" does; and, by what they begin with,
    those that begin with a word or the end of one."""
    wanted = {word[i:] for word in words for i in range(len(word))}
    inside: list[int] = []
    beginning: dict[str, tuple[int, ...]] = {}
    for token, text in enumerate(spelled):
        first = BEGINNING.findall(text.lower())[0]
        if set(WORD.findall(text.lower()[len(first) :])) & set(words):
            inside.append(token)
        elif first in wanted:
            beginning[first] = (*beginning.get(first, ()), token)
    return tuple(inside), beginning
