"""Statistics of the alarm: an oracle by pairs, and measures that know only message or turn."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize

from analyses.messages import alarm


def chats(rng, messages=24, chats=6, turns=8, effect=0.0):
    """Answers whose breaks depend on the message, the turn, and on a measure `seen`."""
    rows = []
    for i in range(messages):
        hard = rng.normal()
        for chat, turn in product(range(chats), range(1, turns + 1)):
            seen = rng.normal()
            odds = hard + 0.3 * (turn - 4) + effect * seen
            broke = int(rng.random() < 1 / (1 + np.exp(-odds)))
            rows.append((f"m{i}", chat, turn, chat % 3 == 2, broke, seen, hard, 40 * turn))
    names = ["message", "chat", "turn", "against", "broke", "seen", "hard", "length"]
    return pd.DataFrame(rows, columns=names)


def auroc_by_pairs(answers, measure):
    won = total = 0.0
    for one, two in product(answers.to_dict("records"), repeat=2):
        together = all(one[name] == two[name] for name in ("message", "turn", "against"))
        if together and one["broke"] and not two["broke"]:
            total += 1
            won += (one[measure] > two[measure]) + 0.5 * (one[measure] == two[measure])
    return won / total


def test_the_auroc_is_that_of_all_pairs_of_a_message_and_a_turn():
    answers = chats(np.random.default_rng(1), messages=16, effect=1.0)
    counted = answers[answers["message"].isin(alarm.counted_messages(answers))]
    table = alarm.within_auroc(answers, ["seen", "turn"]).set_index("measure")
    assert table.loc["seen", "auroc"] == pytest.approx(auroc_by_pairs(counted, "seen"))
    assert table.loc["turn", "auroc"] == 0.5
    assert table.loc["seen", "low"] < table.loc["seen", "auroc"] < table.loc["seen", "high"]


def test_a_measure_of_message_and_turn_alone_is_chance_and_adds_nothing():
    answers = chats(np.random.default_rng(2)).assign(late=lambda rows: rows["hard"] + rows["turn"])
    (row,) = alarm.within_auroc(answers, ["late"]).to_dict("records")
    assert (row["auroc"], row["low"], row["high"]) == (0.5, 0.5, 0.5)
    pooled = answers["broke"].corr(answers["late"])
    assert pooled > 0.3, "pooled, it seems to predict"
    added = alarm.increment(answers, "late")
    assert (added["increment"], added["low"], added["high"]) == (0, 0, 0)


def test_whether_the_user_asks_against_is_no_moment():
    answers = chats(np.random.default_rng(4)).assign(asked=lambda rows: rows["against"] * 1.0)
    answers["broke"] = np.maximum(answers["broke"], answers["against"])
    (row,) = alarm.within_auroc(answers, ["asked"], percent=98.75).to_dict("records")
    assert (row["auroc"], row["low"], row["high"]) == (0.5, 0.5, 0.5)


def test_a_measure_that_knows_the_moment_is_found():
    found_moments = [
        alarm.increment(chats(np.random.default_rng(seed), effect=1.0), "seen") for seed in range(3)
    ]
    assert all(row["low"] > 0.05 for row in found_moments)
    nulls = [alarm.increment(chats(np.random.default_rng(seed)), "seen") for seed in range(10)]
    assert sum(row["low"] > 0 for row in nulls) <= 1


def test_too_few_messages_decide_nothing():
    answers = chats(np.random.default_rng(3), messages=10)
    assert np.isnan(alarm.within_auroc(answers, ["seen"])["auroc"][0])
    assert np.isnan(alarm.increment(answers, "seen")["increment"])
    never = answers.assign(broke=0)
    assert alarm.counted_messages(never) == []
    assert np.isnan(alarm.within_auroc(never, ["seen"])["auroc"][0])


def test_the_last_answer_is_that_of_the_chat():
    rows = [("m", 0, 2, 0), ("m", 0, 1, 1), ("m", 0, 3, 1), ("m", 1, 1, 0), ("m", 1, 2, 1), ("n", 0, 1, 0)]  # fmt: skip
    answers = pd.DataFrame(rows, columns=["message", "chat", "turn", "broke"])
    table = alarm.with_last(answers)
    assert list(table["last broke"]) == [1, 0, 0, 0, 0, 0]
    pd.testing.assert_frame_equal(table[answers.columns], answers)


def test_the_weights_are_those_of_the_penalised_likelihood():
    rng = np.random.default_rng(4)
    features = np.column_stack([np.ones(200), rng.normal(size=(200, 3))])
    labels = (rng.random(200) < 1 / (1 + np.exp(-features @ [0.3, 1, -1, 0]))).astype(float)

    def loss(weights):
        odds = features @ weights
        return (np.logaddexp(0, odds) - labels * odds).sum() + 0.5 * (weights[1:] ** 2).sum()

    wanted = minimize(loss, np.zeros(4), tol=1e-10).x
    np.testing.assert_allclose(alarm.logistic(features, labels), wanted, atol=1e-4)


def test_an_alarm_at_a_rate():
    answers = pd.DataFrame({"broke": [1, 1, 0, 0, 0, 1], "seen": [9, 8, 7, 1, 2, 0]})
    said = alarm.at_a_rate(answers, "seen", 0.5)
    assert said == {"base rate": 0.5, "precision": pytest.approx(2 / 3), "recall": pytest.approx(2 / 3)}  # fmt: skip
