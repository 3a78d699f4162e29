"""The command line as a user meets it: one-line errors with exit code 2, help that teaches, results
that load back."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import lapa2, load

from lapa2_interp import Layout, generate, load_model, teacher_forced
from lapa2_interp.cli.app import join_dashed_values, main
from lapa2_interp.errors import Lapa2Error, LayoutError, ModelError, TaskError, TraceError
from lapa2_interp.runs.run import finished_cell, load_run

pytestmark = pytest.mark.usefixtures("shared_models")

ROOT = Path(__file__).parents[2]
GENERATE = "generate --model tiny-gpt2 --attribute positive --prompt 'The lake' --length 16"


def test_generate_writes_a_run_that_loads_back(tmp_path, capsys):
    out = tmp_path / "run"
    line = (
        f"{GENERATE} --prompt 'The sea' --method prefix --task sentiment --alpha 0.5 --samples 4"
        " --seed 1 --patterns 0.1"
    )
    assert lapa2(line, "--out", out) == 0
    (cell,), run = load_run(out).by_key.values(), finished_cell(load_run(out))
    assert cell.arm == "alpha 0.5 paper"
    assert [rule.alpha for rule in cell.active_augmentations] == [0.5]
    assert run.texts["prompt"].tolist() == ["The lake"] * 4 + ["The sea"] * 4
    assert cell.patterns == ((0, 1),)
    printed = capsys.readouterr()
    assert run.texts["text"][0] in printed.out
    assert "8 texts, " in printed.err
    assert (
        "branches prefix; plain text starts with <|endoftext|> (built-in models read it); the trace takes"
        in printed.err
    ), "the size is said before"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two samples, which tests only read."""
    folder = tmp_path_factory.mktemp("made") / "run"
    assert lapa2(f"{GENERATE} --samples 2", "--out", folder) == 0
    return folder


def test_generation_from_the_shell_is_reproducible(made, tmp_path):
    assert lapa2(f"{GENERATE} --samples 2 --max-rows 1", "--out", tmp_path / "run") == 0
    one, two = (finished_cell(load_run(folder)).texts for folder in (made, tmp_path / "run"))
    assert one["text"].tolist() == two["text"].tolist()


def test_the_way_of_attention_is_an_option_and_no_part_of_a_key(tmp_path, capsys):
    keys = []
    for attn in ("matrix", "fused"):
        options = f"--model-class TransformersModel --attn {attn}"
        assert lapa2(f"{GENERATE} {options}", "--out", tmp_path / attn) == 0
        run = load_run(tmp_path / attn)
        assert run.manifest().model.attn == attn
        keys.append(list(run.by_key))
    assert keys[0] == keys[1]
    assert lapa2("probe tiny-gpt2 --model-class TransformersModel --attn fused") == 0
    capsys.readouterr()
    assert lapa2(f"{GENERATE} --attn fused", "--out", tmp_path / "hooks") == 2
    assert "give --model-class TransformersModel for --attn fused" in capsys.readouterr().err
    assert not (tmp_path / "hooks").exists()


def test_the_methods_alpha_is_the_default_and_zero_is_the_baseline(made, tmp_path):
    assert load_run(made).manifest().cell.arm == "alpha 0.5 paper"
    for flags, arm in (("--alpha 0", "baseline"), ("--method negprompt", "alpha 1 paper")):
        assert lapa2(f"{GENERATE} --force {flags}", "--out", tmp_path / "run") == 0
        assert load_run(tmp_path / "run").manifest().cell.arm == arm


def test_augmentation_flags_reach_the_manifest(tmp_path):
    flags = "--alpha 2 --augmentation lapa2:profile=released,law=constant,l0=128,span=0:2/4:6"
    flags += ",phase=after_span,layers=0/2,heads=0.1/2.3"
    assert lapa2(f"{GENERATE} {flags}", "--out", tmp_path / "run") == 0
    (augmentation,) = load_run(tmp_path / "run").manifest().cell.active_augmentations
    assert (augmentation.span, augmentation.layers, augmentation.heads) == (
        ((0, 2), (4, 6)),
        (0, 2),
        ((0, 1), (2, 3)),
    )
    assert (augmentation.law, augmentation.l0, augmentation.length_rule, augmentation.phase) == (
        "constant",
        128,
        "kv",
        "after_span",
    )
    flags = (
        "--augmentation lapa2:law=target,tau=.3,floor=true,span=prefix:0/2,steps=2:9,length_rule=kv"
    )
    assert lapa2(f"{GENERATE} {flags}", "--out", tmp_path / "other") == 0
    (augmentation,) = load_run(tmp_path / "other").manifest().cell.active_augmentations
    assert (augmentation.tau, augmentation.floor, augmentation.span) == (
        0.3,
        True,
        ("prefix", (0, 2)),
    )
    assert (augmentation.steps, augmentation.length_rule, augmentation.pooled) == (
        (2, 9),
        "kv",
        False,
    )
    flags = "--augmentation lapa2:law=ratio,tau=0.3,pooled=true"
    assert lapa2(f"{GENERATE} {flags}", "--out", tmp_path / "pooled") == 0
    (augmentation,) = load_run(tmp_path / "pooled").manifest().cell.active_augmentations
    assert (augmentation.law, augmentation.tau, augmentation.pooled) == ("ratio", 0.3, True)


def test_method_parameters_come_from_the_task_and_the_command_line(tmp_path):
    line = f"{GENERATE} --method air-decoding"
    assert lapa2(line, "--out", tmp_path / "a") == 0
    assert lapa2(line, "--set", "omega=20", "--set", "pro_aug=false", "--out", tmp_path / "b") == 0
    a, b = (load_run(tmp_path / name).manifest() for name in "ab")
    assert (a.cell.parameters["omega"], a.cell.parameters["pro_aug"]) == (140, True)
    assert (b.cell.parameters["omega"], b.cell.parameters["pro_aug"]) == (20, False)
    assert a.branches == {
        "base": None,
        "target": "Very positive:",
        "negative": "Very negative:",
    }


def test_texts_that_ran_out_of_tokens_are_written_and_reported(tmp_path, capsys):
    line = f"{GENERATE} --method air-decoding --set omega=1e6 --set numerics=released"
    assert lapa2(line, "--out", tmp_path / "run") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "no token has positive weight for 'The lake' sample 0 at step" in error
    assert "lower omega" in error
    run = finished_cell(load_run(tmp_path / "run"))
    assert run.texts["finish"].tolist() == ["empty"]
    assert load_run(tmp_path / "run").manifest().problems[0] in error


def test_trace_reads_a_run_and_never_writes_over_one(made, tmp_path, capsys):
    run = shutil.copytree(made, tmp_path / "run")
    for force in ((), ("--force",)):
        assert lapa2("trace", run, "--out", run, *force) == 2
        assert "not a folder of this command's making" in capsys.readouterr().err
    finished_cell(load_run(run))
    assert lapa2("trace", run, "--out", tmp_path / "look") == 0
    printed = capsys.readouterr().out
    assert (
        "branch prefix (of prefix): attention on its prefix, on BOS and on the released slice"
        in printed
    )
    assert "4 texts" not in printed
    assert "2 texts of 1 prompt an arm; 95 % interval: none where there is one prompt" in printed
    assert "C/(t+D)" in printed
    assert sorted(path.name for path in (tmp_path / "look").iterdir()) == [
        "fits.csv", "head_maps.png", "heads.csv", "prefix_attention.png", "prefix_tokens.csv",
        "prefix_tokens.png", "steps.csv",
    ]  # fmt: skip
    assert lapa2("trace", tmp_path / "look") == 2
    assert "is not a run: it has no run.json" in capsys.readouterr().err


def test_trace_of_the_raw_model_shows_its_prompt(tmp_path, capsys):
    assert lapa2(f"{GENERATE} --method none --alpha 1 --samples 2", "--out", tmp_path / "run") == 0
    assert lapa2("trace", tmp_path / "run", "--out", tmp_path / "look") == 0
    assert "branch base (of base): attention on its prompt" in capsys.readouterr().out
    assert (tmp_path / "look" / "prompt_attention.png").exists()


def test_trace_of_a_pooled_and_an_untraced_run(tmp_path, capsys):
    assert lapa2(f"{GENERATE} --trace pooled", "--out", tmp_path / "pooled") == 0
    assert lapa2("trace", tmp_path / "pooled") == 0
    assert lapa2(f"{GENERATE} --trace none", "--out", tmp_path / "none") == 0
    capsys.readouterr()
    assert lapa2("trace", tmp_path / "none") == 2
    assert "has no cell with a trace; generate it with --trace full" in capsys.readouterr().err


def test_layout_prints_spans_lengths_and_biases(capsys):
    assert lapa2("layout --prefix 'Very positive:' --prompt 'The lake is' --steps 4") == 0
    printed = capsys.readouterr().out
    assert "l_pre 3, l_pro 3, BOS 1, n 3" in printed
    rows = [line.split() for line in printed.splitlines() if line.strip()]
    assert [row[:4] for row in rows if row[0] == "0"][1] == ["0", "6", "0.3466", "1.414"]
    assert (
        lapa2(
            "layout --prefix 'Very positive:' --prompt 'The lake is' --augmentation released --steps 2"
            " --json"
        )
        == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert [token["boosted"] for token in facts["tokens"]] == [
        True,
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert [token["part"] for token in facts["tokens"]] == ["bos", *["prefix"] * 3, *["prompt"] * 3]
    assert facts["steps"][0] == {"step": 0, "l": 7, "bias": 0.0}
    assert facts["spans"] == {
        "bos": [[0, 1]],
        "released": [[0, 3]],
        "prefix": [[1, 4]],
        "prompt": [[4, 7]],
        "boosted": [[0, 3]],
    }
    assert (
        lapa2(
            "layout --prefix 'Very positive:' --prompt 'The lake is' --steps 2 --json"
            " --augmentation lapa2:phase=after_span"
        )
        == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert [(step["step"], step["l"]) for step in facts["steps"]] == [
        (-2, 4),
        (-1, 5),
        (0, 6),
        (1, 7),
    ]
    assert lapa2("layout --soft 2 --prompt 'The lake' --json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert [token["part"] for token in facts["tokens"]] == [
        "prefix",
        "prefix",
        "bos",
        "prompt",
        "prompt",
    ]
    assert facts["steps"][0]["l"] == 4
    assert lapa2("layout --prefix Ver --prompt 'y good'") == 0
    assert "the token 'Very' spans the boundary of prefix and prompt" in capsys.readouterr().out


def test_probe_and_lists(capsys):
    assert lapa2("probe tiny-llama") == 0
    printed = capsys.readouterr().out
    assert "live in all 4 layers" in printed
    assert "largest logit difference" in printed
    assert lapa2("models --json") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)][:2] == [
        "smollm2-135m",
        "tiny-gpt2",
    ]
    for command in ("models", "methods", "tasks"):
        assert lapa2(command) == 0
    printed = capsys.readouterr().out
    assert lapa2("methods rose gedi") == 0
    some = capsys.readouterr().out
    assert [line for line in some.splitlines() if line and not line.startswith(" ")] == [
        "rose: ROSE",
        "gedi: GeDi",
    ]
    for expected in (
        "Very nontoxic:",
        "omega=60.0",
        "log w = log P_base + lam (log P_prefix - log P_base)",
        "not augmented",
        "--set omega: Control strength",
        "[attributes.calm]",
        "alpha       0.5 (ours; --alpha overrides)",
        "--set boost: The number that form",
        "the package has no words for task 'detox'",
    ):
        assert expected in printed
    assert not re.search(r"--set \w+: .*(\bstep \d|The same\b)", printed), "texts stand alone"


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        ("generate|--prompt|-5 degrees|--length|5", "generate|--prompt=-5 degrees|--length|5"),
        ("generate|--prompts|a|-5 b|c|- d", "generate|--prompts|a|--prompts=-5 b|c|--prompts=- d"),
        ("generate|--prefix|--- a|--label|-1", "generate|--prefix=--- a|--label=-1"),
        ("chat|a.json|--span|- a|--later|- b|c", "chat|a.json|--span=- a|--later=- b|c"),
        ("prefix|train|--out|-- a", "prefix|train|--out=-- a"),
        ("generate|--prompt=- a=b|--alpha|-1", "generate|--prompt=- a=b|--alpha=-1"),
        ("generate|--force|- a|--length|5|- b", "generate|--force|- a|--length|5|- b"),
        ("generate|--prompt|a|--|- b", "generate|--prompt|a|--|- b"),
    ],
)
def test_a_value_may_begin_with_a_dash(words, joined):
    assert join_dashed_values(words.split("|")) == joined.split("|")


def test_a_text_with_a_dash_is_read_as_it_is(capsys):
    asked = ["--prefix", "- a:", "--prompt", "-5 b"]
    assert main(["layout", "--model", "tiny-gpt2", *asked, "--json"]) == 0
    tokens = [token["token"] for token in json.loads(capsys.readouterr().out)["tokens"]]
    assert "".join(tokens[1:]).replace(" ", "") == "-a:-5b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate --attribute positive", "requires an argument.*--out|--out"),
        (GENERATE.replace("tiny-gpt2", "nope") + " --out OUT", "cannot load model 'nope'"),
        ("generate --prefix -very --out OUT", "requires an argument.*--OPTION=VALUE"),
        ("generate --prompts a -length 5 --out OUT", "unknown setting 'length'.*--OPTION=VALUE"),
        ("generate --prompt --nope --out OUT", "unknown setting .nope.*--OPTION=VALUE"),
        (f"chat --template {'[' * 100_000}", "should be a JSON object .*nested too deeply"),
        (
            f"""chat --template '{{"a":{"9" * 5000}}}'""",
            "should be a JSON object .*thousands of digits",
        ),
        ("""chat --template '{"a":1,"a":2}'""", "has the field 'a' twice"),
        (f"{GENERATE} --method nope --out OUT", "unknown method 'nope'"),
        ("methods ros", "unknown method 'ros'; allowed: .*did you mean 'rose'"),
        (
            f"{GENERATE} --max-rows 0 --out OUT",
            "max_rows: input should be greater than or equal to 1, found 0",
        ),
        (
            f"{GENERATE} --method datg --top-k 0 --out OUT",
            "top_k: input should be greater than or equal to 1, found 0",
        ),
        (f"{GENERATE} --task nope --out OUT", "unknown task 'nope'"),
        (GENERATE.replace("positive", "nope") + " --out OUT", "unknown attribute 'nope'"),
        (f"{GENERATE} --alpha -1 --out OUT", "alpha of law 'log' should be .*, found -1"),
        (f"{GENERATE} --alpha nan --out OUT", "alpha: input should be a finite number, found nan"),
        (f"{GENERATE} --augmentation lapa2:law=constant --out OUT", "needs l0"),
        (f"{GENERATE} --augmentation lapa2:layers=9 --out OUT", "layer 9 does not exist"),
        (
            f"{GENERATE} --alpha half --out OUT",
            "alpha: input should be a valid number, found 'half'",
        ),
        ("layout --prompt x --steps 2.5", "steps: input should be a valid integer, found 2.5"),
        (
            "select planted --heads 2.5 --out OUT",
            "heads: input should be a valid integer, found 2.5",
        ),
        (
            f"{GENERATE} --augmentation lapa2:layers=3-1 --out OUT",
            "layers: takes 'all', .* found '3-1'",
        ),
        (
            f"{GENERATE} --augmentation lapa2:layers=middle --out OUT",
            "layers: takes 'all', .* found 'middle'",
        ),
        (
            f"{GENERATE} --augmentation lapa2:layers=1/x --out OUT",
            "layers: takes 'all', .* found '1/x'",
        ),
        (f"{GENERATE} --augmentation lapa2:heads=1.9 --out OUT", "does not exist"),
        (
            f"{GENERATE} --augmentation lapa2:heads=1-2 --out OUT",
            "heads: takes 'all', .* found '1-2'",
        ),
        (f"{GENERATE} --augmentation lapa2:span=3:99 --out OUT", "lies outside the sequence"),
        (f"{GENERATE} --augmentation lapa2:span=3:1 --out OUT", "is empty or negative"),
        (f"{GENERATE} --patterns 0.9 --out OUT", "does not exist"),
        (f"{GENERATE} --patterns all --out OUT", "patterns: takes pairs .* found 'all'"),
        (f"{GENERATE} --patterns 0.1 --trace none --out OUT", "patterns are part of a trace"),
        (f"{GENERATE} --model-class HookedTransformerr --out OUT/deep/er", "HookedTransformerr"),
        (
            "select planted --score mass --tokens 4 --out /proc/nowhere/card.json",
            "/proc/nowhere: .*; mend it and repeat",
        ),
        (
            "layout --prompt 'The lake' --steps 0",
            "--steps: input should be greater than or equal to 1, found 0",
        ),
        (
            "layout --prompt 'The lake' --steps 999999999999",
            "--steps: input should be less than or equal to 1000000, found 999999999999",
        ),
        (GENERATE.replace("16", "9999") + " --out OUT", "context of 256"),
        (
            f"{GENERATE} --prompts nowhere.txt --out OUT",
            "cannot read prompts from nowhere.txt: No such file or directory; give a file that ends",
        ),
        (f"{GENERATE} --dtype float23 --out OUT", "float23"),
        (f"{GENERATE} --model-class HookedTransformerr --out OUT", "HookedTransformerr"),
        (f"{GENERATE} --nonsense 3 --out OUT", "nonsense"),
        (f"{GENERATE} --set omega=3 --out OUT", "method 'prefix': .*omega"),
        (f"{GENERATE} --augmentation lapa2:layers=0,heads=3.1 --out OUT", "have nothing in common"),
        (f"{GENERATE} --set omega --out OUT", "not of the form NAME=VALUE"),
        (
            f"{GENERATE} --method preadd --task topic --out OUT",
            "unknown attribute 'positive'; allowed: world",
        ),
        (f"{GENERATE} --out /proc/nowhere/run", "cannot write"),
        (
            f"{GENERATE} --method freectrl --out OUT",
            "none of 400 words for 'positive' is one token",
        ),
        (
            f"{GENERATE} --method freectrl --set words=no.json --out OUT",
            "cannot read no.json; `lapa2 word-lists",
        ),
        (
            f"{GENERATE} --method datg --alpha 0.5 --out OUT",
            "datg has no prefix for an augmentation to act on",
        ),
        (
            f"{GENERATE} --method datg --set scorer=nope --out OUT",
            "unknown scorer 'nope'; allowed: accuracy",
        ),
        (
            f"{GENERATE} --method arithmetic --set formula=base* --out OUT",
            "formula 'base\\*': invalid syntax",
        ),
        ("layout --prompt 'The lake' --prefix ''", "prefix '' tokenises to nothing"),
        ("layout --prompt '' --prefix 'x'", "prompt '' tokenises to nothing"),
        ("layout --prompt 'The lake' --doubled-bos", "doubled_bos"),
        ("trace OUT", "there is no folder .* `lapa2 generate` and"),
        ("nonsense", "nonsense"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, line, message):
    import re

    assert lapa2(line.replace("OUT", str(tmp_path / "out"))) == 2
    printed = capsys.readouterr()
    errors = [x for x in printed.err.splitlines() if x.startswith("lapa2:")]
    assert len(errors) == 1
    assert printed.err.splitlines()[-1] == errors[0]
    assert re.search(message, errors[0]), errors[0]
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_finished_run_needs_force(made, tmp_path, capsys):
    run = shutil.copytree(made, tmp_path / "run")
    assert lapa2(GENERATE, "--out", run) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert load_run(run).manifest() == load_run(made).manifest()
    assert lapa2(GENERATE, "--out", run, "--force") == 0


@pytest.mark.parametrize(
    "command",
    [
        "",
        *[
            "models",
            "layout",
            "chat",
            "probe",
            "generate",
            "trace",
            "methods",
            "tasks",
            "grids",
            "sweep",
            "runs",
            "report",
        ],
    ],
)
def test_help_teaches(command, capsys):
    assert lapa2(f"{command} --help") == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Usage: lapa2" in printed
    if command in ("layout", "chat"):
        assert "--set" not in printed, "they have no such option"
    if command == "generate":
        for expected in (
            "[default: smollm2-135m]",
            "--alpha",
            "[choices: keep, stop, block] [default: keep]",
            "--alpha 0.5 --samples 4 --out run",
        ):
            assert expected in printed


def test_examples_in_help_can_be_pasted_from_80_columns():
    """A code block has a margin of one column, and longer lines would be broken."""
    examples = [
        line[8:].replace("\\\\", "\\")
        for file in (ROOT / "lapa2_interp").rglob("*.py")
        for example in re.findall(r"^ {8}lapa2 (?:.*\\\\\n)*.*$", file.read_text("utf-8"), re.M)
        for line in example.splitlines()
    ]
    assert len(examples) > 30
    assert not [line for line in examples if len(line) > 78]


def test_help_and_import_are_quick_and_load_no_torch():
    code = (
        "import sys; from lapa2_interp.cli.app import main; main(['--help'])\n"
        "print({'torch', 'transformers', 'numpy', 'pydantic'}"
        " & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("words", ["prefix recipes", "--help"])
def test_a_reader_that_has_seen_enough_is_no_error(words):
    """Nothing is said; the exit code is that of any program that SIGPIPE ends: the command may not
    have done all of its work."""
    program = (
        f"{shlex.quote(sys.executable)} -c 'from lapa2_interp.cli.app import main; raise"
        f" SystemExit(main())' {words}"
    )
    command = (  # the reader is gone before the first line
        f"{{ sleep 0.2; {program}; }} | true; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_interrupt_says_so_and_writes_nothing(tmp_path, monkeypatch, capsys):
    from lapa2_interp.runs import generate as runner

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "make_batch", interrupted)
    assert lapa2(GENERATE, "--out", tmp_path / "run") == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "resumes"),
    [
        ("sweep quick/alpha --out run", True),
        ("generate --out run", False),
        ("select planted --out my--file", False),
        ("scorers train --task topic --out adapter", False),
        ("prefix train --task topic --out a", True),
        ("prefix import train", False),
        ("select planted --out card.json", False),
        ("select planted --file cuts --out card.json", True),
        ("fading planted --file=texts --out fading", True),
        ("scorers train --task topic --out scorers", False),
        ("", False),
    ],
)
def test_a_stopped_command_says_whether_it_resumes(line, resumes, monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("lapa2_interp.cli.app.app", stopped)
    assert lapa2(line) == 130
    advice = "resume" if resumes else "start over; no partial output is left"
    assert (
        capsys.readouterr().err == f"lapa2: interrupted; run the same command again to {advice}\n"
    )


def test_closed_streams_are_no_error(tmp_path):
    """As `lapa2 prefix recipes >&-` has it."""
    for words in (">&-", "2>&-", ">&- 2>&-"):
        command = f"{Path(sys.executable).parent / 'lapa2'} prefix recipes {words}"
        assert subprocess.run(command, shell=True, capture_output=True).returncode == 0, words


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fading planted --file {out}/kept --out {out}", "would be in the new folder"),
        ("select planted --file {out} --out {out}", "--file and --out are both"),
        ("sweep {grid} --out {out}", "not UTF-8"),
        ("runs {out}", "not UTF-8"),
    ],
)
def test_places_that_would_fail_later_are_refused_at_once(line, message, tmp_path, capsys):
    grid = tmp_path / "g.toml"
    grid.write_text(
        'model = "tiny-gpt2"\ntask = "sentiment"\nmethod = "prefix"\nlength = 90\nsamples = 1\nattribute = "positive"\n'
    )
    out = tmp_path / ("b\udce9" if "UTF" in message else "out")
    assert main(line.format(out=out, grid=grid).split()) == 2
    assert message in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["g.toml"]


def test_values_of_a_wrong_type_are_named_errors(without_types):
    model = load("tiny-gpt2")
    settings = {"attribute": "positive", "prompts": ["a"], "length": 40, "samples": 1}
    layout = Layout.of(model.tokenizer, "Very", "lake")
    for error, call in (
        (Lapa2Error, lambda: generate(model, **settings | {"samples": 1.5})),
        (Lapa2Error, lambda: generate(model, **settings | {"prompts": [None]})),
        (Lapa2Error, lambda: generate(model, **settings | {"attribute": 5})),
        (TaskError, lambda: generate(model, **settings | {"task": {}})),
        (ModelError, lambda: load_model(None)),
        (LayoutError, lambda: Layout.of(model.tokenizer, "Very", 5)),
        (LayoutError, lambda: Layout.of(model.tokenizer, 5, "lake")),
        (TraceError, lambda: teacher_forced(model, layout, [1, 2])),
        (TraceError, lambda: teacher_forced(model, layout, ["was"])),
        (TraceError, lambda: teacher_forced(model, layout, [[5.7]])),
    ):
        with pytest.raises(Lapa2Error) as caught:
            call()
        assert caught.type is error


def test_memory_that_runs_out_is_one_line(monkeypatch, capsys):
    def full(*_, **__):
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr("lapa2_interp.cli.app.app", full)
    assert main(["tasks"]) == 2
    assert capsys.readouterr().err.startswith("lapa2: too little memory (Unable to allocate 9 GiB)")


def test_grids_that_are_nested_too_deeply_are_one_line(tmp_path, capsys):
    (tmp_path / "g.toml").write_text("a = " + "[" * 100_000)
    assert main(["grids", str(tmp_path / "g.toml")]) == 2
    assert capsys.readouterr().err.startswith("lapa2: grid")


@pytest.mark.parametrize("command", ["report", "view"])
def test_a_page_replaces_no_file_of_a_run(command, made, tmp_path, capsys):
    run = shutil.copytree(made, tmp_path / "run")
    before = (run / "run.json").read_bytes()
    assert main([command, str(run), "--out", str(run / "run.json")]) == 2
    assert "ends in .html; found" in capsys.readouterr().err
    assert (run / "run.json").read_bytes() == before


def test_completion_is_installed_into_the_users_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert lapa2("--install-completion --shell bash") == 0
    script = tmp_path / ".local" / "share" / "bash-completion" / "completions" / "lapa2"
    assert "generate" in script.read_text("utf-8")
    assert str(script) in (tmp_path / ".bashrc").read_text("utf-8")
    assert str(script) in capsys.readouterr().out
    assert lapa2("--install-completion --shell tcsh") == 2
    assert 'Choose from: "zsh", "bash", "fish"' in capsys.readouterr().err


@pytest.mark.long
def test_a_locale_of_ascii_reads_and_prints_utf8(tmp_path):
    prompt = "Der M\u00fcller \u6e56"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["layout", "--model", "tiny-gpt2", "--prefix", "Tr\u00e8s:", "--prompt", prompt]
    script = "import sys; from lapa2_interp.cli.app import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, *(word.encode() for word in words)],
        env=environment | ascii_alone, cwd=tmp_path, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert "\u6e56".encode() in done.stdout


@pytest.mark.parametrize("command", ["layout", "generate", "chat", "score"])
def test_an_argument_that_is_no_text_is_one_line(command, capsys):
    assert main([command, "--prompt", "a\udcff"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lapa2: argument 3, 'a\\udcff', is not UTF-8; give texts")
