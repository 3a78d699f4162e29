"""`lapa2 circuits` and the notebooks, on the model whose answer is known."""

import json
import runpy
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from conftest import load

from lapa2_interp.circuits import study as module
from lapa2_interp.circuits.study import run_study
from lapa2_interp.cli.app import main
from lapa2_interp.errors import CircuitError, Lapa2Error
from lapa2_interp.methods import load_task
from lapa2_interp.models.planted import answer_key
from lapa2_interp.report.study_page import render_study
from lapa2_interp.tasks.task import Attribute

pytestmark = pytest.mark.usefixtures("shared_models")

ROOT = Path(__file__).parents[2]
PROMPTS = ("The lake", "The book", "The city", "The road", "The horse", "The movie", "The pizza", "The country")  # fmt: skip
SMALL = {"prompts": PROMPTS[:2], "tokens": 2, "best": 1, "report": str}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    study_folder = tmp_path_factory.mktemp("study") / "planted"
    assert (
        main(
            [
                "circuits",
                "planted",
                "--out",
                str(study_folder),
                "--tokens",
                "8",
                "--prompt",
                *PROMPTS,
            ]
        )
        == 0
    )
    return study_folder


def test_the_command_finds_the_planted_circuit(folder):
    key = answer_key("planted")
    heads = json.loads((folder / "heads.json").read_text())
    assert heads == [list(key.heads[role]) for role in ("carrier", "relay")]
    circuit = json.loads((folder / "circuit.json").read_text())
    lost = {edge["to"]: edge["lost"] for edge in circuit["edges"] if edge["from"] == "prefix"}
    names = {role: f"{layer}.{head}" for role, (layer, head) in key.heads.items()}
    assert list(lost)[:2] == [names["carrier"], names["relay"]]
    direct = {edge["from"]: edge["direct"] for edge in circuit["edges"] if edge["to"] == "logits"}
    assert direct[names["carrier"]] > 1 > 1e-3 > abs(direct[names["relay"]])
    assert circuit["tokens"][:3] == ["<s>", "Very", " positive"]
    assert circuit["claims"]
    ids = {node["id"] for node in circuit["nodes"]}
    assert {end for edge in circuit["edges"] for end in (edge["from"], edge["to"])} == ids
    roles = {node["id"]: node["role"] for node in circuit["nodes"] if node["kind"] == "head"}
    assert roles[names["carrier"]] == roles[names["relay"]] == "carries"
    assert roles[names["suppressor"]] == "works against"
    assert names["decoy"] not in roles
    tokens = {node["id"]: node["token"] for node in circuit["nodes"] if node["kind"] == "token"}
    seen = {edge["from"]: edge["lost"] for edge in circuit["edges"]
            if edge["to"] == names["carrier"] and edge["from"] in tokens}  # fmt: skip
    assert tokens[max(seen, key=seen.get)] == " positive"


def test_the_page_answers_in_words(folder, capsys):
    page = (folder / "report.html").read_text("utf-8")
    key = answer_key("planted")
    first, second = (".".join(map(str, key.heads[role])) for role in ("carrier", "relay"))
    assert (
        f"2 heads of 8 carry control (family-wise p &lt; .05), the largest first: {first}, {second}."
        in page
    )
    assert "Not tested:" in page
    assert (
        page.index(f"largest first: {first}") < page.index("<details>") < page.index("Not tested:")
    )
    layer = first.partition(".")[0]
    assert f"Less is lost without layer {layer} (" in page, "than without its carrier alone"
    assert "Gradient, 8 heads: Spearman" in page
    assert "A ranking of heads by their attention on the prefix has rank correlation" in page
    assert "With fewer than 32 prompts weak heads are missed" in page
    assert "of the preference for the attribute&#39;s words is left" in page
    assert "what heads write" not in page.split("Not tested:")[1].split(".")[0]
    assert page.count("data:image/svg+xml;base64,") == 7
    for asked in ("http://", "https://", "<script"):
        assert asked not in page
    for table in ("layer", "kv", "head", "position", "edge", "cut-predicting_only", "together", "writes",
                  "control", "gradient"):  # fmt: skip
        assert (folder / f"{table}.csv").stat().st_size > 100


def test_repeated_nothing_is_knocked_out_again(folder, monkeypatch):
    from lapa2_interp.circuits import knockout

    before = (folder / "head.csv").read_bytes(), (folder / "circuit.json").read_bytes()
    asked = []
    real = knockout.evaluate_edits
    monkeypatch.setattr(
        knockout, "evaluate_edits", lambda *a: (asked.append(len(a[2])), real(*a))[1]
    )
    lines = []
    run_study(load("planted"), "sentiment", folder, prompts=PROMPTS, tokens=8, report=lines.append)
    # The control and two units, which must be those that are kept; a swap is read in both branches.
    assert set(asked) == {3, 5}
    assert (folder / "head.csv").read_bytes() == before[0]
    assert (folder / "circuit.json").read_bytes() == before[1]
    assert lines[0].startswith("8 texts of 8 prompts, positive against negative")


def test_a_task_whose_file_has_changed_needs_another_folder(tmp_path):
    """It is refused before anything is written."""
    task = load_task("sentiment")
    changed = task.model_copy(
        update={"attributes": task.attributes | {"negative": Attribute(prefix="Very bad:")}}
    )
    model, asked = load("planted"), {"prompts": PROMPTS[:2], "tokens": 4, "report": str}

    def stops(line):
        if line.startswith("knocking out each head"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(model, task, tmp_path, **asked | {"report": stops})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CircuitError, match="has results of another layouts: .* choose another fo"):
        run_study(model, changed, tmp_path, **asked)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_model_that_does_not_tell_the_prefixes_apart_has_no_control(tmp_path):
    """The whole study is made, its page and figures too."""
    study = run_study(load("planted"), "topic", tmp_path, **SMALL)
    assert study.summary().endswith("so there is no control that a head could carry.")
    assert "Heads together" in render_study(study)


def test_another_question_needs_another_folder(folder):
    with pytest.raises(
        CircuitError, match="has results of another tokens: 8, not 9; .* choose another folder"
    ):
        run_study(load("planted"), "sentiment", folder, prompts=PROMPTS, tokens=9, report=str)


def test_a_study_of_another_precision_says_so(folder):
    with pytest.raises(
        CircuitError, match="has results of another model dtype: 'float32', not 'float64'"
    ):
        run_study(
            load("planted", "float64"), "sentiment", folder, prompts=PROMPTS, tokens=8, report=str
        )


def test_few_prompts_make_no_claim(tmp_path, capsys):
    key = answer_key("planted")
    names = {role: f"{layer}.{head}" for role, (layer, head) in key.heads.items()}
    arguments = ["circuits", "planted", "--out", str(tmp_path / "few"), "--tokens", "4"]
    assert main([*arguments, "--prompt", "The lake"]) == 0
    printed = capsys.readouterr().out
    assert "these are numbers, and no claim is made" in printed
    assert "nan" not in printed
    named = printed.split("without heads ")[1].split(". ")[0].split(", ")
    assert named[:2] == [names["carrier"], names["relay"]]
    assert names["decoy"] not in named
    assert not (tmp_path / "few" / "heads.json").exists()
    assert not json.loads((tmp_path / "few" / "circuit.json").read_text())["claims"]


def test_a_study_in_bfloat16_goes_to_its_page(tmp_path):
    model = load("planted", "bfloat16")
    study = run_study(model, "sentiment", tmp_path / "half", **SMALL)
    assert study.gradient is None
    assert "the gradient&#39;s order" in render_study(study)


def test_no_head_to_test_again_is_refused(tmp_path):
    with pytest.raises(Lapa2Error, match="best: .* or equal to 1, found 0"):
        run_study(load("planted"), "sentiment", tmp_path / "none", best=0)
    assert not (tmp_path / "none").exists()


def test_prefixes_of_different_lengths_are_refused_in_one_line(tmp_path, capsys):
    assert main(["circuits", "tiny-gpt2", "--task", "detox", "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert "different lengths in tokens" in error
    assert error.count("\n") == 1


def test_without_hooks_all_but_the_writes(tmp_path):
    model = load("planted", model_class="TransformersModel")
    study = run_study(model, "sentiment", tmp_path / "plain", **SMALL)
    assert study.logit_attribution is None
    assert "what heads write, the gradient's order, and texts longer than 2" in study.summary()
    assert "What they write" not in render_study(study)
    assert module.BEST == 24


@pytest.mark.parametrize(
    "name",
    ["control", "who_reads_the_prefix", "what_heads_write", "why_it_fades", "steer_the_heads"],
)
@pytest.mark.long
def test_notebooks_hold_on_the_planted_model(name, capsys, monkeypatch):
    script = str(ROOT / "analyses" / "notebooks" / f"{name}.py")
    monkeypatch.setenv("LAPA2_MODEL", "planted")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(plt, "show", plt.close)
    runpy.run_path(script, run_name="__main__")
    assert capsys.readouterr().out.rstrip().endswith("all checks hold")


@pytest.mark.parametrize("name", ["sentiment", "topic", "planted"])
def test_the_gallery_agrees_with_itself(name):
    folder = ROOT / "figures" / "circuits" / name
    table = pd.read_csv(folder / "head.csv")
    carriers = table[(table["p_max"] < 0.05) & (table["effect"] > 0) & ~table["below_noise"]]
    heads = json.loads((folder / "heads.json").read_text())
    assert heads == carriers[["layer", "head"]].to_numpy().tolist()
    page = (folder / "report.html").read_text("utf-8")
    first = ", ".join(f"{row.layer}.{row.head}" for row in carriers.head(8).itertuples())
    assert f"carry control (family-wise p &lt; .05), the largest first: {first}" in page
    assert json.loads((folder / "contrast_set.json").read_text())["settings"]["tokens"] in (16, 32)
