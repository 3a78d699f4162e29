"""Models larger than one GPU: their layers are in several places, or accelerate keeps the weights
elsewhere and brings them for each pass."""

import weakref

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from conftest import HAS_HOOKED, decode_plan, load, plan

from lapa2_interp import Augmentation, Layout, generate, teacher_forced
from lapa2_interp.errors import ModelError
from lapa2_interp.methods.registry import get_for_task, load_task
from lapa2_interp.models import load as models
from lapa2_interp.models.card import hash_weights, identify
from lapa2_interp.models.facts import TransformersModel
from lapa2_interp.models.fingerprint import fingerprint, values_digest, weights_read_once


def spread(network, device, folder):
    """A model as transformers leaves it when its layers are on several devices, the third on
    `device`."""
    from accelerate import dispatch_model

    device_map = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
    }
    device_map |= {f"model.layers.{i}": device if i == 2 else "cpu" for i in range(4)}
    return dispatch_model(
        network, device_map, main_device="cpu", offload_dir=folder, force_hooks=True
    )


PLACES = (
    ["cpu"] if HAS_HOOKED else ["cpu", "disk"]
)  # transformer-lens 3.9 refuses weights on the disk


@pytest.mark.parametrize("device", PLACES)
def test_a_model_in_several_places_makes_the_same_texts_and_traces(device, tmp_path, monkeypatch):
    network, tokenizer, _ = models.load_transformers("tiny-llama")
    network = spread(network, device, str(tmp_path))
    assert hasattr(network.model.layers[2], "_hf_hook")
    assert next(network.model.layers[2].parameters()).device.type == (
        "meta" if device == "disk" else "cpu"
    )
    task = load_task("sentiment")
    made = []
    for model in (
        models.make_bridge(network, tokenizer, "tiny-llama", torch.float32, "cpu").eval(),
        load("tiny-llama"),
    ):
        model.cfg.default_prepend_bos = True
        # Packed weights round otherwise, and what lies elsewhere is not packed.
        unpacked = identify(model).model_copy(update={"prepacking": "none"})
        monkeypatch.setattr(model, "lapa2_card", unpacked)
        method, rule = get_for_task("preadd", task), Augmentation(alpha=1.0)
        todo = plan(model, method, task, "positive", ("The lake", "Once"), rule, 16, 2)
        made.append(decode_plan(model, todo))
    assert made[0].texts.equals(made[1].texts)
    assert made[0].trace.equals(made[1].trace)


def test_device_auto_leaves_the_placing_to_transformers(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    network, tokenizer, _ = models.load_transformers("tiny-gpt2")
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    asked = []
    inner = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args, **kwargs):
        asked.append(kwargs["device_map"])
        return inner(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    ids = torch.arange(8)[None]
    logits = models.load_model(str(tmp_path), device="auto")(ids)
    assert asked == ["auto"]
    assert torch.equal(logits, load("tiny-gpt2")(ids))
    assert models.load_model("tiny-gpt2", device="auto").cfg.device == load("tiny-gpt2").cfg.device


def test_a_model_that_the_gpus_do_not_hold_is_refused(tmp_path, monkeypatch):
    network, tokenizer, weights = models.load_transformers("tiny-llama")
    network = spread(network, "cpu", str(tmp_path))
    monkeypatch.setattr(models, "load_transformers", lambda *_: (network, tokenizer, weights))
    network.hf_device_map |= {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(ModelError, match="larger than the GPUs here together.*gpus_per_worker"):
        models.load_model("tiny-llama", device="auto")
    network.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(ModelError, match="use TransformerBridge for a model larger than one GPU"):
        models.load_model("tiny-llama", device="auto", model_class="HookedTransformer")


OFFLOADED = {
    "cpu": lambda network, folder: cpu_offload(network, "cpu"),
    "cpu, with buffers": lambda network, folder: cpu_offload(network, "cpu", offload_buffers=True),
    "cpu, by block": lambda network, folder: cpu_offload(
        network, "cpu", preload_module_classes=["LlamaDecoderLayer"]
    ),
    "disk": lambda network, folder: disk_offload(network, folder, "cpu"),
    "one layer on disk": lambda network, folder: spread(network, "disk", folder),
}
"""What accelerate does with a network."""


@pytest.fixture
def whole():
    network, tokenizer, _ = models.load_transformers("tiny-llama")
    return TransformersModel(network.double(), tokenizer, "mine")


@pytest.fixture(params=OFFLOADED)
def offloaded(request, tmp_path):
    network, tokenizer, _ = models.load_transformers("tiny-llama")
    network = OFFLOADED[request.param](network.double(), str(tmp_path / "weights"))
    assert any(weight.is_meta for weight in network.parameters())
    return TransformersModel(network, tokenizer, "mine")


def test_offloaded_weights_make_the_same_texts_under_the_same_name(whole, offloaded):
    made = []
    for model in (whole, offloaded):
        run = generate(
            model, method="preadd", attribute="positive", prompts=["The lake", "A"], alpha=1.0,
            length=16, samples=2,
        )  # fmt: skip
        made.append((run.texts()["tokens"].tolist(), run.manifest(next(iter(run.by_key))).model))
    (texts, card), (same_texts, same_card) = made
    assert same_texts == texts
    assert same_card == card
    assert same_card.weights.startswith("sha256 ")


@pytest.mark.parametrize("attn", ["matrix", "fused"])
def test_offloaded_weights_give_the_same_trace(whole, offloaded, attn):
    layout = Layout.of(whole.tokenizer, "Very good:", "The lake")
    traces = []
    for model in (whole, offloaded):
        model.attn = attn
        traces.append(teacher_forced(model, layout, [[*range(40, 60)]], Augmentation(alpha=1.0)))
    assert traces[0].equals(traces[1])
    assert {*offloaded.paths.values()} == {"fused" if attn == "fused" else "attn is matrix"}


def test_offloaded_layers_are_not_prepacked(tmp_path):
    """Nor does the card say so; nor are layers that accelerate has placed on this device."""
    for device in PLACES:
        network, tokenizer, _ = models.load_transformers("tiny-llama")
        network = spread(network, device, str(tmp_path))
        assert identify(TransformersModel(network, tokenizer, "mine")).prepacking == "none"


def test_edits_of_offloaded_weights_change_their_name(whole):
    network, tokenizer, _ = models.load_transformers("tiny-llama")
    stored = network.double().state_dict()
    model = TransformersModel(cpu_offload(network, "cpu", state_dict=stored), tokenizer, "mine")
    before = identify(model).weights
    for weights in (stored, whole.original_model.state_dict()):
        weights["model.layers.1.mlp.up_proj.weight"].data[0, 0] += 1
    assert identify(model).weights == hash_weights(whole) != before


def test_weights_on_disk_are_read_one_by_one(tmp_path, monkeypatch):
    """Else a call would hold them all in memory."""
    network, _, _ = models.load_transformers("tiny-llama")
    disk_offload(network, str(tmp_path), "cpu")
    read, in_memory = [], [id(buffer) for buffer in network.buffers()]

    def digest(weight):
        if id(weight) not in in_memory:
            assert not any(earlier() is not None for earlier in read)
            read.append(weakref.ref(weight))
        return values_digest(weight)

    monkeypatch.setattr("lapa2_interp.models.fingerprint.values_digest", digest)
    with weights_read_once():
        assert fingerprint(network) == fingerprint(network)
    assert len(read) == 2 * len(network.state_dict())


def test_a_model_without_weights_is_refused():
    network, tokenizer, _ = models.load_transformers("tiny-llama")
    with pytest.raises(ModelError, match=r"not in memory \(device meta\).* with its weights"):
        TransformersModel(network.to("meta"), tokenizer, "mine")
