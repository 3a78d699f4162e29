"""Recorded sums against whole patterns of a full recomputation."""

import functools

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from conftest import generate, load
from oracle import oracle_logits

from lapa2_interp import Augmentation
from lapa2_interp import generate as make_run
from lapa2_interp.attention.recorder import trace_bytes
from lapa2_interp.attention.tables import (
    fit_table,
    head_table,
    local_ratio,
    pooled,
    prefix_token_table,
    step_table,
)
from lapa2_interp.attention.trace import SUMS, join_traces
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.theory import fit_decay
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.plots import prefix_token_bars

PROMPTS = ["The lake", "Once upon a time"]


@functools.cache
def made(name, model_class="TransformerBridge", **settings):
    """A run of a model, shared by all tests, which only read it."""
    settings = {"length": 26, "samples": 2, "augmentation": Augmentation(alpha=1)} | settings
    model, task = load(name, model_class=model_class), load_task("sentiment")
    return generate(model, methods.get("prefix"), task, "positive", PROMPTS, **settings)


def expected_sums(pattern, layout):
    """The sums of one query's attention row [head, key], by slicing."""
    n_bos, pre, n_keys = layout.n_bos, layout.l_pre, pattern.shape[1]
    rest = [key for key in range(n_keys) if not n_bos <= key < n_bos + pre]
    sums = {
        "bos": pattern[:, :n_bos].sum(1),
        "prefix": pattern[:, n_bos : n_bos + pre].sum(1),
        "prompt": pattern[:, n_bos + pre : len(layout)].sum(1),
        "generated": pattern[:, len(layout) :].sum(1),
        "released_slice": pattern[:, : layout.counted].sum(1),
    }
    return sums | {f"nearest_{k}": pattern[:, rest[-k:]].sum(1) for k in (2, 4, 6, 8)}


@pytest.mark.parametrize(
    "augmentation", [None, Augmentation(alpha=1), Augmentation(alpha=1, profile="released")]
)
def test_every_sum_of_every_head_and_step_equals_the_recomputed_pattern(
    tiny, model_class, augmentation
):
    model = load(tiny, model_class=model_class)
    run = made(tiny, model_class, augmentation=augmentation, patterns=((1, 2), (3, 0)))
    assert run.trace["prefix"].dims == ("branch", "sample", "step", "layer", "head")
    trace = {name: run.trace[name].to_numpy()[0] for name in (*SUMS, "prefix_tokens", "pattern")}
    l_kv = run.trace["l_kv"].to_numpy()[0]
    for number, sample in enumerate(run.texts.itertuples()):
        layout = Layout.of(model.tokenizer, "Very positive:", sample.prompt)
        _, patterns = oracle_logits(model, layout, sample.tokens[:-1], augmentation)
        for step in range(sample.n_tokens):
            query = len(layout) - 1 + step
            rows = {
                layer: pattern[:, query, : query + 1].double()
                for layer, pattern in patterns.items()
            }
            for layer, row in rows.items():
                for name, expected in expected_sums(row, layout).items():
                    recorded = trace[name][number, step, layer]
                    assert np.abs(recorded - expected.numpy()).max() < 2e-5, (name, layer, step)
            tokens = np.mean(
                [row[:, slice(*layout.prefix)].numpy() for row in rows.values()], axis=(0, 1)
            )
            assert np.abs(trace["prefix_tokens"][number, step] - tokens).max() < 2e-5
            for pair, (layer, head) in enumerate([(1, 2), (3, 0)]):
                weights = trace["pattern"][number, step, pair]
                assert np.abs(weights[: query + 1] - rows[layer][head].numpy()).max() < 2e-5
                assert np.isnan(weights[query + 1 :]).all()
            assert l_kv[number, step] == query + 1


def test_the_parts_add_up_to_one():
    trace = made("tiny-llama").trace
    total = sum(trace[name] for name in ("bos", "prefix", "prompt", "generated")).to_numpy()
    assert np.nanmax(np.abs(total - 1)) < 1e-6


def test_steps_a_sample_does_not_have_are_nan():
    run = made("tiny-gpt2")
    for number, sample in enumerate(run.texts.itertuples()):
        for name in (*SUMS, "prefix_tokens"):
            values = run.trace[name].to_numpy()[0, number]
            assert np.isfinite(values[: sample.n_tokens]).all()
            assert np.isnan(values[sample.n_tokens :]).all()


def test_pooled_is_the_mean_of_full():
    full, mean = (made("tiny-neox", trace=kind).trace for kind in ("full", "pooled"))
    assert mean["prefix"].dims == ("branch", "sample", "step")
    for name in SUMS:
        assert np.allclose(pooled(full, name), mean[name], atol=1e-6, equal_nan=True)
    assert made("tiny-neox", trace="none").trace is None


def test_batches_do_not_change_a_trace():
    together, alone = (made("tiny-gpt2", max_rows=rows).trace for rows in (None, 1))
    for name in SUMS:
        assert np.allclose(together[name], alone[name], atol=1e-5, equal_nan=True)


def test_a_base_branch_has_no_prefix():
    model = load("tiny-gpt2")
    run = generate(
        model, methods.get("none"), load_task("sentiment"), "positive", PROMPTS, length=34
    )
    assert np.nanmax(run.trace["prefix"].to_numpy()) == 0
    assert run.trace.sizes["prefix_token"] == 0
    first = run.trace.isel(branch=0, sample=0, step=0)
    assert np.allclose(
        first["released_slice"] + 0, 1 - nearest_last_prompt_token(run, model), atol=1e-5
    )


def nearest_last_prompt_token(run, model):
    """What the released slice misses at step 0 on the raw model: the last prompt token."""
    layout = Layout.of(model.tokenizer, None, PROMPTS[0])
    _, patterns = oracle_logits(model, layout, [])
    return np.stack([patterns[i][:, -1, -1].numpy() for i in range(model.cfg.n_layers)])


@pytest.mark.parametrize("kind", ["full", "pooled"])
def test_local_ratios(kind):
    trace = made("tiny-gpt2", trace=kind).trace
    nearest, prefix, bos = (trace[name].to_numpy() for name in ("nearest_4", "prefix", "bos"))
    np.testing.assert_allclose(local_ratio(trace, 4), nearest / (1 - prefix), rtol=1e-4)
    np.testing.assert_allclose(
        local_ratio(trace, 4, without_bos=True), nearest / (1 - prefix - bos), rtol=1e-4
    )


def test_local_ratios_are_shares_with_doubled_bos_too():
    for doubled in (False, True):
        asked = {"attribute": "positive", "prompts": ["a"], "length": 14}
        trace = make_run(load("tiny-llama"), doubled_bos=doubled, **asked).trace()
        for k in (2, 4, 6, 8):
            assert np.nanmax(local_ratio(trace, k, without_bos=True)) <= 1 + 1e-6


def test_local_ratio_in_a_head_that_is_all_sink():
    """BOS gets all but 1e-6 of the attention: what is left is measured, not rounded away; and BOS
    is no near key of its own."""
    import xarray as xr

    rest = np.float32(1e-6)
    parts = {
        "prefix": 0.0,
        "bos": 1 - rest,
        "prompt": 0.25 * rest,
        "generated": 0.75 * rest,
        "nearest_2": 0.5 * rest,
    }
    data = {
        name: (("branch", "sample", "step"), np.full((1, 1, 1), value, np.float32))
        for name, value in parts.items()
    }
    coords = {
        "l_pre": (("branch", "sample"), [[3]]),
        "n_bos": (("branch", "sample"), [[1]]),
        "l_kv": (("branch", "sample", "step"), [[[20]]]),
    }
    assert local_ratio(xr.Dataset(data, coords), 2, without_bos=True).item() == pytest.approx(0.5)
    data["nearest_8"] = (("branch", "sample", "step"), np.ones((1, 1, 1), np.float32))
    coords["l_kv"] = (("branch", "sample", "step"), [[[8]]])  # BOS, three of the prefix, four more
    assert local_ratio(xr.Dataset(data, coords), 8, without_bos=True).item() == 1.0


def test_tables_of_one_prompt_and_of_short_texts_claim_nothing():
    run = generate(
        load("tiny-gpt2"),
        methods.get("prefix"),
        load_task("sentiment"),
        "positive",
        PROMPTS[:1],
        length=10,
    )
    steps = step_table(run.trace, run.texts)
    assert steps[["low", "high"]].isna().all(axis=None)
    assert steps["prompts"].unique().tolist() == [1]
    fits = fit_table(steps)
    assert fits["arm"].tolist() == ["run"]
    assert fits[["C", "D", "R2"]].isna().all(axis=None)


def test_netcdf_round_trip(tmp_path):
    trace = made("tiny-gpt2", patterns=((0, 0),)).trace.assign_attrs(
        manifest='{"nested": {"a": [1]}}'
    )
    trace.to_netcdf(tmp_path / "trace.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "trace.nc", engine="h5netcdf") as stored:
        xr.testing.assert_identical(stored.load(), trace)


def test_size_estimate_is_the_size():
    run = made("tiny-gpt2", patterns=((0, 0),))
    trace = run.trace
    size = sum(trace[name].nbytes for name in SUMS) + trace["pattern"].nbytes
    assert trace_bytes("full", 4, trace.sizes["step"], 4, 4, 1, trace.sizes["key"]) == size
    assert trace_bytes("none", 4, 30, 4, 4, 0, 60) == 0


def test_tables_of_a_run_with_two_arms():
    runs = {"base": made("tiny-gpt2", augmentation=None), "lapa2": made("tiny-gpt2")}
    texts = pd.concat([run.texts.assign(arm=arm) for arm, run in runs.items()], ignore_index=True)
    trace = join_traces([run.trace for run in runs.values()], texts)
    steps = step_table(trace, texts)
    shortest = min(texts["n_tokens"])
    for arm, run in runs.items():
        mean = pooled(run.trace, "prefix")[0, :, :shortest].mean(axis=0)
        part = steps[(steps["arm"] == arm) & (steps["name"] == "prefix")]
        assert len(part) == shortest
        assert np.allclose(part["mean"], mean)
        assert (part["low"] <= part["mean"] + 1e-12).all()
        assert (part["mean"] <= part["high"] + 1e-12).all()
        fit = fit_decay(np.arange(shortest), mean.astype(float))
        row = fit_table(steps).set_index("arm").loc[arm]
        assert row["C"] == pytest.approx(fit.c, rel=1e-5, nan_ok=True)
        heads = head_table(trace, texts)
        expected = np.nanmean(run.trace["prefix"].to_numpy()[0], axis=1).mean(0)
        shares = (
            heads[heads["arm"] == arm]
            .pivot(index="layer", columns="head", values="prefix")
            .to_numpy()
        )
        assert np.allclose(shares, expected, atol=1e-6)
    tokens = prefix_token_table(trace, texts)
    assert tokens["key"].tolist() == ["BOS", *(f"p{i}" for i in range(1, 15))] * 2
    for arm, run in runs.items():
        own = tokens[tokens["arm"] == arm].set_index("key")["mean"]
        bos = np.nanmean(run.trace["bos"].to_numpy()[0], axis=(1, 2, 3)).mean()
        assert own["BOS"] == pytest.approx(bos, rel=1e-5)
        by_token = np.nanmean(run.trace["prefix_tokens"].to_numpy()[0], axis=1).mean(0)
        assert own.to_numpy()[1:] == pytest.approx(by_token, rel=1e-5)
    trace["prefix_tokens"].load()[:, 0, :, -1] = np.nan  # a prefix that is a token shorter
    of_base = prefix_token_table(trace, texts).set_index(["arm", "key"]).loc["base", "n"]
    assert of_base["p14"] == of_base["p13"] - 1


def test_tables_of_some_samples_take_the_same_part_of_the_trace():
    run = made("tiny-gpt2")
    for table in (step_table, head_table, prefix_token_table):
        assert len(table(run.trace.isel(sample=[2, 3]), run.texts.iloc[2:]))


def test_an_arm_without_a_prefix_token_has_no_bar_of_it():
    run = made("tiny-gpt2")
    texts = run.texts.assign(arm=["long", "long", "short", "short"])
    trace = run.trace.copy(deep=True)
    trace["prefix_tokens"][:, 2:, :, -1] = np.nan
    tokens = prefix_token_table(trace, texts)
    assert tokens["key"].tolist() == [
        "BOS", *(f"p{i}" for i in range(1, 15)), "BOS", *(f"p{i}" for i in range(1, 14))
    ]  # fmt: skip
    bars = prefix_token_bars(tokens).axes[1].containers
    assert [len(bar.patches) for bar in bars if hasattr(bar, "patches")] == [14, 14]
