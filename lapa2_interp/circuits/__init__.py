"""Circuits: the heads that carry the control.

Distances between the branches' predictions, the control lost when heads cannot see the prefix, and
the heads' direct effects on the logits.

Example:
    >>> from lapa2_interp import circuits, load_model
    >>> model = load_model("planted")
    >>> texts = circuits.ContrastSet.of(model, "sentiment", tokens=4)
    >>> table = circuits.knock_out(model, texts, over="head")
    >>> drawing = table.plot()
    >>> table.best(1)
    ((1, 2),)
"""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.circuits.contrast_set import ContrastSet
    from lapa2_interp.circuits.control import ControlScore, control_score
    from lapa2_interp.circuits.examples import RAW, ContrastExample
    from lapa2_interp.circuits.fade_account import FadeAccount, account_for_fading
    from lapa2_interp.circuits.fading import Fading, measure_fading
    from lapa2_interp.circuits.gradients import Attribution, attribution, prefilter_recall
    from lapa2_interp.circuits.hidden_span import span_effect
    from lapa2_interp.circuits.knockout import JointCurve, KnockOut, joint_curve, knock_out
    from lapa2_interp.circuits.logit_attribution import HeadLogitAttribution, head_logit_attribution
    from lapa2_interp.circuits.metrics import METRICS, Predictions
    from lapa2_interp.circuits.patching import Patching, patch
    from lapa2_interp.circuits.prefix_attention import (
        alpha_at_prefix_attention,
        mean_prefix_attention,
        prefix_attention_by_head,
    )
    from lapa2_interp.circuits.pro_aug import PromptSlope, prompt_slope
    from lapa2_interp.circuits.selection import Selection, select, sufficient_tokens
    from lapa2_interp.circuits.unit_table import UnitTable
    from lapa2_interp.circuits.units import Unit, make_units

__all__ = [
    "METRICS",
    "RAW",
    "Attribution",
    "ContrastExample",
    "ContrastSet",
    "ControlScore",
    "FadeAccount",
    "Fading",
    "HeadLogitAttribution",
    "JointCurve",
    "KnockOut",
    "Patching",
    "Predictions",
    "PromptSlope",
    "Selection",
    "Unit",
    "UnitTable",
    "account_for_fading",
    "alpha_at_prefix_attention",
    "attribution",
    "control_score",
    "head_logit_attribution",
    "joint_curve",
    "knock_out",
    "make_units",
    "mean_prefix_attention",
    "measure_fading",
    "patch",
    "prefilter_recall",
    "prefix_attention_by_head",
    "prompt_slope",
    "select",
    "span_effect",
    "sufficient_tokens",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "contrast_set": "ContrastSet",
        "control": "ControlScore control_score",
        "examples": "RAW ContrastExample",
        "fade_account": "FadeAccount account_for_fading",
        "fading": "Fading measure_fading",
        "gradients": "Attribution attribution prefilter_recall",
        "hidden_span": "span_effect",
        "knockout": "JointCurve KnockOut joint_curve knock_out",
        "logit_attribution": "HeadLogitAttribution head_logit_attribution",
        "metrics": "METRICS Predictions",
        "patching": "Patching patch",
        "prefix_attention": (
            "alpha_at_prefix_attention mean_prefix_attention prefix_attention_by_head"
        ),
        "pro_aug": "PromptSlope prompt_slope",
        "selection": "Selection select sufficient_tokens",
        "unit_table": "UnitTable",
        "units": "Unit make_units",
    },
)
