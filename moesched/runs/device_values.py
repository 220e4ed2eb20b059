"""Checks the values that a device gives in a run: kinds of lanes, sizes of slots, rows of experts, and tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import index
from typing import Any, get_args

from moesched.errors import BadInput, WrongValue
from moesched.models.layout import Page
from moesched.requests.beams import Standing
from moesched.routing import ScoredTokens
from moesched.seams import Device, LaneKind
from moesched.steps.model_pages import describe
from moesched.steps.plan import Plan
from moesched.system.plain_text import shown
from moesched.tasks import Task

KINDS: tuple[LaneKind, ...] = get_args(LaneKind)


def lane_kinds(device: Device) -> Mapping[str, LaneKind]:
    """Return the kind of each lane of a device, by name.

    Raises:
        BadInput: the device has no `kinds` or no `streams`, or its `kinds` do not map names to kinds of lanes.
    """
    name = type(device).__name__
    kinds: object
    try:
        kinds, _ = device.kinds, device.streams
    except AttributeError as error:
        if error.obj is not device:
            raise
        raise BadInput(f"device {name} has no {error.name}: see moesched.seams.Device") from error
    if not isinstance(kinds, Mapping) or not all(each in KINDS for each in kinds.values()):
        raise BadInput(
            f"device {name}: kinds is {shown(kinds)}: give a mapping of lanes' names to {', '.join(KINDS)}"
        )
    return kinds


def checked_slot_bytes(device: Device, page: Page) -> int:
    """Return the bytes that a page takes in a slot of a device.

    Raises:
        BadInput: the device gives no integer, or one that is too small.
    """
    given: object = device.slot_bytes(page)
    size = _integer(given, page.nbytes)
    if size is None:
        raise BadInput(
            f"device {type(device).__name__}: slot_bytes gives {shown(given)} for page {describe(page)}: give an int "
            f"of at least the page's nbytes, {page.nbytes:,}"
        )
    return size


def value_checks(device: Device, plan: Plan) -> dict[str, Callable[[Task, Any], Any]]:
    """Return, by verb, functions that check and return the value that a device gives for a task."""
    check = partial(checked_rows, type(device).__name__, plan, scored=plan.declared.scores)
    return {"route": check, "preview_route": check}


def checked_rows(device: str, plan: Plan, routed: Task, value: Any, *, scored: bool) -> Mapping[int, int]:
    """Check the value of a routing task, {expert: number of rows}, and return it with ids and numbers as ints.

    Args:
        device: name of the device's class.
        routed: the routing task.
        value: the value that the device gives for this task.
        scored: whether the value must have router scores.

    Raises:
        WrongValue: the value is no such mapping, has an unknown expert or a number below 1, or lacks required scores.
    """
    experts = plan.layout.experts_of(routed.layer)
    rows = _rows(value, experts)
    if rows is None:
        raise WrongValue(
            f"device {device}: execute gives {shown(value)} for {routed.label}: give a dict with the rows of each "
            f"expert that has any, ints of 1 or more by ints from 0 to {len(experts) - 1}"
        )
    if not scored:
        return rows
    if not isinstance(value, ScoredTokens) or len(value.scores) != len(experts):
        raise WrongValue(
            f"device {device}: execute gives {shown(value)} for {routed.label}: give a moesched.routing.ScoredTokens "
            f"with the scores of all {len(experts)} experts"
        )
    return ScoredTokens(rows, value.scores)


def checked_tokens(tokens: Any, sequences: int, sample: Task, device: str, least: int) -> list[int]:
    """Check the value of a `sample` task, and return it as a list of ints: the token of each sequence.

    Args:
        tokens: the value that the device gives for this task.
        sequences: number of sequences.
        device: name of the device's class.
        least: the smallest id that a device may give.

    Raises:
        WrongValue: the value is not a list with a valid token for each sequence.
    """
    fault = _fault(tokens, sequences) or next(
        (f"the token {shown(each)}" for each in tokens if _integer(each, least) is None), None
    )
    if fault:
        raise WrongValue(
            f"device {device}: execute gives {fault} for {sample.label}: give a list with the token of each "
            "sequence, an int of 0 or more"
        )
    return [number for each in tokens if (number := _integer(each, least)) is not None]


def require_standings(standings: Any, requests: int, sample: Task, device: str) -> None:
    """Check that the value of a `sample` task has the state of each request's beam search.

    Args:
        standings: the value that the device gives for this task.
        requests: number of requests.
        device: name of the device's class.

    Raises:
        WrongValue: a state is missing or of another type; the message names the device and its method.
    """
    fault = _fault(standings, requests) or next(
        (shown(each) for each in standings if not isinstance(each, Standing)), None
    )
    if fault:
        raise WrongValue(
            f"device {device}: execute gives {fault} for {sample.label}: give a list with the "
            "moesched.requests.beams.Standing of each request"
        )


def _rows(value: Any, experts: range) -> dict[int, int] | None:
    """Return `value` as {expert: number of rows}, with ints; None if it is not such a mapping with numbers above 0."""
    rows: dict[int, int] = {}
    if not isinstance(value, Mapping):
        return None
    for given, count in value.items():
        expert, number = _integer(given, 0), _integer(count, 1)
        if expert is None or expert not in experts or number is None:
            return None
        rows[expert] = number
    return rows


def _fault(values: Any, count: int) -> str | None:
    """Describe the fault if `values` is not a list of `count` values, of any type; return None if it is."""
    if not isinstance(values, list | tuple):
        return shown(values)
    return None if len(values) == count else f"{len(values)} values to {count} sequences"


def _integer(value: Any, least: int) -> int | None:
    """Return an integer of any type, such as numpy's, as an int; None if `value` is no integer, or is below `least`.

    An object of a class derived from int, such as a token with its probability, is returned unchanged.
    """
    try:
        number = value if isinstance(value, int) else index(value)
    except TypeError:
        return None
    return number if number >= least else None
