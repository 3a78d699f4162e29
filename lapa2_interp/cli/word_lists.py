"""The command that derives word lists: `lapa2 word-lists`."""

from __future__ import annotations

from lapa2_interp.cli.functions import Values, command_of, load_task
from lapa2_interp.tasks.settings import WordListSettings


def _print_words(words: dict[str, list[tuple[str, float]]], values: Values) -> None:
    for label, best in words.items():
        shown = ", ".join(f"{word} {z:.1f}" for word, z in best[:8])
        print(
            f"{label:<10} {len(best)} words, z {best[0][1]:.1f} to {best[-1][1]:.1f}: {shown}, ..."
        )
    print(f"in {values['out']}")


word_lists = command_of(
    WordListSettings, "tasks.word_lists:make_word_list", prepare=load_task, show=_print_words
)
