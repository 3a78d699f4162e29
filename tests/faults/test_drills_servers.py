"""Drills of servers that fail, stall, lie or flood, behind the judge of `lapa2 score`. `make drills`.

A server on this machine answers six texts. One of them is trouble. Whatever the server does to it,
the command ends in time, keeps the other answers, and tells the key to nobody.
"""

import gzip
import json
import logging
import os
import shlex
import signal
import socket
import threading
import time
import tracemalloc
from contextlib import suppress
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from drills import act, done, start

import lapa2_interp.runs.score  # noqa: F401 - its import is not timed
from lapa2_interp.cli.app import main
from lapa2_interp.scoring import registry
from lapa2_interp.scoring.http_client import LARGEST_ANSWER
from lapa2_interp.scoring.judge import Judge

pytestmark = pytest.mark.drill
KEY = "sk-drill-0123456789abcdef"
TIMEOUT, ATTEMPTS = 0.5, 3
SOON = 30.0
"""Seconds in which a command must end: three attempts of half a second, and what it computes, also
where memory is traced on a slow machine. Without a deadline every such answer takes longer."""
BUFFERS = 12_000_000
"""Bytes that sockets of this machine take without a reader."""
TEXTS = (
    "one",
    "two and",
    "trouble here",
    "three and more",
    "four and still more",
    "five and a lot more",
)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


RATING = json.dumps({"relevance": 5, "fluency": 4, "topicality": 3})
ANSWER = {
    "choices": [{"message": {"role": "assistant", "content": RATING}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 200, "completion_tokens": 20},
}


def http(body, status="200 OK", headers=()):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + data


class Server:
    """Answers every text well, and the trouble as `trouble` says, until it is None."""

    def __init__(self):
        self.trouble, self.delay = None, 0.0
        self.asked, self.answered, self.keys, self.sent = [], [], set(), 0
        self.lock = threading.Lock()
        self.port = 0
        self.up()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def up(self):
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A small buffer: what is sent has about been read.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0x10000)
        self.listener.bind(("127.0.0.1", self.port))
        self.listener.listen(16)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, args=(self.listener,), daemon=True).start()

    def down(self):
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def accept(self, listener):
        with suppress(OSError):
            while True:
                taken, _ = listener.accept()
                threading.Thread(target=self.serve, args=(taken,), daemon=True).start()

    def serve(self, taken):
        with taken, suppress(OSError, ValueError):
            stream = taken.makefile("rb")
            while request := stream.readline():
                headers = {}
                while line := stream.readline().decode().strip():
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                body = json.loads(stream.read(int(headers["content-length"])))
                assert KEY.encode() not in request
                text = self.text(body)
                with self.lock:
                    self.asked.append(text)
                    self.keys.add(headers.get("authorization"))
                time.sleep(self.delay)
                trouble = self.trouble if "trouble" in text else None
                if trouble is not None and not trouble(self, taken):
                    return
                if trouble is None:
                    with self.lock:
                        self.answered.append(text)
                    taken.sendall(http(ANSWER))

    def text(self, body):
        return body["messages"][1]["content"].split("\nGenerated text: ")[1].split("\n\nOutput")[0]


def saying(*answers):
    """Trouble that says these in turn, and then is none; a lone one is said for ever."""
    left = list(answers)

    def trouble(server, taken):
        answer = left[0] if len(answers) == 1 else left.pop(0) if left else None
        if answer is None:
            with server.lock:
                server.answered.append("trouble here")
        taken.sendall(answer or http(ANSWER))
        return True

    return trouble


def refuse(server, taken):
    server.down()


def stall(server, taken):
    time.sleep(30)


def redirect(server, taken):
    headers = [f"Location: {server.elsewhere.url}/v1/chat/completions"]
    taken.sendall(http(b"", "307 Temporary Redirect", headers))
    return True


def hanging_up(data=b""):
    """Trouble that says this and ends the connection."""
    return lambda server, taken: taken.sendall(data)


def dripping(data):
    """Trouble that goes on with a letter at a time."""

    def trouble(server, taken):
        taken.sendall(STREAM + data)
        for _ in range(900):
            taken.sendall(b" ")
            time.sleep(TIMEOUT / 3)

    return trouble


def flooding(data, part):
    """Trouble that never ends."""

    def trouble(server, taken):
        taken.sendall(STREAM + data)
        while True:
            taken.sendall(part)
            server.sent += len(part)

    return trouble


WRONG_TYPES = {
    "choices": {"0": [5]}, "usage": {"prompt_tokens": -1, "completion_tokens": "9"},
    "error": 7,
}  # fmt: skip
HUGE = "9" * 5000
BOMB = gzip.compress(b" " * 50_000_000)
TELLING = {"error": {"message": f"{KEY} is wrong", "code": KEY, "details": [{"reason": KEY}]}}
ENDS, GOES_ON, LEFT_OUT = "the command ends with a sentence", "it goes on", "the text has no score"
TROUBLES = {
    "refuses connections": (refuse, ENDS),
    "does not answer": (stall, ENDS),
    "hangs up": (hanging_up(), ENDS),
    "403 that repeats the key": (saying(http(TELLING, "403 Forbidden")), ENDS),
    "429 for ever": (saying(http({}, "429 Busy")), ENDS),
    "429 with Retry-After: 1": (lambda: saying(http({}, "429 Busy", ["Retry-After: 1"]), None), GOES_ON),
    "429 for a year": (saying(http({}, "429 Busy", ["Retry-After: 31536000"])), ENDS),
    "500 for ever": (saying(http(TELLING, "500 Oops")), ENDS),
    "half a body": (hanging_up(http(ANSWER)[:-30]), ENDS),
    "no HTTP": (saying(b"SSH-2.0-OpenSSH\r\n\r\n"), ENDS),
    "no JSON": (saying(http(b"<html>\xff\xfe")), LEFT_OUT),
    "nested JSON": (saying(http(b'{"a":' * 60_000)), LEFT_OUT),
    "huge number": (saying(http(b'{"usage": ' + HUGE.encode() + b"}")), LEFT_OUT),
    "wrong types": (saying(http(WRONG_TYPES)), LEFT_OUT),
    "a body one byte at a time": (dripping(b"Content-Length: 900\r\n\r\n"), ENDS),
    "headers one byte at a time": (dripping(b"X-Long: "), ENDS),
    "an endless body": (flooding(b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 0x10000 + b"\r\n"), LEFT_OUT),
    "endless headers": (flooding(b"", b"X-More: " + b"x" * 10_000 + b"\r\n"), ENDS),
    "ten megabytes": (saying(http(b" " * 10_000_000 + json.dumps(ANSWER).encode())), LEFT_OUT),
    "a packed 50 MB": (saying(http(BOMB, headers=["Content-Encoding: gzip"])), LEFT_OUT),
    "307 to another host": (redirect, ENDS),
    "redirect to nonsense": (saying(http(b"", "308 Moved", ["Location: http://[/"])), ENDS),
}  # fmt: skip


HEAVY = ("an endless body", "endless headers", "ten megabytes", "a packed 50 MB")
MEMORY = 30e6
"""Bytes that may be held; the server, in this process, holds its ten megabytes twice."""
LONGEST_WAIT = 10.0
"""Seconds between two tries. They are counted, and nobody waits."""


@pytest.fixture
def server(monkeypatch, record_property):
    record_property("promise", "5")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")
    answering = Server()
    answering.elsewhere, answering.waits = Server(), []
    settings = {"attempts": ATTEMPTS, "timeout": TIMEOUT, "sleep": answering.waits.append}
    monkeypatch.setattr(registry, "Judge", partial(Judge, concurrency=2, **settings))
    yield answering
    answering.down()
    answering.elsewhere.down()


def write_texts(folder, texts):
    file = folder / "texts.jsonl"
    rows = [{"text": text, "prompt": "The lake", "attribute": "positive"} for text in texts]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def line(folder, server, *more):
    asked = ["--scorers", "judge=m", "--judge-url", f"{server.url}/v1"]
    words = ["score", folder / "texts.jsonl", *asked, "--cache", folder / "cache"]
    return [str(word) for word in (*words, "--out", folder / "out", *more)]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_server_in_trouble(trouble, server, tmp_path, caplog, capfd, record_property):
    caplog.set_level(logging.DEBUG)
    what, end = TROUBLES[trouble]
    server.trouble = what if end != GOES_ON else what()
    write_texts(tmp_path, TEXTS)
    if trouble in HEAVY:
        tracemalloc.start()
    began = time.monotonic()
    code = main(line(tmp_path, server))
    took = time.monotonic() - began
    if trouble in HEAVY:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < MEMORY, f"{most / 1e6:.0f} MB"
    assert max(server.waits, default=0) <= LONGEST_WAIT
    first = capfd.readouterr()
    assert took < SOON
    assert code == (2 if end == ENDS else 0), first.err
    last = first.err.strip().splitlines()[-1]
    if end == ENDS:
        assert last.startswith("lapa2: "), first.err
        assert "stopped after" in last
        assert "which are kept" in last
        assert not (tmp_path / "out").exists()
    else:
        table = pd.read_csv(tmp_path / "out" / "table.csv")
        assert set(table["skipped"]) == {int(end == LEFT_OUT)}
    assert server.sent < LARGEST_ANSWER + BUFFERS

    server.trouble = None
    if trouble == "refuses connections":
        server.up()
    before = list(server.answered)
    assert main([*line(tmp_path, server), *(["--force"] if end != ENDS else [])]) == 0
    second = capfd.readouterr()
    assert sorted(server.answered) == sorted(TEXTS)  # each answer once
    assert set(server.asked[len(server.asked) - len(TEXTS) + len(before) :]).isdisjoint(before)
    assert server.elsewhere.asked == []
    assert server.keys == {f"Bearer {KEY}"}
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 4
    places = [*first, *second, caplog.text, *(data.decode("latin-1") for data in files)]
    assert not [words for words in places if KEY[:12] in words]
    assert "Traceback" not in first.err + second.err
    count = f"{len(before)} of {len(TEXTS)} answers kept"
    record_property("result", f"{end} after {took:.1f} s, {count}")


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_judge_keeps_every_answer_and_hides_the_key(
    server, kind, tmp_path, record_property
):
    """None is asked for twice; after a kill, those alone that were under way."""
    server.delay, log = 0.05, tmp_path / "log"
    texts = [f"{'text ' * (number % 7)}{number}" for number in range(60)]
    environment = {"OPENAI_API_KEY": KEY, "NO_PROXY": "*", "no_proxy": "*"}
    write_texts(tmp_path, texts)
    words = shlex.join(line(tmp_path, server))
    process = start(act, words, log, environment)
    while len(server.answered) < 20 and process.is_alive():
        time.sleep(0.002)
    assert KEY.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    os.kill(process.pid, kind)
    process.join(10)
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    assert process.exitcode == codes[kind]
    if kind != signal.SIGKILL:
        last = log.read_text().strip().splitlines()[-1]
        assert last == "lapa2: interrupted; run the same command again to resume"
    done(words, log, environment)
    again = len(server.answered) - len(texts)
    assert set(server.answered) == set(texts)
    assert again <= (4 if kind == signal.SIGKILL else 0)
    assert KEY not in log.read_text()
    assert "Traceback" not in log.read_text()
    record_property("result", f"{again} answers asked for twice")


def test_max_cost_is_never_passed_and_the_same_command_goes_on(
    server, tmp_path, capfd, monkeypatch, record_property
):
    monkeypatch.setattr(registry, "Judge", Judge)  # four requests at once
    texts = [f"text {number}" for number in range(100)]
    write_texts(tmp_path, texts)
    price = (200 * 2.5 + 20 * 10) / 1e6
    limit, runs = "0.03", 0
    while True:
        before = len(server.answered)
        code = main(line(tmp_path, server, "--judge-prices", "2.5", "10", "--max-cost", limit))
        runs += 1
        cost = (len(server.answered) - before) * price
        assert cost <= float(limit)
        lines = capfd.readouterr().err.strip().splitlines()
        if code == 0:
            break
        assert cost > float(limit) - 0.0095  # what one request may cost is left, and no more
        assert lines[-1].startswith(
            f"lapa2: judge stopped after {len(server.answered)} of 100 texts, which are kept"
        )
        assert "the same command with --max-cost 0.00" in lines[-1]
        assert f"${cost:.4f}" in lines[-2]
    assert sorted(server.answered) == sorted(texts)
    record_property("result", f"never passed in {runs} runs")
