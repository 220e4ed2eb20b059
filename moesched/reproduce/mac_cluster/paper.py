"""Printed figures of the Apple silicon cluster paper, read from the TOML file beside this module."""

from __future__ import annotations

import msgspec

from moesched.reproduce.printed import PrintedPaper, read_paper

PARTS = ("moe", "comm", "misc")


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of an exchange: in centralised versions; in others between two nodes, and more for each further node."""

    centralised: float
    decentralised: float
    each_further_node: float


class PrintedSystem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of Tables 3 and 4, and how we run it.

    Attributes:
        seconds, moe, comm, misc: seconds per token, and its parts.
        prestacked, standby: how weights are packed and kept wired (see `WiredMemory` in `moesched.machines`).
        fitted: the cells to which a rate was fitted.
    """

    tables: list[str]
    method: str
    nodes: int
    policy: str
    tokens_per_second: float
    seconds: float
    moe: float
    comm: float
    misc: float
    prompt_tokens_per_second: float
    fitted: list[str]
    settings: dict[str, bool] = {}
    prestacked: bool = True
    standby: bool = True

    @property
    def centralised(self) -> bool:
        """True if attention is on the first node only."""
        return not self.settings.get("decentralised", True)


class Solution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of Table 5; the price is of one node."""

    name: str
    nodes: int
    price_usd: float
    tokens_per_second: float
    per_usd: float


class Calibrated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rate that was fitted to the paper: its name, a format of its value, and the figure that sets it."""

    rate: str
    value: str
    set_by: str


class MacPaper(PrintedPaper, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reproduced figures of the paper."""

    model: str
    machine: str
    network: str
    prompt: int
    new_tokens: int
    latency: Latency
    calibration: list[Calibrated]
    systems: list[PrintedSystem]
    solutions: list[Solution]
    table_6: dict[str, list[str]]


def mac_paper() -> MacPaper:
    """Read the paper's Tables 3 to 6, the prompts' rates, and the latencies of the cluster's exchanges."""
    return read_paper(MacPaper, __package__)
