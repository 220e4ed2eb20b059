"""Time policies' decisions for a layer: their own time from the router's answer on, all submissions left out.

A policy plans Mixtral 8x7B, or a model with 128 small experts, on Twiddler's first machine, and then schedules decode
steps with a step whose verbs do nothing; the router's answers are drawn before. What a step takes of the processor's
time, by the number of its layers, is the decision, and the loop around it. Answers are new in every step, so that
little that was decided before helps; `one token` is batch 1, with little to decide. The medians of many steps count,
over several rounds through all policies: a shared machine may be half as fast for minutes. The fastest round is shown
beside them.
A preview of a layer's routing is the routing of the layer before: most of it is wrong.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from statistics import median
from time import thread_time
from typing import Any

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, none_of
from moesched.errors import MoeschedError
from moesched.machines import load_machine
from moesched.models.config import ModelConfig
from moesched.models.layout import Page, WeightLayout, weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy, names
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.steps.step import Step
from moesched.tasks import Phase

MACHINE = load_machine("rtx6000")
MANY = SHAPES["mixtral-8x7b"].varied(
    name="128 experts", layers=48, hidden=2048, intermediate=768, experts=128, top_k=8
)
CASES = (("8 experts", SHAPES["mixtral-8x7b"]), ("128 experts", MANY))
BATCHES = {"one token": 1, "12 beams": 12, "a prompt of 512": 512}
BARS = {"8 experts": 50e-6, "128 experts": 300e-6}
KEPT = 0.22
"""The share of the experts that stays, or that a cache holds: 56 of 256 in the paper."""
OF_ALL_LAYERS = ("twiddler", "twiddler_makespan", "expert_cache")
OF_EACH_LAYER = ("lru_offload", "prefetch_gate")
STEPS = 12


class Answer:
    """A router's answer that is there at once."""

    def __init__(self, tokens: Mapping[int, int]) -> None:
        self.tokens = tokens

    def __await__(self) -> Generator[Any, None, Mapping[int, int]]:
        yield from ()
        return self.tokens


class IdleStep:
    """A decode step whose verbs do nothing; every layer's routing is known."""

    kind, last = "decode", False

    def __init__(self, layout: WeightLayout, answers: Sequence[Mapping[int, int]], index: int) -> None:
        self.layers = range(layout.config.layers)
        self.micro_batches = range(1)
        self._layout = layout
        self._answers = list(map(Answer, answers))
        for verb in set(dir(Step)) - set(dir(IdleStep)):
            setattr(self, verb, _nothing)
        self.index, self.routed = index, False

    def expert_pages(self, layer: int, expert: int) -> tuple[Page, ...]:
        return self._layout.expert(layer, expert)

    def dense_pages(self, layer: int) -> tuple[Page, ...]:
        return self._layout.dense(layer)

    def pages(self, layer: int) -> tuple[Page, ...]:
        return self._layout.layer(layer)

    def phase(self, micro_batch: int) -> Phase:
        return "decode"

    def kv_on_accelerator(self, micro_batch: int, layer: int | None = None) -> bool:
        return True

    def route(self, layer: int, micro_batch: int) -> Answer:
        self.routed = True
        return self._answers[layer]

    def preview_route(self, layer: int, micro_batch: int) -> Answer:
        return self._answers[layer - 1]


def _nothing(*_: Any, **__: Any) -> None:
    return None


@cache
def answers(config: ModelConfig, tokens: int, seed: int) -> list[dict[int, int]]:
    """Numbers of tokens of every expert of every layer; some are more popular than others."""
    drawn = random.Random(seed)
    found = []
    for _ in range(config.layers):
        weights = [0.5 + drawn.random() for _ in range(config.routed.experts)]
        counts: dict[int, int] = {}
        for _ in range(tokens):
            for expert in {*drawn.choices(range(config.routed.experts), weights, k=config.routed.top_k)}:
                counts[expert] = counts.get(expert, 0) + 1
        found.append(dict(sorted(counts.items())))
    return found


def seconds_a_layer(policy: Any, layout: WeightLayout, tokens: int, first: int) -> list[float]:
    """Of each of several steps, from the first on: the policy's time over the number of its layers."""
    times = []
    for seed in range(STEPS):
        step = IdleStep(layout, answers(layout.config, tokens, seed), first + seed)
        schedule = policy.decode(step)
        start = thread_time()
        try:
            schedule.send(None)
        except StopIteration:
            times.append((thread_time() - start) / layout.config.layers)
            if not step.routed:
                raise ValueError("it does not ask for the routing") from None
        else:
            raise ValueError("it awaits something else than the router")
    return times


def measure(name: str) -> dict[str, list[float]]:
    """A policy's seconds for a layer in every case, step by step."""
    found: dict[str, list[float]] = {}
    for case, shape in CASES:
        layout = weight_layout(shape, "bfloat16")
        policy = make_policy(name, settings_of(name, shape))
        plan_run(MACHINE, layout, split_batch([600], 600, 1), policy)
        for number, (batch, tokens) in enumerate(BATCHES.items()):
            found[f"{case}, {batch}"] = seconds_a_layer(policy, layout, tokens, 1 + number * STEPS)
    return found


def figures(case: str, rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of one case, in microseconds."""
    times = sorted(chain.from_iterable(rounds))
    return {
        "median_us": round(1e6 * median(times), 1),
        "slowest_tenth_us": round(1e6 * times[int(0.9 * len(times))], 1),
        "fastest_round_us": round(1e6 * min(map(median, rounds)), 1),
        "bar_us": 1e6 * BARS[case.partition(",")[0]],
    }


def settings_of(name: str, shape: ModelConfig) -> dict[str, int]:
    """Number of experts that stay, as the policy's setting."""
    if name in OF_ALL_LAYERS:
        return {"experts": int(KEPT * shape.layers * shape.routed.experts)}
    if name in OF_EACH_LAYER:
        return {"offload_per_layer": shape.routed.experts - int(KEPT * shape.routed.experts)}
    return {}


def claims(result: Result) -> Iterator[Claim]:
    """The policies' own time for a layer."""
    cases = [each for policy in result["policies"].values() for each in policy.values()]
    slow = sum(each["median_us"] > each["bar_us"] for each in cases)
    words = "decisions above 50 µs a layer (8 experts) or 300 µs (128 experts), policies by batches"
    yield none_of(words, slow, len(cases))


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=names("policies"),
    rounds=7,
    rounds_help="rounds through all policies",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    options = BENCHMARK.parse(arguments)
    rounds: dict[str, dict[str, list[list[float]]]] = {}
    left_out: dict[str, str] = {}
    for name in track(options.only * options.rounds, "deciding", still=True):
        if name in left_out:
            continue
        try:
            for case, times in measure(name).items():
                rounds.setdefault(name, {}).setdefault(case, []).append(times)
        except (MoeschedError, AttributeError, TypeError, ValueError) as error:
            left_out[name] = f"{type(error).__name__}: {error}"
    found = {
        name: {case: figures(case, each) for case, each in cases.items()} for name, cases in rounds.items()
    }
    return BENCHMARK.write({"policies": found, "left_out": left_out})


if __name__ == "__main__":
    sys.exit(main())
