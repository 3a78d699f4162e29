"""Jobs that cost milliseconds: a worker that makes batches without a model, and engines around it."""

import json
from collections import Counter
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import xarray as xr
from test_cluster import Actor, Machines

from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.models.card import ModelCard
from lapa2_interp.models.machine import processor_kind
from lapa2_interp.runs.engines import InProcess, LocalPool, WorkerLost
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.grid import Grid
from lapa2_interp.runs.manifest import BatchRecord, library_versions, source_commit
from lapa2_interp.runs.ray import RayPool
from lapa2_interp.runs.run import load_run
from lapa2_interp.runs.store import Failure, FinishedBatch

CARD = ModelCard(
    name="tiny-gpt2", weights="random, seed 0", architecture="none", model_class="none",
    dtype="float32", device="cpu", n_layers=1, n_heads=1, n_ctx=64, start_token="",
    end_ids=(), end_tokens=(),
)  # fmt: skip


@cache
def provenance():
    return {
        "commit": source_commit(), "versions": library_versions(), "threads": 1, "model": CARD,
        "processor": processor_kind("cpu"), "branches": {"prefix": "Very positive:"},
    }  # fmt: skip


def batch_of(cell, number):
    """A batch of a cell: texts and a trace that depend on the cell, the prompt and the sample."""
    pairs = [(prompt, sample) for prompt in cell.prompts for sample in range(cell.samples)]
    size = cell.max_rows
    rows = []
    for prompt, sample in pairs[number * size : (number + 1) * size]:
        tokens = [ord(letter) % 97 for letter in f"{cell.key}{prompt}{sample}"][-4:]
        continuation = " ".join(map(str, tokens))
        about = {"prompt": prompt, "attribute": cell.attribute, "sample": sample}
        text = {"text": prompt + continuation, "continuation": continuation, "tokens": tokens}
        rows.append(about | text | {"n_tokens": 4, "finish": "length"})
    record = BatchRecord(
        **provenance(), key=cell.key, n_batches=-(-len(pairs) // size), n_texts=len(rows),
        created=datetime.now(UTC), seconds=0.0, new_tokens=4 * len(rows),
    )  # fmt: skip
    trace = None
    if cell.trace != "none":
        sums = np.float32([[row["tokens"] for row in rows]]) / 100
        trace = xr.Dataset({"prefix": (("branch", "sample", "step"), sums)})
    return FinishedBatch(pd.DataFrame(rows), trace, record)


class FakeWorker:
    """Makes batches. `faults` says what happens to a batch instead, the first time, or always: an
    exception is the error of a worker, or a `WorkerLost` its end."""

    def __init__(self, faults=(), always=False, before=lambda number: None):
        self.faults, self.always, self.before = dict(faults), always, before
        self.made, self.begun = [], Counter()

    def outcome(self, cell, number):
        """A finished batch, a `Failure`, or an exception by which the worker has ended."""
        self.before(len(self.begun))
        self.begun[cell.key, number] += 1
        fault = self.faults.get((cell.key, number))
        if fault is None or (self.begun[cell.key, number] > 1 and not self.always):
            self.made.append((cell.key, number))
            return batch_of(cell, number)
        if isinstance(fault, WorkerLost):
            return fault
        return Failure(when=datetime.now(UTC), traceback=f"Traceback\n{fault!r}")

    def future(self, cell, number, lost=lambda error: error):
        """The outcome, as a future that is done."""
        future, outcome = Future(), self.outcome(cell, number)
        if isinstance(outcome, Exception):
            future.set_exception(lost(outcome))
        else:
            future.set_result(outcome)
        return future


class Serial(InProcess):
    """The engine of one process."""

    def __init__(self, worker):
        self.worker = worker

    def submit(self, cell, number, packing, progress):
        return self.worker.future(cell, number)


@cache
def three_batches():
    """A cell of 6 texts in 3 batches."""
    prompts = ["The lake", "The sea", "The hut"]
    asked = {"attribute": "positive", "prompts": prompts, "samples": 2, "max_rows": 2}
    return cell_of("tiny-gpt2", length=12, dtype="float32", trace="pooled", **asked)


def in_batches(folder="run"):
    """A run of this cell."""
    fill_run(Path(folder), [Grid("one", "", (three_batches(),))], Serial(FakeWorker()))
    return load_run(folder)


def edit(file, **fields):
    """Other values of fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


class Pool(LocalPool):
    """The engine of several processes, whose processes are none."""

    def __init__(self, worker):
        super().__init__(3, "cpu")
        self.worker = worker

    def _new(self, number):
        return SimpleNamespace(
            submit=lambda cell, number, packing: self.worker.future(cell, number),
            is_over=False,
            end=lambda: None,
        )


class Shuffling(Serial):
    """Three workers whose batches end in another order than they began."""

    def __init__(self, worker):
        super().__init__(worker)
        self.pending, self.before = [], 0

    def slots(self):
        if self.pending and len(self.pending) in (3, self.before):
            shown, done = self.pending.pop(len(self.pending) // 2)
            if error := done.exception():
                shown.set_exception(error)
            else:
                shown.set_result(done.result())
        self.before = len(self.pending)
        return 3

    def submit(self, cell, number, packing, progress):
        self.pending.append((Future(), self.worker.future(cell, number)))
        return self.pending[-1][0]


def cluster_of(worker, head, monkeypatch):
    """The engine of a Ray cluster, on a stand-in for Ray with a machine of two cores."""
    from lapa2_interp.runs import ray as clusters

    class Making(Actor):
        def __init__(self):
            super().__init__()
            batch = SimpleNamespace
            self.remote_batch = SimpleNamespace(
                remote=lambda cell, number, packing: batch(
                    future=lambda: worker.future(cell, number, lost)
                )
            )

    class Cluster(Machines):
        def start(self, *settings):
            self.actors.append(Making())
            return self.actors[-1]

    machines = Cluster(head, [{"CPU": 2.0}])
    machines.n_ready = 2

    def lost(error):
        return machines.exceptions.RayActorError()

    monkeypatch.setattr(clusters, "_join", lambda address: machines)
    return RayPool()
