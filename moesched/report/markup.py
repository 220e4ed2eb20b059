"""Makes pieces of HTML: elements, paragraphs, tables and sections. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from moesched.system.plain_text import plain_text


def text(value: object) -> str:
    """Return the text of a value, escaped for HTML text and attributes."""
    return escape(plain_text(str(value)))


def element(name: str, *content: str, **attributes: str) -> str:
    """Return an HTML element.

    Args:
        name: name of the element, such as "div".
        content: HTML inside the element.
        attributes: attributes as text, which is escaped; `css` stands for "class", and underscores for dashes.
    """
    given = "".join(
        f' {"class" if key == "css" else key.replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{given}>{''.join(content)}</{name}>"


def paragraphs(lines: Iterable[str], **attributes: str) -> str:
    """Return HTML paragraphs, one for each line of text; `attributes` are as for `element`."""
    return "".join(element("p", text(line), **attributes) for line in lines)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], figures: int) -> str:
    """Return the HTML of a table, in a section with a heading if `title` is not empty.

    Args:
        columns: titles of the columns, as text.
        rows: cells of each row, as text.
        figures: number of columns, counted from the last, that hold numbers; they are aligned to the right.
    """
    first_figure = len(columns) - figures

    def cells(name: str, row: Sequence[str], **attributes: str) -> str:
        return "".join(
            element(name, text(cell), **attributes, **({"css": "figure"} if number >= first_figure else {}))
            for number, cell in enumerate(row)
        )

    head = element("thead", element("tr", cells("th", columns, scope="col")))
    body = element("tbody", *(element("tr", cells("td", row)) for row in rows))
    whole = element("div", element("table", head, body), css="wide")
    return section(title, whole) if title else whole


def section(title: str, *content: str) -> str:
    """Return an HTML section with a heading; `content` is HTML."""
    return element("section", element("h2", text(title)), *content)


def figures(values: Mapping[str, str]) -> str:
    """Return an HTML list of figures in large type, each with its name."""
    pairs = (
        element("div", element("dt", text(name)), element("dd", text(value)))
        for name, value in values.items()
    )
    return element("dl", *pairs, css="figures")
