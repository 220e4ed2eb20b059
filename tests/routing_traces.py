"""The same routing trace in every format that moesched reads, and the reading of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.choices import Integers
from moesched.routing.files import read_routing_file
from moesched.routing.trace import RoutingTrace, write_routing_trace
from small_models import SMALL

MODEL = SMALL.varied(layers=2)


def routed(lengths: Sequence[int], *, layers: int, experts: int, top_k: int, seed: int = 0) -> RoutingTrace:
    """A trace of requests of these lengths, whose last token alone was generated."""
    random = np.random.default_rng(seed)
    order = random.permuted(np.broadcast_to(np.arange(experts), (sum(lengths), layers, experts)), axis=-1)
    chosen = np.sort(order[..., :top_k], axis=-1).astype(np.uint8)
    return RoutingTrace("small", experts, chosen, np.array(lengths), np.array(lengths) - 1)


def requests_of(trace: RoutingTrace) -> list[Integers]:
    """The choices (tokens, layers, top_k) of each request."""
    return np.split(trace.chosen, np.cumsum(trace.request_tokens)[:-1])


def write_own(trace: RoutingTrace, folder: Path) -> Path:
    write_routing_trace(trace, folder / "routing.npz")
    return folder / "routing.npz"


def write_npy(trace: RoutingTrace, folder: Path) -> Path:
    """All tokens as one request."""
    np.save(folder / "request.npy", trace.chosen[..., ::-1].astype(np.int16))
    return folder / "request.npy"


def write_npz(trace: RoutingTrace, folder: Path) -> Path:
    np.savez(folder / "requests.npz", *(each[..., ::-1].astype(np.int16) for each in requests_of(trace)))
    return folder / "requests.npz"


def write_megatron(trace: RoutingTrace, folder: Path) -> Path:
    return write_records(records_of(trace), folder)


def write_records(records: Iterable[object], folder: Path) -> Path:
    file = folder / "router_trace_rank0.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def records_of(trace: RoutingTrace) -> list[dict[str, Any]]:
    """Megatron's records: one pass for each prompt and each generated token."""
    passes = [
        chosen
        for request, prompt in zip(requests_of(trace), trace.prompt_tokens, strict=True)
        for chosen in np.split(request, np.arange(prompt, len(request)))
    ]
    return [
        {
            "step": step,
            "stage": "pre_dispatch",
            "block": "decoder",
            "layer": layer,
            "rank": 0,
            "num_tokens": len(chosen),
            "topk": chosen.shape[2],
            "top_indices": chosen[:, layer].tolist(),
        }
        for step, chosen in enumerate(passes)
        for layer in range(chosen.shape[1])
    ]


def write_rows(trace: RoutingTrace, folder: Path) -> Path:
    """Rows layer by layer."""
    rows = [
        f"{request},{layer},{token},{' '.join(map(str, chosen[token, layer]))}\n"
        for layer in range(trace.chosen.shape[1])
        for request, chosen in enumerate(requests_of(trace))
        for token in range(len(chosen))
    ]
    (folder / "routing.csv").write_text("request,layer,token,experts\n" + "".join(rows))
    return folder / "routing.csv"


def read_trace(file: Path, config: ModelConfig = MODEL) -> RoutingTrace:
    """The trace in a file."""
    found = read_routing_file(file, config)
    assert isinstance(found, RoutingTrace)
    return found


def refusal(file: Path, config: ModelConfig = MODEL) -> str:
    """The one line by which a file is refused."""
    with pytest.raises(BadInput) as error:
        read_routing_file(file, config)
    said = str(error.value)
    assert said.startswith(str(file))
    assert "\n" not in said
    assert len(said) < 500 + len(str(file))
    return said.removeprefix(str(file))
