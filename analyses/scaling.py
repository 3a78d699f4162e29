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
# # Table scaling: which law should the bias follow?
#
# log (LaPA2), linear, sqrt and constant (frozen at l0 = 128) at the method's alpha. The paper: linear and sqrt destroy
# fluency, constant cannot adapt, log has the best trade-off.
#
#     python analyses/scaling.py results/quick

# %%
from lapa2_interp.experiments.items import open_bench, paper_number

bench = open_bench("scaling", "The law of the bias: log, linear, sqrt, constant")
cells = bench.cells
longest = int(cells["max_length"].max())
scores = bench.scores(cells)
names = {"baseline": "none"} | {
    arm: law for arm, law in cells.drop_duplicates("arm").set_index("arm")["law"].items() if law
}
table = bench.table(scores, cells, names)

# %%
for (task, method), group in cells.groupby(["task", "method"], sort=False):
    arms = {law or "none": arm for law, arm in group.drop_duplicates("law").set_index("law")["arm"].items()}
    metric = "tox" if task == "detox" else "acc"
    sides = {law: {"task": task, "method": method, "arm": arm} for law, arm in arms.items()}

    def gap(one: str, two: str, measure: str, task: str = task, method: str = method) -> float:
        """The paper's difference between two laws."""
        known = [paper_number("scaling", task=task, method=method, variant=law, metric=measure) for law in (one, two)]
        return known[1] - known[0]

    better = "less" if metric == "tox" else "more"
    bench.claim(
        f"log controls better than no augmentation: {method}", scores, sides["none"], sides["log"], metric, better,
        gap("none", "log", metric),
    )  # fmt: skip
    for law in ("linear", "sqrt", "constant"):
        for measure in (metric, "ppl"):
            found = gap("log", law, measure)
            direction = "more" if found > 0 else "less"
            bench.claim(
                f"{law} has {direction} {measure} than log: {method}",
                scores,
                sides["log"],
                sides[law],
                measure,
                direction,
                found,
            )

# %%
bench.write(table)
