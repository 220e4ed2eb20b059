"""What torchrun, mpirun or mlx.launch tell a process by its environment: its rank, and how many there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from moesched.errors import BadInput

_NAMES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MLX_RANK", "MLX_HOSTFILE"),
)
"""Of the rank, and of what says how many there are."""


def rank_given(environment: Mapping[str, str], nodes: int) -> int | None:
    """This process's rank; None where nobody set one.

    Args:
        nodes: how many the cluster file has.

    Raises:
        BadInput: it is no number, or as many processes were started as there are not nodes.
    """
    for name, counter in _NAMES:
        if name not in environment:
            continue
        count = _count(counter, environment)
        rank = _number(name, environment[name])
        if count != nodes or rank >= count:
            raise BadInput(
                f"rank {rank} of {count} was started ({name}), and the cluster file has {nodes} nodes: start one "
                "process for each"
            )
        return rank
    return None


def _count(name: str, environment: Mapping[str, str]) -> int:
    if name not in environment:
        raise BadInput(
            f"{name} is not in the environment beside the rank: start with torchrun, mpirun or mlx.launch"
        )
    if name != "MLX_HOSTFILE":
        return _number(name, environment[name])
    file = Path(environment[name])
    try:
        return len(msgspec.json.decode(file.read_bytes(), type=list[list[str]]))
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput(f"MLX_HOSTFILE names {file}, which is no list of hosts: {error}") from None


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise BadInput(f"{name} is {text!r} in the environment: it must be a whole number")
    return int(text)
