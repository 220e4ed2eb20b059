"""The messages of the engine's process to the front."""

from __future__ import annotations

from moesched.plugins import make_policy
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import simulate_serving
from moesched.server.engine import TokenSender
from moesched.server.messages import Ready, State, ToFront
from moesched.serving.arrivals import ListedArrivals
from served_requests import CAPACITY, planned, request

READY = Ready("small", "resident", None, "t4", 2, 3, 6 * 16, 24, 32, 256)


def test_the_last_state_of_an_idle_engine_has_all_of_its_steps() -> None:
    sent: list[ToFront] = []
    policy = make_policy("resident")
    requests = [request(number, new_tokens=1, arrives=number * 10**9) for number in range(3)]
    setup = ServingSetup(
        planned(policy),
        policy,
        CAPACITY,
        ListedArrivals(requests),
        listener=TokenSender(sent.extend, READY, CAPACITY),
    )
    serving = simulate_serving(setup)
    states = [each for each in sent if isinstance(each, State)]
    assert (states[-1].steps, states[-1].running, states[-1].held) == (serving.steps, 0, 0)
    assert states[-1].busy["accelerator"] == serving.busy["accelerator"] / 1e9
    assert serving.steps == 3
