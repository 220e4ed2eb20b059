"""Loads the models, machines, workloads and routings that a sweep's simulations name, and makes simulations' keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from moesched.errors import BadInput
from moesched.inputs.budgets import PROCESS
from moesched.inputs.lookup import changed_machine, find_policy, find_shape, find_workload
from moesched.jobs.options import SimulationOptions
from moesched.jobs.scenario import Scenario, with_network
from moesched.machines import PINNED, Machine
from moesched.models.config import ModelConfig
from moesched.requests.workloads import Workload
from moesched.routing.popularity import Popularity
from moesched.routing.sources import choices_of, find_source
from moesched.routing.trace import RoutingTrace
from moesched.seams import Policy
from moesched.settings import check_settings, require_defaults
from moesched.sweeps.code_version import code_version, policy_version
from moesched.sweeps.points import Inputs, canonical
from moesched.system.input_file import is_file
from moesched.units import parse_bytes

Name = tuple[Any, ...]
"""The inputs of a point that determine one of its objects, such as its machine."""

_KEY_DIGITS = 32


class SweepObjects(msgspec.Struct):
    """The objects that a sweep's simulations name, each loaded once; worker processes get a copy.

    Attributes:
        code: the version of the package's code, as `code_version` gives it.
        policies: the version of each policy's code, by the policy's name.
        configs, machines, workloads, sources: models, machines, workloads and sources of routing. The key of each is a
            tuple of the inputs that determine it. A source is None for simulations without routing.
    """

    code: str = ""
    policies: dict[str, str] = {}
    configs: dict[Name, ModelConfig] = {}
    machines: dict[Name, Machine] = {}
    workloads: dict[Name, Workload] = {}
    sources: dict[Name, Popularity | RoutingTrace | None] = {}

    def scenario(self, inputs: Inputs, given: SimulationOptions) -> Scenario:
        """Return the model, the machine, the workload and the expert choices of a simulation.

        Args:
            inputs: the simulation's inputs.
            given: the simulation's options, whose seed the expert choices use.
        """
        config = self.configs[_model(inputs)]
        source = self.sources[_routing(inputs)]
        choices = None if source is None else choices_of(source, config, given.seed)
        return Scenario(config, self.machines[_machine(inputs)], self.workloads[_workload(inputs)], choices)


class Finder:
    """Loads the objects that simulations of a sweep name, and makes the simulations' keys.

    Args:
        policies: names of the sweep's policies.

    Attributes:
        policies: the classes of these policies, by name.
        found: the objects found so far.
    """

    def __init__(self, policies: Iterable[str]) -> None:
        self.policies: dict[str, type[Policy]] = {name: find_policy(name) for name in policies}
        for name, policy in self.policies.items():
            require_defaults(policy, f"policy {name}")
        versions = {name: policy_version(policy) for name, policy in self.policies.items()}
        self.found = SweepObjects(code_version(), versions)
        self._digests: dict[Name, str] = {}

    def key(self, inputs: Inputs) -> str:
        """Return a simulation's key: a hash of its inputs, of the objects that these name, and of the code.

        The objects (model, machine, workload and routing) are loaded into `found` if they are not there yet.

        Raises:
            BadInput: a name is unknown, a file cannot be used, or a value is impossible.
        """
        found = self.found
        model, policy = _model(inputs), inputs["policy"]
        machine, workload, routing = _machine(inputs), _workload(inputs), _routing(inputs)
        if model not in found.configs:
            found.configs[model] = find_shape(*model)
        if machine not in found.machines:
            found.machines[machine] = _find_machine(inputs)
        if workload not in found.workloads:
            found.workloads[workload] = find_workload(
                inputs["workload"], inputs["model"], found.configs[model]
            )
        if routing not in found.sources:
            found.sources[routing] = _find_routing(inputs, found.configs[model])
        parts = (
            self._digest(("model", *model), lambda: found.configs[model]),
            self._digest(("machine", *machine), lambda: found.machines[machine]),
            self._digest(("workload", *workload), lambda: found.workloads[workload]),
            self._digest(("routing", *routing), lambda: _content_of(inputs.get("routing"))),
            self._digest(("settings", policy, _text(inputs, "settings")), lambda: self._checked(inputs)),
        )
        return hashlib.sha256(
            "\0".join([found.code, found.policies[policy], *parts]).encode() + canonical(inputs)
        ).hexdigest()[:_KEY_DIGITS]

    def require_budgets(self, names: Iterable[str]) -> None:
        """Require that each name of a budget is valid for at least one machine of the sweep.

        Valid are the names of the machine's memories, "pinned" if it has page-locked memory, and "process".

        Raises:
            BadInput: a name is valid for no machine.
        """
        known = {PROCESS: None}
        for machine in self.found.machines.values():
            known |= dict.fromkeys(machine.memories)
            known |= {PINNED: None} if machine.page_locked else {}
        for name in names:
            if name not in known:
                raise BadInput(
                    f"--budget names {name!r}, which no machine of the sweep has: use {', '.join(known)}"
                )

    def _digest(self, name: Name, content: Callable[[], Any]) -> str:
        """Return the hash of an object that simulations refer to by `name`; it is computed once for each name.

        Args:
            content: returns the object, which is encoded as JSON.
        """
        if name not in self._digests:
            encoded = msgspec.json.encode(content(), order="deterministic")
            self._digests[name] = hashlib.sha256(encoded).hexdigest()
        return self._digests[name]

    def _checked(self, inputs: Inputs) -> Any:
        """Return the settings of a simulation, checked against its policy's parameters."""
        name = inputs["policy"]
        return check_settings(self.policies[name], f"policy {name}", inputs.get("settings", {}))


def options_of(inputs: Inputs) -> SimulationOptions:
    """Make the options of a simulation from its inputs."""
    return SimulationOptions(band=False, **inputs)


def _model(inputs: Inputs) -> Name:
    return inputs["model"], inputs.get("format")


def _machine(inputs: Inputs) -> Name:
    return inputs["machine"], _text(inputs, "machine_set"), inputs.get("nodes"), inputs.get("network")


def _workload(inputs: Inputs) -> Name:
    of_prompts = inputs["workload"].endswith(".jsonl")
    return inputs["workload"], inputs["model"] if of_prompts else ""


def _routing(inputs: Inputs) -> Name:
    return inputs["model"], inputs.get("routing"), _text(inputs, "routing_settings")


def _text(inputs: Inputs, table: str) -> str:
    return canonical(inputs.get(table, {})).decode()


def _find_machine(inputs: Inputs) -> Machine:
    machine = changed_machine(inputs["machine"], inputs.get("machine_set"))
    return with_network(machine, inputs.get("nodes"), inputs.get("network"))


def _find_routing(inputs: Inputs, config: ModelConfig) -> Popularity | RoutingTrace | None:
    settings = inputs.get("routing_settings", {})
    if inputs.get("routing") is not None:
        return find_source(inputs["routing"], config, settings)
    if settings:
        raise BadInput(f"--routing-set {next(iter(settings))} is given without a routing: add --routing")
    return None


def _content_of(routing: str | None) -> str:
    """Return the hash of a routing file's content; empty for None and for the name of a generator."""
    if routing is None or not is_file(Path(routing)):
        return ""
    with Path(routing).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_sensible(inputs: Inputs) -> None:
    """Require that a simulation's inputs are within their bounds, and that its budgets can be read.

    Raises:
        BadInput: a value cannot be used.
    """
    options_of(inputs)
    for size in inputs.get("budgets", {}).values():
        parse_bytes(size)
