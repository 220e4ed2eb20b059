"""A hook of MkDocs: files that pages link to outside of docs/, such as results of benchmarks, come into the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"(?<=\]\()\.\./(?=([^)#\s]+))")
"""The beginning of a link out of docs/, with the file's path."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files."""
    linked = {path for page in files.documentation_pages() for path in OUTSIDE.findall(page.content_string)}
    for path in sorted(linked):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let the links lead there."""
    return OUTSIDE.sub("", markdown)
