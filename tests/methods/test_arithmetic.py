"""Model Arithmetic against its formulas in plain Python."""

import math

import numpy as np
import pytest
from formulas import as_logs, distributions, normalised, run, unit

from lapa2_interp.errors import MethodError
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods


def arithmetic(formula, **branches):
    return normalised(methods.get("arithmetic", formula=formula).combine(as_logs(branches), None))[
        0
    ]


def test_arithmetic():
    base, target, opponent = [[0.5, 0.3, 0.2]], [[0.2, 0.2, 0.6]], [[0.1, 0.8, 0.1]]
    p, q, r = (np.array(rows[0]) for rows in (base, target, opponent))
    assert arithmetic("base", base=base) == pytest.approx(p)
    assert arithmetic("base + 1.5 * (target - base)", base=base, target=target) == pytest.approx(
        unit(q**1.5 / p**0.5)
    )
    assert arithmetic("(base + target) / 2", base=base, target=target) == pytest.approx(
        unit(np.sqrt(p * q))
    )
    assert arithmetic("2 * base + target", base=base, target=target) == pytest.approx(
        unit((p * p * q) ** (1 / 3))
    )
    assert arithmetic("base - negative", base=base, negative=opponent) == pytest.approx(
        unit(p / r)
    ), "weight 0: as it is"
    exact = arithmetic(
        "0.6 * target + 0.3 * base - 0.9 * negative", base=base, target=target, negative=opponent
    )
    assert exact == pytest.approx(unit(q**0.6 * p**0.3 / r**0.9)), (
        "weight 0 but for rounding: as it is"
    )
    # The larger of the two decides the token, and its weight divides it.
    union = arithmetic("union(target, 0.5 * negative)", target=target, negative=opponent)
    values = [
        math.log(a) if math.log(a) >= 0.5 * math.log(b) else math.log(b)
        for a, b in zip(q, r, strict=True)
    ]
    assert union == pytest.approx(unit(np.exp(values)))
    both = arithmetic(
        "base - 0.5 * union(target, negative, base)", base=base, target=target, negative=opponent
    )
    assert both == pytest.approx(unit((p / np.maximum(np.maximum(p, q), r) ** 0.5) ** 2))
    least = arithmetic("intersection(base, target)", base=base, target=target)
    assert least == pytest.approx(unit(np.minimum(p, q)))
    mean = arithmetic("target - 0.5 * opponents", target=target, a=base, b=opponent)
    assert mean == pytest.approx(unit((q / (p * r) ** 0.25) ** 2))


def test_arithmetics_default_against_the_definition():
    steps = distributions("target", "negative")
    for p, combined in zip(steps, run(methods.get("arithmetic"), steps), strict=True):
        for sample in range(2):
            z = [
                (math.log(a) - 0.96 * max(math.log(a), math.log(b))) / 0.04
                for a, b in zip(p["target"][sample], p["negative"][sample], strict=True)
            ]
            assert combined[sample] == pytest.approx(unit(np.exp(np.array(z) - max(z))), abs=1e-9)


def test_arithmetics_branches(tmp_path):
    topic = load_task("topic")
    names = [branch.name for branch in methods.get("arithmetic").branches(topic, "sports")]
    assert names == ["target", "world", "business", "science"]
    some = methods.get("arithmetic", formula="target + base - world - 0.1 * opponents").branches(
        topic, "sports"
    )
    assert [branch.name for branch in some] == ["target", "base", "world", "business", "science"]
    (tmp_path / "mood.toml").write_text(
        '[attributes.calm]\nprefix = "Very calm:"\n[prompts]\ntexts = ["The sea"]\n'
        '[methods.arithmetic.texts.calm]\nslow = "A slow text."\n'
    )
    mood = load_task(str(tmp_path / "mood.toml"))
    (base, slow) = methods.get("arithmetic", formula="base + slow").branches(mood, "calm")
    assert (base.prefix, slow.prefix, slow.join) == (None, "A slow text.", "\n")
    with pytest.raises(
        MethodError, match="'calm' has no opponents on task 'mood' that the formula"
    ):
        methods.get("arithmetic").branches(mood, "calm")
    with pytest.raises(
        MethodError,
        match="unknown name 'slw'; allowed: base, target, slow, opponents; did you mean 'slow'",
    ):
        methods.get("arithmetic", formula="base + slw").branches(mood, "calm")
