"""Makes the proposal of `moesched plan`: a plan, its predicted rate and bottleneck, and gains from better hardware."""

from __future__ import annotations

import msgspec

from moesched.inputs.accelerators import cut_over_ranks
from moesched.inputs.budgets import assumed_process, within_process
from moesched.inputs.chosen_policy import choose_policy
from moesched.inputs.defaults import MACHINE
from moesched.inputs.dtype import dtype_for
from moesched.inputs.lookup import changed_machine, find_shape
from moesched.inputs.options import Objective, PlanOptions
from moesched.keywords import takes
from moesched.machines import Machine
from moesched.models.layout import WeightLayout, room_for, weight_layout
from moesched.planner.objectives import require_objective
from moesched.planner.ranking import Ranked
from moesched.planner.resources import Gain
from moesched.planner.search_policies import BestPlan, plan_best
from moesched.planner.uncertainty import Figures
from moesched.requests.workloads import Workload, load_workload
from moesched.system.cells import named_in_cell
from moesched.system.own_loop import interruptible
from moesched.units import format_number, format_token_rate

MOST_REQUESTS = 8192
"""Largest number of requests in one batch, if nothing else limits it."""


class PlannedSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The 6-tuple of MoE-Lightning (section 4.2), and the policy whose schedule has these sizes.

    Attributes:
        prefill_chunk: most prompt tokens that pass a layer together; None for all tokens of a micro-batch.
        attention_on_gpu: whether the GPU computes all attention in decode, even if a KV cache is on the host.
        weights_on_gpu, kv_on_gpu: shares, from 0 to 1, of the weights and of the KV cache that stay in the
            accelerator's memory.
    """

    policy: str
    batch_size: int
    micro_batch_size: int
    prefill_chunk: int | None
    attention_on_gpu: bool
    ffn_on_gpu: bool
    weights_on_gpu: float
    kv_on_gpu: float


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the plan's schedule on the virtual clock.

    Attributes:
        throughput_tokens_per_second: all generated tokens, divided by the seconds from the end of loading.
        decode_step_seconds: time of a step in the middle of the generation; 0 if a single token is generated.
        bound_by: the busiest lane in such a decode step; in the prefill if there is no decode step.
        utilization: for each lane, the share of that decode step or prefill in which the lane is busy.
        bound_tokens_per_second: throughput if the lanes of this schedule overlapped perfectly.
    """

    throughput_tokens_per_second: float
    prefill_seconds: float
    decode_step_seconds: float
    bound_by: str
    bound_tokens_per_second: float
    utilization: dict[str, float]
    peak_bytes: dict[str, int]


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan for a model, a machine and a workload.

    Attributes:
        tensor_parallel: number of accelerators that the model is split over. The predicted peak of the accelerator's
            memory is for one of them; the peaks of other memories are for all together.
        gains: the gain from a tenth more of each resource, the largest first.
        objective: the figure that the plan maximises.
        ranking: all policies that one machine can run, the best first; those that do not fit are last.
        costs_measured: whether `moesched calibrate` measured the costs that the figures rest on.
        band: low end, expected value and high end of each figure; None if no band was asked for.
        at_peak: the figures if the machine sustained its stated rates in full; None without a band, or if costs were
            measured.
        widest_rate: the rate, in words, whose uncertainty widens the throughput's band most; None if there is none.
    """

    model: str
    machine: str
    workload: str
    new_tokens: int
    objective: Objective
    dtype: str
    tensor_parallel: int
    plan: PlannedSizes
    predicted: Predicted
    gains: list[Gain]
    ranking: list[Ranked]
    costs_measured: bool
    band: dict[str, tuple[float, float, float]] | None
    at_peak: Figures | None
    widest_rate: str | None

    def __repr__(self) -> str:
        return f"<Proposal: {self._summary}>"

    def _repr_html_(self) -> str:
        from moesched.report.cell_drawings import cell, memory_table  # loaded where something is drawn
        from moesched.report.markup import table

        rows = [
            [row.policy, format_number(row.throughput_tokens_per_second), row.bound_by or ""]
            for row in self.ranking
            if row.throughput_tokens_per_second is not None
        ]
        return cell(
            self._summary,
            table("", ["policy", "tokens/s, predicted", "bound by"], rows, 2),
            memory_table("peak, predicted", self.predicted.peak_bytes),
        )

    @property
    def _summary(self) -> str:
        plan, predicted = self.plan, self.predicted
        return (
            f"{plan.policy} for {self.model} on {self.machine}, batch of {plan.batch_size:,} in micro-batches of "
            f"{plan.micro_batch_size}: {format_token_rate(predicted.throughput_tokens_per_second)} predicted, bound by "
            f"{predicted.bound_by}"
        )


@takes(PlanOptions)
@interruptible()
def plan_model(given: PlanOptions) -> Proposal:
    """Find the policy and the sizes that are best for an objective; no weights and no GPU are needed.

    Raises:
        BadInput: an argument cannot be used.
        DoesNotFit: no policy fits; the message names the missing bytes.
    """
    policy, objective = given.policy, given.objective
    cls = None if policy is None else choose_policy(policy).cls
    config, described, shares = cut_over_ranks(
        find_shape(given.model, given.format),
        changed_machine(given.machine, given.machine_set),
        given.budgets,
        given.tensor_parallel,
        cls,
        here=given.machine == MACHINE,
    )
    shares, process = within_process(shares, described, assumed_process(described), config.ranks)
    chosen = given.workload if isinstance(given.workload, Workload) else load_workload(given.workload)
    new_tokens = chosen.new_tokens[0] if given.gen is None else given.gen
    require_objective(objective, new_tokens)
    layout = weight_layout(config, dtype_for(config.dtype, given.dtype, described))
    best = plan_best(
        described,
        layout,
        chosen.lengths(MOST_REQUESTS, given.seed),
        new_tokens,
        objective=objective,
        policies=None if policy is None else (policy,),
        settings=given.settings,
        budgets=shares,
        slot_bytes=room_for,
        process=process,
        band=given.band,
        on_progress=given.on_progress or named_in_cell() or (lambda what: None),
    )
    return _proposal(best, described, chosen.name, new_tokens, objective, layout)


def _proposal(
    best: BestPlan,
    machine: Machine,
    workload: str,
    new_tokens: int,
    objective: Objective,
    layout: WeightLayout,
) -> Proposal:
    found = best.uncertainty
    return Proposal(
        model=layout.config.name,
        machine=machine.name,
        workload=workload,
        new_tokens=new_tokens,
        objective=objective,
        dtype=layout.dtype,
        tensor_parallel=layout.config.ranks,
        plan=_sizes(best),
        predicted=_predicted(best),
        gains=best.gains,
        ranking=best.ranking,
        costs_measured=bool(machine.cost_table),
        band=found and found.band,
        at_peak=found and found.at_peak,
        widest_rate=found and found.widest_rate,
    )


def _sizes(best: BestPlan) -> PlannedSizes:
    return PlannedSizes(
        policy=best.policy,
        batch_size=best.schedule.batch_size,
        micro_batch_size=best.schedule.micro_batch_size,
        prefill_chunk=best.schedule.chunk,
        attention_on_gpu=best.attention_on_gpu or best.schedule.kv_on_gpu == 1,
        ffn_on_gpu=best.ffn_on_gpu,
        weights_on_gpu=best.schedule.weights_on_gpu,
        kv_on_gpu=best.schedule.kv_on_gpu,
    )


def _predicted(best: BestPlan) -> Predicted:
    schedule = best.schedule
    return Predicted(
        throughput_tokens_per_second=schedule.throughput,
        prefill_seconds=schedule.trial_run.prefill_seconds,
        decode_step_seconds=schedule.trial_run.step_seconds,
        bound_by=best.bound_by,
        bound_tokens_per_second=schedule.bound,
        utilization=schedule.trial_run.utilization,
        peak_bytes=schedule.peak_bytes,
    )
