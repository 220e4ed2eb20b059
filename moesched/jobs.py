"""Jobs: from names and files to a report, in one call each. The command line's `run` and `simulate` are these two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog

from moesched import plugins, runs
from moesched.batching import Sizes, batches_of
from moesched.cost import cost_model
from moesched.drivers.replay import NotFixed
from moesched.errors import BadInput
from moesched.job_report import JobReport, merge_reports
from moesched.listeners import KindMeter, Listener
from moesched.machines import Machine, load_machine
from moesched.machines.local import local_machine
from moesched.machines.rank import rank_share
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig, read_config
from moesched.models.layout import Page, weight_layout
from moesched.models.shapes import SHAPES
from moesched.models.tensor_parallel import cut_config
from moesched.outcome import Report
from moesched.plan import Batch, Plan
from moesched.prompts import Prompt, TextStream, Tokenizer, encode_prompts, find_tokenizer, read_prompts
from moesched.ranks import Devices, Rank, open_devices
from moesched.routing import SeededRouting
from moesched.sampling import Sampling
from moesched.seams import Policy
from moesched.settings import check_settings
from moesched.sizing import choose_sizes
from moesched.trace import About, LastSteps, Recorder, write_trace
from moesched.trace.whole_file import whole_file
from moesched.units import parse_bytes
from moesched.workloads import Workload, given_lengths, load_workload

LARGEST_SIMULATED_BATCH = 1024
NEW_TOKENS_OF_PROMPTS = 64
MOST_TRACED_TASKS = 500_000

_log = structlog.get_logger(__name__)


class NotTraced(BadInput):
    """The job is done, but its trace could not be written; `report` is what came out."""

    def __init__(self, error: BadInput, report: JobReport) -> None:
        super().__init__(str(error))
        self.report = report


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
    device: str = "torch",
    device_settings: Mapping[str, Any] | None = None,
    machine: Machine | str = "auto",
    budgets: Mapping[str, int | str] | None = None,
    tensor_parallel: int | None = None,
    trace: Path | str | None = None,
    listener: Listener | None = None,
) -> JobReport:
    """Generate text on real hardware. More prompts than fit a batch run as successive batches.

    Ctrl-C ends it cleanly: the report then says `interrupted` and holds the tokens so far.

    Args:
        model: a Hugging Face folder.
        prompts: texts, or token ids.
        policy, device: names, as `moesched list` prints them, or package.module:Class.
        settings, device_settings: the policy's own, and the device's.
        dtype: "float32" or "bfloat16"; by default the model's own.
        batch_size, micro_batch_size: by default the largest batch that fits.
        machine: "auto" for this one, a profile's name, a TOML file, or a Machine.
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
    _require_some(max_new_tokens, "--max-new-tokens")
    checkpoint = open_checkpoint(Path(model))
    config = checkpoint.config
    tokenizer = find_tokenizer(checkpoint.directory)
    encoded = encode_prompts(prompts, tokenizer, config, max_new_tokens)
    if not encoded:
        raise BadInput("no prompts were given: give at least one")
    job = _Job(policy, settings, config, dtype, machine, budgets, device, tensor_parallel)
    lengths = list(map(len, encoded))
    reports = _Reports()
    with open_devices(device, device_settings, checkpoint, job.layout) as opened:
        sizes = job.sizes(lengths, max_new_tokens, batch_size, micro_batch_size, opened.slot_bytes)
        batches = list(batches_of(lengths, max_new_tokens, sizes))
        if len(batches) > 1:
            for batch in batches:
                job.plan(batch, opened.slot_bytes)  # one that does not fit is told before the first one runs
        for number, batch in enumerate(batches):
            first = batch.first_request
            mine = encoded[first : first + len(batch.prompts)]
            teller = _Teller(
                listener or Listener(), tokenizer, mine, first, config.stop_tokens, max_new_tokens
            )
            with suppress(KeyboardInterrupt):
                reports.add(job.run, batch, opened, mine, sampling, teller, _numbered(trace, number))
            teller.finish_all()
            if len(reports.all) <= number or reports.all[-1].interrupted:
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
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    budgets: Mapping[str, int | str] | None = None,
    tensor_parallel: int | None = None,
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

    The other arguments and the errors are those of `run_model`.
    """
    require_writable(trace, "trace")
    config = find_shape(model)
    if not isinstance(workload, Workload):
        workload = _find_workload(workload, model, config)
    new_tokens = workload.new_tokens[0] if gen is None else gen
    _require_some(new_tokens, "--gen")
    if requests is not None and requests < 1:
        raise BadInput(f"--requests is {requests}: ask for at least 1")
    all_told = requests or len(workload.prompt_tokens)
    count = all_told or batch_size or LARGEST_SIMULATED_BATCH
    lengths = [workload.longest] * count if padded else workload.lengths(count, seed)
    _require_context(lengths, new_tokens, config)
    job = _Job(policy, settings, config, dtype, machine, budgets, None, tensor_parallel)
    sizes = job.sizes(lengths, new_tokens, batch_size, micro_batch_size, None)
    batches = list(batches_of(lengths, new_tokens, sizes))[: None if all_told else 1]
    reports = _Reports()
    for number, batch in enumerate(batches):
        reports.add(job.simulate, batch, seed, listener or Listener(), _numbered(trace, number))
    return reports.merge(requests=count, batches=len(batches), padded=padded)


def find_shape(name_or_folder: Path | str) -> ModelConfig:
    """A named shape, or what a folder's config.json says.

    Raises:
        BadInput: it is neither.
    """
    if str(name_or_folder) in SHAPES:
        return SHAPES[str(name_or_folder)]
    if Path(name_or_folder).is_dir():
        return read_config(Path(name_or_folder))
    known = ", ".join(SHAPES)
    raise BadInput(f"no model {str(name_or_folder)!r}: name a folder with a config.json, or one of {known}")


def find_machine(machine: Machine | str, device: str | None = None) -> Machine:
    """A machine by its name or file; "auto" is this one, with what the device adds to it.

    Raises:
        BadInput: there is none of that name, or the device is not of that machine.
    """
    kind: Any = plugins.find("devices", device) if device else None
    if machine == "auto":
        add = getattr(kind, "machine", None)
        here = local_machine()
        return here if add is None else add(here)
    found = machine if isinstance(machine, Machine) else load_machine(machine)
    check = getattr(kind, "check_machine", None)
    if check is not None:
        check(found)
    return found


def cut_over_ranks(
    config: ModelConfig,
    machine: Machine,
    budgets: Mapping[str, int | str] | None,
    ranks: int | None,
) -> tuple[ModelConfig, Machine, dict[str, int]]:
    """Model, machine and budgets as each of `ranks` accelerators has them, by default as each of all there are.

    Raises:
        BadInput: the model cannot be cut over so many, or the machine has fewer.
    """
    count = machine.accelerator_group.count if ranks is None else ranks
    own = machine.accelerator.memory
    share = rank_share(machine, count)
    given = {memory: parse_bytes(size) for memory, size in (budgets or {}).items()}
    return (
        cut_config(config, count),
        share,
        {memory: nbytes if memory == own else nbytes // count for memory, nbytes in given.items()},
    )


def require_writable(path: Path | str | None, what: str) -> None:
    """Whether a file may be written, so that nobody learns it after a long run only.

    Raises:
        BadInput: it cannot be.
    """
    if path is None:
        return
    path = Path(path)
    if path.is_dir():
        raise BadInput(f"cannot write {what} {path}: it is a folder: name a file in it")
    if path.exists() and not path.is_file():
        return  # a pipe or a device: trying would write to it
    with suppress(_OnlyTried), whole_file(path, what):
        raise _OnlyTried


class _OnlyTried(Exception):
    """Leaves a file that is only tried before it appears."""


class _Job:
    """What all batches share: policy, layout, machine, budgets."""

    def __init__(
        self,
        policy: str,
        settings: Mapping[str, Any] | None,
        config: ModelConfig,
        dtype: str | None,
        machine: Machine | str,
        budgets: Mapping[str, int | str] | None,
        device: str | None = None,
        tensor_parallel: int | None = None,
    ) -> None:
        self.policy = policy
        self.settings = check_settings(_policy_class(policy), f"policy {policy}", settings or {})
        cut, self.machine, self.budgets = cut_over_ranks(
            config, find_machine(machine, device), budgets, tensor_parallel
        )
        self.layout = weight_layout(cut, dtype)

    def sizes(
        self,
        lengths: Sequence[int],
        new_tokens: int,
        batch_size: int | None,
        micro_batch_size: int | None,
        slot_bytes: Callable[[Page], int] | None,
    ) -> Sizes:
        return choose_sizes(
            lengths,
            new_tokens,
            self.machine,
            lambda batch: self.plan(batch, slot_bytes),
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
        )

    def plan(self, batch: Batch, slot_bytes: Callable[[Page], int] | None) -> tuple[Plan, Policy]:
        """A policy made anew, and its plan."""
        policy: Policy = plugins.make_policy(self.policy, self.settings)
        return runs.plan_run(self.machine, self.layout, batch, policy, self.budgets, slot_bytes), policy

    def run(
        self,
        batch: Batch,
        devices: Devices,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None,
        teller: _Teller,
        trace: Path | None,
    ) -> JobReport:
        plan, policy = self.plan(batch, devices.slot_bytes)
        peers = [Rank(*self.plan(batch, devices.slot_bytes), device) for device in devices.all[1:]]
        teller.listener.planned(plan)
        recorder = _recorder(plan) if trace else None
        kinds = KindMeter()
        read_before = devices.bytes_read
        report = runs.run(
            plan,
            policy,
            devices.first,
            prompts,
            sampling=sampling,
            stop_tokens=self.layout.config.stop_tokens,
            on_tokens=teller.tell,
            observers=[teller.listener, kinds],
            recorder=recorder,
            peers=peers,
            keep_open=True,
        )
        teller.finish_all()
        teller.listener.ran()
        read = devices.bytes_read
        bytes_read = None if read is None or read_before is None else read - read_before
        finished = self._report(report, plan, kinds, teller.texts, bytes_read)
        if recorder is not None and trace is not None:
            self._write_trace(trace, recorder, finished, teller.listener)
        return finished

    def simulate(self, batch: Batch, seed: int, listener: Listener, trace: Path | None) -> JobReport:
        try:
            if self.machine.unified:
                raise NotFixed  # tasks share the memory, so that how long one takes depends on the others
            return self._simulate(batch, seed, listener, trace, replay=True)
        except NotFixed:
            return self._simulate(batch, seed, listener, trace, replay=False)

    def _simulate(
        self, batch: Batch, seed: int, listener: Listener, trace: Path | None, *, replay: bool
    ) -> JobReport:
        plan, policy = self.plan(batch, None)
        listener.planned(plan)
        recorder = _recorder(plan) if trace else None
        kinds = KindMeter()
        config = self.layout.config
        report = runs.simulate(
            plan,
            policy,
            cost=cost_model(self.machine, self.layout.dtype),
            routing=SeededRouting(config.experts, config.top_k, seed),
            replay=replay,
            observers=[listener, kinds],
            recorder=recorder,
        )
        listener.ran()
        finished = self._report(report, plan, kinds, None, None)
        if recorder is not None and trace is not None:
            self._write_trace(trace, recorder, finished, listener)
        return finished

    def _report(
        self,
        report: Report,
        plan: Plan,
        kinds: KindMeter,
        text: list[str] | None,
        bytes_read: int | None,
    ) -> JobReport:
        fields = {name: getattr(report, name) for name in report.__struct_fields__}
        fields |= {"policy": self.policy, "text": text}
        return JobReport(
            **fields,
            dtype=self.layout.dtype,
            budget_bytes={
                name: plan.in_all(memory, memory.capacity) for name, memory in plan.memories.items()
            },
            kinds=kinds.kinds(),
            bytes_read=bytes_read,
        )

    def _write_trace(
        self, path: Path, recorder: Recorder | LastSteps, report: JobReport, listener: Listener
    ) -> None:
        about = About(
            driver="realtime" if report.measured else "virtual",
            policy=report.policy,
            model=report.model,
            machine=report.place,
            plan=msgspec.to_builtins(report.plan),
        )
        listener.writing(path)
        try:
            write_trace(path, recorder.recording(), about)
        except BadInput as error:
            raise NotTraced(error, report) from error
        finally:
            listener.ran()


class _Reports:
    """Reports of successive batches. A trace that cannot be written stops none of them, and is told at the end."""

    def __init__(self) -> None:
        self.all: list[JobReport] = []
        self._untraced: NotTraced | None = None

    def add(self, job: Callable[..., JobReport], *arguments: Any) -> None:
        """Run one batch."""
        try:
            self.all.append(job(*arguments))
        except NotTraced as error:
            self.all.append(error.report)
            self._untraced = self._untraced or error

    def merge(self, *, requests: int, batches: int, padded: bool = False) -> JobReport:
        """One report of all batches, also of those that did not run.

        Raises:
            NotTraced: a trace could not be written; the report comes with it.
        """
        report = merge_reports(self.all, requests=requests, batches=batches)
        report = msgspec.structs.replace(report, padded=padded)
        if self._untraced is not None:
            raise NotTraced(self._untraced, report)
        return report


class _Teller:
    """Turns a batch's tokens into text as they come, and tells the listener, by the requests' numbers in the run."""

    def __init__(
        self,
        listener: Listener,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]],
        first: int,
        stop_tokens: Sequence[int],
        new_tokens: int,
    ) -> None:
        self.listener = listener
        self.texts = None if tokenizer is None else [""] * len(prompts)
        self._streams = None if tokenizer is None else [TextStream(tokenizer, prompt) for prompt in prompts]
        self._counts = [0] * len(prompts)
        self._open = dict.fromkeys(range(len(prompts)))
        self._first = first
        self._stop_tokens = frozenset(stop_tokens)
        self._new_tokens = new_tokens

    def tell(self, fresh: dict[int, int]) -> None:
        """New tokens, by their request's place in the batch."""
        for request, token in fresh.items():
            self._counts[request] += 1
            self.listener.generated(self._first + request, token, self._text(request, token))
            if token in self._stop_tokens or self._counts[request] == self._new_tokens:
                self._finish(request)

    def finish_all(self) -> None:
        """The batch is over, or was ended: nothing more will come."""
        for request in list(self._open):
            self._finish(request)

    def _finish(self, request: int) -> None:
        if request in self._open:
            del self._open[request]
            self.listener.finished(self._first + request, self._text(request, None))

    def _text(self, request: int, token: int | None) -> str:
        """What one more token adds to the text, or the end of it."""
        if self._streams is None or self.texts is None:
            return ""
        stream = self._streams[request]
        piece = stream.finish() if token is None else stream.push(token)
        self.texts[request] += piece
        return piece


def _policy_class(name: str) -> type:
    cls = plugins.find("policies", name)
    for method in ("plan", "prefill", "decode"):
        if not callable(getattr(cls, method, None)):
            raise BadInput(f"{name} is no policy: it has no {method}(); see moesched.seams.Policy")
    found: type = cls
    return found


def _find_workload(workload: str | Sequence[Prompt], model: Path | str, config: ModelConfig) -> Workload:
    """A workload by its name or file, or one that has the lengths of these prompts."""
    if isinstance(workload, str):
        if not workload.endswith(".jsonl"):
            return load_workload(workload)
        workload = read_prompts(Path(workload))
    if not workload:
        raise BadInput("no prompts were given: give at least one")
    has_folder = str(model) not in SHAPES
    if not has_folder and any(isinstance(prompt, str) for prompt in workload):
        raise BadInput(
            f"prompts are text, and model {model} has no tokenizer: name a model's folder, or give ids"
        )
    tokenizer = find_tokenizer(Path(model)) if has_folder else None
    encoded = encode_prompts(workload, tokenizer, config, 0)
    return given_lengths(list(map(len, encoded)), NEW_TOKENS_OF_PROMPTS)


def _recorder(plan: Plan) -> Recorder | LastSteps:
    """Keeps all of a run of ordinary size, and the last steps of a longer one."""
    per_step = 8 * len(plan.layers) * len(plan.micro_batches) + 2 * len(plan.layout.pages)
    if per_step * plan.batch.new_tokens <= MOST_TRACED_TASKS:
        return Recorder()
    steps = max(2, MOST_TRACED_TASKS // per_step)
    _log.warning("the run is too long for a whole trace: its last steps are kept", steps=steps)
    return LastSteps(steps)


def _numbered(path: Path | str | None, number: int) -> Path | None:
    """The name of the trace of a batch: the first has the name that was given."""
    if path is None or number == 0:
        return None if path is None else Path(path)
    path = Path(path)
    stem, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}.batch{number + 1}{dot}{suffixes}")


def _require_some(new_tokens: int, option: str) -> None:
    if new_tokens < 1:
        raise BadInput(f"{option} is {new_tokens}: ask for at least 1 token")


def _require_context(lengths: Sequence[int], new_tokens: int, config: ModelConfig) -> None:
    longest = max(lengths)
    if longest + new_tokens > config.max_positions:
        raise BadInput(
            f"a prompt of {longest} tokens and {new_tokens} new ones are more than the context of {config.name}, "
            f"{config.max_positions}: lower --gen, or choose another workload"
        )
