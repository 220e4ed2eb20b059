"""Worker processes of a sweep, by default one for each core; each runs many simulations, one after the other."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext

from moesched.errors import BadInput, MoeschedError, memory_refusal, report_of
from moesched.inputs.lookup import find_policy
from moesched.jobs.simulate_model import simulate_scenario
from moesched.runs.forgotten_awaits import forgotten_awaits
from moesched.runs.policy_errors import explained, is_policys
from moesched.sweeps.code_version import policy_version
from moesched.sweeps.found import SweepObjects, options_of
from moesched.sweeps.line import encode_line
from moesched.sweeps.points import Inputs
from moesched.system.plain_text import plain_text
from moesched.system.signals import ENDING

Point = tuple[str, Inputs]
"""The key of a point, and its inputs."""

MOST_DEATHS = 2
"""A point fails once this number of processes were killed while they ran it; one kill may be due to other processes."""

KILLED = f"the process that simulated it was killed, {MOST_DEATHS} times, perhaps for lack of memory"

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Workers:
    """Worker processes, each of which runs one simulation at a time; a context manager, which ends them.

    If a process is killed, another one runs its simulation again; after `MOST_DEATHS` kills the simulation counts as
    failed. Other simulations are not affected.

    Args:
        found: the models, machines, workloads and other objects that the simulations' inputs name.
        count: number of processes.
    """

    def __init__(self, found: SweepObjects, count: int) -> None:
        self._found = found
        self._count = count
        self._all: list[_Worker] = []
        self._stopped = False
        self._environment = ExitStack()

    def __enter__(self) -> Workers:
        self._environment.enter_context(_one_thread_each())
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for each in self._all:
            each.executor.shutdown(cancel_futures=True)
        self._environment.close()

    def stop(self) -> None:
        """End all processes at once. The simulations that they are running are lost."""
        self._stopped = True
        for each in self._all:
            each.kill()

    def lines(self, points: Iterable[Point]) -> Iterator[bytes]:
        """Run simulations, and yield each one's line of results, encoded, as soon as it is done.

        The lines end when all simulations are done or `stop` was called.

        Raises:
            MoeschedError: a process cannot start.
        """
        waiting = deque(points)
        running: dict[Future[bytes], tuple[_Worker, Point]] = {}
        idle = [self._start() for _ in range(min(self._count, len(waiting)))]
        deaths: Counter[str] = Counter()
        while (waiting or running) and not self._stopped:
            while idle and waiting:
                worker, point = idle.pop(), waiting.popleft()
                running[worker.submit(point)] = worker, point
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                worker, point = running.pop(future)
                if not isinstance(future.exception(), BrokenProcessPool):
                    idle.append(worker)
                    yield future.result()
                elif not self._stopped:
                    idle.append(self._replace(worker))
                    deaths[point[0]] += 1
                    if deaths[point[0]] < MOST_DEATHS:
                        waiting.appendleft(point)
                    else:
                        yield encode_line(*point, self._found.code, None, KILLED)

    def _start(self) -> _Worker:
        worker = _Worker(self._found)
        self._all.append(worker)
        return worker

    def _replace(self, worker: _Worker) -> _Worker:
        self._all.remove(worker)
        worker.kill()
        worker.executor.shutdown()
        if not worker.has_begun():
            raise MoeschedError("a process of the sweep ended before its first point: see its message above")
        return self._start()


class _Worker:
    """One worker process.

    The process ends when the parent's end of a pipe is closed: by `kill`, or because the parent process ended.
    """

    def __init__(self, found: SweepObjects) -> None:
        context: SpawnContext = get_context("spawn")
        reader, self._writer = context.Pipe(duplex=False)
        with (
            _signals_blocked()
        ):  # multiprocessing starts a process of its own, which would not survive SIGHUP
            self.executor = ProcessPoolExecutor(1, context, _begin, (reader, found))
        with _signals_blocked():
            self._begun = self.executor.submit(os.getpid)
        self._begun.add_done_callback(lambda _: reader.close())

    def submit(self, point: Point) -> Future[bytes]:
        """Have the process run a simulation; the future gives its line of results."""
        try:
            return self.executor.submit(_line_of, *point)
        except BrokenProcessPool as error:  # it was killed while it was idle
            broken: Future[bytes] = Future()
            broken.set_exception(error)
            return broken

    def has_begun(self) -> bool:
        """Test whether the process became ready to simulate, even if it has ended since."""
        return self._begun.done() and self._begun.exception() is None

    def kill(self) -> None:
        """End the process at once."""
        self._writer.close()


_found = SweepObjects()
"""The objects that the sweep's points name, in a worker process."""


def _begin(parent: Connection, found: SweepObjects) -> None:
    """Prepare a new worker process; called in that process before any simulation.

    The process ignores the signals of `ENDING`, since its parent handles them. It ends when its parent ends, and prints
    to standard error.

    Args:
        parent: the reading end of the pipe whose closing ends the process.
        found: the models, machines, workloads and other objects that the simulations' inputs name.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    threading.Thread(target=_end_with, args=(parent,), name="watches the parent", daemon=True).start()
    sys.stdout = sys.stderr
    global _found
    _found = found


def _end_with(parent: Connection) -> None:
    parent.poll(None)  # nothing is ever sent: it returns when the other end is closed
    os._exit(1)


def _line_of(key: str, inputs: Inputs) -> bytes:
    """Run a simulation, and return its line of results, encoded, with `key`; an error becomes the line's `failure`."""
    report, failure = None, None
    with forgotten_awaits() as forgotten:
        try:
            _require_unchanged(inputs["policy"])
            given = options_of(inputs)
            report = simulate_scenario(_found.scenario(inputs, given), given)
        except BaseException as error:
            report, failure = report_of(error), reason_of(forgotten[0] if forgotten else error)
    return encode_line(key, inputs, _found.code, report, failure)


@cache
def _require_unchanged(policy: str) -> None:
    """Require that this worker process loads the version of the policy named `policy` that the sweep began with.

    Raises:
        BadInput: the policy's code has changed.
    """
    if policy_version(find_policy(policy)) != _found.policies[policy]:
        raise BadInput(f"policy {policy} changed while the sweep ran: run the sweep again")


def reason_of(error: BaseException) -> str:
    """Return the text of an error as one line, for the `failure` of a line of results."""
    if refusal := memory_refusal(error):
        said = f"out of memory ({refusal})"
    elif isinstance(error, Exception) and is_policys(error):
        said = explained(error)[0]
    else:
        said = str(error) if isinstance(error, MoeschedError) else f"{type(error).__name__}: {error}"
    return " ".join(plain_text(said).split())


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """A context in which new processes use one thread in numeric libraries."""
    before = {name: os.environ[name] for name in _ONE_THREAD if name in os.environ}
    os.environ.update(_ONE_THREAD)
    try:
        yield
    finally:
        for name in _ONE_THREAD:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Return a context that blocks the signals of `ENDING`; processes started in it block them until they are ready.

    multiprocessing's own tracker process, which starts with the first worker, unblocks the signals by itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
