"""The options, the progress bar and the result file that all benchmarks share."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any, TypeVar

from _results import RESULTS, commit, named_for_machine, source_hash, stored, this_machine
from rich.console import Console
from rich.progress import track as rich_track

from moesched.calibration.other_load import OtherLoad

T = TypeVar("T")

ENGINE = ("moesched/tasks.py", "moesched/engine.py", "moesched/engine.c", "moesched/drivers")
RUNS = (*ENGINE, "moesched/steps", "moesched/dispatch", "moesched/runs", "policies")
SIMULATION = (*RUNS, "moesched/machines", "moesched/models", "moesched/routing")
EXECUTION = (*RUNS, "devices", "moesched/system/bound_call.py", "moesched/system/bound_call.c")
CLUSTER = (*EXECUTION, "transports", "moesched/cluster")
"""Sources that figures depend on, by what is measured."""

progress = Console(stderr=True)


def track(items: Iterable[T], description: str, *, still: bool = False) -> Iterable[T]:
    """Iterate under a progress bar on standard error; with `still` no thread draws while something is timed."""
    return rich_track(items, description, console=progress, auto_refresh=not still)


class Benchmark:
    """A script's options and its result file.

    Args:
        doc: the script's docstring, which `--help` prints.
        name: of the script and its result.
        script: the script's file, where its name is another.
        measures: files and folders that the figures depend on, besides the script.
        packages: libraries whose versions are recorded.
        parts: names that `--only` picks from.
        rounds: the default of `--rounds`.
        rounds_help: the meaning of a round.
        by_machine: whether the figures depend on the machine; its name is then part of the file's.
        keeps_parts: whether parts that were not measured stay in the result file.
    """

    def __init__(
        self,
        doc: str | None,
        name: str,
        *,
        measures: Sequence[str],
        parts: Iterable[str],
        script: str = "",
        packages: Sequence[str] = (),
        rounds: int = 1,
        rounds_help: str = "measure everything this often; figures are medians",
        by_machine: bool = True,
        keeps_parts: bool = False,
    ) -> None:
        self.name = name
        self.parts = list(parts)
        self._script = f"benchmarks/{script or f'{name}.py'}"
        self._measures = [self._script, *measures]
        self._packages = packages
        self._keeps_parts = keeps_parts
        self.out = RESULTS / f"{named_for_machine(name) if by_machine else name}.json"
        self.parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.parser.add_argument(
            "--only",
            "--part",
            nargs="+",
            metavar="TEXT",
            help=f"only parts whose name contains one of these; parts: {', '.join(self.parts).replace('%', '%%')}",
        )
        self.parser.add_argument(
            "--rounds", type=int, default=rounds, metavar="N", help=f"{rounds_help} (default: {rounds})"
        )
        self.parser.add_argument("--out", type=Path, metavar="FILE", help="result file, JSON")

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Read the options, and begin to watch what else the machine does; `only` is a list of parts."""
        arguments = sys.argv[1:] if arguments is None else arguments
        options = self.parser.parse_args(arguments)
        options.only = [part for part in self.parts if self._is_chosen(part, options.only)]
        if not options.only:
            self.parser.error(f"no part is named so; parts: {', '.join(self.parts)}")
        self._command = " ".join([f"python {self._script}", *arguments])
        self._chosen, self._partial = options.only, options.only != self.parts
        self._named = options.out is not None
        self._measured = options.rounds > 0
        self.out = options.out or self.out
        self._before = _load_of(0.3)
        self._load, self._children, self._since = OtherLoad(), _children_seconds(), time.perf_counter()
        return options

    def stored(self) -> dict[str, Any]:
        """The result that the file has; empty if there is none."""
        return stored(self.out)

    def write(self, figures: dict[str, Any], out: Path | None = None, parts: Sequence[str] = ()) -> None:
        """Write figures with the command, the machine, its load, the commit, the date and a hash of the sources.

        A result of some parts replaces one of all parts only where the other parts stay; it keeps its date, and `parts`
        says how each part was measured. One of no rounds keeps all that it said of the measurement. `out` is for
        scripts that write several files, `parts` for those that keep parts in them: the parts of this file.
        """
        if self._partial and not (self._named or self._keeps_parts):
            progress.print("only some parts were measured: nothing is written (name a file with --out)")
            return
        older = stored(out or self.out)
        about: dict[str, Any] = {
            "command": self._command,
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
            "measures": {"paths": self._measures, "hash": source_hash(self._measures)},
        }
        machine = {
            "machine": this_machine(self._packages),
            "other_cores": {"before": round(self._before, 2), "during": round(self._load_so_far(), 2)},
        }
        of_file = list(parts) if out else self.parts
        chosen = [part for part in of_file if part in self._chosen]
        if chosen != of_file:
            whole = dict.fromkeys(of_file, _of(older, about)) if older else {}
            measured = {**older.get("parts", whole), **dict.fromkeys(chosen, about)}
            about = {**about, **_of(older, about), "parts": _of(measured, of_file)}
        if not self._measured:
            about, machine = _of(older, [*about, "parts"]), _of(older, machine)
        result = {**about, **machine, **figures}
        path = out or self.out
        begun = path.with_suffix(".part")
        begun.write_text(json.dumps(result, indent=2) + "\n")
        begun.replace(path)
        print(path, flush=True)

    def _is_chosen(self, part: str, wanted: Sequence[str] | None) -> bool:
        if wanted is None or part in wanted:
            return True
        return any(text in part for text in wanted if text not in self.parts)

    def _load_so_far(self) -> float:
        """Cores that others kept busy since the options were read; processes that the script started are its own."""
        own = (_children_seconds() - self._children) / (time.perf_counter() - self._since)
        return max(0.0, self._load.cores() - own)


def _of(result: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The entries of a result under some keys, as far as it has them."""
    return {key: result[key] for key in keys if key in result}


def _load_of(seconds: float) -> float:
    load = OtherLoad()
    time.sleep(seconds)
    return load.cores()


def _children_seconds() -> float:
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
