"""Checks a command's files before it begins: outputs can be written, and replace no file that another option names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moesched.errors import BadInput
from moesched.options import split
from moesched.system.outputs import Output
from moesched.system.standard_output import is_stdout


def require_files(command: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check that a command can write its output files, and that none of them replaces a file that another option names.

    Args:
        command: function of the command, with annotated parameters.
        arguments: the command's arguments, by parameter.

    Raises:
        BadInput: `require_safe_outputs` refuses a file.
    """
    from moesched.inputs.files import texts_in

    written: list[Output] = []
    named: list[str] = []
    parameters = inspect.signature(command).parameters
    for name, value in arguments.items():
        _, option = split(parameters[name].annotation)
        if option is not None and option.writes:
            written += [Output(option.writes, path, option.numbered) for path in texts_in(value)]
        else:
            named += texts_in(value)
    require_safe_outputs(written, named)


def require_safe_outputs(written: Sequence[Output], named: Iterable[str]) -> None:
    """Check that output files can be written, and differ from each other and from all files that other options name.

    Args:
        written: the output files.
        named: values of the other options, whether they are paths or not.

    Raises:
        BadInput: an output cannot be written, is an input, is in a model's folder, or is standard output.
    """
    from moesched.inputs import files

    for output in written:
        if is_stdout(Path(output.path or "")):
            raise BadInput(
                f"cannot write {output.kind} {output.path}: standard output has the command's results: name a file"
            )
    files.require_safe_outputs(written, named)
