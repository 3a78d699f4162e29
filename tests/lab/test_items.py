"""The scripts of analyses/ and figures/ on a small stored run: 135 cells of SmolLM2, four prompts,
one sample, 48 tokens.

The golden tables are what the scripts wrote when they were read and checked, from the scores of
models stored beside the run: no number depends on the processor. `python tests/lab/test_items.py`
writes both again.
"""

import functools
import io
import json
import re
import runpy
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from conftest import drawing_of, redraw, script, unpack
from scipy.stats import t

from analyses.lab import output, reported, tables
from analyses.lab.claims import (
    Claim,
    ItemClaims,
    compare_arms,
    count_verdicts,
    deciding_p_values,
    format_claims,
    read_claims,
    summarize_disagreement,
    unique_comparisons,
)
from analyses.lab.data import ItemData
from analyses.lab.estimates import perplexity_texts
from analyses.lab.gallery import Gallery, gallery_run, read_gallery
from analyses.lab.items import ItemTables
from analyses.lab.output import merge_item, write_item
from analyses.lab.ratings import stored_ratings
from analyses.lab.style import WAYS
from analyses.lab.tables import ARM_COLUMNS
from lapa2_interp import load_run
from lapa2_interp.bias.recipes import RECIPES
from lapa2_interp.cli.app import main
from lapa2_interp.errors import RunError, ScoringError
from lapa2_interp.runs import store
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.store import Failure, remove_batches, write_listing
from lapa2_interp.scoring import transformer
from lapa2_interp.scoring.adapter import AdapterScorer
from lapa2_interp.scoring.scorer import ScoreCache, SkippedText, TextItem, expand_scorers
from lapa2_interp.scoring.tables import paired_change
from lapa2_interp.scoring.task_scorer import ToxicityScorer
from lapa2_interp.stats import Difference, paired_difference

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
SCORES = ROOT / "tests" / "data" / "small_run.scores.csv.xz"
ITEMS = sorted({file.name.split(".")[0] for file in GOLDEN.glob("*.csv")})
MADE = shutil.ignore_patterns("tables", "figures")
"""Left out of copies: with the tables of all items, every claim is judged again."""
FIGURES = ("decay", "dilution", "alpha", "augmentation", "augmentation_large", "local_attn")


QUICK = ("accuracy=linear", "toxicity=linear", "perplexity")
MODELS = (transformer.Perplexity, AdapterScorer)
"""Scorers that read with a model: their scores are stored."""


def shortened(score):
    """A score as JSON, to seven digits."""
    return json.dumps([float(f"{value:.7g}") for value in score])


def stored_run(folder_of_run, known):
    """The stored run, unpacked, with the scores of a file, if one is given."""
    folder = unpack("small_run", folder_of_run) / "run"
    with ScoreCache(folder / "scores") as scores:
        scores.put(
            (key, SkippedText(why) if why else tuple(json.loads(values)))
            for key, values, why in (
                pd.read_csv(known, keep_default_na=False).itertuples(index=False) if known else ()
            )
        )
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The stored run, with the float32 scores of models where the scripts keep scores."""
    folder = stored_run(tmp_path_factory.mktemp("small"), SCORES)
    traces, read = {}, store.read_trace

    def read_trace(cell_folder, number, cell):
        if (cell_folder.name, number) not in traces:  # copies of the run have the same
            traces[cell_folder.name, number] = read(cell_folder, number, cell)
        return traces[cell_folder.name, number]

    with (
        pytest.MonkeyPatch.context() as patched
    ):  # a scorer names its weights, and so loads them, in every script
        patched.setattr(
            transformer, "load_transformers", functools.cache(transformer.load_transformers)
        )
        patched.setattr(store, "read_trace", read_trace)
        yield folder


@pytest.fixture(scope="module")
def printed(run):
    """Runs a script on the stored run, once, without models; returns its names and prints."""

    @functools.cache
    def make(item):
        with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as printed:
            for model in MODELS:
                patched.setattr(
                    model, "score", lambda *_: pytest.fail("a score that is not stored")
                )
            return script(f"paper/{item}", run) | {"printed": printed.getvalue()}

    return make


def table(file):
    return pd.read_csv(file, keep_default_na=False, na_values=[""])


def test_stored_scores_are_those_of_the_float32_scorers(run):
    """Scores of one text per task. float32 sums in another order move a text's mean -ln p by some
    1e-6, and bfloat16 by 1e-2."""
    opened = load_run(run)
    table = opened.texts(list(opened.cells.drop_duplicates("task")["key"]))
    weights = opened.manifest(opened.cells["key"].iloc[0]).model.weights
    scorer = transformer.Perplexity("smollm2-135m", generator=weights)
    assert scorer.version.startswith("smollm2-135m float32 self, sha256 ")
    texts = table.drop_duplicates("task").set_index("task")["text"]
    with ScoreCache(run / "scores") as scores:
        for task, text in texts.items():
            adapter = AdapterScorer(str(task))
            adapter = ToxicityScorer(adapter) if task == "detox" else adapter
            for judge in (scorer, adapter):
                item = TextItem(text)
                (stored,) = scores.get([judge.key(item)]).values()
                assert stored == pytest.approx(judge.score([item])[0], rel=1e-4, abs=1e-5)


def test_traces_of_every_head_and_of_two_steps(tmp_path, capsys):
    """The local ratio is of the means of heads, as in a pooled trace; two steps fit no decay."""
    tables = {}
    for kind in ("full", "pooled"):
        grid, out = tmp_path / "sent_topic.toml", tmp_path / kind
        grid.write_text(
            'model = "tiny-gpt2"\ndtype = "float32"\ndescription = "short"\n[[block]]\n'
            'task = "sentiment"\nmethod = "air-decoding"\naugmentation = ["none", {alpha = 0.5}]\n'
            f'length = 18\nsamples = 1\nprompts = 2\ntrace = "{kind}"\n'
        )
        assert main(["sweep", str(grid), "--out", str(out), "--workers", "1"]) == 0
        for item in ("local_attn", "dilution"):
            script(f"paper/{item}", out)
            tables[kind, item] = table(out / "tables" / f"{item}.csv")
    for item in ("local_attn", "dilution"):
        pd.testing.assert_frame_equal(tables["full", item], tables["pooled", item], atol=1e-5)


@pytest.mark.parametrize("item", ITEMS)
def test_every_script_makes_its_golden_table(item, run, printed):
    shown = printed(item)["printed"]
    for golden in sorted(GOLDEN.glob(f"{item}.*csv")):
        made, expected = table(run / "tables" / golden.name), table(golden)
        assert list(made) == list(expected)
        # Six digits are written; the classifiers and the fits carry float32 and float64
        # rounding.
        pd.testing.assert_frame_equal(made, expected, check_dtype=False, rtol=1e-4, atol=1e-4)
    facts = json.loads((run / "tables" / f"{item}.json").read_text("utf-8"))
    assert facts["title"] in shown
    assert (run / "tables" / f"{item}.md").read_text("utf-8").startswith(f"### {facts['title']}")
    assert r"\end{table}" in (run / "tables" / f"{item}.tex").read_text("utf-8")


def test_the_pages_are_all_of_reproduce():
    reproduce = runpy.run_path(str(ROOT / "analyses" / "tools/reproduce.py"))
    pages = {file.stem for file in (ROOT / "analyses" / "paper").glob("*.py")}
    assert set(reproduce["ITEMS"]) - set(reproduce["OURS"]) == pages - {"perplexity_ratios"}
    assert set(ITEMS) == pages - {"perplexity_ratios"}
    assert all(reproduce["page_of"](item).is_file() for item in reproduce["ITEMS"])


def test_numbers_are_those_of_the_raw_texts(run, printed):
    """From the parquet files alone, by other code: accuracy, toxicity, distinct-n, n."""
    from lapa2_interp.scoring.linear import LinearScorer

    assert printed("scaling")
    scaling = table(run / "tables" / "scaling.csv")
    seen = 0
    for cell in json.loads((run / "run.json").read_text())["grids"]["quick/scaling"]:
        settings = json.loads((run / "cells" / cell / "cell.json").read_text())
        files = sorted((run / "cells" / cell).glob("*.parquet"))
        texts = pd.concat([pd.read_parquet(file) for file in files])["text"]
        scorer = (
            ToxicityScorer(LinearScorer("detox"))
            if settings["task"]["name"] == "detox"
            else LinearScorer("sentiment")
        )
        scores = scorer.score([TextItem(text) for text in texts])  # no model, so the second scorer
        if settings["task"]["name"] == "detox":
            expected, metric = 100 * np.mean([score[0] for score in scores]), "tox (linear)"
        else:
            right = scorer.columns.index(settings["attribute"])
            found_right = [np.argmax(score) == right for score in scores]
            expected, metric = 100 * np.mean(found_right), "acc (linear)"
        law = settings["augmentation"]["law"] if settings["augmentation"] else None
        rows = scaling[
            (scaling["method"] == settings["method"])
            & (scaling["attribute"] == settings["attribute"])
        ]
        mine = rows[rows["arm"].str.contains(f"law {law}") if law not in (None, "log") else rows["arm"].isin(
            ["baseline"] if law is None else ["alpha 0.5 paper", "alpha 2 paper"])]  # fmt: skip
        assert mine[mine["metric"] == metric]["mean"].item() == pytest.approx(expected, abs=1e-3)
        assert mine[mine["metric"] == metric]["n"].item() == len(texts)
        words = [re.findall(r"\w+|[^\w\s]", text) for text in texts]
        pairs = {pair for sentence in words for pair in pairwise(sentence)}
        assert mine[mine["metric"] == "dist2"]["mean"].item() == pytest.approx(
            len(pairs) / sum(map(len, words)), abs=1e-5
        )
        seen += 1
    assert seen == 25


@pytest.mark.parametrize("item", FIGURES)
def test_figures_are_files_in_two_forms(item, run, printed):
    assert printed(item)
    for ending in ("png", "pdf"):
        (run / "figures" / f"{item}.{ending}").unlink()
    redraw(f"paper/{item}", run)
    for ending, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        assert (run / "figures" / f"{item}.{ending}").read_bytes().startswith(start)


def test_a_table_without_rows_has_no_figure(run, printed):
    """No picture of nothing, and none that an earlier run left."""
    assert "no judge" in printed("eval")["printed"]
    for ending in ("png", "pdf"):
        (run / "figures" / f"eval.{ending}").write_text("of an earlier run")
    redraw("paper/eval", run)
    assert not list((run / "figures").glob("eval.*"))


def test_alpha_marks_the_best_control_and_the_papers_choice(run, printed):
    assert printed("alpha")
    alpha = pd.read_csv(run / "tables" / "alpha.csv")
    axes = drawing_of("paper/alpha")(alpha).axes
    stars = [line for panel in axes for line in panel.lines if line.get_marker() == "*"]
    crosses = [line for panel in axes for line in panel.lines if line.get_marker() == "x"]
    assert len(stars) == len(crosses) == 3
    rows = alpha[(alpha["attribute"] == "all") & alpha["metric"].isin(["acc", "tox"])]
    best = {
        method: (part["mean"].min() if part["metric"].iloc[0] == "tox" else part["mean"].max())
        for method, part in rows.groupby("method")
    }
    assert sorted(line.get_ydata()[0] for line in stars) == pytest.approx(sorted(best.values()))
    assert sorted(line.get_xdata()[0] for line in crosses) == [0.5, 0.5, 2.0]


@pytest.mark.parametrize("tasks", [("sentiment", "topic"), ("sentiment",)])
def test_the_frontier_is_drawn_of_any_arms(tasks):
    """Of as many recipes as there are, one without perplexity; the stored run has no such grid. The
    names of the arms are all inside the figure."""
    arms = ["baseline", *RECIPES, "pasta, chosen heads"]
    rows = [
        {"model": "m", "task": task, "method": "prefix", "variant": "", "arm": arm}
        | {"length": 8, "part": 0, "attribute": "all", "metric": metric, "mean": i + 10.0}
        | {"low": i + 9.0, "high": i + 12.0}
        for task in tasks
        for i, arm in enumerate(arms)
        for metric in ("acc", "ppl")
        if (arm, metric) != ("pasta", "ppl")
    ]
    steps = [
        {"task": row["task"], "arm": row["arm"], "step": step, "mean": 0.1}
        for row in rows
        for step in range(3)
    ]
    drawing = drawing_of("frontier/analyse")(pd.DataFrame(rows), pd.DataFrame(steps))
    assert len(drawing.axes) == 2 * len(tasks)
    for panel in drawing.axes[len(tasks) :]:
        names = {text.get_text() for text in panel.texts}
        assert names == {name for name, *_ in WAYS.values()} | {"Spotlight"}
        assert len(names) <= 6
        drawing.canvas.draw()
        for text in panel.texts:
            assert text.get_window_extent().x1 <= drawing.bbox.x1


def test_every_arm_of_the_head_scopes_has_a_distinct_name():
    """By its heads or layers, whatever the order; heads that are in no set keep the cell's label."""
    made = runpy.run_path(str(ROOT / "analyses" / "heads/make_grid.py"))
    scope, known = made["scope"], made["named_sets"]()
    cells = {
        cell.arm: cell
        for cell in load_grid(str(ROOT / "analyses/heads/heads.toml"), check=False).cells
    }
    names = [scope(cell, known) for cell in cells.values()]
    assert len(set(names)) == len(cells) == 14
    assert {*names} == {"baseline", "all heads", *known.values()} | {
        f"{half} layers" for half in ("bottom", "top", "even", "odd")
    }
    assert made["CHOSEN"] in names
    by_knockout = next(set(heads) for heads, name in known.items() if name == made["CHOSEN"])
    best = json.loads((made["CIRCUIT"] / "heads.json").read_text("utf-8"))
    assert by_knockout == {tuple(head) for head in best[: made["N"]]}
    (some,) = (cell for cell in cells.values() if scope(cell, known) == made["CHOSEN"])
    assert scope(some, {}) == f"24 heads ({some.active_augmentations[0].label})"
    assert made["named_sets"](ROOT / "no.json") == {}


def drawn(axes):
    """What every line of a panel shows: (x, y). Lines of a legend alone have no points."""
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    return [line for line in lines if line[0]]


def test_plotted_data_are_the_tables(run):
    decay = table(GOLDEN / "decay.csv")
    shown = decay[(decay["metric"] == "acc") & (decay["attribute"] == "all")]
    for panel, (_, part) in zip(
        drawing_of("paper/decay")(decay).axes, shown.groupby("task", sort=False), strict=True
    ):
        lines = [
            (x["length"].tolist(), x["mean"].tolist())
            for _, x in part.groupby("method", sort=False)
        ]
        assert drawn(panel) == lines
    steps = table(GOLDEN / "augmentation.csv")
    for panel, (_, part) in zip(
        drawing_of("paper/augmentation")(steps).axes, steps.groupby("task", sort=False), strict=True
    ):
        groups = part.groupby(["method", "arm"], sort=False)
        assert drawn(panel) == [(x["step"].tolist(), x["mean"].tolist()) for _, x in groups]
    local = table(GOLDEN / "local_attn.csv")
    first = local[~local["without_bos"] & (local["task"] == "sentiment")]
    groups = [
        x for _, part in first.groupby("k", sort=False) for _, x in part.groupby("arm", sort=False)
    ]
    assert drawn(drawing_of("paper/local_attn")(local).axes[0]) == [
        (x["step"].tolist(), x["mean"].tolist()) for x in groups
    ]
    dilution, fits = table(GOLDEN / "dilution.csv"), table(GOLDEN / "dilution.fits.csv")
    curve = dilution[
        (dilution["name"] == "prefix")
        & (dilution["task"] == "sentiment")
        & (dilution["method"] == "prefix")
    ]
    measured, fitted = drawn(drawing_of("paper/dilution")(dilution, fits).axes[0])[:2]
    assert measured == (curve["step"].tolist(), curve["mean"].tolist())
    c, d = fits[["C", "D"]].iloc[0]
    np.testing.assert_allclose(fitted[1], c / (curve["step"] + d))
    alpha = table(GOLDEN / "alpha.csv")
    part = alpha[(alpha["method"] == "prefix") & (alpha["attribute"] == "all")].sort_values("alpha")
    control, fluency = (
        drawing_of("paper/alpha")(alpha).axes[0],
        drawing_of("paper/alpha")(alpha).axes[3],
    )
    assert drawn(control)[0][1] == part[part["metric"] == "acc"]["mean"].tolist()
    assert fluency.lines[0].get_ydata().tolist() == part[part["metric"] == "ppl"]["mean"].tolist()


def test_ratings_are_read_and_never_made(run, tmp_path):
    assert stored_ratings(run).empty
    copy = shutil.copytree(run, tmp_path / "rated")
    rows = [
        {"scorer": "judge (m)", "task": "sentiment", "method": "prefix", "arm": arm, "attribute": "positive", "prompt": prompt,
         "metric": metric, "value": value + (arm != "baseline") * (1.1 if prompt in "abc" else 0.9)}
        for arm in ("baseline", "alpha 0.5 paper") for prompt in "abcdef"
        for metric, value in (("relevance", 3.0), ("fluency", 4.0))
    ]  # fmt: skip
    (copy / "judge").mkdir()
    pd.DataFrame(rows).to_parquet(copy / "judge" / "scores.parquet")
    (copy / "human").mkdir()
    answers = {
        "id": "x",
        "arm": "topic air-decoding alpha 0.5 paper",
        "prompt": "a",
        "attribute": "world",
    }
    pd.DataFrame([answers | {"annotator": "A", "metric": "relevance", "rating": 5.0}]).to_csv(
        copy / "human" / "answers.csv"
    )
    made = script("paper/eval", copy)["table"].set_index(["rater", "method", "arm", "criterion"])[
        "mean"
    ]
    assert made["judge (m)", "prefix", "baseline", "relevance"] == 3
    assert made["judge (m)", "prefix", "alpha 0.5 paper", "fluency"] == pytest.approx(5)
    assert made["people", "air-decoding", "alpha 0.5 paper", "relevance"] == 5
    claims = table(copy / "tables" / "eval.claims.csv")
    by_judge = claims["claim"].str.contains("judge")
    assert claims["raw"][by_judge].tolist() == [
        "as in the paper",
        "against the paper",
    ]  # fluency is one point off
    assert claims["verdict"].iloc[0] == "inconclusive", "sign flips of few prompts have no small p"
    assert set(claims["verdict"][~by_judge]) == {"missing"}  # people rated no baseline
    redraw("paper/eval", copy)
    ratings = table(copy / "tables" / "eval.csv")
    two = pd.concat([ratings.assign(variant=""), ratings.assign(variant="prefixes=mle")])
    drawing = drawing_of("paper/eval")(two)
    bars = [tick.get_text() for tick in drawing.axes[0].get_xticklabels()]
    assert any(bar.endswith("prefixes=mle\nrelevance") for bar in bars)
    assert len(bars) == len(set(bars)) == 4
    more = pd.concat([ratings.assign(arm=arm).drop_duplicates("criterion") for arm in "abcd"])
    bars = sorted(drawing_of("paper/eval")(more).axes[0].patches, key=lambda bar: bar.get_x())
    assert all(
        one.get_x() + one.get_width() <= two.get_x() + 1e-9 for one, two in pairwise(bars)
    ), "bars of four arms do not overlap"
    third = pd.DataFrame(rows).assign(arm=lambda x: x["arm"].replace("baseline", "alpha 1 paper"))
    both = pd.concat([pd.DataFrame(rows), third]).drop_duplicates()
    both.to_parquet(copy / "judge" / "scores.parquet")
    script("paper/eval", copy)
    claims = table(copy / "tables" / "eval.claims.csv")["claim"]
    assert claims.is_unique
    assert claims.str.endswith(", alpha 1 paper").sum() == 2


def test_the_arms_of_human_answers(tmp_path):
    """Of a run: task, method, arm, and variant and model where they differ; else as they are."""
    arms = {
        "A": ("", "", "A", "", ""),
        "1": ("", "", "1", "", ""),
        "topic prefix alpha 1 paper": ("topic", "prefix", "alpha 1 paper", "", ""),
        "topic prefix a | eos block @ m/n": ("topic", "prefix", "a", "eos block", "m/n"),
        "topic prefix baseline @ m": ("topic", "prefix", "baseline", "", "m"),
    }
    (tmp_path / "human").mkdir()
    rows = pd.DataFrame({"arm": list(arms)}).assign(metric="fluency", rating=3, prompt="p")
    for chosen in (rows[:1], rows):
        chosen.to_csv(tmp_path / "human" / "answers.csv", index=False)
        ratings = stored_ratings(tmp_path)[["task", "method", "arm", "variant", "model"]]
        assert (
            list(ratings.itertuples(index=False, name=None)) == list(arms.values())[: len(chosen)]
        )


def test_missing_cells_are_gaps_that_the_table_shows(run, tmp_path):
    """Half an arm is a gap too, and is not compared with a whole one."""
    copy = shutil.copytree(run, tmp_path / "gap", ignore=MADE)
    cells = load_run(copy).cells
    full = (cells["task"] == "detox") & (cells["method"] == "preadd") & (cells["law"] == "sqrt")
    half = (cells["task"] == "sentiment") & (cells["method"] == "prefix")
    half &= (cells["law"] == "linear") & (cells["attribute"] == "negative")
    gone = cells["key"][full | half]
    assert full.sum() == half.sum() == 1
    for key in gone:
        remove_batches(copy / "cells" / key)
    made = script("paper/scaling", copy, "--scorers", *QUICK)["table"]
    gaps = made[made["state"] != "finished"]
    assert gaps[["method", "arm", "attribute", "state"]].to_numpy().tolist() == [
        ["prefix", "alpha 0.5 paper, law linear", "all", "incomplete and missing"],
        ["preadd", "alpha 2 paper, law sqrt", "all", "missing"],
    ]
    assert gaps["mean"].isna().all()
    text = (copy / "tables" / "scaling.md").read_text("utf-8")
    assert "| missing |" in text
    assert "Gaps: 1 cell incomplete and missing, 1 cell missing." in text
    claims = table(copy / "tables" / "scaling.claims.csv")
    for law, method in (("sqrt", "preadd"), ("linear", "prefix")):
        mine = claims[claims["claim"].str.startswith(law) & claims["claim"].str.contains(method)]
        assert mine["verdict"].tolist() == ["missing", "missing"]


@pytest.fixture
def mine(run, tmp_path):
    """Runs a script on some of the run's cells, as a custom grid."""

    def ask(item, **wanted):
        copy = shutil.copytree(run, tmp_path / "mine", dirs_exist_ok=True)
        opened = load_run(copy)
        cells = opened.cells
        cells = cells[np.all([cells[name].isin(values) for name, values in wanted.items()], axis=0)]
        grids = opened.listing.grids | {"mine": tuple(cells["key"])}
        write_listing(copy, opened.listing.model_copy(update={"grids": grids}))
        script(f"paper/{item}", copy, "--grids", "mine", "--scorers", *QUICK)
        return table(copy / "tables" / f"{item}.claims.csv")

    return ask


@pytest.mark.parametrize("item", ["half", "decay", "components", "prefix_preadd_components"])
def test_a_grid_without_an_items_methods_is_refused(item, mine):
    with pytest.raises(RunError, match=rf"no cells of .* in 'mine' of .*mine; {item} shows"):
        mine(item, method=["negprompt"], arm=["alpha 1 paper"])


@pytest.mark.parametrize(
    ("item", "task", "alphas"),
    [("sent_topic", "sentiment", [0.0, 0.5]), ("detox", "detox", [0.0, 1.0, 1.5])],
)
def test_every_arm_is_compared_with_the_baseline(item, task, alphas, mine, monkeypatch):
    """Each by itself, named in its claim where there are several; at the longest length, so texts
    are scored at no other."""
    monkeypatch.setattr(ItemData, "lengths", lambda *_: ())
    own = {"task": [task], "method": ["prefix", "preadd"], "variant": [""], "law": ["", "log"]}
    claims = mine(item, **own, alpha=alphas)
    for metric in set(claims["metric"]):
        texts = claims[claims["metric"] == metric]["claim"]
        assert len(set(texts)) == len(texts) > 1
        assert all("alpha" in text for text in texts)


def test_a_grid_may_lack_arms_or_have_others(mine):
    """Judged is what is there: no baseline, another alpha, method, wording or number of arms."""
    prefix = {"task": ["sentiment"], "method": ["prefix"], "law": ["", "log"]}
    assert mine("alpha", **prefix, alpha=[0.5, 1.0], layers=["all"], profile=["paper"]).empty
    methods = {"task": ["sentiment"], "method": ["prefix", "con-prefix"], "variant": [""]}
    claims = mine("alpha", **methods, alpha=[0.0, 0.5])
    assert claims["claim"].tolist() == ["alpha 0.5 controls better than 0: prefix, sentiment"]
    worded = {"method": ["prefix"], "variant": ["", "prefix {Attribute}:"]}
    assert mine("hard_prefix_robustness", **worded, arm=["alpha 0.5 paper"]).empty
    claims = mine("hard_prefix_robustness", **worded, task=["sentiment"], alpha=[0.0, 0.25, 0.5])
    assert len(claims) == 2
    banned = mine("hard_prefix_robustness", method=["air-decoding"], variant=["pro_aug=False"])
    assert banned.empty


@pytest.mark.parametrize("item", ["hard_prefix_robustness", "cases"])
def test_a_run_with_nothing_finished_makes_an_empty_table(item, run, tmp_path):
    nothing = shutil.ignore_patterns("000.*", "tables", "scores")
    script(f"paper/{item}", shutil.copytree(run, tmp_path / "new", ignore=nothing))
    assert (tmp_path / "new" / "tables" / f"{item}.md").is_file()


def test_an_item_whose_grid_is_not_there_says_what_to_do(run):
    with pytest.raises(
        RunError,
        match=r"no grid 'related'.*Read one of these.*lapa2 sweep \S*analyses/bases/related.toml --out",
    ):
        script("bases/related", run)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "paper/decay RUN --scorrers accuracy",
            r"unknown option '--scorrers'; allowed: .*did you mean '--scorers'\?",
        ),
        (
            "paper/decay RUN --scorers acuracy",
            r"unknown scorer 'acuracy'; allowed: .*did you mean 'accuracy'\?",
        ),
        (
            "paper/decay RUN --perplexity 0",
            "--perplexity: takes a whole number, at least 1; found '0'",
        ),
        ("paper/decay RUN again", "there is no place for 'again'"),
        (
            "paper/decay RUN --outt x",
            "unknown option '--outt'; allowed: .*did you mean '--out'",
        ),
        ("span/analyse --sample 3", "did you mean '--samples'"),
        (
            "span/analyse --samples 0",
            "--samples: takes a whole number, at least 1; found '0'",
        ),
        (
            "span/analyse --samples 1.5",
            "--samples: takes a whole number, at least 1; found '1.5'",
        ),
        (
            "span/analyse --prompts 16",
            "--prompts: takes a whole number, 2 to 15; found '16'",
        ),
        (
            "span/analyse --perplexity 0",
            "--perplexity: takes a whole number, at least 1",
        ),
        ("span/analyse --length -1", "--length: takes a whole number, at least 1"),
        ("span/analyse --dtype float23", "--dtype: invalid choice: 'float23'"),
        ("tools/reproduce --itms decay", "did you mean '--items'"),
        ("tools/reproduce --scorers acuracy", "unknown scorer 'acuracy'"),
        ("tools/reproduce --workers 0", "--workers: takes a whole number"),
        ("tools/reproduce --no-sweep --grids quick/alpha", "--grids belongs to a sweep"),
        ("tools/reproduce --no-sweep --engine local", "--engine belongs to a sweep"),
        ("chat/analyse --lenght 1000", "did you mean '--length'"),
        ("chat/analyse --chats 20", "--chats: takes a whole number, 1 to 12; found '20'"),
        ("chat/analyse --length 3", "--length: takes a whole number, at least 4; found '3'"),
    ],
)
def test_a_scripts_bad_option_is_one_line_and_exit_code_2(run, capsys, monkeypatch, line, message):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a script puts its own there
    item, *arguments = line.replace("RUN", str(run)).split()
    with pytest.raises(SystemExit) as caught:
        script(item, *arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert re.search(message, printed.err), printed.err


def test_reproduce_hands_on_what_it_is_asked(run, tmp_path, monkeypatch, capsys):
    """What it was not asked the scripts get as they have it; an error of a script is a line, not a
    traceback."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    reports = []
    monkeypatch.setattr(
        "analyses.lab.gallery_page.write_gallery_report",
        lambda *arguments: reports.append(arguments) or SCORES,
    )
    copy = shutil.copytree(run, tmp_path / "copy", ignore=MADE)
    asked = [
        "--no-sweep",
        "--out",
        copy,
        "--items",
        "decay",
        "layers",
        "--scorers",
        "toxicity",
        "perplexity",
    ]
    with pytest.raises(SystemExit) as caught:
        script("tools/reproduce", *asked)
    assert caught.value.code == 1
    printed = capsys.readouterr()
    assert (
        "analyses/paper/decay.py failed:\nerror: decay needs a scorer for accuracy" in printed.err
    )
    assert "Traceback" not in printed.err
    assert len(reports) == 1


def test_a_sweep_that_fails_is_no_success_and_a_refused_one_is_not_scored(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("lapa2_interp.runs.grid.built_in", lambda: ["quick/alpha"])
    monkeypatch.setattr(
        "lapa2_interp.cli.app.main", lambda words: answers[0]() if words[0] == "sweep" else 0
    )
    copy = shutil.copytree(run, tmp_path / "copy", ignore=MADE)
    key = next(iter(load_run(copy).by_key))
    remove_batches(copy / "cells" / key)

    def fails():
        note = Failure(when=datetime.now(UTC), traceback="ValueError: no")
        (copy / "cells" / key / "failed.json").write_text(note.model_dump_json())
        return 2

    for answer, code, goes_on in (
        (fails, 1, True),
        (lambda: 2, 2, False),
        (lambda: 143, 143, False),
    ):
        answers = [answer]
        with pytest.raises(SystemExit) as caught:
            script("tools/reproduce", "--out", copy, "--items", "long")
        assert caught.value.code == code
        assert ("left out" in capsys.readouterr().out) == goes_on


def test_a_grid_is_named_with_its_folder_or_without(run):
    opened = load_run(run)
    name = next(name for name in opened.listing.grids if "/" in name)
    keys = [
        ItemData(opened, "layers", (asked,)).cells["key"].tolist()
        for asked in (name, name.rpartition("/")[2])
    ]
    assert keys[0] == keys[1] != []


def test_a_scale_is_made_in_pieces(run, tmp_path, monkeypatch, capsys):
    """What this run has no grid for is left out, and comes from the results beside it; what it
    makes takes the place of theirs, but for what an item of several grids shows of the others."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("analyses.lab.gallery_page.write_gallery_report", lambda *_: SCORES)
    copy = shutil.copytree(run, tmp_path / "copy", ignore=MADE)
    beside = tmp_path / "beside"
    (beside / "tables").mkdir(parents=True)
    for item in ("decay", "layers"):
        shutil.copy(GOLDEN / f"{item}.claims.csv", beside / "tables" / f"{item}.claims.csv")
        (beside / f"{item}.png").write_text("old")
    (beside / "tables" / "decay.md").write_text("old")
    (beside / "tables" / "verdicts.md").write_text("old")
    older = gallery_run(load_run(copy), GOLDEN, ["decay", "layers"])
    assert gallery_run(load_run(copy), GOLDEN, []).scorers == ()
    others = {"quick/decay": {"finished": 3}, "long": {"finished": 4}}
    runs = (older, older.model_copy(update={"grids": others}))
    (beside / "results.json").write_text(Gallery(runs=runs).model_dump_json())
    row = {"model": "m", "task": "another", "method": "prefix", "prefix": "Very other:"}
    rows_beside, none = pd.DataFrame([row]), ItemClaims("prefix_types")
    write_item(beside, "prefix_types", "Title", rows_beside, none, formatted=rows_beside)
    items = ["decay", "long", "prefix_types"]
    asked = ["--no-sweep", "--out", copy, "--items", *items, "--beside", beside]
    with pytest.raises(SystemExit) as caught:
        script("tools/reproduce", *asked)
    assert caught.value.code == 0
    assert "left out, as the run has no grid of theirs: long" in capsys.readouterr().out
    claims = read_claims(copy / "tables" / "verdicts.csv")
    assert set(claims["item"]) == {"decay", "layers"}
    assert (copy / "tables" / "decay.md").read_text().startswith("### Accuracy")
    assert (copy / "figures" / "layers.png").read_text() == "old"
    prefixes = pd.read_csv(copy / "tables" / "prefix_types.csv")
    assert set(prefixes["task"]) == {*load_run(copy).cells["task"], "another"}
    assert (copy / "figures" / "decay.png").read_bytes().startswith(b"\x89PNG")
    gallery = read_gallery(copy)
    assert [set(older_run.grids) for older_run in gallery.runs] == [set(older.grids), set(others)]
    newer = (beside / "tables" / "layers.claims.csv").read_text().replace("layers,", "newer,")
    (beside / "tables" / "layers.claims.csv").write_text(newer)
    (beside / "tables" / "decay.md").write_text("old")
    with pytest.raises(SystemExit):
        script("tools/reproduce", *asked)
    assert (copy / "tables" / "layers.claims.csv").read_text() == newer, "a newer one is taken"
    assert (copy / "tables" / "decay.md").read_text().startswith("### Accuracy"), "its own stays"
    (beside / "results.json").write_text("{}")
    with pytest.raises(RunError, match="results.json cannot be read: .*make gallery"):
        script("tools/reproduce", *asked)
    (beside / "results.json").unlink()
    (beside / "tables" / "layers.claims.csv").write_text("item\nlayers\n")
    with pytest.raises(RunError, match="layers.claims.csv is not a table of claims of this"):
        script("tools/reproduce", *asked)


def test_an_item_joined_from_two_runs_is_the_item_made_at_once(tmp_path):
    """Rows of one task from each; Holm's correction is over the claims of both. What both runs have
    is this run's, and no row is kept twice."""

    def make(folder, *tasks, worth=1.0):
        rows = [
            {"step": 4, "mean": worth, "model": "m", "task": task, "method": method}
            for task in tasks
            for method in ("one", "two")
        ]
        claims_of_item = ItemClaims("item", ("a", "b"))
        for number, row in enumerate(rows):
            error = 1 + ("topic", "detox").index(row["task"]) + number % 2
            of = Difference(6.0, 6 - 2 * error, 6 + 2 * error, 0.01 * error, error, 20, 4.0, 0.6)
            claims_of_item.add_difference(
                f"{row['task']}, {row['method']}", "acc", "more", of, margin=5.0
            )
        table = pd.DataFrame(rows)
        shown = table[["task", "method"]].assign(**{f"step {4 * len(tasks)}": table["mean"]})
        alike = [name for name in ("task", "method") if shown[name].nunique() == 1]
        write_item(
            folder, "item", "Title", table, claims_of_item, ["A note."], shown.drop(columns=alike)
        )
        return folder / "tables"

    def text(folder, ending):
        return (folder / f"item.{ending}").read_text()

    at_once = make(tmp_path / "whole", "topic", "detox")
    here, there = make(tmp_path / "a", "topic"), make(tmp_path / "b", "detox")
    assert read_claims(here / "item.claims.csv")["holm"].max() < 0.05
    assert merge_item("item", there, here)
    assert text(here, "csv") == text(at_once, "csv")
    assert text(here, "claims.csv") == text(at_once, "claims.csv")
    assert read_claims(here / "item.claims.csv")["holm"].max() >= 0.05
    assert text(here, "md") == text(at_once, "md").replace("step 8", "step 4")
    assert json.loads(text(here, "json"))["rows"]["data"][2][:2] == ["detox", "one"]
    again = make(tmp_path / "c", "topic", "detox", worth=2.0)
    known = text(again, "csv")
    assert not merge_item("item", here, again)
    assert text(again, "csv") == known
    assert not merge_item("other", here, again)


def test_a_damaged_table_says_how_it_is_mended(run, tmp_path):
    (tmp_path / "tables").mkdir()
    for damage, message in (
        (b"\xff\xfe\x00", r"cannot read .*decay\.csv .*"),
        (b"metric\nacc\n", r"decay\.csv has no column .*"),
    ):
        (tmp_path / "tables" / "decay.csv").write_bytes(damage)
        with pytest.raises(RunError, match=message + "; leave out --draw, and it is made again"):
            redraw("paper/decay", run, "--out", tmp_path)


# --- the paper's numbers


def test_the_papers_numbers_parse():
    numbers = reported.reported_numbers()
    assert len(numbers) == 1172
    assert numbers["value"].notna().all()
    assert set(numbers["table"]) == {
        "sent_topic",
        "detox",
        "half",
        "scaling",
        "layers",
        "components",
        "hard_prefix",
    }
    for expected, where in (
        (94.27, {"table": "sent_topic", "task": "sentiment", "method": "air-decoding", "lapa2": True, "length": 512,
                 "metric": "acc"}),
        (32.64, {"table": "detox", "model": "llama-2-13b", "method": "negprompt", "lapa2": True, "length": 128, "metric": "tox"}),
        (74.93, {"table": "half", "task": "sentiment", "length": 512, "variant": "second", "metric": "acc"}),
        (377.16, {"table": "scaling", "method": "air-decoding", "variant": "linear", "metric": "ppl"}),
        (26.37, {"table": "layers", "method": "preadd", "variant": "bottom half", "metric": "tox"}),
        (74.69, {"table": "components", "method": "preadd", "variant": "pre+pro", "metric": "ppl"}),
        (80.67, {"table": "hard_prefix", "method": "air-decoding", "variant": "A positive text:", "lapa2": True,
                 "metric": "acc"}),
    ):  # fmt: skip
        assert reported.paper_number(**where) == expected
    assert np.isnan(reported.paper_number("half", length=64))


def test_the_papers_number_stands_beside_a_cell_of_its_setting(printed, monkeypatch):
    """SmolLM2 at 48 tokens: beside it GPT-2 medium at 256, the only model and length of the table,
    both named. A difference is shown only for the paper's own model and scorer."""
    made = printed("layers")["table"]
    by_arm = tables.rows_of_all_attributes(made[made["task"] == "sentiment"]).set_index(
        ["method", "arm", "metric"]
    )
    number = by_arm["paper"]
    assert number["prefix", "baseline", "acc"] == 68.13
    assert number["prefix", "alpha 0.5 paper, layers even", "ppl"] == 30.19
    assert number["air-decoding", "alpha 0.5 paper", "dist3"] == 0.82
    assert np.isnan(number["prefix", "alpha 0.5 paper, layers odd", "acc"])  # the paper has no odd
    assert set(by_arm["paper_of"]) == {"", "gpt2-medium, 256 tokens"}
    assert "sentiment: gpt2-medium, 256 tokens" in tables.footnotes(made)[-1]
    monkeypatch.setitem(tables.PAPER_SCORERS, "acc", "adapter")
    assert "68.1" in tables.format_item_table(made)["paper acc"].tolist()  # another model
    monkeypatch.setitem(reported.PAPER_MODELS, "smollm2-135m", "gpt2-medium")
    shown = tables.format_item_table(made)
    assert shown["paper acc"].str.contains(r"68\.1 \([+-]\d").any()
    monkeypatch.undo()
    assert "68.1" in tables.format_item_table(made)["paper acc"].tolist()


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (("sent_topic", "topic", "prefix", "smollm2-135m", 128), ("gpt2-medium", 128)),
        (("sent_topic", "topic", "prefix", "smollm2-135m", 32), None),  # five lengths, but no 32
        (("detox", "detox", "preadd", "EleutherAI/pythia-12b", 512), ("pythia-12b", 512)),
        (("components", "detox", "preadd", "smollm2-135m", 64), ("llama-2-7b", 256)),
        (("components", "topic", "prefix", "smollm2-135m", 64), None),  # no such method
        (("related", "topic", "prefix", "smollm2-135m", 64), None),  # no such table
    ],
)
def test_the_place_of_the_papers_number(where, expected):
    assert reported.paper_place(*where) == expected


# --- verdicts and best cells


@pytest.mark.parametrize(
    ("expected", "low", "high", "verdict"),
    [
        ("more", 0.1, 2.0, "as in the paper"),
        ("more", -0.1, 2.0, "inconclusive"),
        ("more", -2.0, -0.1, "against the paper"),
        ("less", -2.0, -0.1, "as in the paper"),
        ("less", 0.1, 0.2, "against the paper"),
        ("less", np.nan, np.nan, "inconclusive"),
        ("same", -0.4, 0.4, "as in the paper"),
        ("same", -0.4, 0.6, "inconclusive"),
        ("same", 0.6, 0.7, "against the paper"),
    ],
)
def test_a_verdict_is_about_the_whole_interval(expected, low, high, verdict):
    assert Claim("", "", expected, 0.5 * (expected == "same")).verdict(low, high) == verdict


def test_a_claim_is_judged_by_the_second_scorer_too():
    """The first scorer sees a gain; the second sees it, a loss, or nothing."""
    first = scores({"baseline": 0, "a": 5})
    sides = {"arm": "baseline"}, {"arm": "a"}
    for gain, verdict in ((5, "as in the paper"), (-5, "against the paper"), (0, "no difference")):
        second = scores({"baseline": 0, "a": gain}).assign(metric="acc (linear)")
        claims = ItemClaims("item")
        claims.add_claim("more", pd.concat([first, second]), *sides, "acc", "more", paper=1.0)
        (row,) = claims.rows
        assert (row.verdict, row.second, row.second_verdict) == (
            "as in the paper",
            "linear",
            verdict,
        )
        assert row.second_low < gain < row.second_high or gain == 5
        alone = ItemClaims("item")
        alone.add_claim("more", second.assign(metric="acc"), *sides, "acc", "more")
        (alone_row,) = alone.rows
        assert (row.second_here, row.second_low) == (alone_row.here, alone_row.low)
    table = pd.concat([claims.frame(), alone.frame()])
    shown = format_claims(table)
    assert shown["second scorer"].tolist()[0].startswith("≠ linear: no difference (")
    assert shown["second scorer"].tolist()[1] == ""
    assert summarize_disagreement(table).startswith(
        "Of 1 claim with two scorers, 1 have another verdict by the"
    )


def noted(*differences, margin=0.0, expected="more", compared=None, whose="paper"):
    """Claims with (mean, standard error, p) over 30 prompts."""
    claims = ItemClaims("item")
    for number, (mean, error, p) in enumerate(differences):
        of = Difference(mean, mean - 2.1 * error, mean + 2.1 * error, p, error, 30, 2.0, 0.5)
        key = "" if compared is None else compared[number]
        more = {"compared": key, "whose": whose}
        claims.add_difference(f"claim {number}", "acc", expected, of, margin=margin, **more)
    return claims.frame()


def test_a_comparison_is_identified_by_its_texts_and_its_margin():
    both = scores({"baseline": 0, "a": 5}).assign(length=8, part=0)
    both["cell"] = both["arm"]
    claims = ItemClaims("item")

    def ask(texts, margin=1.0):
        claims.add_claim(
            "a", texts, {"arm": "baseline"}, {"arm": "a"}, "acc", "same", margin=margin
        )

    first = list(dict.fromkeys(both["prompt"]))[:6]
    for texts in (both, both.sample(frac=1, random_state=0), both[both["prompt"].isin(first)]):
        ask(texts)
    ask(both, margin=9.0)
    keys = claims.frame()["compared"]
    assert keys[0] == keys[1]
    assert keys[1:].nunique() == 3


def test_verdicts_are_corrected_for_the_number_of_an_items_claims():
    sure, likely, chance = (3.0, 0.5, 0.001), (3.0, 1.2, 0.02), (-2.0, 0.9, 0.04)
    alone = [noted(change)["verdict"].item() for change in (sure, likely, chance)]
    assert alone == ["as in the paper", "as in the paper", "against the paper"]
    table = noted(sure, likely, chance)
    assert table["holm"].tolist() == pytest.approx([0.003, 0.04, 0.04])
    assert table["verdict"].tolist() == alone
    more = noted(sure, likely, chance, (1.0, 2.0, 0.6))
    assert more["holm"].tolist() == pytest.approx([0.004, 0.06, 0.08, 0.6])
    assert more["verdict"].tolist() == ["as in the paper", *["inconclusive"] * 3]
    assert more["raw"].tolist() == [*alone, "inconclusive"]
    again = noted(sure, likely, chance, sure, compared=["a", "b", "c", "a"])
    assert again["holm"].tolist() == pytest.approx([0.003, 0.04, 0.04, 0.003]), "tested once"
    assert count_verdicts(again) == "2 as in the paper, 1 against the paper"
    assert unique_comparisons(again).index.tolist() == [0, 1, 2]
    missing = ItemClaims("item")
    missing.add_difference("one", "acc", "more", None)
    assert missing.frame()["verdict"].tolist() == ["missing"]
    assert ItemClaims("item").frame().empty


def test_a_difference_too_small_to_matter_is_a_verdict():
    """t of 2 errors below the margin, two one-sided tests; the sign, where known, goes first."""
    small, unsure = noted((0.2, 0.4, 0.6), (0.2, 3.0, 0.9), margin=1.5).to_dict("records")
    assert (small["raw"], unsure["raw"]) == ("no difference", "inconclusive")
    assert small["p_within"] == pytest.approx(t.sf(1.3 / 0.4, 29))
    assert noted((0.2, 0.4, 0.6))["raw"].item() == "inconclusive", "without a margin"
    assert noted((1.0, 0.1, 0.001), margin=1.5)["raw"].item() == "as in the paper"
    same = noted((0.2, 0.4, 0.6), (3.0, 0.4, 0.001), margin=1.5, expected="same")
    assert same["raw"].tolist() == ["as in the paper", "against the paper"]
    assert same["p_within"].iloc[0] == pytest.approx(t.sf(1.3 / 0.4, 29))
    assert same["p"].iloc[1] == pytest.approx(2 * t.sf(1.5 / 0.4, 29))
    assert deciding_p_values(same)["p"].tolist() == [same["p_within"].iloc[0], same["p"].iloc[1]]


def test_what_we_expect_is_no_claim_of_the_paper(tmp_path):
    """It has other words, is tested alike, and is kept apart; what both compare counts in each."""
    differences = (3.0, 0.5, 0.001), (-3.0, 0.5, 0.001), (0.0, 9.0, 0.9)
    paper, ours = (noted(*differences, whose=whose, compared="abc") for whose in ("paper", "ours"))
    assert ours["verdict"].tolist() == ["as expected", "against what was expected", "inconclusive"]
    assert ours["raw"].tolist() == ours["verdict"].tolist()
    assert ours["holm"].tolist() == paper["holm"].tolist()
    same = noted((0.2, 0.4, 0.6), margin=1.5, expected="same", whose="ours")
    assert same["verdict"].item() == "as expected"
    assert deciding_p_values(same)["p"].item() == same["p_within"].item()
    reproduce = runpy.run_path(str(ROOT / "analyses" / "tools/reproduce.py"))
    for item, table in (("half", paper), ("heads", ours)):
        table.assign(item=item).to_csv(tmp_path / f"{item}.claims.csv", index=False)
    assert len(unique_comparisons(reproduce["collect_verdicts"](tmp_path))) == 6
    text = (tmp_path / "verdicts.md").read_text("utf-8")
    first, second = text.split("### Ours, not the paper's")
    assert first.startswith("### The paper's claims")
    assert "\n1 as in the paper, 1 against the paper, 1 inconclusive. 95 %" in first
    assert "\n1 as expected, 1 against what was expected, 1 inconclusive. 95 %" in second
    (tmp_path / "half.claims.csv").unlink()
    reproduce["collect_verdicts"](tmp_path)
    assert (tmp_path / "verdicts.md").read_text("utf-8").startswith("### Ours")


def test_claims_of_the_paper_and_ours_are_corrected_apart():
    """What we expect besides does not change a verdict on the paper, nor the other way round."""
    made = ItemClaims("item")
    of = Difference(3.0, 0.5, 5.5, 0.02, 1.2, 30, 2.0, 0.5)
    for number, whose in enumerate(["paper", "ours", "ours", "paper", "ours"]):
        key = "shared" if number < 2 else f"{number}"
        made.add_difference(f"{number}", "acc", "more", of, margin=5.0, compared=key, whose=whose)
    table = made.frame()
    assert table["holm"].tolist() == pytest.approx([0.04, 0.06, 0.06, 0.04, 0.06])
    small = of.p_within(5.0)
    assert table["holm_within"].tolist() == pytest.approx(np.array([2, 3, 3, 2, 3]) * small)


def test_claims_without_a_margin_are_no_tests_of_smallness():
    made = ItemClaims("item")
    of = Difference(0.2, -0.6, 1.0, 0.6, 0.4, 30, 2.0, 0.5)
    for number, margin in enumerate([1.5, 0.0, 0.0, 1.5]):
        made.add_difference(f"{number}", "acc", "more", of, margin=margin, compared=f"{number}")
    small = of.p_within(1.5)
    assert made.frame()["holm_within"].tolist() == pytest.approx(
        [2 * small, np.nan, np.nan, 2 * small], nan_ok=True
    )


def test_a_sign_that_correction_takes_back_leaves_that_the_difference_is_small():
    """Eight claims: one has an interval above 0, p of .04, and lies far inside the margin."""
    table = noted((0.45, 0.2, 0.04), *[(0.0, 0.2, 0.9)] * 7, margin=5.0)
    assert table["raw"].iloc[0] == "as in the paper"
    assert table["holm"].iloc[0] == pytest.approx(0.32)
    assert set(table["verdict"]) == {"no difference"}
    wide = noted((4.5, 2.0, 0.04), *[(0.0, 0.2, 0.9)] * 7, margin=5.0)
    assert wide["verdict"].iloc[0] == "inconclusive"


def test_the_same_and_no_difference_are_one_test():
    """A mean of 0 whose error is just small enough: t of the margin is 1.8, its p below .05 though
    the 95 % interval is wider than the margin."""
    more, same = (
        noted((0.0, 1.0, 0.9), margin=1.8, expected=relation) for relation in ("more", "same")
    )
    assert more["p_within"].item() == same["p_within"].item() < 0.05
    assert (more["raw"].item(), same["raw"].item()) == ("no difference", "as in the paper")


def test_both_families_of_tests_err_at_their_rate():
    """Six true differences of 0, and six as large as the margin: the share of items with any wrong
    sign, or any wrong "no difference", is at most 5 % (400 items: three standard errors more)."""
    rng = np.random.default_rng(0)
    wrong = np.zeros(2)
    for _ in range(400):
        claims = ItemClaims("item")
        for number in range(12):
            truth = 0.0 if number < 6 else 3.0
            gaps = rng.normal(truth, 5.0, 30)
            names = np.arange(30)
            of = paired_difference(np.zeros(30), names, gaps, names, resamples=1000)
            claims.add_difference(f"{number}", "acc", "more", of, margin=3.0)
        table = claims.frame()
        wrong += [
            table["verdict"][:6].isin(["as in the paper", "against the paper"]).any(),
            (table["verdict"][6:] == "no difference").any(),
        ]
    assert (wrong / 400 < 0.05 + 3 * 0.011).all()


def test_a_comparison_of_several_items_has_the_verdict_of_the_strictest():
    """One of two items has more claims, so its correction is larger."""
    sure = (3.0, 1.2, 0.02)
    few, many = noted(sure, compared=["a"]), noted(sure, *[(0.0, 2.0, 0.9)] * 3, compared="abcd")
    for order in ([few, many], [many, few]):
        both = pd.concat(order, ignore_index=True)
        assert set(both["verdict"][both["compared"] == "a"]) == {"as in the paper", "inconclusive"}
        assert count_verdicts(both) == "4 inconclusive"
        assert len(unique_comparisons(both)) == 4


def test_attention_is_compared_at_the_steps_that_both_arms_have():
    """Both decay alike; one arm ends early, at steps of more attention."""

    def decaying(steps):
        shape = (1, 9, steps, 1, 1)
        values = np.broadcast_to(1 / (np.arange(steps)[:, None, None] + 10), shape)
        values = values * np.linspace(0.9, 1.1, 9)[:, None, None, None]
        return xr.Dataset({"prefix": (("branch", "sample", "step", "layer", "head"), values)})

    where = {"model": "m", "task": "topic", "method": "prefix", "variant": ""}
    texts, added = pd.DataFrame({"prompt": [f"p{i}" for i in range(9)]}), []
    fake = SimpleNamespace(
        step_curves=lambda *_: pd.DataFrame(
            [dict.fromkeys(ARM_COLUMNS, "m") | {"step": 0, "mean": 0.1, "low": 0.1, "high": 0.1}]
        ),
        groups=lambda _: [(where, "prefix, topic", None)],
        arm_traces=lambda _: [
            (where | {"arm": arm}, decaying(steps), texts)
            for arm, steps in (("baseline", 40), ("b", 12), ("a", 40))
        ],
        add_difference=lambda *arguments: added.append(arguments),
    )
    fake.data = fake
    ItemTables.attention_table(fake, pd.DataFrame())
    assert [arguments[3].mean for arguments in added] == [0, 0, 0, 0]
    steps = [arguments[0].split("step ")[1] for arguments in added[1::2]]
    assert steps == ["11: prefix, topic, b", "39: prefix, topic, a"], "arms in their order"


def test_perplexity_reads_as_many_texts_of_an_arm_as_planned(run):
    """An arm with few prompts reads more texts of each, whatever the others have."""
    opened = load_run(run)
    texts = pd.concat(
        [
            pd.DataFrame({"sample": range(n)}).assign(prompt=f"p{i}", arm=arm, attribute="positive")
            for arm, prompts, n in (("a", 60, 4), ("b", 6, 40))
            for i in range(prompts)
        ]
    ).assign(model="m", task="sentiment", method="prefix", variant="")
    read = ItemData(opened, "item", (), perplexity_texts=120)._perplexity_rows(texts)
    assert read["arm"].value_counts().to_dict() == {"a": 120, "b": 120}
    assert perplexity_texts(60, 240.0) == perplexity_texts(6, 240.0) == 120
    assert (
        ItemData(opened, "item", (), perplexity_texts=1)._perplexity_rows(texts)["sample"].max()
        == 0
    )


def test_a_scorer_may_be_for_one_task_alone(run):
    asked = expand_scorers(
        ["topic:accuracy=mine", "sentiment:accuracy", "linear", "perplexity"], ()
    )
    assert asked == ("topic:accuracy=mine", "sentiment:accuracy=linear", "perplexity")
    data = ItemData(load_run(run), "item", (), asked)
    assert data._scorers_by_metric("topic", None)["accuracy"] == ["accuracy=mine"]
    assert data._scorers_by_metric("sentiment", None)["accuracy"] == ["accuracy=linear"]
    with pytest.raises(ScoringError, match="needs a scorer for toxicity of detox"):
        data._scorers_by_metric("detox", None)


def test_what_several_items_compare_has_one_name():
    """Of the same texts, metric and direction; another length or scorer is another comparison."""
    texts = scores({"baseline": 0, "a": 5}).assign(cell=lambda table: table["arm"] + " cell")
    names = []
    for table, expected in (
        (texts, "more"),
        (texts.sample(frac=1, random_state=0), "more"),
        (texts, "less"),
        (texts.assign(length=32), "more"),
    ):
        claims = ItemClaims("item", ("grid",))
        claims.add_claim("text", table, {"arm": "baseline"}, {"arm": "a"}, "acc", expected)
        (row,) = claims.rows
        assert (row.task, row.method, row.scorer, row.grids) == ("sentiment", "prefix", "s", "grid")
        assert (row.margin, row.texts) == (5, 1)
        names.append(row.compared)
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_claims_without_texts_are_separate_claims():
    """An arm that is not finished: its claims are missing, and the others are corrected for them."""
    texts = scores({"baseline": 0, "a": 5}).assign(cell=lambda table: table["arm"] + " cell")
    item_claims = ItemClaims("item")
    for arm in ("a", "b", "c", "d"):
        item_claims.add_claim("text", texts, {"arm": "baseline"}, {"arm": arm}, "acc", "more")
    claims = item_claims.frame()
    assert claims["compared"].tolist()[1:] == ["", "", ""]
    assert claims["holm"][0] == pytest.approx(4 * claims["p"][0])
    assert count_verdicts(claims) == "1 as in the paper, 3 missing"
    assert len(unique_comparisons(claims)) == 4


def test_samples_of_one_number_are_compared_as_what_they_are():
    """The same texts at two lengths: what they share is no noise that more texts would lower."""
    rng = np.random.default_rng(0)
    labels = {"prompt": [f"p{i // 4}" for i in range(200)], "sample": [i % 4 for i in range(200)]}
    first = rng.normal(size=200)
    one, two = (pd.DataFrame({**labels, "value": first + shift}) for shift in (0, 1))
    two["value"] += rng.normal(0, 0.1, 200)
    alone = [arm.drop(columns="sample") for arm in (one, two)]
    by_number, apart = paired_change(one, two.sample(frac=1, random_state=0)), paired_change(*alone)
    assert by_number.error == pytest.approx(apart.error)
    assert (apart.noise, by_number.texts) == (1, 4)
    noise = (two["value"] - one["value"]).groupby(labels["prompt"]).var().mean() / 4
    assert by_number.noise == pytest.approx(min(1, noise / (50 * by_number.error**2)))


def test_a_cell_is_read_at_its_own_length_too(run):
    """Lengths are shares of the longest cell; a shorter one may have a length between them."""
    data = ItemData(load_run(run), "alpha", ("alpha",), ("accuracy=linear",))
    cells = data.cells[data.cells["method"] == "prefix"]
    own = set(cells["max_length"])
    scored = data.scores(cells, (8, max(own) + 8), metrics=("accuracy",))
    assert set(scored["length"]) == {8, *own}


def test_attention_stands_beside_the_arm_of_its_variant(monkeypatch):
    """Two variants of one arm, with scores and attention of their own; a third has none yet."""
    made = pd.concat(
        [scores({"baseline": 10 * i}).assign(variant=f"v{i}") for i in range(3)], ignore_index=True
    )
    cells = made.drop_duplicates("variant").assign(
        state=["finished", "finished", "missing"],
        profile="",
        alpha=0.0,
        max_length=64,
        key=list("abc"),
    )
    masses = {"v0": 0.25, "v1": 0.5}

    class Fake:
        table = staticmethod(functools.partial(tables.item_table, "item"))

        def arm_traces(self, of):
            for variant, mass in masses.items():
                arm = dict(
                    zip(ARM_COLUMNS, ("m", "sentiment", "prefix", variant, "baseline"), strict=True)
                )
                yield arm, mass, pd.DataFrame({"prompt": list("pq")})

    fake = Fake()
    fake.data = fake
    fake.cells = cells
    monkeypatch.setattr("analyses.lab.items.pooled", lambda mass, name: np.full((1, 2, 3), mass))
    first_variants = made[made["variant"] != "v2"]
    _, shown = ItemTables.table_with_attention(fake, cells, first_variants, {"prefix": "attention"})
    assert shown["attention"].tolist() == ["0.250 [0.250, 0.250]", "0.500 [0.500, 0.500]", ""]


def test_texts_that_one_arm_lacks_move_no_claim():
    """Texts of one attribute are better than those of the other, and the same in both arms."""
    values = {"positive": 90.0, "negative": 10.0}
    full = pd.DataFrame(
        [
            {"arm": arm, "prompt": f"p{i}", "attribute": name, "metric": "acc", "value": value + i}
            for arm in ("baseline", "a")
            for i in range(10)
            for name, value in values.items()
        ]
    )
    less = full[
        (full["arm"] == "baseline") | (full["attribute"] == "positive") | (full["prompt"] < "p5")
    ]
    easier = full[(full["arm"] == "a") & (full["attribute"] == "positive")]
    more = pd.concat([full, easier, easier], ignore_index=True)  # they weigh no more
    for texts in (full, less, more):
        change = compare_arms(texts, {"arm": "baseline"}, {"arm": "a"}, "acc")
        assert (change.mean, change.low, change.high, change.clusters) == (0, 0, 0, 10)
    alone = full[(full["arm"] == "baseline") == (full["attribute"] == "positive")]
    assert compare_arms(alone, {"arm": "baseline"}, {"arm": "a"}, "acc") is None


def test_claims_read_back_as_they_were(tmp_path):
    claims = ItemClaims("item")
    for metric in ("acc", "ppl"):
        both = pd.concat(
            [
                scores({"baseline": 0, "a": 5}),
                scores({"baseline": 0, "a": 5}).assign(metric="acc (linear)"),
            ]
        )
        claims.add_claim("more", both, {"arm": "baseline"}, {"arm": "a"}, metric, "more")
    claims.frame().to_csv(tmp_path / "item.claims.csv", index=False)
    again = read_claims(tmp_path / "item.claims.csv")
    pd.testing.assert_frame_equal(again, claims.frame(), check_dtype=False)
    assert again["second"].tolist() == ["linear", ""]
    assert again["verdict"].tolist()[1] == "missing"


def scores(gains, prompts=12):
    """Texts whose accuracy under each arm is 50 plus its gain plus noise that arms share."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 10, prompts)
    frames = [
        pd.DataFrame(
            {"model": "m", "task": "sentiment", "method": "prefix", "variant": "", "arm": arm, "length": 64, "part": 0,
             "attribute": "positive", "prompt": [f"p{i}" for i in range(prompts)], "text": "some words of a text",
             "metric": "acc", "value": 50 + gain + noise + rng.normal(0, 1, prompts), "reason": "", "scorer": "s"}
        )
        for arm, gain in gains.items()
    ]  # fmt: skip
    return pd.concat(frames, ignore_index=True)


@pytest.mark.parametrize(
    ("gains", "best"),
    [
        ({"baseline": 0, "a": 5}, "a"),
        ({"baseline": 0, "a": -5}, "baseline"),
        ({"baseline": 0, "a": 0.1}, None),
        (
            {"baseline": 0, "a": 5, "b": 5.1},
            None,
        ),  # two good arms that do not differ significantly: neither is the best
        ({"baseline": 0, "a": 5, "b": 9}, "b"),
    ],
)
def test_best_is_marked_only_when_the_interval_says_so(gains, best, run):
    texts = scores(gains)
    cells = pd.DataFrame(
        {"model": "m", "task": "sentiment", "method": "prefix", "variant": "", "arm": list(gains), "attribute": "positive",
         "state": "finished", "profile": "", "alpha": 0.0, "max_length": 64}
    )  # fmt: skip
    bench = ItemTables(ItemData(load_run(run), "scaling", ("scaling",)), "", run)
    scored = bench.table(texts, cells)
    marked = scored[scored["best"] & (scored["metric"] == "acc")]["arm"].tolist()
    assert marked == ([best] if best else [])
    assert ("**" in "".join(tables.format_item_table(scored)["acc"])) == (best is not None)


def test_best_compares_texts_of_attributes_that_both_arms_have():
    """Two arms alike; one has no number for the harder attribute at most of its prompts."""
    easy = scores({"a": 0, "b": 0})
    hard = easy.assign(attribute="negative", value=easy["value"] - 30)
    hard.loc[(hard["arm"] == "b") & (hard["prompt"] > "p1"), "value"] = np.nan
    both = pd.concat([easy, hard], ignore_index=True)
    cells = both.drop_duplicates(["arm", "attribute"]).assign(
        state="finished", profile="", alpha=0.0, max_length=64
    )
    scored = tables.item_table("scaling", both, cells)
    means = scored[(scored["attribute"] == "all") & (scored["metric"] == "acc")].set_index("arm")
    assert means.loc["b", "mean"] > means.loc["a", "mean"] + 10
    assert not scored["best"].any()


@pytest.mark.parametrize(
    ("apart", "values"), [("dtype", ["float32", "float64"]), ("max_length", [64, 128])]
)
def test_rows_that_differ_only_in_precision_or_length_are_not_multiplied(apart, values):
    texts = pd.concat(scores({"baseline": i, "a": i + 5}).assign(**{apart: value})
                      for i, value in enumerate(values))  # fmt: skip
    cells = texts.drop_duplicates(["arm"]).assign(state="finished", profile="", alpha=0.0)
    made = tables.item_table("item", texts, cells)
    of_acc = made[(made["metric"] == "acc")]
    assert sorted(zip(of_acc["arm"], of_acc[apart], strict=True)) == [
        (arm, value) for arm in ("a", "baseline") for value in values
    ]
    assert len(tables.format_item_table(made)) == 4
    assert len(of_acc["mean"].unique()) == 4
    assert apart not in tables.item_table("item", texts[texts[apart] == values[0]], cells)


@pytest.mark.parametrize(
    ("variant", "parts"),
    [
        ("", ("", "")),
        ("omega=60.0, prefix A, {attribute}:", ("omega=60.0, prefix A, {attribute}:", "")),
        ("prefix words banned, eos block", ("prefix words banned", "eos block")),
        ("top-k 50, BOS doubled", ("", "top-k 50, BOS doubled")),
    ],
)
def test_a_variant_has_two_parts(variant, parts):
    assert tables.split_variant(variant) == parts


def test_claims_keep_variants_apart(run):
    """Texts drawn in another way are no more texts of the same arm."""
    data = ItemData(load_run(run), "scaling", ("scaling",))
    cells = data.cells[data.cells["task"] == "sentiment"]
    narrowed = cells[cells["method"] == "prefix"].assign(variant="top-k 50")
    both = pd.concat([cells, narrowed], ignore_index=True)
    groups = {words: (where["variant"], len(group)) for where, words, group in data.groups(both)}
    n = len(narrowed)
    assert n
    assert groups["prefix, sentiment"] == ("", n)
    assert groups["prefix, sentiment, top-k 50"] == ("top-k 50", n)
    assert len(groups) == cells["method"].nunique() + 1
    alone = {words for _, words, _ in data.groups(narrowed)}
    assert alone == {"prefix, sentiment"}, "what all have needs no words"


def test_a_variant_without_a_parameter():
    assert (
        tables.drop_parameter("omega=60.0, pro_aug=True, top-k 50", "pro_aug")
        == "omega=60.0, top-k 50"
    )
    assert tables.drop_parameter("pro_aug=False", "pro_aug") == ""


def test_tables_survive_hostile_text():
    shown = pd.DataFrame({"a|b": ["x & y_z", "50% | **5** {~^\\}"]})
    markdown, latex = (
        output.as_markdown("T", shown, ["n"]),
        output.as_latex("T_1", shown, ["n & m"], "t"),
    )
    assert markdown.count("\\|") == 1
    assert r"x \& y\_z" in latex
    assert r"\textbf{5}" in latex
    assert r"\caption{T\_1}" in latex


@pytest.mark.slow
def test_a_notebook_executes(run, tmp_path, monkeypatch):
    import jupytext
    import nbclient

    monkeypatch.setenv("LAPA2_RUN", str(run))
    for file in (ROOT / "analyses" / "paper").glob("*.py"):
        if file.stem != "perplexity_ratios":
            kinds = [cell.cell_type for cell in jupytext.read(file).cells][:2]
            assert kinds == ["markdown", "code"], file
    book = jupytext.read(ROOT / "analyses" / "paper/decay.py")
    nbclient.NotebookClient(
        book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in book.cells for output in cell.get("outputs", [])
    )
    assert "Accuracy of the base methods against length" in printed


def make_tables(out, known=SCORES, asked=()):
    """Run all scripts on the stored run, with the scores of a file where it has them; put their
    tables into a folder. Returns the scores with the keys in `asked`."""
    with tempfile.TemporaryDirectory() as folder:
        stored = stored_run(Path(folder), known)
        for item in ITEMS:
            script(f"paper/{item}", stored)
            for made in (stored / "tables").glob(f"{item}.*csv"):
                shutil.copy(made, out)
        with ScoreCache(stored / "scores") as scores:
            return scores.get(sorted(asked))


def write_golden():
    """Write the golden tables, and the scores that the scripts asked models for."""
    asked = set()

    def key_of(self, item, key):
        score_key = key(self, item)
        if not self.version.startswith("linear"):  # those are not stored
            asked.add(score_key)
        return score_key

    for scorer in (*MODELS, ToxicityScorer):
        scorer.key = functools.partialmethod(key_of, key=scorer.key)
    known = make_tables(GOLDEN, None, asked)
    rows = [
        (key, "", score.reason) if isinstance(score, SkippedText) else (key, shortened(score), "")
        for key, score in sorted(known.items())
    ]
    pd.DataFrame(rows, columns=["key", "values", "skipped"]).to_csv(SCORES, index=False)


if __name__ == "__main__":
    write_golden()
