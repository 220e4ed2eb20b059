"""Finds the scenario of a simulation by names: model, machine, requests and expert choices."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.inputs.lookup import changed_machine, find_shape, find_workload
from moesched.jobs.options import ScenarioOptions
from moesched.machines import Machine
from moesched.machines.networks import Network, load_network, network_names
from moesched.models.config import ModelConfig
from moesched.requests.workloads import Workload
from moesched.routing.choices import ExpertChoices
from moesched.routing.sources import find_choices


class Scenario(NamedTuple):
    """A simulation's inputs.

    Attributes:
        machine: the machine, with the network that connects several of them.
        workload: None if none was given.
        choices: source of the experts that each token chooses; None for uniform routing.
    """

    config: ModelConfig
    machine: Machine
    workload: Workload | None
    choices: ExpertChoices | None

    def given_workload(self) -> Workload:
        """Return the scenario's workload.

        Raises:
            BadInput: none was given.
        """
        if self.workload is None:
            raise BadInput("no workload: give --workload, a name of `moesched list workloads` or a file")
        return self.workload


def find_scenario(given: ScenarioOptions) -> Scenario:
    """Find the model, machine, workload and routing that the options of a simulation name.

    Raises:
        BadInput: a name is unknown, or a file cannot be used.
    """
    config = find_shape(given.model, given.format)
    choices = find_choices(given.routing, config, given.routing_settings, given.seed)
    workload = given.workload
    if workload is not None and not isinstance(workload, Workload):
        workload = find_workload(workload, given.model, config)
    machine = with_network(changed_machine(given.machine, given.machine_set), given.nodes, given.network)
    return Scenario(config, machine, workload, choices)


def with_network(machine: Machine, nodes: int | None, network: Network | str | None) -> Machine:
    """Return the machine with the network that connects `nodes` such machines; `nodes` is None for one machine.

    Raises:
        BadInput: the network is unknown, several nodes have no network, or a network is given without nodes.
    """
    if network is None:
        if (nodes or 1) > 1 and machine.network is None:
            raise BadInput(
                f"--nodes is {nodes}, and nothing joins machine {machine.name} to others: give --network, one of "
                + ", ".join(network_names())
            )
        return machine
    if nodes is None:
        raise BadInput("--network joins several nodes: say how many with --nodes")
    return replace(machine, network=network if isinstance(network, Network) else load_network(network))
