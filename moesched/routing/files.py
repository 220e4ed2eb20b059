"""Reads profiles and traces of expert choices from files; the beginning of a file's content tells its format."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.arrays import NPY_MAGIC, NPZ_MAGIC
from moesched.routing.megatron import parse_megatron_trace
from moesched.routing.numpy_traces import parse_npy, parse_npz
from moesched.routing.profile import HEADER, RoutingProfile, parse_profile
from moesched.routing.token_rows import HEADERS, parse_token_rows
from moesched.routing.trace import RoutingTrace
from moesched.system.input_file import read_input
from moesched.system.plain_text import shown

MOST_BYTES = 200_000_000
KINDS = (
    "give what `moesched profile-routing` writes, vLLM's routed experts (.npy, .npz), Megatron's router trace (.jsonl) "
    "or a CSV with the header layer,token,experts or layer,expert,count"
)


def read_routing_file(path: Path | str, config: ModelConfig) -> RoutingProfile | RoutingTrace:
    """Read a profile, or a trace of moesched or of another tool.

    Args:
        config: the model that the file is used for.

    Raises:
        BadInput: the file cannot be read, is neither profile nor trace, is broken (the message names the place), or is
            of another model.
    """
    path = Path(path)
    data = read_input(path, "routing", MOST_BYTES, remedy="check its path")
    first = _first_line(data)
    if first.replace(b" ", b"") == HEADER.encode():
        return parse_profile(path, data, config)
    parse = _parser_of_trace(data, first)
    if parse is None:
        begins = shown(first[:200].decode(errors="replace"))
        raise BadInput(f"{path} is not a profile or trace of routing, as it begins with {begins}: {KINDS}")
    return parse(str(path), data, config)


def _parser_of_trace(data: bytes, first: bytes) -> Callable[[str, bytes, ModelConfig], RoutingTrace] | None:
    if data.startswith(NPZ_MAGIC):
        return parse_npz
    if data.startswith(NPY_MAGIC):
        return parse_npy
    if first.startswith(b"{"):
        return parse_megatron_trace
    return parse_token_rows if first.replace(b" ", b"") in HEADERS else None


def _first_line(data: bytes) -> bytes:
    """Return the first line that is neither blank nor a comment."""
    lines = (line.strip() for line in BytesIO(data))
    return next((line for line in lines if line and not line.startswith(b"#")), b"")
