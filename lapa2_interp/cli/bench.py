"""The command that times: `lapa2 bench`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

from lapa2_interp.cli.options import Several, Unshown
from lapa2_interp.models.machine import Dtype


def bench(
    *,
    shape: Annotated[
        tuple[Literal["gpt2-small", "gpt2-medium", "smollm2-135m", "llama-7b", "tiny-gpt2"], ...],
        Several,
    ] = ("gpt2-small",),
    method: Literal["prefix", "air-decoding", "preadd"] | None = None,
    only: Annotated[
        tuple[
            Literal[
                "transformers-eager",
                "transformers-sdpa",
                "transformer-lens",
                "unpacked",
                "packed",
                "packed-transformers",
                "roofline",
            ],
            ...,
        ],
        Several,
        Unshown,
    ] = (),
    samples: Annotated[tuple[int, ...], Several, Unshown] = (),
    context: Annotated[tuple[int, ...], Several] = (64,),
    length: int = 64,
    dtype: Annotated[tuple[Dtype, ...], Several, Unshown] = (),
    trace: Literal["none", "pooled", "full"] = "pooled",
    device: str | None = None,
    threads: int | None = None,
    repeats: int = 3,
    breakdown: bool = False,
    out: Path | None = None,
) -> None:
    """Time how fast texts are made here, beside plain transformers and TransformerLens.

    All decode the same number of texts with the same weights, in turns; ratios come first. Of a
    method of several branches, peers read one branch after another, and neither combine nor draw;
    for the method prefix, transformers' `generate` draws. Plain transformers adds no bias. Ours
    does all of it and records attention. For example

        lapa2 bench --shape tiny-gpt2 --samples 4 --length 16
        lapa2 bench --shape gpt2-small --samples 1 4 20 --threads 2 --breakdown --out results/bench
        lapa2 bench --shape smollm2-135m --trace full --only transformers-sdpa packed

    Args:
        shape: Models: smollm2-135m with its own weights, the others with random ones. llama-7b
            needs a GPU.
        method: By default air-decoding (three branches), and prefix (one) for smollm2-135m.
        only: Some of the contenders. unpacked and packed are this package, packed-transformers
            this package without TransformerLens; roofline is the time of
            the matrix products alone, each by the fastest of F.linear, oneDNN and packed weights.
        samples: Texts made together, all of one prompt; by default 1, 4 and 20, with prefix 3
            and 24.
        context: Tokens of the prompt.
        length: New tokens of each text.
        dtype: By default float32, and bfloat16 where this machine computes faster in it.
        trace: The attention that ours records.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        threads: CPU threads; by default as many as PyTorch takes.
        repeats: Timed runs of each; the quickest counts.
        breakdown: Also show which parts of a step take how much of it.
        out: A new folder for bench.csv, bench.md and bench.png.
    """
    from lapa2_interp._util.files import result_folder
    from lapa2_interp.runs import speed

    with nullcontext() if out is None else result_folder(out) as folder:
        found = speed.bench(
            shape,
            method,
            only,
            samples,
            context,
            length,
            dtype,
            trace,
            device,
            threads,
            repeats,
            breakdown,
            announce=lambda line: print(line, flush=True),
        )
        print(found.markdown.partition("\n")[2], end="")
        if folder is not None:
            found.write(folder)
    if out is not None:
        print(f"\nwritten: {out}")
