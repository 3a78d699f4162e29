"""Circuits of chats: the span of a chat is the prefix, wherever the template puts it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import load

from lapa2_interp import Augmentation
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import control_score
from lapa2_interp.circuits.examples import ContrastExample
from lapa2_interp.circuits.fading import measure_fading
from lapa2_interp.circuits.gradients import attribution
from lapa2_interp.circuits.hidden_span import forced_logits
from lapa2_interp.circuits.knockout import knock_out
from lapa2_interp.circuits.metrics import Predictions, js
from lapa2_interp.circuits.selection import select
from lapa2_interp.generation.arrange import chat_layout
from lapa2_interp.report.study_page import _tokens
from lapa2_interp.tasks.task import Attribute, ChatForm, Prompts, Task

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
TASK = Task(
    name="talk",
    length_counts_prompt=False,
    attributes={"cat": Attribute(prefix="Be a cat."), "dog": Attribute(prefix="Be a dog.")},
    prompts=Prompts(texts=("Who are you?", "Why?")),
    chat=ChatForm(
        messages=(
            {"role": "system", "content": "Listen. {prefix}"},
            {"role": "user", "content": "{prompt}"},
        ),
        span="phrase:{prefix}",
    ),
)


@pytest.fixture(params=["TransformerBridge", "TransformersModel"])
def model(request, monkeypatch):
    model = load("tiny-llama", "float64", model_class=request.param)
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    return model


def by_hand(model, example, *rules, first=0):
    """Mean js of the steps from the first from passes over the whole chat."""
    logits = [forced_logits(model, layout, example.text, rules)[0] for layout in example.layouts]
    text = torch.tensor([example.text])
    return js(Predictions(torch.stack(logits)[:, None], text))[0, first:].mean().item()


def test_control_and_knock_outs_are_those_of_passes_over_the_whole_chat(model):
    """Of all branches, and with the span hidden from one head by a rule."""
    texts = ContrastSet.of(model, TASK, tokens=5)
    first = texts.examples[0]
    assert [layout.n_before > 0 for layout in first.layouts] == [True, True]
    assert [layout.l_pre for layout in first.layouts] == [texts.l_pre] * 2
    control = control_score(model, texts)
    wanted = [by_hand(model, example) for example in texts.examples]
    assert np.allclose(control.values["js"].mean(1), wanted, rtol=0, atol=1e-10)
    table = knock_out(model, texts, over="head").frame().set_index(["layer", "head"])
    for head in ((0, 1), (1, 0)):
        rule = Augmentation(alpha=1, law="cut", phase="after_span", heads=(head,))
        hidden = [by_hand(model, example, rule) for example in texts.examples]
        lost = np.mean(wanted) - np.mean(hidden)
        assert table.loc[head, "effect"] == pytest.approx(lost, abs=1e-10)


def test_the_page_of_a_study_names_the_tokens_of_the_span(model):
    """They begin behind the template's mark and the words before the span."""
    texts = ContrastSet.of(model, TASK, texts={prompt: [[5]] for prompt in TASK.prompts.texts})
    letters = zip("Be a cat.", "Be a dog.", strict=True)
    assert _tokens(texts.examples[0]) == [
        " / ".join(dict.fromkeys(map(repr, pair))) for pair in letters
    ]


def test_texts_of_no_attribute_are_written_with_the_span_hidden(model):
    texts = ContrastSet.of(model, TASK, tokens=4)
    steered = ContrastSet.of(model, TASK, tokens=4, source="cat")
    assert {example.source for example in texts.examples} == {"raw"}
    assert [example.text for example in texts.examples] != [
        example.text for example in steered.examples
    ]
    assert "from_raw" not in texts.metrics


def test_gradients_selection_and_fading_read_chats(model):
    texts = ContrastSet.of(model, TASK, tokens=12)
    if type(model).__name__ == "TransformerBridge":
        slopes = attribution(model, texts, metric="js")
        assert len(slopes.frame()) == model.cfg.n_layers * model.cfg.n_heads
    many = [f"Who is {name}?" for name in "abcdefgh"]
    asked = ContrastSet.of(model, TASK, tokens=3, prompts=many)
    chosen = select(model, asked, score="mass", heads=2, metric="js")
    assert chosen.augmentation(alpha=1).heads == tuple(sorted(chosen.heads))
    faded = measure_fading(model, texts, filler=(4,), tokens=4, metric="js")
    for n, values in ((1, faded.near), (4, faded.far[4])):
        read = [replace(example, text=example.text[-n - 4 :]) for example in texts.examples]
        wanted = [by_hand(model, example, first=n) for example in read]
        assert np.allclose(values, wanted, rtol=0, atol=1e-6)  # some rotate in float32


def test_an_example_is_a_chat_of_each_branch(model):
    prefixes = {name: one.prefix for name, one in TASK.attributes.items()}
    example = ContrastExample.of_chat(model.tokenizer, TASK.chat, prefixes, "Why?", [70, 71])
    for layout, prefix in zip(example.layouts, prefixes.values(), strict=True):
        assert layout == chat_layout(
            model.tokenizer, TASK.chat.filled(prefix=prefix, prompt="Why?")
        )
        assert "".join(layout.tokens[slice(*layout.prefix)]) == prefix
