"""Examples of a contrast set: one text after opposite prefixes.

A `ContrastExample` is a prompt and a text that follows it, with a branch for every attribute. All
branches have the same text at the same positions, because the prefixes have equal lengths.
Otherwise the branches would differ by positions alone. With prefixes of 3 and 5 tokens, blocking
them in every head leaves more difference between the branches than the prefixes themselves make."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.tokens import decode_tokens
from lapa2_interp.errors import CircuitError, pluralize
from lapa2_interp.generation.arrange import chat_layout
from lapa2_interp.generation.loop import decode_batch
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.base import SoftPrefixKey
from lapa2_interp.models.facts import Model
from lapa2_interp.prefixes.soft_prefix import SoftPrefix
from lapa2_interp.progress import progress_bar
from lapa2_interp.tasks.task import RAW, ChatForm, Prompts, Task
from lapa2_interp.tasks.word_lists import read_word_list

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKEN_IDS: dict[tuple[bytes, tuple[str, ...]], tuple[int, ...]] = {}
"""`_single_token_ids` by a tokenizer's contents and words."""


@dataclass(frozen=True)
class ContrastExample:
    """One text after a prompt, in one branch for every attribute.

    Attributes:
        prompt: The prompt. Texts of one prompt are not independent, so prompts are resampled.
        attributes: The first is the target, the others its opposites.
        layouts: By attribute, with prefixes of one length, prompts of the same tokens.
        text: Token ids that follow the prompt.
        source: The attribute whose prefix steered the text, or `RAW`.
        raw: The layout without a prefix.
        prefixes: By attribute, a soft prefix or None.
    """

    prompt: str
    attributes: tuple[str, ...]
    layouts: tuple[Layout, ...]
    text: tuple[int, ...]
    source: str = RAW
    raw: Layout | None = None
    prefixes: tuple[SoftPrefix | None, ...] = ()

    def __post_init__(self) -> None:
        if len(self.attributes) < 2 or len(self.attributes) != len(self.layouts):
            raise CircuitError(
                f"an example needs two branches or more, and a layout for each; found"
                f" {pluralize(len(self.attributes), 'name')} and"
                f" {pluralize(len(self.layouts), 'layout')}"
            )
        if not self.text:
            raise CircuitError(f"the text after {self.prompt!r} is empty; give at least one token")
        lengths = {
            name: layout.l_pre for name, layout in zip(self.attributes, self.layouts, strict=True)
        }
        if len(set(lengths.values())) > 1 or not all(lengths.values()):
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise CircuitError(
                f"the prefixes have different lengths in tokens ({listed}), so that the branches"
                " differ by positions, too; use soft prefixes, or reword one prefix to the other's"
                " length"
            )
        if len({_around(layout) for layout in self.layouts}) > 1:
            raise CircuitError(
                f"the prompt {self.prompt!r} is not the same tokens in every branch (a token"
                " spans prefix and prompt); end the prefixes alike, or begin the prompt with a"
                " space"
            )
        if crossing := next((layout for layout in self.layouts if layout.merged is not None), None):
            raise CircuitError(
                f"the token {crossing.merged!r} is part of the prefix and of the prompt"
                f" {self.prompt!r}; end the prefixes otherwise, or begin the prompt with a space"
            )
        # Soft prefixes for all layouts, or none.
        if not self.prefixes:
            object.__setattr__(self, "prefixes", (None,) * len(self.attributes))
        slots = [0 if prefix is None else len(prefix) for prefix in self.prefixes]
        if slots != [layout.soft for layout in self.layouts]:
            raise CircuitError(
                f"layouts and soft prefixes must go together; the layouts have"
                f" {', '.join(str(layout.soft) for layout in self.layouts)} slots, the prefixes"
                f" {', '.join(map(str, slots))}"
            )
        if len({layout.soft for layout in self.layouts}) > 1:
            raise CircuitError(
                "an example has soft and hard prefixes, so that the branches differ by positions,"
                " too; give prefixes of one kind"
            )

    @property
    def n_steps(self) -> int:
        """Tokens of the text: steps that are scored."""
        return len(self.text)

    @property
    def n_branch_steps(self) -> int:
        """Steps in all branches."""
        return self.n_steps * len(self.attributes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of all parts. Examples of one shape make a batch without padding."""
        layout = self.layouts[0]
        raw = 0 if self.raw is None else len(self.raw)
        return (
            layout.soft,
            layout.n_bos,
            layout.n_before,
            layout.l_pre,
            layout.l_pro,
            self.n_steps,
            len(self.attributes),
            raw,
        )

    def swapped(self) -> ContrastExample:
        """This example with its two attributes exchanged, the second as target."""
        order = [1, 0, *range(2, len(self.attributes))]
        return replace(
            self,
            attributes=tuple(self.attributes[i] for i in order),
            layouts=tuple(self.layouts[i] for i in order),
            prefixes=tuple(self.prefixes[i] for i in order),
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
        """A custom example.

            ContrastExample.of(model.tokenizer, {"clean": "In French:", "corrupt": "In German:"}, " The", " cat")

        Args:
            prefixes: By name, the hard prefix of each branch; the first is the target.
            prompt: The prompt.
            text: The text that follows, as a string (tokenised by itself) or as token ids.
            source: As the attribute of that name.
            join: Text between prefix and prompt.

        Raises:
            CircuitError: The prefixes have different lengths, or the text is empty.
            LayoutError: As `Layout.of`.
        """  # noqa: E501
        ids = tokenizer(text, add_special_tokens=False).input_ids if isinstance(text, str) else text
        layouts = [Layout.of(tokenizer, prefix, join + prompt) for prefix in prefixes.values()]
        raw = Layout.of(tokenizer, None, prompt)
        return cls(prompt, tuple(prefixes), tuple(layouts), tuple(map(int, ids)), source, raw)

    @classmethod
    def of_soft(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        prefixes: Mapping[str, SoftPrefix],
        prompt: str,
        text: Sequence[int],
        source: str = RAW,
    ) -> ContrastExample:
        """A text after soft prefixes.

        Args:
            prefixes: By attribute, the target first.
            prompt, text, source: As `of`.

        Raises:
            CircuitError: The prefixes have different lengths, or the text is empty.
            LayoutError: As `Layout.of`.
        """
        layouts = tuple(
            Layout.of(tokenizer, None, prompt, soft=len(prefix)) for prefix in prefixes.values()
        )
        raw = Layout.of(tokenizer, None, prompt)
        ids = tuple(map(int, text))
        return cls(prompt, tuple(prefixes), layouts, ids, source, raw, tuple(prefixes.values()))

    @classmethod
    def of_chat(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        form: ChatForm,
        prefixes: Mapping[str, str],
        prompt: str,
        text: Sequence[int],
        source: str = RAW,
    ) -> ContrastExample:
        """The first answer of a chat, whose span is the prefix.

        Args:
            form: The chat, with {prefix} for each branch's prefix and {prompt} for the prompt.

        Raises:
            CircuitError: The spans have different lengths, or the text is empty.
            LayoutError: As `Layout.of_chat`.
        """
        chats = [form.filled(prefix=prefix, prompt=prompt) for prefix in prefixes.values()]
        layouts = tuple(chat_layout(tokenizer, chat) for chat in chats)
        return cls(prompt, tuple(prefixes), layouts, tuple(map(int, text)), source)


def _around(layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The tokens before and after a prefix, and the number of BOS tokens."""
    start, stop = (layout.n_bos, layout.n_bos) if layout.soft else layout.prefix
    return layout.ids[:start], layout.ids[stop:], layout.n_bos


def check_request(
    prompts: Sequence[str],
    texts: Mapping[str, Sequence[Sequence[int]]] | None,
) -> None:
    """Refuse texts that lack a prompt."""
    if texts is not None and (without := [prompt for prompt in prompts if not texts.get(prompt)]):
        raise CircuitError(f"texts has none for the prompt {without[0]!r}; give each prompt's")


def prefix_texts(tokenizer: PreTrainedTokenizerBase, example: ContrastExample) -> dict[str, str]:
    """By attribute, the prefix of an example as text, or the name of a soft one."""
    return {
        name: decode_tokens(tokenizer, layout.ids[slice(*layout.prefix)])
        if prefix is None
        else str(SoftPrefixKey(prefix.card.set, prefix.card.attribute))
        for name, layout, prefix in zip(
            example.attributes, example.layouts, example.prefixes, strict=True
        )
    }


def write_texts(
    model: Model,
    task: Task,
    source: str,
    prompts: Sequence[str],
    *,
    tokens: int,
    prefixes: str = "hard",
    samples: int = 1,
    seed: int = 1,
) -> dict[str, list[list[int]]]:
    """Texts that a model writes, by prompt, each of `tokens` tokens: after an attribute's prefix,
    or after the prompt alone; in a chat, with the span of an attribute hidden."""
    longest = max(
        len(model.tokenizer(prompt, add_special_tokens=False).input_ids) for prompt in prompts
    )
    length = tokens + (longest if task.length_counts_prompt else 0)
    parameters: dict[str, float | bool | str]
    if task.chat is not None:
        method, parameters = "chat", {"guidance": 0.0} if source == RAW else {}
    elif source == RAW:
        method, parameters = "none", {}
    else:
        method, parameters = "prefix", {"prefixes": prefixes}
    cell = cell_of(
        model,
        method=method,
        task=task,
        attribute=next(iter(task.attributes)) if source == RAW else source,
        prompts=Prompts(texts=tuple(prompts)),
        alpha=0,
        parameters=parameters,
        length=length,
        samples=samples,
        seed=seed,
        eos="block",
        trace="none",
    )
    plan = plan_batches(model, cell)
    written: dict[str, list[list[int]]] = {prompt: [] for prompt in prompts}
    with progress_bar(plan.new_tokens, f"writing {source}") as bar:
        for pairs in plan.batches:
            table = decode_batch(model, plan, pairs, bar).texts
            for prompt, ids in zip(table["prompt"], table["tokens"], strict=True):
                written[prompt].append(list(ids[:tokens]))
    return written


def attribute_words(
    tokenizer: PreTrainedTokenizerBase, task: str, names: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Token ids of each attribute's words: words of the task's list that are one token after a
    space, and belong to no other attribute.

    Raises:
        DataError: There is no list for the task.
        CircuitError: An attribute has no word that is one token.
    """
    lists = read_word_list("", task)
    missing = [name for name in names if name not in lists]
    if missing:
        raise CircuitError(
            f"the word list of {task} has no words for {missing[0]!r}; it has {', '.join(lists)}"
        )
    ids_by_name: dict[str, dict[int, None]] = {}
    for name in names:
        ids = _single_token_ids(tokenizer, tuple(lists[name]))
        ids_by_name[name] = {one: None for one in ids if one != tokenizer.unk_token_id}
    words = {}
    for name, own in ids_by_name.items():
        others = {token for rival, taken in ids_by_name.items() if rival != name for token in taken}
        words[name] = tuple(token for token in own if token not in others)
        if not words[name]:
            raise CircuitError(
                f"no word of {name!r} is one token of this model's vocabulary; give metrics other"
                " than lex"
            )
    return words


def _single_token_ids(
    tokenizer: PreTrainedTokenizerBase, words: tuple[str, ...]
) -> tuple[int, ...]:
    """Ids of the words that are one token after a space.

    They are kept, because a model that is loaded again has another tokenizer, and the library
    `tokenizers` (0.23) never frees the words that a tokenizer has encoded.
    """
    contents = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).digest()
    if (contents, words) not in _TOKEN_IDS:
        ids = [tokenizer(" " + word, add_special_tokens=False).input_ids for word in words]
        _TOKEN_IDS[contents, words] = tuple(one[0] for one in ids if len(one) == 1)
    return _TOKEN_IDS[contents, words]


def batches(examples: Sequence[ContrastExample], most: int) -> Iterator[list[int]]:
    """Groups of at most `most` examples of one shape, which one forward pass may read together;
    their positions among the examples."""
    order = sorted(range(len(examples)), key=lambda i: examples[i].shape)
    for _, same in groupby(order, key=lambda i: examples[i].shape):
        group = list(same)
        for first in range(0, len(group), most):
            yield group[first : first + most]
