"""Computation in float16: chosen for GPUs without bfloat16, near float32, and an overflow is named with its remedy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import moesched
from benchmarks.shared.small_runs import ONE_MEMORY, TWO_MEMORIES, generate
from commands import refused
from moesched.devices.torch.cuda_device import assumed_flops, dtype_on, with_float16
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.inputs.dtype import dtype_for, dtype_of_nodes
from moesched.machines import Machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.random_model import write_random_model
from moesched.plugins import make_policy
from odd_models import PROMPTS, WIDE, stored


class OldGpu(TorchDevice):
    """The torch device, as if it were a GPU of compute capability 7.5."""

    @staticmethod
    def chosen_dtype(own: str) -> str:
        return dtype_on((7, 5), own)


OLD_GPU = f"{__name__}:OldGpu"
NO_FLOAT16 = "device emulated does not compute in float16: give --dtype bfloat16"


@pytest.mark.parametrize(
    ("capability", "own", "chosen"),
    [
        ((7, 0), "bfloat16", "float16"),
        ((7, 5), "bfloat16", "float16"),
        ((7, 5), "float32", "float32"),
        ((8, 0), "bfloat16", "bfloat16"),
        ((12, 0), "bfloat16", "bfloat16"),
    ],
)
def test_gpus_before_capability_8_compute_bfloat16_models_in_float16(
    capability: tuple[int, int], own: str, chosen: str
) -> None:
    assert dtype_on(capability, own) == chosen


def with_rates(machine: Machine, flops: Mapping[str, float]) -> Machine:
    processors = {
        name: msgspec.structs.replace(each, flops=dict(flops)) for name, each in machine.processors.items()
    }
    return msgspec.structs.replace(machine, processors=processors)


def test_the_device_chooses_and_a_prediction_follows_the_rates_of_the_machine() -> None:
    old = with_rates(TWO_MEMORIES, with_float16(assumed_flops((7, 5))))
    new = with_rates(TWO_MEMORIES, with_float16(assumed_flops((8, 6))))
    assert [dtype_for("bfloat16", None, machine) for machine in (old, new)] == ["float16", "bfloat16"]
    assert dtype_for("bfloat16", None, new, OLD_GPU) == "float16"
    assert dtype_for("bfloat16", None, old, "torch") == "bfloat16"
    assert dtype_for("bfloat16", "float32", old, OLD_GPU) == "float32"
    with pytest.raises(BadInput, match=NO_FLOAT16):
        dtype_for("bfloat16", "float16", old, "emulated")


def test_nodes_whose_gpu_has_no_bfloat16_ask_for_a_format_of_all_nodes() -> None:
    with pytest.raises(BadInput, match="has no bfloat16 here: give --dtype float16, which all nodes"):
        dtype_of_nodes("bfloat16", None, TWO_MEMORIES, OLD_GPU)
    assert dtype_of_nodes("bfloat16", "float16", TWO_MEMORIES, OLD_GPU) == "float16"
    assert dtype_of_nodes("bfloat16", None, TWO_MEMORIES, "torch") == "bfloat16"
    assert dtype_of_nodes("float32", None, TWO_MEMORIES, OLD_GPU) == "float32"


def bfloat16_model(folder: Path) -> Path:
    return write_random_model(
        msgspec.structs.replace(WIDE, dtype="bfloat16"), folder / "model", dtype="bfloat16"
    )


def test_a_run_on_such_a_gpu_names_float16_in_its_report_and_its_json(command: Any, tmp_path: Path) -> None:
    model = bfloat16_model(tmp_path)
    options = ("--policy", "resident", "--device", OLD_GPU, "--prompt-ids", "5,6", "--max-new-tokens", "2")
    assert "(float16 instead of bfloat16), measured" in command("run", model, *options).out
    found = command("run", model, *options, "--json").json
    assert (found["dtype"], found["model_dtype"]) == ("float16", "bfloat16")
    old = with_rates(TWO_MEMORIES, with_float16(assumed_flops((7, 5))))
    report = moesched.simulate_model(model, machine=old, policy="resident", workload=[[1, 2, 3]], gen=2)
    assert (report.dtype, report.model_dtype) == ("float16", "bfloat16")
    refused(
        command(
            "run", model, *options[:3], "emulated", *options[4:], "--dtype", "float16", "--machine", "t4"
        ),
        NO_FLOAT16,
    )


@pytest.mark.parametrize("policy", ["resident", "cgopipe", "cpu_ffn"])
def test_it_is_nearer_to_float32_than_bfloat16(tmp_path: Path, policy: str) -> None:
    """Also attention and experts on the host, for which no native kernels compute in float16."""
    checkpoint = stored(WIDE, tmp_path)

    def logits(dtype: str, kernel: str = "auto") -> Any:
        device = TorchDevice(checkpoint, weight_layout(WIDE, dtype), keep_logits=True, kernel=kernel)
        machine = ONE_MEMORY if policy == "resident" else TWO_MEMORIES
        found = generate(device, make_policy(policy), machine, PROMPTS, new_tokens=3, micro_batch_size=2)
        return found.logits_RSV.float().numpy()

    exact = logits("float32")
    off = np.abs(logits("float16") - exact).max()
    assert 0 < off < 0.3 * np.abs(logits("bfloat16") - exact).max()


def with_large_outputs(folder: Path) -> Path:
    """A model whose second layer adds more to the residual than float16 holds."""
    write_random_model(WIDE, folder, seed=3, dtype="float32")
    for name, tensor in open_checkpoint(folder).tensors.items():
        if name.startswith("layers.1.experts."):
            matrix = np.memmap(tensor.file, np.float32, "r+", tensor.offset, tensor.shape)
            matrix *= 500
            matrix.flush()
    return folder


def test_an_overflow_ends_the_run_with_the_layer_and_the_remedy(command: Any, tmp_path: Path) -> None:
    model = with_large_outputs(tmp_path / "model")
    options = ("run", model, "--policy", "resident", "--prompt-ids", "5,6,7", "--max-new-tokens", "2")
    said = command(*options, "--dtype", "float16")
    assert said.code == 2
    assert "of layer 1: generation stops there; float16 ends at 65,504: use --dtype float32" in said.err
    assert "Traceback" not in said.err
    assert command(*options, "--dtype", "float32").code == 0
