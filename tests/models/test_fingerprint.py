"""Any change of weights' values is seen, however it is written."""

import pytest
import torch
import transformers
from conftest import fresh

from lapa2_interp import generate
from lapa2_interp.models import fingerprint as module
from lapa2_interp.models.card import hash_weights, identify
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.fingerprint import (
    fingerprint,
    network_tensors,
    weight_fingerprint,
    weights_read_once,
)

SETTINGS = {"attribute": "positive", "prompts": ["The lake"], "top_k": 1, "length": 16}


def copied(name="tiny-llama", model_class="TransformersModel"):
    return fresh(name, model_class=model_class)


def weight_of(model):
    named = facts_of(model).network.named_parameters()
    return next(weight for name, weight in named if "down_proj" in name)


def scaled(model):
    weight_of(model).data *= -3.0


def through_numpy(model):
    weight_of(model).detach().numpy()[:] *= -3.0


def replaced(model):
    weight_of(model).data = weight_of(model).data * -3.0


def rows_swapped(model):
    weight_of(model).data[:] = weight_of(model).data.flip(0)


def pruned(model):
    weight_of(model).data[weight_of(model).data.abs() < 0.02] = 0.0


def stepped(model):
    weight_of(model).grad = torch.ones_like(weight_of(model))
    torch.optim.SGD([weight_of(model)], lr=0.5).step()


EDITS = [scaled, through_numpy, replaced, rows_swapped, pruned, stepped]


@pytest.mark.parametrize(
    ("edit", "model_class"),
    [(edit, "TransformersModel") for edit in EDITS] + [(scaled, "TransformerBridge")],
)
def test_texts_and_manifest_are_those_of_the_edited_weights(edit, model_class):
    """As if the weights had been edited before anything was computed with them."""
    model, fresh = copied(model_class=model_class), copied(model_class=model_class)
    before = generate(model, **SETTINGS)
    edit(model), edit(fresh)
    after, wanted = (generate(one, **SETTINGS) for one in (model, fresh))
    assert after.texts()["tokens"].tolist() == wanted.texts()["tokens"].tolist()
    weights = [run.manifest().model.weights for run in (before, after, wanted)]
    assert weights[1] == weights[2] == hash_weights(fresh) != weights[0]


def test_weights_that_are_put_back_have_their_name_again():
    model = copied()
    name, values = identify(model).weights, weight_of(model).data.clone()
    scaled(model)
    assert identify(model).weights != name
    weight_of(model).data[:] = values
    assert identify(model).weights == name


def switched(network):
    network.set_adapter("two")


def disabled(network):
    network.disable_adapters()


def rescaled(network):
    for layer in network.modules():
        if isinstance(getattr(layer, "scaling", None), dict):
            layer.scaling = {name: 5 * scale for name, scale in layer.scaling.items()}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("edit", [switched, disabled, rescaled])
def test_the_state_of_adapters_counts(edit):
    """Nothing of it is in `state_dict`."""
    peft = pytest.importorskip("peft", reason="peft is not there: pip install peft")
    model = copied()
    network = facts_of(model).network
    for name in ("two", "one"):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        network.add_adapter(config, adapter_name=name)
    before, name = fingerprint(network), identify(model).weights
    edit(network)
    assert fingerprint(network) != before
    assert identify(model).weights == hash_weights(model) != name
    if edit is not rescaled:
        network.enable_adapters()
        network.set_adapter("one")
        assert identify(model).weights == name


@pytest.mark.parametrize("model_class", ["TransformersModel", "TransformerBridge"])
def test_buffers_that_are_not_saved_count(model_class):
    model = copied(model_class=model_class)
    name = identify(model).weights
    for buffer, values in facts_of(model).network.named_buffers():
        if buffer.endswith("inv_freq"):
            values.mul_(0.5)
    assert identify(model).weights == hash_weights(model) != name


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("Phi3", {"rope_type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}),
        ("Llama", {"rope_type": "dynamic", "factor": 2.0}),
    ],
)
@torch.no_grad()
def test_rotary_frequencies_that_passes_choose_do_not_count(kind, rope):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, pad_token_id=0,
        num_attention_heads=2, max_position_embeddings=8, original_max_position_embeddings=8,
        rope_parameters={**rope, "rope_theta": 1e4, "original_max_position_embeddings": 8},
    )  # fmt: skip
    network = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    frequencies, before = network.model.rotary_emb.inv_freq.clone(), fingerprint(network)
    network(torch.arange(12)[None])
    assert not torch.equal(network.model.rotary_emb.inv_freq, frequencies)
    assert fingerprint(network) == before
    network.model.rotary_emb.original_inv_freq.mul_(2)
    assert fingerprint(network) != before


@pytest.mark.filterwarnings("ignore:torch.(ao.quantization|quantize_per_tensor)")
def test_weights_that_quantised_layers_pack_are_unpacked():
    prints = set()
    for factor in (1.0, -1.5):
        layers = torch.nn.Sequential(torch.nn.Linear(4, 4))
        torch.nn.init.constant_(layers[0].weight, factor)
        torch.nn.init.zeros_(layers[0].bias)
        torch.ao.quantization.quantize_dynamic(layers, inplace=True)
        prints.add(fingerprint(layers))
        assert fingerprint(layers) in prints
    assert len(prints) == 2


def test_inside_a_block_weights_are_read_once_and_counted_changes_are_seen(monkeypatch):
    network, read = facts_of(copied()).network, []
    digest = module.values_digest
    monkeypatch.setattr(
        module, "values_digest", lambda weight: read.append(weight) or digest(weight)
    )
    n_weights = len(list(network_tensors(network)))
    with weights_read_once():
        first = fingerprint(network)
        assert fingerprint(network) == first
        with weights_read_once():
            assert fingerprint(network) == first
        assert len(read) == n_weights
        with torch.no_grad():
            next(network.parameters()).mul_(2)
        assert fingerprint(network) != first
        assert len(read) == n_weights + 1
    fingerprint(network)
    assert len(read) == 2 * n_weights + 1


def test_a_call_reads_each_weight_once(monkeypatch):
    model, read = copied(), []
    digest = module.values_digest
    monkeypatch.setattr(
        module, "values_digest", lambda weight: read.append(weight) or digest(weight)
    )
    generate(model, alpha=[0, 0.5], **SETTINGS)
    assert len(read) == len(list(network_tensors(facts_of(model).network)))


CHANGES = {
    "one bit": lambda x: x.view(torch.int32)[5].bitwise_xor_(1),
    "one sign": lambda x: x[70_000].neg_(),
    "all signs": lambda x: x.neg_(),
    "every bit": lambda x: x.view(torch.int32).bitwise_not_(),
    "a pair swapped": lambda x: x[[0, 65_536]].copy_(x[[65_536, 0]].clone()),
    "two neighbours swapped": lambda x: x[2:4].copy_(x[2:4].flip(0).clone()),
    "an order": lambda x: x.copy_(x.flip(0).clone()),
    "a zero's sign": lambda x: x[9].neg_(),
    "a NaN": lambda x: x[1].fill_(torch.nan),
}


@pytest.mark.parametrize("sums", [False, True], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_any_change_gives_another_fingerprint(change, sums, monkeypatch):
    """Also by the sums that an accelerator computes, here on the CPU."""
    torch.manual_seed(0)
    weight = torch.randn(200_000)
    weight[9] = 0.0

    def made():
        if not sums:
            return weight_fingerprint(weight)
        return module._sums(weight.view(torch.uint8)).numpy().tobytes()

    before = made()
    assert made() == before
    if change == "a pair swapped":
        weight[[0, 65_536]] = weight[[65_536, 0]]
    else:
        CHANGES[change](weight)
    assert made() != before


def test_shape_and_type_count():
    weight = torch.zeros(4, 6)
    prints = {
        weight_fingerprint(one) for one in (weight, weight.reshape(6, 4), weight.view(torch.int32))
    }
    assert len(prints) == 3
    assert weight_fingerprint(weight.t().contiguous().t()) == weight_fingerprint(weight)
