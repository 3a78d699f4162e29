"""Named ways to steer attention: the literature's, ours, and their combinations, as augmentations.

A recipe is a function of a few parameters that gives one or several `Augmentation`s, with its
source and the source of its defaults (`RECIPES`). The augmentations decide a cell's texts; the name
is the label of its arm.

    generate(..., augmentation="instaboost:M=5")   # in Python, as every call with an augmentation
    recipe("instaboost", M=5)                      # the same as augmentations
    --augmentation instaboost:M=5                  # on the command line
    augmentation = ["none", "instaboost:M=5"]      # in a grid

Every recipe also takes `tokens` (positions within the prefix) and each field of `Augmentation`
that it does not fix itself (`Recipe.open_fields`): lapa2 fixes none, so it is every bias. A
`profile` fills only what neither the recipe nor the user names. As text, recipes that act together
are joined by "+" and parameters by ",". In a value "/" stands for "," (`bias.places`), or double
quotes keep both marks:

    lapa2:tokens=1,alpha=1 + lapa2:tokens=2,alpha=0.5     two tokens with a bias each
    instaboost:steps=0:16 + lapa2:steps=16:9999           another control from step 16 on
    lapa2:span="prefix+bos"                               a name that holds a "+"
    lapa2:span=0:2/5:6,law=cut,alpha=1                    several spans; or span="0:2,5:6"

The `source` of each recipe says which parts were checked against published code (read, not run),
and which were written from the formula alone.

Example:
    >>> from lapa2_interp import recipes
    >>> recipes.RECIPES["instaboost"].parameters
    {'M': 3.0}
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lapa2_interp._util.values import check_value, read_value
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.labels import shorten_value
from lapa2_interp.bias.places import FORMS, read_place
from lapa2_interp.errors import AugmentationError, unknown_choice

DEFAULTS = ("phase",)
"""Fields that recipes set and do not fix: their publications differ in them."""
PLACES = {"tokens": "positions"} | {
    name: name for name in ("span", "layers", "heads", "strengths", "steps")
}
"""Parameters that are texts of `bias.places`, by its names for their forms."""
Fields = dict[str, Any]
"""Fields of an augmentation."""


class LabeledAugmentations(tuple[Augmentation, ...]):
    """Augmentations that act together, with the recipes that gave them.

    Attributes:
        label: The recipes as text, long lists shortened; the label of a cell's arm.
    """

    label: str

    @classmethod
    def of(cls, augmentations: Iterable[Augmentation], label: str) -> LabeledAugmentations:
        """Augmentations with their label."""
        labeled = cls(augmentations)
        labeled.label = label
        return labeled


@dataclass(frozen=True)
class Recipe:
    """One way to steer attention.

    Attributes:
        make: The fields of its augmentations, made from its parameters.
        what: Its effect, in a line.
        source: Its publication, and the part of it that could be checked.
        defaults: The source of its parameters' defaults.
        required: Which of `tokens` and `heads` must be given.
    """

    make: Callable[..., tuple[Fields, ...]]
    what: str
    source: str
    defaults: str
    required: tuple[str, ...] = ()

    @property
    def parameters(self) -> dict[str, Any]:
        """Its own parameters with their defaults."""
        parameters = inspect.signature(self.make).parameters.values()
        return {parameter.name: parameter.default for parameter in parameters}

    @property
    def fixed_fields(self) -> tuple[str, ...]:
        """Fields of `Augmentation` that it decides, beside those that are its own parameters."""
        decided = {name for fields in self.make() for name in fields}
        decided -= {*self.parameters, *DEFAULTS}
        return tuple(name for name in Augmentation.model_fields if name in decided)

    @property
    def open_fields(self) -> tuple[str, ...]:
        """Fields of `Augmentation` that it takes beside its own parameters."""
        decided = {*self.parameters, *self.fixed_fields}
        return tuple(name for name in Augmentation.model_fields if name not in decided)


def _lapa2(alpha: float | int = 0.5) -> tuple[Fields, ...]:
    return ({"alpha": alpha},)


def _linear(alpha: float | int = 0.5) -> tuple[Fields, ...]:
    return ({"alpha": alpha, "law": "linear"},)


def _sqrt(alpha: float | int = 0.5) -> tuple[Fields, ...]:
    return ({"alpha": alpha, "law": "sqrt"},)


def _constant(alpha: float | int = 0.5, l0: float | int = 128.0) -> tuple[Fields, ...]:
    return ({"alpha": alpha, "law": "constant", "l0": l0},)


def _released(alpha: float | int = 2.0) -> tuple[Fields, ...]:
    return ({"alpha": alpha, "profile": "released"},)


def _instaboost(M: float | int = 3.0) -> tuple[Fields, ...]:
    return ({"alpha": _log_of_positive(M, "M"), "law": "scale", "phase": "everywhere"},)


def _pasta(alpha: float | int = 0.01) -> tuple[Fields, ...]:
    less = _log_of_positive(alpha, "alpha")
    everywhere = {"law": "scale", "phase": "everywhere"}
    return (
        {"alpha": less, "span": "input", **everywhere},
        {"alpha": -less, "span": "prefix", **everywhere},
    )


def _spotlight(tau: float | int = 0.2) -> tuple[Fields, ...]:
    (per_head,) = _spotlight_per_head(tau)
    return ({**per_head, "pooled": True},)


def _spotlight_per_head(tau: float | int = 0.2) -> tuple[Fields, ...]:
    return ({"alpha": 1, "law": "ratio", "tau": tau, "phase": "everywhere"},)


def _split_softmax(k: float | int = 0.75) -> tuple[Fields, ...]:
    if _check_positive(k, "k") > 1:
        raise AugmentationError(f"k of split-softmax should be above 0 and at most 1, found {k:g}")
    return ({"alpha": 1 / k - 1, "law": "power", "phase": "after_span"},)


def _set_point(tau: float | int = 0.2, floor: bool = True) -> tuple[Fields, ...]:
    return ({"alpha": 1, "law": "target", "tau": tau, "floor": floor},)


def _key_scale(beta: float | int = 100.0) -> tuple[Fields, ...]:
    return ({"alpha": beta - 1, "law": "multiply", "phase": "predicting_only"},)


def _log_n(l0: float | int = 512.0) -> tuple[Fields, ...]:
    everywhere = {"span": "all", "length_rule": "kv", "phase": "everywhere"}
    return ({"alpha": 1, "law": "multiply", "l0": l0, **everywhere},)


def _ssmax(s: float | int = 0.43) -> tuple[Fields, ...]:
    return _log_n(math.exp(1 / _check_positive(s, "s")))


def _log_of_positive(value: float | int, name: str) -> float:
    return math.log(_check_positive(value, name))


def _check_positive(value: float | int, name: str) -> float | int:
    if not 0 < value < math.inf:
        raise AugmentationError(f"{name} should be above 0, found {value!r}")
    return value


LAPA2_SOURCE = "LaPA2, arXiv 2508.04047"
ABLATION = "alpha: the paper's of most methods; the paper's table of laws"
OURS = "ours: LaPA2 on chosen keys or heads"
CHOSEN = (
    "alpha: the paper's; what to choose has no default (`lapa2 circuits` finds heads and tokens)"
)
RECIPES: dict[str, Recipe] = {
    "lapa2": Recipe(
        _lapa2,
        "adds alpha ln(l/n) to the prefix, more the longer the text",
        f"{LAPA2_SOURCE}, Eq. 9 and Algorithm 1",
        "alpha: the paper's for most methods; PREADD and Palette have 2, NegPrompt 1",
    ),
    "lapa2-linear": Recipe(_linear, "adds alpha l/n", f"{LAPA2_SOURCE}, Table scaling", ABLATION),
    "lapa2-sqrt": Recipe(_sqrt, "adds alpha sqrt(l/n)", f"{LAPA2_SOURCE}, Table scaling", ABLATION),
    "lapa2-constant": Recipe(
        _constant,
        "adds alpha ln(l0/n), whatever the length",
        f"{LAPA2_SOURCE}, Table scaling",
        f"{ABLATION}; l0 is its 128",
    ),
    "lapa2-released": Recipe(
        _released,
        "what LaPA2's released code adds: BOS and, with GPT-2, all but the last prefix token; all"
        " keys counted",
        f"{LAPA2_SOURCE}, its released code",
        "alpha: 2 in all released scripts",
    ),
    "instaboost": Recipe(
        _instaboost,
        "multiplies the prefix's weights by M at every query, in all heads, and normalises",
        "InstABoost, arXiv 2506.13734; read in BrachioLab/InstABoost"
        " (src/model_interaction_utils.py)",
        "M: 3, the default of its hook; its search takes 1, 3, ..., 19 for each task",
    ),
    "pasta": Recipe(
        _pasta,
        "multiplies the weights of the rest of the input by alpha at every query, and normalises",
        "PASTA, arXiv 2311.02262; read in QingruZhang/PASTA (pastalib/pasta.py, scale_position"
        " exclude): generated keys keep their scores",
        "alpha: 0.01, its code's; it steers heads that it profiles for each task, so give heads:"
        " the default, all of them, is harsher than the paper",
    ),
    "spotlight": Recipe(
        _spotlight,
        "adds ln(tau/A) to the prefix where A, the mean over a pass's heads and queries, is below"
        " tau",
        "Spotlight, arXiv 2505.12025; read in AgentToolkit/agent-lifecycle-toolkit"
        " (SpotLightComponent, the released form). Its spans begin a token early and its masked"
        " keys keep 1e-10; neither is done here",
        "tau: 0.2, the component's alpha",
    ),
    "spotlight-per-head": Recipe(
        _spotlight_per_head,
        "the same with an A for each head and query",
        "Spotlight, arXiv 2505.12025, as its formula may be read; our variant",
        "tau: as spotlight",
    ),
    "split-softmax": Recipe(
        _split_softmax,
        "raises the prefix's share A to the power k, at every query after the prefix",
        "split-softmax, arXiv 2402.10962. Written from the formula alone, because its code"
        " (likenneth/persona_drift) does not contain it",
        "k: ours; we know of no published default",
    ),
    "set-point": Recipe(
        _set_point,
        "sets the prefix's share to tau in each head; with floor it only raises it",
        "ours",
        "tau: Spotlight's, so that the two compare; floor: a fixed share in heads that attend"
        " elsewhere costs fluency",
    ),
    "key-scale": Recipe(
        _key_scale,
        "multiplies the prefix's scores, negative ones too, by beta in the pass that predicts",
        "DIRECTER, arXiv 2603.06745; read in mjk0618/directer (scale_kv_cache). Its gate is"
        " method gate",
        "beta: 100, its code's",
    ),
    "log-n": Recipe(
        _log_n,
        "multiplies all scores by ln(l)/ln(l0)",
        "Chiang and Cholak, arXiv 2202.12172 (ln(l)) and Su, 2021 (over ln(l0)), written from the"
        " formulas alone; both train with it",
        "l0: 512, the length of its training",
    ),
    "ssmax": Recipe(
        _ssmax,
        "multiplies all scores by s ln(l)",
        "SSMax, arXiv 2501.19399; there s is learned in each head",
        "s: 0.43, about which its s lie; 1/ln(l) leaves the scores of a length l",
    ),
    "token-selective": Recipe(_lapa2, "LaPA2 on chosen prefix tokens", OURS, CHOSEN, ("tokens",)),
    "head-selective": Recipe(_lapa2, "LaPA2 in chosen heads", OURS, CHOSEN, ("heads",)),
    "selective": Recipe(
        _lapa2, "LaPA2 on chosen tokens in chosen heads", OURS, CHOSEN, ("tokens", "heads")
    ),
}


def recipe(name: str, **parameters: Any) -> LabeledAugmentations:
    """The augmentations of a recipe, for one row of `augmented` or as a cell's `augmentation`.

    Example:
        >>> from lapa2_interp import recipe
        >>> (augmentation,) = recipe("instaboost", M=5)
        >>> augmentation.law, round(augmentation.alpha, 3)  # scores of the instruction + ln 5
        ('scale', 1.609)

    Args:
        name: One of `RECIPES`.
        parameters: The recipe's own (`Recipe.parameters`); `tokens`, positions within the prefix, 0
            being its first; and fields of `Augmentation` that the recipe leaves open.

    Raises:
        AugmentationError: An unknown name or parameter, a field that the recipe fixes, a value out
            of range, or one that is missing.
    """
    if name not in RECIPES:
        raise AugmentationError(
            f"{unknown_choice('recipe', name, RECIPES)}; `lapa2 recipes` explains them"
        )
    # Check the parameters.
    chosen = RECIPES[name]
    allowed = (*chosen.parameters, "tokens", *chosen.open_fields)
    for key in parameters:
        if key in chosen.fixed_fields:
            raise AugmentationError(
                f"recipe {name} has its own {key}; leave it out, or say all fields by lapa2"
            )
        if key not in allowed:
            raise AugmentationError(unknown_choice(f"parameter of recipe {name}", key, allowed))
    if missing := [key for key in chosen.required if key not in parameters]:
        raise AugmentationError(
            f"recipe {name} needs {' and '.join(missing)}, such as"
            f" {name}:{','.join(PARAMETER_EXAMPLES[key] for key in chosen.required)}"
        )
    if "span" in parameters and "tokens" in parameters:
        raise AugmentationError(
            f"recipe {name}: tokens are a span, such as span=prefix:1; leave one of the two out"
        )
    values = {key: read_place(PLACES.get(key, key), value) for key, value in parameters.items()}
    for key, default in chosen.parameters.items():
        if key in values:
            number = bool if isinstance(default, bool) else float
            check_value(key, values[key], number, AugmentationError, f"recipe {name}: ")
    if isinstance(tokens := values.get("tokens"), str):
        raise AugmentationError(
            f"recipe {name}: tokens: takes {FORMS['positions']}; found {tokens!r}"
        )
    # The recipe's fields, and over them those that are given.
    own = {key: value for key, value in values.items() if key in chosen.parameters}
    over = {key: value for key, value in values.items() if key in chosen.open_fields}
    augmentations = []
    for fields in chosen.make(**own):
        on_tokens = "tokens" in values and fields.get("span", "prefix") == "prefix"
        span = {"span": ("prefix", tokens)} if on_tokens else {}
        augmentations.append(Augmentation(**fields | over | span))
    as_text = ",".join(
        _format_parameter(key, value) for key, value in values.items() if value is not None
    )
    return LabeledAugmentations.of(augmentations, f"{name}:{as_text}" if as_text else name)


def _format_parameter(key: str, value: Any) -> str:
    """A parameter as `parse_recipes` takes it; a long list shortened."""
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    if isinstance(value, str):
        return f'{key}="{value}"' if set(value) & set("+,") else f"{key}={value}"
    if key == "steps":
        return f"{key}={':'.join(map(str, value))}"
    if key == "span" and value[0] == "prefix":
        return f"{key}=prefix:{'/'.join(map(str, value[1]))}"
    if key == "span":
        return f"{key}={'/'.join(':'.join(map(str, slots)) for slots in value)}"
    return shorten_value(value, "/", name=key, to="=")


def resolve_recipes(augmentation: Any) -> Any:
    """The augmentations of recipes that are given as text; anything else unchanged."""
    return parse_recipes(augmentation) if isinstance(augmentation, str) else augmentation


PARAMETER_EXAMPLES = {"tokens": "tokens=1", "heads": "heads=3.1/4.0"}


def parse_recipes(
    text: str, alpha: float | None = None, beside: Mapping[str, Any] | None = None
) -> LabeledAugmentations:
    """The augmentations of recipes as text, NAME[:PARAMETER=VALUE,...] joined by "+".

    For example `pasta:alpha=0.1,heads=3.1/4.0` or `lapa2:tokens=0/1 + instaboost:steps=0:16`.

    Args:
        alpha: That of the recipes that take one and do not name it.
        beside: More parameters of every recipe, which the text may not name. `tokens` are left out
            where a recipe names its keys, and `alpha` where it has none or names it.

    Raises:
        AugmentationError: As `recipe`, or a value that cannot be read; or `alpha` is given, and no
            recipe leaves it open.
    """
    recipes: list[LabeledAugmentations] = []
    takes_alpha = False
    for part in _split(text, "+"):
        name, _, rest = part.partition(":")
        name = name.strip()
        parameters = _read_parameters(name, rest)
        own_alpha = name in RECIPES and "alpha" in RECIPES[name].parameters
        takes_alpha = takes_alpha or (own_alpha and "alpha" not in parameters)
        defaults = dict(beside or {}) if alpha is None else {**(beside or {}), "alpha": alpha}
        for key, value in defaults.items():
            if key in parameters and key not in ("alpha", "tokens"):
                raise AugmentationError(
                    f"recipe {name} is given {key} twice; leave {key} out of {text!r}"
                )
            if (key == "alpha" and not own_alpha) or (key == "tokens" and "span" in parameters):
                continue
            parameters = {key: value} | parameters
        recipes.append(recipe(name, **parameters))
    if alpha is not None and not takes_alpha:
        raise own_strength(alpha, repr(text))
    return LabeledAugmentations.of(
        (augmentation for augmentations in recipes for augmentation in augmentations),
        " + ".join(augmentations.label for augmentations in recipes),
    )


def _split(text: str, mark: str) -> list[str]:
    """The parts of a text between marks, of which quoted ones divide nothing."""
    parts, quoted = [""], False
    for letter in text:
        quoted ^= letter == '"'
        if letter == mark and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _read_parameters(name: str, text: str) -> dict[str, Any]:
    """The parameters of a recipe's text, PARAMETER=VALUE divided by ","."""
    parameters: dict[str, Any] = {}
    for assignment in filter(None, _split(text, ",")):
        key, mark, value = assignment.partition("=")
        key = key.strip()
        if not mark or key in parameters:
            raise AugmentationError(
                f"{assignment!r} of recipe {name!r} is not PARAMETER=VALUE, each once, such as"
                " instaboost:M=5,steps=0:16"
            )
        value = value.strip()
        if key in PLACES:
            parameters[key] = value.strip('"')
        else:
            parameters[key] = read_value(value)
    return parameters


def own_strength(alpha: float, augmentation: str) -> AugmentationError:
    """The error of an alpha for an augmentation that does not leave it open."""
    return AugmentationError(
        f"alpha {alpha:g} is for an augmentation that leaves its alpha open, such as lapa2, paper"
        f' or {{ layers = "top" }}, and {augmentation} has a strength of its own; leave one out'
    )


def strength(augmentations: tuple[Augmentation, ...]) -> float:
    """The strength of augmentations: tau where a law aims at a share, else |alpha|; of several the
    largest; 0 without any."""
    return max(
        (
            abs(augmentation.alpha) if augmentation.tau is None else augmentation.tau
            for augmentation in augmentations
        ),
        default=0.0,
    )


def at_unit_strength(augmentations: tuple[Augmentation, ...]) -> tuple[Augmentation, ...]:
    """Copies with tau 0.5, or alpha 1 (-1 where it is negative): those of two arms are equal if the
    arms differ by strength alone."""
    return tuple(
        augmentation.model_copy(
            update={"alpha": math.copysign(1, augmentation.alpha)}
            if augmentation.tau is None
            else {"tau": 0.5}
        )
        for augmentation in augmentations
    )


def name_families(arms: Iterable[tuple[Augmentation, ...]]) -> dict[tuple[Augmentation, ...], str]:
    """The name of each arm's family: arms of one name differ by their strength alone.

    The name is that of a recipe, or the label of the augmentations; a second family of the same
    name (with other heads, say) gets "#2" after it. An arm without augmentation is the "baseline".
    """
    names: dict[tuple[Augmentation, ...], str] = {(): "baseline"}
    families = {}
    for augmentations in arms:
        unit = at_unit_strength(augmentations)
        if unit not in names:
            name = recipe_name(augmentations, any_strength=True) or " + ".join(
                augmentation.label for augmentation in unit
            )
            same = sum(known.partition(" #")[0] == name for known in names.values())
            names[unit] = f"{name} #{same + 1}" if same else name
        families[augmentations] = names[unit]
    return families


def recipe_name(augmentations: tuple[Augmentation, ...], any_strength: bool = False) -> str | None:
    """The recipe that gives these augmentations with its own parameters at their defaults; None if
    there is none. Its tokens, layers, heads and steps may be any (with `any_strength`, its strength
    too)."""
    alike = at_unit_strength if any_strength else tuple
    positions = tuple(
        augmentation.positions
        for augmentation in augmentations
        if augmentation.positions is not None
    )
    narrow = ("tokens",) * bool(positions) + ("heads",) * any(
        augmentation.heads != "all" for augmentation in augmentations
    )
    if any(augmentation.strengths for augmentation in augmentations):
        return None  # no recipe has strengths of its own
    for name, chosen in RECIPES.items():
        parameters: dict[str, Any] = {
            key: getattr(augmentations[0], key) for key in ("layers", "heads", "steps")
        }
        if positions:
            parameters["tokens"] = positions[0]
        if (chosen.required or chosen.make is _lapa2) and chosen.required != narrow:
            continue  # the four that are LaPA2 itself differ by what is chosen
        try:
            if alike(recipe(name, **parameters)) == alike(augmentations):
                return name
        except AugmentationError:
            continue
    return None
