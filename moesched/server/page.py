"""The page at /: a chat beside live lanes."""

from __future__ import annotations

from pathlib import Path

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page's content security policy: it loads nothing, and asks only the server that it came from."""
PAGE = (Path(__file__).parent / "page.html").read_bytes()
