"""Scorers by name, as the command line and methods ask for them: NAME or NAME=MODEL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lapa2_interp.errors import ScoringError, parameter, unknown_choice
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.scoring.adapter import ADAPTER_ENDING, AdapterScorer
from lapa2_interp.scoring.distinct import Repetition
from lapa2_interp.scoring.echo import Echo, Masked, prefix_words
from lapa2_interp.scoring.judge import Judge
from lapa2_interp.scoring.linear import LINEAR_ENDING, LinearScorer
from lapa2_interp.scoring.scorer import SCORERS, ScoreCache, Scorer
from lapa2_interp.scoring.tables import score_table
from lapa2_interp.scoring.task_scorer import ToxicityScorer
from lapa2_interp.scoring.transformer import Classifier, ConditionalPerplexity, Perplexity
from lapa2_interp.scoring.vader import VaderScorer
from lapa2_interp.tasks.task import Task, read_task

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ScorerOptions:
    """Settings of scorers; the fields are the options of the command `score`."""

    task: Task | str | None = None
    """A built-in task by name, or a task itself."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Names for the labels of a classifier of one's own."""
    judge_url: str | None = None
    judge_prices: tuple[float, float] | None = None
    judge_temperature: float | None = 0.0
    max_cost: float | None = None
    dtype: str = "float32"
    device: str | None = None
    generator: str | None = None
    """The weights that wrote the texts, by which a perplexity says that it is the writer's own."""
    trust_remote_code: bool = False


TRAINED = (LINEAR_ENDING, ADAPTER_ENDING)
"""Endings of the files of trained scorers."""


def trained_ending(model: str) -> str:
    """The ending by which a model is the file of a trained scorer, however it is written; "" of
    another model."""
    return next((ending for ending in TRAINED if model.lower().endswith(ending)), "")


def _trained_scorer(model: str, ending: str, device: str | None) -> Scorer:
    """The scorer in a file of `lapa2 scorers train`.

    Raises:
        ScoringError: There is no such file, its ending is not in small letters, or it is damaged.
    """
    file = Path(model)
    if not file.is_file():
        raise ScoringError(
            f"accuracy={model}: there is no such file; `lapa2 scorers train` makes one, or give a"
            " classifier's hub id or folder"
        )
    task = file.name.removesuffix(ending)
    if task == file.name:
        raise ScoringError(
            f"accuracy={model}: the name of a trained scorer ends in {ending}, in small letters,"
            " and that of the card beside it in .json; rename both"
        )
    if ending == LINEAR_ENDING:
        return LinearScorer(task, file.parent)
    return AdapterScorer(task, file.parent, device)


def make_scorer(name: str, model: str, options: ScorerOptions) -> Scorer:
    """The scorer of a NAME or NAME=MODEL option.

    A plain accuracy, masked or toxicity uses the linear classifier, which is fast enough for
    methods that score their drafts."""
    if model and name in ("echo", "repetition"):
        raise ScoringError(f"{name} takes no model, found {name}={model}; ask for {name}")
    match name, model:
        case "accuracy", "" | "linear" | "adapter":
            if options.task is None:
                raise ScoringError(
                    f"the classifiers that ship with the package belong to tasks: give"
                    f" {parameter('task')} sentiment, topic or detox, or a custom classifier,"
                    " as accuracy=MODEL"
                )
            task = options.task if isinstance(options.task, str) else options.task.name
            if model == "adapter":
                return AdapterScorer(task, device=options.device)
            return LinearScorer(task)
        case "accuracy", "vader":
            return VaderScorer()
        case "accuracy", _ if ending := trained_ending(model):
            return _trained_scorer(model, ending, options.device)
        case "accuracy", _:
            files = [file for end in TRAINED for file in sorted(Path(model).glob(f"*{end}"))]
            if files and not (Path(model) / "config.json").is_file():
                raise ScoringError(
                    f"the folder {model} has scorers of `lapa2 scorers train`; give the file of"
                    f" one: {', '.join(map(str, files))}"
                )
            return Classifier(
                model,
                options.labels,
                device=options.device,
                trust_remote_code=options.trust_remote_code,
            )
        case "echo", "":
            return Echo(prefix_words(_task_of(options)))
        case "repetition", "":
            return Repetition()
        case "masked", _:
            inner = make_scorer("accuracy", model, options)
            return Masked(inner, prefix_words(_task_of(options)))
        case "perplexity" | "conditional-perplexity", _:
            scorer_class = Perplexity if name == "perplexity" else ConditionalPerplexity
            return scorer_class(
                model or "smollm2-135m",
                options.dtype,
                options.device,
                options.generator,
                trust_remote_code=options.trust_remote_code,
            )
        case "toxicity", "" | "linear":
            return ToxicityScorer(LinearScorer("detox"))
        case "toxicity", "adapter":
            return ToxicityScorer(AdapterScorer("detox", device=options.device))
        case "toxicity", _:
            classifier, _, label = model.rpartition(":")
            if not classifier:
                raise ScoringError(
                    f"toxicity={model}: name the label of toxic text too, as toxicity=MODEL:LABEL"
                )
            return Classifier(
                classifier,
                options.labels,
                label,
                "toxicity",
                options.device,
                options.trust_remote_code,
            )
        case "judge", "":
            raise ScoringError(
                f"the judge needs a model: judge=MODEL (and {parameter('judge_url')} for a"
                " server that is not"
                " OpenAI's)"
            )
        case "judge", _:
            return Judge(
                model,
                options.judge_url,
                prices=options.judge_prices,
                temperature=options.judge_temperature,
                max_cost=options.max_cost,
            )
    if name == "distinct":
        raise ScoringError(
            "distinct-n describes a set of texts and has no number for one; give another scorer"
        )
    raise ScoringError(unknown_choice("scorer", name, SCORERS))


def check_scorers(asked: Iterable[tuple[str, str, ScorerOptions]]) -> None:
    """Make each scorer but the first once and let it go, so that one that cannot be made is said
    before others have scored for minutes. The first is made at once by whoever scores.

    Args:
        asked: Arguments of `make_scorer`.

    Raises:
        ScoringError, ModelError: As `make_scorer`.
    """
    by_name = {(name, model): options for name, model, options in reversed(list(asked))}
    for name, model in list(reversed(by_name))[1:]:
        if name == "distinct":
            if model:
                shared_tokenizer(model)
            continue
        with closing(make_scorer(name, model, by_name[name, model])):
            pass


def score_texts(
    texts: pd.DataFrame,
    asked: Sequence[str],
    options: ScorerOptions,
    cache: ScoreCache | None = None,
) -> pd.DataFrame:
    """Score texts with a list of scorers: a `tables.score_table` of each, one below the other.

    The second and later scorers of a metric stand in parentheses: "accuracy (linear)".

    Args:
        asked: NAME or NAME=MODEL, as from `expand_scorers`.
    """
    import pandas as pd

    frames: list[pd.DataFrame] = []
    seen: set[str] = set()
    for request in asked:
        name, _, model = request.partition("=")
        with closing(make_scorer(name, model, options)) as scorer:
            scores = score_table(texts, scorer, cache)
        if name in seen:
            scores["metric"] += f" ({model or name})"
        seen.add(name)
        frames.append(scores)
    return pd.concat(frames, ignore_index=True)


def _task_of(options: ScorerOptions) -> Task:
    if options.task is None:
        raise ScoringError(f"the words of prefixes belong to a task: give {parameter('task')}")
    return read_task(options.task) if isinstance(options.task, str) else options.task
