"""A first look at prefix attention and LaPA2, as one page: `make demo`.

    python analyses/demo/demo.py                              # results/demo/report.html
    python analyses/demo/demo.py --model gpt2 --out results/demo-gpt2

1. SmolLM2 writes 72 short texts: 12 of the paper's prompts, 2 attributes, and 3 arms
   (demo/demo.toml): without LaPA2, at alpha 1/2 in all heads, and at 1 in 24 heads that were chosen
   before (another model: at 1 in all heads). They are a run, which `lapa2 runs`, `report` and
   `score` read.
2. It reads long texts, which it wrote before (demo/texts.json), under alpha 0, 1/2 and 1: attention
   against length, same texts.
3. Scores, fits and verdicts are taken from these, and the page is drawn.

What is finished is never made again: stop it as you like, and run the same command again to resume.
Nothing is asked of the network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp.errors import Lapa2Error
from lapa2_interp.models.machine import n_cores

if TYPE_CHECKING:
    import xarray as xr

    from lapa2_interp.generation.cell import Cell
    from lapa2_interp.models.facts import Model
    from lapa2_interp.runs.grid import Grid
    from lapa2_interp.runs.worker import Worker

HERE = Path(__file__).resolve().parent
GRID, TEXTS = HERE / "demo.toml", HERE / "texts.json"
MODEL = "smollm2-135m"
ALPHAS = (0.0, 0.5, 1.0)
"""Each stored text is read under these."""
STAGES = 5
MOST_THREADS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo: 0, or 2 with one line that says what is wrong, or 130 when interrupted."""
    parser = ScriptOptions(
        str(__doc__), prog="demo.py", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/demo"),
        help="the run folder (default: results/demo)",
    )
    parser.add_argument(
        "--model", default=MODEL, help="a name of `lapa2 models`, a hub id or a folder"
    )
    parser.add_argument(
        "--length",
        type=whole_number(8),
        default=400,
        help="read the stored texts so far, in tokens (default: 400)",
    )
    parser.add_argument(
        "--threads", type=whole_number(), help="of the CPU (default: its cores, 4 at most)"
    )
    options = parser.parse_args(arguments)
    if options.model == MODEL:  # which is here
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        _demo(options.out, options.model, options.length, options.threads)
    except (Lapa2Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\nstopped; what is finished is kept: run the same command again to resume",
            file=sys.stderr,
        )
        return 130
    return 0


def _demo(out: Path, model: str, length: int, threads: int | None) -> None:
    began = perf_counter()
    page = out / "report.html"
    _say(
        f"""The demo of lapa2_interp: how much a language model attends to the prefix that steers it, and what LaPA2 changes.

  It takes    {_takes(model, page)}; stop it as you like; the same command resumes.
  It makes    {page}, one page that shows
              1 attention on the prefix against length, without LaPA2 and with it   5 the paper's claims, with verdicts
              2 the layers and heads it comes from                                   6 every decoding method, with a text
              3 the same prompt's texts side by side, coloured by attention
              4 accuracy, perplexity and diversity, with intervals
"""  # noqa: E501
    )
    _stage(1, f"the model, {model}")
    from lapa2_interp.files import write_text
    from lapa2_interp.models.load import load_tokenizer
    from lapa2_interp.runs.sweep import load_grids
    from lapa2_interp.runs.worker import Worker

    load_tokenizer(model)  # refuses an unknown model before anything else, and converts SmolLM2
    # Heads are chosen for one model.
    arms = {} if model == MODEL else {"augmentation": ["none", {"alpha": 0.5}, {"alpha": 1.0}]}
    (grid,) = load_grids(out, [str(GRID)], {"model": model, **arms})
    worker = Worker(threads=threads or min(MOST_THREADS, n_cores()))
    _stage(
        2,
        f"{_count(grid)} texts of {grid.cells[0].length} tokens, in {len(grid.cells)} cells"
        f" ({grid.cells[0].dtype})",
    )
    _write_texts(out, grid, worker)
    _stage(3, f"stored texts, read under alpha {', '.join(f'{a:g}' for a in ALPHAS)}")
    read = _text_traces(out, grid.cells[0], length, worker)
    _stage(4, "scores and verdicts")
    from analyses.demo import panels

    measured = panels.measure(out, grid)
    _stage(5, "the page")
    write_text(page, panels.page(out, grid, measured, read, perf_counter() - began))
    _say(f"""
{page.resolve()}

Try next{_where()}:
  lapa2 generate --attribute positive --prompt "Your own words" --alpha 0.5 --samples 4 --out results/mine
  lapa2 propositions --length 64 --out results/propositions
  make reproduce SCALE=tiny
""")  # noqa: E501


def _where() -> str:
    """A hint on the command's place, if the shell does not find it."""
    return (
        ""
        if shutil.which("lapa2")
        else f" (source {Path(sys.executable).parent / 'activate'}, then)"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stage(number: int, what: str) -> None:
    _say(f"[{number}/{STAGES}] {what}")


def _takes(model: str, page: Path) -> str:
    if page.is_file():
        return "seconds where nothing has changed"
    if model != MODEL:
        return "as many steps as SmolLM2 takes in one to two minutes on two cores"
    return (
        "two to three minutes on one core" if n_cores() == 1 else "one to two minutes on two cores"
    )


def _count(grid: Grid) -> int:
    return sum(cell.samples * len(cell.task.prompts.texts) for cell in grid.cells)


# --- 1: short texts, a run


def _write_texts(out: Path, grid: Grid, worker: Worker) -> None:
    from lapa2_interp.commands import command
    from lapa2_interp.errors import RunError, pluralize
    from lapa2_interp.runs.engines import InProcess
    from lapa2_interp.runs.fill import fill_run

    done = fill_run(out, [grid], InProcess(worker=worker), _say)
    if done.failed:
        raise RunError(
            f"{pluralize(len(done.failed), 'cell')} failed;"
            f" `{command('runs', out, traceback=True)}` says why, and the same command tries them"
            " again"
        )


# --- 2: long texts, read under every alpha


def _text_traces(out: Path, cell: Cell, length: int, worker: Worker) -> list[xr.Dataset]:
    """The trace of every stored text, computed if it is not stored yet."""
    import hashlib
    import json

    from lapa2_interp import __version__
    from lapa2_interp.files import atomic_write, write_netcdf
    from lapa2_interp.progress import progress_bar
    from lapa2_interp.runs.run import load_run

    weights = load_run(out).manifest(cell.key).model.weights
    stored = json.loads(TEXTS.read_text("utf-8"))["texts"]
    made = []
    with progress_bar(len(stored), "stored texts", "text") as bar:
        for text in stored:
            parts = [__version__, weights, cell.dtype, length, ALPHAS, text]
            key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
            file = out / "reading" / f"{key}.nc"
            if not file.is_file():
                trace = read_text(worker.model(cell), text, length)
                with atomic_write(file) as fresh:
                    write_netcdf(fresh, trace)
            made.append(_open(file))
            bar.update(1)
    return made


def read_text(model: Model, text: dict[str, Any], length: int) -> xr.Dataset:
    """The teacher-forced trace of a stored text under every alpha, in one batch, with the axes of
    `propositions.stack_alphas`.

    Args:
        text: prompt, attribute, text, and the tokens it was written with, which the model that
            wrote it reads as they are.
        length: Tokens, at most.
    """
    from lapa2_interp.bias.augmentation import Augmentation
    from lapa2_interp.bias.layout import Layout
    from lapa2_interp.generation.teacher_forcing import teacher_forced
    from lapa2_interp.methods.registry import load_task
    from lapa2_interp.models.card import identify
    from lapa2_interp.models.smollm2 import SMOLLM2
    from lapa2_interp.propositions.traces import stack_alphas

    prefix = load_task("sentiment").attributes[text["attribute"]].prefix
    branch = Layout.of(model.tokenizer, prefix, text["prompt"])
    ids = text["tokens"]
    if identify(model).name != SMOLLM2:
        ids = model.tokenizer(
            text["text"][len(text["prompt"]) :], add_special_tokens=False, verbose=False
        ).input_ids
    ids = ids[: min(length, model.cfg.n_ctx - branch.n_live + 1)]
    rules = [Augmentation(alpha=alpha) if alpha else None for alpha in ALPHAS]
    read = teacher_forced(model, branch, [ids] * len(ALPHAS), rules)
    alone = {
        alpha: read.isel(sample=[i]).assign_coords(sample=[0]) for i, alpha in enumerate(ALPHAS)
    }
    return stack_alphas(alone).assign_coords(prompt_text=("sample", [text["prompt"]]))


def _open(file: Path) -> xr.Dataset:
    import xarray as xr

    with xr.open_dataset(file, engine="h5netcdf") as stored:
        return stored.load()


if __name__ == "__main__":
    sys.exit(main())
