# %% [markdown]
# # Do other judges see the gains of chosen heads, too?
#
# Not in the paper. The continuations of steered texts, without the prompt and without chat tags,
# are read again.
#
# Control (--train): by naive Bayes on words, trained here on labelled texts; by the classifier
# `linear` with all inflections of the prefixes' words hidden ("scientists" for "science"); and the
# share of texts with such a word. Differences from the chosen heads are paired on prompts.
#
# Fluency (--judges): perplexity by the model that wrote a text favours what sharpens this model,
# and that of a whole text counts the prompt. Here several models read the continuation alone, given
# the prompt. Tokenizers differ, so the unit is bits per character: -log2 P(continuation) over its
# number of characters. Beside it is the ratio of perplexities to "no bias", by the same judge and
# paired on prompts: exp of the mean difference of NLL a token. Texts with a chat tag are left out,
# since only some models know it.
#
#     python analyses/bases/second_opinion.py RUN --card CARD --train imdb sst2 \
#         --judges smollm2-135m gemma --out FOLDER

# %%
import re
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analyses.lab.naive_bayes import CHAT_TAG, continuations, naive_bayes
from analyses.lab.scripts import ScriptOptions
from lapa2_interp import Selection
from lapa2_interp.bias.text_start import named_start
from lapa2_interp.files import write_text
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.load import load_transformers
from lapa2_interp.prefixes.likelihood import TextRows, text_nll
from lapa2_interp.progress import progress_bar
from lapa2_interp.runs.run import load_run
from lapa2_interp.scoring.echo import prefix_words
from lapa2_interp.scoring.linear import load_linear
from lapa2_interp.stats import mean_interval, paired_difference
from lapa2_interp.table_formats import as_csv, as_text

parser = ScriptOptions("Control and fluency of steered continuations by other judges")
parser.add_argument("run", type=Path, help="a run, such as judge/ of `lapa2 steer`")
parser.add_argument("--card", type=Path, required=True, help="the card of the chosen heads")
parser.add_argument("--only", nargs="+", default=[], help="cells with COLUMN=VALUE, of one task")
parser.add_argument("--arms", nargs="+", default=[], help="arms, by default all")
parser.add_argument(
    "--train", nargs="+", default=[], help="labelled texts: imdb, sst2, agnews, files"
)
parser.add_argument("--judges", nargs="+", default=[], help="names or folders of models")
parser.add_argument("--n", type=int, default=60, help="prompts that --judges read")
parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
options = parser.parse_args()
NO_BIAS, ROWS = "no bias", 16
heads = Selection.load(options.card).heads


def arm(cell: Cell) -> str:
    """The place of the bias and its strength."""
    if (bias := next(iter(cell.active_augmentations), None)) is None:
        return NO_BIAS
    where_biased = {"all": "all heads", heads: "chosen heads"}.get(bias.heads, "random heads")
    return f"{where_biased} {bias.alpha:.3g}"


# %%
run = load_run(options.run)
texts = run.texts(**dict(condition.split("=", 1) for condition in options.only))
texts["arm"] = texts["cell"].map({key: arm(cell) for key, cell in run.by_key.items()})
texts = texts[texts["arm"].isin(options.arms or texts["arm"].unique())]
GROUP = ["model", "task", "method", "variant"]

# %% [markdown]
# ## Control

# %%
task = run.by_key[texts["cell"].iloc[0]].task
labels = list(task.attributes)
stems = {word[: max(5, len(word) - 2)] for words in prefix_words(task).values() for word in words}
inflection = re.compile(rf"\b(?:{'|'.join(sorted(stems))})\w*", re.IGNORECASE)

if options.train:
    counts, bayes = naive_bayes(options.train, labels)
    linear, _ = load_linear(task.name)
    read = continuations(texts)
    chosen_by = linear.probabilities([inflection.sub(" ", text) for text in read]).argmax(1)
    wanted = texts["attribute"].to_numpy()
    measures = {
        "naive Bayes": bayes.predict(counts.transform(read)) == wanted,
        "linear, inflections hidden": np.array(linear.labels)[chosen_by] == wanted,
        "has an inflection": np.array([bool(inflection.search(text)) for text in read]),
    }
    rows, changes = [], []
    for where, group in texts.assign(**measures).groupby(GROUP, sort=False):
        setting = dict(zip(GROUP, (Path(where[0]).name, *where[1:]), strict=True))
        by_arm = dict(iter(group.groupby("arm", sort=False)))
        for measure in measures:
            for name, part in by_arm.items():
                interval = mean_interval(100.0 * part[measure], part["prompt"])
                row = {**setting, "measure": measure, "arm": name}
                rows.append(row | interval.columns | {"texts": interval.n})
            for name, reference in product(by_arm, by_arm):
                if name.startswith("chosen") and not reference.startswith("chosen"):
                    before, after = by_arm[reference], by_arm[name]
                    change = paired_difference(
                        100.0 * before[measure], before["prompt"],
                        100.0 * after[measure], after["prompt"],
                        kinds=(before["attribute"], after["attribute"]),
                    )  # fmt: skip
                    row = {**setting, "measure": measure, "arm": name, "against": reference}
                    row |= {"difference": change.mean, "low": change.low, "high": change.high}
                    changes.append(row | {"p": change.p, "prompts": change.clusters})
    for name, numbers in (("control", rows), ("changes", changes)):
        print(as_text(pd.DataFrame(numbers), ".3f"))
        write_text(options.out / f"{name}.csv", as_csv(pd.DataFrame(numbers), 6))

# %% [markdown]
# ## Fluency


# %%
def nll(name: str, texts: pd.DataFrame) -> pd.DataFrame:
    """Sum and mean of -ln P over the tokens of each continuation."""
    network, tokenizer, _ = load_transformers(name, "float32")
    bos = named_start(tokenizer)
    order, bits = texts["text"].str.len().sort_values().index, {}
    with progress_bar(len(order), Path(name).name, "text") as bar:
        for start in range(0, len(order), ROWS):
            rows = texts.loc[order[start : start + ROWS]]
            options_of_tokens = {"add_special_tokens": False, "return_offsets_mapping": True}
            read = tokenizer(rows["text"].tolist(), **options_of_tokens)
            with torch.no_grad():
                values = text_nll(network, TextRows.of(read["input_ids"], (bos,), network.device))
            for index, offsets, prompt, of_text in zip(
                rows.index, read["offset_mapping"], rows["prompt"], values.double(), strict=True
            ):
                new = [i for i, (_, end) in enumerate(offsets) if end > len(prompt)]
                bits[index] = (of_text[new].sum().item(), of_text[new].mean().item())
            bar.update(len(rows))
    return pd.DataFrame.from_dict(bits, orient="index", columns=["sum", "mean"])


texts = texts[~texts["text"].str.contains(CHAT_TAG, regex=False)]
of_group = []
for _, group in texts.groupby(GROUP, sort=False):
    prompts = set(group.loc[group["arm"] == NO_BIAS, "prompt"])
    for name, part in group.groupby("arm"):
        if not name.startswith("random"):  # each set of random heads has its own prompts
            prompts &= set(part["prompt"])
    of_group.append(group[group["prompt"].isin(sorted(prompts)[: options.n])])
texts = pd.concat(of_group, ignore_index=True)
rows = []
for name in options.judges:
    read = texts.join(nll(name, texts))
    read["bits"] = read["sum"] / np.log(2) / (read["text"].str.len() - read["prompt"].str.len())
    for where, group in read.groupby(GROUP, sort=False):
        wide = group.pivot_table(index=["prompt", "attribute"], columns="arm", values="mean")
        for label, part in group.groupby("arm", sort=False):
            interval = mean_interval(part["bits"].to_numpy(), part["prompt"].to_numpy())
            row = dict(zip(GROUP, (Path(where[0]).name, *where[1:]), strict=True))
            row |= {"judge": Path(name).name, "arm": label, "bits per character": interval.mean}
            row |= {"low": interval.low, "high": interval.high}
            change = (wide[label] - wide[NO_BIAS]).dropna()
            ratio = mean_interval(change.to_numpy(), change.index.get_level_values(0).to_numpy())
            row |= {"ratio": np.exp(ratio.mean), "ratio low": np.exp(ratio.low)}
            row |= {
                "ratio high": np.exp(ratio.high),
                "texts": interval.n,
                "prompts": interval.clusters,
            }
            rows.append(row)
if rows:
    fluency = pd.DataFrame(rows)
    print(as_text(fluency, ".3f"))
    write_text(options.out / "fluency.csv", as_csv(fluency, 6))
