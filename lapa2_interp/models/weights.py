"""Loading of weights, all of them and no others.

Every tensor of the network is in the files, and every tensor in the files that belongs to the
network is in it.

transformers fills missing tensors with random numbers and ignores tensors without a place. Two
loads would then differ, or the model would not be that of its files. So the files decide the
weights, and a hash of the files identifies them.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lapa2_interp._util.parsing import parse_json, read_text, whole_number
from lapa2_interp._util.values import plain
from lapa2_interp.errors import ModelError, pluralize
from lapa2_interp.files import sha256_of

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_config.json"
DECIDING_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
    "*.py",
)
"""Files of a model's folder that decide its texts."""
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that torch.compile, DataParallel, FSDP and checkpointing insert."""
MAX_NAMES = 3


LAYERS = re.compile(r"(?!max_window)(\w*layers?|\w*blocks|attention_types)")
"""Fields of a configuration that count layers, or list their kinds."""
FEW_LAYERS = 1000
"""A network with this number of layers is built in seconds, whatever its files hold."""
SLACK = 4
"""Networks hold this times as much as their files, at most: tied layers count twice."""


def check_layers(folder: Path) -> None:
    """Refuse a configuration that counts more layers than the weights' files hold tensors, before
    anything is built.

    Args:
        folder: A folder of a model; of what is none, nothing is known, and nothing is checked.

    Raises:
        ModelError: The file counts too many, or cannot be read.
    """
    file = folder / "config.json"
    if not file.is_file():
        return
    try:
        config = parse_json(read_text(file))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file} ({error}); download or save it again") from error
    tensors, _ = stored_sizes(folder)
    most = max(FEW_LAYERS, tensors)
    for name, number in _layer_counts(config):
        if number > most:
            raise ModelError(
                f"{file} says {name} = {number}, and the weights beside it hold {tensors} tensors;"
                " put back the file that was saved with these weights"
            )


def _layer_counts(config: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in fields that count layers."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from _layer_counts(value, str(key))
    elif isinstance(config, list):
        for value in config:
            yield from _layer_counts(value, name)
    elif isinstance(config, int | float) and LAYERS.fullmatch(name):
        yield name, config


def stored_sizes(source: str | Path) -> tuple[int, int]:
    """Numbers of the tensors in a folder's weights, and of their elements.

    Raises:
        ModelError: A file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    tensors = elements = 0
    for file in sorted(Path(source).glob("*.safetensors")):
        try:
            with safe_open(file, "np") as stored:
                for name in stored.keys():  # noqa: SIM118  it is no dict
                    tensors += 1
                    elements += math.prod(stored.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"cannot read {file} ({' '.join(str(error).split())[:80]}); download it again"
            ) from error
    return tensors, elements


@contextmanager
def _no_larger_than_files(source: str | Path) -> Iterator[None]:
    """A block in which no network is built that is much larger than the weights in a folder:
    parameters are counted when they are made, before they take memory.

    Raises:
        ModelError: It has many more parameters than the files.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    if not Path(source).is_dir():
        yield
        return
    tensors, elements = stored_sizes(source)
    if not tensors:
        yield
        return
    quantised = "quantization_config" in read_text(Path(source) / "config.json")
    # Quantised weights are packed, 16 in an element at most.
    most = SLACK * (16 if quantised else 1) * elements + 10**7
    thread, counted = threading.get_ident(), [0, 0]

    def count(_module: Any, _name: str, parameter: Any) -> None:
        if parameter is None or threading.get_ident() != thread or not parameter.is_meta:
            return
        counted[0] += 1
        counted[1] += parameter.numel()
        if counted[0] > SLACK * tensors + FEW_LAYERS or counted[1] > most:
            raise ModelError(
                f"config.json of {source} asks for more than {counted[0]} tensors of {counted[1]}"
                f" numbers, and its weights hold {tensors} of {elements}; put back the file that"
                " was saved with these weights"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def load_network(auto_class: Any, source: str | Path, **settings: Any) -> Any:
    """A network whose weights are those of its files.

    Args:
        auto_class: A transformers class, such as AutoModelForCausalLM.
        source: A folder or a hub id.
        settings: As `from_pretrained` takes them.

    Raises:
        ModelError: Tensors are missing or of another shape, and neither ties nor the class's own
            lists explain it; the files hold more of the network than it takes; or an adapter.
        Exception: As `from_pretrained`: damaged files raise errors of many libraries.
    """
    with _no_larger_than_files(source):
        network, report = auto_class.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
    if getattr(network, "_hf_peft_config_loaded", False):
        raise ModelError(adapter_error(source))
    if mismatched := sorted(report["mismatched_keys"]):
        shapes = "; ".join(
            f"{name} {list(a)} for {list(b)}" for name, a, b in mismatched[:MAX_NAMES]
        )
        raise ModelError(
            f"{source} holds {pluralize(len(mismatched), 'tensor')} of another shape than"
            f" config.json asks for: {shapes}{_and_more(mismatched)}; config.json belongs to"
            " another model, or its sizes were changed: put back the file that was saved with these"
            " weights"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{source} lacks {pluralize(len(missing), 'tensor')} of a {type(network).__name__},"
            f" which would be random: {_list_names(missing)};"
            f" {_missing_cause(network, missing, report)}"
        )
    # Quantised files have scales beside the weights, which their library reads or ignores.
    quantised = getattr(network, "hf_quantizer", None) is not None
    if not quantised and (left := sorted(_ignored_tensors(network, report["unexpected_keys"]))):
        raise ModelError(
            f"{source} has {pluralize(len(left), 'tensor')} that a {type(network).__name__} of this"
            f" config.json would ignore: {_list_names(left)}; {_leftover_cause(left)}"
        )
    return network


def _list_names(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + _and_more(names)


def _and_more(names: list[Any]) -> str:
    return f" and {len(names) - MAX_NAMES} more" * (len(names) > MAX_NAMES)


def _missing_cause(network: Any, missing: list[str], report: Mapping[str, Any]) -> str:
    """The likely reason for missing tensors, and what to do."""
    # An adapter, or names with the prefix of a wrapper.
    unexpected = sorted(report["unexpected_keys"])
    if any("lora_" in name for name in unexpected):
        return _leftover_cause(unexpected)
    wanted, beginnings = set(missing), Counter[str]()
    for name in unexpected:
        parts = name.split(".")
        unwrapped = [part for part in parts if part not in WRAPPERS]
        for i in range(len(unwrapped)):
            if ".".join(unwrapped[i:]) in wanted and len(unwrapped) - i < len(parts):
                wrappers = [part for part in parts if part in WRAPPERS]
                beginnings[".".join([*unwrapped[:i], *wrappers])] += 1
                break
    if beginnings:
        (part, _), *_ = beginnings.most_common(1)
        return (
            f"the files name them with {part + '.'!r} in front or between (as {unexpected[0]}):"
            " save the model that is inside (its own save_pretrained), or rename them"
        )
    # An output layer that is not tied, or a classifier without its head.
    head = network.get_output_embeddings() if hasattr(network, "get_output_embeddings") else None
    modules = dict(network.named_modules())
    if head is not None and all(modules.get(name.rpartition(".")[0]) is head for name in missing):
        return (
            "config.json does not tie the output layer to the embeddings; if the model does, set"
            " tie_word_embeddings to true there, else download or save the whole model"
        )
    base = f"{network.base_model_prefix}."
    if "Classification" in type(network).__name__ and not any(
        name.startswith(base) for name in missing
    ):
        return "the files have no trained classification head: give those of a classifier"
    return (
        "the files are not whole, or config.json belongs to another model: download or save the"
        " model again"
    )


def _leftover_cause(left: list[str]) -> str:
    if any("lora_" in name for name in left):
        return "they are an adapter: merge it first (peft's merge_and_unload(), save_pretrained)"
    return (
        "config.json belongs to another model, or was changed: put back the file that was saved"
        " with these weights; if you mean to leave them out, save the smaller model"
        " (save_pretrained)"
    )


def _ignored_tensors(network: Any, unexpected: Iterable[str]) -> Iterator[str]:
    """Tensors in the files that belong to the network, but not in it: more layers than it counts,
    or more tensors in a module than it takes. Extra heads, towers and old buffers do not count."""
    modules = dict(network.named_modules())
    extra = getattr(network.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    for name in unexpected:
        parts = name.split(".")
        for i in range(1, len(parts)):
            module = modules.get(".".join(parts[:i]))
            if module is None:
                break
            children = len(list(module.children()))
            numbered = children and set(dict(module.named_children())) == set(
                map(str, range(children))
            )
            number = whole_number(parts[i])
            more = numbered and number is not None and number >= children + extra
            if more or (not children and next(module.parameters(), None) is not None):
                yield name
                break


def check_weights(name: str, auto_class: str = "AutoModelForCausalLM") -> None:
    """Refuse a local folder without weights; names that are not folders are not checked.

    Args:
        auto_class: The transformers class that reads them.

    Raises:
        ModelError: The folder has no weights, only pickles, or not all files that its index names;
            or it holds an adapter.
    """
    folder = Path(name)
    if (folder / ADAPTER).is_file():
        raise ModelError(adapter_error(name))
    check_layers(folder)
    index = folder / f"{WEIGHTS}.index.json"
    if not folder.is_dir() or (folder / WEIGHTS).is_file():
        return
    if index.is_file():
        gone = [file for file in _indexed_files(index) if not (folder / file).is_file()]
        if gone:
            more = f" and {len(gone) - 1} more" * (len(gone) > 1)
            raise ModelError(
                f"the folder {name} lacks weights that its index names: {gone[0]}{more}; download"
                " the rest"
            )
        return
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickles:
        script = f"M.from_pretrained({name!r}, use_safetensors=False).save_pretrained({name!r})"
        raise ModelError(
            f"the folder {name} has its weights as a pickle alone ({pickles[0]}), which is not"
            " read: a pickle may run any code. "
            f'If you trust it, convert it once: python -c "from transformers import {auto_class} as'
            f' M; {script}"'
        )
    there = ", ".join(sorted(file.name for file in folder.iterdir())[:8])
    raise ModelError(
        f"the folder {name} has no weights: put {WEIGHTS} into it, beside what is there ({there})"
    )


def _indexed_files(index: Path) -> list[str]:
    """The files that an index of weights names."""
    try:
        return sorted(set(map(str, parse_json(read_text(index))["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"cannot read {index} ({error!r:.80}); download the model again"
        ) from error


def adapter_error(source: str | Path) -> str:
    """The error message for a folder that holds an adapter."""
    return (
        f"{source} holds an adapter ({ADAPTER}), whose base is elsewhere, or which is added only"
        " where peft is installed; merge it first (peft's merge_and_unload(), then save_pretrained"
        " into a new folder), and give that folder"
    )


def check_generation_config(folder: Path) -> None:
    """Refuse a damaged generation_config.json: transformers would ignore it, and texts would end at
    other tokens.

    Raises:
        ValueError: The file is not valid JSON.
    """
    file = folder / "generation_config.json"
    try:
        fine = not file.is_file() or isinstance(parse_json(read_text(file)), dict)
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(f"{file.name} is not a valid JSON file")


def listed_ends(generation: Any, name: str) -> tuple[int, ...]:
    """The end ids of a generation configuration.

    Raises:
        ModelError: They are no ids.
    """
    listed = plain(getattr(generation, "eos_token_id", None))
    ends = () if listed is None else listed if isinstance(listed, tuple) else (listed,)
    if not all(type(end) is int for end in ends):
        raise ModelError(
            f"generation_config.json of {name}: eos_token_id is {repr(listed)[:80]}; allowed: the"
            " id of an end token, a list of ids, or null. Mend the file, or set"
            " generation_config.eos_token_id of the network"
        )
    return ends


def _deciding_files(folder: Path) -> list[Path]:
    """The files that decide a model's texts, also weights that its index names elsewhere."""
    files = {file for auto_class in DECIDING_PATTERNS for file in folder.glob(auto_class)}
    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        files |= {folder / name for name in _indexed_files(index) if (folder / name).is_file()}
    return sorted(files)


def folder_hash(folder: Path) -> str:
    """sha256 over the names and contents of the files that decide a model's texts."""
    digest = hashlib.sha256()
    for file in _deciding_files(folder):
        digest.update(f"{file.relative_to(folder)} {sha256_of(file)}\n".encode())
    return digest.hexdigest()


@contextmanager
def files_unchanged(source: str | Path) -> Iterator[None]:
    """Refuse a folder whose files change inside the block, where they are loaded and hashed.

    Raises:
        ModelError: A file has changed: the loaded files may not be those that were hashed.
    """

    def stamps() -> list[tuple]:
        files = _deciding_files(Path(source)) if Path(source).is_dir() else []
        return [(file, (at := file.stat()).st_size, at.st_mtime_ns, at.st_ino) for file in files]

    before = stamps()
    yield
    if stamps() != before:
        raise ModelError(f"files of {source} changed while they were read; load it again")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and notices of transformers inside the block; we print our own."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
