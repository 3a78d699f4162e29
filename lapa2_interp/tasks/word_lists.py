"""Word lists: the words that distinguish the attributes of labelled corpora.

Here is also the statistic that chooses them.

For every word and class, z is the log-odds of the word in the class's texts minus those in the
other classes' texts, divided by its standard error. Both log-odds are smoothed by the counts of all
texts together (a Dirichlet prior of `PRIOR` words in all):

    d(w) = log (y + a) / (n + A - y - a) - log (y' + a) / (n' + A - y' - a)       z(w) = d / sqrt(1 / (y + a) + 1 / (y' + a))

with y, y' the word's counts, n, n' all words, a its prior count and A their sum (Monroe, Colaresi
and Quinn 2008). The words of largest z, function words left out, are the class's list.
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from math import log, sqrt
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from lapa2_interp._util.parsing import parse_json, read_text
from lapa2_interp._util.settings import takes
from lapa2_interp.commands import command
from lapa2_interp.errors import DataError, parameter, validation_message
from lapa2_interp.files import write_text
from lapa2_interp.tasks.corpora import read_corpus
from lapa2_interp.tasks.segmentation import letter_runs
from lapa2_interp.tasks.settings import LEAST_Z, WordListSettings
from lapa2_interp.tasks.task import Task, read_task

PRIOR = 10_000.0
STATISTIC = (
    "z of the log-odds ratio with an informative Dirichlet prior of 10,000 words; function words"
    " left out"
)
STOPWORDS = frozenset(
    """
    a an the this that these those i me my myself we us our ours ourselves you your yours
    yourself yourselves he him his himself she her hers herself it its itself they them
    their theirs themselves one ones who whom whose which what where when why how whether am
    is are was were be been being have has had having do does did doing done can could may
    might must shall should will would ought cannot aren couldn didn doesn don hadn hasn
    haven isn mightn mustn needn shan shouldn wasn weren won wouldn ain d ll m o re s t ve y
    and or but nor so yet if because as until while though although unless since than of at
    by for with about against between among into onto through during before after above
    below to toward towards from up upon down in out on off over under within without via
    per again further then once here there now just only very too also not no yes any all
    both each every few more most many much other others another some such same own even
    still ever never always
    """.split()  # noqa: SIM905 - a word a string would be unreadable
)
"""Function words of English, lower case."""


class WordList(BaseModel):
    """A task's words by attribute, best first, and their source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpora: tuple[str, ...] = ()
    """Names of the corpora, with their texts per attribute."""
    statistic: str = ""
    smallest_z: Annotated[dict[str, float], Field(default_factory=dict)]
    """The smallest z among the words kept, by attribute."""
    words: Annotated[dict[str, tuple[str, ...]], Field(min_length=1)]


def derive_words(
    texts: Mapping[str, Sequence[str]], n: int, min_count: int = 20, min_z: float = LEAST_Z
) -> dict[str, list[tuple[str, float]]]:
    """The n words of largest z of every class, with their z, best first.

    Args:
        texts: Texts by class.
        min_count: Smallest number of occurrences of a word in all texts.
        min_z: The smallest z of a word that is kept.

    Raises:
        DataError: Fewer than two classes, or one without words.
    """
    counts = {
        c: Counter(word for text in own for word in letter_runs(text)) for c, own in texts.items()
    }
    empty = [c for c, own in counts.items() if not own]
    if len(counts) < 2 or empty:
        raise DataError(f"words tell classes apart: give texts of two at least; found {', '.join(counts) or 'none'}"  # noqa: E501
                        + (f", no words for {', '.join(empty)}" if empty else ""))  # fmt: skip
    everything = sum(counts.values(), Counter())
    total = sum(everything.values())
    words_of = {}
    for c, own in counts.items():
        n_own = sum(own.values())
        z = {
            word: z_score(
                own[word], everything[word] - own[word], n_own, total - n_own, PRIOR * count / total
            )
            for word, count in everything.items()
            if count >= min_count and word not in STOPWORDS
        }
        best = sorted(z, key=lambda word: (-z[word], word))[:n]
        words_of[c] = [(word, z[word]) for word in best if z[word] >= min_z]
    return words_of


def z_score(own: int, rest: int, n_own: int, n_rest: int, prior: float) -> float:
    """z of a word, from its counts in both classes, their numbers of words, and its prior count out
    of `PRIOR`."""
    a, b = own + prior, rest + prior
    difference = log(a / (n_own + PRIOR - a)) - log(b / (n_rest + PRIOR - b))
    return difference / sqrt(1 / a + 1 / b)


def read_word_list(file: str, task: str) -> dict[str, tuple[str, ...]]:
    """The words of a file, or the package's words for a task if `file` is "".

    Raises:
        DataError: There is no such list, or the file is malformed.
    """
    source = Path(file or str(resources.files(__package__) / "words" / f"{task}.json"))
    try:
        return WordList.model_validate(parse_json(read_text(source))).words
    except OSError:
        where = f"cannot read {file}" if file else f"the package has no words for task {task!r}"
        raise DataError(
            f"{where}; `{command('word-lists', task=task, data='CORPUS', out='FILE')}` makes a list"
        ) from None
    except ValueError as error:
        raise DataError(f"{source} is not a word list: {validation_message(error)}") from None


@takes(WordListSettings)
def make_word_list(settings: WordListSettings) -> dict[str, list[tuple[str, float]]]:
    """`lapa2 word-lists` in Python; `WordListSettings` says what it does and takes.

    Returns:
        Words with their z, by label.

    Raises:
        TaskError: The task cannot be read.
        DataError: A corpus cannot be read, an attribute gets no word, or the file exists or cannot
            be written.
    """
    task = settings.task if isinstance(settings.task, Task) else read_task(settings.task)
    labels = tuple(task.attributes)
    out = Path(settings.out)
    if out.is_dir() or (out.exists() and not settings.force):
        kind = "a folder" if out.is_dir() else "there already"
        raise DataError(
            f"{out} is {kind}; give another {parameter('out')}"
            + ("" if out.is_dir() else f", or {parameter('force', True)} to replace it")
        )
    corpora = [read_corpus(source, labels) for source in settings.data]
    texts = {
        label: [text for corpus in corpora for text in corpus.texts[label]] for label in labels
    }
    derived = derive_words(texts, settings.n_words, settings.min_count, settings.min_z)
    empty = [label for label, best in derived.items() if not best]
    if empty:
        raise DataError(
            f"no word tells {empty[0]!r} from the others (z {settings.min_z:g} or more,"
            f" {settings.min_count} times); give more {parameter('data')}, or a lower"
            f" {parameter('min_count')} or {parameter('min_z')}"
        )
    word_list = WordList(
        corpora=tuple(corpus.summary for corpus in corpora),
        statistic=STATISTIC,
        smallest_z={label: round(best[-1][1], 3) for label, best in derived.items()},
        words={label: tuple(word for word, _ in best) for label, best in derived.items()},
    )
    try:
        write_text(out, word_list.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise DataError(
            f"cannot write {out}: {error.strerror}; give another {parameter('out')}"
        ) from None
    return derived
