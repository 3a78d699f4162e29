"""Soft prefixes: trained keys and values that stand before a text in every layer.

A prefix is `NAME.safetensors` with the tensors `keys` and `values`, [layer, kv_head, slot, d_head],
exactly as the model's cache holds them (after rotation and after biases), beside `NAME.json`, a
card. A folder of such pairs, one per attribute, is a set.

There are two conventions of position, and a prefix works only in the one it was trained in (the
card's `shifted`):

    unshifted    the text's positions start at 0, as without a prefix (Air-Decoding, the released LaPA2 code)
    shifted      they start after the slots (Prefix-Tuning, PEFT, Con-Prefix: whatever passes a prefix as past keys and values)
"""  # noqa: E501

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jaxtyping import Float
from pydantic import BaseModel, BeforeValidator, ConfigDict

from lapa2_interp._util.parsing import parse_object, read_text
from lapa2_interp.bias.text_start import AUTO_START, USUAL_START, start_setting
from lapa2_interp.commands import command
from lapa2_interp.errors import PrefixError, parameter, validation_message
from lapa2_interp.files import atomic_write, cache_folder, result_folder, sha256_of, write_json
from lapa2_interp.models.card import identify
from lapa2_interp.models.configuration import is_hybrid, kv_shapes
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.weights import ADAPTER
from lapa2_interp.stats import Interval

if TYPE_CHECKING:
    from torch import Tensor


SHIPPED_SETS = Path(__file__).parent / "shipped"
"""Sets that come with the package: `<model>/<task>-<set>/<attribute>`."""
RESERVED_SETS = {
    "hard": "the task's texts",
    "mle": "the set of that name",
    "contrastive": "the set of that name",
}
"""Words for `prefixes` in place of a set's folder, and what they mean: no folder of a user's set is
called so."""


def check_set_place(out: Path) -> None:
    """Refuse a folder for a set that `prefixes` could not name.

    Raises:
        PrefixError: Its name is one of `RESERVED_SETS`.
    """
    if (name := str(out)) in RESERVED_SETS:
        raise PrefixError(
            f"{parameter('out')} {name}: with prefixes={name} a method would take"
            f" {RESERVED_SETS[name]}; give"
            f" another folder, such as results/{name}"
        )


class PrefixShape(BaseModel):
    """Size of a soft prefix; all but the slots are the model's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_layers: int
    n_kv_heads: int
    n_slots: int
    d_head: int

    def __str__(self) -> str:
        return (
            f"{self.n_layers} layers x {self.n_kv_heads} KV heads x {self.n_slots} slots x"
            f" {self.d_head}"
        )


def _null_as_nan(fields: Any) -> Any:
    """Read null as NaN, which JSON lacks: the bounds of one text's interval are NaN."""
    if isinstance(fields, dict):
        return {name: math.nan if value is None else value for name, value in fields.items()}
    return fields


StoredInterval = Annotated[Interval, BeforeValidator(_null_as_nan)]


class HeldOutMeasures(BaseModel):
    """Numbers on text that was not trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str
    """The texts, and their sha256."""
    max_tokens: int
    """Tokens of a text that are scored, from its beginning."""
    nll: dict[str, StoredInterval]
    """NLL per token of this attribute's texts under each prefix of the set, under the hard prefixes
    ("hard positive") and under no prefix ("none"); the interval resamples texts."""
    accuracy: StoredInterval
    """Share of this attribute's texts that are likeliest under their own prefix among the set's."""
    accuracy_of_set: StoredInterval
    """This share over the texts of all attributes."""
    hard_accuracy_of_set: StoredInterval
    """This share over the texts of all attributes, for the task's hard prefixes."""


class GeneratedAccuracy(BaseModel):
    """Attribute accuracy, by one scorer, of texts generated after a prefix (method `prefix`),
    without and with LaPA2."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scorer: str
    """Name and version of the classifier."""
    length: int
    """Tokens of a text, the prompt's included where the task counts them."""
    alpha: float
    """Strength of LaPA2, profile paper."""
    baseline: StoredInterval
    lapa2: StoredInterval
    """Intervals are over prompts."""


class TrainingRecord(BaseModel):
    """A record of a prefix's training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: dict[str, Any]
    started_from: str | None = None
    """sha256 of the soft prefix it began with, if the recipe's start is another set."""
    data: tuple[str, ...]
    """Corpora, with the numbers of texts and of rows left out."""
    data_sha256: tuple[str, ...]
    texts: int
    """Pieces of text of this attribute."""
    tokens: int
    """Tokens trained on, repeats included. A shared start does not count here, in `steps` or in
    `seconds`."""
    steps: int
    best_step: int
    """The step whose prefix was kept: that of the lowest held-out loss, or the last one without
    early stopping."""
    losses: dict[int, float]
    """Held-out loss by step."""
    seconds: float
    lapa2_interp: str


class SoftPrefixName(BaseModel):
    """The name of a soft prefix in runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    set: str
    attribute: str
    n_slots: int
    shifted: bool
    sha256: str
    """sha256 of its safetensors file."""

    def __str__(self) -> str:
        position = "shifted" if self.shifted else "unshifted"
        return f"soft {self.task}-{self.set}/{self.attribute}, {self.n_slots} slots, {position}"


class PrefixCard(BaseModel):
    """The card of a soft prefix."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attribute: str
    task: str
    set: str
    """mle, contrastive, or a custom name."""
    model: str
    weights: str
    """The model's weights, as on its own card (`identify(model).weights`)."""
    shape: PrefixShape
    shifted: bool
    """True if the text's positions start after the slots."""
    start: str | None = USUAL_START
    """What the text behind it starts with (`bias.text_start.start_setting`); None if unknown."""
    sha256: str = ""
    """sha256 of the safetensors file; filled in on saving."""
    origin: str
    """The word trained, or the source it was imported from."""
    training: TrainingRecord | None = None
    held_out: HeldOutMeasures | None = None
    generated: tuple[GeneratedAccuracy, ...] = ()

    @property
    def name(self) -> SoftPrefixName:
        return SoftPrefixName(
            task=self.task,
            set=self.set,
            attribute=self.attribute,
            n_slots=self.shape.n_slots,
            shifted=self.shifted,
            sha256=self.sha256,
        )


@dataclass(frozen=True, eq=False)
class SoftPrefix:
    """Trained keys and values with their card.

    Attributes:
        keys, values: As in the model's cache; any float dtype.
    """

    keys: Float[Tensor, "layer kv_head slot d_head"]
    values: Float[Tensor, "layer kv_head slot d_head"]
    card: PrefixCard

    def __post_init__(self) -> None:
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            shape = self.card.shape
            wanted = (shape.n_layers, shape.n_kv_heads, shape.n_slots, shape.d_head)
            if tuple(tensor.shape) != wanted:
                raise PrefixError(
                    f"the card says {wanted} but {name} are {tuple(tensor.shape)}; one of them is"
                    " another prefix's"
                )
            if not bool(tensor.isfinite().all()):
                raise PrefixError(
                    f"{name} of {self.card.attribute!r} hold values that are not finite numbers"
                )

    def __len__(self) -> int:
        """Number of slots."""
        return self.card.shape.n_slots

    def __repr__(self) -> str:
        return f"SoftPrefix({self.card.name} of {self.card.model})"

    def to_peft(self, folder: str | Path, base: str = "") -> Path:
        """Write the prefix as an adapter that PEFT loads: `PeftModel.from_pretrained(network,
        folder)`. `lapa2 prefix import` reads it back.

        Args:
            folder: A new folder.
            base: Hub id or folder of the model it was trained for, which the adapter names; by
                default its name in this package.

        Raises:
            PrefixError: Its positions are not shifted, and PEFT always shifts them.
            RunError: As `files.result_folder`.
        """
        import torch
        from safetensors.torch import save_file

        if not self.card.shifted:
            raise PrefixError(
                f"{self!r} was trained with positions that start at 0, and in PEFT they start after"
                " the slots; train one with shifted positions"
                f" ({parameter('shifted', 'true', 'set')})"
            )
        shape = self.card.shape
        config = {
            "peft_type": "PREFIX_TUNING",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base or self.card.model,
            "inference_mode": True,
            "num_virtual_tokens": shape.n_slots,
            "num_layers": shape.n_layers,
            "num_attention_heads": shape.n_kv_heads,
            "token_dim": shape.n_kv_heads * shape.d_head,
            "num_transformer_submodules": 1,
            "prefix_projection": False,
        }
        # PEFT's order: slot, layer, keys and values, KV head, dimension.
        keys_and_values = torch.stack([self.keys, self.values])
        embeddings = keys_and_values.permute(3, 1, 0, 2, 4).flatten(1).contiguous().cpu()
        with result_folder(Path(folder)) as fresh:
            write_json(fresh / ADAPTER, config)
            save_file({"prompt_embeddings": embeddings}, fresh / "adapter_model.safetensors")
        return Path(folder)

    def check(self, model: Model) -> None:
        """Refuse a model that this prefix was not made for.

        Raises:
            PrefixError: The model has another shape or other weights.
        """
        shape, card = kv_shape(model, len(self)), identify(model)
        if shape != self.card.shape:
            raise PrefixError(
                f"the soft prefix {self.card.attribute!r} was made for {self.card.model}"
                f" ({self.card.shape}); {card.name} needs {shape}; train or import one for it"
                f" (`{_training(card.name, self.card.task)}`)"
            )
        if card.weights != self.card.weights:
            raise PrefixError(
                f"the soft prefix {self.card.attribute!r} was made for {self.card.model} with"
                f" weights {self.card.weights}; this is {card.name} with weights {card.weights}; if"
                " they are the same, attach it to this one: `lapa2 prefix import --other-base`"
            )
        if self.card.start not in (None, start := start_setting(model, AUTO_START)):
            raise PrefixError(
                f"behind the soft prefix {self.card.attribute!r} text starts with"
                f" {self.card.start!r}, as in its training, and with {start!r} in this model; give"
                f" load_model(..., start={self.card.start!r}), or train one for this start"
            )


def kv_shape(model: Model, n_slots: int) -> PrefixShape:
    """The shape of a soft prefix for a model.

    Raises:
        PrefixError: Its layers differ in the shape of keys and values, or some have none, or a
            recurrent state.
    """
    network: Any = facts_of(model).network
    if hasattr(network, "config"):
        return kv_shape_of(network.config.get_text_config(), n_slots)
    cfg, n_kv_heads = model.cfg, facts_of(model).n_kv_heads  # a HookedTransformer
    return PrefixShape(
        n_layers=cfg.n_layers, n_kv_heads=n_kv_heads, n_slots=n_slots, d_head=cfg.d_head
    )


def kv_shape_of(config: Any, n_slots: int) -> PrefixShape:
    """The shape of a soft prefix for a transformers configuration.

    Raises:
        PrefixError: As `kv_shape`.
    """
    (n_kv_heads, d_head, d_value), *others = sorted(set(kv_shapes(config)))
    own = "reuse" not in (getattr(config, "kv_sharing_modes", None) or ())
    if others or d_value != d_head or not own or is_hybrid(config):
        raise PrefixError(
            "a soft prefix has keys and values of one shape in every layer, and the layers of a"
            f" {config.model_type} model have others, none, or a recurrent state; use a hard prefix"
        )
    return PrefixShape(
        n_layers=config.num_hidden_layers, n_kv_heads=n_kv_heads, n_slots=n_slots, d_head=d_head
    )


def save_prefix(prefix: SoftPrefix, folder: Path, dtype: str = "float16") -> SoftPrefix:
    """Write `<attribute>.safetensors` and `<attribute>.json`; returns the prefix as it is stored.

    Raises:
        PrefixError: The values do not fit the dtype.
    """
    import torch
    from safetensors.torch import save_file

    tensors = {
        name: tensor.detach().to("cpu", getattr(torch, dtype)).contiguous()
        for name, tensor in (("keys", prefix.keys), ("values", prefix.values))
    }
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise PrefixError(
            f"the values of {prefix.card.attribute!r} exceed {dtype}; save it as float32"
        )
    weights, _ = prefix_files(folder, prefix.card.attribute)
    with atomic_write(weights) as fresh:
        save_file(tensors, fresh)
        fresh.chmod(0o644)
    card = prefix.card.model_copy(update={"sha256": sha256_of(weights)})
    write_card(card, folder)
    return SoftPrefix(tensors["keys"], tensors["values"], card)


def write_card(card: PrefixCard, folder: Path) -> None:
    """Write the card of a prefix into the folder of its set."""
    write_json(prefix_files(folder, card.attribute)[1], card.model_dump_json())


def load_prefix(folder: Path, attribute: str) -> SoftPrefix:
    """One prefix of a set.

    Raises:
        PrefixError: Weights or card are missing, damaged, or do not belong together.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    weights, card_file = prefix_files(folder, attribute)
    card = read_card(card_file)
    if not weights.is_file():
        raise PrefixError(f"the card {card_file} has no weights: {weights.name} is not beside it")
    stored = weights.read_bytes()
    if hashlib.sha256(stored).hexdigest() != card.sha256:
        raise PrefixError(
            f"{weights} is not the file its card describes (sha256 differs); save or import the"
            " prefix again"
        )
    try:
        tensors = load(stored)
        return SoftPrefix(tensors["keys"], tensors["values"], card)
    except (SafetensorError, KeyError) as error:
        raise PrefixError(
            f"{weights} does not hold keys and values ({error}); save or import the prefix again"
        ) from error


def read_card(file: Path) -> PrefixCard:
    """The card of a prefix, without its tensors.

    Raises:
        PrefixError: The file does not exist or is not a card.
    """
    if not file.is_file():
        near = (
            sorted(card_file.stem for card_file in file.parent.glob("*.json"))
            if file.parent.is_dir()
            else []
        )
        have = f"; there are: {', '.join(near)}" if near else ""
        raise PrefixError(f"no soft prefix {file.stem!r} in {file.parent}{have}")
    try:
        return PrefixCard.model_validate(parse_object(read_text(file)))
    except ValueError as error:
        raise PrefixError(
            f"{file} is not the card of a soft prefix: {validation_message(error)}; save or import"
            " the prefix again"
        ) from error


def find_prefix(model: Model, task: str, which: str, attribute: str) -> SoftPrefix:
    """The prefix of an attribute, from a set of the package or of the cache, or from a folder.

    Args:
        model: The model it was made for.
        task: The task's name.
        which: A set of that task (mle, contrastive), or the path of a folder.

    Raises:
        PrefixError: No such set or attribute, damaged, or of another model.
    """
    prefix = load_prefix(set_folder(identify(model).name, task, which), attribute)
    prefix.check(model)
    return prefix


def own_sets() -> Path:
    """The folder in the cache for sets of the user's that methods take by name, as those of
    `SHIPPED_SETS`: `<model>/<task>-<set>/<attribute>`."""
    return cache_folder() / "prefixes"


def set_folder(model: str, task: str, which: str) -> Path:
    """Folder of a set of soft prefixes: the set of that name for a model (by name) and task, from
    the package or from `own_sets`, or the path given (`./mle` where a folder has the name of a
    set).

    Raises:
        PrefixError: No such set.
    """
    of_model = [SHIPPED_SETS / model, own_sets() / model]
    folders = [sets / f"{task}-{which}" for sets in of_model if "/" not in which]
    if folder := next((folder for folder in [*folders, Path(which)] if folder.is_dir()), None):
        return folder
    have = sorted(
        {
            folder.name.removeprefix(f"{task}-")
            for sets in of_model
            for folder in sets.glob(f"{task}-*")
        }
    )
    raise PrefixError(
        f"no soft prefixes {which!r} of task {task} for {model}; "
        + (f"allowed: {', '.join(have)}, a folder, or " if have else "")
        + f"hard ones (the method's prefixes=hard); `{_training(model, task, which)}` makes them"
    )


def _training(model: str, task: str, which: str = "") -> str:
    """The command that trains a set, into the place where methods look for it by name."""
    named = which in ("mle", "contrastive")
    return command(
        "prefix",
        "train",
        model=model,
        task=task,
        data="CORPUS",
        objective=which if named else None,
        out=own_sets() / model / f"{task}-{which}" if named else "FOLDER",
    )


def cards_in(folder: Path) -> list[PrefixCard]:
    """The cards in a folder and its subfolders, in the order of their paths. Other JSON files and
    hidden folders, such as that of an unfinished training, are left out.

    Raises:
        PrefixError: There is none; a card is damaged, or the weights beside it are missing.
    """
    cards = []
    for file in sorted(folder.rglob("*.json")):
        weights = file.with_suffix(".safetensors")
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue
        try:
            cards.append(read_card(file))
        except PrefixError:
            if weights.is_file():
                raise
            continue
        if not weights.is_file():
            raise PrefixError(f"{file} has no weights: {weights.name} is not beside it")
    if not cards:
        raise PrefixError(
            f"{folder} holds no soft prefixes; `lapa2 prefix train --out` makes a set"
        )
    return cards


def prefix_files(folder: Path, attribute: str) -> tuple[Path, Path]:
    """The weights and the card of an attribute's prefix in the folder of a set.

    Raises:
        PrefixError: The attribute's name cannot be the name of a file in the folder.
    """
    if not attribute or "/" in attribute or "\0" in attribute:
        raise PrefixError(
            f"attribute {attribute!r} cannot name a file of a soft prefix: / is not allowed there;"
            " rename it in the task file"
        )
    return folder / f"{attribute}.safetensors", folder / f"{attribute}.json"
