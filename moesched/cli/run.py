"""`moesched run`: generates text on this machine."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from moesched.cli import options
from moesched.cli.generation_options import GenerationArguments
from moesched.errors import BadInput

HELP = options.paragraphs(
    "Generate text on this machine; weights that do not fit into fast memory are streamed.",
    "Prompts that do not fit into one batch run in successive batches. Ctrl-C ends a run cleanly: the "
    "tokens so far are printed, and the trace so far is written.",
    "Once `moesched calibrate` has measured this machine, each figure stands beside the one that was to be expected.",
    options.BROKEN_LINES,
)

EPILOGUE = """Examples:

  moesched run examples/tiny-mixtral --policy resident --prompt "Return the"
  moesched run models/mixtral-0.8b --policy cgopipe --budget host=640MB \\
      --prompt-ids "1,2,3;4,5" --trace out/run.json
  moesched run models/mixtral-0.8b --policy cgopipe --device emulated \\
      --machine t4 --budget gpu=640MB --prompt-ids "1,2,3;4,5"
  moesched run models/mixtral-0.8b --local 2 --policy ep_router_aided \\
      --prompt-ids "1,2,3"
  moesched run models/mixtral-0.8b --policy my_policy:Mine --set ahead=3 \\
      --prompts questions.jsonl --json"""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(run, name="run", help=HELP, help_epilogue=EPILOGUE, sort_key=1)


def run(
    model_dir: options.ModelDir,
    /,
    *,
    given: GenerationArguments,
    tensor_parallel: options.TensorParallel = None,
    foreign_machine: Annotated[
        bool,
        Parameter(negative="", help="Accept a machine file whose costs were measured on another processor."),
    ] = False,
    no_band: options.NoBand = False,
    no_helps: options.NoHelps = False,
    local: Annotated[
        options.Whole | None,
        Parameter(
            metavar="N",
            help="Share the experts among N processes on this machine, each with its own cores; needs a "
            "policy for several nodes, such as ep_router_aided.",
        ),
    ] = None,
    transport: options.Transport = None,
) -> int:
    """See HELP."""
    if local is None:
        from moesched.jobs.run_model import run_model

        if transport is not None:
            raise BadInput(
                f"--transport {transport} connects processes: give --local N as well, or omit --transport"
            )
        return given.generate(
            model_dir,
            run_model,
            tensor_parallel=tensor_parallel,
            foreign_machine=foreign_machine,
            expect=True,
            band=not no_band,
            explained=not no_helps,
        )
    if tensor_parallel not in (None, 1):
        raise BadInput(f"--local {local} gives each node one accelerator: omit --tensor-parallel")
    if foreign_machine:
        raise BadInput(f"--local {local} does not use a machine's costs: omit --foreign-machine")
    if no_band or no_helps:
        named = "--no-band" if no_band else "--no-helps"
        raise BadInput(f"a run with --local has neither a band nor what would help: omit {named}")
    from moesched.cluster.cluster_jobs import run_local

    carried = {} if transport is None else {"transport": transport}
    return given.generate(model_dir, run_local, nodes=local, **carried)
