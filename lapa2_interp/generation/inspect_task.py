"""Does a system message hold over the turns of a chat? Two tasks for Inspect.

    inspect eval lapa2_interp/instructions --model lapa2/smollm2-135m -M alpha=.5 -T turns=4
    inspect eval lapa2_interp/exact_messages --model lapa2/NAME -M alpha=.5 -T turns=4

The first has languages and personas, and degrees. The second has messages that a program checks
with yes or no, for models that follow messages.

Inspect finds this module by its entry point, where the extra `inspect` is installed.
"""

from __future__ import annotations

from typing import Annotated, Literal

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from pydantic import Field

from lapa2_interp._util.values import check_value
from lapa2_interp.errors import GridError
from lapa2_interp.tasks.exact_messages import exact_messages as benchmark_of_messages
from lapa2_interp.tasks.exact_messages import messages_of
from lapa2_interp.tasks.instructions import benchmark, judged, rotated


@task
def instructions(message: str = "own", turns: int = 8) -> Task:
    """A chat for each of 16 system messages and each of 8 first questions.

    A message asks for a language or for a persona. The questions follow in a fixed order, so that
    each of them is once the last one. A program, `judged`, reads the answer alone. An answer has at
    most 48 tokens, each drawn from the 20 likeliest, unless Inspect's options say otherwise.

    Args:
        message: "own" gives each chat its message. "neutral" gives every chat the same neutral
            message, and the judges stay: this score is what chance gives.
        turns: Questions of a chat, from 1 to 8.

    Raises:
        GridError: One of the two has another value.
    """
    parts = benchmark()
    questions = parts["questions"]
    most = len(questions)
    check_value("message", message, Literal["own", "neutral"], GridError)
    check_value("turns", turns, Annotated[int, Field(ge=1, le=most)], GridError)
    samples = []
    for tested in parts["message"]:
        if tested["set"] != "test":
            continue
        system = tested["text"] if message == "own" else parts["neutral"]
        for first in range(most):
            asked = rotated(questions, first, turns)
            samples.append(
                Sample(
                    [ChatMessageSystem(content=system), ChatMessageUser(content=asked[0])],
                    metadata={
                        "message": tested["text"], "judge": tested["judge"], "later": asked[1:],
                    },
                )
            )  # fmt: skip
    return Task(
        samples,
        solver=asks_all(),
        scorer=follows(),
        config=GenerateConfig(max_tokens=48, top_k=20),
    )


@task
def exact_messages(turns: int = 8, chats: int = 1) -> Task:
    """A chat for each message of `tasks.exact_messages`, which a program checks with yes or no.

    The questions rotate from message to message, so that each is often asked at every turn. An
    answer has at most 64 tokens, each drawn from the 20 likeliest, unless Inspect's options say
    otherwise.

    Args:
        turns: Questions of a chat, from 1 to 16.
        chats: Chats of a message, with other questions each, from 1 to 16.

    Raises:
        GridError: One of the two has another value.
    """
    questions = benchmark_of_messages()["questions"]
    most = len(questions)
    for name, value in (("turns", turns), ("chats", chats)):
        check_value(name, value, Annotated[int, Field(ge=1, le=most)], GridError)
    samples = []
    for i, message in enumerate(messages_of("test")):
        for chat in range(chats):
            asked = rotated(questions, i + chat * (most // chats), turns)
            samples.append(
                Sample(
                    [ChatMessageSystem(content=message.text), ChatMessageUser(content=asked[0])],
                    metadata={"message": message.text, "kind": message.kind, "later": asked[1:]},
                )
            )
    return Task(
        samples,
        solver=asks_all(),
        scorer=follows_exactly(),
        config=GenerateConfig(max_tokens=64, top_k=20),
    )


@solver
def asks_all() -> Solver:
    """Ask the first question and the later ones, each after the answer to the one before."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        state.metadata["first"] = state.output.completion
        for question in state.metadata["later"]:
            state.messages.append(ChatMessageUser(content=question))
            state = await generate(state)
        return state

    return solve


# Chats of one message are alike, so the standard error is that over messages.
@scorer(metrics={"*": [accuracy(), stderr(cluster="message")]})
def follows() -> Scorer:
    """How far the last and the first answer follow the message: from 0 (not at all) to 1."""

    async def score(state: TaskState, target: Target) -> Score:
        judge = state.metadata["judge"]
        answers = {"last": state.output.completion, "first": state.metadata["first"]}
        return Score(
            value={name: judged(answer, judge) for name, answer in answers.items()},
            answer=answers["last"],
        )

    return score


@scorer(metrics={"*": [accuracy(), stderr(cluster="message")]})
def follows_exactly() -> Scorer:
    """Whether the last and the first answer follow the message: 1 or 0."""
    by_text = {message.text: message for message in messages_of("test")}

    async def score(state: TaskState, target: Target) -> Score:
        message = by_text[state.metadata["message"]]
        answers = {"last": state.output.completion, "first": state.metadata["first"]}
        return Score(
            value={name: float(message.is_followed(answer)) for name, answer in answers.items()},
            answer=answers["last"],
        )

    return score
