"""What the room refuses: a call, and what its one line says."""

import pytest
import torch
from conftest import load
from transformers import DynamicCache

from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp.errors import AugmentationError, LayoutError
from lapa2_interp.models.cache_name import cache_name

SAID = "You are a sailor."
RULE = Augmentation(alpha=0.7)


def parts():
    """A network, its tokenizer, and the ids of a row with the span."""
    model = load("tiny-llama", "float64", "TransformersModel")
    return model.original_model, model.tokenizer, Layout.of(model, SAID, " The lake is").tensor


def blocked(rule=RULE, find=SAID, read=None, **settings):
    """Open a block, and read in it, by default the row."""
    network, tokenizer, ids = parts()
    read = read or (lambda network, ids: network(ids))
    with (
        torch.no_grad(),
        augmented(network, rule, find=find, **({"tokenizer": tokenizer} | settings)),
    ):
        return read(network, ids)


def without_a_layout():
    augmented(parts()[0], RULE).__enter__()


def filled_cache():
    network, _, ids = parts()
    cache = DynamicCache()
    with torch.no_grad():
        network(ids, **{cache_name(network): cache})
    blocked(read=lambda network, _: network(ids[:, -1:], **{cache_name(network): cache}))


def of_embeddings(network, ids):
    return network(inputs_embeds=network.get_input_embeddings()(ids))


def in_pieces(network, ids):
    return network.generate(ids, prefill_chunk_size=20, max_new_tokens=2, pad_token_id=0)


def without_a_cache(network, ids):
    return network.generate(ids, use_cache=False, max_new_tokens=4, eos_token_id=[], pad_token_id=0)


def beams_without_a_cache(network, ids):
    return network.generate(ids, use_cache=False, num_beams=2, max_new_tokens=4, pad_token_id=0)


def in_a_static_cache(network, ids):
    return network.generate(
        ids, cache_implementation="static", max_new_tokens=2, pad_token_id=0, disable_compile=True
    )


def with_prompt_lookup(network, ids):
    """The span stands twice, so that the words after it are guesses."""
    twice = torch.cat([ids, ids[:, 1:-2]], 1)
    return network.generate(twice, prompt_lookup_num_tokens=3, max_new_tokens=4, pad_token_id=0)


def in_a_cut_cache(network, ids):
    cache = network(ids, use_cache=True)[cache_name(network)]
    cache.crop(-2)
    network(ids[:, -2:-1], **{cache_name(network): cache})


def padded_after(network, ids):
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    return network.generate(ids, attention_mask=mask, max_new_tokens=2, pad_token_id=0)


def with_a_hole(network, ids):
    mask = torch.ones_like(ids)
    mask[0, 3] = 0
    return network(ids, attention_mask=mask)


def twice(network, ids):
    return network(torch.cat([ids, ids], 1))


def one_row_lacks_it(network, ids):
    return network(torch.cat([ids, torch.full_like(ids, 40)]))


REFUSED = {
    "no layout": (without_a_layout, "given no layout; give one, .* or find="),
    "both": (lambda: blocked(layout=Layout.of(parts()[1], SAID, " a")), "a layout and find"),
    "no tokenizer": (lambda: blocked(tokenizer=None), "give tokenizer=..., or token ids"),
    "no target": (lambda: blocked(find=[]), r"find should be a text, .* found \[\]"),
    "an empty text": (lambda: blocked(find=["a", ""]), "none of them empty"),
    "a number": (lambda: blocked(find=3), "find should be a text, .*; found 3"),
    "occurrence": (lambda: blocked(occurrence="frist"), "occurrence 'frist'; allowed: first.*'first'"),
    "absent": (lambda: blocked(absent="skip"), "unknown absent 'skip'; allowed: refuse, leave"),
    "absent text": (lambda: blocked(find="You are a pirate."), "row 0 does not have 'You are a pirate.'; .*; it reads .*sailor"),
    "absent ids": (lambda: blocked(find=[7, 7, 7]), r"row 0 does not have \[7, 7, 7\]"),
    "absent to a function": (lambda: blocked(find=lambda ids: None), "row 0 does not have what the function"),
    "one row lacks it": (lambda: blocked(read=one_row_lacks_it), "row 1 does not have 'You are a sailor.'; give another text, or absent='leave'"),
    "twice": (lambda: blocked(read=twice), "row 0 has 'You are a sailor.' 2 times, in its tokens .*; give occurrence='first' or 'last'"),
    "outside": (lambda: blocked(find=lambda ids: (3, 99)), r"returned \(3, 99\); it should return \(start, stop\)"),
    "a word": (lambda: blocked(find=lambda ids: "ab"), "returned 'ab'; it should return"),
    "embeddings": (lambda: blocked(read=of_embeddings), "given inputs_embeds; give it input_ids"),
    "a filled cache": (filled_cache, "a cache that was filled before the block"),
    "pieces": (lambda: blocked(read=in_pieces), "more tokens behind its cache.*no prefill_chunk_size"),
    "no cache": (lambda: blocked(read=without_a_cache), "read again with each new token.*use_cache=True"),
    "beams without a cache": (lambda: blocked(read=beams_without_a_cache), "generate with use_cache=True"),
    "a static cache": (lambda: blocked(read=in_a_static_cache), "leave cache_implementation out"),
    "prompt lookup": (lambda: blocked(read=with_prompt_lookup, occurrence="first"),
                      "guesses several tokens ahead; with find=.*; leave out prompt_lookup_num_tokens"),
    "prompt lookup of the last query": (
        lambda: blocked(Augmentation(alpha=1, phase="last_query"), read=with_prompt_lookup, occurrence="first"),
        "asks for the logits of its last .* tokens, as generation does that guesses"),
    "a cut cache": (lambda: blocked(read=in_a_cut_cache), "the cache was cut to .* tokens of its first pass"),
    "padded after": (lambda: blocked(read=padded_after), "padded after its text.*padding_side = 'left'"),
    "a hole": (lambda: blocked(read=with_a_hole), "row 0 masks tokens inside its text"),
    "a rule a row": (lambda: blocked([RULE]), "rows are not known before they are read", AugmentationError),
    "slots": (lambda: blocked(Augmentation(alpha=1, span=((1, 3),))), r"find says what the span is, .* \(\(1, 3\),\)", AugmentationError),
    "released": (lambda: blocked("lapa2-released"), "span 'released' of profile 'released'", AugmentationError),
    "layers": (lambda: blocked(Augmentation(alpha=1, layers=(99,))), "99", AugmentationError),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message", "error"), [(*row, LayoutError)[:3] for row in REFUSED.values()], ids=REFUSED
)
def test_what_the_room_refuses(call, message, error, without_types):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
