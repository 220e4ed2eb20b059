"""Checks of output files before a command's work: that they can be written, and replace no input or other output."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.system.input_file import is_folder
from moesched.system.whole_file import require_writable


class Output(NamedTuple):
    """An output file of a command.

    Attributes:
        kind: kind of file, for messages, such as "trace".
        path: the file; None if the user did not ask for it.
        numbered: whether batches after the first write files of their own beside `path`, named by `numbered()`.
    """

    kind: str
    path: Path | str | None
    numbered: bool = False


def is_html(path: Path | str | None) -> bool:
    """Test whether a report's path ends in .html or .htm, so that the report is an HTML page and not JSON."""
    return path is not None and Path(path).suffix.lower() in (".html", ".htm")


def numbered(path: Path | str, number: int) -> Path:
    """Return the path of a batch's output file: `path` for batch 0, otherwise a name with the batch's number.

    Args:
        path: the first batch's file.
        number: index of the batch, from 0.
    """
    path = Path(path)
    if number == 0:
        return path
    stem, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}.batch{number + 1}{dot}{suffixes}")


def require_outputs(
    *outputs: Output, model: Path | str | None = None, inputs: Iterable[Path | str | None] = ()
) -> None:
    """Check that output files can be written, and that none replaces an input or another output.

    Links are resolved before paths are compared, and hard links of a file count as the same file. If each batch writes
    an output file of its own (`Output.numbered`), files that exist under later batches' names are checked, too.

    Args:
        model: the model's folder, where nothing may be written; a name that is no folder is ignored.
        inputs: files that are read; names that are no files are ignored.

    Raises:
        BadInput: an output cannot be used.
    """
    asked = [output for output in outputs if output.path is not None]
    read = [Path(each) for each in inputs if each is not None]
    for output in asked:
        if output.kind == "trace" and is_html(output.path):
            why = "a trace is JSON: end its name in .json; `moesched explain --report` makes a page of it"
            raise _refusal(output, Path(output.path or ""), why)
        for path in _files(output):
            if _is_loop(path):
                raise _refusal(output, path, "it is a link that leads to itself: name another file")
            require_writable(path, output.kind)
            for each in read:
                if _same(path, each):
                    raise _refusal(output, path, f"it is {each}, which this command reads: name another file")
            if model is not None and _belongs_to(path, Path(model)):
                why = (
                    f"it is in the model's folder {model}, whose files it could replace: name another folder"
                )
                raise _refusal(output, path, why)
    for first, second in combinations(asked, 2):
        if any(_same(one, other) for one in _files(first) for other in _files(second)) or (
            _is_numbered(first, of=second) or _is_numbered(second, of=first)
        ):
            raise _refusal(second, Path(second.path or ""), f"the {first.kind} goes there: name another file")


def _refusal(output: Output, path: Path, why: str) -> BadInput:
    return BadInput(f"cannot write {output.kind} {path}: {why}")


def _files(output: Output) -> Iterator[Path]:
    """Yield an output's path, and the paths of existing files of its later batches."""
    assert output.path is not None
    path = Path(output.path)
    yield path
    if output.numbered:
        pattern = _number_pattern(path)
        yield from (each for each in _entries(path.parent) if pattern.fullmatch(each.name))


def _is_numbered(output: Output, *, of: Output) -> bool:
    """Test whether a later batch of another output, `of`, would write to the path of `output`."""
    path, base = Path(output.path or ""), Path(of.path or "")
    return of.numbered and any(
        _real(each.parent) == _real(base.parent) and _number_pattern(base).fullmatch(each.name)
        for each in (path, _real(path))
    )


def _number_pattern(path: Path) -> re.Pattern[str]:
    """Return a regular expression for the names of later batches' files, given the first batch's path."""
    before, after = (re.escape(part) for part in numbered(path, 1).name.split(".batch2", 1))
    return re.compile(rf"{before}\.batch\d+{after}")


def _belongs_to(path: Path, model: Path) -> bool:
    """Test whether a file is in a model's folder, or is the target of a link in this folder."""
    if not is_folder(model) or _is_special(path):
        return False
    if _real(model) in (_real(path.parent), _real(path).parent):
        return True
    return any(_same(path, each) for each in _entries(model))


def _same(path: Path, other: Path) -> bool:
    """Test whether two paths lead to one regular file, which need not exist; False for devices and pipes."""
    if _is_special(path):
        return False
    here, there = _status(path), _status(other)
    if here is not None and there is not None:
        return os.path.samestat(here, there)
    return _real(path) == _real(other)


def _is_special(path: Path) -> bool:
    status = _status(path)
    return status is not None and not stat.S_ISREG(status.st_mode)


def _is_loop(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _real(path: Path) -> Path:
    """Return the path with links resolved; unlike `Path.resolve` this accepts links that lead to themselves."""
    return Path(os.path.realpath(path))


def _entries(folder: Path) -> list[Path]:
    """Return the paths in a folder; none if it cannot be listed."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):  # it does not exist, or cannot be a path
        return None
