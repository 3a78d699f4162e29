"""Perspective against a local server of its API: scores, retries, refusals, the rate, resuming, and
a key that leaks nowhere."""

import json
import logging
import os
import threading
import time
import traceback
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest

from lapa2_interp._util.errors import ScoringError
from lapa2_interp.scoring.perspective import KEY_VARIABLE, LAST_DAY, MAX_BYTES, Perspective
from lapa2_interp.scoring.scorer import (
    ScoreCache,
    ScoringStoppedError,
    SkippedText,
    TextItem,
    run_scorer,
)

KEY = "AIzaSyTest-key_that_must_stay_secret"
BEFORE = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
ON_LAST_DAY = datetime(2026, 12, 31, 23, 59, tzinfo=UTC).timestamp()
AFTER = datetime(2027, 1, 1, 0, 1, tzinfo=UTC).timestamp()
SILENCE = "silence"  # the server takes the request and never answers
HANG_UP = "hang up"  # the server closes the connection


class FakeClock:
    """A clock that only its own sleeps move."""

    def __init__(self, now=BEFORE):
        self.now = now
        self.slept = []

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def found(value):
    score = {"value": value, "type": "PROBABILITY"}
    spans = [{"begin": 0, "end": 3, "score": score}]
    return 200, {
        "attributeScores": {"TOXICITY": {"spanScores": spans, "summaryScore": score}},
        "languages": ["en"],
        "detectedLanguages": ["en"],
    }


def refused(status, *, retry_after=None, message="no", **detail):
    body = {
        "error": {
            "code": status,
            "message": message,
            "status": "INVALID_ARGUMENT",
            "details": [detail],
        }
    }
    return status, body, {} if retry_after is None else {"Retry-After": retry_after}


class Api(ThreadingHTTPServer):
    """Answers a text with what is queued for it, one answer per request, and then with
    `score_of(text)`."""

    daemon_threads = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.clock = FakeClock()
        self.queued = {}
        self.requests = []  # what arrived: path, headers, body, and when by the fake clock
        self.closing = threading.Event()

    @property
    def texts(self):
        return [each["body"]["comment"]["text"] for each in self.requests]

    def queue(self, text, *answers):
        self.queued.setdefault(text, []).extend(answers)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet per answer
    timeout = 5

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        api = self.server
        api.requests.append(
            {"path": self.path, "headers": dict(self.headers), "body": body, "at": api.clock.now}
        )
        text = body["comment"]["text"]
        waiting = api.queued.get(text)
        if self.path != "/v1alpha1/comments:analyze":
            answer = refused(404)
        elif self.headers["x-goog-api-key"] != KEY:
            answer = refused(
                400,
                reason="API_KEY_INVALID",
                message="API key not valid. Please pass a valid API key.",
            )
        else:
            answer = waiting.pop(0) if waiting else found(score_of(text))
        if answer in (SILENCE, HANG_UP):
            if answer == SILENCE:
                api.closing.wait(5)
            self.close_connection = True
            return
        status, payload, *headers = answer
        content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.send_response(status)
        for name, value in {
            "Content-Length": len(content),
            **(headers[0] if headers else {}),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def score_of(text):
    return len(text) / 1000


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")
    server = Api()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def scorer(api):
    """Makes scorers of the local server on its fake clock, and closes them."""
    made = []

    def make(**settings):
        settings = {"sleep": api.clock.sleep, "rate": 1000.0, **settings}
        made.append(Perspective(api.url, clock=api.clock.time, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def one(scorer, text):
    (score,) = scorer.score([TextItem(text)])
    return score


def whole(error):
    """Everything an error could show: messages, causes, their reprs, and the headers of a request
    among them."""
    shown = ["".join(traceback.format_exception(error))]
    while error is not None:
        shown.append(f"{error!r} {error.args} {vars(error)}")
        shown += [
            str(dict(each.headers)) for each in vars(error).values() if hasattr(each, "headers")
        ]
        error = error.__cause__ or error.__context__
    return "\n".join(shown)


def test_scores_are_the_summary_scores_in_order(api, scorer):
    api.queue("a", found(0.25))
    api.queue("b", found(1))
    api.queue("c", found(0))
    assert scorer().score([TextItem("a"), TextItem("b"), TextItem("c")]) == [
        (0.25,),
        (1.0,),
        (0.0,),
    ]


def test_a_request_is_what_the_api_documents_and_sends_the_text_alone(api, scorer):
    scorer().score([TextItem("Ein Text – 文", prompt="the prompt", attribute="toxic")])
    (request,) = api.requests
    assert request["path"] == "/v1alpha1/comments:analyze"
    assert request["body"] == {
        "comment": {"text": "Ein Text – 文"},
        "languages": ["en"],
        "requestedAttributes": {"TOXICITY": {}},
        "doNotStore": True,
    }
    assert request["headers"]["x-goog-api-key"] == KEY


def test_another_server_is_another_version(scorer, api):
    google, local = Perspective(), scorer()
    assert google.version == "perspective TOXICITY v1alpha1"
    assert local.version == f"perspective TOXICITY v1alpha1 at {api.url.removeprefix('http://')}"
    assert google.key(TextItem("a")) != local.key(TextItem("a"))
    assert "secret" not in Perspective("https://user:secret@proxy.example/perspective").version


@pytest.mark.parametrize("text", ["", " \n\t ", "é" * (MAX_BYTES // 2) + "x", "\ud800"])
def test_texts_the_api_cannot_take_are_skipped_without_a_request_or_a_key(
    api, scorer, monkeypatch, text
):
    monkeypatch.delenv(KEY_VARIABLE)
    reasons = {"": "empty text", " \n\t ": "empty text", "\ud800": "text not valid Unicode"}
    assert one(scorer(), text) == SkippedText(reasons.get(text, "text over 20 KB"), final=True)
    assert api.requests == []


def test_a_text_of_exactly_the_limit_is_sent(api, scorer):
    api.queue("é" * (MAX_BYTES // 2), found(0.5))
    assert one(scorer(), "é" * (MAX_BYTES // 2)) == (0.5,)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("LANGUAGE_NOT_SUPPORTED_BY_ATTRIBUTE", "language not supported"),
        ("LANGUAGE_DETECTION_FAILED", "language not detected"),
        ("COMMENT_EMPTY", "empty text"),
        ("COMMENT_TOO_LONG", "text over 20 KB"),
    ],
)
def test_a_400_that_blames_the_text_is_final(api, scorer, code, reason):
    api.queue("a", refused(400, errorType=code))
    assert one(scorer(), "a") == SkippedText(reason, final=True)
    assert len(api.requests) == 1


@pytest.mark.parametrize(
    "failure",
    [
        refused(500),
        refused(503),
        refused(429, reason="RATE_LIMIT_EXCEEDED"),
        HANG_UP,
        (200, b"<html>"),
        (200, b"\xff\xfe"),
        (200, []),
        (200, {"attributeScores": {}}),
        found(1.01),
        found(-0.01),
        found(float("nan")),
        found(True),
        found("0.5"),
        (200, b"not gzip", {"Content-Encoding": "gzip"}),
    ],
    ids=str,
)
def test_a_passing_failure_is_tried_again(api, scorer, failure):
    api.queue("a", failure, failure, found(0.5))
    assert one(scorer(), "a") == (0.5,)
    assert api.texts == ["a", "a", "a"]


def test_a_time_out_is_tried_again_and_then_named(api, scorer):
    api.queue("a", SILENCE, found(0.5))
    api.queue("b", SILENCE, SILENCE)
    patient = scorer(timeout=0.5, attempts=2)
    assert one(patient, "a") == (0.5,)
    with pytest.raises(ScoringError, match="no answer within 0.5 s, after 2 attempts"):
        one(patient, "b")


def test_after_the_last_attempt_the_error_names_the_status(api, scorer):
    api.queue("a", *[refused(500)] * 9)
    with pytest.raises(
        ScoringError, match=r"status 500, after 3 attempts; .* run the same command again$"
    ):
        one(scorer(attempts=3), "a")
    assert len(api.requests) == 3
    assert (
        len(api.clock.slept) - sum(wait <= 0.001 for wait in api.clock.slept) == 2
    )  # none after the last


def test_no_server_is_named_as_the_cause(api, scorer):
    nobody = Perspective(
        "http://127.0.0.1:1", attempts=2, clock=api.clock.time, sleep=api.clock.sleep
    )
    with (
        nobody,
        pytest.raises(
            ScoringError, match=r"Perspective at 127.0.0.1:1: no connection \(.*refused.*2 attempts"
        ),
    ):
        one(nobody, "a")


def test_an_answer_that_stays_malformed_skips_the_text_for_now(api, scorer, tmp_path):
    api.queue("a", (200, b"<html>"), (200, b"<html>"))
    table = run_scorer(scorer(attempts=2), [TextItem("a"), TextItem("bb")], ScoreCache(tmp_path))
    assert list(table["skipped"]) == ["malformed answer", ""]
    assert run_scorer(scorer(), [TextItem("a")], ScoreCache(tmp_path))["toxicity"][0] == score_of(
        "a"
    )


def test_back_off_doubles_with_jitter(api, scorer):
    firsts = set()
    for text in "abcde":
        api.clock.slept.clear()
        api.queue(text, *[refused(500)] * 3)
        one(scorer(rate=1e6, backoff=8.0), text)
        waits = [wait for wait in api.clock.slept if wait > 0.001]
        assert [
            wait / longest for wait, longest in zip(waits, (8, 16, 32), strict=True)
        ] == pytest.approx([0.75] * 3, abs=0.25)
        firsts.add(waits[0])
    assert len(firsts) > 1


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_in_seconds_is_honoured(api, scorer, status):
    api.queue("a", refused(status, retry_after="77"))
    one(scorer(), "a")
    first, second = (request["at"] for request in api.requests)
    assert 77 <= second - first < 78


def test_retry_after_as_a_date_is_honoured(api, scorer):
    until = datetime.fromtimestamp(BEFORE + 90, UTC)
    api.queue("a", refused(429, retry_after=format_datetime(until, usegmt=True)))
    one(scorer(), "a")
    assert 89.9 <= api.requests[1]["at"] - BEFORE < 91


@pytest.mark.parametrize(
    "value", ["", "soon", "-5", "1.5", "Sun, 01 Mar 2020 12:00:00 GMT", "Sun, 99 Foo 2026 99:99:99"]
)
def test_a_retry_after_that_says_nothing_leaves_the_back_off(api, scorer, value):
    api.queue("a", refused(429, retry_after=value))
    assert one(scorer(backoff=4.0), "a") == (score_of("a"),)
    assert 2 <= api.requests[1]["at"] - api.requests[0]["at"] <= 4.1


def test_a_wait_of_hours_stops_the_scorer(api, scorer):
    api.queue("a", refused(429, retry_after="7200"))
    with pytest.raises(
        ScoringError,
        match="status 429, and it asks to wait 7200 s; run the same command again then",
    ):
        one(scorer(), "a")
    assert sum(api.clock.slept) < 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refused(401), "status 401, the key is refused; set PERSPECTIVE_API_KEY"),
        (
            refused(403, reason="SERVICE_DISABLED"),
            r"status 403 \(SERVICE_DISABLED\), the key is refused",
        ),
        (
            refused(400, reason="API_KEY_INVALID"),
            r"status 400 \(API_KEY_INVALID\), the key is refused",
        ),
        (
            refused(400, errorType="INVALID_REQUEST"),
            r"status 400 \(INVALID_REQUEST\); check the base URL",
        ),
        (refused(404), "status 404; check the base URL"),
        ((400, b"<html>"), "status 400; check the base URL"),
        ((302, b"", {"Location": "/elsewhere"}), "status 302; check the base URL"),
    ],
    ids=str,
)
def test_a_refusal_of_key_or_request_stops_at_once(api, scorer, answer, words):
    api.queue("a", answer)
    with pytest.raises(ScoringError, match=words):
        one(scorer(), "a")
    assert len(api.requests) == 1


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_missing_key_names_the_variable(api, scorer, monkeypatch, value):
    if value is None:
        monkeypatch.delenv(KEY_VARIABLE)
    else:
        monkeypatch.setenv(KEY_VARIABLE, value)
    with pytest.raises(ScoringError, match="PERSPECTIVE_API_KEY is not set; set it"):
        one(scorer(), "a")


@pytest.mark.parametrize("value", ["clé-secrète", "two\nlines", "two words", "nul\0l"])
def test_a_key_no_header_can_hold_is_refused_unread(api, scorer, monkeypatch, value):
    monkeypatch.setattr("os.environ", {**os.environ, KEY_VARIABLE: value})
    with pytest.raises(ScoringError, match="PERSPECTIVE_API_KEY is not a key") as caught:
        one(scorer(), "a")
    assert value not in whole(caught.value)
    assert caught.value.__context__ is None
    assert api.requests == []


def test_the_key_is_read_at_the_first_request(api, scorer, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "another")
    waiting = scorer()
    monkeypatch.setenv(KEY_VARIABLE, f" {KEY}\n")
    assert one(waiting, "a") == (score_of("a"),)


def test_the_key_shows_nowhere(api, scorer, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    quick = scorer(attempts=2, timeout=0.5)
    api.queue("bb", refused(400, errorType="COMMENT_EMPTY", message=KEY))
    run_scorer(quick, [TextItem("a"), TextItem("bb")], ScoreCache(tmp_path))
    consumer = f"Consumer 'api_key:{KEY}' has been suspended."
    echoes = [
        [refused(403, message=consumer, reason=consumer, metadata={"consumer": f"api_key:{KEY}"})],
        [refused(500, message=consumer, reason=KEY)] * 2,
        [refused(400, message=consumer, errorType=KEY)],
        [SILENCE] * 2,
        [HANG_UP] * 2,
        [(200, KEY.encode())] * 2,
    ]
    shown = [
        repr(quick),
        str(vars(quick)),
        quick.version,
        quick.notice,
        quick.key(TextItem("a")),
    ]
    for number, answers in enumerate(echoes):
        api.queue(f"c{number}", *answers)
        try:
            table = run_scorer(quick, [TextItem(f"c{number}")], ScoreCache(tmp_path))
            assert list(table["skipped"]) == ["malformed answer"]
        except ScoringStoppedError as error:
            shown.append(whole(error))
    assert len(shown) == 5 + 5
    shown += [record.getMessage() for record in caplog.records]
    assert any("HTTP Request: POST" in line for line in shown)  # the client's own log was read
    assert not [each for each in shown if KEY in each]
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if KEY.encode() in file.read_bytes()]
    assert all(
        request["headers"]["x-goog-api-key"] == KEY and KEY not in request["path"]
        for request in api.requests
    )


def test_the_rate_is_kept_over_calls_and_retries(api, scorer):
    api.queue("c", refused(500), refused(500))
    slow = scorer(rate=0.5, backoff=0.1)
    for text in "abcd":
        one(slow, text)
    times = [request["at"] for request in api.requests]
    assert api.texts == ["a", "b", "c", "c", "c", "d"]
    assert [later - earlier for earlier, later in pairwise(times)] == pytest.approx([2.0] * 5)


def test_the_default_rate_is_one_request_per_second(api):
    with Perspective(api.url, clock=api.clock.time, sleep=api.clock.sleep) as scorer:
        scorer.score([TextItem("a"), TextItem("b"), TextItem("c")])
    assert [request["at"] - BEFORE for request in api.requests] == pytest.approx([0, 1, 2])


def test_time_between_requests_counts_and_a_clock_set_back_does_not_stall(api, scorer):
    steady = scorer(rate=1.0)
    one(steady, "a")
    api.clock.now += 5
    one(steady, "b")
    assert api.clock.slept == []
    api.clock.now -= 3600
    one(steady, "c")
    assert api.clock.slept == [1.0]


def test_what_the_cache_knows_is_not_asked_again(api, scorer, tmp_path):
    items = [TextItem("a"), TextItem(""), TextItem("ccc"), TextItem("a")]
    api.queue("ccc", refused(400, errorType="LANGUAGE_NOT_SUPPORTED_BY_ATTRIBUTE"))
    first = run_scorer(scorer(), items, ScoreCache(tmp_path))
    assert sorted(api.texts) == ["a", "ccc"]
    again = run_scorer(scorer(), items, ScoreCache(tmp_path))
    assert len(api.requests) == 2
    assert again.equals(first)
    assert list(first["skipped"]) == ["", "empty text", "language not supported", ""]
    assert first["toxicity"].isna().tolist() == [False, True, True, False]


def test_a_stopped_run_asks_only_for_the_rest(api, scorer, tmp_path):
    items = [TextItem("a" * length) for length in range(1, 6)]
    api.queue("aaa", refused(500), refused(500))
    with pytest.raises(
        ScoringStoppedError,
        match="toxicity stopped after 2 of 5 texts, which are kept: .*status 500",
    ):
        run_scorer(scorer(attempts=2), items, ScoreCache(tmp_path))
    api.requests.clear()
    table = run_scorer(scorer(), items, ScoreCache(tmp_path))
    assert api.texts == ["aaa", "aaaa", "aaaaa"]
    assert list(table["toxicity"]) == [score_of(item.text) for item in items]


def test_a_killed_run_asks_only_for_the_rest(api, scorer, tmp_path):
    def killed(seconds):
        if len(api.requests) == 2:
            raise KeyboardInterrupt
        api.clock.sleep(seconds)

    items = [TextItem("a" * length) for length in range(1, 6)]
    with pytest.raises(KeyboardInterrupt):
        run_scorer(scorer(sleep=killed), items, ScoreCache(tmp_path))
    api.requests.clear()
    table = run_scorer(scorer(), items, ScoreCache(tmp_path))
    assert api.texts == ["aaa", "aaaa", "aaaaa"]
    assert list(table["toxicity"]) == [score_of(item.text) for item in items]


@pytest.mark.parametrize(("now", "ended"), [(BEFORE, False), (ON_LAST_DAY, False), (AFTER, True)])
def test_the_end_of_the_service_is_announced_and_after_it_explains_failures(
    api, scorer, now, ended
):
    api.clock.now = now
    quick = scorer(attempts=1)
    assert str(LAST_DAY) == "2026-12-31"
    assert "2026-12-31" in quick.notice
    assert "\n" not in quick.notice
    assert ("has probably ended" in quick.notice) is ended
    for text, answer in {
        "a": refused(404),
        "b": refused(503),
        "c": HANG_UP,
        "d": refused(403),
    }.items():
        api.queue(text, answer)
        with pytest.raises(ScoringError) as caught:
            one(quick, text)
        assert ("2026-12-31 and has probably ended" in str(caught.value)) is ended
    assert one(quick, "e") == (score_of("e"),)


def test_a_closed_scorer_can_be_used_again(api, scorer):
    reused = scorer()
    reused.close()
    one(reused, "a")
    reused.close()
    assert one(reused, "bb") == (score_of("bb"),)


def test_a_forgotten_scorer_closes_its_connection(api):
    forgotten = Perspective(api.url, clock=api.clock.time, sleep=api.clock.sleep)
    one(forgotten, "a")
    client = forgotten._client
    del forgotten
    assert client.is_closed


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rate": 0.0}, "rate is 0.0; give a number over 0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"backoff": -1.0}, "backoff is -1.0"),
        ({"attempts": 0}, "attempts is 0; give 1 or more"),
        *[
            (
                {"base_url": url},
                "the base URL is .*; give one such as https://commentanalyzer.googleapis.com",
            )
            for url in (
                "",
                "localhost",
                "ftp://x",
                "https://",
                "http://a b",
                "http://x:99999",
                "http://[",
                "http://x?k=1",
            )
        ],
    ],
    ids=str,
)
def test_arguments_out_of_range_are_named(settings, words):
    with pytest.raises(ScoringError, match=words):
        Perspective(**settings)


def test_the_real_clock_and_sleep_are_the_defaults(api):
    with Perspective(api.url, rate=20.0) as scorer:
        start = time.monotonic()
        scorer.score([TextItem("a"), TextItem("b")])
    assert time.monotonic() - start >= 0.045
