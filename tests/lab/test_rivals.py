"""analyses/rivals/readers.py and rivals.py: hidden words, agreement, the judge's perplexity, families."""

import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from lapa2_interp import Layout, augmented, generate, recipe
from lapa2_interp.errors import ModelError, RunError
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.models.load import load_transformers

READERS = ("reader 1", "reader 2")
ROOT = Path(__file__).resolve().parent.parent.parent
WRITTEN = [("The lake", " is calm."), ("I saw", " two old friends by the sea"), ("A", " b")]


def test_words_of_prefixes_are_hidden_with_their_inflections():
    from analyses.rivals.readers import hidden_words

    def hide(task, text):
        return hidden_words(task).sub("...", text)

    assert hide("sentiment", "Positively very positive; composite negatives") == (
        "... very ...; composite ..."
    )
    assert hide("topic", "Sports of the World, a sportive transport") == (
        "... of the ..., a ... transport"
    )
    assert hide("detox", "Nontoxic and toxicity") == "... and ..."


def test_agreement_counts_texts_on_which_both_readers_are_sure():
    from analyses.rivals.readers import agreement

    table = pd.DataFrame(
        {
            "task": "sentiment",
            "half": ["development", "test"] * 5,
            "attribute": "positive",
            "reader 1": ["positive"] * 6 + ["negative"] * 2 + ["unclear"] * 2,
            "reader 2": ["positive"] * 6 + ["negative", "positive"] + ["unclear"] * 2,
            "adapter": ["positive", "negative"] * 5,
        }
    )
    topic = table.assign(task="topic", adapter="world", **dict.fromkeys(READERS, "world"))
    toxic = pd.concat([table] * 4).assign(task="detox")
    toxic["adapter"] = toxic["reader 1"] = range(40)
    toxic["reader 2"] = range(0, 80, 2)
    rows = pd.DataFrame(agreement(pd.concat([table, topic, toxic], ignore_index=True)))
    mean = rows.set_index(["task", "half", "who"])["mean"]
    assert mean["sentiment", "all", "readers"] == 90
    assert mean["sentiment", "all", "both readers sure"] == 70
    assert mean["sentiment", "all", "adapter"] == pytest.approx(100 * 3 / 7)
    assert mean["sentiment", "test", "adapter"] == 0
    assert mean["sentiment", "all", "asked attribute"] == pytest.approx(100 * 6 / 7)
    assert mean["detox", "all", "readers"] == mean["detox", "all", "adapter"] == 1


def test_the_judge_reads_continuations_after_their_prompts(tmp_path, monkeypatch):
    """Token by token in float64; what is known is not read again."""
    from analyses.rivals import analyse as rivals

    network, tokenizer, _ = load_transformers("tiny-llama", "float64")
    texts = pd.DataFrame(WRITTEN, columns=["prompt", "continuation"])
    made = rivals.judged_nll(texts, "tiny-llama", tmp_path / "judge.csv")
    for (prompt, new), nats, bits in zip(WRITTEN, made["nll"], made["bits"], strict=True):
        before = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        ids = tokenizer(prompt + new, add_special_tokens=False).input_ids
        nll = []
        for n in range(before, len(ids)):
            read = torch.tensor([[tokenizer.bos_token_id, *ids[:n]]])
            with torch.no_grad():
                nll.append(-float(network(read).logits[0, -1].log_softmax(0)[ids[n]]))
        assert nats == pytest.approx(np.mean(nll), rel=1e-5)
        assert bits == pytest.approx(np.sum(nll) / np.log(2) / len(new), rel=1e-5)
    monkeypatch.setattr(rivals, "_nll_of", None)
    again = rivals.judged_nll(texts, "tiny-llama", tmp_path / "judge.csv")
    pd.testing.assert_frame_equal(again, made, rtol=1e-6)


def test_arms_are_named_after_the_way_and_its_strength():
    from analyses.rivals import analyse as rivals

    def cell(method="prefix", augmentation="none", **settings):
        asked = {"prompts": "The lake", "attribute": "positive", "length": 12}
        return cell_of("tiny-gpt2", method=method, augmentation=augmentation, **asked, **settings)

    wanted = [
        (cell(), "baseline", 0.0),
        (cell(augmentation="lapa2:alpha=0.4"), "lapa2", 0.4),
        (cell(augmentation="key-scale:beta=4"), "key-scale", 3.0),
        (cell(augmentation="log-n:l0=16"), "log-n", 1.0),
        (cell({"name": "caa", "layers": 2, "strength": 2.0}), "caa, layer 2", 2.0),
        (cell({"name": "remind", "every": 8}), "reminder", 1 / 8),
        (cell({"name": "remind", "every": 0, "copies": 4}), "longer prefix", 3),
        (cell({"name": "preadd", "lam": 1.5}), "guidance", 0.5),
        (cell("gate", "lapa2:alpha=0.8"), "gate, lapa2", 0.8),
        (
            cell({"name": "gate", "order": "3/1/0/2"}, "lapa2:alpha=0.8"),
            "retrying gate, lapa2",
            0.8,
        ),
        (cell(temperature=0.8), "temperature", 0.25),
        (cell(augmentation="lapa2:alpha=0.4", temperature=0.8), "temperature 0.8", 0.4),
    ]
    table = rivals.families(SimpleNamespace(by_key={one.key: one for one, *_ in wanted}))
    for one, family, strength in wanted:
        assert table.loc[one.key, "family"] == family
        assert table.loc[one.key, "strength"] == pytest.approx(strength)


def test_two_arms_of_one_name_are_refused():
    from analyses.rivals import analyse as rivals

    asked = {"prompts": "The lake", "attribute": "positive", "length": 12}
    methods = ("prefix", {"name": "gate", "beta": 0.4}, {"name": "gate", "beta": 0.5})
    biases = ("none", "lapa2:alpha=0.4", "lapa2:alpha=0.4")
    cells = [
        cell_of("tiny-gpt2", method=method, augmentation=bias, **asked)
        for method, bias in zip(methods, biases, strict=True)
    ]
    with pytest.raises(RunError, match="are both 'gate, lapa2' at one strength"):
        rivals.families(SimpleNamespace(by_key={cell.key: cell for cell in cells}))


def test_a_methods_own_strength_is_a_family():
    from analyses.rivals import analyse as rivals

    asked = {"prompts": "The lake", "attribute": "positive", "length": 12, "method": "air-decoding"}
    plain, stronger, biased = (
        cell_of("tiny-gpt2", parameters={"omega": omega}, augmentation=bias, **asked)
        for omega, bias in ((140.0, "none"), (280.0, "none"), (140.0, "lapa2:alpha=0.4"))
    )
    table = rivals.families(
        SimpleNamespace(by_key={one.key: one for one in (plain, stronger, biased)})
    )
    assert table.loc[plain.key].tolist() == ["baseline", 0.0]
    assert table.loc[stronger.key].tolist() == ["omega", 1.0]
    assert table.loc[biased.key].tolist() == ["lapa2", 0.4]


def test_arms_with_unlike_prefixes_are_refused():
    from analyses.rivals import analyse as rivals

    asked = {"prompts": "The lake", "attribute": "world", "length": 12, "task": "topic"}
    methods = ("prefix", {"name": "caa", "with_prefix": True})
    cells = [cell_of("smollm2-135m", method=method, **asked) for method in methods]
    with pytest.raises(RunError, match=r"mle \(prefix\); hard \(caa\); give `prefixes`"):
        rivals.families(SimpleNamespace(by_key={cell.key: cell for cell in cells}))


def test_times_are_multiples_of_no_bias_in_the_same_turn():
    from analyses.rivals import measure_time as rivals_time

    arms = pd.MultiIndex.from_tuples([("baseline", 0.0), ("guidance", 1.0)], names=rivals_time.ARM)
    seconds = pd.DataFrame([[1.0, 2.0], [2.0, 3.0], [4.0, 20.0]], columns=arms)
    table = rivals_time.as_multiples(seconds)
    assert table["time"].tolist() == [1.0, 2.0]
    assert table.loc[1, ["low", "high"]].tolist() == [1.5, 5]
    prompts = ["The lake", "The sea", "I saw"]
    cells = [
        cell_of(
            "tiny-gpt2", method=method, augmentation=bias, attribute=attribute, length=12,
            prompts=asked, model_class="TransformersModel", max_rows=2,
        )
        for asked in (prompts, prompts[:2])
        for attribute in ("positive", "negative")
        for method, bias in (("prefix", "none"), ("gate", "lapa2:alpha=0.4"))
    ]  # fmt: skip
    run = SimpleNamespace(by_key={one.key: one for one in cells})
    chosen = rivals_time.chosen_cells(run, 2)
    assert list(chosen) == [("baseline", 0.0), ("gate, lapa2", 0.4)]
    for one in chosen.values():
        assert one.attribute == "positive"
        assert one.prompts == ("The lake", "The sea")
        assert one.max_rows == 2 * len(one.branches)
    seconds = rivals_time.timed(chosen, 3)
    assert seconds.shape == (2, 2)
    assert (seconds > 0).all(axis=None)
    run.by_key.pop(cells[1].key)
    with pytest.raises(RunError, match="arms without cells of the first prompts"):
        rivals_time.chosen_cells(run, 2)


def test_tables_are_those_of_a_run(tmp_path, monkeypatch):
    """From a grid to arms.csv: bits by the judge, and by the model that wrote."""
    from analyses.rivals import analyse as rivals

    asked = {"attribute": "positive", "length": 14, "model_class": "TransformersModel"}
    run = generate(
        "tiny-gpt2", [f"The lake {n}" for n in range(10)], alpha=[0, 0.4],
        parameters={"prefixes": "hard"}, method="prefix", **asked,
    )  # fmt: skip
    run.save(tmp_path / "run")

    def scored(texts, cache):
        return texts.assign(**dict.fromkeys(rivals.METRICS, 50.0))

    monkeypatch.setattr(rivals, "score", scored)
    options = ["--judge", "tiny-llama", "--planned", "10", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["rivals.py", str(tmp_path / "run"), *options])
    rivals.main()
    arms = pd.read_csv(tmp_path / "out" / "arms.csv")
    assert arms["family"].unique().tolist() == ["baseline", "lapa2"]
    texts = run.texts().assign(alpha=lambda t: t["alpha"].astype(float))
    for metric, model in (("bits", "tiny-llama"), ("bits (writer)", "tiny-gpt2")):
        read = rivals.judged_nll(texts, model, tmp_path / f"{model}.csv")
        means = read.groupby(texts["alpha"])["bits"].mean()
        assert arms.loc[arms["metric"] == metric, "mean"].tolist() == pytest.approx(
            means.tolist(), rel=1e-4
        )
    table = pd.read_parquet(tmp_path / "out" / "texts.parquet")
    assert len(table) == len(texts)
    assert not {"text", "continuation"} & set(table)


@torch.no_grad()
def test_layers_are_ordered_by_what_steering_changes(monkeypatch):
    """A layer below the steered one keeps its numbers, the steered one its input; without steering
    all rows are those of the model."""
    from analyses.tools import layer_order

    network, tokenizer, _ = load_transformers("tiny-llama", "float64")
    layout = Layout.of(tokenizer, "Very positive:", " The lake")
    plain = [t.double() for t in layer_order.attention_states(network, None, layout)]
    unsteered = 2 - 2 * torch.cosine_similarity(*plain, dim=1)
    for beta in (1, 4):
        rules = recipe("key-scale", beta=beta)
        made = layer_order.disturbances(network, rules, layout)
        assert made.shape == (4, 4)
        for steered, row in enumerate(made):
            same = 4 if beta == 1 else steered
            torch.testing.assert_close(row[:same], unsteered[:same])
            assert beta == 1 or not torch.isclose(row[steered:], unsteered[steered:]).any()
    outputs, third = [], network.model.layers[3].self_attn
    hook = third.register_forward_hook(lambda *passed: outputs.append(passed[2][0][0, -1]))
    with augmented(network, rules[0].within([2]), layout):
        states = network(layout.tensor, output_hidden_states=True).hidden_states
    hook.remove()
    inputs = [
        layer.input_layernorm(state)[0, -1]
        for layer, state in zip(network.model.layers, states, strict=False)
    ]
    assert torch.equal(inputs[2], plain[0][2])
    expected = 2 - torch.cosine_similarity(plain[0][3], outputs[0], 0)
    expected -= torch.cosine_similarity(plain[1][3], inputs[3], 0)
    assert float(made[2, 3]) == pytest.approx(float(expected))
    for name in ("tiny-gpt2", "tiny-neox"):
        network, tokenizer, _ = load_transformers(name, "float32")
        layout = Layout.of(tokenizer, "Very positive:", " The lake")
        assert layer_order.disturbances(network, rules, layout).shape == (4, 4)
    monkeypatch.setattr(network.config, "num_hidden_layers", 5)
    with pytest.raises(ModelError, match="found the attention of 4 layers of 5"):
        layer_order.attention_states(network, None, layout)
    assert layer_order.ranked(torch.tensor([[[1.0, 5, 3], [9, 0, 4]]])) == [0, 2, 1]


def test_distinct_pairs_are_counted_over_all_texts():
    from analyses.rivals import analyse as rivals

    texts = ["a b a b", "a b"]
    pairs = [pair for text in texts for pair in pairwise(text.split())]
    assert rivals.distinct_2(pd.Series(texts)) == len(set(pairs)) / len(pairs) == 0.5


def test_rounds_are_complete_and_earlier_ones_stay(tmp_path):
    from analyses.rivals import analyse as rivals

    texts = pd.DataFrame({"cell": ["a", "a", "b", "c"], "prompt": ["p1", "p2", "p1", "p3"]})
    planned = {"a": "r1", "b": "r1", "c": "r2", "d": "r2"}
    rounds = rivals.complete_rounds(texts, planned)
    assert rounds["cell"].tolist() == ["a", "a", "b"]
    assert set(rounds["round"]) == {"r1"}
    with pytest.raises(RunError, match="no round is complete"):
        rivals.complete_rounds(texts, planned | {"e": "r1"})
    for name in ("rows.csv", "rows.parquet"):
        file = tmp_path / name
        first = pd.DataFrame({"round": ["r1", "r2"], "nll": [1.5, 2.5]})
        assert rivals.with_earlier(first, file).equals(first)
        again = rivals.with_earlier(pd.DataFrame({"round": ["r2"], "nll": [3.5]}), file)
        assert again["nll"].tolist() == [1.5, 3.5]
        assert rivals.with_earlier(first[:0], file).equals(again)
        with pytest.raises(RunError, match="has other columns: round, nll"):
            rivals.with_earlier(first.assign(bits=1.0), file)


def test_world_has_rows_of_its_own():
    from analyses.rivals import analyse as rivals

    draw = np.random.default_rng(0)
    rows = [
        {"family": family, "strength": strength, "prompt": f"{n}", "attribute": attribute}
        | {"nll": 3 + 0.2 * strength + draw.normal(0, 0.05), "acc (linear)": 50.0, "rep": 1.0}
        | {"acc hidden": 50 + 20 * strength * (attribute != "world") + draw.normal()}
        | {"bits": 1.0, "bits (writer)": 2.0}
        for family, strength in (("baseline", 0.0), ("lapa2", 1.0), ("caa", 2.0))
        for n in range(12)
        for attribute in ("world", "sports")
    ]
    texts = pd.DataFrame(rows)
    points, equal = rivals.compare(texts, 12)
    assert set(points["metric"]) - set(equal["metric"]) == {"bits", "bits (writer)"}
    assert list(dict.fromkeys(points["attributes"])) == ["all", "world", "others"]
    own, two = rivals.compare(texts[texts["attribute"] == "sports"], 12)
    alone = points[points["attributes"] == "others"].reset_index(drop=True)
    assert alone.drop(columns="attributes").equals(own.drop(columns="attributes"))
    assert set(two["attributes"]) == {"all"}
    assert two["p"].notna().any()
    mean = points[points["metric"] == "acc hidden"].set_index(["attributes", "family"])["mean"]
    assert mean["world", "caa"] == pytest.approx(50, abs=1)
    assert mean["others", "caa"] == pytest.approx(90, abs=1)
    assert mean["all", "caa"] == pytest.approx((mean["world", "caa"] + mean["others", "caa"]) / 2)
    assert rivals.compare(texts, 13)[1]["p"].isna().all()
    assert set(equal["reference"]) == {"lapa2"}
    chosen = texts.replace({"family": {"caa": "head-selective"}})
    rows = rivals.compare(chosen, 12)[1].query("attributes == 'all' and metric == 'acc hidden'")
    there, back = (
        rows[(rows["reference"] == reference) & (rows["family"] == way)].reset_index(drop=True)
        for reference, way in (("lapa2", "head-selective"), ("head-selective", "lapa2"))
    )
    assert there["difference"].notna().any()
    assert (there["difference"] + back["difference"]).dropna().abs().max() < 1e-9
    assert (back["verdict"] != "").all()
    itself = rows[(rows["reference"] == "head-selective") & (rows["family"] == "head-selective")]
    assert set(itself["verdict"]) == {""}


def test_the_figure_has_few_curves_and_a_mark_for_every_arm():
    """Six named curves from no bias, at cost 1, on, none of which runs backwards; the other ways
    are grey. All strengths in its range are there, and inside the axes."""
    from analyses.rivals import draw as drawing

    arms = pd.read_csv(ROOT / "figures" / "rivals" / "arms.csv")
    panels = drawing.draw(arms).axes
    for axes in panels:
        marks = [line for line in axes.lines if line.get_marker() != "None"]
        curves = [line for line in marks if line.get_linestyle() == "-"]
        curves = [line for line in curves if line.get_color() in drawing.COLOURS[1:]]
        assert len(curves) == 6
        assert {line.get_xdata()[0] for line in curves} == {1.0}
        assert all((np.diff(line.get_xdata()) >= 0).all() for line in curves)
        assert len({line.get_color() for line in curves}) == len(curves)
        shown = {float(x) for line in marks for x in line.get_xdata()}
        costs = set(arms["cost"][arms["cost"].between(*drawing.LIMITS)])
        assert shown == costs
        assert axes.get_xlim()[0] < min(shown) < max(shown) < axes.get_xlim()[1]
    names = {text.get_text() for text in panels[0].texts}
    assert {"LaPA², all heads", "chosen heads", "activation addition", "no bias"} <= names
    table = drawing.order_by_bits(ROOT / "figures" / "rivals").set_index(["setting", "by"])
    for by, metric in (("other model", "bits"), ("writer", "bits (writer)")):
        ranks = arms[arms["metric"] == metric][["perplexity", "mean"]].rank()
        spearman, n = table.loc[("sentiment", by)]
        assert spearman == pytest.approx(ranks.corr().iloc[0, 1])
        assert n == len(ranks)
    times = pd.read_csv(ROOT / "figures" / "rivals" / "time.csv")
    panels = drawing.draw_beside(arms, times).axes
    assert len(panels) == 5
    for axes in panels:
        assert len(axes.get_yticks()) == arms["family"].nunique() - 1
        marks = sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == "o")
        assert marks == len(arms.groupby(["family", "strength"])) - 1
    texts = pd.read_parquet(ROOT / "figures" / "rivals" / "texts.parquet")
    base = texts[texts["family"] == "baseline"]
    row = arms[(arms["family"] == "lapa2") & (arms["strength"] == 0.4)]
    own = texts[(texts["family"] == "lapa2") & (texts["strength"] == 0.4)]
    cost = np.exp(own["nll"].mean() - base["nll"].mean())
    assert row["cost"].unique() == pytest.approx([cost], rel=1e-5)
