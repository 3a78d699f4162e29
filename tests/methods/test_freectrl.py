"""FreeCtrl: its formulas by hand and by loops, and what it refuses."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import MODEL_CLASSES, generate, logits_with_neurons
from context_stub import ContextStub

from lapa2_interp import (
    Augmentation,
    load_model,
)
from lapa2_interp.attention.neurons import (
    promoting_neurons,
)
from lapa2_interp.attention.recomputed_rows import RecomputedRows
from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import (
    AugmentationError,
    MethodError,
)
from lapa2_interp.generation.sampling import draw, uniforms
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.conditioning import NoControl
from lapa2_interp.methods.freectrl import (
    OFF_VALUE,
    RANK_PROBABILITIES,
    ControlCentre,
    FreeCtrl,
    TextMonitor,
    neuron_value,
    noise_ratio,
    text_score,
)
from lapa2_interp.methods.registry import load_task
from lapa2_interp.runs.method_context import ModelContext


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A separate cache for every test that prepares anything; SmolLM2 is loaded by others."""
    monkeypatch.setattr("lapa2_interp.runs.method_context.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def worded(tmp_path_factory, gpt2_tokenizer):
    """A folder with a random GPT-2 that has GPT-2's own tokens, so that words are tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("worded")
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=50257, n_positions=128, n_embd=32, n_layer=3, n_head=4)
    network = GPT2LMHeadModel(config)
    for parameter in network.parameters():  # larger than initialised, so that neurons matter
        parameter.data = parameter.data * 4 if parameter.ndim > 1 else parameter.data
    network.save_pretrained(folder)
    gpt2_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=MODEL_CLASSES)
def words_model(request, worded):
    return load_model(str(worded), dtype="float64", device="cpu", model_class=request.param)


WORDS = {"positive": ["great", "love", "happy"], "negative": ["bad", "awful"]}


@pytest.fixture
def word_file(tmp_path):
    file = tmp_path / "words.json"
    file.write_text(json.dumps({"words": WORDS}))
    return str(file)


def test_rank_probabilities():
    """Against drawing 10 of 125 candidates, and the values the method description gives."""
    p = RANK_PROBABILITIES
    assert p[:4] == pytest.approx([0.346, 0.234, 0.156, 0.102], abs=5e-4)
    assert sum(p) == pytest.approx(1)
    rng = np.random.default_rng(0)
    ranks = np.repeat(np.arange(25), 5)
    best = np.array([ranks[rng.permutation(125)[:10]].min() for _ in range(40_000)])
    seen = np.bincount(best, minlength=25) / len(best)
    assert np.abs(seen - p).max() < 4 * math.sqrt(0.25 / len(best))


def test_score_and_weight_by_hand():
    """Two keywords against one; the score of a text is that of its nearest tokens, and 1 is
    neutral."""
    near = {"positive": torch.tensor([[0.8, 0.4]]), "negative": torch.tensor([[0.5]])}
    assert text_score(near, "positive").tolist() == pytest.approx([0.6 / 0.5])
    assert text_score(near, "negative").tolist() == pytest.approx([0.5 / 0.6])
    four = {c: torch.tensor([[sim]]) for c, sim in (("a", 0.6), ("b", 0.2), ("c", 0.3), ("d", 0.4))}
    assert text_score(four, "a").tolist() == pytest.approx([0.6 * 3 / 0.9])
    w = neuron_value(torch.tensor([1.05, 1.15, 1.3]), 1.15, 0.2, torch.tensor([10, 10, 10]))
    assert w.tolist() == pytest.approx([0.2 / (1 + math.exp(-1)), OFF_VALUE, OFF_VALUE])


def test_noise_ratio_by_hand():
    """The factor counts four classes; in two a word passes from a third of the other's cosine on."""
    classes = {"y": torch.tensor([1.0, 0.0]), "n": torch.tensor([0.0, 1.0])}
    assert noise_ratio(classes, torch.tensor([3.0, 4.0]), "y") == pytest.approx(0.6 * 3 / 0.8)
    assert noise_ratio(
        classes | {"m": torch.tensor([0.6, 0.8])}, torch.tensor([1.0, 0.0]), "y"
    ) == pytest.approx(3 / 0.6)


def freectrl(word_file, **parameters):
    return methods.get("freectrl", words=word_file, noise=-1e9, neurons=4, **parameters)


def test_freectrl_against_its_definition(words_model, word_file):
    """Every token of two samples: the weight from the text so far, all of it read again, the rank
    drawn; recomputed by loops."""
    model, task = words_model, load_task("sentiment")
    method = freectrl(word_file, u=1.3, lam=2.0)
    prompts, length = ["The lake", "The last time I saw"], 11
    made = generate(
        model, method, task, "positive", prompts, length=length, samples=2, seed=5, trace="full"
    )
    context = ModelContext(model)
    ids = {c: [context.ids(" " + word)[0] for word in words] for c, words in WORDS.items()}
    unit = torch.nn.functional.normalize(model.W_E.detach().float(), dim=1)
    tokens = sorted({i for keys in ids.values() for i in keys})
    table = promoting_neurons(model, context.ids(" "), tokens, 4)[1]
    centre = {}
    for token in ids["positive"]:
        for layer, neuron in table[tokens.index(token)].tolist():
            centre.setdefault(layer, set()).add(neuron)
    weights = []
    for sample in made.texts.itertuples():
        text, uniform = context.ids(sample.prompt), uniforms(5, sample.prompt, sample.sample, 20)
        branch = Layout.of(model.tokenizer, None, sample.prompt)
        for t, token in enumerate(sample.tokens):
            cos = {c: unit[keys] @ unit[text].T for c, keys in ids.items()}  # keyword, token
            scores = []
            for part in (slice(None), slice(-1, None)):
                sim = {c: float(rows[:, part].max(dim=1).values.mean()) for c, rows in cos.items()}
                scores.append(sim["positive"] / sim["negative"])
            s = max(scores)
            w = 2.0 / (1 + math.exp(-(1.3 - s) * len(text))) if s < 1.3 else 1e-20
            weights.append(w)
            chosen = {layer: torch.tensor(sorted(neurons)) for layer, neurons in centre.items()}
            read_again = torch.tensor([[*branch.ids, *sample.tokens[:t]]])
            with torch.no_grad():
                value = torch.tensor([w], dtype=torch.float64)
                logits = logits_with_neurons(model, read_again, chosen, value)[:, -1]
            logits[:, model.tokenizer.eos_token_id] = -torch.inf
            order = logits[0].sort(descending=True, stable=True).indices[:25]
            log_weights = torch.full_like(logits, -torch.inf)
            log_weights[0, order] = torch.tensor(RANK_PROBABILITIES, dtype=torch.float64).log()
            assert int(draw(log_weights, torch.tensor([uniform[t]]), top_k=200)[0]) == token
            text.append(token)
    assert min(weights) == OFF_VALUE
    assert max(weights) > 0.5, "both sides of the threshold were met"
    parts = (
        made.trace[["prefix", "bos", "prompt", "generated"]]
        .to_array()
        .sum("variable", skipna=False)
    )
    assert np.nanmax(np.abs(parts.to_numpy() - 1)) < 1e-5
    assert made.trace["prompt"].shape[2] == length - 2


def test_reading_again_changes_nothing_by_itself(words_model, word_file):
    """With no neuron to set, texts, trace and whole rows are those of cached decoding, in one batch
    or a few."""
    task, prompts = load_task("sentiment"), ["The lake", "The last time I saw"]
    method = methods.get(
        "freectrl", words=word_file, noise=-1e9, neurons=0, sampler="uniform", accept="all"
    )
    settings = {"length": 13, "samples": 2, "patterns": [(1, 2)], "eos": "block"}
    cached, again = (
        generate(words_model, decoder, task, "positive", prompts, **settings)
        for decoder in (NoControl(), method)
    )
    assert cached.texts.equals(again.texts)
    for name in set(cached.trace.data_vars) - {"prefix_tokens"}:
        a, b = cached.trace[name].to_numpy(), again.trace[name].to_numpy()
        assert np.nanmax(np.abs(a - b)) < 1e-6, name
        assert np.array_equal(np.isnan(a), np.isnan(b))


@pytest.mark.long
def test_refused_texts_are_drawn_again_with_other_numbers(words_model, word_file, monkeypatch):
    """Texts and traces are those of the first trial that is accepted, else of the last; each trial
    has random numbers of its own."""
    task, prompts = load_task("sentiment"), ["The lake", "Once upon"]
    settings = {"length": 12, "samples": 5, "trace": "full"}
    method = freectrl(word_file, trials=3)
    with monkeypatch.context() as patched:
        even = lambda self, known, text, tokens: tokens[-1] % 2 == 0  # noqa: E731
        patched.setattr(FreeCtrl, "accepts", even)
        made = generate(words_model, method, task, "positive", prompts, **settings)
    trials = []
    for trial in range(3):
        monkeypatch.setattr(
            "lapa2_interp.generation.batch.uniforms",
            lambda *key, trial=trial: uniforms(*key[:4], trial),
        )
        trials.append(generate(words_model, method, task, "positive", prompts, **settings))
    chosen = []
    for row in range(10):
        tokens = [drawn.texts["tokens"][row] for drawn in trials]
        assert tokens[0] != tokens[1] != tokens[2]
        chosen.append(next((i for i in (0, 1) if tokens[i][-1] % 2 == 0), 2))
        assert made.texts["tokens"][row] == tokens[chosen[-1]]
        for name in ("bos", "generated"):
            mine, own = (batch.trace[name].isel(sample=row) for batch in (made, trials[chosen[-1]]))
            assert np.nanmax(np.abs(mine.to_numpy() - own.to_numpy())) < 1e-9
    assert set(chosen) == {0, 1, 2}
    assert made.texts[["prompt", "sample"]].equals(trials[0].texts[["prompt", "sample"]])
    assert made.trace["prompt_text"].values.tolist() == made.texts["prompt"].tolist()


def test_a_hooked_transformer_reads_as_many_rows_as_memory_has(words_model, word_file, monkeypatch):
    """It computes the logits of all keys, so that a batch is read in parts; the texts are the
    same."""
    task, read = load_task("sentiment"), []
    asked = (freectrl(word_file), task, "positive", ["The lake", "Once upon"])
    at_once = generate(words_model, *asked, length=10, samples=3)
    hooked = SimpleNamespace(backend="hooked")
    monkeypatch.setattr("lapa2_interp.generation.freectrl.facts_of", lambda _: hooked)
    monkeypatch.setattr("lapa2_interp.generation.freectrl.rows_in_memory", lambda *_: 4)
    real = RecomputedRows.expand

    def counted(rows, index, capacity):
        read.append(len(index))
        real(rows, index, capacity)

    monkeypatch.setattr(RecomputedRows, "expand", counted)
    in_parts = generate(words_model, *asked, length=10, samples=3)
    assert read == [4, 2]
    assert in_parts.texts.equals(at_once.texts)


@pytest.mark.long
def test_freectrl_draws_until_its_authors_test_is_passed(words_model, word_file):
    task, prompts = load_task("sentiment"), ["The lake", "The horse and the"]
    every = freectrl(word_file, u=1.0)
    settings = {"length": 10, "samples": 3, "trace": "none"}
    context = ModelContext(words_model)
    ids = {c: [context.ids(" " + word)[0] for word in words] for c, words in WORDS.items()}
    unit = torch.nn.functional.normalize(words_model.W_E.detach().float(), dim=1)

    def passes(row):
        text = context.ids(row.prompt) + row.tokens
        sim = {
            c: float((unit[keys] @ unit[text].T).max(dim=1).values.mean())
            for c, keys in ids.items()
        }
        return sim["positive"] / sim["negative"] > 1.0

    first = generate(words_model, every, task, "positive", prompts, **settings).texts
    until = dataclasses.replace(every, accept="score", trials=40)
    chosen = generate(words_model, until, task, "positive", prompts, **settings).texts
    before, after = ([passes(row) for row in table.itertuples()] for table in (first, chosen))
    assert not all(before)
    assert all(after)
    for i, passed in enumerate(before):
        assert (chosen["tokens"][i] == first["tokens"][i]) == passed
    known = every.prepare(context, task, "positive", "The lake").known
    released = dataclasses.replace(every, accept="released", u=-9.0)
    tokens = context.ids(" a b")
    for text, said in (
        ("the lake " * 6, True),
        ("the lake " * 7, False),
        ("a\nb", True),
        ("a\nb\nc", False),
        ("\n ", True),
    ):
        assert released.accepts(known, text, tokens) == said
        assert dataclasses.replace(released, accept="score").accepts(known, text, tokens)
        assert not dataclasses.replace(released, u=9.0).accepts(known, text, tokens)
        assert every.accepts(known, text, tokens)


def test_an_empty_centre_is_the_raw_model(words_model, word_file):
    task = load_task("sentiment")
    method = methods.get("freectrl", words=word_file, noise=-1e9, neurons=0, sampler="uniform")
    settings = {"length": 12, "samples": 2, "eos": "block", "trace": "none"}
    prompts = ["The lake", "The horse and the"]
    mine = generate(words_model, method, task, "negative", prompts, **settings)
    raw = generate(words_model, methods.get("none"), task, "negative", prompts, **settings)
    assert mine.texts["tokens"].tolist() == raw.texts["tokens"].tolist()


def test_freectrl_refuses_noise_that_leaves_no_word_and_an_augmentation(words_model, word_file):
    asked = load_task("sentiment"), "positive", ["The lake"]
    message = r"none of 3 words for 'positive' is one token and nearer .* lower noise="
    with pytest.raises(MethodError, match=message):
        noisy = methods.get("freectrl", words=word_file, noise=1e9)
        generate(words_model, noisy, *asked, length=8)
    message = "freectrl has no prefix for an augmentation to act on"
    with pytest.raises(AugmentationError, match=message):
        rule = Augmentation(alpha=0.5)
        generate(words_model, freectrl(word_file), *asked, length=8, augmentation=rule)


def test_freectrls_keywords(words_model, tmp_path):
    """One token with a space in front, and nearer to its class; class words come from the task's
    file."""
    file = tmp_path / "w.json"
    file.write_text(
        json.dumps({"words": {"positive": ["great", "unputdownable", "love"], "negative": ["bad"]}})
    )
    context, task = ModelContext(words_model), load_task("sentiment")
    unit = torch.nn.functional.normalize(context.embedding(), dim=1)
    every = methods.get("freectrl", words=str(file), noise=-1e9).keywords(context, task, unit)
    assert list(every["positive"]) == ["great", "love"]
    assert every["positive"]["great"] == context.ids(" great")[0]
    names = {c: unit[context.ids(c)].mean(dim=0) for c in task.attributes}
    ratios = {
        word: noise_ratio(names, unit[i], "positive") for word, i in every["positive"].items()
    }
    between = (max(ratios.values()) + min(ratios.values())) / 2
    own_bad = noise_ratio(names, unit[context.ids(" bad")[0]], "negative")
    keywords = methods.get("freectrl", words=str(file), noise=min(between, own_bad - 1)).keywords(
        context, task, unit
    )
    assert set(keywords["positive"]) == {
        word for word, ratio in ratios.items() if ratio > min(between, own_bad - 1)
    }
    assert {c: load_task("topic").texts("freectrl", c).get("class", c) for c in load_task("topic").attributes} == {
        "world": "politics", "sports": "sports", "business": "business", "science": "technology",
    }  # fmt: skip
    gpt2 = {
        "positive": 24561,
        "negative": 31591,
        "politics": 34127,
        "sports": 32945,
        "business": 22680,
        "technology": 45503,
    }
    assert {name: context.ids(name) for name in gpt2} == {name: [i] for name, i in gpt2.items()}


def test_gated_mlps_have_settings_of_their_own(monkeypatch):
    class Gated(ContextStub):
        gated = True

        def ids(self, text):
            return [sum(map(ord, text)) % 40]

        def embedding(self):
            return torch.eye(40)

        def promoting_neurons(self, tokens, k, upper=False):
            assert upper
            return torch.arange(len(tokens) * k * 2).reshape(len(tokens), k, 2)

    method = methods.get("freectrl", noise=-1e9, gated_neurons=2, gated_lam=7.0)
    monkeypatch.setattr(
        type(method),
        "keywords",
        lambda self, context, task, unit: {
            "positive": {"good": 3, "fine": 9},
            "negative": {"bad": 5},
        },
    )
    known = method.prepare(Gated([], []), load_task("sentiment"), "positive", "The lake").known
    assert known.lam == 7
    assert sum(len(neurons) for neurons in known.centre.values()) == 4


def test_monitor_grows_with_the_text():
    """Only the new token's cosines are computed; the monitor equals one begun from the whole text."""
    torch.manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(30, 8, dtype=torch.float64), dim=1)
    keywords = {"positive": unit[[3, 4]], "negative": unit[[5]]}
    control = ControlCentre("positive", keywords, unit, {0: torch.tensor([1])}, 0.2, (0,), (7, 8))
    longer = ControlCentre(
        "positive", keywords, unit, {0: torch.tensor([1])}, 0.2, (0,), (7, 8, 9, 3)
    )
    grown = TextMonitor.of([control, control]).expanded(torch.tensor([1]))
    for token in (9, 3):
        grown = grown.read(torch.tensor([token]))
    at_once = TextMonitor.of([longer])
    assert grown.length.tolist() == at_once.length.tolist() == [4]
    for c in keywords:
        assert torch.allclose(grown.nearest[c], at_once.nearest[c], rtol=0, atol=1e-14)
        assert torch.allclose(grown.latest[c], at_once.latest[c], rtol=0, atol=1e-14)
    assert float(grown.value(1.15)) == pytest.approx(float(at_once.value(1.15)))


def test_keywords_of_sentencepiece_tokenizers():
    """There a space of one's own is a token of its own, and a word has one in front anyway."""
    from lapa2_interp.methods.freectrl import tokens_in_text

    class Piece(ContextStub):
        def ids(self, text):
            return [1] * (len(text) - len(text.lstrip())) + [7] if text.strip() else [1]

    class Bytes(ContextStub):
        def ids(self, text):
            return [{"great": 4, " great": 5, " ": 1}[text]]

    assert tokens_in_text(Piece([], []), "great") == [7]
    assert tokens_in_text(Bytes([], []), "great") == [5]
