"""Methods that compute something from the model before the first token (`Method.prepare`).

    CAA     once per attribute, a vector for the residual stream: `ActivationAddition`
    DATG    once per prompt, words of the model's own drafts: `Datg`

FreeCtrl, which also chooses neurons and draws texts again, has a file of its own: `freectrl`.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass as plain_dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp._util.parsing import read_text
from lapa2_interp._util.values import Count
from lapa2_interp.bias.places import FORMS, read_place
from lapa2_interp.errors import MethodError, parameter
from lapa2_interp.methods.base import (
    BatchStart,
    Branch,
    LogProbs,
    Method,
    MethodContext,
    Passes,
    Prepared,
    State,
    check_branches,
    nucleus,
)
from lapa2_interp.tasks.task import Task, extra_prompts
from lapa2_interp.tasks.word_lists import STOPWORDS

if TYPE_CHECKING:
    import networkx as nx

MOST_TEXTS = 32
"""Texts of the mean of CAA, by default."""
SENTENCE = (
    "This passage emphasizes themes such as {positive}. It deliberately avoids topics like"
    " {negative}. Given this context,"
)
PUNCTUATION = frozenset(string.punctuation + "“”‘’…–—«»\ufffd、。，；：？！（）【】《》\n")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ActivationAddition(Method):
    """Contrastive activation addition: a vector is added to the residual stream at every new token.

        v_i = mean over texts t of h_i(prefix_a + t) - mean over c != a of h_i(prefix_c + t)
        h_i <- h_i + strength v_i   after the layers i, from the last token of the prompt on

    h_i is the residual stream after layer i, read at the last token. This is the method of Rimsky
    et al. (2024, arXiv 2312.06681) with pairs of texts that differ by their prefix; the original
    has pairs of a question with either answer, one layer, and the same tokens to add to. Choose
    layers and strength on prompts that are not those of a comparison.

    Args:
        strength: The number of times that the vector is added; below 0 it is subtracted. At 0 the
            texts are those of the model alone.
        layers: "middle", the layer in the middle, or numbers such as "5" or "4-6"; each has a
            vector of its own.
        texts: A file of texts, one a line, over which the vector is a mean; by default the first
            32 of the prompts that the package has for a run's need of more (`tasks/more`).
        with_prefix: The prompt stands behind the attribute's hard prefix, on which LaPA2 can act.
    """

    name: ClassVar[str] = "caa"
    paper_name: ClassVar[str] = "CAA"
    equation: ClassVar[str] = (
        "h_i := h_i + strength (mean h_i after prefix a - mean h_i after the others)"
    )
    alpha: ClassVar[float] = 0.0
    in_paper: ClassVar[bool] = False
    files: ClassVar[tuple[str, ...]] = ("texts",)
    changes_network: ClassVar[bool] = True
    when_empty: ClassVar[str] = (
        "strength is so large that the model's numbers overflow; choose one nearer to 0"
    )
    strength: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    layers: str | int = "middle"
    texts: str = ""
    with_prefix: bool = False

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        task.others(attribute)
        prefix = task.prefix(attribute)
        return (Branch("prefix", prefix),) if self.with_prefix else (Branch("base"),)

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        name = "prefix" if self.with_prefix else "base"
        return check_branches(log_probs, name)[name]

    def prepare(self, context: MethodContext, task: Task, attribute: str, prompt: str) -> Prepared:
        if self.strength == 0:
            return Prepared()
        vectors = context.cached(
            ("activation addition", self, task.model_dump_json(), attribute),
            lambda: self.vectors(context, task, attribute),
        )
        norms = {str(layer): round(float(vector.norm()), 4) for layer, vector in vectors.items()}
        return Prepared(vectors, summary={"norm of the vector, by layer": norms})

    def intervene(
        self, passes: Passes, prepared: Sequence[Prepared]
    ) -> AbstractContextManager[None]:
        return passes.shift(prepared[0].known or {})  # one vector for all prompts

    def vectors(
        self, context: MethodContext, task: Task, attribute: str
    ) -> Mapping[int, Float[Tensor, " d_model"]]:
        """What is added, by layer.

        Raises:
            MethodError: The model has no such layer, or the file of texts cannot be read.
            TaskError: The task has no other attribute.
        """
        texts = self._read_texts() if self.texts else _default_texts(task)
        mean_of_attribute, *means_of_others = (
            context.mean_residual(task.prefix(name), texts)
            for name in (attribute, *task.others(attribute))
        )
        mean_of_others = torch.stack(means_of_others).mean(dim=0)
        difference = self.strength * (mean_of_attribute - mean_of_others)  # layer d_model
        return {layer: difference[layer] for layer in self._layer_numbers(len(difference))}

    def _layer_numbers(self, n_layers: int) -> tuple[int, ...]:
        text = str(self.layers)
        layers = (n_layers // 2,) if text == "middle" else read_place("layers", text)
        if not isinstance(layers, tuple):
            allowed = f"'middle' or {FORMS['layers']}"
            raise MethodError(f"caa: layers: takes {allowed}; found {text[:80]!r}")
        if max(layers) >= n_layers:
            raise MethodError(
                f"caa: layer {max(layers)} does not exist; the model has layers 0-{n_layers - 1}"
            )
        return tuple(sorted(set(layers)))

    def _read_texts(self) -> tuple[str, ...]:
        try:
            texts = tuple(filter(str.strip, read_text(Path(self.texts)).splitlines()))
        except (OSError, ValueError) as error:
            raise MethodError(f"caa: cannot read the texts in {self.texts}: {error}") from None
        if not texts:
            raise MethodError(f"caa: {self.texts} has no texts; give a file with one a line")
        return texts


def _default_texts(task: Task) -> tuple[str, ...]:
    """The package's prompts, those of a built-in task if it is one: a text then depends on no other
    prompt of its run."""
    return (extra_prompts(task.name) or extra_prompts("sentiment"))[:MOST_TEXTS]


@plain_dataclass(frozen=True)
class PromptWords:
    """The words of a prompt's two graphs, best first, and the first token of each."""

    positive: tuple[str, ...]
    negative: tuple[str, ...]
    positive_ids: tuple[int, ...]
    negative_ids: tuple[int, ...]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Datg(Method):
    """DATG: words of the model's own drafts are boosted, or named in the prompt (section 5.1).

    It is a baseline of the paper, which does not combine it with LaPA2: there is a prefix to act on
    in form "P" only. Drafts associate the words with an attribute. Once per prompt:

    1. draft `drafts` continuations of the bare prompt, 32 tokens each;
    2. q_j = P(attribute | draft j) by a scorer;
    3. two directed graphs over the drafts' tokens: every pair (token, next token) of draft j adds
       q_j to its edge in the positive graph and 1 - q_j in the negative one;
    4. from each graph the `nodes` tokens of highest PageRank (damping .85) without punctuation,
       digits and stopwords.

    Then, for every token, at temperature .7, top-k 200, top-p .9:

        form "L"   log w = log P_base + boost [x among the positive words]
                           - avoid [x among the negative words]
        form "P"   log w = log P of the prompt after a sentence that names both lists

    Of a word only the first token counts; a token that is listed twice counts twice. The released
    code drafts, boosts and samples in this way; the paper has another sentence for form "P".

    Args:
        form: "L" boosts logits, "P" names the words in a sentence before the prompt.
        scorer: The scorer of P(attribute | text): one of `lapa2 scorers list`, such as accuracy,
            accuracy=MODEL or toxicity=MODEL:LABEL.
        drafts: Number of drafts per prompt.
        draft_tokens: Length of a draft, in tokens.
        draft_seed: Seed of the drafts' random streams, which are not those of texts; drafts are
            stored on disk.
        nodes: Number of words from each graph.
        boost: The number that form "L" adds to the logits of positive words.
        avoid: The number that form "L" subtracts from the logits of negative words.
        sampler: "official" (temperature .7, top-k 200, top-p .9), or "uniform" (as in every method
            here: temperature 1, top-k of the command line). Drafts are always official.
    """

    name: ClassVar[str] = "datg"
    paper_name: ClassVar[str] = "DATG"
    equation: ClassVar[str] = (
        "log w = log P_base + boost [x positive] - avoid [x negative], T .7, top-p .9"
    )
    alpha: ClassVar[float] = 0.0
    when_empty: ClassVar[str] = "boost or avoid is too large; the original's are 4 and 6"
    form: Literal["L", "P"] = "L"
    scorer: str = "accuracy"
    drafts: Count = 30
    draft_tokens: Annotated[int, Field(ge=2)] = 32
    draft_seed: int = 1
    nodes: Count = 10
    boost: Annotated[float, Field(ge=-1e4, le=1e4)] = 4.0
    avoid: Annotated[float, Field(ge=-1e4, le=1e4)] = 6.0
    sampler: Literal["official", "uniform"] = "official"

    def deciding_files(self) -> dict[str, Path]:
        """The files of `Method.deciding_files`, the scorer's file or folder, and its card."""
        files, (_, _, model) = super().deciding_files(), self.scorer.partition("=")
        if model and (path := Path(model)).exists():
            card = path.parent / f"{path.stem}.json"
            files |= {"scorer": path, "scorer's card": card}
        return files

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        task.prefix(attribute)
        return (Branch("base"),) if self.form == "L" else (Branch("target", SENTENCE, " "),)

    def prepare(self, context: MethodContext, task: Task, attribute: str, prompt: str) -> Prepared:
        # Draft and score; a scorer that does not fit is refused before drafting.
        context.attribute_probabilities(self.scorer, task, attribute, prompt, ())
        drafts = context.drafts(Drafting(), prompt, self.drafts, self.draft_tokens, self.draft_seed)
        shares = context.attribute_probabilities(self.scorer, task, attribute, prompt, drafts)
        scored = [
            (context.ids(text), q) for text, q in zip(drafts, shares, strict=True) if q is not None
        ]
        if not scored:
            raise MethodError(
                f"datg: none of {len(drafts)} drafts of {prompt!r} could be scored by"
                f" {self.scorer}; give another scorer"
            )
        graphs = dual_graphs([([context.text([i]) for i in ids], q) for ids, q in scored])
        positive, negative = (best_nodes(graph, self.nodes) for graph in graphs)
        ids = [tuple(context.ids(word)[0] for word in words) for words in (positive, negative)]
        words = PromptWords(positive, negative, *ids)
        if not words.positive and not words.negative:
            raise MethodError(
                f"datg: the {len(drafts)} drafts of {prompt!r} hold no word that is not"
                " punctuation, a number or a stopword; give more drafts"
                f" ({parameter('drafts', '60', 'set')}) or"
                f" longer ones ({parameter('draft_tokens', '64', 'set')})"
            )
        sentence = SENTENCE.format(
            positive=", ".join(words.positive), negative=", ".join(words.negative)
        )
        summary = {
            "positive": list(words.positive),
            "negative": list(words.negative),
            "drafts": len(scored),
        }
        return Prepared(words, {"target": sentence} if self.form == "P" else {}, summary)

    def begin(self, start: BatchStart) -> Sequence[PromptWords]:
        return [prepared.known for prepared in start.prepared]

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        name = "base" if self.form == "L" else "target"
        log_weights = check_branches(log_probs, name)[name]
        if self.form == "L" and state is not None:
            log_weights = log_weights + torch.stack(
                [self._shift(words, log_weights[0]) for words in state]
            )
        return released_sampler(log_weights) if self.sampler == "official" else log_weights

    def advance(self, state: State, log_probs: LogProbs, tokens: Tensor) -> State:
        return state

    def _shift(self, words: PromptWords, like: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """The number that is added to each logit."""
        shift = torch.zeros_like(like)
        for ids, value in ((words.positive_ids, self.boost), (words.negative_ids, -self.avoid)):
            at = torch.tensor(ids, dtype=torch.long, device=like.device)
            shift.index_add_(0, at, torch.full_like(at, value, dtype=like.dtype))
        return shift


@plain_dataclass(frozen=True)
class Drafting(Method):
    """The raw model with the sampler of DATG's drafts."""

    name: ClassVar[str] = "drafting"
    paper_name: ClassVar[str] = "drafts of DATG"
    equation: ClassVar[str] = "log w = log P_base, T .7, top-k 200, top-p .9"
    alpha: ClassVar[float] = 0.0

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        return (Branch("base"),)

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        return released_sampler(check_branches(log_probs, "base")["base"])


def released_sampler(log_weights: Float[Tensor, "sample vocab"]) -> Float[Tensor, "sample vocab"]:
    """The log-weights at temperature .7, with top-k 200 and top-p .9."""
    return nucleus(log_weights / 0.7, 0.9, top_k=200)


def dual_graphs(drafts: Sequence[tuple[Sequence[str], float]]) -> tuple[nx.DiGraph, nx.DiGraph]:
    """The positive and the negative graph of drafts.

    Args:
        drafts: For each draft its token strings and its P(attribute | text).
    """
    import networkx as nx

    positive, negative = nx.DiGraph(), nx.DiGraph()
    for tokens, share in drafts:
        for pair in pairwise(tokens):
            for graph, weight in ((positive, share), (negative, 1 - share)):
                before = graph.get_edge_data(*pair, default={"weight": 0.0})["weight"]
                graph.add_edge(*pair, weight=before + weight)
    return positive, negative


def best_nodes(graph: nx.DiGraph, n: int) -> tuple[str, ...]:
    """The n token strings of highest PageRank that count as words: no punctuation, digits,
    stopwords or blanks."""
    import networkx as nx

    if not graph:
        return ()
    rank: Mapping[str, float] = nx.pagerank(graph, alpha=0.85, tol=1e-6, weight="weight")
    return tuple(
        [node for node in sorted(rank, key=rank.__getitem__, reverse=True) if _is_word(node)][:n]
    )


def _is_word(text: str) -> bool:
    parts = text.split()
    return (
        any(character.isalpha() for character in text)
        and not any(character in PUNCTUATION or character.isdigit() for character in text)
        and not any(
            part in (part.lower(), part.upper(), part.capitalize()) and part.lower() in STOPWORDS
            for part in parts
        )
    )
