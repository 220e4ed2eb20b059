"""Computes the latencies of an expert on host and accelerator, and of moving its weights (Twiddler, Appendix A).

Policies compare these latencies to decide on which processor an expert runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from moesched.drivers.sharing import fair_rates
from moesched.machines.cost import cost_model
from moesched.machines.cost_model import CostModel
from moesched.models.layout import Page
from moesched.models.operations import Amount
from moesched.steps.plan import Plan
from moesched.steps.roles import Role
from moesched.work import Demand, Work, WorkPart

MANY_ROWS = 1024


class ExpertLatencies:
    """Latencies in seconds of one expert of a plan's model on the plan's machine, if nothing else runs.

    Args:
        plan: the plan, which has the model and the machine.
        cost: cost model that gives the latencies; None for the machine's calibration or, without one, its roofline.

    Attributes:
        transfer: seconds to move one expert's weights from the host's memory to the accelerator (`trans_lat` in the
            paper). If host and accelerator share one memory: seconds to read the weights from the memory where all
            weights are kept, such as the disk; 0 if they are kept in the shared memory.
        at_host: function from a number of tokens to the seconds of one expert on the host (`cpu_lat`).
        at_accelerator: function from a number of tokens to the seconds of one expert on the accelerator, whose memory
            has the expert's weights (`gpu_lat`).
    """

    def __init__(self, plan: Plan, cost: CostModel | None = None) -> None:
        self._cost = cost or cost_model(plan.machine, plan.layout.dtype)
        self._amount: Callable[[int], Amount] = plan.operations.fetched_expert
        self._plan = plan
        self._roles = plan.machine.roles
        self.at_host = self._known_on(self._roles.host)
        self.at_accelerator = self._known_on(self._roles.accelerator)
        destination, host = plan.memory("accelerator").name, plan.memory("host").name
        source = self._roles.weights if plan.machine.unified else host
        self.transfer = 0.0
        self._fetch: Demand | None = None
        if source != destination:
            pages = plan.layout.an_expert
            nbytes = sum(page.nbytes for page in pages)
            self._fetch = self._moved(source, destination, nbytes, len(pages))
            self.transfer = self._fetch.seconds
        self._row = plan.operations.hidden_bytes
        self._to_host = self._line(destination, host, "offload_routed")
        self._from_host = self._line(host, destination, "load_routed")
        self._side_by_side: dict[int, tuple[float, float]] = {}

    def moving(self, pages: Sequence[Page], source: Role | None = None, to: Role = "accelerator") -> float:
        """Return the seconds to move pages in one transfer; 0 if source and destination are the same memory.

        Args:
            source: the memory that pages are read from; None for the memory where all weights are kept.
            to: the memory that pages are written to.
        """
        memory = self._roles.weights if source is None else self._plan.memory(source).name
        destination = self._plan.memory(to).name
        if memory == destination:
            return 0.0
        return self._moved(memory, destination, sum(page.nbytes for page in pages), len(pages)).seconds

    def to_host(self, tokens: int) -> float:
        """Return the seconds to copy the hidden states of `tokens` tokens from the accelerator to the host."""
        alone, each = self._to_host
        return alone + each * tokens

    def from_host(self, rows: int) -> float:
        """Return the seconds to copy `rows` outputs, each of one expert for one token, from host to accelerator."""
        alone, each = self._from_host
        return alone + each * rows

    def side_by_side(self, tokens: int) -> tuple[float, float]:
        """Return the speeds of an expert on the host and of a transfer of weights while both run.

        The speed of running alone is 1. Both speeds are lower if the expert and the transfer share the bandwidth of
        host memory.

        tokens: number of the expert's tokens; the speeds are those for this number rounded up to a power of two.

        Returns:
            (speed of the expert, speed of the transfer).
        """
        about = 1 << (tokens - 1).bit_length()
        rates = self._side_by_side.get(about)
        if rates is None:
            rates = 1.0, 1.0
            if self._fetch is not None:
                host, link = fair_rates([self._computed(self._roles.host, about), self._fetch])
                rates = host, link
            self._side_by_side[about] = rates
        return rates

    def _known_on(self, processor: str) -> Callable[[int], float]:
        """Return a cached function from a number of tokens to an expert's latency in seconds on a processor."""
        return cache(lambda tokens: self._computed(processor, tokens).seconds)

    def _computed(self, processor: str, tokens: int) -> Demand:
        flops, nbytes, parts, rate = self._amount(tokens)
        at = "host" if processor == self._roles.host else "accelerator"
        return self._cost.work(Work(f"expert at {at}", processor, flops, nbytes, tokens, parts, rate))

    def _line(self, source: str, destination: str, kind: str) -> tuple[float, float]:
        """Fit a line to the latency of copying rows from one memory to another.

        Args:
            source, destination: names of the memories.
            kind: kind of task that copies the rows, such as "load_routed".

        Returns:
            (seconds that each copy takes whatever its size, further seconds per row).
        """
        if source == destination:
            return 0.0, 0.0
        one, many = (
            self._moved(source, destination, rows * self._row, kind=kind).seconds for rows in (1, MANY_ROWS)
        )
        each = max(0.0, many - one) / (MANY_ROWS - 1)
        return one - each, each

    def _moved(
        self, source: str, destination: str, nbytes: int, pieces: int = 1, *, kind: str = ""
    ) -> Demand:
        link = f"{source}->{destination}"
        parts = (WorkPart(link, nbytes / pieces, pieces),)
        return self._cost.work(Work(kind or link, link, nbytes=nbytes, parts=parts))
