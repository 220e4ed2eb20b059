"""One decoding run of ours on a model in a folder: its steps, and the bytes that they needed and read."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moesched import plugins
from moesched.devices.torch.device import TorchDevice
from moesched.machines.local import local_machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.outcome import Report
from moesched.runs.planning import plan_run
from moesched.steps.plan import Plan
from moesched.tasks import PageTransfer, Task

BUDGET_SHARE = 0.4
PROMPT_TOKENS = 16
STEPS = 9  # tokens for each request: a prefill and eight decode steps
COUNTED = slice(
    1, -1
)  # of the decode steps: the first finds pages fetched by prefill, the last fetches none ahead


class Model(NamedTuple):
    """Model and prompts that all runs share."""

    directory: Path
    checkpoint: Checkpoint
    layout: WeightLayout

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.layout.globals_bytes + sum(page.nbytes for page in self.layout.pages)

    @property
    def head_bytes(self) -> int:
        """Bytes of the LM head."""
        return self.checkpoint.tensors["lm_head"].nbytes

    @property
    def budget(self) -> int:
        """Bytes of host memory for a run whose weights do not fit."""
        return int(BUDGET_SHARE * self.weight_bytes)

    def prompts(self, count: int) -> list[list[int]]:
        """The same random prompts each time."""
        chance = random.Random(1)
        vocabulary = self.checkpoint.config.vocabulary
        return [[chance.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class Uses:
    """An observer that notes which pages each step fetched, which experts it used, and when each lane was busy."""

    def __init__(self) -> None:
        self.busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.ends: dict[int, float] = defaultdict(float)
        self.fetched: dict[int, list[Page]] = defaultdict(list)
        self.experts: dict[int, set[tuple[int, int]]] = defaultdict(set)

    def ended(self, task: Task) -> None:
        """Note a task."""
        self.busy[task.lane.name].append((task.start / 1e9, task.end / 1e9))
        if task.verb == "sample":
            self.ends[task.step] = max(self.ends[task.step], task.end / 1e9)
        if isinstance(task, PageTransfer) and task.verb == "fetch":
            self.fetched[task.step] += task.pages
        elif task.verb in ("post_attention", "route"):
            self.experts[task.step].update((task.layer, expert) for expert in task.value)

    def utilization(self, lane: str, steps: Sequence[int]) -> float:
        """The share of the time that these steps took in which a lane was busy."""
        since, until = self.ends[steps[0] - 1], self.ends[steps[-1]]
        busy = sum(max(0.0, min(end, until) - max(start, since)) for start, end in self.busy[lane])
        return busy / (until - since)

    def warmed(self, step: int, page: Page) -> bool:
        """Test whether the step used a page: the dense part always, an expert if a token was routed to it."""
        return page.expert < 0 or (page.layer, page.expert) in self.experts[step]


class Decoded(NamedTuple):
    """One run of ours."""

    plan: Plan
    report: Report
    needed: list[int]  # bytes, by counted step
    read: list[int]
    utilization: dict[str, float]  # by lane, over the counted steps

    @property
    def steps(self) -> list[float]:
        """Seconds of the decode steps that count."""
        return self.report.step_seconds[1:][COUNTED]


def decode(
    model: Model,
    policy: str,
    batch: int,
    micro_batch: int,
    budget: int,
) -> Decoded:
    """Run a policy once and count its bytes."""
    device = TorchDevice(open_checkpoint(model.directory), model.layout)
    prompts = model.prompts(batch)
    chosen, uses = plugins.make_policy(policy, {}), Uses()
    budgets = {"host": budget}
    lengths = [len(prompt) for prompt in prompts]
    split = split_batch(lengths, STEPS, micro_batch)
    plan = plan_run(local_machine(), model.layout, split, chosen, budgets, device.slot_bytes)
    report = run(plan, chosen, device, prompts, observers=[uses])
    kept = [page for fixed in plan.weights.resident for page in fixed.pages()]
    check_count(device, kept, uses)
    streamed = set(range(len(model.layout.pages))) - {page.id for page in kept}
    counted = range(1, STEPS)[COUNTED]
    used = [[page for page in model.layout.pages if uses.warmed(step, page)] for step in counted]
    needed = [sum(page.nbytes for page in pages if page.id in streamed) for pages in used]
    read = [sum(map(device.bytes_to_read, uses.fetched[step])) for step in counted]
    utilization = {lane: uses.utilization(lane, counted) for lane in report.lanes}
    return Decoded(plan, report, needed, read, utilization)


def check_count(device: Any, kept: Iterable[Page], uses: Uses) -> None:
    """Hold what the schedule fetched against what the reader says it read."""
    pages = [*kept, *(page for fetched in uses.fetched.values() for page in fetched)]
    counted = sum(map(device.bytes_to_read, pages))
    unexplained = device.bytes_read - counted - device.layout.globals_bytes
    if not 0 <= unexplained < 1 << 20:  # the blocks around the embedding, the norm and the head
        raise SystemExit(f"the reader read {unexplained:,} bytes that no task accounts for")
