"""Models in GGUF files, converted once to safetensors in the user's cache.

transformers reads weights, configuration and tokenizer from the file. The folder is made under
another name and renamed when it is complete; its contents are checked by sha256.

The weights are stored in float32, which holds what the file says exactly. If that takes more than
`LARGEST_FLOAT32` bytes, they are stored in 16 bits: this halves memory and disk, and rounds the
weights, also those of a file that was not quantised.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter

from lapa2_interp._util.paths import looked_for
from lapa2_interp.errors import ModelError, first_sentence
from lapa2_interp.files import (
    atomic_folder,
    cache_folder,
    one_process_at_a_time,
    sha256_of,
    write_json,
    writing_cache,
)
from lapa2_interp.models.weights import load_network, quiet_transformers
from lapa2_interp.progress import progress_bar

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor

ENDING = ".gguf"
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
"""The end of the name of a part of a model."""
FACTS = "gguf.json"
"""The file of the `GGUFFacts` in a converted folder."""
LARGEST_FLOAT32 = 2**32
"""Bytes of weights in float32, at most; larger models are stored in 16 bits."""
FLOAT_BITS = {"F32": 24, "F16": 11, "BF16": 8}
"""Significant bits of the types that are not quantised."""
OTHER_QUANTISATION = "the model in another quantisation, such as Q4_K_M or Q8_0"
LLAMA3_TOKENIZERS = ("llama3", "llama-v3", "llama-bpe")
"""Tokenizers that put BOS in front of a text where the file does not say whether they do."""
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The scaling of rotary frequencies in Llama 3.1 and later, of which a file has only the result."""


class GGUFFacts(BaseModel):
    """What a GGUF file says of its model, and how it was converted."""

    sha256: str
    name: str
    architecture: str
    quantisation: str
    """In the words of llama.cpp, such as Q4_K_M or F16."""
    licence: str
    dtype: str
    """The type of the converted weights."""

    def __str__(self) -> str:
        return (
            f"sha256 {self.sha256} (GGUF file: {self.name}, {self.architecture},"
            f" {self.quantisation}, licence {self.licence}; converted to {self.dtype})"
        )


def gguf_of(name: str) -> Path | None:
    """The GGUF file that a model's name stands for: the file itself, or the only one in a folder
    without safetensors weights; None if the name stands for something else.

    Raises:
        ModelError: There is no such file, the folder has several, or it is a part of a model.
    """
    path = Path(name)
    files = [path] if path.suffix.lower() == ENDING and not path.is_dir() else []
    if path.is_dir() and name and not any(path.glob("*.safetensors")):
        files = sorted(path.glob(f"*{ENDING}"))
    if not files:
        return None
    if part := next((file for file in files if PART.search(file.name)), None):
        raise ModelError(
            f"{part} is a part of a model, which transformers does not read; join the parts first:"
            f" `llama-gguf-split --merge {part.name} model{ENDING}`"
        )
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise ModelError(
            f"the folder {name} has {len(files)} GGUF files: {names}; give the path of one of them"
        )
    if not files[0].is_file():
        raise ModelError(f"{name} does not exist; give the path of a GGUF file{looked_for(name)}")
    return files[0]


def gguf_folder(file: Path) -> Path:
    """The folder in the cache with the converted model of a GGUF file, made when missing or
    corrupt. The contents of the file decide its name.

    Raises:
        ModelError: As `convert`.
    """
    digest = _known_sha256(file)
    return converted_folder(f"gguf-{digest[:12]}", file.name, digest, lambda: file)


def gguf_facts(folder: Path) -> GGUFFacts:
    """What was read in the GGUF file that a folder was converted from."""
    return GGUFFacts.model_validate_json((folder / FACTS).read_text(encoding="utf-8"))


def converted_folder(
    folder_name: str, title: str, digest: str, find_file: Callable[[], Path]
) -> Path:
    """A folder in the cache (`LAPA2_CACHE`, or the platform's) with a converted model, made when
    missing or corrupt.

    Args:
        title: The model's name for messages.
        digest: The GGUF file's sha256.
        find_file: Gives the GGUF file; called if the model must be converted.

    Raises:
        ModelError: As `convert` and `find_file`; or the cache cannot be written.
    """
    folder = cache_folder() / folder_name
    with one_process_at_a_time(folder):
        if folder.exists():
            if (problem := _find_damage(folder)) is None:
                return folder
            print(f"the cached {title} is corrupt ({problem}); rebuilding it", file=sys.stderr)
        file = find_file()
        print(f"converting {title} once into {folder}", file=sys.stderr)
        with writing_cache(folder), atomic_folder(folder) as fresh:
            before = _stamp(file)
            convert(file, fresh, digest)
            if _stamp(file) != before:
                raise ModelError(f"{file} changed while it was converted; load it again")
            _write_seal(fresh)
    return folder


def convert(file: Path, folder: Path, digest: str) -> None:
    """Convert a GGUF file to a folder that transformers loads.

    Args:
        folder: An empty folder.
        digest: The file's sha256.

    Raises:
        ModelError: It is no whole GGUF file of a language model with a tokenizer, transformers
            cannot read it, or transformers ignores something in it that the model needs.
    """
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with file.open("rb") as stream:
        if (begin := stream.read(4)) != b"GGUF":
            raise ModelError(f"{file} is no GGUF file: it begins with {begin!r}; download it again")
    with (
        TemporaryDirectory() as alone,  # transformers also reads what lies beside the file
        warnings.catch_warnings(),
        # transformers would read the header for config, weights and tokenizer each, and make the
        # map of names again for every module: more than half of the time of a conversion.
        _replaced(
            gguf,
            GGUFReader=cache(gguf.GGUFReader),
            get_tensor_name_map=cache(gguf.get_tensor_name_map),
        ),
    ):
        warnings.simplefilter("ignore")
        link = Path(alone) / f"model{ENDING}"
        try:
            link.symlink_to(file.resolve())
        except OSError:  # Windows lets only some users make links
            shutil.copyfile(file, link)
        header = _read_header(file, link)
        facts = _read_facts(header, digest)
        _check_space(header, facts, folder)
        try:
            # Standard error is redirected, since one bar there cannot be switched off.
            with (
                _progress(header, file.name),
                quiet_transformers(),
                redirect_stderr(StringIO()),
            ):
                tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=link.name)
                network = load_network(
                    AutoModelForCausalLM, alone, gguf_file=link.name, dtype=facts.dtype
                )
                _tie(network, header)
                _check_all_taken(network, header, file)
                _restore_window(network, header)
                _restore_markers(network, tokenizer, header)
                # The tensors are plain now, but these attributes would forbid saving them.
                del network.config.quantization_config
                network.hf_quantizer = None
                network.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
        except ModelError as error:
            raise ModelError(str(error).replace(alone, str(file))) from error
        except Exception as error:  # many libraries raise here
            if isinstance(error, MemoryError) or getattr(error, "errno", None):
                raise
            raise ModelError(_refusal(file, facts, error)) from error
    write_json(folder / FACTS, facts.model_dump_json())


@contextmanager
def _progress(header: GGUFReader, name: str) -> Iterator[None]:
    """A block in which the weights that transformers dequantises advance a bar."""
    import gguf

    plain = gguf.dequantize

    def dequantize(*arguments: Any) -> Any:
        weights = plain(*arguments)
        bar.update(weights.size)
        return weights

    with (
        progress_bar(_count(header), f"converting {name}", "weight") as bar,
        _replaced(gguf, dequantize=dequantize),
    ):
        yield


def _check_space(header: GGUFReader, facts: GGUFFacts, folder: Path) -> None:
    """Refuse to convert a file whose weights do not fit on the disk.

    Raises:
        ModelError: They do not.
    """
    needed = _count(header) * (4 if facts.dtype == "float32" else 2)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ModelError(
            f"the converted model takes {needed / 1e9:.1f} GB, and the cache {cache_folder()} has"
            f" {free / 1e9:.1f} GB; set LAPA2_CACHE to a folder with more space"
        )


def _refusal(file: Path, facts: GGUFFacts, error: Exception) -> str:
    """The message for a file that transformers cannot read."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    reason, advice = first_sentence(error) or type(error).__name__, ""
    if "architecture" in reason:
        known = sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"})
        advice = f"one of {', '.join(known)}, or "
    elif "antization" in reason:
        advice = f"{OTHER_QUANTISATION}, or "
    return (
        f"transformers cannot read {file} ({facts.architecture}, {facts.quantisation}): {reason};"
        f" give {advice}the model as a folder with safetensors weights"
    )


@contextmanager
def _replaced(module: Any, **functions: Any) -> Iterator[None]:
    """A block in which functions of a module are others."""
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _read_header(file: Path, link: Path) -> GGUFReader:
    """The header of a GGUF file.

    Args:
        file: Its path for messages.
        link: The path by which transformers reads it.

    Raises:
        ModelError: It is damaged, it has tensors of an unknown type or no tokenizer, or its rotary
            frequencies are scaled in a way that transformers does not read.
    """
    import gguf

    try:
        header = gguf.GGUFReader(str(link))
        architecture = str(_field(header, "general.architecture"))
    except Exception as error:  # numpy's, of many types
        reason = first_sentence(error)
        if "GGMLQuantizationType" in reason:
            version = importlib.metadata.version("gguf")
            raise ModelError(
                f"{file} has tensors of a type that gguf {version} does not know ({reason}); give"
                f" {OTHER_QUANTISATION}"
            ) from error
        raise ModelError(
            f"{file} is damaged or cut off: its {file.stat().st_size:,} bytes do not hold what its"
            " header says; download it again"
        ) from error
    if "tokenizer.ggml.tokens" not in header.fields:
        raise ModelError(
            f"{file} has no tokenizer; give a file that has one, or the model as a folder with"
            " safetensors weights and a tokenizer"
        )
    for key in ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"):
        scaling = _field(header, f"{architecture}.{key}")
        if scaling not in (None, "none", 0, 1) and architecture != "gpt-oss":
            raise ModelError(
                f"{file} scales its rotary frequencies ({key} {scaling}), which transformers does"
                " not read in a GGUF file; give the model as a folder with safetensors weights"
            )
    return header


def _field(header: GGUFReader, key: str) -> str | int | float | None:
    """The value of a text or number in a header; None where it lacks one."""
    field = header.fields.get(key)
    if field is None:
        return None
    value = field.parts[field.data[0]]
    return bytes(value).decode() if field.types[0].name == "STRING" else value[0].item()


def _read_facts(header: GGUFReader, digest: str) -> GGUFFacts:
    from gguf import LlamaFileType

    file_type: Any = _field(header, "general.file_type")
    try:
        quantisation = LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        quantisation = f"file type {'not stated' if file_type is None else file_type}"
    large = 4 * _count(header) > LARGEST_FLOAT32
    halved = "float16" if quantisation == "F16" else "bfloat16"
    return GGUFFacts(
        sha256=digest,
        name=str(_field(header, "general.name") or "no name"),
        architecture=str(_field(header, "general.architecture")),
        quantisation=quantisation,
        licence=str(_field(header, "general.license") or "not stated"),
        dtype=halved if large else "float32",
    )


def _count(header: GGUFReader) -> int:
    """Weights in a file."""
    return sum(int(tensor.n_elements) for tensor in header.tensors)


def _tie(network: Any, header: GGUFReader) -> None:
    """Tie the output layer of a network to its embeddings if the file has two copies of one matrix
    for them, which were quantised in two ways. Both are then the more precise copy."""
    bits = {tensor.name: _bits(tensor.tensor_type.name) for tensor in header.tensors}
    if network.config.tie_word_embeddings or "output.weight" not in bits:
        return
    layers = (network.get_input_embeddings(), network.get_output_embeddings())
    copies = sorted(
        zip((bits["token_embd.weight"], bits["output.weight"]), (0, 1), layers, strict=True)
    )
    (fewest, _, coarse), (_, _, fine) = copies
    if _are_copies(coarse.weight, fine.weight, fewest):
        coarse.weight = fine.weight
        network.config.tie_word_embeddings = True


def _bits(type_name: str) -> int:
    """Bits of a weight, without those of the scales that many weights share."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return FLOAT_BITS.get(type_name) or 8 * size // numbers


def _are_copies(coarse: Tensor, fine: Tensor, bits: int) -> bool:
    """True if two matrices differ no more than rounding to some bits explains: in a block of 32
    numbers that share a scale, rounding is off by at most the largest one times 2^-bits. The root
    mean squares are compared; those of matrices that are not copies differ by a multiple."""
    if coarse.shape != fine.shape:
        return False
    block, squares, allowed = math.gcd(32, fine.shape[1]), 0.0, 0.0
    for some, same in zip(coarse.split(4096), fine.split(4096), strict=True):  # to save memory
        squares += float((some.float() - same.float()).square().sum())
        largest = same.float().reshape(-1, block).abs().amax(-1)
        allowed += block * 4.0**-bits * float(largest.square().sum())
    return squares <= allowed


def _check_all_taken(network: Any, header: GGUFReader, file: Path) -> None:
    """Refuse a file that has more numbers than the network: transformers ignores tensors that it
    does not know.

    Raises:
        ModelError: It has more.
    """
    config = network.config.get_text_config()
    left = -sum(weight.numel() for weight in {*network.state_dict(keep_vars=True).values()})
    for tensor in header.tensors:
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        # Blocks after the last layer predict several tokens at once, and no model takes them.
        if block is None or int(block[1]) < config.num_hidden_layers:
            left += int(tensor.n_elements)
        if tensor.name == "output.weight" and config.tie_word_embeddings:
            left -= int(tensor.n_elements)
        if tensor.name == "rope_freqs.weight" and (
            config.model_type.startswith("gemma4")  # its configuration implies them
            or _took_factors(network, tensor.data)
        ):
            left -= int(tensor.n_elements)
    if left > 0:
        rotary = [tensor.name for tensor in header.tensors if tensor.name.startswith("rope_")]
        raise ModelError(
            f"{file} has {left} numbers more than transformers' {type(network).__name__} takes"
            f" ({', '.join(rotary) or 'in tensors whose names it does not know'}), and would be"
            " another model without them; give the model as a folder with safetensors weights"
        )


def _took_factors(network: Any, factors: Any) -> bool:
    """True if the scaling of Llama 3 explains by which factors a file scales the rotary
    frequencies; it is then in the network's configuration.

    Args:
        factors: [d_head/2], by which the frequencies are divided.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, before = network.config, dict(network.config.rope_parameters)
    config.rope_parameters = before | LLAMA3_SCALING | {"factor": float(factors.max())}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    pairs = torch.arange(len(factors)) * 2 / (2 * len(factors))
    wanted = before["rope_theta"] ** -pairs / torch.from_numpy(factors.copy())
    if scaled.shape == wanted.shape and torch.allclose(scaled, wanted, rtol=1e-4, atol=0):
        return True
    config.rope_parameters = before
    return False


def _restore_window(network: Any, header: GGUFReader) -> None:
    """Let queries see as many keys as the file says, which transformers does not read for every
    architecture (Phi-3)."""
    config = network.config.get_text_config()
    window = _field(header, f"{_field(header, 'general.architecture')}.attention.sliding_window")
    if window and getattr(config, "sliding_window", window) is None:
        config.sliding_window = window


def _restore_markers(network: Any, tokenizer: Any, header: GGUFReader) -> None:
    """Let texts start and end as in llama.cpp, where transformers reads less in the file: with the
    BOS of Llama 3, and at tokens that end a turn or a message."""
    said = _field(header, "tokenizer.ggml.add_bos_token") is not None
    if _field(header, "tokenizer.ggml.pre") in LLAMA3_TOKENIZERS and not said:
        tokenizer.add_bos_token = True
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = {int(end) for key in keys if (end := _field(header, key)) is not None}
    if len(ends) > 1:
        network.generation_config.eos_token_id = sorted(ends)


def _known_sha256(file: Path) -> str:
    """The sha256 of a file, computed once: the cache keeps it until the file changes."""
    path_hash = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    record, stamp = cache_folder() / "hashes" / f"{path_hash}.json", _stamp(file)
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(record.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return str(known["sha256"])
    try:
        digest = sha256_of(file)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    with suppress(OSError):
        write_json(record, {"file": str(file.resolve()), "sha256": digest, "stamp": stamp})
    return digest


def _stamp(file: Path) -> list[int]:
    """Numbers that change whenever a file does: its change time cannot be set."""
    status = file.stat()
    return [*_size_and_time(file), status.st_ctime_ns, status.st_ino]


def _write_seal(folder: Path) -> None:
    seal = {
        file.name: [sha256_of(file), *_size_and_time(file)] for file in sorted(folder.iterdir())
    }
    (folder / "seal.json").write_text(json.dumps(seal, indent=1))


def _find_damage(folder: Path) -> str | None:
    """The damage of a sealed folder, None if there is none. Only files that were touched since are
    hashed."""
    try:
        text = (folder / "seal.json").read_text(encoding="utf-8")
        seal = TypeAdapter(dict[str, tuple[str, int, int]]).validate_json(text)
    except (OSError, ValueError):
        return "its seal is missing or unreadable"
    if "model.safetensors" not in seal:
        return "its seal does not name the weights"
    for name, (digest, *stamp) in seal.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if stamp != _size_and_time(file) and sha256_of(file) != digest:
            return f"{name} has another sha256"
    return None


def _size_and_time(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]
