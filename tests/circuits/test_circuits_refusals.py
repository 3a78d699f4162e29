"""What the room refuses: a call, and what its one line says."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from unittest import mock

import pytest
from accelerate import cpu_offload
from conftest import load, soft_prefix
from test_circuits import contrast_set, examples_of

from lapa2_interp import Augmentation, Layout
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import control_score
from lapa2_interp.circuits.edits import Edit, edited_logits
from lapa2_interp.circuits.examples import ContrastExample
from lapa2_interp.circuits.fading import measure_fading
from lapa2_interp.circuits.gradients import attribution, prefilter_recall
from lapa2_interp.circuits.knockout import joint_curve, knock_out
from lapa2_interp.circuits.logit_attribution import head_logit_attribution
from lapa2_interp.circuits.metrics import METRICS, lex
from lapa2_interp.circuits.patching import patch
from lapa2_interp.circuits.prefix_attention import alpha_at_prefix_attention
from lapa2_interp.circuits.pro_aug import prompt_slope
from lapa2_interp.circuits.selection import Selection, select
from lapa2_interp.circuits.units import Unit, head_pairs
from lapa2_interp.errors import (
    CircuitError,
    Lapa2Error,
    LayoutError,
    ModelError,
    TaskError,
)
from lapa2_interp.methods.base import Branch
from lapa2_interp.methods.contrast import Preadd
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.load import load_transformers, wrap_in_bridge
from lapa2_interp.tasks.task import Task

PROMPTS = [f"The {name}" for name in ("lake", "sea", "hut", "road", "hill", "town", "farm", "wood")]


def tiny(name="tiny-gpt2"):
    return load(name)


def plain():
    return load("tiny-gpt2", model_class="TransformersModel")


def offloaded(**settings):
    """A bridge whose weights accelerate brings for each pass."""
    network, tokenizer, _ = load_transformers("tiny-llama")
    return wrap_in_bridge(cpu_offload(network, "cpu", **settings), tokenizer, "mine", "w")


def of_offloaded(study, **settings):
    model = offloaded()
    study(model, contrast_set(model, n=5), **settings)


@cache
def asked(n=5, name="tiny-gpt2"):
    return contrast_set(tiny(name), n=n)


@cache
def planted_set(tokens=12):
    return ContrastSet.of(load("planted"), "sentiment", tokens=tokens)


def example():
    return asked(5, "tiny-llama").examples[0]


def example_with(first, second=None, text=None, **more):
    """An example with other layouts, or another text."""
    layouts = first, second or example().layouts[1]
    text = example().text if text is None else text
    return ContrastExample(example().prompt, example().attributes, layouts, text, **more)


def lone_attribute():
    lone = load_task("sentiment").model_dump() | {"methods": {}}
    lone["attributes"] = {"positive": lone["attributes"]["positive"]}
    return Task(**lone)


def without_a_common_position(over):
    others = examples_of(tiny(), prefixes={"plus": "ab:", "minus": "xy:"})
    return knock_out(tiny(), [*asked().examples, *others], over=over)


def of_texts(**settings):
    return ContrastSet.of(tiny("tiny-llama"), "sentiment", **settings)


def soft_layout():
    slots = example().layouts[0].l_pre
    return Layout.of(tiny("tiny-llama").tokenizer, None, "efg hi", soft=slots)


def behind(layout, token):
    """The layout with a token between BOS and the prefix."""
    ids = (*layout.ids[: layout.n_bos], token, *layout.ids[layout.n_bos :])
    return replace(layout, n_before=1, ids=ids, tokens=(*layout.tokens, "t"))


def several_answers():
    chat = [{"role": "system", "content": "Be {prefix}"}, {"role": "user", "content": "{prompt}"}]
    form = {"messages": chat, "later": ["Why?"]}
    talk = {"chat": form, "name": "talk", "length_counts_prompt": False}
    return Task(**load_task("sentiment").model_dump() | talk)


# --- texts, metrics and units


TEXTS = {
    "prefixes of two lengths": (
        lambda: ContrastExample.of(tiny().tokenizer, {"a": "abcd:", "b": "xy:"}, "p", "t"),
        r"different lengths in tokens \(a 5, b 3\).*reword",
    ),
    "one branch": (
        lambda: ContrastExample.of(tiny().tokenizer, {"a": "abcd:"}, "p", "t"),
        "two branches or more",
    ),
    "an empty text": (
        lambda: ContrastExample.of(tiny().tokenizer, {"a": "ab:", "b": "cd:"}, "p", ""),
        "is empty",
    ),
    "a task of prefixes of two lengths": (
        lambda: control_score(tiny(), "detox"),
        r"\(nontoxic 14, toxic 11\)",
    ),
    "a task of one attribute": (
        lambda: control_score(tiny(), lone_attribute()),
        "has one attribute",
        TaskError,
    ),
    "no tokens": (
        lambda: ContrastSet.of(load("planted"), "sentiment", tokens=0),
        "tokens: input should be greater than or equal to 1, found 0",
        Lapa2Error,
    ),
    "words of one attribute": (
        lambda: ContrastSet.of_examples(*asked().examples, words={"plus": [3]}),
        "words are given for plus; the attributes are plus, mi",
    ),
    "a token of prefix and prompt": (
        lambda: example_with(replace(example().layouts[0], merged=":e")),
        "the token ':e' is part of the prefix and of the prompt",
    ),
    "other tokens before the span": (
        lambda: example_with(*(behind(l, 70 + i) for i, l in enumerate(example().layouts))),
        "is not the same tokens in every branch",
    ),
    "a chat of several answers": (
        lambda: ContrastSet.of(tiny(), several_answers()),
        "has 2; leave out its later messages",
    ),
    "a text that is too long": (
        lambda: control_score(
            tiny("tiny-llama"), [example_with(*example().layouts, text=(70,) * 260)]
        ),
        "more than the model's context of 256; give shorter",
    ),
    "no text of a prompt": (
        lambda: of_texts(prompts=["The lake", "The sea"], texts={"The lake": [[70]]}),
        "texts has none for the prompt 'The sea'",
    ),
    "an empty list of texts": (
        lambda: of_texts(prompts=["The lake"], texts={"The lake": []}),
        "texts has none for the prompt 'The lake'",
    ),
    "no prompts": (
        lambda: of_texts(prompts=[]),
        "prompts is an empty list; give at least one",
        LayoutError,
    ),
    "slots without a soft prefix": (
        lambda: example_with(soft_layout()),
        "the layouts have 6, 0 slots, the prefixes 0, 0",
    ),
    "soft and hard prefixes": (
        lambda: example_with(
            soft_layout(),
            prefixes=(soft_prefix(tiny("tiny-llama"), slots=soft_layout().soft), None),
        ),
        "has soft and hard prefixes, so that the branches",
    ),
}
KNOCK_OUTS = {
    "positions of prefixes of two lengths": (
        lambda: without_a_common_position("position"),
        "no common positions",
    ),
    "heads by such positions": (
        lambda: without_a_common_position("head x position"),
        "no common positions",
    ),
    "an unknown metric": (
        lambda: control_score(tiny(), asked().examples, metrics=("jz",)),
        "unknown metric 'jz'; allowed: llr, js",
    ),
    "lex without words": (
        lambda: control_score(tiny(), asked().examples, metrics=("lex",)),
        "needs the words",
    ),
    "a metric of one number": (
        lambda: control_score(
            tiny(), asked().examples, metrics={"flat": lambda logits: logits.logits[0, :, 0, 0]}
        ),
        r"'flat' must give a number.*, 5\).*found \(1,\)",
    ),
    "no units": (lambda: knock_out(tiny(), asked(), units=[]), "no unit to knock out"),
    "a unit without a name": (
        lambda: knock_out(tiny(), asked(), over={"": [[0, 1]]}),
        "two units are called ''",
    ),
    "a unit called nothing": (
        lambda: knock_out(tiny(), asked(), over={"nothing": [[0, 1]]}),
        "two units are called 'nothing'",
    ),
    "no model": (
        lambda: edited_logits(object(), [(asked().examples[0], None)]),
        "a object is no model of TransformerLens or transformers",
        ModelError,
    ),
    "a HookedTransformer": (
        lambda: edited_logits(
            SimpleNamespace(hooks=(), cfg=SimpleNamespace(n_layers=2, n_heads=2)),
            [(asked().examples[0], None)],
        ),
        "from a TransformerBridge or a TransformersModel",
    ),
    "an unknown replacement": (lambda: Edit(((0, 0),), "cat"), "unknown replacement 'cat'"),
    "a head that is not there": (
        lambda: knock_out(tiny(), asked(), over={"x": [[0, 9]]}),
        "head 7 of|unknown kind|does not exist",
    ),
    "a head of a unit that is not there": (
        lambda: knock_out(tiny(), asked(), units=[Unit({"name": "x"}, ((9, 0),))]),
        r"head \(9, 0\) of 'x' does not exist",
    ),
    "an unknown kind of unit": (
        lambda: knock_out(tiny(), asked(), over="heads"),
        "unknown kind of unit 'heads'.*did you mean 'head'",
    ),
    "a head that is a number": (lambda: knock_out(tiny(), asked(), over={"x": [3]}), "pairs"),
    **{
        f"heads {wrong}": (lambda wrong=wrong: head_pairs("heads", wrong, CircuitError), "pairs")
        for wrong in ([1], [[1.7, 2]], [[True, 1]], ["12"], [[1, 2, 3]])
    },
}


@cache
def effects(of="heads"):
    """Knock-outs of tiny-llama."""
    settings = {
        "heads": {"metric": "lex"},
        "own": {"metric": {"mine": METRICS["js"]}},
        "positions": {"units": [Unit({"layer": 0, "head": 1, "position": 0}, ((0, 1),), (0,))]},
        "one head twice": {"units": [Unit({"name": i}, ((0, 1),)) for i in "ab"]},
    }[of]
    return knock_out(tiny("tiny-llama"), asked(1, "tiny-llama"), other_metrics=(), **settings)


def curve(of="heads", **settings):
    return joint_curve(tiny("tiny-llama"), effects(of), **({"sizes": (1,)} | settings))


CURVES = {
    "sizes above the number of heads": (
        lambda: curve(sizes=(1000,)),
        "a joint curve of .* heads needs sizes below that; found 1",
    ),
    **{
        f"sizes {sizes}": (
            lambda sizes=sizes: curve(sizes=sizes),
            f"sizes: .* or equal to 1, found {least}",
            Lapa2Error,
        )
        for sizes, least in (((0, 1), 0), ((-1, 1), -1), ((1000, -1), -1))
    },
    "no seeds": (
        lambda: curve(seeds=0),
        "seeds: .* or equal to 1, found 0",
        Lapa2Error,
    ),
    "a custom metric": (
        lambda: curve("own"),
        "'mine' is a custom function; give it again",
    ),
    "positions": (lambda: curve("positions"), "needs knock-outs of single heads"),
    "units by name": (lambda: curve("one head twice"), "needs knock-outs of single heads"),
}


# --- augmentations


def instruments():
    yield from (control_score, attribution, head_logit_attribution)


def under(instrument, **rule):
    """An instrument under a bias; the released span of tiny-gpt2 ends inside the prefix."""
    few = contrast_set(tiny(), n=2, prompts=("jkl",))
    return instrument(tiny(), few, augmentation=Augmentation(**rule))


def far(replacement):
    few = asked(5, "tiny-llama")
    unit = Unit({"name": "far"}, ((0, 0),), (few.l_pre,))
    return knock_out(tiny("tiny-llama"), few, units=[unit], replacement=replacement)


def of_phase(replacement, phase):
    settings = {"over": {"one": [(0, 0)]}, "replacement": replacement, "phase": phase}
    return knock_out(tiny("tiny-llama"), asked(5, "tiny-llama"), **settings)


BIASES = {
    **{
        f"{instrument.__name__}, span {span}": (
            lambda instrument=instrument, span=span: under(
                instrument, alpha=0.5, span=span, phase="after_span"
            ),
            "acts on queries inside it .phase 'after_span'",
        )
        for instrument in instruments()
        for span in ("bos", "released", ((0, 2),))
    },
    **{
        f"{instrument.__name__}, pooled": (
            lambda instrument=instrument: under(
                instrument, alpha=1, law="ratio", tau=0.3, pooled=True
            ),
            "a step would depend on what comes after it",
        )
        for instrument in instruments()
    },
    **{
        f"{replacement}, phase everywhere": (
            lambda replacement=replacement: of_phase(replacement, "everywhere"),
            "acts on queries inside it .phase 'everywhere'",
        )
        for replacement in ("cut", "zero", "resample", "mean")
    },
    **{
        f"{replacement}, a position behind the prefix": (
            lambda replacement=replacement: far(replacement),
            r"position 6 lies outside the prefix.*up to 5",
            LayoutError,
        )
        for replacement in ("cut", "zero", "resample", "mean")
    },
    "direct attribution, phase predicting_only": (
        lambda: head_logit_attribution(
            load("planted"),
            "sentiment",
            augmentation=Augmentation(alpha=1, phase="predicting_only"),
        ),
        "under phase 'predicting_only' prefix and text are not read in one pass",
    ),
    "direct attribution, phase everywhere": (
        lambda: head_logit_attribution(
            load("planted"), "sentiment", augmentation=Augmentation(alpha=1, phase="everywhere")
        ),
        "acts on queries inside it .phase 'everywhere'",
    ),
}


# --- gradients, direct attribution


@cache
def estimates():
    return attribution(tiny(), asked(3))


def recall(n_steps=3, of=None, n=None, **settings):
    table = knock_out(tiny(), asked(n_steps), other_metrics=(), **settings)
    more = {} if n is None else {"n": n}
    return prefilter_recall(of or estimates(), table, **more)


def shallow():
    both = estimates()
    first = {name: getattr(both, name)[:, :, :1] for name in ("cut_hats", "slopes")}
    return replace(both, **first)


def bare():
    return [
        ContrastExample(one.prompt, one.attributes, one.layouts, one.text)
        for one in asked(3).examples
    ]


def of_doubled():
    hooks = [("blocks.2.hook_out", lambda tensor, hook: 2 * tensor)]
    with tiny().hooks(fwd_hooks=hooks):
        head_logit_attribution(tiny(), asked())


def slopes(**settings):
    return attribution(tiny(), asked(3).examples, **settings)


GRADIENTS = {
    "gradients of a TransformersModel": (
        lambda: attribution(plain(), asked(3).examples),
        "TransformerBridge, and this is a TransformersModel; load",
    ),
    "gradients of no model": (
        lambda: attribution(object(), asked(3).examples),
        "a object is no model of TransformerLens",
        ModelError,
    ),
    "gradients in bfloat16": (
        lambda: attribution(load("tiny-gpt2", "bfloat16"), asked(3).examples),
        'bfloat16 .*float32, float64.*dtype="float32"',
    ),
    "gradients under predicting_only": (
        lambda: slopes(augmentation=Augmentation(alpha=1, phase="predicting_only")),
        "phase 'predicting_only'.*last_query",
    ),
    "gradients of an unknown metric": (
        lambda: slopes(metric="jz"),
        "unknown metric 'jz'; allowed: llr, js",
    ),
    "gradients of two metrics": (
        lambda: slopes(metric=dict.fromkeys("ab", lex)),
        "one metric at a time; found 2 metrics: a, b",
    ),
    "gradients of an argmax": (
        lambda: slopes(metric={"hit": lambda predictions: predictions.logits[0].argmax(2).float()}),
        "metric 'hit' has no gradient",
    ),
    "gradients of lex without words": (lambda: slopes(metric="lex"), "needs the words"),
    "gradients without a raw layout": (
        lambda: attribution(tiny(), bare(), metric="from_raw"),
        "an example has no raw layout.*other than from_raw",
    ),
    "recall of sets": (
        lambda: recall(over={"both": [[0, 0], [0, 1]]}),
        "single heads.*found 'both'",
    ),
    "recall of two metrics": (
        lambda: recall(over={"a": [[0, 1]]}, metric="lex"),
        "of metric 'js', the knock-outs of 'lex'",
    ),
    "recall of two sets of texts": (
        lambda: recall(2, over={"a": [[0, 1]]}),
        "of other texts",
    ),
    "recall of positions": (
        lambda: recall(units=[Unit({"l": 0, "h": 0, "p": 1}, ((0, 0),), (1,))]),
        "single heads; found '0.0.1'",
    ),
    "recall of more heads": (
        lambda: recall(of=shallow(), over={"a": [[0, 1]]}),
        r"head \(0, 1\); the attribution has layers 0-3, heads 0-0",
    ),
    "recall of no heads": (
        lambda: recall(over={"a": [[0, 1]]}, n=0),
        "n: .* or equal to 1, found 0",
        Lapa2Error,
    ),
    "direct attribution of a TransformersModel": (
        lambda: head_logit_attribution(plain(), examples_of(plain())),
        "heads write is read through hooks of a TransformerBridge",
    ),
    "direct attribution without words": (
        lambda: head_logit_attribution(tiny(), asked().examples),
        "give words",
    ),
    "direct attribution of another residual stream": (
        of_doubled,
        "residual stream .*would not sum",
    ),
}


# --- patching


def patched(*node, of=None, contrast=None, **settings):
    return patch(of or tiny(), contrast or asked(), *node, **settings)


def three_branches():
    return contrast_set(tiny(), prefixes={"a": "ab cd:", "b": "xy zw:", "c": "mn op:"})


def louder():
    with tiny().hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda x, hook: 1.5 * x)]):
        patched("head_to_logits")


ONE = {"together": {"x": [(0, 1)]}}
PATCHES = {
    "weights that are offloaded": (
        lambda: of_offloaded(patch, node="head_to_logits"),
        "from the weights themselves, and those of .* are offloaded; load the whole model",
        ModelError,
    ),
    "direct effects of weights that are offloaded": (
        lambda: of_offloaded(head_logit_attribution),
        "from the weights themselves, and those of .* are offloaded; load the whole model",
        ModelError,
    ),
    "weights that are offloaded by block": (
        lambda: offloaded(preload_module_classes=["LlamaDecoderLayer"]),
        "does not find the weight model.layers.0.* offloaded under another name; offload the",
        ModelError,
    ),
    "patching three branches": (
        lambda: patched(contrast=three_branches()),
        "between two branches; found a, b, c; give examples of two",
    ),
    "an unknown node": (
        lambda: patched("zz"),
        "unknown node 'zz'; allowed: prefix_kv, .*did you mean 'z'",
    ),
    "an unknown direction": (
        lambda: patched(direction="up"),
        "unknown direction 'up'; allowed: denoise, noise, both",
    ),
    "a metric of control": (
        lambda: patched(metric="js"),
        "unknown metric 'js'; allowed: favour, log_prob, or a function",
    ),
    "favour without words": (
        lambda: patched(contrast=asked().examples, metric="favour"),
        "favour needs the words",
    ),
    "a part of a node without parts": (
        lambda: patched("z", parts=("k",)),
        "node z has none, take prefix_kv or prefix_to_head",
    ),
    "slots of prefix_kv": (
        lambda: patched(slots=("prompt",)),
        "node prefix_kv takes no slots; z, pattern",
    ),
    "slots of head_to_logits": (
        lambda: patched("head_to_logits", slots=("prompt",)),
        "node head_to_logits takes no slots",
    ),
    "unknown slots": (
        lambda: patched("z", slots=("end",)),
        "unknown slots 'end'; allowed: prefix, bos",
    ),
    "an unknown part": (lambda: patched(parts=("q",)), "unknown part 'q'; allowed: k, v, kv"),
    "a negative batch": (
        lambda: patched(batch_size=-1),
        "batch_size: .* or equal to 1, found -1",
        Lapa2Error,
    ),
    "no part": (lambda: patched(parts=()), "no part; allowed"),
    "a KV head that is not there": (
        lambda: patched(together={"x": [(0, 4)]}),
        r"\(0, 4\) of 'x' does not exist; .* layers 0-3, kv_head 0-3",
    ),
    "slots by number": (
        lambda: patched("resid_pre", together={"x": [(0, 3)]}),
        r"slots prefix, bos",
    ),
    "slots beside sets": (
        lambda: patched("resid_pre", slots=["prompt"], together={"x": [(0, "last")]}),
        "found slots prompt beside them",
    ),
    "an empty set": (lambda: patched("z", together={"x": []}), "the set 'x' is empty"),
    "keep of another node": (
        lambda: patched("attn_out", keep={"x": []}),
        "keep is for nodes z and pattern; found node attn_out",
    ),
    "keep of an unknown set": (
        lambda: patched("z", keep={"y": [(1, 1)]}, **ONE),
        "unknown set of keep 'y'; allowed: x",
    ),
    "keep of a head that is not there": (
        lambda: patched("z", keep={"x": [(9, 1)]}, **ONE),
        r"\(9, 1\) of 'x' does not exist",
    ),
    "keep of what is patched": (
        lambda: patched("z", keep={"x": [(0, 1)]}, **ONE),
        r"'x' patches and keeps \(0, 1\)",
    ),
    "keep of what is patched, as in JSON": (
        lambda: patched("z", keep={"x": [[0, 1]]}, **ONE),
        r"'x' patches and keeps \(0, 1\)",
    ),
    "patching a TransformersModel": (
        lambda: patched("z", of=plain()),
        "hooks of a TransformerBridge.*TransformersModel; load it with",
    ),
    "a metric of one number for all steps": (
        lambda: patched(metric=lambda p, text: p.sum()[None], batch_size=999),
        r"shape \[1\] for 1 text of 5 steps",
    ),
    "a residual stream that is no sum": (
        louder,
        "head_to_logits needs a residual stream that is the sum",
    ),
}


# --- attention on the prefix, fading, selection


def at_mass(mass, **settings):
    few = contrast_set(tiny("tiny-llama"), n=3)
    rule = Augmentation(alpha=2, heads=((0, 1),))
    return alpha_at_prefix_attention(tiny("tiny-llama"), few, mass, rule, **settings)


def fading(**settings):
    short = {"filler": (4,), "tokens": 2}
    return measure_fading(load("planted"), "sentiment", **(short | settings))


def chosen(contrast="sentiment", **settings):
    return select(load("planted"), contrast, **({"score": "random"} | settings))


def same_prefixes():
    """Nothing to choose."""
    branches = {"one": "Very positive:", "two": "Very positive:"}
    tokenizer = load("planted").tokenizer
    texts = [
        ContrastExample.of(tokenizer, branches, f" {prompt}", " the a")
        for prompt in planted_set(4).prompts
    ]
    return select(load("planted"), texts)


def raw(method="air-decoding", **settings):
    return prompt_slope(load("planted"), "sentiment", method, **settings)


def raw_with_branch(**fields):
    """A method whose second branch is no plain pass over its prefix."""
    branches = Branch("base"), Branch("prefix", "Very positive:", **fields)
    with mock.patch.object(Preadd, "branches", return_value=branches):
        return raw("preadd")


FEW = "1 prompts are too few to decide by"
CHOICES = {
    "a goal of almost nothing": (
        lambda: at_mass(1e-9),
        r"without a bias .* is 0\.\d+ already; ask for more",
    ),
    **{
        f"a goal of {mass}": (
            lambda mass=mass: at_mass(mass),
            "goal: input should be (less|greater) than [01], found",
            Lapa2Error,
        )
        for mass in (float("nan"), -0.1, 2)
    },
    "a largest alpha of 0": (
        lambda: at_mass(0.5, max_alpha=0),
        "max_alpha: input should be greater than 0, found 0",
        Lapa2Error,
    ),
    "no filler": (lambda: fading(filler=()), "fading needs filler lengths above 1"),
    "filler of 0 tokens": (lambda: fading(filler=(0,)), "fading needs filler lengths above 1"),
    "fading in a head that is not there": (
        lambda: fading(heads={"x": ((9, 9),)}),
        "head .9, 9. of 'x' does not exist",
    ),
    "random sets of no size": (
        lambda: fading(random=2, heads={}),
        "random sets are as large as the first of `heads`",
    ),
    "a set called all heads": (
        lambda: fading(heads={"all heads": ((0, 0),)}),
        "'all heads' is there anyway",
    ),
    "a set called random 1": (
        lambda: fading(heads={"random 1": ((0, 0),)}, random=1),
        "'random 1' is there anyway",
    ),
    "a negative number of random sets": (
        lambda: fading(random=-1),
        "random: .* or equal to 0, found -1",
        Lapa2Error,
    ),
    "fading of two metrics": (
        lambda: fading(metric=["js", "kl"]),
        "one metric at a time; found 2 metrics: js, kl",
    ),
    "fading of no metric": (lambda: fading(metric={}), "unknown metric 'none'"),
    "fading in batches of 0": (
        lambda: fading(batch_size=0),
        "batch_size: .* or equal to 1, found 0",
        Lapa2Error,
    ),
    "fading into a folder": (lambda: fading(file="/"), "/ is a folder; give a file"),
    "fading from the raw model": (
        lambda: fading(metric="from_raw"),
        "compares with the raw model, which fades too; use js",
    ),
    "fading of short texts": (
        lambda: measure_fading(load("planted"), planted_set(10), filler=(64,)),
        "has 10 tokens; filler and scored tokens need 64",
    ),
    "an unknown score": (lambda: chosen(score="cat"), "unknown score 'cat'; allowed: cut"),
    "a negative number of heads": (
        lambda: chosen(heads=-1),
        "heads: .* or equal to 0, found -1",
        Lapa2Error,
    ),
    "a file of random heads": (
        lambda: chosen(file="cuts"),
        "finished knock-outs, and the score random makes none; leave out",
    ),
    "positions as a word": (
        lambda: chosen(positions="first"),
        "positions: takes 'all', 'auto', or positions from 0.* found 'first'",
    ),
    "positions behind the prefix": (
        lambda: chosen(positions=(7,)),
        "positions .7,. are not within a prefix of 3 tokens",
    ),
    "a choice by one prompt": (
        lambda: select(
            load("planted"), replace(planted_set(), examples=planted_set().examples[:1])
        ),
        "1 prompts are too few to choose by; give at least 8",
    ),
    "a file for all heads": (
        lambda: select(load("planted"), planted_set(), heads=0, file="cuts"),
        "all heads .0. are taken without any; leave out",
    ),
    "no head above 0": (
        same_prefixes,
        "no head has a cut score whose interval lies above 0",
    ),
    "no card": (lambda: Selection.load("none.json"), "cannot read .*none.json"),
    "a method without a raw branch": (
        lambda: raw("prefix"),
        "prefix has no raw branch with a switch pro_aug.* air-decoding",
    ),
    "another without": (
        lambda: raw("palette"),
        "palette has no raw branch with a switch pro_aug",
    ),
    **{
        f"a branch with {fields}": (
            lambda fields=fields: raw_with_branch(**fields),
            "branch 'prefix' of preadd hides its prefix, is a chat or lists layers",
        )
        for fields in ({"hidden": True}, {"layers": ()}, {"layers": (1,)})
    },
    "a decision by one prompt": (lambda: raw(prompts=["The lake"]), FEW),
    "a decision by one prompt eight times": (lambda: raw(prompts=["The lake"] * 8), FEW),
    "a decision by a text": (lambda: raw(prompts="The lake"), FEW),
    "a decision without heads": (
        lambda: raw(heads=()),
        "are none, or not all of this model; give .* up to .1, 3",
    ),
    "a decision by a negative head": (
        lambda: raw(heads=((-1, 0),)),
        "takes pairs of numbers from 0",
    ),
    "a decision without texts": (lambda: raw(texts={}), "texts has none for the prompt"),
    "a decision by texts of two lengths": (
        lambda: raw(prompts=PROMPTS, texts={prompt: [[3], [3, 4]] for prompt in PROMPTS}),
        "have .1, 2. tokens; those of a prompt need one length",
    ),
    "a decision from the raw model": (
        lambda: raw(metric="from_raw"),
        "which the bias changes; use js",
    ),
    "Pro-Aug without a task": (
        lambda: select(load("planted"), planted_set(2).examples, pro_aug="air-decoding"),
        "give select a task, or leave out pro_aug",
    ),
}
TABLES = (TEXTS, KNOCK_OUTS, CURVES, BIASES, GRADIENTS, PATCHES, CHOICES)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=name) for table in TABLES for name, row in table.items()],
)
def test_what_the_room_refuses(row, tmp_path, monkeypatch):
    call, message, error = (*row, CircuitError)[:3]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        call()
    assert not list(tmp_path.iterdir()), "nothing is written"
