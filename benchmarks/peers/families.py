"""Two layers of today's families at their published widths beside Hugging Face, resident, in interleaved rounds.

A random model of each family is written to the cache folder in bfloat16, with the published widths, heads and experts
per token. It has two layers, one of each kind where there are two; few enough experts that the weights fit into memory
twice; and a vocabulary of 32,768, so that the LM head does not hide the layers. Each program is a process that stays;
in every round each request is run by both in turn. Ratios are medians over the rounds in which nothing else ran, or
over all where there was none; of these, rounds in which the rate of memory changed by more than a tenth between the two
that are compared do not count if three others remain. Limits are those of benchmarks/shared/limits.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.peers.bars import best
from benchmarks.peers.comparison import Case, compare, ratios
from benchmarks.peers.protocol import PeerFailed
from benchmarks.peers.registry import HUGGING_FACE, OURS
from benchmarks.peers.rounds import Field
from benchmarks.record.benchmark import Benchmark, progress
from benchmarks.record.claims import Claim, Result, at_least
from benchmarks.shared.kept_models import kept_model
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.shapes import SHAPES
from moesched.system.cache import cache_folder

EXPERTS = {"minimax-m2": 48, "glm-4.5-air": 64, "gpt-oss-20b": 32}
"""Experts of a layer, by model."""
LAYERS, VOCABULARY = 2, 32_768
CASES = (Case(1, 128, 17), Case(4, 128, 9), Case(16, 128, 9))
DECODE_BAR = 1.2
"""Of the rate over that of Hugging Face's best setting."""
SHARE_BAR = 0.8
"""Of the read limit, in a step of one sequence."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the JSON after each model."""
    options = BENCHMARK.parse(arguments)
    found = BENCHMARK.stored_parts()
    for name in options.only:
        progress.print(f"[bold]{name}[/bold]")
        try:
            found[name] = measured(name, options)
        except PeerFailed as reason:  # ours: without it there is nothing to compare
            found[name] = {"failed": str(reason)}
        BENCHMARK.done(name)
        BENCHMARK.write(found)


def measured(name: str, options: argparse.Namespace) -> Result:
    """Rounds of all requests to a model."""
    path = written(name)
    config = open_checkpoint(path).config
    cases: dict[str, Any] = {}
    with Field((OURS, HUGGING_FACE), str(path)) as field:
        for case, figures in compare(field, OURS.name, config, CASES, options.rounds):
            cases[case] = {**figures, "ratios": ratios(figures, OURS.name)}
            progress.print(case, cases[case]["ratios"], cases[case]["failed"], soft_wrap=True)
        return {"peers": field.about, "rounds": options.rounds, "cases": cases}


def written(name: str) -> Path:
    """A random model of the shape in the cache folder, written if it is not there."""
    return kept_model(shape_of(name), cache_folder() / f"{name}-{LAYERS}-layers-{EXPERTS[name]}-experts")


def shape_of(name: str) -> ModelConfig:
    """A published shape with fewer layers, experts and words."""
    config = SHAPES[name].cut(LAYERS)
    pattern = (
        layer.varied(experts=EXPERTS[name]) if layer.feed_forward.experts else layer
        for layer in config.pattern
    )
    return replace(config, pattern=tuple(pattern), vocabulary=VOCABULARY, format=None, dtype="bfloat16")


def claims(result: Result) -> Iterator[Claim]:
    """All figures that have a bar, as far as they were measured."""
    for name in EXPERTS:
        cases = result.get(name, {}).get("cases", {})
        for case in CASES:
            if found := cases.get(case.name):
                words = f"two layers of {name}, {case.name}: decode"
                over = found["ratios"]["decode"].get(HUGGING_FACE.name, {}).get("median", 0.0)
                yield at_least(f"{words} over {HUGGING_FACE.name}", over, DECODE_BAR, "{:.2f}")
                if case.batch == 1:
                    share = best(found["decode"], OURS.name)["fraction_of_limit"]
                    yield at_least(f"{words}, share of the limit", share, SHARE_BAR, "{:.2f}")


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=EXPERTS,
    rounds=5,
    rounds_help="rounds of every request",
    keeps_parts=True,
)


if __name__ == "__main__":
    main()
