"""Sessions: a model is opened once, and answers one call after another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from moesched.errors import BadInput
from moesched.inputs.lookup import absolute_machine, find_machine
from moesched.inputs.prompts import encode_prompts
from moesched.inputs.tokenizer import open_model
from moesched.jobs.call import Call
from moesched.jobs.expectation import obstacle
from moesched.jobs.job import Job, require_continuations
from moesched.jobs.memory_ahead import pieces_to_take
from moesched.jobs.options import CallOptions, RunOptions, SessionOptions
from moesched.jobs.planners_choice import with_choice
from moesched.jobs.report import JobReport
from moesched.jobs.trace_file import require_outputs_apart
from moesched.keywords import takes
from moesched.models.checkpoint import Checkpoint
from moesched.options import part_of
from moesched.plugins import found_here
from moesched.requests.sampling import Sampling
from moesched.runs.cell_progress import listener_or_cell
from moesched.runs.listeners import Listener
from moesched.runs.ranks import Devices, open_devices
from moesched.system.input_file import absolute_path
from moesched.system.memory_ahead import MemoryAhead, UsesMemoryAhead
from moesched.system.own_loop import interruptible
from moesched.system.signals import signals_held


class Session:
    """A model on real hardware that answers one call after another; a context manager that frees the model at its end.

    The first call opens the device. Weights that stay in fast memory over successive calls are read once. Each call is
    planned anew, and generates the same tokens as `run_model`.
    """

    @takes(SessionOptions)
    def __init__(self, given: SessionOptions) -> None:
        """Open a model's files.

        Raises:
            BadInput: the files are no model's; or a policy, a device or a kernel that is named by module or file is not
                there.
        """
        model = absolute_path(Path(given.model))  # calls may come from another folder
        with signals_held():
            device, settings = found_here("devices", given.device), _kernels_here(given.device_settings)
        policy, machine = found_here("policies", given.policy), absolute_machine(given.machine)
        self._given = replace(
            given, model=model, machine=machine, policy=policy, device=device, device_settings=settings
        )
        self._checkpoint, self._tokenizer = open_model(model)
        self._opened: _Opened | None = None
        self._resources = ExitStack()
        self._release = weakref.finalize(self, self._resources.close)  # also at the program's end
        self._turn = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not opened yet" if self._opened is None else "open"
        return f"<Session of {self._checkpoint.config.name}: {state}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @interruptible()
    def close(self) -> None:
        """Refuse further calls, free the model's memory and close its files.

        A running call goes on, and then frees the model and closes its files; the call's listener may call `close`.
        """
        self._closed = True
        if self._turn.acquire(blocking=False):
            try:
                self._opened = None
                self._release()
            finally:
                self._turn.release()

    @takes(CallOptions)
    @interruptible()
    def run(self, given: CallOptions) -> JobReport:
        """Generate text. More prompts than fit a batch run as successive batches.

        Ctrl-C ends the call cleanly: the report then has `interrupted` set and the tokens so far. Weights that cannot
        be read, or logits that are not finite after some tokens, also end the call, and the report's `failure` says
        where. If a file of weights changes during a batch, no further batch begins, and `failure` says that this
        batch's tokens may be wrong. Any other error after the run began has the report as its attribute `report`. After
        all of these the session answers further calls, unless a file has changed.

        Raises:
            BadInput: an argument cannot be used, a file of weights has changed, or the session is closed or busy.
            NotFinite: the first logits are not finite; the message names the damaged weight.
            NotTraced: the trace could not be written; the error has the report.
            PolicyError: the policy submitted something illegal; it is raised at the policy's line.
            TaskFailed: a task raised an error on its lane.
        """
        checkpoint, config = self._checkpoint, self._checkpoint.config
        with self._exclusively():
            require_outputs_apart(given, checkpoint.path, self._given)
            encoded = encode_prompts(given.prompts, self._tokenizer, config, given.max_new_tokens)
            beams = (given.sampling or Sampling()).beams
            require_continuations(beams, config)
            if self._opened is None:
                first = _First(list(map(len, encoded)), given.max_new_tokens, beams, given.listener)
                self._opened = self._resources.enter_context(_open(self._given, checkpoint, first))
            job, devices, reason = self._opened
            call = Call(job.with_beams(beams), devices, checkpoint, self._tokenizer, encoded, given, reason)
            return call.run()

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise BadInput(f"{self!r} answers another call: wait for it, or open a session for each thread")
        try:
            if self._closed:
                raise BadInput(f"{self!r}: open another one")
            yield
        finally:
            self._turn.release()
            if self._closed:
                self.close()


class _Opened(NamedTuple):
    """A model on its devices.

    Attributes:
        job: the job of which each call makes a copy.
        obstacle: the reason why calls cannot be predicted; None if they can.
    """

    job: Job
    devices: Devices
    obstacle: str | None


class _First(NamedTuple):
    """The first call of a session, for which a policy is chosen unless one is named.

    Attributes:
        lengths: number of tokens of each prompt.
    """

    lengths: Sequence[int]
    new_tokens: int
    beams: int
    listener: Listener | None


def _kernels_here(settings: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a device's settings; load the classes of kernels that `own_kernels` names by module or file.

    They are loaded now, so that a later change of the current folder does not matter.
    """
    if not settings or "own_kernels" not in settings:
        return settings
    own = settings["own_kernels"]
    alone = isinstance(own, str | type)
    found = found_here("kernels", own) if alone else [found_here("kernels", each) for each in own]
    return {**settings, "own_kernels": found}


@contextmanager
def _open(given: SessionOptions, checkpoint: Checkpoint, first: _First) -> Iterator[_Opened]:
    """Open a model's devices, and yield them with the job."""
    config = checkpoint.config
    with MemoryAhead() as ahead:  # while the devices are imported
        ahead.begin(pieces_to_take(given, config, first.lengths, first.new_tokens, first.beams))
        found = find_machine(given.machine, given.device, foreign=given.foreign_machine)
        job = Job(given, config, found, device=given.device)
        with open_devices(given.device, given.device_settings, checkpoint, job.layout) as devices:
            ahead.stop()
            if isinstance(devices.first, UsesMemoryAhead):
                devices.first.memory_ahead = ahead
            else:
                ahead.give_back()
            job.use_devices(devices, ahead.nbytes)
            if job.chooses:
                job = with_choice(
                    job.with_beams(first.beams),
                    first.lengths,
                    first.new_tokens,
                    listener_or_cell(first.listener),
                )
            else:
                job.use_process()
            yield _Opened(job, devices, obstacle(given, job, devices))


@takes(RunOptions)
def run_model(given: RunOptions) -> JobReport:
    """Generate text on real hardware: open a session, make one call, and close it.

    As with `Session.run`, Ctrl-C or weights that cannot be read end the run early, with a report.

    Raises:
        BadInput: an argument cannot be used.
        NotTraced: the trace could not be written; the error has the report.
        PolicyError: the policy submitted something illegal; it is raised at the policy's line.
        TaskFailed: a task raised an error on its lane.
    """
    with Session(**part_of(given, SessionOptions)) as session:
        return session.run(**part_of(given, CallOptions))
