"""Whether the raw branch's prompt should be strengthened, where the answer is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lapa2_interp.attention.hooked import augmented
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layout import Layout
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.metrics import METRICS, Predictions
from lapa2_interp.circuits.pro_aug import prompt_slope
from lapa2_interp.circuits.selection import Selection, select
from lapa2_interp.errors import CircuitError
from lapa2_interp.methods.base import BatchStart, Branch, Prepared
from lapa2_interp.methods.registry import get, get_for_task, load_task
from tests.conftest import load

PROMPTS = load_task("sentiment").prompts.texts[:8]
FILLER = " the a of and to in"


def ids(model, text):
    return model.tokenizer(text, add_special_tokens=False).input_ids


def read(model, branch, prompt, text, rule):
    """Log-probabilities of a branch at each step, and its prompt's log-likelihood, in one pass
    under the package's own hooks."""
    layout = Layout.of(model.tokenizer, branch.prefix, branch.join + prompt)
    with augmented(model, rule, layout):
        log_probs = model(torch.tensor([[*layout.ids, *text[:-1]]])).log_softmax(2)
    at = torch.arange(len(layout) - layout.l_pro, len(layout))
    likely = log_probs[:, at - 1, torch.tensor(layout.ids)[at]].sum(1)
    return log_probs[:, len(layout) - 1 :], likely


def control_of(method, branches, outputs, text, n_prompt):
    """The llr of a method's own distributions, from the outputs of its branches."""
    of_attributes = []
    for of_attribute in branches:
        rows = {branch.name: outputs[branch.prefix] for branch in of_attribute}
        likelihoods = {name: likely for name, (_, likely) in rows.items()}
        state = method.begin(BatchStart((Prepared(),), likelihoods, torch.tensor([n_prompt])))
        weights = []
        for t, token in enumerate(text):
            log_probs = {name: steps[:, t].clone() for name, (steps, _) in rows.items()}
            weights.append(method.combine(log_probs, state))
            state = method.advance(state, log_probs, torch.tensor([token]))
        of_attributes.append(torch.stack(weights, 1).clamp(min=-10_000))
    ratios = METRICS["llr"](Predictions(torch.stack(of_attributes), torch.tensor([text])))
    return float(ratios.mean())


@pytest.mark.parametrize("method", ["air-decoding", "preadd", "gedi", "arithmetic"])
def test_the_slope_is_a_finite_difference_of_the_control(method):
    """Of the bias b that the law `scale` adds to the prompt of the raw branch, in some heads. Norms
    are in float32, so that b must move it by more than their rounding."""
    model = load("tiny-llama", "float64")
    settings = {
        "air-decoding": {"omega": 5.0},
        "preadd": {"lam": 2.0},
        "arithmetic": {"formula": "base + 2 * (target - opponents)"},
        "gedi": {"filter_p": 0.0},  # a token that the filter lets in would be a jump
    }
    chosen = get_for_task(method, load_task("sentiment"), **settings.get(method, {}))
    heads, text, h = ((0, 1), (1, 0)), ids(model, " tree and"), 0.03
    slope = prompt_slope(
        model,
        "sentiment",
        replace(chosen, pro_aug=True),
        prompts=PROMPTS,
        texts={prompt: [text] for prompt in PROMPTS},
        heads=heads,
        metric="llr",
    )
    branches = [chosen.branches(load_task("sentiment"), name) for name in ("positive", "negative")]
    steered, slopes = {branch.prefix: branch for branch in sum(branches, ()) if branch.prefix}, []
    for prompt in PROMPTS:
        n_prompt, ends = len(ids(model, prompt)), []
        with torch.no_grad():
            fixed = {
                prefix: read(model, branch, prompt, text, None)
                for prefix, branch in steered.items()
            }
            for b in (h, -h):
                rule = Augmentation(alpha=b, law="scale", heads=heads)
                raw = read(model, Branch("base"), prompt, text, rule)
                ends.append(control_of(chosen, branches, fixed | {None: raw}, text, n_prompt))
        slopes.append((ends[0] - ends[1]) / (2 * h))
    expected = np.mean(slopes)
    assert abs(expected) > 1e-7
    assert slope.mean == pytest.approx(expected, rel=1e-3)


def test_a_planted_raw_model_that_must_be_boosted_and_one_that_must_not():
    """Where the prompt has the attribute's word, a stronger prompt makes the raw model sure of its
    own, and steering does less. Where the text has it, a stronger prompt takes it away. Without
    the word nothing reads the prompt."""
    model = load("planted")
    filler, mild = ids(model, FILLER), get("air-decoding", omega=2.0)
    word = ids(model, " positive")
    within = [prompt + " positive" for prompt in PROMPTS]
    examples = {
        "prompt": (within, {prompt: [filler] for prompt in within}),
        "text": (PROMPTS, {prompt: [word + filler] for prompt in PROMPTS}),
        "nowhere": (PROMPTS, {prompt: [filler] for prompt in PROMPTS}),
    }
    slopes = {
        name: prompt_slope(model, "sentiment", mild, prompts=prompts, texts=texts)
        for name, (prompts, texts) in examples.items()
    }
    assert {name: slope.boost for name, slope in slopes.items()} == {
        "prompt": False,
        "text": True,
        "nowhere": False,
    }
    assert slopes["prompt"].high < 0 == slopes["nowhere"].mean
    lex = prompt_slope(model, "sentiment", mild, prompts=PROMPTS, texts=examples["text"][1], metric="lex")  # fmt: skip
    assert (lex.mean, lex.boost) == (0.0, False), "it cancels, and rounding is no slope"


def test_words_that_are_given_are_those_of_lex(monkeypatch):
    """A selection decides on Pro-Aug by the words it was asked about, not by the task's."""
    from lapa2_interp.circuits import pro_aug

    model, seen = load("planted"), set()
    monkeypatch.setattr(
        pro_aug, "Predictions", lambda *arguments: seen.add(arguments[3]) or Predictions(*arguments)
    )
    words = {"negative": ids(model, " bad"), "positive": ids(model, " good")}
    asked = {"score": "random", "heads": 0, "pro_aug": "air-decoding", "metric": "lex"}
    select(model, ContrastSet.of(model, "sentiment", tokens=2, words=words), **asked)
    assert seen == {(tuple(words["positive"]), tuple(words["negative"]))}
    with pytest.raises(CircuitError, match="words are given for a; the attributes are positive"):
        prompt_slope(
            model, "sentiment", "air-decoding", metric="lex", words={"a": [1]}, prompts=PROMPTS
        )


def test_a_selection_carries_it_to_generate(tmp_path):
    from lapa2_interp import load_run
    from lapa2_interp.cli.app import main

    model, card = load("planted"), tmp_path / "card.json"
    word = ids(model, " positive" + FILLER)
    settings = {"prompts": PROMPTS, "texts": {prompt: [word] for prompt in PROMPTS}}
    asked = {"score": "random", "heads": 0, "pro_aug": get("air-decoding", omega=2.0)}
    chosen = select(model, ContrastSet.of(model, "sentiment", **settings), **asked)
    assert chosen.prompt.boost
    assert chosen.parameters("air-decoding") == {"pro_aug": True}
    assert chosen.parameters("preadd") == {}
    chosen.save(card)
    assert Selection.load(card) == chosen
    line = "select planted --score random --heads 2 --tokens 4 --pro-aug air-decoding --out"
    no = tmp_path / "no.json"
    assert main([*line.split(), str(no)]) == 0
    line = "generate --model planted --method air-decoding --attribute positive --length 8"
    line += " --trace none --prompt"
    for more, expected in (  # without a decision it is on
        ([], False),
        (["--set", "pro_aug=true"], True),
    ):
        out = tmp_path / f"made{len(more)}"
        made = [*line.split(), "The lake", "--card", str(no), "--out", str(out), *more]
        assert main(made) == 0
        (cell,) = load_run(out).by_key.values()
        assert cell.parameters["pro_aug"] is expected
