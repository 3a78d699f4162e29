"""A float64 softmax for models in float64.

Some architectures compute their softmax in float32 under any dtype. The propositions are exact, and
that rounding would hide it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lapa2_interp.models.facts import Model


def make_softmax_exact(model: Model) -> None:
    """Compute the softmax in float64, also in architectures that always use float32.

    In float32, float64's masking value is -inf, and the row of a padding query, which sees no key,
    would be NaN; it becomes 0. The pattern that arrives at `hook_pattern` is replaced by
    the float64 softmax of the scores that left `hook_attn_scores`, edits included. Only entries
    where the two agree to float32 precision are replaced (a learned sink's share stays out).
    """
    import torch
    from transformer_lens.hook_points import HookPoint

    class Remembering(HookPoint):
        def __call__(self, scores: torch.Tensor) -> torch.Tensor:
            self.latest = super().__call__(scores)
            return self.latest

    for block in model.blocks:
        if not hasattr(getattr(block, "attn", None), "hook_attn_scores"):
            continue  # a layer without attention
        scores_point = block.attn.hook_attn_scores
        scores_point.__class__ = Remembering

        def refine(
            _point: Any, results: tuple[torch.Tensor], scores_point: Any = scores_point
        ) -> torch.Tensor:
            latest = vars(scores_point).pop("latest", None)
            if latest is None or latest.shape != results[0].shape:  # the scores hook is dead
                return results[0]
            blind = latest.isneginf().all(dim=-1, keepdim=True)
            exact = latest.double().softmax(dim=-1).masked_fill(blind, 0.0)
            agree = ((results[0] - exact).abs() < 1e-6) | results[0].isnan()
            return torch.where(agree, exact, results[0])

        block.attn.hook_pattern.register_forward_pre_hook(refine)
