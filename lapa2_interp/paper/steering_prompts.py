"""The prompts of grid quick/steering: the paper's 35, then neutral ones of DExperts (OpenWebText).

    python -m lapa2_interp.paper.steering_prompts dexperts_owt_sentiment_10k.jsonl.xz

writes steering-prompts.txt (575 prompts) and steering-selection.txt (64 others, on which heads and
strengths are selected), one prompt on each line, into the current folder. Prompts of more than 20
words, prompts with a newline, and repeated prompts are left out. The 575 also exclude prompts that
begin with punctuation, which tokenizers join with the prefix's colon.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from lapa2_interp._util.errors import DataError
from lapa2_interp._util.files import write_text
from lapa2_interp.methods.registry import load_task
from lapa2_interp.paper.scripts import ScriptOptions

NEUTRAL, SELECTION = 540, 64
"""Numbers of neutral prompts of the grid, and of prompts for selection."""
MOST_WORDS = 20


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
    fit = [
        text
        for text in dict.fromkeys(texts)
        if 0 < len(text.split()) <= MOST_WORDS and len(text.splitlines()) == 1 and text not in own
    ]
    held_out = fit[neutral : neutral + selection]
    others = [text for text in fit[:neutral] + fit[neutral + selection :] if text[0].isalnum()]
    if len(held_out) < selection or len(others) < neutral:
        raise DataError(
            f"{neutral} neutral prompts of at most {MOST_WORDS} words that begin with a letter or"
            f" digit are needed, and {selection} others; found {len(others)} and {len(held_out)};"
            " give a longer file"
        )
    return own + others[:neutral], held_out


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
    """Write both files."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    names = ("steering-prompts.txt", "steering-selection.txt")
    for name, prompts in zip(
        names, choose_prompts(read_neutral(parser.parse_args().file)), strict=True
    ):
        write_text(Path(name), "".join(f"{prompt}\n" for prompt in prompts))
        print(f"{len(prompts)} prompts: {name}")


if __name__ == "__main__":
    main()
