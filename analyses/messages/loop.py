"""The closed loop of analyses/messages: a bias acts only in answers before which an alarm rings.

    python analyses/messages/loop.py qwen2.5-coder-1.5b-instruct --models FOLDER --measure effect

after the stages test and alarm. The chats of the test are written again, 8 turns, in four arms:

- *alarm*: the bias in chosen heads, at its tuned strength, acts in an answer before which the
  measure (measures.py) rings. The threshold is the third of the largest values in the chats that
  tune, without a bias;
- *random*: in as many answers of every turn, drawn at random;
- *every third turn*: at turns 3 and 6 (the rate is a quarter);
- *always*: in all answers.

Every turn reads the whole chat again, without a bias, so that a bias acts in its own answer alone.
An answer is drawn with random numbers of its chat. answers.loop.parquet has an answer a row (as
that of analyse.py, and if the bias acts); a call that was stopped goes on with the next turn of an
arm. loop.csv has by arm the share of answers that follow, over turns 2 to 8 and at turn 8, minus
no bias of the test, and the share of answers in which the bias acts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pandas as pd

from analyses.families.analyse import difference_of, replace_rows
from analyses.families.grids import MADE, MODELS, NO_BIAS, path_of, strengths
from analyses.lab.scripts import ScriptOptions
from analyses.messages.analyse import answers_of, judged, numbered, paired
from analyses.messages.chats import (
    CHOSEN,
    OUT,
    STAGES,
    TOKENS,
    TURNS,
    conversations,
    heads_of,
    kinds_of,
    messages_in,
    recipe_of,
)
from analyses.messages.measures import MEASURES, RATE, SIGNS, before_answers, measure
from lapa2_interp import load_model
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.files import write_text
from lapa2_interp.models.facts import Model
from lapa2_interp.progress import progress_bar
from lapa2_interp.serving.engine import Answer, Engine, Piece
from lapa2_interp.serving.request import Asked
from lapa2_interp.stats import mean_interval

ARMS = ("alarm", "random", "every third turn", "always")
TOP_K, SEED = 20, 1
Chat = list[dict[str, str]]


def main() -> None:
    """Write the chats of all arms, and the table."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--measure", choices=MEASURES, required=True, help="what rings")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    name, path, tables = options.model, path_of(options.model, options.models), options.out
    folder = MADE / name / "messages"
    heads = heads_of(tables, name)
    pairs = np.array([pair.split(".") for pair in heads.split("/")], int)
    tuned = strengths(tables, name)
    alpha = tuned[(tuned["arm"] == CHOSEN) & tuned["tuned"].astype(bool)]["strength"].iloc[0]
    rules = tuple(parse_recipes(recipe_of(CHOSEN, heads, alpha)))
    answers = answers_of("tune", name, folder / "tune", tables)
    plain = answers[answers["arm"] == NO_BIAS]
    before = measure(path, plain, pairs, folder / "tune" / "measures.parquet")
    limit = threshold(before, options.measure)
    model = load_model(path, dtype="bfloat16", model_class="TransformersModel")
    engine = Engine(model, keep_bytes=0, most_waiting=10_000)
    engine.start()
    messages = messages_in("test", kinds_of(name, tables))
    scripts = conversations(STAGES["test"], messages, TURNS)
    made: dict[str, list[pd.DataFrame]] = {}
    for arm in ARMS:
        said: list[Chat] = [[system(script)] for script in scripts]
        made[arm] = []
        for turn in range(1, TURNS + 1):
            file = folder / "loop" / f"{arm} {turn}.json"
            for chat, script in zip(said, scripts, strict=True):
                chat.append({"role": "user", "content": script.splitlines()[turn]})
            if not file.exists():
                acts = which(arm, turn, said, made, model, pairs, options.measure, limit)
                texts = answer(engine, model, said, acts, rules, turn)
                rows = [
                    {"continuation": text, "n_tokens": n_tokens, "acts": act}
                    for (text, n_tokens), act in zip(texts, acts, strict=True)
                ]
                write_text(file, json.dumps(rows))
            rows = json.loads(file.read_text("utf-8"))
            for chat, row in zip(said, rows, strict=True):
                chat.append({"role": "assistant", "content": row["continuation"]})
            made[arm].append(pd.DataFrame(rows).assign(arm=arm, turn=turn, prompt=scripts))
    engine.stop()
    every = pd.concat([turn for turns in made.values() for turn in turns], ignore_index=True)
    of_messages = numbered(judged(every, messages), STAGES["test"], messages)
    columns = ["arm", "message", "kind", "chat", "turn", "against", "acts", "followed", "n_tokens"]
    of_messages[columns].to_parquet(
        tables / "answers.loop.parquet", index=False, compression="zstd"
    )
    base = pd.read_parquet(tables / "answers.test.parquet").query("arm == @NO_BIAS")
    replace_rows(tables / "loop.csv", name, compared(of_messages, base[base["turn"] <= TURNS]))


def system(script: str) -> dict[str, str]:
    """The system message of a chat."""
    return {"role": "system", "content": script.splitlines()[0]}


def threshold(before: pd.DataFrame, name: str) -> float:
    """The value from which a measure rings, with its sign."""
    return float((SIGNS[name] * before[name]).quantile(1 - RATE))


def which(
    arm: str,
    turn: int,
    said: Sequence[Chat],
    made: dict[str, list[pd.DataFrame]],
    model: Model,
    heads: np.ndarray,
    name: str,
    limit: float,
) -> list[bool]:
    """The chats in whose next answer the bias acts."""
    if arm == "always":
        return [True] * len(said)
    if arm == "every third turn":
        return [turn % 3 == 0] * len(said)
    if arm == "random":
        n = int(made["alarm"][turn - 1]["acts"].sum())
        drawn = np.random.default_rng([SEED, turn]).permutation(len(said)) < n
        return drawn.tolist()
    rings = []
    with progress_bar(len(said), f"alarm, turn {turn}", "chat") as bar:
        for chat in said:
            context = list(Layout.of_chat(model.tokenizer, chat).ids)
            asked = "\n".join(message["content"] for message in chat[:2])
            row = pd.DataFrame([{"prompt": asked, "context": context}])
            value = before_answers(model, row, heads)[name][-1]
            rings.append(bool(SIGNS[name] * value >= limit))
            bar.update(1)
    return rings


def answer(
    engine: Engine,
    model: Model,
    said: Sequence[Chat],
    acts: Sequence[bool],
    rules: tuple[Any, ...],
    turn: int,
) -> list[tuple[str, int]]:
    """The next answer of every chat, and its tokens."""
    queues: list[SimpleQueue[Piece]] = [SimpleQueue() for _ in said]
    waiting: list[Answer] = []
    for i, (chat, act, queue) in enumerate(zip(said, acts, queues, strict=True)):
        asked = Asked(
            layout=Layout.of_chat(model.tokenizer, chat), rules=rules if act else (),
            longest=TOKENS, temperature=1.0, top_k=TOP_K, seed=1000 * turn + i, stops=(),
            report=False, marks=None, is_chat=True, stream=False, usage_in_stream=False,
        )  # fmt: skip
        waiting.append(engine.ask(asked, queue.put))
    texts = []
    for one, queue in zip(waiting, queues, strict=True):
        while (piece := queue.get()).finish is None:
            if piece.error is not None:
                raise RuntimeError(piece.error)
        texts.append((one.text, len(one.tokens)))
    return texts


def compared(answers: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """Arms, and arms minus no bias and minus random."""
    rows = []
    both = paired(pd.concat([answers, base], ignore_index=True), "followed")
    for when, own in (
        ("turns 2 to 8", both[both["turn"] > 1]),
        ("turn 8", both[both["turn"] == 8]),
    ):
        for arm, of_arm in own.groupby("arm", sort=False):
            mean = mean_interval(of_arm["followed"], of_arm["message"])
            rate = of_arm["acts"].astype(float).mean() if arm != NO_BIAS else 0.0
            rows.append({"when": when, "arm": arm, "against": "", "acts": rate} | mean.columns)
            for against in (NO_BIAS, "random"):
                if against != arm and arm != NO_BIAS:
                    change = difference_of(of_arm, own[own["arm"] == against], "followed")
                    ends = {"mean": change.mean, "low": change.low, "high": change.high}
                    where = {"when": when, "arm": arm, "against": against}
                    rows.append(where | ends | {"p": change.p})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main()
