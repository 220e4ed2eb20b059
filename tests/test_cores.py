"""The number of cores respects the CPU quota of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesched.system.cores import affinity, cpu_quota, usable_cores

UNLIMITED = 2**31


def quota(folder: Path, own: str, files: dict[str, str]) -> int:
    """The quota of a process in these control groups."""
    for name, text in files.items():
        path = folder / "cgroups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    return cpu_quota(folder / "cgroups", folder / "own")


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/box/job", {"box/cpu.max": "150000 100000", "box/job/cpu.max": "max 100000"}, 2),
        ("0::/box/job", {"box/cpu.max": "800000 100000", "box/job/cpu.max": "50000 100000"}, 1),
        (
            "4:cpu,cpuacct:/box",
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "300000", "cpu,cpuacct/box/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, UNLIMITED),
        ("0::/", {"cpu.max": "max 100000"}, UNLIMITED),
        ("0::/", {"cpu.max": "nonsense"}, UNLIMITED),
        ("not a list", {}, UNLIMITED),
    ],
)
def test_the_smallest_quota_of_a_process_and_its_groups_counts(
    tmp_path: Path, own: str, files: dict[str, str], cores: int
) -> None:
    assert quota(tmp_path, own, files) == cores


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path / "nothing") == UNLIMITED


def test_no_more_cores_are_usable_than_the_process_may_run_on() -> None:
    assert 1 <= usable_cores() <= len(affinity())
