"""HTTP requests to a server that may be slow, broken or hostile: bounded in time and size."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import httpx

LARGEST_ANSWER = 1_000_000
"""Bytes of an answer that are read, at most. A longer answer is cut off, and so malformed."""


class BoundedClient(httpx.Client):
    """An HTTP client with bounds on the time of a request and the size of an answer, which follows
    no redirect.

    A redirect is returned like any other answer, so that no key and no text goes to another server.
    Answers are requested without compression, since a small one can unpack to a huge one.

    Args:
        seconds: Seconds for a whole request, from the connection to the last byte of the answer.
        headers: Headers of every request.
    """

    def __init__(self, seconds: float, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(
            timeout=seconds, headers={**(headers or {}), "Accept-Encoding": "identity"}
        )
        self._seconds = seconds

    def send(self, request: httpx.Request, **settings: Any) -> httpx.Response:
        """Send a request, and return its answer with the header Retry-After only.

        Raises:
            httpx.HTTPError: No answer, or none in time.
        """
        # httpx bounds each wait for a byte, not their sum. So a thread sends the request, and is
        # abandoned when the time is over.
        answer: Future[httpx.Response] = Future()
        settings |= {"stream": True, "follow_redirects": False}
        threading.Thread(target=self._ask, args=(answer, request, settings), daemon=True).start()
        try:
            return answer.result(self._seconds)
        except TimeoutError:
            late = httpx.ReadTimeout(f"no answer within {self._seconds:g} s", request=request)
            raise late from None

    def _ask(
        self, answer: Future[httpx.Response], request: httpx.Request, settings: dict[str, Any]
    ) -> None:
        """Send a request in a thread, and read its answer up to the bounds."""
        ends, body = time.monotonic() + self._seconds, bytearray()
        try:
            with closing(super().send(request, **settings)) as response:
                for part in response.iter_raw():
                    body += part
                    if len(body) > LARGEST_ANSWER or time.monotonic() > ends:
                        break
            headers = {
                name: value for name, value in response.headers.items() if name == "retry-after"
            }
            answer.set_result(
                httpx.Response(
                    response.status_code,
                    headers=headers,
                    content=bytes(body[:LARGEST_ANSWER]),
                    request=request,
                )
            )
        except Exception as error:
            answer.set_exception(error)
