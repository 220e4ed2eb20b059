"""Products with AMX, whose tiles are imitated in C: no processor with AMX is needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from moesched.devices.native.compiled import instruction_sets

PROGRAM = Path(__file__).with_name("coded_by_tiles.c")


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
@pytest.mark.skipif("avx512_bf16" not in instruction_sets(), reason="needs VNNI, as few rows do with AMX")
def test_coded_products_by_tiles_have_the_bits_of_portable_c(tmp_path: Path) -> None:
    program = tmp_path / "coded_by_tiles"
    options = ["-std=gnu11", "-O0", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *options, PROGRAM, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
