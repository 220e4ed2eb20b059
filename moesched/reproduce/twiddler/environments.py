"""Twiddler's environments on the virtual clock: its machines as it measured them, its systems as our policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec.structs import replace

from moesched.inputs.lookup import find_shape
from moesched.jobs.simulate_model import simulate_model
from moesched.machines import Machine, Processor, load_machine
from moesched.machines.sustained import at_peak
from moesched.models.layout import weight_layout
from moesched.reproduce.twiddler.paper import Environment, TwiddlerPaper
from moesched.requests.workloads import given_lengths
from moesched.routing.profile import write_profile
from moesched.routing.sources import find_profile
from moesched.system.scratch import scratch_folder

OURS = ("twiddler", "twiddler_makespan")
RIVALS = {
    "layer_split": "llama.cpp",
    "lru_offload": "Mixtral-Offloading",
    "layer_streaming": "DeepSpeed-MII",
}
SEED = 0
LOOKED_AT = 32
"""Number of simulated decode steps; the others are assumed to take their mean."""

Machines = Callable[[Machine], Machine]


class Ran(msgspec.Struct, frozen=True):
    """Prediction for a system: seconds to the first token, and of a decode step on average."""

    prefill_seconds: float
    step_seconds: float

    def seconds(self, new_tokens: int) -> float:
        """Return the seconds to the last of `new_tokens` tokens."""
        return self.prefill_seconds + (new_tokens - 1) * self.step_seconds


class Bench:
    """One environment, with every system on it; simulations are cached.

    Args:
        popularity: file of the routing profile by which Twiddler chooses the experts to keep on the GPU.
        looked_at: number of simulated decode steps.
    """

    def __init__(
        self,
        paper: TwiddlerPaper,
        environment: Environment,
        machine: Machine,
        popularity: Path,
        looked_at: int = LOOKED_AT,
    ) -> None:
        self.paper = paper
        self.environment = environment
        self.machine = machine
        self.config = find_shape(paper.model)
        self.layout = weight_layout(self.config)
        self.looked_at = looked_at
        ours: dict[str, str | int] = {"experts": environment.experts, "popularity": str(popularity)}
        self._systems: dict[str, tuple[str, dict[str, str | int]]] = {
            "twiddler": ("twiddler", ours),
            "twiddler_makespan": ("twiddler_makespan", ours),
            "lru_offload": ("lru_offload", {"offload_per_layer": environment.offload_per_layer}),
            "layer_split": ("layer_split", {"gpu_layers": environment.gpu_layers}),
            "layer_streaming": ("layer_streaming", {}),
        }
        self.run = cache(self._run)

    def first_token(self, system: str, prompt: int) -> float:
        """Predict the seconds to the first token."""
        return self.run(system, prompt, 1, 1).prefill_seconds

    def generate(self, system: str, prompt: int, beams: int = 1) -> Ran:
        """Predict a prompt, and the decode steps after it."""
        return self.run(system, prompt, 1 + self.looked_at, beams)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense weights in the layers that llama.cpp has on the CPU."""
        on_cpu = range(self.environment.gpu_layers, self.config.layers)
        return sum(page.nbytes for layer in on_cpu for page in self.layout.dense(layer))

    def _run(self, system: str, prompt: int, new_tokens: int, beams: int) -> Ran:
        policy, settings = self._systems[system]
        report = simulate_model(
            self.paper.model,
            machine=self._machine_of(system),
            policy=policy,
            settings=settings,
            workload=given_lengths([prompt], new_tokens),
            routing=self.paper.routing,
            seed=SEED,
            beams=beams,
            batch_size=1,
            micro_batch_size=1,
        )
        prefill, *steps = report.step_seconds
        return Ran(prefill, fmean(steps) if steps else 0.0)

    def _machine_of(self, system: str) -> Machine:
        """Return the machine; for `layer_split`, its GPU has room for dense weights that llama.cpp has on the CPU."""
        if system != "layer_split":
            return self.machine
        gpu = self.machine.accelerator.memory
        tier = self.machine.memories[gpu]
        roomy = replace(tier, capacity=tier.nbytes + self.dense_bytes, reserved=0)
        return replace(self.machine, memories={**self.machine.memories, gpu: roomy})


def as_measured(paper: TwiddlerPaper) -> Machines:
    """Return a change of profiles that makes the CPU's time proportional to tokens, as in the authors' code."""
    config = find_shape(paper.model)
    rate = 6.0 * config.hidden * config.routed.intermediate / paper.cpu.seconds_per_token

    def changed(machine: Machine) -> Machine:
        host = machine.host
        linear = replace(host, flops=dict.fromkeys(host.flops, rate), expert_bandwidth=None)
        return _with(machine, machine.roles.host, linear)

    return changed


def copies_over_compute(ratio: float | None) -> Machines:
    """Return a change of profiles that sets the GPU's rate such that copying an expert takes `ratio` times its compute.

    For None, the GPU reads weights at the rate of its memory.
    """

    def changed(machine: Machine) -> Machine:
        link = machine.link(machine.roles.weights, machine.accelerator.memory)
        bandwidth = None if ratio is None else ratio * link.bandwidth
        return _with(
            machine, machine.roles.accelerator, replace(machine.accelerator, expert_bandwidth=bandwidth)
        )

    return changed


@contextmanager
def benches(
    paper: TwiddlerPaper, change: Machines | None = None, looked_at: int = LOOKED_AT
) -> Iterator[list[Bench]]:
    """Yield all environments, with machines as the authors measured them, or with another `change` of profiles."""
    change = change or as_measured(paper)
    config = find_shape(paper.model)
    with scratch_folder() as folder:
        popularity = folder / "popularity.csv"
        write_profile(find_profile(paper.routing, config, seed=SEED), popularity)
        yield [
            Bench(paper, each, change(at_peak(load_machine(each.machine))), popularity, looked_at)
            for each in paper.environments
        ]


def _with(machine: Machine, name: str, processor: Processor) -> Machine:
    return replace(machine, processors={**machine.processors, name: processor})
