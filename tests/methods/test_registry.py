"""Methods by name: their parameters, their texts, and the augmentations of their branches."""

import re

import pytest

from lapa2_interp import (
    Augmentation,
)
from lapa2_interp.errors import MethodError
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.registry import assign_augmentations, load_task


def test_the_papers_parameters():
    alphas = {
        name: method.alpha for name, method in methods.known_methods().items() if method.in_paper
    }
    assert alphas == {
        "none": 0.0, "prefix": 0.5, "con-prefix": 0.5, "air-decoding": 0.5, "negprompt": 1.0, "preadd": 2.0, "palette": 2.0,
        "freectrl": 0.0, "datg": 0.0,
    }  # fmt: skip
    omegas = {
        name: methods.get_for_task("air-decoding", load_task(name)).omega
        for name in ("sentiment", "topic", "detox")
    }
    assert omegas == {"sentiment": 140, "topic": 60, "detox": 120}
    assert methods.get_for_task("preadd", load_task("detox")).lam == -1
    assert methods.get_for_task("preadd", load_task("detox"), lam=-2).lam == -2


def test_pro_aug_defaults():
    on = {
        (name, task): methods.get_for_task(name, load_task(task)).pro_aug
        for name in ("air-decoding", "preadd", "palette", "con-prefix")
        for task in ("sentiment", "topic", "detox")
    }
    assert {key for key, value in on.items() if value} == {
        ("air-decoding", "sentiment"),
        ("air-decoding", "topic"),
    }


def test_pre_aug_and_pro_aug_reach_their_branches():
    augmentation, task = Augmentation(alpha=0.5), load_task("sentiment")
    for pro_aug in (True, False):
        method = methods.get("air-decoding", pro_aug=pro_aug)
        branches = method.branches(task, "positive")
        assert [branch.name for branch in branches] == ["base", "target", "negative"]
        expected = (augmentation if pro_aug else None, augmentation, augmentation)
        assert assign_augmentations(method, branches, augmentation) == expected
    explicit = Augmentation(alpha=0.5, span=((1, 3),))
    on_base = assign_augmentations(methods.get("air-decoding"), branches, explicit)[0]
    assert on_base == augmentation, "slots of a prefix branch mean nothing on the raw model"
    assert assign_augmentations(
        methods.get("none"), methods.get("none").branches(task, "positive"), explicit
    ) == (explicit,)
    assert assign_augmentations(method, branches, None) == (None, None, None)


def test_texts_of_the_paper():
    detox = load_task("detox")
    base, prefix = methods.get_for_task("preadd", detox).branches(detox, "nontoxic")
    assert (base.prefix, prefix.join) == (None, "")
    assert prefix.prefix.startswith("The following text perpetuates negative stereotypes")
    assert prefix.prefix.endswith("profane language.\n\n")
    branches = methods.get("palette").branches(detox, "nontoxic")
    assert [branch.name for branch in branches] == ["base", "main", "positive", "fluency"]
    assert {branch.join for branch in branches[1:]} == {" "}
    one = methods.get("palette", auxiliaries=False).branches(detox, "nontoxic")
    assert [branch.name for branch in one] == ["base", "main"]
    (short,) = methods.get("negprompt").branches(detox, "nontoxic")
    (long,) = methods.get("negprompt", form="long").branches(detox, "nontoxic")
    assert (short.prefix, short.join) == (
        "Very nontoxic:",
        "",
    ), "the released loop would condition on the toxic text"
    assert long.prefix.startswith("The following text does not perpetuate")
    assert (long.prefix[-2:], long.join) == ("\n\n", " ")
    with pytest.raises(MethodError, match="task 'detox' has no long negprompt text for 'toxic'"):
        methods.get("negprompt", form="long").branches(detox, "toxic")
    sentiment = load_task("sentiment")
    assert [branch.name for branch in methods.get("palette").branches(sentiment, "negative")] == [
        "base",
        "main",
        "anti",
    ]


def test_unknown_parameters_of_a_method_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_methods.py").write_text(
        "from dataclasses import dataclass\nfrom lapa2_interp.methods.conditioning import"
        " PrefixConditioning\n@dataclass(frozen=True)\nclass Own(PrefixConditioning):\n    share:"
        " float = 0.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert methods.get("own_methods:Own", share=1).share == 1
    with pytest.raises(MethodError, match="unknown field 'shar'; allowed: .*share"):
        methods.get("own_methods:Own", shar=1)


def test_no_method_is_shown_with_the_name_of_a_model():
    names = {name: method.display_name for name, method in methods.known_methods().items()}
    assert names["prefix"] == "Prefix"
    assert not [name for name in names.values() if re.search(r"gpt|llama|smollm", name, re.I)]
    assert names["dexperts"] == methods.known_methods()["dexperts"].paper_name
    assert len(set(names.values())) == len(names)
