"""Where every weight of a Hugging Face checkpoint lies; reads the headers of its files, not the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec

from moesched.errors import BadInput
from moesched.models.config import ITEM_BYTES, ModelConfig, read_config
from moesched.models.published import published_tensors
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


class _Entry(msgspec.Struct):
    """What a safetensors header says of one tensor; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Found(msgspec.Struct):
    """A tensor that the model needs, as its file has it."""

    file: Path
    name: str
    entry: _Entry
    data_start: int
    file_bytes: int


Names = Callable[[_Found], Iterator[tuple[str, StoredTensor]]]
"""The model's tensors that a stored one is or contains, by canonical name; none where it has no use for it."""


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
    as_canonical = _dbrx_names(config) if config.form == "dbrx" else partial(_llama_names, config)
    for found in _find(directory):
        for name, stored in as_canonical(found):
            if name in shapes:
                tensors[name] = _checked(found, stored, shapes[name])
    _require_all(directory, shapes, tensors)
    return Checkpoint(config, directory, tensors)


# ---------------------------------------------------------------- files and headers


def _find(directory: Path) -> Iterator[_Found]:
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


def _read_header(path: Path) -> list[_Found]:
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
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} has a header that is no safetensors header ({error}); {RESTORE}") from error
    return [_Found(path, name, entry, 8 + len(header), size) for name, entry in entries.items()]


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

_EXPERT_PART = {
    "w1": "gate",
    "w2": "down",
    "w3": "up",
    "gate_proj": "gate",
    "down_proj": "down",
    "up_proj": "up",
}
_GLOBAL = {"embed_tokens.weight": "embedding", "norm.weight": "final_norm", "lm_head.weight": "lm_head"}
_DENSE = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "router",
    "mlp.gate": "router",
}
_LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight")
_MLP_NAME = re.compile(r"mlp\.(gate_proj|down_proj|up_proj)\.weight")
_FUSED_NAME = re.compile(r"(?:block_sparse_moe|mlp)\.experts\.(gate_up_proj|down_proj)(?:\.weight)?")


def _dbrx_names(config: ModelConfig) -> Names:
    published = published_tensors(config)

    def names(found: _Found) -> Iterator[tuple[str, StoredTensor]]:
        _refuse_bias(found)
        if found.name in published:
            yield from _parts_of(found, *published[found.name])

    return names


def _llama_names(config: ModelConfig, found: _Found) -> Iterator[tuple[str, StoredTensor]]:
    """The model's tensors that this stored one is or contains; none where the model has no use for it."""
    name = found.name.removeprefix("model.")
    if name in _GLOBAL:
        yield _GLOBAL[name], _stored(found)
        return
    in_layer = _LAYER_NAME.fullmatch(name)
    if in_layer is None:
        return
    prefix, name = f"layers.{in_layer[1]}.", in_layer[2]
    _refuse_bias(found)
    if name.removesuffix(".weight") in _DENSE:
        yield prefix + _DENSE[name.removesuffix(".weight")], _stored(found)
    elif match := _EXPERT_NAME.fullmatch(name):
        yield f"{prefix}experts.{match[1]}.{_EXPERT_PART.get(match[2], match[2])}", _stored(found)
    elif match := _MLP_NAME.fullmatch(name):
        yield f"{prefix}experts.0.{_EXPERT_PART[match[1]]}", _stored(found)
    elif match := _FUSED_NAME.fullmatch(name):
        yield from _fused_parts(
            config, found, prefix, ("gate", "up") if match[1] == "gate_up_proj" else ("down",)
        )


def _fused_parts(
    config: ModelConfig, found: _Found, prefix: str, parts: tuple[str, ...]
) -> Iterator[tuple[str, StoredTensor]]:
    """Expert after expert, and within an expert part after part."""
    rows = config.hidden if parts == ("down",) else config.intermediate
    columns = config.intermediate if parts == ("down",) else config.hidden
    names = [f"{prefix}experts.{expert}.{part}" for expert in range(config.experts) for part in parts]
    shape = (config.experts, len(parts) * rows, columns)
    yield from _parts_of(found, shape, [(name, (rows, columns)) for name in names])


def _parts_of(
    found: _Found, shape: Shape, parts: Iterable[tuple[str, Shape]]
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors that lie one after the other in a stored one of that shape."""
    whole = _stored(found)
    _require_shape(found, shape)
    start = whole.offset
    for name, part in parts:
        nbytes = math.prod(part) * ITEM_BYTES[whole.dtype]
        yield name, StoredTensor(whole.file, start, part, whole.dtype, nbytes)
        start += nbytes


# ---------------------------------------------------------------- checks


def _stored(found: _Found) -> StoredTensor:
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


def _refuse_bias(found: _Found) -> None:
    if found.name.endswith(".bias"):
        raise BadInput(f"{found.file}: {found.name} is a bias; use a checkpoint without biases")


def _checked(found: _Found, stored: StoredTensor, shape: Shape) -> StoredTensor:
    if stored.shape != shape:
        _require_shape(found, shape)
    return stored


def _require_shape(found: _Found, shape: Shape) -> None:
    if found.entry.shape != shape:
        what = f"{found.name} has shape {list(found.entry.shape)}, config.json makes it {list(shape)}"
        raise BadInput(f"{found.file}: {what}; use the config.json and the weights of one checkpoint")


def _require_all(directory: Path, shapes: Iterable[str], tensors: dict[str, StoredTensor]) -> None:
    missing = [name for name in shapes if name not in tensors]
    if missing:
        count = f"{len(missing)} of the model's tensors, {missing[0]} the first"
        raise BadInput(f"{directory} lacks {count}; copy all files of the checkpoint, or correct config.json")
