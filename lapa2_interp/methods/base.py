"""Decoding methods: one file for each family, pure arithmetic on the branches' log-probabilities.

A method names its branches and combines their next-token distributions. A method never gets a
model, so that a test needs a small vocabulary alone:

    method = methods.get("preadd", lam=-1.0)
    log_probs = {"base": ..., "prefix": ...}                  # by branch, [sample, vocab], any float dtype
    log_weights = method.combine(log_probs, state=None)       # [sample, vocab], need not be normalised
    state = method.advance(None, log_probs, tokens)           # tokens [sample]; the state for the next step's combine

The sampler then keeps the k largest weights and draws: combine -> temperature -> top-k -> sample.

Three methods need more than log-probabilities. They compute it in one more function:

    prepare(context, ...)    once per prompt, before its first token: compute what the method needs to know

`prepare` is given a `MethodContext`; `begin` makes the first step's state from its result. FreeCtrl also
sets neurons of the model and draws texts again: `lapa2_interp.generation.freectrl`. Two change the passes
of a batch by `intervene`: CAA adds vectors to the residual stream; `remind` reads the prefix again.
"""  # noqa: E501

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp.errors import MethodError
from lapa2_interp.tasks.task import ChatForm, Task

State = Any
"""A method's own memory of a sample, from one step to the next."""
T = TypeVar("T")
LogProbs = Mapping[str, Float[Tensor, "sample vocab"]]
"""Log-probabilities of the next token, in nats, by branch."""
LogLikelihoods = Mapping[str, Float[Tensor, " sample"]]
"""Log-probability of the text so far, in nats, by branch."""
FLOOR = -1e4
"""Log-probability of impossible tokens in methods that subtract branches, so that there is no
difference of infinities."""


@dataclass(frozen=True)
class SoftPrefixKey:
    """The name of a soft prefix: a set of soft prefixes for the task, and an attribute of the
    set."""

    set: str
    attribute: str

    def __str__(self) -> str:
        return f"<soft {self.set} {self.attribute}>"


@dataclass(frozen=True)
class Branch:
    """One conditional model call.

    Attributes:
        name: "base" for the raw model; prefix branches have other names.
        prefix: The text before the prompt, or a soft prefix; None for the raw model.
        join: The text between prefix and prompt; it counts as prompt.
        hidden: No query after the prefix sees it. The prompt keeps its position.
        chat: The chat whose span is the prefix, laid out by its template; of method `chat`.
        layers: The layers in which an augmentation acts on this branch; None for all of the
            augmentation's, `()` for none.
    """

    name: str
    prefix: str | SoftPrefixKey | None = None
    join: str = ""
    hidden: bool = False
    chat: ChatForm | None = None
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Reminder:
    """A text that the model reads between tokens of its own, and that is no part of what it wrote.

    Attributes:
        ids: Its tokens.
        every: The number of new tokens after which it is read, again and again.
    """

    ids: tuple[int, ...]
    every: int

    def n_keys(self, steps: int) -> int:
        """The keys that it adds to a text of n new tokens; it is not read after the last one."""
        return (steps - 1) // self.every * len(self.ids)


@dataclass(frozen=True)
class Prepared:
    """The result of a method's `prepare` for one prompt.

    Attributes:
        known: Any value for the method's `begin` or `intervene`.
        prefixes: By branch, the text before this prompt, if it replaces the branch's text.
        summary: A summary for readers of the run, as JSON.
        reminder: What `Method.intervene` has the model read between new tokens, equal for all
            prompts of a run: room is kept for it.
    """

    known: Any = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    reminder: Reminder | None = None


@dataclass(frozen=True)
class BatchStart:
    """The facts about a batch of samples before its first step.

    Attributes:
        prepared: The result of `prepare` for the prompt of each sample.
        log_likelihood: log P(prompt) under every branch, [sample]; None for methods that do not ask
            for log P (`reads_prompt`).
        n_prompt: Number of prompt tokens, [sample].
    """

    prepared: Sequence[Prepared]
    log_likelihood: LogLikelihoods | None
    n_prompt: Int[Tensor, " sample"]


@runtime_checkable
class Passes(Protocol):
    """The passes of a batch: what `intervene` may do to them, each a block
    (`lapa2_interp.attention.interventions`)."""

    def shift(self, vectors: Mapping[int, Tensor]) -> AbstractContextManager[None]:
        """Add vectors to the residual stream at every query from the last token of the prompt on.

        Args:
            vectors: By layer, [d_model], or [prompt d_model] where prompts have their own.
        """

    def remind(self, ids: Sequence[int], every: int) -> AbstractContextManager[None]:
        """Read these tokens, too, after every few new ones."""


@runtime_checkable
class MethodContext(Protocol):
    """The functions of a model that `prepare` may call (`lapa2_interp.runs.method_context`)."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""

    @property
    def n_layers(self) -> int:
        """Number of layers."""

    @property
    def gated(self) -> bool:
        """True if its MLPs are gated."""

    def cached(self, name: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, which is called only once for each name; for values that all
        prompts share."""

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, without BOS."""

    def text(self, ids: Sequence[int]) -> str:
        """The text of token ids."""

    def embedding(self) -> Float[Tensor, "vocab d_model"]:
        """The rows of the token embedding."""

    def drafts(self, method: Method, prompt: str, n: int, new_tokens: int, seed: int) -> list[str]:
        """Continuations of the prompt alone, by a method without prefixes."""

    def attribute_probabilities(
        self, scorer: str, task: Task, attribute: str, prompt: str, texts: Sequence[str]
    ) -> list[float | None]:
        """P(attribute | text) by a scorer; None for a text without a score."""

    def promoting_neurons(
        self, tokens: Sequence[int], k: int, upper: bool = False
    ) -> Int[Tensor, "token k two"]:
        """The (layer, neuron) pairs that raise each token's probability most, of all layers or of
        the upper half."""

    def mean_residual(self, prefix: str, texts: Sequence[str]) -> Float[Tensor, "layer d_model"]:
        """The mean over texts behind a prefix of the residual stream after each layer, at the last
        token."""


def attribute_prefix(
    task: Task, attribute: str, prefixes: str, method: str = ""
) -> str | SoftPrefixKey:
    """An attribute's prefix: for "hard" the method's own text or else the task's, otherwise that of
    a soft set.

    Args:
        prefixes: "hard", a set that ships with the package (mle, contrastive), or a set's folder.
    """
    text = task.prefix(attribute)
    return (
        task.texts(method, attribute).get("prefix", text)
        if prefixes == "hard"
        else SoftPrefixKey(prefixes, attribute)
    )


class Method(ABC):
    """A decoding method.

    Attributes:
        name: The method's name on the command line.
        paper_name: The method's name in the paper's tables.
        display_name: The method's name in lists and figures, of any model; by default the paper's.
        equation: The formula that combines the branches.
        alpha: The paper's strength of LaPA2 for the method (section 5.1).
        pro_aug: True if LaPA2 also acts on the prompt of the base branch (Contextual Anchor
            Reinforcement, Eq. 15).
        text_names: The texts that the method reads from a task file; None for any texts.
        files: Parameters that name files whose contents decide its texts.
        when_empty: The reason why no token may have positive weight, and what to change.
        in_paper: True if the LaPA2 paper runs the method; of others `alpha` and `paper_name` are
            ours.
        reads_prompt: True if `begin` needs the prompt's log-likelihood under every branch.
        changes_network: True if the network is another while it decodes; then `lapa2 view` cannot
            read a text again, and `runs.MethodProcessor` cannot write one.
    """

    name: ClassVar[str]
    paper_name: ClassVar[str]
    display_name: ClassVar[str]
    equation: ClassVar[str]
    alpha: ClassVar[float]
    pro_aug: bool = False
    text_names: ClassVar[tuple[str, ...] | None] = ()
    files: ClassVar[tuple[str, ...]] = ()
    when_empty: ClassVar[str] = "a branch's own distribution is empty or not a number"
    in_paper: ClassVar[bool] = True
    reads_prompt: ClassVar[bool] = False
    changes_network: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "display_name" not in vars(cls) and "paper_name" in vars(cls):
            cls.display_name = cls.paper_name

    @abstractmethod
    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        """The model calls that steering to an attribute needs.

        Raises:
            TaskError: The task lacks the attribute.
            MethodError: The task lacks a text this method needs.
        """

    @abstractmethod
    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        """Log-weights of the next token from the branches' log-probabilities; log-weights need not
        be normalised."""

    def advance(self, state: State, log_probs: LogProbs, tokens: Int[Tensor, " sample"]) -> State:
        """The state after `tokens` were sampled; `begin` gives the first step's, and a stateless
        method None."""
        return None

    @property
    def stored_parameters(self) -> dict[str, float | int | bool | str]:
        """The parameters as a cell stores them, defaults included."""
        return asdict(self)  # type: ignore[call-overload]

    def prepare(self, context: MethodContext, task: Task, attribute: str, prompt: str) -> Prepared:
        """Compute what must be known about a prompt before its first token; called once per
        prompt."""
        return Prepared()

    def begin(self, start: BatchStart) -> State:
        """The state of the first step, once the prompts are read."""
        return None

    def intervene(
        self, passes: Passes, prepared: Sequence[Prepared]
    ) -> AbstractContextManager[None]:
        """A block around all passes of a batch, in which the network is another; the class then
        declares `changes_network`.

        Args:
            prepared: The result of `prepare` for each prompt of the batch.
        """
        return nullcontext()

    @property
    def prepares(self) -> bool:
        """True if the class has a `prepare` of its own."""
        return type(self).prepare is not Method.prepare

    def deciding_files(self) -> dict[str, Path]:
        """Files whose contents decide the method's texts: files that parameters name, if they
        exist, by parameter; and the code of a custom method, unless a notebook defines it."""
        paths = {name: Path(getattr(self, name)) for name in self.files}
        files = {name: path for name, path in paths.items() if path.is_file()}
        if not type(self).__module__.startswith(f"{__package__}."):
            with suppress(TypeError, OSError):
                files["its code"] = Path(inspect.getfile(type(self)))
        return files


def check_branches(
    log_probs: LogProbs, *names: str, others: int = 0
) -> dict[str, Float[Tensor, "sample vocab"]]:
    """Check that a step has the branches that a method needs, and return them in at least float32.

    Args:
        names: Branches that must be there.
        others: The least number of further branches.

    Raises:
        MethodError: A branch is missing, or the branches are not [sample, vocab] of one shape.
    """
    missing = [name for name in names if name not in log_probs]
    if missing or len(log_probs) < len(names) + others:
        needed = ", ".join(names) + (f" and {others} more" if others else "")
        raise MethodError(
            f"log_probs needs the branches {needed}; found {', '.join(log_probs) or 'none'}"
        )
    shapes = {name: tuple(log_p.shape) for name, log_p in log_probs.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise MethodError(f"every branch must be [sample, vocab] of one shape; found {shapes}")
    return {
        name: log_p.to(torch.promote_types(log_p.dtype, torch.float32))
        for name, log_p in log_probs.items()
    }


def nucleus(
    log_weights: Float[Tensor, "sample vocab"], top_p: float, top_k: int | None = None
) -> Float[Tensor, "sample vocab"]:
    """Log-weights with -inf outside the nucleus: the top k and, within these, the smallest set that
    holds `top_p` of the weight.

    The likeliest token always stays; of equally likely tokens the smaller id is kept first.
    """
    ranked, ids = log_weights.sort(dim=1, descending=True, stable=True)
    if top_k is not None:
        ranked[:, top_k:] = -torch.inf
    p = ranked.softmax(dim=1)
    more_likely = p.cumsum(dim=1) - p
    outside = more_likely >= top_p
    outside[:, 0] = False
    return torch.full_like(log_weights, -torch.inf).scatter(
        1, ids, ranked.masked_fill(outside, -torch.inf)
    )


def contrast_branches(task: Task, attribute: str, prefixes: str) -> tuple[Branch, ...]:
    """The branch "target" with the attribute's prefix, and one branch per competing attribute,
    which has its name."""
    return (
        Branch("target", attribute_prefix(task, attribute, prefixes)),
        *(
            Branch(opponent, attribute_prefix(task, opponent, prefixes))
            for opponent in task.others(attribute)
        ),
    )
