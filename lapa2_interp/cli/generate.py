"""The commands of one run: `lapa2 generate | trace`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from lapa2_interp._util.errors import EmptyDistributionError, TraceError, pluralize
from lapa2_interp.cli.options import (
    AugmentationOptions,
    ModelClass,
    Several,
    Unshown,
    columns,
    pairs,
    settings,
)
from lapa2_interp.models.machine import DtypeOrAuto

if TYPE_CHECKING:
    from lapa2_interp.generation.plan import Plan
    from lapa2_interp.models.card import Model
    from lapa2_interp.runs.attention import Attention


def generate(
    *,
    out: Path,
    model: str = "smollm2-135m",
    method: str = "prefix",
    parameters: Annotated[tuple[str, ...], Parameter(name="--set", show_default=False)] = (),
    task: str = "sentiment",
    attribute: str,
    prompt: Annotated[tuple[str, ...], Unshown] = (),
    prompts: Path | None = None,
    length: int = 128,
    samples: int = 1,
    seed: int = 1,
    top_k: int = 200,
    eos: Literal["keep", "stop", "block"] = "keep",
    trace: Literal["none", "pooled", "full"] = "full",
    patterns: str = "",
    augmentation: AugmentationOptions = AugmentationOptions(),
    dtype: DtypeOrAuto = "auto",
    device: str | None = None,
    model_class: ModelClass = "TransformerBridge",
    max_rows: int | None = None,
    doubled_bos: bool = False,
    bar_prefix_words: bool = False,
    pack: Literal["auto", "on", "off"] = "auto",
    trust_remote_code: bool = False,
    yes: bool = False,
    force: bool = False,
) -> None:
    """Generate controlled text and record the attention on the prefix.

    Writes a run of one cell (run.json; cells/KEY with manifest.json, samples.parquet, trace.nc).
    For example

        lapa2 generate --attribute positive --prompt "The lake" \\
            --alpha 0.5 --samples 4 --out results/lake

    Args:
        out: The run's folder. It appears when the run is complete.
        model: A name of `lapa2 models`, a hub id or a folder.
        method: A decoding method of `lapa2 methods`.
        parameters: A parameter of the method as NAME=VALUE, such as omega=60; repeat the option for
            more.
        task: A task of `lapa2 tasks`, or the path of a task file.
        attribute: What to steer towards; the task's file has its prefix.
        prompt: A prompt; repeat the option for more. By default the task's.
        prompts: A file of prompts: plain lines, .jsonl with a field "prompt", or .csv with a column
            "prompt".
        length: Tokens of a text. Of tasks that count the prompt (`lapa2 tasks`: sentiment and topic
            do, as the paper does) new are those that the prompt leaves: behind two tokens, 126.
        samples: Continuations per prompt.
        seed: Seed of the random streams. Every prompt and sample has one of its own, so that other
            prompts and samples do not change a text.
        top_k: How many tokens of largest controlled weight are kept; temperature is 1.
        eos: keep an end token as any other (the paper), stop the text there, or block it.
        trace: full (every layer and head), pooled (their mean) or none.
        patterns: layer.head pairs whose whole attention rows are kept, such as 3.1,4.0.
        dtype: Precision of weights and computation; auto is bfloat16 or float32, whichever this
            machine computes faster.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        model_class: HookedTransformer needs transformer-lens 3.9; TransformersModel works without
            hooks, through transformers' attention interface.
        max_rows: Rows of a batch; by default 120, fewer where their cache would exceed 2 GiB.
        doubled_bos: Two BOS tokens, as the released scripts feed LLaMA.
        bar_prefix_words: Never draw a token that would say a word of the attribute's hard prefix,
            or its name.
        pack: Compute with packed weights, which is faster on a CPU and takes as much memory again:
            auto where it fits, on, or off. It may change the last bits of a logit, and so a text.
        trust_remote_code: Run code that comes with the model.
        yes: Start also what would take a year, or more memory than there is.
        force: Replace a finished run.
    """
    from lapa2_interp._util.files import new_folder
    from lapa2_interp.generation.cell import Cell
    from lapa2_interp.methods.registry import get_for_task, load_task
    from lapa2_interp.models.machine import print_if_slow
    from lapa2_interp.runs.generate import UnfinishedTextsError, announcement
    from lapa2_interp.runs.generate import generate as make
    from lapa2_interp.runs.store import is_finished_run, write_run
    from lapa2_interp.tasks.task import read_prompts

    chosen_task = load_task(task)
    decided = augmentation.parameters(method)
    chosen_method = get_for_task(method, chosen_task, **(decided | settings(parameters)))
    kept = pairs("patterns", patterns, ".") if patterns else ()
    if isinstance(kept, str):
        raise TraceError(
            f"--patterns {patterns!r} is not a list of layer.head pairs such as 3.1,4.0"
        )
    rules = augmentation.build(chosen_method.alpha)
    cell = Cell.of(
        model,
        method=chosen_method,
        task=chosen_task,
        attribute=attribute,
        prompts=[*prompt, *(read_prompts(prompts) if prompts else ())] or None,
        augmentation=rules or None,
        alpha=None if rules else 0.0,
        length=length,
        samples=samples,
        seed=seed,
        top_k=top_k,
        eos=eos,
        trace=trace,
        patterns=kept,
        max_rows=max_rows,
        doubled_bos=doubled_bos,
        bar_prefix_words=bar_prefix_words,
        dtype=dtype,
        device=device,
        model_class=model_class,
    )

    def announce(loaded: Model, plans: Sequence[Plan]) -> None:
        augmentation.check(loaded)
        for note in dict.fromkeys(note for each in plans for note in each.merged):
            print(f"note: {note}", file=sys.stderr)
        print(announcement(loaded, plans), file=sys.stderr)

    problem = None
    with new_folder(out, force, is_finished_run) as folder:
        print_if_slow(cell.dtype, device)
        try:
            run = make(
                model,
                cell,
                device=device,
                trust_remote_code=trust_remote_code,
                pack=pack,
                announce=announce,
                yes=yes,
            )
        except UnfinishedTextsError as error:
            run, problem = error.run, error
        write_run(folder, run)
    if problem is not None:
        raise EmptyDistributionError(f"{problem} in {out}")
    texts = run.samples()["text"]
    for text in texts.head(3):
        print(f"---\n{text}")
    print(
        f"---\n{len(texts)} texts in {out}"
        + (f"; see `lapa2 trace {out}`" if trace != "none" else "")
    )


def trace(
    run: Path,
    /,
    *,
    only: Annotated[tuple[str, ...], Several] = (),
    branch: str | None = None,
    out: Path | None = None,
    force: bool = False,
) -> None:
    """Read the attention a run recorded: the prefix against step, its decay fit, and the top heads.

    Args:
        run: A run with traces.
        only: Only cells with these values, as COLUMN=VALUE: of a run of several methods or tasks
            one is read at a time.
        branch: Which branch of the method; by default the first with a prefix.
        out: Also write tables (CSV) and figures (PNG) into this new folder.
        force: Replace an earlier such folder.
    """
    from lapa2_interp.runs.attention import read_attention
    from lapa2_interp.runs.store import load_run

    found = read_attention(load_run(run), columns(only), branch)
    _show(found)
    if out is not None:
        found.save(out, force)
        print(f"\ntables and figures in {out}")


def _show(found: Attention) -> None:
    from lapa2_interp.bias.augmentation import active_augmentations

    part, steps = found.part, found.tables["steps"]
    last = int(steps["step"].max())
    powers = [0, *(2**i for i in range(20) if 2**i < last), last]
    names = [part, "bos", "released_slice"]
    shown = steps[steps["name"].isin(names) & steps["step"].isin(powers)]
    bands = [
        f" [{low:.4f}, {high:.4f}]" if low == low else ""
        for low, high in zip(shown["low"], shown["high"], strict=True)
    ]
    shown = shown.assign(
        cell=[f"{mean:.4f}{band}" for mean, band in zip(shown["mean"], bands, strict=True)]
    )
    arms = list(dict.fromkeys(steps["arm"]))
    rows = (
        ["arm", "step"] if (steps["layer_type"] == "full").all() else ["arm", "layer_type", "step"]
    )
    table = shown.pivot(index=rows, columns="name", values="cell")[names].loc[arms]
    read = f"branch {found.branch} (of {', '.join(found.branches)})"
    print(f"{read}: attention on its {part}, on BOS and on the released slice")
    n, prompts = int(steps["n"].iloc[0]), int(steps["prompts"].iloc[0])
    interval = (
        "95 % interval over prompts" if prompts > 1 else "no interval: one prompt tells no spread"
    )
    print(
        f"mean over layers{' of a type' * (len(rows) > 2)} and heads; {n} texts of"
        f" {pluralize(prompts, 'prompt')} an arm; {interval}"
    )
    if found.left_out:
        print(f"left out: {pluralize(found.left_out, 'text')} that ended before a first token")
    print(table.rename_axis(columns=None).to_string())
    print(f"\nC/(t+D) fitted to the curve of the {part}")
    print(found.tables["fits"].to_string(index=False, float_format="%.4g", na_rep="no fit"))
    if "heads" in found.tables:
        print(f"\nheads with most attention on the {part}, mean over steps")
        top = (
            found.tables["heads"]
            .sort_values(part, ascending=False)
            .groupby("arm", sort=False)
            .head(5)
        )
        print(
            top[["arm", "layer", "head", part, "bos"]].to_string(index=False, float_format="%.4f")
        )
    rules = "; ".join(
        f"{arm}: {' + '.join(rule.to_json() for rule in active_augmentations(rules)) or None}"
        for arm, rules in found.arms.items()
    )
    print(f"\naugmentation {rules}")
