"""Harnesses that speak OpenAI's protocol, against the server."""

import json

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message
from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion
from servers import CHAT, SETTINGS, SYSTEM, model, post, served  # noqa: F401

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)  # fmt: skip


def test_inspects_provider_for_the_protocol(served, monkeypatch, tmp_path):
    """Its answers are those of a plain request."""
    address, _ = served()
    monkeypatch.setenv("TINY_API_KEY", "none")
    monkeypatch.setenv("TINY_BASE_URL", address)
    task = Task(
        dataset=[Sample(input=CHAT[1]["content"], target="x")],
        solver=[system_message(SYSTEM["content"]), generate()],
        scorer=includes(),
        config=GenerateConfig(max_tokens=6, temperature=0, seed=1),
    )
    (log,) = eval(task, model="openai-api/tiny/tiny", log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    _, body = post(address, SETTINGS)
    assert log.samples[0].output.completion == body["choices"][0]["message"]["content"]


def test_lm_evals_model_for_the_protocol(served):
    address, _ = served()
    network = LocalChatCompletion(
        base_url=f"{address}/chat/completions",
        model="tiny",
        tokenizer_backend=None,
        num_concurrent=1,
    )
    settings = {"max_gen_toks": 6, "temperature": 0, "until": ["zzz"]}
    request = Instance("generate_until", {}, (JsonChatStr(json.dumps(CHAT)), settings), 0)
    _, body = post(address, SETTINGS)
    assert network.generate_until([request]) == [body["choices"][0]["message"]["content"]]
