"""Drawing the next token from the controlled weights.

Top-k, then one uniform number per sample and step.

A draw must not depend on who else is in the batch, so

- the numbers come from a counter-based stream keyed by (seed, prompt text, sample): sample 7 of 20
  draws what sample 7 alone draws, a 64-token text is the first 64 tokens of the 512-token one, and
  baseline and LaPA2 share their numbers;
- kept tokens are walked in token-id order and ties at rank k go to the smaller id, so that two
  logits swapping ranks in the last bit cannot move a draw.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

NOTHING = -1
"""Token of a step at which no token has positive weight."""


def uniforms(
    seed: int, prompt: str, sample: int, steps: int, trial: int = 0
) -> Float[np.ndarray, " step"]:
    """The uniform numbers in [0, 1) of one sample's steps; a longer stream begins with a shorter
    one.

    Args:
        prompt: The prompt's text, or the tokens of a chat (`arrange.Arrangement.streams`).
        trial: Of a text that was drawn again, how often before.
    """
    again = f"{trial}\0" if trial else ""
    key = hashlib.sha256(f"{again}{seed}\0{sample}\0{prompt}".encode()).digest()
    return np.random.Generator(
        np.random.Philox(key=np.frombuffer(key[:16], dtype=np.uint64))
    ).random(steps)


def keep_top_k(log_weights: Float[Tensor, "sample vocab"], k: int) -> Int[Tensor, "sample kept"]:
    """Ids of the k largest log-weights of each sample, ascending; ties at rank k go to the smaller
    id."""
    k = min(k, log_weights.shape[1])
    if k == log_weights.shape[1]:
        return torch.arange(k, device=log_weights.device).expand_as(log_weights)
    ranked, ids = log_weights.topk(min(k + 1, log_weights.shape[1]), dim=1)  # sample rank
    if ranked.shape[1] > k:
        ids = ids[:, :k]
        tied = ranked[:, k - 1] == ranked[:, k]  # the common case of bfloat16 logits
        if tied.any():
            # tied_sample vocab, tied_sample 1
            weights, last = log_weights[tied], ranked[tied, k - 1 : k]
            stays = ~(weights < last)  # nan ranks first, as in topk
            row, token = (weights == last).nonzero(as_tuple=True)  # tie: its tied_sample and its id
            from_end = torch.searchsorted(row, row, right=True) - torch.arange(
                len(row), device=row.device
            )
            above = (~(ranked[tied] <= last)).sum(dim=1)  # tied_sample
            surplus = from_end <= (above + row.bincount(minlength=len(last)) - k)[row]
            stays[row[surplus], token[surplus]] = False
            ids[tied] = stays.nonzero()[:, 1].view(-1, k)
    return ids.sort(dim=1).values


def draw(
    log_weights: Float[Tensor, "sample vocab"], uniform: Float[Tensor, " sample"], *, top_k: int
) -> Int[Tensor, " sample"]:
    """One token per sample: keep the top k, normalise, invert the cumulative distribution at the
    uniform number.

    A sample whose weights are all zero, or not numbers, gets `NOTHING`.

    Args:
        log_weights: Controlled log-weights; need not be normalised. -inf excludes a token.
        uniform: One number in [0, 1) per sample.
        top_k: Tokens kept, >= 1.
    """
    top_ids = keep_top_k(log_weights, top_k)
    kept_weights = log_weights.gather(1, top_ids).double()  # sample vocab -> sample kept
    best = kept_weights.max(dim=1, keepdim=True).values  # sample 1
    cumulative = (kept_weights - best).exp().cumsum(dim=1)  # sample kept
    # right=True steps over tokens of weight zero; the clamp is for a uniform that rounds up to the
    # total. sample 1
    rank = torch.searchsorted(
        cumulative, uniform[:, None].double() * cumulative[:, -1:], right=True
    )
    # sample 1 -> sample
    tokens = top_ids.gather(1, rank.clamp(max=top_ids.shape[1] - 1))[:, 0]
    return tokens.where(best[:, 0].isfinite(), NOTHING)
