"""Does a system message hold over the turns of a chat? A task for Inspect
(`pip install "lapa2-interp[inspect]"`):

    inspect eval analyses/instructions/inspect_task.py --model lapa2/smollm2-135m -M alpha=.5

Messages, questions and judges are those of analyses/instructions/README.md. A sample is a chat of
eight questions, which begin at another one for each sample of a message. Its score is how far the
last answer follows the message, from 0 to 1; the first answer's stands beside it. What chance gives
is not taken off: run it with `-T message=neutral`, too.
"""

import sys
import tomllib
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser
from inspect_ai.scorer import Score, Target, mean, scorer, stderr
from inspect_ai.solver import Generate, TaskState, solver

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
from analyses.instructions.judges import judged  # noqa: E402

BENCHMARK = tomllib.loads((ROOT / "analyses/instructions/messages.toml").read_text("utf-8"))


@solver
def asks_all():
    """Ask the later questions, each after the answer to the one before."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        state.metadata["first"] = state.output.completion
        for question in state.metadata["later"]:
            state.messages.append(ChatMessageUser(content=question))
            state = await generate(state)
        return state

    return solve


@scorer(metrics={"last": [mean(), stderr()], "first": [mean(), stderr()]})
def follows():
    """How far the last and the first answer follow the message."""

    async def score(state: TaskState, target: Target) -> Score:
        judge = state.metadata["judge"]
        answers = {"last": state.output.completion, "first": state.metadata["first"]}
        return Score(value={name: judged(answer, judge) for name, answer in answers.items()})

    return score


@task
def instructions(message: str = "own", turns: int = 8) -> Task:
    """A sample for each test message and first question.

    Args:
        message: "own", or "neutral": the neutral message, read by the same judges.
        turns: Questions of a chat, 1 to 8.
    """
    questions = BENCHMARK["questions"]
    samples = []
    for tested in BENCHMARK["message"]:
        if tested["set"] != "test":
            continue
        system = tested["text"] if message == "own" else BENCHMARK["neutral"]
        for first in range(len(questions)):
            asked = [questions[(first + turn) % len(questions)] for turn in range(turns)]
            samples.append(
                Sample(
                    [ChatMessageSystem(content=system), ChatMessageUser(content=asked[0])],
                    metadata={"judge": tested["judge"], "later": asked[1:]},
                )
            )
    return Task(samples, solver=asks_all(), scorer=follows())
