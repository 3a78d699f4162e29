"""Models that read rows of unequal length otherwise than each alone are refused, with the reason."""

import contextlib

import pytest
import torch
import transformers
from families import PLAIN

from lapa2_interp import Augmentation, Layout, PaddedRows, augmented, load_model
from lapa2_interp.errors import DeadHookError, LayoutError, ModelError, ScoringError
from lapa2_interp.models import TransformersModel
from lapa2_interp.models.positions import rows_problem
from lapa2_interp.models.tiny import tiny_tokenizer
from lapa2_interp.scoring.scorer import TextItem
from lapa2_interp.scoring.transformer import Perplexity

SIZE = {
    "vocab_size": 257, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16,
    "intermediate_size": 16, "max_position_embeddings": 130, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
BERT = {**SIZE, "is_decoder": True, "initializer_range": 0.2}
DECODER = {
    "vocab_size": 257, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "decoder_attention_heads": 4, "encoder_attention_heads": 2, "decoder_ffn_dim": 16,
    "encoder_ffn_dim": 16, "max_position_embeddings": 130, "max_target_positions": 130,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0, "init_std": 0.2,
    "decoder_start_token_id": 0,
}  # fmt: skip
RECURRENT = {
    **SIZE, "num_hidden_layers": 3, "attention_window_size": 64, "lru_width": 16,
    "num_key_value_heads": 1, "pad_token_id": 0,
}  # fmt: skip
FIRST, NONE, PADDING = (
    "do not begin at 0",
    "takes no positions",
    "other log-probabilities than alone",
)
CASES = {
    "RobertaForCausalLM": ({**BERT, "pad_token_id": 1}, FIRST),
    "XLMRobertaXLForCausalLM": ({**BERT, "pad_token_id": 1}, FIRST),
    "Data2VecTextForCausalLM": ({**BERT, "pad_token_id": 1}, FIRST),
    "BartForCausalLM": (DECODER, NONE),
    "PegasusForCausalLM": (DECODER, NONE),
    "BlenderbotForCausalLM": (DECODER, NONE),
    "WhisperForCausalLM": (DECODER, None),
    "RecurrentGemmaForCausalLM": (RECURRENT, PADDING),
    "BertLMHeadModel": (BERT, None),
    "ElectraForCausalLM": (BERT, None),
}


@pytest.fixture(scope="module")
def network():
    def make(name):
        cls = getattr(transformers, name)
        torch.manual_seed(0)
        made = cls(cls.config_class(**CASES[name][0], attn_implementation="eager")).eval()
        for weight in made.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, 0, 0.3)
        return made

    return make


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_network_that_reads_padded_rows_otherwise_than_alone_is_refused(network, name):
    reads, reason = network(name).train(), CASES[name][1]
    rows = PaddedRows.of(
        [Layout.of(tiny_tokenizer("tiny-gpt2"), "Good:", text) for text in (" A", " The lake")]
    )
    expected = (
        contextlib.nullcontext() if reason is None else pytest.raises(LayoutError, match=reason)
    )
    with expected, augmented(reads, Augmentation(alpha=0), rows.layouts):
        reads.eval()
        logits = reads(rows.ids, attention_mask=rows.mask, position_ids=rows.positions).logits
        reads.train()
    assert all(part.training for part in reads.modules())
    assert (rows_problem(reads) is None) == (reason is None)
    if reason is None:
        reads.eval()
        for row, layout in enumerate(rows.layouts):
            ids = torch.tensor([layout.ids])
            torch.testing.assert_close(logits[row, -ids.shape[1] :], reads(ids).logits[0])


@pytest.mark.parametrize("name", ["RobertaForCausalLM", "BartForCausalLM"])
def test_such_a_model_is_not_loaded(network, name, tmp_path):
    """The encoders in these configurations have other numbers of heads."""
    network(name).save_pretrained(tmp_path)
    tiny_tokenizer("tiny-gpt2").save_pretrained(tmp_path)
    with pytest.raises(DeadHookError, match=CASES[name][1]):
        load_model(tmp_path, device="cpu", model_class=PLAIN)
    if name == "RobertaForCausalLM":
        with pytest.raises(ScoringError, match=f"the perplexity.*{FIRST}"):
            Perplexity(str(tmp_path), device="cpu").score([TextItem("lake " * 12)])


@pytest.mark.parametrize("name", ["BartForCausalLM", "WhisperForCausalLM"])
def test_a_decoder_needs_as_many_layers_as_its_configuration_names(name, tmp_path):
    cls = getattr(transformers, name)
    made = cls(cls.config_class(**{**DECODER, "decoder_layers": 3}))
    made.save_pretrained(tmp_path)
    tiny_tokenizer("tiny-gpt2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has 3 decoder layers, and num_hidden_layers .* is 2"):
        load_model(tmp_path, device="cpu", model_class=PLAIN)
    with pytest.raises(ModelError, match="has 3 decoder layers"):
        TransformersModel(made, tiny_tokenizer("tiny-gpt2"), "mine")
