"""The command `lapa2 steer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from lapa2_interp.cli.options import Changes, Several, Unshown, method_parameters
from lapa2_interp.models.machine import DtypeOrAuto, ModelClass


def steer(
    model: str,
    /,
    *,
    prompts: Path,
    out: Path,
    task: str = "sentiment",
    method: str = "dexperts",
    parameters: Changes = (),
    budget: float = 1.2,
    heads: int | None = None,
    classifiers: Annotated[tuple[str, ...], Several, Unshown] = (),
    perplexity: str | None = None,
    length: int = 64,
    samples: int = 1,
    seed: int = 1,
    dtype: DtypeOrAuto = "auto",
    device: str | None = None,
    model_class: ModelClass = "TransformerBridge",
    workers: int | None = None,
    yes: bool = False,
) -> None:
    """Choose heads, tune the strength of the bias, and judge it on other prompts.

    A quarter of the prompts chooses heads, a quarter finds the strength at which the bias costs the
    budget in perplexity, and the rest judges: the prefix alone, the method without bias, and with
    the bias in all heads, in random heads and in the chosen heads. --out gets texts, tables, a page
    (report.html), and a card (selection.json) for `lapa2 generate --selection`. The same command
    goes on after a stop. For example

        lapa2 steer smollm2-135m --prompts neutral.txt --out results/steer
        lapa2 steer smollm2-135m --task formal.toml --prompts neutral.txt \\
            --classifiers models/formality --out results/formal

    Args:
        model: A name of `lapa2 models`, a hub id or a folder.
        prompts: A file of at least 32 prompts, better 250, as `lapa2 generate --prompts` takes it:
            plain lines, or .jsonl with a field "prompt".
        out: A folder for all results.
        task: A name of `lapa2 tasks`, or a task file of two attributes or more, whose prefixes have
            equal lengths in tokens.
        method: A decoding method of `lapa2 methods`.
        parameters: NAME=VALUE of the method, such as omega=60; repeat the option for more. By
            default prefixes are hard and Pro-Aug is off.
        budget: The perplexity of continuations that the bias may cost, as a multiple of that of
            the method without bias; above 1.
        heads: The number of heads to choose; by default 9 % of all.
        classifiers: Classifiers of the attributes: linear, adapter, a hub id, a folder, or a file
            of `lapa2 scorers train`. The first decides. By default linear and adapter, for tasks
            that have them.
        perplexity: The model that measures perplexity; by default the model itself.
        length: Tokens of a text, as in `lapa2 generate`.
        samples: Texts for each prompt and attribute.
        seed: Seed of the texts, of the split of the prompts, and of random heads.
        dtype: Precision of the texts; auto is bfloat16 or float32, whichever this machine computes
            faster. Heads are chosen in float32.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        model_class: HookedTransformer needs transformer-lens 3.9; TransformersModel works without
            hooks, through transformers' attention interface, and chooses heads by knock-out.
        workers: By default one per GPU, or per CPU core.
        yes: Start also what would take a year, or more memory than there is.
    """
    from lapa2_interp.report.steer import steer as run_steer

    found = run_steer(
        model,
        task,
        prompts,
        out=out,
        method=method,
        parameters=method_parameters(method, parameters),
        budget=budget,
        heads=heads,
        classifiers=classifiers,
        perplexity=perplexity,
        length=length,
        samples=samples,
        seed=seed,
        dtype=dtype,
        model_class=model_class,
        device=device,
        workers=workers,
        yes=yes,
    )
    print(f"\n{found.summary()}\n{found.selection.gain}")
    print(f"\nwritten: {out / 'report.html'}; {found.next_step(task, prompts, device)}")
