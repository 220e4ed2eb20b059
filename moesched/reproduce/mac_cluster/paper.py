"""Printed figures of the Apple silicon cluster paper, read from the TOML file beside this module."""

from __future__ import annotations

import msgspec

from moesched.reproduce.printed import PrintedPaper, read_paper

PARTS = ("moe", "comm", "misc")


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that one exchange between the nodes takes, without the time to transfer its bytes.

    Attributes:
        centralised: with attention on the first node only.
        decentralised: with attention on every node of a cluster of two.
        each_further_node: seconds to add to `decentralised` for each node beyond two.
    """

    centralised: float
    decentralised: float
    each_further_node: float


class PrintedSystem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of Tables 3 and 4: figures of one version of the authors' system, and the policy that we run for it.

    Attributes:
        tables: titles of the tables with this row.
        method: the paper's name for the version.
        policy: name of our policy, which gets `settings`.
        seconds: printed seconds per token.
        moe, comm, misc: the parts of `seconds`: for experts, for communication, and for the rest.
        fitted: names of the cells, such as "moe", to which a rate of the machine was fitted.
        prestacked: whether one array has an expert's weights of all layers, as in `moesched.machines.WiredMemory`.
        standby: whether weights are wired (pinned in memory) in advance, and stay wired until the request comes.
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
    """A row of Table 5: one way to run the model, with its throughput and price.

    Attributes:
        nodes: number of nodes.
        price_usd: price of one node, in dollars.
        per_usd: printed tokens per second for each dollar of all nodes.
    """

    name: str
    nodes: int
    price_usd: float
    tokens_per_second: float
    per_usd: float


class Calibrated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rate of the simulated machine that was fitted to the paper.

    Attributes:
        rate: the rate, in words.
        value: format string for its value, such as "{reading:.0f} GB/s".
        set_by: the printed figure to which the rate was fitted, in words.
    """

    rate: str
    value: str
    set_by: str


class MacPaper(PrintedPaper, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paper's printed figures that we reproduce, and our names for its model, machine and network.

    Attributes:
        prompt, new_tokens: numbers of tokens of the request in Tables 3 and 4.
        systems: rows of Tables 3 and 4.
        solutions: rows of Table 5.
        table_6: printed cells of Table 6, by number of nodes.
    """

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
    """Read the paper's Tables 3 to 6, prompt tokens per second, and the latencies of the cluster's exchanges."""
    return read_paper(MacPaper, __package__)
