"""Rotary factors that depend on the length of a pass: step t is what a fresh pass over that row's
own first t tokens gives, or one clear line."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import cell_of, continue_chat, decode, decode_plan, soft_prefix
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Phi3ForSequenceClassification,
    PhimoeConfig,
    PhimoeForCausalLM,
)

from lapa2_interp import Augmentation, Layout, augmented, teacher_forced
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.soft_arguments import soft_inputs
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.circuits import measure_fading
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.examples import ContrastExample
from lapa2_interp.errors import (
    CircuitError,
    GridError,
    LayoutError,
    ModelError,
    PrefixError,
    ScoringError,
)
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.methods.registry import find_class
from lapa2_interp.models import identify
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.configuration import short_context
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.load import load_model
from lapa2_interp.models.rotary import refuse_mixed_rotary
from lapa2_interp.models.sizes import model_size
from lapa2_interp.models.tiny import tiny_tokenizer
from lapa2_interp.prefixes.likelihood import TextRows, text_nll
from lapa2_interp.prefixes.training import check_context
from lapa2_interp.runs.checks import check_grids
from lapa2_interp.runs.grid import Grid
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.scoring.adapter import load_adapter_network
from lapa2_interp.scoring.scorer import TextItem, run_scorer
from lapa2_interp.scoring.transformer import Classifier, Perplexity
from lapa2_interp.tasks.task import Attribute, Prompts, Task

LIMIT = 24
ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": LIMIT,
}  # fmt: skip
SHARED = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    "original_max_position_embeddings": LIMIT,
}  # fmt: skip
PLAIN, BRIDGE = "TransformersModel", "TransformerBridge"
TASK = Task(
    name="rotary",
    length_counts_prompt=False,
    attributes={"good": Attribute(prefix="good:"), "bad": Attribute(prefix="bad:")},
    prompts=Prompts(texts=("x",)),
)
RULE = Augmentation(alpha=1.0)
SHORT, LONG = "abc", "a text of thirty tokens, with BOS"


def saved(folder, kind=Phi3ForCausalLM, config=Phi3Config, rope=ROPE, **more):
    torch.manual_seed(0)
    network = kind(config(**{**SHARED, **more}, rope_parameters=dict(rope)))
    network.save_pretrained(folder)
    tiny_tokenizer("tiny-llama").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("phi3"))


@pytest.fixture(scope="module")
def models(folder):
    return {name: load_model(folder, "float64", "cpu", name) for name in (PLAIN, BRIDGE)}


@pytest.fixture(params=[PLAIN, BRIDGE])
def model(models, request):
    return models[request.param]


def layout_of(model, prompt, prefix="good:"):
    return Layout.of(model.tokenizer, prefix, prompt)


def cell(model, prompts, rule=RULE, method="prefix", **settings):
    settings = {"length": 8, "top_k": 1, "trace": "none"} | settings
    return cell_of(model, method, TASK, "good", prompts, rule, **settings)


def tokens_of(made):
    return made.texts["tokens"].map(list).tolist()


def prompt_of(model, n):
    """A prompt that fills a layout to n tokens."""
    return "z" * (n - len(layout_of(model, "z").ids) + 1)


@torch.no_grad()
def fresh(model, layout, tokens, rule=RULE):
    """The likeliest next token after each step, from a pass of its own over all before it."""
    likeliest = []
    for step in range(len(tokens)):
        own = replace(layout, ids=(*layout.ids, *tokens[:step]))
        with augmented(model, rule, layout):
            likeliest.append(int(model(own.tensor)[0, -1].argmax()))
    return likeliest


@pytest.mark.parametrize("first", [10, LIMIT - 7, LIMIT + 1, 40])
def test_decoding_is_a_fresh_pass_at_every_step(model, first):
    """Below the switch, up to it, right behind it, and above."""
    prompt = prompt_of(model, first)
    (tokens,) = tokens_of(decode(model, cell(model, [prompt])))
    layout = layout_of(model, prompt)
    assert len(layout.ids) == first
    assert tokens == fresh(model, layout, tokens)
    (tokens,) = tokens_of(decode(model, cell(model, [prompt], None)))
    plain = facts_of(model).network.generate(
        layout.tensor, attention_mask=torch.ones_like(layout.tensor), max_new_tokens=8,
        do_sample=False, eos_token_id=None, pad_token_id=1,
    ) if identify(model).model_class == PLAIN else None  # fmt: skip
    assert plain is None or plain[0, first:].tolist() == tokens


@pytest.mark.parametrize("phase", ["predicting_only", "after_span"])
@pytest.mark.parametrize("first", [10, LIMIT + 1])
def test_every_phase_stays_on_its_side(model, phase, first):
    rule, prompt = Augmentation(alpha=1.0, phase=phase), prompt_of(model, first)
    (tokens,) = tokens_of(decode(model, cell(model, [prompt], rule)))
    assert tokens == fresh(model, layout_of(model, prompt), tokens, rule)


@pytest.mark.parametrize("new", [3, 16])
def test_a_text_that_crosses_is_refused_before_a_token(model, new):
    """The last token is not read, so that 2 new ones behind 23 stay on the near side."""
    prompt = prompt_of(model, 23)
    assert len(plan_batches(model, cell(model, [prompt], length=2)).batches) == 1
    with pytest.raises(LayoutError, match=rf"passes of 23 to {22 + new} tokens, and beyond 24"):
        plan_batches(model, cell(model, [prompt], length=new))
    grid = Grid(name="g", description="d", cells=(cell(model, [prompt], length=new),))
    with pytest.raises(GridError, match="beyond 24"):
        check_grids([grid])


def test_the_limit_is_on_the_card_and_known_without_weights(model, folder):
    assert identify(model).short_ctx == LIMIT == model_size(folder).short_ctx
    assert model_size("tiny-llama").short_ctx is None


def test_a_batch_lies_on_one_side_and_equals_its_rows_alone(model):
    prompts = [SHORT, LONG, "abcdefg", LONG + "more"]
    todo = plan_batches(model, cell(model, prompts))
    assert [[prompt for prompt, _ in group] for group in todo.batches] == [[0], [1], [2], [3]]
    near = plan_batches(model, cell(model, [prompts[0], prompts[2]]))
    far = plan_batches(model, cell(model, [prompts[1], prompts[3]]))
    assert len(near.batches) == len(far.batches) == 1
    made = {prompt: tokens_of(decode(model, cell(model, [prompt])))[0] for prompt in prompts}
    for part, (first, second) in ((near, prompts[::2]), (far, prompts[1::2])):
        assert tokens_of(decode_plan(model, part)) == [made[first], made[second]]


def test_an_ended_row_does_not_run_past_the_switch(model):
    """Where a task counts prompts, a short prompt has more steps than its neighbour has room."""
    task = TASK.model_copy(update={"length_counts_prompt": True})
    prompts = ["a" * 17, "abc"]
    asked = ("prefix", task, "good", prompts, RULE)
    todo = plan_batches(model, cell_of(model, *asked, length=18, top_k=1))
    assert [len(group) for group in todo.batches] == [1, 1]
    alone = [
        tokens_of(decode(model, cell_of(model, *asked[:3], [prompt], RULE, length=18, top_k=1)))
        for prompt in prompts
    ]
    assert tokens_of(decode_plan(model, todo)) == [text for (text,) in alone]


def test_branches_of_a_sample_lie_on_one_side(model):
    prompt = prompt_of(model, LIMIT + 1)  # without its prefix it is on the near side
    with pytest.raises(LayoutError, match="under preadd: passes of 20 to"):
        plan_batches(
            model, cell(model, [prompt], None, "preadd", length=3, parameters={"lam": 2.0})
        )


def test_a_method_that_reads_the_prompt_needs_it_on_one_side(model):
    plan_batches(model, cell(model, [SHORT], None, "gedi"))
    with pytest.raises(
        LayoutError, match="gedi, which reads the probability of the prompt: passes"
    ):
        plan_batches(model, cell(model, [LONG], None, "gedi"))


def test_drafts_that_cross_are_refused(model):
    with pytest.raises(LayoutError, match="drafts of 30 tokens: .* draft fewer"):
        ModelContext(model)._draft(find_class("none")(), "abc", 1, 30, 0)


def test_teacher_forcing_is_decoding_on_each_side(model):
    """Rows of both sides in one call, and a row whose neighbour would push it over the switch."""
    layouts = [layout_of(model, prompt) for prompt in (SHORT, LONG, "a" * 14, LONG + "more")]
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 250, n).tolist() for n in (6, 3, 3, 6)]
    together = teacher_forced(model, layouts, texts)
    for i, (layout, text) in enumerate(zip(layouts, texts, strict=True)):
        for step in range(len(text)):
            own = replace(layout, ids=(*layout.ids, *text[:step]))
            alone = teacher_forced(model, own, [text[step : step + 1]])
            np.testing.assert_allclose(
                together["prefix"].isel(sample=i, step=step),
                alone["prefix"].isel(sample=0, step=0),
                atol=1e-6,
            )
    for prompt in (SHORT, LONG):
        made = decode(model, cell(model, [prompt], trace="full"))
        again = teacher_forced(model, layout_of(model, prompt), tokens_of(made), RULE)
        np.testing.assert_allclose(
            again["prefix"].squeeze(), made.trace["prefix"].squeeze(), atol=1e-6
        )


def test_a_given_text_that_crosses_is_refused(model):
    layout = layout_of(model, prompt_of(model, 20))
    teacher_forced(model, layout, [[5] * 5])
    with pytest.raises(LayoutError, match="text 0: passes of 20 to 25 tokens"):
        teacher_forced(model, layout, [[5] * 6])


def test_a_chat_lies_on_one_side(model, monkeypatch):
    """Chats of both sides are read in batches of their own."""
    template = "{% for m in messages %}{{ m['content'] }}:{% endfor %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    form = [{"role": "system", "content": "good"}, {"role": "user", "content": "{prompt}"}]
    task = chat_task(form, prompts=[SHORT, LONG])
    made = continue_chat(model, task, RULE, length=4, top_k=1)
    for prompt, tokens in zip(made.texts["prompt"], tokens_of(made), strict=True):
        messages = [form[0], form[1] | {"content": prompt}]
        assert tokens == fresh(model, Layout.of_chat(model.tokenizer, messages), tokens)
    with pytest.raises(LayoutError, match="'abc' under chat: passes of"):
        continue_chat(model, chat_task(form, prompts=[SHORT]), RULE, length=30)


def nll_of(network, ids):
    """-log P of each token behind the first, from a pass of its own."""
    with torch.no_grad():
        return torch.stack(
            [
                -network(ids[None, :i]).logits[0, -1].log_softmax(0)[ids[i]]
                for i in range(1, len(ids))
            ]
        )


def test_the_likelihood_of_a_text_is_that_of_fresh_passes(models):
    network = facts_of(models[PLAIN]).network
    rng = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 250, (n,), generator=rng).tolist() for n in (40, 10, 24, 25, 26, 60)]
    rows = TextRows.of(texts, (0,))
    losses = text_nll(network, rows)
    for row, text in zip(losses, texts, strict=True):
        wanted = nll_of(network, torch.tensor([0, *text]))
        torch.testing.assert_close(row[: len(text)], wanted, atol=1e-5, rtol=0)
        assert not row[len(text) :].any()
    short = text_nll(network, TextRows.of([texts[1], texts[2]], (0,)))
    torch.testing.assert_close(short, losses[[1, 2], :24], atol=1e-5, rtol=0)
    losses.sum().backward()
    assert network.get_input_embeddings().weight.grad.abs().sum() > 0
    network.zero_grad()


def test_perplexity_across_the_switch(folder):
    scorer = Perplexity(folder, "float64", min_words=1)
    texts = ["a text that is longer than the switch is far", "short", "just twenty four letters"]
    perplexities = run_scorer(scorer, [TextItem(text) for text in texts])["perplexity"]
    for text, value in zip(texts, perplexities, strict=True):
        ids = torch.tensor([0, *scorer.tokenizer(text, add_special_tokens=False).input_ids])
        assert value == pytest.approx(float(nll_of(scorer.network, ids).mean().exp()), rel=1e-5)


def test_a_classifier_reads_up_to_the_switch(tmp_path):
    saved(tmp_path, Phi3ForSequenceClassification, num_labels=2,
          problem_type="single_label_classification")  # fmt: skip
    scorer = Classifier(str(tmp_path))
    texts = ["short", "a text that is longer than the switch is far"]
    together = run_scorer(scorer, [TextItem(text) for text in texts])
    for i, text in enumerate(texts):
        alone = run_scorer(scorer, [TextItem(text)])
        assert together["label_0"][i] == pytest.approx(alone["label_0"][0], abs=1e-6)


def test_adapters_are_not_made_for_a_switch_within_a_window(folder):
    with pytest.raises(ScoringError, match="beyond 24"):
        load_adapter_network(folder, 2, 2)


def in_one_pass(model, layout, prefix):
    arguments = soft_inputs(model, [layout], [prefix])
    output = model(arguments.pop("input"), **arguments)
    return getattr(output, "logits", output)


def test_soft_prefixes_are_of_short_texts(model):
    soft = soft_prefix(model, slots=5)
    near, far = (Layout.of(model.tokenizer, None, "z" * n, soft=5) for n in (10, 40))
    teacher_forced(model, near, [[5] * 4], RULE, prefixes=[soft])
    with pytest.raises(LayoutError, match="text 0: passes of 0 to"):
        teacher_forced(model, far, [[5] * 4], RULE, prefixes=[soft])
    with pytest.raises(
        LayoutError, match="the 5 keys in its cache have the rotary factors of short"
    ):
        new_rows(model).prompt_pass([far], [soft])
    with (
        pytest.raises(LayoutError, match="the 5 keys in its cache have the rotary"),
        torch.no_grad(),
    ):
        in_one_pass(model, far, soft)
    with pytest.raises(PrefixError, match="context of 24; give at most 18 tokens"):
        check_context(facts_of(model).network, model.tokenizer, TASK, ["good"], 5, 20)


def test_circuits_stay_within_the_switch(model):
    prefixes = {"good": "good:", "bad": "bad0:"}
    example = ContrastExample.of(model.tokenizer, prefixes, "abcd", [5] * 20)
    near = ContrastExample.of(model.tokenizer, prefixes, "abcd", [5] * 10)
    ContrastSet.of_examples(near).check(model)
    with pytest.raises(CircuitError, match="text after 'abcd' have 29 tokens, .* context of 24"):
        ContrastSet.of_examples(example).check(model)
    with pytest.raises(CircuitError, match="context of 24"):
        measure_fading(model, [example], filler=(10,), tokens=4, metric="js")


def test_a_long_text_is_read_in_one_pass_of_its_own(model):
    layout = layout_of(model, LONG)
    with torch.no_grad():
        logits = in_one_pass(model, layout, None)
        decoded = new_rows(model).prompt_pass([layout], [None])
    assert torch.allclose(logits[:, -1], decoded[:, -1], atol=1e-4)


# --- passes of a user's own


def test_generate_inside_a_block_crosses_as_transformers_does(models):
    """Phi-3 drops its cache at the switch, so every step is that of a fresh pass."""
    model = models[PLAIN]
    network, layout = facts_of(model).network, layout_of(model, prompt_of(model, 23))
    asked = {
        "attention_mask": torch.ones_like(layout.tensor), "max_new_tokens": 16,
        "do_sample": False, "eos_token_id": None, "pad_token_id": 1,
    }  # fmt: skip
    wanted = network.generate(layout.tensor, **asked)
    for rule in (Augmentation(alpha=0.0), RULE):
        with augmented(model, rule, layout):
            tokens = network.generate(layout.tensor, **asked)[0, 23:].tolist()
        assert tokens == fresh(model, layout, tokens, rule)
        assert rule == RULE or tokens == wanted[0, 23:].tolist()


def test_drafted_tokens_on_both_sides_of_the_switch_are_refused(models):
    """transformers checks several drafted tokens in one pass, the first of them on the near side;
    its own texts differ there from those without drafts."""
    model = models[PLAIN]
    for first in (10, 23, 40):
        layout = layout_of(model, prompt_of(model, first))
        asked = {
            "attention_mask": torch.ones_like(layout.tensor), "max_new_tokens": 8,
            "do_sample": False, "eos_token_id": None, "pad_token_id": 1, "prompt_lookup_num_tokens": 3,
        }  # fmt: skip
        with augmented(model, RULE, layout):
            if first == 23:
                with pytest.raises(LayoutError, match="is asked for the logits of token 2"):
                    facts_of(model).network.generate(layout.tensor, **asked)
                continue
            tokens = facts_of(model).network.generate(layout.tensor, **asked)[0, first:].tolist()
        assert tokens == fresh(model, layout, tokens)


def test_rows_of_both_sides_in_one_pass_are_refused(model):
    padded = left_pad([layout_of(model, SHORT), layout_of(model, LONG)])
    ids = torch.tensor([[0] * layout.pad + list(layout.ids) for layout in padded])
    mask = torch.tensor([[0] * layout.pad + [1] * len(layout.ids) for layout in padded])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for more in ({}, {"position_ids": positions}):
        with (
            augmented(model, RULE, padded),
            pytest.raises(LayoutError, match=r"a row of 9 tokens is in one pass with positions up"),
        ):
            model(ids, attention_mask=mask, **more)


def test_right_padding_beyond_the_switch_is_refused(model):
    """It would change the factors of rows that end before it."""
    ids, mask = torch.full((1, 30), 5), torch.tensor([[1] * 10 + [0] * 20])
    with pytest.raises(LayoutError, match="a row of 10 tokens"):
        facts_of(model).network(ids, attention_mask=mask, position_ids=torch.arange(30)[None])
    mask = torch.tensor([[0] * 20 + [1] * 10])  # left padding has position 0
    positions = torch.tensor([[0] * 20 + list(range(10))])
    facts_of(model).network(ids, attention_mask=mask, position_ids=positions)


@pytest.mark.parametrize("first", [20, LIMIT])
@pytest.mark.parametrize("use", ["loaded", "bare"])
def test_a_stale_cache_is_refused(models, folder, first, use):
    network = facts_of(models[PLAIN]).network
    if use == "bare":  # first met by a block, when its cache is there already
        network = Phi3ForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    name = cache_name(network)
    cache = network(torch.full((1, first), 5))[name]
    layout = Layout.of(models[PLAIN].tokenizer, "good:", "z")
    with (
        augmented(network, None, layout),
        pytest.raises(LayoutError, match=rf"the {first} keys in its cache .* short texts"),
    ):
        network(torch.full((1, LIMIT + 1 - first), 5), **{name: cache})


def test_a_cache_of_long_texts_goes_on(models):
    network = facts_of(models[PLAIN]).network
    ids = torch.randint(3, 250, (1, 30), generator=torch.Generator().manual_seed(0))
    name = cache_name(network)
    with torch.no_grad():
        cache = network(ids[:, :25])[name]
        logits = network(ids[:, 25:], **{name: cache}).logits
        torch.testing.assert_close(logits, network(ids).logits[:, 25:], atol=1e-5, rtol=0)
        with pytest.raises(LayoutError, match="factors of long texts"):
            cache.crop(-15)
            network(ids[:, 15:17], **{name: cache})


# --- other models


def test_dynamic_ntk_beyond_the_context_is_refused():
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    settings = {**SHARED, "max_position_embeddings": 32, "rope_parameters": rope}
    settings.pop("original_max_position_embeddings")
    network = LlamaForCausalLM(LlamaConfig(**settings, attn_implementation="eager")).eval()
    layout = Layout.of(tiny_tokenizer("tiny-llama"), "good:", "z")
    with augmented(network, None, layout, check_ids=False):
        network(torch.full((1, 32), 5))
        with pytest.raises(LayoutError, match=r"reaches 33 tokens, and beyond 32 .* \(dynamic NTK"):
            network(torch.full((1, 33), 5))
    assert short_context(network.config) is None


def test_factors_by_layer_type_are_found():
    config = LlamaConfig(**SHARED)
    config.rope_parameters = {"full_attention": ROPE, "sliding_attention": {"rope_type": "default"}}
    assert short_context(config) == LIMIT


def test_one_check_stands_at_a_network(models):
    network = facts_of(models[PLAIN]).network
    parts = network, network.base_model
    before = [len(part._forward_pre_hooks) for part in parts]
    refuse_mixed_rotary(network)
    assert [len(part._forward_pre_hooks) for part in parts] == before


def test_phimoe_scales_its_factors_by_the_length(tmp_path):
    """Its frequencies are always the short ones, and its scale is another beyond the switch."""
    rope = {**ROPE, "short_mscale": 1.0, "long_mscale": 1.6}
    folder = saved(tmp_path, PhimoeForCausalLM, PhimoeConfig, rope, num_local_experts=2)
    model = load_model(folder, device="cpu", model_class=PLAIN)
    for prompt in (SHORT, LONG):
        (tokens,) = tokens_of(decode(model, cell(model, [prompt])))
        assert tokens == fresh(model, layout_of(model, prompt), tokens)
    with pytest.raises(LayoutError, match="beyond 24"):
        plan_batches(model, cell(model, [prompt_of(model, 20)]))


def test_a_hooked_transformer_is_refused(folder):
    with pytest.raises(ModelError, match="one set of rotary factors"):
        load_model(folder, device="cpu", model_class="HookedTransformer")
