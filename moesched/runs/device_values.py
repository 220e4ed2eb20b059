"""Checks what a device gives in a run: the kinds of its lanes, and the tokens that it samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from moesched.errors import BadInput, MoeschedError
from moesched.requests.beams import Standing
from moesched.seams import Device, LaneKind
from moesched.system.plain_text import shown
from moesched.tasks import Task

KINDS: tuple[LaneKind, ...] = get_args(LaneKind)


def lane_kinds(device: Device) -> Mapping[str, LaneKind]:
    """Return the kind of each lane of a device, by name.

    Raises:
        BadInput: the device has no `kinds` or no `streams`, or its `kinds` are none.
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


def require_tokens(tokens: Any, sequences: int, sample: Task, device: str, least: int) -> None:
    """Check that the value of a `sample` task has a token for each sequence.

    Args:
        tokens: the task's value.
        device: name of the device's class.
        least: the smallest id that a device may give.

    Raises:
        MoeschedError: it has not; the message names the device and its method.
    """
    fault = _fault(tokens, sequences) or next(
        (f"the token {shown(each)}" for each in tokens if not isinstance(each, int) or each < least),
        None,
    )
    if fault:
        raise MoeschedError(
            f"device {device}: execute gives {fault} for {sample.label}: give a list with the token of each "
            "sequence, an int of 0 or more"
        )


def require_standings(standings: Any, requests: int, sample: Task, device: str) -> None:
    """Check that the value of a `sample` task has the state of each request's beam search.

    Args:
        standings: the task's value.
        device: name of the device's class.

    Raises:
        MoeschedError: it has not; the message names the device and its method.
    """
    fault = _fault(standings, requests) or next(
        (shown(each) for each in standings if not isinstance(each, Standing)), None
    )
    if fault:
        raise MoeschedError(
            f"device {device}: execute gives {fault} for {sample.label}: give a list with the "
            "moesched.requests.beams.Standing of each request"
        )


def _fault(values: Any, count: int) -> str | None:
    """Return what is wrong with a list of `count` values, whatever these are; None if nothing is."""
    if not isinstance(values, list | tuple):
        return shown(values)
    return None if len(values) == count else f"{len(values)} values to {count} sequences"
