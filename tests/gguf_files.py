"""Tiny models, and GGUF files of them, written as llama.cpp writes them."""

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

SPECIAL = ["<|start|>", "<|end|>", "<|turn|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *BYTES, "th", "Ġth"]
"""A merge of two bytes, and one with a blank in front."""
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁th", "th", *"▁the"]
"""Of a tokenizer of LLaMA 2's kind, the likeliest first."""
TEMPLATE = "{% for message in messages %}<|turn|>{{ message['content'] }}<|end|>{% endfor %}"
NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}


def tiny_network(kind="llama", tied=False, **more):
    """A network of two layers whose weights are random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        **{
            "vocab_size": len(TOKENS),
            "initializer_range": 0.3,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        | more,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        network = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, weight in network.named_parameters():
            if name.endswith((".bias", "norm.weight")):  # new ones are all 0, or all 1
                weight.data.normal_(0.5, 0.2)
    return network


def tensors_of(network):
    """The tensors of a network by their names in a GGUF file, as numpy arrays.

    llama.cpp turns the halves of a rotary head into pairs in models of Llama's kind.
    """
    config, tensors = network.config, {}
    for name, weight in network.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.float().numpy()
        for heads, part in (
            (config.num_attention_heads, "q_proj"),
            (config.num_key_value_heads, "k_proj"),
        ):
            if part in name and config.model_type == "llama":
                halves = array.reshape(heads, 2, -1, *array.shape[1:])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = np.ascontiguousarray(array)
    return tensors


def write_gguf(
    file,
    network,
    types=None,
    tensors=None,
    fields=None,
    architecture=None,
    tokenizer=True,
    add_bos=False,
    pre="qwen2",
    licence="apache-2.0",
    file_type=gguf.LlamaFileType.ALL_F32,
):
    """A GGUF file of a network.

    Args:
        types: Types of tensors by the last parts of their names; float32 by default.
        tensors: Tensors to add or replace; None leaves one out.
        fields: Texts and numbers to add.
        tokenizer: Byte-level as GPT-2's and Qwen's, "sentencepiece" as that of LLaMA 2, or None.
    """
    config = network.config
    writer = gguf.GGUFWriter(str(file), architecture or config.model_type)
    writer.add_name("Tiny of the tests")
    if licence:
        writer.add_license(licence)
    writer.add_file_type(file_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if tokenizer == "sentencepiece":
        writer.add_tokenizer_model("llama")
        writer.add_token_list(PIECES)
        writer.add_token_scores([-float(i) for i in range(len(PIECES))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
    elif tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
        writer.add_token_merges(["t h", "Ġ th"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)
        writer.add_chat_template(TEMPLATE)
    for key, value in (fields or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, array in (tensors_of(network) | (tensors or {})).items():
        if array is None:
            continue
        kind = next(
            (t for end, t in (types or {}).items() if f".{name}".endswith(f".{end}")), "F32"
        )
        if kind == "F32":
            writer.add_tensor(name, array)
        else:
            quantised = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(array, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def rounded(weight, kind):
    """A weight after it was stored in a type."""
    quantised = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), quantised), quantised))
