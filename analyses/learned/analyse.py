"""What the texts of analyses/learned say: figures/learned.

    python analyses/learned/analyse.py tune smollm2-135m --models FOLDER
    python analyses/learned/analyse.py test smollm2-135m --models FOLDER
    python analyses/learned/analyse.py read smollm2-135m --models FOLDER
    python analyses/learned/analyse.py compare

- *tune*: dials.csv, what each dial of a way costs, and the tuned one.
- *test*: texts/MODEL.parquet, a row a text, without the text. It has the columns of
  figures/families/texts, and seed.
- *read*: the labels of the reader, in the same files (analyses/families/reader.py).
- *compare*: arms.csv, arms.png and differences.csv, with arms of figures/families beside the new
  ones; seeds.csv has the first measure in each seed.

In intervals the three seeds are resampled first, and then the prompts of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.families.analyse import costs, difference_of, replace_rows, run_stage
from analyses.families.draw import draw
from analyses.families.grids import (
    ADDITION,
    ALL,
    CHOSEN,
    LARGE_QWEN,
    MADE,
    MODELS,
    NO_BIAS,
    QWEN,
    path_of,
)
from analyses.families.grids import OUT as FAMILIES
from analyses.families.reader import asked
from analyses.learned.grids import WAYS, seed_of
from analyses.learned.train import OUT, SEEDS, STRENGTHS, VECTOR
from analyses.rivals.analyse import digits, judged_nll, score
from analyses.rivals.readers import hidden_words
from lapa2_interp.errors import RunError
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.generation.cell import Cell
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.load import load_transformers
from lapa2_interp.runs.run import load_run
from lapa2_interp.scoring.echo import MASK
from lapa2_interp.scoring.registry import ScorerOptions, score_texts
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.stats import holm
from lapa2_interp.table_formats import as_csv, as_text

METRICS = ("acc hidden", "acc (linear)", "reader")
BESIDE = (NO_BIAS, ALL, CHOSEN, ADDITION)
"""Arms of analyses/families that stand beside the new ones."""
PAIRS = (
    (STRENGTHS, VECTOR),
    (STRENGTHS, CHOSEN),
    (STRENGTHS, ALL),
    (STRENGTHS, ADDITION),
    (VECTOR, ADDITION),
    (STRENGTHS, NO_BIAS),
)
"""One arm minus another; the first is the first measure."""
RESAMPLES = 10_000


def main() -> None:
    """Write the tables of a stage."""
    stages = {"tune": tune, "test": judge_texts, "read": read_texts}
    run_stage(str(__doc__), stages, compare, OUT)


def way_of(cell: Cell) -> str:
    """The arm of a cell."""
    if "vector" in cell.parameters:
        return VECTOR
    return next((way for way in WAYS if cell.label.startswith(way)), NO_BIAS)


def dial_of(cell: Cell) -> float:
    """The multiple of what was learned."""
    if "vector" in cell.parameters:
        return float(cell.parameters["strength"])
    return next((bias.alpha for bias in cell.active_augmentations), 0.0)


def written_texts(model: str, stage: str, models: Path, labels: bool) -> pd.DataFrame:
    """The texts of finished cells with nll by the model of another family, and with labels."""
    run = load_run(MADE / model / f"learned-{stage}", earlier=stage == "tune")
    texts = run.texts(list(run.finished)).reset_index(drop=True)
    texts["arm"] = [way_of(run.by_key[key]) for key in texts["cell"]]
    texts["dial"] = [dial_of(run.by_key[key]) for key in texts["cell"]]
    folder = MADE / model / f"learned-{stage}" / "scores"
    if labels:
        with ScoreCache(folder) as cache:
            texts = score(texts, cache)
            new = texts.assign(text=texts["continuation"])
            echo = score_texts(new, ["echo"], ScorerOptions(task=load_task("sentiment")), cache)
            texts["echo"] = 100 * echo["value"].astype(float).to_numpy()
    judge = path_of(MODELS[model].judge, models)
    texts["nll"] = judged_nll(texts, judge, folder / "judge.csv", "bfloat16")["nll"]
    return texts


def tune(model: str, models: Path, out: Path) -> None:
    """Write dials.csv."""
    texts = written_texts(model, "tune", models, labels=False)
    table = costs(texts.rename(columns={"dial": "strength"}), WAYS)
    replace_rows(out / "dials.csv", model, table.rename(columns={"arm": "way", "strength": "dial"}))


def judge_texts(model: str, models: Path, out: Path) -> None:
    """Write texts/MODEL.parquet."""
    texts = written_texts(model, "test", models, labels=True)
    texts["prompt"] = list(map(digits, texts["prompt"]))
    columns = ["arm", "prompt", "attribute", "nll", *METRICS[:2], "rep", "echo"]
    rows = texts[columns].assign(seed=texts["prompt"].map(seeds()))
    write_texts_table(out / "texts" / f"{model}.parquet", rows)
    compare(out)


def seeds() -> dict[str, int]:
    """The seed of every test prompt."""
    lines = Path("bases/families.txt").read_text("utf-8").splitlines()
    return {digits(line): seed_of(i) for i, line in enumerate(lines)}


def write_texts_table(file: Path, rows: pd.DataFrame) -> None:
    """Write labelled texts."""
    with atomic_write(file) as fresh:
        rows.to_parquet(fresh, index=False, compression="zstd")


def read_texts(model: str, models: Path, out: Path) -> None:
    """Add the reader's labels to texts/MODEL.parquet."""
    if model in (QWEN, LARGE_QWEN):
        raise RunError(
            f"the reader is a Qwen, and judges no texts of {model}; leave this stage out"
        )
    texts = written_texts(model, "test", models, labels=False)
    question = (FAMILIES / "reader.question.txt").read_text("utf-8").strip()
    network, tokenizer, _ = load_transformers(path_of(LARGE_QWEN, models), "bfloat16")
    hidden = hidden_words("sentiment")
    shown = [hidden.sub(MASK, text).strip() for text in texts["continuation"]]
    right = asked(network, tokenizer, question, shown) == texts["attribute"].to_numpy()
    texts["prompt"], texts["reader"] = list(map(digits, texts["prompt"])), 100.0 * right
    file, keys = out / "texts" / f"{model}.parquet", ["arm", "prompt", "attribute"]
    rows = pd.read_parquet(file).drop(columns="reader", errors="ignore")
    write_texts_table(file, rows.merge(texts[[*keys, "reader"]], on=keys, validate="one_to_one"))
    compare(out)


def all_texts(model: str, out: Path) -> pd.DataFrame:
    """The new texts of a model and those of analyses/families, all with seeds."""
    new = pd.read_parquet(out / "texts" / f"{model}.parquet")
    beside = pd.read_parquet(FAMILIES / "texts" / f"{model}.parquet")
    beside = beside[(beside["stage"] == "test") & beside["arm"].isin(BESIDE)]
    if "reader" in new:
        labels = pd.read_csv(FAMILIES / "reader.csv")
        labels = labels[labels["model"] == model].drop(columns="model")
        beside = beside.merge(labels, how="left", on=["arm", "prompt", "attribute"])
    seed = new.drop_duplicates("prompt").set_index("prompt")["seed"]
    texts = pd.concat([new, beside.assign(seed=beside["prompt"].map(seed))], ignore_index=True)
    return texts[texts["seed"].notna()]


def compare(out: Path) -> None:
    """Write arms.csv, differences.csv and seeds.csv."""
    arms, tests, seeds = [], [], []
    for file in sorted((out / "texts").glob("*.parquet")):
        model, texts = file.stem, all_texts(file.stem, out)
        arms += [{"model": model} | row for row in arm_rows(texts)]
        tests += [{"model": model} | row for row in test_rows(texts)]
        seeds += [{"model": model} | row for row in seed_rows(texts)]
    table = pd.DataFrame(tests)
    for _, own in table.groupby(["metric", "arm", "against"]):
        table.loc[own.index, "p_holm"] = holm(own["p"].to_numpy())
    write_text(out / "arms.csv", as_csv(pd.DataFrame(arms), 6))
    draw(pd.DataFrame(arms).assign(stage="test")).savefig(out / "arms.png", dpi=200)
    write_text(out / "differences.csv", as_csv(table, 6))
    write_text(out / "seeds.csv", as_csv(pd.DataFrame(seeds), 6))
    print(as_text(table.drop(columns=["prompts", "p"]), ".3g"))


def arm_rows(texts: pd.DataFrame) -> Iterator[dict]:
    """Mean, interval and cost of every arm."""
    base = texts[texts["arm"] == NO_BIAS]
    for arm, own in texts.groupby("arm", sort=False):
        cost = np.exp(difference_of(own, base, "nll").mean)
        for metric in (*METRICS, "rep", "echo"):
            if metric not in own or own[metric].isna().any():
                continue
            by_prompt = own.groupby(["seed", "prompt"])[metric].mean().reset_index()
            low, high, _ = nested(by_prompt, metric)
            yield {"arm": arm, "metric": metric, "mean": by_prompt[metric].mean()} | {
                "low": low, "high": high, "cost": cost, "texts": len(own)
            }  # fmt: skip


def seed_rows(texts: pd.DataFrame) -> Iterator[dict]:
    """The first measure in each seed."""
    for seed, own in texts.groupby("seed"):
        for metric in METRICS:
            if metric in own:
                steered, compared = (own[own["arm"] == name] for name in PAIRS[0])
                change = difference_of(steered, compared, metric)
                ends = {"difference": change.mean, "low": change.low, "high": change.high}
                yield {"seed": int(seed), "metric": metric} | ends


def test_rows(texts: pd.DataFrame) -> Iterator[dict]:
    """One arm minus another, paired on prompts."""
    for arm, against in PAIRS:
        for metric in METRICS:
            if metric not in texts:
                continue
            steered, compared = (
                texts[texts["arm"] == name].groupby(["seed", "prompt"])[metric].mean()
                for name in (arm, against)
            )
            change = (steered - compared).dropna().rename("change").reset_index()
            if change.empty:
                continue
            low, high, p = nested(change, "change")
            yield {"metric": metric, "arm": arm, "against": against} | {
                "difference": change["change"].mean(), "low": low, "high": high, "p": p,
                "prompts": len(change),
            }  # fmt: skip


def nested(rows: pd.DataFrame, name: str) -> tuple[float, float, float]:
    """The 95 % interval of a mean by resampled seeds, and resampled prompts in each; and twice the
    share of resampled means on the other side of 0."""
    rng = np.random.default_rng(0)
    by_seed = [own[name].to_numpy() for _, own in rows.groupby("seed")]
    chosen = rng.integers(len(by_seed), size=(RESAMPLES, len(SEEDS)))
    means = np.zeros(chosen.shape)
    for seed, values in enumerate(by_seed):
        here = chosen == seed
        draws = rng.integers(len(values), size=(int(here.sum()), len(values)))
        means[here] = values[draws].mean(axis=1)
    of_sample = means.mean(axis=1)
    low, high = np.percentile(of_sample, (2.5, 97.5))
    beyond = min((of_sample <= 0).mean(), (of_sample >= 0).mean())
    return float(low), float(high), float(min(1.0, 2 * max(beyond, 1 / RESAMPLES)))


if __name__ == "__main__":
    main()
