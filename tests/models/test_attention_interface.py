"""The augmentation in plain transformers models equals that through TransformerLens' hooks."""

import pytest
import torch
from conftest import load, plan
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.cli.app import main
from lapa2_interp.errors import LayoutError
from lapa2_interp.methods import load_task
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.facts import facts_of

PLAIN = "TransformersModel"
PROMPTS = ["The lake", "The book is"]
WIDE, SIZE = {"hidden_size": 32, "intermediate_size": 64}, {"num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257}
OTHERS = {
    name: {**WIDE, **SIZE, **HEADS, "max_position_embeddings": 256, "head_dim": 8, **more}
    for name, more in {"qwen3": {}, "gemma2": {"sliding_window": 256, "pad_token_id": 0}}.items()
}  # fmt: skip


@pytest.fixture(scope="module")
def network():
    """Random networks of other architectures."""
    made = {}

    def of(name):
        if name not in made:
            config = AutoConfig.for_model(name, **OTHERS[name])
            torch.manual_seed(1)
            made[name] = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            made[name] = made[name].double().eval()
        return made[name]

    return of


def plan_layouts(model, rule):
    todo = plan(model, "prefix", load_task("sentiment"), "positive", PROMPTS, rule, 30, 1)
    return list(todo.arrangement.layouts[0])


@pytest.mark.parametrize(
    "settings", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}]
)
@torch.no_grad()
def test_beams_and_samples_have_the_augmented_probabilities(settings):
    """Every returned token's score is that of a forward pass over the whole sequence."""
    model, rule = load("tiny-llama", "float64", PLAIN), Augmentation(alpha=1.0)
    padded, net = left_pad(plan_layouts(model, rule)), facts_of(model).network
    ids = torch.tensor([[layout.ids[0]] * layout.pad + list(layout.ids) for layout in padded])
    mask = torch.tensor([[0] * layout.pad + [1] * len(layout.ids) for layout in padded])
    torch.manual_seed(0)
    with augmented(net, rule, padded):
        output = net.generate(
            ids, attention_mask=mask, max_new_tokens=8, eos_token_id=None, pad_token_id=1, top_k=0,
            output_scores=True, output_logits=True, return_dict_in_generate=True, **settings,
        )  # fmt: skip
        scores = net.compute_transition_scores(
            output.sequences, output.scores, getattr(output, "beam_indices", None),
            normalize_logits="num_beams" not in settings,
        )  # fmt: skip
    copies = len(output.sequences) // 2
    layouts = [layout for layout in padded for _ in range(copies)]
    full_mask = mask.repeat_interleave(copies, 0)
    full_mask = torch.cat([full_mask, torch.ones(len(full_mask), 8, dtype=torch.long)], dim=1)
    positions = (full_mask.cumsum(1) - 1).clamp(min=0)
    with augmented(net, rule, layouts):
        logits = net(output.sequences, attention_mask=full_mask, position_ids=positions).logits
    log_probs = logits.log_softmax(-1)[:, -9:-1]
    wanted = log_probs.gather(2, output.sequences[:, -8:, None])[..., 0]
    # generate keeps its scores in float32.
    torch.testing.assert_close(scores.double(), wanted, atol=2e-5, rtol=0)


@torch.no_grad()
def test_interleaved_models_do_not_leak_and_blocks_nest():
    llama, gpt2 = (load(name, "float64", PLAIN) for name in ("tiny-llama", "tiny-gpt2"))
    a, b = (Layout.of(model.tokenizer, "Very positive:", "The lake") for model in (llama, gpt2))
    strong, weak = Augmentation(alpha=2.0), Augmentation(alpha=0.5)

    def alone(model, layout, *rules):
        with augmented(model, rules[0], layout):
            if len(rules) == 1:
                return model(layout.tensor)
            with augmented(model, rules[1], layout):
                return model(layout.tensor)

    hooked = load("tiny-llama", "float64")
    wanted = alone(llama, a, strong), alone(gpt2, b, weak)
    torch.testing.assert_close(alone(llama, a, strong, weak), alone(hooked, a, strong, weak))
    with augmented(llama, strong, a), augmented(facts_of(gpt2).network, weak, b):
        assert torch.equal(llama(a.tensor), wanted[0])
        assert torch.equal(gpt2(b.tensor), wanted[1])
        assert torch.equal(llama(a.tensor), wanted[0])


@torch.no_grad()
def test_an_exception_leaves_nothing_behind():
    model = load("tiny-llama", "float64", PLAIN)
    net, layout = facts_of(model).network, Layout.of(model.tokenizer, "Very positive:", "The lake")
    plain, hooks = net(layout.tensor).logits, len(net._forward_pre_hooks)
    with pytest.raises(ZeroDivisionError), augmented(net, Augmentation(alpha=1), layout):
        raise ZeroDivisionError
    with pytest.raises(LayoutError), augmented(net, Augmentation(alpha=1), layout):
        net(layout.tensor + 1)
    assert net.config._attn_implementation == "eager"
    assert len(net._forward_pre_hooks) == hooks
    assert torch.equal(net(layout.tensor).logits, plain)


def test_probe_says_what_is_live(capsys):
    for name in ("TransformerBridge", PLAIN):
        assert main(["probe", "tiny-llama", "--model-class", name]) == 0
        printed = capsys.readouterr().out
        assert "live in all 4 layers" in printed
        assert "plain transformers is live, too" in printed


@torch.no_grad()
def test_a_cache_and_a_mask_are_seen_where_they_are_given_by_position():
    model = load("tiny-gpt2", "float32", PLAIN)
    net, rule = facts_of(model).network, Augmentation(alpha=1.0)
    padded = left_pad([Layout.of(model.tokenizer, "Good:", text) for text in ("The lake", "A")])
    ids, mask = PaddedRows.of(padded)[1:3]
    longer = torch.cat([mask, mask[:, -1:]], dim=1)
    name, logits = cache_name(net), []
    for by_position in (False, True):
        cache = DynamicCache()
        with augmented(net, rule, padded):
            if by_position:
                net(ids, cache, mask)
                logits.append(net(ids[:, -1:], cache, longer).logits)
            else:
                net(ids, attention_mask=mask, **{name: cache})
                asked = {name: cache, "attention_mask": longer}
                logits.append(net(ids[:, -1:], **asked).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_generate_with_a_static_cache(network, name):
    """Its masks come as one a layer type."""
    net, tokenizer = network(name), load("tiny-gpt2").tokenizer
    layout = Layout.of(tokenizer, "Very positive:", "The lake")
    texts = []
    for cache in (None, "static"):
        with augmented(net, Augmentation(alpha=2.0), layout):
            made = net.generate(
                layout.tensor, attention_mask=torch.ones_like(layout.tensor), max_new_tokens=8,
                do_sample=False, eos_token_id=None, cache_implementation=cache, disable_compile=True,
            )  # fmt: skip
        texts.append(made.tolist())
    assert texts[0] == texts[1]
