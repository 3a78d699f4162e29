"""The commands about circuits: `lapa2 circuits | select | learn | fading`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from lapa2_interp.circuits.settings import (
    FILLER,
    FadingSettings,
    LearnSettings,
    SelectSettings,
    StudySettings,
)
from lapa2_interp.cli.functions import Values, with_options_of
from lapa2_interp.cli.options import ContrastOptions, ModelOptions, Several
from lapa2_interp.commands import command
from lapa2_interp.table_formats import as_text, format_interval, format_number


@with_options_of(StudySettings)
def circuits(
    model: str,
    /,
    *,
    out: Path,
    options: Values,
    placebo: bool = False,
    texts: ContrastOptions = ContrastOptions(),
    computing: ModelOptions = ModelOptions(),
) -> None:
    """Find the heads that carry a task's control, and write a page about them.

    The same texts are read behind opposite prefixes. What a prefix does to the next token is the
    control. How much of it is lost when a head cannot see the prefix is what that head carries.
    Layers, KV heads, heads and tokens of the prefix are knocked out one by one. The best heads are
    also knocked out in other ways, and several at a time, and what heads write is read directly.
    Finished knock-outs are kept: the same command resumes where it stopped. For example

        lapa2 circuits planted --task sentiment --out results/planted
        lapa2 circuits smollm2-135m --task sentiment --out results/circuits

    Args:
        model: A name of `lapa2 models`, a hub id, a folder or a GGUF file. planted has a
            known circuit.
        out: The folder of tables and page (report.html).
        placebo: Also make every map where there is nothing to find: in the same model with random
            weights, and with the attributes of half of the prompts swapped.
    """
    from lapa2_interp.circuits.study import run_study
    from lapa2_interp.files import write_text
    from lapa2_interp.models.untrained import UNTRAINED
    from lapa2_interp.report.study_page import render_study

    loaded = computing.load(model)
    nothing = computing.load(f"{UNTRAINED}{model}") if placebo else None
    study = run_study(loaded, texts.task, out, placebo=nothing, **texts.parameters(), **options)
    page = out / "report.html"
    write_text(page, render_study(study))
    print(f"\n{study.summary()}\n\nwritten: {page}")


@with_options_of(SelectSettings)
def select(
    model: str,
    /,
    *,
    out: Path,
    shipped: bool = False,
    options: Values,
    texts: ContrastOptions = ContrastOptions(),
    computing: ModelOptions = ModelOptions(),
) -> None:
    """Choose the heads and tokens to steer, and write them as a card.

    A head is chosen where its score lies above 0 by its 95 % interval over prompts. What a
    selection is worth must be measured on other prompts: effects of chosen heads are too large on
    those that chose them. `lapa2 generate --card FILE` steers them. For example

        lapa2 select planted --positions auto --out results/planted.json
        lapa2 select smollm2-135m --score slope --prompts neutral.txt \\
            --out results/card.json
        lapa2 select smollm2-135m --shipped --out results/shipped.json

    Args:
        model: A name of `lapa2 models`, a hub id, a folder or a GGUF file.
        out: The card, a JSON file.
        shipped: Choose nothing, and take the heads that ship with the package for these weights and
            this task, with a strength that was tuned.
    """
    from lapa2_interp.circuits import selection
    from lapa2_interp.circuits.contrast_set import ContrastSet
    from lapa2_interp.errors import CircuitError

    file = options.get("file")
    if file is not None and file.resolve() == out.resolve():
        raise CircuitError(f"--file and --out are both {out}; give each a file of its own")
    if shipped and (options or texts != ContrastOptions(task=texts.task)):
        raise CircuitError(
            "--shipped chooses nothing: leave out the options of a choice (beside it stand --task,"
            " --out and how the model is loaded), or leave out --shipped"
        )
    loaded = computing.load(model)
    if shipped:
        chosen = selection.shipped_selection(loaded, texts.task)
    else:
        contrast_set = ContrastSet.of(loaded, texts.task, **texts.parameters())
        chosen = selection.select(loaded, contrast_set, seed=texts.seed, **options)
    chosen.save(out)
    n = len(chosen.heads)
    for i, (layer, head) in enumerate((*chosen.heads, *chosen.suppressors)):
        mean, low, high = chosen.scores[i]
        what = "chosen" if i < n else "works against the prefix"
        print(f"{layer}.{head:<4} {format_interval(mean, low, high, '.4f')}  {what}")
    if chosen.positions is not None:
        print(f"tokens of the prefix: {', '.join(map(str, chosen.positions))}")
    if chosen.screened is not None:
        print(f"{chosen.screened} heads of largest estimate by the gradient were knocked out")
    if chosen.stability is not None:
        print(
            "halves of the prompts agree on the order of heads: Spearman"
            f" {format_number(chosen.stability, '.2f')}"
        )
    if (asked := chosen.prompt) is not None:
        verdict = "strengthen the prompt" if asked.boost else "leave the prompt as it is"
        slope = f"{format_interval(asked.mean, asked.low, asked.high)} {asked.metric} a unit of b"
        print(f"{asked.method}: {verdict}; slope {slope}")
    if chosen.alpha is not None:
        print(f"alpha {chosen.alpha:g}. {chosen.gain}")
    print(f"written: {out}")


@with_options_of(LearnSettings)
def learn(
    model: str,
    /,
    *,
    out: Path,
    prompts: Path | None = None,
    task: str | None = None,
    pairs: Path | None = None,
    prefix: str | None = None,
    tokens: int = 32,
    texts: int | None = None,
    classifiers: Annotated[tuple[str, ...], Several] = (),
    options: Values,
    computing: ModelOptions = ModelOptions(),
) -> None:
    """Learn how strongly the bias acts in each head, from pairs of texts.

    A pair is a wanted and an unwanted text that continue one prompt behind a prefix. Give prompts,
    and the model writes pairs of a task, which the task's classifiers choose. Or give a table of
    pairs. The folder gets a card (card.json) for `lapa2 generate --card`, the pairs, and a
    page (report.html). The same command goes on after a stop. For example

        lapa2 learn smollm2-135m --prompts neutral.txt --out results/learned
        lapa2 learn smollm2-135m --pairs pairs.csv --prefix "Speak of the sea:" \\
            --out results/sea

    Args:
        model: A name of `lapa2 models`, a hub id, a folder or a GGUF file.
        out: A folder for all results.
        prompts: Prompts for which the model writes pairs, 50 or so: a file of lines, or .jsonl with
            a field "prompt".
        task: The task whose prefixes and classifiers make the pairs; by default sentiment.
        pairs: A table of pairs (.csv): prompt, wanted, unwanted. It may have prefix, and text,
            which is fluent text that continues the prompt.
        prefix: The prefix of all pairs of a table that has no column of it.
        tokens: Tokens of a text that the model writes.
        texts: Texts that the model writes for each prompt and attribute, to choose from; by
            default 4.
        classifiers: Classifiers of the attributes, which choose pairs: linear, adapter, a hub id, a
            folder, or a file of `lapa2 scorers train`. By default linear and adapter, for tasks
            that have them.
    """
    from lapa2_interp.circuits.selection import Selection
    from lapa2_interp.report.learning import learn_in_folder

    learned = learn_in_folder(
        computing.load(model), out, prompts=prompts, task=task, pairs=pairs, prefix=prefix,
        tokens=tokens, texts=texts, classifiers=classifiers, **options,
    )  # fmt: skip
    best = learned.best_parts
    print(
        f"{len(learned.frame())} heads with a strength, from {learned.pairs} pairs; on"
        f" {learned.held_out} held-out pairs the log-likelihood ratio rose by"
        f" {best['change']:.2f} nats a text, at a KL of {best['kl']:.4f} nats a token"
    )
    card, steered = out / "card.json", out / "steered"
    first = next(iter(Selection.load(card).task.values()))
    steer = command(
        "generate", model=model, prefix=first, prompt="The lake", card=card, out=steered
    )
    print(f"written: {out / 'report.html'}; to steer: {steer}")


@with_options_of(FadingSettings)
def fading(
    model: str,
    /,
    *,
    out: Path,
    card: Path | None = None,
    account: bool = False,
    options: Values,
    texts: ContrastOptions = ContrastOptions(),
    computing: ModelOptions = ModelOptions(),
) -> None:
    """Ask why control fades: does it come back when the attention on the prefix does?

    The same tokens are scored near the prompt and behind more text. Then every head gets the
    attention on the prefix that it had near, and the other way round. A real model takes
    long: --file keeps what is finished. For example

        lapa2 fading planted --filler 8 64 200 --out results/planted-fading
        lapa2 fading planted --filler 8 64 --account --out results/planted-account
        lapa2 fading smollm2-135m --card card.json --random 5 \\
            --out results/fading

    Args:
        model: A name of `lapa2 models`, a hub id, a folder or a GGUF file. planted and
            planted-gain have known answers.
        out: The folder of tables and figure.
        card: Heads of `lapa2 select`, whose mass is also changed alone.
        account: Instead, divide the fade among four causes, whatever their order: the distance to
            the prefix, the weight that the text in between takes, what it says, and what it knows
            of the prefix. Needs rotary positions.
    """
    from lapa2_interp.circuits.contrast_set import ContrastSet
    from lapa2_interp.circuits.fade_account import account_for_fading
    from lapa2_interp.circuits.fading import VERDICTS, measure_fading
    from lapa2_interp.circuits.selection import Selection
    from lapa2_interp.errors import RunError
    from lapa2_interp.files import result_folder

    file = options.get("file")
    if file is not None and file.resolve().is_relative_to(out.resolve()):
        raise RunError(
            f"--file {file} would be in the new folder --out {out}; give a file beside it, such as"
            f" {out.parent / 'kept.jsonl'}"
        )
    if account:
        alone = {
            "card": card,
            **{name: options.get(name) for name in ("random", "alpha")},
        }
        if clash := [name for name, value in alone.items() if value is not None]:
            raise RunError(f"--account changes all heads, without a bias; leave out --{clash[0]}")
        if texts.prefixes != "hard":
            raise RunError(
                "--account moves prefixes, and the keys of soft ones have fixed positions; found"
                f" --prefixes {texts.prefixes}, give hard"
            )
    loaded = computing.load(model)
    heads = {}
    if card is not None:
        chosen = Selection.load(card)
        chosen.check(loaded)
        heads["selected"] = chosen.heads
    with result_folder(out, finished=lambda folder: (folder / "fading.csv").is_file()) as folder:
        length = max(options.get("filler", FILLER)) + texts.tokens
        contrast_set = ContrastSet.of(loaded, texts.task, **texts.parameters() | {"tokens": length})
        if account:
            divided = account_for_fading(
                loaded, contrast_set, tokens=texts.tokens, seed=texts.seed, **options
            )
            divided.frame().to_csv(folder / "fading.csv", index=False)
            divided.fades().to_csv(folder / "control.csv", index=False)
            divided.by_prompt().to_csv(folder / "prompts.csv", index=False)
            divided.plot().savefig(folder / "fading.png")
            print("shares of the fade")
            print(as_text(divided.frame(), ".3f"))
            print(f"written: {out}")
            return
        fading_result = measure_fading(
            loaded, contrast_set, heads=heads, tokens=texts.tokens, seed=texts.seed, **options
        )
        table = fading_result.frame()
        table.to_csv(folder / "fading.csv", index=False)
        fading_result.fades().to_csv(folder / "control.csv", index=False)
        fading_result.by_prompt().to_csv(folder / "prompts.csv", index=False)
        fading_result.plot().savefig(folder / "fading.png")
    print(f"control ({fading_result.metric}) and its fade, by tokens in between")
    print(as_text(fading_result.fades(), ".4g"))
    print("\nshare of the fade that each bias brings back (removed: that its absence takes)")
    print(as_text(table, ".3f"))
    print(f"\n{fading_result.verdict}: {VERDICTS[fading_result.verdict]}\nwritten: {out}")
