"""What can be seen before an answer, and if it says that the answer will break its message.

    python analyses/messages/measures.py qwen2.5-coder-1.5b-instruct --models FOLDER

reads the chats of stage *alarm* again, and writes figures/messages/measures.parquet: by answer, at
the last token before it,

- *attention of all heads*: on the message, a mean over layers and heads;
- *attention of chosen heads*: the same in the heads of heads.csv;
- *effect*: how far the prediction of the first token moves when the message is hidden from all
  tokens behind it, as Jensen-Shannon divergence in nats;
- *entropy*: of this prediction, in nats.

Keys and values are those of the chat as it was written, without a bias. A call that was stopped
goes on. Then alarm.csv has for each measure its AUROC within message and turn (alarm.py), what it
adds, and its precision where a third of the answers ring. Attention and effect ring where they are
small, entropy where it is large.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analyses.families.analyse import replace_rows
from analyses.families.grids import MADE, MODELS, path_of
from analyses.lab.scripts import ScriptOptions
from analyses.messages import alarm
from analyses.messages.analyse import answers_of
from analyses.messages.chats import OUT
from lapa2_interp import load_model
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.circuits.metrics import Predictions, js
from lapa2_interp.files import atomic_write
from lapa2_interp.generation.arrange import chat_layout
from lapa2_interp.methods.registry import HIDDEN
from lapa2_interp.models.card import prepacked_model
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.progress import progress_bar
from lapa2_interp.tasks.task import ChatForm

ATTENTION, CHOSEN = "attention of all heads", "attention of chosen heads"
EFFECT, ENTROPY = "effect", "entropy"
MEASURES = (ATTENTION, CHOSEN, EFFECT, ENTROPY)
SIGNS = {ATTENTION: -1, CHOSEN: -1, EFFECT: -1, ENTROPY: 1}
"""The sign with which a measure rings."""
PERCENT = 100 - 5 / len(MEASURES)
"""The interval of an AUROC, for all four."""
RATE = 1 / 3
"""The share of answers at which an alarm rings."""
AT_ONCE = 20
"""Chats after which measures are stored."""


def main() -> None:
    """Read the chats, and write both tables."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    folder = MADE / options.model / "messages" / "alarm"
    answers = answers_of("alarm", options.model, folder, options.out)
    heads = pd.read_csv(options.out / "heads.csv").query("model == @options.model")
    chosen = heads[["layer", "head"]].to_numpy(int)
    file = options.out / "measures.parquet"
    rows = measure(path_of(options.model, options.models), answers, chosen, file)
    replace_rows(options.out / "alarm.csv", options.model, alarms(rows))


def measure(path: str, answers: pd.DataFrame, chosen: np.ndarray, file: Path) -> pd.DataFrame:
    """The measures before every answer; those of a file are not made again.

    Args:
        chosen: Layer and head of each chosen head.
    """
    keys = ["message", "chat"]
    known = pd.read_parquet(file) if file.exists() else pd.DataFrame(columns=keys)
    there = set(known[keys].itertuples(index=False, name=None))
    left = [of for key, of in answers.groupby(keys, sort=False) if key not in there]
    if not left:
        return known
    model = load_model(path, dtype="bfloat16", model_class="TransformersModel")
    with prepacked_model(model), progress_bar(len(left), "measures", "chat") as bar:
        for i, of in enumerate(left, start=1):
            of = of.sort_values("turn")
            own = of[[*keys, "kind", "turn", "against", "keys"]].assign(
                broke=(of["followed"] == 0).astype(int), **before_answers(model, of, chosen)
            )
            known = pd.concat([known, own], ignore_index=True) if len(known) else own
            if i % AT_ONCE == 0 or i == len(left):
                with atomic_write(file) as fresh:
                    known.to_parquet(fresh, index=False, compression="zstd")
            bar.update(1)
    return known


@torch.no_grad()
def before_answers(
    model: Model, answers: pd.DataFrame, chosen: np.ndarray
) -> dict[str, np.ndarray]:
    """The measures before every answer of a chat, in the order of its turns.

    Two rows read the chat up to each answer: one sees the message, and from the other it is hidden.
    """
    said = str(answers["prompt"].iloc[0]).splitlines()
    messages = ({"role": "system", "content": said[0]}, {"role": "user", "content": said[1]})
    layout = chat_layout(model.tokenizer, ChatForm(messages=messages))
    # The first turn is always read up to its end, though it may not be asked for.
    ends = sorted({len(layout), *map(len, answers["context"])})
    asked = slice(len(ends) - len(answers), None)
    context = list(map(int, answers["context"].iloc[-1]))
    if tuple(context[: len(layout)]) != layout.ids:
        raise ValueError(f"the chat of {said[0]!r} does not begin as the template writes it")
    rules, layouts = [(), (HIDDEN,)], [layout, layout]
    facts = facts_of(model)
    recorder = Recorder(facts.n_layers, facts.n_heads, "full", layer_types=facts.layer_types)
    recorder.begin(layouts)
    rows = new_rows(model, [HIDDEN])
    with augmented(model, rules, layouts, recorder):
        logits = [rows.prompt_pass(layouts)[:, -1]]
        rows.expand(torch.arange(2, device=logits[0].device), ends[-1])
        for first, end in pairwise(ends):
            recorder.skip(end - first - 1)
            piece = torch.tensor([context[first:end]] * 2, device=logits[0].device)
            logits.append(rows.read_tokens(piece)[:, -1])
    # step vocab, of either row
    seen, hidden = torch.stack(logits, dim=1)[:, asked].to(torch.float32)
    none = torch.zeros(1, len(answers), dtype=torch.long, device=seen.device)
    effect = js(Predictions(torch.stack([seen, hidden])[:, None], none))[0]
    log_probs = seen.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    trace = recorder.dataset(layouts[:1] * 2, ["chat"], [len(ends)] * 2)
    masses = trace["prefix"].to_numpy()[0, 0, asked]  # step layer head
    return {
        ATTENTION: masses.mean(axis=(1, 2)),
        CHOSEN: masses[:, chosen[:, 0], chosen[:, 1]].mean(axis=1),
        EFFECT: effect.cpu().numpy(),
        ENTROPY: entropy.cpu().numpy(),
    }


def alarms(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a measure: AUROC, increment, precision and recall, and the base rate."""
    signed = rows.assign(**{name: sign * rows[name] for name, sign in SIGNS.items()})
    signed["length"] = signed["keys"]
    table = alarm.within_auroc(signed, MEASURES, PERCENT).to_dict("records")
    for row in table:
        added = alarm.increment(signed, row["measure"])
        row |= {f"increment {name}".removesuffix(" increment"): added[name] for name in added}
        row |= alarm.at_a_rate(signed, row["measure"], RATE)
        row["predicts"] = bool(row["low"] > 0.5)
    return pd.DataFrame(table)


if __name__ == "__main__":
    main()
