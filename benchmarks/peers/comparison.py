"""Prefill and decode of the same prompts by everybody in turn, beside the limit of this machine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

from benchmarks.peers.protocol import Message, PeerFailed
from benchmarks.peers.rounds import (
    QUIET_CORES,
    Contestant,
    Field,
    Results,
    spread,
    turned,
    undisturbed,
    wait_for_quiet,
)
from benchmarks.shared.limits import limit_of, measured_flops
from benchmarks.shared.memory_rate import at_one_rate
from moesched.models.config import ITEM_BYTES, ModelConfig
from moesched.models.tensor_shapes import elements
from moesched.models.tensors import count_active_weights, global_shapes
from moesched.system.cores import usable_cores


class Case(NamedTuple):
    """A batch of random prompts of one length, and the tokens to generate for each."""

    batch: int
    prompt: int
    new_tokens: int

    @property
    def name(self) -> str:
        """Of its rows."""
        return f"batch {self.batch}, prompts of {self.prompt}"

    def request(self, vocabulary: int) -> Message:
        """The same prompts each time."""
        chance = random.Random(self.batch * self.prompt)
        prompts = [[chance.randrange(vocabulary) for _ in range(self.prompt)] for _ in range(self.batch)]
        return {"prompts": prompts, "new_tokens": self.new_tokens}


RESIDENT = (
    Case(1, 128, 33),
    Case(4, 128, 17),
    Case(16, 128, 9),
    Case(64, 128, 7),
    Case(1, 1024, 1),
    Case(4, 1024, 1),
    Case(16, 1024, 1),
)
BUDGET_SHARE = 0.4
"""Memory for weights where they do not fit, as a share of their bytes."""
STREAMED = (Case(1, 16, 9), Case(16, 16, 9))
CAPPED = (Case(1, 16, 5), Case(16, 16, 5))


class Work(NamedTuple):
    """Bytes that a pass reads, and FLOPs that it does with them."""

    nbytes: float
    flops: float


def work_of(config: ModelConfig, case: Case, touched: Sequence[float]) -> dict[str, Work]:
    """The work of prefill and of a decode step in the middle.

    touched: bytes of weights that each step reads.
    """
    middle = case.prompt + case.new_tokens // 2
    found = {"prefill": _work(config, case.batch, case.prompt, (case.prompt + 1) / 2, touched[0])}
    if case.new_tokens > 1:
        found["decode"] = _work(config, case.batch, 1, middle, median(touched[1:]))
    return found


def _work(config: ModelConfig, batch: int, tokens: int, context: float, weight_bytes: float) -> Work:
    """A pass of `tokens` per sequence, each of which attends to `context` on average; the LM head sees the last one."""
    in_layers = count_active_weights(config) - elements(global_shapes(config).values())
    attention = 2 * context * sum(layer.grouped.query_width for layer in config.pattern)
    flops = 2 * batch * (tokens * (in_layers + attention) + config.hidden * config.vocabulary)
    cached = ITEM_BYTES[config.dtype] * sum(layer.attention.cache_width for layer in config.pattern)
    return Work(weight_bytes + batch * max(context, tokens) * cached, flops)


def compare(
    field: Field, ours: str, config: ModelConfig, cases: Sequence[Case], rounds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rounds of all cases; first what each of our steps reads is counted, which warms up as well.

    Yields the figures so far of each case after each of its rounds.

    Raises:
        PeerFailed: ours does not run.
    """
    contestants, cores = field.contestants(), usable_cores()
    results = Results()
    works: dict[Case, dict[str, Work]] = {}
    flops: dict[Case, list[float]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            request = case.request(config.vocabulary)
            if case not in works:
                works[case] = work_of(config, case, warmed(field, contestants, ours, request))
            wait_for_quiet(field.patience)
            results.run(field, turned(contestants, number), case.name, request)
            flops[case].append(measured_flops(cores))
            yield case.name, figures(case, works[case], flops[case], results, contestants, ours)


def warmed(field: Field, contestants: Sequence[Contestant], ours: str, request: Message) -> list[float]:
    """Bytes of weights that each step of a request reads, by our count; everybody has run once then."""
    short = {"prompts": [request["prompts"][0][:16]], "new_tokens": 2}
    touched: list[float] = []
    for contestant in contestants:
        if contestant.peer == ours:
            touched = field.ask(contestant, {**request, "count_bytes": True})["touched_bytes"]
        else:
            with suppress(PeerFailed):  # it will fail again, and its row then says so
                field.ask(contestant, short)
    return touched


def figures(
    case: Case,
    work: dict[str, Work],
    flops: Sequence[float],
    results: Results,
    contestants: Sequence[Contestant],
    ours: str,
) -> dict[str, Any]:
    """A case's rows: prefill and decode, with everybody's rates and shares of the limit, and equal tokens.

    flops: what the processor did per second in each round.
    """
    found: dict[str, Any] = {"failed": results.reasons(case.name), "equal_tokens": {}}
    answered = [(each, answers[0]) for each in contestants if (answers := results.answers(case.name, each))]
    mine = [answer for contestant, answer in answered if contestant.peer == ours]
    for contestant, answer in answered:
        if contestant.peer != ours and mine:
            found["equal_tokens"][contestant.name] = equal_tokens(mine[0]["tokens"], answer["tokens"])
    for phase, each in work.items():
        found[phase] = phase_figures(case, phase, each, flops, results, contestants)
    return found


def phase_figures(
    case: Case,
    phase: str,
    work: Work,
    flops: Sequence[float],
    results: Results,
    contestants: Sequence[Contestant],
) -> dict[str, Any]:
    """Everybody's rate in prefill or decode, beside the limit by the rate of memory around the same answers."""
    tokens = case.batch * (case.prompt if phase == "prefill" else 1)
    rows, all_limits = {}, []
    for contestant in contestants:
        if answers := results.answers(case.name, contestant):
            seconds = [seconds_of(phase, answer) for answer in answers]
            kept = undisturbed(answers)
            limits = [
                limit_of(work.nbytes, work.flops, 1e9 * max(answer["memory_gbs"]), rate)
                for answer, rate in zip(answers, flops, strict=True)
            ]
            all_limits += limits
            rows[contestant.name] = {
                "peer": contestant.peer,
                "tokens_per_second": spread([tokens / seconds[n] for n in kept]),
                "fraction_of_limit": median(limits[n].fraction(work.nbytes, seconds[n]) for n in kept),
                "seconds": seconds,
                "other_cores": [answer["other_cores"] for answer in answers],
                "memory_gbs": [answer["memory_gbs"] for answer in answers],
                "disk_bytes": [answer["disk_bytes"] for answer in answers],
            }
    return {
        "bytes": work.nbytes,
        "flops": work.flops,
        "read_limit": median(limit.read for limit in all_limits),
        "compute_limit": median(limit.compute for limit in all_limits),
        "bound_by": all_limits[-1].bound_by,
        "contestants": rows,
    }


def seconds_of(phase: str, answer: Message) -> float:
    """Seconds of the prefill, or of a decode step."""
    return float(answer["prefill_seconds"] if phase == "prefill" else median(answer["step_seconds"]))


def equal_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, int]:
    """Sequences whose first token is equal, and tokens before the first difference.

    Rounding to bfloat16 in other places decides near ties of random weights otherwise; then all that follows differs.
    """
    prefixes = [
        next((n for n, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), len(mine))
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return {
        "sequences": len(prefixes),
        "equal_first_tokens": sum(prefix > 0 for prefix in prefixes),
        "tokens": sum(map(len, ours)),
        "equal_until_the_first_difference": sum(prefixes),
    }


def ratios(case: dict[str, Any], ours: str) -> dict[str, dict[str, dict[str, float]]]:
    """By phase and peer: the rate of our best setting over that of the peer's, in undisturbed rounds."""
    found = {}
    for phase in ("prefill", "decode"):
        best: dict[str, dict[str, Any]] = {}
        for row in case.get(phase, {}).get("contestants", {}).values():
            known = best.setdefault(row["peer"], row)
            if row["tokens_per_second"]["median"] > known["tokens_per_second"]["median"]:
                best[row["peer"]] = row
        if ours in best:
            mine = best.pop(ours)
            found[phase] = {peer: ratio(mine, row) for peer, row in best.items()}
    return found


def ratio(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Rates over rates, round by round.

    `undisturbed_rounds` are those in which nothing else ran; `steady_rounds` those of the rounds that count in which
    memory had one rate for both.
    """
    columns = [row[key] for key in ("other_cores", "memory_gbs") for row in (mine, theirs)]
    both = [
        {"other_cores": max(mine, theirs), "memory_gbs": [*before, *after]}
        for mine, theirs, before, after in zip(*columns, strict=True)
    ]
    kept = undisturbed(both)
    return {
        **spread([theirs["seconds"][n] / mine["seconds"][n] for n in kept]),
        "undisturbed_rounds": sum(each["other_cores"] < QUIET_CORES for each in both),
        "steady_rounds": sum(at_one_rate(both[n]["memory_gbs"]) for n in kept),
    }
