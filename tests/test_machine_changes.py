"""A machine changed in words, and what a run then does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from commands import SIMULATE
from moesched.errors import BadInput
from moesched.machines import load_machine
from moesched.machines.changes import changed
from moesched.machines.profiles import COST_FORMAT

T4 = load_machine("t4")


def test_links_of_a_lane_get_another_bandwidth_together() -> None:
    machine = changed(T4, ["link.host->gpu=24GB/s"])
    assert {link.bandwidth for link in machine.links if link.lane == "host->gpu"} == {24e9}
    assert {link.bandwidth for link in machine.links if link.lane == "gpu->host"} == {12e9}
    assert machine.name == "t4 with link.host->gpu=24GB/s"
    assert T4.name == "t4"


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("link.gpu->host.latency=20us", lambda machine: machine.link("gpu", "host").latency == 20e-6),
        ("link.gpu->host=x0.5", lambda machine: machine.link("gpu", "host").bandwidth == 6e9),
        ("memory.gpu=24GB", lambda machine: machine.memories["gpu"].capacity == 24e9),
        ("memory.gpu.capacity=x2", lambda machine: machine.memories["gpu"].capacity == 30720 * 2**20),
        ("memory.host.bandwidth=0.2TB/s", lambda machine: machine.memories["host"].bandwidth == 200e9),
        ("processor.gpu.flops=130TFLOP/s", lambda machine: machine.peak("gpu", "float32") == 130e12),
        ("processor.gpu=x2", lambda machine: machine.peak("gpu", "float32") == 16.2e12),
        ("processor.cpu.launch_seconds=1ms", lambda machine: machine.host.launch_seconds == 1e-3),
        ("processor.gpu.handover_seconds=1ms", lambda machine: machine.accelerator.handover_seconds == 1e-3),
        ("link.host->pinned=40GB/s", lambda machine: machine.staging.bandwidth == 40e9),
        ("processor.cpu.expert_bandwidth=50GB/s", lambda machine: machine.host.expert_bandwidth == 50e9),
    ],
)
def test_each_property_can_be_changed_by_value_or_by_factor(change: str, value: Any) -> None:
    assert value(changed(T4, [change]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("host->gpu=24GB/s", "changes no link, memory or processor: write, for instance, link"),
        ("link.host->gpu", "changes no link, memory or processor"),
        ("link.disk=24GB/s", r"machine t4 has no link 'disk', only host->gpu, gpu->host, host->pinned"),
        ("memory.vram=24GB", "has no memory 'vram', only gpu, host"),
        ("processor.gpu.clock=2GHz", "a processor has no 'clock', only flops"),
        ("link.host->gpu=fast", "'fast' is not a size in bytes"),
        ("link.host->gpu=0GB/s", "'0GB/s' is not a rate: write a number and a unit, such as 24GB/s"),
        ("processor.gpu=65", "'65' is not a number of operations per second"),
        ("link.host->gpu.latency=soon", "'soon' is not a time: write a number and a unit"),
        ("processor.gpu=1e30TFLOP/s", r"processors\.gpu\.flops\.bfloat16 is 1e\+42: give a rate from 1 on"),
        (
            "memory.gpu=0GB",
            r"memories\.gpu\.capacity is 0, of which 700MB is reserved: give a capacity that leaves",
        ),
        ("link.host->gpu=x1e9", "'x1e9' is not a size in bytes"),
        ("processor.gpu.expert_bandwidth=x2", "the machine does not give it: give a value"),
    ],
)
def test_what_a_machine_does_not_have_or_cannot_be_read_is_refused(change: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        changed(T4, [change])


def test_measured_costs_do_not_follow_from_rates() -> None:
    point = {"operation": "copy", "size": 1, "seconds": 1}
    costs = {"cost_format": COST_FORMAT, "cost_table": [point]}
    measured = msgspec.convert({**msgspec.to_builtins(T4), **costs}, type(T4))
    with pytest.raises(BadInput, match="the costs of machine t4 were measured"):
        changed(measured, ["link.host->gpu=x2"])
    assert changed(measured, ["memory.gpu=24GB"]).memories["gpu"].capacity == 24e9


def test_a_policy_decides_anew_on_the_changed_machine(command: Any) -> None:
    sizes = ("--policy", "layer_streaming", "--batch-size", 2, "--gen", 3, "--budget", "gpu=700MB", "--json")
    before = command(*SIMULATE, *sizes).json
    after = command(*SIMULATE, *sizes, "--machine-set", "link.host->gpu=x2").json
    assert after["machine"] == "t4 with link.host->gpu=x2"
    assert after["decode_tokens_per_second"] > 1.5 * before["decode_tokens_per_second"]
