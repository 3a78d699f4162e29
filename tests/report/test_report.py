"""The page of a run: everything that is there, from one file that loads nothing and lets no text
act."""

import json
import re
import shutil
from html.parser import HTMLParser
from urllib.parse import quote, unquote

import numpy as np
import pandas as pd
import pytest
from browsers import browser_page
from conftest import change_texts

from lapa2_interp.attention.tables import branch_name, pooled
from lapa2_interp.bias.tokens import token_texts
from lapa2_interp.cli.app import main
from lapa2_interp.cli.paper import report
from lapa2_interp.errors import RunError
from lapa2_interp.models.load import load_tokenizer
from lapa2_interp.page import embedded
from analyses.lab.claims import ClaimResult
from analyses.lab.gallery import Gallery, gallery_run
from lapa2_interp.report import run_page
from lapa2_interp.report.intervals import interval_svg, shared_scale
from lapa2_interp.report.run_page import run_report
from lapa2_interp.report.run_texts import MASS_SCALE
from lapa2_interp.runs import store
from lapa2_interp.runs.engines import InProcess
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.run import finished_cell, is_finished_run, load_run
from lapa2_interp.runs.store import Failure, remove_batches

GRID = """model = "tiny-gpt2"
dtype = "float32"
task = "sentiment"
attribute = "positive"
prompts = 2
length = 30
samples = 2
trace = "{trace}"

[[block]]
method = ["prefix", "air-decoding"]
augmentation = ["none", "paper"]

[[block]]
method = "none"
"""
HOSTILE = "</script><script>document.title='x'</script><img src=x onerror=alert(1)>&amp; '\"\u2028"
PIXEL = b"\x89PNG\r\n\x1a\n not drawn, only embedded"


class Parts(HTMLParser):
    """What a browser would see: elements with their attributes, text outside scripts, and scripts
    by id."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.scripts, self.inside = [], "", {}, None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside = dict(attrs).get("id") or tag

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.inside = None

    def handle_data(self, data):
        if self.inside is None:
            self.text += data
        else:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data

    @property
    def data(self):
        """The embedded texts."""
        return json.loads(self.scripts["data"])


def claim(item, text, verdict, here=1.5, expected="more", **more):
    nothing = float("nan")
    low, high = (nothing, nothing) if np.isnan(here) else (here - 1, here + 1)
    claim = ClaimResult(item, text, "acc", expected, 2.25, here, low, high, 0.125, 3.5, verdict, 4)
    return vars(claim) | more


def write_item(folder, item, rows, columns, claims=(), title="", notes=()):
    tables = folder / "tables"
    tables.mkdir(exist_ok=True)
    table = pd.DataFrame(rows, columns=columns)
    facts = {
        "item": item,
        "title": title or item,
        "notes": list(notes),
        "rows": table.astype(str).to_dict("split"),
    }
    (tables / f"{item}.json").write_text(json.dumps(facts), encoding="utf-8")
    pd.DataFrame({"task": ["sentiment"] * len(table), "method": "prefix"}).to_csv(
        tables / f"{item}.csv", index=False
    )
    pd.DataFrame(claims, columns=list(ClaimResult.__dataclass_fields__)).to_csv(
        tables / f"{item}.claims.csv", index=False
    )


def write_items(folder):
    rows = [
        ["prefix", "baseline", "37.5 [1.25, 73.8]", "0.560 [0.450, 0.697]"],
        ["prefix", "alpha 0.5 paper", "**75.1** [60.0, 90.2]", "missing"],
    ]
    claims = [
        claim("sent_topic", "LaPA2 raises accuracy: prefix, sentiment", "as in the paper"),
        claim("sent_topic", "LaPA2 costs perplexity: prefix, sentiment", "against the paper", -2.5),
        claim("sent_topic", "a comparison without cells", "missing", float("nan")),
    ]
    columns = ["method", "augmentation", "acc", "dist1"]
    write_item(folder, "sent_topic", rows, columns, claims, notes=["what stands under it"])
    write_item(
        folder,
        "another",
        [["a", HOSTILE]],
        ["x", "text"],
        [claim("another", HOSTILE, "inconclusive")],
        HOSTILE,
    )
    write_item(folder, "eval", [], ["rater", "mean"])
    (folder / "figures").mkdir()
    (folder / "figures/sent_topic.png").write_bytes(PIXEL)


def page(folder):
    return run_report(load_run(folder), folder / "tables", folder / "figures")


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
    """A finished run with tables, nothing changed in it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    (folder.parent / "pooled.toml").write_text(GRID.format(trace="pooled"))
    fill_run(folder, [load_grid(str(folder.parent / "pooled.toml"))], InProcess("cpu"))
    write_items(folder)
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


def test_every_number_of_the_tables_is_there(html, finished):
    text = Parts(html).text
    for file in (finished / "tables").glob("*.json"):
        facts = json.loads(file.read_text())
        cells = [cell for row in facts["rows"]["data"] for cell in row]
        for cell in [
            facts["title"],
            *facts["notes"],
            *(facts["rows"]["columns"] if cells else ()),
            *cells,
        ]:
            assert re.sub(r"^\*\*(.*?)\*\*", r"\1", cell) in text
    assert "<b>75.1</b>" in html
    assert '<span class="ci"> [1.25, 73.8]</span>' in html
    assert '<span class="gap">missing</span>' in html


def test_claims_come_with_interval_p_power_and_verdict(html):
    text = Parts(html).text
    assert (
        "Of 4 claims the paper makes: 1 as in the paper, 1 against the paper, 0 no difference, 1"
        " inconclusive, 1 missing." in " ".join(text.split())
    )
    for number in ("+1.5", "[+0.5, +2.5]", "-2.5", "[-3.5, -1.5]", "+2.25", "0.125", "3.5"):
        assert number in text
    assert "Holm's correction for the number of the item's claims" in text
    rows = [
        attrs for tag, attrs in Parts(html).elements if tag == "tr" and attrs.get("data-verdict")
    ]
    assert [row["data-verdict"] for row in rows] == [
        "as in the paper",
        "against the paper",
        "missing",
        "inconclusive",
    ]
    assert rows[0] == {
        "data-item": "sent_topic",
        "data-verdict": "as in the paper",
        "data-task": "sentiment",
        "data-method": "prefix",
    }


def test_claims_of_ours_are_told_apart_and_each_comparison_counts_once(run):
    """What two items compare counts with its largest corrected p, wherever it stands."""
    same = {"compared": "x", "holm": 0.001}
    rows = [
        claim("decay", "sure", "as in the paper", **same),
        claim("decay", "mine", "as expected", whose="ours", **same),
    ]
    write_item(run, "decay", [], ["x"], rows)
    later = [claim("half", "strict", "inconclusive", compared="x", holm=0.5)]
    write_item(run, "half", [], ["x"], later)
    html = page(run)
    text = " ".join(Parts(html).text.split())
    counts = "1 as in the paper, 1 against the paper, 0 no difference, 2 inconclusive, 1 missing."
    assert f"Of 5 claims the paper makes: {counts}" in text
    counts = (
        "1 as expected, 0 against what was expected, 0 no difference, 0 inconclusive, 0 missing."
    )
    assert f"Of 1 claims of ours: {counts}" in text
    assert "Claims: ✓ 1 as in the paper Claims of ours: ✓ 1 as expected" in text
    assert "Ours, not the paper's" in text
    rows = re.findall(r'data-verdict=.*?<td class="words">(.*?)</td>.*?</a>(.*?)</td>', html, re.S)
    assert [name for name, again in rows if again] == ["sure"]
    assert "claims as expected" not in text, "tiles are of the paper's claims"


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
    assert "no judge" in text
    name = f"{finished.name}: tiny-gpt2, sentiment, "
    assert f"<title>{name}" in html
    assert f"<h1>{name}" in html


def test_other_runs_whose_tables_are_there_are_told(run, html):
    assert "Other runs" not in html
    own = gallery_run(load_run(run), run / "tables", ["alpha"])
    elsewhere = own.model_copy(
        update={
            "grids": {"quick/deep": {"finished": 7, "missing": 2}, "<b>x": {"finished": 4}},
            "dtypes": ("float16",),
            "commits": ("0123456789abcdef", "not a checkout"),
        }
    )
    (run / "results.json").write_text(Gallery(runs=(own, elsewhere)).model_dump_json())
    other_runs = page(run).partition("Other runs")[2].partition("<h2")[0]
    assert other_runs.count("<tr>") == 2, "the head, and one run"
    for words in (
        '<td class="words">quick/deep, &lt;b&gt;x</td><td class="num">11</td>',
        "tiny-gpt2, float16, cpu",
        "0123456789ab, not a checkout",
    ):
        assert words in other_runs
    (run / "results.json").write_text("{")
    with pytest.raises(RunError, match="results.json cannot be read"):
        page(run)


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
    assert HOSTILE in parts.text
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
    shutil.rmtree(run / "figures")
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


def test_the_page_is_read_in_a_browser(browser, run):
    """Sorted, filtered and read by keys; what an address asks for, however odd, is shown."""
    write_item(run, "half", [["2 lines", 1], ["b", 9], ["a", 10]], ["words", "number"])
    html = page(run)
    parts = Parts(html)
    data = parts.data

    def text(n):
        return {"t": ["word\n"] * n, "p": [1000] * n, "b": [10] * n, "end": "length"}

    for arm, sizes in zip(data["groups"][0]["arms"], [(120, 40), (0, 1)], strict=True):
        arm["texts"] = [text(n) for n in sizes]
    file = run / "report.html"
    file.write_text(html.replace(parts.scripts["data"], str(embedded(data))), "utf-8")

    def go(address):
        browser.ask(f"location.hash = {json.dumps(address)}; 0")
        wait()

    def wait():
        browser.ask("new Promise(done => setTimeout(() => done(0), 150))")

    def of_all(what, value):
        return browser.ask(f"[...document.querySelectorAll('{what}')].map(each => {value})")

    def top(what):
        return browser.ask(f"document.querySelector('{what}').getBoundingClientRect().top")

    browser.goto(file.as_uri() + "#colour=constructor")
    assert of_all("#colour input", "each.checked") == [True, False]
    columns = of_all(".column", "each.textContent")
    assert "0 tokens" in columns[1]
    assert "NaN" not in columns[1]
    assert of_all(".spark", "each.getAttribute('viewBox')") == ["0 0 120 44"]

    browser.ask("document.querySelector('.column').focus()")
    for _ in range(80):
        browser.press("ArrowRight")
    wait()
    browser.press("ArrowRight")
    wait()
    assert of_all(".column:first-child .token.here", "each.dataset.step") == ["80"]
    assert 0 < top(".token.here") < 900
    assert of_all("#tip", "each.matches('.hidden')") == [False]
    labels = of_all(".column", "[each.getAttribute('role'), each.getAttribute('aria-label')]")
    assert labels[0] == ["group", "Text of baseline; arrow keys read its tokens"]

    go(f"prompt={quote(data['groups'][0]['prompts'][1])}")
    assert of_all(".spark", "each.getAttribute('viewBox')") == ["0 0 40 44"] * 2
    assert of_all(".spark polyline", "each.getAttribute('points')")[1] == "0,12.0 1,12.0"
    assert abs(top("#texts")) < 100
    go("item=sent_topic&verdict=missing")
    assert abs(top("section.claims")) < 100, "not at the texts that were chosen before"

    of_all("#arms input:checked", "each.click()")
    assert of_all(".column", "0") == []
    address = browser.ask("location.href")
    assert address.endswith("arms=&colour=p")
    browser.goto(address)
    assert of_all(".column", "0") == []

    for name, rows in (("words", ["2 lines", "a", "b"]), ("number", ["2 lines", "b", "a"])):
        heads = f"#item-half th:nth-child({1 + (name == 'number')}) button"
        of_all(heads, "each.click()")
        assert of_all("#item-half tbody td:first-child", "each.textContent") == rows
    assert browser.errors == []


def test_the_command_writes_the_page_and_says_what_is_missing(run, tmp_path, capsys):
    report(run)
    assert (run / "report.html").read_text("utf-8") == page(run)
    assert "report.html" in capsys.readouterr().out
    elsewhere = tmp_path / "again"
    elsewhere.mkdir()
    (run / "tables").rename(elsewhere / "tables")
    report(run)
    alone = Parts((run / "report.html").read_text("utf-8"))
    assert alone.data["groups"], "texts need no tables"
    with pytest.raises(RunError, match="has no tables .ITEM.json.; `python analyses/ITEM.py"):
        report(run, tables=tmp_path)
    report(run, tables=elsewhere / "tables", out=tmp_path / "new/page.html")
    assert "75.1" in (tmp_path / "new/page.html").read_text("utf-8")
    with pytest.raises(RunError, match="is a folder"):
        report(run, tables=elsewhere / "tables", out=tmp_path)
    (elsewhere / "tables/sent_topic.json").write_text("{}")
    with pytest.raises(
        RunError, match=r"sent_topic.json is not a table of an item.*analyses/sent_topic.py"
    ):
        report(run, tables=elsewhere / "tables")


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
        assert browser.ask("document.querySelectorAll('.differences').length") == 2
