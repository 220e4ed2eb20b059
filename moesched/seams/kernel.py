"""The seam of kernels, and of devices that list their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@runtime_checkable
class NamesKernels(Protocol):
    """A device that has several kernels for an operation."""

    @property
    def kernels(self) -> Mapping[str, Sequence[str]]:
        """The names of the kernels that ran so far, by operation."""


class KernelRow(NamedTuple):
    """A row of a device's table of kernels.

    Attributes:
        takes: the cases that the kernel computes, in words.
        problem: the reason why it computes none on this machine; None where it does.
    """

    operation: str
    name: str
    takes: str
    problem: str | None


@runtime_checkable
class ListsKernels(Protocol):
    """A device whose table of kernels can be read without a model."""

    @staticmethod
    def kernel_rows() -> Sequence[KernelRow]:
        """Return the rows of all operations. Of an operation's rows, the first that takes a case computes it."""


class Kernel(Protocol):
    """A third-party kernel, for one operation; see `moesched.devices.kernels.seam`."""

    def refusal(self, case: Any) -> str:
        """Return the reason why the kernel does not take a case; empty if it does."""

    def bind(self, case: Any, weights: Any, memory: Any) -> Callable[..., Any]:
        """Make the function that computes a case, with these weights and with results in `memory`, a `Workspace`.

        Called only for cases that the kernel takes. The function may be called often.
        """
