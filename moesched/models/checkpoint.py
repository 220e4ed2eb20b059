"""The location of every weight of a Hugging Face checkpoint, from the headers of its files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec

from moesched.errors import BadInput
from moesched.models.config import ITEM_BYTES, ModelConfig
from moesched.models.published import Published, known_tensors
from moesched.models.reading import read_config
from moesched.models.tensors import Shape, tensor_shapes

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
RESTORE = "copy the file again from where the checkpoint came from"

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Columns(NamedTuple):
    """A range of columns of a wider matrix: its first column, and the number of columns in the file."""

    first: int
    of: int


class StoredTensor(msgspec.Struct, frozen=True):
    """The location of one row-major tensor in a file.

    Attributes:
        offset: bytes from the start of the file; with `columns`, those of the first whole row.
        dtype: as torch spells it.
        columns: the columns that it has of a wider matrix; None for all.
    """

    file: Path
    offset: int
    shape: Shape
    dtype: str
    nbytes: int
    columns: Columns | None = None


class Blocks(Protocol):
    """A file of weights, or a substitute for one; any thread may read."""

    @property
    def path(self) -> Path:
        """Path of the file."""

    @property
    def caching(self) -> str:
        """Effect of reads on the page cache: "bypassed", "dropped" or "kept"."""

    def read(self, into: memoryview, offset: int, needed: int) -> int:
        """Fill `into` from `offset` on, both multiples of 4096; returns the number of bytes read, at least `needed`."""

    def require(self, offset: int, needed: int) -> None:
        """Raise MoeschedError unless the file holds `needed` bytes from `offset` on."""

    def close(self) -> None:
        """Release the file."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A model on disk: its configuration, and the location of its tensors by canonical name (see `tensors.py`).

    Attributes:
        open: opens the file of a tensor; None for files on disk.
    """

    config: ModelConfig
    directory: Path
    tensors: dict[str, StoredTensor]
    open: Callable[[Path], Blocks] | None = None


class Entry(msgspec.Struct):
    """Entry of one tensor in a safetensors header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Found(msgspec.Struct):
    """A tensor found in a file, whose tensors begin at byte `data_start`."""

    file: Path
    name: str
    entry: Entry
    data_start: int
    file_bytes: int


def open_checkpoint(directory: Path | str) -> Checkpoint:
    """Locate every tensor of the model in `directory`: one safetensors file, or several with an index.

    Files may hold several of the model's tensors as one (the experts of a layer; queries, keys and values); the
    StoredTensor of each is then its range of bytes.

    Raises:
        BadInput: a file is missing, truncated or not safetensors, a tensor is missing, or its shape does not match
            config.json. The message names the file, the value and the remedy.
    """
    directory = Path(directory)
    config = read_config(directory)
    shapes = tensor_shapes(config)
    tensors: dict[str, StoredTensor] = {}
    known = by_stored_name(known_tensors(config))
    for found in find_stored(directory):
        _refuse_bias(found)
        if (stored := known.get(_without_prefix(found.name))) is not None:
            tensors.update(_parts_of(found, stored))
    _require_all(directory, shapes, tensors)
    return Checkpoint(config, directory, tensors)


# ---------------------------------------------------------------- files and headers


def find_stored(directory: Path) -> Iterator[Found]:
    """Yield the tensors in the files of a checkpoint.

    Raises:
        BadInput: a file is missing or not safetensors.
    """
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    if single.is_file() or not index.is_file():
        yield from _read_header(single)
        return
    weight_map = _read_index(index).weight_map
    for shard in sorted(set(weight_map.values())):
        found = {tensor.name: tensor for tensor in _read_header(directory / shard)}
        for name in (name for name, file in weight_map.items() if file == shard):
            if name not in found:
                raise BadInput(f"{directory / shard} lacks {name}, which {INDEX_NAME} puts there; {RESTORE}")
            yield found[name]


def _read_index(path: Path) -> _Index:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: {error}; {RESTORE}") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; check the path and its permissions") from error


def _read_header(path: Path) -> list[Found]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            header = _header_text(path, file, size)
    except FileNotFoundError:
        raise BadInput(f"{path} is missing; {RESTORE}, as safetensors") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; check the path and its permissions") from error
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=Entry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} has no valid safetensors header ({error}); {RESTORE}") from error
    return [Found(path, name, entry, 8 + len(header), size) for name, entry in entries.items()]


def _header_text(path: Path, file: BinaryIO, size: int) -> bytes:
    if size < 8:
        raise BadInput(f"{path} is truncated: it has {size} bytes, its header alone needs more; {RESTORE}")
    length = int.from_bytes(file.read(8), "little")
    if length > LARGEST_HEADER:
        raise BadInput(f"{path} is not a safetensors file: its header would have {length:,} bytes; {RESTORE}")
    if 8 + length > size:
        raise BadInput(
            f"{path} is truncated: it has {size:,} bytes, its header ends at {8 + length:,}; {RESTORE}"
        )
    return file.read(length)


# ---------------------------------------------------------------- names


def _without_prefix(name: str) -> str:
    """The name in a checkpoint that was saved without an LM head."""
    return name.removeprefix("model.")


def parts_in(found: Found, known: Mapping[str, Published]) -> list[str]:
    """Canonical names of the tensors that a stored one holds; none if the model does not use it."""
    stored = known.get(_without_prefix(found.name))
    return [] if stored is None else [name for name, _ in stored.parts]


def by_stored_name(tensors: Mapping[str, Published]) -> dict[str, Published]:
    """Key the tensors by the names that `parts_in` looks up."""
    return {_without_prefix(name): stored for name, stored in tensors.items()}


def _parts_of(found: Found, published: Published) -> Iterator[tuple[str, StoredTensor]]:
    """Divide a stored tensor into the canonical tensors that it holds, one after the other."""
    whole = _stored(found)
    _require_shape(found, published.shape)
    start = whole.offset
    for name, part in published.parts:
        nbytes = math.prod(part) * ITEM_BYTES[whole.dtype]
        yield name, StoredTensor(whole.file, start, part, whole.dtype, nbytes)
        start += nbytes


# ---------------------------------------------------------------- checks


def _stored(found: Found) -> StoredTensor:
    entry = found.entry
    if entry.dtype not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise BadInput(
            f"{found.file}: {found.name} has dtype {entry.dtype!r}; use a checkpoint in one of {known}"
        )
    dtype = _DTYPES[entry.dtype]
    start, end = entry.data_offsets
    nbytes = math.prod(entry.shape) * ITEM_BYTES[dtype]
    if start < 0 or end - start != nbytes or min(entry.shape, default=0) < 0:
        what = f"{found.name} of shape {list(entry.shape)} takes {nbytes:,} bytes"
        raise BadInput(f"{found.file}: {what}, its header says {end - start:,}; {RESTORE}")
    needed = found.data_start + end
    if needed > found.file_bytes:
        has = f"it has {found.file_bytes:,} bytes, {found.name} ends at {needed:,}"
        raise BadInput(f"{found.file} is truncated: {has}; {RESTORE}")
    return StoredTensor(found.file, found.data_start + start, entry.shape, dtype, nbytes)


def _refuse_bias(found: Found) -> None:
    if found.name.endswith(".bias"):
        raise BadInput(f"{found.file}: {found.name} is a bias; use a checkpoint without biases")


def _require_shape(found: Found, shape: Shape) -> None:
    if found.entry.shape != shape:
        what = f"{found.name} has shape {list(found.entry.shape)}, config.json says {list(shape)}"
        raise BadInput(f"{found.file}: {what}; use the config.json and the weights of one checkpoint")


def _require_all(directory: Path, shapes: Iterable[str], tensors: dict[str, StoredTensor]) -> None:
    missing = [name for name in shapes if name not in tensors]
    if missing:
        count = f"{len(missing)} of the model's tensors, {missing[0]} the first"
        raise BadInput(f"{directory} lacks {count}; copy all files of the checkpoint, or correct config.json")
