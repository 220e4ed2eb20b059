"""Describes the build of a node: processor, system and numerical libraries, which decide how the node rounds.

Nodes that round differently choose different experts, and generate different tokens.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from moesched.machines.local import processor_name

Build = dict[str, str]
"""Names of the processor and the system, and versions of libraries, by key."""

LIBRARIES = ("torch", "mlx")


def this_build() -> Build:
    """Return the processor, system and library versions of this process."""
    build = {"processor": processor_name()}
    if platform.system() == "Darwin":  # Metal compiles kernels
        build["system"] = f"{platform.system()} {platform.release()}"
    for library in LIBRARIES:
        try:
            build[library] = version(library)
        except PackageNotFoundError:
            continue
    return build


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Describe the entries in which two builds differ, with both values; entries of only one build are left out."""
    both = [name for name in one if name in other and one[name] != other[name]]
    return [f"{name} {one[name]} and {other[name]}" for name in both]


def library_refusal(device: str, one: Mapping[str, str], other: Mapping[str, str], who: str) -> str | None:
    """Return the reason to refuse a node whose library differs from that of another node; None to admit the node.

    Args:
        device: name of the run's device; versions of mlx are compared for the device `mlx`, of torch for all others.
        one: build of the node.
        other: build of a node that has joined.
        who: name of that other node, for the message.
    """
    library = device if device in LIBRARIES else LIBRARIES[0]
    if library not in one or library not in other or one[library] == other[library]:
        return None
    return f"it has {library} {one[library]}, and {who} has {other[library]}: install the same version everywhere"
