"""`moesched reproduce twiddler`: makes the sections that compare the paper's figures with our predictions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

from moesched.reproduce.printed import Made
from moesched.reproduce.report import Value, rounded
from moesched.reproduce.twiddler.dispatch import Progress, beams, generation, goals, measured, prefill
from moesched.reproduce.twiddler.environments import Bench, benches
from moesched.reproduce.twiddler.microbenchmarks import microbenchmarks
from moesched.reproduce.twiddler.paper import TwiddlerPaper, twiddler_paper
from moesched.reproduce.twiddler.variants import variants


@contextmanager
def twiddler_made(on_progress: Progress) -> Iterator[Made]:
    """Yield functions that make the paper's sections; those of Figs. 4 to 6 are cached, as the goals need them, too."""
    paper = twiddler_paper()
    with benches(paper) as both:
        fourth, fifth, sixth = (
            cache(partial(figure, both, paper, on_progress)) for figure in (generation, prefill, beams)
        )
        yield Made(
            {
                "microbenchmarks": lambda: microbenchmarks(both, paper),
                "generation": fourth,
                "prefill": fifth,
                "beams": sixth,
                "goals": lambda: goals(paper, fourth(), fifth(), sixth()),
                "measured": lambda: measured(both, paper, on_progress),
                "variants": lambda: variants(paper, on_progress),
            },
            lambda: [row for bench in both for row in _calibration(bench, paper)],
        )


def _calibration(bench: Bench, paper: TwiddlerPaper) -> list[dict[str, Value]]:
    """Return a row for each rate of an environment's machine that no data sheet gives: name, value and source."""
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
