"""The files of a command, checked before it begins: whatever its options name and it does not write, it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from moesched.errors import BadInput
from moesched.system.input_file import is_file
from moesched.system.outputs import Output, require_outputs
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
    written: list[Output] = []
    named: list[str] = []
    for mark, value in _options(command, arguments):
        if mark is None:
            named += _each(value)
        else:
            written += [Output(mark.kind, path, mark.numbered) for path in _each(value)]
    require_apart(written, named)


def require_apart(written: Sequence[Output], named: Iterable[str]) -> None:
    """Require outputs that can be written, apart from each other and from all that values of options name.

    Raises:
        BadInput: an output cannot be written, is an input, is in a model's folder, or is standard output.
    """
    if not written:
        return
    for output in written:
        if is_stdout(Path(output.path or "")):
            raise BadInput(
                f"cannot write {output.kind} {output.path}: standard output has the command's results: name a file"
            )
    paths = [path for value in named for path in _paths(value)]
    models: list[Path | None] = [path for path in paths if is_file(path / "config.json")]
    inputs = [path for path in paths if is_file(path)]
    for model in models or [None]:
        require_outputs(*written, model=model, inputs=inputs)


def _options(owner: Any, given: Mapping[str, Any]) -> Iterator[tuple[Writes | None, object]]:
    """The mark and the value of each option of a command or a struct, those of its structs in their places."""
    hints = get_type_hints(owner, include_extras=True)
    for name, value in given.items():
        if is_dataclass(value) and not isinstance(value, type):
            yield from _options(type(value), {each.name: getattr(value, each.name) for each in fields(value)})
        else:
            marks = (each for each in get_args(hints[name]) if isinstance(each, Writes))
            yield next(marks, None), value


def _each(value: object) -> Iterator[str]:
    """The texts of an option that may be repeated."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, tuple):
        for each in value:
            yield from _each(each)


def _paths(text: str) -> Iterator[Path]:
    """Files that a value names: one, several separated by commas, that of file.py:Class, or this machine's own."""
    from moesched.inputs.lookup import machine_file

    for name in dict.fromkeys([text, *(part.partition(":")[0] for part in text.split(","))]):
        if name and (path := machine_file(name)):
            yield path
