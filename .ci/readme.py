"""The page on the package index: README.md, with links and pictures of the repository in
pyproject.toml, since the index has no files of ours. hatchling calls it in every build."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


class IndexPage(MetadataHookInterface):
    """Gives the project its readme."""

    def update(self, metadata: dict[str, Any]) -> None:
        address = metadata["urls"]["Repository"]

        def absolute(link: re.Match[str]) -> str:
            mark, text, path = link.groups()
            return f"{mark}[{text}]({address}/{'raw' if mark else 'blob'}/main/{path})"

        text = LINK.sub(absolute, (Path(self.root) / "README.md").read_text("utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
