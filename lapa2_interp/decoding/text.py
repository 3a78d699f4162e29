"""The text of generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: Sequence[int]) -> str:
    """The text of generated tokens behind a prompt.

    They are decoded with the prompt in front: some tokenizers drop the leading space of what they
    decode alone.
    """
    before = tokenizer(prompt, add_special_tokens=False).input_ids
    head = tokenizer.decode(before, clean_up_tokenization_spaces=False)
    whole = tokenizer.decode([*before, *tokens], clean_up_tokenization_spaces=False)
    return whole[len(head) :]
