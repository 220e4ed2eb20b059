"""The demands of tasks on the machine: FLOPs and bytes, the operations of cost tables, time and shares of resources."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class WorkPart(NamedTuple):
    """A part of a task's `Work`: a number of equal operations, described in the terms of measured cost tables.

    Attributes:
        operation: the kind of operation, such as "expert" (with weights as they were read), "cached expert" (with
            weights that were read for an earlier task) or "resident expert" (with weights that stay in memory).
        size: the size of one operation: bytes of weights or, without weights, bytes moved. For a transfer: bytes per
            page. For a prompt's attention: FLOPs. For a decode step's attention: bytes of each KV head.
        rows: number of rows (tokens) that the weights are multiplied with, or the mean if an expert's tokens are not
            known. For a transfer: number of pages. For a decode step's attention: number of KV heads.
        times: the number of operations; if only its expected value is known, that may be a fraction.
        coded: pairs (storage format, bytes) of the quantised weights. Plain weights that are stored transposed have a
            pair, too, with `COLUMNS` in place of a storage format.
    """

    operation: str
    size: float
    rows: float = 1.0
    times: float = 1.0
    coded: tuple[tuple[str, int], ...] = ()


class Demand(NamedTuple):
    """The time and the resources that one task needs on the machine.

    Attributes:
        seconds: the task's time alone on the machine.
        shares: pairs of a resource and the share of it, from 0 to 1, that the task uses while it runs; rounded to three
            decimals, so that similar tasks have equal shares.
        work_class: the class of work that the task belongs to, by which measured slowdowns are found; empty for none.
        slowed: pairs (classes, speed): the measured speed of the task while tasks of certain work classes run beside
            it, relative to its speed alone. `classes` is their names in one text, as `cost_model.at_once` joins them.
        lead: the part of `seconds` that passes before the task starts, while it is handed to its lane's thread.
        fixed: the part of `seconds` that no faster processor or link would shorten: a launch or a latency.
    """

    seconds: float
    shares: tuple[tuple[str, float], ...]
    work_class: str = ""
    slowed: tuple[tuple[str, float], ...] = ()
    lead: float = 0.0
    fixed: float = 0.0


class Work(msgspec.Struct, eq=False):
    """A task's demands on the machine: one object for all tasks of the same kind and size in a step.

    Attributes:
        kind: the kind of operation, for cost tables and reports, such as "expert_ffn".
        resource: name of the processor, link or network of the machine that does the work.
        flops: floating-point operations on that processor.
        nbytes: bytes read from and written to the processor's memory, or carried over a link.
        tokens: rows of the operation, for cost tables.
        parts: the operations that the work consists of, for cost tables.
        kernel_rate: share (0 to 1) of the processor's FLOP/s that kernels reach; below 1 where they first convert the
            weights from the format in which they are stored.
        joins: whether an earlier task's launch includes this work, which then launches no kernels itself.
        nanoseconds: the task's time alone on the machine; -1 until the virtual driver computes it.
        lead: the part of `nanoseconds` before the task starts, in which its lane is taken already.
        demand: the time and the resources that the task needs; None until the virtual driver computes it.
    """

    kind: str
    resource: str
    flops: float = 0.0
    nbytes: float = 0.0
    tokens: int = 0
    parts: tuple[WorkPart, ...] = ()
    kernel_rate: float = 1.0
    joins: bool = False
    nanoseconds: int = -1
    lead: int = 0
    demand: Demand | None = None
