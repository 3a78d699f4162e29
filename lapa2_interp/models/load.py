"""Loading of models by name.

The bundled SmolLM2, any Hugging Face causal language model, tiny random models, and planted models
whose circuit is known.

`load_model` returns a TransformerLens model that was checked live (an edit of the attention scores
moves the logits). Its tokenizer knows what plain text starts with (`bias.text_start`), and
`identify` is its record.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from lapa2_interp._util.paths import looked_for
from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.bias.text_start import (
    AUTO_START,
    NO_START,
    USUAL_START,
    TextStart,
    settle_start,
    start_setting,
    usual_start,
)
from lapa2_interp.bias.tokens import without_dropout
from lapa2_interp.errors import ModelError, first_sentence, parameter, unknown_choice
from lapa2_interp.models.blocks import check_no_open_block
from lapa2_interp.models.cache_name import let_bridges_read
from lapa2_interp.models.card import attach_card, identify, make_card
from lapa2_interp.models.configuration import check_decoder_depth, context_length
from lapa2_interp.models.exact_softmax import make_softmax_exact
from lapa2_interp.models.facts import Model, TransformersModel, check_has_tokenizer, facts_of
from lapa2_interp.models.fingerprint import weights_read_once
from lapa2_interp.models.gguf_file import gguf_facts, gguf_folder, gguf_of
from lapa2_interp.models.lens_classes import make_bridge, make_hooked_transformer
from lapa2_interp.models.liveness import assert_live
from lapa2_interp.models.machine import check_attn, default_device, resolve_dtype
from lapa2_interp.models.offloaded import device_of
from lapa2_interp.models.planted import (
    PLANTED,
    answer_key,
    is_planted,
    planted_network,
    planted_tokenizer,
)
from lapa2_interp.models.positions import LOG_PROB_TOLERANCE
from lapa2_interp.models.prepacked import choose_prepacking
from lapa2_interp.models.rotary import refuse_mixed_rotary
from lapa2_interp.models.smollm2 import (
    SMOLLM2,
    SMOLLM2_SHA256,
    SMOLLM2_WHEEL,
    smollm2_folder,
)
from lapa2_interp.models.tiny import TINY, tiny_config, tiny_tokenizer
from lapa2_interp.models.untrained import SEED, UNTRAINED, untrained
from lapa2_interp.models.weights import (
    ADAPTER,
    adapter_error,
    check_generation_config,
    check_layers,
    check_weights,
    files_unchanged,
    folder_hash,
    load_network,
    quiet_transformers,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


P = ParamSpec("P")
R = TypeVar("R")
REMOTE_CODE = (
    "comes with its own Python code, which does not run unless you ask for it: read it, then"
    f" give {parameter('trust_remote_code', True)} (a sweep never runs it)"
)


@numbers_checked
def load_model(
    name: str | Path,
    dtype: str = "float32",
    device: str | None = None,
    model_class: str = "TransformerBridge",
    trust_remote_code: bool = False,
    pack: str = "auto",
    workers: Count = 1,
    seed: int | None = None,
    attn: str = "auto",
    start: str | None = AUTO_START,
) -> Model:
    """Load a model, ready for `augmented`.

    Example:
        >>> from lapa2_interp import load_model
        >>> model = load_model("tiny-gpt2")
        >>> model.cfg.n_layers, model.cfg.n_heads
        (4, 4)

    Args:
        name: "smollm2-135m", "tiny-gpt2", "tiny-llama", "tiny-neox", "planted" (`models.planted`),
            a Hugging Face hub id, a local folder, or a GGUF file, which is converted once (both
            also as a Path); "random:NAME" is the same model untrained.
        dtype: "float32", "bfloat16", "float16" or "float64"; or "auto": bfloat16 where the device
            computes faster in it than in float32, else float32 (`models.machine.faster_dtype`).
            Texts differ between dtypes.
        device: "cpu", "cuda", "cuda:1", ...; CUDA when there is one, by default. "auto" spreads the
            layers of a model that is larger than one GPU over all there are (transformers'
            device_map).
        model_class: "TransformerBridge"; "HookedTransformer" (transformer-lens 3.9 only; weights
            unprocessed); or "TransformersModel": no hooks, faster on small batches, and also for
            architectures that TransformerLens lacks or whose hooks are dead.
        trust_remote_code: Run code that comes with the model.
        pack: Compute with prepacked weights, which is faster on a CPU and needs the memory of the
            weights a second time: auto where it fits, on, or off
            (`models.prepacked.choose_prepacking`).
        workers: Processes on this machine that load the model, for pack "auto".
        seed: Seed of a planted model; load_model("planted", seed=3) is load_model("planted:3").
        attn: As of `TransformersModel`; the other classes always form the matrix.
        start: What plain text starts with, here and in all that reads the model's tokenizer:
            "auto" (`bias.text_start`), None or "none" for nothing, "usual", or a token's text.

    Returns:
        A model of that class in eval mode, logits equal to transformers'.

    Raises:
        ModelError: Not found, not loadable, the class is not in the installed transformer-lens, or
            its logits are not those of transformers.
        DeadHookError: Its attention ignores edits of the scores.
    """
    import torch

    # Check the arguments.
    wrap: dict[str, Callable[..., Model]] = {
        "TransformerBridge": make_bridge,
        "HookedTransformer": make_hooked_transformer,
        "TransformersModel": lambda network, tokenizer, name, *_: TransformersModel(
            network, tokenizer, name, attn
        ),
    }
    if model_class not in wrap:
        raise ModelError(unknown_choice("model class", model_class, wrap))
    check_attn(attn, model_class)
    if not isinstance(name, str | Path):
        raise ModelError(
            f"load_model takes a name, a folder or a GGUF file, found a {type(name).__name__}; with"
            " its tokenizer a transformers model is TransformersModel(network, tokenizer, name)"
        )
    name = expand_name(name)
    if seed is not None:
        if not is_planted(name) or ":" in name:
            raise ModelError(f"a seed belongs to a planted model without one, not to {name!r}")
        name = f"{name}:{seed}"
    # Load the transformers model, and put it on its device or devices.
    spread = device == "auto"
    if device is None or spread:
        device = default_device()
    dtype = resolve_dtype(dtype, device)
    network, tokenizer, weights = load_transformers(
        name, dtype, trust_remote_code, "auto" if spread else None, start
    )
    if getattr(network, "hf_device_map", None):
        _check_device_map(network.hf_device_map, model_class)
    else:
        move_to_device(network, device)
    check_decoder_depth(network)
    # Wrap it in the model class, with its log-probabilities before and after.
    architecture = type(network).__name__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the libraries
        try:
            # Some adapters change the network that they wrap, so its log-probabilities come first.
            wanted = _sample_log_probs(network, network)
            model = wrap[model_class](network, tokenizer, name, getattr(torch, dtype), device)
            model.eval()
            if dtype == "float64" and model_class == "TransformerBridge":
                make_softmax_exact(model)
            log_probs = _sample_log_probs(model, network)
        except ModelError:
            raise
        except Exception as error:  # the adapters of architectures raise various errors
            hint = "" if model_class == "TransformersModel" else "; TransformersModel may do"
            raise ModelError(
                f"cannot load {name!r} ({architecture}) as {model_class}:"
                f" {first_sentence(error) or type(error).__name__}{hint}"
            ) from error
    _follow_start(model)
    assert_live(model, name)
    _check_same_log_probs(log_probs, wanted, name, model_class, dtype)
    prepacking = choose_prepacking(facts_of(model).network, pack, workers)
    card = make_card(model, name, weights, architecture, network.generation_config, prepacking)
    attach_card(model, card)
    return model


def resolve_model(model: Model | str | Path) -> Model:
    """The model that a user gives, loaded if it is a name.

    A model that was made elsewhere is checked live, once.

    Raises:
        ModelError: As `load_model`; a bare transformers model, or one without a tokenizer.
        DeadHookError: Its attention ignores edits of the scores.
    """
    if isinstance(model, str | Path):
        return load_model(model)
    check_has_tokenizer(model)
    # The start is settled once, and again where the model's own setting was changed since.
    settled = getattr(model.tokenizer, "lapa2_start", None)
    prepends = getattr(model.cfg, "default_prepend_bos", None)
    if settled is None or prepends not in (None, settled.token is not None):
        settle_start(model, model_type=_model_type(model))
    if getattr(model, "lapa2_card", None) is None:
        let_bridges_read(facts_of(model).network)
        assert_live(model, model.cfg.model_name)
        identify(model)
    return model


def _follow_start(model: Model) -> None:
    """Let strings start as layouts do: `model.to_tokens` then gives the ids of a layout."""
    start = settle_start(model.tokenizer, model_type=_model_type(model))
    model.cfg.default_prepend_bos = start.token is not None


def _model_type(model: Model) -> str:
    return getattr(getattr(facts_of(model).network, "config", None), "model_type", "")


def _model_alone(named: Any) -> Model:
    """`resolve_model`, without an open block."""
    model = resolve_model(named)
    check_no_open_block(model)
    return model


def accepts_model_name(function: Callable[P, R]) -> Callable[P, R]:
    """Let the argument `model` of a function, its first one, also be a name (`resolve_model`). A
    model with an open block is refused, and in each call its weights are read once
    (`weights_read_once`).
    """

    @functools.wraps(function)
    @weights_read_once()
    def with_model(*args: P.args, **settings: P.kwargs) -> R:
        arguments: Any = args
        if args:
            arguments = (_model_alone(args[0]), *args[1:])
        elif "model" in settings:
            settings["model"] = _model_alone(settings["model"])
        return function(*arguments, **settings)

    return with_model


def _sample_log_probs(model: Any, network: Any) -> Tensor:
    """Log-probabilities [query vocab] after 32 ids from the whole vocabulary, on the CPU."""
    import torch

    config = network.config.get_text_config()
    n = min(32, context_length(config))
    ids = torch.linspace(0, config.vocab_size - 1, n + 2)[1:-1].long()[None]
    with torch.no_grad():
        output = model(ids.to(device_of(network)))
    return getattr(output, "logits", output)[0].cpu().float().log_softmax(-1)


def _check_same_log_probs(
    log_probs: Tensor, wanted: Tensor, name: str, model_class: str, dtype: str
) -> None:
    """Refuse a model whose log-probabilities are not those of the transformers model.

    Raises:
        ModelError: They differ by more than rounding.
    """
    difference = float((log_probs - wanted).abs().mean())  # in half precision a few differ by more
    if difference > LOG_PROB_TOLERANCE[dtype]:
        raise ModelError(
            f"{name} as {model_class} is another model than transformers loads: log-probabilities"
            f" differ by {difference:.2g}, allowed {LOG_PROB_TOLERANCE[dtype]:g} ({dtype});"
            " transformer-lens ignores some of its configuration; use model class TransformersModel"
        )


def move_to_device(network: PreTrainedModel | Tensor, device: str | None) -> None:
    """Put a network, or a tensor as a trial, on a device, by default CUDA when there is one.

    Raises:
        ModelError: There is no such device, or not enough memory on it.
    """
    device = device or default_device()
    try:
        network.to(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ModelError(f"cannot use device {device!r}: {str(error).splitlines()[0]}") from error


def _check_device_map(device_map: Mapping[str, Any], model_class: str) -> None:
    places = {str(device) for device in device_map.values()}
    if places & {"cpu", "disk"}:
        raise ModelError(
            "the model is larger than the GPUs here together; give it more of them"
            f" ({parameter('gpus_per_worker')} on a Ray cluster), or half the precision (dtype"
            " bfloat16)"
        )
    if model_class == "HookedTransformer" and len(places) > 1:
        raise ModelError(
            "a HookedTransformer is on one device; use TransformerBridge for a model larger than"
            " one GPU"
        )


def load_transformers(
    name: str | Path,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    device_map: str | None = None,
    start: str | None = AUTO_START,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """The plain transformers model with eager attention, its tokenizer, and the origin of its
    weights.

    Args:
        device_map: As in transformers; by default the model is put on the CPU. Tiny models always
            are.
        start: As `load_model`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    # Planted, tiny and untrained models are made here.
    name, dtype = expand_name(name), resolve_dtype(dtype)
    if (trained := name.removeprefix(UNTRAINED)) != name:
        network, tokenizer, _ = load_transformers(trained, dtype, trust_remote_code, start=start)
        return untrained(network), tokenizer, f"random, seed {SEED}"
    tokenizer = load_tokenizer(name, trust_remote_code, start)
    if is_planted(name):
        network = planted_network(name).to(getattr(torch, dtype))
        return network.eval(), tokenizer, f"planted, seed {answer_key(name).seed}"
    if name in TINY:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = AutoModelForCausalLM.from_config(
                tiny_config(name, tokenizer), attn_implementation="eager"
            )
        return network.to(getattr(torch, dtype)).eval(), tokenizer, "random, seed 0"
    # All others are loaded from files.
    source = str(model_source(name))
    check_weights(source)
    with quiet_transformers(), files_unchanged(source):
        try:
            check_generation_config(Path(source))
            network = load_network(
                AutoModelForCausalLM,
                source,
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                device_map=device_map,
            )
        except ModelError:
            raise
        except Exception as error:  # damaged files raise errors of many libraries
            raise ModelError(load_error(name, error)) from error
        weights = provenance(name, network.config)
    if dtype == "float64" and network._can_set_experts_implementation():
        network.set_experts_implementation("eager")  # the default's kernels have no float64
    refuse_mixed_rotary(network)
    return network.eval(), tokenizer, weights


def load_tokenizer(
    name: str | Path, trust_remote_code: bool = False, start: str | None = AUTO_START
) -> PreTrainedTokenizerBase:
    """A model's tokenizer alone, which knows what plain text starts with (`bias.text_start`). Its
    `bos_token` is that token, or the usual one where text starts with nothing.

    Where that is a guess, a warning says so.

    Args:
        start: As `load_model`.

    Raises:
        ModelError: Not found.
        LayoutError: The start token is not in the vocabulary.
    """
    name = expand_name(name).removeprefix(UNTRAINED)
    if is_planted(name) or name in TINY:
        tokenizer = planted_tokenizer(name) if is_planted(name) else tiny_tokenizer(name)
        tokenizer.lapa2_start = TextStart(usual_start(tokenizer), "built-in models read it")
        model_type = ""
    else:
        tokenizer, config = _read_tokenizer(name, trust_remote_code)
        model_type = str(config.get("model_type", ""))
    tokenizer.lapa2_usual_start = usual_start(tokenizer)
    first = settle_start(tokenizer, start, model_type).token
    first = tokenizer.lapa2_usual_start if first is None else first
    if first is not None:
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(first)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _read_tokenizer(
    name: str, trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase, dict[str, Any]]:
    """A tokenizer from files, and the configuration of its model."""
    from transformers import AutoTokenizer, PretrainedConfig

    source = str(model_source(name))
    with quiet_transformers():
        try:
            tokenizer = without_dropout(
                AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
            )
            reads = bool(tokenizer("a", add_special_tokens=False).input_ids)
            config, _ = PretrainedConfig.get_config_dict(source)
        except Exception as error:  # damaged files raise errors of many libraries
            raise ModelError(load_error(name, error)) from error
    if not reads:
        raise ModelError(
            f"the tokenizer of {name!r} makes no token of a letter: its files (tokenizer.json, or"
            " the vocabulary of its kind) are missing or empty; put them beside config.json"
        )
    return tokenizer, config


@functools.cache
def start_of_named(name: str, start: str | None) -> str:
    """`start_setting` of a model by its name. Of a model that is not here it is what was set, or
    the usual token: the model is asked for again before its first text."""
    try:
        return start_setting(shared_tokenizer(name), start)
    except ModelError:
        return USUAL_START if start == AUTO_START else NO_START if start is None else start


@functools.cache
def shared_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer that is loaded once and shared, so that nothing may change it.

    Raises:
        ModelError: As `load_tokenizer`.
    """
    return load_tokenizer(name)


def expand_name(name: str | Path) -> str:
    """A model's name or folder as text, with ~ expanded to the user's folder."""
    return os.path.expanduser(name)  # noqa: PTH111  a Path would drop "./", and so rename models


def model_source(name: str) -> str | Path:
    """The folder or hub id from which transformers loads a model. A GGUF file is converted."""
    if (name := name.removeprefix(UNTRAINED)) == SMOLLM2:
        return smollm2_folder()
    if (file := gguf_of(name)) is not None:
        return gguf_folder(file)
    path = Path(name)
    if path.is_dir() and name:
        if (path / ADAPTER).is_file():
            raise ModelError(adapter_error(name))
        if not (path / "config.json").is_file():
            raise ModelError(
                f"the folder {name} has no config.json; give a folder that transformers can load"
            )
        check_layers(path)
        return path.resolve()
    if path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        problem = "is a file" if path.is_file() else "does not exist"
        raise ModelError(
            f"{name} {problem}; give the folder of a model, with config.json and safetensors"
            f" weights, or a .gguf file{looked_for(name)}"
        )
    check_hub(name)
    return name


def check_hub(name: str) -> None:
    """Ask the hub once for a model that is not in the cache. If the hub is not reached, its own
    library would wait for almost a minute.

    Raises:
        ModelError: The hub is not reached, and the cache lacks the model.
    """
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,
        hf_hub_url,
        is_offline_mode,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import HfHubHTTPError

    try:
        here = isinstance(try_to_load_from_cache(name, "config.json"), str)
        if not here and not is_offline_mode():
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (HfHubHTTPError, ValueError):
        pass  # an answer, or no hub id: transformers says more
    except Exception as error:  # of the HTTP library, whichever it is
        raise ModelError(
            load_error(name, OSError(f"{constants.ENDPOINT} is not reached: {error}"))
        ) from error


def needs_remote_code(error: Exception) -> bool:
    """True if loading failed because the model's own code may not run."""
    return "trust_remote_code" in str(error)


def load_error(name: str, error: Exception) -> str:
    """The error message for a model that cannot be loaded."""
    if needs_remote_code(error):
        return f"the model {name!r} {REMOTE_CODE}"
    reason = first_sentence(error)
    if isinstance(error, ImportError):  # of quantised weights, or of a tokenizer's own format
        return f"the model {name!r} needs a library that is not installed: {reason}; install it"
    if (path := Path(name)).exists():
        origin = f"the folder {name}" if path.is_dir() else name
        return f"cannot load the model in {origin}: {reason}; download or save it again"
    near = get_close_matches(name, (SMOLLM2, *TINY, PLANTED), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    offline = (
        "; HF_HUB_OFFLINE is set, so the hub is not asked"
        if os.environ.get("HF_HUB_OFFLINE")
        else ""
    )
    return (
        f"cannot load model {name!r}; allowed: {SMOLLM2}, {', '.join(TINY)}, {PLANTED}, a Hugging"
        f" Face hub id, a local folder with safetensors weights or a GGUF file{hint}"
        f" ({reason}{offline})"
        f"{looked_for(name)}"
    )


def provenance(name: str, config: PretrainedConfig) -> str:
    """The origin of a model: a hash of the files that decide its texts, or the hub's commit."""
    if name == SMOLLM2:
        return f"sha256 {SMOLLM2_SHA256} ({SMOLLM2_WHEEL})"
    if gguf_of(name) is not None:
        return str(gguf_facts(Path(config.name_or_path)))  # the converted folder that was read
    if Path(name).is_dir():
        digest = folder_hash(Path(name))
        return f"sha256 {digest} (of the folder's weights, configuration and tokenizer)"
    return f"hub commit {getattr(config, '_commit_hash', None)}"


def wrap_in_bridge(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, weights: str
) -> Model:
    """A TransformerBridge, with its card, around an existing transformers model.

    The network then belongs to the bridge.

    Args:
        network: A model with eager attention.
        name, weights: As in `ModelCard`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make_bridge(network, tokenizer, name, network.dtype, str(device_of(network)))
    model.eval()
    _follow_start(model)
    card = make_card(model, name, weights, type(network).__name__, network.generation_config)
    attach_card(model, card)
    return model
