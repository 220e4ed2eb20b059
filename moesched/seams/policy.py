"""The seam of policies: they plan a run and schedule its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from moesched.steps.plan import Plan
    from moesched.steps.step import Step


class Policy(Protocol):
    """Plans a run and schedules its steps.

    Each batch gets a new instance, made with the user's `--set` values as keyword arguments; only a class with
    `keeps_state` = True gets one instance for all batches. The instance submits tasks in program order by verbs:
    methods of `Step` that each submit a task and return its handle. The instance may await nothing but these handles.
    If the class has a setting `kv_on_gpu`, the share (0 to 1) of the micro-batches whose KV cache stays on the
    accelerator, the planner searches its values, too.

    On a machine with several equal accelerators the model is divided among all of them (tensor parallelism), and a
    policy sees one accelerator with its share of the model. A class for a pipeline declares that it is one (see
    `Pipelined`), and so does a class for several machines (see `ExpertParallel`).
    """

    def plan(self, plan: Plan) -> None:
        """Declare on `plan` where the KV cache lies, which pages stay in memory, and the pools for all other pages."""

    async def prefill(self, step: Step) -> None:
        """Submit the tasks of the prompts, up to and including each micro-batch's `sample`."""

    async def decode(self, step: Step) -> None:
        """Submit the tasks of one more token of each sequence, up to and including each micro-batch's `sample`.

        If a caller adds requests to a run, some micro-batches may hold prompts in this step (`Step.phase`).
        """


@runtime_checkable
class Pipelined(Protocol):
    """A policy class that declares whether it is a pipeline, in which each accelerator computes layers of its own.

    If `pipelines` is True, the policy sees the whole machine, and its plan has a stage per accelerator.
    """

    pipelines: bool


@runtime_checkable
class ExpertParallel(Protocol):
    """A policy class that declares whether several machines share a model's experts, each with a policy of its own.

    If `expert_parallel` is True, `plan` calls `Plan.place_experts` and the steps call `Step.assign`, with equal
    arguments on all machines. Without a declaration the policy runs on one machine.
    """

    expert_parallel: bool


@runtime_checkable
class KeepsState(Protocol):
    """A policy class that declares whether an instance serves all batches of a run, one after the other.

    If `keeps_state` is True, `plan` is called once for each batch, and the instance's own state lasts from batch to
    batch. Simulations then call the policy for every step. For other policies, if two steps have equal task graphs,
    they may reuse that graph for later steps; here a later step may still differ.
    """

    keeps_state: bool


def keeps_state(policy: object) -> bool:
    """Test whether a policy, or its class, declares `keeps_state = True`."""
    return isinstance(policy, KeepsState) and policy.keeps_state


def is_pipelined(policy: object) -> bool:
    """Test whether a policy, or its class, declares `pipelines = True`."""
    return isinstance(policy, Pipelined) and policy.pipelines


def is_expert_parallel(policy: object) -> bool:
    """Test whether a policy, or its class, declares `expert_parallel = True`."""
    return isinstance(policy, ExpertParallel) and policy.expert_parallel
