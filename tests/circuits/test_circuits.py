"""Control score and knock-out: identities that hold in every model, the planted answer, statistics."""

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import TINY, load, soft_prefix
from scipy.stats import ttest_1samp

from lapa2_interp import Augmentation, Layout
from lapa2_interp.circuits import examples
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import control_score
from lapa2_interp.circuits.edits import Edit, edited_logits, unprefixed_logits
from lapa2_interp.circuits.examples import ContrastExample, attribute_words
from lapa2_interp.circuits.knockout import joint_curve, knock_out
from lapa2_interp.circuits.metrics import METRICS
from lapa2_interp.circuits.prefix_attention import prefix_attention_by_head
from lapa2_interp.circuits.result_store import ResultStore
from lapa2_interp.circuits.statistics import max_t, ranks, share_interval, spearman, split_half
from lapa2_interp.circuits.units import Unit, all_heads
from lapa2_interp.errors import CircuitError
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.planted import FILLERS, NEGATIVE, POSITIVE, answer_key

PAIR = {"plus": "ab cd:", "minus": "xy zw:"}
WORDS = ((70, 71, 72), (90, 91))
ALL = ("cut", "zero", "resample", "mean")


def examples_of(model, n=5, prompts=("efg hi", "jkl"), prefixes=PAIR):
    rng = np.random.default_rng(3)
    return [
        ContrastExample.of(model.tokenizer, prefixes, prompt, rng.integers(60, 120, n).tolist())
        for prompt in prompts
    ]


def contrast_set(model, **settings):
    return ContrastSet(tuple(examples_of(model, **settings)), WORDS)


def logits_of(model, examples, edit=None, **settings):
    return torch.stack(
        [edited_logits(model, [(example, edit)], **settings)[:, 0] for example in examples], dim=1
    )


def whole_pass(model, layout, text):
    """Logits of every step by one plain forward pass."""
    with torch.no_grad():
        return model(torch.tensor([[*layout.ids, *text[:-1]]]))[0, len(layout) - 1 :]


# --- forward passes


@pytest.mark.parametrize("model_class", ["TransformerBridge", "TransformersModel"])
def test_logits_are_those_of_the_plain_forward_pass(tiny, model_class):
    model = load(tiny, "float64", model_class)
    for example in examples_of(model):
        (by_branch,) = edited_logits(model, [(example, None)]).unbind(1)
        (raw,) = unprefixed_logits(model, [example])
        for logits, layout in zip((*by_branch, raw), (*example.layouts, example.raw), strict=True):
            # A plain transformers model computes its softmax in float32.
            precision = 1e-10 if model_class == "TransformerBridge" else 1e-5
            assert (logits - whole_pass(model, layout, example.text)).abs().max() < precision


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        *product(TINY, ("cut", "mean")),
        pytest.param("smollm2-135m", "cut", marks=pytest.mark.long),
    ],
)
def test_heads_that_do_not_see_the_prefix_leave_no_control(name, replacement):
    """What later queries know of a prefix comes through its keys and values alone."""
    model, settings = load(name), {}
    if name == "smollm2-135m":
        settings = {"prefixes": {"a": "Very positive:", "b": "Very negative:"}, "prompts": ("jkl",)}
    for example in examples_of(model, **settings):
        logits = logits_of(model, [example], Edit(all_heads(model), replacement))
        plain = logits_of(model, [example])
        assert (logits[0] - logits[1]).abs().max() < 1e-6 * max(1, plain.abs().max())
        assert (plain[0] - plain[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", [*TINY, pytest.param("smollm2-135m", marks=pytest.mark.slow)])
def test_all_keys_and_values_of_the_other_prefix_make_its_logits(name):
    model = load(name, "float64")
    prefixes = PAIR if name != "smollm2-135m" else {"a": "Very positive:", "b": "Very negative:"}
    edit = Edit(all_heads(model), "resample", branches="target")
    for example in examples_of(model, prefixes=prefixes):
        plain, edited = logits_of(model, [example]), logits_of(model, [example], edit)
        assert (edited[0] - plain[1]).abs().max() < 1e-12 * max(1, plain.abs().max())
        assert (edited[1] - plain[1]).abs().max() < 1e-12 * max(1, plain.abs().max())


def by_hand(model, example, heads, replacement, phase="after_span"):
    """One branch, in one pass of tiny-gpt2 with keys, queries and values in hand: no rotary angles,
    no grouped heads."""
    own, opposite = (
        torch.tensor([[*layout.ids, *example.text[:-1]]]) for layout in example.layouts[:2]
    )
    span = slice(*example.layouts[0].prefix)
    outputs = {}

    def keep(tensor, hook):
        outputs[hook.name] = tensor.clone()

    parts = [f"blocks.{i}.attn.{part}.hook_out" for i in range(4) for part in "kv"]
    with torch.no_grad(), model.hooks(fwd_hooks=[(name, keep) for name in parts]):
        model(opposite)
    other_of, state = dict(outputs), {}

    def of(name):
        theirs = other_of[name][0, span]  # key head d_head
        ours = state[name][0, span]
        return theirs if replacement == "resample" else (theirs + ours) / 2

    first = {"after_span": span.stop, "last_query": len(example.layouts[0]) - 1}[phase]

    def remember(tensor, hook):
        state[hook.name] = tensor.clone()

    def output(z, hook):
        layer = int(hook.name.split(".")[1])
        z = z.clone()
        q, k, v = (state[f"blocks.{layer}.attn.{part}.hook_out"][0] for part in "qkv")
        for head in [h for i, h in heads if i == layer]:
            keys, values = k[:, head].clone(), v[:, head].clone()
            if replacement == "zero":
                values[span] = 0
            else:
                keys[span] = of(f"blocks.{layer}.attn.k.hook_out")[:, head]
                values[span] = of(f"blocks.{layer}.attn.v.hook_out")[:, head]
            for query in range(first, z.shape[1]):
                scores = keys[: query + 1] @ q[query, head] / math.sqrt(q.shape[-1])
                z[0, query, head] = scores.softmax(0) @ values[: query + 1]
        return z

    hooks = [(f"blocks.{i}.attn.{part}.hook_out", remember) for i in range(4) for part in "qkv"]
    hooks += [(f"blocks.{i}.attn.o.hook_in", output) for i in range(4)]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        return model(own)[0, len(example.layouts[0]) - 1 :]


@pytest.mark.parametrize("replacement", ["zero", "resample", "mean"])
@pytest.mark.parametrize("heads", [((1, 2),), ((0, 0), (0, 3), (2, 1), (3, 3))])
@pytest.mark.parametrize("phase", ["after_span", "last_query"])
def test_replacements_are_what_they_say(replacement, heads, phase):
    model = load("tiny-gpt2", "float64")
    for example in examples_of(model):
        logits = logits_of(model, [example], Edit(heads, replacement, phase))[0, 0]
        assert (logits - by_hand(model, example, heads, replacement, phase)).abs().max() < 1e-9
        assert (logits - logits_of(model, [example])[0, 0]).abs().max() > 1e-4


@pytest.mark.parametrize("replacement", ALL)
@pytest.mark.parametrize("phase", ["after_span", "last_query", "decode", "predicting_only"])
def test_with_and_without_hooks_the_same(tiny, replacement, phase):
    model, plain = load(tiny, "float64"), load(tiny, "float64", "TransformersModel")
    edit = Edit(((0, 1), (2, 2), (2, 3)), replacement, phase, positions=(1, 3))
    examples = examples_of(model)
    assert (
        logits_of(model, examples[:1], edit) - logits_of(plain, examples[:1], edit)
    ).abs().max() < 1e-9


@pytest.mark.parametrize("replacement", ALL)
def test_phase_query_is_each_step_by_itself(tiny, replacement):
    """A step under phase predicting_only is the last step of that shorter text, whose other queries are
    clean."""
    model = load(tiny, "float64")
    example = examples_of(model, n=3)[0]
    edit = Edit(((1, 0), (2, 3)), replacement, "predicting_only")
    total = logits_of(model, [example], edit)[:, 0]
    for t in range(example.n_steps):
        short = ContrastExample(
            example.prompt,
            example.attributes,
            example.layouts,
            example.text[: t + 1],
            example.source,
            example.raw,
        )
        assert (logits_of(model, [short], edit)[:, 0, -1] - total[:, t]).abs().max() < 1e-10
    last = logits_of(model, [example], Edit(edit.heads, replacement, "last_query"))[:, 0]
    assert (last[:, 0] - total[:, 0]).abs().max() < 1e-10
    assert (last[:, 1:] - total[:, 1:]).abs().max() > 1e-6


@pytest.mark.parametrize("model_class", ["TransformerBridge", "TransformersModel"])
@pytest.mark.parametrize("replacement", ["cut", "zero"])
def test_under_phase_query_a_span_may_end_with_the_prompt(replacement, model_class):
    """The prompt before its last token is read before that key exists. The first step is that of
    phase last_query, whatever acts."""
    model = load("tiny-llama", "float64", model_class)
    example = examples_of(model, n=2)[0]
    heads = ((1, 0), (2, 3))
    early = Augmentation(alpha=0.7, phase="after_span")
    for phase in ("predicting_only", "last_query"):
        rule = (Augmentation(alpha=0.5, span="input", phase=phase), early)
        total, last = (
            logits_of(model, [example], Edit(heads, replacement, phase), augmentation=rule)[:, 0]
            for phase in ("predicting_only", "last_query")
        )
        assert (last[:, 0] - total[:, 0]).abs().max() < 1e-10
        lone = logits_of(
            model, [example], Edit(heads, replacement, "predicting_only"), augmentation=rule[0]
        )[:, 0]
        assert (lone[:, 0] - total[:, 0]).abs().max() > 1e-6


def test_hooks_of_a_user_stay_live():
    model = load("tiny-llama")
    example = examples_of(model)[0]

    def double(z, hook):
        return 2 * z

    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", double)]):
        expected = whole_pass(model, example.layouts[0], example.text)
        logits = logits_of(model, [example])[0, 0]
    assert (logits - expected).abs().max() < 1e-5
    assert (logits - logits_of(model, [example])[0, 0]).abs().max() > 1e-3


def test_soft_prefixes_of_any_two_texts():
    model = load("tiny-llama")
    soft = [soft_prefix(model, seed=seed) for seed in (0, 1)]
    layouts = tuple(Layout.of(model.tokenizer, None, "efg", soft=5) for _ in soft)
    example = ContrastExample("efg", ("a", "b"), layouts, (70, 80, 90), prefixes=tuple(soft))
    plain = logits_of(model, [example])[:, 0]
    assert (plain[0] - plain[1]).abs().max() > 1e-3
    for replacement in ("cut", "mean"):
        edited = logits_of(model, [example], Edit(all_heads(model), replacement))[:, 0]
        assert (edited[0] - edited[1]).abs().max() < 1e-5
    swapped = Edit(all_heads(model), "resample", branches="target")
    assert (logits_of(model, [example], swapped)[0, 0] - plain[1]).abs().max() < 1e-5


# --- control


def test_metrics_by_their_definitions(tiny):
    model = load(tiny, "float64")
    asked = contrast_set(model)
    score = control_score(model, asked)
    for i, example in enumerate(asked.examples):
        p, q, raw = (
            whole_pass(model, layout, example.text).log_softmax(-1)
            for layout in (*example.layouts, example.raw)
        )
        tokens = torch.tensor(example.text)[:, None]
        expected = {
            "llr": (p - q).gather(1, tokens)[:, 0],
            "kl": (p.exp() * (p - q)).sum(1),
            "js": divergence(p, q),
            "from_raw": (divergence(p, raw) + divergence(q, raw)) / 2,
            "lex": favour(p) - favour(q),
        }
        for name, values in expected.items():
            assert np.abs(score.values[name][i] - values.numpy()).max() < 1e-10
    assert score.values["js"].max() <= math.log(2)


def divergence(p, q):
    mean = ((p.exp() + q.exp()) / 2).log()
    return ((p.exp() * (p - mean)).sum(1) + (q.exp() * (q - mean)).sum(1)) / 2


def favour(log_probs):
    plus, minus = WORDS
    return log_probs[:, plus].exp().sum(1).log() - log_probs[:, minus].exp().sum(1).log()


def test_swapping_the_branches_negates_llr_and_lex(tiny):
    model = load(tiny, "float64")
    asked = contrast_set(model)
    turned = ContrastSet(tuple(example.swapped() for example in asked.examples), asked.words)
    one, swapped = control_score(model, asked).values, control_score(model, turned).values
    for name, sign in {"llr": -1, "lex": -1, "js": 1, "from_raw": 1}.items():
        assert np.abs(one[name] - sign * swapped[name]).max() < 1e-12


def test_equal_prefixes_have_exactly_no_control(tiny):
    model = load(tiny)
    examples = examples_of(model, prefixes={"a": "ab cd:", "b": "ab cd:"})
    score = control_score(model, ContrastSet(tuple(examples), WORDS))
    assert all(not score.values[name].any() for name in ("llr", "lex", "js", "kl"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n", [3, 9])
def test_shares_of_no_control_are_not_numbers(n):
    for bound in share_interval(np.zeros((n, 2)), np.zeros(n)):
        assert np.isnan(bound).all()
    model = load("tiny-llama")
    same = {"plus": "ab cd:", "minus": "ab cd:"}
    table = knock_out(
        model, examples_of(model, prefixes=same), over="layer", metric="js", other_metrics=()
    )
    assert table.frame()["share"].isna().all()


def test_sums_of_llr_are_differences_of_likelihoods(tiny):
    """Against a plain pass: a text's likelihood behind one prefix and the other."""

    model = load(tiny, "float64")
    for example in examples_of(model):
        score = control_score(model, [example], metrics=("llr",)).values["llr"].sum()
        scores = []
        for layout in example.layouts:
            ids = torch.tensor([[*layout.ids, *example.text]])
            with torch.no_grad():
                log_probs = model(ids)[0].log_softmax(-1)
            at = range(len(layout) - 1, ids.shape[1] - 1)
            scores.append(sum(log_probs[i, ids[0, i + 1]].item() for i in at))
        assert score == pytest.approx(scores[0] - scores[1], abs=1e-9)


def test_batches_and_order_change_nothing(tiny):
    model = load(tiny)
    examples = examples_of(model, prompts=("efg hi", "jkl", "mn", "opq rs", "tuv"))
    together = control_score(model, examples, batch_size=8).values["js"]
    alone = control_score(model, examples, batch_size=1).values["js"]
    backwards = control_score(model, examples[::-1], batch_size=3).values["js"][::-1]
    assert np.abs(together - alone).max() < 1e-6
    assert np.abs(together - backwards).max() < 1e-6


def test_more_than_two_attributes():
    """One against the mean of the others; js is that of all of them."""
    model = load("tiny-gpt2", "float64")
    prefixes = {"a": "ab cd:", "b": "xy zw:", "c": "mn op:"}
    examples = examples_of(model, prefixes=prefixes)
    score = control_score(model, examples, metrics=("js", "kl", "llr"))
    for i, example in enumerate(examples):
        p, q, r = (
            whole_pass(model, layout, example.text).log_softmax(-1).exp()
            for layout in example.layouts
        )
        rest, mean = (q + r) / 2, (p + q + r) / 3
        kl = (p * (p / rest).log()).sum(1)
        js = sum((probs * (probs / mean).log()).sum(1) for probs in (p, q, r)) / 3
        assert np.abs(score.values["kl"][i] - kl.numpy()).max() < 1e-10
        assert np.abs(score.values["js"][i] - js.numpy()).max() < 1e-10
    assert score.values["js"].max() <= math.log(3)


def test_a_metric_of_ones_own_and_a_task_by_name():
    model = load("planted")
    score = control_score(
        model,
        ContrastSet.of(model, "sentiment", prompts=["The lake", "The book"], tokens=4, samples=2),
        metrics={
            "top": lambda predictions: (predictions.logits[0] - predictions.logits[1]).amax(2)
        },
    )
    frame = score.frame()
    assert list(frame) == ["prompt", "source", "example", "step", "l_kv", "top"]
    assert len(frame) == 2 * 2 * 4
    assert frame["l_kv"].tolist()[:4] == [6, 7, 8, 9]
    assert set(score.interval("top", group_by="source")["source"]) == {"raw"}
    assert score.plot()._repr_png_()[:4] == b"\x89PNG"
    # Texts written behind a prefix say so.
    behind = ContrastSet.of(model, "sentiment", prompts=["The lake"], source="positive", tokens=4)
    assert behind.examples[0].source == "positive"


# --- knock-out on the planted model


def planted_contrast_set(model, name, n, prompts=None, seed=0):
    words = attribute_words(model.tokenizer, "sentiment", ("positive", "negative"))
    vocabulary = model.tokenizer.get_vocab()
    known = [vocabulary[word] for word in (*POSITIVE, *NEGATIVE, *FILLERS)]
    rng = np.random.default_rng(seed)
    texts = {
        prompt: [rng.choice(known, n).tolist()]
        for prompt in prompts or ("The lake", "The book", "Once upon a time")
    }
    examples = ContrastSet.of(model, "sentiment", prompts=list(texts), texts=texts).examples
    return ContrastSet(tuple(examples), tuple(words.values()))


def expected_effects(key, contrast_set, role):
    """The closed form of a cut, by example: its mean over steps."""
    measured = []
    for example in contrast_set.examples:
        layout = example.layouts[0]
        steps = [
            key.effect(role, len(layout) + t, layout.l_pro, asking=t == 0)
            for t in range(example.n_steps)
        ]
        measured.append(np.mean(steps))
    return np.array(measured)


@pytest.mark.parametrize(
    ("n", "prompts"), [(8, ("The lake", "Once upon a time")), (200, ("The lake",))]
)
@pytest.mark.parametrize(
    "name", ["planted", "planted-gpt2:3", "planted-spread:1", "planted-backup"]
)
def test_planted_effects_are_the_closed_form(name, n, prompts):
    model, key = load(name), answer_key(name)
    asked = planted_contrast_set(model, name, n, prompts=prompts)
    table = knock_out(model, asked, metric="lex", other_metrics=())
    places = {unit.heads[0]: i for i, unit in enumerate(table.units)}
    for role, head in key.heads.items():
        effects = table.values[:, places.pop(head)]
        assert np.abs(effects - expected_effects(key, asked, role)).max() < 2e-5
    for idle in places.values():  # idle heads
        assert np.abs(table.values[:, idle]).max() < 1e-5


@pytest.mark.parametrize("replacement", ALL)
def test_the_planted_order_is_found_whatever_the_replacement(replacement):
    """And never by attention mass: the decoy has most of it."""
    model, key = load("planted"), answer_key("planted")
    asked = planted_contrast_set(model, "planted", 24)
    table = knock_out(model, asked, replacement=replacement, metric="lex", other_metrics=["js"])
    best = table.best(8)
    assert best[:2] == (key.heads["carrier"], key.heads["relay"])
    assert best[-1] == key.heads["suppressor"]
    assert table.with_metric("js").best(1) == best[:1]
    mass = prefix_attention_by_head(model, asked)
    assert np.unravel_index(mass.argmax(), mass.shape) == key.heads["decoy"]
    places = {unit.heads[0]: i for i, unit in enumerate(table.units)}
    assert np.abs(table.values[:, places[key.heads["decoy"]]]).max() < 1e-5


def test_phases_are_part_of_the_key():
    """The relay acts at the prompt's last token: a sweep over generated tokens would not see it."""
    model, key = load("planted"), answer_key("planted")
    asked = planted_contrast_set(model, "planted", 12)
    lost = {
        phase: knock_out(
            model,
            asked,
            over={"relay": [key.heads["relay"]]},
            phase=phase,
            metric="lex",
            other_metrics=(),
        ).values.mean()
        for phase in ("after_span", "last_query", "decode", "predicting_only")
    }
    assert lost["after_span"] == pytest.approx(lost["last_query"])
    assert lost["after_span"] > 0.5
    assert abs(lost["decode"]) < 1e-6
    # At the step that the relay's own query predicts, what it leaves is read at once.
    one = knock_out(
        model, planted_contrast_set(model, "planted", 1), over={"relay": [key.heads["relay"]]},
        phase="predicting_only", metric="lex", other_metrics=(),
    )  # fmt: skip
    assert lost["predicting_only"] * 12 == pytest.approx(one.values.mean(), rel=0.2)


def test_layers_cells_positions_and_sets():
    model, key = load("planted"), answer_key("planted")
    asked = planted_contrast_set(model, "planted", 12)
    tables = {
        over: knock_out(model, asked, over=over, metric="lex", other_metrics=())
        for over in ("layer", "kv", "position", "head x position")
    }
    assert tables["layer"].frame()["layer"].tolist() == [1, 0]
    cell = tables["kv"].frame().iloc[0]
    layer, head = key.heads["carrier"]
    assert (cell["layer"], cell["kv_head"]) == (layer, head // 2)
    assert tables["kv"].map().shape == (2, 2)
    assert tables["position"].frame()["position"].tolist()[0] == 1  # " positive"
    best = tables["head x position"].frame().iloc[0]
    assert (best["layer"], best["head"], best["position"]) == (layer, head, 1)
    both = knock_out(
        model, asked, over={"both": [key.heads["carrier"], key.heads["relay"]]}, metric="lex"
    )
    assert both.frame()["effect"][0] > tables["layer"].frame()["effect"][1]
    for table in (*tables.values(), both):
        assert table.plot()._repr_png_()[:4] == b"\x89PNG"


def test_self_repair_hides_a_head_that_a_joint_cut_shows():
    model, key = load("planted-backup"), answer_key("planted-backup")
    asked = planted_contrast_set(model, "planted-backup", 24)
    carrier, backup = key.heads["carrier"], key.heads["backup"]
    sets = {"carrier": [carrier], "backup": [backup], "both": [carrier, backup]}
    table = knock_out(model, asked, over=sets, metric="lex", other_metrics=())
    alone, hidden, both = table.values.mean(0)
    assert both > 1.2 * (alone + hidden)
    assert abs(hidden) < 0.05 * both


def test_joint_curves_of_the_planted_model():
    model, key = load("planted"), answer_key("planted")
    asked = planted_contrast_set(
        model, "planted", 12, prompts=("The lake", "The book", "The city", "The road")
    )
    table = knock_out(model, asked, metric="lex")
    curve = joint_curve(
        model, table, sizes=(1, 2), prefix_attention=prefix_attention_by_head(model, asked)
    )
    left = curve.frame().set_index(["kind", "heads"])["left"]
    assert left["without", 2] < 0.1 < left["without", 1] < 0.6
    assert left["only", 2] > 0.95
    assert left["mass", 1] == pytest.approx(1, abs=1e-4)
    assert left["random", 1] > left["without", 1]
    assert curve.plot()._repr_png_()[:4] == b"\x89PNG"
    assert key.heads["carrier"] == table.best(1)[0]


def test_a_joint_curve_asks_what_the_table_asked():
    """Sizes that a table of few heads does not have are left out; the rest is the table's."""
    model, pairs = load("planted"), answer_key("planted").heads
    asked = planted_contrast_set(model, "planted", 6, prompts=("The lake", "The book"))
    units = [
        Unit({"layer": i, "head": j}, ((i, j),)) for i, j in (pairs["carrier"], pairs["relay"])
    ]
    rule = Augmentation(alpha=0.5)
    table = knock_out(
        model,
        asked,
        units=units,
        replacement="zero",
        phase="last_query",
        metric="js",
        augmentation=rule,
    )
    curve = joint_curve(model, table, sizes=(1, 2, 4))
    assert (curve.metric, set(curve.frame()["heads"])) == ("lex", {1, 2})
    both = {"both": [unit.heads[0] for unit in units]}
    alike = knock_out(
        model,
        asked,
        over=both,
        replacement="zero",
        phase="last_query",
        metric="lex",
        augmentation=rule,
    )
    left = curve.frame().set_index(["kind", "heads"])["left"]["without", 2]
    assert left == pytest.approx(1 - alike.values.sum() / alike.total.sum(), abs=1e-6)


def test_units_and_batches_change_nothing():
    model = load("tiny-llama")
    asked = contrast_set(model)
    table = knock_out(model, asked, batch_size=7)
    again = knock_out(model, asked, units=table.units[::-1], batch_size=1)
    assert np.abs(table.values - again.values[:, ::-1]).max() < 1e-6
    assert table.noise < 1e-5


def test_one_branch_at_a_time_is_averaged():
    """In a model that adds up, resampling one branch loses D - a, both at once D - 2a."""
    model = load("tiny-llama", "float64")
    example = examples_of(model)[0]
    asked = ContrastSet((example,), WORDS)
    table = knock_out(
        model, asked, over={"x": [[1, 0], [2, 1]]}, replacement="resample", metric="lex"
    )
    control = control_score(model, asked).values["lex"].mean()
    parts = []
    for branches in ("target", "others"):
        logits = edited_logits(
            model, [(example, Edit(((1, 0), (2, 1)), "resample", branches=branches))]
        )
        log_probs = logits[:, 0].log_softmax(-1)
        parts.append((favour(log_probs[0]) - favour(log_probs[1])).mean().item())
    assert table.values[0, 0] == pytest.approx(control - np.mean(parts), abs=1e-10)


def test_units_that_knock_out_the_same_are_read_once_and_kept_once(tmp_path, monkeypatch):
    """As the best head is the one with most attention; a sweep that goes on knows the model by both."""
    from lapa2_interp.circuits import knockout

    model, file = load("tiny-gpt2"), tmp_path / "heads.jsonl"
    asked, real, seen = contrast_set(model), knockout.evaluate_edits, []
    one, second = ((0, 0),), ((1, 1), (0, 1))
    named = {"best": one, "largest": one, "random": second, "again": one, "last": second}
    units = [Unit({"name": name}, heads) for name, heads in named.items()]

    def counts(model, contrast_set, edits, *rest):
        seen.append(len(edits))
        return real(model, contrast_set, edits, *rest)

    monkeypatch.setattr(knockout, "evaluate_edits", counts)
    values = [knock_out(model, asked, units=units, file=file).values for _ in range(2)]
    assert seen == [4, 3], "the control, nothing, two units; the control and both units"
    assert np.array_equal(*values)
    apart = [knock_out(model, asked, units=[unit]).values for unit in units]
    assert np.array_equal(values[0], np.concatenate(apart, axis=1))
    assert len(file.read_text().splitlines()) == 5


def test_a_store_is_filled_by_one_process_at_a_time(tmp_path):
    """And a line that is no unit's is damage."""
    file = tmp_path / "units.jsonl"
    inputs = load("tiny-llama"), contrast_set(load("tiny-llama"))
    store = ResultStore(file, *inputs)
    store.add("a", {"js": np.arange(3.0)})
    with pytest.raises(CircuitError, match="units.jsonl is being filled by another process; wait"):
        ResultStore(file, *inputs)
    store.add("b", {"js": np.arange(3.0)})
    store.close()
    file.write_text(file.read_text() + "{}\n[]\n")
    again = ResultStore(file, *inputs)
    again.close()
    assert list(again.results) == ["a", "b"]
    assert len(file.read_text().splitlines()) == 3


def test_a_stopped_sweep_goes_on(tmp_path, monkeypatch, capsys):
    from lapa2_interp.circuits import knockout

    model, file = load("tiny-gpt2"), tmp_path / "heads.jsonl"
    asked = contrast_set(model)
    fresh = knock_out(model, asked)
    real, seen = knockout.evaluate_edits, []

    def stops(*arguments):
        for n, result in enumerate(real(*arguments)):
            if len(seen) == 0 and n == 9:
                raise KeyboardInterrupt
            yield result

    monkeypatch.setattr(knockout, "evaluate_edits", stops)
    with pytest.raises(KeyboardInterrupt):
        knock_out(model, asked, file=file, batch_size=1)
    lines = file.read_text().splitlines()
    assert 1 < len(lines) < len(fresh.units)
    file.write_text("\n".join(lines)[:-30])  # a line cut short

    def counts(model, contrast_set, edits, *rest):
        seen.append(len(edits))
        return real(model, contrast_set, edits, *rest)

    monkeypatch.setattr(knockout, "evaluate_edits", counts)
    measured = knock_out(model, asked, file=file)
    assert np.array_equal(measured.values, fresh.values)
    knock_out(model, asked, file=file)
    # The control itself is always read again, and so are two units.
    n_kept = max(0, len(lines) - 4)
    assert seen == [len(fresh.units) + 3 - (len(lines) - 2) + min(2, n_kept), 3]
    with pytest.raises(CircuitError, match="results of another replacement: .*cut.*, not .*zero"):
        knock_out(model, asked, replacement="zero", file=file)
    lines = file.read_text().splitlines()
    lines[5] = lines[5].replace("[", "(")
    file.write_text("\n".join(lines) + "\n")
    assert np.array_equal(knock_out(model, asked, file=file).values, fresh.values)
    assert seen[2:] == [4], "the damaged unit, two others, and the control itself"
    assert f"{file}: line 6 is damaged and made again" in capsys.readouterr().err
    file.write_text("{}")
    with pytest.raises(CircuitError, match="first line is damaged; give another file"):
        knock_out(model, asked, file=file)


def test_a_file_of_another_metric_model_or_prefix_is_refused(tmp_path):
    """Names and lengths may be equal: hooks, functions and soft prefixes differ by what they do."""
    model = load("tiny-llama")
    asked = contrast_set(model)
    file = tmp_path / "units.jsonl"

    def mine(predictions):
        return (predictions.logits[0] - predictions.logits[1]).abs().amax(2)

    knock_out(model, asked, over="layer", metric={"mine": mine}, file=file)
    with pytest.raises(CircuitError, match="another model or metric: mine was"):
        knock_out(model, asked, over="layer", metric={"mine": lambda x: 2 * mine(x)}, file=file)
    hooks = [("blocks.1.attn.hook_z", lambda z, hook: 3 * z)]
    with model.hooks(fwd_hooks=hooks), pytest.raises(CircuitError, match="another model or metric"):
        knock_out(model, asked, over="layer", metric={"mine": mine}, file=file)
    layouts = tuple(Layout.of(model.tokenizer, None, "efg", soft=5) for _ in range(2))
    one, another = (
        ContrastExample(
            "efg", ("plus", "minus"), layouts, (70, 80),
            prefixes=tuple(soft_prefix(model, seed=seed + i) for i in range(2)),
        )
        for seed in (0, 2)
    )  # fmt: skip
    knock_out(model, one, over="layer", file=tmp_path / "soft.jsonl")
    with pytest.raises(CircuitError, match="has results of another inputs"):
        knock_out(model, another, over="layer", file=tmp_path / "soft.jsonl")


def test_a_hook_that_hardly_moves_the_control_is_known_by_a_unit(tmp_path):
    """Without one head the planted model has the control it had, but other effects."""
    model, file = load("planted"), tmp_path / "units"
    asked = planted_contrast_set(model, "planted", 12, prompts=("The lake", "The book"))

    def silent(z, hook):
        z = z.clone()
        z[:, :, 0] = 0
        return z

    resumed = knock_out(model, asked, metric="js", other_metrics=(), file=file)
    same = knock_out(model, asked, metric="js", other_metrics=(), file=file, batch_size=1)
    assert np.array_equal(resumed.values, same.values)
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", silent)]):
        fresh = knock_out(model, asked, metric="js", other_metrics=())
        assert np.abs(fresh.total - resumed.total).max() < 0.01 * resumed.total.max()
        with pytest.raises(CircuitError, match="another model or metric: js without .* was"):
            knock_out(model, asked, metric="js", other_metrics=(), file=file)


def test_a_function_a_name_or_one_case_is_enough():
    model = load("tiny-llama")
    example = examples_of(model)[0]

    def mine(predictions):
        return predictions.logits[0].amax(2)

    assert set(control_score(model, example, metrics=mine).values) == {"mine"}
    assert set(control_score(model, example, metrics="js").values) == {"js"}
    assert knock_out(model, example, over="layer", metric=mine).metric == "mine"
    words = dict(zip(PAIR, WORDS, strict=True))
    named = control_score(
        model, ContrastSet.of_examples(example, words=dict(reversed(words.items()))), metrics="lex"
    )
    expected = control_score(model, ContrastSet((example,), WORDS), metrics="lex")
    assert (named.values["lex"] == expected.values["lex"]).all()


def test_texts_behind_a_prefix_are_behind_the_one_that_is_asked_about(monkeypatch):
    """Also where soft prefixes are the task's default."""
    seen = []
    real = examples.plan_batches
    monkeypatch.setattr(
        examples, "plan_batches", lambda model, cell: (seen.append(cell), real(model, cell))[1]
    )
    model = load("tiny-llama")
    examples.write_texts(model, load_task("topic"), "world", ["The lake"], tokens=2)
    assert (seen[0].method, seen[0].attribute) == ("prefix", "world")
    assert seen[0].parameters["prefixes"] == "hard"


def test_prompts_in_other_letters_or_white_space_are_one_prompt():
    """Their examples are resampled together, so that they add no certainty."""
    model = load("tiny-llama")
    examples = examples_of(model, prompts=("The lake", "the  LAKE", "jkl"))
    asked = ContrastSet(tuple(examples), WORDS)
    assert (asked.n_prompts, len(set(asked.clusters[:2]))) == (2, 1)
    assert len(set(asked.prompts)) == 3


def test_few_prompts_give_numbers_and_no_claims():
    model = load("planted")
    table = knock_out(model, planted_contrast_set(model, "planted", 6), metric="lex")
    frame = table.frame()
    assert frame["p"].isna().all()
    assert frame["effect"].notna().all()
    with pytest.raises(CircuitError, match="3 prompts are too few"):
        table.carriers()


def test_in_bfloat16_what_is_noise_is_marked():
    model = load("tiny-llama", "bfloat16")
    table = knock_out(model, contrast_set(model, prompts=("efg hi", "jkl", "mn")), metric="js")
    exact = knock_out(
        load("tiny-llama"), contrast_set(load("tiny-llama"), prompts=("efg hi", "jkl", "mn"))
    )
    assert table.noise > 10 * exact.noise
    frame = table.frame()
    own = frame["effect"].abs() <= table.noise
    assert (frame["below_noise"] == own).all()
    assert own.any()
    assert not exact.frame()["below_noise"].all()


# --- statistics


def brute_force(values):
    n = len(values)

    def t(flipped):
        return np.abs(flipped.mean(0) / (flipped.std(0, ddof=1) / math.sqrt(n)))

    observed = t(values)
    flips = [t(values * np.array(signs)[:, None]) for signs in product((1, -1), repeat=n)]
    alone = np.mean([flip >= observed - 1e-9 for flip in flips], axis=0)
    largest = np.mean([flip.max() >= observed - 1e-9 for flip in flips], axis=0)
    return alone, largest


def test_max_t_is_the_definition():
    values = np.random.default_rng(0).normal(0.5, 1, size=(8, 5))
    tests, (alone, largest) = max_t(values), brute_force(values)
    assert tests.p == pytest.approx(alone)
    assert tests.p_max == pytest.approx(largest)
    assert (tests.p_max >= tests.p).all()
    assert tests.t == pytest.approx(ttest_1samp(values, 0).statistic)
    order = np.argsort(tests.p)
    ranked = tests.p[order] * 5 / np.arange(1, 6)  # Benjamini and Hochberg, by hand
    assert tests.q[order] == pytest.approx(np.minimum.accumulate(ranked[::-1])[::-1].clip(max=1))


def test_many_prompts_use_random_signs():
    values = np.random.default_rng(1).normal(0.6, 1, size=(24, 4))
    tests = max_t(values)
    assert 1 / 100_001 <= tests.p.min() < 0.05
    exact = max_t(values[:16])
    assert exact.p.min() >= 2 / 2**16


def test_the_family_wise_level_holds():
    """200 maps of 30 units without any effect: a head is found in at most 18 of them (5 %, and two
    standard errors)."""
    rng, n_false = np.random.default_rng(2), 0
    for _ in range(200):
        shared = rng.normal(size=(10, 1))
        n_false += max_t(shared + rng.normal(size=(10, 30))).p_max.min() < 0.05
    assert n_false <= 18


def test_random_labels_select_no_head():
    """Branches swapped by prompt at random leave lex without a direction: at most 18 of 200 such
    labellings select any head. js does not see a swap."""
    model = load("planted")
    prompts = [
        f"The {word}"
        for word in ("lake", "book", "city", "road", "horse", "movie", "pizza", "country")
    ]
    asked = planted_contrast_set(model, "planted", 4, prompts=prompts)
    table = knock_out(model, asked, metric="lex", other_metrics=())
    rng, selected = np.random.default_rng(0), 0
    assert table.carriers()[["layer", "head"]].to_numpy().tolist()
    for _ in range(200):
        signs = rng.choice([-1, 1], len(prompts))
        selected += bool((max_t(table.values * signs[:, None]).p_max < 0.05).any())
    assert selected <= 18


def test_swapping_a_case_swaps_its_effect():
    """What the labelling test relies on: swapped branches negate an example's lex effects exactly."""
    model = load("tiny-gpt2", "float64")
    asked = contrast_set(model)
    turned = ContrastSet(tuple(example.swapped() for example in asked.examples), asked.words)
    one, swapped = (
        knock_out(model, texts, metric="lex", other_metrics=()) for texts in (asked, turned)
    )
    assert np.abs(one.values + swapped.values).max() < 1e-10


def test_ranks_shares_and_halves():
    rng = np.random.default_rng(4)
    truth = np.arange(20.0)
    clear = truth + rng.normal(0, 0.1, size=(12, 20))
    noisy = rng.normal(size=(12, 20))
    assert ranks(clear).rank.tolist() == list(range(20, 0, -1))
    assert (ranks(clear).high - ranks(clear).low).max() <= 2
    assert (ranks(noisy).high - ranks(noisy).low).mean() > 8
    assert split_half(clear) > 0.99
    assert abs(split_half(noisy)) < 0.5
    total = clear.sum(1)
    share, low, high = share_interval(clear, total)
    assert share.sum() == pytest.approx(1)
    assert ((low <= share) & (share <= high)).all()
    assert math.isnan(split_half(clear[:3]))
    constant = max_t(np.zeros((9, 3)))
    assert constant.p_max.tolist() == [1, 1, 1]
    assert constant.t.tolist() == [0, 0, 0]
    tied = ranks(np.array([[5.0, 1, 1, 0, 0]] * 9))
    assert tied.rank.tolist() == tied.low.tolist() == tied.high.tolist() == [1, 2, 2, 4, 4]
    assert math.isnan(spearman(np.zeros(4), np.arange(4.0)))
    assert pd.notna(share).all()


def test_an_augmentation_of_the_user_is_part_of_the_forward_pass():
    model = load("tiny-llama", "float64")
    rule = Augmentation(alpha=1.0)
    asked = contrast_set(model)
    plain, boosted = control_score(model, asked), control_score(model, asked, augmentation=rule)
    assert np.abs(plain.values["js"] - boosted.values["js"]).max() > 1e-6
    table = knock_out(model, asked, over="layer", augmentation=rule, metric="js", other_metrics=())
    assert np.allclose(table.total, boosted.values["js"].mean(1))


def test_a_file_of_knock_outs_knows_units_by_their_heads(tmp_path):
    """Head 0.1 is not KV head 0.1, and a set of heads is not another set of the same name."""
    model, file = load("tiny-llama"), tmp_path / "kept"
    asked = contrast_set(model, n=2, prompts=("jkl",))
    for over in ("head", "kv", "layer", "position", {"best": [[1, 2]]}, {"best": [[0, 1]]}):
        resumed, fresh = (
            knock_out(model, asked, over=over, metric="lex", other_metrics=(), file=store)
            for store in (file, None)
        )
        np.testing.assert_allclose(resumed.values, fresh.values, rtol=1e-5, atol=1e-6)


def test_raw_texts_of_other_lengths_are_read_apart():
    """The prompt alone may have more tokens than behind a prefix."""
    model = load("tiny-llama")
    one, two = examples_of(model)[:1] * 2
    longer = replace(two.raw, ids=(*two.raw.ids, 70), tokens=(*two.raw.tokens, "x"),
                     l_pro=two.raw.l_pro + 1)  # fmt: skip
    two = ContrastExample(two.prompt, two.attributes, two.layouts, two.text, two.source, longer)
    both = control_score(model, [one, two], metrics="from_raw").values["from_raw"]
    for i, example in enumerate((one, two)):
        alone = control_score(model, [example], metrics="from_raw").values["from_raw"]
        np.testing.assert_allclose(both[i], alone[0], rtol=1e-5)


def test_a_metric_of_some_steps_has_an_interval():
    def first_two(predictions):
        return METRICS["js"](predictions)[:, :2]

    made = control_score(
        load("tiny-llama"), examples_of(load("tiny-llama")), metrics={"two": first_two}
    )
    row = made.interval("two", None).iloc[0]
    assert row["n"] == 4
    assert row["mean"] == pytest.approx(np.nanmean(made.values["two"]), rel=1e-5)


@pytest.mark.parametrize("n", [2, 4, 7])
def test_shares_of_few_prompts_cover(n):
    """Of 400 sets of prompts, about 95 % have the share, .5, inside their interval."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(400):
        total = rng.normal(3, 1, n)
        part = 0.5 * total + rng.normal(0, 0.5, n)
        _, low, high = share_interval(part[:, None], total)
        inside += low[0] <= 0.5 <= high[0]
    assert 0.92 <= inside / 400 <= 1


def test_a_joint_curve_takes_heads_by_prompts():
    """Nine texts of one prompt are no more than one of another."""
    model = load("tiny-llama")
    one, two, three, four = (
        examples_of(model, prompts=(prompt,))[0] for prompt in ("a", "b", "c", "d")
    )
    asked = ContrastSet((*[one] * 9, two, three, four), WORDS)
    units = (Unit({"layer": 0, "head": 0}, ((0, 0),)), Unit({"layer": 0, "head": 1}, ((0, 1),)))
    table = knock_out(model, asked, units=units, metric="lex", other_metrics=())
    effects = np.array([[1.0, 0]] * 9 + [[9.0, 0], [0, 2], [9.0, 0]])  # b and d are judged first
    measured = joint_curve(model, replace(table, values=effects), sizes=(1,), seeds=1).rows
    left = measured[measured["kind"] == "without"]["left"].iloc[0]
    control = asked.by_prompt(table.total[:, None])[:, 0]
    rest = asked.by_prompt(table.total[:, None] - table.values)
    assert left == pytest.approx((rest[[1, 3], 1].sum() + rest[[0, 2], 0].sum()) / control.sum())


def test_a_key_knows_where_a_prefix_ends():
    model = load("tiny-llama")
    text = [70, 71]
    one = ContrastExample.of(model.tokenizer, {"a": "ab:", "b": "cd:"}, " p", text)
    two = ContrastExample.of(model.tokenizer, {"a": "ab", "b": "cd"}, " p", text, join=":")
    assert [layout.ids for layout in one.layouts] == [layout.ids for layout in two.layouts]
    assert ContrastSet((one,)).key(model) != ContrastSet((two,)).key(model)


def test_noise_is_that_of_the_metric():
    model = load("tiny-llama")
    asked = contrast_set(model)
    both = knock_out(model, asked, metric="js", other_metrics=["lex"])
    alone = knock_out(model, asked, metric="lex", other_metrics=())
    assert both.noise != both.with_metric("lex").noise == alone.noise
    assert both.with_metric("js") is both


def test_what_moved_the_control_moves_no_effect(tmp_path):
    """A file begun in another precision: new units are told apart from the control of today."""
    model, file = load("tiny-gpt2"), tmp_path / "units"
    asked = contrast_set(model)
    fresh = knock_out(model, asked, other_metrics=())
    knock_out(model, asked, over="layer", other_metrics=(), file=file)
    lines = file.read_text().splitlines()
    at = next(i for i, line in enumerate(lines[1:], 1) if json.loads(line)["unit"] == "")
    line = json.loads(lines[at])
    line["values"]["js"] = [1.009 * value for value in line["values"]["js"]]
    lines[at] = json.dumps(line)
    file.write_text("\n".join(lines) + "\n")
    measured = knock_out(model, asked, other_metrics=(), file=file)
    np.testing.assert_allclose(measured.total, 1.009 * fresh.total, rtol=1e-6)
    np.testing.assert_allclose(measured.values, fresh.values, atol=1e-3 * fresh.total.max() / 100)


def test_what_acts_on_later_queries_alone_may_end_inside_the_prefix():
    """The released span of tiny-gpt2 does. What also acts on queries inside it is refused."""
    model = load("tiny-gpt2")
    asked = contrast_set(model, n=2, prompts=("jkl",))
    for span in ("bos", "released", ((0, 2),)):
        control_score(model, asked, augmentation=Augmentation(alpha=0.5, span=span))
    control_score(
        model, asked, augmentation=Augmentation(alpha=1, span="prefix+bos", phase="after_span")
    )


def test_a_recipe_is_an_augmentation_everywhere():
    from lapa2_interp.bias.recipes import recipe
    from lapa2_interp.circuits.gradients import attribution
    from lapa2_interp.circuits.logit_attribution import head_logit_attribution
    from lapa2_interp.circuits.prefix_attention import (
        alpha_at_prefix_attention,
        mean_prefix_attention,
    )

    model, rule = load("tiny-llama"), Augmentation(alpha=0.5)
    asked = contrast_set(model)
    assert isinstance(recipe("lapa2"), tuple)
    one, two = (
        attribution(model, asked, augmentation=augmentation)
        for augmentation in (rule, recipe("lapa2"))
    )
    assert np.array_equal(one.cut_hats, two.cut_hats)
    one, two = (
        head_logit_attribution(model, asked, augmentation=augmentation)
        for augmentation in (rule, recipe("lapa2"))
    )
    assert np.array_equal(one.direct, two.direct, equal_nan=True)
    goal = mean_prefix_attention(model, asked, recipe("lapa2"))
    assert alpha_at_prefix_attention(model, asked, goal, recipe("lapa2")) == pytest.approx(
        0.5, rel=0.02
    )
    with pytest.raises(CircuitError, match="alpha is that of one augmentation; found 2"):
        alpha_at_prefix_attention(model, asked, goal, (rule, rule))


def test_texts_of_any_source_have_a_mass():
    from lapa2_interp.circuits.prefix_attention import mean_prefix_attention

    model = load("tiny-llama")
    raw, human = (
        [replace(example, source=source) for example in examples_of(model)]
        for source in ("raw", "human")
    )
    assert mean_prefix_attention(model, human) == mean_prefix_attention(model, raw)


def test_many_metrics_have_a_panel_each(tmp_path):
    model = load("tiny-llama")
    metrics = {f"m{i}": METRICS["js"] for i in range(9)}
    figure = control_score(model, examples_of(model), metrics=metrics).plot()
    assert [axes.get_title() for axes in figure.axes] == list(metrics)
