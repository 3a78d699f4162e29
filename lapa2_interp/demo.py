"""The demo: does attention on a hard prefix fade while a real model writes, and what does LaPA2 change?

SmolLM2-135M continues the paper's 15 sentiment prompts behind "Very positive:" and "Very negative:", four times with the
same random streams: as it is, with LaPA2 at alpha 1/2 and 1 (profile paper), and at 1/2 as the released code places it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import fill

import numpy as np
import pandas as pd

from lapa2_interp import methods, plots
from lapa2_interp.attention.hooked import Model
from lapa2_interp.augmentation import Augmentation
from lapa2_interp.experiments.runner import estimate, run_arms
from lapa2_interp.experiments.store import Manifest, Run, new_folder, write_run
from lapa2_interp.experiments.verify import L_PRE, read_again, shown_verdicts
from lapa2_interp.experiments.verify import as_text as verdicts_as_text
from lapa2_interp.layout import layout
from lapa2_interp.models import load_model, load_tokenizer
from lapa2_interp.propositions import synthetic_verdicts, trace_verdicts
from lapa2_interp.report import Section, page
from lapa2_interp.stats import mean_interval
from lapa2_interp.synthetic import draw_log_odds, lengths_up_to
from lapa2_interp.tasks import load_task
from lapa2_interp.trace import fit_table, head_table, pooled, prefix_token_table, step_table

ARMS: dict[str, Augmentation | None] = {
    "baseline": None,
    "alpha 1/2 paper": Augmentation(alpha=0.5),
    "alpha 1 paper": Augmentation(alpha=1.0),
    "alpha 1/2 released": Augmentation(alpha=0.5, profile="released"),
}
SHOWN_STEPS = (0, 16, 64)


def run_demo(
    out: Path,
    *,
    model_name: str = "smollm2-135m",
    dtype: str = "float32",
    length: int = 128,
    samples: int = 1,
    seed: int = 1,
    force: bool = False,
) -> str:
    """Generate, record, tabulate, draw; returns what to print.

    Args:
        out: The run folder: manifest.json, samples.parquet, trace.nc, tables/*.csv, figures/*.png, report.html.
        length: Tokens of a text, its prompt included.
        samples: Continuations per prompt, attribute and arm.

    Raises:
        Lapa2Error: As `load_model`, `generate` and `new_folder`.
    """
    with new_folder(out, force) as folder:
        model = load_model(model_name, dtype=dtype)
        run = _generate(model, length, samples, seed)
        write_run(folder, run)
        tables = make_tables(run) | {"verdicts": _verdicts(model, run)}
        figures = {
            "prefix_attention": plots.attention_curves(tables["steps"], tables["fits"]),
            "head_maps": plots.head_maps(tables["heads"]),
            "prefix_tokens": plots.prefix_token_bars(tables["prefix_tokens"]),
        }
        (folder / "tables").mkdir()
        for name, table in tables.items():
            table.to_csv(folder / "tables" / f"{name}.csv", index=False)
        (folder / "figures").mkdir()
        for name, figure in figures.items():
            figure.savefig(folder / "figures" / f"{name}.png")
        lead, shown = finding(tables["summary"]), as_text(tables["summary"], tables["fits"])
        sections = [
            Section(
                "Attention on the prefix against step",
                "Mean over all layers and heads, 95 % bands from resampling prompts. Dotted: C/(t+D), the paper's form of "
                "the decay, fitted to the mean curve. Profile paper is Algorithm 1; profile released is what the released "
                "code computes; the released slice is the keys it boosts.",
                figures["prefix_attention"],
                shown,
            ),
            Section(
                "Which heads",
                "Mean over steps and texts. Left the baseline; then what each augmentation adds to it.",
                figures["head_maps"],
            ),
            Section(
                "Which keys",
                "The released code counts slots from 0, so it boosts BOS and misses the last prefix token; the paper's "
                "Algorithm 1 boosts the prefix itself.",
                figures["prefix_tokens"],
            ),
            Section(
                "Do the paper's propositions hold?",
                "95 % intervals against a margin around each claim: on logits made to keep or break the assumptions, and on the "
                "baseline's texts read again under each alpha. `lapa2 propositions` is the long form.",
                None,
                shown_verdicts(tables["verdicts"]),
            ),
        ]
        (folder / "report.html").write_text(
            page("Does the prefix fade?", lead, sections, side_by_side(run), facts(run.manifest)), encoding="utf-8"
        )
    where = f"Look at {out}/report.html (figures/ and tables/ hold its parts; trace.nc every head)."
    main = shown.set_index("attention on").rename_axis(None).to_string()
    return "\n\n".join((main, fill(lead, 110), verdicts_as_text(tables["verdicts"]), where))


def _generate(model: Model, length: int, samples: int, seed: int) -> Run:
    task = load_task("sentiment")
    return run_arms(
        model,
        methods.get("prefix"),
        task,
        tuple(task.attributes),
        task.prompts.texts,
        ARMS,
        length=length,
        samples=samples,
        seed=seed,
        announce=lambda plans: print(estimate(model, plans, "full"), file=sys.stderr),
    )


def _verdicts(model: Model, run: Run) -> pd.DataFrame:
    """The short form of `lapa2 propositions`: synthetic logits, and the baseline's texts read again under both alphas."""
    lengths = lengths_up_to(100_000, L_PRE)
    made = synthetic_verdicts(draw_log_odds(lengths, L_PRE, texts=10), lengths, L_PRE, (0.5, 1.0))
    rules = {alpha: Augmentation(alpha=alpha) for alpha in (0.5, 1.0)}
    traces = read_again(model, run, "baseline", rules)
    return pd.concat([made, trace_verdicts(traces, f"{run.manifest.model.name}, the same texts")], ignore_index=True)


def make_tables(run: Run) -> dict[str, pd.DataFrame]:
    """The tidy tables behind the demo's pictures; `summary` is the one it prints."""
    assert run.trace is not None
    steps = step_table(run.trace, run.samples)
    tokens = prefix_token_table(run.trace, run.samples)
    return {
        "summary": _summary(run),
        "steps": steps,
        "fits": fit_table(steps),
        "heads": head_table(run.trace, run.samples),
        "prefix_tokens": tokens.assign(label=tokens["key"].map(_prefix_labels(run))),
    }


def _summary(run: Run) -> pd.DataFrame:
    """Attention on the prefix at a few steps, and on prefix, BOS and released slice on average.

    Columns arm, quantity, mean, low, high, n.
    """
    assert run.trace is not None
    prefix, bos, released = (pooled(run.trace, name)[0] for name in ("prefix", "bos", "released_slice"))
    shown = [step for step in SHOWN_STEPS if step < prefix.shape[1] and not np.isnan(prefix[:, step]).any()]
    common = int((~np.isnan(prefix).any(axis=0)).sum()) - 1
    shown = shown if len(shown) > 1 else sorted({0, common})
    quantities = {f"prefix at step {step}": prefix[:, step] for step in shown}
    averages = {"prefix, mean": prefix, "BOS, mean": bos, "released slice, mean": released}
    quantities |= {name: np.nanmean(values, axis=1) for name, values in averages.items()}
    rows = []
    for arm, members in run.samples.groupby("arm", sort=False):
        for name, values in quantities.items():
            found = mean_interval(values[members.index], members["prompt"])
            rows.append(
                {"arm": arm, "quantity": name, "mean": found.mean, "low": found.low, "high": found.high, "n": found.n}
            )
    return pd.DataFrame(rows)


def as_text(summary: pd.DataFrame, fits: pd.DataFrame) -> pd.DataFrame:
    """The summary for reading: one column per arm, every mean with its 95 % interval in one cell, and the fit."""
    cells = zip(summary["mean"], summary["low"], summary["high"], strict=True)
    text = summary.assign(cell=[f"{mean:.3f} [{low:.3f}, {high:.3f}]" for mean, low, high in cells])
    arms = list(dict.fromkeys(summary["arm"]))
    shown = text.pivot(index="quantity", columns="arm", values="cell").loc[
        list(dict.fromkeys(summary["quantity"])), arms
    ]
    curves = zip(fits["C"], fits["D"], fits["R2"], strict=True)
    fitted = ["no fit" if np.isnan(c) else f"{c:.2f}/(t+{d:.1f}), R2 {r2:.2f}" for c, d, r2 in curves]
    shown.loc["prefix as C/(t+D)"] = pd.Series(fitted, index=fits["arm"])
    shown.loc["texts"] = summary.groupby("arm")["n"].first().astype(str)
    return shown.rename_axis(index="attention on", columns=None).reset_index()


def finding(summary: pd.DataFrame) -> str:
    """What the numbers say, in sentences built from them."""
    steps = [name for name in dict.fromkeys(summary["quantity"]) if name.startswith("prefix at step")]
    rows = summary.set_index(["arm", "quantity"])[["mean", "low", "high"]].T.to_dict("list")

    def cell(arm: str, quantity: str) -> str:
        mean, low, high = rows[arm, quantity]
        return f"{mean:.3f} [{low:.3f}, {high:.3f}]"

    last, step = steps[-1], steps[-1].split()[-1]
    return (
        f"Attention on the prefix, averaged over all heads, goes from {cell('baseline', steps[0])} at the first step to "
        f"{cell('baseline', last)} at step {step} in the baseline. With LaPA2 (profile paper) it is "
        f"{cell('alpha 1/2 paper', last)} there at alpha 1/2 and {cell('alpha 1 paper', last)} at alpha 1. The released "
        f"placement at alpha 1/2 gives {cell('alpha 1/2 released', last)} on the prefix and moves BOS, on average over "
        f"steps, from {cell('baseline', 'BOS, mean')} to {cell('alpha 1/2 released', 'BOS, mean')}."
    )


def side_by_side(run: Run, prompts: int = 6) -> pd.DataFrame:
    """The first sample of some prompts and every attribute, one column per arm."""
    first = run.samples[(run.samples["sample"] == 0) & run.samples["prompt"].isin(run.manifest.prompts[:prompts])]
    table = first.assign(which=first["prompt"] + " (" + first["attribute"] + ")").pivot(
        index="which", columns="arm", values="text"
    )
    return table[list(run.manifest.arms)].rename_axis("prompt (attribute)")


def facts(manifest: Manifest) -> dict[str, str]:
    """The manifest's settings for the foot of the report."""
    arms = {name: "no augmentation" if a is None else a.to_json() for name, a in manifest.arms.items()}
    return {
        "model": f"{manifest.model.name}, {manifest.model.dtype}, {manifest.model.model_class}, {manifest.model.weights}",
        "start of text": manifest.model.start_token,
        "method": f"{manifest.method}; " + ", ".join(f"{a}: {b['prefix']!r}" for a, b in manifest.branches.items()),
        "texts": f"{len(manifest.prompts)} prompts x {manifest.samples} samples of {manifest.length} tokens, "
        f"top-k {manifest.top_k}, temperature 1, seed {manifest.seed}",
        **{f"arm {name}": text for name, text in arms.items()},
        "intervals": "95 %, percentile bootstrap over prompts",
        "versions": ", ".join(f"{name} {found}" for name, found in manifest.versions.items()),
        "commit": manifest.commit or "not a checkout",
        "made": f"{manifest.created:%Y-%m-%d %H:%M} UTC, {manifest.new_tokens} tokens in {manifest.seconds:.0f} s",
    }


def _prefix_labels(run: Run) -> dict[str, str]:
    """p1, p2, ... as the prefixes' tokens: where the attributes' prefixes differ, both."""
    tokenizer = load_tokenizer(run.manifest.model.name)
    texts = [branches["prefix"] for branches in run.manifest.branches.values()]
    tokens = [layout(tokenizer, text, "The").tokens for text in texts if isinstance(text, str)]
    labels = {"BOS": "BOS"}
    for i in range(1, max(map(len, tokens)) - 1):  # between BOS and the one prompt token
        words = [tokenizer.convert_tokens_to_string([row[i]]).strip() for row in tokens if i < len(row) - 1]
        labels[f"p{i}"] = "/".join(dict.fromkeys(words))
    return labels
