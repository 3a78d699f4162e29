"""The soft prefixes that come with the package: what they are, and that they do what their cards
say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import generate, load

from lapa2_interp import Augmentation
from lapa2_interp.errors import PrefixError
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.models import identify
from lapa2_interp.prefixes.soft_prefix import (
    SHIPPED_SETS,
    cards_in,
    load_prefix,
    set_folder,
)


def test_what_ships():
    attributes = {
        "sentiment": ["negative", "positive"],
        "topic": ["business", "science", "sports", "world"],
        "detox": ["nontoxic", "toxic"],
    }
    cards = cards_in(SHIPPED_SETS)
    assert {(card.task, card.set, card.attribute) for card in cards} >= {
        (task, name, attribute)
        for task, names in attributes.items()
        for name in ("mle", "contrastive")
        for attribute in names
        if (task, name) != ("detox", "contrastive")
    }
    files = [file for file in SHIPPED_SETS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 8e6
    assert len(files) == 2 * len(cards)
    for card in cards:
        prefix = load_prefix(SHIPPED_SETS / card.model / f"{card.task}-{card.set}", card.attribute)
        assert prefix.keys.dtype == torch.float16
        assert (card.shape.n_slots, card.shifted, card.model) == (20, False, "smollm2-135m")
        assert card.training.data_sha256
        assert card.held_out.accuracy.n >= 300, card.name


def test_shipped_cards_say_that_the_prefixes_work():
    """Own texts are likeliest under their own prefix, and the set tells attributes apart clearly
    better than hard ones."""
    for card in cards_in(SHIPPED_SETS):
        nll, held = card.held_out.nll, card.held_out
        siblings = [
            interval
            for name, interval in nll.items()
            if not name.startswith(("hard ", "none")) and name != card.attribute
        ]
        assert nll[card.attribute].mean < min(interval.mean for interval in siblings), card.name
        assert nll[card.attribute].high < nll["none"].low, card.name
        assert held.accuracy_of_set.low > held.hard_accuracy_of_set.high, card.name


@pytest.mark.long
def test_shipped_prefixes_steer(tmp_path):
    model, task = load("smollm2-135m"), load_task("topic")
    texts = {}
    for attribute in ("sports", "business"):
        for alpha in (0.0, 0.5):
            run = generate(
                model, methods.get_for_task("prefix", task), task, attribute, ["In summary"], length=16, samples=2, trace="pooled",
                augmentation=Augmentation(alpha=alpha),
            )  # fmt: skip
            texts[attribute, alpha] = run.texts["text"].tolist()
            assert run.trace.sizes["prefix_token"] == 20
    assert len({tuple(drawn) for drawn in texts.values()}) == 4
    assert identify(model).name == "smollm2-135m"


@pytest.fixture(scope="module")
def smollm2():
    from lapa2_interp.models.load import load_transformers

    return load_transformers("smollm2-135m")


@pytest.mark.parametrize("n", [4, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "files"),
    [
        ("sentiment", ["sentiment/sst2_valid", "sentiment/imdb_test"]),
        pytest.param("topic", ["topic/agnews_test"], marks=pytest.mark.slow),
        ("detox", ["toxicity/jigsaw_test"]),
    ],
)
def test_held_out_numbers_of_the_cards_are_found_again(task, files, n, smollm2, data):
    """On the first n texts of an attribute of the card's own data, accuracy and NLL lie near what
    the cards say."""
    from lapa2_interp.prefixes.evaluation import likeliest_under_own_prefix, nll_interval, nll_table
    from lapa2_interp.prefixes.training import tokenise_pieces
    from lapa2_interp.tasks.corpora import detokenise, read_corpus

    chosen, folder = load_task(task), SHIPPED_SETS / "smollm2-135m" / f"{task}-mle"
    prefixes = {name: load_prefix(folder, name) for name in chosen.attributes}
    corpora = [
        read_corpus(str(data / f"{file}.jsonl.xz"), list(chosen.attributes)) for file in files
    ]
    network, tokenizer, _ = smollm2
    if task == "sentiment":  # SST-2 is spaced like a treebank
        texts = {
            name: tuple(map(detokenise, raw_texts)) for name, raw_texts in corpora[0].texts.items()
        }
        corpora[0] = replace(corpora[0], texts=texts)
    texts = {
        name: [
            text
            for corpus in corpora
            for text in tokenise_pieces(tokenizer, [corpus], name, 64, n // len(corpora))
        ]
        for name in chosen.attributes
    }
    table = nll_table(network, tokenizer, prefixes, texts)
    for name, prefix in prefixes.items():
        held = prefix.card.held_out
        interval = nll_interval(table[(table["label"] == name) & (table["prefix"] == name)])
        assert abs(interval.mean - held.nll[name].mean) < 3 * (interval.high - interval.low), name
    share = likeliest_under_own_prefix(table, {name: name for name in prefixes}).mean()
    expected = held.accuracy_of_set.mean
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / (n * len(prefixes)))


def test_a_folder_with_the_name_of_a_set_is_asked_for_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mle").mkdir()
    assert set_folder("smollm2-135m", "topic", "mle").parent == SHIPPED_SETS / "smollm2-135m"
    assert set_folder("smollm2-135m", "topic", "./mle") == Path("mle")
    assert set_folder("tiny-gpt2", "topic", "mle") == Path("mle")


def test_a_set_in_the_cache_is_asked_for_by_its_name(tmp_path, monkeypatch):
    """A set of the package goes before it, and a folder that is asked for by its path, too."""
    monkeypatch.setenv("LAPA2_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "prefixes" / "tiny-gpt2" / "topic-mle"
    for folder in (own, tmp_path / "prefixes" / "smollm2-135m" / "topic-mle", Path("mle")):
        folder.mkdir(parents=True)
    assert set_folder("tiny-gpt2", "topic", "mle") == own
    assert set_folder("tiny-gpt2", "topic", "./mle") == Path("./mle")
    assert set_folder("smollm2-135m", "topic", "mle").is_relative_to(SHIPPED_SETS)
    with pytest.raises(PrefixError, match="allowed: mle, a folder, or hard"):
        set_folder("tiny-gpt2", "topic", "other")
