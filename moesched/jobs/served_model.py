"""A model that serves requests that join and leave, on real hardware."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moesched.errors import BadInput
from moesched.inputs.lookup import find_machine
from moesched.jobs.job import Job
from moesched.jobs.served_options import USERS, ServedOptions
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.runs.ranks import Devices, open_devices, process_of
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import serve_on
from moesched.runs.serving import Serving, ServingListener
from moesched.seams import Observer
from moesched.serving.arrivals import Arrivals
from moesched.serving.capacity import Capacity, capacity_for
from moesched.steps.memory import slots_of

CONTEXT = 4096
"""Tokens of a prompt and its answer together, at most, by default."""


class ServedModel:
    """A model on its device, with a plan for as many requests as the options say.

    Attributes:
        capacity: the most that requests may take.
        policy_name: the policy's name.
    """

    def __init__(self, given: ServedOptions, checkpoint: Checkpoint, job: Job, devices: Devices) -> None:
        self.checkpoint = checkpoint
        self._given = given
        self._devices = devices
        self._job = job
        config = checkpoint.config
        context = given.context or min(CONTEXT, config.max_positions)
        if context > config.max_positions:
            raise BadInput(
                f"--context is {context:,}, and that of {config.name} is {config.max_positions:,}: give at most that"
            )
        users = given.batch_size or USERS
        lengths = [context // 2] * users
        sizes = job.sizes(lengths, context - context // 2, devices.slot_bytes, successive=False)
        self.capacity: Capacity = capacity_for(sizes, context)
        self._plan, self._policy = job.plan(self.capacity.fullest(), devices.slot_bytes)
        self.policy_name = job.policy_name
        self.machine_name = job.machine.name

    @property
    def pages_to_load(self) -> int:
        """The number of pages that are loaded before the first step."""
        return sum(len(slots_of(kept)) for kept in self._plan.weights.resident)

    def serve(
        self,
        arrivals: Arrivals,
        listener: ServingListener | None = None,
        *,
        observers: Sequence[Observer] = (),
        keeps_history: bool = False,
    ) -> Serving:
        """Serve until no more requests arrive.

        Args:
            listener: told of each token and each step.
            observers: told of each task that ran.
            keeps_history: whether to keep requests that have ended, for a report.
        """
        setup = ServingSetup(
            self._plan,
            self._policy,
            self.capacity,
            arrivals,
            self._given.admission_rule(),
            self.checkpoint.config.stop_tokens,
            listener,
            keeps_history,
        )
        return serve_on(self._devices.first, setup, observers=observers)


@contextmanager
def served_model(given: ServedOptions) -> Iterator[ServedModel]:
    """Open a model and its device, and plan for its requests; both are closed at the end.

    Raises:
        BadInput: an option cannot be used, or the plan does not fit.
    """
    given.admission_rule()
    checkpoint = open_checkpoint(Path(given.model))
    machine = find_machine(given.machine, given.device, foreign=given.foreign_machine)
    job = Job(given, checkpoint.config, machine, device=given.device)
    with open_devices(given.device, given.device_settings, checkpoint, job.layout) as devices:
        job.use_process(process_of(devices.all, job.machine))
        yield ServedModel(given, checkpoint, job, devices)
