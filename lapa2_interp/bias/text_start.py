"""What plain text starts with: a token, or nothing.

Families differ: GPT-2, LLaMA and Gemma read a token in front of a text, Qwen2 reads none. Nothing
in a tokenizer's files tells the two kinds apart. A Qwen2 tokenizer names a BOS token and adds none,
and of two models of its family one is spoilt by that token and the other is not. So the fact has an
order of sources, is printed with its source, and can be set; `lapa2 probe MODEL` measures it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lapa2_interp.bias.tokens import require_tokenizer
from lapa2_interp.commands import command
from lapa2_interp.errors import LayoutError, parameter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUTO_START, NO_START, USUAL_START = "auto", "none", "usual"
"""Settings of `start` that are no token: decided by `text_start`; nothing; the token that the
tokenizer names for it (`usual_start`)."""
CHAT_MARKERS = ("<|im_start|>",)
"""Configured "bos" tokens that open a chat turn; plain text does not start with them."""
PLAIN_TEXT_START = "<|endoftext|>"

MODELS_WITHOUT_START = (
    "bloom", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "granite", "granitemoe", "granitemoehybrid", "llada",
    "minimax_m2", "mpt", "phi", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_audio", "qwen2_moe",
    "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "recurrent_gemma", "seed_oss", "smollm3",
    "starcoder2",
)  # fmt: skip
"""Model types whose texts start with nothing unless their tokenizer adds a token: those for which
TransformerLens' adapters have `default_prepend_bos = False`, but for GPT-NeoX."""
MODELS_WITH_START = (
    "cohere", "cohere2", "gemma", "gpt2", "gpt_neo", "gpt_neox", "jamba", "opt",
)  # fmt: skip
"""Model types whose texts start with the usual token: those for which TransformerLens' adapters say
so, and GPT-NeoX. For GPT-NeoX we differ from TransformerLens on purpose: heads put the attention
that they have left over on the first token, and that should not be a token of the prefix."""
TOKENIZERS_WITHOUT_START = ("CodeGen", "Qwen2")
TOKENIZERS_WITH_START = ("GPT2", "GPTNeoX")
"""Beginnings of the names of tokenizers' classes, for tokenizers whose model is not known."""
NEVER_PREPENDED = ("GPT2", "GPTNeoX", "Qwen2")
"""Tokenizer classes that do not prepend `PLAIN_TEXT_START` by themselves: where they do,
TransformerLens has switched it on. OPT's tokenizer is of GPT-2's class, but prepends another BOS.
"""


class TextStart(NamedTuple):
    """What plain text starts with: a token's id, or None for nothing, and who says so."""

    token: int | None
    source: str
    is_guess: bool = False


class TextMarkers(NamedTuple):
    """The token that starts plain text, or None, and the tokens that end it."""

    start: int | None
    ends: tuple[int, ...]


def text_start(owner: Any, start: str | None = AUTO_START, model_type: str = "") -> TextStart:
    """What plain text starts with, for a tokenizer or a model that has one.

    A setting decides; else the `cfg.default_prepend_bos` of a TransformerLens model; else a token
    that the tokenizer itself adds; else a table by model type and tokenizer class; else it is the
    tokenizer's usual token, which is a guess.

    Example:
        >>> from lapa2_interp import load_model
        >>> from lapa2_interp.bias.text_start import text_start
        >>> text_start(load_model("tiny-llama"))
        TextStart(token=0, source='its tokenizer adds it', is_guess=False)

    Args:
        owner: A tokenizer, or a model that has one.
        start: A setting, as `Layout.of` takes it.
        model_type: As in transformers' configurations, where it is known.

    Raises:
        LayoutError: The value is no tokenizer; the token is not in its vocabulary; or text starts
            with the usual token, and the tokenizer has neither BOS nor EOS.
    """
    tokenizer = require_tokenizer(owner)
    if start != AUTO_START:
        token = None
        if start not in (None, NO_START):
            usual = start == USUAL_START
            token = named_start(tokenizer) if usual else _start_by_name(tokenizer, str(start))
        if usual_start(tokenizer) is not None:
            decided = text_start(owner, AUTO_START, model_type)
            if decided.token == token and not decided.is_guess:
                return decided
        return TextStart(token, "it was set")
    settled: TextStart | None = getattr(tokenizer, "lapa2_start", None)
    prepends = getattr(getattr(owner, "cfg", None), "default_prepend_bos", None)
    if prepends is not None and (settled is None or prepends != (settled.token is not None)):
        token = named_start(tokenizer) if prepends else None
        return TextStart(token, f"the model's cfg.default_prepend_bos is {bool(prepends)}")
    if settled is not None:
        return settled
    if (prepended := prepended_token(tokenizer)) is not None:
        return TextStart(prepended, "its tokenizer adds it")
    name = type(tokenizer).__name__
    if model_type in MODELS_WITHOUT_START:
        return TextStart(None, f"models of type {model_type} read none")
    if model_type in MODELS_WITH_START:
        return TextStart(named_start(tokenizer), f"models of type {model_type} read it")
    if name.startswith(TOKENIZERS_WITHOUT_START):
        return TextStart(None, f"a {name} adds none")
    token = named_start(tokenizer)
    if name.startswith(TOKENIZERS_WITH_START) or tokenizer.bos_token in CHAT_MARKERS:
        return TextStart(token, "models with such a tokenizer read it")
    return TextStart(token, "its tokenizer names it", is_guess=True)


def describe_start(token: str, source: str) -> str:
    """What plain text starts with, and who says so, for a reader; a token of "" is nothing."""
    return f"{token or 'nothing'} ({source})"


def settle_start(owner: Any, start: str | None = AUTO_START, model_type: str = "") -> TextStart:
    """Find out what plain text starts with, and attach it to the tokenizer, where `text_start`
    looks for it. The first time that it is a guess, a warning says so.

    Raises:
        LayoutError: As `text_start`.
    """
    tokenizer = require_tokenizer(owner)
    decided = text_start(owner, start, model_type)
    if decided.is_guess and not hasattr(tokenizer, "lapa2_start"):
        name = tokenizer.name_or_path or type(tokenizer).__name__
        warnings.warn(
            f"nothing says what plain text starts with for {name}: its tokenizer adds no token, and"
            f" its kind of model ({model_type or 'unknown'}) is not in the table, so"
            f" {tokenizer.convert_ids_to_tokens(decided.token)} is put in front;"
            f" `{command('probe', name)}` measures both ways, and"
            f" {parameter('start', NO_START)} or {parameter('start', USUAL_START)} settles it",
            stacklevel=3,
        )
    tokenizer.lapa2_start = decided
    return decided


def start_setting(owner: Any, start: str | None) -> str:
    """The setting of a cell that says what its texts start with: "usual", "none", or a token.

    Raises:
        LayoutError: As `text_start`.
    """
    tokenizer, token = require_tokenizer(owner), text_start(owner, start).token
    if token is None:
        return NO_START
    usual = token == usual_start(tokenizer)
    return USUAL_START if usual else str(tokenizer.convert_ids_to_tokens(token))


def text_markers(owner: Any) -> TextMarkers:
    """The tokens that start and end plain text.

    Ends: EOS, and `<|endoftext|>` where the vocabulary has it. A model's generation config may add
    more (`models.card.ModelCard`).

    Raises:
        LayoutError: As `text_start`.
    """
    tokenizer = require_tokenizer(owner)
    named = (tokenizer.eos_token, PLAIN_TEXT_START)
    ends = {end for end in (_token_id(tokenizer, name) for name in named) if end is not None}
    return TextMarkers(text_start(owner).token, tuple(sorted(ends)))


def usual_start(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that a tokenizer names for the start of plain text: the configured BOS, or
    `<|endoftext|>` where that BOS opens a chat turn (SmolLM2), or EOS where there is none; None if
    it names none of these. A tokenizer of `load_tokenizer` remembers it: its `bos_token` may be
    another start token."""
    if hasattr(tokenizer, "lapa2_usual_start"):
        return tokenizer.lapa2_usual_start
    names = (PLAIN_TEXT_START, tokenizer.bos_token, tokenizer.eos_token)
    plain, bos, eos = (_token_id(tokenizer, name) for name in names)
    if plain is not None and tokenizer.bos_token in (*CHAT_MARKERS, None):
        return plain
    return bos if bos is not None else eos


def named_start(tokenizer: PreTrainedTokenizerBase) -> int:
    """`usual_start`, of a tokenizer that must name one.

    Raises:
        LayoutError: It has neither BOS nor EOS.
    """
    if (start := usual_start(tokenizer)) is None:
        raise LayoutError(
            "the tokenizer has neither a BOS nor an EOS token; set bos_token, in Python or in its"
            " tokenizer_config.json, or give start='none'"
        )
    return start


def prepended_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The only token that a tokenizer itself puts in front of a text; None if it puts none, or
    several."""
    read, text = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    if not text or len(read) <= len(text) or read[1 : 1 + len(text)] != text or read[:1] == text:
        return None
    switched_on = (
        type(tokenizer).__name__.startswith(NEVER_PREPENDED)
        and tokenizer.convert_ids_to_tokens(read[0]) == PLAIN_TEXT_START
    )
    return None if switched_on else int(read[0])


def n_start_tokens(tokenizer: PreTrainedTokenizerBase | None, ids: Sequence[int]) -> int:
    """1 if the first token of a row that was tokenised elsewhere is a special token, which counts
    as BOS, else 0. Without a tokenizer nothing says so, and a first token counts as BOS."""
    if not ids or tokenizer is None:
        return len(ids[:1])
    # `all_special_ids` lacks a chat marker that was BOS until the usual start token took its place.
    added = tokenizer.added_tokens_decoder.get(ids[0])
    return int(ids[0] in tokenizer.all_special_ids or (added is not None and added.special))


def _token_id(tokenizer: PreTrainedTokenizerBase, token: str | None) -> int | None:
    """A token's id. For a token that they lack, tokenizers give the unknown token's."""
    token_id = None if token is None else tokenizer.convert_tokens_to_ids(token)
    unknown = token_id == tokenizer.unk_token_id and token != tokenizer.unk_token
    return None if unknown or not isinstance(token_id, int) else int(token_id)


def _start_by_name(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    if (start := _token_id(tokenizer, name)) is None:
        raise LayoutError(
            f"start {name!r} is no token of this vocabulary; give the text of a token, such as"
            f" {tokenizer.eos_token!r}, or {AUTO_START}, {NO_START}, {USUAL_START}"
        )
    return start
