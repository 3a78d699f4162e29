"""A prefix that stays near: its cached keys are rotated by a position a step.

    python analyses/families/near.py write smollm2-135m --models FOLDER
    python analyses/families/near.py judge smollm2-135m --models FOLDER --cost
    python analyses/families/near.py forced smollm2-135m --models FOLDER

Rotary scores depend on the distance between query and key alone. Inside `kept_near` the cached keys
of BOS, prefix and prompt, or of the prefix alone, move on with the text as soon as their end is
`NEAR` tokens away. All else stays: values of deeper layers are those that were read at the true
distance, and no attention is added. So this undoes distance, and nothing else.

*write* makes texts of 256 tokens on 200 prompts, into made/MODEL/near, a file for each arm and
attribute; a call that was stopped goes on. *judge* reads the arms that are written, and makes
tables in figures/families. near.csv has for each arm and quarter of the texts the accuracy by both
classifiers. near.differences.csv has what keeping near adds, without a bias and beside one. With
`--cost` near.costs.csv has the cost of every arm by the model of another family, which reads the
texts of the first 50 prompts.

*forced* lets every arm read the same texts of 1,000 tokens behind both prefixes. The model wrote
them without a prefix. near.forced.csv has three measures in thousandths of a nat by token, over
stretches of the text: lex and js, the control (`circuits.METRICS`), and nll, the negative
log-likelihood of the text behind the positive prefix. A row with *against* is a difference.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analyses.families.analyse import ATTRIBUTES, difference_of, exact_p, replace_rows
from analyses.families.grids import (
    CHOSEN,
    HALF,
    MADE,
    MODELS,
    NO_BIAS,
    OUT,
    cards_of,
    path_of,
    recipe_of,
    tuned_strengths,
)
from analyses.lab.scripts import ScriptOptions
from analyses.rivals.analyse import digits, judged_nll, score
from lapa2_interp import generate, load_model
from lapa2_interp.attention.cache import BridgeRows, new_rows
from lapa2_interp.attention.continued_rows import continued_rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.bias.augmentation import AugmentationLike
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.examples import RAW, write_texts
from lapa2_interp.circuits.metrics import METRICS, Predictions
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.stats import holm, mean_interval

NEAR, TOKENS, QUARTERS = 16, 256, 4
PROMPTS = Path("bases/families-distance.txt")
COST_PROMPTS = 50
"""Prompts whose texts the model of another family reads."""
FORCED, FORCED_PROMPTS = 1000, 32
STRETCHES = ((16, 64), (64, 128), (128, 256), (256, 512), (512, 1000))
"""Stretches of a forced text: first token, and the token behind the last."""
Kept = Literal["", "input", "prefix"]
ARMS: tuple[tuple[str, Kept], ...] = (
    (NO_BIAS, ""),
    (NO_BIAS, "input"),
    (HALF, ""),
    (HALF, "input"),
    (NO_BIAS, "prefix"),
    (CHOSEN, ""),
    (CHOSEN, "input"),
)
"""Biases, and what is kept near, in the order in which they are written."""


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
    """Write the texts, judge them, or read forced ones."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("write", "judge", "forced"))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--cost", action="store_true", help="of each arm, which takes longest")
    options = parser.parse_args()
    if options.do == "judge":
        judge(options.model, options.models, options.out, options.cost)
        return
    do = {"write": write, "forced": read_forced_texts}[options.do]
    do(options.model, options.models, options.out)


def write(name: str, models: Path, out: Path) -> None:
    """Write the texts of all arms."""
    model = load_model(path_of(name, models), dtype="bfloat16", model_class="TransformersModel")
    prompts = PROMPTS.read_text("utf-8").splitlines()
    for bias, moved in ARMS:
        for attribute in ATTRIBUTES:
            file = MADE / name / "near" / f"{name_of(bias, moved)}, {attribute}.parquet"
            if file.exists():
                continue
            parts = {None: prompts}
            if bias == CHOSEN:
                studied = MODELS[name]
                parts = {
                    card: prompts[card % studied.cards :: studied.cards] for card in studied.numbers
                }
            texts = []
            for card, own in parts.items():
                rule = rule_of(name, bias, card, out)
                with kept_near(model, moved) if moved else nullcontext():
                    run = generate(
                        model, own, attribute=attribute, augmentation=rule, length=TOKENS,
                        eos="block", trace="none", max_rows=80,
                    )  # fmt: skip
                texts.append(run.texts())
            with atomic_write(file) as fresh:
                pd.concat(texts, ignore_index=True).to_parquet(fresh, index=False)


def rule_of(name: str, bias: str, card: int | None, out: Path) -> str:
    """The recipe of a bias; that of the chosen heads takes a card."""
    if card is None:
        return {NO_BIAS: "none", HALF: "lapa2:alpha=0.5"}[bias]
    heads = cards_of(name, out)[card]
    return recipe_of(CHOSEN, name, heads, tuned_strengths(out, name)[CHOSEN], seed=card)


def judge(name: str, models: Path, out: Path, with_cost: bool) -> None:
    """Write near.csv and near.differences.csv."""
    folder, tables = MADE / name / "near", []
    written = [
        arm
        for arm in ARMS
        if all(
            (folder / f"{name_of(*arm)}, {attribute}.parquet").exists() for attribute in ATTRIBUTES
        )
    ]
    for bias, moved in written:
        for attribute in ATTRIBUTES:
            arm = name_of(bias, moved)
            texts = pd.read_parquet(folder / f"{arm}, {attribute}.parquet").assign(arm=arm)
            for quarter in range(1, QUARTERS + 1):
                tables.append(part_of(texts, quarter).assign(quarter=quarter))
    parts = pd.concat(tables, ignore_index=True)
    with ScoreCache(folder / "scores") as cache:
        parts = score(parts, cache)
    parts["prompt"] = list(map(digits, parts["whole prompt"]))
    rows, tests = [], []
    for (arm, quarter), own in parts.groupby(["arm", "quarter"], sort=False):
        for metric in ("acc hidden", "acc (linear)", "rep"):
            there = own[own[metric].notna()]  # a part without a word has no value
            mean = mean_interval(there[metric], there["prompt"])
            where = {"arm": arm, "quarter": quarter, "metric": metric}
            rows.append(where | mean.columns | {"texts": mean.n})
        for bias, moved in written:
            if not moved or name_of(bias, moved) != arm:
                continue
            usual = parts[(parts["arm"] == bias) & (parts["quarter"] == quarter)]
            for metric in ("acc hidden", "acc (linear)"):
                both = [part[part[metric].notna()] for part in (own, usual)]
                change = difference_of(*both, metric)
                ends = {"difference": change.mean, "low": change.low, "high": change.high}
                where = {"arm": arm, "against": bias, "quarter": quarter, "metric": metric}
                tests.append(where | ends | {"p": exact_p(*both, metric)})
    differences = pd.DataFrame(tests)
    last = differences["quarter"] == QUARTERS  # the tests of the plan
    for _, own in differences[last].groupby("metric"):
        if len(written) == len(ARMS):  # they are corrected together
            differences.loc[own.index, "p_holm"] = holm(own["p"].to_numpy())
    replace_rows(out / "near.csv", name, pd.DataFrame(rows))
    replace_rows(out / "near.differences.csv", name, differences)
    if with_cost:
        replace_rows(out / "near.costs.csv", name, costs(name, models, written))


def costs(name: str, models: Path, written: Sequence[tuple[str, Kept]]) -> pd.DataFrame:
    """What arms cost, by the texts of the first prompts."""
    folder, tables = MADE / name / "near", []
    for arm in (name_of(*arm) for arm in written):
        for attribute in ATTRIBUTES:
            texts = pd.read_parquet(folder / f"{arm}, {attribute}.parquet").assign(arm=arm)
            prompts = list(dict.fromkeys(PROMPTS.read_text("utf-8").splitlines()))[:COST_PROMPTS]
            tables.append(texts[texts["prompt"].isin(prompts)])
    texts = pd.concat(tables, ignore_index=True)
    judge_model = path_of(MODELS[name].judge, models)
    texts["nll"] = judged_nll(texts, judge_model, folder / "scores" / "judge.csv", "bfloat16")[
        "nll"
    ]
    base = texts[texts["arm"] == NO_BIAS]
    rows = []
    for arm, own in texts.groupby("arm", sort=False):
        change = difference_of(own, base, "nll")
        ends = {"cost": change.mean, "low": change.low, "high": change.high}
        rows.append({"arm": arm} | {end: np.exp(value) for end, value in ends.items()})
        rows[-1]["texts"] = len(own)
    return pd.DataFrame(rows)


def read_forced_texts(name: str, models: Path, out: Path) -> None:
    """Write near.forced.csv; differences are thousandths of a nat, so the model is in float32."""
    model = load_model(path_of(name, models), dtype="float32", model_class="TransformersModel")
    prompts = PROMPTS.read_text("utf-8").splitlines()[:FORCED_PROMPTS]
    file = MADE / name / "near" / "forced.json"
    if not file.exists():
        written = write_texts(model, load_task("sentiment"), RAW, prompts, tokens=FORCED)
        write_text(file, json.dumps(written))
    texts = json.loads(file.read_text("utf-8"))
    contrast_set = ContrastSet.of(model, "sentiment", prompts=prompts, texts=texts)
    values = {}
    for bias, moved in ARMS:
        arm_file = MADE / name / "near" / f"forced, {name_of(bias, moved)}.npz"
        if not arm_file.exists():
            cards = [MODELS[name].card_of(i) for i in range(len(prompts))]
            rules: list[AugmentationLike] = [
                None
                if bias == NO_BIAS
                else parse_recipes(rule_of(name, bias, card if bias == CHOSEN else None, out))
                for card in cards
            ]
            with kept_near(model, moved) if moved else nullcontext():
                measured = forced_values(model, contrast_set, rules)
            with atomic_write(arm_file) as fresh, fresh.open("wb") as stream:
                np.savez(stream, **measured)
        values[name_of(bias, moved)] = dict(np.load(arm_file))
    rows = []
    for bias, moved in ARMS:
        arm = name_of(bias, moved)
        for against in dict.fromkeys(("", NO_BIAS, bias)):
            if against == arm:
                continue
            for measure, own in values[arm].items():
                change = own - values[against][measure] if against else own
                for first, end in STRETCHES:
                    mean = mean_interval(1000 * change[:, first:end].mean(axis=1), prompts)
                    where = {"arm": arm, "against": against, "measure": measure}
                    rows.append(where | {"first": first, "end": end} | mean.columns | {"n": mean.n})
    replace_rows(out / "near.forced.csv", name, pd.DataFrame(rows))


@torch.no_grad()
def forced_values(
    model: Model, contrast_set: ContrastSet, rules: Sequence[AugmentationLike]
) -> dict[str, np.ndarray]:
    """lex, js and nll of every text, [example step], which is read token by token.

    Args:
        rules: The bias of each example.
    """
    examples = contrast_set.examples
    n_branches = len(examples[0].layouts)
    layouts = [example.layouts[branch] for branch in range(n_branches) for example in examples]
    padded, by_row = left_pad(layouts), list(rules) * n_branches
    texts = torch.tensor([example.text for example in examples])
    n_steps = texts.shape[1]
    rows = new_rows(model)
    with augmented(model, by_row, padded):
        logits = rows.prompt_pass(padded)
    values: dict[str, list] = {"lex": [], "js": [], "nll": []}
    index, capacity = torch.arange(len(layouts)), len(padded[0]) + n_steps
    with continued_rows(model, rows, index, capacity, by_row, padded, None) as rows:
        for step in range(n_steps):
            branches = logits.unflatten(0, (n_branches, len(examples)))
            token = texts[:, step : step + 1]
            seen = Predictions(branches, token, words=contrast_set.words)
            for measure in ("lex", "js"):
                values[measure].append(METRICS[measure](seen))
            values["nll"].append(-seen.target[:, 0].gather(1, token))
            if step < n_steps - 1:
                logits = rows.read_tokens(token.repeat(n_branches, 1))
    return {measure: torch.cat(steps, dim=1).numpy() for measure, steps in values.items()}


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
