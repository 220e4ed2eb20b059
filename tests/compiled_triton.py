"""Compiles the kernels in Triton for a GPU of some compute capability, which need not be there: `python … 80`.

For each kernel, and each of its tiles, prints the bytes of shared memory and the loads of single numbers in 16 bits.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moesched.devices.kernels import triton_attention, triton_ends, triton_experts
from moesched.devices.kernels.triton_sizes import TILES

HALF, SINGLE, LONG, INT = "*bf16", "*fp32", "*i64", "*i32"
CACHE = {"HEADS": 32, "HEAD": 128, "HEAD_TILE": 128, "SPLIT": 512}
TYPES = {
    "embed": [LONG, LONG, HALF, SINGLE, HALF, SINGLE, SINGLE, "i32"],
    "norm": [HALF, HALF, HALF, "i32", "fp32"],
    "attention_inputs": [HALF, LONG, SINGLE, SINGLE, *[HALF] * 5, "i32", "i32", "fp32", "fp32"],
    "attend": [*[HALF] * 3, LONG, *[HALF] * 2, *[SINGLE] * 3, "i32", "fp32", "i32"],
    "attend_prompts": [HALF, LONG, LONG, HALF, HALF, HALF, "i32", "i32", "fp32", "i32"],
    "join_parts": [*[SINGLE] * 3, LONG, HALF, "i32"],
    "output_projection": [HALF, LONG, HALF, HALF, "i32", "i32", "i32"],
    "route": [HALF, HALF, LONG, HALF, LONG, SINGLE, SINGLE, "i32", "fp32"],
    "sort_rows": [LONG, LONG, INT, LONG, "i32", "i32"],
    "gate_and_up": [HALF, INT, LONG, LONG, LONG, HALF, SINGLE, "i32", "i32", "i32", "i32"],
    "down": [HALF, LONG, LONG, HALF, "i32", "i32", "i32", "i32"],
    "combine": [HALF, LONG, SINGLE, HALF, HALF, "i32"],
    "logits": [HALF, LONG, SINGLE, "i32", "i32", "i32"],
    "likeliest": [SINGLE, LONG, "i32"],
}
SIZES: dict[str, dict[str, Any]] = {
    "embed": {"HALF": 64, "HALF_TILE": 64, "COLUMNS": 1024},
    "norm": {"LAYER": True, "WIDTH": 4096},
    "attention_inputs": {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "BLOCKS": 2}
    | {"INTERLEAVED": True, "HEAD_NORM": True, "CLIPS": True},
    "attend": {**CACHE, "KV_HEADS": 8, "GROUP_TILE": 16, "BLOCK": 16, "TOKENS": 64},
    "attend_prompts": {"HEADS": 32, "KV_HEADS": 8, "HEAD": 128, "HEAD_TILE": 128, "SEQUENCES": 64}
    | {"QUERIES": 64, "TOKENS": 64},
    "join_parts": CACHE,
    "output_projection": {"BLOCKS": 2},
    "route": {"EXPERTS": 8, "TOP_K": 2, "BLOCKS": 2, "LAYER": True, "SUM_TO_ONE": True}
    | {"WIDTH": 4096, "OUTPUTS": 8, "COLUMNS": 1024},
    "sort_rows": {"PAIRS": 128, "READ": 1024, "EXPERTS": 16},
    "gate_and_up": {
        "TOP_K": 2,
        "GATHERS": True,
        "OBSERVED": True,
        "EXPERTS": 8,
        "GATE_BLOCKS": 2,
        "UP_BLOCKS": 1,
    },
    "down": {"EXPERTS": 8, "BLOCKS": 2},
    "combine": {"TOP_K": 2, "COLUMNS": 1024},
    "logits": {"BLOCKS": 1},
    "likeliest": {"COLUMNS": 1024},
}
FILES = (triton_attention, triton_ends, triton_experts)
ALIGNED = {"width", "inputs", "intermediate", "vocabulary"}
"""Numbers that Triton finds to be multiples of 16, as all addresses are."""


def compile_for(target: GPUTarget, name: str, launch: dict[str, Any]) -> tuple[int, int]:
    """Compile a kernel, and return its bytes of shared memory and its loads of single numbers in 16 bits."""
    kernel = next(getattr(file, name) for file in FILES if hasattr(file, name))
    options = {key: launch[key] for key in ("num_warps", "num_stages") if key in launch}
    sizes = SIZES[name] | {key: size for key, size in launch.items() if key not in options}
    given = [each for each in kernel.arg_names if each not in sizes]
    types = dict(zip(given, TYPES[name], strict=True))
    aligned = [
        number
        for number, each in enumerate(kernel.arg_names)
        if each in ALIGNED or types.get(each, "").startswith("*")
    ]
    hints = {(number,): [["tt.divisibility", 16]] for number in aligned}
    source = ASTSource(kernel, types | dict.fromkeys(sizes, "constexpr"), sizes, hints)
    made = triton.compile(source, target=target, options=options)
    return made.metadata.shared, len(re.findall(r"ld\.global\.b16", made.asm["ptx"]))


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for name in TYPES:
        for tile in TILES.get(name, [None]):
            shared, single = compile_for(target, name, tile.launch if tile else {})
            sys.stdout.write(f"{name} {tile.rows if tile else 1} {shared} {single}\n")


if __name__ == "__main__":
    main()
