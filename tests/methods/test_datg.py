"""DATG: its graphs, ranks and sampler by hand, and what it refuses."""

import math
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import torch
from conftest import generate, load, run_of
from context_stub import ContextStub

from lapa2_interp import (
    Augmentation,
)
from lapa2_interp._util.errors import (
    MethodError,
    ScoringError,
)
from lapa2_interp.bias.layout import Layout
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.prepared import (
    SENTENCE,
    PromptWords,
    best_nodes,
    dual_graphs,
    released_sampler,
)
from lapa2_interp.methods.registry import load_task
from lapa2_interp.runs.method_context import ModelContext


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
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


def test_too_long_drafts_and_unfit_scorers_are_found_before_drafting(cache):
    from lapa2_interp._util.errors import LayoutError

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
    assert not (cache / "drafts").exists()


def test_the_sentence_of_form_p_leaves_the_prompt_whole():
    """It ends before the space, so that no token spans prefix and prompt, whatever the prompt."""
    from lapa2_interp.models.load import shared_tokenizer

    tokenizer = shared_tokenizer("smollm2-135m")
    (branch,) = methods.get("datg", form="P").branches(load_task("sentiment"), "positive")
    for prompt in ("The", "The lake"):
        layout = Layout.of(tokenizer, branch.prefix, branch.join + prompt)
        assert layout.merged is None
        assert layout.l_pro == len(prompt.split())
