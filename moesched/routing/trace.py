"""Routing traces: the experts of every token of a real run in every layer, and their .npz format.

The file is compressed by numpy (`numpy.load` reads it) and has these arrays:

    chosen          (tokens, layers, top_k), uint8 or uint16: expert ids, ascending; tokens in order of request and
                    position
    request_tokens  (requests,), int64: tokens of each request
    prompt_tokens   (requests,), int64: tokens of each prompt, which are step 0; each later token is a step
    experts         (), int64: experts in a layer
    model           (), text: name of the model
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.choices import Integers
from moesched.routing.profile import RoutingProfile, require_shape
from moesched.system.input_file import open_input
from moesched.system.whole_file import whole_file

ARRAYS = {"chosen": 3, "request_tokens": 1, "prompt_tokens": 1, "experts": 0, "model": 0}
"""Dimensions of each array in the file."""
MOST_BYTES = 400_000_000
"""Limit of all arrays: 1.5 million tokens of a model with 32 layers and 8 experts per token."""

# Those of zipfile, zlib and numpy's headers, which are Python expressions.
_UNREADABLE = (
    *(OSError, EOFError, LookupError, ValueError, TypeError, AttributeError, SyntaxError, MemoryError),
    *(RecursionError, NotImplementedError, OverflowError, struct.error, zipfile.BadZipFile, zlib.error),
)


class RoutingTrace(NamedTuple):
    """Expert choices of each token; the fields are described above."""

    model: str
    experts: int
    chosen: Integers
    request_tokens: Integers
    prompt_tokens: Integers

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts and top_k of the model."""
        _, layers, top_k = self.chosen.shape
        return layers, self.experts, top_k

    def profile(self) -> RoutingProfile:
        """Count the choices."""
        layers, experts, top_k = self.shape
        counts = [np.bincount(self.chosen[:, i].ravel(), minlength=experts).tolist() for i in range(layers)]
        return RoutingProfile(
            model=self.model,
            layers=layers,
            experts=experts,
            top_k=top_k,
            tokens=len(self.chosen),
            counts=tuple(map(tuple, counts)),
        )


class RecordedChoices:
    """Choices of a trace, repeated for requests and positions beyond its end."""

    def __init__(self, trace: RoutingTrace) -> None:
        self.experts = trace.experts
        self._chosen = trace.chosen
        self._lengths = trace.request_tokens
        self._starts = np.cumsum(trace.request_tokens) - trace.request_tokens

    def of_tokens(self, layer: int, requests_T: Integers, positions_T: Integers) -> Integers:
        """Return the experts (T, k), ascending, of the tokens at these positions of these requests."""
        recorded_T = requests_T % len(self._lengths)
        rows_T = self._starts[recorded_T] + positions_T % self._lengths[recorded_T]
        experts_Tk: Integers = self._chosen[rows_T, layer]
        return experts_Tk


def write_routing_trace(trace: RoutingTrace, path: Path | str) -> None:
    """Write a trace; its name should end in .npz, by which `find_choices` recognises it.

    Raises:
        BadInput: the file cannot be written.
    """
    written = BytesIO()
    np.savez_compressed(written, **trace._asdict())
    with whole_file(Path(path), "routing trace") as file:
        file.write(written.getvalue())


def read_routing_trace(path: Path | str, config: ModelConfig | None = None) -> RoutingTrace:
    """Read a trace.

    Args:
        config: the model that the trace is used for; None accepts any.

    Raises:
        BadInput: the file cannot be read, is not a routing trace, or is of a model of another shape.
    """
    path = Path(path)
    with open_input(path, "routing trace", remedy="name an .npz file") as stream:
        arrays = _arrays(path, stream)
    _check(path, arrays)
    trace = RoutingTrace(
        str(arrays["model"]),
        int(arrays["experts"]),
        arrays["chosen"],
        arrays["request_tokens"],
        arrays["prompt_tokens"],
    )
    if config is not None:
        require_shape(str(path), trace.model, trace.shape, config)
    return trace


def _arrays(path: Path, stream: FileIO) -> dict[str, Any]:
    try:
        with np.load(stream, allow_pickle=False) as file:
            nbytes = sum(entry.file_size for entry in file.zip.infolist())
            if nbytes > MOST_BYTES:
                raise _damaged(path, f"it unpacks to {nbytes:,} bytes, and may have {MOST_BYTES:,}")
            return {name: file[name] for name in ARRAYS}
    except _UNREADABLE as error:
        raise BadInput(f"{path} is not a routing trace; make one with `moesched profile-routing`") from error


def _check(path: Path, arrays: dict[str, Any]) -> None:
    """Check the arrays, so that no index is out of range later."""
    for name, dimensions in ARRAYS.items():
        kind = "U" if name == "model" else "iu"
        if arrays[name].ndim != dimensions or arrays[name].dtype.kind not in kind:
            raise _damaged(path, f"{name} has shape {arrays[name].shape} of {arrays[name].dtype}")
    chosen, lengths, prompts = arrays["chosen"], arrays["request_tokens"], arrays["prompt_tokens"]
    if not chosen.size or chosen.min() < 0 or chosen.max() >= arrays["experts"]:
        raise _damaged(path, f"it has no tokens, or an expert above the {arrays['experts']} of a layer")
    if lengths.shape != prompts.shape or (lengths < 1).any() or lengths.sum() != len(chosen):
        raise _damaged(path, f"its requests do not add up to its {len(chosen)} tokens")


def _damaged(path: Path, what: str) -> BadInput:
    return BadInput(f"{path} is damaged: {what}: make it again with `moesched profile-routing`")
