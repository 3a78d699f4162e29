"""FreeCtrl: MLP neurons that promote an attribute's keywords are held (baseline).

The value of such a neuron depends on the text so far.

Once per model and word list:

1. keywords: from each class's list the words that are one token with a space before it and whose
   embedding is nearer to the word of their class than to those of the others: noise ratio
   cos(e_y, e_w) 3 / sum_{c != y} cos(e_c, e_w) > `noise`;
2. control table: the probability of each keyword after " " with neuron v held at 50;
3. control centre of the attribute: the union over its keywords of the `neurons` that promote them
   most.

At every token, E being the embeddings of the text's tokens and L their number:

    sim_c(E) = mean over the keywords of c of the largest cos to a token of E
    score(E) = sim_y (C - 1) / sum_{c != y} sim_c
    s        = max(score(E), score(last token))
    w        = lam / (1 + exp(-(u - s) L)) if u > s, else 1e-20

4. the whole text is read again with every neuron of the centre set to w at all positions: before
   the activation function in GPT-2's kind of MLP, so that its output is gelu(w) (`at="pre"`, the
   released code), or after it (`at="post"`, the paper's coefficient).
5. the next token, end tokens excluded: of the 25 likeliest, with five copies of each (one per
   beam), ten are drawn and the likeliest of them is taken. The two steps are one draw, whose rank
   probabilities have a closed form (`RANK_PROBABILITIES`).

Gated MLPs are not in the original; the method for them is ours. The input of the down-projection is
set. In lower layers a value of 50 there does not promote a word, but destroys the computation of
the upper layers. Therefore only the upper half of the layers is searched, with fewer neurons per
keyword (`gated_neurons`) at a larger value (`gated_lam`).

6. with `accept`, a finished text is drawn again until score(E) > u ("score"), and for "released"
   until also no word occurs in it 7 times and it has at most one line break; at most `trials`
   times, and the last text stays. Long texts hardly ever pass the test of words.

A value of 1e-20 turns the centre off; the neurons do not keep their own values. The released script
re-encodes the text at every step, and makes 5 texts of a prompt in at most 51 trials; here tokens
are not encoded again, and every sample gets a text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.errors import MethodError, parameter
from lapa2_interp.methods.base import (
    BatchStart,
    Branch,
    LogProbs,
    Method,
    MethodContext,
    Prepared,
    check_branches,
)
from lapa2_interp.tasks.task import Task
from lapa2_interp.tasks.word_lists import read_word_list

OFF_VALUE = 1e-20
NOISE_CLASSES = 4
"""Number of classes in the factor of the noise ratio, also where there are two."""
MOST_NEURONS = 100
MOST_REPEATED, MOST_LINES = 7, 2
"""A text that passes the released test has each word less often, and fewer line breaks."""
RANK_PROBABILITIES = [
    (math.comb(125 - 5 * (r - 1), 10) - math.comb(125 - 5 * r, 10)) / math.comb(125, 10)
    for r in range(1, 26)
]
"""P(the token of rank r is taken), r = 1..25.

Of 5 copies of the 25 likeliest tokens, 10 are drawn without replacement, all equally likely (by
temperature 100), and the likeliest of these is taken:
[C(125 - 5 (r - 1), 10) - C(125 - 5 r, 10)] / C(125, 10).
"""


@plain_dataclass(frozen=True)
class ControlCentre:
    """The values that are known before the first token.

    Attributes:
        target: The target class.
        keywords: Unit embeddings of each class's keywords.
        embedding: Unit embeddings of all tokens.
        centre: The attribute's neurons, by layer.
        lam: Largest value of these neurons.
        ends: Tokens that are never drawn.
        prompt: The prompt's tokens.
    """

    target: str
    keywords: Mapping[str, Float[Tensor, "keyword d_model"]]
    embedding: Float[Tensor, "vocab d_model"]
    centre: Mapping[int, Int[Tensor, " neuron"]]
    lam: float
    ends: tuple[int, ...]
    prompt: tuple[int, ...]


@plain_dataclass(frozen=True)
class TextMonitor:
    """The likeness of the texts so far to the keywords.

    Attributes:
        control: The control centre of the first text; texts differ only in the prompt.
        nearest: By class and keyword, the largest cos to a token so far.
        latest: By class and keyword, the cos to the last token.
        length: Number of tokens so far.
    """

    control: ControlCentre
    nearest: Mapping[str, Float[Tensor, "row keyword"]]
    latest: Mapping[str, Float[Tensor, "row keyword"]]
    length: Int[Tensor, " row"]

    @classmethod
    def of(cls, controls: Sequence[ControlCentre]) -> TextMonitor:
        """The monitor of the prompts alone, one text per control centre."""
        first = controls[0]
        tokens = [first.embedding[list(control.prompt)] for control in controls]
        nearest = {
            c: torch.stack([(t @ k.T).max(dim=0).values for t in tokens])
            for c, k in first.keywords.items()
        }
        latest = {c: torch.stack([t[-1] @ k.T for t in tokens]) for c, k in first.keywords.items()}
        lengths = torch.tensor([len(control.prompt) for control in controls])
        return cls(first, nearest, latest, lengths.to(tokens[0].device))

    def expanded(self, index: Int[Tensor, " expanded"]) -> TextMonitor:
        """Text i becomes a copy of the old text index[i]."""
        index = index.to(self.length.device)
        nearest, latest = (
            {c: cos[index] for c, cos in by_class.items()}
            for by_class in (self.nearest, self.latest)
        )
        return replace(self, nearest=nearest, latest=latest, length=self.length[index])

    def read(self, tokens: Int[Tensor, " row"]) -> TextMonitor:
        """The monitor once each text has one more token."""
        embedded = self.control.embedding[tokens]
        latest = {c: embedded @ keywords.T for c, keywords in self.control.keywords.items()}
        nearest = {c: torch.maximum(self.nearest[c], cos) for c, cos in latest.items()}
        return replace(self, nearest=nearest, latest=latest, length=self.length + 1)

    def value(self, u: float) -> Float[Tensor, " row"]:
        """The value w at which the neurons of the centre are held in the next pass."""
        target = self.control.target
        s = torch.maximum(text_score(self.nearest, target), text_score(self.latest, target))
        return neuron_value(s, u, self.control.lam, self.length)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FreeCtrl(Method):
    """FreeCtrl, a method without a prefix, so that LaPA2 has nothing to act on.

    u, lam and neurons are its authors' values for GPT-2 medium.

    Args:
        u: Threshold of a text's score (the ratio of its similarity to the target's keywords and to
            the other classes'; 1 is neutral), above which control is off; in the task files the
            original's 1.15 for sentiment and 1.07 for topic.
        lam: Largest value of a neuron; in the task files .2 for sentiment and .3 for topic.
        neurons: Neurons per keyword, up to 100; 0 is the raw model under the sampler.
        gated_lam: Largest value of a neuron in gated MLPs (Llama's kind, SmolLM2), instead of lam;
            4 in the topic task.
        gated_neurons: Neurons per keyword in gated MLPs, instead of neurons.
        noise: Smallest noise ratio of a keyword (its nearness to the word of its class, relative to
            those of the others).
        words: A custom word list (JSON) of `lapa2 word-lists`; by default the package's for the
            task.
        at: Set a neuron's value before its activation function ("pre") or after it ("post"); in
            gated MLPs always after.
        sampler: "official" (one of the 25 likeliest tokens, by its rank; no end token), or
            "uniform" (as in every method here: temperature 1, top-k of the command line).
        accept: Finished texts that are accepted, while others are drawn again: "all", "score"
            (those with a score above u), or "released" (of these, those in which no word occurs 7
            times and which have at most one line break).
        trials: Largest number of times a text is drawn, unless all are accepted.
    """

    name: ClassVar[str] = "freectrl"
    paper_name: ClassVar[str] = "FreeCtrl"
    equation: ClassVar[str] = (
        "neurons of the control centre := lam / (1 + exp(-(u - score) L)); log w = log P(rank)"
    )
    alpha: ClassVar[float] = 0.0
    text_names: ClassVar[tuple[str, ...] | None] = ("class",)
    files: ClassVar[tuple[str, ...]] = ("words",)
    changes_network: ClassVar[bool] = True
    when_empty: ClassVar[str] = (
        "lam, or gated_lam, is so large that the model's numbers overflow; choose one nearer to 0"
    )
    u: Annotated[float, Field(allow_inf_nan=False)] = 1.15
    lam: Annotated[float, Field(allow_inf_nan=False)] = 0.2
    neurons: Annotated[int, Field(ge=0, le=MOST_NEURONS)] = 30
    gated_lam: Annotated[float, Field(allow_inf_nan=False)] = 1.5
    gated_neurons: Annotated[int, Field(ge=0, le=MOST_NEURONS)] = 3
    noise: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    words: str = ""
    at: Literal["pre", "post"] = "pre"
    sampler: Literal["official", "uniform"] = "official"
    accept: Literal["all", "score", "released"] = "all"
    trials: Annotated[int, Field(ge=1, le=1000)] = 10

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        task.prefix(attribute)
        task.others(attribute)
        self._lists(task)
        return (Branch("base"),)

    def prepare(self, context: MethodContext, task: Task, attribute: str, prompt: str) -> Prepared:
        key = (self, task.model_dump_json(), attribute)
        embedding, keywords, centre = context.cached(
            key, lambda: self._prepare_attribute(context, task, attribute)
        )
        control = ControlCentre(
            target=attribute,
            keywords={c: embedding[list(ids.values())] for c, ids in keywords.items()},
            embedding=embedding,
            centre=centre,
            lam=self.gated_lam if context.gated else self.lam,
            ends=context.end_ids,
            prompt=tuple(context.ids(prompt)),
        )
        summary = {
            "keywords": {c: list(ids) for c, ids in keywords.items()},
            "neurons": {str(layer): ids.tolist() for layer, ids in centre.items()},
        }
        return Prepared(control, summary=summary)

    def _prepare_attribute(
        self, context: MethodContext, task: Task, attribute: str
    ) -> tuple[Tensor, dict, dict]:
        """Unit embeddings, keywords, and the attribute's control centre."""
        embedding = context.cached(
            "unit embedding", lambda: torch.nn.functional.normalize(context.embedding(), dim=1)
        )
        keywords = self.keywords(context, task, embedding)
        centre: dict[int, Int[Tensor, " neuron"]] = {}
        per_keyword = self.gated_neurons if context.gated else self.neurons
        if per_keyword:
            # One table serves all attributes of the task.
            tokens = sorted({i for ids in keywords.values() for i in ids.values()})
            rows = [tokens.index(i) for i in keywords[attribute].values()]
            promoting = context.promoting_neurons(tokens, MOST_NEURONS, upper=context.gated)[
                rows, :per_keyword
            ].reshape(-1, 2)
            centre = {
                layer: promoting[promoting[:, 0] == layer, 1].unique()
                for layer in promoting[:, 0].unique().tolist()
            }
        return embedding, keywords, centre

    def keywords(
        self, context: MethodContext, task: Task, embedding: Float[Tensor, "vocab d_model"]
    ) -> dict[str, dict[str, int]]:
        """Every attribute's keywords with their tokens.

        Raises:
            MethodError: There is no word list, or no keyword of an attribute is left.
        """
        lists = self._lists(task)
        names = {c: task.texts(self.name, c).get("class", c) for c in task.attributes}
        classes = {c: embedding[context.ids(name)].mean(dim=0) for c, name in names.items()}
        ids_of: dict[str, dict[str, int]] = {}
        for c in task.attributes:
            ids_of[c] = {}
            for word in lists[c]:
                ids = tokens_in_text(context, word)
                if len(ids) == 1 and noise_ratio(classes, embedding[ids[0]], c) > self.noise:
                    ids_of[c][word] = ids[0]
            if not ids_of[c]:
                raise MethodError(
                    f"freectrl: none of {len(lists[c])} words for {c!r} is one token and nearer to"
                    f" its class than noise={self.noise:g}; give another list"
                    f" ({parameter('words', 'FILE', 'set')}) or"
                    f" lower {parameter('noise', '...', 'set')}"
                )
        return ids_of

    def _lists(self, task: Task) -> Mapping[str, Sequence[str]]:
        """The word lists, one per attribute of the task."""
        lists = read_word_list(self.words, task.name)
        empty = [c for c in task.attributes if not lists.get(c)]
        if empty:
            raise MethodError(
                f"freectrl: the word list has no words for {empty[0]!r}; it has"
                f" {', '.join(lists) or 'none'}; make one with `lapa2 word-lists` and give"
                f" {parameter('words', 'FILE', 'set')}"
            )
        return lists

    def begin(self, start: BatchStart) -> tuple[int, ...]:
        """The tokens that are never drawn."""
        control: ControlCentre = start.prepared[0].known
        return control.ends

    def combine(
        self, log_probs: LogProbs, state: tuple[int, ...] | None
    ) -> Float[Tensor, "sample vocab"]:
        log_weights = check_branches(log_probs, "base")["base"]
        ends = torch.tensor(state or (), dtype=torch.long, device=log_weights.device)
        log_weights = log_weights.index_fill(1, ends, -torch.inf)
        if self.sampler == "uniform":
            return log_weights
        ids = log_weights.sort(dim=1, descending=True, stable=True).indices
        p = torch.tensor(RANK_PROBABILITIES, dtype=log_weights.dtype, device=log_weights.device)[
            : ids.shape[1]
        ]
        log_p = p.log().expand(len(ids), -1)
        return torch.full_like(log_weights, -torch.inf).scatter(1, ids[:, : len(p)], log_p)

    def accepts(self, known: ControlCentre, text: str, tokens: Sequence[int]) -> bool:
        """True if a finished text is accepted; other texts are drawn again while trials are left.

        Args:
            text: Prompt and continuation.
            tokens: Tokens of the continuation.
        """
        if self.accept == "all":
            return True
        embedded = known.embedding[[*known.prompt, *tokens]]
        nearest = {c: (embedded @ k.T).max(dim=0).values[None] for c, k in known.keywords.items()}
        if not float(text_score(nearest, known.target)) > self.u:
            return False
        if self.accept == "score":
            return True
        words = Counter(text.split())
        return max(words.values(), default=0) < MOST_REPEATED and text.count("\n") < MOST_LINES

    def advance(
        self, state: tuple[int, ...] | None, log_probs: LogProbs, tokens: Int[Tensor, " sample"]
    ) -> tuple[int, ...] | None:
        return state


def tokens_in_text(context: MethodContext, word: str) -> list[int]:
    """A word's tokens inside a text, with the space before it."""
    spaced, alone = context.ids(" " + word), context.ids(word)
    # SentencePiece adds a space before a text, and encodes one more space as a token.
    return alone if spaced == context.ids(" ")[:1] + alone else spaced


def noise_ratio(
    classes: Mapping[str, Float[Tensor, " d_model"]], word: Float[Tensor, " d_model"], c: str
) -> float:
    """cos(e_c, e_w) 3 / sum over the other classes of cos(e, e_w).

    With four classes it is above 1 where the word is nearer to its class than to the mean of the
    others; with two, where its cos is above a third of the other's.
    """
    cos = {
        name: float(torch.nn.functional.cosine_similarity(embedding, word, dim=0))
        for name, embedding in classes.items()
    }
    cos_of_class = cos.pop(c)
    return cos_of_class * (NOISE_CLASSES - 1) / sum(cos.values())


def text_score(
    nearest: Mapping[str, Float[Tensor, "sample keyword"]], target: str
) -> Float[Tensor, " sample"]:
    """The ratio of a text's similarity to the target's keywords and to the mean other class's; 1 is
    neutral.

    Args:
        nearest: By class and keyword, the largest cos to a token of the text.
    """
    sim = {c: cos.mean(dim=1) for c, cos in nearest.items()}
    sim_of_target = sim.pop(target)
    return sim_of_target * len(sim) / torch.stack(list(sim.values())).sum(dim=0)


def neuron_value(
    s: Float[Tensor, " sample"], u: float, lam: float, length: Int[Tensor, " sample"]
) -> Float[Tensor, " sample"]:
    """lam / (1 + exp(-(u - s) L)) below the threshold, 1e-20 from it on."""
    return torch.where(u > s, lam * torch.sigmoid((u - s) * length), OFF_VALUE)
