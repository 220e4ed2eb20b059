"""The location of every weight of a Hugging Face checkpoint, from the headers of its files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.file_identity import FileIdentity
from moesched.models.headers import MOST_TENSORS, Found
from moesched.models.layers import Shape
from moesched.models.published import Published, extra_names, other_tensors, published_tensors
from moesched.models.reading import read_config, require_runs, without_prefix
from moesched.models.shards import FLOATS, read_shards
from moesched.models.stored_formats import StoredFormat
from moesched.models.tensors import count_tensors, count_weights, tensor_shapes
from moesched.system.logs import Log

_log = Log(__name__)


class Columns(NamedTuple):
    """A range of columns of a wider matrix: its first column, and the number `of` columns in the file."""

    first: int
    of: int


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """The location of one row-major tensor in a file.

    Attributes:
        offset: bytes from the start of the file; with `columns`, up to the first whole row.
        format: the format of its rows.
        columns: the columns that the tensor has of a wider matrix; None for all.
    """

    file: Path
    offset: int
    shape: Shape
    format: StoredFormat
    nbytes: int
    columns: Columns | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next in the file."""
        if self.columns is not None:
            return self.format.row_bytes(self.columns.of)
        return self.nbytes // self.shape[0]


class Blocks(Protocol):
    """A file of weights, or a substitute for one; any thread may read."""

    @property
    def path(self) -> Path:
        """Path of the file."""

    @property
    def caching(self) -> str:
        """Effect of reads on the page cache: "bypassed", "dropped" or "kept"."""

    def read(self, into: memoryview, offset: int, needed: int, *, cached: bool = False) -> int:
        """Fill `into` from `offset` on, both multiples of 4096; returns the number of bytes read, at least `needed`.

        cached: read what is in the page cache from there, even if reads bypass it.
        """

    def require(self, offset: int, needed: int) -> None:
        """Raise MoeschedError unless the file holds `needed` bytes from `offset` on."""

    def close(self) -> None:
        """Release the file."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A model on disk: its configuration, and the location of its tensors by canonical name (see `tensors.py`).

    Attributes:
        skipped: names of tensors in the files that the architecture declares as extra.
        identities: the identity of each file when it was opened.
        absent: sizes in bytes of files that are not here, and whose tensors are known by a copy of their header.
    """

    config: ModelConfig
    directory: Path
    tensors: dict[str, StoredTensor]
    skipped: tuple[str, ...] = ()
    identities: dict[Path, FileIdentity] = {}
    absent: dict[Path, int] = {}

    def change(self) -> str | None:
        """The first change of a file of weights since the file was opened, in words; None if there is none.

        It takes a few microseconds per file.
        """
        for path, identity in self.identities.items():
            if (difference := identity.difference(path)) is not None:
                return f"{path} {difference} since it was opened"
        return None

    def require_files(self, tensors: Iterable[str]) -> None:
        """Raise BadInput if a file is absent that has one of these tensors, by canonical name."""
        for name in tensors:
            file = self.tensors[name].file
            if file in self.absent:
                raise BadInput(f"{file} is not here, and {name} is in it: copy the file to this machine")

    def require_unchanged(self) -> None:
        """Raise BadInput if a file of weights has changed since it was opened."""
        if (change := self.change()) is not None:
            raise BadInput(f"{change}; restore it, or wait until it is complete, and run again")


def open_checkpoint(directory: Path | str, *, partial: bool = False) -> Checkpoint:
    """Locate every tensor of the model in `directory`: one safetensors file, or several with an index.

    Files may contain several of the model's tensors as one (the experts of a layer; queries, keys and values); the
    StoredTensor of each is then its range of bytes. Only headers are read.

    Args:
        partial: whether files may be missing that have a copy of their header beside them.

    Raises:
        BadInput: a file is missing, truncated or not safetensors, or the tensors are not those of config.json: one is
            missing, stored twice, of another shape, or unknown to the architecture. The message names the file, the
            value and the remedy.
    """
    directory = Path(directory)
    config = read_config(directory)
    require_runs(config)
    shards = read_shards(directory, partial=partial)
    _require_counts(directory, config, shards.tensors)
    known = _Known(config)
    tensors: dict[str, StoredTensor] = {}
    skipped: list[str] = []
    for found in shards.tensors:
        stored = known.get(found)
        if stored is None:
            skipped.append(found.name)
            continue
        for name, part in _parts_of(found, stored, config):
            if tensors.setdefault(name, part) is not part:
                raise _stored_twice(found, name, shards.tensors, known)
    if len(tensors) < count_tensors(config):
        raise _missing(directory, config, tensors)
    if skipped:
        _log.info("tensors that the model has no use for are skipped", count=len(skipped), first=skipped[0])
    return Checkpoint(
        config, directory, tensors, skipped=tuple(skipped), identities=shards.identities, absent=shards.absent
    )


# ---------------------------------------------------------------- names


class _Known:
    """The tensors of an architecture by their names in files; only for the forms that the files use."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._published = by_stored_name(published_tensors(config))
        self._extra = extra_names(config)

    @cached_property
    def _others(self) -> dict[str, Published]:
        return by_stored_name(other_tensors(self._config))

    def get(self, found: Found) -> Published | None:
        """The published tensor with a stored tensor's name; None if the architecture declares it as extra.

        Raises:
            BadInput: the architecture has no such tensor.
        """
        name = without_prefix(found.name)
        stored = self._published.get(name) or self._others.get(name)
        if stored is None and not self._extra.fullmatch(name):
            _refuse_bias(found)
            config = self._config
            of = f"a model of {config.layers:,} layers with {config.routed.experts:,} experts"
            raise BadInput(
                f"{found.file}: {found.name} is no tensor of {of}, as config.json describes it; "
                "use the config.json and the weights of one checkpoint"
            )
        return stored


def parts_in(found: Found, known: Mapping[str, Published]) -> list[str]:
    """Canonical names of the tensors that a stored tensor contains; none if the model does not use it."""
    stored = known.get(without_prefix(found.name))
    return [] if stored is None else [name for name, _ in stored.parts]


def by_stored_name(tensors: Mapping[str, Published]) -> dict[str, Published]:
    """The same tensors, keyed by the names that `parts_in` looks up."""
    return {without_prefix(name): stored for name, stored in tensors.items()}


def _parts_of(found: Found, published: Published, config: ModelConfig) -> Iterator[tuple[str, StoredTensor]]:
    """The location of each canonical tensor in a stored tensor, which contains them one after the other."""
    coded = config.coded(published.parts[0][0])
    stored = _plain_format(found) if coded is None else coded
    start, end = found.entry.data_offsets
    offset = found.data_start + start
    if coded is None:
        _require_shape(found, published.shape)
    else:
        _require_rows(found, published.shape, coded)
    if published.parts[0][1] == published.shape:  # it is the only part
        yield published.parts[0][0], StoredTensor(found.file, offset, published.shape, stored, end - start)
        return
    for name, part in published.parts:
        nbytes = math.prod(part[:-1]) * stored.row_bytes(part[-1])
        yield name, StoredTensor(found.file, offset, part, stored, nbytes)
        offset += nbytes


# ---------------------------------------------------------------- checks


def _plain_format(found: Found) -> StoredFormat:
    dtype = found.entry.dtype
    if dtype not in FLOATS:
        known = ", ".join(FLOATS)
        raise BadInput(f"{found.file}: {found.name} has dtype {dtype!r}; use a checkpoint in one of {known}")
    return FLOATS[dtype]


def _require_rows(found: Found, shape: Shape, coded: StoredFormat) -> None:
    """Require the rows of a coded tensor, as bytes."""
    rows, entry = coded.shape_in_files(shape), found.entry
    if (entry.dtype, entry.shape) != (coded.in_files, rows):
        raise BadInput(
            f"{found.file}: {found.name} is {entry.dtype} of shape {list(entry.shape)}, and rows in {coded.name}, "
            f"which config.json describes, are {coded.in_files} of shape {list(rows)}; use the config.json and the "
            "weights of one checkpoint"
        )


def _stored_twice(second: Found, tensor: str, all_found: Iterable[Found], known: _Known) -> BadInput:
    """The error for a tensor of the model that two of the files' tensors contain."""
    first = next(
        found for found in all_found if found.name != second.name and _holds(known.get(found), tensor)
    )
    return BadInput(
        f"{second.file}: {second.name} and {first.name} in {first.file.name} are both {tensor} of the model; "
        "remove one of them, or copy the checkpoint again"
    )


def _holds(stored: Published | None, tensor: str) -> bool:
    return stored is not None and any(name == tensor for name, _ in stored.parts)


def _require_counts(directory: Path, config: ModelConfig, found: Iterable[Found]) -> None:
    """Check, before tables of its size are made, that a configuration is not far larger than the files' contents."""
    stored = sum(math.prod(tensor.entry.shape) for tensor in found)
    described, tensors = count_weights(config), count_tensors(config)
    if described > 2 * stored or tensors > MOST_TENSORS:
        raise BadInput(
            f"{directory}: config.json describes {config.layers:,} layers with {config.routed.experts:,} experts, "
            f"{described:,} weights in {tensors:,} tensors, and the files hold {stored:,}; "
            "copy all files of the checkpoint, or correct config.json"
        )


def _refuse_bias(found: Found) -> None:
    if found.name.endswith(".bias"):
        raise BadInput(f"{found.file}: {found.name} is a bias; use a checkpoint without biases")


def _require_shape(found: Found, shape: Shape) -> None:
    if found.entry.shape != shape:
        what = f"{found.name} has shape {list(found.entry.shape)}, config.json says {list(shape)}"
        raise BadInput(f"{found.file}: {what}; use the config.json and the weights of one checkpoint")


def _missing(directory: Path, config: ModelConfig, tensors: dict[str, StoredTensor]) -> BadInput:
    """The error for tensors of the model that the files lack."""
    missing = [name for name in tensor_shapes(config) if name not in tensors]
    count = f"{len(missing)} of the model's tensors, {missing[0]} the first"
    return BadInput(f"{directory} lacks {count}; copy all files of the checkpoint, or correct config.json")
