"""A token on two Macs: the expectation of docs/mlx.md beside `simulate`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from moesched.machines import load_machine
from moesched.machines.changes import changed
from moesched.machines.networks import load_network
from moesched.reproduce.mac_cluster.paper import mac_paper
from moesched.reproduce.mac_cluster.runs import run_request

PAGE = Path(__file__).parents[1] / "docs" / "mlx.md"
LAYERS = 40
PAPER_MS = 166
CLOSE = 0.01
"""Relative difference that rounding and small changes of the cost model make."""


def table() -> dict[str, tuple[float, float, float]]:
    """The lowest and the highest expected milliseconds of each part, and those of `simulate` as printed."""
    rows = re.findall(r"^\| ([^|]+) \| (\d+)–(\d+) \| [^|]+ \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {part.strip("* "): (float(low), float(high), float(said)) for part, low, high, said in rows}


def simulated(tmp_path: Path) -> dict[str, float]:
    """Milliseconds of each part, by the assumptions that the page gives."""
    page = PAGE.read_text()
    [change] = re.findall(r"--machine-set (\S+)", page)
    [network] = re.findall(r"`zeromq-10gbe\.toml`:\n\n```toml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "network.toml"
    file.write_text(network)
    mac = replace(changed(load_machine("m2-ultra"), [change]), network=load_network(str(file)))
    token = run_request(mac, mac_paper(), "ep_router_aided", {}, nodes=2, prompt=128, new_tokens=16).token
    waits = LAYERS * mac.accelerator.handover_seconds
    seconds = {
        "experts": token.moe,
        "attention, router, norms": token.misc - waits,
        "embedding and head": token.ends,
        "evaluations and Python": waits,
        "exchanges": token.comm,
        "a token": token.total,
    }
    return {part: 1000 * each for part, each in seconds.items()}


def test_the_page_and_simulate_agree_on_each_part_of_a_token(tmp_path: Path) -> None:
    page, ours = table(), simulated(tmp_path)
    assert page.keys() == ours.keys()
    for part, (low, high, said) in page.items():
        assert ours[part] == pytest.approx(said, rel=CLOSE), part
        assert low <= said <= high, part
    *parts, total = page.values()
    assert sum(low for low, _, _ in parts) == total[0]
    assert sum(high for _, high, _ in parts) == total[1]
    assert total[0] <= PAPER_MS <= total[1]
