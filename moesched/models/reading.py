"""Reads a model's configuration from a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from moesched.errors import BadInput
from moesched.models.architectures import ARCHITECTURES
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile


def read_config(directory: Path | str) -> ModelConfig:
    """Read directory/config.json, of any of the architectures.

    A missing or null setting has Hugging Face's default.

    Raises:
        BadInput: the file cannot be read, or asks for a feature that the kernels do not support; the message names
            the file, the value and the remedy.
    """
    file = ConfigFile(Path(directory))
    known = {model_type: each for each in ARCHITECTURES.values() for model_type in each.model_types}
    if file.model_type not in known:
        raise file.unsupported("model_type", file.model_type, f"one of {', '.join(sorted(known))}")
    return known[str(file.model_type)].read(file)


def require_runs(config: ModelConfig) -> None:
    """Raise BadInput where no device has kernels for the model's family or for the storage format of its weights."""
    if not ARCHITECTURES[config.form].runs:
        stored = "" if config.format is None else f", and for weights in {config.format}"
        raise BadInput(
            f"{config.name}: no device has kernels for the family {config.form}{stored}: "
            "use `moesched simulate` or `moesched plan`, or a model of "
            + ", ".join(name for name, each in ARCHITECTURES.items() if each.runs)
        )
