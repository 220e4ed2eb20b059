"""Fig. 7 of Twiddler's Appendix A: the times of copying an expert, and of computing it on the GPU and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.machines.cost import cost_model
from moesched.models.operations import Operations
from moesched.reproduce.report import Section, Value, rounded
from moesched.reproduce.twiddler.environments import Bench
from moesched.reproduce.twiddler.paper import TwiddlerPaper
from moesched.work import Work

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
NEGLIGIBLE = 0.01


def microbenchmarks(benches: Sequence[Bench], paper: TwiddlerPaper) -> Section:
    """Make the section of Fig. 7: milliseconds of copying an expert, and of computing it by number of tokens.

    The section also has the milliseconds in which a token's activation is copied.
    """
    rows: list[dict[str, Value]] = []
    for bench in benches:
        copy, activation = _copies(bench)
        rows += [
            {
                "environment": bench.environment.name,
                "tokens": tokens,
                "weight_copy_ms": rounded(1e3 * copy),
                "activation_copy_ms": rounded(1e3 * activation),
                "gpu_ms": rounded(1e3 * _expert(bench, bench.machine.roles.accelerator, tokens)),
                "cpu_ms": rounded(1e3 * _expert(bench, bench.machine.roles.host, tokens)),
            }
            for tokens in TOKENS
        ]
    ratios = [float(row["weight_copy_ms"] or 0) / float(row["gpu_ms"] or 1) for row in rows]
    shares = [
        float(row["activation_copy_ms"] or 0) / float(row["cpu_ms"] or 1)
        for row in rows
        if row["tokens"] == 1
    ]
    claims = [
        paper.claims["copy"].ratio(ratios),
        paper.claims["activation"].beside(f"{max(shares):.2%}", max(shares) < NEGLIGIBLE),
    ]
    return paper.section("microbenchmarks", rows, claims)


def _copies(bench: Bench) -> tuple[float, float]:
    """Return the seconds of copying an expert's weights to the GPU, and of copying one activation to the host."""
    cost, machine = cost_model(bench.machine, bench.layout.dtype), bench.machine
    fast, slow = machine.accelerator.memory, machine.host.memory
    weights = sum(page.nbytes for page in bench.layout.an_expert)
    activation = Operations(bench.config, bench.layout.dtype).hidden_bytes
    links = (f"{slow}->{fast}", weights), (f"{fast}->{slow}", activation)
    there, back = (cost.work(Work(link, link, nbytes=nbytes)).seconds for link, nbytes in links)
    return there, back


def _expert(bench: Bench, processor: str, tokens: int) -> float:
    flops, nbytes, parts, rate = Operations(bench.config, bench.layout.dtype).fetched_expert(tokens)
    work = Work("expert", processor, flops, nbytes, tokens, parts, rate)
    return cost_model(bench.machine, bench.layout.dtype).work(work).seconds
