"""Soft prefixes in the network: the format, injection against full recomputation and against real
text, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import generate, load, plan, run_of, soft_prefix, soft_set
from oracle import oracle_logits

from lapa2_interp import Augmentation, augmented
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.soft_arguments import soft_inputs
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.errors import LayoutError, PrefixError
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.load import load_tokenizer, wrap_in_bridge
from lapa2_interp.prefixes.soft_prefix import cards_in, find_prefix, load_prefix, save_prefix

GENERATED = [70, 81, 92, 103, 114, 64, 75]
SENTIMENT = load_task("sentiment")


def made(model, folder, name="prefix", **settings):
    method = methods.get(name, prefixes=str(folder))
    return generate(
        model,
        method,
        SENTIMENT,
        "positive",
        ["The lake", "Once upon a time"],
        **({"length": 30} | settings),
    )


def windowed(window=12):
    """A tiny Mistral whose layers see the last `window` keys."""
    from transformers import AutoModelForCausalLM, MistralConfig

    config = MistralConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return wrap_in_bridge(network, load_tokenizer("tiny-gpt2"), "tiny-mistral", "w")


# --- in the network


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("profile", ["paper", "released"])
@pytest.mark.parametrize("phase", ["decode", "last_query"])
def test_cached_decoding_equals_full_recomputation(tiny, model_class, shifted, profile, phase):
    """Two soft prefixes of different lengths, left-padded beside a hard prefix, none, and one
    without a bias."""
    model = load(tiny, "float64", model_class)
    first, second = (
        soft_prefix(model, slots=5, shifted=shifted),
        soft_prefix(model, slots=3, shifted=shifted, seed=1),
    )
    prefixes = [first, None, second, None, first]
    rows = left_pad(
        [
            Layout.of(model.tokenizer, None, "efg hi", soft=5),
            Layout.of(model.tokenizer, "ab cd:", "uvw"),
            Layout.of(model.tokenizer, None, "b", soft=3),
            Layout.of(model.tokenizer, None, "a longer prompt than the others"),
            Layout.of(model.tokenizer, None, "xyz", soft=5),
        ]
    )
    augmentation = Augmentation(alpha=0.7, profile=profile, phase=phase)
    augmentations = [augmentation] * 4 + [None]
    state = new_rows(model)
    if not (shifted or facts_of(model).backend != "hooked"):
        with pytest.raises(
            PrefixError, match="needs positions that start at 0.*use TransformerBridge"
        ):
            state.prompt_pass(rows, prefixes)
        return
    with torch.no_grad():
        with augmented(model, augmentations, rows):
            logits = [state.prompt_pass(rows, prefixes)[:, -1]]
        state.expand(torch.arange(5), capacity=len(rows[0]) + len(GENERATED))
        with augmented(model, augmentations, rows):
            logits += [state.read_tokens(torch.full((5, 1), token))[:, -1] for token in GENERATED]
    measured = torch.stack(logits, dim=1)
    for row, (layout, prefix) in enumerate(zip(rows, prefixes, strict=True)):
        expected, _ = oracle_logits(model, layout, GENERATED, augmentations[row], prefix=prefix)
        # HookedTransformer rotates in float32 wherever its tables end up.
        assert (measured[row] - expected).abs().max() < (
            1e-7 if facts_of(model).backend != "hooked" else 1e-5
        )
        if prefix is not None:
            assert (
                measured[row] - oracle_logits(model, layout, GENERATED, None)[0]
            ).abs().max() > 1e-3


def test_the_keys_and_values_of_a_text_are_that_text(tiny):
    """A shifted soft prefix read off real text == the text itself in front, and its attention is
    that of the text."""
    from transformers import DynamicCache

    model = load(tiny, "float64")
    text, branch = (
        Layout.of(model.tokenizer, None, "some words"),
        Layout.of(model.tokenizer, None, "efg hi", soft=11),
    )
    cache = DynamicCache()
    with torch.no_grad():
        model(text.tensor, **{cache_name(model.original_model): cache})
        in_one_pass = model(torch.tensor([text.ids + branch.ids]))[0, len(text.ids) :]
        both = [
            torch.stack([getattr(layer, name)[0] for layer in cache.layers])
            for name in ("keys", "values")
        ]
        template = soft_prefix(model, slots=11, shifted=True)
        prefix = dataclasses.replace(template, keys=both[0], values=both[1])
        behind = model(**soft_inputs(model, [branch], [prefix]))[0]
    assert (behind - in_one_pass).abs().max() < 1e-9


def test_positions_and_presence_change_the_logits(tiny):
    model = load(tiny, "float64")
    prefix = soft_prefix(model, slots=4)
    shifted = dataclasses.replace(prefix, card=prefix.card.model_copy(update={"shifted": True}))
    branch = Layout.of(model.tokenizer, None, "efg hi", soft=4)
    with torch.no_grad():
        at_zero, behind = (
            model(**soft_inputs(model, [branch], [soft_prefix]))[0, -1]
            for soft_prefix in (prefix, shifted)
        )
        without = model(branch.tensor)[0, -1]
    assert (at_zero - behind).abs().max() > 1e-4
    assert (at_zero - without).abs().max() > 1e-2


def test_rows_of_a_batch_equal_each_row_alone(tiny, tmp_path):
    model = load(tiny)
    folder = soft_set(tmp_path, model, SENTIMENT)
    settings = {"augmentation": Augmentation(alpha=1), "samples": 4, "length": 22, "trace": "none"}
    together, alone = (
        made(model, folder, max_rows=rows, **settings).texts["text"].tolist() for rows in (120, 1)
    )
    assert together == alone
    assert len(set(together)) == 8


def test_the_trace_finds_the_slots(tiny, tmp_path):
    """Attention on prefix, BOS, prompt and generated adds up, and each slot of the prefix is one
    prefix token."""
    model = load(tiny)
    trace = made(
        model, soft_set(tmp_path, model, SENTIMENT, slots=6), augmentation=Augmentation(alpha=1)
    ).trace
    parts = sum(trace[name] for name in ("bos", "prefix", "prompt", "generated"))
    assert np.nanmax(np.abs(parts - 1)) < 1e-5
    assert trace.sizes["prefix_token"] == 6
    assert (
        np.nanmax(
            np.abs(
                trace["prefix_tokens"].sum("prefix_token") - trace["prefix"].mean(("layer", "head"))
            )
        )
        < 1e-5
    )
    assert np.nanmax(np.abs(trace["released_slice"] - trace["prefix"])) < 1e-7, (
        "on soft prefixes the code's slice is right"
    )


def test_paper_and_released_profiles_agree_on_the_keys_of_soft_prefixes():
    layout = Layout.of(load("tiny-gpt2").tokenizer, None, "The lake", soft=4)
    assert layout.spans("prefix") == layout.spans("released") == ((0, 4),)
    assert layout.n("prefix") == layout.n("released") == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_generates(tiny, dtype, tmp_path):
    model = load(tiny, dtype)
    cell = made(model, soft_set(tmp_path, model, SENTIMENT), augmentation=Augmentation(alpha=2))
    assert np.isfinite(cell.trace["prefix"].to_numpy()[0, 0]).all()
    exact = load(tiny, "float64")
    branch = Layout.of(exact.tokenizer, None, "efg hi", soft=5)
    logits = [
        precise(**soft_inputs(precise, [branch], [load_prefix(tmp_path, "positive")]))[0, -1]
        .double()
        .log_softmax(-1)
        for precise in (model, exact)
    ]
    spread = logits[1].std()
    assert (logits[0] - logits[1]).abs().max() < 0.25 * spread, "half precision is close to float64"


# --- the format


def test_a_saved_prefix_gives_identical_tokens(tiny, tmp_path):
    model = load(tiny)
    prefix = soft_prefix(model)
    saved = save_prefix(prefix, tmp_path / "a", "float32")
    again = load_prefix(tmp_path / "a", "positive")
    assert torch.equal(again.keys, prefix.keys)
    assert torch.equal(again.values, prefix.values)
    assert again.card == saved.card == prefix.card.model_copy(update={"sha256": saved.card.sha256})
    save_prefix(again, tmp_path / "b", "float32")
    texts = [made(model, tmp_path / name).texts["tokens"].tolist() for name in ("a", "b")]
    assert texts[0] == texts[1]
    save_prefix(soft_prefix(model, seed=9), tmp_path / "other", "float32")
    assert made(model, tmp_path / "other").texts["tokens"].tolist() != texts[0]


def test_cards_name_the_run(tmp_path):
    """The manifest tells which prefix stood in front of which branch."""
    from lapa2_interp.runs.manifest import Manifest

    model = load("tiny-gpt2")
    method = methods.get("air-decoding", prefixes=soft_set(tmp_path, model, SENTIMENT))
    run = run_of(model, method, SENTIMENT, ["negative"], ["The lake"], length=20, samples=1, seed=1)
    branches = run.manifest().branches
    assert branches["base"] is None
    assert branches["target"] == load_prefix(tmp_path, "negative").card.name
    assert branches["positive"].sha256 == load_prefix(tmp_path, "positive").card.sha256
    assert Manifest.model_validate_json(run.manifest().model_dump_json()) == run.manifest()


def test_a_prefix_of_another_model_or_shape_is_refused(tmp_path):
    gpt2, llama = load("tiny-gpt2"), load("tiny-llama")
    folder = soft_set(tmp_path, gpt2, SENTIMENT)
    with pytest.raises(PrefixError) as caught:
        find_prefix(llama, "sentiment", folder, "positive")
    for part in (
        "made for tiny-gpt2 (4 layers x 4 KV heads x 5 slots x 8)",
        "tiny-llama needs 4 layers x 2 KV heads x 5",
    ):
        assert part in str(caught.value)
    prefix = soft_prefix(gpt2)
    other_weights = prefix.card.model_copy(update={"weights": "sha256 of others"})
    with pytest.raises(PrefixError) as caught:
        dataclasses.replace(prefix, card=other_weights).check(gpt2)
    assert (
        "tiny-gpt2 with weights sha256 of others; this is tiny-gpt2 with weights"
        f" {identify(gpt2).weights}" in str(caught.value)
    )
    with pytest.raises(PrefixError, match=r"card says \(4, 4, 5, 8\) but keys are \(4, 4, 4, 8\)"):
        dataclasses.replace(prefix, keys=prefix.keys[:, :, :4])
    with pytest.raises(PrefixError, match="values of 'positive' hold values that are not finite"):
        dataclasses.replace(prefix, values=prefix.values / 0)
    with pytest.raises(LayoutError, match="a layout has 0 soft slots, its prefix 5"):
        new_rows(gpt2).prompt_pass([Layout.of(gpt2.tokenizer, None, "The lake")], [prefix])


def test_a_card_without_its_weights_is_an_error(tmp_path):
    soft_set(tmp_path, load("tiny-gpt2"), SENTIMENT)
    (tmp_path / "other.json").write_text("{}")
    assert [card.attribute for card in cards_in(tmp_path)] == ["negative", "positive"]
    (tmp_path / "positive.safetensors").unlink()
    with pytest.raises(PrefixError, match="has no weights: positive.safetensors is not beside it"):
        cards_in(tmp_path)


def test_values_that_float16_cannot_hold_are_refused(tmp_path):
    prefix = soft_prefix(load("tiny-gpt2"))
    with pytest.raises(PrefixError, match="exceed float16; save it as float32"):
        save_prefix(dataclasses.replace(prefix, keys=prefix.keys * 1e6), tmp_path)
    assert not (tmp_path / "positive.json").exists()


def test_a_sliding_window_does_not_count_padding():
    """Padding stands between soft slots and text, where a window would count it: prompts of
    different lengths get batches of their own, and rows that are padded nevertheless are
    refused."""
    model = windowed()
    prefix = soft_prefix(model, slots=4)
    long, short = (
        Layout.of(model.tokenizer, None, prompt, soft=4) for prompt in ("efg hijk lmn", "jk")
    )
    with torch.no_grad():
        alone = model(**soft_inputs(model, [short], [prefix]))[0, -1]
        unwindowed = model(**soft_inputs(model, [long], [prefix]))[0, -1]
        wide = windowed(window=64)
        assert (wide(**soft_inputs(wide, [long], [prefix]))[0, -1] - unwindowed).abs().max() > 1e-4
        with pytest.raises(LayoutError, match=r"17 slots exceed the sliding window of 12 tokens"):
            model(**soft_inputs(model, left_pad([short, long]), [prefix] * 2))
        both = wide(**soft_inputs(wide, left_pad([short, long]), [prefix] * 2))[:, -1]
    assert (both[0] - alone).abs().max() < 1e-5


def test_prompts_of_one_length_share_a_batch_under_a_sliding_window(tmp_path):
    model = windowed()
    folder = soft_set(tmp_path, model, SENTIMENT)
    method = methods.get("prefix", prefixes=folder)
    prompts, settings = ["efg hi", "jkl mn", "op"], {"length": 12, "samples": 2, "seed": 3}
    together, alone = (
        plan(model, method, SENTIMENT, "positive", prompts, None, trace="none", **settings, **more)
        for more in ({}, {"max_rows": 1})
    )
    assert [len(group) for group in together.batches] == [4, 2]
    texts = [
        generate(
            model, method, SENTIMENT, "positive", prompts, **settings, **more
        ).texts["text"].tolist()
        for more in ({}, {"max_rows": 1})
    ]  # fmt: skip
    assert texts[0] == texts[1]
    assert len(alone.batches) == 6
