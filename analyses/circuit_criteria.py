# %% [markdown]
# # Are the chosen heads a circuit?
#
# F(S) is lex, the preference for the attribute's words, where only the heads S see the prefix (or
# js, the effect on the next token, `--metric js`); M is all heads, C those of a card of `lapa2
# select`. On prompts that chose no head:
#
# - faithfulness: F(C) / F(M), for the best n heads, from none to all, and the area between this
#   curve and 1;
# - completeness: the largest |F(C without K) - F(M without K)| over subsets K of C, at random and
#   by greedy search: large if other heads take over what C does;
# - minimality: for each head of C, the largest |F(C without K) - F(C without K and it)| over
#   random K: small if the head adds nothing.
#
# The K of the largest value is found on one half of the prompts and judged on the other; with
# `--further N` completeness is judged on N prompts more instead.
#
#     lapa2 select smollm2-135m --task sentiment --score slope --heads 24 --out sentiment.json
#     python analyses/circuit_criteria.py sentiment.json --task sentiment --prompts neutral.txt \
#         --out FOLDER

# %%
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from lapa2_interp import Selection, load_model
from lapa2_interp._util.errors import CircuitError
from lapa2_interp._util.files import write_text
from lapa2_interp._util.plots import new_figure, plain_axes
from lapa2_interp._util.table_formats import as_csv, as_text
from lapa2_interp.circuits import ContrastSet, attribution, knock_out
from lapa2_interp.circuits.statistics import share_interval
from lapa2_interp.circuits.units import Unit, all_heads
from lapa2_interp.paper.scripts import ScriptOptions
from lapa2_interp.tasks.prompts import read_prompts

parser = ScriptOptions("Faithfulness, completeness and minimality of chosen heads")
parser.add_argument("card", type=Path, help="a card of `lapa2 select`")
parser.add_argument("--task", required=True, help="a built-in task, or a task file")
parser.add_argument("--prompts", type=Path, required=True, help="prompts that chose no head")
parser.add_argument("--n", type=int, default=32, help="prompts that are read")
parser.add_argument("--further", type=int, default=0, help="prompts that judge completeness")
parser.add_argument("--metric", choices=("lex", "js"), default="lex", help="what F is")
parser.add_argument("--tokens", type=int, default=32, help="tokens of a text")
parser.add_argument("--random", type=int, default=20, help="random subsets K; orders: a quarter")
parser.add_argument("--greedy", type=int, default=8, help="heads of the greedy K")
parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
options = parser.parse_args()
card = Selection.load(options.card)
model = load_model(card.model)
card.check(model)
prompts = read_prompts(options.prompts)[: options.n + options.further]
if used := set(prompts) & set(card.prompts):
    raise CircuitError(f"the prompt {min(used)!r} chose the card; give --prompts others")
every, chosen = all_heads(model), card.heads
asked = ContrastSet.of(model, options.task, prompts=prompts[: options.n], tokens=options.tokens)
if options.metric not in asked.metrics:
    raise CircuitError(f"task {options.task} has no words for lex; give --metric js")
rng = np.random.default_rng(0)


def control(contrast_set: ContrastSet, sets: list) -> np.ndarray:
    """F of each set, by prompt: [set, prompt]."""
    units = [
        Unit({"name": str(i)}, tuple(head for head in every if head not in set(heads)))
        for i, heads in enumerate(sets)
    ]
    hidden = [unit for unit in units if unit.heads]
    table = knock_out(model, contrast_set, units=hidden, metric=options.metric, other_metrics=())
    left = iter((table.total[:, None] - table.values).T)
    return np.array(
        [contrast_set.by_prompt(next(left) if unit.heads else table.total) for unit in units]
    )


def halves() -> tuple[ContrastSet, ContrastSet]:
    """The texts of every other prompt, to find a set on, and the others, to judge it."""
    names = list(dict.fromkeys(asked.clusters))
    return tuple(
        replace(
            asked,
            examples=tuple(
                example
                for example, cluster in zip(asked.examples, asked.clusters, strict=True)
                if names.index(cluster) % 2 == i
            ),
        )
        for i in (0, 1)
    )


def without(heads: tuple, *left_out: tuple) -> tuple:
    """Heads without others."""
    return tuple(head for head in heads if head not in left_out)


# %% [markdown]
# ## Faithfulness
#
# The order is that of the slopes on the card's prompts.

# %%
sizes = [n for n in (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192) if n < len(every)]
sizes.append(len(every))
of_card = ContrastSet.of(model, options.task, prompts=card.prompts, tokens=options.tokens)
slopes = attribution(model, of_card, metric=card.metric).table("slope")
orders = {"by slope": [slopes.best(len(every))]}
orders["random"] = [
    tuple(every[i] for i in rng.permutation(len(every))) for _ in range(max(1, options.random // 4))
]
rows, areas = [], {}
for kind, of_kind in orders.items():
    # order size prompt
    controls = np.array([control(asked, [order[:n] for n in sizes]) for order in of_kind])
    everything = controls[0, -1]
    for n, by_prompt in zip(sizes, controls.mean(0), strict=True):
        share, low, high = share_interval(by_prompt[:, None], everything)
        rows.append(
            {"order": kind, "heads": n, options.metric: by_prompt.mean(), "share": share[0]}
            | {"low": low[0], "high": high[0], "prompts": len(by_prompt)}
        )
    gap = np.abs(controls.mean(2) / everything.mean() - 1)  # order size
    areas[kind] = float(np.trapezoid(gap, np.array(sizes) / len(every), axis=1).mean())
faithfulness = pd.DataFrame(rows).assign(area=lambda table: table["order"].map(areas))
print(as_text(faithfulness, ".3f"))
write_text(options.out / "faithfulness.csv", as_csv(faithfulness))
figure = new_figure(3.6, 2.8)
axes = figure.subplots()
for colour, (kind, part) in zip(
    ("#0072B2", "#777777"), faithfulness.groupby("order", sort=False), strict=True
):
    label = f"{kind}, area {areas[kind]:.2f}"
    axes.plot(part["heads"], part["share"], color=colour, marker="o", ms=3, label=label)
    axes.fill_between(part["heads"], part["low"], part["high"], color=colour, alpha=0.15, lw=0)
axes.axhline(1, color="0.7", lw=0.6)
axes.set_xscale("symlog", base=2, linthresh=1)
axes.set_xlim(0, 1.1 * len(every))
ticks = [n for n in sizes if n in (0, 1, 2, 4, 8, 16, 32, 64, len(every))]
axes.set_xticks(ticks, [str(n) for n in ticks])
axes.minorticks_off()
figure.legend(loc="outside upper left", fontsize=8, frameon=False)
plain_axes(axes, "heads that see the prefix", f"F(C) / F(M), {options.metric}")
figure.savefig(options.out / "faithfulness.png")

# %% [markdown]
# ## Completeness

# %%
finding, judging = halves()
drawn = [
    tuple(
        head for head, picked in zip(chosen, rng.random(len(chosen)) < 0.5, strict=True) if picked
    )
    for _ in range(options.random)
]


def gaps(contrast_set: ContrastSet, subsets: list) -> np.ndarray:
    """F(C without K) - F(M without K) of each K, by prompt: [K, prompt]."""
    controls = control(
        contrast_set,
        [without(heads, *subset) for heads in (chosen, every) for subset in subsets],
    )
    return controls[: len(subsets)] - controls[len(subsets) :]


greedy: tuple = ()
for _ in range(min(options.greedy, len(chosen))):
    candidates = [(*greedy, head) for head in chosen if head not in greedy]
    mean_gaps = np.abs(gaps(finding, candidates).mean(1))
    greedy = candidates[int(mean_gaps.argmax())]
mean_gaps = np.abs(gaps(finding, drawn).mean(1))
kinds = {"none": (), "greedy": greedy, "worst of random": drawn[int(mean_gaps.argmax())]}
further = judging
if options.further:
    beyond = prompts[options.n :]
    further = ContrastSet.of(model, options.task, prompts=beyond, tokens=options.tokens)
judged = gaps(further, list(kinds.values()))
everything, _ = control(further, [every, ()])
rows = []
for (kind, subset), by_prompt in zip(kinds.items(), judged, strict=True):
    share, low, high = share_interval(by_prompt[:, None], everything)
    rows.append(
        {"K": kind, "heads": len(subset), "gap": by_prompt.mean(), "share": share[0]}
        | {"low": low[0], "high": high[0], "prompts": len(by_prompt)}
        | {"which": " ".join(f"{layer}.{head}" for layer, head in subset)}
    )
completeness = pd.DataFrame(rows)
print(as_text(completeness, ".3f"))
write_text(options.out / "completeness.csv", as_csv(completeness))

# %% [markdown]
# ## Minimality

# %%
everything, _ = control(judging, [every, ()])
subsets = [(), *drawn]
pairs = [(k, head) for k, subset in enumerate(subsets) for head in chosen if head not in subset]
sets = [without(chosen, *subset) for subset in subsets]
sets += [without(chosen, *subsets[k], head) for k, head in pairs]
lost = {}
for name, contrast_set in (("finding", finding), ("judging", judging)):
    controls = control(contrast_set, sets)
    of_subset, of_pair = controls[: len(subsets)], controls[len(subsets) :]
    lost[name] = np.array([of_subset[k] - one for (k, _), one in zip(pairs, of_pair, strict=True)])
rows = []
for head in chosen:
    own = [i for i, (_, pair_head) in enumerate(pairs) if pair_head == head]
    most = max(own, key=lambda i: abs(lost["finding"][i].mean()))
    share, low, high = share_interval(lost["judging"][most][:, None], everything)
    rows.append(
        {"layer": head[0], "head": head[1], "K": len(subsets[pairs[most][0]])}
        | {"share": share[0], "low": low[0], "high": high[0], "prompts": len(everything)}
    )
minimality = pd.DataFrame(rows)
print(as_text(minimality, ".3f"))
write_text(options.out / "minimality.csv", as_csv(minimality))
