"""One request of Mixtral 8x7B's shape on a CUDA GPU that may use 24 or 48 GB, by where experts are to run.

Weights are random and made in memory, in as many layers as the host holds. The machine is probed on the spot; what was
predicted for it stands beside what came out. Generation at batch 1, prompts of 512 to 4096, beam search of width 4, 8
and 12. A case is begun only if its predicted time, and a half more, is left of --seconds; the result says which were
not. The result is written after each case.

Needs a GPU. `--small` takes a shape of a few MB instead, to try the benchmark itself.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec
import torch
from _cuda_probe import probe
from _dispatch_cases import POLICIES, Scenario, compared
from _gpu_sizes import TINY
from _options import EXECUTION, Benchmark, track

from moesched import plugins
from moesched.devices.torch.cuda_device import CudaDevice
from moesched.errors import BadInput, MoeschedError
from moesched.machines import Machine, Tier
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.requests.batch import Batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.seams import Policy
from moesched.steps.plan import Plan
from moesched.system.memory import available_memory
from moesched.testing.random_weights import random_checkpoint

GB = 10**9
PINNED = 8 * GB
FOR_WEIGHTS = 0.75
"""Of the host's free memory; the rest is for the KV cache and for Python."""
FRAGMENTS = 0.05
"""Of the cap, for what torch's allocator cannot use and cuBLAS takes."""
SCENARIOS = (
    Scenario(64, 33),
    *(Scenario(prompt, 1) for prompt in (512, 1024, 2048, 4096)),
    *(Scenario(32, 17, beams) for beams in (4, 8, 12)),
)


class Bench:
    """The model on the device."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.layout = weight_layout(config, "bfloat16")
        self.device = CudaDevice(random_checkpoint(config), self.layout)

    def plan(self, machine: Machine, name: str, scenario: Scenario) -> tuple[Plan, Policy]:
        """A policy made anew, and its plan."""
        policy: Policy = plugins.make_policy(POLICIES[name])
        batch = Batch((scenario.prompt,), scenario.new_tokens, ((0,),), beams=scenario.beams)
        return plan_run(machine, self.layout, batch, policy, None, self.device.slot_bytes), policy

    def case(self, machine: Machine, name: str, scenario: Scenario, left: float) -> dict[str, Any]:
        """One policy in one scenario.

        Raises:
            BadInput: it does not fit, or takes longer than what is left.
        """
        predicted = simulate(*self.plan(machine, name, scenario))
        seconds = sum(predicted.step_seconds)
        if 1.5 * seconds > left:
            raise BadInput(f"it would take {seconds:.0f} s of the {left:.0f} s that are left")
        begin_peak(torch.cuda)
        plan, policy = self.plan(machine, name, scenario)
        report = run(
            plan,
            policy,
            self.device,
            [scenario.ids(self.config.vocabulary)],
            sampling=scenario.sampling,
            keep_open=True,
        )
        return {
            "policy": name,
            "scenario": scenario.name,
            **scenario.seconds(report),
            "total_seconds": sum(report.step_seconds),
            "predicted": scenario.seconds(predicted),
            "peak_bytes": {
                "predicted": report.peak_bytes["gpu"],
                "allocated": torch.cuda.max_memory_allocated(),
            },
            "tokens": report.tokens,
        }


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
    "gpu_dispatch",
    measures=("benchmarks/_dispatch_cases.py", "benchmarks/_cuda_probe.py", *EXECUTION),
    packages=("torch",),
    parts=POLICIES,
    rounds_help="run each case this often; all runs are listed",
)
BENCHMARK.parser.add_argument("--caps", nargs="+", type=float, default=[24, 48], help="GB of GPU memory")
BENCHMARK.parser.add_argument(
    "--seconds", type=float, default=540.0, help="begin no run that would end later"
)
BENCHMARK.parser.add_argument("--layers", type=int, help="of the model; by default as many as the host holds")
BENCHMARK.parser.add_argument("--small", action="store_true", help="a shape of a few MB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe, run what there is time for, and write the JSON after each case."""
    options = BENCHMARK.parse(arguments)
    if not torch.cuda.is_available():
        print("torch sees no CUDA device here: nothing is measured")
        return
    until = time.monotonic() + options.seconds
    total = torch.cuda.get_device_properties(0).total_memory
    machine = probe(total, min(PINNED, available_memory() // 8))
    whole = TINY if options.small else SHAPES["mixtral-8x7b"]
    layers = options.layers or layers_that_fit(whole)
    bench = Bench(msgspec.structs.replace(whole, layers=layers, dtype="bfloat16"))
    result: dict[str, Any] = {
        "probed": msgspec.to_builtins(machine),
        "model": {"shape": whole.name, "layers": layers},
        "compared": [],
        "cases": [],
        "left_out": {},
    }
    cases = [*product(SCENARIOS, options.caps, options.only)] * options.rounds
    for scenario, cap, name in track(cases, "dispatching", still=True):
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * GB / total))
        where = f"{cap:g} GB"
        try:
            done = bench.case(capped(machine, int(cap * GB)), name, scenario, until - time.monotonic())
            result["cases"].append({"where": where, **done})
        except (MoeschedError, torch.cuda.OutOfMemoryError) as error:
            result["left_out"][f"{where}, {scenario.name}, {name}"] = f"{type(error).__name__}: {error}"
        result["compared"] = compared(result["cases"])
        BENCHMARK.write(result)
    bench.device.close()


if __name__ == "__main__":
    main()
