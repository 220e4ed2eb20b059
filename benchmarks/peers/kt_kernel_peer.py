"""kt-kernel's experts on the CPU, by its C++ module for the best instruction set here: the package needs CUDA."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import torch

from moesched.system.cores import usable_cores
from peers.expert import EXPERTS, HIDDEN, ROWS, WIDTH, answers, experts
from peers.protocol import Answer, Message, serve

MODULE = "kt_kernel_ext"


def load() -> tuple[Answer, Message]:
    """All experts as one layer of theirs."""
    matrices, module = experts(), native_module()
    pool = module.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [usable_cores()]
    processor = module.CPUInfer(pool)
    on_gpu = torch.zeros(EXPERTS, dtype=torch.bool)
    layer = module.moe.MOEConfig(EXPERTS, 1, HIDDEN, WIDTH, on_gpu.data_ptr())
    layer.layer_idx, layer.pool, layer.max_len = 0, processor.backend_, max(ROWS)
    for index, name in enumerate(("gate", "up", "down")):
        setattr(layer, f"{name}_projs", [[expert[index].data_ptr() for expert in matrices]])
        setattr(layer, f"{name}_scales", [[0] * EXPERTS])
    moe = module.moe.AMXBF16_MOE(layer)
    order = torch.arange(EXPERTS)
    processor.submit(moe.load_weights_task(order.data_ptr()))
    processor.sync()

    # The layer has the address of `on_gpu`, which must live on.
    def call(number: int, x_nD: torch.Tensor, on_gpu: torch.Tensor = on_gpu) -> torch.Tensor:
        rows = len(x_nD)
        y_nD, chosen, weights = torch.empty_like(x_nD), torch.full((rows, 1), number), torch.ones(rows, 1)
        count = torch.tensor([rows], dtype=torch.int32)
        arrays = [each.data_ptr() for each in (chosen, weights, x_nD, y_nD)]
        processor.submit(moe.forward_task(count.data_ptr(), 1, *arrays, False))
        processor.sync()
        return y_nD

    return answers(matrices[0], call), {"versions": {"kt-kernel": version("kt-kernel")}}


def native_module() -> Any:
    """The module for this processor, without the package around it."""
    suffix = "amx" if "amx_bf16" in Path("/proc/cpuinfo").read_text() else "avx512_bf16"
    files = distribution("kt-kernel").files or []
    [file] = [each for each in files if each.name.startswith(f"_{MODULE}_{suffix}.")]
    spec = importlib.util.spec_from_file_location(MODULE, file.locate())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    serve(load)
