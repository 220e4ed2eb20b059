"""The options, the progress bar and the result file that all benchmarks share."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import TypeVar

from rich.console import Console
from rich.progress import track as rich_track

from benchmarks.record.claims import Claim, Result
from benchmarks.record.code import Imports, changed_since, hash_of, imported
from benchmarks.record.results import (
    OF_A_VERSION,
    RESULTS,
    ROOT,
    commit,
    named_for_machine,
    store,
    stored,
    this_machine,
)
from moesched.calibration.timing import OtherLoad

T = TypeVar("T")

CHANGED = "changed while it was measured"
"""In place of a hash of code."""

progress = Console(stderr=True)


def track(items: Iterable[T], description: str, *, still: bool = False) -> Iterable[T]:
    """Iterate under a progress bar on standard error; with `still` no thread draws while something is timed."""
    return rich_track(items, description, console=progress, auto_refresh=not still)


class Benchmark:
    """A script's options and its result file.

    Args:
        file: of the script; its name is that of the result, too.
        doc: the script's docstring, which `--help` prints.
        parts: names that `--only` picks from.
        claims: lines of docs/results.md, from the figures that are written.
        tables: of other pages, in Markdown; one of a part has the part's name.
        also: paths of files that figures depend on, besides the modules that are imported.
        rounds: the default of `--rounds`.
        rounds_help: the meaning of a round.
        by_machine: whether the figures depend on the machine; its name is then part of the file's.
        keeps_parts: whether parts that were not measured stay in the result file.
        shows_parts: whether claims and tables are those of the parts that there are.
        replaces: names of scripts that are gone; their results of this machine go once this one has all parts.
    """

    def __init__(
        self,
        file: str,
        doc: str | None,
        *,
        parts: Iterable[str],
        claims: Callable[[Result], Iterable[Claim]] = lambda _: (),
        tables: Callable[[Result], Mapping[str, str]] = lambda _: {},
        also: Sequence[str] = (),
        rounds: int = 1,
        rounds_help: str = "measure everything this often; figures are medians",
        by_machine: bool = True,
        keeps_parts: bool = False,
        shows_parts: bool = False,
        replaces: Sequence[str] = (),
    ) -> None:
        path = Path(file).resolve()
        self.name = path.stem
        self.parts = list(parts)
        self._module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        self._claims, self._tables = claims, tables
        self._also = also
        self._said: set[str] = set()
        self._done: list[str] = []
        self._keeps_parts = keeps_parts
        self._shows_parts = keeps_parts or shows_parts
        self.out = RESULTS / f"{named_for_machine(self.name) if by_machine else self.name}.json"
        self._replaced = [each for name in replaces for each in (name, named_for_machine(name))]
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
        named = (
            Path(each).name if Path(each).is_absolute() else each for each in arguments
        )  # on any machine
        self._command = shlex.join(["python", "-m", self._module, *named])
        self._chosen, self._partial = options.only, options.only != self.parts
        self._named = options.out is not None
        if self._is_unkept():
            progress.print("only some parts are measured: nothing will be written (name a file with --out)")
        self.out = options.out or self.out
        self.imports, self._began = Imports(), time.time()
        self._before = _load_of(0.3)
        self._load, self._children, self._since = OtherLoad(), children_seconds(), time.perf_counter()
        return options

    def stored(self) -> Result:
        """The result that the file has; empty if there is none."""
        return stored(self.out)

    def stored_parts(self) -> Result:
        """The figures that the file has under the names of parts."""
        return _of(self.stored(), self.parts)

    def done(self, part: str) -> None:
        """Note that a part is measured, where results are written after each: others keep their date until then."""
        self._done.append(part)

    def joined(self, key: str, part: str, found: Result) -> list[Result]:
        """The rows under a key of the result, each of a part, with one measured anew, in the order of the parts."""
        self.done(part)
        rows = {row["part"]: row for row in self.stored().get(key, [])} | {part: {"part": part, **found}}
        return [rows[part] for part in self.parts if part in rows]

    def _is_unkept(self) -> bool:
        """Whether the figures are of some parts, for which the result of all parts would be lost."""
        return self._partial and not (self._named or self._keeps_parts)

    def write(self, figures: Result, out: Path | None = None, parts: Sequence[str] = ()) -> int:
        """Write figures, their claims and tables with the command, the machine, its load, the commit and the code.

        A result of some parts replaces one of all parts only where the other parts stay; it keeps its date, and `parts`
        says how each part was measured. Figures are those of all chosen parts, unless some are noted as done. `out` is
        for scripts that write several files, `parts` for those that keep parts in them: the parts of this file. Claims
        are printed.

        Returns: the exit code, 1 if a bar is missed.
        """
        if self._is_unkept():
            return 0
        path = out or self.out
        older = stored(path)
        files = imported(self.imports.by_children(), self._also)
        code = CHANGED if changed_since(files, self._began) else hash_of(files)
        about: Result = {
            "command": self._command,
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
            "code": code,
        }
        machine = {
            "machine": this_machine(),
            "other_cores": {"before": round(self._before, 2), "during": round(self._load_so_far(), 2)},
        }
        of_file = list(parts) if out else self.parts
        chosen = [part for part in of_file if part in (self._done or self._chosen)]
        if chosen != of_file:
            whole = dict.fromkeys(of_file, _of(older, about)) if older else {}
            measured = {**older.get("parts", whole), **dict.fromkeys(chosen, about)}
            about = {**about, **_of(older, about), "parts": _of(measured, of_file)}
        codes = {each.get("code") for each in about.get("parts", {"": about}).values()}
        sources = {
            code: of for code, of in {**older.get("sources", {}), code: files}.items() if code in codes
        }
        shown = (
            self.shown(figures) if self._shows_parts or not self._partial else {"claims": [], "tables": {}}
        )
        store({**about, **machine, **shown, **figures, **shown, "sources": sources}, path)
        if path.parent == RESULTS:
            whole = about.get("parts", dict.fromkeys(of_file)).keys() >= {*of_file}
            for stem in (path.stem, *(self._replaced if whole else ())):
                (OF_A_VERSION / f"{stem}.json").unlink(missing_ok=True)
        print(path, flush=True)
        said = [
            f"{'' if each['reached'] in (True, None) else 'MISSED '}{each['words']}: {each['figure']}"
            for each in shown["claims"]
        ]
        print("".join(f"{line}\n" for line in said if line not in self._said), end="", flush=True)
        self._said.update(said)
        return int(any(claim["reached"] is False for claim in shown["claims"]))

    def shown(self, figures: Result) -> Result:
        """The claims of figures, and their tables in lines of Markdown, for the documentation."""
        return {
            "claims": [claim._asdict() for claim in self._claims(figures)],
            "tables": {name: table.splitlines() for name, table in self._tables(figures).items()},
        }

    def _is_chosen(self, part: str, wanted: Sequence[str] | None) -> bool:
        if wanted is None or part in wanted:
            return True
        return any(text in part for text in wanted if text not in self.parts)

    def _load_so_far(self) -> float:
        """Cores that others kept busy since the options were read; processes that the script started are its own."""
        own = (children_seconds() - self._children) / (time.perf_counter() - self._since)
        return max(0.0, self._load.cores() - own)


def _of(result: Result, keys: Iterable[str]) -> Result:
    """The entries of a result under some keys, as far as it has them."""
    return {key: result[key] for key in keys if key in result}


def _load_of(seconds: float) -> float:
    load = OtherLoad()
    time.sleep(seconds)
    return load.cores()


def children_seconds() -> float:
    """Processor time of all processes that were started here and have ended."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
