"""A library of kernels that cannot be used is told in one line, and torch does its work."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from moesched.devices.kernels.torch_kernels import rows_for_native
from moesched.devices.native.compiled import (
    TORCH,
    VERSION,
    availability,
    check_choice,
    instruction_sets,
    load,
)
from moesched.devices.products.crossover import Shape
from moesched.errors import BadInput

COMPILER = sysconfig.get_config_var("CC").split()[0]


def compiled(folder: Path, source: str) -> Path:
    library = folder / "_kernels.so"
    command = [COMPILER, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    try:
        subprocess.run(command, input=source.encode(), check=True)
    except FileNotFoundError:
        pytest.skip(f"there is no {COMPILER}")
    return library


def test_a_damaged_library_does_not_load(tmp_path: Path) -> None:
    damaged = tmp_path / "_kernels.so"
    damaged.write_bytes(b"not a library")
    reason = load([damaged])
    assert isinstance(reason, str)
    assert reason.startswith("_kernels.so does not load (")


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_library_of_another_version_is_not_used(tmp_path: Path, version: int) -> None:
    library = compiled(tmp_path, f"int moesched_version(void) {{ return {version}; }}")
    assert load([library]) == f"_kernels.so has version {version} instead of {VERSION}"


def test_a_library_from_before_versions_is_not_used(tmp_path: Path) -> None:
    library = compiled(tmp_path, "int moesched_most_batch(void) { return 32; }")
    assert load([library]) == f"_kernels.so has version 1 instead of {VERSION}"


def test_without_a_library_the_reason_and_the_remedy_are_told() -> None:
    assert load([]) == "it was not compiled when moesched was installed"
    assert availability().startswith(
        "CPU kernels: " if instruction_sets() else "no CPU kernels, torch does without: "
    )


def test_an_instruction_set_that_the_processor_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(
        BadInput,
        match=rf"kernel is 'avx9': give one of auto, torch{''.join(f', {each}' for each in instruction_sets())}",
    ):
        check_choice("avx9")
    check_choice(TORCH)
    assert rows_for_native(TORCH, "bfloat16", Shape(512, 512), packed=False) == 0
