"""The share of texts behind a soft prefix that carry its attribute.

A scorer tells, and the card of the prefix states it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from lapa2_interp._util.errors import PrefixError
from lapa2_interp._util.values import Count, Positive, numbers_checked
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.registry import get_for_task, load_task
from lapa2_interp.models.load import load_model
from lapa2_interp.models.machine import DtypeOrAuto, print_if_slow
from lapa2_interp.prefixes.soft_prefix import GeneratedAccuracy, cards_in, write_card
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer
from lapa2_interp.scoring.scorer import CLASSIFIER_CHOICES, expand_scorers
from lapa2_interp.scoring.tables import score_table
from lapa2_interp.stats import mean_interval


@numbers_checked
def prefix_accuracy(
    folders: Sequence[str | Path],
    *,
    task: str | None = None,
    samples: Count = 4,
    length: Count = 64,
    alpha: Positive = 0.5,
    classifier: str = "both",
    dtype: DtypeOrAuto = "float32",
    device: str | None = None,
    seed: int = 1,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """Generate behind soft prefixes, without and with LaPA2; put the accuracy into their cards.

    Args:
        folders: Sets: folders of `lapa2 prefix train --out`.
        task: The task; the one a set was trained for, by default.
        samples: Texts per prompt of the task.
        length: Tokens of a text, the prompt's included where the task counts them.
        alpha: Strength of LaPA2, above 0: 0 is the baseline beside it.
        classifier: adapter or linear, which ship, both, or a sequence classifier: hub id or
            folder.
        dtype: Precision of weights and computation; auto is bfloat16 or float32, whichever this
            machine computes faster.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        seed: Seed of the random streams.
        trust_remote_code: Run code that comes with a model.

    Returns:
        One row per set, attribute, scorer and arm: set, attribute, scorer, arm, accuracy, low,
        high, n.

    Raises:
        PrefixError: A folder is not a set.
        Lapa2Error: As `load_model`, `make_cells` and the scorer.
    """
    if not folders:
        raise PrefixError("name the folder of a set; `lapa2 prefix train --out` makes one")
    print_if_slow(dtype, device)
    sets = {folder: cards_in(folder) for folder in map(Path, folders)}
    asked = expand_scorers(
        ["accuracy", classifier]
        if classifier in CLASSIFIER_CHOICES
        else [f"accuracy={classifier}"],
        (),
    )
    options = ScorerOptions(device=device, trust_remote_code=trust_remote_code)
    rows, model, loaded = [], None, ""
    for folder, there in sets.items():
        first = there[0]
        if first.model != loaded:
            model = load_model(first.model, dtype, device, trust_remote_code=trust_remote_code)
            loaded = first.model
        its_task = load_task(task or first.task)
        method = get_for_task("prefix", its_task, prefixes=str(folder.resolve()))
        cells = [
            cell_of(
                model,
                method=method,
                task=its_task,
                attribute=card.attribute,
                alpha=strength,
                length=length,
                samples=samples,
                seed=seed,
                trace="none",
            )
            for strength in (0.0, alpha)
            for card in there
        ]
        texts = make_cells(model, cells).texts()
        texts["arm"] = texts["alpha"].map({0.0: "baseline", alpha: "lapa2"})
        scorers = [
            make_scorer("accuracy", named.partition("=")[2], replace(options, task=its_task.name))
            for named in asked
        ]
        scores = pd.concat([score_table(texts, scorer) for scorer in scorers], ignore_index=True)
        scores = scores[scores["value"].notna()]
        for card in there:
            own = scores[scores["attribute"] == card.attribute]
            generated = []
            for scorer, part in own.groupby("scorer", sort=False):
                arms = {
                    arm: mean_interval(texts["value"].to_numpy(), texts["prompt"])
                    for arm, texts in part.groupby("arm")
                }
                rows += [
                    {
                        "set": folder.name,
                        "attribute": card.attribute,
                        "scorer": str(scorer),
                        "arm": arm,
                        "accuracy": interval.mean,
                        "low": interval.low,
                        "high": interval.high,
                        "n": interval.n,
                    }
                    for arm, interval in arms.items()
                ]
                generated.append(
                    GeneratedAccuracy(
                        scorer=str(scorer),
                        length=length,
                        alpha=alpha,
                        baseline=arms["baseline"],
                        lapa2=arms["lapa2"],
                    )
                )
            write_card(card.model_copy(update={"generated": tuple(generated)}), folder)
    return pd.DataFrame(rows)
