"""One model, one queue, one thread that answers: requests that wait together share a batch.

For a batch of requests:

1. keys that are kept of an earlier turn are taken up (`serving.kept`), the rest of each text is
   read, and all rows end at one slot;
2. each step draws a token for every answer that goes on, and gives its text away;
3. the keys of every text are kept for the next turn.

A row's tokens do not depend on who else is in the batch, but for rounding: random numbers come from
the request's seed and text, the bias from the row's own layout, and the attention goes one way for
the whole life of the server. The steps are a loop of their own beside `generation.loop`, which
writes a batch of one cell: here every row has its own temperature, length and stops, gives away
each token at once, and may be left by its client.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lapa2_interp.attention.cache import BridgeRows, Rows, new_rows, rows_in_memory
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.bias.tokens import decode_answer, decode_continuation
from lapa2_interp.circuits.hidden_span import read_span
from lapa2_interp.errors import Lapa2Error
from lapa2_interp.generation.arrange import chat_stream
from lapa2_interp.generation.sampling import NOTHING, draw, uniforms
from lapa2_interp.generation.turns import read_behind, slots_to_read
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import Model, decided_path, facts_of
from lapa2_interp.serving.kept import KeptTexts, take_up
from lapa2_interp.serving.request import Asked

Finish = Literal["stop", "length"]
SENT_TOGETHER = 0.02
"""Seconds between requests that were sent together, at most."""
UNFINISHED = "\ufffd"
"""What the bytes of half a character decode to."""


@dataclass
class Piece:
    """A part of an answer.

    Attributes:
        text: What is new.
        finish: Why the answer ends, in its last piece.
        n_tokens: Tokens of the answer so far.
        report: In the last piece, if it was asked for.
        error: What went wrong.
    """

    text: str = ""
    finish: Finish | None = None
    n_tokens: int = 0
    report: dict[str, Any] | None = None
    error: str | None = None


@dataclass
class Answer:
    """A request in the queue, and its answer.

    Attributes:
        asked: The request.
        emit: Gets each piece, in the engine's thread.
        gone: Set when nobody waits for it any more.
        tokens, text, sent: So far: all tokens, all text, and the letters that were given away.
        finish: Why it has ended.
        last: Its last piece, if that waits for a report.
    """

    asked: Asked
    emit: Callable[[Piece], None]
    gone: threading.Event = field(default_factory=threading.Event)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    sent: int = 0
    finish: Finish | None = None
    last: Piece | None = None


class QueueFullError(Exception):
    """More requests wait than the queue holds."""


class Engine:
    """Answers requests, one batch after another.

    Args:
        model: Of the class TransformersModel.
        keep_bytes: Memory for keys and values of texts that were read.
        most_waiting: Requests that wait, at most.
        most_rows: Requests of a batch, at most.
        seconds: An answer that takes longer ends.
    """

    def __init__(
        self,
        model: Model,
        keep_bytes: int = 2**30,
        most_waiting: int = 256,
        most_rows: int = 32,
        seconds: float = 600,
    ) -> None:
        self.model, self.seconds = model, seconds
        self.most_waiting, self.most_rows = most_waiting, most_rows
        self.end_ids = set(identify(model).end_ids)
        facts = facts_of(model)
        self.kept = KeptTexts(keep_bytes if facts.window is None else 0)
        self.waiting: deque[Answer] = deque()
        self.changed = threading.Condition()
        self.stopping = False
        self.reused = 0
        self.thread = threading.Thread(target=self._run, name="lapa2 serve", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def ask(self, asked: Asked, emit: Callable[[Piece], None]) -> Answer:
        """Put a request into the queue.

        Raises:
            QueueFullError: As many wait as the queue holds, or the engine stops.
        """
        answer = Answer(asked, emit)
        with self.changed:
            if self.stopping or len(self.waiting) >= self.most_waiting:
                raise QueueFullError
            self.waiting.append(answer)
            self.changed.notify()
        return answer

    def stop(self) -> None:
        """Finish what waits and what runs, and end the thread."""
        with self.changed:
            self.stopping = True
            self.changed.notify()
        if self.thread.is_alive():
            self.thread.join()

    def _run(self) -> None:
        n_ctx = self.model.cfg.n_ctx
        # Weights are not prepacked: that makes steps of one row slower.
        try:
            with decided_path(self.model, n_ctx, n_ctx):
                while self._answer_next():
                    pass
        finally:  # whatever ends it, nobody waits for ever
            with self.changed:
                self.stopping = True
                left = [*self.waiting]
                self.waiting.clear()
            self._fail(left, "the server has stopped")

    def _answer_next(self) -> bool:
        """Wait for requests, and answer a batch of them; False if the engine stops."""
        with self.changed:
            while not self.waiting and not self.stopping:
                self.changed.wait()
            if not self.waiting:
                return False
            # Requests that are sent together share a batch: wait until none has come for a moment.
            n_waiting = 0
            while n_waiting < len(self.waiting) < self.most_rows and not self.stopping:
                n_waiting = len(self.waiting)
                self.changed.wait(SENT_TOGETHER)
        batch = self._next_batch()
        try:
            self._answer(batch)
        except Lapa2Error as error:
            self._fail(batch, str(error))
        except Exception as error:  # the queue goes on
            self._fail(batch, f"{type(error).__name__} in the server")
            traceback.print_exception(error)  # for the operator
        return True

    def _fail(self, batch: Sequence[Answer], message: str) -> None:
        for answer in batch:
            if answer.finish is None or answer.last is not None:
                answer.finish = "stop"
                answer.emit(Piece(error=message))

    def _next_batch(self) -> list[Answer]:
        """Requests from the front of the queue that can share a batch: those whose cache works in
        one way, as many as memory allows, and as long as the longest text with the longest answer
        has room in the context, since all rows go on to the last step."""
        batch: list[Answer] = []
        widest = steps = 0
        with self.changed:
            while self.waiting and len(batch) < self.most_rows:
                answer = self.waiting[0]
                asked = answer.asked
                if answer.gone.is_set():
                    self.waiting.popleft()
                    continue
                widest = max(widest, len(asked.layout.ids))
                steps = max(steps, asked.longest)
                fits = widest + steps <= self.model.cfg.n_ctx
                fits &= len(batch) < rows_in_memory(self.model, widest + steps, 1)
                if batch and not (fits and _kind(asked) == _kind(batch[0].asked) == "alike"):
                    break
                batch.append(self.waiting.popleft())
        return batch

    @torch.no_grad()
    def _answer(self, batch: list[Answer]) -> None:
        if not batch:
            return
        began, asked = time.monotonic(), [answer.asked for answer in batch]
        layouts = left_pad([one.layout for one in asked])
        rows, logits = self._read(asked, layouts)
        steps = max(one.longest for one in asked)
        streams = [uniforms(one.seed, chat_stream(one.layout), 0, one.longest) for one in asked]
        index = torch.arange(len(batch), device=logits.device)
        rows.expand(index, max(len(layout) for layout in layouts) + steps)
        with augmented(self.model, [one.rules for one in asked], layouts):
            for step in range(steps):
                drawn = self._draw(asked, logits, streams, step)
                for answer, token in zip(batch, drawn, strict=True):
                    if answer.finish is None:
                        self._advance(answer, token)
                late = time.monotonic() - began > self.seconds
                for answer in batch:
                    if answer.finish is None and (late or answer.gone.is_set()):
                        self._give(answer, "length")
                if all(answer.finish for answer in batch):
                    break
                tokens = torch.tensor([[max(token, 0)] for token in drawn], device=logits.device)
                logits = rows.read_tokens(tokens)[:, -1]
        for answer in batch:
            if answer.last is not None:
                answer.last.report = self.report(answer)
                answer.emit(answer.last)
                answer.last = None
        if isinstance(rows, BridgeRows):
            for row, (answer, one) in enumerate(zip(batch, asked, strict=True)):
                # The last token of an answer may not have been read.
                self.kept.keep(rows, row, one.layout, answer.tokens[:-1], one.rules)

    def _read(
        self, asked: Sequence[Asked], layouts: Sequence[Layout]
    ) -> tuple[Rows, Float[Tensor, "row vocab"]]:
        """Rows that have read the texts, and the logits of the next token.

        Args:
            layouts: Those of the requests, left-padded.
        """
        model, rules = self.model, [one.rules for one in asked]
        rows = new_rows(model, [rule for of in rules for rule in of])
        # A pooled law needs all queries of a text in one pass.
        if isinstance(rows, BridgeRows) and rows.in_pieces:
            cached = [self.kept.find(one.layout, one.rules) for one in asked]
            texts, n_cached = [text for text, _ in cached], [n for _, n in cached]
            n_slots = slots_to_read(layouts, n_cached)
            # Beside a long text that is kept, a long new one may need more slots than there are.
            if any(n_cached) and n_slots <= model.cfg.n_ctx:
                self.reused += sum(n_cached)
                take_up(rows, layouts, texts, n_cached, n_slots)
                read_behind(model, rows, rules, layouts, n_cached)
                last = torch.tensor([[one.ids[-1]] for one in layouts], device=model.cfg.device)
                with augmented(model, rules, layouts):
                    return rows, rows.read_tokens(last)[:, -1]
        with augmented(model, rules, layouts):
            return rows, rows.prompt_pass(layouts)[:, -1]

    def _draw(
        self,
        asked: Sequence[Asked],
        logits: Float[Tensor, "row vocab"],
        streams: Sequence[np.ndarray],
        step: int,
    ) -> list[int]:
        """The next token of every row."""
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        tokens = []
        for row, (one, stream) in enumerate(zip(asked, streams, strict=True)):
            number = float(stream[step]) if step < len(stream) else 0.0
            greedy = one.temperature == 0
            weights = log_probs[row : row + 1] / (1 if greedy else one.temperature)
            top_k = 1 if greedy else one.top_k or weights.shape[1]
            uniform = torch.tensor([number], dtype=torch.float64, device=logits.device)
            tokens.append(int(draw(weights, uniform, top_k=top_k)))
        return tokens

    def _advance(self, answer: Answer, token: int) -> None:
        """Add a token to an answer, and give away its text."""
        asked = answer.asked
        if token == NOTHING:
            answer.finish = "stop"
            answer.emit(Piece(error="the logits are not numbers"))
            return
        answer.tokens.append(token)
        finish: Finish | None = "stop" if token in self.end_ids else None
        if finish is None and len(answer.tokens) >= asked.longest:
            finish = "length"
        tokenizer = self.model.tokenizer
        said = answer.tokens[:-1] if token in self.end_ids else answer.tokens
        if asked.is_chat:
            answer.text = decode_answer(tokenizer, said)
        else:
            answer.text = decode_continuation(tokenizer, "".join(asked.layout.tokens[-1:]), said)
        if (
            cut := min(
                (i for stop in asked.stops if (i := answer.text.find(stop)) >= 0), default=-1
            )
        ) >= 0:
            answer.text, finish = answer.text[:cut], "stop"
        self._give(answer, finish)

    def _give(self, answer: Answer, finish: Finish | None) -> None:
        """Give away an answer's text: all of it at the end, before that as far as no later token
        changes it."""
        ready = len(answer.text)
        if finish is None:
            ready = len(answer.text.rstrip(UNFINISHED)) - _begun(answer.text, answer.asked.stops)
        ready = max(ready, answer.sent)
        piece = Piece(answer.text[answer.sent : ready], finish, len(answer.tokens))
        answer.sent, answer.finish = ready, finish
        if finish is not None and answer.asked.report and not answer.gone.is_set():
            answer.last = piece  # the report is of passes of its own, after the block
        elif piece.text or finish is not None:
            answer.emit(piece)

    def report(self, answer: Answer) -> dict[str, Any]:
        """The attention on the span, its effect, and the entropy, for every token of an answer."""
        asked = answer.asked
        if not asked.layout.prefix.size:
            return {"span": None}
        span = [
            asked.layout.prefix.start - asked.layout.pad,
            asked.layout.prefix.stop - asked.layout.pad,
        ]
        reading = read_span(self.model, asked.layout, answer.tokens, asked.rules)
        decode = self.model.tokenizer.decode
        report = {
            "span": span,
            "span_tokens": [decode([token]) for token in asked.layout.ids[slice(*span)]],
            "tokens": [decode([token]) for token in answer.tokens],
            "attention": [round(float(mass), 6) for mass in reading.attention],
            "effect": [float(f"{value:.4g}") for value in reading.effect],
            "entropy": [float(f"{value:.4g}") for value in reading.entropy],
        }
        if asked.marks is not None:
            text = asked.marks.text
            report["marks"] = [
                {"text": text[mark.start : mark.stop], "factor": mark.factor}
                for mark in asked.marks.marks
            ]
        return report


def _kind(asked: Asked) -> str:
    """Requests of the kind "alike" share a batch."""
    own = any(rule.pooled or rule.phase == "predicting_only" for rule in asked.rules)
    return "alone" if own else "alike"


def _begun(text: str, stops: Sequence[str]) -> int:
    """The number of letters at the end of a text with which a stop may begin."""
    return max(
        (
            n
            for stop in stops
            for n in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:n])
        ),
        default=0,
    )
