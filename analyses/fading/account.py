"""A full account of the fade: figures/fading/account (analyses/fading/README.md has the plan).

    make steering-prompts
    python analyses/fading/account.py --prompts steering-prompts.txt --wikitext FILE --work FOLDER

Repeat it after a stop, and it resumes. Parts (--parts):

- full: sentiment, 64 prompts, fillers of 64, 256 and 1,024 tokens of texts without a prefix.
- steered, wikitext, newlines: the same scored tokens after 256 tokens of another filler: what the
  model writes after the target's prefix; articles of WikiText (--wikitext, lines, .xz); newlines.
- on-policy: filler and scored tokens are what the model writes after the target's prefix.
- wording: other prefixes.
- topic: four attributes; lex is small there, so js counts.
- gemma, qwen-0.5b, qwen-1.5b: other models (--models FOLDER, that of `make models`), which read 32
  prompts (the Qwens 16, for time) after 256 tokens, and Gemma 3 270M after 64, too. For the Qwens a
  space stands before a prompt, since their tokenizer joins the colon with a word.

Into --out go account.csv with the shares, fades.csv with the values near and far, prompts.parquet
with the value of every prompt in every state, and account.png. Beside attention, fades.csv has its
multiple of l_pre / l, what equal scores give (Proposition 1; l without BOS).
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.families.grids import GEMMA, LARGE_QWEN, QWEN, SMOLLM2, path_of
from analyses.lab.scripts import ScriptOptions
from lapa2_interp import load_model
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.examples import RAW, write_texts
from lapa2_interp.circuits.fade_account import (
    ATTENTION,
    FAR,
    STATES,
    FadeAccount,
    account_for_fading,
)
from lapa2_interp.circuits.fading import NEAR
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.facts import Model
from lapa2_interp.stats import bounds
from lapa2_interp.table_formats import as_csv, as_text
from lapa2_interp.tasks.task import Task

TOKENS, MIDDLE = 32, 256
FULL = (64, MIDDLE, 1024)
OTHER_FILLERS = ("steered", "wikitext", "newlines")
OF_SMOLLM2 = ("full", *OTHER_FILLERS, "on-policy", "wording", "topic")
OTHER_MODELS = {"gemma": GEMMA, "qwen-0.5b": QWEN, "qwen-1.5b": LARGE_QWEN}
"""By part."""
WORDING = "This text is {attribute}:"
Texts = dict[str, list[list[int]]]
"""Token ids by prompt."""


def main() -> None:
    """Measure the parts, and write their tables."""
    parser = ScriptOptions("A full account of the fade")
    parser.add_argument("--prompts", type=Path, required=True, help="a prompt a line")
    parser.add_argument(
        "--parts", nargs="+", default=OF_SMOLLM2, choices=(*OF_SMOLLM2, *OTHER_MODELS)
    )
    parser.add_argument("--wikitext", type=Path, help="articles, a line each (.xz)")
    parser.add_argument("--models", type=Path, help="the folder of `make models`")
    parser.add_argument("--work", type=Path, required=True, help="folder of unfinished work")
    parser.add_argument("--out", type=Path, default=Path("figures/fading/account"))
    options = parser.parse_args()
    if "wikitext" in options.parts and options.wikitext is None:
        parser.error("part wikitext needs --wikitext")
    if options.models is None and (others := OTHER_MODELS.keys() & set(options.parts)):
        parser.error(f"{', '.join(sorted(others))} need --models")
    prompts = options.prompts.read_text("utf-8").splitlines()[:64]
    loaded = cache(partial(load_model, dtype="float32", model_class="TransformersModel"))
    for part in options.parts:
        name, task, lengths, some = SMOLLM2, load_task("sentiment"), (MIDDLE,), prompts
        if part == "wording":
            task = task.with_prefix(WORDING)
        if part == "topic":
            task = load_task("topic")
        if part == "full":
            lengths = FULL
        if part in OTHER_MODELS:
            name, some = OTHER_MODELS[part], prompts[:32]
        if part == "gemma":
            lengths = FULL[:2]
        if part.startswith("qwen"):
            some = [f" {prompt}" for prompt in some[:16]]
        model = loaded(path_of(name, options.models))
        source = next(iter(task.attributes)) if part == "on-policy" else RAW
        texts = written(model, name, task, source, some, options.work, max(lengths) + TOKENS)
        if part in OTHER_FILLERS:
            filler = fillers(model, name, part, task, some, options)
            texts = {
                prompt: [filler[prompt][0][: MIDDLE - 1] + ids[0][-TOKENS - 1 :]]
                for prompt, ids in texts.items()
            }
        contrast_set = ContrastSet.of(model, task, prompts=some, texts=texts, source=source)
        account = account_for_fading(
            model,
            contrast_set,
            filler=lengths,
            tokens=TOKENS,
            file=options.work / f"{part}.lines",
            batch_size=4 if max(lengths) <= MIDDLE else 1,
        )
        add(part, account, options.out)


def written(
    model: Model, name: str, task: Task, source: str, prompts: list[str], work: Path, tokens: int
) -> Texts:
    """The last `tokens` tokens of texts of one length, which are written once.

    All parts without a prefix read the texts of 1,056 tokens (in other models: of 288).
    """
    longest = max(FULL) + TOKENS if name == SMOLLM2 and source == RAW else MIDDLE + TOKENS
    of_task = "" if source == RAW else f"-{task.name}"
    file = work / f"texts-{name}-{source}{of_task}.json"
    if not file.exists():
        made = write_texts(model, task, source, prompts, tokens=longest)
        write_text(file, json.dumps(made))
    texts = json.loads(file.read_text("utf-8"))
    return {prompt: [texts[prompt][0][-tokens:]] for prompt in prompts}


def fillers(model: Model, name: str, kind: str, task: Task, prompts: list[str], options) -> Texts:
    """Other fillers of at least 255 tokens."""
    if kind == "newlines":
        (newline,) = model.tokenizer("\n", add_special_tokens=False).input_ids
        return {prompt: [[newline] * MIDDLE] for prompt in prompts}
    if kind == "steered":
        target = next(iter(task.attributes))
        return written(model, name, task, target, prompts, options.work, MIDDLE + TOKENS)
    opened: Callable = lzma.open if options.wikitext.suffix == ".xz" else open
    articles: list[list[int]] = []
    with opened(options.wikitext, "rt", encoding="utf-8") as lines:
        for line in lines:
            if len(articles) == len(prompts):
                break
            ids = model.tokenizer(line.strip(), add_special_tokens=False).input_ids
            if len(ids) >= MIDDLE:
                articles.append(list(ids))
    return {prompt: [ids] for prompt, ids in zip(prompts, articles, strict=True)}


def add(part: str, account: FadeAccount, out: Path) -> None:
    """Write a part's rows after those of the others, and the figure of `full`."""
    fades = pd.concat([account.fades(), pd.DataFrame(of_equal_scores(account))])
    for file, rows in (("account.csv", account.frame()), ("fades.csv", fades)):
        write_text(out / file, as_csv(_beside(part, rows, out / file), 7))
    with atomic_write(out / "prompts.parquet") as fresh:
        rows = _beside(part, account.by_prompt(), out / "prompts.parquet")
        rows.to_parquet(fresh, index=False, compression="zstd")
    if part == "full":
        account.plot().savefig(out / "account.png", dpi=200)
    shown = account.frame().pivot(index="name", columns=["measure", "filler"], values="share")
    print(f"{part}\n{as_text(shown.reset_index(), '.2f')}")


def of_equal_scores(account: FadeAccount) -> Iterator[dict[str, object]]:
    """The attention as a multiple of l_pre / l, near and far, by filler length."""
    examples = account.contrast_set.examples
    for filler in dict.fromkeys(length for length, _ in account.groups):
        row: dict[str, object] = {"filler": filler, "measure": "of equal scores"}
        for name, state, more in (("near", STATES[0], NEAR), ("far", FAR, filler)):
            attention = account.values[filler, ATTENTION, state]
            # The first scored query is the last token of the filler.
            steps = np.arange(more, more + account.tokens)
            equal = [
                np.mean([layout.prefix.size / (len(layout) - layout.bos.size + steps)])
                for layout in (example.layouts[0] for example in examples)
            ]
            ratio = account.contrast_set.by_prompt(attention / np.array(equal))
            row |= {name: ratio.mean()}
            row |= dict(zip((f"{name}_low", f"{name}_high"), bounds(ratio), strict=True))
        yield row | {"prompts": len(ratio)}


def _beside(part: str, rows: pd.DataFrame, file: Path) -> pd.DataFrame:
    """These rows with those of other parts in the file."""
    rows = rows.assign(part=part)[["part", *rows.columns]]
    if not file.exists():
        return rows
    earlier = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)
    return pd.concat([earlier[earlier["part"] != part], rows], ignore_index=True)


if __name__ == "__main__":
    main()
