"""Finds and reads the files of the Linux control groups that this process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def groups_of(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folder of this process's control group for a controller, then the folder of each enclosing group.

    Control groups of version 1 have a tree for each controller, version 2 has one tree for all. A container may see
    only the part of the tree below its own group, while /proc gives the group's path in the host's whole tree. The
    folders of that path then do not exist, except the last one that is yielded, the top of the tree that the container
    sees: it is the folder of the process's own group.

    Args:
        controller: name of the controller, such as "cpu".
        root: folder in which /sys and /proc are looked for.
    """
    mounted = root / "sys/fs/cgroup"
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if not controllers:
            tops = [mounted, mounted / "unified"]
        elif controller in controllers.split(","):
            tops = [mounted / controllers, mounted / controller]
        else:
            continue
        for top in dict.fromkeys(tops):
            own = top / path.lstrip("/")
            inside = [own, *own.parents] if ".." not in own.parts else [top]
            yield from (group for group in inside if group.is_relative_to(top))


def lines_of(file: Path) -> list[str]:
    """Return the lines of a file; an empty list if the file cannot be read."""
    try:
        return file.read_text(errors="surrogateescape").splitlines()  # names that are cut within a character
    except OSError:
        return []
