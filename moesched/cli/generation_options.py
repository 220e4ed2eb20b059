"""Options of commands that generate text: the prompts, and the job that a command starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from moesched.cli import options
from moesched.cli.failures import FAILED
from moesched.errors import BadInput
from moesched.inputs.options import DETAILS
from moesched.jobs.options import GeneratedOptions
from moesched.options import Option, Options, part_of
from moesched.system.signals import exit_code_of_signal

if TYPE_CHECKING:
    from moesched.inputs.prompts import Prompt
    from moesched.jobs.report import JobReport

PROMPTS = "Prompts"
PROMPT_FILE = 'File with one {"prompt": "..."} or {"prompt_ids": [1, 2]} per line.'

Job = Callable[..., "JobReport"]
"""Function that generates text, such as `run_model`, and takes the same keyword arguments."""


class PromptArguments(Options):
    """Options for prompts, which are given as texts, as a file or as token ids."""

    prompt: Annotated[tuple[str, ...], Option("Prompt text; repeatable.", "T", group=PROMPTS)] = ()
    prompts: Annotated[Path | None, Option(PROMPT_FILE, "FILE.jsonl", group=PROMPTS)] = None
    prompt_ids: Annotated[
        str | None,
        Option('Token ids, such as "1,2,3;4,5" for two prompts.', "IDS", group=PROMPTS),
    ] = None

    def read_prompts(self) -> tuple[list[Prompt], int]:
        """Return the prompts, and the exit code: 2 if malformed lines of a file were skipped, else 0.

        Raises:
            BadInput: none or several of the options for prompts are given, or the prompts cannot be read.
        """
        from moesched.inputs.prompts import parse_prompt_ids

        ways = sum((bool(self.prompt), self.prompts is not None, self.prompt_ids is not None))
        if not ways:
            raise BadInput("there is no prompt: give --prompt TEXT, --prompts FILE or --prompt-ids IDS")
        if ways > 1:
            raise BadInput("give prompts in one way: --prompt, --prompts or --prompt-ids")
        if self.prompts is not None:
            return options.read_prompt_file(self.prompts)
        return (list(self.prompt) if self.prompt_ids is None else list(parse_prompt_ids(self.prompt_ids))), 0


class ThreadsArguments(Options):
    """Option for the threads of the kernels on the CPU, a setting of the device."""

    threads: Annotated[
        int | None,
        Option(
            "Threads of the kernels on the CPU, at most one for each core that this process may use. By default as "
            "many, or with device cuda those that issuing and waiting threads do not need.",
            "N",
            group=DETAILS,
        ),
    ] = None

    def with_threads(self, settings: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the settings of a device, with the number of threads if it is given.

        Raises:
            BadInput: there are fewer cores than threads, or no threads.
        """
        from moesched.system.cores import require_threads

        if self.threads is None:
            return dict(settings or {})
        require_threads(self.threads)
        return {**(settings or {}), "threads": self.threads}


class GenerationArguments(options.ReportArguments, GeneratedOptions, ThreadsArguments, PromptArguments):
    """All options of a command that generates text."""

    def generate(self, job: Job, **more: Any) -> int:
        """Run a job with these options, print the texts and the report, and return the exit code.

        Args:
            job: the function that generates text, such as `run_model`.
            more: further keywords for `job`.

        Raises:
            BadInput: an option cannot be used.
        """
        from moesched.cli.display import display_of
        from moesched.cli.results import hand_out

        prompts, code = self.read_prompts()
        display = display_of(prompts, json=self.json)

        def run() -> JobReport:
            try:
                asked = replace(
                    self,
                    html=self.page,
                    listener=display,
                    device_settings=self.with_threads(self.device_settings),
                )
                return job(prompts=prompts, **part_of(asked, GeneratedOptions), **more)
            finally:
                display.ran()

        done = hand_out(run, self, self.trace)
        if done.failure is not None:
            return FAILED
        return exit_code_of_signal() if done.interrupted else code
