"""The bias inside a network: exact, confined to what was selected, and gone afterwards."""

import numpy as np
import pytest
import torch
from conftest import TINY, hooks_left, load
from oracle import oracle_logits

from lapa2_interp import Augmentation, augmented
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.bias.theory import shifted_share
from lapa2_interp.errors import AugmentationError, LayoutError
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.hook_names import HOOK_PATTERN, HOOK_SCORES

GENERATED = [70, 81, 92, 103, 114]


def branch(model, prefix="ab cd:", prompt="efg hi"):
    return Layout.of(model.tokenizer, prefix, prompt)


def ids_of(layout, generated=()):
    return torch.tensor([[*layout.ids, *generated]])


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-12), (torch.bfloat16, 2**-5)])
def test_cached_heads_are_the_repeated_tensor_whatever_is_done_with_them(dtype, rounding):
    from transformers.models.llama.modeling_llama import repeat_kv

    from lapa2_interp.attention.cached_heads import CachedHeads

    rng = torch.Generator().manual_seed(2)
    buffer = torch.randn(4, 3, 7, 8, generator=rng, dtype=torch.float64).to(dtype)[:, :, :5]
    queries, patterns = (
        torch.randn(4, 6, 2, n, generator=rng, dtype=torch.float64).to(dtype) for n in (8, 5)
    )
    expected, heads = repeat_kv(buffer, 2), repeat_kv(buffer.as_subclass(CachedHeads), 2)
    assert isinstance(heads, CachedHeads)
    assert heads.shape == expected.shape == (4, 6, 5, 8)
    done = [
        lambda kv: torch.matmul(queries, kv.transpose(-2, -1)),
        lambda kv: torch.matmul(patterns, kv),
        lambda kv: queries @ kv.transpose(2, 3),
        lambda kv: torch.matmul(kv, kv.transpose(-2, -1)),
        lambda kv: torch.einsum("bhqd,bhkd->bhqk", queries, kv),
        lambda kv: torch.cat([kv, kv], dim=2),
        lambda kv: torch.nn.functional.scaled_dot_product_attention(queries, kv, value=kv),
        lambda kv: kv.transpose(-2, -1),
        lambda kv: kv[:, 1:, None],
        lambda kv: kv.reshape(4, 2, 3, 40),
        lambda kv: 2 * kv.float().flip(1),
    ]
    for do in done:
        result, wanted = do(heads), do(expected)
        assert result.shape == wanted.shape
        assert torch.allclose(result + 0, wanted, rtol=rounding, atol=rounding)
        again = do(expected.as_subclass(CachedHeads))  # nothing is shared
        assert torch.allclose(again + 0, wanted, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("name", TINY)
def test_no_step_copies_the_keys_of_shared_heads(name, monkeypatch):
    from transformers.models.llama import modeling_llama

    from lapa2_interp.attention.cache import new_rows
    from lapa2_interp.attention.cached_heads import CachedHeads

    model = load(name)
    monkeypatch.setattr(
        CachedHeads,
        "_copied",
        lambda self: pytest.fail("copied") if self.repeats > 1 else self.as_subclass(torch.Tensor),
    )
    real, repeated = modeling_llama.repeat_kv, []
    monkeypatch.setattr(
        modeling_llama, "repeat_kv", lambda kv, n: repeated.append(real(kv, n)) or repeated[-1]
    )
    rows = left_pad([branch(model)])
    state = new_rows(model)
    with torch.no_grad(), augmented(model, Augmentation(alpha=0.7), rows):
        state.prompt_pass(rows)
        state.expand(torch.zeros(3, dtype=torch.long), capacity=len(rows[0]) + 2)
        state.read_tokens(torch.full((3, 1), 70))
    assert all(isinstance(tensor, CachedHeads) for tensor in repeated)  # and no copy
    assert len(repeated) == (
        4 * model.cfg.n_layers if name == "tiny-llama" else 0
    )  # keys and values, of two calls


def bridge_of(config, name):
    """A bridge around a random model of another architecture, with the byte tokenizer."""
    from transformers import AutoModelForCausalLM

    from lapa2_interp.models.lens_classes import make_bridge
    from lapa2_interp.models.load import load_tokenizer

    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return make_bridge(network, load_tokenizer("tiny-gpt2"), name, torch.float32, "cpu")


def patterns_of(model, ids, *contexts):
    from contextlib import ExitStack

    patterns = {}
    reads = [
        (HOOK_PATTERN.format(i), lambda p, hook, i=i: patterns.__setitem__(i, p.clone()))
        for i in range(model.cfg.n_layers)
    ]
    with torch.no_grad(), ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        with model.hooks(fwd_hooks=reads):
            logits = model(ids)
    return logits, patterns


@pytest.mark.parametrize("layers", ["all", (1,), (2, 3)])
def test_exact_law_in_the_first_augmented_layer(tiny, model_class, layers):
    """logit(A') - logit(A) = b per head and query; the renormalised attention on the other keys
    does not move."""
    model = load(tiny, "float64", model_class)
    layout = branch(model)
    augmentation = Augmentation(alpha=0.8, layers=layers)
    ids = ids_of(layout, GENERATED)
    first = 0 if layers == "all" else layers[0]
    before, after = (
        patterns_of(model, ids, augmented(model, rule, layout))[1][first][0]
        for rule in (None, augmentation)
    )
    start, stop = layout.prefix
    bias = layout.bias(augmentation, np.arange(ids.shape[1]))
    share = before[:, :, start:stop].sum(-1).numpy()
    assert (bias > 0).sum() == len(GENERATED) + 1
    queries = slice(layout.prompt.stop - 1, None)
    shifted = shifted_share(
        share[:, queries], np.broadcast_to(bias[queries], share[:, queries].shape)
    )
    assert np.abs(after[:, queries, start:stop].sum(-1).numpy() - shifted).max() < 1e-12
    outside = torch.ones(ids.shape[1], dtype=torch.bool)
    outside[start:stop] = False
    rest_before, rest_after = (
        p[:, :, outside] / p[:, :, outside].sum(-1, keepdim=True) for p in (before, after)
    )
    assert (rest_before - rest_after)[:, queries].abs().max() < 1e-12


@pytest.mark.parametrize(
    ("layers", "heads"),
    [
        *((rule, "all") for rule in ("all", "bottom", "top", "even", (2,))),
        ("all", ((1, 2), (3, 0))),
        ("odd", ((1, 1), (2, 2))),
    ],
)
def test_layers_and_heads_touch_exactly_what_was_selected(tiny, layers, heads):
    """Scores before and after the hook differ on the span's keys of the selected heads, and nowhere
    else."""
    model = load(tiny, "float64")
    layout = branch(model)
    augmentation = Augmentation(alpha=1, layers=layers, heads=heads)
    selected = augmentation.head_mask(model.cfg.n_layers, model.cfg.n_heads)
    before, after = {}, {}

    def keep(store):
        return [
            (HOOK_SCORES.format(i), lambda s, hook, i=i: store.__setitem__(i, s[0].clone()))
            for i in range(model.cfg.n_layers)
        ]

    first, last = (model.hooks(fwd_hooks=keep(store)) for store in (before, after))
    with torch.no_grad(), first, augmented(model, augmentation, layout), last:
        model(ids_of(layout, GENERATED))
    for i in range(model.cfg.n_layers):
        moved = (after[i] - before[i]).abs() > 1e-12
        for head in range(model.cfg.n_heads):
            assert bool(moved[head].any()) == bool(selected[i, head])
            queries, keys = torch.nonzero(moved[head], as_tuple=True)
            if selected[i, head]:
                assert sorted(set(keys.tolist())) == list(range(*layout.prefix))
                assert sorted(set(queries.tolist())) == list(
                    range(layout.prompt.stop - 1, len(layout) + len(GENERATED))
                )


def test_left_padded_rows_of_different_prefixes_equal_each_row_alone(tiny, model_class):
    model = load(tiny, "float64", model_class)
    rows = PaddedRows.of(
        [
            branch(model),
            branch(model, "a:", "b"),
            branch(model, None, "longer prompt than the others"),
        ]
    )
    augmentations = [Augmentation(alpha=0.5), Augmentation(alpha=2, profile="released"), None]
    more = torch.tensor([GENERATED] * 3)
    later = rows.positions[:, -1:] + 1 + torch.arange(len(GENERATED))
    extra = (
        {"position_ids": torch.cat([rows.positions, later], 1)}
        if model_class == "TransformerBridge"
        else {}
    )
    with torch.no_grad(), augmented(model, augmentations, rows.layouts):
        mask = torch.cat([rows.mask, torch.ones_like(more)], 1)
        logits = model(torch.cat([rows.ids, more], 1), attention_mask=mask, **extra)
    for row, layout in enumerate(rows.layouts):
        expected, _ = oracle_logits(model, layout, GENERATED, augmentations[row])
        assert (logits[row, len(layout) - 1 :] - expected).abs().max() < 1e-9


def test_every_hook_is_gone_after_success_and_after_an_exception(tiny, model_class):
    model = load(tiny, "float32", model_class)
    layout = branch(model)
    plain = patterns_of(model, ids_of(layout))[0]
    assert hooks_left(model) == ([], [])
    with augmented(model, Augmentation(alpha=1), layout):
        assert len(hooks_left(model)[0]) >= 2 * model.cfg.n_layers
        model(ids_of(layout))
    assert hooks_left(model) == ([], [])
    with pytest.raises(ZeroDivisionError), augmented(model, Augmentation(alpha=1), layout):
        raise ZeroDivisionError
    assert hooks_left(model) == ([], [])
    with (
        pytest.raises(AugmentationError),
        augmented(model, Augmentation(alpha=1, layers=(9,)), layout),
    ):
        pass
    assert hooks_left(model) == ([], [])
    assert torch.equal(patterns_of(model, ids_of(layout))[0], plain)


def test_the_users_own_hooks_survive(model_class):
    model = load("tiny-gpt2", "float32", model_class)
    layout = branch(model)
    seen = []
    model.add_hook(HOOK_PATTERN.format(0), lambda p, hook: seen.append(1))
    try:
        with augmented(model, Augmentation(alpha=1), layout):
            model(ids_of(layout))
        model(ids_of(layout))
    finally:
        model.reset_hooks()
    assert len(seen) == 2


def test_run_with_cache_and_run_with_hooks_see_the_augmented_model(tiny, model_class):
    model = load(tiny, "float64", model_class)
    layout = branch(model)
    augmentation = Augmentation(alpha=1)
    ids = ids_of(layout, GENERATED)
    expected, patterns = oracle_logits(model, layout, GENERATED, augmentation)
    with torch.no_grad(), augmented(model, augmentation, layout):
        logits, cache = model.run_with_cache(ids)
        again = model.run_with_hooks(ids, fwd_hooks=[])
    assert (logits[0, len(layout) - 1 :] - expected).abs().max() < 1e-10
    assert torch.equal(logits, again)
    for i in range(model.cfg.n_layers):
        assert (cache[HOOK_PATTERN.format(i)][0] - patterns[i]).abs().max() < 1e-10


def test_gradients_flow_through_the_bias(tiny):
    model = load(tiny, "float64")
    layout = branch(model)
    with augmented(model, Augmentation(alpha=1), layout):
        embedded = (
            model.original_model.get_input_embeddings()(ids_of(layout)).detach().requires_grad_()
        )
        model(embedded)[0, -1, 3].backward()
    assert embedded.grad[0, layout.prefix.start].abs().sum() > 0


def test_patterns_keep_the_dtype_of_a_model(model_class):
    model = load("tiny-llama", "bfloat16", model_class)
    layout = branch(model)
    block = augmented(model, Augmentation(alpha=2), layout)
    logits, patterns = patterns_of(model, ids_of(layout, GENERATED), block)
    assert {pattern.dtype for pattern in patterns.values()} == {logits.dtype} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_users_edits_inside_the_block_count(tiny, model_class, dtype):
    """An edit of scores and one of the pattern, made inside `augmented`, reach the logits as they
    do outside."""
    model = load(tiny, dtype, model_class)
    layout = branch(model)
    ids = ids_of(layout, GENERATED)

    def on_scores(scores, hook):
        scores = scores.clone()
        scores[..., 2] -= 20
        return scores

    def on_pattern(pattern, hook):
        return pattern.roll(1, dims=-1)

    for name, edit in ((HOOK_SCORES.format(1), on_scores), (HOOK_PATTERN.format(2), on_pattern)):
        with torch.no_grad():
            plain = model.run_with_hooks(ids, fwd_hooks=[(name, edit)])
            with augmented(model, Augmentation(alpha=0), layout):
                same = model.run_with_hooks(ids, fwd_hooks=[(name, edit)])
            with augmented(model, Augmentation(alpha=1), layout):
                edited, unedited = model.run_with_hooks(ids, fwd_hooks=[(name, edit)]), model(ids)
        assert torch.equal(same, plain)
        assert (edited - unedited).abs().max() > 1e-2


def test_the_exact_softmax_keeps_no_scores(tiny):
    model = load(tiny, "float64")
    model(torch.tensor([[1, 2, 3]]))
    assert not any(hasattr(block.attn.hook_attn_scores, "latest") for block in model.blocks)


def test_soft_slots_in_a_cache(tiny):
    """Keys without ids in front of BOS: the exact law holds on them, and the trace finds every part
    at its place."""
    from transformers import DynamicCache

    from lapa2_interp.attention.recorder import Recorder

    model = load(tiny, "float64")
    cfg, soft = model.cfg, 5
    layout = Layout.of(model.tokenizer, None, "efg hi", soft=soft)
    heads = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
    rng = torch.Generator().manual_seed(0)
    prefix = torch.randn(
        cfg.n_layers, 2, 1, heads, soft, cfg.d_head, generator=rng, dtype=torch.float64
    )

    def last_rows(augmentation, observer=None):
        cache, patterns = DynamicCache(), {}
        for layer in range(cfg.n_layers):
            cache.update(*prefix[layer], layer)
        reads = [
            (HOOK_PATTERN.format(i), lambda p, hook, i=i: patterns.__setitem__(i, p[0, :, -1]))
            for i in range(cfg.n_layers)
        ]
        with (
            torch.no_grad(),
            augmented(model, augmentation, layout, observer),
            model.hooks(fwd_hooks=reads),
        ):
            model(
                layout.tensor,
                attention_mask=torch.ones(1, len(layout), dtype=torch.long),
                position_ids=torch.arange(len(layout.ids))[None],
                **{cache_name(model.original_model): cache},
            )
        return patterns

    augmentation, recorder = Augmentation(alpha=0.9), Recorder(cfg.n_layers, cfg.n_heads)
    recorder.begin([layout])
    before, after = last_rows(None)[0], last_rows(augmentation, recorder)
    bias = layout.bias(augmentation, np.array([len(layout) - 1]))
    assert bias == pytest.approx(0.9 * np.log((soft + 6) / soft))
    share = before[:, :soft].sum(-1).numpy()
    assert (
        np.abs(
            after[0][:, :soft].sum(-1).numpy()
            - shifted_share(share, np.broadcast_to(bias, share.shape))
        ).max()
        < 1e-12
    )
    trace = recorder.dataset([layout], ["prefix"], [1]).isel(branch=0, sample=0, step=0)
    for layer, rows in after.items():
        for name, part in (
            ("prefix", slice(0, 5)),
            ("bos", slice(5, 6)),
            ("prompt", slice(6, 12)),
            ("released_slice", slice(0, 5)),
        ):
            assert (
                np.abs(trace[name][layer].to_numpy() - rows[:, part].sum(-1).numpy()).max() < 1e-6
            )
    assert trace["l_kv"] == 12


def test_a_cache_that_drops_keys_is_an_error():
    from transformers import DynamicCache, MistralConfig

    config = MistralConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    model = bridge_of(config, "tiny-mistral")
    layout = branch(model)
    cached = {cache_name(model.original_model): DynamicCache(config=config)}
    with torch.no_grad(), augmented(model, Augmentation(alpha=1), layout):
        model(layout.tensor, **cached)
        with pytest.raises(LayoutError, match="sliding window drops old ones"):
            model(torch.tensor([[70]]), **cached)


@pytest.mark.parametrize(
    ("layouts", "masked", "message"),
    [
        ("padded", "none", "no attention_mask"),
        ("unpadded", "right", "row 1 masks 5 slots where its layout has 0"),
        ("swapped", "right", "row 0 masks 0 slots where its layout has 5"),
        ("first alone", "right", "row 1 masks 5 slots where its layout has 0"),
        ("padded", "ones", "row 1 masks 0 slots where its layout has 5"),
    ],
)
def test_padding_that_is_not_the_layouts_is_an_error(tiny, model_class, layouts, masked, message):
    """Each of these would put the span on other keys and change the result without a word."""
    model = load(tiny, "float32", model_class)
    plain = [branch(model, "ab cd:", "efg hi"), branch(model, "ab:", "efgh")]
    rows = left_pad(plain)
    ids = torch.tensor([(layout.ids[0],) * layout.pad + layout.ids for layout in rows])
    mask = torch.ones_like(ids)
    if masked == "right":
        mask[1, : rows[1].pad] = 0
    chosen = {"padded": rows, "unpadded": plain, "swapped": rows[::-1], "first alone": rows[0]}[
        layouts
    ]
    settings = {} if masked == "none" else {"attention_mask": mask}
    with (
        augmented(model, Augmentation(alpha=1), chosen),
        pytest.raises(LayoutError, match=message),
    ):
        model(ids, **settings)


def test_alpha_zero_changes_nothing(tiny, model_class):
    model = load(tiny, "float32", model_class)
    layout = branch(model)
    plain = patterns_of(model, ids_of(layout, GENERATED))[0]
    for augmentation in (
        None,
        Augmentation(alpha=0),
        Augmentation(alpha=0, law="linear", profile="released"),
    ):
        logits = patterns_of(
            model, ids_of(layout, GENERATED), augmented(model, augmentation, layout)
        )[0]
        assert torch.equal(logits, plain)
