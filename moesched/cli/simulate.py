"""`moesched simulate`: the same schedule on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from moesched.cli import options

if TYPE_CHECKING:
    from moesched.inputs.prompts import Prompt
    from moesched.jobs.report import JobReport

HELP = options.paragraphs(
    "Predict a run on a virtual clock: the same policy, a machine that you need not have, no weights and no GPU.",
    "One full batch of the workload is simulated, from loading to the last token, or as many requests as you say; "
    "more than fit a batch run as successive batches. A list of prompts runs whole.",
    options.BROKEN_LINES,
)

EPILOGUE = """Examples:

  moesched simulate --model mixtral-8x7b --machine t4 --policy cgopipe \\
      --workload mtbench --gen 64
  moesched simulate --model mixtral-8x7b --machine t4 --policy flexgen \\
      --workload summarization --padded --requests 500
  moesched simulate --model models/mixtral-0.8b --machine auto \\
      --policy layer_streaming --workload uniform --batch-size 16 \\
      --budget host=640MB --trace out/predicted.json
  moesched simulate --model mixtral-8x7b --machine t4 --policy expert_streaming \\
      --workload mtbench --batch-size 8 --routing zipf --routing-set locality=0.5
  moesched simulate --model dbrx --machine m2-ultra --nodes 4 --network 10gbe \\
      --policy ep_router_aided --workload uniform --batch-size 1"""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(simulate, name="simulate", help=HELP, help_epilogue=EPILOGUE, sort_key=2)


def simulate(
    *,
    model: options.Model,
    machine: options.Machine,
    policy: options.Policy,
    workload: Annotated[
        str,
        Parameter(
            metavar="NAME|FILE",
            help="A name of `moesched list workloads`, a TOML file, or a .jsonl file of prompts as `run` takes it.",
        ),
    ],
    settings: options.Settings = (),
    gen: Annotated[
        int | None,
        Parameter(metavar="N", help="Tokens to generate for each prompt. By default what the workload says."),
    ] = None,
    requests: Annotated[
        int | None,
        Parameter(
            metavar="N",
            help="Requests in all; a workload repeats its prompts. By default one full batch, or each listed prompt.",
        ),
    ] = None,
    padded: Annotated[
        bool, Parameter(negative="", help="Count every prompt as long as the longest of the workload.")
    ] = False,
    dtype: options.DType = None,
    seed: Annotated[int, Parameter(help="Of the order of the prompts and of the routing.")] = 0,
    beams: options.Beams = 1,
    routing: options.Routing = None,
    routing_settings: options.RoutingSettings = (),
    preview_accuracy: Annotated[
        float,
        Parameter(
            metavar="P",
            help="How likely an expert is foretold by policies that preview the router, such as prefetch_gate: 0 to 1.",
        ),
    ] = 0.8,
    batch_size: options.BatchSize = None,
    micro_batch_size: options.MicroBatchSize = None,
    prefill_chunk: options.PrefillChunk = None,
    budget: options.Budgets = (),
    tensor_parallel: options.TensorParallel = None,
    nodes: options.Nodes = None,
    network: options.Network = None,
    trace: options.Trace = None,
    report: options.ReportFile = None,
    json: options.Json = False,
) -> int:
    """See HELP."""
    from moesched.cli.display import SimulationBar
    from moesched.cli.output import Bar
    from moesched.cli.results import hand_out
    from moesched.jobs.model_jobs import simulate_model
    from moesched.settings import parse_settings

    given: str | list[Prompt] = workload
    code = 0
    if workload.endswith(".jsonl"):
        given, code = options.read_prompt_file(Path(workload))

    def job() -> JobReport:
        with Bar("simulating") as bar:
            return simulate_model(
                model,
                machine=machine,
                policy=policy,
                workload=given,
                settings=parse_settings(settings),
                gen=gen,
                requests=requests,
                padded=padded,
                dtype=dtype,
                seed=seed,
                beams=beams,
                routing=routing,
                routing_settings=parse_settings(routing_settings, "--routing-set"),
                preview_accuracy=preview_accuracy,
                batch_size=batch_size,
                micro_batch_size=micro_batch_size,
                prefill_chunk=prefill_chunk,
                budgets=options.parse_budgets(budget),
                tensor_parallel=tensor_parallel,
                nodes=nodes,
                network=network,
                trace=trace,
                listener=SimulationBar(bar),
            )

    hand_out(job, json=json, file=report, trace=trace)
    return code
