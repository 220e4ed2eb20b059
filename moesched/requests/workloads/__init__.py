"""Workloads: lengths of prompts and numbers of generated tokens, read from TOML profiles.

Every figure of a shipped profile states its source in the file.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from numbers import Integral
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from moesched.errors import BadInput
from moesched.machines.toml_library import decode_profile, profile_names, profile_text
from moesched.system.decoding import reason
from moesched.system.plain_text import shown

MOST_DISTINCT = 10_000
"""Largest number of different prompts in a distribution, as their lengths are computed one by one."""

Tokens = Annotated[int, Meta(le=16_000_000)]
"""A length in tokens. The longest context of any model has 10 million."""


class PromptLengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A set of `distinct` prompts with known average and largest length in tokens.

    Lengths follow the exponential distribution with that average, truncated to lengths from 1 to the largest: the
    distribution of maximum entropy.
    """

    average: float
    largest: Tokens
    distinct: int = 1


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lengths of prompts, given individually or as a distribution.

    Attributes:
        new_tokens: choices for the number of tokens to generate for each prompt; the first is the default.
        prompts: the distribution of the lengths; None if each length is given.
        prompt_tokens: each prompt's length in tokens, if there is no distribution.
    """

    name: str
    new_tokens: tuple[Tokens, ...]
    description: str = ""
    prompts: PromptLengths | None = None
    prompt_tokens: tuple[Tokens, ...] = ()

    def __post_init__(self) -> None:
        if (self.prompts is None) == (not self.prompt_tokens):
            raise BadInput(f"workload {self.name}: give either [prompts] or a list prompt_tokens")
        if not self.new_tokens or min(self.new_tokens) < 1:
            raise BadInput(
                f"workload {self.name}: new_tokens is {shown(list(self.new_tokens))}; give numbers above 0"
            )
        if self.prompt_tokens and min(self.prompt_tokens) < 1:
            raise BadInput(
                f"workload {self.name}: a prompt of {min(self.prompt_tokens)} tokens; give 1 or more"
            )
        if self.prompts is not None:
            _check(self.name, self.prompts)

    @property
    def longest(self) -> int:
        """Length of the longest prompt in tokens."""
        return max(self.prompt_tokens) if self.prompts is None else max(spread(self.prompts))

    def lengths(self, count: int, seed: int = 0) -> list[int]:
        """Return the prompt lengths in tokens of `count` requests.

        Individual lengths are repeated in their order. Lengths of a distribution are shuffled by the seed; every
        distinct prompt occurs once before any is repeated.
        """
        if self.prompts is None:
            return [self.prompt_tokens[i % len(self.prompt_tokens)] for i in range(count)]
        once = spread(self.prompts)
        drawn: list[int] = []
        for turn in range(-(-count // len(once))):
            drawn += random.Random(f"{seed}/{turn}").sample(once, len(once))
        return drawn[:count]


@lru_cache(32)
def spread(prompts: PromptLengths) -> tuple[int, ...]:
    """Return ascending lengths of the distinct prompts, with the (rounded) average and the maximum of `prompts`."""
    count, largest = prompts.distinct, prompts.largest
    if count == 1 or prompts.average == largest:
        return (round(prompts.average),) * count

    def lengths(slope: float) -> list[float]:
        return [_quantile(i / (count - 1), largest, slope) for i in range(count)]

    total = round(prompts.average * count)
    rounded = [round(length) for length in lengths(_root(lambda slope: sum(lengths(slope)) - total))]
    _correct(rounded, total, largest)
    return tuple(sorted(rounded))


def given_lengths(prompt_tokens: Sequence[int], new_tokens: int) -> Workload:
    """Create a workload of prompts with these lengths in tokens, in this order, each with `new_tokens` to generate."""
    return Workload(
        name="given lengths",
        new_tokens=_whole("new_tokens", [new_tokens]),
        prompt_tokens=_whole("prompt_tokens", prompt_tokens),
    )


def _whole(name: str, numbers: object) -> tuple[int, ...]:
    """Convert whole numbers of any type, such as numpy's, to Python's `int`.

    Args:
        name: the numbers' name in the error.

    Raises:
        BadInput: `numbers` are not whole numbers.
    """
    listed: list[Any] = list(numbers) if isinstance(numbers, Iterable) else [None]
    if not all(isinstance(each, Integral) for each in listed):
        raise BadInput(f"{name} is {shown(numbers)}: give a list of whole numbers")
    return tuple(map(int, listed))


def workload_names() -> list[str]:
    """Return the names of the included profiles."""
    return profile_names("moesched.requests.workloads")


def load_workload(name_or_file: str) -> Workload:
    """Load an included profile by its name, or a TOML file by its path.

    Raises:
        BadInput: neither exists, or the file is not a workload.
    """
    return _parse(profile_text("moesched.requests.workloads", "workload", name_or_file), name_or_file)


def _parse(text: bytes, where: str) -> Workload:
    decoded = decode_profile(text, "workload", where)
    try:
        return msgspec.convert(decoded, Workload)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    except msgspec.ValidationError as error:
        raise BadInput(f"{where}: not a workload: {reason(error, decoded)}") from None


def _check(name: str, prompts: PromptLengths) -> None:
    given = f"workload {name}: prompts of {prompts.average:g} tokens on average, {prompts.largest} at most"
    if not 1 <= prompts.distinct <= MOST_DISTINCT or not 1 <= prompts.average <= prompts.largest:
        wanted = f"1 <= average <= largest, and distinct from 1 to {MOST_DISTINCT:,}"
        raise BadInput(f"{given}, {prompts.distinct:,} of them; give {wanted}")
    others = prompts.average * prompts.distinct - prompts.largest
    most = (prompts.distinct - 1) * prompts.largest
    if prompts.distinct > 1 and not prompts.distinct - 1 <= others <= most:
        raise BadInput(f"{given}: {prompts.distinct} prompts cannot be that; give more distinct ones")


def _quantile(share: float, largest: int, slope: float) -> float:
    """Return the quantile `share`, from 0 to 1, of an exponential distribution truncated to [1, `largest`].

    Args:
        slope: logarithm of the factor by which the density falls from one end to the other.
    """
    if abs(slope) < 1e-9:
        return 1 + (largest - 1) * share
    return 1 - (largest - 1) * math.log1p(share * math.expm1(-slope)) / slope if share < 1 else largest


def _root(falling: Callable[[float], float]) -> float:
    """Find the zero, between -50 and 50, of the decreasing function `falling`."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def _correct(lengths: list[int], total: int, largest: int) -> None:
    """Add or remove one token of each length in turn, until all add up to `total`; the last length stays `largest`."""
    missing = total - sum(lengths)
    change = 1 if missing > 0 else -1
    while missing:
        for i in range(len(lengths) - 2, -1, -1):
            if missing and 1 <= lengths[i] + change <= largest:
                lengths[i] += change
                missing -= change
