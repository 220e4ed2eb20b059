"""The public names: few, locked here, and free until they are used."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import moesched
from moesched import dispatch
from moesched.policies.resident import Resident
from moesched.runs.simulation import simulate
from runs import make_plan

PUBLIC = [
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

KIT = [
    "AdaptiveReplacement",
    "CachedExperts",
    "CachedLayers",
    "Division",
    "Expert",
    "ExpertLatencies",
    "ExpertPool",
    "FollowingExperts",
    "Forecast",
    "Forecasts",
    "FrequencyClasses",
    "LaterRouters",
    "Layer",
    "LayerByLayer",
    "LayerCosts",
    "LayerDecision",
    "LayerDecisions",
    "LeastFrequentlyUsed",
    "LeastRecent",
    "LeastRecentStep",
    "LeastRecentlyUsed",
    "LeastStale",
    "Load",
    "LowestRank",
    "LowestScore",
    "NodeExperts",
    "Placement",
    "PooledExperts",
    "Popularity",
    "Predictor",
    "Prefetches",
    "Routed",
    "all_fit",
    "assign",
    "assign_by_rows",
    "attend",
    "attend_on_accelerator",
    "best_placement",
    "decide",
    "double_buffered",
    "expected_load",
    "experts_per_node",
    "experts_that_fit",
    "host_has_experts",
    "keep_beside_buffer",
    "keep_dense",
    "keep_experts",
    "leave_on_host",
    "mirrored",
    "order_of",
    "parts_for",
    "place_kv_and_dense",
    "place_kv_that_fits",
    "popularity_of",
    "run_own",
    "seconds_of",
    "split_kv",
    "tokens_of",
    "users_of",
    "warm_spare",
]


def test_the_public_names_are_these() -> None:
    assert moesched.__all__ == PUBLIC


def test_every_public_name_is_there_and_has_a_docstring() -> None:
    for name in PUBLIC:
        assert getattr(moesched, name).__doc__, name


def test_the_public_names_of_the_policy_kit_are_these() -> None:
    assert dispatch.__all__ == KIT


def test_every_name_of_the_policy_kit_is_there_and_has_a_docstring() -> None:
    for name in KIT:
        assert getattr(dispatch, name).__doc__, name


def test_other_names_are_refused() -> None:
    assert not hasattr(moesched, "no_such_name")
    assert not hasattr(dispatch, "no_such_name")


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_else_of_weight() -> None:
    heavy = {"torch", "numpy", "msgspec", "anyio", "tokenizers", "moesched.runs.planning"}
    assert not loaded_by("import moesched") & heavy


def test_importing_the_policy_kit_loads_none_of_its_pieces() -> None:
    loaded = loaded_by("import moesched.dispatch")
    assert not [name for name in loaded if name.startswith(("moesched.dispatch.", "moesched.steps", "numpy"))]


def test_the_command_line_explains_itself_without_loading_what_it_runs() -> None:
    statement = "import io, contextlib\nfrom moesched.cli.main import main\n"
    statement += "with contextlib.redirect_stdout(io.StringIO()): main(['run', '--help'])"
    assert not loaded_by(statement) & {
        "torch",
        "numpy",
        "anyio",
        "structlog",
        "tokenizers",
        "moesched.jobs.run_model",
    }


def test_help_lists_what_a_policy_reads_from_its_plan_and_step() -> None:
    seen: list[moesched.Step] = []

    class Looks(Resident):
        async def prefill(self, step: moesched.Step) -> None:
            seen.append(step)
            await super().prefill(step)

    policy = Looks()
    plan = make_plan(policy)
    simulate(plan, policy)
    for each in (plan, *seen):
        _, attributes = (inspect.getdoc(type(each)) or "").split("Attributes:")
        for name in vars(each):
            assert name.startswith("_") or re.search(rf"\b{name}\b.*:", attributes), (
                f"{type(each).__name__}.{name}"
            )
