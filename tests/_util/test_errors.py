"""Errors name what the caller can write: parameters in Python, options on the command line."""

import numpy as np
import pandas as pd
import pytest

from lapa2_interp import generate, load_run
from lapa2_interp._util.errors import (
    Lapa2Error,
    RunError,
    as_python_parameters,
    on_command_line,
)
from lapa2_interp.cli.app import main
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.runs.launch import launch
from lapa2_interp.runs.score import score

ASKED = {"attribute": "positive", "prompts": ["The lake"], "dtype": "float32", "length": 12}


@pytest.mark.parametrize(
    ("option", "parameter"),
    [
        ("give --max-rows N, below", "give max_rows=N, below"),
        ("is finished; --force replaces it", "is finished; force=True replaces it"),
        ("read it, then give --trust-remote-code (a", "read it, then give trust_remote_code=True (a"),
        ("or --dtype float32", "or dtype='float32'"),
        ("choose another --out", "choose another place"),
        ("--out x.html is a folder", "out x.html is a folder"),
        ("raise it (--set drafts=60)", "raise it (drafts=60)"),
        ("one, such as --only arm=baseline", "one, such as arm=baseline"),
        ("--workers must be at least 1, found 0", "workers must be at least 1, found 0"),
        ("--long-texts 4", "long_texts=4"),
        ("give --judge-prices IN OUT too", "give judge_prices=IN, OUT too"),
        ("`lapa2 runs RUN --repair` makes it", "`lapa2 runs RUN --repair` makes it"),
        ("the method's --alpha is not '--force'", "the method's alpha is not '--force'"),
        ("a minus -- or a-b --", "a minus -- or a-b --"),
    ],
)  # fmt: skip
def test_options_are_parameters_in_python(option, parameter):
    assert as_python_parameters(option) == parameter
    assert as_python_parameters(parameter) == parameter
    error = Lapa2Error(option)
    assert str(error) == parameter
    with on_command_line():
        assert str(error) == option
    assert str(error) == parameter


def test_both_surfaces_have_their_words(tmp_path, capsys):
    run = generate("tiny-gpt2", trace="pooled", **ASKED)
    run.save(tmp_path / "run")
    with pytest.raises(RunError, match="is finished; force=True replaces it, or choose another pl"):
        run.save(tmp_path / "run")
    with pytest.raises(Lapa2Error, match="^column words belongs to a file"):
        score(tmp_path / "run", ["echo"], column="words")
    assert load_run(run.save(tmp_path / "run", force=True).folder).samples()["text"].size == 1
    line = "generate --model tiny-gpt2 --attribute positive --prompt Lake --length 20 --out"
    assert main([*line.split(), str(tmp_path / "run")]) == 2
    assert "is finished; --force replaces it, or choose another --out" in capsys.readouterr().err
    assert main(["score", str(tmp_path / "run"), "--column", "words"]) == 2
    assert "lapa2: --column words belongs to a file" in capsys.readouterr().err


def test_one_name_stands_where_several_may(tmp_path):
    """And a path as text, and a list of any kind: none is read as its letters."""
    (tmp_path / "mood.toml").write_text(
        '[attributes.calm]\nprefix = "Very calm:"\n[prompts]\ntexts = ["The hill"]\n'
    )
    grid = tmp_path / "grid.toml"
    grid.write_text(
        f'model = "tiny-gpt2"\ntask = "{tmp_path}/mood.toml"\nmethod = "prefix"\nlength = 20\n'
        'samples = 1\ndtype = "float32"\n'
    )
    launch(str(grid), tmp_path / "run", workers=1, device="cpu")
    scored = score(str(tmp_path / "run"), "distinct", out=str(tmp_path / "scores"))
    assert set(scored.table["metric"]) == {"distinct-1", "distinct-2", "distinct-3"}
    asked = {"task": tmp_path / "mood.toml", "attribute": "calm", "dtype": "float32", "length": 20}
    for prompts in (pd.Series(["The lake", "The sea"]), np.array(["The lake", "The sea"])):
        assert cell_of("tiny-gpt2", prompts=prompts, **asked).prompts == ("The lake", "The sea")
    assert cell_of("tiny-gpt2", **asked).prompts == ("The hill",)
    assert cell_of("tiny-gpt2", prompts="The lake", **asked).prompts == ("The lake",)
    for prompts in ([], {"The lake": 1}, grid):
        with pytest.raises(
            Lapa2Error,
            match=r"^(prompts(: takes task, .*a list of texts| is an em)|cannot read prompts from .*no file of prompts)",
        ):
            cell_of("tiny-gpt2", prompts=prompts, **asked)


def test_a_word_for_a_classifier_alone_scores_nothing(tmp_path):
    run = generate("tiny-gpt2", trace="none", **ASKED).save(tmp_path / "run")
    with pytest.raises(Lapa2Error, match="linear says which classifier judges accuracy, toxicity"):
        score(run.home, ["linear", "echo"])
