"""Long prompts on several nodes pass in two chunks: one is exchanged while the other is computed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

import moesched
from benchmarks.shared.forked_nodes import ForkServer
from moesched.cluster.cluster_jobs import run_local
from moesched.cluster.node_jobs import LONG_PROMPTS, Ask, NodeJob, NodeRun
from moesched.inputs.options import SizeOptions
from moesched.models.checkpoint import open_checkpoint
from small_models import SMALL, small_model

LONG = [1 + number % 50 for number in range(LONG_PROMPTS + 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = SMALL.varied(layers=2, max_positions=2048)
    return small_model(tmp_path_factory.mktemp("long") / "model", config=config)


@pytest.mark.parametrize(
    ("prompts", "sizes", "chunk"),
    [
        ([LONG], SizeOptions(), LONG_PROMPTS // 2 + 1),
        ([LONG[: LONG_PROMPTS // 2]] * 2, SizeOptions(), LONG_PROMPTS // 2),
        ([LONG[1:-1]], SizeOptions(), None),
        ([LONG], SizeOptions(prefill_chunk=100), 100),
        ([LONG, LONG], SizeOptions(batch_size=2, micro_batch_size=1), None),
    ],
    ids=["long", "long together", "short", "as asked", "two micro-batches already"],
)
def test_two_chunks_are_in_flight(
    model: Path, prompts: list[list[int]], sizes: SizeOptions, chunk: int | None
) -> None:
    ask = Ask(nodes=2, node=0, prompts=prompts, new_tokens=2, sizes=sizes)
    with closing(NodeJob(open_checkpoint(model), NodeRun(policy="ep_naive"))) as job:
        found, _ = job.prepare(ask)
    assert found.prefill_chunk == chunk


@pytest.mark.parametrize("device", ["torch", "mlx"])
@pytest.mark.parametrize("decentralised", [True, False])
def test_the_tokens_are_those_of_one_process(
    model: Path, server: ForkServer, device: str, decentralised: bool
) -> None:
    if device == "mlx":
        pytest.importorskip("mlx.core", reason="there is no MLX for this platform")
    ours = run_local(
        model,
        [LONG],
        nodes=2,
        policy="ep_naive",
        settings={"decentralised": decentralised},
        device=device,
        max_new_tokens=4,
        start=server,
    )
    assert ours.plan.prefill_chunk == LONG_PROMPTS // 2 + 1
    assert ours.tokens == moesched.run_model(model, [LONG], policy="resident", max_new_tokens=4).tokens
