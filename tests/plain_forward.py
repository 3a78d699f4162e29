"""The paper's decoding by hand, to check the package against: weights in, tokens out.

Nothing here comes from the package, from TransformerLens or from transformers' models. A state dict
is read by the names of its tensors, attention is formed as a matrix, and the bias is added to its
scores. There is no cache, no batch and no padding: each step reads BOS, prefix, prompt and the new
tokens from the beginning. Formulas are those of Eq. 9 and Algorithm 1, of Table "scaling", and of
the methods' own papers.

A rule is a mapping with the fields of a bias: alpha, law, l0, profile, span, length_rule, phase,
steps, layers and heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu

Weights = Mapping[str, Tensor]


class Size(NamedTuple):
    """What a network's weights do not say."""

    family: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    eps: float
    rotated: int = 0
    """Dimensions of a head that turn with the position."""


class Soft(NamedTuple):
    """A soft prefix, as arrays [layer kv_head slot d_head]."""

    keys: Tensor
    values: Tensor
    shifted: bool
    """True if BOS stands at the position after the slots, False if it stands at position 0."""


class Branch(NamedTuple):
    """What one model call reads before the new tokens, and its bias."""

    bos: list[int]
    prefix: list[int]
    """The hard prefix; empty on the raw model, and behind a soft prefix."""
    prompt: list[int]
    n_released: int
    """The number of first keys that the released code strengthens."""
    soft: Soft | None = None
    rules: tuple[Mapping[str, Any], ...] = ()

    @property
    def n_soft(self) -> int:
        return 0 if self.soft is None else self.soft.keys.shape[2]

    def keys(self, n_new: int) -> dict[str, list[int]]:
        """The number of each key by what it is; soft slots are first."""
        parts, start = {}, 0
        for name, size in (
            ("soft", self.n_soft),
            ("bos", len(self.bos)),
            ("prefix", len(self.prefix)),
            ("prompt", len(self.prompt)),
            ("generated", n_new),
        ):
            parts[name] = list(range(start, start + size))
            start += size
        parts["prefix"] += parts.pop("soft")
        return parts


# --- the bias


def bias_of_rule(rule: Mapping[str, Any], branch: Branch, n_new: int) -> Tensor:
    """The bias of every query on every key, [query key], when `n_new` tokens are written.

    Queries are tokens: soft slots ask nothing.
    """
    released = rule.get("profile") == "released"
    parts = branch.keys(n_new)
    strengthened = parts["prefix"] or parts["prompt"]  # the prompt on the raw model (Eq. 15)
    n = len(strengthened)
    # Which keys, and what n is.
    span = rule.get("span", "released" if released else "prefix")
    if not parts["prefix"] and not isinstance(span, str):
        span = "released" if released else "prefix"  # slots are those of the prefixed text
    if span == "prefix":
        keys = strengthened
    elif span == "bos":
        keys = parts["bos"]
    elif span == "prefix+bos":
        keys = parts["bos"] + strengthened
    elif span == "input":
        keys = [key for name in ("prefix", "bos", "prompt") for key in parts[name]]
    elif span == "released":
        keys = list(range(branch.n_released))
        n = len(keys)
    else:
        if span[0] == "prefix":
            keys = [parts["prefix"][i] for i in span[1]]
        else:
            keys = [key for start, stop in span for key in range(start, stop)]
        n = len(keys)
    # Which queries. Query t predicts the new token t; the last token of the prompt is query 0.
    last_prompt = parts["prompt"][-1]
    in_prefix = set(keys) <= set(parts["prefix"])
    phase = rule.get("phase", "decode" if released else "last_query")
    first = {
        "decode": last_prompt + 1,
        "last_query": last_prompt,
        "predicting_only": last_prompt + n_new,
        "after_span": max(parts["prefix"] if in_prefix else keys) + 1,
        "everywhere": 0,
    }[phase]
    first_step, end_step = rule.get("steps", (-math.inf, math.inf))
    # The bias.
    n_keys = last_prompt + 1 + n_new
    bias = torch.zeros(n_keys, n_keys, dtype=torch.float64)
    for query in range(branch.n_soft, n_keys):
        l = query + 1  # the keys that it sees, its own with them
        if rule.get("length_rule", "kv" if released else "paper") == "paper":
            l -= sum(key <= query for key in parts["bos"])
        if query < first or not first_step <= query - last_prompt < end_step:
            continue
        if released and l <= n:
            continue
        bias[query, keys] = law(rule, l, n)
    return bias[branch.n_soft :]


def law(rule: Mapping[str, Any], l: int, n: int) -> float:
    """b(l) of Eq. 9, and of Table "scaling"."""
    match rule.get("law", "log"):
        case "log":  # never below 0: a query that sees fewer keys than n gets none
            return rule["alpha"] * math.log(l / n) if l > n else 0.0
        case "linear":
            return rule["alpha"] * l / n
        case "sqrt":
            return rule["alpha"] * math.sqrt(l / n)
        case "constant":
            return rule["alpha"] * math.log(rule["l0"] / n)
    raise ValueError(rule["law"])


def reaches(rule: Mapping[str, Any], layer: int, head: int, n_layers: int) -> bool:
    """True if a rule acts in this head."""
    layers, half = rule.get("layers", "all"), n_layers // 2
    in_layer = {
        "all": True,
        "bottom": layer < half,
        "top": layer >= half,
        "even": layer % 2 == 0,
        "odd": layer % 2 == 1,
    }[layers] if isinstance(layers, str) else layer in layers  # fmt: skip
    heads = rule.get("heads", "all")
    return in_layer and (heads == "all" or (layer, head) in heads)


def bias_of_branch(branch: Branch, n_new: int, size: Size) -> Tensor:
    """The sum of all rules, [layer head query key]."""
    n_tokens = len(branch.bos + branch.prefix + branch.prompt) + n_new
    bias = torch.zeros(
        size.n_layers, size.n_heads, n_tokens, branch.n_soft + n_tokens, dtype=torch.float64
    )
    for rule in branch.rules:
        of_rule = bias_of_rule(rule, branch, n_new)
        for layer in range(size.n_layers):
            for head in range(size.n_heads):
                if reaches(rule, layer, head, size.n_layers):
                    bias[layer, head] += of_rule
    return bias


# --- the networks


def forward(
    weights: Weights, size: Size, ids: Sequence[int], bias: Tensor, soft: Soft | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [token vocab] and attention [layer head query key] of one text."""
    n_soft = 0 if soft is None else soft.keys.shape[2]
    positions = torch.arange(len(ids)) + (n_soft if soft is not None and soft.shifted else 0)
    patterns = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The heads' outputs side by side, [token head*d], from queries, keys and values
        [head token d]."""
        if size.rotated:
            query, key = turn(query, positions, size), turn(key, positions, size)
        if soft is not None:
            key = torch.cat([soft.keys[layer].to(key.dtype), key], dim=1)
            value = torch.cat([soft.values[layer].to(value.dtype), value], dim=1)
        group = size.n_heads // size.n_kv_heads
        key, value = (array.repeat_interleave(group, dim=0) for array in (key, value))
        scores = query @ key.mT / math.sqrt(query.shape[2])
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(n_soft + 1)
        pattern = (scores + bias[layer]).masked_fill(later, -math.inf).softmax(dim=2)
        patterns.append(pattern)
        return (pattern @ value).transpose(0, 1).flatten(1)

    network = {"gpt2": gpt2, "llama": llama, "neox": neox}[size.family]
    logits = network(weights, size, torch.tensor(ids), positions, attend)
    return logits, torch.stack(patterns)


def turn(x: Tensor, positions: Tensor, size: Size) -> Tensor:
    """Rotary embedding of [head token d]: dimension i turns with dimension i + rotated/2.

    Angles are float32, as they are in the models' own code in every dtype.
    """
    half = size.rotated // 2
    speeds = 1 / 10000 ** (torch.arange(0, size.rotated, 2).float() / size.rotated)
    angles = positions[:, None].float() * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=2)


def by_head(x: Tensor, n_heads: int) -> Tensor:
    """[token head*d] as [head token d]."""
    return x.unflatten(1, (n_heads, -1)).transpose(0, 1)


def gpt2(w: Weights, size: Size, ids: Tensor, positions: Tensor, attend: Callable) -> Tensor:
    """Learned positions; weights stand as [in out]."""

    def norm(x: Tensor, name: str) -> Tensor:
        scale, shift = w[f"transformer.{name}.weight"], w[f"transformer.{name}.bias"]
        return layer_norm(x, (x.shape[1],), scale, shift, size.eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"transformer.{name}.weight"] + w[f"transformer.{name}.bias"]

    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][positions]
    for i in range(size.n_layers):
        parts = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, dim=1)
        heads = attend(i, *(by_head(part, size.n_heads) for part in parts))
        x = x + linear(heads, f"h.{i}.attn.c_proj")
        hidden = gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + linear(hidden, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["lm_head.weight"].T


def llama(w: Weights, size: Size, ids: Tensor, positions: Tensor, attend: Callable) -> Tensor:
    """Rotary positions, grouped keys and a gated MLP; no weights but matrices and scales.

    It normalises in float32, as the models' own code does in every dtype.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        narrow = x.float()
        narrow = narrow * (narrow.pow(2).mean(1, keepdim=True) + size.eps).rsqrt()
        return narrow.to(x.dtype) * w[f"model.{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"model.{name}.weight"].T

    x = w["model.embed_tokens.weight"][ids]
    for i in range(size.n_layers):
        read = norm(x, f"layers.{i}.input_layernorm")
        heads = attend(
            i,
            by_head(linear(read, f"layers.{i}.self_attn.q_proj"), size.n_heads),
            by_head(linear(read, f"layers.{i}.self_attn.k_proj"), size.n_kv_heads),
            by_head(linear(read, f"layers.{i}.self_attn.v_proj"), size.n_kv_heads),
        )
        x = x + linear(heads, f"layers.{i}.self_attn.o_proj")
        read = norm(x, f"layers.{i}.post_attention_layernorm")
        gate = silu(linear(read, f"layers.{i}.mlp.gate_proj"))
        gated = gate * linear(read, f"layers.{i}.mlp.up_proj")
        x = x + linear(gated, f"layers.{i}.mlp.down_proj")
    return norm(x, "norm") @ w["lm_head.weight"].T


def neox(w: Weights, size: Size, ids: Tensor, positions: Tensor, attend: Callable) -> Tensor:
    """Rotary positions in some dimensions; attention and MLP read the same stream, side by side."""

    def norm(x: Tensor, name: str) -> Tensor:
        scale, shift = w[f"gpt_neox.{name}.weight"], w[f"gpt_neox.{name}.bias"]
        return layer_norm(x, (x.shape[1],), scale, shift, size.eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"gpt_neox.{name}.weight"].T + w[f"gpt_neox.{name}.bias"]

    x = w["gpt_neox.embed_in.weight"][ids]
    for i in range(size.n_layers):
        read = norm(x, f"layers.{i}.input_layernorm")
        # Each head has its query, key and value side by side.
        all_heads = by_head(linear(read, f"layers.{i}.attention.query_key_value"), size.n_heads)
        heads = attend(i, *all_heads.chunk(3, dim=2))
        read = norm(x, f"layers.{i}.post_attention_layernorm")
        hidden = gelu(linear(read, f"layers.{i}.mlp.dense_h_to_4h"))
        x = (
            x
            + linear(heads, f"layers.{i}.attention.dense")
            + linear(hidden, f"layers.{i}.mlp.dense_4h_to_h")
        )
    return norm(x, "final_layer_norm") @ w["lm_head.weight"].T


# --- the methods: log-weights from the log-probabilities of all steps so far, by branch

LogProbs = Mapping[str, Tensor]
Combine = Callable[[Sequence[LogProbs], Sequence[int]], Tensor]


def direct(log_probs: Sequence[LogProbs], tokens: Sequence[int]) -> Tensor:
    """Paradigm I (GPT-2+Prefix, NegPrompt): P(x | a) = P_a(x)."""
    return log_probs[-1]["prefix"]


def preadd(lam: float) -> Combine:
    """Eq. 3: P_a^lam P^(1 - lam)."""

    def combine(log_probs: Sequence[LogProbs], tokens: Sequence[int]) -> Tensor:
        return lam * log_probs[-1]["prefix"] + (1 - lam) * log_probs[-1]["base"]

    return combine


def palette(strengths: Mapping[str, float], t: float) -> Combine:
    """The law of total probability. A strength below 0 moves away; s' is .1 of every attribute."""

    def combine(log_probs: Sequence[LogProbs], tokens: Sequence[int]) -> Tensor:
        main = (log_probs[-1]["base"].exp() + 1e-10).log()
        comp, m1, m2 = torch.zeros_like(main), 1.0, 0.0
        for name, strength in strengths.items():
            p = log_probs[-1][name].exp().clamp(1e-10, 1 - 1e-10)
            main = main + strength * (1 + 1 / (p.sigmoid() + 1e-10)) * (p + 1e-10).log()
            away = 0.1 if strength > 0 else -0.1
            comp = comp + away * (1 + 1 / ((1 - p).sigmoid() + 1e-10)) * (1 - p + 1e-10).log()
            m1 += (2 + math.exp(-1)) * abs(strength)
            m2 += (2 + math.exp(-1)) * 0.1
        return main / m1 + t * comp / m2

    return combine


def air_decoding(omega: float, plain: bool = False) -> Combine:
    """Eq. 4, with the classifier of Eq. 5 over reconstructed distributions, or over the plain
    ones."""

    def reconstructed(log_p: Tensor) -> Tensor:
        return log_p.exp() if plain else -1 / log_p

    def combine(log_probs: Sequence[LogProbs], tokens: Sequence[int]) -> Tensor:
        total = torch.zeros_like(log_probs[-1]["base"])
        for name in log_probs[-1]:
            if name != "base":
                ratio = 1.0
                for before, token in zip(log_probs, tokens, strict=False):
                    ratio *= float(
                        reconstructed(before[name][token]) / reconstructed(before["target"][token])
                    )
                total = total + ratio * reconstructed(log_probs[-1][name])
        posterior = reconstructed(log_probs[-1]["target"]) / total
        return log_probs[-1]["base"] + omega * posterior.log()

    return combine


# --- decoding


class Step(NamedTuple):
    """One new token, and how it came about."""

    token: int
    log_weights: Tensor
    attention: dict[str, Tensor]
    """By branch, the attention of the query that predicts the token, [layer head key]."""


def draw(log_weights: Tensor, uniform: float, top_k: int) -> int:
    """The token in whose share of the unit interval the number falls; the `top_k` likeliest tokens
    have shares, in the order of their ids."""
    ranked = sorted(range(len(log_weights)), key=lambda token: (-float(log_weights[token]), token))
    likeliest = sorted(ranked[:top_k])
    shares = log_weights[likeliest].softmax(dim=0).cumsum(dim=0)
    above = [token for token, end in zip(likeliest, shares.tolist(), strict=True) if uniform < end]
    return above[0]


def decode(
    weights: Weights,
    size: Size,
    branches: Mapping[str, Branch],
    combine: Combine,
    uniforms: Sequence[float],
    top_k: int,
) -> list[Step]:
    """One text (Algorithm 1), with a new token for each number of `uniforms`."""
    steps: list[Step] = []
    log_probs: list[LogProbs] = []
    tokens: list[int] = []
    for uniform in uniforms:
        of_step, attention = {}, {}
        for name, branch in branches.items():
            logits, patterns = forward(
                weights,
                size,
                branch.bos + branch.prefix + branch.prompt + tokens,
                bias_of_branch(branch, len(tokens), size),
                branch.soft,
            )
            of_step[name], attention[name] = logits[-1].log_softmax(dim=0), patterns[:, :, -1]
        log_probs.append(of_step)
        log_weights = combine(log_probs, tokens)
        tokens.append(draw(log_weights, uniform, top_k))
        steps.append(Step(tokens[-1], log_weights, attention))
    return steps
