"""A cell: everything that decides a set of texts, as one frozen value with a key.

`Cell.of` makes one from names; the fields are then resolved (every parameter of the method, the
task's own texts, the precision) and hashed to the key. Equal keys mean equal texts on machines of
one kind, so that a run never makes a cell twice.

A field that is added later belongs to `LATER`: while it has its default it is left out of JSON and
key, so that keys of earlier versions stay.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from lapa2_interp._util.errors import (
    AugmentationError,
    Lapa2Error,
    LayoutError,
    MethodError,
    PrefixError,
    TaskError,
    TraceError,
    first_problem,
    unknown_choice,
)
from lapa2_interp._util.files import sha256_of
from lapa2_interp.attention.trace import TraceKind
from lapa2_interp.bias.augmentation import (
    Augmentation,
    AugmentationLike,
    Augmentations,
    active_augmentations,
    normalize_augmentations,
)
from lapa2_interp.bias.recipes import LabeledAugmentations, resolve_recipes
from lapa2_interp.bias.tokens import check_text_length
from lapa2_interp.methods.base import Branch, Method, SoftPrefixName
from lapa2_interp.methods.registry import (
    assign_augmentations,
    find_class,
    get_for_task,
    load_task,
    method_name,
)
from lapa2_interp.methods.registry import get as get_method
from lapa2_interp.models.card import Model, model_card
from lapa2_interp.models.load import expand_name as model_name
from lapa2_interp.models.machine import Dtype, resolve_dtype
from lapa2_interp.prefixes.soft_prefix import read_card, set_folder
from lapa2_interp.tasks.task import MethodSettings, Prompts, Task

EosPolicy = Literal["keep", "stop", "block"]
"""What an end token does: it is kept as any other, ends the text, or is never drawn."""
Key = Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{16}\z")]
"""A cell's key. It names files, so a key that is read is nothing else."""
TOP_K = 200
BUILT_IN_TASKS = ("detox", "sentiment", "topic")
MISSING = "0" * 64
"""Stands for the sha256 of a file that is not there."""
LATER = {"patterns": (), "bar_prefix_words": False, "label": ""}
"""Fields that came after the first keys were made, with the defaults that leave them out."""


class Cell(BaseModel):
    """Everything that decides a set of texts and its trace, and nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str
    """A name of `lapa2 models`, a hub id or a folder."""
    dtype: Dtype
    """Precision of weights and computation."""
    model_class: str
    """TransformerBridge, HookedTransformer or TransformersModel."""
    method: str
    """The decoding method, as `methods.find` takes it."""
    parameters: dict[str, float | bool | str]
    """The method's parameters, defaults included."""
    task: Task
    """The part of the task that decides texts: attributes, this method's texts, the cell's
    prompts."""
    attribute: str
    """What the texts are steered towards."""
    augmentation: Augmentations
    """The bias on attention scores, or several that act together; None for the base method."""
    length: int
    """Tokens of a text, its prompt's included where the task counts them."""
    samples: int
    """Continuations per prompt."""
    seed: int
    """Seed of the random streams: there is one stream per seed, prompt and sample."""
    top_k: int
    """How many tokens of largest controlled weight are kept."""
    eos: str
    """One of `EosPolicy`."""
    trace: str
    """One of `TraceKind`."""
    max_rows: int | None
    """Rows of a batch, which decides which samples share one; None for the default rule."""
    doubled_bos: bool
    """Two BOS tokens in front, as the released scripts feed LLaMA."""
    patterns: tuple[tuple[int, int], ...] = ()
    """(layer, head) pairs whose whole attention rows are kept."""
    bar_prefix_words: bool = False
    """The words of the attribute's hard prefix, and its name, are never drawn
    (`generation.barring`)."""
    files: dict[str, str] = {}
    """sha256 of the files that are read: soft prefixes by branch, word lists by parameter."""
    label: str = ""
    """What its arm is called; by default after the augmentations. It decides no text, so it is not
    part of the key."""

    @classmethod
    def of(
        cls,
        model: str | Path | Model,
        *,
        method: str | Method = "prefix",
        parameters: Mapping[str, Any] | None = None,
        task: str | Path | Task = "sentiment",
        attribute: str,
        prompts: Iterable[str] | None = None,
        augmentation: AugmentationLike | str = None,
        alpha: float | int | None = None,
        label: str = "",
        length: int = 128,
        samples: int = 1,
        seed: int = 1,
        top_k: int = TOP_K,
        eos: EosPolicy = "keep",
        trace: TraceKind = "full",
        patterns: Sequence[tuple[int, int]] = (),
        max_rows: int | None = None,
        doubled_bos: bool = False,
        bar_prefix_words: bool = False,
        dtype: str = "auto",
        device: str | None = None,
        model_class: str = "TransformerBridge",
        needs: list[str] | None = None,
    ) -> Cell:
        """A cell from names and values, with the defaults of `lapa2 generate`.

        Args:
            model: A model's name or folder; or a loaded model, which then decides dtype and
                model_class.
            method: A name of `lapa2 methods`, or a method from `methods.get`.
            parameters: Parameters of a method given by name; by default the task's values.
            task: A name of `lapa2 tasks`, the path of a task file, or a task.
            attribute: What to steer towards.
            prompts: What to continue; the task's prompts by default.
            augmentation: The bias, or several; by default LaPA2 at `alpha`. A text names recipes of
                published methods, such as "instaboost:M=5" (`bias.recipes.recipe`).
            alpha: Strength of LaPA2, >= 0; by default the method's own, and 0 is the base method.
            label: What the arm is called; by default the recipe's name, or the augmentations'.
            length, samples, seed, top_k, eos, trace, patterns, max_rows, doubled_bos,
                bar_prefix_words: As the fields of a cell. length counts the prompt's tokens where
                the task does (`Task.length_counts_prompt`: sentiment and topic): behind a prompt of
                two tokens, 32 are 30 new ones.
            dtype: float32, bfloat16, float16, float64; or auto: what the device computes faster.
            device: Where the texts will be made, which decides what dtype "auto" is.
            model_class: TransformerBridge, HookedTransformer or TransformersModel.
            needs: If a list is given, missing files are noted in it instead of refused.

        Raises:
            Lapa2Error: An unknown name, a value out of range, or values that do not fit together.
        """
        if prompts is not None:
            listed = isinstance(prompts, Iterable) and not isinstance(prompts, str | Mapping)
            given = tuple(prompts) if listed else ()
            if not given:
                raise LayoutError(
                    f"prompts must be a list of at least one text, found {str(prompts)!r}; a file's"
                    " come from lapa2_interp.tasks.read_prompts(PATH)"
                )
        if not isinstance(task, str | Path | Task):
            raise TaskError(f"task must be a name, a path or a Task, found {task!r}")
        if not isinstance(attribute, str):
            raise TaskError(f"attribute must be one name, found {attribute!r}")
        chosen_task = task if isinstance(task, Task) else load_task(task)
        if isinstance(method, str):
            method = get_for_task(method, chosen_task, **(parameters or {}))
        elif not isinstance(method, Method):
            raise MethodError(
                f"method must be a name, or come from methods.get or for_task, found {method!r}"
            )
        elif parameters:
            raise MethodError(
                f"{method!r} has its parameters already; give it by name, or without parameters"
            )
        rules: AugmentationLike = resolve_recipes(augmentation)
        for each in rules if isinstance(rules, Sequence) else (rules,):
            if each is not None and not isinstance(each, Augmentation):
                raise AugmentationError(
                    "augmentation must be an Augmentation, several of them, recipes as one text"
                    f" such as 'lapa2 + instaboost:M=5', or None; found {rules!r}"
                )
        if rules is None:
            rules = Augmentation(alpha=method.alpha if alpha is None else alpha)
        elif alpha is not None:
            raise AugmentationError(
                f"give alpha {alpha:g}, or an augmentation that has its own, not both"
            )
        if not label and isinstance(rules, LabeledAugmentations) and active_augmentations(rules):
            label = rules.label
        if isinstance(model, str | Path):
            facts = {
                "model": model_name(model),
                "dtype": resolve_dtype(dtype, device),
                "model_class": model_class,
            }
        else:
            card = model_card(model)
            facts = {"model": card.name, "dtype": card.dtype, "model_class": card.model_class}
        chosen_task.prefix(attribute)
        branches = method.branches(chosen_task, attribute)
        names = [branch.name for branch in branches]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise MethodError(
                f"{method.name} has two branches {twice[0]!r} for {attribute!r}; give its text in"
                f" task {chosen_task.name!r} another name"
            )
        assign_augmentations(method, branches, rules)
        settings = chosen_task.methods.get(method.name, MethodSettings())
        texts = chosen_task.prompts.texts if prompts is None else given
        for text in texts:
            if not isinstance(text, str):
                raise LayoutError(f"prompts must be texts, found {text!r}")
            check_text_length("prompt", text)
            if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
                raise LayoutError(
                    f"the prompt {text!r} has half a character of UTF-16, which UTF-8 does not"
                    " have; give whole characters"
                )
            if "\0" in text:
                raise LayoutError(
                    f"the prompt {text[:40]!r} has a NUL, which a trace cannot name; leave it out"
                )
        if "" in texts:
            raise LayoutError(
                "the prompt '' tokenises to nothing of its own; give at least one token of text"
            )
        try:
            return cls(
                **facts,
                method=method_name(method),
                parameters=asdict(method),  # type: ignore[call-overload]
                task=Task(
                    name=chosen_task.name,
                    length_counts_prompt=chosen_task.length_counts_prompt,
                    lengths=(),
                    attributes=chosen_task.attributes,
                    prompts=Prompts(texts=texts),
                    methods=(
                        {method.name: MethodSettings(texts=settings.texts)}
                        if settings.texts
                        else {}
                    ),
                ),
                attribute=attribute,
                augmentation=normalize_augmentations(rules),
                length=length,
                samples=samples,
                seed=seed,
                top_k=top_k,
                eos=eos,
                trace=trace,
                patterns=tuple(patterns),
                max_rows=max_rows,
                doubled_bos=doubled_bos,
                bar_prefix_words=bar_prefix_words,
                files=_files(facts["model"], chosen_task.name, branches, method, needs),
                label=label,
            )
        except ValidationError as error:
            raise Lapa2Error(first_problem(error)) from error

    @model_validator(mode="after")
    def _refuse(self) -> Cell:
        """Refuse what can be refused without tokenizer and model; `generation.arrange` refuses the
        rest."""
        for name in ("length", "samples", "top_k"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.max_rows is not None and self.max_rows < 1:
            raise LayoutError(f"max_rows must be at least 1, found {self.max_rows}")
        for kind, found, allowed in (
            ("eos policy", self.eos, get_args(EosPolicy)),
            ("trace", self.trace, get_args(TraceKind)),
        ):
            if found not in allowed:
                raise Lapa2Error(unknown_choice(kind, found, allowed))
        for rule in self.rules:
            if type(rule) is not Augmentation:
                raise AugmentationError(
                    f"a cell's key cannot tell {type(rule).__name__} from Augmentation, whose JSON"
                    " it has; use it with augmented(...) or teacher_forced(...)"
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
        if label and (not self.rules or label == "baseline"):
            raise AugmentationError(
                f"label {label!r}: 'baseline' is the arm without an augmentation, and no other"
                " arm; give another label, or none"
            )
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        usual = {name for name, default in LATER.items() if getattr(self, name) == default}
        return {name: value for name, value in write(self).items() if name not in usual}

    @cached_property
    def key(self) -> str:
        """16 hexadecimal digits of the sha256 of the cell's canonical JSON."""
        facts = self.model_dump(mode="json", exclude={"label"})
        text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def decoder(self) -> Method:
        """The method with its parameters.

        Raises:
            MethodError: It is MODULE:CLASS, and nobody has imported it: a cell may be read from a
                file (`methods.find`).
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
        return self.decoder.branches(self.task, self.attribute)

    @property
    def barred_words(self) -> tuple[str, ...]:
        """The words that no text may say, in small letters; usually none."""
        return self.task.words(self.attribute) if self.bar_prefix_words else ()

    @property
    def n_texts(self) -> int:
        """Number of texts: samples of every prompt."""
        return self.samples * len(self.prompts)

    @property
    def rules(self) -> tuple[Augmentation, ...]:
        """The augmentations, none for the base method."""
        return active_augmentations(self.augmentation)

    @property
    def arm(self) -> str:
        """ "baseline", or the cell's label, or the labels of the augmentations."""
        return self.label or self.plain_arm

    @property
    def plain_arm(self) -> str:
        """The arm without the cell's own label."""
        return " + ".join(rule.label for rule in self.rules) or "baseline"

    @property
    def usual_arm(self) -> str:
        """The arm at the method's own alpha; "" of a method of one's own that is not loaded."""
        try:
            return Augmentation(alpha=self.decoder.alpha).label
        except MethodError:
            return ""

    @property
    def variant(self) -> str:
        """What differs from the task's usual parameters and wording and from the usual way to
        generate, in words; usually empty.

        Of a method of one's own these are all its parameters: reading a run imports no module that
        the run names. Of a task of one's own this is the wording of its hard prefixes, too, and a
        hash of the method's own texts: another file may have the task's name. Wordings of several
        forms have " / " between them.
        """
        built_in = self.task.name in BUILT_IN_TASKS
        usual = load_task(self.task.name) if built_in else self.task
        default: dict[str, Any] = {}
        if ":" not in self.method:
            default = asdict(get_for_task(self.method, usual))  # type: ignore[call-overload]
        changed = [
            f"{name}={value}"
            for name, value in self.parameters.items()
            if default.get(name) != value
        ]
        own = {name: each.prefix for name, each in self.task.attributes.items()}
        others = {name: each.prefix for name, each in usual.attributes.items() if built_in}
        hard = self.parameters.get("prefixes", "hard") == "hard"
        # The bare name stands for what is not known (`runs.store`), so it is not told.
        if hard and any(prefix != others.get(name, name) for name, prefix in own.items()):
            forms = [_with_slot(prefix, name) for name, prefix in own.items()]
            changed.append(f"prefix {' / '.join(dict.fromkeys(forms))}")
        none = MethodSettings()
        texts = self.task.methods.get(self.method, none).texts
        if texts != (usual.methods.get(self.method, none).texts if built_in else {}):
            digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
            changed.append(f"texts {digest[:6]}")
        changed += ["prefix words barred"] * self.bar_prefix_words
        changed += [f"top-k {self.top_k}"] * (self.top_k != TOP_K)
        changed += [f"eos {self.eos}"] * (self.eos != "keep")
        changed += ["BOS doubled"] * self.doubled_bos
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
        rules = self.rules
        alphas = {rule.alpha for rule in rules}
        return {
            "model": self.model,
            "dtype": self.dtype,
            "task": self.task.name,
            "attribute": self.attribute,
            "method": self.method,
            "variant": self.variant,
            "arm": self.arm,
            "alpha": (alphas.pop() if len(alphas) == 1 else math.nan) if rules else 0.0,
            "law": _words(rule.law for rule in rules),
            "layers": _words(str(rule.layers) for rule in rules),
            "profile": _words(rule.profile for rule in rules),
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


def _words(found: Iterable[str]) -> str:
    return " + ".join(dict.fromkeys(found))


def same_label(cells: Iterable[Cell]) -> list[tuple[Cell, Cell]]:
    """Pairs of cells of one method whose arms have one name and other augmentations."""
    seen: dict[tuple[str, str], Cell] = {}
    found = []
    for cell in cells:
        first = seen.setdefault((cell.method, cell.arm), cell)
        if first.rules != cell.rules:
            found.append((first, cell))
    return found


CELL = TypeAdapter(Cell)


def _files(
    model: str,
    task: str,
    branches: Sequence[Branch],
    method: Method,
    needs: list[str] | None,
) -> dict[str, str]:
    """sha256 of the soft prefixes by branch, and of the files that decide a method's texts."""
    found = {}
    for branch in branches:
        if isinstance(branch.prefix, SoftPrefixName):
            try:
                folder = set_folder(model, task, branch.prefix.set)
                found[branch.name] = read_card(folder / f"{branch.prefix.attribute}.json").sha256
            except PrefixError as error:
                if needs is None:
                    raise
                needs.append(str(error))
                found[branch.name] = MISSING
    return found | digests(method)


def digests(method: Method) -> dict[str, str]:
    """sha256 of the files that decide a method's texts; of a folder, of the files in it."""
    found = {}
    for name, place in method.deciding_files().items():
        if place.is_file():
            found[name] = sha256_of(place)
        elif place.is_dir():
            files = sorted(each for each in place.iterdir() if each.is_file())
            listed = json.dumps([[each.name, sha256_of(each)] for each in files])
            found[name] = hashlib.sha256(listed.encode()).hexdigest()
    return found
