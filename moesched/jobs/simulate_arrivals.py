"""`simulate_arrivals`: predicts requests that arrive over time under a policy on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from moesched.errors import BadInput
from moesched.inputs.files import require_safe_outputs
from moesched.jobs.options import BestPolicyOptions, ScenarioOptions, TraceOptions
from moesched.jobs.scenario import Scenario, find_scenario
from moesched.jobs.served_options import REQUESTS, ArrivalsOptions
from moesched.jobs.service_trace import last_steps_of, span_of, write_service_trace
from moesched.jobs.serving_plan import context_of, plan_serving, serving_job
from moesched.jobs.simulate_model import OTHER_LENGTHS, require_context
from moesched.jobs.trace_file import files_named
from moesched.keywords import takes
from moesched.options import Option
from moesched.routing import SeededRouting
from moesched.routing.served import ServedRouting
from moesched.runs.ranks import Rank
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import simulate_serving
from moesched.runs.service_report import RunNames, ServiceReport, parse_objectives, service_report
from moesched.runs.serving import Served, Serving, ServingListener
from moesched.seams import Routing
from moesched.serving.arrival_files import POISSON, random_arrivals, read_arrivals
from moesched.serving.arrivals import ListedArrivals
from moesched.serving.request import Request
from moesched.system.input_file import is_file
from moesched.system.outputs import Output
from moesched.system.own_loop import interruptible


class ServedScenarioOptions(BestPolicyOptions, TraceOptions, ArrivalsOptions, ScenarioOptions):
    """The options of `simulate_arrivals`."""

    progress: Annotated[
        Callable[[int, int], object] | None,
        Option("Called with the number of requests that are done, and of all.", flag=""),
    ] = None


class _Progress(ServingListener):
    """Listener that calls `tell` with (requests done, all requests) after each step."""

    def __init__(self, tell: Callable[[int, int], object], requests: int) -> None:
        self._tell = tell
        self._requests = requests
        self._done = 0

    def loaded(self, serving: Serving) -> None:
        """Call `tell` with 0 requests done."""
        self._tell(0, self._requests)

    def token(self, served: Served) -> None:
        """Count a request that ends."""
        self._done += served.ending is not None

    def step(self, serving: Serving) -> None:
        """Call `tell` with the number of requests done so far."""
        self._tell(self._done, self._requests)


@takes(ServedScenarioOptions)
@interruptible()
def simulate_arrivals(given: ServedScenarioOptions) -> ServiceReport:
    """Predict requests that arrive over time on the virtual clock; needs no weights and no GPU.

    Requests join and leave between steps, under any policy of one machine, or of several that share the experts.

    Raises:
        BadInput: an argument cannot be used.
        PolicyError: the policy submitted something illegal; it is raised at the policy's line.
    """
    _require_servable(given)
    require_safe_outputs([Output("trace", given.trace)], files_named(given))
    objectives = None if given.slo is None else parse_objectives(given.slo)
    scenario = find_scenario(given)
    requests = _requests(scenario, given)
    longest = max(requests, key=lambda request: request.most_tokens)
    remedy = OTHER_LENGTHS if _are_random(given) else f"shorten it in {given.arrivals}"
    require_context([longest.prompt], longest.new_tokens, scenario.config, remedy)
    context = context_of(given.context, longest.most_tokens, scenario.config)
    job = serving_job(given, scenario.config, scenario.machine, nodes=given.nodes or 1)
    planned = plan_serving(job, context)
    for request in requests:
        planned.capacity.require(request)
    fullest = planned.capacity.fullest()
    peers = [Rank(*job.plan(fullest, node)) for node in range(1, job.nodes)]
    setup = ServingSetup(
        planned.plan,
        planned.policy,
        planned.capacity,
        ListedArrivals(requests),
        given.admission_rule(),
        listener=None if given.progress is None else _Progress(given.progress, len(requests)),
    )
    routed = job.layout.config.routed
    routing: Routing = SeededRouting(routed.experts, routed.top_k, given.seed)
    if scenario.choices is not None:
        routing = ServedRouting(scenario.choices)
    recorder = None if given.trace is None else last_steps_of(planned.plan)
    serving = simulate_serving(
        setup,
        routing=routing,
        preview_accuracy=given.preview_accuracy,
        recorder=recorder,
        peers=peers,
    )
    machine = planned.plan.machine.name
    ran = RunNames(
        scenario.config.name, machine, planned.policy_name, job.layout.dtype, measured=False, nodes=job.nodes
    )
    report = service_report(ran, serving, planned.capacity, objectives)
    if recorder is not None and given.trace is not None:
        spans = [span_of(served, serving.loaded) for served in serving.requests.values()]
        write_service_trace(
            given.trace, recorder, spans, ran, planned.capacity, planned.plan, report.tokens_per_second
        )
    return report


def _require_servable(given: ServedScenarioOptions) -> None:
    """Raise BadInput if there are no arrivals, or an option is only for batches."""
    if given.arrivals is None:
        raise BadInput("no arrivals were given: give poisson:RATE, or a file")
    for flag, is_given in {"--beams": given.beams > 1, "--padded": given.padded}.items():
        if is_given:
            raise BadInput(f"{flag} is for batches: omit it, or --arrivals")


def _requests(scenario: Scenario, given: ServedScenarioOptions) -> list[Request]:
    assert given.arrivals is not None, "that was checked before"
    if not _are_random(given):
        path = Path(given.arrivals)
        if is_file(path):
            _refuse_other_lengths(given)
        return read_arrivals(path)
    workload = scenario.given_workload()
    new_tokens = workload.new_tokens[0] if given.gen is None else given.gen
    prompts = workload.lengths(given.requests or REQUESTS, given.seed)
    return random_arrivals(str(given.arrivals), prompts, new_tokens, given.seed)


def _are_random(given: ServedScenarioOptions) -> bool:
    return str(given.arrivals).startswith(POISSON)


def _refuse_other_lengths(given: ServedScenarioOptions) -> None:
    """Raise BadInput if the options describe requests that a file of arrivals describes already."""
    described = {"--workload": given.workload, "--gen": given.gen, "--requests": given.requests}
    for flag, value in described.items():
        if value is not None:
            raise BadInput(f"--arrivals names a file, which has each request's tokens: omit {flag}")
