"""Settings of the commands `steer` and `view`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lapa2_interp._util.settings import Settings
from lapa2_interp._util.values import Count, Natural
from lapa2_interp.models.machine import DtypeOrAuto, ModelClass

if TYPE_CHECKING:
    from lapa2_interp.models.facts import Model
    from lapa2_interp.runs.run import Run
    from lapa2_interp.tasks.task import Prompts, Task
else:  # values beside names and paths, which the functions read
    Model = Prompts = Run = Task = Any


@dataclass(frozen=True)
class SteerSettings(Settings):
    """Choose heads, tune the strength of the bias, and judge it on other prompts.

    A quarter of the prompts chooses heads, a quarter finds the strength at which the bias costs the
    budget in perplexity, and the rest judges: the prefix alone, the method without bias, and with
    the bias in all heads, in random heads and in the chosen heads. With `learn` there is one more
    arm: one learned strength for each head. `out` gets texts, tables, a page (report.html), and a
    card (card.json) for `lapa2 generate --card`. The same command goes on after a stop. For example

        lapa2 steer smollm2-135m --prompts neutral.txt --out results/steer
        lapa2 steer smollm2-135m --prompts neutral.txt --learn --out results/learned
        lapa2 steer smollm2-135m --task formal.toml --prompts neutral.txt \\
            --classifiers models/formality --out results/formal
    """

    model: str | Path
    """A name of `lapa2 models`, a hub id, a folder or a GGUF file."""
    prompts: str | Path | Sequence[str | Path] | Prompts
    """At least 32 prompts, better 250, or a file of them, as `lapa2 generate --prompts` takes it:
    plain lines, or .jsonl with a field "prompt". A quarter chooses heads, a quarter tunes (64 at
    most each), the rest judges. The same text in other white space or capitals counts once."""
    task: str | Path | Task = "sentiment"
    """A name of `lapa2 tasks`, or a task file of two attributes or more, whose prefixes have equal
    lengths in tokens."""
    _: KW_ONLY
    out: str | Path
    """A folder for all results."""
    method: str = "dexperts"
    """A decoding method of `lapa2 methods`."""
    parameters: Mapping[str, Any] | None = None
    """NAME=VALUE of the method, such as omega=60; repeat the option for more. By default prefixes
    are hard and Pro-Aug is off."""
    budget: Annotated[float, Field(gt=1)] = 1.2
    """The perplexity of continuations that the bias may cost, as a multiple of that of the method
    without bias; above 1."""
    heads: Count | None = None
    """The number of heads to choose; by default 9 % of all."""
    learn: bool = False
    """Also learn one strength for each head, as `lapa2 learn` does with its defaults, from texts
    that the model writes for the prompts that choose heads. It takes much longer than to choose
    heads. Where it finds nothing, this arm is left out."""
    classifiers: Sequence[str] = ()
    """Classifiers of the attributes: linear, adapter, a hub id, a folder, or a file of `lapa2
    scorers train`. The first decides. By default linear and adapter, for tasks that have them."""
    perplexity: str | None = None
    """The model that measures perplexity; by default the model itself."""
    length: Count = 64
    """Tokens of a text, on sentiment and topic the prompt's included, as in `lapa2 generate`."""
    samples: Count = 1
    """Texts for each prompt and attribute."""
    seed: int = 1
    """Seed of the texts, of the split of the prompts, and of random heads."""
    dtype: DtypeOrAuto = "float32"
    """Precision of the texts; auto is bfloat16 or float32, whichever this machine computes faster.
    Heads are chosen in float32."""
    model_class: ModelClass = "TransformerBridge"
    """HookedTransformer needs transformer-lens 3.9; TransformersModel works without hooks, through
    transformers' attention interface, and chooses heads by knock-out."""
    device: str | None = None
    """cpu, cuda, cuda:1; CUDA when there is one, by default."""
    workers: Count | None = None
    """By default one per GPU, or per CPU core."""
    threads: Count = 1
    """CPU threads of a worker, as in `lapa2 sweep`."""
    yes: bool = False
    """Start also what reads over 10^11 tokens, or needs more memory than there is."""
    notify: Callable[[str], None] = print
    """Called with lines about what is done."""


@dataclass(frozen=True)
class ViewSettings(Settings):
    """Look into one text of a run: where every head attends at every step.

    The command writes a page, one file that loads nothing. The page shows the baseline beside an
    augmentation and their difference: the text, the attention of every step on every key, and a
    grid of layers and heads. The text is read again with the run's model, because a run keeps sums
    of attention only, and is compared with these sums. For example

        lapa2 view results/run
        lapa2 view results/run --only method=prefix --prompt "The lake" \\
            --circuits results/circuits
    """

    run: Run | str | Path
    """A run's folder."""
    _: KW_ONLY
    only: Mapping[str, Any] | None = None
    """Only cells with these values, as COLUMN=VALUE: of a run of several methods or tasks one is
    shown at a time."""
    attribute: str | None = None
    """By default the run's first."""
    prompt: str | None = None
    """The prompt, or its beginning; by default the first."""
    sample: Natural = 0
    """Which of its texts, from 0."""
    arm: str | None = None
    """The augmentation beside the baseline, as `lapa2 runs` names it; by default the paper's."""
    branch: str | None = None
    """Which branch of the method; by default the first with a prefix."""
    steps: Count = 64
    """Tokens of the text that are shown."""
    same_text: bool = False
    """Read the baseline's text in both arms, so that only the augmentation differs."""
    circuits: str | Path | None = None
    """The folder of `lapa2 circuits` on the same model and task, for the effects of heads and what
    they write."""
    bits: Literal[8, 16] | None = None
    """Of a stored number. By default 16, and 8 where the page would exceed 5 MB."""
    model: Model | None = None
    """The run's model, if it is loaded already."""
    device: str | None = None
    """cpu, cuda, cuda:1; CUDA when there is one, by default."""
    allow_code: bool = False
    """Import the module of a method MODULE:CLASS that the run names."""
    out: str | Path | None = None
    """Also save the page as this file, and replace one that is there; the command writes
    RUN/view.html by default."""
