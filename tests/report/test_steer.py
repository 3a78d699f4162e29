"""`steer`: parts of the prompts, tuned strengths, tests, card and page of a small result."""

import json
import math
import re
import shlex
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import script

from lapa2_interp import Augmentation, Selection, steer
from lapa2_interp.circuits.selection import random_heads
from lapa2_interp.cli.app import main
from lapa2_interp.cli.options import AugmentationOptions
from lapa2_interp.errors import DataError, RunError
from lapa2_interp.models.load import load_transformers
from lapa2_interp.report.steer import _gain, _tests
from lapa2_interp.report.steer_page import heads_figure
from lapa2_interp.report.steer_result import (
    ALL,
    CARD,
    CHOSEN,
    LEARNED,
    NO_BIAS,
    RANDOM,
    SETTINGS,
    different_prompts,
    format_test,
)
from lapa2_interp.runs.run import load_run
from lapa2_interp.scoring.linear import LinearScorer
from lapa2_interp.scoring.scorer import TextItem
from lapa2_interp.stats import holm

PROMPTS = [f"{word} number {i} of a b c d e f" for i in range(16) for word in ("Lake", "House")]
STRENGTHS = (0.5, 4.0)
"""Instead of four."""
GIVEN = {
    "method": "prefix",
    "length": 32,
    "budget": 1.0002,
    "heads": 1,
    "classifiers": ["linear"],
    "workers": 1,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def steered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steer") / "out"
    lines = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lapa2_interp.report.steer.STRENGTHS", STRENGTHS)
        made = steer("tiny-gpt2", PROMPTS, "sentiment", out=folder, notify=lines.append, **GIVEN)
        assert "8 prompts choose 1 heads, 8 tune, 16 judge" in lines[0]
        yield made


def test_each_prompt_is_in_one_part(steered):
    parts = steered.plan.parts()
    assert {name: len(part) for name, part in parts.items()} == {
        "choose": 8,
        "tune": 8,
        "judge": 16,
    }
    assert sorted(sum(parts.values(), ())) == sorted(PROMPTS)
    assert set(steered.selection.prompts) == set(parts["choose"])
    for name in ("tune", "judge"):
        assert set(load_run(steered.folder / name).texts()["prompt"]) == set(parts[name])


def test_random_heads_are_other_heads_of_the_same_layers():
    every = tuple((layer, head) for layer in range(6) for head in range(4))
    chosen = ((1, 0), (1, 3), (2, 2), (5, 1))
    drawn = [random_heads(chosen, every, seed) for seed in range(40)]
    assert len(set(drawn)) == 1 * 3 * 3  # all there are
    for heads in drawn:
        assert not set(heads) & set(chosen)
        assert Counter(layer for layer, _ in heads) == Counter(layer for layer, _ in chosen)
    # A layer with too few others: the rest is from other layers.
    crowded = tuple((1, head) for head in range(3))
    assert {len(random_heads(crowded, every, seed)) for seed in range(5)} == {3}
    assert {(1, 3) in random_heads(crowded, every, seed) for seed in range(5)} == {True}


def test_random_sets_share_the_prompts(steered):
    settings = steered.plan
    prompts = settings.parts()["judge"]
    cells = settings.cells_with_bias(prompts, RANDOM, 1.0, {CHOSEN: steered.selection})
    of_one = [cell for cell in cells if cell.attribute == "positive"]
    assert sorted(prompt for cell in of_one for prompt in cell.prompts) == sorted(prompts)
    assert len(of_one) == 5
    assert {cell.arm for cell in cells} == {RANDOM}
    everywhere = settings.cells_with_bias(prompts, ALL, 1.0, {CHOSEN: steered.selection})[0]
    (rule,) = everywhere.active_augmentations
    assert rule == Augmentation(alpha=1.0)


def nll_by_arm(steered):
    """Mean NLL of the tuning texts by (place, alpha), from the texts and the scorer alone."""
    from lapa2_interp.scoring.transformer import ConditionalPerplexity

    run = load_run(steered.folder / "tune")
    texts = run.texts()
    scorer = ConditionalPerplexity("tiny-gpt2")
    items = [TextItem(*pair) for pair in texts[["text", "prompt"]].to_numpy()]
    nll = np.log([score[0] for score in scorer.score(items)])
    arms = []
    for key in texts["cell"]:
        cell = run.by_key[key]
        alphas = [rule.alpha for rule in cell.active_augmentations]
        arm = cell.arm.partition(" (")[0]
        arms.append(f"{arm} {alphas[0]}" if alphas else NO_BIAS)
    return pd.Series(nll).groupby(np.array(arms)).mean()


def test_strengths_are_interpolated_at_the_budget(steered):
    means = nll_by_arm(steered)
    target = means[NO_BIAS] + np.log(1.0002)
    tuned = steered.tuning[steered.tuning["tuned"]].set_index("place")
    for arm in (CHOSEN, ALL, RANDOM):
        curve = [means[NO_BIAS], *(means[f"{arm} {alpha}"] for alpha in STRENGTHS)]
        alphas = [0.0, *STRENGTHS]
        crossing = [i for i in range(2) if (curve[i] - target) * (curve[i + 1] - target) <= 0]
        i = crossing[0]
        share = (target - curve[i]) / (curve[i + 1] - curve[i])
        expected = alphas[i] + share * (alphas[i + 1] - alphas[i])
        assert tuned.loc[arm, "alpha"] == pytest.approx(expected, rel=1e-3)
        assert tuned.loc[arm, "ratio"] == pytest.approx(1.0002, rel=1e-6)


def test_the_tests_are_paired_differences_of_the_masked_accuracy(steered):
    from lapa2_interp.scoring.echo import MASK

    words = ("positive", "negative")
    scorer = LinearScorer("sentiment")
    hidden = steered.texts["text"]
    for word in words:
        hidden = hidden.str.replace(rf"(?i)\b{word}\b", MASK, regex=True)
    scores = scorer.score([TextItem(text) for text in hidden])
    right = [
        max(zip(score, scorer.columns, strict=True))[1] == wanted
        for score, wanted in zip(scores, steered.texts["attribute"], strict=True)
    ]
    by_prompt = steered.texts.assign(right=np.array(right, float)).pivot_table(
        index="prompt", columns="arm", values="right"
    )
    tests = steered.tests.set_index("against")
    for against in (NO_BIAS, ALL, RANDOM):
        expected = (by_prompt[CHOSEN] - by_prompt[against]).mean()
        assert tests.loc[against, "difference"] == pytest.approx(expected, abs=1e-12)
        assert tests.loc[against, "prompts"] == 16
    assert tests["p_holm"].to_numpy() == pytest.approx(holm(tests["p"].to_numpy()))


def test_the_table_has_every_arm_attribute_and_metric(steered):
    table = steered.table
    assert set(table["metric"]) == {
        *steered.plan.metrics, "distinct-1", "distinct-2", "distinct-3"
    }  # fmt: skip
    for metric, part in table.groupby("metric"):
        assert set(part["attribute"]) == {"all", "positive", "negative"}, metric
        assert set(part["arm"]) == {NO_BIAS, ALL, RANDOM, CHOSEN}, metric
    perplexity = table[(table["metric"] == "perplexity") & (table["attribute"] == "all")]
    assert (perplexity["low"] < perplexity["mean"]).all()
    assert (perplexity["mean"] < perplexity["high"]).all()


def test_the_same_call_goes_on_and_other_settings_are_refused(steered, monkeypatch):
    """Precision "auto" is that of the texts that are there, whatever it would be here."""
    monkeypatch.setattr("lapa2_interp.report.steer_result.resolve_dtype", lambda *_: "bfloat16")
    before = (steered.folder / "tests.csv").read_bytes()
    times = [file.stat().st_mtime_ns for file in steered.folder.glob("*/cells/*/*.parquet")]
    arguments = GIVEN | {"out": steered.folder, "dtype": "auto"}
    again = steer("tiny-gpt2", PROMPTS, "sentiment", notify=lambda line: None, **arguments)
    assert again.plan == steered.plan
    assert (steered.folder / "tests.csv").read_bytes() == before
    assert [f.stat().st_mtime_ns for f in steered.folder.glob("*/cells/*/*.parquet")] == times
    pd.testing.assert_frame_equal(again.table, steered.table)
    for changed, message in (
        ({"budget": 1.5}, r"another budget: 1\.0002, not 1\.5"),
        ({"heads": 2}, "another heads: 1, not 2"),
        ({"seed": 2}, "another seed"),
    ):
        with pytest.raises(RunError, match=f"{message}.*choose another folder"):
            steer("tiny-gpt2", PROMPTS, "sentiment", **(arguments | changed))


def test_heads_of_other_weights_are_refused(steered, tmp_path):
    copy = tmp_path / "out"
    shutil.copytree(steered.folder, copy)
    steered.selection.model_copy(update={"weights": "others"}).save(copy / CARD)
    with pytest.raises(RunError, match="were chosen in others, and the texts are of"):
        steer("tiny-gpt2", PROMPTS, "sentiment", out=copy, notify=lambda line: None, **GIVEN)


def test_the_card_steers_by_itself(steered):
    card = Selection.load(steered.folder / CARD)
    assert card == steered.selection
    tuned = steered.tuning[steered.tuning["tuned"]].set_index("place")["alpha"]
    assert card.alpha == card.augmentation().alpha == pytest.approx(tuned[CHOSEN])
    assert card.augmentation(alpha=2.0).alpha == 2.0
    (built,) = AugmentationOptions(card=steered.folder / CARD).build(0.5)
    assert built == card.augmentation()
    (stronger,) = AugmentationOptions(card=steered.folder / CARD, alpha=3.0).build(0.5)
    assert stronger.alpha == 3.0
    assert set(card.chosen_by_wordings) == {"Extremely {attribute}:", "In a {attribute} tone:"}
    assert all(0 <= n <= len(card.heads) for n in card.chosen_by_wordings.values())
    assert "16 other prompts" in card.gain
    assert "no sure difference" in card.gain  # of a random model


def test_the_command_prints_what_so_many_prompts_can_show(steered, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    asked = ["--method", "prefix", "--length", "32", "--budget", "1.0002", "--heads", "1"]
    asked += ["--classifiers", "linear", "--workers", "1", "--dtype", "float32"]
    code = main(
        ["steer", "tiny-gpt2", "--prompts", str(file), "--out", str(steered.folder), *asked]
    )
    said = capsys.readouterr().out
    assert code == 0
    assert said.count("so many prompts can show") + said.count("have the same difference") == 3
    assert "lapa2 generate" not in said  # nothing is decided
    assert "more prompts may decide" in said
    page = (steered.folder / "report.html").read_text()
    assert steered.selection.gain[:40] in page
    assert page.count("<img") >= 3


def test_the_map_of_heads_has_layers_as_rows(steered):
    axes = heads_figure(steered).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")
    shown = axes.images[0].get_array()
    ((layer, head),) = steered.selection.heads
    assert shown[layer, head] == pytest.approx(steered.selection.scores[0][0])


def test_the_command_that_steers_runs_as_it_is_printed(steered, tmp_path):
    """With the task, the model and the method's parameters of the result, from any folder name."""
    copy = tmp_path / "my 'result'"
    shutil.copytree(steered.folder, copy)
    prompts = tmp_path / "two prompts.txt"
    prompts.write_text("The lake\nThe house\n")
    task = tmp_path / "own task.toml"
    task.write_text(
        'name = "own"\nlength_counts_prompt = true\nprompts = { texts = ["The lake"] }\n'
        + "".join(f'[attributes.{name}]\nprefix = "{name}:"\n' for name in ("abc", "xyz"))
    )
    made = replace(steered, folder=copy)
    sure = steered.tests.assign(difference=0.2, p=0.001, p_holm=0.003)
    printed = replace(made, tests=sure).next_step(str(task), prompts)
    assert printed.startswith("steer with\n")
    name, *words = shlex.split(printed.splitlines()[1])
    assert name == "lapa2"
    assert main(words) == 0
    run = load_run(copy / "steered")
    assert {cell.attribute for cell in run.by_key.values()} == {"abc", "xyz"}
    for cell in run.by_key.values():
        (bias,) = cell.active_augmentations
        assert (cell.model, cell.method, cell.dtype) == ("tiny-gpt2", "prefix", "float32")
        assert (bias.heads, bias.alpha) == (steered.selection.heads, steered.selection.alpha)
        assert cell.prompts == ("The lake", "The house")


TEST = {
    "against": NO_BIAS, "difference": 0.1, "low": 0.05, "high": 0.15, "p": 0.01, "p_holm": 0.03,
    "detectable": 0.04, "prompts": 16.0,
}  # fmt: skip
NOTHING = dict.fromkeys(("difference", "low", "high", "p", "p_holm", "detectable"), math.nan)


@pytest.mark.parametrize(
    ("changed", "outcome", "gain"),
    [
        ({}, "+10.0 points [+5.0, +15.0], corrected p 0.03: more", ": a gain."),
        ({"difference": -0.1}, "-10.0 points", ": a loss."),
        ({"p_holm": 0.3}, "not decided", ": no sure difference."),
        ({"detectable": math.nan}, "all prompts have the same difference", ": a gain."),
        (NOTHING | {"prompts": 0.0}, "no test with 0 prompts that both", "not known: no test"),
        (
            NOTHING | {"prompts": 1.0, "difference": -0.1},
            "no test with 1 prompt that both",
            "not known: no test with 1 prompt",
        ),
        (NOTHING | {"prompts": math.nan}, "not comparable at this budget", "not known: not comp"),
    ],
)  # fmt: skip
def test_what_has_no_test_is_neither_a_gain_nor_a_loss(steered, changed, outcome, gain):
    test = TEST | changed
    assert outcome in format_test(test).partition(f"against {NO_BIAS}: ")[2]
    sentence = _gain(steered.plan, pd.DataFrame([test]), steered.table, {CHOSEN: 1.0})
    assert gain in sentence
    for text in (format_test(test), sentence):
        assert "nan" not in text


def test_arms_without_common_scores_are_told_from_arms_that_are_not_judged(steered):
    columns = {"attribute": "positive", "metric": steered.plan.metrics[0], "scorer": "s"}
    scores = pd.DataFrame(
        [("a", CHOSEN, 1.0), ("a", NO_BIAS, 0.0), ("b", CHOSEN, 1.0), ("b", ALL, math.nan)],
        columns=["prompt", "arm", "value"],
    ).assign(sample=0, reason="", **columns)
    both = pd.concat([scores, scores.assign(attribute="negative")], ignore_index=True)
    tests = _tests(steered.plan, both).set_index("against")
    assert tests.loc[NO_BIAS, "prompts"] == 1
    assert tests.loc[ALL, "prompts"] == 0
    assert math.isnan(tests.loc[RANDOM, "prompts"])
    assert tests["p_holm"].isna().all()


def test_a_text_in_another_writing_is_no_other_prompt():
    prompts = ["The lake", " The lake", "the  Lake", "The\u00a0lake\t", "The lakes", "THE LAKES"]
    assert different_prompts(prompts) == ("The lake", "The lakes")


def test_prompts_of_one_text_are_counted_once_and_told(tmp_path):
    lines = []
    twice = [*PROMPTS[:31], *(f"  {prompt.upper()} " for prompt in PROMPTS[:31])]
    with pytest.raises(RunError, match="31 prompts are too few"):
        steer("tiny-gpt2", twice, "sentiment", out=tmp_path / "a", notify=lines.append, **GIVEN)

    class Told(Exception):
        pass

    def stop(line):
        lines.append(line)
        raise Told

    with pytest.raises(Told):
        steer("tiny-gpt2", [*PROMPTS, *twice], "sentiment", out=tmp_path / "b", notify=stop,
              **GIVEN)  # fmt: skip
    assert lines == [
        "62 prompts left out: the same text as another, but for white space or capitals"
    ]


def test_perplexity_that_stands_still_is_found_before_heads_are_chosen(tmp_path):
    """Without a prefix the planted model gives every word the same probability, so that its
    perplexity is the number of its words, whatever the bias does."""
    with pytest.raises(RunError, match=r"hardly moves.* 1\.000 to 1\.000 times .*perplexity=MODEL"):
        steer("planted", PROMPTS, "sentiment", out=tmp_path / "out", notify=lambda line: None,
              **(GIVEN | {"budget": 1.2}))  # fmt: skip
    assert not (tmp_path / "out" / CARD).exists()
    assert not (tmp_path / "out" / "tune").exists()


def test_a_place_that_is_not_comparable_has_no_number(steered, tmp_path, monkeypatch):
    """The budget is out of reach: no arm of a place is judged, and nothing is claimed."""
    monkeypatch.setattr("lapa2_interp.report.steer.STILL", 0.0)
    shutil.copytree(steered.folder, tmp_path, dirs_exist_ok=True)  # with the texts that tune
    shutil.rmtree(tmp_path / "judge")
    settings = json.loads((tmp_path / SETTINGS).read_text("utf-8"))
    (tmp_path / SETTINGS).write_text(json.dumps(settings | {"budget": 50.0}))
    made = steer(
        "tiny-gpt2", PROMPTS, "sentiment", out=tmp_path, notify=lambda line: None,
        **(GIVEN | {"budget": 50.0}),
    )  # fmt: skip
    assert made.selection.alpha is None
    assert made.tests["difference"].isna().all()
    assert made.tests["p_holm"].isna().all()
    assert "does not reach 50 times the perplexity" in made.selection.gain
    assert set(made.table["arm"]) == {NO_BIAS}
    assert "not comparable" in made.summary()
    most = made.tuning.query("place == @CHOSEN")["ratio"].max()
    assert f"costs at most {most:.3f} times" in made.next_step("sentiment", tmp_path)


def test_parameters_are_hard_prefixes_without_pro_aug_unless_given(steered):
    from lapa2_interp.report.steer_result import method_parameters

    task = steered.plan.task
    usual = {"prefixes": "hard", "pro_aug": False}
    assert method_parameters("air-decoding", task, None) == usual
    assert method_parameters("air-decoding", task, {"pro_aug": True}) == usual | {"pro_aug": True}
    assert method_parameters("prefix", task, None) == {"prefixes": "hard"}
    assert replace(steered.plan, method="gedi").arms[0] == "prefix alone"
    assert steered.plan.arms[0] == NO_BIAS


@pytest.mark.parametrize("judge", ["tiny-gpt2", "tiny-llama"])
def test_continuations_are_read_by_another_model(steered, judge, tmp_path):
    """analyses/bases/second_opinion.py: bits per character and ratios, from logits of one text at a time."""
    script("bases/second_opinion", steered.folder / "judge", "--card", steered.folder / CARD,
        "--judges", judge, "--n", 6, "--out", tmp_path,
    )  # fmt: skip
    table = pd.read_csv(tmp_path / "fluency.csv")
    table.index = table["arm"].str.replace(r" [\d.]+$", "", regex=True)
    network, tokenizer, _ = load_transformers(judge, "float32")
    texts = steered.texts[steered.texts["prompt"].isin(sorted(set(steered.texts["prompt"]))[:6])]
    bits, nll = {}, {}
    for row in texts.itertuples():
        ids = tokenizer(row.text, add_special_tokens=False).input_ids
        # The tokens whose end lies behind the prompt.
        first = next(
            i for i in range(len(ids)) if len(tokenizer.decode(ids[: i + 1])) > len(row.prompt)
        )
        read = torch.tensor([[tokenizer.bos_token_id, *ids]])
        log_probs = network(read).logits[0, :-1].double().log_softmax(-1)
        of_tokens = -log_probs[torch.arange(len(ids)), read[0, 1:]][first:]
        characters = len(row.text) - len(row.prompt)
        bits.setdefault(row.arm, []).append(of_tokens.sum().item() / math.log(2) / characters)
        nll.setdefault(row.arm, []).append(of_tokens.mean().item())
    assert set(table.index) == set(bits) == {NO_BIAS, ALL, CHOSEN, RANDOM}
    for arm, values in bits.items():
        assert table.loc[arm, "texts"] == len(values)
        assert table.loc[arm, "bits per character"] == pytest.approx(np.mean(values), rel=1e-5)
        ratio = math.exp(np.mean(nll[arm]) - np.mean(nll[NO_BIAS]))
        assert table.loc[arm, "ratio"] == pytest.approx(ratio, rel=1e-5)


@pytest.mark.long
def test_learned_strengths_are_one_more_arm(tmp_path, monkeypatch):
    monkeypatch.setattr("lapa2_interp.report.steer.STRENGTHS", STRENGTHS)
    prompts = [f"The {i}th of the" for i in range(32)]
    settings = {"method": "prefix", "length": 12, "workers": 1, "perplexity": "tiny-llama"}
    call = partial(steer, "planted", prompts, out=tmp_path / "out", budget=1.0001, **settings)
    result = call(learn=True, notify=lambda line: None)
    assert result.plan.arms == (NO_BIAS, ALL, RANDOM, CHOSEN, LEARNED)
    assert {NO_BIAS, CHOSEN, LEARNED} <= set(result.table["arm"]), "random heads cost too little"
    assert list(result.tests["against"]) == [NO_BIAS, ALL, RANDOM, LEARNED]
    learned = Selection.load(tmp_path / "out" / "learned" / CARD)
    tuned = result.tuning[result.tuning["tuned"]].set_index("place")["alpha"]
    assert learned.alpha == tuned[LEARNED]
    assert set(learned.prompts) <= set(result.plan.parts()["choose"])
    assert "What these strengths gain" in learned.gain or "their accuracy minus" in learned.gain
    run = load_run(tmp_path / "out" / "judge")
    rules = {
        rule
        for key in result.texts.loc[result.texts["arm"] == LEARNED, "cell"]
        for rule in run.by_key[key].active_augmentations
    }
    assert rules == {learned.augmentation()}
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "chosen heads against learned strengths: " in page
    assert result.card == tmp_path / "out" / CARD, "of the chosen heads, where nothing is sure"
    tests = result.tests.assign(p_holm=0.01, difference=[0.2, 0.2, 0.2, -0.2], prompts=16)
    assert replace(result, tests=tests.assign(difference=-0.2)).card == tmp_path / "out" / CARD
    assert replace(result, tests=tests).card == tmp_path / "out" / "learned" / CARD
    again = call(learn=True, notify=lambda line: None)
    pd.testing.assert_frame_equal(again.tests, result.tests)
    with pytest.raises(RunError, match="learn"):
        call(notify=lambda line: None)


@pytest.mark.long
def test_strengths_that_cannot_be_learned_are_left_out(tmp_path, monkeypatch):
    calls = []

    def fails(*args, **settings):
        calls.append(args)
        raise DataError("the classifiers find nothing")

    monkeypatch.setattr("lapa2_interp.report.steer.learn_in_folder", fails)
    monkeypatch.setattr("lapa2_interp.report.steer.STRENGTHS", STRENGTHS)
    lines = []
    for _ in range(2):  # a call that goes on does not try again
        result = steer("tiny-gpt2", PROMPTS, out=tmp_path, learn=True, notify=lines.append, **GIVEN)
    assert lines.count("learned strengths are left out: the classifiers find nothing") == 2
    assert len(calls) == 1
    assert set(result.tuning["place"]) == {ALL, CHOSEN, RANDOM}
    assert format_test(result.tests.to_dict("records")[3]).endswith("not comparable at this budget")
    assert "with the bias in 3 places" in (tmp_path / "report.html").read_text("utf-8")


def test_control_is_read_by_another_classifier(steered, tmp_path):
    """analyses/bases/second_opinion.py: naive Bayes by its formula, and what is hidden from `linear`."""
    lines = [
        ("lovely fine day", "positive"),
        ("bad sad day", "negative"),
        ("a b c lake", "positive"),
    ]
    frame = pd.DataFrame(lines * 12, columns=["text", "label"])
    frame["text"] += [f" w{i % 7} x{i}" for i in range(len(frame))]
    frame.to_csv(tmp_path / "texts.csv", index=False)
    script("bases/second_opinion", steered.folder / "judge", "--card", steered.folder / CARD,
        "--train", tmp_path / "texts.csv", "--out", tmp_path,
    )  # fmt: skip
    table = pd.read_csv(tmp_path / "control.csv")
    table["arm"] = table["arm"].str.replace(r" [\d.]+$", "", regex=True)
    table = table.set_index(["measure", "arm"])["mean"]
    held = set(np.random.default_rng(0).permutation(36)[:3])
    order = [i for label in ("positive", "negative") for i in frame.index[frame["label"] == label]]
    seen = frame.loc[[i for position, i in enumerate(order) if position not in held]]
    words = [re.findall(r"\b\w\w+\b", text.lower()) for text in seen["text"]]
    known = {
        word for word, n in Counter(w for tokens in words for w in set(tokens)).items() if n >= 2
    }
    score = {}
    for label in ("positive", "negative"):
        own = [
            w
            for tokens, its in zip(words, seen["label"], strict=True)
            if its == label
            for w in tokens
        ]
        total = sum(word in known for word in own) + len(known)
        score[label] = (
            math.log((seen["label"] == label).mean()),
            {word: math.log((own.count(word) + 1) / total) for word in known},
        )
    inflected = re.compile(r"\b(positi|negati)\w*", re.IGNORECASE)
    scorer = LinearScorer("sentiment")
    for arm, part in steered.texts.groupby("arm"):
        right, hidden = [], []
        for row in part.itertuples():
            text = row.text[len(row.prompt) :]
            its = [word for word in re.findall(r"\b\w\w+\b", text.lower()) if word in known]
            value = {
                label: s + sum(weights[w] for w in its) for label, (s, weights) in score.items()
            }
            right.append(max(sorted(value), key=value.get) == row.attribute)
            (read,) = scorer.score([TextItem(inflected.sub(" ", text))])
            hidden.append(scorer.columns[int(np.argmax(read))] == row.attribute)
        assert table["naive Bayes", arm] == pytest.approx(100 * np.mean(right))
        assert table["linear, inflections hidden", arm] == pytest.approx(100 * np.mean(hidden))
        share = [bool(inflected.search(r.text[len(r.prompt) :])) for r in part.itertuples()]
        assert table["has an inflection", arm] == pytest.approx(100 * np.mean(share))
