"""A text found in the requests of lm-eval: log-likelihoods and generation of a task in a folder."""

import json

import pytest
import torch
from conftest import load
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lapa2_interp import Augmentation, Layout, augmented

SAID = "You are a sailor."
FREE, RULE = Augmentation(alpha=1), Augmentation(alpha=1, phase="after_span")
QUESTIONS = {
    "The lake is": [" blue", " a long way from here"],
    "At night the ship": [" sails", " waits"],
}
CHOICES = """
task: sailor_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
description: "SAID "
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_mutual_info}]
"""
TEXTS = """
task: sailor_texts
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
description: "SAID "
doc_to_text: "{{question}}"
doc_to_target: ""
generation_kwargs: {until: ["never"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: bypass}]
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """A harness's model, our model, and what evaluates a task."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"question": q, "choices": c}) for q, c in QUESTIONS.items()]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    for name, text in (("choices", CHOICES), ("texts", TEXTS)):
        text = text.replace("FILE", str(folder / "questions.jsonl")).replace("SAID", SAID)
        (folder / f"{name}.yaml").write_text(text)
    model = load("tiny-llama", "float64", "TransformersModel")
    lm = HFLM(pretrained=model.original_model, tokenizer=model.tokenizer, batch_size=2)
    manager = TaskManager(include_path=str(folder), include_defaults=False)

    def evaluate(task):
        made = simple_evaluate(lm, tasks=[task], task_manager=manager, bootstrap_iters=0)
        return made["samples"][task]

    return lm, model, evaluate


def layout_of(model, question):
    return Layout.of(model, SAID, f" {question}")


def test_log_likelihoods(harness):
    """Of a choice with its context, and of the choice alone, which no span steers."""
    lm, model, evaluate = harness
    network, tokenizer = model.original_model, model.tokenizer
    with augmented(network, FREE, find=SAID, tokenizer=tokenizer, absent="leave") as finder:
        samples = evaluate("sailor_choices")
    n = sum(map(len, QUESTIONS.values()))
    assert (finder.rows, finder.left) == (2 * n, n)
    for sample in samples:
        question, choices = sample["doc"]["question"], sample["doc"]["choices"]
        for choice, (made, _) in zip(choices, sample["filtered_resps"], strict=False):
            context, continuation = lm._encode_pair(f"{SAID} {question}", choice)
            ids = torch.tensor([[*context, *continuation]])
            layout = layout_of(model, question + choice)
            offset = ids.shape[1] - len(layout)
            with torch.no_grad(), augmented(network, RULE, layout):
                logits = network(layout.tensor).logits[0].log_softmax(1)
            assert layout.ids[-offset:] == tuple(ids[0].tolist()) if offset else True
            wanted = sum(
                float(logits[len(layout) - len(continuation) - 1 + i, token])
                for i, token in enumerate(continuation)
            )
            assert made == pytest.approx(wanted, abs=1e-4)


def test_texts(harness):
    _, model, evaluate = harness
    network, tokenizer = model.original_model, model.tokenizer
    with augmented(network, FREE, find=SAID, tokenizer=tokenizer):
        samples = evaluate("sailor_texts")
    for sample in samples:
        layout = layout_of(model, sample["doc"]["question"])
        with augmented(network, RULE, layout):
            made = network.generate(layout.tensor, max_new_tokens=6, do_sample=False)
        text = tokenizer.decode(made[0, len(layout) :], skip_special_tokens=True)
        assert sample["filtered_resps"][0].strip() == text.strip()
