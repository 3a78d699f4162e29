"""Texts of tokens: the continuation of a prompt, and the part of it that each token makes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby, pairwise, takewhile
from typing import TYPE_CHECKING, Any

from lapa2_interp.errors import LayoutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
BEFORE = "a"
"""A text in front of tokens, whose leading space is then decoded, too."""


def require_tokenizer(owner: Any) -> Any:
    """A tokenizer, or that of a model or processor that has one.

    Raises:
        LayoutError: The value is neither, or a tokenizer that draws how a text is cut.
    """
    tokenizer = getattr(owner, "tokenizer", owner)
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        near = f"load_tokenizer({owner!r})" if isinstance(owner, str) else "model.tokenizer"
        raise LayoutError(
            f"a tokenizer is needed here, found a {type(owner).__name__}; give {near}"
        )
    if dropout := getattr(_cutting_model(tokenizer), "dropout", None):
        raise LayoutError(
            f"the tokenizer drops merges by chance (dropout {dropout:g}), so it cuts a text"
            " otherwise each time; set tokenizer.backend_tokenizer.model.dropout = None"
        )
    return tokenizer


def without_dropout(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer just loaded, which from now on cuts a text the same way each time. Some are saved
    with the dropout of merges (BPE dropout) of their training."""
    if getattr(model := _cutting_model(tokenizer), "dropout", None):
        model.dropout = None
    return tokenizer


def _cutting_model(tokenizer: Any) -> Any:
    """The part of a tokenizer of the library tokenizers that cuts words; None if there is none."""
    return getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)


def _decode_ids(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@functools.lru_cache(maxsize=16)
def _byte_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """The byte of every byte token such as "<0xF0>", by id. Empty for vocabularies without such
    tokens, and for those in which all tokens are bytes, as GPT-2's."""
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    known = len({*ids} - {None, tokenizer.unk_token_id}) == 256
    read = known and _decode_ids(tokenizer, [ids[ord("A")]]) == "A"
    return dict(zip(ids, range(256), strict=True)) if read else {}


def decode_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens included.

    Bytes that are no character become U+FFFD: one for each incomplete character and for each byte
    that cannot begin a character, as in Python.
    """
    if byte_of := _byte_tokens(tokenizer):
        # The decoder would also replace the neighbours of an invalid byte, so it gets none.
        token_of, mended = {byte: token for token, byte in byte_of.items()}, []
        for are_bytes, run in groupby(ids, byte_of.__contains__):
            letters = list(run)
            if are_bytes:
                text = bytes(byte_of[letter] for letter in letters).decode("utf-8", "replace")
                letters = [token_of[byte] for byte in text.encode()]
            mended += letters
        ids = mended
    return _decode_ids(tokenizer, ids)


def token_places(offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where the letters of each token begin and stop in its text, of a tokenizer's offsets. Some
    tokenizers trim these, so that leading white space lies between two tokens; it belongs to the
    one that follows."""
    stops = [0, *(stop for _, stop in offsets)]
    return [
        (min(begin, before), stop) for (begin, stop), before in zip(offsets, stops, strict=False)
    ]


def tokens_from(tokenizer: PreTrainedTokenizerBase, text: str, start: int) -> tuple[list[int], str]:
    """The tokens of a text from one of its letters on, as they are in the whole text: a tokenizer
    may cut the rest of a text otherwise where it stands alone.

    Returns:
        The tokens, and the letters before `start` that the first of them has, too; mostly "".
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = token_places(encoded["offset_mapping"])
    first = sum(begin < start for begin, _ in places)
    if first and places[first - 1][1] > start:
        first -= 1
    shared = text[places[first][0] : start] if first < len(places) else ""
    return encoded["input_ids"][first:], shared


def decode_continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: Sequence[int]
) -> str:
    """The text of generated tokens after a prompt.

    The tokens are decoded together with the prompt: some tokenizers drop the leading space of
    tokens that are decoded alone.
    """
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return decode_tokens(tokenizer, [*before, *tokens])[len(decode_tokens(tokenizer, before)) :]


def decode_answer(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of an answer of a chat, without special tokens. It continues no text, so it does not
    depend on the user's."""
    marks = set(tokenizer.all_special_ids)
    said = [token for token in tokens if token not in marks]
    return decode_continuation(tokenizer, BEFORE, said)


def token_texts(
    tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: Sequence[int]
) -> list[str]:
    """The text that each token adds; joined, they are the `decode_continuation` of the tokens.

    A character whose bytes are spread over several tokens belongs to the last of them; the others
    add "".

    Args:
        prompt: The text before the tokens.
        tokens: New tokens only.

    Returns:
        One text for each token.
    """
    tokenizer = require_tokenizer(tokenizer)
    joined = decode_continuation(tokenizer, prompt, tokens)
    # Decode a few tokens at a time. Windows begin at a border between characters, so that this
    # gives the same text as decoding all tokens.
    window = list(tokenizer(prompt, add_special_tokens=False)["input_ids"][-4:])
    known, head, border, borders = len(window), len(decode_tokens(tokenizer, window)), 0, [0]
    for token in tokens:
        window.append(token)
        text = decode_tokens(tokenizer, window)[head:]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, joined[border:], strict=False))
        sure = len(list(same))
        borders.append(max(borders[-1], border + sure))
        if text and sure == len(text) and not text.endswith(REPLACEMENT_CHARACTER):
            window, known, border = window[known:], len(window) - known, border + sure
            head = len(decode_tokens(tokenizer, window))
    borders[-1] = len(joined)
    return [joined[start:stop] for start, stop in pairwise(borders)]
