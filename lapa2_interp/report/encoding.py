"""Encoding of attention for the page: whole numbers on a log scale, and arrays as one text.

A pattern entry p in [0, 1] is stored as

    0                                      below FLOOR: read as 0
    1 + round((top - 1) (1 - ln p / ln FLOOR))      else, with top = 2^bits - 1

so every stored number has the same relative error, `quantisation_error(bits)`.
"""

from __future__ import annotations

import base64
import gzip
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

Bits = Literal[8, 16]
FLOOR = 2.0**-24
"""The smallest attention above 0."""


def quantise(values: Float[np.ndarray, "*axes"], bits: Bits) -> np.ndarray:
    """Attention in [0, 1] as whole numbers of 8 or 16 bits, same shape."""
    top = 2**bits - 1
    with np.errstate(divide="ignore"):
        position = 1 + (top - 1) * (1 - np.log(values.astype(np.float64)) / math.log(FLOOR))
    codes = np.rint(np.maximum(position, 0))
    return np.minimum(codes, top).astype(np.uint8 if bits == 8 else np.uint16)


def quantisation_error(bits: Bits) -> float:
    """The largest relative error of a stored number above FLOOR."""
    return math.expm1(-math.log(FLOOR) / (2**bits - 2) / 2)


def encode_arrays(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, dict[str, Any]], str]:
    """Encode arrays of uint8, uint16 or float32 as one text; equal arrays give equal text.

    Returns:
        {"type", "length"} by name, in the order of the data; and base64 of gzip of the arrays'
        bytes, little-endian. All low bytes of 16-bit numbers stand before their high bytes, which
        compresses better.
    """
    index, parts = {}, []
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).ravel()
        index[name] = {"type": flat.dtype.name, "length": int(flat.size)}
        raw = flat.astype(flat.dtype.newbyteorder("<")).view(np.uint8)
        if flat.dtype == np.uint16:
            raw = raw.reshape(-1, 2).T.ravel()
        parts.append(raw.tobytes())
    squeezed = gzip.compress(b"".join(parts), compresslevel=9, mtime=0)
    return index, base64.b64encode(squeezed).decode("ascii")
