"""Prefixes that others trained: PEFT's logits found again, Air-Decoding's affine map folded,
pickles refused."""

import json
import pickle
import shutil

import pytest
import torch
from conftest import generate, load, soft_prefix
from families import PLAIN
from safetensors.torch import save_file

from lapa2_interp import load_model
from lapa2_interp.attention.soft_arguments import soft_inputs
from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import PrefixError
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.models.load import load_transformers
from lapa2_interp.prefixes.importing import import_prefix
from lapa2_interp.prefixes.soft_prefix import load_prefix, save_prefix


def peft_adapter(name, folder, **settings):
    """A random prefix-tuning adapter saved by PEFT itself, and PEFT's model."""
    from peft import PrefixTuningConfig, TaskType, get_peft_model

    network, _, _ = load_transformers(name, "float32")
    torch.manual_seed(3)
    wrapped = get_peft_model(
        network, PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=6, **settings)
    )
    with torch.no_grad():
        for parameter in wrapped.prompt_encoder.parameters():
            parameter.normal_(std=0.7)
    wrapped.save_pretrained(folder)
    return wrapped.eval()


PEFTS_OWN = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@PEFTS_OWN
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize("settings", [{}, {"prefix_projection": True, "encoder_hidden_size": 24}])
def test_logits_equal_pefts(name, settings, tmp_path):
    """Multi-head and grouped-query attention, learned and rotary positions, with and without PEFT's
    reparameterisation."""
    theirs = peft_adapter(name, tmp_path / "adapter", **settings)
    model = load(name)
    prefix = import_prefix(tmp_path / "adapter", model, "sentiment", "positive", "imported")
    assert prefix.card.shifted
    branch = Layout.of(model.tokenizer, None, "The lake is", soft=6)
    with torch.no_grad():
        expected = theirs(branch.tensor).logits[0]
        logits = model(**soft_inputs(model, [branch], [prefix]))[0]
        without = model(branch.tensor)[0]
    assert (logits - expected).abs().max() < 1e-5
    assert (logits - without).abs().max() > 1e-2


@PEFTS_OWN
def test_an_imported_prefix_decodes_as_peft_does(tmp_path):
    theirs, model = peft_adapter("tiny-llama", tmp_path / "adapter"), load("tiny-llama")
    save_prefix(
        import_prefix(tmp_path / "adapter", model, "sentiment", "positive", "imported"),
        tmp_path / "set",
        "float32",
    )
    method = methods.get("prefix", prefixes=str(tmp_path / "set"))
    ours = generate(
        model, method, load_task("sentiment"), "positive", ["The lake"], length=24, top_k=1
    ).texts["tokens"][0]
    ids = Layout.of(model.tokenizer, None, "The lake").tensor
    for token in ours:
        with torch.no_grad():
            assert theirs(ids).logits[0, -1].argmax() == token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


@PEFTS_OWN
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_peft_loads_what_is_written_for_it(name, tmp_path):
    """Equal logits in PEFT's own model, and the same prefix when it is read back."""
    from peft import PeftModel

    model = load(name)
    prefix = soft_prefix(model, slots=5, shifted=True)
    prefix.to_peft(tmp_path / "adapter")
    network, _, _ = load_transformers(name, "float32")
    theirs = PeftModel.from_pretrained(network, str(tmp_path / "adapter")).eval()
    branch = Layout.of(model.tokenizer, None, "The lake is", soft=5)
    with torch.no_grad():
        expected = theirs(branch.tensor).logits[0]
        logits = model(**soft_inputs(model, [branch], [prefix]))[0]
    assert (logits - expected).abs().max() < 1e-5
    again = import_prefix(tmp_path / "adapter", model, "sentiment", "positive", "again")
    assert torch.equal(again.keys, prefix.keys)
    assert torch.equal(again.values, prefix.values)
    prefix.to_peft(tmp_path / "named", "me/another")
    with pytest.raises(PrefixError, match="was trained for me/another"):
        import_prefix(tmp_path / "named", model, "sentiment", "positive", "again")


def test_peft_takes_no_prefix_with_unshifted_positions(tmp_path):
    prefix = soft_prefix(load("tiny-gpt2"), slots=2, shifted=False)
    with pytest.raises(PrefixError, match="in PEFT they start after the slots"):
        prefix.to_peft(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def air_checkpoint(model, numbers=(0, 3), slots=5, middle=6):
    """Tensors as the released GPT-2 code names them."""
    cfg, rng = model.cfg, torch.Generator().manual_seed(1)
    width = cfg.n_heads * cfg.d_head
    tensors = {"transformer.wte.weight": torch.randn(7, width, generator=rng)}
    for layer in range(cfg.n_layers):
        for number in numbers:
            module = f"transformer.h.{layer}.attn.prefix"
            for part in ("keys", "values"):
                tensors[f"{module}_{part}_embeddings_n{number}.weight"] = torch.randn(
                    slots, middle, generator=rng
                )
            tensors[f"{module}_mlp_n{number}.weight"] = torch.randn(middle, width, generator=rng)
            tensors[f"{module}_mlp_n{number}.bias"] = torch.randn(width, generator=rng)
    return tensors


@pytest.mark.parametrize("form", ["pytorch_model.bin", "model.safetensors"])
def test_air_decoding_checkpoints_are_folded(form, tmp_path):
    """Keys and values of every slot, head and layer from the formula, unfolded; positions start at
    0."""
    model = load("tiny-gpt2")
    tensors = air_checkpoint(model)
    (save_file if form.endswith("safetensors") else torch.save)(tensors, tmp_path / form)
    prefix = import_prefix(tmp_path, model, "topic", "sports", "air")
    assert not prefix.card.shifted
    assert "prefix 3" in prefix.card.origin
    d = model.cfg.d_head
    for layer in range(model.cfg.n_layers):
        module = f"transformer.h.{layer}.attn.prefix"
        weight, bias = tensors[f"{module}_mlp_n3.weight"], tensors[f"{module}_mlp_n3.bias"]
        for part, values in (("keys", prefix.keys), ("values", prefix.values)):
            for slot, row in enumerate(tensors[f"{module}_{part}_embeddings_n3.weight"]):
                for head in range(model.cfg.n_heads):
                    expected = (
                        row @ weight[:, head * d : (head + 1) * d] + bias[head * d : (head + 1) * d]
                    )
                    assert torch.allclose(values[layer, head, slot], expected, atol=1e-5)
    first = import_prefix(tmp_path / form, model, "topic", "sports", "air", number=0)
    assert (first.keys - prefix.keys).abs().max() > 0.1


def test_a_folded_prefix_acts_as_the_released_attention(tmp_path):
    """The released code puts the prefix in front of keys and values inside each layer, positions
    from 0."""
    model = load("tiny-gpt2", "float64")
    torch.save(air_checkpoint(model), tmp_path / "pytorch_model.bin")
    prefix = import_prefix(tmp_path, model, "sentiment", "positive", "air")
    branch = Layout.of(model.tokenizer, None, "The lake is", soft=5)
    with torch.no_grad():
        logits = model(**soft_inputs(model, [branch], [prefix]))[0]
        expected = released_forward(model.original_model, branch.tensor, air_checkpoint(model), 0)
    assert (logits - expected).abs().max() < 1e-6  # the folded numbers are stored in float32


def released_forward(network, ids, tensors, number):
    """GPT-2 in plain tensors, with the affine map applied in every layer as the released attention
    does."""
    gpt2 = network.transformer if hasattr(network, "transformer") else network.model.transformer
    hidden = gpt2.wte(ids)[0] + gpt2.wpe.weight[: ids.shape[1]]
    n = ids.shape[1]
    for layer, block in enumerate(gpt2.h):
        attention = block.attn
        module = f"transformer.h.{layer}.attn.prefix"
        weight, bias = (
            tensors[f"{module}_mlp_n{number}.{name}"].double() for name in ("weight", "bias")
        )
        own = [
            tensors[f"{module}_{part}_embeddings_n{number}.weight"].double() @ weight + bias
            for part in ("keys", "values")
        ]
        normed = layer_norm(block.ln_1, hidden)
        query, key, value = (
            projection(normed) for projection in (attention.q, attention.k, attention.v)
        )
        key, value = torch.cat([own[0], key]), torch.cat([own[1], value])
        slots, heads = len(own[0]), 4
        query, key, value = (
            states.unflatten(-1, (heads, -1)).transpose(0, 1) for states in (query, key, value)
        )
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        seen = torch.ones(n, slots + n, dtype=torch.bool).tril(slots)
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        hidden = hidden + attention.o(mixed.transpose(0, 1).flatten(1))
        hidden = hidden + block.mlp(layer_norm(block.ln_2, hidden))
    return network.lm_head(layer_norm(gpt2.ln_f, hidden))


def layer_norm(norm, x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, 1e-5)


def test_own_prefixes_attach_to_the_same_model_from_another_place(tmp_path):
    model = load("tiny-gpt2")
    prefix = soft_prefix(model)
    elsewhere = prefix.card.model_copy(update={"model": "other/place", "weights": "hub commit 1"})
    save_prefix(type(prefix)(prefix.keys, prefix.values, elsewhere), tmp_path, "float32")
    with pytest.raises(PrefixError, match="made for other/place with weights hub commit 1"):
        load_prefix(tmp_path, "positive").check(model)
    asked = (tmp_path / "positive.safetensors", model, "sentiment", "positive", "mine")
    with pytest.raises(PrefixError, match="trained for other/place with weights hub commit 1, and"):
        import_prefix(*asked)
    again = import_prefix(*asked, other_base=True)
    again.check(model)
    assert again.card.origin.endswith("trained for other/place with weights hub commit 1")
    assert torch.equal(again.keys, prefix.keys)
    assert not again.card.shifted
    capital = asked[0].rename(tmp_path / "positive.SAFETENSORS")
    with pytest.raises(PrefixError, match=r"no weights: positive\.safetensors is not beside it"):
        import_prefix(capital, *asked[1:])


class Harmful:
    def __reduce__(self):
        return (print, ("code ran",))


def test_what_would_run_code_is_refused(tmp_path, capsys):
    model = load("tiny-gpt2")
    for number, write in enumerate(
        (
            lambda file: torch.save({"a": Harmful()}, file),
            lambda file: file.write_bytes(pickle.dumps(Harmful())),
        )
    ):
        file = tmp_path / f"{number}.pt"
        write(file)
        with pytest.raises(PrefixError, match="would run code when read; it is refused"):
            import_prefix(file, model, "sentiment", "positive", "x")
    assert capsys.readouterr().out == ""


def adapter(folder, config, tensors):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "adapter_model.safetensors")


SIZES = {"peft_type": "PREFIX_TUNING", "num_layers": 4, "num_attention_heads": 4, "token_dim": 32, "num_virtual_tokens": 3}  # fmt: skip


def test_an_adapter_for_another_base_is_refused_unless_accepted(tmp_path):
    """The base is known by its name, by its folder, or by its files under another name."""
    network, tokenizer, _ = load_transformers("tiny-gpt2")
    for name in ("one", "two"):
        network.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        with torch.no_grad():
            network.transformer.wte.weight.add_(1)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    model = load_model(one, device="cpu", model_class=PLAIN)
    adapter(tmp_path / "adapter", SIZES, {"prompt_embeddings": torch.zeros(3, 256)})

    def origin(base, model, **settings):
        config = SIZES | {"task_type": "CAUSAL_LM", "base_model_name_or_path": base}
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
        asked = (tmp_path / "adapter", model, "sentiment", "positive", "x")
        return import_prefix(*asked, **settings).card.origin

    for base in (one, f"{one}/", str(tmp_path / "copy"), "", None):
        assert origin(base, model) == "PEFT prefix tuning"
    assert origin("tiny-gpt2", load("tiny-gpt2")) == "PEFT prefix tuning"
    for base in (two, "gpt2", str(tmp_path / "gone")):
        with pytest.raises(
            PrefixError, match=rf"trained for {base}, and {one} with weights sha256"
        ):
            origin(base, model)
        accepted = origin(base, model, other_base=True)
        assert accepted == f"PEFT prefix tuning, trained for {base}"
    adapter(tmp_path / "classifier", SIZES | {"task_type": "SEQ_CLS"}, {})
    with pytest.raises(PrefixError, match="for the task type SEQ_CLS; only CAUSAL_LM adapters"):
        import_prefix(tmp_path / "classifier", model, "sentiment", "positive", "x")
