"""Sources of routing by name: a file with a profile or a trace, or a seeded generator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.choices import ExpertChoices
from moesched.routing.files import read_routing_file
from moesched.routing.generated import GeneratedChoices
from moesched.routing.popularity import GENERATORS, Counted, Popularity, expected_profile
from moesched.routing.profile import RoutingProfile
from moesched.routing.trace import RecordedChoices, RoutingTrace
from moesched.settings import check_settings
from moesched.system.input_file import is_file
from moesched.system.near_names import with_nearest
from moesched.system.plain_text import shown

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
    return choices_of(find_source(name, config, settings or {}), config, seed)


def choices_of(source: Popularity | RoutingTrace, config: ModelConfig, seed: int) -> ExpertChoices:
    """The choices of a trace, or random ones by popularity."""
    if isinstance(source, RoutingTrace):
        return RecordedChoices(source)
    return GeneratedChoices(source, config, seed)


def find_profile(
    name: str, config: ModelConfig, settings: Mapping[str, Any] | None = None, seed: int = 0
) -> RoutingProfile:
    """Find a profile by the name of a generator or file; for generators, the expected counts.

    Raises:
        BadInput: as for `find_choices`.
    """
    return profile_of(find_source(name, config, settings or {}), config, seed)


def profile_of(source: Popularity | RoutingTrace, config: ModelConfig, seed: int) -> RoutingProfile:
    """The counts of a profile or trace; for generators, the expected counts."""
    if isinstance(source, RoutingTrace):
        return source.profile()
    if isinstance(source, Counted):
        return source.profile
    return expected_profile(source, config, seed, GENERATED_TOKENS)


def find_source(name: str, config: ModelConfig, settings: Mapping[str, Any]) -> Popularity | RoutingTrace:
    """Find a generator, or read a file.

    Raises:
        BadInput: as for `find_choices`.
    """
    if name in GENERATORS:
        generator = GENERATORS[name]
        return generator(**check_settings(generator, f"routing {name}", settings))
    if name.isidentifier() and not is_file(Path(name)):
        remedy = with_nearest(name, GENERATORS, f"name a file, or one of {', '.join(GENERATORS)}")
        raise BadInput(f"no routing {shown(name)}: {remedy}")
    found = read_routing_file(Path(name), config)
    if isinstance(found, RoutingProfile):
        return Counted(found, **check_settings(Counted, f"routing {name}", settings))
    if settings:
        raise BadInput(f"routing {name} is a trace, which takes no settings: omit --routing-set")
    return found
