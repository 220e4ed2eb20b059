"""Compiles the kernels in Triton for a GPU of some compute capability, which need not be there: `python … 80`."""

from __future__ import annotations

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moesched.devices.kernels import triton_attention, triton_ends, triton_experts

HALF, SINGLE, LONG, INT = "*bf16", "*fp32", "*i64", "*i32"
PRODUCT = {"BLOCKS": 2, "ROWS": 16, "OUTPUTS": 32, "COLUMNS": 128}
HEADS = {"HEADS": 32, "KV_HEADS": 8}
CACHE = {"HEADS": 32, "HEAD": 128, "HEAD_TILE": 128, "SPLIT": 512}
TYPES = {
    "embed": [LONG, LONG, HALF, SINGLE, HALF, SINGLE, SINGLE, "i32"],
    "attention_inputs": [HALF, HALF, LONG, SINGLE, SINGLE, *[HALF] * 5, "i32", "i32", "fp32", "fp32"],
    "attend": [*[HALF] * 3, LONG, *[HALF] * 2, *[SINGLE] * 3, "i32", "fp32", "i32"],
    "join_parts": [*[SINGLE] * 3, LONG, HALF, "i32"],
    "output_projection": [HALF, LONG, HALF, HALF, "i32", "i32", "i32"],
    "route": [HALF, HALF, LONG, HALF, LONG, SINGLE, SINGLE, "i32", "i32", "fp32"],
    "sort_rows": [LONG, LONG, INT, LONG, "i32", "i32"],
    "gate_and_up": [HALF, INT, LONG, LONG, LONG, HALF, "i32", "i32"],
    "down": [HALF, LONG, LONG, HALF, "i32", "i32"],
    "combine": [HALF, LONG, SINGLE, HALF, HALF, "i32"],
    "logits": [HALF, HALF, LONG, SINGLE, "i32", "i32", "i32", "fp32"],
    "likeliest": [SINGLE, LONG, "i32"],
}
SIZES = {
    "embed": {"HALF": 64, "HALF_TILE": 64, "COLUMNS": 1024},
    "attention_inputs": {**HEADS, "HALF": 64, "PAIRS": 64, "BLOCKS": 2, "LAYER": False, "HEAD_NORM": True}
    | {"CLIPS": True, "ROWS": 16, "COLUMNS": 128},
    "attend": {**CACHE, "KV_HEADS": 8, "GROUP_TILE": 16, "BLOCK": 16, "TOKENS": 64},
    "join_parts": CACHE,
    "output_projection": PRODUCT,
    "route": {"EXPERTS": 8, "TOP_K": 2, "LAYER": True, "SUM_TO_ONE": True, **PRODUCT, "OUTPUTS": 16},
    "sort_rows": {"PAIRS": 128, "EXPERTS": 16},
    "gate_and_up": {"TOP_K": 2, "GATHERS": True, "GATE_BLOCKS": 2, "UP_BLOCKS": 1, "ROWS": 16, "OUTPUTS": 32}
    | {"COLUMNS": 128},
    "down": PRODUCT,
    "combine": {"TOP_K": 2, "COLUMNS": 1024},
    "logits": {"LAYER": True, **PRODUCT},
    "likeliest": {"COLUMNS": 1024},
}
FILES = (triton_attention, triton_ends, triton_experts)


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for name, types in TYPES.items():
        kernel = next(getattr(file, name) for file in FILES if hasattr(file, name))
        sizes = SIZES[name]
        given = [each for each in kernel.arg_names if each not in sizes]
        signature = dict(zip(given, types, strict=True)) | dict.fromkeys(sizes, "constexpr")
        made = triton.compile(ASTSource(kernel, signature, sizes, {}), target=target)
        sys.stdout.write(f"{name} {made.metadata.shared}\n")


if __name__ == "__main__":
    main()
