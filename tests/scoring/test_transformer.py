"""Scorers that run a model: a score is that of the text alone, and a head is what its configuration
says."""

import copy
import json
import math
import re
import threading
from contextlib import nullcontext

import pandas as pd
import pytest
import torch
import transformers
from conftest import lapa2
from families import save_family
from tokenizers.processors import TemplateProcessing
from torch.testing import assert_close

from lapa2_interp.errors import LayoutError, ScoringError
from lapa2_interp.models.load import load_transformers
from lapa2_interp.models.tiny import tiny_tokenizer
from lapa2_interp.scoring import transformer
from lapa2_interp.scoring.distinct import Repetition, token_lists
from lapa2_interp.scoring.echo import Echo, Masked
from lapa2_interp.scoring.linear import LinearScorer
from lapa2_interp.scoring.scorer import (
    ScoreCache,
    Scorer,
    ScoringStoppedError,
    SkippedText,
    TextItem,
    run_scorer,
)
from lapa2_interp.scoring.tables import distinct_cells
from lapa2_interp.scoring.transformer import Classifier, ConditionalPerplexity, Perplexity

END = 0  # of the tiny tokenizer
TEXTS = [
    "a fine day", "b", "a fine dax", "a", "A calm lake that is bright today and more", "x" * 62,
    "a calm lake<|endoftext|> The next begins", "zzz", "a calm lake that is there " * 12,
]  # fmt: skip
ITEMS = [TextItem(text, text[:4], "positive") for text in TEXTS]
SMALL = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 7, "bos_token_id": END, "eos_token_id": END,
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.3,
    "decoder_start_token_id": END, "forced_eos_token_id": END, "initializer_range": None,
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads")),
}  # fmt: skip
JAMBA = {
    "num_key_value_heads": 2, "mamba_d_state": 4, "mamba_dt_rank": 2, "num_experts": 2,
    "attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False,
}  # fmt: skip
SPARSE = {
    "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1, "sep_token_id": END,
}  # fmt: skip
REFORMER = {
    "attn_layers": ["local", "lsh"], "attention_head_size": 16, "feed_forward_size": 32,
    "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 8,
    "lsh_attn_chunk_length": 8, "num_hashes": 1,
    **dict.fromkeys(("intermediate_size", "num_hidden_layers")),
}  # fmt: skip
NETWORKS = {
    "a decoder without a padding token": ("llama", {"pad_token_id": None}, {"pad_token": 9}),
    "a decoder with another padding token": ("llama", {"pad_token_id": 5}, {"pad_token": 9}),
    "a decoder that pads with a letter": ("llama", {"pad_token_id": 89}, {"pad_token": 89}),
    "padding on the left": ("gpt2", {}, {"pad_token": 7, "padding_side": "left"}),
    "no padding token at all": ("bert", {"pad_token_id": 0}, {"pad_token": None}),
    "no token types": ("distilbert", {}, {"model_input_names": ["input_ids", "token_type_ids"]}),
    "positions behind the padding's": ("roberta", {}, {"pad_token": 7}),
    "sums of end tokens": ("bart", BART, {"pad_token": 7}),
    "a recurrent network": ("jamba", JAMBA, {"pad_token": None}),
    "no length": ("mpt", {"pad_token_id": None, "max_seq_len": 64}, {}),
}
LONGEST = {"positions behind the padding's": 64 - 7 - 1}
ITEMS_OF_WORDS = [TextItem("lake " * 12)]
"""Long enough to have a perplexity."""


def save_classifier(folder, model_type="llama", settings=(), tokenizer=(), ends=True, **config):
    """A random classifier of two named labels, in a folder."""
    config = {
        "id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1},
        **SMALL, **dict(settings), **config,
    }  # fmt: skip
    left = {name for name in config if name in dict(settings) and config[name] is None}
    config = {name: value for name, value in config.items() if name not in left - {"pad_token_id"}}
    made = transformers.AutoConfig.for_model(model_type, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.AutoModelForSequenceClassification.from_config(made)
        for weights in network.parameters():
            if weights.dim() > 1:
                torch.nn.init.normal_(weights, 0, 0.3)
    network.save_pretrained(folder)
    reads = copy.deepcopy(tiny_tokenizer("tiny-gpt2"))
    end = reads.convert_ids_to_tokens(END)
    if ends:
        template = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
        reads.backend_tokenizer.post_processor = template
    for name, value in dict(tokenizer).items():
        is_id = name == "pad_token" and value is not None
        setattr(reads, name, reads.convert_ids_to_tokens(value) if is_id else value)
    reads.save_pretrained(folder)
    return str(folder)


def numbers(scorer, items):
    """The scores of items in one batch; NaN if skipped."""
    scores = run_scorer(scorer, items)
    return torch.tensor(scores[list(scorer.columns)].to_numpy(float))


def by_itself(scorer, items):
    return torch.cat([numbers(scorer, [item]) for item in items])


@pytest.mark.parametrize("case", NETWORKS)
def test_a_classifiers_score_is_that_of_the_text_alone(case, tmp_path):
    folder = save_classifier(tmp_path, *NETWORKS[case])
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = []
    for text in TEXTS:
        ids = tokenizer(text, truncation=True, max_length=LONGEST.get(case, 64)).input_ids
        with torch.no_grad():
            logits = network(torch.tensor([ids])).logits.double()
        wanted.append(logits.softmax(1)[0])
    wanted = torch.stack(wanted)
    scorer = Classifier(folder, device="cpu")
    assert (wanted.max(0)[0] - wanted.min(0)[0] > 0.01).all(), "the texts differ"
    torch.testing.assert_close(numbers(scorer, ITEMS), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(by_itself(scorer, ITEMS), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["MPT", "Llama 4", "Qwen3-Next"])
def test_a_perplexity_is_that_of_the_text_alone(family, tmp_path):
    """Also where the network is recurrent, or has no base model of its own."""
    folder = str(save_family(family, tmp_path))
    words = ["a fine day it was by the lake and so", "a fine day it was by the lake and so on"]
    items = [TextItem(text, text[:6]) for text in (*words, words[0] * 3, words[1] + " z" * 40)]
    network, tokenizer, _ = load_transformers(folder)
    for kind in (Perplexity, ConditionalPerplexity):
        scorer = kind(folder, device="cpu")
        together = numbers(scorer, items)
        torch.testing.assert_close(by_itself(scorer, items), together, atol=0, rtol=1e-5)
    start = [] if scorer.bos is None else [scorer.bos]
    ids = torch.tensor([[*start, *tokenizer(words[0], add_special_tokens=False).input_ids]])
    with torch.no_grad():
        loss = network(ids, labels=ids, use_cache=False).loss
    assert numbers(Perplexity(folder, device="cpu"), items)[0].item() == pytest.approx(
        loss.exp().item(), rel=1e-4
    )


def test_scorers_without_a_network_score_each_text_alone():
    words = {"positive": ("lake",), "negative": ("calm",)}
    linear = LinearScorer("sentiment")
    for scorer in (linear, Repetition(), Echo(words), Masked(linear, words)):
        together = numbers(scorer, ITEMS)
        assert together.isfinite().any()
        torch.testing.assert_close(
            by_itself(scorer, ITEMS), together, atol=1e-12, rtol=0, equal_nan=True
        )


def test_a_network_that_reads_both_sides_has_no_perplexity(tmp_path):
    config = transformers.BertConfig(**SMALL)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    tiny_tokenizer("tiny-gpt2").save_pretrained(tmp_path)
    with pytest.raises(ScoringError, match="BertLMHeadModel. is no causal model: .*left to right"):
        numbers(Perplexity(str(tmp_path), device="cpu"), ITEMS_OF_WORDS)


def test_a_long_text_is_read_as_before_a_short_one(tmp_path):
    """BigBird's attention changes for good at a short text."""
    folder = save_classifier(tmp_path, "big_bird", SPARSE)
    long = [TextItem("x" * 62)]
    scorer = Classifier(folder, device="cpu")
    first = numbers(scorer, long)
    numbers(scorer, ITEMS[:1])
    assert torch.equal(numbers(scorer, long), first)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    ids = torch.tensor([scorer.tokenizer(long[0].text).input_ids])
    with torch.no_grad():
        plain = network.eval()(ids).logits.double().softmax(1)[0]
        assert_close(first[0], plain, atol=1e-6, rtol=0)
        network.bert.set_attention_type("original_full")
        assert (plain - network(ids).logits.double().softmax(1)[0]).abs().max() > 1e-5


def test_a_classifier_that_draws_random_numbers_has_no_score(tmp_path):
    folder = save_classifier(tmp_path, "reformer", REFORMER)
    with pytest.raises(ScoringError, match=r"accuracy: Reformer\w+ draws random numbers"):
        numbers(Classifier(folder, device="cpu"), [TextItem("x" * 62)])


def test_a_classifiers_tokenizer_cuts_a_text_the_same_way_each_time(tmp_path):
    folder = save_classifier(tmp_path)
    file = tmp_path / "tokenizer.json"
    saved = json.loads(file.read_text("utf-8"))
    saved["model"]["dropout"] = 0.5
    file.write_text(json.dumps(saved), "utf-8")
    assert Classifier(folder, device="cpu").tokenizer.backend_tokenizer.model.dropout is None


@pytest.mark.parametrize(("window", "refused"), [(16, True), (66, False)])
def test_a_mask_that_may_hide_keys_has_no_perplexity(window, refused, tmp_path, monkeypatch):
    network, tokenizer, origin = load_transformers("tiny-llama")
    network.config.keep_window_size = window
    monkeypatch.setattr(transformer, "load_transformers", lambda *_: (network, tokenizer, origin))
    with pytest.raises(ScoringError, match="by keep_window_size") if refused else nullcontext():
        Perplexity("tiny-llama", device="cpu", max_tokens=64)


def test_threads_share_a_perplexity():
    """One thread is behind the output layer while the other begins its pass."""
    scorer = Perplexity("tiny-llama", device="cpu", min_words=1)
    texts = ["lake lake lake", "road hill town"]
    alone = [numbers(scorer, [TextItem(text)]) for text in texts]
    inside, second_inside = threading.Event(), threading.Event()

    def before(*_):
        if threading.current_thread().name == "second":
            inside.wait(0.3)

    def after(*_):
        if threading.current_thread().name == "first":
            inside.set()
            second_inside.wait(0.2)

    scorer.network.register_forward_pre_hook(before)
    scorer.network.register_forward_hook(after)
    logits = {}

    def work(name, text):
        logits[name] = numbers(scorer, [TextItem(text)])
        second_inside.set()

    threads = [
        threading.Thread(target=work, args=pair, name=pair[0])
        for pair in zip(("first", "second"), texts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_close([logits["first"], logits["second"]], alone)


def test_a_network_without_an_output_layer_has_no_perplexity(monkeypatch):
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "get_output_embeddings", lambda _: None)
    with pytest.raises(Exception, match="logits without an output layer"):
        numbers(Perplexity("tiny-gpt2", device="cpu"), ITEMS_OF_WORDS)


def test_a_library_that_fails_where_a_perplexity_is_tried_is_one_line(monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel\nfor this. More of it")

    monkeypatch.setattr(transformer, "text_nll", fail)
    with pytest.raises(ScoringError, match="GPT2LMHeadModel.: RuntimeError: no kernel for this;"):
        numbers(Perplexity("tiny-gpt2", device="cpu"), ITEMS_OF_WORDS)


# --- what the outputs of a head are

THREE = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
ONE = {"id2label": {0: "toxic"}, "label2id": {"toxic": 0}}
UNNAMED = {"id2label": {0: "LABEL_0", 1: "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**ONE, "problem_type": "regression"}, "problem_type in config.json is 'regression', so"),
        ({**THREE, "problem_type": "regression"}, "problem_type in config.json is 'regression'"),
        (ONE, 'one output and no problem_type .* "problem_type" to "multi_label_classification"'),
        (UNNAMED, "neither a problem_type nor names of the outputs LABEL_0, LABEL_1.*--labels"),
        ({"id2label": {1: "a", 2: "b"}}, "must number the labels from 0 to 1, found 1, 2"),
    ],
)
def test_outputs_that_are_no_probabilities_are_refused(
    config, message, tmp_path, capsys, own_cache
):
    """By accuracy and toxicity alike, on the command line in one line."""
    folder = save_classifier(tmp_path / "model", **config)
    (tmp_path / "texts.csv").write_text("text,attribute\na fine day,positive\n")
    line = f"score --scorers accuracy={folder} --out"
    assert lapa2(line, tmp_path / "out", tmp_path / "texts.csv") == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, last_line)
    with pytest.raises(ScoringError, match=message.replace("--", "")):
        Classifier(folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "link"),
    [
        (THREE, lambda logits: logits.softmax(1)),
        ({**THREE, "problem_type": "single_label_classification"}, lambda x: x.softmax(1)),
        ({**THREE, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({**ONE, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({**UNNAMED, "problem_type": "multi_label_classification"}, torch.sigmoid),
    ],
)
def test_the_configuration_says_what_a_head_gives(config, link, tmp_path):
    folder = save_classifier(tmp_path, **config)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder)("a fine day", return_tensors="pt")
    with torch.no_grad():
        wanted = link(network(**ids).logits.double())
    logits = numbers(Classifier(folder, device="cpu"), [TextItem("a fine day")])
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=0)


def test_outputs_without_a_name_are_what_the_user_names_them(tmp_path):
    folder, items = save_classifier(tmp_path, **UNNAMED), [TextItem("a fine day")]
    named = Classifier(folder, {"LABEL_0": "negative", "LABEL_1": "positive"}, device="cpu")
    toxic = Classifier(folder, column="label_1", name="toxicity", device="cpu")
    assert numbers(toxic, items).item() == numbers(named, items)[0, 1].item()
    with pytest.raises(ScoringError, match="outputs LABEL_0, so what they mean is not known"):
        Classifier(folder, {"LABEL_1": "positive"}, device="cpu")


def test_the_version_says_how_much_of_a_text_is_read(tmp_path):
    """So scores that depended on their batch, whose version lacked it, are not read again."""
    scorer = Classifier(save_classifier(tmp_path), device="cpu")
    assert ", at most 64 tokens" in scorer.version
    before = copy.copy(scorer)
    before.version = scorer.version.replace(", at most 64 tokens", "")
    assert before.key(ITEMS[0]) != scorer.key(ITEMS[0])


# --- a library fails, or gives no number


class Failing(Scorer):
    """Counts letters; fails at texts with "!", and at batches of several if asked to."""

    name, version, columns, batch_size = "letters", "1", ("letters",), 3

    def __init__(self, alone=False, value=float):
        self.alone, self.value = alone, value

    def score(self, items):
        if self.alone and len(items) > 1:
            raise MemoryError
        if any("!" in item.text for item in items):
            raise IndexError("index out of range\nin self. And much more")
        return [(self.value(len(item.text)),) for item in items]


def test_a_librarys_error_names_the_text_and_keeps_the_other_scores(tmp_path):
    items = [TextItem(text) for text in ("one", "the three", "four!", "fours", "a b")]
    with ScoreCache(tmp_path) as cache:
        with pytest.raises(
            ScoringStoppedError,
            match=r"letters stopped after 2 of 5 texts, which are kept: text 3 \('four!'\):"
            " IndexError: index out of range in self; leave the text out",
        ) as caught:
            run_scorer(Failing(), items, cache)
        assert "\n" not in str(caught.value)
        assert len(cache.get([Failing().key(item) for item in items])) == 2


def test_texts_of_a_batch_that_fails_are_scored_alone_where_they_can_be():
    assert numbers(Failing(alone=True), ITEMS)[:, 0].tolist() == list(map(len, TEXTS))


def test_a_classifier_that_needs_an_end_token_names_the_text_without(tmp_path, capsys, own_cache):
    folder = save_classifier(tmp_path / "model", "bart", BART, ends=False)
    end = tiny_tokenizer("tiny-gpt2").convert_ids_to_tokens(END)
    texts = pd.DataFrame({"text": [f"{end}a", "a calm lake without it"], "attribute": "positive"})
    texts.to_csv(tmp_path / "texts.csv", index=False)
    line = f"score --scorers accuracy={folder} --out"
    assert lapa2(line, tmp_path / "out", tmp_path / "texts.csv") == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        "accuracy stopped after 1 of 2 texts, which are kept: text 2 ('a calm lake without it'):"
        in last_line
    )
    assert "at least one <eos> token" in last_line
    assert not (tmp_path / "out").exists()


def test_a_token_without_an_embedding_names_the_text(tmp_path):
    folder = save_classifier(tmp_path, vocab_size=80)
    with pytest.raises(ScoringError, match=r"text 2 \('zzz'\): LayoutError: token 90 has no emb"):
        run_scorer(Classifier(folder, device="cpu"), [TextItem("a"), TextItem("zzz")])
    with pytest.raises(LayoutError, match="token 90 has no embedding"):
        Classifier(folder, device="cpu").score([TextItem("zzz")])


def test_a_head_with_outputs_of_another_shape_is_refused(tmp_path, monkeypatch):
    scorer = Classifier(save_classifier(tmp_path), device="cpu")
    monkeypatch.setattr(scorer, "_logits", lambda inputs: torch.zeros(1, 3, 2))
    with pytest.raises(ScoringError, match=r"outputs of shape \[1, 3, 2\] for 1 text and 2 labels"):
        run_scorer(scorer, ITEMS[:1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_no_score(value, tmp_path):
    scorer = Failing(value=lambda n: value if n == 3 else float(n))
    items = [TextItem("one"), TextItem("three")]
    with ScoreCache(tmp_path) as cache:
        table = run_scorer(scorer, items, cache)
        assert table["reason"].tolist() == ["no number", ""]
        assert table["letters"].isna().tolist() == [True, False]
        assert list(cache.get(list(map(scorer.key, items)))) == [scorer.key(items[1])]
        assert run_scorer(Failing(), items, cache)["letters"].tolist() == [3, 5], "asked for again"


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([(1.0, 2.0)], "it gives 2 numbers of a text, and its columns are letters; it must"),
        ([], "it gives 0 scores for 1 text; it must give one for each"),
    ],
)
def test_a_scorer_that_gives_too_few_or_too_many_is_refused(scores, message, monkeypatch):
    scorer = Failing()
    monkeypatch.setattr(scorer, "score", lambda items: scores)
    with pytest.raises(ScoringError, match=message):
        run_scorer(scorer, [TextItem("one")])


def test_distinct_skips_what_no_tokenizer_reads_and_says_where_one_fails(gpt2_tokenizer):
    texts = pd.DataFrame({"text": ["one two", "half \ud800", " "]}, dtype=object)
    texts = texts.assign(prompt=list("pqr"))
    table = distinct_cells(texts, gpt2_tokenizer)
    assert set(table["why"]) == {"1 text not valid Unicode; 1 empty text"}
    assert set(table["skipped"]) == {2}
    with pytest.raises(ScoringError, match=r"distinct .*: a text \('half .ud800'\): \w+: "):
        token_lists(list(texts["text"]), gpt2_tokenizer)


def test_a_text_without_a_token_is_skipped(tmp_path):
    scorer = Classifier(save_classifier(tmp_path), device="cpu")
    scorer.tokenizer = lambda text, **_: {"input_ids": []}
    assert scorer.score(ITEMS[:1]) == [SkippedText("no token")]


def test_a_scorer_whose_weights_have_changed_keeps_no_scores(tmp_path):
    scorer = Classifier(str(save_classifier(tmp_path)))
    cache = ScoreCache(None)
    run_scorer(scorer, ITEMS[:2], cache)
    next(scorer.network.parameters()).data.mul_(2)
    with pytest.raises(ScoringStoppedError, match="weights of the scorer accuracy have changed"):
        run_scorer(scorer, ITEMS, cache)
