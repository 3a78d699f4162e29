"""A classifier of words that shares nothing with the scorers of the package."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import numpy as np
import pandas as pd
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.naive_bayes import MultinomialNB

from lapa2_interp.tasks.corpora import read_corpus

CHAT_TAG = "<|im_"


def continuations(texts: pd.DataFrame) -> list[str]:
    """What the model wrote, without the prompt and without chat tags."""
    return [
        re.sub(r"<\|im_\w*\|?>?", " ", text[len(prompt) :])
        for text, prompt in zip(texts["text"], texts["prompt"], strict=True)
    ]


def naive_bayes(
    sources: Sequence[str], labels: Sequence[str]
) -> tuple[CountVectorizer, MultinomialNB]:
    """A classifier of words, and on standard error its accuracy on a tenth of the texts that it has
    not seen.

    Args:
        sources: Labelled texts: names of corpora or files.
        labels: Labels that are read.
    """
    pairs = [
        (text, label)
        for source in sources
        for label, texts_of_label in read_corpus(source, labels).texts.items()
        for text in texts_of_label
    ]
    order = np.random.default_rng(0).permutation(len(pairs))
    counts, model = CountVectorizer(min_df=2), MultinomialNB()
    seen = [pairs[i] for i in order[len(order) // 10 :]]
    model.fit(counts.fit_transform([text for text, _ in seen]), [label for _, label in seen])
    held = [pairs[i] for i in order[: len(order) // 10]]
    right = model.score(counts.transform([text for text, _ in held]), [label for _, label in held])
    print(f"naive Bayes: accuracy {right:.3f} on {len(held)} held-out texts", file=sys.stderr)
    return counts, model
