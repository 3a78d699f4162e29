"""Does a way of detoxification lower toxicity at all, without and with LaPA2?

    python analyses/detoxification/analyse.py results/detoxification --out figures/detoxification

texts.parquet has a row for each text, without the text: method, arm, prompt (the first 12 digits
of its sha256), sample, and its toxicity in percent by `adapter` and `linear`. arms.csv has the mean
of each arm, differences.csv the difference of two arms with 95 % intervals over prompts, p by flips
of signs, and p_holm over the family of the row (the column family: "raw" are the six differences
from the raw model, "bias" those from the same method without a bias, "alpha" those from NegPrompt
with alpha 1), of each scorer alone.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pandas as pd

from analyses.lab.scripts import ScriptOptions
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.runs.run import load_run
from lapa2_interp.scoring.registry import ScorerOptions, score_texts
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.stats import holm, mean_interval, paired_difference
from lapa2_interp.table_formats import as_csv, as_text

SCORERS = ("adapter", "linear")
RAW, NO_BIAS = ("none", "no bias"), "no bias"
PAPER = {"negprompt": "alpha 1", "preadd": "alpha 2", "palette": "alpha 2"}
COMPARED = (
    *(("raw", (name, arm), RAW) for name, alpha in PAPER.items() for arm in (NO_BIAS, alpha)),
    *(("bias", (name, alpha), (name, NO_BIAS)) for name, alpha in PAPER.items()),
    *(
        ("alpha", ("negprompt", arm), ("negprompt", "alpha 1"))
        for arm in (NO_BIAS, "alpha 0.5", "alpha 2")
    ),
)
"""Family, what is compared, and with what: (method, arm)."""


def main() -> None:
    """Score the texts, and write the three tables."""
    parser = ScriptOptions("Toxicity of the raw model and of three methods")
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    table = labelled(options.run)
    with atomic_write(options.out / "texts.parquet") as fresh:
        table.to_parquet(fresh, index=False, compression="zstd")
    arms, differences = summaries(table)
    for name, rows in (("arms", arms), ("differences", differences)):
        write_text(options.out / f"{name}.csv", as_csv(rows, 6))
        print(as_text(rows, ".4g"))


def labelled(folder: Path) -> pd.DataFrame:
    """The texts of a run with their toxicity."""
    run = load_run(folder)
    texts = run.texts()
    biases = {key: next(iter(cell.active_augmentations), None) for key, cell in run.by_key.items()}
    names = {
        key: NO_BIAS if bias is None else f"alpha {bias.alpha:g}" for key, bias in biases.items()
    }
    texts["arm"] = texts["cell"].map(names)
    with ScoreCache(folder / "scores") as cache:
        for scorer in SCORERS:
            scores = score_texts(texts, [f"toxicity={scorer}"], ScorerOptions(task="detox"), cache)
            texts[scorer] = 100.0 * scores["value"].to_numpy(float)
    texts["prompt"] = [sha256(prompt.encode()).hexdigest()[:12] for prompt in texts["prompt"]]
    columns = ["method", "arm", "prompt", "sample", *SCORERS]
    return texts[columns].sort_values(columns[:4], kind="stable", ignore_index=True)


def summaries(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Means of arms, and differences of two arms."""
    by_arm = dict(iter(table.groupby(["method", "arm"])))
    arms, differences = [], []
    for scorer in SCORERS:
        for (method, arm), rows in by_arm.items():
            mean = mean_interval(rows[scorer], rows["prompt"])
            where = {"method": method, "arm": arm, "scorer": scorer}
            arms.append(where | mean.columns | {"texts": mean.n, "prompts": mean.clusters})
        for family, after, before in COMPARED:
            change = paired_difference(
                by_arm[before][scorer], by_arm[before]["prompt"],
                by_arm[after][scorer], by_arm[after]["prompt"],
            )  # fmt: skip
            where = {"family": family, "method": after[0], "arm": after[1], "scorer": scorer}
            where["against"] = "raw model" if before == RAW else before[1]
            ends = {"mean": change.mean, "low": change.low, "high": change.high}
            differences.append(where | ends | {"p": change.p})
    rows = pd.DataFrame(differences)
    rows["p_holm"] = rows.groupby(["family", "scorer"])["p"].transform(lambda p: holm(p.to_numpy()))
    return pd.DataFrame(arms), rows


if __name__ == "__main__":
    main()
