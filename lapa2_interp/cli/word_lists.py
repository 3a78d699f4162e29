"""The command that derives word lists: `lapa2 word-lists`."""

from __future__ import annotations

from pathlib import Path


def word_lists(
    *,
    task: str,
    data: tuple[str, ...],
    out: Path,
    n_words: int = 400,
    min_count: int = 20,
    min_z: float = 1.96,
    force: bool = False,
) -> None:
    """Derive FreeCtrl's word lists from labelled texts: the words that tell attributes apart.

    Words are ranked by the z of the log-odds ratio with a Dirichlet prior (Monroe, Colaresi and
    Quinn 2008); function words are left out. For example

        lapa2 word-lists --task sentiment --data sst2 --data imdb --out words.json
        lapa2 generate --method freectrl --set words=words.json \\
            --attribute positive --out results/run

    Args:
        task: A task of `lapa2 tasks`, or the path of a task file: whose attributes are the labels.
        data: A corpus by name (imdb, sst2, agnews) or a file with the fields text and label; repeat
            the option for more.
        out: The list, a JSON file.
        n_words: Words per attribute.
        min_count: Occurrences a word must have.
        min_z: The smallest z of a word; 1.96 is reached by one in forty of the words that tell nothing.
        force: Replace the file.
    """  # noqa: E501
    from lapa2_interp.methods.registry import load_task
    from lapa2_interp.tasks.word_lists import make_word_list

    words_by_attribute = make_word_list(
        tuple(load_task(task).attributes), data, out, n_words, min_count, min_z, force
    )
    for label, best in words_by_attribute.items():
        shown = ", ".join(f"{word} {z:.1f}" for word, z in best[:8])
        print(
            f"{label:<10} {len(best)} words, z {best[0][1]:.1f} to {best[-1][1]:.1f}: {shown}, ..."
        )
    print(f"in {out}")
