"""The kernels for Arm, compiled by Debian's cross compiler and run by QEMU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[1] / "devices" / "native"
COMPILER, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
OPTIONS = ["-std=gnu11", "-O1", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra", "-Werror"]

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(QEMU)),
    reason=f"needs {COMPILER} and {QEMU}: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user",
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program for each test in C."""
    folder = tmp_path_factory.mktemp("arm")
    subprocess.run([COMPILER, *OPTIONS, "-c", *sorted(NATIVE.glob("*.c"))], cwd=folder, check=True)
    kernels = sorted(folder.glob("*.o"))
    for name in ("products", "attention"):
        test = Path(__file__).with_name(f"{name}_on_arm.c")
        subprocess.run(
            [COMPILER, *OPTIONS, "-static", test, *kernels, "-lm", "-o", folder / name], check=True
        )
    return folder


def sets_that_compute_right(program: Path, processor: str) -> list[str]:
    """Run a test in C on an imitated processor; returns the instruction sets that it tried."""
    done = subprocess.run([QEMU, "-cpu", processor, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout.split()


@pytest.mark.parametrize("name", ["products", "attention"])
def test_kernels_are_right_with_every_instruction_set_of_arm(programs: Path, name: str) -> None:
    sets = ["neon_bf16", "neon_dotprod", "neon", "portable"]
    assert sets_that_compute_right(programs / name, "max") == sets


def test_a_processor_computes_with_the_instructions_that_it_has(programs: Path) -> None:
    sets = ["neon_dotprod", "neon", "portable"]
    assert sets_that_compute_right(programs / "attention", "neoverse-n1") == sets
    assert sets_that_compute_right(programs / "attention", "cortex-a72") == sets[1:]
