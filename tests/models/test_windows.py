"""Layers whose queries see some keys only: l, n, bias and trace go by what a query sees, which is
read here from the masked scores themselves."""

import functools
import json

import numpy as np
import pytest
import torch
from conftest import cell_of
from transformers import AutoConfig, AutoModelForCausalLM

from lapa2_interp import Augmentation, Layout, augmented, generate, load_model, teacher_forced
from lapa2_interp.attention.hooked import edit_scores
from lapa2_interp.attention.tables import fit_table, pooled, step_table, traced_layer_types
from lapa2_interp.bias.layer_types import FULL_ATTENTION, LayerType, describe_layers
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.cli.app import main
from lapa2_interp.errors import LayoutError, ModelError, TraceError
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.methods import load_task
from lapa2_interp.models.card import identify
from lapa2_interp.models.configuration import config_layer_types
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.load import load_tokenizer
from lapa2_interp.propositions.traces import stack_alphas

WINDOW = 12
SLIDING = LayerType("sliding", WINDOW)
SIZE = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "initializer_range": 0.2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "gemma3_text": {
        "num_hidden_layers": 3, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mistral": {"num_hidden_layers": 2, "sliding_window": WINDOW},
    "llama4_text": {
        "num_hidden_layers": 2, "attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0], "intermediate_size_mlp": 64, "num_local_experts": 2, "moe_layers": [],
    },
}  # fmt: skip
KINDS = {
    "gemma3_text": (SLIDING, FULL_ATTENTION, SLIDING),
    "mistral": (SLIDING, SLIDING),
    "llama4_text": (LayerType("chunked", WINDOW), FULL_ATTENTION),
}
CASES = [
    (kind, model_class) for kind in MODELS for model_class in ("TransformerBridge", "TransformersModel")
    if (kind, model_class) != ("llama4_text", "TransformerBridge")  # refused there: tests/models/test_families.py
]  # fmt: skip
PREFIX, PROMPT, SHORT = "Very good:", " The lake", " A"


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    @functools.cache
    def loaded(kind, model_class):
        folder = tmp_path_factory.mktemp(kind) / kind
        config = AutoConfig.for_model(kind, **SIZE | MODELS[kind])
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        load_tokenizer("tiny-gpt2").save_pretrained(folder)
        return load_model(str(folder), "float64", model_class=model_class)

    return loaded


def masked_scores(model, rules, layouts, ids, mask):
    """By layer, the scores before and after the augmentation."""
    before, after = {}, {}

    def keep(where):
        def look(layer, scores):
            where[layer] = scores.clone()
            return scores

        return look

    with (
        torch.no_grad(),
        edit_scores(model, keep(before)),
        augmented(model, rules, layouts),
        edit_scores(model, keep(after)),
    ):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=positions)
    return before, after


@pytest.mark.parametrize(
    "rule",
    [
        Augmentation(alpha=0.7),
        Augmentation(alpha=0.7, length_rule="kv"),
        Augmentation(alpha=0.1, law="linear"),
        Augmentation(alpha=0.5, span="prefix+bos", phase="everywhere"),
        Augmentation(alpha=0.5, span=("prefix", (1, 2, 7)), phase="after_span"),
        Augmentation(alpha=1.5, law="scale", span="input", phase="everywhere"),
        Augmentation(alpha=0.5, span="input"),
        Augmentation(alpha=0.6, law="cut", span=((1, 4), (9, 13)), phase="everywhere"),
        Augmentation(alpha=0.5, law="constant", l0=50, span=((1, 4), (9, 13))),
    ],
    ids=lambda rule: rule.label,
)
@pytest.mark.parametrize(("kind", "model_class"), CASES)
def test_the_law_counts_what_a_query_sees(load, kind, model_class, rule):
    """Two padded rows of 40 and 33 keys; what a query sees is read from the mask of the scores."""
    model = load(kind, model_class)
    layouts = left_pad([Layout.of(model.tokenizer, PREFIX, text) for text in (PROMPT, SHORT)])
    more = torch.arange(21)[None].repeat(2, 1) + 70
    ids, mask = PaddedRows.of(layouts)[1:3]
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    before, after = masked_scores(model, rule, layouts, ids, mask)
    hidden = 0
    for layer in range(model.cfg.n_layers):
        for row, layout in enumerate(layouts):
            keys = (
                set(range(*layout.prefix))
                if rule.positions is None
                else {layout.prefix.start + i for i in rule.positions}
            )
            counted = set(keys)
            if rule.span == "prefix+bos":
                keys = keys | {layout.bos.start}
            elif rule.span == "input":
                keys = set(range(layout.bos.start, layout.prompt.stop))
            elif rule.span == ((1, 4), (9, 13)):
                keys = counted = {layout.pad + i for i in (1, 2, 3, *range(9, 13))}
            first = {"everywhere": layout.bos.start, "after_span": layout.prefix.stop}.get(
                rule.phase, len(layout) - 1
            )
            for query in range(layout.bos.start, ids.shape[1]):
                seen = set((before[layer][row, 0, query] > -1e30).nonzero()[:, 0].tolist())
                hidden += len(set(range(layout.bos.start, query + 1)) - seen)
                left = len(keys & seen)
                cut = any(key <= query and key not in seen for key in keys)
                n = min(len(counted), left) if cut else len(counted)
                l = len(seen - ({layout.bos.start} if rule.length_rule == "paper" else set()))
                b = 0.0
                if query >= first and left:
                    b = {
                        "log": rule.alpha * np.log(max(l, n) / n),
                        "linear": rule.alpha * max(l, 1) / n,
                        "constant": rule.alpha * np.log(50 / n),
                        "scale": rule.alpha,
                        "cut": np.log1p(-min(rule.alpha, 0.9)),
                    }[rule.law]
                added = (after[layer] - before[layer])[row, :, query]
                wanted = torch.tensor([b * (key in keys) for key in seen], dtype=torch.float64)
                assert (added[:, [*seen]] - wanted).abs().max() <= 1e-12, (layer, row, query)
    assert hidden > 200


@pytest.mark.parametrize(("kind", "model_class"), CASES)
def test_traces_keep_windows_apart(load, kind, model_class):
    model, kinds = load(kind, model_class), KINDS[kind]
    branch, text = Layout.of(model.tokenizer, PREFIX, PROMPT), [list(range(70, 95))]
    trace = teacher_forced(model, branch, text, Augmentation(alpha=0.4))
    mean = teacher_forced(model, branch, text, Augmentation(alpha=0.4), trace="pooled")
    assert trace["type_of_layer"].to_numpy().tolist() == [str(attention) for attention in kinds]
    names = list(
        dict.fromkeys(map(str, sorted(kinds, key=lambda attention: attention != FULL_ATTENTION)))
    )
    assert traced_layer_types(trace) == traced_layer_types(mean) == names
    for layer, attention in enumerate(kinds):
        sight = trace["in_sight"][0, 0, :, layer].to_numpy()
        share = trace["prefix"][0, 0, :, layer].to_numpy()
        assert ((share > 0).all(1) == (sight > 0)).all()
        assert ((share == 0).all(1) == (sight == 0)).all()
        assert (sight.min() == 0) == (attention != FULL_ATTENTION)
    for name in ("prefix", "bos", "prompt", "nearest_4"):
        for layer_type in traced_layer_types(mean):
            of_type = [
                layer for layer, attention in enumerate(kinds) if str(attention) == layer_type
            ]
            wanted = trace[name].to_numpy()[:, :, :, of_type].mean((3, 4))
            assert np.abs(mean[name].sel(layer_type=layer_type) - wanted).max() < 1e-6
            assert np.abs(pooled(trace, name, layer_type) - wanted).max() < 1e-6
        assert (
            np.abs(pooled(mean, name) - pooled(mean, name, traced_layer_types(mean)[0])).max() == 0
        )


def test_a_target_is_met_where_the_prefix_is_in_sight(load):
    """Where it is not, nothing is added, and nothing counts as cut."""
    model = load("gemma3_text", "TransformerBridge")
    branch, text = Layout.of(model.tokenizer, PREFIX, PROMPT), [list(range(70, 95))]
    trace = teacher_forced(model, branch, text, Augmentation(alpha=1, law="target", tau=0.3))
    sight, share = trace["in_sight"][0, 0].to_numpy() > 0, trace["prefix"][0, 0].to_numpy()
    assert np.abs(share[sight] - 0.3).max() < 1e-5
    assert (share[~sight] == 0).all()
    assert (~sight).any()
    assert (trace["caps"] == 0).all()


def test_the_released_code_is_refused_beyond_a_window(load):
    """Its slots would mean other keys there. Layers that see all keys have them."""
    model = load("gemma3_text", "TransformerBridge")
    released = Augmentation(alpha=0.5, profile="released")
    branch = Layout.of(model.tokenizer, "Go:", " on")
    message = "a layer that is sliding 12 lacks them"
    with pytest.raises(LayoutError, match=message):
        teacher_forced(model, branch, [list(range(70, 90))], released)
    teacher_forced(model, branch, [[70, 71]], released)
    teacher_forced(
        model, branch, [list(range(70, 90))], released.model_copy(update={"layers": (1,)})
    )
    task = load_task("sentiment")
    for layers, refused in (("all", True), ((1,), False)):
        rule = released.model_copy(update={"layers": layers})
        cell = cell_of(model, "prefix", task, "positive", ["The lake"], rule, length=30)
        if refused:
            with pytest.raises(LayoutError, match=message):  # before any token
                plan_batches(model, cell)
        else:
            plan_batches(model, cell)


def test_curves_of_a_run_are_by_type_of_layer(load, capsys, tmp_path):
    model = load("gemma3_text", "TransformerBridge")
    run = generate(
        model,
        attribute="positive",
        prompts=["The lake"],
        alpha=0.5,
        length=40,
        dtype="float64",
        trace="pooled",
    )
    steps = step_table(run.trace(), run.texts())
    assert list(dict.fromkeys(steps["layer_type"])) == ["full", "sliding 12"]
    last = steps[(steps["name"] == "prefix") & (steps["step"] == steps["step"].max())].set_index(
        "layer_type"
    )["mean"]
    assert last["full"] > 0
    assert last["sliding 12"] == 0
    fits = fit_table(steps)
    alone = fit_table(steps[steps["layer_type"] == "full"])
    assert fits.equals(alone)
    assert len(fits) == 1
    labels = [line.get_label() for line in run.attention().plot().axes[0].lines]
    assert "alpha 0.5 paper, sliding 12 layers" in labels
    run.save(tmp_path / "run")
    assert main(["trace", str(tmp_path / "run")]) == 0
    assert "sliding 12" in capsys.readouterr().out
    manifest = run.manifest()
    assert manifest.model.layer_types == KINDS["gemma3_text"] == identify(model).layer_types


def test_commands_name_the_windows(load, capsys):
    folder = load("gemma3_text", "TransformerBridge").cfg.model_name
    words = "full: 1; sliding 12: 0 2"
    assert main(["probe", folder]) == 0
    assert words in capsys.readouterr().out
    asked = ["layout", "--model", folder, "--prefix", PREFIX, "--prompt", PROMPT]
    asked += ["--steps", "30", "--alpha", "1"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert words in shown
    assert "in layers that are sliding 12: augmentation" in shown
    assert main([*asked, "--json"]) == 0
    full, windowed = json.loads(capsys.readouterr().out)
    assert (full["layer_type"], windowed["layer_type"]) == ("full", "sliding 12")
    assert [step["l"] for step in full["steps"]] == list(range(19, 49))
    assert {step["l"] for step in windowed["steps"]} == {12}
    assert windowed["steps"][-1]["bias"] == 0 < full["steps"][-1]["bias"]


def test_layers_without_attention_are_not_chosen():
    """`layers` counts as the model does."""
    from lapa2_interp.attention.batch_bias import BatchBias

    layout = Layout.of(load_tokenizer("tiny-gpt2"), PREFIX, PROMPT)
    seen = [LayerType("none"), FULL_ATTENTION, LayerType("none"), FULL_ATTENTION]
    bias = BatchBias([(Augmentation(alpha=1),)], [layout], (4, 2), seen)
    assert bias.layers == [1, 3]


def test_types_of_layers_are_read_from_configurations():
    def of(kind, **fields):
        return config_layer_types(AutoConfig.for_model(kind, **fields))

    assert set(of("llama")) == {FULL_ATTENTION}
    assert of("gpt_neo", num_layers=2, attention_types=[[["global", "local"], 1]]) == (
        FULL_ATTENTION,
        LayerType("sliding", 256),
    )
    assert set(of("qwen2", sliding_window=64)) == {FULL_ATTENTION}  # its windows are off
    assert of("qwen2", num_hidden_layers=3, sliding_window=64, use_sliding_window=True, max_window_layers=2) == (
        FULL_ATTENTION, FULL_ATTENTION, LayerType("sliding", 64),
    )  # fmt: skip
    assert of("mistral", num_hidden_layers=1) == (LayerType("sliding", 4096),)
    assert describe_layers(of("qwen3_next", num_hidden_layers=8)) == "full: 3 7; none: 0-2 4-6"


def test_every_model_with_a_window_hides_what_its_configuration_says():
    """Of MiniMax the layers called full have the window."""
    size = {"num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = AutoConfig.for_model("minimax", **SIZE | size, sliding_window=WINDOW)
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    seen = config_layer_types(network.config)
    attends = [layer for layer, sight in enumerate(seen) if sight.kind != "none"]
    patterns = network(torch.arange(40)[None], output_attentions=True, use_cache=False).attentions
    assert len(attends) == 1
    for layer in attends:
        assert (patterns[layer][0, 0, -1] > 0).sum() == WINDOW == seen[layer].size


@pytest.mark.parametrize("model_class", ["TransformerBridge", "TransformersModel"])
def test_a_mask_that_its_configuration_does_not_tell_is_refused(load, model_class, monkeypatch):
    """In a prompt, and in decoding within 64 tokens; not where all queries see all keys."""
    model = load("mistral", model_class)
    monkeypatch.setattr(facts_of(model), "layer_types", (FULL_ATTENTION,) * 2)
    branch, rule = Layout.of(model.tokenizer, "Go:", " on"), Augmentation(alpha=1)
    long = left_pad([branch, Layout.of(model.tokenizer, PREFIX, PROMPT)])
    message = "layer 0 is of type full .* sees the keys in slots 7-18, not 0-18;"
    ids, mask = PaddedRows.of(long)[1:3]
    with augmented(model, rule, long), pytest.raises(ModelError, match="layer 0 is of type full"):
        model(ids, attention_mask=mask)
    teacher_forced(model, branch, [[70] * 4], rule)
    with pytest.raises(ModelError, match=message):
        teacher_forced(model, branch, [[70] * 13], rule)
    with pytest.raises(ModelError, match="in slot 64 sees the keys in slots 53-64, not 0-64"):
        teacher_forced(model, branch, [[70] * 90], rule, chunk=1)
    knocked = Augmentation(alpha=1, law="cut", span="bos", phase="everywhere")
    with pytest.raises(LayoutError, match="sees no key"):
        teacher_forced(model, branch, [[70] * 4], knocked)
    cut = Augmentation(alpha=1, law="cut", span="bos")
    with augmented(model, cut, branch), augmented(model, rule, branch):
        model(branch.tensor)


def test_propositions_refuse_what_a_window_hides(load):
    model = load("gemma3_text", "TransformersModel")
    branch = Layout.of(model.tokenizer, "Go:", " on")
    for n, refused in ((4, False), (20, True)):
        traces = {
            alpha: teacher_forced(model, branch, [list(range(70, 70 + n))], rule)
            for alpha, rule in ((0.0, None), (1.0, Augmentation(alpha=1)))
        }
        if refused:
            with pytest.raises(TraceError, match="longer than the sliding window"):
                stack_alphas(traces)
        else:
            stack_alphas(traces)


def test_all_classes_make_one_trace(load, model_class):
    traces = []
    for name in (model_class, "TransformersModel"):
        model = load("mistral", name)
        assert facts_of(model).layer_types == KINDS["mistral"]
        branch = Layout.of(model.tokenizer, PREFIX, PROMPT)
        traces.append(teacher_forced(model, branch, [list(range(70, 95))], Augmentation(alpha=0.4)))
    assert (np.abs(traces[0] - traces[1]).max().to_array() < 1e-6).all()
