"""The options of commands that generate text, by topic, and the job that these commands start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from moesched.cli import arguments, options
from moesched.errors import BadInput
from moesched.inputs.defaults import DEVICE, MACHINE, NEW_TOKENS
from moesched.system.signals import exit_code_of_signal

if TYPE_CHECKING:
    from moesched.inputs.prompts import Prompt
    from moesched.jobs.report import JobReport
    from moesched.requests.sampling import Sampling

PROMPTS = Group("Prompts", sort_key=1)
SAMPLING = Group("Sampling", sort_key=3)

Job = Callable[..., "JobReport"]
"""Generates text, given a model, prompts, a listener and keywords of `run_model`."""


@dataclass(frozen=True, kw_only=True)
class PromptArguments:
    """The prompts, given in one of three ways."""

    prompt: Annotated[
        tuple[str, ...],
        options.repeatable(group=PROMPTS, metavar="T", help="Prompt text; repeatable."),
    ] = ()
    prompts: Annotated[
        Path | None,
        Parameter(
            group=PROMPTS,
            metavar="FILE.jsonl",
            help='File with one {"prompt": "..."} or {"prompt_ids": [1, 2]} per line.',
        ),
    ] = None
    prompt_ids: Annotated[
        str | None,
        Parameter(group=PROMPTS, metavar="IDS", help='Token ids, such as "1,2,3;4,5" for two prompts.'),
    ] = None
    max_new_tokens: Annotated[
        options.Whole, Parameter(metavar="N", help="Tokens to generate for each prompt, at most.")
    ] = NEW_TOKENS

    def read_prompts(self) -> tuple[list[Prompt], int]:
        """The prompts, and the exit code that says whether malformed ones were skipped."""
        from moesched.inputs.prompts import parse_prompt_ids

        if sum((bool(self.prompt), self.prompts is not None, self.prompt_ids is not None)) != 1:
            raise BadInput("give prompts in one way: --prompt, --prompts or --prompt-ids")
        if self.prompts is not None:
            return options.read_prompt_file(self.prompts)
        return (list(self.prompt) if self.prompt_ids is None else list(parse_prompt_ids(self.prompt_ids))), 0


@dataclass(frozen=True, kw_only=True)
class SamplingArguments:
    """The choice of the next token."""

    temperature: Annotated[
        float,
        Parameter(group=SAMPLING, help="0 takes the likeliest token; higher values sample from more tokens."),
    ] = 0.0
    top_k: Annotated[
        options.Whole | None,
        Parameter(group=SAMPLING, metavar="K", help="Sample from the K likeliest tokens only."),
    ] = None
    top_p: Annotated[
        float,
        Parameter(
            group=SAMPLING,
            metavar="P",
            help="Sample from the smallest set of tokens whose probabilities add up to P.",
        ),
    ] = 1.0
    seed: Annotated[
        options.Whole, Parameter(group=SAMPLING, help="Seed of the random numbers for sampling.")
    ] = 0


@dataclass(frozen=True, kw_only=True)
class BeamArguments:
    """Beam search."""

    beams: options.Beams = 1
    length_penalty: Annotated[
        float,
        Parameter(
            group=options.BEAMS,
            metavar="X",
            help="A sequence's score is its log probability divided by its length to this power.",
        ),
    ] = 1.0
    early_stopping: Annotated[
        bool,
        Parameter(
            group=options.BEAMS,
            negative="",
            help="Stop a prompt's search once N of its sequences have ended.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class DeviceArguments:
    """The device, and the machine that the policy plans for."""

    device: Annotated[
        str, Parameter(metavar="D", help="A name of `moesched list devices`, or file.py:Class.")
    ] = DEVICE
    device_settings: Annotated[
        tuple[str, ...],
        options.repeatable(
            name="--device-set",
            metavar="KEY=VALUE",
            help="Setting of the device, such as dilation=64 of the emulated one; repeatable.",
        ),
    ] = ()
    threads: Annotated[
        int | None,
        Parameter(
            metavar="N",
            help="Threads of the kernels on the CPU, at most one for each core that this process may use. By default "
            "as many, or with device cuda those that issuing and waiting threads do not need.",
        ),
    ] = None
    machine: Annotated[
        str,
        Parameter(
            metavar="NAME|FILE",
            help="Machine that the policy plans for; auto is this one, as `moesched calibrate` measured "
            "it. With --device emulated, any machine that has an accelerator.",
        ),
    ] = MACHINE


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GenerationArguments(
    arguments.OutputArguments,
    DeviceArguments,
    arguments.BatchArguments,
    BeamArguments,
    SamplingArguments,
    PromptArguments,
    arguments.PolicyArguments,
):
    """All options of a command that generates text."""

    def generate(self, model_dir: Path, job: Job, **more: Any) -> int:
        """Run a job that generates text, show the text, and output the report; returns the exit code.

        Args:
            more: keywords that only this job takes.

        Raises:
            BadInput: an option cannot be used.
        """
        from moesched.cli.display import display_of
        from moesched.cli.failures import FAILED
        from moesched.cli.results import hand_out
        from moesched.inputs.tokenizer import TOKENIZER_NAME
        from moesched.system.input_file import is_file

        given, code = self.read_prompts()
        display = display_of(given, has_text=is_file(model_dir / TOKENIZER_NAME), json=self.json)

        def run() -> JobReport:
            try:
                return job(model_dir, given, listener=display, **self._keywords(), **more)
            finally:
                display.ran()

        done = hand_out(run, self)
        if done.failure is not None:
            return FAILED
        return exit_code_of_signal() if done.interrupted else code

    def _keywords(self) -> dict[str, Any]:
        """The options as keywords of `run_model`."""
        from moesched.settings import parse_settings

        return {
            **self.policy_and_dtype(),
            **self.sizes_and_budgets(),
            **self.files(),
            "max_new_tokens": self.max_new_tokens,
            "sampling": self._sampling(),
            "device": self.device,
            "device_settings": parse_settings(self._device_settings(), "--device-set"),
            "machine": self.machine,
        }

    def _device_settings(self) -> tuple[str, ...]:
        from moesched.system.cores import require_threads

        if self.threads is None:
            return self.device_settings
        require_threads(self.threads)
        return (*self.device_settings, f"threads={self.threads}")

    def _sampling(self) -> Sampling:
        from moesched.requests.sampling import Sampling

        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            beams=self.beams,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )
