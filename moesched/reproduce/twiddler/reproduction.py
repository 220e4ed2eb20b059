"""`moesched reproduce twiddler`: its figures beside our schedules on the virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

from moesched.reproduce.report import Reproduction, Section, Value, rounded
from moesched.reproduce.twiddler.dispatch import Progress, beams, generation, goals, measured, prefill
from moesched.reproduce.twiddler.environments import Bench, benches
from moesched.reproduce.twiddler.microbenchmarks import microbenchmarks
from moesched.reproduce.twiddler.paper import TwiddlerPaper, twiddler_paper
from moesched.reproduce.twiddler.variants import variants

SECTIONS = ("microbenchmarks", "generation", "prefill", "beams", "goals", "measured", "variants")


def reproduce_twiddler(only: Sequence[str], on_progress: Progress) -> Reproduction:
    """Reproduce the named sections, or all."""
    started = time.perf_counter()
    paper = twiddler_paper()
    with benches(paper) as both:

        @cache
        def fourth() -> Section:
            return generation(both, paper, on_progress)

        @cache
        def fifth() -> Section:
            return prefill(both, paper, on_progress)

        @cache
        def sixth() -> Section:
            return beams(both, paper, on_progress)

        make: dict[str, Callable[[], Section]] = {
            "microbenchmarks": lambda: microbenchmarks(both, paper),
            "generation": fourth,
            "prefill": fifth,
            "beams": sixth,
            "goals": lambda: goals(fourth(), fifth(), sixth()),
            "measured": lambda: measured(both, paper, on_progress),
            "variants": lambda: variants(paper, on_progress),
        }
        sections = [make[name]() for name in SECTIONS if not only or name in only]
        calibration = [row for bench in both for row in _calibration(bench, paper)]
    return Reproduction(
        paper="twiddler",
        title=paper.title,
        calibration=calibration,
        accuracy=None,
        accuracy_as_drawn=None,
        sections=sections,
        wall_seconds=round(time.perf_counter() - started, 1),
    )


def _calibration(bench: Bench, paper: TwiddlerPaper) -> list[dict[str, Value]]:
    """The rates of an environment that no data sheet gives, and the source of each."""
    machine = bench.machine
    link = machine.link(machine.roles.weights, machine.accelerator.memory).bandwidth
    reading = machine.accelerator.expert_bandwidth or machine.memories[machine.accelerator.memory].bandwidth
    host = machine.peak(machine.roles.host, bench.layout.dtype)
    return [
        {"environment": bench.environment.name, "rate": rate, "value": value, "set_by": by}
        for rate, value, by in (
            (
                "an expert's weights, read by the GPU",
                f"{rounded(reading / 1e9):g} GB/s",
                f"Appendix A: a copy takes 2 to 5 times the GPU's compute; {reading / link:g} times taken",
            ),
            ("the CPU, in 16 bits", f"{rounded(host / 1e9):g} GFLOP/s", paper.cpu.source),
            (
                "the link, one way",
                f"{rounded(link / 1e9):g} GB/s",
                "assumed: three quarters of PCIe; not fitted (see the authors' DeepSpeed-MII times below)",
            ),
        )
    ]
