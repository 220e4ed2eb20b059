"""Ratios of Twiddler's throughput to its rivals' throughputs, under other assumptions about the machines."""

from __future__ import annotations

from moesched.reproduce.report import Section, rounded
from moesched.reproduce.twiddler import llama_cpp
from moesched.reproduce.twiddler.dispatch import Progress, Rows, beam_by_beam
from moesched.reproduce.twiddler.environments import (
    Bench,
    Machines,
    as_measured,
    benches,
    copies_over_compute,
)
from moesched.reproduce.twiddler.paper import TwiddlerPaper

STEPS = 8
INPUT, OUTPUT, PREFILL, WIDTH = 64, 128, 1024, 8
"""The configuration of each figure that is simulated here in place of all."""


def variants(paper: TwiddlerPaper, on_progress: Progress) -> Section:
    """Make the section of the paper's ratios under several assumptions about the machines, for each environment."""
    measured = as_measured(paper)

    def with_ratio(ratio: float | None) -> Machines:
        return lambda machine: copies_over_compute(ratio)(measured(machine))

    assumed: dict[str, Machines] = {
        "as elsewhere on this page": measured,
        "a copy takes 2 times the GPU's compute": with_ratio(2.0),
        "the GPU reads weights as fast as its memory": with_ratio(None),
        "the CPU: a step, then a line (the profile)": lambda machine: machine,
    }
    rows: Rows = []
    for name, change in assumed.items():
        on_progress(f"other assumptions: {name}")
        with benches(paper, change, STEPS) as changed:
            for bench in changed:
                rows.append({"assumed": name, "environment": bench.environment.name, **_ratios(bench, paper)})
    return paper.section("variants", rows, steps=STEPS)


def _ratios(bench: Bench, paper: TwiddlerPaper) -> dict[str, float]:
    prompt, output = paper.grid.beam_input, paper.grid.beam_output

    def generating(policy: str) -> float:
        return bench.generate(policy, INPUT).seconds(OUTPUT)

    def decoding(policy: str) -> float:
        return bench.generate(policy, INPUT).step_seconds

    def searching(policy: str) -> float:
        return bench.generate(policy, prompt, WIDTH).seconds(output)

    prefill = bench.first_token("twiddler", PREFILL)
    ours, makespan = searching("twiddler"), searching("twiddler_makespan")
    found = {
        "generation_over_layer_split": generating("layer_split") / generating("twiddler"),
        "generation_over_llama_cpp": llama_cpp.generate(bench, INPUT).seconds(OUTPUT)
        / generating("twiddler"),
        "decode_over_layer_split": decoding("layer_split") / decoding("twiddler"),
        "prefill_over_layer_streaming": bench.first_token("layer_streaming", PREFILL) / prefill,
        "prefill_over_layer_split": bench.first_token("layer_split", PREFILL) / prefill,
        "beams_over_batched": searching("layer_split") / ours,
        "beams_over_serial": beam_by_beam(bench, prompt, WIDTH, output) / ours,
        "beams_over_llama_cpp": llama_cpp.search(bench, prompt, WIDTH, output) / ours,
        "makespan_over_twiddler_prefill": prefill / bench.first_token("twiddler_makespan", PREFILL),
        "makespan_over_twiddler_beams": ours / makespan,
    }
    return {name: rounded(ratio) for name, ratio in found.items()}
