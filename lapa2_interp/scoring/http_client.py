"""HTTP requests to a server that may be slow, broken or hostile: bounded in time and size."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

LARGEST_ANSWER = 1_000_000
"""Bytes of an answer that are read, at most. A longer answer is cut off, and so malformed."""
SENT_HEADERS = ("accept", "authorization", "content-type", "user-agent")
"""The headers of OpenAI's client that are sent. Others would name the machine, the organization and
the project to any server."""


def bounded_client(seconds: float) -> httpx2.Client:
    """An HTTP client, for the client of OpenAI, with bounds on the time of a request and the size
    of an answer, which follows no redirect.

    A redirect is returned like any other answer, so that no key and no text goes to another server.
    Answers are requested without compression, since a small one can unpack to a huge one.

    Args:
        seconds: Seconds for a whole request, from the connection to the last byte of the answer.
    """
    import httpx2  # it comes with openai, which is an extra

    class BoundedClient(httpx2.Client):
        def send(self, request: httpx2.Request, **settings: Any) -> httpx2.Response:
            """Send a request, and return its answer with the header Retry-After only.

            Raises:
                httpx2.HTTPError: No answer, or none in time.
            """
            # httpx2 bounds each wait for a byte, not their sum. So a thread sends the request, and
            # is abandoned when the time is over.
            answer: Future[httpx2.Response] = Future()
            settings |= {"stream": True, "follow_redirects": False}
            threading.Thread(
                target=self._ask, args=(answer, request, settings), daemon=True
            ).start()
            try:
                return answer.result(seconds)
            except TimeoutError:
                late = httpx2.ReadTimeout(f"no answer within {seconds:g} s", request=request)
                raise late from None

        def _ask(
            self, answer: Future[httpx2.Response], request: httpx2.Request, settings: dict[str, Any]
        ) -> None:
            """Send a request in a thread, and read its answer up to the bounds."""
            ends, body = time.monotonic() + seconds, bytearray()
            try:
                headers = {name: request.headers[name] for name in SENT_HEADERS}
                sent = httpx2.Request(
                    request.method,
                    request.url,
                    headers=headers | {"accept-encoding": "identity"},
                    content=request.content,
                    extensions=request.extensions,
                )
                with closing(super().send(sent, **settings)) as response:
                    for part in response.iter_raw():
                        body += part
                        if len(body) > LARGEST_ANSWER or time.monotonic() > ends:
                            break
                headers = {
                    name: value for name, value in response.headers.items() if name == "retry-after"
                }
                answer.set_result(
                    httpx2.Response(
                        response.status_code,
                        headers=headers,
                        content=bytes(body[:LARGEST_ANSWER]),
                        request=request,
                    )
                )
            except Exception as error:
                answer.set_exception(error)

    return BoundedClient(timeout=seconds)
