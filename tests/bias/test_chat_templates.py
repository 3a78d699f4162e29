"""Arguments of chat templates, reasoning as a span, and messages of other shapes."""

import json

import pytest
from conftest import load
from test_layout import CHAT, chat_tokenizer

from lapa2_interp import Layout
from lapa2_interp.cli.app import main
from lapa2_interp.errors import LayoutError

TEMPLATE = """{%- if tools %}[tools]{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}{% endif %}
{%- for each in documents or [] %}[document] {{ each['text'] }} {% endfor %}
{%- set mood = mood or 'calm' %}
{%- for m in messages %}[{{ m['role'] }}]
{%- if m['role'] == 'assistant' %}{% generation %}
{%- if m['reasoning_content'] and not drop %}<think>{{ m['reasoning_content'] }}</think>{% endif %}
{%- for call in m['tool_calls'] or [] %}<call>{{ call['function']['name'] }}</call>{% endfor %}
{{- m['content'] }}{% endgeneration %}
{%- else %} {{ m['content'] }} {% endif %}
{%- if m['role'] == 'skip' %}{% continue %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ mood }}{% endif %}"""
TOOL = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {}}}
THOUGHT = [
    *CHAT[:2],
    CHAT[2] | {"reasoning_content": "They ask about rain. Be short."},
    CHAT[3],
]


def text_of(tokenizer, layout):
    return tokenizer.decode(layout.ids), tokenizer.decode(layout.ids[slice(*layout.prefix)])


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"enable_thinking": False}, "[assistant]<think></think>calm"),
        ({"enable_thinking": True}, "[assistant]calm"),
        ({"tools": [TOOL]}, "[tools]look_up "),
        ({"documents": [{"title": "a", "text": "Rain falls."}]}, "[document] Rain falls. "),
        ({"mood": "wild"}, "[assistant]wild"),
        ({"tools": [TOOL], "mood": "wild"}, "[tools]look_up "),
    ],
)
def test_arguments_reach_the_template_and_the_span_stays_its_text(arguments, written):
    tokenizer = chat_tokenizer(TEMPLATE)
    layout = Layout.of_chat(tokenizer, CHAT, template=arguments)
    expected = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False, **arguments
    )
    assert list(layout.ids) == expected
    text, span = text_of(tokenizer, layout)
    assert written in text
    assert span.strip() == CHAT[0]["content"]


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_a_span_may_be_reasoning(field):
    """Older versions of transformers give a template no field of another name than its own."""
    tokenizer = chat_tokenizer(TEMPLATE)
    messages = [*CHAT[:2], CHAT[2] | {field: "They ask about rain. Be short."}, CHAT[3]]
    if "ask about" not in tokenizer.apply_chat_template(messages, tokenize=False):
        assert field != "reasoning_content"
        with pytest.raises(LayoutError, match="does not write the reasoning of message 3"):
            Layout.of_chat(tokenizer, messages, span="reasoning:2")
        return
    layout = Layout.of_chat(tokenizer, messages, span="reasoning:2")
    assert text_of(tokenizer, layout)[1].strip("<>") == "They ask about rain. Be short."
    layout = Layout.of_chat(tokenizer, messages, span="phrase:ask about")
    assert text_of(tokenizer, layout)[1] == " ask about"


def test_calls_of_tools_may_stand_for_a_text():
    call = {"role": "assistant", "tool_calls": [TOOL]}
    answer = {"role": "tool", "content": "It rains."}
    tokenizer = chat_tokenizer(TEMPLATE)
    for content in ({}, {"content": None}):
        messages = [*CHAT, call | content, answer]
        layout = Layout.of_chat(tokenizer, messages, span="turn:5", template={"tools": [TOOL]})
        text, span = text_of(tokenizer, layout)
        assert "<call>look_up</call>" in text
        assert span.strip() == "It rains."
        with pytest.raises(LayoutError, match="message 5 of the chat is empty"):
            Layout.of_chat(tokenizer, messages, span="turn:4")


def test_arguments_on_the_command_line(tmp_path, capsys, monkeypatch):
    model = load("tiny-llama")
    monkeypatch.setattr("lapa2_interp.models.load.load_model", lambda *_, **__: model)
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr("lapa2_interp.models.load.load_tokenizer", lambda *_: model.tokenizer)
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(THOUGHT), "utf-8")
    asked = [
        "chat",
        str(file),
        "--length",
        "2",
        "--dtype",
        "float32",
        "--span",
        "reasoning:2",
        "--json",
    ]
    assert main([*asked, "--template", '{"mood": "wild"}']) == 0
    assert "rain" in "".join(json.loads(capsys.readouterr().out)["span"]["tokens"])
    for wrong in ("mood", "[1]", ""):
        assert main([*asked, "--template", wrong]) == 2
        assert "--template should be a JSON object" in capsys.readouterr().err
