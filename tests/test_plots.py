"""The demo in small: its files, its tables, and a report that escapes what models write."""

import pandas as pd
import pytest

from lapa2_interp import demo, plots
from lapa2_interp.experiments.store import read_run
from lapa2_interp.report import Section, page


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "demo"
    printed = demo.run_demo(out, model_name="tiny-llama", length=72)
    (out / "printed.txt").write_text(printed)
    return out


def test_every_file_is_there(folder):
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == [
        "figures/head_maps.png", "figures/prefix_attention.png", "figures/prefix_tokens.png", "manifest.json", "printed.txt",
        "report.html", "samples.parquet", "tables/fits.csv", "tables/heads.csv", "tables/prefix_tokens.csv",
        "tables/steps.csv", "tables/summary.csv", "tables/verdicts.csv", "trace.nc",
    ]  # fmt: skip


def test_the_run_is_complete(folder):
    run = read_run(folder)
    assert run.samples.groupby(["arm", "attribute"], sort=False).size().tolist() == [15] * 8
    assert list(run.manifest.arms) == list(demo.ARMS)
    assert run.trace.sizes["sample"] == 120


def test_the_printed_table_is_the_stored_one(folder):
    printed = (folder / "printed.txt").read_text()
    summary = pd.read_csv(folder / "tables" / "summary.csv")
    assert summary["quantity"].unique().tolist()[:2] == ["prefix at step 0", "prefix at step 16"]
    for row in summary.itertuples():
        assert f"{row.mean:.3f} [{row.low:.3f}, {row.high:.3f}]" in printed
    verdicts = pd.read_csv(folder / "tables" / "verdicts.csv")
    assert "tiny-llama, the same texts" in printed
    law = verdicts[
        (verdicts["claim"] == "the bias adds alpha log(l/l_pre)") & verdicts["where"].str.startswith("tiny-llama")
    ]
    assert law["verdict"].tolist() == ["supported"] * 2
    assert "report.html" in printed


def test_the_report_is_one_file_with_every_arm(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == 3
    for mark in ("http://", "https://", "<script", "<link"):
        assert mark not in html
    for arm in demo.ARMS:
        assert arm in html


def test_model_text_is_escaped():
    bad = "<script>alert('x')</script> & <b>bold</b>"
    texts = pd.DataFrame({"arm": [bad]}, index=pd.Index([bad], name="prompt"))
    html = page(bad, bad, [Section(bad, bad, table=texts)], texts, {bad: bad})
    assert "<script>" not in html
    assert "<b>" not in html
    assert "&lt;script&gt;" in html


def test_plots_draw_their_tables():
    steps = pd.DataFrame({"arm": "a", "name": "prefix", "step": range(5), "mean": 0.5, "low": 0.4, "high": 0.6, "n": 3})
    fits = pd.DataFrame({"arm": ["a"], "C": [5.0], "D": [10.0], "R2": [0.9]})
    lines = plots.attention_curves(steps, fits).axes[0].lines
    assert lines[0].get_ydata().tolist() == [0.5] * 5
    assert lines[1].get_ydata()[0] == 0.5
    heads = pd.DataFrame(
        [
            {"arm": arm, "layer": i, "head": j, "prefix": i + j + (arm == "b")}
            for arm in "ab"
            for i in (0, 1)
            for j in (0, 1)
        ]
    )
    first, second = plots.head_maps(heads).axes[:2]
    assert first.images[0].get_array().tolist() == [[0, 1], [1, 2]]
    assert second.images[0].get_array().tolist() == [[1, 1], [1, 1]]


def test_prefix_tokens_are_named(folder):
    table = pd.read_csv(folder / "tables" / "prefix_tokens.csv", keep_default_na=False)
    assert table["label"][:5].tolist() == ["BOS", "V", "e", "r", "y"]  # one token per byte
    assert table["label"][6:9].tolist() == ["p/n", "o/e", "s/g"]
