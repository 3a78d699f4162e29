"""The page of a run of the gallery: the items, claims and other runs on the page of the run."""

import json
import re
import shutil
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest
from browsers import CUT, browser_page
from pages import HOSTILE, Parts, fill_small_run

from analyses.lab.claims import ClaimResult
from analyses.lab.gallery import Gallery, gallery_run
from analyses.lab.gallery_page import gallery_report, write_gallery_report
from lapa2_interp.errors import RunError
from lapa2_interp.page import embedded
from lapa2_interp.runs.run import load_run

PIXEL = b"\x89PNG\r\n\x1a\n not drawn, only embedded"


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
    return gallery_report(
        load_run(folder), folder / "tables", folder / "figures", folder / "report.html"
    )


@pytest.fixture(scope="module")
def browser():
    with browser_page() as opened:
        yield opened


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with tables, nothing changed in it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    fill_small_run(folder)
    write_items(folder)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture(scope="module")
def html(finished):
    return page(finished)


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


def test_other_runs_whose_tables_are_there_are_told(run, html):
    assert "Other runs" not in html
    own = gallery_run(load_run(run), run / "tables", ["alpha"])
    elsewhere = own.model_copy(
        update={
            "grids": {"quick/layers": {"finished": 7, "missing": 2}, "<b>x": {"finished": 4}},
            "dtypes": ("float16",),
            "commits": ("0123456789abcdef", "not a checkout"),
        }
    )
    (run / "results.json").write_text(Gallery(runs=(own, elsewhere)).model_dump_json())
    other_runs = page(run).partition("Other runs")[2].partition("<h2")[0]
    assert other_runs.count("<tr>") == 2, "the head, and one run"
    for words in (
        '<td class="words">quick/layers, &lt;b&gt;x</td><td class="num">11</td>',
        "tiny-gpt2, float16, cpu",
        "0123456789ab, not a checkout",
    ):
        assert words in other_runs
    (run / "results.json").write_text("{")
    with pytest.raises(RunError, match="results.json cannot be read"):
        page(run)


def test_no_column_is_cut_on_a_phone(browser, html, tmp_path):
    """Words are wrapped; what is still wider scrolls in a box of its own."""
    file = tmp_path / "report.html"
    file.write_text(html, encoding="utf-8")
    browser.goto(file.as_uri(), width=390)
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    assert browser.ask("document.querySelectorAll('table').length") > 3
    assert browser.ask(CUT) == []
    wraps = (
        "[...document.querySelectorAll('.box td')].map(each => getComputedStyle(each).whiteSpace)"
    )
    assert set(browser.ask(wraps)) <= {"normal", "pre-wrap"}


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


def test_the_page_is_written_with_the_tables_of_any_folder(run, tmp_path):
    assert write_gallery_report(run).read_text("utf-8") == page(run)
    (run / "tables").rename(tmp_path / "tables")
    alone = Parts(write_gallery_report(run).read_text("utf-8"))
    assert alone.data["groups"], "texts need no tables"
    file = write_gallery_report(run, tmp_path / "tables", tmp_path / "new/page.html")
    assert "75.1" in file.read_text("utf-8")
    assert "no judge" in Parts(file.read_text("utf-8")).text
    (tmp_path / "tables/sent_topic.json").write_text("{}")
    with pytest.raises(
        RunError, match=r"sent_topic.json is not a table of an item.*analyses/paper/sent_topic.py"
    ):
        write_gallery_report(run, tmp_path / "tables")


def test_a_grid_that_moved_to_another_folder_takes_its_own_place(run):
    newer = gallery_run(load_run(run), run / "tables", [])
    assert set(newer.grids) == {"pooled"}
    counts = {"finished": 3}
    older = newer.model_copy(update={"grids": {"quick/pooled": counts, "quick/other": counts}})
    kept_grids = [set(one.grids) for one in Gallery(runs=(older,)).with_run(newer).runs]
    assert kept_grids == [{"pooled"}, {"quick/other"}]
