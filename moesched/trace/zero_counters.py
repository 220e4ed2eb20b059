"""Removes counters whose values are all zero from a trace, since a viewer draws a track for each counter."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moesched.trace.chrome_reader import Event

COUNTER = "C"


def without_zero_counters(data: bytes, events: Sequence[Event]) -> bytes:
    """Return a trace without the series of counters whose values are all zero; all other events stay as they are.

    Args:
        data: the JSON of the trace.
        events: the events of this trace, decoded.
    """
    counted = [(each, _values(each)) for each in events if each.ph == COUNTER]
    used = {(each.pid, each.name, key) for each, values in counted for key, value in values.items() if value}
    if all((each.pid, each.name, key) in used for each, values in counted for key in values):
        return data
    file = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    raw = msgspec.json.decode(file["traceEvents"], type=list[msgspec.Raw])
    kept = []
    for each, text in zip(events, raw, strict=True):
        if each.ph != COUNTER:
            kept.append(text)
            continue
        values = {key: value for key, value in _values(each).items() if (each.pid, each.name, key) in used}
        if values:
            event = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            kept.append(msgspec.Raw(msgspec.json.encode(event | {"args": values})))
    return msgspec.json.encode(file | {"traceEvents": kept})


def _values(event: Event) -> dict[str, int | float]:
    """Return the values of a counter event by the name of the series; empty if they cannot be decoded."""
    try:
        return msgspec.json.decode(event.args, type=dict[str, int | float])
    except msgspec.DecodeError:
        return {}
