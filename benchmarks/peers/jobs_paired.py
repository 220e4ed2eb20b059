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
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.peers.against_peers import MODEL, budget_of
from benchmarks.peers.comparison import RESIDENT, STREAMED, Case, equal_tokens, seconds_of
from benchmarks.peers.environment import Peer
from benchmarks.peers.registry import OURS, ours
from benchmarks.peers.rounds import Field, turned
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most, none_of
from benchmarks.shared.kept_models import kept_model
from benchmarks.shared.older_tree import checkout, variables
from benchmarks.shared.pairs import Pairs, compared, starts_of
from benchmarks.shared.reading import warm
from benchmarks.shared.small_shape import small_shape
from moesched.models.checkpoint import open_checkpoint

BEFORE = "before"
SLOWEST = 0.98
PHASES = ("prefill", "decode")


class Part(NamedTuple):
    """Requests to a peer.

    Attributes:
        limited: whether weights may take 40 % of their bytes.
        small: whether the model's matrices are small.
    """

    peer: Peer
    cases: tuple[Case, ...]
    limited: bool = False
    small: bool = False


PARTS = {
    "resident": Part(OURS, RESIDENT),
    "page_cache": Part(
        OURS._replace(settings=ours("expert_streaming", "lru_offload", direct=False)), STREAMED, limited=True
    ),
    "small": Part(OURS, (Case(1, 128, 40),), small=True),
}
HOST = "small, resident, batch 1, prompts of 128, decode"
"""The row of the host's own time."""


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
    host = result["rows"][HOST]["ratio"]
    yield at_most(f"the host's own time in a decode step over that of commit {before}", host, 1.0, "{:.3f}")
    words = f"batch jobs with other tokens than commit {before}"
    yield none_of(words, result["other_tokens"], result["requests"])


BENCHMARK = Benchmark(
    __file__, __doc__, claims=claims, parts=PARTS, rounds=25, rounds_help="rounds of every request"
)
BENCHMARK.parser.add_argument("before", nargs="?", default="HEAD", help="the older commit (default: HEAD)")


class Jobs:
    """Both trees' answers to the requests of a part."""

    def __init__(self, name: str, models: Mapping[bool, Path], tree: Path) -> None:
        self._name, part = name, PARTS[name]
        model = models[part.small]
        self._peers = [part.peer, part.peer._replace(name=BEFORE, environment=variables(tree))]
        self._arguments = [str(model), *([str(budget_of(model))] if part.limited else [])]
        vocabulary = open_checkpoint(model).config.vocabulary
        self._requests = {case: case.request(vocabulary) for case in part.cases}
        self.pairs: dict[str, list[Pairs]] = defaultdict(list)
        self.requests: set[str] = set()
        self.different: set[str] = set()

    def start(self, rounds: range) -> None:
        """Run some rounds with new processes, which have run each request once before."""
        pairs: dict[str, Pairs] = defaultdict(list)
        with Field(self._peers, *self._arguments) as field:
            for number in [rounds.start, *rounds]:
                for case in self._requests:
                    self._round(case, field, number, pairs)
        for row, found in pairs.items():
            self.pairs[row].append(found[1:])

    def _round(self, case: Case, field: Field, number: int, pairs: dict[str, Pairs]) -> None:
        for setting in self._peers[0].settings:
            both = [each for each in field.contestants() if each.setting == setting]
            answers = {each.peer: field.ask(each, self._requests[case]) for each in turned(both, number)}
            now, before = (answers[peer.name] for peer in self._peers)
            name = f"{self._name}, {setting}, {case.name}"
            self.requests.add(name)
            tokens = equal_tokens(now["tokens"], before["tokens"])
            if tokens["equal_until_the_first_difference"] < tokens["tokens"]:
                self.different.add(name)
            for phase in PHASES[: case.new_tokens]:  # one token takes no decode step
                pairs[f"{name}, {phase}"].append((seconds_of(phase, before), seconds_of(phase, now)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in turns, print a line for each row, and return 1 if a bar is missed."""
    options = BENCHMARK.parse(arguments)
    rows: dict[str, Any] = {}
    with checkout(options.before) as tree, TemporaryDirectory() as folder:
        models = {False: kept_model(MODEL), True: kept_model(small_shape(MODEL), Path(folder) / "small")}
        warm(models[False])
        jobs = [Jobs(part, models, tree) for part in options.only]
        turns = [(each, rounds) for rounds in starts_of(options.rounds) for each in jobs]
        for each, rounds in track(turns, "measuring", still=True):
            each.start(rounds)
    for each in jobs:
        rows.update({name: compared(starts)._asdict() for name, starts in each.pairs.items()})
    for name, row in rows.items():
        print(f"{name:60} {row['ratio']:.3f}  ({row['interval'][0]:.3f} to {row['interval'][1]:.3f})")
    return BENCHMARK.write(
        {
            "before": options.before,
            "rows": rows,
            "requests": sum(len(each.requests) for each in jobs),
            "other_tokens": sum(len(each.different) for each in jobs),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
