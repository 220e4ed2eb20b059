"""Figures that Twiddler prints or its authors published, read from the TOML file beside this module."""

from __future__ import annotations

import msgspec

from moesched.reproduce.printed import PrintedPaper, read_paper


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An environment of Table 1.

    Attributes:
        machine: name of our profile.
        experts: number of experts that Twiddler keeps on the GPU.
        offload_per_layer: setting of Mixtral-Offloading.
        gpu_layers: setting of llama.cpp (ngl).
    """

    name: str
    machine: str
    experts: int
    offload_per_layer: int
    gpu_layers: int


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes that were measured, in tokens: of generation, of long prefill, of beam search."""

    inputs: list[int]
    outputs: list[int]
    prefills: list[int]
    widths: list[int]
    beam_input: int
    beam_output: int


class HostRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of an expert on the CPU for each token."""

    seconds_per_token: float
    source: str


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements of a system by the authors.

    Attributes:
        seconds: seconds to the first token, by prompt length in tokens.
        step_seconds: seconds of a decode step after a prompt of 32 tokens.
    """

    environment: str
    policy: str
    seconds: dict[str, float]
    step_seconds: float
    source: str


class TwiddlerPaper(PrintedPaper, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reproduced figures of the paper."""

    model: str
    routing: str
    environments: list[Environment]
    grid: Grid
    cpu: HostRate
    measured: list[Measured]


def twiddler_paper() -> TwiddlerPaper:
    """Read Table 1, the grid, the claims of the text, and the authors' raw measurements."""
    return read_paper(TwiddlerPaper, __package__)
