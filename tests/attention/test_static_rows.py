"""Static steps make the texts and traces of the usual ones.

No GPU is needed: `replay.replayed` stands for a CUDA graph. Families and rules: `test_conformance`.
"""

from functools import wraps

import numpy as np
import pytest
import torch
from conftest import cell_of, decode_plan, load, soft_set
from families import PLAIN
from replay import graphs_on_a_cpu

from lapa2_interp import Augmentation, Layout, augmented, load_model
from lapa2_interp.attention import static_rows
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.continued_rows import continued_rows
from lapa2_interp.attention.static_rows import bucket
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.errors import ModelError
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.methods import load_task
from lapa2_interp.models import identify

PROMPTS = ("The book is on the table in the house", "The lake is deep and it is cold in the winter")
"""Behind them few steps cross from a bucket of 64 keys to one of 128."""
RULE = Augmentation(alpha=0.7)
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
"""On a GPU with CUDA graphs."""


@pytest.fixture(autouse=True)
def passes():
    """The widths of all static passes, and of those that were captured."""
    with graphs_on_a_cpu() as widths:
        yield widths


@torch.no_grad()
def forced(model, rule, static, steps=12, layouts=None):
    """The logits of given tokens, [row step vocab], by usual or static steps."""
    if layouts is None:
        layouts = [Layout.of(model.tokenizer, "Very good:", prompt) for prompt in PROMPTS]
    padded, index = left_pad(layouts), torch.tensor([1, 0, 1])
    rows, logits = new_rows(model), []
    with augmented(model, rule, padded):
        rows.prompt_pass(padded)
    rules, of_rows = [rule] * 3, [padded[i] for i in index]
    tokens = (7 * torch.arange(3 * steps, device=model.cfg.device) % 200 + 40).view(3, steps)
    model.static = static
    try:
        block = continued_rows(model, rows, index, len(padded[0]) + steps, rules, of_rows, None)
        with block as more:
            logits = [more.read_tokens(tokens[:, i : i + 1])[:, -1].clone() for i in range(steps)]
    finally:
        model.static = False
    return torch.stack(logits, dim=1)


def same(model, *asked, **settings):
    """The same texts, and traces to 1e-6, by usual and static steps; the texts."""
    plan = plan_batches(model, cell_of(model, *asked, **settings))
    usual = decode_plan(model, plan)
    model.static = True
    try:
        static = decode_plan(model, plan)
    finally:
        model.static = False
    for column in ("tokens", "n_tokens", "finish"):
        assert static.texts[column].tolist() == usual.texts[column].tolist()
    for name in usual.trace.data_vars:
        np.testing.assert_allclose(
            static.trace[name], usual.trace[name], atol=1e-6, rtol=0, err_msg=str(name)
        )
    return static.texts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-neox"])
@pytest.mark.parametrize("method", ["air-decoding", "preadd", "soft"])
def test_methods(name, method, device, passes, tmp_path):
    model = load_model(name, dtype="float32", device=device, model_class=PLAIN)
    task = load_task("sentiment")
    if method == "soft":
        folder = soft_set(tmp_path, model, task)
        asked, more = ("prefix", task, "positive"), {"parameters": {"prefixes": folder}}
    else:
        task = task if method == "air-decoding" else load_task("detox")
        asked, more = (method, task, next(iter(task.attributes))), {}
    more["length"] = 56 if task.length_counts_prompt else 12
    same(model, *asked, PROMPTS, RULE, samples=2, trace="pooled", **more)
    assert passes["captured"]


def test_rows_that_end_early(passes, monkeypatch):
    model = load("tiny-gpt2", "float32", PLAIN)
    card = identify(model)  # one token in eight ends a text
    ends = card.model_copy(update={"end_ids": tuple(range(0, 257, 8))})
    monkeypatch.setattr(model, "lapa2_card", ends)
    asked = (
        "prefix",
        load_task("sentiment"),
        "positive",
        ["A", "The lake", "The book is on the table"],
        RULE,
    )
    texts = same(model, *asked, length=40, samples=4, max_rows=4, eos="stop", top_k=200)
    assert texts["n_tokens"].nunique() > 3
    assert {*texts["finish"]} == {"end", "length"} or {*texts["finish"]} == {"end"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_bfloat16_under_teacher_forcing(name, device):
    """Logits to four units in the last place of the largest, as sums of other widths round."""
    model = load_model(name, dtype="bfloat16", device=device, model_class=PLAIN)
    usual, static = (forced(model, RULE, static_steps).float() for static_steps in (False, True))
    assert (static - usual).abs().max() <= 4 * 2**-8 * usual.abs().max()


@pytest.mark.parametrize(
    ("kind", "rule", "note"),
    [
        (PLAIN, Augmentation(alpha=1, law="target", tau=0.4), "a law reads the scores"),
        (PLAIN, Augmentation(alpha=0.7, phase="predicting_only"), "reads tokens again"),
        ("TransformerBridge", RULE, "the model has hooks"),
    ],
)
def test_usual_steps_and_a_note(kind, rule, note, passes, capsys):
    asked = ("prefix", load_task("sentiment"), "positive", ("The lake", "A lake"), rule)
    for _ in range(2):
        same(load("tiny-gpt2", "float32", kind), *asked, length=12, samples=2)
    assert not passes["run"]
    assert note in (notes := capsys.readouterr().err)
    assert notes.count("note: ") == 1


def test_a_model_that_reads_hidden_slots_is_refused(monkeypatch):
    model = load("tiny-gpt2", "float32", PLAIN)
    forward_with_mask = model.original_model.forward

    @wraps(forward_with_mask)
    def forward(*args, attention_mask, **settings):
        return forward_with_mask(*args, attention_mask=torch.zeros_like(attention_mask), **settings)

    layouts = [Layout.of(model.tokenizer, "Very good:", PROMPTS[0])] * 2
    real = static_rows.StaticStep._pass

    def ignores_the_mask(step, width):
        monkeypatch.setattr(model.original_model, "forward", forward)
        return real(step, width)

    monkeypatch.setattr(static_rows.StaticStep, "_pass", ignores_the_mask)
    with pytest.raises(ModelError, match="reads slots that its mask hides"):
        forced(model, RULE, True, layouts=layouts)


def test_a_step_reads_at_most_twice_the_live_keys(monkeypatch):
    monkeypatch.setattr(static_rows, "SMALLEST_BUCKET", 128)
    assert [bucket(n) for n in (1, 128, 129, 256, 257)] == [128, 128, 256, 256, 512]
    assert all(n <= bucket(n) < 2 * n for n in range(65, 5000))
