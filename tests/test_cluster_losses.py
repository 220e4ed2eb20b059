"""Nodes and launchers that are killed, stand still, go on or come back: no run hangs, and no token is wrong."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import moesched
from benchmarks.shared.forked_nodes import ForkServer, Killer
from cluster_fixtures import NEW_TOKENS, PROMPTS, fill_disk, first_node, run_here, run_seated
from moesched.cluster.cluster_file import Cluster, Host, cluster_toml
from moesched.cluster.members import ByOthers, Process
from moesched.cluster.messages import JoinRequest, Welcome
from moesched.cluster.node_jobs import NodeRun
from moesched.errors import NodeLost
from moesched.runs.listeners import Listener
from patience import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 60.0
"""Of an exchange, and of joining: whoever waits for that long was told of nothing."""


def alone(model: Path, new_tokens: int) -> Any:
    """Tokens that one process generates."""
    return moesched.run_model(
        model, PROMPTS, policy="resident", max_new_tokens=new_tokens, batch_size=3
    ).tokens


def awaiting(file: Path, policy: str, steps: int = NEW_TOKENS - 2) -> dict[str, Any]:
    """Options of a run whose nodes await a file after some decode steps: they may be far ahead of their launcher.

    steps: the number of them; by default all but the last one.
    """
    return {"policy": f"policies_for_tests:{policy}", "settings": {"file": str(file), "steps": steps}}


@pytest.mark.parametrize("number", range(10))
def test_whoever_is_killed_whenever_the_run_ends_in_time_with_the_same_tokens_or_an_error(
    forks: ForkServer, models: Path, expected: dict[str, list[list[int]]], tmp_path: Path, number: int
) -> None:
    draw = random.Random(number)
    nodes = draw.choice([2, 3, 4])
    rank = draw.randrange(nodes)
    killed = tmp_path / "killed"

    def act() -> None:
        forks.nodes[rank].process.kill()
        killed.touch()

    killer = Killer(draw.randint(1, len(PROMPTS) * (NEW_TOKENS - 1)), act)
    replicated = nodes == 4 or (nodes == 3 and rank != 1)
    try:
        policy = draw.choice(["AwaitingRouterAided", "AwaitingNaive"])
        report = run_here(models / "mixtral", forks, nodes, listener=killer, **awaiting(killed, policy))
    except NodeLost as error:
        assert not replicated
        assert error.rank == rank
        assert f"node {rank} (local-{rank}) is lost" in str(error)
        kept = error.report.tokens
        assert all(whole[: len(part)] == part for whole, part in zip(expected["mixtral"], kept, strict=True))
    else:
        assert replicated
        assert report.tokens == expected["mixtral"]
        assert report.epochs == 2
        assert report.request_times is None, "some requests ran in both epochs"
        assert report.members[rank].lost is not None
    assert time.monotonic() - killer.since < TIMEOUT_SECONDS
    assert all(node.process.exitcode is not None for node in forks.nodes.values())


@pytest.mark.parametrize(
    ("model", "policy", "nodes", "lost"),
    [("dbrx", "AwaitingBalanced", 2, [0]), ("mixtral", "AwaitingRouterAided", 4, [0, 3])],
    ids=["the last of two goes on alone", "two lost at once"],
)
def test_nodes_go_on_without_lost_ones_whose_experts_they_hold(
    forks: ForkServer,
    models: Path,
    expected: dict[str, list[list[int]]],
    tmp_path: Path,
    model: str,
    policy: str,
    nodes: int,
    lost: list[int],
) -> None:
    killed = tmp_path / "killed"

    def act() -> None:
        for rank in lost:
            forks.nodes[rank].process.kill()
        killed.touch()

    killer = Killer(5, act)
    report = run_here(models / model, forks, nodes, listener=killer, **awaiting(killed, policy))
    assert report.tokens == expected[model]
    assert [rank for rank, member in enumerate(report.members) if member.lost is not None] == lost
    assert time.monotonic() - killer.since < TIMEOUT_SECONDS


def test_a_node_that_comes_back_takes_part_again(
    seated: tuple[Path, Cluster], forks: ForkServer, models: Path
) -> None:
    file, _ = seated
    arguments = ["node", str(models / "mixtral"), "--cluster", str(file), "--rank", "0"]

    killed = file.parent / "killed"

    def act() -> None:
        forks.nodes[0].process.kill()
        killed.touch()
        forks.start(0, arguments, file.parent / "back.err")

    more = {"max_new_tokens": 150, **awaiting(killed, "UnhurriedAlone", steps=10)}
    expected = alone(models / "mixtral", 150)
    report = run_seated(file, forks, models / "mixtral", listener=Killer(30, act), **more)
    assert report.tokens == expected
    assert report.epochs == 3
    assert [member.lost for member in report.members] == [None, None]
    assert forks.nodes[0].wait(PATIENCE_SECONDS) == 0


def test_a_node_that_stands_still_is_lost_after_the_time_that_the_file_says(
    seated: tuple[Path, Cluster], forks: ForkServer, models: Path
) -> None:
    file, described = seated
    stopped = file.parent / "stopped"

    def act() -> None:
        os.kill(forks.nodes[1].process.pid or 0, signal.SIGSTOP)
        stopped.touch()

    killer = Killer(4, act)
    file.write_text(cluster_toml(msgspec.structs.replace(described, lost_after=3.0)))
    with pytest.raises(NodeLost, match="silent for 3 s"):
        run_seated(file, forks, models / "mixtral", listener=killer, **awaiting(stopped, "AwaitingNaive"))
    assert time.monotonic() - killer.since < TIMEOUT_SECONDS
    assert forks.nodes[1].process.exitcode is not None


def test_a_node_ends_when_its_launcher_is_gone(
    seated: tuple[Path, Cluster], forks: ForkServer, models: Path
) -> None:
    control, node, joined = first_node(seated, forks, models)
    assert isinstance(joined.message, JoinRequest)
    control.say(joined.peer, Welcome(run=NodeRun(policy="ep_naive"), lost_after=0.5, transport="zeromq"))
    control.close()
    assert node.wait(PATIENCE_SECONDS) == 1
    assert "is gone" in node.last_words()


def test_nodes_whose_disks_are_full_compute(
    seated: tuple[Path, Cluster], forks: ForkServer, models: Path, expected: dict[str, list[list[int]]]
) -> None:
    file, _ = seated

    def start(node: Host, arguments: Sequence[str]) -> Process:
        return forks.start(node.rank, arguments, file.parent / "err", fill_disk)

    report = run_seated(file, forks, models / "mixtral", start=start)
    assert report.tokens == expected["mixtral"]
    assert [forks.nodes[rank].poll() for rank in range(2)] == [0, 0]


class AtTokens(Listener):
    """Does something at some of the tokens."""

    def __init__(self, acts: dict[int, Callable[[], object]]) -> None:
        self._acts = acts
        self._count = 0

    def generated(self, request: int, token: int, text: str) -> None:
        self._count += 1
        if self._count in self._acts:
            self._acts[self._count]()


def test_a_node_that_goes_on_after_it_was_lost_changes_no_token_and_ends(
    seated: tuple[Path, Cluster], forks: ForkServer, models: Path
) -> None:
    file, described = seated
    file.write_text(cluster_toml(msgspec.structs.replace(described, lost_after=10.0)))

    def start(node: Host, arguments: Sequence[str]) -> Process:
        forks(file.parent)(node, arguments)
        return ByOthers()  # which the launcher cannot kill

    stopped = file.parent / "stopped"

    def signals(number: int) -> None:
        os.kill(forks.nodes[0].process.pid or 0, number)
        stopped.touch()

    report = run_seated(
        file,
        forks,
        models / "mixtral",
        start=start,
        max_new_tokens=30,
        listener=AtTokens({30: partial(signals, signal.SIGSTOP), 45: partial(signals, signal.SIGCONT)}),
        **awaiting(stopped, "UnhurriedAlone", steps=10),
    )
    assert report.tokens == alone(models / "mixtral", 30)
    assert report.members[0].lost == "silent for 10 s"
    assert forks.nodes[0].wait(PATIENCE_SECONDS) == 1
    assert "node 0 (mac-0) was silent for 10 s, and the others went on" in forks.nodes[0].last_words()
