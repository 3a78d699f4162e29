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
WIDER = 2
"""Top-k ranks this many times k tokens, so that it sees where a tie at rank k ends. Ties are the
common case of bfloat16 logits."""


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
    n_vocab = log_weights.shape[1]
    k, n_ranked = min(k, n_vocab), min(WIDER * k, n_vocab)
    ranked, ids = log_weights.topk(n_ranked, dim=1)  # sample rank
    ids, by_id = ids.sort(dim=1)
    # Stable, so that ties stay in the order of their ids.
    best = ranked.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices[:, :k]
    best_ids = ids.gather(1, best).sort(dim=1).values
    # A tie that goes on beyond the ranked ones, as that of many tokens of weight zero does.
    beyond = ranked[:, k - 1] == ranked[:, -1]
    if n_ranked < n_vocab and beyond.any():
        weights, last = log_weights[beyond], ranked[beyond, k - 1 : k]
        above, equal = ~(weights <= last), weights == last  # nan ranks first, as in topk
        left = k - above.sum(dim=1, keepdim=True)
        stays = above | (equal & (equal.cumsum(dim=1) <= left))
        best_ids[beyond] = stays.nonzero()[:, 1].view(-1, k)
    return best_ids


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
