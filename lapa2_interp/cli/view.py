"""The command that shows a text of a run, head by head: `lapa2 view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from lapa2_interp.cli.options import Several, columns


def view(
    run: Path,
    /,
    *,
    only: Annotated[tuple[str, ...], Several] = (),
    attribute: str | None = None,
    prompt: str | None = None,
    sample: int = 0,
    arm: str | None = None,
    branch: str | None = None,
    steps: int = 64,
    same_text: bool = False,
    circuits: Path | None = None,
    bits: Literal[8, 16] | None = None,
    device: str | None = None,
    allow_code: bool = False,
    out: Path | None = None,
) -> None:
    """Write a page to look into one text of a run: where every head attends at every step.

    One file that loads nothing. It shows the baseline beside an augmentation and their difference:
    the text, the attention of every step on every key, and a grid of layers and heads. The text is
    read again with the run's model, because a run keeps sums of attention only, and is compared
    with these sums. For example

        lapa2 view results/run
        lapa2 view results/run --only method=prefix --prompt "The lake" \\
            --circuits results/circuits

    Args:
        run: A run's folder.
        only: Only cells with these values, as COLUMN=VALUE: of a run of several methods or tasks
            one is shown at a time.
        attribute: By default the run's first.
        prompt: The prompt, or its beginning; by default the first.
        sample: Which of its texts, from 0.
        arm: The augmentation beside the baseline, as `lapa2 runs` names it; by default the paper's.
        branch: Which branch of the method; by default the first with a prefix.
        steps: Tokens of the text that are shown.
        same_text: Read the baseline's text in both arms, so that only the augmentation differs.
        circuits: The folder of `lapa2 circuits` on the same model and task, for the effects of
            heads and what they write.
        bits: Of a stored number. By default 16, and 8 where the page would exceed 5 MB.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        allow_code: Import the module of a method MODULE:CLASS that the run names.
        out: The file; by default RUN/view.html. One that is there is replaced.
    """
    from lapa2_interp.report.viewer import view as make_view

    found = make_view(
        run,
        only=columns(only),
        attribute=attribute,
        prompt=prompt,
        sample=sample,
        arm=arm,
        branch=branch,
        steps=steps,
        same_text=same_text,
        circuits=circuits,
        bits=bits,
        device=device,
        allow_code=allow_code,
    )
    file = found.save(run / "view.html" if out is None else out)
    for each in found.text.arms:
        told = "not recorded" if each.off is None else f"{each.off:.1e} from the recorded attention"
        print(f"{each.arm}: {len(each.tokens)} tokens read again, {told}")
    print(f"{file} ({file.stat().st_size / 1e6:.1f} MB, {found.data['bits']} bits a number)")
