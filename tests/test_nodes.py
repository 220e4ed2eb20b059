"""Expert parallelism over nodes, real: several nodes in one process give the tokens of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.shared.small_runs import ONE_MEMORY
from moesched.devices.shared.node_exchanges import NodeVerbs, exchange_of
from moesched.devices.torch.device import TorchDevice
from moesched.errors import TaskFailed, TransportError
from moesched.machines.networks import NETWORK
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.rotary import Rotary
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.seams import Transport
from moesched.tasks import Collective, Lane, Task
from moesched.testing import Case
from moesched.trace import About, Recorder, check_trace, write_trace
from moesched.transports.inproc import InprocTransport
from moesched.work import Work
from odd_models import GLM, GPT_OSS, GRANITE, MINIMAX
from reference import decisive_tokens
from small_models import SMALL, small_model

MIXTRAL = SMALL.varied(layers=3, name="mixtral")
DBRX = SMALL.varied(
    layers=3, name="dbrx", form="dbrx", transposed_down=True, norm="layer", clip=8.0, rotary=Rotary(theta=5e5),
    experts=5, top_k=3,
)  # fmt: skip
MODELS = {config.name: config for config in (MIXTRAL, DBRX)}
# With a dense layer and shared experts; with biases and sinks; with factors; with a router that corrects its choice.
OTHERS = {config.name: config for config in (GLM, GPT_OSS, GRANITE, MINIMAX)}
PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4, 5, 6, 7], [90], [11, 12]]
NEW_TOKENS = 4
POLICIES = ["ep_naive", "ep_busy_full", "ep_router_aided", "ep_balanced"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    for name, config in (MODELS | OTHERS).items():
        small_model(folder / name, config=config)
    return folder


def expected(directory: Path) -> list[list[int]]:
    return decisive_tokens(directory, PROMPTS, NEW_TOKENS)


def run_nodes(
    directory: Path,
    policy: str,
    nodes: int,
    kind: Any = TorchDevice,
    recorder: Recorder | None = None,
    prompts: Sequence[list[int]] = PROMPTS,
    new_tokens: int = NEW_TOKENS,
    **settings: Any,
) -> tuple[list[list[int]], list[Any]]:
    """The tokens of the first node, and the devices of all, which are of a kind."""
    checkpoint = open_checkpoint(directory)
    layout = weight_layout(checkpoint.config, "float32")
    batch = split_batch([len(prompt) for prompt in prompts], new_tokens, 2)
    transport = InprocTransport(nodes)
    ranks = []
    for node in range(nodes):
        device = kind(checkpoint, layout, keep_logits=True)
        made = make_policy(policy, settings)
        plan = plan_run(ONE_MEMORY, layout, batch, made, slot_bytes=device.slot_bytes, nodes=nodes, node=node)
        ranks.append(Rank(plan, made, device))
        device.join(node, transport, ranks[0].device)
    first, *peers = ranks
    report = run(first.plan, first.policy, first.device, prompts, peers=peers, recorder=recorder)
    return report.tokens or [], [each.device for each in ranks]


def check_logits_alike(devices: list[TorchDevice]) -> None:
    """All nodes that attend have the same bits."""
    first, *others = devices
    assert first.logits
    for other in others:
        assert len(other.logits) == len(first.logits)
        assert all(
            torch.equal(mine, theirs)
            for (_, mine), (_, theirs) in zip(first.logits, other.logits, strict=True)
        )


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_nodes_give_the_tokens_of_one_machine(folder: Path, model: str, nodes: int) -> None:
    wanted = expected(folder / model)
    for policy in POLICIES[nodes % 2 :: 2]:
        tokens, devices = run_nodes(folder / model, policy, nodes, decentralised=True)
        assert tokens == wanted
        check_logits_alike(devices)


@pytest.mark.parametrize("policy", POLICIES)
def test_so_they_do_with_the_first_one_at_the_centre(folder: Path, policy: str) -> None:
    nodes = 2 + POLICIES.index(policy) % 3
    tokens, devices = run_nodes(folder / "dbrx", policy, nodes, decentralised=False)
    assert tokens == expected(folder / "dbrx")
    assert not any(other.logits for other in devices[1:])


@pytest.mark.parametrize("decentralised", [True, False])
@pytest.mark.parametrize("model", OTHERS)
def test_nodes_give_the_logits_of_one_machine(folder: Path, model: str, decentralised: bool) -> None:
    _, (alone,) = run_nodes(folder / model, "resident", 1)
    for nodes in (2, 3):
        _, devices = run_nodes(folder / model, "ep_router_aided", nodes, decentralised=decentralised)
        for (_, mine), (_, theirs) in zip(devices[0].logits, alone.logits, strict=True):
            assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        if decentralised:
            check_logits_alike(devices)


def test_a_node_reads_its_own_experts_only(folder: Path) -> None:
    _, devices = run_nodes(folder / "mixtral", "ep_naive", 2, decentralised=False)
    config = open_checkpoint(folder / "mixtral").config
    expert = 3 * config.hidden * config.routed.intermediate * 4
    first, second = (device.bytes_read for device in devices)
    assert second >= config.layers * 2 * expert
    assert second < first


class FailsOnTheSecond(TorchDevice):
    """Its second node cannot run an expert."""

    node = 0

    def join(self, rank: int, transport: Transport, first: Any) -> None:
        self.node = rank
        super().join(rank, transport, first)

    def execute(self, task: Task) -> Any:
        if self.node == 1 and task.verb == "run_expert" and task.step == 1:
            raise RuntimeError("out of luck")
        return super().execute(task)


def test_a_node_that_fails_ends_the_run_with_its_story(folder: Path) -> None:
    with pytest.raises(TaskFailed, match=r"run_expert .*failed on lane accelerator .*out of luck"):
        run_nodes(folder / "mixtral", "ep_router_aided", 2, FailsOnTheSecond)


class WithoutParts:
    """Kernels whose sums cannot be brought to the host, as on a GPU that is lost."""

    def partial_sum(self, task: Task) -> None:
        """Nothing."""

    def on_host(self, tensor: None) -> Any:
        raise RuntimeError("out of luck")


@pytest.mark.parametrize("verb", ["all_reduce", "gather"])
def test_the_others_do_not_wait_for_a_node_whose_part_cannot_be_made(verb: str) -> None:
    policy = make_policy("ep_naive")
    plan = Case(name="nodes", machine=ONE_MEMORY, nodes=2).plan(policy, 1)
    transport = InprocTransport(2, timeout_seconds=10)
    kernels: Any = WithoutParts()
    verbs = NodeVerbs(plan, transport, kernels, None).verbs
    task = Collective(Lane(NETWORK), Work(verb, NETWORK), verb, micro_batch=0, ticket=0)
    verbs["partial_sum"](task)
    with pytest.raises(RuntimeError, match="out of luck"):
        verbs[verb](task)
    with pytest.raises(TransportError, match="rank 1 gave up: out of luck"):
        transport.all_reduce(0, exchange_of(task), np.ones(2))


def test_a_trace_shows_all_nodes_and_their_exchanges(folder: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    run_nodes(folder / "mixtral", "ep_balanced", 2, recorder=recorder)
    write_trace(tmp_path / "trace.json", recorder.recording(), About(driver="realtime"))
    assert check_trace(tmp_path / "trace.json") == []
    exchanges = [each for each in recorder.recording().slices if each.lane.name == NETWORK]
    by_node = [[each.ticket for each in exchanges if each.lane.rank == node] for node in range(2)]
    assert sorted(by_node[0]) == sorted(by_node[1]) == list(range(NEW_TOKENS * 3 * MIXTRAL.layers))
