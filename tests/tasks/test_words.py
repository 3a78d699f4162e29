"""Word lists: the statistic by hand, the command, and the lists that ship."""

import json
import math

import pytest

from lapa2_interp.cli.app import main
from lapa2_interp.methods import load_task
from lapa2_interp.tasks.word_lists import PRIOR, STOPWORDS, derive_words, read_word_list, z_score

TEXTS = {
    "positive": ["A great film, GREAT fun", "great acting and the fun of it"],
    "negative": ["a dull film", "dull, dull acting of the kind"],
}


def test_the_statistic_by_hand():
    """z of 'great', 3 times in 10 words and 0 times in 8: prior 10,000 * 3/18."""
    a, b = 3 + PRIOR * 3 / 18, PRIOR * 3 / 18
    d = math.log(a / (10 + PRIOR - a)) - math.log(b / (8 + PRIOR - b))
    assert z_score(3, 0, 10, 8, PRIOR * 3 / 18) == pytest.approx(d / math.sqrt(1 / a + 1 / b))
    derived = derive_words(TEXTS, n=5, min_count=1, min_z=0.0)
    assert [word for word, _ in derived["positive"]] == [
        "great",
        "fun",
    ], "function words and those of both sides are out"
    assert [word for word, _ in derived["negative"]] == ["dull", "kind", "acting", "film"]
    # Nine words of three letters and more in the first class's texts, seven in the second's.
    assert derived["positive"][0][1] == pytest.approx(z_score(3, 0, 9, 7, PRIOR * 3 / 16))
    assert derive_words(TEXTS, n=1, min_count=3, min_z=0.0) == {
        "positive": derived["positive"][:1], "negative": [("dull", pytest.approx(derived["negative"][0][1]))],
    }  # fmt: skip


@pytest.mark.parametrize("task", ["sentiment", "topic"])
def test_the_lists_that_ship(task):
    lists = read_word_list("", task)
    assert list(lists) == list(load_task(task).attributes)
    for words in lists.values():
        assert len(words) == len(set(words)) == 400
        assert not set(words) & STOPWORDS
        assert all(word.isalpha() and word == word.lower() for word in words)
    assert "wonderful" in lists.get("positive", ("wonderful",))


def test_the_command_derives_a_list(tmp_path, capsys):
    rows = [{"text": text, "label": label} for label, texts in TEXTS.items() for text in texts]
    data, out = tmp_path / "films.jsonl", tmp_path / "lists" / "words.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    line = [
        "word-lists",
        "--task",
        "sentiment",
        "--data",
        str(data),
        "--out",
        str(out),
        "--min-z",
        "0",
    ]
    assert main([*line, "--min-count", "1"]) == 0
    assert "positive   2 words" in capsys.readouterr().out
    stored = json.loads(out.read_text())
    assert stored["words"]["positive"] == ["great", "fun"]
    assert stored["corpora"] == ["films.jsonl: 2 positive, 2 negative"]
    assert read_word_list(str(out), "anything")["negative"][0] == "dull"
    for more, message in (
        (["--min-count", "1"], "is there already; give another --out, or --force"),
        (
            ["--force", "--min-count", "4"],
            "no word tells 'positive' from the others (z 0 or more, 4 times); give more --data, or",
        ),
        (
            ["--force", "--n-words", "0"],
            "--n-words: input should be greater than or equal to 1, found 0",
        ),
    ):
        assert main(line + more) == 2
        assert message in capsys.readouterr().err
    assert main([*line[:-3], str(tmp_path), "--force"]) == 2
    assert f"{tmp_path} is a folder; give another --out" in capsys.readouterr().err
    assert main([*line[:-3], "/proc/none/words.json", "--min-count", "1", "--min-z", "0"]) == 2
    assert "cannot write /proc/none/words.json" in capsys.readouterr().err
    assert main(["word-lists", "--task", "topic", *line[3:], "--force"]) == 2
    assert (
        "has no text with label 'world' (blank ones and repetitions left out); its labels are"
        " 'positive', 'negative'" in capsys.readouterr().err
    )
    assert json.loads(out.read_text()) == stored, "a refusal changes nothing"
    assert main([*line, "--force", "--min-count", "1", "--n-words", "1"]) == 0
    assert json.loads(out.read_text())["words"]["positive"] == ["great"]
