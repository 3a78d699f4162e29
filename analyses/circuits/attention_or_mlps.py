# %% [markdown]
# # Attention or MLPs?
#
# Only attention reads the prefix. MLPs see it through what attention has written. Here the outputs
# of a layer's attention or MLP, at all tokens behind the prefix, are patched between two branches
# that differ in their prefixes, and lex is measured: how much more the target's words are preferred
# in the target's branch.
#
# - denoise: the target's outputs in the other branch; the share of lex that they bring along;
# - noise: the other branch's outputs in the target's; the share of lex that is lost.
#
# "all" patches the outputs of all layers at once.
#
#     python analyses/circuits/attention_or_mlps.py smollm2-135m --task sentiment \
#         --prompts neutral.txt --out FOLDER

# %%
from pathlib import Path

import pandas as pd

from analyses.lab.scripts import ScriptOptions
from lapa2_interp import load_model
from lapa2_interp.circuits import ContrastSet, patch
from lapa2_interp.files import write_text
from lapa2_interp.plots import new_figure, plain_axes
from lapa2_interp.table_formats import as_csv, as_text
from lapa2_interp.tasks.prompts import read_prompts

parser = ScriptOptions("The share of control that attention and MLPs of each layer carry")
parser.add_argument("model", help="a name of `lapa2 models`, a hub id or a folder")
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

# %%
layers = range(model.cfg.n_layers)
slots = ("prompt", "last", "generated")
sets = {str(layer): [(layer, slot) for slot in slots] for layer in layers}
sets["all"] = [(layer, slot) for layer in layers for slot in slots]
nodes = {"attn_out": "attention", "mlp_out": "MLPs"}
frames = []
for node, name in nodes.items():
    patching = patch(model, asked, node, direction="both", together=sets)
    frames.append(patching.frame().assign(output=name, prompts=asked.n_prompts))
table = pd.concat(frames, ignore_index=True).rename(columns={"name": "layer"})
order = ["all", *map(str, layers)]
table = table.sort_values(
    ["output", "direction", "layer"],
    key=lambda column: column.map(order.index) if column.name == "layer" else column,
)[["output", "direction", "layer", "share", "share_low", "share_high", "prompts"]]
print(as_text(table, ".3f"))
write_text(options.out / "attention_or_mlps.csv", as_csv(table))

# %%
figure = new_figure(6.4, 2.6)
for axes, name in zip(figure.subplots(1, 2, sharey=True), nodes.values(), strict=True):
    for direction, colour in (("denoise", "#0072B2"), ("noise", "#D55E00")):
        part = table[(table["output"] == name) & (table["direction"] == direction)]
        together, part = part[part["layer"] == "all"].iloc[0], part[part["layer"] != "all"]
        label = f"{direction} (all layers: {100 * together['share']:.0f} %)"
        x = part["layer"].astype(int)
        axes.plot(x, 100 * part["share"], color=colour, marker="o", ms=2, lw=1, label=label)
        low, high = 100 * part["share_low"], 100 * part["share_high"]
        axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
    axes.axhline(0, color="0.7", lw=0.6)
    axes.legend(fontsize=7, frameon=False)
    axes.set_title(f"outputs of {name}", fontsize=8)
    plain_axes(axes, "layer", "share of lex, %")
figure.savefig(options.out / "attention_or_mlps.png")
