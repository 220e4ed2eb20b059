"""Print the commands that measure anew what docs/results.md marks, or has at an older commit, on this machine.

    MOESCHED_MACHINE=zen5 python -m benchmarks.pages.marks

Some take hours: choose. Afterwards `make pages` writes the tables.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.pages.write import Result, results
from benchmarks.record.code import older_than_the_code
from benchmarks.record.results import named_for_machine


def main() -> None:
    """Commands, with what they are for in comments."""
    found = [each for each in results() if each.has["claims"]]
    marked = [each for each in found if not each.of_a_version and older_than_the_code(each.has)]
    versions = [each for each in found if each.of_a_version]
    print(f"# marked: {_count(marked)} of {_count(found)} figures")
    _list(marked)
    print(f"# at an older commit: {_count(versions)} of {_count(found)} figures")
    _list(versions)


def _list(found: Iterable[Result]) -> None:
    commands = [
        about["command"]
        for each in found
        if each.machine is None or each.file.stem == named_for_machine(each.file.stem.split("-")[0])
        for about in each.parts
    ]
    print("".join(f"{command}\n" for command in dict.fromkeys(commands)), end="")


def _count(found: Iterable[Result]) -> int:
    return sum(len(each.has["claims"]) for each in found)


if __name__ == "__main__":
    main()
