# %% [markdown]
# # Which heads act through which?
#
# In the target's run the output of head A, at all tokens behind the prefix, is replaced by that of
# the opposite branch, and lex falls. If a later head B keeps its output meanwhile, A cannot act
# through B. The path from A to B is what is then not lost,
#
#     path(A, B) = lost(A) - lost(A, while B keeps its output),
#
# by any route from A to B, also through MLPs and other heads. It is 0 where B does not follow A.
# A negative path means that B makes up for a part of the loss.
#
#     python analyses/circuits/head_paths.py smollm2-135m --heads heads.json --prompts neutral.txt \
#         --out FOLDER

# %%
import json
from itertools import combinations
from pathlib import Path

import numpy as np

from analyses.lab.scripts import ScriptOptions
from lapa2_interp import load_model
from lapa2_interp.circuits import ContrastSet, patch
from lapa2_interp.circuits.unit_table import UnitTable
from lapa2_interp.circuits.units import Unit
from lapa2_interp.files import write_text
from lapa2_interp.plots import new_figure
from lapa2_interp.table_formats import as_csv, as_text
from lapa2_interp.tasks.prompts import read_prompts

parser = ScriptOptions("The share of control that goes from one head through another")
parser.add_argument("model", help="a name of `lapa2 models`, a hub id or a folder")
parser.add_argument("--heads", type=Path, required=True, help="heads.json of `lapa2 circuits`")
parser.add_argument("--best", type=int, default=24, help="heads of it that are taken")
parser.add_argument("--task", default="sentiment", help="a task with words of its attributes")
parser.add_argument("--attribute", help="the target, of two attributes (the task's first)")
parser.add_argument("--prompts", type=Path, required=True, help="a file, a prompt a line")
parser.add_argument("--n", type=int, default=24, help="prompts that are read")
parser.add_argument("--tokens", type=int, default=16, help="tokens of a text")
parser.add_argument("--out", type=Path, required=True, help="folder of the table and the figure")
options = parser.parse_args()
model = load_model(options.model)
asked = ContrastSet.of(
    model,
    options.task,
    attribute=options.attribute,
    prompts=read_prompts(options.prompts)[: options.n],
    tokens=options.tokens,
)
heads = sorted(tuple(head) for head in json.loads(options.heads.read_text())[: options.best])
pairs = [(a, b) for a, b in combinations(heads, 2) if a[0] < b[0]]

# %%
names = {head: "{}.{}".format(*head) for head in heads}
sets = {names[head]: [head] for head in heads}
keep = {f"{names[a]} less {names[b]}": [b] for a, b in pairs}
sets |= {f"{names[a]} less {names[b]}": [a] for a, b in pairs}
patching = patch(model, asked, "z", direction="noise", together=sets, keep=keep)
lost = dict(zip(sets, patching.effects["noise"].T, strict=True))  # name: example
paths = UnitTable(
    asked,
    tuple(Unit({"from": names[a], "to": names[b]}, (a, b)) for a, b in pairs),
    np.stack([lost[names[a]] - lost[f"{names[a]} less {names[b]}"] for a, b in pairs], axis=1),
    patching.source - patching.destination,
    label="path, share of lex",
    as_shares=True,
)
table = paths.frame()
alone = dict(zip(sets, patching.table("noise").shares, strict=True))
table["from_alone"] = table["from"].map(alone)
table["to_alone"] = table["to"].map(alone)
table["prompts"] = asked.n_prompts
columns = ["from", "to", "share", "share_low", "share_high", "p_max", "from_alone", "to_alone"]
print(as_text(table[columns].head(20), ".4f"))
write_text(options.out / "head_paths.csv", as_csv(table[[*columns, "prompts"]], 6))

# %%
order = list(names.values())
grid = np.full((len(order), len(order)), np.nan)
for row in table.itertuples():
    grid[order.index(row.to), order.index(row._1)] = 100 * row.share
figure = new_figure(5.2, 4.6)
axes = figure.subplots()
most = np.nanmax(abs(grid))
image = axes.imshow(grid, cmap="RdBu_r", vmin=-most, vmax=most)
axes.set_xticks(range(len(order)), order, rotation=90, fontsize=6)
axes.set_yticks(range(len(order)), order, fontsize=6)
axes.set_xlabel("from head", fontsize=8)
axes.set_ylabel("through head", fontsize=8)
figure.colorbar(image, ax=axes, label="path, % of lex")
figure.savefig(options.out / "head_paths.png")
