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
# # Is a steered text fluent for another model, too?
#
# Not in the paper. Perplexity by the model that wrote the texts favours whatever sharpens this
# model. Here the texts of `lapa2 steer` are read by several models. Tokenizers differ, so the unit
# is bits per character: -log2 P(text) over its number of characters. Beside it is the ratio of
# perplexities to "no bias" by the same judge, paired on prompts: exp of the difference of mean NLL.
#
#     python analyses/cross_judge.py STEERED... --judges smollm2-135m FOLDER --out FILE.csv

# %%
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from lapa2_interp import Selection
from lapa2_interp._util.files import write_text
from lapa2_interp._util.table_formats import as_csv
from lapa2_interp.paper.scripts import ScriptOptions, print_error
from lapa2_interp.report.steer import CARD
from lapa2_interp.report.steer_result import ALL, CHOSEN, NO_BIAS, ORDER, PREFIX, RANDOM
from lapa2_interp.runs.run import load_run
from lapa2_interp.scoring.scorer import TextItem
from lapa2_interp.scoring.transformer import Perplexity
from lapa2_interp.stats import mean_interval

sys.excepthook = print_error
parser = ScriptOptions("Fluency of steered texts by several models")
parser.add_argument("folders", nargs="+", type=Path, help="results of `lapa2 steer`")
parser.add_argument("--judges", nargs="+", required=True, help="names or folders of models")
parser.add_argument("--n", type=int, default=60, help="prompts that are read")
parser.add_argument("--out", type=Path, required=True, help="the table, .csv")
options = parser.parse_args()


def steered_texts(folder: Path) -> pd.DataFrame:
    """The judged texts of the first prompts, with their arms."""
    run, heads = load_run(folder / "judge"), Selection.load(folder / CARD).heads
    samples, arms = run.samples(), {}
    several = len({cell.method for cell in run.by_key.values()}) > 1
    for key, cell in run.by_key.items():
        bias = next(iter(cell.active_augmentations), None)
        if bias is None:
            arms[key] = PREFIX if several and cell.method == "prefix" else NO_BIAS
        else:
            arms[key] = {"all": ALL, heads: CHOSEN}.get(bias.heads, RANDOM)
    of_first = samples["prompt"].isin(sorted(samples["prompt"].unique())[: options.n])
    return samples.assign(arm=samples["cell"].map(arms), model=cell.model)[of_first]


def bits(judge: Perplexity, texts: pd.Series) -> pd.DataFrame:
    """-log2 P and mean NLL of each text; NaN where it cannot be read."""
    scores = judge.score([TextItem(text) for text in texts])
    nll = np.log([score[0] if isinstance(score, tuple) else np.nan for score in scores])
    tokens = [len(judge.tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    return pd.DataFrame({"nll": nll, "bits": nll * tokens / np.log(2)}, index=texts.index)


# %%
rows = []
texts = pd.concat([steered_texts(folder) for folder in options.folders], ignore_index=True)
for name in options.judges:
    judge = Perplexity(name)
    read = texts.join(bits(judge, texts["text"])).dropna(subset="nll")
    judge.close()
    read["per_character"] = read["bits"] / read["text"].str.len()
    for model, of_model in read.groupby("model", sort=False):
        wide = of_model.pivot_table(index="prompt", columns="arm", values="nll")
        for arm in filter(wide.columns.__contains__, ORDER):
            part = of_model[of_model["arm"] == arm]
            found = mean_interval(part["per_character"].to_numpy(), part["prompt"].to_numpy())
            row = {"writer": Path(model).name, "judge": Path(name).name, "arm": arm}
            row |= {"bits per character": found.mean, "low": found.low, "high": found.high}
            change = (wide[arm] - wide[NO_BIAS]).dropna()
            ratio = mean_interval(change.to_numpy(), change.index.to_numpy())
            row |= {"ratio": np.exp(ratio.mean), "ratio low": np.exp(ratio.low)}
            row |= {"ratio high": np.exp(ratio.high), "texts": found.n, "prompts": found.clusters}
            rows.append(row)
table = pd.DataFrame(rows)
print(table.round(3).to_string(index=False))
write_text(options.out, as_csv(table))
