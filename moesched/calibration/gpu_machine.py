"""Calibration of a machine with a GPU: measures its rates and writes a machine file with them.

Unlike a calibration of the CPU alone it writes no table of costs, but rates with their measured spread, from which
work of any size is predicted: products, weights, copies alone and at once, launches, waits of the host. Rates that
are not measured are those of its class of device.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from moesched import plugins
from moesched.calibration import gpu_rates
from moesched.calibration.gpu_extent import LINKS, QUICK_GPU, THOROUGH_GPU, GpuExtent
from moesched.calibration.gpu_probe import CPU, GPU, HOST, PINNED, Copy, GpuProbe, Operation
from moesched.errors import BadInput
from moesched.machines import Contention, Link, Machine, Processor, Roles, Tier
from moesched.machines.estimates import Estimate
from moesched.machines.local import calibrated_file
from moesched.machines.part_names import find_gpu
from moesched.machines.toml_text import machine_toml
from moesched.system.cache import cache_folder
from moesched.system.cores import usable_cores
from moesched.system.whole_file import require_writable, whole_file

Progress = Callable[[int, int], object]

PROBE = "moesched.devices.torch.cuda_probe:CudaProbe"
PINNED_SHARE = 4
HBM_BANDWIDTH = 1.2e12
SERVER_BANDWIDTH = 120e9
"""Memory bandwidths from which on a GPU that the library does not know, and a CPU, count as those of servers."""


def calibrate_gpu(
    device: str, out: Path | None = None, progress: Progress | None = None, *, thorough: bool = False
) -> Machine:
    """Measure this machine and its GPU and write its file. A calibration that is cut short leaves the old file.

    Args:
        device: "cuda".
        out: the file to write; by default the one that `--device cuda --machine auto` reads.
        progress: called with (steps done, steps in all).

    Raises:
        BadInput: there is no such GPU here, or the file cannot be written.
    """
    if out is None:
        cache_folder().mkdir(parents=True, exist_ok=True)
    file = calibrated_file(device) if out is None else out
    require_writable(file, "machine file")
    extent = THOROUGH_GPU if thorough else QUICK_GPU
    with closing(plugins.load(PROBE, "the probe")(usable_cores())) as probe:
        machine = measured_machine(probe, extent, progress or (lambda done, total: None))
    with whole_file(file, "machine file") as written:
        written.write(machine_toml(machine).encode())
    return machine


def measured_machine(probe: GpuProbe, extent: GpuExtent, progress: Progress) -> Machine:
    """Measure a machine with a GPU, in the number formats that it has."""
    extent = replace(extent, dtypes=(probe.half, "float32"))
    operations, pairs = list(extent.operations()), list(extent.pairs())
    steps = extent.rounds * (len(operations) + len(pairs))
    times: dict[Operation, list[float]] = {each: [] for each in operations}
    together: dict[tuple[Copy, Copy], list[float]] = {each: [] for each in pairs}
    done = 0
    for _ in range(
        extent.rounds
    ):  # everything in turn, as clocks drift: the spread then covers the whole time
        for operation in operations:
            times[operation].append(probe.seconds(operation))
            progress(done := done + 1, steps)
        for pair in pairs:
            together[pair].append(probe.seconds(*pair))
            progress(done := done + 1, steps)
    contention = [
        Contention(
            work=f"{copy.source}->{copy.destination}",
            beside=f"{other.source}->{other.destination}",
            rate=gpu_rates.speed_beside(times[copy], found),
        )
        for (copy, other), found in together.items()
    ]
    return _machine(probe, extent, times, contention)


def _machine(
    probe: GpuProbe, extent: GpuExtent, times: gpu_rates.Times, contention: list[Contention]
) -> Machine:
    gpu_bandwidth, host_bandwidth = gpu_rates.stream(times, GPU), gpu_rates.stream(times, HOST)
    launch = gpu_rates.launch_seconds(times)
    gpu_rates_found = {
        "weights": gpu_rates.weights(times, GPU, launch.expected, gpu_bandwidth),
        "launch_seconds": launch,
        "host_seconds": gpu_rates.host_seconds(times, launch.expected),
    }
    cpu_rates = {"weights": gpu_rates.weights(times, CPU, 0.0, host_bandwidth)}
    return Machine(
        name=f"{platform.node() or 'local'} with {probe.gpu_name}",
        description=f"calibrated: {probe.gpu_name}, {usable_cores()} cores, {extent.rounds} rounds",
        processors={
            GPU: _processor(times, extent, GPU, gpu_class(probe.gpu_name, gpu_bandwidth), gpu_rates_found),
            CPU: _processor(times, extent, CPU, cpu_class(host_bandwidth), cpu_rates),
        },
        memories={
            GPU: Tier(capacity=probe.gpu_bytes, bandwidth=gpu_bandwidth),
            HOST: Tier(capacity=probe.host_bytes, bandwidth=host_bandwidth),
            PINNED: Tier(capacity=probe.host_bytes // PINNED_SHARE, bandwidth=host_bandwidth),
        },
        links=[_link(times, source, destination) for source, destination in LINKS],
        roles=Roles(accelerator=GPU, host=CPU, weights=HOST, pinned=PINNED),
        contention=contention,
    )


def _processor(
    times: gpu_rates.Times, extent: GpuExtent, name: str, device_class: str, rates: dict[str, Estimate]
) -> Processor:
    """A processor whose stated rates are the best that were measured, and whose sustained ones are the others."""
    found = {dtype: gpu_rates.products(times, name, dtype) for dtype in extent.dtypes}
    shares = [rate.share for rate in found.values()]
    products = Estimate(
        low=min(share.low for share in shares),
        expected=median(share.expected for share in shares),
        high=max(share.high for share in shares),
        source=gpu_rates.MEASURED,
    )
    return Processor(
        memory=GPU if name == GPU else HOST,
        flops={dtype: rate.best for dtype, rate in found.items()},
        device_class=device_class,
        rates={"products": products, **rates},
    )


def _link(times: gpu_rates.Times, source: str, destination: str) -> Link:
    rate = gpu_rates.link(times, source, destination)
    return Link(
        source=source,
        destination=destination,
        bandwidth=rate.bandwidth.best,
        latency=rate.latency,
        path="host->gpu" if (source, destination) == (PINNED, GPU) else "",
        sustained=rate.bandwidth.share,
    )


def gpu_class(name: str, bandwidth: float) -> str:
    """The class of a GPU, for the rates that are not measured: the library's, or a guess from its memory."""
    try:
        return find_gpu(name)[0].device_class
    except BadInput:
        return "data-center-gpu" if bandwidth >= HBM_BANDWIDTH else "consumer-gpu"


def cpu_class(bandwidth: float) -> str:
    """The class of a CPU, for the rates that are not measured, by the bandwidth of its memory."""
    return "server-cpu" if bandwidth >= SERVER_BANDWIDTH else "desktop-cpu"
