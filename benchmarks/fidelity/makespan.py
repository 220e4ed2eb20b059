"""twiddler_makespan against twiddler and layer_split, simulated on both environments of the Twiddler paper.

Mixtral 8x7B with 56 and 125 of its 256 experts on the GPU (Table 1), popular as in Appendix C: batch 1 with 64 tokens
in and 32 out, prefill of 512 to 4096 tokens, beam search of widths 4, 8 and 12 with 32 tokens in and 16 out, its beams
in one batch. layer_split has 8 and 16 layers on the GPU at most, as many as fit. Ratios are the others' seconds over
twiddler_makespan's.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_least, times
from moesched.machines import load_machine
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import Batch, split_batch
from moesched.routing.choices import BatchRouting
from moesched.routing.generated import GeneratedChoices
from moesched.routing.popularity import LikeMixtral, expected_profile
from moesched.routing.profile import write_profile
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate

SHAPE = SHAPES["mixtral-8x7b"]
LAYOUT = weight_layout(SHAPE, "bfloat16")
EXPERTS = {"rtx6000": 56, "rtx6000-ada": 125}
GPU_LAYERS = {"rtx6000": 8, "rtx6000-ada": 16}
OURS = "twiddler_makespan"
OTHERS = ("twiddler", "layer_split")


def cases() -> dict[str, Batch]:
    """Batches by name."""
    beams = {f"beams {n}": msgspec.structs.replace(split_batch([32], 16, 1), beams=n) for n in (4, 8, 12)}
    prefill = {f"prefill {n}": split_batch([n], 1, 1) for n in (512, 1024, 2048, 4096)}
    return {"batch 1": split_batch([64], 32, 1), **prefill, **beams}


def seconds(machine: str, policy: str, batch: Batch, profile: Path, seed: int) -> float:
    """All steps together."""
    settings: dict[str, Any] = {"experts": EXPERTS[machine], "popularity": str(profile)}
    if policy == "layer_split":
        settings = {"gpu_layers": GPU_LAYERS[machine]}
    made = make_policy(policy, settings)
    plan = plan_run(load_machine(machine), LAYOUT, batch, made)
    routing = BatchRouting(GeneratedChoices(LikeMixtral(), SHAPE, seed), batch)
    return sum(simulate(plan, made, routing=routing).step_seconds)


def claims(result: Result) -> Iterator[Claim]:
    """`twiddler_makespan` beside others, simulated."""
    mean = times(result["times_twiddler_prefill_and_beams"])
    yield Claim("simulated: `twiddler_makespan` over `twiddler`, prefill and beams, mean", mean)
    least = result["times_twiddler_least"]
    yield at_least("simulated: `twiddler_makespan` over `twiddler`, least", least, 1.0, "{:.2f}x")


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=[f"{machine}, {case}" for machine in EXPERTS for case in cases()],
    rounds_help="seeds of the routing; medians count",
    by_machine=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print a table, write the JSON."""
    options = BENCHMARK.parse(arguments)
    found: dict[str, dict[str, dict[str, float]]] = {machine: {} for machine in EXPERTS}
    with tempfile.TemporaryDirectory() as folder:
        profiles = [Path(folder) / f"popularity-{seed}.csv" for seed in range(options.rounds)]
        for seed, profile in enumerate(profiles):
            write_profile(expected_profile(LikeMixtral(), SHAPE, seed, 100_000), profile)
        for part in track(options.only, "simulating"):
            machine, _, case = part.partition(", ")
            took = {
                policy: median(
                    seconds(machine, policy, cases()[case], profile, seed)
                    for seed, profile in enumerate(profiles)
                )
                for policy in (OURS, *OTHERS)
            }
            found[machine][case] = took
    gains = {
        f"{other}, {machine}": {case: round(took[other] / took[OURS], 3) for case, took in each.items()}
        for machine, each in found.items()
        for other in OTHERS
    }
    return BENCHMARK.write(
        {**(means(gains) if options.only == BENCHMARK.parts else {}), "ratios": gains, "seconds": found}
    )


def means(gains: dict[str, dict[str, float]]) -> dict[str, float]:
    """The figures that stand for all cases."""
    twiddler = [each for name, each in gains.items() if name.startswith("twiddler,")]
    long = [ratio for each in twiddler for case, ratio in each.items() if case != "batch 1"]
    split = [each["batch 1"] for name, each in gains.items() if name.startswith("layer_split")]
    return {
        "times_twiddler_prefill_and_beams": round(fmean(long), 3),
        "times_twiddler_least": min(min(each.values()) for each in twiddler),
        "times_layer_split_batch_1": round(fmean(split), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
