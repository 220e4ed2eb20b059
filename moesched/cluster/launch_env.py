"""Reads environment variables of torchrun, mpirun and mlx.launch: a process's rank and the number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesched.errors import BadInput
from moesched.system.decoding import decode_json
from moesched.system.input_file import read_input
from moesched.system.plain_text import is_number, shown

MOST_BYTES = 1_000_000
MOST_DIGITS = 9

_NAMES = (
    ("RANK", ("WORLD_SIZE",)),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("MLX_RANK", ("MLX_HOSTFILE", "MLX_IBV_DEVICES")),
)
"""For each variable that holds the rank, the variables of which one gives the number of processes.

`mlx.launch` sets MLX_HOSTFILE with its backend ring, and MLX_IBV_DEVICES with jaccl.
"""

_LISTS = {"MLX_HOSTFILE": "a list of hosts", "MLX_IBV_DEVICES": "a list of each rank's devices"}
"""Variables that name a JSON file with one entry per process, and descriptions of the file for error messages."""


def rank_given(environment: Mapping[str, str], nodes: int) -> int | None:
    """Return this process's rank from the environment; None if no launching program has set one.

    Args:
        nodes: number of nodes in the cluster file.

    Raises:
        BadInput: a variable is missing or not a number, or the number of processes is not the number of nodes.
    """
    for name, counters in _NAMES:
        if name not in environment:
            continue
        count = _count(counters, environment)
        rank = _number(name, environment[name])
        if count != nodes or rank >= count:
            raise BadInput(
                f"rank {rank} of {count} was started ({name}), and the cluster file has {nodes} nodes: start one "
                "process for each"
            )
        return rank
    return None


def _count(names: Sequence[str], environment: Mapping[str, str]) -> int:
    name = next((each for each in names if each in environment), None)
    if name is None:
        raise BadInput(
            f"{' or '.join(names)} is not in the environment beside the rank: start with torchrun, mpirun or "
            "mlx.launch"
        )
    if name not in _LISTS:
        return _number(name, environment[name])
    file = Path(environment[name])
    where = f"{name} names {file}, which is not {_LISTS[name]}"
    data = read_input(file, name, MOST_BYTES)
    return len(decode_json(data, list[list[Any]], where, "start with mlx.launch"))


def _number(name: str, text: str) -> int:
    if not is_number(text, MOST_DIGITS):
        raise BadInput(f"{name} is {shown(text)} in the environment: it must be a whole number")
    return int(text)
