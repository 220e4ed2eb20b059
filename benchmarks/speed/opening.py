"""Time to open checkpoints of published sizes: the headers of all files are read, and every tensor is located.

The files are sparse, with the headers of published checkpoints and no weights, since none are read. It is done by one
thread; processor time counts, which other programs lengthen less. The GGUF file has a vocabulary of 151,936 tokens and
as many merges; bytes are what opening it adds to the peak of a process.
"""

from __future__ import annotations

import json
import math
import os
import string
import sys
from collections.abc import Iterator, Sequence
from itertools import count, islice, product
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import msgspec
from gguf import GGMLQuantizationType

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most, together
from benchmarks.shared.fresh_process import in_fresh_process
from benchmarks.shared.gguf_files import quantized, write_sparse_gguf
from moesched.inputs.tokenizer import find_tokenizer
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
GGUF = "qwen3-30b-a3b in GGUF"
GGUF_BARS = {"seconds": 1.5, "bytes": 150e6}
LONGEST = 120.0
"""Seconds that a process may take."""


def claims(result: Result) -> Iterator[Claim]:
    """Of checkpoints with the headers of published ones, and of a GGUF file."""
    slowest = max(result["checkpoints"], key=lambda each: float(each["open_processor_seconds"]))
    words = f"opening {slowest['checkpoint']}, {slowest['tensors_in_files']:,} tensors in {slowest['files']} files"
    yield at_most(words, 1e3 * slowest["open_processor_seconds"], 1e3 * BAR_SECONDS, "{:,.0f} ms")
    found = result["gguf"]
    yield together(
        f"opening a GGUF file with {found['tokens']:,} tokens",
        at_most("", found["open_processor_seconds"], GGUF_BARS["seconds"], "{:.2f} s"),
        at_most("", found["peak_bytes"] / 1e6, GGUF_BARS["bytes"] / 1e6, "{:.0f} MB"),
    )


BENCHMARK = Benchmark(
    __file__, __doc__, claims=claims, parts=(*SHARDS, GGUF), rounds=21, rounds_help="times of each"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write what was found."""
    options = BENCHMARK.parse(arguments)
    names = [name for name in options.only if name != GGUF]
    rows = [measured(name, options.rounds) for name in track(names, "opening", still=True)]
    figures: Result = {"checkpoints": rows}
    if GGUF in options.only:
        figures["gguf"] = measured_gguf(options.rounds)
    return BENCHMARK.write(figures)


def measured_gguf(rounds: int) -> dict[str, float]:
    """A GGUF file, opened several times, each time by a process of its own."""
    with TemporaryDirectory() as folder:
        type_of = quantized(GGMLQuantizationType.Q8_0)
        file = write_sparse_gguf(
            SHAPES["qwen3-30b-a3b"], Path(folder) / "model.gguf", type_of, add_vocabulary
        )
        found = [
            in_fresh_process(opened, file, seconds=LONGEST) for _ in track(range(rounds), GGUF, still=True)
        ]
    return {name: median(each[name] for each in found) for name in found[0]}


def opened(file: Path) -> dict[str, float]:
    """Open a GGUF file in this process, and make its tokenizer."""
    before, started = peak_bytes(), process_time()
    checkpoint = open_checkpoint(file)
    seconds, peak = process_time() - started, peak_bytes()
    find_tokenizer(file)
    return {
        "tokens": checkpoint.config.vocabulary,
        "open_processor_seconds": seconds,
        "peak_bytes": peak - before,
        "tokenizer_processor_seconds": process_time() - started - seconds,
    }


def peak_bytes() -> int:
    """The most bytes of this process that were in memory."""
    return getrusage(RUSAGE_SELF).ru_maxrss * 1024


def add_vocabulary(writer: Any) -> None:
    """Add as many tokens as the model has, which are numbers in letters, and merges of them."""
    letters, length = string.ascii_lowercase, SHAPES["qwen3-30b-a3b"].vocabulary
    words = islice(("".join(word) for size in count(1) for word in product(letters, repeat=size)), length)
    tokens = list(words)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * length)
    writer.add_token_merges([f"{token[:-1]} {token[-1]}" for token in tokens if len(token) > 1])


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
