"""The score commands as a user meets them."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from conftest import change_texts, lapa2, load, run_of

from analyses.lab.data import ItemData
from lapa2_interp import Augmentation
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.runs.run import load_run
from lapa2_interp.tasks.task import Task

pytestmark = pytest.mark.usefixtures("shared_models")


@pytest.fixture(autouse=True)
def scores_of_this_test(own_cache):
    """Scores are cached beside the test's files."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    arms = {"baseline": None, "alpha 1": Augmentation(alpha=1)}
    run = run_of(
        load("tiny-gpt2"), methods.get("prefix"), load_task("sentiment"), ["positive", "negative"], ["The lake", "The sea"],
        arms, length=32, samples=3, seed=4, trace="none",
    )  # fmt: skip
    return run.save(tmp_path_factory.mktemp("runs") / "run").folder


def test_a_run_is_scored_cell_by_cell(run_folder, tmp_path, capsys):
    line = "score --scorers accuracy perplexity=tiny-llama distinct --lengths 20 32 --out"
    assert lapa2(line, tmp_path / "scores", run_folder) == 0
    printed = capsys.readouterr().out
    table = pd.read_csv(tmp_path / "scores/table.csv")
    assert set(table["metric"]) == {
        "accuracy",
        "perplexity",
        "distinct-1",
        "distinct-2",
        "distinct-3",
    }
    assert set(table["attribute"]) == {"positive", "negative", "all"}
    assert set(table["length"]) == {20, 32}
    assert len(table) == 2 * 3 * 2 * 6
    for scorer in table["scorer"].unique():
        assert scorer in printed
    for kind in ("adapter", "linear"):
        assert table["scorer"].str.contains(f"{kind} sentiment").any()
    differences = pd.read_csv(tmp_path / "scores/differences.csv")
    assert set(differences["arm"]) == {"alpha 1 paper"}
    assert (differences["detectable"].dropna() >= 0).all()
    scores = pd.read_parquet(tmp_path / "scores/scores.parquet")
    assert len(scores) == 2 * 24 * 3
    assert "against the baseline" in printed


def test_a_sweep_is_scored_by_method_and_says_what_is_missing(tmp_path, capsys):
    (tmp_path / "grid.toml").write_text(
        'model = "tiny-gpt2"\ntask = "sentiment"\nprompts = 2\nsamples = 1\nlength = 18\ndtype = "float32"\ntrace ='
        ' "none"\nmethod = ["prefix", "air-decoding"]\naugmentation = ["none", "paper"]\n'
    )
    run, out = tmp_path / "run", tmp_path / "scores"
    assert lapa2("sweep --workers 1 --device cpu", tmp_path / "grid.toml", "--out", run) == 0
    capsys.readouterr()
    assert lapa2("score --scorers accuracy linear --out", out, run) == 0
    printed_all = capsys.readouterr()
    assert "not finished" not in printed_all.err
    shown = [line.split()[0] for line in printed_all.out.splitlines() if " baseline " in line]
    assert sorted(shown) == ["air-decoding"] * 3 + ["prefix"] * 3
    first = next(iter(json.loads((run / "run.json").read_text())["grids"]["grid"]))
    (run / "cells" / first / "000.parquet").unlink()
    assert lapa2("score --force --scorers accuracy linear --out", out, run) == 0
    assert "1 of 8 cells not finished" in capsys.readouterr().err
    table = pd.read_csv(out / "table.csv")
    together = table[table["attribute"] == "all"]
    assert sorted(together["method"]) == ["air-decoding", "air-decoding", "prefix"]


def test_a_run_of_ones_own_task_is_scored_by_its_words(tmp_path, capsys):
    """Its prefixes are known without --task; labels with a carriage return stay one cell."""
    task = Task(
        name="mood",
        attributes={'calm, "ish"': {"prefix": "Very serene:"}, "angry": {"prefix": "Very angry:"}},
        prompts={"texts": ("The lake",)},
    )
    run = run_of(
        load("tiny-gpt2"), methods.get("prefix"), task, task.attributes, ["The lake"],
        length=15, trace="none",
    ).save(tmp_path / "run")  # fmt: skip
    change_texts(run.folder, lambda texts: texts.assign(text="a serene lake"))
    assert lapa2("score --scorers echo --out", tmp_path / "scores", run.folder) == 0
    table = pd.read_csv(tmp_path / "scores" / "table.csv").set_index("attribute")
    assert table["mean"].to_dict() == {'calm, "ish"': 1, "angry": 0, "all": 0.5}


def test_wordings_of_ones_own_task_are_apart_and_have_their_own_words(tmp_path):
    file = tmp_path / "mood.toml"
    file.write_text(
        '[attributes.calm]\nprefix = "Very serene:"\n[attributes.angry]\nprefix = "Very angry:"\n'
        '[prompts]\ntexts = ["The lake"]\n'
    )
    (tmp_path / "grid.toml").write_text(
        f'model = "tiny-gpt2"\ntask = "{file}"\nsamples = 1\nlength = 15\ndtype = "float32"\ntrace = "none"\n'
        'method = "prefix"\naugmentation = "none"\nprefix = ["task", "A {attribute} text:"]\n'
    )
    run = tmp_path / "run"
    assert lapa2("sweep --workers 1 --device cpu", tmp_path / "grid.toml", "--out", run) == 0
    change_texts(run, lambda texts: texts.assign(text="a serene lake"))
    assert lapa2("score --scorers echo --out", tmp_path / "scores", run) == 0
    table = pd.read_csv(tmp_path / "scores" / "table.csv")
    said = {
        ("prefix Very serene: / Very {attribute}:", "calm"): 1,
        ("prefix A {attribute} text:", "calm"): 0,
    }
    means = table.set_index(["variant", "attribute"])["mean"].to_dict()
    assert {key: means[key] for key in said} == said
    assert (table["n"] == np.where(table["attribute"] == "all", 2, 1)).all()
    data = ItemData(load_run(run), "item", ("grid",), ("echo",))
    scores = data.scores(data.cells, metrics=["echo"])
    assert scores.groupby("variant")["scorer"].unique().map(list).to_dict() == {
        "prefix Very serene: / Very {attribute}:": [
            "echo (calm: serene calm; angry: angry, words or graphemes)"
        ],
        "prefix A {attribute} text:": ["echo (calm: calm; angry: angry, words or graphemes)"],
    }


def test_a_run_of_ones_own_task_is_scored_by_a_classifier_of_ones_own(tmp_path, capsys):
    """Trained for the task's file; the task is known by its name and by its file."""
    file, run, data = tmp_path / "mood.toml", tmp_path / "run", tmp_path / "data.csv"
    file.write_text(
        '[attributes.calm]\nprefix = "Very serene:"\n[attributes.angry]\nprefix = "Very angry:"\n'
        '[prompts]\ntexts = ["The lake"]\n'
    )
    rows = [("serene lake", "calm"), ("calm sea", "calm"), ("rage", "angry"), ("fury", "angry")]
    pd.DataFrame(rows, columns=["text", "label"]).to_csv(data, index=False)
    line = f"scorers train --task {file} --data {data} --out {tmp_path / 'own'}"
    assert lapa2(line) == 0
    grid = (
        f'model = "tiny-gpt2"\ntask = "{file}"\nsamples = 1\nlength = 15\ndtype = "float32"\ntrace = "none"\n'
        'method = "prefix"\naugmentation = "none"\n'
    )
    (tmp_path / "grid.toml").write_text(grid)
    assert lapa2("sweep --workers 1 --device cpu", tmp_path / "grid.toml", "--out", run) == 0
    weights = tmp_path / "own" / "mood.npz"
    own = f"accuracy={weights}"
    for task in ("", "--task mood", f"--task {file}"):
        line = f"score --force {task} --scorers mood:{own} masked={weights} echo --out"
        assert lapa2(line, tmp_path / "scores", run) == 0
        table = pd.read_csv(tmp_path / "scores" / "table.csv")
        assert table["metric"].unique().tolist() == ["accuracy", "masked", "echo"]
        assert table["scorer"][0].startswith("accuracy (linear mood ")
    assert lapa2(f"score --labels A=calm --scorers {own} --out", tmp_path / "no", run) == 2
    assert "--labels belongs to" in capsys.readouterr().err.splitlines()[-1]
    folder = f"--scorers accuracy={tmp_path / 'own'}"
    assert lapa2(f"score {folder} --out", tmp_path / "no", run) == 2
    assert f"give the file of one: {weights}" in capsys.readouterr().err
    assert lapa2("score --scorers accuracy --out", tmp_path / "no", run) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert "unknown linear scorer 'mood'; allowed: detox, sentiment, topic" in last_line
    assert "`lapa2 scorers train`" in last_line


def test_a_second_call_asks_for_nothing(run_folder, tmp_path, capsys, monkeypatch):
    from lapa2_interp.scoring.transformer import Perplexity

    assert lapa2("score --scorers perplexity=tiny-llama --out", tmp_path / "a", run_folder) == 0
    monkeypatch.setattr(Perplexity, "score", lambda *_: pytest.fail("a score was asked for twice"))
    assert lapa2("score --scorers perplexity=tiny-llama --out", tmp_path / "b", run_folder) == 0
    assert (tmp_path / "a/table.csv").read_bytes() == (tmp_path / "b/table.csv").read_bytes()
    assert lapa2("score --scorers perplexity=tiny-llama --out", tmp_path / "b", run_folder) == 2
    assert "is finished; --force replaces it" in capsys.readouterr().err
    assert (
        lapa2("score --force --scorers perplexity=tiny-llama --out", tmp_path / "b", run_folder)
        == 0
    )


def test_the_writer_of_the_texts_is_named(run_folder, tmp_path, capsys):
    assert lapa2("score --scorers perplexity=tiny-gpt2 --out", tmp_path / "a", run_folder) == 0
    assert "perplexity (tiny-gpt2 float32 self, random, seed 0" in capsys.readouterr().out


def test_perplexity_is_measured_in_float32_whatever_wrote_the_texts(tmp_path, capsys):
    run = run_of(
        load("tiny-gpt2", "bfloat16"), methods.get("prefix"), load_task("sentiment"), ["positive"], ["The lake"],
        {"baseline": None}, length=40, samples=1, seed=4, trace="none",
    )  # fmt: skip
    run.save(tmp_path / "run")
    for named, dtype in (("", "float32"), ("--dtype bfloat16", "bfloat16")):
        line = f"score --force {named} --scorers perplexity=tiny-gpt2 --out"
        assert lapa2(line, tmp_path / "a", tmp_path / "run") == 0
        assert f"perplexity (tiny-gpt2 {dtype} self, random, seed 0" in capsys.readouterr().out


def test_halves(run_folder, tmp_path):
    assert lapa2("score --scorers linear --parts 2 --out", tmp_path / "halves", run_folder) == 0
    assert set(pd.read_csv(tmp_path / "halves/table.csv")["part"]) == {1, 2}


def test_a_file_of_texts(tmp_path, capsys):
    file = tmp_path / "texts.jsonl"
    rows = [
        {"text": "You are a stupid idiot and a fool"},
        {"text": "Thank you for the kind help"},
        {"text": " "},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lapa2("score --scorers toxicity linear distinct --out", tmp_path / "out", file) == 0
    printed = capsys.readouterr().out
    assert "1 empty text" in printed
    scores = pd.read_parquet(tmp_path / "out/scores.parquet")["value"]
    assert scores[0] > 0.5 > scores[1]
    assert (
        lapa2(
            "score --scorers accuracy linear --task sentiment --attribute positive --out",
            tmp_path / "acc",
            file,
        )
        == 0
    )


def test_a_very_long_text_is_scored(tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"text": "a good day and a fine film " * 5_000}) + "\n")
    line = (
        "score --scorers toxicity perplexity=tiny-gpt2 accuracy distinct linear --task sentiment"
        " --attribute positive --out"
    )
    assert lapa2(line, tmp_path / "out", file) == 0
    assert len(pd.read_csv(tmp_path / "out/table.csv")) == 3 + 1 + 1 + 3


def test_sheets_and_answers(run_folder, tmp_path, capsys):
    assert lapa2("scorers sheets --n-texts 8 --out", tmp_path / "sheets", run_folder) == 0
    assert (
        "8 texts (4 sentiment prefix baseline, 4 sentiment prefix alpha 1 paper)"
        in capsys.readouterr().out
    )
    sheet = pd.read_csv(tmp_path / "sheets/sheet.csv")
    files = []
    for number, name in enumerate(("anna", "ben")):
        filled = sheet.assign(relevance=3 + number, fluency=4, topicality=2, annotator=name)
        files.append(tmp_path / f"{name}.csv")
        filled.to_csv(files[-1], index=False)
    assert (
        lapa2(
            "scorers answers --out",
            tmp_path / "answers",
            "--key",
            tmp_path / "sheets/key.csv",
            *files,
        )
        == 0
    )
    table = pd.read_csv(tmp_path / "answers/table.csv")
    assert table[table["metric"] == "relevance"]["mean"].tolist() == [3.5, 3.5]
    assert (tmp_path / "answers/agreement.csv").is_file()


def test_arms_of_two_models_and_variants_are_apart_in_sheets_and_what_repeats_counts_once(
    tmp_path, capsys
):
    run = tmp_path / "run"
    common = (
        'task = "sentiment"\nattribute = "positive"\nprompts = 2\nlength = 18\ntrace = "none"\n'
        'dtype = "float32"\naugmentation = "none"\n'
    )
    (tmp_path / "grid.toml").write_text(
        f'model = ["tiny-gpt2", "tiny-llama"]\n{common}samples = [1, 2]\n'
        'method = ["prefix", { name = "air-decoding", omega = 60.0 }]\ntop_k = [50, 200]\n'
    )
    assert lapa2("sweep --workers 1 --device cpu", tmp_path / "grid.toml", "--out", run) == 0
    assert lapa2("scorers sheets --n-texts 16 --out", tmp_path / "sheets", run) == 0
    printed = capsys.readouterr().out
    assert "2 sentiment prefix baseline @ tiny-gpt2" in printed
    assert "2 sentiment air-decoding baseline | omega=60.0, top-k 50 @ tiny-llama" in printed
    assert lapa2("score --scorers repetition --out", tmp_path / "scores", run) == 0
    assert pd.read_csv(tmp_path / "scores" / "table.csv")["n"].tolist() == [4] * 8
    line = "score --scorers repetition --only samples=1 --out"
    assert lapa2(line, tmp_path / "ones", run) == 0
    assert pd.read_csv(tmp_path / "ones" / "table.csv")["n"].tolist() == [2] * 8


def test_options_that_would_do_nothing_or_harm_are_refused(run_folder, tmp_path, capsys):
    def said(line):
        assert lapa2(f"score --scorers repetition {line} --out", tmp_path / "out", run_folder) == 2
        return capsys.readouterr().err

    assert "texts for negative; use --only attribute=positive" in said("--attribute positive")
    assert "have 32 tokens; 9999 is longer" in said("--lengths 28 9999")
    for option in ("--judge-prices 1 2", "--max-cost 1", "--judge-temperature server"):
        assert f"{option.split()[0]} belongs to a judge" in said(option)
    line = "score --scorers repetition --only attribute=positive attribute=negative --out"
    assert lapa2(line, tmp_path / "both", run_folder) == 0
    assert "negative" in pd.read_csv(tmp_path / "both" / "table.csv")["attribute"].tolist()


def test_the_lists(capsys):
    assert lapa2("scorers list") == 0
    printed = capsys.readouterr().out
    for word in (
        "accuracy",
        "perplexity",
        "distinct",
        "toxicity",
        "judge",
        "sentiment",
        "Spearman",
    ):
        assert word in printed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--scorers acuracy",
            "unknown scorer 'acuracy'; allowed: accuracy, .*did you mean 'accuracy'",
        ),
        ("--scorers judge", "the judge needs a model: judge=MODEL"),
        (
            "--scorers judge=m --max-cost 1",
            "--max-cost .* needs the judge's prices: give --judge-prices",
        ),
        (
            "--scorers toxicity=somewhere",
            "name the label of toxic text too, as toxicity=MODEL:LABEL",
        ),
        (
            "--scorers accuracy",
            "the classifiers that ship with the package belong to tasks: give --task",
        ),
        (
            "--scorers topic:repetition --task sentiment",
            "topic:repetition: no text of task 'topic'",
        ),
        ("--scorers accuracy --task sentiment", "has the labels positive, negative, not ''"),
        ("--scorers distinct --lengths 64", "give a run folder"),
        (
            "--scorers distinct --parts 0",
            "parts: input should be greater than or equal to 1, found 0",
        ),
        ("--scorers distinct --labels x", "--labels 'x' is not of the form NAME=VALUE"),
        ("--scorers repetition --labels A=b", "--labels belongs to a classifier of your own"),
        ("--scorers repetition --judge-url http://x", "--judge-url belongs to a judge"),
        ("--scorers distinct --column body", "has no column 'body'; found text; give --column"),
    ],
)
def test_mistakes_are_one_line(line, message, tmp_path, monkeypatch, capsys):
    import re

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "ten words are needed in a text that is scored"}\n')
    assert lapa2(f"score {line} --out", tmp_path / "out", file) == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "out").exists()


def test_a_column_of_numbers_is_no_text(tmp_path, capsys):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": 3}\n')
    assert lapa2("score --scorers distinct --out", tmp_path / "out", file) == 2
    assert (
        "has no text in column 'text', found '3'; give texts there, or --column"
        in capsys.readouterr().err.splitlines()[-1]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--c 0 --out OUT", "--c: input should be greater than 0, found 0"),
        ("--c nan --out OUT", "--c: input should be a finite number, found nan"),
        ("--out FILE", "is a file; give a folder"),
    ],
)
def test_scorer_training_refuses_before_it_reads(settings, message, tmp_path, capsys):
    file = tmp_path / "file.jsonl"
    file.write_text("")
    line = settings.replace("OUT", str(tmp_path / "out")).replace("FILE", str(file))
    assert lapa2(f"scorers train --task sentiment --data {file} {line}") == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_judge_without_a_key(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    file = tmp_path / "texts.jsonl"
    file.write_text(
        '{"text": "The lake is fine.", "prompt": "The lake", "attribute": "positive"}\n'
    )
    assert lapa2("score --scorers judge=gpt-4o --out", tmp_path / "out", file) == 2
    assert "OPENAI_API_KEY" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_train_a_scorer_with_weighted_data(tmp_path, capsys):
    rows = [
        ("warm and fine", "positive"),
        ("kind and warm", "positive"),
        ("cold and grim", "negative"),
        ("dull", "negative"),
    ]
    table = pd.DataFrame(rows, columns=["text", "label"])
    for name in ("one.csv", "two=3.csv"):
        table.to_csv(tmp_path / name, index=False)
    line = "scorers train --task sentiment"
    assert (
        lapa2(
            line,
            "--data",
            f"{tmp_path / 'one.csv'}=3",
            "--data",
            tmp_path / "two=3.csv",
            "--out",
            tmp_path / "w",
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "one.csv: 2 positive, 2 negative; weight 3" in printed
    assert "two=3.csv: 2 positive, 2 negative; weight 1" in printed, (
        "a file of that name is that file"
    )
    pd.DataFrame(
        [("so warm", "positive"), ("so cold", "negative"), ("so grim", "positive")],
        columns=["text", "label"],
    ).to_csv(tmp_path / "new.csv", index=False)
    read = ("--data", tmp_path / "one.csv", "--test", tmp_path / "new.csv")
    assert lapa2(line, *read, "--out", tmp_path / "tested") == 0
    assert re.search(r"0\.667 .*accuracy, new.*, 3\n", capsys.readouterr().out)
    assert lapa2(line, "--data", f"{tmp_path / 'one.csv'}=-1", "--out", tmp_path / "x") == 2
    assert "must be a positive number" in capsys.readouterr().err


def test_a_file_is_taken_at_its_word(tmp_path, capsys):
    """A column of texts beside one that is called text; texts and names that pandas takes for
    missing; columns of mixed types."""
    file = tmp_path / "texts.csv"
    file.write_text(
        "text,completion,arm\nprompt,NA,None\nprompt,the sea the sea the sea the sea,x\n"
    )
    line = "score --scorers repetition --column completion --out"
    assert lapa2(line, tmp_path / "out", file) == 0
    scores = pd.read_parquet(tmp_path / "out" / "scores.parquet")
    assert scores["text"].tolist() == ["NA", "the sea the sea the sea the sea"]
    assert scores["arm"].tolist() == ["None", "x"]
    assert (
        lapa2("scorers sheets --column completion --n-texts 2 --out", tmp_path / "sheets", file)
        == 0
    )
    sheet = (tmp_path / "sheets" / "sheet.csv").read_text()
    assert "NA" in sheet
    assert "prompt" not in sheet.partition("\n")[2]
    rows = [{"text": "the lake is here", "id": "007"}, {"text": "the sea is here", "id": 8}]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lapa2("score --scorers repetition --out", tmp_path / "mixed", file) == 0
    assert pd.read_parquet(tmp_path / "mixed" / "scores.parquet")["id"].tolist() == ["007", "8"]


def test_what_a_file_lacks_is_missing_in_its_scores(tmp_path):
    file, out = tmp_path / "texts.jsonl", tmp_path / "out"
    file.write_text('{"text": "the lake is here", "id": "7"}\n{"text": "the sea is here"}\n')
    assert lapa2("score --scorers repetition --out", out, file) == 0
    assert pd.read_parquet(out / "scores.parquet")["id"].isna().tolist() == [False, True]


def test_lengths_that_make_rows_are_shown(tmp_path, capsys):
    file = tmp_path / "texts.csv"
    file.write_text("text,max_length\na b c d,11\na b c d,22\n")
    assert lapa2("score --scorers repetition --out", tmp_path / "out", file) == 0
    shown = re.findall(r"^ +(\d+) +\S+ +0 ", capsys.readouterr().out, re.MULTILINE)
    assert shown == ["11", "22"]


def test_a_scorer_that_is_asked_for_twice_scores_once(run_folder, tmp_path):
    line = "score --scorers sentiment:accuracy=linear accuracy=linear distinct sentiment:distinct --out"
    assert lapa2(line, tmp_path / "out", run_folder) == 0
    table = pd.read_csv(tmp_path / "out" / "table.csv")
    assert len(table) == 2 * 3 * 4
    assert not table.duplicated(["attribute", "arm", "metric"]).any()


def test_sheets_of_columns_that_are_numbers(tmp_path):
    file = tmp_path / "texts.csv"
    file.write_text("text,prompt,attribute,task,method,model,arm\na,p,x,1,2,3,4\nb,p,x,1,2,5,4\n")
    assert lapa2("scorers sheets --n-texts 2 --out", tmp_path / "sheets", file) == 0
    key = pd.read_csv(tmp_path / "sheets" / "key.csv")
    assert set(key["arm"]) == {"1 2 4 @ 3", "1 2 4 @ 5"}


def test_texts_that_are_all_blank_have_no_distinct_n(tmp_path, capsys):
    file = tmp_path / "texts.csv"
    file.write_text('text,arm\n"  ",a\nthe sea,b\n')
    assert lapa2("score --scorers distinct --only arm=a --out", tmp_path / "out", file) == 2
    assert "no text to count the words of: all are empty" in capsys.readouterr().err


def test_a_run_has_no_column_to_name(run_folder, tmp_path, capsys):
    assert (
        lapa2("score --column body --scorers repetition --out", tmp_path / "out", run_folder) == 2
    )
    assert "--column body belongs to a file of texts" in capsys.readouterr().err
    assert lapa2("runs --json --traceback", run_folder) == 2
    assert "--traceback prints texts, which --json has no place for" in capsys.readouterr().err
