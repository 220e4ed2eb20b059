"""Networks between nodes: the profiles that ship, those that are refused, and what an exchange costs."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from moesched.errors import BadInput
from moesched.machines import load_machine, parse_machine
from moesched.machines.networks import NETWORK, Network, load_network, network_names
from moesched.machines.roofline import Roofline
from moesched.machines.sustained import at_peak
from moesched.machines.toml_text import machine_toml
from moesched.tasks import Work


def test_the_networks_of_the_cluster_paper_ship() -> None:
    figures = {name: load_network(name) for name in network_names()}
    assert {
        name: (each.latency_seconds, each.bandwidth, each.price_usd) for name, each in figures.items()
    } == {
        "10gbe": (1e-3, 1.25e9, 0),
        "rocev2": (750e-9, 3.125e9, 339),
        "infiniband": (600e-9, 25e9, 1267),
    }


@pytest.mark.parametrize("name", network_names())
def test_every_figure_of_a_network_states_its_source(name: str) -> None:
    text = (resources.files("moesched.machines.networks") / f"{name}.toml").read_text()
    blocks = [block for block in text.split("\n\n") if re.search(r"^\w+ = [0-9]", block, re.MULTILINE)]
    assert blocks
    assert all(re.search(r"table \d|footnote \d", block, re.IGNORECASE) for block in blocks)


def test_a_network_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nlatency_seconds = 2e-6\nbandwidth = 1e9\n')
    assert load_network(str(file)) == Network(name="mine", latency_seconds=2e-6, bandwidth=1e9)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "missing required field `name`"),
        ('name = "x"\nlatency_seconds = 0\nbandwidth = 0\n', "bandwidth: Expected `float` >= 1"),
        ('name = "x"\nlatency_seconds = -1\nbandwidth = 1\n', "latency_seconds: Expected `float` >= 0"),
        ('name = "x"\nlatency_seconds = 0\nbandwidth = 1\nduplex = 1\n', "unknown field `duplex`"),
        ("name =", "not a network"),
    ],
)
def test_a_broken_network_is_refused_with_its_file_and_key(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=f"broken.toml: .*{re.escape(why)}"):
        load_network(str(file))


def test_an_unknown_network_is_told_with_those_there_are() -> None:
    with pytest.raises(BadInput, match="no network 'ethernet': name a TOML file or one of 10gbe, "):
        load_network("ethernet")


def test_an_exchange_costs_latency_and_its_bytes() -> None:
    machine = msgspec.structs.replace(at_peak(load_machine("m2-ultra")), network=load_network("10gbe"))
    demand = Roofline(machine, "bfloat16").work(Work("all_reduce", NETWORK, nbytes=1.25e6))
    assert demand.seconds == pytest.approx(2e-3)
    assert dict(demand.shares) == {NETWORK: 0.5}


def test_a_machine_without_a_network_has_no_cost_for_an_exchange() -> None:
    with pytest.raises(BadInput, match="machine m2-ultra has no cost for all_reduce on 'network'"):
        Roofline(at_peak(load_machine("m2-ultra")), "bfloat16").work(Work("all_reduce", NETWORK, nbytes=1))


def test_a_machine_is_written_with_its_network_and_its_price() -> None:
    machine = msgspec.structs.replace(at_peak(load_machine("m2-ultra")), network=load_network("rocev2"))
    assert parse_machine(machine_toml(machine).encode(), "written") == machine
    assert machine.price_usd == 6599
