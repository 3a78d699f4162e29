"""The grid heads.toml: sets of heads and layers, each at the alpha that gives the prefix the same
mean attention.

    python analyses/heads/make_grid.py --out analyses/heads/heads.toml

Heads by knock-out come from figures/circuits/sentiment (`make circuits`), those by attention from
the texts that are read here. The sets are also written to figures/circuits/sentiment/sets.json, so
that analyses/heads/analyse.py can name them. Minutes of two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap

import numpy as np
import pandas as pd

from analyses.lab import FIGURES
from lapa2_interp import Cell, load_model
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.prefix_attention import (
    alpha_at_prefix_attention,
    mean_prefix_attention,
    prefix_attention_by_head,
)
from lapa2_interp.methods import load_task

MODEL, TASK, N, SEEDS = "smollm2-135m", "sentiment", 24, (1, 2, 3, 4, 5)
PROMPTS, TOKENS = 8, 64
TARGET = 1.0
"""The alpha of the heads by knock-out, whose mean attention all others are given."""
CIRCUIT = FIGURES / "circuits" / TASK
SETS = CIRCUIT / "sets.json"
CHOSEN = f"{N} heads by knock-out"
HEADER = """description = "{description}"
model = "{model}"
dtype = "auto"
task = "{task}"
method = "prefix"
samples = 7
length = 128

# `python analyses/heads/make_grid.py` made these numbers. Every arm has the alpha that gives the
# prefix {mass:.4f} of the attention, the mean over all layers and heads: as much as the {n} heads
# by knock-out at alpha {target:g}, and {times:.2f} times the baseline's {base:.4f}. It was measured
# on {texts} texts of the baseline, {tokens} tokens each, of {prompts} prompts. The heads by
# knock-out are the first {n} of figures/circuits/{task}/heads.json (`make circuits`), found on the
# same prompts.
augmentation = ["none",
"""


def head_sets(masses: np.ndarray) -> dict[str, list[list[int]]]:
    """The sets by name, each as a sorted list [[layer, head], ...].

    Args:
        masses: Attention on the prefix, [layer head].
    """
    effects = pd.read_csv(CIRCUIT / "head.csv").sort_values("effect")
    every = [[layer, head] for layer, head in np.ndindex(*masses.shape)]
    heavy = np.argsort(-masses.ravel(), kind="stable")[:N]
    sets = {
        "by knock-out": json.loads((CIRCUIT / "heads.json").read_text("utf-8"))[:N],
        "by attention": [every[i] for i in heavy],
        "of lowest effect": effects[["layer", "head"]].head(N).to_numpy().tolist(),
    }
    for seed in SEEDS:
        drawn = np.random.default_rng(seed).choice(len(every), N, replace=False)
        sets[f"at random, draw {seed}"] = [every[i] for i in drawn]
    return {f"{N} heads {name}": sorted(heads) for name, heads in sets.items()}


def named_sets(file: Path = SETS) -> dict[frozenset, str]:
    """The names of sets of heads, by the set; none where there is no such file."""
    if not file.is_file():
        return {}
    sets = json.loads(file.read_text("utf-8"))
    return {
        frozenset((int(i), int(j)) for i, j in (head.split(".") for head in heads)): name
        for name, heads in sets.items()
    }


def scope(cell: Cell, names: Mapping[frozenset, str]) -> str:
    """The name of an arm, from the heads or layers that it augments."""
    if not cell.active_augmentations:
        return "baseline"
    (rule,) = cell.active_augmentations
    if rule.heads != "all":
        return names.get(frozenset(rule.heads), f"{len(rule.heads)} heads ({rule.label})")
    return "all heads" if rule.layers == "all" else f"{rule.layers} layers"


def main() -> None:
    """Calibrate every arm and write the grid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the grid file; by default it is printed")
    options = parser.parse_args()
    model, task = load_model(MODEL, dtype="auto"), load_task(TASK)
    prompts = task.prompts.texts[:PROMPTS]
    examples = [
        example
        for attribute in task.attributes
        for example in ContrastSet.of(
            model, TASK, prompts=prompts, source=attribute, tokens=TOKENS, seed=2
        ).examples
    ]
    contrast_set = ContrastSet.of_examples(*examples)
    base = mean_prefix_attention(model, contrast_set)
    sets = head_sets(prefix_attention_by_head(model, contrast_set))
    arms: dict[str, dict] = {"all heads": {}}
    arms |= {name: {"heads": heads} for name, heads in sets.items()}
    arms |= {f"{name} layers": {"layers": name} for name in ("bottom", "top", "even", "odd")}
    goal = mean_prefix_attention(model, contrast_set, Augmentation(alpha=TARGET, **arms[CHOSEN]))
    facts = {"n": N, "model": MODEL, "task": TASK, "mass": goal, "base": base, "target": TARGET}
    facts["description"] = "Head scope at equal attention: heads by several scores, and layers"
    facts |= {"times": goal / base, "texts": len(examples), "tokens": TOKENS, "prompts": PROMPTS}
    lines = [HEADER.format(**facts)]
    for name, where in arms.items():
        rule = Augmentation(alpha=TARGET, **where)
        alpha = (
            TARGET if name == CHOSEN else alpha_at_prefix_attention(model, contrast_set, goal, rule)
        )
        print(f"{name}: alpha {alpha:.4f}", file=sys.stderr)
        fields = [f"alpha = {alpha:.4f}"]
        if "layers" in where:
            fields.append(f'layers = "{where["layers"]}"')
        if "heads" in where:
            pairs = wrap(", ".join(f"[{i},{j}]" for i, j in where["heads"]), 110)
            fields.append("heads = [\n    " + "\n    ".join(pairs) + "\n]")
        lines.append(f"# {name[0].upper() + name[1:]}.\n{{ {', '.join(fields)} }},\n")
    text = "".join([*lines, "]\n"])
    if options.out is None:
        print(text, end="")
        return
    options.out.write_text(text, "utf-8")
    shown = {name: [f"{i}.{j}" for i, j in heads] for name, heads in sets.items()}
    SETS.write_text(json.dumps(shown, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
