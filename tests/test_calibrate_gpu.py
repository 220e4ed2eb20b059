"""Calibration of a machine with a GPU: on one that is not there, whose rates it must find, and on CUDA devices."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import moesched
from commands import refused
from conftest import has_gpu
from known_gpu import DESKTOP, KnownGpu, Rates
from moesched.calibration.gpu_extent import QUICK_GPU, THOROUGH_GPU, GpuExtent
from moesched.calibration.gpu_machine import calibrate_gpu, cpu_class, gpu_class, measured_machine
from moesched.errors import BadInput
from moesched.inputs.dtype import dtype_for
from moesched.machines import Machine, load_machine, parse_machine
from moesched.machines.cost import cost_model
from moesched.machines.local import calibrated_file, calibrated_gpu
from moesched.machines.roofline import Roofline
from moesched.machines.staging import staged
from moesched.machines.surfaces import Surface
from moesched.machines.toml_text import machine_toml
from moesched.models.config import DType
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.work import Work
from small_models import small_model

FEWER = {"groups": ((16,), (16,) * 8, (512,) * 8), "steps": 5}
"""Runs of the small model that are quick to simulate."""
QUICK, THOROUGH = (replace(extent, **FEWER) for extent in (QUICK_GPU, THOROUGH_GPU))


def calibrated(rates: Rates = DESKTOP, extent: GpuExtent = QUICK) -> Machine:
    return measured_machine(KnownGpu(rates), extent, lambda done, total: None)


@cache
def desktop() -> Machine:
    """The desktop as a quick calibration finds it, with as many steps as it has."""
    return calibrated(extent=replace(QUICK, steps=QUICK_GPU.steps))


def with_noise(noise: float) -> Rates:
    return replace(DESKTOP, noise=noise)


def near(figure: float, tolerance: float = 0.005) -> Any:
    return pytest.approx(figure, rel=tolerance)


class OldGpu(KnownGpu):
    """A GPU without bfloat16, as fast in float16."""

    half: DType = "float16"


def test_a_gpu_without_bfloat16_is_measured_in_float16_and_models_are_computed_in_it() -> None:
    flops = DESKTOP.flops | {(name, "float16"): DESKTOP.flops[name, "bfloat16"] for name in ("gpu", "cpu")}
    old, told = OldGpu(replace(DESKTOP, flops=flops)), []
    machine = measured_machine(old, QUICK, lambda done, total: told.append((done, total)))
    assert machine.accelerator.flops == {"float16": near(50e12), "float32": near(20e12)}
    assert dtype_for("bfloat16", None, machine) == "float16"
    assert told == [(number, len(told)) for number in range(1, len(told) + 1)], "every step is told"


@pytest.mark.parametrize("extent", [QUICK, THOROUGH], ids=["quick", "thorough"])
def test_it_finds_the_rates_of_the_machine(extent: GpuExtent) -> None:
    machine = calibrated(extent=extent)
    gpu, cpu = machine.accelerator, machine.host
    assert gpu.flops == {"bfloat16": near(50e12), "float32": near(20e12)}
    assert cpu.flops == {"bfloat16": near(1.5e12), "float32": near(0.8e12)}
    assert {name: tier.bandwidth for name, tier in machine.memories.items()} == {
        "gpu": near(850e9),
        "host": near(62e9),
    }
    assert gpu.rates["weights"].expected == near(0.8)
    assert cpu.rates["weights"].expected == near(0.7)
    assert desktop().host.rates["attention"].expected == near(0.6, 0.02)
    assert {name: tier.nbytes for name, tier in machine.memories.items()} == {
        "gpu": 24 * 10**9,
        "host": 64 * 10**9,
    }
    assert gpu.rates["launch_seconds"].expected == near(4e-6)
    assert gpu.rates["host_seconds"].expected == near(15e-6)
    found = {(link.source, link.destination): (link.bandwidth, link.latency) for link in machine.links}
    assert machine.staging is not None
    found["host", "pinned"] = machine.staging.bandwidth, machine.staging.latency
    assert found == {
        ends: (near(rate), near(latency, 0.02)) for ends, (rate, latency) in DESKTOP.links.items()
    }


SLOWED = [
    ("host->gpu", "gpu->host", 0.75, 0.005),
    ("gpu->host", "host->gpu", 0.75, 0.005),
    ("host->gpu", "host->pinned", 0.75, 0.005),
    ("host->pinned", "gpu->host", 0.75, 0.005),
    ("attention", "host->gpu", 0.8, 0.02),
    ("attention", "host->pinned", 0.5, 0.02),
    ("host->gpu", "few rows", 1.0, 0.02),
    ("few rows", "host->gpu", 1.0, 0.02),
    ("cache write", "host->gpu", 0.7, 0.02),
    ("cache write", "host->pinned", 0.6, 0.02),
    ("host->gpu", "cache write", 0.85, 0.02),
    ("host->gpu", "attention", 0.95, 0.07),  # attention is short beside a page's copy
]


@pytest.mark.parametrize(("work", "beside", "rate", "tolerance"), SLOWED)
def test_it_finds_how_one_work_slows_another(work: str, beside: str, rate: float, tolerance: float) -> None:
    [found] = [pair.rate for pair in desktop().contention if (pair.work, pair.beside) == (work, beside)]
    assert found == near(rate, tolerance)


def test_cache_writes_slow_copies_in_predictions_as_was_measured_and_else_as_copies_do() -> None:
    writing, copying = Work("offload_kv", "gpu->host", nbytes=1e6), Work("fetch", "host->gpu", nbytes=1e6)
    measured = cost_model(desktop(), "bfloat16")
    assert dict(measured.work(copying).slowed)[measured.work(writing).work_class] == near(0.85, 0.02)
    assert measured.work(copying).work_class == "host->gpu"
    assert dict(measured.work(copying).slowed)["gpu->host"] == near(0.75)
    of_copies = [pair for pair in desktop().contention if "cache write" not in (pair.work, pair.beside)]
    unmeasured = cost_model(replace(desktop(), contention=of_copies), "bfloat16")
    assert dict(unmeasured.work(copying).slowed)[unmeasured.work(writing).work_class] == near(0.75)


def dispatch(machine: Machine, resource: str, kind: str, calls: float = 1, nbytes: float = 0.0) -> float:
    points = [
        point
        for point in machine.cost_table
        if (point.resource, point.operation) == (resource, f"dispatch {kind}")
    ]
    return Surface(points)(nbytes, calls)


def test_it_finds_how_long_each_kind_of_task_takes_to_start() -> None:
    machine = desktop()
    for (resource, kind), (first, each) in DESKTOP.dispatch.items():
        assert dispatch(machine, resource, kind, 4, 1e5) == near(first + each * (4 if each else 1), 0.05), (
            kind
        )


def test_products_are_in_the_table_by_their_rows() -> None:
    size = 2 * 14336 * 4096
    found = {
        point.rows: point.seconds
        for point in desktop().cost_table
        if (point.operation, point.resource, point.size) == ("product", "gpu", near(size))
    }
    assert list(found) == [1, 8, 16, 64, 512, 4096]
    reading, computing = size / (0.8 * 850e9), 4096 * size / 50e12
    assert found[8] == near(reading)
    assert found[4096] == near(computing)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_the_spread_of_the_rounds_is_the_range_of_a_rate(noise: float) -> None:
    machine = calibrated(with_noise(noise), THOROUGH)
    estimates = [
        *machine.accelerator.rates.values(),
        *machine.host.rates.values(),
        *(link.sustained for link in machine.links if link.sustained),
    ]
    assert len(estimates) == 4 + 3 + 2
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
    """The desktop with its products and copies, and its tasks as they are known to be."""
    found = desktop()
    products = [point for point in found.cost_table if point.operation == "product"]
    copies = [pair for pair in found.contention if "->" in pair.work and "->" in pair.beside]
    return KnownGpu().truth(replace(found, cost_table=products, contention=copies))


def roomy(machine: Machine) -> Machine:
    """The machine with enough host memory for Mixtral 8x7B."""
    host = replace(machine.memories["host"], capacity="128GB")
    return replace(machine, memories=machine.memories | {"host": host})


@pytest.mark.parametrize("policy", ["cgopipe", "layer_streaming", "fastdecode"])
def test_predictions_are_those_of_the_known_machine(policy: str) -> None:
    found, truth = (decode_rate(roomy(machine), policy) for machine in (desktop(), true_machine()))
    assert found == near(truth, 0.05)


def test_noise_leaves_predictions_near_those_of_the_known_machine() -> None:
    found = decode_rate(roomy(calibrated(with_noise(0.03))), "layer_streaming")
    assert found == near(decode_rate(roomy(true_machine()), "layer_streaming"), 0.05)


def test_staged_copies_at_once_take_as_long_as_was_measured() -> None:
    """CGOPipe copies pages into pinned memory while earlier ones cross the link; here both take the whole time."""
    links = DESKTOP.links | {("host", "pinned"): (24e9, 1e-6)}
    rates = [
        decode_rate(
            staged(roomy(calibrated(replace(DESKTOP, links=links, beside=beside))), 8 * 10**9), "cgopipe"
        )
        for beside in (1.0, 0.5)
    ]
    assert rates[1] == near(rates[0] / 2, 0.05)


def test_copies_of_a_profile_have_no_measured_slowness() -> None:
    assert Roofline(load_machine("t4"), "bfloat16").work(Work("load", "host->gpu", nbytes=1e6)).slowed == ()


def test_the_class_of_the_library_gives_the_rates_that_are_not_measured() -> None:
    assert desktop().accelerator.device_class == "consumer-gpu"
    assert gpu_class("NVIDIA A100-SXM4-80GB", 2e12) == "data-center-gpu"
    assert gpu_class("NVIDIA Unheard-of", 0.5e12) == "consumer-gpu"
    assert (cpu_class(60e9), cpu_class(300e9)) == ("desktop-cpu", "server-cpu")


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        (
            {"links": DESKTOP.links | {("host", "pinned"): (32e9, 0.0)}},
            "came to 32 GB/s, more than half of its 62 GB/s, .* calibrate again",
        ),
        ({"launch": 1.0}, "every product of one row on the gpu was shorter than a launch"),
    ],
)
def test_figures_that_cannot_be_are_refused(rates: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        calibrated(replace(DESKTOP, **rates))


def test_a_file_of_another_gpu_or_of_a_version_without_a_cost_table_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOESCHED_CACHE", str(tmp_path))
    assert calibrated_gpu("cuda", KnownGpu.gpu_name) is None
    calibrated_file("cuda").write_text(machine_toml(desktop()))
    assert calibrated_gpu("cuda", KnownGpu.gpu_name) == desktop()
    assert calibrated_gpu("cuda", "NVIDIA T4") is None
    assert calibrated_gpu("cuda", KnownGpu.gpu_name[:-1]) is None, "an L4 is no L40"
    calibrated_file("cuda").write_text(machine_toml(replace(desktop(), cost_table=[])))
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
    assert machine.memories["gpu"].bandwidth > machine.link("host", "gpu").bandwidth
    assert machine.link("host", "gpu").bandwidth > 1e9
    assert {point.rows for point in machine.cost_table if point.operation == "product"} >= {1, 4096}


@pytest.mark.gpu
def test_a_run_on_a_calibrated_cuda_device_has_an_expectation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESCHED_CACHE", str(tmp_path))
    calibrate_gpu("cuda")
    model = small_model(tmp_path / "small")
    report = moesched.run_model(
        model, [[1, 2, 3]], policy="resident", device="cuda", max_new_tokens=4, expect=True
    )
    assert report.no_expectation is None
    assert report.expected is not None
