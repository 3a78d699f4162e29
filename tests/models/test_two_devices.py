"""A model whose layers are on two devices, as accelerate places it on two GPUs.

The devices are pretended: `toy:0` and `toy:1` compute on the CPU, and refuse an operation on
tensors of both, as CUDA does.
"""

import pytest
import torch
from conftest import TINY, decode_plan, load, plan, soft_set
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lapa2_interp import Augmentation
from lapa2_interp.attention.cached_heads import SlotLayer
from lapa2_interp.attention.neurons import promoting_neurons
from lapa2_interp.methods.registry import get_for_task, load_task
from lapa2_interp.models import load as models
from lapa2_interp.models.card import identify

aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default)


class Toy(torch.Tensor):
    """A tensor on a pretended device."""

    @staticmethod
    def __new__(cls, inner, device):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), dtype=inner.dtype, device=device, **layout
        )

    def __init__(self, inner, device):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    asked = kwargs.get("device")
    if asked is not None:
        device = torch.device(asked)
    elif func in (aten.copy_.default, aten._to_copy.default, *INDEXING):
        device = args[0].device
    else:
        device = next(
            (tensor.device for tensor in tensors if isinstance(tensor, Toy)), torch.device("cpu")
        )
    if func in INDEXING:  # an index may also be on the CPU
        indices = [
            index
            for index in tree_leaves(args[1])
            if isinstance(index, torch.Tensor) and index.device.type != "cpu"
        ]
        together = indices + [values for values in args[2:3] if values.dim()]
    elif func in (aten.copy_.default, aten._to_copy.default):
        together = []
    else:
        together = [
            tensor for tensor in tensors if tensor.dim()
        ]  # a number on the CPU goes with any device
    if any(tensor.device != device for tensor in together):
        raise RuntimeError(
            f"{func}: tensors on {[str(tensor.device) for tensor in tensors]}, wanted on {device}"
        )
    args, kwargs = tree_map(
        lambda leaf: leaf.inner if isinstance(leaf, Toy) else leaf, (args, kwargs)
    )
    made = func(*args, **kwargs | ({"device": "cpu"} if asked is not None else {}))
    if device.type == "cpu":
        return made
    same = {
        id(toy.inner): toy for toy in tensors if isinstance(toy, Toy)
    }  # what was written in place

    def wrapped(leaf):
        return (
            same[id(leaf)]
            if id(leaf) in same
            else Toy(leaf, device)
            if isinstance(leaf, torch.Tensor)
            else leaf
        )

    return tree_map(wrapped, made)


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


class Below(TorchFunctionMode):
    """What torch does on a device without dispatching it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "toy":
            device = kwargs.pop("device")
            return torch.tensor(*args, **kwargs).to(device)
        if func is torch.Tensor.tolist and isinstance(args[0], Toy):
            return args[0].inner.tolist()
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            parts = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
            value = args[2:]
            if (
                value
                and not isinstance(value[0], torch.Tensor)
                and any(isinstance(p, torch.Tensor) for p in parts)
            ):
                value = (torch.tensor(value[0], dtype=args[0].dtype),)
            args = (args[0], parts, *value)
        return func(*args, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def toys():
    backend_registration._setup_privateuseone_for_python_backend("toy")


@pytest.fixture
def two(tiny, monkeypatch):
    """A tiny model over two devices, which are there as long as the fixture."""
    from accelerate import hooks, infer_auto_device_map

    load(tiny)  # with the real load_transformers
    network, tokenizer, weights = models.load_transformers(tiny)
    network.tie_weights()
    total = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    room = {0: int(total * 0.6), 1: int(total * 2)}
    device_map = infer_auto_device_map(
        network, max_memory=room, no_split_module_classes=list(network._no_split_modules)
    )
    places = {name: torch.device("toy", index) for name, index in device_map.items()}
    assert len(set(places.values())) == 2
    moved = {}
    for name, module in network.named_modules():
        for kind in (module._parameters, module._buffers):
            for own, tensor in kind.items():
                if tensor is not None:
                    device = next(
                        part_device
                        for part, part_device in places.items()
                        if f"{name}.{own}".startswith(f"{part}.")
                    )
                    toy = Toy(tensor.detach(), device)
                    toy = (
                        torch.nn.Parameter(toy, requires_grad=False)
                        if kind is module._parameters
                        else toy
                    )
                    kind[own] = moved.setdefault(id(tensor), toy)
    monkeypatch.setattr(
        hooks, "set_module_tensor_to_device", lambda *_, **__: None
    )  # they are where they should be
    with torch.no_grad(), Dispatch(), Below():
        hooks.attach_align_device_hook_on_blocks(
            network, {**places, "": places[next(iter(places))]}, offload=dict.fromkeys(places, False),
            skip_keys=network._skip_keys_device_placement,
        )  # fmt: skip
        network.hf_device_map = {name: str(device) for name, device in places.items()}
        monkeypatch.setattr(models, "load_transformers", lambda *_: (network, tokenizer, weights))
        yield models.load_model(tiny, device="auto")


@pytest.fixture(params=TINY)
def tiny(request):
    return request.param


TARGET = Augmentation(alpha=1, law="target", tau=0.3)
"""Reads the scores of every layer, on the layer's device."""


@pytest.mark.parametrize(
    ("tiny", "method", "rule"),
    [
        ("tiny-gpt2", "preadd", Augmentation(alpha=1.0)),
        pytest.param("tiny-neox", "preadd", Augmentation(alpha=1.0), marks=pytest.mark.slow),
        pytest.param("tiny-llama", "soft", Augmentation(alpha=1.0), marks=pytest.mark.long),
        ("tiny-llama", "prefix", TARGET),
    ],
)
def test_two_devices_make_the_texts_and_traces_of_one(
    two, tiny, method, rule, tmp_path, monkeypatch
):
    # A toy cannot be a view of shared heads, whose products sum in another order.
    monkeypatch.setattr(SlotLayer, "shared", property(lambda self: False, lambda *_: None), False)
    task, made = load_task("sentiment"), []
    own = {"prefixes": soft_set(tmp_path, load(tiny), task)} if method == "soft" else {}
    chosen = get_for_task("prefix" if method == "soft" else method, task, **own)
    assert (str(two.cfg.device), two.cfg.n_devices, str(load(tiny).cfg.device)) == (
        "toy:0",
        2,
        "cpu",
    )
    # Packed weights are for the CPU's products, and round otherwise.
    unpacked = identify(load(tiny)).model_copy(update={"prepacking": "none"})
    monkeypatch.setattr(load(tiny), "lapa2_card", unpacked)
    for model in (two, load(tiny)):
        prompts, pairs = ("The lake", "A lake"), ((0, 1), (3, 2))
        todo = plan(model, chosen, task, "positive", prompts, rule, 11, 2, patterns=pairs)
        made.append(decode_plan(model, todo))
    assert made[0].texts.equals(made[1].texts)
    assert made[0].trace.equals(made[1].trace)


def test_neurons_are_found_on_two_devices(two, tiny):
    one, both = (
        promoting_neurons(load(tiny), [3], [5, 6], 2),
        promoting_neurons(two, [3], [5, 6], 2),
    )
    assert torch.equal(one[0], both[0])
    assert torch.equal(one[1], both[1])
