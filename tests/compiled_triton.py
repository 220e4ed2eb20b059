"""Compiles the kernels in Triton for a GPU of some compute capability, which need not be there: `python … 80`."""

from __future__ import annotations

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moesched.devices.kernels import triton_code as code

HALF, SINGLE, LONG, INT = "*bf16", "*fp32", "*i64", "*i32"
PRODUCT = {"BLOCKS": 2, "ROWS": 16, "OUTPUTS": 32, "COLUMNS": 128}
HEADS = {"HEADS": 32, "KV_HEADS": 8}
CACHE = {**HEADS, "HEAD": 128, "HEAD_TILE": 128, "GROUP_TILE": 16, "SPLIT": 512}
TYPES = {
    "attention_inputs": [HALF, HALF, LONG, SINGLE, SINGLE, *[HALF] * 5, "i32", "i32", "fp32", "fp32"],
    "attend": [*[HALF] * 3, "i64", "i64", LONG, *[SINGLE] * 3, "i32", "fp32", "i32"],
    "join_parts": [*[SINGLE] * 3, LONG, HALF, "i32"],
    "output_projection": [HALF, LONG, HALF, HALF, "i32", "i32", "i32"],
    "route": [HALF, HALF, LONG, HALF, LONG, SINGLE, SINGLE, "i32", "i32", "fp32"],
    "sort_rows": [LONG, LONG, INT, LONG, "i32", "i32"],
    "gate_and_up": [HALF, INT, LONG, LONG, LONG, HALF, "i32", "i32"],
    "down": [HALF, LONG, LONG, HALF, "i32", "i32"],
    "combine": [HALF, LONG, SINGLE, HALF, HALF, "i32"],
}
SIZES = {
    "attention_inputs": {**HEADS, "HALF": 64, "PAIRS": 64, "BLOCKS": 2, "LAYER": False, "HEAD_NORM": True}
    | {"CLIPS": True, "ROWS": 16, "COLUMNS": 128},
    "attend": {**CACHE, "BLOCK": 16, "TOKENS": 64},
    "join_parts": CACHE,
    "output_projection": PRODUCT,
    "route": {"EXPERTS": 8, "TOP_K": 2, "LAYER": True, "SUM_TO_ONE": True, **PRODUCT, "OUTPUTS": 16},
    "sort_rows": {"PAIRS": 128, "EXPERTS": 16},
    "gate_and_up": {"TOP_K": 2, "GATHERS": True, **PRODUCT},
    "down": PRODUCT,
    "combine": {"TOP_K": 2, "COLUMNS": 1024},
}


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for name, types in TYPES.items():
        kernel, sizes = getattr(code, name), SIZES[name]
        given = [each for each in kernel.arg_names if each not in sizes]
        signature = dict(zip(given, types, strict=True)) | dict.fromkeys(sizes, "constexpr")
        made = triton.compile(ASTSource(kernel, signature, sizes, {}), target=target)
        sys.stdout.write(f"{name} {made.metadata.shared}\n")


if __name__ == "__main__":
    main()
