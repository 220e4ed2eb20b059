"""Where every weight of a Hugging Face checkpoint lies; reads the headers of its files, not the weights."""

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
    """Some columns of a wider matrix: the first one, and how many columns its rows have in the file."""

    first: int
    of: int


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor, row-major, in a file. offset: bytes from the file's start. dtype: as torch spells it.

    columns: which ones of its rows it is, where it is not all of them; offset is then where its first whole row begins.
    """

    file: Path
    offset: int
    shape: Shape
    dtype: str
    nbytes: int
    columns: Columns | None = None


class Blocks(Protocol):
    """A file of weights, or what stands for one; any thread may read."""

    @property
    def path(self) -> Path:
        """What it is called."""

    @property
    def caching(self) -> str:
        """What becomes of the page cache: "bypassed", "dropped" or "kept"."""

    def read(self, into: memoryview, offset: int, needed: int) -> int:
        """Fill `into` from `offset` on, both multiples of 4096; returns the bytes read, at least `needed`."""

    def require(self, offset: int, needed: int) -> None:
        """Raise MoeschedError where it no longer holds so many bytes from `offset` on."""

    def close(self) -> None:
        """Let go of it."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A model on disk: its configuration, and each of its tensors by canonical name (see `tensors.py`).

    Attributes:
        open: opens a tensor's file; None for files on disk.
    """

    config: ModelConfig
    directory: Path
    tensors: dict[str, StoredTensor]
    open: Callable[[Path], Blocks] | None = None


class Entry(msgspec.Struct):
    """What a safetensors header says of one tensor; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Found(msgspec.Struct):
    """A tensor as its file has it; `data_start`: where the tensors begin there, in bytes."""

    file: Path
    name: str
    entry: Entry
    data_start: int
    file_bytes: int


def open_checkpoint(directory: Path | str) -> Checkpoint:
    """Find every tensor of the model in `directory`: one safetensors file or several with an index.

    Where the files hold several of the model's tensors as one (a layer's experts; queries, keys and values), the
    StoredTensor of each is its range of bytes there. Raises BadInput, naming the file, the value and the remedy,
    where files are missing, truncated, no safetensors, of another shape than config.json says, or incomplete.
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
    """What the files of a checkpoint hold. Raises BadInput where one is missing or no safetensors."""
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
        raise BadInput(f"{path} has a header that is no safetensors header ({error}); {RESTORE}") from error
    return [Found(path, name, entry, 8 + len(header), size) for name, entry in entries.items()]


def _header_text(path: Path, file: BinaryIO, size: int) -> bytes:
    if size < 8:
        raise BadInput(f"{path} is truncated: it has {size} bytes, its header alone needs more; {RESTORE}")
    length = int.from_bytes(file.read(8), "little")
    if length > LARGEST_HEADER:
        raise BadInput(f"{path} is no safetensors file: its header would have {length:,} bytes; {RESTORE}")
    if 8 + length > size:
        raise BadInput(
            f"{path} is truncated: it has {size:,} bytes, its header ends at {8 + length:,}; {RESTORE}"
        )
    return file.read(length)


# ---------------------------------------------------------------- names


def _without_prefix(name: str) -> str:
    """The name as a checkpoint without an LM head has it."""
    return name.removeprefix("model.")


def parts_in(found: Found, known: Mapping[str, Published]) -> list[str]:
    """The canonical names of what a stored tensor holds; none where the model has no use for it."""
    stored = known.get(_without_prefix(found.name))
    return [] if stored is None else [name for name, _ in stored.parts]


def by_stored_name(tensors: Mapping[str, Published]) -> dict[str, Published]:
    """The same under the names that `parts_in` looks up."""
    return {_without_prefix(name): stored for name, stored in tensors.items()}


def _parts_of(found: Found, published: Published) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors that lie one after the other in a stored one."""
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
        what = f"{found.name} has shape {list(found.entry.shape)}, config.json makes it {list(shape)}"
        raise BadInput(f"{found.file}: {what}; use the config.json and the weights of one checkpoint")


def _require_all(directory: Path, shapes: Iterable[str], tensors: dict[str, StoredTensor]) -> None:
    missing = [name for name in shapes if name not in tensors]
    if missing:
        count = f"{len(missing)} of the model's tensors, {missing[0]} the first"
        raise BadInput(f"{directory} lacks {count}; copy all files of the checkpoint, or correct config.json")
