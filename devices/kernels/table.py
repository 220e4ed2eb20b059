"""The kernel table: for each operation a list of kernels, of which the first that takes a case computes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moesched.errors import BadInput, MoeschedError
from moesched.seams import KernelRow

from .seam import OPERATIONS, Bound, Case, Kernel
from .workspace import Workspace

NOTHING = Workspace(0)
"""Workspace for kernels that use none."""


class KernelTable:
    """Chooses the kernel for a case by the case alone, so that the bits of results do not depend on the policy.

    Args:
        rows: the kernels; of the kernels for an operation, the first that takes a case computes it.

    Raises:
        BadInput: two kernels of an operation have one name, or a kernel has an operation that does not exist.
    """

    def __init__(self, rows: Sequence[Kernel]) -> None:
        self._rows: dict[str, list[Kernel]] = {name: [] for name in OPERATIONS}
        self._used: dict[str, dict[str, None]] = {}
        self._found: dict[tuple[object, ...], Kernel | None] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Kernel) -> None:
        """Append a kernel to the kernels for its operation.

        Raises:
            BadInput: the kernel's operation does not exist, or has a kernel of this name already.
        """
        require_operation(row)
        others = self._rows[row.operation]
        if any(other.name == row.name for other in others):
            raise BadInput(f"kernel {row.name}: two kernels for {row.operation} have this name: rename one")
        others.append(row)

    @property
    def rows(self) -> list[Kernel]:
        """All kernels, sorted by operation in the order of `OPERATIONS`."""
        return [row for rows in self._rows.values() for row in rows]

    @property
    def used(self) -> Mapping[str, Sequence[str]]:
        """The names of the kernels that were bound so far, by operation, in the order of `OPERATIONS`."""
        return {name: sorted(self._used[name]) for name in OPERATIONS if name in self._used}

    def find(self, case: Case) -> Kernel | None:
        """Return the first kernel that takes a case; None if none does."""
        key = case[:-2] + (id(case.layer), case.decodes)
        if key not in self._found:
            rows = self._rows[case.operation]
            self._found[key] = next((row for row in rows if not row.refusal(case)), None)
        return self._found[key]

    def require(self, case: Case) -> Kernel:
        """Return the first kernel that takes a case.

        Raises:
            MoeschedError: no kernel takes the case; the message has the reason of each kernel.
        """
        kernel = self.find(case)
        if kernel is None:
            rows = self._rows[case.operation]
            reasons = "; ".join(f"{row.name}: {row.refusal(case)}" for row in rows) or "there is none"
            raise MoeschedError(f"no kernel takes {case}: {reasons}")
        return kernel

    def bind(self, case: Case, weights: Any = None, memory: Workspace = NOTHING) -> Bound:
        """Find the first kernel that takes a case, and bind it to weights and memory; returns the resulting function.

        Raises:
            MoeschedError: no kernel takes the case; the message has the reason of each kernel.
        """
        return self.bound_to(self.require(case), case, weights, memory)

    def bound_to(self, kernel: Kernel, case: Case, weights: Any, memory: Workspace = NOTHING) -> Bound:
        """Bind a kernel to weights and memory, and list its name in `used`; returns the bound kernel, a function."""
        self._used.setdefault(case.operation, {})[kernel.name] = None
        return kernel.bind(case, weights, memory)


def require_operation(row: Kernel | type[Kernel]) -> None:
    """Raise BadInput unless the operation of a kernel, or of a class of kernels, exists."""
    if row.operation not in OPERATIONS:
        raise BadInput(
            f"kernel {row.name}: there is no operation {row.operation!r}: give one of {', '.join(OPERATIONS)}"
        )


def listed(rows: Iterable[type[Kernel]]) -> list[KernelRow]:
    """Describe classes of kernels for `moesched list kernels`, sorted by operation in the order of `OPERATIONS`."""
    given = list(rows)
    return [
        KernelRow(name, row.name, row.takes, row.problem())
        for name in OPERATIONS
        for row in given
        if row.operation == name
    ]
