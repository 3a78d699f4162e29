"""The repository for the hub: its own loop and masks, which import nothing of ours, give our texts."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import load
from families import PLAIN

from lapa2_interp import Layout, generate
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.models.tiny import TINY

FOLDER = Path(__file__).parents[2] / "analyses" / "hub" / "lapa2"
PROMPTS = ("The lake", "A book is on the table")
SETTINGS = {"custom_generate": str(FOLDER), "trust_remote_code": True, "eos_token_id": []}


@pytest.fixture(autouse=True)
def modules_cache(tmp_path, monkeypatch):
    """Where transformers puts the code that it copies."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path])


def rows_of(model):
    layouts = [Layout.of(model.tokenizer, "Very positive:", prompt) for prompt in PROMPTS]
    rows = PaddedRows.of(left_pad(layouts))
    return {"inputs": rows.ids, "attention_mask": rows.mask}, layouts[0].l_pre


@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
def test_greedy_texts_are_ours_token_by_token(alpha):
    for name in TINY:
        model = load(name, "float64", PLAIN)
        ours = generate(
            model, list(PROMPTS), attribute="positive", alpha=alpha, top_k=1, length=46
        ).texts()["tokens"]
        inputs, n = rows_of(model)
        made = model.original_model.generate(
            **inputs, **SETTINGS, prefix_tokens=n, alpha=alpha, max_new_tokens=46
        )[:, -46:].tolist()
        for tokens, text in zip(made, ours, strict=True):  # our length counts the prompt, too
            assert len(text) >= 24
            assert tokens[: len(text)] == list(text)


def test_texts_end_and_draws_come_from_the_likeliest_tokens():
    model = load("tiny-llama", "float64", PLAIN)
    inputs, n = rows_of(model)
    plain = model.original_model.generate(**inputs, **SETTINGS, prefix_tokens=n, max_new_tokens=9)
    torch.manual_seed(0)
    draws = SETTINGS | {"do_sample": True, "top_k": 1, "prefix_tokens": n, "max_new_tokens": 9}
    assert torch.equal(model.original_model.generate(**inputs, **draws), plain)
    end = int(plain[0, -9])
    ended = model.original_model.generate(
        **inputs, **SETTINGS | {"eos_token_id": end, "pad_token_id": 7}, prefix_tokens=n,
        max_new_tokens=9,
    )  # fmt: skip
    assert ended[0, inputs["inputs"].shape[1] :].tolist()[:2] in ([end], [end, 7])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_beams": 2}, "has no num_beams"),
        ({"prefix_tokens": 99}, "is not a part of every row"),
        ({"prefix_tokens": 0}, "is not a part of every row"),
    ],
)
def test_what_it_cannot_do_is_refused(changes, problem):
    model = load("tiny-gpt2", "float64", PLAIN)
    inputs, n = rows_of(model)
    with pytest.raises(ValueError, match=problem):
        model.original_model.generate(**inputs, **SETTINGS | {"prefix_tokens": n} | changes)
