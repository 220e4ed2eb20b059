"""Checks recorded expert choices: a token's experts differ, and the model has all of them; errors name the token.

In a trace file the layer axis has either all layers of the model, or only the layers with experts. In memory the axis
always has all layers, with zeros in layers without experts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.choices import Integers

ROWS_AT_ONCE = 1 << 16  # so that a check takes little memory beside the choices


def id_type(experts: int) -> type[np.unsignedinteger]:
    """Return the smallest unsigned type that holds the ids of this number of experts."""
    return np.uint8 if experts <= 1 << 8 else np.uint16 if experts <= 1 << 16 else np.uint32


def sorted_choices(chosen_Nk: Integers, config: ModelConfig, place: Callable[[int], str]) -> Integers:
    """Check rows of expert ids, and return them with each row sorted, in the smallest unsigned type that holds the ids.

    Args:
        chosen_Nk: expert ids (rows, top_k); a row is the choice of one token in one layer.
        config: the model that has the experts.
        place: takes the index of a row, and returns its place in the file for errors, such as "trace.csv:7".

    Raises:
        BadInput: a row has an expert that the model lacks, or one expert twice.
    """
    found_Nk = np.empty(chosen_Nk.shape, id_type(config.routed.experts))
    for start in range(0, len(chosen_Nk), ROWS_AT_ONCE):
        rows_Nk = np.sort(chosen_Nk[start : start + ROWS_AT_ONCE], axis=-1)
        foreign_Nk = (rows_Nk < 0) | (rows_Nk >= config.routed.experts)
        if foreign_Nk.any():
            row, column = np.argwhere(foreign_Nk)[0]
            raise BadInput(
                f"{place(start + int(row))}: there is no expert {rows_Nk[row, column]}, as {config.name} has experts "
                f"0 to {config.routed.experts - 1}: give a trace of that model, with the experts of every token"
            )
        twice_Nk = rows_Nk[:, 1:] == rows_Nk[:, :-1]
        if twice_Nk.any():
            row, column = np.argwhere(twice_Nk)[0]
            raise BadInput(
                f"{place(start + int(row))}: expert {rows_Nk[row, column]} is chosen twice: give {config.routed.top_k} "
                "different experts, or remove the token"
            )
        found_Nk[start : start + ROWS_AT_ONCE] = rows_Nk
    return found_Nk


def routed_layers(config: ModelConfig) -> list[int]:
    """Return the numbers of the layers with experts."""
    return [layer for layer in range(config.layers) if config.layer(layer).feed_forward.experts]


def layers_without_experts(config: ModelConfig) -> list[int]:
    """Return the numbers of the layers without experts."""
    return sorted(set(range(config.layers)).difference(routed_layers(config)))


def checked_layers(where: str, chosen_TLk: Integers, config: ModelConfig) -> Integers:
    """Check the expert ids of a trace, and return them sorted, for all layers of the model (tokens, layers, top_k).

    Args:
        where: name of the file or the array, for error messages.
        chosen_TLk: expert ids (tokens, layers, top_k), of all layers or only of the layers with experts.

    Raises:
        BadInput: the trace has another number of layers than the model; a token's ids in a layer without experts are
            not all equal; or `sorted_choices` refuses a row.
    """
    tokens, layers, top_k = chosen_TLk.shape
    routed = routed_layers(config)
    if layers not in (config.layers, len(routed)):
        raise other_layers(where, layers, config)
    if layers == config.layers:
        _require_no_choices(where, chosen_TLk, config)
        chosen_TLk = chosen_TLk if layers == len(routed) else chosen_TLk[:, routed]

    def place(row: int) -> str:
        token, number = divmod(row, len(routed))
        return f"{where}, token {token}, layer {routed[number]}"

    rows_Nk = sorted_choices(chosen_TLk.reshape(-1, top_k), config, place)
    return with_all_layers(rows_Nk.reshape(tokens, len(routed), top_k), config)


def _require_no_choices(where: str, chosen_TLk: Integers, config: ModelConfig) -> None:
    """Check that the trace `where` has no choices in layers without experts: there, all ids of a token are equal.

    Args:
        chosen_TLk: expert ids (tokens, layers, top_k) of all layers.

    Raises:
        BadInput: a token's ids in a layer without experts are not all equal.
    """
    for layer in layers_without_experts(config):
        several_T = (chosen_TLk[:, layer] != chosen_TLk[:, layer, :1]).any(axis=-1)
        if several_T.any():
            raise BadInput(
                f"{where}, token {int(several_T.argmax())}, layer {layer}: {config.name} has no experts in this layer: "
                "give a trace of that model, with zeros there or without such layers"
            )


def with_all_layers(chosen_Tlk: Integers, config: ModelConfig) -> Integers:
    """Add the layers without experts to expert ids, filled with zeros; returns (tokens, layers, top_k) for all layers.

    Args:
        chosen_Tlk: expert ids (tokens, layers with experts, top_k).
    """
    routed = routed_layers(config)
    if len(routed) == config.layers:
        return chosen_Tlk
    tokens, _, top_k = chosen_Tlk.shape
    chosen_TLk: Integers = np.zeros((tokens, config.layers, top_k), chosen_Tlk.dtype)
    chosen_TLk[:, routed] = chosen_Tlk
    return chosen_TLk


def other_top_k(place: str, count: int, config: ModelConfig) -> BadInput:
    """Make the error for a token whose number of chosen experts is not the model's top_k.

    Args:
        place: the token's place in the file.
        count: number of experts that the token has there.
    """
    return BadInput(
        f"{place}: a token has {count} experts, but {config.name} has top {config.routed.top_k}: "
        "give a trace of that model"
    )


def other_layers(where: str, count: int, config: ModelConfig) -> BadInput:
    """Make the error for a trace whose number of layers is not the model's.

    Args:
        where: name of the trace.
        count: number of layers of the trace.
    """
    routed = len(routed_layers(config))
    with_experts = "" if routed == config.layers else f", {routed} of them with experts"
    return BadInput(
        f"{where}: its number of layers is {count}, but {config.name} has {config.layers}{with_experts}: "
        "give a trace of that model"
    )
