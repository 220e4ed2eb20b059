"""The control groups of Linux that this process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def groups_of(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of this process's group for a controller, such as "cpu", and of each group around it.

    Version 1 has a tree of groups for each controller, version 2 one for all. In a container the tree may begin at the
    process's own group, whose path outside does not exist here.
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
    """Return the lines of a file; none where it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
