"""Readers of routing traces in numpy's files: moesched's own .npz, and vLLM's expert choices in .npy or .npz.

vLLM, run with `enable_return_routed_experts`, gives each completion an integer array `routed_experts` (tokens, layers,
top_k), with zeros in layers without experts. In vLLM 0.21, by its documentation, a request has the prompt's rows in a
second array, `prompt_routed_experts`; in other versions, by their sources, `routed_experts` begins with these rows. The
last generated token passes no router and has no row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.arrays import Array, read_npy, read_npz
from moesched.routing.checks import ROWS_AT_ONCE, checked_layers, id_type, other_top_k, routed_layers
from moesched.routing.choices import Integers
from moesched.routing.profile import require_shape
from moesched.routing.trace import RoutingTrace
from moesched.system.plain_text import shown

OWN = {"chosen": 3, "request_tokens": 1, "prompt_tokens": 1, "experts": 0, "model": 0}
"""Number of dimensions of each array of moesched's trace."""
LONGEST_NAME = 100
SPLIT = {"prompt_routed_experts", "routed_experts"}
"""Names of two arrays that are one request together: its prompt and its generated tokens."""


def parse_npy(where: str, data: bytes, config: ModelConfig) -> RoutingTrace:
    """Parse `data`, an .npy file with vLLM's array of one request; errors name the file `where`.

    Raises:
        BadInput: the data is not such an array, or of another model.
    """
    return _of_requests([_request(where, read_npy(where, data), config)], [0], config)


def parse_npz(where: str, data: bytes, config: ModelConfig) -> RoutingTrace:
    """Parse an .npz file: moesched's trace, or arrays of vLLM, one for each request.

    A file with just the arrays `prompt_routed_experts` and `routed_experts` holds one request: prompt, then answer.

    Args:
        where: name of the file, for error messages.
        data: the whole content of the file.

    Raises:
        BadInput: the file has other arrays, or is of another model.
    """
    own: dict[str, Array] = {}
    requests: dict[str, Integers] = {}
    for name, array in read_npz(where, data):
        if name in OWN:
            own[name] = array
        else:
            requests[name] = _request(f"{where}, array {name!r}", array, config)
    if own and not requests:
        return _own(where, own, config)
    if own or not requests:
        raise BadInput(f"{where} is neither a trace of moesched nor arrays of vLLM: give one of them")
    if set(requests) == SPLIT:
        prompt, generated = requests["prompt_routed_experts"], requests["routed_experts"]
        return _of_requests([np.concatenate([prompt, generated])], [len(prompt)], config)
    return _of_requests(requests.values(), [0] * len(requests), config)


def _of_requests(requests: Iterable[Integers], prompt_tokens: list[int], config: ModelConfig) -> RoutingTrace:
    requests = list(requests)
    lengths = np.array(list(map(len, requests)), np.int64)
    chosen = requests[0] if len(requests) == 1 else np.concatenate(requests)
    return RoutingTrace(
        config.name, config.routed.experts, chosen, lengths, np.array(prompt_tokens, np.int64)
    )


def _request(where: str, array: Array, config: ModelConfig) -> Integers:
    """Return sorted expert ids (tokens, all layers, top_k) from vLLM's array of one request; errors name it `where`.

    Raises:
        BadInput: the array has another shape or type, or is of another model.
    """
    if array.ndim != 3 or array.dtype.kind == "U" or not len(array):
        raise BadInput(
            f"{where} has shape {array.shape} of {array.dtype.name}: give a trace, integers (tokens, layers, top_k)"
        )
    if array.shape[2] != config.routed.top_k:
        raise other_top_k(where, array.shape[2], config)
    return checked_layers(where, array, config)


def _own(where: str, arrays: dict[str, Array], config: ModelConfig) -> RoutingTrace:
    """Check the arrays (by name) of moesched's .npz file, and return them as a trace; errors name the file `where`.

    Raises:
        BadInput: an array is missing or damaged, or the trace is of another model.
    """
    for name, dimensions in OWN.items():
        kind = "U" if name == "model" else "iu"
        if name not in arrays:
            raise _damaged(where, f"it has no array {name}")
        if arrays[name].ndim != dimensions or arrays[name].dtype.kind not in kind:
            raise _damaged(where, f"{name} has shape {arrays[name].shape} of {arrays[name].dtype}")
    chosen, lengths, prompts = arrays["chosen"], arrays["request_tokens"], arrays["prompt_tokens"]
    model = " ".join(str(arrays["model"]).split())[:LONGEST_NAME]
    require_shape(where, model, (chosen.shape[1], int(arrays["experts"]), chosen.shape[2]), config)
    whole = lengths.shape == prompts.shape and ((lengths > 0) & (lengths <= len(chosen))).all()
    if not whole or not 0 < lengths.sum() == len(chosen):
        raise _damaged(where, f"its requests do not add up to its {len(chosen)} tokens")
    _require_ascending(where, chosen, config)
    return RoutingTrace(
        model,
        config.routed.experts,
        chosen.astype(id_type(config.routed.experts), copy=False),
        lengths.astype(np.int64),
        prompts.astype(np.int64),
    )


def _require_ascending(where: str, chosen: Integers, config: ModelConfig) -> None:
    """Check that each row of `chosen`, expert ids (tokens, layers, top_k), ascends and has only experts of the model.

    The check takes little memory beside the array. Layers without experts are not looked at.

    Raises:
        BadInput: a row does not ascend, or has a number that is no expert of the model; the message names `where`, and
            the row's token and layer.
    """
    routed = routed_layers(config)
    chosen_Nk = (chosen if len(routed) == config.layers else chosen[:, routed]).reshape(
        -1, config.routed.top_k
    )
    for start in range(0, len(chosen_Nk), ROWS_AT_ONCE):
        rows_Nk = chosen_Nk[start : start + ROWS_AT_ONCE]
        bad_N = (rows_Nk[:, 0] < 0) | (rows_Nk[:, -1] >= config.routed.experts)
        bad_N |= (rows_Nk[:, 1:] <= rows_Nk[:, :-1]).any(axis=1)
        if bad_N.any():
            row = int(bad_N.argmax())
            token, number = divmod(start + row, len(routed))
            raise _damaged(
                f"{where}, token {token}, layer {routed[number]}",
                f"{shown(rows_Nk[row].tolist())} are not ascending experts from 0 to {config.routed.experts - 1}",
            )


def _damaged(where: str, what: str) -> BadInput:
    return BadInput(f"{where} is damaged: {what}: make it again with `moesched profile-routing`")
