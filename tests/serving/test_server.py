"""The server over its socket: OpenAI's own client, plain requests, and what is refused."""

import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from servers import CHAT, RULES, SETTINGS, model, post, served  # noqa: F401

from lapa2_interp import generate
from lapa2_interp.circuits.selection import SHIPPED
from lapa2_interp.cli.app import main
from lapa2_interp.cli.serve import is_own_machine
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.serving.request import Defaults


def client_of(address, key="none"):
    return openai.OpenAI(base_url=address, api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def expected(model):
    run = generate(
        model, method="chat", task=chat_task(CHAT), augmentation=RULES, length=6, eos="stop",
        seed=1, top_k=1,
    )  # fmt: skip
    return run.texts().iloc[0]


def test_openais_client_reads_answers(served, expected):
    address, _ = served()
    client = client_of(address)
    assert [card.id for card in client.models.list()] == ["tiny"]
    answer = client.chat.completions.create(**SETTINGS)
    assert answer.choices[0].message.content == expected["continuation"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    pieces = list(
        client.chat.completions.create(
            **SETTINGS, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == expected["continuation"]
    assert pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].usage.completion_tokens == 6


def test_a_report_comes_whole_and_streamed(served):
    address, _ = served()
    client = client_of(address)
    extra = {"extra_body": {"lapa2": {"report": True, "alpha": 1.0}}}
    report = client.chat.completions.create(**SETTINGS, **extra).model_extra["lapa2"]
    assert len(report["attention"]) == len(report["effect"]) == len(report["tokens"]) == 6
    assert "".join(report["span_tokens"]) == SETTINGS["messages"][0]["content"]
    pieces = list(client.chat.completions.create(**SETTINGS, **extra, stream=True))
    assert pieces[-1].model_extra["lapa2"] == report


def test_plain_texts(served):
    address, _ = served()
    client = client_of(address)
    settings = {"model": "tiny", "prompt": "Be brief. The lake", "max_tokens": 5, "seed": 1}
    plain = client.completions.create(**settings, extra_body={"lapa2": {"alpha": 0}})
    steered = client.completions.create(
        **settings, extra_body={"lapa2": {"alpha": 9.0, "span": "phrase:Be brief."}}
    )
    assert plain.choices[0].text != steered.choices[0].text
    reported = client.completions.create(
        **settings, extra_body={"lapa2": {"span": "phrase:Be brief.", "report": True}}
    )
    assert "".join(reported.model_extra["lapa2"]["span_tokens"]) == "Be brief."
    with pytest.raises(openai.BadRequestError, match="a plain text has no system message"):
        client.completions.create(**settings)
    address, _ = served(defaults=Defaults("tiny", "phrase:Be brief.", rules=RULES))
    by_default = client_of(address).completions.create(
        **settings, extra_body={"lapa2": {"alpha": 9.0}}
    )
    assert by_default.choices[0].text == steered.choices[0].text


REFUSED = {
    "n": ({"n": 2}, "n=2 is not followed"),
    "logprobs": ({"logprobs": True}, "logprobs=True is not followed"),
    "top_p": ({"top_p": 0.9}, "top_p=0.9 is not followed"),
    "tools": ({"tools": [{"type": "function"}]}, "tools="),
    "format": ({"response_format": {"type": "json_object"}}, "response_format="),
    "unknown": ({"temperatur": 1}, "did you mean 'temperature'?"),
    "unknown of ours": ({"lapa2": {"alhpa": 1}}, "unknown field lapa2 'alhpa'"),
    "no object": ({"lapa2": 1}, "lapa2 should be an object"),
    "report of nothing": (
        {"messages": CHAT[1:], "lapa2": {"alpha": 0, "report": True}}, "has no system message",
    ),
    "temperature": ({"temperature": 3}, "less than or equal to 2"),
    "bool": ({"max_tokens": True}, "valid integer"),
    "tokens": ({"max_tokens": 0}, "greater than or equal to 1"),
    "too many tokens": ({"max_tokens": 5000}, "writes 1024 at most"),
    "stop": ({"stop": [""]}, "none of them empty"),
    "model": ({"model": "gpt-4"}, "the model 'gpt-4' is not here"),
    "prompt": ({"prompt": "x"}, "takes messages and no prompt"),
    "no messages": ({"messages": []}, "messages is empty"),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, "has the role 'tool'"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "no text"),
    "no system": ({"messages": CHAT[1:]}, "system"),
    "span": ({"lapa2": {"span": "nowhere"}}, "nowhere"),
    "phrase": ({"lapa2": {"span": "phrase:not there"}}, "not there"),
    "both": ({"lapa2": {"alpha": 1, "augmentation": "lapa2"}}, "not both"),
    "recipe": ({"lapa2": {"augmentation": "nothing"}}, "nothing"),
    "alpha": ({"lapa2": {"alpha": -1}}, "alpha"),
    "head": ({"lapa2": {"augmentation": "lapa2:heads=99.0"}}, "head"),
    "start": ({"lapa2": {"augmentation": "lapa2:span=9:99"}}, "lies outside"),
    "cold": ({"temperature": 1e-9}, "give 0, which is greedy"),
    "card": ({"lapa2": {"heads": "/etc/passwd"}}, "no card is called"),
    "field": ({"lapa2": {"layers": "all"}}, "unknown field lapa2 'layers'"),
    "context": ({"messages": [CHAT[0], {"role": "user", "content": "a" * 5000}]}, "context"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_followed_is_refused_in_the_protocols_form(served, change, message):
    address, _ = served()
    status, body = post(address, SETTINGS | change)
    assert status in (400, 404)
    assert message in body["error"]["message"], body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert post(address, SETTINGS)[0] == 200


def test_unknown_addresses_are_answered_in_the_protocols_form(served):
    address, _ = served()
    client = client_of(address)
    with pytest.raises(
        openai.NotFoundError, match=r"no POST /v1/embeddings; it has GET /v1/models"
    ):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.APIStatusError, match="no GET /v1/chat/completions") as refusal:
        client.get("/chat/completions", cast_to=object)
    assert refusal.value.status_code == 405


@pytest.mark.parametrize(
    ("data", "headers", "status"),
    [
        (b"{", {}, 400), (b"[1]", {}, 400), (b"\xff", {}, 400), (b"[" * 100_000, {}, 400),
        (b'{"model": "' + b"x" * 2000, {}, 413), (SETTINGS, {"content-type": "text/plain"}, 415),
        (SETTINGS, {"origin": "https://elsewhere.example"}, 403),
    ],
)  # fmt: skip
def test_bodies_that_are_none(served, data, headers, status):
    address, _ = served(most_bytes=200_000 if data == b"[" * 100_000 else 1000)
    assert post(address, data, headers)[0] == status
    assert post(address, SETTINGS)[0] == 200


def test_a_key_is_asked_for(served):
    address, _ = served(key="secret")
    for key in ("wrong", "secretsecret", "", "é"):
        status, body = post(
            address, SETTINGS, {"authorization": f"Bearer {key}".encode().decode("latin-1")}
        )
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        client_of(address, "wrong").models.list()
    assert client_of(address, "secret").chat.completions.create(**SETTINGS).choices


def test_many_at_once_are_answered_as_alone(served):
    """More than wait at most: those are told so, and all others have their answers."""
    address, engine = served(most_waiting=8)

    def ask(number):
        status, body = post(address, SETTINGS | {"seed": number % 5, "temperature": 1})
        return status, body["choices"][0]["message"]["content"] if status == 200 else body["error"][
            "code"
        ]

    alone = [ask(number)[1] for number in range(5)]
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(60)))
    assert {status for status, _ in answers} <= {200, 429}
    for number, (status, text) in enumerate(answers):
        assert text == (alone[number % 5] if status == 200 else "queue_full")
    assert sum(status == 200 for status, _ in answers) >= 8
    assert not engine.waiting


def test_clients_that_go_away_free_their_places(served):
    address, engine = served()
    draw = engine._draw
    engine._draw = lambda *args: (time.sleep(0.02), draw(*args))[1]
    for _ in range(3):
        stream = client_of(address).chat.completions.create(
            **SETTINGS | {"max_tokens": 900}, stream=True
        )
        next(iter(stream))
        stream.close()
    began = time.monotonic()
    assert post(address, SETTINGS)[0] == 200
    assert time.monotonic() - began < 10  # three answers of 900 tokens take 54 s


def test_only_the_own_machine_needs_no_key():
    assert [is_own_machine(host) for host in ("127.0.0.1", "::1", "localhost")] == [True] * 3
    assert [is_own_machine(host) for host in ("0.0.0.0", "::", "example.org")] == [False] * 3


def test_a_server_for_others_needs_a_key(capsys, monkeypatch):
    monkeypatch.delenv("LAPA2_API_KEY", raising=False)
    assert main(["serve", "tiny-llama", "--host", "0.0.0.0"]) == 2
    assert "set LAPA2_API_KEY" in capsys.readouterr().err


def test_what_no_request_could_use_is_refused_at_the_start(capsys):
    assert main(["serve", "tiny-llama", "--span", "sytem"]) == 2
    assert "span 'sytem' of a chat should be system" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "tiny-llama", "--port", port]) == 2
    assert f"cannot listen at port {port} of 127.0.0.1" in capsys.readouterr().err
    for option in ("--card", "--cards"):
        card = str(SHIPPED / "smollm2-135m.sentiment.json")
        assert main(["serve", "tiny-llama", "--port", "0", option, card]) == 2
        assert "the card belongs to smollm2-135m with" in capsys.readouterr().err


def test_a_signal_that_comes_at_once_is_not_lost():
    command = [sys.executable, "-m", "lapa2_interp", "serve", "tiny-llama", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert "http://127.0.0.1:" in server.stdout.readline()
        server.send_signal(signal.SIGTERM)
        assert server.communicate(timeout=60) == ("stopped\n", "")
        assert server.returncode == 0
    finally:
        server.kill()
        server.communicate()


def test_the_command_serves_and_stops_cleanly(tmp_path):
    """It finishes what runs when it is told to stop."""
    command = [
        sys.executable,
        "-m",
        "lapa2_interp",
        "serve",
        "smollm2-135m",
        "--port",
        "0",
        "--alpha",
        "0.5",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().split()[-1]
        assert address.startswith("http://127.0.0.1:")
        client = client_of(address)
        for _ in range(100):
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                time.sleep(0.1)
        settings = SETTINGS | {"model": "smollm2-135m", "max_tokens": 12}
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(client.chat.completions.create(**settings))
        )
        asking.start()
        time.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        asking.join(60)
        assert answers[0].usage.completion_tokens
        assert server.communicate(timeout=60) == ("stopped\n", "")
        assert server.returncode == 0
    finally:
        server.kill()
        server.communicate()
