"""The files decide the weights: what they lack, have beside it, or hold packed is said; what is in
memory has an identity."""

import json
import os
import shutil

import pytest
import torch
from conftest import cell_of, decode, load
from safetensors.torch import load_file, save_file

from lapa2_interp import Augmentation, Layout, augmented, circuits, load_model
from lapa2_interp._util.errors import CircuitError, ModelError, ScoringError
from lapa2_interp.generation.resolve import cell_of as make_cell
from lapa2_interp.models import model_card, weights
from lapa2_interp.models.card import TransformersModel, hash_weights
from lapa2_interp.models.load import (
    check_hub,
    load_tokenizer,
    load_transformers,
    provenance,
    wrap_in_bridge,
)
from lapa2_interp.models.prepacked import choose_prepacking, prepacked
from lapa2_interp.models.sizes import load_config, model_size
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.scoring import adapter
from lapa2_interp.scoring.transformer import Classifier, Perplexity

IDS = torch.tensor([[0, 10, 20, 30]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "whole"
    network, tokenizer, _ = load_transformers("tiny-llama")
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def changed(folder, tmp_path):
    """The folder with other tensors and another config.json."""

    def change(tensors=lambda weights: weights, **config):
        path = shutil.copytree(folder, tmp_path / "changed", dirs_exist_ok=True)
        weights = load_file(folder / "model.safetensors")
        save_file(tensors(weights), path / "model.safetensors", {"format": "pt"})
        fields = json.loads((folder / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(fields | config))
        return str(path)

    return change


def without(*parts):
    return lambda tensors: {
        name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)
    }


def renamed(change):
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


MLP = (
    r"lacks 3 tensors of a LlamaForCausalLM, which would be random: model\.layers\.1\.mlp\.down_proj"
    r"\.weight, model\.layers\.1\.mlp\.gate_proj\.weight, .*the files are not whole, or config"
)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
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
        (lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, {}, r"would ignore: model\.layers\.0\.self_attn\.q_proj\.bias"),
        (lambda t: t | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 32)}, {}, r"they are an adapter: merge it first"),
    ],
)  # fmt: skip
def test_files_that_are_not_the_models_are_refused(changed, tensors, config, message):
    with pytest.raises(ModelError, match=message) as caught:
        load_transformers(changed(tensors, **config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (renamed(lambda n: n.removeprefix("model.")), {}),  # transformers knows the base's names
        (lambda t: t | {"vision_tower.layers.0.weight": torch.ones(4), "v_head.bias": torch.ones(1),
                        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                        "model.layers.0.self_attn.masked_bias": torch.ones(1)}, {}),
        (lambda t: t | {"model.layers.4.mlp.up_proj.weight": torch.ones(4)}, {"num_nextn_predict_layers": 1}),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_loaded(changed, tensors, config):
    network = load_transformers(changed(tensors, **config))[0]
    assert torch.equal(network(IDS).logits, load_transformers("tiny-llama")[0](IDS).logits)


def test_tied_weights_are_not_missing(changed):
    network = load_transformers(changed(without("lm_head"), tie_word_embeddings=True))[0]
    assert network.lm_head.weight is network.model.embed_tokens.weight


def test_a_classifier_needs_its_head(folder):
    for scorer in (lambda: Classifier(str(folder), device="cpu"),):
        with pytest.raises(ScoringError, match=r"score\.weight; the files have no trained class"):
            scorer()


def test_a_judge_of_perplexity_needs_its_weights(changed):
    with pytest.raises(ModelError, match="would be random"):
        Perplexity(changed(without("layers.1.mlp")), device="cpu")


def test_an_adapter_beside_weights_is_refused(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "adapted")
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(ModelError, match=r"holds an adapter \(adapter_config\.json\)"):
        load_transformers(path)
    with pytest.raises(ModelError, match="holds an adapter"):
        Classifier(str(path))


def test_files_that_change_while_they_are_read_are_refused(folder, tmp_path, monkeypatch):
    path = shutil.copytree(folder, tmp_path / "written")
    before = weights.folder_hash

    def while_written(model_folder):
        os.utime(path / "model.safetensors", ns=(1, 1))
        return before(model_folder)

    monkeypatch.setattr("lapa2_interp.models.load.folder_hash", while_written)
    with pytest.raises(ModelError, match="changed while they were read"):
        load_transformers(path)


def test_code_and_weights_in_another_place_are_hashed(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "parts")
    (path / "parts").mkdir()
    (path / "model.safetensors").rename(path / "parts" / "a.safetensors")
    index = {"weight_map": dict.fromkeys(["lm_head.weight"], "parts/a.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    provenances = [provenance(str(path), None)]
    for name in ("parts/a.safetensors", "modeling_own.py"):
        with (path / name).open("ab") as file:
            file.write(b" ")
        provenances.append(provenance(str(path), None))
    assert len(set(provenances)) == 3


# --- what is in memory


def test_weights_changed_in_memory_are_other_weights(folder):
    model = load_model(str(folder), device="cpu", model_class="TransformersModel")
    before = model_card(model)
    assert model_card(model) is before
    with torch.no_grad():
        model.original_model.lm_head.weight[3, 3] += 1
    after = model_card(model)
    assert after.weights.endswith("(of the weights in memory, configuration and vocabulary)")
    assert model_card(model) is after
    assert after.model_copy(update={"weights": before.weights}) == before
    cell = cell_of(model, "prefix", "sentiment", "positive", ("The lake",), None, length=12)
    assert len(decode(model, cell).texts) == 1


@pytest.mark.parametrize("kind", ["TransformerBridge", "TransformersModel"])
def test_another_dtype_is_other_weights(folder, kind):
    """`.to` writes through `.data`; a run would be told, and its key made, for the old dtype."""
    model = load_model(str(folder), device="cpu", model_class=kind)
    before = model_card(model)
    (model if kind == "TransformerBridge" else model.original_model).to(torch.bfloat16)
    after = model_card(model)
    assert (before.dtype, after.dtype) == ("float32", "bfloat16")
    assert after.weights.endswith("(of the weights in memory, configuration and vocabulary)")
    cell = make_cell(model, attribute="positive", prompts=["The lake"], length=12)
    assert cell.dtype == "bfloat16"


def test_models_made_elsewhere_are_told_apart():
    """Two of one name; the same again has the same hash."""
    hashes = []
    for scale in (1.0, 1.0, 2.0):
        network, tokenizer, _ = load_transformers("tiny-llama")
        with torch.no_grad():
            network.lm_head.weight.mul_(scale)
        hashes.append(model_card(TransformersModel(network, tokenizer, "mine")).weights)
    assert hashes[0] == hashes[1] != hashes[2]
    assert hash_weights(load("tiny-llama")).startswith("sha256 ")


# --- quantised weights


class Packed(torch.nn.Module):
    """A linear layer whose weight is kept in 8 bits, as the layers of quantising libraries are."""

    def __init__(self, linear):
        super().__init__()
        rows = linear.weight.detach()
        self.scale = rows.abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((rows / self.scale).round().to(torch.int8), False)

    def forward(self, x):
        return x @ (self.weight * self.scale).T


@pytest.fixture
def quantised():
    network, tokenizer, _ = load_transformers("tiny-llama")
    for layer in network.model.layers:
        layer.self_attn.o_proj = Packed(layer.self_attn.o_proj)
        layer.mlp.up_proj = Packed(layer.mlp.up_proj)
    return network, tokenizer


def test_quantised_weights_generate_and_take_the_bias(quantised):
    model = TransformersModel(*quantised, "mine")
    layout = Layout.of(model, "Very positive:", " The lake")
    plain = model(layout.tensor)
    with augmented(model, Augmentation(alpha=2.0), layout):
        assert not torch.allclose(model(layout.tensor), plain)
    cell = cell_of(model, "prefix", "sentiment", "positive", ("The lake",), None, length=12)
    assert len(decode(model, cell).texts) == 1
    assert model_card(model).weights.startswith("sha256 ")


def test_what_reads_weights_refuses_quantised_ones(quantised, monkeypatch):

    network, tokenizer = quantised
    model = TransformersModel(network, tokenizer, "mine")
    with pytest.raises(
        ModelError, match="embedding is read from the weights themselves, and those"
    ):
        ModelContext(model).embedding()
    monkeypatch.setattr(adapter, "load_transformers", lambda base: (network, tokenizer, ""))
    with pytest.raises(ModelError, match="adapters are added to the weights themselves"):
        adapter.load_adapter_network("mine", 1, 2)
    bridge = wrap_in_bridge(network, tokenizer, "mine", "w")
    contrast_set = circuits.ContrastSet.of(bridge, "sentiment", prompts=["The lake"], tokens=2)
    for call in (lambda: circuits.head_logit_attribution(bridge, contrast_set),
                 lambda: circuits.attribution(bridge, contrast_set)):  # fmt: skip
        with pytest.raises(
            (ModelError, CircuitError), match="are quantised; load the model without"
        ):
            call()


class Other(torch.Tensor):
    """A tensor of another make, as torchao's."""


def test_weights_of_another_make_are_not_packed():
    network = load_transformers("tiny-llama")[0]
    wanted = network(IDS).logits
    for module in network.modules():
        if type(module) is torch.nn.Linear:
            module.weight = torch.nn.Parameter(module.weight.detach().as_subclass(Other), False)
    assert choose_prepacking(network) == "none"
    with prepacked(network, "all"), torch.no_grad():
        assert torch.equal(network(IDS).logits, wanted)


@pytest.mark.parametrize(
    ("method", "library"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "gptqmodel"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}}, "torchao"),
    ],
)  # fmt: skip
def test_a_missing_library_is_named(changed, method, library):
    with pytest.raises(
        ModelError, match=rf"needs a library that is not installed: .*{library}.*; install it"
    ):
        load_transformers(changed(quantization_config=method))


# --- the hub


def test_a_hub_that_is_not_reached_is_asked_once(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked = []

    def nobody(url, **_):
        asked.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", nobody)
    with pytest.raises(
        ModelError, match=r"did you mean 'tiny-gpt2'\? \(https.* is not reached: Name"
    ):
        load_model("tiny-gpt")
    assert len(asked) == 1
    check_hub("no hub id")
    with pytest.raises(ScoringError, match="is not reached"):
        Classifier("someone/else")


@pytest.fixture(scope="module")
def whole_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "llama"
    for part in load_transformers("tiny-llama")[:2]:
        part.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, and the weights beside it"),
        ({"attention_types": [[["global"], 10**9]]}, "attention_types = 1000000000"),
        ({"text_config": {"n_layer": 1e30}}, r"n_layer = 1e\+30"),
        ({"num_hidden_layers": 600}, "asks for more than .* and its weights hold 39 of"),
        ({"vocab_size": 10**12}, "asks for more than 1 tensors of 32000000000000 numbers"),
        ({"intermediate_size": 10**10}, "asks for more than"),
        ({"num_key_value_heads": 10**9}, "asks for more than"),
    ],
)
def test_a_configuration_of_more_than_its_weights_hold_is_refused_before_it_is_built(
    whole_llama, tmp_path, fields, message
):
    folder = shutil.copytree(whole_llama, tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ModelError, match=message):
        load_transformers(folder)
    with pytest.raises(ScoringError if "asks" in message else ModelError, match=message):
        Classifier(str(folder))
    if "beside" in message:
        for read in (load_tokenizer, model_size, load_config):
            with pytest.raises(ModelError, match=message):
                read(str(folder))
