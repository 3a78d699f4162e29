"""The recorder: an observer that reduces attention to sums inside the forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lapa2_interp.attention.trace import NEAREST, SUMS, TraceKind
from lapa2_interp.bias.layer_types import FULL_ATTENTION, NO_ATTENTION, LayerType, distinct_types
from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import TraceError
from lapa2_interp.models.span_attention import SpanScores, indices

if TYPE_CHECKING:
    import xarray as xr


class Recorder:
    """Reduces patterns to sums while the model runs; an `Observer` for `augmented`.

    Every query from the last prompt token on is a step, recorded when it is first seen. The prompt
    pass has one step. Each decoding pass has one step, also a pass that reads the whole text again.
    A pass over a given text has one for each of its tokens. `begin` sets the rows of the coming
    passes: first the prompts, after the expansion their samples; `index` maps those rows to the
    samples of the finished trace.

    Example:
        >>> from lapa2_interp import Augmentation, Layout, augmented
        >>> from lapa2_interp.attention import Recorder
        >>> from lapa2_interp.models.load import load_transformers
        >>> network, tokenizer, _ = load_transformers("tiny-gpt2")
        >>> layout = Layout.of(tokenizer, "Very positive:", "The lake")
        >>> recorder = Recorder(network.config.n_layer, network.config.n_head)
        >>> recorder.begin([layout])
        >>> with augmented(network, Augmentation(alpha=0.5), layout, recorder):
        ...     ids = network.generate(layout.tensor, max_new_tokens=8, do_sample=False)
        >>> n_steps = ids.shape[1] - len(layout)  # the last token is drawn, and never read
        >>> trace = recorder.dataset([layout], ["prefix"], [n_steps])
        >>> dict(trace["prefix"].sizes)
        {'branch': 1, 'sample': 1, 'step': 8, 'layer': 4, 'head': 4}

    Args:
        n_layers, n_heads: The model's.
        kind: "pooled" stores means over layers and heads, "full" every head.
        patterns: (layer, head) pairs whose whole attention rows are stored.
        layer_types: By layer; "full" for all by default.

    Raises:
        TraceError: A pair the model does not have, or of a layer without attention.
    """

    def __init__(
        self,
        n_layers: int,
        n_heads: int,
        kind: TraceKind = "full",
        patterns: Sequence[tuple[int, int]] = (),
        layer_types: Sequence[LayerType] | None = None,
    ) -> None:
        self.layer_types = tuple(layer_types or [FULL_ATTENTION] * n_layers)
        self.attending = [
            layer for layer, layer_type in enumerate(self.layer_types) if layer_type != NO_ATTENTION
        ]
        for layer, head in patterns:
            if not (0 <= layer < n_layers and 0 <= head < n_heads):
                raise TraceError(
                    f"head ({layer}, {head}) does not exist; the model has layers 0-{n_layers - 1},"
                    f" heads 0-{n_heads - 1}"
                )
            if layer not in self.attending:
                raise TraceError(
                    f"layer {layer} has no attention; layers with attention:"
                    f" {', '.join(map(str, self.attending))}"
                )
        self.kinds = distinct_types(self.layer_types)
        self.has_windows = self.kinds != [FULL_ATTENTION]
        self.kind = kind
        self.patterns = tuple(patterns)
        self.steps: list[Tensor] = []
        self.tokens: list[Tensor] = []
        self.rows: list[Tensor] = []
        self.caps: list[Tensor] = []
        self.slots_of_steps: list[int] = []
        self.n_skipped = 0
        self.caps_of_pass: Tensor | None = None
        self.may_cap = False

    def begin(
        self, layouts: Sequence[Layout], index: Int[Tensor, " expanded"] | None = None
    ) -> None:
        """Set the rows of the coming passes; `index` gives the observed row of every sample row."""
        self.layouts = layouts
        self.index = index
        self.width = 0
        self.l_pre = max(layout.l_pre for layout in layouts)
        self.parts = {
            name: torch.tensor([getattr(layout, name) for layout in layouts])
            for name in ("bos", "before", "prefix", "prompt")
        }
        self.parts["released_slice"] = torch.tensor(
            [layout.spans("released")[0] for layout in layouts]
        )

    def skip(self, n: int) -> None:
        """The next n queries are no steps: other tokens follow them that are given, too."""
        self.n_skipped += n

    @property
    def _next_slot(self) -> int:
        """The slot of the first query that may be the next step."""
        return len(self.layouts[0]) - 1 + len(self.steps) + self.n_skipped

    def _has_steps(self, n_keys: int) -> bool:
        """True if a pass up to this key has a step; a pass over the beginning of a prompt has
        none."""
        return n_keys > self._next_slot

    def _begin_pass(self, n_keys: int, device: torch.device) -> None:
        """Compute what all layers of a pass share: the slots of its steps, and the keys of each
        sum."""
        self.slots = range(self._next_slot, n_keys)
        if n_keys > self.width:  # when steps follow, twice as far
            self._weigh_keys(max(n_keys, 2 * self.width), device)
        self.weights = self.weights_of_keys[:, :n_keys]
        back = torch.arange(max(NEAREST), device=device)
        age = self.n_near[:, self.slots[0] : n_keys, None] - 1 - back  # row query last
        # row 1 query last
        self.nearest = self.near[:, None].expand(-1, len(self.slots), -1)
        self.nearest = self.nearest.gather(2, age.clamp(min=0))[:, None]
        self.is_near = (age >= 0)[:, None]  # row 1 query last
        self.layers: list[Tensor] = []
        self.means: dict[LayerType, Tensor] = {}
        self.mean_sums: dict[LayerType, Tensor] = {}
        self.pattern_rows: dict[tuple[int, int], Tensor] = {}

    def _weigh_keys(self, width: int, device: torch.device) -> None:
        """Compute which of the first keys belong to each sum."""
        self.width = width
        key = torch.arange(width, device=device)
        spans = {name: span.to(device) for name, span in self.parts.items()}
        inside = {name: (key >= span[:, :1]) & (key < span[:, 1:]) for name, span in spans.items()}
        inside["prompt"] |= inside.pop("before")  # the first messages of a chat
        inside["generated"] = (key >= spans["prompt"][:, 1:]).expand(len(self.layouts), width)
        start, stop = spans["prefix"].T[:, :, None]
        single = [(key == start + i) & (start + i < stop) for i in range(self.l_pre)]
        named = [inside[name] for name in SUMS if name in inside]
        self.weights_of_keys = torch.stack(named + single, dim=2).float()  # row key sum
        # The live keys outside the prefix, in order, and their number up to each key.
        near = (key >= spans["bos"][:, :1]) & ~inside["prefix"]  # row key
        self.near = torch.argsort(~near, dim=1, stable=True)  # row key
        self.n_near = near.cumsum(1)  # row key

    def observe(self, layer: int, pattern: Float[Tensor, "row head query key"], first: int) -> None:
        """Reduce a layer's attention at the queries that are steps."""
        n_keys = first + pattern.shape[2]
        if not self._has_steps(n_keys):
            return
        if layer == self.attending[0]:
            self._begin_pass(n_keys, pattern.device)
        # row head query key, of the queries that are steps
        steps = pattern[:, :, self.slots[0] - first :, :n_keys].to(
            self.weights.device, torch.float32
        )
        if self.kind == "full":
            self.layers.append(self._sums(steps))
        else:  # sums of a mean are the means of sums
            kind, mean = self.layer_types[layer], steps.mean(1, keepdim=True)  # row 1 query key
            self.means[kind] = self.means[kind] + mean if kind in self.means else mean
        # by pair: row query key
        self.pattern_rows |= {
            pair: steps[:, pair[1]].clone() for pair in self.patterns if pair[0] == layer
        }
        if layer == self.attending[-1]:
            self._close_pass()

    def observe_all(self, patterns: Float[Tensor, "layer row head query key"], first: int) -> None:
        """Reduce the attention of all layers of a pass, each of which has attention, at once."""
        self._begin_pass(first + patterns.shape[3], patterns.device)
        patterns = patterns[:, :, :, self.slots[0] - first :].float()
        if self.kind == "full":
            steps = patterns.transpose(0, 1)  # row layer head query key
            sums = self._sums(steps.flatten(1, 2)).unflatten(1, steps.shape[1:3])
            self.layers = list(sums.unbind(1))
        else:
            means = patterns.mean(2)  # layer row query key
            for kind, layers in zip(self.kinds, self._layers_of_kinds(), strict=True):
                self.means[kind] = means[layers].sum(0)[:, None]
        self.pattern_rows = {
            (layer, head): patterns[layer, :, head] for layer, head in self.patterns
        }
        self._close_pass()

    def needs_patterns(self, layer: int) -> str | None:
        """The reason why a layer must form its matrix, or None: whole rows are kept."""
        kept_rows = any(layer == patterned for patterned, _ in self.patterns)
        return "its attention rows are recorded" if kept_rows else None

    def observe_spans(self, layer: int, scores: SpanScores) -> None:
        """`observe` in a layer that forms no pattern."""
        if not self._has_steps(scores.n_keys):
            return
        if layer == self.attending[0]:
            self._begin_pass(scores.n_keys, scores.query.device)
        sums = self._sums_of_spans(scores).to(torch.float32)
        if self.kind == "full":
            self.layers.append(sums)
        else:
            kind, mean = self.layer_types[layer], sums.mean(1, keepdim=True)  # row 1 query sum
            before = self.mean_sums.get(kind)
            self.mean_sums[kind] = mean if before is None else before + mean
        if layer == self.attending[-1]:
            self._close_pass()

    def _sums_of_spans(self, scores: SpanScores) -> Float[Tensor, "row head query sum"]:
        """`_sums` of the steps of a pass that forms no pattern."""
        column = {name: i for i, name in enumerate(SUMS)}
        weights, start = self.weights.to(scores.wide), self.slots[0] - scores.first
        # The keys of the sums over few: all but prompt and generated.
        is_few = weights > 0
        is_few[..., [column["prompt"], column["generated"]]] = False
        index = indices(is_few.any(2))  # row few
        columns = index.clamp(min=0)[..., None].expand(-1, -1, weights.shape[2])
        weights_of_few = weights.gather(1, columns)[:, None]  # row 1 few sum
        prompt = scores.log_sum(weights[..., column["prompt"]] > 0, start=start)
        parts = []
        for queries in scores.query_blocks(
            start, max(index.shape[1], scores.query.shape[3] * max(NEAREST))
        ):
            steps = slice(queries.start - start, queries.stop - start)
            lse = scores.lse[:, :, queries, None]
            sums = (scores.scores(index, queries) - lse).exp() @ weights_of_few
            sums[..., column["prompt"]] = (prompt[:, :, steps] - lse[..., 0]).exp()
            nearest = self.nearest[:, 0, steps].masked_fill(~self.is_near[:, 0, steps], -1)
            # row head query last
            last = (scores.nearest_scores(nearest, queries) - lse).exp().cumsum(3)
            # Generated are all other keys; as long as they are the last few, those.
            every = (scores.key_lse[:, :, queries, None] - lse).exp()[..., 0]
            rest = every - sums[..., [column[name] for name in ("prefix", "bos", "prompt")]].sum(3)
            n_generated = torch.tensor(self.slots[steps], device=rest.device) + 1
            n_generated -= len(self.layouts[0])  # query
            ages = (n_generated - 1).clamp(0, max(NEAREST) - 1).expand(*rest.shape)
            exact = torch.where(n_generated > 0, last.gather(3, ages[..., None])[..., 0], 0.0)
            sums[..., column["generated"]] = torch.where(
                n_generated > max(NEAREST), rest.clamp(min=0), exact
            )
            parts.append(self._in_order(sums, last))
        return torch.cat(parts, dim=2)

    def _sums(
        self, steps: Float[Tensor, "row head query key"]
    ) -> Float[Tensor, "row head query sum"]:
        """The sums of `SUMS`, then the attention on each token of the prefix."""
        parts = (steps.flatten(1, 2) @ self.weights).unflatten(1, steps.shape[1:3])
        # row head query last
        last = torch.where(
            self.is_near, steps.gather(3, self.nearest.expand(-1, steps.shape[1], -1, -1)), 0.0
        )
        return self._in_order(parts, last.cumsum(3))

    @staticmethod
    def _in_order(
        parts: Float[Tensor, "row head query part"], last: Float[Tensor, "row head query last"]
    ) -> Float[Tensor, "row head query sum"]:
        """The sums of `SUMS` and of single tokens, from those by key and by age."""
        n_parts = len(SUMS) - len(NEAREST)
        nearest = last[..., [k - 1 for k in NEAREST]]
        return torch.cat([parts[..., :n_parts], nearest, parts[..., n_parts:]], dim=3)

    def capped(self, layer: int, caps: Bool[Tensor, "row head query"], first: int) -> None:
        """Count the biases of a layer that were cut at +-BIAS_CAP."""
        self.may_cap = True
        if not self._has_steps(first + caps.shape[2]):
            return
        count = caps.sum(1, dtype=torch.float32).cpu()  # row query
        self.caps_of_pass = count if self.caps_of_pass is None else self.caps_of_pass + count

    def _close_pass(self) -> None:
        """Move the sums of a finished pass to the samples' steps."""
        n_rows, n_queries = len(self.layouts), len(self.slots)
        self.slots_of_steps += self.slots
        if self.caps_of_pass is None:
            self.caps_of_pass = torch.zeros(n_rows, n_queries)
        self.caps += self._split_by_step(self.caps_of_pass[:, -n_queries:])
        self.caps_of_pass = None
        if self.kind == "full":
            # row query layer head sum
            sums = torch.stack(self.layers, dim=2).permute(0, 3, 2, 1, 4)
            of_kinds = [sums[:, :, layers].mean((2, 3)) for layers in self._layers_of_kinds()]
        else:
            of_kinds = [
                self._mean_sums(kind, len(layers))
                for kind, layers in zip(self.kinds, self._layers_of_kinds(), strict=True)
            ]
        means = torch.stack(of_kinds, dim=2)  # row query kind sum
        self.steps += self._split_by_step(
            (sums if self.kind == "full" else means)[..., : len(SUMS)]
        )
        self.tokens += self._split_by_step(means[..., len(SUMS) :])
        if self.patterns:
            # row query pair key -> by query: sample pair key
            rows = self._split_by_step(
                torch.stack([self.pattern_rows[pair] for pair in self.patterns], dim=2).cpu()
            )
            self.rows += [row[..., : slot + 1] for row, slot in zip(rows, self.slots, strict=True)]
        self.layers, self.means, self.mean_sums, self.pattern_rows = [], {}, {}, {}

    def _mean_sums(self, kind: LayerType, n_layers: int) -> Float[Tensor, "row query sum"]:
        """The sums of a mean over layers of a type, some with and some without patterns."""
        sums = self.mean_sums.get(kind)
        if sums is None:
            return self._sums(self.means[kind] / n_layers)[:, 0]
        if kind in self.means:
            sums = sums + self._sums(self.means[kind])
        return sums[:, 0] / n_layers

    def _layers_of_kinds(self) -> list[list[int]]:
        """By layer type, the indices of its layers among those with attention."""
        kinds = [self.layer_types[layer] for layer in self.attending]
        return [
            [i for i, layer_kind in enumerate(kinds) if layer_kind == kind] for kind in self.kinds
        ]

    def _split_by_step(
        self, values: Float[Tensor, "row query *rest"]
    ) -> list[Float[Tensor, "sample *rest"]]:
        """By step, the values of the samples; here `sample` is branch x sample, stacked.

        Pooled sums stay on the device, so that a step does not wait for them.
        """
        values = values if self.kind == "pooled" else values.cpu()
        return list((values if self.index is None else values[self.index]).unbind(1))

    def dataset(
        self, layouts: Sequence[Layout], branches: Sequence[str], n_steps: Sequence[int]
    ) -> xr.Dataset:
        """The finished trace of rows stacked as (branch, sample), NaN after a sample's last step.

        Args:
            layouts: One for each row.
            branches: Names of the branches.
            n_steps: The number of steps of each sample.
        """
        import xarray as xr

        n_branches, n_samples, n_seen = len(branches), len(n_steps), len(self.steps)
        slots = np.array(self.slots_of_steps)
        alive = np.arange(n_seen)[None, :] < np.asarray(n_steps)[:, None]  # sample step

        def unstack(per_step: Sequence[Tensor]) -> Float[np.ndarray, "branch sample step *rest"]:
            # branch x sample, step, *rest
            stacked = torch.stack(list(per_step), dim=1).cpu().numpy()
            # branch sample step *rest
            stacked = stacked.reshape(n_branches, n_samples, *stacked.shape[1:])
            return np.where(
                alive.reshape(1, n_samples, n_seen, *[1] * (stacked.ndim - 3)),
                stacked,
                np.float32(np.nan),
            )

        def by_row(numbers: Iterable[int]) -> Int[np.ndarray, "branch sample"]:
            return np.array(list(numbers)).reshape(n_branches, n_samples)

        # The sums.
        axes = ("branch", "sample", "step")
        by_kind = ("layer_type",) if self.has_windows else ()
        heads = ("layer", "head") if self.kind == "full" else by_kind
        sums = unstack(self.steps)  # branch sample step *heads sum
        if self.kind == "full" and len(self.attending) < len(self.layer_types):
            every_layer = np.full(
                (*sums.shape[:3], len(self.layer_types), *sums.shape[4:]), np.float32(np.nan)
            )
            every_layer[:, :, :, self.attending] = sums
            sums = every_layer
        elif self.kind == "pooled" and not by_kind:
            sums = sums[:, :, :, 0]
        data: dict[str, tuple] = {
            name: (
                (*axes, *heads),
                sums[..., i],
                {
                    "long_name": f"attention on {name.replace('_', ' ')}",
                    "definition": f"sum of the attention on {keys}",
                    "units": "1",
                },
            )
            for i, (name, keys) in enumerate(SUMS.items())
        }
        # A text that starts with nothing has no BOS, which is not the same as no attention on it.
        n_bos = by_row(layout.n_bos for layout in layouts)
        if not n_bos.any():
            del data["bos"]
        elif not n_bos.all():
            has_bos = (n_bos > 0).reshape(n_branches, n_samples, *[1] * (data["bos"][1].ndim - 2))
            named, on_bos, about = data["bos"]
            data["bos"] = (named, np.where(has_bos, on_bos, np.float32(np.nan)), about)
        # The prefix tokens.
        tokens = unstack(self.tokens)  # branch sample step kind prefix_token
        l_pre = by_row(layout.l_pre for layout in layouts)
        outside = np.arange(self.l_pre) >= l_pre[:, :, None]  # branch sample prefix_token
        tokens = np.where(outside[:, :, None, None], np.float32(np.nan), tokens)
        data["prefix_tokens"] = (
            (*axes, *by_kind, "prefix_token"),
            tokens if by_kind else tokens[:, :, :, 0],
            {
                "long_name": "attention on each token of the prefix",
                "definition": "mean over layers (of a type) and heads",
                "units": "1",
            },
        )
        # The tokens in sight of sliding windows, the caps, and whole attention rows.
        if by_kind:
            kinds = self.layer_types if self.kind == "full" else self.kinds
            in_sight = np.stack(
                [[layout.in_sight(slots, kind) for kind in kinds] for layout in layouts]
            )
            data["in_sight"] = (
                (*axes, "layer" if self.kind == "full" else "layer_type"),
                in_sight.transpose(0, 2, 1).reshape(n_branches, n_samples, n_seen, len(kinds)),
                {"long_name": "tokens of the prefix (or prompt) that the query sees"},
            )
        if self.may_cap:
            about = {"long_name": "biases cut at their largest size, over layers and heads"}
            data["caps"] = (axes, unstack(self.caps), about)
        if self.rows:
            data["pattern"] = ((*axes, "pair", "key"), unstack(self._live_rows(layouts)))
        # The coordinates.
        live = by_row(layout.n_live for layout in layouts)
        coords = {
            "branch": list(branches),
            "sample": np.arange(n_samples),
            "step": np.arange(n_seen),
            "prefix_token": np.arange(self.l_pre),
            "l_pre": (axes[:2], l_pre),
            "l_pro": (axes[:2], by_row(layout.l_pro for layout in layouts)),
            "n_bos": (axes[:2], n_bos),
            "l_kv": (axes, live[:, :, None] + slots - (len(layouts[0]) - 1)),
        }
        if self.kind == "full":
            coords |= {name: np.arange(sums.shape[3 + i]) for i, name in enumerate(heads)}
        if by_kind:
            coords["layer_type"] = [str(kind) for kind in self.kinds]
        if self.kind == "full" and (by_kind or len(self.attending) < len(self.layer_types)):
            coords["type_of_layer"] = (
                "layer",
                [str(layer_type) for layer_type in self.layer_types],
            )
        if self.rows:
            coords["key"] = np.arange(data["pattern"][1].shape[-1])
            for i, name in enumerate(("pair_layer", "pair_head")):
                coords[name] = ("pair", [pair[i] for pair in self.patterns])
        return xr.Dataset(data, coords)

    def _live_rows(self, layouts: Sequence[Layout]) -> list[Float[Tensor, "row pair key"]]:
        """Whole attention rows without padding: key 0 is the first live one; NaN after the last
        live key."""
        widest = self.rows[-1].shape[-1]
        live_rows = []
        for rows in self.rows:
            live = torch.full((*rows.shape[:2], widest), float("nan"))  # row pair key
            for row, layout in enumerate(layouts):
                live[row, :, : layout.soft] = rows[row, :, : layout.soft]
                live[row, :, layout.soft : rows.shape[-1] - layout.pad] = rows[
                    row, :, layout.soft + layout.pad :
                ]
            live_rows.append(live)
        return live_rows


def trace_bytes(
    kind: TraceKind, rows: int, steps: int, n_layers: int, n_heads: int, n_patterns: int, keys: int
) -> int:
    """The size in memory of a trace that is not made yet: float32 sums, and `n_patterns` whole rows
    of `keys` keys."""
    if kind == "none":
        return 0
    cells = n_layers * n_heads * len(SUMS) if kind == "full" else len(SUMS)
    return 4 * rows * steps * (cells + n_patterns * keys)
