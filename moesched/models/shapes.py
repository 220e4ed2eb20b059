"""Configurations of known models by name; no files of the models are needed."""

from __future__ import annotations

from moesched.models.architectures import ARCHITECTURES
from moesched.models.config import ModelConfig

SHAPES: dict[str, ModelConfig] = {
    config.name: config for architecture in ARCHITECTURES.values() for config in architecture.shapes
}
