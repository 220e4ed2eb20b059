"""One request under policies that decide where experts run, on this machine: emulated, and with weights on the disk.

emulated    Environment 2 of Twiddler (the profile rtx6000-ada) with every capacity and rate divided by how many times
            Mixtral 8x7B is larger than a small random model in float32 with as many layers: a second there is about
            a second here. 125 of 256 experts stay on the emulated GPU under `twiddler`, the settings of the others are
            the paper's. Time runs slower by one factor for all, --dilation. Beside each run stands its simulation.
disk        A random mixtral-0.8b of fewer layers with half of its weights' bytes as memory, and the rest on the disk.

A batch of one, a long prompt, and a beam search. Runs that would begin after --seconds are left out, and the result
says so. Cases that are not run stay in the result file.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from _dispatch_cases import POLICIES, Scenario, compared
from _options import EXECUTION, Benchmark, track

from moesched import run_model, simulate_model
from moesched.calibration.other_load import OtherLoad
from moesched.errors import MoeschedError
from moesched.machines import Machine, Tier, load_machine
from moesched.models.config import ModelConfig
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.requests.workloads import given_lengths

SMALLER = 32
BIG = SHAPES["mixtral-8x7b"]
SMALL = BIG.varied(
    name="mixtral-8x7b / 32",
    hidden=BIG.hidden // SMALLER,
    intermediate=BIG.routed.intermediate // SMALLER,
    heads=8,
    kv_heads=1,
    head_dim=16,
    vocabulary=BIG.vocabulary // SMALLER,
    dtype="float32",
)
SETTINGS: dict[str, dict[str, Any]] = {
    "twiddler": {"experts": 125},
    "twiddler_makespan": {"experts": 125},
    "lru_offload": {"offload_per_layer": 5},
    "layer_split": {"gpu_layers": 15},
}
"""15 layers, not 16: dense weights of all layers are on the GPU here, and take the room of the last one."""
EMULATED = (Scenario(32, 4), Scenario(512, 1), Scenario(32, 4, beams=4))
DISK_SHAPE, DISK_LAYERS, DISK_MEMORY = "mixtral-0.8b", 4, 0.5
DISK = (Scenario(32, 17), Scenario(256, 1), Scenario(32, 9, beams=4))
DISK_POLICIES = ("twiddler", "lru_offload", "layer_streaming")
"""With one memory there is no other processor to run an expert on, so that `layer_split` has nothing to split."""


class Bench:
    """The result, and how much time is left."""

    def __init__(self, chosen: Sequence[str], seconds: float, dilation: float) -> None:
        self.dilation = dilation
        self._until = time.monotonic() + seconds
        before = BENCHMARK.stored() or {"cases": [], "left_out": {}}
        self._result: dict[str, Any] = {
            "compared": [],
            "cases": [case for case in before["cases"] if f"{case['where']}, {case['policy']}" not in chosen],
            "left_out": {
                case: why for case, why in before["left_out"].items() if part_of(case) not in chosen
            },
        }

    def measure(
        self, where: str, model: Path, config: ModelConfig, policy: str, scenario: Scenario, **how: Any
    ) -> None:
        """One policy in one scenario."""
        case = f"{where}, {scenario.name}, {policy}"
        if time.monotonic() > self._until:
            self._result["left_out"][case] = "no time was left"
            return
        load = OtherLoad()
        try:
            report = run_model(
                model,
                [scenario.ids(config.vocabulary)],
                policy=POLICIES[policy],
                max_new_tokens=scenario.new_tokens,
                sampling=scenario.sampling,
                batch_size=1,
                micro_batch_size=1,
                **how,
            )
        except MoeschedError as error:
            self._result["left_out"][case] = str(error)
            return
        self._result["cases"].append(
            {
                "where": where,
                "scenario": scenario.name,
                "policy": policy,
                **scenario.seconds(report),
                "total_seconds": sum(report.step_seconds),
                "cores_of_others": round(load.cores(), 2),
                "emulation": report.emulation and msgspec.to_builtins(report.emulation),
                "predicted": self._predicted(model, policy, scenario, how) if where == "emulated" else None,
                "tokens": report.tokens,
            }
        )
        self.write()

    def write(self) -> None:
        """Write what there is."""
        self._result["compared"] = compared(self._result["cases"])
        BENCHMARK.write(self._result)

    def _predicted(
        self, model: Path, policy: str, scenario: Scenario, how: dict[str, Any]
    ) -> dict[str, float]:
        """The same by simulation, with experts drawn evenly; a random model's repeat themselves, which caches like."""
        report = simulate_model(
            model,
            machine=how["machine"],
            policy=POLICIES[policy],
            settings=how["settings"],
            workload=given_lengths([scenario.prompt], scenario.new_tokens),
            beams=scenario.beams,
            batch_size=1,
            micro_batch_size=1,
        )
        return scenario.seconds(report)


def emulated(bench: Bench, policies: Sequence[str], folder: Path) -> None:
    """Environment 2, smaller by one factor."""
    model = write_random_model(SMALL, folder / "emulated", dtype="float32")
    machine = smaller(
        load_machine("rtx6000-ada"), _bytes(weight_layout(BIG, "bfloat16")), _bytes(weight_layout(SMALL))
    )
    for scenario in EMULATED:
        for policy in policies:
            bench.measure(
                "emulated",
                model,
                SMALL,
                policy,
                scenario,
                settings=SETTINGS.get(policy, {}),
                device="emulated",
                device_settings={"dilation": bench.dilation},
                machine=machine,
            )


def disk(bench: Bench, policies: Sequence[str], folder: Path) -> None:
    """Less memory than weights."""
    config = SHAPES[DISK_SHAPE].varied(layers=DISK_LAYERS)
    model = write_random_model(DISK_SHAPE, folder / "disk", layers=DISK_LAYERS)
    layout = weight_layout(config)
    budget = int(layout.globals_bytes + DISK_MEMORY * _bytes(layout)) + (200 << 20)
    for scenario in DISK:
        for policy in policies:
            if policy in DISK_POLICIES:
                bench.measure("disk", model, config, policy, scenario, budgets={"host": budget})


def part_of(case: str) -> str:
    """The part that a case which was left out belongs to: where it was to run, and its policy."""
    words = case.split(", ")
    return f"{words[0]}, {words[-1]}"


def smaller(machine: Machine, big: int, small: int) -> Machine:
    """The machine with every capacity and rate divided, FLOP/s by twice as much: float32 has half of them per byte."""
    by = big / small
    replace = msgspec.structs.replace
    return replace(
        machine,
        name=f"{machine.name} / {by:.0f}",
        processors={
            name: replace(
                each,
                flops={"float32": each.flops["bfloat16"] / by / 2},
                expert_bandwidth=each.expert_bandwidth and each.expert_bandwidth / by,
            )
            for name, each in machine.processors.items()
        },
        memories={
            name: Tier(capacity=int(each.nbytes / by), bandwidth=each.bandwidth / by)
            for name, each in machine.memories.items()
        },
        links=[replace(each, bandwidth=each.bandwidth / by) for each in machine.links],
    )


def _bytes(layout: WeightLayout) -> int:
    return sum(page.nbytes for page in layout.pages)


PARTS = {"emulated": emulated, "disk": disk}

BENCHMARK = Benchmark(
    __doc__,
    "dispatch",
    measures=("benchmarks/_dispatch_cases.py", *EXECUTION),
    packages=("torch",),
    parts=[
        f"{where}, {policy}"
        for where, policies in (("emulated", tuple(POLICIES)), ("disk", DISK_POLICIES))
        for policy in policies
    ],
    rounds_help="run each case this often; all runs are listed",
    keeps_parts=True,
)
BENCHMARK.parser.add_argument("--seconds", type=float, default=330.0, help="begin no run after this")
BENCHMARK.parser.add_argument(
    "--dilation", type=float, default=4.0, help="slow motion of the emulated machine"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both parts, each in a folder for its model."""
    options = BENCHMARK.parse(arguments)
    bench = Bench(options.only, options.seconds, options.dilation)
    with tempfile.TemporaryDirectory() as folder:
        for where, run_part in track([*PARTS.items()] * options.rounds, "dispatching", still=True):
            policies = [policy for policy in POLICIES if f"{where}, {policy}" in options.only]
            if policies:
                run_part(bench, policies, Path(folder))
    bench.write()


if __name__ == "__main__":
    main()
