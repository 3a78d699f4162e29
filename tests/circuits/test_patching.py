"""Activation patching: what must be complete, what must be nothing, the answer_key answer, and another
implementation."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from conftest import load, soft_prefix
from test_circuits import WORDS, contrast_set
from transformer_lens import patching as lens

from lapa2_interp import Layout
from lapa2_interp.circuits import patch_nodes
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.examples import ContrastExample, attribute_words
from lapa2_interp.circuits.patch_nodes import HOOKS, NODES, PREFIX_NODES
from lapa2_interp.circuits.patching import patch
from lapa2_interp.errors import CircuitError, DeadHookError
from lapa2_interp.models.planted import (
    FILLERS,
    NEGATIVE,
    POSITIVE,
    WIDTH,
    answer_key,
)

SENTIMENT = {"positive": "Very positive:", "negative": "Very negative:"}
EVERYWHERE = ("prefix", "prompt", "generated")
CUT = (0.0, 0.0, 0.0)


def soft_contrast_set(model, n=5):
    soft = tuple(soft_prefix(model, seed=seed) for seed in (0, 1))
    layout = Layout.of(model.tokenizer, None, "efg", soft=5)
    text = tuple(range(70, 70 + n))
    return ContrastSet(
        (ContrastExample("efg", ("a", "b"), (layout, layout), text, prefixes=soft),), WORDS
    )


def planted_contrast_set(model, n=8, prefixes=SENTIMENT, prompts=("The lake", "Once upon a time")):
    words = attribute_words(model.tokenizer, "sentiment", ("positive", "negative"))
    vocabulary = model.tokenizer.get_vocab()
    known = [vocabulary[word] for word in (*POSITIVE, *NEGATIVE, *FILLERS)]
    rng = np.random.default_rng(0)
    examples = [
        ContrastExample.of(model.tokenizer, prefixes, prompt, rng.choice(known, n).tolist())
        for prompt in prompts
    ]
    return ContrastSet(tuple(examples), tuple(words.values()))


def any_contrast_set(model, name):
    return planted_contrast_set(model) if name.startswith("planted") else contrast_set(model)


def log_probs_of(model, asked, node, **settings):
    """What a metric is given: target, opposite, and every unit, for each example."""
    measured = []
    for example in asked.examples:
        runs = []

        def recorded(log_probs, text, runs=runs):
            runs.append(log_probs[0].clone())
            return torch.zeros(text.shape)

        patch(
            model,
            ContrastSet((example,), asked.words),
            node,
            metric=recorded,
            batch_size=1000,
            **settings,
        )
        measured.append(torch.stack(runs))
    return measured  # run step vocab


def everything(model, node, layers=None):
    """All places of a node as one set."""
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    columns = range(n_heads)
    if node == "prefix_kv":
        columns = range(getattr(model.cfg, "n_key_value_heads", None) or n_heads)
    if node.startswith("resid"):
        columns = EVERYWHERE
    return {"all": list(product(range(n_layers) if layers is None else layers, columns))}


def favour(log_probs, words=WORDS):
    plus, minus = words
    return log_probs[..., plus].logsumexp(-1) - log_probs[..., minus].logsumexp(-1)


def effect(patching, unit, direction="denoise"):
    """By example, of a unit by its (layer, column), or (layer, column, part)."""
    names = [tuple(unit.labels.values()) for unit in patching.units]
    return patching.effects[direction][:, names.index(unit)]


# --- what must be nothing, and what must be everything


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-neox"])
def test_a_run_patched_with_itself_is_unchanged(name):
    model = load(name)
    asked = contrast_set(model, n=2, prefixes={"a": "ab cd:", "b": "ab cd:"})
    for node in NODES:
        patching = patch(model, asked, node, direction="both")
        assert all(np.abs(effects).max() < 1e-6 for effects in patching.effects.values())
        assert patching.frame()["share"].isna().all()
        assert patching.sums()["mean"][2] == 0


@pytest.mark.parametrize(
    "name", ["tiny-gpt2", "tiny-llama", "tiny-neox", "planted", "planted-gpt2"]
)
@pytest.mark.parametrize("node", [*PREFIX_NODES, "z"])
def test_all_of_the_other_run_make_its_predictions(name, node):
    """What later queries know of a prefix are its keys and values; what they do with it is their
    heads' output."""
    model = load(name)
    settings = {"parts": ("kv",)} if node in PREFIX_NODES else {}
    for direction, runs in {"denoise": (0, 1), "noise": (1, 0)}.items():
        for logits in log_probs_of(
            model, any_contrast_set(model, name), node, direction=direction,
            together=everything(model, node), **settings,
        ):  # fmt: skip
            giving, taken = logits[runs[0]], logits[runs[1]]
            assert (logits[2] - giving).abs().max() < 1e-6 * max(1, giving.abs().max())
            assert (logits[2] - taken).abs().max() > 1e-3


@pytest.mark.parametrize("node", ["resid_pre", "resid_post"])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-neox"])
def test_the_whole_stream_of_one_layer_is_everything(name, node):
    model = load(name)
    for layer in range(model.cfg.n_layers):
        for logits in log_probs_of(
            model, contrast_set(model), node, together=everything(model, node, [layer])
        ):
            assert (logits[2] - logits[0]).abs().max() < 1e-5
    late = patch(model, contrast_set(model), node)
    # Later layers do not read the prefix's stream behind the last one.
    last = model.cfg.n_layers - 1
    if node == "resid_post":
        assert np.abs(effect(late, (last, "prefix"))).max() < 1e-6
    assert np.abs(effect(late, (0, "prefix"))).max() > 1e-3


def test_the_two_runs_are_the_plain_forward_passes(tiny):
    model = load(tiny, "float64")
    asked = contrast_set(model)
    for node in ("prefix_kv", "z", "head_to_logits"):
        patching = patch(model, asked, node, metric="log_prob")
        for i, example in enumerate(asked.examples):
            for layout, value in zip(
                example.layouts, (patching.source[i], patching.destination[i]), strict=True
            ):
                with torch.no_grad():
                    logits = model(torch.tensor([[*layout.ids, *example.text]]))[0]
                log_probs = logits.log_softmax(-1)[len(layout) - 1 : -1]
                expected = log_probs.gather(1, torch.tensor(example.text)[:, None]).mean().item()
                assert value == pytest.approx(expected, abs=1e-10)


def test_soft_prefixes():
    model = load("tiny-llama")
    asked = soft_contrast_set(model)
    for node, settings in {"prefix_kv": {"parts": ("kv",)}, "z": {}}.items():
        (logits,) = log_probs_of(model, asked, node, together=everything(model, node), **settings)
        assert (logits[2] - logits[0]).abs().max() < 1e-5
        assert (logits[1] - logits[0]).abs().max() > 1e-3
    cells = patch(model, asked, direction="both")
    assert np.abs(cells.effects["denoise"] - cells.effects["noise"]).max() > 1e-3
    # BOS stands behind a soft prefix, and reads it.
    stream = patch(model, asked, "resid_pre")
    assert list(dict.fromkeys(unit.labels["slots"] for unit in stream.units)) == [
        "bos", "prompt", "last", "generated",
    ]  # fmt: skip
    assert np.abs(effect(stream, (1, "bos"))).max() > 1e-4
    assert np.abs(effect(stream, (0, "bos"))).max() < 1e-6
    after, named, less = (
        patch(model, asked, "z", slots=slots).effects["denoise"]
        for slots in (None, ("bos", "prompt", "generated"), ("prompt", "generated"))
    )
    assert np.array_equal(after, named)
    assert np.abs(after - less).max() > 1e-4
    with pytest.raises(CircuitError, match="soft prefix is keys and values alone.*prefix_kv"):
        patch(model, asked, "z", slots=("prefix",))
    with pytest.raises(CircuitError, match="slots bos, prompt"):
        patch(model, asked, "resid_pre", together={"x": [(0, "prefix")]})


@pytest.mark.parametrize("node", PREFIX_NODES)
def test_a_plain_transformers_model_the_same(tiny, node):
    model, plain = load(tiny, "float64"), load(tiny, "float64", "TransformersModel")
    parts = ("k", "v", "kv")
    one = patch(model, contrast_set(model), node, parts=parts)
    without_hooks = patch(plain, contrast_set(plain), node, parts=parts)
    assert np.abs(one.effects["denoise"]).max() > 1e-3
    # A plain transformers model computes its softmax in float32.
    assert np.abs(one.effects["denoise"] - without_hooks.effects["denoise"]).max() < 1e-5


# --- the answer_key answer


def flipped(key, role, example, step):
    """lex behind " negative" where what a head gives has the other sign."""
    layout = example.layouts[0]
    lengths = (len(layout) + step, layout.l_pro)
    x, opposite = key.written(*lengths, asking=step == 0)
    written_by = "reader" if role == "relay" else role  # on the words' direction
    without = replace(key, gain={**key.gain, written_by: 0.0})
    part = x - without.written(*lengths, asking=step == 0)[0]
    x = 2 * part - x
    return 2 * key.logit * x / np.sqrt(1 + (x**2 + opposite) / WIDTH)


def expected_flips(key, role, asked):
    measured = []
    for example in asked.examples:
        layout = example.layouts[0]
        steps = [
            flipped(key, role, example, t) + key.lex(len(layout) + t, layout.l_pro, asking=t == 0)
            for t in range(example.n_steps)
        ]
        measured.append(np.mean(steps))
    return np.array(measured)


@pytest.mark.parametrize("name", ["planted", "planted:4", "planted-gpt2:2"])
def test_planted_cells_are_the_closed_form(name):
    """Keys are the same behind both prefixes; values carry the sign."""
    model, key = load(name), answer_key(name)
    asked = planted_contrast_set(model)
    cells, edges = patch(model, asked), patch(model, asked, "prefix_to_head", parts=("k", "v"))
    for patching, column in ((cells, 2), (edges, 1)):
        group = model.cfg.n_heads // (getattr(model.cfg, "n_key_value_heads", None) or 4)
        share = group if column == 2 else 1
        left = {tuple(unit.labels.values()) for unit in patching.units}
        for role in ("carrier", "suppressor", "relay"):
            layer, head = key.heads[role]
            unit = (layer, head // share, "v")
            left.remove(unit)
            expected = expected_flips(key, role, asked)
            assert np.abs(effect(patching, unit) - expected).max() < 5e-5
            assert np.sign(expected[0]) == (-1 if role == "suppressor" else 1)
        for unit in left:
            assert np.abs(effect(patching, unit)).max() < 1e-5
    best = cells.frame().iloc[0]
    layer, head = key.heads["carrier"]
    assert (best["layer"], best["kv_head"], best["part"]) == (layer, head // group, "v")
    worst = cells.frame().iloc[-1]
    layer, head = key.heads["suppressor"]
    assert (worst["layer"], worst["kv_head"], worst["part"]) == (layer, head // group, "v")
    assert worst["high"] < 0


def test_edges_of_a_linear_reader_add_up():
    """Measured by what is written on the words' direction, which heads add to, the edges' shares
    sum to 1."""
    model, key = load("planted"), answer_key("planted")
    asked = planted_contrast_set(model)
    plus, minus = map(list, asked.words)

    def written(log_probs, text):
        lex = favour(log_probs, (plus, minus)).double()
        x = lex / torch.sqrt(4 * key.logit**2 - lex**2 / WIDTH)
        return x * (torch.arange(text.shape[1]) > 0)  # the relay writes at the prompt's last token

    for direction in ("denoise", "noise"):
        edges = patch(model, asked, "prefix_to_head", metric=written, direction=direction)
        assert edges.table().map().sum() == pytest.approx(1, abs=1e-4)
        assert edges.table().map().max() > 0.5


def test_edges_of_a_group_are_its_cell():
    model = load("tiny-llama")
    asked = contrast_set(model)
    cells = patch(model, asked, parts=("k", "v", "kv"))
    pairs = {f"{i}.{j}": [(i, 2 * j), (i, 2 * j + 1)] for i in range(4) for j in range(2)}
    edges = patch(model, asked, "prefix_to_head", parts=("k", "v", "kv"), together=pairs)
    assert np.abs(cells.effects["denoise"]).max() > 1e-3
    assert np.abs(cells.effects["denoise"] - edges.effects["denoise"]).max() < 1e-6


def test_what_suffices_is_not_what_is_needed():
    """Against a prefix that says nothing: alone the carrier does nearly everything, and without it
    the relay still does much."""
    model, key = load("planted"), answer_key("planted")
    asked = planted_contrast_set(
        model, prefixes={"positive": "Very positive:", "none": "Very the:"}
    )
    words = [list(words) for words in asked.words]

    def later(log_probs, text):  # the prompt's last token reads what the relay left, too
        return favour(log_probs, words) * (torch.arange(text.shape[1]) > 0)

    def expected(weights):
        measured = []
        for example in asked.examples:
            layout = example.layouts[0]
            measured.append(
                sum(
                    key.lex(len(layout) + t, layout.l_pro, weights=weights)
                    for t in range(1, example.n_steps)
                )
                / example.n_steps
            )
        return np.array(measured)

    patching = patch(model, asked, "z", metric=later, direction="both")
    assert np.abs(patching.destination).max() < 1e-5
    roles = ("carrier", "suppressor", "relay")
    for role in roles:
        alone = expected({rival: CUT for rival in roles if rival != role})
        without = expected({role: CUT})
        assert np.abs(effect(patching, key.heads[role]) - alone).max() < 2e-5
        lost = effect(patching, key.heads[role], "noise")
        assert np.abs(lost - (patching.source - without)).max() < 2e-5
    frame = patching.frame().set_index(["direction", "layer", "head"])["share"]
    assert frame["denoise", *key.heads["relay"]] - frame["noise", *key.heads["relay"]] > 0.15
    for direction in ("denoise", "noise"):
        alone = patch(model, asked, "z", metric=later, direction=direction)
        assert np.abs(alone.effects[direction] - patching.effects[direction]).max() < 1e-6
    # Where the carrier looks is needed, and does nothing by itself.
    looks = patch(model, asked, "pattern", metric=later, direction="both")
    unit, even = key.heads["carrier"], (1 / key.odds["carrier"], 1.0, 1.0)
    assert np.abs(effect(looks, unit)).max() < 1e-5
    lost = looks.source - expected({"carrier": even})
    assert np.abs(effect(looks, unit, "noise") - lost).max() < 2e-5
    assert lost.min() > 0.1


# --- another implementation, and the edge to the logits


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize("node", ["z", "pattern", "resid_pre", "resid_post", "attn_out", "mlp_out"])
def test_transformer_lens_finds_the_same(name, node):
    model = load(name)
    example = contrast_set(model).examples[0]
    layout = example.layouts[0]
    clean, corrupted = (
        torch.tensor([[*layout.ids, *example.text[:-1]]]) for layout in example.layouts
    )
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)
    spans = {
        "prefix": slice(*layout.prefix),
        "prompt": slice(*layout.prompt),
        "last": slice(len(layout) - 1, len(layout)),
        "generated": slice(len(layout), clean.shape[1]),
    }
    names = list(spans)

    def measured(logits):
        return favour(logits[:, len(layout) - 1 :].log_softmax(-1)).mean()

    def in_a_part(corrupted, index, clean):
        span = spans[names[index[1]]]
        corrupted[:, span] = clean[:, span]
        return corrupted

    heads = {
        "z": lens.layer_head_vector_patch_setter,
        "pattern": lens.layer_head_pattern_patch_setter,
    }
    with torch.no_grad():
        expected = lens.generic_activation_patch(
            model, corrupted, cache, measured, heads.get(node, in_a_part), node,
            index_df=lens.make_df_from_ranges([4, 4], ["layer", "head" if node in heads else "pos"]),
        )  # fmt: skip
    patching = patch(
        model, [example], node, metric=favour_of_run, slots=EVERYWHERE if node in heads else names
    )
    values = patching.effects["denoise"][0] + patching.destination[0]
    assert np.abs(values - expected.numpy()).max() < 1e-5
    assert np.abs(patching.effects["denoise"]).max() > 1e-3


def favour_of_run(log_probs, text):
    return favour(log_probs)


@pytest.mark.parametrize(
    "name", ["planted", "planted-gpt2", "tiny-neox", "tiny-gpt2", "tiny-llama"]
)
def test_a_head_to_the_logits_is_its_output_in_the_last_layer(name):
    """Where the MLP does not react: it writes nothing, stands beside attention, or is held."""
    model = load(name)
    example = any_contrast_set(model, name).examples[0]
    asked, last = (
        ContrastSet((example,), any_contrast_set(model, name).words),
        model.cfg.n_layers - 1,
    )

    def hold(x, hook):
        return torch.cat([x[:2], x[1:2].expand(len(x) - 2, -1, -1)])

    held = [(HOOKS["mlp_out"].format(last), hold)] if name in ("tiny-gpt2", "tiny-llama") else []
    with model.hooks(fwd_hooks=held):
        outputs = patch(model, asked, "z", batch_size=100).effects["denoise"][0, -4:]
    edges = patch(model, asked, "head_to_logits")
    assert np.abs(edges.effects["denoise"][0, -4:] - outputs).max() < 1e-5
    assert np.abs(outputs).max() > 1e-3
    # In earlier layers, the edge alone: no later layer sees it.
    early = patch(model, asked, "z").effects["denoise"][0, :4]
    assert np.abs(edges.effects["denoise"][0, :4] - early).max() > 1e-3


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-neox"])
def test_a_head_to_the_logits_by_hand(name):
    model = load(name, "float64")
    example = contrast_set(model).examples[0]
    with torch.no_grad():
        (_, source), (logits, own) = (
            model.run_with_cache(torch.tensor([[*layout.ids, *example.text[:-1]]]))
            for layout in example.layouts
        )
        plain = favour(logits.log_softmax(-1))[0, -example.n_steps :].mean().item()
        residual = own["blocks.3.hook_resid_post"]
        patching = patch(model, ContrastSet((example,), WORDS), "head_to_logits").effects[
            "denoise"
        ][0]
        for i, (layer, head) in enumerate(product(range(4), range(4))):
            z = (cache[f"blocks.{layer}.attn.hook_z"][:, :, head] for cache in (source, own))
            changed = residual + torch.sub(*z) @ model.blocks[layer].attn.W_O[head]
            logits = model.unembed(model.ln_final(changed))
            value = favour(logits.log_softmax(-1))[0, -example.n_steps :].mean().item()
            # A Llama's norm is computed in float32.
            assert patching[i] == pytest.approx(value - plain, abs=1e-5)


def test_rounding_in_half_precision_is_not_refused():
    """The node checks that the residual stream is a sum."""
    half, model = load("tiny-llama", "bfloat16"), load("tiny-llama")
    rough, exact = (
        patch(variant, contrast_set(variant), "head_to_logits").effects["denoise"]
        for variant in (half, model)
    )
    assert 1e-6 < np.abs(rough - exact).max() < 0.1


def test_hooks_of_a_user_stay_live():
    model = load("tiny-llama")
    asked = contrast_set(model)

    def no_output(z, hook):
        return 0 * z

    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", no_output)]):
        patching = patch(model, asked, "prefix_kv", parts=("kv",)).table().map()
    assert np.abs(patching[1]).max() < 1e-6
    assert np.abs(patching[2]).max() > 1e-4


# --- batches, tables, refusals


@pytest.mark.parametrize("node", ["prefix_kv", "z", "head_to_logits"])
def test_batches_and_order_change_nothing(node):
    model = load("tiny-llama")
    asked = ContrastSet(
        (*contrast_set(model).examples, *contrast_set(model, n=3, prompts=("pq",)).examples), WORDS
    )
    turned = ContrastSet(asked.examples[::-1], WORDS)
    all_slots = patch(model, asked, node, direction="both")
    again = patch(model, asked, node, direction="both", batch_size=5)
    for direction in ("denoise", "noise"):
        assert np.abs(all_slots.effects[direction] - again.effects[direction]).max() < 2e-6
    reversed_order = patch(model, turned, node, batch_size=9)
    assert (
        np.abs(all_slots.effects["denoise"] - reversed_order.effects["denoise"][::-1]).max() < 2e-6
    )
    assert np.abs(all_slots.source - reversed_order.source[::-1]).max() < 2e-6
    assert np.abs(all_slots.effects["denoise"]).max() > 1e-3


def test_sets_are_patched_together():
    model, key = load("planted"), answer_key("planted")
    asked = planted_contrast_set(model)
    both = [key.heads["carrier"], key.heads["relay"]]
    patching = patch(model, asked, "z", together={"both": both, "carrier": both[:1]})
    alone = patch(model, asked, "z")
    assert np.abs(effect(patching, ("carrier",)) - effect(alone, both[0])).max() < 1e-6
    assert (effect(patching, ("both",)) > effect(patching, ("carrier",)) + 0.1).all()
    assert patching.frame()["name"].tolist() == ["both", "carrier"]
    assert patching.plot()._repr_png_()[:4] == b"\x89PNG"
    with pytest.raises(CircuitError, match="only heads, KV heads and slots have a map"):
        patching.table().map()


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_nothing_acts_through_a_head_that_keeps_its_output(direction):
    """The reader reads the relay, and no other head reads one."""
    model, key = load("planted"), answer_key("planted")
    relay, reader, carrier = (key.heads[role] for role in ("relay", "reader", "carrier"))
    ways = {"relay": None, "cut": reader, "other": carrier}
    patching = patch(
        model, planted_contrast_set(model), "z", direction=direction,
        together={name: [relay] for name in ways} | {"reader": [reader], "later": [reader]},
        keep={name: [head] for name, head in ways.items() if head} | {"later": [relay]},
    )  # fmt: skip
    effects = {
        unit.labels["name"]: patching.effects[direction][:, i]
        for i, unit in enumerate(patching.units)
    }
    assert (effects["relay"] > 0.05).all()
    assert np.abs(effects["cut"]).max() < 1e-6
    assert np.abs(effects["other"] - effects["relay"]).max() < 1e-6
    assert np.abs(effects["later"] - effects["reader"]).max() < 1e-6


def test_recovery_is_a_ratio_of_sums_over_prompts():
    """Texts of one prompt count as one."""
    model = load("tiny-gpt2")
    prompts = ("ab", "ab", "cd", "ef", "gh", "ij", "kl", "mn", "op")
    asked = contrast_set(model, prompts=prompts)
    patching = patch(model, asked, "z")
    by_prompt = {
        prompt: [i for i, example_prompt in enumerate(prompts) if example_prompt == prompt]
        for prompt in prompts
    }
    parts = np.array([patching.effects["denoise"][rows].mean(0) for rows in by_prompt.values()])
    total = np.array(
        [(patching.source - patching.destination)[rows].mean() for rows in by_prompt.values()]
    )
    expected = (parts.sum(0) / total.sum()).reshape(4, 4)
    assert patching.table().map() == pytest.approx(expected)
    assert np.abs((parts / total[:, None]).mean(0).reshape(4, 4) - expected).max() > 1e-3
    frame = patching.frame()
    assert frame["share"].is_monotonic_decreasing
    for _, row in frame.iterrows():
        assert row["share"] == pytest.approx(expected[row["layer"], row["head"]])
    assert frame["p_max"].between(0, 1).all()
    assert (frame["p_max"] >= frame["p"]).all()
    assert (frame["low"] <= frame["high"]).all()
    sums = patching.sums().set_index("run")
    assert sums["mean"]["difference"] == pytest.approx(total.mean())
    assert sums["prompts"].tolist() == [8, 8, 8]
    few = patch(model, contrast_set(model), "z")
    assert few.frame()["p_max"].isna().all()


def test_maps_and_drawings():
    model = load("tiny-llama")
    asked = contrast_set(model, n=2)
    shapes = {"prefix_kv": (4, 2), "pattern": (4, 4), "mlp_out": (4, 4)}
    for node, shape in shapes.items():
        patching = patch(model, asked, node, direction="both")
        part = patching.units[0].part or None
        assert patching.table("noise").map(part).shape == shape
        assert np.isfinite(patching.table().map(part=part)).all()
        assert patching.plot()._repr_png_()[:4] == b"\x89PNG"
        assert set(patching.frame()["direction"]) == {"denoise", "noise"}
    cells = patch(model, asked)
    with pytest.raises(CircuitError, match="a map for each of k, v; name one"):
        cells.table().map()
    with pytest.raises(CircuitError, match="unknown part 'q'; allowed: k, v"):
        cells.table().map(part="q")
    with pytest.raises(CircuitError, match="unknown direction 'noise'; allowed: denoise"):
        cells.table("noise")


def test_slots_are_parts_of_the_text():
    """Parts that share no query cover together what they cover."""
    model = load("tiny-gpt2")
    asked = contrast_set(model)
    all_slots = patch(model, asked, "z").effects["denoise"]
    named = patch(model, asked, "z", slots=("prompt", "generated")).effects["denoise"]
    assert np.array_equal(all_slots, named)
    last = patch(model, asked, "z", slots=("last",)).effects["denoise"]
    assert np.abs(all_slots - last).max() > 1e-3
    assert np.abs(last).max() > 1e-3
    # In the last layer only the queries that predict count.
    early = patch(model, asked, "z", slots=("prompt",)).effects["denoise"]
    assert np.abs(early[:, -4:] - last[:, -4:]).max() < 1e-6
    assert np.abs(patch(model, asked, "z", slots=("bos",)).effects["denoise"]).max() < 1e-6


def test_a_task_by_name():
    model, key = load("planted"), answer_key("planted")
    patching = patch(
        model,
        ContrastSet.of(model, "sentiment", prompts=["The lake", "The book"], tokens=4, samples=2),
        parts=("v",),
    )
    layer, head = key.heads["carrier"]
    assert np.unravel_index(patching.table().map().argmax(), (2, 2)) == (layer, head // 2)
    assert len(patching.source) == 4
    assert patching.sums()["attribute"].tolist() == ["positive", "negative", ""]


def test_a_node_needs_its_hook_alive(monkeypatch):
    model = load("tiny-gpt2")
    asked = contrast_set(model)
    with monkeypatch.context() as without:
        without.setattr(type(model), "hook_dict", {})
        with pytest.raises(CircuitError, match=r"needs hook blocks.0.hook_mlp_out, which this mod"):
            patch(model, asked, "mlp_out")
    monkeypatch.setitem(patch_nodes.HOOKS, "z", "blocks.{}.attn.hook_result")  # a dead one
    message = "did not come by blocks.0.attn.hook_result .*; or take another node"
    with pytest.raises(DeadHookError, match=message):
        patch(model, asked, "z")


def test_one_part_or_slot_may_be_named_as_a_word():
    model = load("tiny-gpt2")
    asked = contrast_set(model)
    assert set(patch(model, asked, parts="kv").frame()["part"]) == {"kv"}
    assert set(patch(model, asked, "resid_pre", slots="prompt").frame()["slots"]) == {"prompt"}


def test_without_words_the_texts_probability_is_the_metric():
    model = load("tiny-llama")
    assert patch(model, contrast_set(model).examples, "prefix_to_head").metric == "log_prob"
    assert patch(model, contrast_set(model), "prefix_to_head").metric == "favour"
