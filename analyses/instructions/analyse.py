"""Does an instruction hold? Chats of several turns, judged by programs: figures/instructions.

    python analyses/instructions/analyse.py write --set test --round 1 --out chats
    cd chats; lapa2 sweep figures/instructions/GRID --out run      # GRID by its path
    python analyses/instructions/analyse.py judge chats/run --out figures/instructions
    python analyses/instructions/analyse.py heads --out figures/instructions
    python analyses/instructions/analyse.py laws --out figures/instructions

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
without bias; tables give it as a multiple of that of first answers without bias that adhere (at
least 1/3) to a message of the same kind; means are of ln. An answer is *relevant* if it is likelier
given its own question than given the one that stands four turns from it. Both are measured at turns
1, 4 and 8.

`heads` writes heads.json: the 24 heads without whose view of the message its effect on the first
answer falls most, chosen on those messages for tuning that have a persona and a topic, with other
questions; and shared.csv: how many of them carry a prefix, too. `laws` reads answers.parquet and
writes laws.csv: LaPA2 in all heads minus a constant bias of the same strength, at the last turn.

Intervals are over messages. answers.parquet has a row an answer, without the answer (rows of a
round that is not in the run stay), adherence.csv and kinds.csv the means by arm and turn, and the
fall from the first turn to the last. equal.csv compares the ways with LaPA2 in all heads at 1.1
and 1.25 times the cost of no bias, with Holm's correction over all tests of a measure, and the
message in every user turn with LaPA2 at the cost that it has itself. arms.csv has every arm minus
no bias, for all messages, languages and personas; there *strict* is turn 8 by the judge that counts
no word akin to the message's. table.csv has an arm a row, read.csv ten conversations of every arm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions, whole_number
from analyses.rivals.analyse import with_earlier
from lapa2_interp import load_model
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import name_families, strength
from lapa2_interp.circuits.selection import Selection, select
from lapa2_interp.errors import DataError
from lapa2_interp.files import write_text
from lapa2_interp.generation.arrange import chat_layout
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.card import prepacked_model
from lapa2_interp.models.facts import Model
from lapa2_interp.progress import progress_bar
from lapa2_interp.runs.run import Run, load_run
from lapa2_interp.scoring.equal_perplexity import BASELINE, RATIOS, SteeringCurves, add_verdicts
from lapa2_interp.stats import mean_interval
from lapa2_interp.table_formats import as_csv, as_text
from lapa2_interp.tasks.instructions import benchmark, judged, rotated, strict
from lapa2_interp.tasks.task import Attribute, ChatForm, Prompts, Task

MEASURES = ("adherence", "chance", "above", "strict", "ln cost", "relevant")
ADHERES = 1 / 3
AT_ONCE = 16
"""Answers in one pass."""
READ = (1, 4, 8)
"""Turns whose answers have a cost and a relevance."""
REFERENCE = "lapa2"
PLACES = {"user": "message in the first user turn", "repeated": "message in every user turn"}
"""Ways without a strength, by task."""
FACTS = ["family", "strength", "top_k", "message", "kind", "first", "turn", "sample"]
COMPARED = ("turn 1", "turn 4", "turn 8", "fall", "strict", "relevant")
MODEL = "smollm2-135m"
SETS = ("tune", "test", "out")


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
        "\n".join([message["text"], *rotated(questions, first, turns)])
        for i, message in enumerate(messages)
        for first in range(n)
        if part is None or (i + first // half) % 2 == part - 1
    ]


def tasks(neutral: str, turns: int) -> Iterator[tuple[str, str]]:
    """Names and texts of the task files."""
    users = [f"{{prompt:{turn + 2}}}" for turn in range(turns)]
    message = "{prompt:1}"
    yield "system.toml", task_text(message, "system", users)
    says = [f"{message} {users[0]}", *users[1:]]
    yield "user.toml", task_text(neutral, f"phrase:{message}", says)
    yield "repeated.toml", task_text(message, "system", [f"{message} {user}" for user in users])


def task_text(system: str, span: str, says: Sequence[str]) -> str:
    """The file of a task of one chat.

    Args:
        says: What the user says, turn by turn.
    """
    lines = [
        "length_counts_prompt = false",
        'attributes.message.prefix = "{prompt:1}"',
        'prompts.texts = ["of a grid"]',
        "[chat]",
        f"span = {json.dumps(span)}",
        f'messages = [{{ role = "system", content = {json.dumps(system)} }}, '
        f'{{ role = "user", content = {json.dumps(says[0])} }}]',
        f"later = {json.dumps(says[1:])}",
    ]
    return "\n".join(lines) + "\n"


def judged_answers(texts: pd.DataFrame, messages: Sequence[Mapping], neutral: str) -> pd.DataFrame:
    """The answers to messages with adherence and chance, both from 0 to 1, and what is above
    chance by the judge and by the strict one."""
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
        raise DataError(f"no judge reads answers to {unknown[0]!r}; give one in instructions.toml")
    texts["kind"] = texts["message"].map(kinds)
    texts["adherence"] = [
        judged(answer, judges[message])
        for answer, message in zip(texts["continuation"], texts["message"], strict=True)
    ]
    by = ["top_k", "questions", "turn"]
    pools = plain.groupby(by)["continuation"].agg(list).to_dict()

    @cache
    def chance(is_strict: bool, message: str, *group: object) -> float:
        if group not in pools:
            raise DataError("some questions have no neutral answer; add neutral.json to the grid")
        judge = strict(judges[message], message) if is_strict else judges[message]
        return float(np.mean([judged(answer, judge) for answer in pools[group]]))

    keys = list(zip(texts["message"], *(texts[name] for name in by), strict=True))
    texts["chance"] = [chance(False, *key) for key in keys]
    texts["above"] = texts["adherence"] - texts["chance"]
    texts["strict"] = [
        judged(answer, strict(judges[key[0]], key[0])) - chance(True, *key)
        for answer, key in zip(texts["continuation"], keys, strict=True)
    ]
    return texts


def shared_heads(model: Model, selection: Selection) -> pd.DataFrame:
    """How many of these heads carry a prefix, too (figures/shared_heads), and by chance."""
    carriers = pd.read_csv(FIGURES / "shared_heads" / "heads.csv")
    rows = []
    for task in ("sentiment", "topic"):
        of_task = carriers[carriers["/".join(load_task(task).attributes)]]
        shared = set(zip(of_task["layer"], of_task["head"], strict=True)) & set(selection.heads)
        chance = len(of_task) * len(selection.heads) / (model.cfg.n_layers * model.cfg.n_heads)
        rows.append(
            {"task": task, "heads": len(selection.heads), "shared": len(shared), "chance": chance}
        )
    return pd.DataFrame(rows)


@torch.inference_mode()
def nll(
    model: Model, answers: pd.DataFrame, question: str = "question", file: Path | None = None
) -> list[float]:
    """-ln p a token of each answer given its message and a question, in nats; NaN of none.

    Args:
        question: The column of the question.
        file: Keeps the values, by a digest of message, question and answer.
    """
    known: dict[str, float] = {}
    if file is not None and file.exists():
        known = pd.read_csv(file, index_col="answer")["nll"].to_dict()
    names = [
        sha256(repr((message, asked, list(map(int, tokens)))).encode()).hexdigest()[:24]
        for message, asked, tokens in answers[["message", question, "tokens"]].itertuples(
            index=False
        )
    ]
    values = np.array([known.get(name, np.nan) for name in names])
    numbered = answers.reset_index(drop=True)
    numbered = numbered[(numbered["tokens"].map(len) > 0) & np.isnan(values)]
    layouts = [
        chat_layout(model.tokenizer, ChatForm(messages=tuple(chat(message, asked))))
        for message, asked in zip(numbered["message"], numbered[question], strict=True)
    ]
    texts = [tuple(map(int, tokens)) for tokens in numbered["tokens"]]
    # Rows of one pass are of nearly equal length, so that little is padded.
    by_length = sorted(range(len(texts)), key=lambda i: len(layouts[i]) + len(texts[i]))
    with progress_bar(len(texts), "reading", "answer") as bar, prepacked_model(model):
        for first in range(0, len(texts), AT_ONCE):
            part = by_length[first : first + AT_ONCE]
            means = mean_nll(model, [layouts[i] for i in part], [texts[i] for i in part])
            for i, value in zip(part, means, strict=True):
                at = numbered.index[i]
                values[at] = known[names[at]] = value
            bar.update(len(part))
            if file is not None:
                table = pd.Series(known, name="nll").rename_axis("answer").reset_index()
                write_text(file, as_csv(table, 8))
    return values.tolist()


def mean_nll(
    model: Model, layouts: Sequence[Layout], texts: Sequence[tuple[int, ...]]
) -> list[float]:
    """-ln p a token of each text behind its layout, by one pass."""
    read = [
        replace(
            layout,
            ids=layout.ids + text[:-1],
            tokens=layout.tokens + ("",) * (len(text) - 1),
            l_pro=layout.l_pro + len(text) - 1,
        )
        for layout, text in zip(layouts, texts, strict=True)
    ]
    keep = max(map(len, texts))
    with torch.no_grad():
        logits = new_rows(model).prompt_pass(read, keep=keep)
        means = []
        for text, of_row in zip(texts, logits, strict=True):
            own = of_row[-len(text) :].to(torch.promote_types(of_row.dtype, torch.float32))
            ids = torch.tensor(text, device=own.device)[:, None]
            means.append(float((own.logsumexp(1) - own.gather(1, ids)[:, 0]).mean()))
    return means


def chat(system: str, user: str) -> list[dict[str, str]]:
    """A system message and a question."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def costs(answers: pd.DataFrame) -> pd.Series:
    """ln of each answer's cost."""
    first = (answers["turn"] == 1) & (answers["family"] == BASELINE)
    plain = answers[first & (answers["adherence"] >= ADHERES)].groupby("kind")["nll"].mean()
    return answers["nll"] - answers["kind"].map(plain)


def families(run: Run) -> pd.DataFrame:
    """By cell, the name of its way to steer and its strength."""
    names = name_families(cell.active_augmentations for cell in run.by_key.values())
    placed = {}
    for key, cell in run.by_key.items():
        rules = cell.active_augmentations
        placed[key] = names[rules], strength(rules)
        if rules and rules[0].law == "constant":  # its l0 is not the recipe's
            placed[key] = "lapa2-constant", strength(rules)
        if (guidance := cell.parameters.get("guidance", 1)) != 1:
            placed[key] = "guidance", guidance - 1
        elif cell.task.name in PLACES:
            placed[key] = PLACES[cell.task.name], 1.0
    return pd.DataFrame.from_dict(placed, orient="index", columns=["family", "strength"])


def finished_texts(run: Run) -> pd.DataFrame:
    """The texts with family, strength, top_k and turn."""
    texts = run.texts(list(run.finished)).join(families(run), on="cell")
    texts["top_k"] = [run.by_key[key].top_k for key in texts["cell"]]
    return texts if "turn" in texts else texts.assign(turn=1)


def compared(answers: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every way beside LaPA2 in all heads at equal cost, with Holm's correction; and every arm
    minus no bias."""
    texts = answers.rename(columns={"message": "prompt"}).copy()
    texts["nll"] = texts["ln cost"]
    for turn in READ:
        texts[f"turn {turn}"] = texts["above"].where(texts["turn"] == turn)
    texts["strict"] = texts["strict"].where(texts["turn"] == READ[-1])
    chats = ["family", "strength", "top_k", "prompt", "first", "sample"]
    first = texts[texts["turn"] == READ[0]].set_index(chats)["above"].rename("begun")
    texts = texts.join(first, on=chats)
    texts["fall"] = (texts["above"] - texts["begun"]).where(texts["turn"] == READ[-1])
    curves = SteeringCurves(texts, COMPARED)
    equal = curves.compare(REFERENCE, RATIOS)
    equal = equal[~equal["family"].isin(PLACES.values())]
    if (repeated := PLACES["repeated"]) in curves.families:
        beside = curves.compare(REFERENCE, [1.0], unit=curves.curve(repeated)[:, -1, 0])
        base = curves.curve(repeated)[0, 0, 0]
        beside = beside[beside["family"].isin([REFERENCE, repeated])]
        beside["ratio"] = beside["perplexity"] / np.exp(base)
        equal = pd.concat([equal, beside], ignore_index=True)
    return add_verdicts(equal.reset_index(drop=True), REFERENCE), curves.against_baseline()


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
            wide = of.pivot_table(index=["message", "first"], columns="turn", values="above")
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


def laws(answers: pd.DataFrame) -> pd.DataFrame:
    """What is above chance at the last turn under LaPA2 in all heads, minus that under a constant
    bias of the same strength, paired on chats."""
    last = answers[answers["turn"] == READ[-1]].set_index(["message", "first", "sample"])
    rows = []
    for step in sorted(last.loc[last["family"] == REFERENCE, "strength"].unique()):
        arms = [
            last[(last["family"] == family) & (last["strength"] == step)]["above"]
            for family in (REFERENCE, "lapa2-constant")
        ]
        difference = (arms[0] - arms[1]).rename("difference").reset_index()
        row = interval(difference, "difference")
        rows.append({"strength": step, "difference": row.pop("mean")} | row)
    return pd.DataFrame(rows)


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
    """Write the conversations, judge the answers, choose heads, or compare two laws."""
    parser = ScriptOptions("Does an instruction hold?")
    parser.add_argument("do", choices=("write", "judge", "heads", "laws"))
    parser.add_argument("run", type=Path, nargs="?", help="the run that is judged")
    parser.add_argument("--set", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--kind", nargs="+", help="of messages; by default all")
    parser.add_argument("--turns", type=whole_number(), default=8)
    parser.add_argument("--round", type=int, choices=(1, 2), help="half of the rotations")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    parts = benchmark()
    if options.do == "write":
        kinds = options.kind or {message["kind"] for message in parts["message"]}
        chosen = [
            message
            for message in parts["message"]
            if message["set"] in options.set and message["kind"] in kinds
        ]
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
        selection = choose_heads(model, tuning, parts["other_questions"])
        selection.save(options.out / "heads.json")
        write_text(options.out / "shared.csv", as_csv(shared_heads(model, selection), 5))
        return
    if options.do == "laws":
        answers = pd.read_parquet(options.out / "answers.parquet")
        write_text(options.out / "laws.csv", as_csv(laws(answers), 5))
        return
    if options.run is None:
        parser.error("judge needs the folder of a run")
    run = load_run(options.run, earlier=True)  # of both rounds
    answers = judged_answers(finished_texts(run), parts["message"], parts["neutral"])
    write_text(options.out / "read.csv", as_csv(some_conversations(answers), 3))
    answers = read_answers(answers, parts, options.run / "scores" / "nll.csv")
    answers = with_earlier(answers, options.out / "answers.parquet")
    answers["ln cost"] = costs(answers)
    by = ["family", "strength", "top_k"]
    for name, columns in (("adherence", by), ("kinds", [*by, "kind"])):
        table = adherence(answers, columns)
        write_text(options.out / f"{name}.csv", as_csv(table, 5))
        shown = table[table["measure"].isin(["above", "fall"])]
        wide = shown.pivot(index=columns, columns="turn", values="mean").reset_index()
        print(as_text(wide, ".2f"))
    if REFERENCE not in set(answers["family"]):
        return
    equal, arms = compared(answers)
    is_language = answers["kind"] == "language"
    by_kind = {"all": arms} | {
        name: compared(answers[rows])[1]
        for name, rows in (("languages", is_language), ("personas", ~is_language))
        if rows.any()
    }
    arms = pd.concat([table.assign(messages=name) for name, table in by_kind.items()])
    write_text(options.out / "arms.csv", as_csv(arms.rename(columns={"ratio": "cost"}), 5))
    if not set(answers["round"]) >= {1, 2}:
        equal[["p", "p_holm", "verdict"]] = np.nan, np.nan, ""
    write_text(options.out / "equal.csv", as_csv(equal, 5))
    table = one_table(adherence(answers, by), arms, equal)
    write_text(options.out / "table.csv", as_csv(table, 4))
    print(as_text(equal[equal["metric"].isin(["turn 8", "fall"])], ".2f"))


def one_table(adhered: pd.DataFrame, arms: pd.DataFrame, equal: pd.DataFrame) -> pd.DataFrame:
    """A row an arm: above chance at turns 1, 4 and 8, and the fall, each with its interval; cost;
    relevance at turn 8; and of its way the difference from LaPA2 in all heads at turn 8 and cost
    1.1, with its corrected p."""
    arm = ["family", "strength"]
    rows = adhered[adhered["measure"].isin(["above", "fall"])].copy()
    ends = [f"{low:.2f}, {high:.2f}" for low, high in zip(rows["low"], rows["high"], strict=True)]
    means = rows["mean"].map("{:.2f}".format)
    rows["cell"] = [f"{mean} [{of}]" for mean, of in zip(means, ends, strict=True)]
    rows["column"] = rows["measure"].where(rows["measure"] == "fall", "turn " + rows["turn"])
    table = rows.pivot(index=arm, columns="column", values="cell")
    table = table[[*(f"turn {turn}" for turn in READ), "fall"]]
    relevant = adhered[(adhered["measure"] == "relevant") & (adhered["turn"] == str(READ[-1]))]
    table = table.join(relevant.set_index(arm)["mean"].rename("relevant"))
    own = arms[(arms["messages"] == "all") & (arms["metric"] == f"turn {READ[-1]}")]
    table = table.join(own.set_index(arm)["ratio"].rename("cost"))
    first = equal[(equal["ratio"] == RATIOS[0]) & (equal["metric"] == f"turn {READ[-1]}")]
    of_way = first.set_index("family")[["difference", "p_holm", "verdict"]]
    of_way = of_way.rename(columns={"difference": "way minus all heads"})
    return table.reset_index().join(of_way, on="family")


def some_conversations(answers: pd.DataFrame) -> pd.DataFrame:
    """Ten conversations of every arm, of different messages."""
    asked = answers.groupby("message", sort=False)["prompt"].unique()
    scripts = [scripts[i % len(scripts)] for i, scripts in enumerate(asked)][:10]
    names = ["family", "strength", "message", "turn", "question", "continuation", "adherence"]
    return answers.loc[answers["prompt"].isin(scripts), names]


def read_answers(answers: pd.DataFrame, parts: Mapping[str, Any], file: Path) -> pd.DataFrame:
    """The answers with cost and relevance, without their texts; a file keeps what is read."""
    read = answers["turn"].isin(READ)
    model = load_model(answers["model"].iloc[0], dtype="float32", model_class="TransformersModel")
    opposite = {
        asked: parts["questions"][(i + 4) % 8] for i, asked in enumerate(parts["questions"])
    }
    answers["other"] = answers["question"].map(opposite)
    answers.loc[read, "nll"] = nll(model, answers[read], file=file)
    elsewhere = np.array(nll(model, answers[read], "other", file))
    own = answers.loc[read, "nll"]
    relevant = pd.Series(elsewhere > own, index=own.index, dtype=float).where(own.notna())
    answers.loc[read, "relevant"] = relevant
    tested = [message for message in parts["message"] if message["set"] == "test"]
    second = set(conversations(tested, parts["questions"], len(parts["questions"]), 2))
    answers["round"] = 1 + answers["prompt"].isin(second)
    asked = {question: i for i, question in enumerate(parts["questions"])}
    answers["first"] = [asked[questions.splitlines()[0]] for questions in answers["questions"]]
    names = [
        "round",
        *FACTS,
        "n_tokens",
        "adherence",
        "chance",
        "above",
        "strict",
        "nll",
        "relevant",
    ]
    return answers[names]


if __name__ == "__main__":
    main()
