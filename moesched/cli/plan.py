"""`moesched plan`: finds the best plan for a model, a machine and a workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moesched.analysis.published import PUBLISHED_PREFILLS
from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import Bar, in_band, print_json, say, say_band
from moesched.cli.tables import print_table
from moesched.errors import BadInput, DoesNotFit
from moesched.inputs.options import ClusterPlanOptions, NodesOptions, PlanOptions
from moesched.options import described, flags_given, part_of
from moesched.system.plain_text import counted
from moesched.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from moesched.planner.cluster import ClusterProposal, Way
    from moesched.planner.proposal import Proposal
    from moesched.planner.ranking import Ranked

EPILOGUE = """Examples:

  moesched plan --model mixtral-8x7b --machine t4
  moesched plan --model mixtral-8x7b --machine l4 --workload mtbench \\
      --gen 128 --policy flexgen --budget gpu=16GB
  moesched plan --model gpt-oss-120b --machine l4
  moesched plan --model qwen3-next-80b-a3b --format q4_k_m --machine l4
  moesched plan --model qwen3-30b-a3b --machine rtx6000 --for interactive
  moesched plan --model dbrx --machine m2-ultra --nodes 4 --network 10gbe"""


ESTIMATE = "~"
"""Mark of figures that are estimated from a few layers."""

RANKED = (
    "policy",
    "tokens/s with prefill",
    "decode step",
    "first token",
    "batch",
    "micro-batch",
    "busiest lane",
    "10 % more of",
    "brings",
)
"""Columns of the ranking."""

SPARE = ("brings", "10 % more of", "micro-batch", "busiest lane")
"""Columns that are left out on a narrow terminal, the first one first."""


@command(EPILOGUE)
def plan(given: PlanOptions, cluster: NodesOptions, json: options.Json = False) -> None:
    """Find the best policy and batch sizes for a model on a machine, how fast that is, and why other policies lose.

    All policies that one machine can run are ranked, installed plug-ins too. A search over batch sizes (MoE-Lightning,
    section 4.2) gives an upper bound on the throughput of each policy. Schedules are then simulated on the virtual
    clock: with all layers for the best policies, and for other policies if that is quick; with only a few layers for
    the rest. Figures from a few layers are marked as estimates, and listed below the ranking. Neither the weights nor
    the machine are needed.

    --for throughput maximises generated tokens per second of a batch, prefill included. --for latency and --for
    interactive plan for one request of the workload's average length: the first minimises the time of a decode step,
    the second the time of the whole answer, from the prompt's first layer to the last token.

    With --nodes: the least time of a token on several machines (Eq. 1 of the Apple silicon cluster paper), the
    placement of experts, and whether to split experts or attention instead. This needs no workload.
    """
    if cluster.nodes is not None:
        proposed = _propose_cluster(given, cluster)
        print_json(proposed) if json else print_cluster(proposed)
        return
    for flag in flags_given(cluster):
        raise BadInput(f"{flag} {cluster.network} joins several machines: say how many with --nodes")
    try:
        proposal = _propose(given)
    except DoesNotFit as error:
        if json:
            print_json({"plan": None, "predicted": None, "ranking": error.ranking})
        raise
    print_json(proposal) if json else print_proposal(proposal)


def _propose(given: PlanOptions) -> Proposal:
    from moesched.planner.proposal import plan_model

    with Bar("planning") as bar:
        asked = replace(given, on_progress=lambda what: bar.update(0, what=what))
        return plan_model(**part_of(asked, PlanOptions))


def _propose_cluster(given: PlanOptions, cluster: NodesOptions) -> ClusterProposal:
    from moesched.planner.cluster import plan_cluster

    taken = described(ClusterPlanOptions)
    flags = [each.flag for each in taken.values()]
    for flag in flags_given(given):
        if flag not in flags:
            raise BadInput(f"{flag} does not go with --nodes, whose bound needs no workload: omit it")
    named = part_of(given, PlanOptions) | part_of(cluster, NodesOptions)
    return plan_cluster(**{name: named[name] for name in taken})


def print_proposal(proposal: Proposal) -> None:
    """Print the plan, its throughput, its bottleneck, and the rejected alternatives."""
    plan, predicted = proposal.plan, proposal.predicted
    place = proposal.machine
    if proposal.tensor_parallel > 1:
        place += f", cut over {proposal.tensor_parallel} accelerators"
    say(
        f"\n{proposal.model} ({proposal.dtype}) on {place}, {proposal.workload}, "
        f"{proposal.new_tokens} new tokens: predicted, best plan for {proposal.objective}\n"
    )
    print_table(["", ""], [[name, value] for name, value in _plan_rows(proposal)])
    say()
    say_band(proposal.band, proposal.widest_rate, proposal.at_peak)
    busy = sorted(predicted.utilization.items(), key=lambda lane: -lane[1])
    phase = "decode" if proposal.new_tokens > 1 else "prefill"
    print_table([f"lane, in {phase}", "busy"], [[lane, f"{share:.0%}"] for lane, share in busy], figures=1)
    say()
    peaks = [[memory, format_bytes(peak)] for memory, peak in predicted.peak_bytes.items() if peak]
    print_table(["memory", "peak"], peaks, figures=1)
    say()
    useful = [[gain.resource, f"{gain.share:+.1%}"] for gain in proposal.gains if gain.share >= 0.0005]
    gained = "throughput" if proposal.objective == "throughput" else "speed"
    print_table(["10 % more of", gained], useful or [["any one resource", "+0 %"]], figures=1)
    if len(proposal.ranking) > 1:
        say()
        print_ranking(proposal.ranking, proposal.objective)
    say(
        f"\nA run of {counted(plan.batch_size, 'request')} takes {format_seconds(_run_seconds(proposal))}. "
        f"{predicted.bound_by} is the bottleneck."
    )


def print_ranking(ranking: Sequence[Ranked], objective: str) -> None:
    """Print a table of the policies that fit, with `objective` in its title, and a line for each other policy."""
    rows = [_ranked_row(each) for each in ranking if each.fits]
    print_table([f"policies for {objective}", *RANKED[1:]], rows, spare=SPARE)
    if any(each.estimate for each in ranking):
        say(f"{ESTIMATE}estimates from a few layers, not ranked; `simulate` has the whole")
    for each in ranking:
        if not each.fits:
            say(f"\n{each.policy} does not fit: {each.lacks}")


def _ranked_row(ranked: Ranked) -> list[str]:
    gain = ranked.gain
    return [
        ranked.policy,
        f"{ESTIMATE * ranked.estimate}{ranked.throughput_tokens_per_second:.4g}",
        format_seconds(ranked.decode_step_seconds or 0.0),
        format_seconds(ranked.first_token_seconds or 0.0),
        str(ranked.batch_size),
        str(ranked.micro_batch_size),
        f"{ranked.bound_by}, {ranked.busy or 0.0:.0%}",
        gain.resource if gain is not None else "",
        f"{gain.share:+.1%}" if gain is not None else "",
    ]


def print_cluster(proposal: ClusterProposal) -> None:
    """Print the lower bound of a token's time, the placement of experts, and other ways to split the model."""
    say(
        f"\n{proposal.model} ({proposal.dtype}) on {proposal.nodes} x {proposal.machine}, {proposal.network}: "
        f"the bound of a token with {proposal.policy}\n"
    )
    print_table(["", ""], [[name, value] for name, value in _bound_rows(proposal)], figures=1)
    say()
    held = [[str(node), " ".join(map(str, experts))] for node, experts in enumerate(proposal.placement)]
    print_table(["node", "holds experts"], held)
    say()
    columns = ["experts", "attention", "policy", "busiest runs", "weights a node", "a token", "tokens/s"]
    ways = list(map(_way_row, proposal.ways))
    print_table(columns, ways, figures=4, spare=["busiest runs", "weights a node"])
    best, runs = proposal.choice.best, proposal.choice.runs
    say(f"\nBest: experts {best.experts}, attention {best.attention}.")
    for reason in proposal.choice.why:
        say(f"{reason[0].upper()}{reason[1:]}.")
    if runs != best:
        say(f"The fastest way that one of our policies implements: {runs.policy}.")


def _bound_rows(proposal: ClusterProposal) -> Iterator[tuple[str, str]]:
    bound, error = proposal.bound, proposal.expected_experts_error
    yield "weights into the caches", format_seconds(bound.load_seconds)
    yield "compute, meanwhile", format_seconds(bound.compute_seconds)
    yield "exchanges: latency", format_seconds(bound.latency_seconds)
    yield "exchanges: transfer", format_seconds(bound.transfer_seconds)
    yield "a token", format_seconds(bound.seconds)
    yield "tokens/s, at most", f"{bound.tokens_per_second:.4g}"
    drawn = f" ± {error:.2g}, drawn" if error else ""
    yield "experts a layer on the busiest node", f"{proposal.expected_experts:.4g}{drawn}"
    if proposal.tokens_per_second_per_usd is not None:
        yield "price", f"{proposal.price_usd:,.0f} USD"
        yield "tokens/s per USD", f"{proposal.tokens_per_second_per_usd:.3g}"


def _way_row(way: Way) -> list[str]:
    return [
        way.experts if way.replicas <= 1 else f"{way.experts}, {way.replicas:.3g} copies",
        way.attention,
        way.policy or "-",
        f"{way.expected_experts:.4g}",
        format_bytes(way.bytes_per_node),
        format_seconds(way.token_seconds),
        f"{1 / way.token_seconds:.4g}",
    ]


def _plan_rows(proposal: Proposal) -> Iterator[tuple[str, str]]:
    plan, predicted = proposal.plan, proposal.predicted
    attention = "accelerator" if plan.attention_on_gpu else "host"
    if plan.kv_on_gpu and not plan.attention_on_gpu:
        attention += " (accelerator where it has the KV cache)"
    network = "accelerator" if plan.ffn_on_gpu else "host"
    if plan.ffn_on_gpu and plan.attention_on_gpu and predicted.utilization.get("host", 0.0):
        network += " and host"  # nothing else keeps the host busy
    yield "policy", plan.policy
    yield "batch, micro-batches of", f"{plan.batch_size}, {plan.micro_batch_size}"
    if plan.prefill_chunk is not None:
        yield "prefill in chunks of", f"{plan.prefill_chunk} tokens"
    yield "attention on", attention
    yield "FFN on", network
    yield (
        "on the accelerator",
        f"{plan.weights_on_gpu:.1%} of the weights, {plan.kv_on_gpu:.0%} of the KV cache",
    )
    band, tokens = proposal.band, "{:.4g}".format
    throughput = predicted.throughput_tokens_per_second
    yield "tokens/s with prefill", tokens(throughput) + in_band(band, "throughput_tokens_per_second", tokens)
    for name, figure in (("decode step", "decode_step_seconds"), ("prefill", "prefill_seconds")):
        seconds = format_seconds(getattr(predicted, figure))
        yield name, seconds + in_band(band, figure, format_seconds)
    if not proposal.costs_measured:
        yield PUBLISHED_PREFILLS


def _run_seconds(proposal: Proposal) -> float:
    tokens = proposal.plan.batch_size * proposal.new_tokens
    return tokens / proposal.predicted.throughput_tokens_per_second
