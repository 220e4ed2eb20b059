"""Traces of runs, predicted or measured: tasks with their lanes, times, dependencies and costs."""

from __future__ import annotations

from moesched.trace.checker import check_trace
from moesched.trace.chrome_reader import Trace, read_trace
from moesched.trace.chrome_writer import TitledRun, write_side_by_side, write_trace
from moesched.trace.critical import Hop, critical_path, least_nanoseconds
from moesched.trace.merging import merge_recordings
from moesched.trace.recorder import FirstSteps, LastSteps, Recorder
from moesched.trace.recording import About, Clock, LaneName, MemorySample, Recording, Slice, TaskInfo
from moesched.trace.summary import KindUse, LaneSummary, StepTime, Summary, summarize

__all__ = [
    "About",
    "Clock",
    "FirstSteps",
    "Hop",
    "KindUse",
    "LaneName",
    "LaneSummary",
    "LastSteps",
    "MemorySample",
    "Recorder",
    "Recording",
    "Slice",
    "StepTime",
    "Summary",
    "TaskInfo",
    "TitledRun",
    "Trace",
    "check_trace",
    "critical_path",
    "least_nanoseconds",
    "merge_recordings",
    "read_trace",
    "summarize",
    "write_side_by_side",
    "write_trace",
]
