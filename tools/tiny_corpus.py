"""The text of tiny-mixtral: every docstring of Python's standard library, and a tokenizer trained on it."""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BEGIN, END = "<s>", "</s>"
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """Docstrings, each one once, split by module."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]

    def words(self) -> frozenset[str]:
        """The distinct words of the training text."""
        return frozenset(word for text in self.training for word in words_of(text))


def read_corpus(library: Path | None = None) -> Corpus:
    """The docstrings of the Python library in `library` (default: this interpreter's), in order of module path."""
    library = library or Path(sysconfig.get_paths()["stdlib"])
    split: dict[bool, list[str]] = {False: [], True: []}
    seen: set[str] = set()
    for module in sorted(path.relative_to(library).as_posix() for path in library.rglob("*.py")):
        if not NOT_THE_LIBRARY.isdisjoint(module.split("/")):
            continue
        fresh = [text for text in docstrings(library / module) if text not in seen]
        seen.update(fresh)
        split[is_held_out(module)] += fresh
    return Corpus(tuple(split[False]), tuple(split[True]))


def is_held_out(module: str) -> bool:
    """By a checksum of the module's path, so that the split is the same for every version of Python."""
    return zlib.crc32(module.encode()) % HELD_OUT_ONE_IN == 0


def docstrings(file: Path) -> Iterator[str]:
    """The docstrings of a file's module, classes and functions, dedented."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # some distributions ship templates and deliberately broken files
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def words_of(text: str) -> list[str]:
    """The lower-cased words of a text: unbroken runs of the letters a to z."""
    return re.findall(r"[a-z]+", text.lower())


def train_tokenizer(texts: Sequence[str], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that puts <s> before a prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token=END, model_max_length=context
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Each text as token ids, between <s> and </s>."""
    end = tokenizer.convert_tokens_to_ids(END)
    return [[*ids, end] for ids in tokenizer(list(texts), verbose=False)["input_ids"]]
