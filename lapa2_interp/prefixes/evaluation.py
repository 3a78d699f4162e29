"""Evaluation of a set of soft prefixes on text it was not trained on.

Every text is scored after every prefix of the set, after the task's hard prefixes and without a
prefix. A prefix that carries its attribute makes that attribute's texts likelier than the other
prefixes of the set do; `accuracy` is the share of texts for which this holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from tqdm import tqdm

from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.bias.text_start import text_start
from lapa2_interp.errors import PrefixError
from lapa2_interp.models.load import load_transformers, move_to_device
from lapa2_interp.models.prepacked import prepacked
from lapa2_interp.prefixes.likelihood import TextRows, text_nll
from lapa2_interp.prefixes.soft_prefix import (
    HeldOutMeasures,
    SoftPrefix,
    cards_in,
    load_prefix,
    write_card,
)
from lapa2_interp.prefixes.training import check_context, tokenise_pieces
from lapa2_interp.progress import progress_bar
from lapa2_interp.stats import Interval, mean_interval
from lapa2_interp.tasks.corpora import Corpus
from lapa2_interp.tasks.task import Task

BATCH = 32
JOINS = {"": "", " + space": " "}
"""Possible joins of a hard prefix and a text, by the end of the prefix's name: directly, or with a
space. The one with the higher accuracy is reported."""


@torch.no_grad()
def prefix_nll(
    network: Any,
    tokenizer: Any,
    texts: Sequence[Sequence[int]],
    prefix: SoftPrefix | str | None,
    bar: tqdm | None = None,
) -> tuple[Float[np.ndarray, " text"], Int[np.ndarray, " text"]]:
    """NLL of each text in nats, summed over its tokens, after a soft or hard prefix, or none; and
    its number of tokens there. Where text starts with nothing, its first token counts in none of
    these, since only a hard prefix predicts it."""
    bos = text_start(tokenizer).token
    keys_and_values, shifted = None, False
    pairs: list[Seam] = [((), text) for text in texts]
    if isinstance(prefix, SoftPrefix):
        keys_and_values = torch.stack([prefix.keys, prefix.values]).to(
            network.device, network.dtype
        )
        shifted = prefix.card.shifted
    elif prefix is not None:
        pairs = [after_hard_prefix(tokenizer, prefix, text) for text in texts]
    order = sorted(range(len(texts)), key=lambda i: (pairs[i][0], len(pairs[i][1])))
    # Texts after the same tokens, at most BATCH at a time.
    batches = [
        same[i : i + BATCH]
        for same in (list(indices) for _, indices in groupby(order, key=lambda i: pairs[i][0]))
        for i in range(0, len(same), BATCH)
    ]
    totals = np.zeros(len(texts))
    with prepacked(network):
        for part in batches:
            front = () if bos is None else (bos,)
            start = (*front, *pairs[part[0]][0])
            rows = TextRows.of([pairs[j][1] for j in part], start, network.device)
            if bos is None:
                rows.targets[:, len(start)] = False
            keys = values = None
            if keys_and_values is not None:
                keys, values = keys_and_values[:, None].expand(-1, len(part), -1, -1, -1, -1)
            nll = text_nll(network, rows, keys, values, shifted)
            totals[part] = nll.double().sum(1).cpu().numpy()
            if bar is not None:
                bar.update(len(part))
    return totals, np.array([len(text) - (bos is None) for _, text in pairs])


Seam = tuple[tuple[int, ...], Sequence[int]]
"""Token ids of a hard prefix, and of the text after it."""


def after_hard_prefix(tokenizer: Any, prefix: str, text: Sequence[int]) -> Seam:
    """Tokenise a hard prefix and a text as one string, as is done with a prompt (`Layout.of`): a
    space between them joins the text's first token.

    Args:
        prefix: The prefix, with the space if there is one.
        text: Token ids of the text alone.
    """
    joined = prefix + tokenizer.decode(text, clean_up_tokenization_spaces=False)
    read = tokenizer(joined, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in read.offset_mapping]
    first = next(i for i, end in enumerate(ends) if end > len(prefix.rstrip()))
    return tuple(read.input_ids[:first]), read.input_ids[first:]


def nll_table(
    network: Any,
    tokenizer: Any,
    prefixes: Mapping[str, SoftPrefix | str | None],
    texts: Mapping[str, Sequence[Sequence[int]]],
    label: str = "held-out",
) -> pd.DataFrame:
    """NLL of every text after every prefix: columns label, text (its number), tokens, prefix, nll
    (summed).

    Args:
        prefixes: By name, a soft prefix, the text of a hard prefix, or None.
        texts: Token ids of texts by label.
    """
    total = len(prefixes) * sum(map(len, texts.values()))
    frames = []
    with progress_bar(total, label, "text") as bar:
        for name, rows in texts.items():
            columns = {"label": name, "text": np.arange(len(rows))}
            for name_of_prefix, prefix in prefixes.items():
                nll, tokens = prefix_nll(network, tokenizer, rows, prefix, bar)
                scores = {"tokens": tokens, "prefix": name_of_prefix, "nll": nll}
                frames.append(pd.DataFrame(columns | scores))
    return pd.concat(frames, ignore_index=True)


def nll_interval(table: pd.DataFrame) -> Interval:
    """NLL per token of the texts in a table, with the 95 % interval from resampling texts."""
    nll, tokens = table["nll"].to_numpy(), table["tokens"].to_numpy()
    # The mean over tokens, each with its text's NLL per token, is that of all tokens.
    interval = mean_interval(
        np.repeat(nll / tokens, tokens), np.repeat(np.arange(len(nll)), tokens)
    )
    return replace(interval, n=len(nll))


def likeliest_under_own_prefix(table: pd.DataFrame, prefixes: Mapping[str, str]) -> pd.Series:
    """True for each text that is likeliest under the prefix of its own label, by (label, text).

    Args:
        prefixes: Names of the prefixes in the table, by label.
    """
    wide = table[table["prefix"].isin(prefixes.values())].pivot(
        index=["label", "text"], columns="prefix", values="nll"
    )
    best = wide.idxmin(axis=1)
    return best == wide.index.get_level_values("label").map(prefixes)


@numbers_checked
def evaluate_sets(
    folders: Sequence[Path],
    task: Task,
    corpora: Sequence[Corpus],
    *,
    limit: Count = 250,
    max_tokens: Count = 64,
    dtype: str = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """Score held-out texts after every prefix of sets of one task and model, and write the numbers
    into their cards.

    Args:
        limit: Texts per attribute, shared evenly among the corpora.
        max_tokens: Tokens of a text; its first piece is scored.

    Returns:
        One row per set, label and prefix: set, label, prefix, nll, low, high, n.

    Raises:
        PrefixError: A folder is not a set; the sets differ in model, weights or attributes; or
            texts after a prefix exceed the model's context.
        DataError: An attribute has no text.
    """
    # Load the sets, and check that they fit together.
    sets = {
        folder: {card.attribute: load_prefix(folder, card.attribute) for card in cards_in(folder)}
        for folder in folders
    }
    for of_set in sets.values():
        for name in of_set:
            task.prefix(name)
    kinds = {
        (p.card.model, p.card.weights, tuple(sorted(of_set)))
        for of_set in sets.values()
        for p in of_set.values()
    }
    if len(kinds) > 1:
        raise PrefixError(
            "the sets differ in model, weights or attributes:"
            f" {' | '.join(str(kind) for kind in sorted(kinds))}"
        )
    model, wanted, _ = kinds.pop()
    names = [name for name in task.attributes if name in sets[folders[0]]]
    # Load the model, and tokenise the texts.
    network, tokenizer, weights = load_transformers(model, dtype, trust_remote_code)
    if weights != wanted:
        raise PrefixError(f"the set was made for {model} with weights {wanted}; found {weights}")
    slots = max(len(prefix) for of_set in sets.values() for prefix in of_set.values())
    check_context(network, tokenizer, task, names, slots, max_tokens)
    move_to_device(network, device)
    share = -(-limit // len(corpora))
    texts = {
        name: [
            text
            for corpus in corpora
            for text in tokenise_pieces(
                tokenizer, [corpus], name, max_tokens, min(share, len(corpus.texts[name]))
            )
        ]
        for name in names
    }
    # Score without a prefix and after the hard prefixes, once for all sets.
    plain: dict[str, SoftPrefix | str | None] = {"none": None}
    plain |= {
        f"hard {name}{how}": task.prefix(name) + join
        for how, join in JOINS.items()
        for name in names
    }
    table = nll_table(network, tokenizer, plain, texts, f"{task.name} hard prefixes")
    hard = max(
        (
            likeliest_under_own_prefix(table, {name: f"hard {name}{how}" for name in names})
            for how in JOINS
        ),
        key=lambda right: right.mean(),
    )
    data = "; ".join(f"{corpus.source} (sha256 {corpus.sha256[:12]})" for corpus in corpora)
    # Score each set, and write its cards.
    rows = []
    for folder, prefixes in sets.items():
        own = nll_table(network, tokenizer, prefixes, texts, f"{task.name} {folder.name}")
        right = likeliest_under_own_prefix(own, {name: name for name in names})
        nll = pd.concat([own, table], ignore_index=True)
        intervals = {
            pair: nll_interval(part) for pair, part in nll.groupby(["label", "prefix"], sort=False)
        }
        for name, prefix in prefixes.items():
            held_out = HeldOutMeasures(
                data=data,
                max_tokens=max_tokens,
                nll={
                    prefix: interval
                    for (label, prefix), interval in intervals.items()
                    if label == name
                },
                accuracy=_share_interval(right[right.index.get_level_values("label") == name]),
                accuracy_of_set=_share_interval(right),
                hard_accuracy_of_set=_share_interval(hard),
            )
            write_card(prefix.card.model_copy(update={"held_out": held_out}), folder)
        rows += [
            (str(folder), label, prefix, interval.mean, interval.low, interval.high, interval.n)
            for (label, prefix), interval in intervals.items()
        ]
    return pd.DataFrame(rows, columns=["set", "label", "prefix", "nll", "low", "high", "n"])


def _share_interval(right: pd.Series) -> Interval:
    return mean_interval(right.to_numpy(float), np.arange(len(right)))
