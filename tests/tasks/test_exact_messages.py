"""Messages that a program can check: right answers, wrong ones, and disguises of wrong ones."""

from collections import Counter
from itertools import combinations

import pytest

from lapa2_interp.tasks.exact_messages import (
    JUDGES,
    Message,
    exact_messages,
    messages_of,
)

SETS = ("pilot", "choose", "test")
PLAIN = "Water it well before you go, and ask a friend to look after it."
CASES = {
    "ends with": (
        ("so it is",),
        ["Water it well before you go. So it is.", "Water it well, friend: so it is", "Water it well today.\n\n**So it is.**"],
        [PLAIN, "So it is.", "So it is. Water it well before you go.", "So it is. " * 3 + "No, it", "Water it well today. So it is. 42%"],
    ),
    "begins with": (
        ("good question",),
        ["Good question! Water it well before you go.", '"Good question," I say, and water it.', "**Good question!** Water it well today."],
        [PLAIN, "Good question.", "That is a good question. Water it well.", "Good questions are rare here.", "123: Good question, water it well."],
    ),
    "sentences": (
        (2,),
        ["Water it well. Then you can go!", "Is it dry? Water it well before you go.", "Use a pot, e.g. one with a wick. Ask Dr. Smith!",
         "Give it 3.5 cups... or less. Then go at 10 p.m. and rest.", "**Water it well.** Then you can go. \U0001f331", 'Say "How are you?" to each. Then go home.'],
        [PLAIN, "Water it well. Then go. Then rest.", "Water it well. Then you can", "Go. Go.", "Go. Go. " * 2,
         "- Water it\n- Move it to shade\n- Ask a friend\n\nGood luck with the plant. Bye."],
    ),
    "words": (
        (6,),
        ["Water it well before you go.", "Give it 2 cups of water", "Tent, boots, layers.", "**Water it well.** \U0001f331"],
        [PLAIN, "Go.", "go go go go.", "Water it well before you go, and 2 days later.", "Water_it_well_before_you_go_and_rest."],
    ),
    "language": (
        ("Spanish",),
        ["Yo creo que es muy importante para la planta, pero no hay que darle m\u00e1s agua.",
         "Bebe agua tibia con miel, descansa la voz y usa un humidificador por la noche."],
        [PLAIN, "Hola, hola, hola, hola.", "Je pense que la plante est dans le jardin avec nous.",
         "Prima di partire, annaffia bene le piante e chiedi a un amico di passare.",
         "Answer in Spanish: la casa, then you can go to the market and buy what you need.",
         "Yo soy la casa con mi familia y es muy buena. Then you should water the plant before you leave."],
    ),
    "avoids": (
        ("you",),
        ["Water plants well and ask a good friend to look.", "Ask a friend now."],
        ["Water it before You go and ask a friend.", "Go now.", "If you're away, ask a friend to look.", "If yo\u200bu go, ask a friend to look."],
    ),
    "capitals": (
        (),
        ["WATER IT WELL BEFORE YOU GO.", "GIVE IT 2 CUPS OF WATER!", "GIESS ES GRO\u00df UND GUT, MEIN FREUND."],
        [PLAIN, "WATER IT WELL BEFORE you GO.", "OK", "1 2 3 4 5", "GO GO GO GO GO", "\u6c34 \u8981 \u591a \u6d47 \u82b1"],
    ),
    "small letters": (
        (),
        ["water it well before you go.", "give it 2 cups of water!"],
        [PLAIN, "water it well before I go.", "ok", "1 2 3 4 5", "go go go go go", "\u6c34 \u8981 \u591a \u6d47 \u82b1"],
    ),
    "names": (
        ("Anna",),
        ["Water it well, Anna, before you go.", "_Anna_! Water it before you go.", "ANNA, WATER IT WELL TODAY."],
        [PLAIN, "Anna", "Water it, anna, before you go.", "Annabel waters it before you go.", "Anna, Anna, Anna, Anna, Anna."],
    ),
    "mentions": (
        ("librar* clos* nine|9|9pm",),
        ["Water it well. The library closes at nine.", "Libraries here close early, closing at 9, so water it now.", "By the way, the library closes at 9pm tonight."],
        [PLAIN, "The library closes at ten, and I water it.", "Library closes nine", "Nineteen libraries are closed to plants.",
         "The library never closes at nine, so go.", "The library doesn't close at nine, so go.", "Go to the library. Close it and get nine pots.", "At nine the closed door is the library."],
    ),
    "list": (
        (),
        ["- water it well\n- ask a friend", "- Water it.\n\n- Then go.\n- Rest.", "- **Water it**: do it well\n- \U0001f331 Move it", '- "Water" it\n- (Before) you go'],
        [PLAIN, "Do this:\n- water it well\n- ask a friend", "- water it well", "- water\n- water", "--\n--", "water it - ask a friend",
         "*Water it well*\n*Move it now*", "-5 degrees is cold\n-6 degrees is colder"],
    ),
    "quotes": (
        (),
        ['"Water it well before you go."', "\u201cWater it well before you go.\u201d", '**"Water it well before you go"**.', "\u00abWater it well before you go.\u00bb"],
        [PLAIN, '"Water it well', '""', '"Water" it well before you "go"', 'I say: "Water it well before you go."'],
    ),
    "asks": (
        (),
        ["Water it well before you go. Does it need much light?", "Water it well today. Which plant is it? \U0001f331", "- water it well today\n- move it\n**Which plant is it?**",
         'Water it well before you go. ("Which plant is it?")'],
        [PLAIN, "Does it need much light?", "Does it need light? Water it well.", "Water it well? Yes. Go", "Go. Go? Go?", "Pack e.g. socks and shoes?", "1. Which plant is it?"],
    ),
    "emoji": (
        (),
        ["Water it well before you go \U0001f331", "\u2600\ufe0f Give it light and some water.", "\u2b50 Give it light and water.", "Go to France \U0001f1eb\U0001f1f7 and rest there."],
        [PLAIN, "\U0001f331", "Water it well before you go :)", "\U0001f331 go go go go", "\u2794 Water it well before you go \u2713 \u2605"],
    ),
    "title": (
        (),
        ["**Before you go**\nWater it well before you go.", "**Plants:**\n\nWater it well before you go.", "# **Plants** \U0001f331\nWater it well before you go.", "**How to water?**\nWater it well before you go."],
        [PLAIN, "**Before you go**", "Before you go\nWater it well today.", "**Water** it well before you go.", "****\nWater it well before you go.",
         "**Water it. Move it.**\nThen you can go home.", "**title**\nWater it well before you go."],
    ),
}  # fmt: skip
"""By judge: its argument, answers that follow the message, and answers that break it."""


def test_every_judge_has_cases_and_a_kind():
    used = {kind["judge"] for kind in exact_messages()["kind"].values()}
    assert set(CASES) == set(JUDGES) == used


@pytest.mark.parametrize("name", JUDGES)
def test_a_judge_tells_answers_that_follow_from_those_that_break(name):
    argument, right, wrong = CASES[name]
    message = Message("kind", "text", name, argument)
    for answer in right:
        assert message.is_followed(answer), answer
        assert message.is_followed(f"  {answer}\n"), answer
    for answer in ["", " \n", "...", *wrong]:
        assert not message.is_followed(answer), answer


@pytest.mark.parametrize("message", [m for name in SETS for m in messages_of(name)], ids=str)
def test_a_message_is_not_followed_by_its_echo(message):
    """Nor is it by whoever says it and promises to follow it."""
    said = message.text.rstrip(".")
    for echo in (message.text, message.text.upper(), f"{message.text}\n" * 2, f"Sure: {said}!"):
        assert not message.is_followed(echo)


def test_an_answer_that_repeats_the_message_can_still_follow_it():
    message = next(m for m in messages_of("test") if m.kind == "fact")
    assert message.text == "Mention in every answer that the library closes at nine."
    fact = "Remember that the library closes at nine."
    assert message.is_followed(f"Water it well before you go. {fact}")
    assert not message.is_followed(
        "I will mention in every answer that the library closes at nine."
    )
    both = "I will mention in every answer that the library closes at nine. Water it well."
    assert not message.is_followed(both)
    assert message.is_followed(f"{both} {fact}")


def test_no_text_is_in_two_sets_and_no_value_decides_twice():
    messages = {name: messages_of(name) for name in SETS}
    for one, two in combinations(SETS, 2):
        assert not {m.text for m in messages[one]} & {m.text for m in messages[two]}
        for kind, parts in exact_messages()["kind"].items():
            assert not set(parts[one]["texts"]) & set(parts[two]["texts"]), kind
            if kind in ("last words", "first words", "name", "fact", "no word", "language"):
                values = [{str(v) for v in parts[name]["values"]} for name in (one, two)]
                assert not values[0] & values[1], kind
    texts = [m.text for own in messages.values() for m in own]
    assert len(texts) == len(set(texts))


def test_there_are_enough_messages_of_every_kind():
    kinds = set(exact_messages()["kind"])
    for name, fewest in (("pilot", 1), ("choose", 2), ("test", 4)):
        counted = Counter(message.kind for message in messages_of(name))
        assert set(counted) == kinds
        assert min(counted.values()) >= fewest


def test_questions_are_different_and_can_be_asked_against():
    parts = exact_messages()
    assert len(set(parts["questions"])) == len(parts["questions"]) == 16
    for form in parts["against"]:
        assert form.format(question="Why?").count("Why?") == 1
