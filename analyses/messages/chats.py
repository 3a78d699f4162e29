"""The chats of analyses/messages: what is asked, the grid that makes answers, and their judging.

    python analyses/messages/chats.py write pilot qwen2.5-coder-1.5b-instruct --models FOLDER
    lapa2 sweep made/MODEL/messages/pilot/grid.toml --out made/MODEL/messages/pilot/run --workers 1
    python analyses/messages/chats.py judge pilot qwen2.5-coder-1.5b-instruct --models FOLDER

in the folder in which the stages work. *write* makes conversations, a task and a grid. *judge*
reads the answers with the program of each message (lapa2_interp/tasks/exact_messages.py), and
writes figures/messages/STAGE.csv: by kind and turn, the share of answers that follow their message,
with an interval over messages where there are eight. A kind is *followed* where at least half of
the first answers follow.

Stage *pilot*: other messages than those of the test, four chats each, two turns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analyses.families.analyse import replace_rows
from analyses.families.grids import MADE, MODELS, path_of
from analyses.instructions.analyse import tasks
from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from lapa2_interp.files import write_text
from lapa2_interp.runs.run import load_run
from lapa2_interp.stats import FEW, mean_interval
from lapa2_interp.tasks.exact_messages import Message, exact_messages, messages_of

OUT = FIGURES / "messages"
NEUTRAL = "You are a helpful assistant."
TURNS, CHATS = {"pilot": 2}, {"pilot": 4}
"""By stage; chats of a message."""
TOKENS = 64
FOLLOWED = 50
"""The percentage of first answers from which a kind is followed."""

GRID = """description = "Do exact messages hold? {stage}; analyses/messages/README.md"
model = "{model}"
model_class = "TransformersModel"
dtype = "bfloat16"
attribute = "message"
length = {tokens}
eos = "stop"
top_k = 20
trace = "pooled"
max_rows = 64
task = "{task}"
prompts = {{ file = "{prompts}", n = {n}, what = "`analyses/messages/chats.py write`" }}

[[block]]
method = {{ name = "chat", keep_turns = true }}
augmentation = "none"
"""


def main() -> None:
    """Write the chats of a stage, or judge them."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("write", "judge"))
    parser.add_argument("stage", choices=TURNS)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    folder = MADE / options.model / "messages" / options.stage
    if options.do == "write":
        write(options.stage, path_of(options.model, options.models), folder)
    else:
        judge(options.stage, options.model, folder, options.out)


def conversations(messages: Sequence[Message], turns: int, chats: int) -> list[str]:
    """A message and its questions, a line each; the chats of a message have other questions, and
    those of the next message begin one question later."""
    questions = exact_messages()["questions"]
    apart = len(questions) // chats
    return [
        "\n".join(
            [
                message.text,
                *(questions[(i + chat * apart + turn) % len(questions)] for turn in range(turns)),
            ]
        )
        for i, message in enumerate(messages)
        for chat in range(chats)
    ]


def write(stage: str, model: str, folder: Path) -> None:
    """Write the conversations, the task and the grid of a stage."""
    chats = conversations(messages_of(stage), TURNS[stage], CHATS[stage])
    prompts, task = folder / "conversations.json", folder / "system.toml"
    write_text(prompts, json.dumps(chats, indent=1))
    write_text(task, dict(tasks(NEUTRAL, TURNS[stage]))["system.toml"])
    values = {"stage": stage, "model": model, "tokens": TOKENS, "task": task, "prompts": prompts}
    write_text(folder / "grid.toml", GRID.format(**values, n=len(chats)))


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


def judge(stage: str, model: str, folder: Path, out: Path) -> None:
    """Write the shares of a stage."""
    answers = judged(load_run(folder / "run").texts(), messages_of(stage))
    replace_rows(out / f"{stage}.csv", model, shares(answers))


def shares(answers: pd.DataFrame) -> pd.DataFrame:
    """The share of answers that follow by kind and turn, and if the kind is followed."""
    rows = []
    for kind, of_kind in answers.groupby("kind", sort=False):
        first = of_kind.loc[of_kind["turn"] == 1, "followed"].mean()
        for turn, own in of_kind.groupby("turn"):
            mean = mean_interval(own["followed"], own["message"])
            sizes = {"answers": len(own), "messages": own["message"].nunique()}
            columns = mean.columns if sizes["messages"] >= FEW else {"mean": mean.mean}
            row = {"kind": kind, "turn": turn} | columns | sizes
            rows.append(row | {"kind is followed": first >= FOLLOWED})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main()
