"""The commands of the paper: `lapa2 propositions | report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from lapa2_interp.cli.options import Several
from lapa2_interp.models.machine import Dtype, print_if_slow


def propositions(
    *,
    out: Path,
    model: str = "smollm2-135m",
    alphas: Annotated[tuple[float, ...], Several] = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0),
    free: Annotated[tuple[float, ...], Several] = (0.5, 1.0),
    length: int = 256,
    samples: int = 1,
    synthetic_length: int = 1_000_000,
    text: Path | None = None,
    long_length: int = 0,
    long_texts: int = 1,
    long_alphas: Annotated[tuple[float, ...], Several] = (0.5, 1.0),
    dtype: Dtype = "float32",
    long_dtype: Dtype = "float32",
    device: str | None = None,
    seed: int = 1,
    force: bool = False,
) -> None:
    """Test the paper's propositions on logits made to fit or break them, and on a model.

    Does prefix attention decay as O(1/l)? Does the bias turn that into l^(alpha-1)? Where do the
    assumptions break? Verdicts are 95 % intervals against a margin around the claim: as in the
    paper, against the paper, or inconclusive. For example

        lapa2 propositions --out results/propositions
        lapa2 propositions --text book.txt --out results/long

    where the second also reads one text up to the model's context.

    Args:
        out: A new folder: tables/, figures/, traces and report.html.
        model: A name of `lapa2 models`, a hub id or a folder.
        alphas: The baseline's texts are read again under each of these.
        free: Alphas that also generate texts of their own, as in the paper's figures.
        length: Tokens of a generated text, its prompt included.
        samples: Texts per prompt and attribute.
        synthetic_length: Longest l of the synthetic logits; 0 leaves them out.
        text: A UTF-8 text file to read as one long text, behind the prefix "Very positive:" and the
            prompt "The".
        long_length: Tokens of the long text; 0 fills the model's context.
        long_texts: Cut the file into as many texts; intervals need several.
        long_alphas: Alphas of the long texts.
        dtype: Precision of weights and computation. In bfloat16 attention is rounded to 3 digits,
            and so is the exact law.
        long_dtype: The same for the long texts.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        seed: Seed of texts and synthetic logits.
        force: Replace a finished folder.
    """
    from lapa2_interp.paper.proposition_study import PropositionStudy, write_proposition_study

    for name in dict.fromkeys((dtype, long_dtype)):
        print_if_slow(name, device)
    study = PropositionStudy(
        model=model,
        dtype=dtype,
        device=device,
        alphas=alphas,
        free=free,
        length=length,
        samples=samples,
        seed=seed,
        synthetic_length=synthetic_length,
        text=text,
        long_length=long_length,
        long_texts=long_texts,
        long_alphas=long_alphas,
        long_dtype=long_dtype,
    )
    print(write_proposition_study(out, study, force))


def report(run: Path, /, *, tables: Path | None = None, out: Path | None = None) -> None:
    """Write a run's page: tables, figures, claims, and texts coloured by their attention.

    One file that loads nothing, to open in a browser or send to somebody. It shows what is there,
    and lists the cells that are missing. Tables and claims are those of the paper's items (`python
    analyses/ITEM.py RUN`); a run of your own grids has its texts and cells, and its scores from
    `lapa2 score RUN`. Pages of `lapa2 view` that lie beside it (view*.html) are linked. For example

        lapa2 report results/quick
        lapa2 report results/quick --tables again/tables --out again/report.html

    Args:
        run: The folder of `lapa2 sweep`.
        tables: The folder of the items' tables, with figures/ beside it; by default RUN/tables.
        out: The file; by default RUN/report.html. One that is there is replaced.
    """
    from lapa2_interp.report.run_page import write_report
    from lapa2_interp.runs.run import load_run

    file = write_report(load_run(run), tables, out)
    print(f"{file} ({file.stat().st_size / 1e6:.1f} MB)")
