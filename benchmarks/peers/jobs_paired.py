"""Compare the speed of batch jobs with an older commit's: same weights, same prompts, in turns.

Both are processes that stay, on a random mixtral-0.8b in bfloat16; in each round each runs every request, and the one
that goes first changes from round to round. A row's figure is the median over the rounds of (rate now / before): 0.98
is 2 % slower. Tokens are compared, too. Parts:

resident    All weights in memory.
page_cache  40 % of the weights' bytes as memory for weights, the files in the page cache, by several policies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.exact.same_behaviour import checkout
from benchmarks.peers.against_peers import MODEL, budget_of
from benchmarks.peers.comparison import Case, equal_tokens, ratio, seconds_of
from benchmarks.peers.environment import Peer
from benchmarks.peers.registry import OURS, OURS_MAPPED
from benchmarks.peers.rounds import Contestant, Field, Results, add_patience, turned
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, none_of
from benchmarks.shared.reading import warm
from moesched.models.checkpoint import open_checkpoint
from moesched.models.random_model import write_random_model
from moesched.system.cache import cache_folder

BEFORE = "before"
SLOWEST = 0.98


class Part(NamedTuple):
    """Requests to a peer.

    Attributes:
        limited: whether weights may take 40 % of their bytes.
    """

    peer: Peer
    limited: bool
    cases: tuple[Case, ...]


PARTS = {
    "resident": Part(OURS, False, (Case(1, 128, 33), Case(4, 128, 17), Case(16, 64, 9), Case(64, 16, 7))),
    "page_cache": Part(OURS_MAPPED, True, (Case(1, 16, 9), Case(16, 16, 9))),
}


def claims(result: Result) -> Iterator[Claim]:
    """The speed of batch jobs beside an older commit's."""
    rows = list(result["rows"].values())
    slower = sum(row["rate"]["median"] < SLOWEST for row in rows)
    words = f"batch jobs beside commit {result['before']}: rows below {SLOWEST}x of its rate"
    yield none_of(words, slower, len(rows))
    different = sum(not row["same_tokens"] for row in rows)
    yield none_of("the same: rows with other tokens", different, len(rows))


BENCHMARK = Benchmark(
    __file__, __doc__, claims=claims, parts=PARTS, rounds=15, rounds_help="rounds of every request"
)
BENCHMARK.parser.add_argument("before", nargs="?", default="HEAD", help="the older commit (default: HEAD)")
add_patience(BENCHMARK.parser)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in turns, print a line for each row, and return 1 if a bar is missed."""
    options = BENCHMARK.parse(arguments)
    model, rows = cache_folder() / MODEL, {}
    if not model.exists():
        write_random_model(MODEL, model)
    warm(model)
    with checkout(options.before) as tree:
        for part in options.only:
            rows.update(measured(part, model, tree, options.rounds, options.patience))
    for name, row in rows.items():
        print(f"{name:70} {row['rate']['median']:.3f}  {'same' if row['same_tokens'] else 'OTHER'} tokens")
    return BENCHMARK.write({"before": options.before, "rows": rows})


def measured(part: str, model: Path, tree: Path, rounds: int, patience: float) -> dict[str, Any]:
    """The rows of a part, by name."""
    peer, limited, cases = PARTS[part]
    older = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    peers = [peer, peer._replace(name=BEFORE, environment=older)]
    budget = [str(budget_of(model))] if limited else []
    vocabulary, results = open_checkpoint(model).config.vocabulary, Results()
    requests = {case: case.request(vocabulary) for case in cases}
    with Field(peers, str(model), *budget, patience=patience) as field:
        contestants = field.contestants()
        for case, request in requests.items():  # warms up
            Results().run(field, contestants, case.name, request)
        for number, case in track([(n, case) for n in range(rounds) for case in cases], part, still=True):
            results.run(field, turned(contestants, number), case.name, requests[case])
    return {
        f"{part}, {setting}, {case.name}, {phase}": row
        for case in cases
        for setting in peer.settings
        for phase, row in compared(case, setting, contestants, results).items()
    }


def compared(
    case: Case, setting: str, contestants: Sequence[Contestant], results: Results
) -> dict[str, dict[str, Any]]:
    """The rows of a request by phase: rates now over rates before, and the seconds of both."""
    now, before = (
        results.answers(case.name, next(each for each in contestants if each[:2] == (name, setting)))
        for name in (OURS.name, BEFORE)
    )
    tokens = equal_tokens(now[0]["tokens"], before[0]["tokens"])
    found = {}
    for phase in ("prefill", "decode"):
        mine, theirs = (
            {
                "seconds": [seconds_of(phase, answer) for answer in answers],
                "other_cores": [answer["other_cores"] for answer in answers],
            }
            for answers in (now, before)
        )
        found[phase] = {
            "rate": ratio(mine, theirs),
            "now": mine,
            "before": theirs,
            "same_tokens": tokens["equal_until_the_first_difference"] == tokens["tokens"],
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
