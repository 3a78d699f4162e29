"""A reader of answers, who does not know what the judges said; and a second judge of languages.

    python analyses/messages/reader.py draw qwen2.5-coder-1.5b-instruct RUN ... --sheet FOLDER
    python analyses/messages/reader.py agree qwen2.5-coder-1.5b-instruct --sheet FOLDER
    python analyses/messages/reader.py languages qwen2.5-coder-1.5b-instruct RUN ...

after the stage test; RUN is a folder with answers of the test (made/MODEL/messages/test/run).

*draw* takes `ANSWERS` answers of the test: as many of each kind, and of a kind as nearly as
possible one half that follows by its judge. It writes FOLDER/sheet.md for the reader (number,
message, answer), and key.csv, which the reader does not get. *agree* reads FOLDER/labels.csv
(number, follows: yes or no), and writes figures/messages/reader.csv, with an answer a row, and
reader.agreement.csv, the percentage of answers on which reader and judge agree, by kind and in all.

*languages* asks lingua (pip install lingua-language-detector) for the language of every answer to a
message of the kind "language", and writes languages.csv: by verdict of the judge, how many answers
lingua gives the language of their message. It may say one of `LANGUAGES`, or none.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.families.analyse import replace_rows
from analyses.families.grids import MODELS
from analyses.lab.scripts import ScriptOptions
from analyses.messages.analyse import arm_of, judged, numbered
from analyses.messages.chats import OUT, STAGES, kinds_of, messages_in
from lapa2_interp.errors import DataError
from lapa2_interp.files import write_text
from lapa2_interp.runs.run import load_run
from lapa2_interp.table_formats import as_csv, as_text

ANSWERS = 100
SEED = 1
SAYS = {"yes": 100.0, "no": 0.0}
LANGUAGES = ("ENGLISH", "FRENCH", "GERMAN", "ITALIAN", "PORTUGUESE", "SPANISH")
SURE = 0.1
"""How much likelier lingua's language must be than the next one."""


def main() -> None:
    """Draw the answers, or compare the reader or lingua with the judges."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("draw", "agree", "languages"))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--sheet", type=Path, help="the folder of the reader's sheet")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.do != "agree" and not options.runs:
        parser.error(f"{options.do} reads answers, and needs the folder of a run")
    if options.do != "languages" and options.sheet is None:
        parser.error(f"{options.do} needs --sheet, the folder of the reader's sheet")
    if options.do == "agree":
        table = compared(options.sheet)
        replace_rows(options.out / "reader.csv", options.model, table)
        numbers = agreement(table)
        replace_rows(options.out / "reader.agreement.csv", options.model, numbers)
        print(as_text(numbers, ".3g"))
        return
    answers = answers_of(options.runs, options.model, options.out)
    if options.do == "draw":
        write_sheet(drawn(answers), options.sheet)
        return
    numbers = languages(answers[answers["kind"] == "language"])
    replace_rows(options.out / "languages.csv", options.model, numbers)
    print(as_text(numbers, ".3g"))


def answers_of(folders: Sequence[Path], model: str, tables: Path) -> pd.DataFrame:
    """The judged answers of all runs, a row each, in one order."""
    messages, parts = messages_in("test", kinds_of(model, tables)), []
    for folder in folders:
        run = load_run(folder, earlier=True)  # a run has an arm at a time
        texts = run.texts(list(run.finished))
        texts["arm"] = [arm_of(run.by_key[key]) for key in texts["cell"]]
        parts.append(numbered(judged(texts, messages), STAGES["test"], messages))
    return pd.concat(parts).sort_values(["arm", "message", "chat", "turn"], ignore_index=True)


def drawn(answers: pd.DataFrame) -> pd.DataFrame:
    """`ANSWERS` answers, as many of each kind and, where there are enough, of both verdicts; in
    random order."""
    rng, rows = np.random.default_rng(SEED), []
    kinds = list(answers.groupby("kind", sort=True))
    for i, (_, own) in enumerate(kinds):
        left = ANSWERS // len(kinds) + (i < ANSWERS % len(kinds))
        broken, followed = (own[own["followed"] == verdict] for verdict in (0, 100))
        n_broken = min(len(broken), max(left // 2, left - len(followed)))
        for verdict, n in ((broken, n_broken), (followed, left - n_broken)):
            rows.append(verdict.iloc[rng.permutation(len(verdict))[:n]])
    table = pd.concat(rows)
    table = table.iloc[rng.permutation(len(table))].reset_index(drop=True)
    return table.assign(number=table.index + 1)


def write_sheet(answers: pd.DataFrame, folder: Path) -> None:
    """Write the reader's sheet and the key."""
    columns = answers[["number", "message", "continuation"]]
    parts = [
        f"## {number}\n\nMessage: {message}\n\nAnswer:\n\n{answer.strip()}\n"
        for number, message, answer in columns.itertuples(index=False, name=None)
    ]
    write_text(folder / "sheet.md", "\n".join(parts))
    key = answers[["number", "arm", "message", "kind", "chat", "turn", "followed"]]
    write_text(folder / "key.csv", as_csv(key, 6))


def compared(folder: Path) -> pd.DataFrame:
    """The key with the reader's labels.

    Raises:
        DataError: An answer has no label, or one that is neither yes nor no.
    """
    key = pd.read_csv(folder / "key.csv")
    labels = pd.read_csv(folder / "labels.csv", dtype=str).set_index("number")["follows"]
    said = key["number"].astype(str).map(labels).str.strip().str.lower()
    if wrong := [
        f"{number}: {label!r}"
        for number, label in zip(key["number"], said, strict=True)
        if label not in SAYS
    ]:
        raise DataError(f"{folder / 'labels.csv'} must say yes or no; it has {', '.join(wrong)}")
    return key.assign(reader=said.map(SAYS)).rename(columns={"followed": "judge"})


def agreement(table: pd.DataFrame) -> pd.DataFrame:
    """By kind and in all: the number of answers, and the percentage on which both agree."""
    same = 100.0 * (table["judge"] == table["reader"])
    rows = [{"kind": "all", "answers": len(same), "agree": same.mean()}]
    for kind, own in same.groupby(table["kind"]):
        rows.append({"kind": kind, "answers": len(own), "agree": own.mean()})
    return pd.DataFrame(rows)


def languages(answers: pd.DataFrame) -> pd.DataFrame:
    """By verdict of the judge: answers, and the percentage to which lingua gives the language of
    their message."""
    from lingua import Language, LanguageDetectorBuilder

    allowed = [getattr(Language, name) for name in LANGUAGES]
    builder = LanguageDetectorBuilder.from_languages(*allowed)
    detector = builder.with_minimum_relative_distance(SURE).build()
    rows = []
    for verdict, own in answers.groupby("followed"):
        said = map(detector.detect_language_of, own["continuation"])
        right = [
            language is not None and language.name.title() in message
            for language, message in zip(said, own["message"], strict=True)
        ]
        rows.append({"judge": verdict, "answers": len(own), "lingua": 100.0 * np.mean(right)})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main()
