"""Models in GGUF files: the weights, tokenizer and card are those of the file, it is converted once,
and what transformers would read wrongly is refused. The expected logits are those of transformers
on the network from which a file was written."""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from conftest import lapa2
from gguf_files import (
    PIECES,
    SPECIAL,
    TEMPLATE,
    TOKENS,
    rounded,
    tensors_of,
    tiny_network,
    write_gguf,
)

from lapa2_interp import generate, load_model
from lapa2_interp.errors import ModelError
from lapa2_interp.files import sha256_of
from lapa2_interp.models import gguf_file, identify, load_tokenizer
from lapa2_interp.models.load import load_transformers
from lapa2_interp.models.sizes import model_size
from lapa2_interp.runs.run import load_run

IDS = torch.tensor([[0, 40, 77, 101, 102, 259, 60, 77]])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAPA2_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", tiny_network("qwen2", tied=True))


def logits(network):
    with torch.no_grad():
        return network(IDS).logits


def assert_same(name, network):
    """The file's network has the weights of another, and computes the same."""
    loaded, _, _ = load_transformers(str(name))
    wanted = network.state_dict()
    for key, weight in loaded.state_dict().items():
        assert torch.equal(weight, wanted[key]), key
    assert len(loaded.state_dict()) == len(wanted)
    assert loaded.config.tie_word_embeddings == network.config.tie_word_embeddings
    torch.testing.assert_close(logits(loaded), logits(network))
    return loaded


# --- weights


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_weights_are_those_of_the_file(tmp_path, kind, tied):
    network = tiny_network(kind, tied)
    file = write_gguf(tmp_path / "tiny.gguf", network)
    assert_same(file, network)
    model = load_model(file, device="cpu")
    difference = logits(network).log_softmax(-1) - model(IDS).log_softmax(-1)
    assert difference.abs().max() < 1e-4


def test_quantised_weights_are_dequantised_exactly(tmp_path):
    network = tiny_network("llama", True)
    types = {"attn_v.weight": "Q8_0", "ffn_up.weight": "Q4_0", "token_embd.weight": "F16"}
    file = write_gguf(tmp_path / "tiny.gguf", network, types)
    for layer in network.model.layers:
        layer.self_attn.v_proj.weight.data = rounded(layer.self_attn.v_proj.weight.data, "Q8_0")
        layer.mlp.up_proj.weight.data = rounded(layer.mlp.up_proj.weight.data, "Q4_0")
    embeddings = network.get_input_embeddings()
    embeddings.weight.data.copy_(embeddings.weight.data.half().float())
    assert_same(file, network)


@pytest.mark.parametrize(
    ("embeddings", "output", "kept"),
    [
        ("Q5_0", "Q8_0", "Q8_0"),
        ("Q4_0", "Q8_0", "Q8_0"),
        ("Q8_0", "Q5_0", "Q8_0"),
        ("Q8_0", "F16", "F16"),
        ("Q8_0", "BF16", "BF16"),
        ("F32", "F32", "F32"),
        ("Q4_0", "Q4_0", "Q4_0"),
    ],
)
def test_two_copies_of_one_matrix_are_tied(tmp_path, embeddings, output, kept):
    """Both layers have the copy that is stored more precisely."""
    network = tiny_network("qwen2", tied=True)
    matrix = network.get_input_embeddings().weight.data
    file = write_gguf(
        tmp_path / "tiny.gguf",
        network,
        {"token_embd.weight": embeddings, "output.weight": output},
        {"output.weight": matrix.numpy().copy()},
    )
    matrix.copy_(rounded(matrix, kept))
    loaded = assert_same(file, network)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert model_size(str(file)).parameters == network.num_parameters()


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_matrices_that_differ_by_more_than_rounding_stay_two(tmp_path, kind, share):
    """Also if the output layer was trained from the embeddings, and is near them."""
    network = tiny_network("qwen2")
    embeddings, output = network.model.embed_tokens.weight.data, network.lm_head.weight.data
    output.mul_(share).add_(embeddings, alpha=1 - share)
    types = {"token_embd.weight": kind, "output.weight": kind}
    file = write_gguf(tmp_path / "tiny.gguf", network, types)
    for matrix in (embeddings, output):
        matrix.copy_(rounded(matrix, kind))
    assert_same(file, network)


def test_large_models_are_stored_in_16_bits(tmp_path, file, monkeypatch):
    """Half floats of the file stay as they are; others become bfloat16. The dtype that is asked for
    is applied to these, as to those of any model."""
    monkeypatch.setattr(gguf_file, "LARGEST_FLOAT32", 1000)
    network = tiny_network("qwen2", tied=True)
    half = write_gguf(
        tmp_path / "half.gguf",
        network,
        {"weight": "F16"},
        file_type=gguf.LlamaFileType.MOSTLY_F16,
    )
    for name, dtype in ((file, torch.bfloat16), (half, torch.float16)):
        wanted = network.model.embed_tokens.weight.to(dtype)
        for asked in (torch.float32, torch.bfloat16):
            loaded, _, weights = load_transformers(name, str(asked).removeprefix("torch."))
            assert torch.equal(loaded.model.embed_tokens.weight, wanted.to(asked))
            assert weights.endswith(f"converted to {str(dtype).removeprefix('torch.')})")


def scaled_factors(theta=1e4, factor=8.0, width=16):
    """What llama.cpp writes for Llama 3's rotary scaling: old frequency by new one."""
    factors = []
    for i in range(0, width, 2):
        length = 2 * np.pi * theta ** (i / width)
        share = (8192 / length - 1) / 3
        factors.append(
            1.0 if length < 2048 else factor if length > 8192
            else 1 / ((1 - share) / factor + share)
        )  # fmt: skip
    return np.array(factors, np.float32)


def test_the_rotary_scaling_of_llama_3_is_found_in_its_factors(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    network, plain = tiny_network(rope_parameters=scaling), tiny_network()
    tensors = {"rope_freqs.weight": scaled_factors()}
    loaded = assert_same(write_gguf(tmp_path / "a.gguf", network, tensors=tensors), network)
    frequencies = network.model.rotary_emb.inv_freq
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, frequencies)
    assert not torch.allclose(plain.model.rotary_emb.inv_freq, frequencies)


def test_a_window_of_the_file_is_that_of_the_model(tmp_path):
    network = tiny_network("phi3", pad_token_id=0, sliding_window=4)
    wide = tiny_network("phi3", pad_token_id=0)
    fields = {"phi3.attention.sliding_window": 4, "phi3.rope.dimension_count": 16}
    fields["tokenizer.ggml.padding_token_id"] = 0
    loaded = assert_same(write_gguf(tmp_path / "a.gguf", network, fields=fields), network)
    ids = torch.arange(3, 15)[None]
    assert torch.equal(loaded(ids).logits, network(ids).logits)
    assert not torch.allclose(wide(ids).logits, network(ids).logits)


# --- tokenizer


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_tokenizer_is_that_of_the_file(tmp_path, add_bos):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_network(), add_bos=add_bos)
    tokenizer = load_tokenizer(file)
    pieces = ["th", "e", "Ġth", "i", "n", SPECIAL[2]]
    ids = [TOKENS.index(piece) for piece in pieces]
    assert tokenizer("the thin<|turn|>", add_special_tokens=False).input_ids == ids
    assert tokenizer("the thin<|turn|>").input_ids == [0] * add_bos + ids
    assert tokenizer.decode(ids) == "the thin<|turn|>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == tuple(SPECIAL[:2])
    assert (tokenizer.lapa2_start.source == "its tokenizer adds it") == add_bos
    assert tokenizer.chat_template == TEMPLATE


def test_a_tokenizer_of_llama_3_adds_bos_unless_the_file_says_otherwise(tmp_path):
    for add_bos, read in ((None, [0]), (False, [])):
        file = write_gguf(tmp_path / "a.gguf", tiny_network(), add_bos=add_bos, pre="llama-bpe")
        assert load_tokenizer(file)("the").input_ids == [*read, *map(TOKENS.index, ("th", "e"))]


def test_a_sentencepiece_tokenizer(tmp_path):
    """It adds BOS, and reads bytes of letters that it lacks."""
    network = tiny_network(vocab_size=len(PIECES))
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", network, tokenizer="sentencepiece"))
    pieces = ["<s>", "▁th", "e", "▁", "<0x7A>", "e"]
    assert tokenizer("the ze").input_ids == [PIECES.index(piece) for piece in pieces]
    assert tokenizer.decode(tokenizer("the ze").input_ids[1:]) == "the ze"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_a_qwen_that_adds_no_bos_reads_none(file):
    model = load_model(file, device="cpu")
    assert identify(model).start_token == ""
    assert model.to_tokens("the").tolist() == [[TOKENS.index("th"), TOKENS.index("e")]]


def test_texts_also_end_at_the_end_of_a_turn(tmp_path):
    fields = {"tokenizer.ggml.eot_token_id": 2}
    file = write_gguf(tmp_path / "tiny.gguf", tiny_network(), fields=fields)
    assert identify(load_model(file, device="cpu")).end_ids == (1, 2)


def test_what_lies_beside_the_file_is_not_read(file):
    """transformers would merge an adapter and take another chat template."""
    (file.parent / "adapter_config.json").write_text("{}")
    (file.parent / "tokenizer_config.json").write_text('{"chat_template": "x", "eos_token": "a"}')
    (file.parent / "model.safetensors").write_bytes(b"other")
    tokenizer = load_tokenizer(file)
    assert (tokenizer.chat_template, tokenizer.eos_token) == (TEMPLATE, SPECIAL[1])


# --- the card, and the cache


def test_the_card_has_the_facts_of_the_file(tmp_path):
    network = tiny_network("llama", True)
    kind = gguf.LlamaFileType.MOSTLY_Q8_0
    file = write_gguf(tmp_path / "a.gguf", network, {"attn_v.weight": "Q8_0"}, file_type=kind)
    card = identify(load_model(file, device="cpu"))
    assert card.name == str(file)
    assert card.weights == (
        f"sha256 {sha256_of(file)} (GGUF file: Tiny of the tests, llama, Q8_0, licence apache-2.0;"
        " converted to float32)"
    )
    bare = write_gguf(tmp_path / "b.gguf", network, licence=None, file_type=99)
    _, _, weights = load_transformers(bare)
    assert "llama, file type 99, licence not stated" in weights


def test_a_file_is_converted_and_hashed_once(file, cache, monkeypatch, tmp_path):
    """The contents decide, and no name: another file with them needs no conversion."""
    first = load_transformers(file)[2]
    folder = cache / f"gguf-{sha256_of(file)[:12]}"
    assert {path.name for path in cache.iterdir()} == {folder.name, "hashes", "locks"}

    def never(*_):
        raise AssertionError

    monkeypatch.setattr(gguf_file, "convert", never)
    copy = shutil.copy(file, tmp_path / "renamed.gguf")
    assert load_transformers(copy)[2] == first
    monkeypatch.setattr(gguf_file, "sha256_of", never)
    for name in (file, copy):
        assert load_transformers(name)[2] == first


def test_a_changed_file_is_converted_anew(file, tmp_path):
    """Also one of the same size and time."""
    import os

    load_transformers(file)
    status, network = file.stat(), tiny_network("qwen2", tied=True)
    network.model.norm.weight.data.fill_(3.0)
    write_gguf(file, network)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    assert_same(file, network)


def test_a_damaged_conversion_is_made_anew(file, cache, capsys):
    load_transformers(file)
    weights = next(cache.glob("gguf-*/model.safetensors"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + b"x")
    load_transformers(file)
    assert weights.read_bytes() == data
    assert "the cached tiny.gguf is corrupt" in capsys.readouterr().err


def test_a_file_that_changes_meanwhile_is_refused(file, cache, monkeypatch):
    convert = gguf_file.convert

    def slowly(*arguments):
        convert(*arguments)
        file.touch()

    monkeypatch.setattr(gguf_file, "convert", slowly)
    with pytest.raises(ModelError, match="changed while it was converted"):
        load_transformers(file)
    assert not list(cache.glob("gguf-*"))


def test_a_folder_with_one_file_is_that_file(file, tmp_path):
    """Also with a configuration beside it, as on the hub."""
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(file, folder / "other.gguf")
    (folder / "README.md").write_text("")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert_same(folder, tiny_network("qwen2", tied=True))
    assert load_transformers(folder)[2] == load_transformers(file)[2]


def test_a_folder_with_safetensors_is_not_a_gguf_file(file, tmp_path):
    network, tokenizer, _ = load_transformers("tiny-llama")
    for part in (network, tokenizer):
        part.save_pretrained(tmp_path / "whole")
    shutil.copy(file, tmp_path / "whole")
    _, _, weights = load_transformers(tmp_path / "whole")
    assert weights.endswith("(of the folder's weights, configuration and tokenizer)")


# --- commands


def test_commands_take_a_file(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "generate --model tiny.gguf --attribute positive --prompt the --length 8 --samples 1"
    assert lapa2(line, "--alpha", "0.5", "--device", "cpu", "--out", "run") == 0
    assert f"sha256 {sha256_of(file)} (GGUF file" in load_run("run").manifest().model.weights
    capsys.readouterr()
    assert lapa2("probe tiny.gguf --device cpu") == 0
    assert "GGUF file: Tiny of the tests, qwen2, F32, licence apache-2.0" in capsys.readouterr().out
    assert lapa2("layout --model tiny.gguf --prefix Very --prompt the") == 0
    assert lapa2("models") == 0
    assert "a GGUF file" in capsys.readouterr().out


def test_untrained_weights_of_a_file(file):
    run = generate(f"random:{file}", "the", attribute="positive", alpha=0.5, length=4)
    assert len(run.texts()) == 1


# --- what is refused


def refused(name, *fragments):
    with pytest.raises(ModelError) as caught:
        load_transformers(name)
    for fragment in fragments:
        assert fragment in str(caught.value), str(caught.value)


def test_wrong_paths_are_refused(file, tmp_path):
    refused(tmp_path / "none.gguf", "none.gguf does not exist; give the path of a GGUF file")
    refused("none.gguf", "none.gguf does not exist", "looked for")
    shutil.copy(file, tmp_path / "second.gguf")
    refused(tmp_path, "has 2 GGUF files: second.gguf, tiny.gguf; give the path of one of them")
    part = shutil.copy(file, tmp_path / "m-00001-of-00002.gguf")
    refused(part, "is a part of a model", "llama-gguf-split --merge m-00001-of-00002.gguf")
    (tmp_path / "model.bin").write_bytes(b"x")
    refused(tmp_path / "model.bin", "is a file; give the folder", "or a .gguf file")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_refused(file, cache, share):
    data = file.read_bytes()
    file.write_bytes(data[: 6 + int(share * (len(data) - 6))])
    refused(
        file,
        "tiny.gguf is damaged or cut off",
        f"its {file.stat().st_size:,} bytes",
        "download it again",
    )
    assert not list(cache.glob("gguf-*"))


def test_what_is_no_gguf_file_is_refused(file):
    for data in (b"", b"<html>not found", b"PK\x03\x04"):
        file.write_bytes(data)
        refused(file, f"tiny.gguf is no GGUF file: it begins with {data[:4]!r}")


def test_a_file_without_a_tokenizer_is_refused(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_network(), tokenizer=False)
    refused(file, "tiny.gguf has no tokenizer; give a file that has one")


def test_what_transformers_cannot_read_is_refused(tmp_path):
    network, file = tiny_network(), tmp_path / "tiny.gguf"
    write_gguf(file, network, architecture="bert")
    refused(file, "transformers cannot read", "(bert, F32)", "bert is not supported", "qwen2")
    wide = tensors_of(network)["output_norm.weight"].astype(np.float64)
    write_gguf(file, network, tensors={"output_norm.weight": wide})
    refused(file, "transformers cannot read", "(llama, F32)", "F64", "another quantisation")
    write_gguf(file, network)
    data, name = bytearray(file.read_bytes()), b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # behind its number of axes, and their lengths
    assert data[at : at + 4] == bytes(4)
    data[at] = 250
    file.write_bytes(data)
    refused(file, "has tensors of a type that gguf", "250", "in another quantisation")


def test_what_transformers_would_ignore_is_refused(tmp_path):
    """Without it the model would be another one."""
    network, file = tiny_network(), tmp_path / "tiny.gguf"
    factors = {"rope_freqs.weight": 2 * scaled_factors()}
    write_gguf(file, network, tensors=factors)
    refused(file, "8 numbers more than transformers' LlamaForCausalLM", "rope_freqs.weight")
    write_gguf(file, network, tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    refused(file, "4 numbers more than transformers' LlamaForCausalLM")
    write_gguf(file, network, fields={"llama.rope.scaling.type": "yarn"})
    refused(file, "scales its rotary frequencies (rope.scaling.type yarn)")
    write_gguf(file, network, fields={"llama.rope.scaling.factor": 4})
    refused(file, "scales its rotary frequencies (rope.scaling.factor 4)")
    write_gguf(file, network, tensors={"blk.1.ffn_up.weight": None})
    refused(file, "lacks 1 tensor of a LlamaForCausalLM", "layers.1.mlp.up_proj.weight")
    wrong = tensors_of(network)["blk.1.ffn_up.weight"][:64]
    write_gguf(file, network, tensors={"blk.1.ffn_up.weight": wrong})
    refused(file, "another shape")


def test_a_full_disk_is_said_before_the_work(file, monkeypatch, cache):
    usage = shutil.disk_usage(file.parent)._replace(free=100_000)
    monkeypatch.setattr(gguf_file.shutil, "disk_usage", lambda folder: usage)
    refused(
        file, "takes 0.0 GB, and the cache", "has 0.0 GB; set LAPA2_CACHE to a folder with more"
    )
    assert not list(cache.glob("gguf-*"))


def test_the_facts_are_stored_with_the_model(file, cache):
    load_transformers(file)
    (facts,) = cache.glob("gguf-*/gguf.json")
    assert json.loads(facts.read_text())["licence"] == "apache-2.0"
