"""The command of a chat: `lapa2 chat`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lapa2_interp._util.parsing import parse_json, parse_object, read_text
from lapa2_interp.cli.live_chat import SYSTEM, LiveChat
from lapa2_interp.cli.options import AsJson, AugmentationOptions, ModelOptions, Several
from lapa2_interp.errors import LayoutError, MethodError

if TYPE_CHECKING:
    from lapa2_interp.bias.marked_text import MarkedText


def chat(
    messages: Path | None = None,
    /,
    *,
    system: str | None = None,
    span: str = "system",
    template: str = "{}",
    later: Annotated[list[str] | None, Several] = None,
    keep_turns: bool = False,
    marks: bool = False,
    model: str = "smollm2-135m",
    length: int = 64,
    samples: int = 1,
    seed: int = 1,
    top_k: int = 200,
    eos: Literal["keep", "stop", "block"] = "stop",
    augmentation: AugmentationOptions = AugmentationOptions(),
    computing: ModelOptions = ModelOptions(),
    as_json: AsJson = False,
) -> None:
    """Chat with a model and see its system message fade, or continue a chat of a file.

    Without a file you write the messages, one a line. After each answer follow the attention on the
    span and the effect of removing it: the Jensen-Shannon divergence of the next token's
    predictions, mean over the answer (float32 shows a faded one, bfloat16 may not). Both follow
    again as they were before the answer's first token, with the entropy of its prediction. There is
    no bias before --alpha, or /alpha 0.5 in the chat. Of a file shown are the span's tokens, the
    continuations, and the attention on the span against step. Nothing is stored. For example

        lapa2 chat --system "You are a pirate. Be brief."
        lapa2 chat --marks --system "You are a pirate. (Be brief:3)."
        lapa2 chat messages.json --span "phrase:be brief" --augmentation instaboost
        lapa2 chat messages.json --keep-turns --later "And snow?" "And hail?"

    Args:
        messages: A JSON list of {"role": ..., "content": ...}, perhaps with "reasoning_content".
        system: The system message of a chat without a file.
        span: What is steered to: system, turn:2 (the second message beside the system's),
            reasoning:2 (its reasoning), or phrase:TEXT (a text that occurs once).
        template: Arguments of the chat template as JSON, such as '{"enable_thinking": false}'; also
            tools and documents.
        later: The user's later messages after those of the file, one after each answer.
        keep_turns: Go on from the cached keys and values of earlier turns; otherwise every turn
            reads the whole chat again, as text.
        marks: Read marks such as "(Be brief:3)" in the system message: the number is a factor on
            the odds of the attention on the marked words. Marks take the place of other biases.
        model: A model with a chat template: a name of `lapa2 models`, a hub id, a folder or a GGUF
            file.
        length: Tokens of a continuation, at most.
        samples: Continuations.
        seed: Seed of the random streams.
        top_k: How many of the likeliest tokens are kept; 1 is greedy. Temperature is 1.
        eos: An end token stops the text, is kept as any other, or is never drawn (block).
        as_json: Print JSON; without a file a line for each answer.
    """
    arguments = _template_arguments(template)
    sampling = {"length": length, "seed": seed, "top_k": top_k, "eos": eos}
    if messages is None:
        if later or keep_turns or samples != 1:
            raise MethodError(
                "--later, --keep-turns and --samples are for the chat of a file; give its messages,"
                " or leave them out"
            )
        first: list[dict[str, Any]]
        first = [{"role": "system", "content": SYSTEM if system is None else system}]
        marked_text = None
        if marks:
            first, marked_text = _read_marks(first, span, augmentation)
        loaded = computing.load(model)
        augmentation.check(loaded)
        LiveChat(loaded, first, span, arguments, augmentation, sampling, as_json, marked_text).run()
        return
    if system is not None:
        raise LayoutError(
            f"--system is for a chat without a file, and {messages} is read as a file of messages;"
            " leave out one of them, and give a model by --model"
        )
    try:
        chat_messages = parse_json(read_text(messages))
    except (OSError, ValueError) as error:
        raise LayoutError(f"cannot read {messages} as JSON: {error}") from None
    if not isinstance(chat_messages, list) or not all(
        isinstance(message, dict) for message in chat_messages
    ):
        raise LayoutError(f'{messages} should be a list of {{"role": ..., "content": ...}}')
    marked_text = None
    if marks:
        chat_messages, marked_text = _read_marks(chat_messages, span, augmentation)
    import numpy as np

    from lapa2_interp.attention.tables import select_layer_type
    from lapa2_interp.bias.find_spans import rules_of_marks
    from lapa2_interp.bias.layout import Layout
    from lapa2_interp.generation.resolve import cell_of
    from lapa2_interp.methods.chat import chat_task
    from lapa2_interp.models.load import load_tokenizer
    from lapa2_interp.runs.generate import make_cells

    tokenizer = load_tokenizer(model, computing.trust_remote_code)
    layout = Layout.of_chat(tokenizer, chat_messages, span=span, template=arguments)
    if marked_text is None:
        rules = augmentation.build(0.5)
    else:
        rules = rules_of_marks(marked_text, layout, tokenizer)
    task = chat_task(chat_messages, span, arguments, later=later or ())
    loaded = computing.load(model)
    augmentation.check(loaded)
    cell = cell_of(
        loaded,
        method={"name": "chat", "keep_turns": keep_turns},
        task=task,
        augmentation=rules or "none",
        samples=samples,
        trace="pooled",
        **sampling,
    )
    run = make_cells(loaded, [cell])
    made = run.texts()
    trace = run.trace(cell.key)
    assert trace is not None
    by_sample = select_layer_type(trace, "prefix")[0]
    turns = trace["turn"].to_numpy() if later else np.ones(len(made), int)
    # By turn; NaN once all its answers have ended.
    means = [by_sample[turns == turn].mean("sample").to_numpy() for turn in np.unique(turns)]
    attention = [[float(mass) for mass in masses if mass == mass] for masses in means]
    span_tokens = layout.tokens[slice(*layout.prefix)]
    if as_json:
        rounded = [[round(mass, 6) for mass in masses] for masses in attention]
        facts = {
            "span": {"slots": list(layout.prefix), "tokens": span_tokens},
            "augmentation": [rule.model_dump(mode="json") for rule in rules],
            "texts": made["continuation"].tolist(),
            "tokens": [list(map(int, tokens)) for tokens in made["tokens"]],
            **({"turns": turns.tolist()} if later else {}),
            "attention": rounded if later else rounded[0],
        }
        print(json.dumps(facts, indent=1, ensure_ascii=False))
        return
    print(f"span {list(layout.prefix)} of {len(layout)} tokens: {span_tokens}")
    print(f"augmentation {' + '.join(rule.label for rule in rules) or 'none'}")
    for turn, text in zip(turns, made["continuation"], strict=True):
        print(f"---{f' turn {turn}' * bool(later)}\n{text}")
    print("---\nattention on the span, mean over layers and heads")
    for turn, masses in enumerate(attention, start=1):
        if later:
            print(f"turn {turn}")
        steps = [0, *(2**i for i in range(20) if 2**i < len(masses)), len(masses) - 1]
        for step in dict.fromkeys(steps):
            print(f"step {step:>5}  {masses[step]:.4f}")


def _read_marks(
    messages: list[dict[str, Any]], span: str, augmentation: AugmentationOptions
) -> tuple[list[dict[str, Any]], MarkedText | None]:
    """The messages without the marks of the system message, and these marks.

    Raises:
        LayoutError: A mark is not as it should be, or there is another bias beside marks.
    """
    from lapa2_interp.bias.marked_text import problem_of_other_bias, without_marks

    plain, text = without_marks(messages)
    named = [
        f"--{name}"
        for name in ("augmentation", "alpha", "card")
        if getattr(augmentation, name) is not None
    ]
    named += ["--span"] * (span != "system")
    if text is not None and named:
        raise LayoutError(problem_of_other_bias(named, "--marks"))
    return plain, text


def _template_arguments(text: str) -> dict[str, Any]:
    """Arguments of a chat template.

    Raises:
        LayoutError: They are no JSON object.
    """
    try:
        return parse_object(text)
    except ValueError as error:
        raise LayoutError(
            '--template should be a JSON object such as {"enable_thinking": false}, found'
            f" {text[:80]!r}: {error}"
        ) from None
