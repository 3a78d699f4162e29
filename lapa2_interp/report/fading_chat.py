"""How the span of a chat fades: its attention and its effect, answer by answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lapa2_interp.circuits.hidden_span import read_span
from lapa2_interp.errors import MethodError
from lapa2_interp.generation.arrange import chat_layout
from lapa2_interp.models.facts import Model
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.runs.manifest import check_weights

if TYPE_CHECKING:
    from lapa2_interp.runs.run import Run

READ = ("attention", "effect", "attention_before", "effect_before", "entropy_before")
"""Columns of what is read."""


@accepts_model_name
def chat_fade(model: Model, run: Run) -> pd.DataFrame:
    """How the span of chats, such as their system message, fades from answer to answer.

    Example:
        >>> from lapa2_interp import generate, load_model
        >>> from lapa2_interp.methods.chat import chat_task
        >>> from lapa2_interp.report import chat_fade
        >>> model = load_model("smollm2-135m")
        >>> chat = [
        ...     {"role": "system", "content": "You are a sailor."},
        ...     {"role": "user", "content": "Who are you?"},
        ... ]
        >>> task = chat_task(chat, later=["What do you do?"])
        >>> run = generate(model, method="chat", task=task, alpha=[0, 0.5], length=4)
        >>> chat_fade(model, run)[["arm", "turn"]].values.tolist()
        [['baseline', 1], ['baseline', 2], ['alpha 0.5 paper', 1], ['alpha 0.5 paper', 2]]

    Args:
        model: The run's.
        run: Chats of method `chat` that read earlier turns again (without `keep_turns`).

    Returns:
        One row for each answer, with the columns cell, arm, prompt, sample, turn, keys (before the
        answer's first token, with BOS), and what `circuits.read_span` says under the answer's own
        bias: attention and effect (means over steps), and attention_before, effect_before and
        entropy_before (at the first step, so before the answer). NaN for an empty answer.

    Raises:
        MethodError: Another method, or kept turns.
        TraceError: The run was made with other weights.
        RunError: A cell is not finished, or damaged.
    """
    tables = []
    for key, cell in run.by_key.items():
        if cell.branches[0].chat is None or cell.keeps_turns:
            method = f"method {cell.method!r}" if cell.method != "chat" else "keep_turns"
            raise MethodError(
                "the fade of a chat is read from runs of method 'chat' without keep_turns, found"
                f" {method}; generate it with method='chat'"
            )
        check_weights(run.manifest(key), model)
        texts = run.texts(key)
        if "turn" not in texts:
            texts["turn"] = 1
        rows: list[dict[str, float]] = [{} for _ in range(len(texts))]
        for _, chat in texts.groupby(["prompt", "sample"], sort=False):
            form = cell.branches[0].chat.filled(prompt=str(chat["prompt"].iloc[0]))
            answers = chat["continuation"].tolist()
            for turn, row in enumerate(texts.index.get_indexer(chat.index)):
                layout = chat_layout(model.tokenizer, form, answers[:turn])
                rows[row] = {"keys": len(layout)} | dict.fromkeys(READ, np.nan)
                if len(tokens := chat["tokens"].iloc[turn]):
                    reading = read_span(model, layout, tokens, cell.augmentation)
                    means = reading.attention.mean(), reading.effect.mean()
                    before = (values[0] for values in reading)
                    rows[row] |= dict(zip(READ, (*means, *before), strict=True))
        table = texts[["cell", "arm", "prompt", "sample", "turn"]].reset_index(drop=True)
        tables.append(table.join(pd.DataFrame(rows)))
    return pd.concat(tables, ignore_index=True)
