"""A decoding method inside transformers' `generate`, as a logits processor."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor

from lapa2_interp._util.errors import MethodError
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.bias.layout import Layout
from lapa2_interp.generation.loop import batch_start, log_probs_by_branch
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.base import LogProbs
from lapa2_interp.methods.freectrl import FreeCtrl
from lapa2_interp.models.card import Model
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.tasks.task import Prompts


class MethodProcessor(LogitsProcessor):
    """Log-weights of a method in place of the network's logits, for one prompt.

    It reads every new token in the method's own branches, with their bias, beside what `generate`
    reads. Temperature, top-k and top-p of `generate` act on the log-weights.

    Example:
        >>> from lapa2_interp import load_model
        >>> from lapa2_interp.runs import MethodProcessor
        >>> model = load_model("tiny-llama", model_class="TransformersModel")
        >>> steered = MethodProcessor(model, "The lake", method="preadd", attribute="positive")
        >>> ids = model.tokenizer("The lake", return_tensors="pt").input_ids
        >>> network = model.original_model
        >>> network.generate(ids, logits_processor=[steered], max_new_tokens=4).shape[0]
        1

    Args:
        model: Whose network generates.
        prompt: The text whose ids `generate` is given.
        settings: As `generate` of this package takes them; `length` bounds the text.

    Raises:
        MethodError: FreeCtrl, which sets neurons; a chat of several turns; in `generate`, another
            prompt, beams, or more tokens than `length`.
        Lapa2Error: As `generate`.
    """

    def __init__(self, model: Model, prompt: str, **settings: Any) -> None:
        cell = cell_of(model, prompts=Prompts(texts=(prompt,)), trace="none", **settings)
        if isinstance(cell.decoding_method, FreeCtrl) or cell.n_turns > 1:
            raise MethodError(
                f"{cell.method} is no arithmetic on logits; write its texts with generate of"
                " lapa2_interp"
            )
        self.model, self.plan = model, plan_batches(model, cell, ModelContext(model))
        self.prompt = Layout.of(model.tokenizer, None, prompt).ids
        self.seen: Tensor | None = None
        self.state: Any = None
        self.log_probs: LogProbs = {}

    @torch.no_grad()
    def __call__(
        self, input_ids: Int[Tensor, "sample key"], scores: Float[Tensor, "sample vocab"]
    ) -> Float[Tensor, "sample vocab"]:
        method, branches, n_new = (
            self.plan.method,
            self.plan.branches,
            input_ids.shape[1] - len(self.prompt),
        )
        if n_new <= 0:
            logits = self._begin(input_ids)
        elif self.seen is None or not torch.equal(input_ids[:, :-1], self.seen):
            raise MethodError("the texts do not go on from those of the step before; use no beams")
        elif n_new >= max(self.batch.steps):
            raise MethodError(f"a text has more than {n_new} tokens; give a longer length")
        else:
            tokens = input_ids[:, -1]
            self.state = method.advance(self.state, self.log_probs, tokens)
            rules = [self.rules[row] for row in self.batch.expansion]
            with augmented(self.model, rules, self.batch.sample_layouts):
                logits = self.rows.read_tokens(tokens.repeat(len(branches))[:, None])[:, -1]
        self.seen, self.log_probs = input_ids.clone(), log_probs_by_branch(logits, branches)
        return method.combine(self.log_probs, self.state).to(scores)

    def _begin(self, ids: Int[Tensor, "sample key"]) -> Float[Tensor, "row vocab"]:
        """Read the prompt in every branch."""
        if any(tuple(row) != self.prompt for row in ids.tolist()):
            raise MethodError(
                f"the ids are not those of the prompt; give {list(self.prompt)[:20]} in every row"
            )
        self.batch = self.plan.assemble_batch([(0, sample) for sample in range(len(ids))])
        self.rules = list(self.plan.arrangement.augmentations)
        self.rows = new_rows(self.model, self.plan.rules)
        layouts, reads = self.batch.layouts, self.plan.method.reads_prompt
        keep = 1 + max(layout.l_pro for layout in layouts) if reads else 1
        with augmented(self.model, self.rules, layouts):
            logits = self.rows.prompt_pass(layouts, self.batch.prefixes, keep)
        start = batch_start(self.batch, self.plan.branches, logits if reads else None)
        self.state = self.plan.method.begin(start)
        expansion = torch.tensor(self.batch.expansion, device=logits.device)
        self.rows.expand(expansion, len(layouts[0]) + max(self.batch.steps) - 1)
        return logits[expansion, -1]
