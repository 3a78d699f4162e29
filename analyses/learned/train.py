"""What analyses/learned trains: strengths of heads and a vector, on the same pairs.

    python analyses/learned/train.py pairs smollm2-135m --models FOLDER
    python analyses/learned/train.py train smollm2-135m --models FOLDER
    python analyses/learned/train.py compare smollm2-135m --models FOLDER

*pairs* lets the model write texts behind both prefixes on the prompts of two cards of heads, into
made/MODEL/learned/pairs.csv in the current folder. *train* trains both ways with three seeds, and
strengths with shuffled labels with one. figures/learned gets strengths.csv (way, seed, layer, head,
strength), vectors.csv (seed, dimension, value) and history.csv (the parts of the loss, step by
step), after each training. A call that was stopped goes on.
*compare* writes held_out.csv: what learned strengths and their placebos give on the held-out pairs.

The *learned vector* is added after one layer, from the prompt's last token on, behind the positive
prefix; behind the negative one it is subtracted. Its loss is that of the strengths.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analyses.families.analyse import replace_rows
from analyses.families.grids import (
    MADE,
    MODELS,
    chosen_layer,
    path_of,
    selection_file,
)
from analyses.families.grids import OUT as FAMILIES
from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from lapa2_interp import PaddedRows, augmented, load_model
from lapa2_interp.attention.residual import shifted_residual
from lapa2_interp.circuits.gradients import recorded_gradients
from lapa2_interp.circuits.learning import (
    Learned,
    PairObjective,
    Steering,
    TextPair,
    frozen_weights,
    held_out_pairs,
    learn,
)
from lapa2_interp.files import read_checkpoint, write_checkpoint, write_text
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.progress import progress_bar
from lapa2_interp.report.learning import COLUMNS, with_fluent_texts, written_pairs
from lapa2_interp.scoring.scorer import CLASSIFIERS
from lapa2_interp.table_formats import as_csv

OUT = FIGURES / "learned"
PROMPTS = tuple(map(selection_file, (1, 2)))
"""Those on which analyses/families chose its first two cards of heads."""
STRENGTHS, VECTOR = "learned strengths", "learned vector"
SHUFFLED = "learned strengths, shuffled labels"
PERMUTED = "learned strengths, permuted over heads"
SEEDS = (1, 2, 3)
NEUTRAL, COST = "This is a text:", 1.0
LAW: Literal["log"] = "log"
"""As the defaults of `lapa2 learn`."""
STEPS, BATCH, CHECK, RATE = 60, 8, 10, 0.05
TOKENS, TEXTS = 32, 4


def main() -> None:
    """Write pairs, train, or compare."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = {"pairs": write_pairs, "train": train, "compare": compare}
    parser.add_argument("stage", choices=stages)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    stages[options.stage](options.model, options.models, options.out)


def loaded(name: str, models: Path) -> Model:
    """The model that writes pairs and is trained through."""
    return load_model(path_of(name, models), dtype="float32", model_class="TransformersModel")


def write_pairs(name: str, models: Path, out: Path) -> None:
    """Write pairs, once."""
    file = pairs_file(name)
    if file.exists():
        return
    prompts = [line for file in PROMPTS for line in file.read_text("utf-8").splitlines()]
    model = loaded(name, models)
    pairs = written_pairs(model, load_task("sentiment"), prompts, TOKENS, TEXTS, CLASSIFIERS)
    write_text(file, as_csv(with_fluent_texts(model, pairs, TOKENS)[[*COLUMNS]]))


def pairs_file(name: str) -> Path:
    """The pairs of a model."""
    return MADE / name / "learned" / "pairs.csv"


def read(name: str) -> tuple[list[TextPair], dict[str, str]]:
    """Pairs, and the fluent text of each prompt."""
    table = pd.read_csv(pairs_file(name), keep_default_na=False, dtype=str)
    pairs = [TextPair(*row) for row in table[[*COLUMNS[:4]]].itertuples(index=False)]
    return pairs, dict(zip(table["prompt"], table["text"], strict=True))


def train(name: str, models: Path, out: Path) -> None:
    """Train every way with every seed, those left out that the tables have."""
    model, (pairs, texts) = loaded(name, models), read(name)
    layer = chosen_layer(FAMILIES, name)
    history = rows_of(out / "history.csv", name)
    done = set(zip(history.get("way", ()), history.get("seed", ()), strict=True))
    trainings = [*itertools.product((STRENGTHS, VECTOR), SEEDS), (SHUFFLED, SEEDS[0])]
    for way, seed in trainings:
        if (way, seed) in done:
            continue
        if way == VECTOR:
            vector, of_way = learned_vector(model, name, pairs, texts, layer, seed)
            values = {"dimension": range(len(vector)), "value": vector.numpy()}
            add_rows(out / "vectors.csv", name, way, seed, pd.DataFrame(values))
        else:
            learned = learned_strengths(model, name, pairs, texts, way, seed)
            of_way = learned.history
            rows = learned.frame().assign(l0=learned.rule.l0)
            add_rows(out / "strengths.csv", name, way, seed, rows)
        add_rows(out / "history.csv", name, way, seed, of_way)


def rows_of(file: Path, name: str) -> pd.DataFrame:
    """The rows of a model in a table."""
    table = pd.read_csv(file) if file.exists() else pd.DataFrame({"model": []})
    return table[table["model"] == name].drop(columns="model")


def add_rows(file: Path, name: str, way: str, seed: int, rows: pd.DataFrame) -> None:
    """Add the rows of a training to a table."""
    earlier = rows_of(file, name)
    replace_rows(file, name, pd.concat([earlier, rows.assign(way=way, seed=seed)]))


def learned_strengths(
    model: Model,
    name: str,
    pairs: Sequence[TextPair],
    texts: Mapping[str, str],
    way: str,
    seed: int,
) -> Learned:
    """Strengths of heads; with shuffled labels half of the pairs are turned round."""
    if way == SHUFFLED:
        turned = np.random.default_rng(seed).permutation(len(pairs)) < len(pairs) // 2
        pairs = [
            pair._replace(wanted=pair.unwanted, unwanted=pair.wanted) if turn else pair
            for pair, turn in zip(pairs, turned, strict=True)
        ]
    return learn(
        model, pairs, texts=texts, neutral=NEUTRAL, law=LAW, cost=COST,
        steps=STEPS, batch=BATCH, check=CHECK, rate=RATE, seed=seed,
        file=MADE / name / "learned" / f"{way}, {seed}.pt",
    )  # fmt: skip


def learned_vector(
    model: Model,
    name: str,
    pairs: Sequence[TextPair],
    texts: Mapping[str, str],
    layer: int,
    seed: int,
) -> tuple[Tensor, pd.DataFrame]:
    """A vector that is added after a layer; the best of those that were looked at, and their
    losses."""
    objective = PairObjective(model, pairs, texts, NEUTRAL, LAW, COST)
    held_out, trained = held_out_pairs(pairs, seed)
    vector = torch.zeros(model.W_E.shape[1], requires_grad=True)
    optimizer = torch.optim.Adam([vector], lr=RATE)
    file, history, best = MADE / name / "learned" / f"{VECTOR}, {seed}.pt", [], vector.detach()
    step = 0
    if file.exists():
        state = read_checkpoint(file, "cpu")
        with torch.no_grad():
            vector.copy_(state["vector"])
        optimizer.load_state_dict(state["optimizer"])
        step, history, best = state["step"], state["history"], state["best"]
    steering = by_vector(model, pairs, layer, vector)

    def look() -> None:
        nonlocal best
        parts = objective.parts(steering, held_out, BATCH)
        loss = parts["gain"] + COST * (parts["kl"] + parts["rise"])
        earlier = [row["loss"] for row in history if row["part"] == "held-out"]
        if not earlier or loss < min(earlier):
            best = vector.detach().clone()
        history.append({"step": step, "part": "held-out", **parts, "loss": loss})

    with (
        frozen_weights(facts_of(model).network),
        recorded_gradients(),
        progress_bar(STEPS - step, VECTOR, "step") as bar,
    ):
        if not history:
            look()
        while step < STEPS:
            rng = np.random.default_rng([seed, step])
            optimizer.zero_grad()
            chosen = rng.choice(trained, BATCH, replace=False).tolist()
            total, sums = objective.loss(steering, chosen)
            (total / BATCH).backward()
            optimizer.step()
            step += 1
            means = {part: value / BATCH for part, value in sums.items()}
            loss = means["gain"] + COST * (means["kl"] + means["rise"])
            history.append({"step": step, "part": "train", **means, "loss": loss})
            if step % CHECK == 0:
                look()
                state = {"vector": vector.detach(), "optimizer": optimizer.state_dict()}
                write_checkpoint(file, state | {"step": step, "history": history, "best": best})
            bar.update(1)
    return best, pd.DataFrame(history)


def by_vector(model: Model, pairs: Sequence[TextPair], layer: int, vector: Tensor) -> Steering:
    """Steers by a vector after a layer, which is subtracted behind the negative prefix."""
    target = next(pair.prefix for pair in pairs)

    @contextmanager
    def steering(rows: PaddedRows, of_rows: Sequence[int]) -> Iterator[None]:
        signs = [1.0 if pairs[i].prefix == target else -1.0 for i in of_rows]
        # [row 1 d_model], so that each row has a sign of its own
        shift: Any = torch.tensor(signs)[:, None, None] * vector
        with (
            augmented(model, None, rows.layouts),
            shifted_residual(model, {layer: shift}, rows.ids.shape[1] - 1),
        ):
            yield

    return steering


def compare(name: str, models: Path, out: Path) -> None:
    """Write held_out.csv."""
    model, (pairs, texts) = loaded(name, models), read(name)
    objective = PairObjective(model, pairs, texts, NEUTRAL, LAW, COST)
    size = facts_of(model).n_layers, facts_of(model).n_heads
    table, rows = rows_of(out / "strengths.csv", name), []
    for seed in SEEDS:
        held_out, _ = held_out_pairs(pairs, seed)
        ways = {}
        for way in (STRENGTHS, SHUFFLED):
            own = table[(table["way"] == way) & (table["seed"] == seed)]
            if len(own):
                ways[way] = matrix_of(own, size)
        order = torch.randperm(math.prod(size), generator=torch.Generator().manual_seed(seed))
        ways[PERMUTED] = ways[STRENGTHS].flatten()[order].view(size)
        for way, strengths in ways.items():
            with torch.no_grad():
                parts = objective.parts(objective.by_strengths(strengths), held_out, BATCH)
            loss = parts["gain"] + COST * (parts["kl"] + parts["rise"])
            rows.append({"seed": seed, "way": way, "pairs": len(held_out), **parts, "loss": loss})
    replace_rows(out / "held_out.csv", name, pd.DataFrame(rows))


def matrix_of(rows: pd.DataFrame, size: tuple[int, int]) -> Tensor:
    """Strengths, [layer head]."""
    strengths = torch.zeros(size)
    for layer, head, strength in rows[["layer", "head", "strength"]].itertuples(index=False):
        strengths[layer, head] = strength
    return strengths


if __name__ == "__main__":
    main()
