"""The processor of this machine and its speed, which is measured and never read from flags.

Processors without bfloat16 units compute in bfloat16 too, several times slower than in float32.
`dtype = "auto"` means bfloat16 where that is the faster of the two. Measurements are stored in the
user's cache (machine.json) under the kind of processor, so that machines that share a home folder,
and emulated ones, each have their own numbers.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from time import thread_time
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from lapa2_interp._util.parsing import read_text
from lapa2_interp.errors import ModelError, parameter, unknown_choice
from lapa2_interp.files import cache_folder, write_json

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
AUTO_DTYPE = "auto"
DtypeOrAuto = Literal["auto", Dtype]
ModelClass = Literal["TransformerBridge", "HookedTransformer", "TransformersModel"]
Attn = Literal["auto", "matrix", "fused"]
ISA_VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Environment variables that decide which instructions the numerical libraries use."""
FASTER_BELOW = 0.9
"""bfloat16 is chosen if its products take less than this share of float32's time."""
SLOW_ABOVE = 1.25
"""A named dtype is called slow if its products take more than this multiple of float32's time."""
ROWS, WIDTH, MATRICES = 24, 1024, 8
"""Rows of the timed products, and size and number of the square matrices: 32 MiB in float32, more
than a core's cache holds."""


def check_attn(attn: str, model_class: str = "TransformersModel") -> None:
    """Refuse a way of attention that a class of models does not have.

    Raises:
        ModelError: It is unknown, or without the matrix of scores, on which hooks are.
    """
    if attn not in get_args(Attn):
        raise ModelError(unknown_choice("attn", attn, get_args(Attn)))
    if attn == "fused" and model_class != "TransformersModel":
        raise ModelError(
            f"a {model_class} has hooks on the matrix of scores, so {parameter('attn')} is auto or"
            f" matrix; give {parameter('model_class', 'TransformersModel')} for"
            f" {parameter('attn', 'fused')}"
        )


def processor_kind(device: str = "cpu") -> str:
    """A device's kind of processor in one line: model, instruction set in use, and restrictions by
    the environment.

    Args:
        device: cpu, cuda, cuda:1, ...
    """
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    if not device.startswith("cpu"):
        return device
    limits = [f"{name}={os.environ[name]}" for name in ISA_VARIABLES if os.environ.get(name)]
    return ", ".join([_processor(), torch.backends.cpu.get_cpu_capability(), *limits])


@cache
def _processor() -> str:
    """Name, family, model and stepping: clouds give several processors one name."""
    wanted = ("model name", "cpu family", "model", "stepping")
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                fields.setdefault(name.strip(), value.strip())
    return (
        " ".join(fields[name] for name in wanted if name in fields)
        or platform.processor()
        or platform.machine()
    )


# --- stored measurements


def stored_measurement(device: str, name: str) -> tuple[float, ...] | None:
    """Numbers that were measured on this kind of processor; None if there are none, or their file
    is damaged."""
    return _read_measurements().get(processor_kind(device), {}).get(name)


def store_measurement(device: str, name: str, numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Store measured numbers for this kind of processor, unless the cache cannot be written.

    Returns:
        The numbers as they are stored, to four digits.
    """
    known = _read_measurements()
    stored = known.setdefault(processor_kind(device), {})[name] = tuple(
        float(f"{number:.4g}") for number in numbers
    )
    with suppress(OSError):
        write_json(_measurements_file(), known)
    return stored


def _measurements_file() -> Path:
    return cache_folder() / "machine.json"


def _read_measurements() -> dict[str, dict[str, tuple[float, ...]]]:
    with suppress(OSError, ValueError):
        form = TypeAdapter(dict[str, dict[str, tuple[float, ...]]])
        measurements = form.validate_json(read_text(_measurements_file()))
        return {
            kind: {name: ns for name, ns in by_name.items() if min(ns, default=0) > 0}
            for kind, by_name in measurements.items()
        }
    return {}


# --- precision


def resolve_dtype(dtype: object, device: str | None = None) -> Dtype:
    """The name of a dtype, given as a name or as torch's; "auto" is bfloat16 where this device
    computes faster in it, else float32.

    Args:
        device: Device that will compute; CUDA when there is one, by default.

    Raises:
        ModelError: Unknown dtype.
    """
    name: Any = str(dtype).removeprefix("torch.")
    if name == AUTO_DTYPE:
        name = faster_dtype(device)
    if name not in get_args(Dtype):
        raise ModelError(unknown_choice("dtype", name, (AUTO_DTYPE, *get_args(Dtype))))
    return name


def faster_dtype(device: str | None = None) -> str:
    """bfloat16 or float32: on a CPU by timing both, on a GPU bfloat16 where it is native."""
    import torch

    device = default_device() if device in (None, AUTO_DTYPE) else str(device)
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if not device.startswith("cpu"):
        return "float32"
    return "bfloat16" if slowdown("bfloat16") < FASTER_BELOW else "float32"


def slowdown(dtype: str) -> float:
    """Time of a matrix product of 24 rows in a dtype on this CPU, as a multiple of float32's.

    Timed once per kind of processor, in half a second, on one thread.
    """
    name = f"{dtype} / float32"
    return (
        stored_measurement("cpu", name)
        or store_measurement("cpu", name, (_time_slowdown(dtype, processor_kind("cpu")),))
    )[0]


@cache
def _time_slowdown(dtype: str, kind: str) -> float:
    return matmul_seconds(dtype) / matmul_seconds("float32")


def slow_dtype_note(dtype: str, device: str | None = None) -> str | None:
    """One line about a dtype that is slow on this CPU; None for other dtypes and devices."""
    device = default_device() if device in (None, AUTO_DTYPE) else str(device)
    if not device.startswith("cpu") or dtype not in ("bfloat16", "float16"):
        return None
    times = slowdown(dtype)
    if times < SLOW_ABOVE:
        return None
    return (
        f"{dtype} is slow on this processor: a product takes {times:.1f} times as long as in"
        " float32"
    )


def print_if_slow(dtype: str, device: str | None = None) -> None:
    """Print `slow_dtype_note`, if there is one, on standard error."""
    if note := slow_dtype_note(dtype, device):
        print(f"note: {note}", file=sys.stderr)


def n_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_memory() -> int:
    """Bytes of memory: of one GPU where there is one."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return usable_memory()


def usable_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or the limit of its control group;
    no limit where the system does not tell it (Windows)."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            memory = min(memory, int(Path(file).read_text("utf-8")))
    return memory


def peak_memory(device: str = "cpu") -> int:
    """Peak memory of this process in bytes: on its GPUs, or in main memory; 0 where the system does
    not tell it (Windows)."""
    if device != "cpu":
        import torch

        return sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means that main memory, or that of a GPU, is used up."""
    # PyTorch's allocator of main memory raises a plain RuntimeError.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)
    )


def default_device() -> str:
    """cuda if there is one, else cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def matmul_seconds(dtype: str) -> float:
    """Seconds of `MATRICES` products [ROWS, WIDTH] x [WIDTH, WIDTH] on one thread of the CPU, the
    least of several tries. They are the computing time of the thread, which does not depend on
    other processes."""
    import torch

    with torch_threads(1):
        x = torch.full((ROWS, WIDTH), 0.5, dtype=getattr(torch, dtype))
        weights = [torch.full((WIDTH, WIDTH), 1 / WIDTH, dtype=x.dtype) for _ in range(MATRICES)]
        least = float("inf")
        for _ in range(5):  # the first one is a warm-up
            began, y = thread_time(), x
            for weight in weights:
                y = torch.nn.functional.linear(y, weight)
            y.sum().item()
            least = min(least, thread_time() - began)
    return least


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """Let PyTorch use n threads in the block. If there are more threads than idle cores, they wait
    for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
