"""`moesched roofline`: its table, its JSON, its pictures, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import moesched
from commands import refused
from moesched.errors import BadInput
from moesched.machines import machine_names
from moesched.models.shapes import SHAPES
from small_models import small_model

PNG = b"\x89PNG\r\n\x1a\n"
L4 = ("roofline", "--model", "mixtral-8x7b", "--machine", "l4")


def test_the_table_says_what_binds_and_where_to_compute(command: Any) -> None:
    said = command(*L4)
    assert said.code == 0
    tables = [
        {line.split("  ")[0]: line for line in text.splitlines()} for text in said.out.split("\n\n")[2:4]
    ]
    assert max(len(line) for table in tables for line in table.values()) <= 80
    rates, points = tables
    assert re.search(r" host->gpu .* host memory$", rates["attention, bfloat16 KV"])
    assert re.search(r" 66\.7 .* host$", points["attention, bfloat16 KV"])
    assert re.search(r" 16 +66\.7 .* host$", points["attention, int4 KV"])
    assert re.search(r" 8 +66\.7 .* host$", points["FFN, N = 32"])
    assert " host->gpu " in rates["FFN, N = 512"]
    assert re.search(r" 128 +66\.7 +396 +396 +gpu$", points["FFN, N = 512"])
    assert " gpu memory " in rates["FFN, N = 4096"]
    assert re.search(r" 1,024 +66\.7 +396 +396 +gpu$", points["FFN, N = 4096"])
    assert "P1 is at N = 267" in said.out
    assert "P2 is at N = 1586" in said.out
    assert "bound by gpu (host->gpu 119 ms, gpu 303 ms, host 86.7 ms)" in said.out


def test_the_json_holds_the_same(command: Any) -> None:
    report = json.loads(command(*L4, "--json").out)
    assert report["hierarchy"]["link"] == 24e9
    assert [each["variant"] for each in report["attention"]] == ["bfloat16", "int4"]
    assert {each["better"] for each in report["attention"]} == {"host"}
    assert report["ffn"][1]["fetched"]["by"] == "host->gpu"
    assert report["ffn"][1]["first_turning_point"] == pytest.approx(1.6e12 / 24e9)
    assert report["ffn"][1]["balance_point"] == report["ffn"][1]["second_turning_point"]
    assert report["batch_at_second_turning_point"] == 1586
    assert report["bound_by"] == "gpu"


def test_sizes_and_dtypes_of_the_cache_can_be_chosen(command: Any) -> None:
    chosen = ("--kv-dtype", "int8", "--kv-dtype", "float32", "--context", 100)
    sizes = ("--batch-size", 64, "--micro-batch-size", 16)
    report = json.loads(command(*L4, *chosen, *sizes, "--json").out)
    assert [each["variant"] for each in report["attention"]] == ["int8", "float32"]
    assert [each["variant"] for each in report["ffn"]] == ["N = 64"]
    assert report["context"] == 100
    assert report["split"]["batch_size"] == 64
    assert report["split"]["micro_batch_size"] == 16


def test_the_context_is_by_default_the_models_longest_where_that_is_less_than_512(no_text: Path) -> None:
    assert moesched.roofline_of(no_text, "l4").context == 100
    assert moesched.roofline_of("mixtral-8x7b", "l4").context == 512


def test_too_small_a_micro_batch_is_said_to_be_never_worth_fetching_for(command: Any) -> None:
    said = command(*L4, "--micro-batch-size", 3)
    assert "With µ = 3 the experts are never faster on gpu than on host." in said.out


def test_where_nothing_computes_below_the_cache_stays_above(command: Any) -> None:
    said = command("roofline", "--model", "dbrx", "--machine", "m2-ultra")
    assert said.code == 0
    assert "P1 is reached" not in said.out
    assert "attention on unified, experts on unified" in said.out


@pytest.mark.parametrize(("model", "machine"), [*zip(SHAPES, cycle(machine_names()))])
def test_every_model_has_a_roofline_on_machines_in_turn(model: str, machine: str) -> None:
    report = moesched.roofline_of(model, machine)
    assert report.layer_seconds > 0
    assert all(each.fetched.performance > 0 for each in (*report.attention, *report.ffn))


def test_a_model_of_ones_own_is_read_from_its_folder(command: Any, tmp_path: Path) -> None:
    folder = small_model(tmp_path / "small")
    assert "small (float32) on l4" in command("roofline", "--model", folder, "--machine", "l4").out


# -- pictures


def test_a_png_is_drawn(command: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said = command(*L4, "--out", tmp_path / "l4.png")
    assert said.code == 0
    assert "P1 is at N" in said.out
    assert (tmp_path / "l4.png").read_bytes().startswith(PNG)
    assert [file.name for file in tmp_path.iterdir()] == ["l4.png"]


@pytest.fixture(scope="module")
def svg(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of Mixtral 8x7B's picture on the L4."""
    pytest.importorskip("matplotlib")
    return drawn("mixtral-8x7b", "l4", tmp_path_factory.mktemp("pictures"))


def drawn(model: str, machine: str, folder: Path) -> str:
    """A picture's text."""
    moesched.draw_roofline(moesched.roofline_of(model, machine), folder / "picture.svg")
    return (folder / "picture.svg").read_text()


@pytest.mark.parametrize(
    "label",
    [
        "attainable performance (FLOP/s)",
        "operational intensity (FLOP per byte; points: per byte of host)",
        "gpu: 300 GB/s, 121 TFLOP/s",
        "host: 100 GB/s, 1.6 TFLOP/s",
        "gpu: 24 GB/s",
        "bfloat16",
        "int4",
        "N = 512",
        ">P1<",
        ">P2<",
    ],
)
def test_a_picture_names_axes_roofs_points_and_lines(svg: str, label: str) -> None:
    assert label in svg


def test_the_same_report_gives_the_same_picture(svg: str, tmp_path: Path) -> None:
    assert drawn("mixtral-8x7b", "l4", tmp_path) == svg


def test_a_picture_without_p1_is_drawn_where_nothing_computes_below(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = drawn("dbrx", "m2-ultra", tmp_path)
    assert ">P1<" not in text
    assert ">P2<" in text


def test_an_unknown_kind_of_picture_is_refused_from_python_too(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"end its name in \.png or \.svg"):
        moesched.draw_roofline(moesched.roofline_of("mixtral-8x7b", "l4"), tmp_path / "l4.jpg")


def test_without_matplotlib_the_table_is_printed_and_a_picture_refused(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert command(*L4).code == 0
    refused(command(*L4, "--out", tmp_path / "l4.png"), r"pictures need matplotlib.*'moesched\[plots\]'")
    assert list(tmp_path.iterdir()) == []
