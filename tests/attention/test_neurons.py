"""Hooks on MLP neurons, and the control table, against plain loops."""

import math

import pytest
import torch
from conftest import load, logits_with_neurons

from lapa2_interp.attention import neurons
from lapa2_interp.attention.neurons import (
    neuron_hook_name,
    promoting_neurons,
    set_neurons,
)


def test_setting_neurons_changes_those_and_no_others(tiny, model_class):
    model = load(tiny, "float64", model_class)
    point = neuron_hook_name(model, 1)
    assert point == ("blocks.1.mlp.hook_post" if tiny == "tiny-llama" else "blocks.1.mlp.hook_pre")
    ids, seen = torch.tensor([[1, 2, 3], [4, 5, 6]]), []

    def look(activation, hook):
        seen.append(activation.clone())

    chosen, values = {1: torch.tensor([0, 5])}, torch.tensor([0.25, -3.0], dtype=torch.float64)
    with torch.no_grad():
        plain = model(ids)
        with model.hooks(fwd_hooks=[(point, look)]):
            model(ids)
        with set_neurons(model, chosen, values), model.hooks(fwd_hooks=[(point, look)]):
            changed = model(ids)
        again = model(ids)
    before, after = seen
    others = [i for i in range(before.shape[2]) if i not in (0, 5)]
    assert torch.equal(before[:, :, others], after[:, :, others])
    assert (after[0][:, [0, 5]] == 0.25).all()
    assert (after[1][:, [0, 5]] == -3).all()
    assert (changed - plain).abs().max() > 1e-3
    assert torch.equal(plain, again), "the hooks are gone"


def test_after_the_activation_function_the_value_itself_goes_on(model_class):
    model = load("tiny-gpt2", "float64", model_class)
    ids, chosen = torch.tensor([[1, 2]]), {0: torch.tensor([3])}
    gelu = 0.1 * (1 + math.tanh(math.sqrt(2 / math.pi) * (0.2 + 0.044715 * 0.2**3)))
    assert gelu == pytest.approx(0.1159, abs=5e-5)
    with torch.no_grad():
        pre, post, same = (
            logits_with_neurons(model, ids, chosen, torch.tensor([value], dtype=torch.float64), at)
            for value, at in ((0.2, "pre"), (0.2, "post"), (gelu, "post"))
        )
    assert (pre - post).abs().max() > 1e-6
    assert (pre - same).abs().max() < 1e-12


def test_the_control_table_is_one_pass_per_neuron(tiny, model_class, tmp_path, monkeypatch):
    model = load(tiny, "float64", model_class)
    tokens, reading = [7, 30, 11], [5, 6]
    monkeypatch.setattr(neurons, "NEURONS_PER_PASS", 10)
    file = tmp_path / "table.npz"
    values, where = promoting_neurons(model, reading, tokens, 4, file=file)
    # A row for each neuron, set by a hook of this test; and some neurons one at a time.
    point = "hook_post" if neurons.is_gated(model) else "hook_pre"
    every = torch.arange(model.cfg.d_mlp)

    def diagonal(activation, hook):
        activation = activation.clone()
        activation[every, :, every] = 50.0
        return activation

    table = []
    for layer in range(model.cfg.n_layers):
        rows = torch.tensor([reading] * model.cfg.d_mlp)
        hooks = [(f"blocks.{layer}.mlp.{point}", diagonal)]
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            table.append(model(rows)[:, -1].log_softmax(1)[:, tokens])
        chosen, value = {layer: every[layer : layer + 1]}, torch.tensor([50.0]).double()
        with torch.no_grad():
            logits = logits_with_neurons(model, torch.tensor([reading]), chosen, value)[0, -1]
            one = logits.log_softmax(0)[tokens]
        assert (table[-1][layer] - one).abs().max() < 1e-9
    table = torch.cat(table)
    for row in range(3):
        best = table[:, row].sort(descending=True, stable=True)
        assert (values[row] - best.values[:4]).abs().max() < 1e-5
        assert where[row].tolist() == [
            list(divmod(i, model.cfg.d_mlp)) for i in best.indices[:4].tolist()
        ]
    upper = promoting_neurons(model, reading, tokens, 4, first_layer=2)[1]
    assert upper[:, :, 0].min() >= 2
    # Stored, it is not computed again; and a table that was left half-way goes on where it was.
    calls = []
    real = neurons._log_probs_by_neuron
    monkeypatch.setattr(
        neurons, "_log_probs_by_neuron", lambda *args: calls.append(args[2]) or real(*args)
    )
    assert torch.equal(promoting_neurons(model, reading, tokens, 4, file=file)[1], where)
    assert calls == []
    half = tmp_path / "half.npz"

    def stops(*args):
        if args[2] == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(neurons, "_log_probs_by_neuron", stops)
    with pytest.raises(KeyboardInterrupt):
        promoting_neurons(model, reading, tokens, 4, file=half)
    monkeypatch.setattr(
        neurons, "_log_probs_by_neuron", lambda *args: calls.append(args[2]) or real(*args)
    )
    resumed = promoting_neurons(model, reading, tokens, 4, file=half)
    assert set(calls) == set(range(2, model.cfg.n_layers))
    assert torch.equal(resumed[0], values)
    assert torch.equal(resumed[1], where)
