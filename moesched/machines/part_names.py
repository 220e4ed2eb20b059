"""Finds parts by name in any spelling: "3090", "RTX3090" and "GeForce RTX 3090" are one GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from difflib import SequenceMatcher

from moesched.errors import BadInput
from moesched.machines.parts import Chip, Cpu, Gpu, Part, PartT, library
from moesched.system.plain_text import shown

NEAREST = 3
LONGEST_NAME = 100
MOST_PARTS = 64

_COUNTED = re.compile(r"\s*([0-9]{1,4})\s*[x×]\s+(.*\S)\s*|\s*([0-9]{1,4})[x×]([^0-9\s].*\S)\s*")
_VENDORS = {
    "nvidia",
    "geforce",
    "tesla",
    "amd",
    "radeon",
    "intel",
    "core",
    "apple",
    "gpu",
    "cpu",
    "processor",
}


def find_gpu(name: str) -> tuple[Gpu, int]:
    """Find a GPU by a text such as "RTX 3090" or "2x RTX 3090"; return the GPU and the number of GPUs.

    Raises:
        BadInput: no GPU in the library of parts fits the name, several fit equally well, or the number is impossible.
    """
    count, name = counted(name, "--gpu", "2x RTX 3090")
    return find_part(name, library().gpus, "GPU"), count


def find_cpu(name: str) -> tuple[Cpu, int]:
    """Find a CPU by a text such as "Ryzen 7950X" or "2x EPYC 7763"; return the CPU and the number of sockets.

    Raises:
        BadInput: no CPU in the library of parts fits the name, several fit equally well, or the number is impossible.
    """
    count, name = counted(name, "--cpu", "2x EPYC 7763")
    return find_part(name, library().cpus, "CPU"), count


def find_chip(name: str) -> Chip:
    """Find a chip whose CPU and GPU share one memory, by its name.

    Raises:
        BadInput: no chip in the library of parts fits the name, or several fit equally well.
    """
    return find_part(name, library().chips, "chip")


def option_of_part(name: str) -> str | None:
    """Return the option of `moesched machine` for a part, such as '--gpu "RTX 3090"'; None if no part fits the name."""
    asked = Counter(_words(name))
    for kind, parts in library().named.items():
        if asked and any(_words_more(part, asked) is not None for part in parts.values()):
            return f'--{kind} "{name}"'
    return None


def counted(name: str, option: str, example: str) -> tuple[int, str]:
    """Split a text such as "2x RTX 3090" into the number and the name; the number is 1 if the text gives none.

    Args:
        option: the option that gave the text, such as "--gpu", for the error message.
        example: a correct text, for the error message.

    Raises:
        BadInput: the number is 0, or larger than any machine has.
    """
    match = _COUNTED.fullmatch(name)
    if match is None:
        return 1, name
    count = int(match[1] or match[3])
    if not 1 <= count <= MOST_PARTS:
        raise BadInput(f"{option} {shown(name)}: give a number from 1 to {MOST_PARTS}, such as {example!r}")
    return count, match[2] or match[4]


def find_part(name: str, parts: Mapping[str, PartT], kind: str) -> PartT:
    """Find the part whose name has all words of `name`, and the fewest others.

    Args:
        parts: parts by name.
        kind: "GPU", "CPU" or "chip", for the error message.

    Raises:
        BadInput: there is no such part, or several parts fit equally well.
    """
    asked = Counter(_words(name))
    extra = {part.name: _words_more(part, asked) for part in parts.values()}
    fitting = {each: more for each, more in extra.items() if more is not None}
    if not asked or not fitting:
        raise BadInput(_unknown(name, parts, kind))
    fewest = min(fitting.values())
    best = [each for each, more in fitting.items() if more == fewest]
    if len(best) > 1:
        raise BadInput(f"{shown(name)} fits several: name one of {', '.join(best)}")
    return parts[best[0]]


def nearest(name: str, parts: Mapping[str, Part]) -> list[str]:
    """Return the three names of parts that are spelt most like a name, nearest first."""
    asked = _squeezed(name)
    ratios = {each: SequenceMatcher(None, asked, _squeezed(each)).ratio() for each in parts}
    return sorted(parts, key=lambda each: -ratios[each])[:NEAREST]


def _unknown(name: str, parts: Mapping[str, Part], kind: str) -> str:
    other = _of_another_kind(name, kind)
    if other:
        return f"{shown(name)} is not a {kind}: {other}"
    first, second, third = nearest(name, parts)
    return (
        f"no {kind} {shown(name)} in the library: the nearest are {first}, {second} and {third}; "
        "`moesched list parts` names all"
    )


def _of_another_kind(name: str, kind: str) -> str:
    """Return advice to use another option if the name is a part of another kind than `kind`; else an empty text."""
    asked = _squeezed(name)
    for other, parts in library().named.items():
        for each in parts:
            if other != kind.lower() and asked and _squeezed(each) == asked:
                return f"use --{other} {each!r}"
    return ""


def _words(name: str) -> list[str]:
    """Split a name into lower-case words, each of letters only or of digits only; words in `_VENDORS` are left out."""
    found = re.findall(r"[a-z]+|[0-9]+", name[:LONGEST_NAME].lower())
    return [word for word in found if word not in _VENDORS]


def _words_more(part: Part, asked: Counter[str]) -> int | None:
    """Return how many words a part's name has beyond those in `asked`; None if it lacks a word in `asked`.

    The words in `asked` may include the size of a GPU's memory, such as 24GB.
    """
    has = Counter(_words(part.name))
    size = Counter(_words(part.memory.replace("GiB", "GB")) if isinstance(part, Gpu) else [])
    if any(word.isdecimal() and word not in asked for word in size):
        size = Counter()
    return None if asked - has - size else (has - asked).total()


def _squeezed(name: str) -> str:
    return "".join(_words(name))
