"""Pages for tests: their elements, and their data, unpacked as moesched/report/packing.py describes it."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from html.parser import HTMLParser
from typing import Any

import numpy as np

TYPES = {"f64": "<f8", "i32": "<i4", "u32": "<u4", "u16": "<u2", "u8": "<u1"}
VOID = ("meta", "link", "br", "img", "input")


class PageElements(HTMLParser):
    """The elements of a page, all of which are closed, and their text.

    Attributes:
        elements: name and attributes of each.
        texts: the texts inside of elements, by name.
        text: the whole text.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "elements are nested"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def find(self, name: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a name."""
        return [attributes for tag, attributes in self.elements if tag == name]


def unpacked(page: str) -> bytes:
    """The data of a page, as its scripts unpack it."""
    return zlib.decompress(base64.b64decode(page.partition('id="data">')[2].partition("</script>")[0]))


def data_of(page: str) -> Any:
    """The data of a page, with its columns as lists."""
    data = unpacked(page)
    [length] = struct.unpack_from("<I", data)
    return _with_columns(json.loads(data[4 : 4 + length]), data[4 + length :])


def _with_columns(value: Any, data: bytes) -> Any:
    if isinstance(value, list):
        return [_with_columns(each, data) for each in value]
    if not isinstance(value, dict):
        return value
    if "column" in value:
        kind = TYPES[value["column"]]
        return np.frombuffer(data, kind, count=value["length"], offset=value["at"]).tolist()
    return {name: _with_columns(each, data) for name, each in value.items()}
