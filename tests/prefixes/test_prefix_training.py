"""Training: losses on hand-made numbers, folding, what a short real training does, and that
resuming changes nothing."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import load
from scipy.stats import t
from torch.nn.functional import cross_entropy

from lapa2_interp.errors import PrefixError
from lapa2_interp.methods import load_task
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.load import load_transformers, shared_tokenizer
from lapa2_interp.prefixes.evaluation import nll_interval
from lapa2_interp.prefixes.likelihood import TextRows, text_nll
from lapa2_interp.prefixes.optimization import PrefixTraining, TrainingTexts, contrastive_loss
from lapa2_interp.prefixes.parameters import PrefixParameters, text_keys_and_values
from lapa2_interp.prefixes.recipes import RECIPES, TrainingRecipe, training_recipe
from lapa2_interp.prefixes.soft_prefix import cards_in, kv_shape_of, load_prefix
from lapa2_interp.prefixes.training import tokenise_pieces, train_set
from lapa2_interp.progress import hidden_bar
from lapa2_interp.tasks.corpora import read_corpus, split_pieces
from lapa2_interp.tasks.task import Attribute

SENTIMENT = load_task("sentiment")
SMALL = {
    "dtype": "float32",
    "slots": 3,
    "batch": 4,
    "max_tokens": 12,
    "check_every": 3,
    "shared": 0,
}
POSITIVE = [
    f"{a} {b} good"
    for a in ("very", "quite", "really", "so")
    for b in ("nice and", "well made", "kind and", "warm")
]
NEGATIVE = [
    f"{a} {b} bad"
    for a in ("very", "quite", "really", "so")
    for b in ("ugly and", "cold", "dull and", "grim")
]


@pytest.fixture
def reviews(tmp_path):
    """A corpus file of two easily told classes."""
    import pandas as pd

    rows = [(text, "positive") for text in POSITIVE] + [(text, "negative") for text in NEGATIVE]
    file = tmp_path / "reviews.jsonl"
    pd.DataFrame(rows, columns=["text", "label"]).to_json(file, orient="records", lines=True)
    return file


def corpus(file):
    return [read_corpus(str(file), ["positive", "negative"])]


def job(name="tiny-gpt2", folder=None, seed=0, **settings):
    """A small training of one prefix on random bytes; as many others are held out."""
    network, _, _ = load_transformers(name, "float32")
    network.requires_grad_(False)
    chosen = training_recipe("small", **(SMALL | {"start": "random"} | settings))
    rng = np.random.default_rng(seed)
    n = 2 if chosen.objective == "contrastive" else 1
    texts, held_out = (
        [rng.integers(5 + 40 * c, 45 + 40 * c, (12, 8)).tolist() for c in range(n)]
        for _ in range(2)
    )
    shape = kv_shape_of(network.config, chosen.slots)
    names = ("positive", "negative")[:n]
    return PrefixTraining(
        network,
        (0,),
        shape,
        chosen,
        names,
        TrainingTexts.of(texts),
        TrainingTexts.of(held_out),
        folder / "state.pt",
    )


def run(training):
    with hidden_bar() as bar:
        training.run(bar)
    return training


# --- likelihoods

ANGLES = 1e-5
"""What rotary models may differ by in float64: their sines are float32, and those of AVX2 are
others in rows of other lengths."""


@pytest.mark.parametrize("shifted", [True, False])
def test_nll_and_its_gradient_are_those_of_the_models_own_logits(tiny, shifted):
    """Against one text at a time through the whole model, with padding absent."""
    from transformers import DynamicCache

    network, _, _ = load_transformers(tiny, "float64")
    network.requires_grad_(False)
    exact = 1e-9 if tiny == "tiny-gpt2" else ANGLES
    shape = kv_shape_of(network.config, 4)
    texts = [[5, 6, 7, 8, 9], [20, 21], [30, 31, 32]]
    rows = TextRows.of(texts, (0,))
    both = torch.randn(
        2,
        shape.n_layers,
        shape.n_kv_heads,
        4,
        shape.d_head,
        dtype=torch.float64,
        requires_grad=True,
    )
    spread = both[:, None].expand(-1, 3, -1, -1, -1, -1)
    nll = text_nll(network, rows, spread[0], spread[1], shifted)
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    (measured,) = torch.autograd.grad((nll.sum(1) * weights).sum(), both)
    expected = []
    for text in texts:
        cache = DynamicCache()
        for layer in range(shape.n_layers):
            cache.update(both[0, layer][None], both[1, layer][None], layer)
        positions = torch.arange(len(text)) + (4 if shifted else 0)
        logits = network(
            torch.tensor([[0, *text[:-1]]]),
            position_ids=positions[None],
            **{cache_name(network): cache},
        ).logits[0]
        expected.append(cross_entropy(logits, torch.tensor(text), reduction="none"))
    for row, row_nll in enumerate(expected):
        assert (nll[row, : len(row_nll)] - row_nll).abs().max() < exact
        assert (nll[row, len(row_nll) :] == 0).all()
    (gradient,) = torch.autograd.grad(
        sum(w * row_nll.sum() for w, row_nll in zip(weights, expected, strict=True)), both
    )
    assert (measured - gradient).abs().max() < exact * gradient.abs().max()
    assert gradient.abs().max() > 1e-3


def test_a_hard_prefix_is_read_but_not_scored():
    network, _, _ = load_transformers("tiny-llama", "float64")
    rows = TextRows.of([[5, 6, 7]], (0, 11, 12))
    nll = text_nll(network, rows)
    logits = network(torch.tensor([[0, 11, 12, 5, 6, 7]])).logits[0]
    expected = cross_entropy(logits[2:5], torch.tensor([5, 6, 7]), reduction="none")
    assert (nll[0, 2:5] - expected).abs().max() < ANGLES
    assert (nll[0, :2] == 0).all()


# --- losses


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8}),
        ("Granite", {"logits_scaling": 4.0}),
        ("Cohere", {"logit_scale": 0.25}),
    ],
)
def test_models_that_change_their_logits_are_read_as_they_are(family, settings):
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=1.0, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    network = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    rows = TextRows.of([[5, 6, 7, 8], [9, 10]], [1])
    with torch.no_grad():
        logits = network(input_ids=rows.ids, attention_mask=rows.live.long()).logits
        expected = -logits[:, :-1].log_softmax(2).gather(2, rows.ids[:, 1:, None])[..., 0]
        nll_of_rows = text_nll(network, rows)
    torch.testing.assert_close(nll_of_rows, expected * rows.targets[:, 1:], rtol=1e-4, atol=1e-4)


def test_contrastive_loss_on_hand_made_numbers():
    """Two texts of 2 and 4 tokens under two prefixes; by hand, in logarithms."""
    nll = torch.tensor([[4.0, 8.0], [6.0, 4.0]])
    tokens, label = torch.tensor([2, 4]), torch.tensor([0, 1])
    for sum_loss, gaps in ((False, (1.0, 1.0)), (True, (2.0, 4.0))):
        disc = sum(math.log(1 + math.exp(-gap)) for gap in gaps) / 2
        gen = (4 / 2 + 4 / 4) / 2
        for w in (0.0, 0.3, 1.0):
            loss = contrastive_loss(nll, tokens, label, gen_weight=w, sum_loss=sum_loss)
            assert float(loss) == pytest.approx((1 - w) * disc + w * gen, abs=1e-6)
    scaled = contrastive_loss(nll, tokens, label, gen_weight=0.0, sum_loss=True, logit_scale=0.25)
    assert float(scaled) == pytest.approx(
        (math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(-1))) / 2, abs=1e-6
    )


def test_contrastive_loss_against_one_random_competitor():
    nll = torch.tensor([[1.0, 9.0], [2.0, 3.0], [7.0, 5.0]])
    tokens, label, competitor = torch.tensor([1, 1]), torch.tensor([0, 1]), torch.tensor([2, 2])
    loss = contrastive_loss(nll, tokens, label, gen_weight=0.0, sum_loss=True, wrong=competitor)
    assert float(loss) == pytest.approx(
        (math.log(1 + math.exp(-6)) + math.log(1 + math.exp(-2))) / 2, abs=1e-6
    )
    everyone = contrastive_loss(nll, tokens, label, gen_weight=0.0, sum_loss=True)
    by_hand = (
        math.log(1 + math.exp(-1) + math.exp(-6)) + math.log(1 + math.exp(-6) + math.exp(-2))
    ) / 2
    assert float(everyone) == pytest.approx(by_hand, abs=1e-6)


def test_a_zero_prefix_without_dropout_stays_rank_one(tmp_path):
    """All slots start equal and get equal gradients; dropout in the network, or a random start,
    breaks the tie."""

    def spread(**settings):
        settings = {
            "parameterisation": "linear",
            "lr": 1e-2,
            "epochs": 4,
            "patience": None,
            "middle": 8,
        } | settings
        (tmp_path / "state.pt").unlink(missing_ok=True)
        both = run(job(folder=tmp_path, **settings)).folded()
        return (both - both[..., :1, :]).abs().max().item(), both.std().item()

    tied, size = spread(start="zero")
    assert tied < 1e-6 < 1e-3 < size
    # Attention dropout differs from key to key, and so from slot to slot.
    assert spread(start="zero", dropout=0.3)[0] > 1e-4
    assert spread(start="random")[0] > 1e-3


# --- parameterisations


def test_folding_equals_the_formulas():
    """K = E_K W + b, V = E_V W + b per layer (air); one table through Linear-Tanh-Linear, or
    Linear, for all layers."""
    shape = kv_shape_of(load_transformers("tiny-llama")[0].config, 3)
    width, layers = shape.n_kv_heads * shape.d_head, shape.n_layers

    def parts(flat):  # [slot, kv_head x d_head] -> [kv_head, slot, d_head]
        return flat.view(3, shape.n_kv_heads, shape.d_head).transpose(0, 1)

    air = PrefixParameters(
        2, shape, TrainingRecipe(parameterisation="air", start="random", slots=3, middle=6)
    )
    with torch.no_grad():
        air.bias.normal_()
        both = air()
    for prefix in range(2):
        for layer in range(layers):
            for part in range(2):
                flat = (
                    air.tables[prefix, part, layer] @ air.weight[prefix, layer]
                    + air.bias[prefix, layer]
                )
                assert torch.allclose(both[part, prefix, layer], parts(flat), atol=1e-6)
    for kind in ("mlp", "linear"):
        made = PrefixParameters(
            2, shape, TrainingRecipe(parameterisation=kind, start="random", slots=3, middle=6)
        )
        both = made()
        for prefix in range(2):
            table = made.tables[prefix]
            flat = (made.maps[prefix] if kind == "mlp" else made.map)(table).view(
                3, layers, 2, width
            )
            for layer in range(layers):
                for part in range(2):
                    assert torch.allclose(
                        both[part, prefix, layer], parts(flat[:, layer, part]), atol=1e-6
                    )
    n_numbers = sum(parameter.numel() for parameter in air.parameters()) / 2
    assert n_numbers == layers * (2 * 3 * 6 + 6 * width + width)


def test_a_start_from_text_is_that_texts_keys_and_values():
    """Shifted and rotary: the slots are the text read behind BOS; unshifted ones lie before
    position 0."""
    network, _, _ = load_transformers("tiny-llama", "float64")
    ids = [5, 6, 7, 8]
    shifted = text_keys_and_values(network, (0,), ids, 4, True)
    output = network(
        torch.tensor([[0, *ids]]), position_ids=torch.arange(-1, 4)[None], use_cache=True
    )
    cache = output[cache_name(network)]
    assert (
        shifted[0] - torch.stack([layer.keys[0, :, 1:] for layer in cache.layers])
    ).abs().max() < ANGLES
    # Only distances matter to rotary attention: unshifted slots in front of a text at 0 == shifted
    # ones before a text at 4.
    unshifted = text_keys_and_values(network, (0,), ids, 4, False)
    rows = TextRows.of([[9, 10, 11]], (0,))
    nll = [
        text_nll(network, rows, both[0][None], both[1][None], moved)
        for both, moved in ((shifted, True), (unshifted, False))
    ]
    assert (nll[0] - nll[1]).abs().max() < ANGLES
    short = text_keys_and_values(network, (0,), ids[:3], 7, True)
    assert (short[:, :, :, :3] - shifted[:, :, :, :3]).abs().max() < ANGLES, (
        "a short text is repeated"
    )


# --- training


@pytest.mark.parametrize("parameterisation", ["direct", "air", "mlp", "linear"])
@pytest.mark.parametrize("objective", ["mle", "contrastive"])
def test_a_short_training_lowers_the_held_out_loss(parameterisation, objective, tmp_path):
    rate = {"direct": 0.3, "air": 0.1, "mlp": 3e-2, "linear": 0.1}[parameterisation]
    settings = {
        "parameterisation": parameterisation,
        "objective": objective,
        "lr": rate,
        "middle": 16,
        "epochs": 4,
    }
    losses = run(job(folder=tmp_path, **settings)).losses
    assert min(losses.values()) < losses[0] - 0.1


def test_training_stops_when_nothing_improves(tmp_path):
    """A rate too small to change anything; the start is kept."""
    training = run(job(folder=tmp_path, lr=1e-30, epochs=50, patience=2))
    assert training.step == 2 * training.recipe.check_every < training.total
    assert min(training.losses, key=training.losses.get) == 0
    assert torch.equal(training.best, job(folder=tmp_path).folded())


@pytest.mark.parametrize(
    "settings", [{}, {"dropout": 0.2}, {"objective": "contrastive", "negatives": "one"}]
)
def test_a_killed_training_resumes_to_the_same_result(settings, tmp_path, monkeypatch):
    settings = {"lr": 3e-2, "epochs": 3, "patience": None} | settings
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    undisturbed = run(job(folder=tmp_path / "whole", **settings))
    killed = job(folder=tmp_path / "killed", **settings)
    step = PrefixTraining._train_step

    def until_seven(self):
        if self.step == 7:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(PrefixTraining, "_train_step", until_seven)
    with pytest.raises(KeyboardInterrupt):
        run(killed)
    monkeypatch.undo()
    resumed = run(job(folder=tmp_path / "killed", **settings))
    assert resumed.losses == undisturbed.losses
    assert torch.equal(resumed.best, undisturbed.best)
    assert resumed.tokens == undisturbed.tokens


def test_a_step_that_was_best_before_a_stop_stays_the_best(tmp_path, monkeypatch):
    """The loss is least at step 4; the training stops at step 7, and nothing is better later."""
    settings = {"lr": 3e-2, "epochs": 3, "check_every": 2, "patience": 99}
    monkeypatch.setattr(PrefixTraining, "held_out_loss", lambda self: abs(self.step - 4.0))
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    undisturbed = run(job(folder=tmp_path / "whole", **settings))
    assert undisturbed.kept_step == 4 < 7 < undisturbed.step
    stopped, step = job(folder=tmp_path / "stopped", **settings), PrefixTraining._train_step
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(
            PrefixTraining, "_train_step", lambda self: step(self) if self.step < 7 else stop()
        )
        run(stopped)
    resumed = run(job(folder=tmp_path / "stopped", **settings))
    assert torch.equal(resumed.best, undisturbed.best)
    assert not torch.equal(resumed.best, resumed.folded())


def stop():
    raise KeyboardInterrupt


def test_held_out_texts_decide_and_the_rate_rises_and_falls(tmp_path, monkeypatch):
    """The loss that chooses the step is that of the held-out texts, by hand; the best step is kept
    where the loss rises afterwards; the rate of every step is the warm-up's or the decay's."""
    training = job(folder=tmp_path, lr=0.05, epochs=3, warmup=0.25, check_every=1, patience=99)
    start, rates, folds = training.folded().clone(), [], {}
    texts = training.held_out.texts
    rows = TextRows.of(texts, (0,), "cpu")
    spread = start[:, 0][:, None].expand(-1, len(texts), -1, -1, -1, -1)
    with torch.no_grad():
        nll = text_nll(training.network, rows, spread[0], spread[1], training.recipe.shifted).sum()
    step, check = PrefixTraining._train_step, PrefixTraining._check

    def train(self):
        step(self)
        rates.append(self.optimizer.param_groups[0]["lr"])

    def rising(self):
        check(self)
        folds[self.step] = self.folded().clone()
        if self.step == 4:  # from here on nothing is better
            monkeypatch.setattr(PrefixTraining, "held_out_loss", lambda self: 1e6 + self.step)

    monkeypatch.setattr(PrefixTraining, "_train_step", train)
    monkeypatch.setattr(PrefixTraining, "_check", rising)
    run(training)
    assert training.losses[0] == pytest.approx(float(nll / rows.targets.sum()), rel=1e-5)
    best = min(training.losses, key=training.losses.get)
    assert best <= 4 < max(training.losses)
    assert torch.equal(training.best, folds[best])
    assert not torch.equal(training.best, folds[max(folds)])
    n = training.total
    warm = round(0.25 * n)
    expected = [0.05 * min((i + 1) / warm, (n - i) / (n - warm)) for i in range(n)]
    assert rates == pytest.approx(expected)
    assert max(rates) == pytest.approx(0.05)
    assert rates[0] < rates[warm - 1] > rates[-1]


def test_without_early_stopping_the_last_step_is_kept(tmp_path, reviews, monkeypatch):
    """As the literature's recipes do, also where an earlier step was better."""
    made = {}
    for patience, sign in ((None, 1), (6, 1), (6, -1)):
        monkeypatch.setattr(
            PrefixTraining, "held_out_loss", lambda self, sign=sign: float(sign * self.step)
        )
        made[patience, sign], _ = train_set(
            "tiny-llama",
            SENTIMENT,
            corpus(reviews),
            corpus(reviews),
            tmp_path / f"{patience}{sign}",
            training_recipe("small", **SMALL | {"patience": patience}),
        )
    steps = {key: prefix.card.training.best_step for key, prefix in made.items()}
    assert steps == {(None, 1): 4, (6, 1): 0, (6, -1): 4}
    assert torch.equal(made[None, 1].keys, made[6, -1].keys)
    assert not torch.equal(made[None, 1].keys, made[6, 1].keys)


def test_a_set_that_began_with_other_words_is_not_gone_on_with(tmp_path, reviews):
    """Where it begins with the hard prefixes; a set that does not is the same with any."""
    others = SENTIMENT.model_copy(
        update={
            "attributes": {name: Attribute(prefix=f"Be {name}:") for name in SENTIMENT.attributes}
        }
    )
    for start, shared in (("hard", 0), ("text", 0)):
        chosen = training_recipe("small", **SMALL | {"start": start, "shared": shared})
        data = corpus(reviews), corpus(reviews), tmp_path / start, chosen
        before = train_set("tiny-llama", SENTIMENT, *data)
        if start == "hard":
            with pytest.raises(PrefixError, match="is not empty and holds no unfinished training"):
                train_set("tiny-llama", others, *data)
        else:
            again = train_set("tiny-llama", others, *data)
            assert [prefix.card.sha256 for prefix in again] == [
                prefix.card.sha256 for prefix in before
            ]


def test_a_set_is_trained_by_one_process_at_a_time(tmp_path, reviews, monkeypatch):
    chosen = training_recipe("small", **SMALL)
    data = "tiny-llama", SENTIMENT, corpus(reviews), corpus(reviews), tmp_path / "a", chosen
    step, refused = PrefixTraining._train_step, []

    def meanwhile(self):
        if not refused:
            refused.append(True)
            with pytest.raises(PrefixError, match="is being trained by another process; wait"):
                train_set(*data)
        step(self)

    monkeypatch.setattr(PrefixTraining, "_train_step", meanwhile)
    train_set(*data)
    assert refused


def test_a_set_is_trained_saved_and_resumed(tmp_path, reviews, monkeypatch):
    """From texts to files: the network is untouched, the sets hold what was best, and a second call
    finishes the first."""
    settings = SMALL | {"lr": 0.05, "epochs": 2, "start": "hard", "shared": 12}
    (tmp_path / "a" / ".training").mkdir(parents=True)  # killed before its plan was there
    chosen = training_recipe("small", **settings)
    made = train_set(
        "tiny-llama", SENTIMENT, corpus(reviews), corpus(reviews), tmp_path / "a", chosen
    )
    assert [prefix.card.attribute for prefix in made] == ["positive", "negative"]
    for prefix in made:
        training = prefix.card.training
        assert training.recipe["lr"] == 0.05
        assert training.texts == 16
        assert (
            training.losses[training.best_step]
            == min(training.losses.values())
            < training.losses[0]
        )
        again = load_prefix(tmp_path / "a", prefix.card.attribute)
        assert torch.equal(again.keys, prefix.keys)
        again.check(load("tiny-llama"))
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == [
        ".plan",
        "negative.json",
        "negative.safetensors",
        "positive.json",
        "positive.safetensors",
    ]
    step, count = PrefixTraining._train_step, []

    def broken(self):
        count.append(self.attributes)
        if len(count) == 17:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(PrefixTraining, "_train_step", broken)
    with pytest.raises(KeyboardInterrupt):
        train_set("tiny-llama", SENTIMENT, corpus(reviews), corpus(reviews), tmp_path / "b", chosen)
    assert count[0] == ("shared",)
    assert ("positive",) in count
    assert count[-1] == ("negative",), "the first prefix was finished"
    monkeypatch.undo()
    assert [card.attribute for card in cards_in(tmp_path)] == ["negative", "positive", "positive"]
    with pytest.raises(PrefixError, match="results of another recipe"):
        train_set(
            "tiny-llama",
            SENTIMENT,
            corpus(reviews),
            corpus(reviews),
            tmp_path / "b",
            training_recipe("small", **settings | {"lr": 1}),
        )
    train_set("tiny-llama", SENTIMENT, corpus(reviews), corpus(reviews), tmp_path / "b", chosen)
    for name in ("positive", "negative"):
        assert torch.equal(
            load_prefix(tmp_path / "a", name).keys, load_prefix(tmp_path / "b", name).keys
        )
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "a").iterdir()}
    again = train_set(
        "tiny-llama", SENTIMENT, corpus(reviews), corpus(reviews), tmp_path / "a", chosen
    )
    assert [prefix.card for prefix in again] == [prefix.card for prefix in made]
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "a").iterdir()} == before, (
        "a finished set stays"
    )
    faster = training_recipe("small", **settings | {"lr": 0.06})
    with pytest.raises(PrefixError, match="is not empty and holds no unfinished training"):
        train_set("tiny-llama", SENTIMENT, corpus(reviews), corpus(reviews), tmp_path / "a", faster)


def test_a_trained_set_tells_its_attributes_apart(tmp_path, reviews):
    """On texts it learned: own texts are likeliest under their own prefix, which hard prefixes of a
    random model cannot do."""
    from lapa2_interp.prefixes.evaluation import evaluate_sets

    own = {"lr": 0.1, "epochs": 6, "objective": "contrastive", "start": "random", "patience": None}
    chosen = training_recipe("small", **SMALL | own)
    train_set("tiny-llama", SENTIMENT, corpus(reviews), corpus(reviews), tmp_path / "set", chosen)
    table = evaluate_sets(
        [tmp_path / "set"], SENTIMENT, corpus(reviews), dtype="float32", max_tokens=12
    )
    cells = table.set_index(["label", "prefix"])["nll"]
    for own, opposite in (("positive", "negative"), ("negative", "positive")):
        assert cells[own, own] < min(cells[own, opposite], cells[own, "none"])
        card = load_prefix(tmp_path / "set", own).card
        assert card.held_out.nll[own].mean == pytest.approx(cells[own, own])
        assert card.held_out.accuracy_of_set.mean > 0.9
        assert card.held_out.accuracy_of_set.n == 32
    assert card.held_out.hard_accuracy_of_set.mean < 0.9


def nlls(*texts):
    """Of each text its NLL per token and its number of tokens."""
    return pd.DataFrame([{"nll": nll * tokens, "tokens": tokens} for nll, tokens in texts])


def test_intervals_of_few_texts_are_students():
    interval = nll_interval(nlls((3.0, 5), (4.0, 5), (8.0, 5)))
    half = t.ppf(0.975, 2) * np.std([3, 4, 8], ddof=1) / math.sqrt(3)
    assert (interval.mean, interval.n, interval.clusters) == (5, 3, 3)
    assert (interval.low, interval.high) == pytest.approx((5 - half, 5 + half))
    assert nll_interval(nlls((2.0, 1), (5.0, 9))).mean == pytest.approx(4.7), "of all tokens"
    alone = nll_interval(nlls((3.0, 5)))
    assert alone.mean == 3
    assert math.isnan(alone.low)
    assert math.isnan(alone.high)


def test_intervals_of_nll_hold_the_truth():
    """Long texts count for more, so texts are resampled and not tokens."""
    rng = np.random.default_rng(0)
    hit = 0
    for _ in range(200):
        tokens = rng.integers(2, 60, 15)
        interval = nll_interval(nlls(*zip(rng.normal(4, 1, 15), tokens.tolist(), strict=True)))
        assert interval.low < interval.mean < interval.high
        hit += interval.low <= 4 <= interval.high
    assert hit >= 181, "95 %, less three standard errors"


def test_the_papers_recipes():
    facts = {
        "lapa2": (2e-5, 50, 4, 20, "air", False),
        "air": (3e-5, 5, 4, 20, "air", False),
        "con-prefix": (5e-5, 3, 8, 10, "linear", True),
        "prefix-tuning": (5e-5, 5, 10, 5, "mlp", True),
    }
    for name, expected in facts.items():
        recipe = training_recipe(name)
        assert (
            recipe.lr,
            recipe.epochs,
            recipe.batch,
            recipe.slots,
            recipe.parameterisation,
            recipe.shifted,
        ) == expected
    assert training_recipe("con-prefix").middle == 800
    assert training_recipe("con-prefix").gen_weight == 0
    assert set(RECIPES) == {"small", *facts}


# --- data


def test_texts_are_cut_where_sentences_end():
    tokenizer = shared_tokenizer("smollm2-135m")
    text = "One is short. Two is short too.  Is three?\nYes! " + "word " * 40
    pieces = [tokenizer.decode(ids) for ids in split_pieces(text, tokenizer, 12)]
    assert pieces[:2] == ["One is short. Two is short too. Is three?", "Yes!"]
    assert pieces[2].split() == ["word"] * 12
    assert len(pieces) == 3


def test_long_texts_give_their_first_pieces_first():
    tokenizer = shared_tokenizer("smollm2-135m")
    from lapa2_interp.tasks.corpora import Corpus

    texts = {"positive": ("A one. A two. A three.", "B one.", "C one. C two.")}
    pieces = tokenise_pieces(tokenizer, [Corpus(texts, "")], "positive", 3, 5)
    read = [tokenizer.decode(ids) for ids in pieces]
    assert read == ["A one.", "B one.", "C one.", "A two.", "C two."]


def test_corpora_take_turns():
    tokenizer = shared_tokenizer("smollm2-135m")
    from lapa2_interp.tasks.corpora import Corpus

    corpora = [
        Corpus({"positive": tuple(f"{name} {i}." for i in range(n))}, name)
        for name, n in (("A", 4), ("B", 2))
    ]
    pieces = [
        tokenizer.decode(ids) for ids in tokenise_pieces(tokenizer, corpora, "positive", 9, 5)
    ]
    assert pieces == ["A 0.", "B 0.", "A 1.", "B 1.", "A 2."]


def test_no_piece_ends_inside_a_character():
    tokenizer = shared_tokenizer("smollm2-135m")
    """Read again, half a character is another one."""
    text = "我喜欢这部电影因为它非常好看而且很感人也很有趣"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    halves = 0
    for length in range(4, 16):
        (cut,) = split_pieces(text, tokenizer, length)
        assert text.startswith(tokenizer.decode(cut))
        assert cut == ids[: len(cut)]
        assert length - 3 < len(cut) <= length
        halves += len(cut) < length
    assert halves


def test_a_text_behind_a_hard_prefix_has_the_tokens_it_is_generated_with():
    """The space between them joins the text's first token; what is scored is the text alone."""
    from lapa2_interp.bias.layout import Layout
    from lapa2_interp.prefixes.evaluation import after_hard_prefix, prefix_nll

    network, tokenizer, _ = load_transformers("smollm2-135m")
    texts = [tokenizer(text).input_ids for text in ("The lake is cold.", "Nobody came.")]
    for prefix in ("Very positive:", "Very positive: "):
        for ids in texts:
            before, text = after_hard_prefix(tokenizer, prefix, ids)
            layout = Layout.of(tokenizer, "Very positive:", prefix[14:] + tokenizer.decode(ids))
            assert (*before, *text) == layout.ids[layout.n_bos :]
            assert len(before) == layout.l_pre
        totals, tokens = prefix_nll(network, tokenizer, texts, prefix)
        for ids, total, n in zip(texts, totals, tokens, strict=True):
            before, text = after_hard_prefix(tokenizer, prefix, ids)
            row = torch.tensor([[tokenizer.bos_token_id, *before, *text]])
            with torch.no_grad():
                nll = cross_entropy(network(row).logits[0, :-1], row[0, 1:], reduction="none")
            assert total == pytest.approx(nll[len(before) :].sum().item(), rel=1e-4)
            assert n == len(text)


def test_treebank_sentences_are_written_as_people_do():
    from lapa2_interp.tasks.corpora import detokenise

    for text, expected in [
        ("a gorgeous , witty movie .", "A gorgeous, witty movie."),
        ("it 's funny , but i do n't know !", "It's funny, but I don't know!"),
        ("the film -lrb- and its cast -rrb- is `` fine ''", 'The film (and its cast) is "fine"'),
        ("they 've seen it , we 'll not .", "They've seen it, we'll not."),
    ]:
        assert detokenise(text) == expected


def test_paradetox_pairs_are_labelled_texts(tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"toxic": "a damn mess", "neutral": ["a mess", "a muddle"]},
        {"toxic": "shut up", "neutral": []},
        {"toxic": "what a fool", "neutral": "what a person"},
        {"toxic": "damn it", "neutral": None},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    read = read_corpus(str(file), ["nontoxic", "toxic"])
    assert read.texts["toxic"] == ("a damn mess", "shut up", "what a fool", "damn it")
    assert read.texts["nontoxic"] == ("a mess", "what a person")
    assert read.blank == 2


def test_corpora_report_what_they_leave_out(tmp_path):
    file = tmp_path / "texts.csv"
    file.write_text(
        "text,label\ngood,positive\n,positive\n "
        " ,positive\ngood,positive\nbad,negative\ngood,negative\nodd,other\n"
    )  # a text that has two labels keeps the first
    read = read_corpus(str(file), ["positive", "negative"])
    assert read.texts == {"positive": ("good",), "negative": ("bad",)}
    assert (
        read.summary
        == "texts.csv: 1 positive, 1 negative (left out: 2 blank, 2 repeated, 1 with another label)"
    )


def test_labels_that_are_numbers(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n')
    assert read_corpus(str(file), ["0", "1"]).texts == {"0": ("bad",), "1": ("good",)}
