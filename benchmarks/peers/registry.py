"""The peers, and the settings that each is tried with in each part."""

from __future__ import annotations

from benchmarks.peers.environment import Peer
from benchmarks.peers.protocol import Message


def ours(*policies: str, direct: bool, micro_batch: int = 64) -> dict[str, Message]:
    """Settings of ours, by name."""
    return {policy: {"policy": policy, "direct": direct, "micro_batch": micro_batch} for policy in policies}


STREAMING = ("layer_streaming", "cgopipe", "expert_streaming", "lru_offload")
EXPERTS = {experts: {"experts": experts} for experts in ("eager", "grouped_mm")}

OURS = Peer("moesched", "moesched_peer", settings=ours("resident", direct=False))
OURS_MAPPED = OURS._replace(settings=ours(*STREAMING, direct=False))
OURS_DIRECT = OURS._replace(settings=ours(*STREAMING, direct=True))
OURS_ON_DISK = OURS._replace(
    settings=ours(*STREAMING, "expert_cache", "prefetch_gate", "fate", direct=True, micro_batch=8)
)

LLAMA_CPP = Peer(
    "llama.cpp",
    "llama_cpp_peer",
    requirements=("--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36", "gguf==0.19.0"),
    installing={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
    settings={
        "flash attention": {"flash_attention": True},
        "no flash attention": {"flash_attention": False},
    },
)
LLAMA_CPP_MAPPED = LLAMA_CPP._replace(settings={"mmap": {"flash_attention": True}})

KEEPING_MEMORY = {
    "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{limit}_threshold={8 << 30}" for limit in ("mmap", "trim"))
}
"""Has freed memory used again, and not given back: each prompt would have the system make its pages again."""

HUGGING_FACE = Peer("Hugging Face", "hugging_face_peer", settings=EXPERTS, environment=KEEPING_MEMORY)
ACCELERATE = Peer("Accelerate", "hugging_face_peer", settings=EXPERTS)

MLX_LM = Peer("mlx-lm", "mlx_lm_peer", settings={"float32": {}}, seconds=60.0)

RESIDENT = (OURS, LLAMA_CPP, HUGGING_FACE, MLX_LM)
PAGE_CACHE = (OURS_MAPPED, ACCELERATE)
CAPPED = (OURS_DIRECT, ACCELERATE._replace(seconds=180.0), LLAMA_CPP_MAPPED)
