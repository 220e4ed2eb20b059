"""Compare a commit with an older one: the same tokens, slices, edges and nanoseconds under every policy?

    python -m benchmarks.exact.same_behaviour f050cae [a3d9c01]

Both run the same cases: every policy simulated on fixed machine profiles, and real runs of the shipped small model on
torch and MLX. Labels that were renamed in between are listed in renamed_labels.toml. Without a second commit, the newer
tree is this one. Takes about five minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.exact._behaviour_probe import SETTINGS
from benchmarks.record.benchmark import Benchmark
from benchmarks.record.claims import Claim, Result, none_of
from benchmarks.record.results import ROOT, commit
from benchmarks.shared.older_tree import checkout, prepared

HERE = Path(__file__).parent
PROBE = HERE / "_behaviour_probe.py"
MODEL = ROOT / "examples" / "tiny-mixtral"


def claims(result: Result) -> Iterator[Claim]:
    """The cases that behave otherwise than in the older commit."""
    words = f"runs of commit {result['after']} with other tokens, slices or nanoseconds than commit {result['before']}"
    yield none_of(words, len(result["different"]), result["cases"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=SETTINGS,
    rounds_help="runs of the newer tree; each is compared",
    by_machine=False,
)
BENCHMARK.parser.add_argument("before", nargs="?", default="HEAD", help="the older commit (default: HEAD)")
BENCHMARK.parser.add_argument("after", nargs="?", help="the newer commit (default: this tree)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both, print what differs, and return 1 if anything does."""
    options = BENCHMARK.parse(arguments)
    newer: AbstractContextManager[Path] = checkout(options.after) if options.after else prepared(ROOT)
    with checkout(options.before) as old, newer as new:
        before = behaviour(old, options.only)
        rounds = [behaviour(new, options.only) for _ in range(options.rounds)]
    verbs = renamed_verbs()
    compared = [compare(before, each, verbs) for each in rounds]
    different = {label: said for each in compared for label, said in each.items() if said != "same"}
    print("".join(f"{label}: {said}\n" for label, said in different.items()), end="")
    return BENCHMARK.write(
        {
            "before": options.before,
            "after": options.after or commit(),
            "cases": len({label for each in compared for label in each}),
            "refused": sum(case == {"refused": True} for case in rounds[0].values()),
            "different": different,
        }
    )


def behaviour(tree: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Run the cases of some settings on a tree, with a cache of its own, and return the results by case."""
    print(f"running {tree}", file=sys.stderr, flush=True)
    with TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, str(PROBE), str(MODEL), *settings],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "MOESCHED_CACHE": cache},
            stdout=subprocess.PIPE,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def renamed_verbs() -> dict[str, str]:
    """New names of verbs by their old ones."""
    text = (HERE / "renamed_labels.toml").read_text()
    verbs: dict[str, str] = tomllib.loads(text)["verbs"]
    return verbs


def compare(before: Mapping[str, Any], after: Mapping[str, Any], verbs: Mapping[str, str]) -> dict[str, str]:
    """By case, "same" or the first difference."""
    return {
        label: difference(relabelled(before.get(label), verbs), after.get(label))
        for label in sorted({*before, *after})
    }


def relabelled(case: Any, verbs: Mapping[str, str]) -> Any:
    """An older case, with the names of today."""
    if not case or "slices" not in case:
        return case
    slices = [[*rest, renamed(name, verbs)] for *rest, name in case["slices"]]
    return {**case, "slices": sorted(slices)}


def renamed(name: str, verbs: Mapping[str, str]) -> str:
    """A slice's name, which begins with its verb."""
    verb, space, rest = name.partition(" ")
    return verbs.get(verb, verb) + space + rest


def difference(before: Any, after: Any) -> str:
    """Describe the first difference between two results; "same" if there is none."""
    if before is None or after is None:
        return "only in one of them"
    for key in {**before, **after}:
        one, other = before.get(key), after.get(key)
        if one == other:
            continue
        if key == "slices" and one and other:
            pairs = zip(one, other, strict=False)
            first = next((pair for pair in pairs if pair[0] != pair[1]), (len(one), len(other)))
            return f"slices: {first[0]} became {first[1]}"
        return f"{key}: {one} became {other}"
    return "same"


if __name__ == "__main__":
    sys.exit(main())
