# %% [markdown]
# # Case studies: the same random stream with and without LaPA2
#
# The paper shows hand-picked texts. Here a rule picks: of all pairs of texts of one prompt and
# sample number, that whose change in the classifier's probability of the attribute (or in toxicity)
# is the median of its method and task. So what is shown is the usual case, not the best one. At 64
# tokens, as in the paper.
#
#     python analyses/paper/cases.py results/quick

# %%
import pandas as pd

from analyses.lab.items import open_item

item = open_item(
    "cases",
    "Case studies: the pair of texts at the median of LaPA2's change",
    "sent_topic",
    "detox",
)
LENGTH, TARGETS = 64, {"sentiment": "positive", "topic": "world", "detox": "nontoxic"}
cells = item.cells
cells = cells[(cells["state"] == "finished") & ~cells["method"].isin(["freectrl", "datg"])]
cells = cells[cells["attribute"] == cells["task"].map(TARGETS)]

# %%
rows = []
for where, _, group in item.data.groups(cells):
    task = where["task"]
    if set(group["arm"]) == {"baseline"} or "baseline" not in set(group["arm"]):
        continue
    length = min(LENGTH, int(group["max_length"].min()))
    texts = item.data.texts(group, (length,)).query("length == @length")
    metric = "toxicity" if task == "detox" else "accuracy"
    numbers = item.data.scorer_numbers(group, texts, metric)
    value = numbers["toxicity" if task == "detox" else TARGETS[task]]
    both = texts.assign(value=value.to_numpy()).pivot_table(
        index=["prompt", "sample"],
        columns="arm",
        values=["text", "value"],
        aggfunc="first",
        sort=False,
    )
    arm = next(name for name in both["value"].columns if name != "baseline")
    change = (both["value"][arm] - both["value"]["baseline"]).dropna()
    if change.empty:
        continue
    at = change.sort_values(kind="stable").index[(len(change) - 1) // 2]
    for name in ("baseline", arm):
        rows.append(
            {**where, "attribute": TARGETS[task], "arm": name, "prompt": at[0], "sample": at[1]}
            | {"value": both["value"][name][at], "median change": change.median()}
            | {"pairs": len(change), "text": both["text"][name][at]}
        )
columns = ["model", "task", "attribute", "method", "variant", "arm", "prompt", "sample"]
columns += ["value", "median change", "pairs", "text"]
table = pd.DataFrame(rows, columns=columns)

# %%
shown = table.assign(
    value=[f"{x:.2f}" for x in table["value"]],
    text=table["text"].astype(str).str.replace("\n", " ⏎ "),
)
variant = ["variant"] if table["variant"].nunique() > 1 else []
item.write(
    table,
    [
        "value: P(attribute) by the first scorer of accuracy, toxicity on detox. The texts are a"
        f" model's, unedited, of at most {LENGTH} tokens."
    ],
    shown[["model", "task", "method", *variant, "arm", "prompt", "sample", "value", "text"]],
)
