"""Compare this tree with an older commit: the same tokens, slices, edges and nanoseconds under every policy?

    python -m benchmarks.exact.same_behaviour f050cae [--only TEXT] [--rounds N] [--out FILE]

Both run the same cases: every policy simulated on fixed machine profiles, and real runs of the shipped small model on
torch and MLX. Labels that were renamed in between are listed in renamed_labels.toml. Takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.record.results import ROOT, commit

HERE = Path(__file__).parent
PROBE = HERE / "_behaviour_probe.py"
MODEL = ROOT / "examples" / "tiny-mixtral"
SETUP = "from setuptools import setup; setup()"


def main() -> int:
    """Run both, print what differs, and return 1 if anything does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", nargs="?", default="HEAD", help="the older commit (default: HEAD)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose label contains this")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="runs of this tree; each is compared (default: 1)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the verdict of every case as JSON")
    options = parser.parse_args()
    with checkout(options.before) as old, prepared(ROOT) as new:
        before = behaviour(old, options.only)
        rounds = [behaviour(new, options.only) for _ in range(options.rounds)]
    after, verbs = rounds[0], renamed_verbs()
    compared = [compare(before, each, verbs) for each in rounds]
    verdicts = {label for verdicts in compared for label in verdicts}
    different = {label: said for each in compared for label, said in each.items() if said != "same"}
    for label, verdict in different.items():
        print(f"{label}: {verdict}")
    refused = sum(case == {"refused": True} for case in after.values())
    print(
        f"{len(verdicts)} cases, {refused} of them refused by the policy or the machine: {len(different)} differ"
    )
    if options.out is not None:
        summary = {
            "command": f"python -m benchmarks.exact.same_behaviour {options.before}",
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
            "cases": len(verdicts),
            "refused": refused,
            "different": different,
        }
        options.out.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if different else 0


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A worktree of an older commit, ready to be imported."""
    with TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", tree, commit], cwd=ROOT, check=True)
        try:
            with prepared(tree):
                yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


@contextmanager
def prepared(tree: Path) -> Iterator[Path]:
    """A tree with its compiled kernel, and with its plug-ins' names, which a run finds before those installed."""
    command = [sys.executable, "-c", SETUP, "-q", "egg_info", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield tree
    finally:
        for file in (tree / "moesched.egg-info").glob("*"):
            file.unlink()
        (tree / "moesched.egg-info").rmdir()


def behaviour(tree: Path, only: str) -> dict[str, Any]:
    """Run the cases on a tree; returns the results by case."""
    print(f"running {tree}", file=sys.stderr, flush=True)
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, str(PROBE), str(MODEL), only]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, check=True)
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
