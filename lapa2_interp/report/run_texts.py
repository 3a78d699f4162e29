"""Texts of the page: those of the arms side by side, with the attention of every token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lapa2_interp.attention.tables import branch_name, pooled
from lapa2_interp.bias.tokens import token_texts
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.runs.manifest import Manifest
from lapa2_interp.runs.run import Run, finished_cell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lapa2_interp.generation.cell import Cell

TOKEN_BYTES = 18
"""Approximate bytes of a token with its two masses in the page."""
MAX_PROMPTS = 8
"""Largest number of prompts with texts."""
MASS_SCALE = 1e-4
"""Attention masses are rounded to multiples of this."""


def texts_to_show(run: Run, room: int) -> tuple[int, dict[str, Any]]:
    """The texts of the page: sample 0 of the first prompts, of every arm.

    Args:
        room: Bytes for texts.

    Returns:
        The number of prompts; and {"scale", "top": {"p", "b"}, "groups": [...]}, a group {"setup",
        "task", "attribute", "method", "size", "prompts", "arms": [{"arm", "cell", "branch",
        "prefix", "texts"}]} and its "texts", by prompt, {"t": text of every token, "p" and "b":
        attention on prefix and BOS over the scale, at the step that predicted it, or null, "end":
        the reason why it ended}, or null. Of a chat this is the first answer, with "asked", the
        message in front of it.
    """

    groups = _group_cells(run)
    length = sum(cell.length for arms in groups.values() for cell in arms.values())
    n_prompts = max(1, min(MAX_PROMPTS, room // (TOKEN_BYTES * max(1, length))))
    shown: list[dict[str, Any]] = []
    for labels, arms in groups.items():
        prompts = list(
            dict.fromkeys(text for cell in arms.values() for text in cell.task.prompts.texts)
        )[:n_prompts]
        columns = []
        for arm, cell in arms.items():
            tokenizer = shared_tokenizer(cell.model)
            shown_texts = text_column(run, cell.key, prompts, tokenizer)
            columns.append({"arm": arm, "cell": cell.key} | shown_texts)
        names = dict(zip(("setup", "task", "attribute", "method", "size"), labels, strict=True))
        shown.append(names | {"prompts": prompts, "arms": columns})
    data: dict[str, Any] = {"scale": MASS_SCALE, "groups": shown}
    data["top"] = {
        name: colour_top([text[name] for text in each_text(data) if text[name]])
        for name in ("p", "b")
    }
    return max((len(group["prompts"]) for group in shown), default=0), data


def _group_cells(run: Run) -> dict[tuple[str, ...], dict[str, Cell]]:
    """Finished cells by setup, task, attribute, method and size, the longest texts first; then by
    arm, the paper's two first.

    Cells of different size have different batches, which alone may change a bfloat16 text, so their
    texts are not compared.
    """

    fields = (
        "model", "dtype", "model_class", "seed", "top_k", "temperature", "eos", "doubled_bos",
        "start",
    )  # fmt: skip
    values = {name: {getattr(cell, name) for cell in run.by_key.values()} for name in fields}
    differ = [name for name in fields if name == "model" or len(values[name]) > 1]
    groups: dict[tuple[str, ...], dict[str, Cell]] = {}

    def rank(cell: Cell) -> int:
        return ("baseline", cell.usual_arm, cell.arm).index(cell.arm)

    finished = sorted(run.finished.values(), key=lambda cell: (-cell.length, -cell.samples))
    for cell in sorted(finished, key=rank):
        setup = ", ".join(
            ("" if name == "model" else f"{name} ") + str(getattr(cell, name)) for name in differ
        )
        method = f"{cell.method} ({cell.variant})" if cell.variant else cell.method
        labels = (
            setup,
            cell.task.name,
            cell.attribute,
            method,
            f"{cell.samples} x {cell.length} tokens",
        )
        groups.setdefault(labels, {}).setdefault(cell.arm, cell)
    return groups


def text_column(
    run: Run, key: str, prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """A cell's texts with the attention that colours them, the branch of the attention, and its
    prefix."""

    made = finished_cell(run, key)
    table, trace = made.texts.reset_index(drop=True), made.trace
    texts: list[dict[str, Any] | None] = []
    branch, has_prefix = "", False
    masses: dict[str, np.ndarray] = {}
    if trace is not None:
        branch = branch_name(trace)
        part = trace.sel(branch=[branch])
        has_prefix = bool((part["l_pre"] > 0).any())
        names = ({"p": "prefix"} if has_prefix else {}) | ({"b": "bos"} if "bos" in part else {})
        masses = {short: pooled(part, name)[0] for short, name in names.items()}
    for prompt in prompts:
        rows = table.index[(table["prompt"] == prompt) & (table["sample"] == 0)]
        if not len(rows):
            texts.append(None)
            continue
        row = table.loc[rows[0]]
        tokens = [int(token) for token in row["tokens"]]
        text: dict[str, Any] = {
            "t": token_texts(tokenizer, prompt, tokens),
            "end": str(row["finish"]),
        }
        if run.by_key[key].is_chat:  # an answer begins in a line of its own
            text["asked"] = f"{row.get('message', prompt)}\n"
        for name in ("p", "b"):
            mass = masses[name][rows[0]][: len(tokens)] if name in masses else None
            text[name] = (
                None if mass is None else [round(float(value) / MASS_SCALE) for value in mass]
            )
        texts.append(text)
    return {
        "branch": branch,
        "prefix": _prefix_text(run.manifest(key), branch) if has_prefix else "",
        "texts": texts,
    }


def _prefix_text(manifest: Manifest, branch: str) -> str:
    """The text of a branch's prefix, or the name of a soft one."""
    prefix = manifest.branches.get(branch)
    return f"“{prefix}”" if isinstance(prefix, str) else str(prefix)


def each_text(data: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """All texts of `texts_to_show`."""
    return (
        text
        for group in data["groups"]
        for arm in group["arms"]
        for text in arm["texts"]
        if text is not None
    )


def colour_top(masses: Sequence[Sequence[int]]) -> int:
    """The end of the colour scale: the 99th percentile of the masses, rounded up to .05."""
    if not masses:
        return 0
    step = round(0.05 / MASS_SCALE)
    return max(1, math.ceil(float(np.percentile(np.concatenate(masses), 99)) / step)) * step
