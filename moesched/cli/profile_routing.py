"""`moesched profile-routing` and `moesched sparsity`: count a model's expert choices, and its activations near zero."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from moesched.analysis.pictures import require_picture
from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.failures import tell
from moesched.cli.generation_options import PROMPT_FILE
from moesched.cli.output import Bar, print_json, say
from moesched.cli.tables import print_table
from moesched.errors import BadInput
from moesched.jobs.options import OUTPUT, ProfiledRun, RoutingOptions, SparsityRun
from moesched.options import Option, part_of
from moesched.system.signals import exit_code_of_signal, interruption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesched.jobs.profiling import Profiled
    from moesched.jobs.sparsity import SparsityReport
    from moesched.routing.profile import RoutingProfile
    from moesched.routing.statistics import RoutingStatistics
    from moesched.routing.trace import RoutingTrace

SOURCE = "What to profile"

EPILOGUE = """Examples:

  moesched profile-routing examples/tiny-mixtral --prompts questions.jsonl \\
      --out routing.csv --out routing.npz --picture routing.png
  moesched profile-routing mixtral-8x7b --routing popularity \\
      --gpu-experts 56 --gpu-experts 125
  moesched simulate --model examples/tiny-mixtral --machine t4 \\
      --policy expert_streaming --workload questions.jsonl \\
      --routing routing.npz"""

SPARSITY_EPILOGUE = """Examples:

  moesched sparsity examples/tiny-mixtral
  moesched sparsity models/mixtral-8x7b --prompts questions.jsonl --json"""


Model = Annotated[
    Path,
    Option(
        "A model's folder or GGUF file; with --routing also a name of `moesched list models`.", flag="MODEL"
    ),
]
MeasuredModel = Annotated[Path, Option("A model's folder or GGUF file.", flag="MODEL")]
PromptFile = Annotated[Path | None, Option(PROMPT_FILE, "FILE.jsonl", group=SOURCE)]
GpuExperts = Annotated[
    tuple[int, ...],
    Option(
        "Number of experts that a GPU holds; repeatable. By default 56 and 125 of 256, as in the paper.", "N"
    ),
]


class ProfileArguments(RoutingOptions):
    """Options of `moesched profile-routing`, without the options of the run."""

    prompts: PromptFile = None
    routing: Annotated[
        str | None,
        Option(
            "Instead of prompts: a profile or trace of an earlier run or another tool, as for `moesched simulate`, or "
            "uniform, popularity or zipf.",
            "NAME|FILE",
            group=SOURCE,
        ),
    ] = None
    gpu_experts: GpuExperts = ()
    seed: Annotated[int, Option("Seed of the generator.")] = 0
    out: Annotated[
        tuple[Path, ...],
        Option(
            "Write the counts (.csv), or every token's experts (.npz); repeatable.",
            "OUT",
            group=OUTPUT,
            writes="routing",
        ),
    ] = ()
    picture: Annotated[
        Path | None,
        Option(
            "Draw the heat map, .png or .svg; needs matplotlib: pip install 'moesched[plots]'.",
            "OUT",
            group=OUTPUT,
            writes="picture",
        ),
    ] = None
    json: options.Json = False


@command(EPILOGUE)
def profile_routing(model: Model, given: ProfileArguments, run: ProfiledRun) -> int:
    """Count the tokens that choose each expert.

    The counts tell how uneven popularity is, and the hit rate of a GPU that holds the most popular experts (Twiddler,
    Appendix C).

    With --prompts the model runs on this machine. With --routing the figures come from a profile or a trace, perhaps of
    another tool, or from a generator, and the model's weights are not needed.

    Malformed lines of a prompts file are reported by number and skipped; the exit code is then 2.
    """
    from moesched.routing.statistics import statistics_of

    if (given.prompts is None) == (given.routing is None):
        raise BadInput("say what to profile: give either --prompts or --routing")
    _require_endings(given)
    trace: RoutingTrace | None
    if given.prompts is None:
        found, trace = _known(model, given)
        _require_tokens(trace, given.out)
        code, interrupted = 0, False
    else:
        if given.routing_settings:
            raise BadInput("--routing-set is of a generator, and --prompts run the model: omit one of them")
        done, code = _profile(model, given.prompts, run)
        trace, interrupted = done.trace, done.interrupted
        found = done.trace.profile()
    statistics = statistics_of(found, given.gpu_experts)
    _print_profile(statistics, found, interrupted, json=given.json)
    _write(found, trace, given.out, given.picture)
    if interrupted:
        tell(f"{interruption()} after {found.tokens} tokens")
    return exit_code_of_signal() if interrupted else code


def _profile(model: Path, file: Path, run: ProfiledRun) -> tuple[Profiled, int]:
    """Run the model on a file of prompts, and return the recorded routing and the exit code.

    The exit code is 2 if malformed lines of the file were skipped, else 0.
    """
    from moesched.jobs.profiling import profile_routing as profile

    prompts, code = options.read_prompt_file(file)
    with Bar("profiling") as bar:
        done = profile(model, prompts, **part_of(replace(run, progress=bar.update), ProfiledRun))
    return done, code


@command(SPARSITY_EPILOGUE)
def sparsity(
    model: MeasuredModel, run: SparsityRun, prompts: PromptFile = None, *, json: options.Json = False
) -> int:
    """Count the activations after the experts' SiLU that are near zero, by layer (the Twiddler paper, Appendix B).

    Without --prompts, random token ids run through the model.

    Malformed lines of a prompts file are reported by number and skipped; the exit code is then 2.
    """
    from moesched.jobs.sparsity import sparsity_of

    asked, code = (None, 0) if prompts is None else options.read_prompt_file(prompts)
    with Bar("counting") as bar:
        report = sparsity_of(model, asked, **part_of(replace(run, progress=bar.update), SparsityRun))
    if json:
        print_json(report)
    else:
        _print_sparsity(report)
    if report.interrupted:
        tell(f"{interruption()} after {sum(report.values)} values")
    return exit_code_of_signal() if report.interrupted else code


def _known(model: Path, given: ProfileArguments) -> tuple[RoutingProfile, RoutingTrace | None]:
    """Return the profile from the file or generator that `given` names, and the routing trace if the file has one."""
    from moesched.inputs.lookup import find_shape
    from moesched.routing.sources import find_source, profile_of
    from moesched.routing.trace import RoutingTrace

    assert given.routing is not None
    config = find_shape(model)
    source = find_source(given.routing, config, given.routing_settings or {})
    return profile_of(source, config, given.seed), source if isinstance(source, RoutingTrace) else None


def _require_endings(given: ProfileArguments) -> None:
    """Raise BadInput if an output file's name ends in no known format."""
    for path in given.out:
        if path.suffix not in (".csv", ".npz"):
            raise BadInput(
                f"cannot write {path}: end its name in .csv for counts, or in .npz for every token"
            )
    if given.picture is not None:
        require_picture(given.picture, "--picture")


def _require_tokens(trace: RoutingTrace | None, out: Sequence[Path]) -> None:
    """Check that there is a routing trace if an output file (.npz) needs the experts of every token.

    Args:
        trace: the routing trace; None if only a profile is known.
        out: paths of the output files.

    Raises:
        BadInput: a .npz file is asked for without a trace.
    """
    for path in out:
        if path.suffix == ".npz" and trace is None:
            raise BadInput(
                f"cannot write {path}: only a run or a trace has the experts of single tokens; write a .csv"
            )


def _write(
    profile: RoutingProfile, trace: RoutingTrace | None, out: Sequence[Path], picture: Path | None
) -> None:
    from moesched.analysis.heat_map import draw_heat_map
    from moesched.routing.profile import write_profile
    from moesched.routing.trace import write_routing_trace

    for path in out:
        if path.suffix == ".csv":
            write_profile(profile, path)
        elif trace is not None:
            write_routing_trace(trace, path)
    if picture is not None:
        draw_heat_map(profile, picture)


def _print_profile(
    statistics: RoutingStatistics, profile: RoutingProfile, interrupted: bool, *, json: bool
) -> None:
    if json:
        counts = {"counts": profile.counts, "interrupted": interrupted}
        print_json({**msgspec.to_builtins(statistics), **counts})
        return
    layers = f"{statistics.layers} layers"
    if statistics.routed_layers < statistics.layers:
        layers += f", {statistics.routed_layers} of them"
    shape = f"{layers} of {statistics.experts} experts, top {statistics.top_k}"
    say(f"\n{statistics.model}: {shape}; {statistics.tokens:,} tokens\n")
    figures = ("mean", "deviation", "minimum", "lower_quartile", "median", "upper_quartile")
    rows = [[name.replace("_", " "), f"{getattr(statistics, name):.2f}"] for name in figures]
    print_table(["popularity, the most popular expert having 1", ""], rows, figures=1)
    say()
    every = statistics.routed_layers * statistics.experts
    rates = [
        [
            f"{rate.gpu_experts} of {every}",
            *(f"{share:.1%}" for share in (rate.best, rate.worst, rate.random)),
        ]
        for rate in statistics.hit_rates
    ]
    print_table(["hit rate, by experts on the GPU", "best", "worst", "random"], rates, figures=3)


def _print_sparsity(report: SparsityReport) -> None:
    prompts = "random token ids" if report.random_prompts else "the prompts"
    say(f"\n{report.model} ({report.dtype}): values after SiLU, {report.tokens:,} tokens of {prompts}\n")
    columns = ["layer", *(f"< {threshold:g}" for threshold in report.thresholds)]
    rows = [
        [str(layer), *("dense" if layer in report.dense else f"{share:.2%}" for share in shares)]
        for layer, shares in enumerate(report.below)
    ]
    print_table(columns, rows, figures=len(report.thresholds))
