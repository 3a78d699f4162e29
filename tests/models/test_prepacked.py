"""Packed weights: equal to ordinary batch, row by row the same bits, and made again for a changed weight."""

import copy

import numpy as np
import pytest
import torch
from conftest import cell_of, decode, load
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

import lapa2_interp
from lapa2_interp import Augmentation, Layout, load_model, load_run
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.cli.app import main
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.methods import load_task
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.prepacked import (
    _prepacked_weights,
    can_prepack,
    choose_prepacking,
    output_layer,
    prepacked,
)
from lapa2_interp.runs.worker import Worker

DTYPES = [
    dtype
    for dtype in (torch.float32, torch.bfloat16)
    if can_prepack(torch.ones(16, 16, dtype=dtype))
]
SHAPES = [(48, 32), (33, 40), (192, 576), (576, 1536), (1000, 64), (2304, 768), (7, 128)]
NUMBERS = (*range(1, 40), 64, 100, 299)
"""Numbers of rows whose batch are compared."""


def test_float32_is_packed_on_every_processor():
    """These tests would prove nothing where nothing is packed."""
    assert torch.float32 in DTYPES


def layer_of(n_out, n_in, dtype, kind=torch.nn.Linear, bias=True):
    torch.manual_seed(n_out + n_in)
    made = Conv1D(n_out, n_in) if kind is Conv1D else kind(n_in, n_out, bias=bias)
    torch.nn.init.normal_(made.weight, std=n_in**-0.5)
    return made.to(dtype)


def net_of(layer):
    return torch.nn.Sequential(layer)


@pytest.mark.parametrize("kind", [torch.nn.Linear, Conv1D])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_out", "n_in"), SHAPES)
@torch.no_grad()
def test_a_product_is_the_ordinary_one(n_out, n_in, dtype, kind):
    layer = layer_of(n_out, n_in, dtype, kind)
    x = torch.randn(5, 3, n_in).to(dtype)
    exact = linear(
        x.double(),
        (layer.weight.T if kind is Conv1D else layer.weight).double(),
        layer.bias.double(),
    )
    with prepacked(net_of(layer), "all"):
        product = layer(x)
    assert product.shape == (5, 3, n_out)
    tolerance = 1e-4 if dtype == torch.float32 else 2**-8 * float(exact.abs().max())
    torch.testing.assert_close(product.double(), exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("n_out", "n_in"), SHAPES)
@torch.no_grad()
def test_a_row_has_the_same_bits_alone_and_in_any_batch(n_out, n_in):
    layer = layer_of(n_out, n_in, torch.float32)
    x = torch.randn(300, n_in)
    with prepacked(net_of(layer), "all"):
        batch = layer(x)
        for rows in NUMBERS:
            for first in (0, 300 - rows):
                part = layer(x[first : first + rows])
                assert torch.equal(part, batch[first : first + rows]), (rows, first)
        assert torch.equal(layer(x[7]), batch[7])
        assert layer(x[:0]).shape == (0, n_out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_out", "n_in"), SHAPES)
@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_batch_of_its_size(n_out, n_in, dtype):
    """In any place, beside any rows. In another number of rows, one rounding may differ: AMX
    sums bfloat16 in an order that depends on it."""
    layer = layer_of(n_out, n_in, dtype)
    x = torch.randn(300, n_in).to(dtype)
    with prepacked(net_of(layer), "all"):
        batch = layer(x)
        for rows in NUMBERS:
            part, order = layer(x[:rows]), torch.randperm(rows)
            assert torch.equal(layer(x[:rows][order]), part[order]), rows
            others = torch.cat([x[:1], torch.randn(rows - 1, n_in).to(dtype)])
            assert torch.equal(layer(others)[0], part[0]), rows
            torch.testing.assert_close(
                part, batch[:rows], rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 1e3
            )


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-llama", "tiny-neox"])
def test_a_text_has_the_same_bits_alone_and_in_any_batch(model):
    """Promised where the padding is equal: whole logits of decoding, bias and cache included."""
    model = load(model)
    layout = Layout.of(model.tokenizer, "Very positive:", "The lake in the summer")
    tokens = torch.randint(
        0, model.cfg.d_vocab, (24, 3), generator=torch.Generator().manual_seed(1)
    )

    @torch.no_grad()
    def logits(rows):
        n = len(rows)
        with prepacked(facts_of(model).network, "all"):
            state = new_rows(model)
            with augmented(model, Augmentation(alpha=0.5), layout):
                steps = [state.prompt_pass([layout])[[0] * n]]
                state.expand(torch.zeros(n, dtype=torch.long), len(layout) + 3)
            with augmented(model, Augmentation(alpha=0.5), [layout] * n):
                steps += [state.read_tokens(tokens[rows, t : t + 1]) for t in range(3)]
        return torch.cat(steps, dim=1)

    together = logits(list(range(24)))
    for rows in ([0], [7], [23, 3], [5, 1, 2], list(range(12))):
        assert torch.equal(logits(rows), together[rows])


@pytest.mark.long
def test_logits_and_traces_are_those_without_prepacking(monkeypatch):
    """Along the tokens of the run without. Tiny models: `test_conformance`."""
    model = load("smollm2-135m")
    layout = Layout.of(model.tokenizer, "Very positive:", "The lake")
    cell = cell_of(
        model, "prefix", load_task("sentiment"), "positive", ["The lake"],
        Augmentation(alpha=0.5), length=14, samples=2, trace="full",
    )  # fmt: skip
    plain, boosted = (
        decode(with_prepacking(model, prepacking, monkeypatch), cell) for prepacking in CHOICES
    )
    texts = plain.texts["tokens"].tolist()
    logits = {}
    for prepacking in CHOICES:
        with prepacked(facts_of(model).network, prepacking), torch.no_grad():
            state = new_rows(model)
            state.prompt_pass([layout])
            state.expand(torch.zeros(2, dtype=torch.long), len(layout) + 14)
            steps = torch.tensor([list(text) for text in texts]).split(1, dim=1)
            logits[prepacking] = torch.cat([state.read_tokens(step) for step in steps], dim=1)
    # Logits reach 30, and their own float32 rounding 1e-4.
    torch.testing.assert_close(logits["all"], logits["none"], atol=2e-4, rtol=0)
    read = [
        teacher_forced(with_prepacking(model, prepacking, monkeypatch), layout, texts)
        for prepacking in CHOICES
    ]
    traces = (
        [read]
        if texts != boosted.texts["tokens"].tolist()
        else [read, (plain.trace, boosted.trace)]
    )
    for plain_trace, boosted_trace in traces:
        for variable, shares in plain_trace.items():
            np.testing.assert_allclose(shares, boosted_trace[variable], atol=1e-5, err_msg=variable)


CHOICES = ("none", "all")


def with_prepacking(model, prepacking, monkeypatch):
    card = identify(model).model_copy(update={"prepacking": prepacking})
    monkeypatch.setattr(model, "lapa2_card", card)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.mul_(1.5),
        lambda layer: layer.weight[3, 5].add_(1e-3),
        lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight * 2)),
        lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
        lambda layer: layer.weight.data.mul_(2),
        lambda layer: layer.weight.detach().numpy().__imul__(2),
        lambda layer: layer.to(torch.float64).to(torch.float32).weight.mul_(1.25),
        lambda layer: layer.load_state_dict({"weight": torch.eye(96, 64), "bias": torch.ones(96)}),
        lambda layer: layer.bias.add_(1),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_changed_weight_is_seen(change):
    layer = layer_of(96, 64, torch.float32)
    x = torch.randn(6, 64)
    with prepacked(net_of(layer), "all"):
        before = layer(x)
    change(layer)
    with prepacked(net_of(layer), "all"):
        after = layer(x)
    torch.testing.assert_close(after, linear(x, layer.weight, layer.bias), atol=1e-5, rtol=0)
    assert not torch.allclose(after, before, atol=1e-5)


@torch.no_grad()
def test_a_weight_that_changes_inside_the_block_is_seen_by_the_next_product():
    layer = layer_of(96, 64, torch.float32)
    x = torch.randn(6, 64)
    with prepacked(net_of(layer), "all"):
        layer(x)
        layer.weight.mul_(2)
        assert torch.allclose(layer(x), linear(x, layer.weight, layer.bias), atol=1e-5)
        layer.weight = torch.nn.Parameter(torch.zeros(96, 64))
        assert torch.equal(layer(x), layer.bias.expand(6, -1))


def test_gradients_other_dtypes_and_replaced_products_are_as_without():
    layer = layer_of(96, 64, torch.float32)
    x = torch.randn(6, 64, requires_grad=True)
    with prepacked(net_of(layer), "all"):
        layer(x).sum().backward()
        assert torch.allclose(x.grad[0], layer.weight.sum(0))
        assert layer.weight.grad is not None
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert layer(x).shape == (6, 96)
    mine = layer_of(96, 64, torch.float32)
    mine.forward = lambda x: x * 0
    with torch.no_grad(), prepacked(net_of(mine), "all"):
        assert not mine(x).any()
    assert "forward" in vars(mine)


@torch.no_grad()
def test_nothing_of_it_is_left_behind():
    """Hooks fire, and neither an exception nor a nested block leaves a trace in the module."""
    layer, seen = layer_of(96, 64, torch.float32), []
    network, x = net_of(layer), torch.randn(6, 64)
    plain = copy.deepcopy(layer)(x)
    layer.register_forward_hook(lambda module, inputs, out: seen.append(out))
    keys = list(vars(layer))
    with pytest.raises(ZeroDivisionError), prepacked(network, "all"), prepacked(network, "all"):
        assert torch.allclose(layer(x), plain, atol=1e-5)
        raise ZeroDivisionError
    assert (len(seen), list(vars(layer))) == (1, keys)
    assert list(network.state_dict()) == ["0.weight", "0.bias"]
    assert torch.equal(copy.deepcopy(layer)(x), plain)


def test_hooks_and_run_with_cache_inside_the_block():
    model = load("tiny-llama")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        _, plain = model.run_with_cache(ids)
        with prepacked(facts_of(model).network, "all"):
            logits, cache = model.run_with_cache(ids)
            zeroed = model.run_with_hooks(
                ids, fwd_hooks=[("blocks.1.mlp.hook_out", lambda act, hook: act * 0)]
            )
    assert set(cache) == set(plain)
    assert all(torch.allclose(cache[name], plain[name], atol=1e-5) for name in plain)
    assert not torch.allclose(zeroed, logits, atol=1e-3)


def test_what_is_packed_depends_on_memory_and_workers(monkeypatch):
    model = load("tiny-gpt2")
    network = facts_of(model).network
    weights = sum(weight.nbytes for weight in network.parameters())
    head = output_layer(network).weight.nbytes

    def choice(memory, **asked):
        monkeypatch.setattr("lapa2_interp.models.prepacked.usable_memory", lambda: memory)
        return choose_prepacking(network, **asked)

    assert choice(10 * weights) == "all"
    assert choice(2 * (weights + head)) == "lm_head"
    assert choice(4 * (weights + head), workers=2) == "lm_head"
    assert choice(weights) == "none"
    assert choice(weights, pack="on") == "all"
    assert choice(10 * weights, pack="off") == "none"


def test_nothing_is_packed_in_float64():
    assert identify(load_model("tiny-gpt2", dtype="float64")).prepacking == "none"


@torch.no_grad()
def test_only_the_output_layer():
    model = load_model("tiny-llama")
    ids, network = torch.arange(8)[None], facts_of(model).network
    plain = model(ids)
    head = output_layer(network)
    with prepacked(network, "lm_head"):
        logits = model(ids)
        assert [name for name, module in network.named_modules() if "forward" in vars(module)] == [
            next(name for name, module in network.named_modules() if module is head)
        ]
    torch.testing.assert_close(logits, plain, atol=1e-5, rtol=0)


def test_without_the_operations_nothing_is_packed(monkeypatch):
    """A PyTorch without oneDNN, or one whose private operations have gone."""
    monkeypatch.setattr("lapa2_interp.models.prepacked._prepacking_works", lambda dtype: False)
    layer, x = layer_of(96, 64, torch.float32), torch.randn(6, 64)
    assert choose_prepacking(net_of(layer)) == "none"
    with torch.no_grad(), prepacked(net_of(layer), "all"):
        assert torch.equal(layer(x), linear(x, layer.weight, layer.bias))


def test_a_worker_computes_with_the_weights_of_the_cells_first_batch():
    """The machine that makes it chooses what is packed; its record keeps it."""
    cell = cell_of(
        load("tiny-llama"), "prefix", load_task("sentiment"), "positive", ["The lake"],
        Augmentation(alpha=0.5), length=20, samples=2,
    )  # fmt: skip
    without, usual = Worker(pack="off"), Worker()
    made = without.make_batch(cell, 0)
    assert made.record.model.prepacking == "none"
    network = facts_of(usual.model(cell)).network
    again = usual.make_batch(cell, 0, "none")
    assert again.trace.equals(made.trace)
    assert again.record.model.prepacking == "none"
    assert not any(layer in _prepacked_weights for layer in network.modules())
    assert usual.make_batch(cell, 0).record.model.prepacking == "all", "what this machine chooses"
    assert any(layer in _prepacked_weights for layer in network.modules())


def test_options_and_manifests(tmp_path):
    asked = {"attribute": "positive", "prompts": ["The lake"], "length": 14, "dtype": "float32"}
    for pack, prepacking in (("auto", "all"), ("on", "all"), ("off", "none")):
        run = lapa2_interp.generate("tiny-gpt2", pack=pack, **asked)
        assert run.manifest().model.prepacking == prepacking
    line = "generate --model tiny-gpt2 --attribute positive --prompt Lakes --length 14 --pack off"
    assert main([*line.split(), "--out", str(tmp_path / "run")]) == 0
    assert load_run(tmp_path / "run").manifest().model.prepacking == "none"
