"""A run as a data set of the Hugging Face hub: texts, scores, manifests, and a card.

README.md         the card
texts.parquet   one row per text, with the columns of its cell
scores.parquet    one row per text and metric, where there are scores
manifests.json    what decided each cell, by its key
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pandas as pd

from lapa2_interp._util.errors import RunError, first_sentence, pluralize
from lapa2_interp._util.files import result_folder, write_json, write_text
from lapa2_interp._util.table_formats import as_markdown
from lapa2_interp._util.version import __version__
from lapa2_interp.runs.texts import ID_COLUMNS, write_parquet

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from lapa2_interp.runs.run import Run
    from lapa2_interp.runs.score import Scored

TEXTS, SCORES, MANIFESTS, CARD = (
    "texts.parquet",
    "scores.parquet",
    "manifests.json",
    "README.md",
)
SCORED = f"scores/{SCORES}"
"""Where `lapa2 score` leaves the scores of a run."""


def write_data_set(run: Run, folder: str | Path, scores: Scored | None = None) -> Path:
    """Write a run as a data set: its finished cells, their manifests, scores, and a card.

    Args:
        folder: A new folder.
        scores: Of this run; by default those that `lapa2 score` left in the run's folder, if there
            are any.

    Raises:
        RunError: No cell is finished, or one is damaged; or as `files.result_folder`.
    """
    if not run.finished:
        raise RunError(f"{run.name} has no finished cell to publish; finish it first")
    texts = run.texts()
    with result_folder(Path(folder)) as fresh:
        write_parquet(texts, fresh / TEXTS)
        has_scores = True
        if scores is not None and len(scores.scores):
            write_parquet(
                scores.scores.drop(columns=[*ID_COLUMNS], errors="ignore"), fresh / SCORES
            )
        elif scores is None and run.folder is not None and (run.folder / SCORED).is_file():
            (fresh / SCORES).write_bytes((run.folder / SCORED).read_bytes())
        else:
            has_scores = False
        manifests = {key: run.manifest(key).model_dump(mode="json") for key in run.finished}
        write_json(fresh / MANIFESTS, manifests)
        write_text(fresh / CARD, _card(run, texts, has_scores))
    return Path(folder)


def push_to_hub(
    run: Run,
    repo_id: str,
    *,
    scores: Scored | None = None,
    private: bool = True,
    api: HfApi | None = None,
) -> str:
    """Upload a run as a data set of the Hugging Face hub: `write_data_set`, then one commit.

    Args:
        repo_id: Of the data set, such as "me/lake"; it is made if there is none, and files of these
            names are replaced in one that exists.
        scores: As `write_data_set`.
        private: Whether a new data set is private.
        api: By default huggingface_hub's HfApi, with the token that you logged in with.

    Returns:
        The address of the data set.

    Raises:
        RunError: As `write_data_set`; or the hub refuses it or is not reached.
    """
    from huggingface_hub import HfApi

    hub = HfApi() if api is None else api
    with TemporaryDirectory() as temporary:
        folder = write_data_set(run, Path(temporary) / "data", scores)
        try:
            made = hub.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
            hub.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                repo_type="dataset",
                commit_message=f"{pluralize(len(run.finished), 'cell')} of lapa2_interp",
            )
        except Exception as error:  # of the hub's library and those that it calls
            raise RunError(
                f"the data set {repo_id!r} was not uploaded ({first_sentence(error)}); give a name"
                " OWNER/NAME that is yours, log in with `hf auth login`, and unset HF_HUB_OFFLINE"
            ) from error
    return str(made)


def _card(run: Run, texts: pd.DataFrame, has_scores: bool) -> str:
    """The card: what is read by the hub in front, then words and a table of the cells."""
    files = {"texts": TEXTS, **({"scores": SCORES} if has_scores else {})}
    configs = "".join(
        f"- config_name: {name}\n  data_files: {file}\n" for name, file in files.items()
    )
    manifest = run.manifest(next(iter(run.finished)))
    title = f"Texts of {', '.join(dict.fromkeys(texts['model']))}"
    of_scores = f"- `{SCORES}`: one row per text and metric." if has_scores else "- No scores."
    names = ["model", "task", "attribute", "method", "arm"]
    table = texts.groupby(names, sort=False).size().rename("texts").reset_index()
    return f"""---
pretty_name: {json.dumps(title)}
tags:
- text-generation
- attention-steering
- lapa2
configs:
{configs}---

# Texts with and without steered attention

Texts that a language model wrote, made with lapa2_interp {__version__}. Nobody has checked what
they say.

{as_markdown("Cells", table, ())}
### Files

- `{TEXTS}`: one row per text. `tokens` are its ids, `arm` is the augmentation, `cell` the key of
  its settings in `{MANIFESTS}`.
{of_scores}
- `{MANIFESTS}`: by cell, all that decided the texts: settings, seeds, weights
  (`{manifest.model.weights}`), library versions, commit `{manifest.commit or "unknown"}`.

`pandas.read_parquet("hf://datasets/OWNER/NAME/{TEXTS}")` reads the texts.
"""
