"""The page on traces explains every field that a trace has, and none that no trace has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moesched.seams import Demand
from moesched.steps.pool_counts import Counted
from moesched.trace import (
    About,
    Clock,
    LaneName,
    MemorySample,
    Recording,
    Slice,
    TaskInfo,
    TitledRun,
    check_trace,
    read_trace,
    write_side_by_side,
    write_trace,
)
from moesched.trace.chrome_writer import CRITICAL_PID, FORMAT, SIDE_BY_SIDE
from moesched.trace.recording import Cancelled, PoolSample, RequestSpan, Roof, WorkKey
from traces import Event

PAGE = (Path(__file__).parent.parent / "docs" / "traces.md").read_text(encoding="utf-8")
LANE = LaneName(0, "gpu")
TASK = TaskInfo(
    "fetch L0", "fetch", "PageTransfer", "copy", "link", 0, 0, 0, 8.0, 8.0, 1, 1, "experts in gpu", 1,
    "L0 E0 #0", 4,
)  # fmt: skip
SLICE = Slice(1, LANE, TASK, 1, 10, 20, "failed", 1, "p.py:3", 2, 1, 1, 0, {0: 1})
ABOUT = About(
    driver="realtime",
    policy="by hand",
    model="small",
    machine="t4",
    plan={"batch_size": 1},
    clocks={"0": Clock(ahead=1, error=1)},
    roofs={"gpu": Roof(flops=1e12, bandwidth=1e9)},
    costs_measured=True,
    tokens_per_second=8.0,
)


def everything() -> Recording:
    """A recording in which each field has a value of its own."""
    return Recording(
        [LANE],
        [Slice(0, LANE, TASK, 1, 0, 10), SLICE],
        [(), (0,)],
        [MemorySample(0, "gpu", 0, 2, 1)],
        trimmed=True,
        joins=1,
        in_order=frozenset([LANE]),
        origin=1,
        pools=[PoolSample(0, "experts in gpu", 0, Counted(1, 1, 1, 1, 1))],
        costs={WorkKey("copy", "link", 8.0, 8.0): Demand(1e-9, (("link", 1.0),))},
        predictions={WorkKey("copy", "link", 8.0, 8.0): 1e-9},
        cancelled=[Cancelled(2, LANE, TASK, 1, 15, "p.py:4")],
        requests=[RequestSpan(3, 1, 2, 12, 19, 4)],
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trace with every field, decoded."""
    path = tmp_path_factory.mktemp("traces") / "everything.json"
    write_trace(path, everything(), ABOUT)
    assert check_trace(path) == []
    read = read_trace(path)
    assert read.recording == msgspec.structs.replace(everything(), origin=0)
    return json.loads(path.read_text())


@pytest.mark.parametrize("value", [everything(), SLICE, TASK, ABOUT, everything().cancelled[0]])
def test_the_trace_with_every_field_leaves_none_at_its_default(value: msgspec.Struct) -> None:
    for field in msgspec.structs.fields(value):
        if field.default is not msgspec.NODEFAULT:
            assert getattr(value, field.name) != field.default, field.name
        elif field.default_factory is not msgspec.NODEFAULT:
            assert getattr(value, field.name) != field.default_factory(), field.name


def legend(*titles: str) -> set[str]:
    """The fields in the tables of these sections of the page."""
    fields: set[str] = set()
    for title in titles:
        section = PAGE.split(f"### {title}\n")[1].split("\n### ")[0]
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
            fields |= set(re.findall(r"`([^`]+)`", row))
    return fields


def is_task(event: Event) -> bool:
    return bool(event["ph"] == "X" and event["pid"] != CRITICAL_PID)


EVENTS: dict[str, Callable[[Event], bool]] = {
    "Tasks": is_task,
    "Cancelled transfers": lambda event: event["ph"] == "i",
    "The critical path": lambda event: event["ph"] == "X" and not is_task(event),
    "Requests": lambda event: event["ph"] in "be",
    "Counters": lambda event: event["ph"] == "C",
    "Names": lambda event: event["ph"] == "M",
    "Dependencies": lambda event: event["ph"] in "sf",
}


@pytest.mark.parametrize("title", EVENTS)
def test_the_page_explains_the_fields_of_each_kind_of_event_and_no_others(title: str, trace: Any) -> None:
    events = [event for event in trace["traceEvents"] if EVENTS[title](event)]
    assert events
    assert legend(title) == {name for event in events for name in event.get("args", {})}


def test_the_page_explains_all_kinds_of_events(trace: Any) -> None:
    for event in trace["traceEvents"]:
        assert sum(belongs(event) for belongs in EVENTS.values()) == 1


def test_the_page_explains_the_metadata_of_one_run_and_of_several(trace: Any, tmp_path: Path) -> None:
    write_side_by_side(tmp_path / "both.json", [TitledRun("one", everything(), ABOUT)])
    both = json.loads((tmp_path / "both.json").read_text())
    assert legend("otherData") == {*trace["otherData"], *both["otherData"]}


def test_clocks_say_their_unit(trace: Any) -> None:
    assert trace["otherData"]["clocks"] == {"0": {"ahead_ns": 1, "error_ns": 1}}


def test_the_page_names_the_versions_that_are_written() -> None:
    assert f'`"{FORMAT}"`' in PAGE and f'`"{SIDE_BY_SIDE}"`' in PAGE
