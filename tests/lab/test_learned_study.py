"""analyses/learned: the objective of a vector, the learned vector as a method, grids, intervals."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import load

from analyses.families.grids import SMOLLM2
from analyses.learned import analyse, grids, heads, train
from lapa2_interp import generate
from lapa2_interp.circuits.learning import PairObjective, TextPair
from lapa2_interp.methods.registry import find_class, load_task
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.planted import NEGATIVE, POSITIVE, PROMPTS
from lapa2_interp.runs.grid import load_grid

PAIRS = [
    TextPair(f"Very {name}:", prompt, wanted, unwanted)
    for prompt in PROMPTS
    for name, wanted, unwanted in (
        ("positive", POSITIVE[0], NEGATIVE[0]),
        ("negative", NEGATIVE[0], POSITIVE[0]),
    )
]


def test_a_vector_is_added_behind_one_prefix_and_subtracted_behind_the_other():
    """After the last layer a vector that writes the positive word is wanted in both pairs."""
    model = load("planted", "float64", "TransformersModel")
    objective = PairObjective(model, PAIRS, dict.fromkeys(PROMPTS, " is it"), "Very:", "log", 1.0)
    words = [model.tokenizer(word).input_ids[-1] for word in (POSITIVE[0], NEGATIVE[0])]
    plus, minus = facts_of(model).network.get_output_embeddings().weight.detach()[words]
    vector, layer = 5 * (plus - minus), facts_of(model).n_layers - 1

    def parts(indices, scale=1.0):
        steering = train.by_vector(model, PAIRS, layer, scale * vector)
        return objective.parts(steering, indices, at_once=len(indices))

    both, first, second = parts([0, 1]), parts([0]), parts([1])
    for name in ("gain", "rise", "change"):
        assert both[name] == pytest.approx((first[name] + second[name]) / 2, abs=1e-6)
    for pair in ([0], [1]):
        assert parts(pair)["change"] > 0.5
        assert parts(pair, -1.0)["change"] < -0.5
        assert parts(pair, 0.0)["change"] == pytest.approx(0, abs=1e-6)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Tables of a training, and prompts."""
    monkeypatch.chdir(tmp_path)
    Path("bases").mkdir()
    for name, n in (("families-tune", 60), ("families", 400)):
        lines = "".join(f"The {name} prompt {i}\n" for i in range(n))
        Path(f"bases/{name}.txt").write_text(lines)
    rows = [
        {"model": SMOLLM2, "seed": seed, "way": way, "layer": seed, "head": head, "strength": 0.5}
        for seed in train.SEEDS
        for head, way in enumerate((train.STRENGTHS, train.SHUFFLED))
    ]
    pd.DataFrame(rows).assign(l0=70.0).to_csv("strengths.csv", index=False)
    rows = [
        {"model": SMOLLM2, "seed": seed, "dimension": i, "value": seed + i / 1000}
        for seed in train.SEEDS
        for i in range(576)
    ]
    pd.DataFrame(rows).to_csv("vectors.csv", index=False)
    return tmp_path


def made(monkeypatch, stage, tables):
    words = ["grids.py", stage, SMOLLM2, "--models", "none", "--tables", str(tables)]
    monkeypatch.setattr("sys.argv", words)
    grids.main()
    file = Path("made") / SMOLLM2 / f"learned-{stage}.toml"
    return load_grid(str(file), check=False, allow_code=True)


def test_tuning_tries_two_dials_of_each_way_with_the_first_seed(work, monkeypatch):
    tried = {}
    for cell in made(monkeypatch, "tune", work).cells:
        tried.setdefault(analyse.way_of(cell), set()).add(analyse.dial_of(cell))
    assert tried == {"no bias": {0.0}} | {way: {1.0, 2.0} for way in grids.WAYS}


def test_every_test_prompt_has_every_way_once_by_its_seed(work, monkeypatch):
    rows = [{"model": SMOLLM2, "way": way, "dial": 1.25, "tuned": True} for way in grids.WAYS]
    pd.DataFrame(rows).to_csv("dials.csv", index=False)
    seen = {}
    for cell in made(monkeypatch, "test", work).cells:
        way = analyse.way_of(cell)
        assert analyse.dial_of(cell) == 1.25
        seeds = {int(prompt.split()[-1]) % 3 + 1 for prompt in cell.prompts}
        assert len(seeds) == 1
        if way == train.STRENGTHS:
            (bias,) = cell.active_augmentations
            assert bias.strengths == ((*seeds, 0, 0.5),)
            assert bias.l0 == 70
        if way == train.VECTOR:
            assert cell.parameters["vector"].endswith(f"vector-{seeds.pop()}.csv")
        if cell.attribute == "positive":
            seen.setdefault(way, []).extend(cell.prompts)
    assert set(seen) == set(grids.WAYS)
    for prompts in seen.values():
        assert sorted(prompts) == sorted(f"The families prompt {i}" for i in range(400))


def test_the_learned_vector_writes_and_its_sign_is_that_of_the_attribute(tmp_path):
    model = load("planted", "float32", "TransformersModel")
    file = tmp_path / "vector.csv"
    pd.DataFrame({"dimension": range(model.W_E.shape[1]), "value": 1.0}).to_csv(file, index=False)
    method = {"name": grids.METHOD, "vector": str(file), "layers": 0, "with_prefix": True}
    texts = {
        (attribute, strength): generate(
            model,
            PROMPTS[:2],
            attribute=attribute,
            method=method | {"strength": strength},
            length=12,
        ).texts()["text"]
        for attribute in ("positive", "negative")
        for strength in (0.0, 30.0)
    }
    plain = generate(model, PROMPTS[:2], attribute="positive", length=12, alpha=0).texts()["text"]
    assert list(texts["positive", 0.0]) == list(plain)
    assert list(texts["positive", 30.0]) != list(plain)
    vectors = [
        find_class(grids.METHOD)(vector=str(file), layers=1, strength=2.0).vectors(
            None, load_task("sentiment"), attribute
        )
        for attribute in ("positive", "negative")
    ]
    assert [{layer: set(v.tolist()) for layer, v in of.items()} for of in vectors] == [
        {1: {2.0}},
        {1: {-2.0}},
    ]


def test_seeds_are_resampled_before_prompts():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"seed": np.repeat([1, 2, 3], 100), "value": rng.normal(1, 0.1, 300)})
    low, high, p = analyse.nested(rows, "value")
    assert 0.97 < low < 1 < high < 1.03
    assert p < 0.001
    apart = rows.assign(value=rows["value"] + rows["seed"])
    low, high, _ = analyse.nested(apart, "value")
    assert low < 2.1
    assert high > 3.9, "seeds that differ widen the interval"


def test_strengths_are_ranked_against_slopes_and_averaged_by_kind(monkeypatch):
    monkeypatch.setattr(heads, "RESAMPLES", 20)
    slope = np.arange(-4.0, 5.0)
    table = pd.DataFrame({"slope": slope, "knock-out": -slope, 1: slope, 2: slope**3, 3: -slope})
    table["kind"] = np.where(slope > 2, "chosen", np.where(slope < -2, "opposing", "others"))
    rows = pd.DataFrame(heads.rows_of(table)).set_index(["what", "seed"])["value"]
    assert rows["rank correlation with slope"].tolist() == pytest.approx([1, 1, -1])
    assert rows["rank correlation with knock-out"].tolist() == pytest.approx([-1, -1, 1])
    assert rows["rank correlation of two seeds", "1 and 3"] == pytest.approx(-1)
    assert rows["mean strength, chosen", "all"] == pytest.approx((27 + 64) / 6)
    assert rows["mean strength, opposing", "all"] == pytest.approx(-(27 + 64) / 6)
    assert rows["strengths below 0, %"].tolist() == pytest.approx([400 / 9] * 3)
