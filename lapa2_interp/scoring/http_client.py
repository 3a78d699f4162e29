"""Requests by OpenAI's client to a server that may be slow, broken or hostile: bounded in time and
size. Extra `judge`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lapa2_interp.errors import ScoringError

if TYPE_CHECKING:
    import httpx2
    from openai import OpenAI

LARGEST_ANSWER = 1_000_000
"""Bytes of an answer that are read, at most. A longer answer is cut off, and so malformed."""
SENT_HEADERS = ("accept", "authorization", "content-type", "user-agent")
"""The headers of OpenAI's client that are sent. Others would name the machine, the organization and
the project to any server."""


def openai_client(key: str, base_url: str, seconds: float) -> OpenAI:
    """OpenAI's client, within the bounds of `bounded_client`.

    Raises:
        ScoringError: It is not installed.
    """
    if find_spec("openai") is None:
        raise ScoringError(
            "a judge is asked by OpenAI's client, which is not installed: pip install"
            ' "lapa2-interp[judge]"'
        )
    from openai import OpenAI

    return OpenAI(
        api_key=key,
        base_url=base_url,
        timeout=seconds,
        max_retries=0,  # each request is counted, and may cost, so the judge repeats it
        http_client=bounded_client(seconds),
    )


def ask_server(client: OpenAI, body: Mapping[str, Any]) -> httpx2.Response | str:
    """The answer to a chat completion, of any status, as it was sent, since servers leave OpenAI's
    form; or why there is none. No error leaves this function: it would hold the key."""
    import openai

    try:
        return client.chat.completions.with_raw_response.create(**body).http_response
    except openai.APIStatusError as error:
        return error.response
    except openai.APITimeoutError:
        return f"no answer within {client.timeout:g} s"
    except openai.APIConnectionError as error:
        cause = error.__cause__
        if type(cause).__name__ == "ConnectError":
            return " ".join(str(cause).split())
        return f"the connection broke: {type(cause).__name__}"  # some quote what the server sent


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
