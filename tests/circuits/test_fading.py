"""Why control fades, on planted models: closed forms, a twin that does not fade by mass, and
passes that must change nothing."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from lapa2_interp import circuits
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.fading import ALL, NEAR, VERDICTS, measure_fading
from lapa2_interp.circuits.far_passes import CachedForward, held, with_filler
from lapa2_interp.circuits.metrics import METRICS
from lapa2_interp.errors import CircuitError
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models import facts_of
from lapa2_interp.models.planted import FILLERS, NEGATIVE, POSITIVE, answer_key
from tests.conftest import load

pytestmark = pytest.mark.usefixtures("shared_models")

TOKENS = 4


def found_of(name="planted", filler=(8, 200), **settings):
    """The texts are drawn from the words that the model writes: writing takes longer."""
    of_texts = {name: settings.pop(name) for name in ("prompts", "words") if name in settings}
    key, model = answer_key(name), load(name)
    prompts = of_texts.setdefault("prompts", load_task("sentiment").prompts.texts)
    words = model.tokenizer.convert_tokens_to_ids([*FILLERS, *POSITIVE, *NEGATIVE])
    drawn = np.random.default_rng(0).choice(words, (len(prompts), max(filler) + TOKENS)).tolist()
    texts = {prompt: [text] for prompt, text in zip(prompts, drawn, strict=True)}
    contrast_set = ContrastSet.of(model, "sentiment", texts=texts, **of_texts)
    heads = {role: (key.heads[role],) for role in ("carrier", "decoy") if role in key.heads}
    return measure_fading(
        model, contrast_set, filler=filler, tokens=TOKENS, heads=heads, **settings
    )


@pytest.fixture(scope="module")
def planted_fading():
    return found_of()


def mean_control(key, example, filler, weight=None):
    """The closed form of D, mean over the scored tokens, the carrier's weights times `weight(l)`."""
    layout = example.layouts[0]
    there = layout.n_live + filler  # keys of the first scored query
    values = []
    for l in range(there, there + TOKENS):
        weights = None if weight is None else {"carrier": (weight(l),) * 3}
        values.append(key.control(l, layout.l_pro, weights=weights))
    return np.mean(values)


def test_near_far_and_held_are_the_closed_forms(planted_fading):
    """The carrier's attention is E / (E + l - 1), so its log-odds fall as -log(l - n)."""
    key, fading, n = answer_key("planted"), planted_fading, 3
    for i, example in enumerate(fading.contrast_set.examples):
        assert fading.near[i] == pytest.approx(mean_control(key, example, NEAR), abs=2e-3)
        for filler in (8, 200):
            more = filler - NEAR
            assert fading.far[filler][i] == pytest.approx(
                mean_control(key, example, filler), abs=2e-3
            )
            weights = {
                "hold": lambda l, more=more: (l - n) / (l - more - n),
                "keys": lambda l, more=more: (l - 1) / (l - 1 - more),
                "lapa2": lambda l: math.sqrt((l - 1) / n),
            }
            for bias, weight in weights.items():
                held = mean_control(key, example, filler, weight)
                made = fading.changed[filler, "carrier", bias][i]
                assert made == pytest.approx(held, abs=2e-3), (filler, bias)
            back = mean_control(key, example, NEAR, lambda l, more=more: (l - n) / (l + more - n))
            assert fading.changed[filler, "carrier", "removed"][i] == pytest.approx(back, abs=2e-3)


def test_dilution_is_hold_where_scores_are_constant(planted_fading):
    """The carrier gives every key but one the same score, BOS too."""
    for filler in (8, 200):
        one, second = (
            planted_fading.changed[filler, "carrier", bias] for bias in ("dilution", "hold")
        )
        assert np.abs(one - second).max() < 1e-4


def test_shares_are_ratios_of_the_means_by_prompt(planted_fading):
    table = planted_fading.by_prompt()
    means = table.groupby(["filler", "heads", "bias"])["control"].mean()
    fade = means[NEAR, "", ""] - means[200, "", ""]
    rows = planted_fading.frame().set_index(["filler", "heads", "bias"])["share"]
    for bias in ("dilution", "keys", "hold", "lapa2"):
        share = (means[200, ALL, bias] - means[200, "", ""]) / fade
        assert rows[200, ALL, bias] == pytest.approx(share, rel=1e-9)
    removed = (means[NEAR, "", ""] - means[200, ALL, "removed"]) / fade
    assert rows[200, ALL, "removed"] == pytest.approx(removed, rel=1e-9)
    assert table["prompt"].nunique() == planted_fading.contrast_set.n_prompts


def test_it_goes_on_from_its_file(tmp_path, monkeypatch):
    from lapa2_interp.circuits import fading as module

    file, read = tmp_path / "kept", []
    names = ("lake", "road", "book", "city", "horse", "movie")
    few = {"prompts": [f"The {name}" for name in names], "batch_size": 2}

    def once(model, examples, *rest):
        read.append(len(examples))
        return made(model, examples, *rest)

    made = module._measure_batch
    monkeypatch.setattr(module, "_measure_batch", once)
    first = found_of(filler=(8,), **few, file=file)
    lines = file.read_text().splitlines()
    assert len(lines) == 1 + len(read) > 3
    file.write_text(
        "\n".join([*lines[:2], lines[3][: len(lines[3]) // 2]])
    )  # stopped while it wrote
    read.clear()
    second = found_of(filler=(8,), **few, file=file)
    assert read[0] == 2, "texts by which the model is known again"
    assert len(read[1:]) == len(lines) - 2
    pd.testing.assert_frame_equal(first.frame(), second.frame())
    with pytest.raises(CircuitError, match=r"has results of another texts: '\w+', not '\w+'; rep"):
        found_of(filler=(8, 32), **few, file=file)
    with pytest.raises(CircuitError, match=r"has results of another alpha: '0.5', not '1.0'"):
        found_of(filler=(8,), alpha=1.0, **few, file=file)


def test_verdicts_of_the_planted_models(planted_fading):
    """In one the mass mediates the fade; in its twin what fades is a reader of the prompt."""
    table = planted_fading.frame().set_index(["filler", "heads", "bias"])
    assert planted_fading.verdict == "mass mediates"
    assert table.loc[(200, "decoy", "hold"), "share"] == pytest.approx(0, abs=1e-5)
    assert table.loc[(200, "carrier", "hold"), "low"] > 0.95
    twin = found_of("planted-gain", (200,))
    assert twin.fades()["fade"].iloc[-1] > 10
    assert twin.verdict == "mass does not"
    held = twin.frame().set_index(["heads", "bias", "filler"])["share"]
    assert abs(held[ALL, "hold", 200]) < 0.05
    assert set(table["verdict"]) <= set(VERDICTS)


def test_a_forward_pass_held_at_its_own_mass_is_unchanged():
    model = load("planted")
    (example, *_) = ContrastSet.of(model, "sentiment", tokens=12).examples
    forward = CachedForward(model, [with_filler(example, 8, 4)], 4)
    with torch.no_grad():
        plain = forward.logits()
        every = torch.ones(2, 4, dtype=torch.bool)
        unchanged = forward.logits(held(dict(forward.log_odds)), every)
        assert (unchanged - plain).abs().max() < 1e-5
        twice = {layer: odds + math.log(2) for layer, odds in forward.log_odds.items()}
        assert (forward.logits(held(twice), every) - plain).abs().max() > 0.1


def test_every_head_gets_the_mass_it_had_near():
    """Held in all heads at once, read at the pattern."""
    model = load("planted")
    (example, *_) = ContrastSet.of(model, "sentiment", tokens=40).examples
    near, far = (CachedForward(model, [with_filler(example, f, 4)], 4) for f in (1, 30))
    every, masses = torch.ones(2, 4, dtype=torch.bool), []

    def watched(forward, rule=None):
        seen = {}
        hooks = [
            (f"blocks.{layer}.attn.hook_pattern", lambda pattern, hook, layer=layer: seen.update(
                {layer: pattern[..., forward.prefix.start : forward.prefix.stop].sum(3)}))
            for layer in range(2)
        ]  # fmt: skip
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            forward.logits(rule, every)
        return torch.stack([seen[layer] for layer in range(2)])

    masses = [watched(near), watched(far), watched(far, held(near.log_odds))]
    assert (masses[1] - masses[0]).abs().max() > 0.1
    assert (masses[2] - masses[0]).abs().max() < 1e-5


def test_a_window_that_hides_keys_is_refused(monkeypatch):
    monkeypatch.setattr(facts_of(load("planted")), "window", 30)
    few = {"prompts": ["The lake"]}
    found_of(filler=(8,), **few)
    with pytest.raises(CircuitError, match="some layers of this model see 30 keys, and prompt"):
        found_of(filler=(40,), **few)


def test_few_prompts_make_no_claim_and_a_plot_is_drawn(tmp_path):
    fading = found_of(filler=(20,), prompts=["The lake", "The road"], random=1)
    assert fading.verdict == "inconclusive"
    assert [name for name in fading.sets if name.startswith("random")] == ["random 1"]
    file = tmp_path / "fading.png"
    fading.plot().savefig(file)
    assert file.stat().st_size > 10_000
    assert circuits.measure_fading is measure_fading


def test_a_file_of_another_model_is_refused(tmp_path):
    """A custom metric under one name, or custom hooks."""
    file = tmp_path / "kept"
    for factor in (1, 100):
        metric = {"mine": lambda predictions, factor=factor: factor * METRICS["js"](predictions)}
        if factor == 1:
            found_of(filler=(8,), metric=metric, file=file)
        else:
            with pytest.raises(CircuitError, match="results of another model or metric: near was"):
                found_of(filler=(8,), metric=metric, file=file)


def test_a_hook_that_acts_far_from_the_prompt_alone_is_known_again(tmp_path):
    """Control near is what it was; behind more text, another reader of the prefix is at work."""
    model, file = load("planted"), tmp_path / "kept"
    few = {"prompts": ["The lake", "The road", "The book"], "filler": (40,)}

    def weaker(scores, hook):
        return 0.9 * scores if scores.shape[-1] > 30 else scores

    first = found_of(**few, file=file)
    again = found_of(**few, file=file)
    assert np.array_equal(first.changed[40, ALL, "hold"], again.changed[40, ALL, "hold"])
    hooks = [(f"blocks.{i}.attn.hook_attn_scores", weaker) for i in range(model.cfg.n_layers)]
    with model.hooks(fwd_hooks=hooks):
        assert np.array_equal(found_of(**few).near, first.near)
        with pytest.raises(CircuitError, match="results of another model or metric: 40 was"):
            found_of(**few, file=file)


def test_control_that_grows_has_not_faded(planted_fading):
    """Near 1, behind more text 1.5 in every prompt."""
    n = len(planted_fading.near)
    rng = np.random.default_rng(0)
    near = 1 + 0.01 * rng.normal(size=n)
    grown = replace(
        planted_fading, near=near, far={8: near + 0.5},
        changed={(8, ALL, "hold"): near + 0.02}, sets={ALL: planted_fading.sets[ALL]},
    )  # fmt: skip
    row = grown.frame().iloc[0]
    assert (row["verdict"], grown.verdict) == ("no fade", "no fade")
    assert np.isnan(row["share"])
    # A fade that no interval tells from 0, and may be large, is no absence of one.
    for size, verdict in ((0.05, "no fade"), (1.0, "inconclusive")):
        gaps = size * np.resize([1, -1], n)
        unsure = replace(grown, far={8: near - gaps}, changed={(8, ALL, "hold"): near})
        assert unsure.verdict == verdict
    # Few prompts never tell, however large the fade.
    for prompts in (1, 2):
        examples = {
            name: planted_fading.contrast_set.examples[i] for i, name in enumerate("ab"[:prompts])
        }
        few = replace(
            grown, contrast_set=replace(planted_fading.contrast_set, examples=tuple(examples.values())),
            near=np.full(prompts, 1.0), far={8: np.arange(prompts) - 0.9},
            changed={(8, ALL, "hold"): np.full(prompts, 0.95)},
        )  # fmt: skip
        assert few.verdict == "inconclusive"


def test_fillers_read_without_the_matrix_change_nothing():
    """The filler is read at once, and the scored tokens with the matrix, as ever."""
    model, fadings = load("planted", model_class="TransformersModel"), []
    example = found_of().contrast_set
    for attn in ("matrix", "fused"):
        model.attn = attn
        fadings.append(measure_fading(model, example, filler=(200,), tokens=TOKENS))
    model.attn = "auto"
    for name in ("near", "far"):
        values = (getattr(fading, name) for fading in fadings)
        one, another = (value if name == "near" else value[200] for value in values)
        np.testing.assert_allclose(one, another, atol=1e-4)
    for key, values in fadings[0].changed.items():
        np.testing.assert_allclose(fadings[1].changed[key], values, atol=1e-4)
