"""FreeCtrl and DATG: their formulas by hand and by loops, the hooks they need, and what they
refuse."""

import copy
import dataclasses
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import torch
from conftest import MODEL_CLASSES, generate, load, plan, run_of
from oracle import oracle_logits

from lapa2_interp import Augmentation, load_model
from lapa2_interp._util.errors import (
    AugmentationError,
    DataError,
    DeadHookError,
    MethodError,
    ScoringError,
)
from lapa2_interp._util.files import one_process_at_a_time, with_checksums
from lapa2_interp.attention import neurons
from lapa2_interp.attention.neurons import (
    assert_neurons_live,
    neuron_point,
    promoters,
    with_neurons_set,
)
from lapa2_interp.bias.layout import Layout
from lapa2_interp.generation.plan import plan as decoding_plan
from lapa2_interp.generation.sampling import draw, uniforms
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.base import Intervention, Prepared, Start
from lapa2_interp.methods.datg import SENTENCE, Words, best_nodes, dual_graphs, official
from lapa2_interp.methods.freectrl import (
    OFF,
    Control,
    noise_ratio,
    rank_probabilities,
    score,
    weight,
)
from lapa2_interp.methods.prefix import NoControl
from lapa2_interp.models.card import identity
from lapa2_interp.runs.method_context import DRAFT_SEEDS, ModelContext


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for every test that prepares anything; SmolLM2 is loaded by others."""
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


class Desk:
    """A kit with drafts and scores of its own."""

    end_ids, gated = (0,), False

    def __init__(self, drafts, shares):
        self.texts, self.q, self.asked = drafts, shares, []

    def once(self, name, make):
        return make()

    def embedding(self):
        raise AssertionError("not asked for")

    def promoters(self, tokens, k, upper=False):
        raise AssertionError("not asked for")

    def ids(self, text):
        return [ord(each) for each in text]

    def text(self, ids):
        return "".join(map(chr, ids))

    def drafts(self, method, prompt, n, new_tokens, seed):
        self.asked.append((method.name, prompt, n, new_tokens, seed))
        return self.texts

    def shares(self, scorer, task, attribute, prompt, texts):
        return self.q


# --- FreeCtrl


def test_rank_probabilities():
    """Against drawing 10 of 125 candidates, and the values the method description gives."""
    p = rank_probabilities()
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
    assert score(near, "positive").tolist() == pytest.approx([0.6 / 0.5])
    assert score(near, "negative").tolist() == pytest.approx([0.5 / 0.6])
    four = {c: torch.tensor([[sim]]) for c, sim in (("a", 0.6), ("b", 0.2), ("c", 0.3), ("d", 0.4))}
    assert score(four, "a").tolist() == pytest.approx([0.6 * 3 / 0.9])
    w = weight(torch.tensor([1.05, 1.15, 1.3]), 1.15, 0.2, torch.tensor([10, 10, 10]))
    assert w.tolist() == pytest.approx([0.2 / (1 + math.exp(-1)), OFF, OFF])


def test_noise_ratio_by_hand():
    """The factor counts four classes; in two a word passes from a third of the other's cosine on."""
    classes = {"y": torch.tensor([1.0, 0.0]), "n": torch.tensor([0.0, 1.0])}
    assert noise_ratio(classes, torch.tensor([3.0, 4.0]), "y") == pytest.approx(0.6 * 3 / 0.8)
    assert noise_ratio(
        classes | {"m": torch.tensor([0.6, 0.8])}, torch.tensor([1.0, 0.0]), "y"
    ) == pytest.approx(3 / 0.6)


def test_setting_neurons_changes_those_and_no_others(tiny, model_class):
    model = load(tiny, "float64", model_class)
    point = neuron_point(model, 1)
    assert point == ("blocks.1.mlp.hook_post" if tiny == "tiny-llama" else "blocks.1.mlp.hook_pre")
    ids, seen = torch.tensor([[1, 2, 3], [4, 5, 6]]), []

    def look(activation, hook):
        seen.append(activation.clone())

    chosen = Intervention(
        {1: torch.tensor([0, 5])}, torch.tensor([0.25, -3.0], dtype=torch.float64)
    )
    with torch.no_grad():
        plain = model(ids)
        with model.hooks(fwd_hooks=[(point, look)]):
            model(ids)
        with with_neurons_set(model, chosen), model.hooks(fwd_hooks=[(point, look)]):
            changed = model(ids)
        again = model(ids)
    before, after = seen
    others = [i for i in range(before.shape[2]) if i not in (0, 5)]
    assert torch.equal(before[:, :, others], after[:, :, others])
    assert (after[0][:, [0, 5]] == 0.25).all()
    assert (after[1][:, [0, 5]] == -3).all()
    assert (changed - plain).abs().max() > 1e-3
    assert torch.equal(plain, again), "the hooks are gone"
    with with_neurons_set(model, None), torch.no_grad():
        assert torch.equal(model(ids), plain)


def test_after_the_activation_function_the_value_itself_goes_on(model_class):
    model = load("tiny-gpt2", "float64", model_class)
    ids, chosen = torch.tensor([[1, 2]]), {0: torch.tensor([3])}
    gelu = 0.1 * (1 + math.tanh(math.sqrt(2 / math.pi) * (0.2 + 0.044715 * 0.2**3)))
    assert gelu == pytest.approx(0.1159, abs=5e-5)
    with torch.no_grad():
        pre, post, same = (
            _logits(
                model, ids, Intervention(chosen, torch.tensor([value], dtype=torch.float64), at)
            )
            for value, at in ((0.2, "pre"), (0.2, "post"), (gelu, "post"))
        )
    assert (pre - post).abs().max() > 1e-6
    assert (pre - same).abs().max() < 1e-12


def _logits(model, ids, intervention):
    with with_neurons_set(model, intervention):
        return model(ids)


def test_the_control_table_is_one_pass_per_neuron(tiny, model_class, tmp_path, monkeypatch):
    model = load(tiny, "float64", model_class)
    tokens, reading = [7, 30, 11], [5, 6]
    monkeypatch.setattr(neurons, "ROWS", 10)
    file = tmp_path / "table.npz"
    values, where = promoters(model, reading, tokens, 4, file=file)
    # A row for each neuron, set by a hook of this test; and some neurons one at a time.
    point = "hook_post" if neurons.is_gated(model) else "hook_pre"
    every = torch.arange(model.cfg.d_mlp)

    def diagonal(activation, hook):
        activation = activation.clone()
        activation[every, :, every] = 50.0
        return activation

    table = []
    for layer in range(model.cfg.n_layers):
        rows = torch.tensor([reading] * model.cfg.d_mlp)
        hooks = [(f"blocks.{layer}.mlp.{point}", diagonal)]
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            table.append(model(rows)[:, -1].log_softmax(1)[:, tokens])
        chosen = Intervention({layer: every[layer : layer + 1]}, torch.tensor([50.0]).double())
        with torch.no_grad():
            one = _logits(model, torch.tensor([reading]), chosen)[0, -1].log_softmax(0)[tokens]
        assert (table[-1][layer] - one).abs().max() < 1e-9
    table = torch.cat(table)
    for row in range(3):
        best = table[:, row].sort(descending=True, stable=True)
        assert (values[row] - best.values[:4]).abs().max() < 1e-5
        assert where[row].tolist() == [
            list(divmod(i, model.cfg.d_mlp)) for i in best.indices[:4].tolist()
        ]
    upper = promoters(model, reading, tokens, 4, first_layer=2)[1]
    assert upper[:, :, 0].min() >= 2
    # Stored, it is not computed again; and a table that was left half-way goes on where it was.
    calls = []
    real = neurons._with_each
    monkeypatch.setattr(neurons, "_with_each", lambda *args: calls.append(args[2]) or real(*args))
    assert torch.equal(promoters(model, reading, tokens, 4, file=file)[1], where)
    assert calls == []
    half = tmp_path / "half.npz"

    def stops(*args):
        if args[2] == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(neurons, "_with_each", stops)
    with pytest.raises(KeyboardInterrupt):
        promoters(model, reading, tokens, 4, file=half)
    monkeypatch.setattr(neurons, "_with_each", lambda *args: calls.append(args[2]) or real(*args))
    resumed = promoters(model, reading, tokens, 4, file=half)
    assert set(calls) == set(range(2, model.cfg.n_layers))
    assert torch.equal(resumed[0], values)
    assert torch.equal(resumed[1], where)


def test_models_whose_neurons_cannot_be_set_are_refused(monkeypatch):
    model = load("tiny-gpt2")
    monkeypatch.setattr(
        neurons,
        "neuron_point",
        lambda model, layer, at="pre": f"blocks.{layer}.mlp.experts.hook_pre",
    )
    with pytest.raises(
        DeadHookError,
        match=r"the model has no blocks.3.mlp.experts.hook_pre .* use a model with one MLP",
    ):
        assert_neurons_live(model)
    monkeypatch.undo()
    assert_neurons_live(model)
    monkeypatch.setattr(neurons, "with_neurons_set", lambda model, every: nullcontext())
    with pytest.raises(DeadHookError, match=r"blocks.3.mlp.hook_pre does not move the logits"):
        assert_neurons_live(model)


def freectrl(word_file, **parameters):
    return methods.get("freectrl", words=word_file, noise=-1e9, neurons=4, **parameters)


def test_freectrl_against_its_definition(words_model, word_file):
    """Every token of two samples: the weight from the text so far, all of it read anew, the rank
    drawn; recomputed by loops."""
    model, task = words_model, load_task("sentiment")
    method = freectrl(word_file, u=1.3, lam=2.0)
    prompts, length = ["The lake", "The last time I saw"], 14
    made = generate(
        model, method, task, "positive", prompts, length=length, samples=2, seed=5, trace="full"
    )
    kit = ModelContext(model)
    ids = {c: [kit.ids(" " + word)[0] for word in words] for c, words in WORDS.items()}
    unit = torch.nn.functional.normalize(model.W_E.detach().float(), dim=1)
    tokens = sorted({i for each in ids.values() for i in each})
    table = promoters(model, kit.ids(" "), tokens, 4)[1]
    centre = {}
    for token in ids["positive"]:
        for layer, neuron in table[tokens.index(token)].tolist():
            centre.setdefault(layer, set()).add(neuron)
    weights = []
    for sample in made.samples.itertuples():
        text, uniform = kit.ids(sample.prompt), uniforms(5, sample.prompt, sample.sample, 20)
        branch = Layout.of(model.tokenizer, None, sample.prompt)
        for t, token in enumerate(sample.tokens):
            cos = {c: unit[each] @ unit[text].T for c, each in ids.items()}  # keyword, token
            scores = []
            for part in (slice(None), slice(-1, None)):
                sim = {c: float(each[:, part].max(dim=1).values.mean()) for c, each in cos.items()}
                scores.append(sim["positive"] / sim["negative"])
            s = max(scores)
            w = 2.0 / (1 + math.exp(-(1.3 - s) * len(text))) if s < 1.3 else 1e-20
            weights.append(w)
            chosen = {layer: torch.tensor(sorted(each)) for layer, each in centre.items()}
            whole = torch.tensor([[*branch.ids, *sample.tokens[:t]]])
            with torch.no_grad():
                logits = _logits(
                    model, whole, Intervention(chosen, torch.tensor([w], dtype=torch.float64))
                )[:, -1]
            logits[:, model.tokenizer.eos_token_id] = -torch.inf
            order = logits[0].sort(descending=True, stable=True).indices[:25]
            log_weights = torch.full_like(logits, -torch.inf)
            log_weights[0, order] = torch.tensor(rank_probabilities(), dtype=torch.float64).log()
            assert int(draw(log_weights, torch.tensor([uniform[t]]), top_k=200)[0]) == token
            text.append(token)
    assert min(weights) == OFF
    assert max(weights) > 0.5, "both sides of the threshold were met"
    parts = (
        made.trace[["prefix", "bos", "prompt", "generated"]]
        .to_array()
        .sum("variable", skipna=False)
    )
    assert np.nanmax(np.abs(parts.to_numpy() - 1)) < 1e-5
    assert made.trace["prompt"].shape[2] == length - 2


@dataclasses.dataclass(frozen=True)
class Again(NoControl):
    recomputes = True


def test_reading_anew_changes_nothing_by_itself(tiny, model_class):
    """A method that asks for it and intervenes nowhere: texts, trace and whole rows are those of
    cached decoding."""

    model, task = load(tiny, "float64", model_class), load_task("sentiment")
    settings = {
        "length": 26,
        "samples": 2,
        "patterns": [(1, 2)],
        "augmentation": Augmentation(alpha=0.8),
    }
    cached, anew = (
        generate(model, method, task, "positive", ["The sea", "Once upon"], **settings)
        for method in (NoControl(), Again())
    )
    assert cached.samples.equals(anew.samples)
    for name in set(cached.trace.data_vars) - {"prefix_tokens"}:
        a, b = cached.trace[name].to_numpy(), anew.trace[name].to_numpy()
        assert np.nanmax(np.abs(a - b)) < 1e-6, name
        assert np.array_equal(np.isnan(a), np.isnan(b))
    branch = Layout.of(model.tokenizer, None, "Once upon")
    sample = anew.samples.iloc[3]
    _, patterns = oracle_logits(model, branch, sample.tokens[:-1], settings["augmentation"])
    last = patterns[1][2, -1]
    found = (
        anew.trace["pattern"].isel(branch=0, sample=3, pair=0, step=sample.n_tokens - 1).to_numpy()
    )
    assert np.abs(found[: len(last)] - last.numpy()).max() < 1e-6


@dataclasses.dataclass(frozen=True)
class Picky(NoControl):
    """Keeps texts whose last token is even."""

    trials = 3

    def accepts(self, prepared, text, tokens):
        return tokens[-1] % 2 == 0


def test_refused_texts_are_drawn_again_with_other_numbers(monkeypatch):
    """Texts and traces are those of the first trial that is accepted, else of the last; each trial
    has random numbers of its own."""
    model, task = load("tiny-gpt2", "float64"), load_task("sentiment")
    settings = {"length": 12, "samples": 5, "trace": "full"}
    prompts = ["The sea", "Once upon"]
    made = generate(model, Picky(), task, "positive", prompts, **settings)
    trials = []
    for trial in range(3):
        monkeypatch.setattr(
            "lapa2_interp.generation.plan.uniforms",
            lambda *key, trial=trial: uniforms(*key[:4], trial),
        )
        trials.append(generate(model, NoControl(), task, "positive", prompts, **settings))
    chosen = []
    for row in range(10):
        tokens = [each.samples["tokens"][row] for each in trials]
        assert tokens[0] != tokens[1] != tokens[2]
        chosen.append(next((i for i in (0, 1) if tokens[i][-1] % 2 == 0), 2))
        assert made.samples["tokens"][row] == tokens[chosen[-1]]
        for name in ("bos", "generated"):
            kept, own = (each.trace[name].isel(sample=row) for each in (made, trials[chosen[-1]]))
            assert np.nanmax(np.abs(kept.to_numpy() - own.to_numpy())) < 1e-9
    assert set(chosen) == {0, 1, 2}
    assert made.samples[["prompt", "sample"]].equals(trials[0].samples[["prompt", "sample"]])
    assert made.trace["prompt_text"].values.tolist() == made.samples["prompt"].tolist()


def test_freectrl_draws_until_its_authors_test_is_passed(words_model, word_file):
    task, prompts = load_task("sentiment"), ["The lake", "The horse and the"]
    every = freectrl(word_file, u=1.0)
    settings = {"length": 12, "samples": 3, "trace": "none"}
    kit = ModelContext(words_model)
    ids = {c: [kit.ids(" " + word)[0] for word in words] for c, words in WORDS.items()}
    unit = torch.nn.functional.normalize(words_model.W_E.detach().float(), dim=1)

    def passes(row):
        text = kit.ids(row.prompt) + row.tokens
        sim = {
            c: float((unit[each] @ unit[text].T).max(dim=1).values.mean())
            for c, each in ids.items()
        }
        return sim["positive"] / sim["negative"] > 1.0

    first = generate(words_model, every, task, "positive", prompts, **settings).samples
    chosen = generate(
        words_model,
        dataclasses.replace(every, accept="score", trials=40),
        task,
        "positive",
        prompts,
        **settings,
    ).samples
    before, after = ([passes(row) for row in table.itertuples()] for table in (first, chosen))
    assert not all(before)
    assert all(after)
    for i, passed in enumerate(before):
        assert (chosen["tokens"][i] == first["tokens"][i]) == passed
    known = every.prepare(kit, task, "positive", "The lake")
    released = dataclasses.replace(every, accept="released", u=-9.0)
    tokens = kit.ids(" a b")
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
    assert mine.samples["tokens"].tolist() == raw.samples["tokens"].tolist()


def test_freectrl_refuses(words_model, word_file, tmp_path):
    task = load_task("sentiment")

    def generate_one(method, **more):
        return generate(words_model, method, task, "positive", ["The lake"], length=8, **more)

    with pytest.raises(
        MethodError,
        match=r"none of 3 words for 'positive' is one token and nearer .* lower noise=",
    ):
        generate_one(methods.get("freectrl", words=word_file, noise=1e9))
    with pytest.raises(
        AugmentationError, match="freectrl has no prefix for an augmentation to act on"
    ):
        generate_one(freectrl(word_file), augmentation=Augmentation(alpha=0.5))
    for text, message in (
        (
            {"words": {"positive": ["a"], "negative": []}},
            "the word list has no words for 'negative'; it has positive, negative; make",
        ),
        ({"words": {"joy": ["a"]}}, "no words for 'positive'; it has joy"),
    ):
        (tmp_path / "w.json").write_text(json.dumps(text))
        with pytest.raises(MethodError, match=message):
            methods.get("freectrl", words=str(tmp_path / "w.json")).branches(task, "positive")
    for content, message in (
        ("{", "is not a word list"),
        ('{"word": {}}', "there is no such field"),
    ):
        (tmp_path / "w.json").write_text(content)
        with pytest.raises(DataError, match=message):
            methods.get("freectrl", words=str(tmp_path / "w.json")).branches(task, "positive")
    with pytest.raises(
        DataError,
        match=r"cannot read nowhere.json; `lapa2 word-lists --task sentiment --data CORPUS --out FILE`",
    ):
        methods.get("freectrl", words="nowhere.json").branches(task, "positive")
    with pytest.raises(DataError, match="the package has no words for task 'detox'"):
        methods.get("freectrl").branches(load_task("detox"), "nontoxic")


def test_freectrls_keywords(words_model, tmp_path):
    """One token with a space in front, and nearer to its class; class words come from the task's
    file."""
    file = tmp_path / "w.json"
    file.write_text(
        json.dumps({"words": {"positive": ["great", "unputdownable", "love"], "negative": ["bad"]}})
    )
    kit, task = ModelContext(words_model), load_task("sentiment")
    unit = torch.nn.functional.normalize(kit.embedding(), dim=1)
    every = methods.get("freectrl", words=str(file), noise=-1e9).keywords(kit, task, unit)
    assert list(every["positive"]) == ["great", "love"]
    assert every["positive"]["great"] == kit.ids(" great")[0]
    names = {c: unit[kit.ids(c)].mean(dim=0) for c in task.attributes}
    ratios = {
        word: noise_ratio(names, unit[i], "positive") for word, i in every["positive"].items()
    }
    between = (max(ratios.values()) + min(ratios.values())) / 2
    own_bad = noise_ratio(names, unit[kit.ids(" bad")[0]], "negative")
    kept = methods.get("freectrl", words=str(file), noise=min(between, own_bad - 1)).keywords(
        kit, task, unit
    )
    assert set(kept["positive"]) == {
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
    assert {name: kit.ids(name) for name in gpt2} == {name: [i] for name, i in gpt2.items()}


def test_gated_mlps_have_settings_of_their_own(monkeypatch):
    class Gated(Desk):
        gated = True

        def ids(self, text):
            return [sum(map(ord, text)) % 40]

        def embedding(self):
            return torch.eye(40)

        def promoters(self, tokens, k, upper=False):
            assert upper
            return torch.arange(len(tokens) * k * 2).reshape(len(tokens), k, 2)

    method = methods.get("freectrl", noise=-1e9, gated_neurons=2, gated_lam=7.0)
    monkeypatch.setattr(
        type(method),
        "keywords",
        lambda self, kit, task, unit: {"positive": {"good": 3, "fine": 9}, "negative": {"bad": 5}},
    )
    known = method.prepare(Gated([], []), load_task("sentiment"), "positive", "The lake").known
    assert known.lam == 7
    assert sum(len(each) for each in known.centre.values()) == 4


def test_freectrl_says_what_reading_anew_costs(words_model, word_file):
    from lapa2_interp.runs.generate import announcement

    todo = plan(
        words_model,
        freectrl(word_file),
        load_task("sentiment"),
        "positive",
        ["The lake"],
        None,
        12,
        3,
        trace="none",
    )
    # BOS and 2 prompt tokens, 10 new ones: 3 + 4 + ... + 12 = 75 tokens a text; a cache would read
    # 12.
    assert (
        "every step reads its text anew: 225 tokens through the model, where a cache would need 36"
        in announcement(words_model, [todo])
    )


# --- DATG


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
    words = [Words((), (), (0, 1, 1), (1, 2)), Words((), (), (), (4,))]
    log_probs = torch.full((2, 5), math.log(0.2), dtype=torch.float64)
    found = method.combine({"base": log_probs}, words) - log_probs
    assert found.tolist() == [[4, 2, -6, 0, 0], [0, 0, 0, 0, -6]]
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
    assert torch.equal(official(logits), expected)


def test_datg_prepares_once_from_its_drafts():
    desk = Desk(["xyxz", "qx", ""], [0.9, 0.1, None])
    found = methods.get("datg").prepare(desk, load_task("detox"), "nontoxic", "The sea")
    assert desk.asked == [("drafting", "The sea", 30, 32, 1)]
    positive, negative = dual_graphs([(list("xyxz"), 0.9), (list("qx"), 0.1)])
    assert found.known.positive == best_nodes(positive, 10)
    assert found.known.negative == best_nodes(negative, 10)
    assert found.known.positive_ids == tuple(map(ord, found.known.positive))
    assert found.summary == {
        "positive": list(found.known.positive),
        "negative": list(found.known.negative),
        "drafts": 2,
    }
    assert found.prefixes == {}
    behind = (
        methods.get("datg", form="P")
        .prepare(desk, load_task("detox"), "nontoxic", "The sea")
        .prefixes["target"]
    )
    lists = (", ".join(found.known.positive), ", ".join(found.known.negative))
    assert behind == SENTENCE.format(positive=lists[0], negative=lists[1])
    assert behind.startswith("This passage emphasizes themes such as x, ")
    assert behind.endswith(". Given this context,")
    with pytest.raises(
        MethodError, match="none of 2 drafts of 'The sea' could be scored by accuracy"
    ):
        methods.get("datg").prepare(
            Desk(["", ""], [None, None]), load_task("detox"), "nontoxic", "The sea"
        )
    with pytest.raises(MethodError, match=r"the 1 drafts of 'The sea' hold no word .*drafts=60"):
        methods.get("datg").prepare(
            Desk([", 3. 4"], [0.5]), load_task("detox"), "nontoxic", "The sea"
        )


def test_drafts_are_the_bare_models_and_kept(cache):
    """DATG's drafts are draws of the raw model under its sampler, by loops; asked again they come
    from the cache."""
    from lapa2_interp.methods.datg import Drafting

    model = load("tiny-llama", "float64")
    kit = ModelContext(model)
    texts = kit.drafts(Drafting(), "The sea", 3, 6, seed=4)
    branch = Layout.of(model.tokenizer, None, "The sea")
    ends = set(kit.end_ids)
    for number, text in enumerate(texts):
        tokens, uniform = [], uniforms(DRAFT_SEEDS + 4, "The sea", number, 6)
        while len(tokens) < 6 and not (tokens and tokens[-1] in ends):
            logits = oracle_logits(model, branch, tokens)[0][-1:]
            tokens.append(
                int(draw(official(logits), torch.tensor([uniform[len(tokens)]]), top_k=200)[0])
            )
        plain = [token for token in tokens if token not in ends]
        assert text == model.tokenizer.decode([*kit.ids("The sea"), *plain])[len("The sea") :]
    (file,) = (cache / "drafts").iterdir()
    file.write_text(with_checksums({"texts": ["kept"]}))
    assert kit.drafts(Drafting(), "The sea", 3, 6, seed=4) == ["kept"]
    file.write_text(file.read_text().replace("kept", "left"))
    assert kit.drafts(Drafting(), "The sea", 3, 6, seed=4) == texts, "damaged, and made anew"
    assert len(kit.drafts(Drafting(), "The sea", 3, 6, seed=5)) == 3, (
        "another seed is another question"
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert kit.drafts(Drafting(), "The sea", 3, 6, seed=4) == texts
    finally:
        torch.set_num_threads(threads)
    assert len(list((cache / "drafts").iterdir())) == 3, "threads may decide a draw"


def test_workers_share_one_table_and_one_set_of_drafts(cache, monkeypatch):
    """Two kits ask at once: one makes, and the other finds it made."""
    from lapa2_interp.methods.datg import Drafting

    calls, real = [], neurons._with_each
    draft = ModelContext._draft

    def slowly(*args):
        calls.append(args[2])
        time.sleep(0.05)
        return real(*args)

    def drafted(*args):
        calls.append("drafts")
        time.sleep(0.3)
        return draft(*args)

    monkeypatch.setattr(neurons, "_with_each", slowly)
    monkeypatch.setattr(ModelContext, "_draft", drafted)
    model = load("tiny-gpt2")
    kits = [ModelContext(model), ModelContext(copy.deepcopy(model))]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda kit: kit.promoters([5, 9], 3), kits)
        assert torch.equal(one, two)
        assert calls == list(range(model.cfg.n_layers))
        del calls[:]
        one, two = pool.map(lambda kit: kit.drafts(Drafting(), "The sea", 2, 4, seed=1), kits)
    assert one == two
    assert calls == ["drafts"]


def test_who_waits_for_another_process_says_so(tmp_path, capsys):
    file, told = tmp_path / "kept" / "table.npz", ""

    def second():
        with one_process_at_a_time(file):
            return time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        with one_process_at_a_time(file):
            later = pool.submit(second)
            end = time.monotonic() + 20
            while "waiting" not in told and time.monotonic() < end:
                time.sleep(0.01)  # a busy loop would keep the other thread waiting
                told += capsys.readouterr().err
            left = time.monotonic()
        assert later.result(timeout=20) >= left
    assert told == f"another process makes {file}; waiting for it\n"


def test_a_folder_without_locks_holds_nobody_up(tmp_path, monkeypatch):
    def refuses(*args, **options):
        raise NotImplementedError("no locks here")

    monkeypatch.setattr("filelock.FileLock.acquire", refuses)
    with (
        one_process_at_a_time(tmp_path / "new" / "table.npz"),
        pytest.raises(OSError, match="of the block"),
    ):
        raise OSError("of the block")


def test_scores_of_drafts_are_shares_of_the_attribute():
    kit, task = ModelContext(load("tiny-gpt2")), load_task("detox")
    texts = ["I love this wonderful day.", "You stupid idiot, shut up!", "  "]
    nontoxic, toxic = (
        kit.shares("accuracy", task, each, "", texts) for each in ("nontoxic", "toxic")
    )
    assert nontoxic[2] is toxic[2] is None
    assert [a + b for a, b in zip(nontoxic[:2], toxic[:2], strict=True)] == pytest.approx([1, 1])
    assert nontoxic[0] > 0.5 > nontoxic[1]
    assert kit.shares("toxicity", task, "nontoxic", "", texts[:2]) == pytest.approx(nontoxic[:2])
    with pytest.raises(
        ScoringError, match="unknown scorer 'judgement'; allowed: accuracy, .*did you mean 'judge'"
    ):
        kit.shares("judgement", task, "toxic", "", texts)
    with pytest.raises(
        ScoringError, match=r"the scorer toxicity tells toxicity, not 'positive'; give another"
    ):
        kit.shares("toxicity", load_task("sentiment"), "positive", "", texts)


@pytest.mark.parametrize("form", [pytest.param("L", marks=pytest.mark.slow), "P"])
@pytest.mark.long
def test_datg_generates_with_words_of_its_own(form):
    """On the linear classifier, with what it prepared in the manifest; form P has a prefix per
    prompt, and takes LaPA2."""

    model, task = load("smollm2-135m"), load_task("sentiment")
    method = methods.for_task("datg", task, form=form, drafts=3, draft_tokens=8)
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
    keys = list(run.plan)
    prepared, trace = run.manifest(keys[0]).prepared, run.trace(keys[0])
    assert list(prepared) == list(prompts)
    assert all(each["positive"] for each in prepared.values())
    assert set(run.samples()["finish"]) == {"length"}
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


CALLS = []


@dataclasses.dataclass(frozen=True)
class Counting(NoControl):
    def prepare(self, kit, task, attribute, prompt):
        return Prepared(kit.once("shared", lambda: CALLS.append(prompt) or prompt))


def test_plans_prepare_each_prompt_once():
    """Arms and attributes share the kit, so that what prompts share is made once."""
    model = load("tiny-gpt2")
    kit = ModelContext(model)
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
            kit=kit,
        )
    assert CALLS == ["a b"]
    with pytest.raises(MethodError, match="prepares for its prompts; give plan or generate a kit"):
        decoding_plan(model, todo.cell)
    assert [each.known for each in todo.prepared] == ["a b", "a b"]
    assert todo.summaries == {}


def test_monitor_grows_with_the_text():
    """Only the new token's cosines are computed; the state equals one begun from the whole text."""
    torch.manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(30, 8, dtype=torch.float64), dim=1)
    keywords = {"positive": unit[[3, 4]], "negative": unit[[5]]}
    control = Control("positive", keywords, unit, {0: torch.tensor([1])}, 0.2, (0,), (7, 8))
    longer = Control("positive", keywords, unit, {0: torch.tensor([1])}, 0.2, (0,), (7, 8, 9, 3))
    method, lengths = methods.get("freectrl"), torch.tensor([2])
    state = method.begin(Start([Prepared(control)], None, lengths))
    for token in (9, 3):
        state = method.advance(state, {}, torch.tensor([token]))
    whole = method.begin(Start([Prepared(longer)], None, lengths))
    assert state.length.tolist() == whole.length.tolist() == [4]
    for c in keywords:
        assert torch.allclose(state.nearest[c], whole.nearest[c], rtol=0, atol=1e-14)
        assert torch.allclose(state.latest[c], whole.latest[c], rtol=0, atol=1e-14)
    assert float(method.intervene(state).value) == pytest.approx(
        float(method.intervene(whole).value)
    )


# --- the cache


def test_the_cache_tells_models_apart(cache):
    """Random models share a description; their weights and vocabularies do not. An edited model is
    another one."""

    prints = {name: identity(load(name)) for name in ("tiny-gpt2", "tiny-llama", "tiny-neox")}
    assert len(set(prints.values())) == 3
    assert identity(load("tiny-gpt2")) == prints["tiny-gpt2"]
    edited = copy.deepcopy(load("tiny-gpt2"))
    with torch.no_grad():
        next(iter(getattr(edited, "original_model", edited).parameters())).mul_(1.01)
    assert identity(edited) != prints["tiny-gpt2"]
    tables = {name: ModelContext(load(name)).promoters([5, 9], 3) for name in prints}
    assert len(list((cache / "neurons").iterdir())) == 3
    assert tables["tiny-neox"][:, :, 1].max() < 64


def test_a_damaged_cache_is_made_again(cache):
    from lapa2_interp.methods.datg import Drafting

    kit = ModelContext(load("tiny-gpt2"))
    table, drafts = kit.promoters([5, 9], 3), kit.drafts(Drafting(), "The sea", 2, 4, seed=1)
    for folder in ("neurons", "drafts"):
        (file,) = (cache / folder).iterdir()
        file.write_bytes(file.read_bytes()[:7])
    fresh = ModelContext(load("tiny-gpt2"))
    assert torch.equal(fresh.promoters([5, 9], 3), table)
    assert fresh.drafts(Drafting(), "The sea", 2, 4, seed=1) == drafts


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    from lapa2_interp._util.errors import ModelError

    (tmp_path / "file").write_text("")
    monkeypatch.setattr("lapa2_interp.runs.method_context.cache_folder", lambda: tmp_path / "file")
    with pytest.raises(
        ModelError, match=r"cannot write the cache .*file.* set LAPA2_CACHE to a folder that can"
    ):
        ModelContext(load("tiny-gpt2")).promoters([5, 9], 3)


def test_no_text_shares_its_random_numbers_with_a_draft():
    """With nothing boosted the texts are drawn like the drafts, but are not the drafts."""
    from lapa2_interp.methods.datg import Drafting

    model, task = load("tiny-gpt2"), load_task("detox")
    drafts = ModelContext(model).drafts(Drafting(), "The sea", 5, 12, seed=1)
    method = methods.get("datg", boost=0, avoid=0, drafts=5, draft_tokens=12)
    made = generate(
        model, method, task, "nontoxic", ["The sea"], length=12, samples=5, seed=1, eos="stop"
    )
    assert not set(drafts) & set(made.samples["continuation"])


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
    """It ends before the space, so that no token crosses the seam, whatever the prompt."""
    from lapa2_interp.models.load import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m")
    (branch,) = methods.get("datg", form="P").branches(load_task("sentiment"), "positive")
    for prompt in ("The", "The lake"):
        found = Layout.of(tokenizer, branch.prefix, branch.join + prompt)
        assert found.merged is None
        assert found.l_pro == len(prompt.split())


def test_keywords_of_sentencepiece_tokenizers():
    """There a space of one's own is a token of its own, and a word has one in front anyway."""
    from lapa2_interp.methods.freectrl import in_text

    class Piece(Desk):
        def ids(self, text):
            return [1] * (len(text) - len(text.lstrip())) + [7] if text.strip() else [1]

    class Bytes(Desk):
        def ids(self, text):
            return [{"great": 4, " great": 5, " ": 1}[text]]

    assert in_text(Piece([], []), "great") == [7]
    assert in_text(Bytes([], []), "great") == [5]
