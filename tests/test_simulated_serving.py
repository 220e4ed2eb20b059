"""Serving on the virtual clock: who joins which step, who waits, and who leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines import load_machine
from moesched.plugins import make_policy
from moesched.runs.planning import plan_run
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import simulate_serving
from moesched.runs.service_report import RunNames, service_report
from moesched.runs.serving import Serving
from moesched.serving.admission import ShortestPrompt
from moesched.serving.arrivals import ListedArrivals
from moesched.serving.request import Request
from moesched.tasks import Task
from moesched.testing.served_checks import check_served, random_requests
from runs import Ended
from served_requests import CAPACITY, LAYOUT, planned, request


def test_between_two_parts_of_a_long_prompt_the_others_get_a_token() -> None:
    policy, ended = make_policy("resident"), Ended()
    requests = [request(0, prompt=2, new_tokens=12), request(1, prompt=20, new_tokens=1, arrives=1)]
    capacity = replace(CAPACITY, places=1, chunk=5)
    setup = ServingSetup(planned(policy, capacity), policy, capacity, ListedArrivals(requests))
    serving = simulate_serving(setup, observers=[ended])
    assert steps_of(ended.tasks) == ["prefill", *["decode", "prefill"] * 4, *["decode"] * 7]
    assert [len(serving.requests[number].tokens) for number in range(2)] == [12, 1]


def test_one_who_leaves_between_two_parts_of_its_prompt_gives_its_blocks_to_others() -> None:
    policy = make_policy("resident")
    capacity = replace(CAPACITY, places=1, chunk=1)
    requests = [request(number, prompt=20, arrives=number) for number in range(4)]
    arrivals = ListedArrivals(requests, [(0, 100_000)])
    serving = simulate_serving(ServingSetup(planned(policy, capacity), policy, capacity, arrivals))
    assert (serving.requests[0].ending, serving.requests[0].tokens) == ("left", [])
    assert [len(serving.requests[number].tokens) for number in range(1, 4)] == [3, 3, 3]
    assert serving.held == 0


@pytest.mark.parametrize("name", ["resident", "expert_streaming", "expert_cache"])
def test_policies_serve_prompts_that_are_cut_over_steps(name: str) -> None:
    policy, capacity = make_policy(name), replace(CAPACITY, chunk=5)
    check_served(policy, planned(policy, capacity), capacity, random_requests(3, 20, 8, 10))


def simulated(
    requests: Sequence[Request], departures: Sequence[tuple[int, int]] = (), name: str = "resident"
) -> tuple[Serving, list[Task]]:
    policy, ended = make_policy(name), Ended()
    setup = ServingSetup(planned(policy), policy, CAPACITY, ListedArrivals(requests, departures))
    return simulate_serving(setup, observers=[ended]), ended.tasks


def steps_of(tasks: Sequence[Task]) -> list[str]:
    """Return the phase of each step."""
    phases = {task.step: str(task.phase) for task in tasks if task.verb == "embed"}
    return [phases[step] for step in sorted(phases)]


def test_prompts_go_first_with_a_step_of_tokens_between_two_steps_of_prompts() -> None:
    _, tasks = simulated([request(number, prompt=24, new_tokens=3) for number in range(4)])
    assert steps_of(tasks)[:5] == ["prefill", "decode", "prefill", "decode", "decode"]


def test_nothing_runs_until_a_request_arrives_and_times_count_from_the_loaded_weights() -> None:
    serving, tasks = simulated([request(0, arrives=5_000_000)])
    first = next(task for task in tasks if task.verb == "embed")
    assert first.start == serving.loaded + 5_000_000
    served = serving.requests[0]
    assert served.entered == 5_000_000
    assert served.times[0] > 5_000_000
    assert served.ending == "length"
    assert served.ended == served.times[-1]


def test_a_request_that_waits_for_a_place_enters_once_blocks_are_free() -> None:
    serving, _ = simulated([request(number, prompt=20, new_tokens=12) for number in range(8)])
    entered = [serving.requests[number].entered for number in range(8)]
    assert max(serving.occupancy.held) <= 2 * CAPACITY.cache_tokens
    assert max(serving.occupancy.waiting) > 0
    assert entered == sorted(entered)
    assert all(len(served.tokens) == 12 for served in serving.requests.values())


def test_requests_run_from_their_place_to_their_last_token_and_none_run_in_between() -> None:
    serving, _ = simulated([request(0), request(1, arrives=10**12), request(2, arrives=10**12, new_tokens=1)])
    in_places = sum(each.ended - each.entered for each in serving.requests.values())
    mean, most = service_report(RunNames("", "", "", "", measured=False), serving, CAPACITY, None).running
    assert mean == pytest.approx(in_places / serving.occupancy.times[-1])
    assert most == 2


def test_one_who_leaves_takes_part_in_one_more_step_at_most() -> None:
    stay, _ = simulated([request(0, new_tokens=8)])
    time = stay.requests[0].times[3] + 1
    serving, tasks = simulated([request(0, new_tokens=8)], [(0, time)])
    served = serving.requests[0]
    assert (served.ending, served.ended) == ("left", serving.occupancy.times[4])
    assert served.tokens == [0] * 5
    assert steps_of(tasks) == ["prefill"] + ["decode"] * 5


def test_one_who_leaves_while_it_waits_never_runs() -> None:
    requests = [request(number, prompt=20, new_tokens=12) for number in range(8)]
    serving, _ = simulated(requests, [(7, 1)])
    assert serving.requests[7].tokens == []
    assert serving.requests[7].ending == "left"
    assert serving.requests[7].entered == -1
    assert all(served.ending == "length" for served in list(serving.requests.values())[:7])


def test_admission_chooses_who_runs_first() -> None:
    policy = make_policy("resident")
    requests = [request(number, prompt=24 - 4 * number) for number in range(4)]
    setup = ServingSetup(planned(policy), policy, CAPACITY, ListedArrivals(requests), ShortestPrompt())
    serving = simulate_serving(setup)
    times = [serving.requests[number].times[0] for number in range(4)]
    assert times == sorted(times, reverse=True)
    assert times[3] < times[0]


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (lambda waiting: [], "of Own lacks request 0, which waits"),
        (lambda waiting: None, "of Own is None"),
        (lambda waiting: [each.number for each in waiting], "of Own has 0, which is no request"),
        (lambda waiting: [*waiting, waiting[0]], "of Own has request 0, which does not wait, or has it twice"),
        (lambda waiting: [request(9), *waiting], "of Own has request 9, which does not wait"),
    ],
)  # fmt: skip
def test_an_order_of_admission_that_is_none_of_the_waiting_requests_is_refused(order: Any, said: str) -> None:
    class Own:
        def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
            return order(waiting)  # type: ignore[no-any-return]  # as an author may forget

        def entered(self, request: Request) -> None: ...

    policy = make_policy("resident")
    arrivals = ListedArrivals([request(0, prompt=4)])
    with pytest.raises(BadInput, match=f"the order of admission {said}.*return each waiting request once"):
        simulate_serving(ServingSetup(planned(policy), policy, CAPACITY, arrivals, Own()))


def test_a_pipeline_serves_no_requests() -> None:
    machine, policy = load_machine("t4x4"), make_policy("flexgen_pipeline")
    plan = plan_run(machine, LAYOUT, CAPACITY.fullest(), policy)
    with pytest.raises(BadInput, match="FlexGenPipeline is for several accelerators"):
        simulate_serving(ServingSetup(plan, policy, CAPACITY, ListedArrivals([request(0)])))
