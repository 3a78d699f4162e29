"""Settings of the commands `prefix train | evaluate | score | import`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic.dataclasses import dataclass

from lapa2_interp._util.settings import Settings, silent
from lapa2_interp._util.values import Count, Positive
from lapa2_interp.models.machine import Dtype, DtypeOrAuto

if TYPE_CHECKING:
    from lapa2_interp.tasks.task import Task
else:  # a value beside names and paths, which the function reads
    Task = Any


@dataclass(frozen=True)
class PrefixTrainingSettings(Settings):
    """Train a task's soft prefixes for a frozen model; the same command resumes.

    Writes one `<attribute>.safetensors` and one card, `<attribute>.json`, per attribute; generate
    with them by `--set prefixes=FOLDER`. For example

        lapa2 prefix train --task sentiment --data imdb --out results/sentiment-mle
        lapa2 prefix train --task sentiment --data reviews.jsonl \\
            --objective contrastive --set lr=0.03 --out results/contrastive
    """

    _: KW_ONLY
    out: str | Path
    """The set's folder."""
    data: Sequence[str]
    """imdb, sst2 or agnews from the hub, or a file (.jsonl, .csv, .parquet, also compressed) with
    fields text and label, whose labels are the task's attributes; repeat the option for more."""
    held_out: Sequence[str] = ()
    """The same, never trained on: the loss of one half decides when to stop, the other half gives
    the cards' numbers. By default 250 texts per attribute are held out of the data."""
    model: str = "smollm2-135m"
    """A name of `lapa2 models`, a hub id, a folder or a GGUF file."""
    task: str | Path | Task = "sentiment"
    """A task of `lapa2 tasks`, or the path of a task file."""
    attributes: Sequence[str] = ()
    """Train only these; by default all attributes of the task."""
    objective: Literal["mle", "contrastive"] | None = None
    """mle: each prefix alone, likelihood of its texts. contrastive: all together, told apart."""
    parameterisation: Literal["direct", "air", "mlp", "linear"] | None = None
    """direct, air (Air-Decoding), mlp (Prefix-Tuning) or linear (Con-Prefix)."""
    recipe: str = "small"
    """small (two cores), or a paper's: lapa2, air, con-prefix, prefix-tuning."""
    start_from: str | Path | None = None
    """Begin with the prefixes of this set."""
    changes: Mapping[str, Any] | None = None
    """Fields of the recipe, such as lr=0.03 (`lapa2 prefix recipes` lists them)."""
    device: str | None = None
    """cpu, cuda, cuda:1; CUDA when there is one, by default."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    report: Callable[[str], None] = silent
    """Called with a line about each corpus."""


@dataclass(frozen=True)
class PrefixEvaluationSettings(Settings):
    """Measure sets of soft prefixes on held-out text, and write the numbers into their cards."""

    folders: Sequence[str | Path]
    """Sets of one task and model: folders of `lapa2 prefix train --out`. Hard prefixes are measured
    once for all."""
    _: KW_ONLY
    data: Sequence[str]
    """As in `lapa2 prefix train`; of corpora on the hub the test split is read."""
    task: str | Path | Task | None = None
    """The task; the one the set was trained for, by default."""
    limit: Count = 250
    """Texts per attribute, shared evenly among the data."""
    max_tokens: Count = 64
    """Tokens of each text that are read, from its beginning."""
    dtype: Dtype = "float32"
    """Precision of weights and computation."""
    device: str | None = None
    """cpu, cuda, cuda:1; CUDA when there is one, by default."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    report: Callable[[str], None] = silent
    """Called with a line about each corpus."""


@dataclass(frozen=True)
class PrefixImportSettings(Settings):
    """Bring a soft prefix that other code trained into a set of this package.

    Reads PEFT's prefix-tuning adapters (a folder with adapter_config.json), checkpoints of
    Air-Decoding and of the released LaPA2 code, and this package's own prefixes (to attach one to
    the same model from another place). For example

        lapa2 prefix import ckpt-2/pytorch_model.bin --model gpt2-medium \\
            --task topic --attribute world --out results/air-topic
    """

    source: str | Path
    """The adapter's folder, the checkpoint, or a .safetensors of this package."""
    _: KW_ONLY
    out: str | Path
    """The set's folder; the prefix is added to it."""
    model: str
    """The model it was trained for."""
    task: str | Path | Task
    """The task its attribute belongs to."""
    attribute: str
    """What it steers towards."""
    set_name: str = "imported"
    """What the card calls the set."""
    number: int | None = None
    """Which prefix of an Air-Decoding checkpoint; by default the attribute's (0-7: positive,
    negative, world, sports, business, science, nontoxic, toxic)."""
    other_base: bool = False
    """Accept a prefix whose file names another model than this one, because you know that the two
    are the same. The card records that model."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


@dataclass(frozen=True)
class PrefixAccuracySettings(Settings):
    """Generate behind soft prefixes, without and with LaPA2; put the accuracy into their cards."""

    folders: Sequence[str | Path]
    """Sets: folders of `lapa2 prefix train --out`."""
    _: KW_ONLY
    task: str | None = None
    """The task; the one a set was trained for, by default."""
    samples: Count = 4
    """Texts per prompt of the task."""
    length: Count = 64
    """Tokens of a text, the prompt's included where the task counts them."""
    alpha: Positive = 0.5
    """Strength of LaPA2, above 0: 0 is the baseline beside it."""
    classifier: str = "both"
    """adapter or linear, which ship, both, or a sequence classifier: hub id or folder."""
    dtype: DtypeOrAuto = "float32"
    """Precision of weights and computation; auto is bfloat16 or float32, whichever this machine
    computes faster."""
    device: str | None = None
    """cpu, cuda, cuda:1; CUDA when there is one, by default."""
    seed: int = 1
    """Seed of the random streams."""
    trust_remote_code: bool = False
    """Run code that comes with a model."""
