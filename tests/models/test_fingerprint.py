"""Any change of weights' values is seen, however it is written."""

import copy

import pytest
import torch
from conftest import load, soft_prefix

from lapa2_interp import generate
from lapa2_interp._util.errors import PrefixError
from lapa2_interp.models import fingerprint as module
from lapa2_interp.models.card import hash_weights, model_card, network_of
from lapa2_interp.models.fingerprint import fingerprint, weight_fingerprint, weights_read_once

SETTINGS = {"attribute": "positive", "prompts": ["The lake"], "top_k": 1, "length": 16}


def copied(name="tiny-llama", model_class="TransformersModel"):
    return copy.deepcopy(load(name, model_class=model_class))


def weight_of(model):
    named = network_of(model).named_parameters()
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
    assert after.samples()["tokens"].tolist() == wanted.samples()["tokens"].tolist()
    weights = [run.manifest().model.weights for run in (before, after, wanted)]
    assert weights[1] == weights[2] == hash_weights(fresh) != weights[0]


def test_weights_that_are_put_back_have_their_name_again():
    model = copied()
    name, values = model_card(model).weights, weight_of(model).data.clone()
    scaled(model)
    assert model_card(model).weights != name
    weight_of(model).data[:] = values
    assert model_card(model).weights == name


def test_a_soft_prefix_of_the_weights_before_is_refused():
    model = copied()
    prefix = soft_prefix(model)
    prefix.check(model)
    scaled(model)
    with pytest.raises(PrefixError, match="was made for"):
        prefix.check(model)


def test_inside_a_block_weights_are_read_once_and_counted_changes_are_seen(monkeypatch):
    network, read = network_of(copied()), []
    digest = module._digest
    monkeypatch.setattr(module, "_digest", lambda weight: read.append(weight) or digest(weight))
    n_weights = len(list(network.parameters()))
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
    digest = module._digest
    monkeypatch.setattr(module, "_digest", lambda weight: read.append(weight) or digest(weight))
    generate(model, alpha=[0, 0.5], **SETTINGS)
    assert len(read) == len(list(network_of(model).parameters()))


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
