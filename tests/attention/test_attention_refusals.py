"""What the room refuses: a call, and what its one line says. What passes of every class of model
refuse: `test_attention`, `test_passes` and `test_masks`."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
from conftest import load
from test_attention import branch, bridge_of, ids_of
from test_trace import made

from lapa2_interp import Augmentation, augmented, generate
from lapa2_interp.attention import neurons
from lapa2_interp.attention.neurons import assert_neurons_live
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.attention.tables import head_table, local_ratio, prefix_token_table, step_table
from lapa2_interp.errors import DeadHookError, Lapa2Error, LayoutError, TraceError
from lapa2_interp.models.liveness import assert_live

RULE = Augmentation(alpha=1)


def tiny():
    return load("tiny-gpt2")


def layout():
    return branch(tiny())


def enter(rules, layouts):
    with augmented(tiny(), rules, layouts):
        raise AssertionError("entered")


def read(layouts, ids, **settings):
    with augmented(tiny(), RULE, layouts, **settings):
        tiny()(ids)


def in_opt():
    """OPT's scores hook fires after the softmax on the bridge, and edits of it change nothing."""
    from transformers import OPTConfig

    config = OPTConfig(
        vocab_size=260, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32,
    )  # fmt: skip
    assert_live(bridge_of(config, "tiny-opt"), "tiny-opt")


def neurons_of(name, instead):
    with patch.object(neurons, name, instead):
        assert_neurons_live(tiny())


def hook_of_experts(model, layer, at="pre"):
    return f"blocks.{layer}.mlp.experts.hook_pre"


SETTINGS = [
    ({"prompts": []}, "prompts is an empty list; give at least one text"),
    ({"method": 3}, "method must be a name, or come from methods.get or get_for_task, found 3"),
    ({"method": "prefixx"}, "unknown method 'prefixx'; allowed: none, prefix"),
    (
        {"augmentation": 0.5},
        r"recipes as one text such as 'lapa2 \+ instaboost:M=5', or None; found 0.5",
    ),
    (
        {"alpha": 1.0, "augmentation": RULE},
        "alpha 1 is for an augmentation that leaves its alpha open",
    ),
    ({"trace": "ful"}, "trace: input should be 'none', 'pooled' or 'full', found 'ful'"),
    ({"eos": "Stop"}, "eos: input should be 'keep', 'stop' or 'block', found 'Stop'"),
    ({"attribute": 3}, "attribute: input should be a valid string, found 3"),
]
"""Arguments of the wrong kind."""
TABLES = (step_table, head_table, prefix_token_table)
CALLS = {
    "a number as an augmentation": (lambda: enter(0.5, [layout()]), "was given"),
    "a list of numbers": (lambda: enter([0.5], layout()), "was given"),
    "arguments in another order": (lambda: enter(layout(), RULE), "was given"),
    **{
        f"generate with {settings}": (
            lambda settings=settings: generate(tiny(), **{"attribute": "positive", **settings}),
            message,
        )
        for settings, message in SETTINGS
    },
    "two augmentations of one layout": (lambda: enter([None, None], layout()), "augmentations for", LayoutError),
    "no layouts": (lambda: enter([], []), "augmentations for", LayoutError),
    "three rows of two layouts": (lambda: read([layout(), layout()], ids_of(layout()).repeat(3, 1)),
     "3 rows, but 2", LayoutError),
    "a pass shorter than the span": (lambda: read(layout(), ids_of(layout())[:, :4], check_ids=False),
     "span ends at slot 7", LayoutError),
    "a span outside the sequence": (lambda: enter(Augmentation(alpha=1, span=((0, 99),)), layout()),
     "outside the sequence", LayoutError),
    "dead scores": (in_opt, "tiny-opt cannot be augmented: its scores hook fires after", DeadHookError),
    "neurons of experts": (lambda: neurons_of("neuron_hook_name", hook_of_experts),
     r"the model has no blocks.3.mlp.experts.hook_pre .* use a model with one MLP", DeadHookError),
    "neurons that do not act": (lambda: neurons_of("set_neurons", lambda model, neurons, values: nullcontext()),
     r"blocks.3.mlp.hook_pre does not move the logits", DeadHookError),
    "patterns of a head that is not there": (lambda: Recorder(4, 4, "full", [(4, 0)]),
     r"head \(4, 0\) does not exist; the model has layers 0-3", TraceError),
    "the nearest three keys": (lambda: local_ratio(made("tiny-gpt2").trace, 3),
     "nearest 2, 4, 6, 8 keys, not 3", TraceError),
    "an unknown branch": (lambda: step_table(made("tiny-gpt2").trace, made("tiny-gpt2").texts, branch="other"),
     "unknown branch 'other'; allowed: prefix", TraceError),
    "heads of a pooled trace": (
        lambda: head_table(made("tiny-gpt2", trace="pooled").trace, made("tiny-gpt2").texts),
        "pooled over heads",
        TraceError,
    ),
    **{
        f"{table.__name__} of some samples": (
            lambda table=table: table(made("tiny-gpt2").trace, made("tiny-gpt2").texts.iloc[2:]),
            r"2 texts for a trace of 4; .*trace.isel\(sample",
            TraceError,
        )
        for table in TABLES
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [pytest.param(*(*row, Lapa2Error)[:3], id=name[:60]) for name, row in CALLS.items()],
)
def test_what_the_room_refuses(call, message, error, without_types):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
