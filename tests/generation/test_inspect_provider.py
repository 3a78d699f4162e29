"""The provider of Inspect, and the task lapa2_interp/instructions."""

import asyncio
import subprocess
import sys

import pytest
from conftest import load
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentAudio,
    ContentData,
    ContentDocument,
    ContentImage,
    ContentReasoning,
    ContentText,
    ContentToolUse,
    ContentVideo,
    GenerateConfig,
    ModelOutput,
    ModelUsage,
    ResponseSchema,
    get_model,
)
from inspect_ai.solver import generate
from inspect_ai.tool import ToolCall, ToolInfo
from inspect_ai.util import JSONSchema

from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp.errors import AugmentationError, GridError, LayoutError
from lapa2_interp.generation import inspect_provider
from lapa2_interp.generation.inspect_task import exact_messages, instructions
from lapa2_interp.tasks.exact_messages import messages_of
from lapa2_interp.tasks.instructions import benchmark, judged

pytestmark = pytest.mark.filterwarnings(  # Inspect's, about what it uses itself
    "ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
TASK = "lapa2_interp/instructions"
CHAT = [
    {"role": "system", "content": "You are a sailor."},
    {"role": "user", "content": "Who are you?"},
]
SETTINGS = {"max_tokens": 6, "temperature": 0, "display": "none"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def api():
    made = inspect_provider.SteeredChatAPI("smollm2-135m", alpha=0.5, device="cpu", dtype="float32")
    yield made
    made.close()


SYSTEM = ChatMessageSystem(content=CHAT[0]["content"])
USER = ChatMessageUser(content=CHAT[1]["content"])
TEXT = ContentText(text=CHAT[1]["content"])


def answer(api, *messages, tools=(), choice="auto", **settings):
    """The answer to a chat, why it ended, and its tokens; greedy, 10 tokens at most by default."""
    config = GenerateConfig(**{"temperature": 0, "max_tokens": 10} | settings)
    made = asyncio.run(api.generate(list(messages) or [SYSTEM, USER], list(tools), choice, config))
    return made.completion, made.stop_reason, made.usage.output_tokens


def evaluated(task, tmp_path, model="lapa2/smollm2-135m", settings=SETTINGS, **arguments):
    arguments = {"dtype": "float32"} | arguments
    (log,) = eval(task, model=model, model_args=arguments, log_dir=str(tmp_path), **settings)
    return log


def scores_of(log):
    """Its metrics by answer and name."""
    return {
        (score.name, name): metric.value
        for score in log.results.scores
        for name, metric in score.metrics.items()
    }


def test_the_task_is_found_by_its_name_and_scored_by_the_judge(tmp_path):
    """At the command line, with a chat of each of the first two messages."""
    command = [
        *(sys.executable, "-m", "inspect_ai", "eval", TASK, "--model", "lapa2/smollm2-135m"),
        *("-M", "alpha=.5", "-M", "span=system", "-M", "dtype=float32", "-T", "turns=3"),
        *("--sample-id", "1,9", "--max-tokens", "6", "--seed", "1"),
        *("--log-dir", tmp_path, "--log-format", "json", "--display", "none"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    log = read_eval_log(next(tmp_path.glob("*.json")))
    assert (log.eval.task, log.eval.task_args["turns"]) == (TASK, 3)
    by_hand = {"last": [], "first": []}
    for sample in log.samples:
        said = [(message.role, message.text) for message in sample.messages]
        assert [role for role, _ in said] == ["system", *["user", "assistant"] * 3]
        assert sample.output.usage.output_tokens == 6
        judge = next(m["judge"] for m in benchmark()["message"] if m["text"] == said[0][1])
        by_hand["first"].append(judged(said[2][1], judge))
        by_hand["last"].append(judged(said[6][1], judge))
    scores = scores_of(log)
    for name, values in by_hand.items():
        assert scores[name, "accuracy"] == sum(values) / 2
        assert scores[name, "stderr"] == pytest.approx(abs(values[0] - values[1]) / 2)


METRICS = ("accuracy", "stderr")
FRENCH = (
    "Je suis une personne qui aime lire dans le jardin, et mes amis sont très gentils avec nous."
)


@pytest.mark.parametrize("message", ["own", "neutral"])
def test_the_score_of_answers_that_are_known(message, tmp_path):
    """French where the message asks for it, and never after the first answer."""

    def answered(chat, *_):
        asked = [said.text for said in chat if said.role == "user"]
        french = chat[0].text == "Answer only in French." and len(asked) == 1
        said = ModelOutput.from_content("mockllm", FRENCH if french else "I am here.")
        said.usage = ModelUsage()  # else its tokens are counted, by a file that is fetched
        return said

    task = instructions(message=message, turns=2)
    model = get_model("mockllm/model", custom_outputs=answered)
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    systems = {sample.messages[0].text for sample in log.samples}
    assert (len(log.samples), len(systems)) == (128, {"own": 16, "neutral": 1}[message])
    for position in (1, 3):  # each question stands equally often at each turn
        asked = [sample.messages[position].text for sample in log.samples]
        assert {asked.count(question) for question in benchmark()["questions"]} == {16}
    # One message of 16 has 1, and the others 0: by hand a mean of 1/16, whose standard error is
    # the root of (15/16)^2 + 15 (1/16)^2 over 15, over the root of 16.
    share = 1 / 16 if message == "own" else 0
    wanted = {"first": share, "last": 0}
    assert scores_of(log) == {
        (name, metric): pytest.approx(wanted[name]) for name in wanted for metric in METRICS
    }


ONE = "End every answer with the words: So it is."


def said_to(message, turn):
    return "I am here today" + ". So it is." * (message == ONE and turn == 1)


def test_the_score_of_exact_messages(tmp_path):
    """The last words where one message asks for them, and never in the second answer."""

    def answered(chat, *_):
        turn = sum(said.role == "user" for said in chat)
        said = ModelOutput.from_content("mockllm", said_to(chat[0].text, turn))
        said.usage = ModelUsage()
        return said

    model = get_model("mockllm/model", custom_outputs=answered)
    task = exact_messages(turns=2, chats=2)
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    messages = messages_of("test")
    assert [sample.messages[0].text for sample in log.samples[::2]] == [m.text for m in messages]
    assert len(log.samples) == 2 * len(messages)
    own = next(s for s in log.samples if s.messages[0].text == ONE).scores["follows_exactly"]
    assert own.value == {"first": 1.0, "last": 0.0}
    for name, turn in (("first", 1), ("last", 2)):
        share = sum(m.is_followed(said_to(m.text, turn)) for m in messages) / len(messages)
        assert scores_of(log)[name, "accuracy"] == pytest.approx(share)
    with pytest.raises(GridError, match="turns: .*16.*found 17"):
        exact_messages(turns=17)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [({"turns": 9}, "turns: .*8.*found 9"), ({"turns": 0}, "turns: .*1.*found 0"),
     ({"message": "other"}, "message: .*'own' or 'neutral'.*'other'")],
    ids=str,
)  # fmt: skip
def test_an_argument_of_the_task_out_of_range_is_refused(arguments, told):
    with pytest.raises(GridError, match=told):
        instructions(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"alpha": 2.0}, {"augmentation": "lapa2:alpha=2"}, {"alpha": 0.0}]
)
def test_an_answer_is_that_of_the_layout_by_hand(arguments, tmp_path):
    messages = [
        ChatMessageSystem(content=CHAT[0]["content"]),
        ChatMessageUser(content=CHAT[1]["content"]),
    ]
    log = evaluated(Task([Sample(messages)], solver=generate()), tmp_path, **arguments)
    model = load("smollm2-135m", "float32", "TransformersModel")
    layout = Layout.of_chat(model, CHAT)
    with augmented(model, Augmentation(alpha=arguments.get("alpha", 2.0)), layout):
        made = model.original_model.generate(layout.tensor, max_new_tokens=6, do_sample=False)
    wanted = model.tokenizer.decode(made[0, len(layout) :], skip_special_tokens=True)
    assert log.samples[0].output.completion == wanted
    assert log.samples[0].output.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ({}, {"num_choices": 2}, "found num_choices=2"),
        ({"span": "turn:9"}, {}, "there is no turn 9"),
    ],
)
def test_what_it_refuses_is_the_error_of_the_run(arguments, settings, message, tmp_path):
    task = Task([Sample([ChatMessageUser(content="Hello")])], solver=generate())
    log = evaluated(task, tmp_path, settings=SETTINGS | settings, **arguments)
    assert log.status == "error"
    assert message in log.error.message


def test_a_stop_is_looked_for_in_the_answer_alone(api):
    """The text before the answer ends with "assistant" and a line break."""
    plain, reason, n = answer(api)
    assert (reason, n) == ("max_tokens", 10)
    first = plain.split()[0]
    for stop in (f"\n{first}", f"assistant\n{first}", "assistant", "sailor.", "<|im_start|>"):
        assert stop not in plain
        assert answer(api, stop_seqs=[stop]) == (plain, "max_tokens", 10)


def test_a_stop_cuts_the_answer_wherever_it_begins_and_ends(api):
    """Also inside tokens, and in the last token that there may be."""
    plain, _, _ = answer(api)
    tokenizer = api.model.tokenizer
    for start in range(2, 8):
        stop = plain[start : start + 3]
        begin = plain.index(stop)
        made, reason, n = answer(api, stop_seqs=["never", stop])
        assert (made, reason) == (plain[:begin], "stop")
    assert answer(api, stop_seqs=[stop], max_tokens=n) == (plain[:begin], "stop", n)
    shorter = tokenizer.decode(tokenizer(plain, add_special_tokens=False).input_ids[: n - 1])
    assert answer(api, stop_seqs=[stop], max_tokens=n - 1) == (shorter, "max_tokens", n - 1)
    # Of two stops the first in the answer counts.
    first = plain[: plain.index(plain[2:5])]
    assert answer(api, stop_seqs=[plain[6:9], plain[2:5]])[:2] == (first, "stop")


def test_an_end_token_stops_and_leaves_no_text(api, monkeypatch):
    plain, _, _ = answer(api)
    first, second = api.model.tokenizer(plain, add_special_tokens=False).input_ids[:2]
    monkeypatch.setattr(api, "ends", (second,))
    text = api.model.tokenizer.decode([first, second])
    for most in (2, 10):
        assert answer(api, max_tokens=most) == (text, "stop", 2)
    monkeypatch.setattr(api, "ends", ())
    assert answer(api) == (plain, "max_tokens", 10)


@pytest.mark.parametrize(
    ("text", "stop", "before"),
    [
        ("A lake<|im_start|>user", "<|im_start|>", "A lake"),
        ("A lake\n<|im_start|>user", "\n<|im_start|>user", "A lake"),
        ("A<|im_start|> lake<|im_start|>user", "<|im_start|>user", "A lake"),
        ("A lake<|im_end|>", "end", None),
        ("A lake<|im_end|>", "im_", None),
    ],
)
def test_only_a_stop_that_names_a_special_token_is_looked_for_in_them(api, text, stop, before):
    tokens = api.model.tokenizer(text, add_special_tokens=False).input_ids
    assert api._before_stop(tokens, [stop]) == before


def test_the_end_of_the_context_is_told(api, monkeypatch):
    length = len(Layout.of_chat(api.model, CHAT))
    monkeypatch.setattr(api.model.cfg, "n_ctx", length + 3)
    assert answer(api)[1:] == ("model_length", 3)
    assert answer(api, max_tokens=3)[1:] == ("max_tokens", 3)


def test_parts_of_text_are_their_lines(api):
    parts = [ContentText(text="Who are"), ContentText(text="you?")]
    joined = ChatMessageUser(content="Who are\nyou?")
    assert answer(api, SYSTEM, ChatMessageUser(content=parts)) == answer(api, SYSTEM, joined)


CALL = ToolCall(id="1", function="look_up", arguments={})
PARTS = {
    "image": ContentImage(image="data:image/png;base64,iVBORw0KGgo="),
    "audio": ContentAudio(audio="data:audio/wav;base64,UklGRg==", format="wav"),
    "video": ContentVideo(video="data:video/mp4;base64,AAAA", format="mp4"),
    "document": ContentDocument(document="data:text/plain;base64,YQ=="),
    "data": ContentData(data={"a": 1}),
    "tool_use": ContentToolUse(
        tool_type="web_search", id="1", name="look_up", arguments="{}", result="a"
    ),
    "reasoning": ContentReasoning(reasoning="Hm."),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_that_is_no_text_is_refused_by_name(api, kind):
    role = ChatMessageAssistant if kind in ("reasoning", "tool_use", "data") else ChatMessageUser
    for content in ([PARTS[kind]], [TEXT, PARTS[kind]]):
        with pytest.raises(LayoutError, match=f"^message 3 .* has parts that are no text: {kind};"):
            answer(api, SYSTEM, USER, role(content=content))


def test_calls_of_tools_are_refused(api):
    called = ChatMessageAssistant(content="I look.", tool_calls=[CALL])
    for message in (called, ChatMessageTool(content="42", function="look_up")):
        with pytest.raises(LayoutError, match="message 3 .* belongs to a call of a tool"):
            answer(api, SYSTEM, USER, message)
    with pytest.raises(GridError, match="call no tools"):
        answer(api, tools=[ToolInfo(name="look_up", description="Look up.")])
    with pytest.raises(GridError, match="call no tools"):
        answer(api, choice="any")


DECIDING = {
    "num_choices": 2, "best_of": 2, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1,
    "logit_bias": {5: 1.0}, "frequency_penalty": 0.5, "presence_penalty": 0.5, "verbosity": "low",
    "effort": "low", "reasoning_effort": "low", "reasoning_mode": "pro", "reasoning_tokens": 8,
    "reasoning_summary": "auto", "extra_body": {"min_p": 0.1}, "modalities": ["image"],
    "response_schema": ResponseSchema(name="a", json_schema=JSONSchema(type="object")),
}  # fmt: skip
"""Settings that would decide an answer, of which this provider has none."""


def test_every_setting_of_inspect_is_followed_beside_the_answer_or_refused(api):
    sets = ({*inspect_provider.SETTINGS}, inspect_provider.BESIDE, {*DECIDING})
    assert set.union(*map(set, sets)) == {*GenerateConfig.model_fields}
    assert sum(map(len, sets)) == len(GenerateConfig.model_fields)
    for name, value in DECIDING.items():
        with pytest.raises(GridError, match=f"found {name}=.*; leave it out"):
            answer(api, **{name: value})
    nothing = {"logprobs": False, "presence_penalty": 0.0, "logit_bias": {}}
    assert answer(api, **nothing, **inspect_provider.NOTHING) == answer(api)


@pytest.mark.parametrize(
    "setting",
    [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1},
     {"stop_seqs": [""]}],
    ids=str,
)  # fmt: skip
def test_a_value_out_of_range_is_refused(api, setting):
    with pytest.raises(GridError, match=f"^{next(iter(setting))}: .* found"):
        answer(api, **setting)


def test_a_seed_decides_the_drawn_answer(api):
    made = [answer(api, temperature=1, seed=seed) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_two_strengths_are_refused():
    arguments = {"alpha": 1.0, "augmentation": "instaboost"}
    with pytest.raises(AugmentationError, match="found alpha 1 beside augmentation 'instaboost'"):
        get_model("lapa2/smollm2-135m", **arguments)
