"""Reader of Megatron-LM's routing traces: JSON lines, one for each layer of each forward pass.

Megatron-LM writes one file for each rank, with `--moe-routing-trace-path`. The format is that of `RouterTracer` in the
sources of Megatron Core 0.20:

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0, "num_tokens": 128, "topk": 2,
     "top_indices": [[12, 45], ...]}

A record does not name its tokens' requests. So a forward pass of several tokens is read as the prompt of a new request,
and a pass of one token as the next token of the latest request. This is right where requests run one at a time, and in
training. Blocks other than the decoder (multi-token prediction) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from io import BytesIO
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.checks import other_top_k, routed_layers, sorted_choices, with_all_layers
from moesched.routing.choices import Integers
from moesched.routing.trace import RoutingTrace
from moesched.system.decoding import decode_json

MOST_VALUES = 4_000_000
"""Most JSON values in a line: a million tokens with 3 experts each."""

_Number = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class _Record(msgspec.Struct, frozen=True):
    step: _Number
    layer: _Number
    top_indices: list[list[_Number]]
    rank: _Number = 0
    block: str = "decoder"
    num_tokens: _Number | None = None


class _Choices(NamedTuple):
    """The choices of one record.

    Attributes:
        line: number of the record's line in the file, from 1.
        chosen_Tk: checked and sorted expert ids (tokens, top_k).
    """

    line: int
    chosen_Tk: Integers


class _Pass(NamedTuple):
    """The records of one forward pass.

    Attributes:
        line: number of the pass's first line in the file, from 1.
        layers: the choices by layer, as the trace numbers layers.
    """

    line: int
    rank: int
    step: int
    layers: dict[int, _Choices]


def parse_megatron_trace(where: str, data: bytes, config: ModelConfig) -> RoutingTrace:
    """Parse `data`, the content of one trace file, or of several joined into one; errors name the file `where`.

    Raises:
        BadInput: a line is not a record (the message names it), a pass lacks a layer, or the trace is of another model.
    """
    passes = list(_passes(where, data, config))
    if not passes:
        raise BadInput(f"{where} has no record of the block 'decoder': give a trace of its layers")
    first = min(layer for each in passes for layer in each.layers)
    lengths: list[int] = []
    prompts: list[int] = []
    chosen = []
    for each in passes:
        chosen.append(_stacked(where, each, first, config))
        tokens = len(chosen[-1])
        if tokens > 1 or not lengths:
            lengths.append(0)
            prompts.append(tokens)
        lengths[-1] += tokens
    of_requests = np.array(lengths, np.int64), np.array(prompts, np.int64)
    return RoutingTrace(config.name, config.routed.experts, np.concatenate(chosen), *of_requests)


def _passes(where: str, data: bytes, config: ModelConfig) -> Iterator[_Pass]:
    """Group a file's records into forward passes; a new pass begins where step or rank changes or a layer repeats."""
    current = None
    for line, text in enumerate(BytesIO(data), 1):
        if not text.strip():
            continue
        record = _record(where, line, text)
        if record.block != "decoder":
            continue
        known = current is not None and (current.rank, current.step) == (record.rank, record.step)
        if current is None or not known or record.layer in current.layers:
            if current is not None:
                yield current
            current = _Pass(line, record.rank, record.step, {})
        current.layers[record.layer] = _Choices(line, _chosen(f"{where}:{line}", record, config))
    if current is not None:
        yield current


def _record(where: str, line: int, text: bytes) -> _Record:
    is_not = f"{where}:{line} is not a record of Megatron's router trace"
    remedy = "if the file was cut off, remove the lines of its last step"
    return decode_json(text, _Record, is_not, remedy, most=MOST_VALUES)


def _chosen(where: str, record: _Record, config: ModelConfig) -> Integers:
    """Return the record's expert ids (tokens, top_k), each row checked and sorted.

    Args:
        where: the record's file and line, for error messages.

    Raises:
        BadInput: the number of tokens or of experts is wrong, or `sorted_choices` refuses a row.
    """
    rows = record.top_indices
    if not rows or record.num_tokens not in (None, len(rows)):
        said = "" if record.num_tokens is None else f", and num_tokens is {record.num_tokens}"
        raise BadInput(
            f"{where}: top_indices has {len(rows)} tokens{said}: record the step again, or remove it"
        )
    for token, row in enumerate(rows):
        if len(row) != config.routed.top_k:
            raise other_top_k(f"{where}, token {token}", len(row), config)
    return sorted_choices(np.array(rows, np.int32), config, partial("{}, token {}".format, where))


def _stacked(where: str, done: _Pass, first: int, config: ModelConfig) -> Integers:
    """Return the expert ids of the forward pass `done` for all layers of the model (tokens, layers, top_k).

    Args:
        where: name of the file, for error messages.
        first: the trace's number for the model's first layer with experts.

    Raises:
        BadInput: layers are missing or unknown, or have different numbers of tokens.
    """
    routed = routed_layers(config)
    expected = [first - routed[0] + layer for layer in routed]
    named = f"step {done.step} of rank {done.rank}"
    tokens = len(next(iter(done.layers.values())).chosen_Tk)
    for layer, (line, chosen_Tk) in done.layers.items():
        if layer not in expected:
            raise BadInput(
                f"{where}:{line}: {named} has a layer {layer}, but {config.name} has {len(routed)} layers, here "
                f"{first} to {expected[-1]}: give a trace of that model"
            )
        if len(chosen_Tk) != tokens:
            raise BadInput(
                f"{where}:{line}: layer {layer} of {named} has {len(chosen_Tk)} tokens, but its first layer has "
                f"{tokens}: record the step again, or remove it"
            )
    missing = [layer for layer in expected if layer not in done.layers]
    if missing:
        raise BadInput(
            f"{where}:{done.line}: {named}, which begins in this line, lacks layer {missing[0]}, one of the "
            f"{len(routed)} of {config.name}: if the file was cut off, remove the step; else give a trace of that "
            "model"
        )
    return with_all_layers(np.stack([done.layers[layer].chosen_Tk for layer in expected], axis=1), config)
