"""Calibration of a machine with a GPU: measures its rates and its tasks, and writes a machine file.

The cost table gets the times of matrix products, and the dispatch times of tasks from runs of a small model. Copies,
attention on the host and launches become rates with their measured spread. Rates that are not measured are those
shipped for the GPU's and the CPU's class of device, such as "consumer-gpu".
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from moesched import plugins
from moesched.calibration import gpu_rates
from moesched.calibration.calibrate import contention_of, written_to
from moesched.calibration.gpu_exercise import GpuExercise
from moesched.calibration.gpu_extent import FULL, LINKS, QUICK_GPU, STAGING, THOROUGH_GPU, GpuExtent
from moesched.calibration.gpu_probe import CPU, GPU, HOST, Copy, GpuProbe, Operation
from moesched.calibration.gpu_tasks import GpuTasks
from moesched.calibration.spread import spread
from moesched.calibration.task_times import RunKey
from moesched.errors import BadInput
from moesched.machines import COST_FORMAT, Contention, Link, Machine, Processor, Roles, Tier
from moesched.machines.calibrated import DISPATCH
from moesched.machines.estimates import Estimate
from moesched.machines.gpu_cost import GpuCosts
from moesched.machines.local import processor_with
from moesched.machines.machine import Staging
from moesched.machines.part_names import find_gpu
from moesched.machines.product_times import PRODUCT
from moesched.machines.staging import staged
from moesched.system.cores import divided_cores, usable_cores
from moesched.tasks import Task

Progress = Callable[[int, int], object]

PROBE = "moesched.devices.torch.cuda_probe:CudaProbe"
HBM_BANDWIDTH = 1.2e12
"""Bytes per second of memory from which on a GPU that is not known by name counts as a data-center GPU."""
SERVER_BANDWIDTH = 120e9
"""Bytes per second of memory from which on a CPU counts as a server's."""


def calibrate_gpu(
    device: str, out: Path | None = None, progress: Progress | None = None, *, thorough: bool = False
) -> Machine:
    """Measure this machine and its GPU and write the machine file. A calibration that is cut short leaves the old file.

    Args:
        device: name of the GPU's device: "cuda".
        out: the file to write; by default the one that `--device cuda --machine auto` reads.
        progress: called with (steps done, steps in all).
        thorough: whether to measure more points in more rounds.

    Raises:
        BadInput: there is no such GPU here, or the file cannot be written.
    """
    extent = THOROUGH_GPU if thorough else QUICK_GPU
    make_probe = plugins.load(PROBE, "the probe")

    def measured(folder: Path) -> Machine:
        with closing(make_probe(divided_cores(usable_cores()), folder)) as probe:
            return measured_machine(probe, extent, progress or (lambda done, total: None))

    return written_to(out, device, measured)


def measured_machine(probe: GpuProbe, extent: GpuExtent, progress: Progress) -> Machine:
    """Measure the machine of `probe` by the operations of `extent`, in the dtypes that its GPU computes in.

    Args:
        progress: called with (measurements done, measurements in all).

    Raises:
        BadInput: a rate could not be measured; the message says which, and the remedy.
    """
    extent = replace(extent, dtypes=(probe.half, FULL))
    done, steps = 0, extent.measurements

    def tell() -> None:
        nonlocal done
        done += 1
        progress(done, steps)

    rated = _rated(probe, extent, tell)
    return _with_tasks(rated, probe, extent, tell)


def _rated(probe: GpuProbe, extent: GpuExtent, tell: Callable[[], None]) -> Machine:
    """Return the machine with its rates, and with the costs of products, from operations timed alone and in pairs."""
    operations, pairs = list(extent.operations()), list(extent.pairs())
    times: dict[Operation, list[float]] = {each: [] for each in operations}
    together: dict[tuple[Copy, Copy], list[float]] = {each: [] for each in pairs}
    # Everything in turn, as clocks drift: the spread then covers the whole time.
    for _ in range(extent.rounds):
        for operation in operations:
            times[operation].append(probe.seconds(operation))
            tell()
        for pair in pairs:
            together[pair].append(probe.seconds(*pair))
            tell()
    contention = [
        Contention(
            work=f"{copy.source}->{copy.destination}",
            beside=f"{other.source}->{other.destination}",
            rate=gpu_rates.speed_beside(times[copy], found),
        )
        for (copy, other), found in together.items()
    ]
    return _machine(probe, extent, times, contention)


def _with_tasks(rated: Machine, probe: GpuProbe, extent: GpuExtent, tell: Callable[[], None]) -> Machine:
    """Return the machine with dispatch times, host attention's rate and speeds of concurrent work from runs on `probe`.

    Args:
        rated: the machine with its rates, and with the costs of products.
        tell: called after each measurement.
    """
    key, found = RunKey(extent.model, probe.half, 0), GpuTasks()

    def run(machine: Machine, *, beside: bool) -> list[Task]:
        policy = GpuExercise(extent.on_host, beside=beside)
        tasks = probe.tasks(extent.model, policy, extent.micro_batches, extent.steps, machine)
        tell()
        return tasks

    run(rated, beside=False)  # the first run of a process loads kernels
    for _ in range(extent.rounds):
        found.add(key, run(rated, beside=False))
        found.add_beside(key, run(rated, beside=True))
        found.add_beside(key, run(staged(rated, extent.staging), beside=True))
    attending = _with_attention(rated, found.host_attention())
    points = found.points(GpuCosts(attending, probe.half).running)
    return replace(
        attending,
        cost_table=[*rated.cost_table, *points],
        contention=[
            *rated.contention,
            *contention_of({pair: [rate] for pair, rate in found.rates().items()}),
        ],
        spread=attending.spread | spread({DISPATCH: found.speeds()}),
    )


def _with_attention(machine: Machine, rates: Sequence[float]) -> Machine:
    """Return the machine with the measured rate of attention on the host; unchanged if no rate was measured.

    Args:
        rates: bytes of KV cache per second that attention read, in each run.
    """
    if not rates:
        return machine
    bandwidth = machine.memories[HOST].bandwidth
    attention = gpu_rates.estimate([rate / bandwidth for rate in rates])
    cpu = replace(machine.host, rates=machine.host.rates | {"attention": attention})
    return replace(machine, processors=machine.processors | {CPU: cpu})


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
    staging = gpu_rates.link(times, *STAGING)
    gpu_rates.require_cold(staging.bandwidth, host_bandwidth)
    return Machine(
        name=f"{platform.node() or 'local'} with {probe.gpu_name}",
        description=f"calibrated: {probe.gpu_name}, {usable_cores()} cores, {extent.rounds} rounds",
        measured_on=processor_with(probe.gpu_name),
        cost_format=COST_FORMAT,
        processors={
            GPU: _processor(times, extent, GPU, gpu_class(probe.gpu_name, gpu_bandwidth), gpu_rates_found),
            CPU: _processor(times, extent, CPU, cpu_class(host_bandwidth), cpu_rates),
        },
        memories={
            GPU: Tier(capacity=probe.gpu_bytes, bandwidth=gpu_bandwidth),
            HOST: Tier(capacity=probe.host_bytes, bandwidth=host_bandwidth),
        },
        links=[_link(times, *ends) for ends in LINKS if ends != STAGING],
        staging=Staging(
            bandwidth=staging.bandwidth.best, latency=staging.latency, sustained=staging.bandwidth.sustained
        ),
        roles=Roles(accelerator=GPU, host=CPU, weights=HOST),
        cost_table=gpu_rates.table(times, probe.half),
        contention=contention,
        spread=spread({PRODUCT: gpu_rates.product_speeds(times, probe.half)}),
    )


def _processor(
    times: gpu_rates.Times, extent: GpuExtent, name: str, device_class: str, rates: dict[str, Estimate]
) -> Processor:
    """Return a processor with its best measured FLOP/s in each dtype, and with estimates of all measured rates.

    Args:
        times: seconds of each operation of `extent` in each round.
        name: name of the processor.
        device_class: class of device, such as "consumer-gpu", whose shipped rates count where none was measured.
        rates: measured rates by name; the rate of products is missing, since it follows from `times`.
    """
    found = {dtype: gpu_rates.products(times, name, dtype) for dtype in extent.dtypes}
    shares = [rate.sustained for rate in found.values()]
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
        sustained=rate.bandwidth.sustained,
    )


def gpu_class(name: str, bandwidth: float) -> str:
    """Return a GPU's class of device, such as "consumer-gpu", by its name or, if unknown, its memory's bandwidth.

    Args:
        bandwidth: bytes per second of the GPU's memory.
    """
    try:
        return find_gpu(name)[0].device_class
    except BadInput:
        return "data-center-gpu" if bandwidth >= HBM_BANDWIDTH else "consumer-gpu"


def cpu_class(bandwidth: float) -> str:
    """Return a CPU's class of device, "server-cpu" or "desktop-cpu", by its memory bandwidth in bytes per second."""
    return "server-cpu" if bandwidth >= SERVER_BANDWIDTH else "desktop-cpu"
