"""A server of a tiny model with a chat template."""

import json
import queue
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
import uvicorn
from conftest import load

from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.serving.app import make_app
from lapa2_interp.serving.engine import Engine
from lapa2_interp.serving.request import Defaults, after_span, read_request

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [SYSTEM, {"role": "user", "content": "Why?"}]
SETTINGS = {"model": "tiny", "messages": CHAT, "max_tokens": 6, "seed": 1, "temperature": 0}
RULES = after_span([Augmentation(alpha=0.7)])


@pytest.fixture
def model(monkeypatch):
    model = load("tiny-llama", "float64", "TransformersModel")
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    return model


class Asker:
    """An engine that is asked by the bodies of requests."""

    def __init__(self, model, defaults=None, **settings):
        self.model = model
        self.defaults = defaults or Defaults("tiny", rules=RULES)
        self.engine = Engine(model, **settings)
        self.engine.start()

    def put(self, kind="chat", **body):
        """A request in the queue; its answer, and the queue of its pieces."""
        body = {"model": "tiny", "max_tokens": 6, "seed": 1} | body
        if kind == "chat":
            body.setdefault("messages", CHAT)
        pieces = queue.Queue()
        asked = read_request(self.model, self.defaults, body, kind)
        return self.engine.ask(asked, pieces.put), pieces

    def ask(self, kind="chat", **body):
        """An answer, and its last piece."""
        answer, pieces = self.put(kind, **body)
        while (piece := pieces.get(timeout=60)).finish is None and piece.error is None:
            pass
        assert piece.error is None, piece.error
        return answer, piece


@pytest.fixture
def asker(model):
    made = []

    def make(**settings):
        made.append(Asker(model, **settings))
        return made[-1]

    yield make
    for one in made:
        one.engine.stop()


@pytest.fixture
def served(model):
    """Starts a server with some settings: its address, and its engine."""
    servers = []

    def start(key=None, most_bytes=2**20, defaults=None, **settings):
        engine = Engine(model, **settings)
        app = make_app(model, engine, defaults or Defaults("tiny", rules=RULES), key, most_bytes)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config = uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=30)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        servers.append((server, thread))
        return f"http://127.0.0.1:{port}/v1", engine

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def post(address, data, headers=()):
    """Status and JSON of a plain request."""
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    request = urllib.request.Request(
        f"{address}/chat/completions", body, {"content-type": "application/json", **dict(headers)}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
