"""The chats of analyses/messages: what is asked, and the grids that make answers.

    python analyses/messages/chats.py STAGE qwen2.5-coder-1.5b-instruct --models FOLDER

in the folder in which the stages work (analyses/messages/run.sh has all of them, in order) writes
conversations, tasks and grid.toml into made/MODEL/messages/STAGE. Stages:

- *pilot*: messages of the pilot, four chats each, two turns, without a bias;
- *heads*: no chats, but the heads that carry four messages (heads.csv) and the vectors of
  activation addition (vectors.parquet in made/MODEL/messages);
- *tune*: messages that choose, two chats each, four turns, strengths that are tried next;
- *test*: messages of the test, two chats each, the next arm with 8 or 16 turns;
- *alarm*: six more chats of these messages, 8 turns, without a bias;
- *neutral*: 16 chats with a neutral message, 16 turns, which say what chance gives.

Kinds are those that figures/messages/pilot.csv says are followed, and strengths come from
strengths.csv there, both by analyses/messages/analyse.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from analyses.families.analyse import replace_rows
from analyses.families.grids import (
    ADDITION,
    MADE,
    MODELS,
    NO_BIAS,
    chosen_layer,
    next_strengths,
    path_of,
    strengths,
)
from analyses.families.grids import OUT as FAMILIES
from analyses.heads.equal_attention import listed
from analyses.instructions.analyse import chat, task_text
from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from lapa2_interp import load_model
from lapa2_interp.attention.residual import mean_residual
from lapa2_interp.bias.layout import Layout
from lapa2_interp.circuits.selection import select
from lapa2_interp.errors import RunError
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.tasks.exact_messages import Message, Set, exact_messages, messages_of
from lapa2_interp.tasks.instructions import benchmark, rotated
from lapa2_interp.tasks.task import Attribute, ChatForm, Prompts, Task

OUT = FIGURES / "messages"
NEUTRAL = "You are a helpful assistant."
TOKENS, TURNS, LONG = 64, 8, 16
"""Tokens of an answer; turns of most arms, and of some."""
REPEATED, ALL, CHOSEN = "message repeated", "all heads", "chosen heads"
CONSTANT = "chosen heads, constant"
FIRST_STRENGTHS = {CHOSEN: (1.0, 2.0), ALL: (0.5, 1.0), CONSTANT: (1.0, 2.0), ADDITION: (1.5, 4.0)}
"""Strengths that are tried first, by arm."""
ARMS = (NO_BIAS, CHOSEN, ALL, REPEATED, CONSTANT, ADDITION)
"""In the order in which they are made."""
LONG_ARMS = (NO_BIAS, REPEATED, CHOSEN)
"""Those with more turns."""
REPEATED_AT = (5, 9, 13)
"""Turns at which the message is repeated."""
L0 = 300
"""The length at which the constant bias is that of LaPA2."""
METHOD = "analyses.messages.vector:MessageVector"
FOR_HEADS = (
    "Say everything in a single sentence.",
    "Keep all answers under thirteen words.",
    "Write to the user in Spanish.",
    'Answer without the word "your".',
)
"""Messages that choose heads, of seven tokens."""
ASKED, HEADS = 16, 30
"""The number of questions that choose heads, and of heads."""


@dataclass(frozen=True)
class Stage:
    """The chats of a stage.

    Attributes:
        messages: The set of their messages.
        chats: The numbers of the chats of a message.
        apart: Questions from the first one of a chat to that of the message's next chat.
        turns: The most turns of a chat.
        against: Some users ask against the message.
    """

    messages: Set
    chats: range
    apart: int
    turns: int
    against: bool = False


STAGES = {
    "pilot": Stage("pilot", range(4), 4, 2),
    "tune": Stage("choose", range(2), 2, 4),
    "test": Stage("test", range(2), 2, LONG, against=True),
    "alarm": Stage("test", range(2, 8), 2, TURNS, against=True),
    "neutral": Stage("test", range(16), 1, LONG),
}

TURNS_OF = {name: stage.turns for name, stage in STAGES.items()}

HEADER = """description = "Do exact messages hold? {stage}; analyses/messages/README.md"
model = "{model}"
model_class = "TransformersModel"
dtype = "bfloat16"
attribute = "message"
length = {tokens}
eos = "stop"
top_k = 20
trace = "pooled"
max_rows = 32
"""


def main() -> None:
    """Write the chats and the grid of a stage, or choose heads."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=(*STAGES, "heads"))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    path, folder = path_of(options.model, options.models), MADE / options.model / "messages"
    if options.stage == "heads":
        kinds = kinds_of(options.model, options.out)
        write_vectors(options.model, path, folder / "vectors.parquet", kinds)
        choose_heads(options.model, path, options.out / "heads.csv")
        return
    write_chats(options.stage, folder / options.stage, kinds_of(options.model, options.out))
    blocks = {
        "pilot": lambda: [chat_block(folder / "pilot", TURNS_OF["pilot"], {NO_BIAS: "none"})],
        "tune": lambda: tune_blocks(options.model, folder / "tune", options.out),
        "test": lambda: test_blocks(options.model, folder / "test", options.out),
        "alarm": lambda: [chat_block(folder / "alarm", TURNS, {NO_BIAS: "none"})],
        "neutral": lambda: [chat_block(folder / "neutral", LONG, {NO_BIAS: "none"})],
    }[options.stage]()
    grid = folder / options.stage / "grid.toml"
    grid.unlink(missing_ok=True)
    if blocks:
        header = HEADER.format(stage=options.stage, model=path, tokens=TOKENS)
        write_text(grid, "\n".join([header, *blocks]))


def kinds_of(model: str, tables: Path) -> set[str]:
    """The kinds that the model follows; all before the pilot was judged."""
    file = tables / "pilot.csv"
    table = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=["model", "kind"])
    own = table[table["model"] == model]
    if own.empty:
        return set(exact_messages()["kind"])
    return set(own.loc[own["kind is followed"].astype(bool), "kind"])


def messages_in(stage: str, kinds: set[str]) -> list[Message]:
    """The messages of a stage; the pilot has those of all kinds."""
    if stage == "neutral":
        return [Message("neutral", NEUTRAL, "", ())]
    messages = messages_of(STAGES[stage].messages)
    return [message for message in messages if stage == "pilot" or message.kind in kinds]


def conversations(stage: Stage, messages: Sequence[Message], turns: int) -> list[str]:
    """A message and its questions, a line each, chat by chat. A chat's first question is some
    questions after that of the message's chat before, and one after that of the message before.

    In a third of the chats users ask against the message at every odd turn from the third on.
    """
    parts = exact_messages()
    questions, forms = parts["questions"], parts["against"]
    scripts = []
    for i, message in enumerate(messages):
        for chat_number in stage.chats:
            lines = [message.text]
            asked = rotated(questions, i + chat_number * stage.apart, turns)
            for turn, question in enumerate(asked, start=1):
                if is_against(stage, i, chat_number, turn):
                    form = forms[(i + turn // 2 - 1) % len(forms)]
                    question = form.format(question=question)
                lines.append(question)
            scripts.append("\n".join(lines))
    return scripts


def is_against(stage: Stage, message: int, chat_number: int, turn: int) -> bool:
    """If the user asks against the message at a turn, from 1."""
    return stage.against and (message + chat_number) % 3 == 2 and turn >= 3 and turn % 2 == 1


def write_chats(name: str, folder: Path, kinds: set[str]) -> None:
    """Write the conversations and the tasks of a stage, by their number of turns."""
    stage, messages = STAGES[name], messages_in(name, kinds)
    for turns in sorted({min(TURNS, stage.turns), stage.turns}):
        scripts = conversations(stage, messages, turns)
        write_text(folder / f"conversations-{turns}.json", json.dumps(scripts, indent=1))
        users = [f"{{prompt:{turn + 1}}}" for turn in range(1, turns + 1)]
        write_text(folder / f"system-{turns}.toml", task_text("{prompt:1}", "system", users))
        says = [
            f"{{prompt:1}} {user}" if turn in REPEATED_AT else user
            for turn, user in enumerate(users, start=1)
        ]
        write_text(folder / f"repeated-{turns}.toml", task_text("{prompt:1}", "system", says))


def chat_block(
    folder: Path,
    turns: int,
    arms: Mapping[str, str],
    methods: Sequence[str] = ('{ name = "chat", keep_turns = true }',),
    task: str = "system",
) -> str:
    """A block of a grid, with an arm for each label and recipe, and each method."""
    rows = [
        f"    {{ recipe = '{recipe}', label = \"{label}\" }}," for label, recipe in arms.items()
    ]
    prompts = folder / f"conversations-{turns}.json"
    n = len(json.loads(prompts.read_text("utf-8")))
    what = "`analyses/messages/chats.py`"
    return "\n".join(
        [
            "[[block]]",
            f'task = "{folder / f"{task}-{turns}.toml"}"',
            f'prompts = {{ file = "{prompts}", n = {n}, what = "{what}" }}',
            "method = [",
            *(f"    {method}," for method in methods),
            "]",
            "augmentation = [",
            *rows,
            "]",
            "",
        ]
    )


def recipe_of(arm: str, heads: str, strength: float) -> str:
    """The bias of an arm."""
    if arm == CONSTANT:
        return f"lapa2-constant:heads={heads},l0={L0},alpha={strength:.4f}"
    where = f"heads={heads}," if arm == CHOSEN else ""
    return f"lapa2:{where}alpha={strength:.4f}"


def vector_method(model: str, folder: Path, strength: float) -> str:
    """Activation addition as a method of a grid."""
    file, layer = folder.parent / "vectors.parquet", chosen_layer(FAMILIES, model)
    return (
        f'{{ name = "{METHOD}", keep_turns = true, file = "{file}", layer = {layer},'
        f" strength = {strength:.4f} }}"
    )


def heads_of(tables: Path, model: str) -> str:
    """The chosen heads, as a recipe takes them.

    Raises:
        RunError: They have not been chosen.
    """
    file = tables / "heads.csv"
    table = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=["model"])
    own = table[table["model"] == model]
    if own.empty:
        raise RunError(f"{file} has no heads of {model}; run chats.py heads {model}")
    return listed(tuple(zip(own["layer"], own["head"], strict=True)))


def tune_blocks(model: str, folder: Path, tables: Path) -> list[str]:
    """The strengths that are tried next; none where all arms are tuned."""
    tried, heads = strengths(tables, model), heads_of(tables, model)
    arms: dict[str, str] = {} if len(tried) else {NO_BIAS: "none"}
    vectors = []
    for arm, first in FIRST_STRENGTHS.items():
        for strength in next_strengths(first, tried[tried["arm"] == arm]):
            if arm == ADDITION:
                vectors.append(vector_method(model, folder, strength))
            else:
                arms[f"{arm} {strength:g}"] = recipe_of(arm, heads, strength)
    turns = TURNS_OF["tune"]
    blocks = [chat_block(folder, turns, arms)] if arms else []
    if vectors:
        blocks.append(chat_block(folder, turns, {ADDITION: "none"}, vectors))
    return blocks


def test_blocks(model: str, folder: Path, tables: Path) -> list[str]:
    """The first arm whose answers have not been judged, with its tuned strength; none where all
    have been. So each arm is judged before the next one is made.

    Raises:
        RunError: An arm is not tuned.
    """
    table = strengths(tables, model)
    own = table[table["tuned"].astype(bool)].set_index("arm")["strength"]
    if missing := [arm for arm in FIRST_STRENGTHS if arm not in own]:
        raise RunError(f"{', '.join(missing)} of {model} not tuned; run analyse.py tune {model}")
    file = tables / "answers.test.parquet"
    judged = set(pd.read_parquet(file)["arm"]) if file.exists() else set()
    arm = next((arm for arm in ARMS if arm not in judged), None)
    if arm is None:
        return []
    turns = LONG if arm in LONG_ARMS else TURNS
    if arm == ADDITION:
        vector = vector_method(model, folder, own[arm])
        return [chat_block(folder, turns, {arm: "none"}, [vector])]
    if arm == REPEATED:
        return [chat_block(folder, turns, {arm: "none"}, task="repeated")]
    recipe = "none" if arm == NO_BIAS else recipe_of(arm, heads_of(tables, model), own[arm])
    return [chat_block(folder, turns, {arm: recipe})]


def write_vectors(model: str, path: str, file: Path, kinds: set[str]) -> None:
    """Write the vectors of the messages of tuning and test, if they are not there."""
    if file.exists():
        return
    texts = [message.text for name in ("tune", "test") for message in messages_in(name, kinds)]
    loaded = load_model(path, dtype="bfloat16", model_class="TransformersModel")
    layer = chosen_layer(FAMILIES, model)

    def mean_of(message: str) -> torch.Tensor:
        layouts = [
            Layout.of_chat(loaded.tokenizer, chat(message, asked)) for asked in head_questions()
        ]
        return mean_residual(loaded, layouts)[layer].float()

    neutral = mean_of(NEUTRAL)
    rows = [{"message": text, "vector": (mean_of(text) - neutral).tolist()} for text in texts]
    with atomic_write(file) as fresh:
        pd.DataFrame(rows).to_parquet(fresh, index=False)


def head_questions() -> tuple[str, ...]:
    """The questions by which heads are chosen, and vectors are made."""
    return tuple(benchmark()["other_questions"][:ASKED])


def choose_heads(model: str, path: str, file: Path) -> None:
    """Write the chosen heads into a table, if it has none of this model."""
    if file.exists() and model in set(pd.read_csv(file)["model"]):
        return
    task = Task(
        name="messages",
        length_counts_prompt=False,
        attributes={text: Attribute(prefix=text) for text in FOR_HEADS},
        prompts=Prompts(texts=head_questions()),
        chat=ChatForm(messages=tuple(chat("{prefix}", "{prompt}"))),
    )
    selection = select(load_model(path, dtype="float32"), task, score="slope", heads=HEADS)
    rows = [
        {"layer": layer, "head": head} | dict(zip(("slope", "low", "high"), values, strict=True))
        for (layer, head), values in zip(selection.heads, selection.scores, strict=False)
    ]
    replace_rows(file, model, pd.DataFrame(rows))


if __name__ == "__main__":
    main()
