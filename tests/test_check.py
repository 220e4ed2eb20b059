"""`check` finds each faulty policy at its line, has no false alarms, never hangs, and tells what could be spared."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesched import plugins
from moesched.plugins import find, shipped_policies
from moesched.system.cache import cache_folder
from moesched.testing.grid.advice import advice_of_lanes
from moesched.testing.grid.cells import Cell, cells_of
from moesched.testing.grid.check import ChildRun
from moesched.testing.grid.child import ChildOrder
from moesched.testing.grid.faults import endless_line
from moesched.testing.grid.items import Item, Outcome, Subject, cell_item, trial_item
from moesched.testing.grid.results import Fault, GridReport, rank_among
from moesched.testing.grid.rivals import rivals_in
from moesched.testing.grid.trials import SEEDS, Trial, random_case, trials_of
from moesched.testing.policy_checks import node_cases, policy_cases
from moesched.trace import LaneName, Recording, Slice, TaskInfo, least_nanoseconds
from test_faulty_policies import FAULTY, KINDS, MOST_LINES, Faulty, faulty_policies, faulty_policy, line_of

ENDLESS = FAULTY / "endless.py"
ENDS_THE_PROCESS = """import os

from sound import Streams

class Mine(Streams):
    async def decode(self, step):
        os._exit(3)
"""
ENDS_THE_RANKING = """import os

import moesched.testing.grid.items
from moesched.policies.resident import Resident

moesched.testing.grid.items.rivals_in = lambda cell: os._exit(3)

class Mine(Resident):
    pass
"""
SMALL = Cell("mixtral-0.8b", "t4", 4)
CASES = {case.name: case for case in [*policy_cases(), *node_cases()]}


@pytest.fixture(autouse=True)
def faulty_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The faulty files can be imported, and are no modules of other tests."""
    names = ("mine", "endless", *KINDS)
    monkeypatch.setattr(sys, "path", [*sys.path, str(FAULTY)])
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


def outcome(policy: str, item: Item) -> Outcome:
    return item.run(Subject(policy, {}, "the line of its class"))


# -- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faulty", faulty_policies(), ids=lambda faulty: faulty.name)
def test_each_mistake_is_a_fault_at_its_line(faulty: Faulty) -> None:
    policy = faulty.policy
    if not faulty.line:
        assert outcome(policy, trial_item(Trial(CASES["roomy GPU"]))) == Outcome()
        return
    fault = first_fault(policy)
    assert fault.line == f"{faulty.file}:{faulty.line}"
    assert fault.message.removeprefix("fits in no case: ").startswith(faulty.said)
    assert len([fault.line, fault.case, *fault.more]) <= MOST_LINES


def first_fault(policy: str) -> Fault:
    """The fault that a check tells first."""
    unfit: list[Fault] = []
    for trial in trials_of(find("policies", policy)):
        found = outcome(policy, trial_item(trial))
        if found.faults:
            return found.faults[0]
        assert found.unfit is not None, f"{trial.name} has no fault"
        unfit.append(found.unfit)
    return unfit[0]


def test_a_mistake_that_shows_with_two_layers_only_is_found_by_their_case() -> None:
    policy, case = faulty_policy("Streams"), CASES["two layers, many micro-batches"]
    [fault] = outcome(policy, trial_item(Trial(case))).faults
    assert "page L0 dense #0 is already in gpu" in fault.message
    assert outcome(policy, trial_item(Trial(CASES["roomy GPU"]))).faults == []


RELIES_ON_DURATIONS = """
from sound import Streams

class Mine(Streams):
    def plan(self, plan):
        super().plan(plan)
        self.spare = plan.pool("accelerator", "spare", 1, plan.layout.pages)

    async def layer(self, step, i, j):
        if i == 0:
            embedded = step.embed(j)
            other = [page for page in step.pages(1)[:1] if page not in self.pool]
            if other and j == 0:
                step.fetch(other, self.spare)
                await embedded
                if not step.cancel(other, self.spare):
                    raise RuntimeError("it came too soon")
        step.pre_attention(i, j)
        step.attention(i, j)
        await self.experts(step, i, j)
"""


def test_a_mistake_that_shows_with_other_durations_only_is_found_by_uneven_ones(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(RELIES_ON_DURATIONS)
    case = CASES["odd layers, deep"]
    assert outcome(f"{mine}:Mine", trial_item(Trial(case))).faults == []
    uneven = [outcome(f"{mine}:Mine", trial_item(Trial(case, uneven=seed))) for seed in SEEDS]
    assert {fault.line for each in uneven for fault in each.faults} == {f"{mine}:17"}


def test_a_fault_has_its_whole_traceback_on_demand() -> None:
    whole = Subject(faulty_policy("Stumbles"), {}, whole=True)
    [fault] = trial_item(Trial(CASES["roomy GPU"])).run(whole).faults
    assert fault.more[0] == "Traceback (most recent call last):"
    assert fault.more[-1] == fault.message == "KeyError: 'experts'"


@pytest.mark.parametrize("policy", [*shipped_policies(), "adversarial"])
def test_no_shipped_policy_has_a_fault(policy: str) -> None:
    cases = [CASES["tight GPU"], random_case(0, [CASES["weights on the disk"].machine])]
    if policy.startswith("ep_"):
        cases.append(CASES["two nodes"])
    trials = [Trial(case, uneven=seed) for seed, case in enumerate(cases)]
    outcomes = [*(outcome(policy, trial_item(each)) for each in trials), outcome(policy, cell_item(SMALL))]
    assert [fault for each in outcomes for fault in each.faults] == []
    if policy == "cgopipe":
        assert outcomes[-1].advice == [], "nothing is wasted"
    cell = outcomes[-1].cell
    assert cell is not None and cell.seconds is not None and cell.lower_bound_seconds is not None
    assert 0 < cell.lower_bound_seconds <= cell.seconds * 1.000001


def test_trials_cover_every_case_and_nodes_only_for_policies_that_share_experts() -> None:
    alone, shared = trials_of(find("policies", "resident")), trials_of(find("policies", "ep_naive"))
    assert {trial.case.nodes for trial in alone} == {1}
    assert {trial.case.nodes for trial in shared} == {1, 2, 3, 4}
    for trials in (alone, shared):
        assert len({trial.name for trial in trials}) == len(trials)


def test_the_grid_is_every_combination_of_what_is_given() -> None:
    given = cells_of(["dbrx"], ["l4", "t4"], [2])
    assert given == [Cell("dbrx", "l4", 2), Cell("dbrx", "t4", 2)]
    assert {cell.batch_size for cell in cells_of(["qwen3-30b-a3b"])} == {1, 16}
    assert len(cells_of()) == 15


# -- policies that do not end ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SwallowsEverything", "CountsInC", "SleepsForEver"])
def test_a_policy_that_does_not_end_is_ended_and_told_at_its_line(name: str) -> None:
    marked = line_of(ENDLESS.read_text(), name, "#!")
    report = in_child(f"{ENDLESS}:{name}", patience=0.3)
    [fault] = report.faults
    file, _, line = fault.line.rpartition(":")
    assert file == str(ENDLESS)
    assert int(line) in range(marked - 2, marked + 3)  # a line of the loop
    assert fault.message == "does not end: still running after 0.3 s"
    assert report.unchecked[0] == "roomy GPU"
    assert report.reason == f"roomy GPU still ran, at {fault.line}"


def test_the_line_of_an_endless_policy_is_the_innermost_of_its_own() -> None:
    def frame(file: str, line: object) -> str:
        return f'  File "{file}", line {line} in something'

    inner = ["Stack (most recent call first):", frame(threading.__file__, 2), frame(plugins.__file__, 3)]
    outer = [frame("/home/mine.py", 4), frame("/home/mine.py", 5)]
    assert endless_line([*inner, *outer], "") == "/home/mine.py:4"
    assert endless_line(inner, "/home/mine.py:1") == "/home/mine.py:1"
    between_two_lines = frame("/home/mine.py", "???")
    assert endless_line([*inner, between_two_lines, *outer], "") is None


def test_a_policy_that_ends_the_process_is_a_fault(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(ENDS_THE_PROCESS)
    [fault] = in_child(f"{mine}:Mine").faults
    assert fault.line == f"{mine}:5"
    assert fault.message == "the policy ended the process, with exit code 3"


def test_a_process_that_ends_while_others_are_ranked_is_no_fault_but_the_reason_for_missing_ranks(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(ENDS_THE_RANKING)
    report = in_child(f"{mine}:Mine")
    assert (report.faults, report.unchecked) == ([], [f"rank in {SMALL.name}"])
    assert report.reason == f"the process ended in rank in {SMALL.name}"


def test_cases_that_the_limit_leaves_no_time_for_are_named() -> None:
    report = in_child("adversarial", limit=0.3)
    assert report.faults == []
    assert report.trials + len(report.unchecked) == len(trials_of(find("policies", "adversarial"))) + 2
    assert report.cases[0].problem.startswith("not checked: ")


def in_child(policy: str, *, patience: float = 10.0, limit: float = 60.0) -> GridReport:
    run = ChildRun(ChildOrder(Subject(policy, {}), [SMALL], patience, limit))
    run.wait()
    return run.report(0.0)


# -- advice, bounds and ranks ------------------------------------------------------------------------

WASTEFUL = """
from sound import Streams


class OneMicroBatchAtATime(Streams):
    async def prefill(self, step):
        for j in step.micro_batches:
            for i in step.layers:
                pages = [page for page in step.pages(i) if page not in self.pool]
                if pages:
                    step.fetch(pages, self.pool)  # again
                await self.layer(step, i, j)
            step.sample(j)


class BringsMore(Streams):
    def plan(self, plan):
        super().plan(plan)
        self.spare = plan.pool("accelerator", "spare", 1, plan.layout.pages)  # spare

    def bring(self, step, i):
        super().bring(step, i)
        other = step.pages((i + 2) % len(step.layers))[:1]
        step.fetch(other, self.spare)


class LeavesMemoryFree(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        pages = len(plan.layout.layer(0))
        self.pool = plan.pool("accelerator", "layers", 2 * pages, plan.layout.pages)  # few


class ReservesMore(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.pool("accelerator", "spare", 1, plan.layout.pages)  # spare
"""


@pytest.mark.parametrize(
    ("name", "marked", "said"),
    [
        (
            "OneMicroBatchAtATime",
            "# again",
            r"[\d,]+ of [\d,]+ pages moved in decode steps had been moved there",
        ),
        (
            "BringsMore",
            "# spare",
            r"pool spare in gpu: [\d,]+ of [\d,]+ fetched pages left before anything read",
        ),
        (
            "LeavesMemoryFree",
            "# few",
            r"[\d.]+ GB of gpu's 15.4 GB stay free, while steps move pages into pool layers",
        ),
        ("ReservesMore", "# spare", r"pool spare in gpu: none of its 1 slots was used \(.+B\)"),
    ],
)
def test_what_could_be_spared_is_advice_with_its_line(
    tmp_path: Path, name: str, marked: str, said: str
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(WASTEFUL)
    found = outcome(f"{mine}:{name}", cell_item(SMALL))
    assert found.faults == []
    line = line_of(WASTEFUL, name, marked)
    [advice] = [each for each in found.advice if each.line == f"{mine}:{line}"]
    assert re.match(said, advice.message)


def test_a_lane_is_told_only_if_no_cell_used_it_and_times_within_a_thousandth_share_a_rank() -> None:
    told = advice_of_lanes([("a", {"host": False, "link": True}), ("b", {"host": False, "link": False})])
    assert [(each.message, each.case, each.cases) for each in told] == [("lane host was never used", "a", 2)]
    assert rank_among(1.0, [0.5, 0.9995, 1.0, 1.2]) == 2
    assert rank_among(1.0, []) == 1


def test_times_of_shipped_policies_are_kept_and_a_damaged_file_is_replaced() -> None:
    cell = Cell("mixtral-0.8b", "t4", 1)
    times = rivals_in(cell)
    file = cache_folder() / "shipped-policies.json"
    assert cell.name in file.read_text()
    file.write_text("{")
    assert rivals_in(cell) == times
    assert cell.name in file.read_text()


def test_the_bound_is_the_busiest_lane_or_the_longest_chain() -> None:
    lanes = [LaneName(0, "gpu"), LaneName(0, "link")]
    info = TaskInfo("", "", "", "", "")
    spans = [(lanes[1], 0, 10), (lanes[0], 10, 14), (lanes[1], 10, 20), (lanes[0], 25, 30)]
    slices = [Slice(number, lane, info, 0, start, end) for number, (lane, start, end) in enumerate(spans)]
    free = Recording(lanes, slices, [(), (), (), ()], [])
    assert least_nanoseconds(free, 0, 30) == 20
    chained = Recording(lanes, slices, [(), (0,), (0,), (1, 2)], [])
    assert least_nanoseconds(chained, 0, 30) == 25
    assert least_nanoseconds(chained, 5, 28) == 18


# -- the command -------------------------------------------------------------------------------------

NARROW = ("--model", "mixtral-0.8b", "--machine", "t4", "--batch-size", 1)


def test_a_check_without_faults_ends_with_code_0_and_ranks_the_policy(command: Any) -> None:
    said = command("check", "resident", *NARROW, "--model", "mixtral-8x7b", "--json")
    assert said.code == 0
    assert said.json.keys() >= {"policy", "faults", "advice", "cases", "unchecked", "seconds"}
    assert said.json["faults"] == said.json["unchecked"] == []
    fits, large = said.json["cases"]
    assert fits.keys() >= {"model", "machine", "batch_size", "seconds", "lower_bound_seconds", "rank"}
    assert (fits["model"], fits["machine"], fits["batch_size"]) == ("mixtral-0.8b", "t4", 1)
    times = rivals_in(Cell("mixtral-0.8b", "t4", 1))
    assert times["resident"] == fits["seconds"] == times["layer_split"] == min(times.values())
    assert (fits["rank"], fits["fitting"]) == (1, len(times))  # the fastest share a rank
    assert large["problem"].startswith("does not fit: page ")
    assert large["seconds"] is large["rank"] is None


def test_faults_come_first_in_few_lines_each_and_the_code_is_1(command: Any) -> None:
    policy = faulty_policy("BringsALayerTwice")
    said = command("check", policy, *NARROW)
    assert said.code == 1
    first, blank, *fault = said.out.splitlines()
    assert re.fullmatch(r"\S+: 1 fault in \d+ small cases \(\d+ do not fit\) and 0 of 1 cells, \d+ s", first)
    assert blank == ""
    assert re.match(r".*fetches\.py:\d+: PolicyError: page L0 dense #0 is already in gpu", fault[0])
    assert re.fullmatch(r"  in roomy GPU, and \d+ more cases", fault[1])
    assert all(line.startswith("  ") for line in fault[1 : fault.index("")])
    assert fault.index("") <= MOST_LINES
    [told] = command("check", policy, *NARROW, "--json").json["faults"]
    assert {"line", "message", "case"} <= told.keys()
    assert f"{told['line']}: {told['message']}" == fault[0]
