"""The decode loop against full recomputation, against transformers, and against itself in other
batches."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import decode_plan, generate, load, plan, run_of, soft_set
from oracle import oracle_logits

from lapa2_interp import Augmentation, augmented
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.trace import join_traces
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.bias.text_start import text_markers
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.generation.sampling import draw, uniforms
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.base import Branch, SoftPrefixKey
from lapa2_interp.methods.registry import assign_augmentations
from lapa2_interp.models.load import load_transformers
from lapa2_interp.prefixes.soft_prefix import load_prefix
from lapa2_interp.runs.run import finished_cell

GENERATED = [70, 81, 92, 103, 114, 64, 75]
SENTIMENT = load_task("sentiment")
PREFIX = methods.get("prefix")


def made(
    model,
    prompts=("The lake", "Once upon a time"),
    attribute="positive",
    task=SENTIMENT,
    method=PREFIX,
    **settings,
):
    return generate(model, method, task, attribute, list(prompts), **({"length": 24} | settings))


def test_the_loop_never_asks_which_model_it_has(monkeypatch):
    """Weights are identified where a run is planned and where its record is written."""
    model = load("tiny-gpt2")
    settings = {"length": 18, "samples": 1, "trace": "none", "eos": "stop"}
    todo = plan(model, PREFIX, SENTIMENT, "positive", ["The lake"], None, **settings)
    ends = todo.card.model_copy(update={"end_ids": tuple(range(257))})
    monkeypatch.setattr("lapa2_interp.models.card.fingerprint", lambda _: pytest.fail("asked"))
    (text,) = decode_plan(model, dataclasses.replace(todo, card=ends)).texts.itertuples()
    assert (text.n_tokens, text.finish) == (1, "end")  # the plan's card says what ends a text


def test_rows_under_different_rules_equal_full_recomputation(tiny, model_class):
    """Rows of different prefix lengths, one row without a prefix and one without a bias. One rule:
    `test_conformance`."""
    model = load(tiny, "float64", model_class)
    rows = left_pad(
        [
            Layout.of(model.tokenizer, "ab cd:", "efg hi"),
            Layout.of(model.tokenizer, "a:", "b"),
            Layout.of(model.tokenizer, None, "a longer prompt than the others"),
            Layout.of(model.tokenizer, "xyz", "uvw"),
        ]
    )
    released = Augmentation(alpha=0.7, profile="released", law="linear")
    augmentations = [Augmentation(alpha=0.7, phase="decode"), released, released, None]
    state = new_rows(model)
    with torch.no_grad():
        with augmented(model, augmentations, rows):
            logits = [state.prompt_pass(rows)[:, -1]]
        state.expand(torch.arange(4), capacity=len(rows[0]) + len(GENERATED))
        with augmented(model, augmentations, rows):
            logits += [state.read_tokens(torch.full((4, 1), token))[:, -1] for token in GENERATED]
    in_batch = torch.stack(logits, dim=1)
    for row, layout in enumerate(rows):
        expected, _ = oracle_logits(model, layout, GENERATED, augmentations[row])
        assert (in_batch[row] - expected).abs().max() < 1e-7
        if augmentations[row] is not None:
            assert (expected - oracle_logits(model, layout, GENERATED)[0]).abs().max() > 1e-3


def test_alpha_zero_is_plain_greedy_transformers_and_text_keeps_its_leading_space():
    """Other models: `test_families.test_alpha_0_is_transformers_generate`."""
    model = load("smollm2-135m")
    network, _, _ = load_transformers("smollm2-135m")
    plain, zero = (
        made(model, ["The lake"], augmentation=rule, top_k=1, length=6).texts.iloc[0]
        for rule in (None, Augmentation(alpha=0))
    )
    layout = Layout.of(model.tokenizer, "Very positive:", "The lake")
    with torch.no_grad():
        logits = network(torch.tensor([[*layout.ids, *plain["tokens"][:-1]]])).logits[0]
    assert logits[len(layout) - 1 :].argmax(1).tolist() == plain["tokens"]
    assert zero["tokens"] == plain["tokens"]
    assert plain["continuation"].startswith(" ")
    assert plain["text"] == "The lake" + model.tokenizer.decode(plain["tokens"])


@pytest.mark.parametrize("augmentation", [None, Augmentation(alpha=1)])
def test_rows_of_a_batch_equal_each_row_alone(tiny, model_class, augmentation):
    model = load(tiny, "float32", model_class)
    settings = {"augmentation": augmentation, "seed": 3, "trace": "none", "length": 21}
    together = made(model, samples=4, **settings).texts
    first = made(model, samples=1, **settings).texts
    alone = made(model, ["Once upon a time"], samples=3, max_rows=1, **settings).texts
    backwards = made(
        model, ["Once upon a time", "The lake"], samples=4, max_rows=3, **settings
    ).texts
    key = together.set_index(["prompt", "sample"])["text"]
    assert len(key) == 8
    for texts in (first, alone, backwards):
        assert texts.set_index(["prompt", "sample"])["text"].equals(
            key.loc[list(zip(texts["prompt"], texts["sample"], strict=True))]
        )
    assert key.nunique() == 8


def test_a_short_text_begins_the_long_one():
    model = load("tiny-llama")
    long, short = (
        made(model, length=length, augmentation=Augmentation(alpha=1), trace="none").texts
        for length in (36, 25)
    )
    for a, b in zip(long["tokens"], short["tokens"], strict=True):
        assert a[: len(b)] == b


def test_baseline_and_lapa2_share_their_random_numbers():
    model = load("tiny-gpt2")
    base, same, strong = (
        made(model, augmentation=a, length=20, trace="none").texts["text"].tolist()
        for a in (None, Augmentation(alpha=1e-9), Augmentation(alpha=3))
    )
    assert base == same
    assert base != strong


def test_attribute_and_seed_change_the_text():
    model = load("tiny-gpt2")
    texts = {
        tuple(made(model, attribute=a, seed=s, length=20, trace="none").texts["text"])
        for a in ("positive", "negative")
        for s in (1, 2)
    }
    assert len(texts) == 4


def test_length_counts_the_prompt_where_the_task_says_so():
    model = load("tiny-gpt2")
    sentiment = made(model, ["The lake"], length=30).texts.iloc[0]
    assert sentiment["n_tokens"] == 30 - len("The lake")  # one token per byte
    assert sentiment["text"].startswith("The lake")
    assert sentiment["text"] == "The lake" + sentiment["continuation"]
    detox = made(
        model, ["The lake"], task=load_task("detox"), attribute="nontoxic", length=30
    ).texts.iloc[0]
    assert detox["n_tokens"] == 30
    assert detox["text"] == detox["continuation"]


class Ends(type(PREFIX)):
    """Prefix conditioning that makes the end token nearly certain at its third step."""

    name = "ends"

    def combine(self, log_probs, state):
        weights = log_probs["prefix"].clone()
        weights[:, 0] = 50.0 if (state or 0) == 2 else -50.0
        return weights

    def advance(self, state, log_probs, tokens):
        return (state or 0) + 1


def test_temperature_divides_the_controlled_weights(tiny):
    """Texts at a temperature, by transformers and the formula; at 1 a cell's key has none."""
    model = load(tiny, "float64")
    network, tokenizer, _ = load_transformers(tiny, "float64")
    texts = {}
    for temperature in (0.5, 1.0, 2.0):
        cell = made(model, ["The lake"], length=40, samples=2, temperature=temperature, top_k=20)
        texts[temperature] = cell.texts["tokens"].tolist()
        for sample, tokens in enumerate(texts[temperature]):
            uniform = uniforms(1, "The lake", sample, 40)
            ids = list(Layout.of(tokenizer, "Very positive:", "The lake").ids)
            for step, token in enumerate(tokens):
                with torch.no_grad():
                    logits = network(torch.tensor([ids])).logits[0, -1]
                likely = logits.argsort(descending=True, stable=True)[:20].sort().values
                weights = (logits[likely] / temperature).softmax(0).cumsum(0)
                assert likely[int((weights <= uniform[step]).sum())] == token
                ids.append(token)
    assert texts[0.5] != texts[1.0] != texts[2.0]


def test_extreme_temperatures_are_greedy_and_even():
    """The bounds of a temperature in float32, whose quotients leave it no further out."""
    model = load("tiny-gpt2")

    def tokens(**settings):
        return made(model, ["The lake"], length=40, **settings).texts["tokens"].tolist()

    assert tokens(temperature=1e-30, top_k=20) == tokens(top_k=1)
    assert tokens(temperature=1e-30, ban_words="all") == tokens(top_k=1, ban_words="all")
    weights = torch.tensor([[-9.0, -1.0, -5.0, -2.0]]).repeat(4, 1)
    uniform = torch.tensor([0.1, 0.3, 0.6, 0.9])
    assert draw(weights / 1e30, uniform, top_k=3).tolist() == [1, 1, 2, 3]


def test_the_usual_temperature_is_not_in_a_key():
    asked = {"prompts": ["The lake"], "length": 12}
    plain, usual, warm = (
        cell_of("tiny-gpt2", attribute="positive", **asked, **more)
        for more in ({}, {"temperature": 1}, {"temperature": 2.0})
    )
    assert plain.key == usual.key != warm.key
    assert "temperature" not in plain.model_dump_json()
    assert warm.variant == "temperature 2"
    assert Cell.model_validate_json(warm.model_dump_json()) == warm


def test_end_token_policies():
    model = load("tiny-gpt2")
    assert text_markers(model.tokenizer).ends == (0,)
    with_ends, stopped, blocked = (
        made(model, method=Ends(), eos=eos, length=21) for eos in ("keep", "stop", "block")
    )
    for sample in with_ends.texts.itertuples():
        assert sample.tokens[2] == 0
        assert sample.finish == "length"
        assert "<|endoftext|>" in sample.text
        assert len(sample.tokens) == 21 - len(sample.prompt)
    for sample in stopped.texts.itertuples():
        assert sample.tokens[2] == 0
        assert (sample.n_tokens, sample.finish) == (3, "end")
    assert stopped.trace.sizes["step"] == 3
    assert all(0 not in tokens for tokens in blocked.texts["tokens"])


def test_prompts_of_a_batch_end_at_their_own_lengths():
    model = load("tiny-gpt2")
    cell = made(model, ["The lake", "Once upon a time"], length=30)
    assert cell.texts["n_tokens"].tolist() == [22, 14]
    prefix = cell.trace["prefix"].to_numpy()[0]
    assert np.isfinite(prefix[0]).all()
    assert np.isfinite(prefix[1, :14]).all()
    assert np.isnan(prefix[1, 14:]).all()


def test_rows_of_a_batch_are_bounded_by_their_cache():
    model = load("smollm2-135m")
    short = plan(model, PREFIX, SENTIMENT, "positive", ["The lake"], None, 128, 300)
    assert {len(group) for group in short.batches} == {120, 60}
    long = plan(model, PREFIX, SENTIMENT, "positive", ["The lake"], None, 8000, 300)
    bytes_of_a_row = 2 * 30 * 3 * 64 * 4 * 8003
    assert max(len(group) for group in long.batches) == (2 << 30) // bytes_of_a_row


def test_prompts_share_a_batch_only_where_the_context_holds_both():
    """A short prompt has more steps than a long one; together they must not run past the last
    position."""
    model = load("tiny-gpt2")
    prompts = ["a" * 220, "a" * 230, "b" * 219]
    todo = plan(model, PREFIX, SENTIMENT, "positive", prompts, None, 235, 1)
    assert [[prompt for prompt, _ in group] for group in todo.batches] == [[0], [1], [2]]
    cell = made(model, prompts, length=235)
    assert cell.texts["n_tokens"].tolist() == [15, 5, 16]


def test_traces_of_different_prefix_lengths_join():

    detox = load_task("detox")
    settings = {"length": 6, "samples": 1, "seed": 1, "patterns": [(0, 1)], "max_rows": 1}
    run = run_of(
        load("tiny-llama"),
        PREFIX,
        detox,
        ["nontoxic", "toxic"],
        ["The lake", "The blue lake"],
        **settings,
    )
    cells = [finished_cell(run, key) for key in run.by_key]
    texts = pd.concat([cell.texts for cell in cells], ignore_index=True)
    trace = join_traces([cell.trace for cell in cells], texts)
    assert trace.sizes["prefix_token"] == len("Very nontoxic:")
    tokens = trace["prefix_tokens"].to_numpy()[0, :, 0]
    assert np.isnan(tokens).sum(axis=1).tolist() == [0, 0, 3, 3]
    assert trace.sizes["key"] == 1 + len("Very nontoxic:The blue lake") + 5


def test_doubled_bos_generates_as_the_released_scripts_do():
    model = load("tiny-llama", "float64")
    augmentation = Augmentation(alpha=1, profile="released")
    cell = made(model, ["The lake"], augmentation=augmentation, doubled_bos=True, top_k=1)
    branch = Layout.of(model.tokenizer, "Very positive:", "The lake", doubled_bos=True)
    tokens = cell.texts["tokens"][0]
    logits, _ = oracle_logits(model, branch, tokens[:-1], augmentation)
    assert logits.argmax(1).tolist() == tokens
    assert cell.trace["n_bos"].item() == 2


@dataclasses.dataclass(frozen=True)
class Sum(type(PREFIX)):
    name = "sum"

    def branches(self, task, attribute):
        return (Branch("base"), Branch("prefix", task.prefix(attribute)))

    def combine(self, log_probs, state):
        return log_probs["base"] + log_probs["prefix"]


def test_every_branch_sees_the_same_tokens():
    """Two branches as stacked rows equal two separate passes: combining base and prefix by hand."""
    model = load("tiny-neox", "float64")
    cell = made(model, method=Sum(), augmentation=Augmentation(alpha=1), top_k=1)
    assert cell.trace["branch"].values.tolist() == ["base", "prefix"]
    for sample in cell.texts.itertuples():
        base, _ = oracle_logits(
            model, Layout.of(model.tokenizer, None, sample.prompt), sample.tokens[:-1]
        )
        with_prefix = Layout.of(model.tokenizer, "Very positive:", sample.prompt)
        steered, _ = oracle_logits(model, with_prefix, sample.tokens[:-1], Augmentation(alpha=1))
        assert (base.log_softmax(1) + steered.log_softmax(1)).argmax(1).tolist() == sample.tokens


def test_nothing_stays_hooked_after_generation():
    model = load("tiny-gpt2")
    made(model, augmentation=Augmentation(alpha=1))
    assert not [
        name for name, point in model.hook_dict.items() if point.has_hooks(including_permanent=True)
    ]


@pytest.mark.parametrize(
    ("name", "task", "attribute", "parameters", "profile"),
    [
        ("prefix", "topic", "world", {}, "released"),
        ("con-prefix", "sentiment", "negative", {}, "paper"),
        ("con-prefix", "sentiment", "negative", {"form": "hard-contrast"}, "released"),
        ("air-decoding", "sentiment", "positive", {"omega": 3.0}, "paper"),
        ("air-decoding", "topic", "sports", {"omega": 3.0, "pro_aug": False}, "released"),
        ("preadd", "detox", "nontoxic", {"pro_aug": True}, "paper"),
        ("palette", "sentiment", "positive", {}, "released"),
    ],
)
def test_every_methods_texts_follow_from_separate_branches(
    profile, name, task, attribute, parameters, tmp_path
):
    """Each branch recomputed alone by the oracle under what the method assigns to it, combined step
    by step."""
    model, task = load("tiny-gpt2", "float64"), load_task(task)
    method, augmentation = (
        methods.get_for_task(name, task, **parameters),
        Augmentation(alpha=0.8, profile=profile),
    )
    if any(isinstance(branch.prefix, SoftPrefixKey) for branch in method.branches(task, attribute)):
        method = dataclasses.replace(method, prefixes=soft_set(tmp_path, model, task))
    prompts = ["The lake", "In summary, a"]
    settings = {"augmentation": augmentation, "length": 20, "top_k": 1, "trace": "none"}
    cell = made(model, prompts, attribute, task, method, **settings)
    branches = method.branches(task, attribute)
    for sample in cell.texts.itertuples():
        log_probs, state = {}, None
        for branch, assigned in zip(
            branches, assign_augmentations(method, branches, augmentation), strict=True
        ):
            soft = (
                load_prefix(tmp_path, branch.prefix.attribute)
                if isinstance(branch.prefix, SoftPrefixKey)
                else None
            )
            text, slots = (branch.prefix, 0) if soft is None else (None, len(soft))
            keys = Layout.of(model.tokenizer, text, branch.join + sample.prompt, soft=slots)
            found_here, _ = oracle_logits(model, keys, sample.tokens[:-1], assigned, prefix=soft)
            log_probs[branch.name] = found_here.log_softmax(1)
        for step, token in enumerate(sample.tokens):
            here = {branch: rows[step : step + 1] for branch, rows in log_probs.items()}
            assert method.combine(here, state).argmax().item() == token
            state = method.advance(state, here, torch.tensor([token]))


@pytest.mark.parametrize("use_cache", [True, False])
def test_transformer_lens_own_generate_runs_under_the_bias(tiny, use_cache):
    """`augmented` around the bridge's `generate`, cached or not, writes what our loop writes."""
    model, augmentation = load(tiny), Augmentation(alpha=2)
    asked = {"prompts": ["The lake"], "top_k": 1, "length": 18, "trace": "none"}
    ours = made(model, **asked, augmentation=augmentation).texts["tokens"][0]
    branch = Layout.of(model.tokenizer, "Very positive:", "The lake")
    settings = {
        "max_new_tokens": len(ours),
        "do_sample": False,
        "stop_at_eos": False,
        "verbose": False,
    }
    with torch.no_grad(), augmented(model, augmentation, branch):
        theirs = model.generate(
            branch.tensor, return_type="tokens", use_past_kv_cache=use_cache, **settings
        )
    assert theirs[0, len(branch) :].tolist() == ours
    assert ours != made(model, **asked).texts["tokens"][0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_generates(tiny, model_class, dtype):
    cell = made(load(tiny, dtype, model_class), augmentation=Augmentation(alpha=2), samples=2)
    assert len(cell.texts) == 4
    assert np.isfinite(cell.trace["prefix"].to_numpy()[0, 0]).all()
    total = sum(cell.trace[name] for name in ("bos", "prefix", "prompt", "generated")).to_numpy()[
        0, 0
    ]
    assert np.abs(total - 1).max() < 0.03  # bfloat16 weights carry 3 digits; 40 of them are summed
