"""Steering, from prompts to a judged setting.

Heads are chosen on one part of the prompts, strengths are tuned on a second, and the third says
what they are worth.

    found = steer("smollm2-135m", prompts, "sentiment", out="results/steer")
    found.selection.augmentation()      # the bias in the chosen heads, at the tuned strength
    print(found.summary())

1. **Choose**: the heads of largest slope, or of largest effect by knock-out in a model without
   gradients. The card says how many of them other halves of the prompts and other wordings of the
   prefixes choose, too.
   `learn` learns one strength a head from texts that the model writes for the same prompts.
2. **Tune**: three places of the bias (all heads, the chosen heads, as many random heads) at four
   strengths. Learned strengths are a fourth, and the tuned strength multiplies them. For each
   place, the strength is interpolated at which the perplexity of the continuations, given their
   prompts, is `budget` times that of the method without bias. A place that does not reach it is not
   comparable. Before anything else a few texts show whether the bias moves perplexity at all.
3. **Judge**: all arms on prompts that decided nothing. Three tests, with Holm's correction: the
   chosen heads against no bias, all heads, and random heads. Learned strengths add a fourth.

Random heads are five sets, each on a fifth of the prompts; a set has as many heads in each layer as
the chosen ones have, and none of these. All texts of a prompt have the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lapa2_interp._util.parsing import read_text
from lapa2_interp._util.settings import takes
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.gradients import has_gradients
from lapa2_interp.circuits.selection import Selection, select
from lapa2_interp.circuits.units import all_heads
from lapa2_interp.errors import CircuitError, DataError, RunError, parameter, pluralize
from lapa2_interp.files import write_text
from lapa2_interp.generation.cell import Cell
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.load import load_model
from lapa2_interp.models.sizes import model_size
from lapa2_interp.report.learning import TEXTS, learn_in_folder
from lapa2_interp.report.settings import SteerSettings
from lapa2_interp.report.steer_page import write_steer_page
from lapa2_interp.report.steer_result import (
    ALL,
    CARD,
    CHOSEN,
    LEARNED,
    LEARNED_FOLDER,
    NO_BIAS,
    ORDER,
    RANDOM,
    SHARE,
    STRENGTHS,
    Steered,
    SteerPlan,
    check_plan,
    different_prompts,
    method_parameters,
    note_plan,
    settled_dtype,
    shipped_classifiers,
    verdict,
)
from lapa2_interp.runs.engines import Engine, local_engine
from lapa2_interp.runs.estimates import check_affordable, estimate
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.grid import Grid
from lapa2_interp.runs.run import load_run
from lapa2_interp.scoring.equal_perplexity import (
    BASELINE,
    SteeringCurves,
    interpolate_at_perplexity,
    resampled_interval,
)
from lapa2_interp.scoring.registry import ScorerOptions, score_texts
from lapa2_interp.scoring.scorer import CLASSIFIERS, ScoreCache
from lapa2_interp.scoring.tables import cell_table, difference_table, distinct_cells
from lapa2_interp.stats import FEW, holm
from lapa2_interp.table_formats import as_csv, format_interval
from lapa2_interp.tasks.prompts import as_prompts
from lapa2_interp.tasks.task import Prompts, Task

WORDINGS = ("Extremely {attribute}:", "In a {attribute} tone:")
"""Other prefixes, with which heads are chosen again."""
TABLE, TESTS, TUNING = "table.csv", "tests.csv", "tuning.csv"
"""Files of a result's folder, beside the card; the texts are in the runs first/,
tune/ and judge/, the page
is report.html."""
STILL = 0.1
"""The bias hardly moves perplexity if it changes its logarithm by less than this share of that of
the budget."""
GAINS = {"more": "a gain", "less": "a loss", "not decided": "no sure difference"}
"""What the card says of a `verdict` on the method without bias."""


@takes(SteerSettings)
def steer(settings: SteerSettings) -> Steered:
    """`lapa2 steer` in Python; `SteerSettings` says what it does and takes.

    Example:
        >>> from lapa2_interp import steer
        >>> prompts = [f"The {i}th of the" for i in range(32)]
        >>> found = steer("planted", prompts, out="steered", method="prefix", length=12, workers=1,
        ...     perplexity="tiny-llama", budget=1.01, notify=lambda line: None)
        >>> list(found.tests["against"])
        ['no bias', 'all heads', 'random heads']

    Returns:
        The result; its page is `out`/report.html.

    Raises:
        TaskError: The task lacks a second attribute or a classifier.
        CircuitError: No head can be chosen, or the prefixes have different lengths.
        RunError: Too few prompts, a budget not above 1, other settings in `out`, a failed cell, or
            a bias that hardly moves perplexity.
    """
    task = settings.task if isinstance(settings.task, Task) else load_task(settings.task)
    folder = Path(settings.out)
    size, texts = model_size(str(settings.model)), as_prompts(settings.prompts).texts
    plan = SteerPlan(
        model=str(settings.model),
        dtype=settled_dtype(folder, settings.dtype, settings.device),
        model_class=settings.model_class,
        task=task,
        prompts=different_prompts(texts),
        method=settings.method,
        parameters=method_parameters(settings.method, task, settings.parameters),
        budget=settings.budget,
        heads=settings.heads or max(1, round(SHARE * size.n_layers * size.n_heads)),
        learn=settings.learn,
        classifiers=tuple(settings.classifiers) or shipped_classifiers(task),
        perplexity=settings.perplexity or str(settings.model),
        length=settings.length,
        samples=settings.samples,
        seed=settings.seed,
    )
    check_plan(plan)
    if left_out := len(texts) - len(plan.prompts):
        settings.notify(
            f"{pluralize(left_out, 'prompt')} left out: the same text as another, but for white"
            " space or capitals"
        )
    _check_scorers(plan, settings.device)
    note_plan(folder, plan)
    parts = plan.parts()
    # A sweep closes its engine, so that each one gets its own.
    engine = partial(local_engine, settings.workers, settings.device, settings.threads)
    _announce(plan, parts, engine(), settings.yes, settings.notify)
    _check_that_perplexity_moves(folder, plan, parts["tune"][:FEW], engine(), settings.device)
    selection = _choose(folder, plan, parts["choose"], settings.device, settings.notify)
    cards: dict[str, Selection] = {CHOSEN: selection}
    if plan.learn:
        learned = _learn(
            folder / LEARNED_FOLDER, plan, parts["choose"], settings.device, settings.notify
        )
        cards |= {} if learned is None else {LEARNED: learned}
    tuning = _tune(folder, plan, parts["tune"], cards, engine(), settings.device)
    alphas = tuning[tuning["tuned"]].set_index("place")["alpha"].dropna().to_dict()
    samples_made = _judged_texts(folder, plan, parts["judge"], cards, alphas, engine())
    scores = _scores(folder, plan, samples_made, settings.device, plan.metrics)
    table = _judged_table(scores, samples_made)
    tests = _tests(plan, scores)
    selection = selection.model_copy(
        update={"alpha": alphas.get(CHOSEN), "gain": _gain(plan, tests, table, alphas)}
    )
    selection.save(folder / CARD)
    if LEARNED in alphas:
        gain = _learned_gain(tests)
        update = {"alpha": alphas[LEARNED], "gain": gain}
        cards[LEARNED].model_copy(update=update).save(folder / LEARNED_FOLDER / CARD)
    for name, frame in ((TUNING, tuning), (TABLE, table), (TESTS, tests)):
        write_text(folder / name, as_csv(frame))
    steered = Steered(folder, plan, selection, tuning, table, tests, samples_made)
    write_steer_page(folder / "report.html", steered)
    return steered


def _check_scorers(plan: SteerPlan, device: str | None) -> None:
    """Score a few words by every scorer: what is wrong with one is told before any text is made.

    Raises:
        ScoringError: A scorer cannot be loaded, or has no label for an attribute.
    """
    custom = [f"accuracy ({name})" for name in plan.classifiers if name not in CLASSIFIERS]
    custom += ["perplexity"] * (plan.perplexity != plan.model)
    if custom:
        names = list(plan.task.attributes)
        words = {"prompt": "a", "attribute": names, "text": "a few words " * 4}
        _scores(None, plan, pd.DataFrame(words), device, custom)


def _announce(
    plan: SteerPlan,
    parts: Mapping[str, Sequence[str]],
    engine: Engine,
    yes: bool,
    notify: Callable[[str], None],
) -> None:
    """Say how many texts are made, before anything begins.

    Raises:
        RunError: They are very many, or take more memory than there is.
    """
    workers = engine.n_workers
    engine.close()
    size = model_size(plan.model)
    first = tuple((i // size.n_heads, i % size.n_heads) for i in range(plan.heads))
    bias = Augmentation(alpha=1.0, heads=first)
    arms = {
        "first": 1 + len(STRENGTHS),
        "tune": 1 + len(plan.tuned) * len(STRENGTHS),
        "judge": len(plan.arms),
    }
    prompts = {"first": parts["tune"][:FEW], **parts}
    cells = [plan.cells(prompts[part], CHOSEN, bias) * n for part, n in arms.items()]
    need = estimate([cell for of_part in cells for cell in of_part])
    check_affordable(need.texts, need.row_tokens, need.memory, yes)
    to_learn = 1 + len(plan.task.attributes) * TEXTS if plan.learn else 0
    more = f", and {to_learn * len(parts['choose'])} to learn from" * plan.learn
    notify(
        f"{len(parts['choose'])} prompts choose {plan.heads} heads, {len(parts['tune'])} tune,"
        f" {len(parts['judge'])} judge: {need.texts} texts{more}, {need.row_tokens} row-tokens,"
        f" with {pluralize(workers, 'worker')}"
    )


def _choose(
    folder: Path,
    plan: SteerPlan,
    prompts: Sequence[str],
    device: str | None,
    notify: Callable[[str], None],
) -> Selection:
    """The card of chosen heads, also under other wordings of the prefixes; from the folder if it is
    there."""
    if (folder / CARD).is_file():
        return Selection.load(folder / CARD)
    model = load_model(plan.model, "float32", device, plan.model_class)
    score: Any = "slope" if has_gradients(model) else "cut"

    def chosen_on(task: Task, prompts: Sequence[str]) -> Selection:
        own = Prompts(texts=tuple(prompts))
        texts = ContrastSet.of(model, task, prompts=own, seed=plan.seed)
        return select(model, texts, score=score, heads=plan.heads, screen=0, seed=plan.seed)

    selection = chosen_on(plan.task, prompts)
    half = prompts[: max(FEW, len(prompts) // 2)]
    overlap = {}
    for form in WORDINGS:
        try:
            again = chosen_on(plan.task.with_prefix(form), half)
        except CircuitError as error:
            notify(f"wording {form!r} is left out: {error}")
            continue
        overlap[form] = len(set(again.heads) & set(selection.heads))
    selection = selection.model_copy(update={"chosen_by_wordings": overlap})
    selection.save(folder / CARD)
    expected = len(selection.heads) ** 2 / len(all_heads(model))
    reworded_too = [f"{n} with {form!r}" for form, n in overlap.items()]
    notify(
        f"{len(selection.heads)} heads chosen; both halves of the prompts choose"
        f" {selection.chosen_by_halves} of them"
        + f"; chosen again: {', '.join(reworded_too)} (by chance {expected:.1f})"
        * bool(overlap)
    )
    return selection


def _learn(
    folder: Path,
    plan: SteerPlan,
    prompts: Sequence[str],
    device: str | None,
    notify: Callable[[str], None],
) -> Selection | None:
    """The card of learned strengths; from the folder if it is there. None where none are learned,
    for example because too few texts have their attribute; the reason stays in the folder."""
    reason = folder / "left_out.txt"
    if reason.is_file():
        notify(f"{LEARNED} are left out: {read_text(reason)}")
        return None
    if not (folder / CARD).is_file():
        model = load_model(plan.model, "float32", device, plan.model_class)
        try:
            learn_in_folder(
                model,
                folder,
                prompts=list(prompts),
                task=plan.task,
                classifiers=plan.classifiers,
                seed=plan.seed,
            )
        except (CircuitError, DataError) as error:
            notify(f"{LEARNED} are left out: {error}")
            write_text(reason, str(error))
            return None
    return Selection.load(folder / CARD)


def _make(
    folder: Path, name: str, cells: Sequence[Cell], chosen: Selection | None, engine: Engine
) -> pd.DataFrame:
    """The texts of cells, from a run in the folder.

    Raises:
        RunError: A cell failed, or other weights chose the heads.
    """
    unique = tuple({cell.key: cell for cell in cells}.values())
    made = fill_run(
        folder / name, [Grid(name, f"steer: {name}", unique)], engine, lambda line: None
    )
    run = load_run(folder / name)
    if made.failed or made.elsewhere:
        reasons = [failure.reason for failure in run.failures.values()]
        raise RunError(
            f"{len(made.failed) + made.elsewhere} of {len(unique)} cells of {folder / name} are not"
            f" finished: {reasons[0] if reasons else 'another command makes them'}; the same"
            " command goes on"
        )
    weights = run.manifest(unique[0].key).model.weights
    if chosen is not None and weights != chosen.weights:
        raise RunError(
            f"the heads of {folder / CARD} were chosen in {chosen.weights}, and the texts are of"
            f" {weights}; choose another {parameter('out')}"
        )
    return run.texts()


def _check_that_perplexity_moves(
    folder: Path,
    plan: SteerPlan,
    prompts: Sequence[str],
    engine: Engine,
    device: str | None,
) -> None:
    """Make a few texts with the bias in all heads, before heads are chosen.

    Raises:
        RunError: The bias leaves perplexity where it is at every strength, far from the budget.
    """
    arms = {(BASELINE, 0.0): plan.cells(prompts, NO_BIAS)}
    arms |= {
        (ALL, alpha): plan.cells(prompts, ALL, Augmentation(alpha=alpha)) for alpha in STRENGTHS
    }
    log_ppl = _curves(folder, plan, "first", arms, None, engine, device).curve(ALL)[..., 0]
    change, low, high = resampled_interval(log_ppl[:, 1:] - log_ppl[:, :1], len(prompts))
    if max(-low.min(), high.max()) < STILL * np.log(plan.budget):
        raise RunError(
            f"the bias hardly moves perplexity: in all heads, at alpha {STRENGTHS[0]:g} to"
            f" {STRENGTHS[-1]:g}, it is {np.exp(change.min()):.3f} to"
            f" {np.exp(change.max()):.3f} times that without bias ({len(prompts)} prompts, measured"
            f" by {plan.perplexity}), so that no strength costs the budget of"
            f" {plan.budget:g} times; let another model measure it"
            f" ({parameter('perplexity', 'MODEL')}), or choose longer texts"
            f" ({parameter('length')}), a smaller {parameter('budget')} or another model, in"
            f" another {parameter('out')}"
        )


def _curves(
    folder: Path,
    plan: SteerPlan,
    name: str,
    arms: Mapping[tuple[str, float], Sequence[Cell]],
    chosen: Selection | None,
    engine: Engine,
    device: str | None,
) -> SteeringCurves:
    """Perplexities of the texts of places and strengths."""
    cells = [cell for of_arm in arms.values() for cell in of_arm]
    texts = _make(folder, name, cells, chosen, engine)
    scores = _scores(folder, plan, texts, device, ["perplexity"])
    of_cell = {cell.key: arm for arm, of_arm in arms.items() for cell in of_arm}
    pairs = [of_cell[key] for key in scores["cell"]]
    scores = scores.assign(
        family=[family for family, _ in pairs],
        strength=[alpha for _, alpha in pairs],
        nll=np.log(scores["value"]),
    )
    return SteeringCurves(scores, [], resamples=4000)


def _tune(
    folder: Path,
    plan: SteerPlan,
    prompts: Sequence[str],
    cards: Mapping[str, Selection],
    engine: Engine,
    device: str | None,
) -> pd.DataFrame:
    """`Steered.tuning`."""
    arms = {(BASELINE, 0.0): plan.cells(prompts, NO_BIAS)}
    places = [arm for arm in plan.tuned if arm != LEARNED or LEARNED in cards]
    for arm in places:
        for alpha in STRENGTHS:
            arms[arm, alpha] = plan.cells_with_bias(prompts, arm, alpha, cards)
    curves = _curves(folder, plan, "tune", arms, cards[CHOSEN], engine, device)
    tried = np.array([0.0, *STRENGTHS])
    frames = []
    for arm in places:
        log_ppl = curves.curve(arm)[..., 0]  # resample arm
        target = log_ppl[:1, 0] + np.log(plan.budget)
        alpha = float(interpolate_at_perplexity(log_ppl[:1], tried[None, :, None], target)[0, 0])
        at_alpha = np.stack([np.interp([*STRENGTHS, alpha], tried, curve) for curve in log_ppl])
        ratio, low, high = resampled_interval(np.exp(at_alpha - log_ppl[:, :1]), curves.prompts)
        columns = {"alpha": [*STRENGTHS, alpha], "ratio": ratio, "low": low, "high": high}
        frame = pd.DataFrame({"place": arm, **columns})
        frames.append(frame.assign(tuned=frame.index == len(STRENGTHS)))
    return pd.concat(frames, ignore_index=True)


def _judged_texts(
    folder: Path,
    plan: SteerPlan,
    prompts: Sequence[str],
    cards: Mapping[str, Selection],
    alphas: Mapping[Any, float],
    engine: Engine,
) -> pd.DataFrame:
    """The texts of all arms that are comparable, with the arm's name."""
    cells = {
        arm: plan.cells_with_bias(prompts, arm, alphas[arm], cards)
        if arm in plan.tuned
        else plan.cells(prompts, arm)
        for arm in plan.arms
        if arm not in plan.tuned or arm in alphas
    }
    every = [cell for of_arm in cells.values() for cell in of_arm]
    texts = _make(folder, "judge", every, cards[CHOSEN], engine)
    names = {cell.key: arm for arm, of_arm in cells.items() for cell in of_arm}
    return texts.assign(arm=texts["cell"].map(names))


def _scores(
    folder: Path | None,
    plan: SteerPlan,
    texts: pd.DataFrame,
    device: str | None,
    metrics: Sequence[str],
) -> pd.DataFrame:
    """A row per text and metric; scores are kept in the folder, if there is one."""
    options = ScorerOptions(task=plan.task, device=device)
    scores = []
    with ScoreCache(folder) as cache:
        for metric in metrics:
            name, _, by = metric.removesuffix(")").partition(" (")
            asked = f"{name}={by}" if by else name
            if name == "perplexity":
                asked = f"conditional-perplexity={plan.perplexity}"
            scores.append(score_texts(texts, [asked], options, cache).assign(metric=metric))
    return pd.concat(scores, ignore_index=True)


def _judged_table(scores: pd.DataFrame, texts: pd.DataFrame) -> pd.DataFrame:
    """`Steered.table`. Perplexity is exp of the mean NLL over texts, as in the budget."""
    rows = scores[["arm", "attribute", "prompt", "sample", "metric", "value", "reason", "scorer"]]
    of_perplexity = rows["metric"] == "perplexity"
    nll = np.log(rows["value"].where(of_perplexity))
    rows = rows.assign(value=rows["value"].where(~of_perplexity, nll))
    rows["metric"] = rows["metric"].mask(of_perplexity, "nll")
    table = pd.concat(
        [cell_table(rows), distinct_cells(texts[["arm", "attribute", "prompt", "text"]])]
    )
    is_nll = table["metric"] == "nll"
    for column in ("mean", "low", "high"):
        table[column] = table[column].where(~is_nll, np.exp(table[column].astype(float)))
    table["metric"] = table["metric"].mask(is_nll, "perplexity")
    table["arm"] = pd.Categorical(table["arm"], ORDER, ordered=True)
    return table.sort_values(["metric", "attribute", "arm"], kind="stable").reset_index(drop=True)


def _tests(plan: SteerPlan, scores: pd.DataFrame) -> pd.DataFrame:
    """`Steered.tests`; what is not comparable has p 1 in the correction."""
    judged = set(scores["arm"])
    against = (NO_BIAS, ALL, RANDOM, *((LEARNED,) if plan.learn else ()))
    rows = scores[scores["metric"] == plan.metrics[0]]
    rows = rows[["arm", "attribute", "prompt", "sample", "metric", "value", "reason", "scorer"]]
    differences = difference_table(rows, CHOSEN)
    differences = (
        differences[differences["attribute"] == "all"].set_index("arm")
        if len(differences)
        else differences
    )
    tests = pd.DataFrame({"against": against}).set_index("against")
    for name in ("difference", "low", "high", "p", "detectable", "prompts"):
        tests[name] = differences[name].astype(float) if len(differences) else np.nan
    comparable = np.array([CHOSEN in judged and arm in judged for arm in against])
    tests["prompts"] = tests["prompts"].fillna(0).where(comparable)
    ends = [("difference", "difference"), ("low", "high"), ("high", "low")]
    tests = tests.assign(**{name: 0.0 - tests[source] for name, source in ends})
    return tests.assign(p_holm=holm(tests["p"].to_numpy())).reset_index()


def _learned_gain(tests: pd.DataFrame) -> str:
    """A sentence on what the chosen heads gain over learned strengths."""
    test = tests.set_index("against").loc[LEARNED].to_dict()
    outcome = verdict(test)
    if outcome not in GAINS:
        return f"What these strengths gain over chosen heads is not known: {outcome}."
    mean, low, high = (-100 * float(test[name]) for name in ("difference", "high", "low"))
    return (
        f"On {test['prompts']:.0f} other prompts their accuracy minus that of the chosen heads is"
        f" {format_interval(mean, low, high, '+.1f', ' points')} (corrected p"
        f" {test['p_holm']:.2g})."
    )


def _gain(
    plan: SteerPlan,
    tests: pd.DataFrame,
    table: pd.DataFrame,
    alphas: Mapping[Any, float],
) -> str:
    """A sentence on what the chosen heads gain."""
    if CHOSEN not in alphas:
        return (
            f"The bias in these heads does not reach {plan.budget:g} times the perplexity of"
            f" {plan.method} within alpha {STRENGTHS[-1]:g}; what it gains is not known."
        )
    test = tests.to_dict("records")[0]
    outcome = verdict(test)
    if outcome not in GAINS:
        return (
            f"What {plan.method} gains from the bias in these heads at alpha"
            f" {alphas[CHOSEN]:.2f} is not known: {outcome}."
        )
    points, p = 100 * test["difference"], test["p_holm"]
    perplexity = table[(table["metric"] == "perplexity") & (table["attribute"] == "all")]
    of_arm = perplexity.set_index("arm")["mean"]
    ratio = of_arm[CHOSEN] / of_arm[NO_BIAS]
    at_perplexity = (
        "" if np.isnan(ratio) else f", at {ratio:.2f} times its perplexity (budget {plan.budget:g})"
    )
    return (
        f"On {test['prompts']:.0f} other prompts, {plan.method} with the bias in these heads at"
        f" alpha {alphas[CHOSEN]:.2f} has"
        f" {format_interval(points, 100 * test['low'], 100 * test['high'], '+.1f', ' points')} of"
        f" accuracy ({plan.classifiers[0]}, words of prefixes hidden; corrected p {p:.2g})"
        f" against the method without bias{at_perplexity}: {GAINS[outcome]}."
    )
