"""The addresses of the server: OpenAI's protocol over Starlette."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lapa2_interp.models.facts import Model
from lapa2_interp.serving.engine import Answer, Engine, Piece, QueueFullError
from lapa2_interp.serving.request import Asked, Defaults, ProtocolError, read_request

Kind = Literal["chat", "text"]
ADDRESSES = "GET /v1/models, POST /v1/chat/completions and POST /v1/completions"
OBJECTS = {"chat": "chat.completion", "text": "text_completion"}


def make_app(
    model: Model,
    engine: Engine,
    defaults: Defaults,
    key: str | None = None,
    most_bytes: int = 2**20,
) -> Starlette:
    """The application.

    Args:
        key: What a client must give as its API key; None asks for none.
        most_bytes: Of a request's body.
    """

    async def models(request: Request) -> Response:
        check_client(request, key)
        card = {"id": defaults.model, "object": "model", "created": started, "owned_by": "lapa2"}
        return JSONResponse({"object": "list", "data": [card]})

    async def complete(request: Request, kind: Kind) -> Response:
        check_client(request, key)
        data = await read_json(request, most_bytes)
        # Tokenising a long text would keep other clients waiting.
        asked = await asyncio.to_thread(read_request, model, defaults, data, kind)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece]()

        def emit(piece: Piece) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        try:
            answer = engine.ask(asked, emit)
        except QueueFullError:
            raise ProtocolError(
                "the queue is full; try again", 503 if engine.stopping else 429, code="queue_full"
            ) from None
        about = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid4().hex}",
            "created": int(time.time()),
            "model": defaults.model,
        }
        if asked.stream:
            return StreamingResponse(
                streamed(answer, pieces, about, kind), media_type="text/event-stream"
            )
        return await whole(request, answer, pieces, about, kind)

    started = int(time.time())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    return Starlette(
        routes=[
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/chat/completions", partial(complete, kind="chat"), methods=["POST"]),
            Route("/v1/completions", partial(complete, kind="text"), methods=["POST"]),
        ],
        exception_handlers={ProtocolError: refused, HTTPException: unknown_address},
        lifespan=lifespan,
    )


async def refused(request: Request, error: Exception) -> Response:
    """What is wrong with a request."""
    assert isinstance(error, ProtocolError)
    return JSONResponse(error.body, error.status)


async def unknown_address(request: Request, error: Exception) -> Response:
    """What is asked of an address, or by a method, that this server has not."""
    assert isinstance(error, HTTPException)
    message = f"this server has no {request.method} {request.url.path}; it has {ADDRESSES}"
    return await refused(request, ProtocolError(message, error.status_code))


def check_client(request: Request, key: str | None) -> None:
    """Refuse clients without the key, and pages of other origins: a browser would send their
    requests to this machine's own address, too.

    Raises:
        ProtocolError: The key is another; or the request comes from a page.
    """
    if (origin := request.headers.get("origin")) is not None:
        host = request.headers.get("host", "")
        if urlsplit(origin).netloc != host:
            raise ProtocolError(
                "pages of other origins may not ask this server", 403, code="origin"
            )
    if key is not None:
        client_key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(client_key.encode(), key.encode()):
            raise ProtocolError(
                "the API key is not that of this server", 401, code="invalid_api_key"
            )


async def read_json(request: Request, most_bytes: int) -> Any:
    """The JSON of a request's body.

    Raises:
        ProtocolError: It is too long, or no JSON.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ProtocolError("the body should be application/json", 415)
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > most_bytes:
            raise ProtocolError(f"the body has more than {most_bytes:,} bytes", 413)
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError("the body is no JSON") from None


async def whole(
    request: Request,
    answer: Answer,
    pieces: asyncio.Queue[Piece],
    about: dict[str, Any],
    kind: Kind,
) -> Response:
    """An answer in one piece; a client that goes away frees its place."""
    text = ""
    try:
        while True:
            waiting = asyncio.ensure_future(pieces.get())
            while not waiting.done():
                await asyncio.wait([waiting], timeout=0.5)
                if not waiting.done() and await _has_gone(request):
                    waiting.cancel()
                    return Response(status_code=499)
            piece = waiting.result()
            if piece.error is not None:
                raise ProtocolError(piece.error, 500)
            text += piece.text
            if piece.finish is not None:
                break
    finally:  # also where the server cancels it
        answer.gone.set()
    choice: dict[str, Any] = {"index": 0, "finish_reason": piece.finish, "logprobs": None}
    if kind == "chat":
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    body = about | {
        "object": OBJECTS[kind],
        "choices": [choice],
        "usage": usage(answer.asked, piece),
    }
    if piece.report is not None:
        body["lapa2"] = piece.report
    return JSONResponse(body)


async def _has_gone(request: Request) -> bool:
    try:
        return await request.is_disconnected()
    except ClientDisconnect:
        return True


def usage(asked: Asked, piece: Piece) -> dict[str, int]:
    """Tokens read and written."""
    n_read = len(asked.layout.ids)
    return {
        "prompt_tokens": n_read,
        "completion_tokens": piece.n_tokens,
        "total_tokens": n_read + piece.n_tokens,
    }


async def streamed(
    answer: Answer, pieces: asyncio.Queue[Piece], about: dict[str, Any], kind: Kind
) -> AsyncIterator[str]:
    """An answer as events; a client that goes away frees its place."""
    name = OBJECTS[kind] + (".chunk" if kind == "chat" else "")
    about = about | {"object": name}

    def event(data: Any) -> str:
        return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"

    def choice(text: str, finish: str | None, first: bool = False) -> list[dict[str, Any]]:
        if kind == "text":
            return [{"index": 0, "text": text, "finish_reason": finish, "logprobs": None}]
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text or first:
            delta["content"] = text
        return [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]

    try:
        if kind == "chat":
            yield event(about | {"choices": choice("", None, first=True)})
        while True:
            piece = await pieces.get()
            if piece.error is not None:
                yield event(ProtocolError(piece.error, 500).body)
                break
            if piece.text:
                yield event(about | {"choices": choice(piece.text, None)})
            if piece.finish is not None:
                last = about | {"choices": choice("", piece.finish)}
                yield event(last | ({} if piece.report is None else {"lapa2": piece.report}))
                if answer.asked.usage_in_stream:
                    yield event(about | {"choices": [], "usage": usage(answer.asked, piece)})
                break
        yield "data: [DONE]\n\n"
    finally:
        answer.gone.set()
