"""Adapter scorers on a tiny random model: what they read, what training does, and their files."""

import json
import lzma
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from analyses.scorers import train_adapters as script
from lapa2_interp.cli.app import main
from lapa2_interp.errors import ScoringError
from lapa2_interp.scoring.adapter import (
    ADAPTER_ENDING,
    LONGEST_WINDOW,
    AdapterRecipe,
    AdapterScorer,
    adapter_card,
    batch_by_tokens,
    group_by_beginning,
    load_adapter,
    load_adapter_network,
    padded_rows,
    save_adapter,
    split_windows,
)
from lapa2_interp.scoring.agreement import agreement
from lapa2_interp.scoring.linear import LinearScorer
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer
from lapa2_interp.scoring.scorer import TextItem, run_scorer
from lapa2_interp.scoring.task_scorer import SHIPPED_WEIGHTS, ToxicityScorer, tasks_in
from lapa2_interp.scoring.training import GradedTexts, ScorerData
from lapa2_interp.stats import mean_interval
from lapa2_interp.tasks.corpora import Corpus, read_corpus

BASE, LABELS = "tiny-llama", ("nontoxic", "toxic")
RECIPE = AdapterRecipe(layers=2, first=1, rank=2, alpha=4.0, passes=2, per_pass=24, head_lr=0.02)
TEXTS = {
    "nontoxic": tuple(f"fine {i} fine" for i in range(16)),
    "toxic": tuple(f"grim {i} grim" for i in range(16)),
}
TRAIN = Corpus({k: v[:12] for k, v in TEXTS.items()}, "toy")
TEST = Corpus({k: v[12:] for k, v in TEXTS.items()}, "toy test")


def trained(folder, recipe=RECIPE, corpus=TRAIN, graded=(), graded_tests=()):
    folder.mkdir(exist_ok=True)
    data = ScorerData([(corpus, 1.0)], [TEST], graded, graded_tests)
    return script.train_adapter("detox", LABELS, data, folder, recipe, base=BASE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    trained(folder)
    return folder


def training(recipe=RECIPE):
    """A training of random texts whose adapters are not 0."""
    network, _, _ = load_adapter_network(BASE, recipe.layers, 2)
    rng = np.random.default_rng(0)
    texts = [rng.integers(5, 200, n).astype(np.int32) for n in rng.integers(2, 60, 12)]
    source = script.WeightedTexts(texts, np.eye(2)[np.arange(12) % 2], 1.0)
    parameters = script.add_adapters(network, recipe)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_((0.3 * torch.randn(parameter.shape)).half())
    tensors = script.named_on_disk(parameters)
    return SimpleNamespace(
        network=network, sources=[source], parameters=parameters, tensors=tensors
    )


def facts(recipe=RECIPE, weights="random, seed 0"):
    own = {"labels": LABELS, "data": (), "examples": 1, "versions": {}, "base": BASE}
    return {
        **own,
        "base_weights": weights,
        "recipe": recipe,
        "tokens": 1,
        "seconds": 1.0,
        "held_out": (),
    }


# --- reading


def test_merged_weights_give_what_peft_gives(tmp_path):
    made = training()
    save_adapter(made.tensors, tmp_path, "detox", **facts())
    adapter, _ = load_adapter("detox", tmp_path)
    ids, lengths = padded_rows([[7, 8, 9, 100], [30, 31]], 0, "cpu")
    with torch.no_grad():
        assert not torch.allclose(made.network(ids, lengths), made.network.head.bias, atol=1e-2)
        torch.testing.assert_close(
            adapter.network(ids, lengths), made.network(ids, lengths), atol=1e-5, rtol=1e-5
        )


def test_only_adapted_layers_are_in_the_file(tmp_path):
    card = save_adapter(training().tensors, tmp_path, "detox", **facts())
    stored = load_file(tmp_path / f"detox{ADAPTER_ENDING}")
    assert len(stored) == 1 * 7 * 2 + 2
    assert stored["layers.1.self_attn.q_proj.a"].shape == (2, 32)
    assert stored["layers.1.mlp.down_proj.b"].shape == (32, 2)
    assert {str(tensor.dtype) for name, tensor in stored.items() if name[:4] != "head"} == {
        "torch.float16"
    }
    assert stored["head.weight"].dtype == torch.float32
    assert card.recipe == RECIPE


def test_a_reader_sees_the_mean_and_the_last_state(tmp_path):
    """From the states of transformers' own forward pass."""
    from lapa2_interp.models.load import load_transformers

    ours, _, _ = load_adapter_network(BASE, 2, 3)
    with torch.no_grad():
        torch.nn.init.normal_(ours.head.weight)
        network, _, _ = load_transformers(BASE)
        ids = torch.tensor([[0, 40, 41, 42]])
        states = network(ids, output_hidden_states=True).hidden_states[2][0].double()
        states = states / states.square().mean(1, keepdim=True).sqrt()
        seen = torch.cat([states[1:].mean(0), states[3]])
        expected = ours.head.weight.double() @ seen
        logits = ours(*padded_rows([[40, 41, 42], [5] * 9], 0, "cpu"))[0]
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)


def test_windows_are_few_and_alike():
    for n in (1, 128, 129, 300, 1000):
        parts = split_windows(range(n))
        assert [i for part in parts for i in part] == list(range(n))
        assert len(parts) == -(-n // LONGEST_WINDOW)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_long_text_is_the_mean_of_its_windows(folder):
    adapter, _ = load_adapter("detox", folder)
    text = "fine words and grim ones, " * 12
    ids = adapter.tokenizer(text, add_special_tokens=False).input_ids
    parts = [adapter.tokenizer.decode(part) for part in split_windows(ids)]
    assert len(parts) == 3
    own = np.array([adapter.logits([part])[0] for part in parts])
    weights = [len(part) for part in split_windows(ids)]
    assert np.abs(adapter.logits([text])[0] - np.average(own, 0, weights)).max() < 1e-5


def test_the_batch_does_not_change_numbers(folder):
    adapter, _ = load_adapter("detox", folder)
    texts = ["fine", "a grim day, " * 20, "x " * 60, "the end of it"]
    together = adapter.probabilities(texts)
    assert together.sum(1) == pytest.approx(1)
    for text, row in zip(texts, together, strict=True):
        assert np.abs(adapter.probabilities([text])[0] - row).max() < 1e-5
    assert np.abs(adapter.probabilities(texts[::-1])[::-1] - together).max() < 1e-5


def test_a_text_and_its_beginnings_are_read_once(folder, monkeypatch):
    """Cut at four lengths: the tokens of the longest are read, and every number is as alone."""
    adapter, _ = load_adapter("detox", folder)
    longest = "fine and grim, grim and fine, so it goes on. " * 4
    texts = [longest[:n] for n in (30, 60, 100, len(longest))] + ["so grim", "fine and grim"]
    alone = np.concatenate([adapter.logits([text]) for text in texts])
    read, plain = [], adapter.network.base.forward

    def counted(input_ids, **more):
        read.append(input_ids.numel())
        return plain(input_ids=input_ids, **more)

    monkeypatch.setattr(adapter.network.base, "forward", counted)
    assert np.abs(adapter.logits(texts) - alone).max() < 1e-5
    n = [len(adapter.tokenizer(text).input_ids) for text in texts]
    assert sum(read) < 2 * max(n) + 10 < sum(n)


def test_beginnings():
    windows = [[5, 6, 7], [5], [9], [5, 6], [5, 6, 8], [9]]
    assert group_by_beginning(windows) == [[1, 3, 0], [4], [2, 5]]


def test_batches_keep_to_their_budget():
    lengths = [1, 2, 3, 50, 60, 300]
    batches = list(batch_by_tokens(lengths, 120))
    assert [i for batch in batches for i in batch] == list(range(6))
    assert batches == [[0, 1, 2], [3, 4], [5]]


def test_scorers_of_adapters(folder):
    scorer = AdapterScorer("detox", folder)
    assert (scorer.name, scorer.columns) == ("accuracy", LABELS)
    assert scorer.version == f"adapter detox {scorer.card.sha256[:12]}"
    items = [TextItem("grim 3 grim"), TextItem("  "), TextItem("fine 3 fine")]
    table = run_scorer(scorer, items)
    assert table["reason"].tolist() == ["", "empty text", ""]
    toxic = run_scorer(ToxicityScorer(AdapterScorer("detox", folder)), items)
    assert toxic["toxicity"].equals(table["toxic"])
    assert toxic["toxicity"][0] > 0.5 > toxic["toxicity"][2]


def test_scorers_by_name():
    for name in ("linear", ""):
        scorer = make_scorer("accuracy", name, ScorerOptions(task="sentiment"))
        assert scorer.version.startswith("linear sentiment")
    assert make_scorer("toxicity", "linear", ScorerOptions()).version.startswith("linear detox")
    with pytest.raises(ScoringError, match="adapter scorer"):
        make_scorer("accuracy", "adapter", ScorerOptions(task="mood"))
    with pytest.raises(ScoringError, match="give task"):
        make_scorer("accuracy", "adapter", ScorerOptions())


# --- what is trained on


def test_a_pass_takes_other_texts_of_a_corpus():
    passes = [script.draw_texts(10, 4, number, (0, 1)) for number in range(5)]
    assert [len(drawn) for drawn in passes] == [4] * 5
    together = [text for drawn in passes for text in drawn]
    assert sorted(together[:10]) == sorted(together[10:]) == list(range(10))
    assert sorted(script.draw_texts(3, 9, 4, (0, 1))) == [0, 1, 2]
    assert script.draw_texts(10, 4, 1, (0, 1)) == passes[1] != script.draw_texts(10, 4, 1, (1, 1))


def test_windows_of_training_texts():
    rng = np.random.default_rng(0)
    long = np.arange(1000, dtype=np.int32)
    parts = [script.draw_window(long, 8, rng) for _ in range(2000)]
    lengths = np.array([len(part) for part in parts])
    assert (lengths.min(), lengths.max()) == (8, LONGEST_WINDOW)
    assert np.log(lengths).mean() == pytest.approx(np.log(8 * 128) / 2, abs=0.06)
    assert np.mean([part[0] == 0 for part in parts]) == pytest.approx(0.5, abs=0.04)
    assert all((np.diff(part) == 1).all() for part in parts)
    short = [script.draw_window(long[:7], 8, rng) for _ in range(2000)]
    assert all(part[0] == 0 and 4 <= len(part) <= 7 for part in short)
    assert np.mean([len(part) < 7 for part in short]) == pytest.approx(1 / 3, abs=0.04)
    assert all(len(script.draw_window(long[:4], 8, rng)) == 4 for _ in range(20))


def test_a_pass_follows_from_its_seed():
    rng = np.random.default_rng(0)
    texts = [rng.integers(5, 200, n).astype(np.int32) for n in rng.integers(2, 300, 90)]
    source = script.WeightedTexts(texts, np.eye(2)[np.arange(90) % 2], 0.5)
    one, again, reseeded = (
        script.make_pass([source], RECIPE.model_copy(update={"seed": seed, "per_pass": 60}), 0)
        for seed in (0, 0, 1)
    )
    assert one.batches == again.batches != reseeded.batches
    assert all(np.array_equal(a, b) for a, b in zip(one.windows, again.windows, strict=True))
    assert sorted(t for batch in one.batches for t in batch) == list(range(60))
    sizes = [len(batch) * max(len(one.windows[t]) for t in batch) for batch in one.batches]
    assert max(sizes) <= RECIPE.tokens_per_batch
    assert sum(map(len, one.windows)) > 0.7 * sum(sizes), "little padding"


def test_the_loss_weighs_texts_and_shares(tmp_path):
    made = training()
    windows = [np.array([7, 8], np.int32), np.array([9], np.int32), np.array([10], np.int32)]
    shares, weights = np.array([[0.75, 0.25], [1, 0], [0, 1]]), np.array([8.0, 1.0, 1.0])
    now = script.TrainingPass(windows, shares, weights, [[0, 1], [2]])
    with torch.no_grad():
        logits = made.network(*padded_rows([[7, 8], [9]], 0, "cpu")).log_softmax(1).numpy()
        expected = -(weights[:2, None] * shares[:2] * logits).sum() / (weights.sum() / 2)
        assert float(script.loss_of(made.network, now, [0, 1], 0, False)) == pytest.approx(
            expected, rel=1e-5
        )


# --- training


def test_a_separable_corpus_is_learned(folder):
    card = AdapterScorer("detox", folder).card
    reached = {(row.measure, row.length): row.value for row in card.held_out}
    assert reached["accuracy", "all"] == 1.0
    assert card.data == ("toy: 12 nontoxic, 12 toxic; weight 1",)
    assert card.examples == 24
    assert card.tokens > 0
    assert not list(folder.glob("*.checkpoint"))


def test_the_card_is_about_the_rounded_weights(folder):
    scorer = AdapterScorer("detox", folder)
    texts = [text for label in LABELS for text in TEST.texts[label]]
    numbers = run_scorer(scorer, [TextItem(text) for text in texts])[list(LABELS)]
    table = agreement(numbers, [label for label in LABELS for _ in TEST.texts[label]], texts)
    assert [row.value for row in scorer.card.held_out] == table["value"].tolist()


@pytest.mark.parametrize("steps", [1, 3])
def test_a_killed_training_goes_on(steps, folder, tmp_path, monkeypatch):
    """The file is the one of a training that was not killed, bit by bit."""
    small = RECIPE.model_copy(update={"tokens_per_batch": 128})
    undisturbed = trained(tmp_path / "whole", small)
    loss_of, left = script.loss_of, steps

    def killed(*arguments):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return loss_of(*arguments)

    monkeypatch.setattr(script, "SAVE_EVERY", -1.0)
    monkeypatch.setattr(script, "loss_of", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "killed", small)
    monkeypatch.setattr(script, "loss_of", loss_of)
    reversed_corpus = Corpus({name: texts[::-1] for name, texts in TRAIN.texts.items()}, "toy")
    for settings in ((), (small, reversed_corpus)):
        with pytest.raises(ScoringError, match="unfinished training with other settings; repeat"):
            trained(tmp_path / "killed", *settings)
    again = trained(tmp_path / "killed", small)
    assert (again.sha256, again.tokens) == (undisturbed.sha256, undisturbed.tokens)
    assert again.sha256 != AdapterScorer("detox", folder).card.sha256
    assert not list((tmp_path / "killed").glob("*.checkpoint"))
    with pytest.raises(ScoringError, match="is finished; choose another --out"):
        trained(tmp_path / "killed", small)


def test_a_damaged_checkpoint(tmp_path):
    (tmp_path / "detox-adapter.checkpoint").write_bytes(b"no checkpoint")
    with pytest.raises(ScoringError, match="is damaged, .*; repeat its command, delete the file"):
        trained(tmp_path)


def test_graded_texts_are_trained_and_tested_on(tmp_path):
    graded = (
        GradedTexts(TEXTS["toxic"], (0.9,) * 16, "scored"),
        GradedTexts(
            (*TEXTS["toxic"], *TEXTS["nontoxic"]), (0.9,) * 16 + (0.1,) * 16, "scored test"
        ),
    )
    recipe = RECIPE.model_copy(update={"dtype": "bfloat16"})
    card = trained(tmp_path, recipe, graded=[(graded[0], 2.0)], graded_tests=[graded[1]])
    assert card.data[1] == "scored: 16 graded; weight 2"
    (auc,) = (
        row.value
        for row in card.held_out
        if (row.data, row.measure, row.length) == ("scored test", "AUC", "all")
    )
    assert auc > 0.95


def test_the_base_stays_as_it_is_below_the_first_adapter(tmp_path):
    made = training()
    now = script.make_pass(made.sources, RECIPE, 0)
    script.loss_of(made.network, now, now.batches[0], 0, False).backward()
    moved = {
        name for name, parameter in made.network.named_parameters() if parameter.grad is not None
    }
    assert moved == set(made.parameters)
    assert not any("layers.0." in name for name in moved)


def test_training_without_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    network, _, _ = load_adapter_network(BASE, 2, 2)
    with pytest.raises(ScoringError, match=r"pip install lapa2-interp\[train\]"):
        script.add_adapters(network, RECIPE)


def test_the_script_reads_files_and_prints_what_it_reaches(tmp_path, monkeypatch, capsys):
    rows = [{"text": text, "label": label} for label in LABELS for text in TEXTS[label]]
    for name in ("train", "test"):
        lines = [json.dumps({**row, "text": f"{row['text']} {name}"}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    recipe, train_adapter = {}, script.train_adapter

    def noted(task, labels, data, folder, settings, device):
        recipe.update(settings)
        return train_adapter(task, labels, data, folder, RECIPE, base=BASE)

    monkeypatch.setattr(script, "train_adapter", noted)
    words = "--task detox --data train.jsonl=2 --test test.jsonl --layers 9 --rank 3 --out out"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_adapters.py", *words.split()])
    script.main()
    assert (recipe["layers"], recipe["rank"], recipe["passes"]) == (9, 3, 3)
    assert "accuracy, test.jsonl" in capsys.readouterr().out


def test_the_list_has_adapters(folder, monkeypatch, capsys):
    monkeypatch.setattr("lapa2_interp.scoring.task_scorer.SHIPPED_WEIGHTS", folder)
    assert main(["scorers", "list"]) == 0
    printed = capsys.readouterr().out
    assert "  detox: nontoxic, toxic (0.0 MB)\n" in printed
    assert "    1.000 [1.000, 1.000]   accuracy, toy test, 8\n" in printed


# --- files


def test_damaged_adapters(folder, tmp_path):
    with pytest.raises(ScoringError, match="has no adapter scorer; train one"):
        load_adapter("detox", tmp_path)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / f"detox{ADAPTER_ENDING}"
    with pytest.raises(ScoringError, match="unknown adapter scorer 'mood'; allowed: detox"):
        load_adapter("mood", tmp_path)
    stored = load_file(file)

    def with_tensors(tensors, **changes):
        save_adapter(tensors, tmp_path, "detox", **(facts() | changes))

    with_tensors({name: tensor for name, tensor in stored.items() if name != "head.bias"})
    with pytest.raises(ScoringError, match="does not fit tiny-llama .*head.bias.*train it again"):
        load_adapter("detox", tmp_path)
    with_tensors({name: tensor for name, tensor in stored.items() if not name.endswith("q_proj.b")})
    with pytest.raises(ScoringError, match="does not fit tiny-llama .*q_proj.b"):
        load_adapter("detox", tmp_path)
    with_tensors(stored | {"layers.1.self_attn.q_proj.a": torch.zeros(2, 5)})
    with pytest.raises(ScoringError, match="does not fit tiny-llama"):
        load_adapter("detox", tmp_path)
    with_tensors(stored | {"layers.1.self_attn.z_proj.b": torch.zeros(2, 5)})
    with pytest.raises(ScoringError, match="a tensor 'layers.1.self_attn.z_proj.b' that belongs"):
        load_adapter("detox", tmp_path)
    with_tensors(stored, base_weights="other")
    with pytest.raises(ScoringError, match="belongs to tiny-llama with other; found random, seed"):
        load_adapter("detox", tmp_path)
    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(ScoringError, match="not the file its card describes; train it again"):
        load_adapter("detox", tmp_path)
    file.with_suffix(".json").write_text(json.dumps({"task": "detox"}))
    with pytest.raises(ScoringError, match="is not the card of a scorer: labels"):
        load_adapter("detox", tmp_path)


# --- those that ship


@pytest.fixture(scope="module")
def sentiment():
    return AdapterScorer("sentiment")


def test_shipped_adapters_state_what_they_reach():
    assert tasks_in(SHIPPED_WEIGHTS, ADAPTER_ENDING) == ["detox", "sentiment", "topic"]
    for task, file, measure, least in (
        ("sentiment", "sst2_valid.jsonl.xz", "accuracy", 0.88),
        ("topic", "agnews_test.jsonl.xz", "accuracy", 0.9),
        ("detox", "rtp_perspective.jsonl.xz test rows", "Spearman", 0.854),
    ):
        card = adapter_card(task)
        (row,) = (
            row
            for row in card.held_out
            if (row.data, row.measure, row.length) == (file, measure, "all")
        )
        assert row.low <= row.value <= row.high
        assert row.value >= least, (task, row)
        assert (SHIPPED_WEIGHTS / f"{task}{ADAPTER_ENDING}").stat().st_size < 5e6
        assert card.base_weights.startswith("sha256 ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "file"), [("sentiment", "sentiment/sst2_valid"), ("topic", "topic/agnews_test")]
)
def test_shipped_results_are_found_again(task, file, data, request):
    """On the first 7 texts of each class, or 15 of two."""
    scorer = request.getfixturevalue(task) if task == "sentiment" else AdapterScorer(task)
    corpus = read_corpus(str(data / f"{file}.jsonl.xz"), scorer.columns)
    texts = [
        (text, label)
        for label in scorer.columns
        for text in corpus.texts[label][: 15 if task == "sentiment" else 7]
    ]
    rows = np.array(scorer.score([TextItem(text) for text, _ in texts]))
    truth = [scorer.columns.index(label) for _, label in texts]
    (stated,) = (
        row.value
        for row in scorer.card.held_out
        if (row.measure, row.length) == ("accuracy", "all") and row.data in file + ".jsonl.xz"
    )
    accuracy = (rows.argmax(1) == truth).mean()
    assert abs(accuracy - stated) < 4 * np.sqrt(stated * (1 - stated) / len(texts))


@pytest.mark.long
def test_saying_positive_does_not_count_as_negative(sentiment, data):
    """What the linear scorer gets wrong: it takes "This is positive." for a bad sign, and "This is
    negative." for a good one. P(positive) of 60 sentences of an encyclopedia, with either behind
    them; an interval over sentences."""
    with lzma.open(data / "text" / "wikitext103_valid.txt.xz", "rt") as stream:
        sentences = re.split(r" \. |\n", stream.read())
    plain = [
        sentence.strip() + "."
        for sentence in sentences
        if 40 < len(sentence) < 140 and not re.search("<unk>|=|@", sentence)
    ][:600:10]
    assert len(plain) == 60
    change = {}
    for kind, scorer in (("adapter", sentiment), ("linear", LinearScorer("sentiment"))):
        before, *after = (
            np.array([row[0] for row in scorer.score([TextItem(text + more) for text in plain])])
            for more in ("", " This is positive.", " This is negative.")
        )
        change[kind] = [mean_interval(later - before, plain) for later in after]
    positive, negative = change["adapter"]
    assert positive.high > 0, "it does not lower P(positive)"
    assert negative.high < -0.1
    positive, negative = change["linear"]
    assert positive.high < 0 < negative.low, "the linear scorer reverses the words"
