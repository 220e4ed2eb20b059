"""Compare the speed of batch jobs with an older commit's: same weights, same prompts, in turns.

Both are processes that stay, on a random mixtral-0.8b in bfloat16; in each round each runs every request, and the one
that goes first changes from round to round. Both are started anew every five rounds. A row's figure is the median over
the rounds of (seconds now / before), with a bootstrap interval of 95 %: 1.02 is 2 % slower. Tokens are compared, too.
The requests are those of against_peers. Parts:

resident    All weights in memory.
page_cache  40 % of the weights' bytes as memory for weights, the files in the page cache.
small       The same layers with small matrices, so that a decode step is nearly all the host's own time.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.peers.against_peers import MODEL, budget_of
from benchmarks.peers.comparison import RESIDENT, STREAMED, Case, seconds_of
from benchmarks.peers.environment import Peer
from benchmarks.peers.protocol import Message
from benchmarks.peers.registry import OURS, ours
from benchmarks.peers.rounds import Contestant, Field
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most, none_of
from benchmarks.shared.kept_models import kept_model
from benchmarks.shared.older_tree import checkout, variables
from benchmarks.shared.pairs import Pairs, compared_rows, in_turns, starts_of
from benchmarks.shared.reading import warm
from benchmarks.shared.small_shape import small_shape
from moesched.models.checkpoint import open_checkpoint

BEFORE = "before"
SLOWEST = 0.98
PHASES = ("prefill", "decode")
SMALL = "small"
Answers = list[tuple[Message, Message]]
"""Those to a request, before and now, in the rounds of one start."""


class Part(NamedTuple):
    """Requests to a peer; `limited` if weights may take 40 % of their bytes."""

    peer: Peer
    cases: tuple[Case, ...]
    limited: bool = False


PARTS = {
    "resident": Part(OURS, RESIDENT),
    "page_cache": Part(
        OURS._replace(settings=ours("expert_streaming", "lru_offload", direct=False)), STREAMED, limited=True
    ),
    SMALL: Part(OURS, (Case(1, 128, 40),)),
}


def claims(result: Result) -> Iterator[Claim]:
    """The speed of batch jobs beside an older commit's."""
    rows = list(result["rows"].values())
    before = result["before"]
    slower = sum(row["interval"][0] > 1 / SLOWEST for row in rows)
    yield none_of(f"batch jobs beside commit {before}: rows surely below {SLOWEST}x", slower, len(rows))
    middle = median(row["ratio"] for row in rows)
    yield at_most(
        f"batch jobs, seconds over those of commit {before}: median row", middle, 1 / SLOWEST, "{:.3f}"
    )
    for name, row in result["rows"].items():
        if name.startswith(SMALL) and name.endswith("decode"):
            words = f"the host's own time in a decode step over that of commit {before}"
            yield at_most(words, row["ratio"], 1.0, "{:.3f}")
    words = f"batch jobs with other tokens than commit {before}"
    yield none_of(words, result["other_tokens"], result["requests"])


BENCHMARK = Benchmark(
    __file__, __doc__, claims=claims, parts=PARTS, rounds=25, rounds_help="rounds of every request"
)
BENCHMARK.parser.add_argument("before", nargs="?", default="HEAD", help="the older commit (default: HEAD)")


class Jobs:
    """The requests of a part, which both trees answer."""

    def __init__(self, part: str, model: Path, tree: Path) -> None:
        self._peer, cases, limited = PARTS[part]
        self._before = self._peer._replace(name=BEFORE, environment=variables(tree))
        self._arguments = [str(model), *([str(budget_of(model))] if limited else [])]
        vocabulary = open_checkpoint(model).config.vocabulary
        self._requests = {
            f"{part}, {setting}, {case.name}": (setting, case.request(vocabulary))
            for case, setting in product(cases, self._peer.settings)
        }

    def answers(self, rounds: range) -> dict[str, Answers]:
        """By request, those of some rounds, from new processes, which have answered each request once before."""
        with Field([self._before, self._peer], *self._arguments) as field:

            def ask(peer: Peer, name: str) -> Message:
                setting, request = self._requests[name]
                return field.ask(Contestant(peer.name, setting, peer.settings[setting]), request)

            return in_turns(ask, self._before, self._peer, self._requests, rounds)


def seconds_by_row(answers: Mapping[str, Sequence[Answers]]) -> dict[str, list[Pairs]]:
    """Seconds before and now of each phase of each request, of which one token has no decode step."""
    return {
        f"{name}, {phase}": [
            [(seconds_of(phase, a), seconds_of(phase, b)) for a, b in start] for start in starts
        ]
        for name, starts in answers.items()
        for phase in (PHASES if starts[0][0][0]["step_seconds"] else PHASES[:1])
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in turns, print a line for each row, and return 1 if a bar is missed."""
    options = BENCHMARK.parse(arguments)
    answers: dict[str, list[Answers]] = defaultdict(list)
    with checkout(options.before) as tree, TemporaryDirectory() as folder:
        large, small = kept_model(MODEL), kept_model(small_shape(MODEL), Path(folder) / SMALL)
        warm(large)
        jobs = [Jobs(part, small if part == SMALL else large, tree) for part in options.only]
        for rounds, each in track([*product(starts_of(options.rounds), jobs)], "measuring", still=True):
            for name, found in each.answers(rounds).items():
                answers[name].append(found)
    different = [any(a["tokens"] != b["tokens"] for a, b in chain(*starts)) for starts in answers.values()]
    return BENCHMARK.write(
        {
            "before": options.before,
            "rows": compared_rows(seconds_by_row(answers)),
            "requests": len(different),
            "other_tokens": sum(different),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
