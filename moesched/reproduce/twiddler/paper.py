"""Figures that the Twiddler paper prints or its authors published, read from the TOML file beside this module."""

from __future__ import annotations

import msgspec

from moesched.reproduce.printed import PrintedPaper, read_paper


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An environment of Table 1: a machine, and the settings of each system on it.

    Attributes:
        machine: name of our machine profile.
        experts: number of experts, over all layers, that Twiddler keeps on the GPU.
        offload_per_layer: Mixtral-Offloading's setting: experts of each layer that are not on the GPU.
        gpu_layers: llama.cpp's setting `ngl`: number of layers on the GPU.
    """

    name: str
    machine: str
    experts: int
    offload_per_layer: int
    gpu_layers: int


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of tokens and beams for which the paper has measurements.

    Attributes:
        inputs, outputs: prompt tokens and generated tokens, in Fig. 4.
        prefills: prompt tokens, in Fig. 5.
        widths: numbers of beams, in Fig. 6.
        beam_input, beam_output: prompt tokens and generated tokens, in Fig. 6.
    """

    inputs: list[int]
    outputs: list[int]
    prefills: list[int]
    widths: list[int]
    beam_input: int
    beam_output: int


class HostRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time that an expert takes on the CPU, in seconds per token, and the source of this figure."""

    seconds_per_token: float
    source: str


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The authors' measurements of one system in one environment.

    Attributes:
        policy: name of our policy that simulates the system.
        seconds: seconds to the first token, by prompt length in tokens.
        step_seconds: seconds of a decode step after a prompt of 32 tokens.
        source: text for the report that names the authors' file with the measurements.
    """

    environment: str
    policy: str
    seconds: dict[str, float]
    step_seconds: float
    source: str


class TwiddlerPaper(PrintedPaper, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paper's printed figures that we reproduce, and our names for its model and routing profile."""

    model: str
    routing: str
    environments: list[Environment]
    grid: Grid
    cpu: HostRate
    measured: list[Measured]


def twiddler_paper() -> TwiddlerPaper:
    """Read the paper's Table 1 and claims, the numbers of tokens and beams in its figures, and raw measurements."""
    return read_paper(TwiddlerPaper, __package__)
