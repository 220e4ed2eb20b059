"""Writes a checkpoint of random weights in Hugging Face's format or as GGUF, streaming it to disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import field
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.keywords import takes
from moesched.models.coded_models import coded_as
from moesched.models.config import ModelConfig
from moesched.models.config_file import MOST_LAYERS
from moesched.models.encoding import encoded
from moesched.models.gguf.parts import SUFFIX, gguf_files
from moesched.models.gguf.tensor_names import as_in_gguf
from moesched.models.gguf.writing import gguf_tensors_of, written_header
from moesched.models.layers import Layer
from moesched.models.published import STANDARD_DEVIATION, published_config, published_tensors
from moesched.models.reading import read_config, require_runs, runs
from moesched.models.shapes import SHAPES
from moesched.models.shards import INDEX_NAME
from moesched.models.stored_formats import STORED_FORMATS
from moesched.models.written_tensor import WrittenTensor
from moesched.options import Option, Options
from moesched.system.cells import counted_in_cell
from moesched.system.near_names import with_nearest
from moesched.system.new_folder import new_file, new_folder, reserve, write_at
from moesched.system.own_loop import interruptible
from moesched.system.plain_text import shown
from moesched.system.whole_file import write_json

Progress = Callable[[int, int], object]

CHUNK_VALUES = 1 << 20
DTYPES = ("bfloat16", "float32")
FACTORS = ("embedding_factor", "residual_factor", "logits_factor")
"""Factors outside the layers; files have them in float32, or as their inverse."""


class _Shard(NamedTuple):
    file_name: str
    header: bytes
    starts: tuple[tuple[WrittenTensor, int], ...]  # each tensor with its offset in the file
    nbytes: int


class RandomModelOptions(Options):
    """The options of `write_random_model`."""

    shape: Annotated[ModelConfig | str, Option("A name of `moesched list models`, or any ModelConfig.")] = (
        field(kw_only=False)
    )
    directory: Annotated[Path | str, Option("A folder to make, or a file whose name ends in .gguf.")] = field(
        kw_only=False
    )
    seed: Annotated[int, Option("Seed of the weights.")] = field(default=0, kw_only=False)
    layers: Annotated[int | None, Option("Number of layers. By default that of the shape.")] = field(
        default=None, kw_only=False
    )
    dtype: Annotated[str, Option("Number format to store.")] = field(default="bfloat16", kw_only=False)
    shard_bytes: Annotated[
        int, Option("The largest number of bytes of tensors in a file, unless a single tensor is larger.")
    ] = field(default=5_000_000_000, kw_only=False)
    progress: Annotated[
        Progress | None, Option("Called with the bytes written and the total, in the calling thread.")
    ] = field(default=None, kw_only=False)
    stored_as: Annotated[
        str | None,
        Option(
            "A coded format for all matrices that can have it, or a mix of such formats; norms and routers are then in "
            "float32. By default all weights are in the dtype."
        ),
    ] = field(default=None, kw_only=False)


@takes(RandomModelOptions)
@interruptible()
def write_random_model(given: RandomModelOptions) -> Path:
    """Write a random-weight model and return its path.

    A tensor's values depend only on the seed and on the tensor's name, shape and format: weights are normal with
    standard deviation 0.02, norms are 1. The directory or file is created atomically.

    Raises:
        BadInput: `shape`, `dtype` or `stored_as` is unknown; the directory is in use; the disk has too little space; or
            a config.json or GGUF file of the model's family cannot describe its layers, or the factors by which it
            multiplies embeddings, residuals or logits.
    """
    config, target = _resolve(given.shape, given.layers, given.dtype), Path(given.directory)
    seed, stored_as = given.seed, given.stored_as
    is_gguf = target.suffix.lower() == SUFFIX
    if is_gguf:
        if gguf_files(target) != [target]:
            raise BadInput(f"{target} has the name of a part of a split model: choose another name")
        config = as_in_gguf(config)
    if stored_as is not None:
        config = coded_as(config, stored_as)
    progress = given.progress or counted_in_cell("writing weights")
    if is_gguf:
        _write_gguf(target, config, seed, progress)
        return target
    nbytes = sum(tensor.nbytes for tensor in _tensors(config))
    with new_folder(target, nbytes, "ask for fewer layers") as folder:
        write_json(folder / "config.json", "config", published_config(config))
        _require_described(config, folder, "config.json")
        shards = _plan_shards(config, given.shard_bytes)
        _write_shards(folder, shards, seed, progress)
        write_json(folder / INDEX_NAME, "index", _index(shards))
    return target


def _require_described(config: ModelConfig, model: Path, kind: str) -> None:
    """Check that the description of a model, read back from its files, has the layers and the `FACTORS` of `config`.

    Args:
        config: the model to write.
        model: the folder or GGUF file, whose weights may still be missing.
        kind: kind of file that describes the model, for the error.

    Raises:
        BadInput: other layers or factors are read, or the description cannot be read.
    """
    try:
        read = read_config(model)
    except BadInput:
        read = None
    if read is not None and _computed(read) == _computed(config):
        unlike = [
            name
            for name in FACTORS
            if not math.isclose(getattr(read, name), getattr(config, name), rel_tol=1e-6)
        ]
        if not unlike:
            return
        raise BadInput(
            f"no {kind} of the family {config.form} has {' and '.join(unlike)}, as {config.name} has: leave them at 1, "
            "or use a model of the family granite_moe"
        )
    raise BadInput(
        f"no {kind} of the family {config.form} has layers as those of {config.name}: use layers "
        "that the family has"
    )


def _computed(config: ModelConfig) -> list[Layer]:
    """Return the layers as they are computed, without the formats that their tensors are stored in."""
    return [replace(layer, formats=()) for layer in config.pattern]


def _write_gguf(target: Path, config: ModelConfig, seed: int, progress: Progress | None) -> None:
    tensors = list(gguf_tensors_of(config))
    header = written_header(config, tensors)
    placed = tuple(zip(tensors, header.starts, strict=True))
    with new_file(target, header.size, "ask for fewer layers") as partial:
        partial.write_bytes(header.data)
        os.truncate(partial, header.size)  # readers compare offsets with the size
        _require_described(config, partial, "GGUF file")
        _write_shards(
            partial.parent, [_Shard(partial.name, header.data, placed, header.size)], seed, progress
        )


def _resolve(shape: ModelConfig | str, layers: int | None, dtype: str) -> ModelConfig:
    if not isinstance(shape, ModelConfig):
        if not isinstance(shape, str) or shape not in SHAPES:
            known = sorted(name for name, config in SHAPES.items() if runs(config))
            remedy = with_nearest(str(shape), known, f"choose one of {', '.join(known)}")
            raise BadInput(f"unknown model shape {shown(shape)}: {remedy}")
        shape = replace(SHAPES[shape], format=None)
        require_runs(shape)
    if dtype not in DTYPES:
        raise BadInput(f"dtype {dtype!r} cannot be written; choose one of {', '.join(DTYPES)}")
    layers = shape.layers if layers is None else layers
    if not 1 <= layers <= MOST_LAYERS:
        raise BadInput(f"a model of {layers:,} layers cannot be written; ask for 1 to {MOST_LAYERS:,}")
    config = shape.varied(layers, dtype=dtype)
    if not config.routed.experts:
        raise BadInput(f"{shape.name} has no experts in its first layers: ask for more than {layers:,}")
    return config


# ---------------------------------------------------------------- tensors and shards


def _tensors(config: ModelConfig) -> Iterator[WrittenTensor]:
    plain = STORED_FORMATS[config.dtype]
    for name, tensor in published_tensors(config).items():
        yield WrittenTensor(name, tensor.shape, config.kept_format(tensor.parts[0][0]) or plain)


def _plan_shards(config: ModelConfig, shard_bytes: int) -> list[_Shard]:
    groups: list[list[WrittenTensor]] = []
    filled = shard_bytes
    for tensor in _tensors(config):
        if not groups or filled + tensor.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return [_plan_shard(name, group) for name, group in zip(names, groups, strict=True)]


def _plan_shard(file_name: str, tensors: list[WrittenTensor]) -> _Shard:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts = []
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        starts.append(start)
        entries[tensor.name] = {
            "dtype": tensor.stored.in_files,
            "shape": tensor.stored.shape_in_files(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = tuple((tensor, len(header) + start) for tensor, start in zip(tensors, starts, strict=True))
    return _Shard(file_name, header, placed, len(header) + end)


def _index(shards: list[_Shard]) -> dict[str, Any]:
    total = sum(shard.nbytes - len(shard.header) for shard in shards)
    weight_map = {tensor.name: shard.file_name for shard in shards for tensor, _ in shard.starts}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


# ---------------------------------------------------------------- the values


@cache
def _normal_table(dtype: str) -> npt.NDArray[Any]:
    """Return 65,536 equally likely values of a normal distribution: float32, or bit patterns of bfloat16.

    Looking up a uniform 16-bit number in this table is several times as fast as drawing and rounding a normal number.
    Weights drawn in this way are independent, so that matrices have full rank and differ from tensor to tensor. Only
    the tails beyond 4.3 standard deviations are missing.
    """
    normal = NormalDist(0.0, STANDARD_DEVIATION)
    values = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)], dtype=np.float32)
    return values if dtype == "float32" else round_to_bfloat16(values)


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the bfloat16 numbers nearest to `values`; ties go to the even number."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _chunks(tensor: WrittenTensor, seed: int) -> Iterator[npt.NDArray[Any]]:
    """Yield a tensor's values as they are stored, a few MB at a time; each array is overwritten by the next."""
    if tensor.stored.codes is None:
        yield from _values(tensor, tensor.stored.name, seed)
    else:
        for values in _values(tensor, "float32", seed):
            yield encoded(values, tensor.stored)


def _values(tensor: WrittenTensor, dtype: str, seed: int) -> Iterator[npt.NDArray[Any]]:
    """Yield a tensor's values in a dtype, a few MB at a time; each array is overwritten by the next."""
    table = _normal_table(dtype)
    count = math.prod(tensor.shape)
    if tensor.is_norm:
        one = np.ones(1, dtype=np.float32)
        yield np.repeat(one if dtype == "float32" else round_to_bfloat16(one), count)
        return
    key = hashlib.blake2b(f"{seed}/{tensor.name}".encode(), digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(key, "little"))
    out = np.empty(min(CHUNK_VALUES, count), dtype=table.dtype)
    for start in range(0, count, CHUNK_VALUES):
        n = min(CHUNK_VALUES, count - start)
        uniform = np.asarray(bits.random_raw(-(-n // 4)), dtype="<u8").view("<u2")[:n]
        yield np.take(table, uniform, out=out[:n], mode="wrap")


# ---------------------------------------------------------------- writing


def _write_shards(directory: Path, shards: list[_Shard], seed: int, progress: Progress | None) -> None:
    total = sum(shard.nbytes for shard in shards)
    written = 0

    def advance(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        if progress is not None:
            progress(written, total)

    for shard in shards:
        _write_shard(directory / shard.file_name, shard, seed, advance)


def _write_shard(path: Path, shard: _Shard, seed: int, advance: Callable[[int], None]) -> None:
    stop = threading.Event()
    # The workers are the inner context: they must be done with the descriptor before it closes.
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as workers:
        descriptor = file.fileno()
        try:
            reserve(descriptor, shard.nbytes)
            advance(write_at(descriptor, memoryview(shard.header), 0))
            futures = [
                workers.submit(_write_tensor, descriptor, start, tensor, seed, stop)
                for tensor, start in shard.starts
            ]
            for done in as_completed(futures):
                advance(done.result())
            os.fsync(descriptor)
        except BaseException:
            stop.set()
            raise


def _write_tensor(
    descriptor: int, start: int, tensor: WrittenTensor, seed: int, stop: threading.Event
) -> int:
    end = start
    if stop.is_set():
        return 0
    for chunk in _chunks(tensor, seed):
        if stop.is_set():
            break
        end += write_at(descriptor, chunk.data.cast("B"), end)
    return end - start
