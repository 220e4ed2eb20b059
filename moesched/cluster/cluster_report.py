"""Merges the results of a run on several nodes: reports into one report, and traces onto one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from moesched.cluster.cluster_file import Host
from moesched.cluster.launcher import Finished, Launch
from moesched.cluster.roster import Roster
from moesched.errors import TransportError
from moesched.jobs.expectation import SEVERAL
from moesched.jobs.options import OutputOptions
from moesched.jobs.report import ClusterReport, JobReport, NodeReport, merge_reports
from moesched.jobs.trace_file import batch_files, write_recording
from moesched.runs.ending import Ending
from moesched.runs.listeners import Listener
from moesched.runs.process_bytes import largest
from moesched.system.decoding import DECODE_ERRORS, reason
from moesched.trace import Clock, Recording, merge_recordings

T = TypeVar("T")


def cluster_report(
    launch: Launch,
    roster: Roster,
    text: list[str] | None,
    ending: Ending,
) -> ClusterReport | None:
    """Merge the nodes' reports into one; None if no node sent a report.

    Args:
        launch: the run, with its tokens and the nodes' reports.
        roster: the run's nodes.
        text: the generated text of each prompt; None without a tokenizer.
        ending: the error or signal that ended the run, if any.
    """
    reports = {
        order: [(rank, _decoded(rank, data, JobReport)) for rank, data in found]
        for order, found in _by_order(launch.finished, "report").items()
    }
    first = [report for found in reports.values() for rank, report in found if rank == found[0][0]]
    if not first:
        return None
    merged = merge_reports(first, requests=len(launch.log.tokens), batches=len(first))
    fields = {name: getattr(merged, name) for name in merged.__struct_fields__}
    fields |= {
        "tokens": launch.log.tokens,
        "text": text,
        "interrupted": ending.interrupted,
        "failure": launch.failure if ending.error is None else str(ending.error),
        "no_expectation": SEVERAL,
    }
    if len(reports) > 1:  # a later order repeats and continues requests of an earlier one
        fields |= {"request_times": None, "micro_batch_times": []}
    by_rank: dict[int, list[JobReport]] = {node.host.rank: [] for node in roster.nodes}
    for found in reports.values():
        for rank, report in found:
            by_rank[rank].append(report)
    members = [_member(roster, node.host, by_rank[node.host.rank]) for node in roster.nodes]
    return ClusterReport(**fields, members=members, epochs=launch.epoch + 1)


def write_recordings(
    outputs: OutputOptions, launch: Launch, roster: Roster, report: ClusterReport, listener: Listener
) -> None:
    """Write each batch's trace and HTML report to the files of `outputs`, with all times on the launcher's clock."""
    number = 0
    for sent in _by_order(launch.finished, "recording").values():
        by_rank: dict[int, list[Recording]] = {}
        for rank, data in sent:
            by_rank.setdefault(rank, []).append(_decoded(rank, data, Recording))
        for batch in range(max(map(len, by_rank.values()))):
            recordings = {rank: found[batch] for rank, found in by_rank.items() if batch < len(found)}
            merged = merge_recordings(recordings, roster.ahead)
            told = {
                str(rank): Clock(ahead=clock.offset, error=clock.error)
                for rank, clock in roster.clocks.items()
                if rank in recordings
            }
            write_recording(batch_files(outputs, number), merged, report, listener, clocks=told)
            number += 1


def _decoded(rank: int, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except DECODE_ERRORS as error:
        what = f"node {rank} sent {len(data):,} bytes that are not a {kind.__name__}"
        raise TransportError(
            f"{what}: {reason(error)}; run the same version of moesched on all nodes"
        ) from error


def _member(roster: Roster, host: Host, reports: Sequence[JobReport]) -> NodeReport:
    """Make the report on one node: its merged reports on batches, its clock's offset, and the reason if it was lost."""
    clock = roster.clocks.get(host.rank)
    memories = reports[0].peak_bytes if reports else ()
    return NodeReport(
        rank=host.rank,
        name=host.name,
        load_seconds=sum(each.load_seconds for each in reports),
        peak_bytes={memory: max(each.peak_bytes[memory] for each in reports) for memory in memories},
        process_bytes=largest([each.process_bytes for each in reports if each.process_bytes]),
        clock_ahead_seconds=None if clock is None else clock.offset / 1e9,
        clock_error_seconds=None if clock is None else clock.error / 1e9,
        lost=roster.lost.get(host.rank),
    )


def _by_order(finished: Sequence[Finished], what: str) -> dict[int, list[tuple[int, bytes]]]:
    """Group the nodes' reports or recordings by the number of their order (a request to generate tokens).

    Args:
        what: "report" or "recording".

    Returns:
        By the order's number, pairs of a node's rank and the content in MessagePack, sorted by rank, then by arrival.
    """
    found: dict[int, list[tuple[int, bytes]]] = {}
    for each in finished:
        if each.what == what:
            found.setdefault(each.order, []).append((each.rank, each.data))
    return {order: sorted(sent, key=lambda one: one[0]) for order, sent in sorted(found.items())}
