"""The command of a server: `lapa2 serve`."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lapa2_interp.bias.chat_template import check_span_of_chat
from lapa2_interp.cli.options import AugmentationOptions, Several
from lapa2_interp.errors import GridError, ModelError
from lapa2_interp.models.machine import DtypeOrAuto

if TYPE_CHECKING:
    from uvicorn import Server

KEY = "LAPA2_API_KEY"
"""The environment variable that has the key of clients."""


def serve(
    model: str = "smollm2-135m",
    /,
    *,
    span: str = "system",
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    cards: Annotated[list[Path] | None, Several] = None,
    longest: int = 1024,
    waiting: int = 256,
    seconds: float = 600,
    memory: float = 1.0,
    marks: bool = False,
    dtype: DtypeOrAuto = "float32",
    device: str | None = None,
    augmentation: AugmentationOptions = AugmentationOptions(),
) -> None:
    """Serve a model by OpenAI's protocol, its answers steered to the system message.

    Any client of that protocol can use it: /v1/models, /v1/chat/completions and /v1/completions,
    whole or streamed. A request may say more in the field "lapa2": span, alpha, augmentation,
    heads (the name of a card), top_k, and report (the attention on the span and its effect, token
    by token). What the server does not follow is refused, such as tools and top_p. The system
    message comes with each request. Without --alpha, --augmentation and marks there is no bias. For
    example

        lapa2 serve smollm2-135m --alpha 0.5
        curl http://127.0.0.1:8000/v1/models

    Needs the extra `serve`. A server that others can reach needs a key, in the environment variable
    LAPA2_API_KEY.

    Args:
        model: A model with a chat template: a name of `lapa2 models`, a hub id, a folder or a GGUF
            file.
        span: What is steered to where a request does not say: system, turn:2, or phrase:TEXT.
        host: The address to listen at.
        port: Its port; 0 takes a free one.
        name: The name under which clients know the model; by default as given.
        cards: Cards of `lapa2 steer`, `select` or `learn`; requests name their heads by the file's
            name.
        longest: Tokens of an answer, at most.
        waiting: Requests that wait, at most.
        seconds: An answer ends after this time.
        memory: Gigabytes for keys and values of earlier turns.
        marks: Read marks such as "(Never name a medicine:1.5)" in system messages: the number is a
            factor on the odds of the attention on the marked words.
        dtype: Precision of weights and computation.
        device: cpu, cuda, cuda:1.
    """
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise ModelError(
                f"{package} is not installed, which a server needs: pip install"
                ' "lapa2-interp[serve]"'
            )
    key = os.environ.get(KEY) or None
    check_span_of_chat(span)
    if key is None and not is_own_machine(host):
        raise GridError(
            f"{host} can be reached from other machines; set {KEY} to a key that clients must give,"
            " or leave out --host"
        )
    import uvicorn

    from lapa2_interp.circuits.selection import Selection
    from lapa2_interp.models.load import load_model
    from lapa2_interp.serving.app import make_app
    from lapa2_interp.serving.engine import Engine
    from lapa2_interp.serving.request import Defaults, after_span

    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise GridError(
            f"the server cannot listen at port {port} of {host} ({error}); give another --port, or"
            " 0 for one that is free"
        ) from None
    with listener:
        loaded = load_model(model, dtype, device, "TransformersModel")
        augmentation.check(loaded)
        known = {path.stem: Selection.load(path) for path in cards or ()}
        for card in known.values():
            card.check(loaded)
        rules = after_span(augmentation.build(0.0))
        defaults = Defaults(name or model, span, rules, cards=known, longest=longest, marks=marks)
        engine = Engine(loaded, int(memory * 2**30), waiting, seconds=seconds)
        app = make_app(loaded, engine, defaults, key)
        bias = " + ".join(rule.label for rule in rules) or "no bias"
        if marks:
            bias += ", or the marks of the system message"
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/v1"
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=60)
        server = uvicorn.Server(config)
        with stops_server(server):
            print(f"{defaults.model}, {bias}, span {span}: {address}", flush=True)
            server.run(sockets=[listener])
        if not server.started and not server.should_exit:
            raise ModelError("the server did not start; its messages above say why")
        print("stopped", flush=True)


@contextmanager
def stops_server(server: Server) -> Iterator[None]:
    """A block in which Ctrl-C and SIGTERM end the server when all that runs is finished.

    Uvicorn takes these signals while it runs, and raises them again at its end. Those that come
    before are not lost.
    """
    is_main = threading.current_thread() is threading.main_thread()  # only that one gets signals
    numbers = [signal.SIGINT, signal.SIGTERM] if is_main else []
    before = {number: signal.signal(number, server.handle_exit) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_own_machine(host: str) -> bool:
    """True if an address is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
