"""A model on real hardware that serves requests by continuous batching: they join and leave between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from moesched.errors import BadInput
from moesched.inputs.files import require_safe_outputs
from moesched.inputs.lookup import find_machine
from moesched.jobs.served_options import ServedOptions
from moesched.jobs.service_trace import RequestSpans, last_steps_of, write_service_trace
from moesched.jobs.serving_plan import ServingPlan, context_of, plan_serving, require_plan, serving_job
from moesched.jobs.trace_file import files_named
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.runs.ranks import Devices, open_devices
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import serve_on
from moesched.runs.service_report import RunNames
from moesched.runs.serving import Serving, ServingListener
from moesched.seams import Observer
from moesched.serving.arrivals import Arrivals
from moesched.steps.memory import slots_of
from moesched.system.outputs import Output
from moesched.trace import LastSteps

CONTEXT = 4096
"""Default for the largest number of tokens of a prompt and its answer together."""


class ServedModel:
    """A model on its device, with a plan for as many requests as the options say.

    Attributes:
        planned: the capacity, the policy and its plan.
    """

    def __init__(
        self, given: ServedOptions, checkpoint: Checkpoint, devices: Devices, planned: ServingPlan
    ) -> None:
        self.checkpoint = checkpoint
        self.planned = planned
        self._given = given
        self._devices = devices

    @property
    def ran(self) -> RunNames:
        """Names of model, machine, policy and dtype, for a report."""
        plan = self.planned.plan
        layout, machine = plan.layout, plan.machine.name
        return RunNames(layout.config.name, machine, self.planned.policy_name, layout.dtype, measured=True)

    @property
    def pages_to_load(self) -> int:
        """The number of pages that are loaded before the first step."""
        return sum(len(slots_of(kept)) for kept in self.planned.plan.weights.resident)

    def serve(
        self,
        arrivals: Arrivals,
        listener: ServingListener | None = None,
        *,
        observers: Sequence[Observer] = (),
        keeps_history: bool = False,
    ) -> Serving:
        """Serve until no more requests arrive; at the end or after an error, write the trace if one is asked for.

        Args:
            arrivals: gives the requests as they arrive, and says when no more will come.
            listener: called for each token and each step.
            observers: called with each task that ran.
            keeps_history: whether to keep requests that have ended, for a report.

        Raises:
            BadInput: the trace cannot be written.
        """
        planned, spans = self.planned, RequestSpans(listener)
        recorder = None if self._given.trace is None else last_steps_of(planned.plan)
        setup = ServingSetup(
            planned.plan,
            planned.policy,
            planned.capacity,
            arrivals,
            self._given.admission_rule(),
            self.checkpoint.config.stop_tokens,
            listener if recorder is None else spans,
            keeps_history,
        )
        try:
            serving = serve_on(self._devices.first, setup, observers=observers, recorder=recorder)
        except BaseException:
            with suppress(BadInput):  # the error that ended the run comes first
                self._write_trace(recorder, spans)
            raise
        self._write_trace(recorder, spans)
        return serving

    def _write_trace(self, recorder: LastSteps | None, spans: RequestSpans) -> None:
        trace, planned = self._given.trace, self.planned
        if recorder is None or trace is None:
            return
        write_service_trace(
            trace,
            recorder,
            spans.ended,
            self.ran,
            planned.capacity,
            planned.plan,
            spans.tokens_per_second,
        )


@contextmanager
def served_model(
    given: ServedOptions, on_progress: Callable[[str], object] = lambda what: None
) -> Iterator[ServedModel]:
    """Yield a model on its opened device, with a plan for its requests; the device is closed at the end.

    Args:
        on_progress: called with the name of each stage of the planner's search, if it chooses the policy.

    Raises:
        BadInput: an option cannot be used, or no plan fits.
    """
    given.admission_rule()
    require_safe_outputs([Output("trace", given.trace)], files_named(given))
    checkpoint = open_checkpoint(Path(given.model))
    context = context_of(given.context, min(CONTEXT, checkpoint.config.max_positions), checkpoint.config)
    require_plan(given, checkpoint.config, context)
    machine = find_machine(given.machine, given.device, foreign=given.foreign_machine)
    job = serving_job(given, checkpoint.config, machine, device=given.device)
    with open_devices(given.device, given.device_settings, checkpoint, job.layout) as devices:
        job.use_devices(devices)
        planned = plan_serving(
            job,
            context,
            on_progress=on_progress,
        )
        yield ServedModel(given, checkpoint, devices, planned)
