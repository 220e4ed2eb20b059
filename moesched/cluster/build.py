"""Build of a node, which decides how it rounds: its processor, its system, and the libraries that multiply.

Nodes that round otherwise route otherwise, and generate different tokens.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from moesched.machines.local import processor_name

Build = dict[str, str]
"""The processor, the system and versions of libraries, by what they are."""

LIBRARIES = ("torch", "mlx")


def this_build() -> Build:
    """This process's build."""
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
    """The differences, with both values; entries of only one of them are not compared."""
    both = [name for name in one if name in other and one[name] != other[name]]
    return [f"{name} {one[name]} and {other[name]}" for name in both]


def library_refusal(device: str, one: Mapping[str, str], other: Mapping[str, str], who: str) -> str | None:
    """The reason to refuse a node whose library differs from that of another node; None to admit it.

    Args:
        device: the run's device.
        who: the other node.
    """
    library = device if device in LIBRARIES else LIBRARIES[0]
    if library not in one or library not in other or one[library] == other[library]:
        return None
    return f"it has {library} {one[library]}, and {who} has {other[library]}: install the same version everywhere"
