"""A model that serves requests that join and leave, on real hardware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from moesched.errors import BadInput
from moesched.inputs.chosen_policy import PolicyGiven
from moesched.inputs.lookup import find_machine
from moesched.inputs.options import SIZES, DeviceOptions, WeightsOptions
from moesched.jobs.job import Job
from moesched.jobs.options import CostOptions, PlannedOptions
from moesched.jobs.served_options import USERS, AdmissionOptions, ContextOptions
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.options import Option
from moesched.runs.ranks import Devices, open_devices, process_of
from moesched.runs.served_runs import Service, serve_on
from moesched.runs.serving import Serving, ServingListener
from moesched.serving.arrivals import Arrivals
from moesched.serving.capacity import Capacity, capacity_for

CONTEXT = 4096
"""Tokens of a prompt and its answer together, at most, by default."""


class ServedOptions(
    AdmissionOptions, ContextOptions, CostOptions, DeviceOptions, PlannedOptions, WeightsOptions
):
    """Options of a model that serves requests."""

    policy: PolicyGiven = "resident"
    batch_size: Annotated[
        int | None,
        Option("Requests that run together, at most.", "N", group=SIZES, ge=1, le=65_536),
    ] = USERS


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

    def serve(self, arrivals: Arrivals, listener: ServingListener | None = None) -> Serving:
        """Serve until no more requests arrive."""
        service = Service(
            self._plan,
            self._policy,
            self.capacity,
            arrivals,
            self._given.admission_rule(),
            self.checkpoint.config.stop_tokens,
            listener,
        )
        return serve_on(self._devices.first, service)


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
