"""Policies that err, run and simulated: each is told at its own line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import failed

ERRING_POLICY = """
class Resident:
    def plan(self, plan):
        plan.place_kv("accelerator")
        plan.keep([page for i in plan.layers for page in plan.layout.layer(i)])

    async def prefill(self, step):
        for j in step.micro_batches:
            self.micro_batch(step, j)

    async def decode(self, step):
        await self.prefill(step)

    def micro_batch(self, step, j):
        step.embed(j)
        for i in step.layers:
            step.pre_attention(i, j)
            step.attention(i, j)
            step.post_attention(i, j)
        step.sample(j)


class Swaps(Resident):
    def micro_batch(self, step, j):
        step.embed(j)
        step.attention(0, j)  # before pre_attention


class Forgets(Resident):
    async def decode(self, step):
        pass


class Sleeps(Resident):
    async def decode(self, step):
        import asyncio
        await asyncio.sleep(0)  # asleep
        await asyncio.sleep(1)  # asleep


class Leaves(Resident):
    async def decode(self, step):
        raise SystemExit(0)  # silently
"""


@pytest.fixture(params=["run", "simulate"])
def job(
    request: pytest.FixtureRequest, no_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Either command, in a folder with policies that err."""
    (tmp_path / "erring.py").write_text(ERRING_POLICY)
    (tmp_path / "two.toml").write_text('name = "two"\nnew_tokens = [4]\nprompt_tokens = [3, 2]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "erring", raising=False)
    if request.param == "run":
        return ["run", no_text, "--prompt-ids", "1,2;3", "--max-new-tokens", 4]
    return ["simulate", "--model", no_text, "--machine", "t4", "--workload", "two.toml"]


def line_of(marker: str) -> int:
    """The line of the erring policies in which a text stands first."""
    return next(number for number, line in enumerate(ERRING_POLICY.splitlines(), 1) if marker in line)


def test_a_policy_of_ones_own_runs_by_module_and_class(command: Any, job: list[Any]) -> None:
    assert command(*job, "--policy", "erring:Resident", "--json").code == 0


@pytest.mark.parametrize(
    ("policy", "marker", "said"),
    [
        ("Swaps", "# before pre_attention", r"OutOfOrder: attention\(L0, mb0\) needs mb0 at .*"),
        ("Sleeps", "# asleep", "PolicyError: a policy may await the handles of its tasks only"),
        ("Leaves", "# silently", r"PolicyError: the policy raised SystemExit\(0\): return to end a step"),
    ],
)
def test_an_illegal_policy_is_told_at_its_own_line(
    command: Any, job: list[Any], policy: str, marker: str, said: str
) -> None:
    said_all = command(*job, "--policy", f"erring:{policy}", "--json", "--trace", "trace.json")
    assert said_all.code == 1
    assert re.match(rf"moesched: .*erring\.py:{line_of(marker)}: {said}", said_all.err)
    assert not Path("trace.json").exists()


def test_a_policy_that_leaves_a_step_unfinished_is_told_by_its_name(command: Any, job: list[Any]) -> None:
    said = command(*job, "--policy", "erring:Forgets", "--json")
    line = line_of("class Forgets") + 1
    failed(
        said,
        rf"erring\.py:{line} \(Forgets\.decode\): OutOfOrder: decode step 1 ended before mb0 was sampled",
    )
