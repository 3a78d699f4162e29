"""Judges of instructions, on right and wrong answers."""

import pytest

from lapa2_interp.tasks.instructions import (
    FUNCTION_WORDS,
    JUDGES,
    benchmark,
    judged,
    own_words,
    strict,
)

FRENCH = (
    "Je suis une personne qui aime lire dans le jardin, et mes amis sont très gentils avec nous."
)
SPANISH = "Yo soy una persona muy feliz porque mi familia está en la ciudad con sus amigos."
GERMAN = "Ich bin ein Mensch und ich habe viele Bücher, aber wir sind nicht oft zu Hause."
ITALIAN = "Io sono una persona molto felice perché la mia famiglia è con gli amici della città."
PORTUGUESE = "Eu sou uma pessoa muito feliz porque minha família está com os amigos também."
ENGLISH = "I am a person who likes to read in the garden, and my friends are very kind to us."
IMITATED = "Le dog is une very big et the cat was la petite of the house, oui oui my friend."
SEA = {"says": "ship* sea sail* captain*"}


@pytest.mark.parametrize(
    ("judge", "right", "wrong"),
    [
        ({"language": "French"}, FRENCH, [SPANISH, ITALIAN, ENGLISH, "et et et et et et"]),
        ({"language": "Spanish"}, SPANISH, [FRENCH, PORTUGUESE, ENGLISH, "hola hola hola"]),
        ({"language": "German"}, GERMAN, [ENGLISH, FRENCH, "und und und und"]),
        ({"language": "Italian"}, ITALIAN, [SPANISH, FRENCH, ENGLISH]),
        ({"language": "Portuguese"}, PORTUGUESE, [SPANISH, FRENCH, ENGLISH]),
        (SEA, "Our captain sails a ship.", ["ship ship ship", "Relationships are a sealed box."]),
        ({"capitals": 1}, "THE LAKE IS CALM TODAY", ["The lake is calm today", "OK", "The LAKE"]),
        ({"list": 3}, "- a lake\n- a book\n- a tree", ["A lake, a book", "- a\n- a\n- a"]),
        (
            {"poem": 4},
            "The lake is calm\nThe night is long\nA bird is here\nIt sings a song",
            ["The lake is calm", "The lake\n" * 6, "1. one of\n2. two of\n3. three of\n4. four of"],
        ),
        ({"one sentence": 4}, "The lake is calm.", ["The lake is calm. So am I.", "Calm.", "A lake"]),
        ({"last words": "so it is"}, "The lake is calm. So it is.", ["So it is.", "So it is not a"]),
        ({"exclaims": 2}, "I love it! It is so good!", ["I love it. Good.", "Yes! Yes! Yes!", "!!!"]),
        ({"emoji": 2}, "I am happy \U0001f600 \U0001f389", ["I am happy :)", "\U0001f600" * 5]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_judge_tells_right_answers_from_wrong_ones(judge, right, wrong):
    assert judged(right, judge) >= 0.8
    assert judged(right.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}"), judge) >= 0.8
    for answer in ["", " \n", "...", *wrong]:
        assert judged(answer, judge) <= 0.35, answer


def test_an_avoided_word_is_found_in_any_case():
    judge = {"without": "and"}
    long = "the lake is calm today but my friends were never here"
    assert judged(long, judge) == 1
    assert judged(f"{long}, And so.", judge) == judged("a lake", judge) == judged("", judge) == 0


def test_an_imitated_language_is_mostly_wrong():
    assert judged(IMITATED, {"language": "French"}) < 0.5
    assert judged(f"{FRENCH} {ENGLISH}", {"language": "French"}) < 0.7


def test_words_of_a_language_are_its_own():
    for language in FUNCTION_WORDS:
        others = [own_words(name) for name in FUNCTION_WORDS if name != language]
        assert len(own_words(language)) >= 30
        assert not own_words(language).intersection(*others[:1])


@pytest.mark.parametrize("message", benchmark()["message"], ids=lambda message: message["text"])
def test_an_echo_of_the_message_or_a_question_is_no_answer(message):
    """In every message of the benchmark that is compared."""
    (name,) = message["judge"]
    assert name in JUDGES
    if message["set"] == "out":
        return
    assert judged(message["text"], message["judge"]) <= 0.35
    assert judged(f"{message['text']} {message['text']}", message["judge"]) <= 0.35
    for question in benchmark()["questions"]:
        assert judged(question, message["judge"]) <= 0.35, question


def test_a_strict_judge_counts_no_word_akin_to_the_message():
    judge = {"says": "star sky skies planet* king* kingdom* seas"}
    assert strict(judge, "Speak of the stars.") == {"says": "sky skies planet* king* seas"}
    assert strict(judge, "You speak of the sea.") == {"says": "star sky skies planet* king*"}
    assert strict({"language": "French"}, "French") == {"language": "French"}
