"""The files decide the weights: what they lack, have beside it, or hold packed is said; what is in
memory has an identity."""

import json
import shutil

import pytest
import torch
from conftest import cell_of, decode, load
from safetensors.torch import load_file, save_file

from lapa2_interp import Augmentation, Layout, augmented, circuits, load_model
from lapa2_interp.errors import CircuitError, ModelError, ScoringError
from lapa2_interp.generation.resolve import cell_of as make_cell
from lapa2_interp.models import identify
from lapa2_interp.models.card import hash_weights
from lapa2_interp.models.facts import TransformersModel
from lapa2_interp.models.load import (
    check_hub,
    load_transformers,
    provenance,
    wrap_in_bridge,
)
from lapa2_interp.models.prepacked import choose_prepacking, prepacked
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.scoring import adapter
from lapa2_interp.scoring.transformer import Classifier

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
    before = identify(model)
    assert identify(model) is before
    with torch.no_grad():
        model.original_model.lm_head.weight[3, 3] += 1
    after = identify(model)
    assert after.weights.endswith("(of the weights in memory, configuration and vocabulary)")
    assert identify(model) is after
    assert after.model_copy(update={"weights": before.weights}) == before
    cell = cell_of(model, "prefix", "sentiment", "positive", ("The lake",), None, length=12)
    assert len(decode(model, cell).texts) == 1


@pytest.mark.parametrize("kind", ["TransformerBridge", "TransformersModel"])
def test_another_dtype_is_other_weights(folder, kind):
    """`.to` writes through `.data`; a run would be told, and its key made, for the old dtype."""
    model = load_model(str(folder), device="cpu", model_class=kind)
    before = identify(model)
    (model if kind == "TransformerBridge" else model.original_model).to(torch.bfloat16)
    after = identify(model)
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
        hashes.append(identify(TransformersModel(network, tokenizer, "mine")).weights)
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
    assert identify(model).weights.startswith("sha256 ")


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
