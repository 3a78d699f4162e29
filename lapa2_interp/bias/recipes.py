"""Named ways to steer attention: the literature's, ours, and their combinations, as augmentations.

A recipe is a function of a few parameters that gives one or several `Augmentation`s, with its
source, and where its defaults come from (`RECIPES`). What decides a cell's texts are those
augmentations; the name is the label of its arm.

    generate(..., augmentation="instaboost:M=5")   # in Python, as every call with an augmentation
    recipe("instaboost", M=5)                      # the same as augmentations
    --augmentation instaboost:M=5                  # on the command line
    augmentation = ["none", "instaboost:M=5"]      # in a grid

Every recipe also takes `WHERE`: `tokens` (positions within the prefix), `layers`, `heads`, `steps`
and `phase`. As text, the parts of a value are joined by "/", and recipes that act together by "+":

    lapa2:tokens=1,alpha=1 + lapa2:tokens=2,alpha=0.5     two tokens with a bias each
    instaboost:steps=0:16 + lapa2:steps=16:9999           another control from step 16 on

What could be checked against published code (read, not run), and what is from memory, stands in
each recipe's `source`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lapa2_interp._util.errors import AugmentationError, unknown_choice
from lapa2_interp.bias.augmentation import Augmentation, shortened

WHERE = ("tokens", "layers", "heads", "steps", "phase")
"""Parameters that every recipe takes: where, and for which queries and steps, it acts."""
Made = Augmentation | tuple[Augmentation, ...]


class Named(tuple[Augmentation, ...]):
    """Augmentations that act together, and what they were asked by.

    Attributes:
        label: The recipes as text, long lists shortened; the label of a cell's arm.
    """

    label: str

    @classmethod
    def of(cls, rules: Iterable[Augmentation], label: str) -> Named:
        """Augmentations with their label."""
        found = cls(rules)
        found.label = label
        return found


@dataclass(frozen=True)
class Recipe:
    """One way to steer attention.

    Attributes:
        make: Its parameters to its augmentations.
        what: What it does, in a line.
        source: Who published it, and what of that could be checked.
        defaults: Where the defaults of its parameters come from.
        needs: Those of `WHERE` that must be given.
    """

    make: Callable[..., Made]
    what: str
    source: str
    defaults: str
    needs: tuple[str, ...] = ()

    @property
    def parameters(self) -> dict[str, Any]:
        """Its own parameters with their defaults."""
        found = inspect.signature(self.make).parameters.values()
        return {each.name: each.default for each in found}


def _lapa2(alpha: float | int = 0.5) -> Made:
    return Augmentation(alpha=alpha)


def _linear(alpha: float | int = 0.5) -> Made:
    return Augmentation(alpha=alpha, law="linear")


def _sqrt(alpha: float | int = 0.5) -> Made:
    return Augmentation(alpha=alpha, law="sqrt")


def _constant(alpha: float | int = 0.5, l0: float | int = 128.0) -> Made:
    return Augmentation(alpha=alpha, law="constant", l0=l0)


def _released(alpha: float | int = 2.0) -> Made:
    return Augmentation(alpha=alpha, profile="released")


def _instaboost(M: float | int = 3.0) -> Made:
    return Augmentation(alpha=_log(M, "M"), law="scale", phase="every_query")


def _pasta(alpha: float | int = 0.01) -> Made:
    less = Augmentation(alpha=_log(alpha, "alpha"), law="scale", span="input", phase="every_query")
    return (less, less.model_copy(update={"alpha": -less.alpha, "span": "prefix"}))


def _spotlight(tau: float | int = 0.2) -> Made:
    return Augmentation(alpha=1, law="ratio", tau=tau, pooled=True, phase="every_query")


def _spotlight_per_head(tau: float | int = 0.2) -> Made:
    return Augmentation(alpha=1, law="ratio", tau=tau, phase="every_query")


def _split_softmax(k: float | int = 0.75) -> Made:
    if _number(k, "k") > 1:
        raise AugmentationError(f"k of split-softmax should be above 0 and at most 1, found {k:g}")
    return Augmentation(alpha=1 / k - 1, law="power", phase="all_queries")


def _set_point(tau: float | int = 0.2, floor: bool = True) -> Made:
    return Augmentation(alpha=1, law="target", tau=tau, floor=floor)


def _log(value: float | int, name: str) -> float:
    return math.log(_number(value, name))


def _number(value: Any, name: str) -> float | int:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
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
        f"{LAPA2_SOURCE}, Eq. 7 and Algorithm 1",
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
        "makes A to the power k of the prefix's share A, at every query behind the prefix",
        "split-softmax, arXiv 2402.10962. The formula is from memory: its code"
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
    "token-selective": Recipe(_lapa2, "LaPA2 on chosen prefix tokens", OURS, CHOSEN, ("tokens",)),
    "head-selective": Recipe(_lapa2, "LaPA2 in chosen heads", OURS, CHOSEN, ("heads",)),
    "selective": Recipe(
        _lapa2, "LaPA2 on chosen tokens in chosen heads", OURS, CHOSEN, ("tokens", "heads")
    ),
}


def recipe(name: str, **parameters: Any) -> Named:
    """The augmentations of a recipe, for one row of `augmented` or as a cell's `augmentation`.

    Args:
        name: One of `RECIPES`.
        parameters: The recipe's own (`Recipe.parameters`), and any of `WHERE`: `tokens`, positions
            within the prefix, 0 being its first; `layers`, `heads`, `steps` and `phase` as in
            `Augmentation`.

    Raises:
        AugmentationError: An unknown name or parameter, a value out of range, one that is missing,
            or tokens for a recipe of fixed slots.
    """
    if name not in RECIPES:
        raise AugmentationError(
            f"{unknown_choice('recipe', name, RECIPES)}; `lapa2 recipes` explains them"
        )
    chosen = RECIPES[name]
    for each in parameters:
        if each not in (*chosen.parameters, *WHERE):
            kind = f"parameter of recipe {name}"
            raise AugmentationError(unknown_choice(kind, each, (*chosen.parameters, *WHERE)))
    if missing := [each for each in chosen.needs if each not in parameters]:
        raise AugmentationError(
            f"recipe {name} needs {' and '.join(missing)}, such as"
            f" {name}:{','.join(EXAMPLES[each] for each in chosen.needs)}"
        )
    made = chosen.make(**{key: value for key, value in parameters.items() if key not in WHERE})
    rules = made if isinstance(made, tuple) else (made,)
    where = {key: value for key, value in parameters.items() if key in WHERE and key != "tokens"}
    if "tokens" in parameters and all(rule.span != "prefix" for rule in rules):
        raise AugmentationError(f"recipe {name} covers slots of its own, so it takes no tokens")
    found = (
        Augmentation(
            **dict(rule)
            | where
            | (
                {"span": ("prefix", parameters["tokens"])}
                if "tokens" in parameters and rule.span == "prefix"
                else {}
            )
        )
        for rule in rules
    )
    told = {key: value for key, value in parameters.items() if value is not None}
    given = ",".join(f"{key}={_as_text(key, value)}" for key, value in told.items())
    return Named.of(found, f"{name}:{given}" if given else name)


def _as_text(key: str, value: Any) -> str:
    """A parameter's value as `read_recipes` takes it; a long list shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if key == "steps":
        return ":".join(map(str, value))
    return shortened(value, "/")


def named_rules(given: Any) -> Any:
    """The augmentations of recipes that are given as text; all else as it is."""
    return read_recipes(given) if isinstance(given, str) else given


EXAMPLES = {"tokens": "tokens=1", "heads": "heads=3.1/4.0"}


def read_recipes(text: str) -> Named:
    """The augmentations of recipes as text, NAME[:PARAMETER=VALUE,...] joined by "+".

    For example `pasta:alpha=0.1,heads=3.1/4.0` or `lapa2:tokens=0/1 + instaboost:steps=0:16`.

    Raises:
        AugmentationError: As `recipe`, or a value that cannot be read.
    """
    found: list[Named] = []
    for part in text.split("+"):
        name, _, rest = part.partition(":")
        name, given = name.strip(), {}
        for each in filter(None, rest.split(",")):
            key, mark, value = each.partition("=")
            key = key.strip()
            if not mark or key in given:
                raise AugmentationError(
                    f"{each!r} of recipe {name!r} is not PARAMETER=VALUE, each once, such as"
                    " instaboost:M=5,steps=0:16"
                )
            default = RECIPES[name].parameters.get(key) if name in RECIPES else None
            try:
                given[key] = _value(key, value.strip(), default)
            except ValueError:
                raise AugmentationError(
                    f"{key}={value} of recipe {name!r} cannot be read; give"
                    f" {FORMS.get(key, 'a number')}"
                ) from None
        found.append(recipe(name, **given))
    return Named.of((rule for each in found for rule in each), " + ".join(e.label for e in found))


FORMS = {
    "tokens": "positions such as 0/2",
    "layers": "all, bottom, top, even, odd, or numbers such as 0/5",
    "heads": "layer.head pairs such as 3.1/4.0",
    "steps": "first:stop, such as 0:16",
    "floor": "true or false",
}
"""How values are written, for error messages."""


def _value(key: str, text: str, default: Any) -> Any:
    if key == "tokens" or (key == "layers" and text[:1].isdigit()):
        return tuple(int(each) for each in text.split("/"))
    if key == "heads" and text != "all":
        return tuple(_pair(each, ".") for each in text.split("/"))
    if key == "steps":
        return _pair(text, ":")
    if key in WHERE:
        return text
    if isinstance(default, bool):
        return {"true": True, "false": False}[text] if text in ("true", "false") else int("")
    return float(text)


def _pair(text: str, mark: str) -> tuple[int, int]:
    one, other = text.split(mark)
    return int(one), int(other)


def strength_of(rules: tuple[Augmentation, ...]) -> float:
    """How strong augmentations are: tau where a law aims at a share, else the size of alpha; of
    several the largest; 0 of none."""
    return max((abs(rule.alpha) if rule.tau is None else rule.tau for rule in rules), default=0.0)


def at_unit_strength(rules: tuple[Augmentation, ...]) -> tuple[Augmentation, ...]:
    """The same augmentations with tau 0.5, or alpha 1 (-1 where it is negative): equal where two
    differ by their strength alone."""
    return tuple(
        rule.model_copy(
            update={"alpha": math.copysign(1, rule.alpha)} if rule.tau is None else {"tau": 0.5}
        )
        for rule in rules
    )


def families(arms: Iterable[tuple[Augmentation, ...]]) -> dict[tuple[Augmentation, ...], str]:
    """Ways to steer by name, strength left out: arms of one name differ by their strength alone.

    A name is that of a recipe, or the label of the augmentations; a second family of that name (of
    other heads, say) has "#2" behind it. No augmentation is the "baseline".
    """
    names: dict[tuple[Augmentation, ...], str] = {(): "baseline"}
    found = {}
    for rules in arms:
        unit = at_unit_strength(rules)
        if unit not in names:
            name = name_of(rules, any_strength=True) or " + ".join(rule.label for rule in unit)
            same = sum(other.partition(" #")[0] == name for other in names.values())
            names[unit] = f"{name} #{same + 1}" if same else name
        found[rules] = names[unit]
    return found


def name_of(rules: tuple[Augmentation, ...], any_strength: bool = False) -> str | None:
    """The recipe that gives these augmentations with its own parameters at their defaults, whatever
    its tokens, layers, heads and steps (and its strength, if `any_strength`); None if there is
    none."""
    alike = at_unit_strength if any_strength else tuple
    given = tuple(rule.positions for rule in rules if rule.positions is not None)
    narrow = ("tokens",) * bool(given) + ("heads",) * any(rule.heads != "all" for rule in rules)
    for name, chosen in RECIPES.items():
        parameters: dict[str, Any] = {
            key: getattr(rules[0], key) for key in ("layers", "heads", "steps")
        }
        if given:
            parameters["tokens"] = given[0]
        if (chosen.needs or chosen.make is _lapa2) and chosen.needs != narrow:
            continue  # the four that are LaPA2 itself differ by what is chosen
        try:
            if alike(recipe(name, **parameters)) == alike(rules):
                return name
        except AugmentationError:
            continue
    return None
