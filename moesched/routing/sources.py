"""Sources of routing by name: a profile (.csv), a trace (.npz), or a seeded generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.choices import ExpertChoices
from moesched.routing.generated import GeneratedChoices
from moesched.routing.popularity import GENERATORS, Counted, Popularity, expected_profile
from moesched.routing.profile import RoutingProfile, read_profile
from moesched.routing.trace import RecordedChoices, RoutingTrace, read_routing_trace
from moesched.settings import check_settings

GENERATED_TOKENS = 1_000_000
"""Tokens in the profile of a generator."""


def find_choices(
    name: str | None, config: ModelConfig, settings: Mapping[str, Any] | None = None, seed: int = 0
) -> ExpertChoices | None:
    """Find expert choices by the name of a generator or file; None if no name is given.

    Raises:
        BadInput: the name or a setting is unknown, or the file is invalid or of another model.
    """
    if name is None:
        if settings:
            raise BadInput(f"--routing-set {next(iter(settings))} is given without a routing: add --routing")
        return None
    found = _find(name, config, settings or {})
    if isinstance(found, RoutingTrace):
        return RecordedChoices(found)
    return GeneratedChoices(found, config, seed)


def find_profile(
    name: str, config: ModelConfig, settings: Mapping[str, Any] | None = None, seed: int = 0
) -> RoutingProfile:
    """Find a profile by the name of a generator or file; for generators, the expected counts.

    Raises:
        BadInput: as for `find_choices`.
    """
    found = _find(name, config, settings or {})
    if isinstance(found, RoutingTrace):
        return found.profile()
    if isinstance(found, Counted):
        return found.profile
    return expected_profile(found, config, seed, GENERATED_TOKENS)


def _find(name: str, config: ModelConfig, settings: Mapping[str, Any]) -> Popularity | RoutingTrace:
    if name.endswith(".npz"):
        if settings:
            raise BadInput(f"routing {name} is a trace, which takes no settings: omit --routing-set")
        return read_routing_trace(name, config)
    if name.endswith(".csv"):
        profile = read_profile(name, config)
        return Counted(profile, **check_settings(Counted, f"routing {name}", settings))
    if name not in GENERATORS:
        known = ", ".join(GENERATORS)
        raise BadInput(f"no routing {name!r}: name a .csv or .npz file, or one of {known}")
    generator = GENERATORS[name]
    return generator(**check_settings(generator, f"routing {name}", settings))
