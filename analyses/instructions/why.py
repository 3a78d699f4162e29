"""Why an instruction fades over the turns of a chat: figures/instructions.

    python analyses/instructions/why.py chats/run --out figures/instructions

The run is that of analyses/instructions/analyse.py. cross.csv exchanges histories: the last
question of a chat is answered after the earlier answers of no bias and of LaPA2 in all heads, read
again without a bias, without the bias and with it in this turn. What the history alone changes is
imitation of earlier answers. It has two answers in four chats of each message.

effect.csv has for some arms, by turn, the attention on the message (mean over layers, heads and
steps; while the text was written) and its effect: the Jensen-Shannon divergence of the next-token
distributions with the message and with it hidden from all queries after it, in 1/1000 nats, on the
text that the arm wrote. Keys and values of earlier turns are those of the arm, made under its bias.
effect.changes.csv has each of these arms minus each one before it, paired on chats.

Intervals are over messages. effects.parquet has a row an answer; chats that it has are not read
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyses.instructions.analyse import (
    MODEL,
    REFERENCE,
    chat,
    finished_texts,
    interval,
    judged_answers,
)
from analyses.lab.scripts import ScriptOptions
from lapa2_interp import generate, load_model
from lapa2_interp.circuits.hidden_span import span_effect
from lapa2_interp.errors import DataError
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.generation.arrange import chat_layout
from lapa2_interp.progress import progress_bar
from lapa2_interp.runs.run import Run, load_run
from lapa2_interp.scoring.equal_perplexity import BASELINE
from lapa2_interp.table_formats import as_csv, as_text
from lapa2_interp.tasks.instructions import benchmark
from lapa2_interp.tasks.task import Attribute, ChatForm, Prompts, Task

CHAT = ["family", "strength", "prompt"]
ARMS = ((BASELINE, 0.0), (REFERENCE, 0.5), ("head-selective", 1.0))
"""Families and strengths whose effect is read."""
MEASURES = ("attention", "js")
CHATS, SAMPLES = 4, 2
"""Chats of a message whose history is exchanged, and answers after it."""


def main() -> None:
    """Exchange histories, and read the effect of messages."""
    parser = ScriptOptions("Why does an instruction fade?")
    parser.add_argument("run", type=Path, help="of analyses/instructions/analyse.py")
    parser.add_argument("--strength", type=float, default=0.5, help="alpha of exchanged histories")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    parts = benchmark()
    run = load_run(options.run, earlier=True)  # of both rounds
    texts = finished_texts(run)
    file = options.out / "effects.parquet"
    known = pd.read_parquet(file) if file.exists() else pd.DataFrame(columns=CHAT)
    rows = effects(run, texts[~is_neutral(texts, parts)], known)
    with atomic_write(file) as fresh:
        rows.to_parquet(fresh, index=False, compression="zstd")
    table = pd.DataFrame(
        {"family": family, "strength": strength, "turn": turn, "measure": measure}
        | interval(of, measure)
        for (family, strength, turn), of in rows.groupby(["family", "strength", "turn"], sort=False)
        for measure in MEASURES
    )
    write_text(options.out / "effect.csv", as_csv(table, 5))
    print(as_text(table[table["turn"].isin([1, 8])], ".3g"))
    write_text(options.out / "effect.changes.csv", as_csv(changes(rows), 5))
    table = crossed(texts, parts, options.strength)
    write_text(options.out / "cross.csv", as_csv(table, 5))
    print(as_text(table, ".2f"))


def is_neutral(texts: pd.DataFrame, parts: Mapping[str, Any]) -> pd.Series:
    """Which texts are of the neutral message."""
    return texts["prompt"].str.startswith(parts["neutral"])


def effects(run: Run, texts: pd.DataFrame, known: pd.DataFrame) -> pd.DataFrame:
    """Attention on the message and its effect in every answer of some arms.

    Args:
        known: Rows of chats that are not read again.

    Raises:
        DataError: The run lacks an arm, or its chats are not those of this model's template.
    """
    model = load_model(MODEL, dtype="float32", model_class="TransformersModel")
    rows = []
    of_arm = texts.groupby(["family", "strength"])
    if lacking := [arm for arm in ARMS if arm not in of_arm.groups]:
        names = ", ".join(f"{family} {strength:g}" for family, strength in lacking)
        raise DataError(f"the run lacks {names}; finish it")
    traced = cache(run.trace)
    read = set(known[CHAT].itertuples(index=False, name=None))
    chats = [
        (arm, of)
        for arm in ARMS
        for prompt, of in of_arm.get_group(arm).groupby("prompt")
        if (*arm, prompt) not in read
    ]
    with progress_bar(len(chats), "effect", "chat") as bar:
        for (family, strength), of in chats:
            of = of.sort_values("turn")
            cell = run.by_key[of["cell"].iloc[0]]
            trace = traced(cell.key)
            message, question = str(of["prompt"].iloc[0]).splitlines()[:2]
            layout = chat_layout(model.tokenizer, ChatForm(messages=tuple(chat(message, question))))
            conversation = [*map(int, of["context"].iloc[-1]), *map(int, of["tokens"].iloc[-1])]
            if tuple(conversation[: len(layout)]) != tuple(layout.ids):
                raise DataError(f"the chat of {message!r} does not begin as the template writes it")
            js = span_effect(model, layout, conversation[len(layout) :], cell.active_augmentations)
            own = (trace["prompt_text"] == of["prompt"].iloc[0]).to_numpy()
            attention = np.nanmean(trace["prefix"][0].to_numpy()[own], axis=1)  # turn
            for i, answer in enumerate(of.itertuples()):
                begin = len(answer.context) - len(layout)
                rows.append(
                    {"family": family, "strength": strength, "message": message}
                    | {"prompt": answer.prompt, "turn": answer.turn, "attention": attention[i]}
                    | {"js": 1000 * js[begin : begin + answer.n_tokens].mean()}
                )
            bar.update(1)
    return pd.concat([known, pd.DataFrame(rows)], ignore_index=True) if rows else known


def changes(rows: pd.DataFrame) -> pd.DataFrame:
    """Attention and effect of each arm minus those of each arm before it, by turn; differences are
    paired on chats."""
    of_arm = rows.set_index(["message", "prompt", "turn"]).groupby("family")
    table = []
    for (before, _), (after, _) in combinations(ARMS, 2):
        measures = list(MEASURES)
        gaps = of_arm.get_group(after)[measures] - of_arm.get_group(before)[measures]
        for turn, of in gaps.reset_index().groupby("turn"):
            for measure in MEASURES:
                row = interval(of, measure)
                facts = {"family": after, "against": before, "turn": turn, "measure": measure}
                table.append(facts | {"difference": row.pop("mean")} | row)
    return pd.DataFrame(table)


def crossed(texts: pd.DataFrame, parts: Mapping[str, Any], alpha: float) -> pd.DataFrame:
    """Mean adherence above chance of the last answer, by history and bias."""
    chats = texts[texts["family"].isin([BASELINE, REFERENCE])]
    model = load_model(MODEL, dtype="float32", model_class="TransformersModel")
    bias = f"{REFERENCE}:alpha={alpha:g}"
    rows = []
    histories = chats[chats["strength"].isin([0.0, alpha])]
    histories = histories[~is_neutral(histories, parts)]
    scripts = histories["prompt"].drop_duplicates()
    some = scripts.groupby(scripts.str.split("\n").str[0]).head(CHATS)
    histories = histories[histories["prompt"].isin(some)]
    grouped = histories.groupby(["family", "prompt", "sample"], sort=False)
    with progress_bar(len(grouped), "histories", "chat") as bar:
        for (history, script, _), of in grouped:
            message, *questions = str(script).splitlines()
            answers = of.sort_values("turn")["continuation"].tolist()
            form = ChatForm(
                messages=({"role": "system", "content": message},),
                later=tuple(questions[1:]),
            )
            first = {"role": "user", "content": questions[0]}
            opened = form.model_copy(update={"messages": (*form.messages, first)})
            said = opened.messages_after(answers[:-1])
            said[0]["content"], said[-1]["content"] = "{prefix}", "{prompt}"
            task = Task(
                name="history",
                length_counts_prompt=False,
                attributes={"message": Attribute(prefix=message)},
                prompts=Prompts(texts=(questions[-1],)),
                chat=ChatForm(messages=tuple(said)),
            )
            made = generate(
                model, questions[-1], method="chat", task=task, augmentation=["none", bias],
                samples=SAMPLES, length=48, top_k=int(of["top_k"].iloc[0]), eos="stop",
                trace="none",
            ).texts()  # fmt: skip
            for arm, answer in zip(made["arm"], made["continuation"], strict=True):
                facts = {"prompt": script, "turn": len(questions), "top_k": of["top_k"].iloc[0]}
                way = arm.partition(":")[0]
                rows.append({"history": history, "answer": way, "continuation": answer} | facts)
            bar.update(1)
    neutral = texts[is_neutral(texts, parts)]
    both = pd.concat([pd.DataFrame(rows), neutral], ignore_index=True)
    answers = judged_answers(both, parts["message"], parts["neutral"])
    return pd.DataFrame(
        [
            {"history": history, "answer": arm} | interval(of, "above")
            for (history, arm), of in answers.groupby(["history", "answer"], sort=False)
        ]
    )


if __name__ == "__main__":
    main()
