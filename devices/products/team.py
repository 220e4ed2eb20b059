"""A team of threads for independent jobs of a task; functions that set the number of cores that torch uses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

Job = Callable[[], object]

_own = threading.local()


def use_cores(count: int) -> None:
    """Set the number of cores that torch uses for the calling thread's operations."""
    if getattr(_own, "cores", 0) != count:
        torch.get_num_threads()  # a thread's first call takes over the process's number, and must not come later
        torch.set_num_threads(count)
        _own.cores = count


@contextmanager
def one_core() -> Iterator[None]:
    """Make torch use one core while the context lasts, for operations whose bits may depend on the number of cores."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Team:
    """A team of threads, the caller's included, that take jobs from a list until none is left.

    Torch itself cuts every product into as many parts as there are cores, and waits for the slowest: dozens of times in
    a layer. Where other lanes keep a core busy, such a wait was measured to take several milliseconds. With whole
    experts as jobs there is one wait in a layer.

    cores: number of cores that the jobs may use together.
    """

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self._helpers = [_Helper() for _ in range(cores - 1)]
        self._free = threading.Lock()

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs, in any order; after an error, jobs that have not begun are dropped, and the error is raised.

        The cores are divided evenly among the jobs. If the team is busy for another lane (queue of tasks), the caller
        runs its jobs alone.
        """
        use_cores(max(1, self.cores // max(1, len(jobs))))
        if len(jobs) < 2 or not self._free.acquire(blocking=False):
            for job in jobs:
                job()
            return
        try:
            self._share(jobs)
        finally:
            self._free.release()

    def close(self) -> None:
        """End the team's threads."""
        for helper in self._helpers:
            helper.close()
        self._helpers = []

    def _share(self, jobs: Sequence[Job]) -> None:
        pending = deque(jobs)
        called = self._helpers[: len(jobs) - 1]
        for helper in called:
            helper.give(pending, self.cores // len(jobs))
        error = _work_off(pending)
        errors = [error, *[helper.wait() for helper in called]]
        _raise_first(errors)


class _Helper:
    """A helper thread of a team, which waits for jobs on raw locks: these wake a thread with the least delay."""

    def __init__(self) -> None:
        self._pending: deque[Job] | None = None
        self._cores = 1
        self._error: BaseException | None = None
        self._given, self._done = threading.Lock(), threading.Lock()
        self._given.acquire()
        self._done.acquire()
        self._thread = threading.Thread(target=self._serve, name="team", daemon=True)
        self._thread.start()

    def give(self, pending: deque[Job], cores: int) -> None:
        self._pending, self._cores = pending, max(1, cores)
        self._given.release()

    def wait(self) -> BaseException | None:
        self._done.acquire()
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        self._pending = None
        self._given.release()
        self._thread.join()

    def _serve(self) -> None:
        with torch.inference_mode():
            while True:
                self._given.acquire()
                pending = self._pending
                if pending is None:
                    return
                use_cores(self._cores)
                self._error = _work_off(pending)
                self._pending = pending = None
                self._done.release()


def _work_off(pending: deque[Job]) -> BaseException | None:
    """Run pending jobs until none is left; after an error, drops the other jobs and returns the error, else None."""
    while True:
        try:
            job = pending.popleft()
        except IndexError:
            return None
        try:
            job()
        except BaseException as error:
            pending.clear()
            return error


def _raise_first(errors: Iterable[BaseException | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
