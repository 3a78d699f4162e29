"""The findings of this project by model: figures/families/findings.csv.

    python analyses/families/findings.py

A row is a finding in a model: *verdict* (holds, opposite, equal within 5 points, not decided), the
number with its 95 % interval, and *unit*. A first measure of the plan has no verdict before all
models are judged. Findings about texts compare two arms in percentage
points, by *judge*: the model's first judge if it read both arms, else `linear` in SmolLM2, where
`adapter` is not independent, and `adapter` elsewhere. *cost* and *cost against* are those of the
arms. findings.table.csv has a finding a row and a model a column: verdict, number, and costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.families.analyse import FIRST_JUDGE
from analyses.families.draw import NAMES
from analyses.families.grids import (
    ADDITION,
    ALL,
    CHOSEN,
    COOL,
    EQUAL,
    GEMMA,
    HALF,
    LARGE_QWEN,
    MODELS,
    NO_BIAS,
    OPPOSING,
    OUT,
    QWEN,
    RANDOM,
    SMOLLM2,
    SPARED,
)
from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from lapa2_interp.circuits.fade_account import FACTORS, FAR, state
from lapa2_interp.files import write_text
from lapa2_interp.stats import resampled_means
from lapa2_interp.table_formats import as_csv, as_text, format_interval

COMPARED = {
    "all heads at 1/2 control more than no bias": (HALF, NO_BIAS),
    "chosen heads control more than no bias": (CHOSEN, NO_BIAS),
    "activation addition controls more than no bias": (ADDITION, NO_BIAS),
    "chosen heads control more than all heads at 1/2": (CHOSEN, HALF),
    "chosen heads control more than all heads at equal cost": (CHOSEN, ALL),
    "chosen heads control more than random heads of the same layers": (CHOSEN, RANDOM),
    "chosen heads control more than all heads at equal attention": (CHOSEN, EQUAL),
    "chosen heads control more than no bias, both at temperature 0.8": (
        CHOSEN + COOL,
        NO_BIAS + COOL,
    ),
    "a bias down in opposing heads adds control": (OPPOSING, CHOSEN),
    "chosen heads control more than activation addition": (CHOSEN, ADDITION),
    "chosen heads control more where the first token is spared": (SPARED, CHOSEN),
}
WORDS = {"more": "holds", "less": "opposite", "": "not all models are judged"}
PARTS = {SMOLLM2: "full", GEMMA: "gemma", QWEN: "qwen-0.5b", LARGE_QWEN: "qwen-1.5b"}
"""By model, its part of the account of the fade."""
FILLER = 256
JUDGES = {"reader": "reader", "acc hidden": "adapter", "acc (linear)": "linear"}
EARLY, LATE = 1, 32
"""Steps between which the attention falls."""


def main() -> None:
    """Write the table."""
    parser = ScriptOptions("The findings of this project by model")
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    account = pd.read_csv(FIGURES / "fading" / "account" / "account.csv")
    rows = [
        *of_texts(pd.read_csv(out / "differences.csv"), pd.read_csv(out / "arms.csv")),
        *of_attention(pd.read_csv(out / "attention.csv")),
        *of_fading(account),
        *of_rotary_base(pd.read_parquet(FIGURES / "fading" / "account" / "prompts.parquet")),
        *of_cards(pd.read_csv(out / "heads.csv")),
    ]
    table = pd.DataFrame(rows)
    write_text(out / "findings.csv", as_csv(table, 6))
    write_text(out / "findings.table.csv", as_csv(by_model(table)))
    print(as_text(table[["finding", "model", "verdict", "number", "low", "high"]], ".3g"))


def by_model(table: pd.DataFrame) -> pd.DataFrame:
    """A finding a row and a model a column, as text."""
    cells = []
    for row in table.to_dict("records"):
        digits = ".0f" if row["unit"] == "points" else ".2f"
        number = format_interval(row["number"], row["low"], row["high"], digits)
        costs = [f"{row[name]:.2f}" for name in ("cost", "cost against") if row[name] > 0]
        said = f"{row['verdict']}: {number}"
        if costs:
            said += f" ({JUDGES[row['judge']]}; {' against '.join(costs)})"
        cells.append({"finding": row["finding"], "model": NAMES[row["model"]], "said": said})
    wide = pd.DataFrame(cells).pivot(index="finding", columns="model", values="said")
    models = [name for name in NAMES.values() if name in wide]
    return wide.loc[list(dict.fromkeys(table["finding"])), models].fillna("").reset_index()


def of_texts(differences: pd.DataFrame, arms: pd.DataFrame) -> Iterator[dict]:
    """Findings that compare two arms."""
    cost = arms.drop_duplicates(["model", "arm"]).set_index(["model", "arm"])["cost"]
    for finding, (arm, against) in COMPARED.items():
        both = differences[(differences["arm"] == arm) & (differences["against"] == against)]
        for model in MODELS:
            own = both[both["model"] == model].set_index("metric")
            judge = next((name for name in judges_of(model) if name in own.index), None)
            if judge is None:
                continue
            row = own.fillna({"verdict": ""}).loc[judge]
            ends = {"number": row["difference"], "low": row["low"], "high": row["high"]}
            yield {
                "finding": finding,
                "model": model,
                "verdict": WORDS.get(row["verdict"], row["verdict"]),
                **ends,
                "unit": "points",
                "judge": judge,
                "cost": cost[model, arm],
                "cost against": cost[model, against],
            }


def judges_of(model: str) -> tuple[str, str]:
    """The first judge of a model, and that of arms which it did not read."""
    return FIRST_JUDGE[model], "acc (linear)" if model == SMOLLM2 else "acc hidden"


def of_attention(attention: pd.DataFrame) -> Iterator[dict]:
    """Does the attention on the prefix fall, without a bias? The number is that which is left."""
    steps = attention[attention["arm"] == NO_BIAS].set_index(["model", "step"])
    for model in steps.index.unique("model"):
        early, late = steps.loc[(model, EARLY)], steps.loc[(model, LATE)]
        falls = "holds" if late["high"] < early["low"] else "not decided"
        yield {
            "finding": f"attention on the prefix falls from step {EARLY} to step {LATE}",
            "model": model,
            "verdict": "opposite" if late["low"] > early["high"] else falls,
            "number": late["mean"] / early["mean"],
            "unit": "of the attention left",
        }


def of_fading(account: pd.DataFrame) -> Iterator[dict]:
    """Does distance take half of the fall or more?"""
    there = account[(account["filler"] == FILLER) & (account["name"] == "distance")]
    measures = {
        "attention": "of the attention on the prefix",
        "lex": "of control (lex)",
        "js": "of control (js)",
    }
    for measure, words in measures.items():
        for model, part in PARTS.items():
            for row in there[(there["part"] == part) & (there["measure"] == measure)].itertuples():
                holds = "holds" if row.low > 0.5 else "not decided"
                yield {
                    "finding": f"distance takes half of the fall {words} or more",
                    "model": model,
                    "verdict": "opposite" if row.high < 0.5 else holds,
                    "number": row.share,
                    "low": row.low,
                    "high": row.high,
                    "unit": "of the fall",
                }


def of_rotary_base(prompts: pd.DataFrame) -> Iterator[dict]:
    """Does distance take less of the attention in Gemma's layers of a large rotary base?"""
    prompts = prompts[(prompts["part"] == PARTS[GEMMA]) & (prompts["filler"] == FILLER)]
    parts = []
    for kind in ("full", "sliding 512"):
        own = prompts[prompts["measure"] == f"attention ({kind})"]
        if own.empty:
            return
        parts += distance_and_fade(own.pivot(index="prompt", columns="state", values="value"))
    drawn = resampled_means(np.stack(parts, axis=1), np.arange(len(parts[0])))
    means = np.concatenate([np.mean(parts, axis=1)[None], drawn])
    change = means[:, 0] / means[:, 1] - means[:, 2] / means[:, 3]
    low, high = np.percentile(change[1:], [2.5, 97.5])
    holds = "holds" if high < 0 else "not decided"
    yield {
        "finding": "distance takes less of the attention where the rotary base is larger",
        "model": GEMMA,
        "verdict": "opposite" if low > 0 else holds,
        "number": change[0],
        "low": low,
        "high": high,
        "unit": "of the fall: the layers of base 1,000,000 minus those of base 10,000",
    }


def distance_and_fade(by_state: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """By prompt, how much of the fade distance takes (its Shapley value), and the fade."""
    others, taken = [name for name in FACTORS if name != "distance"], 0.0
    for n in range(4):
        for factors in combinations(others, n):
            change = by_state[state(*factors)] - by_state[state(*factors, "distance")]
            taken = taken + change / (4 * math.comb(3, n))
    return np.asarray(taken), (by_state["near"] - by_state[FAR]).to_numpy()


def of_cards(heads: pd.DataFrame) -> Iterator[dict]:
    """How many heads do cards that were chosen on other prompts share?"""
    chosen = heads[heads["kind"] == "chosen"]
    for model, own in chosen.groupby("model", sort=False):
        cards = [
            set(zip(card["layer"], card["head"], strict=True)) for _, card in own.groupby("card")
        ]
        shared = [len(one & two) / len(one) for one, two in combinations(cards, 2)]
        layers, heads_of_layer = MODELS[str(model)].shape
        by_chance = len(cards[0]) / (layers * heads_of_layer)
        if len(cards) == MODELS[str(model)].cards:
            yield {
                "finding": "cards of other prompts share more than half of their heads",
                "model": model,
                "verdict": "holds" if min(shared) > 0.5 else "not decided",
                "number": float(np.mean(shared)),
                "low": min(shared),
                "high": max(shared),
                "unit": f"of the heads; the range of all pairs; {by_chance:.2f} by chance",
            }


if __name__ == "__main__":
    main()
