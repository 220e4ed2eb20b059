"""Time to open checkpoints of published sizes: the headers of all files are read, and every tensor is located.

The files are sparse, with the headers of published checkpoints and no weights, since none are read. It is done by one
thread; processor time counts, which other programs lengthen less.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

import msgspec

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ITEM_BYTES, ModelConfig
from moesched.models.headers import Entry
from moesched.models.published import published_config, published_tensors
from moesched.models.shapes import SHAPES
from moesched.models.shards import INDEX_NAME

SHARDS = {"mixtral-8x7b": 19, "dbrx": 61, "qwen3-30b-a3b": 16}
"""Files of the published checkpoints."""
BAR_SECONDS = 0.2
"""Of opening a checkpoint of 100 GB, at most."""


def claims(result: Result) -> Iterator[Claim]:
    """Of checkpoints with the headers of published ones."""
    slowest = max(result["checkpoints"], key=lambda each: float(each["open_processor_seconds"]))
    words = f"opening {slowest['checkpoint']}, {slowest['tensors_in_files']:,} tensors in {slowest['files']} files"
    yield at_most(words, 1e3 * slowest["open_processor_seconds"], 1e3 * BAR_SECONDS, "{:,.0f} ms")


BENCHMARK = Benchmark(__file__, __doc__, claims=claims, parts=SHARDS, rounds=21, rounds_help="times of each")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write what was found."""
    options = BENCHMARK.parse(arguments)
    rows = [measured(name, options.rounds) for name in track(options.only, "opening", still=True)]
    return BENCHMARK.write({"checkpoints": rows})


def measured(name: str, rounds: int) -> dict[str, object]:
    """One checkpoint, opened several times."""
    seconds = []
    with TemporaryDirectory() as folder:
        write_sparse(Path(folder), SHAPES[name], SHARDS[name])
        for _ in range(rounds):
            started = process_time()
            checkpoint = open_checkpoint(folder)
            seconds.append(process_time() - started)
    return {
        "checkpoint": name,
        "files": len(checkpoint.identities),
        "bytes": sum(identity.size for identity in checkpoint.identities.values()),
        "tensors_in_files": len(published_tensors(checkpoint.config)),
        "open_processor_seconds": median(seconds),
    }


def write_sparse(folder: Path, config: ModelConfig, shards: int) -> None:
    """Write a published checkpoint without its weights."""
    files: dict[str, dict[str, Entry]] = {}
    for name, file, entry in placed(config, shards):
        files.setdefault(file, {})[name] = entry
    for file, entries in files.items():
        text = msgspec.json.encode(entries)
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text)
        end = max(entry.data_offsets[1] for entry in entries.values())
        os.truncate(folder / file, 8 + len(text) + end)
    weight_map = {name: file for file, entries in files.items() for name in entries}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(published_config(config)))


def placed(config: ModelConfig, shards: int) -> Iterator[tuple[str, str, Entry]]:
    """Yield the name of each tensor, its file and its entry in the header; all files are of about one size."""
    sizes = {
        name: math.prod(tensor.shape) * ITEM_BYTES[config.dtype]
        for name, tensor in published_tensors(config).items()
    }
    total, before, number, start = sum(sizes.values()), 0, 0, 0
    for name, tensor in published_tensors(config).items():
        if before * shards // total > number:
            number, start = before * shards // total, 0
        entry = Entry("BF16", tensor.shape, (start, start + sizes[name]))
        yield name, f"model-{number + 1:05d}-of-{shards:05d}.safetensors", entry
        start, before = start + sizes[name], before + sizes[name]


if __name__ == "__main__":
    sys.exit(main())
