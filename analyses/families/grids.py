"""The grids of analyses/families: what a model makes in each stage of analyses/families/run.sh.

    python analyses/families/grids.py layers smollm2-135m --models FOLDER

writes made/smollm2-135m/layers.toml in the current folder, from which run.sh works. Stages:
*layers* chooses the layer of activation addition, *tune* the strength of every arm, *test* has the
texts that are judged, *first-token* and *more* have arms of one model alone. The heads of the
model's cards, layers and strengths come from the tables that analyses/families/analyse.py wrote
after the stage before. A stage that has nothing left to make writes no grid. *cards* writes none
either: it prints how many heads a card has, on how many prompts they are chosen, how many cards
there are, and what loads the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analyses.heads.equal_attention import listed
from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from lapa2_interp import load_model
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.edits import Heads
from lapa2_interp.circuits.prefix_attention import alpha_at_prefix_attention, mean_prefix_attention
from lapa2_interp.circuits.selection import random_heads
from lapa2_interp.errors import RunError
from lapa2_interp.files import write_text

OUT = FIGURES / "families"
STAGES = ("cards", "layers", "tune", "test", "first-token", "more")
MADE = Path("made")
"""What the stages make: a folder for each model."""
NO_BIAS, HALF, ALL, CHOSEN = "no bias", "all heads at 1/2", "all heads", "chosen heads"
RANDOM, OPPOSING, ADDITION = "random heads", "chosen heads, opposing down", "activation addition"
EQUAL = "all heads, equal attention"
"""With as much attention on the prefix as the chosen heads give it."""
COOL = ", temperature 0.8"
"""The end of the names of two arms."""
SPARED = "chosen heads, first token spared"
"""A bias on all tokens of the prefix but its first."""
LAYER_STRENGTHS = (1.5, 4.0)
"""Strengths of activation addition by which its layer is chosen."""
FIRST_STRENGTHS = {
    ALL: (0.5, 1.0),
    CHOSEN: (1.0, 2.5),
    RANDOM: (1.0, 2.5),
    OPPOSING: (1.0, 2.5),
    ADDITION: LAYER_STRENGTHS,
}
"""Strengths that are tried first, by arm."""
COST, HIGH_COST = 1.25, 1.6
"""The perplexity to which strengths are tuned, as a multiple of that of no bias; and the largest of
a weakest strength from which one is interpolated."""
REPEATS = 0.75
"""A strength that costs less than this share of a weaker one makes texts that repeat themselves."""
ROUNDS = 3
"""The rounds of tuning: in the second and third, strengths are doubled or halved."""


class Card(NamedTuple):
    """Chosen heads, and as many that work against the prefix."""

    chosen: Heads
    opposing: Heads


@dataclass(frozen=True)
class Studied:
    """A model of the study.

    Attributes:
        judge: The model of another family whose perplexity is the cost.
        shape: Layers, and heads of each.
        heads: The number of chosen heads, 9 % of all.
        layers: Layers that are tried for activation addition: 1/3, 1/2, 2/3 and 5/6 of all. One
            alone is taken without a trial.
        arms: Those that are tuned, besides no bias.
        prompts: Prompts on which heads are chosen, for each card.
        cards: Sets of heads, each chosen on its own prompts.
        tested: Prompts of the test, for each card.
    """

    judge: str
    shape: tuple[int, int]
    heads: int
    layers: tuple[int, ...]
    arms: tuple[str, ...] = (ALL, CHOSEN, RANDOM, OPPOSING, ADDITION)
    prompts: int = 64
    cards: int = 5
    tested: int = 80

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the cards, from 1."""
        return tuple(range(1, self.cards + 1))

    def card_of(self, prompt: int) -> int:
        """The card of a prompt, by its number in a file."""
        return prompt % self.cards or self.cards


GEMMA, SMOLLM2 = "gemma-3-270m", "smollm2-135m"
QWEN, LARGE_QWEN = "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"
MODELS: Mapping[str, Studied] = {
    SMOLLM2: Studied(GEMMA, (30, 9), 24, (10, 15, 20, 25)),
    QWEN: Studied(GEMMA, (24, 14), 30, (8, 12, 16, 20)),
    GEMMA: Studied(SMOLLM2, (18, 4), 6, (6, 9, 12, 15)),
    LARGE_QWEN: Studied(
        GEMMA,
        (28, 12),
        30,
        (23,),
        (CHOSEN, ADDITION),
        32,
        cards=2,
        tested=200,
    ),
}
"""In the order in which they run."""


def main() -> None:
    """Write the grid of a stage."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--tables", type=Path, default=OUT, help="of the stages before")
    options = parser.parse_args()
    path = path_of(options.model, options.models)
    if options.stage == "cards":
        studied = MODELS[options.model]
        print(studied.heads, studied.prompts, studied.cards, path)
        return
    cards = cards_of(options.model, options.tables)
    blocks = {
        "layers": lambda: layer_blocks(options.model),
        "tune": lambda: tune_blocks(options.model, cards[1], options.tables),
        "test": lambda: test_blocks(options.model, cards, options.tables),
        "first-token": lambda: first_token_blocks(options.model, cards, options.tables),
        "more": lambda: more_blocks(options.model, cards, options.tables, path),
    }[options.stage]()
    file = MADE / options.model / f"{options.stage}.toml"
    file.unlink(missing_ok=True)
    if blocks:
        header = HEADER.format(stage=options.stage, model=path)
        write_text(file, "\n".join([header, *blocks]))


HEADER = """description = "Three families, four sizes: {stage}"
model = "{model}"
model_class = "TransformersModel"
dtype = "bfloat16"
task = "sentiment"
length = 64
samples = 1
eos = "block"
trace = "pooled"
max_rows = 80
"""


def cards_of(model: str, tables: Path) -> dict[int, Card]:
    """The cards of a model by their numbers.

    Raises:
        RunError: The stage `cards` was not analysed.
    """
    file = tables / "heads.csv"
    table = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=["model", "card", "kind"])
    own = table[table["model"] == model]
    numbers = MODELS[model].numbers
    if set(own["card"]) != set(numbers):
        raise RunError(f"{file} has no heads of {model}; run analyse.py cards {model}")
    heads = {
        key: tuple(zip(of_kind["layer"], of_kind["head"], strict=True))
        for key, of_kind in own.groupby(["card", "kind"], sort=False)
    }
    return {card: Card(heads[card, "chosen"], heads[card, "opposing"]) for card in numbers}


def path_of(model: str, models: Path) -> str:
    """What loads a model: the bundled one by its name, the others from a folder or a GGUF file."""
    if model == SMOLLM2:
        return model
    folder = models / model
    return str(folder if folder.is_dir() else folder.with_name(f"{model}.gguf"))


def block(file: str, n: int, arms: Mapping[str, str], settings: str = "") -> str:
    """A block of a grid with biases; an arm is a label and recipes."""
    rows = [f'    {{ recipe = "{recipe}", label = "{label}" }},' for label, recipe in arms.items()]
    return "\n".join(
        [
            *opening(file, n, settings),
            HARD.format(name="prefix"),
            "augmentation = [",
            *rows,
            "]",
            "",
        ]
    )


def addition_block(file: str, n: int, texts: str, tried: list[tuple[int, float]]) -> str:
    """A block of activation addition behind the prefix.

    Args:
        texts: The file of texts over which the vector is a mean.
        tried: Layers and strengths.
    """
    rows = [
        f'    {{ name = "caa", with_prefix = true, texts = "{texts}", layers = {layer},'
        f" strength = {strength} }},"
        for layer, strength in tried
    ]
    return "\n".join([*opening(file, n), "method = [", *rows, "]", 'augmentation = "none"', ""])


HARD = 'method = {{ name = "{name}", prefixes = "hard" }}'


def opening(file: str, n: int, settings: str = "") -> list[str]:
    """The first lines of a block."""
    what = "neutral ones of DExperts; `make steering-prompts`"
    prompts = f'prompts = {{ file = "{file}", n = {n}, what = "{what}" }}'
    return ["[[block]]", prompts, *([settings] if settings else [])]


def recipe_of(arm: str, model: str, card: Card, strength: float, seed: int) -> str:
    """The bias of an arm as recipes.

    Args:
        seed: Of the draw of random heads.
    """
    layers, n_heads = MODELS[model].shape
    every_head = tuple((layer, head) for layer in range(layers) for head in range(n_heads))
    where = {
        CHOSEN: f"heads={listed(card.chosen)},",
        OPPOSING: f"heads={listed(card.chosen)},",
        SPARED: f"heads={listed(card.chosen)},tokens=1/2,",
        RANDOM: f"heads={listed(random_heads(card.chosen, every_head, seed))},",
    }.get(arm, "")
    bias = f"lapa2:{where}alpha={strength:.4f}"
    if arm == OPPOSING:
        bias += f" + lapa2:law=scale,heads={listed(card.opposing)},alpha={-2 * strength:.4f}"
    return bias


def layer_blocks(model: str) -> list[str]:
    """No bias, and activation addition in four layers, on the first eight prompts of each card;
    none where one layer alone is tried."""
    if len(MODELS[model].layers) == 1:
        return []
    texts = [
        line
        for card in MODELS[model].numbers
        for line in selection_file(card).read_text("utf-8").splitlines()[:8]
    ]
    file = Path("bases/families-layers.txt")
    write_text(file, "".join(f"{line}\n" for line in texts))
    tried = [(layer, strength) for layer in MODELS[model].layers for strength in LAYER_STRENGTHS]
    return [
        block(str(file), len(texts), {NO_BIAS: "none"}),
        addition_block(str(file), len(texts), str(file), tried),
    ]


def selection_file(card: int) -> Path:
    """The prompts of a card."""
    return Path(f"bases/families-select-{card}.txt")


def tune_blocks(model: str, card: Card, tables: Path) -> list[str]:
    """The strengths that are tried next, with the first card; none where all arms are tuned."""
    file = "bases/families-tune.txt"
    tried = strengths(tables, model)
    arms, added = {}, []
    for arm in MODELS[model].arms:
        for strength in next_strengths(FIRST_STRENGTHS[arm], tried[tried["arm"] == arm]):
            if arm == ADDITION:
                added.append((chosen_layer(tables, model), strength))
            else:
                arms[f"{arm} {strength:g}"] = recipe_of(arm, model, card, strength, seed=1)
    if not tried.empty and not arms and not added:
        return []
    blocks = [block(file, 60, {NO_BIAS: "none", **arms})]
    if added:
        blocks.append(addition_block(file, 60, str(selection_file(1)), added))
    return blocks


def strengths(tables: Path, model: str) -> pd.DataFrame:
    """The strengths of a model that were tried: arm, strength, cost."""
    file = tables / "strengths.csv"
    if not file.exists():
        return pd.DataFrame(columns=["arm", "strength", "cost", "tuned"])
    table = pd.read_csv(file)
    return table[table["model"] == model]


def next_strengths(first: tuple[float, ...], tried: pd.DataFrame) -> tuple[float, ...]:
    """The strengths of an arm to try next, by those that were tried: the first ones, then twice the
    largest where no cost reaches the wanted one, or half of the smallest where that costs far too
    much. None is tried above one at which texts repeat themselves."""
    own = tried[~tried["tuned"].astype(bool)].sort_values("strength")
    if own.empty:
        return first
    if len(own) >= len(first) + ROUNDS - 1:
        return ()
    if own["cost"].max() < COST:
        repeats = own["cost"].iloc[-1] < REPEATS * own["cost"].max()
        return () if repeats else (2 * own["strength"].iloc[-1],)
    if own["cost"].iloc[0] > HIGH_COST:
        return (own["strength"].iloc[0] / 2,)
    return ()


def chosen_layer(tables: Path, model: str) -> int:
    """The layer of activation addition.

    Raises:
        RunError: The stage `layers` was not analysed.
    """
    if len(MODELS[model].layers) == 1:
        return MODELS[model].layers[0]
    file = tables / "layers.csv"
    table = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=["model", "chosen"])
    own = table[(table["model"] == model) & table["chosen"].astype(bool)]
    if len(own) != 1:
        raise RunError(f"{file} has no chosen layer of {model}; run analyse.py layers {model}")
    return int(own["layer"].iloc[0])


def tuned_strengths(tables: Path, model: str) -> dict[str, float]:
    """The strength of every arm.

    Raises:
        RunError: The stage `tune` was not analysed.
    """
    table = strengths(tables, model)
    own = table[table["tuned"].astype(bool)].set_index("arm")["strength"].to_dict()
    if missing := [arm for arm in MODELS[model].arms if arm not in own]:
        raise RunError(f"{', '.join(missing)} of {model} not tuned; run analyse.py tune {model}")
    return own


def test_blocks(model: str, cards: Mapping[int, Card], tables: Path) -> list[str]:
    """All arms, a block for each card: prompt i takes card i mod 5."""
    own, layer = tuned_strengths(tables, model), chosen_layer(tables, model)
    blocks = []
    for card, heads in cards.items():
        arms = {NO_BIAS: "none"}
        if ALL in own:
            arms[HALF] = "lapa2:alpha=0.5"
        for arm in MODELS[model].arms:
            if arm != ADDITION:
                name = arm if arm == ALL else f"{arm} {card}"
                arms[name] = recipe_of(arm, model, heads, own[arm], seed=card)
        file, n = card_prompts(model, card)
        blocks.append(block(file, n, arms))
        texts = str(selection_file(card))
        blocks.append(addition_block(file, n, texts, [(layer, round(own[ADDITION], 4))]))
    return blocks


def card_prompts(model: str, card: int) -> tuple[str, int]:
    """The file of the test prompts that take a card, and how many are tested."""
    studied, lines = MODELS[model], Path("bases/families.txt").read_text("utf-8").splitlines()
    taken = [line for i, line in enumerate(lines) if studied.card_of(i) == card]
    file = MADE / model / f"prompts-{card}.txt"
    write_text(file, "".join(f"{line}\n" for line in taken))
    return str(file), studied.tested


def first_token_blocks(model: str, cards: Mapping[int, Card], tables: Path) -> list[str]:
    """In the small Qwen: the chosen heads, without a bias on the first token of all."""
    if model != QWEN:
        return []
    alpha = tuned_strengths(tables, model)[CHOSEN]
    return [
        block(
            *card_prompts(model, card),
            {f"{SPARED} {card}": recipe_of(SPARED, model, heads, alpha, seed=card)},
        )
        for card, heads in cards.items()
    ]


def more_blocks(model: str, cards: Mapping[int, Card], tables: Path, place: str) -> list[str]:
    """In the small Qwen: temperature 0.8 without and with the chosen heads; and all heads with as
    much attention on the prefix as the chosen ones give it."""
    if model != QWEN:
        return []
    own, blocks = tuned_strengths(tables, model), []
    loaded = load_model(place, model_class="TransformersModel")
    for card, heads in cards.items():
        file, n = card_prompts(model, card)
        chosen = f"{CHOSEN} {card}"
        bias = recipe_of(CHOSEN, model, heads, own[CHOSEN], seed=card)
        blocks.append(block(file, n, {NO_BIAS: "none", chosen: bias}, "temperature = 0.8"))
        prompts = selection_file(card).read_text("utf-8").splitlines()[:8]
        texts = ContrastSet.of(loaded, "sentiment", prompts=prompts, tokens=48, seed=2)
        rule = Augmentation(alpha=own[CHOSEN], heads=heads.chosen)
        goal = mean_prefix_attention(loaded, texts, rule)
        alpha = alpha_at_prefix_attention(loaded, texts, goal, Augmentation(alpha=1))
        blocks.append(block(file, n, {f"equal attention {card}": f"lapa2:alpha={alpha:.4f}"}))
    return blocks


if __name__ == "__main__":
    main()
