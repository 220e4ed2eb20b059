"""The checker finds every way in which a trace can be wrong: each rule is damaged once."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moesched.errors import BadInput
from moesched.trace import check_trace, read_trace
from moesched.trace.chrome_writer import FORMAT
from runs import Run
from traces import Event, arrows_of, rewritten, slices_of


def change(number: int, /, **fields: Any) -> Callable[[list[Event]], object]:
    """Change fields of the slice of that place (in order of the file); None removes a field."""

    def damage(events: list[Event]) -> None:
        fill(slices_of(events)[number], fields)

    return damage


def change_first(ph: str, name: str = "", /, **fields: Any) -> Callable[[list[Event]], object]:
    """Change fields of the first event of a phase (and name)."""

    def damage(events: list[Event]) -> None:
        fill(next(event for event in events if event["ph"] == ph and name in ("", event["name"])), fields)

    return damage


def fill(event: Event, fields: dict[str, Any]) -> None:
    """Set fields of an event; None removes one."""
    for name, value in fields.items():
        if value is None:
            del event[name]
        else:
            event[name] = value


def drop(ph: str) -> Callable[[list[Event]], object]:
    """Remove the first event of a phase."""
    return lambda events: events.remove(next(event for event in events if event["ph"] == ph))


def drop_a_flow(events: list[Event]) -> None:
    """Remove both ends of one flow."""
    events[:] = [event for event in events if event.get("id") != 5]


def add_a_flow(events: list[Event]) -> None:
    """Draw an arrow between tasks that are no edge."""
    for ph, slice_ in zip("sf", (slices_of(events)[0], slices_of(events)[30]), strict=True):
        place = {name: slice_[name] for name in ("pid", "tid", "ts")}
        events.append({"ph": ph, "id": 999_999, "bp": "e", "name": "edge"} | place)


def depend(*numbers: object) -> Callable[[list[Event]], object]:
    """Let the first task that depends on another one depend on these instead."""

    def damage(events: list[Event]) -> None:
        args = next(event["args"] for event in slices_of(events) if "depends_on" in event["args"])
        args["depends_on"] = list(numbers)

    return damage


def depend_on_itself(events: list[Event]) -> None:
    """Let a task wait for itself."""
    args = slices_of(events)[30]["args"]
    args["depends_on"] = [args["task"]]


def repeat_a_flow(events: list[Event]) -> None:
    """Draw one arrow twice, in place of another."""
    for ph in "sf":
        source = next(event for event in events if event["ph"] == ph and event["id"] == 1)
        events[:] = [event for event in events if event["ph"] != ph or event["id"] != 2] + [
            {**source, "id": 2}
        ]


def turn_a_flow(events: list[Event]) -> None:
    """Draw one arrow from its consumer to its producer."""
    start, end = (next(event for event in events if event["ph"] == ph and event["id"] == 1) for ph in "sf")
    for name in ("pid", "tid", "ts"):
        start[name], end[name] = end[name], start[name]


def show_a_join(events: list[Event]) -> None:
    """Give one slice the type of a join."""
    slices_of(events)[30]["args"]["type"] = "Join"


def repeat_a_task(events: list[Event]) -> None:
    """Let two slices of a process be the same task."""
    slices_of(events)[30]["args"] = slices_of(events)[31]["args"]


def swap_tids(events: list[Event]) -> None:
    """Show the second lane above the first."""
    places = [event for event in events if event["name"] == "thread_sort_index"]
    places[1]["args"], places[2]["args"] = places[2]["args"], places[1]["args"]


def drop_the_critical_path(events: list[Event]) -> None:
    """Leave the critical path out."""
    events[:] = [event for event in events if event["ph"] != "X" or event["pid"] != 1]


DAMAGES: dict[str, tuple[Callable[[list[Event]], object], str]] = {
    "two decimals": (change(3, ts=msgspec.Raw(b"12.25")), "ts: time 12.25 has not exactly three decimals"),
    "no decimals": (change(3, dur=msgspec.Raw(b"12")), "dur: time 12 has not exactly three decimals"),
    "a float": (change(3, ts=msgspec.Raw(b"1.5e3")), "time 1.5e3 has not"),
    "no time": (change_first("s", ts=None), "time missing has not"),
    "a text as pid": (change(3, pid="2"), "is not a trace of moesched: Expected `int`, got '2'"),
    "a nameless process": (change_first("M", "process_name", name="other"), "process 1 has no process_name"),
    "a nameless track": (change_first("M", "thread_name", tid=99), "track 1 of process 1 has no thread_name"),
    "a track without a place": (
        change_first("M", "thread_sort_index", name="other"),
        "track 1 of process 1 has no thread_sort_index",
    ),
    "a track at no number": (
        change_first("M", "thread_sort_index", args={"sort_index": "first"}),
        "track 1 of process 1: sort_index is 'first', not a whole number",
    ),
    "tracks out of order": (swap_tids, "tids are not in the order"),
    "an overlap": (change(3, dur=msgspec.Raw(b"99999999.000")), "before load"),
    "a flow that starts nowhere": (
        change_first("s", ts=msgspec.Raw(b"0.000"), tid=3),
        "the flow from 0.000 on track 3 to",
    ),
    "a flow that ends nowhere": (change_first("f", ts=msgspec.Raw(b"99999999.000")), "to 99999999.000 on track"),
    "a flow on the wrong process": (change_first("s", pid=7), "is not from the last task on a lane"),
    "a flow without bp": (change_first("f", bp=None), 'lacks "bp":"e"'),
    "a flow with two ids": (change_first("f", id=999_999), "flow 999999 has 0 starts and 1 ends"),
    "a flow backwards": (turn_a_flow, "is not from the last task on a lane to one that depends on it"),
    "half a flow": (drop("f"), "flow 1 has 1 starts and 0 ends"),
    "a flow less": (drop_a_flow, "no flow goes from"),
    "a flow more": (add_a_flow, "is not from the last task on a lane to one that depends on it"),
    "a flow twice": (repeat_a_flow, "2 flows go from"),
    "a dependency less": (depend(), "dependencies, not"),
    "a dependency twice": (depend(0, 0), "depends 2 times on task 0"),
    "a dependency on nothing": (depend(999_999), "depends on task 999999, which has no slice"),
    "a dependency on itself": (depend_on_itself, "which has not ended by then"),
    "a slice less": (drop("X"), "slices stand for"),
    "a join": (show_a_join, "is a join that was not expanded"),
    "a task twice": (repeat_a_task, "has several slices"),
    "a slice without args": (change(3, args={}), "Object missing required field `task`"),
    "no critical path": (drop_the_critical_path, "the critical path is missing"),
    "a critical path elsewhere": (change(-1, dur=msgspec.Raw(b"0.001")), "is not the slice of a task"),
    "a negative counter": (
        change_first("C", args={"reserved_bytes": -1, "page_bytes": 0}),
        "reserved_bytes is -1, not a number of 0 or more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_the_checker_finds(name: str, streamed_trace: Path) -> None:
    damage, complaint = DAMAGES[name]
    with rewritten(streamed_trace) as events:
        damage(events)
    problems = check_trace(streamed_trace)
    assert any(complaint in problem for problem in problems), problems


def test_the_checker_finds_what_is_no_trace(tmp_path: Path, streamed_trace: Path) -> None:
    whole = streamed_trace.read_bytes()
    packed = gzip.compress(whole)
    files = {
        "cut.json": (whole[:-1000], "is not a trace of moesched: Input data was truncated"),
        "cut.json.gz": (packed[:-1000], "end-of-stream"),
        "bytes.json": (b"\xff\x00", "is not a trace of moesched"),
        "other.json": (b'{"traceEvents":[]}', "missing required field `otherData`"),
        "newer.json": (
            whole.replace(FORMAT.encode(), b"moesched trace 9"),
            "its format is 'moesched trace 9'",
        ),
    }
    for name, (data, complaint) in files.items():
        (tmp_path / name).write_bytes(data)
        [problem] = check_trace(tmp_path / name)
        assert str(tmp_path / name) in problem
        assert complaint in problem
    [problem] = check_trace(tmp_path / "nowhere.json")
    assert "No such file" in problem


def test_the_checker_names_some_and_counts_the_others(streamed_run: Run, streamed_trace: Path) -> None:
    with rewritten(streamed_trace) as events:
        for event in events:
            event.pop("bp", None)
    problems = check_trace(streamed_trace)
    assert len(problems) == 6
    assert problems[-1] == f"... and {len(arrows_of(streamed_run.recording)) - 5} more like the last"


REFUSED: dict[str, tuple[Callable[[list[Event]], object], str]] = {
    "a dependency on nothing": (depend(999_999), "task [0-9]+ depends on task 999999, which has no slice"),
    "a dependency on itself": (
        depend_on_itself,
        "task ([0-9]+) depends on task \\1, which was not submitted before it",
    ),
    "a dependency on a text": (depend("0"), r"Expected `int`, got `str` - at `\$.depends_on\[0\]`"),
    "a task twice": (repeat_a_task, "task [0-9]+ of rank 0 has several slices"),
    "endless work": (
        lambda events: slices_of(events)[3]["args"].update(FLOP=1e308),
        r"Expected `float` <= 1e\+30 - at `\$.FLOP`",
    ),
    "fewer pages than none": (
        lambda events: slices_of(events)[3]["args"].update(pages=-1),
        r"Expected `int` >= 0 - at `\$.pages`",
    ),
    "more slots than any memory has": (
        lambda events: slices_of(events)[3]["args"].update(pool_slots=1 << 62),
        r"Expected `int` <= 4294967295 - at `\$.pool_slots`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_trace_is_refused_when_it_is_read(name: str, streamed_trace: Path) -> None:
    damage, complaint = REFUSED[name]
    with rewritten(streamed_trace) as events:
        damage(events)
    with pytest.raises(BadInput, match=f"the trace is damaged: {complaint}; record it again"):
        read_trace(streamed_trace)
