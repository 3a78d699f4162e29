"""Distinct-n of a set of texts (section 5.1, Diversity; the released eval_dist.py).

distinct_n = different n-grams of the whole set / tokens of the whole set

n-grams do not cross texts; the denominator is the same for every n. The number falls with the size
of the set and the length of its texts by construction, so only sets of one size and length compare.

Repetition is a number of one text: the share of its 4-grams of words that occur earlier in it. A
text that repeats itself has a low perplexity, so the two are read together.

Words are those of `tasks.segmentation`: graphemes in scripts without spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from lapa2_interp.errors import ScoringError
from lapa2_interp.scoring.scorer import (
    Score,
    Scorer,
    SkippedText,
    TextItem,
    describe_text_failure,
)
from lapa2_interp.stats import label_codes, student_quantile
from lapa2_interp.tasks.segmentation import COUNT_UNIT, words_and_signs

ORDERS = (1, 2, 3)
REPETITION_ORDER = 4
"""n of the n-grams of `Repetition`."""


def token_lists(texts: Sequence[str], tokenizer: Any = None) -> tuple[list[list[int]], str]:
    """Token ids of texts and the tokenizer's name: a transformers tokenizer with its special
    tokens, as the released script counts roberta-large's, or words and punctuation marks without
    one (graphemes in scripts without spaces).

    Raises:
        ScoringError: The tokenizer fails.
    """
    if tokenizer is None:
        numbers: dict[str, int] = {}
        return [
            [numbers.setdefault(word, len(numbers)) for word in words_and_signs(text)]
            for text in texts
        ], COUNT_UNIT
    name = tokenizer.name_or_path or type(tokenizer).__name__
    try:
        return [list(ids) for ids in tokenizer(list(texts)).input_ids], name
    except Exception:  # tokenizers raise errors of many kinds
        for text in texts:
            try:
                tokenizer([text])
            except Exception as error:
                raise ScoringError(
                    f"distinct ({name}): {describe_text_failure('a text', text, error)}"
                ) from error
        raise


def distinct(lists: Sequence[Sequence[int]], n: int) -> float:
    """distinct_n of token lists, in [0, 1].

    Raises:
        ScoringError: There is no token.
    """
    total = sum(map(len, lists))
    if not total:
        raise ScoringError("distinct-n needs at least one token; every text is empty")
    return (
        len({gram for ids in lists for gram in zip(*(ids[i:] for i in range(n)), strict=False)})
        / total
    )


class Repetition(Scorer):
    """1 - distinct n-grams / n-grams of a text, n = 4 words or punctuation marks, in [0, 1)."""

    name = "repetition"
    version = f"{REPETITION_ORDER} {COUNT_UNIT}"
    columns = ("repetition",)
    batch_size = 2048

    def score(self, items: Sequence[TextItem]) -> list[Score]:
        lists, _ = token_lists([item.text for item in items])
        scores: list[Score] = []
        for ids in lists:
            grams = list(zip(*(ids[i:] for i in range(REPETITION_ORDER)), strict=False))
            why = SkippedText(f"under {REPETITION_ORDER} words")
            scores.append((1 - len(set(grams)) / len(grams),) if grams else why)
        return scores


def distinct_table(
    texts: Sequence[str], prompts: Sequence[str], tokenizer: Any = None
) -> pd.DataFrame:
    """distinct-1, -2 and -3 of one set with 95 % intervals.

    A bootstrap would repeat texts and so lower the number. The interval is Student's, from the
    jackknife over prompts, on the logarithm.

    Returns:
        Columns metric, mean, low, high, n (texts), clusters (prompts), scorer (with the tokenizer's
        name).
    """
    lists, name = token_lists(texts, tokenizer)
    codes, names = label_codes(prompts)
    tokens = np.bincount(codes, weights=[len(ids) for ids in lists], minlength=len(names))
    rows = []
    for order in ORDERS:
        mean = distinct(lists, order)
        low = high = np.nan
        if len(names) > 1:
            # To leave one prompt out removes its tokens, and the n-grams that no other prompt has.
            owners: dict[tuple[int, ...], int] = {}
            for code, ids in zip(codes, lists, strict=True):
                for gram in zip(*(ids[i:] for i in range(order)), strict=False):
                    owners[gram] = int(code) if owners.setdefault(gram, int(code)) == code else -1
            alone = np.bincount(
                [owner for owner in owners.values() if owner >= 0], minlength=len(names)
            )
            left = (len(owners) - alone) / np.maximum(tokens.sum() - tokens, 1)
            logs = np.log(np.maximum(left, 1e-12))
            spread = np.sqrt((len(names) - 1) / len(names) * ((logs - logs.mean()) ** 2).sum())
            away = student_quantile(0.975, len(names) - 1) * spread
            low, high = mean * np.exp(-away), min(1.0, mean * np.exp(away))
        rows.append(
            {
                "metric": f"distinct-{order}",
                "mean": mean,
                "low": low,
                "high": high,
                "n": len(lists),
                "clusters": len(names),
                "scorer": f"distinct ({name})",
            }
        )
    return pd.DataFrame(rows)
