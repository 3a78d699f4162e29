"""Static steps make the texts and traces of the usual ones.

No GPU is needed: `replayed` stands for a CUDA graph. It notes the operations of one pass with their
tensors, and repeats them on the same tensors without the model's Python code.
"""

import functools

import numpy as np
import pytest
import torch
from conftest import cell_of, load, soft_set
from families import FAMILIES, PLAIN, save_family
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapa2_interp import Augmentation, Layout, augmented, load_model
from lapa2_interp._util.errors import ModelError
from lapa2_interp.attention import static_rows
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.static_rows import bucket, continued
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.generation.loop import decode_batches
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.methods import load_task

PROMPTS = ("The lake", "The book is on the table")
RULE = Augmentation(alpha=0.7)
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::lift_fresh"}
"""Operations that a graph cannot hold: they wait for the device, or bring a tensor to it."""


class Notes(TorchDispatchMode):
    """The operations in a block, with their arguments and results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().partition(".")[0] in WAITS:
            raise RuntimeError(f"{func.name()} waits for the device")
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


def replayed(run):
    with Notes() as notes:
        result = run()

    def replay():
        for func, args, kwargs, made in notes.calls:
            for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
                # Views, and tensors that are changed in place, lie where they lay.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return result

    return replay


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Buckets of few keys, so that short texts cross them, and graphs on the CPU."""
    monkeypatch.setattr(static_rows, "SMALLEST_BUCKET", 4)
    monkeypatch.setitem(static_rows.CAPTURE, "cpu", replayed)
    static_rows._print_note.cache_clear()


@pytest.fixture
def passes(monkeypatch):
    """The widths of all static passes, and of those that were captured."""
    found = {"run": [], "captured": []}
    run, captured = static_rows.StaticStep.run, static_rows.StaticStep._pass

    def noted(name, real):
        def call(step, width):
            found[name].append(width)
            return real(step, width)

        return call

    monkeypatch.setattr(static_rows.StaticStep, "run", noted("run", run))
    monkeypatch.setattr(static_rows.StaticStep, "_pass", noted("captured", captured))
    return found


@torch.no_grad()
def forced(model, rule, static, steps=24, layouts=None):
    """The logits of given tokens, [row step vocab], by usual or static steps."""
    if layouts is None:
        layouts = [Layout.of(model.tokenizer, "Very good:", each) for each in PROMPTS]
    padded, index = left_pad(layouts), torch.tensor([1, 0, 1])
    rows, found = new_rows(model), []
    with augmented(model, rule, padded):
        rows.prompt_pass(padded)
    rules, of_rows = [rule] * 3, [padded[i] for i in index]
    tokens = (7 * torch.arange(3 * steps) % 200 + 40).view(3, steps)
    model.static = static
    try:
        block = continued(model, rows, index, len(padded[0]) + steps, rules, of_rows, None, {})
        with block as more:
            found = [more.read_tokens(tokens[:, i : i + 1])[:, -1].clone() for i in range(steps)]
    finally:
        model.static = False
    return torch.stack(found, dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return functools.cache(lambda name: save_family(name, tmp_path_factory.mktemp("family")))


@pytest.mark.parametrize("name", [n for n, each in FAMILIES.items() if PLAIN not in each.refused])
def test_families(name, folder, passes, capsys):
    model = load_model(folder(name), dtype="float64", device="cpu", model_class=PLAIN)
    usual, static = (forced(model, RULE, each) for each in (False, True))
    torch.testing.assert_close(static, usual, atol=FAMILIES[name].atol, rtol=0)
    print(name, passes, capsys.readouterr().err)
    assert 0
