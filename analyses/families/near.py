"""A prefix that stays near: its cached keys are rotated by a position a step.

    python analyses/families/near.py write smollm2-135m --models FOLDER
    python analyses/families/near.py judge smollm2-135m --models FOLDER

Rotary scores depend on the distance between query and key alone. Inside `kept_near` the cached keys
of BOS, prefix and prompt, or of the prefix alone, move on with the text as soon as their end is
`NEAR` tokens away. All else stays: values of deeper layers are those that were read at the true
distance, and no attention is added. So this undoes distance, and nothing else.

*write* makes texts of 256 tokens on 200 prompts, into made/MODEL/near, a file for each arm and
attribute; a call that was stopped goes on. *judge* writes figures/families/near.csv: for each arm
and each quarter of the texts the accuracy by both classifiers, and the cost by the model of another
family; and near.differences.csv with what keeping near adds, without a bias and beside one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analyses.families.analyse import difference_of, replace_rows
from analyses.families.grids import (
    CARDS,
    CHOSEN,
    HALF,
    MADE,
    MODELS,
    NO_BIAS,
    OUT,
    path_of,
    recipe_of,
    tuned_strengths,
)
from analyses.lab.scripts import ScriptOptions
from analyses.rivals.analyse import digits, judged_nll, score
from lapa2_interp import Selection, generate, load_model
from lapa2_interp.attention.cache import BridgeRows
from lapa2_interp.files import atomic_write
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.stats import holm, mean_interval

NEAR, TOKENS, QUARTERS = 16, 256, 4
Kept = Literal["", "input", "prefix"]
ARMS: tuple[tuple[str, Kept], ...] = (
    (NO_BIAS, ""),
    (NO_BIAS, "input"),
    (NO_BIAS, "prefix"),
    (HALF, ""),
    (HALF, "input"),
    (CHOSEN, ""),
    (CHOSEN, "input"),
)
"""Biases, and what is kept near."""


@contextmanager
def kept_near(model: Model, kept: Kept = "input", near: int = NEAR) -> Iterator[None]:
    """Keep keys near in all texts that are decoded inside the block, one token at a time.

    Args:
        kept: "input", all keys up to the end of the prompt, or "prefix", those of the prefix.
        near: The distance from the prompt's last token at which the keys begin to move.
    """
    speeds = facts_of(model).network.base_model.rotary_emb.inv_freq.float()
    usual_read, usual_expand = BridgeRows.read_tokens, BridgeRows.expand

    def expand(rows: Any, index: Tensor, capacity: int) -> None:
        usual_expand(rows, index, capacity)
        width = rows.cache.get_seq_length()
        rows.moved = torch.zeros(len(index), 1, width, 1, dtype=torch.bool)
        for row, i in enumerate(index.tolist()):
            layout = rows.layouts[i]
            rows.moved[row, :, slice(*layout.prefix) if kept == "prefix" else slice(None)] = True
        rows.as_read = [layer.keys[:, :, :width].clone() for layer in rows.cache.layers]

    def read_tokens(rows: Any, tokens: Tensor, keep: int = 1) -> Tensor:
        width = rows.moved.shape[2]
        steps = rows.cache.get_seq_length() - width + 1 - near
        if steps > 0:
            for layer, keys in zip(rows.cache.layers, rows.as_read, strict=True):
                layer.keys[:, :, :width] = torch.where(
                    rows.moved, turned(keys, steps * speeds), keys
                )
        return usual_read(rows, tokens, keep)

    BridgeRows.read_tokens, BridgeRows.expand = read_tokens, expand  # type: ignore[method-assign]
    try:
        yield
    finally:
        del BridgeRows.read_tokens, BridgeRows.expand


def turned(keys: Tensor, angles: Tensor) -> Tensor:
    """Keys [row kv_head slot d_head], rotated by angles [d_head / 2]; dimension i turns with
    dimension i + d_head / 2."""
    wide = torch.promote_types(keys.dtype, torch.float32)
    one, two = keys.to(wide).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(keys.dtype)


def name_of(bias: str, kept: Kept) -> str:
    """The name of an arm."""
    return f"{bias}, {kept} kept near" if kept else bias


def main() -> None:
    """Write the texts, or judge them."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("write", "judge"))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    do = {"write": write, "judge": judge}[options.do]
    do(options.model, options.models, options.out)


def write(name: str, models: Path, out: Path) -> None:
    """Write the texts of all arms."""
    model = load_model(path_of(name, models), dtype="bfloat16", model_class="TransformersModel")
    prompts = Path("bases/families-distance.txt").read_text("utf-8").splitlines()
    cards = {card: Selection.load(MADE / name / "cards" / f"{card}.json") for card in CARDS}
    strength = tuned_strengths(out, name)[CHOSEN]
    for bias, moved in ARMS:
        for attribute in ("positive", "negative"):
            file = MADE / name / "near" / f"{name_of(bias, moved)}, {attribute}.parquet"
            if file.exists():
                continue
            parts = {None: prompts}
            if bias == CHOSEN:
                parts = {card: prompts[card % len(CARDS) :: len(CARDS)] for card in CARDS}
            texts = []
            for card, own in parts.items():
                rule = {NO_BIAS: "none", HALF: "lapa2:alpha=0.5"}.get(bias)
                if rule is None:
                    rule = recipe_of(CHOSEN, cards[card], strength, seed=card)
                with kept_near(model, moved) if moved else nullcontext():
                    run = generate(
                        model, own, attribute=attribute, augmentation=rule, length=TOKENS,
                        eos="block", trace="none", max_rows=80,
                    )  # fmt: skip
                texts.append(run.texts())
            with atomic_write(file) as fresh:
                pd.concat(texts, ignore_index=True).to_parquet(fresh, index=False)


def judge(name: str, models: Path, out: Path) -> None:
    """Write near.csv and near.differences.csv."""
    folder, tables = MADE / name / "near", []
    for bias, moved in ARMS:
        for attribute in ("positive", "negative"):
            arm = name_of(bias, moved)
            texts = pd.read_parquet(folder / f"{arm}, {attribute}.parquet").assign(arm=arm)
            for quarter in range(1, QUARTERS + 1):
                tables.append(part_of(texts, quarter).assign(quarter=quarter))
    parts = pd.concat(tables, ignore_index=True)
    with ScoreCache(folder / "scores") as cache:
        parts = score(parts, cache)
    parts["nll"] = judged_nll(
        parts, path_of(MODELS[name].judge, models), folder / "scores" / "judge.csv", "bfloat16"
    )["nll"]
    parts["prompt"] = list(map(digits, parts["whole prompt"]))
    rows, tests = [], []
    for (arm, quarter), own in parts.groupby(["arm", "quarter"], sort=False):
        base = parts[(parts["arm"] == NO_BIAS) & (parts["quarter"] == quarter)]
        cost = np.exp(difference_of(own, base, "nll").mean)
        for metric in ("acc hidden", "acc (linear)", "rep"):
            mean = mean_interval(own[metric], own["prompt"])
            where = {"arm": arm, "quarter": quarter, "metric": metric}
            rows.append(where | mean.columns | {"texts": mean.n, "cost": cost})
        for bias, moved in ARMS:
            if not moved or name_of(bias, moved) != arm:
                continue
            usual = parts[(parts["arm"] == bias) & (parts["quarter"] == quarter)]
            for metric in ("acc hidden", "acc (linear)"):
                change = difference_of(own, usual, metric)
                ends = {"difference": change.mean, "low": change.low, "high": change.high}
                where = {"arm": arm, "against": bias, "quarter": quarter, "metric": metric}
                tests.append(where | ends | {"p": change.p})
    differences = pd.DataFrame(tests)
    last = differences["quarter"] == QUARTERS  # the tests of the plan
    for _, own in differences[last].groupby("metric"):
        differences.loc[own.index, "p_holm"] = holm(own["p"].to_numpy())
    replace_rows(out / "near.csv", name, pd.DataFrame(rows))
    replace_rows(out / "near.differences.csv", name, differences)


def part_of(texts: pd.DataFrame, quarter: int) -> pd.DataFrame:
    """A quarter of each text's words, as a continuation of what stands before it."""
    rows = []
    for row in texts.to_dict("records"):
        words = row["continuation"].split(" ")
        first, last = (len(words) * i // QUARTERS for i in (quarter - 1, quarter))
        before, own = (" ".join(part) for part in (words[:first], words[first:last]))
        front = row["prompt"] + before
        space = " " if before else ""
        rows.append(
            row
            | {"whole prompt": row["prompt"], "prompt": front, "continuation": space + own}
            | {"text": own}
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main()
