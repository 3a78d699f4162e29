"""Does a chat's system message hold? A task for Inspect (`pip install "lapa2-interp[inspect]"`):

    inspect eval analyses/inspect/who_speaks.py --model lapa2/smollm2-135m -M alpha=.5

The system message says who speaks, and the request says nothing of it. The score is the share of an
answer's words that belong to the speaker's trade. `analyses/chat.py` is the study.
"""

import re

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser
from inspect_ai.scorer import Score, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate

SPEAKERS = {
    "a sailor": "sea|seas|ships?|sail\\w*|waves?|ocean|boats?|storm\\w*|harbou?r",
    "a baker": "bread|bak\\w*|dough|flour|ovens?|cakes?|sugar|loaf|loaves",
    "a gardener": "garden\\w*|plants?|flower\\w*|trees?|seeds?|leaf|leaves|roots?",
    "a musician": "music\\w*|songs?|sing\\w*|melod\\w*|instruments?|notes?",
}
REQUEST = "Tell me a story about two old friends."


@scorer(metrics=[mean(), stderr()])
def words_of_the_trade():
    """The share of an answer's words that the target's pattern has."""

    async def score(state: TaskState, target: Target) -> Score:
        words = re.findall(r"[a-z]+", state.output.completion.lower())
        hits = [word for word in words if re.fullmatch(target.text, word)]
        return Score(value=len(hits) / max(len(words), 1), explanation=" ".join(hits))

    return score


@task
def who_speaks(speakers: int = len(SPEAKERS)) -> Task:
    """One sample for each speaker."""
    samples = [
        Sample(
            [ChatMessageSystem(content=f"You are {speaker}."), ChatMessageUser(content=REQUEST)],
            target=pattern,
        )
        for speaker, pattern in list(SPEAKERS.items())[:speakers]
    ]
    return Task(samples, solver=generate(), scorer=words_of_the_trade())
