"""A decoding method inside transformers' `generate`, as a logits processor."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessor

from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import MethodError, ModelError, parameter
from lapa2_interp.generation.loop import (
    batch_start,
    check_numbers,
    log_probs_by_branch,
    mask_main_branch,
)
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.base import LogProbs
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.tasks.task import Prompts

NOT_FOLLOWED = {
    "prompts": "give the one text as `prompt`",
    "label": "only tables of runs have names of arms",
    "samples": "give num_return_sequences to generate of transformers",
    "seed": "call transformers.set_seed before generate",
    "top_k": "give top_k to generate of transformers",
    "temperature": "give temperature to generate of transformers",
    "eos": "give eos_token_id to generate of transformers to stop at an end token, or"
    " suppress_tokens to block it",
    "ban_words": "give bad_words_ids to generate of transformers",
    "trace": "generate of lapa2_interp records attention",
    "patterns": "generate of lapa2_interp records attention",
    "dtype": "give it to load_model",
    "model_class": "give it to load_model",
    "device": "give it to load_model",
    "max_rows": "generate of transformers decodes all rows at once",
}
"""Settings that have no effect inside `generate` of transformers, and what has."""
RESCALING = (
    "repetition_penalty, encoder_repetition_penalty, sequence_bias, guidance_scale,"
    " exponential_decay_length_penalty, remove_invalid_values and num_beams"
)
"""Arguments of `generate` that change finite scores before a processor of the user's sees them."""


class MethodProcessor(LogitsProcessor):
    """Log-weights of a method in place of the network's logits, for one prompt.

    It reads every new token in the method's own branches, with their bias, beside what `generate`
    reads. Temperature, top-k and top-p of `generate` act on the log-weights. Tokens that `generate`
    bans, by bad_words_ids, suppress_tokens, min_new_tokens or no_repeat_ngram_size, stay banned.
    Penalties such as repetition_penalty change scores that this processor replaces, so they are
    refused: put their own processor behind this one, as in logits_processor=[steered, penalty].

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
        model: Its network, model.original_model, is the one that generates.
        prompt: The text whose ids `generate` is given: `self.prompt`, which of a chat are the ids
            of the whole chat.
        settings: As `generate` of this package takes them, but for `NOT_FOLLOWED`; `length` bounds
            the text.

    Raises:
        MethodError: A setting of `NOT_FOLLOWED`; a method that changes the network; a chat of
            several turns; in `generate`, another prompt, beams, more tokens than `length`, scores
            that are not the network's, or no token that is left.
        ModelError: A HookedTransformer, which is no network of transformers.
        Lapa2Error: As `generate`.
    """

    def __init__(self, model: Model, prompt: str, **settings: Any) -> None:
        for name in settings:
            if name in NOT_FOLLOWED:
                raise MethodError(
                    f"{parameter(name, settings[name])} has no effect inside generate of"
                    f" transformers; leave it out: {NOT_FOLLOWED[name]}"
                )
        network = facts_of(model).network
        if not isinstance(network, GenerationMixin):
            raise ModelError(
                f"a {type(model).__name__} has no network with generate of transformers; load it as"
                f" {parameter('model_class', 'TransformersModel')}"
            )
        cell = cell_of(model, prompts=Prompts(texts=(prompt,)), trace="none", **settings)
        if cell.decoding_method.changes_network or cell.n_turns > 1:
            changes = "it changes the network" if cell.n_turns == 1 else "it has several turns"
            raise MethodError(
                f"{cell.method} is no arithmetic on logits, since {changes}; write its texts with"
                " generate of lapa2_interp"
            )
        self.model, self.plan = model, plan_batches(model, cell, ModelContext(model))
        own = self.plan.arrangement.layouts[0][0] if cell.task.chat is not None else None
        self.prompt = (own or Layout.of(model.tokenizer, None, prompt)).ids
        self.seen: Tensor | None = None
        self.state: Any = None
        self.log_probs: LogProbs = {}
        self.network_logits: Tensor | None = None
        hook = network.register_forward_hook(partial(_keep_logits, ref(self)))
        finalize(self, hook.remove)

    @torch.no_grad()
    def __call__(
        self, input_ids: Int[Tensor, "sample key"], scores: Float[Tensor, "sample vocab"]
    ) -> Float[Tensor, "sample vocab"]:
        banned = self._banned(scores)
        logits = self._read(input_ids)
        method, branches = self.plan.method, self.plan.branches
        self.seen, self.log_probs = input_ids.clone(), log_probs_by_branch(logits, branches)
        self.network_logits = None  # those of its own passes

        def mask(log_weights: Float[Tensor, "sample vocab"]) -> Float[Tensor, "sample vocab"]:
            return log_weights.masked_fill(banned.to(log_weights.device), -torch.inf)

        weights = mask(method.combine(mask_main_branch(self.log_probs, mask), self.state))
        if not weights.amax(dim=1).isfinite().all():
            step = input_ids.shape[1] - len(self.prompt)
            check_numbers(self.plan, logits, step)
            raise MethodError(
                f"no token has positive weight at step {step} ({method.name}: {method.when_empty});"
                f" {int(banned.sum(dim=1).max())} of {banned.shape[1]} tokens are banned in front"
                " of this processor; ban fewer, or change the method's parameters"
            )
        return weights.to(scores)

    def _banned(self, scores: Float[Tensor, "sample vocab"]) -> Bool[Tensor, "sample vocab"]:
        """The tokens that are banned in front of this processor.

        Raises:
            MethodError: Other scores are not the network's logits.
        """
        banned = scores == -torch.inf
        if self.network_logits is None or len(self.network_logits) != len(scores):
            raise MethodError(
                "the scores are not of a new pass of this model's network; generate with"
                " model.original_model, without assistant_model and prompt_lookup_num_tokens"
            )
        own = self.network_logits[:, -1].to(scores)
        # What a forced token's score is does not matter.
        compared = ~banned & (banned.sum(dim=1, keepdim=True) < banned.shape[1] - 1)
        changed = compared & (own != scores) & ~own.isnan()
        if changed.any():
            row, token = changed.nonzero()[0].tolist()
            raise MethodError(
                f"a processor in front of this one changed {int(changed.sum())} scores, such as"
                f" that of {self.model.tokenizer.decode([token])!r} from {own[row, token]:g} to"
                f" {scores[row, token]:g}, and this one replaces all but bans; in generate and in"
                f" its generation_config use none of {RESCALING}; put the processor of a penalty"
                " behind this one"
            )
        return banned

    def _read(self, ids: Int[Tensor, "sample key"]) -> Float[Tensor, "row vocab"]:
        """The logits of every branch after these ids."""
        n_new = ids.shape[1] - len(self.prompt)
        if n_new <= 0 or self.seen is None:
            return self._begin(ids)
        if not torch.equal(ids[:, :-1], self.seen):
            raise MethodError("the texts do not go on from those of the step before; use no beams")
        if n_new >= max(self.batch.steps):
            raise MethodError(f"a text has more than {n_new} tokens; give a longer length")
        tokens = ids[:, -1]
        self.state = self.plan.method.advance(self.state, self.log_probs, tokens)
        rules = [self.rules[row] for row in self.batch.expansion]
        with augmented(self.model, rules, self.batch.sample_layouts):
            repeated = tokens.repeat(len(self.plan.branches))
            return self.rows.read_tokens(repeated[:, None])[:, -1]

    def _begin(self, ids: Int[Tensor, "sample key"]) -> Float[Tensor, "row vocab"]:
        """Read the prompt in every branch."""
        if any(tuple(row) != self.prompt for row in ids.tolist()):
            raise MethodError(
                f"the ids are not those of the prompt; give {list(self.prompt)} in every row"
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


def _keep_logits(
    processor: ref[MethodProcessor], network: nn.Module, inputs: Any, output: Any
) -> None:
    """Keep the logits of a pass of the network, until its scores are compared with them."""
    if (alive := processor()) is not None:
        alive.network_logits = getattr(output, "logits", None)
