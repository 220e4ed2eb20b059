"""The input of the planner's search: model, machine, budgets, policy and prompt lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache

import msgspec

from moesched.errors import BadInput
from moesched.inputs.options import Objective
from moesched.machines import Machine
from moesched.machines.cost_model import CostModel
from moesched.models.layout import Page, WeightLayout, bytes_of
from moesched.requests.batch import Batch
from moesched.requests.batching import BatchSizes, batch_of
from moesched.runs.planning import plan_run
from moesched.seams import Policy
from moesched.settings import takes_setting
from moesched.steps.plan import Plan
from moesched.steps.process import Process

UNLIMITED = 1 << 60
"""Budget in bytes that every plan fits in."""
KV_SHARE = "kv_on_gpu"
"""The setting of a policy for the share of the KV cache that stays on the accelerator."""


class Setting(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that a plan depends on, apart from the batch.

    Attributes:
        make: makes a new policy for each plan; takes the argument `kv_on_gpu` if the policy splits the KV cache.
        lengths: prompt length of each request, in tokens; a batch takes the first of these requests, or all.
        budgets: bytes by memory; by default the machine's capacities.
        slot_bytes: a function from a page to the bytes of its slot on the device; None if pages take their own bytes.
        splits_kv: whether the policy has a setting for the share of the KV cache that stays on the accelerator.
        kv_on_gpu: the share of the KV cache on the accelerator, if it is fixed; None to search for it.
        beams: sequences of each request in decode.
        prefill_chunk: most tokens of a micro-batch that pass a layer together in prefill; None for no limit.
        nodes: number of equal machines that share the experts.
        process: the process that will run the plans, whose memory counts; None to ignore it.
        objective: the figure that the search maximises.
    """

    make: Callable[..., Policy]
    machine: Machine
    layout: WeightLayout
    lengths: tuple[int, ...]
    new_tokens: int
    cost: CostModel
    budgets: dict[str, int] = {}
    slot_bytes: Callable[[Page], int] | None = None
    splits_kv: bool = False
    kv_on_gpu: float | None = None
    beams: int = 1
    prefill_chunk: int | None = None
    nodes: int = 1
    process: Process | None = None
    objective: Objective = "throughput"

    def batch(self, micro_batches: int, size: int) -> Batch:
        """Return a batch of the first requests: at most `micro_batches` micro-batches of `size` requests.

        The last micro-batch may have fewer requests.
        """
        lengths = self.lengths[: micro_batches * size]
        sizes = BatchSizes(len(lengths), size, beams=self.beams, prefill_chunk=self.prefill_chunk)
        return _batch(lengths, self.new_tokens, sizes)

    def plan(
        self, batch: Batch, budgets: dict[str, int] | None = None, kv_on_gpu: float | None = None
    ) -> tuple[Plan, Policy]:
        """Plan a batch; return its plan and policy.

        With several nodes the result is the plan of the first node, and the plans of the others must fit, too.

        Args:
            budgets: bytes by memory; by default the budgets in the setting.
            kv_on_gpu: the share of the KV cache that stays on the accelerator; by default the share that the policy
                chooses.

        Raises:
            BadInput: the plan does not fit; the message names the memory and the missing bytes.
        """
        budgets = self.budgets if budgets is None else budgets
        found = []
        for node in range(self.nodes):
            policy = self.make() if kv_on_gpu is None else self.make(**{KV_SHARE: kv_on_gpu})
            plan = plan_run(
                self.machine,
                self.layout,
                batch,
                policy,
                budgets,
                self.slot_bytes,
                self.nodes,
                node,
                process=self.process,
            )
            found.append((plan, policy))
        return found[0]

    def cost_of(self, plan: Plan) -> CostModel | None:
        """Return the setting's cost model; None for a plan of a pipeline.

        The cost model does not hold for a pipeline's plan: the machine of that plan has more links than the setting's.
        """
        return self.cost if len(plan.stages) == 1 else None

    def fits(self, batch: Batch, kv_on_gpu: float | None = None) -> bool:
        """Test whether the policy's plan of a batch fits in the memories.

        kv_on_gpu: the share of the KV cache that stays on the accelerator; by default the policy chooses it.
        """
        try:
            self.plan(batch, kv_on_gpu=kv_on_gpu)
        except BadInput:
            return False
        return True

    @property
    def searches_shares(self) -> bool:
        """True if the search is to find the share of the KV cache on the accelerator."""
        return self.splits_kv and self.kv_on_gpu is None

    @cached_property
    def weight_bytes(self) -> int:
        """The bytes that all weights of the model take in slots of the device's memory."""
        return sum(map(self.slot_bytes or bytes_of, self.layout.pages))

    def undecided(self, batch: Batch) -> Plan:
        """Return an empty plan of a batch, in which no policy has declared anything yet."""
        return Plan(self.machine, self.layout, batch, self.budgets, self.slot_bytes, process=self.process)

    def capacity(self, memory: str) -> int:
        """Return the budget of a memory in bytes; by default the memory's capacity."""
        return self.budgets.get(memory, self.machine.memories[memory].nbytes)


@lru_cache(maxsize=64)
def _batch(lengths: tuple[int, ...], new_tokens: int, sizes: BatchSizes) -> Batch:
    """Return a batch with prompts of these lengths; cached, since all policies are tried with equal arguments."""
    return batch_of(lengths, new_tokens, sizes)


def splits_kv(policy: type, machine: Machine) -> bool:
    """Test whether a policy has the setting `kv_on_gpu`, and the accelerator has a memory of its own."""
    return not machine.unified and takes_setting(policy, KV_SHARE)
