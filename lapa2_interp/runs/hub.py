"""A run as a data set of the Hugging Face hub: texts, scores, manifests, and a card.

Its files:

    README.md         the card
    texts.parquet     one row per text, with the columns of its cell
    scores.parquet    one row per text and metric, where there are scores
    manifests.json    what decided each cell, by its key
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pandas as pd

from lapa2_interp._util.hub import as_yaml, upload
from lapa2_interp._util.version import __version__
from lapa2_interp.errors import RunError, pluralize
from lapa2_interp.files import result_folder, write_json, write_text
from lapa2_interp.runs.manifest import Manifest
from lapa2_interp.runs.store import ID_COLUMNS, write_parquet
from lapa2_interp.table_formats import as_markdown

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TEXTS, SCORES, MANIFESTS = "texts.parquet", "scores.parquet", "manifests.json"
CARD = "README.md"


@dataclass(frozen=True)
class DataSet:
    """Texts, their scores and manifests, and where they are written.

    Attributes:
        texts: As `Run.texts`.
        manifests: By cell.
        scores: One row per text and metric; None where there are none.
    """

    texts: pd.DataFrame
    manifests: Mapping[str, Manifest]
    scores: pd.DataFrame | None = None

    def __post_init__(self) -> None:
        if not self.manifests:
            raise RunError("the run has no finished cell to publish; finish it first")

    def save(self, folder: str | Path) -> Path:
        """Write the files of the data set.

        Args:
            folder: A new folder.

        Raises:
            RunError: As `files.result_folder`.
        """
        with result_folder(Path(folder)) as fresh:
            write_parquet(self.texts, fresh / TEXTS)
            if self.scores is not None:
                rows = self.scores.drop(columns=[*ID_COLUMNS], errors="ignore")
                write_parquet(rows, fresh / SCORES)
            fields = {key: one.model_dump(mode="json") for key, one in self.manifests.items()}
            write_json(fresh / MANIFESTS, fields)
            write_text(fresh / CARD, self._card())
        return Path(folder)

    def push(self, repo_id: str, *, private: bool = True, api: HfApi | None = None) -> str:
        """Upload the files to the Hugging Face hub, in one commit.

        Args:
            repo_id: Of the data set, such as "me/lake"; it is made if there is none, and files of
                these names are replaced in one that exists.
            private: Whether a new data set is private.
            api: By default huggingface_hub's HfApi, with the token that you logged in with.

        Returns:
            The address of the data set.

        Raises:
            RunError: The hub refuses it or is not reached.
        """
        with TemporaryDirectory() as temporary:
            return upload(
                self.save(Path(temporary) / "data"),
                repo_id,
                "dataset",
                what="data set",
                message=f"{pluralize(len(self.manifests), 'cell')} of lapa2_interp",
                private=private,
                api=api,
            )

    def _card(self) -> str:
        """The card: what is read by the hub in front, then words and a table of the cells."""
        files = {"texts": TEXTS, **({} if self.scores is None else {"scores": SCORES})}
        configs = "".join(
            f"- config_name: {name}\n  data_files: {file}\n" for name, file in files.items()
        )
        manifest = next(iter(self.manifests.values()))
        title = f"Texts of {', '.join(dict.fromkeys(self.texts['model']))}"
        of_scores = "- No scores."
        if self.scores is not None:
            of_scores = f"- `{SCORES}`: one row per text and metric."
        names = ["model", "task", "attribute", "method", "arm"]
        table = self.texts.groupby(names, sort=False).size().rename("texts").reset_index()
        return f"""---
pretty_name: {as_yaml(title)}
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
