"""Compare twiddler_makespan's estimate of a layer with its time: on an emulated machine, and with lanes sharing.

Real runs of a small random Mixtral on the emulated device: real threads, tensors, queues and copies, an accelerator and
a link that keep the time of a machine whose rates are divided so that an expert takes as long as Mixtral 8x7B's does on
the profile. Emulated tasks do not slow each other down; so Mixtral 8x7B itself runs on the virtual clock too, where
lanes share memories max-min fairly. A layer is measured from the router's answer to the last output on the accelerator.
Prompts of several lengths and beams give layers of all sorts. The error is |expected / measured - 1| of each layer.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most, together
from moesched.devices.emulated.device import EmulatedDevice
from moesched.machines import Machine, Tier, load_machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import Batch, split_batch
from moesched.requests.sampling import Sampling
from moesched.routing.choices import BatchRouting
from moesched.routing.generated import GeneratedChoices
from moesched.routing.popularity import LikeMixtral
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.tasks import Task

MIXTRAL = SHAPES["mixtral-8x7b"]
SMALL = MIXTRAL.varied(
    name="mixtral-small",
    layers=4,
    hidden=256,
    intermediate=896,
    heads=8,
    kv_heads=2,
    head_dim=32,
    vocabulary=512,
)
MACHINES = ("rtx6000", "rtx6000-ada", "t4")
KEPT = {"rtx6000": 56 / 256, "rtx6000-ada": 125 / 256, "t4": 20 / 256}
CASES = {"a prompt of 64": (64, 6, 1), "a prompt of 300": (300, 2, 1), "8 beams": (16, 6, 8)}
BAR = 0.10


class Ended:
    """Remembers the tasks of the steps."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def ended(self, task: Task) -> None:
        if task.step >= 0:
            self.tasks.append(task)


def slower(machine: Machine, layout: WeightLayout) -> Machine:
    """A machine on which the layout's experts take as long as Mixtral 8x7B's in 16 bits do on the other."""
    config = layout.config
    smaller = (
        MIXTRAL.hidden * MIXTRAL.routed.intermediate * 2 / (config.hidden * config.routed.intermediate * 4)
    )
    replace = msgspec.structs.replace
    processors = {
        name: replace(
            each,
            flops={"float32": each.flops["bfloat16"] / smaller / 2},
            expert_bandwidth=each.expert_bandwidth and each.expert_bandwidth / smaller,
        )
        for name, each in machine.processors.items()
    }
    memories = {
        name: Tier(capacity="1GB", bandwidth=each.bandwidth / smaller)
        for name, each in machine.memories.items()
    }
    links = [replace(each, bandwidth=each.bandwidth / smaller) for each in machine.links]
    return replace(
        machine, name=f"{machine.name}-like", processors=processors, memories=memories, links=links
    )


def layers_of(tasks: Sequence[Task], policy: Any) -> list[dict[str, float]]:
    """Estimated and measured seconds of every layer of every step."""
    ends: dict[tuple[int, int], int] = {}
    for task in tasks:
        if task.verb in ("run_expert", "load_routed"):
            ends[task.step, task.layer] = max(task.end, ends.get((task.step, task.layer), 0))
    found = []
    for task in tasks:
        if task.verb != "route":
            continue
        expected = policy.decisions.divide({0: task.value}, policy.stays[task.layer])
        if expected.seconds:
            measured = (ends[task.step, task.layer] - task.end) / 1e9
            found.append({"expected": expected.seconds, "measured": measured})
    return found


def batch_of(prompt: int, new_tokens: int, beams: int) -> Batch:
    return msgspec.structs.replace(split_batch([prompt], new_tokens, 1), beams=beams)


def emulated(machine: str, case: str, checkpoint_folder: Path) -> list[dict[str, float]]:
    """Layers of a real run on the emulated device."""
    prompt, new_tokens, beams = CASES[case]
    checkpoint = open_checkpoint(checkpoint_folder)
    layout = weight_layout(checkpoint.config, "float32")
    device = EmulatedDevice(checkpoint, layout)
    policy: Any = make_policy(
        "twiddler_makespan", {"experts": round(KEPT[machine] * SMALL.layers * SMALL.routed.experts)}
    )
    described = slower(load_machine(machine), layout)
    plan = plan_run(described, layout, batch_of(prompt, new_tokens, beams), policy, {}, device.slot_bytes)
    ended = Ended()
    prompts = [[(7 * place * place + place) % SMALL.vocabulary for place in range(prompt)]]
    run(plan, policy, device, prompts, sampling=Sampling(beams=beams), observers=[ended])
    return layers_of(ended.tasks, policy)


def shared(machine: str, case: str) -> list[dict[str, float]]:
    """Layers of Mixtral 8x7B on the virtual clock, where lanes share memories."""
    layout, batch = weight_layout(MIXTRAL, "bfloat16"), batch_of(*CASES[case])
    experts = round(KEPT[machine] * MIXTRAL.layers * MIXTRAL.routed.experts)
    policy: Any = make_policy("twiddler_makespan", {"experts": experts})
    plan = plan_run(load_machine(machine), layout, batch, policy)
    ended = Ended()
    routing = BatchRouting(GeneratedChoices(LikeMixtral(), MIXTRAL), batch)
    simulate(plan, policy, routing=routing, sharing=True, observers=[ended])
    return layers_of(ended.tasks, policy)


def summary(layers: Sequence[dict[str, float]]) -> dict[str, float]:
    """Errors, and the medians of both."""
    errors = sorted(abs(each["expected"] / each["measured"] - 1) for each in layers)
    return {
        "layers": len(layers),
        "median_error": round(median(errors), 4),
        "worst_tenth": round(errors[int(0.9 * len(errors))], 4),
        "expected_ms": round(1e3 * median(each["expected"] for each in layers), 3),
        "measured_ms": round(1e3 * median(each["measured"] for each in layers), 3),
    }


def claims(result: Result) -> Iterator[Claim]:
    """`twiddler_makespan`'s estimate of a layer."""
    errors = result["median_error"]
    words = f"`twiddler_makespan`'s estimate of a layer, median error ({', '.join(errors)})"
    claims = [at_most("", 100 * error, 100 * result["bar"], "{:.1f} %") for error in errors.values()]
    yield together(words, *claims)


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    packages=("torch",),
    claims=claims,
    parts=[f"{machine}, {case}" for machine in MACHINES for case in CASES],
    rounds_help="emulated runs of each case",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a table, write the JSON."""
    options = BENCHMARK.parse(arguments)
    found: dict[str, dict[str, Any]] = {"emulated": {}, "shared": {}}
    everything: dict[str, list[dict[str, float]]] = {"emulated": [], "shared": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_random_model(SMALL, Path(folder) / "model", seed=1, dtype="float32")
        for part in track(options.only, "layers", still=True):
            machine, _, case = part.partition(", ")
            repeated = [emulated(machine, case, checkpoint) for _ in range(options.rounds)]
            layers = {"emulated": [*chain.from_iterable(repeated)], "shared": shared(machine, case)}
            for kind, mine in layers.items():
                everything[kind] += mine
                found[kind][part] = summary(mine)
    errors = {
        kind: median(abs(each["expected"] / each["measured"] - 1) for each in layers)
        for kind, layers in everything.items()
    }
    return BENCHMARK.write(
        {
            "bar": BAR,
            "median_error": {kind: round(error, 4) for kind, error in errors.items()},
            "cases": found,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
