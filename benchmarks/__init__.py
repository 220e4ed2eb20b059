"""Measurements of moesched, one command each: `python -m benchmarks.speed.engine`; README.md lists the folders."""

from __future__ import annotations

import sys
from pathlib import Path

# Scripts share parsers and damaged inputs with the tests, and a text with tools, which import each other by plain name.
sys.path.extend(str(Path(__file__).parent.parent / folder) for folder in ("tests", "tools"))
