"""Passes of plain transformers models without the matrix of attention scores: which go that way,
what says so, and that their numbers are those of the matrix and of transformers' own attention."""

import numpy as np
import pytest
import torch
from conftest import cell_of, load, soft_prefix
from families import save_family
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from lapa2_interp import Augmentation, Layout, augmented, load_model
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.bias.layer_types import LayerType
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.errors import DeadHookError, ModelError
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.methods import load_task
from lapa2_interp.models.attention_interface import (
    AttentionHooks,
    hook_attention,
    read_without_matrix,
)
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.facts import (
    AUTO_SCORES,
    FUSED,
    TransformersModel,
    decided_path,
    facts_of,
    path_of_pass,
)
from lapa2_interp.propositions.traces import exponent_table, stack_alphas
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.runs.worker import make_batch

PLAIN = "TransformersModel"
RULE = Augmentation(alpha=1.5, phase="after_span")
TEXT = torch.tensor([[40, 41, 42, 43, 44, 45, 46, 47, 48, 49] * 3])


@pytest.fixture
def model():
    loaded = load("tiny-llama", "float64", PLAIN)
    yield loaded
    loaded.attn = "auto"


def layout_of(model, prompt="The lake"):
    return Layout.of(model.tokenizer, "Very good:", prompt)


def ids_of(layout):
    return torch.cat([layout.tensor, TEXT], dim=1)


@torch.no_grad()
def read(model, attn, rule=RULE, observer=None, **settings):
    """Logits of a text under an augmentation, and the paths of the layers."""
    layout = layout_of(model)
    model.attn = attn
    with augmented(model, rule, layout, observer) as paths:
        return model(ids_of(layout), **settings), dict(paths)


def test_auto_is_a_function_of_size_and_device():
    side = int(AUTO_SCORES**0.5)
    assert path_of_pass("auto", side, side, "cpu") == FUSED
    assert "are few" in path_of_pass("auto", side - 1, side, "cpu")
    assert "on cuda" in path_of_pass("auto", side, side, "cuda")
    assert path_of_pass("fused", 2, 2, "cuda") == FUSED
    assert path_of_pass("matrix", side, side, "cpu") == "attn is matrix"


def test_small_passes_keep_their_bits(model):
    logits, paths = read(model, "auto")
    assert all("are few" in path for path in paths.values())
    assert len(paths) == 4
    assert torch.equal(logits, read(model, "matrix")[0])


def test_one_decision_holds_for_all_passes_of_a_cell(model):
    """A prompt above the threshold decides also for the shorter passes beside it."""
    with decided_path(model, 2000, 2000) as fused:
        assert fused
        assert model.attn == "fused"
    with decided_path(model, 20, 20) as fused:
        assert not fused
        assert model.attn == "matrix"
    assert model.attn == "auto"
    with decided_path(load("tiny-llama", "float64"), 2000, 2000) as fused:
        assert not fused, "hooks need the matrix"


@pytest.mark.parametrize("attn", ["auto", "fused"])
def test_the_record_of_a_batch_says_which_way_it_went(model, attn):
    cell = cell_of(
        model, "prefix", load_task("sentiment"), "positive", ["The lake"], RULE, length=20,
        samples=2, trace="full",
    )  # fmt: skip
    plan = plan_batches(model, cell, ModelContext(model))
    model.attn = "matrix"
    wanted = make_batch(model, plan, 0)
    model.attn = attn
    made = make_batch(model, plan, 0)
    assert made.record.model.attn == ("fused" if attn == "fused" else "matrix")
    assert made.texts["tokens"].tolist() == wanted.texts["tokens"].tolist()
    np.testing.assert_allclose(made.trace["prefix"], wanted.trace["prefix"], atol=1e-6)
    assert bool(wanted.record.changes(made.record)) == (attn == "fused")


def propositions(model, layout):
    """The exponents of attention on the prefix."""
    rules = {0.0: None, 0.5: Augmentation(alpha=0.5)}
    texts = [TEXT[0].tolist()] * 2
    traces = {alpha: teacher_forced(model, layout, texts, rule) for alpha, rule in rules.items()}
    return exponent_table(stack_alphas(traces))["mean"]


def perplexity(model, layout):
    """Of a text under the bias."""
    with augmented(model, RULE, layout):
        log_probs = model(ids_of(layout))[0, -TEXT.shape[1] - 1 : -1].log_softmax(1)
    return (-log_probs.gather(1, TEXT.T).mean()).exp()


def knock_outs(model, layout):
    """The largest change of a logit, without each token of the prefix."""
    plain, changes = read(model, model.attn, None)[0], []
    for slot in range(layout.prefix.start, layout.prefix.stop):
        rule = Augmentation(law="cut", alpha=1, span=((slot, slot + 1),), phase="after_span")
        changes.append((read(model, model.attn, rule)[0] - plain).abs().max())
    return torch.stack(changes)


def soft_prefixes(model, _layout):
    """The last logits of padded prompts behind soft prefixes of unequal length."""
    prefixes = [soft_prefix(model, slots=5), soft_prefix(model, slots=3, seed=1)]
    prompts = "The lake" * 5, "A book is on the"
    layouts = left_pad(
        [
            Layout.of(model.tokenizer, None, prompt, soft=len(prefix))
            for prompt, prefix in zip(prompts, prefixes, strict=True)
        ]
    )
    with augmented(model, RULE, layouts):
        return new_rows(model).prompt_pass(layouts, prefixes)


@pytest.mark.parametrize("use", [propositions, perplexity, knock_outs, soft_prefixes])
@torch.no_grad()
def test_each_use_has_the_same_numbers(model, use):
    values = []
    for attn in ("matrix", "fused"):
        model.attn = attn
        values.append(np.asarray(use(model, layout_of(model))))
        assert {*model.paths.values()} == {FUSED if attn == "fused" else "attn is matrix"}
    assert np.isfinite(values[0]).all()
    # Traces are stored in float32.
    np.testing.assert_allclose(*values, atol=1e-5 if use is propositions else 1e-10, rtol=0)


class Watcher:
    """An observer of one's own."""

    def observe(self, layer, pattern, first):
        self.shape = pattern.shape


def test_what_needs_the_matrix_gets_it_and_says_why(model):
    wanted = read(model, "matrix")[0]
    watcher, recorder = Watcher(), Recorder(4, 4, "full", patterns=[(1, 2)])
    recorder.begin([layout_of(model)])
    for observer, settings, path in (
        (watcher, {}, "an observer reads whole patterns"),
        (None, {"output_attentions": True}, "the pass returns its patterns"),
    ):
        logits, paths = read(model, "fused", RULE, observer, **settings)
        assert {*paths.values()} == {path}
        assert torch.equal(logits, wanted)
    n = watcher.shape[2]
    assert watcher.shape == (1, 4, n, n)
    mask = torch.full((n, n), -1e30, dtype=torch.float64).triu(1)[None, None]
    logits, paths = read(model, "fused", attention_mask=mask)
    assert {*paths.values()} == {"the pass has a mask of its own"}
    torch.testing.assert_close(logits, wanted, atol=1e-10, rtol=0)
    # One layer of a pass.
    logits, paths = read(model, "fused", RULE, recorder)
    assert paths == dict.fromkeys((0, 2, 3), FUSED) | {1: "its attention rows are recorded"}
    torch.testing.assert_close(logits, wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize("cuts", [(), (9,), (9, 20)])
@torch.no_grad()
def test_a_cache_may_have_more_slots_than_keys(model, cuts):
    """A static cache of transformers, filled by one pass or several."""
    layout = layout_of(model)
    cache = StaticCache(config=model.original_model.config, max_cache_len=64)
    model.attn, parts = "fused", ids_of(layout).tensor_split(cuts, dim=1)
    cached = {cache_name(model.original_model): cache}
    with augmented(model, RULE, layout) as paths:
        logits = torch.cat([model(part, **cached) for part in parts], dim=1)
    assert {*paths.values()} == {FUSED}
    torch.testing.assert_close(logits, read(model, "matrix")[0], atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_mask_that_the_configuration_does_not_tell_is_refused(model, monkeypatch):
    """Its layers' types decide which keys are read, so they are compared with the model's mask."""
    monkeypatch.setattr(facts_of(model), "layer_types", (LayerType("sliding", 16),) * 4)
    model.attn = "fused"
    with (
        read_without_matrix(model),
        pytest.raises(ModelError, match="layer 0 is of type sliding 16.*attn='matrix'"),
    ):
        model(ids_of(layout_of(model)))


@torch.no_grad()
def test_laws_that_read_scores_refuse_a_sink(tmp_path):
    """Its share lies inside the log of the sum; a law cannot reach it."""
    folder = save_family("gpt-oss", tmp_path)
    sinking = load_model(folder, "float64", model_class=PLAIN, attn="fused")
    layout, law = layout_of(sinking), Augmentation(alpha=0.5, law="target", tau=0.3)
    with augmented(sinking, law, layout), pytest.raises(DeadHookError, match="learned sink"):
        sinking(ids_of(layout))
    with augmented(sinking, RULE, layout) as paths:
        sinking(ids_of(layout))
    assert {*paths.values()} == {FUSED}


@pytest.mark.parametrize("kind", ["full", "pooled"])
def test_a_trace_of_both_kinds_of_layers_is_that_of_the_matrix(model, kind):
    """Whole attention rows of one layer, sums in the others; of padded rows."""
    layouts = [layout_of(model), layout_of(model, "A book is on the")]
    rows, traces = PaddedRows.of(layouts), []
    ids = torch.cat([rows.ids, TEXT.expand(2, -1)], dim=1)
    mask = torch.cat([rows.mask, torch.ones_like(TEXT.expand(2, -1))], dim=1)
    for attn in ("matrix", "fused"):
        model.attn = attn
        recorder = Recorder(4, 4, kind, patterns=[(1, 2)])
        recorder.begin(rows.layouts)
        with torch.no_grad(), augmented(model, RULE, rows.layouts, recorder):
            model(ids, attention_mask=mask)
        steps = [TEXT.shape[1] + 1] * 2
        traces.append(recorder.dataset(rows.layouts, ("target",), steps))
    for name in traces[0].data_vars:
        np.testing.assert_allclose(traces[1][name], traces[0][name], atol=1e-6, err_msg=name)


TARGET = Augmentation(alpha=0.5, law="target", tau=0.3, phase="after_span")
"""A law that reads the scores."""


@pytest.mark.parametrize("rule", [RULE, TARGET], ids=["log", "target"])
def test_gradients(model, rule):
    layout, gradients = layout_of(model), []
    embed = model.original_model.get_input_embeddings()
    for attn in ("matrix", "fused"):
        model.attn = attn
        inputs = embed(ids_of(layout)).detach().requires_grad_()
        with augmented(model, rule, layout) as paths:
            logits = model.original_model(inputs_embeds=inputs).logits
        logits[0, -1].square().sum().backward()
        gradients.append(inputs.grad)
    assert {*paths.values()} == {FUSED}
    # Llama normalises in float32.
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "rule"), [("Mistral", RULE), ("Mistral", TARGET), ("gpt-oss", RULE)]
)
def test_gradients_of_cached_keys_and_of_a_bias(family, rule, tmp_path):
    """As prefix tuning takes them: all weights are frozen, so that the queries of the first layer
    have no gradient. The bias is one number, on top of the augmentation's. Sinks are learned."""
    model = load_model(save_family(family, tmp_path), "float64", model_class=PLAIN)
    net, layout, gradients = model.original_model.requires_grad_(False), layout_of(model), []
    sinks = [weight for name, weight in net.named_parameters() if name.endswith(".sinks")]
    n = layout.prefix.stop
    with torch.no_grad():
        made = net(layout.tensor[:, :n], use_cache=True).past_key_values
    for attn in ("matrix", "fused"):
        model.attn, cache = attn, DynamicCache()
        leaves = [x.clone() for layer in made.layers for x in (layer.keys, layer.values)]
        b = torch.tensor(0.3, dtype=torch.float64)
        leaves = [leaf.requires_grad_() for leaf in (*leaves, b, *sinks)]
        for i in range(len(made.layers)):
            cache.update(*leaves[2 * i : 2 * i + 2], i)
        span = torch.ones(1, n, dtype=torch.bool)

        def add(layer, scores, first, b=b):
            return torch.cat([scores[..., :n] + b, scores[..., n:]], dim=3)

        def add_to_spans(layer, scores, b=b, span=span):
            scores.add(span, b.view(1, 1, 1))

        more = AttentionHooks(edit_scores=add, edit_spans=add_to_spans)
        with (
            hook_attention(facts_of(net), more),
            augmented(model, rule, layout) as paths,
        ):
            logits = net(ids_of(layout)[:, n:], past_key_values=cache).logits
        likelihood = logits[0, -30:].log_softmax(1).gather(1, TEXT.T).sum()
        gradients.append(torch.autograd.grad(likelihood, leaves))
    assert {*paths.values()} == {FUSED}
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients[0])
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_blocks_nest(model):
    """Two biases on overlapping spans, by two blocks."""
    layout, more = layout_of(model), Augmentation(alpha=0.7, law="scale", span=((0, 4),))
    outputs = []
    for attn in ("matrix", "fused"):
        model.attn = attn
        with (
            torch.no_grad(),
            augmented(model, RULE, layout) as outer,
            augmented(model, more, layout) as paths,
        ):
            outputs.append(model(ids_of(layout)))
    assert {*paths.values()} == {*outer.values()} == {FUSED}
    torch.testing.assert_close(*outputs, atol=1e-10, rtol=0)


@torch.no_grad()
def test_generate_reads_its_prompt_without_the_matrix(model):
    rows = PaddedRows.of([layout_of(model), layout_of(model, "A book is on the")])
    texts = []
    for attn in ("matrix", "fused"):
        wrapped = TransformersModel(model.original_model, model.tokenizer, "tiny", attn)
        with augmented(wrapped, RULE, rows.layouts) as paths:
            generated = wrapped.original_model.generate(
                rows.ids, attention_mask=rows.mask, max_new_tokens=6, do_sample=False,
                eos_token_id=None, pad_token_id=1, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        texts.append(torch.stack(generated.logits))
    assert {*paths.values()} == {FUSED}, "the path of the prompt, not of single tokens"
    torch.testing.assert_close(*texts, atol=1e-6, rtol=0)
    assert model.original_model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@torch.no_grad()
def test_sdpa_of_transformers_is_the_judge(family):
    """The same bias as a float mask and as `position_bias`, in transformers' own attention."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=258, max_position_embeddings=128, initializer_range=0.2,
        head_dim=8, sliding_window=None,
    )  # fmt: skip
    net = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    tokenizer = load("tiny-llama", "float64", PLAIN).tokenizer
    model = TransformersModel(net, tokenizer, family, attn="fused")
    layout = layout_of(model)
    ids = ids_of(layout)
    n = ids.shape[1]
    with augmented(model, RULE, layout) as paths:
        logits = model(ids)
    assert {*paths.values()} == {FUSED}
    bias = torch.zeros(n, n, dtype=torch.float64)
    bias[:, slice(*layout.prefix)] = torch.from_numpy(layout.bias(RULE, np.arange(n)))[:, None]
    later = torch.full((n, n), -1e30, dtype=torch.float64).triu(1)
    by_mask = net(
        ids, attention_mask=(bias + later)[None, None], position_ids=torch.arange(n)[None]
    )
    by_position = net(ids, position_bias=bias[None, None])
    assert (net(ids).logits - by_mask.logits).abs().max() > 1e-2, "the bias acts"
    # These models normalise in float32.
    torch.testing.assert_close(logits, by_mask.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits, by_position.logits, atol=1e-5, rtol=0)


def test_what_does_not_fit_is_one_line(monkeypatch):
    """Before the pass; of hooks, too, which need the matrix."""
    monkeypatch.setattr("lapa2_interp.models.attention_interface.machine_memory", lambda: 10**6)
    for module in ("models.facts", "models.attention_interface", "attention.guard"):
        monkeypatch.setattr(f"lapa2_interp.{module}.AUTO_SCORES", 2**15)
    for kind in (PLAIN, "TransformerBridge"):
        model = load("tiny-llama", "float64", kind)
        layout = layout_of(model)
        ids = torch.cat([layout.tensor, TEXT.repeat(1, 7)], dim=1)
        wanted = r"1 x 2\d\d tokens, read at once, form 0 GB .*0 GB \(.*\).*attn='fused'.*cache"
        model.attn = "matrix"
        with augmented(model, RULE, layout), pytest.raises(ModelError, match=wanted):
            model(ids)
    model = load("tiny-llama", "float64", PLAIN)
    model.attn = "fused"
    with torch.no_grad(), augmented(model, RULE, layout_of(model)):
        model(ids)
    model.attn = "auto"


def test_memory_is_linear_in_tokens(model):
    """A pass of 3,000 tokens with a full trace keeps no tensor as large as a head's matrix."""
    layout, n = layout_of(model), 3000
    net = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "llama", hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, vocab_size=258, max_position_embeddings=n,
        )
    ).eval()  # fmt: skip
    long = TransformersModel(net, model.tokenizer, "long")
    ids = torch.cat([layout.tensor, torch.randint(2, 257, (1, n - len(layout)))], dim=1)
    recorder, largest = Recorder(2, 2), [0]
    recorder.begin([layout])

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            tensors = [leaf for leaf in tree_leaves(made) if torch.is_tensor(leaf)]
            sizes = (tensor.untyped_storage().nbytes() for tensor in tensors)
            largest[0] = max([largest[0], *sizes])
            return made

    with torch.no_grad(), augmented(long, RULE, layout, recorder) as paths, Largest():
        long(ids, logits_to_keep=1)
    assert {*paths.values()} == {FUSED}, "auto"
    assert largest[0] < 4 * n * n / 8
