"""The texts of tokens: what generated tokens read behind a prompt, whole and token by token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby, pairwise, takewhile
from typing import TYPE_CHECKING, Any

from lapa2_interp._util.errors import LayoutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST = 2**22
"""Letters of a text, at most: a tokenizer takes a hundred times their memory, and no error of ours
comes from where that ends."""


def check_long(name: str, text: str) -> None:
    """Refuse a text that no model reads, before it is tokenised.

    Raises:
        LayoutError: It has more than LONGEST letters.
    """
    if len(text) > LONGEST:
        raise LayoutError(
            f"the {name} {text[:20]!r}... has {len(text)} letters, and {LONGEST} are allowed; give"
            " a shorter text, or a file with one on each line"
        )


def tokenizer_of(given: Any) -> Any:
    """A tokenizer, or that of a model or processor that has one.

    Raises:
        LayoutError: It is neither.
    """
    found = getattr(given, "tokenizer", given)
    if not hasattr(found, "convert_tokens_to_ids"):
        near = f"load_tokenizer({given!r})" if isinstance(given, str) else "model.tokenizer"
        raise LayoutError(
            f"a tokenizer is needed here, found a {type(given).__name__}; give {near}"
        )
    return found


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@functools.lru_cache(maxsize=16)
def _byte_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """The byte of every token that stands for one beside tokens of text ("<0xF0>"), by id; none
    where tokens are bytes throughout, as GPT-2's, or never."""
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    known = len({*ids} - {None, tokenizer.unk_token_id}) == 256
    read = known and _decoded(tokenizer, [ids[ord("A")]]) == "A"
    return dict(zip(ids, range(256), strict=True)) if read else {}


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens included. Bytes that are no character read U+FFFD, one
    for each beginning of a character and each byte that cannot begin one, as in Python."""
    if byte_of := _byte_tokens(tokenizer):
        # One byte too many makes the decoder replace its neighbours, too: leave it none.
        token_of, mended = {byte: token for token, byte in byte_of.items()}, []
        for are_bytes, run in groupby(ids, byte_of.__contains__):
            found = list(run)
            if are_bytes:
                text = bytes(byte_of[each] for each in found).decode("utf-8", "replace")
                found = [token_of[byte] for byte in text.encode()]
            mended += found
        ids = mended
    return _decoded(tokenizer, ids)


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: Sequence[int]) -> str:
    """The text of generated tokens behind a prompt.

    They are decoded with the prompt in front: some tokenizers drop the leading space of what they
    decode alone.
    """
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return decode(tokenizer, [*before, *tokens])[len(decode(tokenizer, before)) :]


def pieces(tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: Sequence[int]) -> list[str]:
    """The text each token adds; joined, they are the tokens' `continuation`.

    A character whose bytes are spread over several tokens belongs to the last of them; those before
    it add "".

    Args:
        prompt: What the tokens continue.
        tokens: New tokens only.

    Returns:
        As many as tokens.
    """
    tokenizer = tokenizer_of(tokenizer)
    whole = continuation(tokenizer, prompt, tokens)
    # Decoding a few tokens at a time, from a border between characters on, gives what decoding all
    # of them would.
    window = list(tokenizer(prompt, add_special_tokens=False)["input_ids"][-4:])
    known, head, border, found = len(window), len(decode(tokenizer, window)), 0, [0]
    for token in tokens:
        window.append(token)
        text = decode(tokenizer, window)[head:]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, whole[border:], strict=False))
        sure = len(list(same))
        found.append(max(found[-1], border + sure))
        if text and sure == len(text) and not text.endswith(REPLACEMENT):
            window, known, border = window[known:], len(window) - known, border + sure
            head = len(decode(tokenizer, window))
    found[-1] = len(whole)
    return [whole[start:stop] for start, stop in pairwise(found)]
