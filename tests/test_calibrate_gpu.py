"""Calibration of a machine with a GPU: on one that is not there, whose rates it must find, and on CUDA devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from commands import refused
from conftest import has_gpu
from known_gpu import DESKTOP, KnownGpu, Rates
from moesched.calibration.gpu_extent import QUICK_GPU, THOROUGH_GPU, GpuExtent
from moesched.calibration.gpu_machine import calibrate_gpu, cpu_class, gpu_class, measured_machine
from moesched.errors import BadInput
from moesched.inputs.dtype import dtype_for
from moesched.machines import Machine, load_machine, parse_machine
from moesched.machines.estimates import Estimate
from moesched.machines.local import calibrated_file, calibrated_gpu
from moesched.machines.roofline import Roofline
from moesched.machines.toml_text import machine_toml
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.tasks import Work


def calibrated(rates: Rates = DESKTOP, extent: GpuExtent = QUICK_GPU) -> Machine:
    return measured_machine(KnownGpu(rates), extent, lambda done, total: None)


def with_noise(noise: float) -> Rates:
    return msgspec.structs.replace(DESKTOP, noise=noise)


def near(figure: float, tolerance: float = 0.005) -> Any:
    return pytest.approx(figure, rel=tolerance)


class OldGpu(KnownGpu):
    """A GPU without bfloat16, as fast in float16."""

    half = "float16"


def test_a_gpu_without_bfloat16_is_measured_in_float16_and_models_are_computed_in_it() -> None:
    flops = DESKTOP.flops | {(name, "float16"): DESKTOP.flops[name, "bfloat16"] for name in ("gpu", "cpu")}
    old = OldGpu(msgspec.structs.replace(DESKTOP, flops=flops))
    machine = measured_machine(old, QUICK_GPU, lambda done, total: None)
    assert machine.accelerator.flops == {"float16": near(50e12), "float32": near(20e12)}
    assert dtype_for("bfloat16", None, machine) == "float16"


@pytest.mark.parametrize("extent", [QUICK_GPU, THOROUGH_GPU], ids=["quick", "thorough"])
def test_it_finds_the_rates_of_the_machine(extent: GpuExtent) -> None:
    machine = calibrated(extent=extent)
    gpu, cpu = machine.accelerator, machine.host
    assert gpu.flops == {"bfloat16": near(50e12), "float32": near(20e12)}
    assert cpu.flops == {"bfloat16": near(1.5e12), "float32": near(0.8e12)}
    assert {name: tier.bandwidth for name, tier in machine.memories.items()} == {
        "gpu": near(850e9),
        "host": near(62e9),
        "pinned": near(62e9),
    }
    assert gpu.rates["weights"].expected == near(0.8)
    assert cpu.rates["weights"].expected == near(0.7)
    assert gpu.rates["launch_seconds"].expected == near(4e-6)
    assert gpu.rates["host_seconds"].expected == near(15e-6)
    found = {(link.source, link.destination): (link.bandwidth, link.latency) for link in machine.links}
    assert found == {
        ends: (near(rate), near(latency, 0.02)) for ends, (rate, latency) in DESKTOP.links.items()
    }


def test_it_finds_how_copies_slow_each_other() -> None:
    pairs = {(pair.work, pair.beside): pair.rate for pair in calibrated().contention}
    assert pairs["pinned->gpu", "gpu->host"] == pairs["gpu->host", "pinned->gpu"] == near(0.75)
    assert len(pairs) == 6


def test_sizes_come_from_the_device() -> None:
    machine = calibrated()
    sizes = {name: tier.nbytes for name, tier in machine.memories.items()}
    assert sizes == {"gpu": 24 * 10**9, "host": 64 * 10**9, "pinned": 16 * 10**9}


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_the_spread_of_the_rounds_is_the_range_of_a_rate(noise: float) -> None:
    machine = calibrated(with_noise(noise), THOROUGH_GPU)
    estimates = [
        *machine.accelerator.rates.values(),
        *machine.host.rates.values(),
        *(link.sustained for link in machine.links if link.sustained),
    ]
    assert len(estimates) == 4 + 2 + 4
    for estimate in estimates:
        assert estimate.low < estimate.expected < estimate.high
        assert estimate.high / estimate.low <= ((1 + noise) / (1 - noise)) ** 2.5
    weights = machine.accelerator.rates["weights"]
    truth = 0.8 * 850e9 / machine.memories["gpu"].bandwidth
    assert weights.low <= truth <= weights.high


def test_a_calibrated_file_is_read_back() -> None:
    machine = calibrated(with_noise(0.05))
    assert parse_machine(machine_toml(machine).encode(), "text") == machine


def decode_rate(machine: Machine, policy: str) -> float:
    planned = make_policy(policy)
    plan = plan_run(machine, weight_layout(SHAPES["mixtral-8x7b"]), split_batch([64] * 8, 4, 4), planned)
    return simulate(plan, planned).decode_tokens_per_second


def true_machine() -> Machine:
    """The machine as its owner would describe it if he knew its rates."""
    exact = Estimate(low=1.0, expected=1.0, high=1.0)
    known = calibrated()
    gpu, cpu = known.accelerator, known.host
    rates = {
        "products": exact,
        "weights": Estimate(low=0.8, expected=0.8, high=0.8),
        "launch_seconds": Estimate(low=4e-6, expected=4e-6, high=4e-6),
        "host_seconds": Estimate(low=15e-6, expected=15e-6, high=15e-6),
    }
    links = [
        msgspec.structs.replace(
            link,
            bandwidth=DESKTOP.links[link.source, link.destination][0],
            latency=DESKTOP.links[link.source, link.destination][1],
            sustained=exact,
        )
        for link in known.links
    ]
    flops = {"bfloat16": 50e12, "float32": 20e12}
    host_rates = {"products": exact, "weights": Estimate(low=0.7, expected=0.7, high=0.7)}
    return msgspec.structs.replace(
        known,
        processors={
            "gpu": msgspec.structs.replace(gpu, flops=flops, rates=rates),
            "cpu": msgspec.structs.replace(
                cpu, flops={"bfloat16": 1.5e12, "float32": 0.8e12}, rates=host_rates
            ),
        },
        links=links,
    )


def roomy(machine: Machine) -> Machine:
    """The machine with enough host memory for Mixtral 8x7B."""
    host = msgspec.structs.replace(machine.memories["host"], capacity="128GB")
    return msgspec.structs.replace(machine, memories=machine.memories | {"host": host})


@pytest.mark.parametrize("policy", ["cgopipe", "expert_cache", "layer_streaming", "fastdecode"])
def test_predictions_with_offloading_are_those_of_the_known_rates(policy: str) -> None:
    machines = calibrated(with_noise(0.03), THOROUGH_GPU), true_machine()
    found, truth = (decode_rate(roomy(machine), policy) for machine in machines)
    assert found == near(truth, 0.05)


def test_copies_of_a_calibrated_machine_slow_each_other_in_predictions() -> None:
    cost = Roofline(calibrated(), "bfloat16")
    up = cost.work(Work("load", "pinned->gpu", nbytes=24e6))
    assert up.sort == "pinned->gpu"
    assert dict(up.slowed)["gpu->host"] == near(0.75)


def test_copies_at_once_take_as_long_as_was_measured() -> None:
    """CGOPipe copies pages into pinned memory while earlier ones cross the link; here both take the whole time."""
    links = DESKTOP.links | {("host", "pinned"): (24e9, 1e-6)}
    rates = [
        decode_rate(
            roomy(calibrated(msgspec.structs.replace(DESKTOP, links=links, beside=beside))), "cgopipe"
        )
        for beside in (1.0, 0.5)
    ]
    assert rates[1] == near(rates[0] / 2, 0.05)


def test_copies_of_a_profile_have_no_measured_slowness() -> None:
    assert Roofline(load_machine("t4"), "bfloat16").work(Work("load", "host->gpu", nbytes=1e6)).slowed == ()


def test_the_class_of_the_library_gives_the_rates_that_are_not_measured() -> None:
    assert calibrated().accelerator.device_class == "consumer-gpu"
    assert gpu_class("NVIDIA A100-SXM4-80GB", 2e12) == "data-center-gpu"
    assert gpu_class("NVIDIA Unheard-of", 0.5e12) == "consumer-gpu"
    assert (cpu_class(60e9), cpu_class(300e9)) == ("desktop-cpu", "server-cpu")


def test_every_step_is_told() -> None:
    told: list[tuple[int, int]] = []
    measured_machine(KnownGpu(), QUICK_GPU, lambda done, total: told.append((done, total)))
    assert told == [(number, len(told)) for number in range(1, len(told) + 1)]


def test_products_that_are_shorter_than_a_launch_are_refused() -> None:
    slow = msgspec.structs.replace(DESKTOP, launch=1.0)
    with pytest.raises(BadInput, match="every product of one row on the gpu was shorter than a launch"):
        calibrated(slow)


def test_a_file_of_another_gpu_does_not_count() -> None:
    calibrated_file("cuda").write_text(machine_toml(calibrated()))
    try:
        assert calibrated_gpu("cuda", KnownGpu.gpu_name) == calibrated()
        assert calibrated_gpu("cuda", "NVIDIA T4") is None
    finally:
        calibrated_file("cuda").unlink()
    assert calibrated_gpu("cuda", KnownGpu.gpu_name) is None


@pytest.mark.skipif(has_gpu(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_says_so(command: Any, tmp_path: Path) -> None:
    refused(
        command("calibrate", "--device", "cuda", "--out", tmp_path / "gpu.toml"),
        "device cuda: there is no NVIDIA driver: install the driver .*; or use --device torch",
    )
    assert not (tmp_path / "gpu.toml").exists()


@pytest.mark.gpu
def test_a_cuda_device_is_measured(tmp_path: Path) -> None:
    machine = calibrate_gpu("cuda", tmp_path / "gpu.toml")
    assert load_machine(str(tmp_path / "gpu.toml")) == machine
    assert machine.accelerator.flops["bfloat16"] > machine.host.flops["bfloat16"]
    assert machine.memories["gpu"].bandwidth > machine.link("pinned", "gpu").bandwidth
    assert machine.link("pinned", "gpu").bandwidth > 1e9
