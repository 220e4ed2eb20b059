"""The child process that runs a check's items, and its messages to the parent, one JSON value per line.

When an item takes too long, `faulthandler` writes tracebacks between the messages until the process is killed. This
works even in a loop in C, or in a loop that catches every exception. Output of the policy is dropped.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from moesched.errors import BadInput
from moesched.inputs.lookup import find_policy
from moesched.settings import check_settings, require_defaults
from moesched.system.children import end_with_parent
from moesched.system.plain_text import shown
from moesched.testing.grid.cells import Cell
from moesched.testing.grid.faults import class_line_of
from moesched.testing.grid.items import Outcome, Subject, items_of

LEAST_SECONDS = 0.05
"""Seconds that must be left for another item to begin."""
BETWEEN_TRACEBACKS = 0.01
"""Seconds between two tracebacks of an item that takes too long."""


class ChildOrder(msgspec.Struct, frozen=True):
    """The work of a child process.

    Attributes:
        subject: the policy to check.
        cells: the cells (each a model, a machine and a batch size) in which to simulate the policy.
        patience: seconds that a small case may take: a small model on a device that computes hashes.
        limit: seconds that all items together may take.
    """

    subject: Subject
    cells: list[Cell]
    patience: float
    limit: float

    @property
    def loading(self) -> float:
        """Seconds that loading the policy may take."""
        return max(self.limit, self.patience)


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Message that the policy cannot be loaded, or does not take the settings; `why` is the reason."""

    why: str


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Message that the policy is loaded.

    Attributes:
        class_line: the first line of the policy's class, as file:line.
        names: names of the items (parts of the policy's check), in the order in which they run.
    """

    class_line: str
    names: list[str]


class Began(msgspec.Struct, frozen=True, tag=True):
    """Message that an item begins.

    Attributes:
        item: index of the item.
        seconds: time that the item may take.
        quick: True if an item that takes longer is a fault of the policy; False if it only counts as unchecked.
    """

    item: int
    seconds: float
    quick: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Message that an item has ended, with the item's index and outcome."""

    item: int
    outcome: Outcome


Message = Refused | Opened | Began | Ended

_MESSAGES: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def main() -> None:
    """Run the child process: carry out the order in the last command-line argument, and write messages to stdout."""
    end_with_parent()
    sent = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    order = msgspec.json.decode(sys.argv[-1], type=ChildOrder)
    for message in carry_out(order, sent):
        sent.write(msgspec.json.encode(message) + b"\n")


def carry_out(order: ChildOrder, alarm: BinaryIO) -> Iterator[Message]:
    """Carry out an order: load the policy and run all items; yield messages at the beginning and end of each item.

    alarm: the file to which the traceback of an item that takes too long is written.
    """
    faulthandler.register(signal.SIGALRM, file=alarm, all_threads=False)
    signal.setitimer(signal.ITIMER_REAL, order.loading, BETWEEN_TRACEBACKS)
    try:
        policy = find_policy(order.subject.name)
        title = f"policy {order.subject.name}"
        require_defaults(policy, title)
        settings = check_settings(policy, title, order.subject.settings)
    except BadInput as error:
        yield Refused(str(error))
        return
    class_line = class_line_of(policy)
    subject = msgspec.structs.replace(order.subject, class_line=class_line, settings=settings)
    items = items_of(policy, order.cells)
    yield Opened(class_line, [item.name for item in items])
    outcomes: list[Outcome] = []
    end = time.monotonic() + order.limit
    for number, item in enumerate(items):
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            break
        quick = item.small and order.patience <= left
        seconds = order.patience if quick else left
        yield Began(number, seconds, quick)
        signal.setitimer(signal.ITIMER_REAL, seconds, BETWEEN_TRACEBACKS)
        outcomes.append(item.run(subject) if item.is_needed(outcomes) else Outcome(skipped=True))
        signal.setitimer(signal.ITIMER_REAL, 0)
        yield Ended(number, outcomes[-1])
    signal.setitimer(signal.ITIMER_REAL, 0)


def command(order: ChildOrder) -> list[str]:
    """Return the command that starts a child process to carry out an order, with the import path of this process.

    Raises:
        BadInput: the policy's name or a setting is not UTF-8.
    """
    try:
        told = msgspec.json.encode(order).decode()
    except UnicodeEncodeError:
        raise BadInput(
            f"policy {shown(order.subject.name)}: its name or a setting is not UTF-8: rename its file or folder"
        ) from None
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    return [sys.executable, "-P", "-c", code, told]


def message_in(line: bytes) -> Message | None:
    """Decode a line that the child wrote; None if it is not a message but a line of a traceback."""
    try:
        return _MESSAGES.decode(line)
    except msgspec.DecodeError:
        return None
