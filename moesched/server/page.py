"""The page at /: a chat beside live lanes."""

from __future__ import annotations

from pathlib import Path

PAGE = (Path(__file__).parent / "page.html").read_bytes()
