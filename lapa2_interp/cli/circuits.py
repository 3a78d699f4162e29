"""The command that asks which heads carry the control: `lapa2 circuits`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from lapa2_interp.cli.options import Several, Unshown
from lapa2_interp.machine import Dtype


def circuits(
    model: str,
    /,
    *,
    task: str = "sentiment",
    out: Path,
    attribute: str | None = None,
    prompt: Annotated[tuple[str, ...], Several, Unshown] = (),
    tokens: int = 32,
    samples: int = 1,
    best: int = 24,
    seed: int = 1,
    dtype: Dtype = "float32",
    device: str | None = None,
    model_class: Literal["TransformerBridge", "TransformersModel"] = "TransformerBridge",
    trust_remote_code: bool = False,
) -> None:
    """Find the heads that carry a task's control, and write a page about them.

    The same texts are read behind opposite prefixes. What a prefix does to the next token is the
    control. How much of it is lost when a head cannot see the prefix is what that head carries.
    Layers, KV heads, heads and tokens of the prefix are knocked out one by one. The best heads are
    also knocked out in other ways, and several at a time, and what heads write is read directly.
    Finished knock-outs are kept: the same command goes on where it stopped. For example

        lapa2 circuits planted --task sentiment --out results/planted
        lapa2 circuits smollm2-135m --task sentiment --out results/circuits

    Args:
        model: A name of `lapa2 models`, a hub id or a folder. planted has a known circuit.
        task: A task of two attributes or more whose prefixes have equal lengths in tokens.
        out: The folder of tables and page (report.html).
        attribute: The target; by default the task's first.
        prompt: Prompts, instead of the task's. Fewer than 8 give numbers and no claims.
        tokens: Tokens of each text that are scored.
        samples: Texts of each prompt.
        best: How many of the best heads are tested again with the other replacements and phases. As
            many random heads are added.
        seed: Of the texts.
        dtype: Precision of weights and computation.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        model_class: TransformersModel works without hooks, and does not tell what heads write.
        trust_remote_code: Run code that comes with the model.
    """
    from lapa2_interp.circuits.study import study
    from lapa2_interp.machine import tell_if_slow
    from lapa2_interp.models import load_model

    tell_if_slow(dtype, device)
    loaded = load_model(model, dtype, device, model_class, trust_remote_code)
    found = study(
        loaded,
        task,
        out,
        attribute=attribute,
        prompts=prompt or None,
        tokens=tokens,
        samples=samples,
        seed=seed,
        best=best,
    )
    print(f"\n{found.answer()}\n\nwritten: {out / 'report.html'}")
