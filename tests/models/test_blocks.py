"""Blocks on a model: in any order, from one thread, and never passed by without a word."""

import asyncio
import copy
import gc
import threading
from contextlib import contextmanager

import pytest
import torch
from conftest import MODEL_CLASSES, load, soft_prefix
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.hooked import edit_scores
from lapa2_interp.attention.recomputed_rows import RecomputedRows
from lapa2_interp.errors import DeadHookError, ModelError
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.facts import TransformersModel, facts_of
from lapa2_interp.prefixes.likelihood import TextRows, text_nll

PLAIN = "TransformersModel"
every_class = pytest.mark.parametrize("kind", [*MODEL_CLASSES, PLAIN])
STRONG, WEAK = Augmentation(alpha=2.0), Augmentation(alpha=0.5, law="scale")


def loaded(kind):
    model = load("tiny-gpt2", "float64", kind)
    return model, Layout.of(model.tokenizer, "Very positive:", "The lake")


def network(**more):
    """A random GPT-2 of this test's own."""
    sizes = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", **sizes | ends | more)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return made.double().eval()


@torch.no_grad()
def read(model, ids, **settings):
    output = model(ids, **settings)
    return output if isinstance(output, torch.Tensor) else output.logits


def state(model):
    """What a block might leave behind."""
    net = facts_of(model).network
    points = [len(point.fwd_hooks) for point in model.hook_dict.values()]
    modules = [(len(part._forward_pre_hooks), len(part._forward_hooks)) for part in net.modules()]
    config = getattr(net, "config", None)
    return points, modules, getattr(config, "_attn_implementation", None)


def enter(model, rule, layout):
    block = augmented(model, rule, layout)
    block.__enter__()
    return block


@every_class
def test_blocks_close_in_any_order(kind):
    model, layout = loaded(kind)
    before, plain = state(model), read(model, layout.tensor)
    alone = {}
    for rule in (STRONG, WEAK):
        with augmented(model, rule, layout):
            alone[rule] = read(model, layout.tensor)
    with augmented(model, (STRONG, WEAK), layout):
        both = read(model, layout.tensor)
    for first, second in ((STRONG, WEAK), (WEAK, STRONG)):
        older, newer = enter(model, first, layout), enter(model, second, layout)
        torch.testing.assert_close(read(model, layout.tensor), both)
        older.__exit__(None, None, None)  # the one that was opened first
        assert torch.equal(read(model, layout.tensor), alone[second])
        third = enter(model, first, layout)
        torch.testing.assert_close(read(model, layout.tensor), both)
        newer.__exit__(None, None, None)
        assert torch.equal(read(model, layout.tensor), alone[first])
        third.__exit__(None, None, None)
        assert torch.equal(read(model, layout.tensor), plain)
        assert state(model) == before


@every_class
def test_blocks_that_are_thrown_at_or_forgotten_leave_nothing(kind):
    model, layout = loaded(kind)
    before, plain = state(model), read(model, layout.tensor)

    def steps(rule):
        with augmented(model, rule, layout):
            while True:
                yield read(model, layout.tensor)

    forgotten, interrupted = steps(STRONG), steps(WEAK)
    next(forgotten), next(interrupted)
    del forgotten  # never closed
    gc.collect()
    with augmented(model, WEAK, layout):
        twice = read(model, layout.tensor)
    with pytest.raises(KeyboardInterrupt):
        interrupted.throw(KeyboardInterrupt)
    for error in (SystemExit, GeneratorExit, MemoryError):
        with pytest.raises(error), augmented(model, STRONG, layout):
            raise error
    assert state(model) == before
    assert torch.equal(read(model, layout.tensor), plain)
    with augmented(model, (WEAK, WEAK), layout):
        torch.testing.assert_close(read(model, layout.tensor), twice)


@contextmanager
def an_error_in(module):
    handle = module.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        yield
    finally:
        handle.remove()


def in_thread(function):
    """What a function returns or raises in another thread."""
    outcomes = []

    def run():
        try:
            outcomes.append(function())
        except Exception as error:
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcomes[0]


@every_class
def test_a_second_thread_is_refused_while_a_block_is_open(kind):
    model, layout = loaded(kind)
    with augmented(model, STRONG, layout):
        wanted = read(model, layout.tensor)
        for function in (
            lambda: read(model, layout.tensor),
            lambda: enter(model, WEAK, layout),
        ):
            error = in_thread(function)
            assert isinstance(error, ModelError), error
            assert "in another thread" in str(error)
            assert "\n" not in str(error)
        if kind == "HookedTransformer":  # passes by the hooks of the module itself
            assert isinstance(in_thread(lambda: model.generate(layout.tensor)), ModelError)
        assert torch.equal(read(model, layout.tensor), wanted)

    def alone():
        with augmented(model, STRONG, layout):
            return read(model, layout.tensor)

    assert torch.equal(in_thread(alone), wanted)  # one after the other


def test_a_block_of_an_ended_thread_does_not_act_in_one_with_its_number():
    model, layout = loaded("TransformersModel")
    opened = []

    def leave_open():
        block = augmented(model, STRONG, layout)
        block.__enter__()
        opened.append((threading.get_ident(), block))

    in_thread(leave_open)
    number, block = opened[0]
    for _ in range(20):  # most often the first has the number again
        number_now, result = in_thread(
            lambda: (threading.get_ident(), _error_of(lambda: read(model, layout.tensor)))
        )
        assert isinstance(result, ModelError)
        if number_now == number:
            break
    else:
        raise AssertionError("no thread had the ended one's number, so nothing was tested")
    block.__exit__(None, None, None)
    read(model, layout.tensor)


def _error_of(function):
    try:
        return function()
    except ModelError as error:
        return error


@every_class
def test_a_second_task_is_refused_while_a_block_is_open(kind):
    """Tasks take turns in one thread, so that both biases would act on either's pass."""
    model, layout = loaded(kind)

    async def one():
        with augmented(model, STRONG, layout):
            await asyncio.sleep(0)
            return read(model, layout.tensor)

    async def both():
        return await asyncio.gather(one(), one(), return_exceptions=True)

    first, second = asyncio.run(both())
    with augmented(model, STRONG, layout):
        assert torch.equal(first, read(model, layout.tensor))
    assert isinstance(second, ModelError)
    assert "asyncio task" in str(second)


@every_class
def test_hooks_taken_away_inside_a_block_are_an_error(kind):
    model, layout = loaded(kind)
    before = state(model)
    with augmented(model, STRONG, layout):
        read(model, layout.tensor)
        if kind == PLAIN:
            facts_of(model).network.set_attn_implementation("sdpa")
        else:
            model.reset_hooks()
        with pytest.raises(DeadHookError, match=r"did not come by .* and [37] more.*reset_hooks"):
            read(model, layout.tensor)
        if kind == "HookedTransformer":
            with pytest.raises(DeadHookError, match="did not come by"):
                model.generate(layout.tensor, max_new_tokens=1, verbose=False)
    assert state(model) == before


@every_class
def test_a_block_within_hooks_of_ones_own(kind):
    """Those stay, and what reads a part of the model is no error."""
    if kind == PLAIN:
        return
    model, layout = loaded(kind)
    seen = []
    with augmented(model, STRONG, layout):
        wanted, cache = model.run_with_cache(layout.tensor)
        with torch.no_grad():
            model.run_with_hooks(
                layout.tensor,
                fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: seen.append(1))],
            )
            model(layout.tensor, stop_at_layer=1)
            if kind == "HookedTransformer":
                late = model(cache["blocks.2.hook_resid_pre"], start_at_layer=2)
                torch.testing.assert_close(late, wanted)
        assert seen == [1]
        torch.testing.assert_close(read(model, layout.tensor), wanted)


def test_a_copy_made_inside_a_block_is_refused():
    for kind in (MODEL_CLASSES[-1], PLAIN):
        model, layout = loaded(kind)
        with augmented(model, STRONG, layout):
            made = copy.deepcopy(model)
            with pytest.raises(ModelError, match="a copy that was made inside a block"):
                read(made, layout.tensor)
        with pytest.raises(ModelError, match="a copy that was made inside a block"):
            read(made, layout.tensor)
    bare = network()
    with augmented(bare, STRONG, layout):
        made = copy.deepcopy(bare)
    with pytest.raises(ModelError, match="a copy that was made inside a block"):
        read(made, layout.tensor)
    read(copy.deepcopy(bare), layout.tensor)


@torch.no_grad()
def test_what_passes_the_block_by_is_an_error():
    bare, layout = network(), loaded(PLAIN)[1]
    bridge = load("tiny-gpt2", "float64")
    with augmented(bare, STRONG, layout), augmented(bridge, STRONG, layout):
        for call in (
            lambda: bare.forward(layout.tensor),
            lambda: bare.transformer(layout.tensor),
            lambda: bridge.original_model.forward(layout.tensor),
        ):
            with pytest.raises(DeadHookError, match="outside a pass of the block's model"):
                call()
    with (
        edit_scores(bare, lambda layer, scores: scores + 1),
        pytest.raises(DeadHookError, match="outside a pass"),
    ):
        bare.forward(layout.tensor)


@torch.no_grad()
def test_a_pass_that_raised_an_error_is_over():
    """Also where a block goes on behind it: a call of an inner module is no part of a pass."""
    model, layout = loaded("TransformerBridge")
    inner = model.original_model.transformer
    with augmented(model, STRONG, layout):
        wanted = read(model, layout.tensor)
        with an_error_in(inner.h[1]), pytest.raises(ZeroDivisionError):
            read(model, layout.tensor)
        with pytest.raises(DeadHookError, match="outside a pass"):
            inner(layout.tensor)
        assert torch.equal(read(model, layout.tensor), wanted)


def test_a_compiled_wrapper_of_a_model_in_a_block_is_right():
    layout = loaded(PLAIN)[1]
    bare = network(n_layer=1)
    calls = []

    def backend(graph, _inputs):
        calls.append(1)
        return graph.forward

    wrapper = torch.compile(bare, backend=backend)
    plain = wrapper(layout.tensor).logits
    assert calls
    with augmented(bare, STRONG, layout):
        assert torch.equal(wrapper(layout.tensor).logits, bare(layout.tensor).logits)
        assert (wrapper(layout.tensor).logits - plain).abs().max() > 1e-4
    torch.testing.assert_close(wrapper(layout.tensor).logits, plain)


def test_a_model_that_drops_its_cache_is_refused():
    """In training mode gradient checkpointing does so; others ignore it always."""
    bare, layout = network(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), loaded(PLAIN)[1]
    tokenizer = loaded(PLAIN)[0].tokenizer
    model = TransformersModel(bare, tokenizer, "own")
    text = [list(range(40, 46))]
    rows = TextRows.of(text, [0])
    prefix = soft_prefix(model)
    keys, values = (tensor[None].double() for tensor in (prefix.keys, prefix.values))
    asks = {
        "augmented": lambda: read_in_block(bare, layout),
        "rows": lambda: new_rows(model).prompt_pass([layout]),
        "recomputed": lambda: RecomputedRows(model).prompt_pass([layout]),
        "forced": lambda: teacher_forced(model, layout, text),
        "likelihood": lambda: text_nll(bare, rows, keys, values),
    }
    wanted = asks["likelihood"]()
    for part in bare.modules():  # as transformers' switch has it, whose name depends on the version
        if hasattr(part, "gradient_checkpointing"):
            part.gradient_checkpointing = True
    assert torch.equal(asks["likelihood"](), wanted)  # in eval mode it is off
    bare.train()
    for ask in asks.values():
        with pytest.raises(ModelError, match="training mode with gradient checkpointing"):
            ask()
    with pytest.raises(ModelError, match="training mode with gradient checkpointing"):
        state_then_training(model, layout)
    for part in bare.modules():
        part.gradient_checkpointing = False
    torch.testing.assert_close(asks["likelihood"](), wanted)
    read_in_block(bare, layout)

    inner = bare.transformer.forward
    bare.transformer.forward = lambda *args, **settings: inner(
        *args, **settings | {cache_name(bare): None}
    )
    bare.eval()
    for name in ("rows", "forced", "likelihood"):
        with pytest.raises(ModelError, match="has dropped the cache of a pass"):
            asks[name]()
    cache = DynamicCache()
    with (
        augmented(bare, STRONG, layout),
        pytest.raises(ModelError, match="has dropped the cache of a pass"),
    ):
        read(bare, layout.tensor, **{cache_name(bare): cache})


def read_in_block(model, layout):
    with augmented(model, STRONG, layout):
        return read(model, layout.tensor)


def state_then_training(model, layout):
    """Rows that were opened in eval mode."""
    model.original_model.eval()
    rows = new_rows(model)
    rows.prompt_pass([layout])
    rows.expand(torch.tensor([0]), capacity=40)
    model.original_model.train()
    rows.read_tokens(torch.tensor([[40]]))
