"""The options of commands that generate text, and what the jobs make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from moesched.cli.options import (
    BEAMS,
    BatchSize,
    Beams,
    Budgets,
    DType,
    Json,
    MicroBatchSize,
    Policy,
    PrefillChunk,
    ReportFile,
    Settings,
    Trace,
    parse_budgets,
    read_prompt_file,
)
from moesched.errors import BadInput

if TYPE_CHECKING:
    from moesched.inputs.prompts import Prompt
    from moesched.jobs.report import JobReport

PROMPTS = Group("Prompts", sort_key=1)
SAMPLING = Group("Sampling", sort_key=3)

Job = Callable[..., "JobReport"]
"""Generates text: given prompts, a listener and the arguments of `run_model` that are options."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What is to be generated, how, and what comes of it."""

    policy: Policy
    settings: Settings = ()
    prompt: Annotated[
        tuple[str, ...],
        Parameter(
            group=PROMPTS,
            metavar="T",
            negative="",
            show_default=False,
            help="A text to go on from; again for more.",
        ),
    ] = ()
    prompts: Annotated[
        Path | None,
        Parameter(
            group=PROMPTS,
            metavar="FILE.jsonl",
            help='A file with one {"prompt": "..."} or {"prompt_ids": [1, 2]} a line.',
        ),
    ] = None
    prompt_ids: Annotated[
        str | None,
        Parameter(group=PROMPTS, metavar="IDS", help='Token ids, such as "1,2,3;4,5" for two prompts.'),
    ] = None
    max_new_tokens: Annotated[
        int, Parameter(metavar="N", help="Tokens to generate for each prompt, at most.")
    ] = 64
    dtype: DType = None
    temperature: Annotated[
        float, Parameter(group=SAMPLING, help="0 takes the likeliest token, more gives others a chance.")
    ] = 0.0
    top_k: Annotated[
        int | None, Parameter(group=SAMPLING, metavar="K", help="Draw from the K likeliest tokens only.")
    ] = None
    top_p: Annotated[
        float,
        Parameter(
            group=SAMPLING, metavar="P", help="Draw from the fewest tokens that are together as likely as P."
        ),
    ] = 1.0
    seed: Annotated[
        int, Parameter(group=SAMPLING, help="Of the random numbers that tokens are drawn with.")
    ] = 0
    beams: Beams = 1
    length_penalty: Annotated[
        float,
        Parameter(
            group=BEAMS,
            metavar="X",
            help="A sequence's log probability is divided by its length to this power.",
        ),
    ] = 1.0
    early_stopping: Annotated[
        bool,
        Parameter(group=BEAMS, negative="", help="End when as many sequences as there are beams have ended."),
    ] = False
    batch_size: BatchSize = None
    micro_batch_size: MicroBatchSize = None
    prefill_chunk: PrefillChunk = None
    budget: Budgets = ()
    device: Annotated[
        str, Parameter(metavar="D", help="A name of `moesched list devices`, or package.module:Class.")
    ] = "torch"
    device_settings: Annotated[
        tuple[str, ...],
        Parameter(
            name="--device-set",
            metavar="KEY=VALUE",
            negative="",
            show_default=False,
            help="A setting of the device's own, such as dilation=64 of the emulated one; again for more.",
        ),
    ] = ()
    machine: Annotated[
        str,
        Parameter(
            metavar="NAME|FILE",
            help="What the policy plans on: auto is this machine, as `moesched calibrate` left it; "
            "--device emulated imitates any that has an accelerator.",
        ),
    ] = "auto"
    trace: Trace = None
    report: ReportFile = None
    json: Json = False

    def generate(self, model_dir: Path, job: Job, **more: Any) -> int:
        """Have a job generate text, show it, and hand out what came of it; returns the exit code.

        Args:
            more: arguments that are not options of all commands.

        Raises:
            BadInput: something that was given cannot be used.
        """
        from moesched.cli.display import display_of
        from moesched.cli.failures import BAD_INPUT, INTERRUPTED
        from moesched.cli.results import hand_out
        from moesched.inputs.prompts import TOKENIZER_NAME

        given, code = _prompts(self.prompt, self.prompts, self.prompt_ids)
        display = display_of(given, has_text=(model_dir / TOKENIZER_NAME).is_file(), json=self.json)

        def run() -> JobReport:
            try:
                return job(model_dir, given, listener=display, **self._arguments(), **more)
            finally:
                display.ran()

        done = hand_out(run, json=self.json, file=self.report, trace=self.trace)
        if done.failure is not None:
            return BAD_INPUT
        return INTERRUPTED if done.interrupted else code

    def _arguments(self) -> dict[str, Any]:
        from moesched.requests.sampling import Sampling
        from moesched.settings import parse_settings

        return {
            "policy": self.policy,
            "settings": parse_settings(self.settings),
            "max_new_tokens": self.max_new_tokens,
            "dtype": self.dtype,
            "sampling": Sampling(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                seed=self.seed,
                beams=self.beams,
                length_penalty=self.length_penalty,
                early_stopping=self.early_stopping,
            ),
            "batch_size": self.batch_size,
            "micro_batch_size": self.micro_batch_size,
            "prefill_chunk": self.prefill_chunk,
            "device": self.device,
            "device_settings": parse_settings(self.device_settings, "--device-set"),
            "machine": self.machine,
            "budgets": parse_budgets(self.budget),
            "trace": self.trace,
        }


def _prompts(texts: Sequence[str], file: Path | None, ids: str | None) -> tuple[list[Prompt], int]:
    """The prompts, given in one of three ways, and the exit code that says whether some were left out."""
    from moesched.inputs.prompts import parse_prompt_ids

    if sum((bool(texts), file is not None, ids is not None)) != 1:
        raise BadInput("give prompts in one way: --prompt, --prompts or --prompt-ids")
    if file is not None:
        return read_prompt_file(file)
    return (list(texts) if ids is None else list(parse_prompt_ids(ids))), 0
