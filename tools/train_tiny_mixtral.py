"""Train the small Mixture-of-Experts models of the examples on the docstrings that come with Python."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Read when torch is loaded. Where others use the cores too, spinning made training up to five times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Of the package `benchmarks`, which writes GGUF files.
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from tiny_corpus import Corpus, encode, read_corpus, train_tokenizer
from tiny_evaluation import measure
from tiny_gguf import write_shipped
from tiny_page import readme
from tiny_training import RECIPES, Recipe, new_model, train
from transformers import MixtralForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

GUIDE = """\
Train a Mixtral small enough to ship: Mixture-of-Experts, top-2 routing, grouped-query attention, about 7 million
parameters. The text is every docstring of this Python's own standard library, so nothing is downloaded. One module
in twenty is held out; all figures are measured on those, with the bfloat16 weights as they were written.

What happens, in order:
  1. docstrings are read with ast, in a fixed order, each kept once
  2. a byte-level BPE tokenizer is trained on them (any prompt can be encoded)
  3. the model trains until the time is up; the learning rate follows a cosine over that time
  4. the directory is written as Hugging Face writes it, read back and measured
  5. training.json and README.md state what was measured; exit code 1 when a bar is missed
  6. with --gguf, the weights are also written as GGUF in Q4_K_M, with the tokenizer

The seed fixes weights and order of text. The number of steps depends on the machine, unless --steps gives it.
"""
EXAMPLES = """\
examples:
  python tools/train_tiny_mixtral.py --out out/mine                  the shipped recipe, under 15 minutes on 2 cores
  python tools/train_tiny_mixtral.py --out out/quick --minutes 1     a rough one, to see it work
  python tools/train_tiny_mixtral.py --out out/even --balance 0.05   experts used more evenly
  python tools/train_tiny_mixtral.py --recipe tiny-mixtral-256 --steps 1500 --threads 1 \\
      --gguf examples/tiny-mixtral-256.gguf                          the shipped GGUF file
"""

LONGEST_MINUTES = 15.0
LARGEST_BYTES = 16_000_000
LEAST_WORDS = 0.80  # share of the written words that are words of the training text
LEAST_SHARE = 0.02  # of a layer's tokens, for its least used expert
LEAST_RATIO = 1.5  # a layer's most used expert over its least used


def machine_name() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def corpus_figures(corpus: Corpus) -> dict[str, Any]:
    """Figures of the text."""
    return {
        "python": platform.python_version(),
        "training_docstrings": len(corpus.training),
        "training_bytes": sum(len(text.encode()) for text in corpus.training),
        "training_words": len(corpus.words()),
        "held_out_docstrings": len(corpus.held_out),
        "held_out_bytes": sum(len(text.encode()) for text in corpus.held_out),
    }


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=GUIDE, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--recipe", choices=RECIPES, default="tiny-mixtral", help="the model (default: %(default)s)")
    flag("--out", type=Path, help="directory to write (default: that of the recipe)")
    flag(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="GGUF file to write, for rows of whole blocks of 256 weights",
    )
    flag("--minutes", type=float, default=13.0, help="how long to train (default: %(default)s)")
    flag("--steps", type=int, help="train this many steps instead, the same on every machine")
    flag("--balance", type=float, default=Recipe.balance, help="load-balancing weight (default: %(default)s)")
    flag("--seed", type=int, default=Recipe.seed, help="of weights and text order (default: %(default)s)")
    flag("--threads", type=int, default=2, help="for torch (default: %(default)s)")
    chosen = parser.parse_args(argv)
    if chosen.minutes <= 0 or (chosen.steps is not None and chosen.steps < 1) or chosen.threads < 1:
        parser.error("--minutes, --steps and --threads must be positive")
    recipe = RECIPES[chosen.recipe]
    if chosen.gguf and recipe.hidden % 256:
        parser.error(f"rows of {chosen.recipe} are no multiple of 256: give --recipe tiny-mixtral-256")
    chosen.out = chosen.out or Path(__file__).resolve().parent.parent / recipe.folder
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Train, write, measure; 0 when every bar is reached."""
    chosen = arguments(argv)
    began = time.monotonic()
    torch.set_num_threads(chosen.threads)
    transformers_logging.disable_progress_bar()
    recipe = replace(RECIPES[chosen.recipe], balance=chosen.balance, seed=chosen.seed)

    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus.training, recipe.vocabulary, recipe.context)
    model = new_model(recipe)
    took = train(model, encode(tokenizer, corpus.training), recipe, chosen.minutes, chosen.steps)
    save(model, tokenizer, chosen.out)
    if chosen.gguf:
        write_shipped(chosen.out, chosen.gguf)

    figures: dict[str, Any] = {"recipe": asdict(recipe), "corpus": corpus_figures(corpus)}
    figures["training"] = took | {
        "threads": chosen.threads,
        "machine": machine_name(),
        "torch": torch.__version__,
    }
    figures |= measure(chosen.out, corpus)
    minutes = (time.monotonic() - began) / 60
    figures["total_minutes_with_measuring"] = round(minutes, 2)
    (chosen.out / "README.md").write_text(readme(recipe, figures), encoding="utf-8")
    (chosen.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

    missed = missed_bars(figures, size_of(chosen.out), minutes)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    held_out = figures["held_out_bits_per_byte"]
    print(f"{chosen.out}: {held_out} bits per byte held out, {size_of(chosen.out):,} bytes")
    return 1 if missed else 0


def missed_bars(figures: dict[str, Any], total_bytes: int, minutes: float) -> list[str]:
    """Bars that the model misses, one line each."""
    share = figures["words"]["share_of_known_words"]
    least, evenest = figures["least_expert_share"], min(figures["most_over_least_by_layer"])
    bars = [
        (total_bytes <= LARGEST_BYTES, f"{total_bytes} bytes, more than {LARGEST_BYTES}: a smaller recipe"),
        (minutes <= LONGEST_MINUTES, f"{minutes:.1f} minutes, more than {LONGEST_MINUTES}: lower --minutes"),
        (share >= LEAST_WORDS, f"{share:.1%} known words, less than {LEAST_WORDS:.0%}: raise --minutes"),
        (least >= LEAST_SHARE, f"an expert with {least:.1%}, less than {LEAST_SHARE:.0%}: raise --balance"),
        (evenest >= LEAST_RATIO, f"a layer at {evenest:.2f}x, less than {LEAST_RATIO}x: lower --balance"),
    ]
    return [line for reached, line in bars if not reached]


def save(model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write weights in bfloat16, config and tokenizer as an ordinary Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config.pad_token_id = model.config.eos_token_id
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def size_of(directory: Path) -> int:
    """Bytes of all files directly in a directory."""
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file())


if __name__ == "__main__":
    sys.exit(main())
