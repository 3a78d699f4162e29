"""The share of texts behind a soft prefix that carry its attribute.

A scorer tells, and the card of the prefix states it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from lapa2_interp._util.settings import takes
from lapa2_interp.errors import PrefixError
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.registry import get_for_task, load_task
from lapa2_interp.models.load import load_model
from lapa2_interp.models.machine import print_if_slow
from lapa2_interp.prefixes.settings import PrefixAccuracySettings
from lapa2_interp.prefixes.soft_prefix import GeneratedAccuracy, cards_in, write_card
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer
from lapa2_interp.scoring.scorer import CLASSIFIER_CHOICES, expand_scorers
from lapa2_interp.scoring.tables import score_table
from lapa2_interp.stats import mean_interval


@takes(PrefixAccuracySettings)
def prefix_accuracy(settings: PrefixAccuracySettings) -> pd.DataFrame:
    """`lapa2 prefix score` in Python; `PrefixAccuracySettings` says what it does and takes.

    Returns:
        One row per set, attribute, scorer and arm: set, attribute, scorer, arm, accuracy, low,
        high, n.

    Raises:
        PrefixError: A folder is not a set.
        Lapa2Error: As `load_model`, `make_cells` and the scorer.
    """
    if not settings.folders:
        raise PrefixError("name the folder of a set; `lapa2 prefix train --out` makes one")
    print_if_slow(settings.dtype, settings.device)
    sets = {folder: cards_in(folder) for folder in map(Path, settings.folders)}
    asked = expand_scorers(
        ["accuracy", settings.classifier]
        if settings.classifier in CLASSIFIER_CHOICES
        else [f"accuracy={settings.classifier}"],
        (),
    )
    options = ScorerOptions(device=settings.device, trust_remote_code=settings.trust_remote_code)
    rows, model, loaded = [], None, ""
    for folder, there in sets.items():
        first = there[0]
        if first.model != loaded:
            model = load_model(
                first.model,
                settings.dtype,
                settings.device,
                trust_remote_code=settings.trust_remote_code,
            )
            loaded = first.model
        its_task = load_task(settings.task or first.task)
        method = get_for_task("prefix", its_task, prefixes=str(folder.resolve()))
        cells = [
            cell_of(
                model,
                method=method,
                task=its_task,
                attribute=card.attribute,
                alpha=strength,
                length=settings.length,
                samples=settings.samples,
                seed=settings.seed,
                trace="none",
            )
            for strength in (0.0, settings.alpha)
            for card in there
        ]
        texts = make_cells(model, cells).texts()
        texts["arm"] = texts["alpha"].map({0.0: "baseline", settings.alpha: "lapa2"})
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
                        length=settings.length,
                        alpha=settings.alpha,
                        baseline=arms["baseline"],
                        lapa2=arms["lapa2"],
                    )
                )
            write_card(card.model_copy(update={"generated": tuple(generated)}), folder)
    return pd.DataFrame(rows)
