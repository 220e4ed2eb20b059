"""Facts about this machine that MLX knows, for `moesched doctor`."""

from __future__ import annotations

import platform
from importlib.metadata import version

import mlx.core as mx

from moesched.doctor.facts import MetalFacts

from .machine import recommended_bytes


def metal_facts() -> MetalFacts:
    """Return facts such as MLX's version, the GPU's name, and the most bytes that macOS recommends to wire (lock)."""
    metal = bool(mx.metal.is_available())
    return MetalFacts(
        mlx=version("mlx"),
        metal=metal,
        macos=platform.mac_ver()[0],
        gpu=str(mx.device_info()["device_name"]) if metal else "",
        recommended=recommended_bytes() if metal else None,
        peak=int(mx.get_peak_memory()),
    )
