"""Spans that are found in what passes read: the same as with layouts by hand, bit for bit."""

import random

import pytest
import torch
from conftest import load
from transformers import DynamicCache

from lapa2_interp import Augmentation, Layout, PaddedRows, augmented, recipe
from lapa2_interp.bias.find_spans import SpanFinder
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.load import shared_tokenizer

PLAIN, BARE = "TransformersModel", "network"
SAID = "You are a sailor."
RULE = Augmentation(alpha=0.7, phase="after_span")
FREE = Augmentation(alpha=0.7)
TEXTS = (" The lake is", " A long voyage begins with one small")


def loaded(name="tiny-llama", kind=BARE):
    """A model, what `augmented` needs besides to find texts, and two layouts."""
    model = load(name, "float64", PLAIN if kind == BARE else kind)
    layouts = [Layout.of(model.tokenizer, SAID, text) for text in TEXTS]
    if kind == BARE:
        return model.original_model, {"tokenizer": model.tokenizer}, layouts
    return model, {}, layouts


@torch.no_grad()
def logits(model, ids, **settings):
    output = model(ids, **settings)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("kind", ["TransformerBridge", PLAIN, BARE])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-neox"])
def test_found_rows_are_the_layouts_by_hand(name, kind):
    model, asked, layouts = loaded(name, kind)
    tokenizer = asked.get("tokenizer") or model.tokenizer
    layout = layouts[0]
    span = layout.ids[slice(*layout.prefix)]
    with augmented(model, RULE, layout):
        by_hand = logits(model, layout.tensor)
    targets = (
        SAID,
        list(span),
        lambda ids: tuple(layout.prefix),
        [SAID[:8], SAID[4:]],
        [lambda ids: [(layout.prefix.start, layout.prefix.stop)], SAID],
    )
    for target in targets:
        with augmented(model, FREE, find=target, tokenizer=tokenizer) as finder:
            assert torch.equal(logits(model, layout.tensor), by_hand)
        assert (finder.rows, finder.left) == (1, 0)
    assert not torch.equal(logits(model, layout.tensor), by_hand)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("rule", "free"),
    [
        (RULE, FREE),
        (Augmentation(alpha=0.7), Augmentation(alpha=0.7, phase="last_query")),
        (recipe("spotlight"), "spotlight"),
        (Augmentation(alpha=1, law="scale", phase="decode", layers=(1,)),) * 2,
    ],
    ids=["after_span", "last_query", "spotlight", "decode"],
)
def test_generated_texts_are_those_of_layouts_by_hand(settings, rule, free):
    """Left-padded rows, and their cached steps."""
    network, asked, layouts = loaded()
    rows = PaddedRows.of(layouts)
    settings = settings | {"attention_mask": rows.mask, "max_new_tokens": 9, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    if "num_beams" not in settings:
        settings["eos_token_id"] = []

    def texts(*arguments, **find):
        torch.manual_seed(0)
        with augmented(network, *arguments, **find):
            return network.generate(rows.ids, **settings)

    by_hand, there = texts(rule, rows.layouts), texts(free, find=SAID, **asked)
    assert torch.equal(by_hand.sequences, there.sequences)
    assert all(map(torch.equal, by_hand.logits, there.logits))


def test_spans_in_parts_are_slots_by_hand():
    network, _, (layout, _) = loaded()
    slots = [layout.prefix.start, layout.prefix.start + 3, layout.prefix.stop - 1]
    in_parts = tuple((slot, slot + 1) for slot in slots)
    with augmented(network, RULE.model_copy(update={"span": in_parts}), layout):
        by_hand = logits(network, layout.tensor)
    with augmented(network, FREE, find=lambda ids: in_parts):
        assert torch.equal(logits(network, layout.tensor), by_hand)


@pytest.mark.parametrize("masked", [True, False])
def test_rows_padded_after_their_texts_are_the_rows_alone(masked):
    """As a harness scores them, without a mask, and as a trainer does, with one."""
    network, asked, layouts = loaded("tiny-gpt2")
    width = max(map(len, layouts))
    ids = torch.tensor([layout.ids + (0,) * (width - len(layout)) for layout in layouts])
    lengths = torch.tensor([[len(layout)] for layout in layouts])
    mask = (torch.arange(width) < lengths).long() if masked else None
    with augmented(network, FREE, find=SAID, **asked):
        together = logits(network, ids, attention_mask=mask, use_cache=False)
        alone = [logits(network, layout.tensor)[0] for layout in layouts]
    for row, wanted in zip(together, alone, strict=True):
        torch.testing.assert_close(row[: len(wanted)], wanted, rtol=0, atol=1e-11)


def test_rows_without_the_span_are_left_alone_and_counted():
    network, asked, (layout, _) = loaded()
    without = (0, *range(40, 40 + len(layout) - 1))
    ids = torch.tensor([layout.ids, without])
    with augmented(network, FREE, find=SAID, absent="leave", **asked) as finder:
        both = logits(network, ids)
        assert (finder.rows, finder.left) == (2, 1)
        logits(network, ids[1:])
    assert (finder.rows, finder.left) == (3, 2)
    with augmented(network, None, [layout, layout], check_ids=False):
        assert torch.equal(both[1], logits(network, ids)[1])
    with augmented(network, RULE, [layout, layout], check_ids=False):
        assert torch.equal(both[0], logits(network, ids)[0])


def test_texts_in_turn_keep_their_own_spans():
    """Steps of two texts, behind caches that a pass was given or has made itself."""
    network, asked, layouts = loaded("tiny-gpt2")
    name, tail = cache_name(network), torch.tensor([[41]])
    with torch.no_grad(), augmented(network, FREE, find=SAID, **asked):
        wanted = [logits(network, torch.cat([l.tensor, tail], 1))[0, -1] for l in layouts]
        caches = [DynamicCache(), getattr(network(layouts[1].tensor), name)]
        network(layouts[0].tensor, **{name: caches[0]})
        for cache, step in zip(caches, wanted, strict=True):
            behind = logits(network, tail, **{name: cache})[0, -1]
            torch.testing.assert_close(behind, step, rtol=0, atol=1e-11)


def test_which_occurrence_counts():
    tokenizer = shared_tokenizer("tiny-llama")  # a token a letter
    text = f"{SAID} The lake. {SAID} And"
    ids = Layout.of(tokenizer, None, text).ids
    for occurrence, at in (("first", 0), ("last", text.rfind(SAID))):
        layout, _ = SpanFinder(SAID, occurrence, tokenizer=tokenizer).layout(ids)
        assert layout.prefix == (1 + at, 1 + at + len(SAID))


WORDS = ["sailor", " sea", ".", ".\n\n", "\n", " ", "é", "🏴‍☠️", "日本", "n't", "  ", "!", " A"]


@pytest.mark.parametrize("name", ["smollm2-135m", "gpt2"])
def test_tokens_of_a_text_are_those_that_share_a_letter_with_it(name, gpt2_tokenizer):
    """The tokenizer's own offsets say the same, also of tokens that merge at the seams."""
    tokenizer = gpt2_tokenizer if name == "gpt2" else shared_tokenizer(name)
    draw, crossed = random.Random(0), 0
    for _ in range(200):
        before, wanted, after = (
            "".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(3)
        )
        wanted = f"b{wanted}e"
        text = before + wanted + after
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, start = tuple(encoded["input_ids"]), len(before)
        if text.count(wanted) > 1 or tokenizer.decode(ids) != text:
            continue
        shared = [
            token
            for token, (a, b) in enumerate(encoded["offset_mapping"])
            if a < start + len(wanted) and b > start
        ]
        layout, positions = SpanFinder(wanted, tokenizer=tokenizer).layout(ids)
        assert list(range(*layout.prefix)) == shared
        assert len(positions) == layout.l_pre == layout.counted
        crossed += tokenizer.decode(ids[slice(*layout.prefix)]) != wanted
    assert crossed > 20


def test_a_span_that_merges_with_what_follows():
    tokenizer = shared_tokenizer("smollm2-135m")
    ids = tuple(tokenizer("Speak softly.\n\nThe lake").input_ids)
    layout, _ = SpanFinder("softly.", tokenizer=tokenizer).layout(ids)
    assert tokenizer.decode(ids[slice(*layout.prefix)]) != " softly"
    assert tokenizer.decode(ids[slice(*layout.prefix)]).strip() == "softly."
    assert len(layout) == len(ids)


def test_gradients_flow_as_with_layouts():
    network, asked, (layout, _) = loaded()

    def slope(*arguments, **find):
        network.zero_grad()
        with augmented(network, *arguments, **find):
            network(layout.tensor, use_cache=False).logits[0, -1].logsumexp(0).backward()
        return network.get_input_embeddings().weight.grad.clone()

    try:
        assert torch.equal(slope(RULE, layout), slope(FREE, find=SAID, **asked))
    finally:
        network.zero_grad()


def test_hooks_are_gone_behind_the_block():
    network, asked, _ = loaded()
    before = len(facts_of(network).network._forward_hooks)
    with augmented(network, FREE, find=SAID, **asked):
        assert len(network._forward_hooks) > before
    assert len(network._forward_hooks) == before
