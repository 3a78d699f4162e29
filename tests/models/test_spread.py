"""Models larger than one GPU: their layers are in several places."""

import pytest
import torch
from conftest import HAS_HOOKED, decode_plan, load, plan

from lapa2_interp import Augmentation
from lapa2_interp._util.errors import ModelError
from lapa2_interp.methods.registry import get_for_task, load_task
from lapa2_interp.models import load as models
from lapa2_interp.models.card import model_card


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
        models._make_bridge(network, tokenizer, "tiny-llama", torch.float32, "cpu").eval(),
        load("tiny-llama"),
    ):
        model.cfg.default_prepend_bos = True
        # Packed weights round otherwise, and what lies elsewhere is not packed.
        unpacked = model_card(model).model_copy(update={"prepacking": "none"})
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
