"""Errors name what the caller can write: parameters in Python, options on the command line."""

import numpy as np
import pandas as pd
import pytest

from lapa2_interp import generate, load_run
from lapa2_interp.cli.app import main
from lapa2_interp.errors import (
    Lapa2Error,
    RunError,
    on_command_line,
    parameter,
)
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.runs.score import score
from lapa2_interp.runs.sweep import sweep

ASKED = {"attribute": "positive", "prompts": ["The lake"], "dtype": "float32", "length": 12}


@pytest.mark.parametrize(
    ("words", "in_python", "at_the_command_line"),
    [
        (("max_rows", "N"), "max_rows=N", "--max-rows N"),
        (("trust_remote_code", True), "trust_remote_code=True", "--trust-remote-code"),
        (("dtype", "float32"), "dtype='float32'", "--dtype float32"),
        (("out",), "out", "--out"),
        (("drafts", 60, "set"), "drafts=60", "--set drafts=60"),
        (("scorer", "...", "set"), "scorer=...", "--set scorer=..."),
        (("pro_aug", "false", "set"), "pro_aug=false", "--set pro_aug=false"),
        (("gpus_per_worker", 0), "gpus_per_worker=0", "--gpus-per-worker 0"),
        (("judge_prices", "IN OUT"), "judge_prices=IN, OUT", "--judge-prices IN OUT"),
    ],
)
def test_a_parameter_is_an_option_at_the_command_line(words, in_python, at_the_command_line):
    assert parameter(*words) == in_python
    with on_command_line():
        assert parameter(*words) == at_the_command_line
    assert parameter(*words) == in_python


def test_both_surfaces_have_their_words(tmp_path, capsys):
    run = generate("tiny-gpt2", trace="pooled", **ASKED)
    run.save(tmp_path / "run")
    with pytest.raises(
        RunError, match="is finished; force=True replaces it, or choose another out"
    ):
        run.save(tmp_path / "run")
    with pytest.raises(Lapa2Error, match="^column words belongs to a file"):
        score(tmp_path / "run", ["echo"], column="words")
    assert load_run(run.save(tmp_path / "run", force=True).folder).texts()["text"].size == 1
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
    sweep(str(grid), tmp_path / "run", workers=1, device="cpu")
    scored = score(str(tmp_path / "run"), "distinct", out=str(tmp_path / "scores"))
    assert set(scored.table["metric"]) == {"distinct-1", "distinct-2", "distinct-3"}
    asked = {"task": tmp_path / "mood.toml", "attribute": "calm", "dtype": "float32", "length": 20}
    for prompts in (pd.Series(["The lake", "The sea"]), np.array(["The lake", "The sea"])):
        assert cell_of("tiny-gpt2", prompts=prompts, **asked).prompts == ("The lake", "The sea")
    assert cell_of("tiny-gpt2", **asked).prompts == ("The hill",)
    assert cell_of("tiny-gpt2", prompts="The lake", **asked).prompts == ("The lake",)
