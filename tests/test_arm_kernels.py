"""The kernels for Arm, compiled by Debian's cross compiler and run by QEMU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[1] / "devices" / "native"
COMPILER, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"


@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(QEMU)),
    reason=f"needs {COMPILER} and {QEMU}: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user",
)
@pytest.mark.parametrize("kernels", ["products", "attention"])
def test_kernels_are_right_with_every_instruction_set_of_arm(kernels: str, tmp_path: Path) -> None:
    program = tmp_path / kernels
    test = Path(__file__).with_name(f"{kernels}_on_arm.c")
    sources = [str(each) for each in (test, *sorted(NATIVE.glob("*.c")))]
    flags = ["-std=gnu11", "-O2", "-ffp-contract=off", "-static", "-pthread"]
    subprocess.run([COMPILER, *flags, *sources, "-lm", "-o", str(program)], check=True)
    done = subprocess.run([QEMU, "-cpu", "max", str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["neon_bf16", "neon", "portable"]), done.stdout
