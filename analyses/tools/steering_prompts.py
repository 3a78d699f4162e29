"""The prompts of the grids of analyses/steering, analyses/bases, analyses/families and
analyses/learned, and of `analyses/undecided/run.sh`: the paper's 35, and neutral ones of DExperts
(OpenWebText).

    python analyses/tools/steering_prompts.py dexperts_owt_sentiment_10k.jsonl.xz

writes them into the current folder, one prompt on each line: steering-prompts.txt (575 prompts),
steering-selection.txt (64 others, on which heads and strengths are selected), and the files of
`BASES` in bases/, whose prompts are in no other file. Prompts of more than 20 words, prompts with a
newline, and repeated prompts are left out. Only steering-selection.txt has prompts that begin with
punctuation, which tokenizers join with the prefix's colon.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pandas as pd

from analyses.lab.scripts import ScriptOptions
from lapa2_interp.errors import DataError
from lapa2_interp.files import write_text
from lapa2_interp.methods.registry import load_task

NEUTRAL, SELECTION = 540, 64
"""Numbers of neutral prompts of the grid, and of prompts for selection."""
MOST_WORDS = 20
BASES = {
    "select-sentiment": 64,
    "select-topic": 64,
    "sentiment-1": 200,
    "sentiment-2": 200,
    "sentiment-3": 200,
    "sentiment-4": 200,
    "sentiment-5": 200,
    "methods": 300,
    "topic-1": 57,
    "topic-2": 57,
    "topic-3": 57,
    "topic-4": 57,
    "topic-5": 57,
    "undecided": 810,
    "rivals-pilot": 20,
    "rivals": 300,
    "families-select-1": 64,
    "families-select-2": 64,
    "families-select-3": 64,
    "families-select-4": 64,
    "families-select-5": 64,
    "families-tune": 60,
    "families": 400,
    "families-distance": 200,
}
"""Numbers of prompts by file in bases/, taken from the end of the neutral ones;
bases/sentiment.txt and bases/topic.txt have all of their five parts."""


def choose_prompts(
    texts: Iterable[str], neutral: int = NEUTRAL, selection: int = SELECTION
) -> tuple[list[str], list[str]]:
    """The grid's prompts and the prompts for selection; no prompt stands twice.

    Args:
        texts: Neutral prompts in order: of the first `neutral` that fit, the grid takes those that
            begin with a letter or digit; the next `selection` are for selection; from the rest the
            grid takes what it still lacks.
        neutral: Number of neutral prompts after those of the tasks sentiment and topic.
        selection: Number of prompts for selection.

    Raises:
        DataError: There are too few prompts.
    """
    own = [text for name in ("sentiment", "topic") for text in load_task(name).prompts.texts]
    fit = [text for text in dict.fromkeys(texts) if _fits(text) and text not in own]
    held_out = fit[neutral : neutral + selection]
    others = [text for text in fit[:neutral] + fit[neutral + selection :] if text[0].isalnum()]
    if len(held_out) < selection or len(others) < neutral:
        raise DataError(
            f"{neutral} neutral prompts of at most {MOST_WORDS} words that begin with a letter or"
            f" digit are needed, and {selection} others; found {len(others)} and {len(held_out)};"
            " give a longer file"
        )
    return own + others[:neutral], held_out


def bases_prompts(texts: Iterable[str]) -> dict[str, list[str]]:
    """The prompts of analyses/bases by file; none is in the files of analyses/steering.

    Args:
        texts: Neutral prompts in order.

    Raises:
        DataError: There are too few prompts.
    """
    texts = list(texts)
    used = {text for part in choose_prompts(texts) for text in part}
    fit = [text for text in dict.fromkeys(texts) if _fits(text) and text[0].isalnum()]
    unused = [text for text in reversed(fit) if text not in used]
    if len(unused) < sum(BASES.values()):
        raise DataError(
            f"{sum(BASES.values())} neutral prompts of at most {MOST_WORDS} words that begin with a"
            f" letter or digit are needed besides those of analyses/steering; found {len(unused)};"
            " give a longer file"
        )
    rest = iter(unused)
    chosen = {name: list(islice(rest, n)) for name, n in BASES.items()}
    files_of_bases = {
        task: [text for i in range(1, 6) for text in chosen[f"{task}-{i}"]]
        for task in ("sentiment", "topic")
    }
    return chosen | files_of_bases


def _fits(text: str) -> bool:
    """It is one line of 1 to 20 words."""
    return 0 < len(text.split()) <= MOST_WORDS and len(text.splitlines()) == 1


def read_neutral(file: Path) -> list[str]:
    """The prompts of a .jsonl file (or .jsonl.xz) whose "kind" is "neutral", in its order.

    Raises:
        DataError: Not readable, or without the fields prompt and kind.
    """
    try:
        table = pd.read_json(file, lines=True)
        return list(table["prompt"][table["kind"] == "neutral"])
    except (OSError, ValueError, KeyError, EOFError) as error:
        reason = " ".join(str(error).split())[:160]
        raise DataError(
            f"cannot read prompts from {file}: {reason}; give JSON lines with prompt and kind"
        ) from error


def main() -> None:
    """Write the files."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    neutral = read_neutral(parser.parse_args().file)
    prompts, selection = choose_prompts(neutral)
    files = {"steering-prompts.txt": prompts, "steering-selection.txt": selection}
    for name, texts in bases_prompts(neutral).items():
        # A space in front, since some tokenizers join the prefix's colon with the first word.
        space = " " if name.startswith("families") else ""
        files[f"bases/{name}.txt"] = [space + text for text in texts]
    Path("bases").mkdir(exist_ok=True)
    for name, texts in files.items():
        write_text(Path(name), "".join(f"{text}\n" for text in texts))
        print(f"{len(texts)} prompts: {name}")


if __name__ == "__main__":
    main()
