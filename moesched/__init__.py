"""Write, run and compare schedules of Mixture-of-Experts inference when the weights do not fit fast memory.

Everything that the command line does is a few lines:

    import moesched
    measured = moesched.run_model("models/mine", ["Once upon"], policy="cgopipe", budgets={"host": "600MB"})
    predicted = moesched.simulate_model("mixtral-8x7b", machine="t4", policy="cgopipe", workload="mtbench")

The names are loaded when they are first used, so that `import moesched` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""True for type checkers; nothing is imported before a command has its handler of Ctrl-C."""

if TYPE_CHECKING:
    from typing import Any

    from moesched.analysis.compare import compare as compare_runs
    from moesched.analysis.roofline import roofline_of
    from moesched.analysis.roofline_picture import draw_roofline
    from moesched.calibration.calibrate import calibrate as calibrate_machine
    from moesched.cluster.cluster_jobs import run_cluster, run_local
    from moesched.errors import BadInput, MoeschedError, NodeLost, PolicyError, TaskFailed
    from moesched.jobs.profiling import profile_routing
    from moesched.jobs.report import JobReport, write_report
    from moesched.jobs.run_model import run_model
    from moesched.jobs.session import Session
    from moesched.jobs.simulate_model import simulate_model
    from moesched.jobs.sparsity import sparsity_of
    from moesched.machines import Machine, load_machine
    from moesched.machines.local import local_machine
    from moesched.models.layout import Page
    from moesched.models.prestack import prestack_model
    from moesched.models.random_model import write_random_model
    from moesched.planner import plan_model
    from moesched.reproduce import reproduce as reproduce_paper
    from moesched.requests.sampling import Sampling
    from moesched.requests.workloads import Workload, given_lengths, load_workload
    from moesched.routing.profile import read_profile as read_routing_profile
    from moesched.runs.listeners import Listener
    from moesched.steps.plan import Plan
    from moesched.steps.step import Step
    from moesched.trace import check_trace, read_trace

    __version__: str

_HOMES = {
    # what the commands do
    "run_model": "moesched.jobs.run_model",
    "run_local": "moesched.cluster.cluster_jobs",
    "run_cluster": "moesched.cluster.cluster_jobs",
    "simulate_model": "moesched.jobs.simulate_model",
    "write_random_model": "moesched.models.random_model",
    "prestack_model": "moesched.models.prestack",
    "compare_runs": "moesched.analysis.compare:compare",
    "calibrate_machine": "moesched.calibration.calibrate:calibrate",
    "plan_model": "moesched.planner",
    "roofline_of": "moesched.analysis.roofline",
    "draw_roofline": "moesched.analysis.roofline_picture",
    "profile_routing": "moesched.jobs.profiling",
    "sparsity_of": "moesched.jobs.sparsity",
    # what they take and give
    "Session": "moesched.jobs.session",
    "JobReport": "moesched.jobs.report",
    "Listener": "moesched.runs.listeners",
    "Machine": "moesched.machines",
    "Sampling": "moesched.requests.sampling",
    "Workload": "moesched.requests.workloads",
    "check_trace": "moesched.trace",
    "given_lengths": "moesched.requests.workloads",
    "load_machine": "moesched.machines",
    "load_workload": "moesched.requests.workloads",
    "local_machine": "moesched.machines.local",
    "read_routing_profile": "moesched.routing.profile:read_profile",
    "read_trace": "moesched.trace",
    "reproduce_paper": "moesched.reproduce:reproduce",
    "write_report": "moesched.jobs.report",
    # what a policy sees
    "Page": "moesched.models.layout",
    "Plan": "moesched.steps.plan",
    "Step": "moesched.steps.step",
    # what goes wrong
    "BadInput": "moesched.errors",
    "MoeschedError": "moesched.errors",
    "NodeLost": "moesched.errors",
    "PolicyError": "moesched.errors",
    "TaskFailed": "moesched.errors",
}

__all__ = [
    "BadInput",
    "JobReport",
    "Listener",
    "Machine",
    "MoeschedError",
    "NodeLost",
    "Page",
    "Plan",
    "PolicyError",
    "Sampling",
    "Session",
    "Step",
    "TaskFailed",
    "Workload",
    "calibrate_machine",
    "check_trace",
    "compare_runs",
    "draw_roofline",
    "given_lengths",
    "load_machine",
    "load_workload",
    "local_machine",
    "read_routing_profile",
    "read_trace",
    "plan_model",
    "prestack_model",
    "profile_routing",
    "reproduce_paper",
    "roofline_of",
    "run_cluster",
    "run_local",
    "run_model",
    "simulate_model",
    "sparsity_of",
    "write_random_model",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("moesched")
    if name not in _HOMES:
        raise AttributeError(f"module 'moesched' has no attribute {name!r}")
    from importlib import import_module

    module, _, original = _HOMES[name].partition(":")
    value = globals()[name] = getattr(import_module(module), original or name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
