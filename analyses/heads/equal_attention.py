"""Sets of heads at equal attention on the prefix, on prompts that chose none: figures/heads.

    make steering-prompts
    lapa2 select smollm2-135m --prompts bases/select-sentiment.txt --score slope --heads 24 \\
        --out card.json
    python analyses/heads/equal_attention.py grid --card card.json \\
        --prompts bases/select-sentiment.txt --out analyses/heads/sentiment.toml
    analyses/heads/run.sh
    python analyses/heads/equal_attention.py judge results/heads --out figures/heads

`grid` gives every set the alpha at which texts without a bias have the mean attention on the prefix
(over layers, heads and steps) that the chosen heads give them at alpha 1. The sets: all heads;
the chosen ones; as many of largest attention; as many random heads of the same layers, none of them
chosen (*random*), and none of them among those that oppose the prefix most either (*random, no
opposers*); and the chosen heads with the opposing ones far down. A draw of random heads has a third
of the prompts. Other grids: `--model`, with a card of that model; `--prefix`, other words; and
`--prefixes`, soft ones, with a card of them.

`judge` writes texts.parquet (a row a text, without the text: digits of its prompt's digest),
arms.csv and differences.csv: the chosen heads minus every other set, and every set minus no bias,
paired on prompts, with Holm's correction over all tests of a scorer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.lab.scripts import ScriptOptions
from analyses.rivals.analyse import digits
from analyses.rivals.readers import hidden_words
from lapa2_interp import Selection, load_model
from lapa2_interp.attention.tables import pooled
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.edits import Heads
from lapa2_interp.circuits.prefix_attention import (
    alpha_at_prefix_attention,
    mean_prefix_attention,
    prefix_attention_by_head,
)
from lapa2_interp.circuits.selection import random_heads
from lapa2_interp.circuits.units import all_heads
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.generation.settings import TASK
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.facts import Model
from lapa2_interp.runs.run import load_run
from lapa2_interp.scoring.echo import MASK
from lapa2_interp.scoring.equal_perplexity import BASELINE
from lapa2_interp.scoring.registry import ScorerOptions, score_texts
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.stats import holm, mean_interval, paired_difference
from lapa2_interp.table_formats import as_csv, as_text

DOWN = ", opposing down"
TEXTS = 16
"""Texts without a bias on which attention is measured."""
DRAWS = 3
FAR_DOWN = -6.0
"""What is added to the prefix's scores in opposing heads: exp(-6) of their weight is left."""
WHAT = "of analyses/heads/run.sh"
METRICS = ("acc hidden", "acc (linear)")


def main() -> None:
    """Write the grid, or judge its texts."""
    parser = ScriptOptions("Sets of heads at equal attention")
    parser.add_argument("do", choices=("grid", "judge"))
    parser.add_argument("run", type=Path, nargs="?", help="the run that is judged")
    parser.add_argument("--card", type=Path, help="of lapa2 select")
    parser.add_argument("--prompts", type=Path, help="a prompt a line")
    parser.add_argument("--model", default="smollm2-135m", help="a name, a hub id or a folder")
    parser.add_argument("--prefix", default=TASK, help='words such as "A {attribute} text:"')
    parser.add_argument("--prefixes", default="hard", help="hard, or a soft set such as mle")
    parser.add_argument("--size", type=int, default=100, help="prompts in a third")
    parser.add_argument("--out", type=Path, required=True, help="grid: a file; judge: a folder")
    options = parser.parse_args()
    if options.do == "grid":
        if options.card is None or options.prompts is None:
            parser.error("grid needs --card and --prompts")
        if options.prefix != TASK and options.prefixes != "hard":
            parser.error("--prefix is a hard prefix; leave out --prefixes")
        model = load_model(options.model, dtype="float32", model_class="TransformersModel")
        prompts = options.prompts.read_text("utf-8").splitlines()[: TEXTS // 2]
        card = Selection.load(options.card)
        words = {"prefix": options.prefix, "prefixes": options.prefixes}
        text = grid(model, card, prompts, options.model, **words, size=options.size)
        write_text(options.out, text)
        return
    if options.run is None:
        parser.error("judge needs the folder of a run")
    judge(options.run, options.out)


def head_sets(
    model: Model, card: Selection, contrast_set: ContrastSet
) -> dict[str, list[Heads | None]]:
    """The sets by name: one for all prompts, or one for each third; None is all heads."""
    masses = prefix_attention_by_head(model, contrast_set)
    every, chosen = all_heads(model), f"{len(card.heads)} heads"
    heavy = np.argsort(-masses.ravel(), kind="stable")[: len(card.heads)]
    without = tuple(head for head in every if head not in card.suppressors)
    seeds = range(1, DRAWS + 1)
    return {
        "all heads": [None],
        chosen: [card.heads],
        f"{chosen} of most attention": [tuple(every[i] for i in sorted(heavy))],
        "random": [random_heads(card.heads, every, seed) for seed in seeds],
        "random, no opposers": [random_heads(card.heads, without, seed) for seed in seeds],
        chosen + DOWN: [card.heads],
    }


def grid(
    model: Model,
    card: Selection,
    prompts: Sequence[str],
    model_name: str,
    prefix: str = TASK,
    prefixes: str = "hard",
    size: int = 100,
) -> str:
    """The grid, with a block for each third of the prompts.

    Args:
        model_name: In the grid.
        prefix: Words such as "A {attribute} text:"; task: those of the task.
        prefixes: "hard", or a soft set of the task.
        size: Prompts in a third.
    """
    task = load_task("sentiment")
    if prefix != TASK:
        task = task.with_prefix(prefix)
    examples = [
        example
        for attribute in card.task
        for example in ContrastSet.of(
            model,
            task,
            prefixes=prefixes,
            prompts=list(prompts),
            source=attribute,
            tokens=64,
            seed=2,
        ).examples
    ]
    texts = ContrastSet.of_examples(*examples)
    if prefix == TASK:
        card.check(model, texts)
    goal = mean_prefix_attention(model, texts, Augmentation(alpha=1, heads=card.heads))
    down = Augmentation(law="scale", alpha=FAR_DOWN, heads=card.suppressors)
    arms: dict[str, list[str]] = {"no bias": ["none"]}
    for name, draws in head_sets(model, card, texts).items():
        arms[name] = []
        for heads in draws:
            rule = Augmentation(alpha=1, **({} if heads is None else {"heads": heads}))
            beside = down if name.endswith(DOWN) else None
            alpha = 1.0
            if beside or heads != card.heads:
                alpha = alpha_at_prefix_attention(model, texts, goal, rule, beside=beside)
            print(f"{name}: alpha {alpha:.4f}")
            where = "" if heads is None else f"heads={listed(heads)},"
            recipe = f"lapa2:{where}alpha={alpha:.4f}"
            if beside:
                recipe += f" + lapa2:law=scale,heads={listed(card.suppressors)},alpha={FAR_DOWN:g}"
            arms[name].append(recipe)
    lines = [
        f'description = "Sets of heads, the prefix with {goal:.4f} of the attention"',
        f'model = "{model_name}"',
        'model_class = "TransformersModel"',
        'dtype = "float32"',
        'task = "sentiment"',
        f'method = {{ name = "prefix", prefixes = "{prefixes}" }}',
        f'prefix = "{prefix}"',
        "length = 64",
        "samples = 1",
        'trace = "pooled"',
    ]
    for third in range(DRAWS):
        lines += [
            "",
            "[[block]]",
            f'prompts = {{ file = "heads-{third + 1}.txt", n = {size}, what = "{WHAT}" }}',
            "augmentation = [",
        ]
        for name, recipes in arms.items():
            recipe = recipes[third % len(recipes)]
            label = f"{name} {third + 1}" if len(recipes) > 1 else name
            lines.append(f'    {{ recipe = "{recipe}", label = "{label}" }},')
        lines.append("]")
    return "\n".join(lines) + "\n"


def listed(heads: Heads) -> str:
    """Heads as a recipe takes them."""
    return "/".join(f"{layer}.{head}" for layer, head in heads)


def judge(folder: Path, out: Path) -> None:
    """Score the texts, and compare the sets."""
    run = load_run(folder)
    texts = run.texts(list(run.finished))
    arms = texts["arm"].str.replace(r" [1-3]$", "", regex=True)  # draws of random heads
    texts["arm"] = arms.replace(BASELINE, "no bias")
    hidden = hidden_words("sentiment")
    masked = texts.assign(text=[hidden.sub(MASK, text) for text in texts["text"]])
    options = ScorerOptions(task="sentiment")
    with ScoreCache(folder / "scores") as cache:
        for name, read, scorer in (
            (METRICS[0], masked, "accuracy=adapter"),
            (METRICS[1], texts, "accuracy=linear"),
        ):
            values = pd.to_numeric(score_texts(read, [scorer], options, cache)["value"])
            texts[name] = 100 * values.to_numpy(float)
    steps = pooled(run.trace(list(run.finished)), "prefix")[0]  # sample step
    texts["attention"] = np.nanmean(steps, axis=1)
    texts["prompt"] = list(map(digits, texts["prompt"]))
    rows = texts[["arm", "attribute", "prompt", "sample", "attention", *METRICS]]
    with atomic_write(out / "texts.parquet") as fresh:
        rows.to_parquet(fresh, index=False, compression="zstd")
    arms = [
        {"arm": arm, "measure": measure, "mean": of.mean, "low": of.low, "high": of.high}
        | {"texts": len(own)}
        for arm, own in rows.groupby("arm", sort=False)
        for measure in (*METRICS, "attention")
        for of in [mean_interval(own[measure], own["prompt"])]
    ]
    write_text(out / "arms.csv", as_csv(pd.DataFrame(arms), 5))
    table = differences(rows)
    write_text(out / "differences.csv", as_csv(table, 5))
    print(as_text(table, ".3g"))


def differences(rows: pd.DataFrame) -> pd.DataFrame:
    """The chosen heads minus every other set, and every set minus no bias, paired on prompts."""
    arms = list(dict.fromkeys(rows["arm"]))
    (chosen,) = (arm for arm in arms if re.fullmatch(r"\d+ heads", arm))
    sets = [arm for arm in arms if arm not in ("no bias", chosen)]
    pairs = [(chosen, arm) for arm in sets] + [(arm, "no bias") for arm in (chosen, *sets)]
    table = []
    for metric in METRICS:
        of_metric = []
        for arm, against in pairs:
            one, two = (rows[rows["arm"] == name] for name in (against, arm))
            change = paired_difference(
                one[metric], one["prompt"], two[metric], two["prompt"],
                kinds=(one["attribute"], two["attribute"]),
            )  # fmt: skip
            facts = {"metric": metric, "arm": arm, "against": against, "difference": change.mean}
            of_metric.append(facts | {"low": change.low, "high": change.high, "p": change.p})
        corrected = holm([row["p"] for row in of_metric])
        table += [row | {"p_holm": p} for row, p in zip(of_metric, corrected, strict=True)]
    return pd.DataFrame(table)


if __name__ == "__main__":
    main()
