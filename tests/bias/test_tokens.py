"""Texts of tokens, whatever their bytes are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import GPT2Config, PreTrainedTokenizerFast

from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.tokens import decode_continuation, token_texts
from lapa2_interp.errors import LayoutError
from lapa2_interp.models.load import load_tokenizer, shared_tokenizer

PROMPTS = ("I", "I 🙂", "né", "中文", "", " ", "a\n\n")
EMOJI = [0xF0, 0x9F, 0x99, 0x82]


def byte_fallback():
    """As LLaMA's: words of text, and bytes for what has none."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", "<s>", "</s>", *bytes_, "▁", *"abcI", "▁a", "▁I", "ab", "▁ab", "é"]
    model = models.BPE(
        vocab={word: i for i, word in enumerate(words)},
        merges=[("▁", "a"), ("▁", "I"), ("a", "b"), ("▁a", "b")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


TOKENIZERS = {
    "byte fallback": byte_fallback(),
    **{name: shared_tokenizer(name) for name in ("tiny-gpt2", "tiny-llama", "smollm2-135m")},
}


def bytes_of(tokenizer, ids):
    """Ids of single bytes."""
    names = [f"<0x{byte:02X}>" for byte in ids]
    if tokenizer.convert_tokens_to_ids(names[0]) in (None, tokenizer.unk_token_id):
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        names = [chr(value if value in printable else 256 + others.index(value)) for value in ids]
    return tokenizer.convert_tokens_to_ids(names)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("given_", "read"),
    [
        ([*EMOJI, 0xF0, 0x61], ["", "", "", "🙂", "\ufffd", "a"]),
        ([*EMOJI, 0xF0], ["", "", "", "🙂", "\ufffd"]),
        ([0xF0, 0x9F, 0x61], ["\ufffd", "", "a"]),
        ([0xF0, *EMOJI, 0x9F, 0x61], ["\ufffd", "", "", "", "🙂", "\ufffd", "a"]),
        ([0x99, 0x82, 0xE4, 0xBD, 0xA0], ["\ufffd", "\ufffd", "", "", "你"]),
        (
            [0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x99, 0xE5, 0xA5, 0xBD],
            ["", "", "你", "\ufffd", "", "", "", "", "好"],
        ),
    ],
)
def test_bytes_that_are_no_character_leave_their_neighbours_alone(name, given_, read):
    tokenizer = TOKENIZERS[name]
    tokens = bytes_of(tokenizer, given_)
    for prompt in ("I", "I 🙂"):
        assert decode_continuation(tokenizer, prompt, tokens) == "".join(read)
        assert token_texts(tokenizer, prompt, tokens) == read


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_continuation(name, data):
    tokenizer = TOKENIZERS[name]
    token = st.integers(0, len(tokenizer) - 1)
    byte = st.integers(0, 255).map(lambda number: bytes_of(tokenizer, [number])[0])
    tail = st.integers(0x80, 0xBF).map(lambda number: bytes_of(tokenizer, [number])[0])
    tokens = data.draw(st.lists(st.one_of(token, byte, tail), max_size=20))
    prompt = data.draw(st.sampled_from(PROMPTS))
    pieces = token_texts(tokenizer, prompt, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == decode_continuation(tokenizer, prompt, tokens)


def test_a_tokenizer_that_cuts_by_chance_is_refused_and_loaded_without_it(tmp_path):
    """BPE dropout, which some tokenizer.json keep from training."""
    tokenizer = byte_fallback()
    tokenizer.backend_tokenizer.model.dropout = 0.5
    tokenizer.save_pretrained(tmp_path)
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(LayoutError, match=r"by chance \(dropout 0.5\), .*model.dropout = None"):
        Layout.of(tokenizer, "a", " ab")
    loaded = load_tokenizer(tmp_path)
    assert len({tuple(loaded("ab ab ab ab").input_ids) for _ in range(20)}) == 1
    assert Layout.of(loaded, "a", " ab") == Layout.of(byte_fallback(), "a", " ab")
