"""Reminders: texts by transformers alone, attention by hand, and what they cost."""

import pytest
import torch
from conftest import HAS_HOOKED, generate, load

from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp.errors import LayoutError, MethodError
from lapa2_interp.generation.sampling import draw, uniforms
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.load import load_transformers

CLASSES = ("HookedTransformer",) if HAS_HOOKED else ("TransformerBridge", "TransformersModel")
PROMPTS = ["The lake", "I saw"]
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
