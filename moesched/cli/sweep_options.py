"""The options of `moesched sweep`: axes with values between commas, the picture, and where results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from moesched.cli import options
from moesched.cli.files import Writes

if TYPE_CHECKING:
    from moesched.sweeps.axes import Sweep
    from moesched.sweeps.plots import Picture

Texts = tuple[str, ...]

AXES = Group("Axes", sort_key=1)
MORE_AXES = Group("More axes", sort_key=2)
PICTURE = Group("Picture", sort_key=3)


def axis(names: str, help: str, group: Group = MORE_AXES) -> Parameter:
    """An option with values between commas."""
    return options.repeatable(group=group, metavar=names, help=help)


def table(name: str, key: str, help: str) -> Parameter:
    """A repeatable option with values between commas for each key."""
    return options.repeatable(name=name, group=MORE_AXES, metavar=f"{key}=V,...", help=help)


@dataclass(frozen=True, kw_only=True)
class MainAxes:
    """The axes that most sweeps have."""

    policy: Annotated[
        Texts, axis("P,...", "Policies as `simulate` takes them; all for those that ship.", AXES)
    ] = ()
    machine: Annotated[Texts, axis("M,...", "Machines.", AXES)] = ()
    model: Annotated[Texts, axis("M,...", "Models. By default mixtral-8x7b.", AXES)] = ()
    workload: Annotated[Texts, axis("W,...", "Workloads. By default mtbench.", AXES)] = ()
    batch_size: Annotated[Texts, axis("N,...", "Requests that run together.", AXES)] = ()
    gen: Annotated[Texts, axis("N,...", "Tokens to generate for each prompt.", AXES)] = ()


@dataclass(frozen=True, kw_only=True)
class OtherAxes:
    """Further options of `simulate`."""

    micro_batch_size: Annotated[Texts, axis("N,...", "Requests that share a kernel.")] = ()
    prefill_chunk: Annotated[Texts, axis("N,...", "Most prompt tokens in one pass through a layer.")] = ()
    format: Annotated[Texts, axis("F,...", "Storage formats of the weights: bf16, q4_k_m and so on.")] = ()
    dtype: Annotated[Texts, axis("D,...", "Number formats: float32, bfloat16, float16.")] = ()
    tensor_parallel: Annotated[Texts, axis("N,...", "Numbers of accelerators that share the model.")] = ()
    nodes: Annotated[Texts, axis("N,...", "Numbers of machines that share the experts.")] = ()
    network: Annotated[Texts, axis("N,...", "Networks between them.")] = ()
    requests: Annotated[Texts, axis("N,...", "Numbers of requests, in successive batches.")] = ()
    padded: Annotated[Texts, axis("BOOL,...", "Whether prompts are padded to the longest: true, false.")] = ()
    seed: Annotated[Texts, axis("N,...", "Seeds of the order of prompts and of the routing.")] = ()
    beams: Annotated[Texts, axis("N,...", "Widths of a beam search.")] = ()
    routing: Annotated[Texts, axis("R,...", "Sources of each token's experts.")] = ()
    preview_accuracy: Annotated[Texts, axis("P,...", "Accuracies of previews of the router.")] = ()


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Options with a key."""

    settings: Annotated[Texts, table("--set", "KEY", "Setting of those policies that take it.")] = ()
    machine_set: Annotated[
        Texts, table("--machine-set", "WHAT", "Change the machines, as in `simulate`.")
    ] = ()
    budget: Annotated[Texts, table("--budget", "MEM", "Limit on the bytes in a memory.")] = ()
    routing_set: Annotated[Texts, table("--routing-set", "KEY", "Setting of the routing.")] = ()
    price: Annotated[
        Texts,
        options.repeatable(
            group=PICTURE, metavar="M=USD",
            help="Dollars for an hour of a machine; repeatable.",
        ),
    ] = ()  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The picture."""

    plot: Annotated[
        Path | None,
        Parameter(
            group=PICTURE,
            metavar="OUT",
            help="Draw curves by policy, with a panel for each machine, to a .png or .svg file.",
        ),
        Writes("picture"),
    ] = None
    x: Annotated[
        str | None,
        Parameter(
            group=PICTURE, metavar="NAME", help="Axis or figure to draw over. By default the batch size."
        ),
    ] = None
    y: Annotated[
        str,
        Parameter(
            group=PICTURE,
            metavar="FIGURE",
            help="throughput, decode, latency, first_token, time, memory (of the accelerator) or dollars (for a "
            "million tokens).",
        ),
    ] = "throughput"
    pareto: Annotated[
        str | None,
        Parameter(
            group=PICTURE,
            metavar="FIGURE,FIGURE",
            help="Draw all points by two figures, and a line through those that no other one beats in both.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Running:
    """Processes and outputs of the sweep."""

    out: Annotated[
        Path | None,
        Parameter(
            group=options.OUTPUT,
            metavar="OUT",
            help="File of results, a JSON object in each line. By default out/sweep.jsonl, or out/NAME.jsonl for "
            "NAME.toml.",
        ),
        Writes("results"),
    ] = None
    parquet: Annotated[
        Path | None,
        Parameter(group=options.OUTPUT, metavar="OUT", help="Write the results as Parquet, too."),
        Writes("Parquet file"),
    ] = None
    workers: Annotated[
        options.Whole | None,
        Parameter(metavar="N", help="Number of processes. By default one for each core."),
    ] = None
    retry: Annotated[bool, Parameter(negative="", help="Run the points that failed again.")] = False
    dry_run: Annotated[bool, Parameter(negative="", help="Only check the sweep, and count its points.")] = (
        False
    )
    json: options.Json = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SweepArguments(Running, Drawing, Tables, OtherAxes, MainAxes):
    """All options of the command."""

    def asked(self, file: Path | None) -> Sweep:
        """The sweep of the file and the options."""
        from dataclasses import asdict, fields

        from moesched.sweeps.axes import Sweep, merged, read_sweep, sweep_of_options

        given = asdict(self)
        names = [each.name for group in (MainAxes, OtherAxes) for each in fields(group)]
        texts = {name: ",".join(given[name]) for name in names if given[name]}
        tables = {
            "settings": self.settings,
            "machine_set": self.machine_set,
            "budgets": self.budget,
            "routing_settings": self.routing_set,
            "price": self.price,
        }
        return merged(read_sweep(file) if file else Sweep({}), sweep_of_options(texts, tables))

    def picture(self, sweep: Sweep) -> Picture:
        """The contents of --plot's picture."""
        from moesched.errors import BadInput
        from moesched.sweeps.figures import require_figure
        from moesched.sweeps.plots import Picture, default_x

        if self.pareto is None:
            picture = Picture(self.x or default_x(sweep.axes), self.y)
            require_figure(picture.x, dict.fromkeys([*sweep.axes, "batch_size"]), "--x")
        else:
            x, _, y = self.pareto.partition(",")
            picture = Picture(x.strip(), y.strip(), pareto=True)
            require_figure(picture.x, (), "--pareto")
        require_figure(picture.y, (), "--pareto" if self.pareto else "--y")
        if "dollars" in picture and not sweep.prices:
            raise BadInput(
                "dollars need prices: add --price, such as --price t4=0.35 for 0.35 dollars an hour"
            )
        return picture
