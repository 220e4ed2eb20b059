"""Facts about the host, from the operating system: processor, cores, memory, folders and clock."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from moesched.doctor.facts import Caching, ClockFacts, CoreFacts, FolderFacts, MemoryFacts, ProcessorFacts
from moesched.machines.local import this_processor
from moesched.models.gguf.parts import gguf_files, is_gguf
from moesched.system.control_groups import lines_of
from moesched.system.cores import affinity, cpu_quota
from moesched.system.memory import available_memory, total_memory
from moesched.system.plain_text import plain_text

CachingOf = Callable[[Path], Caching]
"""Function that takes a file, and returns the effect on the page cache when the device reads this file.

Raises:
    MoeschedError: the file cannot be read.
"""

PROBE_BYTES = 8192
CLOCK_READINGS = 2_000


def processor_facts() -> ProcessorFacts:
    """Return the facts on this machine's processor."""
    name, _, _ = this_processor().rpartition(", ")
    return ProcessorFacts(name=name, architecture=platform.machine(), flags=_flags())


def _flags() -> list[str]:
    lines = lines_of(Path("/proc/cpuinfo"))
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])


def core_facts() -> CoreFacts:
    """Return the facts on the cores of this process."""
    cores, quota = len(affinity()), cpu_quota()
    return CoreFacts(cores=cores, quota=quota if quota < (os.cpu_count() or cores) else None)


def memory_facts() -> MemoryFacts:
    """Return the facts on this machine's memory and the limits of this process."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MemoryFacts(
        physical=physical,
        limit=min(physical, total_memory()),
        available=available_memory(),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        address_space=_limit(resource.RLIMIT_AS),
    )


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def clock_facts(now: Callable[[], int] = time.monotonic_ns) -> ClockFacts:
    """Read a clock many times, and return whether it goes back and its smallest step.

    Args:
        now: returns the clock's time in nanoseconds.
    """
    readings = [now() for _ in range(CLOCK_READINGS)]
    steps = [later - earlier for earlier, later in pairwise(readings)]
    forward = [step for step in steps if step > 0]
    return ClockFacts(monotonic=min(steps) >= 0, step=min(forward, default=10**9))


def cache_facts(folder: Path, caching_of: CachingOf) -> FolderFacts:
    """Try the cache's folder by writing and reading a small file, which is removed; the folder is made if it is absent.

    Args:
        caching_of: returns, for a file, the value of `FolderFacts.caching`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _small_file(folder) as file:
            caching = caching_of(file)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return FolderFacts(role="cache", path=plain_text(str(folder)), problem=error.strerror or str(error))
    return FolderFacts(role="cache", path=plain_text(str(folder)), free=free, caching=caching)


@contextmanager
def _small_file(folder: Path) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(dir=folder, prefix="doctor-") as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


def mapping_of(place: Path, refusal_of: Callable[[Path], str]) -> str | None:
    """Return why a GPU cannot copy a file from the page cache; empty if it can, None if no file can be tried.

    The trial uses a file of weights in `place`, or else a small new file, which is removed afterwards.

    Args:
        place: a model's folder or file, or any folder.
        refusal_of: tries a file, and returns the reason; empty if a GPU can copy the file.
    """
    weights = weight_files(place)
    try:
        if weights:
            return refusal_of(weights[0])
        with tempfile.TemporaryDirectory(dir=place, prefix="doctor-") as made:
            (file := Path(made) / "file").write_bytes(bytes(PROBE_BYTES))
            return refusal_of(file)
    except OSError:
        return None


def model_facts(model: Path, caching_of: CachingOf) -> FolderFacts:
    """Return whether each file of a model can be read, and the effect of the device's reads on the page cache.

    Args:
        model: a folder, or a GGUF file.
        caching_of: tries the device's reads on a file, and returns their effect, as in `FolderFacts.caching`.
    """
    files = weight_files(model)
    try:
        for file in files if is_gguf(model) else [model / "config.json", *files]:
            with file.open("rb") as opened:
                opened.read(1)
        if not files:
            return FolderFacts(
                role="model", path=plain_text(str(model)), problem="it has no safetensors files"
            )
        caching = caching_of(files[0])
        free = shutil.disk_usage(model).free
    except OSError as error:
        where = f"{Path(error.filename).name}: " if error.filename else ""
        problem = plain_text(f"{where}{error.strerror or error}")
        return FolderFacts(role="model", path=plain_text(str(model)), problem=problem)
    return FolderFacts(role="model", path=plain_text(str(model)), free=free, caching=caching)


def bytes_of_model(model: Path) -> int:
    """Return the total bytes of a model's files of weights; 0 if they cannot be listed."""
    try:
        return sum(file.stat().st_size for file in weight_files(model))
    except OSError:
        return 0


def weight_files(model: Path) -> list[Path]:
    """Return a model's files of weights: the safetensors files of its folder, or all parts of its GGUF file."""
    return gguf_files(model) if is_gguf(model) else sorted(model.glob("*.safetensors"))
