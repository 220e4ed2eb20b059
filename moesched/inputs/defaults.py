"""Defaults that Python functions and commands share. This module imports nothing, so that `--help` is fast."""

from __future__ import annotations

MACHINE = "auto"
"""This machine."""

DEVICE = "torch"

NEW_TOKENS = 64
"""Tokens to generate for each prompt, and of a workload of prompts."""

WORKLOAD = "mtbench"
"""The workload to plan for."""

PREVIEW_ACCURACY = 0.8
"""Assumed probability that an expert chosen by the router is predicted.

The next layer's router, applied to this layer's hidden state, predicted about 80 to 90 % of Mixtral 8x7B's experts
(Eliseev and Mazur 2023, speculative loading). Other models may differ; real runs use the model's own previews.
"""

JOIN_SECONDS = 60.0
"""Time limit for all nodes of a cluster to join the launcher."""
