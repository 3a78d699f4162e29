"""Prepared methods: the graphs, ranks and sampler of DATG by hand; the vectors and texts of CAA by
transformers alone, by an independent package, and however a text is read."""

import math
from itertools import pairwise, product
from typing import ClassVar

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import HAS_HOOKED, generate, load, run_of
from context_stub import ContextStub
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from steering_vectors import train_steering_vector

from lapa2_interp import (
    Augmentation,
    augmented,
    load_model,
)
from lapa2_interp.attention import cache
from lapa2_interp.attention.cache import RereadRows, new_rows
from lapa2_interp.attention.continued_rows import continued_rows
from lapa2_interp.attention.recomputed_rows import RecomputedRows
from lapa2_interp.attention.residual import edited_residual, mean_residual, shifted_residual
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.errors import (
    DeadHookError,
    MethodError,
    ModelError,
    ScoringError,
    TaskError,
)
from lapa2_interp.generation.sampling import draw, uniforms
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.base import Prepared
from lapa2_interp.methods.prepared import (
    SENTENCE,
    ActivationAddition,
    PromptWords,
    best_nodes,
    dual_graphs,
    released_sampler,
)
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.load import load_transformers
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.tasks.task import extra_prompts


@pytest.fixture(autouse=True)
def prepared_cache(tmp_path, monkeypatch):
    """A separate cache for every test that prepares anything; SmolLM2 is loaded by others."""
    monkeypatch.setattr("lapa2_interp.runs.method_context.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


DRAFTS = [
    (["The", " great", " movie", " was", " great", " fun"], 0.9),
    (["The", " movie", " was", " bad", ",", " bad", " 2nd"], 0.2),
    (["It", " was", " great"], 0.7),
]


def pagerank_by_iteration(edges, nodes):
    """Damping .85, rows normalised, dangling nodes to all alike."""
    p = {node: 1 / len(nodes) for node in nodes}
    out = {node: sum(w for (a, _), w in edges.items() if a == node) for node in nodes}
    for _ in range(500):
        lost = sum(p[node] for node in nodes if out[node] == 0)
        new = {node: (0.15 + 0.85 * lost) / len(nodes) for node in nodes}
        for (a, b), w in edges.items():
            if out[a] > 0:
                new[b] += 0.85 * p[a] * w / out[a]
        p = new
    return p


def test_datgs_graphs_and_ranks():
    positive, negative = dual_graphs(DRAFTS)
    edges = ({}, {})
    for tokens, share in DRAFTS:
        for pair in pairwise(tokens):
            for which, w in zip(edges, (share, 1 - share), strict=True):
                which[pair] = which.get(pair, 0.0) + w
    for graph, expected in zip((positive, negative), edges, strict=True):
        assert {
            pair: data["weight"] for *pair, data in graph.edges(data=True) for pair in [tuple(pair)]
        } == pytest.approx(expected)
        ranks = pagerank_by_iteration(expected, list(graph.nodes))
        assert dict(nx.pagerank(graph, alpha=0.85, tol=1e-6)) == pytest.approx(ranks, abs=1e-5)
        words = [
            node
            for node in sorted(ranks, key=ranks.get, reverse=True)
            if node in (" great", " movie", " bad", " fun")
        ]
        assert best_nodes(graph, 10) == tuple(words)
        assert best_nodes(graph, 2) == tuple(words[:2])
    assert best_nodes(positive, 1) == (" great",)
    assert best_nodes(nx.DiGraph(), 5) == ()


@pytest.mark.parametrize(
    "word",
    [
        "THE",
        "\ufffd",
        "½",
        " The",
        "the",
        "don't",
        "3rd",
        " ",
        "\n",
        "“quote",
        "A movie of the",
        "",
    ],
)
def test_what_is_no_word_for_datg(word):
    graph = nx.DiGraph()
    graph.add_edge(word, "word", weight=1.0)
    assert best_nodes(graph, 5) == ("word",)


def test_datg_boosts_and_avoids():
    """An id in both lists gets 4 - 6, one that is listed twice gets it twice; then T .7, top-p .9."""
    method = methods.get("datg", sampler="uniform")
    words = [PromptWords((), (), (0, 1, 1), (1, 2)), PromptWords((), (), (), (4,))]
    log_probs = torch.full((2, 5), math.log(0.2), dtype=torch.float64)
    boosts = method.combine({"base": log_probs}, words) - log_probs
    assert boosts.tolist() == [[4, 2, -6, 0, 0], [0, 0, 0, 0, -6]]
    official_weights = methods.get("datg").combine({"base": log_probs}, words)
    p = np.exp(np.array([4, 2, -6, 0, 0]) / 0.7)
    assert official_weights[0].exp().numpy() == pytest.approx(
        np.where([True, False, False, False, False], np.exp((math.log(0.2) + 4) / 0.7), 0)
    ), f"the first token alone holds {p[0] / p.sum():.2f} of the probability"
    assert method.advance(words, {}, torch.tensor([0, 0])) is words


def test_datgs_sampler_is_that_of_transformers():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = (
        torch.randn(6, 900, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    )
    expected = logits
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(200), TopPLogitsWarper(0.9)):
        expected = warper(None, expected)
    assert torch.equal(released_sampler(logits), expected)


def test_datg_prepares_once_from_its_drafts():
    context = ContextStub(["xyxz", "qx", ""], [0.9, 0.1, None])
    prepared = methods.get("datg").prepare(context, load_task("detox"), "nontoxic", "The sea")
    assert context.asked == [("drafting", "The sea", 30, 32, 1)]
    positive, negative = dual_graphs([(list("xyxz"), 0.9), (list("qx"), 0.1)])
    assert prepared.known.positive == best_nodes(positive, 10)
    assert prepared.known.negative == best_nodes(negative, 10)
    assert prepared.known.positive_ids == tuple(map(ord, prepared.known.positive))
    assert prepared.summary == {
        "positive": list(prepared.known.positive),
        "negative": list(prepared.known.negative),
        "drafts": 2,
    }
    assert prepared.prefixes == {}
    behind = (
        methods.get("datg", form="P")
        .prepare(context, load_task("detox"), "nontoxic", "The sea")
        .prefixes["target"]
    )
    lists = (", ".join(prepared.known.positive), ", ".join(prepared.known.negative))
    assert behind == SENTENCE.format(positive=lists[0], negative=lists[1])
    assert behind.startswith("This passage emphasizes themes such as x, ")
    assert behind.endswith(". Given this context,")
    with pytest.raises(
        MethodError, match="none of 2 drafts of 'The sea' could be scored by accuracy"
    ):
        methods.get("datg").prepare(
            ContextStub(["", ""], [None, None]), load_task("detox"), "nontoxic", "The sea"
        )
    with pytest.raises(MethodError, match=r"the 1 drafts of 'The sea' hold no word .*drafts=60"):
        methods.get("datg").prepare(
            ContextStub([", 3. 4"], [0.5]), load_task("detox"), "nontoxic", "The sea"
        )


def test_scores_of_drafts_are_shares_of_the_attribute():
    context, task = ModelContext(load("tiny-gpt2")), load_task("detox")
    texts = ["I love this wonderful day.", "You stupid idiot, shut up!", "  "]
    nontoxic, toxic = (
        context.attribute_probabilities("accuracy", task, attribute, "", texts)
        for attribute in ("nontoxic", "toxic")
    )
    assert nontoxic[2] is toxic[2] is None
    assert [a + b for a, b in zip(nontoxic[:2], toxic[:2], strict=True)] == pytest.approx([1, 1])
    assert nontoxic[0] > 0.5 > nontoxic[1]
    assert context.attribute_probabilities(
        "toxicity", task, "nontoxic", "", texts[:2]
    ) == pytest.approx(nontoxic[:2])
    with pytest.raises(
        ScoringError, match="unknown scorer 'judgement'; allowed: accuracy, .*did you mean 'judge'"
    ):
        context.attribute_probabilities("judgement", task, "toxic", "", texts)
    with pytest.raises(
        ScoringError, match=r"the scorer toxicity tells toxicity, not 'positive'; give another"
    ):
        context.attribute_probabilities("toxicity", load_task("sentiment"), "positive", "", texts)


@pytest.mark.parametrize("form", [pytest.param("L", marks=pytest.mark.slow), "P"])
@pytest.mark.long
def test_datg_generates_with_words_of_its_own(form):
    """On the linear classifier, with what it prepared in the manifest; form P has a prefix per
    prompt, and takes LaPA2."""

    model, task = load("smollm2-135m"), load_task("sentiment")
    method = methods.get_for_task("datg", task, form=form, drafts=3, draft_tokens=8)
    arms = (None, Augmentation(alpha=1.0)) if form == "P" else (None,)
    prompts = task.prompts.texts[1:3]
    run = run_of(
        model,
        method,
        task,
        ["positive"],
        prompts,
        arms,
        length=14,
        samples=2,
        seed=1,
        trace="pooled",
    )
    keys = list(run.by_key)
    prepared, trace = run.manifest(keys[0]).prepared, run.trace(keys[0])
    assert list(prepared) == list(prompts)
    assert all(summary["positive"] for summary in prepared.values())
    assert set(run.texts()["finish"]) == {"length"}
    if form == "L":
        assert (trace["l_pre"] == 0).all()
        return
    for number, prompt in enumerate(prompts):
        lists = [", ".join(prepared[prompt][part]) for part in ("positive", "negative")]
        sentence = SENTENCE.format(positive=lists[0], negative=lists[1])
        l_pre = Layout.of(model.tokenizer, sentence, " " + prompt).l_pre
        assert trace["l_pre"].to_numpy()[0, 2 * number : 2 * number + 2].tolist() == [l_pre] * 2
    plain, boosted = (run.trace(key)["prefix"].to_numpy()[0] for key in keys)
    # Behind a prefix of dozens of tokens l/l_pre stays near 1, and so does what the bias
    # multiplies.
    assert np.nanmean(boosted) > np.nanmean(plain)
    assert np.nanmean(boosted[:, -1]) > np.nanmean(plain[:, -1])


def test_no_text_shares_its_random_numbers_with_a_draft():
    """With nothing boosted the texts are drawn like the drafts, but are not the drafts."""
    from lapa2_interp.methods.prepared import Drafting

    model, task = load("tiny-gpt2"), load_task("detox")
    drafts = ModelContext(model).drafts(Drafting(), "The sea", 5, 12, seed=1)
    method = methods.get("datg", boost=0, avoid=0, drafts=5, draft_tokens=12)
    made = generate(
        model, method, task, "nontoxic", ["The sea"], length=12, samples=5, seed=1, eos="stop"
    )
    assert not set(drafts) & set(made.texts["continuation"])


def test_too_long_drafts_and_unfit_scorers_are_found_before_drafting(prepared_cache):
    from lapa2_interp.errors import LayoutError

    model, task = load("tiny-gpt2"), load_task("sentiment")
    with pytest.raises(
        LayoutError, match=r"drafts of 999 tokens: .* or draft fewer \(draft_tokens"
    ):
        generate(
            model, methods.get("datg", draft_tokens=999), task, "positive", ["The sea"], length=20
        )
    for scorer, message in (
        ("toxicity", "tells toxicity, not 'positive'"),
        ("distinct", "describes a set of texts"),
    ):
        with pytest.raises(ScoringError, match=message):
            generate(
                model, methods.get("datg", scorer=scorer), task, "positive", ["The sea"], length=20
            )
    assert not (prepared_cache / "drafts").exists()


def test_the_sentence_of_form_p_leaves_the_prompt_whole():
    """It ends before the space, so that no token spans prefix and prompt, whatever the prompt."""
    from lapa2_interp.models.load import shared_tokenizer

    tokenizer = shared_tokenizer("smollm2-135m")
    (branch,) = methods.get("datg", form="P").branches(load_task("sentiment"), "positive")
    for prompt in ("The", "The lake"):
        layout = Layout.of(tokenizer, branch.prefix, branch.join + prompt)
        assert layout.merged is None
        assert layout.l_pro == len(prompt.split())


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


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OfPrompt(ActivationAddition):
    """A vector of each prompt."""

    name: ClassVar[str] = "of-prompt"

    def prepare(self, context, task, attribute, prompt):
        rng = torch.Generator().manual_seed(len(prompt))
        return Prepared(3 * torch.randn(context.embedding().shape[1], generator=rng))

    def intervene(self, passes, prepared):
        return passes.shift({1: torch.stack([one.known for one in prepared])})


@pytest.mark.parametrize("samples", [1, 2])
def test_prompts_of_a_batch_have_vectors_of_their_own(tiny, samples):
    model, task = load(tiny, "float64", "TransformersModel"), load_task("sentiment")
    settings = {"length": 14, "samples": samples, "trace": "none"}
    texts = [
        generate(model, method, task, "positive", prompts, **settings).texts
        for method in (OfPrompt(), methods.get("none"))
        for prompts in (PROMPTS, *([prompt] for prompt in PROMPTS))
    ]
    together, *alone, plain = texts[: len(PROMPTS) + 2]
    assert together["tokens"].tolist() == pd.concat(alone)["tokens"].tolist()
    assert together["tokens"].tolist() != plain["tokens"].tolist()


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
