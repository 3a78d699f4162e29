"""The gate of plausibility: by plain Python, at its ends, and as DIRECTER's greedy loop."""

from functools import partial

import pytest
import torch
from conftest import generate, load

from lapa2_interp import Augmentation, Layout, recipe
from lapa2_interp.attention.hooked import edit_scores
from lapa2_interp.errors import AugmentationError, MethodError
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.registry import assign_augmentations, load_task

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
