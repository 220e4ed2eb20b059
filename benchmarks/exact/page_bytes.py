"""Bytes that are read from GGUF files for all pages, over the bytes of their tensors.

Counted: files of published models in Q4_K_M, with holes in place of weights, are opened, and each page is located.
A disk is read in blocks of 4096 bytes, and tensors begin and end inside of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most
from benchmarks.shared.gguf_files import q4_k_m, write_sparse_gguf
from moesched.devices.shared.page_reader import PageReader
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES

MOST = 1.01
MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b")


def claims(result: Result) -> Iterator[Claim]:
    """The largest ratio."""
    words = f"bytes read for all pages over those of the tensors, GGUF in Q4_K_M, the most of {len(MODELS)} models"
    yield at_most(words, max(each["read"] / each["stored"] for each in result["models"]), MOST, "{:.4f}")


BENCHMARK = Benchmark(__file__, __doc__, claims=claims, parts=MODELS, by_machine=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, and write what was found."""
    options = BENCHMARK.parse(arguments)
    rows = []
    for name in track(options.only, "models"):
        read, stored = bytes_of_pages(SHAPES[name])
        rows.append({"model": name, "read": read, "stored": stored})
    return BENCHMARK.write({"models": rows})


def bytes_of_pages(config: ModelConfig) -> tuple[int, int]:
    """The bytes to read for all pages of a model's file in Q4_K_M, and those of the tensors on them."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_sparse_gguf(config, file, q4_k_m, lambda writer: writer.add_tokenizer_model("no_vocab"))
        checkpoint = open_checkpoint(file)
        layout = weight_layout(checkpoint.config)
        with PageReader(checkpoint, layout, direct=False) as reader:
            read = sum(reader.location(page).bytes_to_read for page in layout.pages)
        stored = sum(each.nbytes for name, each in checkpoint.tensors.items() if name.startswith("layers."))
    return read, stored


if __name__ == "__main__":
    sys.exit(main())
