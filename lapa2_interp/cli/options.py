"""Options that commands share, and how their texts are read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, make_dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from cyclopts import Group, Parameter

from lapa2_interp._util.values import read_value, takes_numbers
from lapa2_interp.bias.text_start import AUTO_START
from lapa2_interp.cli.texts import OPTION_NAMES, method_parameters
from lapa2_interp.generation.settings import CellSettings
from lapa2_interp.models.machine import Attn, DtypeOrAuto, ModelClass

if TYPE_CHECKING:
    from lapa2_interp.bias.augmentation import Augmentation
    from lapa2_interp.circuits.selection import Selection
    from lapa2_interp.models.facts import Model

Several = Parameter(consume_multiple=True)
Unshown = Parameter(show_default=False)
AsJson = Annotated[bool, Parameter(name="--json")]
Changes = Annotated[tuple[str, ...], Parameter(name=OPTION_NAMES["changes"], show_default=False)]

BIAS = Group("Bias", sort_key=2)
COMPUTING = Group("Computing", sort_key=5)
GROUPS = {
    Group("Texts", sort_key=1): (
        "model", "prompts", "attribute", "method", "parameters", "task", "prefix", "length",
        "samples",
    ),
    Group("Sampling", sort_key=3): (
        "seed", "top_k", "temperature", "eos", "ban_words", "doubled_bos", "start",
    ),
    Group("Recording", sort_key=4): ("trace", "patterns", "label"),
    COMPUTING: ("dtype", "model_class", "max_rows"),
}  # fmt: skip
"""Groups of the options that are settings of a cell; `AugmentationOptions` has the bias."""
OTHER_NAMES = OPTION_NAMES | {"prompts": ("--prompts", "--prompt")}


def _option(name: str, group: Group) -> tuple[str, Any, Any]:
    """The option of a setting: its name, type, and default. Values are texts, which `CellSettings`
    checks: the sentence about a wrong one is that of Python and grids."""
    setting = CellSettings.model_fields[name]
    value_type: Any = bool if setting.annotation is bool else str
    default: Any = setting.default if value_type is bool else str(setting.default or "")
    if name in OTHER_NAMES:
        value_type, default = tuple[str, ...], ()
    choices = DtypeOrAuto if name == "dtype" else setting.annotation
    choices_text = f" [choices: {', '.join(names)}]" if (names := _choices(choices)) else ""
    parameter = Parameter(
        name=OTHER_NAMES.get(name),
        help=f"{setting.description}{choices_text}",
        group=group,
        show_default=value_type is str and bool(default),
        consume_multiple=name == "prompts",
    )
    return name, Annotated[value_type, parameter], field(default=default)


def _choices(annotation: Any) -> list[str]:
    names: list[str] = []
    for choice in get_args(annotation) if get_origin(annotation) is Literal else ():
        names += _choices(choice) or [str(choice)]
    return names


SettingOptions: Any = make_dataclass(
    "SettingOptions",
    [_option(name, group) for group, names in GROUPS.items() for name in names],
    frozen=True,
    namespace={"__module__": __name__},  # cyclopts looks into no class of the standard library
)
"""The settings of a cell as options of the command line, made from `CellSettings`."""


def given_settings(options: Any) -> dict[str, Any]:
    """Settings by name, of `SettingOptions`; those that are not given are left out."""
    values = {}
    for option in fields_of(options):
        value = getattr(options, option.name)
        if value != option.default:
            is_number = takes_numbers(CellSettings.model_fields[option.name].annotation)
            as_number = is_number and isinstance(value, str)  # and no flag, which is read already
            values[option.name] = read_value(value) if as_number else value
    prompts = values.get("prompts", ())
    if len(prompts) == 1 and (prompts[0].isdigit() or prompts[0] == "task"):
        values["prompts"] = read_value(prompts[0])
    method = values.get("method", CellSettings.model_fields["method"].default)
    return values | {"parameters": method_parameters(method, values.get("parameters", ()))}


def name_of_setting(option: str) -> str:
    """The setting that an option is of; the option itself, as a name, where it is of none."""
    for name, options in OTHER_NAMES.items():
        if option in options:
            return name
    return option.lstrip("-").replace("-", "_")


@Parameter(name="*", group=COMPUTING)
@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded and computes."""

    dtype: DtypeOrAuto = "float32"
    """Precision of weights and computation; auto is bfloat16 or float32, whichever this machine
    computes faster."""
    device: str | None = None
    """cpu, cuda, cuda:1; CUDA when there is one, by default."""
    model_class: ModelClass = "TransformerBridge"
    """HookedTransformer needs transformer-lens 3.9; TransformersModel works without hooks, through
    transformers' attention interface."""
    attn: Attn = "auto"
    """Of a TransformersModel: fused reads passes of several tokens without the matrix of attention
    scores, matrix forms it, auto decides by their size."""
    start: str = AUTO_START
    """What plain text starts with: auto, what the model's family reads; none; usual, the token that
    the tokenizer names for it; or a token's text. `lapa2 probe` measures it."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""

    def parameters(self) -> dict[str, Any]:
        """Arguments of `load_model`; a note is printed where the precision is slow here."""
        from lapa2_interp.models.machine import print_if_slow, resolve_dtype

        dtype = resolve_dtype(self.dtype, self.device)
        print_if_slow(dtype, self.device)
        return asdict(self) | {"dtype": dtype}

    def load(self, name: str) -> Model:
        """The model."""
        from lapa2_interp.models.load import load_model

        return load_model(name, **self.parameters())


@Parameter(name="*")
@dataclass(frozen=True)
class ContrastOptions:
    """The texts behind opposite prefixes in which circuits are looked for."""

    task: str = "sentiment"
    """A task of two attributes or more whose prefixes have equal lengths in tokens."""
    attribute: str | None = None
    """The target; by default the task's first."""
    prefixes: str = "hard"
    """hard, or soft ones: mle, contrastive, or a set's folder."""
    prompt: Annotated[tuple[str, ...], Several, Unshown] = ()
    """Prompts, instead of the task's. Fewer than 8 give numbers and no claims; better are 32."""
    prompts: Path | None = None
    """A file of prompts, as `lapa2 generate` takes it: plain lines, or .jsonl with a field
    "prompt"."""
    tokens: int = 32
    """Tokens of each text that are scored."""
    samples: int = 1
    """Texts of each prompt."""
    seed: int = 1
    """Seed of the texts and of random heads."""

    def parameters(self) -> dict[str, Any]:
        """Arguments of `run_study` and `ContrastSet.of`, but `task`."""
        from lapa2_interp.tasks.prompts import as_prompts

        prompts: list[str | Path] = [*self.prompt, *([self.prompts] if self.prompts else [])]
        return {
            "attribute": self.attribute,
            "prefixes": self.prefixes,
            "prompts": as_prompts(prompts) if prompts else None,
            "tokens": self.tokens,
            "samples": self.samples,
            "seed": self.seed,
        }


@Parameter(name="*", group=BIAS)
@dataclass(frozen=True)
class AugmentationOptions:
    """The bias, as recipes, its strength, and heads that were chosen."""

    augmentation: Annotated[
        str | None, Parameter(help=CellSettings.model_fields["augmentation"].description)
    ] = None
    alpha: Annotated[
        float | None, Parameter(help=CellSettings.model_fields["alpha"].description)
    ] = None
    card: Path | None = None
    """A card of `lapa2 steer`, `select` or `learn`, which gives --augmentation heads, or strengths
    of heads; alpha if it was tuned; and tokens of the prefix where the recipe has no span. In
    `generate` it also gives pro_aug of the method that it was decided for."""

    def parameters(self, method: str) -> dict[str, bool]:
        """Parameters of a method that the card decides."""
        card = self._loaded_card()
        return {} if card is None else card.parameters(method)

    def _loaded_card(self) -> Selection | None:
        if self.card is None:
            return None
        from lapa2_interp.circuits.selection import Selection

        return Selection.load(self.card)

    def build(self, default_alpha: float) -> tuple[Augmentation, ...]:
        """The augmentations, none at alpha 0.

        Args:
            default_alpha: Alpha where neither an option, the card nor a recipe names one.
        """
        from lapa2_interp.bias.augmentation import active_augmentations
        from lapa2_interp.bias.recipes import parse_recipes

        card = self._loaded_card()
        text = self.augmentation
        if text == "none":
            return ()
        beside = {} if card is None else card.recipe_parameters()
        if text in (None, "paper", "released"):  # without a label of its own
            alpha = self.alpha
            if alpha is None:
                alpha = beside.pop("alpha", default_alpha)
            recipe = f"lapa2:profile={text or 'paper'}"
            return active_augmentations(tuple(parse_recipes(recipe, alpha, beside)))
        named = parse_recipes(text, self.alpha, beside)
        return named if active_augmentations(named) else ()

    def check(self, model: Model) -> None:
        """Refuse a card that was made in another model.

        Raises:
            CircuitError: Other weights.
        """
        if (card := self._loaded_card()) is not None:
            card.check(model)
