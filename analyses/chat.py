# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does an instruction hold?
#
# A chat whose system message is an instruction, continued by SmolLM2-Instruct with and without
# LaPA2 on that message. Two questions at every step: how much attention does the message get, and
# how much does it matter for the next token? The second is the divergence from a model whose later
# queries do not see it.
#
#     python analyses/chat.py                  # 96 tokens, about a minute
#     python analyses/chat.py --length 1000    # does it hold over 1,000 tokens?

# %%
import argparse

import numpy as np
import pandas as pd
import torch

from lapa2_interp import Augmentation, Layout, augmented, load_model
from lapa2_interp.decoding.chat import continue_chat
from lapa2_interp.recipes import read_recipes

parser = argparse.ArgumentParser(description="Does a chat's instruction hold?")
parser.add_argument("--length", type=int, default=96, help="tokens of a continuation")
parser.add_argument("--samples", type=int, default=2, help="continuations of each arm")
parser.add_argument("--augmentation", default="lapa2", help="a recipe of `lapa2 recipes`")
options, _ = parser.parse_known_args()  # a notebook has arguments of its own

# %%
MESSAGES = [
    {"role": "system", "content": "You are a sailor. Speak of the sea in every sentence."},
    {"role": "user", "content": "Tell me a long story about a small village in the mountains."},
]
model = load_model("smollm2-135m", dtype="float32")
layout = Layout.of_chat(model.tokenizer, MESSAGES, span="system")
print("".join(layout.tokens[slice(*layout.prefix)]).replace("Ġ", " "))

# %% [markdown]
# End tokens are never drawn, so that every text has the same length.

# %%
arms = {"baseline": (), options.augmentation: read_recipes(options.augmentation)}
made = {
    arm: continue_chat(
        model, layout, rules, length=options.length, samples=options.samples, eos="block"
    )
    for arm, rules in arms.items()
}
for arm, found in made.items():
    print(f"--- {arm}\n{found.texts[0][:400]}")

# %% [markdown]
# What the message does at each step, on the text that was written: the Jensen-Shannon divergence of
# the next-token distributions with it and with it cut out of the view of every later query.

# %%
CUT = Augmentation(alpha=1, law="cut", phase="all_queries")


def predictions(tokens, rules):
    """Log-probabilities at every step, [step vocab]."""
    ids = torch.tensor([[*layout.ids, *tokens[:-1]]])
    with torch.no_grad(), augmented(model, [rules], layout):
        return model(ids)[0, len(layout) - 1 :].log_softmax(-1)


def divergence(tokens, rules):
    """JS of each step, in nats."""
    one, other = predictions(tokens, rules), predictions(tokens, (*rules, CUT))
    middle = torch.logaddexp(one, other) - np.log(2)
    return sum((each.exp() * (each - middle)).sum(-1) for each in (one, other)).div(2).numpy()


# %%
parts = np.array_split(np.arange(options.length), 4)
rows = []
for arm, found in made.items():
    attention = found.trace["prefix"][0].mean("sample").to_numpy()
    effect = np.mean([divergence(each, arms[arm]) for each in found.tokens], axis=0)
    for part in parts:
        rows.append(
            {
                "arm": arm,
                "steps": f"{part[0]}-{part[-1]}",
                "attention": attention[part].mean(),
                "js": effect[part].mean(),
                "sea words": np.mean(
                    [
                        sum(
                            word in model.tokenizer.decode([each[i] for i in part]).lower()
                            for word in ("sea", "ship", "sail", "wave", "ocean")
                        )
                        for each in found.tokens
                    ]
                ),
            }
        )
table = pd.DataFrame(rows)
print(table.to_string(index=False, float_format="%.4f"))

# %%
by_arm = table.groupby("arm")["attention"]
left = by_arm.last() / by_arm.first()
print(
    "attention left in the last quarter of the text: "
    + ", ".join(f"{arm} {value:.0%}" for arm, value in left.items())
)
assert np.isfinite(table["attention"]).all()
assert (table["attention"] > 0).all()
