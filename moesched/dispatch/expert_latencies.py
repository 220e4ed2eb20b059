"""Latencies of an expert on each processor and of its transfer, to decide where it runs (Twiddler, Appendix A)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from moesched.drivers.sharing import fair_rates
from moesched.machines.cost import cost_model
from moesched.machines.demand import CostModel, Demand
from moesched.models.layout import Page
from moesched.models.operations import Amount
from moesched.steps.plan import Plan
from moesched.steps.roles import Role
from moesched.tasks import Work, WorkPart

MANY_ROWS = 1024


class ExpertLatencies:
    """Latencies in seconds of one expert of a plan's model on the plan's machine, without contention.

    Args:
        cost: model that gives the latencies; by default the machine's calibration, or its roofline if it has none.

    Attributes:
        transfer: moving one expert's weights from their source to the accelerator (`trans_lat`); 0 if they are there.
        at_host: computing a number of tokens on the host (`cpu_lat`).
        at_accelerator: computing a number of tokens on the accelerator, with the weights already there (`gpu_lat`).
    """

    def __init__(self, plan: Plan, cost: CostModel | None = None) -> None:
        self._cost = cost or cost_model(plan.machine, plan.layout.dtype)
        self._amount: Callable[[int], Amount] = plan.operations.fetched_expert
        self._plan = plan
        self._roles = plan.machine.roles
        self.at_host = self._known_on(self._roles.host)
        self.at_accelerator = self._known_on(self._roles.accelerator)
        source, destination = self._roles.weights, plan.memory("accelerator").name
        self.transfer = 0.0
        self._fetch: Demand | None = None
        if source != destination:
            pages = plan.layout.an_expert
            nbytes = sum(page.nbytes for page in pages)
            self._fetch = self._moved(source, destination, nbytes, len(pages))
            self.transfer = self._fetch.seconds
        self._row = plan.operations.hidden_bytes
        host = plan.memory("host").name
        self._to_host = self._line(destination, host, "offload_routed")
        self._from_host = self._line(host, destination, "load_routed")
        self._side_by_side: dict[int, tuple[float, float]] = {}

    def moving(self, pages: Sequence[Page], source: Role | None = None, to: Role = "accelerator") -> float:
        """Return the seconds to move pages in one transfer; without `source`, from where the weights live."""
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
        """Return the seconds to copy `rows` rows of expert outputs from the host to the accelerator."""
        alone, each = self._from_host
        return alone + each * rows

    def side_by_side(self, tokens: int) -> tuple[float, float]:
        """Return relative speeds of a host expert of about `tokens` tokens and a transfer beside it; 1 is alone."""
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
        """Fit a copy's latency: return its fixed seconds and its seconds per row."""
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
