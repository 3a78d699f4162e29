"""Weights from files into a network: every tensor of the network is in the files, and every tensor
in the files that belongs to the network is in it.

transformers fills what the files lack with random numbers and passes over what it has no place for.
Two loads would then differ, or the model would be another one than its files say. So the files
decide the weights, and a hash of the files identifies them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lapa2_interp._util.errors import ModelError, pluralize
from lapa2_interp._util.files import sha256_of
from lapa2_interp._util.parsing import parse_json, read_text

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_config.json"
DECIDING = (
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
"""Parts of names that torch.compile, DataParallel, FSDP and checkpointing put in."""
SHOWN = 3


def load_network(kind: Any, source: str | Path, **settings: Any) -> Any:
    """A network whose weights are those of its files.

    Args:
        kind: A transformers class, such as AutoModelForCausalLM.
        source: A folder or a hub id.
        settings: As `from_pretrained` takes them.

    Raises:
        ModelError: Tensors are missing or of another shape, and neither ties nor the class's own
            lists explain it; the files hold more of the network than it takes; or an adapter.
        Exception: As `from_pretrained`: damaged files raise errors of half a dozen libraries.
    """
    network, found = kind.from_pretrained(
        source, output_loading_info=True, ignore_mismatched_sizes=True, **settings
    )
    if getattr(network, "_hf_peft_config_loaded", False):
        raise ModelError(adapter_refused(source))
    if other := sorted(found["mismatched_keys"]):
        shapes = "; ".join(f"{name} {list(a)} for {list(b)}" for name, a, b in other[:SHOWN])
        raise ModelError(
            f"{source} holds {pluralize(len(other), 'tensor')} of another shape than config.json"
            f" asks for: {shapes}{_more(other)}; config.json belongs to another model, or its"
            " sizes were changed: put back the file that was saved with these weights"
        )
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"{source} lacks {pluralize(len(missing), 'tensor')} of a {type(network).__name__},"
            f" which would be random: {_named(missing)}; {_cause(network, missing, found)}"
        )
    # Quantised files have scales beside the weights, which their library reads or passes over.
    quantised = getattr(network, "hf_quantizer", None) is not None
    if not quantised and (left := sorted(_left_over(network, found["unexpected_keys"]))):
        raise ModelError(
            f"{source} has {pluralize(len(left), 'tensor')} that a {type(network).__name__} of this"
            f" config.json would ignore: {_named(left)}; {_leftover_cause(left)}"
        )
    return network


def _named(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + _more(names)


def _more(names: list[Any]) -> str:
    return f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)


def _cause(network: Any, missing: list[str], found: Mapping[str, Any]) -> str:
    """Why tensors are likely to be missing, and what to do."""
    unexpected = sorted(found["unexpected_keys"])
    if any("lora_" in name for name in unexpected):
        return _leftover_cause(unexpected)
    wanted, beginnings = set(missing), Counter[str]()
    for name in unexpected:
        parts = name.split(".")
        kept = [part for part in parts if part not in WRAPPERS]
        for i in range(len(kept)):
            if ".".join(kept[i:]) in wanted and len(kept) - i < len(parts):
                wrappers = [part for part in parts if part in WRAPPERS]
                beginnings[".".join([*kept[:i], *wrappers])] += 1
                break
    if beginnings:
        (part, _), *_ = beginnings.most_common(1)
        return (
            f"the files name them with {part + '.'!r} in front or between (as {unexpected[0]}):"
            " save the model that is inside (its own save_pretrained), or rename them"
        )
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


def _left_over(network: Any, unexpected: Iterable[str]) -> Iterator[str]:
    """Tensors of layers or modules that the network has: more layers than it counts, or more
    tensors in a module than it takes. Extra heads, towers and old buffers are none."""
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
            more = numbered and parts[i].isdigit() and int(parts[i]) >= children + extra
            if more or (not children and next(module.parameters(), None) is not None):
                yield name
                break


def check_weights(name: str, kind: str = "AutoModelForCausalLM") -> None:
    """Refuse a local folder that lacks weights; a name that is no folder passes.

    Args:
        kind: The transformers class that reads them.

    Raises:
        ModelError: The folder has no weights, only pickles, or not all files that its index names;
            or it holds an adapter.
    """
    folder = Path(name)
    if (folder / ADAPTER).is_file():
        raise ModelError(adapter_refused(name))
    index = folder / f"{WEIGHTS}.index.json"
    if not folder.is_dir() or (folder / WEIGHTS).is_file():
        return
    if index.is_file():
        gone = [file for file in _in_index(index) if not (folder / file).is_file()]
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
            f'If you trust it, convert it once: python -c "from transformers import {kind} as M;'
            f' {script}"'
        )
    there = ", ".join(sorted(file.name for file in folder.iterdir())[:8])
    raise ModelError(
        f"the folder {name} has no weights: put {WEIGHTS} into it, beside what is there ({there})"
    )


def _in_index(index: Path) -> list[str]:
    """The files that an index of weights names."""
    try:
        return sorted(set(map(str, parse_json(read_text(index))["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"cannot read {index} ({error!r:.80}); download the model again"
        ) from error


def adapter_refused(source: str | Path) -> str:
    return (
        f"{source} holds an adapter ({ADAPTER}), whose base lies elsewhere, or which is added only"
        " where peft is installed; merge it first (peft's merge_and_unload(), then save_pretrained"
        " into a new folder), and give that folder"
    )


def check_ends(folder: Path) -> None:
    """Refuse a damaged generation_config.json, which transformers would pass over: texts would end
    at other tokens.

    Raises:
        ValueError: It is none in JSON.
    """
    file = folder / "generation_config.json"
    try:
        fine = not file.is_file() or isinstance(parse_json(read_text(file)), dict)
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(f"{file.name} is not a valid JSON file")


def _deciding(folder: Path) -> list[Path]:
    """The files that decide a model's texts, also where its index or configuration names weights in
    another place."""
    found = {file for kind in DECIDING for file in folder.glob(kind)}
    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        found |= {folder / name for name in _in_index(index) if (folder / name).is_file()}
    return sorted(found)


def folder_hash(folder: Path) -> str:
    """sha256 over the names and contents of the files that decide a model's texts."""
    digest = hashlib.sha256()
    for file in _deciding(folder):
        digest.update(f"{file.relative_to(folder)} {sha256_of(file)}\n".encode())
    return digest.hexdigest()


@contextmanager
def unchanged(source: str | Path) -> Iterator[None]:
    """Refuse a folder whose files change inside the block, where they are loaded and hashed.

    Raises:
        ModelError: They do: what was loaded may not be what was hashed.
    """

    def stamps() -> list[tuple]:
        files = _deciding(Path(source)) if Path(source).is_dir() else []
        return [(file, (at := file.stat()).st_size, at.st_mtime_ns, at.st_ino) for file in files]

    before = stamps()
    yield
    if stamps() != before:
        raise ModelError(f"files of {source} changed while they were read; load it again")


__all__ = [
    "ADAPTER",
    "WEIGHTS",
    "adapter_refused",
    "check_ends",
    "check_weights",
    "folder_hash",
    "load_network",
    "unchanged",
]
