"""Machines from the names of their parts: the library, its names, short notations, and the files that are written."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.errors import BadInput
from moesched.machines import Machine, load_machine, parse_machine
from moesched.machines.build import Parts, build_machine
from moesched.machines.commented_toml import commented_toml
from moesched.machines.part_names import find_chip, find_cpu, find_gpu
from moesched.machines.part_notation import Disk, Pcie, Ram, parse_disk, parse_pcie, parse_ram
from moesched.machines.parts import gpu_bytes, library
from moesched.machines.sustained import class_names
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from tables import table


def built(**parts: str) -> Machine:
    return build_machine(Parts(**parts)).machine


def test_the_library_has_what_people_own() -> None:
    parts = library()
    assert len(parts.gpus) >= 90
    assert len(parts.chips) >= 18
    assert len(parts.cpus) >= 70
    assert parts.memories.keys() >= {"DDR4", "DDR5"}


@pytest.mark.parametrize("name", library().gpus)
def test_the_figures_of_a_gpu_are_plausible(name: str) -> None:
    """Bytes per second for each byte, 16-bit products for each float32 FLOP, and FLOP for each watt stay in bounds."""
    gpu = library().gpus[name]
    assert gpu.source
    assert gpu.device_class in class_names()
    assert 4 * 10**9 <= gpu_bytes(gpu) <= 300 * 10**9
    assert 9 <= gpu.bandwidth / gpu_bytes(gpu) <= 80
    assert 1 <= gpu.half / gpu.float32 <= 32
    assert 0.02e12 <= gpu.float32 / gpu.watts <= 0.5e12
    assert parse_pcie(gpu.pcie).lanes >= 8
    if gpu.float8 is not None:
        assert gpu.float8 == pytest.approx(2 * gpu.half, rel=0.02)


@pytest.mark.parametrize(("series", "times"), table("published.md", "Series of GPUs"))
def test_the_matrix_units_of_a_series_have_one_ratio_to_its_cores(series: str, times: float) -> None:
    gpus = [gpu for gpu in library().gpus.values() if gpu.series == series]
    assert len(gpus) >= 3
    assert {gpu.name: gpu.half / gpu.float32 for gpu in gpus} == {
        gpu.name: pytest.approx(times, rel=0.02) for gpu in gpus
    }


@pytest.mark.parametrize("name", library().cpus)
def test_a_cpu_has_known_cores_and_memory(name: str) -> None:
    cpu = library().cpus[name]
    assert cpu.source
    assert library().architectures[cpu.architecture].source
    assert parse_ram(cpu.memory).kind == cpu.memory
    assert 4 <= cpu.cores <= 128
    assert 1.5e9 <= cpu.clock <= 5e9


def test_profiles_that_ship_and_the_library_agree() -> None:
    for profile, gpu in (
        ("t4", "T4"),
        ("l4", "L4"),
        ("a100-80g", "A100 SXM 80GB"),
        ("rtx6000-ada", "RTX 6000 Ada"),
    ):
        accelerator, part = load_machine(profile).accelerator, library().gpus[gpu]
        assert accelerator.flops["bfloat16"] == pytest.approx(part.half, rel=0.01)
        assert accelerator.flops["float32"] == pytest.approx(part.float32, rel=0.01)
        assert accelerator.device_class == part.device_class
        assert load_machine(profile).memories["gpu"].bandwidth == part.bandwidth


@pytest.mark.parametrize(("spelt", "name", "count"), table("published.md", "GPUs"))
def test_a_gpu_is_found_however_it_is_spelt(spelt: str, name: str, count: int) -> None:
    gpu, found = find_gpu(spelt)
    assert (gpu.name, found) == (name, count)


@pytest.mark.parametrize(("spelt", "meant"), table("published.md", "CPUs"))
def test_a_cpu_is_found_however_it_is_spelt(spelt: str, meant: str) -> None:
    assert find_cpu(spelt)[0].name == meant


def test_a_chip_is_found_however_it_is_spelt() -> None:
    assert [find_chip(name).name for name in ("M2Ultra", "apple m2", "M4 Max 40-core")] == [
        "M2 Ultra",
        "M2",
        "M4 Max 40-core",
    ]


def test_every_part_is_found_by_its_own_name() -> None:
    assert all(find_gpu(name)[0].name == name for name in library().gpus)
    assert all(find_cpu(name)[0].name == name for name in library().cpus)
    assert all(find_chip(name).name == name for name in library().chips)


@pytest.mark.parametrize(("text", "ram"), [(text, Ram(*ram)) for text, *ram in table("published.md", "RAM")])
def test_ram_is_read_as_channels_or_as_modules(text: str, ram: Ram) -> None:
    assert parse_ram(text) == ram


@pytest.mark.parametrize("text", ["4x16", "PCIe 4.0 x16", "gen4 x16", "4.0x16"])
def test_pcie_is_a_generation_and_lanes(text: str) -> None:
    assert parse_pcie(text) == Pcie(4, 16)
    assert parse_pcie(text).bandwidth == pytest.approx(31.5e9, rel=0.01)


def test_a_disk_is_a_rate_with_or_without_its_size() -> None:
    assert parse_disk("7GB/s") == Disk(None, 7e9)
    assert parse_disk("2 TB 500MB/s") == Disk(2 * 10**12, 5e8)


@given(
    st.text(max_size=30)
    | st.from_regex(r"[0-9]{0,2}x?[0-9]{0,3}(GB)? ?(LP)?DDR[0-9]-[0-9]{0,5}", fullmatch=True)
)
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (parse_ram, parse_pcie, parse_disk, find_gpu, find_cpu, find_chip):
        try:
            read(text)
        except BadInput as refusal:
            assert "\n" not in " ".join(str(refusal).split())


def test_a_desktop_has_the_rates_of_its_parts() -> None:
    machine = built(gpu="RTX 3090", pcie="4x16", ram="2xDDR5-5600", cpu="Ryzen 7950X", disk="7GB/s")
    assert machine.accelerator.flops["bfloat16"] == 71e12
    assert (machine.accelerator.device_class, machine.host.device_class) == ("consumer-gpu", "desktop-cpu")
    assert machine.memories["gpu"].bandwidth == 936e9
    assert machine.memories["host"].bandwidth == 2 * 8 * 5600e6
    assert machine.memories["host"].nbytes == 60 * 2**30, "4 GiB of 64 for the system"
    assert machine.host.flops == {
        "float32": 16 * 4.5e9 * 32,
        "float16": 16 * 4.5e9 * 32,
        "bfloat16": 16 * 4.5e9 * 64,
    }
    assert machine.link("host", "gpu").bandwidth == pytest.approx(0.75 * 16 * 1.969e9, rel=1e-3)
    assert machine.link("disk", "host").bandwidth == 7e9
    assert machine.roles.weights == "host"


def test_a_link_has_the_slower_of_card_and_slot() -> None:
    by_slot = {
        slot: built(gpu="RTX 4060", cpu="i9-13900K", pcie=slot).link("host", "gpu").bandwidth
        for slot in ("3x16", "4x4", "4x8", "5x16")
    }
    assert (
        by_slot["4x8"]
        == by_slot["5x16"]
        == built(gpu="RTX 4060", cpu="i9-13900K").link("host", "gpu").bandwidth
    )
    assert by_slot["4x4"] == pytest.approx(by_slot["4x8"] / 2, rel=1e-3)
    assert by_slot["3x16"] == pytest.approx(by_slot["4x8"] / 2, rel=1e-3)


def test_gpus_share_the_lanes_of_the_cpu() -> None:
    def rate(gpu: str, cpu: str) -> float:
        return built(gpu=gpu, cpu=cpu).link("host", "gpu").bandwidth

    alone = rate("RTX 3090", "Ryzen 7950X")
    assert rate("2x RTX 3090", "Ryzen 7950X") == pytest.approx(alone / 2, rel=1e-3)
    assert rate("4x RTX 3090", "Ryzen 7950X") == pytest.approx(alone / 4, rel=1e-3)
    assert rate("4x RTX 3090", "EPYC 7302") == alone
    assert rate("16x RTX 3090", "2x EPYC 7302") == pytest.approx(alone / 2, rel=1e-3), "160 lanes, not 256"
    [shared] = build_machine(Parts(gpu="2x RTX 3090", cpu="i9-13900K", ram="2x32GB DDR5-5600")).assumed
    assert shared.startswith("PCIe 4.0 x8 for each GPU, as Core i9-13900K has 16 lanes for GPUs")


def test_a_gpu_on_a_board_with_its_cpu_has_no_slot() -> None:
    machine = built(gpu="GH200")
    assert machine.link("host", "gpu").bandwidth == 416e9
    assert machine.link("gpu", "host").bandwidth == 170e9
    assert machine.memories["host"].bandwidth == 512e9
    assert machine == built(gpu="GH200", cpu="Grace")


def test_the_cpus_of_boards_are_in_the_library() -> None:
    assert {gpu.board.cpu for gpu in library().gpus.values() if gpu.board} <= library().cpus.keys()


def test_modules_beyond_the_channels_add_bytes_and_no_bandwidth() -> None:
    two, four = (built(gpu="3090", cpu="7950X", ram=f"{n}x32GB DDR5-5200").memories["host"] for n in (2, 4))
    assert four.bandwidth == two.bandwidth
    assert four.nbytes - two.nbytes == 64 * 2**30


def test_two_sockets_have_twice_the_cores_and_channels() -> None:
    one, two = built(cpu="EPYC 7763"), built(cpu="2x EPYC 7763")
    assert two.host.flops == {dtype: 2 * rate for dtype, rate in one.host.flops.items()}
    assert two.memories["host"].bandwidth == 2 * one.memories["host"].bandwidth


def test_several_gpus_are_joined_by_their_slots() -> None:
    machine = built(gpu="2x RTX 3090", cpu="EPYC 7302")
    joined = machine.accelerator_group.interconnect
    assert machine.accelerator_group.count == 2
    assert joined is not None
    assert joined.bandwidth == machine.link("host", "gpu").bandwidth


@pytest.mark.parametrize(("count", "microseconds"), [(2, 6.6 + 2 * 2), (4, 6.6 + 6 * 2)])
def test_a_small_all_reduce_is_one_call_and_two_crossings_of_each_round(
    count: int, microseconds: float
) -> None:
    joined = built(gpu=f"{count}x RTX 4090", cpu="EPYC 7302").accelerator_group.interconnect
    assert joined is not None
    rounds = 2 * (count - 1)
    assert rounds * joined.latency * 1e6 == pytest.approx(microseconds, rel=0.01)


def test_weights_come_from_the_disk_if_that_is_said() -> None:
    assert built(gpu="3090", cpu="7950X", disk="7GB/s", weights="disk").roles.weights == "disk"


@pytest.mark.parametrize(
    ("chip", "ram", "gib"),
    [("M2 Ultra", "192GB", 144), ("M2 Ultra", "192GiB", 144), ("M3 Pro", "36GB", 27), ("M1", "12GB", 8)],
)
def test_a_mac_plans_what_macos_lets_its_gpu_use(chip: str, ram: str, gib: int) -> None:
    assert built(chip=chip, ram=ram).memories["unified"].nbytes == gib * 2**30


@pytest.mark.parametrize(
    ("gpu", "nbytes"), [("RTX 3060 12GB", 12 * 2**30), ("RTX 3090", 24 * 2**30), ("T4", 15 * 2**30)]
)
def test_a_card_has_the_gib_that_its_shop_calls_gb_without_error_correction_and_driver(
    gpu: str, nbytes: int
) -> None:
    assert built(gpu=gpu, cpu="Ryzen 7950X").memories["gpu"].nbytes == nbytes - 700 * 10**6


def test_a_chip_has_one_memory() -> None:
    machine = built(chip="M2 Ultra", ram="192GB")
    assert machine.unified
    assert machine.memories["unified"] == load_machine("m2-ultra").memories["unified"]
    assert (machine.accelerator.device_class, machine.host.device_class) == ("apple-gpu", "apple-cpu")


MACHINES = [
    Parts(gpu="RTX 3090", pcie="4x16", ram="2xDDR5-5600", cpu="Ryzen 7950X", disk="7GB/s"),
    Parts(gpu="T4", cpu="Xeon E5-2680 v4", ram="4x16GB DDR4-2400", disk="2TB 3GB/s", weights="disk"),
    Parts(gpu="2x RTX A6000", cpu="2x EPYC 9654"),
    Parts(chip="M4 Max 40-core", ram="64GB"),
    Parts(chip="Ryzen AI Max+ 395", ram="128GB", name="strix"),
    Parts(cpu="Ryzen 5 5600", ram="2x16GB DDR4-3200"),
]


@pytest.mark.parametrize("parts", MACHINES, ids=lambda parts: build_machine(parts).machine.name)
def test_a_file_is_read_back_with_a_source_before_each_table_and_can_be_simulated(parts: Parts) -> None:
    machine = build_machine(parts)
    text = commented_toml(machine.machine, machine.comments)
    assert parse_machine(text.encode(), "text") == machine.machine
    seen: set[str] = set()
    for block in text.split("\n\n"):
        figures = set(re.findall(r"^(?:bandwidth|flops|capacity|latency) = .*", block, re.MULTILINE))
        if block.startswith("# "):
            seen |= figures
        assert figures <= seen, block
    policy, layout = make_policy("cgopipe"), weight_layout(SHAPES["mixtral-0.8b"])
    plan = plan_run(machine.machine, layout, split_batch([5] * 4, 3, 2), policy)
    assert simulate(plan, policy).prefill_seconds > 0
