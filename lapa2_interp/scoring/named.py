"""Scorers by name, as the command line and methods ask for them: NAME or NAME=MODEL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lapa2_interp.errors import ScoringError, one_of
from lapa2_interp.scoring import NAMES, Scorer
from lapa2_interp.scoring.adapter import AdapterScorer, AdapterToxicity
from lapa2_interp.scoring.echo import Echo, Masked, prefix_words
from lapa2_interp.scoring.embedded import EmbeddedScorer, EmbeddedToxicity
from lapa2_interp.scoring.judge import Judge
from lapa2_interp.scoring.perspective import Perspective
from lapa2_interp.scoring.transformer import Classifier, Perplexity
from lapa2_interp.tasks import Task, read_task


@dataclass(frozen=True)
class Options:
    """What scorers may need besides their name; fields as the options of `score`."""

    task: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    judge_url: str | None = None
    judge_prices: tuple[float | None, float | None] = (None, None)
    dtype: str = "float32"
    device: str | None = None
    generator: str | None = None
    trust_remote_code: bool = False


def make_scorer(name: str, model: str, options: Options) -> Scorer:
    """The scorer of a NAME or NAME=MODEL option."""
    match name, model:
        case "accuracy", "" | "embedded" | "linear" | "adapter":
            if options.task is None:
                raise ScoringError(
                    "the embedded classifiers belong to tasks: give --task sentiment, topic or"
                    " detox"
                )
            if model == "adapter":
                return AdapterScorer(options.task, device=options.device)
            return EmbeddedScorer(options.task)
        case "accuracy", _:
            return Classifier(
                model,
                options.labels,
                device=options.device,
                trust_remote_code=options.trust_remote_code,
            )
        case "echo", "":
            return Echo(prefix_words(_task(options)))
        case "masked", _:
            inner = make_scorer("accuracy", model, options)
            return Masked(inner, prefix_words(_task(options)))
        case "perplexity", _:
            chosen = model or "smollm2-135m"
            return Perplexity(
                chosen,
                options.dtype,
                options.device,
                options.generator,
                trust_remote_code=options.trust_remote_code,
            )
        case "toxicity", "" | "embedded" | "linear":
            return EmbeddedToxicity()
        case "toxicity", "adapter":
            return AdapterToxicity(device=options.device)
        case "toxicity", "perspective":
            return Perspective()
        case "toxicity", _:
            place, _, label = model.rpartition(":")
            if not place:
                raise ScoringError(
                    f"toxicity={model}: name the label of toxic text too, as toxicity=MODEL:LABEL"
                )
            return Classifier(
                place, options.labels, label, "toxicity", options.device, options.trust_remote_code
            )
        case "judge", "":
            raise ScoringError(
                "the judge needs a model: judge=MODEL (and --judge-url for a server that is not"
                " OpenAI's)"
            )
        case "judge", _:
            price_in, price_out = options.judge_prices
            return Judge(model, options.judge_url, input_price=price_in, output_price=price_out)
    if name == "distinct":
        raise ScoringError(
            "distinct-n describes a set of texts and has no number for one; give another scorer"
        )
    raise ScoringError(one_of("scorer", name, NAMES))


def _task(options: Options) -> Task:
    if options.task is None:
        raise ScoringError("the words of prefixes belong to a task: give --task")
    return read_task(options.task)
