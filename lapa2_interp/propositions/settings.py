"""Settings of the command `propositions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from lapa2_interp._util.settings import Settings
from lapa2_interp._util.values import Count, Natural, NotNegative
from lapa2_interp.models.machine import DtypeOrAuto


@dataclass(frozen=True)
class PropositionSettings(Settings):
    """Test the paper's propositions on logits made to fit or break them, and on a model.

    Does prefix attention decay as O(1/l)? Does the bias turn that into l^(alpha-1)? Where do the
    assumptions break? Verdicts are 95 % intervals against a margin around the claim: as in the
    paper, against the paper, or inconclusive. For example

        lapa2 propositions --out results/propositions
        lapa2 propositions --text book.txt --out results/both
        lapa2 propositions --text book.txt --out results/long \\
            --length 32 --alphas --free --synthetic-length 0

    where the second also reads one text up to the model's context, and the third little else: a
    text of 8,192 tokens takes SmolLM2 a minute for each alpha.
    """

    _: KW_ONLY
    out: str | Path
    """A new folder: tables/, figures/, traces (thinned) and report.html."""
    model: str = "smollm2-135m"
    """A name of `lapa2 models`, a hub id, a folder or a GGUF file."""
    alphas: Sequence[NotNegative] = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
    """The baseline's texts are read again under each of these."""
    free: Sequence[NotNegative] = (0.5, 1.0)
    """Alphas that also generate texts of their own, as in the paper's figures."""
    length: Count = 256
    """Tokens of a generated text, its prompt included."""
    samples: Count = 1
    """Texts per prompt and attribute."""
    synthetic_length: Natural = 1_000_000
    """Longest l of the synthetic logits; 0 leaves them out."""
    text: str | Path | None = None
    """A UTF-8 text file to read as one long text, behind the prefix "Very positive:" and the prompt
    "The"."""
    long_length: Annotated[int, Field(ge=8)] | None = None
    """Tokens of the long text; by default they fill the model's context."""
    long_texts: Count | None = None
    """Cut the file into as many texts (default: 1); intervals need several."""
    long_alphas: Sequence[NotNegative] | None = None
    """Alphas of the long texts; by default 0.5 and 1."""
    long_dtype: DtypeOrAuto | None = None
    """Precision in which the long texts are read; float32 by default."""
    dtype: DtypeOrAuto = "float32"
    """Precision of weights and computation. In bfloat16 attention is rounded to 3 digits, and so is
    the exact law."""
    device: str | None = None
    """cpu, cuda, cuda:1; CUDA when there is one, by default."""
    seed: Natural = 1
    """Seed of texts and synthetic logits."""
    force: bool = False
    """Replace a finished folder."""
