"""Tensor parallelism, real: two emulated accelerators in one process give the tokens of one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import moesched
from moesched.cli.main import main
from moesched.devices.emulated.device import EmulatedDevice
from moesched.devices.shared.arena import aligned_bytes
from moesched.devices.shared.page_reader import PageReader
from moesched.errors import BadInput, TaskFailed
from moesched.inputs.accelerators import cut_over_ranks
from moesched.machines import INTERCONNECT, Machine, parse_machine
from moesched.machines.roofline import Roofline
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import Page, WeightLayout, weight_layout
from moesched.models.rotary import Rotary
from moesched.models.tensor_parallel import cut_checkpoint
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.requests.sampling import Sampling
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank, open_devices
from moesched.steps.plan import Plan
from moesched.tasks import Task
from moesched.trace import Recorder
from moesched.work import Work
from small_models import SMALL, small_model
from test_nodes import MIXTRAL, NEW_TOKENS, PROMPTS, expected

MACHINE = (Path(__file__).parent / "machines" / "two-slow.toml").read_text()

DBRX = SMALL.varied(
    layers=3, name="dbrx", form="dbrx", transposed_down=True, norm="layer", clip=8.0, rotary=Rotary(theta=5e5)
)
QWEN = SMALL.varied(layers=3, name="qwen", form="qwen3_moe", qk_norm="head")
TIED = SMALL.varied(layers=2, name="tied", tied_embeddings=True)
MODELS = {config.name: config for config in (MIXTRAL, DBRX, QWEN, TIED)}
PER_GPU = {"gpu": 320_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for name, config in MODELS.items():
        small_model(folder / name, config=config)
    (folder / "two.toml").write_text(MACHINE)
    return folder


@pytest.fixture(scope="module")
def machine() -> Machine:
    return parse_machine(MACHINE.encode(), "the test's machine")


def run_two(folder: Path, model: str, **changes: Any) -> moesched.JobReport:
    options: dict[str, Any] = {
        "policy": "cgopipe",
        "machine": str(folder / "two.toml"),
        "device": "emulated",
        "dtype": "float32",
        "max_new_tokens": NEW_TOKENS,
        "micro_batch_size": 2,
        "budgets": PER_GPU,
        "device_settings": {"dilation": 1.0},
    }
    return moesched.run_model(folder / model, PROMPTS, **(options | changes))


# -- the weights -----------------------------------------------------------------------------------


def shares(checkpoint: Checkpoint, dtype: str) -> list[dict[str, torch.Tensor]]:
    """Every tensor of both ranks, as their readers read them."""
    read = []
    for rank in range(2):
        cut = cut_checkpoint(checkpoint, rank, 2)
        with PageReader(cut, weight_layout(cut.config, dtype)) as reader:
            read.append({name: reader.read_tensor(name) for name in cut.tensors})
    return read


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [MIXTRAL, DBRX], ids=["mixtral", "dbrx"])
def test_the_ranks_shares_put_together_are_the_model(folder: Path, config: ModelConfig, dtype: str) -> None:
    checkpoint = open_checkpoint(folder / config.name)
    with PageReader(checkpoint, weight_layout(config, dtype)) as reader:
        whole = {name: reader.read_tensor(name) for name in checkpoint.tensors}
    first, second = shares(checkpoint, dtype)
    for name, tensor in whole.items():
        if first[name].shape == tensor.shape:
            assert torch.equal(first[name], tensor)
            assert torch.equal(second[name], tensor)
        else:
            cut = next(axis for axis in (0, 1) if first[name].shape[axis] != tensor.shape[axis])
            assert torch.equal(torch.cat([first[name], second[name]], dim=cut), tensor), name


@pytest.mark.parametrize("page_bytes", [None, 1000])
def test_pages_of_a_share_show_its_tensors(folder: Path, page_bytes: int | None) -> None:
    checkpoint = cut_checkpoint(open_checkpoint(folder / "mixtral"), 1, 2)
    layout = weight_layout(checkpoint.config, "float32", page_bytes)
    blocks: dict[str, list[torch.Tensor]] = {}
    with PageReader(checkpoint, layout) as reader:
        for page in layout.pages:
            slot = aligned_bytes(reader.bytes_in_slot(page))
            reader.read(page, slot)
            for name, views in reader.views(slot, page).items():
                blocks.setdefault(name, []).extend(views)
        for name, parts in blocks.items():
            assert torch.equal(torch.cat(parts), reader.read_tensor(name)), name


# -- the tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["cgopipe", "layer_streaming", "expert_streaming", "adversarial"])
@pytest.mark.parametrize("model", ["mixtral", "dbrx"])
def test_two_accelerators_give_the_tokens_of_one(folder: Path, model: str, policy: str) -> None:
    report = run_two(folder, model, policy=policy)
    assert report.tensor_parallel == 2
    assert report.tokens == expected(folder / model)


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        ("mixtral", "moesched.testing.random_rows:RandomRows"),
        ("qwen", "resident"),
        ("tied", "resident"),
    ],
    ids=["experts cut by rows", "heads normalised one by one", "an lm_head that is the embedding"],
)
def test_both_accelerators_have_their_parts_of(folder: Path, model: str, policy: str) -> None:
    assert run_two(folder, model, policy=policy, budgets={}).tokens == expected(folder / model)


def test_two_accelerators_find_the_beams_of_one(folder: Path) -> None:
    sampling = Sampling(beams=3, length_penalty=0.0)
    one, two = (
        run_two(folder, "mixtral", sampling=sampling, budgets={}, tensor_parallel=ranks) for ranks in (1, 2)
    )
    assert two.tokens == one.tokens
    assert two.scores == pytest.approx(one.scores, abs=1e-4)


def test_batches_follow_each_other_on_all_ranks(folder: Path) -> None:
    report = run_two(folder, "mixtral", policy="resident", budgets={}, batch_size=2)
    assert (report.batches, report.tokens) == (3, expected(folder / "mixtral"))


def test_one_of_two_accelerators_can_be_used_alone(folder: Path) -> None:
    report = run_two(folder, "mixtral", tensor_parallel=1, budgets={"gpu": 400_000})
    assert report.tensor_parallel == 1
    assert report.tokens == expected(folder / "mixtral")


# -- what ran --------------------------------------------------------------------------------------


def test_every_all_reduce_has_a_part_on_each_rank_and_takes_its_time(folder: Path, machine: Machine) -> None:
    checkpoint, recorder = open_checkpoint(folder / "mixtral"), Recorder()
    config, share, _ = cut_over_ranks(checkpoint.config, machine, None, None)
    layout = weight_layout(config, "float32")
    batch = split_batch([len(prompt) for prompt in PROMPTS], NEW_TOKENS, 2)
    with open_devices("emulated", {"dilation": 1.0}, checkpoint, layout) as devices:
        ranks = []
        for device in devices.all:
            policy = make_policy("cgopipe")
            plan = plan_run(share, layout, batch, policy, PER_GPU, devices.slot_bytes)
            ranks.append(Rank(plan, policy, device))
        first, *peers = ranks
        run(first.plan, first.policy, first.device, PROMPTS, recorder=recorder, peers=peers, keep_open=True)
    recording = recorder.recording()
    reduced = [
        {each.ticket: each for each in recording.slices if each.lane.rank == rank and each.ticket >= 0}
        for rank in range(2)
    ]
    per_step = len(batch.micro_batches) * (2 * config.layers + 1)
    assert sorted(reduced[0]) == sorted(reduced[1]) == list(range(NEW_TOKENS * per_step))
    cost = Roofline(share, "float32")
    for ticket, one in reduced[0].items():
        other = reduced[1][ticket]
        assert one.task.label == other.task.label
        assert one.start < other.end and other.start < one.end
        work = Work("all_reduce", INTERCONNECT, nbytes=one.task.nbytes)
        assert one.end - one.start >= 0.99e9 * cost.work(work).seconds


def test_the_command_runs_on_two_accelerators_and_writes_a_trace_of_both(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    where = ["--device", "emulated", "--machine", str(folder / "two.toml"), "--budget", "gpu=320KB"]
    what = ["--policy", "cgopipe", "--prompt-ids", "5,6,7;8,9", "--max-new-tokens", "2", "--dtype", "float32"]
    code = main(["run", str(folder / "mixtral"), *where, *what, "--trace", str(trace), "--json"])
    report = json.loads(capfd.readouterr().out)
    assert (code, report["tensor_parallel"]) == (0, 2)
    assert report["lanes"]["interconnect"]["busy_seconds"] > 0
    assert moesched.check_trace(trace) == []


# -- failures --------------------------------------------------------------------------------------


class FailsOnTheSecond(EmulatedDevice):
    """Its second rank cannot do a verb."""

    def __init__(
        self, checkpoint: Checkpoint, layout: WeightLayout, *, verb: str = "", dilation: float = 0.0
    ) -> None:
        super().__init__(checkpoint, layout, dilation=dilation)
        self._verb = verb
        self._second = False

    def join(self, rank: int, transport: Any, first: Any) -> None:
        super().join(rank, transport, first)
        self._second = rank == 1

    def execute(self, task: Task) -> Any:
        if self._second and task.verb == self._verb and task.step == 1:
            raise RuntimeError("out of luck")
        return super().execute(task)


@pytest.mark.parametrize("verb", ["pre_attention", "fetch", "logits", "sample"])
def test_a_rank_that_fails_ends_the_run_with_its_story(folder: Path, verb: str) -> None:
    with pytest.raises(TaskFailed, match=rf"{verb} .*failed on lane .*out of luck"):
        run_two(
            folder,
            "mixtral",
            policy="layer_streaming",
            device="test_ranks:FailsOnTheSecond",
            device_settings={"verb": verb, "dilation": 1.0},
        )


class NoRank:
    """A whole device that is never one of several: it has no `join`."""

    def slot_bytes(self, page: Page) -> int:
        raise NotImplementedError

    def begin(self, plan: Plan, prompts: Any, sampling: Sampling) -> None:
        raise NotImplementedError

    def execute(self, task: Task) -> Any:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


class CannotClose(NoRank):
    """A rank whose end fails."""

    closed: ClassVar[list[int]] = []

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout) -> None:
        self.rank = -1

    def join(self, rank: int, transport: Any, first: Any) -> None:
        self.rank = rank

    async def aclose(self) -> None:
        self.closed.append(self.rank)
        raise OSError(f"rank {self.rank} cannot close")


def test_all_devices_are_closed_although_one_of_them_fails(folder: Path) -> None:
    checkpoint = open_checkpoint(folder / MIXTRAL.name)
    layout = weight_layout(cut_checkpoint(checkpoint, 0, 2).config)
    device: Any = CannotClose
    with pytest.raises(OSError, match="cannot close"), open_devices(device, {}, checkpoint, layout):
        assert CannotClose.closed == []
    assert CannotClose.closed == [0, 1]


class NotADevice(NoRank):
    """A device that lacks a method of the seam."""

    execute = None  # type: ignore[assignment]  # that is the point


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("NoRank", "cannot be one of 2 ranks: use --tensor-parallel 1"),
        ("NotADevice", r"NotADevice is not a device: it has no execute\(\); see .*seams.Device"),
    ],
)
def test_a_class_that_lacks_a_method_is_refused(folder: Path, device: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        run_two(folder, "mixtral", device=f"test_ranks:{device}", device_settings={})
