"""Labelled texts for training and evaluation.

Sources are the paper's corpora from the Hugging Face hub, by name, or custom files.

A file is JSON lines, CSV or Parquet with the fields `text` and `label`; it may be compressed (.xz,
.gz, .bz2 and .zip). ParaDetox's fields `toxic` and `neutral` become texts with the labels toxic and
nontoxic.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lapa2_interp._util.parsing import parse_json
from lapa2_interp._util.paths import check_regular_file, kind_of, looked_for
from lapa2_interp._util.unpacking import check_parquet, open_packed
from lapa2_interp.errors import DataError, unknown_choice
from lapa2_interp.tasks.segmentation import text_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HubCorpus:
    """A corpus on the hub, and the names of its labels and splits."""

    repository: str
    text: str
    labels: tuple[str, ...]
    splits: Mapping[str, str]
    """Names on the hub of the splits train and test."""
    tokenised: bool = False
    """The texts are in the lower-case, spaced form of treebanks, which `detokenise` undoes."""


HUB_CORPORA = {
    "imdb": HubCorpus(
        "stanfordnlp/imdb", "text", ("negative", "positive"), {"train": "train", "test": "test"}
    ),
    "sst2": HubCorpus(
        "stanfordnlp/sst2",
        "sentence",
        ("negative", "positive"),
        {"train": "train", "test": "validation"},
        tokenised=True,
    ),
    "agnews": HubCorpus(
        "fancyzhx/ag_news",
        "text",
        ("world", "sports", "business", "science"),
        {"train": "train", "test": "test"},
    ),
}
"""Jigsaw's comments (toxicity) need a registration: download them there and give the file."""


def read_csv(path: Path, **options: Any) -> pd.DataFrame:
    """Read a CSV file literally: "NA" is a text, and the first field is never an index.

    Raises:
        ValueError: Rows have more fields than the first line has names, or two columns have the
            same name.
    """
    with open_packed(path) as opened:
        head = pd.read_csv(opened, header=None, nrows=1, dtype=str, keep_default_na=False)
    _check_names(head.iloc[0])
    usual: dict[str, Any] = {"keep_default_na": False, "na_values": [""], "index_col": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            with open_packed(path) as opened:
                table: Any = pd.read_csv(opened, **usual | options)
        except pd.errors.ParserWarning as error:
            raise ValueError("rows have more fields than the first line has names") from error
    return pd.DataFrame(table)


def read_json_lines(path: Path) -> pd.DataFrame:
    """Read a file with one JSON object on each line, which becomes a row.

    Raises:
        ValueError: A line is no JSON object; the message has its number.
    """
    rows = []
    with open_packed(path) as opened:
        lines = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError("it must be a JSON object")
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            # Half a surrogate pair is left out: no column of texts holds it.
            rows.append(
                {
                    name: value.encode("utf-8", "ignore").decode()
                    if isinstance(value, str)
                    else value
                    for name, value in row.items()
                }
            )
    return pd.DataFrame(rows)


def _read_parquet(path: Path) -> pd.DataFrame:
    import pyarrow.parquet as pq

    check_parquet(path)
    _check_names(pq.read_schema(path).names)
    return pd.read_parquet(path)


def _check_names(names: Iterable[str]) -> None:
    """Raise ValueError if two columns of a table have the same name."""
    if repeated := [name for name, n in Counter(names).items() if n > 1]:
        raise ValueError(f"it has two columns {repeated[0]!r}; give one")


READERS: Mapping[str, Callable[..., pd.DataFrame]] = {
    ".jsonl": read_json_lines,
    ".csv": read_csv,
    ".parquet": _read_parquet,
}


def read_table(path: Path, **options: Any) -> pd.DataFrame:
    """Read a table in JSON lines, CSV or Parquet, by its ending in any letter case, which .xz, .gz,
    .bz2 and .zip may follow.

    Args:
        options: Passed to `pandas.read_csv` for a CSV file.

    Raises:
        ValueError: The file is no regular file, has another ending, two columns of the same name,
            unpacks to more than its size allows, or is damaged.
        OSError: It cannot be read.
    """
    kind = kind_of(path)
    if kind not in READERS:
        raise ValueError(f"it does not end in {', '.join(READERS)}")
    check_regular_file(path)
    return READERS[kind](path, **options if kind == ".csv" else {})


@dataclass(frozen=True)
class Corpus:
    """Labelled texts; blank and repeated texts are left out.

    Attributes:
        texts: Texts by label, in the file's order.
        source: Name or file name.
        blank: Rows left out because they have no text.
        repeated: Rows left out because an earlier row has the same text.
        other: Rows left out because their label was not requested.
        in_another_part: Rows left out because they are in another part (trained on, or held out).
    """

    texts: Mapping[str, tuple[str, ...]]
    source: str
    blank: int = 0
    repeated: int = 0
    other: int = 0
    in_another_part: int = 0

    @cached_property
    def sha256(self) -> str:
        """sha256 of the texts and labels."""
        digest = hashlib.sha256()
        for label, texts in self.texts.items():
            for text in texts:
                digest.update(f"{label}\t{text}\n".encode())
        return digest.hexdigest()

    @property
    def summary(self) -> str:
        """One line with the numbers of texts and of the rows left out."""
        counts = ", ".join(f"{len(texts)} {label}" for label, texts in self.texts.items())
        left_out = {
            "blank": self.blank,
            "repeated": self.repeated,
            "with another label": self.other,
            "that another part has": self.in_another_part,
        }
        noted = ", ".join(f"{n} {why}" for why, n in left_out.items() if n)
        return f"{self.source}: {counts}" + (f" (left out: {noted})" if noted else "")


def read_corpus(source: str, labels: Sequence[str], split: str = "train") -> Corpus:
    """Read the texts of these labels.

    Args:
        source: A name (imdb, sst2, agnews), which is read from the hub, or a file.
        labels: Labels to keep.
        split: Split of a corpus on the hub: train or test.

    Raises:
        DataError: The name is unknown, the file is missing or unreadable, fields are missing, or a
            label has no text.
    """
    frame = _read_hub(source, split) if source in HUB_CORPORA else _read_file(Path(source))
    name = f"{source} {split}" if source in HUB_CORPORA else Path(source).name
    missing = [field for field in ("text", "label") if field not in frame]
    if missing:
        raise DataError(
            f"{source} has no field {missing[0]!r}; found {', '.join(map(str, frame.columns))};"
            " give text and label"
        )
    frame = frame.assign(label=frame["label"].map(str))  # 0 and 1 of a file are names, too
    labelled = frame[frame["label"].isin(list(labels))]
    is_text = labelled["text"].map(lambda text: isinstance(text, str) and bool(text.strip()))
    filled = labelled[is_text.astype(bool)]
    unique = filled.drop_duplicates("text")
    texts = {label: tuple(unique["text"][unique["label"] == label]) for label in labels}
    empty = [label for label, of_label in texts.items() if not of_label]
    if empty:
        raise DataError(
            f"{source} has no text with label {empty[0]!r} (blank ones and repetitions left"
            f" out); its labels are {', '.join(map(repr, frame['label'].unique()[:9]))}"
        )
    return Corpus(
        texts,
        name,
        blank=len(labelled) - len(filled),
        repeated=len(filled) - len(unique),
        other=len(frame) - len(labelled),
    )


def _read_file(path: Path) -> pd.DataFrame:
    if kind_of(path) not in READERS:
        raise DataError(
            f"{unknown_choice('corpus', str(path), HUB_CORPORA)}, or a file that ends in"
            f" {', '.join(READERS)}"
        )
    try:
        return _expand_pairs(read_table(path))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise DataError(f"cannot read {path}: {reason}{looked_for(path)}") from error


def _expand_pairs(frame: pd.DataFrame) -> pd.DataFrame:
    """Turn pairs of toxic and neutral sentences into labelled texts; leave any other table as it
    is. From a list of neutral sentences the first is taken."""
    if not {"toxic", "neutral"} <= set(frame):
        return frame
    first = frame["neutral"].map(_first_text)
    pairs = {"toxic": frame["toxic"], "nontoxic": first}
    return pd.concat(
        [pd.DataFrame({"text": texts, "label": name}) for name, texts in pairs.items()]
    )


def _first_text(value: object) -> str:
    """A text, or the first text of a list; "" if there is none."""
    if isinstance(value, str):
        return value
    return next(iter(value), "") if isinstance(value, Iterable) else ""


def _read_hub(name: str, split: str) -> pd.DataFrame:
    from datasets import disable_progress_bars, load_dataset

    corpus = HUB_CORPORA[name]
    if split not in corpus.splits:
        raise DataError(unknown_choice("split", split, corpus.splits))
    if not sys.stderr.isatty():
        disable_progress_bars()  # carriage returns in a log
    try:
        rows = load_dataset(corpus.repository, split=corpus.splits[split]).to_pandas()
    except Exception as error:  # hub, network and file formats each raise their own
        reason = " ".join(str(error).split())[:120]
        raise DataError(
            f"cannot load {corpus.repository} from the hub ({reason}); give a file instead"
        ) from error
    texts = rows[corpus.text].map(detokenise) if corpus.tokenised else rows[corpus.text]
    return pd.DataFrame({"text": texts, "label": [corpus.labels[int(i)] for i in rows["label"]]})


def detokenise(text: str) -> str:
    """Turn a sentence in a treebank's form ("a gorgeous , witty movie .") into plain text ("A
    gorgeous, witty movie.")."""
    for pattern, written in (
        (r"\s*-lrb-\s*", " ("),
        (r"\s*-rrb-", ")"),
        (r"``\s*", '"'),
        (r"\s*''", '"'),
        (r"\s+(n't|'(?:s|re|ve|ll|d|m)\b|[.,;:!?%)])", r"\1"),
        (r"([($])\s+", r"\1"),
        (r"\bi\b", "I"),
    ):
        text = re.sub(pattern, written, text)
    text = text.strip()
    return text[:1].upper() + text[1:]


def without_texts_of(others: Sequence[Corpus], corpora: Sequence[Corpus]) -> list[Corpus]:
    """Remove the texts of other corpora from corpora, also in another writing (`text_key`).

    Raises:
        DataError: No text of a label is left.
    """
    known = {
        text_key(text) for corpus in others for texts in corpus.texts.values() for text in texts
    }
    cleaned = []
    for corpus in corpora:
        texts = {
            label: tuple(text for text in of_label if text_key(text) not in known)
            for label, of_label in corpus.texts.items()
        }
        if empty := [label for label, of_label in texts.items() if not of_label]:
            raise DataError(
                f"all texts of {corpus.source} with the label {empty[0]!r} are both trained on and"
                " held out; give other held-out texts"
            )
        both = sum(map(len, corpus.texts.values())) - sum(map(len, texts.values()))
        cleaned.append(replace(corpus, texts=texts, in_another_part=corpus.in_another_part + both))
    return cleaned


HELD_OUT_SUFFIX = ", held out"


def split_held_out(
    corpus: Corpus, per_label: int, one_in: int = 5, at_least: int = 1
) -> tuple[Corpus, Corpus]:
    """Split a corpus into (rest, held out). Of each label, the `per_label` texts with the smallest
    sha256 are held out, but at most one text in `one_in`; and what is the same text in another
    writing (`text_key`).

    Raises:
        DataError: Fewer than `at_least` texts of a label are held out.
    """
    rest, held = {}, {}
    for label, texts in corpus.texts.items():
        order = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
        keys = {text: text_key(text) for text in texts}
        chosen = {keys[text] for text in order[: min(per_label, len(texts) // one_in)]}
        held[label] = tuple(text for text in texts if keys[text] in chosen)
        rest[label] = tuple(text for text in texts if keys[text] not in chosen)
        if len(chosen) < at_least:
            raise DataError(
                f"{corpus.source} has {len(texts)} {label!r} texts, too few to hold some out; give"
                f" at least {one_in * at_least}"
            )
    name = f"{corpus.source.removesuffix(HELD_OUT_SUFFIX)}{HELD_OUT_SUFFIX}"
    return replace(corpus, texts=rest), replace(corpus, texts=held, source=name)


def split_pieces(text: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[list[int]]:
    """Token ids of a text in pieces of at most `length`, cut at the ends of sentences. A longer
    sentence is truncated."""
    piece = ""
    ids: list[int] = []
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
        longer = f"{piece} {sentence}".strip()
        new_ids = tokenizer(longer, add_special_tokens=False).input_ids
        if ids and len(new_ids) > length:
            yield ids
            longer, new_ids = sentence, tokenizer(sentence, add_special_tokens=False).input_ids
        piece, ids = longer, _truncate(new_ids, tokenizer, length)
    if ids:
        yield ids


def _truncate(ids: list[int], tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
    """At most `length` tokens, and no token of a character that is cut in two, since its bytes
    alone are another character."""
    for n in range(min(length, len(ids)), 0, -1):
        if n == len(ids) or not tokenizer.decode(ids[:n]).endswith("\N{REPLACEMENT CHARACTER}"):
            return ids[:n]
    return ids[:length]
