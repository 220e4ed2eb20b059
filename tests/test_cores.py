"""The number of cores respects the CPU quota of a container, and threads beside a GPU divide them."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from moesched.cli.report_tables import print_report
from moesched.devices.torch.cuda_device import CudaDevice
from moesched.errors import BadInput
from moesched.jobs.simulate_model import simulate_model
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.system.cores import CorePlan, affinity, cpu_quota, divided_cores, require_threads, usable_cores

UNLIMITED = 2**31
TINY = Path(__file__).parents[1] / "examples" / "tiny-mixtral"


def quota(root: Path, own: str, files: dict[str, str]) -> int:
    """The quota of a process in these control groups."""
    for name, text in {
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{each}": files[each] for each in files},
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cpu_quota(root)


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
    assert cpu_quota(tmp_path / "nothing") == UNLIMITED, "without control groups"
    assert 1 <= usable_cores() <= len(affinity())


@pytest.mark.parametrize(
    ("cores", "kernels", "copies", "issuing"),
    [
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (4, 3, 3, 1),
        (8, 6, 7, 2),
        (16, 12, 15, 4),
        (32, 28, 16, 4),
        (64, 60, 16, 4),
    ],
)
def test_cores_beside_a_gpu_are_divided(cores: int, kernels: int, copies: int, issuing: int) -> None:
    assert divided_cores(cores) == CorePlan(kernels, copies, issuing)
    if cores == 16:
        given = divided_cores(16, threads=9)
        assert given == CorePlan(kernels=9, copies=15, issuing=4), (
            "those of attention and experts may be given"
        )


@pytest.mark.parametrize("threads", [0, -1, usable_cores() + 1])
def test_a_number_of_threads_that_cannot_be_is_refused_in_one_line(threads: int) -> None:
    checkpoint = open_checkpoint(TINY)
    message = f"^threads is {threads}: give 1 to {usable_cores()}, the number of cores"
    with pytest.raises(BadInput, match=message):
        require_threads(threads)
    with pytest.raises(BadInput, match=message):
        CudaDevice(checkpoint, weight_layout(checkpoint.config, "bfloat16"), threads=threads)


def test_a_report_says_how_the_cores_were_divided(capsys: pytest.CaptureFixture[str]) -> None:
    predicted = simulate_model(TINY, machine="t4", policy="resident", workload=[[1, 2, 3]], gen=2)
    report = structs.replace(predicted, measured=True, cores=divided_cores(16)._asdict())
    print_report(report)
    assert (
        "threads on the host: 12 for attention and experts, 15 for copies of weights; "
        "4 cores left to issuing and waiting\n" in capsys.readouterr().out
    )
    assert report.as_dict()["cores"] == {"kernels": 12, "copies": 15, "issuing": 4}
    assert "cores" not in predicted.as_dict()
