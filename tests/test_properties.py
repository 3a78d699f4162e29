"""What holds for any lengths, laws, spans, texts and numbers, tried on examples that are looked for.

Each oracle is a few plain lines of its own. Failures are shrunk to a small example.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import generate, load
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from oracle import oracle_bias

from lapa2_interp import Augmentation, Layout, augmented, load_model
from lapa2_interp.attention.batch_bias import BatchBias
from lapa2_interp.bias.tokens import decode_continuation
from lapa2_interp.errors import LayoutError
from lapa2_interp.generation.sampling import NOTHING, draw, uniforms
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.prefixes.likelihood import TextRows, text_nll
from lapa2_interp.tasks.task import Attribute

settings.register_profile(
    "lapa2", deadline=None, derandomize=True, database=None, print_blob=False, max_examples=200,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
settings.load_profile("lapa2")
ALPHA = st.floats(0, 4, allow_subnormal=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=24)
"""Any text that UTF-8 can write."""


@pytest.fixture(
    scope="module", params=["gpt2", "tiny-gpt2", "tiny-llama", "tiny-neox", "smollm2-135m"]
)
def tokenizer(request, gpt2_tokenizer):
    return gpt2_tokenizer if request.param == "gpt2" else shared_tokenizer(request.param)


@st.composite
def layouts(draw, soft=True):
    """A row of made-up tokens: BOS or none, a hard or a soft prefix or none, a prompt."""
    n_bos = draw(st.integers(0, 2))
    n_soft = draw(st.sampled_from([0, 1, 5])) if soft else 0
    l_pre = n_soft or draw(st.integers(0, 6))
    l_pro = draw(st.integers(1, 9))
    hard = 0 if n_soft else l_pre
    ids = tuple(range(10, 10 + n_bos + hard + l_pro))
    counted = n_soft or n_bos + (hard or l_pro)
    return Layout(ids, tuple(map(str, ids)), n_bos, l_pre, l_pro, counted, n_soft)


@st.composite
def rules(draw):
    law = draw(st.sampled_from(["log", "linear", "sqrt", "constant"]))
    return Augmentation(
        alpha=draw(ALPHA),
        law=law,
        l0=draw(st.integers(1, 4000)) if law == "constant" else None,
        phase=draw(st.sampled_from(["decode", "last_query", "after_span"])),
        profile=draw(st.sampled_from(["paper", "released"])),
    )


@given(layouts(), rules(), st.integers(0, 3), st.integers(1, 7), st.data())
def test_the_bias_of_any_row_is_the_oracles(layout, rule, pad, more, data):
    total = layout.n_live + more
    if data.draw(st.booleans(), "a span of slots"):
        start = data.draw(st.integers(0, layout.n_live - 1))
        span = ((start, data.draw(st.integers(start + 1, layout.n_live))),)
    else:
        span = data.draw(st.sampled_from(["prefix", "prefix+bos", "released"]))
        assume(span != "prefix+bos" or (layout.n_bos and not layout.soft))
    rule = rule.model_copy(update={"span": span})
    expected = oracle_bias(
        n_bos=layout.n_bos, l_pre=layout.l_pre, l_pro=layout.l_pro, counted=layout.counted, total=total,
        alpha=rule.alpha, law=rule.law, l0=rule.l0, span=span, length=rule.length_rule,
        phase=rule.phase, released=rule.profile == "released", soft=layout.soft > 0,
    )  # fmt: skip
    padded = layout.padded(len(layout) + pad)
    live = np.delete(np.arange(pad + total), slice(layout.soft, layout.soft + pad))
    scores = torch.zeros(1, 2, pad + total, pad + total, dtype=torch.float64)
    added = BatchBias([(rule,)], [padded], (1, 2)).add(0, scores, 0)[0, 0].numpy()
    assert np.abs(added[np.ix_(live, live)] - expected).max() < 1e-9
    assert not added[:, np.setdiff1d(np.arange(pad + total), live)].any(), "padding"


def pattern(scores):
    return scores.float().softmax(-1)


@settings(max_examples=100)
@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from(["-inf", "smallest"]),
    st.floats(0, 6e4),
    rules(),
    layouts(soft=False),
    st.integers(0, 2**31),
)
def test_a_pattern_stays_one_in_any_precision(dtype, hidden, size, rule, layout, seed):
    """Rows sum to 1, blocked keys stay at 0, and shares among the keys of a span, and among the
    others, do not change: scores as large as the precision holds included."""
    assume(layout.l_pre or layout.n_bos)
    n = len(layout) + 3
    scores = torch.randn(
        1, 1, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    scores = (scores * size / scores.abs().max()).to(dtype)
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    scores[..., later] = -torch.inf if hidden == "-inf" else torch.finfo(dtype).min
    before, after = (
        pattern(scores),
        pattern(BatchBias([(rule,)], [layout], (1, 1)).add(0, scores, 0)),
    )
    assert after.isfinite().all()
    assert not after[..., later].any()
    assert (after.sum(-1) - 1).abs().max() < 1e-5
    inside = torch.zeros(n, dtype=torch.bool)
    for start, stop in layout.spans(rule.span):
        inside[start:stop] = True
    for part in (inside, ~inside):
        sums = [shares[..., part].sum(-1, keepdim=True) for shares in (before, after)]
        known = ((sums[0] > 1e-6) & (sums[1] > 1e-6))[..., 0]
        shares = [
            shares[..., part] / total for shares, total in zip((before, after), sums, strict=True)
        ]
        if known.any():
            assert (shares[0] - shares[1])[known].abs().max() < 1e-3


@given(
    st.lists(
        st.sampled_from([-math.inf, -3.0, 0.0, 0.0, 1.5, 1.5, 60.0]) | st.floats(-40, 40, width=16),
        min_size=1, max_size=40,
    ),
    st.integers(1, 45),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)  # fmt: skip
@example([0.0, 0.0], 1, 0.999999, torch.float32)
def test_a_draw_is_the_oracles(weights, k, uniform, dtype):
    """Ties, excluded tokens, one token, more asked than there are."""
    weights = torch.tensor(weights).to(dtype)
    token = int(draw(weights[None], torch.tensor([uniform], dtype=torch.float64), top_k=k))
    numbers = weights.double().tolist()
    top_ids = sorted(sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))[:k])
    best = max(numbers)
    if best == -math.inf:
        assert token == NOTHING
        return
    shares = [math.exp(numbers[i] - best) for i in top_ids]
    target, so_far = uniform * sum(shares), 0.0
    assert token in top_ids
    assert numbers[token] > -math.inf
    for i, share in zip(top_ids, shares, strict=True):
        if i == token:
            assert so_far <= target * (1 + 1e-12) + 1e-300
            assert target <= (so_far + share) * (1 + 1e-12)
        so_far += share


@pytest.mark.parametrize("vocab", [2, 250_000])
@pytest.mark.parametrize("k", [1, 2, 200, 250_000])
def test_small_and_large_vocabularies(vocab, k):
    weights = torch.zeros(3, vocab, dtype=torch.bfloat16)
    weights[1, -1], weights[2, 0] = 9, -math.inf
    n_kept = min(k, vocab)
    low, high = torch.zeros(3), torch.full((3,), 1 - 1e-7)
    last = n_kept - 1  # of equal weights the smaller ids are kept
    assert draw(weights, low, top_k=k)[[0, 2]].tolist() == [0, 1]
    assert draw(weights, high, top_k=k)[0] == last
    assert draw(weights, high, top_k=k)[1] == vocab - 1


@pytest.fixture(scope="module", params=[2, 100_000])
def of_words(request, tmp_path_factory):
    """A model with a vocabulary of whole words, and their number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = str(tmp_path_factory.mktemp("words"))
    words = {f"w{i}": i for i in range(request.param)}
    stored = Tokenizer(models.WordLevel(words, unk_token="w0"))
    stored.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    last = f"w{request.param - 1}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=stored, bos_token=last, eos_token=last)
    PreTrainedTokenizerFast.save_pretrained(tokenizer, folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return load_model(folder, device="cpu", dtype="float32"), len(words)


@pytest.mark.parametrize(
    "method", [methods.get("prefix"), methods.get("air-decoding"), methods.get("preadd", lam=2)]
)
def test_models_with_small_and_large_vocabularies_write_what_the_oracle_draws(of_words, method):
    model, vocab = of_words
    task = load_task("sentiment").model_copy(
        update={"attributes": {"a": Attribute(prefix="w0"), "b": Attribute(prefix="w0 w0")}}
    )
    made = generate(model, method, task, "a", ["w0 w1"], length=12, samples=3, seed=1, top_k=vocab)
    tokens = np.stack(made.texts["tokens"])
    assert tokens.min() >= 0
    assert tokens.max() < vocab
    assert (tokens.max() > 65_535) == (vocab > 65_535)
    assert (made.trace["prefix"] <= 1).all()
    if method.name == "prefix":
        for row in made.texts.itertuples():
            layout = Layout.of(model.tokenizer, "w0", "w0 w1")
            ids = torch.tensor([[*layout.ids, *row.tokens]])
            with torch.no_grad():
                logits = model(ids)[0, len(layout) - 1 : -1]
            uniform = torch.from_numpy(uniforms(1, "w0 w1", row.sample, row.n_tokens))
            assert draw(logits, uniform, top_k=vocab).tolist() == list(row.tokens)


def test_a_token_without_an_embedding_is_named(of_words):
    """A tokenizer that knows more words than its model."""
    model, vocab = of_words
    layout = Layout.of(model.tokenizer, "w0", "w0 w1")
    wrong = replace(layout, ids=(*layout.ids[:-1], vocab))
    message = f"token {vocab} has no embedding: the model has {vocab} tokens"
    for context, text in ((wrong, [0]), (layout, [0, vocab]), (layout, [vocab])):
        with pytest.raises(LayoutError, match=message):
            teacher_forced(model, context, [text])
    with pytest.raises(LayoutError, match="token -1 has no embedding"):
        teacher_forced(model, layout, [[-1]])
    with pytest.raises(LayoutError, match=message):
        text_nll(model.original_model, TextRows.of([[vocab, 0]], (0,), "cpu"))


@given(st.integers(0, 2**63), TEXT, st.integers(0, 2000), st.integers(1, 40), st.integers(0, 40))
def test_a_longer_stream_begins_with_a_shorter_one(seed, prompt, sample, steps, more):
    longer = uniforms(seed, prompt, sample, steps + more)
    assert (longer[:steps] == uniforms(seed, prompt, sample, steps)).all()
    assert ((longer >= 0) & (longer < 1)).all()


@settings(max_examples=150)
@given(prefix=st.none() | TEXT, prompt=TEXT.filter(bool))
@example(prefix="Very \u00e9", prompt="\u0301 \U0001f469\u200d\U0001f4bb")
@example(prefix=" ", prompt="\n\n")
@example(prefix="\u202e", prompt="\ufeffx")
@example(prefix="dk", prompt="e")  # SmolLM2 splits it as d, ke
def test_any_text_is_laid_out_in_every_family_of_tokenizers(tokenizer, prefix, prompt):
    """The ids are the tokenizer's own, the parts follow each other, and none is lost."""
    text = list(tokenizer((prefix or "") + prompt, add_special_tokens=False).input_ids)
    # The offsets of characters that a tokenizer has no token for are not to be relied on.
    assume(tokenizer.decode(text) == (prefix or "") + prompt)
    try:
        layout = Layout.of(tokenizer, prefix, prompt)
    except LayoutError:
        # A prefix without a token, or a prompt that ends in the token that begins in the prefix.
        own = tokenizer(prefix or "", add_special_tokens=False).input_ids
        last = tokenizer.decode(text[-1:])
        assert not own or (last.endswith(prompt) and len(last) > len(prompt))
        return
    assert list(layout.ids[layout.n_bos :]) == text
    assert layout.n_bos + layout.l_pre + layout.l_pro == len(layout.ids) == len(layout)
    assert layout.l_pro >= 1
    assert layout.bos.stop == layout.prefix.start
    assert layout.prefix.stop == layout.prompt.start
    assert (layout.l_pre > 0) == bool(prefix)
    assert "".join(layout.tokens[layout.n_bos :]) == (prefix or "") + prompt


@settings(max_examples=150)
@given(prompt=TEXT.filter(bool), more=TEXT)
@example(prompt="caf", more="\u00e9 \U0001f469\u200d\U0001f4bb")
def test_any_text_behind_a_prompt_is_read_back(tokenizer, prompt, more):
    tokens = tokenizer(more, add_special_tokens=False).input_ids
    if tokenizer.decode(tokens) == more:  # the tokenizer can write it at all
        assert decode_continuation(tokenizer, prompt, tokens) == more


def test_one_text_and_a_thousand():
    """The first of a thousand is the one; and so is one of a prompt that is a single token."""
    model, task = load("tiny-gpt2"), load_task("sentiment")
    made = {
        samples: generate(
            model, methods.get("prefix"), task, "positive", ["a"], Augmentation(alpha=1), length=4,
            samples=samples, seed=3,
        )
        for samples in (1, 1000)
    }  # fmt: skip
    many, one = made[1000].texts, made[1].texts
    assert len(many) == 1000
    assert len({tuple(tokens) for tokens in many["tokens"]}) > 500
    assert list(one["tokens"][0]) == list(many["tokens"][0])
    assert made[1].trace["prefix"].isel(sample=0).equals(made[1000].trace["prefix"].isel(sample=0))


def test_a_prompt_may_fill_the_context_but_for_the_text():
    model, task = load("tiny-gpt2"), load_task("sentiment")
    used = len(Layout.of(model.tokenizer, task.prefix("positive"), "aaaa"))
    cell = model, methods.get("prefix"), task, "positive"
    for more, fits in ((0, True), (1, False)):
        prompt = "a" * (4 + model.cfg.n_ctx - used - 5 + more)
        length = len(model.tokenizer(prompt).input_ids) + 5  # counts the prompt
        if fits:
            made = generate(*cell, [prompt], length=length, samples=2)
            assert (made.texts["n_tokens"] == 5).all()
        else:
            with pytest.raises(LayoutError, match="exceed the context of 256"):
                generate(*cell, [prompt], length=length, samples=2)


@pytest.mark.parametrize("name", ["tiny-gpt2", "smollm2-135m"])
def test_threads_move_logits_by_rounding_only(name):
    model = load(name)
    layout = Layout.of(model.tokenizer, "Very positive:", "Once upon a time there was a lake")
    before, logits = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with torch.no_grad(), augmented(model, Augmentation(alpha=0.5), layout):
                logits.append(model(layout.tensor))
    finally:
        torch.set_num_threads(before)
    assert (logits[0] - logits[1]).abs().max() < 1e-5 * logits[0].abs().max()
