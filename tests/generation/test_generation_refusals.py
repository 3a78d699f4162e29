"""What the room refuses: a call, and what its one line says."""

from unittest.mock import patch

import pytest
import torch
from conftest import fresh, load
from test_decoding import made
from test_turns import FORM, KEPT, SCRIPTS, TEMPLATE, answers, script_task

from lapa2_interp import Augmentation, Layout, generate
from lapa2_interp.errors import (
    AugmentationError,
    Lapa2Error,
    LayoutError,
    MethodError,
    ModelError,
    TaskError,
    TraceError,
)
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.methods.registry import known_methods

ASKED = {"attribute": "positive", "dtype": "float32"}
LONG = "x" * 5_000_000
SETTINGS = [
    ({"length": 300}, "exceed the context of 256 of tiny-gpt2"),
    ({"length": 8}, "because on task sentiment it counts them, too; length 16 makes 8 new tokens"),
    ({"length": 0}, "length: input should be greater than or equal to 1, found 0", Lapa2Error),
    ({"samples": 0}, "samples: input should be greater than or equal to 1", Lapa2Error),
    ({"top_k": 0}, "top_k: input should be greater than or equal to 1, found 0", Lapa2Error),
    *(({"temperature": value}, f"temperature: takes a number from 1e-30 to 1e30; .*; found {str(value).replace('+', '.')}", Lapa2Error)
      for value in (0, 1e-44, 1e-300, 1e300, -1.0)),
    ({"method": methods.get("caa", strength=1e300)},
     "tiny-gpt2 are not numbers .NaN. at step 0: caa has strength=1e.300; strength is so large", MethodError),
    ({"prompts": ("The lake", "The lake")}, "given twice"),
    ({"prompts": ("",)}, "tokenises to nothing"),
    ({"attribute": "joyful"}, "unknown attribute 'joyful'; allowed: positive, negative", TaskError),
    ({"augmentation": Augmentation(alpha=1, layers=(4,))}, "layers 0-3", AugmentationError),
    ({"augmentation": Augmentation(alpha=1, span=((0, 50),))}, "outside the sequence"),
    ({"patterns": [(0, 7)]}, r"head \(0, 7\) does not exist", Lapa2Error),
    ({"prompts": ()}, "prompts is an empty list; give at least one text"),
    ({"patterns": [(0, 1)], "trace": "none"}, "patterns are part of a trace", Lapa2Error),
]  # fmt: skip
"""Settings of texts of tiny-gpt2."""
TURNS = [
    ({"samples": 2}, "goes on from one sample of each prompt, and samples is 2", MethodError),
    ({"task": chat_task(FORM, prompts=SCRIPTS)}, "the chat has one answer", MethodError),
    ({"method": "prefix", "task": "sentiment"}, "method 'prefix': .*keep_turns", MethodError),
    ({"length": 700}, "before the last of 3 answers and 700 new ones exceed"),
    (
        {"augmentation": Augmentation(alpha=1, law="ratio", tau=0.9, pooled=True)},
        "a pooled law reads all queries of a pass",
        AugmentationError,
    ),
]
"""Settings of chats whose turns are kept."""
TOKEN = torch.tensor([70])


def without_numbers():
    model = fresh("tiny-gpt2")
    next(weight for name, weight in model.named_parameters() if "mlp" in name).data.fill_(torch.nan)
    made(model)


def with_an_infinite_logit():
    """As float16 has it where a number exceeds its largest."""
    model = fresh("tiny-gpt2")
    unembedding = model.original_model.get_output_embeddings()
    unembedding.register_forward_hook(lambda *call: call[-1].index_fill(-1, TOKEN, torch.inf))
    made(model)


def undeclared(method, parameters):
    """A method that acts on the network, and does not say so."""
    with patch.object(known_methods()[method], "changes_network", False):
        made(load("tiny-gpt2"), method=method, parameters=parameters)


def chat(read, context=None):
    """A call with a model that has a chat template, and perhaps another context."""
    model = load("tiny-llama", "float64")
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(model.tokenizer, "chat_template", TEMPLATE)
        if context:
            patches.setattr(model.cfg, "n_ctx", context)
        read(model)


def kept_turns(model, settings):
    asked = {"method": "chat", "task": script_task(), "parameters": KEPT, "augmentation": "none"}
    generate(model, **{"length": 4, **asked, **settings})


def forced(texts, layouts=1, **settings):
    model = load("tiny-gpt2")
    branch = Layout.of(model.tokenizer, "Very positive:", "The lake")
    branches = branch if layouts == 1 else [branch] * layouts
    teacher_forced(model, branches, texts, **settings)


CALLS = {
    **{
        f"texts with {settings}": (lambda settings=settings: made(load("tiny-gpt2"), **settings), *row)
        for settings, *row in SETTINGS
    },
    "weights that are no numbers": (without_numbers,
     "logits of .*tiny-gpt2 are not numbers .* at step 0", ModelError),
    "an infinite logit": (with_an_infinite_logit,
     "logits of .*tiny-gpt2 are not numbers .infinite. at step 0", ModelError),
    **{
        f"the prompt {prompt[:9]!a}": (lambda prompt=prompt: cell_of("tiny-gpt2", prompts=[prompt], **ASKED), message)
        for prompt, message in (
            ("a\0b", "has a NUL, which a trace cannot name"),
            (LONG, "the prompt 'xxxx.* has 5000000 letters, and 4194304 are"),
            ("a \ud800", r"the prompt 'a \\ud800' has half a character"),
        )
    },
    **{
        f"an attribute beside the prefix {prefix!r}": (
            lambda prefix=prefix: cell_of("tiny-gpt2", prefix=prefix, attribute="formal"),
            "attribute 'formal' is none of task 'sentiment', the default, which has positive, negative; .*leave attribute out",
            TaskError)
        for prefix in ("Very formal:", "A {attribute} text:")
    },
    "a prefix of millions of letters": (lambda: Layout.of(load("tiny-gpt2").tokenizer, LONG, "The lake"),
     "the prefix 'xxxx.* has 5000000 letters"),
    **{
        f"a silent change of the network by {method}": (
            lambda row=(method, parameters): undeclared(*row),
            f"{method} intervenes, .* declare changes_network = True",
            MethodError,
        )
        for method, parameters in (("caa", {"strength": 1.0}), ("remind", {"every": 4}))
    },
    # A given text.
    "an empty text": (lambda: forced([[]]), "found 1 texts, one empty", TraceError),
    "no trace": (lambda: forced([[5]], trace="none"), "found trace 'none'", TraceError),
    "a text beyond the context": (lambda: forced([[5] * 257]), r"context of 256; give at most \d+ tokens"),
    "three texts of two layouts": (lambda: forced([[5]] * 3, layouts=2), "3 texts for 2 layouts"),
    # Chats.
    **{
        f"kept turns with {settings}": (
            lambda settings=settings: chat(lambda model: kept_turns(model, settings)),
            *row,
        )
        for settings, *row in TURNS
    },
    # Texts of bytes that are no character have more tokens when they are read again; and a row that
    # reads fewer tokens than others runs on beside them.
    "chats that outgrow the context": (lambda: chat(answers, 70), "turn 2 begins after .* give a shorter length"),
    "a batch of chats that outgrows it": (lambda: chat(lambda model: answers(model, parameters=KEPT), 45),
     "a batch of chats reads up to .* smaller max_rows"),
    "a prompt of two lines for three": (lambda: chat(lambda model: answers(model, script_task(["Why?\nAnd snow?"]))),
     r"asks for \{prompt:3\}, and prompt 'Why.* has 2 lines", TaskError),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [pytest.param(*(*row, LayoutError)[:3], id=name[:60]) for name, row in CALLS.items()],
)
def test_what_the_room_refuses(call, message, error):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
