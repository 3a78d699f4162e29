"""Which heads carry the control: what a prefix does to the next token, how much of it is lost when
heads cannot see the prefix, and what they write.

    from lapa2_interp import circuits, load_model

    model = load_model("planted")
    circuits.control(model, "sentiment").plot()
    table = circuits.knock_out(model, "sentiment", over="head")
"""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.circuits.cases import RAW, ContrastExample, make_examples
    from lapa2_interp.circuits.direct import HeadLogitAttribution, head_logit_attribution
    from lapa2_interp.circuits.fading import Fading, measure_fading
    from lapa2_interp.circuits.gradients import (
        Attribution,
        attribution,
        integrated,
        prefiltered,
        recall,
    )
    from lapa2_interp.circuits.knockout import (
        JointCurve,
        KnockOut,
        Unit,
        joint_curve,
        knock_out,
        prefix_mass,
        read_heads,
        units_of,
        write_heads,
    )
    from lapa2_interp.circuits.mass import alpha_at_mass, mean_mass
    from lapa2_interp.circuits.metrics import METRICS, Predictions
    from lapa2_interp.circuits.patching import Patching, patch
    from lapa2_interp.circuits.prompt import PromptSlope, prompt_slope
    from lapa2_interp.circuits.question import ContrastSet
    from lapa2_interp.circuits.score import Control, control
    from lapa2_interp.circuits.selection import Selection, select, sufficient_tokens

__all__ = [
    "METRICS",
    "RAW",
    "Attribution",
    "ContrastExample",
    "ContrastSet",
    "Control",
    "Fading",
    "HeadLogitAttribution",
    "JointCurve",
    "KnockOut",
    "Patching",
    "Predictions",
    "PromptSlope",
    "Selection",
    "Unit",
    "alpha_at_mass",
    "attribution",
    "control",
    "head_logit_attribution",
    "integrated",
    "joint_curve",
    "knock_out",
    "make_examples",
    "mean_mass",
    "measure_fading",
    "patch",
    "prefiltered",
    "prefix_mass",
    "prompt_slope",
    "read_heads",
    "recall",
    "select",
    "sufficient_tokens",
    "units_of",
    "write_heads",
]
__getattr__, __dir__ = lazy_names(__name__)
