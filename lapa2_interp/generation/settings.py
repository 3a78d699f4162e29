"""Settings of a cell: everything that a user may give.

Python, a grid file and the command line share their names.

`CellSettings` declares names, types, defaults, bounds and help. The options of `lapa2 generate` are
made from `CellSettings`; the signature of `runs.generate.generate` takes lists of them, too, and a
test compares the two. `resolve.cells_of` turns settings into cells. This module loads no torch: the
command line's help reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from lapa2_interp._util.settings import with_help
from lapa2_interp._util.values import Count, Natural, Temperature
from lapa2_interp.attention.trace import TraceKind
from lapa2_interp.bias.places import FORMS as PLACES
from lapa2_interp.bias.places import head_pairs
from lapa2_interp.bias.text_start import AUTO_START, NO_START
from lapa2_interp.errors import Lapa2Error, TraceError, unknown_choice, validation_message
from lapa2_interp.models.machine import AUTO_DTYPE, Dtype, DtypeOrAuto, ModelClass
from lapa2_interp.tasks.prompts import PROMPT_FILES
from lapa2_interp.tasks.task import Prompts

if TYPE_CHECKING:
    import torch

    from lapa2_interp.bias.augmentation import Augmentation
    from lapa2_interp.methods.base import Method
    from lapa2_interp.models.facts import Model
    from lapa2_interp.tasks.task import Task

    TorchDtype = torch.dtype
    AugmentationSetting = str | Mapping[str, Any] | Augmentation | tuple[Augmentation, ...] | None
else:  # `resolve` refuses what is none of these, in a sentence of its own
    AugmentationSetting = Method = Model = Task = TorchDtype = Any

EosPolicy = Literal["keep", "stop", "block"]
"""An end token is kept as any other, ends the text, or is never drawn."""
BannedWordsPolicy = Literal["none", "own", "all"]
"""Words that are never drawn: none, those of the attribute, or those of every attribute."""
Head = tuple[Natural, Natural]
TASK = "task"
"""The word for the task's own prompts, or for its own prefix."""
FORMS = {
    "method": "a name, or { name = ..., PARAMETER = VALUE }",
    "prompts": (
        f"{TASK}, a number of at least 1, one text, a list of texts, {PROMPT_FILES}, or"
        " { file = ..., n = ... }"
    ),
    "augmentation": (
        'none, paper, released, a recipe such as "instaboost:M=5", or { alpha = ..., law = ... }'
        " with a label = ..."
    ),
    "patterns": PLACES["heads"],
    "temperature": "a number from 1e-30 to 1e30; top_k 1 always draws the likeliest token",
}
"""Forms of the settings that take several, or whose bounds need words."""
HINTS = {
    "max_new_tokens": "length is the number of tokens of a text, which in sentiment and topic"
    " counts the prompt's",
    "max_length": "length is the number of tokens of a text",
    "do_sample": "texts are sampled; top_k=1 always takes the likeliest token",
    "greedy": "top_k=1 always takes the likeliest token",
    "num_return_sequences": "samples is the number of continuations of each prompt",
    "n_samples": "samples is the number of continuations of each prompt",
    "prompt": "prompts takes one text or a list",
    "text": "prompts takes one text or a list",
    "strength": "alpha is the strength of the bias",
    "wording": "prefix takes a form such as 'A {attribute} text:'",
    "record": "trace is 'full', 'pooled' or 'none'",
}
"""Settings by names that other libraries give them."""


class PromptFile(BaseModel):
    """Prompts in a file of the current folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: str
    n: Count
    """Number of prompts that the file must hold."""
    what: str = ""
    """Description for messages."""


class CellSettings(BaseModel):
    """Settings of one cell; of several cells if `attribute` is "all"."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
    )

    model: str | Path | Model = "smollm2-135m"
    """A name of `lapa2 models`, a hub id, a folder or a GGUF file."""
    prompts: Count | str | Path | Sequence[str | Path] | PromptFile | Prompts = TASK
    """Prompts to continue: one text, or several; task: those of the task; a number n: n of the
    task's and, beyond them, of this package's; or a file: lines (.txt), a JSON list (.json), or a
    field or column "prompt" (.jsonl, .csv, .tsv, .parquet), also compressed. What exists as a file,
    or ends like one, is a path."""
    attribute: str = "all"
    """Attribute to steer towards; all: a cell for each attribute of the task."""
    method: str | Mapping[str, Any] | Method = "prefix"
    """A decoding method of `lapa2 methods`."""
    parameters: Mapping[str, Any] | None = None
    """Parameters of the method, such as omega=60."""
    task: str | Path | Task = "sentiment"
    """A task of `lapa2 tasks`, or the path of a task file."""
    prefix: str = TASK
    """The hard prefix; task: that of the task. A form with {attribute} or {Attribute} is the prefix
    of every attribute. Other text is the prefix of the attribute, or without one needs no task
    file. It is joined to the prompt as it is, without a space, as in the paper's code. For a space
    between them, begin the prompt with one."""
    alpha: float | None = None
    """Strength of LaPA2, or of an augmentation that leaves its alpha open, >= 0; 0 is the base
    method. By default the method's own, which `lapa2 methods` shows, or the recipe's."""
    augmentation: AugmentationSetting = None
    """The bias: none; a profile (paper, released); or recipes of `lapa2 recipes` as
    NAME:PARAMETER=VALUE,... that + joins. Each takes the tokens of the prefix and all fields of a
    bias that it does not fix. Examples: lapa2:law=sqrt,layers=top;
    instaboost:M=5,heads=3.1/4.0-8,steps=0:16; lapa2:span=0:2/5:6,phase=decode;
    lapa2:span="prefix+bos"; lapa2:tokens=1 + lapa2:tokens=2,alpha=1. In Python and grids also a
    table of fields such as { law = "sqrt" }, of which each may be a list; with card = FILE the
    heads, strengths and alpha are those of a card (`lapa2 steer`, `select`, `learn`)."""
    label: str = ""
    """Name of the arm in tables and figures; by default the recipe's, or made of the fields. The
    label decides no text."""
    length: Count = 128
    """Tokens of a text. On sentiment and topic they include the prompt's, as in the paper: after a
    prompt of two tokens, length 32 makes 30 new ones. On detox and in chats all are new. A task
    file sets length_counts_prompt."""
    samples: Count = 1
    """Continuations per prompt."""
    seed: int = 1
    """Seed of the random streams. Every prompt and sample has its own, so that other prompts and
    samples do not change a text."""
    top_k: Count = 200
    """Number of tokens of largest controlled weight that are kept."""
    temperature: Temperature = 1.0
    """Controlled log-weights are divided by it before a token is drawn; below 1 likely tokens are
    drawn more often. From 1e-30 to 1e30."""
    eos: EosPolicy = "keep"
    """keep an end token as any other (the paper), stop the text there, or block it."""
    ban_words: BannedWordsPolicy = "none"
    """own: never draw a token that would say a word of the attribute's hard prefix, or its name;
    all: such a word of any attribute of the task."""
    trace: TraceKind = "full"
    """Recorded attention: full (every layer and head), pooled (their mean) or none."""
    patterns: str | Sequence[Head] = ()
    """Heads, as layer.head pairs such as 3.1,4.0-8, whose whole attention rows are kept."""
    dtype: DtypeOrAuto | TorchDtype = "float32"
    """Precision of weights and computation; auto is bfloat16 or float32, whichever this machine
    computes faster, so that its texts differ from machine to machine."""
    model_class: ModelClass = "TransformerBridge"
    """HookedTransformer needs transformer-lens 3.9; TransformersModel works without hooks, through
    transformers' attention interface."""
    max_rows: Count | None = None
    """Rows of a batch; by default 120, fewer where their cache would exceed 2 GiB."""
    doubled_bos: bool = False
    """Two BOS tokens, as the released scripts feed LLaMA."""
    start: str | None = AUTO_START
    """The token in front of the text: auto, what the model's family reads (`lapa2 probe` tells and
    measures it); none for nothing, as the paper's GPT-2 has it; usual, the token that the tokenizer
    names for it; or a token's text. Without one the prefix's first token takes the attention that
    is left over."""

    @field_validator("model", "method", "task", "augmentation", mode="plain")
    @classmethod
    def _as_given(cls, value: Any) -> Any:
        return value  # names and values of many kinds, which `resolve` reads and refuses

    @field_validator("patterns", mode="before")
    @classmethod
    def _read_heads(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) == 2 and all(type(i) is int for i in value):
            raise TraceError(
                f"patterns: takes {PLACES['heads']}; found {value}. Since a list in a grid is an"
                " axis, write all pairs as one text, or in a list more: [[[0, 0], [1, 1]]]"
            )
        return () if value in ("", ()) else head_pairs("patterns", value, TraceError)

    @field_validator("start", mode="before")
    @classmethod
    def _named_start(cls, value: Any) -> Any:
        return NO_START if value is None else value

    @field_validator("dtype", mode="plain")
    @classmethod
    def _named_dtype(cls, value: Any) -> Any:
        name = str(value).removeprefix("torch.")
        if name not in (AUTO_DTYPE, *get_args(Dtype)):
            raise ValueError(unknown_choice("dtype", name, (AUTO_DTYPE, *get_args(Dtype))))
        return name

    @field_validator("seed", "length", "samples", "top_k", "max_rows", "prompts", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any, info: Any) -> Any:
        if isinstance(value, bool):
            allowed = "input should be a number,"
            if info.field_name == "prompts":
                allowed = f"takes {FORMS['prompts']};"
            raise ValueError(f"{info.field_name}: {allowed} found {value}")
        return value

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> CellSettings:
        """Settings by name.

        Raises:
            Lapa2Error: An unknown name, or a value of another type or out of bounds.
        """
        for name in fields:
            if name not in cls.model_fields:
                raise Lapa2Error(unknown_setting(name))
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            raise Lapa2Error(validation_message(error, FORMS, cls.model_fields)) from None


def unknown_setting(name: str) -> str:
    """The sentence for a setting that does not exist."""
    sentence = unknown_choice("setting", name, CellSettings.model_fields)
    return f"{sentence}; {HINTS[name]}" if name in HINTS else sentence


def python_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as Python gives them, where arrays are lists, and a list of prompts or patterns is
    one value, and no axis."""
    values = {}
    for name, value in fields.items():
        if hasattr(value, "tolist"):  # of numpy, pandas or torch
            value = value.tolist()
        one = name in ("prompts", "patterns") and isinstance(value, list)
        values[name] = tuple(value) if one else value
    return values


P = ParamSpec("P")
T = TypeVar("T")


def settings_named(function: Callable[P, T]) -> Callable[P, T]:
    """A function of settings that refuses keyword arguments which do not exist in the sentence of
    `CellSettings`. Its docstring has the help of the settings that it says nothing else of."""
    parameters = list(signature(function).parameters)

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        for name in keywords:
            if name not in parameters:
                raise Lapa2Error(unknown_setting(name))
        return function(*arguments, **keywords)

    call.__doc__ = with_help(function.__doc__ or "", CellSettings.model_fields)
    return call
