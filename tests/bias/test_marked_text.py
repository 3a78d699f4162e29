"""Marks in typed text: what is read, what stays a bracket, what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapa2_interp.bias.marked_text import marked, without_marks
from lapa2_interp.errors import LayoutError

READ = {
    "": ("", []),
    "no marks": ("no marks", []),
    "You are a doctor. (Never name a medicine:1.5)": (
        "You are a doctor. Never name a medicine", [("Never name a medicine", 1.5)],
    ),
    "(a:2)(b:.5) c": ("ab c", [("a", 2.0), ("b", 0.5)]),
    "(see page 3)": ("(see page 3)", []),
    "(note: this) and f(x)": ("(note: this) and f(x)", []),
    "(open at 9: 30)": ("open at 9", [("open at 9", 30.0)]),
    "(in 1990:1.5)": ("in 1990", [("in 1990", 1.5)]),
    r"Open \(Monday 9:30\)": ("Open (Monday 9:30)", []),
    "(at 10:30: 1.2)": ("at 10:30", [("at 10:30", 1.2)]),
    "(with (round) brackets:3)": ("with (round) brackets", [("with (round) brackets", 3.0)]),
    "((a:2) in brackets)": ("(a in brackets)", [("a", 2.0)]),
    r"\(a:2\)": ("(a:2)", []),
    r"a \\ b \n": "a \\ b \\n",
    r"(a \) b:2)": ("a ) b", [("a ) b", 2.0)]),
    ":) and (": (":) and (", []),
    "(é:1e1)": ("é", [("é", 10.0)]),
    "(a: 1 )": ("a", [("a", 1.0)]),
}  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_marks_are_read(text):
    expected = READ[text]
    plain, marks = (expected, []) if isinstance(expected, str) else expected
    read = marked(text)
    assert read.text == plain
    assert [(plain[mark.start : mark.stop], mark.factor) for mark in read.marks] == marks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("say (a (b:2) c:3)", "a mark stands inside a mark"),
        ("((a:2):3)", "a mark stands inside a mark"),
        ("(:2)", "a mark has no text"),
        ("( : 2)", "a mark has no text"),
        ("(a:0)", "the factor 0 is not a number from 1e-06 to 1,000,000"),
        ("(a:-1)", "the factor -1 is not"),
        ("(a:1e9)", "the factor 1e9 is not"),
        ("x" * 100 + "(a:0)", "in letter 105"),
        ("Open (Monday 9:30).", "is it a mark? Put a blank behind a mark's colon"),
        ("See (http://localhost:8000) for help", "is it a mark? Put a blank behind"),
        ("Be (brief:2. Be kind.", "the mark that begins here is never closed: 'Be ('"),
        ("(Be (very) brief: 2", "the mark that begins here is never closed: '('"),
    ],
)
def test_what_is_not_well_formed_shows_its_place(text, message):
    with pytest.raises(LayoutError) as raised:
        marked(text)
    assert message in str(raised.value)


def test_only_the_system_message_in_front_is_read():
    system = {"role": "system", "content": "Be (brief:2)."}
    user = {"role": "user", "content": "(Why:3)?"}
    plain, text = without_marks([system, user])
    assert plain == [{"role": "system", "content": "Be brief."}, user]
    assert text == marked("Be (brief:2).")
    assert system["content"] == "Be (brief:2)."
    for others in ([user, system], [{"role": "system", "content": "(a)"}, user], []):
        assert without_marks(others) == (others, None)
    calls = [{"role": "system", "content": None, "tool_calls": [{}]}]
    assert without_marks(calls) == (calls, None)


@given(st.text(alphabet="ab():.1\\ ", max_size=40))
def test_marks_lie_in_the_text_in_order(text):
    try:
        read = marked(text)
    except LayoutError:
        return
    ends = [0]
    for mark in read.marks:
        assert ends[-1] <= mark.start < mark.stop <= len(read.text)
        assert math.isfinite(mark.bias)
        ends.append(mark.stop)
    escaped = read.text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
    assert marked(escaped).text == read.text
    assert not marked(escaped).marks
