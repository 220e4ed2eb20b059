"""Machines: processors, memories and links, read from TOML profiles.

A policy names no device, but uses the roles `accelerator`, `host` and `weights` (the memory from which weights come).
Every figure of a shipped profile has its source beside it in the file.
"""

from __future__ import annotations

from moesched.machines.machine import (
    ATTENTION,
    ATTENTION_CALLS,
    BY_THEMSELVES,
    CACHE_WRITE,
    FEW_ROWS,
    INTERCONNECT,
    MANY_ROWS,
    PINNED,
    WORK_CLASSES,
    AcceleratorGroup,
    Contention,
    CostPoint,
    Interconnect,
    Link,
    Machine,
    Processor,
    Roles,
    Staging,
    Tier,
    WiredMemory,
)
from moesched.machines.profiles import (
    COST_FORMAT,
    load_machine,
    machine_names,
    parse_machine,
)

__all__ = [
    "ATTENTION",
    "ATTENTION_CALLS",
    "AcceleratorGroup",
    "BY_THEMSELVES",
    "CACHE_WRITE",
    "COST_FORMAT",
    "Contention",
    "CostPoint",
    "FEW_ROWS",
    "INTERCONNECT",
    "Interconnect",
    "Link",
    "MANY_ROWS",
    "Machine",
    "PINNED",
    "Processor",
    "Roles",
    "WORK_CLASSES",
    "Staging",
    "Tier",
    "WiredMemory",
    "load_machine",
    "machine_names",
    "parse_machine",
]
