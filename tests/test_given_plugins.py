"""Policies, devices, transports and routing that programs give: by name, as classes, or as objects."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moesched
from commands import SIMULATE, refused
from moesched import plugins
from moesched.cluster.cluster_jobs import run_local
from moesched.devices.torch.device import TorchDevice
from moesched.errors import WrongValue
from moesched.models.layout import Page
from moesched.planner.proposal import plan_model
from moesched.routing.profile import write_profile
from moesched.routing.trace import RoutingTrace, write_routing_trace
from moesched.steps.plan import Plan
from moesched.tasks import Task

CGOPipe: Any = plugins.find("policies", "cgopipe")
ExpertCache: Any = plugins.find("policies", "expert_cache")
Resident: Any = plugins.find("policies", "resident")


class Mine(Resident):  # type: ignore[misc]  # found by its name
    """Counts its plans."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = 0

    def plan(self, plan: Plan) -> None:
        self.plans += 1
        super().plan(plan)


def simulated(policy: Any, **options: Any) -> moesched.JobReport:
    options = {"batch_size": 2, "micro_batch_size": 2, "gen": 2, "band": False, **options}
    return moesched.simulate_model(
        "mixtral-8x7b", machine="t4", policy=policy, workload=[[1, 2]] * 2, **options
    )


@pytest.mark.parametrize("given", [CGOPipe, CGOPipe()], ids=["class", "object"])
def test_a_shipped_policy_is_the_same_by_name_and_as_it_is(model: Path, given: Any) -> None:
    named = moesched.run_model(model, ["abc"], policy="cgopipe", max_new_tokens=3)
    report = moesched.run_model(model, ["abc"], policy=given, max_new_tokens=3)
    assert (report.policy, report.tokens, report.plan) == ("cgopipe", named.tokens, named.plan)


def test_a_simulation_of_an_object_is_that_of_its_class_with_settings() -> None:
    by_object, by_class, other = (
        simulated(ExpertCache(experts=8)),
        simulated(ExpertCache, settings={"experts": 8}),
        simulated("expert_cache"),
    )
    assert by_object.step_seconds == by_class.step_seconds != other.step_seconds


def test_each_plan_gets_a_copy_of_an_object(model: Path) -> None:
    mine = Mine()
    moesched.run_model(model, ["abc", "de"], policy=mine, batch_size=1, max_new_tokens=1)
    assert mine.plans == 0


def test_a_class_that_no_module_has_is_named_by_its_place(model: Path) -> None:
    class Local(Resident):  # type: ignore[misc]  # found by its name
        pass

    report = moesched.run_model(model, ["abc"], policy=Local, max_new_tokens=1)
    assert report.policy == f"{__name__}:{Local.__qualname__}"


def test_a_plan_is_made_for_a_class_and_for_an_object() -> None:
    by_name, by_class, by_object = (
        plan_model("mixtral-0.8b", machine="t4", gen=2, policy=policy, objective="latency")
        for policy in ("expert_cache", ExpertCache, ExpertCache())
    )
    assert by_name == by_class == by_object


def test_a_device_may_be_a_class(model: Path) -> None:
    report = moesched.run_model(model, ["abc"], device=plugins.find("devices", "mlx"), max_new_tokens=3)
    assert report.tokens == moesched.run_model(model, ["abc"], device="mlx", max_new_tokens=3).tokens


def torch_device_that_gives(verb: str, change: Callable[[Any], Any]) -> Any:
    """A device like torch, whose value of a verb is changed."""

    class Mistaken(TorchDevice):
        def execute(self, task: Task) -> Any:
            own = super().execute(task)
            return change(own) if task.verb == verb else own

    return Mistaken


@pytest.mark.parametrize(
    ("verb", "value", "says"),
    [
        ("sample", None, "None for sample mb0: give a list with the token of each sequence, an int of 0 or more"),
        ("sample", [1], "1 values to 2 sequences for sample mb0"),
        ("sample", [1, 2, 3], "3 values to 2 sequences"),
        ("sample", [1.0, 2.0], "the token 1.0 for"),
        ("sample", np.array([1, 2]), r"array\(\[1, 2\]\) for"),
        ("sample", [1, -1], "the token -1 for"),
        ("route", None, "None for route L0 mb0: give a dict with the rows of each expert .* by ints from 0 to 3$"),
        ("route", [1], r"\[1\] for route L0 mb0"),
        ("route", {99: 1}, "{99: 1} for route L0 mb0"),
        ("route", {-1: 1}, "{-1: 1} for"),
        ("route", {0: 0}, "{0: 0} for"),
        ("route", {0: 2.0}, "{0: 2.0} for"),
        ("route", {"0": 2}, "{'0': 2} for"),
    ],
)  # fmt: skip
def test_wrong_values_of_a_device_end_its_run_with_its_name_and_not_the_policys_line(
    model: Path, verb: str, value: Any, says: str
) -> None:
    device = torch_device_that_gives(verb, lambda _: value)
    options: dict[str, Any] = {"policy": "expert_cache", "micro_batch_size": 2, "max_new_tokens": 2}
    with pytest.raises(moesched.MoeschedError, match=f"^device Mistaken: execute gives {says}") as refused:
        moesched.run_model(model, [[1, 2], [3]], device=device, **options)
    assert type(refused.value) is WrongValue


def test_a_device_gives_beam_search_what_stands_and_no_tokens(model: Path) -> None:
    device = torch_device_that_gives("sample", lambda _: [1, 2])
    beams = moesched.Sampling(beams=2)
    with pytest.raises(WrongValue, match=r"gives 1 for sample mb0: give a list with the .*Standing"):
        moesched.run_model(model, [[1, 2], [3]], policy="resident", device=device, sampling=beams)


def test_wrong_forecasts_and_missing_scores_of_a_device_end_its_run_with_its_name(model: Path) -> None:
    for verb, says in (
        ("preview_route", "preview_route L1 mb0: give a moesched.routing.ScoredTokens .* of all 4 experts"),
        ("route", "route L0 mb0: give a moesched.routing.ScoredTokens"),
    ):
        device = torch_device_that_gives(verb, dict)
        with pytest.raises(WrongValue, match=f"^device Mistaken: execute gives {{.*}} for {says}"):
            moesched.run_model(
                model, [[1, 2]], policy="hybrimoe", settings={"experts": 2}, device=device, max_new_tokens=2
            )


@pytest.mark.parametrize(
    ("verb", "change"),
    [
        ("sample", lambda own: [np.int64(token) for token in own]),
        ("route", lambda own: {np.int64(expert): np.int32(rows) for expert, rows in own.items()}),
    ],
)
def test_integers_of_numpy_are_taken_as_ints(
    model: Path, tmp_path: Path, verb: str, change: Callable[[Any], Any]
) -> None:
    def report(device: Any) -> moesched.JobReport:
        return moesched.run_model(
            model,
            [[1, 2], [3]],
            policy="expert_cache",
            device=device,
            max_new_tokens=3,
            trace=tmp_path / "trace",
        )

    tokens = report(torch_device_that_gives(verb, change)).tokens
    assert tokens == report("torch").tokens
    assert {type(token) for each in tokens or [] for token in each} == {int}


@pytest.mark.parametrize("size", [10, "10", 1e6, None])
def test_wrong_sizes_of_slots_are_refused_with_the_name_of_the_device(model: Path, size: Any) -> None:
    class Mistaken(TorchDevice):
        def slot_bytes(self, page: Page) -> Any:
            return size

    says = f"^device Mistaken: slot_bytes gives {size!r} for page L0 dense #0: give an int of at least .* nbytes, "
    with pytest.raises(moesched.BadInput, match=says):
        moesched.run_model(model, [[1]], policy="layer_streaming", device=Mistaken, max_new_tokens=2)


def test_sizes_of_slots_may_be_integers_of_numpy(model: Path) -> None:
    class Numeric(TorchDevice):
        def slot_bytes(self, page: Page) -> Any:
            return np.int64(super().slot_bytes(page))

    numeric, plain = (
        moesched.run_model(model, [[1]], policy="layer_streaming", device=device, max_new_tokens=2)
        for device in (Numeric, "torch")
    )
    assert numeric.tokens == plain.tokens


@pytest.mark.parametrize("kinds", [None, {"gpu": "nonsense"}, ["gpu"]])
def test_kinds_of_lanes_that_do_not_exist_are_refused_with_those_that_do(model: Path, kinds: Any) -> None:
    class Mistaken(TorchDevice):
        @property
        def kinds(self) -> Any:
            return kinds

    says = r"^device Mistaken: kinds is .*: give a mapping of lanes' names to thread, guest, loop, awaitable, stream$"
    with pytest.raises(moesched.BadInput, match=says):
        moesched.run_model(model, [[1]], policy="resident", device=Mistaken, max_new_tokens=2)


@pytest.mark.parametrize("lacks", ["kinds", "streams"])
def test_a_device_that_lacks_what_runs_need_is_refused_with_the_name_of_that(model: Path, lacks: str) -> None:
    class Lacking(TorchDevice):
        def __getattribute__(self, name: str) -> Any:
            if name == lacks:
                raise AttributeError(name, name=name, obj=self)
            return super().__getattribute__(name)

    with pytest.raises(
        moesched.BadInput, match=f"^device Lacking has no {lacks}: see moesched.seams.Device$"
    ):
        moesched.run_model(model, [[1]], policy="resident", device=Lacking, max_new_tokens=2)


class Unimportable(Resident):  # type: ignore[misc]  # found by its name
    """As a class of a notebook."""


Unimportable.__module__ = "__main__"


@pytest.mark.parametrize(
    ("option", "given"),
    [("policy", Unimportable), ("policy", Mine()), ("device", Unimportable), ("transport", Unimportable)],
)
def test_processes_are_not_started_for_a_class_that_they_cannot_import(
    model: Path, option: str, given: Any
) -> None:
    options = {"policy": "ep_naive", option: given}
    with pytest.raises(moesched.BadInput, match=f"{option} .* belongs to this program, and other processes"):
        run_local(model, ["abc"], nodes=2, **options)


def test_processes_find_a_class_by_its_name() -> None:
    assert plugins.name_elsewhere("policies", CGOPipe) == "cgopipe"
    assert plugins.find("policies", plugins.name_elsewhere("policies", Mine)) is Mine


def test_processes_do_not_find_a_class_within_another_one() -> None:
    class Inner(Mine):
        pass

    with pytest.raises(moesched.BadInput, match="belongs to this program"):
        plugins.name_elsewhere("policies", Inner)


@pytest.mark.parametrize("counted", [False, True], ids=["trace", "profile"])
def test_what_was_profiled_is_the_routing_of_a_simulation(model: Path, tmp_path: Path, counted: bool) -> None:
    trace = moesched.profile_routing(model, ["abc"], max_new_tokens=2).trace
    file = tmp_path / "routing.csv"
    write_profile(trace.profile(), file) if counted else write_routing_trace(trace, file)

    def steps(routing: Any) -> list[float]:
        return moesched.simulate_model(
            model, machine="t4", policy="expert_cache", workload=[[1, 2, 3]], gen=2, routing=routing
        ).step_seconds

    assert steps(trace.profile() if counted else trace) == steps(str(file))
    with pytest.raises(
        moesched.BadInput, match=r"the routing (trace|profile) is of small, .* but mixtral-8x7b has"
    ):
        simulated("resident", routing=trace)


def locked() -> Any:
    """A policy that cannot be copied."""
    policy = CGOPipe()
    policy.lock = threading.Lock()
    return policy


@pytest.mark.parametrize(
    ("policy", "options", "says"),
    [
        (Path, {}, "pathlib:Path is not a policy: it has no plan"),
        (3, {}, "builtins:int is not a policy: it has no plan"),
        (None, {}, "policy is None: omit it for 'auto'"),
        (locked(), {}, r"policy cgopipe cannot be copied .*'_thread.lock'.*: give a new"),
        (CGOPipe(), {"settings": {"kv_on_gpu": 1.0}}, "settings are given, and policy cgopipe is an object"),
        ("resident", {"routing": 3}, "routing is 3: give a name"),
        ("resident", {"routing": RoutingTrace}, "routing is <class "),
    ],
)
def test_what_is_no_policy_or_routing_is_refused(policy: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(moesched.BadInput, match=says):
        simulated(policy, **options)


@pytest.mark.parametrize("given", [("check",), (*SIMULATE, "--policy")])
def test_a_policy_in_a_folder_whose_name_is_no_text_is_refused(
    command: Any, tmp_path: Path, given: tuple[str, ...]
) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    command("new-policy", "mine", "--dir", folder)
    refused(command(*given, f"{folder}/mine.py:Mine"), "is not UTF-8.*: rename its file or folder")
