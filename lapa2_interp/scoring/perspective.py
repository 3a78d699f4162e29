"""Toxicity by Google's Perspective API: the TOXICITY summary score of `comments:analyze`, one
request per text.

    1  texts that the API cannot take (empty, over 20 KB) are skipped without a request
    2  requests do not exceed a rate; after a 429, a 5xx, a time-out, a lost connection or a malformed answer the request is
       repeated, after an exponential back-off with jitter or the time in Retry-After
    3  a 400 that blames the text is a final `SkippedText`; one that blames the key or the request stops the scorer

The key is read from the environment and sent in a header. Error messages quote codes of the service,
never its sentences, since those can repeat the key.
"""  # noqa: E501

from __future__ import annotations

import math
import os
import random
import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from email.utils import mktime_tz, parsedate_tz
from urllib.parse import urlsplit

import httpx

from lapa2_interp._util.errors import ScoringError
from lapa2_interp.scoring.http_client import BoundedClient
from lapa2_interp.scoring.scorer import Score, Scorer, SkippedText, TextItem, unreadable_reason

LAST_DAY = date(2026, 12, 31)
"""Last day of the service, as announced."""
KEY_VARIABLE = "PERSPECTIVE_API_KEY"
BASE_URL = "https://commentanalyzer.googleapis.com"
MAX_BYTES = 20_480
"""Longest text the API takes, in UTF-8."""
LONGEST_WAIT = 600.0
"""Seconds. If the service asks for a longer wait, the scorer stops."""

EMPTY, TOO_LONG, MALFORMED = "empty text", "text over 20 KB", "malformed answer"
TEXT_FAULTS = {
    "COMMENT_EMPTY": EMPTY,
    "COMMENT_TOO_LONG": TOO_LONG,
    "LANGUAGE_NOT_SUPPORTED_BY_ATTRIBUTE": "language not supported",
    "LANGUAGE_DETECTION_FAILED": "language not detected",
}
"""The API's error types that are final for a text, with the reason for the table."""


@dataclass(frozen=True)
class _Failure:
    """A failure after which another attempt may succeed.

    Attributes:
        cause: The cause, for the error message.
        wait: Seconds that the service asks to wait.
    """

    cause: str
    wait: float = 0.0


class Perspective(Scorer):
    """Perspective's TOXICITY, a probability in [0, 1]. The first request opens a connection;
    `close` or `with` ends it.

    Args:
        base_url: Address before `/v1alpha1/comments:analyze`; one that is not Google's becomes part
            of `version`.
        rate: Requests per second, at most; Google's quota is 1 unless another was granted.
        attempts: Requests for one text before giving up.
        backoff: Seconds before the second attempt, doubled for each further one; the wait is drawn
            between half of them and all.
        timeout: Seconds for a whole request, from the connection to the last byte of the answer.
        clock: Returns seconds since 1970.
        sleep: Waits for seconds.

    Raises:
        ScoringError: An argument is out of range.
    """

    name = "toxicity"
    columns = ("toxicity",)
    batch_size = 1  # each score is kept as soon as it is made

    def __init__(
        self,
        base_url: str = BASE_URL,
        *,
        rate: float = 1.0,
        attempts: int = 6,
        backoff: float = 2.0,
        timeout: float = 30.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        for field, value in (("rate", rate), ("backoff", backoff), ("timeout", timeout)):
            if not 0 < value < math.inf:
                raise ScoringError(f"{field} is {value}; give a number over 0")
        if attempts < 1:
            raise ScoringError(f"attempts is {attempts}; give 1 or more")
        self._host = _host(base_url)
        self._url = f"{base_url.rstrip('/')}/v1alpha1/comments:analyze"
        self.version = "perspective TOXICITY v1alpha1" + (
            "" if self._host == _host(BASE_URL) else f" at {self._host}"
        )
        self.rate, self.attempts, self.backoff, self.timeout = rate, attempts, backoff, timeout
        self._clock, self._sleep = clock, sleep
        self._client: httpx.Client | None = None
        self._next = -math.inf

    @property
    def notice(self) -> str:
        """One line about the end of the service, for users who start scoring."""
        if self._ended():
            return (
                f"Perspective was announced to end on {LAST_DAY} and has probably ended; use"
                " another toxicity scorer"
            )
        return (
            f"Perspective is announced to end on {LAST_DAY}; finish a table before, since no table"
            " mixes toxicity scorers"
        )

    def score(self, items: Sequence[TextItem]) -> list[Score]:
        """One toxicity per item, in order; only the text is sent.

        Raises:
            ScoringError: No key, a refused key or request, or no usable answer after the last
                attempt.
        """
        return [self._score(item.text) for item in items]

    def close(self) -> None:
        """End the connection; the next request opens another and reads the key again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Perspective:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score(self, text: str) -> Score:
        if reason := _skip_reason(text):
            return SkippedText(reason)
        failure = _Failure("")
        for attempt in range(self.attempts):
            if attempt:
                longest = min(self.backoff * 2.0 ** (attempt - 1), LONGEST_WAIT)
                self._sleep(max(random.uniform(longest / 2, longest), failure.wait))
            self._pace()
            answer = self._ask(text)
            if not isinstance(answer, _Failure):
                return answer
            failure = answer
            if failure.wait > LONGEST_WAIT:
                wait = f"{failure.cause}, and it asks to wait {failure.wait:.0f} s"
                raise self._error(wait, "run the same command again then")
        if failure.cause == MALFORMED:
            return SkippedText(MALFORMED, final=False)
        raise self._error(
            f"{failure.cause}, after {self.attempts} attempts",
            "check network, quota and rate, then run the same command again",
        )

    def _pace(self) -> None:
        """Wait until the rate allows a request."""
        gap = 1 / self.rate
        wait = min(
            self._next - self._clock(), gap
        )  # a clock that was set back must not stall the run
        if wait > 0:
            self._sleep(wait)
        self._next = self._clock() + gap

    def _ask(self, text: str) -> Score | _Failure:
        """Send one request. No error of httpx leaves this method, since it holds the request and so
        the key."""
        request = {
            "comment": {"text": text},
            "languages": ["en"],
            "requestedAttributes": {"TOXICITY": {}},
            "doNotStore": True,
        }
        client = self._open_client()
        try:
            response = client.post(self._url, json=request)
        except httpx.TimeoutException:
            return _Failure(f"no answer within {self.timeout:g} s")
        except httpx.ConnectError as error:
            return _Failure(f"no connection ({error})")
        except httpx.TransportError as error:
            return _Failure(f"the connection broke ({type(error).__name__})")
        return self._parse_response(response)

    def _parse_response(self, response: httpx.Response) -> Score | _Failure:
        """The score of a response, or its failure; raises if the key or the request is refused."""
        status = response.status_code
        if status == 200:
            value = _toxicity(response)
            return _Failure(MALFORMED) if value is None else (value,)
        reason = _error_code(response, "reason")
        cause = f"status {status}" + (f" ({reason})" if reason else "")
        if status in (408, 429) or status >= 500:
            return _Failure(
                cause, _retry_after(response.headers.get("retry-after", ""), self._clock())
            )
        if status in (401, 403) or reason.startswith("API_KEY"):
            raise self._error(
                f"{cause}, the key is refused",
                f"set {KEY_VARIABLE} to a key of a project that has the API enabled",
            )
        fault = _error_code(response, "errorType")
        if status == 400 and fault in TEXT_FAULTS:
            return SkippedText(TEXT_FAULTS[fault])
        raise self._error(
            cause if reason or not fault else f"{cause} ({fault})",
            "check the base URL, and that the API still has v1alpha1",
        )

    def _open_client(self) -> httpx.Client:
        """The client, with the key in its headers.

        Raises:
            ScoringError: The environment has no key, or one that cannot stand in a header.
        """
        if self._client is None:
            key = os.environ.get(KEY_VARIABLE, "").strip()
            if not key:
                raise ScoringError(f"{KEY_VARIABLE} is not set; set it to your Perspective API key")
            if not re.fullmatch(r"[!-~]+", key):
                raise ScoringError(
                    f"{KEY_VARIABLE} is not a key: it has spaces, line breaks or letters beyond"
                    " ASCII"
                )
            self._client = BoundedClient(self.timeout, {"x-goog-api-key": key})
            weakref.finalize(self, self._client.close)
        return self._client

    def _error(self, cause: str, advice: str) -> ScoringError:
        ending = f"; {self.notice}" if self._ended() else ""
        return ScoringError(f"Perspective at {self._host}: {cause}; {advice}{ending}")

    def _ended(self) -> bool:
        return datetime.fromtimestamp(self._clock(), UTC).date() > LAST_DAY


def _host(base_url: str) -> str:
    """Host and port of a URL, without the user and password it may hold.

    Raises:
        ScoringError: Not an http(s) URL, or with a query.
    """
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    plain = re.fullmatch(r"https?://[!-~]+", base_url) and re.fullmatch(
        r"[a-z0-9._:-]+", host or ""
    )
    if not host or not plain or parts.query or parts.fragment:
        raise ScoringError(f"the base URL is {base_url!r}; give one such as {BASE_URL}")
    return host if port is None else f"{host}:{port}"


def _skip_reason(text: str) -> str:
    """The reason why the API cannot take a text, or ""."""
    return unreadable_reason(text) or (TOO_LONG if len(text.encode()) > MAX_BYTES else "")


def _toxicity(response: httpx.Response) -> float | None:
    """The summary score, or None if there is none in [0, 1]."""
    try:
        value = response.json()["attributeScores"]["TOXICITY"]["summaryScore"]["value"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value <= 1 else None


def _error_code(response: httpx.Response, field: str) -> str:
    """A field of the error's details that holds a code in capitals, or ""."""
    try:
        found = [detail.get(field) for detail in response.json()["error"]["details"]]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return next(
        (code for code in found if isinstance(code, str) and re.fullmatch("[A-Z_]{1,60}", code)), ""
    )


def _retry_after(value: str, now: float) -> float:
    """Seconds to wait according to a Retry-After, a number or an HTTP date; else 0."""
    if re.fullmatch("[0-9]+", value):
        return float(value)
    try:
        parts = parsedate_tz(value)
        return max(0.0, mktime_tz(parts) - now) if parts else 0.0
    except (ValueError, OverflowError):
        return 0.0
