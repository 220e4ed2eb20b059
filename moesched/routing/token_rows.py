"""Routing traces as CSV: one row for each token and layer.

The header names the columns; `request` may be omitted if there is one request. All numbers count from 0, spaces
separate experts, rows may come in any order, and lines that begin with # are comments:

    request,layer,token,experts
    0,0,0,3 5
    0,1,0,2 7
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO

import numpy as np

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.checks import (
    other_layers,
    other_top_k,
    routed_layers,
    sorted_choices,
    with_all_layers,
)
from moesched.routing.choices import Integers
from moesched.routing.trace import RoutingTrace
from moesched.system.plain_text import shown

HEADERS = (b"layer,token,experts", b"request,layer,token,experts")
MOST_ROWS = 2_000_000
"""Largest number of rows of a file: 62,500 tokens of a model with 32 layers."""

_EXPERTS = rb"\d{1,9}(?: +\d{1,9})*"
_ROWS = {
    HEADERS[0]: re.compile(rb"(\d{1,9}) *, *(\d{1,9}) *, *(" + _EXPERTS + rb")"),
    HEADERS[1]: re.compile(rb"(\d{1,9}) *, *(\d{1,9}) *, *(\d{1,9}) *, *(" + _EXPERTS + rb")"),
}
_PLACES = 4  # line, request, layer and token come before the experts


def parse_token_rows(where: str, data: bytes, config: ModelConfig) -> RoutingTrace:
    """Parse the bytes of a CSV trace.

    Args:
        where: name of the file, for error messages.
        data: the whole content of the file.

    Raises:
        BadInput: a line is not a row (the message names it), a token lacks a layer, or the trace is of another model.
    """
    if data.count(b"\n") > MOST_ROWS:
        raise BadInput(f"{where} has more than {MOST_ROWS:,} lines: split it, or write an .npz file")
    numbers = array("i")
    for row in _rows(where, BytesIO(data), config):
        numbers.extend(row)
    rows: Integers = np.array(numbers, np.int32).reshape(-1, _PLACES + config.routed.top_k)
    if not len(rows):
        raise BadInput(f"{where} has no rows: write one for each token and layer")
    _require_known_layers(where, rows, config)
    layers = routed_layers(config)
    rows = _with_consecutive_layers(where, rows, config, layers)
    rows = rows[np.lexsort((rows[:, 2], rows[:, 3], rows[:, 1]))]
    lines_N, requests_N = rows[:, 0], rows[:, 1]
    _require_each_once(where, rows, layers)
    chosen = sorted_choices(rows[:, _PLACES:], config, lambda row: f"{where}:{lines_N[row]}")
    lengths = np.bincount(requests_N) // len(layers)
    chosen_TLk = with_all_layers(chosen.reshape(-1, len(layers), config.routed.top_k), config)
    return RoutingTrace(config.name, config.routed.experts, chosen_TLk, lengths, np.zeros_like(lengths))


def _rows(where: str, lines: Iterable[bytes], config: ModelConfig) -> Iterator[tuple[int, ...]]:
    """Yield each row of the file `where` as numbers: line number, request, layer, token, and ids of the experts."""
    header = None
    for number, text in enumerate(lines, 1):
        line = text.strip()
        if not line or line.startswith(b"#"):
            continue
        if header is None:
            header = line.replace(b" ", b"")
            continue
        found = _ROWS[header].fullmatch(line)
        if found is None:
            raise BadInput(
                f"{where}:{number}: {shown(line.decode(errors='replace'))} is not a row: write whole numbers for "
                f"{header.decode()}, and spaces between experts"
            )
        *places, experts = found.groups()
        chosen = experts.split()
        if len(chosen) != config.routed.top_k:
            raise other_top_k(f"{where}:{number}", len(chosen), config)
        yield number, *([0] * (3 - len(places))), *map(int, (*places, *chosen))


def _require_known_layers(where: str, rows: Integers, config: ModelConfig) -> None:
    layers_N = rows[:, 2]
    if layers_N.max() >= config.layers:
        line, _, layer, *_ = rows[layers_N.argmax()]
        raise BadInput(
            f"{where}:{line}: there is no layer {layer}, as {config.name} has layers 0 to {config.layers - 1}: give a "
            "trace of that model"
        )
    if layers_N.max() + 1 < len(routed_layers(config)):
        raise other_layers(where, int(layers_N.max()) + 1, config)


def _with_consecutive_layers(
    where: str, rows: Integers, config: ModelConfig, routed: Sequence[int]
) -> Integers:
    """Remove rows of layers without experts, and number the layers with experts from 0.

    Some tools' files already number only the layers with experts, from 0; such rows are returned unchanged.

    Args:
        rows: rows of the file `where` as `_rows` yields them; column 2 is the layer.
        routed: numbers of the model's layers with experts.

    Raises:
        BadInput: the expert ids in a row of a layer without experts are not all equal, or all rows are of such layers.
    """
    layers_N = rows[:, 2]
    if layers_N.max() < len(routed):
        return rows
    is_routed_N = np.isin(layers_N, routed)
    several_N = ~is_routed_N & (rows[:, _PLACES:] != rows[:, _PLACES : _PLACES + 1]).any(axis=1)
    if several_N.any():
        line, _, layer, *_ = rows[several_N.argmax()]
        raise BadInput(
            f"{where}:{line}: {config.name} has no experts in layer {layer}: give a trace of that model, without rows "
            "of such layers, or with zeros there"
        )
    rows = rows[is_routed_N]
    if not len(rows):
        raise BadInput(
            f"{where} has rows of layers without experts only: write those of layers {list(routed)}"
        )
    rows[:, 2] = np.searchsorted(routed, rows[:, 2])
    return rows


def _require_each_once(where: str, rows: Integers, numbers: Sequence[int]) -> None:
    """Require one row for each request, token and layer, all three counted from 0 without gaps.

    Args:
        rows: rows of the file `where` as `_rows` yields them, sorted by request, token and layer.
        numbers: the model's number of each layer, for error messages.

    Raises:
        BadInput: a row is missing, or comes twice.
    """
    layers = len(numbers)
    lines_N, requests_N, layers_N, tokens_N = rows[:, :_PLACES].T
    # A row before the first one and one after the last, so that both ends are checked like all others.
    r = np.concatenate([[-1], requests_N, [requests_N[-1] + 1]])
    t = np.concatenate([[-1], tokens_N, [0]])
    i = np.concatenate([[layers - 1], layers_N, [0]])
    next_layer = (r[1:] == r[:-1]) & (t[1:] == t[:-1]) & (i[1:] == i[:-1] + 1)
    next_token = (r[1:] == r[:-1]) & (t[1:] == t[:-1] + 1)
    next_request = (r[1:] == r[:-1] + 1) & (t[1:] == 0)
    follows = next_layer | ((i[:-1] == layers - 1) & (i[1:] == 0) & (next_token | next_request))
    if follows.all():
        return
    row = int(follows.argmin())
    here, following = (r[row], t[row], i[row]), (r[row + 1], t[row + 1], i[row + 1])
    if here == following:
        raise BadInput(
            f"{where}:{lines_N[row]}: layer {numbers[i[row]]} of token {t[row]} of request {r[row]} comes a "
            "second time: remove one of the rows"
        )
    request, token, layer = _after(here, following[0], layers)
    raise BadInput(
        f"{where} has no row for layer {numbers[layer]} of token {token} of request {request}: it was cut off, or "
        "lost rows; write one for each layer of each token, all counted from 0"
    )


def _after(here: tuple[int, int, int], next_request: int, layers: int) -> tuple[int, int, int]:
    """Return the request, token and layer that the next row should have.

    Args:
        here: request, token and layer of a row.
        next_request: request of the next row that the file has.
        layers: number of layers with experts.
    """
    request, token, layer = here
    if layer < layers - 1:
        return request, token, layer + 1
    return (request, token + 1, 0) if next_request == request else (request + 1, 0, 0)
