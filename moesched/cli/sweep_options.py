"""Options of `moesched sweep` apart from its axes: the picture, processes, and files of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moesched.cli import options
from moesched.errors import BadInput
from moesched.jobs.options import OUTPUT
from moesched.options import Option, Options

if TYPE_CHECKING:
    from moesched.sweeps.axes import Sweep
    from moesched.sweeps.plots import Picture

PICTURE = "Picture"


class Drawing(Options):
    """Options for the picture, and prices that it may show."""

    price: Annotated[
        tuple[str, ...],
        Option("Dollars for an hour of a machine; repeatable.", "M=USD", group=PICTURE),
    ] = ()
    plot: Annotated[
        Path | None,
        Option(
            "Draw curves by policy, with a panel for each machine, to a .png or .svg file.",
            "OUT",
            group=PICTURE,
            writes="picture",
        ),
    ] = None
    x: Annotated[
        str | None,
        Option("Axis or figure to draw over. By default the batch size.", "NAME", group=PICTURE),
    ] = None
    y: Annotated[
        str,
        Option(
            "throughput, decode, latency, first_token, time, memory (of the accelerator) or dollars (for a "
            "million tokens).",
            "FIGURE",
            group=PICTURE,
        ),
    ] = "throughput"
    pareto: Annotated[
        str | None,
        Option(
            "Draw all points by two figures, and a line through those that no other one beats in both.",
            "FIGURE,FIGURE",
            group=PICTURE,
        ),
    ] = None


class Running(Options):
    """Options for the sweep's processes and outputs."""

    out: Annotated[
        Path | None,
        Option(
            "File of results, a JSON object in each line. By default out/sweep.jsonl, or out/NAME.jsonl for "
            "NAME.toml.",
            "OUT",
            group=OUTPUT,
            writes="results",
        ),
    ] = None
    parquet: Annotated[
        Path | None,
        Option("Write the results as Parquet, too.", "OUT", group=OUTPUT, writes="Parquet file"),
    ] = None
    workers: Annotated[int | None, Option("Number of processes. By default one for each core.", "N")] = None
    retry: Annotated[bool, Option("Run the points that failed again.")] = False
    dry_run: Annotated[bool, Option("Only check the sweep, and count its points.")] = False
    json: options.Json = False


class SweepArguments(Running, Drawing):
    """All options of `moesched sweep` apart from its axes."""

    def asked(self, file: Path | None, axes: Mapping[str, Sequence[str]]) -> Sweep:
        """Return the sweep that a file and the options describe.

        An option replaces the file's axis of the same name.

        Args:
            file: TOML file of the sweep; None for none.
            axes: values on the command line for each option that is an axis, by the option's name.
        """
        from moesched.sweeps.axes import PRICES, Sweep, merged, read_sweep, sweep_of_options

        prices = {PRICES: self.price} if self.price else {}
        return merged(read_sweep(file) if file else Sweep({}), sweep_of_options({**axes, **prices}))

    def picture(self, sweep: Sweep) -> Picture:
        """Return the picture that --plot draws: the figures along its two axes, from --x, --y and --pareto.

        Raises:
            BadInput: a name is no figure (--x may also name an axis of the sweep), or dollars are asked for without
                prices.
        """
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
