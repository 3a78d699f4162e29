"""`lapa2 propositions` end to end on a small model, and what its folder holds."""

import json

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from conftest import MODEL_CLASSES, load
from families import save_family

from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layout import Layout
from lapa2_interp.cli.app import main
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models.facts import TransformersModel, is_fused
from lapa2_interp.propositions import drawings as proposition_plots
from lapa2_interp.propositions.study import (
    _above_zero,
    _load_long_reader,
    draw_figures,
    run_proposition_study,
)
from lapa2_interp.runs.run import load_run

pytestmark = pytest.mark.usefixtures("without_ink")

FORCED = {"tiny-llama, the same texts", "tiny-llama, 3 x 100 tokens of book.txt"}
SMALL = ["--model", "tiny-llama", "--length", "36", "--synthetic-length", "1000"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("study")
    (where / "book.txt").write_text("It was a long way to the lake, and the road was steep. " * 60)
    line = "propositions --alphas 0.5 1 --free 1 --long-texts 3 --long-length 100"
    options = ["--long-dtype", "float32", "--text", str(where / "book.txt")]
    assert main([*line.split(), *SMALL, *options, "--out", str(where / "out")]) == 0
    return where / "out"


@pytest.mark.long
def test_the_folder(folder):
    assert {path.name for path in folder.iterdir()} == {
        "study.json", "report.html", "tables", "figures", "synthetic.nc", "forced.nc", "long.nc", "free.nc", "free",
    }  # fmt: skip
    facts = json.loads((folder / "study.json").read_text())
    assert (facts["kind"], facts["text"]) == ("propositions", "book.txt"), "no path of this machine"
    free = load_run(folder / "free")
    assert all(free.trace(key) is None for key in free.by_key), (
        "they are thinned, and no reader may take them for whole"
    )
    with xr.open_dataset(folder / "free.nc", engine="h5netcdf") as thinned:
        assert thinned.sizes["step"] <= 40


def test_long_texts_are_read_without_the_matrix_where_that_is_possible(tmp_path):
    reader = _load_long_reader("tiny-llama", "float32", None)
    assert isinstance(reader, TransformersModel)
    assert is_fused(reader, 8192, 8192)
    of_hooks = save_family("Bloom", tmp_path / "bloom")
    assert type(_load_long_reader(str(of_hooks), "float32", None)).__name__ in MODEL_CLASSES


@pytest.mark.long
def test_verdicts_say_all_three_sources(folder):
    verdicts = pd.read_csv(folder / "tables" / "verdicts.csv")
    assert set(verdicts["verdict"]) <= {"as in the paper", "against the paper", "inconclusive"}
    places = set(verdicts["where"])
    assert {"tiny-llama, each alpha its own texts", *FORCED} < places
    law = verdicts[
        (verdicts["claim"] == "the bias adds alpha log(l/l_pre)")
        & ~verdicts["where"].str.contains("synth")
    ]
    assert set(law["where"]) == FORCED
    assert (law["verdict"] == "as in the paper").all()


@pytest.mark.long
def test_the_law_recomputed_from_the_stored_trace(folder):
    """log-odds of the first layer rise by alpha * log(l/l_pre): nothing of ours between the file
    and the number."""
    with xr.open_dataset(folder / "forced.nc", engine="h5netcdf") as trace:
        share = trace["prefix"].isel(layer=0).astype("float64")
        odds = np.log(share / (1 - share))
        rise = (odds.sel(alpha=1.0) - odds.sel(alpha=0.0)).to_numpy()
        l = (trace["l_kv"] - trace["n_bos"]).to_numpy()
        expected = np.log(l / trace["l_pre"].to_numpy()[:, None])
    assert np.nanmax(np.abs(rise - expected[..., None])) < 1e-3


@pytest.mark.long
def test_figures_are_drawn_from_their_tables(folder):
    tables = {path.stem: pd.read_csv(path) for path in (folder / "tables").glob("*.csv")}
    names = set(draw_figures(tables))
    assert {path.stem for path in (folder / "figures").glob("*.png")} == names
    page = (folder / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == len(names)
    assert "Texts side by side" not in page
    shares = tables["synthetic_shares"]
    for panel in proposition_plots.regimes(shares).axes:
        part = shares[shares["alpha"] == float(panel.get_title().removeprefix("alpha = "))]
        for family, curve in part.groupby("family", sort=False):
            line = next(curve for curve in panel.lines if curve.get_label() == family)
            assert line.get_ydata() == pytest.approx(curve["mean"].to_numpy())
        (closed,) = (curve for curve in panel.lines if curve.get_label() == "Eq. 11")
        assert closed.get_ydata() == pytest.approx(
            part["predicted"].to_numpy()[: len(closed.get_ydata())]
        )
    predicted = next(table for name, table in tables.items() if name.endswith("predictions"))
    for panel, (_, part) in zip(
        proposition_plots.predictions(predicted).axes,
        predicted.groupby("alpha", sort=False),
        strict=True,
    ):
        drawn = {curve.get_label(): curve.get_ydata() for curve in panel.lines}
        for label, column in (
            ("baseline", "baseline"),
            ("predicted from it", "predicted"),
            ("measured", "measured"),
        ):
            assert drawn[label] == pytest.approx(part[column].to_numpy(), nan_ok=True)


@pytest.mark.long
def test_baseline_alone_and_alphas_given_twice(tmp_path):
    results = run_proposition_study(
        out=tmp_path / "study", model="tiny-llama", length=40, synthetic_length=0,
        alphas=(0.0,), free=(0.0,), dtype="auto",
    )  # fmt: skip
    assert set(results.tables) == {"free_curves", "free_exponents", "verdicts"}
    assert set(results.tables["verdicts"]["alpha"].isna()) == {True}
    assert "prefix attention falls" in results.summary()
    facts = json.loads((tmp_path / "study" / "study.json").read_text())
    assert facts["dtype"] in ("float32", "bfloat16")


def test_alphas_are_sorted_and_each_is_there_once():
    assert _above_zero((1, 0.5, 0.5, 0.0)) == (0.5, 1.0)


def test_texts_that_do_not_fit_side_by_side():
    """A prompt's length decides what fits: rows that exceed the context together are read apart,
    and equal those read alone."""
    model = load("tiny-llama", "float64")
    long, short = (
        Layout.of(model.tokenizer, "Very positive:", prompt) for prompt in ("The lake " * 11, "It")
    )
    texts = [list(range(40, 50)), [50 + i % 90 for i in range(model.cfg.n_ctx - len(short) - 5)]]
    both = teacher_forced(model, [long, short], texts, Augmentation(alpha=0.5))
    for i, branch in enumerate((long, short)):
        alone = teacher_forced(model, branch, [texts[i]], Augmentation(alpha=0.5))[
            "prefix"
        ].to_numpy()
        assert (
            np.abs(both["prefix"].to_numpy()[:, i : i + 1, : alone.shape[2]] - alone).max() < 1e-6
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--text FILE --long-length 50 --long-texts 2", "has 9 tokens, fewer than 2 x 50; give a longer text"),
        ("--text FILE --long-length 9999", "exceed the context after prefix and prompt; give at most"),
        ("--text none.txt", "cannot read"),
        ("--alphas -1", "--alphas: input should be greater than or equal to 0, found -1"),
        ("--seed -1", "--seed: input should be greater than or equal to 0, found -1"),
        ("--long-length 300", "--long-length is about a text; give it with --text FILE"),
        ("--long-alphas 0.5", "is about a text; give it with --text FILE"),
        ("--long-dtype float64", "is about a text; give it with --text FILE"),
        ("--text FILE --long-alphas 0", "--long-alphas needs an alpha above 0"),
        ("--text FILE --long-length 2", "--long-length: input should be greater than or equal to 8, found 2"),
        ("--long-texts 0", "--long-texts: input should be greater than or equal to 1, found 0"),
        ("--long-length -5", "--long-length: input should be greater than or equal to 8, found -5"),
        ("--length 29 --free 0 --synthetic-length 0", "a slope needs at least 3 steps"),
        ("--synthetic-length 50", "lengths from 64 to 50 are too few"),
    ],
)  # fmt: skip
def test_bad_input(options, message, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("too short")
    line = options.replace("FILE", str(tmp_path / "short.txt")).split()
    study = ["propositions", "--out", str(tmp_path / "x"), "--model", "tiny-llama", *line]
    assert main(study) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "x").exists()


@pytest.mark.long
def test_a_finished_study_is_not_replaced(folder, capsys):
    assert main(["propositions", "--out", str(folder), *SMALL]) == 2
    assert "is finished; --force replaces it" in capsys.readouterr().err
