"""The page of a run: everything that is there, from one file that loads nothing and lets no text
act."""

import json
import re
import shutil
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from browsers import CUT, browser_page
from conftest import change_texts
from pages import GRID, HOSTILE, Parts, fill_small_run

from lapa2_interp.attention.tables import branch_name, pooled
from lapa2_interp.bias.tokens import token_texts
from lapa2_interp.cli.app import main
from lapa2_interp.cli.view import report
from lapa2_interp.errors import RunError
from lapa2_interp.models.load import load_tokenizer
from lapa2_interp.report import run_page
from lapa2_interp.report.intervals import interval_svg, shared_scale
from lapa2_interp.report.run_page import run_report, views_beside
from lapa2_interp.report.run_texts import MASS_SCALE
from lapa2_interp.runs import store
from lapa2_interp.runs.engines import InProcess
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.run import finished_cell, is_finished_run, load_run
from lapa2_interp.runs.store import Failure, remove_batches


def page(folder):
    return run_report(load_run(folder), views_beside(folder / "report.html"))


@pytest.fixture(scope="module", autouse=True)
def drawn():
    """Traces that were read and figures that were drawn: most pages are of copies of one run. A
    figure is of finished cells."""
    traces, figures, read, draw = {}, {}, store.read_trace, run_page._attention_figures

    def read_trace(folder, number, cell):
        key = folder.name, number
        return traces[key] if key in traces else traces.setdefault(key, read(folder, number, cell))

    def attention_figures(run, cells):
        key = frozenset(key for key, cell in run.finished.items() if cell.trace != "none")
        return figures[key] if key in figures else figures.setdefault(key, draw(run, cells))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "read_trace", read_trace)
        patched.setattr(run_page, "_attention_figures", attention_figures)
        yield figures


@pytest.fixture(scope="module")
def browser():
    with browser_page() as opened:
        yield opened


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, nothing changed in it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    fill_small_run(folder)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture(scope="module")
def html(finished):
    return page(finished)


def test_the_same_folders_give_the_same_page(html, run, drawn):
    drawn.clear()
    assert page(run) == html


def test_pages_of_the_viewer_beside_the_report_are_linked(run):
    """Names cannot act: they are text, and addresses of files in the same folder."""
    file = run / "report.html"
    report(run)
    parts = Parts(file.read_text("utf-8"))
    assert "lapa2 view RUN makes such a page beside this one" in parts.text
    assert not [
        attributes for tag, attributes in parts.elements if ".html" in attributes.get("href", "")
    ]
    hostile = 'view"><img src=x onerror=alert(1)> javascript:alert(2)#?.html'
    names = ["view.html", "view-topic.html", hostile]
    for name in names:
        (run / name).touch()
    report(run)
    parts = Parts(file.read_text("utf-8"))
    links = [
        attributes["href"]
        for tag, attributes in parts.elements
        if ".html" in attributes.get("href", "")
    ]
    assert {unquote(link) for link in links} == {f"./{name}" for name in names}
    assert all(re.fullmatch(r"\./[\w%.:()=/-]+", link) for link in links)
    assert all(name in parts.text for name in names)
    assert not [
        attributes for tag, attributes in parts.elements if tag == "img" and "onerror" in attributes
    ]


def test_the_run_is_told(html, finished):
    text = Parts(html).text
    record = json.loads(next(finished.glob("cells/*/000.json")).read_text())
    for fact in (
        record["model"]["weights"],
        record["lapa2_interp"],
        record["versions"]["torch"],
        record["commit"] or "outside",
    ):
        assert fact in text
    assert "5 of 5 cells are finished: 20 texts" in " ".join(text.split())
    assert all(key in text for key in load_run(finished).by_key)
    name = f"{finished.name}: tiny-gpt2, sentiment, "
    assert f"<title>{name}" in html
    assert f"<h1>{name}" in html


def test_colours_are_the_trace_and_tokens_are_the_text(html, finished):
    run, data = load_run(finished), Parts(html).data
    seen = 0
    for group in data["groups"]:
        for arm in group["arms"]:
            cell = finished_cell(run, arm["cell"])
            branch = list(cell.trace["branch"].values).index(branch_name(cell.trace))
            assert arm["branch"] == branch_name(cell.trace)
            for prompt, text in zip(group["prompts"], arm["texts"], strict=True):
                row = cell.texts[
                    (cell.texts["prompt"] == prompt) & (cell.texts["sample"] == 0)
                ].iloc[0]
                n = row["n_tokens"]
                assert len(text["t"]) == n
                assert "".join(text["t"]) == row["continuation"]
                for short, name in (("p", "prefix"), ("b", "bos")):
                    mass = pooled(cell.trace, name)[branch, row.name, :n]
                    if short == "p" and group["method"] == "none":
                        assert text["p"] is None
                    else:
                        # float32 masses, rounded to the unit
                        np.testing.assert_allclose(
                            np.array(text[short]) * MASS_SCALE, mass, atol=0.5 * MASS_SCALE + 1e-7
                        )
                seen += 1
    assert seen == 5 * 2
    assert [arm["arm"] for arm in data["groups"][0]["arms"]] == ["baseline", "alpha 0.5 paper"]
    assert "Very positive" in data["groups"][0]["arms"][0]["prefix"]


def test_it_loads_nothing(html):
    for tag, attrs in Parts(html).elements:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        for name in ("src", "href", "srcset", "data", "action"):
            assert re.match(r"#|data:image/png;base64,", attrs.get(name) or "#"), (tag, attrs)
    styles = Parts(html).scripts["style"]
    assert "url(" not in styles
    assert "@import" not in styles
    assert "default-src 'none'" in html


def test_what_a_model_wrote_does_not_act(run):
    tokens = np.array(load_tokenizer("tiny-gpt2")(HOSTILE)["input_ids"])

    def hostile(texts):
        texts["tokens"] = [tokens[: int(n)] for n in texts["n_tokens"]]
        return texts

    change_texts(run, hostile)
    html = page(run)
    parts = Parts(html)
    scripts = [attrs for tag, attrs in parts.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert [attrs for tag, attrs in parts.elements if "onerror" in attrs] == []
    images = [attrs["src"][:15] for tag, attrs in parts.elements if tag == "img"]
    assert set(images) == {"data:image/png;"}
    text = parts.data["groups"][0]["arms"][0]["texts"][0]
    assert HOSTILE.startswith("".join(text["t"]))
    assert "innerHTML" not in html


def test_missing_cells_are_listed_with_the_reason(run):
    failed, missing = list(load_run(run).by_key)[1:3]
    for key in (failed, missing):
        remove_batches(run / "cells" / key)
    record = Failure(
        when="2026-01-02T03:04:05Z", traceback="Traceback ...\nZeroDivisionError: <by> zero"
    )
    (run / "cells" / failed / "failed.json").write_text(record.model_dump_json())
    parts = Parts(page(run))
    text = " ".join(parts.text.split())
    assert "3 of 5 cells are finished, 1 failed, 1 missing: 12 texts" in text
    assert "ZeroDivisionError: <by> zero" in text
    assert text.index("ZeroDivisionError") < text.index(missing)
    arms = {
        (group["method"], arm["arm"]) for group in parts.data["groups"] for arm in group["arms"]
    }
    assert len(arms) == 3


def test_a_run_with_nothing_finished_has_a_page(run):
    for cell in (run / "cells").iterdir():
        remove_batches(cell)
    parts = Parts(page(run))
    assert "0 of 5 cells are finished, 5 missing" in " ".join(parts.text.split())
    assert parts.data["groups"] == []


def test_only_arms_of_one_size_are_side_by_side(run, tmp_path):
    file = tmp_path / "shorter.toml"
    head = GRID.partition("[[")[0].format(trace="none")
    file.write_text(head.replace("length = 30", "length = 25") + "method = 'none'\n")
    fill_run(run, [load_grid(str(file))], InProcess("cpu"))
    raw = [group for group in Parts(page(run)).data["groups"] if group["method"] == "none"]
    assert [(group["size"], len(group["arms"])) for group in raw] == [
        ("2 x 30 tokens", 1),
        ("2 x 25 tokens", 1),
    ]


def test_characters_of_several_tokens_stay_whole(gpt2_tokenizer):
    text = " né 中文字 😀👩‍👧\n\n\tend"
    tokens = gpt2_tokenizer(text)["input_ids"]
    texts = token_texts(gpt2_tokenizer, "The lake", tokens)
    assert "".join(texts) == text
    assert len(texts) == len(tokens) > len([piece for piece in texts if piece])
    assert not any("\ufffd" in piece for piece in texts)
    cut = token_texts(gpt2_tokenizer, "The lake", gpt2_tokenizer(" 😀")["input_ids"][:-1])
    assert "".join(cut) == " \ufffd"


def test_one_far_row_leaves_the_others_their_drawing(tmp_path):
    far = {"here": 400.0, "low": 300.0, "high": 500.0, "paper": float("nan")}
    rows = [{"here": 2.0 + i, "low": 1.0 + i, "high": 3.0 + i, "paper": 4.0} for i in range(5)]
    least, most = shared_scale(pd.DataFrame([*rows, far]).assign(zero=0.0))
    assert (least, most) == (0.0, 4 * 5.5), "four times the median of 4, 4, 5, 6, 7 and 500"
    nothing = dict.fromkeys(far, float("nan"))
    same = dict.fromkeys(far, 0.0)
    gaps = pd.DataFrame([*rows, far, *[nothing] * 9, *[same] * 9]).assign(zero=0.0)
    assert shared_scale(gaps) == (
        least,
        most,
    ), "claims without cells or without a difference leave the others their drawing"
    assert shared_scale(pd.DataFrame([nothing]).assign(zero=0.0)) == (0.0, 0.0)
    near, beyond = (str(interval_svg(row, least, most, "inconclusive")) for row in (rows[0], far))
    assert 'class="here" d="M19.5 9m' in near, "6 + 148 * 2 / 22"
    assert 'class="paper" d="M32.9 3l' in near
    assert 'class="here" d="M159.0 9l-9 -5v10z"' in beyond
    assert 'class="paper"' not in beyond
    below = str(interval_svg({**far, "here": -400.0, "paper": -90.0}, -20.0, 20.0, "inconclusive"))
    assert 'class="here" d="M1.0 9l9 -5v10z"' in below
    assert 'class="paper" d="M1.0 9l9 -5v10z"' in below


def test_the_command_writes_the_page(run, tmp_path, capsys):
    report(run)
    assert (run / "report.html").read_text("utf-8") == page(run)
    assert "report.html" in capsys.readouterr().out
    report(run, out=tmp_path / "new/page.html")
    assert Parts((tmp_path / "new/page.html").read_text("utf-8")).data["groups"]
    with pytest.raises(RunError, match="is a folder"):
        report(run, out=tmp_path)


# --- scores of a custom run


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A run of a custom grid, two arms and the baseline, with scores that need nothing."""
    folder = tmp_path_factory.mktemp("scored")
    (folder / "mine.toml").write_text(
        GRID.format(trace="pooled").partition("[[block]]")[0]
        + 'method = "prefix"\naugmentation = ["none", "instaboost:M=5",'
        ' { alpha = 1.0, label = "strong" }]'
    )
    fill_run(folder / "run", [load_grid(str(folder / "mine.toml"))], InProcess("cpu"))
    asked = ["--scorers", "accuracy", "linear", "echo", "distinct"]
    assert main(["score", str(folder / "run"), *asked]) == 0
    return folder / "run"


def test_scores_that_lie_in_a_run_are_on_its_page(scored):
    assert is_finished_run(scored), "`scores` is a part of a run, as its page is"
    parts = Parts(page(scored))
    ids = [attributes["id"] for tag, attributes in parts.elements if tag == "h2"]
    assert ids == ["texts", "attention", "scores", "cells", "run"]
    assert "No scores yet" not in parts.text
    table = pd.read_csv(scored / "scores/table.csv", keep_default_na=False)
    for row in table[table["metric"] == "accuracy"].to_dict("records"):
        assert f"{float(row['mean']):.3g}" in parts.text
    for arm in ("baseline", "instaboost:M=5", "strong"):
        assert arm in parts.text
    changes = pd.read_csv(scored / "scores/differences.csv")
    figures = [tag for tag, _ in parts.elements if tag == "figure"]
    pictures = [attrs["alt"] for tag, attrs in parts.elements if tag == "img"]
    assert pictures == ["sentiment, prefix: attention on the prefix, against step"]
    assert len(figures) - len(pictures) == changes["metric"].nunique()
    drawings = [attributes for tag, attributes in parts.elements if tag == "svg"]
    assert len(drawings) == len(changes[changes["low"] < changes["high"]])


def test_scores_are_also_markdown_and_latex(scored):
    markdown = (scored / "scores/table.md").read_text()
    latex = (scored / "scores/table.tex").read_text()
    for text in (markdown, latex):
        for word in ("instaboost:M=5", "strong", "accuracy change", "echo change"):
            assert word in text
    assert "distinct-1" in markdown
    assert latex.count(r"\\") == 1 + 3  # a head, and a row an arm


def test_scores_of_other_arms_and_damaged_scores_are_named(scored, tmp_path):
    run = shutil.copytree(scored, tmp_path / "run")
    (run / "scores").rename(run / "fast")
    table = pd.read_csv(run / "fast/table.csv", keep_default_na=False)
    table[table["arm"] != "strong"].to_csv(run / "fast/table.csv", index=False)
    assert "not among these scores: strong" in Parts(page(run)).text
    (run / "fast/table.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RunError, match="fast has no tables of `lapa2 score`"):
        page(run)


def test_scores_without_a_comparison_have_no_figure(scored, tmp_path):
    run = shutil.copytree(scored, tmp_path / "run")
    shutil.rmtree(run / "scores")
    assert main(["score", str(run), "--scorers", "distinct"]) == 0
    parts = Parts(page(run))
    assert "distinct-1" in parts.text
    assert [tag for tag, _ in parts.elements if tag in ("figure", "img")] == ["figure", "img"]
    assert main(["score", str(run), "--scorers", "echo", "--only", "arm=strong", "--force"]) == 0
    assert "not among these scores: baseline, instaboost:M=5" in Parts(page(run)).text


def test_a_hostile_label_is_text_and_without_traces_no_token_is_coloured(tmp_path):
    hostile = "<script>alert(1)</script> | 50% & _x_"
    (tmp_path / "mine.toml").write_text(
        GRID.format(trace="none").partition("[[block]]")[0]
        + f'method = "prefix"\naugmentation = ["none", {{ alpha = 1.0, label = "{hostile}" }}]'
    )
    run = tmp_path / "run"
    fill_run(run, [load_grid(str(tmp_path / "mine.toml"))], InProcess("cpu"))
    parts = Parts(page(run))
    assert "tokens are not coloured" in parts.text
    assert "No scores yet: lapa2 score RUN makes them" in parts.text
    ids = [attributes["id"] for tag, attributes in parts.elements if tag == "h2"]
    assert ids == ["texts", "cells", "run"]  # nothing empty; provenance last
    arms = [arm for group in parts.data["groups"] for arm in group["arms"]]
    assert [len(arm["texts"]) for arm in arms] == [2, 2]
    assert all(
        text["p"] is None and text["b"] is None and text["t"]
        for arm in arms
        for text in arm["texts"]
    )
    assert main(["score", str(run), "--scorers", "echo"]) == 0
    parts = Parts(page(run))
    assert hostile in parts.text
    assert len([tag for tag, _ in parts.elements if tag == "script"]) == 2
    assert "</script> \\| 50% & _x_ |" in (run / "scores/table.md").read_text()
    assert r"50\% \& \_x\_ &" in (run / "scores/table.tex").read_text()


def test_scores_fit_a_narrow_page(browser, scored):
    (scored / "report.html").write_text(page(scored), encoding="utf-8")
    for width in (1280, 400):
        browser.goto((scored / "report.html").as_uri(), width=width)
        assert not browser.errors
        assert browser.ask("document.documentElement.scrollWidth") <= width
        assert browser.ask(CUT) == []
        assert browser.ask("document.querySelectorAll('.differences').length") == 2
