"""What the room refuses: a call, and what its one line says."""

from functools import cache

import numpy as np
import pytest
from conftest import load
from test_chat_templates import TEMPLATE, THOUGHT
from test_layout import CHAT, chat_tokenizer

from lapa2_interp import Augmentation, Layout, PaddedRows, augmented, circuits, recipe
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.bias.text_start import text_markers
from lapa2_interp.bias.theory import fit_decay, fit_slopes
from lapa2_interp.errors import AugmentationError, GridError, Lapa2Error, LayoutError
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.generation.settings import CellSettings
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.runs.grid import load_grid

ASKED = {"attribute": "positive", "prompts": ["The lake"], "dtype": "float32", "length": 12}
NAN, INF = float("nan"), float("inf")


def freeze():
    Augmentation(alpha=1).alpha = 2


# --- augmentations


FIELDS = [
    ({"alpha": True}, "alpha: input should be a valid number, found True"),
    ({"alpha": -1}, "alpha.*greater than or equal to 0.*-1"),
    ({"alpha": -1}, "alpha of law 'log' should be greater than or equal to 0, found -1"),
    ({"alpha": NAN}, "alpha.*finite"),
    ({"alpha": INF}, "alpha.*finite"),
    ({}, "alpha.*required"),
    ({"alfa": 1}, "unknown field 'alfa'; allowed: .*did you mean 'alpha'"),
    ({"layer": "all"}, "unknown field 'layer'; allowed: alpha, .*did you mean 'layers'"),
    ({"law": "constant"}, "constant law needs l0"),
    (
        {"l0": 128, "law": "linear"},
        "l0 belongs to the laws log, constant and multiply, not to 'linear'",
    ),
    ({"law": "multiply", "l0": 1.0}, "l0 of law 'multiply' should be above 1, found 1"),
    ({"alpha": -2, "law": "multiply"}, "should be greater than or equal to -1, found -2"),
    ({"span": "all"}, "span 'all' is for law 'multiply', not for law 'log'"),
    ({"law": "cubic"}, "law.*'log'.*cubic"),
    ({"profile": "code"}, "profile.*'paper'.*code"),
    ({"span": ((3, 3),)}, r"span \[3, 3\) is empty"),
    ({"span": ()}, "span"),
    ({"span": ((0, 3), (1, 4))}, "overlap at slot 1"),
    (
        {"span": (1, 4)},
        r"span: takes 'prefix', .*slots \(\(start, stop\), ...\) or .*; found \(1, 4\)",
    ),
    (
        {"heads": "foo"},
        r"heads: takes 'all', or pairs .*\(\(layer, head\), ...\) or .*; found 'foo'",
    ),
    ({"strengths": "3.1"}, r"strengths: takes numbers of heads, .* '3.1:0.5,4.0:-2'; found '3.1'"),
    ({"strengths": ((3, 1, float("nan")),)}, "strengths"),
    ({"strengths": ((3, 1, 1), (3, 1, 2))}, "head 3.1 has two strengths; give it one"),
    ({"strengths": "3.1:0"}, "all strengths are 0; leave the augmentation out"),
    ({"strengths": "3.1:2", "heads": ((3, 1),)}, "strengths name their heads; leave heads out"),
    ({"strengths": "3.1:2", "law": "cut"}, "strengths belong to the laws log, .*not to law 'cut'"),
    ({"layers": "middle"}, "layers: takes 'all', 'bottom', .*; found 'middle'"),
    ({"alpha": 1.5, "law": "cut"}, "alpha of law 'cut' should be from 0 to 1, found 1.5"),
    ({"law": "ratio"}, "needs tau"),
    ({"tau": 0.2}, "tau belongs to the laws target and ratio"),
    ({"law": "target", "tau": 1}, "tau: .*less than 1"),
    ({"floor": True}, "floor belongs to law target"),
    ({"pooled": True}, "pooled belongs to law ratio"),
    ({"steps": (3, 3)}, "give .first, stop. with first < stop"),
    ({"span": ("prefix", (1, 1))}, "positions .1, 1. of the span are not distinct"),
    ({"span": ("prefix", ())}, "positions within the prefix"),
    *(
        (fields, "takes 'all', .* from 0")
        for value in ((-1,), (True,), (1.0,), ("1",), (np.float32(1),))
        for fields in ({"layers": value}, {"heads": ((0, *value),)})
    ),
    *(
        ({"steps": steps}, r"augmentation steps: takes .*\(first, stop\)")
        for steps in (range(4), range(10**6), slice(0, 4), (0, 1, 2, 3), 4, (0.5, 2))
    ),
    *(
        ({name: text}, f"augmentation {name}: takes .*; found '{text}'")
        for name, texts in {
            "layers": ("3-1", "1,", "-1", "1.5", "0-99999", "١", "1 0", "1 -3", "0,1 2"),
            "heads": ("3", "1.2-", "-1.0", "1.2.3", "1 0.1", "0.1 2"),
            "steps": ("16", "1 6:3 2"),
            "span": ("prefix:", "1-4", "1:1 2", "prefix:1 0"),
        }.items()
        for text in texts
    ),
]
"""Beside alpha 1, if nothing is said of alpha."""


def of_fields(fields):
    has_alpha = not fields or {"alpha", "alfa"} & fields.keys()
    return Augmentation(**fields if has_alpha else {"alpha": 1, **fields})


RECIPES = {
    "past": "unknown recipe 'past'.*did you mean 'pasta'",
    "pasta:beta=1": "unknown parameter of recipe pasta 'beta'; allowed: alpha, tokens",
    "pasta:alpha": "'alpha' of recipe 'pasta' is not PARAMETER=VALUE",
    "pasta:alpha=1,alpha=2": "each once",
    "pasta:alpha=0": "alpha should be above 0, found 0",
    "instaboost:M=-1": "M should be above 0",
    "instaboost:M=x": "recipe instaboost: M: input should be a valid number, found 'x'",
    "instaboost:heads=3": "heads: takes 'all', or pairs .* such as '3.1,4.0-8'; found '3'",
    "instaboost:steps=3": "steps: takes .* such as '0:16'; found '3'",
    "set-point:floor=yes": "floor: input should be a valid boolean, found 'yes'",
    "split-softmax:k=2": "at most 1, found 2",
    "selective:tokens=1": "needs heads, such as selective:tokens=1,heads=3.1/4.0",
    "pasta:span=bos": "recipe pasta has its own span; leave it out",
    "instaboost:alpha=1": "recipe instaboost has its own alpha",
    "lapa2:span=bos,tokens=1": "tokens are a span, such as span=prefix:1; leave one of the two out",
    "lapa2:span=prefix+bos": "unknown recipe 'bos'",
    "lapa2:law=sqr": "law: input should be 'log', .* found 'sqr'",
    "lapa2:pooled=true": "pooled belongs to law ratio",
    "ssmax:s=0": "s should be above 0, found 0",
    "log-n:span=prefix": "recipe log-n has its own span; leave it out",
    "lapa2 +": "unknown recipe ''",
    "spotlight:tau=2": "tau: .*less than 1",
    "lapa2:layers=1 0": "layers: takes .*'",
    "lapa2:heads=1 0.1": "heads: takes .*'",
    "lapa2:steps=1 6:3 2": "steps: takes .*'",
    "lapa2:tokens=1 0": "tokens: takes .*'",
}
"""A recipe as text, and the error."""


def masked(**fields):
    return Augmentation(alpha=1, **fields).head_mask(4, 4)


ARMS = "recipes as one text such as 'lapa2 . instaboost"
CALLS = {
    "a new value of a field": (freeze, "frozen", Exception),
    "a layer that is not there": (
        lambda: masked(layers=(7,)),
        "layer 7 does not exist; the model has layers 0-3",
    ),
    "a head that is not there": (
        lambda: masked(heads=((1, 9),)),
        r"head \(1, 9\) does not exist.*heads 0-3",
    ),
    "a strength of a head that is not there": (
        lambda: masked(strengths=((1, 9, 0.5),)),
        r"head \(1, 9\) does not exist.*heads 0-3",
    ),
    "layers without the strengths": (
        lambda: masked(layers=(0,), strengths=((3, 1, 0.5),)),
        r"heads \[\(3, 1\)\] have nothing in common in a model of 4 layers",
    ),
    "layers without the heads": (
        lambda: masked(layers=(0,), heads=((3, 1),)),
        "have nothing in common in a model of 4 layers",
    ),
    "M in quotes": (
        lambda: recipe("instaboost", M="0.5"),
        "M: input should be a valid number, found '0.5'",
    ),
    "k in quotes": (
        lambda: recipe("split-softmax", k="0.5"),
        "k: input should be a valid number, found '0.5'",
    ),
    "a tuple of recipes": (
        lambda: cell_of("tiny-gpt2", augmentation=("lapa2", "instaboost"), **ASKED),
        ARMS,
    ),
    "a number": (lambda: cell_of("tiny-gpt2", augmentation=3, **ASKED), ARMS),
    **{
        f"the label {label[:9]!r}": (
            lambda label=label: cell_of("tiny-gpt2", alpha=0.5, label=label, **ASKED),
            "label",
        )
        for label in ("baseline", " ours", "two\nlines", "x" * 201)
    },
    **{
        f"{instrument} of heads {heads}": (
            lambda call=call, heads=heads: call(heads),
            "takes pairs of numbers from 0",
            Lapa2Error,
        )
        for heads in ([(-1, 0)], "x", "1 0.1", [(True, 0)], [1, 2])
        for instrument, call in {
            "patterns": lambda heads: CellSettings.of({"patterns": heads}),
            "knock_out": lambda heads: circuits.knock_out(
                load("planted"), "sentiment", over={"some": heads}
            ),
            "patch": lambda heads: circuits.patch(
                load("planted"), "sentiment", "z", together={"some": heads}
            ),
        }.items()
    },
    "a decay of two steps": (
        lambda: fit_decay(np.arange(2), np.array([0.2, 0.1])),
        "at least 3 steps, found 2",
        ValueError,
    ),
    "slopes of two steps": (
        lambda: fit_slopes(np.arange(2.0), np.ones((3, 2))),
        "at least 3 steps, found 2",
        ValueError,
    ),
    "slopes of other lengths": (
        lambda: fit_slopes(np.ones(4), np.ones((3, 4))),
        "different lengths, found 4 times 1",
        ValueError,
    ),
}
GRIDS = {
    'augmentation = [{ alpha = 1.0, label = "a" }, { alpha = 2.0, label = "a" }]': (
        "label 'a' names two arms .alpha 1 paper; alpha 2 paper."
    ),
    'label = "a"\naugmentation = ["paper", "released"]': "label 'a' names two arms",
    'label = ["a", "b"]\naugmentation = "paper"': "label is one text, not a list",
    'augmentation = ["paper", { alpha = 2.0, label = "alpha 0.5 paper" }]': (
        "label 'alpha 0.5 paper' names two arms .alpha 0.5 paper; alpha 2 paper."
    ),
    'label = "a"\naugmentation = "none"': ("label 'a' is for an augmentation, and there is none"),
    "augmentation = { alpha = 1.0, label = 3 }": "label of an augmentation is a text",
    'augmentation = { recipe = "lapa2", alpha = 1.0 }': "leave out alpha",
}
"""Lines of a grid file, and the error."""


def of_grid(lines):
    from pathlib import Path

    head = 'model = "tiny-gpt2"\nattribute = "positive"\nprompts = 1\n'
    Path("g.toml").write_text(f"{head}{lines}\n")
    return load_grid("g.toml")


# --- rows, chats


@cache
def branch(prefix="ab cd:"):
    return Layout.of(load("tiny-llama").tokenizer, prefix, "efg hi")


def enter(*rules, layout=None):
    layout = layout or branch()
    with augmented(load("tiny-llama"), [rules], layout):
        raise AssertionError("entered")


TARGET = Augmentation(alpha=1, law="target", tau=0.6)


def crossing_cuts():
    """One head sees no BOS, another nothing but BOS; one head would see nothing."""
    layout = branch("Very positive:")
    bos, rest = ((0, 1),), ((1, len(layout)),)
    cuts = [Augmentation(law="cut", alpha=1, span=bos, heads=((0, 0),))]
    cuts += [Augmentation(law="cut", alpha=1, span=rest, heads=((0, 0), (1, 0)))]
    enter(*cuts, layout=layout)


MARKED = [
    ("tiny-gpt2", "<|endoftext|>The lake"),
    ("tiny-llama", "<s>The lake"),
    ("tiny-llama", "  <s> The lake"),
    ("planted", None),
    ("smollm2-135m", "<|endoftext|>The lake"),
    ("smollm2-135m", "<|im_start|>user\nThe lake"),
]


def marked(name, text, where, doubled):
    """A text that brings a token of its own: it would be the second BOS, and count in every l."""
    tokenizer = shared_tokenizer(name)
    text = text or f"{tokenizer.convert_ids_to_tokens(text_markers(tokenizer).start)} The lake"
    pair = {
        "alone": (None, text), "behind": ("Very", text), "before": (text, "Once"),
        "a space": ("Very ", f" {text}"),
    }[where]  # fmt: skip
    return Layout.of(tokenizer, *pair, doubled_bos=doubled)


ROWS = {
    "targets beside a power": (
        lambda: enter(TARGET, Augmentation(alpha=1, law="power")),
        "solved together",
    ),
    "two targets of one span": (lambda: enter(TARGET, TARGET), "overlap", LayoutError),
    "targets above 1": (
        lambda: enter(TARGET, Augmentation(alpha=1, law="target", tau=0.5, span="bos")),
        "add up to 1.1",
    ),
    "a cut of all keys": (
        lambda: enter(Augmentation(alpha=1, law="cut", span=((0, branch().n_live),))),
        "sees no key that is not blocked",
        LayoutError,
    ),
    "a cut of the only key": (
        lambda: enter(Augmentation(alpha=1, law="cut", span="bos", phase="everywhere")),
        "slot 0 sees no key that is not blocked",
        LayoutError,
    ),
    "two cuts of all keys of a head": (
        crossing_cuts,
        "sees no key that is not blocked",
        LayoutError,
    ),
    "a position behind the prefix": (
        lambda: enter(Augmentation(alpha=1, span=("prefix", (0, 9)))),
        "give positions up to 5",
        LayoutError,
    ),
    "a position without a prefix": (
        lambda: enter(Augmentation(alpha=1, span=("prefix", (0,))), layout=branch(None)),
        "a branch without a prefix has no positions",
        LayoutError,
    ),
    "no rows": (
        lambda: PaddedRows.of([]),
        "found no layout; give one for each row",
        LayoutError,
    ),
    **{
        f"{name}, {text!r} {where}{', doubled BOS' * doubled}": (
            lambda parts=(name, text, where, doubled): marked(*parts),
            r"begins with '<.*Layout\.of_chat",
            LayoutError,
        )
        for name, text in MARKED
        for where in ("alone", "behind", "before", "a space")
        for doubled in (False, True)
    },
}
OF_GPT2 = {
    "two prefixes": (("Very positive:", "The lake"), {"soft": 20}, "one prefix, hard or soft"),
    "a doubled BOS": (("Very positive:", "The lake"), {"doubled_bos": True}, "doubled_bos"),
    "an empty prefix": (("", "The lake"), {}, "prefix '' tokenises to nothing"),
    "an empty prompt": (("Very positive:", ""), {}, "prompt '' tokenises to nothing"),
}
NO_LIST = "a chat is a list of messages"
TEXT = "both of them text"
NAMED = "unknown argument of the chat template"
BARE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
ONCE = "once and unchanged"
THINKING = {"enable_thinking": False}
DOUBLING = (
    "{% set ns = namespace(text='ab') %}"
    "{% for i in range(60) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
)
CHATS = [
    (CHAT[1:], {"span": "system"}, "no system message in front .its roles: user, assistant, user"),
    (CHAT, {"span": "turn:4"}, "no turn 4; the chat has turns 1 to 3"),
    (CHAT, {"span": "turn:0"}, "no turn 0"),
    (CHAT, {"span": "phrase:ater"}, "occurs 2 times"),
    (CHAT, {"span": "phrase:storm"}, "occurs 0 times"),
    (CHAT, {"span": "phrase:"}, "occurs 0 times"),
    (CHAT, {"span": "phrase:irate"}, "begins or ends inside a token; mark whole words"),
    (CHAT, {"span": "user"}, "should be system, turn:NUMBER, reasoning:NUMBER or phrase:TEXT"),
    ([], {"span": "system"}, NO_LIST),
    ([{"role": "system"}], {"span": "system"}, NO_LIST),
    (
        [{"role": "system", "content": " "}, *CHAT[1:]],
        {"span": "system"},
        "message 1 of the chat is empty",
    ),
    (CHAT, {"template": THINKING}, f"{NAMED} 'enable_thinking'"),
    (CHAT, {"template": {"enable_thinkin": False}}, f"{NAMED} 'enable_thinkin'; .*did you mean 'enable_thinking'", TEMPLATE),
    *((CHAT, {"template": {name: value}}, f"{NAMED} '{name}'", TEMPLATE)
      for name, value in {"padding": True, "tokenize": False, "messages": [], "m": 1}.items()),
    (CHAT, {"template": {"tools": ["look_up"]}}, "refuses these messages: Tools should", TEMPLATE),
    (CHAT, {"template": {"documents": ["text"]}}, "refuses these messages: Documents should", TEMPLATE),
    (CHAT, {"span": "reasoning:2"}, "turn 2 has no reasoning; give its message a text 'reasoning_content'", TEMPLATE),
    (CHAT, {"span": "reasoning:9"}, "no turn 9", TEMPLATE),
    (THOUGHT, {"span": "reasoning:2", "template": {"drop": True}}, "does not write the reasoning of message 3 once", TEMPLATE),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], {"span": "turn:1"}, f"{TEXT} .join the texts of parts; .*; found .*'type'", TEMPLATE),
    *(([{"role": "user", "content": text, name: value}], {"span": "turn:1"}, f"message 1 of the chat has '{name}', and only texts", TEMPLATE)
      for text in ("What is this?", None)
      for name, value in {"images": ["lake.png"], "audio": {"data": "UklGRg=="}, "image_url": {"url": "lake.png"}}.items()),
    ([{"role": "user", "content": None}], {"span": "turn:1"}, TEXT, TEMPLATE),
    ([{"role": 3, "content": "a"}], {"span": "turn:1"}, TEXT, TEMPLATE),
    (CHAT, {}, "refuses these messages: no system role", "{{ raise_exception('no system role') }}"),
    (CHAT, {}, "refuses these messages: can only concatenate", "{{ messages[0]['content'] + 1 }}"),
    (CHAT, {"span": f"turn:{'9' * 5000}"}, f"no turn {'9' * 20}; the chat has turns 1 to", TEMPLATE),
    (CHAT, {"template": {"mood": "a"}}, "the chat template cannot be read", "{{ " + "(" * 10**5),
    (CHAT, {}, "takes more memory .* than the 1 GiB allowed", "{{ 'a' * 10000000000 }}"),
    (CHAT, {}, "takes more memory .* than the 1 GiB allowed", DOUBLING),
    (CHAT, {}, "writes, 'aaaa.* has 10000000 letters, and", "{% for i in range(100000) %}{{ 'a' * 100 }}{% endfor %}"),
    (CHAT, {}, ONCE, BARE.replace("}}{%", "}}{{ m['content'] }}{%")),
    (CHAT, {}, ONCE, BARE.replace("']", "'] | upper")),
    (CHAT, {}, ONCE, "{{ messages[-1]['content'] }}"),
    (CHAT, {"span": "turn:3"}, "no text follows .*add_generation_prompt=True", BARE),
]  # fmt: skip
"""Messages, other arguments, the error, and a template."""


def of_chat(messages, asked, *template):
    return Layout.of_chat(chat_tokenizer(*template), messages, **asked)


def rows():
    for fields, message in FIELDS:
        yield str(fields), lambda fields=fields: of_fields(fields), message, AugmentationError
    for text, message in RECIPES.items():
        yield text, lambda text=text: parse_recipes(text), message, AugmentationError
    for lines, message in GRIDS.items():
        yield lines, lambda lines=lines: of_grid(lines), message, GridError
    for messages, asked, message, *template in CHATS:
        name = f"{str(asked or template[0])[:99]}: {message[:99]}"
        call = lambda parts=(messages, asked, *template): of_chat(*parts)  # noqa: E731
        yield name, call, message, LayoutError
    bare = "a tokenizer without a template"
    call = lambda: Layout.of_chat(shared_tokenizer("tiny-gpt2"), CHAT)  # noqa: E731
    yield bare, call, "no chat template", LayoutError
    for name, row in {**CALLS, **ROWS}.items():
        yield name, *(*row, AugmentationError)[:3]


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [pytest.param(*row, id=" ".join(name.split())[:60]) for name, *row in rows()],
)
def test_what_the_room_refuses(call, message, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        call()
    if isinstance(caught.value, Lapa2Error):
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize(("texts", "asked", "message"), OF_GPT2.values(), ids=OF_GPT2)
def test_what_the_tokenizer_of_gpt2_refuses(gpt2_tokenizer, texts, asked, message):
    with pytest.raises(LayoutError, match=message):
        Layout.of(gpt2_tokenizer, *texts, **asked)


def test_a_span_outside_the_sequence(gpt2_tokenizer):
    layout = Layout.of(gpt2_tokenizer, "Very positive:", "The lake")
    with pytest.raises(LayoutError, match=r"span \[2, 9\) lies outside the sequence of 6 keys"):
        layout.spans(((2, 9),))


def test_soft_slots_below_zero(gpt2_tokenizer):
    with pytest.raises(Lapa2Error, match="soft: .* or equal to 0, found -1"):
        Layout.of(gpt2_tokenizer, None, "The lake", soft=-1)
