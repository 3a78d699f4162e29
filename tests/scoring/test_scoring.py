"""Scorers on hand-made texts: the runner and its cache, perplexity, distinct-n, classifiers,
tables."""

import gzip
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import load
from scipy.stats import t

from lapa2_interp.errors import DataError, ScoringError
from lapa2_interp.models.load import load_transformers
from lapa2_interp.runs.texts import at_lengths, in_parts, read_texts
from lapa2_interp.scoring import transformer
from lapa2_interp.scoring.distinct import Repetition, distinct, distinct_table, token_lists
from lapa2_interp.scoring.linear import LinearScorer
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer
from lapa2_interp.scoring.scorer import (
    ScoreCache,
    Scorer,
    ScoringStoppedError,
    SkippedText,
    TextItem,
    run_scorer,
)
from lapa2_interp.scoring.tables import cell_table, difference_table, distinct_cells, score_table
from lapa2_interp.scoring.transformer import (
    Classifier,
    ConditionalPerplexity,
    Perplexity,
    _other_files_version,
)
from lapa2_interp.tasks.corpora import read_corpus


class Lengths(Scorer):
    """Counts words; empty texts have none. Notes what it was asked."""

    name, version, columns, batch_size = "length", "1", ("words",), 2

    def __init__(self, fail_at=None):
        self.asked, self.fail_at = [], fail_at

    def score(self, items):
        if self.fail_at is not None and len(self.asked) >= self.fail_at:
            raise ScoringError("the server is gone")
        self.asked += [item.text for item in items]
        return [
            (float(len(item.text.split())),) if item.text else SkippedText("empty text")
            for item in items
        ]


BROKEN_GZIP = gzip.compress(b"text\na fine day\n" * 99, mtime=0)[:20] + b"x" * 40
TEXTS = [TextItem(text) for text in ("one", "one two", "", "one", "a b c")]


# --- the runner and its cache


def test_each_distinct_text_is_scored_once_and_never_again(tmp_path):
    first = Lengths()
    table = run_scorer(first, TEXTS, ScoreCache(tmp_path))
    assert table["words"].tolist()[:2] == [1, 2]
    assert math.isnan(table["words"][2])
    assert table["words"].tolist()[3:] == [1, 3]
    assert table["reason"].tolist() == ["", "", "empty text", "", ""]
    assert sorted(first.asked) == ["", "a b c", "one", "one two"]
    again = Lengths()
    assert run_scorer(again, TEXTS, ScoreCache(tmp_path)).equals(table)
    assert again.asked == []


def test_another_version_or_field_is_another_score(tmp_path):
    newer, prompted = Lengths(), Lengths()
    newer.version = "2"
    prompted.item_fields = ("prompt",)
    run_scorer(Lengths(), TEXTS, ScoreCache(tmp_path))
    for scorer in (newer, prompted):
        run_scorer(scorer, TEXTS, ScoreCache(tmp_path))
        assert len(scorer.asked) == 4
    run_scorer(prompted, [TextItem("one", prompt="p")], ScoreCache(tmp_path))
    assert prompted.asked[4:] == ["one"]


def test_what_was_scored_before_a_failure_is_kept_and_said(tmp_path):
    items = [TextItem(f"text {i}") for i in range(9)]
    with pytest.raises(
        ScoringStoppedError,
        match="length stopped after 4 of 9 texts, which are kept: the server is gone",
    ):
        run_scorer(Lengths(fail_at=4), items, ScoreCache(tmp_path))
    rest = Lengths()
    run_scorer(rest, items, ScoreCache(tmp_path))
    assert len(rest.asked) == 5


def test_reasons_that_may_pass_are_not_cached(tmp_path):
    class Unsure(Lengths):
        def score(self, items):
            self.asked += [item.text for item in items]
            return [SkippedText("malformed answer", final=False) for _ in items]

    for _ in range(2):
        scorer = Unsure()
        assert (
            run_scorer(scorer, TEXTS[:2], ScoreCache(tmp_path))["reason"].tolist()
            == ["malformed answer"] * 2
        )
        assert len(scorer.asked) == 2


@pytest.mark.parametrize("value", ["[0.5", "[NaN]", "0.5", b"\xff"])
def test_a_damaged_score_is_one_line(value, tmp_path):
    with ScoreCache(tmp_path) as cache:
        cache.put([("a", (0.5,)), ("b", SkippedText("empty text"))])
        assert cache.get("abc") == {"a": (0.5,), "b": SkippedText("empty text")}
        cache._database.execute("UPDATE numbers SET value = ? WHERE key = 'a'", (value,))
        with pytest.raises(ScoringError, match="cannot use the scores in .*; move it away, or"):
            cache.get("abc")


# --- perplexity


def test_perplexity_is_transformers_own_loss(tiny):
    """BOS in front, every token scored, batches of unequal lengths."""
    network, tokenizer, _ = load_transformers(tiny, "float64")
    texts = ["a b c d e f g h i j", "k l m n o p q r s t u v w x y z a b c d"]
    perplexities = run_scorer(Perplexity(tiny, "float64"), [TextItem(text) for text in texts])[
        "perplexity"
    ]
    for text, value in zip(texts, perplexities, strict=True):
        ids = torch.tensor(
            [[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]]
        )
        with torch.no_grad():
            assert value == pytest.approx(
                network(ids, labels=ids).loss.exp().item(), rel=2e-6
            )  # transformers takes the loss in float32


def test_conditional_perplexity_is_that_of_the_tokens_after_the_prompt(tiny):
    """Also where the text comes without its prompt, and where a token is partly prompt."""
    network, tokenizer, _ = load_transformers(tiny, "float64")
    prompt, rest = "a b c d", " e f g h i j k l m n"
    ids = [tokenizer.bos_token_id, *tokenizer(prompt + rest, add_special_tokens=False).input_ids]
    first = 1 + len(tokenizer(prompt, add_special_tokens=False).input_ids)
    with torch.no_grad():
        log_probs = network(torch.tensor([ids])).logits.log_softmax(-1)[0, :-1]
    nll = -log_probs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]  # of ids 1, 2, ...
    items = [TextItem(prompt + rest, prompt), TextItem(rest, prompt), TextItem(prompt + rest)]
    perplexities = run_scorer(ConditionalPerplexity(tiny, "float64"), items)["perplexity"]
    assert (
        perplexities[0]
        == perplexities[1]
        == pytest.approx(nll[first - 1 :].mean().exp().item(), rel=1e-9)
    )
    assert perplexities[2] == pytest.approx(nll.mean().exp().item(), rel=1e-9)
    assert abs(perplexities[0] / perplexities[2] - 1) > 1e-4


def test_a_token_that_is_partly_prompt_counts():
    scorer = ConditionalPerplexity("smollm2-135m")
    text = "He was born in 1990s and he lived in many other places"
    ids = scorer.tokenizer(text, add_special_tokens=False).input_ids
    parts = [scorer.tokenizer.decode(token_id) for token_id in ids]
    for prompt, token in (("He was bo", " born"), ("He was born in", " ")):
        read, first = scorer._read(TextItem(text, prompt))
        assert read == ids
        assert parts[first] == token
    nothing = run_scorer(scorer, [TextItem(text, text)])
    assert nothing["reason"][0] == "nothing after the prompt"


def test_perplexity_skips_short_and_empty_texts_and_counts_them():
    scorer = Perplexity("tiny-gpt2")
    table = run_scorer(
        scorer,
        [
            TextItem("only nine words are in this text you see"),
            TextItem("  "),
            TextItem("x " * 10),
        ],
    )
    assert table["reason"].tolist() == ["under 10 words", "empty text", ""]
    assert np.isfinite(table["perplexity"][2])


def test_a_very_long_text_is_scored_up_to_the_limit():
    scorer = Perplexity("tiny-gpt2")
    assert scorer.max_tokens == 254
    text = " ".join(f"{i:x}" for i in np.random.default_rng(0).integers(0, 255, 20_000))
    long, cut, half = (
        run_scorer(scorer, [TextItem(part)])["perplexity"][0]
        for part in (text, text[:254], text[:127])
    )
    assert long == pytest.approx(cut, rel=1e-6)  # a byte is a token
    # What it is by another limit is far outside this, whatever the random weights are.
    assert abs(half / cut - 1) > 1e-4


@pytest.mark.parametrize("doubled_bos", [False, True])
def test_a_text_cut_at_several_lengths_is_read_once_for_its_perplexity(monkeypatch, doubled_bos):
    scorer = Perplexity("tiny-llama", "float64", doubled_bos=doubled_bos)
    texts = ["a b c d e f g h i j k l m n o p", "q r s t u v w x y z a b"]
    cut = [text[:length] for text in texts for length in (99, 21, 5, 29)]
    apart = [run_scorer(scorer, [TextItem(text)]) for text in cut]
    read, plain_nll = [], transformer.text_nll

    def seen(network, rows):
        read.append(rows.targets.shape[0])
        return plain_nll(network, rows)

    monkeypatch.setattr(transformer, "text_nll", seen)
    together = run_scorer(scorer, [TextItem(text) for text in cut])
    assert sum(read) == len(texts)
    assert together["reason"].tolist() == [one["reason"][0] for one in apart]
    alone = [one["perplexity"][0] for one in apart]
    np.testing.assert_allclose(together["perplexity"], alone, rtol=1e-12, equal_nan=True)
    assert np.isfinite(alone).tolist() == [True, True, False, True] * 2


def test_the_version_says_when_a_model_scores_its_own_texts():
    weights = load_transformers("tiny-gpt2")[2]
    assert " self," in Perplexity("tiny-gpt2", generator=weights).version
    assert " self" not in Perplexity("tiny-gpt2", generator="sha256 of another").version


def test_the_released_oddity_scores_a_second_bos():
    network, tokenizer, _ = load_transformers("tiny-llama", "float64")
    text = "a b c d e f g h i j"
    ids = torch.tensor([[0, 0, *tokenizer(text, add_special_tokens=False).input_ids]])
    with torch.no_grad():
        expected = network(ids, labels=ids).loss.exp().item()
    scorer = Perplexity("tiny-llama", "float64", doubled_bos=True)
    assert run_scorer(scorer, [TextItem(text)])["perplexity"][0] == pytest.approx(
        expected, rel=2e-6
    )


# --- distinct-n


def test_distinct_by_hand():
    """a b a b | b a: 6 tokens; 2 words; pairs ab, ba (across texts none); triples aba, bab."""
    lists, name = token_lists(["a b a b", "b a"])
    assert name == "words or graphemes"
    assert [distinct(lists, n) for n in (1, 2, 3)] == [2 / 6, 2 / 6, 2 / 6]
    table = distinct_table(["a b a b", "b a"], ["p", "q"])
    assert table["mean"].tolist() == [2 / 6] * 3
    with pytest.raises(ScoringError, match="at least one token"):
        distinct([[], []], 1)


def test_repetition_by_hand():
    """Four words make one 4-gram; "a b c d" comes back once among seven of them."""
    scorer = Repetition()
    texts = ["a b c d", "a b c d, x a b c d", "a a a a a a", "a b c", ""]
    assert scorer.score([TextItem(text) for text in texts]) == [
        (0.0,), (pytest.approx(1 / 7),), (pytest.approx(2 / 3),), SkippedText("under 4 words"),
        SkippedText("under 4 words"),
    ]  # fmt: skip
    frame = pd.DataFrame({"text": texts, "prompt": list("pqrst"), "attribute": "x", "arm": "y"})
    cells = cell_table(score_table(frame, make_scorer("repetition", "", ScorerOptions())))
    assert cells[["n", "skipped"]].to_numpy().tolist() == [[3, 2]]
    assert cells["mean"].item() == pytest.approx((1 / 7 + 2 / 3) / 3)


def test_distinct_intervals_leave_prompts_out():
    """The jackknife by brute force."""
    rng = np.random.default_rng(0)
    texts = [" ".join(map(str, rng.integers(0, 60, 12))) for _ in range(20)]
    prompts = [f"p{i % 5}" for i in range(20)]
    row = distinct_table(texts, prompts).set_index("metric").loc["distinct-2"]
    left = [
        math.log(
            distinct(
                token_lists([a for a, p in zip(texts, prompts, strict=True) if p != prompt])[0], 2
            )
        )
        for prompt in sorted(set(prompts))
    ]
    spread = math.sqrt(4 / 5 * sum((estimate - sum(left) / 5) ** 2 for estimate in left))
    away = t.ppf(0.975, 4) * spread  # of 5 prompts
    assert row["low"] == pytest.approx(row["mean"] * math.exp(-away), rel=1e-9)
    assert row["low"] < row["mean"] < row["high"]


def test_a_csv_with_a_field_too_many_is_refused_and_numbers_stay_words(tmp_path):
    """pandas would take the first column as an index, and 007 as 7."""
    file = tmp_path / "a.csv"
    file.write_text("prompt,text\nThe,good film,\nThe,bad film,\n")
    ((table, *_),) = read_texts(file)
    assert table["text"].tolist() == ["good film", "bad film"]
    file.write_text("prompt,text\nThe,good film,more\nThe,bad film,more\n")
    with pytest.raises(ScoringError, match="more fields than the first line has names"):
        read_texts(file)
    with pytest.raises(DataError, match="more fields than the first line has names"):
        read_corpus(str(file), ["a"])
    file.write_text("prompt,text,value\n007,7.10,1\n7,good,2\n9007199254740993,bad,3\n,NA,4\n")
    ((table, *_),) = read_texts(file)
    assert table["prompt"].tolist() == ["007", "7", "9007199254740993", ""]
    assert table["text"].tolist() == ["7.10", "good", "bad", "NA"]
    assert table["value"].sum() == 10


def test_distinct_counts_special_tokens_of_a_tokenizer(gpt2_tokenizer):
    lists, name = token_lists(["The lake is the lake"], load("tiny-llama").tokenizer)
    assert lists[0][0] == 0, "the tokenizer's own BOS counts, as the released script has it"
    assert name == "tiny-llama"


def test_texts_without_a_variant_are_in_the_tables():
    """A column of a file may be empty in some rows, or in all."""
    texts = pd.DataFrame({"text": ["one", "two words"] * 8, "prompt": [f"p{i}" for i in range(16)],
                          "attribute": "positive", "arm": ["baseline", "a"] * 8,
                          "task": "sentiment"})  # fmt: skip
    for variant, rows in ((None, 2), (["x"] * 8 + [None] * 8, 4)):
        scores = score_table(texts.assign(variant=variant), Lengths())
        table = cell_table(scores)
        assert len(table) == rows
        assert table["n"].sum() == 16


# --- classifiers


@pytest.fixture
def classifier(tmp_path):
    """A random classifier in a folder, as transformers saves one."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    _, tokenizer, _ = load_transformers("tiny-llama")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=2, max_position_embeddings=600, pad_token_id=tokenizer.pad_token_id, initializer_range=0.5,
        id2label={0: "LABEL_0", 1: "LABEL_1"}, problem_type="single_label_classification",
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_classifiers_probabilities_are_its_own(classifier):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    network, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(classifier),
        AutoTokenizer.from_pretrained(classifier),
    )
    texts = ["a fine day", "x" * 900, "b"]
    labelled = run_scorer(
        Classifier(classifier, {"LABEL_0": "negative", "LABEL_1": "positive"}),
        [TextItem(text) for text in texts],
    )
    assert list(labelled.columns) == ["negative", "positive", "reason"]
    for text, row in zip(texts, labelled.to_numpy()[:, :2], strict=True):
        with torch.no_grad():
            expected = network(
                **tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
            ).logits.softmax(1)[0]
        assert row.astype(float) == pytest.approx(expected.tolist(), abs=1e-5)
    toxic = run_scorer(
        Classifier(classifier, column="label_1", name="toxicity"), [TextItem("a fine day")]
    )
    assert toxic["toxicity"][0] == pytest.approx(labelled["positive"][0])


def test_a_classifier_that_was_trained_again_has_another_version(classifier):
    from transformers import LlamaForSequenceClassification

    before = Classifier(classifier).version
    assert before == Classifier(classifier).version
    network = LlamaForSequenceClassification.from_pretrained(classifier)
    with torch.no_grad():
        network.score.weight.mul_(2)
    network.save_pretrained(classifier)
    assert Classifier(classifier).version != before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_whose_tokenizer_or_configuration_changed_has_another_version(
    classifier, name, tmp_path
):
    file = Path(classifier) / name
    before = [Classifier(classifier).version, _other_files_version(classifier)]
    assert before[0].endswith(before[1])
    file.write_text(file.read_text() + "\n")
    assert Classifier(classifier).version != before[0]
    assert _other_files_version("smollm2-135m") == _other_files_version("owner/model") == "", (
        "keys of names stay"
    )
    network, tokenizer, _ = load_transformers("tiny-gpt2")
    network.save_pretrained(tmp_path / "causal")
    tokenizer.save_pretrained(tmp_path / "causal")
    folder = str(tmp_path / "causal")
    assert _other_files_version(folder) in Perplexity(folder).version


def test_a_text_that_is_no_unicode_is_left_out(classifier):
    broken = TextItem("half a pair \ud800 in a text of more than ten words in all")
    for scorer in (Perplexity("tiny-gpt2"), Classifier(classifier), LinearScorer("sentiment")):
        scores = scorer.score([broken, TextItem("a fine day " * 6), TextItem(" ")])
        assert scores[0] == SkippedText("text not valid Unicode")
        assert isinstance(scores[1], tuple)
        assert scores[2] == SkippedText("empty text")


def test_no_number_is_no_probability_of_zero(monkeypatch):
    """It may come of float16, so another precision is asked again."""
    scorer = Perplexity("tiny-gpt2")
    for value, expected in (
        (math.nan, SkippedText("no number", final=False)),
        (math.inf, SkippedText("probability 0")),
    ):
        monkeypatch.setattr(
            transformer, "text_nll", lambda _, rows, value=value: torch.full(rows.ids.shape, value)
        )
        assert scorer.score([TextItem("a fine day " * 6)]) == [expected]


def several(classifier):
    """The classifier with three labels that do not exclude each other."""
    from transformers import LlamaForSequenceClassification

    network = LlamaForSequenceClassification.from_pretrained(
        classifier, num_labels=3, ignore_mismatched_sizes=True,
        id2label={0: "toxic", 1: "insult", 2: "threat"}, problem_type="multi_label_classification",
    )  # fmt: skip
    network.save_pretrained(classifier)
    return classifier


def test_the_scores_of_two_labels_are_kept_apart(classifier):
    model, items = several(classifier), [TextItem("a fine day")]
    with ScoreCache(None) as cache:
        toxicity = [
            run_scorer(Classifier(model, column=label, name="toxicity"), items, cache)["toxicity"][
                0
            ]
            for label in ("toxic", "insult")
        ]
    all_labels = run_scorer(Classifier(model), items)
    assert toxicity == pytest.approx([all_labels["toxic"][0], all_labels["insult"][0]])
    assert abs(toxicity[0] - toxicity[1]) > 1e-3


def test_labels_of_one_name_count_together(classifier):
    from transformers import LlamaForSequenceClassification

    stars = {0: "1 star", 1: "2 stars", 2: "5 stars"}
    LlamaForSequenceClassification.from_pretrained(
        classifier, num_labels=3, ignore_mismatched_sizes=True, id2label=stars
    ).save_pretrained(classifier)
    items = [TextItem("a fine day"), TextItem("b")]
    names = {"1 star": "negative", "2 stars": "negative", "5 stars": "positive"}
    parts, merged = (
        run_scorer(Classifier(classifier), items),
        run_scorer(Classifier(classifier, names), items),
    )
    assert list(merged.columns) == ["negative", "positive", "reason"]
    assert merged["negative"].tolist() == pytest.approx(
        (parts["1 star"] + parts["2 stars"]).tolist()
    )
    with pytest.raises(ScoringError, match="do not exclude each other.* found x, x, threat"):
        Classifier(several(classifier), {"toxic": "x", "insult": "x"})


def test_a_classifier_reads_in_float32_whatever_was_stored(classifier):
    from transformers import LlamaForSequenceClassification

    LlamaForSequenceClassification.from_pretrained(classifier).half().save_pretrained(classifier)
    assert Classifier(classifier).network.dtype == torch.float32


def test_blank_texts_are_not_given_to_a_classifier(classifier):
    """A tokenizer without special tokens makes nothing of them."""
    scorer = Classifier(classifier)
    scorer.tokenizer = load_transformers("tiny-gpt2")[1]
    scores = run_scorer(scorer, [TextItem(""), TextItem("a"), TextItem(" ")])
    assert scores["reason"].isin(["empty text"]).tolist() == [True, False, True]
    assert scorer.score([TextItem("")]) == [SkippedText("empty text")]


def test_classifiers_that_do_not_fit(classifier):
    with pytest.raises(ScoringError, match="unknown label 'LABEL_7'; allowed: LABEL_0, LABEL_1"):
        Classifier(classifier, {"LABEL_7": "positive"})
    with pytest.raises(ScoringError, match="unknown label 'toxic'; allowed: label_0, label_1"):
        Classifier(classifier, column="toxic")
    texts = pd.DataFrame({"text": ["a"], "prompt": [""], "attribute": ["joyful"], "arm": [""]})
    with pytest.raises(
        ScoringError, match="has the labels label_0, label_1, not 'joyful'; map its labels"
    ):
        score_table(texts, Classifier(classifier))


# --- tables


def texts(values, arm="baseline", prompts=4):
    return pd.DataFrame(
        [
            {"text": "w " * n, "prompt": f"p{i % prompts}", "attribute": "positive", "arm": arm}
            for i, n in enumerate(values)
        ]
    )


def test_cells_by_hand():
    (row,) = cell_table(score_table(texts([1, 2, 3]), Lengths())).to_dict("records")
    assert (row["mean"], row["n"], row["prompts"], row["skipped"], row["why"]) == (2.0, 3, 3, 0, "")
    # Student's t with 2 degrees: 4.303 * 1 / sqrt(3) = 2.484
    assert (row["low"], row["high"]) == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3)
    assert row["scorer"] == "length (1)"


def test_no_interval_leaves_what_its_metric_can_be():
    frame = texts([1, 2, 30])
    rows = [{**row, "value": value, "reason": None, "scorer": "made up"} for row, value in
            zip(frame.to_dict("records"), (1.5, 2.0, 30.0), strict=True)]  # fmt: skip
    for metric, scale, low, high in (
        ("perplexity", 1, 1, None),
        ("ppl", 1, 1, None),
        ("acc", 3, 0, 100),
        ("length", 1, None, None),
    ):
        table = pd.DataFrame(rows).assign(metric=metric)
        (row,) = cell_table(table.assign(value=table["value"] * scale)).to_dict("records")
        half = 4.303 * np.std([1.5, 2, 30], ddof=1) * scale / 3**0.5
        free = (row["mean"] - half, row["mean"] + half)
        assert row["low"] == pytest.approx(free[0] if low is None else low, abs=1e-2)
        assert row["high"] == pytest.approx(free[1] if high is None else high, abs=3e-2)


def test_all_texts_alike_is_no_certainty():
    frame = texts([1] * 60, prompts=20).assign(metric="accuracy", reason=None, scorer="made up")
    (right,) = cell_table(frame.assign(value=1.0)).to_dict("records")
    (wrong,) = cell_table(frame.assign(value=0.0)).to_dict("records")
    # 20 prompts would all be right with chance 0.05 where 0.05^(1/20) = 86 % of all prompts are
    assert (right["low"], right["high"]) == pytest.approx((0.8609, 1.0), abs=1e-4)
    assert (wrong["low"], wrong["high"]) == pytest.approx((0.0, 1 - 0.8609), abs=1e-4)
    (half,) = cell_table(
        frame.assign(value=[1.0, 0.0] * 30, prompt=np.repeat(np.arange(30), 2))
    ).to_dict("records")
    assert half["low"] == half["high"] == 0.5, "every prompt half right: prompts do not differ"


def test_arms_of_unlike_attributes_are_not_compared():
    """Half an arm is a gap: its mean over "all" would be of other texts than its baseline's."""
    rows = [
        {"task": "sentiment", "method": method, "arm": arm, "attribute": attribute, "prompt": f"p{i}", "text": "w " * 12,
         "metric": "accuracy", "value": float(attribute == "positive"), "reason": None, "scorer": "made up"}
        for method in ("prefix", "palette") for arm in ("baseline", "alpha 1") for attribute in ("positive", "negative")
        for i in range(9)
        if (method, arm, attribute) != ("prefix", "baseline", "positive")
    ]  # fmt: skip
    detox = [{**row, "task": "detox", "attribute": "nontoxic"} for row in rows[:9]]
    frame = pd.DataFrame(rows + detox)
    cells = cell_table(frame)
    together = cells[cells["attribute"] == "all"]
    assert [tuple(row) for row in together[["task", "method", "arm", "mean"]].to_numpy()] == [
        ("sentiment", "prefix", "alpha 1", 0.5),
        ("sentiment", "palette", "baseline", 0.5),
        ("sentiment", "palette", "alpha 1", 0.5),
        ("detox", "prefix", "baseline", 0.0),
    ]
    changes = difference_table(frame)
    together_changes = changes[changes["attribute"] == "all"]
    assert together_changes[["method", "arm", "difference"]].to_numpy().tolist() == [
        ["palette", "alpha 1", 0.0]
    ]
    assert set(changes[changes["method"] == "prefix"]["attribute"]) == {"negative"}


def test_skipped_texts_are_counted_with_their_reason():
    frame = texts([1, 2, 3, 4])
    frame.loc[3, "text"] = ""
    (row,) = cell_table(score_table(frame, Lengths())).to_dict("records")
    assert (row["mean"], row["n"], row["skipped"], row["why"]) == (2.0, 3, 1, "1 empty text")


def test_accuracy_and_toxicity_cells():
    class Fixed(Scorer):
        name, version, columns = "accuracy", "1", ("negative", "positive")
        classifies = True

        def score(self, items):
            return [(1 - float(item.text), float(item.text)) for item in items]

    frame = pd.DataFrame(
        {
            "text": ["0.9", "0.2", "0.6", "0.6"],
            "prompt": list("aabb"),
            "attribute": ["positive", "positive", "negative", "positive"],
            "arm": ["x"] * 4,
        }
    )
    cells = cell_table(score_table(frame, Fixed())).set_index("attribute")["mean"]
    assert cells.to_dict() == {"positive": pytest.approx(2 / 3), "negative": 0.0, "all": 0.5}

    class Toxic(Fixed):
        name, columns, classifies = "toxicity", ("toxicity",), False

        def score(self, items):
            return [(float(item.text),) for item in items]

    frame = pd.DataFrame({"text": ["0.9", "0.2", "0.49", "0.3", "0.5", "0.1"], "prompt": list("aabbcc"),
                          "attribute": "nontoxic", "arm": "x"})  # fmt: skip
    numbers = score_table(frame, Toxic())
    means = cell_table(numbers).set_index("metric")["mean"]
    expected = {"toxicity": 2.49 / 6, "toxicity max": 0.63, "toxic prompts": 2 / 3}
    assert means.to_dict() == pytest.approx(expected)
    second = cell_table(numbers.assign(metric="toxicity (linear)")).set_index("metric")["mean"]
    named = {name + " (linear)": value for name, value in expected.items()}
    assert second.to_dict() == pytest.approx(named)


def test_differences_are_paired_on_prompts():
    frame = pd.concat([texts([10, 20, 30, 40]), texts([11, 22, 31, 42], "lapa2")])
    (row,) = difference_table(score_table(frame, Lengths())).to_dict("records")
    assert difference_table(score_table(frame.assign(prompt=""), Lengths())).empty, "unpaired"
    assert row["difference"] == pytest.approx(1.5)
    assert (row["arm"], row["prompts"]) == ("lapa2", 4)
    assert row["p"] == pytest.approx(2 / 16), "all four differences have one sign"
    assert row["low"] > 0
    assert difference_table(score_table(texts([1, 2]), Lengths()), "other").empty


def made_up(prompt, arm, attribute, value):
    return {"prompt": prompt, "arm": arm, "attribute": attribute, "value": value, "text": "w",
            "metric": "accuracy", "reason": "", "scorer": "made up"}  # fmt: skip


def test_differences_of_all_attributes_are_of_the_texts_that_both_arms_have():
    """Five prompts lack the bad attribute in one arm, which changes no text of the other."""
    rows = [
        made_up(f"p{i}", arm, attribute, value)
        for arm in ("baseline", "lapa2")
        for attribute, value in (("positive", 0.9), ("negative", 0.1))
        for i in range(10)
        for _ in range(1 + (attribute == "positive"))  # more texts of one attribute weigh no more
        if not (arm == "lapa2" and attribute == "negative" and i < 5)
    ]
    differences = difference_table(pd.DataFrame(rows)).set_index("attribute")["difference"]
    assert differences.to_dict() == pytest.approx({"positive": 0, "negative": 0, "all": 0})


def test_arms_that_are_alike_are_no_certainty():
    rows = [made_up(f"p{i}", arm, "positive", 1.0) for arm in ("baseline", "x") for i in range(10)]
    (row,) = difference_table(pd.DataFrame(rows)).to_dict("records")
    # 10 prompts would all be right in both arms with chance 0.05 where 26 % of all prompts are not
    assert (row["difference"], row["low"], row["high"]) == pytest.approx(
        (0, -0.2589, 0.2589), abs=1e-4
    )
    assert np.isnan(row["detectable"])
    all_right = [{**row, "value": float(row["arm"] == "x")} for row in rows]
    (row,) = difference_table(pd.DataFrame(all_right)).to_dict("records")
    assert (row["difference"], row["low"], row["high"]) == pytest.approx((1, 0.4822, 1), abs=1e-4)
    (row,) = difference_table(pd.DataFrame(rows).assign(metric="perplexity")).to_dict("records")
    assert (row["low"], row["high"]) == (0, 0), "no greatest value, so no width to give"


def test_distinct_has_its_cells_too():
    frame = pd.concat([texts([3, 4]), texts([5, 5], "lapa2")])
    table = distinct_cells(frame)
    assert table["metric"].tolist() == ["distinct-1", "distinct-2", "distinct-3"] * 2
    assert table["mean"][0] == pytest.approx(1 / 7)
    assert set(table["scorer"]) == {"distinct (words or graphemes)"}


def test_a_cell_of_empty_texts_is_in_the_table_of_distinct():
    blank = texts([1, 1], "blank").assign(text=" ")
    table = distinct_cells(pd.concat([blank, texts([3, 4])]))
    assert table["arm"].tolist() == ["blank"] * 3 + ["baseline"] * 3
    assert table["mean"].isna().tolist() == [True] * 3 + [False] * 3
    assert (table["n"].tolist(), table["prompts"].tolist()) == ([0] * 3 + [2] * 3,) * 2
    assert table["why"].tolist() == ["2 empty text"] * 3 + [""] * 3
    assert set(table["scorer"]) == {"distinct (words or graphemes)"}


# --- texts


def test_lengths_are_cut_from_one_run():
    from conftest import load, run_of

    from lapa2_interp.methods import load_task
    from lapa2_interp.methods import registry as methods

    def run(length):
        return run_of(
            load("tiny-gpt2"), methods.get("prefix"), load_task("sentiment"), ["positive"], ["The lake", "The sea"],
            length=length, samples=2, seed=4, trace="none",
        )  # fmt: skip

    long, short = run(40), run(20)
    cut = at_lengths(long.texts(), long.manifest(), [20, 40])
    assert cut[cut["length"] == 20]["text"].tolist() == short.texts()["text"].tolist()
    assert cut[cut["length"] == 40]["text"].tolist() == long.texts()["text"].tolist()
    with pytest.raises(ScoringError, match="the run's texts have 40 tokens; 64 is longer"):
        at_lengths(long.texts(), long.manifest(), [64])
    with pytest.raises(ScoringError, match="give a run folder"):
        at_lengths(long.texts(), None, [20])


def test_parts_cover_the_text(gpt2_tokenizer):
    frame = pd.DataFrame({"text": ["one two three four five", "a"]})
    halves = in_parts(frame, 2)
    assert halves["text"].tolist() == ["one two", "", "three four five", "a"]
    by_token = in_parts(frame, 2, gpt2_tokenizer)
    assert [
        a + b for a, b in zip(by_token["text"][:2], by_token["text"][2:], strict=True)
    ] == frame["text"].tolist()


def test_files_give_their_texts(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("continuation,prompt\nhello there,Hi\n,Hi\n")
    ((table, manifest),) = read_texts(file, "continuation")
    assert table[["text", "prompt", "attribute", "arm"]].to_numpy().tolist() == [
        ["hello there", "Hi", "", ""],
        ["", "Hi", "", ""],
    ]
    assert manifest is None


def test_columns_of_any_type_are_read(tmp_path):
    """Prompts that are numbers with gaps, categories, and values that cannot be hashed."""
    table = pd.DataFrame(
        {
            "text": ["a b c d", "e f g h"],
            "prompt": pd.array([1, None], "Int64"),
            "attribute": pd.Categorical(["x", None]),
            "model": [{"name": "a"}, {"name": "b"}],
        }
    )
    table.to_parquet(tmp_path / "a.parquet")
    ((texts, *_),) = read_texts(tmp_path / "a.parquet")
    assert texts[["prompt", "attribute"]].to_numpy().tolist() == [["1", "x"], ["", ""]]
    cells = cell_table(score_table(texts, Lengths()))
    assert set(cells["model"]) == {"{'name': 'a'}", "{'name': 'b'}"}
