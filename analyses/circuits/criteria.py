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
# `--further N` completeness is judged on N prompts more instead. There the heads that oppose the
# prefix most, as many as C has, are added to C and taken from M: do they explain why some heads
# give more than all do?
#
#     lapa2 select smollm2-135m --task sentiment --score slope --heads 24 --out sentiment.json
#     python analyses/circuits/criteria.py sentiment.json --task sentiment --prompts neutral.txt \
#         --out FOLDER
#     python analyses/circuits/draw_criteria.py FOLDER       # the criteria with tests, and a figure

# %%
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.lab.scripts import ScriptOptions
from analyses.rivals.analyse import digits
from lapa2_interp import Selection, load_model
from lapa2_interp.circuits import ContrastSet, attribution, knock_out
from lapa2_interp.circuits.statistics import max_t, share_interval
from lapa2_interp.circuits.units import Unit, all_heads
from lapa2_interp.errors import CircuitError
from lapa2_interp.files import write_json, write_text
from lapa2_interp.table_formats import as_csv, as_text
from lapa2_interp.tasks.prompts import read_prompts

parser = ScriptOptions("Faithfulness, completeness and minimality of chosen heads")
parser.add_argument("card", type=Path, help="a card of `lapa2 select`")
parser.add_argument("--task", required=True, help="a built-in task, or a task file")
parser.add_argument("--prefixes", default="hard", help="hard, or a soft set such as mle")
parser.add_argument("--prompts", type=Path, required=True, help="prompts that chose no head")
parser.add_argument("--n", type=int, default=32, help="prompts that are read")
parser.add_argument("--further", type=int, default=0, help="prompts that judge completeness")
parser.add_argument("--metric", choices=("lex", "js"), default="lex", help="what F is")
parser.add_argument("--tokens", type=int, default=32, help="tokens of a text")
parser.add_argument("--random", type=int, default=20, help="random subsets K; orders: a quarter")
parser.add_argument("--greedy", type=int, default=8, help="heads of the largest greedy K")
parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
options = parser.parse_args()
card = Selection.load(options.card)
model = load_model(card.model)
prompts = read_prompts(options.prompts)[: options.n + options.further]
if used := set(prompts) & set(card.prompts):
    raise CircuitError(f"the prompt {min(used)!r} chose the card; give --prompts others")
every, chosen = all_heads(model), card.heads
text_settings = {"prefixes": options.prefixes, "tokens": options.tokens}
asked = ContrastSet.of(model, options.task, prompts=prompts[: options.n], **text_settings)
card.check(model, asked)
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
of_card = ContrastSet.of(model, options.task, prompts=card.prompts, **text_settings)
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


greedy, grown, largest = (), (), 0.0
for _ in range(min(options.greedy, len(chosen))):
    candidates = [(*grown, head) for head in chosen if head not in grown]
    mean_gaps = np.abs(gaps(finding, candidates).mean(1))
    grown = candidates[int(mean_gaps.argmax())]
    if mean_gaps.max() > largest:
        greedy, largest = grown, mean_gaps.max()
mean_gaps = np.abs(gaps(finding, drawn).mean(1))
further = judging
if options.further:
    further = ContrastSet.of(model, options.task, prompts=prompts[options.n :], **text_settings)
opposing = slopes.best(len(every))[::-1][: len(chosen)]
sets = {"all": every, "chosen": chosen}
for kind, subset in {"greedy": greedy, "random": drawn[int(mean_gaps.argmax())]}.items():
    sets |= {f"all without {kind}": without(every, *subset)}
    sets |= {f"chosen without {kind}": without(chosen, *subset)}
sets |= {"all without opposing": without(every, *opposing)}
sets |= {"chosen and opposing": tuple(dict.fromkeys((*chosen, *opposing)))}
controls = pd.DataFrame(dict(zip(sets, control(further, list(sets.values())), strict=True)))
names = dict(zip(reversed(further.clusters), reversed(further.prompts), strict=True))
controls.insert(0, "prompt", [digits(names[one]) for one in dict.fromkeys(further.clusters)])
print(as_text(controls.drop(columns="prompt").mean().to_frame(options.metric).T, ".4f"))
write_text(options.out / "controls.csv", as_csv(controls, 7))
left_out = {
    name: " ".join(f"{layer}.{head}" for layer, head in every if (layer, head) not in heads)
    for name, heads in sets.items()
}
write_json(options.out / "left-out.json", left_out)

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
    p = max_t(lost["judging"][most][:, None]).p[0]
    rows.append(
        {"layer": head[0], "head": head[1], "K": len(subsets[pairs[most][0]])}
        | {"share": share[0], "low": low[0], "high": high[0], "p": p, "prompts": len(everything)}
    )
minimality = pd.DataFrame(rows)
print(as_text(minimality, ".3f"))
write_text(options.out / "minimality.csv", as_csv(minimality))
