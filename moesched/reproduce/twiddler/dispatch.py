"""Twiddler's Figs. 4 to 6: predictions for one request, with experts on the GPU, on the CPU, or copied to the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from moesched.reproduce.report import Claim, Section, Value, rounded, span
from moesched.reproduce.twiddler import llama_cpp
from moesched.reproduce.twiddler.environments import OURS, RIVALS, Bench, PredictedSeconds
from moesched.reproduce.twiddler.paper import TwiddlerPaper

Rows = list[dict[str, Value]]
Progress = Callable[[str], None]

POLICIES = (*OURS, *RIVALS)
SERIAL, LLAMA = "layer_split, beam by beam", "layer_split, as llama.cpp b2956"
NEVER_SLOWER = 0.99


def generation(benches: Sequence[Bench], paper: TwiddlerPaper, on_progress: Progress) -> Section:
    """Make the section of Fig. 4: tokens per second of each system, by numbers of input and output tokens."""
    rows: Rows = []
    for bench in benches:
        for prompt in paper.grid.inputs:
            on_progress(f"Fig. 4: {prompt} in, environment {bench.environment.name}")
            found = {policy: bench.generate(policy, prompt) for policy in POLICIES}
            found[LLAMA] = llama_cpp.generate(bench, prompt)
            rows += [
                _generated(bench, prompt, output, policy, ran)
                for policy, ran in found.items()
                for output in paper.grid.outputs
            ]
    compared = [(ours, rival) for rival in ("layer_split", LLAMA) for ours in OURS]
    return paper.section(
        "generation",
        rows,
        [
            paper.claims["generation"].ratio(
                [mean_ratio(rows, "tokens_per_second", ours, rival)], f"{ours}, {rival}"
            )
            for ours, rival in compared
        ],
        [
            f"Decode steps alone, {ours} over {rival}: "
            + ", ".join(
                f"{mean_ratio(rows, 'step_seconds', rival, ours, bench):.2f}x in environment {bench.environment.name}"
                for bench in benches
            )
            + "."
            for ours, rival in compared
        ],
        steps=benches[0].looked_at,
    )


def prefill(benches: Sequence[Bench], paper: TwiddlerPaper, on_progress: Progress) -> Section:
    """Make the section of Fig. 5: the time to the first token of each system, by number of prompt tokens."""
    rows: Rows = []
    for bench in benches:
        for prompt in paper.grid.prefills:
            on_progress(f"Fig. 5: {prompt} in, environment {bench.environment.name}")
            found = {policy: bench.first_token(policy, prompt) for policy in POLICIES}
            found[LLAMA] = llama_cpp.first_token(bench, prompt)
            rows += [
                {
                    "environment": bench.environment.name,
                    "input": prompt,
                    "policy": policy,
                    "seconds": rounded(seconds),
                    "tokens_per_second": rounded(prompt / seconds),
                }
                for policy, seconds in found.items()
            ]
    return paper.section(
        "prefill",
        rows,
        [
            paper.claims[name].ratio([mean_ratio(rows, "tokens_per_second", ours, rival)], ours)
            for name, rival in (("prefill_streaming", "layer_streaming"), ("prefill_lru", "lru_offload"))
            for ours in OURS
        ],
    )


def beams(benches: Sequence[Bench], paper: TwiddlerPaper, on_progress: Progress) -> Section:
    """Make the section of Fig. 6: tokens per second of each system in beam search, by number of beams."""
    prompt, output = paper.grid.beam_input, paper.grid.beam_output
    rows: Rows = []
    for bench in benches:
        for width in paper.grid.widths:
            on_progress(f"Fig. 6: width {width}, environment {bench.environment.name}")
            found = {
                policy: bench.generate(policy, prompt, width).seconds(output)
                for policy in (*OURS, "layer_split")
            }
            found[SERIAL] = beam_by_beam(bench, prompt, width, output)
            found[LLAMA] = llama_cpp.search(bench, prompt, width, output)
            rows += [
                {
                    "environment": bench.environment.name,
                    "width": width,
                    "policy": policy,
                    "tokens_per_second": rounded(output / seconds),
                }
                for policy, seconds in found.items()
            ]
    return paper.section(
        "beams",
        rows,
        [
            paper.claims["beams"].ratio(
                [mean_ratio(rows, "tokens_per_second", ours, rival)], f"{ours}, {rival}"
            )
            for rival in ("layer_split", SERIAL, LLAMA)
            for ours in OURS
        ],
    )


def beam_by_beam(bench: Bench, prompt: int, width: int, output: int) -> float:
    """Predict the seconds of a beam search by `layer_split`, with a separate decode step for each beam.

    Args:
        prompt: number of prompt tokens.
        width: number of beams.
        output: number of tokens to generate in each beam.
    """
    one = bench.generate("layer_split", prompt)
    return one.prefill_seconds + (output - 1) * width * one.step_seconds


def measured(benches: Sequence[Bench], paper: TwiddlerPaper, on_progress: Progress) -> Section:
    """Make the section that compares the seconds that the authors published with our predictions."""
    by_name = {bench.environment.name: bench for bench in benches}
    rows: Rows = []
    for each in paper.measured:
        bench = by_name[each.environment]
        on_progress(f"measured: {each.policy}, environment {each.environment}")
        for prompt, seconds in each.seconds.items():
            ours = bench.first_token(each.policy, int(prompt))
            rows.append(_beside(each.environment, each.policy, f"first token of {prompt}", seconds, ours))
        ours = bench.generate(each.policy, paper.grid.beam_input).step_seconds
        rows.append(_beside(each.environment, each.policy, "decode step", each.step_seconds, ours))
    notes = [f"Environment {each.environment}, {each.policy}: {each.source}." for each in paper.measured]
    return paper.section("measured", rows, notes=notes)


def goals(paper: TwiddlerPaper, generated: Section, first: Section, searched: Section) -> Section:
    """Make the section of this project's goals in the paper's environments, and whether each goal is met.

    Args:
        generated, first, searched: the sections of Figs. 4, 5 and 6.
    """
    single, long, wide = generated.rows, first.rows, searched.rows
    both = [
        *_ratios(long, "tokens_per_second", "twiddler_makespan", "twiddler"),
        *_ratios(wide, "tokens_per_second", "twiddler_makespan", "twiddler"),
    ]
    alone = _ratios(single, "tokens_per_second", "twiddler_makespan", "twiddler")
    claims = [
        goal
        for ours in OURS
        for goal in (
            _goal(f"{ours} over the best rival, single batch", _over_best(single, ours), 1.26),
            _goal(f"{ours} over the best rival, long prefill", _over_best(long, ours), 1.07),
            _goal(
                f"{ours} over layer_split batched, beam search",
                _ratios(wide, "tokens_per_second", ours, "layer_split"),
                2,
            ),
            _goal(f"{ours} over {SERIAL}, beam search", _ratios(wide, "tokens_per_second", ours, SERIAL), 11),
            _goal(f"{ours} over {LLAMA}, beam search", _ratios(wide, "tokens_per_second", ours, LLAMA), 11),
        )
    ]
    claims += [
        _goal("twiddler_makespan over twiddler, prefill and beam search", both, 1.10),
        _goal("twiddler_makespan over twiddler, single batch", alone, NEVER_SLOWER),
        _goal("twiddler_makespan over twiddler, at its worst", [min(both + alone)], NEVER_SLOWER),
    ]
    rows: Rows = [
        {"goal": each.what, "bar": each.paper, "ours": each.ours, "met": each.agrees} for each in claims
    ]
    return paper.section("goals", rows)


def mean_ratio(rows: Rows, key: str, ours: str, rival: str, bench: Bench | None = None) -> float:
    """Return the ratio of our policy's value to the rival's, averaged over environments, lengths and beam numbers.

    Args:
        rows: rows of a section.
        key: key of the value in the rows, such as "tokens_per_second".
        ours, rival: names of two policies.
        bench: the only environment to count; None for all.
    """
    chosen = [row for row in rows if bench is None or row["environment"] == bench.environment.name]
    return fmean(_ratios(chosen, key, ours, rival))


def _ratios(rows: Rows, key: str, ours: str, rival: str) -> list[float]:
    by_policy = _by_configuration(rows, key)
    return [each[ours] / each[rival] for each in by_policy]


def _over_best(rows: Rows, ours: str) -> list[float]:
    return [
        each[ours] / max(each[rival] for rival in (*RIVALS, LLAMA))
        for each in _by_configuration(rows, "tokens_per_second")
    ]


def _by_configuration(rows: Rows, key: str) -> list[dict[str, float]]:
    """Return {policy: value at `key`} for each combination of environment, lengths and number of beams in the rows."""
    found: dict[tuple[Value, ...], dict[str, float]] = {}
    for row in rows:
        where = tuple(row[name] for name in ("environment", "input", "output", "width") if name in row)
        found.setdefault(where, {})[str(row["policy"])] = float(row[key] or 0)
    return list(found.values())


def _goal(what: str, ratios: Sequence[float], bar: float) -> Claim:
    mean = fmean(ratios)
    least = f", least {min(ratios):.3g}x" if len(ratios) > 1 else ""
    return Claim(
        where="goal", what=what, paper=f">= {bar:g}x", ours=f"{span(mean, mean)}{least}", agrees=mean >= bar
    )


def _generated(
    bench: Bench, prompt: int, output: int, policy: str, ran: PredictedSeconds
) -> dict[str, Value]:
    return {
        "environment": bench.environment.name,
        "input": prompt,
        "output": output,
        "policy": policy,
        "tokens_per_second": rounded(output / ran.seconds(output)),
        "step_seconds": rounded(ran.step_seconds),
    }


def _beside(environment: str, policy: str, what: str, paper: float, ours: float) -> dict[str, Value]:
    return {
        "environment": environment,
        "policy": policy,
        "what": what,
        "measured": paper,
        "ours": rounded(ours),
        "ratio": rounded(ours / paper),
    }
