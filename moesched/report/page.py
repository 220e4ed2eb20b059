"""Assembles an HTML page from template, styles, scripts, sections and data, as one text that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

MODULES = (
    "units",
    "data",
    "dom",
    "run",
    "viewport",
    "ticks",
    "rows",
    "merge",
    "theme",
    "hatches",
    "marks",
    "paint",
    "arrows",
    "describe",
    "idle",
    "details",
    "charts",
    "finder",
    "pick",
    "input",
    "timeline",
    "places",
    "main",
)
"""The scripts, each after those that it imports. They become one script, without imports and exports."""

_IMPORT = re.compile(r"^import \{[^}]*\} from \"\./[a-z]+\.js\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def page(title: str, sections: Mapping[str, str], rules: str, data: str) -> str:
    """Return the HTML of a whole page.

    Args:
        title: title of the browser's window, already escaped for HTML.
        sections: HTML by the name of its place in the template, such as "head", "legend" or "tables".
        rules: CSS rules for this page alone.
        data: the packed data, as `Columns.pack` returns it.
    """
    style, scripts = _style() + rules, (_charts_library(), _script())
    places = {
        **sections,
        "title": title,
        "policy": _content_policy(style, scripts),
        "style": style,
        "library": scripts[0],
        "script": scripts[1],
        "data": data,
    }
    # In one pass, so that text that was filled in is never taken for a place.
    return _PLACE.sub(lambda place: places[place[1]], _asset("page.html"))


def _content_policy(style: str, scripts: tuple[str, ...]) -> str:
    """Return the page's content security policy: these scripts and this style may run, and nothing else is loaded."""
    allowed = " ".join(map(_hash, scripts))
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _script() -> str:
    """Return the text of all scripts of assets/js, joined into one."""
    parts = (_EXPORT.sub("", _IMPORT.sub("", _asset(f"js/{name}.js"))) for name in MODULES)
    return "\n" + "\n".join(parts)


@cache
def _charts_library() -> str:
    """Return the script of uPlot, which draws curves, with its licence, which every copy must have."""
    return f"/*\n{_vendored('LICENSE')}*/\n{_vendored('uPlot.iife.min.js')}"


@cache
def _style() -> str:
    return _vendored("uPlot.min.css") + _asset("page.css")


def _asset(name: str) -> str:
    return (resources.files("moesched.report") / "assets" / name).read_text(encoding="utf-8")


def _vendored(name: str) -> str:
    return (resources.files("moesched.report") / "vendor" / "uplot" / name).read_text(encoding="utf-8")
