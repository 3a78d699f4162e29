"""What plain text starts with: who decides, and that everything follows it."""

import inspect
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import MODEL_CLASSES, load, soft_prefix

from lapa2_interp import (
    Augmentation,
    Layout,
    PaddedRows,
    augmented,
    generate,
    load_model,
    teacher_forced,
)
from lapa2_interp.attention.tables import head_table, local_ratio
from lapa2_interp.bias.find_spans import SpanFinder
from lapa2_interp.bias.text_start import (
    MODELS_WITH_START,
    MODELS_WITHOUT_START,
    settle_start,
    text_start,
)
from lapa2_interp.cli.app import main
from lapa2_interp.errors import (
    Lapa2Error,
    LayoutError,
    ModelError,
    PrefixError,
    ScoringError,
)
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import TransformersModel
from lapa2_interp.models.load import load_tokenizer, load_transformers
from lapa2_interp.models.probing import PLAIN_SENTENCES, probe_model
from lapa2_interp.scoring.scorer import SkippedText, TextItem
from lapa2_interp.scoring.transformer import Perplexity

PREFIX, PROMPT = "Very positive:", " The lake"


def byte_tokenizer(folder, tokenizer_class, *, bos="<|endoftext|>", eos="<|im_end|>"):
    """A tokenizer of this class, read from a folder; a token a byte, and none is added."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: i for i, token in enumerate([*specials, *alphabet])}
    core = Tokenizer(models.BPE(vocab=words, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos)
    fast.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    facts = json.loads(file.read_text()) | {"tokenizer_class": tokenizer_class}
    file.write_text(json.dumps(facts))
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def qwen_folder(tmp_path):
    """A random model of Qwen2's type with a tokenizer of Qwen2's class."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = byte_tokenizer(tmp_path, "Qwen2Tokenizer")
    torch.manual_seed(0)
    network = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=2,
        )
    )
    network.save_pretrained(tmp_path)
    return tmp_path


# --- who decides


def test_a_tokenizer_of_a_family_without_start_token_gets_none(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "Qwen2Tokenizer")
    assert type(tokenizer).__name__.startswith("Qwen2")
    layout = Layout.of(tokenizer, PREFIX, PROMPT)
    assert list(layout.ids) == tokenizer(PREFIX + PROMPT).input_ids
    assert (layout.n_bos, layout.prefix, layout.prompt) == (0, (0, 14), (14, 23))
    assert Layout.of(tokenizer, PREFIX, PROMPT, start="usual").ids == (0, *layout.ids)
    assert Layout.of(tokenizer, PREFIX, PROMPT, start="<|im_end|>").ids == (2, *layout.ids)
    assert Layout.of(load("tiny-gpt2"), PREFIX, PROMPT, start=None).n_bos == 0


def test_a_setting_goes_before_the_model_the_tokenizer_and_the_table(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "PreTrainedTokenizerFast")
    assert text_start(tokenizer).is_guess
    assert text_start(tokenizer, model_type="qwen3") == (
        None,
        "models of type qwen3 read none",
        False,
    )
    assert text_start(tokenizer, model_type="gpt_neox").token == 0
    assert text_start(tokenizer, "none", "gpt_neox") == (None, "it was set", False)
    # What a tokenizer adds itself goes before the table.
    adding = load_tokenizer("tiny-llama")
    del adding.lapa2_start
    assert text_start(adding, model_type="qwen2") == (0, "its tokenizer adds it", False)
    # A TransformerLens model's own setting goes before both.
    assert text_start(load("tiny-llama")).token == 0
    with pytest.raises(LayoutError, match=r"start '<bos>' is no token of this vocabulary"):
        text_start(tokenizer, "<bos>")


def test_a_guess_is_declared_once(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "PreTrainedTokenizerFast")
    with pytest.warns(UserWarning, match=r"nothing says .* type|kind of model \(mystery\).*probe"):
        settle_start(tokenizer, model_type="mystery")
    assert settle_start(tokenizer, model_type="mystery").token == 0, "and no second warning"


def test_the_table_is_that_of_transformer_lens_but_for_neox():
    from transformer_lens.factories import architecture_adapter_factory as factory
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def says(adapter):
        """The value that an adapter, or the nearest class before it, gives default_prepend_bos."""
        for one in adapter.__mro__:
            if one.__module__.startswith("transformer_lens"):
                values = re.findall(r"default_prepend_bos = (True|False)", inspect.getsource(one))
                if values:
                    return values[-1] == "True"
        return None

    types = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    declared = {
        types[name]: says(adapter)
        for name, adapter in factory.SUPPORTED_ARCHITECTURES.items()
        if name in types
    }
    without_start = {kind for kind, value in declared.items() if value is False}
    assert {"qwen2", "phi", "gpt_neox"} <= without_start, "the adapters are read"
    assert without_start <= {*MODELS_WITHOUT_START, "gpt_neox"}
    assert without_start & {*MODELS_WITH_START} == {"gpt_neox"}
    assert not {kind for kind, value in declared.items() if value} & {*MODELS_WITHOUT_START}


@pytest.mark.parametrize(
    "name", ["tiny-gpt2", "tiny-llama", "tiny-neox", "planted", "smollm2-135m"]
)
def test_built_in_models_keep_their_start_token(name):
    tokenizer = load_tokenizer(name)
    assert Layout.of(tokenizer, None, "The lake").ids[0] == 0
    assert cell_of(name, attribute="positive").start == "usual"


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("start", ["usual", "none", "A"])
def test_strings_start_as_layouts_do(model_class, start):
    model = load_model("tiny-neox", model_class=model_class, start=start, device="cpu")
    layout = Layout.of(model, None, "The lake")
    assert model.to_tokens("The lake")[0].tolist() == list(layout.ids)
    assert Layout.of(model.tokenizer, None, "The lake") == layout
    assert identify(model).start_token == {"usual": "<|endoftext|>", "none": ""}.get(start, "A")


def test_a_model_made_elsewhere_says_it_itself(qwen_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lapa2_interp.models.load import wrap_in_bridge

    network = AutoModelForCausalLM.from_pretrained(qwen_folder, attn_implementation="eager")
    plain = TransformersModel(network, AutoTokenizer.from_pretrained(qwen_folder), "mine")
    made = generate(plain, "The lake", attribute="positive", length=16, trace="none")
    assert next(iter(made.by_key.values())).start == "none"
    assert identify(plain).start_source == "models of type qwen2 read none"
    model = wrap_in_bridge(network, AutoTokenizer.from_pretrained(qwen_folder), "mine", "none")
    assert not model.cfg.default_prepend_bos
    model.cfg.default_prepend_bos = True
    assert Layout.of(model, None, "The lake").ids[0] == 0
    assert text_start(model).source == "the model's cfg.default_prepend_bos is True"


# --- everything follows it


def test_texts_and_attention_of_a_model_without_start_token(qwen_folder):
    """The ids are those that transformers' own tokenizer gives, the texts its own greedy ones, and
    the attention on the prefix that of a pass with the bias added by hand."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(
        qwen_folder, attn_implementation="eager", dtype=torch.float64
    )
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    ids = torch.tensor([tokenizer(PREFIX + "The lake").input_ids])
    settings = {"prefix": PREFIX, "length": 20, "top_k": 1, "dtype": "float64", "device": "cpu"}
    run = generate(str(qwen_folder), "The lake", alpha=[0.0, 1.5], **settings)
    mine = network.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    first = list(map(int, run.select(arm="baseline").texts()["tokens"][0]))
    assert first == mine[0, ids.shape[1] :].tolist()
    # The same with b = 1.5 log(l / 14) on the 14 keys of the prefix, in every layer and head.
    steered = run.select(arm="alpha 1.5 paper")
    tokens, trace = list(map(int, steered.texts()["tokens"][0])), steered.trace()
    assert "bos" not in trace
    for step in range(12):
        text = torch.cat([ids, torch.tensor([tokens[:step]], dtype=torch.long)], 1)
        shift = torch.zeros(text.shape[1], text.shape[1], dtype=torch.float64)
        for query in range(ids.shape[1] - 1, text.shape[1]):
            shift[query, :14] = 1.5 * math.log((query + 1) / 14)
        causal = torch.full_like(shift, -torch.inf).triu(1) + shift
        output = network(text, attention_mask=causal[None, None], output_attentions=True)
        assert int(output.logits[0, -1].argmax()) == tokens[step]
        on_prefix = torch.stack([layer[0, :, -1, :14].sum(-1) for layer in output.attentions])
        recorded = trace["prefix"].isel(branch=0, sample=0, step=step).to_numpy()
        np.testing.assert_allclose(recorded, on_prefix.detach().numpy(), atol=1e-6)


def test_a_trace_without_start_token_has_no_bos():
    model = load_model("tiny-gpt2", start="none", device="cpu")
    layout = Layout.of(model, PREFIX, PROMPT)
    trace = teacher_forced(model, layout, [[40, 41, 42]], Augmentation(alpha=1.0))
    assert "bos" not in trace
    parts = sum(trace[name] for name in ("prefix", "prompt", "generated"))
    np.testing.assert_allclose(parts.to_numpy(), 1, atol=1e-6)
    np.testing.assert_array_equal(local_ratio(trace, 2), local_ratio(trace, 2, without_bos=True))
    run = generate(model, "The lake", prefix=PREFIX, alpha=[0.0, 1.0], length=12)
    assert "bos" not in set(run.steps()["name"])
    assert "bos" not in run.heads().frame()
    assert set(run.prefix_tokens()["key"]) == {f"p{i + 1}" for i in range(14)}
    assert "bos" not in head_table(run.trace(), run.texts())


def test_rows_with_and_without_start_token_share_a_table():
    """One that has none is no number there, and none of the others' means moves."""
    with_start, without = (
        generate("tiny-gpt2", "The lake", prefix=PREFIX, alpha=1.0, length=12, start=start)
        for start in ("auto", "none")
    )
    from lapa2_interp.attention.trace import concat_traces

    joined = concat_traces([with_start.trace(), without.trace()])
    assert np.isfinite(joined["bos"].isel(sample=0)).all()
    assert np.isnan(joined["bos"].isel(sample=1)).all()
    np.testing.assert_allclose(local_ratio(joined, 2)[:, 1], local_ratio(without.trace(), 2)[:, 0])


def test_l_counts_every_key_without_a_start_token():
    model = load_model("tiny-gpt2", start="none", device="cpu")
    layout = Layout.of(model, PREFIX, PROMPT)
    queries = np.arange(len(layout) - 1, len(layout) + 3)
    assert layout.lengths(queries, "paper").tolist() == (queries + 1).tolist()
    assert layout.lengths(queries, "kv").tolist() == (queries + 1).tolist()
    padded = layout.padded(40)
    assert padded.lengths(queries + 40 - len(layout), "paper").tolist() == (queries + 1).tolist()
    # As the released code counts, the slice from slot 0 is then the prefix itself.
    assert layout.spans("released") == (layout.prefix,)


def test_a_padded_row_without_start_token_equals_the_row_alone():
    model = load_model("tiny-gpt2", "float64", "cpu", start="none")
    layouts = [Layout.of(model, PREFIX, text) for text in (" The lake", " A book is on the table")]
    rows, rule = PaddedRows.of(layouts), Augmentation(alpha=1.0, phase="after_span")
    with torch.no_grad(), augmented(model, rule, rows.layouts):
        mask, positions = rows.mask, rows.positions
        both = model(rows.ids, attention_mask=mask, position_ids=positions)[:, -1]
    for row, layout in enumerate(layouts):
        with torch.no_grad(), augmented(model, rule, layout):
            alone = model(layout.tensor)[0, -1]
        torch.testing.assert_close(both[row], alone, atol=1e-10, rtol=0)


def test_a_cells_key_has_the_start_only_where_it_is_another(tmp_path, qwen_folder):
    usual, auto, none, mine = (
        cell_of("tiny-gpt2", attribute="positive", start=start)
        for start in ("usual", "auto", None, "A")
    )
    assert usual.key == auto.key
    assert "start" not in json.loads(auto.model_dump_json())
    assert (none.start, mine.start) == ("none", "A")
    assert len({auto.key, none.key, mine.key}) == 3
    assert none.variant == "starts with nothing"
    resolved = cell_of(str(qwen_folder), attribute="positive")
    assert resolved.start == "none"
    assert resolved.key == cell_of(str(qwen_folder), attribute="positive", start="none").key


def test_another_token_in_front_has_a_key_of_its_own():
    """By name and loaded, though the tokenizer's `bos_token` is this token then."""
    settings = {"attribute": "positive", "length": 40, "trace": "none"}
    by_name = generate("tiny-gpt2", "The lake", start="A", **settings)
    loaded = generate(load_model("tiny-gpt2", start="A"), "The lake", **settings)
    (cell,) = by_name.by_key.values()
    assert cell.start == "A"
    assert list(by_name.by_key) == list(loaded.by_key)
    assert list(by_name.texts()["text"]) == list(loaded.texts()["text"])
    usual = generate("tiny-gpt2", "The lake", **settings)
    assert not {*usual.by_key} & {*by_name.by_key}
    assert list(usual.texts()["text"]) != list(by_name.texts()["text"])


def test_a_grid_compares_starts(tmp_path):
    from lapa2_interp.runs.run import load_run
    from lapa2_interp.runs.sweep import sweep

    grid = tmp_path / "g.toml"
    grid.write_text(
        'model = "tiny-gpt2"\nstart = ["auto", "none"]\nattribute = "positive"\nlength = 40\n'
        'prompts = 1\ntrace = "pooled"\n'
    )
    sweep(str(grid), out=tmp_path / "run", workers=1, device="cpu")
    run = load_run(tmp_path / "run")
    texts = run.texts()
    assert sorted(texts["variant"]) == ["", "starts with nothing"]
    cards = {cell.start: run.manifest(key).model.start_token for key, cell in run.by_key.items()}
    assert cards == {"usual": "<|endoftext|>", "none": ""}


def test_a_row_that_starts_with_text_has_no_bos_when_its_span_is_found():
    tokenizer = load_tokenizer("tiny-gpt2")
    ids = tuple(tokenizer("Some words. Be brief: The lake").input_ids)
    layout, _ = SpanFinder("Be brief:", tokenizer=tokenizer).layout(ids)
    assert (layout.n_bos, layout.n_before, layout.l_pre) == (0, 12, 9)
    started, _ = SpanFinder("Be brief:", tokenizer=tokenizer).layout((0, *ids))
    assert started == replace(layout, ids=(0, *ids), n_bos=1)


def test_perplexity_without_start_token_counts_from_the_second_token(qwen_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "The lake is cold in the morning, and the boats lie still until noon."
    scorer = Perplexity(str(qwen_folder), "float64", "cpu")
    (scored,) = scorer.score([TextItem(text, "", "")])
    network = AutoModelForCausalLM.from_pretrained(qwen_folder, dtype=torch.float64)
    ids = torch.tensor([AutoTokenizer.from_pretrained(qwen_folder)(text).input_ids])
    with torch.no_grad():
        loss = network(ids, labels=ids).loss  # transformers' own: a mean from the second token on
    assert scored[0] == pytest.approx(float(loss.exp()), rel=1e-6)
    assert "from the second token on" in scorer.version
    one = Perplexity(str(qwen_folder), "float64", "cpu", min_words=1)
    assert one.score([TextItem("T", "", "")])[0] == SkippedText("one token, which nothing precedes")
    with pytest.raises(ScoringError, match="needs a start token"):
        Perplexity(str(qwen_folder), doubled_bos=True)


def test_probe_measures_both_ways(qwen_folder, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    resolved = probe_model(str(qwen_folder), device="cpu")
    network = AutoModelForCausalLM.from_pretrained(qwen_folder)
    tokenizer, losses, n = AutoTokenizer.from_pretrained(qwen_folder), 0.0, 0
    for sentence in PLAIN_SENTENCES:
        ids = torch.tensor([tokenizer(sentence).input_ids])
        with torch.no_grad():
            losses += float(network(ids, labels=ids).loss) * (ids.shape[1] - 1)
        n += ids.shape[1] - 1
    assert resolved.start_losses["none"] == pytest.approx(losses / n, rel=1e-4)
    assert set(resolved.start_losses) == {"none", "usual"}
    assert main(["probe", str(qwen_folder), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "start of text    nothing (models of type qwen2 read none)" in printed
    assert "nats a token: " in printed


def test_what_asks_for_a_start_token_that_is_not_there_is_refused(qwen_folder):
    model, usual = (
        load_model("tiny-gpt2", start="none", device="cpu"),
        soft_prefix(load("tiny-gpt2")),
    )
    layout = Layout.of(model, PREFIX, PROMPT)
    refused = {
        "span 'bos' has the start token": lambda: layout.spans("bos"),
        r"span 'prefix\+bos' has the start token": lambda: generate(
            model,
            "The lake",
            prefix=PREFIX,
            length=12,
            augmentation=Augmentation(alpha=1.0, span="prefix+bos"),
        ),
        "doubled_bos reproduces": lambda: Layout.of(model, PREFIX, PROMPT, doubled_bos=True),
        "nothing stands in front of 'The lake'": lambda: generate(
            model, "The lake", attribute="positive", method="gedi", length=12
        ),
        r"give load_model\(..., start='usual'\)": lambda: generate(
            model, "The lake", prefix=PREFIX, length=12, start="usual"
        ),
        r"text starts with nothing here, .* start='<\|endoftext\|>'": lambda: Layout.of(
            model, PREFIX, "<|endoftext|>The lake"
        ),
        "behind the soft prefix 'positive' text starts with 'usual'": lambda: usual.check(model),
    }
    kinds = (LayoutError, ModelError, PrefixError, Lapa2Error)
    for sentence, action in refused.items():
        with pytest.raises(kinds, match=sentence):
            action()


def test_a_soft_prefix_of_a_model_without_start_token_is_trained_for_it(qwen_folder):
    model = load_model(str(qwen_folder), device="cpu")
    prefix = soft_prefix(model)
    assert prefix.card.start == "none"
    prefix.check(model)
    layout = Layout.of(model, None, "The lake", soft=5)
    assert (layout.n_bos, layout.l_pre, len(layout)) == (0, 5, 13)


def test_circuits_of_a_model_without_start_token():
    from lapa2_interp import circuits

    model = load_model("planted", start="none", device="cpu")
    texts = circuits.ContrastSet.of(
        model, "sentiment", prompts=["the lake was", "my old house"], tokens=8
    )
    assert {layout.n_bos for example in texts.examples for layout in example.layouts} == {0}
    parts = circuits.head_logit_attribution(model, texts).parts()
    assert "bos" not in set(parts["part"])
    patched = circuits.patch(model, texts, "resid_pre").frame()
    assert "bos" not in set(patched["slots"])


def test_load_transformers_follows_the_setting():
    assert Layout.of(load_transformers("tiny-gpt2", start="none")[1], None, "The").n_bos == 0
