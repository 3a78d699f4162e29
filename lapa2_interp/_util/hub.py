"""A folder that is uploaded to the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lapa2_interp.errors import RunError, first_sentence

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def upload(
    folder: Path,
    repo_id: str,
    kind: Literal["dataset", "model"],
    *,
    what: str,
    message: str,
    private: bool,
    api: HfApi | None,
) -> str:
    """Upload the files of a folder in one commit.

    Args:
        repo_id: It is made if there is none, and files of these names are replaced in one that
            exists.
        what: A noun for the error, such as "data set".
        message: Of the commit.
        private: Whether a new repository is private.
        api: By default huggingface_hub's HfApi, with the token that you logged in with.

    Returns:
        The address of the repository.

    Raises:
        RunError: The hub refuses it or is not reached.
    """
    from huggingface_hub import HfApi

    hub = HfApi() if api is None else api
    try:
        made = hub.create_repo(repo_id, repo_type=kind, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=repo_id, folder_path=folder, repo_type=kind, commit_message=message
        )
    except Exception as error:  # of the hub's library and those that it calls
        raise RunError(
            f"the {what} {repo_id!r} was not uploaded ({first_sentence(error)}); give a name"
            " OWNER/NAME that is yours, log in with `hf auth login`, and unset HF_HUB_OFFLINE"
        ) from error
    return str(made)


def as_yaml(text: str) -> str:
    """A text in quotes. JSON's escapes are YAML's, but for pairs of surrogates, and YAML refuses
    more letters as they are."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in quoted)
