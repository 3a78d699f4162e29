"""The tables of analyses/messages, from the answers of a stage (analyses/messages/chats.py).

    python analyses/messages/analyse.py STAGE qwen2.5-coder-1.5b-instruct --models FOLDER

reads made/MODEL/messages/STAGE/run in the current folder, judges every answer with the program of
its message, and writes to figures/messages:

- *pilot*: pilot.csv, the share of answers that follow by kind and turn. A kind is *followed* where
  at least half of the first answers follow;
- *tune*: strengths.csv, the strengths that were tried, their costs, and the tuned ones;
- *test*, *alarm*: answers.STAGE.parquet, an answer a row, without its text: arm, message, kind,
  chat, turn, if the user asks against, if it follows (100 or 0), tokens, keys before it, attention
  on the message (percent; mean over layers, heads and steps), nll and relevance (the test, at turns
  1, 4 and 8);
- *neutral*: chance.csv, by kind and turn the share of answers to a neutral message that follow the
  messages of the test, which were not given;
- after *test*, or alone with *compare*: shares.csv by arm, kind and turn; differences.csv, arms
  minus no bias at turns 8 and 16, with Holm's correction for all kinds together; costs.csv;
  fade.csv, where no bias first falls below its first turn by kind, and what turns and tokens do.

The *cost* of an arm is the perplexity of its answers given message and question alone, by the model
without a bias, as a multiple of that of no bias. Intervals resample messages.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.families.analyse import costs, difference_of, exact_p, replace_rows
from analyses.families.grids import (
    ADDITION,
    MADE,
    MODELS,
    NO_BIAS,
    next_strengths,
    path_of,
    strengths,
)
from analyses.instructions.analyse import nll
from analyses.lab.scripts import ScriptOptions
from analyses.messages.alarm import bounds_of, logistic
from analyses.messages.chats import (
    ARMS,
    CHOSEN,
    CONSTANT,
    FIRST_STRENGTHS,
    LONG,
    OUT,
    REPEATED,
    STAGES,
    TURNS,
    Stage,
    conversations,
    is_against,
    kinds_of,
    messages_in,
)
from analyses.messages.vector import MessageVector
from lapa2_interp import load_model
from lapa2_interp.attention.tables import pooled
from lapa2_interp.files import atomic_write
from lapa2_interp.generation.cell import Cell
from lapa2_interp.runs.run import Run, load_run
from lapa2_interp.stats import FEW, holm, mean_interval
from lapa2_interp.tasks.exact_messages import Message, exact_messages

FOLLOWED = 50
"""The percentage of first answers from which a kind is followed."""
READ = (1, 4, 8)
"""Turns whose answers have a cost and a relevance."""
COMPARED = (*((arm, NO_BIAS) for arm in ARMS[1:]), (CHOSEN, "all heads"), (CHOSEN, CONSTANT))
"""Arms that are compared; those with no bias are the first measure."""
FITS = 400
"""Resampled fits of turns and tokens."""


def main() -> None:
    """Write the tables of a stage."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=(*STAGES, "compare"))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, help="the folder of `make models`")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.stage == "compare":
        compare(options.model, options.out)
        return
    if options.models is None and options.stage in ("tune", "test"):
        parser.error(f"{options.stage} reads answers with the model, and needs --models")
    folder = MADE / options.model / "messages" / options.stage
    if options.stage == "neutral":
        messages = messages_in("test", kinds_of(options.model, options.out))
        run = load_run(folder / "run")
        table = chance(run.texts(list(run.finished)), messages)
        replace_rows(options.out / "chance.csv", options.model, table)
        return
    answers = answers_of(options.stage, options.model, folder, options.out)
    if options.stage == "pilot":
        replace_rows(options.out / "pilot.csv", options.model, shares(answers))
        return
    if options.stage != "alarm":
        path = path_of(options.model, options.models)
        answers = with_readings(answers, path, folder / "nll.csv", options.stage == "test")
    if options.stage == "tune":
        tune(options.model, answers, options.out)
        return
    columns = ["arm", "message", "kind", "chat", "turn", "against", "followed", "n_tokens", "keys"]
    columns += ["attention", "nll", "relevant"] if options.stage == "test" else ["attention"]
    add_answers(options.out / f"answers.{options.stage}.parquet", answers[columns])
    if options.stage == "test":
        compare(options.model, options.out)


def add_answers(file: Path, answers: pd.DataFrame) -> None:
    """Write judged answers; arms that are in the file alone stay."""
    if file.exists():
        earlier = pd.read_parquet(file)
        answers = pd.concat([earlier[~earlier["arm"].isin(answers["arm"])], answers])
    with atomic_write(file) as fresh:
        answers.to_parquet(fresh, index=False, compression="zstd")


def arm_of(cell: Cell) -> str:
    """The arm of a cell, without its strength."""
    if isinstance(cell.decoding_method, MessageVector):
        return ADDITION
    if cell.task.name.startswith("repeated"):
        return REPEATED
    names = sorted(FIRST_STRENGTHS, key=len, reverse=True)  # one name begins another
    return next((arm for arm in names if cell.label.startswith(arm)), NO_BIAS)


def strength_of(cell: Cell) -> float:
    """The strength of a cell's arm."""
    if isinstance(cell.decoding_method, MessageVector):
        return float(cell.parameters["strength"])
    return next((bias.alpha for bias in cell.active_augmentations), 0.0)


def answers_of(stage: str, model: str, folder: Path, tables: Path) -> pd.DataFrame:
    """The judged answers of a stage, of all rounds of tuning."""
    run = load_run(folder / "run", earlier=stage == "tune")
    messages = messages_in(stage, kinds_of(model, tables))
    answers = judged(run.texts(list(run.finished)).reset_index(drop=True), messages)
    answers["arm"] = [arm_of(run.by_key[key]) for key in answers["cell"]]
    answers["strength"] = [strength_of(run.by_key[key]) for key in answers["cell"]]
    lines = [prompt.splitlines() for prompt in answers["prompt"]]
    answers["question"] = [
        script[turn] for script, turn in zip(lines, answers["turn"], strict=True)
    ]
    answers["keys"] = answers["context"].map(len)
    answers["attention"] = 100 * attention_on_message(run, answers)
    return numbered(answers, STAGES[stage], messages)


def numbered(answers: pd.DataFrame, stage: Stage, messages: Sequence[Message]) -> pd.DataFrame:
    """The answers with the number of their chat, and if the user asks against the message there."""
    number = {message.text: i for i, message in enumerate(messages)}
    # Chats of 8 and of 16 turns begin alike.
    chats = {
        tuple(script.splitlines()[:3]): stage.chats[i % len(stage.chats)]
        for i, script in enumerate(conversations(stage, messages, stage.turns))
    }
    of_chats = [chats[tuple(prompt.splitlines()[:3])] for prompt in answers["prompt"]]
    against = [
        is_against(stage, number[message], chat, turn)
        for message, chat, turn in zip(answers["message"], of_chats, answers["turn"], strict=True)
    ]
    return answers.assign(chat=of_chats, against=against)


def judged(texts: pd.DataFrame, messages: Sequence[Message]) -> pd.DataFrame:
    """The answers with their message, its kind, and if they follow it (100 or 0)."""
    by_text = {message.text: message for message in messages}
    own = [by_text[prompt.splitlines()[0]] for prompt in texts["prompt"]]
    return texts.assign(
        message=[message.text for message in own],
        kind=[message.kind for message in own],
        followed=[
            100.0 * message.is_followed(answer)
            for message, answer in zip(own, texts["continuation"], strict=True)
        ],
    )


def chance(texts: pd.DataFrame, messages: Sequence[Message]) -> pd.DataFrame:
    """The share of answers that follow messages which they were not given, by kind (or all of them)
    and turn; each message counts once."""
    rows = []
    for message in messages:
        followed = 100.0 * texts["continuation"].map(message.is_followed)
        of_turns = followed.groupby(texts["turn"]).mean()
        rows += [
            {"kind": kind, "turn": turn, "mean": mean, "answers": len(texts) // len(of_turns)}
            for kind in ("all", message.kind)
            for turn, mean in of_turns.items()
        ]
    table = pd.DataFrame(rows).groupby(["kind", "turn"], sort=False)
    return table.agg(
        mean=("mean", "mean"), messages=("mean", "size"), answers=("answers", "max")
    ).reset_index()


def attention_on_message(run: Run, answers: pd.DataFrame) -> np.ndarray:
    """The attention on the message in every answer, a mean over its steps."""
    means = np.full(len(answers), np.nan)
    for key, own in answers.groupby("cell"):
        trace = run.trace(str(key))
        if trace is not None:
            masses = np.ma.masked_invalid(pooled(trace, "prefix")[0])
            means[own.index] = masses.mean(axis=1).filled(np.nan)
    return means


def shares(answers: pd.DataFrame) -> pd.DataFrame:
    """The share of answers that follow by kind and turn, and if the kind is followed."""
    rows = []
    for kind, of_kind in answers.groupby("kind", sort=False):
        first = of_kind.loc[of_kind["turn"] == 1, "followed"].mean()
        for turn, own in of_kind.groupby("turn"):
            row = {"kind": kind, "turn": turn} | share_of(own, "followed")
            rows.append(row | {"kind is followed": first >= FOLLOWED})
    return pd.DataFrame(rows)


def share_of(answers: pd.DataFrame, metric: str) -> dict[str, float]:
    """A mean, with an interval over messages where there are eight."""
    mean = mean_interval(answers[metric], answers["message"])
    sizes = {"answers": len(answers), "messages": answers["message"].nunique()}
    return (mean.columns if sizes["messages"] >= FEW else {"mean": mean.mean}) | sizes


def with_readings(answers: pd.DataFrame, path: str, file: Path, relevance: bool) -> pd.DataFrame:
    """The answers with nll at some turns, and if they are likelier given their own question than
    given the one that stands eight after it."""
    read = answers["turn"].isin(READ)
    model = load_model(path, dtype="bfloat16", model_class="TransformersModel")
    answers.loc[read, "nll"] = nll(model, answers[read], file=file)
    if not relevance:
        return answers
    questions = exact_messages()["questions"]

    def distant(asked: str) -> str:
        own = next(i for i, question in enumerate(questions) if asked.endswith(question))
        return questions[(own + len(questions) // 2) % len(questions)]

    answers["other"] = answers["question"].map(distant)
    elsewhere = np.array(nll(model, answers[read], "other", file))
    own = answers.loc[read, "nll"]
    relevant = pd.Series(100.0 * (elsewhere > own), index=own.index).where(own.notna())
    answers.loc[read, "relevant"] = relevant
    return answers


def paired(answers: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Answers that have a value, as arms are paired: on messages, and chats and turns of each."""
    there = answers[answers[metric].notna()]
    kind = there["chat"].astype(str) + " " + there["turn"].astype(str)
    return there.assign(prompt=there["message"], attribute=kind)


def tune(model: str, answers: pd.DataFrame, out: Path) -> None:
    """Write strengths.csv."""
    replace_rows(out / "strengths.csv", model, costs(paired(answers, "nll"), FIRST_STRENGTHS))
    tried = strengths(out, model)
    left = [
        arm
        for arm, first in FIRST_STRENGTHS.items()
        if next_strengths(first, tried[tried["arm"] == arm])
    ]
    print(f"still to try: {', '.join(left) or 'nothing'}")


def compare(model: str, out: Path) -> None:
    """Write the tables of the test."""
    answers = pd.read_parquet(out / "answers.test.parquet")
    replace_rows(out / "shares.csv", model, all_shares(answers))
    replace_rows(out / "differences.csv", model, differences(answers))
    replace_rows(out / "costs.csv", model, costs_of_arms(answers))
    replace_rows(out / "fade.csv", model, fade(answers[answers["arm"] == NO_BIAS]))


def all_shares(answers: pd.DataFrame) -> pd.DataFrame:
    """By arm, kind (or all of them) and turn: answers that follow, attention, and tokens."""
    rows = []
    for kind, of_kind in (("all", answers), *answers.groupby("kind", sort=False)):
        for (arm, turn), own in of_kind.groupby(["arm", "turn"], sort=False):
            for metric in ("followed", "attention", "n_tokens"):
                where = {"arm": arm, "kind": kind, "turn": turn, "metric": metric}
                rows.append(where | share_of(own, metric))
    for asked, of_chats in answers.groupby(with_user_against(answers)):
        for (arm, turn), own in of_chats.groupby(["arm", "turn"], sort=False):
            kind = "user asks against" if asked else "user does not"
            where = {"arm": arm, "kind": kind, "turn": turn, "metric": "followed"}
            rows.append(where | share_of(own, "followed"))
    return pd.DataFrame(rows)


def with_user_against(answers: pd.DataFrame) -> pd.Series:
    """If the user of a chat asks against its message at any turn."""
    return answers.groupby(["message", "chat"])["against"].transform("any")


def differences(answers: pd.DataFrame) -> pd.DataFrame:
    """Arms minus others at the last turns, by kind (or all of them); the first measure is corrected
    for its arms."""
    rows = []
    for kind, turn in product(("all", *answers["kind"].unique()), (TURNS, LONG)):
        own = (answers["turn"] == turn) & ((answers["kind"] == kind) | (kind == "all"))
        at = paired(answers[own], "followed")
        for arm, against in COMPARED:
            steered, base = (at[at["arm"] == name] for name in (arm, against))
            if steered.empty or base.empty:
                continue
            change = difference_of(steered, base, "followed")
            ends = {"difference": change.mean, "low": change.low, "high": change.high}
            p = exact_p(steered, base, "followed")
            where = {"kind": kind, "turn": turn, "arm": arm, "against": against}
            rows.append(where | ends | {"p": p})
    columns = ["kind", "turn", "arm", "against", "difference", "low", "high", "p"]
    table = pd.DataFrame(rows, columns=columns)
    first = (table["turn"] == TURNS) & (table["against"] == NO_BIAS) & (table["kind"] == "all")
    p = table.loc[first, "p"].to_numpy()
    missing = np.full(len(ARMS) - 1 - len(p), np.nan)  # arms that are planned, and not yet made
    table.loc[first, "p_holm"] = holm(np.concatenate([p, missing]))[: len(p)]
    return table


def costs_of_arms(answers: pd.DataFrame) -> pd.DataFrame:
    """What arms cost, and the share of relevant answers."""
    texts, rows = paired(answers[answers["turn"].isin(READ)], "nll"), []
    base = texts[texts["arm"] == NO_BIAS]
    for arm, own in texts.groupby("arm", sort=False):
        change = difference_of(own, base, "nll")
        ends = {"cost": change.mean, "low": change.low, "high": change.high}
        relevant = mean_interval(own["relevant"], own["message"])
        row = {"arm": arm} | {end: np.exp(value) for end, value in ends.items()}
        rows.append(row | {f"relevant {name}": value for name, value in relevant.columns.items()})
    return pd.DataFrame(rows)


def fade(answers: pd.DataFrame) -> pd.DataFrame:
    """By kind (or all of them) the first turn at which "follows" and attention are shown to be
    below turn 1; and the slopes of turns and tokens in one regression, as changes of the log-odds
    for a standard deviation of each."""
    rows = []
    for kind, metric in product(("all", *answers["kind"].unique()), ("followed", "attention")):
        at = paired(answers[(answers["kind"] == kind) | (kind == "all")], metric)
        at["attribute"] = at["chat"].astype(str)
        first, shown = at[at["turn"] == 1], None
        for turn in sorted(set(at["turn"]) - {1}):
            change = difference_of(at[at["turn"] == turn], first, metric)
            ends = {"mean": change.mean, "low": change.low, "high": change.high}
            rows.append({"what": f"{metric} minus turn 1", "kind": kind, "turn": turn} | ends)
            if shown is None and change.high < 0:
                shown = turn
        what = f"{metric}: first turn below turn 1"
        rows.append({"what": what, "kind": kind, "mean": shown})
    slopes = turns_and_tokens(answers)
    low, high = bounds_of(slopes)
    for i, name in enumerate(("turns", "tokens")):
        ends = {"mean": slopes[0, i], "low": low[i], "high": high[i]}
        rows.append({"what": f"slope of {name}", "kind": "all"} | ends)
    return pd.DataFrame(rows)


def turns_and_tokens(answers: pd.DataFrame, seed: int = 1) -> np.ndarray:
    """Slopes [fit, 2] of turns and of tokens so far, standardised, beside a constant of each
    message; of all messages, then of resampled ones."""
    measures = answers[["turn", "keys"]].to_numpy(float)
    measures = (measures - measures.mean(axis=0)) / measures.std(axis=0)
    followed = (answers["followed"] > 0).to_numpy(float)
    of_message = [
        np.flatnonzero(answers["message"] == text) for text in answers["message"].unique()
    ]
    rng, fits = np.random.default_rng(seed), []
    for fit in range(FITS + 1):
        n = len(of_message)
        drawn = np.arange(n) if fit == 0 else rng.integers(n, size=n)
        rows = np.concatenate([of_message[i] for i in drawn])
        owner = np.repeat(np.arange(n), [len(of_message[i]) for i in drawn])
        constants = np.eye(n)[owner]
        features = np.concatenate([np.ones((len(rows), 1)), measures[rows], constants], axis=1)
        fits.append(logistic(features, followed[rows])[1:3])
    return np.array(fits)


if __name__ == "__main__":
    main()
