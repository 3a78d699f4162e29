"""Conditioning: the gate by plain Python and as DIRECTER's greedy loop; reminders by transformers
alone, attention by hand, and what they cost."""

from functools import partial

import pytest
import torch
from conftest import HAS_HOOKED, generate, load

from lapa2_interp import Augmentation, Layout, augmented, recipe
from lapa2_interp.attention.hooked import edit_scores
from lapa2_interp.errors import AugmentationError, LayoutError, MethodError
from lapa2_interp.generation.sampling import draw, uniforms
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.registry import assign_augmentations, load_task
from lapa2_interp.models.load import load_transformers

PROMPTS = ["The lake", "I saw"]


SETTINGS = {"length": 16, "samples": 2, "trace": "none"}


def gate(**parameters):
    return methods.get("gate", **parameters)


def log_probs(seed=0, samples=40, vocab=5, n=2):
    """Of n branches, the last one without steering."""
    rng = torch.Generator().manual_seed(seed)
    drawn = 3 * torch.randn(n, samples, vocab, generator=rng, dtype=torch.float64)
    names = ("steered", *map(str, range(n - 2)), "plain")
    return dict(zip(names, drawn.log_softmax(2), strict=True))


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0])
def test_weights_are_those_of_the_formula(beta):
    p, n_steered = log_probs(), 0
    combined = gate(beta=beta).combine(p, None)
    for row in range(40):
        steered, plain = (p[name][row].exp().tolist() for name in ("steered", "plain"))
        accepted = plain[steered.index(max(steered))] > beta * max(plain)
        n_steered += accepted
        assert torch.equal(combined[row], p["steered" if accepted else "plain"][row])
    assert {0.0: n_steered == 40, 1.0: n_steered == 0}.get(beta, 0 < n_steered < 40)


def test_its_ends_are_the_prefix_with_and_without_steering(tiny, model_class):
    """At beta 0 every step is steered, at beta 1 none is; at alpha 0 there is nothing to steer."""
    model, task = load(tiny, "float64", model_class), load_task("sentiment")
    rule, prefix = Augmentation(alpha=3), methods.get("prefix")

    def texts(method, augmentation):
        asked = model, method, task, "positive", PROMPTS
        return generate(*asked, augmentation=augmentation, **SETTINGS).texts["tokens"].tolist()

    plain, steered = texts(prefix, None), texts(prefix, rule)
    assert plain != steered
    assert texts(gate(beta=0), rule) == steered
    assert texts(gate(beta=1), rule) == plain
    assert texts(gate(), None) == plain


def test_attempts_halve_the_layers():
    """As long as two are left; without an order there is one attempt."""
    layers = "/".join(map(str, range(30)))
    sizes = [None if own is None else len(own) for own in gate(order=layers).attempts().values()]
    assert sizes == [None, 15, 7, 3, 0]
    assert gate(order="3/2/1/0").attempts() == {"steered": None, "2 layers": (3, 2), "plain": ()}
    assert list(gate().attempts()) == ["steered", "plain"]
    for order in ("0/1/2", "3/3/1/0/2", "3/02/1/0", "1/a/0/2", "0-3", "/", "4/3/2/1"):
        with pytest.raises(MethodError, match="takes all layers of the model, four or more"):
            gate(order=order)
    with pytest.raises(MethodError, match="has 5 layers, and the model has 4"):
        generate(load("tiny-gpt2"), gate(order="0/1/2/3/4"), load_task("sentiment"), "positive",
                 PROMPTS, **SETTINGS)  # fmt: skip


def test_the_first_plausible_attempt_counts():
    method = gate(order="4/3/2/1/0/5/6/7/8", beta=0.4)
    names = list(method.attempts())
    assert names == ["steered", "4 layers", "2 layers", "plain"]
    p = dict(zip(names, log_probs(n=4).values(), strict=True))
    combined, taken = method.combine(dict(reversed(p.items())), None), set()
    for row in range(40):
        plain = p["plain"][row].exp().tolist()
        first = next(
            name
            for name in names
            if plain[int(p[name][row].argmax())] > 0.4 * max(plain) or name == "plain"
        )
        assert torch.equal(combined[row], p[first][row])
        taken.add(first)
    assert taken == set(names)


def test_a_branch_is_steered_in_its_layers_alone():
    task = load_task("sentiment")

    def assigned(rules, order="3/1/2/0"):
        method = gate(order=order)
        return assign_augmentations(method, method.branches(task, "positive"), rules)

    rule = Augmentation(alpha=1)
    assert assigned(rule) == (rule, Augmentation(alpha=1, layers=(1, 3)), None)
    heads = Augmentation(alpha=1, heads=((0, 1), (3, 2)), layers=(0, 3))
    assert assigned(heads)[1] == heads.model_copy(update={"layers": (3,)})
    assert assigned(Augmentation(alpha=1, heads=((0, 1),)))[1] is None
    top = Augmentation(alpha=1, layers="top")
    assert assigned(top, order="") == (top, None)
    with pytest.raises(AugmentationError, match="'top' cannot be narrowed"):
        assigned(top)


@torch.no_grad()
@pytest.mark.parametrize("order", ["", "2/0/3/1"])
def test_greedy_texts_are_directers(tiny, order):
    """With keys scaled in all layers, then in two: the steered token where the pass without
    steering gives it more than half of its largest probability."""
    model, task = load(tiny, "float64"), load_task("sentiment")
    made = generate(model, gate(order=order), task, "positive", PROMPTS, length=20, top_k=1,
                    augmentation=recipe("key-scale", beta=4), trace="none")  # fmt: skip
    refused = retried = 0
    for sample in made.texts.itertuples():
        layout = Layout.of(model.tokenizer, task.prefix("positive"), sample.prompt)
        prefix = slice(*layout.prefix)

        def scale(layer, scores, layers, prefix=prefix):
            scores = scores.clone()
            scores[:, :, -1, prefix] *= 4 if layer in layers else 1
            return scores

        for step, token in enumerate(sample.tokens):
            ids = torch.tensor([[*layout.ids, *sample.tokens[:step]]])
            raw = model(ids)[0, -1].softmax(0)
            for layers in ([0, 1, 2, 3], *[[0, 2]] * bool(order)):
                with edit_scores(model, partial(scale, layers=layers)):
                    wanted = int(model(ids)[0, -1].argmax())
                if raw[wanted] > 0.5 * raw.max():
                    retried += len(layers) == 2
                    break
            else:
                refused += 1
                wanted = int(raw.argmax())
            assert token == wanted
    assert 0 < refused < made.texts["n_tokens"].sum()
    assert (retried > 0) == bool(order)


CLASSES = ("HookedTransformer",) if HAS_HOOKED else ("TransformerBridge", "TransformersModel")


EVERY = 3


@pytest.fixture(params=CLASSES)
def of_class(request):
    return request.param


def contexts(layout, tokens, again):
    """Before each token the ids that the model has read, by a loop over tokens."""
    ids, before = list(layout.ids), []
    for n_written, token in enumerate(tokens):
        if n_written and n_written % EVERY == 0:
            ids += again
        before.append(list(ids))
        ids.append(token)
    return before


class LastQuery:
    """An observer that keeps the attention of a pass's last query: by layer, [head key]."""

    def __init__(self):
        self.patterns = []

    def observe(self, layer, pattern, first):
        self.patterns.append(pattern[0, :, -1].clone())


@torch.no_grad()
@pytest.mark.parametrize(
    ("copies", "rule"), [(1, Augmentation(alpha=2, phase="predicting_only")), (2, None)]
)
def test_texts_and_attention_are_those_of_the_whole_context(tiny, of_class, copies, rule):
    """Every token is drawn after a pass over all that was read, without a cache."""
    model, task = load(tiny, "float64", of_class), load_task("sentiment")
    network, tokenizer, _ = load_transformers(tiny, "float64")
    method = methods.get("remind", every=EVERY, copies=copies)
    made = generate(model, method, task, "positive", PROMPTS, rule,
                    length=16, samples=2, seed=5, trace="full", eos="block")  # fmt: skip
    again = tokenizer(" Very positive:", add_special_tokens=False).input_ids
    for row, sample in enumerate(made.texts.itertuples()):
        prefix = " ".join(["Very positive:"] * copies)
        layout = Layout.of(tokenizer, prefix, sample.prompt)
        uniform, trace = uniforms(5, sample.prompt, sample.sample, 20), made.trace.isel(sample=row)
        before = contexts(layout, sample.tokens, again)
        assert len(before[-1]) > len(layout) + len(before)  # a reminder is there
        for step, ids in enumerate(before):
            seen = LastQuery()
            with augmented(network, rule, layout, seen):
                logits = network(torch.tensor([ids])).logits[:, -1]
            logits[:, tokenizer.eos_token_id] = -torch.inf
            drawn = draw(logits.log_softmax(1), torch.tensor([uniform[step]]), top_k=200)
            assert int(drawn) == sample.tokens[step]
            sums = torch.stack(seen.patterns)[:, :, slice(*layout.prefix)].sum(2)  # layer head
            recorded = torch.tensor(trace["prefix"].values[0, step])
            assert torch.allclose(recorded, sums.float(), rtol=1e-5, atol=1e-6)
            assert int(trace["l_kv"][0, step]) == len(ids)
        text = tokenizer.decode(list(sample.tokens))
        assert sample.continuation == text


def test_without_reminders_it_is_the_prefix(tiny, of_class):
    model, task = load(tiny, "float32", of_class), load_task("sentiment")
    asked = task, "negative", PROMPTS
    settings = {"length": 14, "samples": 2, "trace": "full"}
    prefix = generate(model, "prefix", *asked, **settings)
    for every in (0, 14):  # the last token is not read
        made = generate(model, methods.get("remind", every=every), *asked, **settings)
        assert made.texts["tokens"].tolist() == prefix.texts["tokens"].tolist()
        assert made.trace.equals(prefix.trace)


def test_a_text_is_the_same_in_any_batch(tiny, of_class):
    model, task = load(tiny, "float64", of_class), load_task("sentiment")
    asked = methods.get("remind", every=EVERY), task, "positive", [*PROMPTS, "A book is on the"]
    together, alone = (
        generate(model, *asked, length=18, samples=3, trace="none", max_rows=rows)
        for rows in (9, 1)
    )
    assert together.texts["tokens"].tolist() == alone.texts["tokens"].tolist()


def test_patterns_are_whole_rows(tiny):
    """The key axis has the reminders, too."""
    model, task = load(tiny, "float64"), load_task("sentiment")
    method = methods.get("remind", every=EVERY)
    made = generate(model, method, task, "positive", PROMPTS[:1], length=12, patterns=[(1, 0)])
    rows = made.trace["pattern"].values[0, 0, :, 0]  # step key
    n_keys = made.trace["l_kv"].values[0, 0]
    assert [int((row == row).sum()) for row in rows] == n_keys.tolist()
    assert abs(rows[-1].sum() - 1) < 1e-5


def test_reminders_count_in_the_context(tiny):
    model, task = load(tiny, "float32"), load_task("sentiment")
    settings = {"length": 100, "trace": "none", "max_rows": 1}
    generate(model, methods.get("remind", every=90), task, "positive", PROMPTS[:1], **settings)
    with pytest.raises(LayoutError, match="and reminders and .* exceed the context"):
        generate(model, methods.get("remind", every=1), task, "positive", PROMPTS[:1], **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"every": -1}, "every"), ({"copies": 0}, "copies"), ({"copies": 17}, "16")],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(MethodError, match=words):
        methods.get("remind", **settings)
