"""Tiny random models for tests and first trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


TINY = ("tiny-gpt2", "tiny-llama", "tiny-neox")


def tiny_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """One token per byte. The Llama one prepends BOS itself, as LLaMA's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>"] if name == "tiny-llama" else ["<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: i for i, token in enumerate(specials + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    if name == "tiny-llama":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=specials[0],
        eos_token=specials[-1],
        pad_token=specials[-1],
        name_or_path=name,
    )


def tiny_config(name: str, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Four layers of four heads, 256 positions; weights large enough that attention is far from
    uniform."""
    from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig

    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if name == "tiny-gpt2":
        return GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=256, **shared)
    shared |= {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    if name == "tiny-llama":
        return LlamaConfig(num_key_value_heads=2, **shared)
    return GPTNeoXConfig(**shared)
