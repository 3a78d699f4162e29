"""What a user's own pass reads inside `augmented`: rows as each alone, the layouts' ids, prompts in
chunks."""

import copy

import numpy as np
import pytest
import torch
from conftest import MODEL_CLASSES, load
from transformers import AutoConfig, DynamicCache

from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.errors import LayoutError
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.facts import facts_of

PLAIN, BARE = "TransformersModel", "network"
RULE = Augmentation(alpha=1.5, phase="after_span")
TAIL = torch.tensor([[40, 41, 42], [50, 51, 52]])
every_class = pytest.mark.parametrize("kind", [*MODEL_CLASSES, PLAIN, BARE])


def loaded(name, kind):
    """A model, and two layouts of different lengths."""
    model = load(name, "float64", PLAIN if kind == BARE else kind)
    layouts = [
        Layout.of(model.tokenizer, *texts)
        for texts in (("Very positive:", "The lake is"), ("Good:", "A"))
    ]
    return (facts_of(model).network if kind == BARE else model), layouts


def bloom():
    from test_attention import bridge_of

    config = AutoConfig.for_model("bloom", vocab_size=512, hidden_size=32, n_layer=2, n_head=4)
    return bridge_of(config, "tiny-bloom")


@torch.no_grad()
def read(model, ids, **settings):
    output = model(ids, **settings)
    return output if isinstance(output, torch.Tensor) else output.logits


def cached(model):
    """A new cache, as the arguments that a pass takes."""
    if hasattr(model, "original_model") or hasattr(model, "config"):
        return {cache_name(facts_of(model).network): DynamicCache()}
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    return {"past_kv_cache": TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)}


def check_padded_rows(model, layouts, atol=1e-10):
    """Logits of padded rows in one pass, in two with a cache, and token by token, are those of the
    rows alone."""
    padded = left_pad(layouts)
    ids, mask = PaddedRows.of(padded)[1:3]
    with_tails = torch.cat([ids, TAIL], dim=1)
    every = torch.cat([mask, torch.ones_like(TAIL)], dim=1)
    wanted = []
    for layout, tail in zip(layouts, TAIL, strict=True):
        with augmented(model, RULE, layout):
            wanted.append(read(model, torch.cat([layout.tensor[0], tail])[None])[0, -4:])
    plain = read(model, torch.cat([layouts[0].tensor[0], TAIL[0]])[None])[0, -4:]
    assert (plain - wanted[0]).abs().max() > 10 * atol
    hooked = "past_kv_cache" in cached(model)
    with augmented(model, RULE, padded):
        by_passes = [read(model, with_tails, attention_mask=every)[:, -4:]]
        for cuts in ([], [1, 2]):
            cache, parts, held = cached(model), [], ids.shape[1]
            parts.append(read(model, ids, attention_mask=mask, **cache)[:, -1:])
            for part in TAIL.tensor_split(cuts, dim=1):
                held += part.shape[1]
                pass_mask = torch.ones_like(part) if hooked else every[:, :held]
                parts.append(read(model, part, attention_mask=pass_mask, **cache))
            by_passes.append(torch.cat(parts, dim=1))
    for logits in by_passes:
        torch.testing.assert_close(logits, torch.stack(wanted), atol=atol, rtol=0)


@every_class
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_padded_rows_are_the_rows_alone(name, kind):
    check_padded_rows(*loaded(name, kind), 1e-5 if kind == "HookedTransformer" else 1e-10)


def test_padded_rows_of_a_model_that_makes_positions_of_its_mask():
    model = bloom()
    check_padded_rows(model, loaded("tiny-gpt2", PLAIN)[1], 1e-5)


def test_copies_of_padded_rows_are_the_rows_alone():
    net, layouts = loaded("tiny-gpt2", BARE)
    padded = left_pad(layouts)
    ids, mask = (tensor.repeat_interleave(3, 0) for tensor in PaddedRows.of(padded)[1:3])
    with augmented(net, RULE, padded):
        one = read(net, ids[::3], attention_mask=mask[::3])
        of_ids = read(net, ids, attention_mask=mask)
        embedded = net.get_input_embeddings()(ids)
        of_vectors = net(inputs_embeds=embedded, attention_mask=mask).logits
    torch.testing.assert_close(of_ids, one.repeat_interleave(3, 0))
    torch.testing.assert_close(of_vectors[:, -1], of_ids[:, -1])


def test_padded_rows_that_cannot_be_told_their_positions_are_refused():
    net, layouts = loaded("tiny-gpt2", BARE)
    padded = left_pad(layouts)
    ids, mask = PaddedRows.of(padded)[1:3]

    class Fixed(type(net)):
        def forward(self, input_ids, attention_mask=None, **others):
            return super().forward(input_ids, attention_mask=attention_mask, **others)

    net = copy.deepcopy(net)
    net.__class__ = Fixed
    with (
        augmented(net, RULE, padded),
        pytest.raises(LayoutError, match="Fixed takes no position_ids"),
    ):
        read(net, ids, attention_mask=mask)
    with augmented(net, RULE, layouts[0]):
        read(net, layouts[0].tensor)


@every_class
def test_a_mask_that_is_not_that_of_the_layouts_is_an_error_with_a_cache_too(kind):
    if kind == "HookedTransformer":  # it keeps the mask itself
        return
    model, layouts = loaded("tiny-llama", kind)
    padded = left_pad(layouts)
    ids, mask = PaddedRows.of(padded)[1:3]
    cache = cached(model)
    with augmented(model, RULE, padded):
        read(model, ids, attention_mask=mask, **cache)
        with pytest.raises(LayoutError, match="has no attention_mask"):
            read(model, TAIL[:, :1], **cache)
        with pytest.raises(LayoutError, match="row 1 masks 0 slots where its layout has"):
            ones = torch.ones(2, ids.shape[1] + 1, dtype=torch.long)
            read(model, TAIL[:, :1], attention_mask=ones, **cache)
        with pytest.raises(LayoutError, match=r"row 1 masks .* \(slot 0 differs\)"):
            read(model, ids, attention_mask=mask.flip(1))


@every_class
def test_other_ids_than_the_layouts_are_refused(kind):
    model, layouts = loaded("tiny-gpt2", kind)
    padded = left_pad(layouts)
    ids, mask = PaddedRows.of(padded)[1:3]
    changed = ids.clone()
    changed[1, -2] = 65
    message = rf"row 1 reads token 65.* in slot {ids.shape[1] - 2}, where its layout has token"
    for rule in (RULE, None):
        with augmented(model, rule, padded):
            wanted = read(model, ids, attention_mask=mask)
            with pytest.raises(LayoutError, match=message) as error:
                read(model, changed, attention_mask=mask)
            assert "\n" not in str(error.value)
            assert "check_ids=False" in str(error.value)
    # What padding holds does not matter, and one argument opts out.
    free = torch.where(mask == 1, ids, 7)
    with augmented(model, RULE, padded):
        logits = read(model, free, attention_mask=mask)
        assert (logits - read(model, ids, attention_mask=mask))[mask == 1].abs().max() < 1e-12
    with augmented(model, RULE, padded, check_ids=False):
        assert (read(model, changed, attention_mask=mask) - wanted).abs().max() > 1e-6
    # One layout for several rows.
    rows = layouts[0].tensor.repeat(3, 1)
    with augmented(model, RULE, layouts[0]):
        read(model, rows)
        rows[2, 1] = 66
        with pytest.raises(LayoutError, match="row 2 reads token 66.* in slot 1,"):
            read(model, rows)


@pytest.mark.parametrize("kind", MODEL_CLASSES)
def test_texts_are_compared_as_the_model_reads_them(kind):
    model, layouts = loaded("tiny-gpt2", kind)
    text = "Very positive:The lake is"
    with augmented(model, RULE, layouts[0]):
        wanted = read(model, layouts[0].tensor)
        assert torch.equal(read(model, text), wanted)
        assert torch.equal(model.run_with_cache(text)[0], wanted)
        for other_text in ("Very negative:The lake is", "The lake is"):
            with pytest.raises(LayoutError, match="row 0 reads token"):
                read(model, other_text)
        with pytest.raises(LayoutError, match="row 0 reads token"):
            model.generate("Very negative:The lake is", max_new_tokens=1, verbose=False)
        model.generate(layouts[0].tensor, max_new_tokens=2, verbose=False)


def test_generate_on_other_ids_is_refused():
    net, layouts = loaded("tiny-gpt2", BARE)
    ids = layouts[0].tensor
    settings = {"max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 1}
    with augmented(net, RULE, layouts[0]):
        net.generate(ids, attention_mask=torch.ones_like(ids), num_beams=2, **settings)
        with pytest.raises(LayoutError, match="row 0 reads token"):
            net.generate(ids.flip(1), attention_mask=torch.ones_like(ids), **settings)


@pytest.mark.parametrize("kind", [PLAIN, "TransformerBridge"])
@pytest.mark.parametrize(
    "rule",
    [
        RULE,
        Augmentation(alpha=0.8, law="target", tau=0.3, phase="after_span"),
        (
            Augmentation(alpha=1.0, law="target", tau=0.3),
            Augmentation(alpha=1.0, law="target", tau=0.2, span="bos"),
        ),
    ],
    ids=["log", "target", "targets"],
)
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_a_prompt_in_chunks_is_the_prompt_in_one(kind, rule, chunk):
    """Also of padded rows, with a recorder, in float64."""
    model, layouts = loaded("tiny-llama", kind)
    net = facts_of(model).network
    padded = left_pad(layouts)
    ids, mask = PaddedRows.of(padded)[1:3]
    runs = []
    for size in (None, chunk):
        recorder = Recorder(model.cfg.n_layers, model.cfg.n_heads)
        recorder.begin(padded)
        with augmented(model, rule, padded, recorder):
            made = net.generate(
                ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None,
                pad_token_id=1, prefill_chunk_size=size, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        runs.append((torch.stack(made.logits), recorder.dataset(padded, ("own",), [4, 4])))
    torch.testing.assert_close(runs[0][0], runs[1][0], atol=1e-10, rtol=0)
    for name in runs[0][1].data_vars:
        np.testing.assert_allclose(runs[0][1][name], runs[1][1][name], atol=1e-6, err_msg=name)


def test_the_beginning_of_a_layout_is_read_as_in_a_whole_pass():
    for kind in (MODEL_CLASSES[-1], BARE):
        model, layouts = loaded("tiny-gpt2", kind)
        with augmented(model, RULE, layouts[0]):
            in_one_pass = read(model, layouts[0].tensor)
            for stop in range(1, len(layouts[0])):
                beginning = read(model, layouts[0].tensor[:, :stop])
                torch.testing.assert_close(beginning, in_one_pass[:, :stop], atol=1e-10, rtol=0)


def test_chunks_of_other_ids_are_named_by_their_slot():
    net, layouts = loaded("tiny-llama", BARE)
    ids, cache = layouts[0].tensor.clone(), cached(net)
    ids[0, -1] = 65
    with augmented(net, RULE, layouts[0]):
        read(net, ids[:, :4], **cache)
        with pytest.raises(LayoutError, match=rf"reads token 65 in slot {ids.shape[1] - 1},"):
            read(net, ids[:, 4:], **cache)
