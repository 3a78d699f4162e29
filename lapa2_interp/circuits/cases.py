"""What circuits are asked about: one text behind opposite prefixes.

A `ContrastExample` is a prompt and a text that follows it, read by a branch for every attribute.
The text is the same in all of them, and so is its place: the prefixes have equal lengths. Otherwise
the branches would differ by positions alone. With prefixes of 3 and 5 tokens, blocking them in
every head leaves more difference between the branches than the prefixes themselves make."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

from lapa2_interp._util.errors import CircuitError, pluralize
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.tokens import decode_tokens
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.loop import generate
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.card import Model
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.prefixes.soft_prefix import SoftPrefix
from lapa2_interp.tasks.task import Task
from lapa2_interp.tasks.word_lists import read_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RAW = "raw"
"""Where texts come from that no prefix has steered; and the branch that has none."""


@dataclass(frozen=True)
class ContrastExample:
    """One text behind a prompt, in one branch for every attribute.

    Attributes:
        prompt: The prompt. Texts of one prompt are not independent, so it is what is resampled.
        names: The attributes; the first is the target, the others its opposites.
        layouts: By attribute, with prefixes of one length, prompts of the same tokens.
        text: Token ids that follow the prompt.
        source: The prefix that the text was written behind: an attribute, or `RAW`.
        raw: The layout without a prefix.
        prefixes: By attribute, a soft prefix or None.
    """

    prompt: str
    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    text: tuple[int, ...]
    source: str = RAW
    raw: Layout | None = None
    prefixes: tuple[SoftPrefix | None, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) < 2 or len(self.names) != len(self.layouts):
            raise CircuitError(
                f"a case needs two branches or more, and a layout for each; found"
                f" {pluralize(len(self.names), 'name')} and"
                f" {pluralize(len(self.layouts), 'layout')}"
            )
        if not self.text:
            raise CircuitError(f"the text behind {self.prompt!r} is empty; give at least one token")
        lengths = {name: each.l_pre for name, each in zip(self.names, self.layouts, strict=True)}
        if len(set(lengths.values())) > 1 or not all(lengths.values()):
            told = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise CircuitError(
                f"the prefixes have different lengths in tokens ({told}), so that the branches"
                " differ by positions, too; use soft prefixes, or reword one prefix to the other's"
                " length"
            )
        tails = {each.ids[each.n_bos + (0 if each.soft else each.l_pre) :] for each in self.layouts}
        if len(tails) > 1 or len({each.n_bos for each in self.layouts}) > 1:
            raise CircuitError(
                f"the prompt {self.prompt!r} is not the same tokens in every branch (a token"
                " crosses the seam); end the prefixes alike, or begin the prompt with a space"
            )
        if crossing := next((each for each in self.layouts if each.merged is not None), None):
            raise CircuitError(
                f"the token {crossing.merged!r} is part of the prefix and of the prompt"
                f" {self.prompt!r}; end the prefixes otherwise, or begin the prompt with a space"
            )
        if any(each.n_before for each in self.layouts):
            raise CircuitError(
                "circuits are read where the prefix follows BOS; a chat's span has tokens before it"
            )
        if not self.prefixes:
            object.__setattr__(self, "prefixes", (None,) * len(self.names))
        slots = [0 if each is None else len(each) for each in self.prefixes]
        if slots != [each.soft for each in self.layouts]:
            raise CircuitError(
                f"layouts and soft prefixes must go together; the layouts have"
                f" {', '.join(str(each.soft) for each in self.layouts)} slots, the prefixes"
                f" {', '.join(map(str, slots))}"
            )
        if len({each.soft for each in self.layouts}) > 1:
            raise CircuitError(
                "a case has soft and hard prefixes, so that the branches differ by positions, too;"
                " give prefixes of one kind"
            )

    @property
    def n(self) -> int:
        """Tokens of the text: steps that are scored."""
        return len(self.text)

    @property
    def shape(self) -> tuple[int, ...]:
        """Cases of one shape can be read together without padding."""
        each = self.layouts[0]
        raw = 0 if self.raw is None else len(self.raw)
        return (each.soft, each.n_bos, each.l_pre, each.l_pro, self.n, len(self.names), raw)

    def swapped(self) -> ContrastExample:
        """The same case of two attributes with the second as target."""
        order = [1, 0, *range(2, len(self.names))]
        return ContrastExample(
            self.prompt,
            tuple(self.names[i] for i in order),
            tuple(self.layouts[i] for i in order),
            self.text,
            self.source,
            self.raw,
            tuple(self.prefixes[i] for i in order),
        )

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        prefixes: Mapping[str, str],
        prompt: str,
        text: str | Sequence[int],
        source: str = RAW,
        join: str = "",
    ) -> ContrastExample:
        """A case of one's own.

            Case.of(model.tokenizer, {"clean": "In French:", "corrupt": "In German:"}, " The", " cat")

        Args:
            prefixes: By name, the hard prefix of each branch; the first is the target.
            prompt: The prompt.
            text: The text that follows, as a string (tokenised by itself) or as token ids.
            source: As the case has it.
            join: What stands between prefix and prompt.

        Raises:
            CircuitError: The prefixes have different lengths, or the text is empty.
            LayoutError: As `Layout.of`.
        """  # noqa: E501
        ids = tokenizer(text, add_special_tokens=False).input_ids if isinstance(text, str) else text
        layouts = [Layout.of(tokenizer, prefix, join + prompt) for prefix in prefixes.values()]
        raw = Layout.of(tokenizer, None, prompt)
        return cls(prompt, tuple(prefixes), tuple(layouts), tuple(map(int, ids)), source, raw)


@accepts_model_name
def make_examples(
    model: Model,
    task: str | Task,
    attribute: str | None = None,
    prompts: str | Sequence[str] | None = None,
    *,
    texts: Mapping[str, Sequence[Sequence[int]]] | None = None,
    source: str = RAW,
    tokens: int = 32,
    samples: int = 1,
    seed: int = 1,
) -> list[ContrastExample]:
    """A case for every prompt and sample of a task.

    Args:
        task: A name or a task with two attributes or more and hard prefixes.
        attribute: The target; by default the task's first.
        prompts: By default the task's.
        texts: By prompt, token ids of texts to score; by default the model writes them.
        source: What it writes them behind: an attribute's prefix, or `RAW` for none. Raw texts are
            the clean measure: a text written behind a prefix says already what the prefix wants.
        tokens: Length of a text that the model writes.
        samples: Texts of each prompt.
        seed: Of the texts.

    Raises:
        TaskError: Unknown, or without opposite attributes.
        CircuitError: As `ContrastExample`; or no prompts, tokens or samples are asked for.
    """
    chosen = load_task(task) if isinstance(task, str) else task
    target = next(iter(chosen.attributes)) if attribute is None else attribute
    names = (target, *chosen.others(target))
    if isinstance(prompts, str):
        prompts = [prompts]
    asked = chosen.prompts.texts if prompts is None else tuple(prompts)
    check_asked(asked, tokens, samples, texts)
    prefixes = {name: chosen.prefix(name) for name in names}
    for prompt in asked:  # what is refused is refused before texts are written
        ContrastExample.of(model.tokenizer, prefixes, prompt, [0])
    if texts is None:
        texts = write_texts(model, chosen, source, asked, tokens=tokens, samples=samples, seed=seed)
    return [
        ContrastExample.of(model.tokenizer, prefixes, prompt, ids, source)
        for prompt in asked
        for ids in texts[prompt]
    ]


def check_asked(
    prompts: Sequence[str],
    tokens: int,
    samples: int,
    texts: Mapping[str, Sequence[Sequence[int]]] | None,
) -> None:
    """Refuse no prompts, no tokens, and texts that lack a prompt's."""
    if not prompts:
        raise CircuitError("there is no prompt; give at least one")
    if tokens < 1 or samples < 1:
        raise CircuitError(
            f"tokens and samples must be at least 1; found tokens={tokens}, samples={samples}"
        )
    if texts is not None and (without := [each for each in prompts if not texts.get(each)]):
        raise CircuitError(f"texts has none for the prompt {without[0]!r}; give each prompt's")


def prefix_texts(tokenizer: PreTrainedTokenizerBase, case: ContrastExample) -> dict[str, str]:
    """By attribute, the prefix of a case as text."""
    return {
        name: "soft prefix"
        if each.soft
        else decode_tokens(tokenizer, each.ids[each.n_bos :][: each.l_pre])
        for name, each in zip(case.names, case.layouts, strict=True)
    }


def write_texts(
    model: Model,
    task: Task,
    source: str,
    prompts: Sequence[str],
    *,
    tokens: int,
    samples: int = 1,
    seed: int = 1,
) -> dict[str, list[list[int]]]:
    """Texts of `tokens` tokens that a model writes, by prompt: behind an attribute's hard prefix,
    or behind the prompt alone."""
    longest = max(
        len(model.tokenizer(each, add_special_tokens=False).input_ids) for each in prompts
    )
    length = tokens + (longest if task.length_counts_prompt else 0)
    cell = Cell.of(
        model,
        method="none" if source == RAW else "prefix",
        task=task,
        attribute=next(iter(task.attributes)) if source == RAW else source,
        prompts=prompts,
        alpha=0,
        parameters={} if source == RAW else {"prefixes": "hard"},
        length=length,
        samples=samples,
        seed=seed,
        eos="block",
        trace="none",
    )
    made = generate(model, cell).samples
    found: dict[str, list[list[int]]] = {prompt: [] for prompt in prompts}
    for prompt, ids in zip(made["prompt"], made["tokens"], strict=True):
        found[prompt].append(list(ids[:tokens]))
    return found


def attribute_words(
    tokenizer: PreTrainedTokenizerBase, task: str, names: Sequence[str], file: str = ""
) -> dict[str, tuple[int, ...]]:
    """By attribute, the token ids of its words: those of the task's word lists that are one token
    behind a space, and no other attribute's.

    Args:
        file: A word list of one's own (`lapa2 words`).

    Raises:
        DataError: There is no list for the task.
        CircuitError: An attribute has no word that is one token.
    """
    lists = read_words(file, task)
    missing = [name for name in names if name not in lists]
    if missing:
        raise CircuitError(
            f"the word list of {task} has no words for {missing[0]!r}; it has {', '.join(lists)}"
        )
    found: dict[str, dict[int, None]] = {}
    for name in names:
        ids = _one_token(_Same(tokenizer), tuple(lists[name]))
        found[name] = {one: None for one in ids if one != tokenizer.unk_token_id}
    words = {}
    for name, own in found.items():
        others = {token for other, taken in found.items() if other != name for token in taken}
        words[name] = tuple(token for token in own if token not in others)
        if not words[name]:
            raise CircuitError(
                f"no word of {name!r} is one token of this model's vocabulary; give metrics other"
                " than lex"
            )
    return words


class _Same:
    """A tokenizer that equals another of the same contents."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.contents = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.contents == other.contents

    def __hash__(self) -> int:
        return hash(self.contents)


@lru_cache(maxsize=32)
def _one_token(known: _Same, words: tuple[str, ...]) -> tuple[int, ...]:
    """Ids of the words that are one token behind a space.

    Kept, because a model that is loaded again has another tokenizer, and the library `tokenizers`
    (0.23) never frees what a tokenizer remembers of the words it has read.
    """
    ids = [known.tokenizer(" " + word, add_special_tokens=False).input_ids for word in words]
    return tuple(one[0] for one in ids if len(one) == 1)


def batches(cases: Sequence[ContrastExample], most: int) -> Iterator[list[int]]:
    """Positions of cases that are read together: of one shape, in order, at most `most`."""
    order = sorted(range(len(cases)), key=lambda i: cases[i].shape)
    for _, same in groupby(order, key=lambda i: cases[i].shape):
        group = list(same)
        for first in range(0, len(group), most):
            yield group[first : first + most]
