"""The GGUF file of a trained model: Q4_K_M, with its tokenizer and where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.shared.gguf_files import add_vocabulary, q4_k_m, write_gguf
from moesched.models.checkpoint import open_checkpoint

DESCRIPTION = (
    "Trained by tools/train_tiny_mixtral.py on the docstrings of Python's standard library (PSF License)"
)


def write_shipped(folder: Path, file: Path) -> None:
    """Write the model of a Hugging Face folder."""

    def describe(writer: Any) -> None:
        writer.add_name(file.stem)
        writer.add_license("apache-2.0")
        writer.add_description(DESCRIPTION)
        add_vocabulary(writer, folder / "tokenizer.json")

    write_gguf(open_checkpoint(folder), file, q4_k_m, describe)
