"""Random models that stay in the cache folder: they are large, and each is written once for all benchmarks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.record.benchmark import progress
from moesched.models.config import ModelConfig
from moesched.models.random_model import write_random_model
from moesched.system.cache import cache_folder


def kept_model(shape: ModelConfig | str, path: Path | None = None) -> Path:
    """The folder of a random model, written if it is not there.

    Args:
        shape: a configuration, or a name of `moesched list models`.
        path: where the model lies; by default in the cache folder, by its name.
    """
    path = path or cache_folder() / (shape if isinstance(shape, str) else shape.name)
    if not path.exists():
        progress.print(f"writing {path.name}")
        write_random_model(shape, path)
    return path
