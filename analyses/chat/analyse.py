# %% [markdown]
# # Does an instruction hold?
#
# Chats whose system message is an instruction, continued by SmolLM2-Instruct with and without
# LaPA2 on that message. Three questions in each quarter of the texts: how much attention does the
# message get? How much does it matter for the next token, in divergence from a model whose later
# queries do not see it? How often do the texts say what it asks for?
#
#     python analyses/chat/analyse.py  # 2 chats, 96 tokens: about a minute
#     python analyses/chat/analyse.py --chats 12 --length 1000    # does it hold over 1,000 tokens?
#
# With `--out`, texts.csv has the values of each part of each text, and chat.csv what they say.

# %%
import re
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp import Layout, load_model
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.circuits.hidden_span import forced_logits, span_effect
from lapa2_interp.files import write_text
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.progress import progress_bar
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.stats import mean_interval, paired_difference
from lapa2_interp.table_formats import as_csv, interval_cells

# %% [markdown]
# Who speaks, of what, and the words that are counted (`*`: any ending). The request is the same in
# all chats, and says nothing of them.

# %%
CHATS = {
    "a sailor": ("the sea", "sea seas ship* sail* wave* ocean* boat*"),
    "a cook": ("food", "food* cook* eat eats eating meal* bread soup kitchen* dish*"),
    "a musician": ("music", "music* song* sing singing sang melod* instrument*"),
    "a soldier": ("war", "war wars battle* soldier* fight* fought army armies enem*"),
    "a gardener": ("plants", "plant* flower* tree* garden* seed* leaf leaves root*"),
    "a doctor": ("health", "health* ill illness* doctor* patient* medicine* disease* heal*"),
    "a merchant": ("money", "money gold coin* trade* trading sell* sold buy* market* rich"),
    "a priest": ("God", "god gods pray* church* faith holy bless*"),
    "a shepherd": ("animals", "animal* sheep dog dogs wolf wolves goat* flock* bird*"),
    "an astronomer": ("the sky", "sky skies star stars moon* planet* sun heaven*"),
    "a teacher": ("school", "school* teach* taught learn* student* lesson*"),
    "a hunter": ("the forest", "forest* wood woods hunt* deer tree* trail*"),
}
REQUEST = "Tell me a long story about two old friends."

parser = ScriptOptions("Does a chat's instruction hold?")
parser.add_argument("--length", type=whole_number(4), default=96, help="tokens of a continuation")
parser.add_argument(
    "--chats", type=whole_number(1, len(CHATS)), default=2, help=f"chats, at most {len(CHATS)}"
)
parser.add_argument(
    "--samples", type=whole_number(), default=2, help="continuations of each chat and arm"
)
parser.add_argument("--augmentation", default="lapa2", help="a recipe of `lapa2 recipes`")
parser.add_argument("--out", type=Path, help="a folder for chat.csv and texts.csv")
options = parser.parse_args()

# %%
model = load_model("smollm2-135m", dtype="float32")
layouts, patterns, systems = [], [], []
for speaker, (topic, words) in list(CHATS.items())[: options.chats]:
    system = f"You are {speaker}. Speak of {topic} in every sentence."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": REQUEST}]
    layouts.append(Layout.of_chat(model.tokenizer, messages, span="system"))
    systems.append(system)
    either = words.replace("*", r"\w*").replace(" ", "|")
    patterns.append(re.compile(rf"\b({either})\b", re.IGNORECASE))
print("".join(layouts[0].tokens[slice(*layouts[0].prefix)]))

# %% [markdown]
# Every system message is a prompt of one task. End tokens are never drawn, so that every text has
# the same length.

# %%
arms = {"baseline": (), options.augmentation: parse_recipes(options.augmentation)}
form = [{"role": "system", "content": "{prompt}"}, {"role": "user", "content": REQUEST}]
task = chat_task(form, span="system", prompts=systems)
made = {}
for arm, rules in arms.items():
    settings = {"length": options.length, "samples": options.samples, "eos": "block"}
    cell = cell_of(
        model, method="chat", task=task, augmentation=rules or "none", trace="pooled", **settings
    )
    run = make_cells(model, [cell])
    made[arm] = run.texts()["tokens"].tolist(), run.trace(cell.key)
    print(f"--- {arm}\n{run.texts()['continuation'][0][:400]}")

# %% [markdown]
# What the message does at each step, on the text that was written: the Jensen-Shannon divergence of
# the next-token distributions with it and with it cut out of the view of every later query. And
# what the text costs: its negative log-likelihood under the model that is not steered.


# %%
def read(layout, tokens, rules):
    """JS of each step, and the negative log-likelihood of its token, in nats."""
    plain = forced_logits(model, layout, tokens, ())[0].log_softmax(-1)
    return span_effect(model, layout, tokens, rules), -plain[range(len(tokens)), tokens].numpy()


def said(tokens, pattern):
    """Words of the instruction's topic, per 100 tokens."""
    return 100 * len(pattern.findall(model.tokenizer.decode(tokens))) / len(tokens)


# %%
parts = np.array_split(np.arange(options.length), 4)
steps = [f"{part[0]}-{part[-1]}" for part in parts]
rows = []
with progress_bar(len(arms) * len(layouts) * options.samples, "reading", "text") as bar:
    for arm, rules in arms.items():
        texts, trace = made[arm]
        attention = trace["prefix"][0].to_numpy()  # sample step
        for chat, layout in enumerate(layouts):
            for text in range(chat * options.samples, (chat + 1) * options.samples):
                tokens = texts[text]
                effect, cost = read(layout, tokens, rules)
                bar.update(1)
                for name, part in zip(steps, parts, strict=True):
                    values = {
                        "attention": attention[text, part].mean(),
                        "js, 1/1000 nats": 1000 * effect[part].mean(),
                        "nats a token": cost[part].mean(),
                        "words per 100 tokens": said([tokens[i] for i in part], patterns[chat]),
                    }
                    rows += [
                        [measure, arm, name, chat, text % options.samples, value]
                        for measure, value in values.items()
                    ]
table = pd.DataFrame(rows, columns=["measure", "arm", "steps", "chat", "sample", "value"])

# %% [markdown]
# Means with 95 % intervals over chats, and what the steering adds at the end, chat by chat.


# %%
def interval(estimate):
    return [estimate.mean, estimate.low, estimate.high]


rows = []
for (measure, arm, part), of in table.groupby(["measure", "arm", "steps"], sort=False):
    rows.append([measure, arm, part, *interval(mean_interval(of["value"], of["chat"]))])
last = table[table["steps"] == steps[-1]]
for measure, of in last.groupby("measure", sort=False):
    before, after = (of[of["arm"] == arm] for arm in arms)
    gain = paired_difference(before["value"], before["chat"], after["value"], after["chat"])
    rows.append([measure, f"{options.augmentation} adds", steps[-1], *interval(gain)])
means = pd.DataFrame(rows, columns=["measure", "arm", "steps", "mean", "low", "high"])
shown = means.assign(words=interval_cells(means, ".3f")).pivot(
    index=["measure", "arm"], columns="steps", values="words"
)
print(shown[steps].fillna("").to_string())
if options.out:
    write_text(options.out / "chat.csv", as_csv(means, 6))
    write_text(options.out / "texts.csv", as_csv(table, 8))
of_attention = table[table["measure"] == "attention"]["value"]
assert np.isfinite(of_attention).all()
assert (of_attention > 0).all()
