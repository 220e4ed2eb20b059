"""Reads a model's configuration from a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from moesched.models.architectures import ARCHITECTURES
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile


def read_config(directory: Path | str) -> ModelConfig:
    """The configuration in directory/config.json, of one of the architectures.

    A missing or null setting has Hugging Face's default. Raises BadInput, naming the file, the value and the
    remedy, where the file cannot be read or asks for something that the kernels do not compute.
    """
    file = ConfigFile(Path(directory))
    known = {model_type: each for each in ARCHITECTURES.values() for model_type in each.model_types}
    if file.model_type not in known:
        raise file.unsupported("model_type", file.model_type, f"one of {', '.join(sorted(known))}")
    return known[str(file.model_type)].read(file)
