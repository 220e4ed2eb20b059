"""Routing profiles: the number of tokens that chose each expert of each layer, and their CSV format.

The file begins with comments that state the shape, followed by a header and one row for each expert of each layer, both
numbered from 0:

    # model: tiny-mixtral
    # layers: 4
    # experts: 8
    # top_k: 2
    # tokens: 10342
    layer,expert,count
    0,0,1877
    0,1,2950
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.config_file import MOST_EXPERTS
from moesched.system.input_file import given_path, read_input
from moesched.system.plain_text import is_number, shown
from moesched.system.whole_file import whole_file

HEADER = "layer,expert,count"
MOST_BYTES = 4_000_000
MOST_DIGITS = 15  # of a number; sums of counts stay exact as floats
SIZES = ("layers", "experts", "top_k", "tokens")


class RoutingProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tokens that chose each expert of a model.

    Attributes:
        model: name of the model.
        layers, experts, top_k: number of layers, of experts in a layer, and of experts that a token chooses in a layer.
        tokens: number of tokens that were counted.
        counts: number of tokens that chose an expert, as `counts[layer][expert]`; zeros in layers without experts.
    """

    model: str
    layers: int
    experts: int
    top_k: int
    tokens: int
    counts: tuple[tuple[int, ...], ...]


def require_shape(source: str, of: str, shape: tuple[int, int, int], config: ModelConfig) -> None:
    """Require that recorded choices fit a model: equal numbers of layers, of experts, and of experts per token.

    Args:
        source: the file, for the error message.
        of: name of the recorded model, for the error message.
        shape: layers, experts in a layer and top_k of the recorded model.
        config: the model that the choices are to be used for.

    Raises:
        BadInput: one of the three numbers differs.
    """
    needed = (config.layers, config.routed.experts, config.routed.top_k)
    if shape != needed:
        raise BadInput(
            f"{source} is of {of}, {_shape_text(shape)}, but {config.name} has {_shape_text(needed)}: "
            "give a profile of that model, which `moesched profile-routing` makes"
        )


def write_profile(profile: RoutingProfile, path: Path | str) -> None:
    """Write a routing profile to a CSV file.

    Raises:
        BadInput: the file cannot be written.
    """
    lines = [f"# model: {profile.model}", *(f"# {name}: {getattr(profile, name)}" for name in SIZES), HEADER]
    for layer, counts in enumerate(profile.counts):
        lines += [f"{layer},{expert},{count}" for expert, count in enumerate(counts)]
    with whole_file(Path(path), "routing profile") as file:
        file.write("\n".join([*lines, ""]).encode())


def read_routing_profile(path: Path | str, config: ModelConfig | None = None) -> RoutingProfile:
    """Read a routing profile from its CSV file.

    Args:
        config: the model that the profile is used for; None accepts any.

    Raises:
        BadInput: the file cannot be read, a line is invalid (the message names it), rows are missing, or the shape of
            the model differs.
    """
    path = given_path(path, "a routing profile")
    data = read_input(path, "routing profile", MOST_BYTES, remedy="name a CSV file")
    return parse_profile(path, data, config)


def parse_profile(path: Path, data: bytes, config: ModelConfig | None = None) -> RoutingProfile:
    """Parse the bytes of a profile's file.

    Args:
        path: path of the file, for error messages.
        config: the model that the profile is used for; None accepts any.

    Raises:
        BadInput: as for `read_routing_profile`.
    """
    if len(data) > MOST_BYTES:
        raise BadInput(
            f"routing profile {path} has {len(data):,} bytes, and may have {MOST_BYTES:,}: remove some"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not a routing profile: it is not text: name a CSV file") from error
    profile = _Reader(path).read(text.splitlines())
    if config is not None:
        shape = (profile.layers, profile.experts, profile.top_k)
        require_shape(str(path), profile.model, shape, config)
    return profile


class _Reader:
    """Parses the lines of a routing profile's file; errors name the line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._model = "another model"
        self._sizes: dict[str, int] = {}

    def read(self, lines: Iterable[str]) -> RoutingProfile:
        counts: list[list[int | None]] | None = None
        for self._number, line in enumerate(map(str.strip, lines), 1):
            if line.startswith("#"):
                self._comment(line[1:])
            elif line and counts is None:
                counts = self._begin(line)
            elif line and counts is not None:
                self._row(line, counts)
        if counts is None:
            raise BadInput(f"{self._path} holds no routing profile: it has no line {HEADER!r}")
        return RoutingProfile(model=self._model, counts=self._whole(counts), **self._sizes)

    def _comment(self, text: str) -> None:
        key, _, value = map(str.strip, text.partition(":"))
        if key == "model":
            self._model = value
        elif key in SIZES:
            self._sizes[key] = self._whole_number(key, value, least=0 if key == "tokens" else 1)

    def _begin(self, line: str) -> list[list[int | None]]:
        if line.replace(" ", "") != HEADER:
            raise self._broken(f"{shown(line)} is not the header: write {HEADER!r} before the first row")
        missing = [name for name in SIZES if name not in self._sizes]
        if missing:
            raise self._broken(f"the header comes before '# {missing[0]}: ...': state the shape first")
        layers, experts = self._sizes["layers"], self._sizes["experts"]
        if layers * experts > MOST_EXPERTS:
            raise self._broken(
                f"{layers:,} layers of {experts:,} experts: give at most {MOST_EXPERTS:,} in all"
            )
        return [[None] * experts for _ in range(layers)]

    def _row(self, line: str, counts: list[list[int | None]]) -> None:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            raise self._broken(f"{shown(line)} has {len(fields)} fields: write {HEADER}")
        layer = self._whole_number("layer", fields[0], below=self._sizes["layers"])
        expert = self._whole_number("expert", fields[1], below=self._sizes["experts"])
        if counts[layer][expert] is not None:
            raise self._broken(f"expert {expert} of layer {layer} is repeated: remove one of the two rows")
        counts[layer][expert] = self._whole_number("count", fields[2])

    def _whole(self, counts: list[list[int | None]]) -> tuple[tuple[int, ...], ...]:
        for layer, row in enumerate(counts):
            if None in row:
                raise BadInput(
                    f"{self._path} has no row for expert {row.index(None)} of layer {layer}: it was cut short, or its "
                    "shape is wrong; write one row for each expert, even if the count is 0"
                )
        return tuple(tuple(count for count in row if count is not None) for row in counts)

    def _whole_number(self, name: str, text: str, *, least: int = 0, below: int | None = None) -> int:
        if not is_number(text, MOST_DIGITS):
            raise self._broken(f"{name} is {shown(text)}: give a whole number from {least} on")
        number = int(text)
        if number < least or (below is not None and number >= below):
            most = "" if below is None else f" to {below - 1}"
            raise self._broken(f"{name} is {number}: give a whole number from {least}{most or ' on'}")
        return number

    def _broken(self, what: str) -> BadInput:
        return BadInput(f"{self._path}:{self._number}: {what}")


def _shape_text(shape: tuple[int, int, int]) -> str:
    layers, experts, top_k = shape
    return f"{layers} layers of {experts} experts, top {top_k}"
