"""The prefix commands as a user meets them."""

import json
import shutil

import pandas as pd
import pytest
from conftest import lapa2

from lapa2_interp.cli.app import main
from lapa2_interp.prefixes import soft_prefix
from lapa2_interp.prefixes.soft_prefix import RESERVED_SETS, load_prefix
from lapa2_interp.runs.run import finished_cell, load_run

pytestmark = pytest.mark.usefixtures("shared_models")

TRAIN = (
    "prefix train --model tiny-llama --task sentiment --set dtype=float32 --set slots=3 --set"
    " batch=4 --set lr=0.05"
)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    words = {
        "positive": ["good", "nice", "warm", "kind", "fine", "glad"],
        "negative": ["bad", "ugly", "cold", "dull", "grim", "sad"],
    }
    rows = [
        (f"{a} and {b}", label)
        for label, vocabulary in words.items()
        for a in vocabulary
        for b in vocabulary
    ]
    file = tmp_path_factory.mktemp("data") / "reviews.jsonl"
    pd.DataFrame([*rows, ("", "positive")], columns=["text", "label"]).to_json(
        file, orient="records", lines=True
    )
    return file


def train(reviews, out):
    line = f"{TRAIN} --set max_tokens=16 --set check_every=4"
    assert lapa2(line, "--data", reviews, "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def trained_once(reviews, tmp_path_factory):
    return train(reviews, tmp_path_factory.mktemp("trained") / "set")


@pytest.fixture
def trained(trained_once, tmp_path, capsys):
    """A copy of the set."""
    return shutil.copytree(trained_once, tmp_path / "set")


def test_train_writes_a_set_and_shows_what_it_learned(reviews, tmp_path, capsys):
    trained = train(reviews, tmp_path / "set")
    printed = capsys.readouterr()
    assert "reviews.jsonl: 36 positive, 36 negative (left out: 1 blank)" in printed.err
    assert "prefixes of 3 slots" in printed.err, "what will be done is said before"
    assert "NLL per token of the held-out texts" in printed.out
    assert "the same with hard prefixes, all:" in printed.out
    card = load_prefix(trained, "positive").card
    assert card.training.texts == 29, "a fifth of each class was held out"
    assert card.held_out.accuracy_of_set.n == 6, "half of that is measured"
    assert card.held_out.data.startswith("reviews.jsonl, held out (sha256")
    assert lapa2("prefixes", trained) == 0
    printed = capsys.readouterr().out
    assert "tiny-llama" in printed
    assert f"{card.held_out.nll['positive'].mean:.3f}" in printed
    assert lapa2("prefixes --json", trained) == 0
    assert json.loads(capsys.readouterr().out)["soft"][0]["attribute"] == "negative"


@pytest.mark.parametrize("has_held_out", [False, True], ids=["split off", "given"])
def test_the_texts_that_decide_when_to_stop_measure_nothing(
    reviews, tmp_path, monkeypatch, has_held_out
):
    from lapa2_interp.prefixes import make

    texts = {}
    monkeypatch.setattr(
        make, "train_set", lambda *arguments, **more: texts.update(train=arguments[2:4])
    )

    def measure(folders, task, corpora, **more):
        texts["test"] = corpora
        return pd.DataFrame()

    monkeypatch.setattr(make, "evaluate_sets", measure)
    held_out = [str(reviews)] if has_held_out else []
    data = tmp_path / "others.jsonl" if has_held_out else reviews
    if has_held_out:
        words = [(f"{label} {word}", label) for label in ("positive", "negative") for word in "abc"]
        pd.DataFrame(words, columns=["text", "label"]).to_json(data, orient="records", lines=True)
    make.make_set(model="tiny-llama", out=tmp_path, data=[str(data)], held_out=held_out)
    trained, deciding, measured = (
        {text for corpus in corpora for text in corpus.texts["positive"]}
        for corpora in (*texts["train"], texts["test"])
    )
    assert not deciding & measured
    assert not trained & (deciding | measured)
    assert (len(trained), len(deciding), len(measured)) == (
        (3, 18, 18) if has_held_out else (29, 4, 3)
    )


def test_of_several_corpora_no_text_is_in_two_parts(reviews, tmp_path, monkeypatch):
    """One corpus has texts of the other, and each is split on its own."""
    from lapa2_interp.prefixes import make

    parts = []
    monkeypatch.setattr(make, "train_set", lambda *arguments, **more: parts.extend(arguments[2:4]))
    monkeypatch.setattr(
        make, "evaluate_sets", lambda folders, task, read, **more: parts.append(read)
    )
    rows = pd.read_json(reviews, lines=True)
    more = rows.assign(text=[f"{text} again" for text in rows["text"]])
    both = tmp_path / "both.jsonl"
    pd.concat([rows[rows["text"] != ""], more]).to_json(both, orient="records", lines=True)
    make.make_set(model="tiny-llama", out=tmp_path, data=[str(reviews), str(both)])
    trained, deciding, measured = (
        {text for corpus in corpora for texts in corpus.texts.values() for text in texts}
        for corpora in parts
    )
    assert trained
    assert not deciding & measured
    assert not trained & (deciding | measured)
    noted = [corpus.summary for corpus in parts[0]]
    assert any("that another part has" in note for note in noted), noted


def test_a_set_measured_on_one_text_each_is_read_again(reviews, tmp_path, capsys):
    """One text tells no spread: the interval of the card has no bounds."""
    few = tmp_path / "few.jsonl"
    rows = pd.read_json(reviews, lines=True)
    rows[rows["text"] != ""].groupby("label").head(12).to_json(few, orient="records", lines=True)
    out = tmp_path / "small"
    line = f"{TRAIN} --set max_tokens=16 --set check_every=4"
    assert lapa2(line, "--data", few, "--out", out) == 0
    held_out = load_prefix(out, "positive").card.held_out
    assert (held_out.accuracy.n, str(held_out.accuracy.low)) == (1, "nan")
    assert "NaN" not in (out / "positive.json").read_text(), "JSON has none"
    assert lapa2("prefixes", out) == 0
    assert lapa2(line, "--data", few, "--out", out) == 0, "finished"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--limit 0", "--limit: input should be greater than or equal to 1, found 0"),
        ("--max-tokens -1", "--max-tokens: input should be greater than or equal to 1, found -1"),
        ("--max-tokens 9999", "tokens of a text exceed the model's context of"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(trained_once, reviews, options, message, capsys):
    assert lapa2(f"prefix evaluate {options}", trained_once, "--data", reviews) == 2
    assert message in capsys.readouterr().err


def test_texts_behind_a_set_are_scored_into_its_cards(trained, capsys):
    before = (trained / "positive.safetensors").read_bytes()
    assert lapa2("prefix score --samples 1 --length 30 --dtype float32", trained) == 0
    printed = capsys.readouterr().out
    card = load_prefix(trained, "positive").card
    for generated, kind in zip(card.generated, ("adapter", "linear"), strict=True):
        assert (generated.baseline.n, generated.baseline.clusters) == (15, 15)
        assert generated.scorer.startswith(f"accuracy ({kind} sentiment ")
        assert f"{generated.lapa2.mean:.3f}" in printed
    assert (trained / "positive.safetensors").read_bytes() == before, "the weights are as they were"
    assert lapa2("prefix score", trained.parent / "none") == 2
    assert "holds no soft prefixes" in capsys.readouterr().err
    assert lapa2("prefix score --alpha 0", trained) == 2
    assert "alpha: input should be greater than 0, found 0" in capsys.readouterr().err


def test_the_scores_of_both_arms_are_told_apart(trained, tmp_path, monkeypatch, capsys):
    """A stand-in finds the attribute in each text with LAPA2, and in none without. A set of one's
    own is not taken for one of its name that ships."""
    from lapa2_interp.runs import prefix_accuracy
    from lapa2_interp.scoring.tables import score_table

    def by_arm(texts, scorer):
        scores = score_table(texts, scorer)
        return scores.assign(value=(texts["alpha"] > 0).to_numpy(float))

    load, trusted = prefix_accuracy.load_model, []

    def loading(*args, trust_remote_code, **settings):
        trusted.append(trust_remote_code)
        return load(*args, **settings)

    monkeypatch.setattr(prefix_accuracy, "load_model", loading)
    monkeypatch.setattr(prefix_accuracy, "score_table", by_arm)
    monkeypatch.setattr(soft_prefix, "SHIPPED_SETS", tmp_path / "shipped")
    (tmp_path / "shipped" / "tiny-llama" / "sentiment-mle").mkdir(parents=True)
    trained.rename(tmp_path / "mle")
    monkeypatch.chdir(tmp_path)
    line = "prefix score mle --samples 1 --length 30 --dtype float32 --classifier linear"
    assert lapa2(f"{line} --trust-remote-code") == 0
    assert trusted == [True]
    assert lapa2("prefix score mle --task none") == 2
    assert "unknown task 'none'" in capsys.readouterr().err
    for name in ("positive", "negative"):
        for accuracy in load_prefix(tmp_path / "mle", name).card.generated:
            assert (accuracy.baseline.mean, accuracy.lapa2.mean) == (0.0, 1.0)


def test_held_out_files_decide_when_to_stop(reviews, tmp_path):
    """Other texts than those that are learned; what is in both is left out."""
    own = tmp_path / "held.jsonl"
    rows = [{"text": f"{word} at {i}.", "label": label} for i in range(6)
            for word, label in (("Fine", "positive"), ("Grim", "negative"))]  # fmt: skip
    shared = json.loads(reviews.read_text("utf-8").splitlines()[0])
    own.write_text("".join(json.dumps(row) + "\n" for row in [*rows, shared]))
    out = tmp_path / "set"
    line = (
        f"{TRAIN} --set max_tokens=16 --set check_every=4 --recipe small --parameterisation direct"
    )
    assert lapa2(line, "--data", reviews, "--held-out", own, "--out", out) == 0
    card = load_prefix(out, "positive").card
    assert card.held_out.data.startswith("held.jsonl")
    assert card.held_out.accuracy_of_set.n == 6, "of the 6 of each label that are not trained on"
    assert card.training.texts == 36


def test_a_trained_set_generates(trained, tmp_path):
    line = "generate --model tiny-llama --attribute positive --prompt 'The lake' --length 16"
    assert lapa2(f"{line} --set prefixes={trained}", "--out", tmp_path / "soft") == 0
    assert lapa2(line, "--out", tmp_path / "hard") == 0
    soft, hard = (finished_cell(load_run(tmp_path / name)) for name in ("soft", "hard"))
    assert soft.texts["text"][0] != hard.texts["text"][0]
    manifest = load_run(tmp_path / "soft").manifest()
    assert manifest.branches["prefix"] == load_prefix(trained, "positive").card.name
    assert soft.trace.sizes["prefix_token"] == 3
    assert lapa2("trace", tmp_path / "soft") == 0


def test_evaluate_rewrites_the_cards(trained, reviews, capsys):
    before = load_prefix(trained, "positive")
    assert (
        lapa2(
            "prefix evaluate --limit 10 --max-tokens 8 --dtype float32", trained, "--data", reviews
        )
        == 0
    )
    after = load_prefix(trained, "positive")
    assert after.card.held_out.accuracy_of_set.n == 20
    assert after.card.held_out.max_tokens == 8
    assert after.card.sha256 == before.card.sha256, "the weights are as they were"
    assert "20 texts of at most 8 tokens" in capsys.readouterr().out


def test_train_resumes_what_was_interrupted(tmp_path, reviews, trained_once, monkeypatch, capsys):
    from lapa2_interp.prefixes.optimization import PrefixTraining

    step, line = PrefixTraining._train_step, f"{TRAIN} --set max_tokens=16 --set check_every=4"

    def interrupted(self):
        if self.step == 5:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(PrefixTraining, "_train_step", interrupted)
    assert lapa2(line, "--data", reviews, "--out", tmp_path / "set") == 130
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.undo()
    assert lapa2(line, "--data", reviews, "--out", tmp_path / "set") == 0
    assert (
        load_prefix(tmp_path / "set", "negative").card.sha256
        == load_prefix(trained_once, "negative").card.sha256
    )


def test_a_contrastive_set_starts_from_another(trained, reviews, tmp_path):
    line = TRAIN.replace("lr=0.05", "lr=1e-30") + " --objective contrastive --set max_tokens=16"
    assert lapa2(line, "--start-from", trained, "--data", reviews, "--out", tmp_path / "next") == 0
    after, before = (load_prefix(folder, "positive") for folder in (tmp_path / "next", trained))
    assert after.card.set == "contrastive"
    assert after.card.training.recipe["start"] == "set"
    assert after.card.training.started_from == before.card.sha256
    assert (after.keys == before.keys).all(), "a learning rate of nothing"


def test_import_and_lists(tmp_path, capsys, monkeypatch):
    from conftest import load, soft_prefix

    from lapa2_interp.prefixes.soft_prefix import save_prefix

    save_prefix(soft_prefix(load("tiny-gpt2")), tmp_path / "a", "float32")
    line = "prefix import --model tiny-gpt2 --task sentiment --attribute negative"
    assert lapa2(line, tmp_path / "a/positive.safetensors", "--out", tmp_path / "b") == 0
    assert "generate with --set prefixes=" in capsys.readouterr().out
    assert load_prefix(tmp_path / "b", "negative").card.set == "imported"
    assert lapa2(line, tmp_path / "a/positive.safetensors", "--out", tmp_path / "b") == 2
    assert "has a prefix 'negative' already" in capsys.readouterr().err
    named = (tmp_path / "a/positive.safetensors", "--set-name", "mine", "--out", tmp_path / "c")
    assert lapa2(line, *named) == 0
    assert load_prefix(tmp_path / "c", "negative").card.set == "mine"
    own = tmp_path / "a/positive.json"
    own.write_text(own.read_text().replace('"weights": "', '"weights": "other '))
    own_prefix = (tmp_path / "a/positive.safetensors", "--out", tmp_path / "d")
    assert lapa2(line, *own_prefix) == 2
    assert "give the model it was trained for, or --other-base if" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()
    monkeypatch.chdir(tmp_path)
    for name, words in RESERVED_SETS.items():
        assert lapa2(line, tmp_path / "a/positive.safetensors", "--out", name) == 2
        assert f"a method would take {words}" in capsys.readouterr().err
        assert not (tmp_path / name).exists()
    assert lapa2(line, *own_prefix, "--other-base") == 0
    capsys.readouterr()
    assert lapa2("prefixes") == 0
    printed = capsys.readouterr().out
    assert "'Very positive:'" in printed
    assert "smollm2-135m" in printed
    assert lapa2("prefix recipes") == 0
    printed = capsys.readouterr().out
    assert "con-prefix: objective=contrastive" in printed
    assert "gen_weight        w of the contrastive loss." in printed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "prefix train --data nothing --out x",
            "unknown corpus 'nothing'; allowed: imdb, sst2, agnews, or a file",
        ),
        ("prefix train --data x.jsonl --out x --objective mse", "mse"),
        ("prefix train --data x.jsonl --out x --attributes calm", "unknown attribute 'calm'"),
        ("prefix train --data x.jsonl --out x --set lr", "'lr' is not of the form NAME=VALUE"),
        ("prefix train --data x --out x --set lr=1 --set lr=2", "--set gives lr twice, 1 and 2"),
        (
            "prefix train --data x.jsonl --out x --set start=set",
            "start 'set' needs the folder of a set",
        ),
        ("prefix evaluate x --data imdb", "x holds no soft prefixes"),
        ("prefixes x", "x holds no soft prefixes"),
    ],
)
def test_mistakes_are_one_line(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"text": f"text {i}", "label": label}
        for label in ("positive", "negative")
        for i in range(12)
    ]
    pd.DataFrame(rows).assign(text=lambda t: t["text"] + t["label"]).to_json(
        "x.jsonl", orient="records", lines=True
    )
    assert lapa2(line) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert not printed.splitlines()[-1].startswith(" ")
    assert not (tmp_path / "x").exists()


def test_scoring_sets_needs_a_set(capsys):
    assert main(["prefix", "score"]) == 2
    assert "name the folder of a set" in capsys.readouterr().err.splitlines()[-1]
