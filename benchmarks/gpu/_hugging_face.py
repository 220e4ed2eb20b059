"""Names in transformers that depend on its version."""

from __future__ import annotations

from inspect import signature
from typing import Any


def kept(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument of a model's KV cache: `cache`, in older versions `past_key_values`."""
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    return {name: cache}
