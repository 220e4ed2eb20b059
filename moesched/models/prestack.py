"""Rewrites a checkpoint with experts' matrices stacked into large arrays (Apple silicon cluster paper, section 4.1)."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, NamedTuple, get_args

from moesched.errors import BadInput
from moesched.keywords import takes
from moesched.models.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from moesched.models.contents import by_stored_name, without_prefix
from moesched.models.gguf.parts import is_gguf
from moesched.models.headers import RESTORE, header_copy
from moesched.models.published import Published, StackedBy, known_tensors, stacked_tensors
from moesched.models.random_model import Progress
from moesched.models.reading import require_plain_layers
from moesched.models.shards import INDEX_NAME, read_shards
from moesched.models.stored_formats import StoredFormat
from moesched.models.tensor_shapes import Shape
from moesched.options import Option, Options
from moesched.system.cells import counted_in_cell
from moesched.system.new_folder import new_folder, reserve, write_at
from moesched.system.own_loop import interruptible
from moesched.system.plain_text import shown
from moesched.system.whole_file import write_json

COPIED_BYTES = 8 << 20
"""Largest number of bytes in memory at a time, whatever the sizes of tensors."""
LONGEST_AXIS = 2**31 - 1
"""Largest number of items along an axis of an array: MLX counts them with 32 bits."""
HEADER_ALIGNMENT = 4096
"""Headers take a multiple of this number of bytes, so that tensors of whole disk blocks begin at disk blocks."""


class Prestacked(NamedTuple):
    """Summary of a prestacked checkpoint.

    Attributes:
        directory: the checkpoint's folder.
        by: "expert" if an array has all matrices of one expert number, of all layers; "layer" if it has one matrix of
            all experts of a layer.
        arrays: number of stacked arrays.
        largest: bytes of the largest array.
        others: bytes of all other tensors together.
    """

    directory: Path
    by: StackedBy
    arrays: int
    largest: int
    others: int


class _Piece(NamedTuple):
    """A range of bytes in a file."""

    file: Path
    offset: int
    nbytes: int


class _Array(NamedTuple):
    """A tensor to write, with the storage format of its rows, and the pieces of files that it consists of."""

    name: str
    stored: StoredFormat
    shape: Shape
    pieces: tuple[_Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class PrestackOptions(Options):
    """The options of `prestack_model`."""

    model: Annotated[
        Path | str, Option("Folder of the checkpoint, which may be prestacked the other way.")
    ] = field(kw_only=False)
    directory: Annotated[Path | str, Option("The folder to make.")] = field(kw_only=False)
    by: Annotated[
        StackedBy,
        Option(
            "`expert` writes one array per expert, with its matrices of all layers, for nodes that have whole experts: "
            "they need only their files, and the `.header` files of the others; `layer` writes one array per matrix of "
            "a layer, with all experts, for MLX's `gather_mm`."
        ),
    ] = "expert"
    progress: Annotated[Progress | None, Option("Called with the bytes written and the total.")] = None


@takes(PrestackOptions)
@interruptible()
def prestack_model(given: PrestackOptions) -> Prestacked:
    """Copy a checkpoint, with the weights of its experts stacked into large arrays.

    The copy opens like any other checkpoint and generates the same tokens. At most 8 MiB are in memory at a time.

    Raises:
        BadInput: the checkpoint cannot be opened or has no experts, `directory` is in use, or the disk is full.
            No files are left behind.
    """
    model, by = given.model, given.by
    if by not in get_args(StackedBy):
        raise BadInput(f"by is {shown(by)}: give one of {', '.join(get_args(StackedBy))}")
    if is_gguf(Path(model)):
        raise BadInput(f"{model} is a GGUF file, which has its experts stacked: run it as it is")
    checkpoint, target = open_checkpoint(model), Path(given.directory)
    progress = given.progress or counted_in_cell("writing weights")
    if checkpoint.config.routed.experts == 1:
        raise BadInput(f"{model} is a dense model and has no experts to stack; run it as it is")
    require_plain_layers(checkpoint.config, "--device mlx, for which experts are stacked,")
    if formats := checkpoint.config.coded_formats:
        raise BadInput(
            f"{model} has weights in {formats[0]}, and arrays hold plain ones: stack such a checkpoint"
        )
    stacks = stacked_tensors(checkpoint.config, by)
    stacked = [_stack(checkpoint, name, stored) for name, stored in stacks.items()]
    others = sorted(_others(checkpoint))
    files = {"others.safetensors": others}
    for array in stacked:
        files.setdefault(_file_of(array.name), []).append(array)
    total = sum(array.nbytes for arrays in files.values() for array in arrays)
    with new_folder(target, total, "choose another disk") as folder:
        _copy_small_files(checkpoint.path, folder)
        done = 0
        for name, arrays in files.items():
            header_copy(folder / name).write_bytes(_header(arrays))
            for nbytes in _write(folder / name, arrays):
                done += nbytes
                if progress is not None:
                    progress(done, total)
        weight_map = {array.name: name for name, arrays in files.items() for array in arrays}
        write_json(
            folder / INDEX_NAME, "index", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
        checkpoint.require_unchanged()
    return Prestacked(
        target, by, len(stacked), max(array.nbytes for array in stacked), sum(each.nbytes for each in others)
    )


# ---------------------------------------------------------------- arrays and files


def _stack(checkpoint: Checkpoint, name: str, stored: Published) -> _Array:
    parts = [checkpoint.tensors[part] for part, _ in stored.parts]
    dtypes = sorted({part.format.name for part in parts})
    if len(dtypes) > 1:
        raise BadInput(
            f"{checkpoint.path} has experts in {' and '.join(dtypes)}, but an array has a single dtype: "
            "convert the checkpoint to one of them"
        )
    if max(stored.shape) > LONGEST_AXIS:
        raise BadInput(
            f"{name} would have {max(stored.shape):,} items along one axis, MLX's limit is {LONGEST_AXIS:,}: "
            "stack the other way, with --by"
        )
    return _Array(name, parts[0].format, stored.shape, tuple(map(_piece, parts)))


def _file_of(name: str) -> str:
    """Return the name of the file for a stacked tensor: one file per expert, or per layer."""
    _, kind, number, *_ = name.split(".")
    return f"{kind}-{int(number):05d}.safetensors"


def _piece(stored: StoredTensor) -> _Piece:
    return _Piece(stored.file, stored.offset, stored.nbytes)


def _others(checkpoint: Checkpoint) -> Iterator[_Array]:
    """Yield the tensors that belong to no expert, as they are stored."""
    known = by_stored_name(known_tensors(checkpoint.config))
    for found in read_shards(checkpoint.path).tensors:
        stored = known.get(without_prefix(found.name))
        if stored is not None and ".experts." not in stored.parts[0][0]:
            first = checkpoint.tensors[stored.parts[0][0]]
            nbytes = math.prod(found.entry.shape) * first.format.block_bytes
            pieces = (_Piece(first.file, first.offset, nbytes),)
            yield _Array(found.name, first.format, found.entry.shape, pieces)


# ---------------------------------------------------------------- writing


def _write(path: Path, arrays: Sequence[_Array]) -> Iterator[int]:
    """Write one safetensors file, yielding the number of bytes of each write."""
    header = _header(arrays)
    with path.open("xb", buffering=0) as file:
        descriptor = file.fileno()
        reserve(descriptor, len(header) + sum(array.nbytes for array in arrays))
        end = write_at(descriptor, memoryview(header), 0)
        for array in arrays:
            for piece in array.pieces:
                for data in _read(piece):
                    yield write_at(descriptor, data, end)
                    end += len(data)
        os.fsync(descriptor)


def _header(arrays: Sequence[_Array]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for array in arrays:
        start, end = end, end + array.nbytes
        entries[array.name] = {
            "dtype": array.stored.in_files,
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _read(piece: _Piece) -> Iterator[memoryview]:
    """Yield the bytes of a piece in order; each buffer is overwritten by the next."""
    buffer = memoryview(bytearray(min(COPIED_BYTES, piece.nbytes)))
    try:
        with piece.file.open("rb", buffering=0) as file:
            file.seek(piece.offset)
            left = piece.nbytes
            while left:
                count = file.readinto(buffer[:left])
                if not count:
                    raise BadInput(f"{piece.file} is truncated: {RESTORE}")
                yield buffer[:count]
                left -= count
    except OSError as error:
        raise BadInput(f"cannot read {piece.file}: {error.strerror}; {RESTORE}") from error


def _copy_small_files(source: Path, folder: Path) -> None:
    """Copy the configuration, the tokenizer and all other files except weights."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".header") and path.name != INDEX_NAME:
            shutil.copy(path, folder)
