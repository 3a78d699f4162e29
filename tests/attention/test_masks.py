"""A hidden key is known by what its mask does, whatever number the mask has."""

import functools

import pytest
import torch
from conftest import MODEL_CLASSES

from lapa2_interp import Augmentation, Layout, PaddedRows, augmented, load_model, teacher_forced
from lapa2_interp.attention.guard import has_weight
from lapa2_interp.bias.layer_types import LayerType
from lapa2_interp.errors import ModelError
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.hook_names import HOOK_SCORES
from lapa2_interp.models.load import load_transformers

RULES = {
    "log": Augmentation(alpha=0.7),
    "target": Augmentation(alpha=1, law="target", tau=0.4, phase="everywhere"),
    "pooled ratio": Augmentation(alpha=1, law="ratio", tau=0.9, pooled=True, phase="everywhere"),
    "cut": Augmentation(alpha=1, law="cut"),
}
TOLERANCE = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 0.2, "float16": 2e-2}
"""Compatibility mode folds and centres weights in float32, and rounds them to the dtype."""
PROMPTS = ("The lake", "A book is on the")


def rows_of(model):
    return PaddedRows.of([Layout.of(model, "Very good:", text) for text in PROMPTS])


@torch.no_grad()
def last_log_probs(model, rule, rows):
    positions = (
        {} if type(model).__name__ == "HookedTransformer" else {"position_ids": rows.positions}
    )
    with augmented(model, rule, rows.layouts):
        logits = model(rows.ids, attention_mask=rows.mask, **positions)
    return logits[:, -1].double().log_softmax(1)


@functools.cache
def bridges(dtype):
    """A TransformerBridge as it is loaded, and in compatibility mode."""
    plain, compatible = (load_model("tiny-gpt2", dtype, device="cpu") for _ in range(2))
    compatible.enable_compatibility_mode(disable_warnings=True)
    return plain, compatible


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_padded_rows_in_compatibility_mode_are_those_without(dtype, rule):
    """There masks are -inf, and the weights are folded and centred."""
    plain, compatible = bridges(dtype)
    rows = rows_of(plain)
    log_probs, wanted = (last_log_probs(model, rule, rows) for model in (compatible, plain))
    assert (log_probs - wanted).abs().max() < TOLERANCE[dtype]
    assert (wanted - last_log_probs(plain, None, rows)).abs().max() > TOLERANCE[dtype]


def test_decoding_in_compatibility_mode_has_the_trace_of_decoding_without():
    plain, compatible = bridges("float64")
    layouts = rows_of(plain).layouts
    trace, wanted = (
        teacher_forced(model, layouts, [[40, 41, 42]] * 2, RULES["log"], chunk=1)
        for model in (compatible, plain)
    )
    assert float(abs(trace["prefix"] - wanted["prefix"]).max()) < 1e-6


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("fill", [-1e4, -6e4, -torch.inf, "smallest"])
@torch.no_grad()
def test_a_mask_may_have_any_number(fill, dtype):
    network, tokenizer, _ = load_transformers("tiny-llama", dtype)
    rows = PaddedRows.of([Layout.of(tokenizer, "Very good:", text) for text in PROMPTS])
    square = torch.ones(rows.ids.shape[1], rows.ids.shape[1], dtype=torch.bool)
    seen = rows.mask.bool()[:, None, None] & square.tril()
    seen |= torch.eye(len(square), dtype=torch.bool)  # padding reads itself
    fill = torch.finfo(network.dtype).min if fill == "smallest" else fill
    mask = torch.zeros(seen.shape, dtype=network.dtype).masked_fill(~seen, fill)
    with augmented(network, RULES["log"], rows.layouts):
        logits, wanted = (
            network(rows.ids, attention_mask=form, position_ids=rows.positions).logits[:, -1]
            for form in (mask, rows.mask)
        )
    assert (logits - wanted).abs().max() <= (1e-12 if dtype == "float64" else 1e-2)
    mask[1, :, -1, 5] = fill  # the second row is not padded
    with (
        augmented(network, RULES["log"], rows.layouts),
        pytest.raises(
            ModelError, match="sees the keys in slots 0-4 6-26, not 0-26; if no mask of yours"
        ),
    ):
        network(rows.ids, attention_mask=mask, position_ids=rows.positions)


@pytest.mark.parametrize("model_class", [*MODEL_CLASSES, "TransformersModel"])
def test_a_knock_out_is_no_mask(model_class):
    """The block inside another that cuts keys asks what the model hides, not what the other has
    cut."""
    model = load_model("tiny-llama", "float64", device="cpu", model_class=model_class)
    rows = rows_of(model)
    cut = Augmentation(alpha=1, law="cut", span=((1, 3),), phase="last_query")
    together = last_log_probs(model, (cut, RULES["log"]), rows)
    with augmented(model, cut, rows.layouts):
        nested = last_log_probs(model, RULES["log"], rows)
    assert (nested - together).abs().max() < 1e-12
    if model_class != "TransformersModel":

        def hide(scores, hook):
            scores[:, :, -1, -4] = -torch.inf
            return scores

        before = last_log_probs(model, RULES["log"], rows)
        with model.hooks(fwd_hooks=[(HOOK_SCORES.format(0), hide)]):
            assert (last_log_probs(model, RULES["log"], rows) - before).abs().max() > 1e-6


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_a_window_that_the_mask_does_not_have_is_refused(model_class, monkeypatch):
    model = load_model("tiny-llama", "float64", device="cpu", model_class=model_class)
    sliding = (LayerType("sliding", 9),) * model.cfg.n_layers
    monkeypatch.setattr(facts_of(model), "layer_types", sliding)
    with pytest.raises(ModelError, match="sliding 9 by .* sees the keys in slots 8-26, not 18-26;"):
        last_log_probs(model, RULES["log"], rows_of(model))


def test_small_weights_count_and_scores_that_none_has_do_not():
    scores = torch.tensor([[[0.0, -600.0, -torch.inf, -1e4], [0.0, -800.0, -torch.inf, -1e4]]])
    assert has_weight(scores).tolist() == [[True, True, False, False]]
    assert has_weight(scores[:, 1:]).tolist() == [[True, False, False, False]]
