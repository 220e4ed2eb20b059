"""Jobs: a job plans batches of requests that share policy, model, machine and budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.inputs.accelerators import cut_over_ranks
from moesched.inputs.budgets import assumed_process, within_process
from moesched.inputs.chosen_policy import ChosenPolicy, PolicyGiven, choose_policy
from moesched.inputs.defaults import MACHINE, POLICY
from moesched.inputs.dtype import dtype_for
from moesched.jobs.options import PlannedOptions
from moesched.machines import Machine
from moesched.machines.cost import cost_model
from moesched.models.config import ModelConfig
from moesched.models.layout import Page, room_for, weight_layout
from moesched.planner.chunks import SMALLEST_CHUNK
from moesched.planner.search_policies import FIRST, require_one_policy
from moesched.planner.setting import KV_SHARE, Setting, splits_kv
from moesched.planner.sizing import choose_sizes
from moesched.requests.batch import Batch
from moesched.requests.batching import BatchSizes
from moesched.runs.batch_policies import BatchPolicies
from moesched.runs.planning import as_used_by, plan_run
from moesched.runs.ranks import Devices, process_of
from moesched.seams import Device, Policy
from moesched.steps.plan import Plan
from moesched.steps.process import Process


class Job:
    """Plans the batches of a job, which share policy, model, machine and budgets.

    Args:
        options: the user's policy, sizes and budgets.
        config: the model.
        machine: the machine that the options name.
        beams: sequences per request in decode.
        nodes: number of equal machines that share the experts.
        device: the device that runs the job; None in predictions.

    Attributes:
        chosen_at: tokens per second that the planner predicted for the policy that it chose; None if one was named.
        chooses: whether the planner has still to choose the policy; if so, the job has a provisional one.
        slot_bytes: function that returns the bytes of memory that a page of weights takes. Before `use_devices` it is
            `room_for`, which gives the most that a page may take; afterwards it is the devices' own function.

    Raises:
        BadInput: an option cannot be used.
    """

    def __init__(
        self,
        options: PlannedOptions,
        config: ModelConfig,
        machine: Machine,
        *,
        beams: int = 1,
        nodes: int = 1,
        device: str | type[Device] | None = None,
    ) -> None:
        require_continuations(beams, config)
        self.options = options
        self.beams = beams
        self.nodes = nodes
        self.chosen_at: float | None = None
        self.slot_bytes: Callable[[Page], int] = room_for
        self.chooses = options.policy == POLICY
        if self.chooses and nodes > 1:
            raise chooses_for_one_machine(nodes)
        chosen = policy_until_chosen(options)
        cut, self.machine, self.budgets = cut_over_ranks(
            config,
            machine,
            options.budgets,
            options.tensor_parallel,
            chosen.cls,
            here=options.machine == MACHINE,
        )
        self._measure = partial(assumed_process, self.machine)
        self._process: Process | None = None
        self._sizes: BatchSizes | None = None
        self.layout = weight_layout(cut, dtype_for(cut.dtype, options.dtype, self.machine, device))
        self._take(chosen)

    def _take(self, chosen: ChosenPolicy) -> None:
        self.policy_name = chosen.name
        self.policy_class = chosen.cls
        self.make = chosen.make
        self.splits_kv = chosen.is_class and splits_kv(chosen.cls, self.machine)

    def with_policy(self, policy: PolicyGiven, chosen_at: float) -> Job:
        """Return a copy of the job with a policy that the planner chose; the policy gets no settings.

        The copy keeps the model's division among devices.

        chosen_at: tokens per second that the planner predicts.
        """
        job = copy(self)
        job.chooses, job.chosen_at, job._sizes = False, chosen_at, None
        job._take(choose_policy(policy))
        return job

    def with_sizes(self, sizes: BatchSizes) -> Job:
        """Return a copy of the job whose method `sizes` returns these sizes.

        Jobs made from the copy by `with_policy` or `with_beams` choose sizes of their own.
        """
        job = copy(self)
        job._sizes = sizes
        return job

    def with_beams(self, beams: int) -> Job:
        """Return a copy of the job for a call with beam search of this width; the copy chooses sizes of its own."""
        job = copy(self)
        job.beams, job._sizes = beams, None
        return job

    def use_devices(self, devices: Devices, ahead: int = 0) -> None:
        """Make the job plan for these devices; call this before `use_process`.

        ahead: bytes of this process that were already allocated for weights.
        """
        self.machine = as_used_by(devices.first, self.machine)
        self.slot_bytes = devices.slot_bytes
        self._measure = partial(process_of, devices.all, self.machine, ahead)

    def use_process(self) -> None:
        """Determine the bytes that the process takes beside plans; they count against the budget of the process, too.

        The bytes are measured if `use_devices` was called; otherwise, for predictions, they are assumed. Call this
        method before `sizes` and `plan`.

        Raises:
            BadInput: the budget of the process leaves nothing for plans.
        """
        self.budgets, self._process = within_process(
            self.budgets, self.machine, self._measure(), self.layout.config.ranks
        )

    def sizes(
        self,
        lengths: Sequence[int],
        new_tokens: int,
        *,
        successive: bool = True,
    ) -> BatchSizes:
        """Choose batch sizes and the accelerator's share of the KV cache; sizes that the options give are kept.

        Args:
            lengths: lengths of all prompts, in tokens.
            successive: whether all requests run, one batch after another; if not, only the first batch must fit.

        Raises:
            BadInput: not even one request fits.
        """
        sizes = self._sizes or self._choose_sizes(lengths, new_tokens, successive=successive)
        if sizes.kv_on_gpu is not None:
            self.make = partial(self.make, **{KV_SHARE: sizes.kv_on_gpu})
        return sizes

    def _choose_sizes(
        self,
        lengths: Sequence[int],
        new_tokens: int,
        *,
        successive: bool,
    ) -> BatchSizes:
        setting = self.setting(lengths, new_tokens)
        try:
            return choose_sizes(setting, self.options.sizes, successive=successive)
        except BadInput as error:
            raise self._with_width(error, setting.batch(1, 1)) from error

    def setting(self, lengths: Sequence[int], new_tokens: int) -> Setting:
        """Return everything that a plan depends on, apart from the batch.

        Args:
            lengths: prompt lengths in tokens.
        """
        return Setting(
            make=self.make,
            machine=self.machine,
            layout=self.layout,
            lengths=tuple(lengths),
            new_tokens=new_tokens,
            cost=cost_model(self.machine, self.layout.dtype),
            budgets=self.budgets,
            slot_bytes=self.slot_bytes,
            splits_kv=self.splits_kv,
            kv_on_gpu=self.make.keywords.get(KV_SHARE),
            beams=self.beams,
            prefill_chunk=self.options.prefill_chunk,
            nodes=self.nodes,
            process=self._process,
        )

    def policies(self) -> BatchPolicies:
        """Return the maker of the policy objects for all batches; call this after `sizes`."""
        return BatchPolicies(self.make)

    def plan(
        self,
        batch: Batch,
        node: int = 0,
        policy: Policy | None = None,
    ) -> tuple[Plan, Policy]:
        """Plan a batch by a policy, for one node if there are several.

        Args:
            policy: the policy that plans; by default a new one.

        Raises:
            BadInput: the batch does not fit; with beam search, the message gives the largest width that does.
        """
        policy = self.make() if policy is None else policy
        try:
            return self._plan(policy, batch, node), policy
        except BadInput as error:
            raise self._with_width(error, batch) from error

    def _plan(self, policy: Policy, batch: Batch, node: int = 0) -> Plan:
        return plan_run(
            self.machine,
            self.layout,
            batch,
            policy,
            self.budgets,
            self.slot_bytes,
            self.nodes,
            node,
            process=self._process,
        )

    def _with_width(self, error: BadInput, batch: Batch) -> BadInput:
        """Return the error; with beam search, its message also gives the largest width that fits."""
        if self.beams == 1:
            return error

        def fits(beams: int) -> bool:
            chunk = self.options.prefill_chunk or SMALLEST_CHUNK
            try:
                self._plan(self.make(), replace(batch, beams=beams, prefill_chunk=chunk))
            except BadInput:
                return False
            return True

        width = next((beams for beams in range(batch.beams - 1, 0, -1) if fits(beams)), None)
        remedy = "not even one beam fits" if width is None else f"or use --beams {width}, which fits"
        return BadInput(f"{error}; {remedy}")


def chooses_for_one_machine(nodes: int) -> BadInput:
    """Return the error for several nodes without a named policy: the planner chooses only for one machine."""
    return BadInput(f"the planner chooses a policy for one machine: name one for {nodes} with --policy")


def policy_until_chosen(options: PlannedOptions) -> ChosenPolicy:
    """Return the policy that the options name, or a provisional policy if the planner is to choose one.

    Raises:
        BadInput: the policy cannot be made; or settings are given, although the planner is to choose the policy.
    """
    if options.policy != POLICY:
        return choose_policy(options.policy, options.settings)
    require_one_policy(options.settings)
    return choose_policy(FIRST)


def require_continuations(beams: int, config: ModelConfig) -> None:
    """Raise BadInput if the vocabulary has fewer tokens than a beam search of this width compares."""
    each = max(2, 1 + len(config.stop_tokens))
    if beams > 1 and beams * each > config.vocabulary:
        raise BadInput(
            f"--beams {beams} compares {beams * each} continuations, but the vocabulary of {config.name} has "
            f"{config.vocabulary} tokens: use --beams {config.vocabulary // each}"
        )
