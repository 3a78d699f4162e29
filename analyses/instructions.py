"""Does an instruction hold? Chats of several turns, judged by programs: figures/instructions.

    python analyses/instructions.py write --set test --round 1 --out chats
    cd chats; lapa2 sweep figures/instructions/GRID --out run      # GRID by its path
    python analyses/instructions.py judge chats/run --out figures/instructions
    python analyses/instructions.py heads --out figures/instructions

`write` makes what the grids read: conversations and tasks. A conversation is a prompt of many
lines: the system message, then the user's, one a turn. The questions rotate over the turns (a Latin
square), so that over the conversations of a message every question stands once at every turn.
conversations.json has those of the messages, neutral.json those of the neutral message, which is
given since the model's template would write its own. Tasks say where the message stands:

- system.toml: it is the system message;
- user.toml: it begins the first user turn, and the system message is the neutral one;
- repeated.toml: it is the system message, and begins every user turn.

`judge` reads every answer with the judge of its conversation's message. *Chance* is the same judge
on the answers of neutral conversations at the same turn to the same questions; *above chance* is
the difference.
The *cost* of an answer is its perplexity given only the message and the question, by the model
without bias, as a multiple of that of first answers without bias that adhere (at least 1/3) to a
message of the same kind; means are of ln.

`heads` writes heads.json: the 24 heads without whose view of the message its effect on the first
answer falls most, chosen on those messages for tuning that have a persona and a topic, with other
questions.

Intervals are over messages. answers.csv has a row an answer, adherence.csv and kinds.csv the means
by arm and turn, and the fall from the first turn to the last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from instruction_judges import judged

from lapa2_interp import load_model
from lapa2_interp._util.errors import DataError
from lapa2_interp._util.files import write_text
from lapa2_interp._util.parsing import parse_toml, read_text
from lapa2_interp._util.progress import progress_bar
from lapa2_interp._util.table_formats import as_csv, as_text
from lapa2_interp.circuits.hidden_span import forced_logits
from lapa2_interp.circuits.selection import Selection, select
from lapa2_interp.generation.arrange import chat_layout
from lapa2_interp.generation.cell import BASELINE
from lapa2_interp.models.card import Model
from lapa2_interp.paper.scripts import ScriptOptions, whole_number
from lapa2_interp.runs.run import load_run
from lapa2_interp.stats import mean_interval
from lapa2_interp.tasks.task import Attribute, ChatForm, Prompts, Task

MESSAGES = Path(__file__).resolve().parents[1] / "figures" / "instructions" / "messages.toml"
MEASURES = ("adherence", "chance", "above", "ln cost")
ADHERES = 1 / 3
MODEL = "smollm2-135m"
SETS = ("tune", "test", "out")


def benchmark() -> dict[str, Any]:
    """messages.toml: the neutral message, the questions, and the messages with their judges."""
    return parse_toml(read_text(MESSAGES))


def conversations(
    messages: Sequence[Mapping], questions: Sequence[str], turns: int, part: int | None = None
) -> list[str]:
    """The scripts of all messages: as many rotations as there are questions.

    Args:
        part: 1 or 2 is a half of the rotations, which differs from a message to the next.
    """
    n = len(questions)
    half = n // 2
    return [
        "\n".join([message["text"], *(questions[(first + turn) % n] for turn in range(turns))])
        for i, message in enumerate(messages)
        for first in range(n)
        if part is None or (i + first // half) % 2 == part - 1
    ]


def tasks(neutral: str, turns: int) -> Iterator[tuple[str, str]]:
    """Names and texts of the task files."""
    users = [f"{{prompt:{turn + 2}}}" for turn in range(turns)]
    message = "{prompt:1}"
    for name, system, span, says in (
        ("system", message, "system", users),
        ("user", neutral, f"phrase:{message}", [f"{message} {users[0]}", *users[1:]]),
        ("repeated", message, "system", [f"{message} {user}" for user in users]),
    ):
        lines = [
            "length_counts_prompt = false",
            f"attributes.message.prefix = {json.dumps(message)}",
            'prompts.texts = ["of a grid"]',
            "[chat]",
            f"span = {json.dumps(span)}",
            f'messages = [{{ role = "system", content = {json.dumps(system)} }}, '
            f'{{ role = "user", content = {json.dumps(says[0])} }}]',
            f"later = {json.dumps(says[1:])}",
        ]
        yield f"{name}.toml", "\n".join(lines) + "\n"


def judged_answers(texts: pd.DataFrame, messages: Sequence[Mapping], neutral: str) -> pd.DataFrame:
    """The answers to messages with adherence and chance, both from 0 to 1."""
    texts = texts.copy()
    lines = [prompt.splitlines() for prompt in texts["prompt"]]
    judges = {message["text"]: message["judge"] for message in messages}
    kinds = {message["text"]: message["kind"] for message in messages}
    texts["message"] = [script[0] for script in lines]
    texts["question"] = [script[turn] for script, turn in zip(lines, texts["turn"], strict=True)]
    texts["questions"] = ["\n".join(script[1:]) for script in lines]
    plain = texts[texts["message"] == neutral]
    texts = texts[texts["message"] != neutral].reset_index(drop=True)
    if unknown := sorted(set(texts["message"]) - set(judges)):
        raise DataError(f"no judge reads answers to {unknown[0]!r}; give one in {MESSAGES.name}")
    texts["kind"] = texts["message"].map(kinds)
    texts["adherence"] = [
        judged(answer, judges[message])
        for answer, message in zip(texts["continuation"], texts["message"], strict=True)
    ]
    by = ["top_k", "questions", "turn"]
    pools = plain.groupby(by)["continuation"].agg(list).to_dict()

    @cache
    def chance(message: str, *group: object) -> float:
        if group not in pools:
            raise DataError("some questions have no neutral answer; add neutral.json to the grid")
        return float(np.mean([judged(answer, judges[message]) for answer in pools[group]]))

    keys = zip(texts["message"], *(texts[name] for name in by), strict=True)
    texts["chance"] = [chance(*key) for key in keys]
    texts["above"] = texts["adherence"] - texts["chance"]
    return texts


def nll(model: Model, answers: pd.DataFrame) -> list[float]:
    """-ln p a token of each answer given its message and question, in nats; NaN of none."""
    values = []
    with progress_bar(len(answers), "reading", "answer") as bar:
        for message, question, tokens in zip(
            answers["message"], answers["question"], answers["tokens"], strict=True
        ):
            bar.update(1)
            if not len(tokens):
                values.append(np.nan)
                continue
            form = ChatForm(messages=tuple(chat(message, question)))
            log_probs = forced_logits(model, chat_layout(model.tokenizer, form), tokens, ())[0]
            own = log_probs.log_softmax(-1)[range(len(tokens)), list(tokens)]
            values.append(-float(own.mean()))
    return values


def chat(system: str, user: str) -> list[dict[str, str]]:
    """A system message and a question."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def costs(answers: pd.DataFrame) -> pd.Series:
    """ln of each answer's cost."""
    first = (answers["turn"] == 1) & (answers["arm"] == BASELINE) & (answers["task"] == "system")
    plain = answers[first & (answers["adherence"] >= ADHERES)].groupby("kind")["nll"].mean()
    return answers["nll"] - answers["kind"].map(plain)


def adherence(answers: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Means by these columns, and the fall of what is above chance, with intervals over
    messages."""
    turns = sorted(answers["turn"].unique())
    rows = []
    for group, of in answers.groupby(list(by), sort=False):
        where = dict(zip(by, group, strict=True))
        for turn in turns:
            there = of[of["turn"] == turn]
            for measure in MEASURES:
                rows.append(
                    where | {"turn": str(turn), "measure": measure} | interval(there, measure)
                )
        if len(turns) > 1:
            wide = of.pivot_table(index=["message", "questions"], columns="turn", values="above")
            fall = (wide[turns[-1]] - wide[turns[0]]).rename("fall").reset_index()
            where["turn"] = f"{turns[0]} to {turns[-1]}"
            rows.append(where | {"measure": "fall"} | interval(fall, "fall"))
    return pd.DataFrame(rows)


def interval(values: pd.DataFrame, column: str) -> dict[str, float]:
    """The mean over messages with its interval."""
    values = values.dropna(subset=[column])
    if not len(values):
        return dict.fromkeys(("mean", "low", "high"), np.nan) | {"answers": 0, "messages": 0}
    estimate = mean_interval(values[column], values["message"])
    ends = {name: getattr(estimate, name) for name in ("mean", "low", "high")}
    return ends | {"answers": len(values), "messages": values["message"].nunique()}


def choose_heads(model: Model, messages: Sequence[Mapping], questions: Sequence[str]) -> Selection:
    """The heads that carry these messages, which have one length in tokens."""
    task = Task(
        name="messages",
        length_counts_prompt=False,
        attributes={message["text"]: Attribute(prefix=message["text"]) for message in messages},
        prompts=Prompts(texts=tuple(questions)),
        chat=ChatForm(messages=tuple(chat("{prefix}", "{prompt}"))),
    )
    return select(model, task, heads=24)


def main() -> None:
    """Write the conversations, judge the answers, or choose heads."""
    parser = ScriptOptions("Does an instruction hold?")
    parser.add_argument("do", choices=("write", "judge", "heads"))
    parser.add_argument("run", type=Path, nargs="?", help="the run that is judged")
    parser.add_argument("--set", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--turns", type=whole_number(), default=8)
    parser.add_argument("--round", type=int, choices=(1, 2), help="half of the rotations")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    parts = benchmark()
    if options.do == "write":
        chosen = [message for message in parts["message"] if message["set"] in options.set]
        scripts = conversations(chosen, parts["questions"], options.turns, options.round)
        write_text(options.out / "conversations.json", json.dumps(scripts, indent=1))
        scripts = conversations([{"text": parts["neutral"]}], parts["questions"], options.turns)
        write_text(options.out / "neutral.json", json.dumps(scripts, indent=1))
        for name, text in tasks(parts["neutral"], options.turns):
            write_text(options.out / name, text)
        return
    if options.do == "heads":
        tuning = [
            message
            for message in parts["message"]
            if (message["set"], message["kind"]) == ("tune", "persona and topic")
        ]
        model = load_model(MODEL, dtype="float32")
        chosen = choose_heads(model, tuning, parts["other_questions"])
        chosen.save(options.out / "heads.json")
        return
    if options.run is None:
        parser.error("judge needs the folder of a run")
    run = load_run(options.run, earlier=True)  # of both rounds
    texts = run.texts(list(run.finished))
    if "turn" not in texts:
        texts["turn"] = 1
    texts["top_k"] = [run.by_key[key].top_k for key in texts["cell"]]
    for key, cell in run.by_key.items():
        if guidance := cell.parameters.get("guidance"):
            texts.loc[texts["cell"] == key, "arm"] = f"guidance {guidance:g}"
    answers = judged_answers(texts, parts["message"], parts["neutral"])
    answers["nll"] = nll(load_model(run.cells["model"].iloc[0], dtype="float32"), answers)
    answers["ln cost"] = costs(answers)
    names = ["task", "arm", "top_k", "message", "kind", "turn", "sample"]
    write_text(
        options.out / "answers.csv",
        as_csv(answers[[*names, "n_tokens", "adherence", "chance", "nll"]], 4),
    )
    by = ["task", "arm", "top_k"]
    table = adherence(answers, by)
    write_text(options.out / "adherence.csv", as_csv(table, 5))
    kinds = adherence(answers, [*by, "kind"])
    write_text(options.out / "kinds.csv", as_csv(kinds, 5))
    for shown, columns in ((table, by), (kinds, [*by, "kind"])):
        wide = shown[shown["measure"].isin(["above", "fall"])]
        print(
            as_text(wide.pivot(index=columns, columns="turn", values="mean").reset_index(), ".2f")
        )


if __name__ == "__main__":
    main()
