"""Do texts written behind a soft prefix carry its attribute? A scorer tells, and the card states
it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from lapa2_interp.cell import Cell
from lapa2_interp.errors import PrefixError
from lapa2_interp.machine import tell_if_slow
from lapa2_interp.methods import for_task, load_task
from lapa2_interp.models import load_model
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.scoring import Scorer
from lapa2_interp.scoring.embedded import EmbeddedScorer
from lapa2_interp.scoring.tables import score_table
from lapa2_interp.scoring.transformer import Classifier
from lapa2_interp.soft_prefix import Generated, SoftPrefix, cards, load_prefix, save_prefix
from lapa2_interp.stats import mean_interval


def prefix_accuracy(
    folders: Sequence[Path],
    *,
    samples: int = 4,
    length: int = 64,
    alpha: float = 0.5,
    classifier: str = "embedded",
    dtype: str = "auto",
    device: str | None = None,
    seed: int = 1,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """Continue the task's prompts behind every prefix of the sets, score the texts, and write
    accuracies into the cards.

    Args:
        samples: Texts per prompt.
        length: Tokens of a text, the prompt's included where the task counts them.
        classifier: "embedded", or a sequence classifier whose labels are the attributes.

    Returns:
        One row per set, attribute and arm: set, attribute, arm, accuracy, low, high, n.

    Raises:
        PrefixError: A folder is not a set.
        Lapa2Error: As `load_model`, `make_cells` and the scorer.
    """
    if not folders:
        raise PrefixError("name the folder of a set; `lapa2 prefix train --out` makes one")
    tell_if_slow(dtype, device)
    found = {folder: cards(folder) for folder in folders}
    for folder, there in found.items():
        if not there:
            raise PrefixError(
                f"{folder} holds no soft prefixes; `lapa2 prefix train --out` makes a set"
            )
    scorers: dict[str, Scorer] = {}
    rows, model, loaded = [], None, ""
    for folder, there in found.items():
        first = there[0]
        if first.model != loaded:
            model, loaded = load_model(first.model, dtype=dtype, device=device), first.model
        task = load_task(first.task)
        if first.task not in scorers:
            scorers[first.task] = (
                EmbeddedScorer(first.task)
                if classifier == "embedded"
                else Classifier(classifier, device=device, trust_remote_code=trust_remote_code)
            )
        method = for_task("prefix", task, prefixes=str(folder))
        cells = [
            Cell.of(
                model,
                method=method,
                task=task,
                attribute=card.attribute,
                alpha=each,
                length=length,
                samples=samples,
                seed=seed,
                trace="none",
            )
            for each in (0.0, alpha)
            for card in there
        ]
        texts = make_cells(model, cells).samples()
        texts["arm"] = texts["alpha"].map({0.0: "baseline", alpha: "lapa2"})
        scores = score_table(texts, scorers[first.task])
        scores = scores[scores["value"].notna()]
        for card in there:
            own = scores[scores["attribute"] == card.attribute]
            arms = {
                arm: mean_interval(part["value"].to_numpy(), part["prompt"])
                for arm, part in own.groupby("arm")
            }
            rows += [
                {
                    "set": folder.name,
                    "attribute": card.attribute,
                    "arm": arm,
                    "accuracy": each.mean,
                    "low": each.low,
                    "high": each.high,
                    "n": each.n,
                }
                for arm, each in arms.items()
            ]
            prefix = load_prefix(folder, card.attribute)
            generated = Generated(
                scorer=str(own["scorer"].iloc[0]),
                length=length,
                alpha=alpha,
                baseline=arms["baseline"],
                lapa2=arms["lapa2"],
            )
            changed = prefix.card.model_copy(update={"generated": generated})
            save_prefix(
                SoftPrefix(prefix.keys, prefix.values, changed),
                folder,
                str(prefix.keys.dtype).removeprefix("torch."),
            )
    return pd.DataFrame(rows)
