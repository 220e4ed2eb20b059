"""Checkpoint: the place of every tensor of a model in its files, found by reading the files' headers."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from moesched.errors import BadInput
from moesched.models.coded_models import with_formats
from moesched.models.config import ModelConfig
from moesched.models.config_file import CONFIG_NAME
from moesched.models.contents import Contents, Names, require_counts, require_shape
from moesched.models.file_identity import FileIdentity
from moesched.models.gguf.contents import gguf_contents
from moesched.models.gguf.parts import is_gguf
from moesched.models.headers import FoundTensor
from moesched.models.mxfp4 import CODE_BYTES, MXFP4, join_codes_and_scales
from moesched.models.published import Published, extra_names, other_tensors, published_tensors
from moesched.models.reading import read_config, require_runs
from moesched.models.shards import FLOATS, read_shards
from moesched.models.stored_formats import StoredFormat
from moesched.models.tensor_shapes import Shape
from moesched.models.tensors import count_tensors, tensor_shapes
from moesched.system.logs import Log

_log = Log(__name__)


class Columns(NamedTuple):
    """A range of columns of a matrix in a file.

    Attributes:
        first: number of the first column of the range.
        of: number of columns of the whole matrix.
    """

    first: int
    of: int


class Scales(NamedTuple):
    """The place of a quantised tensor's scales in files that store them apart from the codes.

    Each group of weights has one scale of one byte; scales are stored row by row.

    Attributes:
        file: file with the scales.
        offset: bytes from the start of the file to the first scale.
    """

    file: Path
    offset: int


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """The location of one row-major tensor in a file.

    Attributes:
        offset: bytes from the start of the file to the tensor's first row; with `columns`, to the first row of the
            wider matrix.
        shape: the tensor's shape, in weights.
        format: the storage format of the tensor's rows.
        nbytes: bytes of the tensor.
        columns: the tensor's columns in a wider matrix of the file; None if the tensor is a whole matrix.
        scales: the place of a quantised tensor's scales if they are stored apart from its codes; None otherwise. The
            codes are at `offset`.
    """

    file: Path
    offset: int
    shape: Shape
    format: StoredFormat
    nbytes: int
    columns: Columns | None = None
    scales: Scales | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes from the start of one row to the start of the next in the file."""
        if self.columns is not None:
            return self.format.row_bytes(self.columns.of)
        return self.nbytes // self.shape[0]


class Blocks(Protocol):
    """Interface of a file of weights that is read in whole blocks of 4096 bytes; any thread may read."""

    @property
    def path(self) -> Path:
        """Path of the file."""

    @property
    def caching(self) -> str:
        """Effect of reads on the operating system's page cache: "bypassed", "dropped" after the read, or "kept"."""

    @property
    def descriptor(self) -> int:
        """File descriptor for reads that bypass the page cache, any number of them at once; -1 if there is none."""

    def read(self, into: memoryview, offset: int, needed: int, *, cached: bool = False) -> int:
        """Read bytes of the file from `offset` on into the buffer `into`, and return the number of bytes read.

        At least `needed` bytes are read, and possibly fewer than the buffer has room for. The offset and the size of
        the buffer are multiples of 4096.

        Args:
            cached: whether to read through the page cache even if other reads bypass it.
        """

    def require(self, offset: int, needed: int) -> None:
        """Raise MoeschedError unless the file holds `needed` bytes from `offset` on."""

    def close(self) -> None:
        """Close the file."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A model on disk: its configuration, and the location of its tensors.

    Attributes:
        path: the model's folder or file.
        tensors: location of each tensor, by its canonical name, such as "layers.0.experts.3.up" (see `tensors.py`).
        skipped: names of tensors in the files that are not needed, as the architecture says.
        identities: for each file on this machine, its inode, size and times before its header was read.
        absent: size in bytes of each file of which only a copy of the header is on this machine.
    """

    config: ModelConfig
    path: Path
    tensors: dict[str, StoredTensor]
    skipped: tuple[str, ...] = ()
    identities: dict[Path, FileIdentity] = {}
    absent: dict[Path, int] = {}

    def change(self) -> str | None:
        """Return a sentence on the first file of weights that has changed since it was opened; None if none has."""
        for path, identity in self.identities.items():
            if (difference := identity.difference(path)) is not None:
                return f"{path} {difference} since it was opened"
        return None

    def require_files(self, tensors: Iterable[str]) -> None:
        """Raise BadInput unless the files with these tensors, given by canonical name, are on this machine."""
        for name in tensors:
            file = self.tensors[name].file
            if file in self.absent:
                raise BadInput(f"{file} is not here, and {name} is in it: copy the file to this machine")

    def require_unchanged(self) -> None:
        """Raise BadInput if a file of weights has changed since it was opened."""
        if (change := self.change()) is not None:
            raise BadInput(f"{change}; restore it, or wait until it is complete, and run again")


def open_checkpoint(model: Path | str, *, partial: bool = False) -> Checkpoint:
    """Locate every tensor of a model in its safetensors or GGUF files.

    A tensor in a file may contain several of the model's tensors, such as all experts of a layer. Each of the model's
    tensors then is a range of the bytes of the tensor in the file. Only headers are read.

    Args:
        model: a folder with one safetensors file, or with several files and an index; or a GGUF file, which may be any
            file of a split model.
        partial: whether a safetensors file may be missing if a copy of its header is there.

    Raises:
        BadInput: a file is missing, truncated or not of its format, or the tensors are not as the configuration says:
            one is missing, stored twice, of another shape, or unknown to the architecture. The message names the file,
            the value and the remedy.
    """
    return checkpoint_of(read_contents(Path(model), partial=partial))


def read_contents(model: Path, *, partial: bool = False) -> Contents:
    """Read the headers of a model's files.

    Args:
        model: a folder, or a GGUF file; of a split GGUF model, any of its files.
        partial: whether a safetensors file may be missing if a copy of its header is there.

    Raises:
        BadInput: a file is missing, truncated or not of its format.
    """
    return gguf_contents(model) if is_gguf(model) else _folder_contents(model, partial=partial)


def checkpoint_of(contents: Contents) -> Checkpoint:
    """Locate every tensor of a model, given the contents of its files' headers.

    Raises:
        BadInput: a tensor is missing, stored twice, of another shape, or unknown to the architecture.
    """
    config, names, found_tensors = (
        contents.config,
        contents.names,
        [*join_codes_and_scales(contents.shards.tensors)],
    )
    tensors: dict[str, StoredTensor] = {}
    skipped: list[str] = []
    for found in found_tensors:
        stored = names.get(found.name)
        if stored is None:
            if not names.is_extra(found.name):
                raise _unknown(found, contents)
            skipped.append(found.name)
            continue
        for name, part in _parts_of(found, stored, contents.format_of(found, stored)):
            if tensors.setdefault(name, part) is not part:
                raise _stored_twice(found, name, found_tensors, names)
    if len(tensors) < count_tensors(config):
        raise _missing(contents, tensors)
    if skipped:
        _log.info("tensors that the model has no use for are skipped", count=len(skipped), first=skipped[0])
    config = with_formats(config, {name: stored.format for name, stored in tensors.items()})
    return Checkpoint(
        config,
        contents.path,
        tensors,
        skipped=tuple(skipped),
        identities=contents.shards.identities,
        absent=contents.shards.absent,
    )


def _parts_of(
    found: FoundTensor, published: Published, stored: StoredFormat
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield name and location of each tensor in `published.parts`; `found` contains them one after the other."""
    start, end = found.entry.data_offsets
    offset = found.data_start + start
    if found.scales is not None:
        yield from _coded_parts_of(found, found.scales, published)
        return
    if published.parts[0][1] == published.shape:  # it is the only part
        yield published.parts[0][0], StoredTensor(found.file, offset, published.shape, stored, end - start)
        return
    for name, part in published.parts:
        nbytes = math.prod(part[:-1]) * stored.row_bytes(part[-1])
        yield name, StoredTensor(found.file, offset, part, stored, nbytes)
        offset += nbytes


def _coded_parts_of(
    codes: FoundTensor, scales: FoundTensor, published: Published
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield name and location of each canonical tensor in a quantised tensor whose codes and scales are stored apart.

    Args:
        codes, scales: the stored tensors with the codes and with the scales.
        published: the names and shapes of the canonical tensors.
    """
    offset, scales_at = (each.data_start + each.entry.data_offsets[0] for each in (codes, scales))
    for name, part in published.parts:
        groups = math.prod(part) // MXFP4.group
        place = Scales(scales.file, scales_at)
        yield name, StoredTensor(codes.file, offset, part, MXFP4, groups * CODE_BYTES, scales=place)
        offset, scales_at = offset + groups * CODE_BYTES, scales_at + groups


# ---------------------------------------------------------------- folders


def _folder_contents(directory: Path, *, partial: bool) -> Contents:
    config = read_config(directory)
    require_runs(config)
    shards = read_shards(directory, partial=partial)
    require_counts(directory, config, shards.tensors, CONFIG_NAME)
    names = Names(published_tensors(config), functools.partial(other_tensors, config), extra_names(config))
    return Contents(directory, config, shards, names, CONFIG_NAME, functools.partial(_format_of, config))


def _format_of(config: ModelConfig, found: FoundTensor, published: Published) -> StoredFormat:
    kept = config.kept_format(published.parts[0][0])
    if kept is not None:
        _require_rows(found, published.shape, kept)
        return kept
    plain = _plain_format(found)
    require_shape(found, published.shape, CONFIG_NAME)
    return plain


# ---------------------------------------------------------------- checks


def _plain_format(found: FoundTensor) -> StoredFormat:
    dtype = found.entry.dtype
    if dtype not in FLOATS:
        known = ", ".join(FLOATS)
        raise BadInput(f"{found.file}: {found.name} has dtype {dtype!r}; use a checkpoint in one of {known}")
    return FLOATS[dtype]


def _require_rows(found: FoundTensor, shape: Shape, kept: StoredFormat) -> None:
    """Check that a stored tensor has the rows that config.json describes.

    Args:
        shape: the tensor's shape, in weights.
        kept: the storage format of the rows; rows in a coded format are stored as bytes.

    Raises:
        BadInput: the tensor has another dtype or shape.
    """
    rows, entry = kept.shape_in_files(shape), found.entry
    if (entry.dtype, entry.shape) != (kept.in_files, rows):
        raise BadInput(
            f"{found.file}: {found.name} is {entry.dtype} of shape {list(entry.shape)}, and rows in {kept.name}, "
            f"which config.json describes, are {kept.in_files} of shape {list(rows)}; use the config.json and the "
            "weights of one checkpoint"
        )


def _unknown(found: FoundTensor, contents: Contents) -> BadInput:
    """Return the error for a tensor in the files that the architecture does not have."""
    if found.name.endswith(".bias"):
        return BadInput(f"{found.file}: {found.name} is a bias; use a checkpoint without biases")
    config = contents.config
    of = f"a model of {config.layers:,} layers with {config.routed.experts:,} experts"
    return BadInput(
        f"{found.file}: {found.name} is no tensor of {of}, as {contents.described_in} describes it; "
        "use the configuration and the weights of one checkpoint"
    )


def _stored_twice(
    second: FoundTensor, tensor: str, all_found: Iterable[FoundTensor], names: Names
) -> BadInput:
    """Return the error for the model's tensor `tensor`, which two tensors in files contain: `second` and another."""
    first = next(
        found for found in all_found if found.name != second.name and _holds(names.get(found.name), tensor)
    )
    return BadInput(
        f"{second.file}: {second.name} and {first.name} in {first.file.name} are both {tensor} of the model; "
        "remove one of them, or copy the checkpoint again"
    )


def _holds(stored: Published | None, tensor: str) -> bool:
    return stored is not None and any(name == tensor for name, _ in stored.parts)


def _missing(contents: Contents, tensors: Mapping[str, StoredTensor]) -> BadInput:
    """Return the error for a checkpoint whose files lack some tensors of the model."""
    missing = [name for name in tensor_shapes(contents.config) if name not in tensors]
    count = f"{len(missing)} of the model's tensors, {missing[0]} the first"
    return BadInput(
        f"{contents.path} lacks {count}; copy all files of the checkpoint, or correct {contents.described_in}"
    )
