"""Distributions over five tokens in three steps, and what a method makes of them."""

import numpy as np
import torch

STEPS = 3


TOKENS = [3, 1, 4]


def distributions(*names, samples=2, scale=2.0, seed=7):
    """Random next-token probabilities: step, then branch, [sample][token]."""
    logits = np.random.default_rng(seed).normal(0, scale, (STEPS, len(names), samples, 5))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return [dict(zip(names, step, strict=True)) for step in p]


def as_logs(p, dtype=torch.float64):
    return {name: torch.tensor(rows, dtype=dtype).log() for name, rows in p.items()}


def normalised(log_weights):
    return log_weights.double().softmax(dim=1).numpy()


def run(method, steps):
    """Normalised weights of every step, the tokens TOKENS being sampled by all samples."""
    state, weights = None, []
    for p, token in zip(steps, TOKENS, strict=True):
        log_probs = as_logs(p)
        weights.append(normalised(method.combine(log_probs, state)))
        state = method.advance(
            state, log_probs, torch.full((len(p["base"]) if "base" in p else 2,), token)
        )
    return weights


def unit(weights):
    return np.array(weights) / np.sum(weights)


CLASSES = [("target", "b"), ("target", "b", "c", "d")]
