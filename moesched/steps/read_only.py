"""Base of objects that policies may read but not change: assigning to an attribute is an error at the policy's line."""

from __future__ import annotations

from typing import ClassVar

from moesched.errors import PolicyError


class ReadOnly:
    """Base of classes whose public attributes cannot be set once `__init__` has ended with a call of `_seal`.

    Attributes whose names begin with an underscore can always be set.
    """

    _sealed = False
    _assignable: ClassVar[frozenset[str]] = frozenset()
    """Names of properties that may be assigned, since their setters check the value."""
    _remedy: ClassVar[str] = "keep what you need in attributes of the policy"

    def _seal(self) -> None:
        self._sealed = True

    def _set(self, **attributes: object) -> None:
        """Set attributes without the check for read-only names, since that check takes most of an assignment's time."""
        vars(self).update(attributes)

    def __setattr__(self, name: str, value: object) -> None:
        if self._sealed and not name.startswith("_") and name not in self._assignable:
            raise self._is_read_only(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if self._sealed and not name.startswith("_"):
            raise self._is_read_only(name)
        object.__delattr__(self, name)

    def _is_read_only(self, name: str) -> PolicyError:
        kind = type(self).__name__
        return PolicyError(f"{name} of a {kind} cannot be changed: {self._remedy}")
