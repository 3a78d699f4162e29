"""A first look at prefix attention and LaPA2, as one page: `make demo`.

    python analyses/demo.py                              # results/demo/report.html
    python analyses/demo.py --model gpt2 --out results/demo-gpt2

1. SmolLM2 writes 60 short texts: 6 of the paper's prompts, 2 attributes, and 5 arms (demo/demo.toml): without LaPA2, at alpha 1/2
   and 1, and at 1/2 in the bottom or the top half of the layers. They are a run, which `lapa2 runs`, `report` and `score` read.
2. It reads long texts, which it wrote before (demo/texts.json), under alpha 0, 1/2 and 1: attention against length, same texts.
3. Scores, fits and verdicts are taken from these, and the page is drawn.

What is finished is never made again: stop it as you like, the same command goes on. Nothing is asked of the network.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr

    from lapa2_interp.attention.hooked import Model
    from lapa2_interp.experiments.engines import Job, Outcome, Worker
    from lapa2_interp.experiments.grids import Grid

HERE = Path(__file__).resolve().parent / "demo"
GRID, TEXTS = HERE / "demo.toml", HERE / "texts.json"
DTYPE = "float32"
ALPHAS = (0.0, 0.5, 1.0)
"""Each stored text is read under these."""
STAGES = 4
MOST_THREADS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0, or 2 with one line that says what is wrong, or 130 when it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="demo.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=Path("results/demo"), help="the run folder (default: results/demo)")
    parser.add_argument("--model", default="smollm2-135m", help="a name of `lapa2 models`, a hub id or a folder")
    parser.add_argument(
        "--length", type=int, default=400, help="read the stored texts so far, in tokens (default: 400)"
    )
    parser.add_argument("--workers", type=int, help="processes (default: 2, or 1 on one core or with a GPU)")
    options = parser.parse_args(arguments)
    for name, least in (("length", 8), ("workers", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, found {value}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to the other process
    from lapa2_interp.errors import Lapa2Error

    try:
        _demo(options.out, options.model, options.length, options.workers)
    except Lapa2Error as error:
        print(f"demo.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndemo.py: stopped; what is finished is kept, and the same command goes on", file=sys.stderr)
        return 130
    return 0


def _demo(out: Path, model: str, length: int, workers: int | None) -> None:
    began = perf_counter()
    cores = len(os.sched_getaffinity(0))
    page = out / "report.html"
    workers = workers or (1 if cores == 1 or Path("/dev/nvidiactl").exists() else 2)
    _say(
        f"""The demo of lapa2_interp: how much a language model attends to the prefix that steers it, and what LaPA2 changes.

  It takes    {_takes(cores)}; stop it as you like, the same command goes on.
  It makes    {page}, one page that shows
              1 attention on the prefix against length, without LaPA2 and with it   5 the paper's claims, with verdicts
              2 the layers and heads it comes from                                   6 LaPA2 in half of the layers
              3 the same prompt's texts side by side, coloured by attention          7 every decoding method, with a text
              4 accuracy, perplexity and diversity, with intervals
"""
    )
    with _pool(workers, max(1, min(MOST_THREADS, cores // workers)), now=not page.is_file()) as pool:
        _stage(1, f"the model, {model}")
        from lapa2_interp.experiments.grids import load_grid
        from lapa2_interp.models import load_tokenizer

        load_tokenizer(model)  # refuses an unknown model, and converts SmolLM2 once, not in every process
        grid = load_grid(str(GRID), {"model": model, "dtype": DTYPE})
        _stage(2, f"{_count(grid)} texts of {grid.cells[0].length} tokens, in {len(grid.cells)} cells")
        _write_texts(out, grid, pool)
        from lapa2_interp.errors import RunError

        jobs = _readings(out, grid, length, pool)
        _stage(3, f"scores; {len(jobs)} stored texts read under alpha {', '.join(f'{a:g}' for a in ALPHAS)}")
        sys.path.insert(0, str(HERE))
        import panels

        measured = panels.measure(out, grid, MOST_THREADS if workers == 1 else 1)
        files = _await(jobs)
        if not files:
            raise RunError(f"{TEXTS} has no texts")
        _stage(4, "the page")
        from lapa2_interp.experiments.sweep import durable_file

        durable_file(page, panels.page(out, grid, measured, [_open(file) for file in files], perf_counter() - began))
    _say(
        f"""
{page.resolve()}

Try next:
  lapa2 generate --attribute positive --prompt "Your own words" --alpha 0.5 --samples 4 --out results/mine
  lapa2 propositions --length 64 --out results/propositions
  make reproduce SCALE=tiny
"""
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stage(number: int, what: str) -> None:
    _say(f"[{number}/{STAGES}] {what}")


def _takes(cores: int) -> str:
    if cores == 1:
        return "about three minutes on one core"
    return "a minute to a minute and a half on two cores"


def _count(grid: Grid) -> int:
    return sum(cell.samples * len(cell.task.prompts.texts) for cell in grid.cells)


# --- processes: each loads the model once, for writing and for reading


_worker: Worker | None = None


def _begin(threads: int) -> None:
    """A process starts: the imports, which take longest, while the first one may still convert the model."""
    global _worker
    import transformer_lens.model_bridge  # noqa: F401

    from lapa2_interp.experiments.engines import Worker

    _worker = Worker(threads=threads)


def _begin_apart(threads: int) -> None:
    import multiprocessing
    import threading

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own is a semaphore that a killed process leaves behind
    threading.Thread(target=end_with_parent, daemon=True).start()
    _begin(threads)


def _do(job: Job) -> Outcome:
    assert _worker is not None
    return _worker.do(job)


class _Here(Executor):
    """An executor of this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> Future:
        done: Future = Future()
        try:
            done.set_result(fn(*args, **named))
        except Exception as error:
            done.set_exception(error)
        return done


def _start(workers: int, threads: int) -> list[Executor]:
    """Processes that do not hear Ctrl-C and end when this one does; this very process where one is enough."""
    import multiprocessing
    import signal
    from multiprocessing import resource_tracker

    if workers == 1:
        _begin(threads)
        return [_Here()]
    resource_tracker.ensure_running()  # it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        context = multiprocessing.get_context("spawn")
        found = [
            ProcessPoolExecutor(1, mp_context=context, initializer=_begin_apart, initargs=(threads,))
            for _ in range(workers)
        ]
        for pool in found:
            pool.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return list(found)


@contextmanager
def _pool(workers: int, threads: int, *, now: bool) -> Iterator[_Engine]:
    """The engine; its processes end with the block.

    Args:
        now: Start them at once: their imports take long. Otherwise when there is something for them to do.
    """
    engine = _Engine(workers, threads)
    try:
        if now:
            engine.pools  # noqa: B018
        yield engine
    finally:
        engine.close()


class _Engine:
    """Does the jobs of a sweep in processes that outlive it."""

    def __init__(self, workers: int, threads: int) -> None:
        self.slots, self._threads = workers, threads
        self._running: dict[Future, tuple[int, Job]] = {}
        self._latest: dict[int, str] = {}

    @cached_property
    def pools(self) -> list[Executor]:
        return _start(self.slots, self._threads)

    def close(self) -> None:
        """End the processes, whatever they do."""
        for pool in self.__dict__.get("pools", []):
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                with suppress(OSError):
                    process.kill()
            pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.clear()

    def submit(self, job: Job) -> None:
        busy = {number for number, _ in self._running.values()}
        free = [number for number in range(self.slots) if number not in busy]
        number = next((each for each in free if self._latest.get(each) == job.cell.key), free[0])
        self._latest[number] = job.cell.key
        self._running[self.pools[number].submit(_do, job)] = (number, job)

    def wait(self) -> Iterator[tuple[Job, Outcome]]:
        from lapa2_interp.experiments.engines import Failed

        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            _, job = self._running.pop(future)
            error = future.exception()
            yield job, future.result() if error is None else Failed(f"{type(error).__name__}: {error}")


# --- 1: short texts, a run


def _write_texts(out: Path, grid: Grid, pool: _Engine) -> None:
    from lapa2_interp.errors import RunError, counted
    from lapa2_interp.experiments.sweep import sweep

    done = sweep(out, [grid], pool, _say)
    if done.failed:
        raise RunError(
            f"{counted(len(done.failed), 'cell')} failed; `lapa2 runs {out} --traceback` says why, and the same "
            "command tries them again"
        )


# --- 2: long texts, read under every alpha


def _readings(out: Path, grid: Grid, length: int, pool: _Engine) -> list[tuple[Path, Future | None]]:
    """A file for every stored text, and what makes it where it is not there."""
    import hashlib
    import json

    from lapa2_interp import __version__
    from lapa2_interp.experiments.store import read_manifest

    weights = read_manifest(out / "cells" / grid.cells[0].key).model.weights
    found: list[tuple[Path, Future | None]] = []
    for number, text in enumerate(json.loads(TEXTS.read_text("utf-8"))["texts"]):
        parts = [__version__, weights, grid.cells[0].dtype, length, ALPHAS, text]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        file = out / "reading" / f"{key}.nc"
        job = None
        if not file.is_file():
            job = pool.pools[number % pool.slots].submit(_read, file, grid.cells[0], text, length)
        found.append((file, job))
    return found


def _read(file: Path, cell: Any, text: dict[str, Any], length: int) -> None:
    """One stored text under every alpha, as a file that is there whole or not at all."""
    from lapa2_interp.experiments.store import write_trace

    assert _worker is not None
    found = read_text(_worker.model(cell), text, length)
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f".writing-{file.name}")
    write_trace(fresh, found)
    fresh.replace(file)


def read_text(model: Model, text: dict[str, Any], length: int) -> xr.Dataset:
    """The trace of a stored text under every alpha, axes of `propositions.by_alpha`; all alphas share a batch.

    Args:
        text: prompt, attribute, text, and the tokens it was written with, which the model that wrote it reads as they are.
        length: Tokens, at most.
    """
    from lapa2_interp.augmentation import Augmentation
    from lapa2_interp.forcing import teacher_forced
    from lapa2_interp.layout import layout
    from lapa2_interp.models import SMOLLM2, model_card
    from lapa2_interp.propositions import by_alpha
    from lapa2_interp.tasks import load_task

    prefix = load_task("sentiment").attributes[text["attribute"]].prefix
    branch = layout(model.tokenizer, prefix, text["prompt"])
    ids = text["tokens"]
    if model_card(model).name != SMOLLM2:
        ids = model.tokenizer(text["text"][len(text["prompt"]) :], add_special_tokens=False, verbose=False).input_ids
    ids = ids[: min(length, model.cfg.n_ctx - branch.n_live + 1)]
    rules = [Augmentation(alpha=alpha) if alpha else None for alpha in ALPHAS]
    read = teacher_forced(model, branch, [ids] * len(ALPHAS), rules)
    alone = {alpha: read.isel(sample=[i]).assign_coords(sample=[0]) for i, alpha in enumerate(ALPHAS)}
    return by_alpha(alone).assign_coords(prompt_text=("sample", [text["prompt"]]))


def _await(jobs: Sequence[tuple[Path, Future | None]]) -> list[Path]:
    from lapa2_interp.decoding import progress_bar

    left = {job for _, job in jobs if job is not None}
    with progress_bar(len(jobs), "stored texts read") as bar:
        bar.update(len(jobs) - len(left))
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            for job in done:
                job.result()
            bar.update(len(done))
    return [file for file, _ in jobs]


def _open(file: Path) -> xr.Dataset:
    import xarray as xr

    with xr.open_dataset(file, engine="h5netcdf") as stored:
        return stored.load()


if __name__ == "__main__":
    sys.exit(main())
