"""The table of families: tiny random models of every architecture that the package is said to take.

Their weights are large enough that attention is far from uniform, and their windows short enough
that the tests' texts exceed them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from lapa2_interp.models.tiny import tiny_tokenizer

BRIDGE, PLAIN = "TransformerBridge", "TransformersModel"
SIZE = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
IMAGES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
NO_INTERFACE = "computes its attention without transformers' attention interface"
DROPPED = "its layers do not hand on the arguments of transformers' attention interface"
DELEGATED = "its scores hook fires after the softmax"
NO_BRIDGE = "Could not determine supported architecture"
RESTARTS = "its recurrent layers begin anew in a pass of several tokens"
OWN_CACHE = "it takes no cache of transformers"
SEVERAL = "computes several attentions in one layer"
HIDDEN = "the model hides keys by keep_window_size"
SAID = {
    NO_INTERFACE: "attention outside transformers' interface",
    DROPPED: "layers drop the interface's arguments",
    DELEGATED: "the hook fires after the softmax",
    NO_BRIDGE: "transformer-lens does not have it",
    RESTARTS: "recurrent layers forget the cached text",
    OWN_CACHE: "a cache of its own",
    SEVERAL: "several attentions in one layer",
    HIDDEN: "which keys it hides is not known",
}
"""What the page says of a refusal."""
IN_BOTH, IN_NEITHER = "In both classes, by the keys that their layers see", "In neither class"
ORDER = (IN_BOTH, f"Only as `{PLAIN}`", f"Only as `{BRIDGE}`", IN_NEITHER)
"""Headings of the lists of families."""
S, F, L, C = "sliding_attention", "full_attention", "linear_attention", "chunked_attention"
WINDOW = {"sliding_window": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "head_dim": 8, "layer_types": [L, F, L, F], "num_hidden_layers": 4,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
}  # fmt: skip
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA_2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_expand": 2,
}  # fmt: skip
HEAD = {"head_dim": 8}
OLD = {"num_key_value_heads": None, "intermediate_size": None}
GEMMA_3 = {**WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": [S, F, S]}
GEMMA_4 = {
    **WINDOW, "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 257, "num_kv_shared_layers": 2,
    "layer_types": [S, F, S, F],
}  # fmt: skip


class Family(NamedTuple):
    """A family of the table.

    Attributes:
        model_type: As in transformers' configurations.
        settings: Beside `SIZE`; None leaves one of `SIZE` out.
        sees: By layer, which keys its queries see.
        inside: The type of the model that has this one as its text model, beside one for images.
        refused: By class that refuses it, a part of the error.
        atol: How far logits may lie apart in float64. Experts' routers, sinks and recurrent layers
            compute in float32 whatever the dtype.
        long: Less often used, so that it is tested by `make test-long`.
    """

    model_type: str
    settings: Mapping[str, Any] = MappingProxyType({})
    sees: tuple[str, ...] = ("full",) * 3
    inside: str = ""
    refused: Mapping[str, str] = MappingProxyType({})
    atol: float = 1e-9
    long: bool = False


FAMILIES = {
    "Llama": Family("llama"),
    "Qwen2": Family("qwen2"),
    "Qwen3": Family("qwen3", {"head_dim": 8}),
    "Mistral": Family("mistral", WINDOW, ("sliding 16",) * 3),
    "Gemma 2": Family(
        "gemma2",
        {**WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": [S, F, S]},
        ("sliding 16", "full", "sliding 16"),
    ),
    "Gemma 3": Family("gemma3_text", GEMMA_3, ("sliding 16", "full", "sliding 16")),
    "Gemma 3 with images": Family(
        "gemma3_text", GEMMA_3, ("sliding 16", "full", "sliding 16"), inside="gemma3"
    ),
    "Gemma 4": Family(
        "gemma4_text", GEMMA_4, ("sliding 16", "full") * 2, refused={BRIDGE: DELEGATED}
    ),
    "Gemma 4 with images": Family(
        "gemma4_text", GEMMA_4, ("sliding 16", "full") * 2, "gemma4", {BRIDGE: DELEGATED}
    ),
    "Phi-3": Family(
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0,
                "long_factor": [1.5, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3],
            },
        },
    ),
    "GPT-2": Family("gpt2", {"num_key_value_heads": None, "intermediate_size": None}),
    "GPT-NeoX": Family("gpt_neox", {"num_key_value_heads": None}),
    "Bloom": Family("bloom", {"num_key_value_heads": None}, refused={PLAIN: NO_INTERFACE}),
    "MPT": Family("mpt", {"num_key_value_heads": None}, refused={PLAIN: NO_INTERFACE}),
    "Falcon": Family("falcon", {"num_key_value_heads": None}, refused={PLAIN: NO_INTERFACE}),
    "OLMo 2": Family("olmo2"),
    "OLMo 3": Family(
        "olmo3", {**WINDOW, "layer_types": [S, S, F]}, ("sliding 16", "sliding 16", "full")
    ),
    "Cohere 2": Family(
        "cohere2", {**WINDOW, "layer_types": [S, S, F]}, ("sliding 16", "sliding 16", "full")
    ),
    "DeepSeek-V3": Family(
        "deepseek_v3",
        {**MLA, **ROUTED, "v_head_dim": 6},
        atol=1e-5,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {**WINDOW, **EXPERTS, "head_dim": 8, "layer_types": [S, F, S]},
        ("sliding 16", "full", "sliding 16"),
        atol=1e-5,
    ),
    "Llama 4": Family(
        "llama4_text",
        {
            "head_dim": 8, "intermediate_size_mlp": 64, "num_hidden_layers": 4,
            "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16, "no_rope_layers": [1, 1, 1, 0],
        },
        ("chunked 16",) * 3 + ("full",),
        refused={BRIDGE: DELEGATED},
    ),
    "Qwen3-Next": Family(
        "qwen3_next",
        {
            **LINEAR, **QWEN_MOE, "shared_expert_intermediate_size": 16,
        },
        ("none", "full") * 2,
        atol=3e-4,
    ),
    "Qwen3.5": Family("qwen3_5_text", LINEAR, ("none", "full") * 2, atol=1e-4),
    "Granite 4": Family(
        "granitemoehybrid",
        {
            **EXPERTS, **MAMBA_2, "shared_intermediate_size": 16, "layer_types": [L, F, L],
            "position_embedding_type": "nope", "attention_multiplier": 0.35,
        },
        ("none", "full", "none"),
        atol=1e-5,
    ),
    "Gemma": Family("gemma", HEAD),
    "Phi": Family("phi", {"num_key_value_heads": 4}),
    "Mixtral": Family("mixtral", EXPERTS, atol=1e-5),
    "Qwen3-MoE": Family("qwen3_moe", {**HEAD, **QWEN_MOE}, atol=1e-5),
    "SmolLM3": Family("smollm3"),
    "GLM-4": Family("glm4", HEAD),
    "StableLM": Family("stablelm", refused={PLAIN: DROPPED}),
    "OPT": Family(
        "opt",
        {**OLD, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2},
        refused={BRIDGE: DELEGATED},
    ),
    # Less often used.
    "Apertus": Family("apertus", long=True),
    "Arcee": Family("arcee", long=True),
    "Bamba": Family(
        "bamba", {**MAMBA_2, "attn_layer_indices": [1]}, ("none", "full", "none"),
        atol=1e-5, long=True,
    ),
    "BioGPT": Family(
        "biogpt", {"num_key_value_heads": None}, refused={BRIDGE: NO_BRIDGE}, long=True
    ),
    "BitNet": Family("bitnet", long=True),
    "CodeGen": Family(
        "codegen", {**OLD, "rotary_dim": 4}, refused={PLAIN: NO_INTERFACE}, atol=1e-5, long=True
    ),
    "Cohere": Family("cohere", long=True),
    "CWM": Family(
        "cwm", {**WINDOW, **HEAD, "layer_types": [S, F, S]}, ("sliding 16", "full", "sliding 16"),
        refused={BRIDGE: NO_BRIDGE}, long=True,
    ),
    "DeepSeek-V2": Family(
        "deepseek_v2", {**MLA, **ROUTED, "v_head_dim": 8}, atol=1e-5, long=True
    ),
    "dots.llm1": Family(
        "dots1", {**ROUTED, **HEAD}, refused={BRIDGE: NO_BRIDGE}, atol=1e-5, long=True
    ),
    "ERNIE 4.5": Family("ernie4_5", HEAD, long=True),
    "ERNIE 4.5 MoE": Family(
        "ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
        atol=1e-5, long=True,
    ),
    "EXAONE 4": Family(
        "exaone4", {**WINDOW, **HEAD, "layer_types": [S, S, F]},
        ("sliding 16", "sliding 16", "full"), long=True,
    ),
    "Falcon-H1": Family("falcon_h1", {**MAMBA_2, "mamba_d_ssm": 64}, atol=1e-5, long=True),
    "FlexOlmo": Family("flex_olmo", QWEN_MOE, atol=1e-5, long=True),
    "GLM": Family("glm", HEAD, long=True),
    "GLM-4.5": Family("glm4_moe", {**ROUTED, **HEAD}, atol=1e-5, long=True),
    "GPTBigCode": Family("gpt_bigcode", OLD, long=True),
    "Granite": Family("granite", {"attention_multiplier": 0.35}, long=True),
    "GraniteMoE": Family(
        "granitemoe", {**EXPERTS, "attention_multiplier": 0.35}, atol=1e-5, long=True
    ),
    "Helium": Family("helium", HEAD, refused={BRIDGE: NO_BRIDGE}, long=True),
    "HunYuan": Family("hunyuan_v1_dense", HEAD, long=True),
    "LFM2": Family(
        "lfm2", {"layer_types": ["conv", F, "conv", F], "num_hidden_layers": 4},
        ("none", "full") * 2, long=True,
    ),
    "Ministral": Family(
        "ministral", {**WINDOW, **HEAD, "layer_types": [S, F, S]},
        ("sliding 16", "full", "sliding 16"), refused={BRIDGE: NO_BRIDGE}, long=True,
    ),
    "Ministral 3": Family("ministral3", HEAD, long=True),
    "Nemotron": Family("nemotron", refused={PLAIN: DROPPED}, long=True),
    "OLMo": Family("olmo", long=True),
    "OLMoE": Family("olmoe", QWEN_MOE, atol=1e-5, long=True),
    "Persimmon": Family(
        "persimmon", {"num_key_value_heads": None}, refused={BRIDGE: NO_BRIDGE}, long=True
    ),
    "PhiMoE": Family("phimoe", EXPERTS, refused={BRIDGE: NO_BRIDGE}, atol=1e-5, long=True),
    "Qwen2-MoE": Family(
        "qwen2_moe", {**QWEN_MOE, "shared_expert_intermediate_size": 16}, atol=1e-5, long=True
    ),
    "Seed-OSS": Family("seed_oss", HEAD, long=True),
    "StarCoder2": Family("starcoder2", WINDOW, ("sliding 16",) * 3, long=True),
    "VaultGemma": Family("vaultgemma", GEMMA_3, ("sliding 16", "full", "sliding 16"), long=True),
    # Refused in both classes.
    "GPT-J": Family(
        "gptj", {**OLD, "rotary_dim": 4}, refused={BRIDGE: DELEGATED, PLAIN: NO_INTERFACE},
        long=True,
    ),
    "GPT-Neo": Family(
        "gpt_neo",
        {
            **OLD, "window_size": 16, "attention_types": [[["global", "local"], 2]],
            "num_layers": 4, "num_heads": 4, "num_hidden_layers": None, "num_attention_heads": None,
        },
        ("full", "sliding 16") * 2,
        refused={BRIDGE: DELEGATED, PLAIN: NO_INTERFACE},
        long=True,
    ),
    "Jamba": Family(
        "jamba",
        {
            "attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2,
            "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        ("none", "full", "none"),
        refused={BRIDGE: DELEGATED, PLAIN: RESTARTS},
    ),
    "DiffLlama": Family("diffllama", refused={BRIDGE: NO_BRIDGE, PLAIN: SEVERAL}),
    "MiniMax": Family(
        "minimax", {**EXPERTS, **HEAD}, ("full", "none", "full"),
        refused={BRIDGE: NO_BRIDGE, PLAIN: OWN_CACHE},
    ),
    "Doge": Family("doge", sees=(), refused={BRIDGE: NO_BRIDGE, PLAIN: HIDDEN}, long=True),
}  # fmt: skip


def marked(name: str, *values: str) -> Any:
    """A case of a family for `pytest.mark.parametrize`, with the family's marker."""
    return pytest.param(name, *values, marks=[pytest.mark.long] * FAMILIES[name].long)


def save_family(name: str, folder: Path) -> Path:
    """A model of a family, as any model of it is saved."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family = FAMILIES[name]
    settings = {
        key: value for key, value in {**SIZE, **family.settings}.items() if value is not None
    }
    config = AutoConfig.for_model(family.model_type, **settings)
    if family.inside:
        both = {"text_config": config.to_dict(), "vision_config": IMAGES}
        config = AutoConfig.for_model(family.inside, **both)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = AutoModelForCausalLM.from_config(config)
    network.save_pretrained(folder)
    tiny_tokenizer("tiny-gpt2").save_pretrained(folder)
    return folder


def families_by_class() -> str:
    """The lists of families in Markdown, as they stand in docs/models.md."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, family in FAMILIES.items():
        kinds = {re.sub(r" \d+", "", seen) for seen in family.sees}
        layers = ", ".join(kind for kind in ("full", "sliding", "chunked", "none") if kind in kinds)
        no_bridge, no_plain = (
            SAID.get(family.refused.get(kind, ""), "") for kind in (BRIDGE, PLAIN)
        )
        if not no_bridge and not no_plain:
            group = (IN_BOTH, layers)
        elif not no_plain:
            group = (f"Only as `{PLAIN}`", no_bridge)
        elif not no_bridge:
            group = (f"Only as `{BRIDGE}`", no_plain)
        else:
            group = (IN_NEITHER, "; ".join(dict.fromkeys((no_bridge, no_plain))))
        model_type = family.inside or family.model_type
        plain_name = re.sub(r"\W", "", name.lower())
        is_plain = plain_name == model_type.removesuffix("_text").replace("_", "")
        notes = [*([] if is_plain else [f"`{model_type}`"])]
        notes += [layers] if layers not in ("", "full") and group[0] != IN_BOTH else []
        groups.setdefault(group, []).append(f"{name} ({', '.join(notes)})" if notes else name)
    lines, heading = [], ""
    for (title, kind), names in sorted(groups.items(), key=lambda item: ORDER.index(item[0][0])):
        if title != heading:
            lines += ["", f"**{title}**", ""]
            heading = title
        item = f"- {kind}: {', '.join(names)}"
        lines += textwrap.wrap(item, 100, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines[1:]) + "\n"


if __name__ == "__main__":  # PYTHONPATH=. python tests/families.py
    page = Path(__file__).parent.parent / "docs" / "models.md"
    before, mark, _ = page.read_text("utf-8").partition(f"**{IN_BOTH}**")
    page.write_text(before + families_by_class(), "utf-8")
