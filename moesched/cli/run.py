"""`moesched run`: generates text on this machine."""

from __future__ import annotations

from moesched.cli.command import command
from moesched.cli.generation_options import GenerationArguments
from moesched.errors import BadInput
from moesched.inputs.defaults import POLICY
from moesched.jobs.options import AloneOptions, BestPolicyOptions, ProcessesOptions
from moesched.options import flags_given, part_of

EPILOGUE = """Examples:

  moesched run examples/tiny-mixtral --prompt "Return the"
  moesched run models/mixtral-0.8b --policy cgopipe --budget host=640MB \\
      --prompt-ids "1,2,3;4,5" --trace out/run.json
  moesched run models/mixtral-0.8b --policy cgopipe --device emulated \\
      --machine t4 --budget gpu=640MB --prompt-ids "1,2,3;4,5"
  moesched run models/mixtral-0.8b --local 2 --policy ep_router_aided \\
      --prompt-ids "1,2,3"
  moesched run models/mixtral-0.8b --policy my_policy:Mine --set ahead=3 \\
      --prompts questions.jsonl --json"""


class RunArguments(BestPolicyOptions, GenerationArguments):
    """The options of `run`, in one process or in several."""


@command(EPILOGUE)
def run(given: RunArguments, alone: AloneOptions, processes: ProcessesOptions) -> int:
    """Generate text on this machine; weights that do not fit into fast memory are streamed.

    Without --policy the planner chooses the policy that it predicts to be the fastest of those that fit, and the report
    names it. With --local, --policy has to be given.

    Prompts that do not fit into one batch run in successive batches. Ctrl-C ends a run cleanly: the tokens so far are
    printed, and the trace so far is written.

    Once `moesched calibrate` has measured this machine, measured figures are shown beside predicted ones.

    Malformed lines of a prompts file are reported by number and skipped; the exit code is then 2.
    """
    if processes.nodes is None:
        from moesched.jobs.session import run_model

        for flag in flags_given(processes):
            raise BadInput(f"{flag} is for several processes: give --local N as well, or omit {flag}")
        return given.generate(run_model, expect=True, **part_of(alone, AloneOptions))
    for flag in flags_given(alone):
        raise BadInput(
            f"--local {processes.nodes} starts several processes, and {flag} is for one: omit {flag}"
        )
    if given.policy == POLICY:
        from moesched.jobs.job import chooses_for_one_machine

        raise chooses_for_one_machine(processes.nodes)
    from moesched.cluster.cluster_jobs import run_local

    return given.generate(run_local, **part_of(processes, ProcessesOptions))
