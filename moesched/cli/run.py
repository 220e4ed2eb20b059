"""`moesched run`: text from a model on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Group, Parameter

from moesched.cli import options
from moesched.errors import BadInput

if TYPE_CHECKING:
    from moesched.jobs.prompts import Prompt
    from moesched.jobs.report import JobReport

PROMPTS = Group("Prompts", sort_key=1)
SAMPLING = Group("Sampling", sort_key=3)

HELP = options.paragraphs(
    "Generate text on this machine, with weights that stream from a slower memory if they must.",
    "More prompts than fit a batch run as successive batches. Ctrl-C ends a run cleanly: the tokens so far are "
    "printed, the trace so far is written.",
    options.BROKEN_LINES,
)

EPILOGUE = """Examples:

  moesched run examples/tiny-mixtral --policy resident --prompt "Return the"
  moesched run models/mixtral-0.8b --policy cgopipe --budget host=640MB \\
      --prompt-ids "1,2,3;4,5" --trace out/run.json
  moesched run models/mixtral-0.8b --policy cgopipe --device emulated --machine t4 \\
      --budget gpu=640MB --prompt-ids "1,2,3;4,5"
  moesched run models/mixtral-0.8b --policy my_policy:Mine --set ahead=3 \\
      --prompts questions.jsonl --json"""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(run, name="run", help=HELP, help_epilogue=EPILOGUE, sort_key=1)


def run(
    model_dir: Annotated[
        Path,
        Parameter(help="A Hugging Face folder: config.json, safetensors, tokenizer.json if there is one."),
    ],
    /,
    *,
    policy: options.Policy,
    settings: options.Settings = (),
    prompt: Annotated[
        tuple[str, ...],
        Parameter(
            group=PROMPTS,
            metavar="T",
            negative="",
            show_default=False,
            help="A text to go on from; again for more.",
        ),
    ] = (),
    prompts: Annotated[
        Path | None,
        Parameter(
            group=PROMPTS,
            metavar="FILE.jsonl",
            help='A file with one {"prompt": "..."} or {"prompt_ids": [1, 2]} a line.',
        ),
    ] = None,
    prompt_ids: Annotated[
        str | None,
        Parameter(group=PROMPTS, metavar="IDS", help='Token ids, such as "1,2,3;4,5" for two prompts.'),
    ] = None,
    max_new_tokens: Annotated[
        int, Parameter(metavar="N", help="Tokens to generate for each prompt, at most.")
    ] = 64,
    dtype: options.DType = None,
    temperature: Annotated[
        float, Parameter(group=SAMPLING, help="0 takes the likeliest token, more gives others a chance.")
    ] = 0.0,
    top_k: Annotated[
        int | None, Parameter(group=SAMPLING, metavar="K", help="Draw from the K likeliest tokens only.")
    ] = None,
    top_p: Annotated[
        float,
        Parameter(
            group=SAMPLING, metavar="P", help="Draw from the fewest tokens that are together as likely as P."
        ),
    ] = 1.0,
    seed: Annotated[
        int, Parameter(group=SAMPLING, help="Of the random numbers that tokens are drawn with.")
    ] = 0,
    beams: options.Beams = 1,
    length_penalty: Annotated[
        float,
        Parameter(
            group=options.BEAMS,
            metavar="X",
            help="A sequence's log probability is divided by its length to this power.",
        ),
    ] = 1.0,
    early_stopping: Annotated[
        bool,
        Parameter(
            group=options.BEAMS, negative="", help="End when as many sequences as there are beams have ended."
        ),
    ] = False,
    batch_size: options.BatchSize = None,
    micro_batch_size: options.MicroBatchSize = None,
    budget: options.Budgets = (),
    tensor_parallel: options.TensorParallel = None,
    device: Annotated[
        str, Parameter(metavar="D", help="A name of `moesched list devices`, or package.module:Class.")
    ] = "torch",
    device_settings: Annotated[
        tuple[str, ...],
        Parameter(
            name="--device-set",
            metavar="KEY=VALUE",
            negative="",
            show_default=False,
            help="A setting of the device's own, such as dilation=64 of the emulated one; again for more.",
        ),
    ] = (),
    machine: Annotated[
        str,
        Parameter(
            metavar="NAME|FILE",
            help="What the policy plans on: auto is this machine, as `moesched calibrate` left it; "
            "--device emulated imitates any that has an accelerator.",
        ),
    ] = "auto",
    foreign_machine: Annotated[
        bool,
        Parameter(negative="", help="Use a machine file whose costs were measured on another processor."),
    ] = False,
    trace: options.Trace = None,
    report: options.ReportFile = None,
    json: options.Json = False,
) -> int:
    """See HELP."""
    from moesched.cli.display import display_of
    from moesched.cli.failures import INTERRUPTED
    from moesched.cli.results import hand_out
    from moesched.jobs.model_jobs import run_model
    from moesched.jobs.prompts import TOKENIZER_NAME
    from moesched.sampling import Sampling
    from moesched.settings import parse_settings

    given, code = _prompts(prompt, prompts, prompt_ids)
    display = display_of(given, has_text=(model_dir / TOKENIZER_NAME).is_file(), json=json)

    def job() -> JobReport:
        try:
            return run_model(
                model_dir,
                given,
                policy=policy,
                settings=parse_settings(settings),
                max_new_tokens=max_new_tokens,
                dtype=dtype,
                sampling=Sampling(
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    seed=seed,
                    beams=beams,
                    length_penalty=length_penalty,
                    early_stopping=early_stopping,
                ),
                batch_size=batch_size,
                micro_batch_size=micro_batch_size,
                device=device,
                device_settings=parse_settings(device_settings, "--device-set"),
                machine=machine,
                foreign_machine=foreign_machine,
                budgets=options.parse_budgets(budget),
                tensor_parallel=tensor_parallel,
                trace=trace,
                listener=display,
            )
        finally:
            display.ran()

    done = hand_out(job, json=json, file=report, trace=trace)
    return INTERRUPTED if done.interrupted else code


def _prompts(texts: Sequence[str], file: Path | None, ids: str | None) -> tuple[list[Prompt], int]:
    """The prompts, given in one of three ways, and the exit code that says whether some were left out."""
    from moesched.jobs.prompts import parse_prompt_ids

    if sum((bool(texts), file is not None, ids is not None)) != 1:
        raise BadInput("give prompts in one way: --prompt, --prompts or --prompt-ids")
    if file is not None:
        return options.read_prompt_file(file)
    return (list(texts) if ids is None else list(parse_prompt_ids(ids))), 0
