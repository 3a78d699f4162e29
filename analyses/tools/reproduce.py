"""Every figure and table of the paper, from nothing: sweep the scale's grids, run all scripts,
write the report.

    python analyses/tools/reproduce.py --scale tiny     # about 40 minutes on two cores
    python analyses/tools/reproduce.py --scale quick    # the default model, a day of two cores
    python analyses/tools/reproduce.py --scale paper    # the paper's models and settings, GPUs

The scale tiny makes everything, of texts that are far too few and too short to tell anything.
What is finished is never made again, so stop and repeat as you like. `lapa2 grids` says before what
a scale takes. The analysis scripts get --scorers, --perplexity and --device, such as --scorers
sentiment:accuracy=MODEL topic:accuracy=OTHER toxicity=MODEL:LABEL perplexity=gpt2-large.

A scale can be made in pieces, on several machines: --grids names some of its grids, and --beside
the results of the others. What this run does not make is taken from there.

    python analyses/tools/reproduce.py --grids quick/alpha --out results/alpha --beside \\
        figures/paper/quick
"""

from __future__ import annotations

import argparse
import runpy
import shutil
import sys
import traceback
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from analyses.lab import ANALYSES
from analyses.lab.claims import (
    MARGINS,
    ItemClaims,
    count_verdicts,
    deciding_p_values,
    format_claims,
    read_claims,
    summarize_disagreement,
    unique_comparisons,
)
from analyses.lab.gallery import gallery_run, read_gallery
from analyses.lab.gallery_page import write_gallery_report
from analyses.lab.output import merge_item
from analyses.lab.pages import ITEM_ORDER, OURS, grid_of, page_of
from analyses.lab.power import required_prompts
from analyses.lab.scripts import ScriptOptions, add_scoring, whole_number
from lapa2_interp.cli.app import main as lapa2
from lapa2_interp.errors import Lapa2Error, NoGridError, RunError, unknown_choice
from lapa2_interp.files import write_text
from lapa2_interp.runs.grid import built_in, load_grid, parse_changes
from lapa2_interp.runs.run import load_run
from lapa2_interp.table_formats import as_markdown

ITEMS = (*ITEM_ORDER, "placement", *OURS)
"""Items in the order of the report; those of the paper have their pages in analyses/paper/."""
JOINED = ("prefix_types", "local_attn", "cases")
"""Items of several grids: with --beside they keep the rows that this run does not make."""
SCALES = {
    "tiny": ("quick", ["samples=1", "prompts=4", "length=48"]),
    "quick": ("quick", []),
    "paper": ("paper", []),
}
"""Folder of a scale's grids, and changes of their settings."""


TITLES = {"paper": "The paper's claims", "ours": "Ours, not the paper's"}
"""Titles of the tables of verdicts.md, by whose claims."""


def run_script(file: Path, *arguments: str) -> str:
    """Run a script as if from the command line; returns its error, or "".

    Raises:
        NoGridError: The run lacks the script's grids.
    """
    before = sys.argv
    sys.argv = [str(file), *arguments]
    try:
        runpy.run_path(str(file), run_name="__main__")
    except NoGridError:
        raise
    except Lapa2Error as error:
        return f"error: {error}"
    except SystemExit as ended:
        return "" if not ended.code else traceback.format_exc()
    except Exception:
        return traceback.format_exc()
    finally:
        sys.argv = before
    return ""


def collect_verdicts(tables: Path) -> pd.DataFrame:
    """Write all claims of all items to verdicts.csv, and each comparison once to verdicts.md, by
    corrected p-value, the paper's and ours separately."""
    files = [tables / f"{item}.claims.csv" for item in ITEMS]
    frames = [claims for file in files if file.is_file() and len(claims := read_claims(file))]
    claims = pd.concat([ItemClaims("").frame(), *frames], ignore_index=True)
    tables.mkdir(exist_ok=True)  # every script may have failed
    claims.to_csv(tables / "verdicts.csv", index=False, float_format="%.6g")
    pages = [
        as_markdown(title, *format_by_p_value(part))
        for whose, title in TITLES.items()
        if len(part := claims[claims["whose"] == whose])
    ]
    if pages:
        write_text(tables / "verdicts.md", "\n".join(pages))
    return claims


def format_by_p_value(claims: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Claims as text, each comparison once, by corrected p-value; and the notes under the table."""
    once = unique_comparisons(claims)
    items = claims[claims["compared"] != ""].groupby("compared")["item"].unique()
    once = once.assign(
        items=[
            ", ".join(items.get(compared, [item]))
            for compared, item in zip(once["compared"], once["item"], strict=True)
        ]
    )
    by_p_value = deciding_p_values(once).sort_values(["holm", "p"], kind="stable").index
    once = once.loc[by_p_value]
    # The claims as text, with the prompts that would decide the inconclusive ones.
    shown = format_claims(once)
    shown.insert(1, "item", once["items"])
    needed = required_prompts(claims).reindex(once.index).where(once["verdict"] == "inconclusive")
    shown.insert(
        list(shown).index("prompts") + 1,
        "required_prompts",
        ["" if pd.isna(number) else f"{number:.0f}" for number in needed],
    )
    return shown, [
        (
            f"{count_verdicts(claims)}. 95 % intervals, paired on prompts. Verdicts hold after"
            f" Holm's correction of p over an item's claims; {count_verdicts(claims, 'raw')}"
            f" without it. {summarize_disagreement(claims)}"
        ),
        (
            "no difference: smaller than "
            + ", ".join(f"{margin:g} ({metric})" for metric, margin in MARGINS.items())
            + " by two one-sided tests (the 90 % interval is inside), margins that were stated"
            " before."
        ),
        (
            "required_prompts: prompts that would decide an inconclusive claim in 80 % of runs,"
            " whatever the true difference is (a claim of no difference: if there is none), with"
            " as many texts of each prompt; empty where none would."
        ),
    ]


def check_beside(folder: Path) -> None:
    """Check a folder for `copy_beside`.

    Raises:
        RunError: The folder has no tables, or tables of another version of the package.
    """
    if not (folder / "tables").is_dir():
        raise RunError(
            f"--beside {folder} has no tables/; give a folder such as figures/paper/quick"
        )
    read_gallery(folder)
    for file in sorted((folder / "tables").glob("*.claims.csv")):
        read_claims(file)


def copy_beside(folder: Path, out: Path, own: Collection[str]) -> None:
    """Copy the tables and figures of other grids to OUT.

    Args:
        own: The items that this run has made; they stay.
    """
    figures = folder / "figures" if (folder / "figures").is_dir() else folder
    for source, target in ((folder / "tables", out / "tables"), (figures, out / "figures")):
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.glob("*.*")):
            wanted = source.name == "tables" or file.suffix in (".png", ".pdf")
            if wanted and file.name.partition(".")[0] not in ("verdicts", *own):
                shutil.copy(file, target)


def failed_since(began: datetime, out: Path) -> bool:
    """True if cells have failed since then. Otherwise the sweep was refused or interrupted, and it
    is too early to score."""
    if not (out / "run.json").is_file():
        return False
    return any(failure.when >= began for failure in load_run(out).failures.values())


def main() -> int:
    """Run everything; the exit code, 1 if a cell or a script failed."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="quick")
    parser.add_argument("--out", type=Path, help="the run folder; by default results/SCALE")
    parser.add_argument("--grids", nargs="+", metavar="GRID", help="these grids of the scale alone")
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="FOLDER",
        help="results of the other grids: figures/paper/quick",
    )
    parser.add_argument(
        "--items",
        nargs="+",
        choices=ITEMS,
        default=ITEMS,
        metavar="ITEM",
        help=f"these alone, of {', '.join(ITEMS)}",
    )
    parser.add_argument(
        "--no-sweep", action="store_true", help="take the run as it is; tables show what is missing"
    )
    parser.add_argument("--engine", choices=("local", "ray"), help="of `lapa2 sweep`")
    parser.add_argument("--workers", type=whole_number(), help="of `lapa2 sweep`")
    parser.add_argument("--address", help="of `lapa2 sweep`")
    add_scoring(parser, None, None)
    options = parser.parse_args()
    # Options that go to the scripts, and the scale.
    for name in ("grids", "engine", "workers", "address"):
        if options.no_sweep and getattr(options, name):
            parser.error(f"--{name} belongs to a sweep, and --no-sweep makes none; leave one out")
    asked_of_scripts = ["--dtype", options.dtype]
    if options.scorers:
        asked_of_scripts += ["--scorers", *options.scorers]
    if options.perplexity:
        asked_of_scripts += ["--perplexity", str(options.perplexity)]
    if options.device:
        asked_of_scripts += ["--device", options.device]
    out = options.out or Path("results") / options.scale
    folder, changes = SCALES[options.scale]
    if options.beside:
        check_beside(options.beside)
    # 1. Sweep the grids.
    stopped = 0
    if not options.no_sweep:
        grids = [name for name in built_in() if name.startswith(f"{folder}/")]
        if folder == "quick":
            grids += [grid_of(item) for item in OURS]
        by_name = {Path(name).stem: name for name in grids}
        wanted = [Path(name).stem for name in options.grids or by_name]
        for name in wanted:
            if name not in by_name:
                raise RunError(unknown_choice("grid", name, list(by_name)))
        grids = [by_name[name] for name in wanted]
        asked = [word for change in changes for word in ("--set", change)]
        for name in ("engine", "workers", "address"):
            if value := getattr(options, name):
                asked += [f"--{name}", str(value)]
        for name in list(grids):
            grid = load_grid(name, parse_changes(changes), check=False)
            if grid.needs and Path(name).stem in OURS:
                print(f"{grid.name} is left out: {'; '.join(grid.needs)}", file=sys.stderr)
                grids.remove(name)
        print("cells first; then scores, tables and figures", file=sys.stderr)
        began = datetime.now(UTC)
        stopped = lapa2(["sweep", *grids, *asked, "--out", str(out)])
        if stopped and not (stopped == 2 and failed_since(began, out)):
            return stopped
    # 2. Run the page of every item.
    items, failed, left_out = options.items, {}, []
    for number, item in enumerate(items, 1):
        print(f"[{number}/{len(items)}] {item}", file=sys.stderr)
        try:
            if problem := run_script(page_of(item), str(out), *asked_of_scripts):
                failed[item] = problem
        except NoGridError:
            left_out.append(item)
    # 3. Add the results of the other grids.
    own = [item for item in items if item not in left_out]
    made = gallery_run(load_run(out), out / "tables", own)
    if options.beside:
        copy_beside(options.beside, out, own)
        for item in own:
            merged = item in JOINED and merge_item(item, options.beside / "tables", out / "tables")
            if merged and (out / "figures" / f"{item}.png").is_file():
                run_script(page_of(item), str(out), "--draw")
    # 4. Write verdicts, results.json and the page.
    claims = collect_verdicts(out / "tables")
    gallery = read_gallery(options.beside or out / "none").with_run(made)
    write_text(out / "results.json", gallery.model_dump_json(indent=1) + "\n")
    print(write_gallery_report(out))
    # 5. Print failures and the numbers of verdicts.
    for name, problem in failed.items():
        print(f"\n{page_of(name).relative_to(ANALYSES.parent)} failed:\n{problem}", file=sys.stderr)
    if left_out:
        print(f"\nleft out, as the run has no grid of theirs: {', '.join(left_out)}")
    done = len(items) - len(failed) - len(left_out)
    print(f"\n{done} of {len(items)} items")
    for whose, title in TITLES.items():
        if len(part := claims[claims["whose"] == whose]):
            print(f"{title}: {count_verdicts(part)}. {summarize_disagreement(part)}".rstrip())
    print(f"tables, figures and report.html in {out}")
    return int(bool(failed or stopped))


if __name__ == "__main__":
    sys.exit(main())
