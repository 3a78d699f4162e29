"""Rivals of the bias at equal cost: figures/rivals.

    make steering-prompts; analyses/rivals/run.sh 2    # the last round
    python analyses/rivals/analyse.py results/rivals --judge FOLDER --out figures/rivals

The *cost* of an arm is the perplexity of its continuations by a model of another family (--judge;
for texts of SmolLM2 Gemma 3 270M), divided by that of the same base method without bias. A *family*
is a way to steer at several strengths. Its curve begins at no bias, and families are compared at
two costs by linear interpolation in ln perplexity (`lapa2_interp.scoring.equal_perplexity`).

texts.parquet has a row a text, without the text: round, family, strength, prompt (12 digits of its
sha256), attribute, nll (by the judge, in nats per token of the continuation), acc hidden (adapter,
the prefixes' words and their inflections hidden), acc (linear), rep (4-grams that the text had
before), bits (by the judge, per character of the continuation), bits (writer) (by the model that
wrote it, which now sees neither prefix nor bias). Rounds that are there and not in the run stay, so
that no run has to be kept. diversity.csv has distinct-2 of every arm in each round, read.csv forty
continuations of every arm, arms.csv the means of each arm, equal.csv the comparison with LaPA2 in
all heads, and with the chosen heads, with Holm's correction over all tests of a metric in each.
Topic has these rows three times: of all attributes, of *world*, in which control fails, and of the
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analyses.lab.scripts import ScriptOptions
from analyses.rivals.readers import hidden_words
from lapa2_interp.bias.recipes import name_families, strength
from lapa2_interp.errors import RunError
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.load import load_transformers
from lapa2_interp.progress import progress_bar
from lapa2_interp.runs.run import Run, load_run
from lapa2_interp.scoring.echo import MASK
from lapa2_interp.scoring.equal_perplexity import BASELINE, RATIOS, SteeringCurves, add_verdicts
from lapa2_interp.scoring.registry import ScorerOptions, score_texts
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.table_formats import as_csv, as_text

REFERENCES = ("lapa2", "head-selective")
"""Families with which all others are compared, each with a correction of its own. The second was
not planned; it was added when its result was known."""
METRICS = ("acc hidden", "acc (linear)", "rep")
"""Those that are compared at equal cost."""
BITS = ("bits", "bits (writer)")
ARM = ["family", "strength"]
STRENGTHS = {
    "caa": lambda of: (f"caa, layer {of['layers']:g}", of["strength"]),
    "preadd": lambda of: ("guidance", of["lam"] - 1),
    "remind": lambda of: (
        ("reminder", 1 / of["every"]) if of["every"] else ("longer prefix", of["copies"] - 1)
    ),
}
"""By method without a bias, the family and the strength of its parameters."""


def main() -> None:
    """Score the texts, and write the tables."""
    parser = ScriptOptions("Rivals of the bias at equal cost")
    parser.add_argument("run", type=Path)
    parser.add_argument("--judge", required=True, help="a model of another family")
    parser.add_argument(
        "--planned", type=int, default=200, help="prompts of the plan; with fewer no tests"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    run = load_run(options.run, earlier=True)  # of all rounds
    planned = {key: digits(cell.prompts[0]) for key, cell in run.by_key.items()}
    texts = complete_rounds(run.texts(list(run.finished)).join(families(run), on="cell"), planned)
    with ScoreCache(options.run / "scores") as cache:
        scored = score(texts, cache)
    judged = judged_nll(scored, options.judge, options.run / "scores" / "judge.csv")
    scored[judged.columns] = judged
    writer = next(iter(run.by_key.values())).model
    own = judged_nll(scored, writer, options.run / "scores" / "writer.csv")
    scored["bits (writer)"] = own["bits"]
    pairs = scored.groupby(["round", *ARM])["continuation"].apply(distinct_2)
    diversity = pairs.rename("distinct-2").reset_index()
    scored["prompt"] = list(map(digits, scored["prompt"]))
    if not (file := options.out / "read.csv").exists():
        shown = [*ARM, "attribute", "prompt", "continuation"]
        write_text(file, as_csv(scored.groupby([*ARM, "attribute"]).head(20)[shown], 6))
    columns = ["round", *ARM, "prompt", "attribute", "sample", "nll", *METRICS, *BITS]
    scored = with_earlier(scored[columns], options.out / "texts.parquet")
    diversity = with_earlier(diversity, options.out / "diversity.csv")
    points, equal = compare(scored, options.planned)
    diversity = diversity.drop(columns="round").groupby(ARM, as_index=False).mean()
    points = points.merge(diversity, how="left", on=ARM, validate="many_to_one")
    write_text(options.out / "arms.csv", as_csv(points, 6))
    wide = points.pivot(
        index=["attributes", *ARM, "cost", "distinct-2"], columns="metric", values="mean"
    )
    print(as_text(wide.reset_index(), ".3g"))
    write_text(options.out / "equal.csv", as_csv(equal, 6))
    first = equal[equal["metric"] == METRICS[0]]
    shown = ["value", "difference", "difference_low", "difference_high", "p_holm", "verdict"]
    print(as_text(first[["attributes", "reference", "ratio", "family", *shown]], ".3g"))


def compare(scored: pd.DataFrame, planned: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Means of every arm, and the families at equal perplexity, for these attributes: all, and
    *world* and the others where it is one.

    Args:
        planned: Prompts below which there are no tests.
    """
    is_world = scored["attribute"] == "world"
    parts = {"all": scored}
    if is_world.any():
        parts |= {"world": scored[is_world], "others": scored[~is_world]}
    points, equal = [], []
    for name, texts in parts.items():
        curves = SteeringCurves(texts, (*METRICS, *BITS))
        arms = curves.points()
        base = arms.loc[arms["family"] == BASELINE, "perplexity"].iloc[0]
        points.append(arms.assign(attributes=name, cost=arms["perplexity"] / base))
        for reference in REFERENCES:
            if reference in curves.families:
                table = curves.compare(reference, RATIOS)
                table = table[table["metric"].isin(METRICS)].assign(attributes=name)
                equal.append(add_verdicts(table.assign(reference=reference), reference))
                if curves.prompts < planned:
                    equal[-1][["p", "p_holm", "verdict"]] = np.nan, np.nan, ""
    return pd.concat(points, ignore_index=True), pd.concat(equal, ignore_index=True)


def digits(text: str) -> str:
    """12 digits of a text's sha256."""
    return sha256(text.encode()).hexdigest()[:12]


def complete_rounds(texts: pd.DataFrame, planned: Mapping[str, str]) -> pd.DataFrame:
    """The texts of rounds whose cells are all finished, with the column round.

    Args:
        planned: By cell, its round: digits of its first prompt.

    Raises:
        RunError: No round is complete.
    """
    texts = texts.assign(round=texts["cell"].map(planned))
    unfinished = {name for cell, name in planned.items() if cell not in set(texts["cell"])}
    texts = texts[~texts["round"].isin(unfinished)].reset_index(drop=True)
    if not len(texts):
        raise RunError("no round is complete; repeat analyses/rivals/run.sh")
    return texts


def with_earlier(rows: pd.DataFrame, file: Path) -> pd.DataFrame:
    """The rows after those of other rounds in the file, which is written.

    Raises:
        RunError: The file has other columns.
    """
    is_csv = file.suffix == ".csv"
    if file.exists():
        earlier = pd.read_csv(file) if is_csv else pd.read_parquet(file)
        if list(earlier) != list(rows):
            raise RunError(f"{file} has other columns: {', '.join(earlier)}; choose another --out")
        rows = pd.concat([earlier[~earlier["round"].isin(rows["round"])], rows], ignore_index=True)
    if is_csv:
        write_text(file, as_csv(rows, 6))
        return rows
    with atomic_write(file) as fresh:
        rows.to_parquet(fresh, index=False, compression="zstd")
    return rows


def families(run: Run) -> pd.DataFrame:
    """By cell, the name of its family and its strength, to 6 digits, as in the tables.

    Raises:
        RunError: Arms have prefixes of several kinds, so that they differ by more than the way, or
            two arms have one name.
    """
    kinds = {cell.prefix_kinds: cell for cell in run.by_key.values() if cell.prefix_kinds}
    if len(kinds) > 1:
        listed = "; ".join(f"{', '.join(kind)} ({one.method})" for kind, one in kinds.items())
        raise RunError(f"arms have several kinds of prefix: {listed}; give `prefixes` in the grid")
    names = name_families(cell.active_augmentations for cell in run.by_key.values())
    base = next(iter(run.by_key.values()))  # a grid's first arm, no bias

    def family_of(cell: Cell) -> tuple[str, float]:
        rules = cell.active_augmentations
        family, step = names[rules], strength(rules)
        if len(rules) == 2:
            family, step = "head-selective, opposing down", strength(rules[:1])
        if rules and rules[0].span == "all":
            family = "log-n"
        if cell.method in STRENGTHS:
            family, step = STRENGTHS[cell.method](cell.parameters)
        elif cell.method != base.method:
            family = f"{'retrying ' * bool(cell.parameters.get('order'))}{cell.method}, {family}"
        elif own := [
            name for name in base.parameters if cell.parameters[name] != base.parameters[name]
        ]:
            family = own[0]  # the method's own strength
            step = cell.parameters[family] / base.parameters[family] - 1
        if cell.temperature != 1:
            warm = f"temperature {cell.temperature:g}"
            return (warm, step) if rules else ("temperature", 1 / cell.temperature - 1)
        return family, step

    named = {key: family_of(cell) for key, cell in run.by_key.items()}
    placed = {key: (family, round(step, 6)) for key, (family, step) in named.items()}
    taken: dict[tuple, str] = {}
    for key, cell in run.by_key.items():
        same = taken.setdefault((*placed[key], cell.attribute, cell.prompts), key)
        if same != key:
            raise RunError(
                f"the cells {same} and {key} are both {placed[key][0]!r} at one strength"
            )
    return pd.DataFrame.from_dict(placed, orient="index", columns=["family", "strength"])


def score(texts: pd.DataFrame, cache: ScoreCache) -> pd.DataFrame:
    """The texts with their scores."""
    texts = texts.reset_index(drop=True)
    task = str(texts["task"][0])
    hidden = hidden_words(task)
    options = ScorerOptions(task=task)
    plans = {
        "acc (linear)": (texts, "accuracy=linear", lambda p: 100 * p),
        "acc hidden": (
            texts.assign(text=[hidden.sub(MASK, text) for text in texts["text"]]),
            "accuracy=adapter",
            lambda p: 100 * p,
        ),
        "rep": (texts, "repetition", lambda p: 100 * p),
    }
    scored = texts.copy()
    for name, (read, scorer, unit) in plans.items():
        values = pd.to_numeric(score_texts(read, [scorer], options, cache)["value"])
        scored[name] = unit(values.to_numpy(float))
    return scored


@torch.inference_mode()
def judged_nll(texts: pd.DataFrame, model: str, file: Path, dtype: str = "float32") -> pd.DataFrame:
    """-ln p of each continuation given its prompt: `nll`, in nats per token, and `bits` per
    character; NaN where there is none.

    Values of nll are kept in a file, by text.
    """
    known = pd.read_csv(file, index_col="text")["nll"].to_dict() if file.exists() else {}
    names = [
        sha256(f"{prompt}\0{new}".encode()).hexdigest()
        for prompt, new in zip(texts["prompt"], texts["continuation"], strict=True)
    ]
    network, tokenizer, _ = load_transformers(model, dtype)
    rows = {
        name: (prompt, new)
        for name, prompt, new in zip(names, texts["prompt"], texts["continuation"], strict=True)
        if name not in known
    }
    order = sorted(rows, key=lambda name: len(rows[name][0]) + len(rows[name][1]))
    n_short = sum(_is_short(rows[name]) for name in order)
    batches = [order[first : min(first + 16, n_short)] for first in range(0, n_short, 16)]
    # The logits of long texts fill the memory.
    batches += [order[first : first + 4] for first in range(n_short, len(order), 4)]
    with progress_bar(len(order), "perplexity", "text") as bar:
        for i, batch in enumerate(batches):
            means = _nll_of([rows[name] for name in batch], network, tokenizer)
            known |= dict(zip(batch, means, strict=True))
            bar.update(len(batch))
            if i % 64 == 0 or i == len(batches) - 1:
                table = pd.Series(known, name="nll").rename_axis("text").reset_index()
                write_text(file, as_csv(table, 8))
    pairs = zip(texts["prompt"], texts["continuation"], strict=True)
    tokens = [len(ids) - start for ids, start in (_encoded(*pair, tokenizer) for pair in pairs)]
    judged = pd.DataFrame({"nll": [known[name] for name in names]}, index=texts.index)
    characters = texts["continuation"].str.len().replace(0, np.nan)
    judged["bits"] = judged["nll"] * tokens / characters / np.log(2)
    return judged


def _is_short(pair: tuple[str, str]) -> bool:
    """A prompt and its continuation have 150 tokens or so at most."""
    return sum(map(len, pair)) < 600


def _encoded(prompt: str, new: str, tokenizer) -> tuple[list[int], int]:
    """Token ids of a text, BOS in front, and the position of the continuation's first token."""
    encoded = tokenizer(prompt + new, add_special_tokens=False, return_offsets_mapping=True)
    ends = [stop for _, stop in encoded["offset_mapping"]]
    return [tokenizer.bos_token_id, *encoded.input_ids], 1 + sum(
        stop <= len(prompt) for stop in ends
    )


def _nll_of(pairs: list[tuple[str, str]], network, tokenizer) -> list[float]:
    ids, starts = zip(*(_encoded(*pair, tokenizer) for pair in pairs), strict=True)
    width = max(map(len, ids))
    batch = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    live = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    hidden = network.base_model(batch, attention_mask=live, use_cache=False).last_hidden_state
    # All positions together, since the vocabulary is large.
    predicting = [
        states[start - 1 : len(row) - 1]
        for states, row, start in zip(hidden, ids, starts, strict=True)
    ]
    logits = network.get_output_embeddings()(torch.cat(predicting)).float()
    tokens = torch.tensor(
        [token for row, start in zip(ids, starts, strict=True) for token in row[start:]]
    )
    own = logits.gather(1, tokens[:, None])[:, 0]
    nll = torch.cat([part.logsumexp(1) for part in logits.split(128)]) - own
    means = [float(part.mean()) for part in nll.split([len(part) for part in predicting])]
    return means


def distinct_2(continuations: pd.Series) -> float:
    """The share of different pairs of words among all pairs of an arm's texts."""
    pairs = [pair for text in continuations for pair in pairwise(text.split())]
    return len(set(pairs)) / len(pairs)


if __name__ == "__main__":
    main()
