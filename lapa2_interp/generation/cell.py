"""A cell: everything that decides a set of texts, as one frozen value with a key.

`resolve` makes cells from settings: every parameter of the method, the task's own texts and the
precision are filled in, and hashed to the key. Equal keys mean equal texts on machines of one kind,
so that a run never makes a cell twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, model_serializer, model_validator

from lapa2_interp._util.values import Count, Temperature
from lapa2_interp.attention.trace import TraceKind
from lapa2_interp.bias.augmentation import Augmentation, Augmentations, active_augmentations
from lapa2_interp.bias.text_start import NO_START, USUAL_START
from lapa2_interp.errors import AugmentationError, LayoutError, MethodError, TraceError
from lapa2_interp.generation.settings import BannedWordsPolicy, CellSettings, EosPolicy, Head
from lapa2_interp.methods.base import Branch, Method, SoftPrefixKey
from lapa2_interp.methods.chat import Chat
from lapa2_interp.methods.registry import assign_augmentations, find_class, get_for_task, load_task
from lapa2_interp.methods.registry import get as get_method
from lapa2_interp.models.machine import Dtype, ModelClass
from lapa2_interp.tasks.task import MethodSettings, Task, built_in_tasks

Key = Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{16}\z")]
"""A cell's key. A key names files, so a key that is read is nothing else."""

BASELINE = "baseline"
RESERVED_LABELS = {
    BASELINE: "the arm without an augmentation",
    "none": "no augmentation",
    "paper": "a profile",
    "released": "a profile",
}
"""Words that stand where the name of an arm or its augmentation does, and what they mean: no label
is one of them."""


class Cell(BaseModel):
    """Everything that decides a set of texts and its trace, and nothing else.

    Example:
        >>> from lapa2_interp import generate
        >>> run = generate("tiny-gpt2", "The lake", attribute="positive", length=16)
        >>> ((key, cell),) = run.by_key.items()
        >>> cell.method, cell.arm, cell.key == key
        ('prefix', 'alpha 0.5 paper', True)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str
    """A name of `lapa2 models`, a hub id, a folder or a GGUF file."""
    dtype: Dtype
    """Precision of weights and computation."""
    model_class: ModelClass
    """TransformerBridge, HookedTransformer or TransformersModel."""
    method: str
    """The decoding method, as `methods.registry.find_class` takes it."""
    parameters: dict[str, float | bool | str]
    """The method's parameters, defaults included."""
    task: Task
    """The part of the task that decides texts: attributes, this method's texts, the cell's
    prompts."""
    attribute: str
    """Attribute that the texts are steered towards."""
    augmentation: Augmentations
    """The bias on attention scores, or several that act together; None for the base method."""
    length: Count
    """Tokens of a text, its prompt's included where the task counts them."""
    samples: Count
    """Continuations per prompt."""
    seed: int
    """Seed of the random streams: there is one stream per seed, prompt and sample."""
    top_k: Count
    """Number of tokens of largest controlled weight that are kept."""
    eos: EosPolicy
    """An end token is kept, ends the text, or is never drawn (`EosPolicy`)."""
    trace: TraceKind
    """Recorded attention: "full" (layers and heads), "pooled" (their mean) or "none"."""
    max_rows: Count | None
    """Rows of a batch, which decides which samples share one; None for the default rule."""
    doubled_bos: bool
    """Two BOS tokens in front, as the released scripts feed LLaMA."""
    patterns: tuple[Head, ...]
    """(layer, head) pairs whose whole attention rows are kept."""
    ban_words: BannedWordsPolicy = "none"
    """The words of the attribute's hard prefix, and its name ("own"), or those of every attribute
    ("all") are never drawn (`generation.banned_words`)."""
    temperature: Temperature = 1.0
    """Divides the controlled log-weights; left out of JSON where it is 1."""
    start: str = USUAL_START
    """What plain text starts with: "usual", the token that the tokenizer names for it; "none"; or a
    token's text. Left out of JSON where it is the usual one."""
    files: dict[str, str] = {}
    """sha256 of the files that are read: soft prefixes by branch, word lists by parameter."""
    label: str = ""
    """Name of its arm; by default after the augmentations. The label decides no text, so it is not
    part of the key."""
    heads_of: str = ""
    """The weights whose heads a card names, which the model must have; "" without a card. They are
    not part of the key."""

    @model_serializer(mode="wrap")
    def _without_usual_values(self, serialize: Callable[[Cell], dict[str, Any]]) -> dict[str, Any]:
        fields = serialize(self)
        if self.temperature == 1:
            fields.pop("temperature", None)
        if self.start == USUAL_START:
            fields.pop("start", None)
        if not self.heads_of:
            fields.pop("heads_of", None)
        return fields

    @model_validator(mode="after")
    def _refuse(self) -> Cell:
        """Refuse what can be refused without tokenizer and model; `generation.arrange` refuses the
        rest."""
        for augmentation in self.active_augmentations:
            if type(augmentation) is not Augmentation:
                raise AugmentationError(
                    f"a cell's key cannot tell {type(augmentation).__name__} from Augmentation,"
                    " whose JSON it has; use it with augmented(...) or teacher_forced(...)"
                )
        if self.patterns and self.trace == "none":
            raise TraceError(
                "patterns are part of a trace, and trace is 'none'; record it pooled or full"
            )
        twice = [prompt for prompt, n in Counter(self.prompts).items() if n > 1]
        if twice:
            raise LayoutError(
                f"the prompt {twice[0]!r} is given twice and would draw the same texts; ask for"
                " more samples"
            )
        self.task.prefix(self.attribute)
        label = self.label
        if label and not (label.isprintable() and label == label.strip() and len(label) <= 200):
            raise AugmentationError(
                f"the label of an arm is one line of at most 200 letters, found {label!r}"
            )
        if label in RESERVED_LABELS:
            raise AugmentationError(
                f"label {label!r}: no arm is called so, since it names {RESERVED_LABELS[label]};"
                " give another label, or leave it out"
            )
        if label and not self.active_augmentations:
            raise AugmentationError(
                f"label {label!r}: the arm without an augmentation is called {BASELINE!r}; leave"
                " the label out"
            )
        return self

    @cached_property
    def key(self) -> str:
        """16 hexadecimal digits of the sha256 of the cell's canonical JSON."""
        facts = self.model_dump(mode="json", exclude={"label", "heads_of"})
        text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def decoding_method(self) -> Method:
        """The method with its parameters.

        Raises:
            MethodError: The method is MODULE:CLASS, and nobody has imported the class: a cell may
                be read from a file (`methods.registry.find_class`).
        """
        find_class(self.method)
        return get_method(self.method, **self.parameters)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts that are continued."""
        return self.task.prompts.texts

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The method's model calls."""
        return self.decoding_method.branches(self.task, self.attribute)

    @property
    def prefix_kinds(self) -> tuple[str, ...]:
        """The kinds of the branches' prefixes: hard, or the name of a soft set such as mle."""
        kinds = {
            branch.prefix.set if isinstance(branch.prefix, SoftPrefixKey) else "hard"
            for branch in self.branches
            if branch.prefix is not None or branch.chat is not None
        }
        return tuple(sorted(kinds))

    @cached_property
    def branch_augmentations(self) -> tuple[Augmentations, ...]:
        """The augmentation of each branch.

        Raises:
            AugmentationError: As `methods.registry.assign_augmentations`.
        """
        return assign_augmentations(self.decoding_method, self.branches, self.augmentation)

    @property
    def banned_words(self) -> tuple[str, ...]:
        """The words that no text may say, in small letters; usually none."""
        names = {"none": (), "own": (self.attribute,), "all": tuple(self.task.attributes)}
        words = [word for name in names[self.ban_words] for word in self.task.words(name)]
        return tuple(dict.fromkeys(words))

    @property
    def n_texts(self) -> int:
        """Number of texts: samples of every prompt, and of a chat one for each turn."""
        return self.samples * len(self.task.prompts.texts) * self.n_turns

    @property
    def keeps_turns(self) -> bool:
        """True of a chat whose earlier turns stay in the cache."""
        method = self.decoding_method
        return isinstance(method, Chat) and method.keep_turns

    @property
    def is_chat(self) -> bool:
        """True if the texts are answers of a chat, which continue no text."""
        return self.task.chat is not None

    @property
    def n_turns(self) -> int:
        """Number of answers of a chat; else 1."""
        return 1 if self.task.chat is None else self.task.chat.n_turns

    @property
    def active_augmentations(self) -> tuple[Augmentation, ...]:
        """The augmentations, none for the base method."""
        return active_augmentations(self.augmentation)

    @property
    def arm(self) -> str:
        """ "baseline", or the cell's label, or the labels of the augmentations."""
        return self.label or self.plain_arm

    @property
    def plain_arm(self) -> str:
        """The arm without the cell's own label."""
        return (
            " + ".join(augmentation.label for augmentation in self.active_augmentations) or BASELINE
        )

    @property
    def usual_arm(self) -> str:
        """The arm at the method's own alpha; "" of a custom method that is not loaded."""
        try:
            return Augmentation(alpha=self.decoding_method.alpha).label
        except MethodError:
            return ""

    @property
    def variant(self) -> str:
        """Differences from the task's default parameters and prefixes, and from the default
        settings, in words; usually empty.

        For a custom method all parameters are listed, since its module may not be imported to learn
        the defaults. For a custom task its prefixes and a hash of the method's texts are listed,
        since another file may have the task's name. Prefixes of several forms have " / " between
        them.
        """
        built_in = self.task.name in built_in_tasks()
        usual = load_task(self.task.name) if built_in else self.task
        default: dict[str, Any] = {}
        if ":" not in self.method:
            default = asdict(get_for_task(self.method, usual))  # type: ignore[call-overload]
        changed = [
            f"{name}={value}"
            for name, value in self.parameters.items()
            if default.get(name) != value
        ]
        attributes, usual_attributes = self.task.attributes, usual.attributes if built_in else {}
        if self.parameters.get("prefixes", "hard") == "hard" and attributes != usual_attributes:
            forms = [_with_slot(attribute.prefix, name) for name, attribute in attributes.items()]
            changed.append(f"prefix {' / '.join(dict.fromkeys(forms))}")
        none = MethodSettings()
        texts = self.task.methods.get(self.method, none).texts
        if texts != (usual.methods.get(self.method, none).texts if built_in else {}):
            digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
            changed.append(f"texts {digest[:6]}")
        changed += [f"{self.ban_words} prefix words banned"] * (self.ban_words != "none")
        usual_top_k = CellSettings.model_fields["top_k"].default
        changed += [f"top-k {self.top_k}"] * (self.top_k != usual_top_k)
        changed += [f"temperature {self.temperature:g}"] * (self.temperature != 1)
        changed += [f"eos {self.eos}"] * (self.eos != "keep")
        changed += ["BOS doubled"] * self.doubled_bos
        if self.start != USUAL_START:
            changed.append(f"starts with {'nothing' if self.start == NO_START else self.start}")
        changed += [self.model_class] * (self.model_class != "TransformerBridge")
        return ", ".join(changed)

    @property
    def sampling_key(self) -> str:
        """Equal for cells that draw the same texts, each for its own prompts and samples."""
        beside = dict.fromkeys(("samples", "trace", "patterns", "max_rows", "label"), True)
        return self.model_dump_json(exclude=beside | {"task": {"prompts"}})

    @property
    def description(self) -> str:
        """The cell in words, for lists and messages."""
        named = f"{self.method} ({self.variant})" if self.variant else self.method
        return f"{self.model} {self.task.name}/{self.attribute} {named}, {self.arm}"

    @property
    def columns(self) -> dict[str, Any]:
        """The cell's settings as the columns of a tidy table; of several augmentations alpha is
        NaN where they differ."""
        augmentations = self.active_augmentations
        alphas = {augmentation.alpha for augmentation in augmentations}
        return {
            "model": self.model,
            "dtype": self.dtype,
            "task": self.task.name,
            "attribute": self.attribute,
            "method": self.method,
            "variant": self.variant,
            "arm": self.arm,
            "alpha": (alphas.pop() if len(alphas) == 1 else math.nan) if augmentations else 0.0,
            "law": _words(augmentation.law for augmentation in augmentations),
            "layers": _words(str(augmentation.layers) for augmentation in augmentations),
            "profile": _words(augmentation.profile for augmentation in augmentations),
            "max_length": self.length,
            "samples": self.samples,
            "seed": self.seed,
        }


def _with_slot(prefix: str, attribute: str) -> str:
    """A prefix with {attribute} in the place of the attribute's name, where it is a word."""
    for name, slot in ((attribute.capitalize(), "{Attribute}"), (attribute, "{attribute}")):
        word = rf"(?<![\w{{]){re.escape(name)}(?![\w}}])"
        prefix = re.sub(word, slot, prefix)
    return prefix


def _words(words: Iterable[str]) -> str:
    return " + ".join(dict.fromkeys(words))


def same_label(cells: Iterable[Cell]) -> list[tuple[Cell, Cell]]:
    """Pairs of cells of one method whose arms have one name and other augmentations."""
    seen: dict[tuple[str, str], Cell] = {}
    pairs = []
    for cell in cells:
        first = seen.setdefault((cell.method, cell.arm), cell)
        if first.active_augmentations != cell.active_augmentations:
            pairs.append((first, cell))
    return pairs
