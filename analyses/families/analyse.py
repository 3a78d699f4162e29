"""What the stages of analyses/families/run.sh say: figures/families.

    python analyses/families/analyse.py cards smollm2-135m --models FOLDER
    python analyses/families/analyse.py compare

A stage reads the runs in made/, in the folder from which run.sh works. It replaces its model's rows
in a table, so that each piece stands alone and can be kept when the texts are gone.

- *cards*: heads.csv, chosen and opposing heads of each card, and cards.csv, the weights and prompts
  on which they were chosen.
- *layers*: layers.csv, each layer and strength of activation addition, and which layer is chosen.
- *tune*: strengths.csv, what each strength costs, and the tuned one.
- *test*, *first-token* and *more*: texts/MODEL.parquet, a row a text, without the text: stage, arm,
  card, prompt (12 digits of its sha256), attribute, nll (by the model of another family, in nats
  per token of the continuation), acc hidden (adapter; positive and negative and their inflections
  hidden), acc (linear), rep (4-grams that the text had before), echo (the continuation has the word
  of its own prefix), attention on the prefix in percent, a mean over layers, heads and steps.
  attention.csv has it by step.
- *compare*: arms.csv and differences.csv from all of texts/ and reader.csv.

The *cost* of an arm is its perplexity as a multiple of that of no bias.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.families.grids import (
    ADDITION,
    ALL,
    CHOSEN,
    COOL,
    COST,
    EQUAL,
    FIRST_STRENGTHS,
    GEMMA,
    HALF,
    LARGE_QWEN,
    MADE,
    MODELS,
    NO_BIAS,
    OPPOSING,
    OUT,
    QWEN,
    RANDOM,
    REPEATS,
    SMOLLM2,
    SPARED,
    next_strengths,
    path_of,
    strengths,
)
from analyses.lab.scripts import ScriptOptions
from analyses.rivals.analyse import digits, judged_nll, score
from lapa2_interp import Selection
from lapa2_interp.attention.tables import branch_name, pooled
from lapa2_interp.errors import DataError
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.generation.cell import Cell
from lapa2_interp.methods.registry import load_task
from lapa2_interp.runs.run import Run, load_run
from lapa2_interp.scoring.equal_perplexity import interpolate_at_perplexity
from lapa2_interp.scoring.registry import ScorerOptions, score_texts
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.stats import Difference, holm, mean_interval, paired_difference
from lapa2_interp.table_formats import as_csv, as_text

METRICS = ("acc hidden", "acc (linear)", "reader")
FIRST_JUDGE = {SMOLLM2: "reader", GEMMA: "reader", QWEN: "acc hidden", LARGE_QWEN: "acc hidden"}
"""The judge that decides, by writer: the reader never judges its own family, and `adapter` reads
the layers of SmolLM2."""
FIRST = ((CHOSEN, ADDITION), (CHOSEN, HALF))
"""The first measures: one arm minus another."""
FURTHER = (
    (CHOSEN, ALL),
    (CHOSEN, RANDOM),
    (OPPOSING, CHOSEN),
    (CHOSEN, NO_BIAS),
    (ADDITION, NO_BIAS),
    (HALF, NO_BIAS),
    (RANDOM, NO_BIAS),
    (SPARED, CHOSEN),
    (SPARED, NO_BIAS),
    (CHOSEN, EQUAL),
    (EQUAL, NO_BIAS),
    (CHOSEN + COOL, NO_BIAS + COOL),
)
ATTRIBUTES = ("positive", "negative")
MARGIN = 5.0
"""Points within which two arms are equal."""
STEPS = (1, 4, 8, 16, 24, 32, 40)
LENGTH = 64
"""Tokens of a text, those of its prompt included."""


WriteTables = Callable[[str, Path, Path], None]
"""Takes a model, the folder of `make models`, and that of tables."""


def main() -> None:
    """Write the tables of a stage."""
    stages: dict[str, WriteTables] = {
        "cards": cards,
        "layers": layers,
        "tune": tune,
        "test": judge_texts,
        "first-token": partial(judge_texts, stage="first-token"),
        "more": partial(judge_texts, stage="more"),
    }
    run_stage(str(__doc__), stages, compare, OUT)


def run_stage(
    about: str, stages: Mapping[str, WriteTables], compare: Callable[[Path], None], out: Path
) -> None:
    """Write the tables of the stage that the command line names, or compare.

    Args:
        about: What `--help` says.
        compare: What needs no model.
        out: The usual folder of tables.
    """
    parser = ScriptOptions(about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=(*stages, "compare"))
    parser.add_argument("model", choices=MODELS, nargs="?")
    parser.add_argument("--models", type=Path, help="the folder of `make models`")
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    if options.stage == "compare":
        compare(options.out)
        return
    if options.model is None or options.models is None:
        parser.error(f"{options.stage} needs a model and --models")
    stages[options.stage](options.model, options.models, options.out)


def replace_rows(file: Path, model: str, rows: pd.DataFrame) -> None:
    """Write the rows of a model in a table, in place of those that it had there."""
    table = rows.assign(model=model)
    if file.exists():
        earlier = pd.read_csv(file)
        table = pd.concat([earlier[earlier["model"] != model], table], ignore_index=True)
    order = {name: i for i, name in enumerate(MODELS)}
    table = table.sort_values("model", key=lambda names: names.map(order), kind="stable")
    first = ["model", *(name for name in table if name != "model")]
    write_text(file, as_csv(table[first], 6))
    print(as_text(rows, ".4g"))


def cards(model: str, models: Path, out: Path) -> None:
    """Write heads.csv, and cards.csv with what each card was chosen on."""
    rows, of_cards = [], []
    for card in MODELS[model].numbers:
        selection = Selection.load(MADE / model / "cards" / f"{card}.json")
        kinds = ["chosen"] * len(selection.heads) + ["opposing"] * len(selection.suppressors)
        heads = (*selection.heads, *selection.suppressors)
        for kind, (layer, head), values in zip(kinds, heads, selection.scores, strict=True):
            slope = dict(zip(("slope", "low", "high"), values, strict=True))
            rows.append({"card": card, "kind": kind, "layer": layer, "head": head} | slope)
        prompts = "\n".join(selection.prompts)
        of_cards.append(
            {"card": card, "weights": selection.weights, "prompts": len(selection.prompts)}
            | {"sha256 of prompts": sha256(prompts.encode()).hexdigest()}
            | {"rank correlation of halves": selection.stability}
        )
    replace_rows(out / "heads.csv", model, pd.DataFrame(rows))
    replace_rows(out / "cards.csv", model, pd.DataFrame(of_cards))


def arm_of(cell: Cell) -> str:
    """The arm of a cell, without card and strength."""
    if cell.method == "caa":
        return ADDITION
    arms = (HALF, OPPOSING, SPARED, CHOSEN, RANDOM, ALL)
    return next(
        (arm for arm in arms if cell.label.startswith(arm)),
        EQUAL if cell.label.startswith("equal") else NO_BIAS,
    ) + (f", temperature {cell.temperature:g}" if cell.temperature != 1 else "")


def strength_of(cell: Cell) -> float:
    """The strength of a cell's arm."""
    if cell.method == "caa":
        return float(cell.parameters["strength"])
    return next((bias.alpha for bias in cell.active_augmentations), 0.0)


def scored_texts(
    model: str, stage: str, models: Path, labels: bool = True
) -> tuple[Run, pd.DataFrame]:
    """The texts of finished cells with nll by the model of another family, and with labels."""
    run = load_run(MADE / model / stage, earlier=stage == "tune")  # of all rounds
    texts = run.texts(list(run.finished)).reset_index(drop=True)
    texts["arm"] = [arm_of(run.by_key[key]) for key in texts["cell"]]
    texts["strength"] = [strength_of(run.by_key[key]) for key in texts["cell"]]
    folder = MADE / model / stage / "scores"
    if labels:
        with ScoreCache(folder) as cache:
            texts = score(texts, cache)
            new = texts.assign(text=texts["continuation"])
            echo = score_texts(new, ["echo"], ScorerOptions(task=load_task("sentiment")), cache)
            texts["echo"] = 100 * echo["value"].astype(float).to_numpy()
    judge = path_of(MODELS[model].judge, models)
    texts["nll"] = judged_nll(texts, judge, folder / "judge.csv", "bfloat16")["nll"]
    return run, texts


def layers(model: str, models: Path, out: Path) -> None:
    """Write layers.csv: the chosen layer has the largest accuracy, the mean of both classifiers, at
    the wanted cost, or by its strongest arm where that costs less."""
    run, texts = scored_texts(model, "layers", models)
    texts["layer"] = [run.by_key[key].parameters.get("layers", -1) for key in texts["cell"]]
    texts["accuracy"] = texts[["acc hidden", "acc (linear)"]].mean(axis=1)
    means = texts.groupby(["layer", "strength"])[["nll", "accuracy"]].mean().reset_index()
    base = means[means["layer"] == -1]
    at_cost = {
        layer: value_at_cost(pd.concat([base, own]), "accuracy")
        for layer, own in means[means["layer"] != -1].groupby("layer")
    }
    means["cost"] = np.exp(means["nll"] - base["nll"].iloc[0])
    means["at cost"] = means["layer"].map(at_cost)
    best = max(at_cost, key=at_cost.__getitem__)
    means["chosen"] = (means["layer"] == best) & (means["strength"] == means["strength"].max())
    rows = means[means["layer"] != -1]
    replace_rows(out / "layers.csv", model, rows.drop(columns="nll"))


def value_at_cost(curve: pd.DataFrame, name: str) -> float:
    """A column of a curve, no bias first, where it first costs as much as wanted; that of its last
    arm where none does."""
    log_perplexity = curve["nll"].to_numpy()
    target = np.array(log_perplexity[0] + np.log(COST))
    values = curve[[name]].to_numpy(float)
    value = interpolate_at_perplexity(log_perplexity, values, target)[0]
    return float(values[-1, 0] if np.isnan(value) else value)


def tuned_strength(curve: pd.DataFrame) -> float:
    """The strength at the wanted cost, or that which costs most where none costs as much; below
    those at which texts repeat themselves, and so cost little."""
    largest = curve["nll"].cummax()
    falls = curve["nll"] < largest + np.log(REPEATS)
    if falls.any():
        curve = curve.loc[: falls.idxmax()].iloc[:-1]
    if curve["nll"].max() < curve["nll"].iloc[0] + np.log(COST):
        return float(curve["strength"][curve["nll"].idxmax()])
    return value_at_cost(curve, "strength")


def costs(texts: pd.DataFrame, arms: Iterable[str]) -> pd.DataFrame:
    """What each strength of each arm costs, and the tuned one."""
    base, rows = texts[texts["arm"] == NO_BIAS], []
    for arm in arms:
        own = texts[texts["arm"] == arm]
        curve = [{"strength": 0.0, "nll": base["nll"].mean()}]
        for strength, at in own.groupby("strength"):
            change = difference_of(at, base, "nll")
            ends = {name: np.exp(getattr(change, name)) for name in ("mean", "low", "high")}
            rows.append({"arm": arm, "strength": strength, "cost": ends["mean"]})
            rows[-1] |= {"low": ends["low"], "high": ends["high"], "texts": len(at)}
            rows[-1] |= {"tuned": False}
            curve.append({"strength": float(strength), "nll": at["nll"].mean()})
        if len(curve) > 1:
            tuned = tuned_strength(pd.DataFrame(curve))
            rows.append({"arm": arm, "strength": round(tuned, 4), "tuned": True})
    return pd.DataFrame(rows)


def tune(model: str, models: Path, out: Path) -> None:
    """Write strengths.csv."""
    _, texts = scored_texts(model, "tune", models, labels=False)
    replace_rows(out / "strengths.csv", model, costs(texts, MODELS[model].arms))
    tried = strengths(out, model)
    left = [
        arm
        for arm in MODELS[model].arms
        if next_strengths(FIRST_STRENGTHS[arm], tried[tried["arm"] == arm])
    ]
    print(f"still to try: {', '.join(left) or 'nothing'}")


def judge_texts(model: str, models: Path, out: Path, stage: str = "test") -> None:
    """Write texts/MODEL.parquet and attention.csv, and compare."""
    run, texts = scored_texts(model, stage, models)
    by_step = prefix_attention(run, texts)
    texts["attention"] = np.nanmean(by_step, axis=1)
    texts["prompt"] = list(map(digits, texts["prompt"]))
    card_of = {
        digits(line): MODELS[model].card_of(i)
        for i, line in enumerate(Path("bases/families.txt").read_text("utf-8").splitlines())
    }
    texts["card"] = texts["prompt"].map(card_of)
    texts["stage"] = stage
    columns = ["stage", "arm", "card", "prompt", "attribute", "nll", *METRICS[:2], "rep", "echo"]
    rows = texts[[*columns, "attention"]]
    file = out / "texts" / f"{model}.parquet"
    if file.exists():
        earlier = pd.read_parquet(file)
        rows = pd.concat([earlier[earlier["stage"] != stage], rows], ignore_index=True)
    with atomic_write(file) as fresh:
        rows.to_parquet(fresh, index=False, compression="zstd")
    if stage == "test":
        replace_rows(out / "attention.csv", model, attention_by_step(texts, by_step))
    compare(out)


def prefix_attention(run: Run, texts: pd.DataFrame) -> np.ndarray:
    """The attention on the prefix in percent, [text step], a mean over layers and heads."""
    rows = np.full((len(texts), LENGTH), np.nan)
    for key, own in texts.groupby("cell"):
        trace = run.trace(str(key))
        target = list(trace["branch"].to_numpy()).index(branch_name(trace))
        values = 100 * pooled(trace, "prefix")[target]
        rows[own.index, : values.shape[1]] = values
    return rows


def attention_by_step(texts: pd.DataFrame, by_step: np.ndarray) -> pd.DataFrame:
    """The mean attention on the prefix after some steps, by arm."""
    rows = []
    for arm, own in texts.groupby("arm", sort=False):
        for step in STEPS:
            values = by_step[own.index, step - 1]
            there = ~np.isnan(values)  # a text after a long prompt has fewer steps
            if there.any():
                mean = mean_interval(values[there], own["prompt"][there])
                rows.append({"arm": arm, "step": step} | mean.columns | {"texts": mean.n})
    return pd.DataFrame(rows)


def all_texts(out: Path) -> pd.DataFrame:
    """The labelled texts of all models, with the reader's labels where there are some."""
    files = [out / "texts" / f"{model}.parquet" for model in MODELS]
    tables = [pd.read_parquet(file).assign(model=file.stem) for file in files if file.exists()]
    texts = pd.concat(tables, ignore_index=True)
    keys = ["model", "arm", "prompt", "attribute"]
    labels = out / "reader.csv"
    if labels.exists():
        return texts.merge(pd.read_csv(labels), how="left", on=keys, validate="one_to_one")
    return texts.assign(reader=np.nan)


def compare(out: Path) -> None:
    """Write arms.csv and differences.csv."""
    texts = all_texts(out)
    write_text(out / "arms.csv", as_csv(pd.DataFrame(arm_rows(texts)), 6))
    table = differences(texts)
    write_text(out / "differences.csv", as_csv(table, 6))
    shown = ["model", "metric", "arm", "against", "difference", "low", "high", "verdict"]
    print(as_text(table.loc[table["first"], shown], ".3g"))


def arm_rows(texts: pd.DataFrame) -> Iterable[dict]:
    """Mean, interval and cost of every arm."""
    for (model, stage, arm), own in texts.groupby(["model", "stage", "arm"], sort=False):
        base = texts[(texts["model"] == model) & (texts["arm"] == NO_BIAS)]
        change = difference_of(own, base, "nll")
        cost = {"cost": np.exp(change.mean), "cost_low": np.exp(change.low)}
        cost["cost_high"] = np.exp(change.high)
        for metric in (*METRICS, "rep", "echo", "attention"):
            there = own[own[metric].notna()]
            if len(there):
                mean = mean_interval(there[metric], there["prompt"])
                ends = {"mean": mean.mean, "low": mean.low, "high": mean.high}
                sizes = {"texts": len(there), "prompts": there["prompt"].nunique()}
                yield {"model": model, "stage": stage, "arm": arm, "metric": metric} | (
                    ends | sizes | cost
                )


def difference_of(steered: pd.DataFrame, compared: pd.DataFrame, metric: str) -> Difference:
    """One arm minus another, paired on prompts and attributes."""
    return paired_difference(
        compared[metric], compared["prompt"], steered[metric], steered["prompt"],
        kinds=(compared["attribute"], steered["attribute"]),
    )  # fmt: skip


def exact_p(steered: pd.DataFrame, compared: pd.DataFrame, metric: str) -> float:
    """p of the sign-flip test over prompts, by all flips: the probability of a mean difference as
    large. A sample of flips, as `paired_difference` takes it, does not decide where p is near 0.05.

    Values are 0 or 100, so that differences of prompts are multiples of half a text, and the
    distribution of their sum is a convolution.

    Raises:
        DataError: There are other values.
    """
    keys = ["prompt", "attribute"]
    both = steered.set_index(keys)[metric] - compared.set_index(keys)[metric]
    by_prompt = both.dropna().groupby("prompt").mean() / (100 / len(ATTRIBUTES))
    if not np.allclose(by_prompt, np.rint(by_prompt)):
        raise DataError(f"{metric} has values other than 0 and 100, which exact_p cannot flip")
    sizes = np.abs(np.rint(by_prompt)).astype(int).to_numpy()
    chances = np.ones(1)
    for size in sizes[sizes > 0]:
        wider = np.zeros(len(chances) + 2 * size)
        wider[: len(chances)] += chances / 2
        wider[2 * size :] += chances / 2
        chances = wider
    sums = np.arange(len(chances)) - sizes.sum()
    return float(chances[np.abs(sums) >= abs(int(np.rint(by_prompt.sum())))].sum())


def differences(texts: pd.DataFrame) -> pd.DataFrame:
    """One arm minus another in every model, with Holm's correction over models, and verdicts where
    all prompts of the plan are there.

    The first measures are corrected together, each by the first judge of its model. They have
    verdicts once all models that have both arms are judged.
    """
    rows = []
    for arm, against in (*FIRST, *FURTHER):
        tests = []
        for metric in METRICS:
            for model, own in texts.groupby("model", sort=False):
                steered, compared = (own[own["arm"] == name] for name in (arm, against))
                if not (steered[metric].notna().any() and compared[metric].notna().any()):
                    continue
                change = difference_of(steered, compared, metric)
                ends = {"difference": change.mean, "low": change.low, "high": change.high}
                first = (arm, against) in FIRST and metric == FIRST_JUDGE[str(model)]
                tests.append(
                    {"model": model, "metric": metric, "arm": arm, "against": against}
                    | {"first": first, **ends}
                    | {"p": exact_p(steered, compared, metric)}
                    | {"p_equal": change.p_within(MARGIN)}
                    | {"prompts": change.clusters}
                )
        for family in ("first", *METRICS):
            of_family = [row for row in tests if family_of(row) == family]
            planned = sum(against != HALF or ALL in studied.arms for studied in MODELS.values())
            complete = family != "first" or len(of_family) == planned
            corrected = holm([row["p"] for row in of_family]) if of_family else []
            rows += [
                row | {"p_holm": p, "complete": complete}
                for row, p in zip(of_family, corrected, strict=True)
            ]
    table = pd.DataFrame(rows)
    table["verdict"] = [verdict(row) for _, row in table.iterrows()]
    return table.drop(columns="complete")


def family_of(test: Mapping[str, object]) -> str:
    """The tests that are corrected with this one: the first measures, or those of its metric."""
    return "first" if test["first"] else str(test["metric"])


def verdict(row: pd.Series) -> str:
    """More, less, equal within the margin, or not decided; nothing before all prompts are there, or
    before all tests that are corrected together."""
    studied = MODELS[row["model"]]
    if row["prompts"] < studied.cards * studied.tested or not row["complete"]:
        return ""
    if row["p_holm"] < 0.05:
        return "more" if row["difference"] > 0 else "less"
    return f"equal within {MARGIN:g} points" if row["p_equal"] < 0.05 else "not decided"


if __name__ == "__main__":
    main()
