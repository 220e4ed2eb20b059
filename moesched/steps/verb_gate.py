"""Decides when, and on which thread, a policy may call the verbs of a step."""

from __future__ import annotations

from threading import current_thread, get_ident

from moesched.errors import PolicyError

NOBODY = 0
"""Sentinel: no thread may call verbs."""


class VerbGate:
    """Tells whether a thread may call the verbs of a step now.

    Args:
        step: the step's name in messages.

    Attributes:
        thread: the identifier of the thread that runs the policy; `NOBODY` while the policy waits and once the step is
            over. Each verb compares it with the identifier of its own thread.
    """

    __slots__ = ("_home", "_over", "_step", "thread")

    def __init__(self, step: str) -> None:
        self._step = step
        self._over = False
        self._home = get_ident()
        self.thread = NOBODY

    def open(self) -> None:
        """Allow the current thread, which runs the policy, to call verbs."""
        self.thread = get_ident()

    def close(self) -> None:
        """Forbid verbs on all threads until the policy continues."""
        self.thread = NOBODY

    def end(self) -> None:
        """Forbid verbs on all threads, permanently, as the step is over."""
        self._over = True
        self.thread = NOBODY

    def refusal(self, verb: str) -> PolicyError:
        """Return the error for a verb that is called while its policy is not running, or on another thread."""
        own = "use the step that this prefill or decode was called with"
        if self._over:
            return PolicyError(f"{verb}: {self._step} is over: {own}")
        if self._home != get_ident():
            thread = current_thread().name
            return PolicyError(
                f"{verb}: called on thread {thread}, which does not run the policy of {self._step}: call verbs in "
                "prefill and decode themselves"
            )
        return PolicyError(
            f"{verb}: the policy of {self._step} is not running, and this is another one: {own}"
        )
