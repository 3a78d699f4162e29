"""The judge, against a server of our own that speaks /v1/chat/completions."""

from __future__ import annotations

import functools
import json
import logging
import re
import ssl
import sys
import threading
import time
from base64 import b64encode
from contextlib import closing
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from lapa2_interp.errors import Lapa2Error, ScoringError
from lapa2_interp.scoring.judge import PROMPT, TOKEN_LIMIT_NAMES, Judge
from lapa2_interp.scoring.judge_answer import parse_ratings
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer
from lapa2_interp.scoring.scorer import (
    ScoreCache,
    ScoringStoppedError,
    SkippedText,
    TextItem,
    run_scorer,
)

KEY = "sk-local-0123456789abcdef"
MALFORMED, REFUSED = (
    SkippedText(reason, final=False) for reason in ("malformed answer", "refused")
)
GOOD = '{"relevance": 5, "fluency": 4, "topicality": 3}'


@dataclass
class Reply:
    content: Any = GOOD
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    """Instead of a chat completion around the content."""
    refusal: str | None = None
    finish: str = "stop"
    tokens: bool = True
    silent: bool = False
    """Do not answer until the server is closed."""

    def encoded(self) -> bytes:
        if self.body is not None:
            return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        if self.status != 200:
            return json.dumps(
                {"error": {"message": str(self.content), "type": "some_error"}}
            ).encode()
        message = {"role": "assistant", "content": self.content, "refusal": self.refusal}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": []}
        answer["choices"] = [{"index": 0, "message": message, "finish_reason": self.finish}]
        if self.tokens:
            answer["usage"] = {"prompt_tokens": 200, "completion_tokens": 20, "total_tokens": 220}
        return json.dumps(answer).encode()


class Server:
    """Answers with `replies` in turn, the last one for ever; or with what `reply`, given the text
    judged, says."""

    def __init__(self) -> None:
        self.replies: list[Reply] = [Reply()]
        self.reply = lambda text: self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.bodies: list[dict] = []
        self.keys: set[str | None] = set()
        self.headers: set[str] = set()
        self.sizes: list[int] = []
        self.closing = threading.Event()
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.bodies.append(body)
                    outer.keys.add(self.headers["Authorization"])
                    outer.headers |= {name.lower() for name in self.headers}
                    outer.sizes.append(int(self.headers["Content-Length"]))
                reply = outer.reply(judged(body))
                if self.path != "/v1/chat/completions":
                    reply = Reply(status=404, content=f"no {self.path} here")
                if reply.silent:
                    outer.closing.wait(5)
                    return
                encoded = reply.encoded()
                self.send_response(reply.status)
                for name, value in {"Content-Type": "application/json", **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self.thread.start()

    @property
    def texts(self) -> list[str]:
        return [judged(body) for body in self.bodies]

    def close(self) -> None:
        self.closing.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def judged(body: dict) -> str:
    """The generated text in a request."""
    return body["messages"][1]["content"].split("\nGenerated text: ")[1].split("\n\nOutput: ")[0]


def rating(*numbers: Any) -> str:
    return json.dumps(dict(zip(("relevance", "fluency", "topicality"), numbers, strict=True)))


def item(
    text: str = "It was good.", prompt: str = "The lake", attribute: str = "positive"
) -> TextItem:
    return TextItem(text, prompt, attribute)


CERTIFICATES = functools.cache(ssl.create_default_context)
"""Read once: each judge makes a client, and reading them takes longer than all its requests."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(ssl, "create_default_context", CERTIFICATES)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with closing(Server()) as running:
        yield running


@pytest.fixture
def waits():
    """Seconds the judges waited, without the waiting."""
    return []


@pytest.fixture
def make(server, waits):
    """Judges of this server; closed at the end."""
    made = []

    def judge(model: str = "m", **settings: Any) -> Judge:
        made.append(Judge(model, **{"base_url": server.url, "sleep": waits.append, **settings}))
        return made[-1]

    yield judge
    for asked in made:
        asked.close()


PAPER = """\
Task: You are given a prompt and a text generated by a language model with a target attribute. Please rate the generated \
text on three dimensions, each on a scale from 1 (very poor) to 5 (very good).

Scoring Criteria:
Attribute Relevance: How well does the text align with the target attribute? (5 = perfectly aligned, 1 = no correlation \
or contradicts the attribute)
Fluency: How grammatically correct, natural, and fluent is the text? (5 = fluent, 1 = numerous errors)
Topicality: How well does the text maintain coherence with the input prompt? (5 = strongly coherent, 1 = incoherent)

Input:
Target attribute: ATTRIBUTE
Input prompt: PROMPT
Generated text: TEXT

Output: Respond in JSON format only:
{"relevance": int, "fluency": int, "topicality": int}"""


@pytest.mark.parametrize(
    "text",
    [
        "It was good.",
        'He said "{attribute}", {prompt} and {text}\n{"relevance": 1} {} %s \\1 {',
        "\ud7ff \u2019 \U0001f600 \x00",
    ],
)
def test_the_prompt_is_the_papers_with_attribute_prompt_and_text_filled_in(server, make, text):
    make().score([item(text, 'The {text} "lake"', "very {prompt}")])
    expected = (
        PAPER.replace("ATTRIBUTE", "very {prompt}")
        .replace("PROMPT", 'The {text} "lake"')
        .replace("TEXT", text)
    )
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "You are an expert evaluator for text generation quality."},
        {"role": "user", "content": expected},
    ]


def test_half_a_surrogate_pair_is_sent_as_a_question_mark(server, make):
    assert make().score([item("a \ud83d b")]) == [(5.0, 4.0, 3.0)]
    assert server.texts == ["a ? b"]


def test_the_request_names_the_model_temperature_zero_and_a_strict_schema_of_three_integers(
    server, make
):
    make("gpt-4o").score([item()])
    body = server.bodies[0]
    schema = body["response_format"]["json_schema"]
    assert (body["model"], body["temperature"], schema["strict"]) == ("gpt-4o", 0, True)
    assert schema["schema"]["required"] == ["relevance", "fluency", "topicality"]
    assert schema["schema"]["properties"]["fluency"] == {"type": "integer", "enum": [1, 2, 3, 4, 5]}
    assert schema["schema"]["additionalProperties"] is False
    make(temperature=None).score([item()])
    assert "temperature" not in server.bodies[1]


@pytest.mark.parametrize(
    "fence", ["{}", " {}\n", "```json\n{}\n```", "```\n{}```", "```json {} ```"]
)
def test_three_integers_are_read_with_or_without_a_code_fence(fence):
    assert parse_ratings(fence.replace("{}", GOOD)) == (5.0, 4.0, 3.0)


@pytest.mark.parametrize(
    "answer",
    [
        f"Here it is: {GOOD}",
        f"{GOOD} {GOOD}",
        f"As asked:\n```json\n{GOOD}\n```",
        f"Relevance < 6 and > 4: **{GOOD}**.",
        f"[{GOOD}]",
        f"<think>\nIt may be {rating(1, 1, 1)} {{or so}}.\n</think>\n\n{GOOD}",
        f"It may be {rating(1, 1, 1)}.\n</think>{GOOD}",  # the chat template has opened it
        f"[THINK]{{[/THINK]{GOOD}",
        f"I rate as {PROMPT.splitlines()[-1]}. {{So}}: {GOOD}",
        f'{{"text": "calm"}}\n{GOOD}',
        rating(5, 4.0, 3),
        rating("5", "4", "3.0"),
    ],
)
def test_one_reading_is_read_amid_thoughts_and_words(answer):
    assert parse_ratings(answer) == (5.0, 4.0, 3.0)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "5 4 3",
        "[5, 4, 3]",
        '[["relevance", 5], ["fluency", 4], ["topicality", 3]]',
        f"{GOOD} or {rating(1, 1, 1)}",
        f"{GOOD} {rating(5, 4, 6)}",
        f'{{"draft": {rating(1, 1, 1)}}} {GOOD}',
        f'{{"relevance": 1, "fluency": {GOOD}',
        f'{GOOD} no: {{"relevance": 1, "flu',
        f"<think>{GOOD}",
        f"{GOOD}<think>no, ",
        f"{GOOD}{'x' * 100_000}",
        '{"a":' * 20_000,
        rating(5, 4, 0),
        rating(6, 4, 3),
        rating(-1, 4, 3),
        rating(5, 4.5, 3),
        rating("5/5", 4, 3),
        rating("five", 4, 3),
        rating(True, 4, 3),
        rating(None, 4, 3),
        rating([5], 4, 3),
        rating({"score": 5}, 4, 3),
        '{"relevance": 5, "fluency": 4}',
        '{"relevance": 5, "fluency": 4, "topicality": 3, "overall": 4}',
        '{"relevance": 5, "fluency": 4, "topicality": 3, "topicality": 1}',
        '{"Relevance": 5, "fluency": 4, "topicality": 3}',
        '{"relevance": 5, "fluency": 4, "topicality": NaN}',
        '{"relevance": 5, "fluency": 4, "topicality": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ],
)
def test_anything_else_is_no_rating(answer):
    assert parse_ratings(answer) is None


DRAFT, WORDS = f"Perhaps {rating(1, 1, 1)}. No.", "I rate relevance 5, fluency 4, topicality 3."


@pytest.mark.parametrize(
    "answer",
    [
        f"<seed:think>{DRAFT}</seed:think>\n{WORDS}",
        f"<seed:think>Perhaps {rating(1, 1, 1)}",
        f"<|begin_of_thought|>{DRAFT}<|end_of_thought|><|begin_of_solution|>{WORDS}",
        f"<|START_THINKING|>{DRAFT}<|END_THINKING|>{WORDS}",
        f"<|channel|>analysis<|message|>{DRAFT}<|end|><|start|>assistant<|message|>{WORDS}",
        f"<unused94>thought\n{DRAFT}<unused95>{WORDS}",
        f'<think time="3">{DRAFT}</think>{WORDS}',
        f"<analysis>{rating(1, 1, 1)}</analysis>",
        f'<details type="reasoning"><summary>3 s</summary>\n> {DRAFT}\n</details>\n{WORDS}',
        f"[ANALYSIS]{DRAFT}[/ANALYSIS]{WORDS}",
        f"{DRAFT} {WORDS}",
        f'{rating(1, 1, 1)} {{"but": "no"}}',
    ],
)
def test_a_draft_in_unknown_marks_or_before_other_words_is_no_rating(answer):
    assert parse_ratings(answer) is None


def test_a_malformed_answer_is_asked_for_once_more(server, make):
    server.replies = [Reply("I like it"), Reply(rating(1, 2, 3))]
    assert make().score([item()]) == [(1.0, 2.0, 3.0)]


@pytest.mark.parametrize(
    "reply",
    [
        Reply("I like it"),
        Reply(rating(6, 4, 3)),
        Reply(None),
        Reply(["5"]),
        Reply(body={}),
        Reply(body=[]),
        Reply(body={"choices": []}),
        Reply(body={"choices": None, "usage": []}),
        Reply(body={"choices": ["text"]}),
        Reply(body={"choices": [{"message": "text"}]}),
        Reply(body=b"<html>"),
        Reply(body=b"\xff{"),
        Reply(body=b"<html>", headers={"Content-Type": "text/html"}),
    ],
)
def test_two_malformed_answers_leave_the_text_without_a_number(server, make, reply):
    server.replies = [reply, reply, Reply()]
    judge = make()
    assert judge.score([item()]) == [MALFORMED]
    assert judge.requests == len(server.bodies) == 2


@pytest.mark.parametrize(
    "reply",
    [
        Reply(None, refusal="I cannot rate this."),
        Reply(GOOD, finish="content_filter"),
        Reply(body={"choices": [{"finish_reason": "content_filter"}]}),
        Reply(status=400, body={"error": {"message": "filtered", "code": "content_filter"}}),
    ],
)
def test_a_refusal_is_not_asked_again_and_not_a_number(server, make, reply):
    server.replies = [reply, Reply()]
    assert make().score([item()]) == [REFUSED]
    assert len(server.bodies) == 1


PART = {"type": "text", "text": GOOD}


@pytest.mark.parametrize(
    "content",
    [[PART], [{"type": "thinking", "thinking": rating(1, 1, 1)}, PART], [PART["text"]],
     [{"type": "text", "text": GOOD[:20]}, {"type": "output_text", "text": GOOD[20:]}]],
)  # fmt: skip
def test_content_in_parts_is_their_text_without_thoughts(server, make, content):
    server.replies = [Reply(content)]
    assert make().score([item()]) == [(5.0, 4.0, 3.0)]
    assert len(server.bodies) == 1


def completion(finish: str = "stop", **message: Any) -> Reply:
    return Reply(body={"choices": [{"message": message, "finish_reason": finish}]})


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (completion(content=None, reasoning_content=GOOD), MALFORMED),
        (completion(content="", reasoning=GOOD), MALFORMED),
        (completion(content=[{"type": "refusal", "refusal": "no"}]), REFUSED),
        (completion(finish="SAFETY", content=GOOD), REFUSED),
    ],
)
def test_thoughts_and_refusals_are_no_answer(server, make, reply, reason):
    server.replies = [reply]
    assert make().score([item()]) == [reason]


def cut(content: Any = None, finish: str = "length") -> Reply:
    return Reply(content, finish=finish)


@pytest.mark.parametrize(
    "reply",
    [cut(), cut(GOOD[:30]), cut(f"<think>{GOOD}"), cut(f"{GOOD} But then"), cut("", "MAX_TOKENS")],
)
def test_a_cut_answer_is_not_paid_for_twice(server, make, reply):
    server.replies = [reply]
    judge = make()
    assert judge.score([item()]) == [SkippedText("answer cut at the server's limit", final=False)]
    assert judge.requests == 1


@pytest.mark.parametrize("blanks", ["", "\n" * 400, "\n```\n"])
def test_a_rating_that_nothing_follows_is_read_though_it_was_cut(server, make, blanks):
    server.replies = [cut(GOOD + blanks)]
    assert make().score([item()]) == [(5.0, 4.0, 3.0)]


PRICED = {"concurrency": 1, "prices": (1.0, 1.0), "max_cost": 1.0}


def limits(server: Server) -> list[int]:
    return [body["max_completion_tokens"] for body in server.bodies]


def test_the_first_answer_cut_at_our_limit_gives_all_that_follow_more_room(server, make):
    server.replies = [cut(), Reply(), Reply(), cut(), Reply()]
    judge = make(**PRICED)
    scores = judge.score([item(text) for text in "abcd"])
    why = SkippedText("answer cut at 4000 tokens", final=False)
    assert scores == [(5.0, 4.0, 3.0), (5.0, 4.0, 3.0), why, (5.0, 4.0, 3.0)]
    assert limits(server) == [500, 4000, 4000, 4000, 4000]


@pytest.mark.parametrize("message", ["at most 2048", "This model's maximum context length is 4096"])
def test_a_server_that_refuses_more_room_is_asked_as_before(server, make, message):
    server.replies = [cut(), Reply()]
    in_turn = server.reply

    def reply(text: str) -> Reply:
        more = 4000 in server.bodies[-1].values()
        return Reply(message, status=400) if more else in_turn(text)

    server.reply = reply
    why = SkippedText("answer cut at 500 tokens", final=False)
    assert make(**PRICED).score([item("a"), item("b")]) == [why, (5.0, 4.0, 3.0)]


def test_more_room_counts_for_the_cost(server, make):
    server.replies = [cut(), Reply()]
    with pytest.raises(ScoringError, match=r"may cost \$0\.00[45]\d, and \$0\.00[23]\d* is left"):
        make(**PRICED | {"max_cost": 0.003}).score([item()])
    assert limits(server) == [500]


@pytest.mark.parametrize(
    ("needed", "prices", "cost"),
    [(25, (0.02, 0.08), 1e-6), (25, (2.6, 10.0), 1e-4), (900, (2.0, 8.0), 0.02)],
)
def test_the_limit_that_is_printed_is_enough_to_go_on(server, make, needed, prices, cost):
    """Also when the next run begins with answers that are cut."""

    def reply(text: str) -> Reply:
        asked = next(body for body in reversed(server.bodies) if judged(body) == text)
        limit = asked["max_completion_tokens"]
        is_cut = needed > limit
        return Reply(
            body={
                "choices": [
                    {
                        "message": {"content": "<think>" if is_cut else GOOD},
                        "finish_reason": "length" if is_cut else "stop",
                    }
                ],
                "usage": {"prompt_tokens": 300, "completion_tokens": min(needed, limit)},
            }
        )

    server.reply = reply
    names = {"prices": prices, "concurrency": 2}
    rest = {n: item("y" * n) for n in range(20)}

    def run(cost: float) -> str:
        places = [*rest]
        try:
            for piece in make(max_cost=cost, **names).scores_in_pieces([*rest.values()]):
                for index in piece:
                    del rest[places[index]]
        except ScoringError as error:
            return str(error)
        return ""

    for is_told in (False, True, True):
        before = len(rest)
        why = run(cost)
        assert not is_told or len(rest) < before
        if why:
            cost = float(re.search(r"max_cost=([\d.]+) or more", why)[1])


def test_items_without_a_prompt_an_attribute_or_a_text_need_no_key_and_no_request(
    server, make, monkeypatch
):
    monkeypatch.delenv("OPENAI_API_KEY")
    scores = make().score([item(prompt=""), item(attribute=" "), item(text="\n")])
    assert scores == [
        SkippedText("no prompt"),
        SkippedText("no attribute"),
        SkippedText("empty text"),
    ]
    assert server.bodies == []


def test_an_item_that_lacks_something_stands_between_rated_ones(server, make):
    server.reply = lambda text: Reply(rating(len(text), 1, 1))
    scores = make().score([item("a"), item("b", prompt=""), item("cc")])
    assert scores == [(1.0, 1.0, 1.0), SkippedText("no prompt"), (2.0, 1.0, 1.0)]
    assert sorted(server.texts) == ["a", "cc"]


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503])
def test_a_busy_or_failing_server_is_asked_again_after_growing_pauses(server, make, waits, status):
    server.replies = [Reply("busy", status=status)] * 3 + [Reply()]
    assert make().score([item()]) == [(5.0, 4.0, 3.0)]
    assert waits == [1.0, 2.0, 4.0]
    assert len(server.bodies) == 4


def test_retry_after_is_kept_to_in_seconds_and_as_a_date(server, make, waits, monkeypatch):
    now = 1_800_000_000.0
    monkeypatch.setattr("lapa2_interp.scoring.judge.time", SimpleNamespace(time=lambda: now))
    server.replies = [
        Reply(status=429, headers={"Retry-After": "7"}),
        Reply(status=503, headers={"Retry-After": formatdate(now + 30, usegmt=True)}),
        Reply(status=429, headers={"Retry-After": formatdate(now - 30, usegmt=True)}),
        Reply(status=429, headers={"Retry-After": "soon"}),
        Reply(),
    ]
    assert make().score([item()]) == [(5.0, 4.0, 3.0)]
    assert waits == [7.0, 30.0, 0.0, 8.0]


def test_a_server_that_asks_for_hours_ends_the_run_without_waiting(server, make, waits):
    server.replies = [Reply("daily limit", status=429, headers={"Retry-After": "7200"})]
    with pytest.raises(ScoringError, match="429 .*daily limit.* 7200 s"):
        make().score([item()])
    assert (waits, len(server.bodies)) == ([], 1)


def test_a_server_that_keeps_failing_ends_the_run_after_the_attempts(server, make, waits):
    server.replies = [Reply("out of\nmemory", status=500)]
    with pytest.raises(
        ScoringError, match=r"127\.0\.0\.1:\d+ answers 500 \(.*out of memory\), 3 times in a row"
    ):
        make(attempts=3).score([item()])
    assert (waits, len(server.bodies)) == ([1.0, 2.0], 3)


def test_a_server_that_does_not_answer_is_given_up_after_the_attempts(server, make, waits):
    server.replies = [Reply(silent=True)]
    with pytest.raises(ScoringError, match=r"no answer within 0\.05 s.*2 times in a row"):
        make(attempts=2, timeout=0.05).score([item()])
    assert (waits, len(server.bodies)) == ([1.0], 2)


def test_a_late_answer_is_made_up_for(server, make, waits):
    server.replies = [Reply(silent=True), Reply()]
    judge = make(timeout=0.5)
    assert judge.score([item()]) == [(5.0, 4.0, 3.0)]
    assert (waits, judge.requests) == ([1.0], 2)


def test_a_server_that_is_not_there_is_named(make, waits, server):
    server.close()
    with pytest.raises(
        ScoringError, match=r"127\.0\.0\.1:\d+ cannot be reached \(.*refused.*2 times in a row"
    ):
        make(attempts=2).score([item()])
    assert waits == [1.0]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, r"does not accept the key in OPENAI_API_KEY \(401\)"),
        (403, r"does not let the key in OPENAI_API_KEY use m \(403: .*no such right"),
    ],
)
def test_a_key_the_server_does_not_know_ends_the_run_at_once(server, make, waits, status, words):
    server.replies = [Reply("no such right", status=status)]
    with pytest.raises(ScoringError, match=words):
        make().score([item()])
    assert (waits, len(server.bodies)) == ([], 1)


def test_a_model_that_the_server_does_not_know_in_any_form_is_named(server, make, waits):
    server.replies = [Reply("no such model", status=404)]
    with pytest.raises(ScoringError, match=r"cannot serve m \(no such model.*model's name"):
        make().score([item()])
    assert (waits, len(server.bodies)) == ([], 3)


BUSY = {"message": "overloaded", "code": 503}


@pytest.mark.parametrize(
    "body",
    [
        {"error": BUSY},
        {"error": "overloaded"},
        {"choices": None, "error": BUSY},
        {"choices": [], "error": BUSY},
        {"choices": [{"message": {"content": ""}, "finish_reason": "error", "error": BUSY}]},
        {"choices": [{"message": {"content": GOOD}, "finish_reason": "stop", "error": BUSY}]},
        {"choices": [{"message": {"content": GOOD[:20]}, "finish_reason": "error"}]},
    ],
)
def test_an_error_with_status_200_is_a_failure_of_the_server(server, make, waits, body):
    server.replies = [Reply(body=body), Reply(body=body), Reply()]
    assert make().score([item()]) == [(5.0, 4.0, 3.0)]
    assert waits == [1.0, 2.0]
    server.replies = [Reply(body=body)]
    with pytest.raises(ScoringError, match=r"answers 50[03] \((overloaded|the answer ended)"):
        make(attempts=1).score([item()])


def test_a_server_that_fails_at_a_format_is_asked_without_it_until_it_has_answered(
    server, make, waits
):
    formats = lambda: [body.get("response_format", {}).get("type") for body in server.bodies]  # noqa: E731
    server.reply = lambda _: Reply(status=500 if formats()[-1] else 200)
    judge = make(concurrency=1)
    assert judge.score([item("a"), item("b")]) == [(5.0, 4.0, 3.0)] * 2
    assert formats() == ["json_schema", "json_object", None, None]
    assert waits == [1.0, 2.0]
    server.bodies.clear()
    server.replies = [Reply(), Reply(status=500), Reply()]
    server.reply = lambda _: server.replies.pop(0)
    make(concurrency=1).score([item("a"), item("b")])
    assert formats() == ["json_schema"] * 3, "it has answered in this form"


def test_a_quota_that_is_used_up_is_not_waited_for(server, make, waits):
    body = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}
    server.replies = [Reply(status=429, body=body)]
    with pytest.raises(ScoringError, match="quota.*is used up"):
        make().score([item()])
    assert (waits, len(server.bodies)) == ([], 1)


@pytest.mark.parametrize("status", [400, 404, 422, 501])
@pytest.mark.parametrize("refused", [1, 2])
def test_a_server_that_refuses_a_format_is_asked_for_the_next_and_not_again(
    server, make, waits, refused, status
):
    server.replies = [Reply("unknown response_format", status=status)] * refused + [Reply()]
    judge = make(concurrency=1)
    assert judge.score([item("a"), item("b")]) == [(5.0, 4.0, 3.0)] * 2
    formats = [body.get("response_format", {}).get("type") for body in server.bodies]
    order = ["json_schema", "json_object", None]
    assert formats == [*order[: refused + 1], order[refused]]
    assert waits == []


def test_a_server_that_refuses_every_format_has_its_reason_repeated(server, make, waits):
    server.replies = [Reply("temperature is not supported", status=400)]
    with pytest.raises(ScoringError, match="cannot serve m .*temperature is not supported"):
        make().score([item()])
    assert (waits, len(server.bodies)) == ([], 3)
    with pytest.raises(ScoringError, match="or judge_temperature='server'$"):
        make().score([item()])


def test_a_server_that_knows_the_older_name_of_the_limit_alone_is_asked_by_it(server, make):
    server.replies = [Reply("unknown field max_completion_tokens", status=400)] * 3 + [Reply()]
    judge = make(concurrency=1, prices=(1.0, 1.0), max_cost=1.0)
    assert judge.score([item("a"), item("b")]) == [(5.0, 4.0, 3.0)] * 2
    named = [[name for name in TOKEN_LIMIT_NAMES if name in body] for body in server.bodies]
    assert named == [["max_completion_tokens"]] * 3 + [["max_tokens"]] * 2
    assert {body[name] for body, (name,) in zip(server.bodies, named, strict=True)} == {500}


@pytest.mark.parametrize(
    "error",
    [
        {"code": "context_length_exceeded", "message": "too many tokens"},
        {"code": 400, "message": "This model's maximum context length is 4096 tokens."},
    ],
)
def test_a_text_that_is_too_long_ends_no_run_and_is_not_asked_again(server, make, error, tmp_path):
    replies = {"long": Reply(status=400, body={"error": error}), "short": Reply()}
    server.reply = replies.__getitem__
    for asked in (2, 2):
        table = run_scorer(make(concurrency=1), [item("long"), item("short")], ScoreCache(tmp_path))
        assert table["reason"].tolist() == ["text too long for the judge", ""]
        assert len(server.bodies) == asked


@pytest.mark.parametrize("key", [None, "", " \n"])
def test_without_a_key_the_variable_to_set_is_named(server, make, monkeypatch, key):
    (
        monkeypatch.delenv("OPENAI_API_KEY")
        if key is None
        else monkeypatch.setenv("OPENAI_API_KEY", key)
    )
    with pytest.raises(
        ScoringError, match="OPENAI_API_KEY is not set.*a local server accepts any value"
    ):
        make().score([item()])
    assert server.bodies == []


@pytest.mark.parametrize("key", ["sk-0123 sk-4567", "sk-0123\nX: y", "sk-\u20190123"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(server, make, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ScoringError, match="OPENAI_API_KEY holds") as caught:
        make().score([item()])
    assert "0123" not in str(caught.value)
    assert server.bodies == []


@pytest.mark.parametrize(
    "reply",
    [
        Reply(),
        Reply(f"Incorrect API key provided: {KEY}", status=401),
        Reply(f"{KEY} may not use this model", status=403),
        Reply(f"{'x' * 150} Bearer {KEY}", status=400),
        Reply(KEY, status=500),
        Reply(status=502, body=f"<html>{KEY}".encode()),
        Reply(silent=True),
    ],
)
def test_the_key_is_sent_and_is_in_no_file_log_error_or_repr(
    server, make, tmp_path, caplog, capfd, reply
):
    caplog.set_level(logging.DEBUG)
    server.replies = [reply]
    judge = make(attempts=1, timeout=0.1 if reply.silent else 10.0)
    said = []
    try:
        run_scorer(judge, [item()], ScoreCache(tmp_path))
    except ScoringError as error:
        caught: BaseException | None = error
        while caught is not None:
            said.append(f"{caught!r} {caught}")
            caught = caught.__cause__ or caught.__context__
    assert server.keys == {f"Bearer {KEY}"}
    assert bool(said) == (reply != Reply())
    files = [file.read_bytes().decode("latin-1") for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    places = [
        *said,
        *files,
        caplog.text,
        *capfd.readouterr(),
        repr(judge),
        repr(vars(judge)),
        judge.version,
        judge.usage,
    ]
    for text in places:
        assert KEY[:12] not in text


def test_a_server_is_not_told_the_machine_the_organization_or_the_project(
    server, make, monkeypatch
):
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, f"the {name}")
    assert make().score([item()]) == [(5.0, 4.0, 3.0)]
    assert server.headers == {
        "host", "accept", "accept-encoding", "user-agent", "content-type", "content-length", "authorization"
    }  # fmt: skip


@pytest.mark.parametrize("text", ["plain", "é \u2019 \U0001f600 \ud7ff", '"\\\n{}\x00'])
def test_a_request_has_no_more_bytes_than_were_counted_for_its_cost(server, make, text):
    judge = make()
    judge.score([item(text)])
    assert 0 < server.sizes[0] <= judge._largest


def test_without_the_client_the_extra_to_install_is_named(server, make, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ScoringError, match=r'pip install "lapa2-interp\[judge\]"'):
        make().score([item()])
    assert server.bodies == []


@pytest.mark.parametrize(
    "body",
    [
        f"<html>your key is {KEY[:8]}...{KEY[-4:]}</html>".encode(),
        json.dumps({"detail": f"key {KEY}"}).encode(),
        json.dumps({"error": {"message": f"Incorrect API key: {KEY[:8]}***{KEY[-4:]}"}}).encode(),
        json.dumps({"error": {"message": f"of {b64encode(KEY.encode()).decode()} no"}}).encode(),
        json.dumps({"error": f"{KEY.upper()} {KEY[::-1]}{KEY[::-1]}"}).encode(),
        json.dumps({"error": {"message": [KEY]}}).encode(),
    ],
)
def test_an_answer_that_repeats_the_key_in_another_form_is_not_quoted(server, make, body):
    server.replies = [Reply(status=403, body=body)]
    with pytest.raises(ScoringError) as caught:
        make(attempts=1).score([item()])
    said = str(caught.value)
    assert "403" in said
    for form in (KEY[:8], KEY[:8].upper(), b64encode(KEY.encode()).decode()[:8], KEY[::-1][:8]):
        assert form not in said


def test_answers_keep_the_order_of_their_texts_and_as_many_are_under_way_as_asked_for(server, make):
    texts = ["a", "bb", "ccc", "dddd"]
    answered = {text: threading.Event() for text in ["", *texts]}
    late = []

    def last_first(text: str) -> Reply:
        after = texts[texts.index(text) + 1] if text != texts[-1] else ""
        if not answered[after].wait(5):
            late.append(text)
        answered[text].set()
        return Reply(rating(len(text), 1, 1))

    answered[""].set()
    server.reply = last_first
    judge = make(concurrency=4)
    assert judge.batch_size == 4
    assert judge.score([item(text) for text in texts]) == [
        (float(n), 1.0, 1.0) for n in (1, 2, 3, 4)
    ]
    assert late == []


def test_no_more_are_under_way_than_asked_for(server, make):
    lock, under_way, most = threading.Lock(), [0], [0]
    pair = threading.Barrier(2, timeout=5)

    def reply(_: str) -> Reply:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        pair.wait()
        with lock:
            under_way[0] -= 1
        return Reply()

    server.reply = reply
    make(concurrency=2).score([item(text) for text in "abcdef"])
    assert most == [2]


def test_what_was_answered_beside_a_failure_is_given_before_the_error(server, make):
    together = threading.Barrier(3, timeout=5)

    def reply(text: str) -> Reply:
        together.wait()
        return Reply("no", status=401) if text == "b" else Reply()

    server.reply = reply
    judge, scores = make(concurrency=3), {}
    with pytest.raises(ScoringError, match="OPENAI_API_KEY"):
        for piece in judge.scores_in_pieces([item(text) for text in "abc"]):
            scores.update(piece)
    assert scores == {0: (5.0, 4.0, 3.0), 2: (5.0, 4.0, 3.0)}
    assert sorted(server.texts) == ["a", "b", "c"]
    server.reply = lambda _: Reply()
    assert judge.score([item("d")]) == [(5.0, 4.0, 3.0)]


def test_a_failure_in_the_last_batch_ends_the_run(server, make, tmp_path):
    server.reply = lambda text: Reply("no", status=401) if text == "b" else Reply()
    with pytest.raises(ScoringStoppedError, match="stopped after . of 2 texts.*OPENAI_API_KEY"):
        run_scorer(make(concurrency=4), [item("a"), item("b")], ScoreCache(tmp_path))


def test_a_redirect_is_not_followed_and_a_truncated_or_endless_answer_is_malformed(server, make):
    server.replies = [Reply(status=307, headers={"Location": "http://127.0.0.2:1/v1"})]
    with pytest.raises(ScoringError, match="answers 307, a redirect, which is not followed"):
        make().score([item()])
    long = GOOD[:-1] + ", " + " " * 2_000_000 + "}"
    server.replies = [Reply(long)]
    assert make().score([item()]) == [MALFORMED]
    server.replies = [
        Reply(headers={"Content-Encoding": "gzip", "Content-Type": "text; charset=rot13"})
    ]
    assert make().score([item()]) == [
        (5.0, 4.0, 3.0)
    ]  # whatever it says, it is read as plain UTF-8


@pytest.mark.parametrize("count", [-200, True, 10**4000, 1.5, "200", None])
def test_a_count_of_tokens_that_cannot_be_one_is_no_count(server, make, count):
    answer = json.loads(Reply().encoded())
    answer["usage"] = {"prompt_tokens": count, "completion_tokens": 20}
    server.replies = [Reply(body=answer)]
    judge = make(prices=(1, 1))
    assert judge.score([item()]) == [(5.0, 4.0, 3.0)]
    assert (judge.uncounted, judge.cost) == (1, 0)


def test_the_cost_never_passes_its_limit_and_uses_it_up(server, make):
    judge = make(concurrency=4, prices=(2.5, 10.0), max_cost=0.02)
    scores = {}
    with pytest.raises(
        ScoringError,
        match=r"next request may cost \$0\.0085, and \$0\.00\d\d is left .* max_cost=0\.0085 or more",
    ):
        for piece in judge.scores_in_pieces([item(str(number)) for number in range(40)]):
            scores.update(piece)
    # what a request costs is 0.0007; the last one is refused when less than its bound is left
    assert len(scores) == judge.requests == len(server.bodies)
    assert judge.spent == pytest.approx(judge.cost) == pytest.approx(0.0007 * judge.requests)
    assert 0.02 - 0.0085 - 0.0007 < judge.cost < 0.02
    assert all(body["max_completion_tokens"] == 500 for body in server.bodies)


def test_requests_without_an_answer_or_a_count_count_as_dear_as_they_can_be(server, make):
    server.replies = [Reply(tokens=False), Reply(silent=True)]
    judge = make(attempts=1, timeout=0.5, concurrency=1, prices=(2.5, 10.0), max_cost=1.0)
    with pytest.raises(ScoringError, match=r"no answer within 0\.5 s"):
        judge.score([item("a"), item("b")])
    assert judge.cost == 0
    assert 0.01 < judge.spent < 0.03
    server.replies = [Reply("no", status=400)]
    before = judge.spent
    with pytest.raises(ScoringError, match="cannot serve"):
        judge.score([item("c")])
    assert judge.spent == pytest.approx(before)  # a refused request is not billed


def test_after_a_failure_nothing_new_is_asked_and_nobody_waits(server, make):
    waiting = threading.Event()

    def reply(text: str) -> Reply:
        if text == "a":
            waiting.wait(5)
            return Reply("no", status=401)
        waiting.set()
        return Reply(status=429, headers={"Retry-After": "20"})

    server.reply = reply
    start = time.monotonic()
    with pytest.raises(ScoringError, match="OPENAI_API_KEY"):
        make(concurrency=2, attempts=2, sleep=None).score([item(text) for text in "abcdef"])
    assert time.monotonic() - start < 15
    assert sorted(server.texts) == ["a", "b"]


def test_a_stopped_run_keeps_what_was_answered_and_the_next_one_asks_only_for_the_rest(
    server, make, tmp_path
):
    items = [item(text) for text in ("a", "bb", "ccc", "dddd", "eeeee")]
    third = threading.Event()

    def reply(text: str) -> Reply:
        if text == "ccc":
            third.set()
        if text == "dddd":
            third.wait(5)
            return Reply("no", status=401)
        return Reply(rating(len(text), 1, 1))

    server.reply = reply
    with pytest.raises(ScoringStoppedError, match="OPENAI_API_KEY"):
        run_scorer(make(concurrency=2), items, ScoreCache(tmp_path))
    server.bodies.clear()
    server.reply = lambda text: Reply(rating(len(text), 1, 1))
    table = run_scorer(make(concurrency=2), items, ScoreCache(tmp_path))
    assert sorted(server.texts) == ["dddd", "eeeee"]
    assert table["relevance"].tolist() == [1, 2, 3, 4, 5]


def test_a_killed_run_keeps_what_was_answered(server, make, tmp_path):
    def killed(_: float) -> None:
        raise KeyboardInterrupt

    items = [item(text) for text in ("a", "bb", "ccc")]
    server.replies = [Reply(), Reply(status=500)]
    with pytest.raises(KeyboardInterrupt):
        run_scorer(make(concurrency=1, sleep=killed), items, ScoreCache(tmp_path))
    server.replies = [Reply()]
    server.bodies.clear()
    run_scorer(make(), items, ScoreCache(tmp_path))
    assert sorted(server.texts) == ["bb", "ccc"]


def test_what_is_in_the_cache_is_not_asked_for_and_needs_no_key(
    server, make, tmp_path, monkeypatch
):
    items = [
        item("a"),
        item("a", attribute="negative"),
        item("a", prompt="The sea"),
        item("a"),
        item("b", prompt=""),
    ]
    first = run_scorer(make(), items, ScoreCache(tmp_path))
    assert len(server.bodies) == 3
    monkeypatch.delenv("OPENAI_API_KEY")
    second = run_scorer(make(), items, ScoreCache(tmp_path))
    assert len(server.bodies) == 3
    assert second.equals(first)
    assert first.columns.tolist() == ["relevance", "fluency", "topicality", "reason"]
    assert first.iloc[0].tolist() == [5, 4, 3, ""]
    assert first["reason"].tolist() == ["", "", "", "", "no prompt"]


def test_texts_without_a_number_are_asked_for_again_by_the_next_run(server, make, tmp_path):
    server.replies = [Reply(None, refusal="no"), Reply("?"), Reply("?"), Reply()]
    items = [item("a"), item("bb")]
    first = run_scorer(make(concurrency=1), items, ScoreCache(tmp_path))
    assert first["reason"].tolist() == ["refused", "malformed answer"]
    assert first["fluency"].isna().all()
    second = run_scorer(make(concurrency=1), items, ScoreCache(tmp_path))
    assert second["fluency"].tolist() == [4, 4]


def test_requests_tokens_and_cost_are_counted_over_every_request(server, make):
    server.replies = [Reply(status=500), Reply("?"), Reply()]
    judge = make(concurrency=2, prices=(2.5, 10.0))
    assert judge.usage == "0 requests, 0 input and 0 output tokens, $0.0000"
    judge.score([item("a")])
    judge.score([item(text) for text in "bcdefg"])
    assert (judge.requests, judge.input_tokens, judge.output_tokens) == (9, 8 * 200, 8 * 20)
    assert judge.cost == pytest.approx((1600 * 2.5 + 160 * 10) / 1e6, rel=1e-12)
    assert judge.usage == "9 requests, 1,600 input and 160 output tokens, $0.0056"


def test_without_prices_there_is_no_cost_and_answers_without_counts_are_told(server, make):
    server.replies = [Reply(tokens=False), Reply()]
    judge = make(concurrency=1)
    judge.score([item("a"), item("b")])
    assert judge.cost is None
    assert judge.usage == "2 requests, 200 input and 20 output tokens (answers without a count: 1)"


def test_the_version_holds_model_server_prompt_and_temperature(make, monkeypatch):
    first = make("gpt-4o", base_url="https://user:secret@judge.example/v1").version
    assert first.startswith("gpt-4o at judge.example, prompt ")
    assert first.endswith(", temperature 0")
    versions = {first, make("gpt-4o", base_url="https://judge.example:8443/v1").version}
    versions |= {make("other", base_url="https://judge.example/v1").version}
    versions |= {
        make("gpt-4o", base_url="https://judge.example/v1", temperature=t).version
        for t in (None, 0.5)
    }
    asked = ScorerOptions(judge_url="https://judge.example/v1", judge_temperature=None)
    assert make_scorer("judge", "gpt-4o", asked).version in versions
    monkeypatch.setattr("lapa2_interp.scoring.judge.PROMPT", "Rate {text}.")
    versions |= {make("gpt-4o", base_url="https://judge.example/v1").version}
    assert len(versions) == 6


def test_two_paths_of_one_server_are_two_judges(make):
    """A gateway has a model behind each."""
    places = {
        "https://user:secret@judge.example/v1": "judge.example",
        "https://judge.example/v1/": "judge.example",
        "https://user:secret@judge.example/a/v1": "judge.example/a/v1",
        "https://judge.example/b/v1/": "judge.example/b/v1",
        "https://judge.example": "judge.example/",
        "https://judge.example/v1/chat/completions": "judge.example",
    }
    for url, host in places.items():
        assert make("gpt-4o", base_url=url).version.startswith(f"gpt-4o at {host}, prompt ")


def test_the_server_is_the_clients_own_unless_one_is_given(make, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert " at api.openai.com, " in make(base_url=None).version
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1")
    assert " at localhost:8000, " in make(base_url=None).version


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"concurrency": 0}, "concurrency: .* found 0"),
        ({"attempts": 0}, "attempts: .* found 0"),
        ({"timeout": 0.0}, "timeout: .* found 0"),
        ({"timeout": float("nan")}, "timeout: .* found nan"),
        ({"temperature": 2.5}, "temperature: .* or equal to 2, found 2.5"),
        ({"temperature": -1.0}, "temperature: .* found -1"),
        ({"prices": (-1.0, 1.0)}, "prices: input should be greater .* 0, found -1"),
        ({"max_cost": 1.0}, "limited to 1 US dollars.*judge_prices"),
        ({"max_cost": -1.0, "prices": (1, 1)}, "max_cost: input should .* 0, found -1"),
        ({"prices": (float("inf"), 1.0)}, "prices: input should be a finite number, found inf"),
        ({"base_url": "http://a b/v1"}, "base_url 'http://a b/v1'"),
        ({"base_url": "localhost:8000"}, "base_url 'localhost:8000'"),
        ({"base_url": "http://localhost:port/v1"}, "base_url 'http://localhost:port/v1'"),
        ({"base_url": "http://a/v1?key=b"}, r"a \? or # behind a/v1, and"),
        ({"model": " "}, "no name"),
    ],
)
def test_arguments_out_of_range_are_named(make, settings, words):
    with pytest.raises(Lapa2Error, match=words):
        make(**settings)
