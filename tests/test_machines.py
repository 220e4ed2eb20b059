"""Machine profiles: those that ship are complete and say where their figures come from, and broken ones are refused."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commands import SIMULATE
from moesched.cli.main import main
from moesched.errors import BadInput
from moesched.machines import AcceleratorGroup, Interconnect, load_machine, machine_names, parse_machine
from moesched.machines.changes import changed
from moesched.machines.cost import cost_model
from moesched.machines.networks import NETWORK, Network, load_network, network_names
from moesched.machines.profiles import COST_FORMAT
from moesched.machines.roofline import Roofline
from moesched.machines.sustained import at_peak
from moesched.machines.toml_text import machine_toml
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.work import Work
from tables import table

PROMISED = {
    "t4", "t4x2", "t4x4", "l4", "l4x2", "l4x4", "a100-80g", "a100-80gx2", "rtx6000", "rtx6000-ada", "h100", "h200",
    "m2-ultra", "cpu-nvme",
}  # fmt: skip
SOURCES = re.compile(
    r"assumed|measured there|data sheet|table \d|section \d|apple's page|intel's .* page", re.IGNORECASE
)


def profile(name: str) -> str:
    """The text of a profile that ships."""
    return (resources.files("moesched.machines") / f"{name}.toml").read_text()


def test_the_profiles_that_others_rely_on_ship() -> None:
    assert set(machine_names()) >= PROMISED


@pytest.mark.parametrize("name", machine_names())
def test_a_profile_is_complete(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert machine.description
    for processor in machine.processors.values():
        assert processor.flops.keys() >= {"bfloat16", "float32"}
    assert machine.link(machine.roles.weights, machine.roles.pinned or machine.accelerator.memory)
    if not machine.unified:
        assert machine.link(machine.host.memory, machine.accelerator.memory)
        assert machine.link(machine.accelerator.memory, machine.host.memory)


@pytest.mark.parametrize("name", machine_names())
def test_every_figure_of_a_profile_states_its_source(name: str) -> None:
    """Tables stand apart from each other; a link without a comment repeats figures of the one before it."""
    explained: set[str] = set()
    for block in profile(name).split("\n\n"):
        figures = {
            line
            for line in block.splitlines()
            if re.match(r'\w+ = "?[0-9.]', line) and "# assumed" not in line
        }
        if SOURCES.search(block):
            explained |= figures
        assert figures <= explained, block


@pytest.mark.parametrize("policy", ["layer_streaming", "cgopipe"])
@pytest.mark.parametrize("name", machine_names())
def test_policies_can_be_simulated_on_every_profile(name: str, policy: str) -> None:
    planned = make_policy(policy)
    layout = weight_layout(SHAPES["mixtral-0.8b"])
    plan = plan_run(load_machine(name), layout, split_batch([5] * 4, 3, 2), planned)
    assert simulate(plan, planned).prefill_seconds > 0


@pytest.mark.parametrize(
    ("name", "count", "joined_by"),
    [("t4", 1, None), ("t4x2", 2, 12e9), ("t4x4", 4, 12e9), ("a100-80gx2", 2, 300e9)],
)
def test_a_group_of_accelerators_has_a_count_and_an_interconnect(
    name: str, count: int, joined_by: float | None
) -> None:
    group = load_machine(name).accelerator_group
    assert group.count == count
    assert (group.interconnect.bandwidth if group.interconnect else None) == joined_by


def test_the_gpus_of_a_group_are_those_of_the_single_machine() -> None:
    for single, group in (("t4", "t4x2"), ("t4", "t4x4"), ("l4", "l4x4"), ("a100-80g", "a100-80gx2")):
        one, many = load_machine(single), load_machine(group)
        assert many.accelerator == one.accelerator
        assert many.memories["gpu"] == one.memories["gpu"]
        assert many.link("host", "gpu") == one.link("host", "gpu")


def test_a_rate_that_a_processor_has_not_is_named() -> None:
    machine = parse_machine(profile("t4").replace("bfloat16 = 65e12\n", "").encode(), "text")
    with pytest.raises(
        BadInput, match="machine t4: processor gpu has no rate for bfloat16: add it to its flops"
    ):
        Roofline(machine, "bfloat16").work(Work("expert", "gpu", flops=1.0))
    with pytest.raises(BadInput, match="processor gpu has no rate for bfloat16"):
        cost_model(machine, "bfloat16")


BROKEN = table("broken_files.md", "Machines")  # fmt: skip


@pytest.mark.parametrize(("good", "bad", "said"), BROKEN)
def test_a_broken_profile_is_refused_with_its_file_and_key(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, good: str, bad: str, said: str
) -> None:
    file = tmp_path / "mine.toml"
    text = profile("t4")
    assert good in text
    file.write_text(text.replace(good, bad, 1))
    code = main(["roofline", "--model", "mixtral-8x7b", "--machine", str(file)])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"moesched: {re.escape(str(file))}: {said}[^\n]*\n", err), err


def test_accelerators_that_share_the_host_s_memory_cannot_be_several() -> None:
    text = profile("m2-ultra") + "[accelerator_group]\ncount = 2\n"
    with pytest.raises(BadInput, match=r"text: accelerator_group\.count: .*memories of their own"):
        parse_machine(text.encode(), "text")


def test_list_shows_sizes_and_link_rates(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "machines"]) == 0
    lines = {line.split()[0]: line for line in capfd.readouterr().out.splitlines()}
    assert "gpu 4 x 15.4 GB, host 412 GB" in lines["t4x4"]
    assert "host->gpu 12 GB/s" in lines["t4x4"]
    assert "unified 155 GB" in lines["m2-ultra"]
    assert main(["list", "machines", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capfd.readouterr().out)["machines"]}
    assert entries["t4x4"]["accelerators"] == 4
    assert entries["l4"]["memories"] == {"gpu": 23034 * 2**20 - 7 * 10**8, "host": 192 * 10**9 - 4 * 2**30}
    assert entries["l4"]["links"]["host->gpu"] == 24e9


# -- networks ----------------------------------------------------------------------------------------------------------


def test_the_networks_of_the_cluster_paper_ship() -> None:
    figures = {name: load_network(name) for name in network_names()}
    assert {
        name: (each.latency_seconds, each.bandwidth, each.price_usd) for name, each in figures.items()
    } == {
        "10gbe": (1e-3, 1.25e9, 0),
        "rocev2": (750e-9, 3.125e9, 339),
        "infiniband": (600e-9, 25e9, 1267),
    }


@pytest.mark.parametrize("name", network_names())
def test_every_figure_of_a_network_states_its_source(name: str) -> None:
    text = (resources.files("moesched.machines.networks") / f"{name}.toml").read_text()
    blocks = [block for block in text.split("\n\n") if re.search(r"^\w+ = [0-9]", block, re.MULTILINE)]
    assert blocks
    assert all(re.search(r"table \d|footnote \d", block, re.IGNORECASE) for block in blocks)


def test_a_network_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nlatency_seconds = 2e-6\nbandwidth = 1e9\n')
    assert load_network(str(file)) == Network(name="mine", latency_seconds=2e-6, bandwidth=1e9)


@pytest.mark.parametrize(
    ("text", "why"),
    table("broken_files.md", "Networks"),
)
def test_a_broken_network_is_refused_with_its_file_and_key(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=f"broken.toml: .*{re.escape(why)}"):
        load_network(str(file))


def test_an_exchange_costs_latency_and_its_bytes() -> None:
    machine = msgspec.structs.replace(at_peak(load_machine("m2-ultra")), network=load_network("10gbe"))
    demand = Roofline(machine, "bfloat16").work(Work("all_reduce", NETWORK, nbytes=1.25e6))
    assert demand.seconds == pytest.approx(2e-3)
    assert dict(demand.shares) == {NETWORK: 0.5}


def test_a_machine_without_a_network_has_no_cost_for_an_exchange() -> None:
    with pytest.raises(BadInput, match="machine m2-ultra has no cost for all_reduce on 'network'"):
        Roofline(at_peak(load_machine("m2-ultra")), "bfloat16").work(Work("all_reduce", NETWORK, nbytes=1))


def test_a_machine_is_written_with_its_network_its_price_and_names_of_any_characters() -> None:
    mac, path = at_peak(load_machine("m2-ultra")), 'it\'s a "back\\slash"'
    machine = msgspec.structs.replace(
        mac,
        network=load_network("rocev2"),
        links=[msgspec.structs.replace(mac.links[0], path=path)],
        accelerator_group=AcceleratorGroup(interconnect=Interconnect(bandwidth=1e9, paths=[path])),
    )
    assert parse_machine(machine_toml(machine).encode(), "written") == machine
    assert machine.price_usd == 6599


# -- changes of a machine --------------------------------------------------------------------------

T4 = load_machine("t4")


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("link.gpu->host.latency=20us", lambda machine: machine.link("gpu", "host").latency == 20e-6),
        ("link.host->gpu=24GB/s", lambda machine: [link.bandwidth for link in machine.links] == [24e9, 12e9]),
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
    ("machine", "processor", "policy"), [("h100", "gpu", "resident"), ("t4", "cpu", "cpu_ffn")]
)
def test_a_kernel_s_start_takes_the_changed_time_on_a_machine_with_a_class_of_device(
    machine: str, processor: str, policy: str
) -> None:
    def rate(*changes: str) -> float:
        made, layout = make_policy(policy), weight_layout(SHAPES["mixtral-0.8b"])
        plan = plan_run(changed(load_machine(machine), changes), layout, split_batch([8], 3, 1), made)
        return 1 / simulate(plan, made).step_seconds[1]

    assert rate(f"processor.{processor}.launch_seconds=1s") < 1
    assert rate() > rate(f"processor.{processor}.launch_seconds=x2") > rate() / 3


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
