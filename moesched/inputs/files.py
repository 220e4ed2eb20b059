"""Checks that no output file replaces an input file; every other file that an option names counts as an input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

from moesched.inputs.lookup import machine_file
from moesched.models.gguf.parts import gguf_files
from moesched.system.input_file import is_file
from moesched.system.outputs import Output, require_outputs


def require_safe_outputs(written: Sequence[Output], named: Iterable[str]) -> None:
    """Check that output files can be written, and that none is another output or a file that an option names.

    Args:
        written: the output files.
        named: values of options, any of which may name an input file.

    Raises:
        BadInput: an output cannot be written, is an input, or is in a model's folder.
    """
    if not any(output.path is not None for output in written):
        return
    paths = [path for value in named for path in _paths(value)]
    models: list[Path | None] = [path for path in paths if is_file(path / "config.json")]
    inputs = [file for path in paths if is_file(path) for file in gguf_files(path)]
    for model in models or [None]:
        require_outputs(*written, model=model, inputs=inputs)


def texts_in(value: object) -> Iterator[str]:
    """Yield, as texts, all strings and paths in an option's value, also inside lists, mappings and dataclasses."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from texts_in(each)
    elif isinstance(value, Mapping):
        yield from texts_in(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from texts_in([getattr(value, each.name) for each in fields(value)])


def _paths(text: str) -> Iterator[Path]:
    """Yield the paths of files that an option's value may name.

    The value may be a name, several names with commas between them, file.py:Class, or "auto" for this machine's file.
    """
    for name in dict.fromkeys([text, *(part.partition(":")[0] for part in text.split(","))]):
        if name and (path := machine_file(name)):
            yield path
