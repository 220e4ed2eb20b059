"""Windows of runs as pictures: which part is shown, what is merged, and what stands in the file."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import refused
from moesched.analysis.families import COLOURS, family_of
from moesched.analysis.timeline import Block, Timeline, Window, choose_window, merged, timeline_of
from moesched.analysis.timeline_picture import MOST_BLOCKS, TitledTimeline, draw_timelines
from moesched.errors import BadInput
from moesched.steps.verbs.table import VERBS
from moesched.trace import LaneName, Recording, Slice, write_side_by_side
from moesched.trace.chrome_writer import TitledRun
from moesched.trace.recording import Cancelled, TaskInfo
from runs import Run
from tables import table

GPU, LINK = LaneName(0, "gpu"), LaneName(0, "link")
FETCH = TaskInfo("fetch L0 E1", "fetch", "PageTransfer", "copy", "link", layer=0, expert=1, pages=1)
ATTENTION = TaskInfo("attention L0 mb0", "attention", "Kernel", "attention", "gpu", layer=0, micro_batch=0)
EXPERT = TaskInfo("run_expert L1 E2 mb0", "run_expert", "Kernel", "expert", "gpu", layer=1, expert=2)
SAMPLE = TaskInfo("sample mb0", "sample", "Decision", "sample", "gpu", micro_batch=0)
MS = 1_000_000


def recording(*slices: Slice) -> Recording:
    ordered = sorted(slices, key=lambda each: each.end)
    return Recording([GPU, LINK], ordered, [()] * len(ordered), [])


def steps_of(*milliseconds: int) -> Recording:
    """A run whose steps, from the prefill on, take these times: attention, an expert and a sample, beside a fetch."""
    slices, begin = [], 0
    for step, length in enumerate(milliseconds):
        cut = [begin, begin + length * MS // 4, begin + length * MS // 2, begin + length * MS]
        for number, task in enumerate((ATTENTION, EXPERT, SAMPLE)):
            slices.append(Slice(4 * step + number, GPU, task, step, cut[number], cut[number + 1]))
        slices.append(Slice(4 * step + 3, LINK, FETCH, step, cut[0], cut[2]))
        begin = cut[3]
    return recording(*slices)


# -- windows ---------------------------------------------------------------------------------------------


def test_by_default_the_first_typical_decode_step_is_shown() -> None:
    window = choose_window(steps_of(50, 4, 8, 8, 9))
    assert window == Window(54 * MS, 62 * MS, "decode step 2")
    assert window.described == "decode step 2, 8 ms from 54 ms"


def test_the_first_step_of_a_trimmed_recording_is_not_typical() -> None:
    run = steps_of(50, 8, 8)
    run.slices = [each for each in run.slices if each.step > 0]
    run.trimmed = True
    assert choose_window(run).name == "decode step 2"


def test_a_run_without_decode_shows_its_prefill() -> None:
    assert choose_window(steps_of(50)) == Window(0, 50 * MS, "prefill")


@pytest.mark.parametrize(
    ("given", "window"),
    [
        ({"steps": "1"}, Window(50 * MS, 54 * MS, "decode step 1")),
        ({"steps": "0:2"}, Window(0, 62 * MS, "steps 0 to 2")),
        ({"window": "1ms:0.02s"}, Window(MS, 20 * MS)),
        ({"layers": "0"}, Window(54 * MS, 56 * MS, "layer 0 of decode step 2")),
        ({"layers": "0:1", "steps": "1"}, Window(50 * MS, 52 * MS, "layers 0 to 1 of decode step 1")),
        ({"layers": "0:1", "steps": "1:2"}, Window(50 * MS, 52 * MS, "layers 0 to 1 of decode step 1")),
    ],
)
def test_a_window_can_be_chosen_by_steps_layers_or_times(given: dict[str, str], window: Window) -> None:
    assert choose_window(steps_of(50, 4, 8, 8, 9), **given) == window


@pytest.mark.parametrize(
    ("given", "told"),
    table("broken_files.md", "Windows"),
)
def test_a_window_that_cannot_be_is_refused(given: dict[str, str], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        choose_window(steps_of(50, 4, 8), **given)


def test_a_run_without_tasks_or_whose_tasks_take_no_time_has_no_window() -> None:
    with pytest.raises(BadInput, match="the trace has no tasks"):
        choose_window(recording())
    with pytest.raises(BadInput, match="prefill takes no time: choose another part"):
        choose_window(steps_of(0))


# -- rows ------------------------------------------------------------------------------------------------


def test_rows_have_the_parts_of_tasks_within_the_window_and_what_was_cancelled_then() -> None:
    run = steps_of(8)
    run.cancelled = [Cancelled(9, LINK, FETCH, 0, time * MS) for time in (1, 3, 7)]
    rows = timeline_of(run, Window(MS, 5 * MS)).rows
    assert [(row.title, row.cancelled) for row in rows] == [("gpu", []), ("link", [0, 2 * MS])]
    assert [(each.start, each.end, each.family, each.task) for each in rows[0].blocks] == [
        (0, MS, "attention", ATTENTION),
        (MS, 3 * MS, "experts", EXPERT),
        (3 * MS, 4 * MS, "choices", SAMPLE),
    ]
    assert [each.critical for row in rows for each in row.blocks] == [True, True, True, False]


def test_layers_begin_with_their_first_pre_attention(streamed_run: Run, tmp_path: Path) -> None:
    run = streamed_run.recording
    timeline = timeline_of(run, choose_window(run, layers="2:3", steps="1"))
    first = min(
        each.start
        for each in run.slices
        if (each.step, each.task.layer, each.task.verb) == (1, 3, "pre_attention")
    )
    assert timeline.layers[:2] == [(2, 0), (3, first - timeline.window.start)]
    assert ">layer 2<" in svg(tmp_path, timeline)


def test_idle_lanes_are_left_out_unless_they_are_named() -> None:
    run, late = steps_of(8), Window(5 * MS, 8 * MS)
    assert [row.title for row in timeline_of(run, late).rows] == ["gpu"]
    assert [row.title for row in timeline_of(run, late, ["link"]).rows] == ["link"]
    with pytest.raises(BadInput, match="no lane 'disk', only gpu, link"):
        timeline_of(run, late, ["disk"])


def blocks(*spans: tuple[int, int, Any]) -> list[Block]:
    return [Block(start, end, family, False, FETCH) for start, end, family in spans]


def test_narrow_neighbours_become_one_block_of_the_family_that_takes_most_of_it() -> None:
    narrow = blocks((0, 2, "weights"), (2, 3, "experts"), (4, 6, "weights"), (50, 52, "experts"))
    joined, alone = merged(narrow, 10)
    assert (joined.start, joined.end, joined.family, joined.task) == (0, 6, "weights", None)
    assert alone == narrow[-1]


def test_wide_blocks_stay_as_they_are_and_in_order() -> None:
    wide = blocks((0, 20, "weights"), (20, 21, "experts"), (21, 22, "experts"), (22, 40, "weights"))
    assert [(each.start, each.end) for each in merged(wide, 10)] == [(0, 20), (20, 22), (22, 40)]


# -- the picture -----------------------------------------------------------------------------------------


def svg(folder: Path, *runs: Timeline, width: float = 7.0) -> str:
    """The text of a picture of these windows."""
    draw_timelines(
        [TitledTimeline(f"run {number}", run) for number, run in enumerate(runs)], folder / "x.svg", width
    )
    return (folder / "x.svg").read_text()


def shown(run: Recording, window: Window | None = None) -> Timeline:
    return timeline_of(run, window or choose_window(run))


def test_a_picture_names_runs_windows_lanes_tasks_and_the_families_that_occur(tmp_path: Path) -> None:
    text = svg(tmp_path, shown(steps_of(50, 8)), shown(steps_of(50, 4)))
    for told in ("run 0: decode step 1, 8 ms from 50 ms", "run 1: decode step 1, 4 ms from 50 ms"):
        assert told in text
    for word in ("gpu", "link", "attention", "experts", "weights", "routers, sampling", "critical path"):
        assert f">{word}<" in text
    for label in ("fetch L0 E1", "attention L0 mb0", "run_expert L1 E2 mb0"):
        assert f">{label}<" in text
    assert "time (ms)" in text
    assert ">activations<" not in text and ">cancelled<" not in text


def test_a_joined_transfer_is_labelled_with_all_of_its_experts(tmp_path: Path) -> None:
    names = "L3 dense #0-1, E4 #2, E5 #0-2, E6 #0-2"
    joined = TaskInfo("fetch L3", "fetch", "PageTransfer", "copy", "link", layer=3, pages=9, page_names=names)
    run = recording(Slice(0, LINK, joined, 1, 0, 8 * MS))
    assert ">fetch L3 dense, E4-6<" in svg(tmp_path, shown(run))


def test_names_of_any_characters_are_drawn_as_they_are(tmp_path: Path) -> None:
    odd = TaskInfo("cost $1_2 of $3^4 \x1b[31m\nfine", "cost", "Kernel", "cost", "gpu", layer=0)
    pages = TaskInfo("fetch", "fetch", "PageTransfer", "copy", "link", pages=1, page_names=f"E{'9' * 5000}")
    run = recording(Slice(0, LaneName(0, "a $b$ lane"), odd, 1, 0, 8 * MS), Slice(1, LINK, pages, 1, 0, MS))
    nameless = LaneName(0, "")
    run.slices.append(Slice(2, nameless, ATTENTION, 1, 0, 8 * MS))
    run.producers.append(())
    run.lanes = [run.slices[1].lane, LINK, nameless]
    draw_timelines([TitledTimeline("$policy$ " + 200 * "x", shown(run))], tmp_path / "x.svg", 2.0)
    text = (tmp_path / "x.svg").read_text()
    assert ">a $b$ lane<" in text and ">$policy$ x" in text


def test_more_lanes_than_a_picture_holds_are_refused(tmp_path: Path) -> None:
    timeline = shown(steps_of(8))
    with pytest.raises(BadInput, match="600 lanes do not fit a picture: choose at most 500 with --lanes"):
        draw_timelines([TitledTimeline("run", timeline)] * 300, tmp_path / "x.svg")


def test_cancelled_transfers_are_marked(tmp_path: Path) -> None:
    run = steps_of(8)
    run.cancelled = [Cancelled(9, LINK, FETCH, 0, MS)]
    assert ">cancelled<" in svg(tmp_path, shown(run))


def test_equal_runs_give_equal_files(tmp_path: Path) -> None:
    assert svg(tmp_path, shown(steps_of(50, 8))) == svg(tmp_path, shown(steps_of(50, 8)))


def test_a_window_of_very_many_tasks_stays_small(tmp_path: Path) -> None:
    families = (ATTENTION, EXPERT, SAMPLE)
    many = [Slice(n, GPU, families[n % 3], 1, 10 * n, 10 * n + 6) for n in range(5_000)]
    timeline = shown(recording(*many))
    assert 2 * len(timeline.rows[0].blocks) > MOST_BLOCKS
    assert len(svg(tmp_path, timeline, timeline, width=40.0)) < 1_000_000


@pytest.mark.parametrize("width", [3.3, 7.0])
def test_a_png_is_as_wide_as_was_asked_for(width: float, tmp_path: Path) -> None:
    draw_timelines([TitledTimeline("run", shown(steps_of(50, 8)))], tmp_path / "x.png", width)
    pixels = struct.unpack(">II", (tmp_path / "x.png").read_bytes()[16:24])
    assert pixels[0] == round(300 * width)


# -- the command -----------------------------------------------------------------------------------------


def test_the_command_says_which_part_it_drew(command: Any, streamed_trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.svg"
    first, second, last = command("timeline", streamed_trace, streamed_trace, "--out", out).out.splitlines()
    assert first == second
    assert first.startswith(f"{streamed_trace}: decode step ")
    assert last == f"picture: {out}"
    text = out.read_text()
    assert text.count("CGOPipe, mixtral-0.8b on t4, predicted: decode step ") == 2
    said = command(
        "timeline", streamed_trace, "--out", out, "--layers", "2:3", "--lanes", "host", "--json"
    ).json
    assert said["picture"] == str(out)
    assert said["windows"][0]["window"].startswith("layers 2 to 3 of decode step ")
    assert said["windows"][0]["start_seconds"] < said["windows"][0]["end_seconds"]
    assert ">host<" in out.read_text() and ">accelerator<" not in out.read_text()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--out", "x.pdf"], r"end its name in \.png or \.svg"),
        (["--out", "x.svg", "--lanes", "disk"], "no lane 'disk', only accelerator, "),
        (["--out", "x.svg", "--width", "nan"], "--width nan is not from 2 to 40 inches"),
        (["--out", "x.svg", "--steps", "77"], "there is no 77; the trace has steps -1 to 2"),
    ],
)
def test_bad_input_is_one_line_and_draws_nothing(
    options: list[str], told: str, command: Any, streamed_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(streamed_trace.parent)
    refused(command("timeline", streamed_trace, *options), told)
    assert list(streamed_trace.parent.iterdir()) == [streamed_trace]


def test_a_trace_is_not_drawn_over(command: Any, streamed_trace: Path) -> None:
    trace = streamed_trace.rename(streamed_trace.with_suffix(".svg"))
    refused(command("timeline", trace, "--out", trace), "which this command reads: name another file")


def test_several_runs_in_one_trace_are_refused(command: Any, streamed_run: Run, tmp_path: Path) -> None:
    runs = [TitledRun(title, streamed_run.recording, streamed_run.about) for title in ("one", "other")]
    write_side_by_side(tmp_path / "both.json", runs)
    told = "shows several runs side by side: name the trace of one of them"
    refused(command("timeline", tmp_path / "both.json", "--out", tmp_path / "x.svg"), told)


def test_without_matplotlib_one_line_says_how_to_install_it(
    command: Any, streamed_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = command("timeline", streamed_trace, "--out", tmp_path / "x.svg")
    refused(said, r"pictures need matplotlib, which is not installed: pip install 'moesched\[plots\]'$")


# -- families of verbs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS if verb.lane is not None] + ["partial_sum"])
def test_every_verb_that_submits_a_task_has_a_family(verb: str) -> None:
    assert family_of(TaskInfo(verb, verb, "Kernel", verb, "gpu")) != "other"


def test_transfers_of_pages_and_collectives_are_told_by_what_they_are() -> None:
    assert family_of(TaskInfo("a page", "fetch", "PageTransfer", "copy", "link", pages=1)) == "weights"
    assert family_of(TaskInfo("sum", "all_reduce", "Collective", "all_reduce", "network")) == "exchange"
    assert family_of(TaskInfo("mine", "mine", "Kernel", "mine", "gpu")) == "other"


def test_families_have_colours_of_their_own() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
