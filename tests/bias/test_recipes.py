"""Recipes: every one against its paper's formula, restated on random scores; several at once; text
that names them; chats whose messages are the span."""

import inspect
import json
import math
import re

import numpy as np
import pytest
import torch
from conftest import MODEL_CLASSES, cell_of, load

from lapa2_interp import Augmentation, Cell, Layout, augmented
from lapa2_interp.attention.batch_bias import BatchBias
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.bias.augmentation import normalize_augmentations
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.bias.recipes import RECIPES, parse_recipes, recipe, recipe_name
from lapa2_interp.cli.app import main
from lapa2_interp.errors import AugmentationError
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.registry import assign_augmentations, get_for_task, load_task

GENERATED = [70, 81, 92, 103, 114]
N_BOS, PREFIX, INPUT = 1, range(1, 7), range(13)
"""Keys of `branch`: BOS, six tokens of prefix, six of prompt."""
LAST = 12
"""The last query of the prompt."""


def branch(model):
    layout = Layout.of(model.tokenizer, "ab cd:", "efg hi")
    assert (layout.n_bos, [*range(*layout.prefix)], len(layout)) == (N_BOS, [*PREFIX], len(INPUT))
    return layout


def pattern_of(model, layout, rules, scores, generated=GENERATED):
    """The attention of the first layer, were these its scores, [head query key]."""
    patterns = {}
    scores_hooks = [("blocks.0.attn.hook_attn_scores", lambda _, hook: scores[None].clone())]
    seen = [("blocks.0.attn.hook_pattern", lambda p, hook: patterns.update(p=p[0].clone()))]
    tokens = torch.tensor([[*layout.ids, *generated]])
    with (
        torch.no_grad(),
        model.hooks(fwd_hooks=scores_hooks),
        augmented(model, [rules], layout),
        model.hooks(fwd_hooks=seen),
    ):
        model(tokens)
    return patterns["p"]


def random_scores(model, n=18):
    size, source = (model.cfg.n_heads, n, n), torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(size, dtype=torch.float64, generator=source)
    scores[:, :, [*PREFIX]] -= 4  # so that there is something to raise
    return scores.masked_fill(torch.ones(size[1:]).triu(1).bool(), -torch.inf)


def scaled(scores, factors):
    """Softmax, weights multiplied, normalised: factors by query and key."""
    weights = scores.softmax(-1) * factors
    return weights / weights.sum(-1, keepdim=True)


def by_length(weight, first=LAST, keys=PREFIX, without=1):
    """A factor for the span that depends on the keys a query sees, BOS not counted."""

    def formula(scores):
        factors = torch.ones(scores.shape[1:], dtype=torch.float64)
        for query in range(first, len(factors)):
            factors[query, [*keys]] = weight(query + 1 - without)
        return scaled(scores, factors)

    return formula


def pasta(scores, alpha=0.01, prefix_keys=PREFIX):
    factors = torch.ones(scores.shape[1:], dtype=torch.float64)
    factors[:, [key for key in INPUT if key not in prefix_keys]] = alpha
    return scaled(scores, factors)


def spotlight(scores, tau=0.2):
    """One share for the heads and queries of the pass; log-weights raised, softmax again."""
    weights = scores.softmax(-1)
    share = weights[:, :, [*PREFIX]].sum() / weights.sum()
    log_weights = weights.log()
    if share < tau:
        log_weights[:, :, [*PREFIX]] += (tau / share).log()
    return log_weights.softmax(-1)


def spotlight_per_head(scores, tau=0.2):
    """The first query sees no prefix, so there is nothing to raise."""
    weights = scores.softmax(-1)
    for head in weights:
        for row in head[1:]:
            share = row[[*PREFIX]].sum().item()
            row[[*PREFIX]] *= max(1.0, tau / share)
            row /= row.sum().item()
    return weights


def split_softmax(scores, k=0.75):
    weights = scores.softmax(-1)
    for head in weights:
        for row in head[max(PREFIX) + 1 :]:
            share = row[[*PREFIX]].sum().item()
            inside = torch.zeros_like(row)
            inside[[*PREFIX]] = 1
            row *= inside * share**k / share + (1 - inside) * (1 - share**k) / (1 - share)
    return weights


def set_point(scores, tau=0.2):
    weights = scores.softmax(-1)
    for head in weights:
        for row in head[LAST:]:
            share = row[[*PREFIX]].sum().item()
            if share < tau:
                row *= (1 - tau) / (1 - share)
                row[[*PREFIX]] *= tau / share * (1 - share) / (1 - tau)
    return weights


def only_heads(formula, heads):
    return lambda scores: torch.stack(
        [
            made if (0, i) in heads else plain
            for i, (made, plain) in enumerate(zip(formula(scores), scores.softmax(-1), strict=True))
        ]
    )


def times(scores, factors):
    """Softmax of visible scores times factors by query and key."""
    return torch.where(scores > -1e9, scores * factors, scores).softmax(-1)


def key_scale(scores, beta=100):
    """In the one pass its last query predicts."""
    factors = torch.ones(scores.shape[1:], dtype=torch.float64)
    factors[-1, [*PREFIX]] = beta
    return times(scores, factors)


def sharper(factor):
    """All scores of a query that sees l keys, BOS counted."""

    def formula(scores):
        by_query = [[factor(query + 1)] for query in range(scores.shape[1])]
        return times(scores, torch.tensor(by_query, dtype=torch.float64))

    return formula


LAPA2 = by_length(lambda l: (l / 6) ** 0.5)
ONE_TOKEN = by_length(lambda l: l**0.5, keys=[2])
HEADS = ((0, 1), (0, 3))
FORMULAS = {
    "lapa2": LAPA2,
    "lapa2-linear": by_length(lambda l: math.exp(0.5 * l / 6)),
    "lapa2-sqrt": by_length(lambda l: math.exp(0.5 * math.sqrt(l / 6))),
    "lapa2-constant": by_length(lambda l: (128 / 6) ** 0.5),
    # the first n slots, n the tokenizer's count; queries of generated tokens; all keys counted
    "lapa2-released": lambda scores, n=6: by_length(
        lambda l: (l / n) ** 2, LAST + 1, range(n), without=0
    )(scores),
    "instaboost": by_length(lambda l: 3.0, first=0),
    "pasta": pasta,
    "spotlight": spotlight,
    "spotlight-per-head": spotlight_per_head,
    "split-softmax": split_softmax,
    "set-point": set_point,
    "key-scale": key_scale,
    "log-n": sharper(lambda l: math.log(l) / math.log(512)),
    "ssmax:s=0.9": sharper(lambda l: 0.9 * math.log(l)),
    "token-selective:tokens=1": ONE_TOKEN,
    "head-selective:heads=0.1/0.3": only_heads(LAPA2, HEADS),
    "selective:tokens=1,heads=0.1/0.3": only_heads(ONE_TOKEN, HEADS),
    "instaboost:M=7": by_length(lambda l: 7.0, first=0),
    "pasta:alpha=0.3,tokens=0/3,heads=0.1/0.3": only_heads(
        lambda scores: pasta(scores, 0.3, prefix_keys=(1, 4)), HEADS
    ),
}


def test_every_recipe_has_a_formula():
    assert {text.partition(":")[0] for text in FORMULAS} == set(RECIPES)


@pytest.mark.parametrize("text", FORMULAS)
def test_a_recipe_is_its_papers_formula(text, model_class):
    model = load("tiny-llama", "float64", model_class)
    layout, scores = branch(model), random_scores(model)
    if text == "lapa2-released":
        assert layout.counted in (6, 7)
        wanted = FORMULAS[text](scores, layout.counted)
    else:
        wanted = FORMULAS[text](scores)
    after = pattern_of(model, layout, parse_recipes(text), scores)
    assert (after - wanted).abs().max() < 1e-12
    assert (after - scores.softmax(-1)).abs().max() > 1e-2


def test_spotlight_as_released_takes_one_share_a_pass():
    """A cached step has a share of its own; in a batch a row is as alone, its padding not counted."""
    model = load("tiny-llama", "float64")
    rules = recipe("spotlight", tau=0.7)
    rows = left_pad([branch(model), Layout.of(model.tokenizer, "ab:", "a longer prompt than that")])
    seen = []

    def note(pattern, hook):
        seen.append(pattern.clone())

    hooks = [("blocks.0.attn.hook_attn_scores", note), ("blocks.0.attn.hook_pattern", note)]
    with (
        torch.no_grad(),
        model.hooks(fwd_hooks=hooks[:1]),
        augmented(model, [rules] * 2, rows),
        model.hooks(fwd_hooks=hooks[1:]),
    ):
        state = new_rows(model)
        state.prompt_pass(rows)
        state.expand(torch.arange(2), capacity=len(rows[0]) + 2)
        state.read_tokens(torch.tensor([[70], [81]]))
    for scores, pattern in zip(seen[::2], seen[1::2], strict=True):
        n_queries = scores.shape[2]
        for row, layout in enumerate(rows):
            live = slice(layout.pad if n_queries > 1 else 0, None)
            own = scores[row, :, live].softmax(-1)
            keys = [*range(*layout.prefix)]
            share = own[:, :, keys].sum() / own.sum()
            assert share < 0.7
            own[:, :, keys] *= 0.7 / share
            own /= own.sum(-1, keepdim=True)
            assert (pattern[row, :, live] - own)[..., : pattern.shape[3]].abs().max() < 1e-9


@pytest.mark.parametrize("text", [*FORMULAS, "lapa2:steps=0:2 + instaboost:steps=2:9"])
def test_recipes_as_text_survive_json_cells_and_manifests(text):
    rules = parse_recipes(text)
    assert tuple(Augmentation.model_validate_json(rule.to_json()) for rule in rules) == rules
    made = cell_of(load("tiny-llama"), "prefix", "sentiment", "positive", ["ab"], rules, length=4)
    again = Cell.model_validate_json(made.model_dump_json())
    assert (again.active_augmentations, again.key, again.arm) == (rules, made.key, made.arm)


def test_one_augmentation_has_the_key_it_had_alone():
    rule = Augmentation(alpha=0.5)
    model, about = load("tiny-llama"), ("prefix", "sentiment", "positive", ["ab"])
    keys = {
        cell_of(model, *about, augmentation, length=4).key
        for augmentation in (rule, (rule,), [rule, None], (rule, Augmentation(alpha=0)))
    }
    assert len(keys) == 1
    both = cell_of(model, *about, (rule, Augmentation(alpha=1, span="bos")), length=4)
    assert both.key not in keys
    assert both.columns["law"] == "log"
    assert math.isnan(both.columns["alpha"])
    assert isinstance(json.loads(both.model_dump_json())["augmentation"], list)
    with pytest.raises(
        AugmentationError, match="several of them, recipes as one text .* or None; found"
    ):
        cell_of(model, *about, ("lapa2",), length=4)


def test_several_spans_with_a_bias_each():
    """ "Very positive sports:": one bias on " positive", another on " sports"."""
    model = load("tiny-llama", "float64")
    layout = Layout.of(model.tokenizer, "Very positive sports:", "The lake")
    positive, sports = range(4, 9), range(13, 19)  # characters here
    rules = parse_recipes(
        f"instaboost:M=2,tokens={'/'.join(map(str, positive))}"
        f" + instaboost:M=5,tokens={'/'.join(map(str, sports))}"
    )
    scores = random_scores(model, n=len(layout))
    factors = torch.ones(scores.shape[1:], dtype=torch.float64)
    factors[:, [layout.n_bos + i for i in positive]] = 2.0
    factors[:, [layout.n_bos + i for i in sports]] = 5.0
    after = pattern_of(model, layout, rules, scores, [])
    assert (after - scaled(scores, factors)).abs().max() < 1e-12


@pytest.mark.parametrize("model_class", [*MODEL_CLASSES, "TransformersModel"])
def test_controls_switched_at_a_step_act_in_their_steps_only(model_class):
    model = load("tiny-llama", "float64", model_class)
    layout = branch(model)

    def masses(rules):
        return teacher_forced(model, layout, [GENERATED], [rules])["prefix"].values[0, 0, :, 0]

    both = masses(
        parse_recipes(
            "set-point:tau=0.6,floor=false,steps=0:2 + set-point:tau=0.3,floor=false,steps=2:4"
        )
    )
    plain = masses(())
    assert np.abs(both[:2] - 0.6).max() < 1e-6
    assert np.abs(both[2:4] - 0.3).max() < 1e-6
    assert np.abs(both[4] - plain[4]).max() < 1e-6  # of the first layer, which sees no edit before
    first = masses(parse_recipes("lapa2:alpha=3,steps=0:2,phase=decode"))
    second = masses(parse_recipes("instaboost:steps=2:4"))
    switched = masses(parse_recipes("lapa2:alpha=3,steps=0:2,phase=decode + instaboost:steps=2:4"))
    assert np.abs(switched[:2] - first[:2]).max() < 1e-6
    assert np.abs(switched[2:] - second[2:]).max() < 1e-6
    assert np.abs(first[1] - plain[1]).max() > 1e-3
    assert np.abs(second[2:4] - plain[2:4]).max() > 1e-3


@pytest.mark.parametrize(
    ("asked", "on_prompt"),
    [
        ("lapa2:tokens=1", recipe("lapa2")[0]),
        ("lapa2-sqrt:alpha=.1", recipe("lapa2-sqrt", alpha=0.1)[0]),
        ("lapa2 + set-point:tau=.2,steps=4:9", recipe("lapa2")[0]),
        ("pasta:tokens=1", None),
        ("instaboost", None),
        ("set-point:tokens=1,tau=.2 + set-point:tokens=2,tau=.3", None),
    ],
)
def test_pro_aug_takes_the_laws_of_the_paper(asked, on_prompt):
    """The raw model has no prefix tokens: those of the prefix become the whole prompt."""
    rules = parse_recipes(asked)
    method = get_for_task("air-decoding", load_task("sentiment"))
    branches = method.branches(load_task("sentiment"), "positive")
    by_name = dict(
        zip(
            [branch_of.name for branch_of in branches],
            assign_augmentations(method, branches, rules),
            strict=True,
        )
    )
    assert by_name["target"] == normalize_augmentations(rules)
    assert by_name["base"] == on_prompt


def test_a_prompt_is_not_strengthened_once_for_every_token():
    branches = get_for_task("air-decoding", load_task("sentiment")).branches(
        load_task("sentiment"), "positive"
    )
    two = parse_recipes("lapa2:tokens=1,alpha=1 + lapa2:tokens=2,alpha=0.5")
    with pytest.raises(AugmentationError, match="pro_aug=false"):
        assign_augmentations(methods.get("air-decoding"), branches, two)
    assert assign_augmentations(methods.get("air-decoding", pro_aug=False), branches, two)[:2] == (
        None,
        two,
    )
    apart = parse_recipes("lapa2:tokens=1,steps=0:4 + lapa2:tokens=2,steps=4:9")
    assert len(assign_augmentations(methods.get("air-decoding"), branches, apart)[0]) == 2


TABLE = {
    'lapa2:span="prefix+bos",phase=decode': {"span": "prefix+bos", "phase": "decode"},
    "lapa2:span=0:2/5:6": {"span": ((0, 2), (5, 6))},
    'lapa2:span="0:2,5:6",layers="0,2"': {"span": ((0, 2), (5, 6)), "layers": (0, 2)},
    "lapa2:law=constant,l0=128": {"law": "constant", "l0": 128},
    "lapa2:law=target,tau=0.3,floor=true,span=prefix:0/2": {
        "law": "target",
        "tau": 0.3,
        "floor": True,
        "span": ("prefix", (0, 2)),
    },
    "lapa2:law=ratio,tau=0.3,pooled=true,length_rule=kv": {
        "law": "ratio",
        "tau": 0.3,
        "pooled": True,
        "length_rule": "kv",
    },
    "lapa2:profile=released": {"profile": "released"},
    "lapa2:profile=released,phase=everywhere": {"profile": "released", "phase": "everywhere"},
    "lapa2-released:tokens=1": {"alpha": 2.0, "profile": "released", "span": ("prefix", (1,))},
    "instaboost:M=1,profile=released,span=bos": {
        "alpha": 0,
        "law": "scale",
        "profile": "released",
        "span": "bos",
        "phase": "everywhere",
    },
}


@pytest.mark.parametrize("text", TABLE)
def test_a_recipe_takes_every_field_that_it_does_not_fix(text):
    """A profile fills only what neither the recipe nor the user names."""
    (augmentation,) = named = parse_recipes(text)
    assert augmentation == Augmentation(**{"alpha": 0.5} | TABLE[text])
    assert parse_recipes(named.label) == named, "the label is a text of the same recipe"


def test_each_field_is_open_fixed_or_a_parameter_of_each_recipe():
    for chosen in RECIPES.values():
        names = [*chosen.open_fields, *chosen.fixed_fields]
        names += [name for name in chosen.parameters if name in Augmentation.model_fields]
        assert sorted(names) == sorted(Augmentation.model_fields)


def test_names_of_augmentations():
    for name, chosen in RECIPES.items():
        needed = {"tokens": (1,), "heads": ((0, 1),)}
        rules = recipe(name, **{key: needed[key] for key in chosen.required})
        assert recipe_name(rules) == name
        assert (
            recipe_name(recipe(name, **{key: needed[key] for key in chosen.required}, steps=(0, 4)))
            == name
        )
    assert recipe_name((Augmentation(alpha=0.123),)) is None
    assert recipe_name(parse_recipes("lapa2 + instaboost")) is None


def test_every_recipe_says_where_it_is_from():
    for name, chosen in RECIPES.items():
        assert all((chosen.what, chosen.source, chosen.defaults))
        assert all(default is not inspect.Parameter.empty for default in chosen.parameters.values())
        assert "arXiv" in chosen.source or chosen.source.startswith("ours"), name


def test_white_space_in_a_recipe_says_nothing():
    assert parse_recipes(" instaboost : M = 5, steps = 0:16 ") == parse_recipes(
        "instaboost:M=5,steps=0:16"
    )


def test_on_the_command_line(tmp_path, capsys):
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name}: " in shown for name in RECIPES)
    assert main(["recipes", "pasta", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["parameters"] == {"alpha": 0.01}
    look = ["layout", "--model", "tiny-llama", "--prefix", "ab:", "--prompt", "cd"]
    assert main([*look, "--augmentation", "lapa2:tokens=0 + instaboost:tokens=1"]) == 0
    shown = capsys.readouterr().out
    assert "augmentation 2" in shown
    assert main([*look, "--augmentation", "lapa2", "--alpha", "1"]) == 0
    filled = capsys.readouterr().out
    assert main([*look, "--augmentation", "lapa2:alpha=1"]) == 0
    assert capsys.readouterr().out == filled
    assert main([*look, "--augmentation", "lapa2:alpha=1", "--alpha", "1"]) == 2
    assert "and 'lapa2:alpha=1' has a strength of its own; leave one" in capsys.readouterr().err
    assert main([*look, "--augmentation", "lapa2", "--law", "sqrt"]) == 2
    assert re.search(r"Unknown option: .?--law", capsys.readouterr().err)
    out = tmp_path / "run"
    make = ["generate", "--model", "tiny-llama", "--attribute", "positive", "--prompt", "ab"]
    make += ["--length", "6", "--dtype", "float32", "--out", str(out)]
    assert main([*make, "--augmentation", "pasta:alpha=0.2"]) == 0
    assert main(["trace", str(out)]) == 0
    assert '"span":"input"' in capsys.readouterr().out


def test_laws_that_read_the_scores_may_share_a_row_where_they_do_not_meet():
    """In other heads, or at other steps, each is as alone."""
    model = load("tiny-llama", "float64")
    layout, scores = branch(model), random_scores(model)
    both = "split-softmax:heads=0.1 + spotlight-per-head:heads=0.3"
    after = pattern_of(model, layout, parse_recipes(both), scores)
    for head, formula in enumerate(
        [torch.softmax, split_softmax, torch.softmax, spotlight_per_head]
    ):
        wanted = scores.softmax(-1) if formula is torch.softmax else formula(scores)
        assert (after[head] - wanted[head]).abs().max() < 1e-12
    with (
        pytest.raises(AugmentationError, match="other steps or heads"),
        augmented(model, [parse_recipes("split-softmax + spotlight-per-head")], layout),
    ):
        pytest.fail("entered")


@pytest.mark.parametrize("text", ["lapa2", "set-point", "multiply"])
def test_a_second_pass_of_the_same_queries_may_have_more_slots(text):
    """As a static cache has them: the later slots get nothing, and the others what they got."""
    layout = branch(load("tiny-llama"))
    rule = Augmentation(alpha=0.5, law="multiply", span="prefix")
    bias = BatchBias([(rule,) if text == "multiply" else parse_recipes(text)], [layout], (2, 4))
    n = len(layout)
    scores = torch.randn(1, 4, n, n, generator=torch.Generator().manual_seed(0)).double()
    hidden = torch.full((1, 4, n, 9), torch.finfo(torch.float64).min, dtype=torch.float64)
    narrow = bias.add(1, scores, first=0)
    wide = bias.add(1, torch.cat([scores, hidden], dim=3), first=0)
    assert (narrow - scores).abs().max() > 0.01
    torch.testing.assert_close(wide[..., :n], narrow)
    torch.testing.assert_close(wide[..., n:], hidden)


@pytest.mark.parametrize("text", ["lapa2", "instaboost", "set-point", "pasta", "split-softmax"])
def test_beyond_two_thousand_tokens(text):
    """One query of a cached step, with 2,100 keys behind it."""
    layout = branch(load("tiny-llama"))
    n = 2101
    scores = torch.randn(1, 4, 1, n, generator=torch.Generator().manual_seed(0)).double()
    bias = BatchBias([parse_recipes(text)], [layout], (2, 4))
    with_bias = bias.add(1, scores, first=n - 1).softmax(-1)[0, :, 0]
    before = scores.softmax(-1)[0, :, 0]
    share, after = before[:, [*PREFIX]].sum(-1), with_bias[:, [*PREFIX]].sum(-1)
    rest = before[:, [0, *range(7, 13)]].sum(-1)
    wanted = {
        "lapa2": share * (factor := math.sqrt((n - 1) / 6)) / (1 + share * (factor - 1)),
        "instaboost": 3 * share / (1 + 2 * share),
        "set-point": torch.full_like(share, 0.2),
        "pasta": share / (1 - 0.99 * rest),
        "split-softmax": share**0.75,
    }
    assert (after - wanted[text]).abs().max() < 1e-12
