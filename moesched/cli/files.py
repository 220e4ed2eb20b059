"""The files of a command, checked before it begins: whatever its options name and it does not write, it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from moesched.errors import BadInput
from moesched.system.outputs import Output
from moesched.system.standard_output import is_stdout


@dataclass(frozen=True)
class Writes:
    """Marks an option that names a file to write; `kind` and `numbered` are those of an `Output`."""

    kind: str
    numbered: bool = False


def require_files(command: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Require that a command can write its files, and that none replaces one that it reads.

    Raises:
        BadInput: as `require_apart`.
    """
    from moesched.inputs.files import texts_in

    written: list[Output] = []
    named: list[str] = []
    for mark, value in _options(command, arguments):
        if mark is None:
            named += texts_in(value)
        else:
            written += [Output(mark.kind, path, mark.numbered) for path in texts_in(value)]
    require_apart(written, named)


def require_apart(written: Sequence[Output], named: Iterable[str]) -> None:
    """Require outputs that can be written, apart from each other and from all that values of options name.

    Raises:
        BadInput: an output cannot be written, is an input, is in a model's folder, or is standard output.
    """
    from moesched.inputs import files

    for output in written:
        if is_stdout(Path(output.path or "")):
            raise BadInput(
                f"cannot write {output.kind} {output.path}: standard output has the command's results: name a file"
            )
    files.require_apart(written, named)


def _options(owner: Any, given: Mapping[str, Any]) -> Iterator[tuple[Writes | None, object]]:
    """The mark and the value of each option of a command or a struct, those of its structs in their places."""
    hints = get_type_hints(owner, include_extras=True)
    for name, value in given.items():
        if is_dataclass(value) and not isinstance(value, type):
            yield from _options(type(value), {each.name: getattr(value, each.name) for each in fields(value)})
        else:
            marks = (each for each in get_args(hints[name]) if isinstance(each, Writes))
            yield next(marks, None), value
