"""FreeCtrl's driver around the decode loop (`generation.loop`).

The driver sets neurons at every step, and draws texts that are not accepted again.

1. The loop reads its rows through `ControlledRows`: before every pass, the score of the text so far
   gives the value w of the control centre's neurons, and the whole text is read again with them.
2. Of the finished texts those stay that `FreeCtrl.accepts` takes; the others are drawn again with
   other random numbers, `trials` times at most.

The formulas are in `methods.freectrl`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from lapa2_interp.attention.cache import rows_in_memory
from lapa2_interp.attention.neurons import set_neurons
from lapa2_interp.attention.recomputed_rows import RecomputedRows
from lapa2_interp.attention.trace import TracedTexts, concat_traces, join_traces
from lapa2_interp.generation.batch import Batch, BatchPlan
from lapa2_interp.generation.loop import decode_samples
from lapa2_interp.methods.freectrl import ControlCentre, FreeCtrl, TextMonitor
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.progress import hidden_bar


class ControlledRows(RecomputedRows):
    """Rows without a cache, whose every pass has the control centre's neurons set.

    Args:
        controls: What was prepared for the prompt of each row.
    """

    def __init__(self, model: Model, method: FreeCtrl, controls: Sequence[ControlCentre]) -> None:
        super().__init__(model)
        self.method, self.monitor = method, TextMonitor.of(controls)

    def expand(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        super().expand(index, capacity)
        self.monitor = self.monitor.expanded(index)

    def read_tokens(
        self, tokens: Int[Tensor, "row query"], keep: int = 1
    ) -> Float[Tensor, "row last vocab"]:
        self.monitor = self.monitor.read(tokens[:, 0])
        return super().read_tokens(tokens, keep)

    def _read(self, keep: int) -> Float[Tensor, "row query vocab"]:
        if not (centre := self.monitor.control.centre):
            return super()._read(keep)
        value = self.monitor.value(self.method.u)
        with set_neurons(self.model, centre, value, self.method.at):
            return super()._read(keep)


def decode_freectrl(model: Model, plan: BatchPlan, batch: Batch, bar: tqdm) -> TracedTexts:
    """The texts of a batch, each drawn until it is accepted; after the last trial a text stays
    anyway."""
    method, pairs = plan.method, batch.pairs
    assert isinstance(method, FreeCtrl)
    tables, traces, order = [], [], list[int]()
    at_once = len(pairs) if facts_of(model).backend != "hooked" else _hooked_rows(model, plan)
    for first in range(0, len(pairs), at_once):
        waiting = list(range(first, min(first + at_once, len(pairs))))
        for trial in range(method.trials):
            tried = plan.assemble_batch([pairs[i] for i in waiting], trial)
            controls = [prepared.known for prepared in tried.prepared]
            rows = ControlledRows(model, method, controls)
            of_trial = bar if trial == 0 else hidden_bar()
            drawn = decode_samples(model, plan, tried, of_trial, rows)
            table = drawn.texts
            texts = table["prompt"] + table["continuation"]
            accepted = np.array(
                [
                    trial + 1 == method.trials or method.accepts(controls[owner], text, tokens)
                    for owner, text, tokens in zip(tried.owner, texts, table["tokens"], strict=True)
                ]
            )
            order += [i for i, good in zip(waiting, accepted, strict=True) if good]
            waiting = [i for i, good in zip(waiting, accepted, strict=True) if not good]
            tables.append(table[accepted])
            if drawn.trace is not None:
                traces.append(drawn.trace.isel(sample=accepted))
            if not waiting:
                break
    in_order = np.argsort(order)
    table = pd.concat(tables, ignore_index=True).iloc[in_order].reset_index(drop=True)
    if not traces:
        return TracedTexts(table, None)
    return TracedTexts(table, join_traces([concat_traces(traces).isel(sample=in_order)], table))


def _hooked_rows(model: Model, plan: BatchPlan) -> int:
    """Rows that a HookedTransformer reads at once: it computes the logits of all keys."""
    if plan.cell.max_rows:
        return plan.cell.max_rows
    keys = max(
        len(layout) + new
        for row in plan.arrangement.layouts
        for layout, new in zip(row, plan.arrangement.steps, strict=True)
    )
    return rows_in_memory(model, keys, keys)
