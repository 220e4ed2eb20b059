"""`moesched simulate`: predicts a run on the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from moesched.cli import arguments, options
from moesched.inputs.defaults import PREVIEW_ACCURACY

if TYPE_CHECKING:
    from moesched.inputs.prompts import Prompt
    from moesched.jobs.report import JobReport

HELP = options.paragraphs(
    "Predict a run on any machine with a virtual clock; needs neither weights nor a GPU.",
    "Simulates one full batch of the workload, or --requests N in successive batches, from loading to the "
    "last token. A prompts file is simulated as a whole.",
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
  moesched simulate --model mixtral-8x7b --machine t4 \\
      --policy expert_streaming --workload mtbench --batch-size 8 \\
      --routing zipf --routing-set locality=0.5
  moesched simulate --model mixtral-8x7b --machine t4 --policy expert_cache \\
      --workload mtbench --batch-size 1 --routing request.npy
  moesched simulate --model deepseek-v2-lite --format q4_k_m --machine l4 \\
      --policy twiddler --workload mtbench --batch-size 1
  moesched simulate --model dbrx --machine m2-ultra --nodes 4 --network 10gbe \\
      --policy ep_router_aided --workload uniform --batch-size 1"""


def add_to(app: App) -> None:
    """Add the command."""
    app.command(simulate, name="simulate", help=HELP, help_epilogue=EPILOGUE, sort_key=2)


@dataclass(frozen=True, kw_only=True)
class WorkloadArguments:
    """The requests, and the experts that their tokens choose."""

    workload: Annotated[
        str,
        Parameter(
            metavar="NAME|FILE",
            help="A name of `moesched list workloads`, a TOML file, or a .jsonl prompts file as for `run`.",
        ),
    ]
    gen: options.NewTokens = None
    requests: Annotated[
        options.Whole | None,
        Parameter(
            metavar="N",
            help="Number of requests; prompts repeat if needed. By default one full batch, or each listed prompt once.",
        ),
    ] = None
    padded: Annotated[
        bool, Parameter(negative="", help="Pad every prompt to the length of the longest one.")
    ] = False
    seed: Annotated[options.Whole, Parameter(help="Seed of the order of the prompts and of the routing.")] = 0
    beams: options.Beams = 1
    routing: options.Routing = None
    routing_settings: options.RoutingSettings = ()
    preview_accuracy: Annotated[
        float,
        Parameter(
            metavar="P",
            help="Probability that a preview of the router one layer ahead names the right expert, from 0 to 1; "
            "N layers ahead it is P to the power of N. prefetch_gate uses previews.",
        ),
    ] = PREVIEW_ACCURACY

    def requests_and_routing(self) -> dict[str, Any]:
        """The same as keywords of `simulate_model`, apart from the workload."""
        from moesched.settings import parse_settings

        return {
            "gen": self.gen,
            "requests": self.requests,
            "padded": self.padded,
            "seed": self.seed,
            "beams": self.beams,
            "routing": self.routing,
            "routing_settings": parse_settings(self.routing_settings, "--routing-set"),
            "preview_accuracy": self.preview_accuracy,
        }


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimulationArguments(
    arguments.OutputArguments,
    arguments.ClusterArguments,
    arguments.BatchArguments,
    WorkloadArguments,
    arguments.PolicyArguments,
    arguments.FormatArguments,
    arguments.ModelArguments,
):
    """All options of the command."""

    no_band: options.NoBand = False
    no_helps: options.NoHelps = False


def simulate(*, given: SimulationArguments) -> int:
    """See HELP."""
    from moesched.cli.display import SimulationBar
    from moesched.cli.output import Bar
    from moesched.cli.results import hand_out
    from moesched.jobs.simulate_model import simulate_model

    machine = given.changed_machine()
    workload: str | list[Prompt] = given.workload
    code = 0
    if given.workload.endswith(".jsonl"):
        workload, code = options.read_prompt_file(Path(given.workload))

    def job() -> JobReport:
        with Bar("simulating") as bar:
            return simulate_model(
                given.model,
                machine=machine,
                workload=workload,
                format=given.format,
                tensor_parallel=given.tensor_parallel,
                nodes=given.nodes,
                network=given.network,
                band=not given.no_band,
                explained=not given.no_helps,
                listener=SimulationBar(bar),
                **given.requests_and_routing(),
                **given.policy_and_dtype(),
                **given.sizes_and_budgets(),
                **given.files(),
            )

    hand_out(job, given)
    return code
