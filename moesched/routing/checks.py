"""Checks of recorded choices: every token has distinct experts of the model, and a fault names its place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.choices import Integers

ROWS_AT_ONCE = 1 << 16  # so that a check takes little memory beside the choices


def id_type(experts: int) -> type[np.unsignedinteger]:
    """The smallest type that holds the ids of these experts."""
    return np.uint8 if experts <= 1 << 8 else np.uint16 if experts <= 1 << 16 else np.uint32


def sorted_choices(chosen_Nk: Integers, config: ModelConfig, place: Callable[[int], str]) -> Integers:
    """Sort each row's experts, in the smallest type that holds them.

    Args:
        chosen_Nk: expert ids; a row is one token in one layer.
        place: names a row in messages, such as "trace.csv:7".

    Raises:
        BadInput: a row has an expert that the model lacks, or one expert twice.
    """
    found_Nk = np.empty(chosen_Nk.shape, id_type(config.experts))
    for start in range(0, len(chosen_Nk), ROWS_AT_ONCE):
        rows_Nk = np.sort(chosen_Nk[start : start + ROWS_AT_ONCE], axis=-1)
        foreign_Nk = (rows_Nk < 0) | (rows_Nk >= config.experts)
        if foreign_Nk.any():
            row, column = np.argwhere(foreign_Nk)[0]
            raise BadInput(
                f"{place(start + int(row))}: there is no expert {rows_Nk[row, column]}, as {config.name} has experts "
                f"0 to {config.experts - 1}: give a trace of that model, with the experts of every token"
            )
        twice_Nk = rows_Nk[:, 1:] == rows_Nk[:, :-1]
        if twice_Nk.any():
            row, column = np.argwhere(twice_Nk)[0]
            raise BadInput(
                f"{place(start + int(row))}: expert {rows_Nk[row, column]} is chosen twice: give {config.top_k} "
                "different experts, or remove the token"
            )
        found_Nk[start : start + ROWS_AT_ONCE] = rows_Nk
    return found_Nk


def other_top_k(place: str, count: int, config: ModelConfig) -> BadInput:
    """The error for tokens that have more experts than the model chooses, or fewer."""
    return BadInput(
        f"{place}: a token has {count} experts, but {config.name} has top {config.top_k}: give a trace of that model"
    )


def other_layers(where: str, count: int, config: ModelConfig) -> BadInput:
    """The error for a trace with more layers than the model, or fewer."""
    return BadInput(
        f"{where}: its number of layers is {count}, but {config.name} has {config.layers}: give a trace of that model"
    )
