"""Everybody runs the same request in turn, round after round; whoever fails is left out with the reason."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import NamedTuple

from benchmarks.peers.environment import Peer
from benchmarks.peers.protocol import Message, PeerFailed, Worker
from benchmarks.shared.memory_rate import at_one_rate, memory_gbs
from moesched.calibration.timing import OtherLoad

QUIET_CORES = 0.1
QUIET_SECONDS = 0.2
PATIENCE_SECONDS = 10.0
LEAST_STEADY = 3
"""Rounds with memory at one rate that are enough to leave the others out."""


class Contestant(NamedTuple):
    """A peer with one of its settings."""

    peer: str
    setting: str
    message: Message

    @property
    def name(self) -> str:
        """Both, in words."""
        return f"{self.peer}, {self.setting}" if self.setting else self.peer


class Field:
    """The peers' processes.

    Args:
        arguments: of each process: the model's folder.
        patience: seconds to wait, at most, for a moment in which nothing else runs here, before each request.
        start: of a peer's process.
        rate: measures that of memory.

    Attributes:
        about: by peer: its versions, or why it does not run.
        patience: as given.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        *arguments: str,
        patience: float = PATIENCE_SECONDS,
        start: Callable[..., Worker] = Peer.start,
        rate: Callable[[], float] = memory_gbs,
    ) -> None:
        self.about: dict[str, Message] = {}
        self._peers = {peer.name: peer for peer in peers}
        self._arguments = arguments
        self._start = start
        self._rate = rate
        self.patience = patience
        self._workers: dict[str, Worker] = {}
        for name in self._peers:
            try:
                self.about[name] = self._worker(name).ready
            except PeerFailed as error:
                self.about[name] = {"failed": str(error)}

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers.values():
            worker.close()

    def contestants(self) -> list[Contestant]:
        """The peers that run, with each of their settings."""
        return [
            Contestant(name, setting, message)
            for name, peer in self._peers.items()
            if "failed" not in self.about[name]
            for setting, message in peer.settings.items()
        ]

    def ask(self, contestant: Contestant, request: Message) -> Message:
        """The answer, with the load of others and the bytes read from the disk meanwhile, and memory's rates around it.

        Raises:
            PeerFailed: it failed; if its process ended, the next request starts it again.
        """
        worker = self._worker(contestant.peer)
        wait_for_quiet(self.patience)
        rate = self._rate()
        load, before, started = OtherLoad(), used_seconds(worker), perf_counter()
        read_before = disk_bytes(worker)
        try:
            seconds = self._peers[contestant.peer].seconds
            answer = worker.ask({**request, "setting": contestant.message}, seconds)
        except PeerFailed:
            if worker.ended:
                self._workers.pop(contestant.peer).close()
            raise
        own = (used_seconds(worker) - before) / (perf_counter() - started)
        others = round(max(0.0, load.cores() - own), 2)
        read = disk_bytes(worker) - read_before
        return {**answer, "other_cores": others, "disk_bytes": read, "memory_gbs": [rate, self._rate()]}

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            self._workers[name] = self._start(self._peers[name], *self._arguments)
        return self._workers[name]


class Results:
    """Answers by request and contestant, one for each round."""

    def __init__(self) -> None:
        self.failed: dict[tuple[str, str], str] = {}
        self._answers: dict[tuple[str, str], list[Message]] = defaultdict(list)

    def run(self, field: Field, contestants: Sequence[Contestant], request: str, message: Message) -> None:
        """One round of a request; whoever failed it before is left out."""
        for contestant in contestants:
            if (request, contestant.name) in self.failed:
                continue
            try:
                self._answers[request, contestant.name].append(field.ask(contestant, message))
            except PeerFailed as error:
                self.failed[request, contestant.name] = str(error)

    def reasons(self, request: str) -> dict[str, str]:
        """The reasons that contestants failed a request."""
        return {name: reason for (failed, name), reason in self.failed.items() if failed == request}

    def answers(self, request: str, contestant: Contestant) -> list[Message]:
        """The answers of all rounds; none if it failed."""
        key = request, contestant.name
        return [] if key in self.failed else self._answers[key]


def wait_for_quiet(patience: float = PATIENCE_SECONDS) -> None:
    """Return when nothing else runs on this machine for a moment, or after `patience` seconds."""
    until = perf_counter() + patience
    while perf_counter() < until:
        load = OtherLoad()
        sleep(QUIET_SECONDS)
        if load.cores() < QUIET_CORES:
            return


def undisturbed(answers: Sequence[Message]) -> list[int]:
    """The rounds in which nothing else ran here, or all if there was none.

    Of these only those in which memory kept its rate, if they are enough.
    """
    quiet = [number for number, each in enumerate(answers) if each["other_cores"] < QUIET_CORES]
    kept = quiet or list(range(len(answers)))
    steady = [number for number in kept if at_one_rate(answers[number].get("memory_gbs", ()))]
    return steady if len(steady) >= LEAST_STEADY else kept


def turned(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    """The order of a round: each begins in turn."""
    first = number % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": median(values), "least": min(values), "most": max(values)}


def used_seconds(worker: Worker) -> float:
    """Processor time that a process has used; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{worker.process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def disk_bytes(worker: Worker) -> int:
    """Bytes that a process has had read from the disk; 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{worker.process_id}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
