"""Sources of routing: a profile or a trace, given as an object or as a file, or a seeded generator by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.checks import layers_without_experts
from moesched.routing.choices import ExpertChoices
from moesched.routing.files import read_routing_file
from moesched.routing.generated import GeneratedChoices
from moesched.routing.popularity import GENERATORS, CountedPopularity, Popularity, expected_profile
from moesched.routing.profile import RoutingProfile, require_shape
from moesched.routing.trace import RecordedChoices, RoutingTrace
from moesched.settings import check_settings
from moesched.system.input_file import is_file
from moesched.system.near_names import with_nearest
from moesched.system.plain_text import shown

GENERATED_TOKENS = 1_000_000
"""Number of tokens for which a generator's profile states expected counts."""


RoutingGiven = str | RoutingTrace | RoutingProfile
"""A routing as users give it: the name of a generator or of a file, or the content of a file."""


def find_choices(
    given: RoutingGiven | None, config: ModelConfig, settings: Mapping[str, Any] | None = None, seed: int = 0
) -> ExpertChoices | None:
    """Make the source of expert choices from the routing that a user gave; None if the user gave none.

    Args:
        given: name of a generator, path of a file, or a profile or trace; None if the user gave none.
        settings: parameters of the generator or profile, by name.
        seed: seed of random choices.

    Raises:
        BadInput: the name or a setting is unknown, settings come without a routing, or the file is invalid or of
            another model.
    """
    if given is None:
        if settings:
            raise BadInput(f"--routing-set {next(iter(settings))} is given without a routing: add --routing")
        return None
    return choices_of(find_source(given, config, settings or {}), config, seed)


def choices_of(source: Popularity | RoutingTrace, config: ModelConfig, seed: int) -> ExpertChoices:
    """Make expert choices for a simulation: a trace's recorded choices, or random choices by popularity."""
    if isinstance(source, RoutingTrace):
        return RecordedChoices(source)
    return GeneratedChoices(source, config, seed)


def find_profile(name: str, config: ModelConfig, seed: int = 0) -> RoutingProfile:
    """Make the routing profile of a generator with its default settings, or of a file.

    Args:
        name: name of the generator, or path of the file.
        seed: seed of the generator.

    Raises:
        BadInput: as for `find_choices`.
    """
    return profile_of(find_source(name, config, {}), config, seed)


def profile_of(source: Popularity | RoutingTrace, config: ModelConfig, seed: int) -> RoutingProfile:
    """Make the profile of a source: the counts of a profile or trace, or the expected counts of a generator."""
    if isinstance(source, RoutingTrace):
        return source.profile(layers_without_experts(config))
    if isinstance(source, CountedPopularity):
        return source.profile
    return expected_profile(source, config, seed, GENERATED_TOKENS)


def find_source(
    given: RoutingGiven, config: ModelConfig, settings: Mapping[str, Any]
) -> Popularity | RoutingTrace:
    """Return the source that a user gave: a generator with its settings, a profile with its settings, or a trace.

    Args:
        given: name of a generator, path of a file to read, or a profile or trace, which must fit the model.
        settings: parameters of the generator or profile, by name; a trace takes none.

    Raises:
        BadInput: as for `find_choices`.
    """
    if isinstance(given, str):
        if given in GENERATORS:
            generator = GENERATORS[given]
            return generator(**check_settings(generator, f"routing {given}", settings))
        if given.isidentifier() and not is_file(Path(given)):
            remedy = with_nearest(given, GENERATORS, f"name a file, or one of {', '.join(GENERATORS)}")
            raise BadInput(f"no routing {shown(given)}: {remedy}")
        return _with_settings(read_routing_file(Path(given), config), f"routing {given}", settings)
    if isinstance(given, RoutingTrace):
        require_shape("the routing trace", given.model, given.shape, config)
    elif isinstance(given, RoutingProfile):
        shape = (given.layers, given.experts, given.top_k)
        require_shape("the routing profile", given.model, shape, config)
    else:
        raise BadInput(f"routing is {shown(given)}: give a name, a file, a RoutingTrace or a RoutingProfile")
    return _with_settings(given, "the routing", settings)


def _with_settings(
    found: RoutingTrace | RoutingProfile, title: str, settings: Mapping[str, Any]
) -> Popularity | RoutingTrace:
    if isinstance(found, RoutingProfile):
        return CountedPopularity(found, **check_settings(CountedPopularity, title, settings))
    if settings:
        raise BadInput(f"{title} is a trace, which takes no settings: omit --routing-set")
    return found
