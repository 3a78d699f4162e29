"""FreeCtrl: MLP neurons that promote an attribute's keywords, held at a value that follows what the
    text still lacks (baseline).

Once per model and word list:

1. keywords: from each class's list the words that are one token with a space in front and whose
   embedding is nearer to the word of their class than to those of the others:
   noise ratio
   cos(e_y, e_w) 3 / sum_{c != y} cos(e_c, e_w) > `noise`;
2. control table: with neuron v at 50 while the model reads " ", how likely is each keyword next;
3. control centre of the attribute: the union over its keywords of the `neurons` that promote them
   most.

At every token, E being the embeddings of the text's tokens and L their number:

    sim_c(E) = mean over the keywords of c of the largest cos to a token of E
    score(E) = sim_y (C - 1) / sum_{c != y} sim_c
    s        = max(score(E), score(last token))
    w        = lam / (1 + exp(-(u - s) L)) if u > s, else 1e-20

4. the whole text is read again with every neuron of the centre set to w at all positions: before
   the activation function in GPT-2's kind of MLP, so that gelu(w) goes on (`at="pre"`, the released
   code), or after it (`at="post"`, the paper's coefficient).
5. the next token, end tokens excluded: of the 25 likeliest, five beams' copies of each, ten are
   drawn and the likeliest of them is taken, which is one draw with rank probabilities of closed
   form (`rank_probabilities`).

Gated MLPs are not in the original; what is done for them is ours. The input of the down-projection
is set. In lower layers a value of 50 there does not promote a word, but breaks what the upper
layers compute. Therefore only the upper half of the layers is searched, with fewer neurons per
keyword (`gated_neurons`) at a larger value (`gated_lam`).

6. with `accept`, a finished text is drawn again until score(E) > u ("score"), and also no word
   stands in it 7 times and it has at most one line break ("released"); at most `trials` times, and
   the last text stays. Long texts hardly ever pass the test of words.

A value of 1e-20 turns the centre off; it does not leave the neurons as they were. The released
script re-encodes the text at every step, and makes 5 texts of a prompt in at most 51 trials; here
tokens stay as they were drawn, and every sample gets a text.
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

from lapa2_interp._util.errors import MethodError
from lapa2_interp.methods.base import (
    Branch,
    Intervention,
    LogProbs,
    Method,
    MethodContext,
    Prepared,
    Start,
    State,
    checked,
)
from lapa2_interp.tasks.task import Task
from lapa2_interp.tasks.word_lists import read_word_list

OFF = 1e-20
NOISE_CLASSES = 4
"""The factor of the noise ratio counts four classes even where there are two."""
MOST_NEURONS = 100
MOST_REPEATED, MOST_LINES = 7, 2
"""A text of the released test has each word less often, and fewer line breaks."""


@plain_dataclass(frozen=True)
class Control:
    """What is known before the first token.

    Attributes:
        target: The class steered towards.
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
class Monitor:
    """The text so far, as the monitor sees it.

    Attributes:
        control: That of the first sample; all samples differ only in its prompt.
        nearest: Per class and keyword the largest cos to a token so far.
        latest: The same for the last token alone.
        length: Tokens so far.
    """

    control: Control
    nearest: Mapping[str, Float[Tensor, "sample keyword"]]
    latest: Mapping[str, Float[Tensor, "sample keyword"]]
    length: Int[Tensor, " sample"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FreeCtrl(Method):
    """FreeCtrl. It has no prefix, so LaPA2 has nothing to act on.

    u, lam and neurons are its authors' values for GPT-2 medium.

    Args:
        u: Threshold of a text's score (how much more its tokens are like the target's keywords than
            like the other classes'; 1 is neutral), above which control is off; in the task files
            the original's 1.15 for sentiment and 1.07 for topic.
        lam: Largest value of a neuron; in the task files .2 for sentiment and .3 for topic.
        neurons: Neurons per keyword, up to 100; 0 is the raw model under the sampler.
        gated_lam: Largest value of a neuron in gated MLPs (Llama's kind, SmolLM2), instead of lam;
            4 in the topic task.
        gated_neurons: Neurons per keyword in gated MLPs, instead of neurons.
        noise: Smallest noise ratio of a keyword (how much nearer to the word of its class than to
            those of the others it is).
        words: A word list (JSON) of your own from `lapa2 word-lists`; by default the package's for
            the task.
        at: Where a neuron's value is set: "pre", before its activation function, or "post", after
            it; in gated MLPs always after.
        sampler: "official" (one of the 25 likeliest tokens, by its rank; no end token), or
            "uniform" (as every method here: temperature 1, top-k of the command line).
        accept: Which finished texts are kept, while others are drawn again: "all", "score" (those
            with a score above u), or "released" (those in which also no word stands 7 times, with
            at most one line break).
        trials: How often a text is drawn at most, unless all are accepted.
    """

    name: ClassVar[str] = "freectrl"
    paper_name: ClassVar[str] = "FreeCtrl"
    equation: ClassVar[str] = (
        "neurons of the control centre := lam / (1 + exp(-(u - score) L)); log w = log P(rank)"
    )
    alpha: ClassVar[float] = 0.0
    text_names: ClassVar[tuple[str, ...] | None] = ("class",)
    recomputes: ClassVar[bool] = True
    files: ClassVar[tuple[str, ...]] = ("words",)
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

    def prepare(self, kit: MethodContext, task: Task, attribute: str, prompt: str) -> Prepared:
        key = (self, task.model_dump_json(), attribute)
        embedding, keywords, centre = kit.once(
            key, lambda: self._of_attribute(kit, task, attribute)
        )
        known = Control(
            target=attribute,
            keywords={c: embedding[list(ids.values())] for c, ids in keywords.items()},
            embedding=embedding,
            centre=centre,
            lam=self.gated_lam if kit.gated else self.lam,
            ends=kit.end_ids,
            prompt=tuple(kit.ids(prompt)),
        )
        summary = {
            "keywords": {c: list(ids) for c, ids in keywords.items()},
            "neurons": {str(layer): ids.tolist() for layer, ids in centre.items()},
        }
        return Prepared(known, summary=summary)

    def _of_attribute(
        self, kit: MethodContext, task: Task, attribute: str
    ) -> tuple[Tensor, dict, dict]:
        """Unit embeddings, keywords, and the attribute's control centre."""
        embedding = kit.once(
            "unit embedding", lambda: torch.nn.functional.normalize(kit.embedding(), dim=1)
        )
        keywords = self.keywords(kit, task, embedding)
        centre: dict[int, Int[Tensor, " neuron"]] = {}
        per_keyword = self.gated_neurons if kit.gated else self.neurons
        if per_keyword:
            # One table serves all attributes of the task.
            tokens = sorted({i for ids in keywords.values() for i in ids.values()})
            rows = [tokens.index(i) for i in keywords[attribute].values()]
            own = kit.promoters(tokens, MOST_NEURONS, upper=kit.gated)[rows, :per_keyword].reshape(
                -1, 2
            )
            centre = {
                layer: own[own[:, 0] == layer, 1].unique() for layer in own[:, 0].unique().tolist()
            }
        return embedding, keywords, centre

    def keywords(
        self, kit: MethodContext, task: Task, embedding: Float[Tensor, "vocab d_model"]
    ) -> dict[str, dict[str, int]]:
        """Every attribute's keywords with their tokens.

        Raises:
            MethodError: There is no word list, or nothing of an attribute's is left.
        """
        lists = self._lists(task)
        names = {c: task.texts(self.name, c).get("class", c) for c in task.attributes}
        classes = {c: embedding[kit.ids(name)].mean(dim=0) for c, name in names.items()}
        ids_of: dict[str, dict[str, int]] = {}
        for c in task.attributes:
            ids_of[c] = {}
            for word in lists[c]:
                ids = in_text(kit, word)
                if len(ids) == 1 and noise_ratio(classes, embedding[ids[0]], c) > self.noise:
                    ids_of[c][word] = ids[0]
            if not ids_of[c]:
                raise MethodError(
                    f"freectrl: none of {len(lists[c])} words for {c!r} is one token and nearer to"
                    f" its class than noise={self.noise:g}; give another list (--set words=FILE) or"
                    " lower --set noise=..."
                )
        return ids_of

    def _lists(self, task: Task) -> Mapping[str, Sequence[str]]:
        """The word lists, one per attribute of the task."""
        lists = read_word_list(self.words, task.name)
        empty = [c for c in task.attributes if not lists.get(c)]
        if empty:
            raise MethodError(
                f"freectrl: the word list has no words for {empty[0]!r}; it has"
                f" {', '.join(lists) or 'none'}; make one with `lapa2 word-lists` and give --set"
                " words=FILE"
            )
        return lists

    def begin(self, start: Start) -> Monitor:
        controls = [each.known for each in start.prepared]
        first = controls[0]
        tokens = [first.embedding[list(each.prompt)] for each in controls]
        nearest = {
            c: torch.stack([(t @ k.T).max(dim=0).values for t in tokens])
            for c, k in first.keywords.items()
        }
        latest = {c: torch.stack([t[-1] @ k.T for t in tokens]) for c, k in first.keywords.items()}
        return Monitor(
            first,
            nearest,
            latest,
            torch.tensor([len(each.prompt) for each in controls]).to(tokens[0].device),
        )

    def intervene(self, state: State) -> Intervention | None:
        if not state.control.centre:
            return None
        target = state.control.target
        s = torch.maximum(score(state.nearest, target), score(state.latest, target))
        return Intervention(
            state.control.centre, weight(s, self.u, state.control.lam, state.length), self.at
        )

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        log_weights = checked(log_probs, "base")["base"]
        if state is not None:
            ends = torch.tensor(state.control.ends, dtype=torch.long, device=log_weights.device)
            log_weights = log_weights.index_fill(1, ends, -torch.inf)
        if self.sampler == "uniform":
            return log_weights
        ids = log_weights.sort(dim=1, descending=True, stable=True).indices
        p = torch.tensor(rank_probabilities(), dtype=log_weights.dtype, device=log_weights.device)[
            : ids.shape[1]
        ]
        of_rank = p.log().expand(len(ids), -1)
        return torch.full_like(log_weights, -torch.inf).scatter(1, ids[:, : len(p)], of_rank)

    def accepts(self, prepared: Prepared, text: str, tokens: Sequence[int]) -> bool:
        if self.accept == "all":
            return True
        known: Control = prepared.known
        embedded = known.embedding[[*known.prompt, *tokens]]
        nearest = {c: (embedded @ k.T).max(dim=0).values[None] for c, k in known.keywords.items()}
        if not float(score(nearest, known.target)) > self.u:
            return False
        if self.accept == "score":
            return True
        words = Counter(text.split())
        return max(words.values(), default=0) < MOST_REPEATED and text.count("\n") < MOST_LINES

    def advance(self, state: State, log_probs: LogProbs, tokens: Int[Tensor, " sample"]) -> State:
        if state is None:
            return None
        embedded = state.control.embedding[tokens]
        latest = {c: embedded @ keywords.T for c, keywords in state.control.keywords.items()}
        nearest = {c: torch.maximum(state.nearest[c], each) for c, each in latest.items()}
        return replace(state, nearest=nearest, latest=latest, length=state.length + 1)


def in_text(kit: MethodContext, word: str) -> list[int]:
    """A word's tokens inside a text, with the space in front."""
    spaced, alone = kit.ids(" " + word), kit.ids(word)
    # SentencePiece puts a space in front by itself, and a token of its own for one more.
    return alone if spaced == kit.ids(" ")[:1] + alone else spaced


def noise_ratio(
    classes: Mapping[str, Float[Tensor, " d_model"]], word: Float[Tensor, " d_model"], c: str
) -> float:
    """cos(e_c, e_w) 3 / sum over the other classes of cos(e, e_w).

    With four classes it is above 1 where the word is nearer to its class than to the mean of the
    others; with two, where its cos is above a third of the other's.
    """
    cos = {
        name: float(torch.nn.functional.cosine_similarity(each, word, dim=0))
        for name, each in classes.items()
    }
    own = cos.pop(c)
    return own * (NOISE_CLASSES - 1) / sum(cos.values())


def score(
    nearest: Mapping[str, Float[Tensor, "sample keyword"]], target: str
) -> Float[Tensor, " sample"]:
    """How much more a text is like the target's keywords than like the mean other class's; 1 is
    neutral.

    Args:
        nearest: Per class and keyword, the largest cos to a token of the text.
    """
    sim = {c: each.mean(dim=1) for c, each in nearest.items()}
    own = sim.pop(target)
    return own * len(sim) / torch.stack(list(sim.values())).sum(dim=0)


def weight(
    s: Float[Tensor, " sample"], u: float, lam: float, length: Int[Tensor, " sample"]
) -> Float[Tensor, " sample"]:
    """lam / (1 + exp(-(u - s) L)) below the threshold, 1e-20 from it on."""
    return torch.where(u > s, lam * torch.sigmoid((u - s) * length), OFF)


def rank_probabilities(beams: int = 5, kept: int = 25, drawn: int = 10) -> list[float]:
    """P(the token of rank r is taken), r = 1..kept: `beams` copies of the `kept` likeliest tokens,
    `drawn` of them drawn without replacement as equally likely ones (temperature 100 makes them
    so), the likeliest drawn taken.

    [C(N - beams (r - 1), drawn) - C(N - beams r, drawn)] / C(N, drawn) with N = beams kept.
    """
    n = beams * kept
    return [
        (math.comb(n - beams * (r - 1), drawn) - math.comb(n - beams * r, drawn))
        / math.comb(n, drawn)
        for r in range(1, kept + 1)
    ]
