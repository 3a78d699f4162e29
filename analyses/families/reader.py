"""A reader of texts: Qwen2.5-Coder-1.5B-Instruct is asked a fixed question about each.

    python analyses/families/reader.py agree --models FOLDER
    python analyses/families/reader.py label smollm2-135m --models FOLDER

*agree* asks each of `QUESTIONS` about the texts of sentiment that two readers labelled
(figures/rivals/readers.csv). The question that agrees most with them on the half for development is
the one that is asked from then on. figures/families/reader.agreement.csv has its agreement on the
other half, beside those of `adapter` and `linear`, and reader.question.txt the question.

*label* asks it about the arms of the first measures, and writes figures/families/reader.csv: 100
where the answer is the text's attribute, else 0. It reads the continuation alone, and the words of
the prefixes and their inflections are hidden ("..."). Texts of a Qwen are refused.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analyses.families.analyse import arm_of
from analyses.families.grids import (
    ADDITION,
    CHOSEN,
    GEMMA,
    HALF,
    LARGE_QWEN,
    MADE,
    NO_BIAS,
    OUT,
    SMOLLM2,
    path_of,
)
from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from analyses.rivals.analyse import digits
from analyses.rivals.readers import UNCLEAR, hidden_words, share
from lapa2_interp.files import write_text
from lapa2_interp.models.load import load_transformers
from lapa2_interp.progress import progress_bar
from lapa2_interp.runs.run import load_run
from lapa2_interp.scoring.echo import MASK
from lapa2_interp.table_formats import as_csv, as_text

QUESTIONS = (
    "Is the sentiment of this text positive or negative? Answer with one word.",
    "A person wrote this text. Is the mood of the text positive or negative? Answer with one word.",
    "Does this text speak well or badly of what it is about? Say positive or negative.",
)
ANSWERS = ("positive", "negative")
ROWS = 32
LABELLED = FIGURES / "rivals" / "readers.csv"


def main() -> None:
    """Fix the question, or ask it."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("agree", "label"))
    parser.add_argument("model", choices=(SMOLLM2, GEMMA), nargs="?")
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    network, tokenizer, _ = load_transformers(path_of(LARGE_QWEN, options.models), "bfloat16")
    if options.do == "agree":
        agree(network, tokenizer, options.out)
    elif options.model is None:
        parser.error("label needs a model")
    else:
        label(network, tokenizer, options.model, options.out)


def agree(network, tokenizer, out: Path) -> None:
    """Choose the question, and say how often its answers are the readers'."""
    table = pd.read_csv(LABELLED, keep_default_na=False)
    table = table[table["task"] == "sentiment"].reset_index(drop=True)
    sure = (table["reader 1"] == table["reader 2"]) & (table["reader 1"] != UNCLEAR)
    development = sure & (table["half"] == "development")
    rows, right = [], {}
    for question in QUESTIONS:
        answers = asked(network, tokenizer, question, list(table["text"]))
        right[question] = answers == table["reader 1"].to_numpy()
        rows.append({"half": "development", "who": question} | share(
            pd.Series(right[question][development])
        ))  # fmt: skip
    best = max(QUESTIONS, key=lambda question: right[question][development].mean())
    test = sure & (table["half"] == "test")
    table["reader"] = np.where(right[best], table["reader 1"], "")
    for who in ("reader", "adapter", "linear"):
        own = table.loc[test, who] == table.loc[test, "reader 1"]
        rows.append({"half": "test", "who": who} | share(own.reset_index(drop=True)))
    write_text(out / "reader.question.txt", best + "\n")
    numbers = pd.DataFrame(rows)
    write_text(out / "reader.agreement.csv", as_csv(numbers, 6))
    print(as_text(numbers, ".3g"))


def label(network, tokenizer, model: str, out: Path) -> None:
    """Label a model's texts, and replace its rows in reader.csv."""
    question = (out / "reader.question.txt").read_text("utf-8").strip()
    run = load_run(MADE / model / "test")
    texts = run.texts(list(run.finished))
    texts["arm"] = [arm_of(run.by_key[key]) for key in texts["cell"]]
    texts = texts[texts["arm"].isin((NO_BIAS, HALF, CHOSEN, ADDITION))].reset_index(drop=True)
    hidden = hidden_words("sentiment")
    shown = [hidden.sub(MASK, text).strip() for text in texts["continuation"]]
    answers = asked(network, tokenizer, question, shown)
    rows = pd.DataFrame(
        {
            "model": model,
            "arm": texts["arm"],
            "prompt": list(map(digits, texts["prompt"])),
            "attribute": texts["attribute"],
            "reader": 100.0 * (answers == texts["attribute"].to_numpy()),
        }
    )
    file = out / "reader.csv"
    if file.exists():
        earlier = pd.read_csv(file)
        rows = pd.concat([earlier[earlier["model"] != model], rows], ignore_index=True)
    write_text(file, as_csv(rows, 6))
    print(as_text(rows.groupby(["model", "arm"])["reader"].mean().reset_index(), ".4g"))


@torch.inference_mode()
def asked(network, tokenizer, question: str, texts: Sequence[str]) -> np.ndarray:
    """The likelier answer about each text, of `ANSWERS`, by the first token of each.

    What stands before the texts is the same in all chats, and is read once.
    """
    first = [tokenizer(answer, add_special_tokens=False).input_ids[0] for answer in ANSWERS]
    answers = np.empty(len(texts), object)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{question}\n\nText: {text}"}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for text in texts
    ]
    n_shared = shared_tokens(ids)
    shared = network(torch.tensor([ids[0][:n_shared]]), use_cache=True).past_key_values
    with progress_bar(len(order), "the reader", "text") as bar:
        for start in range(0, len(order), ROWS):
            rows = order[start : start + ROWS]
            width = max(len(ids[i]) for i in rows) - n_shared
            pads = torch.tensor([[n_shared + width - len(ids[i])] for i in rows])
            own = [[0] * int(pad) + ids[i][n_shared:] for i, pad in zip(rows, pads, strict=True)]
            live = torch.arange(width) >= pads  # row query
            cache = copy.deepcopy(shared)
            cache.batch_repeat_interleave(len(rows))
            logits = network(
                torch.tensor(own),
                attention_mask=torch.cat([live.new_ones(len(rows), n_shared), live], dim=1).long(),
                position_ids=n_shared + (torch.arange(width) - pads).clamp(min=0),
                past_key_values=cache,
                logits_to_keep=1,
            ).logits[:, -1, first]
            for i, answer in zip(rows, logits.argmax(1).tolist(), strict=True):
                answers[i] = ANSWERS[answer]
            bar.update(len(rows))
    return answers


def shared_tokens(ids: Sequence[Sequence[int]]) -> int:
    """The number of tokens with which all lists begin, at most all but one of the shortest."""
    most = min(map(len, ids)) - 1
    return next((n for n in range(most) if len({row[n] for row in ids}) > 1), most)


if __name__ == "__main__":
    main()
