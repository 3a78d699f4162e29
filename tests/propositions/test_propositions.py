"""Verdicts on logits whose law is known, and tables of traces against the oracle's arithmetic."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from conftest import load

from analyses.lab.claims import Claim
from lapa2_interp import Augmentation
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.synthetic import (
    LOGIT_FAMILIES,
    draw_means,
    geometric_lengths,
    text_sums,
)
from lapa2_interp.bias.theory import augmented_share, shifted_share
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.propositions.claims import count_by_source
from lapa2_interp.propositions.synthetic import (
    synthetic_shares,
    synthetic_slopes,
    synthetic_verdicts,
)
from lapa2_interp.propositions.traces import (
    decay_curve_table,
    exponent_table,
    head_decay_table,
    head_kinds,
    local_table,
    prediction_table,
    prefix_curves,
    stack_alphas,
    thin,
    thinned_steps,
    trace_verdicts,
)
from lapa2_interp.stats import bounds

RATE, SHARE, MEAN, TYPICAL = (
    "A is O(1/l)",
    "E[A] = l_pre / l",
    "E[A] falls as 1/l",
    "a typical A keeps e_P/e_R",
)
REACHED, LAW, ODDS = (
    "A' is what Eq. 11 says",
    "the bias adds alpha log(l/l_pre)",
    "odds go as r^alpha / (r-1)",
)


def judge(low, high, expected, margin, relation="same"):
    return Claim("", "", relation, margin).verdict(low, high, expected)


def test_verdicts_are_never_forced():
    assert judge(-0.02, 0.03, 0, 0.05) == "as in the paper"
    assert judge(-0.02, 0.06, 0, 0.05) == "inconclusive"
    assert judge(0.06, 0.09, 0, 0.05) == "against the paper"
    assert judge(-9.0, -3.0, 0, 0.05, "less") == "as in the paper"
    assert judge(0.1, 0.2, 0, 0.05, "less") == "against the paper"
    assert judge(0.1, 0.2, 0, 0.0, "more") == "as in the paper"
    assert judge(-0.1, 0.2, 0, 0.0, "more") == "inconclusive"
    assert judge(np.nan, np.nan, 0, 0.05) == "inconclusive", "one text tells no spread"


# --- synthetic


@pytest.mark.parametrize("name", LOGIT_FAMILIES)
def test_sums_equal_those_of_texts_written_out_key_by_key(name):
    family, l_pre, step = LOGIT_FAMILIES[name], 4, 3
    row = family.draw(np.random.default_rng(5), 100)
    for l in (12, 20, 40):
        sums = text_sums(family, np.exp(row), np.cumsum(np.exp(row)), l, l_pre, step)
        texts = list(range(0, 100 - l, step))
        assert len(texts) == len(sums[0]) == len(sums[1])
        for start, prefix, others in zip(texts, *sums, strict=True):
            z = row[start : start + l].copy()
            if family.recency:  # the other keys are those of the next stretch of l keys
                stretch = (start // l + 1) % (100 // l)
                z[l_pre:] = row[stretch * l : (stretch + 1) * l][l_pre:]
                fall = -family.recency * np.log(1 + l - 1 - np.arange(l))  # the query is the last
                z += np.where((np.arange(l) < l_pre) & family.anchored, 0, fall)
            if family.sink is not None:
                z[l_pre] = family.sink
            z[:l_pre] += family.growth * np.log(l)
            assert prefix == pytest.approx(np.exp(z[:l_pre]).sum())
            assert others == pytest.approx(np.exp(z[l_pre:]).sum())


@pytest.fixture(scope="module")
def synthetic():
    return draw_means(geometric_lengths(100_000, 3), 3, (0.0, 0.25, 0.5, 1.0, 1.5), rows=10)


def of(table, family):
    return table[
        table["where"] == f"synthetic: {family} ({LOGIT_FAMILIES[family].keeps})"
    ].set_index("claim")


def test_what_is_true_is_decided(synthetic):
    """O(1/l) wherever the ratio is bounded; the mean is l_pre / l, and so falls with slope -1,
    wherever keys are exchangeable; everything if all are equal."""
    table = synthetic_verdicts(synthetic)
    for name, family in LOGIT_FAMILIES.items():
        rows = of(table, name)
        if name != "sink":  # its ratio still rises at this length, always less
            expected = "as in the paper" if family.bounded else "against the paper"
            assert rows.loc[RATE, "verdict"] == expected, name
        if family.exchangeable:
            assert (rows.loc[[SHARE, MEAN], "verdict"] == "as in the paper").all(), name
            assert rows.loc[SHARE, "mean"] == pytest.approx(1, abs=0.02), name
            assert rows.loc[MEAN, "mean"] == pytest.approx(-1, abs=0.02), name
    assert (of(table, "equal")["verdict"] == "as in the paper").all()
    assert of(table, "normal").loc[TYPICAL, "verdict"] == "as in the paper"
    assert synthetic["texts"].min() > 80_000


def test_intervals_from_rows_hold_the_exact_slope():
    """e^z of infinite mean: rare keys carry E[A] = l_pre / l, and the texts of a row share them. In
    40 repetitions the 95 % interval holds -1 about as often as it says."""
    family, held = {"infinite mean": LOGIT_FAMILIES["infinite mean"]}, 0
    for seed in range(40):
        means = draw_means(np.array([64, 300, 1500]), 3, (0.0,), family, rows=10, seed=seed)
        row = of(synthetic_verdicts(means), "infinite mean").loc[MEAN]
        held += row["low"] < -1 < row["high"]
    assert held >= 34


def test_the_mean_may_fall_as_1_over_l_while_a_typical_text_does_not(synthetic):
    """e^z of infinite mean: keys are exchangeable, so E[A] = l_pre/l; but a text's A falls faster,
    and few carry the mean."""
    rows = of(synthetic_verdicts(synthetic), "infinite mean")["verdict"]
    assert rows[TYPICAL] == "against the paper"
    assert rows[MEAN] == "as in the paper"


def test_violations_are_reported(synthetic):
    table = synthetic_verdicts(synthetic)
    for name in ("growing prefix", "anchored prefix"):
        rows = of(table, name)
        assert (rows.loc[[RATE, SHARE, MEAN, TYPICAL], "verdict"] == "against the paper").all(), (
            name
        )
    reached = table[(table["claim"] == REACHED) & (table["alpha"] == 1)].set_index("where")[
        "verdict"
    ]
    assert reached["synthetic: equal (exchangeable)"] == "as in the paper"
    assert reached["synthetic: normal (exchangeable)"] == "against the paper", (
        "exchangeable is not equal: E[X/(1+X)] < 1/2"
    )


def test_a_sink_at_short_lengths_is_inconclusive():
    families = {name: LOGIT_FAMILIES[name] for name in ("sink", "growing prefix")}
    table = synthetic_verdicts(draw_means(geometric_lengths(1000, 3), 3, (0.0,), families))
    assert of(table, "sink").loc[RATE, "verdict"] == "inconclusive"
    assert of(table, "growing prefix").loc[RATE, "verdict"] == "against the paper"


@pytest.mark.parametrize("alpha", [0.25, 1.0, 2.0])
def test_the_law_on_whole_rows_of_logits(alpha):
    """Families draw sums and apply the law; here the bias goes on the logits themselves and softmax
    runs over all of them."""
    rng, l_pre = np.random.default_rng(1), 3
    for l in (10, 100, 1000):
        for family in ("normal", "infinite mean", "wide normal"):
            z = LOGIT_FAMILIES[family].draw(rng, l)
            odds = np.log(np.exp(z[:l_pre]).sum() / np.exp(z[l_pre:]).sum())
            z[:l_pre] += alpha * np.log(l / l_pre)
            weights = np.exp(z - z.max())
            share = weights[:l_pre].sum() / weights.sum()
            assert shifted_share(
                1 / (1 + np.exp(-odds)), alpha * np.log(l / l_pre)
            ) == pytest.approx(share, rel=1e-9)


def test_identical_is_not_exchangeable():
    """AR(1) logits have one distribution at every position, yet the mean attention on the first
    three of 64 is not 3/64: as whole rows of logits say, too."""
    family = LOGIT_FAMILIES["correlated"]
    means = draw_means(np.array([64, 65, 66]), 3, (0.0,), {"correlated": family})
    ratio = means["share"].to_numpy()[0, :, 0, 0] * 64 / 3
    error = ratio.std(ddof=1) / np.sqrt(len(ratio))
    assert ratio.mean() - 3 * error > 1
    rng = np.random.default_rng(0)
    weights = np.exp([family.draw(rng, 64) for _ in range(4000)])
    multiples = weights[:, :3].sum(1) / weights.sum(1) * 64 / 3
    assert abs(multiples.mean() - ratio.mean()) < 4 * np.hypot(
        multiples.std() / np.sqrt(4000), error
    )


def test_synthetic_tables(synthetic):
    few = synthetic.sel(family=["equal", "normal"], alpha=[0.0, 0.5])
    shares, slopes = synthetic_shares(few), synthetic_slopes(few)
    equal = shares[shares["family"] == "equal"]
    assert equal["mean"].to_numpy() == pytest.approx(equal["predicted"].to_numpy())
    slope = slopes.set_index(["family", "alpha", "quantity"])
    assert slope.loc[("equal", 0.5, "log A'"), "mean"] == pytest.approx(
        slope.loc[("equal", 0.5, "log A'"), "predicted"]
    )
    steep = (
        slope.loc[("normal", 0.5, "log-odds"), "mean"]
        - slope.loc[("normal", 0.0, "log-odds"), "mean"]
    )
    assert steep == pytest.approx(0.5)


def test_shards_draw_the_same():
    lengths = geometric_lengths(200, 3)
    both, fewer = (draw_means(lengths, 3, (0.0, 1.0), rows=rows) for rows in (3, 2))
    for name in ("share", "log_ratio"):
        assert (both[name].isel(row=slice(2)) == fewer[name]).all()


# --- traces with known exponents


def made_trace(growth, *, alpha=0.0, texts=12, steps=300, noise=0.1, seed=0, n=3, l0=8):
    """A trace whose log(e_P/e_R) grows as growth * log(l), with AR(1) noise along steps that texts
    do not share."""
    rng = np.random.default_rng(seed)
    l = l0 + np.arange(steps)
    shocks = rng.normal(0, noise * np.sqrt(1 - 0.9**2), (texts, steps))
    wobble = np.zeros((texts, steps))
    for i in range(1, steps):
        wobble[:, i] = 0.9 * wobble[:, i - 1] + shocks[:, i]
    odds = (
        growth * np.log(l)
        + wobble
        + rng.normal(0, 0.3, (texts, 1))
        - np.log(l / n - 1)
        + alpha * np.log((l - 1) / n)
    )
    share = (1 / (1 + np.exp(-odds)))[None, :, :, None, None]
    rest = 1 - share
    data = {"prefix": share, "bos": rest / (l - n)[None, None, :, None, None]}
    data |= {"prompt": (rest - data["bos"]) / 4, "generated": (rest - data["bos"]) * 3 / 4}
    data |= {f"nearest_{k}": rest * k / 16 for k in (2, 4, 6, 8)}
    axes = ("branch", "sample", "step", "layer", "head")
    return xr.Dataset(
        {name: (axes, values) for name, values in data.items()},
        {
            "branch": ["target"], "sample": np.arange(texts), "step": np.arange(steps),
            "l_pre": (axes[:2], np.full((1, texts), n)), "n_bos": (axes[:2], np.ones((1, texts), int)),
            "l_kv": (axes[:3], np.tile(l, (1, texts, 1))),
        },
    )  # fmt: skip


@pytest.mark.parametrize("growth", [0.0, -0.3, 0.4])
def test_known_exponents_are_found(growth):
    traces = stack_alphas({a: made_trace(growth, alpha=a) for a in (0.0, 0.5)})
    table = exponent_table(traces).set_index(["alpha", "quantity"])
    row = table.loc[(0.0, "log-odds")]
    assert row["low"] - 0.02 < growth < row["high"] + 0.02
    assert table.loc[(0.5, "rise"), "mean"] == pytest.approx(0.5, abs=1e-9)
    verdicts = trace_verdicts(traces, "made").set_index("claim")["verdict"]
    expected = {0.0: "as in the paper", -0.3: "as in the paper", 0.4: "against the paper"}[growth]
    assert verdicts[RATE] == expected
    assert verdicts[TYPICAL] == ("as in the paper" if growth == 0 else "against the paper")
    assert verdicts[LAW] == "as in the paper"
    assert verdicts[ODDS] == ("as in the paper" if growth == 0 else "against the paper")


@pytest.mark.parametrize("seed", range(8))
def test_a_sink_of_any_size_refutes_nothing(seed):
    """BOS holds e^z = 10^5: over these lengths e_P/e_R rises like l and does not bend, but it is
    bounded all the same."""
    trace = made_trace(0.0, seed=seed, steps=250)
    l, n, sink = trace["l_kv"].to_numpy()[0, :, :, None, None], 3, 1e5
    odds = (trace["prefix"] / (1 - trace["prefix"])).to_numpy()[0]
    weights = odds * (l - n)  # e^z of the prefix, where all other keys have 1
    total = weights + sink + (l - n - 1)
    for name, mass in {
        "prefix": weights,
        "bos": sink,
        "prompt": 1.0,
        "generated": l - n - 2,
    }.items():
        trace[name] = (trace["prefix"].dims, np.broadcast_to(mass / total, total.shape)[None])
    verdicts = trace_verdicts(stack_alphas({0.0: trace}), "made").set_index("claim")["verdict"]
    assert verdicts[RATE] != "against the paper"
    assert verdicts[TYPICAL] == "against the paper"


def test_a_verdict_follows_from_its_own_row():
    """Interval, margin and claim of every row give its verdict, or it says inconclusive."""
    for growth in (0.0, 0.3):
        table = trace_verdicts(
            stack_alphas({a: made_trace(growth, alpha=a) for a in (0.0, 0.5)}), "made"
        )
        for row in table.to_dict("records"):
            expected = float(row["expected"].lstrip("<>= "))
            kind = {"<": "less", ">": "more"}.get(row["expected"][0], "same")
            verdict = judge(row["low"], row["high"], expected, row["margin"], kind)
            assert row["verdict"] in (verdict, "inconclusive"), row


def test_a_strong_prefix_is_not_rounded_away():
    """A' = 1 - 1e-9 in float32 is 1; what is left is in the other sums."""
    trace = made_trace(0.0)
    strong = made_trace(0.0, alpha=1.0)
    left = np.float64(1e-9)
    for dataset, share in ((trace, 0.5), (strong, 1 - left)):
        parts = {
            "prefix": share,
            "bos": (1 - share) / 2,
            "prompt": (1 - share) / 4,
            "generated": (1 - share) / 4,
        }
        if dataset is strong:
            parts = {"prefix": 1.0, "bos": left / 2, "prompt": left / 4, "generated": left / 4}
        for name, value in parts.items():
            dataset[name] = (
                dataset["prefix"].dims,
                np.full(dataset["prefix"].shape, value, np.float32),
            )
    curves = prefix_curves(stack_alphas({0.0: trace, 1.0: strong}), pooled=True)
    assert curves.odds[1, 0, 0] == pytest.approx(np.log(1e9), rel=1e-6)


def test_intervals_cover_under_autocorrelated_noise():
    """Resampling texts: the 95 % interval of the slope holds the truth in about 95 % of 200
    repetitions."""
    held = 0
    for seed in range(200):
        curves = prefix_curves(
            stack_alphas({0.0: made_trace(0.2, seed=seed, texts=20, steps=80)}), pooled=True
        )
        low, high = bounds(curves.growth()[0], curves.texts)  # as the tables take them
        held += low < 0.2 < high
    assert 0.88 <= held / 200 <= 0.98


def test_head_table_by_hand():
    """Uniform attention: the ratio is 1, the bound is reached, and nothing is left to explain."""
    trace = made_trace(0.0, noise=0.0)
    for name, keys in {"prefix": 3, "bos": 1, "prompt": 2, "generated": trace["l_kv"] - 6}.items():
        trace[name] = (keys / trace["l_kv"]).expand_dims({"layer": 1, "head": 1}, axis=(3, 4))
    row = head_decay_table(stack_alphas({0.0: trace})).iloc[0]
    assert row["growth"] == pytest.approx(0, abs=1e-9)
    assert row["verdict"] == "as in the paper"
    assert row["sup_ratio"] == pytest.approx(1)
    assert row["tightness"] == pytest.approx(1)
    assert (row["C"], row["D"]) == (pytest.approx(3, rel=1e-3), pytest.approx(8, rel=1e-3))
    assert row["R2"] == pytest.approx(1)
    assert row["exponent"] == pytest.approx(-1)
    assert row["kind"] == "mixed"
    trace = made_trace(0.0, noise=0.0)
    shape, dims = (*trace["bos"].shape[:-1], 5), trace["bos"].dims
    trace = trace.isel(head=[0] * 5)
    for name, values in {
        "bos": (0.5, 0.1, 0.49, 0.2, 0.6),
        "nearest_2": (0.5, 0.5, 0.49, 0.1, 0.3),
        "prefix": (0.0, 0.4, 0.02, 0.5, 0.1),
    }.items():
        trace[name] = (dims, np.broadcast_to(np.array(values), shape))
    kinds = head_kinds(stack_alphas({0.0: trace}))["kind"].tolist()
    assert kinds == ["sink", "local", "mixed", "prefix", "sink"]


def test_prediction_follows_the_augmentations_fields():
    """Layers, heads, phase and the length rule: what is not augmented is predicted to stay."""
    model = load("tiny-llama", "float64")
    branch = Layout.of(model.tokenizer, "Very positive:", "The lake")
    text = np.random.default_rng(0).integers(40, 200, (2, 30)).tolist()
    rules = {
        0.5: Augmentation(alpha=0.5, layers=(0,), heads=((0, 1),), phase="decode"),
        1.0: Augmentation(alpha=1.0, layers=(0,), length_rule="kv"),
    }
    forced = {
        alpha: teacher_forced(model, branch, text, rule)
        for alpha, rule in ({0.0: None} | rules).items()
    }
    traces = stack_alphas(forced)
    table = prediction_table(traces, rules)
    assert table[table["layer"] == 0]["error"].max() < 1e-4


def test_thinned_steps():
    assert thinned_steps(3).tolist() == [0, 1, 2]
    steps = thinned_steps(8192)
    assert (steps[0], steps[-1]) == (0, 8191)
    assert len(steps) <= 48
    assert len(np.unique(steps)) == len(steps)


# --- a real network


@pytest.fixture(scope="module", params=["tiny-gpt2", "tiny-llama"])
def forced(request):
    model = load(request.param, "float64")
    layouts = [
        Layout.of(model.tokenizer, "Very positive:", prompt)
        for prompt in ("The lake", "Once upon", "A man", "It")
    ]
    rng = np.random.default_rng(0)
    texts = rng.integers(40, 200, (4, 60)).tolist()
    rules = {0.0: None} | {
        alpha: Augmentation(alpha=alpha, layers=(1, 2, 3)) for alpha in (0.5, 1.0)
    }
    return (
        stack_alphas(
            {alpha: teacher_forced(model, layouts, texts, rule) for alpha, rule in rules.items()}
        ),
        rules,
    )


def test_the_exact_law_in_the_first_augmented_layer(forced):
    traces, rules = forced
    table = prediction_table(traces, {alpha: rule for alpha, rule in rules.items() if rule})
    first = table[table["layer"] == 1]
    assert first["error"].max() < 1e-4, "traces are float32"
    assert (first["direct"] - 1).abs().max() < 1e-4
    assert table[table["layer"] == 3]["error"].min() > 1e-4, "queries and keys below have changed"
    before = table[table["layer"] == 0]
    assert (before["measured"] - before["baseline"]).abs().max() < 1e-7, "layer 0 is not augmented"
    verdicts = trace_verdicts(traces, "tiny", first_layer=1)
    assert (verdicts[verdicts["claim"] == LAW]["verdict"] == "as in the paper").all()


def test_verdicts_recomputed_from_the_stored_trace(forced, tmp_path):
    """The slope of one verdict, from the netCDF file with nothing of ours."""
    from scipy.stats import linregress

    traces, _ = forced
    thin(traces).to_netcdf(tmp_path / "trace.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "trace.nc", engine="h5netcdf") as stored:
        share = stored["prefix"].mean(("layer", "head")).astype("float64")
        l, n = stored["l_kv"].to_numpy(), stored["l_pre"].to_numpy()
        slopes = [
            linregress(
                np.log(l[i]), np.log(share[0, i] / (1 - share[0, i])) + np.log(l[i] / n[i] - 1)
            ).slope
            for i in range(4)
        ]
    row = trace_verdicts(traces, "tiny", 1).set_index("claim").loc[TYPICAL]
    assert row["mean"] == pytest.approx(np.mean(slopes), abs=1e-5)


def test_the_local_ratio_within_a_layer_is_an_identity(forced):
    table = local_table(forced[0])
    first = table[(table["layer"] == 1) & (table["pooling"] == "per head")]
    assert len(first) == 2 * 2 * 4
    assert first["difference"].abs().max() < 1e-5
    pooled = table[
        (table["layer"] == 1) & (table["pooling"] == "pooled") & (table["outside"] == "prefix")
    ]
    assert pooled["difference"].abs().max() > 1e-5, (
        "heads lose different shares, so the pooled ratio moves"
    )


def test_local_ratio_by_hand(forced):
    traces, _ = forced
    table = local_table(traces)
    row = table[(table["alpha"] == 1) & (table["layer"] == "all") & (table["k"] == 4)
                & (table["outside"] == "prefix") & (table["pooling"] == "pooled")].iloc[0]  # fmt: skip
    means = traces[["nearest_4", "prefix"]].sel(alpha=1.0).mean(("layer", "head"))
    assert row["augmented"] == pytest.approx(
        float((means["nearest_4"] / (1 - means["prefix"])).mean()), rel=1e-5
    )


def test_tables_are_tidy(forced):
    traces, rules = forced
    pooled = decay_curve_table(traces)
    assert set(pooled["alpha"]) == {0.0, 0.5, 1.0}
    assert pooled.groupby("alpha").size().eq(60).all()
    heads = head_decay_table(traces)
    assert len(heads) == 3 * 16
    assert heads[heads["alpha"] == 0]["R2"].notna().any()
    assert heads["tightness"].between(0, 1 + 1e-6).all()
    assert isinstance(prediction_table(traces, {a: r for a, r in rules.items() if r}), pd.DataFrame)
    assert augmented_share(8, 3, 0.0) == pytest.approx(3 / 8)


def test_verdicts_on_the_model_are_counted_apart_from_those_on_synthetic_logits():
    rows = [
        ("synthetic: equal (exchangeable)", "as in the paper"),
        ("synthetic: sink (not exchangeable)", "against the paper"),
        ("synthetic: growth (exchangeable, ratio unbounded)", "against the paper"),
        ("tiny-gpt2, free texts", "as in the paper"),
        ("tiny-gpt2, long texts", "inconclusive"),
    ]
    assert count_by_source(pd.DataFrame(rows, columns=["where", "verdict"])) == [
        "Claims on the model: 1 as in the paper, 1 inconclusive.",
        "Claims on synthetic logits that keep the assumptions: 1 as in the paper.",
        "Claims on synthetic logits that break them: 2 against the paper.",
    ]
    for family in LOGIT_FAMILIES.values():
        is_kept = family.exchangeable and family.bounded
        where = f"synthetic: x ({family.keeps})"
        (line,) = count_by_source(pd.DataFrame({"where": [where], "verdict": ["inconclusive"]}))
        assert ("keep" in line) == is_kept
