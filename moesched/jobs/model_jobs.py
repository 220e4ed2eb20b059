"""Jobs: from names and files to a report, in one call each. The command line's `run` and `simulate` are these two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from moesched.drivers.capture import NotFixed
from moesched.errors import BadInput
from moesched.inputs.accelerators import cut_over_ranks
from moesched.inputs.lookup import NEW_TOKENS_OF_PROMPTS, find_machine, find_policy, find_shape, find_workload
from moesched.inputs.prompts import Prompt, encode_prompts, find_tokenizer, require_some
from moesched.jobs.batch_reports import BatchReports
from moesched.jobs.report import JobReport, job_report
from moesched.jobs.text_listener import TextListener
from moesched.jobs.trace_file import numbered, recorder_of, write_job_trace
from moesched.machines import Machine
from moesched.machines.cost import cost_model
from moesched.machines.networks import Network, load_network, network_names
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import Page, room_for, weight_layout
from moesched.planner import KV_SHARE, MOST_REQUESTS, Setting, splits_kv
from moesched.planner.sizing import SMALLEST_CHUNK, choose_sizes
from moesched.requests.batch import Batch
from moesched.requests.batching import BatchSizes, batches_of
from moesched.requests.sampling import Sampling
from moesched.requests.workloads import Workload
from moesched.routing import SeededRouting
from moesched.routing.choices import BatchRouting, ExpertChoices
from moesched.routing.router_forecast import PREVIEW_ACCURACY
from moesched.routing.sources import find_choices
from moesched.runs.generation import TokenHandling
from moesched.runs.hardware import run
from moesched.runs.listeners import KindMeter, Listener
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Devices, Rank, open_devices
from moesched.runs.simulation import simulate
from moesched.seams import Policy, Routing
from moesched.settings import check_settings
from moesched.steps.plan import Plan
from moesched.trace.whole_file import require_writable


def run_model(
    model: Path | str,
    prompts: Sequence[Prompt],
    *,
    policy: str = "resident",
    settings: Mapping[str, Any] | None = None,
    max_new_tokens: int = NEW_TOKENS_OF_PROMPTS,
    dtype: str | None = None,
    sampling: Sampling | None = None,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    prefill_chunk: int | None = None,
    device: str = "torch",
    device_settings: Mapping[str, Any] | None = None,
    machine: Machine | str = "auto",
    foreign_machine: bool = False,
    budgets: Mapping[str, int | str] | None = None,
    tensor_parallel: int | None = None,
    trace: Path | str | None = None,
    listener: Listener | None = None,
) -> JobReport:
    """Generate text on real hardware. More prompts than fit a batch run as successive batches.

    Ctrl-C ends it cleanly: the report then says `interrupted` and holds the tokens so far. Logits that are no numbers
    end it as well: `failure` of the report then says where the bad numbers began.

    Args:
        model: a Hugging Face folder.
        prompts: texts, or token ids.
        policy, device: names, as `moesched list` prints them, or package.module:Class.
        settings, device_settings: the policy's own, and the device's.
        dtype: "float32" or "bfloat16"; by default the model's own.
        batch_size, micro_batch_size: by default the planner's, of no more requests than there are prompts.
        prefill_chunk: tokens of prompts that pass a layer together, at most; by default all of a micro-batch's, or as
            many as fit.
        machine: "auto" for this one, a profile's name, a TOML file, or a Machine.
        foreign_machine: use its costs even if they were measured on another processor than this one.
        budgets: bytes by memory, as numbers or text such as "600MB"; by default the machine's capacities.
            Those of memories that accelerators share are for all of them.
        tensor_parallel: over how many of the machine's equal accelerators the model is cut; by default all.
        trace: where to write a trace; those of later batches get their number into the name.
        listener: told how it goes on.

    Raises:
        BadInput: something that was given cannot be used.
        NotTraced: only the trace could not be written.
        PolicyError: the policy submitted something illegal; raised at its own line.
        TaskFailed: a task raised on its lane.
    """
    require_writable(trace, "trace")
    require_some(max_new_tokens, "--max-new-tokens")
    checkpoint = open_checkpoint(Path(model))
    config = checkpoint.config
    tokenizer = find_tokenizer(checkpoint.directory)
    encoded = encode_prompts(prompts, tokenizer, config, max_new_tokens)
    beams = 1 if sampling is None else sampling.beams
    _require_continuations(beams, config)
    machine = find_machine(machine, device, foreign=foreign_machine)
    job = _Job(
        policy, settings, config, dtype, machine, budgets, tensor_parallel, beams, prefill_chunk=prefill_chunk
    )
    lengths = list(map(len, encoded))
    reports = BatchReports()
    with open_devices(device, device_settings, checkpoint, job.layout) as opened:
        (listener or Listener()).opened(opened.first)
        sizes = job.sizes(lengths, max_new_tokens, batch_size, micro_batch_size, opened.slot_bytes)
        batches = list(batches_of(lengths, max_new_tokens, sizes))
        if len(batches) > 1:
            for batch in batches:
                job.plan(batch, opened.slot_bytes)  # one that does not fit is told before the first one runs
        for number, batch in enumerate(batches):
            first = batch.first_request
            mine = encoded[first : first + len(batch.prompts)]
            text_listener = TextListener(
                listener or Listener(), tokenizer, mine, first, config.stop_tokens, max_new_tokens
            )
            with suppress(KeyboardInterrupt):
                reports.add(job.run, batch, opened, mine, sampling, text_listener, numbered(trace, number))
            text_listener.finish_all()
            if len(reports.all) <= number or reports.all[-1].interrupted or reports.all[-1].failure:
                break
    if not reports.all:
        raise KeyboardInterrupt
    return reports.merge(requests=len(encoded), batches=len(batches))


def simulate_model(
    model: Path | str,
    *,
    machine: Machine | str,
    policy: str,
    workload: Workload | str | Sequence[Prompt],
    settings: Mapping[str, Any] | None = None,
    gen: int | None = None,
    requests: int | None = None,
    padded: bool = False,
    dtype: str | None = None,
    seed: int = 0,
    beams: int = 1,
    routing: str | None = None,
    routing_settings: Mapping[str, Any] | None = None,
    preview_accuracy: float = PREVIEW_ACCURACY,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    prefill_chunk: int | None = None,
    budgets: Mapping[str, int | str] | None = None,
    tensor_parallel: int | None = None,
    nodes: int | None = None,
    network: Network | str | None = None,
    trace: Path | str | None = None,
    listener: Listener | None = None,
) -> JobReport:
    """Predict a workload on the virtual clock; needs no weights and no GPU.

    Args:
        model: a shape's name, as `moesched list models` prints it, or a folder with a config.json.
        workload: a profile's name, a TOML file, a Workload, or prompts as `run_model` takes them, themselves or in
            a .jsonl file.
        gen: tokens to generate; by default the workload's own.
        requests: how many; more than fit a batch run as successive batches. By default one full batch, or each
            request once where the workload says which they are.
        padded: every prompt counts as the longest of the workload (MoE-Lightning(p), FlexGen and DeepSpeed there).
        seed: of the order of prompts and of the routing.
        beams: the width of a beam search; every search goes on to the last token.
        routing: where each token's experts come from: a profile (.csv), a trace (.npz) or a generator's name (see
            `moesched.routing.sources`); by default any expert is as likely as any other.
        routing_settings: the generator's own, such as its locality.
        preview_accuracy: how likely a preview of the router (`Step.preview_route`) foretells an expert.
        nodes: how many of the machine share the model's experts; by default it is alone.
        network: what joins them: a name, a TOML file, or a Network; by default the machine's own.

    The other arguments and the errors are those of `run_model`.
    """
    require_writable(trace, "trace")
    config = find_shape(model)
    choices = find_choices(routing, config, routing_settings, seed)
    if not isinstance(workload, Workload):
        workload = find_workload(workload, model, config)
    new_tokens = workload.new_tokens[0] if gen is None else gen
    require_some(new_tokens, "--gen")
    if requests is not None and requests < 1:
        raise BadInput(f"--requests is {requests}: ask for at least 1")
    all_told = requests or len(workload.prompt_tokens)
    count = all_told or batch_size or MOST_REQUESTS
    lengths = [workload.longest] * count if padded else workload.lengths(count, seed)
    _require_context(lengths, new_tokens, config)
    _require_continuations(beams, config)
    job = _Job(
        policy,
        settings,
        config,
        dtype,
        _joined(find_machine(machine), nodes, network),
        budgets,
        tensor_parallel=tensor_parallel,
        nodes=nodes or 1,
        beams=beams,
        prefill_chunk=prefill_chunk,
        preview_accuracy=preview_accuracy,
    )
    sizes = job.sizes(lengths, new_tokens, batch_size, micro_batch_size, room_for, successive=bool(all_told))
    batches = list(batches_of(lengths, new_tokens, sizes))[: None if all_told else 1]
    reports = BatchReports()
    for number, batch in enumerate(batches):
        reports.add(job.simulate, batch, seed, choices, listener or Listener(), numbered(trace, number))
    return reports.merge(requests=count, batches=len(batches), padded=padded)


class _Job:
    """What all batches share: policy, layout, machine, budgets."""

    def __init__(
        self,
        policy: str,
        settings: Mapping[str, Any] | None,
        config: ModelConfig,
        dtype: str | None,
        machine: Machine,
        budgets: Mapping[str, int | str] | None,
        tensor_parallel: int | None = None,
        beams: int = 1,
        prefill_chunk: int | None = None,
        preview_accuracy: float = PREVIEW_ACCURACY,
        nodes: int = 1,
    ) -> None:
        if prefill_chunk is not None and prefill_chunk < 1:
            raise BadInput(f"--prefill-chunk is {prefill_chunk}: give 1 token or more")
        self.policy = policy
        self.prefill_chunk = prefill_chunk
        self.beams = beams
        self.preview_accuracy = preview_accuracy
        self.nodes = nodes
        cls = find_policy(policy)
        self.make = partial(cls, **check_settings(cls, f"policy {policy}", settings or {}))
        cut, self.machine, self.budgets = cut_over_ranks(config, machine, budgets, tensor_parallel, cls)
        self.splits_kv = splits_kv(cls, self.machine)
        self.layout = weight_layout(cut, dtype)

    def sizes(
        self,
        lengths: Sequence[int],
        new_tokens: int,
        batch_size: int | None,
        micro_batch_size: int | None,
        slot_bytes: Callable[[Page], int],
        *,
        successive: bool = True,
    ) -> BatchSizes:
        """What was not given is the planner's, the share of the KV cache on the accelerator with it."""
        setting = Setting(
            make=self.make,
            machine=self.machine,
            layout=self.layout,
            lengths=tuple(lengths),
            new_tokens=new_tokens,
            cost=cost_model(self.machine, self.layout.dtype),
            budgets=self.budgets,
            slot_bytes=slot_bytes,
            splits_kv=self.splits_kv,
            kv_on_gpu=self.make.keywords.get(KV_SHARE),
            beams=self.beams,
            prefill_chunk=self.prefill_chunk,
            nodes=self.nodes,
        )
        try:
            sizes = choose_sizes(
                setting, batch_size=batch_size, micro_batch_size=micro_batch_size, successive=successive
            )
        except BadInput as error:
            raise (
                error if self.beams == 1 else self._too_wide(error, setting.batch(1, 1), slot_bytes)
            ) from error
        if sizes.kv_on_gpu is not None:
            self.make = partial(self.make, **{KV_SHARE: sizes.kv_on_gpu})
        return sizes

    def plan(self, batch: Batch, slot_bytes: Callable[[Page], int], node: int = 0) -> tuple[Plan, Policy]:
        """A policy made anew, and its plan, of one node where there are several.

        Raises:
            BadInput: it does not fit; of several beams the message says how many would.
        """
        policy: Policy = self.make()
        try:
            plan = plan_run(
                self.machine, self.layout, batch, policy, self.budgets, slot_bytes, self.nodes, node
            )
            return plan, policy
        except BadInput as error:
            raise (error if batch.beams == 1 else self._too_wide(error, batch, slot_bytes)) from error

    def _too_wide(self, error: BadInput, batch: Batch, slot_bytes: Callable[[Page], int]) -> BadInput:
        """The same complaint, with the largest width that fits."""

        def fits(beams: int) -> bool:
            narrower = replace(batch, beams=beams, prefill_chunk=self.prefill_chunk or SMALLEST_CHUNK)
            try:
                plan_run(
                    self.machine, self.layout, narrower, self.make(), self.budgets, slot_bytes, self.nodes
                )
            except BadInput:
                return False
            return True

        width = next((beams for beams in range(batch.beams - 1, 0, -1) if fits(beams)), None)
        remedy = "not even one beam fits" if width is None else f"or use --beams {width}, which fits"
        return BadInput(f"{error}; {remedy}")

    def run(
        self,
        batch: Batch,
        devices: Devices,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None,
        text_listener: TextListener,
        trace: Path | None,
    ) -> JobReport:
        plan, policy = self.plan(batch, devices.slot_bytes)
        peers = [Rank(*self.plan(batch, devices.slot_bytes), device) for device in devices.all[1:]]
        text_listener.listener.planned(plan)
        recorder = recorder_of(plan) if trace else None
        kinds = KindMeter()
        read_before = devices.bytes_read
        report = run(
            plan,
            policy,
            devices.first,
            prompts,
            sampling=sampling,
            tokens=TokenHandling(self.layout.config.stop_tokens, text_listener.tell),
            observers=[text_listener.listener, kinds],
            recorder=recorder,
            peers=peers,
            keep_open=True,
        )
        text_listener.finish_all()
        text_listener.listener.ran()
        read = devices.bytes_read
        bytes_read = None if read is None or read_before is None else read - read_before
        finished = job_report(
            report,
            plan,
            kinds,
            policy=self.policy,
            dtype=self.layout.dtype,
            text=text_listener.texts,
            bytes_read=bytes_read,
        )
        if recorder is not None and trace is not None:
            write_job_trace(trace, recorder, finished, text_listener.listener)
        return finished

    def simulate(
        self,
        batch: Batch,
        seed: int,
        choices: ExpertChoices | None,
        listener: Listener,
        trace: Path | None,
    ) -> JobReport:
        config = self.layout.config
        routing: Routing = SeededRouting(config.experts, config.top_k, seed)
        if choices is not None:
            routing = BatchRouting(choices, batch)
        try:
            return self._simulate(batch, routing, listener, trace, replay=True)
        except NotFixed:
            return self._simulate(batch, routing, listener, trace, replay=False)

    def _simulate(
        self, batch: Batch, routing: Routing, listener: Listener, trace: Path | None, *, replay: bool
    ) -> JobReport:
        plan, policy = self.plan(batch, room_for)
        if replay and (plan.contended or plan.nodes > 1):
            raise NotFixed  # how long a task takes depends on what runs beside it, or on who runs the experts
        peers = [Rank(*self.plan(batch, room_for, node)) for node in range(1, self.nodes)]
        listener.planned(plan)
        recorder = recorder_of(plan) if trace else None
        kinds = KindMeter()
        report = simulate(
            plan,
            policy,
            routing=routing,
            preview_accuracy=self.preview_accuracy,
            replay=replay,
            observers=[listener, kinds],
            recorder=recorder,
            peers=peers,
        )
        listener.ran()
        finished = job_report(report, plan, kinds, policy=self.policy, dtype=self.layout.dtype)
        if recorder is not None and trace is not None:
            write_job_trace(trace, recorder, finished, listener)
        return finished


def _joined(machine: Machine, nodes: int | None, network: Network | str | None) -> Machine:
    """The machine, with what joins it to others like it.

    Raises:
        BadInput: there is no such network, nothing joins several nodes, or there is nothing to join.
    """
    if nodes is not None and nodes < 1:
        raise BadInput(f"--nodes is {nodes}: give 1 or more")
    if network is None:
        if (nodes or 1) > 1 and machine.network is None:
            raise BadInput(
                f"--nodes is {nodes}, and nothing joins machine {machine.name} to others: give --network, one of "
                + ", ".join(network_names())
            )
        return machine
    if nodes is None:
        raise BadInput("--network joins several nodes: say how many with --nodes")
    return replace(machine, network=load_network(network) if isinstance(network, str) else network)


def _require_continuations(beams: int, config: ModelConfig) -> None:
    """Raise BadInput where beam search has fewer tokens to choose from than it compares."""
    if beams < 1:
        raise BadInput(f"--beams is {beams}: give 1 for no beam search, or more")
    compared = beams * max(2, 1 + len(config.stop_tokens))
    if beams > 1 and compared > config.vocabulary:
        most = config.vocabulary // max(2, 1 + len(config.stop_tokens))
        raise BadInput(
            f"--beams {beams} compares {compared} continuations, but the vocabulary of {config.name} has "
            f"{config.vocabulary} tokens: use --beams {most}"
        )


def _require_context(lengths: Sequence[int], new_tokens: int, config: ModelConfig) -> None:
    longest = max(lengths)
    if longest + new_tokens > config.max_positions:
        raise BadInput(
            f"a prompt of {longest} tokens and {new_tokens} new ones are more than the context of {config.name}, "
            f"{config.max_positions}: lower --gen, or choose another workload"
        )
