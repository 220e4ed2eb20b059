"""Simulates each system of Twiddler's paper by one of our policies, in the environments of the paper."""

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
"""Number of simulated decode steps; all other steps are assumed to take the mean time of these."""

Machines = Callable[[Machine], Machine]


class PredictedSeconds(msgspec.Struct, frozen=True):
    """Predicted seconds of a system for one request.

    Attributes:
        prefill_seconds: seconds to the first token.
        step_seconds: seconds of a decode step, on average.
    """

    prefill_seconds: float
    step_seconds: float

    def seconds(self, new_tokens: int) -> float:
        """Return the seconds to the last of `new_tokens` tokens."""
        return self.prefill_seconds + (new_tokens - 1) * self.step_seconds


class Bench:
    """Simulator of every system in one environment; it caches results.

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
        """Predict the seconds to the first token of a prompt.

        Args:
            system: name of the system.
            prompt: number of prompt tokens.
        """
        return self.run(system, prompt, 1, 1).prefill_seconds

    def generate(self, system: str, prompt: int, beams: int = 1) -> PredictedSeconds:
        """Predict the seconds of a prompt, and of a decode step after it.

        Args:
            system: name of the system.
            prompt: number of prompt tokens.
            beams: number of beams, which are decoded together.
        """
        return self.run(system, prompt, 1 + self.looked_at, beams)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the weights other than experts, in the layers that llama.cpp keeps on the CPU."""
        on_cpu = range(self.environment.gpu_layers, self.config.layers)
        return sum(page.nbytes for layer in on_cpu for page in self.layout.dense(layer))

    def _run(self, system: str, prompt: int, new_tokens: int, beams: int) -> PredictedSeconds:
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
        return PredictedSeconds(prefill, fmean(steps) if steps else 0.0)

    def _machine_of(self, system: str) -> Machine:
        """Return the machine on which to simulate a system.

        For `layer_split`, the GPU's memory is enlarged by the dense weights that llama.cpp keeps on the CPU.
        """
        if system != "layer_split":
            return self.machine
        gpu = self.machine.accelerator.memory
        tier = self.machine.memories[gpu]
        roomy = replace(tier, capacity=tier.nbytes + self.dense_bytes, reserved=0)
        return replace(self.machine, memories={**self.machine.memories, gpu: roomy})


def as_measured(paper: TwiddlerPaper) -> Machines:
    """Return a function that changes a machine such that an expert on the CPU takes time in proportion to its tokens.

    The authors' code assumes this, with the rate that they measured.
    """
    config = find_shape(paper.model)
    rate = 6.0 * config.hidden * config.routed.intermediate / paper.cpu.seconds_per_token

    def changed(machine: Machine) -> Machine:
        host = machine.host
        linear = replace(host, flops=dict.fromkeys(host.flops, rate), expert_bandwidth=None)
        return _with(machine, machine.roles.host, linear)

    return changed


def copies_over_compute(ratio: float | None) -> Machines:
    """Return a function that changes a machine so that copying an expert takes `ratio` times as long as computing it.

    Args:
        ratio: time to copy an expert's weights to the GPU, over time to compute the expert there; None for the ratio
            that follows from the bandwidth of the GPU's memory.
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
    """Yield a `Bench` for each environment of the paper.

    Args:
        change: changes each machine; None for `as_measured`.
        looked_at: number of simulated decode steps.
    """
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
