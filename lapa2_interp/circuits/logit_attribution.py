"""Direct logit attribution of heads, split by the part of the text that they read.

A head's output at query q is a sum over keys. Let S be a part of the keys: the prefix, BOS, the
prompt, or the text generated so far. From S the head writes

    w = sum over k in S of P[q, k] v[k] W_O

The final norm divides by sigma and multiplies by gamma (LayerNorm first takes the mean away, C). So
w adds to the logits, along a direction u of the vocabulary,

    (C w) . (gamma u) / sigma            sigma that of the actual run: the norm is not folded away

u is the gradient, at this query, of the branch's preference for its attribute's words (`lex`). All
parts of all heads, biases, MLPs, the embedding and the norm's bias sum to the logit difference
itself.

All of this is the direct effect only. A head that writes for other heads has none, however much
control is lost without it (`knockout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from lapa2_interp._util.values import numbers_checked
from lapa2_interp.bias.augmentation import AugmentationLike
from lapa2_interp.circuits.contrast_set import ContrastLike, ContrastSet, as_contrast_set
from lapa2_interp.circuits.edits import text_logits
from lapa2_interp.circuits.examples import ContrastExample
from lapa2_interp.circuits.guard import check_has_hooks, check_one_pass
from lapa2_interp.circuits.unit_table import UnitTable
from lapa2_interp.circuits.units import head_units
from lapa2_interp.errors import CircuitError
from lapa2_interp.models.card import prepacked_model
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.hook_names import (
    HOOK_EMBEDDING,
    HOOK_FINAL_NORM,
    HOOK_FINAL_SCALE,
    HOOK_MLP,
    HOOK_PATTERN,
    HOOK_VALUES,
)
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.models.readable_weights import check_weights_readable
from lapa2_interp.plots import Drawing
from lapa2_interp.progress import given_or_new_bar
from lapa2_interp.stats import bounds

PARTS = ("prefix", "bos", "prompt", "generated")
OTHERS = ("mlp", "bias", "embedding", "norm bias")


@dataclass(frozen=True)
class HeadLogitAttribution:
    """Direct effects of every head on the logits, at every step.

    Attributes:
        contrast_set: The texts.
        direct: Direct effects in logits, [example branch step layer head part]; parts are `PARTS`.
        others: The rest of the sum, [example branch step other]: MLPs, attention biases, the
            embedding and the final norm's bias (`OTHERS`).
        total: The logit difference that they sum to, [example branch step].
        mass: Attention on each part, a share from 0 to 1.
        size: The value-weighted form of `mass`: the Euclidean norm of the output that comes from
            the part, in the residual stream before the final norm.
        written: Output that comes from the prefix, after the final norm, target minus the others,
            mean over examples and steps, [layer head d_model].
        unembed: The model's unembedding and tokenizer, for `words`.
    """

    contrast_set: ContrastSet
    direct: Float[np.ndarray, "example branch step layer head part"]
    others: Float[np.ndarray, "example branch step other"]
    total: Float[np.ndarray, "example branch step"]
    mass: Float[np.ndarray, "example branch step layer head part"]
    size: Float[np.ndarray, "example branch step layer head part"]
    written: Float[np.ndarray, "layer head d_model"]
    unembed: tuple[Tensor, Any]

    def _control(self, values: np.ndarray) -> np.ndarray:
        """Target minus the mean of the others, the mean over steps, by example."""
        return np.nanmean(values[:, 0] - values[:, 1:].mean(1), axis=1)

    def table(self) -> UnitTable:
        """The table of direct effects from the prefix: target minus opposite, mean over steps, as
        shares of the whole logit difference.

        Example:
            >>> from lapa2_interp import circuits, load_model
            >>> model = load_model("planted")
            >>> found = circuits.head_logit_attribution(model, "sentiment")
            >>> found.table().best(1)
            ((1, 2),)
        """
        values = self._control(self.direct[..., 0])  # example layer head
        n, n_layers, n_heads = values.shape
        return UnitTable(
            self.contrast_set,
            head_units(n_layers, n_heads),
            values.reshape(n, -1),
            self._control(self.total),
            name="direct",
            label="direct effect, logits a step",
        )

    def frame(self) -> pd.DataFrame:
        """The frame of `table`, with direct_all (the direct effect from all parts), and mass and
        size of the prefix, mean over branches."""
        by_head = {
            "direct_all": self.contrast_set.by_prompt(self._control(self.direct.sum(-1))).mean(0),
            "mass": np.nanmean(self.mass[..., 0], axis=(0, 1, 2)),
            "size": np.nanmean(self.size[..., 0], axis=(0, 1, 2)),
        }
        table = self.table().frame()
        at = (table["layer"], table["head"])
        return table.assign(**{name: values[at] for name, values in by_head.items()})

    def parts(self) -> pd.DataFrame:
        """The sum by part: target minus opposite, mean over steps, with intervals."""
        has_bos = any(example.layouts[0].n_bos for example in self.contrast_set.examples)
        summands = {
            name: self.direct[..., i].sum((-1, -2))
            for i, name in enumerate(PARTS)
            if name != "bos" or has_bos
        }
        summands |= {name: self.others[..., i] for i, name in enumerate(OTHERS)}
        summands["total"] = self.total
        rows = []
        for name, values in summands.items():
            by_prompt = self.contrast_set.by_prompt(self._control(values))
            low, high = bounds(by_prompt)
            row = {"part": name, "direct": float(by_prompt.mean())}
            rows.append(row | {"low": float(low), "high": float(high)})
        return pd.DataFrame(rows)

    @numbers_checked
    def words(self, layer: int, head: int, n: int = 10) -> tuple[list[str], list[str]]:
        """Tokens that a head's output from the prefix promotes most, and tokens that it demotes
        most.

        Raises:
            CircuitError: The model has no such head.
        """
        n_layers, n_heads = self.written.shape[:2]
        if not (0 <= layer < n_layers and 0 <= head < n_heads):
            raise CircuitError(
                f"head ({layer}, {head}) does not exist; the model has layers 0-{n_layers - 1},"
                f" heads 0-{n_heads - 1}"
            )
        weights, tokenizer = self.unembed
        written = torch.from_numpy(self.written[layer, head]).to(weights)
        logits = written @ weights
        order = logits.argsort().tolist()
        best = [tokenizer.decode([token]) for token in order[::-1][:n]]
        return best, [tokenizer.decode([token]) for token in order[:n]]

    def plot(self, named: int = 8) -> Drawing:
        """Direct effect against attention on the prefix."""
        mass = np.nanmean(self.mass[..., 0], axis=(0, 1, 2)).ravel()
        return self.table().plot_against(mass, "attention on the prefix", named)


@numbers_checked
@accepts_model_name
def head_logit_attribution(
    model: Model,
    contrast: ContrastLike,
    *,
    augmentation: AugmentationLike = None,
    progress: tqdm | None = None,
) -> HeadLogitAttribution:
    """Compute every head's direct effect on the logits, by the part of the text that it reads.

    Args:
        model: A TransformerBridge.
        contrast: A `ContrastSet`, or a task by name or value, or one or more examples.
        augmentation: One or more augmentations that act in every branch.
        progress: A bar that counts texts.

    Raises:
        CircuitError: A model without hooks; no words; or blocks that add something
            else to the residual stream, or change the logits, so that parts would not sum.
    """
    check_has_hooks(model, "what heads write is read")
    weights = _Weights(model)
    contrast_set = as_contrast_set(model, contrast)
    if len(contrast_set.words) < 2:
        raise CircuitError(
            "what heads write is measured on the words of each attribute; give words"
        )
    check_one_pass(augmentation, contrast_set.examples, "what heads write is read from")
    # Arrays of all examples, filled one at a time.
    shape = (
        len(contrast_set.examples),
        len(contrast_set.attributes),
        max(c.n_steps for c in contrast_set.examples),
    )
    heads = (model.cfg.n_layers, model.cfg.n_heads)
    arrays = {
        name: np.full((*shape, *heads, len(PARTS)), np.nan, np.float32)
        for name in ("direct", "mass", "size")
    }
    others = np.full((*shape, len(OTHERS)), np.nan)
    total = np.full(shape, np.nan)
    written = np.zeros((*heads, model.cfg.d_model))
    with given_or_new_bar(progress, len(contrast_set.examples), "writes", "text") as bar:
        for i, example in enumerate(contrast_set.examples):
            with torch.no_grad(), prepacked_model(model):
                outputs = _collect_outputs(model, example, augmentation)
                direct = _attribute(weights, outputs, contrast_set)
            for name in arrays:
                arrays[name][i, :, : example.n_steps] = direct[name].cpu().numpy()
            others[i, :, : example.n_steps] = direct["others"].cpu().numpy()
            total[i, :, : example.n_steps] = direct["total"].cpu().numpy()
            written += direct["written"].cpu().numpy() / len(contrast_set.examples)
            bar.update()
    unembed = (weights.unembed.detach().cpu(), model.tokenizer)
    return HeadLogitAttribution(
        contrast_set, others=others, total=total, written=written, unembed=unembed, **arrays
    )


class _Weights:
    """Weights between the heads' outputs and the logits."""

    def __init__(self, model: Model) -> None:
        check_weights_readable(model, "what heads write is computed from")
        self.out = _wide(model.W_O)  # layer head d_head d_model
        self.unembed = _wide(model.W_U)  # d_model vocab
        self.unembed_bias = _wide(model.b_U)  # vocab
        norm = model.ln_final.original_component
        beta = getattr(norm, "bias", None)
        self.gamma = _wide(norm.weight)  # d_model
        self.beta = None if beta is None else _wide(beta)
        self.centres = isinstance(norm, torch.nn.LayerNorm)
        biases = [block.attn.o.original_component.bias for block in model.blocks]
        self.biases = [None if bias is None else _wide(bias) for bias in biases]


def _wide(tensor: Tensor) -> Tensor:
    """In at least float32: sums of parts lose too much in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass
class _HeadOutputs:
    """Activations of one example in every branch; queries are the steps.

    Attributes:
        parts: By layer, the heads' outputs from each part, before W_O.
        mass: By layer, the heads' attention on each part.
        mlp: The sum of the MLPs' outputs.
        embedding: The residual stream before the first block.
        final: The residual stream before the final norm.
        scale: The final norm's sigma.
    """

    parts: list[Float[Tensor, "branch step head part d_head"]]
    mass: list[Float[Tensor, "branch step head part"]]
    mlp: Float[Tensor, "branch step d_model"]
    embedding: Float[Tensor, "branch step d_model"]
    final: Float[Tensor, "branch step d_model"]
    scale: Float[Tensor, "branch step 1"]
    logits: Float[Tensor, "branch step vocab"]


def _collect_outputs(
    model: Model, example: ContrastExample, augmentation: AugmentationLike
) -> _HeadOutputs:
    """One forward pass of all branches, with hooks on what `_HeadOutputs` has."""
    # Keys of each part.
    layout = example.layouts[0]
    slots = torch.arange(len(layout) + example.n_steps - 1, device=model.cfg.device)
    masks = {
        "prefix": (slots >= layout.prefix.start) & (slots < layout.prefix.stop),
        "bos": (slots >= layout.bos.start) & (slots < layout.bos.stop),
        "prompt": (slots >= layout.prompt.start) & (slots < layout.prompt.stop),
        "generated": slots >= layout.prompt.stop,
    }
    mask = torch.stack([masks[name] for name in PARTS], dim=1)  # key part
    group = model.cfg.n_heads // facts_of(model).n_kv_heads
    # Hooks: a layer's values wait for its pattern; other activations are added up by name.
    values: dict[int, Tensor] = {}
    parts: list[Tensor] = []
    mass: list[Tensor] = []
    sums: dict[str, Tensor] = {}

    def on_value(value: Tensor, hook: Any, layer: int) -> None:
        with_soft = value  # branch key kv_head d_head
        if layout.soft:
            soft = torch.stack(
                [prefix.values[layer] for prefix in example.prefixes if prefix is not None]
            )
            with_soft = torch.cat([soft.transpose(1, 2).to(value), value], dim=1)
        values[layer] = with_soft.repeat_interleave(group, dim=2)

    def on_pattern(pattern: Tensor, hook: Any, layer: int) -> None:
        steps = _wide(pattern[:, :, -example.n_steps :])  # branch head step key
        split = steps[..., None] * mask.to(steps)  # branch head step key part
        parts.append(torch.einsum("bhqkp,bkhd->bqhpd", split, values.pop(layer).to(steps)))
        mass.append(split.sum(3).transpose(1, 2))

    def add(tensor: Tensor, hook: Any, name: str) -> None:
        steps = _wide(tensor[:, -example.n_steps :])
        sums[name] = sums[name] + steps if name in sums else steps

    hooks: list[tuple[str, Any]] = []
    for layer in range(model.cfg.n_layers):
        hooks += [
            (HOOK_VALUES.format(layer), partial(on_value, layer=layer)),
            (HOOK_PATTERN.format(layer), partial(on_pattern, layer=layer)),
            (HOOK_MLP.format(layer), partial(add, name="mlp")),
        ]
    hooks += [
        (HOOK_EMBEDDING, partial(add, name="embedding")),
        (HOOK_FINAL_NORM, partial(add, name="final")),
        (HOOK_FINAL_SCALE, partial(add, name="scale")),
    ]
    rows = [(example, branch) for branch in range(len(example.layouts))]
    logits = _wide(text_logits(model, rows, hooks, augmentation))
    return _HeadOutputs(parts, mass, logits=logits, **sums)


def _attribute(
    weights: _Weights,
    outputs: _HeadOutputs,
    contrast_set: ContrastSet,
) -> dict[str, Tensor]:
    """The arrays of `HeadLogitAttribution` for one example."""
    _check_sum(weights, outputs)
    u, over_vocab = _direction(weights, outputs.logits, contrast_set.words)
    scale = weights.gamma / outputs.scale  # branch step d_model

    def before_norm(direction: Tensor) -> Tensor:
        """The direction in the residual stream that the final norm maps to this one."""
        through = scale * direction
        return through - through.mean(2, keepdim=True) if weights.centres else through

    # Each head's output along u: direct effect, length, and vector from the prefix.
    g = before_norm(u)  # branch step d_model
    direct, size, written = [], [], []
    for out, parts in zip(weights.out, outputs.parts, strict=True):
        along_u = torch.einsum("bqm,hdm->bqhd", g, out)
        direct.append((parts * along_u[:, :, :, None]).sum(4))
        gram = torch.einsum("hdm,hem->hde", out, out)
        size.append((torch.einsum("bqhpd,hde->bqhpe", parts, gram) * parts).sum(4).clamp(min=0))
        prefix = torch.einsum("bqhd,hdm->bqhm", parts[:, :, :, 0], out)
        if weights.centres:
            prefix = prefix - prefix.mean(3, keepdim=True)
        prefix = (prefix * scale[:, :, None]).mean(1)  # branch head d_model
        written.append(prefix[0] - prefix[1:].mean(0))
    # The rest of the sum: `OTHERS`.
    biases = sum(
        (g @ bias if bias is not None else torch.zeros_like(g[..., 0])) for bias in weights.biases
    )
    norm = u @ weights.beta if weights.beta is not None else torch.zeros_like(g[..., 0])
    others = [(outputs.mlp * g).sum(2), biases, (outputs.embedding * g).sum(2), norm]
    chosen = (outputs.logits - weights.unembed_bias) * over_vocab
    return {
        "direct": torch.stack(direct, dim=2),
        "mass": torch.stack(outputs.mass, dim=2),
        "size": torch.stack(size, dim=2).sqrt(),
        "others": torch.stack([torch.as_tensor(summand) for summand in others], dim=2),
        "total": chosen.sum(2),
        "written": torch.stack(written),
    }


def _direction(
    weights: _Weights,
    logits: Float[Tensor, "branch step vocab"],
    words: Sequence[Sequence[int]],
) -> tuple[Float[Tensor, "branch step d_model"], Float[Tensor, "branch step vocab"]]:
    """u at each query, and its weights over the vocabulary."""
    over = torch.zeros_like(logits)
    plus, minus = list(words[0]), [token for ids in words[1:] for token in ids]
    over[..., plus] = logits[..., plus].softmax(2)
    over[..., minus] -= logits[..., minus].softmax(2)
    return over @ weights.unembed.t(), over


def _check_sum(weights: _Weights, outputs: _HeadOutputs) -> None:
    """Refuse a model in which the parts would not sum."""
    stream = outputs.embedding + outputs.mlp
    for out, parts, bias in zip(weights.out, outputs.parts, weights.biases, strict=True):
        stream = stream + torch.einsum("bqhpd,hdm->bqm", parts, out)
        if bias is not None:
            stream = stream + bias
    norm = (
        (outputs.final - outputs.final.mean(2, keepdim=True)) if weights.centres else outputs.final
    )
    norm = norm / outputs.scale * weights.gamma
    if weights.beta is not None:
        norm = norm + weights.beta
    logits = norm @ weights.unembed + weights.unembed_bias
    for problem, one, expected in (
        ("add something else than heads and MLPs to the residual stream", stream, outputs.final),
        ("change the logits after the unembedding", logits, outputs.logits),
    ):
        gap = float((one - expected).abs().max() / expected.abs().max())
        if gap > 0.02:
            raise CircuitError(
                f"this model's layers {problem} (difference {gap:.1g}), so direct effects would not"
                " sum; use knock-outs"
            )
