# %% [markdown]
# # Table scaling: which law should the bias follow?
#
# log (LaPA2), linear, sqrt and constant (frozen at l0 = 128) at the method's alpha. The paper:
# linear and sqrt destroy fluency, constant cannot adapt, log has the best trade-off.
#
#     python analyses/paper/scaling.py results/quick

# %%
from analyses.lab.items import open_item
from analyses.lab.reported import paper_number

item = open_item("scaling", "The law of the bias: log, linear, sqrt, constant")
cells = item.cells
scores = item.data.scores(cells)
names = {"baseline": "none"} | {
    arm: law for arm, law in cells.drop_duplicates("arm").set_index("arm")["law"].items() if law
}
table = item.table(scores, cells, names)

# %%
for where, words, group in item.data.groups(cells):
    control = "tox" if where["task"] == "detox" else "acc"
    arms = {law or "none": arm for law, arm in zip(group["law"], group["arm"], strict=True)}
    sides = {law: where | {"arm": arm} for law, arm in arms.items()}
    for one, two, metric in [("none", "log", control)] + [
        ("log", law, metric)
        for law in ("linear", "sqrt", "constant")
        for metric in (control, "ppl")
    ]:
        at = {
            "table": "scaling",
            "task": where["task"],
            "method": where["method"],
            "metric": metric,
        }
        known = [paper_number(**at, variant=law) for law in (one, two)]
        if one in sides and two in sides:
            item.add_reported_claim(
                f"{two} has {{more}} {metric} than {one}: {words}",
                scores,
                sides[one],
                sides[two],
                metric,
                known,
            )

# %%
item.write(table)
