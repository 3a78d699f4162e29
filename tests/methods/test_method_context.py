"""Drafts and control tables of a method context: made once, shared and stored."""

import copy
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import fresh, load, plan
from oracle import oracle_logits

from lapa2_interp.attention import neurons
from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import (
    MethodError,
)
from lapa2_interp.files import one_process_at_a_time
from lapa2_interp.generation.plan import plan_batches as decoding_plan
from lapa2_interp.generation.sampling import draw, uniforms
from lapa2_interp.methods.base import Prepared
from lapa2_interp.methods.conditioning import NoControl
from lapa2_interp.methods.prepared import (
    released_sampler,
)
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.card import weights_id
from lapa2_interp.runs.method_context import DRAFT_SEEDS, ModelContext


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A separate cache for every test that prepares anything; SmolLM2 is loaded by others."""
    monkeypatch.setattr("lapa2_interp.runs.method_context.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_drafts_are_the_bare_models_and_kept(cache):
    """DATG's drafts are draws of the raw model under its sampler, by loops; asked again they come
    from the cache."""
    from lapa2_interp.methods.prepared import Drafting

    model = load("tiny-llama", "float64")
    context = ModelContext(model)
    texts = context.drafts(Drafting(), "The sea", 3, 6, seed=4)
    branch = Layout.of(model.tokenizer, None, "The sea")
    ends = set(context.end_ids)
    for number, text in enumerate(texts):
        tokens, uniform = [], uniforms(DRAFT_SEEDS + 4, "The sea", number, 6)
        while len(tokens) < 6 and not (tokens and tokens[-1] in ends):
            logits = oracle_logits(model, branch, tokens)[0][-1:]
            tokens.append(
                int(
                    draw(released_sampler(logits), torch.tensor([uniform[len(tokens)]]), top_k=200)[
                        0
                    ]
                )
            )
        plain = [token for token in tokens if token not in ends]
        assert text == model.tokenizer.decode([*context.ids("The sea"), *plain])[len("The sea") :]
    (file,) = (cache / "drafts").iterdir()
    file.write_text('["kept"]')
    assert context.drafts(Drafting(), "The sea", 3, 6, seed=4) == ["kept"]
    file.write_text('["kept", 1]')
    assert context.drafts(Drafting(), "The sea", 3, 6, seed=4) == texts, "damaged, and made again"
    assert len(context.drafts(Drafting(), "The sea", 3, 6, seed=5)) == 3, (
        "another seed is another question"
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert context.drafts(Drafting(), "The sea", 3, 6, seed=4) == texts
    finally:
        torch.set_num_threads(threads)
    assert len(list((cache / "drafts").iterdir())) == 3, "threads may decide a draw"


def test_workers_share_one_table_and_one_set_of_drafts(cache, monkeypatch):
    """Two contexts ask at once: one makes, and the other finds it made."""
    from lapa2_interp.methods.prepared import Drafting

    calls, real = [], neurons._log_probs_by_neuron
    draft = ModelContext._draft

    def slowly(*args):
        calls.append(args[2])
        time.sleep(0.05)
        return real(*args)

    def drafted(*args):
        calls.append("drafts")
        time.sleep(0.3)
        return draft(*args)

    monkeypatch.setattr(neurons, "_log_probs_by_neuron", slowly)
    monkeypatch.setattr(ModelContext, "_draft", drafted)
    model = load("tiny-gpt2")
    contexts = [ModelContext(model), ModelContext(copy.deepcopy(model))]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda context: context.promoting_neurons([5, 9], 3), contexts)
        assert torch.equal(one, two)
        assert calls == list(range(model.cfg.n_layers))
        del calls[:]
        one, two = pool.map(
            lambda context: context.drafts(Drafting(), "The sea", 2, 4, seed=1), contexts
        )
    assert one == two
    assert calls == ["drafts"]


def test_who_waits_for_another_process_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LAPA2_CACHE", str(tmp_path))
    file, notes = tmp_path / "kept" / "table.npz", ""

    def second():
        with one_process_at_a_time(file):
            return time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        with one_process_at_a_time(file):
            later = pool.submit(second)
            end = time.monotonic() + 20
            while "waiting" not in notes and time.monotonic() < end:
                time.sleep(0.01)  # a busy loop would keep the other thread waiting
                notes += capsys.readouterr().err
            left = time.monotonic()
        assert later.result(timeout=20) >= left
    assert notes == f"another process makes {file}; waiting for it\n"


def test_a_folder_without_locks_holds_nobody_up(tmp_path, monkeypatch):
    def refuses(*args, **options):
        # What filelock raises where a file system has no locks.
        raise NotImplementedError("no locks here")

    monkeypatch.setattr("filelock.FileLock.acquire", refuses)
    monkeypatch.setenv("LAPA2_CACHE", str(tmp_path / "new"))
    with (
        one_process_at_a_time(tmp_path / "new" / "table.npz"),
        pytest.raises(OSError, match="of the block"),
    ):
        raise OSError("of the block")


CALLS = []


@dataclasses.dataclass(frozen=True)
class Counting(NoControl):
    def prepare(self, context, task, attribute, prompt):
        return Prepared(context.cached("shared", lambda: CALLS.append(prompt) or prompt))


def test_plans_prepare_each_prompt_once():
    """Arms and attributes share the context, so that what prompts share is made once."""
    model = load("tiny-gpt2")
    context = ModelContext(model)
    for _ in range(2):
        todo = plan(
            model,
            Counting(),
            load_task("sentiment"),
            "positive",
            ["a b", "c d"],
            None,
            20,
            1,
            context=context,
        )
    assert CALLS == ["a b"]
    with pytest.raises(MethodError, match="prepares for its prompts; give plan_batches a context"):
        decoding_plan(model, todo.cell)
    assert [preparation.known for preparation in todo.prepared] == ["a b", "a b"]
    assert todo.summaries == {}


def test_the_cache_tells_models_apart(cache):
    """Random models share a description; their weights and vocabularies do not. An edited model is
    another one."""

    prints = {name: weights_id(load(name)) for name in ("tiny-gpt2", "tiny-llama", "tiny-neox")}
    assert len(set(prints.values())) == 3
    assert weights_id(load("tiny-gpt2")) == prints["tiny-gpt2"]
    edited = fresh("tiny-gpt2")
    with torch.no_grad():
        next(iter(getattr(edited, "original_model", edited).parameters())).mul_(1.01)
    assert weights_id(edited) != prints["tiny-gpt2"]
    tables = {name: ModelContext(load(name)).promoting_neurons([5, 9], 3) for name in prints}
    assert len(list((cache / "neurons").iterdir())) == 3
    assert tables["tiny-neox"][:, :, 1].max() < 64


def test_a_damaged_cache_is_made_again(cache):
    from lapa2_interp.methods.prepared import Drafting

    context = ModelContext(load("tiny-gpt2"))
    table, drafts = (
        context.promoting_neurons([5, 9], 3),
        context.drafts(Drafting(), "The sea", 2, 4, seed=1),
    )
    for folder in ("neurons", "drafts"):
        (file,) = (cache / folder).iterdir()
        file.write_bytes(file.read_bytes()[:7])
    fresh = ModelContext(load("tiny-gpt2"))
    assert torch.equal(fresh.promoting_neurons([5, 9], 3), table)
    assert fresh.drafts(Drafting(), "The sea", 2, 4, seed=1) == drafts


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    from lapa2_interp.errors import ModelError

    (tmp_path / "file").write_text("")
    monkeypatch.setattr("lapa2_interp.runs.method_context.cache_folder", lambda: tmp_path / "file")
    with pytest.raises(
        ModelError, match=r"cannot write the cache .*file.* set LAPA2_CACHE to a folder that can"
    ):
        ModelContext(load("tiny-gpt2")).promoting_neurons([5, 9], 3)
