"""Jobs from Python: the two calls behind the command line, and what they tell meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import moesched
from moesched.interrupts import interrupts_held
from moesched.jobs import NotTraced
from moesched.listeners import Listener
from moesched.plan import Plan
from moesched.settings import check_settings, parse_settings
from moesched.tasks import Task
from small_models import small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "small", text=True)


class Diary(Listener):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.loads = 0

    def planned(self, plan: Plan) -> None:
        self.entries.append(("planned", len(plan.batch.prompts)))

    def ended(self, task: Task) -> None:
        self.loads += task.verb == "load"

    def generated(self, request: int, token: int, text: str) -> None:
        self.entries.append((request, token))

    def finished(self, request: int, text: str) -> None:
        self.entries.append(("finished", request))

    def ran(self) -> None:
        self.entries.append("ran")


def test_a_listener_hears_of_every_token_by_the_number_of_its_prompt(model: Path) -> None:
    diary = Diary()
    report = moesched.run_model(
        model, [[1], "ab", [2, 3]], policy="resident", max_new_tokens=2, batch_size=2, listener=diary
    )
    a, b, c = report.tokens or []
    assert diary.entries == [
        ("planned", 2), (0, a[0]), (1, b[0]), (0, a[1]), ("finished", 0), (1, b[1]), ("finished", 1), "ran",
        ("planned", 1), (2, c[0]), (2, c[1]), ("finished", 2), "ran",
    ]  # fmt: skip
    assert diary.loads == 2 * report.plan.kept_pages
    assert report.batches == 2


def test_successive_batches_add_up(model: Path) -> None:
    report = moesched.run_model(model, [[1]] * 5, policy="cgopipe", max_new_tokens=3, batch_size=2)
    assert len(report.step_seconds) == 9
    assert report.throughput_tokens_per_second == pytest.approx(15 / sum(report.step_seconds))
    assert sum(kind.tasks for kind in report.kinds) == report.tasks
    samples = [kind for kind in report.kinds if kind.kind == "sample"]
    assert [kind.tasks for kind in samples] == [9]


def test_a_prediction_of_given_lengths_plans_what_the_run_does(model: Path) -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    sizes = {"policy": "cgopipe", "budgets": {"host": "1MB"}, "micro_batch_size": 2, "batch_size": 3}
    measured = moesched.run_model(model, prompts, max_new_tokens=4, **sizes)  # type: ignore[arg-type]
    predicted = moesched.simulate_model(
        model,
        machine="auto",
        workload=moesched.given_lengths([3, 1, 2], 4),
        **sizes,  # type: ignore[arg-type]
    )
    assert predicted.plan.micro_batch_size == measured.plan.micro_batch_size == 2
    assert predicted.lanes.keys() == measured.lanes.keys()
    assert {kind.kind for kind in predicted.kinds} == {kind.kind for kind in measured.kinds}
    assert (predicted.measured, measured.measured) == (False, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_trace_that_cannot_be_written_does_not_cost_the_report(model: Path) -> None:
    with pytest.raises(NotTraced, match="cannot write trace /dev/full") as caught:
        moesched.run_model(model, [[1]], policy="resident", max_new_tokens=2, trace="/dev/full")
    assert caught.value.report.tokens == moesched.run_model(model, [[1]], max_new_tokens=2).tokens


def test_no_prompts_at_all_are_told(model: Path) -> None:
    with pytest.raises(moesched.BadInput, match="no prompts were given: give at least one"):
        moesched.run_model(model, [])


def test_settings_are_read_as_what_they_look_like() -> None:
    texts = ["a=3", "b=-0.5", "c=true", "d=False", "e=some text=here", "f=1e3", "g="]
    expected = {"a": 3, "b": -0.5, "c": True, "d": False, "e": "some text=here", "f": 1000.0, "g": ""}
    assert parse_settings(texts) == expected


class Taking:
    def __init__(
        self, count: int = 1, share: float = 0.5, name: str = "", keep: bool = False, any: Any = 0
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({"count": 2}, {"count": 2}),
        ({"share": 1}, {"share": 1}),
        ({"name": 7}, {"name": "7"}),
        ({"any": "x"}, {"any": "x"}),
    ],
)
def test_a_policy_gets_settings_of_the_types_that_it_names(settings: Any, taken: Any) -> None:
    assert check_settings(Taking, "policy taking", settings) == taken


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"count": 2.5}, "policy taking: count is 2.5: give a whole number"),
        ({"count": True}, "policy taking: count is True: give a whole number"),
        ({"share": "half"}, "policy taking: share is 'half': give a number"),
        ({"keep": 1}, "policy taking: keep is 1: give true or false"),
        ({"size": 1}, "policy taking has no setting 'size': it takes count, share, name, keep, any"),
    ],
)
def test_other_settings_are_told(settings: Any, said: str) -> None:
    with pytest.raises(moesched.BadInput, match=said):
        check_settings(Taking, "policy taking", settings)


def test_ctrl_c_is_held_back_until_the_moment_is_over() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
