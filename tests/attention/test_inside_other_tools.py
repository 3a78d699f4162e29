"""A text found in the rows of transformers' pipeline, of `generate` on a chat, and of a trainer's loop
(docs/inside-other-tools.md)."""

import pytest
import torch
from conftest import load
from transformers import pipeline

from lapa2_interp import Augmentation, Layout, PaddedRows, augmented

SAID = "You are a sailor."
CHAT = [{"role": "system", "content": SAID}, {"role": "user", "content": "Who are you?"}]
FREE, RULE = Augmentation(alpha=1), Augmentation(alpha=1, phase="after_span")
GREEDY = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture(scope="module")
def chats():
    """A network with a chat template, its tokenizer, and the texts of a chat with layouts by hand."""
    model = load("smollm2-135m", "float32", "TransformersModel")
    layout = Layout.of_chat(model, CHAT, span=f"phrase:{SAID}")
    with augmented(model.original_model, RULE, layout):
        made = model.original_model.generate(layout.tensor, **GREEDY)
    return model.original_model, model.tokenizer, made[0, len(layout) :].tolist()


def test_generate_on_a_chat(chats):
    network, tokenizer, by_hand = chats
    inputs = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with augmented(network, FREE, find=SAID, tokenizer=tokenizer):
        made = network.generate(**inputs, **GREEDY)
    assert made[0, inputs["input_ids"].shape[1] :].tolist() == by_hand
    assert (
        network.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :].tolist() != by_hand
    )


def test_a_pipeline(chats):
    """Of two chats in a batch, which it pads on the left."""
    network, tokenizer, by_hand = chats
    longer = [CHAT[0], {"role": "user", "content": "Who are you? Tell me of your many friends."}]
    pipe = pipeline("text-generation", network, tokenizer=tokenizer)
    with augmented(network, FREE, find=SAID, tokenizer=tokenizer) as finder:
        answers = pipe([CHAT, longer], batch_size=2, return_full_text=False, **GREEDY)
    assert answers[0][0]["generated_text"] == tokenizer.decode(by_hand, skip_special_tokens=True)
    assert (finder.rows, finder.left) == (2, 0)


def test_a_trainers_loop():
    """Completions are drawn for left-padded prompts, and scored again in rows that are padded on both
    sides, without a cache and with a gradient: the policy that drew is the policy that learns."""
    model = load("tiny-gpt2", "float64", "TransformersModel")
    network, tokenizer = model.original_model, model.tokenizer
    layouts = [
        Layout.of(tokenizer, SAID, text) for text in (" The lake", " One small boat went far")
    ]
    rows, length, copies = PaddedRows.of(layouts), 6, 2
    torch.manual_seed(0)
    with augmented(network, FREE, find=SAID, tokenizer=tokenizer):
        drawn = network.generate(
            rows.ids, attention_mask=rows.mask, max_new_tokens=length, do_sample=True, top_k=0,
            num_return_sequences=copies, pad_token_id=0, eos_token_id=[], output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        ids, width = drawn.sequences, rows.ids.shape[1]
        mask = torch.cat(
            [rows.mask.repeat_interleave(copies, 0), torch.ones(len(ids), length).long()], 1
        )
        mask[0, -2:] = 0  # a completion that ended early
        logits = network(
            ids, attention_mask=mask, use_cache=False, logits_to_keep=length + 1
        ).logits
        new, live = ids[:, width:, None], mask[:, width:]
        log_p = logits[:, :-1].log_softmax(2).gather(2, new)[..., 0] * live
        reward = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
        (-(reward[:, None] * log_p).sum() / live.sum()).backward()
    sampled = torch.stack(drawn.logits, 1).double().log_softmax(2).gather(2, new)[..., 0] * live
    torch.testing.assert_close(log_p.detach(), sampled, rtol=0, atol=1e-5)  # generate's are float32
    by_hand = [layout for layout in rows.layouts for _ in range(copies)]
    mask[0, -2:] = 1
    with torch.no_grad(), augmented(network, RULE, by_hand):
        wanted = network(ids, attention_mask=mask).logits[:, width - 1 : -1].log_softmax(2)
    there = wanted.gather(2, new)[..., 0] * live
    torch.testing.assert_close(log_p.detach()[1:], there[1:], rtol=0, atol=1e-10)
    slope = network.get_input_embeddings().weight.grad
    assert bool(slope.isfinite().all())
    assert float(slope.abs().max()) > 0
    network.zero_grad()
