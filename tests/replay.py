"""A stand-in for CUDA graphs on a CPU: it notes the operations of one pass with their tensors, and
repeats them on the same tensors without the model's Python code."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapa2_interp.attention import static_rows

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
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def replayed(run):
    """A function as a graph would repeat it."""
    with Notes() as notes:
        result = run()

    def replay():
        for func, args, kwargs, stored in notes.calls:
            for old, new in zip(
                tree_leaves(stored), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                # Views, and tensors that are changed in place, lie where they lay.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return result

    return replay


@contextmanager
def graphs_on_a_cpu():
    """Buckets of few keys, so that short texts cross them, and graphs on the CPU. Gives the widths
    of all static passes ("run") and of those that were captured."""
    widths = {"run": [], "captured": []}
    step = static_rows.StaticStep

    def noting(name, real):
        def call(self, width):
            widths[name].append(width)
            return real(self, width)

        return call

    static_rows.print_note.cache_clear()
    with (
        patch.object(static_rows, "SMALLEST_BUCKET", 4),
        patch.dict(static_rows.CAPTURE, {"cpu": replayed}),
        patch.object(step, "run", noting("run", step.run)),
        patch.object(step, "_pass", noting("captured", step._pass)),
    ):
        yield widths
