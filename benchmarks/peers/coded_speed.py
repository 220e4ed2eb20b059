"""Coded weights beside our own bfloat16 and llama.cpp with the same file, resident, in interleaved rounds.

A random mixtral-0.8b is written to the cache folder in bfloat16, and from it a GGUF file in each format, which ours and
llama.cpp read. Each program is a process that stays; in every round each request is run by all of them in turn. Ratios
are medians over the rounds in which nothing else ran, or over all where there was none; of these, rounds in which the
rate of memory changed by more than a tenth between the two that are compared do not count if three others remain.

The part `disk` has ours alone, with 40 % of the bytes of a Q4_K_M file as memory for weights, reading past the page
cache: a decode step over the time in which the disk gives the bytes that it reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from benchmarks.peers.comparison import BUDGET_SHARE, Case, ratio, seconds_of
from benchmarks.peers.disk import against_disk
from benchmarks.peers.environment import Peer
from benchmarks.peers.protocol import Worker
from benchmarks.peers.registry import LLAMA_CPP, OURS, OURS_ON_DISK
from benchmarks.peers.rounds import Contestant, Field, Results, turned
from benchmarks.record.benchmark import Benchmark, progress
from benchmarks.record.claims import Claim, Result, at_least, at_most
from benchmarks.shared.decoding import Model
from benchmarks.shared.gguf_files import q4_k_m, quantized, write_gguf
from benchmarks.shared.kept_models import kept_model
from moesched.models.checkpoint import open_checkpoint
from moesched.system.cache import cache_folder

MODEL = "mixtral-0.8b"
CASES = (Case(1, 128, 33), Case(4, 128, 17), Case(16, 128, 9), Case(1, 1024, 1))
PREFILLS = (CASES[0], CASES[-1])
PLAIN, CODED = OURS._replace(name="bfloat16"), OURS._replace(name="coded")
TYPES = {"q8_0": quantized(GGMLQuantizationType.Q8_0), "q4_k_m": q4_k_m}
DECODE_BARS = {
    "q8_0": {PLAIN.name: (1.6, 1.3, 1.0), LLAMA_CPP.name: (0.85, 1.0, 1.2)},
    "q4_k_m": {PLAIN.name: (2.2, 1.5, 1.1), LLAMA_CPP.name: (0.85, 1.0, 1.2)},
}
"""Of decode steps of 1, 4 and 16 sequences."""
PREFILL_BAR = 1.5
"""Of prefill beside llama.cpp."""
DISK, DISK_FORMAT, DISK_CASE, DISK_BAR = "disk", "q4_k_m", Case(16, 16, 9), 1.10
"""The part that reads from the disk, and its bar: the fastest policy's step over (bytes read / disk bandwidth)."""
PARTS = (*TYPES, DISK)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the JSON after each format."""
    options = BENCHMARK.parse(arguments)
    found = BENCHMARK.stored_parts()
    for name in options.only:
        progress.print(f"[bold]{name}[/bold]")
        found[name] = disk_steps(options) if name == DISK else measured(name, options)
        BENCHMARK.done(name)
        BENCHMARK.write(found)


def measured(name: str, options: argparse.Namespace) -> Result:
    """Rounds of all cases with a format."""
    plain, coded = models(name)
    paths = {PLAIN.name: plain, CODED.name: coded, LLAMA_CPP.name: coded}
    peers = (PLAIN, CODED) if options.alone else (PLAIN, CODED, LLAMA_CPP)

    def start(peer: Peer) -> Worker:
        return peer.start(str(paths[peer.name]))

    vocabulary = open_checkpoint(plain).config.vocabulary
    with Field(peers, start=start) as field:
        contestants, results = field.contestants(), Results()
        for number in range(options.rounds):
            for case in CASES:
                results.run(field, turned(contestants, number), case.name, case.request(vocabulary))
        cases = {case.name: figures(case, results, contestants) for case in CASES}
        return {"peers": field.about, "rounds": options.rounds, "cases": cases}


def disk_steps(options: argparse.Namespace) -> Result:
    """Rounds of every policy with weights that come from the disk."""
    _, coded = models(DISK_FORMAT)
    budget = int(BUDGET_SHARE * Model.opened(coded).weight_bytes)
    with Field([OURS_ON_DISK], str(coded), str(budget)) as field:
        cases = against_disk(field, coded, [DISK_CASE], options.rounds)
        return {"peers": field.about, "rounds": options.rounds, "budget_bytes": budget, "cases": cases}


def models(name: str) -> tuple[Path, Path]:
    """The model's folder in bfloat16 and its file in a format; written now if there are none."""
    plain, coded = kept_model(MODEL), cache_folder() / f"{MODEL}-{name}.gguf"
    if not coded.exists():
        begun = coded.with_suffix(".part")
        write_gguf(open_checkpoint(plain), begun, TYPES[name])
        begun.rename(coded)
    return plain, coded


def figures(case: Case, results: Results, contestants: Sequence[Contestant]) -> dict[str, Any]:
    """Seconds of everybody in each phase, and the rate by coded weights over the best setting of the others."""
    found: dict[str, Any] = {"failed": results.reasons(case.name)}
    answered = [(each, answers) for each in contestants if (answers := results.answers(case.name, each))]
    for phase in ("prefill", "decode") if case.new_tokens > 1 else ("prefill",):
        rows: dict[str, dict[str, Any]] = {
            contestant.name: {
                "peer": contestant.peer,
                "seconds": [seconds_of(phase, answer) for answer in answers],
                "other_cores": [answer["other_cores"] for answer in answers],
                "memory_gbs": [answer["memory_gbs"] for answer in answers],
            }
            for contestant, answers in answered
        }
        [mine] = [row for row in rows.values() if row["peer"] == CODED.name]
        over: dict[str, dict[str, float]] = {}
        for row in rows.values():
            against, known = ratio(mine, row), over.get(row["peer"])
            if known is None or against["median"] < known["median"]:
                over[row["peer"]] = against
        found[phase] = {"rows": rows, "over": over}
    return found


def claims(result: Result) -> Iterator[Claim]:
    """All figures that have a bar, as far as they were measured."""
    for name, bars in DECODE_BARS.items():
        cases = result.get(name, {}).get("cases", {})
        wanted = [
            ("decode", peer, case, bar)
            for peer, of_cases in bars.items()
            for case, bar in zip(CASES, of_cases, strict=False)
        ]
        for phase, peer, case, bar in [
            *wanted,
            *(("prefill", LLAMA_CPP.name, case, PREFILL_BAR) for case in PREFILLS),
        ]:
            over = cases.get(case.name, {}).get(phase, {}).get("over", {})
            if peer in over:
                words = f"weights in {name}, {case.name}: {phase} over {peer}"
                yield at_least(words, over[peer]["median"], bar, "{:.2f}")
    if DISK in result:
        policies = result[DISK]["cases"][DISK_CASE.name]
        policy, row = min(policies.items(), key=lambda each: float(each[1]["step_seconds"]))
        words = f"weights in {DISK_FORMAT} on the disk, {policy}: step over (bytes read / disk bandwidth)"
        yield at_most(words, row["over_disk"], DISK_BAR, "{:.3f}")


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=PARTS,
    rounds=5,
    rounds_help="rounds of every request",
    keeps_parts=True,
)
BENCHMARK.parser.add_argument(
    "--alone", action="store_true", help="ours alone, by coded weights and by bfloat16"
)


if __name__ == "__main__":
    main()
