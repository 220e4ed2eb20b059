"""Mixtral 8x7B's shape on a CUDA GPU that may use 16, 24 or 48 GB, beside Accelerate and the link's own bandwidth.

Weights are random and made in memory, in as many layers as the host holds. Prompts have MTBench's lengths. The machine
is probed on the spot; each policy runs with the planner's sizes for it, and what was predicted stands beside what came
out: time, the link's busy share and bytes, and CUDA's peak memory. First a small model that streams is held against a
run in which all its weights stay. A case is begun only if its predicted time, and a half more, is left of --seconds;
the result file names those that were not. It is written after each case.

Needs a GPU. `--small` takes a shape of a few MB instead, to try the benchmark itself.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from itertools import product
from operator import itemgetter
from typing import Any

import msgspec
import torch
from _accelerate import generate
from _cuda_probe import probe
from _options import EXECUTION, Benchmark, track
from _small_runs import fast_memory
from emulated import Link, figures

from moesched import plugins
from moesched.devices.torch.cuda_device import CudaDevice
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput, MoeschedError
from moesched.machines import Machine, Tier
from moesched.models.config import ModelConfig
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner import plan_best
from moesched.requests.batching import BatchSizes, batch_of
from moesched.requests.workloads import load_workload
from moesched.runs.hardware import run
from moesched.runs.outcome import Report
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.seams import Policy
from moesched.steps.plan import Plan
from moesched.system.memory import available_memory
from moesched.testing.random_weights import random_checkpoint

POLICIES = ("cgopipe", "flexgen", "layer_streaming")
CLASSES = {
    "cgopipe": "moesched.policies.cgopipe:CGOPipe",
    "flexgen": "moesched.policies.flexgen:FlexGen",
    "layer_streaming": "moesched.policies.layer_streaming:LayerStreaming",
    "resident": "moesched.policies.resident:Resident",
}
"""By class, so that nothing need be installed."""
ACCELERATE = "accelerate"
GB = 10**9
PINNED = 8 * GB
FOR_WEIGHTS = 0.75
"""Of the host's free memory; the rest is for the KV cache and for Python."""
FRAGMENTS = 0.05
"""Of the cap, for what torch's allocator cannot use and cuBLAS takes."""
MOST_REQUESTS = 2048
TINY = msgspec.structs.replace(
    SHAPES["mixtral-0.8b"], name="tiny", layers=4, hidden=256, intermediate=512, heads=8, vocabulary=1024
)

CHECKED = msgspec.structs.replace(TINY, head_dim=128, dtype="bfloat16")
"""A model of which several attention kernels take the heads."""
CHECKED_SIZES = BatchSizes(12, 4)
STREAMING = 0.8
"""Share of a small model's weights that policies get room for when they are checked."""


class Bench:
    """The model on the device, and the requests."""

    def __init__(self, config: ModelConfig, new_tokens: int) -> None:
        self.config = config
        self.new_tokens = new_tokens
        self.layout: WeightLayout = weight_layout(config, "bfloat16")
        self.lengths = load_workload("mtbench").lengths(MOST_REQUESTS)
        chance = random.Random(1)
        self.prompts = [[chance.randrange(config.vocabulary) for _ in range(n)] for n in self.lengths]

    def plan(
        self, device: TorchDevice, machine: Machine, name: str, sizes: BatchSizes
    ) -> tuple[Plan, Policy]:
        """A policy made anew, and its plan."""
        batch = batch_of(self.lengths, self.new_tokens, sizes)
        policy = _policy(name)
        return plan_run(machine, self.layout, batch, policy, None, device.slot_bytes), policy

    def case(self, machine: Machine, name: str, left: float) -> dict[str, Any]:
        """One policy under its best plan, on a device of its own, so that the case before leaves no memory in use.

        Raises:
            BadInput: it does not fit, or takes longer than what is left.
        """
        with closing(CudaDevice(random_checkpoint(self.config), self.layout)) as device:
            return self._case(device, machine, name, left)

    def _case(self, device: TorchDevice, machine: Machine, name: str, left: float) -> dict[str, Any]:
        best = plan_best(
            machine,
            self.layout,
            self.lengths,
            self.new_tokens,
            policies=(CLASSES[name],),
            slot_bytes=device.slot_bytes,
        )
        sizes = BatchSizes(best.seen.batch_size, best.seen.micro_batch_size)
        plan, policy = self.plan(device, machine, name, sizes)
        predicted = simulate(plan, policy)
        seconds = sum(predicted.step_seconds)
        if 1.5 * seconds > left:
            raise BadInput(f"it would take {seconds:.0f} s of the {left:.0f} s that are left")
        plan, policy = self.plan(device, machine, name, sizes)
        link = Link()
        begin_peak(torch.cuda)
        report = run(plan, policy, device, self.prompts[: sizes.batch_size], observers=[link], keep_open=True)
        return {
            "policy": name,
            **compared(report, predicted),
            "link": link.figures(plan, report),
            "peak_bytes": {
                "predicted": report.peak_bytes["gpu"],
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            },
        }


def _policy(name: str) -> Policy:
    made: Policy = plugins.make_policy(CLASSES[name])
    return made


def compared(report: Report, predicted: Report) -> dict[str, Any]:
    """A run beside its prediction."""
    measured, expected = figures(report), figures(predicted)
    return {
        "plan": msgspec.to_builtins(report.plan),
        "throughput_tokens_per_second": report.throughput_tokens_per_second,
        "measured": measured,
        "predicted": expected,
        "error_percent": {
            what: round(100 * (expected[what] / seconds - 1), 2)
            for what, seconds in measured.items()
            if seconds
        },
    }


def check(
    machine: Machine,
    config: ModelConfig = CHECKED,
    open_device: Callable[..., TorchDevice] = CudaDevice,
    new_tokens: int = 8,
    sizes: BatchSizes = CHECKED_SIZES,
) -> dict[str, Any]:
    """A small model in two batches: every policy's tokens and logits against those of the run where all weights stay.

    The others get room for 80 % of the weights, so that they stream.
    """
    layout = weight_layout(config)
    chance = random.Random(2)
    lengths = [chance.randint(3, 30) for _ in range(sizes.batch_size)]
    prompts = [[chance.randrange(config.vocabulary) for _ in range(length)] for length in lengths]
    batch = batch_of(lengths, new_tokens, sizes)
    found: dict[str, tuple[Any, list[torch.Tensor]]] = {}
    differences: dict[str, Any] = {}
    for name in ("resident", *POLICIES):
        device = open_device(random_checkpoint(config), layout, keep_logits=True)
        budgets = fast_memory(device, machine, batch, 2.0 if name == "resident" else STREAMING)
        for last in (False, True):
            policy = _policy(name)
            plan = plan_run(machine, layout, batch, policy, budgets, device.slot_bytes)
            device.logits.clear()
            report = run(plan, policy, device, prompts, keep_open=not last)
        found[name] = report.tokens, [each for _, each in sorted(device.logits, key=itemgetter(0))]
        (tokens, logits), (expected, those) = found[name], found["resident"]
        differences[name] = {
            "streamed_pages": report.plan.streamed_pages,
            "tokens_equal": tokens == expected,
            "largest_difference_of_logits": max(
                (mine.float() - theirs.float()).abs().max().item()
                for mine, theirs in zip(logits, those, strict=True)
            ),
        }
    return differences


def begin_peak(module: Any) -> None:
    """Have the peak of the GPU's memory begin anew, without what closed devices left there.

    module: that of the kind of GPU, such as torch.cuda.
    """
    gc.collect()
    module.empty_cache()
    module.reset_peak_memory_stats()


def layers_that_fit(config: ModelConfig) -> int:
    """As many of the model's layers as the host's memory holds."""
    layer = sum(page.nbytes for page in weight_layout(config, "bfloat16").layer(0))
    return max(2, min(config.layers, int((available_memory() - PINNED) * FOR_WEIGHTS / layer)))


def capped(machine: Machine, cap: int) -> Machine:
    """The machine with less GPU memory."""
    gpu = Tier(capacity=int(cap * (1 - FRAGMENTS)), bandwidth=machine.memories["gpu"].bandwidth)
    return msgspec.structs.replace(machine, memories={**machine.memories, "gpu": gpu})


BENCHMARK = Benchmark(
    __doc__,
    "gpu_offload",
    measures=("benchmarks/_accelerate.py", "benchmarks/_cuda_probe.py", *EXECUTION),
    packages=("torch",),
    parts=(*POLICIES, ACCELERATE),
    rounds_help="run each case this often; all runs are listed",
)
BENCHMARK.parser.add_argument("--caps", nargs="+", type=float, default=[24, 16, 48], help="GB of GPU memory")
BENCHMARK.parser.add_argument("--new-tokens", type=int, default=32, metavar="N")
BENCHMARK.parser.add_argument(
    "--seconds", type=float, default=540.0, help="begin no run that would end later"
)
BENCHMARK.parser.add_argument("--layers", type=int, help="of the model; by default as many as the host holds")
BENCHMARK.parser.add_argument("--small", action="store_true", help="a shape of a few MB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe, check, run what there is time for, and write the JSON after each case."""
    options = BENCHMARK.parse(arguments)
    if not torch.cuda.is_available():
        print("torch sees no CUDA device here: nothing is measured")
        return
    until = time.monotonic() + options.seconds
    total = torch.cuda.get_device_properties(0).total_memory
    machine = probe(total, min(PINNED, available_memory() // 8))
    whole = TINY if options.small else SHAPES["mixtral-8x7b"]
    layers = options.layers or layers_that_fit(whole)
    config = msgspec.structs.replace(whole, layers=layers, dtype="bfloat16")
    result: dict[str, Any] = {
        "probed": msgspec.to_builtins(machine),
        "check": check(machine),
        "model": {"shape": whole.name, "layers": layers},
        "cases": [],
        "left_out": {},
    }
    BENCHMARK.write(result)
    bench = Bench(config, options.new_tokens)
    ours = [name for name in options.only if name != ACCELERATE]
    for cap, name in track([*product(options.caps, ours)] * options.rounds, "offloading", still=True):
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * GB / total))
        case = f"{cap:g} GB, {name}"
        try:
            done = bench.case(capped(machine, int(cap * GB)), name, until - time.monotonic())
            result["cases"].append({"case": case, "cap_gb": cap, **done})
        except (MoeschedError, torch.cuda.OutOfMemoryError) as error:
            result["left_out"][case] = f"{type(error).__name__}: {error}"
        BENCHMARK.write(result)
    begin_peak(torch.cuda)
    average = round(sum(bench.lengths) / len(bench.lengths))
    for cap in options.caps if ACCELERATE in options.only else ():
        case = f"{cap:g} GB, {ACCELERATE}"
        if find_spec("accelerate") is None or find_spec("transformers") is None:
            result["left_out"][case] = "Accelerate is not installed"
        elif time.monotonic() > until:
            result["left_out"][case] = "no time was left"
        else:
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap * GB / total))
            batches = generate(config, int(cap * GB), average, options.new_tokens, until)
            result["cases"].append({"case": case, "cap_gb": cap, "policy": ACCELERATE, "batches": batches})
        BENCHMARK.write(result)


if __name__ == "__main__":
    main()
