"""What an expert takes here or there, and what moving it takes: what decides where it runs (Twiddler, Appendix A)."""

from __future__ import annotations

from collections.abc import Callable

from moesched.cost import cost_model
from moesched.models.operations import Amount
from moesched.plan import Plan
from moesched.seams import CostModel
from moesched.tasks import Part, Work


class ExpertLatencies:
    """Seconds of one expert of a plan's model on the plan's machine, each alone.

    Args:
        cost: by default what the plan's machine was calibrated to, or its roofline.

    Attributes:
        transfer: of one expert's weights, from where weights come from to the accelerator (`trans_lat`).
    """

    def __init__(self, plan: Plan, cost: CostModel | None = None) -> None:
        self._cost = cost or cost_model(plan.machine, plan.layout.dtype)
        self._amount: Callable[[int], Amount] = plan.operations.fetched_expert
        self._roles = plan.machine.roles
        self._at_host: dict[int, float] = {}
        self._at_accelerator: dict[int, float] = {}
        source, destination = self._roles.weights, plan.memory("accelerator").name
        self.transfer = 0.0
        if source != destination:
            link = f"{source}->{destination}"
            pages = plan.layout.expert(0, 0)
            nbytes = sum(page.nbytes for page in pages)
            parts = (Part(link, nbytes / len(pages), len(pages)),)
            self.transfer = self._cost.work(Work(link, link, nbytes=nbytes, parts=parts)).seconds

    def at_host(self, tokens: int) -> float:
        """Of so many tokens on the host (`cpu_lat`)."""
        return self._known(self._at_host, self._roles.host, tokens)

    def at_accelerator(self, tokens: int) -> float:
        """Of so many tokens on the accelerator, its weights being there (`gpu_lat`)."""
        return self._known(self._at_accelerator, self._roles.accelerator, tokens)

    def _known(self, known: dict[int, float], processor: str, tokens: int) -> float:
        seconds = known.get(tokens)
        if seconds is None:
            flops, nbytes, parts = self._amount(tokens)
            work = Work("expert", processor, flops, nbytes, tokens, parts)
            seconds = known[tokens] = self._cost.work(work).seconds
        return seconds
