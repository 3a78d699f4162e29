"""The commands of one run: `lapa2 generate | trace`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from lapa2_interp.cli.options import (
    COMPUTING,
    AugmentationOptions,
    SettingOptions,
    Several,
    given_settings,
)
from lapa2_interp.cli.texts import columns
from lapa2_interp.commands import command
from lapa2_interp.errors import Lapa2Error, pluralize
from lapa2_interp.models.machine import Attn
from lapa2_interp.table_formats import as_text

if TYPE_CHECKING:
    import pandas as pd

    from lapa2_interp.generation.batch import BatchPlan
    from lapa2_interp.models.facts import Model
    from lapa2_interp.runs.attention import Attention


def generate(
    *,
    out: Path,
    settings: Annotated[SettingOptions, Parameter(name="*")] = SettingOptions(),
    augmentation: AugmentationOptions = AugmentationOptions(),
    device: Annotated[str | None, Parameter(group=COMPUTING)] = None,
    pack: Annotated[Literal["auto", "on", "off"], Parameter(group=COMPUTING)] = "auto",
    attn: Annotated[Attn, Parameter(group=COMPUTING)] = "auto",
    trust_remote_code: Annotated[bool, Parameter(group=COMPUTING)] = False,
    yes: bool = False,
    force: bool = False,
) -> None:
    """Generate controlled text and record the attention on the prefix.

    Writes a run (run.json; cells/KEY with cell.json and, of each batch of rows, 000.parquet,
    000.nc and 000.json). For example

        lapa2 generate --attribute positive --prompt "The lake" \\
            --alpha 0.5 --samples 4 --out run
        lapa2 generate --prefix "Very formal:" --prompts "The lake" --out formal

    Args:
        out: The run's folder. The folder appears when the run is complete.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        pack: Compute with prepacked weights, which is faster on a CPU and takes as much memory
            again: auto where it fits, on, or off. Prepacking may change the last bits of a logit,
            and so a text.
        attn: Of a TransformersModel: fused reads prompts without the matrix of attention scores,
            matrix forms it, auto decides by their size.
        trust_remote_code: Run code that comes with the model.
        yes: Start also what reads over 10^11 tokens, or needs more memory than there is.
        force: Replace a finished run.
    """
    from lapa2_interp.files import result_folder
    from lapa2_interp.methods.registry import find_class
    from lapa2_interp.models.machine import print_if_slow, resolve_dtype
    from lapa2_interp.runs import generate as in_memory
    from lapa2_interp.runs.run import is_finished_run, write_run

    fields = given_settings(settings)
    method = fields.get("method", "prefix")
    fields["parameters"] = augmentation.parameters(method) | fields["parameters"]
    if augmentation.card is None:
        fields |= {"augmentation": augmentation.augmentation, "alpha": augmentation.alpha}
    else:
        fields["augmentation"] = augmentation.build(find_class(method, True).alpha) or "none"

    def announce(loaded: Model, plans: Sequence[BatchPlan]) -> None:
        augmentation.check(loaded)
        for note in dict.fromkeys(note for plan in plans for note in plan.merged):
            print(f"note: {note}", file=sys.stderr)
        print(in_memory.announcement(loaded, plans), file=sys.stderr)

    with result_folder(out, force, is_finished_run) as folder:
        if "dtype" in fields:
            print_if_slow(resolve_dtype(fields["dtype"], device), device)
        run = in_memory.generate(
            **fields,
            device=device,
            trust_remote_code=trust_remote_code,
            pack=pack,
            attn=attn,
            announce=announce,
            yes=yes,
        )
        write_run(folder, run)
    if run.problems:
        raise Lapa2Error(f"{run.problems[0]} in {out}")
    texts = run.texts()["text"]
    for text in texts.head(3):
        print(f"---\n{text}")
    print(
        f"---\n{pluralize(len(texts), 'text')} in {out}"
        + (f"; see `{command('trace', out)}`" if fields.get("trace") != "none" else "")
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

    For example

        lapa2 trace results/first
        lapa2 trace results/quick --only method=prefix task=sentiment --out tables

    Args:
        run: A run with traces.
        only: Only cells with these values, as COLUMN=VALUE: of a run of several methods or tasks
            one is read at a time.
        branch: Which branch of the method; by default the first with a prefix.
        out: Also write tables (CSV) and figures (PNG) into this new folder.
        force: Replace an earlier such folder.
    """
    from lapa2_interp.runs.attention import one_kind
    from lapa2_interp.runs.run import load_run

    chosen = load_run(run)
    attention = chosen.attention(branch, **columns(only))
    steps = one_kind(attention.steps())
    _show(attention, steps)
    arms = {chosen.by_key[key].arm: chosen.by_key[key] for key in attention.kinds[0][0]["cell"]}
    rules = "; ".join(
        f"{arm}: {' + '.join(rule.to_json() for rule in cell.active_augmentations) or None}"
        for arm, cell in arms.items()
    )
    print(f"\naugmentation {rules}")
    if out is not None:
        attention.save(out, force)
        print(f"\ntables and figures in {out}")


def _show(attention: Attention, steps: pd.DataFrame) -> None:
    from lapa2_interp.attention.tables import branch_name
    from lapa2_interp.stats import describe_intervals
    from lapa2_interp.table_formats import interval_cells

    part, trace = attention.part, attention.kinds[0][1]
    last = int(steps["step"].max())
    powers = [0, *(2**i for i in range(20) if 2**i < last), last]
    has_bos = "bos" in set(steps["name"])
    names = [part, *(["bos"] if has_bos else []), "released_slice"]
    shown = steps[steps["name"].isin(names) & steps["step"].isin(powers)]
    shown = shown.assign(cell=interval_cells(shown, ".4f"))
    arms = list(dict.fromkeys(steps["arm"]))
    rows = (
        ["arm", "step"] if (steps["layer_type"] == "full").all() else ["arm", "layer_type", "step"]
    )
    table = shown.pivot(index=rows, columns="name", values="cell")[names].loc[arms]
    branch = branch_name(trace, attention.branch)
    read = f"branch {branch} (of {', '.join(map(str, trace['branch'].to_numpy()))})"
    print(f"{read}: attention on its {part},{' on BOS' * has_bos} and on the released slice")
    n, prompts = int(steps["n"].iloc[0]), int(steps["prompts"].iloc[0])
    interval = f"95 % interval: {describe_intervals([prompts])}"
    print(
        f"mean over layers{' of a type' * (len(rows) > 2)} and heads; {n} texts of"
        f" {pluralize(prompts, 'prompt')} an arm; {interval}"
    )
    if attention.n_untraced:
        print(
            f"left out: {pluralize(attention.n_untraced, 'text')} that ended before a first token"
        )
    print(table.rename_axis(columns=None).to_string())
    print(f"\nC/(t+D) fitted to the curve of the {part}")
    fits = attention.fits()[["arm", "C", "D", "R2"]]
    print(as_text(fits, ".4g", "no fit"))
    if attention.by_head:
        print(f"\nheads with most attention on the {part}, mean over steps")
        top = attention.heads().largest(5, part)[["arm", "layer", "head", *names[:-1]]]
        print(as_text(top, ".4f"))
