"""What a set of soft prefixes learned, on text it was not trained on.

Every text is scored behind every prefix of the set, behind the task's hard prefixes and behind none. A prefix that carries its
attribute makes that attribute's texts likelier than its siblings do; `accuracy` is the share of texts for which that is so.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from tqdm import tqdm

from lapa2_interp.corpora import Corpus
from lapa2_interp.errors import PrefixError
from lapa2_interp.layout import text_markers
from lapa2_interp.prefixes import HeldOut, SoftPrefix, cards, load_prefix, save_prefix
from lapa2_interp.prefixes.scoring import TextRows, text_nll
from lapa2_interp.prefixes.training import tokenise
from lapa2_interp.stats import Interval, mean_interval
from lapa2_interp.tasks import Task

BATCH = 32
JOINS = ("", " ")
"""What may stand between a hard prefix and a text. The better one on the texts at hand is reported."""


@torch.no_grad()
def score_texts(
    network: Any,
    tokenizer: Any,
    texts: Sequence[Sequence[int]],
    prefix: SoftPrefix | str | None,
    bar: tqdm | None = None,
) -> Float[np.ndarray, " text"]:
    """NLL of each text in nats, summed over its tokens, behind a soft prefix, a hard one, or none."""
    start = [text_markers(tokenizer).start]
    both = None
    if isinstance(prefix, SoftPrefix):
        both = torch.stack([prefix.keys, prefix.values]).to(network.device, network.dtype)
    elif prefix is not None:
        start += tokenizer(prefix, add_special_tokens=False).input_ids
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found = np.zeros(len(texts))
    for i in range(0, len(order), BATCH):
        part = order[i : i + BATCH]
        rows = TextRows.of([texts[j] for j in part], start, network.device)
        if both is None:
            nll = text_nll(network, rows)
        else:
            spread = both[:, None].expand(-1, len(part), -1, -1, -1, -1)
            nll = text_nll(network, rows, spread[0], spread[1], isinstance(prefix, SoftPrefix) and prefix.card.shifted)
        found[part] = nll.double().sum(1).cpu().numpy()
        if bar is not None:
            bar.update(len(part))
    return found


def held_out_table(
    network: Any,
    tokenizer: Any,
    prefixes: Mapping[str, SoftPrefix],
    task: Task,
    texts: Mapping[str, Sequence[Sequence[int]]],
) -> pd.DataFrame:
    """Every text behind every prefix: columns label, text (its number), tokens, prefix, nll (summed).

    `prefix` is an attribute, "hard <attribute>" with the prefix directly in front, "hard <attribute> " with a space between, or
    "none".
    """
    behind: dict[str, SoftPrefix | str | None] = {"none": None, **prefixes}
    behind |= {f"hard {name}{join}": task.prefix(name) + join for name in prefixes for join in JOINS}
    total = len(behind) * sum(map(len, texts.values()))
    every = 0.5 if sys.stderr.isatty() else 30.0
    frames = []
    with tqdm(
        total=total, unit="text", desc=f"{task.name} held-out", delay=2, mininterval=every, dynamic_ncols=True
    ) as bar:
        for label, rows in texts.items():
            columns = {"label": label, "text": np.arange(len(rows)), "tokens": [len(row) for row in rows]}
            for name, prefix in behind.items():
                nll = score_texts(network, tokenizer, rows, prefix, bar)
                frames.append(pd.DataFrame({**columns, "prefix": name, "nll": nll}))
    return pd.concat(frames, ignore_index=True)


def nll_interval(table: pd.DataFrame) -> Interval:
    """NLL per token of the texts in a table, with the 95 % interval from resampling texts."""
    nll, tokens = table["nll"].to_numpy(), table["tokens"].to_numpy()
    # A ratio of sums: resample texts, with numerator and denominator together.
    picks = np.random.default_rng(0).multinomial(len(nll), np.full(len(nll), 1 / len(nll)), size=2000)
    low, high = np.percentile((picks @ nll) / (picks @ tokens), [2.5, 97.5])
    return Interval(float(nll.sum() / tokens.sum()), float(low), float(high), len(nll), len(nll))


def likeliest(table: pd.DataFrame, prefixes: Mapping[str, str]) -> pd.Series:
    """Whether each text is likeliest under the prefix of its own label, by (label, text).

    Args:
        prefixes: By label, the name of its prefix in the table.
    """
    wide = table[table["prefix"].isin(prefixes.values())].pivot(index=["label", "text"], columns="prefix", values="nll")
    best = wide.idxmin(axis=1)
    return best == wide.index.get_level_values("label").map(prefixes)


def evaluate_set(
    folder: Path,
    task: Task,
    corpora: Sequence[Corpus],
    *,
    limit: int = 250,
    max_tokens: int = 64,
    dtype: str = "bfloat16",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """Score held-out texts behind every prefix of a set, and write the numbers into its cards.

    Args:
        limit: Texts per attribute, of each the first piece of at most `max_tokens`.

    Returns:
        One row per label and prefix: label, prefix, nll, low, high, n.

    Raises:
        PrefixError: The folder is not a set, or belongs to another task.
        DataError: An attribute has no text.
    """
    from lapa2_interp.models import load_transformers

    names = [card.attribute for card in cards(folder)]
    if not names:
        raise PrefixError(f"{folder} holds no soft prefixes; `lapa2 prefix train --out` makes a set")
    for name in names:
        task.prefix(name)
    names = [name for name in task.attributes if name in names]
    prefixes = {name: load_prefix(folder, name) for name in names}
    card = prefixes[names[0]].card
    network, tokenizer, weights = load_transformers(card.model, dtype, trust_remote_code)
    if weights != card.weights:
        raise PrefixError(f"the set was made for {card.model} with weights {card.weights}; found {weights}")
    network.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    texts = {
        name: tokenise(
            tokenizer, corpora, name, max_tokens, min(limit, sum(len(c.texts.get(name, ())) for c in corpora))
        )
        for name in names
    }
    table = held_out_table(network, tokenizer, prefixes, task, texts)
    right = likeliest(table, {name: name for name in names})
    hard = max(
        (likeliest(table, {name: f"hard {name}{join}" for name in names}) for join in JOINS),
        key=lambda found: found.mean(),
    )
    labels = right.index.get_level_values("label")
    intervals = {pair: nll_interval(part) for pair, part in table.groupby(["label", "prefix"], sort=False)}
    data = "; ".join(f"{corpus.source} (sha256 {corpus.sha256[:12]})" for corpus in corpora)
    for name, prefix in prefixes.items():
        own = right[labels == name].to_numpy(float)
        held_out = HeldOut(
            data=data,
            max_tokens=max_tokens,
            nll={prefix: found for (label, prefix), found in intervals.items() if label == name},
            accuracy=mean_interval(own, np.arange(len(own))),
            accuracy_of_set=mean_interval(right.to_numpy(float), np.arange(len(right))),
            hard_accuracy_of_set=mean_interval(hard.to_numpy(float), np.arange(len(hard))),
        )
        card = prefix.card.model_copy(update={"held_out": held_out})
        stored = str(prefix.keys.dtype).removeprefix("torch.")
        save_prefix(SoftPrefix(prefix.keys, prefix.values, card), folder, stored)
    return pd.DataFrame(
        [
            {"label": label, "prefix": prefix, "nll": found.mean, "low": found.low, "high": found.high, "n": found.n}
            for (label, prefix), found in intervals.items()
        ]
    )
