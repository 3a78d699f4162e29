"""Import soft prefixes that other code has trained.

    peft    PEFT's PREFIX_TUNING adapters: a folder with adapter_config.json. `prompt_embeddings`, [slot, layer x two x kv_head x
            d_head], holds the finished keys and values (PEFT saves what its reparameterisation gives). Positions are shifted.
    air     Air-Decoding and the released LaPA2 code (modeling_gpt2.py): a GPT-2 checkpoint with, per layer and prefix number i,
            `h.{layer}.attn.prefix_keys_embeddings_n{i}`, `..values..` [slot, middle] and one affine map `prefix_mlp_n{i}`
            ([middle, d_model], bias [d_model]) for both, folded here: K = E_K W + b, V = E_V W + b. Positions are not shifted.
    lapa2   a prefix of this package, attached to the same weights from another place.

PEFT's adapters and this package's prefixes name the model they were trained for. That model must be
the one given: have its name, its folder, or its files (`Base`). Another is refused unless the
caller accepts it, and the card records it. Air-Decoding's checkpoints name no model.

Other checkpoints than safetensors are read with torch's `weights_only`: a file that would run code is
refused.
"""  # noqa: E501

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import is_zipfile

from lapa2_interp._util.parsing import parse_json, read_text
from lapa2_interp._util.paths import kind_of
from lapa2_interp._util.settings import takes
from lapa2_interp._util.unpacking import check_archive
from lapa2_interp.errors import PrefixError, parameter, unknown_choice
from lapa2_interp.models.card import ModelCard, identify
from lapa2_interp.models.facts import Model
from lapa2_interp.models.load import expand_name, load_model
from lapa2_interp.models.smollm2 import SMOLLM2, smollm2_folder
from lapa2_interp.models.weights import ADAPTER, folder_hash
from lapa2_interp.prefixes.settings import PrefixImportSettings
from lapa2_interp.prefixes.soft_prefix import (
    PrefixCard,
    PrefixShape,
    SoftPrefix,
    check_set_place,
    kv_shape,
    load_prefix,
    prefix_files,
    save_prefix,
)
from lapa2_interp.tasks.task import Task, read_task

if TYPE_CHECKING:
    from torch import Tensor

AIR_NUMBERS = {
    "sentiment": ("positive", "negative"),
    "topic": ("world", "sports", "business", "science"),
    "detox": ("nontoxic", "toxic"),
}
"""Attributes of the prefix numbers 0-7 of the released checkpoints, in this order."""
WEIGHT_FILES = (
    "adapter_model.safetensors",
    "model.safetensors",
    "adapter_model.bin",
    "pytorch_model.bin",
)


@dataclass(frozen=True)
class Base:
    """The model that a prefix was trained for, as its file names it.

    Attributes:
        name: A hub id, a folder, or a name of this package.
        weights: Its weights as on a card (`ModelCard.weights`); None if the file does not say.
    """

    name: str
    weights: str | None = None

    def is_model(self, card: ModelCard) -> bool:
        """True if a model is known to be this one. Weights decide where both are known; then the
        files of a folder that is still there; then the name."""
        if self.weights is not None:
            return self.weights == card.weights
        name = expand_name(self.name)
        if (folder := Path(name)).is_dir():
            model_folder = smollm2_folder() if card.name == SMOLLM2 else Path(card.name)
            same_place = model_folder.is_dir() and model_folder.samefile(folder)
            return same_place or folder_hash(folder) in card.weights
        return name == card.name

    def __str__(self) -> str:
        return self.name if self.weights is None else f"{self.name} with weights {self.weights}"


def import_prefix(
    source: Path,
    model: Model,
    task: str,
    attribute: str,
    set_name: str,
    number: int | None = None,
    other_base: bool = False,
) -> SoftPrefix:
    """A prefix from PEFT, Air-Decoding or this package, for a model.

    Args:
        source: A PEFT adapter's folder, an Air-Decoding checkpoint (folder or file), or a
            `.safetensors` of this package.
        model: The model it was trained for; its shape is checked.
        task, attribute, set_name: Fields of the card.
        number: Number of the prefix in an Air-Decoding checkpoint; by default the attribute's, 0-7.
        other_base: Accept a prefix that names another model as the one it was trained for, such as
            the same weights under another name. The card's origin records that model.

    Raises:
        PrefixError: Unknown layout, another shape, another base, or a file that is not plain
            tensors.
    """
    # Keys and values [layer, kv_head, slot, d_head], from one of three formats.
    source = Path(source)
    base: Base | None = None
    if (source / ADAPTER).is_file():
        keys, values, base = _read_peft(source)
        shifted, origin = True, "PEFT prefix tuning"
    elif kind_of(source) == ".safetensors" and source.with_suffix(".json").is_file():
        own = load_prefix(source.parent, source.stem)
        keys, values, shifted = own.keys, own.values, own.card.shifted
        base = Base(own.card.model, own.card.weights)
        origin = f"{own.card.origin}; lapa2 prefix {own.card.name}"
    else:
        names = [name for group in AIR_NUMBERS.values() for name in group]
        if number is None and attribute not in names:
            raise PrefixError(
                f"{unknown_choice('attribute of the Air-Decoding checkpoints', attribute, names)};"
                f" or give {parameter('number')}"
            )
        chosen = names.index(attribute) if number is None else number
        keys, values = _read_air(read_tensors(source), chosen, model.cfg.n_heads, source)
        shifted, origin = False, f"Air-Decoding checkpoint, prefix {chosen}"
    n_layers, n_kv_heads, n_slots, d_head = keys.shape
    shape = PrefixShape(n_layers=n_layers, n_kv_heads=n_kv_heads, n_slots=n_slots, d_head=d_head)
    card = identify(model)
    if shape != kv_shape(model, n_slots):
        raise PrefixError(
            f"the prefix in {source} has {shape}; {card.name} needs {kv_shape(model, n_slots)};"
            " give the model it was trained for"
        )
    if base is not None and not base.is_model(card):
        if not other_base:
            raise PrefixError(
                f"the prefix in {source} was trained for {base}, and {card.name} with weights"
                f" {card.weights} is not known to be that model; give the model it was trained for,"
                f" or {parameter('other_base', True)} if they are the same"
            )
        origin = f"{origin}, trained for {base}"
    return SoftPrefix(
        keys.contiguous(),
        values.contiguous(),
        PrefixCard(
            attribute=attribute,
            task=task,
            set=set_name,
            model=card.name,
            weights=card.weights,
            shape=shape,
            shifted=shifted,
            start=None,
            origin=origin,
        ),
    )


def read_tensors(source: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, from a file or the folder that holds it.

    Raises:
        PrefixError: There is no checkpoint, it is damaged, or it would run code.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = source
    if source.is_dir():
        files = [source / name for name in WEIGHT_FILES if (source / name).is_file()]
        if not files:
            raise PrefixError(f"{source} has no weights; expected one of {', '.join(WEIGHT_FILES)}")
        file = files[0]
    if not file.is_file():
        raise PrefixError(f"no such file or folder: {source}")
    try:
        if is_zipfile(file):
            check_archive(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old pickle protocols are read or refused
            tensors = (
                load_file(file)
                if file.suffix.lower() == ".safetensors"
                else torch.load(file, "cpu", weights_only=True)
            )
    except pickle.UnpicklingError as error:
        raise PrefixError(
            f"{file} holds more than tensors and would run code when read; it is refused. Convert"
            " it to safetensors where you trust it"
        ) from error
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise PrefixError(
            f"{file} is damaged or not a checkpoint ({' '.join(str(error).split())[:120]})"
        ) from error
    if not (
        isinstance(tensors, dict)
        and all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    ):
        raise PrefixError(f"{file} is not a dictionary of tensors; save the state dict alone")
    return tensors


def _read_peft(folder: Path) -> tuple[Tensor, Tensor, Base | None]:
    """Keys and values of a PEFT adapter, [layer, kv_head, slot, d_head], and its base."""
    file = folder / ADAPTER
    try:
        config = parse_json(read_text(file))
    except ValueError as error:
        raise PrefixError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise PrefixError(f"{file} holds no JSON object")
    if config.get("peft_type") != "PREFIX_TUNING":
        raise PrefixError(
            f"{folder} is a PEFT adapter of type {config.get('peft_type')}; only PREFIX_TUNING"
            " holds keys and values"
        )
    if (kind := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise PrefixError(
            f"{folder} is a PEFT adapter for the task type {kind}; only CAUSAL_LM adapters steer"
            " text that a model continues"
        )
    names = ("num_layers", "num_attention_heads", "token_dim", "num_virtual_tokens")
    sizes = {name: config.get(name) for name in names}
    layers, heads, width, slots = (size if type(size) is int else 0 for size in sizes.values())
    if min(layers, heads, width, slots) < 1 or width % heads:
        raise PrefixError(
            f"{file} needs positive whole numbers, and a token_dim that"
            f" the heads share evenly; found {sizes}"
        )
    if (parts := config.get("num_transformer_submodules")) not in (None, 1):
        raise PrefixError(
            f"{file} has num_transformer_submodules {parts!r}; a model that continues text has 1"
        )
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str | None):
        raise PrefixError(
            f"{file} has base_model_name_or_path {str(name)[:80]!r}; allowed: the name of a model"
            " as text, or null"
        )
    tensors = read_tensors(folder)
    stored = tensors.get("prompt_embeddings")
    if stored is None or stored.shape != (slots, layers * 2 * width):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise PrefixError(
            f"{folder}: expected prompt_embeddings of [{slots} slots, {layers} layers x 2 x"
            f" {width}]; found {shapes}"
        )
    keys_and_values = stored.unflatten(1, (layers, 2, heads, width // heads)).permute(2, 1, 3, 0, 4)
    return keys_and_values[0], keys_and_values[1], Base(name) if name else None


def _read_air(
    tensors: Mapping[str, Tensor], number: int, n_heads: int, source: Path
) -> tuple[Tensor, Tensor]:
    """Keys and values of one prefix of an Air-Decoding checkpoint, its affine map folded in."""
    import torch

    # Find the tables of this prefix, by layer and part, and the affine maps of its layers.
    pattern = re.compile(
        r"(?:^|\.)h\.(\d{1,9})\.attn\.prefix_(keys|values)_embeddings_n(\d{1,9})\.weight$"
    )
    tables: dict[tuple[int, str], Tensor] = {}
    numbers: set[int] = set()
    maps: dict[int, str] = {}
    for name, table in tensors.items():
        if (match := pattern.search(name)) is not None:
            layer, part, its_number = int(match[1]), match[2], int(match[3])
            numbers.add(its_number)
            if its_number == number:
                tables[layer, part] = table
                stem = f"{name[: match.start(2)]}mlp_n{number}"
                if f"{stem}.weight" in tensors:
                    maps[layer] = stem
    if not numbers:
        raise PrefixError(
            f"{source} is neither a PEFT adapter (no adapter_config.json) nor an Air-Decoding"
            " checkpoint (no tensor h.0.attn.prefix_keys_embeddings_n0.weight)"
        )
    if number not in numbers:
        raise PrefixError(
            f"{source} has no prefix {number}; it has {', '.join(map(str, sorted(numbers)))}"
        )
    n_layers = 1 + max(layer for layer, _ in tables)
    missing = [
        f"{part} of layer {i}"
        for i in range(n_layers)
        for part in ("keys", "values")
        if (i, part) not in tables
    ]
    if missing:
        raise PrefixError(f"{source}: prefix {number} lacks the {missing[0]}")

    def folded(part: str) -> Tensor:
        rows = []
        for layer in range(n_layers):
            table = tables[layer, part].double()
            if layer in maps:
                weight, bias = (tensors[f"{maps[layer]}.{name}"] for name in ("weight", "bias"))
                table = table @ weight.double() + bias.double()
            rows.append(table.unflatten(1, (n_heads, -1)).transpose(0, 1))
        return torch.stack(rows).float()

    try:
        return folded("keys"), folded("values")
    except (RuntimeError, KeyError) as error:
        raise PrefixError(
            f"{source}: prefix {number} does not fit {n_heads} heads"
            f" ({' '.join(str(error).split())[:120]}); give the model it was trained for"
        ) from error


@takes(PrefixImportSettings)
def import_into_set(settings: PrefixImportSettings) -> SoftPrefix:
    """`lapa2 prefix import` in Python; `PrefixImportSettings` says what it does and takes.

    Raises:
        PrefixError: The set already has a prefix of this attribute; or as `import_prefix`.
        ModelError: The model cannot be loaded.
    """
    source, out = Path(settings.source), Path(settings.out)
    task = settings.task if isinstance(settings.task, Task) else read_task(settings.task)
    task.prefix(settings.attribute)
    check_set_place(out)
    if any(file.exists() for file in prefix_files(out, settings.attribute)):
        raise PrefixError(
            f"{out} has a prefix {settings.attribute!r} already; choose another {parameter('out')}"
        )
    loaded = load_model(settings.model, trust_remote_code=settings.trust_remote_code)
    return save_prefix(
        import_prefix(
            source,
            loaded,
            task.name,
            settings.attribute,
            settings.set_name,
            settings.number,
            settings.other_base,
        ),
        out,
        "float32",
    )
