"""Activation addition: its vectors and texts by transformers alone, by an independent package, and
however a text is read."""

from itertools import product

import pytest
import torch
from conftest import HAS_HOOKED, generate, load
from steering_vectors import train_steering_vector

from lapa2_interp import Augmentation, Layout, augmented, load_model
from lapa2_interp.attention import cache
from lapa2_interp.attention.cache import RereadRows, new_rows
from lapa2_interp.attention.continued_rows import continued_rows
from lapa2_interp.attention.recomputed_rows import RecomputedRows
from lapa2_interp.attention.residual import edited_residual, mean_residual, shifted_residual
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.errors import DeadHookError, MethodError, ModelError, TaskError
from lapa2_interp.generation.sampling import draw, uniforms
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.load import load_transformers
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.tasks.task import extra_prompts

CLASSES = ("HookedTransformer",) if HAS_HOOKED else ("TransformerBridge", "TransformersModel")
TEXTS = ("The lake", "A book is on the", "I saw")
PROMPTS = ["The lake", "I saw"]
TOKENS = torch.tensor([[40, 41, 42, 43], [90, 81, 72, 63]])


@pytest.fixture(params=CLASSES)
def of_class(request):
    return request.param


@pytest.fixture
def file(tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n\n")
    return str(tmp_path / "texts.txt")


def states(network, ids):
    """What every block of a transformers model returns, by loops: [layer query d_model]."""
    streams = []
    blocks = next(m for m in network.modules() if isinstance(m, torch.nn.ModuleList))
    handles = [
        block.register_forward_hook(
            lambda m, a, out: streams.append((out[0] if isinstance(out, tuple) else out)[0])
        )
        for block in blocks
    ]
    with torch.no_grad():
        network(ids)
    for handle in handles:
        handle.remove()
    return torch.stack(streams)


def by_hand(network, tokenizer, texts, prefixes, layer):
    """The first prefix's mean at the last token, minus the mean of the others'."""
    means = [
        torch.stack(
            [
                states(network, Layout.of(tokenizer, prefix, text).tensor)[layer, -1]
                for text in texts
            ]
        ).mean(0)
        for prefix in prefixes
    ]
    return means[0] - torch.stack(means[1:]).mean(0)


@pytest.mark.parametrize("with_prefix", [False, True])
def test_texts_are_those_of_the_formula(tiny, of_class, file, with_prefix):
    """Vectors, passes and draws by transformers alone, whole texts read again at each step."""
    model = load(tiny, "float64", of_class)
    network, task = load_transformers(tiny, "float64")[0], load_task("topic")
    settings = {"strength": -3.0, "layers": "1,3", "texts": file, "with_prefix": with_prefix}
    method = methods.get("caa", **settings)
    made = generate(model, method, task, "sports", PROMPTS, length=15, samples=2, seed=5)
    prefixes = [task.prefix(name) for name in ("sports", *task.others("sports"))]
    vectors = {
        layer: -3.0 * by_hand(network, model.tokenizer, TEXTS, prefixes, layer) for layer in (1, 3)
    }
    computed = method.vectors(ModelContext(model), task, "sports")
    if of_class != "HookedTransformer":  # it centres what it writes
        for layer, vector in vectors.items():
            assert torch.allclose(computed[layer], vector, rtol=0, atol=1e-5)
    assert list(computed) == [1, 3]
    blocks = next(m for m in network.modules() if isinstance(m, torch.nn.ModuleList))
    for sample in made.texts.itertuples():
        uniform = uniforms(5, sample.prompt, sample.sample, 20)
        layout = Layout.of(model.tokenizer, prefixes[0] if with_prefix else None, sample.prompt)
        start = len(layout) - 1

        def add(m, a, out, layer):
            stream = out[0] if isinstance(out, tuple) else out
            stream[:, start:] += vectors[layer]  # noqa: B023

        handles = [
            blocks[layer].register_forward_hook(
                lambda m, a, out, layer=layer: add(m, a, out, layer)
            )
            for layer in vectors
        ]
        for step, token in enumerate(sample.tokens):
            ids = torch.tensor([[*layout.ids, *sample.tokens[:step]]])
            with torch.no_grad():
                logits = network(ids).logits[:, -1]
            drawn = draw(logits.log_softmax(1), torch.tensor([uniform[step]]), top_k=200)
            assert int(drawn) == token
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(("with_prefix", "same"), [(False, "none"), (True, "prefix")])
def test_strength_0_is_no_steering_bit_for_bit(tiny, of_class, with_prefix, same):
    model, task = load(tiny, "float32", of_class), load_task("sentiment")
    settings = {"length": 13, "samples": 2, "trace": "full"}
    nothing = methods.get("caa", strength=0, with_prefix=with_prefix)
    rule = Augmentation(alpha=0.5) if with_prefix else None
    steered = methods.get("caa", with_prefix=with_prefix)
    mine, plain, moved = (
        generate(model, method, task, "positive", PROMPTS, augmentation=rule, **settings)
        for method in (nothing, methods.get(same), steered)
    )
    assert mine.texts.equals(plain.texts)
    assert mine.trace.equals(plain.trace)
    assert not moved.texts.equals(plain.texts)


@torch.no_grad()
@pytest.mark.parametrize(
    ("of_class", "way"),
    [
        *product(CLASSES, ("at once", "in pieces", "read again", "recomputed")),
        *[("TransformersModel", "static")] * (not HAS_HOOKED),
    ],
)
def test_cached_passes_are_one_pass(tiny, of_class, way, monkeypatch):
    """Padded rows, prompts in pieces, rows that read tokens twice or the whole text again, and
    steps of a fixed size give the logits of one pass over each text."""
    model = load_model(tiny, "float64", "cpu", of_class)
    own = [Layout.of(model.tokenizer, None, prompt) for prompt in PROMPTS]
    padded = left_pad(own)
    width = mean_residual(model, own).shape[1]
    rng = torch.Generator().manual_seed(3)
    vectors = {layer: torch.randn(width, generator=rng) for layer in (0, 2)}
    if way == "in pieces":
        monkeypatch.setattr(cache, "PROMPT_SCORES", 2 * 4 * len(padded[0]) * 2)
    rows = {
        "read again": lambda: RereadRows(new_rows(model)),
        "recomputed": lambda: RecomputedRows(model),
    }
    state = rows.get(way, lambda: new_rows(model))()
    model.static = way == "static"
    with shifted_residual(model, vectors, len(padded[0]) - 1):
        with augmented(model, None, padded):
            logits = [state.prompt_pass(padded)[:, -1]]
        index, n = torch.arange(2), TOKENS.shape[1]
        capacity = len(padded[0]) + n
        with continued_rows(model, state, index, capacity, [None, None], padded, None) as more:
            logits += [more.read_tokens(step)[:, -1].clone() for step in TOKENS.split(1, dim=1)]
    model.static = False
    atol = 1e-5 if of_class == "HookedTransformer" else 1e-9
    for row, layout in enumerate(own):
        ids = torch.cat([layout.tensor, TOKENS[row : row + 1]], dim=1)
        with augmented(model, None, layout):
            plain = model(ids)
        with shifted_residual(model, vectors, len(layout) - 1), augmented(model, None, layout):
            one_pass = model(ids)
        assert torch.equal(one_pass[0, : len(layout) - 1], plain[0, : len(layout) - 1])
        computed = torch.stack([step[row] for step in logits])
        assert torch.allclose(computed, one_pass[0, -n - 1 :], rtol=0, atol=atol)
        assert (computed - plain[0, -n - 1 :]).abs().max() > 0.01


@torch.no_grad()
def test_an_independent_package_agrees(tiny):
    """`steering-vectors` trains the same vectors on the same pairs, and steers to the same
    logits."""
    network, task = load_transformers(tiny, "float64")[0], load_task("sentiment")
    models = [load(tiny, "float64", name) for name in ("TransformerBridge", "TransformersModel")]
    tokenizer = models[0].tokenizer

    class Reader:
        """The same ids, behind BOS, as a tokenizer gives them."""

        pad_token, pad_token_id = "x", 0

        def __call__(self, texts, **settings):
            from transformers import BatchEncoding

            prefix, _, text = texts[0].partition("|")
            ids = Layout.of(tokenizer, prefix, text).tensor
            return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    texts = extra_prompts("sentiment")[:32]
    pairs = [
        tuple(f"{task.prefix(name)}|{text}" for name in ("positive", "negative")) for text in texts
    ]
    judge = train_steering_vector(network, Reader(), pairs, layers=[1, 2])
    layout = Layout.of(tokenizer, None, "The lake")
    ids = torch.cat([layout.tensor, TOKENS[:1]], dim=1)
    with judge.apply(network, multiplier=2, min_token_index=len(layout) - 1):
        wanted = network(ids).logits
    for model in models:
        method = methods.get("caa", layers="1-2", strength=2)
        mine = method.vectors(ModelContext(model), task, "positive")
        for layer, vector in judge.layer_activations.items():
            assert torch.allclose(mine[layer], 2 * vector, rtol=0, atol=1e-5)
        with shifted_residual(model, mine, len(layout) - 1):
            assert torch.allclose(model(ids), wanted, rtol=0, atol=1e-5)


def test_the_default_layer_is_in_the_middle():
    """Of four layers the third, with the package's prompts; a run tells it."""
    model, task = load("tiny-gpt2"), load_task("detox")
    method = methods.get("caa")
    context = ModelContext(model)
    prepared = method.prepare(context, task, "nontoxic", "The lake")
    assert list(prepared.known) == [2]
    (name,) = prepared.summary
    assert name == "norm of the vector, by layer"
    assert prepared.summary[name].keys() == {"2"}
    assert method.prepare(context, task, "nontoxic", "I saw").known is prepared.known
    prefixes = [task.prefix(name) for name in ("nontoxic", "toxic")]
    network = load_transformers("tiny-gpt2", "float32")[0]
    wanted = by_hand(network, model.tokenizer, extra_prompts("detox")[:32], prefixes, 2)
    assert torch.allclose(prepared.known[2], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 4}, "caa: layer 4 does not exist; the model has layers 0-3"),
        ({"layers": "top"}, "caa: layers: takes 'middle' or numbers from 0, .*; found 'top'"),
        ({"texts": "no.txt"}, "caa: cannot read the texts in no.txt: "),
        ({"texts": "EMPTY"}, "EMPTY has no texts; give a file with one a line"),
    ],
)
def test_what_caa_cannot_use_is_refused(settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").write_text(" \n")
    with pytest.raises(MethodError, match=message):
        generate(
            load("tiny-gpt2"),
            methods.get("caa", **settings),
            load_task("sentiment"),
            "positive",
            PROMPTS,
            length=10,
        )


def test_caa_needs_an_opposing_attribute():
    task = load_task("sentiment")
    task = task.model_copy(update={"attributes": {"positive": task.attributes["positive"]}})
    with pytest.raises(TaskError, match="a method with classes needs a second"):
        methods.get("caa").branches(task, "positive")


def test_a_block_that_could_not_act_is_an_error():
    model = load("tiny-llama", "float32", "TransformersModel")
    layout = Layout.of(model.tokenizer, None, "The lake")
    read = lambda layer, stream, first: None  # noqa: E731
    with edited_residual(model, read, [0]):
        with pytest.raises(DeadHookError, match="outside a pass of the block's model"):
            model.original_model.model(layout.tensor)
        model.original_model.model.layers[0]._forward_hooks.clear()
        with pytest.raises(DeadHookError, match="the pass did not come by layer 0"):
            model(layout.tensor)
    network = model.original_model
    network.more = torch.nn.ModuleList([torch.nn.Identity() for _ in range(4)])
    try:
        with (
            pytest.raises(ModelError, match="has 2 lists of 4 modules"),
            edited_residual(model, read, [0]),
        ):
            pass
    finally:
        del network.more
