# %% [markdown]
# # Do tasks share the heads that steer?
#
# Cards of several tasks, each chosen on prompts of its own, are compared: how many heads do they
# share, and does the bias in the heads of one task control another? The same texts are read with
# the bias in different sets of heads. Beside each set stand random sets of the same size: one kind
# has as many heads in each layer, the other as much attention on the prefix. Last, what the shared
# heads do without any prefix: attention to the token before, to the token after an earlier copy
# (induction), and to BOS; and what they write for the logits directly, from the prefix.
#
#     lapa2 select smollm2-135m --task sentiment --score slope --heads 24 --out sentiment.json
#     lapa2 select smollm2-135m --task topic --score slope --heads 24 --out topic.json
#     python analyses/shared_heads/analyse.py sentiment.json topic.json --prompts neutral.txt \
#         --out FOLDER

# %%
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analyses.lab.scripts import ScriptOptions
from lapa2_interp import Augmentation, Selection, load_model
from lapa2_interp.circuits import ContrastSet, control_score, head_logit_attribution
from lapa2_interp.circuits.prefix_attention import prefix_attention_by_head
from lapa2_interp.circuits.selection import random_heads
from lapa2_interp.circuits.units import all_heads
from lapa2_interp.errors import CircuitError
from lapa2_interp.files import write_text
from lapa2_interp.methods import load_task
from lapa2_interp.progress import hidden_bar, progress_bar
from lapa2_interp.stats import mean_interval
from lapa2_interp.table_formats import as_csv, as_text
from lapa2_interp.tasks.prompts import read_prompts
from lapa2_interp.tasks.task import Attribute, Prompts, Task

parser = ScriptOptions("Heads that cards of several tasks share, and their transfer")
parser.add_argument("cards", nargs="+", type=Path, help="cards of `lapa2 select`, one a task")
parser.add_argument("--prompts", type=Path, required=True, help="prompts that chose no card")
parser.add_argument("--n", type=int, default=48, help="prompts that are read")
parser.add_argument("--tokens", type=int, default=32, help="tokens of a text")
parser.add_argument("--alpha", type=float, default=0.8, help="strength of the bias")
parser.add_argument("--random", type=int, default=10, help="random sets of each kind")
parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
options = parser.parse_args()
cards = [Selection.load(file) for file in options.cards]
model = load_model(cards[0].model)
for card in cards:
    card.check(model)
every = all_heads(model)
prompts = read_prompts(options.prompts)[: options.n]
if used := set(prompts) & {prompt for card in cards for prompt in card.prompts}:
    raise CircuitError(f"the prompt {min(used)!r} chose a card; give --prompts others")

# %% [markdown]
# ## Overlap
#
# By chance means: the second card's heads are random, as many in each layer.

# %%
names = ["/".join(card.task) for card in cards]
rows = []
for (one, first), (two, second) in product(zip(names, cards, strict=True), repeat=2):
    if one < two:
        common = set(first.heads) & set(second.heads)
        per_layer = [
            sum(head[0] == layer for head in first.heads)
            * sum(head[0] == layer for head in second.heads)
            / model.cfg.n_heads
            for layer in range(model.cfg.n_layers)
        ]
        rows.append(
            {"first": one, "second": two, "heads": len(first.heads), "shared": len(common)}
            | {"by chance": len(first.heads) * len(second.heads) / len(every)}
            | {"by chance, layers kept": sum(per_layer)}
            | {"which": " ".join(f"{layer}.{head}" for layer, head in sorted(common))}
        )
overlap = pd.DataFrame(rows)
print(overlap.to_string(index=False))
write_text(options.out / "overlap.csv", as_csv(overlap))

# %% [markdown]
# ## Transfer
#
# Control is js between the branches of a task, in nats, on texts without a prefix; lex says how
# much more each branch favours its own attribute's words. A gain is what the bias changes.


# %%
def other_wording(task: Task, form: str) -> Task:
    """The task with prefixes of another form."""
    attributes = {name: Attribute(prefix=form.format(name)) for name in task.attributes}
    return task.model_copy(update={"attributes": attributes})


def of_prefixes(name: str, **prefixes: str) -> Task:
    """A task of its own."""
    attributes = {attribute: Attribute(prefix=prefix) for attribute, prefix in prefixes.items()}
    return Task(
        name=name,
        length_counts_prompt=True,
        attributes=attributes,
        prompts=Prompts(texts=tuple(prompts)),
    )


sentiment, topic = load_task("sentiment"), load_task("topic")
TASKS = {
    "sentiment": sentiment,
    "sentiment, 'Extremely ...:'": other_wording(sentiment, "Extremely {}:"),
    "topic": topic,
    "topic, 'About {}:'": other_wording(topic, "About {}:"),
    "toxicity": of_prefixes("toxicity", polite="Very polite:", toxic="Very toxic:"),
    "formality": of_prefixes("formality", formal="Very formal:", casual="Very casual:"),
}
shared = set.intersection(*(set(card.heads) for card in cards))
sets = dict(zip(names, (card.heads for card in cards), strict=True))
sets["shared"] = tuple(sorted(shared))
for name, card in zip(names, cards, strict=True):
    sets[f"{name} alone"] = tuple(head for head in card.heads if head not in shared)
sets["all heads"] = every
attention = prefix_attention_by_head(model, ContrastSet.of(model, sentiment, prompts=prompts[:8]))


def same_attention(heads: tuple, seed: int) -> tuple:
    """As many other heads with nearly the same attention on the prefix: of the five that are
    nearest to each, one at random."""
    rng, drawn = np.random.default_rng(seed), []
    for head in heads:
        free = [
            candidate for candidate in every if candidate not in heads and candidate not in drawn
        ]
        free.sort(key=lambda candidate: abs(attention[candidate] - attention[head]))
        drawn.append(free[int(rng.integers(min(5, len(free))))])
    return tuple(drawn)


def gains(contrast_set: ContrastSet, heads: tuple, plain: dict) -> dict[str, np.ndarray]:
    """The gain of each metric by prompt."""
    bias = Augmentation(alpha=options.alpha, heads=heads if len(heads) < len(every) else "all")
    score = control_score(
        model, contrast_set, metrics=list(plain), augmentation=bias, progress=hidden_bar()
    ).values
    return {name: np.nanmean(score[name], axis=1) - plain[name] for name in plain}


rows = []
for task_name, task in TASKS.items():
    try:
        contrast_set = ContrastSet.of(model, task, prompts=prompts, tokens=options.tokens)
    except CircuitError as error:
        print(f"{task_name} is left out: {error}", file=sys.stderr)
        continue
    metrics = [name for name in ("js", "lex") if name in contrast_set.metrics]
    values = control_score(model, contrast_set, metrics=metrics).values
    plain = {name: np.nanmean(values[name], axis=1) for name in metrics}
    all_kinds = {}
    for set_name, heads in sets.items():
        kinds = {"": [heads]}
        if set_name in (*names, "shared"):
            matched = [random_heads(heads, every, seed) for seed in range(options.random)]
            alike = [same_attention(heads, seed) for seed in range(options.random)]
            kinds |= {"random, same layers": matched, "random, same attention": alike}
        all_kinds |= {(set_name, kind): of_kind for kind, of_kind in kinds.items()}
    with progress_bar(sum(map(len, all_kinds.values())), task_name, "set") as bar:
        for (set_name, kind), of_kind in all_kinds.items():
            scores = []
            for set_of_heads in of_kind:
                scores.append(gains(contrast_set, set_of_heads, plain))
                bar.update()
            for metric in metrics:
                by_prompt = np.mean([score[metric] for score in scores], axis=0)
                interval = mean_interval(by_prompt, np.array(contrast_set.clusters))
                rows.append(
                    {"task": task_name, "heads": set_name, "kind": kind, "n heads": len(of_kind[0])}
                    | {"attention": float(np.mean([attention[h] for s in of_kind for h in s]))}
                    | {"metric": metric, "without bias": float(plain[metric].mean())}
                    | {"gain": interval.mean, "low": interval.low, "high": interval.high}
                    | {"best set": max(float(score[metric].mean()) for score in scores)}
                    | {"prompts": interval.clusters}
                )
    write_text(options.out / "transfer.csv", as_csv(pd.DataFrame(rows)))
transfer = pd.DataFrame(rows)
shown = transfer[transfer["metric"] == "js"].assign(
    name=transfer["heads"] + transfer["kind"].map(lambda kind: f" ({kind})" if kind else "")
)
print(as_text(shown.pivot(index="name", columns="task", values="gain").reset_index(), ".4f"))

# %% [markdown]
# ## What else the heads do
#
# On 16 sequences of 40 random tokens, said twice: attention of the second half to the token before,
# and to the token after the same one in the first half; and to BOS. Direct effects are in logits a
# step, on the texts above: what a head writes from the prefix for the attribute's words, in the
# target's branch minus the others.

# %%
generator = torch.Generator().manual_seed(0)
half = torch.randint(1000, model.cfg.d_vocab, (16, 40), generator=generator)
start = torch.full((16, 1), model.tokenizer.bos_token_id)
ids = torch.cat([start, half, half], dim=1)
queries = torch.arange(41, 81)
behaviour = {
    name: np.zeros((model.cfg.n_layers, model.cfg.n_heads))
    for name in ("before", "induction", "bos")
}
with progress_bar(model.cfg.n_layers, "patterns", "layer") as bar, torch.no_grad():
    _, cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"))
    for layer in range(model.cfg.n_layers):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][:, :, queries].float()
        for name, keys in (("before", queries - 1), ("induction", queries - 39)):
            picked = pattern.gather(3, keys[None, None, :, None].expand(*pattern.shape[:3], 1))
            behaviour[name][layer] = picked.mean(dim=(0, 2, 3)).numpy()
        behaviour["bos"][layer] = pattern[..., 0].mean(dim=(0, 2)).numpy()
        bar.update()
for task in (sentiment, topic):
    try:
        written = head_logit_attribution(
            model, ContrastSet.of(model, task, prompts=prompts, tokens=options.tokens)
        )
    except CircuitError as error:
        print(f"direct effects are left out: {error}", file=sys.stderr)
        break
    behaviour[f"direct, {task.name}"] = written.table().means.reshape(model.cfg.n_layers, -1)
rows = []
for set_name, heads in sets.items():
    row = {"heads": set_name, "n heads": len(heads)}
    row["prefix"] = float(np.mean([attention[head] for head in heads]))
    rows.append(row | {n: float(np.mean([m[h] for h in heads])) for n, m in behaviour.items()})
others = pd.DataFrame(rows)
print(as_text(others, ".3f"))
write_text(options.out / "behaviour.csv", as_csv(others))
by_head = pd.DataFrame(
    [
        {
            "layer": layer,
            "head": head,
            "shared": (layer, head) in shared,
            "prefix": attention[layer, head],
        }
        | {name: (layer, head) in heads for name, heads in sets.items() if name in names}
        | {name: grid[layer, head] for name, grid in behaviour.items()}
        for layer, head in every
    ]
)
write_text(options.out / "heads.csv", as_csv(by_head))
