# %% [markdown]
# # Table prefix_types: what stands in front of the prompt
#
# Read off the manifests of the run's cells: every branch of every method, its text or soft prefix.
#
#     python analyses/paper/prefix_types.py results/quick

# %%
import pandas as pd

from analyses.lab.items import open_item

item = open_item("prefix_types", "Prefixes used by the run's methods")
cells = item.run.cells
rows = []
for key in cells[cells["state"] == "finished"]["key"]:
    cell, manifest = item.run.by_key[key], item.run.manifest(key)
    if cell.augmentation is not None:
        for branch, prefix in manifest.branches.items():
            kind = "none" if prefix is None else "hard" if isinstance(prefix, str) else "soft"
            where = (cell.model, cell.task.name, cell.method, cell.attribute)
            rows.append([*where, branch, kind, "(none)" if prefix is None else str(prefix)])
columns = ["model", "task", "method", "attribute", "branch", "type", "prefix"]
table = pd.DataFrame(rows, columns=columns).drop_duplicates(ignore_index=True)

# %%
item.write(table, formatted=table.assign(prefix=table["prefix"].str.replace("\n", "\\n")))
