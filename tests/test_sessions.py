"""Sessions: one open model answers call after call as single runs do, whatever happens in one of them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest

import moesched
from listeners import CtrlC
from moesched.machines.local import assumed_machine
from moesched.machines.toml_text import machine_toml
from moesched.runs.listeners import Listener
from moesched.seams import Device
from small_models import small_model

DEVICES = ["torch", "mlx"]
PROMPTS: list[list[Any]] = [["abc"], ["the second call", [1, 2]], ["abc"]]


class Opened(Listener):
    """Keeps the device."""

    def opened(self, device: Device) -> None:
        self.device: Any = device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["resident", "cgopipe", "expert_streaming"])
def test_a_session_gives_the_tokens_of_single_runs(model: Path, device: str, policy: str) -> None:
    options: dict[str, Any] = {"policy": policy, "device": device}
    with moesched.Session(model, **options) as session:
        answers = [session.run(prompts, max_new_tokens=3).tokens for prompts in PROMPTS]
    single = [moesched.run_model(model, each, max_new_tokens=3, **options).tokens for each in PROMPTS]
    assert answers == single


def test_a_session_finds_its_files_after_the_program_has_changed_to_another_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    Path("own.toml").write_text(machine_toml(assumed_machine()))
    with moesched.Session(model.name, machine="own.toml") as session:
        monkeypatch.chdir(tmp_path)
        answers = session.run(["abc"], max_new_tokens=3).tokens
    assert answers == moesched.run_model(model, ["abc"], policy="resident", max_new_tokens=3).tokens


OWN = """\
from moesched.devices.kernels.seam import Kernel
from moesched.devices.torch.device import TorchDevice
from moesched.policies.resident import Resident
class Kept(Resident): pass
class Counted(TorchDevice): pass
class Refuses(Kernel):
    operation, name, takes = "expert", "refuses", "nothing"
    def __init__(self, resources): pass
    def refusal(self, case): return "it takes nothing"
    def bind(self, case, weights, memory): pass
"""


@pytest.mark.parametrize("place", ["moved.py", "./moved.py", "moved"])
def test_a_session_finds_its_policy_device_and_kernels_after_the_program_has_changed_to_another_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "moved", raising=False)
    for folder, text in ("here", OWN), ("elsewhere", "1 / 0"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "moved.py").write_text(text)
    monkeypatch.chdir(tmp_path / "here")
    opened = Opened()
    options: dict[str, Any] = {"policy": f"{place}:Kept", "device": f"{place}:Counted"}
    kernels = {"own_kernels": f"{place}:Refuses"}
    with moesched.Session(model, **options, device_settings=kernels) as session:
        monkeypatch.chdir(tmp_path / "elsewhere")
        report = session.run(["abc"], max_new_tokens=3, listener=opened)
    assert report.as_dict()["policy"] == f"{place}:Kept"
    assert report.tokens == moesched.run_model(model, ["abc"], policy="resident", max_new_tokens=3).tokens
    assert type(opened.device).__name__ == "Counted"


def test_the_planner_chooses_a_policy_that_fits_by_the_first_call_and_keeps_it(model: Path) -> None:
    whole = moesched.run_model(model, ["abc"], policy="auto", max_new_tokens=3)
    budgets = {"host": whole.peak_bytes["host"] * 2 // 3}
    with moesched.Session(model, policy="auto", budgets=budgets) as session:
        first, second = (session.run(["abc"], max_new_tokens=3) for _ in range(2))
    assert whole.policy == "resident"
    assert first.policy == second.policy != whole.policy
    assert first.chosen_at
    assert first.tokens == second.tokens == whole.tokens


def test_the_planner_chooses_by_a_batch_where_not_all_prompts_fit_at_once(model: Path) -> None:
    prompts = [[1 + number % 99, 5, 9] * 20 for number in range(64)]
    few = moesched.run_model(model, prompts[:4], policy="auto", max_new_tokens=3)
    budgets = {"host": few.peak_bytes["host"]}
    report = moesched.run_model(model, prompts, policy="auto", max_new_tokens=3, budgets=budgets)
    assert report.batches > 1
    assert report.chosen_at


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_stay_are_read_once(model: Path, device: str) -> None:
    with moesched.Session(model, device=device) as session:
        first, second = (session.run(["abc"], max_new_tokens=2) for _ in range(2))
    assert first.bytes_read
    assert second.bytes_read == 0


def test_each_call_has_a_length_a_sampling_and_a_beam_search_of_its_own(model: Path) -> None:
    beams = moesched.Sampling(beams=2)
    with moesched.Session(model) as session:
        lengths = [
            len((session.run(["abc"], max_new_tokens=2, sampling=beams).tokens or [])[0]),
            len((session.run(["abc"], max_new_tokens=5).tokens or [])[0]),
        ]
        searched = session.run(["abc"], max_new_tokens=2, sampling=beams)
    assert lengths == [2, 5]
    assert searched.scores == moesched.run_model(model, ["abc"], max_new_tokens=2, sampling=beams).scores


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("when", ["loading", 1], ids=["while it loads", "at a token"])
def test_a_call_that_ctrl_c_ended_does_not_disturb_the_next_one(model: Path, device: str, when: Any) -> None:
    with moesched.Session(model, device=device) as session:
        ended = session.run(["abc"], max_new_tokens=5_000, listener=CtrlC(when))
        assert ended.interrupted
        answer = session.run(["abc"], max_new_tokens=3).tokens
    assert answer == moesched.run_model(model, ["abc"], device=device, max_new_tokens=3).tokens


@pytest.mark.parametrize("bad", [[], "abc", [[999]], [""], [3], [[1.5]]])
def test_a_bad_call_does_not_disturb_the_next_one(model: Path, bad: Any) -> None:
    with moesched.Session(model) as session:
        for _ in range(2):
            with pytest.raises(moesched.BadInput):
                session.run(bad, max_new_tokens=2)
            assert session.run(["abc"], max_new_tokens=2).tokens


def test_a_call_whose_policy_failed_does_not_disturb_the_next_one(model: Path) -> None:
    class FailsOnce(Listener):
        def generated(self, request: int, token: int, text: str) -> None:
            raise ZeroDivisionError

    with moesched.Session(model) as session:
        with pytest.raises(ZeroDivisionError):
            session.run(["abc"], max_new_tokens=2, listener=FailsOnce())
        assert session.run(["abc"], max_new_tokens=2).tokens


def test_a_closed_session_refuses_calls_and_may_be_closed_again(model: Path) -> None:
    with moesched.Session(model) as session:
        session.run(["abc"], max_new_tokens=1)
        session.close()
    with pytest.raises(moesched.BadInput, match=r"<Session of small: closed>: open another one"):
        session.run(["abc"], max_new_tokens=1)


def test_a_session_that_its_own_listener_closes_ends_with_the_call(model: Path) -> None:
    class Closes(Listener):
        def generated(self, request: int, token: int, text: str) -> None:
            session.close()

    session = moesched.Session(model)
    answer = session.run(["abc"], max_new_tokens=2, listener=Closes())
    assert len((answer.tokens or [])[0]) == 2
    assert not files_of(model)
    with pytest.raises(moesched.BadInput, match="closed"):
        session.run(["abc"], max_new_tokens=1)


@pytest.mark.parametrize("device", DEVICES)
def test_files_threads_and_memory_are_released_at_the_end(model: Path, device: str) -> None:
    before = threading.active_count()
    with moesched.Session(model, device=device) as session:
        session.run(["abc"], max_new_tokens=1)
        assert files_of(model)
        held = weakref.ref(opened_by(session))
    assert not files_of(model)
    assert threading.active_count() <= before
    gc.collect()
    assert held() is None


def test_a_session_that_nobody_closed_is_closed_at_the_end_of_the_program(model: Path) -> None:
    code = f"""
import moesched
session = moesched.Session({str(model)!r})
session.run(["abc"], max_new_tokens=1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def files_of(model: Path) -> list[str]:
    return [file.path for file in psutil.Process().open_files() if Path(file.path).parent == model]


def opened_by(session: moesched.Session) -> Any:
    opened = Opened()
    session.run(["abc"], max_new_tokens=1, listener=opened)
    return opened.device


def test_a_call_from_inside_of_a_call_is_refused(model: Path) -> None:
    refusals: list[Any] = []

    class Asks(Listener):
        def opened(self, device: Device) -> None:
            with pytest.raises(moesched.BadInput, match="answers another call") as caught:
                session.run(["abc"])
            refusals.append(caught)

    with moesched.Session(model) as session:
        session.run(["abc"], max_new_tokens=1, listener=Asks())
    assert refusals


def test_a_changed_file_ends_a_session(tmp_path: Path) -> None:
    model = small_model(tmp_path / "small", text=True)
    with moesched.Session(model) as session:
        session.run(["abc"], max_new_tokens=1)
        [weights] = model.glob("*.safetensors")
        os.utime(weights, (1, 1))
        with pytest.raises(moesched.BadInput, match="since it was opened"):
            session.run(["abc"], max_new_tokens=1)


def test_what_a_session_is_opened_with_is_no_option_of_a_call(model: Path) -> None:
    with moesched.Session(model) as session, pytest.raises(TypeError, match="it takes prompts"):
        session.run(["abc"], policy="cgopipe")  # type: ignore[call-arg]  # what is tested
