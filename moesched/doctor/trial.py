"""Tries a device: runs a tiny random model under every policy, and checks that runs end properly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moesched.doctor.endings import check_interrupt, check_lack_of_memory, check_memory, judge_peak
from moesched.doctor.examination import cuda_facts, library_bytes, metal_facts
from moesched.doctor.facts import Facts
from moesched.doctor.findings import Finding
from moesched.doctor.policy_runs import PolicyRuns, generate, judge_runs, run_policies
from moesched.doctor.tiny_model import TINY
from moesched.errors import MoeschedError
from moesched.system.scratch import scratch_folder
from moesched.testing.device_checks import write_decisive_model

Progress = Callable[[float, float, str], object]

GPU_STREAMS = 3
"""Number of streams of a run on a GPU: one for kernels, and one for copies in each direction."""
CPU = "torch"
"""The device that all others are compared with."""


def try_device(device: str, facts: Facts, progress: Progress) -> list[Finding]:
    """Run a tiny model on a device under every policy, run the checks of how runs end, and return all findings.

    Args:
        device: "cpu", "cuda" or "mlx".
        facts: the facts about this machine.
        progress: called with (policies done, all policies, name of the running one).
    """
    if reason := _why_not(device, facts):
        return [Finding(about="trial", says=f"nothing ran on {device}: {reason}", remedy="mend that first")]
    name = CPU if device == "cpu" else device
    with scratch_folder() as folder:
        model = write_decisive_model(TINY, folder / "model").path
        libraries = GPU_STREAMS * library_bytes() if device == "cuda" else 0
        found = run_policies(model, name, folder, progress)
        expected = _expected(model, found)
        findings = list(judge_runs(found, one_processor=device != "cuda", expected=expected))
        findings += _peaks(device, found, libraries)
        progress(0, 3, "the memory of a run")
        findings.append(check_memory(model, name))
        progress(1, 3, "a run without memory")
        findings.append(check_lack_of_memory(model, name, facts, folder))
        progress(2, 3, "a run that is interrupted")
        findings.append(check_interrupt(model, name, folder))
    return findings


def _why_not(device: str, facts: Facts) -> str:
    """Return the reason why nothing can run on a device; empty if runs are possible."""
    if device == "cuda" and not facts.cuda.gpus:
        return "torch can use no GPU"
    if device == "mlx" and facts.metal is not None and facts.metal.problem:
        return "MLX cannot be loaded"
    return ""


def _expected(model: Path, found: PolicyRuns) -> list[list[int]]:
    """Return the tokens that the policy `resident` generates on the CPU, one list per request."""
    try:
        return generate(model, CPU).tokens or []
    except MoeschedError as error:
        found.failed["resident on the CPU"] = str(error)
        return []


def _peaks(device: str, found: PolicyRuns, libraries: int) -> list[Finding]:
    """Return the finding that compares the measured peak of the device's memory with the predicted; none on the CPU.

    The prediction is the largest peak that a run's plan predicts, plus the bytes that CUDA's libraries take.

    Args:
        libraries: bytes of GPU memory that CUDA's libraries take; 0 for MLX.
    """
    if device == "cuda":
        memory, peak = "gpu", cuda_facts().peak
    elif device == "mlx":
        memory, peak = "host", metal_facts().peak
    else:
        return []
    planned = max((run.report.peak_bytes.get(memory, 0) for run in found.runs.values()), default=0)
    about = "memory of the GPU" if device == "cuda" else "memory of MLX"
    return [judge_peak(about, planned + libraries, peak)]
