"""The study of three families: its grids, how strengths are tuned, and what verdicts say."""

from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from plain_forward import Size, llama, turn

from analyses.families import analyse, findings, grids, near, reader
from lapa2_interp import Augmentation, Layout, Selection, augmented, load_model
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import control_score
from lapa2_interp.circuits.fade_account import STATES, shares
from lapa2_interp.errors import DataError
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.load import load_transformers
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.stats import holm

HEADS = tuple((layer, layer % 9) for layer in range(24))
OPPOSING = tuple((layer, (layer + 1) % 9) for layer in range(24))


def card(prompts):
    return Selection(
        model="smollm2-135m", weights="w", task={"positive": "p", "negative": "n"}, by="slope",
        metric="js", heads=HEADS, suppressors=OPPOSING, scores=((1.0, 0.5, 1.5),) * 48,
        positions=None, prompts=prompts, inputs="i", stability=None, screened=None,
        chosen_by_halves=None, seed=1, created=datetime(2026, 11, 30, tzinfo=UTC), prompt=None,
    )  # fmt: skip


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The folder of a run, with prompts, cards and tables of the stages before the test."""
    monkeypatch.chdir(tmp_path)
    cards = tmp_path / "made" / grids.SMOLLM2 / "cards"
    cards.mkdir(parents=True)
    (tmp_path / "bases").mkdir()
    for i in grids.MODELS[grids.SMOLLM2].numbers:
        prompts = tuple(f"Card {i} has prompt {j}" for j in range(64))
        grids.selection_file(i).write_text("\n".join(prompts) + "\n")
        card(prompts).save(cards / f"{i}.json")
    analyse.cards(grids.SMOLLM2, tmp_path, tmp_path)
    for name, n in (("families-tune", 60), ("families", 400)):
        lines = "".join(f"The {name} prompt {i}\n" for i in range(n))
        Path(f"bases/{name}.txt").write_text(lines)
    arms = grids.MODELS[grids.SMOLLM2].arms
    tuned = pd.DataFrame({"model": grids.SMOLLM2, "arm": arms, "strength": 1.3, "cost": np.nan})
    tuned.assign(tuned=True).to_csv("strengths.csv", index=False)
    layers = pd.DataFrame({"model": grids.SMOLLM2, "layer": [10, 20], "chosen": [False, True]})
    layers.to_csv("layers.csv", index=False)
    return tmp_path


def made(monkeypatch, stage, tables):
    words = ["grids.py", stage, grids.SMOLLM2, "--models", "none", "--tables", str(tables)]
    monkeypatch.setattr("sys.argv", words)
    grids.main()
    return load_grid(str(Path("made") / grids.SMOLLM2 / f"{stage}.toml"), check=False)


def test_every_prompt_of_the_test_has_every_arm_once_by_its_card(work, monkeypatch):
    grid = made(monkeypatch, "test", work)
    assert not grid.needs
    by_arm = {}
    for cell in grid.cells:
        by_arm.setdefault(analyse.arm_of(cell), []).append(cell)
    assert set(by_arm) == {grids.NO_BIAS, grids.HALF, *grids.MODELS[grids.SMOLLM2].arms}
    for arm, cells in by_arm.items():
        prompts = [p for cell in cells for p in cell.prompts if cell.attribute == "positive"]
        assert sorted(prompts) == sorted(f"The families prompt {i}" for i in range(400)), arm
        assert {cell.length for cell in cells} == {64}
    first = next(cell for cell in by_arm[grids.CHOSEN] if "The families prompt 7" in cell.prompts)
    addition = [c for c in by_arm[grids.ADDITION] if "The families prompt 7" in c.prompts]
    assert addition[0].parameters["texts"] == "bases/families-select-2.txt", "7 mod 5 is 2"
    assert addition[0].parameters["layers"] == 20
    assert {bias.heads for bias in first.active_augmentations} == {HEADS}
    assert analyse.strength_of(first) == 1.3


def test_random_heads_are_others_of_the_same_layers_drawn_for_each_card(work, monkeypatch):
    cells = made(monkeypatch, "test", work).cells
    drawn = {
        cell.active_augmentations[0].heads for cell in cells if analyse.arm_of(cell) == grids.RANDOM
    }
    assert len(drawn) == 5
    for heads in drawn:
        assert not set(heads) & set(HEADS)
        assert sorted(layer for layer, _ in heads) == list(range(24))


def test_the_bias_down_is_twice_the_bias_up(work, monkeypatch):
    cells = made(monkeypatch, "test", work).cells
    biases = next(
        cell.active_augmentations for cell in cells if analyse.arm_of(cell) == grids.OPPOSING
    )
    assert [(bias.heads, bias.alpha) for bias in biases] == [(HEADS, 1.3), (OPPOSING, -2.6)]


def test_the_layers_are_tried_on_eight_prompts_of_each_card(work, monkeypatch):
    cells = made(monkeypatch, "layers", work).cells
    assert all(len(cell.prompts) == 40 for cell in cells)
    tried = {cell.parameters["layers"] for cell in cells if cell.method == "caa"}
    assert tried == {10, 15, 20, 25}


def test_tuning_first_tries_two_strengths_of_each_arm(work, monkeypatch):
    pd.DataFrame(columns=["model", "arm", "strength", "cost", "tuned"]).to_csv("strengths.csv")
    cells = made(monkeypatch, "tune", work).cells
    tried = {}
    for cell in cells:
        tried.setdefault(analyse.arm_of(cell), set()).add(analyse.strength_of(cell))
    assert tried == {grids.NO_BIAS: {0.0}} | {
        arm: set(values) for arm, values in grids.FIRST_STRENGTHS.items()
    }


def test_the_first_token_is_spared_in_qwen_alone(work, monkeypatch):
    cards = grids.cards_of(grids.SMOLLM2, work)
    assert grids.first_token_blocks(grids.SMOLLM2, cards, work) == []
    monkeypatch.setattr(grids, "QWEN", grids.SMOLLM2)
    cells = made(monkeypatch, "first-token", work).cells
    assert len(cells) == 2 * len(cards)
    for cell in cells:
        (bias,) = cell.active_augmentations
        assert (bias.span, bias.alpha, bias.heads) == (("prefix", (1, 2)), 1.3, HEADS)
        assert analyse.arm_of(cell) == grids.SPARED


@pytest.mark.parametrize(
    ("costs", "following"),
    [
        ({}, (1.0, 2.5)),
        ({1.0: 1.1, 2.5: 1.3}, ()),
        ({1.0: 1.1, 2.5: 1.2}, (5.0,)),
        ({1.0: 1.1, 2.5: 1.2, 5.0: 1.24}, (10.0,)),
        ({1.0: 1.1, 2.5: 1.2, 5.0: 1.24, 10.0: 1.24}, ()),
        ({1.0: 1.2, 2.5: 0.6}, ()),
        ({1.0: 1.7, 2.5: 3.0}, (0.5,)),
        ({1.0: 1.5, 2.5: 3.0}, ()),
    ],
)
def test_a_strength_is_doubled_or_halved_until_the_cost_lies_between(costs, following):
    tried = pd.DataFrame(
        {"arm": grids.CHOSEN, "strength": list(costs), "cost": list(costs.values()), "tuned": False}
    )
    assert grids.next_strengths((1.0, 2.5), tried) == following


def test_a_tuned_strength_is_interpolated_in_the_logarithm_of_the_cost():
    curve = pd.DataFrame({"strength": [0.0, 1.0, 3.0], "nll": np.log([10.0, 11.0, 14.0])})
    share = (np.log(12.5) - np.log(11)) / (np.log(14) - np.log(11))
    assert analyse.value_at_cost(curve, "strength") == pytest.approx(1 + 2 * share)
    assert analyse.tuned_strength(curve) == pytest.approx(1 + 2 * share)
    assert analyse.value_at_cost(curve.head(2), "strength") == 1.0, "never reached: the strongest"
    low = pd.DataFrame({"strength": [0.0, 1.0, 2.0], "nll": np.log([10.0, 12.0, 7.0])})
    assert analyse.tuned_strength(low) == 1.0, "never reached: what costs most"
    dips = pd.DataFrame({"strength": [0.0, 1.0, 2.0], "nll": np.log([10.0, 8.0, 12.5])})
    assert analyse.tuned_strength(dips) == 2.0, "a small dip may be chance"
    again = pd.DataFrame({"strength": [0.0, 0.5, 1, 2, 4], "nll": np.log([10, 9.98, 12, 6, 30])})
    assert analyse.tuned_strength(again) == 1.0, "texts that repeat themselves, and worse, are out"


@pytest.mark.parametrize(
    ("model", "change", "p", "p_equal", "prompts", "said"),
    [
        (grids.GEMMA, 6.0, 0.01, 0.7, 400, "more"),
        (grids.GEMMA, -6.0, 0.01, 0.7, 400, "less"),
        (grids.GEMMA, 1.0, 0.6, 0.04, 400, "equal within 5 points"),
        (grids.GEMMA, 4.0, 0.06, 0.4, 400, "not decided"),
        (grids.GEMMA, 6.0, 0.01, 0.7, 320, ""),
        (grids.LARGE_QWEN, 6.0, 0.01, 0.7, 400, "more"),
        (grids.LARGE_QWEN, 6.0, 0.01, 0.7, 200, ""),
    ],
)
def test_a_verdict_needs_all_prompts(model, change, p, p_equal, prompts, said):
    row = {"model": model, "difference": change, "p_holm": p, "p_equal": p_equal}
    row |= {"prompts": prompts}
    assert analyse.verdict(pd.Series(row | {"complete": True})) == said
    assert analyse.verdict(pd.Series(row | {"complete": False})) == ""


def labelled(model, arms, rng):
    """Texts of 400 prompts, of which a share has the attribute."""
    prompts = [f"p{i}" for i in range(400)]
    return pd.concat(
        pd.DataFrame(
            {
                "model": model,
                "stage": "test",
                "arm": arm,
                "prompt": prompts * 2,
                "attribute": ["positive"] * 400 + ["negative"] * 400,
                "nll": 3.0 + rng.normal(0, 0.1, 800),
                "reader": np.nan,
            }
            | {name: 100.0 * (rng.random(800) < share) for name in analyse.METRICS[:2]}
        )
        for arm, share in arms.items()
    )


def test_the_first_measures_are_tested_over_models_by_the_judge_of_each():
    rng = np.random.default_rng(1)
    shares = {grids.CHOSEN: 0.8, grids.ADDITION: 0.6, grids.HALF: 0.55, grids.NO_BIAS: 0.5}
    texts = pd.concat([labelled(grids.QWEN, shares, rng), labelled(grids.LARGE_QWEN, shares, rng)])
    table = analyse.differences(texts)
    first = table[table["first"]]
    assert len(first) == 4
    assert set(first["metric"]) == {"acc hidden"}
    assert set(first["verdict"]) == {""}, "two models are not judged yet"
    read = pd.concat([labelled(name, shares, rng) for name in (grids.SMOLLM2, grids.GEMMA)])
    read["reader"] = read["acc hidden"]
    of_all = analyse.differences(pd.concat([texts, read]))
    by_measure = of_all[of_all["first"] & (of_all["against"] == grids.ADDITION)]
    assert dict(zip(by_measure["model"], by_measure["metric"], strict=True)) == analyse.FIRST_JUDGE
    assert set(by_measure["verdict"]) == {"more"}
    np.testing.assert_allclose(by_measure["p_holm"], holm(by_measure["p"].to_numpy()))
    raw, corrected = first["p"].to_numpy(), first["p_holm"].to_numpy()
    assert (corrected >= 2 * raw.min() - 1e-12).all(), "two models each"
    own = texts[texts["model"] == grids.QWEN].set_index("arm")["acc hidden"]
    by_hand = own[grids.CHOSEN].mean() - own[grids.ADDITION].mean()
    row = first[(first["model"] == grids.QWEN) & (first["against"] == grids.ADDITION)].iloc[0]
    assert row["difference"] == pytest.approx(by_hand)


# --- a prefix that stays near

NEAR = 3
NEW = [[40, 41, 42, 43, 44, 45, 46, 47], [90, 81, 72, 63, 54, 45, 36, 27]]


def by_hand(model, layout, tokens, kept):
    """Logits after each new token, from scores whose keys are rotated by hand."""
    network = facts_of(model).network
    weights, config = network.state_dict(), network.config
    size = Size("llama", config.num_hidden_layers, config.num_attention_heads,
                config.num_key_value_heads, config.rms_norm_eps, config.head_dim)  # fmt: skip
    ids = torch.tensor([*layout.ids, *tokens])
    n, n_input = len(ids), len(layout)
    moves = torch.zeros(n, n)  # query key
    stays = slice(*layout.prefix) if kept == "prefix" else slice(0, n_input)
    for query in range(n_input, n):
        moves[query, stays] = max(0, query - (n_input - 1) - NEAR)

    def attend(layer, queries, keys, values):
        group = size.n_heads // size.n_kv_heads
        keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
        turned_queries, heads = turn(queries, torch.arange(n), size), []
        for query in range(n):
            places = torch.arange(n) + moves[query]
            scores = turned_queries[:, query, None] @ turn(keys, places, size).mT
            scores = scores[:, 0, : query + 1] / queries.shape[2] ** 0.5
            heads.append(scores.softmax(1)[:, None] @ values[:, : query + 1])
        return torch.cat(heads, dim=1).transpose(0, 1).flatten(1)

    return llama(weights, size, ids, torch.arange(n), attend)[n_input:]


@pytest.mark.parametrize("kept", ["input", "prefix"])
def test_keys_that_stay_near_have_the_scores_of_a_smaller_distance(kept):
    model = load_model("tiny-llama", "float64", model_class="TransformersModel")
    layouts = [
        Layout.of(model.tokenizer, "Very good:", prompt) for prompt in ("The lake", "A book is on")
    ]
    padded = left_pad(layouts)

    def decoded(block):
        rows = new_rows(model)
        with torch.no_grad(), block:
            with augmented(model, None, padded):
                rows.prompt_pass(padded)
            rows.expand(torch.tensor([1, 0]), capacity=len(padded[0]) + 8)
            with augmented(model, None, padded[::-1]):
                steps = torch.tensor(NEW).split(1, dim=1)
                return torch.cat([rows.read_tokens(step) for step in steps], dim=1)

    logits = decoded(near.kept_near(model, kept, NEAR))
    with torch.no_grad():
        wanted = [
            by_hand(model, layouts[i], tokens, kept) for i, tokens in zip((1, 0), NEW, strict=True)
        ]
    np.testing.assert_allclose(logits, torch.stack(wanted), atol=1e-5)  # angles are float32
    usual = decoded(nullcontext())
    moved = (logits - usual).abs().amax(2)
    assert (moved[:, :NEAR] == 0).all(), "nothing moves before the prompt is that far away"
    assert (moved[:, NEAR:] > 1e-3).all()


def test_forced_texts_have_the_control_of_a_pass_over_all_tokens():
    model = load_model("planted", model_class="TransformersModel")
    texts = ContrastSet.of(model, "sentiment", prompts=["The lake", "A road that is"], tokens=6)
    rules = [Augmentation(alpha=0.5), Augmentation(alpha=2.0)]
    values = near.forced_values(model, texts, rules)
    for i, rule in enumerate(rules):
        wanted = control_score(model, texts, metrics=("lex", "js"), augmentation=rule)
        for measure in ("lex", "js"):
            np.testing.assert_allclose(
                values[measure][i], wanted.values[measure][i], rtol=1e-3, atol=1e-5
            )
    layout, text = texts.examples[0].layouts[0], texts.examples[0].text
    with torch.no_grad(), augmented(model, rules[0], layout):
        logits = facts_of(model).network(torch.tensor([[*layout.ids, *text]])).logits[0]
    log_probs = logits[len(layout) - 1 : -1].log_softmax(1)
    nll = -log_probs[torch.arange(6), torch.tensor(text)]
    np.testing.assert_allclose(values["nll"][0], nll, rtol=1e-3)


# --- one table of findings


def test_the_share_of_distance_is_that_of_the_account():
    rng = np.random.default_rng(3)
    by_state = {name: rng.uniform(1, 2, 9) + (name == "near") for name in STATES}
    taken, fade = findings.distance_and_fade(pd.DataFrame(by_state))
    wanted = next(row["share"] for row in shares(by_state) if row["name"] == "distance")
    assert taken.sum() / fade.sum() == pytest.approx(wanted)


def test_a_finding_takes_the_first_judge_that_read_both_arms():
    def row(metric, difference, verdict):
        names = {"model": grids.SMOLLM2, "arm": grids.CHOSEN, "against": grids.HALF}
        ends = {"difference": difference, "low": difference - 1, "high": difference + 1}
        return names | ends | {"metric": metric, "verdict": verdict}

    arms = pd.DataFrame({"model": grids.SMOLLM2, "arm": [grids.CHOSEN, grids.HALF],
                         "stage": "test", "cost": [1.3, 1.1]})  # fmt: skip
    rows = [row("acc hidden", 9.0, "more"), row("acc (linear)", -8.0, "less")]
    for judged, number, verdict in (
        (rows, -8.0, "opposite"),  # `adapter` is not independent there
        ([*rows, row("reader", 7.0, "more")], 7.0, "holds"),
    ):
        (said,) = findings.of_texts(pd.DataFrame(judged), arms)
        assert (said["number"], said["verdict"], said["cost"]) == (number, verdict, 1.3)


# --- the reader


def test_the_reader_answers_as_if_it_read_every_chat_alone(monkeypatch):
    network, tokenizer, _ = load_transformers("tiny-llama", "float64")
    monkeypatch.setattr(reader, "ROWS", 3)
    monkeypatch.setattr(
        tokenizer, "chat_template",
        "{% for m in messages %}<user>{{ m.content }}</user>{% endfor %}<answer>",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    words = ["lake", "road", "a", "is", "good", "very", "bad", "horse"]
    texts = [" ".join(rng.choice(words, n)) for n in (1, 9, 4, 2, 7, 3, 5, 1)]
    answers = reader.asked(network, tokenizer, "Is this text good?", texts)
    first = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in reader.ANSWERS]
    for text, answer in zip(texts, answers, strict=True):
        chat = [{"role": "user", "content": f"Is this text good?\n\nText: {text}"}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            logits = network(torch.tensor([ids])).logits[0, -1, first]
        assert answer == reader.ANSWERS[int(logits.argmax())]
    assert len(set(answers)) == 2, "both answers occur"


def test_shared_tokens_end_where_lists_differ():
    assert reader.shared_tokens([[1, 2, 3, 4], [1, 2, 5, 4]]) == 2
    assert reader.shared_tokens([[1, 2, 3], [1, 2, 3, 4]]) == 2, "each keeps a token of its own"


def test_the_exact_p_is_that_of_all_flips():
    rng = np.random.default_rng(5)
    rows = [(f"p{i}", kind) for i in range(9) for kind in analyse.ATTRIBUTES]
    arms = [
        pd.DataFrame(rows, columns=["prompt", "attribute"]).assign(
            judged=rng.choice([0.0, 100.0], len(rows), p=[1 - share, share])
        )
        for share in (0.8, 0.3)
    ]
    change = (arms[0]["judged"] - arms[1]["judged"]).to_numpy().reshape(9, 2).mean(axis=1)
    flips = np.array(np.meshgrid(*[[-1, 1]] * 9)).reshape(9, -1)
    as_large = np.abs(change @ flips) >= abs(change.sum()) - 1e-9
    assert analyse.exact_p(*arms, "judged") == pytest.approx(as_large.mean())
    assert analyse.exact_p(arms[0], arms[0], "judged") == 1
    with pytest.raises(DataError, match="other than 0 and 100"):
        analyse.exact_p(arms[0].assign(judged=rng.uniform(0, 100, len(rows))), arms[1], "judged")
