"""Perplexity of the GGUF model that ships, beside the weights it was made of.

The text is that which its training held out: docstrings of one module in twenty of Python's library. The trained
weights, in bfloat16, are no part of the tree: they are trained once, into the cache folder (ten minutes). Weights are
written in each type, unpacked by llama.cpp's package, and computed with in float32 by Hugging Face; our logits are the
same (`gguf_models.py`). A last row is the file as it ships.
"""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gguf import GGMLQuantizationType
from tiny_corpus import encode, read_corpus
from tiny_evaluation import load, nats_of

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most
from benchmarks.record.results import ROOT
from benchmarks.shared.gguf_files import TypeOf, bfloat16, q4_k_m, quantized, write_gguf
from gguf_models import unpacked_model
from moesched.models.checkpoint import open_checkpoint
from moesched.system.cache import cache_folder

MODEL = "tiny-mixtral-256"
SHIPPED = ROOT / "examples" / f"{MODEL}.gguf"
TRAIN = ("tools/train_tiny_mixtral.py", "--recipe", MODEL, "--steps", "1500", "--threads", "1")
MOST_LOSS = 0.005
"""Of the perplexity, by Q8_0."""
TYPES: dict[str, TypeOf | None] = {
    "BF16": bfloat16,
    "Q8_0": quantized(GGMLQuantizationType.Q8_0),
    "Q4_K_M": q4_k_m,
    "as shipped": None,
}


def claims(result: Result) -> Iterator[Claim]:
    """Perplexity in Q8_0 against that in bfloat16, and that of the shipped file."""
    of = {row["type"]: row["perplexity"] for row in result["types"]}
    words = f"perplexity of {MODEL} on held-out text in Q8_0, over that in bfloat16"
    yield at_most(words, abs(of["Q8_0"] / of["BF16"] - 1), MOST_LOSS, "{:.3%}")
    words = f"perplexity of {MODEL} on held-out text in bfloat16, in Q4_K_M, in the file that ships"
    yield Claim(words, ", ".join(f"{of[each]:.2f}" for each in ("BF16", "Q4_K_M", "as shipped")))


BENCHMARK = Benchmark(
    __file__, __doc__, claims=claims, parts=TYPES, also=[TRAIN[0], "tools/tiny_training.py"], by_machine=False
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each type, and write what was found."""
    options = BENCHMARK.parse(arguments)
    folder = trained()
    corpus = read_corpus()
    rows = [
        {"type": each, **measured(folder, each, corpus.held_out)} for each in track(options.only, "types")
    ]
    return BENCHMARK.write({"training": shlex.join(["python", *TRAIN]), "types": rows})


def trained() -> Path:
    """The folder of the trained weights, in the cache folder; trained now if there is none."""
    folder = cache_folder() / MODEL
    if not folder.exists():
        with TemporaryDirectory(dir=cache_folder()) as begun:
            subprocess.run([sys.executable, *TRAIN, "--out", f"{begun}/{MODEL}"], cwd=ROOT, check=True)
            Path(begun, MODEL).rename(folder)
    return folder


def measured(folder: Path, kind: str, texts: Sequence[str]) -> dict[str, Any]:
    """The perplexity of the weights in a type, and the bytes of their file."""
    checkpoint = open_checkpoint(folder)
    documents = encode(load(folder)[1], texts)
    with TemporaryDirectory() as temporary:
        file = Path(temporary, SHIPPED.name)
        type_of = TYPES[kind]
        if type_of is None:
            shutil.copy(SHIPPED, file)
        else:
            write_gguf(checkpoint, file, type_of)
        model, nbytes = unpacked_model(file, checkpoint.config), file.stat().st_size
        tokens = sum(len(document) - 1 for document in documents)
        perplexity = math.exp(nats_of(model, documents) / tokens)
    return {"perplexity": round(perplexity, 4), "tokens": tokens, "bytes": nbytes}


if __name__ == "__main__":
    sys.exit(main())
